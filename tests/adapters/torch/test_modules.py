"""A torch module's arguments, errors, dtypes and gradients."""

from __future__ import annotations

import fp8kit_torch as ft
import pytest
import torch
from fp8kit_torch.availability import want_fp8
from fp8kit_torch.bound import TorchOp

from fp8kit.errors import BackendError, FormatError, Fp8kitError, ShapeError
from fp8kit.ops.linear import LinearSpec
from fp8kit.ops.product import ProductSpec
from tests.support.tensors import assert_tensor_close, largest

from .twins import RECIPES, WIDTH, batches, numpy_of, same, scope, torch_step, twins


@pytest.mark.parametrize("scaled", [False, True], ids=["high", "fp8"])
def test_wrong_input_is_refused_before_anything_runs(device, scaled):
    layer = ft.Linear(WIDTH, 56, device=device)
    with ft.autocast(enabled=scaled, recipe=RECIPES["delayed"]):
        with pytest.raises(
            ShapeError, match=r"Linear: inp: got shape \(4, 47\), expected a last dimension of 48"
        ):
            layer(torch.ones(4, 47, device=device))
        with pytest.raises(
            FormatError, match=r"Linear: inp: got float16, expected float32, as weight: cast inp"
        ):
            layer(torch.ones(4, WIDTH, device=device, dtype=torch.float16))
        with pytest.raises(FormatError, match=r"got (torch\.)?complex64, expected"):
            layer(torch.ones(4, WIDTH, device=device, dtype=torch.complex64))
        with pytest.raises(Fp8kitError, match=r"expected a torch\.Tensor"):
            layer([1.0])
        with pytest.raises(BackendError, match="device meta"):
            layer(torch.ones(4, WIDTH, device="meta"))
    assert all(not state.amax_history.any() for state in layer.fp8_meta.values())


@pytest.fixture
def nothing_runs(monkeypatch):
    """From the call of what it gives on, an operation that runs is an error."""

    def run(*arguments):
        raise AssertionError("an operation ran")

    def start():
        for name in ("call", "call_backward"):
            monkeypatch.setattr(TorchOp, name, run)

    return start


@pytest.mark.parametrize("first", [None, True])
@pytest.mark.parametrize("recipe", ["high", "delayed", "current", "block"])
@pytest.mark.parametrize("place", ["meta", pytest.param("cpu", marks=pytest.mark.gpu)])
def test_a_tensor_of_another_device(place, recipe, first, nothing_runs):
    device = "cpu" if place == "meta" else "cuda"
    layer = ft.LayerNormMLP(WIDTH, 56, device=device)
    for x in batches(device, steps=2):
        torch_step(layer, layer, RECIPES[recipe], x)
    before = {name: [part.clone() for part in state.parts] for name, state in layer.fp8_meta.items()}
    nothing_runs()
    moved = rf"inp: got device {place}, expected device {device}.*, as layer_norm_weight: move inp"
    with pytest.raises(BackendError, match=moved), scope(ft, RECIPES[recipe]):
        layer(torch.ones(4, WIDTH, device=place), is_first_microbatch=first)
    with (
        pytest.raises(FormatError, match=r"inp: got float16, expected float32, as layer_norm_weight: cast"),
        scope(ft, RECIPES[recipe]),
    ):
        layer(torch.ones(4, WIDTH, dtype=torch.float16, device=device), is_first_microbatch=first)
    for name, parts in before.items():
        for got, want in zip(layer.fp8_meta[name].parts, parts, strict=True):
            same(got, want, name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"self_attn_mask_type": "caucal"},
            r"attn_mask_type: got 'caucal', expected one of 'no_mask', 'causal',",
        ),
        ({"window_size": (2,)}, r"window_size: got \(2,\), expected \(left, right\)"),
        (
            {"core_attention_bias_type": "scale"},
            r"core_attention_bias_type: got 'scale', expected one of no_bias,",
        ),
        (
            {"encoder_output": torch.zeros(5, 3, WIDTH)},
            r"encoder_output: got a tensor, expected None with layer_type 'encoder'",
        ),
    ],
    ids=["mask type", "window", "bias", "encoder"],
)
def test_wrong_options_of_a_layer_are_refused_before_anything_runs(device, options, message, nothing_runs):
    layer = ft.TransformerLayer(WIDTH, 64, 4, device=device)
    x = torch.randn(5, 3, WIDTH, device=device)
    nothing_runs()
    with pytest.raises(Fp8kitError, match=message), ft.autocast(recipe=RECIPES["delayed"]):
        layer(x, **options)
    assert not layer.layernorm_mlp.fp8_meta
    assert not layer.self_attention.layernorm_qkv.fp8_meta


