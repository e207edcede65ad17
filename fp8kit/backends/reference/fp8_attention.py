"""Attention in FP8: decoded operands through ``quantized_attention.py``, results rounded."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from fp8kit.arrays import ArrayView, as_view
from fp8kit.backends.protocol import AttentionExtras, AttentionSpec
from fp8kit.backends.reference import quantized_attention
from fp8kit.backends.reference._numpy import Float32, quiet
from fp8kit.backends.reference.quantize import table32
from fp8kit.backends.reference.quantized_attention import Rounded
from fp8kit.formats import Format
from fp8kit.quantization import Quantizer


def _decoded(codes: ArrayView, scale_invs: ArrayView, i: int, fmt: Format) -> Float32:
    """Returns an operand's values, (b, h, s, d). ``scale_invs``: its is the i-th."""
    return table32(fmt)[codes.numpy()] * scale_invs.numpy()[i]  # type: ignore[no-any-return]


def _rounded(arrays: list[Float32], how: Quantizer) -> list[Float32]:
    """Values of the quantizer's format with one scale for all of them."""
    amax = max(np.fmax.reduce(np.abs(x), axis=None, initial=0) for x in arrays)
    by = Rounded.of(how, amax=amax)
    return [by.rounded(x) for x in arrays]


def _transposed(x: Float32) -> ArrayView:
    """(b, h, s, d) as a view of (b, s, h, d)."""
    return as_view(x.transpose(0, 2, 1, 3))


def _in_batches(spec: AttentionSpec) -> Any:
    """Returns the spec of those views."""
    return dataclasses.replace(spec, qkv_format="bshd", zero_padded=True)  # type: ignore[type-var]


@quiet
def fp8_attention_fwd(
    q: ArrayView,
    k: ArrayView,
    v: ArrayView,
    scale_invs: ArrayView,
    o: ArrayView,
    lse: ArrayView,
    extras: AttentionExtras,
    spec: AttentionSpec,
    p: Quantizer,
    out: Quantizer,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """See ``Kernels.fp8_attention_fwd``."""
    queries, keys, values = (
        _transposed(_decoded(x, scale_invs, i, p.format)) for i, x in enumerate((q, k, v))
    )
    made = np.empty(o.shape, np.float32)
    quantized_attention.quantized_attention_fwd(
        queries, keys, values, _transposed(made), lse, extras, _in_batches(spec), p, None, None, 0
    )
    (o.numpy()[...],) = _rounded([made], out)


@quiet
def fp8_attention_bwd(
    do: ArrayView,
    q: ArrayView,
    k: ArrayView,
    v: ArrayView,
    scale_invs: ArrayView,
    o: ArrayView,
    lse: ArrayView,
    dq: ArrayView,
    dk: ArrayView,
    dv: ArrayView,
    extras: AttentionExtras,
    spec: AttentionSpec,
    p: Quantizer,
    out: Quantizer,
    ds: Quantizer,
    dqkv: Quantizer,
    groups: tuple[int, int, int],
    deterministic: bool,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """See ``Kernels.fp8_attention_bwd``."""
    upstream = _transposed(_decoded(do, scale_invs, 0, ds.format))
    queries, keys, values = (
        _transposed(_decoded(x, scale_invs, i + 1, p.format)) for i, x in enumerate((q, k, v))
    )
    (given,) = _rounded([o.numpy()], out)
    made = [np.empty(x.shape, np.float32) for x in (dq, dk, dv)]
    dqueries, dkeys, dvalues = map(_transposed, made)
    quantized_attention.quantized_attention_bwd(
        upstream,
        queries,
        keys,
        values,
        _transposed(given),
        lse,
        upstream,
        queries,
        keys,
        dqueries,
        dkeys,
        dvalues,
        None,
        None,
        extras,
        _in_batches(spec),
        p,
        ds,
        None,
        None,
        0,
    )
    views = dq, dk, dv
    for group in sorted(set(groups)):
        own = [i for i in range(3) if groups[i] == group]
        for i, results in zip(own, _rounded([made[i] for i in own], dqkv), strict=True):
            views[i].numpy()[...] = results
