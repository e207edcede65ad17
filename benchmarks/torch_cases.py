"""The contenders of the PyTorch benchmarks: one module, the same weights and data, by fp8kit's frontends and
by what stands beside them."""

from __future__ import annotations

import gc
import importlib
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import Any

import fp8kit_torch as ft
import numpy as np
import torch
from fp8kit_torch.graphs import uncollected
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.targets import CALLABLES, COMPILED, CUDNN, EAGER, GRAPH, MISSING
from benchmarks.torch_plain import plain
from fp8kit.arrays import Device
from fp8kit.backends.policy import SelectionPolicy, get_policy, policy_context
from fp8kit.backends.registry import Kind, OpImpl
from fp8kit.bench.breakeven import native_kept
from fp8kit.bench.memory import Peak, pool_growth
from fp8kit.bench.problem import (
    RECIPES,
    SAME_BITS,
    Contender,
    Modules,
    Problem,
    Results,
    Running,
    native,
    same_bits,
)
from fp8kit.bench.report import Unavailable
from fp8kit.bench.sizes import SIZES
from fp8kit.recipe import Recipe

Scope = Callable[[], AbstractContextManager[Any]]
# of the parts' workloads: the largest layers, and those that are captured too
LARGEST = {next(iter(sizes.layers)) for sizes in SIZES.values()}
GRAPHED = {name for sizes in SIZES.values() for name in list(sizes.layers)[2:]}
# name of a distribution -> names under which it is published
PEERS = {
    "transformer_engine": ("transformer-engine", "transformer_engine", "transformer_engine_torch"),
    "torchao": ("torchao",),
}


def where(problem: Problem) -> torch.device:
    """The problem's device as torch has it."""
    return (
        torch.device(problem.device.kind, problem.device.index)
        if problem.device.kind == "cuda"
        else torch.device("cpu")
    )


def put(host: Any, device: torch.device) -> Tensor:
    """A host array of bfloat16 or float32 as a tensor."""
    if host.dtype == np.float32:
        return torch.from_numpy(host).to(device)
    return torch.from_numpy(host.view(np.int16)).to(device).view(torch.bfloat16)


def weights(problem: Problem) -> dict[str, Tensor]:
    """The problem's weights."""
    return {name: put(w, where(problem)) for name, w in problem.weights.items()}


def running(
    problem: Problem,
    module: Callable[..., Tensor],
    parameters: list[torch.nn.Parameter],
    scope: Scope = nullcontext,
    batch_first: bool = False,
    captured: bool = False,
    keep: Any = None,
) -> Running:
    """A torch module as a contender. ``batch_first``: it takes (batch, sequence, features). ``captured``: the
    whole step is a CUDA graph."""
    x, dy = (put(host, where(problem)) for host in (problem.x, problem.dy))
    if batch_first:
        x, dy = x.transpose(0, 1).contiguous(), dy.transpose(0, 1).contiguous()
    leaf = x.detach().requires_grad_()
    last: list[Any] = [None]

    def call() -> tuple[Tensor, Tensor | None]:
        leaf.grad = None
        for parameter in parameters:
            parameter.grad = None
        with scope():
            y = module(leaf)
        y.backward(dy)
        return y.detach(), leaf.grad

    step = _graph(call) if captured else call

    def remembered() -> None:
        last[0] = None
        last[0] = step()

    def results() -> Results:
        restored = (t.transpose(0, 1) if batch_first else t for t in last[0])
        y, dx = (t.float().cpu().numpy() for t in restored)
        return y, dx

    def poison() -> None:
        if not captured:  # a graph's results have their place
            last[0] = None
            taken = [torch.full_like(t, float("nan")) for t in (x, dy) for _ in range(4)]
            del taken

    return Running(remembered, results, poison, (module, keep))


