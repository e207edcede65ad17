"""Where the inspector's rows go. A sink has ``write(rows)``, called once at the end of a step, and
``close()``.

``sink_of`` makes one of what a user has at hand: a file's path, a function, a writer of TensorBoard, a run of
Weights & Biases, a logger of ``nvdlfw_inspect``.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fp8kit.arguments import shown
from fp8kit.errors import ArgumentError, install

Row = dict[str, Any]
FIELDS = ("step", "layer", "tensor", "stat", "value", "gemm")
_EXPONENTS = 256  # bins of a histogram: float32's exponents, then the zeros
_json = json.JSONEncoder().encode


class Sink(Protocol):
    """What takes rows."""

    def write(self, rows: Sequence[Row]) -> None:
        """Take the rows of a step."""

    def close(self) -> None:
        """No more rows will come."""


def name_of(row: Row) -> str:
    """Returns a row's name in Transformer Engine's logs, LAYER_TENSOR_STAT."""
    return f"{row['layer']}_{row['tensor']}_{row['stat']}"


def text_of(value: Any) -> str:
    """Returns a value as text: all digits that a float32 has, so that small ones are no zeros."""
    if isinstance(value, list):
        return json.dumps(value, separators=(",", ":"))
    return str(value) if isinstance(value, int) else str(np.float32(value))


class _InFile:
    _file: _TextFile

    def close(self) -> None:
        self._file.close()


class JsonLines(_InFile):
    """A file of one JSON object a row (NaN and Inf as Python writes them), what is there already stays."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = _TextFile(path)

    def write(self, rows: Sequence[Row]) -> None:
        self._file.write("".join([f"{_json(row)}\n" for row in rows]))
        self._file.flush()


class Csv(_InFile):
    """A file of comma-separated values with a head: FIELDS. Histograms are JSON lists in their field."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = _TextFile(path, newline="")
        self._writer = csv.writer(self._file)
        if self._file.is_empty:
            self._writer.writerow(FIELDS)

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            value = row["value"]
            known = {**row, "value": json.dumps(value) if isinstance(value, list) else repr(value)}
            self._writer.writerow([known.get(name, "") for name in FIELDS])
        self._file.flush()


class LogFile(_InFile):
    """The file that Transformer Engine's debug features write, ``nvdlfw_inspect_statistics_logs/
    nvdlfw_inspect_globalrank-RANK.log`` within ``folder``: a line a row, LAYER_TENSOR_STAT, iteration and
    value between tabs."""

    def __init__(self, folder: str | os.PathLike[str], rank: int = 0) -> None:
        where = Path(folder) / "nvdlfw_inspect_statistics_logs"
        self.path = where / f"nvdlfw_inspect_globalrank-{rank}.log"
        self._file = _TextFile(self.path, "log_dir")

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            text = text_of(row["value"])
            self._file.write(f"{name_of(row)} \t iteration={row['step']:06d} \t value={text}\n")
        self._file.flush()


class _Users:
    def close(self) -> None:
        """What it is given to is the user's."""


class Callback(_Users):
    """A function of a step's rows."""

    def __init__(self, function: Callable[[Sequence[Row]], Any]) -> None:
        self._function = function

    def write(self, rows: Sequence[Row]) -> None:
        self._function(rows)


