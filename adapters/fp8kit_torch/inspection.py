"""``inspect``: ``fp8kit.numerics.inspect`` for PyTorch's modules.

In a step that is looked at the model runs eagerly: ``torch.compile``'s code is left out by its stance
"force_eager", and so are the graphs of ``make_graphed_callables``. All other steps run as they do without.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from fp8kit.collectives import Collectives
from fp8kit.errors import ArgumentError
from fp8kit.numerics.gathering import gathering as native_gathering
from fp8kit.numerics.inspect import Block, Names, layer_names, made, parts_of
from fp8kit.numerics.log import Inspector, Records
from fp8kit_torch.collectives import TorchCollectives


@torch.compiler.disable
def inspect(
    model: torch.nn.Module,
    config: Any,
    *,
    sinks: Any = (),
    log_dir: str | os.PathLike[str] | None = None,
    first_step: int = 0,
    keep: bool = True,
    group: Any = None,
    whole_weights: bool = True,
) -> Any:
    """A context manager: within it the layers of ``model`` show and do what ``config`` says ::

        with te.inspect(model, "config.yaml", sinks="run/statistics.jsonl") as log:
            for batch in data:
                train(model, batch)
                log.step()

    Arguments and errors as ``fk.inspect``'s, and ``group``: a ``torch.distributed`` group, whose ranks'
    tensors are taken together, weights aside; ``log.step()`` is then a collective call. None: this rank's
    alone. Dumped tensors are ``.pt`` files of a dict. In a step that is looked at, compiled code runs
    eagerly, and captured graphs are left out; the block stands around such code, since a block within it
    sees nothing.
    """
    if not isinstance(model, torch.nn.Module):
        got = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise ArgumentError("inspect", "model", got, "a torch.nn.Module")
    names = layer_names(model, ": fp8kit_torch.convert makes such of torch's")
    return _Block(inspector(config, names, sinks, log_dir, first_step, keep, group, whole_weights))


def inspector(
    config: Any,
    names: Names,
    sinks: Any,
    log_dir: str | os.PathLike[str] | None,
    first_step: int,
    keep: bool = True,
    group: Any = None,
    whole_weights: bool = True,
) -> Inspector:
    """The inspector, not begun."""
    there = distributed.is_available() and distributed.is_initialized()
    if group is not None and not there:
        wanted = "None, or a group of torch.distributed, initialised"
        raise ArgumentError("inspect", "group", type(group).__name__, wanted)
    return made(
        config,
        names,
        sinks,
        log_dir,
        first_step,
        keep,
        distributed.get_rank() if there else 0,
        (_save, ".pt"),
        gather=gathering(group),
        gather_parts=parts_of(whole_weights, gathering_parts),
        switched=_Eager(),
    )


def gathering(group: Any) -> Any:
    """The function that gathers the records of a group's ranks; None for no group."""
    if group is None:
        return None

    def gather(own: Records) -> Sequence[Records]:
        found: list[Any] = [None] * distributed.get_world_size(group)
        distributed.all_gather_object(found, own, group)
        return found

    return gather


def gathering_parts(ranks: Collectives) -> Any:
    """``gathering`` for the ranks that have parts of a weight."""
    return gathering(ranks.group) if isinstance(ranks, TorchCollectives) else native_gathering(ranks)


class _Block(Block):
    """The block of an inspector, which ``torch.compile`` breaks a graph for, and does not look into."""

    @torch.compiler.disable
    def __enter__(self) -> Inspector:
        return super().__enter__()

    @torch.compiler.disable
    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)


class _Eager:
    """Called with what is looked at in the step that begins, None for nothing: where something is, nothing
    compiled runs."""

    def __init__(self) -> None:
        self._stance: Any = None

    def __call__(self, looked_at: Any) -> None:
        if looked_at is not None and self._stance is None:
            self._stance = torch.compiler.set_stance("force_eager")
        elif looked_at is None and self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None


def _save(arrays: Mapping[str, Any], path: Path) -> None:
    """A dict of tensors as a file of ``torch.save``."""
    tensors = {
        name: array.detach().cpu() if isinstance(array, torch.Tensor) else torch.from_numpy(array)
        for name, array in arrays.items()
    }
    torch.save(tensors, path)
