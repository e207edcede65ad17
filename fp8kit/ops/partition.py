"""How a call of an operation splits into equal parts, each a call of the same operation: what operations
declare of it, as values that no framework knows.

A part runs on a device of its own. ``Partition`` says what becomes smaller and what is reduced over the
parts; ``Place``, how a part with random numbers draws those of its place in the whole; ``SharedAmaxes`` and
``Component``, how all parts cast with the scales of the whole. FP8 codes are stored in multiples of 16 rows
and columns (128 where scales belong to blocks): a part must need no padding, for padding inside the whole
array would be no zeros of it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from fp8kit.arrays import Shape
from fp8kit.formats import int64
from fp8kit.ops.product import ProductSpec
from fp8kit.ops.product_emulated import EmulatedProduct
from fp8kit.ops.products import product_class
from fp8kit.quantization import Quantizer
from fp8kit.spec import Meta, Metas, Operation, Partitions, Shapes

Dims = tuple[tuple[str, int, int], ...]


class Mean(NamedTuple):
    """The output ``name``, of one number, that is a mean over the rows of all parts. With the part's ``spec``
    it holds a number for each row instead; rows where input ``rows_of`` is ``ignored`` do not count.
    ``total``: saved array that gets (mean, count)."""

    name: str
    spec: Any
    rows_of: str
    ignored: int
    total: str


@dataclass(frozen=True)
class Partition:
    """One way to split a call.

    * ``kind``: "rows", "features" (of a product's output), "contraction", "inner" (features between two
      products) or "heads".
    * ``dims``: (name, dimension as the frontend has the array, dimension as the operation has it) of each
      input, and of each of the frontend's ``views``, that is split. What of the results is split follows from
      ``infer``.
    * ``sums``: outputs that are the sum of the parts'. ``once``: inputs that are added to such a sum: they
      count in one part, are zeros in the others, and their gradients are the same in all parts.
    * ``addend``: an input that is added to the sum after it is made, and that the parts leave out or, with
      ``stream``, return as that output, whose cotangent then is the sum's.
    * ``windows``: inputs of running sums: a part takes its window of them, from 0 on.
    * ``mean``: an output that is a mean over all parts' rows.

    Amaxes are maxima over the parts. Other results that are not split are the same in all parts going
    forward; going backward they are the sums of the parts', the cotangents of outputs that are the same in
    all parts counting in one.
    """

    kind: str
    dims: Dims
    sums: tuple[str, ...] = ()
    once: tuple[str, ...] = ()
    addend: str = ""
    stream: str = ""
    windows: tuple[str, ...] = ()
    mean: Mean | None = None


class Place(NamedTuple):
    """How a part knows its place in the whole, whose random numbers it draws: the part's ``spec``, and an
    input ``name`` of ``meta`` that holds ``numbers``, after its own ones where the whole has such an
    input."""

    spec: Any
    name: str
    meta: Meta
    numbers: tuple[Any, ...]


class SharedAmaxes(NamedTuple):
    """How parts cast with one scale for the whole that is taken now. ``spec``: of a part that gets the amaxes
    as inputs: for each amax output ``a`` that ``measure`` fills the input ``a_in``, and for each of
    ``arrays``, name -> input or, in backward, cotangent whose amax it is. ``spec`` None: amaxes are taken
    between products too; what the operation decomposes into runs instead."""

    spec: Any
    arrays: Mapping[str, str]


class Component(NamedTuple):
    """One of the calls that a call is made of. ``inputs``: its input -> name in the whole; ``results``: its
    output, saved array or amax -> name in the whole, where that is not its own; ``grad_amaxes``: likewise
    amaxes of its backward."""

    operation: Operation
    spec: Any
    inputs: Mapping[str, str]
    results: Mapping[str, str] = {}
    grad_amaxes: Mapping[str, str] = {}


def part_of(
    operation: Operation, spec: Any, metas: Metas, views: Shapes, made: Sequence[tuple[Partition, int]]
) -> tuple[Any, dict[str, Meta], dict[str, Shape]] | None:
    """Spec, metas and views of one part after the partitions ``made``, each into so many parts; None where
    there is no such part."""
    own = {name: meta for name, meta in metas.items() if meta is not None}
    shapes, seen, part = {name: meta.shape for name, meta in own.items()}, dict(views), spec
    for partition, count in made:
        for name, d_seen, d_own in partition.dims:
            more = int(name in partition.windows)  # sums of b lengths are b + 1 numbers
            for table, d in ((seen, d_seen), (shapes, d_own)):
                if name in table:
                    table[name] = _divided(table[name], d, count, more)
                    if not table[name]:
                        return None
        if partition.kind != "rows":
            part = operation.part(part, partition, count)
        if part is None:
            return None
        if not partition.stream:
            shapes.pop(partition.addend, None)
    smaller = {name: own[name]._replace(shape=shape) for name, shape in shapes.items()}
    kinds = {partition.kind for partition, _ in made}
    fits = _unpadded(operation.products(spec), operation.products(part), kinds, smaller, views)
    return (part, smaller, seen) if fits else None


def _divided(shape: Shape, d: int, count: int, more: int) -> Shape:
    """Returns a shape whose dimension ``d``, ``more`` aside, is a part; () where that does not divide."""
    size, rest = divmod(shape[d] - more, count)
    return () if rest else tuple(size + more if i == d % len(shape) else n for i, n in enumerate(shape))


def _unpadded(
    whole: Sequence[ProductSpec],
    parts: Sequence[ProductSpec],
    kinds: set[str],
    metas: Mapping[str, Meta],
    views: Shapes,
) -> bool:
    """Whether the FP8 operands of a part need no padding, and tiles of whole rows do not cross parts."""
    fp8 = next((p.fp8 for p in parts if p.fp8 is not None), None)
    if fp8 is None or not kinds:
        return True
    if fp8.whole:
        return False
    used = [gemm for gemm in fp8.gemms.values() if gemm.compute == "quantized"]
    if any(not isinstance(gemm.how, bool) for gemm in used):  # sums of parts are other sums
        return False
    if any(gemm.compute == "dequantized" for gemm in fp8.gemms.values()):  # what is saved is fprop's, padded
        return False
    if issubclass(product_class(fp8), EmulatedProduct):
        tiles = [own.tile for gemm in used for own in (gemm.a, gemm.b)]
        # tensors' and rows' scales know all of their line; a weight (out, in) is saved the other way
        if any(0 in tile for tile in tiles) or any(part.layout == "oi" for part in parts):
            return False
        if len({max(tile) for tile in tiles}) > 1:  # what one cast takes together is apart in another
            return False
    tile = fp8.x.tile
    if tile[0] and not tile[1]:  # a scale of a whole row, in the transposed operand of a column
        return False
    grain = tile[1] or 16
    if "rows" in kinds and (math.prod(metas["x"].shape[:-1]) % grain or max(tile[0], fp8.g.tile[0]) > 1):
        return False
    for before, after in zip(whole, parts, strict=True):
        if before.in_features != after.in_features and after.in_features % grain:
            return False
        if before.out_features == after.out_features:
            continue
        if after.out_features % (512 if fp8.w.tile[0] > 1 else grain):  # squares keep their scales in fours
            return False
        several = sum(n > 1 for n in views.get(f"{before.prefix}weight0", ())) > 2
        if tile[1] and several and f"{before.prefix}w_qt_inv" not in views:
            return False
    return True


# --- what operations declare with ---------------------------------------------------------------------------


def rows(metas: Metas, views: Shapes, *names: str, **more: Any) -> Partitions:
    """Returns a partition of the first dimension of ``names``, where the first of them has one beside the
    features; of the outputs and of what is saved alike."""
    here = [name for name in names if metas.get(name) is not None]
    first = metas[here[0]]
    if first is None or len(first.shape) < 2:
        return ()
    here += [name for name in views if name not in metas and not name.endswith(("w_qt", "w_qt_inv"))]
    return (Partition("rows", tuple((name, 0, 0) for name in here), **more),)


def features(product: ProductSpec, metas: Metas, views: Shapes) -> Partitions:
    """One partition for each dimension of a kernel that is no contraction."""
    x, weight = metas["x"], metas["weight0"]
    assert x is not None and weight is not None
    count, io = len(views.get("weight0", weight.shape)) - 1, int(product.layout == "io")
    at = len(views.get("y", x.shape)) - count
    return tuple(
        Partition(
            "features",
            (
                ("weight0", j + io, io),
                ("bias0", j, 0),
                ("residual", at + j, -1),
                ("y", at + j, -1),
                ("w_qt", 1 + j, 1),
                ("w_qt_inv", 1 + j, 1),
            ),
        )
        for j in range(count)
    )


def cached(*products: ProductSpec) -> bool:
    """Whether an operand comes in FP8, padded as a whole: its parts are not what a part of the call would
    take."""
    return any(p.weight_cached or p.input_cached for p in products)


def narrowed(product: ProductSpec, count: int, contraction: bool = False) -> ProductSpec | None:
    """Returns a product of a part of the output features, or of the contraction; None where they do not
    divide."""
    whole = product.in_features if contraction else product.out_features
    if whole % count or len(product.segments) > 1:
        return None
    if contraction:
        return replace(product, in_features=whole // count)
    return replace(product, segments=(whole // count,))


def with_amaxes(product: ProductSpec) -> ProductSpec | None:
    """Returns the product with its amaxes as inputs; None where it takes none of a whole tensor now."""
    fp8 = product.fp8
    if fp8 is None or not fp8.x.takes_amax or issubclass(product_class(fp8), EmulatedProduct):
        return None
    return replace(product, fp8=fp8.map(Quantizer.with_amax))


class RowWise(Operation):
    """Base of operations whose rows, of the input ``by_rows``, do not know of each other."""

    by_rows: ClassVar[str] = "x"

    def independent_rows(self, spec: Any, saved: Collection[str]) -> tuple[str, ...]:
        return (self.by_rows,)

    def partitions(self, spec: Any, metas: Metas, views: Shapes) -> Partitions:
        return rows(metas, views, self.by_rows)


class Products(Operation):
    """Base of operations with matrix products and a layer's parameters."""

    streams = True
    parameters: ClassVar[tuple[str, ...]] = ("weight", "bias")


class OneProduct(Products):
    """Base of operations with one ``product`` in their spec, whose output is y."""

    def products(self, spec: Any) -> tuple[ProductSpec, ...]:
        return (spec.product,)

    def part(self, spec: Any, partition: Partition, count: int) -> Any:
        product = narrowed(spec.product, count, partition.kind == "contraction")
        return None if product is None else replace(spec, product=product)

    def shared_amaxes(self, spec: Any) -> SharedAmaxes | None:
        product = with_amaxes(spec.product)
        if product is None:
            return None
        return SharedAmaxes(replace(spec, product=product), {f"{product.prefix}g_amax_in": "y"})


def scaled_by_rows(*products: ProductSpec) -> bool:
    """Whether no scale of these products' inputs belongs to several rows."""
    quantizers = [p.fp8.x for p in products if p.fp8 is not None]
    return all(x.tile[0] == 1 and (x.row_scaled or not x.two_level) for x in quantizers)


def part_place(spec: Any, parts: Mapping[str, tuple[Any, int]]) -> Place:
    """Returns the ``Place`` of a call that draws a number for each element, or for each sample, of rows: the
    part's number among equal parts."""
    return Place(spec, "rng", Meta((3,), int64), (parts["rows"][0] if "rows" in parts else 0,))