def test_an_unknown_mask_type_in_a_constructor():
    with pytest.raises(Fp8kitError, match="attn_mask_type: got 'caucal', expected one of"):
        ft.TransformerLayer(WIDTH, 64, 4, self_attn_mask_type="caucal", device="cpu")


@pytest.mark.parametrize(("recipe", "have", "least"), [("delayed", (7, 5), "8.0"), ("block", (7, 0), "8.0")])
def test_a_gpu_without_fp8(monkeypatch, recipe, have, least):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: have)
    spec = LinearSpec(ProductSpec(16, (24,), fp8=RECIPES[recipe].quantization))
    with pytest.raises(
        BackendError,
        match=rf"linear: device: got cuda:0 of compute capability {have[0]}.{have[1]}, expected {least}",
    ):
        want_fp8("linear", spec, torch.device("cuda", 0))
    want_fp8("linear", spec, torch.device("cpu"))
    want_fp8("linear", LinearSpec(ProductSpec(16, (24,))), torch.device("cuda", 0))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["delayed", "block"])
def test_a_gpu_without_fp8_runs_nothing(monkeypatch, recipe, nothing_runs):
    layer, x = ft.TransformerLayer(WIDTH, 64, 4, device="cuda"), torch.randn(5, 3, WIDTH, device="cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    nothing_runs()
    with pytest.raises(BackendError, match=r"compute capability 7\.5"), ft.autocast(recipe=RECIPES[recipe]):
        layer(x)


@pytest.mark.parametrize("kind", [ft.LayerNorm, ft.RMSNorm])
@pytest.mark.parametrize("neutral", [None, False, True])
def test_norms_take_any_sequence_parallel(kind, neutral):
    """Transformer Engine's default is None, programs pass False."""
    x = torch.randn(3, WIDTH)
    same(kind(WIDTH, sequence_parallel=neutral, device="cpu")(x), kind(WIDTH, device="cpu")(x), "y")


@pytest.mark.parametrize(("inner", "outer"), [("bfloat16", "float32"), ("float32", "bfloat16")])
@pytest.mark.parametrize("kind", [ft.LayerNorm, ft.RMSNorm, ft.ops.RMSNorm])
def test_norms_compute_in_the_parameters_dtype(device, kind, inner, outer):
    """A residual stream in float32 around 16-bit norms, and float32 norms in a 16-bit model; gradients have
    each their own dtype. Within torch.autocast its dtype counts."""
    inner, outer = getattr(torch, inner), getattr(torch, outer)
    norm = kind(WIDTH, device=device).to(inner)
    drawn = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)).to(device, outer)
    x, y = (drawn.clone().requires_grad_() for _ in range(2))
    got, want = norm(x), norm(y.to(inner))
    same(got, want, "y")
    (given,) = torch.autograd.grad(got.float().square().sum(), x)
    (wanted,) = torch.autograd.grad(want.float().square().sum(), y)
    assert given.dtype is outer
    same(given, wanted, "dx")
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        same(norm(x), norm.to(torch.bfloat16)(x.bfloat16()), "within autocast")
    with pytest.raises(FormatError, match=r"inp: got float64"):
        norm(x.double())


def test_unknown_arguments():
    with pytest.raises(TypeError, match="keyword argument 'outfeatures'; did you mean out_features"):
        ft.Linear(8, 8, outfeatures=3)
    with pytest.raises(TypeError, match=r"^TransformerLayer.* 'dropout'; did you mean hidden_dropout\?$"):
        ft.TransformerLayer(8, 8, 1, dropout=0.1)
    with pytest.raises(TypeError, match="argument 'dtype'; did you mean params_dtype"):
        ft.Linear(8, 8, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"^Linear.forward\(\) got an unexpected keyword argument 'first'"):
        ft.Linear(8, 8, device="cpu")(torch.ones(2, 8), first=True)
    with pytest.raises(Fp8kitError, match=r"activation: got 'swish', .*; did you mean silu"):
        ft.LayerNormMLP(8, 8, activation="swish")
    with pytest.raises(Fp8kitError, match=r"normalization: got 'rmsnorm', .*; did you mean RMSNorm"):
        ft.LayerNormLinear(8, 8, normalization="rmsnorm")
    with pytest.raises(AttributeError, match=r"'Sequential'; torch.nn.Sequential is torch's own"):
        _ = ft.Sequential
    with pytest.raises(Fp8kitError, match="in_features"):
        ft.Linear(0, 8)


