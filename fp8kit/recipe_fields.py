"""What recipes are made of, by Transformer Engine's names: a recipe's formats, how one operand is quantised,
how one GEMM accumulates; the base of all these values, which is strict, and that of all recipes.
``fp8kit.recipe`` has them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from enum import Enum
from operator import attrgetter
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, dataclass_transform
from weakref import WeakValueDictionary

from fp8kit import formats
from fp8kit.accumulation import ACCUMULATIONS, Accumulation
from fp8kit.arguments import choice, shown
from fp8kit.attention_quantization import AttentionQuantization, check_fields, words_of
from fp8kit.errors import RecipeError, UnsupportedError
from fp8kit.lru import LRU
from fp8kit.quantization import AmaxHistory, KnownFields, Quantization, Quantizer

_Class = TypeVar("_Class", bound=type[Any])


class FormatLimits(NamedTuple):
    """Largest finite value of the forward and of the backward format."""

    max_fwd: float
    max_bwd: float


_PAIRS = {  # formats of inputs and weights, and of output gradients
    "E2M1": (formats.E2M1, formats.E2M1),
    "E4M3": (formats.E4M3, formats.E4M3),
    "E5M2": (formats.E5M2, formats.E5M2),
    "HYBRID": (formats.E4M3, formats.E5M2),
}


class Format(Enum):
    """Which narrow format the forward tensors (input, weight) and the backward tensors (output gradient)
    take: a recipe's ``fp8_format``, by Transformer Engine's name. The number formats themselves, as
    ``fk.quantize`` takes them, are ``fp8kit.Format``s: ``fk.E4M3``.

    HYBRID is E4M3 forward and E5M2 backward: gradients need range more than precision (Micikevicius et al.
    2022, section 3). ``value.max_fwd`` and ``value.max_bwd`` are the largest finite values; ``forward`` and
    ``backward`` the formats themselves.
    """

    E2M1 = FormatLimits(formats.E2M1.max, formats.E2M1.max)
    E4M3 = FormatLimits(formats.E4M3.max, formats.E4M3.max)
    E5M2 = FormatLimits(formats.E5M2.max, formats.E5M2.max)
    HYBRID = FormatLimits(formats.E4M3.max, formats.E5M2.max)

    forward: formats.Format
    backward: formats.Format

    def __init__(self, *limits: float) -> None:
        # attributes, since an enumeration is slow to say its name
        self.forward, self.backward = _PAIRS[self._name_]


class Strict(KnownFields):
    """Base of the values below: arguments that are no field are a RecipeError that names the nearest
    field."""

    def __getstate__(self) -> dict[str, Any]:
        """Returns the fields, without what is derived from them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    def parts(self) -> tuple[Any, ...]:
        """Returns the class and the fields, those that have fields as their parts: what ``torch.compile`` can
        trace, and ``of_parts`` make whole. UnsupportedError for a field that is a function."""
        names = type(self).__dataclass_fields__  # type: ignore[attr-defined]
        values = {name: getattr(self, name) for name in names}
        for name, value in values.items():
            if callable(value):
                own = f"{type(self).__name__}: {name}"
                raise UnsupportedError(f"{own}: a function is not supported within torch.compile")
        return type(self), *[v.parts() if isinstance(v, Strict) else v for v in values.values()]

    @classmethod
    def _whole(cls, *parts: Any) -> Self:
        return cls(*map(of_parts, parts))

    def _refuse(self, field: str, wanted: str) -> RecipeError:
        return RecipeError(type(self).__name__, field, shown(getattr(self, field)), wanted)

    def _want(self, kind: type, *names: str) -> None:
        """Refuse fields whose value is not a ``kind`` (a bool is no int here; 2.0 is one, and becomes 2)."""
        for name in names:
            value = getattr(self, name)
            if type(value) is kind:
                continue
            if kind is int and type(value) is float and value.is_integer():
                object.__setattr__(self, name, int(value))
                continue
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                wanted = {
                    bool: "a bool",
                    int: "an int",
                    Format: "one of fp8kit.recipe.Format, such as Format.HYBRID",
                }
                said = wanted.get(kind, f"an instance of {kind.__name__}")
                if isinstance(value, formats.Format):
                    raise RecipeError(type(self).__name__, name, f"the number format {value}", said)
                raise self._refuse(name, said)


