"""One module to time, as values on the host, so that every library gets the same; and the native frontend's
ways to run it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np

from fp8kit import arrays, formats, graphs, nn
from fp8kit.arrays import ArrayView, Device, Shape
from fp8kit.autocast import autocast
from fp8kit.autograd import tensor
from fp8kit.backends.dispatch import deterministic
from fp8kit.bench import random
from fp8kit.bench.random import HostArray
from fp8kit.bench.report import Setting
from fp8kit.bench.sizes import Layer
from fp8kit.formats import DType
from fp8kit.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Recipe
from fp8kit.testing import relative_error
from fp8kit.testing.contract import put

Shapes = dict[str, Shape]
Results = tuple[HostArray, HostArray]
RECIPES: dict[str, Recipe | None] = {
    "bf16": None,
    "FP8 delayed": DelayedScaling(),
    "FP8 current": Float8CurrentScaling(),
    "FP8 block": Float8BlockScaling(),
}
SAME_BITS = "fp8kit native FP8 delayed, deterministic"
# the products that a gradient passes on its way through a module
PRODUCTS = {"Linear": 1, "LayerNormMLP": 2, "TransformerLayer": 4}
SAMPLE = 1024  # tokens whose results are compared
_ROUNDED = formats.bfloat16.numpy


@dataclass(frozen=True)
class Problem:
    """A module of ``kind`` and its ``sizes`` (of Linear in, out; LayerNormMLP hidden, ffn; TransformerLayer
    also heads) on (``sequence``, ``batch``, features) values.

    ``x`` and ``dy``, the gradient of the output, are of that order. ``weights`` have fp8kit's names and
    Transformer Engine's. All are bfloat16 on the host.
    """

    kind: str
    sizes: tuple[int, ...]
    sequence: int
    batch: int
    device: Device
    seed: int = 0

    @cached_property
    def weights(self) -> dict[str, HostArray]:
        """Norms' weights near 1, the rest normal. A matrix (out, in) has variance 1 / in: the branches are
        then about as large as the residual stream at every size, and the stream's rounding does not drown
        what they are compared by."""
        return random_weights(self.kind, self.sizes, self.seed)

    def data(self, seed: int, features: int) -> HostArray:
        """Random normal values of the input's leading dimensions."""
        return random.normal((self.sequence, self.batch, features), seed, _ROUNDED)

    @cached_property
    def x(self) -> HostArray:
        """The input."""
        return self.data(self.seed + 100, self.sizes[0])

    @cached_property
    def dy(self) -> HostArray:
        """The output's gradient."""
        return self.data(self.seed + 101, self.sizes[-1] if self.kind == "Linear" else self.sizes[0])

    @property
    def options(self) -> dict[str, Any]:
        """The constructor's keyword arguments beyond the sizes, in fp8kit and in Transformer Engine."""
        if self.kind != "TransformerLayer":
            return {}
        return {"hidden_dropout": 0.0, "attention_dropout": 0.0, "fuse_qkv_params": True}

    def sampled(self, result: HostArray) -> HostArray:
        """Some tokens of a result (tokens, features), in float32: as many as are compared."""
        step = max(1, self.sequence * self.batch // SAMPLE)
        return result.reshape(-1, result.shape[-1])[::step].astype(np.float32)

    def branches(self, y: HostArray, dx: HostArray) -> Results:
        """Sampled y and dx, of a TransformerLayer without what its residual stream carries: that would hide
        the error."""
        y, dx = self.sampled(y), self.sampled(dx)
        if self.kind != "TransformerLayer":
            return y, dx
        return y - self.sampled(self.x), dx - self.sampled(self.dy)


def layer_problem(layer: Layer, setting: Setting, kind: str = "TransformerLayer") -> Problem:
    """Returns the layer itself, or a module of its sizes, on a run's device and from its seed."""
    sizes = layer[:3] if kind == "TransformerLayer" else layer[:2]
    return Problem(kind, sizes, layer.sequence, layer.batch, setting.device, setting.seed)


@lru_cache(maxsize=1)
def random_weights(kind: str, sizes: tuple[int, ...], seed: int) -> dict[str, HostArray]:
    """See ``Problem.weights``. Kept for the next problem of the same sizes; not to be written."""
    found = {}
    for i, (name, shape) in enumerate(parameter_shapes(kind, sizes).items()):
        spread, mean = shape[1] ** -0.5 if len(shape) == 2 else 0.1, float(name.endswith("norm_weight"))
        found[name] = random.normal(shape, seed + i, _ROUNDED, spread, mean)
    return found


class Modules:
    """Modules that are used again for problems of the same sizes, by name; those of other sizes are let
    go."""

    def __init__(self) -> None:
        self._sizes: tuple[int, ...] = ()
        self._made: dict[str, Any] = {}

    def of(self, problem: Problem, name: str, make: Callable[[], Any]) -> Any:
        """Returns the module of that name, made where there is none of these sizes."""
        if problem.sizes != self._sizes:
            self._made.clear()
            self._sizes = problem.sizes
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]


