"""Recipes that are given as data, and those that differ from layer to layer: by the layer's name, or operand
by operand by a function of your own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from itertools import count
from typing import Any, ClassVar, NamedTuple, Self
from weakref import WeakKeyDictionary, WeakValueDictionary

from fp8kit import formats
from fp8kit.arguments import function, integer, shown
from fp8kit.attention_quantization import AttentionQuantization
from fp8kit.errors import RecipeError, meant, on_behalf_of
from fp8kit.lru import LRU
from fp8kit.quantization import NAMES, OPERANDS, AmaxHistory, Quantization, Quantizer, gemm_of
from fp8kit.recipe import Recipe
from fp8kit.recipe_fields import of_parts, recipe_class

log = logging.getLogger("fp8kit")


@dataclass(frozen=True)
class _Data:
    """The fields of a ``DataRecipe`` but its name."""

    data: Quantization
    attention: AttentionQuantization | None
    history: AmaxHistory | None


# what a DataRecipe's ``key`` stands for, as long as a recipe has it
_DATA: WeakValueDictionary[str, _Data] = WeakValueDictionary()


@recipe_class
class DataRecipe(Recipe):
    """A recipe without a class of its own: how each operand of the three GEMMs is cast, and how each is
    summed.

    * ``data``: a ``fp8kit.quantization.Quantization``.
    * ``name``: for log lines.
    * ``attention``: an ``fp8kit.attention_quantization.AttentionQuantization``: how attention's products are
      quantised; None: they are in high precision.
    * ``history``: a ``fp8kit.quantization.AmaxHistory``: how the scales of operands with ``scale_source``
      "delayed" follow from earlier steps, whatever the others' are; None where there are none.

    Raises RecipeError.
    """

    data: Quantization
    name: str = "data"
    attention: AttentionQuantization | None = None
    history: AmaxHistory | None = None
    # the data as a text, for programs that are compiled
    key: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._want(Quantization, "data")
        self._want(str, "name")
        for gemm, own in self.data.gemms.items():
            if "amax" in (own.a.scale_source, own.b.scale_source):
                got = f"scale_source 'amax' in {gemm}"
                raise RecipeError(type(self).__name__, "data", got, "'current', which operations share so")
        self._check_history()
        if not (self.attention is None or isinstance(self.attention, AttentionQuantization)):
            raise self._refuse("attention", "an AttentionQuantization or None")
        self._keep()

    def _check_history(self) -> None:
        """RecipeError where operands have state and no rule, or a rule that does not fit."""
        operands = self.data.stateful
        if not (self.history is None or isinstance(self.history, AmaxHistory)):
            raise self._refuse("history", "an AmaxHistory or None")
        if not operands:
            if self.history is not None:
                raise self._refuse("history", "None: no operand has scale_source 'delayed'")
            return
        if self.history is None:
            wanted = "an AmaxHistory, for operands with scale_source 'delayed'"
            raise RecipeError(type(self).__name__, "history", "None", wanted)
        for source, side in operands:
            field = "max_backward" if source == "g" else "max_forward"
            most = getattr(self.history, field)
            if most > side.format.max:
                wanted = f"at most {side.format.max:g}, the largest value of {side.format}"
                raise RecipeError(type(self).__name__, f"history.{field}", most, wanted)
            if self.history.growth is not None and source == "x":
                got = f"{self.history.growth} beside x, {side}"
                raise RecipeError(type(self).__name__, "history.growth", got, "None, or x without state")

    def _keep(self) -> None:
        """Give it the key of its data: their text, which other functions of a history may have as well."""
        own = _Data(self.data, self.attention, self.history)
        key = repr(own)
        while (kept := _DATA.setdefault(key, own)) != own:
            key += " of other functions"
        object.__setattr__(self, "kept", kept)
        object.__setattr__(self, "key", key)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._keep()

    def parts(self) -> tuple[Any, ...]:
        return type(self), self.key, self.name

    @classmethod
    def _whole(cls, key: str, name: str) -> Self:
        """The recipe of this ``key``, while another one has it."""
        found = _DATA[key]
        return cls(found.data, name, found.attention, found.history)

    @property
    def quantization(self) -> Quantization:
        """The data, the same object for equal data."""
        kept: _Data = self.kept  # type: ignore[attr-defined]
        return kept.data

    @property
    def forward_format(self) -> formats.Format:
        return self.data.x.format

    @property
    def backward_format(self) -> formats.Format:
        return self.data.g.format

    def short_name(self) -> str:
        """Its name."""
        return self.name


@recipe_class
class PerLayer(Recipe):
    """Another recipe for some layers, by their names: the first and the last ones in high precision, say ::

        PerLayer(NVFP4BlockScaling(), (("layers.0.*", None), ("*.lm_head", None)))

    * ``default``: the recipe of layers that no rule names. Recipes count as they are when this is made.
    * ``rules``: pairs of a pattern, as of a shell (``*``, ``?``, ``[...]``), and a recipe, or None for high
      precision; the first that fits the layer's name counts. A part's name begins with that of its layer.

    A layer's name is its argument ``name``; ``name_layers(model)`` of ``fk.nn`` and of ``fp8kit_torch`` gives
    every layer of a model the name under which it is found there, and so does that of ``fp8kit_jax.nnx``. Of
    Flax's linen modules it is the path, joined by dots, of ``fp8kit_jax.dense`` and its like the argument
    ``name``. A layer without a name, which no rule fits, is warned of on the logger "fp8kit", once for each
    recipe, and so are rules that fit no layer that ran: when the first autocast ends, if none does, else
    after the first one that had no other layers than those before it. Raises RecipeError.
    """

    default: Recipe
    rules: tuple[tuple[str, Recipe | None], ...] = ()

    by_layer: ClassVar[bool] = True
    by_name: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._want(Recipe, "default")
        wanted = "pairs of a pattern and a recipe, such as fp8kit.recipes.named('mxfp8'), or None"
        if not isinstance(self.rules, tuple | list):
            raise self._refuse("rules", wanted)
        for rule in self.rules:
            fits = isinstance(rule, tuple | list) and len(rule) == 2 and isinstance(rule[0], str)
            if not fits or not (rule[1] is None or isinstance(rule[1], Recipe)):
                raise RecipeError(type(self).__name__, "rules", shown(rule), wanted)
        if any(
            each is not None and each.by_name for each in (self.default, *(rule[1] for rule in self.rules))
        ):
            raise self._refuse("rules", "recipes that are no PerLayer")
        rules = tuple((pattern, None if own is None else own.fixed) for pattern, own in self.rules)
        object.__setattr__(self, "rules", rules)
        object.__setattr__(self, "default", self.default.fixed)

    @classmethod
    def ends(
        cls,
        default: Recipe,
        pattern: str,
        layers: int,
        first: int = 0,
        last: int = 0,
        other: Recipe | None = None,
    ) -> PerLayer:
        """Returns the ``first`` and the ``last`` of so many numbered ``layers`` by an ``other`` recipe, None:
        in high precision ::

            PerLayer.ends(NVFP4BlockScaling(), "layers.{}.*", 62, first=2, last=8)

        ``pattern``: as of a rule, with {} for the number, from 0 on. RecipeError also where there is no {},
        and for more ends than layers.
        """
        name = cls.__name__
        if not isinstance(pattern, str) or "{}" not in pattern:
            raise RecipeError(name, "pattern", shown(pattern), "a pattern with {} for a layer's number")
        integer(name, "layers", layers, 1, None, RecipeError)
        for argument, value in (("first", first), ("last", last)):
            integer(name, argument, value, 0, layers, RecipeError)
        if first + last > layers:
            raise RecipeError(
                name, "first, last", f"{first} and {last} of {layers} layers", "no more than all"
            )
        numbers = [*range(first), *range(layers - last, layers)]
        return cls(default, tuple((pattern.replace("{}", str(n)), other) for n in numbers))

    def parts(self) -> tuple[Any, ...]:
        rules = [(pattern, None if own is None else own.parts()) for pattern, own in self.rules]
        return type(self), self.default.parts(), tuple(rules)

    @classmethod
    def _whole(cls, default: tuple[Any, ...], rules: tuple[tuple[str, Any], ...]) -> Self:
        return cls(of_parts(default), tuple((pattern, of_parts(own)) for pattern, own in rules))

    @property
    def quantization(self) -> Quantization:
        """The default's."""
        return self.default.quantization

    @property
    def history(self) -> AmaxHistory | None:
        """The default's."""
        return self.default.history

    @property
    def attention(self) -> AttentionQuantization | None:
        """The default's."""
        return self.default.attention

    @property
    def forward_format(self) -> formats.Format:
        return self.default.forward_format

    @property
    def backward_format(self) -> formats.Format:
        return self.default.backward_format

    def for_layer(self, kind: str, name: str) -> Recipe | None:
        found = self._found(name)
        if self.rules and not name and not any(fnmatchcase("", pattern) for pattern, _ in self.rules):
            _say_unnamed(self, kind or "a layer", "no rule of PerLayer fits it", self)
        self._note(name)
        return None if found is None else found.for_layer(kind, name)

    def _note(self, name: str) -> None:
        """A layer of that name runs."""
        if name and self.rules:
            self._ran.names.setdefault(name)

    @cached_property
    def _ran(self) -> _Ran:
        key = repr(self)
        return _RAN.get(key) or _RAN.put(key, _Ran())

    def ended(self) -> None:
        ran = self._ran
        if ran.told or not ran.names:
            return
        rules, names = [rule for rule, _ in self.rules], list(ran.names)
        unfit = [rule for rule in rules if not any(fnmatchcase(name, rule) for name in names)]
        ran.told, ran.known = unfit == rules or len(names) == ran.known, len(names)
        if ran.told and unfit:
            log.warning(
                "rules of PerLayer that fit no layer that ran (%s): %s; the layers are called %s",
                self.short_name(),
                ", ".join(map(repr, unfit)),
                _some(names),
            )

    def attention_for(self, name: str) -> AttentionQuantization | None:
        found = self._found(name)
        self._note(name)
        return None if found is None else found.attention_for(name)

    @property
    def any_attention(self) -> bool:
        return any(own.any_attention for own in self._all())

    @property
    def needs_rng(self) -> bool:
        """Whether a rule's recipe or the default draws random bits."""
        return any(own.needs_rng for own in self._all())

    def _all(self) -> list[Recipe]:
        return [own for own in (self.default, *(own for _, own in self.rules)) if own is not None]

    def _found(self, name: str) -> Recipe | None:
        return next((recipe for pattern, recipe in self.rules if fnmatchcase(name, pattern)), self.default)

    def short_name(self) -> str:
        """For example ``per_layer(mxfp8(E4M3), 2 rules)``."""
        return f"per_layer({self.default.short_name()}, {len(self.rules)} rules)"


