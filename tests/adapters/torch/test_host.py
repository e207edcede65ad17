"""What an eager FP8 step costs the host beside kernels and torch: in calls of functions, which a busy machine
does not change."""

from __future__ import annotations

import itertools
from collections import Counter

import fp8kit_torch as ft
import pytest
import torch

from tests.support.host_calls import counted

from .twins import RECIPES

# (module, recipe) -> calls of Python and C functions that forward, backward and the updates of the state may
# take. A call takes about a quarter of a microsecond. On a GPU an operation's own calls, about half of these,
# are passed over where its addresses are known.
MOST = {("Linear", "delayed"): 360, ("Linear", "current"): 318, ("LayerNormMLP", "delayed"): 533}
MOST_OTHER_LENGTH = 1545  # of a TransformerLayer


def step_of(layer, call, recipe):
    x, g = torch.randn(32, 64, requires_grad=True), torch.randn(32, 64)

    def step():
        with ft.autocast(recipe=RECIPES[recipe]):
            y = call(x)
        y.backward(g)

    return step


@pytest.mark.parametrize(("kind", "recipe"), MOST)
def test_calls_of_a_step(kind, recipe, monkeypatch):
    layer = ft.Linear(64, 64, device="cpu") if kind == "Linear" else ft.LayerNormMLP(64, 64, device="cpu")
    _, calls, launched = counted(step_of(layer, layer, recipe), monkeypatch)
    assert launched.count("fp8_gemm") == 3 * len(layer.gemms)
    assert calls <= MOST[kind, recipe]


# recipe -> casts and products of two grouped products, with sizes on the device: weights of all experts by
# one launch, x and its gradient by one each
EXPERTS = {
    "current": {
        "amax": 2,
        "group_amax": 4,
        "scale_from_amax": 2,
        "quantize": 2,
        "quantize_transpose": 6,
        "quantize_stack": 2,
        "grouped_fp8_gemm": 6,
    },
    "block": {
        "block_quantize": 4,
        "block_quantize_groups": 4,
        "block_quantize_stack": 2,
        "grouped_fp8_gemm": 6,
    },
}
# calls, of two layers; a dozen of them look at the parameters here, and at a size that lies on the CPU
MOST_AN_EXPERT = 24


@pytest.mark.parametrize("recipe", EXPERTS)
def test_kernels_of_a_step_are_as_many_for_more_experts(recipe, monkeypatch):
    taken = []
    for experts in (4, 64):
        layer = ft.GroupedMLP(experts, 128, 64, bias=False, params_dtype=torch.bfloat16, device="cpu")
        layer.fc1.sizes_on_device = layer.fc2.sizes_on_device = True
        x, g = torch.randn(2, 128, 128, dtype=torch.bfloat16)
        x.requires_grad_()
        sizes = torch.full((experts,), 128 // experts, dtype=torch.int32)

        def step(layer=layer, x=x, g=g, sizes=sizes):
            for parameter in layer.parameters():
                parameter.grad = None
            with ft.autocast(recipe=RECIPES[recipe]):
                y = layer(x, sizes)
            y.backward(g)

        _, calls, launched = counted(step, monkeypatch)
        monkeypatch.undo()
        counts = Counter(launched)
        assert {name: counts[name] for name in EXPERTS[recipe]} == EXPERTS[recipe]
        assert len(launched) == sum(EXPERTS[recipe].values()) + 2  # and the activation, both ways
        taken.append(calls)
    assert taken[1] - taken[0] <= 60 * MOST_AN_EXPERT


def test_calls_of_a_layer_at_another_length(monkeypatch):
    """One that it has met before, as in a training whose batches' lengths keep changing."""
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "fuse_qkv_params": True}
    layer = ft.TransformerLayer(64, 64, 4, device="cpu", **options)
    lengths = itertools.cycle([torch.randn(n, 2, 64, requires_grad=True) for n in (8, 16)])

    def step():
        x = next(lengths)
        with ft.autocast(recipe=RECIPES["delayed"]):
            y = layer(x)
        y.backward(x.detach())

    _, calls, launched = counted(step, monkeypatch)
    assert launched.count("fp8_gemm") == 12
    assert calls <= MOST_OTHER_LENGTH


# recipe -> calls of fp8kit_torch's functions that one more Linear in a compiled model takes, both ways
MOST_COMPILED = {"delayed": 24, "current": 24}


@pytest.mark.parametrize("recipe", MOST_COMPILED)
def test_calls_of_a_compiled_linear(recipe, monkeypatch):
    taken = []
    for count in (2, 4):
        torch._dynamo.reset()
        model = torch.nn.Sequential(*[ft.Linear(64, 64, device="cpu") for _ in range(count)])
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        files, _, launched = counted(step_of(model, compiled, recipe), monkeypatch)
        assert launched.count("fp8_gemm") == 3 * count
        # not where states are looked up: without Inductor histories are copied, and lie elsewhere each time
        taken.append(sum("/fp8kit_torch/" in file and not file.endswith("/state.py") for file in files))
        monkeypatch.undo()
    torch._dynamo.reset()
    assert (taken[1] - taken[0]) / 2 <= MOST_COMPILED[recipe]
