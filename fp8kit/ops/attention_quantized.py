"""Attention over quantised operands, emulated: q, k, v and the output gradient are brought into float32, one
head after the other, cast and decoded, and multiplied by the contract's ``quantized_attention_fwd`` and
``quantized_attention_bwd``.

A head's rows are padded with zeros to a multiple of the blocks that share a scale, so that none has rows of
two heads. Padding of sequences counts as 0 in every scale.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from fp8kit import arrays
from fp8kit.arrays import ArrayView, Shape
from fp8kit.formats import float32, uint8
from fp8kit.ops.attention_plain import PlainCall
from fp8kit.ops.attention_spec import batch_of, length_of
from fp8kit.ops.attention_views import Dense, side_of
from fp8kit.quantization import Quantizer
from fp8kit.spec import Meta, Views, WorkingSet
from fp8kit.tiles import cast_rotated

# operand -> along which dimensions it is contracted: 1, its features; 0, its rows
_FORWARD = {"q": (1,), "k": (1,), "v": (0,)}
_BACKWARD = {"q": (1, 0), "k": (1, 0), "v": (1,), "do": (1, 0)}
# matrix -> the number of its cast, and of the one along its features the next one: those before are P's, dS's
# and dropout's. An operand that forward and backward cast has the same bits in both
_DRAWS = {name: 4 + 2 * i for i, name in enumerate(("q", "k", "v", "do", "o", "dq", "dk", "dv"))}


@lru_cache(maxsize=256)
def _rotating(own: Quantizer, n: int, signs: str) -> Quantizer:
    return dataclasses.replace(own, hadamard=n, signs=signs)


class _Matrix(NamedTuple):
    """An operand in float32: ``batch`` times ``heads`` times ``length`` rows of ``depth`` features, each head
    with ``padded`` rows of memory."""

    batch: int
    heads: int
    length: int
    padded: int
    depth: int

    @property
    def shape(self) -> Shape:
        """Of the matrix of all rows."""
        return self.batch * self.heads * self.padded, self.depth

    @property
    def meta(self) -> Meta:
        """Of its memory."""
        return Meta(self.shape, float32)

    @property
    def size(self) -> int:
        """Elements."""
        return self.shape[0] * self.depth

    def of(self, view: ArrayView, qkv_format: str) -> ArrayView:
        """Returns the rows that exist, with dimensions in the order of "sbhd" or "bshd"."""
        head = self.padded * self.depth
        shape, strides = (self.length, self.batch), (self.depth, self.heads * head)
        if qkv_format == "bshd":
            shape, strides = shape[::-1], strides[::-1]
        return view.with_strides((*shape, self.heads, self.depth), (*strides, head, 1))


class QuantizedCall:
    """A call of ``Attention`` whose products are quantised; ``dense``: as the kernels in high precision would
    see it."""

    def __init__(self, dense: Dense) -> None:
        spec = dense.spec
        assert spec.quantized is not None
        self.dense, self.how = dense, spec.quantized
        self.plain: PlainCall | None = None  # what goes back in high precision (``plain_backward``)
        self.spec = dataclasses.replace(spec, qkv_format="bshd", zero_padded=True, quantized=None)
        qk, v = self.how.rotated(spec.head_dim), self.how.rotated(spec.head_dim_v, "rotation_v")
        # matrix -> neighbours of its features that are rotated together, where they are
        own = dict.fromkeys(("q", "k"), qk) | dict.fromkeys(("v", "do", "o"), v)
        self.rotations = {name: n for name, n in own.items() if n}
        form, step = spec.qkv_format, self.how.step
        self.matrices: dict[str, _Matrix] = {}
        for name, part in dense.parts.items():
            length = length_of(form, part.shape)
            sizes = batch_of(form, part.shape), part.shape[2], length
            self.matrices[name] = _Matrix(*sizes, -(-length // step) * step, part.shape[3])
            self.matrices[f"d{name}"] = _Matrix(*sizes, length, part.shape[3])
        q = self.matrices["q"]
        self.matrices["do"] = q._replace(depth=spec.head_dim_v)
        self.matrices["o"] = self.matrices["do"]._replace(padded=q.length)
        # operands with one scale
        self.groups = [list(dense.parts)] if self.how.joint else [[name] for name in dense.parts]

    def _quantizer(self, name: str) -> Quantizer:
        return getattr(self.how, name)  # type: ignore[no-any-return]

    def _by_blocks(self, name: str) -> bool:
        """Whether the operand's codes depend on the contraction."""
        return self._quantizer(name).granularity != "tensor"

    # --- memory ---------------------------------------------------------------------------------------------

    def scratch(self, kernels: Any, backward: bool, bias: Shape | None, dbias: bool) -> dict[str, Meta]:
        """Returns what a direction needs beside the padded form of packed sequences. ``bias``: of that shape,
        and whether its gradient is wanted."""
        uses = _BACKWARD if backward else _FORWARD
        made = {"wide_o": self.matrices["o"].meta}
        for name, along in uses.items():
            if not self._by_blocks(name) or 1 in along:
                made[f"wide_{name}"] = self.matrices[name].meta
            if self._by_blocks(name) and 0 in along:
                made[f"rows_{name}"] = self.matrices[name].meta
        if backward:
            made |= {f"wide_d{name}": self.matrices[f"d{name}"].meta for name in "qkv"}
        if bias is not None:
            made["wide_bias"] = Meta(bias, float32)
            made |= {"wide_dbias": Meta(bias, float32)} if dbias else {}
        most = max(matrix.size for matrix in self.matrices.values())
        made["codes"] = Meta((most,), uint8)
        if self.rotations or any(self._by_blocks(name) for name in uses):
            made["spare"] = Meta((most,), float32)
        rows = self.how.rows_per_block
        blocks = max(matrix.shape[0] for matrix in self.matrices.values()) // rows if rows else 1
        made["scales"] = Meta((3 * max(1, blocks),), float32)
        q, k, v = (self._kernel_shape(self.matrices[name]) for name in "qkv")
        asked = q, k, v, bias if dbias else None, self.spec, backward
        nbytes = kernels.quantized_attention_workspace(*asked)
        return made | {"workspace": Meta((max(nbytes, 1),), uint8)}

    @staticmethod
    def _kernel_shape(matrix: _Matrix) -> Shape:
        return matrix.batch, matrix.length, matrix.heads, matrix.depth

    def _spare(self, ws: WorkingSet, matrix: _Matrix) -> ArrayView:
        return ws.scratch["spare"].first(matrix.shape)

    def _operand(self, ws: WorkingSet, name: str, along: int) -> ArrayView:
        """Returns an operand as the kernels take it."""
        rows = along == 0 and self._by_blocks(name)
        view = ws.scratch[f"rows_{name}" if rows else f"wide_{name}"]
        return self.matrices[name].of(view, "bshd")

    # --- casts ----------------------------------------------------------------------------------------------

    @staticmethod
    def _clear(ws: WorkingSet, view: ArrayView) -> None:
        arrays.fill_zero(view, ws.stream)

    def _gather(self, ws: WorkingSet, name: str, layer: ArrayView, into: ArrayView) -> None:
        """An operand's values in float32, zeros in padding. ``layer``: in the order of the inputs."""
        matrix, spec = self.matrices[name], self.dense.spec
        if matrix.padded > matrix.length:
            self._clear(ws, into)
        ws.kernels.copy(layer, matrix.of(into, spec.qkv_format), ws.stream)
        if spec.padded and not spec.zero_padded:
            sums = ws.inputs[f"cu_seqlens_{'q' if name == 'do' else side_of(name)}"]
            heads = into.reshape(matrix.batch, matrix.heads, matrix.padded, matrix.depth)
            ws.kernels.clear_padding_(heads, sums, ws.stream)

    def _make(self, ws: WorkingSet, uses: Mapping[str, Shape], layers: Views) -> None:
        """Fill the operands of a direction; ``layers``: their sources."""
        k, stream = ws.kernels, ws.stream
        for group in (*self.groups, *([["do"]] if "do" in uses else [])):
            blocks, pairs = self._by_blocks(group[0]), []
            for name in group:
                matrix = self.matrices[name]
                rotated = name in self.rotations
                if rotated and not blocks and not self.how.rows_per_block:
                    self._make_rotated(ws, name, layers[name])
                    continue
                there = ws.scratch[f"rows_{name}" if blocks and 1 not in uses[name] else f"wide_{name}"]
                source = self._spare(ws, matrix) if blocks and not rotated else there
                self._gather(ws, name, layers[name], source)
                if rotated:
                    source = self._spare(ws, matrix)
                    self._rotate(ws, name, there, source)
                pairs.append((source, there))
            own = self._quantizer(group[0])
            if not pairs:
                continue
            if not blocks:
                rows = self.how.rows_per_block
                tile = (rows, pairs[0][0].shape[1]) if rows else None
                self._round(ws, pairs, own, _DRAWS[group[0]], tile)
                continue
            rng = ws.inputs["rng"] if own.stochastic_bits else None
            for along in uses[group[0]]:
                values = ws.scratch[f"{'wide' if along else 'rows'}_{group[0]}"]
                how = own, along, _DRAWS[group[0]] + along, rng, None
                k.cast_blocks(source, None, None, None, values, None, None, *how, stream)

    def _make_rotated(self, ws: WorkingSet, name: str, layer: ArrayView) -> None:
        """Fill an operand with one scale, which is rotated in its cast."""
        source, own = self._spare(ws, self.matrices[name]), self._quantizer(name)
        self._gather(ws, name, layer, source)
        scales = ws.scratch["scales"]
        amax, scale, inverse = (scales.slice(0, i * (scales.size // 3), 1) for i in range(3))
        rotating = _rotating(own, self.rotations[name], self.how.signs)
        rng = ws.inputs["rng"] if rotating.needs_rng else None
        three = (amax, scale, inverse), rotating, 1, _DRAWS[name], rng, ws.stream
        cast_rotated(ws.kernels, source, None, ws.scratch[f"wide_{name}"], *three)

    def _round(
        self,
        ws: WorkingSet,
        pairs: Iterable[tuple[ArrayView, ArrayView]],
        own: Quantizer,
        draw: int,
        tile: Shape | None = None,
    ) -> None:
        """Values of the first matrix of each pair, rounded, into the second: with a scale for each ``tile``,
        or one for all. ``draw``: the number of the first one's cast, the others' come two by two after it."""
        k, stream, pairs = ws.kernels, ws.stream, list(pairs)
        scales, first = ws.scratch["scales"], pairs[0][0]
        count = first.shape[0] // tile[0] if tile else 1
        amax, scale, inverse = (scales.slice(0, i * (scales.size // 3), count) for i in range(3))
        self._clear(ws, amax)
        for source, _ in pairs:
            k.amax(source, amax, tile or source.shape, stream)
        k.scale_from_amax(amax, scale, inverse, *own.scale_limits, stream)
        bits = own.stochastic_bits
        rng = ws.inputs["rng"] if bits else None
        for i, (source, into) in enumerate(pairs):
            codes = ws.scratch["codes"].first(source.shape)
            how = own.format, tile or source.shape
            drawn = bits, draw + 2 * i if bits else 0, rng
            k.quantize(source, codes, scale, inverse, None, *how, True, *drawn, stream)
            k.dequantize(codes, into, inverse, *how, stream)

    def _how_rotated(self, ws: WorkingSet, name: str) -> tuple[Any, ...]:
        """Returns how the features of an operand are rotated, as the contract's kernels take it."""
        rng = ws.inputs["rng"] if self.how.signs == "random" else None
        return self.rotations[name], self.how.signs, 1, rng, ws.stream

    def _rotate(self, ws: WorkingSet, name: str, x: ArrayView, out: ArrayView) -> None:
        ws.kernels.rotate(x, out, None, *self._how_rotated(ws, name))

    def _as_it_was(self, ws: WorkingSet, name: str, of: str) -> ArrayView:
        """Returns a result of features that were rotated as ``of``'s were, as one of the features: rotated
        back."""
        there = ws.scratch[f"wide_{name}"]
        if of not in self.rotations:
            return there
        spare = self._spare(ws, self.matrices[name])
        ws.kernels.rotate_back(there, spare, None, *self._how_rotated(ws, of))
        return spare

    # --- directions -----------------------------------------------------------------------------------------

    def _extras(self, ws: WorkingSet, extras: Any) -> Any:
        """Returns the extras with the bias in float32."""
        if extras.bias is None:
            return extras
        ws.kernels.copy(extras.bias, ws.scratch["wide_bias"], ws.stream)
        return extras._replace(bias=ws.scratch["wide_bias"])

    def forward(
        self, ws: WorkingSet, layers: list[ArrayView], o: ArrayView, lse: ArrayView, extras: Any
    ) -> None:
        """Fill o, its heads apart, and lse from q, k and v."""
        self._make(ws, _FORWARD, dict(zip("qkv", layers, strict=True)))
        k, out, matrix = ws.kernels, ws.scratch["wide_o"], self.matrices["o"]
        operands = [self._operand(ws, name, along) for name, (along,) in _FORWARD.items()]
        drawn = ws.inputs["rng"] if self.how.p.stochastic_bits else None
        settings = self._extras(ws, extras), self.spec, self.how.p, drawn, ws.scratch["workspace"], ws.stream
        k.quantized_attention_fwd(*operands, matrix.of(out, "bshd"), lse, *settings)
        out = self._as_it_was(ws, "o", "o")
        if self.how.o is not None:
            self._round(ws, [(out, out)], self.how.o, _DRAWS["o"])
        k.copy(matrix.of(out, self.dense.spec.qkv_format), o, ws.stream)

    def backward(
        self,
        ws: WorkingSet,
        layers: Views,
        o: ArrayView,
        lse: ArrayView,
        gradients: Mapping[str, ArrayView | None],
        extras: Any,
    ) -> None:
        """Fill the ``gradients`` of q, k, v, bias and softmax_offset that are there. ``layers``: q, k, v and
        do, o: heads apart."""
        form, k, stream = self.dense.spec.qkv_format, ws.kernels, ws.stream
        self._make(ws, _BACKWARD, layers)
        matrix, given = self.matrices["o"], ws.scratch["wide_o"]
        k.copy(o, matrix.of(given, form), stream)
        if "o" in self.rotations:  # rowsum(dO * o) is of both rotated
            source, given = given, self._spare(ws, matrix)
            self._rotate(ws, "o", source, given)
        do, q, key, v = (self._operand(ws, name, 1) for name in ("do", "q", "k", "v"))
        rows = [self._operand(ws, name, 0) for name in ("do", "q", "k")]
        made = [self.matrices[f"d{name}"].of(ws.scratch[f"wide_d{name}"], "bshd") for name in "qkv"]
        bias, offset = gradients.get("bias"), gradients.get("softmax_offset")
        dbias = None if bias is None else ws.scratch["wide_dbias"]
        k.quantized_attention_bwd(
            do,
            q,
            key,
            v,
            matrix.of(given, "bshd"),
            lse,
            *rows,
            *made,
            dbias,
            offset,
            self._extras(ws, extras),
            self.spec,
            self.how.p,
            self.how.ds,
            ws.inputs["rng"] if self.how.p.stochastic_bits or self.how.ds.stochastic_bits else None,
            ws.scratch["workspace"],
            stream,
        )
        if bias is not None:
            k.copy(dbias, bias, stream)
        if self.how.dqkv is not None:
            for group in self.groups:
                own = [ws.scratch[f"wide_d{name}"] for name in group]
                self._round(ws, zip(own, own, strict=True), self.how.dqkv, _DRAWS[f"d{group[0]}"])
        for name in "qkv":
            into = gradients.get(name)
            if into is not None:
                found = self._as_it_was(ws, f"d{name}", name)
                k.copy(self.matrices[f"d{name}"].of(found, form), into, stream)
