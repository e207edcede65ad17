"""Names of statistics, and what each of them is of.

They are Transformer Engine's where it has the statistic. ::

    min max mean std l1_norm l2_norm cur_amax dynamic_range      of the tensor
    max_blockwise_dynamic_range crest_factor                     of its blocks
    kurtosis nan_count inf_count exponents
    [recipe_]underflows% overflows% saturated% scale_inv_min     of a cast, that of the layer's recipe or that
    scale_inv_max scales mse sqnr [_columnwise]                  of a named one
    cosine relative_error                                        of a gradient beside its twin
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

from fp8kit.arguments import choice, flag, integer, listed, shown
from fp8kit.errors import ArgumentError, meant
from fp8kit.numerics.run_folder import TENSORS
from fp8kit.numerics.whatif import CAST, cast_of, quantization_of, recipe_names
from fp8kit.ops.statistics import CastStatistics, StatisticsSpec, can_be_brief
from fp8kit.quantization import Quantization

OF_TENSOR = (
    *("min", "max", "mean", "std", "l1_norm", "l2_norm", "cur_amax", "dynamic_range"),
    *("kurtosis", "nan_count", "inf_count", "exponents"),
)
OF_BLOCKS = ("max_blockwise_dynamic_range", "crest_factor")
OF_CAST = (
    *("underflows%", "overflows%", "saturated%", "scale_inv_min", "scale_inv_max", "scales", "mse", "sqnr"),
)
OF_PAIR = ("cosine", "relative_error")
STATS = (*OF_TENSOR, *OF_BLOCKS, *OF_CAST, *OF_PAIR)
# of tensors what needs more than one look at each value, of casts what does not need its code
_DEEP = frozenset({"dynamic_range", "kurtosis"})
_BRIEF = frozenset({"underflows%", "overflows%", "saturated%", "scale_inv_min", "scale_inv_max"})
_COLUMNWISE = "_columnwise"
_BOTH = "_max_over_orientations"
_BLOCK = 32


@dataclass(frozen=True)
class Operand:
    """What tensor it is that statistics are taken of.

    * ``tensor``: "activation", "weight", "gradient", which a layer casts; "output", "dgrad", "wgrad", which
      its GEMMs make. It decides which of a recipe's rules casts it.
    * ``quantization``: how the layer casts, ``recipe.quantization``; None in high precision.
    * ``transposed``: whether a weight lies as (in, out), as JAX's kernels do.

    ArgumentError for another tensor.
    """

    tensor: str = "activation"
    quantization: Quantization | None = None
    transposed: bool = False

    def __post_init__(self) -> None:
        choice("statistics", "tensor", self.tensor, TENSORS)
        flag("statistics", "transposed", self.transposed)
        own: Any = self.quantization
        if not isinstance(own, Quantization | None):
            wanted = "a Quantization, such as recipe.quantization, or None"
            raise ArgumentError("statistics", "quantization", shown(own), wanted)


class Stat(NamedTuple):
    """A statistic that is asked for: its ``name`` in a log, its ``kind``, one of ``STATS``, and the numbers
    of what it is made of: which of the spec's tiles (one or two), or which of its casts."""

    name: str
    kind: str
    of: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Needs:
    """What ``request`` answers: the ``stats``, and the ``spec`` of the operation that collects them."""

    stats: tuple[Stat, ...]
    spec: StatisticsSpec
    operand: Operand

    @property
    def names(self) -> tuple[str, ...]:
        """The names in their order."""
        return tuple(stat.name for stat in self.stats)


