"""``inspect``: look at the tensors of a training, and change some layers' recipe, by a configuration."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from fp8kit.arguments import flag, shown
from fp8kit.autograd import Tensor
from fp8kit.collectives import everyone
from fp8kit.errors import ArgumentError
from fp8kit.layers.fp8_layer import FP8Layer
from fp8kit.numerics.config import read
from fp8kit.numerics.dumps import Dumps, on_host
from fp8kit.numerics.gathering import gathering
from fp8kit.numerics.log import Inspector
from fp8kit.numerics.sinks import LogFile, sinks_of

log = logging.getLogger("fp8kit")
Names = Callable[[Any], str | None]


def layer_names(model: Any, hint: str = "") -> Names:
    """Returns a function from a layer to its name in ``model.named_modules()``; the model itself has its
    attribute ``name``, else its class's. ArgumentError unless ``model`` is a module. Logs a warning, with
    the ``hint``, where the model has no layer of fp8kit."""
    if isinstance(model, type) or not callable(getattr(model, "named_modules", None)):
        got = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise ArgumentError("inspect", "model", got, "a module")
    found: dict[int, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, FP8Layer):
            found[id(module)] = path or module.name or module.layer_name
    if not found:
        log.warning(
            "inspect: no layer of fp8kit is in the %s, so nothing is seen%s", type(model).__name__, hint
        )
    return lambda layer: found.get(id(layer))


def save_numpy(arrays: Mapping[str, Any], path: Path) -> None:
    """Arrays by name as a ``.npz`` file."""
    host: dict[str, Any] = {name: np.asarray(on_host(array), np.float32) for name, array in arrays.items()}
    np.savez(path, **host)


class Block(AbstractContextManager[Inspector, None]):
    """The block of an inspector."""

    def __init__(self, inspector: Inspector) -> None:
        self._inspector = inspector

    def __enter__(self) -> Inspector:
        self._inspector.open()
        return self._inspector

    def __exit__(self, kind: Any, *error: Any) -> None:
        self._inspector.close(failed=kind is not None)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name}: it is log's, within `with inspect(...) as log:`")


def made(
    config: Any,
    names: Names,
    sinks: Any,
    log_dir: str | os.PathLike[str] | None,
    first_step: int,
    keep: bool,
    rank: int = 0,
    save: tuple[Callable[..., None], str] = (save_numpy, ".npz"),
    **more: Any,
) -> Inspector:
    """Make the inspector of a frontend. ArgumentError for an invalid configuration or sink."""
    found = read(config)
    if not isinstance(log_dir, str | os.PathLike | None):
        raise ArgumentError("inspect", "log_dir", shown(log_dir), "the path of a folder, or None")
    where = "." if log_dir is None else log_dir
    files = [] if log_dir is None else [LogFile(log_dir, rank)]
    return Inspector(
        found,
        names,
        [*files, *sinks_of(sinks)],
        first=first_step,
        keep=flag("inspect", "keep", keep),
        dumps=Dumps(where, *save, rank),
        **more,
    )


def inspect(
    model: Any,
    config: Any,
    *,
    sinks: Any = (),
    log_dir: str | os.PathLike[str] | None = None,
    first_step: int = 0,
    keep: bool = True,
    group: Any = None,
    whole_weights: bool = True,
) -> Any:
    """Returns a context manager: within it the layers of ``model`` show and do what ``config`` says::

        with fk.inspect(model, "config.yaml", sinks="run/statistics.jsonl") as log:
            for batch in data:
                train(model, batch)
                log.step()
        log.rows()   # [{"step": 0, "layer": "blocks.0.proj", "tensor": "activation", "stat": "max", ...}]

    * ``model``: a module; its layers are called as ``named_modules()`` calls them, their products with
      Transformer Engine's endings (``layernorm_mlp.fc1``).
    * ``config``: a mapping, or the path of a YAML file, as Transformer Engine's debug features have them
      (docs/inspector.md).
    * ``sinks``: where rows go (dicts of int, str, and float or arrays of int as lists), one or several: paths
      of ``.jsonl`` and ``.csv`` files, functions of the rows of a step, writers of TensorBoard, runs of
      Weights & Biases (``fp8kit.numerics.sinks``).
    * ``log_dir``: a folder for the log that Transformer Engine writes; None writes none. Dumped tensors go
      there, too, by default to the working directory.
    * ``first_step``: the number of the first step. ``keep``: whether ``log.rows()`` keeps all rows.
    * ``group``: ranks, such as ``fk.distributed.init()``, whose tensors are taken together, weights aside;
      ``log.step()`` is then a call that all of them make. None: this rank's alone.

    * ``whole_weights``: of a weight that tensor-parallel ranks have parts of, the statistics are of all parts
      together; ``log.step()`` is then a call that these ranks make together. False: of this rank's part.

    ``log.step()`` ends a step: what micro-batches have shown since the last one is put together. In steps
    that nothing is asked of, and outside of the block, calls are as without it. There is one inspector in a
    process. Raises ArgumentError, a ValueError, for an invalid configuration or sink and, at a layer's
    first call, where several sections choose it.
    """
    names = layer_names(model)
    if not all(isinstance(p, Tensor) for _, p in model.named_parameters()):
        wanted = "an fk.nn.Module; fp8kit_torch.inspect is for PyTorch's modules"
        raise ArgumentError("inspect", "model", f"a {type(model).__name__} of another library", wanted)
    ranks = everyone() or group
    more: Any = {"gather": gathering(group), "gather_parts": parts_of(whole_weights, gathering)}
    rank = 0 if ranks is None else ranks.rank
    return Block(made(config, names, sinks, log_dir, first_step, keep, rank, **more))


def parts_of(whole_weights: Any, gathering: Callable[[Any], Any]) -> Callable[[Any], Any] | None:
    """``gathering`` for the ranks of a weight, None where statistics are of this rank's part. ArgumentError
    if ``whole_weights`` is not a flag."""
    return gathering if flag("inspect", "whole_weights", whole_weights) else None
