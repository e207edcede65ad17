"""Along what a program may be cut into equal parts, and the program of one part.

A ``Cut`` names inputs, views and static arguments that become smaller by a factor. FP8 codes are stored in
multiples of 16 rows and columns (128 where scales belong to blocks): a part must need no padding, for padding
inside the whole array would be no zeros of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fp8kit.errors import Fp8kitError
from fp8kit.ops.activation import ActivationSpec
from fp8kit.ops.attention import AttentionSpec
from fp8kit.ops.product import ProductSpec
from fp8kit_jax.program import Program

# running sums: whole on every device, which takes its window of them
RUNNING = ("cu_seqlens_q", "cu_seqlens_kv")
# kind of a cut -> the bias of a y that is a sum over the parts
_BIASES = {"contraction": ("bias0",), "inner": ("fc2_bias0",)}
# name, its dimension as JAX has it, its dimension as the operation has it
Places = tuple[tuple[str, int, int], ...]


class Cut(NamedTuple):
    """One way to cut. ``places``: what becomes smaller; ``kind``: "rows", "features", "contraction", "inner",
    "heads", or "tile": rows that share one scale."""

    kind: str
    places: Places

    def once(self, program: Program) -> tuple[int, ...]:
        """Which arguments join a result that is a sum over the parts: they count in one part only. Forward
        they are biases; backward they are the cotangents of what ``norm_linear`` and ``norm_mlp`` return
        beside y, which join the gradient of x."""
        if program.face == "forward":
            return tuple(
                i for i, (name, _) in enumerate(program.arguments) if name in _BIASES.get(self.kind, ())
            )
        start, beside = len(program.arguments) - len(program.cotangents), self.kind in ("features", "inner")
        return tuple(
            start + i
            for i, name in enumerate(program.cotangents)
            if beside and name in ("normed", "residual")
        )

    def sums(self, face: str, result: str) -> bool:
        """Whether a result that is not cut is the sum of the parts' results; otherwise it is the same in all
        of them."""
        if face == "forward":
            return self.kind in ("contraction", "inner") and result == "y"
        return face == "backward" and self.kind != "contraction" and result not in _BIASES.get(self.kind, ())


@functools.lru_cache(maxsize=4096)
def cuts(program: Program) -> tuple[Cut, ...]:
    """The cuts of a program, those that cost no sum over devices first."""
    found = _TABLE.get(program.operation)
    return () if found is None else tuple(cut for cut in found(program) if cut.places)


@functools.lru_cache(maxsize=4096)
def local(program: Program, made: tuple[tuple[Cut, int], ...]) -> Program | None:
    """The program of one part after the cuts ``made``, each into so many parts; None where there is no such
    program."""
    metas, views, spec = dict(program.metas), dict(program.views), program.spec
    for cut, count in made:
        for name, seen, own in cut.places:
            for table, d in ((views, seen), (metas, own)):
                if name not in table:
                    continue
                entry: Any = table[name]
                shape = list(entry if table is views else entry.shape)
                more = int(name in RUNNING)  # sums of b lengths are b + 1 numbers
                if (shape[d] - more) % count:
                    return None
                shape[d] = (shape[d] - more) // count + more
                table[name] = tuple(shape) if table is views else entry._replace(shape=tuple(shape))
        spec = _smaller(spec, cut, count)
        if spec is None:
            return None
    part = replace(program, spec=spec, metas=tuple(metas.items()), views=tuple(views.items()))
    try:
        _ = part.signature
    except Fp8kitError:
        return None
    return part if _aligned(program, part, [cut.kind for cut, _ in made]) else None


def unjoined(program: Program, arrays: Sequence[Any]) -> tuple[Program, list[Any], Any]:
    """A program that adds x or a residual to its y, as one whose y is a sum over parts: it adds nothing, what
    is to be added to the sum comes last of the three, and in ``norm_mlp``'s backward y's cotangent is that of
    a residual stream as well, which counts ``once``."""
    names = [name for name, _ in program.arguments]
    if program.operation == "linear" and "residual" in names:
        metas, at = tuple(pair for pair in program.metas if pair[0] != "residual"), names.index("residual")
        return replace(program, metas=metas), [*arrays[:at], *arrays[at + 1 :]], arrays[at]
    if not getattr(program.spec, "joins", False):
        return program, list(arrays), None
    have = dict(zip(names, arrays, strict=True))
    if program.face != "backward":
        return replace(program, spec=replace(program.spec, joins=False)), list(arrays), have["x"]
    spec, cotangents = replace(program.spec, joins=False, residual=True), (*program.cotangents, "residual")
    return replace(program, spec=spec, cotangents=cotangents), [*arrays, have["y"]], None


# --- static arguments ---------------------------------------------------------------------------------------


def _smaller(spec: Any, cut: Cut, count: int) -> Any:
    """The spec of a part; None where a number does not divide."""

    def product(p: ProductSpec, side: str) -> ProductSpec | None:
        whole = p.in_features if side == "in" else p.out_features
        if whole % count or len(p.segments) > 1:
            return None
        return (
            replace(p, in_features=whole // count) if side == "in" else replace(p, segments=(whole // count,))
        )

    if cut.kind == "rows":
        return spec
    if cut.kind == "tile":
        return None if spec.tile[0] % count else replace(spec, tile=(spec.tile[0] // count, spec.tile[1]))
    if cut.kind in ("features", "contraction"):
        found = product(spec.product, "out" if cut.kind == "features" else "in")
        return None if found is None else replace(spec, product=found)
    if cut.kind == "inner" and isinstance(spec, ActivationSpec):
        return None if spec.features % count else replace(spec, features=spec.features // count)
    if cut.kind == "inner":
        fc1, fc2 = product(spec.fc1, "out"), product(spec.fc2, "in")
        return None if fc1 is None or fc2 is None else replace(spec, fc1=fc1, fc2=fc2)
    if isinstance(spec, AttentionSpec):
        if spec.num_heads % count or spec.num_gqa_groups % count:
            return None
        return replace(spec, num_heads=spec.num_heads // count, num_gqa_groups=spec.num_gqa_groups // count)
    ((heads, dim, angles),) = spec.segments
    return None if heads % count else replace(spec, segments=((heads // count, dim, angles),))


def products(spec: Any) -> list[ProductSpec]:
    """The products of a spec."""
    return [getattr(spec, name) for name in ("product", "fc1", "fc2") if hasattr(spec, name)]


def _aligned(whole: Program, part: Program, kinds: Sequence[str]) -> bool:
    """Whether the FP8 operands of a part need no padding, and tiles of whole rows do not cross parts."""
    own = products(part.spec)
    fp8 = next((p.fp8 for p in own if p.fp8 is not None), None)
    if fp8 is None:
        return True
    tile = fp8.x.tile
    if kinds and tile[0] and not tile[1]:  # a scale of a whole row, in the transposed operand of a column
        return False
    grain = tile[1] or 16
    rows = math.prod(dict(part.metas)["x"].shape[:-1])
    if "rows" in kinds and (rows % grain or max(tile[0], fp8.g.tile[0]) > 1):
        return False
    for before, after in zip(products(whole.spec), own, strict=True):
        if before.in_features != after.in_features and after.in_features % grain:
            return False
        if before.out_features != after.out_features:
            # squares keep their scales in fours
            if after.out_features % (512 if fp8.w.tile[0] > 1 else grain):
                return False
            views = dict(whole.views)
            if (
                tile[1]
                and sum(n > 1 for n in views.get(f"{before.prefix}weight0", ())) > 2
                and f"{before.prefix}w_qt_inv" not in views
            ):
                return False
    return True


# --- the table ----------------------------------------------------------------------------------------------


def _rows(*names: str) -> Callable[[Program], list[Cut]]:
    """A cut of the first dimension of ``names``, where x has one beside the features; of the outputs and what
    is saved alike."""

    def found(program: Program) -> list[Cut]:
        metas = dict(program.metas)
        here = [name for name in names if name in metas]
        if len(metas[here[0]].shape) < 2:
            return []
        here += [
            name for name, _ in program.views if name not in metas and not name.endswith(("w_qt", "w_qt_inv"))
        ]
        return [Cut("rows", tuple((name, 0, 0) for name in here))]

    return found


def _features(program: Program) -> list[Cut]:
    """One cut for each dimension of the kernel that is no contraction."""
    metas, views, product = dict(program.metas), dict(program.views), program.spec.product
    count, io = len(views.get("weight0", metas["weight0"].shape)) - 1, product.layout == "io"
    at = len(views.get("y", metas["x"].shape)) - count
    places = [
        (
            ("weight0", j + io, int(io)),
            ("bias0", j, 0),
            ("residual", at + j, -1),
            ("y", at + j, -1),
            ("w_qt", 1 + j, 1),
            ("w_qt_inv", 1 + j, 1),
        )
        for j in range(count)
    ]
    return [Cut("features", place) for place in places]


def _cached(product: ProductSpec) -> bool:
    """Whether an operand comes in FP8, padded as a whole: its parts are not what a part of the program would
    take."""
    return product.weight_cached or product.input_cached


def _norm_linear(program: Program) -> list[Cut]:
    return [] if _cached(program.spec.product) else [*_rows("x")(program), *_features(program)]


def _linear(program: Program) -> list[Cut]:
    product, views = program.spec.product, dict(program.views)
    if _cached(product):
        return []
    io = product.layout == "io"
    at = 0 if io else len(views.get("weight0", (0, 0))) - 1
    contraction = Cut(
        "contraction", (("x", -1, -1), ("weight0", at, 1 - io), ("w_qt", 0, 0), ("w_qt_inv", 0, 0))
    )
    return [*_rows("x", "residual")(program), *_features(program), contraction]


def _norm_mlp(program: Program) -> list[Cut]:
    s = program.spec
    if s.recompute or _cached(s.fc1) or _cached(s.fc2):
        return []
    io = int(s.fc1.layout == "io")
    inner = Cut(
        "inner",
        (
            ("fc1_weight0", 1 + io, io),
            ("fc1_bias0", 1, 0),
            ("h", 2, 1),
            ("fc1_w_qt", 2, 1),
            ("fc1_w_qt_inv", 2, 1),
            ("fc2_weight0", 1 - io, 1 - io),
        ),
    )
    return [*_rows("x")(program), inner]


def _activation(program: Program) -> list[Cut]:
    return [*_rows("x")(program), Cut("inner", (("x", -1, -1),))]


def _attention(program: Program) -> list[Cut]:
    """By batches and by heads."""
    spec, metas, views = program.spec, dict(program.metas), dict(program.views)
    if spec.packed:
        return []
    main = [name for name in ("q", "k", "v", "kv", "qkv") if name in metas]
    at = spec.qkv_format.index("b")
    batch = metas[main[0]].shape[at]
    rows, heads = [(name, at, at) for name in (*main, "o")], [("o", 2, -1)]
    heads += [(name, 3, 2) if name in views else (name, 2, 2) for name in main]
    for name in {"mask", "bias"} & metas.keys():  # 1 stands for all
        rows += [(name, 0, 0)] if metas[name].shape[0] == batch != 1 else []
        heads += [(name, 1, 1)] if metas[name].shape[1] == spec.num_heads != 1 else []
    if "alibi_slopes" in metas:
        last = len(metas["alibi_slopes"].shape) - 1
        rows += [("alibi_slopes", 0, 0)] * last
        heads.append(("alibi_slopes", last, last))
    heads += [("softmax_offset", 0, 0)] if "softmax_offset" in metas else []
    rows += [(name, 0, 0) for name in RUNNING if name in metas]
    apart = all(name in views or len(metas[name].shape) == 4 for name in main)
    return [Cut("rows", tuple(sorted(rows))), Cut("heads", tuple(sorted(heads)) if apart else ())]


def _rope(program: Program) -> list[Cut]:
    spec, metas = program.spec, dict(program.metas)
    if spec.qkv_format == "thd" or len(metas["x"].shape) != 4:
        return []
    at = spec.qkv_format.index("b")
    rows = [("x", at, at), *([("start_positions", 0, 0)] if "start_positions" in metas else [])]
    return [Cut("rows", tuple(rows)), Cut("heads", (("x", 2, 2),))]


def _drop_path(program: Program) -> list[Cut]:
    return _rows("x", "residual")(program) if program.spec.format == "bshd" else []


def _casts(program: Program) -> list[Cut]:
    """Rows of the codes, and of the scales where they belong to rows. Not where bits are drawn, which know
    their place in the array, and not through tiles of several rows, but through one that is the whole."""
    spec, metas = program.spec, dict(program.metas)
    main = "x" if "x" in metas else "q"
    shape = metas[main].shape
    if len(shape) < 2 or getattr(spec, "stochastic", False):
        return []
    if spec.tile[0] == 1:
        return [Cut("rows", tuple((name, 0, 0) for name in (main, "scale", "scale_inv") if name in metas))]
    return [Cut("tile", ((main, 0, 0),))] if spec.tile == (math.prod(shape[:-1]), shape[-1]) else []


_TABLE: dict[str, Callable[[Program], list[Cut]]] = {
    "linear": _linear,
    "norm_linear": _norm_linear,
    "norm_mlp": _norm_mlp,
    "norm": _rows("x"),
    "activation": _activation,
    "attention": _attention,
    "rope": _rope,
    "cross_entropy": _rows("logits", "targets"),
    "dropout_add": _rows("x", "residual"),
    "drop_path": _drop_path,
    "quantize": _casts,
    "dequantize": _casts,
}
