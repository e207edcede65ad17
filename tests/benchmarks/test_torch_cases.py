"""The contenders that PyTorch users would otherwise take: the same numbers as ours; other libraries by
modules that stand in for them."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import fp8kit_torch as ft
import numpy as np
import pytest
import torch

import fp8kit as fk
from benchmarks import parts, torch_cases, torch_kernels, torch_plain
from fp8kit import arrays, recipe
from fp8kit.arrays import CPU, Device
from fp8kit.bench import breakeven, gemms, layers, skeleton
from fp8kit.bench.problem import RECIPES, Modules, Problem, errors, native, verdict
from fp8kit.bench.report import Setting, Unavailable
from fp8kit.bench.sizes import SMALL, Layer

SIZES = {"Linear": (32, 48), "LayerNormMLP": (32, 64), "TransformerLayer": (32, 64, 2)}
QUICK = Setting(CPU, SMALL, 1, 1, 1)
OURS = {f"{frontend} {name}" for frontend in ("fp8kit_torch", "fp8kit native") for name in RECIPES}
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(autouse=True)
def _no_traces_left():
    yield
    torch._dynamo.reset()


def small(kind, device="cpu"):
    return Problem(kind, SIZES[kind], 16, 2, arrays.device(device), 5)


def results(running):
    running.step()
    return running.results()


def same(one, other):
    return all(
        np.array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
        for a, b in zip(one, other, strict=True)
    )


@devices
@pytest.mark.parametrize("kind", list(torch_plain.PLAIN))
def test_frontends_agree_bit_for_bit(device, kind):
    """The native frontend and PyTorch's get the same weights and data, so a comparison of their times is
    one of frontends alone."""
    problem = small(kind, device)
    with fk.deterministic():
        assert same(results(native(problem, None)), results(torch_cases.fp8kit_torch(problem, None)))


@pytest.mark.parametrize("kind", list(torch_plain.PLAIN))
def test_references_agree(kind):
    """float32 by torch and by the native frontend: as far apart as a few hundred roundings."""
    from fp8kit.bench import problem as problems

    made = small(kind)
    found = errors(torch_cases.reference(made), problems.reference(made))
    assert max(found.values()) < 500 * 2**-24


@devices
def test_plain_modules_are_right(device):
    problem = small("TransformerLayer", device)
    exact = torch_cases.reference(problem)
    makes = [torch_cases.eager, torch_cases.compiled] + (
        [torch_cases.cudnn_attention] if device == "cuda" else []
    )
    for make in makes:
        running = make(problem)
        running.step()
        running.poison()
        running.step()
        assert verdict("bf16", problem.kind, errors(problem.branches(*running.results()), exact)) == "ok"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch_cases.eager(p, captured=True),
        lambda p: torch_cases.fp8kit_torch(p, RECIPES["FP8 delayed"], graph="step"),
        lambda p: torch_cases.fp8kit_torch(p, RECIPES["FP8 delayed"], graph="callables"),
    ],
)
def test_graphs_are_right(make):
    problem = Problem("TransformerLayer", (64, 128, 2), 32, 2, Device("cuda"), 5)
    running = make(problem)
    for _ in range(3):
        running.step()
    found = errors(problem.branches(*running.results()), torch_cases.reference(problem))
    assert verdict("FP8", problem.kind, found) == "ok"


@pytest.mark.parametrize("own", RECIPES)
def test_transformer_engine_is_used_where_it_is_installed(monkeypatch, own):
    """Its names lead to fp8kit_torch here: the case gives what fp8kit_torch gives under the same recipe."""
    problem = small("TransformerLayer")
    made = torch_cases.contenders(problem, "layer 4096")[f"Transformer Engine {own}"]
    monkeypatch.setattr(torch_cases, "version_of", lambda peer: "not installed")
    with pytest.raises(Unavailable, match="not installed"):
        made(problem)
    monkeypatch.setattr(torch_cases, "version_of", lambda peer: "0")
    for name, module in (
        ("", SimpleNamespace()),
        (".pytorch", ft),
        (".common", SimpleNamespace()),
        (".common.recipe", recipe),
    ):
        monkeypatch.setitem(sys.modules, f"transformer_engine{name}", module)
    with fk.deterministic():
        assert same(results(made(problem)), results(torch_cases.fp8kit_torch(problem, RECIPES[own])))


def test_torchao_is_used_where_it_is_installed(monkeypatch):
    """A stand-in that converts nothing: the case gives what plain torch gives under the same compiler."""
    asked = []
    config = SimpleNamespace(from_recipe_name=lambda name: asked.append(name) or name)
    stand_in = SimpleNamespace(
        Float8LinearConfig=config, convert_to_float8_training=lambda module, config: module
    )
    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace(float8=stand_in))
    monkeypatch.setitem(sys.modules, "torchao.float8", stand_in)
    monkeypatch.setattr(torch_cases, "version_of", lambda peer: "0")
    problem = small("LayerNormMLP")
    assert same(results(torch_cases.torchao(problem)), results(torch_cases.compiled(problem)))
    assert asked == ["tensorwise"]


def test_who_takes_part():
    layer = small("TransformerLayer")
    large = set(torch_cases.contenders(layer, "layer 4096"))
    assert {torch_cases.EAGER, torch_cases.COMPILED, *OURS} <= large
    assert "torchao FP8 tensorwise, torch.compile" in large
    assert next(iter(torch_cases.contenders(layer, "layer 1024"))) == torch_cases.EAGER
    assert "fp8kit_torch FP8 block" not in torch_cases.contenders(small("Linear"), "host")
    on_gpu = Problem("TransformerLayer", (32, 64, 2), 16, 2, Device("cuda"))
    assert {torch_cases.CUDNN, torch_cases.GRAPH, "fp8kit native FP8 delayed, graph"} <= set(
        torch_cases.contenders(on_gpu, "layer 1024")
    )
    assert set(torch_cases.contenders(layer, "layer 64")) == large  # in small as in full
    assert torch_cases.GRAPH in torch_cases.contenders(on_gpu, "layer 16")
    assert len(torch_cases.breakeven(on_gpu, Modules())) == 6


def test_a_workload_in_small(monkeypatch):
    monkeypatch.setattr(torch_cases, "version_of", lambda peer: "not installed")
    one = Setting(CPU, SMALL, 1, 1, 1)
    rows = {row["case"]: row for row in layers.host_part(one, parts._FIELD)}
    assert rows[torch_cases.EAGER]["status"] == "ok"
    assert rows["Transformer Engine bf16"]["status"] == "not installed"
    assert all(rows[name]["host_us"] > 0 for name in rows if rows[name]["status"] == "ok")
    assert not [row for row in rows.values() if row["status"].startswith(("WRONG", "failed"))]


def test_the_break_even_grid_in_small():
    rows = breakeven.breakeven_part(
        replace(QUICK, sizes=replace(SMALL, hidden=(32,), tokens=(16,))), torch_cases.breakeven
    )
    assert {row["status"] for row in rows} == {"ok"}
    assert {row["case"] for row in rows} == {torch_cases.EAGER, "fp8kit native FP8", "fp8kit_torch FP8"}
    assert all(row["error_y"] < 0.2 for row in rows if "FP8" in row["case"])


def test_torchs_products_multiply_the_same_values():
    product = gemms.products(Layer(32, 64, 2, 16, 2))[0]
    rows = {row["case"]: row for row in gemms.measure(product, QUICK, torch_kernels.products)}
    assert rows["torch.mm bf16"]["status"] == "ok"
    assert rows["torch._scaled_mm FP8"]["status"] == "ok"
    assert rows["torch._scaled_mm FP8"]["error"] == pytest.approx(rows[gemms.OURS]["error"], rel=0.2)


@devices
def test_torchs_attention_takes_the_same_values(device):
    """Its o is the run's own, within bfloat16's rounding."""
    run = skeleton.AttentionRun(Layer(64, 128, 2, 32, 2), arrays.device(device))
    run.forward()
    forward, backward = torch_kernels.attentions(run)["torch SDPA"]
    forward()
    backward()
    qkv = torch.from_dlpack(run.inputs["qkv"]).view(32, 2, 2, 3, 32).permute(3, 1, 2, 0, 4)
    theirs = (
        torch.nn.functional.scaled_dot_product_attention(*qkv.double(), is_causal=True)
        .permute(2, 0, 1, 3)
        .reshape(32, 2, 64)
    )
    got = torch.from_dlpack(run.outputs["o"]).double()
    assert float((got - theirs).norm() / theirs.norm()) < 2**-7


@pytest.mark.gpu
def test_peak_memory_counts_both_allocators():
    """A step that takes a torch tensor of 3 MiB and an fp8kit array of 5 MiB, beyond 2 MiB that stay."""
    from fp8kit import formats

    torch_cases.free()
    memory = torch_cases.TorchPeak(Device("cuda"))
    kept = torch.empty(2 << 20, dtype=torch.uint8, device="cuda")

    def step():
        return torch.empty(3 << 20, dtype=torch.uint8, device="cuda"), arrays.empty(
            (5 << 20,), formats.uint8, arrays.device("cuda")
        )

    # an allocator may give up to 1 MiB more than it was asked for rather than split a block
    assert memory.bytes(step) / 2**20 == pytest.approx(10, abs=1)
    assert kept.numel() == 2 << 20
