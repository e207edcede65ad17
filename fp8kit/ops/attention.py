"""Scaled dot-product attention as one operation: o = dropout(softmax(scores)) v per head, over the scores
that the mask leaves.

Source: Vaswani et al., Attention Is All You Need, 2017, section 3.2; grouped query heads: Ainslie et al.
2023; the gradients recompute the probabilities from the rows' log-sum-exp (Dao et al., FlashAttention, 2022,
appendix B).

Sequences that lie one after the other ("thd") have kernels of their own (``fp8kit.ops.attention_plain``).
Those of quantised operands know padded batches only: sequences are unpacked before and packed after them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fp8kit import formats
from fp8kit.arrays import ArrayView
from fp8kit.ops.attention_checks import check_extras, check_inputs
from fp8kit.ops.attention_native import quantized_call
from fp8kit.ops.attention_plain import PlainCall
from fp8kit.ops.attention_spec import ARGUMENTS, FORMATS, LAYOUTS, MASKS, AttentionSpec, batch_of, check
from fp8kit.ops.attention_views import (
    Dense,
    attends,
    dense_of,
    extras_of,
    heads_apart,
    leading_of,
    lse_shape,
    meta_of,
    pack,
    parts_of,
    unpacked,
)
from fp8kit.ops.partition import Partition, Place
from fp8kit.ops.values import check_lengths
from fp8kit.spec import (
    Meta,
    Metas,
    Needs,
    Operation,
    Partitions,
    Plan,
    Shapes,
    Signature,
    Views,
    WorkingSet,
    workspace,
)

__all__ = ["FORMATS", "LAYOUTS", "MASKS", "Attention", "AttentionSpec", "attention"]


class Attention(Operation):
    """Inputs by ``spec.layout``: q (s_q, b, h * d), k (s_kv, b, g * d) and v (s_kv, b, g * d_v), or their
    packed form, h (float32, bfloat16 or float16), C-contiguous; the heads of an unpacked part may be a
    dimension of their own: (s_q, b, h, d). With "bshd" b comes first; with "thd" t tokens stand where s and b
    stand.

    * ``cu_seqlens_q``, ``cu_seqlens_kv``: int32 (b + 1,), running sums of the true lengths, with a padding
      mask and only there. With "thd" also ``cu_seqlens_q_padded``, ``cu_seqlens_kv_padded``: where each
      sequence starts, if there are gaps between them.
    * ``mask``: bool or uint8 (1 | b, 1 | h, 1 | s_q, s_kv), with mask "arbitrary". ``bias``: likewise, in the
      inputs' dtype, with a bias.
    * ``alibi_slopes``: float32 (h,) or (b, h), with "alibi". ``softmax_offset``: float32 (h,), with softmax
      type "learnable".
    * ``rng``: int64 (2,) seed and offset, where dropout > 0 or quantised operands draw (``needs_rng``).
      ``dropout_place``: int32 (3,), where ``placed``: which batch and which head of the larger attention the
      first ones are, and how many heads that has. On CUDA the unfused path takes it.

    With ``spec.quantized`` the operands of all products are rounded to narrow formats
    (``fp8kit.attention_quantization``), by an emulation, or by the engine's FP8 kernels
    (``fp8kit.ops.attention_native``); with ``spec.plain_backward`` those of forward alone.

    Batch, lengths and t may be 0: without keys o is 0, and where nothing is attended to or by, gradients are.
    Heads and features may not.

    Output ``o``: (s_q, b, h * d_v), as the projection wants it; rows beyond the true length, and tokens of no
    sequence, are 0. Saved: ``lse``, float32 (b, h, s_q), the rows' log-sum-exp. Gradients of q, k, v (in
    their layout), bias and softmax_offset.

    ``infer`` raises ShapeError for sizes and names that do not fit, FormatError for dtypes; ``forward``
    ArgumentError for invalid running sums on the CPU (``ops.values``).
    """

    name = "attention"
    holds_interpreter = True
    results = ("o",)
    arguments = ARGUMENTS

    def partitions(self, spec: AttentionSpec, metas: Metas, views: Shapes) -> Partitions:
        """Returns partitions by batches and by heads. Sequences are not split, nor are calls whose operands
        are quantised, since heads share scales."""
        if spec.packed or spec.quantized is not None:
            return ()
        there = {name: meta.shape for name, meta in metas.items() if meta is not None}
        main, at = tuple(LAYOUTS[spec.layout]), spec.qkv_format.index("b")
        rows, heads = [(name, at, at) for name in (*main, "o")], [("o", 2, -1)]
        heads += [(name, 3, 2) if name in views else (name, 2, 2) for name in main]
        for name in {"mask", "bias"} & there.keys():  # 1 stands for all
            rows += [(name, 0, 0)] if there[name][0] == there[main[0]][at] != 1 else []
            heads += [(name, 1, 1)] if there[name][1] == spec.num_heads != 1 else []
        if "alibi_slopes" in there:
            last = len(there["alibi_slopes"]) - 1
            rows += [("alibi_slopes", 0, 0)] * last
            heads.append(("alibi_slopes", last, last))
        heads += [("softmax_offset", 0, 0)] if "softmax_offset" in there else []
        sums = tuple(name for name in ("cu_seqlens_q", "cu_seqlens_kv") if name in there)
        found = Partition("rows", tuple(sorted(rows + [(name, 0, 0) for name in sums])), windows=sums)
        if all(name in views or len(there[name]) == 4 for name in main):
            return found, Partition("heads", tuple(sorted(heads)))
        return (found,)

    def part(self, spec: AttentionSpec, partition: Partition, count: int) -> Any:
        if spec.num_heads % count or spec.num_gqa_groups % count:
            return None
        return replace(spec, num_heads=spec.num_heads // count, num_gqa_groups=spec.num_gqa_groups // count)

    def place(self, spec: AttentionSpec, metas: Metas, parts: Mapping[str, tuple[Any, int]]) -> Place | None:
        """Also of a call that is whole in this direction: the other one may be split, and both must drop the
        same weights. cuDNN, whose numbers know only the call, does not take it."""
        if not spec.dropout or spec.packed or spec.quantized is not None:
            return None
        q = meta_of(metas, next(iter(LAYOUTS[spec.layout])))
        (row, _), (head, count) = parts.get("rows", (0, 1)), parts.get("heads", (0, 1))
        first = row * batch_of(spec.qkv_format, q.shape), head * spec.num_heads
        numbers = (*first, count * spec.num_heads)
        return Place(replace(spec, placed=True), "dropout_place", Meta((3,), formats.int32), numbers)

    def infer(self, spec: AttentionSpec, metas: Metas, needs: Needs) -> Signature:
        check(spec)
        layout = LAYOUTS[spec.layout]
        kind = check_inputs(spec, metas)
        dense = dense_of(spec, metas)
        extras = check_extras(spec, metas, dense, kind)
        q = meta_of(metas, next(iter(layout))).shape
        outputs = {"o": Meta((*leading_of(spec, q), spec.num_heads * spec.head_dim_v), kind)}
        grads = {n: meta_of(metas, n) for n in (*layout, "bias", "softmax_offset") if n in needs}
        if not grads:
            return Signature(outputs)
        if not attends(spec, metas):
            return Signature(outputs, grads={n: meta._replace(zero=True) for n, meta in grads.items()})
        saved = {"lse": Meta(lse_shape(dense), formats.float32)}
        return Signature(outputs, saved, (*layout, "o", *extras), grads)

    def plan(self, spec: AttentionSpec, metas: Metas, needs: Needs, kernels: Any) -> Plan:
        signature = self.infer(spec, metas, needs)
        dense, (o, kind, _) = dense_of(spec, metas), signature.outputs["o"]
        if not attends(spec, metas):
            size = math.prod(o)
            sums = {"nothing": Meta((0, size), kind)} | workspace(kernels.column_sum_workspace(0, size))
            return Plan(spec, signature, kernels, sums if size else {})
        if spec.quantized is not None:
            return self._quantized_plan(spec, signature, dense, metas, kernels)
        lse = {} if signature.saved else {"lse": Meta(lse_shape(dense), formats.float32)}
        call = PlainCall(spec, metas, dense, kind)
        scratch = call.scratch(kernels, signature, False) | lse
        backward = call.scratch(kernels, signature, True) if signature.saved else {}
        return Plan(spec, signature, kernels, scratch, backward, call)

    def _quantized_plan(
        self, spec: AttentionSpec, signature: Signature, dense: Dense, metas: Metas, kernels: Any
    ) -> Plan:
        kind, bias = signature.outputs["o"].dtype, metas.get("bias")
        plain = spec.plain_backward
        call = quantized_call(dense, kind, kernels, bool(signature.saved) and not plain)
        shape, dbias = None if bias is None else bias.shape, "bias" in signature.grads
        whole = dense.shapes | {"o": dense.o}
        padded = {f"dense_{name}": Meta(shape, kind) for name, shape in whole.items() if spec.packed}
        scratch = call.scratch(kernels, False, shape, False) | padded
        if not signature.saved:
            lse = {"lse": Meta(lse_shape(dense), formats.float32)}
            return Plan(spec, signature, kernels, scratch | lse, {}, call)
        if plain:
            high = self.plan(replace(spec, quantized=None), metas, frozenset(signature.grads), kernels)
            call.plain = high.extra
            return Plan(spec, signature, kernels, scratch, high.backward_scratch, call)
        backward = call.scratch(kernels, True, shape, dbias) | padded
        wanted = [name for name in whole if spec.packed and name in ("o", *signature.grads)]
        backward |= {f"dense_d{name}": Meta(whole[name], kind) for name in wanted}
        return Plan(spec, signature, kernels, scratch, backward, call)

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        spec, call, out = plan.spec, plan.extra, ws.outputs["o"]
        check_lengths(self.name, spec, ws.inputs)
        if call is None:
            if out.size:  # tokens without keys: the sums of no rows are 0
                sums = ws.scratch["nothing"], out.reshape(out.size), ws.scratch["workspace"]
                ws.kernels.sum_rows(*sums, ws.stream)
            return
        lse = (ws.saved if plan.signature.saved else ws.scratch)["lse"]
        if isinstance(call, PlainCall):
            call.forward(ws, lse)
            return
        o, whole = ws.scratch["dense_o"] if spec.packed else out, call.dense
        apart, parts = heads_apart(o, whole), self._parts(spec, whole, ws)
        call.forward(ws, parts, apart, lse, extras_of(spec, ws.inputs))
        pack(spec, ws, o, "o")

    def _parts(self, spec: AttentionSpec, dense: Dense, ws: WorkingSet) -> list[ArrayView]:
        """q, k and v as the kernels take them."""
        return parts_of(dense.parts, {n: unpacked(spec, ws, ws.inputs[n], n) for n in dense.shapes})

    def backward(self, plan: Plan, ws: WorkingSet, cotangents: Views) -> None:
        """Fill the gradients that are wanted. The cotangent of ``o`` has o's shape, C-contiguous."""
        call = plan.extra
        if call is None:
            return
        plain = call if isinstance(call, PlainCall) else call.plain
        if plain is None:
            self._quantized_backward(plan, ws, cotangents)
        else:
            plain.backward(ws, cotangents)

    def _quantized_backward(self, plan: Plan, ws: WorkingSet, cotangents: Views) -> None:
        spec, call, wanted = plan.spec, plan.extra, plan.signature.grads
        dense: Dense = call.dense
        layers = dict(zip("qkv", self._parts(spec, dense, ws), strict=True))
        layers["do"] = heads_apart(unpacked(spec, ws, cotangents["o"], "do"), dense)
        o = heads_apart(unpacked(spec, ws, ws.inputs["o"], "o"), dense)
        whole = {
            n: ws.scratch[f"dense_d{n}"] if spec.packed else ws.outputs[n]
            for n in dense.shapes
            if n in wanted
        }
        gradients = {n: part.of(whole[part.input]) for n, part in dense.parts.items() if part.input in whole}
        gradients |= {n: ws.outputs[n] for n in ("bias", "softmax_offset") if n in wanted}
        call.backward(ws, layers, o, ws.saved["lse"], gradients, extras_of(spec, ws.inputs))
        for name, view in whole.items():
            pack(spec, ws, view, name)


attention = Attention()
