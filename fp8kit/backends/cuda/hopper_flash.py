"""Attention by kernels for Hopper's tensor cores (raw_kernels/hopper_flash_fwd.cu, hopper_flash_bwd.cu): the
calls of ``flash`` whose rows see a band of columns and no more. Both directions are deterministic."""

from __future__ import annotations

import math

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda._rows import ceil_div
from fp8kit.backends.cuda.attention_problem import Problem, bhsd
from fp8kit.backends.cuda.structures import Packer, Structure
from fp8kit.backends.cuda.tensor_maps import CODES, tensor_map

CAPABILITY = (9, 0)
DIMS = (64, 128)  # features of a head that are compiled
_SHARED = 227 * 1024
_PANEL = 64  # features that are copied at once
# rows of tiles by features: a forward's of q and of k and v; in backward a block's own, and of q and do where
# the block's are keys
_ROWS, _KEYS, _OWN, _STEP = {64: 192, 128: 128}, 128, 128, {64: 128, 128: 64}
_DOT_THREADS, _VECTOR = 256, 8  # features that a thread multiplies
_ITEM, _CACHED = 2, 32 << 20  # bytes: of an element; of what blocks read that stay in the L2 cache
_WIDEST = 2**29  # of windows: what is wider sees as much
# of the structures Job: a map; an array's place and strides; forward's pointers, and backward's; Grid and
# Scores
_MAP, _ARRAY, _FORWARD, _BACKWARD, _REST = map(Packer, (CODES, "P3q", "Pq", "2Pq", "4q6i2f"))
_ALIGNED = 64


Grid = tuple[int, int, int, int]  # Grid of hopper_flash.cuh


def why_not(problem: Problem, defines: dict[str, str], device: int | None, *views: ArrayView) -> str | None:
    """Why these kernels do not take a problem that ``flash`` takes with ``defines``, None where they do.
    ``device``: None where it is not to be asked; ``views``: the call's arrays."""
    found = []
    if (problem.dim, problem.dim_v) not in [(dim, dim) for dim in DIMS]:
        found.append(f"head_dim {problem.dim}, head_dim_v {problem.dim_v}: both 64 or both 128")
    if defines["KIND"] != "0":
        found.append("more than a band: a mask array, a bias, a further score, dropout or no positive scale")
    if problem.softcap:
        found.append(f"softcap {problem.softcap}")
    if problem.padded or problem.qkv_format == "thd":
        found.append("lengths in cu_seqlens")
    if any(0 in view.strides for view in views):
        found.append("an array that repeats itself")
    if not problem.batch * problem.rows * problem.columns:
        found.append("an empty array")
    if not found and device is not None and launch.capability(device) != CAPABILITY:
        major, minor = launch.capability(device)
        found.append(f"compute capability {major}.{minor}: they are for 9.0")
    return "; ".join(found) or None