@dataclass
class _Ran:
    """The names of the layers that ran by a recipe, how many there were when an autocast last ended, and
    whether it was told which rules fit none."""

    names: dict[str, None] = field(default_factory=dict)
    known: int = 0
    told: bool = False


# the text of a PerLayer -> what ran by equal ones: torch.compile asks another one than eager layers, and a
# program may make one for each step
_RAN: LRU[str, _Ran] = LRU(256)


def _some(names: list[str]) -> str:
    """Returns the first ones, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more


# recipes, or functions, whose layers without names were warned of
_UNNAMED: LRU[object, bool] = LRU(256)


def _say_unnamed(recipe: Recipe, kind: str, why: str, known_by: object) -> None:
    """Warn once for each ``known_by`` of a layer without a name."""
    if not _UNNAMED.get(known_by):
        _UNNAMED.put(known_by, True)
        log.warning(
            "%s has no name, so %s (%s): give it name=..., or call name_layers(model) of fk.nn, "
            "fp8kit_torch or fp8kit_jax.nnx",
            kind,
            why,
            recipe.short_name(),
        )


class _Role(NamedTuple):
    module: str
    name: str
    operand: str
    gemm: str


class QuantizerRole(_Role):
    """What a ``CustomRecipe``'s function is asked about: ``module``, the layer's class; ``name``, the layer's
    name, "" where it has none; ``operand``: "input", "weight" or "grad_output"; ``gemm``: "fprop", "dgrad" or
    "wgrad". ``module_type`` and ``tensor_type``: Transformer Engine's words, in the place of ``module`` and
    ``operand``."""

    __slots__ = ()

    def __new__(
        cls,
        module: str = "",
        name: str = "",
        operand: str = "",
        gemm: str = "",
        *,
        module_type: str = "",
        tensor_type: str = "",
    ) -> Self:
        words = {"linear": "Linear", "grouped_linear": "GroupedLinear"}
        module = words.get(module_type, module_type) or module
        return super().__new__(cls, module, name, tensor_type or operand, gemm)

    def __getattr__(self, name: str) -> Any:
        fields = (*QuantizerRole._fields, "tensor_type", "module_type")
        said = f"a role of CustomRecipe has no {name!r}; it has {', '.join(fields)}{meant(name, fields)}"
        raise AttributeError(said, name=name)

    @property
    def tensor_type(self) -> str:
        """``operand``, as Transformer Engine calls it."""
        return self.operand

    @property
    def module_type(self) -> str:
        """The kind of layer, as Transformer Engine calls it: "linear" or "grouped_linear"."""
        return "grouped_linear" if self.module.lower().startswith("grouped") else "linear"


class _Asking(QuantizerRole):
    """A role of a layer without a name, which warns when the function reads the name."""

    recipe: CustomRecipe

    @property
    def name(self) -> str:
        qfactory = self.recipe.qfactory
        why = f"{getattr(qfactory, '__name__', 'the function')} of CustomRecipe reads an empty role.name"
        # a function that is written in a loop is made anew each time, of one code
        _say_unnamed(self.recipe, self.module, why, getattr(qfactory, "__code__", qfactory))
        return ""

    def __repr__(self) -> str:
        return repr(QuantizerRole(*self))

    @classmethod
    def of(cls, recipe: CustomRecipe, *role: str) -> _Asking:
        """Returns the role, for this recipe's function."""
        found = cls(*role)
        found.recipe = recipe
        return found