def request(stats: Iterable[str | Mapping[str, Any]], operand: Operand | str = "activation") -> Needs:
    """Returns the statistics by name of an operand, validated, once for equal arguments.

    * ``stats``: names (this module's text), as a list or a tuple. A statistic of blocks may be a mapping with
      its options: ``{"crest_factor": {"block_size": 32}}``, ``{"max_blockwise_dynamic_range": {"block_size":
      32, "dims": 1, "max_over_orientations": False}}``; these are the defaults, but blocks of activations and
      weights are taken along both dimensions, as Transformer Engine does. Names in the log say what is not
      the default: "crest_factor_block_size_16", "max_blockwise_dynamic_range_block_size_32_dims_1"; they may
      be asked for as well.
    * ``operand``: what the tensor is; a word is its ``tensor``, in high precision.

    ArgumentError, which names the statistic and the nearest ones, for an unknown name, an unknown option, a
    statistic of the layer's own cast where it does not cast the tensor.
    """
    if not isinstance(operand, Operand):
        operand = Operand(operand)
    given = listed("statistics", "stats", stats, "a list of names")
    asked: list[tuple[str, tuple[tuple[str, Any], ...]]] = []
    for stat in given:
        if isinstance(stat, Mapping):
            asked += [_with_options(stat, name, options) for name, options in stat.items()]
        else:
            if not isinstance(stat, str):
                _refuse(stat)
            asked.append((stat, ()))
    return _request(tuple(dict.fromkeys(asked)), operand)


def _with_options(stat: Any, name: Any, options: Any) -> tuple[str, tuple[tuple[str, Any], ...]]:
    known: dict[str, tuple[str, ...]] = {
        "crest_factor": ("block_size",),
        "max_blockwise_dynamic_range": ("block_size", "dims", "max_over_orientations"),
    }
    if not isinstance(name, str) or name not in known or not isinstance(options, Mapping):
        near = meant(name, known)
        wanted = f"options, by name, of {' or '.join(known)}{near}"
        raise ArgumentError("statistics", "stats", shown(stat), wanted)
    for option, value in options.items():
        choice("statistics", f"stats: {name}", option, known[name])
        if option == "block_size":
            integer("statistics", f"stats: {name}: block_size", value, 1)
        elif option == "dims":
            integer("statistics", f"stats: {name}: dims", value, 1, 2)
        else:
            flag("statistics", f"stats: {name}: {option}", value)
    return name, tuple(sorted(options.items()))


def _refuse(name: Any) -> NoReturn:
    """ArgumentError for an unknown name; it says the nearest one."""
    recipes = recipe_names()
    prefixed = [
        f"{recipe}_{stat}{end}" for recipe in recipes for stat in OF_CAST for end in ("", _COLUMNWISE)
    ]
    own = (*STATS, *(f"{stat}{_COLUMNWISE}" for stat in OF_CAST))
    near = meant(name, own) or meant(name, prefixed, 3)
    wanted = f"one of {', '.join(STATS)}; those from {OF_CAST[0]} to {OF_CAST[-1]} with a recipe's name in "
    wanted += f"front, such as mxfp8_{OF_CAST[0]}, and _columnwise behind{near}"
    raise ArgumentError("statistics", "stats", shown(name), wanted)


@lru_cache(maxsize=1024)
def _request(asked: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...], operand: Operand) -> Needs:
    tiles: list[tuple[int, int]] = []
    casts: list[CastStatistics] = []
    found = [_stat(name, dict(options), operand, tiles, casts) for name, options in asked]
    stats = tuple({stat.name: stat for stat in found}.values())
    tensor = any(stat.kind in (*OF_TENSOR, *OF_BLOCKS) for stat in stats)
    twin = any(stat.kind in OF_PAIR or (stat.kind == "sqnr" and not stat.of) for stat in stats)
    kinds = {stat.kind for stat in stats}
    exponents, deep = tensor and "exponents" in kinds, tensor and bool(kinds & _DEEP)
    spec = StatisticsSpec(tensor, tuple(tiles), _briefly(casts, stats), twin, exponents, deep)
    return Needs(stats, spec, operand)


def _briefly(casts: list[CastStatistics], stats: tuple[Stat, ...]) -> tuple[CastStatistics, ...]:
    """Returns the casts, brief where no statistic of one needs more."""
    long = {stat.of for stat in stats if stat.kind in OF_CAST and stat.kind not in _BRIEF}
    return tuple(
        replace(cast, brief=(i,) not in long and can_be_brief(cast.quantizer)) for i, cast in enumerate(casts)
    )


