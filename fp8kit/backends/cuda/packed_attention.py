"""Attention over sequences that lie one after the other.

Kernels of our own read and write them where they lie (raw_kernels/flash_fwd.cu, flash_bwd.cu). What those do
not take, and large problems, which cuDNN is faster at, goes by padded batches in the workspace.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from fp8kit.arrays import ArrayView, Shape
from fp8kit.backends.cuda import attention, flash, launch
from fp8kit.backends.cuda.attention_problem import Problem, arranged, ordered, problem
from fp8kit.backends.cuda.sequences import pack_heads, unpack_heads
from fp8kit.backends.protocol import AttentionExtras, AttentionSpec, Lying
from fp8kit.errors import BackendError
from fp8kit.formats import DType, uint8

# padded batches of so many times the tokens cost more than cuDNN gains
_SPARSE = 4
_FORWARD, _BACKWARD = ("q", "k", "v", "o"), ("do", "q", "k", "v", "o", "dq", "dk", "dv")
_KEYS = ("k", "v", "dk", "dv")


class _PackedProblem(NamedTuple):
    """The problem as it ``lies``, and that of the ``padded`` batches, with their ``spec`` and shapes."""

    lies: Problem
    padded: Problem
    spec: Any
    shapes: dict[str, Shape]

    def in_place(self, gradients: bool, device: int | None) -> bool:
        """Whether our kernels do a direction where the sequences lie. ``gradients``: whether those of a bias
        or of further scores are wanted, which are made of padded batches. ``device``: of a ``timed`` call."""
        if gradients or flash.why_not(self.lies) is not None:
            return False
        padding = self.padded.batch * (self.padded.rows + self.padded.columns)
        return padding > _SPARSE * sum(self.lies.tokens) or not attention.is_cudnns(self.padded, device)

    def still_timed(self, device: int | None) -> bool:
        """``timed`` of the padded batches' call: one that has got its graphs needs no second look."""
        return device is not None and not attention.is_cudnns(self.padded, device)

    def layout(self, backward: bool) -> dict[str, int]:
        """Returns where the padded batches lie in the workspace; "end": the padded call's own."""
        item = 4 if self.padded.dtype == "float32" else 2
        names = _BACKWARD if backward else _FORWARD
        return arranged({name: item * _size(self.shapes[name]) for name in names})


def _size(shape: Shape) -> int:
    batch, rows, heads, features = shape
    return batch * rows * heads * features


def _call(
    q: Shape,
    k: Shape,
    v: Shape,
    sizes: tuple[int, int, int],
    dtype: DType,
    spec: Any,
    strides: Sequence[Shape],
) -> _PackedProblem:
    batch, rows, columns = sizes
    inner = dataclasses.replace(spec, qkv_format="bshd", zero_padded=True)
    shapes = {"q": (batch, rows, *q[1:]), "k": (batch, columns, *k[1:]), "v": (batch, columns, *v[1:])}
    padded = problem(shapes["q"], shapes["k"], shapes["v"], dtype, inner)
    places = tuple([ordered("thd", steps) for steps in strides])
    lies = padded._replace(qkv_format="thd", strides=places, tokens=(q[0], k[0]))
    shapes |= {f"d{name}": shape for name, shape in shapes.items()}
    shapes |= dict.fromkeys(("o", "do"), (batch, rows, q[1], v[2]))
    return _PackedProblem(lies, padded, inner, shapes)


def _call_of(q: ArrayView, k: ArrayView, v: ArrayView, lying: Lying, spec: AttentionSpec) -> _PackedProblem:
    sizes = lying.starts_q.shape[0] - 1, lying.longest_q, lying.longest_kv
    return _call(q.shape, k.shape, v.shape, sizes, q.dtype, spec, (q.strides, k.strides, v.strides))


def in_place(
    q: Shape, k: Shape, v: Shape, sizes: tuple[int, int, int], dtype: DType, spec: AttentionSpec
) -> bool:
    """Whether a call without gradients of a bias or of further scores is done where its sequences lie; as
    ``packed_attention_workspace``."""
    return _call(q, k, v, sizes, dtype, spec, ()).in_place(False, None)


