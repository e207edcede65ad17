"""Attention over keys and values in a cache of pages.

A kernel of our own reads them where they lie (raw_kernels/flash_fwd.cu). What it does not take, and large
problems of many new tokens, which cuDNN is faster at, goes by padded batches in the workspace.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from fp8kit.arrays import ArrayView, Shape, contiguous_strides
from fp8kit.backends.cuda import attention, flash, launch
from fp8kit.backends.cuda.attention_problem import Problem, arranged, problem
from fp8kit.backends.cuda.kv_cache import cache_gather
from fp8kit.backends.protocol import AttentionExtras, AttentionSpec
from fp8kit.errors import BackendError
from fp8kit.formats import DType, uint8

# new tokens up to which reading the cache once is most of the work, which a copy would double
_FEW = 128


class _PagedProblem(NamedTuple):
    """The problem of q and of padded batches, their ``spec``, and the shapes of "k" and "v"."""

    padded: Problem
    spec: Any
    shapes: dict[str, Shape]

    def in_place(self, device: int | None) -> bool:
        """Whether our kernel reads the pages. ``device``: of a ``timed`` call."""
        if flash.why_not(self.padded) is not None:
            return False
        return self.padded.rows <= _FEW or not attention.is_cudnns(self.padded, device)

    def layout(self) -> dict[str, int]:
        """Returns where the padded batches lie in the workspace; "end": the padded call's own."""
        item = 4 if self.padded.dtype == "float32" else 2
        return arranged({name: item * math.prod(shape) for name, shape in self.shapes.items()})


def _call(
    q: Shape, k: Shape, v: Shape, longest: int, dtype: DType, spec: Any, strides: Sequence[Shape]
) -> _PagedProblem:
    """``k``, ``v``: shapes of the caches; ``strides``: q's first."""
    inner = dataclasses.replace(spec, zero_padded=True)
    leading = (longest, q[1]) if spec.qkv_format == "sbhd" else (q[0], longest)
    keys, values = (*leading, *k[2:]), (*leading, *v[2:])
    steps = strides[0], contiguous_strides(keys), contiguous_strides(values)
    return _PagedProblem(problem(q, keys, values, dtype, inner, steps), inner, {"k": keys, "v": values})


def paged_attention_fwd(
    q: ArrayView,
    k_cache: ArrayView,
    v_cache: ArrayView,
    o: ArrayView,
    lse: ArrayView,
    pages: ArrayView,
    longest: int,
    extras: AttentionExtras,
    spec: AttentionSpec,
    workspace: ArrayView | None,
    stream: int,
    timed: bool = False,
) -> None:
    """See ``backends.protocol``. BackendError as ``attention_fwd``."""
    call = _call(q.shape, k_cache.shape, v_cache.shape, longest, q.dtype, spec, (q.strides,))
    device = q.device.index if timed else None
    if call.in_place(device):
        arrays = q, k_cache, v_cache, o, lse
        flash.forward(call.padded, *arrays, extras, workspace, stream, pages=pages)
        return
    places = call.layout()
    if workspace is None or workspace.nbytes < places["end"]:
        got = None if workspace is None else f"{workspace.nbytes} bytes"
        raise BackendError("paged_attention", "workspace", got, f"{places['end']} bytes and more")
    totals = extras.cu_seqlens_kv
    assert totals is not None
    k, v = (
        ArrayView(workspace.ptr + places[name], shape, q.dtype, q.device, workspace)
        for name, shape in call.shapes.items()
    )
    for cache, dense in ((k_cache, k), (v_cache, v)):
        cache_gather(cache, dense, pages, totals, spec.qkv_format, stream)
    end = places["end"]
    rest = ArrayView(workspace.ptr + end, (workspace.nbytes - end,), uint8, q.device, workspace)
    still = timed and not attention.is_cudnns(call.padded, device)
    attention.attention_fwd(q, k, v, o, lse, extras, call.spec, rest, stream, still)


def paged_attention_workspace(
    q: Shape,
    k_cache: Shape,
    v_cache: Shape,
    longest: int,
    dtype: DType,
    spec: AttentionSpec,
    strides: Sequence[Shape],
    timed: bool = False,
) -> int:
    """See ``backends.protocol``. For the current device."""
    call = _call(q, k_cache, v_cache, longest, dtype, spec, strides)
    device = launch.runtime().getDevice() if timed else None
    if call.in_place(device):
        return flash.workspace(call.padded, False)
    still = timed and not attention.is_cudnns(call.padded, device)
    shapes = q, call.shapes["k"], call.shapes["v"]
    steps = strides[0], *map(contiguous_strides, shapes[1:])
    rules: Any = (None, dtype, call.spec, False, False, steps, still)
    return call.layout()["end"] + attention.attention_workspace(*shapes, *rules)
