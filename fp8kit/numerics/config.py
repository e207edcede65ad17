"""What to look at and what to change, as data: the files of Transformer Engine's debug features (sections of
``nvdlfw_inspect``), read strictly.

A section names layers and the features that they have::

    any_name:
      enabled: True
      layers: {layer_name_regex_pattern: ".*(fc1|fc2)"}
      transformer_engine:
        LogTensorStats: {enabled: True, tensors: [activation], stats: [max, std], freq: 10}

What is misspelt is an ArgumentError, which is a ValueError.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8kit.arguments import choice, flag, integer, shown
from fp8kit.errors import ArgumentError, install, meant
from fp8kit.inspection import MADE_BY, TENSORS
from fp8kit.numerics.names import OF_PAIR, Operand, request
from fp8kit.numerics.whatif import CAST
from fp8kit.quantization import OPERANDS
from fp8kit.recipes import NAMED

log = logging.getLogger("fp8kit")
_ASKED = "inspect"
_NAMESPACES = ("transformer_engine", "fp8kit")
_STEPS = ("freq", "start_step", "end_step", "start_end_list")
_SELECTIONS = ("layer_name_regex_pattern", "exact_layer_names", "layer_numbers", "layer_types")
_NUMBER = re.compile(r"(?<!fc)(?<!\d)\d+")
_SECTION = "a section: a mapping with enabled, layers and transformer_engine, where its features are"
# formats of FakeQuant: Transformer Engine's names -> a named recipe's
FAKE_FORMATS = ("FP8E4M3", "FP8E5M2", "MXFP8E4M3", "MXFP8E5M2")
OPERAND_TENSORS = {"x": "activation", "w": "weight", "g": "gradient"}
# what each feature does, and its own options besides those of steps
FEATURES: dict[str, tuple[str, tuple[str, ...]]] = {
    "LogTensorStats": ("Logs statistics of tensors.", ("tensors", "tensors_struct", "stats")),
    "LogFp8TensorStats": (
        "Logs statistics of tensors' casts, by the layer's recipe or the one that a name begins with.",
        ("tensors", "tensors_struct", "stats"),
    ),
    "LogNvfp4TensorStats": (
        "Logs statistics of tensors' casts to NVFP4.",
        ("tensors", "tensors_struct", "stats"),
    ),
    "FakeQuant": (
        "Computes GEMMs in high precision, with operands and results that are rounded to a format's values.",
        ("gemms", "gemms_struct", "tensors", "tensors_struct", "quant_format"),
    ),
    "PerTensorScaling": (
        "Takes scales of the tensors themselves, where the recipe takes them of earlier steps.",
        ("gemms", "gemms_struct", "tensors", "tensors_struct"),
    ),
    "DisableQuantizationGEMM": ("Computes GEMMs in high precision.", ("gemms", "gemms_struct")),
    "DisableQuantizationLayer": ("Computes layers in high precision.", ()),
    "DumpTensors": (
        "Writes tensors to files, as they are and as the layer casts them.",
        ("tensors", "tensors_struct", "high_precision_tensor", "quantized_tensor"),
    ),
}
ALIASES = {"disablefp8gemm": "DisableQuantizationGEMM", "disablefp8layer": "DisableQuantizationLayer"}
ALIASES |= {"fakequantfp8": "FakeQuant"} | {name.lower(): name for name in FEATURES}


@dataclass(frozen=True)
class Steps:
    """Every ``freq``-th step of the ``intervals``, whose ends belong to them."""

    freq: int = 1
    intervals: tuple[tuple[float, float], ...] = ((0, math.inf),)

    def hold(self, step: int) -> bool:
        """Whether a step is among them."""
        return step % self.freq == 0 and any(first <= step <= last for first, last in self.intervals)

    def meet(self, other: Steps) -> bool:
        """Whether one of the intervals has steps in common with one of the others', whatever ``freq``."""
        pairs = itertools.product(self.intervals, other.intervals)
        return any(max(a[0], b[0]) <= min(a[1], b[1]) for a, b in pairs)


@dataclass(frozen=True)
class Logged:
    """Statistics of one tensor. ``stats``: names, or pairs of a name and its options."""

    tensor: str
    stats: tuple[Any, ...]
    steps: Steps

    def names(self) -> list[Any]:
        """Returns the statistics as ``request`` takes them."""
        return [stat if isinstance(stat, str) else {stat[0]: dict(stat[1])} for stat in self.stats]