def parameter_shapes(kind: str, sizes: tuple[int, ...]) -> Shapes:
    """Parameter name -> shape."""
    hidden, wide = sizes[:2]
    if kind == "Linear":
        return {"weight": (wide, hidden), "bias": (wide,)}
    norm: Shapes = {"layer_norm_weight": (hidden,), "layer_norm_bias": (hidden,)}
    mlp = norm | {
        "fc1_weight": (wide, hidden),
        "fc1_bias": (wide,),
        "fc2_weight": (hidden, wide),
        "fc2_bias": (hidden,),
    }
    if kind == "LayerNormMLP":
        return mlp
    modules = {
        "self_attention.layernorm_qkv": norm | {"weight": (3 * hidden, hidden), "bias": (3 * hidden,)},
        "self_attention.proj": {"weight": (hidden, hidden), "bias": (hidden,)},
        "layernorm_mlp": mlp,
    }
    return {f"{path}.{name}": shape for path, own in modules.items() for name, shape in own.items()}


@dataclass
class Running:
    """A contender, made: ``step`` is one forward and backward, the parameters' gradients written anew.
    ``results`` gives y and dx of the last step in the problem's order, on the host; ``poison`` overwrites
    the memory that the next step's results are written to. ``keep``: what else lives as long as the
    contender."""

    step: Callable[[], Any]
    results: Callable[[], Results]
    poison: Callable[[], None]
    keep: Any = None

    def branches(self, problem: Problem, steps: int) -> Results:
        """``Problem.branches`` of one step after ``steps`` others, its results' memory poisoned before."""
        for _ in range(steps):
            self.step()
        self.poison()
        self.step()
        return problem.branches(*self.results())


Contender = Callable[[Problem], Running]


def _leave(weight: HostArray) -> None:
    """An initialisation that draws nothing: the weights are loaded."""
    weight.fill(0)


def native_module(problem: Problem, dtype: DType = formats.bfloat16) -> nn.Module:
    """Returns the native frontend's module with the problem's weights."""
    inits: dict[str, Any] = {"init_method": _leave}
    if problem.kind != "Linear":
        inits["output_layer_init_method"] = _leave
    module: nn.Module = getattr(nn, problem.kind)(
        *problem.sizes, params_dtype=dtype, device=problem.device, **inits, **problem.options
    )
    module.load_state_dict({name: w.astype(dtype.numpy, copy=False) for name, w in problem.weights.items()})
    return module


def native_call(
    module: nn.Module, leaf: Any, upstream: ArrayView, recipe: Recipe | None
) -> Callable[[], tuple[Any, Any]]:
    """One forward and backward of a native module: (y, the input's gradient)."""
    enabled = recipe is not None

    def call() -> tuple[Any, Any]:
        leaf.grad = None
        module.zero_grad()
        with autocast(enabled=enabled, recipe=recipe):
            y = module(leaf)
        y.backward(upstream)
        return y, leaf.grad

    return call


