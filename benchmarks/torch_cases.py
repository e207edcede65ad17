"""The cases of the PyTorch benchmark: the same module with the same weights and data, by fp8kit's doors and by what stands beside them.

A case is a function that takes a ``Problem`` and returns a ``Step``: forward and backward once, the parameters' gradients written anew.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import fp8kit_torch as ft
import ml_dtypes
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fp8kit as fk
from benchmarks.torch_plain import plain, random_weights
from fp8kit import arrays, nn
from fp8kit.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Recipe

Scope = Callable[[], AbstractContextManager[Any]]
RECIPES: dict[str, Recipe | None] = {
    "bf16": None, "FP8 delayed": DelayedScaling(), "FP8 current": Float8CurrentScaling(), "FP8 block": Float8BlockScaling(),
}  # fmt: skip
EAGER = "torch eager bf16"
# the products that a gradient passes on its way through a module
PRODUCTS = {"Linear": 1, "LayerNormMLP": 2, "TransformerLayer": 4}
# name of a distribution -> names under which it is published
PEERS = {"transformer_engine": ("transformer-engine", "transformer_engine", "transformer_engine_torch"), "torchao": ("torchao",)}


@dataclass(frozen=True)
class Problem:
    """One module to time: ``kind`` and its ``sizes`` (of Linear in, out; LayerNormMLP hidden, ffn; TransformerLayer also heads).

    ``weights`` have fp8kit's names; ``x`` and ``dy``, the gradient of the output, are (batch, sequence, features). All are bfloat16.
    ``layout``: "sbhd" or "bshd", what fp8kit and Transformer Engine get, and ``arranged`` is (x, dy) in it; the plain modules get batch
    first. ``backend``: torch.compile's.
    """

    kind: str
    sizes: tuple[int, ...]
    weights: dict[str, Tensor]
    x: Tensor
    dy: Tensor
    arranged: tuple[Tensor, Tensor]
    layout: str
    backend: str

    @property
    def device(self) -> torch.device:
        """Where everything is."""
        return self.x.device

    def restored(self, tensor: Tensor) -> Tensor:
        """A result in ``layout``, batch first."""
        return tensor if self.layout == "bshd" else tensor.transpose(0, 1)


@dataclass
class Step:
    """Callable: one forward and backward. ``results`` makes of its return (y, dx), batch first, without history."""

    call: Callable[[], tuple[Any, Any]]
    results: Callable[[Any, Any], tuple[Tensor, Tensor]]

    def __call__(self) -> tuple[Any, Any]:
        return self.call()


class Unavailable(Exception):
    """A case that cannot run here; the message says why."""


def make_problem(kind: str, sizes: tuple[int, ...], batch: int, sequence: int, layout: str, backend: str, device: torch.device,
            seed: int) -> Problem:
    """A ``Problem`` with random weights and data, drawn from ``seed``."""
    generator = torch.Generator(device).manual_seed(seed)
    weights = random_weights(kind, sizes, device, generator)
    outward = sizes[-1] if kind == "Linear" else sizes[0]
    x, dy = (torch.randn(batch, sequence, n, generator=generator, device=device).bfloat16() for n in (sizes[0], outward))
    arranged = (x, dy) if layout == "bshd" else (x.transpose(0, 1).contiguous(), dy.transpose(0, 1).contiguous())
    return Problem(kind, sizes, weights, x, dy, arranged, layout, backend)


def _torch_step(module: Callable[..., Tensor], parameters: list[torch.nn.Parameter], x: Tensor, dy: Tensor, scope: Scope,
                restored: Callable[[Tensor], Tensor]) -> Step:
    leaf = x.detach().requires_grad_()

    def call() -> tuple[Tensor, Tensor | None]:
        leaf.grad = None
        for parameter in parameters:
            parameter.grad = None
        with scope():
            y = module(leaf)
        y.backward(dy)
        return y, leaf.grad

    return Step(call, lambda y, dx: (restored(y.detach()), restored(dx)))


# --- torch itself -----------------------------------------------------------------------------------------------------


def eager(problem: Problem, scope: Scope = nullcontext) -> Step:
    """The plain module."""
    module = plain(problem.kind, problem.sizes, problem.weights, torch.bfloat16)
    return _torch_step(module, list(module.parameters()), problem.x, problem.dy, scope, lambda t: t)


def cudnn_attention(problem: Problem) -> Step:
    """The plain module, its attention by cuDNN."""
    return eager(problem, lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION))


def compiled(problem: Problem) -> Step:
    """The plain module under torch.compile, default mode."""
    module = plain(problem.kind, problem.sizes, problem.weights, torch.bfloat16)
    made = torch.compile(module, backend=problem.backend, dynamic=False)
    return _torch_step(made, list(module.parameters()), problem.x, problem.dy, nullcontext, lambda t: t)


# --- fp8kit -----------------------------------------------------------------------------------------------------------


def options(problem: Problem) -> dict[str, Any]:
    """The constructor's keyword arguments beyond the sizes, in fp8kit and in Transformer Engine."""
    if problem.kind != "TransformerLayer":
        return {}
    return {"hidden_dropout": 0.0, "attention_dropout": 0.0, "fuse_qkv_params": True, "attn_input_format": problem.layout}


