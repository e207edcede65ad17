"""Attention over sequences that lie one after the other, by kernels of our own that read and write them where
they lie (raw_kernels/flash_fwd.cu, flash_bwd.cu)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from fp8kit.arrays import ArrayView, Shape
from fp8kit.backends.cuda import attention, flash
from fp8kit.backends.cuda.attention_problem import Problem, ordered, problem
from fp8kit.backends.protocol import AttentionExtras, AttentionSpec, Lying
from fp8kit.formats import DType

# padded batches of so many times the tokens cost more than cuDNN gains
_SPARSE = 4


def _padded(q: Shape, k: Shape, v: Shape, sizes: tuple[int, int, int], dtype: DType, spec: Any) -> Problem:
    """The problem of the padded batches."""
    batch, rows, columns = sizes
    shapes = (batch, rows, *q[1:]), (batch, columns, *k[1:]), (batch, columns, *v[1:])
    return problem(*shapes, dtype, dataclasses.replace(spec, qkv_format="bshd", zero_padded=True))


def _problem(
    q: Shape,
    k: Shape,
    v: Shape,
    sizes: tuple[int, int, int],
    dtype: DType,
    spec: AttentionSpec,
    strides: Sequence[Shape],
) -> Problem:
    places = tuple([ordered("thd", steps) for steps in strides])
    padded = _padded(q, k, v, sizes, dtype, spec)
    return padded._replace(qkv_format="thd", strides=places, tokens=(q[0], k[0]))


def _of(q: ArrayView, k: ArrayView, v: ArrayView, lying: Lying, spec: AttentionSpec) -> Problem:
    """The problem of a call."""
    sizes = lying.starts_q.shape[0] - 1, lying.longest_q, lying.longest_kv
    return _problem(q.shape, k.shape, v.shape, sizes, q.dtype, spec, (q.strides, k.strides, v.strides))


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
    """See ``backends.protocol``."""
    flash.forward(_of(q, k, v, lying, spec), q, k, v, o, lse, extras, workspace, stream, lying)


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
    lying: Lying,
    extras: AttentionExtras,
    spec: AttentionSpec,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """See ``backends.protocol``."""
    arrays = do, q, k, v, o, lse, dq, dk, dv
    flash.backward(_of(q, k, v, lying, spec), *arrays, None, extras, workspace, stream, lying)


def packed_attention_workspace(
    q: Shape,
    k: Shape,
    v: Shape,
    sizes: tuple[int, int, int],
    dtype: DType,
    spec: AttentionSpec,
    backward: bool,
    strides: Sequence[Shape],
) -> int:
    """See ``backends.protocol``. Large problems are cuDNN's, by padded batches, where it runs and those are
    not mostly padding."""
    about = _problem(q, k, v, sizes, dtype, spec, strides)
    if flash.why_not(about) is not None:
        return 0
    padded = _padded(q, k, v, sizes, dtype, spec)
    sparse = padded.batch * (padded.rows + padded.columns) > _SPARSE * sum(about.tokens)
    if attention.is_cudnns(padded) and not sparse:
        return 0
    return 1 + flash.workspace(about, backward)
