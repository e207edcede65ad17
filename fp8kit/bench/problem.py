"""One module to time, as values on the host, so that every library gets the same; and the native frontend's
ways to run it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

import fp8kit
from fp8kit import arrays, formats, nn
from fp8kit.arrays import ArrayView, Device
from fp8kit.autocast import autocast
from fp8kit.autograd import tensor
from fp8kit.backends.dispatch import deterministic
from fp8kit.bench import random
from fp8kit.bench.report import Unavailable
from fp8kit.formats import DType
from fp8kit.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Recipe

HostArray = np.ndarray[Any, Any]
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

    ``layout``: "sbhd" or "bshd", the order of ``x`` and ``dy``, the gradient of the output. ``weights`` have
    fp8kit's names and Transformer Engine's. All are bfloat16 on the host.
    """

    kind: str
    sizes: tuple[int, ...]
    sequence: int
    batch: int
    device: Device
    seed: int = 0
    layout: str = "sbhd"

    @cached_property
    def weights(self) -> dict[str, HostArray]:
        """Norms' weights near 1, the rest normal. A matrix (out, in) has variance 1 / in: the branches are
        then about as large as the residual stream at every size, and the stream's rounding does not drown
        what they are compared by."""
        return random_weights(self.kind, self.sizes, self.seed)

    def data(self, seed: int, features: int) -> HostArray:
        """Random normal values of the input's leading dimensions."""
        leading = (self.sequence, self.batch) if self.layout == "sbhd" else (self.batch, self.sequence)
        return random.normal((*leading, features), seed, _ROUNDED)

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
        return {
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "fuse_qkv_params": True,
            "attn_input_format": self.layout,
        }

    def sampled(self, result: HostArray) -> HostArray:
        """Some tokens of a result (tokens, features), in float32: as many as are compared."""
        step = max(1, self.sequence * self.batch // SAMPLE)
        return result.reshape(-1, result.shape[-1])[::step].astype(np.float32)

    def branches(self, y: HostArray, dx: HostArray) -> Results:
        """Sampled y and dx, of a TransformerLayer without what its residual stream carries: that would hide
        the error."""
        y, dx = self.sampled(y), self.sampled(dx)
        return (
            (y - self.sampled(self.x), dx - self.sampled(self.dy))
            if self.kind == "TransformerLayer"
            else (y, dx)
        )


@functools.lru_cache(maxsize=1)
def random_weights(kind: str, sizes: tuple[int, ...], seed: int) -> dict[str, HostArray]:
    """See ``Problem.weights``. Kept for the next problem of the same sizes; not to be written."""
    found = {}
    for i, (name, shape) in enumerate(parameter_shapes(kind, sizes).items()):
        spread, mean = (
            (shape[1] ** -0.5, 0.0)
            if len(shape) == 2
            else (0.1, 1.0 if name.endswith("norm_weight") else 0.0)
        )
        found[name] = random.normal(shape, seed + i, _ROUNDED, spread, mean)
    return found


class Modules:
    """Modules that are used again for problems of the same sizes, by name; those of other sizes are let
    go."""

    def __init__(self) -> None:
        self._sizes: tuple[int, ...] = ()
        self._made: dict[str, Any] = {}

    def of(self, problem: Problem, name: str, make: Callable[[], Any]) -> Any:
        """The module of that name, made where there is none of these sizes."""
        if problem.sizes != self._sizes:
            self._made.clear()
            self._sizes = problem.sizes
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]


