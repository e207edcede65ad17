"""Products of one rank's part of a weight (tensor and sequence parallelism; Shoeybi et al. 2019,
arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198). Of P ranks each has ::

    "column"  W (N / P, K)   y (M, N / P) = x W^T          dx = sum over ranks of g W
    "row"     W (N, K / P)   y = sum over ranks of x W^T   dx (M, K / P) = g W

With ``sequence`` a column's x and dx, and a row's y and g, have M / P rows: x and g are gathered, dx and y
are sums of which each rank gets its rows.

Ranks share an amax before the cast that it is for, so that they cast as one rank with the whole tensor would.
What is gathered is cast first, and its codes travel; in high precision it travels where a recipe's casts are
emulated, where the part's codes would be padded, and for GEMMs that read it in high precision. Sums are made
in the layer's dtype. Of a gathered input each rank keeps its part, and gathers it once more for wgrad.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

from fp8kit import collectives, slowness
from fp8kit.arrays import ArrayView, Shape
from fp8kit.errors import ShapeError
from fp8kit.formats import DType
from fp8kit.ops.product import Product, ProductSpec
from fp8kit.ops.product_quantized import ALIGN, GEMMS, Operand, QuantizedProduct
from fp8kit.spec import Meta, WorkingSet

Arrays = dict[str, Meta]
# A product of a rank's rows with fewer operations is not made by itself: 2^36 take an H100 some 60 us. All
# that there is to win is the time of a transfer over NVLink, some 1500 / N of that; a further launch and a
# last wave of blocks that is not full take 5 us or so.
LEAST_OPERATIONS = 2**36
# what ``ParallelProduct`` leaves to its ``inner``
_OF_INNER = (
    *("check", "check_weights", "outputs", "scalars", "weight_outputs", "kept", "weight_names", "grads"),
    *("backward_inputs", "cast_scratch", "x_cast", "g_cast", "cast_weight", "measure_weight", "save_weight"),
)


class ParallelProduct(Product):
    """``Product`` of a spec that is ``parallel``. ``inner``: the products that run here, with all rows;
    ``part``: those of which this rank casts its rows of x or g, None where nothing is gathered in codes.
    ``m``: rows of x, as everywhere."""

    collectives: Any
    inner: Any

    def __init__(
        self,
        kind: type[Product],
        spec: ProductSpec,
        rows: int,
        dtype: DType,
        needs_x: bool,
        needs: Collection[str],
    ) -> None:
        super().__init__(spec, rows, dtype, needs_x, needs)
        self.collectives = comm = collectives.named(spec.group)
        ranks, self.column = comm.size, spec.parallel == "column"
        self.gathers_x, self.gathers_g = spec.sequence and self.column, spec.sequence and not self.column
        self.begins_dx = self.gathers_x
        self.whole_rows = rows * ranks if self.gathers_x else rows
        self.part_rows = rows if self.gathers_x else rows // ranks
        plain = replace(spec, parallel=None, group="", sequence=False)
        if not self.column and spec.bias == "add" and comm.rank:
            plain = replace(plain, bias="deferred")  # the sum has the bias once
        how = dtype, needs_x, needs
        self.inner = self._made(kind, plain, self.whole_rows, how, "n" if self.column else "k")
        for name in _OF_INNER:
            setattr(self, name, getattr(self.inner, name))
        self.part: Any = None
        self.whole_wgrad = self.inner.whole_wgrad
        # what is looked at is looked at as a whole, in high precision
        if spec.sequence and isinstance(self.inner, QuantizedProduct) and spec.watch is None:
            part = self._made(kind, plain, self.part_rows, how, "m")
            self.part = part if self._fits(part) else None
        self.x_in_codes = self.gathers_x and self.part is not None
        self.g_in_codes = self.gathers_g and self.part is not None
        self.fprop_reads_x = self.inner.fprop_reads_x or (self.gathers_x and not self.x_in_codes)
        self.wgrad_reads_x, self.casts_g = self.inner.wgrad_reads_x, self.inner.casts_g
        self.reads_g = self.inner.reads_g or (self.gathers_g and not self.g_in_codes)
        # a kernel may write codes where nothing has to be shared or gathered between
        self.scales_local = self.inner.scales_local and not spec.sequence
        self.fuses_cast = (self.scales_known or self.scales_local) and self.inner.fuses_cast

    def _made(self, kind: type[Product], spec: ProductSpec, rows: int, how: Any, split: str) -> Product:
        made = kind(spec, rows, *how)
        made.collectives, made.split = self.collectives, split
        return made

    def _fits(self, part: Any) -> bool:
        """Whether the codes of the ranks' parts are those of the whole, one beside the other."""
        inner = self.inner
        if self.gathers_x and (inner.plain & {"fprop", "wgrad"} or inner.decoded):
            return False
        if self.gathers_g and self.inner.reads_g:
            return False
        names = ("x_q", "x_qt") if self.gathers_x else ("g_q", "g_qt")
        ranks = self.collectives.size
        grain = max(ALIGN, *(max(inner.operands[name][2].tile) for name in names if name in inner.operands))
        whole, parts = inner._metas(*names), part._metas(*names)
        fits: bool = self.part_rows % grain == 0
        for name, meta in whole.items():
            along = _along(parts[name].shape, meta.shape)
            fits = fits and (along is None or parts[name].shape[along] * ranks == meta.shape[along])
        if not fits:
            slowness.say(
                f"{self.part_rows} rows of a rank are no multiple of what codes are stored in",
                "a sequence-parallel input is gathered in high precision, twice the bytes of FP8",
                f"take a number of rows of each rank that is a multiple of {max(grain, 128)}",
            )
        return fits

    # --- what there is --------------------------------------------------------------------------------------

    @property
    def y_rows(self) -> int:
        return self.whole_rows if self.column else self.part_rows

    def y_shape(self, x: Shape) -> Shape:
        if not self.spec.sequence:
            return *x[:-1], self.n
        ranks = self.collectives.size
        if len(x) < 2 or (self.gathers_g and x[0] % ranks):
            wanted = f"a first dimension, the sequence's, that {ranks} ranks divide"
            raise ShapeError("linear", "x", f"shape {x}", wanted)
        first = x[0] * ranks if self.gathers_x else x[0] // ranks
        return first, *x[1:-1], self.n

    @property
    def scales_known(self) -> bool:
        return self.inner.scales_known and not self.spec.sequence

    @property
    def needs_rng(self) -> bool:
        return self.inner.needs_rng  # type: ignore[no-any-return]

    def takes_amax(self, operand: str) -> bool:
        gathered = self.part is None and (self.gathers_x if operand == "x" else self.gathers_g)
        return self.inner.takes_amax(operand) and not gathered

    def saved(self) -> Arrays:
        return (self.part if self.x_in_codes else self.inner).saved()  # type: ignore[no-any-return]

    def scratch(self) -> Arrays:
        own: Arrays = self.inner.scratch()
        if self.gathers_x:
            own |= self._gathering("x_q") if self.part is not None else self._high("x")
        if self.gathers_g:
            own[self._own("sums")] = Meta((self.whole_rows, self.n), self.dtype)
        return own

    def backward_scratch(self) -> Arrays:
        own: Arrays = self.inner.backward_scratch()
        if self.gathers_x:
            if self.needs_x:
                own[self._own("sums")] = Meta((self.whole_rows, self.k), self.dtype)
            if self.needs_w and self.part is not None:
                whole = self.inner._metas("x_qt")
                own |= {self._own(f"{name}_whole"): whole[name] for name in self._moving("x_qt")}
                own |= self._gathering("x_qt")
            elif self.needs_w and self.inner.wgrad_reads_x:
                own |= self._high("x")
        if self.g_in_codes:
            for operand, wanted in (("g_q", self.needs_x), ("g_qt", self.needs_w)):
                own |= self._gathering(operand) if wanted else {}
        elif self.gathers_g:
            own |= self._high("g")
        return own

    def workspace(self, k: Any) -> int:
        return max(int(own.workspace(k)) for own in (self.inner, self.part) if own is not None)

    # --- forward --------------------------------------------------------------------------------------------

    def cast_x(self, ws: WorkingSet, x: ArrayView, amax_known: bool = False) -> None:
        if not self.gathers_x:
            if amax_known:
                self.inner.share(ws, "x", ws.outputs[f"{self.spec.prefix}x_amax"])
            self.inner.cast_x(ws, x, amax_known)
        elif self.part is None:
            self.inner.cast_x(ws, self._gather_high(ws, "x", x))
        else:
            if amax_known:
                self.part.share(ws, "x", ws.outputs[f"{self.spec.prefix}x_amax"])
            self.part.cast_x(self._parts(ws, "x_q"), x, amax_known)
            for name in self._moving("x_q"):  # beside the weight's cast
                self._start(ws, name, ws.scratch[self._own(name)], ws.scratch[name])

    def fprop(
        self, ws: WorkingSet, x: ArrayView | None, y: ArrayView, addend: ArrayView | None = None
    ) -> None:
        if self.x_in_codes:
            if self._by_parts("fprop"):
                self.inner.fprop(ws, None, y, addend, by=partial(self._as_it_arrives, "fprop"))
            else:
                self.inner.fprop(ws, None, y, addend, partial(self._arrive, ws, "x_q"))
            return
        if self.gathers_x:
            x = ws.scratch[self._own("x")]
        if self.column:
            self.inner.fprop(ws, x, y, addend)
            return
        if self.gathers_g:
            self._summed(ws, x, ws.scratch[self._own("sums")], y)
        else:
            self.inner.fprop(ws, x, y)
            if self.spec.sums:
                self.collectives.all_reduce(y, "sum", ws.stream, self.spec.label)
        if addend is not None:
            ws.kernels.add(y, addend, y, ws.stream)

    def _summed(self, ws: WorkingSet, x: ArrayView | None, sums: ArrayView, y: ArrayView) -> None:
        """A row's product in ``sums``, and in y this rank's rows of the ranks' sum."""
        comm, inner = self.collectives, self.inner
        if self._by_parts("fprop"):
            inner.fprop(ws, x, sums, by=partial(self._and_send, y))
            comm.wait(y, ws.stream)
        else:
            inner.fprop(ws, x, sums)
            comm.reduce_scatter(sums, y, ws.stream, self.spec.label)

    # --- backward -------------------------------------------------------------------------------------------

    def cast_g(self, ws: WorkingSet, g: ArrayView, with_bias: bool = True, amax_known: bool = False) -> None:
        if not self.gathers_g:
            if amax_known:
                self.inner.share(ws, "g", ws.outputs[f"{self.spec.prefix}g_amax"])
            self.inner.cast_g(ws, g, with_bias, amax_known)
        elif self.part is None:
            if with_bias and self.needs_b:  # of the rank's rows: the reduction of gradients adds them
                Product.cast_g(self, ws, g)
            self.inner.cast_g(ws, self._gather_high(ws, "g", g), with_bias=False)
        else:
            wanted = [name for name, own in (("g_q", self.needs_x), ("g_qt", self.needs_w)) if own]
            self.part.cast_g(self._parts(ws, *wanted), g, with_bias, amax_known)
            # the GEMM that comes first waits for its own operand alone
            for operand in reversed(wanted) if self.wgrad_first else wanted:
                for name in self._moving(operand):
                    self._start(ws, name, ws.scratch[self._own(name)], ws.scratch[name])

    def dgrad(self, ws: WorkingSet, g: ArrayView | None, dx: ArrayView) -> None:
        comm, inner = self.collectives, self.inner
        out = ws.scratch[self._own("sums")] if self.gathers_x else dx
        if self.needs_w:
            self._start_x(ws)
        if self.g_in_codes and self._by_parts("dgrad"):
            inner.dgrad(ws, None, out, by=partial(self._as_it_arrives, "dgrad"))
        else:
            if self.g_in_codes:
                self._arrive(ws, "g_q")
            inner.dgrad(ws, self._whole_g(ws, g), out)
        if self.gathers_x:
            comm.start("reduce_scatter", out, dx, ws.stream, self.spec.label)
        elif self.column and self.spec.sums:
            comm.all_reduce(dx, "sum", ws.stream, self.spec.label)

    def finish(self, ws: WorkingSet, dx: ArrayView) -> None:
        self.collectives.wait(dx, ws.stream)

    def wgrad(self, ws: WorkingSet, g: ArrayView | None, x: ArrayView | None) -> None:
        if self.x_in_codes:
            if not self.needs_x:  # else ``dgrad`` has begun it
                self._start_x(ws)
            moved = {name: ws.scratch[self._own(f"{name}_whole")] for name in self._moving("x_qt")}
            for name, whole in moved.items():
                self._arrive_array(ws, name, whole)
            ws = ws._replace(saved={**ws.saved, **moved})
        elif self.gathers_x and self.inner.wgrad_reads_x:
            assert x is not None
            x = self._gather_high(ws, "x", x)
        if self.g_in_codes:
            self._arrive(ws, "g_qt")
        self.inner.wgrad(ws, self._whole_g(ws, g), x)

    def _whole_g(self, ws: WorkingSet, g: ArrayView | None) -> ArrayView | None:
        return ws.scratch[self._own("g")] if self.gathers_g and not self.g_in_codes else g

    # --- by parts -------------------------------------------------------------------------------------------

    def _by_parts(self, gemm: str) -> bool:
        """Whether the rows of each rank are multiplied by themselves, as they arrive or before they are sent:
        where scales are of whole tensors."""
        large = 2 * self.part_rows * self.n * self.k >= LEAST_OPERATIONS
        if self.part is None or not self.collectives.by_parts or not large:
            return False
        left = self.inner.operands.get(GEMMS[gemm][0])
        return left is not None and left[2].tile == (0, 0)

    def _rows(self, rank: int, *arrays: ArrayView | None) -> list[Any]:
        """Returns a rank's rows of these."""
        start = rank * self.part_rows
        return [None if array is None else array.slice(0, start, self.part_rows) for array in arrays]

    def _as_it_arrives(
        self,
        gemm: str,
        ws: WorkingSet,
        left: Operand,
        right: Operand,
        out: ArrayView,
        how: Any,
        bias: ArrayView | None = None,
        addend: ArrayView | None = None,
    ) -> None:
        """A product of rows that the ranks have: first of this one's."""
        comm, inner, (codes, *scale) = self.collectives, self.inner, left
        for step in range(comm.size):
            rank = (comm.rank + step) % comm.size
            if step:
                comm.wait_part(codes, rank, ws.stream)
                (part,) = self._rows(rank, codes)
            else:
                part = ws.scratch[self._own(inner.names[GEMMS[gemm][0]][0])]
            to, plus = self._rows(rank, out, addend)
            inner.multipliers[gemm](ws, (part, *scale), right, to, how, bias, plus)
        comm.wait(codes, ws.stream)

    def _and_send(
        self,
        y: ArrayView,
        ws: WorkingSet,
        left: Operand,
        right: Operand,
        out: ArrayView,
        how: Any,
        bias: ArrayView | None = None,
        addend: ArrayView | None = None,
    ) -> None:
        """fprop whose rows are sent to their ranks, where they are summed into ``y``: last this one's."""
        comm, inner, (codes, *scale) = self.collectives, self.inner, left
        for step in range(1, comm.size + 1):
            rank = (comm.rank + step) % comm.size
            part, to, plus = self._rows(rank, codes, out, addend)
            inner.multipliers["fprop"](ws, (part, *scale), right, to, how, bias, plus)
            comm.start_part(out, y, rank, ws.stream, self.spec.label)

    # --- gathering ------------------------------------------------------------------------------------------

    def _own(self, name: str) -> str:
        return f"{self.spec.prefix}parallel_{name}"

    def _high(self, operand: str) -> Arrays:
        """Returns where x or g is gathered in high precision."""
        columns = self.k if operand == "x" else self.n
        return {self._own(operand): Meta((self.whole_rows, columns), self.dtype)}

    def _gather_high(self, ws: WorkingSet, operand: str, x: ArrayView) -> ArrayView:
        whole: ArrayView = ws.scratch[self._own(operand)]
        self.collectives.all_gather(x, whole, ws.stream, self.spec.label)
        return whole

    def _moving(self, operand: str) -> Arrays:
        """Returns the arrays of an operand of which each rank has a part, as the rank has them."""
        whole = self.inner._metas(operand)
        return {n: meta for n, meta in self.part._metas(operand).items() if meta.shape != whole[n].shape}

    def _gathering(self, operand: str) -> Arrays:
        """Returns the parts of an operand that are made for one pass, and where parts are gathered that do
        not lie one after the other in the whole."""
        whole = self.inner._metas(operand)
        own: Arrays = {}
        for name, meta in self._moving(operand).items():
            if operand != "x_qt":
                own[self._own(name)] = meta
            if _along(meta.shape, whole[name].shape):
                ranks = self.collectives.size
                own[self._own(f"{name}_gathered")] = Meta((ranks, *meta.shape), meta.dtype)
        return own

    def _parts(self, ws: WorkingSet, *operands: str) -> WorkingSet:
        """Returns what a cast of this rank's rows works on."""
        moved = {name: ws.scratch[self._own(name)] for operand in operands for name in self._moving(operand)}
        return ws._replace(scratch={**ws.scratch, **moved})

    def _start_x(self, ws: WorkingSet) -> None:
        """Begin to gather x's codes once more, for wgrad."""
        for name in self._moving("x_qt") if self.x_in_codes else ():
            self._start(ws, name, ws.saved[name], ws.scratch[self._own(f"{name}_whole")])

    def _start(self, ws: WorkingSet, name: str, part: ArrayView, whole: ArrayView) -> None:
        """Begin to gather an array of the ranks' parts."""
        gathered = self._gathered(ws, name, whole)
        self.collectives.start("all_gather", part, gathered, ws.stream, self.spec.label)

    def _arrive(self, ws: WorkingSet, operand: str) -> None:
        """Wait for the codes of x, in forward, or of g."""
        for name in self._moving(operand):
            self._arrive_array(ws, name, ws.scratch[name])

    def _arrive_array(self, ws: WorkingSet, name: str, whole: ArrayView) -> None:
        gathered = self._gathered(ws, name, whole)
        self.collectives.wait(gathered, ws.stream)
        if gathered is not whole:
            along = _along(gathered.shape[1:], whole.shape)
            assert along is not None
            rows = gathered.shape[along + 1]
            for rank in range(self.collectives.size):
                ws.kernels.copy(gathered.at(rank), whole.slice(along, rank * rows, rows), ws.stream)

    def _gathered(self, ws: WorkingSet, name: str, whole: ArrayView) -> ArrayView:
        """Returns where parts are gathered: in ``whole``, unless they do not lie one after the other
        there."""
        return ws.scratch.get(self._own(f"{name}_gathered"), whole)


def _along(part: Shape, whole: Shape) -> int | None:
    """Returns the dimension in which a part is smaller; None where it is not."""
    return next((i for i, (a, b) in enumerate(zip(part, whole, strict=True)) if a != b), None)
