"""A call that is refused is refused before anything runs: FP8 state, torch's generator, parameters and caches
keep their bits, and the next good call gives the bits that it would have given without the bad one."""

from __future__ import annotations

import copy

import fp8kit_torch as ft
import numpy as np
import pytest
import torch
from fp8kit_torch.fused_adam import FusedAdam
from fp8kit_torch.fused_sgd import FusedSGD
from fp8kit_torch.module import TransformerEngineBaseModule

from fp8kit.errors import Fp8kitError, RecipeError, ShapeError
from fp8kit.recipe import DelayedScaling, Float8BlockScaling
from tests.support.bad_options import FFN, HEADS, B, H, S
from tests.support.refusals import SOURCE, Frontend, X, cases
from tests.support.torch_state import state_of

OPTIONS = {"attention_dropout": 0.1, "layer_number": 1, "params_dtype": torch.float32}
RECIPE = DelayedScaling(amax_history_len=4)


def mha(device, **options):
    return ft.MultiheadAttention(H, HEADS, device=device, **OPTIONS, **options)


def layer(device, **options):
    return ft.TransformerLayer(H, FFN, HEADS, device=device, hidden_dropout=0.1, **OPTIONS, **options)


# a causal mask has its corner and its end, whatever is said beside it, as in Transformer Engine
TAKEN = {"another corner than the mask's", "a window right of a causal diagonal"}
CASES = {
    case: (make, good, {name: bad for name, bad in table.items() if name not in TAKEN})
    for case, (make, good, table) in cases(mha, layer).items()
}


def placed(value, device):
    """An option as the torch frontend takes it."""
    if callable(value):
        return value(ft.InferenceParams, device)
    if isinstance(value, tuple):
        return tuple(placed(part, device) for part in value)
    return torch.from_numpy(value).to(device) if isinstance(value, np.ndarray) else value


def whole_state(module):
    """All that a call might change of a module, and the generators."""
    own = [(m._weights, m.fp8_meta.keys()) for m in module.modules() if hasattr(m, "_weights")]
    caches = [(None if weights is None else state_of(weights[1]), tuple(keys)) for weights, keys in own]
    moved = torch.cuda.get_rng_state().numpy().tobytes() if next(module.parameters()).is_cuda else b""
    return state_of(module), caches, torch.get_rng_state().numpy().tobytes(), moved