def parameter_shapes(kind: str, sizes: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Parameter name -> shape."""
    hidden, wide = sizes[:2]
    if kind == "Linear":
        return {"weight": (wide, hidden), "bias": (wide,)}
    mlp = {
        "layer_norm_weight": (hidden,),
        "layer_norm_bias": (hidden,),
        "fc1_weight": (wide, hidden),
        "fc1_bias": (wide,),
        "fc2_weight": (hidden, wide),
        "fc2_bias": (hidden,),
    }
    if kind == "LayerNormMLP":
        return dict(mlp)
    qkv, proj = "self_attention.layernorm_qkv", "self_attention.proj"
    return {
        f"{qkv}.layer_norm_weight": (hidden,),
        f"{qkv}.layer_norm_bias": (hidden,),
        f"{qkv}.weight": (3 * hidden, hidden),
        f"{qkv}.bias": (3 * hidden,),
        f"{proj}.weight": (hidden, hidden),
        f"{proj}.bias": (hidden,),
        **{f"layernorm_mlp.{name}": shape for name, shape in mlp.items()},
    }


@dataclass
class Running:
    """A contender, made: ``step`` is one forward and backward, the parameters' gradients written anew.
    ``results`` gives y and dx of the last step in the problem's layout, on the host; ``poison`` overwrites
    the memory that the next step's results are written to. ``keep``: what else lives as long as the
    contender."""

    step: Callable[[], Any]
    results: Callable[[], Results]
    poison: Callable[[], None]
    keep: Any = None


Contender = Callable[[Problem], Running]


def _leave(weight: HostArray) -> None:
    """An initialisation that draws nothing: the weights are loaded."""
    weight.fill(0)


def native_module(problem: Problem, dtype: DType = formats.bfloat16) -> nn.Module:
    """The native frontend's module with the problem's weights."""
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
    """fp8kit's own module and autograd; with ``graph`` its whole step captured once and replayed. Unavailable
    without ``fk.graph``.

    ``module``: one of the problem's, instead of a new one.
    """
    module = native_module(problem, dtype) if module is None else module
    leaf = tensor(_put(problem.x, problem.device, dtype), requires_grad=True)
    call = native_call(module, leaf, _put(problem.dy, problem.device, dtype), recipe)
    step = captured(call) if graph else call
    last: list[Any] = [None]

    def remembered() -> None:
        last[0] = None  # what the last step returned is free for this one
        last[0] = step()

    def results() -> Results:
        arrays.synchronize(problem.device)
        y, dx = (arrays.as_view(value).numpy() for value in last[0])
        return y, dx

    def poison() -> None:
        if not graph:  # a graph's results have their place
            last[0] = None
            for array in (problem.x, problem.dy):
                random.poison_free(problem.device, array.shape, dtype)

    return Running(remembered, results, poison, module)


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """``call`` by ``fk.graph``: run as it is at first, then captured, and replayed from then on. What it
    returns stays where the capture wrote it, and is not copied out. Unavailable where this fp8kit has no
    graphs."""
    graph = getattr(fp8kit, "graph", None)
    if graph is None:
        raise Unavailable("fk.graph is missing: this fp8kit captures no graphs")
    last: list[Any] = [None]

    def whole() -> None:
        last[0] = None
        last[0] = call()

    replayed = graph(whole)

    def step() -> Any:
        replayed()
        return last[0]

    return step


def _put(host: HostArray, device: Device, dtype: DType) -> ArrayView:
    return arrays.to(arrays.as_view(host.astype(dtype.numpy)), device)


def reference(problem: Problem) -> Results:
    """(y, dx) of the native module in float32, sampled and without the residual stream."""
    made = native(problem, None, formats.float32)
    made.step()
    return problem.branches(*made.results())


def bounds(case: str, kind: str) -> tuple[float, float]:
    """The largest relative errors of y and dx that a right result has: twice those of independent roundings.

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
    """The native frontend under ``fk.deterministic()``: what that costs."""
    with deterministic(True):
        made = native(problem, RECIPES["FP8 delayed"])

    def step() -> None:
        with deterministic(True):
            made.step()

    return replace(made, step=step)


def native_contenders(graph: bool = False) -> dict[str, Contender]:
    """The native frontend with each recipe; with ``graph`` also captured, in bfloat16 and FP8, and with the
    same bits every time."""
    found: dict[str, Contender] = {
        f"fp8kit native {name}": _native(recipe) for name, recipe in RECIPES.items()
    }
    if graph:
        found[SAME_BITS] = same_bits
        found |= {
            f"fp8kit native {name}, graph": _native(RECIPES[name], True) for name in ("bf16", "FP8 delayed")
        }
    return found


def _native(recipe: Recipe | None, graph: bool = False) -> Contender:
    return lambda problem: native(problem, recipe, graph=graph)


def errors(got: Results, exact: Results) -> dict[str, float]:
    """``error_y`` and ``error_dx``."""
    from fp8kit.testing import relative_error

    return {
        key: relative_error(*pair)
        for key, pair in zip(("error_y", "error_dx"), zip(got, exact, strict=True), strict=True)
    }


def verdict(case: str, kind: str, found: Mapping[str, float]) -> str:
    """ "ok", or by how much the errors are too large; NaN is."""
    limits = bounds(case, kind)
    if found["error_y"] < limits[0] and found["error_dx"] < limits[1]:
        return "ok"
    return (
        f"WRONG: errors {found['error_y']:.3f}, {found['error_dx']:.3f}, bounds {limits[0]:.3f}, "
        f"{limits[1]:.3f}"
    )