@dataclass(frozen=True)
class Dumped:
    """A tensor that is written to a file: as it is (``plain``), and as the layer casts it (``cast``)."""

    tensor: str
    plain: bool
    cast: bool
    steps: Steps


@dataclass(frozen=True)
class Effect:
    """A change of one GEMM. ``kind``: "high_precision", "fake" or "current"; ``tensors``: pairs of a tensor
    and a format."""

    kind: str
    gemm: str
    tensors: tuple[tuple[str, str], ...]
    steps: Steps


@dataclass(frozen=True)
class Section:
    """Layers and what they have."""

    name: str
    layers: Mapping[str, Any]
    logged: tuple[Logged, ...] = ()
    dumped: tuple[Dumped, ...] = ()
    effects: tuple[Effect, ...] = ()

    def steps(self) -> Iterator[Steps]:
        """When something of it is to be done."""
        yield from (own.steps for own in self.logged)
        yield from (own.steps for own in self.dumped)
        yield from (own.steps for own in self.effects)

    def has(self, layer: str) -> bool:
        """Whether a layer of this name is among its own, by the rules of ``nvdlfw_inspect``: a pattern is
        searched, a type is a part of the name, a number stands in it between dots, or somewhere ("Layer_3")
        where none does, but behind "fc". ArgumentError where layers are chosen by number and the name has
        several."""
        own = self.layers
        if "exact_layer_names" in own:
            return layer in own["exact_layer_names"]
        if "layer_name_regex_pattern" in own:
            return own["layer_name_regex_pattern"].search(layer) is not None
        found = True
        if "layer_types" in own:
            found = "all" in own["layer_types"] or any(kind in layer for kind in own["layer_types"])
        if found and own.get("layer_numbers") is not None:
            written = [part for part in layer.split(".") if part.isdecimal()]
            numbers = [int(number) for number in written or _NUMBER.findall(layer)]
            if len(numbers) > 1:
                wanted = "a name with one number, or another way to choose layers"
                raise ArgumentError(_ASKED, f"{self.name}: layer_numbers", repr(layer), wanted)
            found = bool(numbers) and numbers[0] in own["layer_numbers"]
        return found


@dataclass(frozen=True)
class Config:
    """The sections that are enabled."""

    sections: tuple[Section, ...]

    def section(self, layer: str) -> Section | None:
        """Returns the section of a layer, None where it is in none. ArgumentError where it is in several."""
        found = [section for section in self.sections if section.has(layer)]
        if len(found) > 1:
            names = ", ".join(section.name for section in found)
            raise ArgumentError(_ASKED, f"layer {layer}", f"in the sections {names}", "one section at most")
        return found[0] if found else None


def read(config: Any) -> Config:
    """Read a configuration: a mapping, the path of a YAML file, or None for one without sections, which logs
    a warning. ArgumentError for anything else, and if there is no such file."""
    if isinstance(config, Config):
        return config
    file = ""
    if isinstance(config, str | os.PathLike):
        file, config = f"{os.fspath(config)}: ", _loaded(Path(config))
    if config is None or config == {}:
        log.warning("inspect: config: it is empty, so nothing is watched and nothing changed")
        return Config(())
    if not isinstance(config, Mapping):
        wanted = "a mapping of sections, or a YAML file's path"
        raise ArgumentError(_ASKED, "config", f"{file}{shown(config)}", wanted)
    sections = [_section(str(name), own) for name, own in config.items()]
    return Config(tuple(section for section in sections if section is not None))