def of_parts(parts: Any) -> Any:
    """Returns what ``Strict.parts`` took apart."""
    return parts[0]._whole(*parts[1:]) if isinstance(parts, tuple) else parts


@dataclass_transform()
def recipe_class(cls: _Class) -> _Class:
    """Returns the class as a frozen dataclass, but that ``Recipe`` says what setting a field does."""
    dataclass(frozen=True)(cls)
    del cls.__setattr__
    if not cls.by_layer:
        cls._values = property(attrgetter(*[field.name for field in fields(cls) if field.compare]))
    return cls


@dataclass(frozen=True)
class MMParams(Strict):
    """How one GEMM accumulates.

    * ``use_split_accumulator``: True promotes partial sums to float32 regularly; False lets the tensor cores
      accumulate in their own width (Hopper: 14 mantissa bits), faster and good enough for fprop
      (``fast_accumulate`` of the kernel contract).
    * ``accumulation``: None; or the name of a chip's arithmetic, "hopper_fast", "hopper_split" and others of
      ``fp8kit.accumulation.ACCUMULATIONS``, or an ``fk.Accumulation``, that the sums are made by on every
      device, bit for bit. Slow: for studies, and for a CPU that is to train with Hopper's sums.
    """

    use_split_accumulator: bool = True
    accumulation: str | Accumulation | None = None

    def __post_init__(self) -> None:
        self._want(bool, "use_split_accumulator")
        own = self.accumulation
        named = isinstance(own, str) and own in ACCUMULATIONS
        if not (own is None or named or isinstance(own, Accumulation)):
            raise self._refuse("accumulation", f"None, an Accumulation or one of {', '.join(ACCUMULATIONS)}")

    @property
    def how(self) -> str | Accumulation:
        """As ``Gemm.accumulation`` says it."""
        return self.accumulation or ("split" if self.use_split_accumulator else "fast")


_OF_FP4 = ("random_hadamard_transform", "stochastic_rounding", "fp4_2d_quantization")


@dataclass(frozen=True)
class QParams(Strict):
    """How one operand is quantised under current and block scaling.

    * ``power_2_scale``: scales are rounded down to a power of two, so that scaling itself rounds nothing.
    * ``amax_epsilon``: float >= 0 and finite in float32, the least amax a scale is computed from.
    * ``random_hadamard_transform``, ``stochastic_rounding``, ``fp4_2d_quantization``: bool, of FP4: what
      ``NVFP4BlockScaling`` says by its flags. Recipes in FP8 refuse them unless False.
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False

    def __post_init__(self) -> None:
        self._want(bool, "power_2_scale", *_OF_FP4)
        epsilon = self.amax_epsilon
        if (
            isinstance(epsilon, bool)
            or not isinstance(epsilon, int | float)
            or not 0 <= epsilon <= formats.float32.max
        ):
            raise self._refuse("amax_epsilon", "a finite float32 >= 0")


_OVERRIDES = ("high_precision", "dequantized")


class _made_once:
    """``functools.cached_property`` without the lock that it takes before Python 3.12."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function, self.__doc__ = function, function.__doc__

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        found = instance.__dict__[self.function.__name__] = self.function(instance)
        return found


# recipes in force, by their class and what makes them equal: as many as ``quantization`` remembers
_FIXED: LRU[tuple[Any, ...], Recipe] = LRU(256)
# the same by the identity of those values, which are held
_SAME: dict[tuple[Any, ...] | None, tuple[tuple[Any, ...], Recipe]] = {}
# their keys -> recipes in force
_BY_KEY: WeakValueDictionary[str, Recipe] = WeakValueDictionary()
_NUMBERS = itertools.count()


def with_key(recipe: Recipe, text: str) -> Recipe:
    """Returns a recipe in force that ``by_key`` finds by its ``trace_key`` as long as it lives: ``recipe``,
    or an equal one that has it already. ``text`` says all of it, also to another process that reads compiled
    code; where it has addresses, a number is added, since others get these later."""
    if recipe.trace_key:
        return recipe
    key = f"{text} {next(_NUMBERS)}" if " at 0x" in text else text
    found = _BY_KEY.setdefault(key, recipe)
    found.__dict__["trace_key"] = key
    return found


def by_key(key: str) -> Recipe:
    """Returns the recipe in force that has this key."""
    return _BY_KEY[key]


