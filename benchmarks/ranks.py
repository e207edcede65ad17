"""Two ranks, a GPU each: a layer that they share the weights and the sequence of, and a model whose weights
they gather, beside torch's own ways in bfloat16.

    python -m benchmarks ranks --out DIR

Each rank is a process that runs this module; they take turns alike, and a figure is the slower rank's. On a
CPU they communicate by Gloo, in small sizes: whether it runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import fp8kit_torch as ft
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from benchmarks.targets import ALONE, EAGER, SHARDED, SUMMED, TENSOR, TORCH
from benchmarks.torch_cases import free, put, reference, weights
from benchmarks.torch_plain import Layer as Plain
from benchmarks.torch_plain import plain
from benchmarks.traces import communication
from fp8kit.arrays import Device
from fp8kit.bench.contest import Contest, row_of
from fp8kit.bench.layers import WARM_STEPS
from fp8kit.bench.problem import RECIPES, Problem, Results, errors, layer_problem, verdict
from fp8kit.bench.report import Row, Setting, attempt
from fp8kit.bench.sizes import FULL, SIZES, Layer
from fp8kit.bench.timing import Step
from fp8kit.commands.launch import places
from fp8kit.recipe import Recipe

RANKS = 2
SECONDS = 400.0  # that the ranks may take together


class Model(NamedTuple):
    """A stack of equal layers and each rank's input; ``names``: the contenders with divided weights."""

    layer: Layer
    layers: int
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.layers} layers of hidden {self.layer.hidden}, {self.layer.tokens} tokens a rank"


_RECIPES: Mapping[str, Recipe | None] = {f"fp8kit_torch {name}": own for name, own in RECIPES.items()}
# a batch that keeps GPUs busy, and one that the host of ``fully_shard`` takes longer for than they do
MODELS = {
    "full": (
        Model(Layer(2048, 8192, 16, 2048, 16), 12, (EAGER, TORCH)),
        Model(Layer(2048, 8192, 16, 2048, 4), 12, (EAGER, *_RECIPES)),
    ),
    "small": (Model(Layer(32, 64, 2, 16, 2), 2, (EAGER, *_RECIPES)),),
}
SYMMETRIC = "symmetric memory"
_BLOCK = "fp8kit_torch FP8 block"
RECORDED = 20  # steps after which calls that come again have been recorded, and are graphs


