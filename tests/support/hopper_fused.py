"""Hopper's FP8 product with an epilogue (hopper_epilogue.cuh) carried out in NumPy, with the lanes and warps
of the kernel, on what the host tells it."""

from __future__ import annotations

import re
import struct
from typing import Any, NamedTuple

import numpy as np
import pytest

from fp8kit import arrays, codec, formats
from fp8kit.arrays import CPU
from fp8kit.backends import dispatch
from fp8kit.backends.activation import ACTIVATIONS
from fp8kit.backends.cuda import hopper_fused, hopper_gemm, launch
from fp8kit.formats import E4M3, E5M2
from fp8kit.raw_kernels import manifest
from fp8kit.testing.contract.casts import scale_of
from tests.support.hopper import FORMATS, TYPES, box, described, map_of, memory

NAMES = ("fp8_gemm_act", "fp8_gemm_act_bwd", "fp8_gemm_cast", "fp8_gemm_lines")
Array = Any
LANES = np.arange(32)
G, T = LANES % 8, LANES // 8
# the header's selectors of bytes: of odd lanes and even ones, of the second two of four and the first
_CODE = manifest.text("hopper_fragments.cuh").partition("transpose_octets")[2]
ODD, EVEN, SECOND, FIRST = (int(found, 16) for found in re.findall(r"0x[0-9A-F]{4}\b", _CODE))
# of 16 rows by 32 columns: a lane's rows and columns, [lane, h, i]
ROW = (G[:, None, None] + 8 * np.arange(2)[:, None]) + 0 * np.arange(8)
COLUMN = 8 * T[:, None, None] + np.arange(8) + 0 * np.arange(2)[:, None]


class Cast(NamedTuple):
    """Struct Cast of rows.cuh."""

    q: int
    q_t: int
    scale: int
    scale_inv: int
    amax: int
    q_rows: int
    q_columns: int
    q_stride: int
    t_rows: int
    t_columns: int
    t_stride: int
    is_e5m2: int
    known_amax: int
    epsilon: float
    power_2: int


# --- instructions of a warp: arrays whose first dimension is the lane ---------------------------------------


def byte_perm(x: Array, y: Array, selector: int) -> Array:
    """__byte_perm of words as four bytes each."""
    both = np.concatenate([x, y], axis=1)
    return both[:, [selector >> 4 * j & 7 for j in range(4)]]


def chosen(by: Array, x: Array, y: Array) -> Array:
    return np.where(by.reshape(-1, *[1] * (x.ndim - 1)) != 0, x, y)


def transpose_octet(x: list[Array]) -> None:
    for w in (0, 1):
        for step, upper, lower in ((1, ODD, EVEN), (2, SECOND, FIRST)):
            other = x[w][LANES ^ step]
            x[w] = chosen(LANES & step, byte_perm(x[w], other, upper), byte_perm(x[w], other, lower))
    other = chosen(LANES & 4, x[0], x[1])[LANES ^ 4]
    x[0], x[1] = chosen(LANES & 4, other, x[0]), chosen(LANES & 4, x[1], other)


def store(address: int, values: Array) -> None:
    """One lane's store: at a multiple of its bytes."""
    assert address % values.size == 0
    memory(address, values.size, np.uint8)[:] = values


def write_codes(cast: Cast, v: Array, scale: Array, row: int, column: int, q_end: int, t_end: int) -> None:
    """``v``: [lane, h, i]; ``row``: the first of the sixteen."""
    with np.errstate(over="ignore", invalid="ignore"):
        codes = codec.encode(v.astype(np.float32) * scale[:, :, None], E5M2 if cast.is_e5m2 else E4M3)
    halves = [[codes[:, h, :4], codes[:, h, 4:]] for h in (0, 1)]
    for h in (0, 1):
        for lane in LANES if cast.q else ():
            i, j = row + int(G[lane]) + 8 * h, column + 8 * int(T[lane])
            if i < cast.q_rows and j < q_end:
                store(cast.q + i * cast.q_stride + j, np.concatenate([w[lane] for w in halves[h]]))
    if not cast.q_t:
        return
    for half in halves:
        transpose_octet(half)
    for lane in LANES:
        i = column + 8 * int(T[lane]) + int(G[lane])
        if i < t_end and row < cast.t_columns:
            sixteen = np.concatenate([word[lane] for half in halves for word in half])
            store(cast.q_t + i * cast.t_stride + row, sixteen)


def sum_columns(v: Array) -> Array:
    """``v``: [piece, lane, h, i]; the sums of 64 rows."""
    sums = np.zeros((32, 8), np.float32)
    for piece, h in np.ndindex(4, 2):
        sums = sums + v[piece, :, h].astype(np.float32)
    for step in (4, 2, 1):
        sums = sums + sums[LANES ^ step]
    return sums[::8].reshape(32)


# --- the kernel ---------------------------------------------------------------------------------------------


def called(kernel: str, *inputs: Any, results: Any, rest: Any) -> None:
    """A kernel of the CPU engine, on arrays of the host."""
    views = [None if x is None else arrays.as_view(x) for x in (*inputs, *results)]
    getattr(dispatch.kernels(CPU), kernel)(*views, *rest)