def door(library: Any, problem: Problem, scope: Scope) -> Step:
    """A module of ``library``, a module of Transformer Engine's names: ``fp8kit_torch``, or Transformer Engine."""
    module = getattr(library, problem.kind)(*problem.sizes, params_dtype=torch.bfloat16, device=problem.device, **options(problem))
    found = module.load_state_dict(problem.weights, strict=False)
    wrong = [*found.unexpected_keys, *(key for key in found.missing_keys if not key.endswith("_extra_state"))]
    if wrong:
        raise Unavailable(f"parameters of other names: {', '.join(wrong)}")
    return _torch_step(module, list(module.parameters()), *problem.arranged, scope, problem.restored)


def fp8kit_torch(problem: Problem, recipe: Recipe | None) -> Step:
    """This project's PyTorch module."""
    return door(ft, problem, nullcontext if recipe is None else lambda: ft.autocast(recipe=recipe))


def native(problem: Problem, recipe: Recipe | None) -> Step:
    """fp8kit's own module and autograd, without torch."""
    where = ft.as_view(problem.x).device
    module = getattr(nn, problem.kind)(*problem.sizes, params_dtype=fk.bfloat16, device=where, **options(problem))
    module.load_state_dict({name: w.view(torch.int16).cpu().numpy().view(ml_dtypes.bfloat16) for name, w in problem.weights.items()})
    x, dy = problem.arranged
    leaf, upstream = fk.tensor(ft.as_view(x), requires_grad=True), ft.as_view(dy)
    enabled = recipe is not None

    def call() -> tuple[fk.Tensor, arrays.ArrayView | None]:
        leaf.grad = None
        module.zero_grad()
        with fk.autocast(enabled=enabled, recipe=recipe):
            y = module(leaf)
        y.backward(upstream)
        return y, leaf.grad

    def results(y: fk.Tensor, dx: arrays.ArrayView) -> tuple[Tensor, Tensor]:
        return problem.restored(torch.from_dlpack(y.view)), problem.restored(torch.from_dlpack(dx))

    return Step(call, results)


# --- others, where they are installed ---------------------------------------------------------------------------------


def version_of(peer: str) -> str:
    """The installed version of a key of ``PEERS``, or "not installed"."""
    for name in PEERS[peer]:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "not installed"


def _want(peer: str) -> None:
    if version_of(peer) == "not installed":
        raise Unavailable("not installed")


def transformer_engine(problem: Problem, recipe: str) -> Step:
    """Transformer Engine's module; ``recipe``: the class of that name in its recipes, "" for none."""
    _want("transformer_engine")
    te = importlib.import_module("transformer_engine.pytorch")
    if not recipe:
        return door(te, problem, nullcontext)
    made = getattr(importlib.import_module("transformer_engine.common.recipe"), recipe)()
    if hasattr(te, "autocast"):
        return door(te, problem, lambda: te.autocast(enabled=True, recipe=made))
    return door(te, problem, lambda: te.fp8_autocast(enabled=True, fp8_recipe=made))


def torchao(problem: Problem) -> Step:
    """The plain module with torchao's FP8 products, scaled by tensor at each call, under torch.compile as torchao wants it."""
    _want("torchao")
    float8 = importlib.import_module("torchao.float8")
    module = plain(problem.kind, problem.sizes, problem.weights, torch.bfloat16)
    module = float8.convert_to_float8_training(module, config=float8.Float8LinearConfig.from_recipe_name("tensorwise"))
    made = torch.compile(module, backend=problem.backend, dynamic=False)
    return _torch_step(made, list(module.parameters()), problem.x, problem.dy, nullcontext, lambda t: t)


def cases(problem: Problem, compile_plain: bool) -> dict[str, Callable[[Problem], Step]]:
    """Name -> case, the one that others are compared with first. ``compile_plain``: also what needs torch.compile."""
    found: dict[str, Callable[[Problem], Step]] = {EAGER: eager}
    if problem.kind == "TransformerLayer" and problem.device.type == "cuda":
        found["torch eager bf16, cuDNN attention"] = cudnn_attention
    if compile_plain:
        found["torch.compile bf16"] = compiled
    for name, recipe in RECIPES.items():
        found[f"fp8kit_torch {name}"] = lambda p, recipe=recipe: fp8kit_torch(p, recipe)
    for name in ("bf16", "FP8 delayed"):
        found[f"fp8kit native {name}"] = lambda p, recipe=RECIPES[name]: native(p, recipe)
    for name, own in RECIPES.items():
        te_recipe = "" if own is None else type(own).__name__
        found[f"Transformer Engine {name}"] = lambda p, recipe=te_recipe: transformer_engine(p, recipe)
    if compile_plain:
        found["torchao FP8 tensorwise, torch.compile"] = torchao
    return found


def bounds(case: str, kind: str) -> tuple[float, float]:
    """The largest relative errors of y and dx that a right result has: twice those of independent roundings.

    One FP8 product of normal data has the errors that ``benchmarks.linear_error`` finds: 0.0376 of two E4M3 operands, 0.0592 of an E5M2
    gradient and an E4M3 weight. The errors of n products in a row add as their squares do; dx passes n forward and n backward. bfloat16
    rounds by 2**-9 at most, and a module does so a few times at each product.
    """
    n = PRODUCTS[kind]
    if "FP8" not in case:
        return 2**-7 * n**0.5, 2**-7 * (2 * n) ** 0.5
    forward, backward = 0.0376, 0.0592
    return 2 * n**0.5 * forward, 2 * (n * (forward**2 + backward**2)) ** 0.5