# class of what a ``CustomRecipe``'s function may give besides -> what that means for a role
_MEANINGS: dict[type, Callable[[Any, QuantizerRole], Quantizer | None]] = {}


def answers_with(kind: type, meaning: Callable[[Any, QuantizerRole], Quantizer | None]) -> None:
    """Let functions of ``CustomRecipe`` give objects of a class: ``meaning`` is called with one and the role.
    An attribute ``history`` of it, an ``AmaxHistory``, is the recipe's where that has none."""
    _MEANINGS[kind] = meaning


@dataclass(frozen=True)
class _Answers:
    """The fields of a ``CustomRecipe``."""

    qfactory: Callable[[QuantizerRole], Quantizer | None]
    accumulation: Callable[[str], Any] | None
    history: AmaxHistory | None


# what a CustomRecipe's ``key`` stands for, and the other way round
_ANSWERS: WeakValueDictionary[str, _Answers] = WeakValueDictionary()
_KEYS: WeakKeyDictionary[_Answers, str] = WeakKeyDictionary()
_NUMBERS = count()


@recipe_class
class CustomRecipe(Recipe):
    """Operand by operand what a function says.

    * ``qfactory``: from a ``QuantizerRole`` to a ``fp8kit.quantization.Quantizer``, or None: where it is None
      for one operand of a GEMM, that GEMM runs in high precision. It is called once for each role of a layer,
      and must answer alike each time.
    * ``accumulation``: from the name of a GEMM to a ``Gemm.accumulation``; None: "split" for all.
    * ``history``: how the scales of operands with ``scale_source`` "delayed" follow from earlier steps.

    What ``torch.compile`` traces holds the function's answers. Where the function reads the name of a layer
    that has none, the logger "fp8kit" warns, once for each function; ``PerLayer`` says how layers get names.
    Raises RecipeError, also for an answer that is neither. Transformer Engine's CustomRecipe, whose function
    gives quantizer objects: in PyTorch those of ``fp8kit_torch`` may be answers too.
    """

    qfactory: Callable[[QuantizerRole], Quantizer | None]
    accumulation: Callable[[str], Any] | None = None
    history: AmaxHistory | None = None
    # what stands for it in programs that are compiled: the same for equal recipes
    key: str = field(init=False, repr=False, compare=False)

    by_layer: ClassVar[bool] = True
    quantization_alignment = 128

    def __post_init__(self) -> None:
        if not (self.history is None or isinstance(self.history, AmaxHistory)):
            raise self._refuse("history", "an AmaxHistory or None")
        for name, asked in (("qfactory", "a QuantizerRole"), ("accumulation", "the name of a GEMM")):
            own = getattr(self, name)
            if own is None and name == "accumulation":
                continue
            if type(own).__hash__ is None:
                raise self._refuse(name, "a function, which has a hash")
            function(type(self).__name__, name, own, RecipeError, ("",), f"a function of {asked}")
        self._keep()

    def _keep(self) -> None:
        """Give it the key of its functions, which are known by it as long as a recipe has them."""
        own = _Answers(self.qfactory, self.accumulation, self.history)
        kept = _ANSWERS.get(_KEYS.get(own, ""))
        if kept is None:
            kept, key = own, f"custom {next(_NUMBERS)}"
            _KEYS[own], _ANSWERS[key] = key, own
        object.__setattr__(self, "answers", kept)
        object.__setattr__(self, "key", _KEYS[own])

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._keep()

    def parts(self) -> tuple[Any, ...]:
        return type(self), self.key

    @classmethod
    def _whole(cls, key: str) -> Self:
        """The recipe of this ``key``, while another one has it."""
        found = _ANSWERS[key]
        return cls(found.qfactory, found.accumulation, found.history)

    @classmethod
    def custom(cls) -> bool:
        return True

    @property
    def quantization(self) -> Quantization:
        """Of a layer of no class and no name. RecipeError where all its GEMMs run in high precision."""
        found = self.for_layer("", "")
        if found is None:
            raise RecipeError(type(self).__name__, "qfactory", "None for every role", "a Quantizer for some")
        return found.quantization

    @property
    def forward_format(self) -> formats.Format:
        return self.quantization.x.format

    @property
    def backward_format(self) -> formats.Format:
        return self.quantization.g.format

    def for_layer(self, kind: str, name: str) -> Recipe | None:
        return _custom(self, kind, name)

    def short_name(self) -> str:
        """``custom(NAME)``, the function's name."""
        return f"custom({getattr(self.qfactory, '__name__', 'function')})"