def ranks_part(setting: Setting) -> list[Row]:
    """Starts the ranks; the first one's rows. Unavailable where there are not as many GPUs."""
    kind = setting.device.kind
    if kind == "cuda" and torch.cuda.device_count() < RANKS:
        return [row_of("ranks", "all", f"needs {RANKS} GPUs, there is {torch.cuda.device_count()}")]
    with tempfile.TemporaryDirectory() as folder:
        how = {name: getattr(setting, name) for name in ("rounds", "calls", "warmups", "seed")}
        how |= {"kind": kind, "sizes": setting.sizes.name, "left": min(SECONDS, setting.left())}
        if setting.out is not None:
            how["out"] = str(setting.out.resolve())
        words = [sys.executable, "-m", "benchmarks.ranks", folder, json.dumps(how)]
        root = Path(__file__).resolve().parent.parent
        processes = [
            subprocess.Popen(words, cwd=root, env=os.environ | place, stderr=subprocess.PIPE, text=True)
            for place in places(RANKS)
        ]
        try:
            said = [process.communicate(timeout=how["left"] + 60)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
        rows = Path(folder, "rows.json")
        if not rows.exists():
            raise RuntimeError("; ".join(" ".join(text.split())[-300:] for text in said))
        found: list[Row] = json.loads(rows.read_text())
        return found


class Together(Contest):
    """``Contest`` of ranks: a contender that fails on one of them takes no part on any, and a time is the
    slowest rank's."""

    def enter(self, case: str, make: Callable[[Row], Step], **figures: Any) -> Row:
        own = super().enter(case, make, **figures)
        failed = _slowest(float(case not in self.steps), self.setting.device)
        if failed and self.steps.pop(case, None) is not None:
            own["status"] = "failed: on another rank"
        free()
        return own

    def enter_all(self, cases: Iterable[str], make: Callable[[str, Row], Step]) -> None:
        """Enter these, or leave them out where a rank has no time left."""
        for case in cases:
            if _slowest(float(self.setting.left() <= 0), self.setting.device):
                self.leave_out(case)
            else:
                self.enter(case, partial(make, case))

    def time(self, host: bool = False) -> list[Row]:
        rows = super().time(host)
        for row in rows:
            if "gpu_ms" in row:
                row["gpu_ms"] = _slowest(row["gpu_ms"], self.setting.device)
        return rows

    def look(self, kept: str) -> None:
        """What each contender communicates, by torch's profiler, and how much of that runs beside kernels;
        the trace of ``kept`` is kept."""
        for case, step in self.steps.items():
            out = self.setting.out
            name = f"trace {self.workload.partition(',')[0]} {case}".replace(",", "").replace(" ", "_")
            keep = None if out is None or dist.get_rank() or case != kept else out / f"{name}.json.gz"
            with attempt(self.rows[case]):
                self.rows[case] |= communication(step, keep)


def _slowest(value: float, device: Device) -> float:
    found = torch.tensor([value], dtype=torch.float64, device=_place(device))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def _place(device: Device) -> torch.device:
    return torch.device(device.kind, device.index) if device.kind == "cuda" else torch.device("cpu")


def _part(tensor: Tensor, dim: int) -> Tensor:
    return tensor.chunk(RANKS, dim)[dist.get_rank()].contiguous()


# --- a layer whose weights and sequence they share ----------------------------------------------------------


def tensor_rows(setting: Setting) -> list[Row]:
    """The largest layer, forward and backward: torch's plan of ``parallelize_module`` over the plain layer,
    and ``TransformerLayer`` with ``tp_group`` and ``sequence_parallel``, also by symmetric memory."""
    name, layer = next(iter(setting.sizes.layers.items()))
    problem = layer_problem(layer, setting)
    contest = Together(setting, f"{TENSOR} {RANKS}, {name}")
    exact = reference(problem)
    free()
    cases: dict[str, Callable[[Problem], Callable[[], Any]]] = {EAGER: _torch_layer}
    for recipe in RECIPES:
        cases[f"fp8kit_torch {recipe}"] = partial(_own_layer, recipe=RECIPES[recipe])
    if setting.device.kind == "cuda":
        cases |= {f"{case}, {SYMMETRIC}": partial(cases[case], group=_symmetric) for case in (TORCH, _BLOCK)}

    def make(case: str, row: Row) -> Step:
        step = cases[case](problem)
        for _ in range(WARM_STEPS):
            y, dx = step()
        found = errors(_whole(problem, y, dx), exact)
        row |= found
        row["status"] = verdict(case, problem.kind, found)
        return step

    contest.enter_all(cases, make)
    rows = contest.time()
    if setting.device.kind == "cuda":
        contest.look(TORCH)
    _compare(contest.rows, EAGER)
    contest.steps.clear()
    free()
    return rows


def _whole(problem: Problem, *parts: Tensor) -> Results:
    """y and dx of all ranks in the problem's order, as ``Problem.branches`` gives them."""
    found = []
    for part in parts:
        gathered = [torch.empty_like(part) for _ in range(RANKS)]
        dist.all_gather(gathered, part.contiguous())
        found.append(torch.cat(gathered).float().cpu().numpy())
    return problem.branches(*found)


def _step(
    call: Callable[[Tensor], Tensor],
    parameters: list[Any],
    x: Tensor,
    dy: Tensor,
    recipe: Recipe | None = None,
    update: Callable[[], Any] = lambda: None,
) -> Callable[[], tuple[Tensor, Tensor | None]]:
    """Forward and backward, and ``update``; gives y and dx."""
    leaf = x.detach().requires_grad_()
    scope: Callable[[], AbstractContextManager[Any]] = (
        nullcontext if recipe is None else partial(ft.autocast, recipe=recipe)
    )

    def step() -> tuple[Tensor, Tensor | None]:
        leaf.grad = None
        for parameter in parameters:
            parameter.grad = None
        with scope():
            y = call(leaf)
        y.backward(dy)
        update()
        return y.detach(), leaf.grad

    return step


def _torch_layer(problem: Problem) -> Callable[[], Any]:
    """The plain layer by torch's own plan: its sequence, dimension 1, stays divided outside of products."""
    module = plain(problem.kind, problem.sizes, weights(problem), torch.bfloat16)
    mesh = init_device_mesh(problem.device.kind, (RANKS,))
    columns, rows = (
        partial(ColwiseParallel, input_layouts=Shard(1)),
        partial(RowwiseParallel, output_layouts=Shard(1)),
    )
    plan = {
        "norm": SequenceParallel(),
        "qkv": columns(),
        "proj": rows(),
        "mlp.norm": SequenceParallel(),
        "mlp.fc1": columns(),
        "mlp.fc2": rows(),
    }
    parallelize_module(module, mesh, plan)
    assert isinstance(module, Plain)
    module.heads //= RANKS
    x, dy = (_part(put(host, _place(problem.device)), 0) for host in (problem.x, problem.dy))
    x, dy = x.transpose(0, 1).contiguous(), dy.transpose(0, 1).contiguous()
    step = _step(module, list(module.parameters()), x, dy)

    def sequence_first() -> tuple[Tensor, Tensor]:
        y, dx = step()
        assert dx is not None
        return y.transpose(0, 1), dx.transpose(0, 1)

    return sequence_first


def _everyone() -> Any:
    return dist.group.WORLD


def _symmetric() -> Any:
    """A group of all ranks with torch's symmetric memory."""
    group: Any = dist.new_group(range(RANKS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # later versions of torch need no switch themselves
        enable_symm_mem_for_group(group.group_name)
    return group


def _own_layer(
    problem: Problem, recipe: Recipe | None, group: Callable[[], Any] = _everyone
) -> Callable[[], Any]:
    """``TransformerLayer`` with this rank's part of the weights."""
    place = _place(problem.device)
    module = ft.TransformerLayer(
        *problem.sizes,
        params_dtype=torch.bfloat16,
        device=place,
        tp_group=group(),
        set_parallel_mode=True,
        sequence_parallel=True,
        **problem.options,
    )
    whole = weights(problem)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            value = whole[name]
            dim = next((i for i, n in enumerate(parameter.shape) if n != value.shape[i]), None)
            parameter.copy_(value if dim is None else _part(value, dim))
    x, dy = (_part(put(host, place), 0) for host in (problem.x, problem.dy))
    return _step(module, list(module.parameters()), x, dy, recipe)


# --- a model whose weights they gather, or whose gradients they sum -----------------------------------------


def model_rows(setting: Setting) -> list[Row]:
    """Whole steps of stacks of layers, with AdamW, on other rows in each rank: one GPU by itself, weights
    divided (``fully_shard``, in FP8 by ``quantized_model_init``), and gradients summed
    (``DistributedDataParallel``). ``ratio``: to torch's of the same kind; ``detail`` of the others says what
    share of one GPU's speed each rank has."""
    return [row for size in MODELS[setting.sizes.name] for row in _rows_of(size, setting)]


def _rows_of(size: Model, setting: Setting) -> list[Row]:
    setting = replace(setting, calls=min(setting.calls, 5), warmups=min(setting.warmups, 4))
    contest = Together(setting, str(size))
    whole = (EAGER, TORCH)
    ways = {ALONE: whole, SHARDED: size.names, SUMMED: whole}
    cases = {f"{name}, {how}": (name, how) for how, names in ways.items() for name in names}

    def make(case: str, row: Row) -> Step:
        step = _trained(size, *cases[case], setting)
        for _ in range(RECORDED):
            y, _ = step()
        if not torch.isfinite(y).all():
            row["status"] = "WRONG: not finite"
        return step

    contest.enter_all(cases, make)
    rows = contest.time()
    if setting.device.kind == "cuda":
        contest.look(f"{TORCH}, {SHARDED}" if size is MODELS[setting.sizes.name][0] else "")
    for how in (ALONE, SHARDED, SUMMED):
        _compare({case: row for case, row in contest.rows.items() if case.endswith(how)}, f"{EAGER}, {how}")
    for case, (name, how) in cases.items():
        times = [contest.rows.get(f"{name}, {kind}", {}).get("gpu_ms") for kind in (ALONE, how)]
        if how != ALONE and None not in times:
            contest.rows[case]["scaling"] = times[0] / times[1]
    contest.steps.clear()
    free()
    return rows


def _trained(size: Model, name: str, how: str, setting: Setting) -> Callable[[], Any]:
    """A model's training step."""
    place, recipe, own = _place(setting.device), _RECIPES.get(name), size.layer
    torch.manual_seed(setting.seed)
    held = how == SHARDED and recipe is not None

    def layer() -> torch.nn.Module:
        if name == EAGER:
            return Plain(*own[:3], device=place, dtype=torch.bfloat16)
        options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "fuse_qkv_params": True}
        return ft.TransformerLayer(*own[:3], params_dtype=torch.bfloat16, device=place, **options)

    with ft.quantized_model_init(recipe=recipe) if held else nullcontext():
        net: Any = torch.nn.Sequential(*(layer() for _ in range(size.layers)))
    if how == SHARDED:
        mesh = init_device_mesh(setting.device.kind, (RANKS,))
        for each in net:
            fully_shard(each, mesh=mesh)
        fully_shard(net, mesh=mesh)
    call = DistributedDataParallel(net, gradient_as_bucket_view=True) if how == SUMMED else net
    group = {} if how != ALONE else {"amax_reduction_group": _single()}
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5, fused=True)
    shape = own.sequence, own.batch, own.hidden
    draw = torch.Generator().manual_seed(setting.seed + dist.get_rank())
    x, dy = (torch.randn(shape, generator=draw).to(place, torch.bfloat16) for _ in range(2))
    if name == EAGER:
        x, dy = x.transpose(0, 1).contiguous(), dy.transpose(0, 1).contiguous()
    leaf = x.requires_grad_()

    def step() -> tuple[Tensor, None]:
        optimizer.zero_grad()
        leaf.grad = None
        with ft.autocast(recipe=recipe, **group) if recipe is not None else nullcontext():
            y = call(leaf)
        y.backward(dy)
        optimizer.step()
        return y.detach(), None

    return step


_SINGLE: list[Any] = []


def _single() -> Any:
    """The group of this rank alone."""
    if not _SINGLE:
        made = [dist.new_group([rank]) for rank in range(RANKS)]
        _SINGLE.append(made[dist.get_rank()])
    return _SINGLE[0]


def _compare(rows: Mapping[str, Row], other: str) -> None:
    """Ratios to another row's time."""
    base = rows.get(other, {}).get("gpu_ms")
    for row in rows.values():
        if base and "gpu_ms" in row:
            row["ratio"] = row["gpu_ms"] / base


def main(folder: str, how: str) -> None:
    """One rank."""
    given = json.loads(how)
    kind, sizes, left, out = (given.pop(name, None) for name in ("kind", "sizes", "left", "out"))
    rank = int(os.environ["RANK"])
    device = Device(kind, rank if kind == "cuda" else 0)
    options = {}
    if kind == "cuda":
        torch.cuda.set_device(rank)
        options["device_id"] = torch.device("cuda", rank)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", **options)
    where = None if out is None else Path(out)
    setting = Setting(device, SIZES[sizes], deadline=time.monotonic() + left, out=where, **given)
    if SIZES[sizes] is FULL:
        setting = setting.warmed()
    rows: list[Row] = []
    for part in (tensor_rows, model_rows):
        rows += part(setting)
        if rank == 0:
            Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