def finished(epilogue: str, act: str, product: Array, x: Array | None, bias: Array | None) -> Array:
    """What the element functions make of a tile: ``product``, T."""
    if act == "identity":
        return product
    if epilogue == "forward":
        y = np.empty((len(product), product.shape[1] // ACTIVATIONS[act].parts), product.dtype)
        called("act_fwd", product, bias, results=(y,), rest=(None, None, act, (), 0))
        return y
    assert x is not None
    dx = np.empty_like(x)
    called("act_bwd", product, x, bias, results=(dx,), rest=(None, None, None, None, act, (), None, 0))
    return dx


def parts_of(act: str) -> int:
    """Halves of columns that an activation's input has."""
    return ACTIVATIONS[act].parts if act in ACTIVATIONS else 1


def together(how: dict[str, str]) -> int:
    """Blocks of a cluster."""
    at = hopper_gemm.Tiling(int(how["BM"]), int(how["BN"]))
    return hopper_gemm.blocks_together(int(how["PROMOTE"]), how["GROUPS"], at, how["EPILOGUE"])


def tile_sums(how: dict[str, str], fields: Any, row: int, column: int) -> tuple[Array, list[int]]:
    """The sums of a tile, in float64, before scales of tensors or rows; the first columns of its halves."""
    a, a_map, b, b_map, a_lines, a_lines_map, *_ = fields[:8]
    (m, n, _, depths), b_step, squares = fields[19:23], fields[24], fields[13]
    high, wide = int(how["BM"]), int(how["BN"])
    halves = parts_of(how["ACT"]) if how["EPILOGUE"] == "forward" else 1
    firsts, total = [column + half * (n // 2) for half in range(halves)], np.zeros((high, wide))
    step = 8 * together(how)
    rows = min(high, -(-(m - row) // step) * step)
    a_map = a_map if rows == high else fields[11]
    share = described(a_map)[3][1]  # rows that a block of a cluster copies
    assert share * together(how) == rows
    rest = np.full((high - rows, 128), 0x7B, np.uint8)  # what was there: large numbers of either format
    for term in range(0, 128 * depths, 128):
        boxes = [box(a, a_map, term, row + first) for first in range(0, rows, share)]
        left = codec.decode(np.concatenate([*boxes, rest]), FORMATS[how["LEFT"]]).astype(np.float64)
        right = np.concatenate([box(b, b_map, term, first) for first in firsts])
        assert right.shape == (wide, 128)
        part = left @ codec.decode(right, FORMATS[how["RIGHT"]]).astype(np.float64).T
        if how["SCALES"] == "lines_squares":
            square = memory(squares + 4 * (column // 128 * b_step + term // 128), 1, np.float32)
            part *= box(a_lines, a_lines_map, row, term // 128).T * square
        total += part
    return total, firsts


JOB = "=" + "Q120s" * 6 + "7Q13q" + "5Q7qQdq" + "4Qq3d40x"


def hopper(kernel: launch.Kernel, job: bytes) -> None:
    """``hopper_gemm.cu`` with an epilogue, tile by tile, warp by warp."""
    how = dict(kernel.defines)
    assert kernel.defines in manifest.source("hopper_gemm.cu").variants
    assert len(job) % 64 == 0
    high, wide, epilogue, act = int(how["BM"]), int(how["BN"]), how["EPILOGUE"], how["ACT"]
    fields = struct.unpack(JOB, job)
    a_scale, b_scale, bias_at, addend, out, sizes_at, counter = fields[12:19]
    m, n, stride, _, a_step, b_step, tall, across, band, *groups = fields[19:32]
    cast, (x_at, shift_at, y_at, sums_at, features, *_) = Cast(*fields[32:47]), fields[47:]
    across *= together(how)
    assert not out or described(fields[9])[1:3] == ((n, m, 1), (stride, m * stride))
    assert (sizes_at, counter) == (0, 0)
    assert groups == [0, 0, 0, together(how)]
    assert 1 <= band <= tall
    dtype = np.dtype(TYPES[how["T"]])
    parts = parts_of(act)
    halves, results = (parts, 1) if epilogue == "forward" else (1, parts)
    assert n == features * halves
    known = cast.known_amax and epilogue != "lines"
    scale = memory(cast.scale, 1, np.float32) if cast.scale else np.ones(1, np.float32)
    if known:
        largest = (E5M2 if cast.is_e5m2 else E4M3).max
        scale = scale_of(memory(cast.known_amax, 1, np.float32), largest, bool(cast.power_2), cast.epsilon)
    if (cast.q or cast.q_t) and epilogue != "lines":
        memory(cast.scale_inv, 1, np.float32)[:] = np.float32(1) / scale

    def matrix(address: int, columns: int) -> Array:
        return memory(address, m * columns, dtype).reshape(m, columns) if address else None

    x, y = matrix(x_at, parts * features), matrix(y_at, results * features)
    most = np.zeros(32, np.float32)
    for row, column in np.ndindex(tall, across):
        row, column = row * high, column * (wide // halves)
        if column >= features:  # the second of a cluster's tiles
            continue
        total, of_halves = tile_sums(how, fields, row, column)
        # the product as T, zeros outside
        count = min(high, m - row)
        own = np.concatenate([first + np.arange(wide // halves) for first in of_halves])
        there = np.arange(wide) % (wide // halves) + column < features
        own = own[there]
        values = total[:count, there]
        if how["SCALES"] == "whole":
            lines = row + np.arange(count) if a_step else np.zeros(count, int)
            values = values * memory(a_scale, lines.max() + 1, np.float32)[lines, None]
            columns = own if b_step else 0 * own
            values = values * memory(b_scale, columns.max() + 1, np.float32)[columns]
        if bias_at:
            values = values + memory(bias_at, n, dtype)[own].astype(np.float64)
        if addend:
            values = values + memory(addend, m * stride, dtype).reshape(m, stride)[
                row : row + count, own
            ].astype(np.float64)
        values = values.astype(np.float32).astype(dtype)
        if out:
            memory(out, m * stride, dtype).reshape(m, stride)[row : row + count, own] = values
        # what is made of it
        inner = own[: len(own) // halves] % features
        shifts = [part * features + inner for part in range(parts)]
        bias = memory(shift_at, parts * features, dtype)[np.concatenate(shifts)] if shift_at else None
        old = None if x is None else x[row : row + count, np.concatenate(shifts)]
        made = finished(epilogue, act, values, old, bias).reshape(count, results, -1)
        if y is not None:
            for part in range(results):
                y[row : row + count, part * features + inner] = made[:, part]
        whole = np.zeros((high, results, wide // halves), np.float32)
        whole[:count, :, : made.shape[2]] = made
        for first in range(0, high, 64):  # a multiplier's 64 rows
            blocks = whole[first : first + 64].reshape(4, 16, results, -1)
            at = row + first + 16 * np.arange(4)
            for line in range(wide // 128 if epilogue == "lines" else 0):
                for warp in range(4):
                    v = [blocks[warp, :, 0][ROW, 128 * line + 32 * k + COLUMN] for k in range(4)]
                    write_line(cast, v, m, int(at[warp]), column + 128 * line, dtype)
            for k in range(wide // halves // 32 if epilogue != "lines" else 0):
                for part in range(results):
                    v = np.stack([blocks[w, :, part][ROW, 32 * k + COLUMN] for w in range(4)])
                    most = np.fmax(most, np.abs(v).max(axis=(0, 2, 3)))
                    to = part * features + column + 32 * k
                    left = min(32, features - column - 32 * k)
                    if sums_at and row + first < m and left > 0:
                        width = results * features
                        place = sums_at + 4 * ((row + first) // 64 * width + to)
                        memory(place, left, np.float32)[:] = sum_columns(v)[:left]
                    last = part == results - 1
                    ends = (cast.q_columns, cast.t_rows) if last else (features, features)
                    for warp in range(4 if cast.q or cast.q_t else 0):
                        scales = np.full((32, 2), scale[0], np.float32)
                        write_codes(cast, v[warp], scales, int(at[warp]), to, *ends)
    if cast.amax and epilogue != "lines":
        kept = memory(cast.amax, 1, np.float32)
        kept[:] = max(kept[0], most.max())


def write_line(cast: Cast, v: list[Array], m: int, row: int, column: int, dtype: Any) -> None:
    """128 columns of sixteen rows: [lane, h, i] of four times 32."""
    top = np.max([np.abs(part).max(axis=2) for part in v], axis=0).astype(np.float32)
    for step in (8, 16):
        top = np.maximum(top, top[LANES ^ step])
    largest = (E5M2 if cast.is_e5m2 else E4M3).max
    rule = largest, bool(cast.power_2), cast.epsilon, formats.dtype(dtype).max
    scale = scale_of(top.reshape(-1), *rule).reshape(32, 2)
    for lane, h in np.ndindex(32, 2):
        i = row + lane % 8 + 8 * h
        if lane < 8 and i < cast.q_rows and column < cast.q_columns:
            value = np.float32(1) / scale[lane, h] if i < m else 1
            memory(cast.scale_inv + 4 * (column // 128 * cast.q_rows + i), 1, np.float32)[:] = value
    for k, part in enumerate(v):
        write_codes(cast, part, scale, row, column + 32 * k, cast.q_columns, 0)


def sum_partials(kernel: launch.Kernel, partial: int, out: int, second: int, blocks: int, n: int) -> None:
    """``dropout.cu``, whose order of sums is another."""
    dtype = TYPES[dict(kernel.defines)["T"]]
    assert not second
    memory(out, n, dtype)[:] = memory(partial, blocks * n, np.float32).reshape(blocks, n).sum(0)


def as_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are made as on a Hopper."""
    monkeypatch.setattr(launch, "capability", lambda index: hopper_gemm.CAPABILITY)
    monkeypatch.setattr(launch, "sm_count", lambda index: 132)
    monkeypatch.setattr(hopper_gemm, "tensor_map", map_of)
    for module in (hopper_fused, hopper_gemm):
        monkeypatch.setattr(module, "planned", hopper_gemm.planned.__wrapped__)
