"""A small layer's operations as one: the bits are those of the operations one by one, and where somebody sees
what happens between them they run one by one."""

from __future__ import annotations

import fp8kit_torch as ft
import pytest
import torch
from fp8kit_torch import chains, transformer

from fp8kit.errors import ArgumentError, AutogradError, Fp8kitError, ShapeError
from fp8kit.execution.chain import ChainSpec, chain
from fp8kit.formats import float32
from fp8kit.ops.dropout_add import AddSpec, DropoutAddSpec
from fp8kit.spec import Meta
from fp8kit.testing import sum_slack
from tests.support.combinations import combinations
from tests.support.tensors import assert_tensor_close, largest

from .twins import RECIPES, bits, scope

WIDTH = 48
OPTIONS = {
    "plain": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "dropout": {},
    "paths": {"drop_path_rate": 0.4},
    "parallel": {"parallel_attention_mlp": True},
    "post_norm": {"apply_residual_connection_post_layernorm": True},
    "llama": {"normalization": "RMSNorm", "bias": False, "activation": "swiglu"},
    "groups": {"num_gqa_groups": 2, "attn_input_format": "bshd"},
    "bfloat16": {"params_dtype": torch.bfloat16},
}


@pytest.fixture
def counted(monkeypatch):
    """The chains that run: the operations of each."""
    found = []

    def run(layer, calls):
        found.append([call.operation.name for call in calls])
        return chains.run_chain(layer, calls)

    monkeypatch.setattr(transformer, "run_chain", run)
    return found


def layer_of(device, options):
    torch.manual_seed(3)
    return ft.TransformerLayer(WIDTH, 64, 4, device=device, **options)


def results(layer, recipe, device, steps=3, trained=True, state=True):
    """Outputs, gradients and state of some steps."""
    torch.manual_seed(7)
    dtype = next(layer.parameters()).dtype
    found = []
    for _ in range(steps):
        x = torch.randn(8, 3, WIDTH, device=device, dtype=dtype, requires_grad=trained)
        with scope(ft, recipe):
            y = layer(x)
        y.backward(torch.randn_like(y))
        found += [y, x.grad if trained else x]
    found += [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]
    for module in layer.modules() if state else ():
        for own in getattr(module, "fp8_meta", {}).values():
            found += own.parts
    return [bits(array) for array in found]


@combinations({"options": list(OPTIONS), "recipe": list(RECIPES)})
def test_same_bits(options, recipe, device, counted, monkeypatch):
    as_one = results(layer_of(device, OPTIONS[options]), RECIPES[recipe], device)
    assert len(counted) == 3
    monkeypatch.setattr(transformer, "LARGE", 0)
    one_by_one = results(layer_of(device, OPTIONS[options]), RECIPES[recipe], device)
    assert len(counted) == 3
    assert len(as_one) == len(one_by_one)
    assert all((got == want).all() for got, want in zip(as_one, one_by_one, strict=True))


def test_lengths_and_operations_that_change(device, counted, monkeypatch):
    """Sizes and the number of operations differ from call to call; each call records into the layer's state,
    which a state loaded in between replaces."""

    def run():
        layer = layer_of(device, {"attention_dropout": 0.0})
        saved, found = None, []
        for length, training in [(8, True), (5, False), (8, False), (8, True), (3, True), (5, False)]:
            layer.train(training)
            if length == 3:
                layer.load_state_dict(saved)
            torch.manual_seed(length)
            x = torch.randn(length, 3, WIDTH, device=device, requires_grad=True)
            with ft.autocast(recipe=RECIPES["delayed"]):
                y = layer(x)
            y.backward(torch.randn_like(y))
            saved = saved or {name: value.clone() for name, value in layer.state_dict().items()}
            found += [bits(y), bits(x.grad)]
            for module in layer.modules():
                for own in getattr(module, "fp8_meta", {}).values():
                    found += map(bits, own.parts)
        return found

    as_one = run()
    assert {len(names) for names in counted} == {4, 6}
    monkeypatch.setattr(transformer, "LARGE", 0)
    one_by_one = run()
    assert len(counted) == 6
    assert len(as_one) == len(one_by_one)
    assert all((got == want).all() for got, want in zip(as_one, one_by_one, strict=True))


TRAINED = [
    ("proj", "fc1"),
    ("layernorm_mlp.layer_norm",),
    ("layernorm_qkv.layer_norm", "layernorm_mlp.layer_norm"),
    ("qkv.query_weight",),
    ("bias",),
    ("fc2_bias",),
]