def _graph(call: Callable[[], Any]) -> Callable[[], Any]:
    """A call captured as a CUDA graph after three warm-ups on a stream of their own; its replay gives the
    same tensors, written anew."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream")
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with uncollected(), torch.cuda.graph(graph):
            out = call()

    def replay() -> Any:
        graph.replay()
        return out

    return replay


# --- torch itself -------------------------------------------------------------------------------------------


def plain_module(problem: Problem) -> torch.nn.Module:
    """torch's own module with the problem's weights."""
    return plain(problem.kind, problem.sizes, weights(problem), torch.bfloat16)


def eager(
    problem: Problem,
    scope: Scope = nullcontext,
    captured: bool = False,
    module: torch.nn.Module | None = None,
) -> Running:
    """The plain module, ``module`` where one is there already."""
    module = plain_module(problem) if module is None else module
    return running(problem, module, list(module.parameters()), scope, True, captured)


def cudnn_attention(problem: Problem) -> Running:
    """The plain module, its attention by cuDNN."""
    return eager(problem, lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION))


def compiled(problem: Problem) -> Running:
    """The plain module under torch.compile, default mode; on the CPU without its code generator."""
    module = plain_module(problem)
    made = torch.compile(module, backend=backend(problem), dynamic=False)
    return running(problem, made, list(module.parameters()), batch_first=True)


def backend(problem: Problem) -> str:
    """torch.compile's."""
    return "inductor" if problem.device.kind == "cuda" else "aot_eager"


def reference(problem: Problem) -> Results:
    """(y, dx) of the plain module in float32."""
    module = plain(problem.kind, problem.sizes, weights(problem), torch.float32)
    wide = [put(host, where(problem)).float() for host in (problem.x, problem.dy)]
    x, dy = (t.transpose(0, 1).contiguous() for t in wide)
    leaf = x.requires_grad_()
    y = module(leaf)
    y.backward(dy)
    assert leaf.grad is not None
    return problem.branches(*(t.transpose(0, 1).cpu().numpy() for t in (y.detach(), leaf.grad)))


# --- fp8kit -------------------------------------------------------------------------------------------------


def frontend(
    library: Any,
    problem: Problem,
    scope: Scope,
    prepare: Callable[[Any, Tensor], Any] = lambda module, x: module,
    captured: bool = False,
) -> Running:
    """A module of ``library``, a module of Transformer Engine's names: ``fp8kit_torch``, or Transformer
    Engine."""
    module = getattr(library, problem.kind)(
        *problem.sizes, params_dtype=torch.bfloat16, device=where(problem), **problem.options
    )
    found = module.load_state_dict(weights(problem), strict=False)
    wrong = [*found.unexpected_keys, *(key for key in found.missing_keys if not key.endswith("_extra_state"))]
    if wrong:
        raise Unavailable(f"parameters of other names: {', '.join(wrong)}")
    made = prepare(module, put(problem.x, where(problem)))
    return running(problem, made, list(module.parameters()), scope, captured=captured, keep=module)


def without_cudnn() -> SelectionPolicy:
    """The policy in force, with attention by fp8kit's own kernels on GPUs, as where cuDNN is missing."""
    from fp8kit.backends.cuda import attention

    def impl(name: str) -> OpImpl:
        own = partial(getattr(attention, name), library=False)
        return OpImpl(name, f"cuda.own_{name}", Kind.VENDOR, own, vendor="cuda", devices=frozenset({"cuda"}))

    names = "attention_fwd", "attention_bwd", "attention_workspace"
    return replace(get_policy(), overrides=tuple((name, impl(name)) for name in names))


def fp8kit_torch(
    problem: Problem, recipe: Recipe | None, graph: str = "", policy: SelectionPolicy | None = None
) -> Running:
    """This project's PyTorch module; ``graph``: "step", the whole step is a CUDA graph; "callables", forward
    and backward are replayed by ``make_graphed_callables``. ``policy``: of the whole step."""

    def prepare(module: Any, x: Tensor) -> Any:
        if graph != "callables":
            return module
        return ft.make_graphed_callables(
            module, (x.requires_grad_(),), enabled=recipe is not None, recipe=recipe
        )

    scope: Scope = nullcontext if recipe is None else lambda: ft.autocast(recipe=recipe)
    made = frontend(ft, problem, scope, prepare, graph == "step")
    if policy is None:
        return made

    def step() -> None:
        with policy_context(policy):
            made.step()

    return replace(made, step=step)


# --- others, where they are installed -----------------------------------------------------------------------


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


def transformer_engine(problem: Problem, recipe: str) -> Running:
    """Transformer Engine's module; ``recipe``: the class of that name in its recipes, "" for none."""
    _want("transformer_engine")
    te = importlib.import_module("transformer_engine.pytorch")
    if not recipe:
        return frontend(te, problem, nullcontext)
    made = getattr(importlib.import_module("transformer_engine.common.recipe"), recipe)()
    if hasattr(te, "autocast"):
        return frontend(te, problem, lambda: te.autocast(enabled=True, recipe=made))
    return frontend(te, problem, lambda: te.fp8_autocast(enabled=True, fp8_recipe=made))


