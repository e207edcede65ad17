"""What the memory-bound kernels share on the host: kernel look-up, casts as bytes, sums over rows."""

from __future__ import annotations

import numpy as np

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda.structures import Packer
from fp8kit.backends.protocol import Cast
from fp8kit.errors import BackendError
from fp8kit.formats import E4M3, E5M2, Format

# How many blocks fill the largest GPUs a few times over. Fixed, so that sums are cut up the same way on every
# device.
BLOCKS = 1056
TYPE_CODES = {"float32": 0, "bfloat16": 1, "float16": 2}

_CAST = Packer("5P7qPdq")  # raw_kernels/rows.cuh, struct Cast
_NO_CAST = bytes(_CAST.size)


def kernel(source: str, function: str, like: ArrayView, **defines: str) -> launch.Kernel:
    """``function`` of ``source`` for ``like``'s device and element type."""
    return launch.kernel(source, function, like.device.index, T=launch.type_name(like.dtype), **defines)


def address(view: ArrayView | None) -> int:
    """Returns the view's address, 0 for an absent one."""
    return 0 if view is None else view.ptr


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return -(-a // b)


def whole_warps(jobs: int, most: int = 256) -> int:
    """Threads of a block for so many jobs: whole warps, one at least."""
    return min(most, max(32, ceil_div(jobs, 32) * 32))


def scaling(cast: Cast) -> tuple[int, int, float, int]:
    """Returns what kernels are told of a cast's scale: where the amax goes, and, with a rule, where it is,
    and the rule."""
    if cast.rule is None:
        return address(cast.amax), 0, 0.0, 0
    return 0, address(cast.amax), cast.rule.epsilon, int(cast.rule.power_2)


def cast_bytes(cast: Cast | None, amax: ArrayView | None) -> bytes:
    """Returns the kernels' ``Cast`` argument; ``amax`` is the one beside an absent cast. BackendError for
    formats other than E4M3 and E5M2, and for a cast by blocks."""
    if cast is None:
        return _NO_CAST if amax is None else _CAST.pack(0, 0, 0, 0, amax.ptr, *(0,) * 8, 0.0, 0)
    if cast.format != E4M3 and cast.format != E5M2:
        raise BackendError("cast", "format", cast.format, "E4M3 or E5M2")
    q, q_t = cast.q, cast.q_t
    found, *known = scaling(cast)
    return _CAST.pack(
        address(q),
        address(q_t),
        address(cast.scale),
        cast.by_tensor("cast").ptr,
        found,
        *((0, 0, 0) if q is None else (*q.shape, q.strides[0])),
        *((0, 0, 0) if q_t is None else (*q_t.shape, q_t.strides[0])),
        int(cast.format == E5M2),
        *known,
    )


def lines_bytes(format: Format, q: ArrayView, scale_inv: ArrayView, power_2: bool, epsilon: float) -> bytes:
    """Returns the same for codes with a scale for every line, which follows from its values. BackendError as
    ``cast_bytes``."""
    if format != E4M3 and format != E5M2:
        raise BackendError("cast", "format", format, "E4M3 or E5M2")
    places = q.ptr, 0, 0, scale_inv.ptr, 0, *q.shape, q.strides[0], 0, 0, 0
    return _CAST.pack(*places, int(format == E5M2), 0, epsilon, int(power_2))


def covered(cast: Cast | None, rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns that a kernel must walk to write a (rows, columns) result and its cast's padding."""
    if cast is not None and cast.q is not None:
        rows, columns = max(rows, cast.q.shape[0]), max(columns, cast.q.shape[1])
    if cast is not None and cast.q_t is not None:
        rows, columns = max(rows, cast.q_t.shape[1]), max(columns, cast.q_t.shape[0])
    return rows, columns


def sum_partials(partial: int, blocks: int, out: ArrayView, second: ArrayView | None, stream: int) -> None:
    """Column sums of the float32 partial sums at address ``partial``, (blocks, 1 or 2, N), into ``out`` and
    ``second``, (N,) each."""
    columns, arrays = out.size, 1 if second is None else 2
    arguments = (partial, out.ptr, address(second), blocks, columns)
    grid = ceil_div(columns, 32), arrays
    launch.launch(kernel("dropout.cu", "sum_partials", out), grid, (32, 16), arguments, stream)


def _column_blocks(rows: int, columns: int) -> tuple[int, int, int]:
    """(blocks over columns, rows a block, blocks over rows) of ``column_sums``."""
    across = ceil_div(columns, 256)
    down = max(1, min(BLOCKS // max(across, 1), ceil_div(rows, 32)))
    tall = max(8, ceil_div(ceil_div(rows, down), 8) * 8)
    return across, tall, ceil_div(rows, tall)


def column_sums_bytes(rows: int, columns: int) -> int:
    """Bytes of workspace of ``column_sums`` with an ``out``."""
    return _column_blocks(rows, columns)[2] * columns * 4


def drawn(p: float, rng: ArrayView) -> tuple[int, int, float, int]:
    """Returns what kernels are told of random words: address of the generator's state, threshold of a kept
    word, factor of what is kept, and address of the number of the part that the state names, 0 where it names
    none."""
    part = rng.ptr + 16 if rng.size == 3 else 0
    return rng.ptr, int(p * 2.0**32), float(np.float32(1 / (1 - p))), part


def column_sums(
    x: ArrayView,
    dx: ArrayView | None,
    out: ArrayView | None,
    rng: int,
    threshold: int,
    factor: float,
    part: int,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """dx = x behind dropout's mask (``rng`` = 0: none; see ``drawn``), out = its column sums. x,
    dx: h (M, N); out: h (N,); either may be None."""
    if out is not None and workspace is None:
        raise BackendError("column sums", "workspace", None, f"{column_sums_bytes(*x.shape)} bytes")
    partial = 0 if out is None else address(workspace)
    rows, columns = x.shape
    across, tall, down = _column_blocks(rows, columns)
    sizes = rows, columns, tall, max(across, 1)
    arguments = (x.ptr, address(dx), partial, rng, *sizes, threshold, factor, part)
    launch.launch(kernel("dropout.cu", "column_sums", x), across * down, (32, 8), arguments, stream)
    if out is not None:
        sum_partials(partial, down, out, None, stream)