class Scalars(_Users):
    """A logger of ``nvdlfw_inspect``, whose ``log_scalar(name, value, iteration)`` is called with every
    number."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if not isinstance(row["value"], list):
                self._logger.log_scalar(name_of(row), row["value"], row["step"])


class TensorBoard:
    """A ``SummaryWriter`` of ``torch.utils.tensorboard`` or ``tensorboardX``: scalars and histograms by
    LAYER/TENSOR/STAT. ``writer``: one, or a folder for one of ``tensorboardX``, which this closes."""

    def __init__(self, writer: Any) -> None:
        self._own = isinstance(writer, str | os.PathLike)
        self._writer = _summary_writer(writer) if self._own else writer

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            tag = _path_of(row)
            if not isinstance(row["value"], list):
                self._writer.add_scalar(tag, row["value"], row["step"])
                continue
            counts, middles = row["value"][:_EXPONENTS], [e - 127 for e in range(_EXPONENTS)]
            total = sum(counts)
            if not total:
                continue
            present = [middle for middle, count in zip(middles, counts, strict=True) if count]
            self._writer.add_histogram_raw(
                tag,
                min=present[0],
                max=present[-1] + 1,
                num=total,
                sum=sum(m * c for m, c in zip(middles, counts, strict=True)),
                sum_squares=sum(m * m * c for m, c in zip(middles, counts, strict=True)),
                bucket_limits=[middle + 1 for middle in middles],
                bucket_counts=counts,
                global_step=row["step"],
            )

    def close(self) -> None:
        if self._own:
            self._writer.close()


class WeightsAndBiases(_Users):
    """A run of Weights & Biases, or its module: LAYER/TENSOR/STAT, histograms as ``wandb.Histogram``.

    The run's own step is the user's: rows of a step may come when he has logged the next one, and what goes
    back is refused there. So they have an x axis of their own, ``inspect/step``, and are put into whatever
    row the run is at. An object that has ``log`` alone is called with the step, once a step."""

    STEP = "inspect/step"

    def __init__(self, run: Any) -> None:
        self._run = run
        self._layers: set[str] = set()  # whose x axis the run knows
        self._row = -1  # of the run: the last that has rows of ours

    def write(self, rows: Sequence[Row]) -> None:
        by_step: dict[int, Row] = {}
        for row in rows:
            by_step.setdefault(row["step"], {})[_path_of(row)] = self._value(row["value"])
        # the module's functions are those of its run
        run = getattr(self._run, "run", None) or self._run
        if not hasattr(run, "define_metric"):
            for step, values in by_step.items():
                run.log(values, step=step)
            return
        for layer in {row["layer"] for row in rows} - self._layers:
            run.define_metric(f"{layer}/*", step_metric=self.STEP)
            self._layers.add(layer)
        for step, values in by_step.items():
            if run.step == self._row:  # that row has not been ended
                run.log({}, commit=True)
            run.log({**values, self.STEP: step}, commit=False)
            self._row = run.step

    @staticmethod
    def _value(value: Any) -> Any:
        if not isinstance(value, list):
            return value
        import wandb

        edges = [e - 127 for e in range(_EXPONENTS + 1)]
        return wandb.Histogram(np_histogram=(value[:_EXPONENTS], edges))


class _TextFile:
    """A file that text is written to behind what is there. ArgumentError, of ``argument``, where that
    fails."""

    def __init__(
        self, path: str | os.PathLike[str], argument: str = "sinks", newline: str | None = None
    ) -> None:
        self.path, self._argument = Path(path), argument
        with self._named():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8", newline=newline)
        self.is_empty = not self._file.tell()

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            wanted = f"a file that can be written ({error.strerror})"
            raise ArgumentError("inspect", self._argument, str(self.path), wanted) from None

    def write(self, text: str) -> None:
        """Write it, perhaps later."""
        with self._named():
            self._file.write(text)

    def flush(self) -> None:
        """Write it now."""
        with self._named():
            self._file.flush()

    def close(self) -> None:
        """Write what is left, and close the file."""
        with self._named():
            self._file.close()


def _path_of(row: Row) -> str:
    return f"{row['layer']}/{row['tensor']}/{row['stat']}"


def _summary_writer(folder: Any) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise ArgumentError(
            "inspect", "sinks", f"{folder}, without tensorboardX", install("tensorboard")
        ) from None
    return SummaryWriter(os.fspath(folder))


def sink_of(value: Any) -> Sink:
    """Returns a sink: one already; the path of a ``.jsonl`` or ``.csv`` file; a writer of TensorBoard
    (``add_scalar``); a run of Weights & Biases, or ``wandb`` itself (``log``); a logger of ``nvdlfw_inspect``
    (``log_scalar``); a function of the rows of a step. ArgumentError for anything else."""
    if callable(getattr(value, "write", None)) and callable(getattr(value, "close", None)):
        return value  # type: ignore[no-any-return]
    if isinstance(value, str | os.PathLike):
        kinds: dict[str, Callable[[Any], Sink]] = {".jsonl": JsonLines, ".csv": Csv}
        ending = Path(value).suffix
        if ending in kinds:
            return kinds[ending](value)
    if callable(getattr(value, "add_scalar", None)):
        return TensorBoard(value)
    if callable(getattr(value, "log_scalar", None)):
        return Scalars(value)
    if callable(getattr(value, "log", None)):
        return WeightsAndBiases(value)
    if callable(value):
        return Callback(value)
    wanted = "a .jsonl or .csv file's path, a function, a writer of TensorBoard or a run of Weights & Biases"
    raise ArgumentError("inspect", "sinks", shown(value), wanted)


def sinks_of(values: Any) -> list[Sink]:
    """Those of one value or several. ArgumentError for a file that is there twice."""
    several = isinstance(values, Iterable) and not isinstance(values, str | os.PathLike)
    given = [] if values is None else list(values) if several else [values]
    files = [os.path.abspath(value) for value in given if isinstance(value, str | os.PathLike)]
    twice = next((file for file in files if files.count(file) > 1), None)
    if twice is not None:
        raise ArgumentError("inspect", "sinks", f"{twice} twice", "each file once")
    return [sink_of(value) for value in given]