def step(module, good, device):
    """A training step of micro-batches; output, gradients and state as bytes."""
    with ft.autocast(enabled=True, recipe=RECIPE):
        y = module(**{name: placed(value, device) for name, value in good.items()}, is_first_microbatch=True)
    y.sum().backward()
    grads = {name: state_of(p.grad.cpu()) for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    return state_of(y.detach().cpu()), grads, whole_state(module)


def made(make, device):
    torch.manual_seed(7)
    return make(device)


FRONTEND = Frontend(
    TransformerEngineBaseModule,
    placed,
    lambda: ft.autocast(enabled=True, recipe=RECIPE),
    whole_state,
    state_of,
    step,
)


@pytest.mark.parametrize("case", CASES)
def test_a_refused_call_leaves_no_trace(device, case, monkeypatch):
    make, good, table = CASES[case]
    FRONTEND.refuses_without_a_trace(lambda: made(make, device), good, table, device, monkeypatch)


@pytest.mark.parametrize("first", [None, True])
@pytest.mark.parametrize("kind", [ft.Linear, ft.LayerNormLinear, ft.LayerNormMLP])
def test_a_layer_that_refuses_its_input_keeps_its_state(device, kind, first):
    """Shapes and dtypes of the input, and words for flags; the weight's cast and its cache come after it."""
    module, other = (
        made(lambda d: kind(H, FFN, device=d, params_dtype=torch.float32), device) for _ in range(2)
    )
    good = {"inp": X}
    before = whole_state(module)
    for bad in (
        {"inp": np.zeros((S, H + 1), np.float32)},
        {"inp": np.zeros((S, H), np.float16)},
        {"inp": np.zeros((), np.float32)},
        {"is_first_microbatch": "yes"},
    ):
        for _ in range(2):
            options = {
                name: placed(value, device)
                for name, value in ({"is_first_microbatch": first} | good | bad).items()
            }
            with pytest.raises(Fp8kitError), ft.autocast(enabled=True, recipe=RECIPE):
                module(**options)
            assert whole_state(module) == before
        assert step(module, good, device) == step(other, good, device)
        before = whole_state(module)


def test_groups_are_refused_before_any_runs(device):
    """Sizes, dtypes, a weight of the last group that is unlike the others."""
    module = made(lambda d: ft.GroupedLinear(3, H, FFN, device=d, params_dtype=torch.float32), device)
    x, before = placed(X[:, 0], device), whole_state(module)
    for inp, splits in (
        (x, [2, 2, 1]),
        (x, [2, 4]),
        (x, [3, -1, 4]),
        (x.half(), [2, 2, 2]),
        (x[:, 1:], [2, 2, 2]),
    ):
        with pytest.raises(Fp8kitError), ft.autocast(enabled=True, recipe=RECIPE):
            module(inp, splits)
        assert whole_state(module) == before
    with torch.no_grad():
        module.weight2 = torch.nn.Parameter(module.weight2.half())
    before = whole_state(module)
    with pytest.raises(Fp8kitError, match="weight2"), ft.autocast(enabled=True, recipe=RECIPE):
        module(x, [2, 2, 2])
    assert whole_state(module) == before


PARAMETERS = {  # module -> parameters of its parts, and of which none is like the others
    "layer": (
        lambda d: layer(d, qk_norm_type="RMSNorm"),
        [
            "self_attention.layernorm_qkv.key_weight",
            "self_attention.q_norm.weight",
            "self_attention.proj.bias",
            "layernorm_mlp.layer_norm_bias",
            "layernorm_mlp.fc2_weight",
        ],
    ),
    "output norm": (
        lambda d: layer(d, output_layernorm=True),
        ["self_attention.qkv.value_weight", "layernorm.weight"],
    ),
    "parallel": (lambda d: layer(d, parallel_attention_mlp=True), ["layernorm_mlp.fc1_weight"]),
    "decoder": (
        lambda d: layer(d, layer_type="decoder"),
        ["inter_attention.key_value.key_weight", "inter_attention.proj.weight"],
    ),
    "groups": (
        lambda d: ft.GroupedLinear(3, H, FFN, device=d, params_dtype=torch.float32),
        ["weight2", "bias1"],
    ),
}


@pytest.mark.parametrize("case", PARAMETERS)
def test_a_part_that_is_unlike_the_others_is_found_before_any_runs(device, case):
    """A parameter of another dtype or on another device."""
    make, names = PARAMETERS[case]
    for name in names:
        for ruin in (lambda t: t.half(), lambda t: t.to("meta")):
            module = made(make, device)
            part, _, last = name.rpartition(".")
            module.get_submodule(part)._parameters[last] = torch.nn.Parameter(
                ruin(module.get_parameter(name).detach())
            )
            options = {"encoder_output": placed(SOURCE, device)} if case == "decoder" else {}
            options |= {"m_splits": [2, 2, 2]} if case == "groups" else {}
            before = whole_state(module)
            with pytest.raises(Fp8kitError, match=last), ft.autocast(enabled=True, recipe=RECIPE):
                module(placed(X[:, 0] if case == "groups" else X, device), **options)
            assert whole_state(module) == before, name


@pytest.mark.parametrize("first", [None, True])
@pytest.mark.parametrize("kind", [ft.Linear, ft.LayerNormLinear, ft.LayerNormMLP])
def test_a_first_call_that_is_refused_makes_no_state(device, kind, first):
    """For a weight of another shape, and for float64, which no operation takes: no FP8 state, no cached
    weight."""
    module = made(lambda d: kind(H, FFN, device=d, params_dtype=torch.float32), device)
    name = next(n for n in ("weight", "fc2_weight") if hasattr(module, n))
    good, x = getattr(module, name), placed(X, device)
    wrong = torch.nn.Parameter(torch.zeros(good.shape[0], good.shape[1] + 1, device=device))
    for dtype, weight in ((torch.float32, wrong), (torch.float64, good)):
        module._parameters[name] = weight
        module.to(dtype)
        before = whole_state(module)
        with pytest.raises(Fp8kitError), ft.autocast(enabled=True, recipe=RECIPE):
            module(x.to(dtype), is_first_microbatch=first)
        assert whole_state(module) == before
        module._parameters[name] = good


def test_weights_held_by_another_recipe_are_refused_before_there_is_a_state(device):
    with ft.quantized_model_init(recipe=Float8BlockScaling()):
        layers = [
            made(lambda d: ft.Linear(128, 128, device=d), device),
            made(lambda d: ft.GroupedLinear(2, 128, 128, device=d), device),
        ]
    for module, more in zip(layers, ((), ([16, 16],)), strict=True):
        with (
            pytest.raises(RecipeError, match="as the recipe of this autocast"),
            ft.autocast(enabled=True, recipe=RECIPE),
        ):
            module(torch.ones(32, 128, device=device), *more)
        assert not module.fp8_meta


def test_dropout_is_refused_before_it_draws(device):
    """The functions and the module that draw from torch's generator."""
    x = placed(X, device)
    core = ft.DotProductAttention(HEADS, H // HEADS, attention_dropout=0.5, device=device)
    q = torch.zeros(S, B, HEADS, H // HEADS, device=device)
    before = torch.get_rng_state(), torch.cuda.get_rng_state() if x.is_cuda else None
    for call in (
        lambda: ft.dropout_add(x, x[1:], p=0.5),
        lambda: ft.dropout_add(x, x.half(), p=0.5),
        lambda: core(q, q[1:], q),
        lambda: core(q, q, q.half()),
        lambda: core(q, q, q, core_attention_bias=q),
    ):
        with pytest.raises(Fp8kitError):
            call()
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1] is None or torch.equal(before[1], torch.cuda.get_rng_state())


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"attn_mask_type": "arbitrary"}, "attention_mask"),
        ({"core_attention_bias_type": "post_scale_bias"}, "core_attention_bias"),
    ],
)
def test_what_is_missing_has_the_users_name(options, argument):
    with pytest.raises(ShapeError, match=f"MultiheadAttention: {argument}: missing, expected"):
        ft.MultiheadAttention(32, 4, device="cpu")(torch.zeros(5, 2, 32), **options)


