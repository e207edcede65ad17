"""Errors of the torch frontend call arguments what the caller calls them, and are the built-in kinds that a
caller would guess."""

from __future__ import annotations

import inspect
import warnings
from itertools import product

import fp8kit_torch as ft
import pytest
import torch
from fp8kit_torch.bound import TorchOp
from fp8kit_torch.parameters import default_device
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import fp8kit as fk
from fp8kit.arrays import Device
from fp8kit.errors import ArgumentError, BackendError, FormatError, Fp8kitError, UnsupportedError
from fp8kit.recipe import DelayedScaling
from tests.support.combinations import combinations
from tests.support.gate import GateSpec, gate
from tests.support.tensors import assert_tensor_close, largest

H, D, T = 2, 4, 5
WRONG = {"beyond": [0, 2, 9], "not_from_0": [1, 2, 5], "falling": [0, 4, 2], "negative": [0, -3, 2]}


def sums(values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("kind", WRONG)
def test_running_sums_on_the_cpu_are_looked_at(kind):
    lengths, x = sums(WRONG[kind]), torch.ones(T, H * D)
    core = ft.DotProductAttention(H, D, qkv_format="thd", attn_mask_type="padding")
    with pytest.raises(ArgumentError, match="DotProductAttention: cu_seqlens_q: got "):
        core(*[x.view(T, H, D)] * 3, cu_seqlens_q=lengths, cu_seqlens_kv=lengths)
    padded = ft.DotProductAttention(H, D, attn_mask_type="padding")
    with pytest.raises(ValueError, match="DotProductAttention: cu_seqlens_kv: got "):
        padded(*[torch.ones(T, 2, H, D)] * 3, cu_seqlens_q=sums([0, 2, 4]), cu_seqlens_kv=lengths)
    layer = ft.TransformerLayer(
        H * D, 16, H, attn_input_format="thd", self_attn_mask_type="padding", device="cpu"
    )
    with ft.autocast(), pytest.raises(ArgumentError, match="cu_seqlens_q: got "):
        layer(x, cu_seqlens_q=lengths, cu_seqlens_kv=lengths)
    assert not any(module.fp8_meta for module in layer.modules() if hasattr(module, "fp8_meta"))


def test_no_sequences_at_all():
    none = torch.zeros(0, H, D)
    core = ft.DotProductAttention(H, D, qkv_format="thd", attn_mask_type="padding")
    assert core(none, none, none, cu_seqlens_q=sums([0]), cu_seqlens_kv=sums([0])).shape == (0, H * D)


def test_names_are_the_callers():
    for call, said in (
        (
            lambda: ft.Linear(4, 6, device="cpu")(torch.ones(2, 4, dtype=torch.float64)),
            "^Linear: inp: got float64",
        ),
        (
            lambda: ft.Linear(4, 6, device="cpu")(torch.ones(2, 4).bfloat16()),
            "^Linear: inp: got bfloat16, expected float32, as weight: ",
        ),
        (
            lambda: ft.Linear(4, 6, parameters_split=("a", "b"), device="cpu")(torch.ones(2, 4).half()),
            "^Linear: inp: got float16, expected float32, as weight0",
        ),
        (
            lambda: ft.TransformerLayer(8, 16, 2, device="cpu")(torch.ones(3, 8)),
            "^TransformerLayer: hidden_states: got shape",
        ),
        (
            lambda: ft.MultiheadAttention(8, 2, qkv_format="thd", attn_mask_type="padding", device="cpu")(
                torch.ones(3, 1, 8)
            ),
            "^MultiheadAttention: hidden_states: got shape",
        ),
        (lambda: ft.DotProductAttention(2, 4, layer_number="x"), "layer_number: got 'x', expected an int"),
        (
            lambda: ft.TransformerLayer(8, 16, 2, layer_number="x"),
            "^TransformerLayer: layer_number: got 'x', expected an int",
        ),
        (
            lambda: ft.TransformerLayer(8, 16, 2, attention_dropout="x"),
            "^TransformerLayer: attention_dropout: got 'x', expected a finite",
        ),
        (
            lambda: ft.DotProductAttention(2, (4, 4, 4)),
            r"^DotProductAttention: kv_channels: got \(4, 4, 4\), expected an int, or two",
        ),
        (
            lambda: ft.DotProductAttention(2, 4, softmax_scale="x"),
            "^DotProductAttention: softmax_scale: got 'x', expected a finite",
        ),
        (
            lambda: ft.Linear(4, 6, device="foo"),
            '^Linear: device: got \'foo\', expected a device of torch, such as "cpu" or "cuda:1"',
        ),
        (lambda: ft.Linear(4, 6, params_dtype="bfloat16"), "such as torch.bfloat16$"),
        (lambda: ft.Linear(4, 6, name=3), "^Linear: name: got 3, expected a string"),
        (
            lambda: ft.InferenceParams(2, 8, dtype="foo"),
            "^InferenceParams: dtype: got 'foo', expected a torch.dtype",
        ),
        (
            lambda: ft.parallel_cross_entropy(torch.zeros(2, 3), torch.tensor([0, 7])),
            "targets: got 7 among them",
        ),
    ):
        with pytest.raises(Fp8kitError, match=said):
            call()
        with pytest.raises(ValueError, match=said):
            call()


# what errors call a layer's input, where that is not inp
INPUTS = {"TransformerLayer": "hidden_states"}
LAYERS = {  # name -> (what makes it, the shape of its input, its first parameter, further arguments)
    "Linear": (lambda: ft.Linear(32, 48, device="cpu"), (4, 32), "weight", ()),
    "LayerNorm": (lambda: ft.LayerNorm(32, device="cpu"), (4, 32), "weight", ()),
    "LayerNormMLP": (lambda: ft.LayerNormMLP(32, 48, device="cpu"), (4, 32), "layer_norm_weight", ()),
    "GroupedLinear": (lambda: ft.GroupedLinear(2, 32, 48, device="cpu"), (4, 32), "weight0", ([2, 2],)),
    "TransformerLayer": (
        lambda: ft.TransformerLayer(32, 64, 4, device="cpu"),
        (4, 2, 32),
        "layernorm_qkv.layer_norm_weight",
        (),
    ),
}
CAST = ("LayerNorm",)  # those that cast an input to the parameters' dtype


@pytest.mark.parametrize("first", [None, True])
@pytest.mark.parametrize("recipe", [None, DelayedScaling()], ids=["high", "fp8"])
@pytest.mark.parametrize("name", LAYERS)
def test_an_input_unlike_the_parameters_is_told_what_helps(name, recipe, first, monkeypatch):
    """Of another dtype, on another device, and a module that is deferred still; what the message says is
    done, and then it runs."""
    make, shape, parameter, more = LAYERS[name]
    inp = INPUTS.get(name, "inp")
    options = {} if name == "LayerNorm" else {"is_first_microbatch": first}

    def call(module, x):
        with ft.autocast(enabled=recipe is not None, recipe=recipe):
            return module(x, *more, **options)

    layer, x = make(), torch.randn(shape)
    with monkeypatch.context() as patched:
        patched.setattr(TorchOp, "call", lambda *args: pytest.fail("an operation ran"))
        told = pytest.raises(
            FormatError,
            match=rf"^{name}: {inp}: got bfloat16, expected float32, as {parameter}: cast {inp}, with "
            r"\.to\(torch\.float32\), or the module, with \.to\(torch\.bfloat16\), .* torch\.autocast$",
        )
        if name not in CAST:
            with told:
                call(layer, x.bfloat16())
        with pytest.raises(FormatError, match=rf"^{name}: {inp}: got float64, expected float32"):
            call(layer, x.double())
        with pytest.raises(
            BackendError,
            match=rf"^{name}: {inp}: got device meta, expected device cpu, as {parameter}: move {inp}, with ",
        ):
            call(layer, x.to("meta"))
        with pytest.raises(
            BackendError,
            match=rf"^{name}: {parameter}: got device meta, expected device cpu, as {inp}: .* reset_param",
        ):
            call(make().to("meta"), x)
        with pytest.raises(FormatError, match=rf"^{name}: \w+: got device meta, expected cpu or cuda$"):
            call(make().to("meta"), x.to("meta"))
    assert call(layer, x.bfloat16().to(torch.float32)).dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert call(layer, x).dtype is torch.bfloat16
    assert call(layer.to(torch.bfloat16), x.bfloat16()).dtype is torch.bfloat16


@combinations({"name": [name for name in LAYERS if name not in CAST]}, usual=["LayerNormMLP"])
def test_compiled_it_is_told_the_same(name):
    make, shape, parameter, more = LAYERS[name]
    parameter = parameter.rpartition(".")[2]  # the parts are traced one after the other
    with pytest.raises(
        Exception, match=rf": inp: got bfloat16, expected float32, as {parameter}: cast inp, with "
    ):
        torch.compile(make(), fullgraph=True, backend="aot_eager")(torch.randn(shape).bfloat16(), *more)


@pytest.mark.parametrize("recipe", [None, DelayedScaling()])
def test_tensors_without_memory_are_refused(recipe):
    """What torch traces with stands for values that are nowhere: reading them would end the process."""
    real = ft.Linear(32, 32, device="cpu")
    for _ in range(2):  # also where the plan is known already
        with (
            warnings.catch_warnings(),
            FakeTensorMode(),
            ft.autocast(enabled=recipe is not None, recipe=recipe),
        ):
            warnings.simplefilter("ignore")  # torch's own, about the address, which it gives once a process
            layer = ft.Linear(32, 32, device="cpu")
            with pytest.raises(FormatError, match="inp: got a FakeTensor without memory"):
                layer(torch.randn(16, 32))
        with ft.autocast(enabled=recipe is not None, recipe=recipe):
            assert real(torch.randn(16, 32)).isfinite().all()
    assert real(torch.randn(0, 32)).shape == (0, 32)


def _dual(run, x):
    with forward_ad.dual_level():
        return run(forward_ad.make_dual(x, x))


# transform of a function at x -> what its tensors are called, and what helps
TRANSFORMS = {
    "grad": (lambda run, x: torch.func.grad(lambda x: run(x).sum())(x), "grad, vjp or jacrev", "y.backward"),
    "vjp": (lambda run, x: torch.func.vjp(run, x), "grad, vjp or jacrev", "y.backward"),
    "jacrev": (lambda run, x: torch.func.jacrev(run)(x), "grad, vjp or jacrev", "torch.autograd.grad"),
    "hessian": (lambda run, x: torch.func.hessian(run)(x), "grad, vjp or jacrev", "y.backward"),
    "jvp": (lambda run, x: torch.func.jvp(run, (x,), (x,)), "jvp or jacfwd", "reverse mode"),
    "jacfwd": (lambda run, x: torch.func.jacfwd(run)(x), "jvp or jacfwd", "reverse mode"),
    "vmap": (lambda run, x: torch.vmap(run)(x[None]), "vmap", "the whole batch in one call"),
    "functionalize": (lambda run, x: torch.func.functionalize(run)(x), "functionalize", "outside of it"),
    "forward mode": (_dual, "forward_ad", "reverse mode"),
    "linearize": (lambda run, x: torch.func.linearize(run, x), "forward_ad", "reverse mode"),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is")  # torch's own, in forward mode
@pytest.mark.parametrize("what", ["layer", "frozen", "operation"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_functions_are_named(name, what):
    """Forward mode too where nothing requires a gradient: its tangents would be dropped without a word."""
    layer, slope = ft.Linear(16, 16, device="cpu"), torch.ones(16)
    run = {
        "layer": layer,
        "frozen": layer.requires_grad_(what == "layer"),
        "operation": lambda x: ft.apply(gate, GateSpec(16), {"x": x, "slope": slope})["y"],
    }[what]
    transform, called, helps = TRANSFORMS[name]
    with pytest.raises(UnsupportedError, match=f": got a tensor of torch.*{called}, expected .*{helps}"):
        transform(run, torch.randn(4, 16))


DELAYED = {
    "Linear": lambda: ft.Linear(16, 16, device="cpu"),
    "LayerNormMLP": lambda: ft.LayerNormMLP(16, 32, device="cpu"),
    "TransformerLayer": lambda: ft.TransformerLayer(
        16, 32, 2, hidden_dropout=0.0, attention_dropout=0.0, device="cpu"
    ),
    "converted": lambda: ft.convert(torch.nn.Sequential(torch.nn.Linear(16, 16))),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is")  # torch's own, in forward mode
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
@pytest.mark.parametrize(
    ("kind", "name"), [*product(["Linear"], TRANSFORMS), *product([*DELAYED][1:], ["grad", "functionalize"])]
)
def test_a_transform_leaves_the_state_of_delayed_scaling_alone(name, kind, used):
    """Made within one it would be the transform's, of no use afterwards."""
    layer, x = DELAYED[kind](), torch.randn(4, 16) if kind != "TransformerLayer" else torch.randn(4, 2, 16)
    transform, called, helps = TRANSFORMS[name]

    def run(x):
        with ft.autocast(recipe=ft.recipe.DelayedScaling()):
            return layer(x)

    if used:
        run(x).sum().backward()
    with pytest.raises(UnsupportedError, match=f"(within|a tensor of) torch.*{called}, expected .*{helps}"):
        transform(run, x)
    y = run(x)
    y.sum().backward()
    assert y.isfinite().all()
    assert all(p.grad is not None for p in layer.parameters())


def test_several_gradients_at_once_are_refused():
    x = torch.randn(4, 16, requires_grad=True)
    y = ft.Linear(16, 16, device="cpu")(x)
    words = "the gradient of y: got a tensor of torch.vmap, expected one gradient at a time"
    with pytest.raises(UnsupportedError, match=words):
        torch.autograd.grad(y, x, torch.ones(2, 4, 16), is_grads_batched=True)


def test_what_only_the_native_frontend_looks_for_is_refused():
    with pytest.raises(TypeError, match="check_finite"):
        ft.autocast(check_finite=True)


@pytest.mark.parametrize("wrong", ["grad", "dtype"])
def test_a_refused_first_step_makes_no_caches(wrong):
    """They would have the refused call's dtype, which the next call's would have to be."""
    params = ft.InferenceParams(2, 8, qkv_format="bshd", device="cpu")
    params.pre_step({"a": T, "b": T})
    core = ft.DotProductAttention(H, D, qkv_format="bshd", layer_number=1)
    layers = [torch.randn(2, T, H, D) for _ in range(3)]
    refused = [
        layers[0].clone().requires_grad_(wrong == "grad"),
        *(t.to(torch.bfloat16) if wrong == "dtype" else t for t in layers[1:]),
    ]
    with pytest.raises(Fp8kitError, match=r"^DotProductAttention: "):
        core(*refused, inference_params=params)
    assert params._caches == {}
    layers = [t.to(torch.bfloat16) for t in layers]
    expect = ft.DotProductAttention(H, D, qkv_format="bshd")(*layers)
    most = largest(layers[2])  # the probabilities and o are rounded to bfloat16
    assert_tensor_close("o", core(*layers, inference_params=params), expect, 2.0**-7 * most)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_recipe_that_is_none_is_refused_within_a_compiled_function_too(fullgraph):
    def run(x):
        with ft.autocast(enabled=True, recipe="delayed"):
            return layer(x)

    layer = ft.Linear(4, 4, device="cpu")
    for call in (run, torch.compile(run, backend="eager", fullgraph=fullgraph)):
        with pytest.raises(Exception, match=r"autocast: recipe: .*expected a Recipe, such as fp8kit"):
            call(torch.ones(2, 4))


@pytest.mark.parametrize("where", ["self_attention.proj", "self_attention.layernorm_qkv", "layernorm_mlp"])
def test_another_module_in_the_place_of_a_part(where):
    layer = ft.TransformerLayer(64, 128, 4, device="cpu")
    owner, _, name = where.rpartition(".")
    setattr(layer.get_submodule(owner), name, torch.nn.Sequential(layer.get_submodule(where)))
    with pytest.raises(ArgumentError, match=f"{name}: got a Sequential, expected a module of fp8kit_torch"):
        layer(torch.randn(3, 2, 64))
    setattr(layer.get_submodule(owner), name, torch.nn.Linear(64, 64))
    with pytest.raises(ArgumentError, match=f"{name}: got a Linear, expected a module of fp8kit_torch"):
        layer(torch.randn(3, 2, 64))


def test_a_hook_may_change_what_a_part_gives():
    layer, x = (
        ft.TransformerLayer(64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, device="cpu"),
        torch.randn(3, 2, 64),
    )
    plain = layer(x)
    for part in (layer.layernorm_mlp, layer.self_attention, layer.self_attention.layernorm_qkv):
        with part.register_forward_hook(lambda module, given, out: tuple(out)):
            assert torch.equal(layer(x), plain)
        with part.register_forward_hook(lambda module, given, out: (out[0] * 2, *out[1:])):
            assert not torch.equal(layer(x), plain)


def test_where_layers_lie_when_nobody_says(monkeypatch):
    """What torch or the environment was told comes before a GPU that is there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("FP8KIT_DEVICE", raising=False)
    assert default_device().type == "cuda"
    with torch.device("cpu"):
        assert default_device().type == "cpu"
    torch.set_default_device("cpu")
    try:
        assert default_device().type == "cpu"
    finally:
        torch.set_default_device(None)
    monkeypatch.setenv("FP8KIT_DEVICE", "cuda")
    with monkeypatch.context() as usable:
        usable.setattr("fp8kit.arrays.usable", lambda *said: Device("cuda"))
        # torch's current one, which a process of several has set
        assert default_device() == torch.device("cuda")
    monkeypatch.setenv("FP8KIT_DEVICE", "cpu")
    assert default_device().type == "cpu"
    monkeypatch.setenv("FP8KIT_DEVICE", "cuda:99")
    with pytest.raises(BackendError, match=r"FP8KIT_DEVICE: got cuda:99, expected"):
        ft.Linear(4, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_padding_mask_is_boolean(dtype):
    """Ones of integers are what other libraries keep, not what is masked out here."""
    layer = ft.TransformerLayer(H * D, 16, H, self_attn_mask_type="padding", device="cpu")
    with pytest.raises(
        FormatError, match=r"attention_mask: got .*, expected torch.bool, True where masked out"
    ):
        layer(torch.ones(T, 2, H * D), torch.ones(2, 1, 1, T, dtype=dtype))
    native = fk.nn.TransformerLayer(H * D, 16, H, self_attn_mask_type="padding", device="cpu")
    with pytest.raises(FormatError, match=r"attention_mask: got .*, expected bool, True where masked out"):
        native(torch.ones(T, 2, H * D).numpy(), torch.ones(2, 1, 1, T, dtype=dtype).numpy())


def test_names_of_transformer_engines_modules():
    assert ft.quantization.get_default_fp8_recipe() == DelayedScaling()
    assert ft.cross_entropy.parallel_cross_entropy is ft.parallel_cross_entropy


def test_native_tensors_take_torchs_devices():
    """With an index: without one it is the device that torch has made its current one, which the native
    library does not know."""
    assert str(fk.tensor([1.0], device=torch.device("cpu")).device) == "cpu"
    with pytest.raises(
        BackendError,
        match=r"^tensor: device: got device\(type='cuda'\), expected one with an index, as cuda:0$",
    ):
        fk.tensor([1.0], device=torch.device("cuda"))
    with pytest.raises(BackendError, match="a name like cpu"):
        fk.tensor([1.0], device=torch.device("meta"))


def test_a_native_tensor_is_called_one():
    with pytest.raises(ArgumentError, match=r"inp: got an fp8kit\.Tensor of float32, .*, expected a torch\."):
        ft.Linear(4, 4, device="cpu")(fk.tensor([[1.0] * 4], device="cpu"))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: ft.autocast(fp8_recipe=DelayedScaling()), "recipe"),
        (lambda: ft.fp8_autocast(recipe=DelayedScaling()), "fp8_recipe"),
        (lambda: ft.optimizers.FusedAdam([], learning_rate=1e-3), "lr"),
        (lambda: ft.quantized_model_init(recip=DelayedScaling()), "recipe"),
        (lambda: ft.make_graphed_callables(print, (), num_warmup_iter=1), "num_warmup_iters"),
        (lambda: ft.get_cpu_offload_context(num_layer=1), "num_layers"),
        (lambda: ft.InferenceParams(2, 16, num_heads=3), "num_heads_kv"),
        (lambda: ft.convert(torch.nn.Sequential(), filter=print), "filter_fn"),
        (lambda: fk.autocast(recipes=DelayedScaling()), "recipe"),
    ],
)
def test_an_unknown_keyword_is_told_with_the_one_that_was_meant(call, name):
    with pytest.raises(TypeError, match=rf"unexpected keyword argument '\w+'; did you mean {name}\?$"):
        call()


class OwnLinear(ft.Linear):
    """A program's own, that hands on what it is given."""

    def forward(self, x, **options):
        return super().forward(x, **options)


# misspelt keyword -> (layer, inputs, keyword that was meant)
MISSPELT = {
    "is_first_microbach": (lambda: ft.Linear(16, 16), ((4, 16),), "is_first_microbatch"),
    "fp8_outputs": (lambda: ft.LayerNormLinear(16, 16), ((4, 16),), "fp8_output"),
    "fp8_gradient": (lambda: OwnLinear(16, 16), ((4, 16),), "fp8_grad"),
    "first_microbatch": (lambda: ft.LayerNormMLP(16, 16), ((4, 16),), "is_first_microbatch"),
    "outs": (lambda: ft.GroupedLinear(2, 16, 16), ((4, 16), [2, 2]), "out"),
    "prob": (lambda: ft.GroupedMLP(2, 16, 16), ((4, 16), [2, 2]), "probs"),
    "cu_seqlen_q": (lambda: ft.DotProductAttention(2, 8), ((4, 2, 2, 8),) * 3, "cu_seqlens_q"),
    "rotary_pos_embs": (lambda: ft.MultiheadAttention(16, 2), ((4, 2, 16),), "rotary_pos_emb"),
    "attention_maks": (lambda: ft.TransformerLayer(16, 16, 2), ((4, 2, 16),), "attention_mask"),
}


@combinations(
    {"name": MISSPELT.keys(), "compiled": {"eager": False, "compiled": True}},
    usual=[*(f"{name}-eager" for name in MISSPELT), *(f"{name}-compiled" for name in ("fp8_gradient",))],
)
def test_a_layers_call_names_the_keyword_that_was_meant(name, compiled):
    make, inputs, meant = MISSPELT[name]
    with torch.device("cpu"):
        layer = make()
    given = [torch.zeros(each) if isinstance(each, tuple) else each for each in inputs]
    call = torch.compile(layer, backend="eager") if compiled else layer
    with (
        pytest.raises(TypeError, match=rf"^{type(layer).__name__}\.forward.*'; did you mean {meant}\?$"),
        warnings.catch_warnings(action="ignore"),  # Dynamo's, of a cache that it looks through
    ):
        call(*given, **{name: None})
    assert "unknown" not in inspect.signature(layer.forward).parameters


def test_a_mask_of_packed_sequences_is_called_by_the_layers_name():
    layer = ft.TransformerLayer(H * D, 16, H, attn_input_format="thd", device="cpu")
    lengths = sums([0, T])
    with pytest.raises(
        ArgumentError, match=r"^TransformerLayer: self_attn_mask_type: got 'causal', expected"
    ):
        layer(torch.ones(T, H * D), cu_seqlens_q=lengths, cu_seqlens_kv=lengths)


def test_a_packed_batch_without_tokens_has_0_for_its_longest_sequence():
    layer = ft.TransformerLayer(
        H * D, 16, H, attn_input_format="thd", self_attn_mask_type="padding_causal", device="cpu"
    )

    def call(lengths):
        longest = {f"max_seqlen_{side}": 0 for side in ("q", "kv")}
        options = {f"cu_seqlens_{side}": sums(lengths) for side in ("q", "kv")} | longest
        return layer(torch.ones(lengths[-1], H * D, requires_grad=True), **options)

    y = call([0, 0, 0])
    y.sum().backward()
    assert y.shape == (0, H * D)
    with pytest.raises(ArgumentError, match=r"cu_seqlens_q: got \[0, 5\], expected sequences of at most 1"):
        call([0, 5])


SPLIT = {
    "TransformerLayer": lambda kind: kind.TransformerLayer(
        16, 32, 2, set_parallel_mode=True, tp_size=2, device="cpu"
    ),
    "MultiheadAttention": lambda kind: kind.MultiheadAttention(
        16, 2, set_parallel_mode=True, tp_size=2, device="cpu"
    ),
    "LayerNormMLP": lambda kind: kind.LayerNormMLP(16, 32, set_parallel_mode=True, tp_size=2, device="cpu"),
    "Linear": lambda kind: kind.Linear(16, 16, parallel_mode="column", tp_size=2, device="cpu"),
}


@pytest.mark.parametrize("enabled", [False, True], ids=["high", "fp8"])
@pytest.mark.parametrize("name", SPLIT)
def test_a_layer_of_ranks_wants_their_group(name, enabled):
    """Without it would compute its own rank's part alone."""
    x = torch.randn(4, 2, 16)
    for kind, given, autocast in ((ft, x, ft.autocast), (fk.nn, fk.tensor(x.numpy()), fk.autocast)):
        layer = SPLIT[name](kind)
        with autocast(enabled=enabled), pytest.raises(ArgumentError, match=r"tp_group: missing.*of 2 ranks"):
            layer(given)


@pytest.mark.parametrize("recipe", [None, DelayedScaling()], ids=["high", "fp8"])
def test_make_fx_is_refused(recipe):
    """It sees torch's own operations alone: its graph would hold this call's result as a constant."""
    layer = ft.Linear(16, 16, device="cpu")

    def run(x):
        with ft.autocast(enabled=recipe is not None, recipe=recipe):
            return layer(x)

    before = layer.get_extra_state()
    wanted = r"^Linear: inp: got a call that make_fx.*expected torch\.compile"
    with pytest.raises(UnsupportedError, match=wanted):
        make_fx(run)(torch.randn(4, 16))
    assert torch.equal(layer.get_extra_state(), before)
    assert run(torch.randn(4, 16)).isfinite().all()
