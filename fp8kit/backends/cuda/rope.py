"""Rotary position embedding and its gradient."""

from __future__ import annotations

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda._rows import address, kernel, whole_warps
from fp8kit.backends.cuda.sequences import grid_of, steps_of

_THREADS = 256


def rope_fwd(
    x: ArrayView,
    freqs: ArrayView,
    y: ArrayView,
    start_positions: ArrayView | None,
    lengths: ArrayView | None,
    starts: ArrayView | None,
    qkv_format: str,
    interleaved: bool,
    stream: int,
    back: bool = False,
) -> None:
    """See ``backends.protocol``. ``back``: the transposed rotation."""
    positions, rotated = freqs.shape
    heads, dim = x.shape[-2:]

    tokens = x.shape[qkv_format.index("t" if starts is not None else "s")]
    batches = x.shape[qkv_format.index("b")] if starts is None else starts.shape[0] - 1
    lanes = whole_warps(max(rotated // 2, dim - rotated), _THREADS)
    args = (
        x.ptr,
        freqs.ptr,
        y.ptr,
        *map(address, (start_positions, lengths, starts)),
        tokens,
        batches,
        positions,
        rotated,
        heads,
        dim,
        *steps_of(x, qkv_format),
        *steps_of(y, qkv_format),
        int(interleaved),
        int(back),
    )
    rows = batches * tokens if starts is None else tokens
    block = lanes, min(heads, _THREADS // lanes)
    launch.launch(kernel("rope.cu", "rope", x), grid_of(rows), block, args, stream)


def rope_bwd(
    dy: ArrayView,
    freqs: ArrayView,
    dx: ArrayView,
    start_positions: ArrayView | None,
    lengths: ArrayView | None,
    starts: ArrayView | None,
    qkv_format: str,
    interleaved: bool,
    stream: int,
) -> None:
    """See ``backends.protocol``."""
    rope_fwd(dy, freqs, dx, start_positions, lengths, starts, qkv_format, interleaved, stream, back=True)
