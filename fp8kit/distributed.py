"""Several processes, a device each: ``init`` makes the group of all of them, which layers take as
``tp_group`` and ``optim.ShardedOptimizer`` as its ranks.

Processes are started by ``fp8kit launch``, torchrun, mpirun or Slurm. On GPUs they communicate by NCCL
(nccl4py, extra ``distributed``), on CPUs by Gloo as PyTorch has it. A backend is a module with
``connect(place, device, timeout)``.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from fp8kit import arrays, settings
from fp8kit.arguments import integer, number
from fp8kit.arrays import Device
from fp8kit.autograd import Tensor
from fp8kit.backends import dispatch
from fp8kit.collectives import Collectives, everyone, set_everyone, want_ranks
from fp8kit.errors import ArgumentError, BackendError, CheckpointError, meant
from fp8kit.nn.module import Module, Parameter
from fp8kit.settings import Place

log = logging.getLogger("fp8kit")

PATIENCE = 10.0  # seconds after which a process says that it waits for the others
# name of a backend -> its module, and the kind of device that it is for
BACKENDS = {"nccl": ("fp8kit.backends.cuda.nccl", "cuda"), "gloo": ("fp8kit_torch.native_ranks", "cpu")}


def init(
    backend: str | None = None, device: Device | str | None = None, timeout: float = 600.0
) -> Collectives:
    """Returns the group of all processes that were started together: what each of them calls first. Later
    calls give the same group.

    ``backend``: "nccl" or "gloo"; None is the device's. ``device``: this process's, ``ranks.device``; None is
    the GPU with the process's number on its machine, or the only one that it sees (Slurm's
    ``--gpus-per-task``), or the CPU where no GPU is usable. NCCL makes it the thread's current one.
    ``timeout``: seconds after which a call that other ranks do not join fails, this one too; the log says
    after ten seconds whom it waits for. A process that was started alone is a group of one. ArgumentError for
    another backend, BackendError where it or the device is not there, or where processes do not find each
    other.
    """
    if (known := everyone()) is not None:
        return known
    seconds = number("distributed.init", "timeout", timeout, above=0.0)
    place, where = settings.place(), None
    if device is not None:
        where = arrays.usable(device, "distributed.init", "device")
    else:
        where = dispatch.default_device()
        if where.kind == "cuda" and not settings.device() and arrays.provider(where).count() > 1:
            where = arrays.usable(f"cuda:{place.local}", "distributed.init", "device")
    own = {kind: name for name, (_, kind) in BACKENDS.items()}[where.kind] if backend is None else backend
    if own not in BACKENDS:
        wanted = f"None or one of {', '.join(BACKENDS)}{meant(str(own), BACKENDS)}"
        raise ArgumentError("distributed.init", "backend", repr(own), wanted)
    if place.size == 1:
        made = Collectives(0, 1)
    else:
        try:
            module: Any = importlib.import_module(BACKENDS[own][0])
        except ImportError as error:
            cure = "the extra torch" if own == "gloo" else "the extras cuda13 and distributed"
            raise BackendError("distributed.init", "backend", f"{own!r} ({error})", cure) from None
        with _told(place, seconds):
            made = module.connect(place, where, seconds)
    made.device = where
    set_everyone(made)
    return made


@contextmanager
def _told(place: Place, seconds: float) -> Iterator[None]:
    """The log says that this process waits for the others, if it does within."""
    said = "distributed.init: rank %d of %d waits for the others at %s:%d, for at most %.0f s"
    timer = threading.Timer(PATIENCE, log.warning, (said, *place[:2], place.address, place.port, seconds))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Grid(NamedTuple):
    """A rank's two groups: ``data``, of the ranks that have the same parts of weights and other rows, and
    ``tensor``, of those that share the weights."""

    data: Collectives
    tensor: Collectives


def grid(ranks: Collectives, tensor: int = 1) -> Grid:
    """``ranks`` as rows of ``tensor`` neighbours, which share weights. All ranks call it. ArgumentError for
    what is no ranks, and where ``tensor`` does not divide their number."""
    want_ranks("distributed.grid", "ranks", ranks)
    integer("distributed.grid", "tensor", tensor, 1)
    if ranks.size % tensor:
        wanted = f"a divisor of {ranks.size}, the number of ranks"
        raise ArgumentError("distributed.grid", "tensor", tensor, wanted)
    return Grid(ranks.split(ranks.rank % tensor), ranks.split(ranks.rank // tensor))


def broadcast_parameters(model: Module, ranks: Collectives) -> None:
    """Give all ranks the parameters and buffers of rank 0, in place."""
    for parameter in model.parameters():
        _broadcast(parameter, ranks)
    for buffer in model.buffers():
        ranks.broadcast(buffer, 0, arrays.current_stream(buffer.device), "broadcast_parameters")


def _broadcast(parameter: Parameter, ranks: Collectives) -> None:
    ranks.broadcast(parameter.view, 0, arrays.current_stream(parameter.device), "broadcast_parameters")
    parameter.version().count += 1


def all_reduce(x: Tensor, ranks: Collectives, op: str = "sum") -> Tensor:
    """x = the sum, or with ``op`` "max" the largest, over the ranks of their x, in place; not recorded on the
    tape. Returns x."""
    ranks.all_reduce(x.view, op, arrays.current_stream(x.device), "all_reduce")  # type: ignore[arg-type]
    x.version().count += 1
    return x


def reduce_sequence_parallel_gradients(parameters: Iterable[Parameter], tensor: Collectives) -> None:
    """Sum over the ranks that share weights the gradients that each has of its own rows alone: those of the
    parameters marked ``sequence_parallel`` (norms, and biases behind a sum of the ranks). Call it after
    backward, before the optimiser."""
    for parameter in parameters:
        if parameter.sequence_parallel and parameter.grad is not None:
            view = arrays.as_view(parameter.grad)
            tensor.all_reduce(view, "sum", arrays.current_stream(view.device), "sequence-parallel gradients")


# --- checkpoints of ranks that share weights ----------------------------------------------------------------


def whole_state(model: Module, tensor: Collectives) -> dict[str, Any]:
    """``model.state_dict()`` with the parameters whole, NumPy arrays on the host: what one rank would save.
    All ranks of ``tensor`` call it. FP8 states are those of this rank, which all have where amaxes are
    reduced over them."""
    found: dict[str, Any] = {name: view.numpy().copy() for name, view in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        if parameter.partition_dim is not None and tensor.size > 1:
            view = parameter.view
            parts = arrays.empty((tensor.size, *view.shape), view.dtype, view.device)
            tensor.all_gather(view, parts, arrays.current_stream(view.device), f"whole_state of {name}")
            dim = parameter.partition_dim
            split = [_blocks(part, parameter) for part in parts.numpy()]
            found[name] = np.concatenate(
                [block for blocks in zip(*split, strict=True) for block in blocks], dim
            )
    return found


def own_state(state: Mapping[str, Any], model: Module, tensor: Collectives) -> dict[str, Any]:
    """Returns what ``model.load_state_dict`` takes on this rank, of a ``state`` with whole parameters, arrays
    by name: as ``whole_state`` gave it with any number of ranks, or a model of one rank. CheckpointError for
    parameters that the ranks do not divide."""
    found = dict(state)
    for name, parameter in model.named_parameters():
        if parameter.partition_dim is not None and name in found:
            dim = parameter.partition_dim
            whole = arrays.as_view(found[name], "own_state", name).numpy()
            if dim >= whole.ndim or whole.shape[dim] != tensor.size * parameter.shape[dim]:
                wanted = f"{tensor.size * parameter.shape[dim]} in dimension {dim}"
                raise CheckpointError("own_state", name, f"shape {whole.shape}", wanted)
            parts = [np.split(block, tensor.size, dim)[tensor.rank] for block in _blocks(whole, parameter)]
            found[name] = np.concatenate(parts, dim)
    return found


def _blocks(array: Any, parameter: Parameter) -> list[Any]:
    """Returns the blocks of a parameter, or of a rank's part, of each of which a rank has a part."""
    dim, sizes = parameter.partition_dim, parameter.partition_blocks
    assert dim is not None
    unit = array.shape[dim] // sum(sizes)
    return np.split(array, [unit * sum(sizes[: i + 1]) for i in range(len(sizes) - 1)], dim)


__all__ = [
    "BACKENDS",
    "Grid",
    "all_reduce",
    "broadcast_parameters",
    "grid",
    "init",
    "own_state",
    "reduce_sequence_parallel_gradients",
    "whole_state",
]
