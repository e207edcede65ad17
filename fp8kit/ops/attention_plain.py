"""A call of attention in high precision: of a padded batch, or of sequences that lie one after the other,
which the kernels take as they lie."""

from __future__ import annotations

from typing import Any

from fp8kit.arrays import ArrayView, contiguous_strides
from fp8kit.backends.protocol import Lying
from fp8kit.formats import DType, uint8
from fp8kit.ops.attention_spec import LAYOUTS, AttentionSpec
from fp8kit.ops.attention_views import (
    Dense,
    Part,
    extras_of,
    lse_shape,
    meta_of,
    parts_of,
    parts_within,
    places_of,
)
from fp8kit.spec import Meta, Metas, Signature, Views, WorkingSet


class PlainCall:
    """A call of ``Attention`` in high precision. ``dense``: its padded form, which the kernels take where
    sequences do not lie one after the other."""

    def __init__(self, spec: AttentionSpec, metas: Metas, dense: Dense, kind: DType) -> None:
        self.spec, self.packed, self.kind, self.rules = spec, spec.packed, kind, dense.spec
        self.shapes, self.parts, self.heads = dense.shapes, dense.parts, dense.heads
        self.sizes: tuple[Any, ...] = ()
        if self.packed:
            leading = {name: meta_of(metas, name).shape[:1] for name in LAYOUTS[spec.layout]}
            self.shapes, self.parts = parts_within(spec, leading)
            o = *next(iter(leading.values())), spec.num_heads, spec.head_dim_v
            self.heads = Part("o", o, contiguous_strides(o), 0)
            self.sizes = ((lse_shape(dense)[0], spec.max_seqlen_q, spec.max_seqlen_kv),)

    def scratch(self, k: Any, signature: Signature, backward: bool) -> dict[str, Meta]:
        """Returns the temporaries of forward or backward: its workspace, and unneeded gradients."""
        shapes, strides = zip(*((part.shape, part.strides) for part in self.parts.values()), strict=True)
        bias = signature.grads.get("bias") if backward else None
        dbias = None if bias is None else bias.shape
        rules = dbias, self.kind, self.rules, backward, self.spec.deterministic, strides
        measure = k.packed_attention_workspace if self.packed else k.attention_workspace
        made = {"workspace": Meta((int(measure(*shapes, *self.sizes, *rules)),), uint8)}
        if backward:
            unwanted = {name: shape for name, shape in self.shapes.items() if name not in signature.grads}
            made |= {f"unwanted_d{name}": Meta(shape, self.kind) for name, shape in unwanted.items()}
        return made

    def forward(self, ws: WorkingSet, lse: ArrayView) -> None:
        """Fill o and lse."""
        k = ws.kernels
        run = k.packed_attention_fwd if self.packed else k.attention_fwd
        arrays = *parts_of(self.parts, ws.inputs), self.heads.of(ws.outputs["o"]), lse
        run(*arrays, *self._about(ws), ws.scratch["workspace"], ws.stream)

    def backward(self, ws: WorkingSet, cotangents: Views) -> None:
        """Fill the gradients that are wanted."""
        k = ws.kernels
        run = k.packed_attention_bwd if self.packed else k.attention_bwd
        o, do = self.heads.of(ws.inputs["o"]), self.heads.of(cotangents["o"])
        whole = {name: ws.outputs.get(name) or ws.scratch[f"unwanted_d{name}"] for name in self.shapes}
        further = ws.outputs.get("bias"), ws.outputs.get("softmax_offset")
        given, grads = parts_of(self.parts, ws.inputs), parts_of(self.parts, whole)
        arrays = do, *given, o, ws.saved["lse"], *grads, *further
        settings = self.spec.deterministic, ws.scratch["workspace"], ws.stream
        run(*arrays, *self._about(ws), *settings)

    def _about(self, ws: WorkingSet) -> tuple[Any, ...]:
        """Returns where the sequences lie, what comes beside them, and the rules."""
        about = extras_of(self.spec, ws.inputs), self.rules
        if not self.packed:
            return about
        starts_q, starts_kv = (places_of(ws.inputs, side)[1] for side in ("q", "kv"))
        lying = Lying(starts_q, starts_kv, self.spec.max_seqlen_q, self.spec.max_seqlen_kv)
        return lying, *about
