"""What an eager FP8 step costs the host beside kernels and torch: in calls of functions, which a busy machine
does not change."""

from __future__ import annotations

import copy
import gc
import itertools
from collections import Counter

import fp8kit_torch as ft
import pytest
import torch
from fp8kit_torch import checks

from tests.support.combinations import combinations
from tests.support.host_calls import counted, opcodes

from .twins import RECIPES

# (module, recipe) -> calls of Python and C functions that forward, backward and the updates of the state may
# take. A call takes about a quarter of a microsecond. On a GPU an operation's own calls, about half of these,
# are passed over where its addresses are known.
MOST = {("Linear", "delayed"): 337, ("Linear", "current"): 298, ("LayerNormMLP", "delayed"): 508}
# of a TransformerLayer; 5 of them ask whether a transform or make_fx runs, 4 whether a hook sees the heads,
# 4 whether a part is wrapped
MOST_OTHER_LENGTH = 1535
# recipe -> calls more where a program makes it anew for each step
MOST_INLINE = {"delayed": 23, "current": 29}


def step_of(layer, call, recipe):
    x, g = torch.randn(32, 64, requires_grad=True), torch.randn(32, 64)

    def step():
        with ft.autocast(recipe=recipe() if callable(recipe) else RECIPES[recipe]):
            y = call(x)
        y.backward(g)

    return step


@pytest.mark.parametrize(("kind", "recipe"), MOST)
def test_calls_of_a_step(kind, recipe, monkeypatch):
    layer = ft.Linear(64, 64, device="cpu") if kind == "Linear" else ft.LayerNormMLP(64, 64, device="cpu")
    _, calls, launched = counted(step_of(layer, layer, recipe), monkeypatch)
    assert launched.count("fp8_gemm") == 3 * len(layer.gemms)
    assert calls <= MOST[kind, recipe]


@pytest.mark.parametrize("recipe", MOST_INLINE)
def test_calls_of_a_step_with_a_recipe_of_its_own(recipe, monkeypatch):
    taken = []
    for each in (recipe, type(RECIPES[recipe])):
        layer = ft.Linear(64, 64, device="cpu")
        taken.append(counted(step_of(layer, layer, each), monkeypatch)[1])
        monkeypatch.undo()
    assert taken[1] - taken[0] <= MOST_INLINE[recipe]


@pytest.mark.parametrize("recipe", MOST_INLINE)
def test_steps_leave_no_garbage(recipe):
    """Nothing that only the collector finds, which looks at all of a step's objects then."""
    layer = ft.Linear(64, 64, device="cpu")
    step = step_of(layer, layer, lambda: copy.copy(RECIPES[recipe]))
    for _ in range(3):
        step()
    kinds = ("autocast", "_Entered", type(RECIPES[recipe]).__name__)
    gc.collect()
    gc.disable()
    try:
        before = Counter(type(each).__name__ for each in gc.get_objects())
        for _ in range(5):
            step()
        after = Counter(type(each).__name__ for each in gc.get_objects())
    finally:
        gc.enable()
    assert {kind: after[kind] - before[kind] for kind in kinds} == dict.fromkeys(kinds, 0)


# recipe -> what two grouped products with sizes on the device launch for their weights, all experts' at once,
# in both directions; for x and for y's gradient; and the products
EXPERTS = {
    "current": (
        {"amax": 2, "quantize_stack": 2},
        {"group_amax": 4, "quantize_transpose": 4},
        {"grouped_fp8_gemm": 6},
    ),
    "block": ({"block_quantize_stack": 2}, {"block_quantize_groups": 4}, {"grouped_fp8_gemm": 6}),
}
# calls of such a step, for any number of experts; 22 ask the second product what it refuses before the first
MOST_EXPERTS = {"current": 1166, "block": 930}


ACTIVATION = {"act_fwd": 1, "act_bwd": 1}


def step_of_experts(experts, recipe, first=None, **options):
    made = {"bias": False, "params_dtype": torch.bfloat16, "device": "cpu", "use_grouped_tensor": True}
    layer = ft.GroupedMLP(experts, 128, 64, **made, **options)
    x, g = torch.randn(2, 128, 128, dtype=torch.bfloat16)
    x.requires_grad_()
    sizes, parameters = torch.full((experts,), 128 // experts, dtype=torch.int32), [*layer.parameters()]

    def step():
        for parameter in parameters:
            parameter.grad = None
        with ft.autocast(recipe=RECIPES[recipe]):
            y = layer(x, sizes, is_first_microbatch=first)
        y.backward(g)

    return step


@pytest.fixture
def sizes_unread(monkeypatch):
    """Sizes on the CPU are looked at when they are checked; those on a GPU are not."""
    monkeypatch.setitem(checks.CALLED, "m_splits", lambda *asked: None)
    monkeypatch.setattr("fp8kit.ops.expert_linear.check_groups", lambda *asked: None)


@pytest.mark.parametrize("recipe", EXPERTS)
def test_a_step_of_more_experts_takes_the_host_as_long(recipe, monkeypatch, sizes_unread):
    """As many kernels, and as many instructions, but for what torch's autograd does in C++."""
    taken = []
    weights, rows, products = EXPERTS[recipe]
    for experts in (4, 16):
        step = step_of_experts(experts, recipe)
        with monkeypatch.context() as patch:
            _, calls, launched = counted(step, patch)
        assert Counter(launched) == weights | rows | products | ACTIVATION
        assert calls <= MOST_EXPERTS[recipe]
        with monkeypatch.context() as patch:
            taken.append(opcodes(step, patch))
    assert taken[0] == taken[1]


@pytest.mark.parametrize("recipe", EXPERTS)
def test_experts_of_a_later_micro_batch_cast_no_weight(recipe, monkeypatch, sizes_unread):
    _, _, launched = counted(step_of_experts(4, recipe, first=False), monkeypatch)
    _, rows, products = EXPERTS[recipe]
    assert Counter(launched) == rows | products | ACTIVATION


def test_experts_of_one_parameter_take_the_host_no_longer(monkeypatch, sizes_unread):
    one, several = (
        opcodes(step_of_experts(64, "current", single_grouped_weight=single), monkeypatch)
        for single in (True, False)
    )
    assert one <= several


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
MOST_COMPILED = {"delayed": 23, "current": 19}


@combinations({"recipe": MOST_COMPILED.keys()}, usual=["current"])
def test_calls_of_a_compiled_linear(recipe, monkeypatch):
    taken = []
    for count in (1, 2):
        torch._dynamo.reset()
        model = torch.nn.Sequential(*[ft.Linear(64, 64, device="cpu") for _ in range(count)])
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        files, _, launched = counted(step_of(model, compiled, recipe), monkeypatch)
        assert launched.count("fp8_gemm") == 3 * count
        # not where states are looked up: without Inductor histories are copied, and lie elsewhere each time
        taken.append(sum("/fp8kit_torch/" in file and not file.endswith("/state.py") for file in files))
        monkeypatch.undo()
    torch._dynamo.reset()
    assert taken[1] - taken[0] <= MOST_COMPILED[recipe]
