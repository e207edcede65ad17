"""A RUN folder: what a training and its inspector left, written, read and checked.

====================  ========================================================================================
``run.json``          an object: ``model`` and ``settings`` (objects), ``recipe`` (a name of
                      ``fp8kit.recipes.NAMED``, another word, or null), ``versions`` (an object), ``device``
``losses.jsonl``      a line a loss: ``step``, ``loss``, ``series``; ``"validation": true`` of a validation
                      loss. The series of one kind and several seeds are called "NAME seed N"
``statistics.jsonl``  a line a statistic: ``step``, ``layer``, ``tensor``, ``stat``, ``value``, and ``gemm``
                      where it belongs to one
====================  ========================================================================================

Of two lines for the same thing at the same step the later one counts: a resumed run repeats steps.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fp8kit.arguments import choice, shown
from fp8kit.errors import ArgumentError, Fp8kitError

HostArray = np.ndarray[Any, Any]

TENSORS = ("activation", "weight", "gradient", "output", "dgrad", "wgrad")
GEMMS = ("fprop", "dgrad", "wgrad")
BINS = 257  # of a histogram: the 256 exponents of float32, then the zeros
HISTOGRAMS = ("exponents", "scales")
_LIBRARIES = ("fp8kit", "numpy", "cupy", "torch", "jax")
_SEED = re.compile(r"^(.*?),?\s+seed[ =](\d+)$")
# parts of a transformer layer's name, in the order in which they compute
_ORDER = (
    "self_attention",
    "attention",
    "inter_attention",
    "encoder_decoder_attention",
    "layernorm_qkv",
    "qkv",
    "layernorm_query",
    "query",
    "key_value",
)
_REST = ("key", "value", "core_attention", "proj", "out", "layernorm_mlp", "mlp")
_PLACES = {name: i for i, name in enumerate((*_ORDER, *_REST))}
_NUMBERED = re.compile(r"(.*?)(\d+)")  # Flax's "layers_10", "fc1"


class Key(NamedTuple):
    """What a statistic is of; ``gemm`` is "" where it belongs to none."""

    layer: str
    tensor: str
    gemm: str
    stat: str


class Series(NamedTuple):
    """A statistic over time. ``steps``: int64 (n,), ascending; ``values``: float64 (n,), or int64 (n, 257) of
    a histogram."""

    steps: HostArray
    values: HostArray


class Curve(NamedTuple):
    """The losses of one run. ``group``: its name without the seed; ``seed``: None where the name has none;
    ``steps``: int64 (n,), ascending; ``losses``: float64 (n,); ``validation``: (step, loss) pairs."""

    name: str
    group: str
    seed: int | None
    steps: HostArray
    losses: HostArray
    validation: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class RunFolder:
    """What ``read`` found: ``about`` is run.json; ``curves`` in the order of the file."""

    path: Path
    about: dict[str, Any]
    curves: tuple[Curve, ...]
    statistics: dict[Key, Series]


def read(path: str | Path) -> RunFolder:
    """Returns the RUN folder ``path``. ArgumentError where that is no folder; Fp8kitError that names the
    file, and the line, for a file that is missing, or has a line that is not what it must be."""
    folder = Path(path)
    if not folder.is_dir():
        raise ArgumentError("report", "RUN", f"'{folder}'", "a folder with run.json and two .jsonl files")
    about = _about(folder / "run.json")
    losses = list(_lines(folder / "losses.jsonl", check_loss))
    statistics = series_of(_lines(folder / "statistics.jsonl", check_row))
    return RunFolder(folder, about, curves_of(losses), statistics)


Losses = Mapping[str, Iterable[float] | Mapping[int, float]]


def write(
    folder: str | os.PathLike[str],
    *,
    recipe: str | None,
    losses: Losses,
    device: Any,
    validation: Losses | None = None,
    model: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    versions: Mapping[str, str] | None = None,
) -> Path:
    """Make a RUN folder of a training: write ``run.json`` and ``losses.jsonl`` anew; ``statistics.jsonl``,
    which ``fk.inspect`` writes as a sink, stays, and is made where there is none::

        with fk.inspect(model, config, sinks="run/statistics.jsonl") as log:
            ...
        run_folder.write("run", recipe="mxfp8", losses={"mxfp8 seed 0": losses}, device="cpu")

    * ``folder``: is made where there is none. ``recipe``: of the training that was inspected, a name of
      ``fp8kit recipes list``, another word, or None for high precision.
    * ``losses``: by the name of each run, as ``bf16 seed 0``: numbers, of which the first is of step 0, as
      the inspector counts, or {step: loss}. ``validation``: likewise, validation losses of these runs.
    * ``device``: its name, or what ``str`` makes one of. ``model``, ``settings``: what the page shall say of
      them, by name; what JSON has no type for is written as text. ``settings["reference"]``: the runs that
      others are compared with.
    * ``versions``: by name, None for those of fp8kit and of the array libraries that are loaded.

    Returns the folder. Raises ArgumentError for values that ``read`` would refuse, before a file is written.
    """
    about: dict[str, Any] = {
        "model": {} if model is None else model,
        "recipe": recipe,
        "settings": {} if settings is None else settings,
        "versions": _versions() if versions is None else versions,
        "device": str(device),
    }
    for name in ("model", "settings", "versions"):
        if not isinstance(about[name], Mapping):
            raise ArgumentError("run_folder.write", name, shown(about[name]), "a mapping")
        about[name] = dict(about[name])
    fault = _fault(about)
    if fault is not None:
        raise ArgumentError("run_folder.write", *fault)
    rows = [*_loss_rows("losses", losses)]
    if validation is not None:
        rows += _loss_rows("validation", validation)
        for series in validation:
            choice("run_folder.write", "validation", series, losses)
    text = json.dumps(about, indent=2, default=str) + "\n"
    where = Path(folder)
    where.mkdir(parents=True, exist_ok=True)
    (where / "run.json").write_text(text, "utf-8")
    (where / "losses.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    (where / "statistics.jsonl").touch()
    return where


def _versions() -> dict[str, str]:
    return {name: str(sys.modules[name].__version__) for name in _LIBRARIES if name in sys.modules}


def _loss_rows(name: str, losses: Any) -> Iterator[dict[str, Any]]:
    """Yields the lines of losses.jsonl of one argument of ``write``; ArgumentError for a value that has no
    losses."""
    if not isinstance(losses, Mapping):
        raise ArgumentError("run_folder.write", name, shown(losses), "losses by the name of their run")
    for series, own in losses.items():
        if not isinstance(own, Iterable) or isinstance(own, str):
            raise ArgumentError("run_folder.write", name, shown(own), "numbers or {step: loss}")
        for step, loss in own.items() if isinstance(own, Mapping) else enumerate(own):
            row = {"step": plain(step), "loss": plain(loss), "series": series}
            wanted = check_loss(row)
            if wanted is not None:
                raise ArgumentError("run_folder.write", name, shown(row), wanted)
            yield row | {"validation": True} if name == "validation" else row


def plain(value: Any) -> Any:
    """Returns a number of NumPy as Python's own."""
    return value.item() if isinstance(value, np.generic) else value