def _place(items: list[Any], item: Any) -> int:
    """Returns the number of an item in a list, which it is put into where it is not there."""
    if item not in items:
        items.append(item)
    return items.index(item)


def _stat(name: str, options: dict[str, Any], operand: Operand, tiles: list[Any], casts: list[Any]) -> Stat:
    if name in OF_TENSOR or name in OF_PAIR:
        return Stat(name, name)
    block = _block(name, options, operand)
    if block is not None:
        full, kind, shapes = block
        return Stat(full, kind, tuple(_place(tiles, shape) for shape in shapes))
    columnwise = name.endswith(_COLUMNWISE)
    stem = name.removesuffix(_COLUMNWISE)
    kind = next((stat for stat in OF_CAST if stem == stat or stem.endswith(f"_{stat}")), "")
    if not kind:
        _refuse(name)
    recipe = stem.removesuffix(kind).removesuffix("_")
    if recipe and recipe not in recipe_names():
        _refuse(name)
    if not recipe and operand.tensor not in CAST:
        if kind == "sqnr" and not columnwise:
            return Stat(name, kind)
        wanted = f"a recipe's name in front of it: a layer does not cast its {operand.tensor}"
        raise ArgumentError("statistics", "stats", repr(name), wanted)
    return Stat(name, kind, (_place(casts, _cast(name, recipe, operand, columnwise)),))


def _cast(name: str, recipe: str, operand: Operand, columnwise: bool) -> CastStatistics:
    """Returns the cast that a statistic is of: ``given`` where it is the layer's own."""
    where = operand.tensor, operand.transposed
    active = operand.quantization if operand.tensor in CAST else None
    if not recipe and active is None:
        wanted = f"a recipe's name in front of it: the {operand.tensor} is in high precision"
        raise ArgumentError("statistics", "stats", repr(name), wanted)
    quantization = quantization_of(recipe) if recipe else active
    assert quantization is not None
    quantizer, along = cast_of(name, where[0], quantization, columnwise, where[1])
    own = "columnwise" if columnwise else "rowwise"
    if recipe and active is not None:  # a recipe by its name that is the layer's own
        try:
            same = cast_of(name, where[0], active, columnwise, where[1]) == (quantizer, along)
        except ArgumentError:
            same = False
    else:
        same = not recipe
    return CastStatistics(quantizer, along, own if same else "")


def _block(name: str, options: dict[str, Any], operand: Operand) -> tuple[str, str, list[Any]] | None:
    """(name in a log, kind, tiles) of a statistic of blocks; None for another."""
    kind = next((kind for kind in OF_BLOCKS if name == kind or name.startswith(f"{kind}_block_size_")), None)
    if kind is None:
        return None
    options = options or _options_in(name, kind)
    size = options.get("block_size", _BLOCK)
    if kind == "crest_factor":
        return (kind if size == _BLOCK else f"{kind}_block_size_{size}"), kind, [(1, size)]
    dims = options.get("dims", 1)
    both = options.get("max_over_orientations", operand.tensor in ("activation", "weight"))
    full = f"{kind}_block_size_{size}_dims_{dims}{_BOTH if both else ''}"
    shapes = [(size, size)] if dims == 2 else [(1, size), (size, 1)][: 1 + bool(both)]
    return full, kind, shapes


def _options_in(name: str, kind: str) -> dict[str, Any]:
    """Returns the options that a name in a log has."""
    if name == kind:
        return {}
    stem, found = name, dict[str, Any]()
    if kind == "max_blockwise_dynamic_range":
        found["max_over_orientations"] = stem.endswith(_BOTH)
        stem, _, dims = stem.removesuffix(_BOTH).partition("_dims_")
        if dims not in ("1", "2"):
            _refuse(name)
        found["dims"] = int(dims)
    size = stem.removeprefix(f"{kind}_block_size_")
    if not size.isdecimal() or int(size) < 1:
        _refuse(name)
    return {**found, "block_size": int(size)}