def _loaded(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ArgumentError(_ASKED, "config", f"{path}: {error.strerror}", "a YAML file") from None
    except UnicodeDecodeError as error:
        raise ArgumentError(_ASKED, "config", f"{path}: {error}", "a YAML file") from None
    try:
        import yaml
    except ImportError:
        raise ArgumentError(
            _ASKED,
            "config",
            f"{path}, and PyYAML, which reads it, is not installed",
            f"a mapping, or PyYAML; {install('inspect')}",
        ) from None
    try:
        twice = _twice(yaml.compose(text, yaml.SafeLoader))
        if twice is not None:
            got = f"{path}: {twice.value!r} again in line {twice.start_mark.line + 1}"
            raise ArgumentError(_ASKED, "config", got, "a mapping that has each key once")
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ArgumentError(_ASKED, "config", f"{path}: {error}", "a YAML file") from None


def _twice(root: Any) -> Any:
    """Returns the node of a key that its mapping has had before, in a YAML document; None where there is
    none."""
    nodes, known = [root], set()
    while nodes:
        node = nodes.pop()
        if node is None or id(node) in known:  # an alias may name what it is in
            continue
        known.add(id(node))
        inside = node.value if isinstance(node.value, list) else []  # of a scalar a text
        keys = set()
        for key in (part[0] for part in inside if isinstance(part, tuple)):
            if key.value in keys:
                return key
            keys |= {key.value} if isinstance(key.value, str) else set()
        nodes += (part[1] if isinstance(part, tuple) else part for part in inside)
    return None


def _mapping(where: str, value: Any, wanted: str = "a mapping") -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ArgumentError(_ASKED, where, None if value is None else shown(value), wanted)
    return value


def _list(where: str, value: Any) -> list[Any]:
    """Several; one name may stand alone."""
    if isinstance(value, str) and value:
        return [value]
    if not isinstance(value, list | tuple) or not value:
        got = None if value is None else shown(value)
        raise ArgumentError(_ASKED, where, got, "a list that is not empty")
    return list(value)


def _known(where: str, given: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in given:
        choice(_ASKED, where, name, names)


def _section(name: str, value: Any) -> Section | None:
    own = _mapping(name, value, _SECTION)
    if name.lower() in (*ALIASES, *_NAMESPACES):
        wanted = f"a name of your own, of {_SECTION}"
        raise ArgumentError(_ASKED, "config", f"{name!r} as the name of a section", wanted)
    if "enabled" not in own:
        raise ArgumentError(_ASKED, f"{name}.enabled", None, "True or False")
    if not flag(_ASKED, f"{name}.enabled", own["enabled"]):
        return None
    layers = _layers(f"{name}.layers", own.get("layers"))
    logged: list[Logged] = []
    dumped: list[Dumped] = []
    effects: list[Effect] = []
    features: list[tuple[str, tuple[Effect, ...]]] = []
    for feature, written, options in _features(name, own):
        where = f"{name}.{written}"
        if not flag(_ASKED, f"{where}.enabled", options.get("enabled", True)):
            continue
        rest = {key: option for key, option in options.items() if key != "enabled"}
        _known(where, rest, (*FEATURES[feature][1], *_STEPS))
        if feature.startswith("Log"):
            logged += _logged(where, feature, rest)
        elif feature == "DumpTensors":
            dumped += _dumped(where, rest)
        else:
            more = tuple(_effects(where, feature, rest))
            for other, earlier in features:
                _want_apart(name, f"{other} and {written}", earlier, more)
            features.append((written, more))
            effects += more
    if not (logged or dumped or effects):
        log.warning("inspect: config: the section %s has no feature that is enabled", name)
    return Section(name, layers, tuple(logged), tuple(dumped), tuple(effects))


def _want_apart(name: str, said: str, one: Iterable[Effect], other: Iterable[Effect]) -> None:
    """ArgumentError where two features change the same GEMM in two ways in the same steps."""
    for a, b in itertools.product(one, other):
        if a.gemm == b.gemm and a.kind != b.kind and a.steps.meet(b.steps):
            got = f"{said} of {a.gemm} in the same steps"
            raise ArgumentError(_ASKED, name, got, "one of them, or other steps for each")


def _features(name: str, own: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Each feature, its name as it is written, and its options."""
    for key, value in own.items():
        if key in ("enabled", "layers"):
            continue
        inside = _mapping(f"{name}.{key}", value) if key in _NAMESPACES else {key: value}
        for feature, options in inside.items():
            found = ALIASES.get(str(feature).lower())
            if found is None:
                near = meant(feature, (*FEATURES, "enabled", "layers", *_NAMESPACES))
                wanted = f"a feature: {', '.join(FEATURES)}{near}"
                raise ArgumentError(_ASKED, name, repr(feature), wanted)
            yield found, str(feature), _mapping(f"{name}.{feature}", options)


def _layers(where: str, value: Any) -> Mapping[str, Any]:
    own = dict(_mapping(where, value, f"a mapping with one of {', '.join(_SELECTIONS)}"))
    _known(where, own, _SELECTIONS)
    if not own:
        raise ArgumentError(_ASKED, where, "nothing", f"one of {', '.join(_SELECTIONS)}")
    first = next((key for key in ("exact_layer_names", "layer_name_regex_pattern") if key in own), None)
    unused = [key for key in own if key != first] if first is not None else []
    if unused:  # as Transformer Engine does
        log.warning("inspect: %s: %s counts, and not %s", where, first, " and ".join(unused))
    for key, chosen in own.items():
        if key == "layer_name_regex_pattern":
            try:
                own[key] = re.compile(chosen)
            except (re.error, TypeError) as error:
                why = error if isinstance(chosen, str) else "it is no text"
                got = f"{shown(chosen)}: {why}"
                raise ArgumentError(_ASKED, f"{where}.{key}", got, "a regular expression") from None
        elif key == "layer_numbers":
            own[key] = _numbers(f"{where}.{key}", chosen)
        else:
            own[key] = tuple(map(str, _list(f"{where}.{key}", chosen)))
    return own


def _numbers(where: str, value: Any) -> frozenset[int] | None:
    """Numbers of layers; "2-5" are four of them, None is all."""
    found: set[int] = set()
    wanted = "numbers of layers from 0 on, such as [0, 3] or '4-7', or 'all'"
    for part in value if isinstance(value, list | tuple) else [value]:
        if part == "all":
            return None
        ends = re.fullmatch(r"(\d+)-(\d+)", part) if isinstance(part, str) else None
        if ends is not None and int(ends[1]) <= int(ends[2]):
            found |= set(range(int(ends[1]), int(ends[2]) + 1))
        elif type(part) is int and part >= 0:
            found.add(part)
        else:
            raise ArgumentError(_ASKED, where, shown(part), wanted)
    if not found:
        raise ArgumentError(_ASKED, where, shown(value), wanted)
    return frozenset(found)


def _steps(where: str, own: Mapping[str, Any]) -> Steps:
    freq = integer(_ASKED, f"{where}.freq", own.get("freq", 1), 1)
    given = own.get("start_end_list")
    unused = [name for name in ("start_step", "end_step") if own.get(name) is not None]
    if given is not None and unused:  # as Transformer Engine does
        log.warning("inspect: %s: start_end_list counts, and not %s", where, " and ".join(unused))
    if given is None:
        first, last = own.get("start_step"), own.get("end_step")
        given = [(0 if first is None else first, -1 if last is None else last)]
    intervals = []
    for pair in _list(f"{where}.start_end_list", given):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ArgumentError(_ASKED, f"{where}.start_end_list", shown(pair), "pairs of steps")
        ends = zip(("start_step", "end_step"), pair, strict=True)
        first, last = (integer(_ASKED, f"{where}: {name}", step, -1) for name, step in ends)
        if last != -1 and first > last:
            wanted = "an end_step that is not before it, or -1 for no end"
            raise ArgumentError(_ASKED, f"{where}: start_step", f"{first}, with end_step {last}", wanted)
        intervals.append((first, math.inf if last == -1 else last))
    return Steps(freq, tuple(intervals))


def _items(where: str, own: Mapping[str, Any], kind: str, known: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yields what a feature says of each tensor, or of each GEMM: its own options, and those of
    ``tensors_struct`` or ``gemms_struct``."""
    several, struct = f"{kind}s", f"{kind}s_struct"
    common = {key: value for key, value in own.items() if key not in (several, struct)}
    if (several in own) == (struct in own):
        raise ArgumentError(_ASKED, where, "both" if several in own else None, f"{several} or {struct}")
    if several in own:
        for name in _list(f"{where}.{several}", own[several]):
            yield {**common, kind: choice(_ASKED, f"{where}.{several}", name, known)}
        return
    for item in _list(f"{where}.{struct}", own[struct]):
        more = _mapping(f"{where}.{struct}", item)
        if kind not in more:
            raise ArgumentError(_ASKED, f"{where}.{struct}", shown(item), f"a mapping with {kind!r}")
        choice(_ASKED, f"{where}.{struct}", more[kind], known)
        yield {**common, **more}


def _logged(where: str, feature: str, own: Mapping[str, Any]) -> Iterator[Logged]:
    for item in _items(where, own, "tensor", TENSORS):
        _known(where, item, ("tensor", "stats", *_STEPS))
        stats = _list(f"{where}.stats", item.get("stats"))
        if feature == "LogNvfp4TensorStats":
            stats = [stat if str(stat).startswith("nvfp4_") else f"nvfp4_{stat}" for stat in stats]
        # of a layer that casts; in another one that misses some, the log says so
        tensor = item["tensor"]
        try:
            needs = request(stats, Operand(tensor, NAMED["current"].recipe.quantization))
        except ArgumentError as error:
            raise ArgumentError(_ASKED, f"{where}.stats", error.got, error.wanted) from None
        if needs.spec.twin and tensor not in MADE_BY:
            beside = next(stat.name for stat in needs.stats if stat.kind in OF_PAIR)
            wanted = f"it of {', '.join(MADE_BY)}: only what a GEMM makes is made in high precision, too"
            raise ArgumentError(_ASKED, f"{where}.stats", f"{beside!r} of {tensor}", wanted)
        frozen = tuple(stat if isinstance(stat, str) else _frozen(stat) for stat in stats)
        yield Logged(tensor, frozen, _steps(where, item))


def _frozen(stat: Mapping[str, Mapping[str, Any]]) -> tuple[str, tuple[tuple[str, Any], ...]]:
    ((name, options),) = stat.items()
    return name, tuple(options.items())


def _dumped(where: str, own: Mapping[str, Any]) -> Iterator[Dumped]:
    for item in _items(where, own, "tensor", TENSORS):
        _known(where, item, ("tensor", "high_precision_tensor", "quantized_tensor", *_STEPS))
        plain, cast = (
            flag(_ASKED, f"{where}.{name}", item.get(name, False))
            for name in ("high_precision_tensor", "quantized_tensor")
        )
        if not (plain or cast):
            wanted = "high_precision_tensor or quantized_tensor: True"
            raise ArgumentError(_ASKED, where, f"neither for {item['tensor']}", wanted)
        yield Dumped(item["tensor"], plain, cast, _steps(where, item))


def _effects(where: str, feature: str, own: Mapping[str, Any]) -> Iterator[Effect]:
    gemms = tuple(OPERANDS)
    if feature == "DisableQuantizationLayer":
        for gemm in gemms:
            yield Effect("high_precision", gemm, (), _steps(where, own))
        return
    fake = feature == "FakeQuant"
    nested = "gemms_struct" in own
    kind, known = ("fake", TENSORS) if fake else ("current", CAST)
    effects: list[Effect] = []
    for item in _items(where, own, "gemm", gemms):
        gemm = item["gemm"]
        if feature == "DisableQuantizationGEMM":
            _known(where, item, ("gemm", *_STEPS))
            yield Effect("high_precision", gemm, (), _steps(where, item))
            continue
        found = []
        for part in _items(f"{where}.{gemm}" if nested else where, item, "tensor", known):
            _known(where, part, ("gemm", "tensor", *(("quant_format",) if fake else ()), *_STEPS))
            form = ""
            if fake:
                form = choice(_ASKED, f"{where}.quant_format", part.get("quant_format"), FAKE_FORMATS)
            found.append((part["tensor"], form))
        effects.append(Effect(kind, gemm, tuple(found), _steps(where, item)))
    # one that stands in a list with others may have none: it is in high precision then
    own = {
        gemm: [*operands_of(gemm), *(made for made, by in MADE_BY.items() if fake and by == gemm)]
        for gemm in gemms
    }
    for group in [[effect] for effect in effects] if nested else [effects]:
        has = [tensor in own[each.gemm] for each in group for tensor, _ in each.tensors]
        if group and not any(has):
            gemm = group[0].gemm
            got = f"{', '.join(tensor for tensor, _ in group[0].tensors)} of {gemm}"
            wanted = f"what {gemm} reads{' or makes' if fake else ''}: {', '.join(own[gemm])}"
            raise ArgumentError(_ASKED, f"{where}.tensors", got, wanted)
    yield from effects


def operands_of(gemm: str) -> dict[str, str]:
    """Returns the tensors that a GEMM reads, with the side of each, "a" or "b"."""
    return {OPERAND_TENSORS[own]: side for own, side in zip(OPERANDS[gemm], "ab", strict=True)}
