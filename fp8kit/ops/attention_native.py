"""Attention over operands with one FP8 scale a tensor, by the engine's FP8 kernels where it has them:
``fp8_attention_fwd`` and ``fp8_attention_bwd`` instead of the emulation in float32.

The operands' codes are the emulation's, and so are the rules of every scale. What differs is what the kernels
cannot do otherwise: o, and the gradients of q, k and v, are always rounded to FP8, one scale a tensor; sums
are the tensor cores'. A call takes this way where the recipe does not say ``emulated``, where it is large
enough to be worth cuDNN's graphs, and where the engine takes both of its directions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8kit.arrays import ArrayView, Shape
from fp8kit.formats import DType, float32, uint8
from fp8kit.ops.attention_quantized import QuantizedCall
from fp8kit.ops.attention_spec import AttentionSpec
from fp8kit.ops.attention_views import Dense
from fp8kit.quantization import Quantizer
from fp8kit.spec import Meta, Views, WorkingSet

# multiply-adds of a forward from which on a call is worth its graphs, which take some 75 ms a direction
LEAST = 2e9
_FORWARD = ("q", "k", "v")
_BACKWARD = ("do", "q", "k", "v")


def work(q: Shape, k: Shape, v: Shape, spec: AttentionSpec) -> float:
    """Multiply-adds of a forward with these shapes (b, heads, s, features)."""
    seen = 0.5 if spec.window == (-1, 0) else 1.0
    return seen * float(q[0] * q[1] * q[2] * k[2]) * (q[3] + v[3])


class NativeCall(QuantizedCall):
    """A call of ``Attention`` whose products are FP8's; ``kind``: the layers' dtype."""

    def __init__(self, dense: Dense, kind: DType) -> None:
        super().__init__(dense)
        how, spec = self.how, dense.spec
        # of the gathered operands
        self.kind = float32 if spec.padded and not spec.zero_padded else kind
        self.out: Quantizer = how.v if how.o is None else how.o
        self.dqkv: Quantizer = how.do if how.dqkv is None else how.dqkv
        numbers = {name: i for i, group in enumerate(self.groups) for name in group}
        self.numbers = numbers["q"], numbers["k"], numbers["v"]

    @property
    def work(self) -> float:
        """Multiply-adds of forward."""
        q, k, v = (self.shape(name) for name in "qkv")
        return work(q, k, v, self.spec)

    def whole(self, name: str, view: ArrayView) -> ArrayView:
        """Memory of an operand's size as (b, heads, s, features)."""
        return view.reshape(*self.shape(name))

    def shape(self, name: str) -> Shape:
        """(b, heads, s, features)."""
        of = self.matrices[name]
        return of.batch, of.heads, of.length, of.depth

    def workspace(self, kernels: Any, backward: bool) -> int:
        """Bytes that a direction's kernel needs; 0 where the engine does not take it."""
        shapes = [self.shape(name) for name in "qkv"]
        formats = self.how.p.format, self.how.ds.format
        deterministic = self.spec.deterministic
        return int(kernels.fp8_attention_workspace(*shapes, self.spec, *formats, backward, deterministic))

    def scratch(self, kernels: Any, backward: bool, bias: Shape | None, dbias: bool) -> dict[str, Meta]:
        """Returns what a direction needs beside the padded form of packed sequences."""
        made = {"wide_o": self.matrices["o"].meta}
        for name in _BACKWARD if backward else _FORWARD:
            matrix = self.matrices[name]
            made |= {
                f"wide_{name}": Meta(matrix.shape, self.kind),
                f"codes_{name}": Meta(matrix.shape, uint8),
            }
        if backward:
            made |= {f"wide_d{name}": self.matrices[f"d{name}"].meta for name in "qkv"}
        made["scales"], made["inverses"] = Meta((3,), float32), Meta((len(_BACKWARD),), float32)
        return made | {"workspace": Meta((self.workspace(kernels, backward),), uint8)}

    def _cast(self, ws: WorkingSet, names: tuple[str, ...], layers: Views) -> list[ArrayView]:
        """Returns the operands' codes, and their scales' inverses in "inverses" in the order of ``names``."""
        k, stream = ws.kernels, ws.stream
        amax, scale, _ = (ws.scratch["scales"].slice(0, i, 1) for i in range(3))
        for group in (*self.groups, *([["do"]] if "do" in names else [])):
            own = self._quantizer(group[0])
            self._clear(ws, amax)
            for name in group:
                wide = ws.scratch[f"wide_{name}"]
                self._gather(ws, name, layers[name], wide)
                k.amax(wide, amax, wide.shape, stream)
            k.scale_from_amax(amax, scale, ws.scratch["scales"].slice(0, 2, 1), *own.scale_limits, stream)
            for name in group:
                wide, codes = ws.scratch[f"wide_{name}"], ws.scratch[f"codes_{name}"]
                inverse = ws.scratch["inverses"].slice(0, names.index(name), 1)
                settings = own.format, wide.shape, True, 0, 0, None
                k.quantize(wide, codes, scale, inverse, None, *settings, stream)
        return [self.whole(name, ws.scratch[f"codes_{name}"]) for name in names]

    def forward(
        self, ws: WorkingSet, layers: list[ArrayView], o: ArrayView, lse: ArrayView, extras: Any
    ) -> None:
        """Fill o, its heads apart, and lse from q, k and v."""
        codes = self._cast(ws, _FORWARD, dict(zip("qkv", layers, strict=True)))
        inverses, out = ws.scratch["inverses"].slice(0, 0, len(_FORWARD)), ws.scratch["wide_o"]
        rules = extras, self.spec, self.how.p, self.out, ws.scratch["workspace"], ws.stream
        ws.kernels.fp8_attention_fwd(*codes, inverses, self.whole("o", out), lse, *rules)
        ws.kernels.copy(self.matrices["o"].of(out, self.dense.spec.qkv_format), o, ws.stream)

    def backward(
        self,
        ws: WorkingSet,
        layers: Views,
        o: ArrayView,
        lse: ArrayView,
        gradients: Mapping[str, ArrayView | None],
        extras: Any,
    ) -> None:
        """Fill the ``gradients`` of q, k and v that are there. ``layers``: q, k, v and do, o: heads apart."""
        form, how = self.dense.spec.qkv_format, self.how
        codes, given = self._cast(ws, _BACKWARD, layers), ws.scratch["wide_o"]
        ws.kernels.copy(o, self.matrices["o"].of(given, form), ws.stream)
        made = {name: ws.scratch[f"wide_d{name}"] for name in "qkv"}
        ws.kernels.fp8_attention_bwd(
            *codes,
            ws.scratch["inverses"],
            self.whole("o", given),
            lse,
            *(self.whole(f"d{name}", view) for name, view in made.items()),
            extras,
            self.spec,
            how.p,
            self.out,
            how.ds,
            self.dqkv,
            self.numbers,
            self.spec.deterministic,
            ws.scratch["workspace"],
            ws.stream,
        )
        for name, view in made.items():
            into = gradients.get(name)
            if into is not None:
                ws.kernels.copy(self.matrices[f"d{name}"].of(view, form), into, ws.stream)


def quantized_call(dense: Dense, kind: DType, kernels: Any, trained: bool) -> QuantizedCall:
    """Returns the call, by the engine's FP8 kernels where it has them, else emulated. ``trained``: whether
    its backward will be asked for, which then decides, too."""
    native = NativeCall(dense, kind)
    if native.how.one_scale_a_tensor and native.work >= LEAST:
        directions = (False, True) if trained else (False,)
        if all(native.workspace(kernels, backward) for backward in directions):
            return native
    return QuantizedCall(dense)