@pytest.mark.parametrize("make", [FusedAdam, lambda groups: FusedSGD(groups, lr=0.1, momentum=0.9)])
def test_an_optimizer_that_refuses_a_gradient_takes_no_step(device, make):
    """One of the last group's, or a number of that group's: no parameter, state or count changes."""
    values = [torch.linspace(-1, 1, n, device=device) for n in (3, 4, 5)]
    one, two = ([torch.nn.Parameter(v.clone()) for v in values] for _ in range(2))
    optimizers = [make([{"params": own[:2]}, {"params": own[2:]}]) for own in (one, two)]

    def give():
        for own in (one, two):
            for param in own:
                param.grad = torch.ones_like(param)

    for _ in range(2):
        give()
        before = state_of(optimizers[0])
        optimizers[0].grad_name = "wrong"  # an attribute that takes any tensor
        for param in one:
            param.wrong = torch.ones_like(param)
        ones = torch.ones(5, device=device)
        for wrong in (torch.ones(6, device=device), ones.int(), ones.to_sparse()):
            one[2].wrong = wrong
            with pytest.raises(Fp8kitError):
                optimizers[0].step()
            assert state_of(optimizers[0]) == before
        optimizers[0].grad_name = "grad"
        kept = optimizers[0].param_groups[1]["lr"]
        optimizers[0].param_groups[1]["lr"] = "fast"
        with pytest.raises(Fp8kitError, match="lr"):
            optimizers[0].step()
        optimizers[0].param_groups[1]["lr"] = kept
        assert state_of(optimizers[0]) == before
        for optimizer in optimizers:
            optimizer.step()
        assert state_of(one) == state_of(two)