def torchao(problem: Problem) -> Running:
    """The plain module with torchao's FP8 products, scaled by tensor at each call, under torch.compile as
    torchao wants it."""
    _want("torchao")
    float8 = importlib.import_module("torchao.float8")
    module = float8.convert_to_float8_training(
        plain_module(problem), config=float8.Float8LinearConfig.from_recipe_name("tensorwise")
    )
    made = torch.compile(module, backend=backend(problem), dynamic=False)
    return running(problem, made, list(module.parameters()), batch_first=True)


# --- who takes part -----------------------------------------------------------------------------------------


def contenders(problem: Problem, workload: str) -> Mapping[str, Contender]:
    """Name -> contender, what others are compared with first. The largest layer has all of them, the host's
    test the fewest."""
    free()
    gpu, layer = problem.device.kind == "cuda", problem.kind == "TransformerLayer"
    large = workload in LARGEST
    chosen = [
        name
        for name in RECIPES
        if large or workload in ("mlp", "linear") or name in ("bf16", "FP8 delayed", "FP8 current")
    ]
    found: dict[str, Contender] = {EAGER: eager}
    if layer and gpu:
        found[CUDNN] = cudnn_attention
        found[MISSING] = lambda p: fp8kit_torch(p, RECIPES["FP8 delayed"], policy=without_cudnn())
    if large:
        found[COMPILED] = compiled
    for name in chosen:
        found[f"fp8kit_torch {name}"] = lambda p, recipe=RECIPES[name]: fp8kit_torch(p, recipe)
        found[f"fp8kit native {name}"] = lambda p, recipe=RECIPES[name]: native(p, recipe)
    if layer and gpu and large:
        found[SAME_BITS] = same_bits
    if gpu and workload in GRAPHED:
        found |= {
            GRAPH: lambda p: eager(p, captured=True),
            "fp8kit native FP8 delayed, graph": lambda p: native(p, RECIPES["FP8 delayed"], graph=True),
            "fp8kit_torch FP8 delayed, graph": lambda p: fp8kit_torch(
                p, RECIPES["FP8 delayed"], graph="step"
            ),
            CALLABLES: lambda p: fp8kit_torch(p, RECIPES["FP8 delayed"], graph="callables"),
        }
    for name in chosen:
        own = RECIPES[name]
        found[f"Transformer Engine {name}"] = partial(
            transformer_engine, recipe="" if own is None else type(own).__name__
        )
    if large:
        found["torchao FP8 tensorwise, torch.compile"] = torchao
    return found


def breakeven(problem: Problem, modules: Modules) -> Mapping[str, Contender]:
    """The break-even grid's: plain torch and FP8 through both frontends, eager and captured."""
    free()
    fp8 = RECIPES["FP8 delayed"]

    def torchs(name: str, captured: bool = False) -> dict[str, Contender]:
        return {
            name: lambda p: eager(p, captured=captured, module=modules.of(p, name, lambda: plain_module(p)))
        }

    free()  # what the cell before took
    found = torchs(EAGER) | native_kept("fp8kit native FP8", fp8, modules)
    found["fp8kit_torch FP8"] = lambda p: fp8kit_torch(p, fp8)
    if problem.device.kind == "cuda":
        found |= torchs(GRAPH, True) | native_kept("fp8kit native FP8, graph", fp8, modules, True)
        found["fp8kit_torch FP8, graph"] = lambda p: fp8kit_torch(p, fp8, graph="step")
    return found


def free() -> None:
    """Hand back what no contender holds any more, in both allocators."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        from fp8kit.backends.cuda.device import cupy

        torch.cuda.empty_cache()
        cupy().get_default_memory_pool().free_all_blocks()


class TorchPeak(Peak):
    """``Peak`` over torch's allocator and CuPy's together, which the native library takes from."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        if device.kind == "cuda":
            self.before = torch.cuda.memory_allocated() + self._held()

    def bytes(self, step: Callable[[], object]) -> int:
        """See ``Peak``."""
        if self.device.kind == "cpu":
            return super().bytes(step)
        torch.cuda.reset_peak_memory_stats()
        start = self._held()
        with pool_growth() as growth:
            step()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated()) + start + growth[0] - self.before
