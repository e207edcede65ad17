"""Rotary position embedding and its gradient (Su et al., RoFormer, 2021)."""

from __future__ import annotations

import numpy as np

from fp8kit.arrays import ArrayView
from fp8kit.backends.reference._numpy import Array, Float32, quiet
from fp8kit.backends.reference.sequences import lengths_of


@quiet
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
) -> None:
    """``y = x cos(a) + partner(x) sin(a)``; see ``protocol.Kernels.rope_fwd``."""
    _rotate(x, freqs, y, start_positions, lengths, starts, qkv_format, interleaved, False)


@quiet
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
    """The transposed rotation; see ``protocol.Kernels.rope_bwd``."""
    _rotate(dy, freqs, dx, start_positions, lengths, starts, qkv_format, interleaved, True)


def _rotate(
    x: ArrayView,
    freqs: ArrayView,
    y: ArrayView,
    start_positions: ArrayView | None,
    lengths: ArrayView | None,
    starts: ArrayView | None,
    qkv_format: str,
    interleaved: bool,
    back: bool,
) -> None:
    """y = x rotated by its tokens' angles, or back; features beyond the rotated ones are copied, tokens of no
    sequence 0."""
    rotated = freqs.shape[1]
    cos, sin = _turns(x, freqs, start_positions, starts, qkv_format)
    source, target = x.numpy(), y.numpy()
    first, second = _halves(rotated, interleaved)
    low, high = source[..., first].astype(np.float32), source[..., second].astype(np.float32)
    if back:
        target[..., first] = low * cos[..., first] + high * sin[..., second]
        target[..., second] = high * cos[..., second] - low * sin[..., first]
    else:
        target[..., first] = low * cos[..., first] - high * sin[..., first]
        target[..., second] = high * cos[..., second] + low * sin[..., second]
    if rotated < target.shape[-1]:
        target[..., rotated:] = source[..., rotated:]
    if lengths is not None and starts is not None:
        batch, place = _places(y.shape[0], starts)
        target[(place < 0) | (place >= lengths_of(lengths)[batch])] = 0


def _halves(rotated: int, interleaved: bool) -> tuple[slice, slice]:
    """Indices of the two features of every pair."""
    if interleaved:
        return slice(0, rotated, 2), slice(1, rotated, 2)
    return slice(0, rotated // 2), slice(rotated // 2, rotated)


def _turns(
    x: ArrayView,
    freqs: ArrayView,
    start_positions: ArrayView | None,
    starts: ArrayView | None,
    qkv_format: str,
) -> tuple[Float32, Float32]:
    """cos and sin of every token's angles, float32, broadcastable over x's heads."""
    if starts is not None:
        batch, position = _places(x.shape[0], starts)
        if start_positions is not None:
            position = position + start_positions.numpy()[batch]
    else:
        length, batches = (x.shape[0], x.shape[1]) if qkv_format == "sbhd" else (x.shape[1], x.shape[0])
        start = np.zeros(batches, np.int64) if start_positions is None else start_positions.numpy()
        position = (
            np.arange(length)[:, None] + start if qkv_format == "sbhd" else np.arange(length) + start[:, None]
        )
    table = freqs.numpy()
    inside = (position >= 0) & (position < len(table))
    angles = np.where(inside[..., None], table[np.where(inside, position, 0)], np.float32(np.nan))[
        ..., None, :
    ]
    return np.cos(angles), np.sin(angles)


def _places(tokens: int, starts: ArrayView) -> tuple[Array, Array]:
    """Returns the last sequence that starts at or before each token, and the token's place in it: beyond its
    end for a token of none."""
    first, token = starts.numpy(), np.arange(tokens)
    batch = np.clip(np.searchsorted(first[:-1], token, side="right") - 1, 0, None)
    return batch, token - first[batch]