def test_recipes_can_be_imported_by_transformer_engines_paths():
    from fp8kit_torch.common.recipe import Format
    from fp8kit_torch.recipe import DelayedScaling

    assert (DelayedScaling, Format) == (ft.recipe.DelayedScaling, ft.common.recipe.Format)


def test_names_of_parameters():
    layer = ft.TransformerLayer(WIDTH, 64, 4, device="cpu")
    names = {name for name, _ in layer.named_parameters()}
    qkv = {
        f"layernorm_qkv.{part}_{what}" for part in ("query", "key", "value") for what in ("weight", "bias")
    }
    own = {
        *qkv,
        "layernorm_qkv.layer_norm_weight",
        "layernorm_qkv.layer_norm_bias",
        "proj.weight",
        "proj.bias",
    }
    mlp = {"layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"}
    assert names == {f"self_attention.{n}" for n in own} | {f"layernorm_mlp.{n}" for n in mlp}


def test_return_bias(device):
    ours, _ = twins("Linear", device, return_bias=True)
    x = torch.randn(4, WIDTH, device=device)
    y, bias = ours(x)
    assert bias is ours.bias
    want = ft.Linear(WIDTH, 56, bias=False, device=device)
    want.load_state_dict({"weight": ours.weight})
    same(y, want(x), "y without bias")


def test_no_gradient_where_none_is_wanted(device):
    ours, _ = twins("LayerNormMLP", device)
    full = torch_step(ours, ours, RECIPES["current"], x := torch.randn(4, WIDTH, device=device))
    ours.fc1_weight.requires_grad_(False)
    part = torch_step(ours, ours, RECIPES["current"], x, full[-1])
    assert ours.fc1_weight.grad is None
    same(part[1], full[1], "dx")
    same(part[2]["fc2_weight"], full[2]["fc2_weight"], "fc2")
    for p in ours.parameters():
        p.requires_grad_(False)
    with ft.autocast(recipe=RECIPES["current"]):
        assert not ours(x).requires_grad


def test_not_contiguous(device):
    ours, _ = twins("Linear", device)
    x = torch.randn(WIDTH, 6, device=device).t()
    same(ours(x), ours(x.contiguous()), "y")
    y = ours(x)
    y.backward(torch.ones(1, 1, device=device).expand_as(y))
    same(ours.bias.grad, torch.full((56,), 6.0), "db")


def test_torch_autocast(device):
    ours, _ = twins("TransformerLayer", device)
    lower = ft.TransformerLayer(
        WIDTH,
        64,
        4,
        num_gqa_groups=2,
        hidden_dropout=0,
        attention_dropout=0,
        device=device,
        params_dtype=torch.bfloat16,
    )
    lower.load_state_dict(ours.state_dict())
    x = torch.randn(5, 3, WIDTH, device=device)
    with torch.autocast(device, torch.bfloat16):
        y = ours(x)
    assert y.dtype == torch.bfloat16
    same(y, lower(x.bfloat16()), "y")
    y.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in ours.parameters())


@pytest.mark.parametrize("recipe", ["high", "delayed"])
def test_main_grad(device, recipe):
    ours, _ = twins("LayerNormMLP", device, fuse_wgrad_accumulation=False)
    fused = ft.LayerNormMLP(WIDTH, 40, fuse_wgrad_accumulation=True, device=device)
    fused.load_state_dict(ours.state_dict())
    x = torch.randn(4, WIDTH, device=device)
    with pytest.raises(Fp8kitError, match="main_grad"):
        fused(x)
    for p in (fused.fc1_weight, fused.fc2_weight):
        p.main_grad = torch.full_like(p, 3.0)
    fused.fc2_weight.grad_added_to_main_grad = False
    want = {"fc1_weight": 0.0, "fc2_weight": 0.0}
    for first in (True, False, None):
        *_, grads, g = torch_step(ours, ours, RECIPES[recipe], x, is_first_microbatch=first)
        *_, others, _ = torch_step(fused, fused, RECIPES[recipe], x, g, is_first_microbatch=first)
        for name in want:
            want[name] = want[name] + grads[name]
            same(getattr(fused, name).main_grad, want[name], (name, first))
        same(others["fc1_bias"], grads["fc1_bias"], "bias")
    assert fused.fc1_weight.grad is None
    assert fused.fc2_weight.grad_added_to_main_grad
    assert not fused.fc2_weight.grad.any()


