"""``nvdlfw_inspect.api``'s names, by which programs use Transformer Engine's debug features: one inspector of
``fp8kit_torch.inspect`` for the process, from ``initialize`` to ``end_debug``.

Layers are known by their ``name``, which ``infer_and_assign_layer_names`` or their constructor gives them, or
by ``Layer_N``, in the order in which they are first called. Parts of an attention whose constructor got a
name are called as Transformer Engine calls them then: ``NAME.layernorm_linear_qkv``.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from fp8kit.arguments import flag
from fp8kit.errors import ArgumentError, UnsupportedError
from fp8kit.layers.dot_product_attention import DotProductAttention
from fp8kit.layers.fp8_layer import FP8Layer
from fp8kit.numerics.config import FEATURES, read
from fp8kit.numerics.inspect import parts_of
from fp8kit.numerics.log import Inspector
from fp8kit.numerics.sinks import Scalars, TensorBoard
from fp8kit_torch.inspection import gathering, gathering_parts, inspector

__all__ = [
    "BaseLogger",
    "end_debug",
    "explain_features",
    "get_tensor_reduction_group",
    "infer_and_assign_layer_names",
    "initialize",
    "initialize_training_step",
    "list_features",
    "log_message",
    "set_tensor_reduction_group",
    "step",
    "update_training_step",
]
_log = logging.getLogger("fp8kit")


class BaseLogger:
    """Base of loggers of your own: ``initialize(statistics_logger=...)`` calls ``log_scalar``."""

    def initialize(self, **kwargs: Any) -> None:
        """Called by nobody here: a logger is handed over ready for use."""

    def log_scalar(self, name: str, value: float | int, iteration: int, **kwargs: Any) -> None:
        """Take LAYER_TENSOR_STAT's value at a step."""
        raise NotImplementedError


class _Debug:
    """What ``initialize`` has begun."""

    def __init__(self) -> None:
        self.begin(None)

    def begin(self, inspector: Inspector | None) -> None:
        """Forget what was before."""
        self.inspector, TEDebugState.debug_enabled = inspector, inspector is not None
        self.group: Any = None
        self.numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.said: set[Any] = set()

    def name_of(self, layer: Any) -> str:
        """A layer's name."""
        if layer.name:
            return str(getattr(layer, "debug_name", None) or layer.name)
        return f"Layer_{self.numbers.setdefault(layer, len(self.numbers) + 1)}"

    def begun(self, what: str) -> Inspector:
        """The inspector; ArgumentError where there is none."""
        if self.inspector is None:
            raise ArgumentError("nvdlfw_inspect", what, "a call before initialize", "initialize first")
        return self.inspector


class TEDebugState:
    """What programs set and ask of Transformer Engine's debug features, in ``transformer_engine.debug``."""

    debug_enabled = False  # between ``initialize`` and ``end_debug``
    weight_tensor_tp_group_reduce = True

    @classmethod
    def set_weight_tensor_tp_group_reduce(cls, enabled: bool) -> None:
        """Whether statistics of a weight are taken over its tensor-parallel group, as they are at first, or
        of each rank's part. ArgumentError for what is no flag."""
        cls.weight_tensor_tp_group_reduce = flag("TEDebugState", "enabled", enabled)
        if _debug.inspector is not None:
            _debug.inspector.gather_parts = parts_of(enabled, gathering_parts)


_debug = _Debug()


def set_weight_tensor_tp_group_reduce(enabled: bool) -> None:
    """``TEDebugState``'s, as a function."""
    TEDebugState.set_weight_tensor_tp_group_reduce(enabled)


