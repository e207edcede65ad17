"""xIELU and its gradients."""

from __future__ import annotations

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda._rows import BLOCKS, address, ceil_div, kernel
from fp8kit.errors import BackendError

_ELEMENTS = 2048  # of a block, one round of its threads


def _sum_blocks(size: int) -> int:
    """Blocks of the gradient, each of which writes two partial sums."""
    return max(1, min(BLOCKS, ceil_div(size, _ELEMENTS)))


def xielu_fwd(
    x: ArrayView,
    bias: ArrayView | None,
    alpha_p: ArrayView,
    alpha_n: ArrayView,
    y: ArrayView,
    params: tuple[float, ...],
    stream: int,
) -> None:
    """See ``backends.protocol``."""
    sizes = x.size, max(x.shape[1], 1)
    arguments = (x.ptr, address(bias), alpha_p.ptr, alpha_n.ptr, y.ptr, *sizes, *map(float, params))
    launch.launch(kernel("xielu.cu", "xielu_fwd", x), ceil_div(x.size, _ELEMENTS), 256, arguments, stream)


def xielu_bwd(
    dy: ArrayView,
    x: ArrayView,
    bias: ArrayView | None,
    alpha_p: ArrayView,
    alpha_n: ArrayView,
    dx: ArrayView,
    dalpha_p: ArrayView,
    dalpha_n: ArrayView,
    params: tuple[float, ...],
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """See ``backends.protocol``. BackendError for a missing workspace."""
    if workspace is None:
        raise BackendError("xielu_bwd", "workspace", None, f"{xielu_bwd_workspace(*x.shape)} bytes")
    blocks, partial = _sum_blocks(x.size), workspace.ptr
    numbers, sizes = (alpha_p.ptr, alpha_n.ptr), (x.size, max(x.shape[1], 1))
    arguments = (dy.ptr, x.ptr, address(bias), *numbers, dx.ptr, partial, *sizes, *map(float, params))
    launch.launch(kernel("xielu.cu", "xielu_bwd", x), blocks, 256, arguments, stream)
    arguments = (partial, *numbers, dalpha_p.ptr, dalpha_n.ptr, blocks)
    launch.launch(kernel("xielu.cu", "xielu_sums", x), 1, 256, arguments, stream)


def xielu_bwd_workspace(rows: int, columns: int) -> int:
    """See ``backends.protocol``."""
    return 8 * _sum_blocks(rows * columns)
