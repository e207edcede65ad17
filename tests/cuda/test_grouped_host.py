"""Grouped products without a GPU: what the host tells the kernels, carried out in NumPy as the kernels read
it, keeps the contract. So every address, stride and scale's place is right, and every copy begins where
Hopper's copy engine can begin."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fp8kit import arrays, codec
from fp8kit.arrays import CPU, ArrayView
from fp8kit.backends import dispatch
from fp8kit.backends.cuda import hopper_gemm, hopper_grouped, implementation, launch
from fp8kit.backends.cuda.grouped import COUNTER
from fp8kit.backends.registry import CannotTake
from fp8kit.formats import E4M3, float32, int32, uint8
from fp8kit.testing.compare import assert_close
from fp8kit.testing.contract import Case, SampleCall, cases
from tests.support.contract import params
from tests.support.hopper import (
    FORMATS,
    GPU,
    TYPES,
    Emulated,
    box,
    described,
    keep_no_plans,
    map_of,
    memory,
    use_largest_tiles,
)


def groups_of(sizes: Any, total: int, slots: int) -> list[tuple[int, int, int]]:
    """(start, size, rows that it takes up) of each group, and of what is left."""
    found, start = [], 0
    for size in sizes.tolist():
        cover = slots or max(0, min(size, total - start))
        found.append((start, max(0, min(size, cover)), cover))
        start += cover
    return [*found, (start, 0, total - start)]


def hopper(kernel: launch.Kernel, job: bytes) -> None:
    """``hopper_gemm.cu`` with groups, tile by tile."""
    how = dict(kernel.defines)
    high, wide, by_rows, kind = int(how["BM"]), int(how["BN"]), how["GROUPS"] == "rows", how["SCALES"]
    fields = struct.unpack("=" + "Q120s" * 6 + "7Q13q32x", job)
    maps, out_map, pointers, numbers = fields[:8], fields[8:10], fields[12:19], fields[19:]
    (a, a_map, b, b_map, a_lines, a_lines_map, b_lines, b_lines_map) = maps
    a_scale, b_scale, bias, addend, out_at, sizes_at, counter = pointers
    m, n, stride, depths, a_step, b_step, _, _, _, groups, slots, b_group, terms = numbers
    assert not addend
    assert bool(counter) == by_rows
    staged = (not by_rows or wide == 256) and how["T"] != "f32" and stride % 8 == 0
    assert any(out_map[1]) == staged
    if staged:
        name = TYPES[how["T"]].__name__
        whole = name, (n, m, 1 if by_rows else groups), (stride, m * stride), (64, 16, 1)
        assert (out_map[0], described(out_map[1])) == (out_at, whole)
    out = memory(out_at, (m if by_rows else groups * m) * stride, TYPES[how["T"]]).reshape(-1, stride)
    layout, plain = how["LAYOUT"], how["LEFT"] not in FORMATS
    copied = described(a_map)[3][1]  # rows of a in one copy: 64 of a group, in a cluster half a tile's
    assert layout == "tn" or copied == (64 if by_rows else min(high, 128))
    row_step, term_step = (4 if kind == "lines_squares" else 1), (16 if kind == "whole" else 128)
    term_step, deep = 1 if layout == "tn" else term_step, 64 if plain else 128

    def read(at: int, tensor_map: bytes, down: bool, name: str, *where: int) -> Any:
        """A tile's values, (rows, terms): ``where`` is the first term and row, how many rows, the group."""
        term, first, rows, *group = where
        if down:  # the map's rows are terms
            boxes = [box(at, tensor_map, first + j, term, *group).T for j in range(0, rows, 64)]
        else:
            step = described(tensor_map)[3][1]
            boxes = [box(at, tensor_map, term, first + j, *group) for j in range(0, rows, step)]
        whole = np.concatenate(boxes)
        return (whole if plain else codec.decode(whole, FORMATS[name])).astype(np.float64)

    sizes = memory(sizes_at, groups, np.int32)
    for e, (start, size, cover) in enumerate(groups_of(sizes, m if by_rows else terms, slots)):
        if e == groups and not by_rows:
            break
        first, end = (start // row_step * row_step, start + cover) if by_rows else (0, m)
        begin = 0 if by_rows else start // term_step * term_step
        count = (depths if size else 0) if by_rows else -(-(start + size - begin) // deep) if size else 0
        for row in range(first, end, high):
            # of a group's rows those that are multiplied, 64 at a time; where there are none, nothing
            there = min(high, -(-(start + size - row) // 64) * 64) if by_rows else high
            for column in range(0, n, wide):
                total = np.zeros((high, wide))
                for term in range(begin, begin + deep * count * (there > 0), deep):
                    x = read(a, a_map, layout == "tn", how["LEFT"], term, row, there)
                    x = np.pad(x, ((0, high - there), (0, 0)), constant_values=np.nan)
                    w = read(b, b_map, layout != "nt", how["RIGHT"], term, column, wide, e if by_rows else 0)
                    if not by_rows:
                        own = np.arange(term, term + deep)
                        inside = (own >= start) & (own < start + size)
                        x, w = np.where(inside, x, 0), np.where(inside, w, 0)
                    part = x @ w.T
                    if kind != "whole":
                        part *= box(a_lines, a_lines_map, row, term // 128).T
                    if kind == "lines_lines":
                        part *= box(b_lines, b_lines_map, column, term // 128)
                    elif kind == "lines_squares":
                        at = e * b_group + column // 128 * b_step + term // 128
                        part *= memory(b_scale + 4 * at, 1, np.float32)
                    total += part
                for i in range(max(row, start if by_rows else 0), min(row + high, end)):
                    columns = np.arange(column, min(column + wide, n))
                    values = total[i - row, : len(columns)]
                    if kind == "whole" and not plain:
                        left = memory(a_scale + 4 * a_step * i, 1, np.float32)
                        at = (e if e < groups else 0) * b_group
                        right = memory(b_scale + 4 * at, n if b_step else 1, np.float32)
                        values = values * left * (right[columns] if b_step else right)
                    zero = i >= start + size if by_rows else not size
                    if bias and not zero:
                        values = values + memory(bias, groups * n, TYPES[how["T"]])[e * n + columns]
                    out[i if by_rows else e * m + i, columns] = np.where(zero, 0, values)


def counter_of(job: bytes) -> int:
    """Where blocks count tiles of rows: a pointer behind six maps and six others."""
    return int(struct.unpack_from("=Q", job, 6 * 128 + 6 * 8)[0])


def plain(kernel: launch.Kernel, sizes_at: int, bias: int, out_at: int, problem: bytes) -> None:
    """``grouped.cu``, group by group."""
    how, fields = dict(kernel.defines), struct.unpack("=2Q8q2Q8q6q", problem)
    groups, rows, columns, depth, slots, by_depth = fields[20:]
    dtype = TYPES[how["T"]]
    matrices = groups if by_depth else 1
    out = memory(out_at, matrices * rows * columns, dtype).reshape(matrices, rows, columns)

    def values(of: tuple[int, ...], kind: str, e: int, count: int, k: slice) -> np.ndarray[Any, Any]:
        data, scales, step_i, step_k, step_e, tile_i, tile_k, scale_i, scale_k, scale_e = of
        i, terms = np.arange(count)[:, None], np.arange(k.start, k.stop)[None]
        at = e * step_e + i * step_i + terms * step_k
        if not at.size:
            return np.zeros(at.shape)
        stored = memory(data, int(at.max()) + 1, np.uint8 if kind in FORMATS else TYPES[kind])[at]
        if kind not in FORMATS:
            return np.asarray(stored.astype(np.float64))
        place = e * scale_e + i // tile_i * scale_i + terms // tile_k * scale_k
        scale = memory(scales, int(place.max()) + 1, np.float32)[place]
        return np.asarray(codec.decode(stored, FORMATS[kind]).astype(np.float64) * scale)

    sizes = memory(sizes_at, groups, np.int32)
    for e, (start, size, cover) in enumerate(groups_of(sizes, depth if by_depth else rows, slots)):
        own = slice(start, start + size) if by_depth else slice(0, depth)
        if by_depth and e < groups:
            left = values(fields[:10], how["LEFT"], 0, rows, own)
            out[e] = left @ values(fields[10:20], how["RIGHT"], 0, columns, own).T
        elif not by_depth:
            out[0, start : start + cover] = 0
            if size:
                left = values(fields[:10], how["LEFT"], 0, rows, own)[start : start + size]
                made = left @ values(fields[10:20], how["RIGHT"], e, columns, own).T
                made += memory(bias, groups * columns, dtype).reshape(groups, -1)[e] if bias else 0.0
                out[0, start : start + size] = made


@pytest.mark.parametrize("case", list(cases("grouped_fp8_gemm")), ids=str)
def test_the_model_of_groups_is_the_contracts_product(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever Hopper's kernel says how it sums: what the contract asks it for lies within twice the tensor
    cores' allowance, which is for cuts that cancel, of float64's product: of five terms they need not."""
    monkeypatch.setattr(launch, "capability", lambda index: hopper_gemm.CAPABILITY)
    call = SampleCall(case, dispatch.kernels(CPU), CPU)
    how = hopper_grouped.sums(SimpleNamespace(**call.arguments))
    if how is None:
        kind = case.options.get("tiles", ((0, 0), (0, 0)))
        assert case.options["m"] == 0 or kind not in (((0, 0),) * 2, ((1, 0),) * 2, ((1, 128), (128, 128)))
        return
    assert case.test.bits is not None
    found = case.test.bits(how, dispatch.kernels(CPU), SimpleNamespace(**call.arguments))
    assert bool(found) is not case.options.get("bias", False)
    before = SimpleNamespace(**{**vars(call.before), "device": GPU})
    want, slack = case.test.expected(before, {})["out"]
    for got in found.values():
        assert_close("out", got, want, case.options.get("dtype", float32).name, 2 * slack)


NAMES = ("grouped_gemm", "grouped_fp8_gemm")
CASES = [case for name in NAMES for case in params(cases(name))]
FP8 = params(cases("grouped_fp8_gemm"))


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_for_every_chip_is_told_where_things_are(case: Case) -> None:
    case.run(Emulated("grouped.cu", NAMES, {"grouped.cu": plain}), CPU)  # type: ignore[arg-type]


@pytest.mark.parametrize("large", [False, True], ids=["chosen", "large"])
@pytest.mark.parametrize("case", CASES)
def test_hoppers_kernel_is_told_where_things_are(
    case: Case, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the tiles that are chosen for so small products, and by the largest."""
    use_largest_tiles(monkeypatch) if large else keep_no_plans(monkeypatch)
    monkeypatch.setattr(launch, "capability", lambda index: hopper_gemm.CAPABILITY)
    monkeypatch.setattr(launch, "sm_count", lambda index: 132)
    for module in (hopper_gemm, hopper_grouped):
        monkeypatch.setattr(module, "tensor_map", map_of)
    cleared = list[ArrayView]()
    monkeypatch.setattr(arrays, "fill_zero", lambda view, stream: cleared.append(view))
    launched = list[str]()

    def carried_out(kernel: launch.Kernel, *arguments: Any) -> None:
        launched.append(kernel.source)
        if dict(kernel.defines).get("GROUPS") == "rows":
            view = cleared.pop()
            assert (view.ptr, view.nbytes, view.device) == (counter_of(arguments[0]), COUNTER, GPU)
        (hopper if kernel.source == "hopper_gemm.cu" else plain)(kernel, *arguments)

    sources = dict.fromkeys(("hopper_gemm.cu", "grouped.cu"), carried_out)
    kernels = Emulated("hopper_gemm.cu", NAMES, sources)
    vars(kernels)["grouped_gemm_workspace"] = implementation("grouped_gemm_workspace")
    try:
        case.run(kernels, CPU)  # type: ignore[arg-type]
        if case.kernel == "grouped_gemm" and launched:  # float32, and rows that no copy reads, go elsewhere
            whole = all(case.options[name] % 8 == 0 for name in ("n", "k") if name in case.options)
            ours = whole and case.options.get("dtype", float32) is not float32
            assert set(launched) == {"hopper_gemm.cu" if ours else "grouped.cu"}
    except CannotTake:
        kind = case.options.get("tiles", ((0, 0), (0, 0)))
        assert case.options["m"] == 0 or kind not in (((0, 0),) * 2, ((1, 0),) * 2, ((1, 128), (128, 128)))
    else:
        assert kernels.taken


@pytest.mark.parametrize(("address", "rows", "along"), [(4, 32, "terms"), (4, 32, "rows"), (0, 33, "rows")])
def test_hopper_refuses_scales_of_rows_that_lie_badly(
    address: int, rows: int, along: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads those of two columns at once."""
    monkeypatch.setattr(launch, "capability", lambda index: hopper_gemm.CAPABILITY)
    monkeypatch.setattr(launch, "sm_count", lambda index: 132)
    for module in (hopper_gemm, hopper_grouped):
        monkeypatch.setattr(module, "tensor_map", map_of)
    monkeypatch.setattr(hopper_grouped, "_plan", hopper_grouped._plan.__wrapped__)
    stack, m, n, k = (2,) if along == "rows" else (), 64, 32, 128
    out = ArrayView(1 << 20, (m, n) if along == "rows" else (2, m, n), float32, GPU)
    a, b = ArrayView(1 << 22, (m, k), uint8, GPU), ArrayView(1 << 24, (*stack, rows, k), uint8, GPU)
    scales = [
        ArrayView(1 << 26, (m,), float32, GPU),
        ArrayView((1 << 28) + address, (*stack, rows), float32, GPU),
    ]
    sizes = ArrayView(1 << 30, (2,), int32, GPU)
    with pytest.raises(CannotTake, match=r"b_scale_inv.*multiples of 8"):
        hopper_grouped.grouped_fp8_gemm(
            a, b, out, sizes, along, 0, None, E4M3, E4M3, *scales, (1, 0), (1, 0), False, None, 0
        )
