"""Where a step's memory goes: the most that is held at once, and every tensor that forward keeps for
backward."""

from __future__ import annotations

import gc
import math
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fp8kit import arrays
from fp8kit.arrays import Device
from fp8kit.autocast import autocast
from fp8kit.autograd import tensor
from fp8kit.bench.problem import RECIPES, Problem, native_module
from fp8kit.bench.report import NO_TIME, Row, Setting
from fp8kit.bench.sizes import Layer
from fp8kit.errors import Fp8kitError
from fp8kit.spec import Operation, Plan, Views, WorkingSet

# end of a kept tensor's name -> what it is; the first that fits
KINDS = (
    ("w_q", "weight, FP8 copy"),
    ("w_qt", "weight, FP8 copy"),
    ("x_qt", "activation, FP8"),
    ("x_q", "activation, FP8"),
    ("_inv", "scales"),
    ("mean", "statistics"),
    ("rstd", "statistics"),
    ("lse", "statistics"),
    ("numbers", "scales"),
    ("scale", "scales"),
    ("weight", "parameter"),
    ("weight0", "parameter"),
    ("bias", "parameter"),
    ("bias0", "parameter"),
)


# --- the most that is held ----------------------------------------------------------------------------------


class Peak:
    """The most that is held beyond what was held when this object was made: in CuPy's pool on a GPU, else
    what NumPy allocates."""

    def __init__(self, device: Device) -> None:
        gc.collect()
        self.device = device
        self.before = self._held()

    def _held(self) -> int:
        return int(self._pool().used_bytes()) if self.device.kind == "cuda" else 0

    @staticmethod
    def _pool() -> Any:
        from fp8kit.backends.cuda.device import cupy

        return cupy().get_default_memory_pool()

    def bytes(self, step: Callable[[], object]) -> int:
        """The most during ``step``. On the CPU what it allocates itself, without what was there before."""
        if self.device.kind == "cpu":
            return _traced(step)
        start = self._held()
        with pool_growth() as growth:
            step()
        arrays.synchronize(self.device)
        return start + growth[0] - self.before


def _traced(step: Callable[[], object]) -> int:
    """The most that Python and NumPy allocate during ``step``."""
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


@dataclass(frozen=True)
class Kept:
    """A tensor that backward reads: which ``operation`` keeps it under which ``name``, and what it is.
    ``again``: the same memory was counted before, kept by an operation above."""

    operation: str
    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    again: bool = False


@contextmanager
def kept_tensors() -> Iterator[list[Kept]]:
    """What the operations that run within keep for backward, by the saved lists of their plans: a list that
    fills up."""
    found: list[Kept] = []
    spans: set[tuple[int, int]] = set()
    owners: list[Any] = []  # what has been seen lives on, so that no address is counted for two tensors
    numbers: dict[str, int] = {}
    classes = [kind for kind in _every(Operation) if "forward" in vars(kind)]

    def note(operation: str, plan: Plan, inputs: Views, outputs: Views, saved: Views) -> None:
        numbers[operation] = number = numbers.get(operation, 0) + 1
        signature = plan.signature
        if not (signature.grads or signature.grad_passes):
            return
        for name in (*signature.saved, *signature.kept):
            view = saved.get(name) or inputs.get(name) or outputs.get(name)
            if view is None:
                continue
            span = (view.ptr, view.nbytes)
            found.append(
                Kept(
                    f"{operation} {number}",
                    name,
                    kind_of(name),
                    view.shape,
                    view.dtype.name,
                    view.nbytes,
                    span in spans,
                )
            )
            spans.add(span)
            owners.append(view)

    def watched(forward: Callable[..., None]) -> Callable[..., None]:
        def call(self: Operation, plan: Plan, ws: WorkingSet) -> None:
            forward(self, plan, ws)
            note(self.name, plan, ws.inputs, ws.outputs, ws.saved)

        return call

    before = {kind: vars(kind)["forward"] for kind in classes}
    for kind, forward in before.items():
        kind.forward = watched(forward)  # type: ignore[method-assign]
    try:
        yield found
    finally:
        for kind, forward in before.items():
            kind.forward = forward  # type: ignore[method-assign]


def _every(base: type[Operation]) -> Iterator[type[Operation]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _every(kind)


def kind_of(name: str) -> str:
    """What a kept tensor of that name is."""
    return next((kind for end, kind in KINDS if name.endswith(end)), "activation")


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
    module, rule = native_module(problem), RECIPES[recipe]
    x, dy = (arrays.to(arrays.as_view(host), device) for host in (problem.x, problem.dy))
    leaf = tensor(x, requires_grad=True)
    found: list[Kept] = []

    def step(watch: bool = False) -> None:
        leaf.grad = None
        module.zero_grad()
        with autocast(enabled=rule is not None, recipe=rule):
            if watch:
                with kept_tensors() as kept:
                    y = module(leaf)
                found.extend(kept)
            else:
                y = module(leaf)
        y.backward(dy)

    step(watch=True)
    if not found:
        raise Fp8kitError("ledger", "operations", "none that was seen", "the layer's")
    most = peak.bytes(step)
    title = f"kept for backward, {recipe}, hidden {layer.hidden}, {layer.tokens} tokens"
    rows: list[Row] = [
        {
            "workload": title,
            "case": f"{k.operation}: {k.name}",
            "status": "ok",
            "kind": k.kind,
            "shape": list(k.shape),
            "dtype": k.dtype,
            "mib": 0.0 if k.again else k.nbytes / 2**20,
            "detail": f"{k.dtype}{list(k.shape)}{', counted above' if k.again else ''}",
        }
        for k in found
        if k.nbytes >= 1024 or k.again
    ]
    return [*rows, *_sums(found, module.parameters(), most, title)]


def _sums(found: Sequence[Kept], parameters: Any, most: int, title: str) -> list[Row]:
    """Sums by kind, and what else there is."""
    kinds: dict[str, int] = {}
    for kept in found:
        if not kept.again:
            kinds[kept.kind] = kinds.get(kept.kind, 0) + kept.nbytes
    weights = sum(math.prod(p.shape) * p.dtype.itemsize for p in parameters)
    lines = {
        **{
            f"sum: {kind}": size
            for kind, size in sorted(kinds.items(), key=lambda pair: -pair[1])
            if kind != "parameter"
        },
        "sum: kept for backward, parameters aside": sum(
            size for kind, size in kinds.items() if kind != "parameter"
        ),
        "parameters": weights,
        "parameters' gradients": weights,
        "peak of the step": most,
    }
    return [
        {"workload": title, "case": name, "status": "ok", "mib": size / 2**20} for name, size in lines.items()
    ]


def memory_part(setting: Setting) -> list[Row]:
    """The ledger of the largest layer in bfloat16 and FP8."""
    rows: list[Row] = []
    for recipe in ("bf16", "FP8 delayed"):
        left_out: list[Row] = [{"workload": f"kept for backward, {recipe}", "case": "all", "status": NO_TIME}]
        rows += ledger(setting.sizes.large, setting.device, recipe) if setting.left() > 0 else left_out
    return rows
