"""Attention by kernels for Hopper's tensor cores (raw_kernels/hopper_flash_fwd.cu, hopper_flash_bwd.cu): the
calls of ``flash`` whose rows see a band of columns and no more."""

from __future__ import annotations

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import attention_rules, launch
from fp8kit.backends.cuda._rows import ceil_div
from fp8kit.backends.cuda.attention_problem import Problem, bhsd
from fp8kit.backends.cuda.structures import Packer, Structure
from fp8kit.backends.cuda.tensor_maps import CODES, tensor_map
from fp8kit.backends.protocol import AttentionExtras

CAPABILITY = (9, 0)
DIMS = (64, 128)  # features of a head that are compiled
_SHARED = 227 * 1024
_KEYS, _PANEL = 128, 64  # rows of a tile of keys; features that are copied at once
_ROWS = {64: 192, 128: 128}  # of a forward's tile of queries
_BUNDLE = 32 << 20  # bytes of k and v that stay in the L2 cache
# of the structures Job: a map; an array's place and strides; what follows
_MAP, _ARRAY = Packer(CODES), Packer("P3q")
_FORWARD, _ALIGNED = Packer("P5q"), 64


def why_not(problem: Problem, defines: dict[str, str], device: int | None) -> str | None:
    """Why these kernels do not take a problem that ``flash`` takes with ``defines``, None where they do.
    ``device``: None where it is not to be asked."""
    found = []
    if (problem.dim, problem.dim_v) not in [(dim, dim) for dim in DIMS]:
        found.append(f"head_dim {problem.dim}, head_dim_v {problem.dim_v}: both 64 or both 128")
    if defines["KIND"] != "0":
        found.append("more than a band: a mask array, a bias, a further score, dropout or no positive scale")
    if problem.padded or problem.qkv_format == "thd":
        found.append("lengths in cu_seqlens")
    if any(0 in strides for strides in problem.strides):
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
    extras: AttentionExtras,
    defines: dict[str, str],
    stream: int,
) -> None:
    """``flash.forward`` of what ``why_not`` takes."""
    rows = _ROWS[problem.dim]
    boxes = zip((q, k, v), (rows, _KEYS, _KEYS), strict=True)
    job = Structure()
    for view, box in boxes:
        job += _map(problem, view, box)
    job += _array(problem, o)
    grid = _grid(problem, ceil_div(problem.rows, rows), problem.heads, problem.columns)
    job += _FORWARD.pack(lse.ptr, problem.heads // problem.groups, *grid)
    _launch("hopper_flash_fwd", 4 if problem.dim == 64 else 3, job, problem, extras, q, grid, defines, stream)


def _map(problem: Problem, view: ArrayView, box: int) -> Structure:
    """A ``TensorMap`` of an array (features, rows, heads, batches), ``box`` rows of 64 features at a time."""
    row_at, batch_at = (0, 1) if problem.qkv_format == "sbhd" else (1, 0)
    batch, head, row, _ = bhsd(problem.qkv_format, view)
    sizes = view.shape[3], view.shape[row_at], view.shape[2], view.shape[batch_at]
    rest = tensor_map(view.dtype.name, sizes, (row, head, batch), (_PANEL, box, 1, 1), True)
    return _MAP.pack(view.ptr, rest)


def _array(problem: Problem, view: ArrayView) -> Structure:
    batch, head, row, _ = bhsd(problem.qkv_format, view)
    return _ARRAY.pack(view.ptr, batch, head, row)


def _grid(problem: Problem, tiles: int, heads: int, length: int) -> tuple[int, int, int, int]:
    """``Grid`` of hopper_flash.cuh: ``tiles`` of each of ``heads``, whose blocks read ``length`` rows of two
    arrays."""
    pairs = heads * problem.batch
    shared = problem.heads // problem.groups if heads == problem.heads else 1
    bundle = _BUNDLE // (4 * length * problem.dim) * shared
    return tiles, heads, pairs, max(1, min(pairs, bundle))


def _launch(
    function: str,
    groups: int,
    job: Structure,
    problem: Problem,
    extras: AttentionExtras,
    like: ArrayView,
    grid: tuple[int, int, int, int],
    defines: dict[str, str],
    stream: int,
) -> None:
    """``groups``: warpgroups of a block."""
    job += attention_rules.pack(problem, extras)
    job += bytes(-len(job) % _ALIGNED)
    kernel = launch.kernel(f"{function}.cu", function, like.device.index, **defines)
    blocks = min(grid[0] * grid[2], launch.sm_count(like.device.index))
    launch.launch(kernel, blocks, 128 * groups, (job,), stream, _SHARED)
