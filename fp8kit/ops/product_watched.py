"""Products that show their tensors: any ``Product``, with one more small array for each tensor that is looked
at. The only place where the inspector touches the products.

A watched product makes its operands in high precision before it casts them, where a fused kernel would
otherwise write codes alone: the same codes, by one more pass. Next to each of its steps it collects what its
``ProductWatch`` asks for. What it makes of the call is what the product makes, rounded where the watch says
so: before anything is added to it, before ranks sum it, and before it is looked at.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from fp8kit.arrays import ArrayView
from fp8kit.inspection import BACKWARD, FORWARD, WATCHED, Entry, TensorWatch
from fp8kit.ops.collect import Collector
from fp8kit.ops.product import Product, ProductSpec
from fp8kit.ops.products import WATCHED as WATCHED_CLASS
from fp8kit.ops.rounding import Rounding
from fp8kit.quantization import Quantizer
from fp8kit.spec import Meta, Metas, WorkingSet

_OPERANDS = {"activation": "x", "weight": "w", "gradient": "g"}


class WatchedProduct(Product):
    """Goes before a product's class. ``entries``: what each array holds, by its name among the outputs, or
    among what backward fills. ``alone``: the product that makes wgrad by itself, where that is to be seen and
    the call adds it to what is there."""

    fuses_cast = scales_local = False

    def __init__(self, spec: ProductSpec, *of_the_call: Any) -> None:
        super().__init__(spec, *of_the_call)
        assert spec.watch is not None
        own = spec.watch.of(spec.prefix)
        self.entries: dict[str, Entry] = {}
        self.shown_metas: dict[str, Meta] = {}
        self.collectors: dict[str, Collector] = {}
        self.twins: set[str] = set()  # tensors that are made again in high precision
        for watch in own.tensors:
            self._add(own.layer, watch)
        if "output" in self.twins:
            self.fprop_reads_x = True
        if "wgrad" in self.twins:
            self.wgrad_reads_x = True
        if self.twins & {"dgrad", "wgrad"}:
            self.reads_g = True
        self.rounded = {tensor: self._rounding(tensor, how) for tensor, how in own.rounded}
        self.alone: Product | None = None
        if self.adds and (self._arrays_of("wgrad") or "wgrad" in self.rounded):
            self.alone = type(self).__bases__[1](replace(spec, watch=None, overwrite_grad=True), *of_the_call)

    def _add(self, layer: str, watch: TensorWatch) -> None:
        tensor = watch.tensor
        shapes = {
            "activation": (self.m, self.k),
            "output": (self.m, self.n),
            "gradient": (self.m, self.n),
            "dgrad": (self.m, self.k),
        }
        parts = [shapes[tensor]] if tensor in shapes else [(n, self.k) for n in self.spec.segments]
        if tensor == "weight":
            parts = [(self.n, self.k)]
        dtype = self.grad_dtype if tensor == "wgrad" else self.dtype
        for i, (rows, columns) in enumerate(parts):
            # a weight lies as it is, and so does its gradient
            shape = (columns, rows) if tensor in ("weight", "wgrad") and not self.oi else (rows, columns)
            if watch.statistics is not None:
                name = self._entry(layer, tensor, "sums", i, watch.statistics)
                self.collectors[name] = Collector(
                    watch.statistics, shape, dtype, self._amax_known(tensor) is not None
                )
                self.shown_metas[name] = self.collectors[name].meta
            if watch.dump:
                self.shown_metas[self._entry(layer, tensor, "dump", i, None)] = Meta(shape, dtype)
        if watch.statistics is not None and watch.statistics.twin:
            self.twins.add(tensor)

    def _rounding(self, tensor: str, how: Quantizer) -> Rounding:
        sizes = {
            "output": self.m * self.n,
            "dgrad": self.m * self.k,
            "wgrad": max(self.spec.segments) * self.k,
        }
        along = 0 if tensor == "wgrad" and not self.oi else 1  # as in (out, in)
        dtype = self.grad_dtype if tensor == "wgrad" else self.dtype
        return Rounding(self._shown(f"{tensor}_rounded"), how, along, sizes[tensor], dtype)

    def _entry(self, layer: str, tensor: str, kind: str, part: int, spec: Any) -> str:
        name = f"{self.spec.prefix}{WATCHED}{tensor}_{kind}{part}"
        self.entries[name] = Entry(layer, tensor, kind, part, spec)
        return name

    def _amax_known(self, tensor: str) -> str | None:
        """Returns the array that has a tensor's amax, since its cast takes it."""
        return self.own_amax(_OPERANDS[tensor]) if tensor in _OPERANDS else None

    # --- what there is --------------------------------------------------------------------------------------

    @property
    def scales_known(self) -> bool:
        return False

    def check(self, operation: str, metas: Metas) -> None:
        super().check(operation, metas)
        for operand in "xw":  # a layer gives them for all its products, also for one that takes none
            metas.get(f"{self.spec.prefix}{operand}_scale")
        metas.get("rng")

    def _metas_of(self, tensors: tuple[str, ...]) -> dict[str, Meta]:
        return {name: meta for name, meta in self.shown_metas.items() if self.entries[name].tensor in tensors}

    def outputs(self) -> dict[str, Meta]:
        return super().outputs() | self._metas_of(FORWARD)

    def grads(self) -> dict[str, Meta]:
        wanted = {"gradient": self.needs_x or self.needs_w, "dgrad": self.needs_x, "wgrad": self.needs_w}
        return super().grads() | self._metas_of(tuple(name for name in BACKWARD if wanted[name]))

    def kept(self) -> tuple[str, ...]:
        again = tuple(self.weights) if "dgrad" in self.twins and self.needs_x else ()
        return tuple(dict.fromkeys((*super().kept(), *again)))

    def scratch(self) -> dict[str, Meta]:
        own = super().scratch() | self._weight_buffer()
        if "output" in self.twins:
            own |= {self._shown("again"): Meta((self.m, self.n), self.dtype)} | self._bias_buffer()
        if self._arrays_of("output") or "output" in self.rounded:
            own[self._shown("y")] = Meta((self.m, self.n), self.dtype)
        return own | (self.rounded["output"].scratch() if "output" in self.rounded else {})

    def backward_scratch(self) -> dict[str, Meta]:
        own = super().backward_scratch()
        sizes = [self.m * self.k] * ("dgrad" in self.twins) + [self.n * self.k] * ("wgrad" in self.twins)
        if sizes:
            wider = max(self.dtype, self.grad_dtype, key=lambda dtype: dtype.itemsize)
            own |= {self._shown("again"): Meta((max(sizes),), wider)} | self._weight_buffer()
        for tensor, wanted in (("dgrad", self.needs_x), ("wgrad", self.needs_w)):
            own |= self.rounded[tensor].scratch() if wanted and tensor in self.rounded else {}
        return own | (self._alone_buffers() if self.needs_w else {})

    def _alone_buffers(self) -> dict[str, Meta]:
        """Returns where wgrad is made by itself."""
        weights = self.weights.items() if self.alone is not None else ()
        return {
            self._shown(f"alone_{name}"): Meta(self._weight_shape(n), self.grad_dtype)
            for name, (_, n) in weights
        }

    def workspace(self, k: Any) -> int:
        alone = 0 if self.alone is None else self.alone.workspace(k)
        return max(super().workspace(k), *(own.workspace(k) for own in self.collectors.values()), alone)

    # --- what it does ---------------------------------------------------------------------------------------

    def cast_x(self, ws: WorkingSet, x: ArrayView, amax_known: bool = False) -> None:
        super().cast_x(ws, x, amax_known)
        self._look(ws, "activation", x)

    def fprop(
        self, ws: WorkingSet, x: ArrayView | None, y: ArrayView, addend: ArrayView | None = None
    ) -> None:
        looked_at, is_rounded = self._sees(ws, "output"), "output" in self.rounded
        apart = addend is not None and (looked_at or is_rounded)
        alone = ws.scratch[self._shown("y")] if apart else y
        if apart:
            super().fprop(self._lasting(ws), x, alone, None)
        if not (apart and is_rounded):
            super().fprop(ws, x, y, addend)
        self._round(ws, "output", alone)
        if apart and is_rounded:
            assert addend is not None
            ws.kernels.add(alone, addend, y, ws.stream)
        if self._sees(ws, "weight"):
            self._look(ws, "weight", self._whole_weight(ws))
        twin = None
        if looked_at and "output" in self.twins:
            twin = ws.scratch[self._shown("again")]
            Product.fprop(self, ws, x, twin, None)
        self._look(ws, "output", alone, twin)

    def cast_g(self, ws: WorkingSet, g: ArrayView, with_bias: bool = True, amax_known: bool = False) -> None:
        super().cast_g(ws, g, with_bias, amax_known)
        self._look(ws, "gradient", g)

    def dgrad(self, ws: WorkingSet, g: ArrayView | None, dx: ArrayView) -> None:
        super().dgrad(ws, g, dx)
        self._round(ws, "dgrad", dx)
        twin = None
        if "dgrad" in self.twins and self._sees(ws, "dgrad"):
            twin = self._made_again(ws, dx)
            Product.dgrad(self, ws, g, twin)
        self._look(ws, "dgrad", dx, twin)

    def wgrad(self, ws: WorkingSet, g: ArrayView | None, x: ArrayView | None) -> None:
        seen, is_rounded = self._sees(ws, "wgrad"), "wgrad" in self.rounded
        alone = self._alone(ws, g, x) if seen or is_rounded else {}
        if not (alone and is_rounded):
            super().wgrad(ws, g, x)
        self._round(ws, "wgrad", *(alone or {name: ws.outputs[name] for name in self.weights}).values())
        for weight, made in alone.items() if is_rounded else ():
            ws.kernels.add(ws.outputs[weight], made, ws.outputs[weight], ws.stream)
        for i, (weight, (start, n)) in enumerate(self.weights.items() if seen else ()):
            out, twin = alone.get(weight, ws.outputs[weight]), None
            if "wgrad" in self.twins:
                assert g is not None
                part = g if len(self.weights) == 1 else g.slice(1, start, n)
                twin, (a, b) = self._made_again(ws, out), (part, x) if self.oi else (x, part)
                ws.kernels.gemm(a, b, twin, "tn", None, None, ws.scratch["workspace"], ws.stream)
            self._look(ws, "wgrad", out, twin, i)

    # --- helpers --------------------------------------------------------------------------------------------

    def _alone(self, ws: WorkingSet, g: ArrayView | None, x: ArrayView | None) -> dict[str, ArrayView]:
        """This call's wgrad by itself, by weight, where the call adds it to what is there: made once more, so
        that what is added has the bits that it has without an inspector."""
        if self.alone is None:
            return {}
        made = {name: ws.scratch[self._shown(f"alone_{name}")] for name in self.weights}
        self.alone.collectives, self.alone.split = self.collectives, self.split
        self.alone.wgrad(self._lasting(ws)._replace(outputs={**ws.outputs, **made}), g, x)
        return made

    @staticmethod
    def _lasting(ws: WorkingSet) -> WorkingSet:
        """Returns a working set for a further GEMM before the call's own: it frees nothing, which the call's
        own still reads."""
        return ws._replace(saved=MappingProxyType(ws.saved), scratch=MappingProxyType(ws.scratch))

    def _round(self, ws: WorkingSet, tensor: str, *parts: ArrayView) -> None:
        """Round what a GEMM has made, where that is asked for."""
        if tensor in self.rounded:
            self.rounded[tensor].run(ws, parts, lambda amax: self.share(ws, tensor, amax))

    def _shown(self, buffer: str) -> str:
        return f"{self.spec.prefix}{WATCHED}{buffer}"

    def _arrays_of(self, tensor: str) -> list[str]:
        """Names of the arrays that hold a tensor's statistics and dumps."""
        return [name for name, own in self.entries.items() if own.tensor == tensor]

    def _sees(self, ws: WorkingSet, tensor: str) -> bool:
        """Whether this pass has output arrays for a tensor's statistics; a recomputed pass has none."""
        return any(name in ws.outputs for name in self._arrays_of(tensor))

    def _look(
        self, ws: WorkingSet, tensor: str, view: ArrayView, twin: ArrayView | None = None, part: int = 0
    ) -> None:
        """Write a tensor's statistics, against its ``twin`` where it has one, and its dump."""
        for name in self._arrays_of(tensor):
            entry, out = self.entries[name], ws.outputs.get(name)
            if out is None or entry.part != part:
                continue
            if entry.kind == "dump":
                ws.kernels.copy(view, out, ws.stream)
            else:
                scale = ws.inputs.get(f"{self.spec.prefix}{_OPERANDS.get(tensor)}_scale")
                known = self._amax_known(tensor)
                amax = None if known is None else ws.outputs[known]
                self.collectors[name].run(ws, view, out, twin, scale, amax)

    def _made_again(self, ws: WorkingSet, like: ArrayView) -> ArrayView:
        """Returns where a gradient is made once more."""
        whole = ws.scratch[self._shown("again")]
        return ArrayView(whole.ptr, like.shape, like.dtype, whole.device, whole.owner)


@lru_cache(maxsize=64)
def watched(kind: type[Product]) -> type[Product]:
    """Returns the class of products that shows what those of ``kind`` work on."""
    return type(f"Watched{kind.__name__}", (WatchedProduct, kind), {})


WATCHED_CLASS.append(watched)
