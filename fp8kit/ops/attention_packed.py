"""Attention over sequences that lie one after the other, by engines that read them where they lie."""

from __future__ import annotations

from typing import Any

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol import Lying
from fp8kit.formats import DType, uint8
from fp8kit.ops.attention_spec import LAYOUTS, AttentionSpec
from fp8kit.ops.attention_views import Dense, extras_of, lse_shape, meta_of, parts_within, places_of
from fp8kit.spec import Meta, Metas, Signature, Views, WorkingSet


class PackedCall:
    """A call of ``Attention`` whose inputs are the kernels'. ``dense``: its padded form, for the sizes."""

    def __init__(self, spec: AttentionSpec, metas: Metas, dense: Dense, kind: DType) -> None:
        leading = {name: meta_of(metas, name).shape[:1] for name in LAYOUTS[spec.layout]}
        self.shapes, self.parts = parts_within(spec, leading)
        self.spec, self.kind, self.rules = spec, kind, dense.spec
        self.sizes = lse_shape(dense)[0], spec.max_seqlen_q, spec.max_seqlen_kv

    def workspace(self, kernels: Any, backward: bool) -> int:
        """Bytes that a direction's kernel needs; 0 where the engine does not take it."""
        shapes, strides = zip(*((part.shape, part.strides) for part in self.parts.values()), strict=True)
        asked = self.sizes, self.kind, self.rules, backward, strides
        return int(kernels.packed_attention_workspace(*shapes, *asked))

    def scratch(self, kernels: Any, signature: Signature, backward: bool) -> dict[str, Meta]:
        """What a direction needs: its workspace, and gradients that nobody wants."""
        made = {"workspace": Meta((self.workspace(kernels, backward),), uint8)}
        if backward:
            unwanted = {name: shape for name, shape in self.shapes.items() if name not in signature.grads}
            made |= {f"dense_d{name}": Meta(shape, self.kind) for name, shape in unwanted.items()}
        return made

    def forward(self, ws: WorkingSet, lse: ArrayView) -> None:
        """Fill o and lse."""
        o = self._heads_apart(ws.outputs["o"])
        ws.kernels.packed_attention_fwd(*self._layers(ws.inputs), o, lse, *self._settings(ws))

    def backward(self, ws: WorkingSet, cotangents: Views) -> None:
        """Fill the gradients of the inputs."""
        o, do = self._heads_apart(ws.inputs["o"]), self._heads_apart(cotangents["o"])
        whole = {name: ws.outputs.get(name) or ws.scratch[f"dense_d{name}"] for name in self.shapes}
        arrays = do, *self._layers(ws.inputs), o, ws.saved["lse"], *self._layers(whole)
        ws.kernels.packed_attention_bwd(*arrays, *self._settings(ws))

    def _layers(self, views: Views) -> list[ArrayView]:
        """q, k and v inside the inputs, or their gradients."""
        return [part.of(views[part.input]) for part in self.parts.values()]

    def _heads_apart(self, o: ArrayView) -> ArrayView:
        return o.reshape(o.shape[0], self.spec.num_heads, self.spec.head_dim_v)

    def _settings(self, ws: WorkingSet) -> tuple[Any, ...]:
        _, longest_q, longest_kv = self.sizes
        starts_q, starts_kv = (places_of(ws.inputs, side)[1] for side in ("q", "kv"))
        lying, extras = Lying(starts_q, starts_kv, longest_q, longest_kv), extras_of(self.spec, ws.inputs)
        return lying, extras, self.rules, ws.scratch["workspace"], ws.stream


def packed_call(
    spec: AttentionSpec, metas: Metas, dense: Dense, signature: Signature, kernels: Any
) -> PackedCall | None:
    """The call where the engine takes it, in both directions where both are wanted; None where it goes by
    padded batches. The gradients of a bias and of softmax_offset are made there only."""
    if not spec.packed or {"bias", "softmax_offset"} & signature.grads.keys():
        return None
    call = PackedCall(spec, metas, dense, signature.outputs["o"].dtype)
    directions = (False, True) if signature.saved else (False,)
    return call if all(call.workspace(kernels, backward) for backward in directions) else None