def native(
    problem: Problem,
    recipe: Recipe | None,
    dtype: DType = formats.bfloat16,
    graph: bool = False,
    module: nn.Module | None = None,
) -> Running:
    """fp8kit's own module and autograd; with ``graph`` its whole step by ``fk.graph``: run as it is at first,
    then captured, and replayed from then on.

    ``module``: one of the problem's, instead of a new one.
    """
    module = native_module(problem, dtype) if module is None else module
    x, dy = (put(host.astype(dtype.numpy), problem.device) for host in (problem.x, problem.dy))
    call = native_call(module, tensor(x, requires_grad=True), dy, recipe)
    last: list[Any] = [None]

    def step() -> None:
        last[0] = None  # what the last step returned is free for this one
        last[0] = call()  # a graph's stays where the capture wrote it, and is not copied out

    def results() -> Results:
        arrays.synchronize(problem.device)
        y, dx = (arrays.as_view(value).numpy() for value in last[0])
        return y, dx

    def poison() -> None:
        if not graph:  # a graph's results have their place
            last[0] = None
            for array in (problem.x, problem.dy):
                random.poison_free(problem.device, array.shape, dtype)

    return Running(graphs.graph(step) if graph else step, results, poison, module)


def reference(problem: Problem) -> Results:
    """(y, dx) of the native module in float32, sampled and without the residual stream."""
    made = native(problem, None, formats.float32)
    made.step()
    return problem.branches(*made.results())


def bounds(case: str, kind: str) -> tuple[float, float]:
    """Returns the largest relative errors of y and dx that a right result has: twice those of independent
    roundings.

    One FP8 product of normal data has the errors that the part ``error`` finds: 0.0376 of two E4M3 operands,
    0.0592 of an E5M2 gradient and an E4M3 weight. The errors of n products in a row add as their squares do;
    dx passes n forward and n backward. bfloat16 rounds by 2**-9 at most, and a module does so a few times at
    each product.
    """
    n = PRODUCTS[kind]
    if "FP8" not in case:
        return 2**-7 * n**0.5, 2**-7 * (2 * n) ** 0.5
    forward, backward = 0.0376, 0.0592
    return 2 * n**0.5 * forward, 2 * (n * (forward**2 + backward**2)) ** 0.5


def same_bits(problem: Problem) -> Running:
    """Returns the native frontend under ``fk.deterministic()``: what that costs."""
    with deterministic(True):
        made = native(problem, RECIPES["FP8 delayed"])

    def step() -> None:
        with deterministic(True):
            made.step()

    return replace(made, step=step)


def native_contenders(graph: bool) -> dict[str, Contender]:
    """Returns the native frontend with each recipe; with ``graph`` also captured, in bfloat16 and FP8, and
    with the same bits every time."""
    found: dict[str, Contender] = {
        f"fp8kit native {name}": partial(native, recipe=recipe) for name, recipe in RECIPES.items()
    }
    if graph:
        found[SAME_BITS] = same_bits
        for name in ("bf16", "FP8 delayed"):
            found[f"fp8kit native {name}, graph"] = partial(native, recipe=RECIPES[name], graph=True)
    return found


def errors(got: Results, exact: Results) -> dict[str, float]:
    """``error_y`` and ``error_dx``."""
    y, dx = (relative_error(*pair) for pair in zip(got, exact, strict=True))
    return {"error_y": y, "error_dx": dx}


def verdict(case: str, kind: str, found: Mapping[str, float]) -> str:
    """ "ok", or by how much the errors are too large; NaN is."""
    y, dx, (y_bound, dx_bound) = found["error_y"], found["error_dx"], bounds(case, kind)
    if y < y_bound and dx < dx_bound:
        return "ok"
    return f"WRONG: errors {y:.3f}, {dx:.3f}, bounds {y_bound:.3f}, {dx_bound:.3f}"