WRONG_STATES = {
    "no number": lambda saved: saved["param_groups"][1].pop("weight_decay"),
    "a word for a number": lambda saved: saved["param_groups"][1].update(lr="fast"),
    "a word for a count": lambda saved: saved["param_groups"][1].update(step="three"),
    "another shape": lambda saved: saved["state"][2].update({n: torch.zeros(6) for n in saved["state"][2]}),
    "complex": lambda saved: saved["state"][2].update({n: t + 0j for n, t in saved["state"][2].items()}),
    "sparse": lambda saved: saved["state"][2].update(
        {n: t.to_sparse() for n, t in saved["state"][2].items()}
    ),
    "no values": lambda saved: saved["state"][2].update(
        {n: t.to("meta") for n, t in saved["state"][2].items()}
    ),
    "a word for a state": lambda saved: saved["state"].update({2: "none"}),
    "one moment": lambda saved: saved["state"][2].pop("exp_avg_sq"),
    "a master where there is none": lambda saved: saved["state"][2].update(master_param=torch.zeros(5)),
    "remainders where there are none": lambda saved: saved["state"][2].update(
        exp_avg=torch.zeros(5, dtype=torch.int16)
    ),
}


@pytest.mark.parametrize("make", [FusedAdam, lambda groups: FusedSGD(groups, lr=0.1, momentum=0.9)])
def test_an_optimizer_that_refuses_a_state_keeps_its_own(device, make):
    values = [torch.linspace(-1, 1, n, device=device) for n in (3, 4, 5)]
    params = [torch.nn.Parameter(v.clone()) for v in values]
    optimizer = make([{"params": params[:2]}, {"params": params[2:]}])
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    before = state_of(optimizer)
    for label, ruin in list(WRONG_STATES.items())[: None if isinstance(optimizer, FusedAdam) else -3]:
        saved = copy.deepcopy(optimizer.state_dict())
        ruin(saved)
        with pytest.raises(Fp8kitError):
            optimizer.load_state_dict(saved)
        assert state_of(optimizer) == before, label
    optimizer.load_state_dict(optimizer.state_dict())
    assert state_of(optimizer) == before


@pytest.mark.parametrize("make", [FusedAdam, lambda groups: FusedSGD(groups, lr=0.1, momentum=0.9)])
def test_an_optimizer_whose_parameter_was_exchanged_takes_no_step(device, make):
    """Its ``data`` by another shape, whose states would be too short, or by other strides; a group's number
    taken away."""
    params = [torch.nn.Parameter(torch.linspace(-1, 1, n, device=device)) for n in (3, 4, 5)]
    optimizer = make([{"params": params[:2]}, {"params": params[2:]}])
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    kept = params[2].data
    for wrong in (torch.ones(6, device=device), torch.ones(10, device=device)[::2]):
        params[2].data, params[2].grad = wrong, torch.ones_like(wrong)
        before = state_of(params)
        with pytest.raises(ShapeError, match="params: got"):
            optimizer.step()
        assert state_of(params) == before
    params[2].data, params[2].grad = kept, torch.ones_like(kept)
    del optimizer.param_groups[1]["weight_decay"]
    before = state_of(optimizer)
    with pytest.raises(Fp8kitError, match="param_groups: got a group without 'weight_decay'"):
        optimizer.step()
    assert state_of(optimizer) == before


def test_a_main_grad_at_an_odd_address(device):
    """cuBLASLt's FP8 products write at multiples of 16 bytes alone; the CPU engine anywhere."""
    module = made(lambda d: layer(d, fuse_wgrad_accumulation=True), device)
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros(parameter.numel() + 1, device=device)[1:].view(parameter.shape)
    before = whole_state(module)
    with ft.autocast(enabled=True, recipe=RECIPE):
        if device == "cpu":
            module(placed(X, device)).sum().backward()
            assert all(
                weight.main_grad.any()
                for weight in (module.layernorm_mlp.fc1_weight, module.self_attention.proj.weight)
            )
            return
        with pytest.raises(
            Fp8kitError, match=r"\.main_grad: got address 0x[0-9a-f]+, expected a multiple of 16 bytes"
        ):
            module(placed(X, device))
    assert whole_state(module) == before


def test_a_missing_main_grad_is_found_before_the_layer_runs(device):
    module = made(lambda d: layer(d, fuse_wgrad_accumulation=True), device)
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    del module.layernorm_mlp.fc2_weight.main_grad
    before = whole_state(module)
    with (
        pytest.raises(Fp8kitError, match=r"fc2_weight0\.main_grad"),
        ft.autocast(enabled=True, recipe=RECIPE),
    ):
        module(placed(X, device))
    assert whole_state(module) == before
