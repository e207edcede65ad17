"""Attention by kernels of our own that never write the scores (raw_kernels/flash_fwd.cu, flash_bwd.cu; on
Hopper, for what those take, ``hopper_flash``'s).

They are compiled for head sizes, dtype and kind of rules, never for a length, so a length that was not seen
before costs nothing. Every direction is deterministic: each element of a result has one thread, which adds in
a fixed order. Dropout draws the unfused path's words, so those two may take a call's two directions.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import attention_rules, hopper_flash, launch, unfused
from fp8kit.backends.cuda._rows import ceil_div
from fp8kit.backends.cuda.attention_problem import Problem, arranged, bhsd
from fp8kit.backends.cuda.structures import Packer, Structure
from fp8kit.backends.protocol import AttentionExtras, Lying
from fp8kit.errors import BackendError
from fp8kit.formats import DTYPES
from fp8kit.lru import memoized

NAME = "flash"
# (features of q and k, features of v) that are compiled (the ``variants`` of flash_fwd.cu)
_COMPILED = ((64, 64), (128, 128), (192, 128), (256, 256))
_WARPS, _TILE = 4, 64
_VECTOR, _ITEM = 16, 2  # bytes read at a time, and of an element
_LONGEST = 2**28  # positions, and sums of them and of windows, count in 32 bits
_DOT_THREADS, _DOT_ROWS = 256, 8  # a row a warp
# of flash.cuh's structures: an array; what follows the arrays forward, and backward
_ARRAY, _FORWARD, _BACKWARD = Packer("P3q"), Packer("P4q"), Packer("2P5q")
_PAGES = Packer("P3q")
_NO_PAGES = _PAGES.pack(0, 0, 0, 0)


class Shape(NamedTuple):
    """What is compiled and launched for a problem: features ``d``, ``d_v``; ``rows``, ``columns`` of a
    forward's tiles; dynamic shared memory of forward and backward in bytes; ``defines`` of
    backward's kernels, ``forward_defines`` of forward's."""

    d: int
    d_v: int
    rows: int
    columns: int
    forward: int
    backward: int
    defines: dict[str, str]
    forward_defines: dict[str, str]


def why_not(problem: Problem, dbias: bool = False) -> str | None:
    """Why these kernels do not take a problem, None where they do. ``dbias``: whether backward makes the
    bias's gradient."""
    found = []
    if problem.dtype not in ("bfloat16", "float16"):
        found.append(f"dtype {problem.dtype}: tensor cores take bfloat16 and float16")
    for name, dim in {"head_dim": problem.dim, "head_dim_v": problem.dim_v}.items():
        if dim % 8 or dim > _COMPILED[-1][0]:
            found.append(f"{name} {dim}: multiples of 8 up to {_COMPILED[-1][0]}")
    if dbias:
        found.append(f"bias {problem.bias!r} with a gradient: only the unfused path makes it")
    longest = max(problem.rows, problem.columns, *problem.tokens)
    if longest >= _LONGEST:
        found.append(f"a sequence of {longest}, or so many tokens: less than 2^28")
    for name, strides in zip("qkv", problem.strides, strict=False):
        if _ITEM * (strides[0] | strides[1] | strides[2]) % _VECTOR:
            found.append(f"strides {strides} of {name}: multiples of {_VECTOR} bytes")
    return "; ".join(found) or None


@functools.lru_cache(256)
def shape(dim: int, dim_v: int, dtype: str, kind: int, paged: bool = False, capped: bool = False) -> Shape:
    """Returns the kernels for such heads and rules (``KIND`` of flash.cuh): see ``Shape``. ``paged``:
    forward's over a cache of pages; ``capped``: those with a cap on the scores."""
    d, d_v = next(pair for pair in _COMPILED if dim <= pair[0] and dim_v <= pair[1])
    narrow = d <= 128
    step, stages = 64 if narrow and kind < 2 else 32, 2 if narrow else 1
    rows, columns = 16 * _WARPS * (2 if d_v <= 128 and not paged else 1), 32 if capped else step
    defines = {"T": launch.type_name(DTYPES[dtype]), "D": str(d), "DV": str(d_v), "KIND": str(kind)}
    defines |= {"CAP": "1"} if capped else {}
    forward = _ITEM * (rows * d + 2 * columns * (d + d_v))
    backward = _ITEM * (_TILE + stages * step) * (d + d_v)
    return Shape(d, d_v, rows, columns, forward, backward, defines, {**defines, "PAGED": str(int(paged))})


