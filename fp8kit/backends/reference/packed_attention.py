"""Attention over sequences that lie one after the other: made padded batches, and packed again."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from fp8kit.arrays import ArrayView, as_view
from fp8kit.backends.protocol import AttentionExtras, AttentionSpec, Lying
from fp8kit.backends.reference.attention import attention_bwd, attention_fwd
from fp8kit.backends.reference.sequences import pack_sequences, unpack_sequences


class _PaddedBatches:
    """The padded batches of a call."""

    def __init__(self, lying: Lying, extras: AttentionExtras, spec: Any) -> None:
        assert extras.cu_seqlens_q is not None and extras.cu_seqlens_kv is not None
        self.queries = extras.cu_seqlens_q, lying.starts_q
        self.keys = extras.cu_seqlens_kv, lying.starts_kv
        self.longest = {"q": lying.longest_q, "kv": lying.longest_kv}
        self.extras = extras
        self.spec = dataclasses.replace(spec, qkv_format="bshd", zero_padded=True)

    def empty(self, view: ArrayView, side: str) -> ArrayView:
        """Memory for the padded form of tokens (t, heads, features)."""
        batches = self.queries[0].shape[0] - 1
        return as_view(np.empty((batches, self.longest[side], *view.shape[1:]), view.dtype.numpy))

    def unpacked(self, view: ArrayView, side: str) -> ArrayView:
        """Returns the padded form of tokens."""
        tokens = np.ascontiguousarray(view.numpy()).reshape(view.shape[0], -1)
        dense = self.empty(view, side)
        rows = dense.reshape(*dense.shape[:2], tokens.shape[1])
        unpack_sequences(as_view(tokens), rows, *self._places(side), 0)
        return dense

    def pack(self, dense: ArrayView, view: ArrayView, side: str) -> None:
        """Tokens from their padded form."""
        made = np.empty((view.shape[0], dense.shape[2] * dense.shape[3]), view.dtype.numpy)
        pack_sequences(dense.reshape(*dense.shape[:2], made.shape[1]), as_view(made), *self._places(side), 0)
        view.numpy()[...] = made.reshape(view.shape)

    def _places(self, side: str) -> tuple[ArrayView, ArrayView]:
        return self.queries if side == "q" else self.keys


def packed_attention_fwd(
    q: ArrayView,
    k: ArrayView,
    v: ArrayView,
    o: ArrayView,
    lse: ArrayView,
    lying: Lying,
    extras: AttentionExtras,
    spec: AttentionSpec,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """See ``protocol.Kernels.packed_attention_fwd``."""
    call = _PaddedBatches(lying, extras, spec)
    layers = call.unpacked(q, "q"), call.unpacked(k, "kv"), call.unpacked(v, "kv")
    dense = call.empty(o, "q")
    attention_fwd(*layers, dense, lse, extras, call.spec, None, stream)
    call.pack(dense, o, "q")


def packed_attention_bwd(
    do: ArrayView,
    q: ArrayView,
    k: ArrayView,
    v: ArrayView,
    o: ArrayView,
    lse: ArrayView,
    dq: ArrayView,
    dk: ArrayView,
    dv: ArrayView,
    dbias: ArrayView | None,
    doffset: ArrayView | None,
    lying: Lying,
    extras: AttentionExtras,
    spec: AttentionSpec,
    deterministic: bool,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """See ``protocol.Kernels.packed_attention_bwd``."""
    call = _PaddedBatches(lying, extras, spec)
    dense_dq, dense_dk, dense_dv = call.empty(dq, "q"), call.empty(dk, "kv"), call.empty(dv, "kv")
    attention_bwd(
        call.unpacked(do, "q"),
        call.unpacked(q, "q"),
        call.unpacked(k, "kv"),
        call.unpacked(v, "kv"),
        call.unpacked(o, "q"),
        lse,
        dense_dq,
        dense_dk,
        dense_dv,
        dbias,
        doffset,
        extras,
        call.spec,
        deterministic,
        None,
        stream,
    )
    call.pack(dense_dq, dq, "q")
    call.pack(dense_dk, dk, "kv")
    call.pack(dense_dv, dv, "kv")
