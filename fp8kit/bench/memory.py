"""Where a step's memory goes: the most that is held at once, and every tensor that forward keeps for
backward."""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from fp8kit import arrays
from fp8kit.arrays import Device
from fp8kit.autograd import Tensor, tape, tensor
from fp8kit.autograd.call import RecordedCall
from fp8kit.bench.contest import row_of, within_time
from fp8kit.bench.problem import RECIPES, Problem, native_call, native_module
from fp8kit.bench.report import Row, Setting
from fp8kit.bench.sizes import Layer
from fp8kit.buffers import nbytes_of
from fp8kit.errors import Fp8kitError
from fp8kit.models.gpt import precision
from fp8kit.spec import Meta
from fp8kit.testing.contract import put

# ends of a kept tensor's name -> what it is; the first that fits
KINDS = {
    ("w_q", "w_qt"): "weight, FP8 copy",
    ("x_qt", "x_q"): "activation, FP8",
    ("_inv", "numbers", "scale"): "scales",
    ("mean", "rstd", "lse"): "statistics",
    ("weight", "weight0", "bias", "bias0"): "parameter",
}

COMPARED = ("bf16", "FP8 delayed")  # keys of RECIPES


# --- the most that is held ----------------------------------------------------------------------------------


class Peak:
    """The most that is held beyond what was held when this object was made: in CuPy's pool on a GPU, else
    what NumPy allocates."""

    def __init__(self, device: Device) -> None:
        gc.collect()
        self.device = device
        self.before = self._held()

    def _held(self) -> int:
        if self.device.kind != "cuda":
            return 0
        from fp8kit.backends.cuda.device import cupy

        return int(cupy().get_default_memory_pool().used_bytes())

    def bytes(self, step: Callable[[], object]) -> int:
        """Returns the most during ``step``. On the CPU what it allocates itself, without what was there
        before."""
        if self.device.kind == "cpu":
            return _traced(step)
        start = self._held()
        with pool_growth() as growth:
            step()
        arrays.synchronize(self.device)
        return start + growth[0] - self.before


def _traced(step: Callable[[], object]) -> int:
    """Returns the most that Python and NumPy allocate during ``step``."""
    running = tracemalloc.is_tracing()
    if not running:
        tracemalloc.start()
    try:
        start = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        step()
        return tracemalloc.get_traced_memory()[1] - start
    finally:
        if not running:
            tracemalloc.stop()


@contextmanager
def pool_growth() -> Iterator[list[int]]:
    """A list of one number: the most that CuPy's pool held within, less what it held at the beginning."""
    from fp8kit.backends.cuda.device import cupy

    most = [0]
    hook: Any = cupy().cuda.MemoryHook

    class Growth(hook):  # type: ignore[misc]
        name = "growth"
        held = 0

        def malloc_postprocess(self, **block: int) -> None:
            self.held += block["mem_size"]
            most[0] = max(most[0], self.held)

        def free_postprocess(self, **block: int) -> None:
            self.held -= block["mem_size"]

    with Growth():
        yield most


# --- the ledger ---------------------------------------------------------------------------------------------


class Kept(NamedTuple):
    """A tensor that backward reads: which ``operation`` keeps it under which ``name``. ``again``: the same
    memory was counted before, kept by an operation above."""

    operation: str
    name: str
    meta: Meta
    again: bool = False


def kept_tensors(y: Tensor) -> list[Kept]:
    """Returns what the operations behind ``y`` keep for backward, in the order in which they ran; nothing
    where its forward pass was not recorded."""
    found: list[Kept] = []
    seen: set[tuple[int, Meta]] = set()
    numbers: Counter[str] = Counter()
    for node in tape.nodes(y.edge()):
        call = getattr(node.backward, "__self__", None)
        if not isinstance(call, RecordedCall):
            continue
        numbers[node.name] += 1
        operation = f"{node.name} {numbers[node.name]}"
        found += (Kept(operation, name, meta) for name, meta in call.op.signature.saved.items())
        for (name, meta), view in zip(call.op.kept_metas.items(), call.kept, strict=True):
            found.append(Kept(operation, name, meta, (view.ptr, meta) in seen))
            seen.add((view.ptr, meta))
    return found


def kind_of(name: str) -> str:
    """Returns what a kept tensor of that name is."""
    return next((kind for ends, kind in KINDS.items() if name.endswith(ends)), "activation")


def ledger(layer: Layer, device: Device, recipe: str = "FP8 delayed") -> list[Row]:
    """Rows of what one layer, forward and backward under a key of ``RECIPES``, keeps: each tensor, sums by
    kind, parameters, the peak.

    ``case`` is "operation number: name"; ``mib`` what it takes, 0 for memory that an earlier row counts.
    Fp8kitError for an unknown recipe.
    """
    if recipe not in RECIPES:
        raise Fp8kitError("ledger", "recipe", repr(recipe), f"one of {', '.join(RECIPES)}")
    peak = Peak(device)
    problem = Problem("TransformerLayer", layer[:3], layer.sequence, layer.batch, device)
    module, x = native_module(problem), tensor(problem.x, requires_grad=True, device=device)
    step = native_call(module, x, put(problem.dy, device), RECIPES[recipe])
    with precision(RECIPES[recipe]):
        y = module(x)
    found = kept_tensors(y)
    y.backward(put(problem.dy, device))
    del y
    most = peak.bytes(step)
    title = f"kept for backward, {recipe}, hidden {layer.hidden}, {layer.tokens} tokens"
    rows = [
        row_of(
            title,
            f"{k.operation}: {k.name}",
            kind=kind_of(k.name),
            shape=list(k.meta.shape),
            dtype=k.meta.dtype.name,
            mib=0.0 if k.again else nbytes_of(k.meta) / 2**20,
            detail=f"{k.meta.dtype.name}{list(k.meta.shape)}{', counted above' if k.again else ''}",
        )
        for k in found
        if nbytes_of(k.meta) >= 1024 or k.again
    ]
    weights = sum(p.view.nbytes for p in module.parameters())
    others = {"parameters": weights, "parameters' gradients": weights, "peak of the step": most}
    sums = _sums(found) | others
    return [*rows, *(row_of(title, name, mib=size / 2**20) for name, size in sums.items())]


def _sums(found: Sequence[Kept]) -> dict[str, int]:
    """Bytes by kind, the largest first, and of all kinds but parameters."""
    kinds: Counter[str] = Counter()
    for kept in found:
        kind = kind_of(kept.name)
        if not kept.again and kind != "parameter":
            kinds[kind] += nbytes_of(kept.meta)
    sums = {f"sum: {kind}": size for kind, size in kinds.most_common()}
    return sums | {"sum: kept for backward, parameters aside": kinds.total()}


def memory_part(setting: Setting) -> list[Row]:
    """Returns the ledger of the largest layer in bfloat16 and FP8."""
    return within_time(
        setting,
        COMPARED,
        lambda recipe: ledger(setting.sizes.large, setting.device, recipe),
        lambda recipe: row_of(f"kept for backward, {recipe}", "all"),
    )