def variants(dim: int, dtype: str, arch: str) -> list[tuple[str, dict[str, str]]]:
    """Returns (source, defines) of the kernels that a training on devices of ``arch`` needs, with dropout and
    without; none for heads that these kernels do not take."""
    if dim % 8 or dim > _COMPILED[-1][0]:
        return []
    found = []
    for kind in (0, 1):
        about = shape(dim, dim, dtype, kind)
        if arch == "sm_90a" and not kind and dim in hopper_flash.DIMS:
            found += [(f"hopper_flash_{way}.cu", about.defines) for way in ("fwd", "bwd")]
        else:
            found += [("flash_fwd.cu", about.forward_defines), ("flash_bwd.cu", about.defines)]
    return found


def _shape(problem: Problem, paged: bool = False) -> Shape:
    general = problem.masked or problem.bias != "no_bias" or problem.softmax_type != "vanilla"
    with np.errstate(all="ignore"):
        positive = np.float32(problem.scale) > 0
    kind = int(problem.dropout > 0) if positive and not general else 2
    capped = problem.softcap > 0
    if (paged or capped) and kind:  # dropout is rare there: one kernel for all but the plain rules
        kind = 2
    return shape(problem.dim, problem.dim_v, problem.dtype, kind, paged, capped)


def on_hopper(problem: Problem, device: int) -> bool:
    """Whether those for Hopper take a problem on a device."""
    repeats = not all(map(all, problem.strides))
    return not repeats and _why_not_hopper(problem, device) is None


def _why_not_hopper(problem: Problem, device: int) -> str | None:
    return why_not(problem) or hopper_flash.why_not(problem, _shape(problem).defines, device)


def kernels(problem: Problem, device: int) -> str:
    """Returns which kernels take a problem on a device, in words; of one that none takes, why."""
    why = _why_not_hopper(problem, device)
    return "its kernels for Hopper" if why is None else f"its kernels for any chip ({why})"


@memoized("flash attention: workspaces")
def _layout(problem: Problem, backward: bool) -> dict[str, int]:
    sizes = {"dot": 4 * problem.batch * problem.heads * problem.rows} if backward else {}
    if backward and problem.softmax_type == "learnable":
        sizes["doffset"] = unfused.offset_workspace(problem)
    return arranged(sizes)


def workspace(problem: Problem, backward: bool) -> int:
    """Bytes of workspace of a call."""
    return _layout(problem, backward)["end"]