class Recipe(Strict):
    """Base of the recipes. The predicates are class methods, as in Transformer Engine:
    ``recipe.delayed()``. What a recipe does is said by ``quantization`` and ``history``."""

    fp8_format: Format
    fp8_gemm_fprop: MMParams
    fp8_gemm_dgrad: MMParams
    fp8_gemm_wgrad: MMParams
    backward_override: str | None
    # of a recipe in force: a text that it shares with equal ones; "" of another, and of one that is equal to
    # none
    trace_key = ""
    # whether layers have recipes of their own (``for_layer``)
    by_layer: ClassVar[bool] = False
    # of the fields that make recipes equal; None of a class that is by_layer or a program's own
    _values: Any = None
    # the multiple to which Transformer Engine pads the rows of a group
    quantization_alignment: ClassVar[int] = 16
    # whether a layer without a name has the recipe of none, since rules go by names
    by_name: ClassVar[bool] = False
    # Transformer Engine's QParams that follow from flags here -> their fields -> what the opposite is called
    follows: ClassVar[Mapping[str, Mapping[str, str]]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._values = None

    def for_layer(self, kind: str, name: str) -> Recipe | None:
        """Returns the recipe of a layer: of class ``kind``, "Linear" or "LayerNormMLP", say, and called
        ``name``, "" where it has no name; None for high precision. The same object for the same layer."""
        return self

    def ended(self) -> None:
        """Called when an outermost autocast by a recipe that is ``by_layer`` ended without an exception."""

    @property
    def quantization(self) -> Quantization:
        """How the operands of a layer's GEMMs become FP8. The same object for equal recipes: layers know by
        it what they have made for it."""
        raise NotImplementedError

    @property
    def attention(self) -> AttentionQuantization | None:
        """How the products of attention are quantised; None where they are in high precision."""
        return None

    def attention_for(self, name: str) -> AttentionQuantization | None:
        """``attention`` of a layer that is called ``name``."""
        return self.attention

    @property
    def any_attention(self) -> bool:
        """Whether the products of some layer's attention are quantised."""
        return self.attention is not None

    @property
    def needs_rng(self) -> bool:
        """Whether a layer's products, or attention, draw random bits under this recipe."""
        attention = self.attention
        return self.quantization.needs_rng or (attention is not None and attention.needs_rng)

    @property
    def history(self) -> AmaxHistory | None:
        """How scales follow from the amaxes of earlier steps; None where no operand's scale does."""
        return None

    def __setattr__(self, name: str, value: object) -> None:
        """Set a field, as Transformer Engine's programs do: checked as when the recipe is made, and it counts
        from the next ``autocast`` on. RecipeError, and nothing is changed, for what is wrong."""
        cls, flags = type(self).__name__, self.follows.get(name)
        known = [field.name for field in fields(self) if field.init]  # type: ignore[arg-type]
        if flags is None:
            choice(cls, "field", name, known, RecipeError)
        elif not isinstance(value, QParams) or value != _with_flags(value, flags):
            wanted = f"QParams, of which {' and '.join(flags)} may be set"
            raise RecipeError(cls, name, shown(value), wanted)
        if self.__dict__.get("fixed") is self:
            wanted = "the recipe that was given to autocast, which holds this copy"
            raise RecipeError(cls, name, "a recipe in force", wanted)
        new = {name: value} if flags is None else {own: not getattr(value, of) for of, own in flags.items()}
        made = replace(self, **new)  # type: ignore[type-var]
        self.__dict__.clear()  # with what was derived from the fields
        self.__dict__.update(made.__dict__)

    @_made_once
    def fixed(self) -> Recipe:
        """The recipe as it is now, in an object whose fields cannot be set: what is kept of it. The same one
        until a field is set, and for equal recipes of fp8kit's, which a program may make anew for each step;
        but for those that are ``by_layer``, which note what layers ran."""
        values = self._values
        same = None if values is None else (type(self), *map(id, values))
        known = _SAME.get(same)  # which is quicker than the hashes of the values
        if known is not None:
            return known[1]
        made = copy.copy(self)
        values = made._values  # another thread may have set a field of this one since
        made.__dict__["fixed"] = made
        with suppress(TypeError):  # of no values, and of one that has no hash
            key, same = (type(self), *values), (type(self), *map(id, values))
            if not any(map(callable, values)):  # equal ones may note what they are asked, each for itself
                made = _FIXED.get(key) or _FIXED.put(key, with_key(made, f"{key}"))
            if len(_SAME) >= _FIXED.limit:
                _SAME.clear()
            _SAME[same] = values, made
        return made

    @classmethod
    def nvfp4(cls) -> bool:
        """Whether this is NVFP4 block scaling."""
        return False

    @classmethod
    def mxfp8(cls) -> bool:
        """Whether this is MXFP8 block scaling."""
        return False

    @classmethod
    def delayed(cls) -> bool:
        """Whether scales come from the amax history of earlier steps."""
        return False

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """Whether scales come from the tensor that is being quantised."""
        return False

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """Whether a tensor has one scale."""
        return cls.delayed() or cls.float8_current_scaling()

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """Whether each block of 128 elements has its own float32 scale."""
        return False

    @classmethod
    def custom(cls) -> bool:
        """Whether quantisers are the user's own."""
        return False

    @property
    def forward_format(self) -> formats.Format:
        """Format of inputs and weights."""
        return self.fp8_format.forward

    @property
    def backward_format(self) -> formats.Format:
        """Format of output gradients."""
        return self.fp8_format.backward

    def short_name(self) -> str:
        """Returns a printable name that fits into a log line."""
        raise NotImplementedError

    def _quantization(self, x: Quantizer, w: Quantizer, g: Quantizer) -> Quantization:
        """Returns the operands, with the accumulation that the recipe's fields say."""
        gemms = (self.fp8_gemm_fprop, self.fp8_gemm_dgrad, self.fp8_gemm_wgrad)
        return self._overridden(Quantization.of(x, w, g, *(gemm.how for gemm in gemms)))

    def _overridden(self, made: Quantization) -> Quantization:
        """Returns the GEMMs, with those of backward as ``backward_override`` says."""
        how = self.backward_override or "quantized"
        return Quantization(made.fprop, replace(made.dgrad, compute=how), replace(made.wgrad, compute=how))

    def _want_override(self) -> None:
        own = self.backward_override
        if not (own is None or (isinstance(own, str) and own in _OVERRIDES)):
            raise self._refuse("backward_override", "None, 'high_precision' or 'dequantized'")

    def _more(self) -> str:
        """Returns what ``short_name`` says of attention and of ``backward_override``."""
        return words_of(self) + (f", backward {self.backward_override}" if self.backward_override else "")

    def _check_common(self, no_attention: str = "") -> None:
        self._want(Format, "fp8_format")
        if self.fp8_format is Format.E2M1:
            raise self._refuse("fp8_format", "Format.HYBRID, Format.E4M3 or Format.E5M2: E2M1 has 4 bits")
        check_fields(self, no_attention)
        self._want_override()


def _with_flags(params: QParams, names: Iterable[str]) -> QParams:
    """Those with these flags as they are, and nothing else."""
    return QParams(**{name: getattr(params, name) for name in names})


class OperandsOfFP4(Recipe):
    """What the flags of ``NVFP4BlockScaling`` mean for each operand, by Transformer Engine's names."""

    disable_rht: bool
    disable_stochastic_rounding: bool
    disable_2d_quantization: bool

    follows = MappingProxyType(
        {
            "fp4_quant_fwd_inp": {"random_hadamard_transform": "disable_rht"},
            "fp4_quant_fwd_weight": {"fp4_2d_quantization": "disable_2d_quantization"},
            "fp4_quant_bwd_grad": {
                "random_hadamard_transform": "disable_rht",
                "stochastic_rounding": "disable_stochastic_rounding",
            },
        }
    )

    def _follow(self, name: str) -> QParams:
        return QParams(**{of: not getattr(self, own) for of, own in self.follows[name].items()})

    @property
    def fp4_quant_fwd_inp(self) -> QParams:
        """Of the input."""
        return self._follow("fp4_quant_fwd_inp")

    @property
    def fp4_quant_fwd_weight(self) -> QParams:
        """Of the weight."""
        return self._follow("fp4_quant_fwd_weight")

    @property
    def fp4_quant_bwd_grad(self) -> QParams:
        """Of the output gradient."""
        return self._follow("fp4_quant_bwd_grad")