def forward(
    problem: Problem,
    q: ArrayView,
    k: ArrayView,
    v: ArrayView,
    o: ArrayView,
    lse: ArrayView,
    defines: dict[str, str],
    stream: int,
) -> None:
    """``flash.forward`` of what ``why_not`` takes."""
    rows = _ROWS[problem.dim]
    job = _maps(problem, (q, rows), (k, _KEYS), (v, _KEYS)) + _arrays(problem, o)
    job += _FORWARD.pack(lse.ptr, problem.heads // problem.groups)
    kernel = launch.kernel("hopper_flash_fwd.cu", "hopper_flash_fwd", q.device.index, **defines)
    grid = _grid(problem, rows, launch.sm_count(q.device.index))
    _launch(kernel, job, problem, grid, 128 + 2 * rows, stream)


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
    dot: int,
    defines: dict[str, str],
    stream: int,
) -> None:
    """``flash.backward`` of what ``why_not`` takes. ``dot``: the address of that part of the workspace."""
    step, blocks = _STEP[problem.dim], launch.sm_count(q.device.index)
    rest = _arrays(problem, o, d_o, dq, dk, dv)
    rest += _BACKWARD.pack(lse.ptr, dot, problem.heads // problem.groups)
    by_keys = _maps(problem, (d_o, step), (q, step), (k, _OWN), (v, _OWN)) + rest
    by_rows = _maps(problem, (d_o, _OWN), (q, _OWN), (k, _OWN), (v, _OWN)) + rest
    dots, keys, rows = (
        launch.kernel("hopper_flash_bwd.cu", f"hopper_flash_bwd_{name}", q.device.index, **defines)
        for name in ("dot", "keys", "queries")
    )
    products = problem.batch * problem.heads * problem.rows * problem.dim
    grid = _grid(problem, _OWN, blocks)
    count = ceil_div(products, _DOT_THREADS * _VECTOR)
    launch.launch(dots, count, _DOT_THREADS, (_job(by_rows, problem, grid),), stream)
    _launch(keys, by_keys, problem, _grid(problem, _OWN, blocks, by_keys=True), 3 * 128, stream)
    _launch(rows, by_rows, problem, grid, 3 * 128, stream)


def _maps(problem: Problem, *boxes: tuple[ArrayView, int]) -> Structure:
    """A ``TensorMap`` of each array (features, rows, heads, batches), so many rows of 64 features at a
    time."""
    packed = Structure()
    row_at, batch_at = (0, 1) if problem.qkv_format == "sbhd" else (1, 0)
    for view, rows in boxes:
        batch, head, row, _ = bhsd(problem.qkv_format, view)
        sizes = view.shape[3], view.shape[row_at], view.shape[2], view.shape[batch_at]
        rest = tensor_map(view.dtype.name, sizes, (row, head, batch), (_PANEL, rows, 1, 1), True)
        packed += _MAP.pack(view.ptr, rest)
    return packed


def _arrays(problem: Problem, *views: ArrayView) -> Structure:
    packed = Structure()
    for view in views:
        batch, head, row, _ = bhsd(problem.qkv_format, view)
        packed += _ARRAY.pack(view.ptr, batch, head, row)
    return packed


def _grid(problem: Problem, rows: int, blocks: int, by_keys: bool = False) -> Grid:
    """Tiles of so many rows of each query head, or of so many keys of each key head; how many heads, heads
    of all batches, and of these at a time. ``blocks``: that run at once."""
    repeat = problem.heads // problem.groups
    heads, length, read = problem.heads, problem.rows, problem.columns / repeat
    if by_keys:
        heads, length, read = problem.groups, problem.columns, problem.rows * repeat
    tiles, pairs = ceil_div(length, rows), heads * problem.batch
    # what is read of them, two arrays, stays in the L2 cache, or four blocks of a head read it at once
    limit, shared = max(1, int(_CACHED / (2 * _ITEM * problem.dim * read))), blocks // 4
    if pairs <= max(limit, shared):
        return tiles, heads, pairs, pairs
    # whole pairs of rounds, there and back, in which all blocks have as much to do under a causal mask
    whole = 2 * blocks // math.gcd(2 * blocks, tiles)
    bundle = max(1, round(limit / whole)) * whole if whole <= max(2 * limit, shared) else limit
    return tiles, heads, pairs, min(pairs, bundle)


def _job(arrays: Structure, problem: Problem, grid: Grid) -> Structure:
    shift = problem.columns - problem.rows if problem.bottom_right else 0
    left, right = min(problem.left, _WIDEST), min(problem.right, _WIDEST)
    span = problem.rows, problem.columns, shift, left, right
    job = arrays + _REST.pack(*grid, *span, problem.heads, problem.scale, problem.scale / math.log(2))
    return job + bytes(-len(job) % _ALIGNED)


def _launch(
    kernel: launch.Kernel, arrays: Structure, problem: Problem, grid: Grid, threads: int, stream: int
) -> None:
    """On a persistent grid."""
    blocks = min(grid[0] * grid[2], launch.sm_count(kernel.device))
    launch.launch(kernel, blocks, threads, (_job(arrays, problem, grid),), stream, _SHARED)