class _Padded:
    """The padded batches of a call, in its workspace."""

    def __init__(
        self,
        call: _PackedProblem,
        backward: bool,
        like: ArrayView,
        lying: Lying,
        extras: AttentionExtras,
        workspace: ArrayView | None,
        stream: int,
    ) -> None:
        places = call.layout(backward)
        if workspace is None or workspace.nbytes < places["end"]:
            got = None if workspace is None else f"{workspace.nbytes} bytes"
            raise BackendError("packed_attention", "workspace", got, f"{places['end']} bytes and more")
        self.call, self.like, self.extras, self.stream = call, like, extras, stream
        self.lying, self.places, self.start = lying, places, workspace.ptr
        rest = workspace.nbytes - places["end"]
        self.workspace = ArrayView(workspace.ptr + places["end"], (rest,), uint8, workspace.device, workspace)

    def view(self, name: str) -> ArrayView:
        """Padded batches (b, s, heads, features)."""
        like, at = self.like, self.start + self.places[name]
        return ArrayView(at, self.call.shapes[name], like.dtype, like.device, self.workspace)

    def unpacked(self, name: str, tokens: ArrayView) -> ArrayView:
        """``view`` with the tokens' values."""
        view = self.view(name)
        unpack_heads(tokens, view, *self._sums(name), self.stream)
        return view

    def pack(self, name: str, tokens: ArrayView) -> None:
        """Write tokens from the padded batches."""
        pack_heads(self.view(name), tokens, *self._sums(name), self.stream)

    def _sums(self, name: str) -> tuple[Any, ArrayView]:
        if name in _KEYS:
            return self.extras.cu_seqlens_kv, self.lying.starts_kv
        return self.extras.cu_seqlens_q, self.lying.starts_q


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
    timed: bool = False,
) -> None:
    """See ``backends.protocol``. BackendError as ``attention_fwd``."""
    call, device = _call_of(q, k, v, lying, spec), q.device.index if timed else None
    if call.in_place(False, device):
        flash.forward(call.lies, q, k, v, o, lse, extras, workspace, stream, lying)
        return
    made = _Padded(call, False, q, lying, extras, workspace, stream)
    attention.attention_fwd(
        made.unpacked("q", q),
        made.unpacked("k", k),
        made.unpacked("v", v),
        made.view("o"),
        lse,
        extras,
        call.spec,
        made.workspace,
        stream,
        call.still_timed(device),
    )
    made.pack("o", o)


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
    timed: bool = False,
) -> None:
    """See ``backends.protocol``. BackendError as ``attention_bwd``."""
    call, device = _call_of(q, k, v, lying, spec), q.device.index if timed else None
    if call.in_place(dbias is not None or doffset is not None, device):
        arrays = do, q, k, v, o, lse, dq, dk, dv
        flash.backward(call.lies, *arrays, None, extras, workspace, stream, lying)
        return
    made = _Padded(call, True, q, lying, extras, workspace, stream)
    attention.attention_bwd(
        made.unpacked("do", do),
        made.unpacked("q", q),
        made.unpacked("k", k),
        made.unpacked("v", v),
        made.unpacked("o", o),
        lse,
        made.view("dq"),
        made.view("dk"),
        made.view("dv"),
        dbias,
        doffset,
        extras,
        call.spec,
        deterministic,
        made.workspace,
        stream,
        call.still_timed(device),
    )
    for name, gradient in (("dq", dq), ("dk", dk), ("dv", dv)):
        made.pack(name, gradient)


def packed_attention_workspace(
    q: Shape,
    k: Shape,
    v: Shape,
    sizes: tuple[int, int, int],
    dbias: Shape | None,
    dtype: DType,
    spec: AttentionSpec,
    backward: bool,
    deterministic: bool,
    strides: Sequence[Shape],
    timed: bool = False,
) -> int:
    """See ``backends.protocol``. For the current device. Of a backward with learnable further scores that of
    padded batches, whose gradient it may make."""
    call = _call(q, k, v, sizes, dtype, spec, strides)
    device = launch.runtime().getDevice() if timed else None
    if call.in_place(backward and (dbias is not None or spec.softmax_type == "learnable"), device):
        return flash.workspace(call.lies, backward)
    rules: Any = (dbias, dtype, call.spec, backward, deterministic, (), call.still_timed(device))
    inner = attention.attention_workspace(call.shapes["q"], call.shapes["k"], call.shapes["v"], *rules)
    return call.layout(backward)["end"] + inner