@lru_cache(maxsize=4096)
def _custom(recipe: CustomRecipe, kind: str, name: str) -> DataRecipe | None:
    gemms = []
    histories: set[AmaxHistory | None] = {recipe.history}
    for gemm, operands in OPERANDS.items():
        sides = []
        for operand in operands:
            role = QuantizerRole(kind, name, NAMES[operand], gemm)
            asked_with = role if name or not kind else _Asking.of(recipe, *role)
            side: Any = recipe.qfactory(asked_with)
            for known, meaning in _MEANINGS.items():
                if isinstance(side, known):
                    histories.add(getattr(side, "history", None))
                    side = meaning(side, role)
                    break
            if side is not None and not isinstance(side, Quantizer):
                wanted = f"a Quantizer or None for {role}"
                raise RecipeError(type(recipe).__name__, "qfactory", shown(side), wanted)
            sides.append(side)
        how = "split" if recipe.accumulation is None else recipe.accumulation(gemm)
        compute = "high_precision" if None in sides else "quantized"
        plain = Quantizer(formats.E4M3)
        gemms.append(gemm_of(gemm, sides[0] or plain, sides[1] or plain, how, compute))
    if all(gemm.compute == "high_precision" for gemm in gemms):
        return None
    data = Quantization(*gemms)
    asked = histories - {None}
    if len(asked) > 1:
        wanted = "one for all operands with state"
        raise RecipeError(type(recipe).__name__, "history", f"{len(asked)} different ones", wanted)
    history = asked.pop() if asked and data.stateful else None
    with on_behalf_of(type(recipe).__name__):
        return DataRecipe(data, recipe.short_name(), history=history)