def initialize(
    config_file: Any = "",
    feature_dirs: str | Iterable[str] | None = None,
    statistics_logger: Any = None,
    log_dir: str | os.PathLike[str] = ".",
    init_training_step: int = 0,
    **kwargs: Any,
) -> None:
    """Begin: what ``config_file``, a path or a mapping, says is done from now on until ``end_debug``.

    * ``feature_dirs``: Transformer Engine's own folder, whose features are here; UnsupportedError for one
      with features of another kind.
    * ``statistics_logger``: an object with ``log_scalar(name, value, iteration)``; None: the file
      ``nvdlfw_inspect_statistics_logs/nvdlfw_inspect_globalrank-RANK.log`` within ``log_dir``, which
      ``default_logging_enabled=True`` writes in any case. ``tb_writer``: a TensorBoard writer.
    * ``init_training_step``: the number of the first step.

    ArgumentError, a ValueError, where it has begun already, and for what is wrong in the configuration.
    """
    if _debug.inspector is not None:
        raise ArgumentError("nvdlfw_inspect", "initialize", "a second call", "end_debug first")
    folders = [feature_dirs] if isinstance(feature_dirs, str) else list(feature_dirs or ())
    for folder in folders:
        if "transformer_engine" not in os.fspath(folder).replace(os.sep, "/").split("/"):
            wanted = "transformer_engine/debug/features: features of your own are functions of rows here"
            raise UnsupportedError("nvdlfw_inspect", "feature_dirs", os.fspath(folder), wanted)
    writer, file_too = kwargs.pop("tb_writer", None), kwargs.pop("default_logging_enabled", False)
    if kwargs:
        known = "config_file, feature_dirs, statistics_logger, log_dir, init_training_step, tb_writer, "
        raise ArgumentError("nvdlfw_inspect", "initialize", *kwargs, f"{known}default_logging_enabled")
    sinks = [] if statistics_logger is None else [Scalars(statistics_logger)]
    sinks += [] if writer is None else [TensorBoard(writer)]  # type: ignore[list-item]
    config = read(config_file if config_file != "" else None)
    where = log_dir if statistics_logger is None or file_too else None
    whole = TEDebugState.weight_tensor_tp_group_reduce
    made = inspector(config, _debug.name_of, sinks, where, init_training_step, whole_weights=whole)
    made.open()
    _debug.begin(made)


def step() -> None:
    """End a training step: statistics are put together and logged. Nothing before ``initialize``."""
    if _debug.inspector is not None:
        _debug.inspector.step()


def update_training_step(train_step: int) -> None:
    """Let the step that runs have this number."""
    if _debug.inspector is not None:
        _debug.inspector.go_to(train_step)


initialize_training_step = update_training_step  # its name in nvdlfw_inspect 0.2


def end_debug() -> None:
    """End what ``initialize`` has begun."""
    if _debug.inspector is not None:
        _debug.inspector.close()
        _debug.inspector, TEDebugState.debug_enabled = None, False


def infer_and_assign_layer_names(model: torch.nn.Module | list[torch.nn.Module]) -> None:
    """Name every layer of fp8kit within a model, or several, by its path from "model" on, and what a
    ModuleList holds by its ``layer_number``, where it has one, else by its place. ArgumentError for what is
    no module."""
    for each in model if isinstance(model, list) else [model]:
        if not isinstance(each, torch.nn.Module):
            got = f"a {type(each).__name__}"
            raise ArgumentError("infer_and_assign_layer_names", "model", got, "a torch.nn.Module")
        _assign(each, "model")


def _assign(module: torch.nn.Module, path: str) -> None:
    numbered = isinstance(module, torch.nn.ModuleList)
    if isinstance(module, FP8Layer | DotProductAttention):
        module.name = path
        module.debug_name = None
        _log.info("inspect: a layer is called %s", path)
    for name, child in module.named_children():
        own = getattr(child, "layer_number", None) if numbered else None
        _assign(child, f"{path}.{name if own is None else own}")


def set_tensor_reduction_group(group: Any, layer_name: str | None = None) -> None:
    """Take the tensors of a ``torch.distributed`` group's ranks together, weights aside."""
    _debug.begun("set_tensor_reduction_group").gather = gathering(group)
    _debug.group = group


def get_tensor_reduction_group() -> Any:
    """The group that was set, None for none."""
    _debug.begun("get_tensor_reduction_group")
    return _debug.group


def log_message(
    msg: str, layer_name: str | None = None, level: int = logging.INFO, extra_cachable_args: Any = None
) -> None:
    """Say something once on the logger "fp8kit"."""
    key = msg, layer_name, level, extra_cachable_args
    if key not in _debug.said:
        _debug.said.add(key)
        _log.log(level, "%s%s", "" if layer_name is None else f"LAYER={layer_name}: ", msg)


def list_features() -> None:
    """Print the names of the features."""
    print("\n".join(FEATURES))


def explain_features(features: str | Iterable[str] | None = None) -> None:
    """Print what features do, and their options. ArgumentError for a name that is none."""
    names = [features] if isinstance(features, str) else list(FEATURES if features is None else features)
    for name in names:
        if name not in FEATURES:
            known = f"one of {', '.join(FEATURES)}"
            raise ArgumentError("explain_features", "features", repr(name), known)
        text, options = FEATURES[name]
        steps = "enabled, freq, start_step, end_step, start_end_list"
        print(f"{name}: {text}\n    options: {', '.join((*options, steps))}")