@pytest.mark.parametrize("recipe", ["high", "delayed", "current", "block"])
@pytest.mark.parametrize("lower", [False, True], ids=["bfloat16", "autocast"])
def test_main_grad_is_not_rounded_on_its_way(device, recipe, lower):
    """float32 sums of products of bfloat16 operands: what float32 operands of the same values give, added in
    float32."""
    dtype = torch.float32 if lower else torch.bfloat16
    fused = ft.LayerNormLinear(WIDTH, 64, fuse_wgrad_accumulation=True, params_dtype=dtype, device=device)
    other = ft.LayerNormLinear(WIDTH, 64, params_dtype=dtype, device=device)
    other.load_state_dict(fused.state_dict())
    start = torch.randn(64, WIDTH, device=device) * 2.0**-20
    fused.weight.main_grad = start.clone()
    x, g = torch.randn(24, WIDTH, device=device).to(dtype), torch.randn(24, 64, device=device).bfloat16()
    with torch.autocast(device, torch.bfloat16, enabled=lower), scope(ft, RECIPES[recipe]):
        y, z = fused(x), other(x)
    y.backward(g)
    z.backward(g)
    assert fused.weight.grad is None
    found, rounded = fused.weight.main_grad - start, other.weight.grad.float()
    assert not torch.equal(found, found.bfloat16().float())  # it was never of 16 bits
    # one rounding to bfloat16, of which 2^-8 is the step, and float32's of adding what start is
    assert_tensor_close("dw", found, rounded, 2.0**-8 * rounded.abs() + 2.0**-23 * largest(start, rounded))


def test_main_grad_that_does_not_fit(device):
    layer, x = (
        ft.Linear(WIDTH, 56, fuse_wgrad_accumulation=True, device=device),
        torch.randn(4, WIDTH, device=device),
    )
    for wrong in (
        torch.zeros(56, WIDTH, device=device, dtype=torch.float16),
        torch.zeros(WIDTH, 56, device=device).t(),
    ):
        layer.weight.main_grad = wrong
        with pytest.raises(
            Fp8kitError, match=r"weight0\.main_grad: got .*, expected contiguous torch\.float32 \(56, 48\)"
        ):
            layer(x)
    layer.weight.main_grad = torch.zeros(56, WIDTH, device=device)
    y = layer(x)
    layer.weight.main_grad = torch.zeros(56, WIDTH, device=device, dtype=torch.bfloat16)
    with pytest.raises(FormatError, match=r"main_grad: weight0: got torch\.bfloat16 \(56, 48\) at backward"):
        y.sum().backward()
    layer.weight.requires_grad_(False)
    del layer.weight.main_grad
    layer(x).sum().backward()
    same(layer.bias.grad, torch.full((56,), 4.0), "bias")


def test_cuda_without_cuda_is_one_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    makes = {
        "Linear": lambda: ft.Linear(8, 8, device="cuda"),
        "LayerNorm": lambda: ft.LayerNorm(8, device="cuda"),
        "GroupedLinear": lambda: ft.GroupedLinear(2, 8, 8, device="cuda:1"),
        "RotaryPositionEmbedding": lambda: ft.RotaryPositionEmbedding(8, device="cuda"),
        "InferenceParams": lambda: ft.InferenceParams(2, 8, device="cuda"),
        "TransformerLayer": lambda: ft.TransformerLayer(16, 16, 2, device="cuda"),
    }
    for name, make in makes.items():
        with pytest.raises(
            BackendError,
            match=rf"^{name}: device: got cuda.*, expected another device, since .* device=\"cpu\"",
        ):
            make()