@combinations(
    {
        "names": {"-".join(names): names for names in TRAINED},
        "options": ["plain", "dropout", "parallel"],
        "recipe": ["high", "delayed", "block"],
    }
)
def test_frozen_parameters(names, options, recipe, device, counted, monkeypatch):
    """Outputs and gradients; the amax of a gradient that nobody wants is not taken in a chain."""

    def frozen():
        layer = layer_of(device, OPTIONS[options])
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(any(part in name for part in names))
        found = results(layer, RECIPES[recipe], device, steps=1, trained=False, state=False)
        assert len(found) > 2
        return found

    as_one = frozen()
    monkeypatch.setattr(transformer, "LARGE", 0)
    assert len(counted) == 1
    assert all((got == want).all() for got, want in zip(as_one, frozen(), strict=True))


def test_angles(device, counted, monkeypatch):
    """Queries and keys are rotated in a chain where they lie in one tensor."""
    angles = ft.RotaryPositionEmbedding(WIDTH // 4)(8).to(device)

    def run():
        layer = layer_of(device, OPTIONS["plain"])
        x = torch.linspace(-2, 2, 8 * 3 * WIDTH, device=device).reshape(8, 3, WIDTH).requires_grad_()
        with ft.autocast():
            y = layer(x, rotary_pos_emb=angles)
        y.square().sum().backward()
        return bits(y), bits(x.grad)

    as_one = run()
    assert counted == [["norm_linear", "rope", "attention", "linear", "norm_mlp"]]
    monkeypatch.setattr(transformer, "LARGE", 0)
    assert all((got == want).all() for got, want in zip(as_one, run(), strict=True))


def test_packed_sequences(device, counted, monkeypatch):
    """cu_seqlens reach the attention in a chain."""
    starts = torch.tensor([0, 5, 8, 12], dtype=torch.int32, device=device)
    options = {"attn_input_format": "thd", "self_attn_mask_type": "padding_causal", "hidden_dropout": 0.0}

    def run():
        layer = layer_of(device, options | {"attention_dropout": 0.0})
        x = torch.linspace(-2, 2, 12 * WIDTH, device=device).reshape(12, WIDTH).requires_grad_()
        with ft.autocast():
            y = layer(x, cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=5, max_seqlen_kv=5)
        y.square().sum().backward()
        return bits(y), bits(x.grad)

    as_one = run()
    monkeypatch.setattr(transformer, "LARGE", 0)
    assert len(counted) == 1
    assert all((got == want).all() for got, want in zip(as_one, run(), strict=True))


def _calibrated(layer, x):
    with ft.autocast(enabled=False, calibrating=True):
        layer(x)


def _hooked(layer, x):
    seen = []
    layer.self_attention.proj.register_forward_hook(lambda module, args, y: seen.append(y))
    layer(x)
    assert type(seen[0]) is torch.Tensor


def _full_backward_hook(layer, x):
    seen = []
    layer.layernorm_mlp.register_full_backward_hook(lambda module, into, out: seen.append(out))
    layer(x.requires_grad_()).sum().backward()
    assert seen


def _replaced(layer, x):
    class Own(ft.LayerNormMLP):
        pass

    layer.layernorm_mlp = Own(WIDTH, 64, device=x.device)
    layer(x)


def _autocast(layer, x):
    with torch.autocast(x.device.type, torch.bfloat16):
        assert layer(x).dtype is torch.bfloat16


def _checkpointed(layer, x):
    ft.checkpoint(layer, x.requires_grad_(), use_reentrant=False).sum().backward()


def _everywhere(layer, x):
    handle = torch.nn.modules.module.register_module_forward_pre_hook(lambda module, args: None)
    try:
        layer(x)
    finally:
        handle.remove()


def _compiled(layer, x):
    layer.layernorm_mlp.compile(backend="eager")
    with torch.no_grad():
        layer(x)


def _class_patched(layer, x):
    """As tracers do."""
    plain, seen = ft.LayerNormMLP.forward, []
    try:
        ft.LayerNormMLP.forward = lambda self, x, **options: seen.append(x.shape) or plain(self, x, **options)
        layer(x)
    finally:
        del ft.LayerNormMLP.forward
    assert seen == [x.shape]


def _micro_batches(layer, x):
    with ft.autocast():
        layer(x, is_first_microbatch=True)


def _main_grads(layer, x):
    layer.layernorm_mlp.fuse_wgrad_accumulation = True
    for parameter in (layer.layernorm_mlp.fc1_weight, layer.layernorm_mlp.fc2_weight):
        parameter.main_grad = torch.zeros_like(parameter)
    layer(x).sum().backward()


@pytest.mark.parametrize(
    "use",
    [
        _calibrated,
        _hooked,
        _full_backward_hook,
        _replaced,
        _autocast,
        _checkpointed,
        _everywhere,
        _compiled,
        _class_patched,
        _micro_batches,
        _main_grads,
    ],
)
def test_one_by_one_where_somebody_looks(use, device, counted):
    use(layer_of(device, {}), torch.randn(8, 3, WIDTH, device=device))
    assert counted == []


@pytest.mark.parametrize("length", [1, 2, 3, 8])
@pytest.mark.parametrize("part", ["self_attention", "layernorm_mlp"])
def test_a_hook_may_return_y_alone(part, length, device):
    """The residual stream is x then, whose gradient is the same sum."""
    x, found = torch.randn(length, 2, WIDTH, device=device), []
    for hook in (
        lambda module, args, out: type(out)(out.y * 1.0, *out[1:]),
        lambda module, args, out: out.y * 1.0,
    ):
        layer, own = layer_of(device, OPTIONS["plain"]), x.clone().requires_grad_()
        getattr(layer, part).register_forward_hook(hook)
        y = layer(own)
        y.square().sum().backward()
        found.append((y, own.grad))
    assert found[1][0].shape == x.shape
    assert torch.equal(found[0][0], found[1][0])
    assert_tensor_close("dx", found[0][1], found[1][1], sum_slack(1 + largest(found[0][1]), 12))


@pytest.mark.parametrize("value", [(1,), (1, 2), "y"], ids=str)
def test_a_hook_that_returns_something_else_is_refused(value, device):
    layer = layer_of(device, {})
    layer.self_attention.register_forward_hook(lambda module, args, out: value)
    with pytest.raises(ArgumentError, match=r"TransformerLayer: output of a part: got \w+ from a hook"):
        layer(torch.randn(4, 2, WIDTH, device=device))


def test_refusals_name_what_the_user_calls_it(device, counted):
    layer, x = layer_of(device, {}), torch.randn(8, 3, WIDTH, device=device)
    with pytest.raises(Fp8kitError, match=r"TransformerLayer: hidden_states: got a tensor of torch.vmap"):
        torch.vmap(layer, randomness="same")(x[None])
    layer.self_attention.proj.weight = torch.nn.Parameter(torch.zeros(5, WIDTH, device=device))
    with pytest.raises(ShapeError, match=r"TransformerLayer: weight: got shape \(5, 48\)"):
        layer(x)


def test_without_gradients(device, counted):
    layer = layer_of(device, {}).eval()
    x = torch.randn(8, 3, WIDTH, device=device)
    with torch.no_grad(), ft.autocast():
        first = layer(x)
    with ft.autocast():
        assert bits(layer(x)).tobytes() == bits(first).tobytes()
    assert counted == [["norm_linear", "attention", "linear", "norm_mlp"]] * 2


def test_a_gradient_that_is_an_output_of_another_operation():
    """The gradient of an input of the chain cannot be the cotangent of what lies between: nobody owns it."""
    x = Meta((4, 8), float32)
    spec = ChainSpec(
        ("add", "dropout_add"), (AddSpec(), DropoutAddSpec(8, 0.0, True)), ((), (("x", 0, "y"),))
    )
    metas = {"0.a": x, "0.b": x, "1.residual": x}
    chain.infer(spec, metas, frozenset())
    with pytest.raises(AutogradError, match=r"0\.a"):
        chain.infer(spec, metas, frozenset({"0.a"}))


def test_micro_batches_of_a_capture_run_one_by_one(counted):
    """Parts whose casts micro-batches share take their inputs themselves, as ``is_first_microbatch`` does."""
    torch.manual_seed(0)
    layer = ft.TransformerLayer(WIDTH, 96, 2, hidden_dropout=0.0, attention_dropout=0.0, device="cpu")
    x = torch.randn(4, 2, WIDTH)
    with ft.autocast(recipe=ft.recipe.Float8CurrentScaling()):
        wanted = layer(x, is_first_microbatch=True)
        for part in layer.modules():
            part.microbatch = True
        found = layer(x)
    assert not counted
    assert torch.equal(found, wanted)