def forward(
    problem: Problem,
    q: ArrayView,
    k: ArrayView,
    v: ArrayView,
    o: ArrayView,
    lse: ArrayView,
    extras: AttentionExtras,
    workspace: ArrayView | None,
    stream: int,
    lying: Lying | None = None,
    pages: ArrayView | None = None,
) -> None:
    """``protocol.attention_fwd``; with ``lying`` ``packed_attention_fwd``; with ``pages``
    ``paged_attention_fwd``, k and v being the caches."""
    about, places = _shape(problem, pages is not None), _NO_PAGES
    tiles = ceil_div(problem.rows, about.rows)
    if pages is None:
        arrays = _arrays(problem.qkv_format, q, k, v, o)
        if hopper_flash.why_not(problem, about.defines, q.device.index, q, k, v) is None:
            hopper_flash.forward(problem, q, k, v, o, lse, about.defines, stream)
            return
    else:  # a cache's pages take the place of batches
        first, last = _arrays(problem.qkv_format, q), _arrays(problem.qkv_format, o)
        arrays = first + _arrays("bshd", k, v) + last
        places = _PAGES.pack(pages.ptr, k.shape[0], pages.shape[1], k.shape[1])
    job = arrays + _FORWARD.pack(lse.ptr, problem.heads // problem.groups, problem.dim, problem.dim_v, tiles)
    kernel = launch.kernel("flash_fwd.cu", "flash_fwd", q.device.index, **about.forward_defines)
    grid, rules = tiles * problem.heads * problem.batch, attention_rules.pack(problem, extras, lying)
    launch.launch(kernel, grid, 32 * _WARPS, (job + rules + places,), stream, about.forward)


def backward(
    problem: Problem,
    d_o: ArrayView,
    q: ArrayView,
    k: ArrayView,
    v: ArrayView,
    o: ArrayView,
    lse: ArrayView,
    dq: ArrayView,
    dk: ArrayView,
    dv: ArrayView,
    doffset: ArrayView | None,
    extras: AttentionExtras,
    workspace: ArrayView | None,
    stream: int,
    lying: Lying | None = None,
) -> None:
    """``protocol.attention_bwd``, but for the bias's gradient, or with ``lying`` ``packed_attention_bwd``."""
    about, layout, repeat = _shape(problem), _layout(problem, True), problem.heads // problem.groups
    if layout["end"] and (workspace is None or workspace.nbytes < layout["end"]):
        got = None if workspace is None else f"{workspace.nbytes} bytes"
        raise BackendError("attention", "workspace", got, f"{layout['end']} bytes")
    start = 0 if workspace is None else workspace.ptr
    arrays = _arrays(problem.qkv_format, d_o, q, k, v, o, dq, dk, dv)
    if hopper_flash.why_not(problem, about.defines, q.device.index, q, k, v, d_o) is None:
        views = d_o, q, k, v, o, lse, dq, dk, dv
        hopper_flash.backward(problem, *views, start + layout["dot"], about.defines, stream)
        return
    rules = attention_rules.pack(problem, extras, lying)

    def run(function: str, tiles: int, blocks: int, threads: int, shared: int) -> None:
        sizes = (problem.batch, repeat, problem.dim, problem.dim_v, tiles)
        job = arrays + _BACKWARD.pack(lse.ptr, start + layout["dot"], *sizes) + rules
        kernel = launch.kernel("flash_bwd.cu", function, q.device.index, **about.defines)
        launch.launch(kernel, blocks, threads, (job,), stream, shared)

    lines = problem.batch * problem.heads * problem.rows
    blocks = min(ceil_div(lines, _DOT_ROWS), 2**20)
    run("flash_bwd_dot", 0, blocks, _DOT_THREADS, 0)
    rows, keys = ceil_div(problem.rows, _TILE), ceil_div(problem.columns, _TILE)
    threads = 32 * _WARPS * (2 if about.d > 128 else 1)
    run("flash_bwd_keys", keys, keys * problem.groups * problem.batch, threads, about.backward)
    run("flash_bwd_queries", rows, rows * problem.heads * problem.batch, 32 * _WARPS, about.backward)
    if doffset is not None:
        unfused.offset_gradient(problem, d_o, o, lse, doffset, extras, start + layout["doffset"], stream)


def _arrays(qkv_format: str, *views: ArrayView) -> Structure:
    """``Array`` structures of flash.cuh. BackendError where one cannot be read 16 bytes at a time."""
    packed, places = Structure(), 0
    for view in views:
        batch, head, row, _ = bhsd(qkv_format, view)
        places |= view.ptr | _ITEM * (batch | head | row)
        packed += _ARRAY.pack(view.ptr, batch, head, row)
    if places % _VECTOR:
        wanted = f"multiples of {_VECTOR} bytes"
        raise BackendError("attention", "arrays", "misaligned addresses or strides", wanted)
    return packed