# --- rows into series ---------------------------------------------------------------------------------------


def series_of(rows: Iterable[Mapping[str, Any]]) -> dict[Key, Series]:
    """Returns the rows of a log by their Key. Rows are taken as they are: ``check_row`` checks
    one."""
    found: dict[Key, dict[int, Any]] = {}
    for row in rows:
        key = Key(row["layer"], row["tensor"], row.get("gemm", ""), row["stat"])
        value = row["value"]
        if isinstance(value, list | tuple | np.ndarray):
            value = np.asarray(value, np.int64)
        found.setdefault(key, {})[int(row["step"])] = value
    made = {}
    for key, by_step in found.items():
        steps = sorted(by_step)
        histogram = kind_of(key.stat) is not None
        values = np.array([by_step[step] for step in steps], np.int64 if histogram else np.float64)
        made[key] = Series(np.array(steps, np.int64), values)
    return made


def curves_of(losses: Iterable[Mapping[str, Any]]) -> tuple[Curve, ...]:
    """Returns the rows of losses.jsonl as curves, in the order in which their series appear."""
    training: dict[str, dict[int, float]] = {}
    validation: dict[str, dict[int, float]] = {}
    for row in losses:
        name = str(row["series"])
        training.setdefault(name, {})
        into = validation if row.get("validation") else training
        into.setdefault(name, {})[int(row["step"])] = float(row["loss"])
    made = []
    for name, by_step in training.items():
        parts = _SEED.match(name)
        group, seed = (parts[1], int(parts[2])) if parts else (name, None)
        steps = sorted(by_step)
        losses_ = np.array([by_step[step] for step in steps], np.float64)
        more = tuple(sorted(validation.get(name, {}).items()))
        made.append(Curve(name, group, seed, np.array(steps, np.int64), losses_, more))
    return tuple(made)