def test_sequential_and_a_training_loop(device):
    model = torch.nn.Sequential(
        ft.LayerNormLinear(WIDTH, 64, device=device), torch.nn.GELU(), ft.Linear(64, 4, device=device)
    )
    target, x = torch.randn(32, 4, device=device), torch.randn(32, WIDTH, device=device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        with ft.autocast(recipe=RECIPES["delayed"]):
            y = model(x)
        loss = torch.nn.functional.mse_loss(y, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_second_derivatives_are_refused(device):
    ours, _ = twins("Linear", device)
    x = torch.randn(4, WIDTH, device=device, requires_grad=True)
    # the latter's cotangent requires no gradient, and dx depends on the weight
    for made in (ours(x).square().sum(), ours(x).sum()):
        (grad,) = torch.autograd.grad(made, x, create_graph=True)
        with pytest.raises(RuntimeError, match="fp8kit_torch: double backward is not supported"):
            (made + grad.square().sum()).backward()
    # would take what is not there for zeros
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.functional.hessian(lambda x: ours(x).square().sum(), x.detach())
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.functional.jvp(ours, x.detach(), x.detach())
    (got,) = torch.autograd.grad(ours(x).sum(), ours.weight, create_graph=True)  # which alone does no harm
    same(got.detach(), torch.autograd.grad(ours(x).sum(), ours.weight)[0], "dW")


def test_fp8_autocast_takes_the_older_names():
    with ft.fp8_autocast(enabled=True, fp8_recipe=RECIPES["current"]) as scope:
        assert scope.recipe is RECIPES["current"]


def test_rope_alone(device):
    angles = ft.RotaryPositionEmbedding(8, rotary_percent=0.5, device=device)(6)
    t = torch.randn(6, 2, 3, 8, device=device, requires_grad=True)
    y = ft.apply_rotary_pos_emb(t, angles)
    a = angles[..., :2].double().cpu()
    left, right = t.double().cpu()[..., :2], t.double().cpu()[..., 2:4]
    want = torch.cat(
        [left * a.cos() - right * a.sin(), right * a.cos() + left * a.sin(), t.double().cpu()[..., 4:]], -1
    )
    # two products, a sum, and the angle's functions
    assert_tensor_close("y", y, want, 4 * 2.0**-23 * largest(t))
    assert numpy_of(torch.autograd.grad(y.sum(), t)[0]).shape == (6, 2, 3, 8)


SAID = {
    "Linear(in_features=4, out_features=8, bias=False)": lambda: ft.Linear(4, 8, bias=False, device="cpu"),
    (
        "Linear(in_features=4, out_features=8, bias=True, parameters_split={'a': 4, 'b': 4}, "
        "fuse_wgrad_accumulation=True)"
    ): lambda: ft.Linear(4, 8, parameters_split=("a", "b"), fuse_wgrad_accumulation=True, device="cpu"),
    (
        "LayerNormLinear(in_features=4, out_features=8, bias=True, normalization=RMSNorm, eps=1e-05, "
        "return_bias=True)"
    ): lambda: ft.LayerNormLinear(4, 8, normalization="RMSNorm", return_bias=True, device="cpu"),
    (
        "LayerNormMLP(hidden_size=4, ffn_hidden_size=8, bias=True, activation=swiglu, "
        "normalization=LayerNorm, eps=1e-06, checkpoint=True)"
    ): lambda: ft.LayerNormMLP(4, 8, 1e-6, activation="swiglu", checkpoint=True, device="cpu"),
    "LayerNorm(4, eps=1e-05)": lambda: ft.LayerNorm(4, device="cpu"),
    "RMSNorm(4, eps=0.001, zero_centered_gamma=True)": lambda: ft.RMSNorm(
        [4], 1e-3, zero_centered_gamma=True, device="cpu"
    ),
    "L2Normalization(eps=1e-06)": ft.L2Normalization,
    "GroupedLinear(num_gemms=2, in_features=4, out_features=8, bias=True)": lambda: ft.GroupedLinear(
        2, 4, 8, device="cpu"
    ),
    (
        "DotProductAttention(num_attention_heads=4, kv_channels=8, num_gqa_groups=2, attn_mask_type=causal, "
        "qkv_format=thd, window_size=(3, 0))"
    ): lambda: ft.DotProductAttention(4, 8, 2, qkv_format="thd", window_size=(3, 0)),
}


@pytest.mark.parametrize("said", SAID)
def test_modules_say_what_they_are(said):
    assert repr(SAID[said]()) == said


def test_layers_say_what_they_are_made_of():
    weights = (
        "LayerNormLinear(in_features=8, out_features=24, bias=True, normalization=LayerNorm, eps=1e-05, "
        "parameters_split="
    )
    core = (
        "DotProductAttention(num_attention_heads=2, kv_channels=4, num_gqa_groups=2, attn_mask_type=causal, "
        "qkv_format=sbhd)"
    )
    lines = repr(
        ft.TransformerLayer(
            8, 16, 2, hidden_dropout=0.0, attention_dropout=0.0, layer_type="decoder", device="cpu"
        )
    ).splitlines()
    assert lines[:6] == [
        "TransformerLayer(",
        "  hidden_size=8, layer_type=decoder, hidden_dropout=0.0",
        "  (self_attention): MultiheadAttention(",
        "    hidden_size=8, attention_type=self, input_layernorm=True, return_bias=True",
        f"    (layernorm_qkv): {weights}{{'query': 8, 'key': 8, 'value': 8}})",
        f"    (core_attention): {core}",
    ]
    assert lines[-2].startswith(
        "  (layernorm_mlp): LayerNormMLP(hidden_size=8, ffn_hidden_size=16, bias=True, activation=gelu, "
    )