def kind_of(stat: str) -> str | None:
    """ "exponents" or "scales" of a histogram's name, which may have a recipe's before it; else None."""
    return next((kind for kind in HISTOGRAMS if stat == kind or stat.endswith(f"_{kind}")), None)


def layer_order(name: str) -> tuple[Any, ...]:
    """Returns a key to sort layers' names by: numbers as numbers, parts of a layer in the order in which they
    compute."""
    parts = []
    for word in name.split("."):
        found = _NUMBERED.fullmatch(word)
        stem, number = (word, -1) if found is None else (found[1], int(found[2]))
        parts.append((bool(stem), _PLACES.get(word, len(_PLACES)), stem, number))
    return tuple(parts)


# --- files --------------------------------------------------------------------------------------------------


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        got = None if isinstance(error, FileNotFoundError) else error.strerror
        raise Fp8kitError("report", str(path), got, "a file of a RUN folder that can be read") from None


def _about(path: Path) -> dict[str, Any]:
    """run.json, checked."""
    try:
        found = json.loads(_read(path))
    except UnicodeDecodeError as error:
        raise Fp8kitError("report", str(path), f"bytes that are not UTF-8 ({error.reason})", "JSON") from None
    except ValueError as error:
        line = getattr(error, "lineno", 1)
        raise Fp8kitError("report", f"{path}, line {line}", f"no JSON ({error})", "an object") from None
    if not isinstance(found, dict):
        raise Fp8kitError("report", f"{path}, line 1", _shown(found), "an object")
    fault = _fault(found)
    if fault is not None:
        name, got, wanted = fault
        raise Fp8kitError("report", f'{path}, "{name}"', got, wanted)
    return found


def _fault(about: dict[str, Any]) -> tuple[str, str | None, str] | None:
    """Returns the first of run.json's names whose value is not what it must be: (name, what it is, what it
    should have been); None where all are right."""
    for name, kinds, wanted in (
        ("model", dict, "an object"),
        ("settings", dict, "an object"),
        ("versions", dict, "an object"),
        ("recipe", str | None, "a name or null"),
        ("device", str, "a word"),
    ):
        if name not in about or not isinstance(about[name], kinds):
            return name, _shown(about[name]) if name in about else None, wanted
    return None


def _lines(path: Path, check: Callable[[Any], str | None]) -> Iterator[dict[str, Any]]:
    """Yields the objects of a file of JSON lines; Fp8kitError for the first line that ``check`` says
    something about."""
    for number, line in enumerate(_read(path).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            said = getattr(error, "msg", None) or "not UTF-8"
            got = f"{_shown(line.decode(errors='replace'))} ({said})"
            raise Fp8kitError("report", f"{path}, line {number}", got, "a JSON object") from None
        wanted = check(row)
        if wanted is not None:
            raise Fp8kitError("report", f"{path}, line {number}", _shown(row), wanted)
        yield row


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and (type(value) is float or abs(value) < 2**63)


def check_loss(row: Any) -> str | None:
    """Returns what a line of losses.jsonl should have been, None for one that is right."""
    if not isinstance(row, dict):
        return "a JSON object"
    if not _is_count(row.get("step")):
        return '"step": an int, not negative'
    if not _is_number(row.get("loss")):
        return '"loss": a number'
    if not isinstance(row.get("series"), str) or not row["series"]:
        return '"series": the name of a run'
    return None if isinstance(row.get("validation", False), bool) else '"validation": true or false'


def check_row(row: Any) -> str | None:
    """Returns what a line of statistics.jsonl should have been, None for one that is right."""
    if not isinstance(row, dict):
        return "a JSON object"
    if not _is_count(row.get("step")):
        return '"step": an int, not negative'
    for name in ("layer", "stat"):
        if not isinstance(row.get(name), str) or not row[name]:
            return f'"{name}": a name'
    if row.get("tensor") not in TENSORS:
        return f'"tensor": one of {", ".join(TENSORS)}'
    if row.get("gemm", "fprop") not in GEMMS:
        return f'"gemm": one of {", ".join(GEMMS)}, or none'
    value = row.get("value")
    if kind_of(row["stat"]) is None:
        return None if _is_number(value) else '"value": a number'
    if isinstance(value, list) and len(value) == BINS and all(_is_count(count) for count in value):
        return None
    return f'"value": a list of {BINS} counts'


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62
