"""What programs read of Transformer Engine's modules."""

from __future__ import annotations

import copy

import fp8kit_torch as te
import pytest
import torch

from fp8kit.errors import ArgumentError, UnsupportedError
from tests.support.tensors import assert_tensor_close

LAYERS = {
    "Linear": lambda **options: te.Linear(32, 32, device="cpu", **options),
    "LayerNormLinear": lambda **options: te.LayerNormLinear(32, 32, device="cpu", **options),
    "LayerNormMLP": lambda **options: te.LayerNormMLP(32, 64, device="cpu", **options),
    "GroupedLinear": lambda **options: te.GroupedLinear(2, 32, 32, device="cpu", **options),
}


@pytest.fixture(params=LAYERS)
def make(request):
    return LAYERS[request.param]


def test_whether_a_layer_computes_in_fp8_is_that_of_the_moment(make):
    layer = make()
    assert (layer.fp8, layer.fp8_calibration, layer.fp8_initialized) == (False, False, False)
    with te.autocast(recipe=te.Float8CurrentScaling()):
        assert (layer.fp8, layer.fp8_initialized) == (True, True)
        with te.autocast(enabled=False, calibrating=True):
            assert (layer.fp8, layer.fp8_calibration) == (False, True)


def test_a_recipe_by_layer_says_it_of_each():
    recipe = te.recipe.PerLayer(te.Float8CurrentScaling(), (("first", None),))
    with te.autocast(recipe=recipe):
        assert not LAYERS["Linear"](name="first").fp8
        assert LAYERS["Linear"](name="second").fp8


def test_weights_that_are_held_in_fp8(make):
    assert not make().primary_weights_in_fp8
    assert make().get_fp8_params() is None
    with te.quantized_model_init(recipe=te.Float8CurrentScaling(), preserve_high_precision_init_val=True):
        layer = make()
    assert layer.primary_weights_in_fp8
    assert layer.preserve_high_precision_init_val
    assert [id(p) for p in layer.get_fp8_params()] == [id(getattr(layer, n)) for n in layer.weight_names]


def test_names_of_weights_and_biases():
    split = LAYERS["LayerNormLinear"](parameters_split=["query_", "key_"])
    assert split.weight_names == ["query_weight", "key_weight"]
    assert split.bias_names == ["query_bias", "key_bias"]
    assert LAYERS["LayerNormMLP"]().weight_names == ["fc1_weight", "fc2_weight"]
    assert LAYERS["GroupedLinear"]().bias_names == ["bias0", "bias1"]
    assert LAYERS["Linear"](bias=False).bias_names == []
    assert LAYERS["Linear"]().apply_bias
    assert not LAYERS["Linear"](return_bias=True).apply_bias


def step(layer, recipe):
    x = torch.randn(16, 32, requires_grad=True)
    with te.autocast(recipe=recipe):
        layer(x).sum().backward()


def test_scales_are_kept_given_back_and_reset():
    layer, recipe = LAYERS["Linear"](), te.DelayedScaling(amax_history_len=4)
    layer.init_fp8_meta_tensors(recipe)
    assert layer.fp8_meta_tensors_initialized
    assert layer.fp8_meta["scaling_fwd"].amax_history.shape == (4, 3)
    step(layer, recipe)
    kept, memory = layer.get_fp8_meta_tensors(), layer.fp8_meta["scaling_fwd"].scale.data_ptr()
    layer.reset_fp8_meta_tensors()
    for state in layer.fp8_meta.values():
        assert bool((state.scale == 1).all())
        assert not state.amax_history.any()
    layer.reset_fp8_meta_tensors(kept)
    for name, state in layer.fp8_meta.items():
        assert all(torch.equal(a, b) for a, b in zip(state.parts, kept[name], strict=True))
    assert layer.fp8_meta["scaling_fwd"].scale.data_ptr() == memory


def test_another_length_of_the_history_keeps_its_first_rows():
    layer, recipe = LAYERS["Linear"](), te.DelayedScaling(amax_history_len=4)
    step(layer, recipe)
    before = layer.fp8_meta["scaling_fwd"].amax_history.clone()
    layer.adjust_amax_history_length(2)
    assert torch.equal(layer.fp8_meta["scaling_fwd"].amax_history, before[:2])


def test_quantizers_are_the_recipes_with_the_layers_scales():
    layer, recipe = LAYERS["LayerNormMLP"](), te.DelayedScaling(amax_history_len=4)
    assert layer.quantizers == {"scaling_fwd": [], "scaling_bwd": []}
    with te.autocast(recipe=recipe):
        found = layer.quantizers
    assert [len(each) for each in found.values()] == [6, 4]
    scales = layer.fp8_meta["scaling_fwd"].scale
    assert found["scaling_fwd"][4].scale.data_ptr() == scales[4:].data_ptr()
    assert found["scaling_bwd"][0].dtype == te.DType.kFloat8E5M2
    with te.autocast(recipe=te.Float8CurrentScaling()):
        found = layer.quantizers["scaling_fwd"]
    assert all(isinstance(each, te.Float8CurrentScalingQuantizer) for each in found)


def test_quantizers_after_a_step_are_those_of_its_recipe():
    layer = LAYERS["Linear"]()
    step(layer, te.DelayedScaling(amax_history_len=4))
    found = layer.quantizers
    assert found["scaling_fwd"][1].scale.data_ptr() == layer.fp8_meta["scaling_fwd"].scale[1:].data_ptr()
    assert [type(each).__name__ for each in found["scaling_bwd"]] == ["Float8Quantizer"] * 2
    step(layer, te.MXFP8BlockScaling())
    with te.autocast(enabled=False):
        assert {type(each).__name__ for each in layer.quantizers["scaling_fwd"]} == {"MXFP8Quantizer"}


def test_arguments_of_the_constructor_can_be_read():
    layer = te.TransformerLayer(
        32, 64, 2, device="cpu", normalization="RMSNorm", activation="swiglu", window_size=(4, 0)
    )
    layer = copy.deepcopy(layer)
    assert layer.self_attn_mask_type == "causal"
    assert layer.self_attention.num_attention_heads == 2
    assert layer.self_attention.qkv_format == "sbhd"
    assert layer.layernorm_mlp.normalization == "RMSNorm"
    assert layer.layernorm_mlp.activation == "swiglu"
    assert layer.layernorm_mlp.eps == 1e-5
    assert layer.self_attention.layernorm_qkv.zero_centered_gamma is False
    assert layer.self_attention.proj.tp_group_initialized
    assert layer.self_attention.proj.get_rng_state_tracker is None


@pytest.mark.parametrize(("layer", "gemms"), [("Linear", 1), ("LayerNormMLP", 2), ("GroupedLinear", 2)])
def test_roles_of_slots(layer, gemms):
    made = LAYERS[layer](name="mine")
    reader = te.QuantizerRole("Linear", "next", "input")
    made.output_quantizer_role = reader
    forward = made.get_quantizer_roles(fwd=True, num_quantizers=3 * gemms)
    backward = made.get_quantizer_roles(fwd=False, num_quantizers=2 * gemms)
    of_one = [te.QuantizerRole(layer, "mine", operand) for operand in ("input", "weight", "grad_output")]
    assert forward == [*of_one[:2], reader] * gemms
    assert backward == [of_one[2], None] * gemms


RECIPES = {
    "delayed": te.DelayedScaling(),
    "current": te.Float8CurrentScaling(),
    "block": te.Float8BlockScaling(),
    "mxfp8": te.MXFP8BlockScaling(),
}


def run(layer, recipe, first):
    sizes = ([32, 32],) if isinstance(layer, te.GroupedLinear) else ()
    with te.autocast(recipe=recipe):
        return layer(torch.linspace(-1, 1, 64 * 32).view(64, 32), *sizes, is_first_microbatch=first)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_kept_weights_are_there_by_name_and_dropped(make, recipe):
    """Programs free their memory so, or have a changed weight cast anew."""
    layer = make()
    assert run(layer, recipe, None) is not None
    assert layer._fp8_workspaces == {}
    before = run(layer, recipe, True)
    kept = layer._fp8_workspaces
    assert isinstance(kept, dict)
    assert [*kept] == layer.weight_names
    for name, cast in kept.items():
        own = getattr(layer, name)
        assert cast.shape == own.shape
        # E4M3 rounds to 1/16 of a value; its smallest step is 2^-9, by scales of 1 as before the first update
        assert_tensor_close(name, cast.float(), own.detach(), own.abs() * 2.0**-4 + 2.0**-10)
    with torch.no_grad():
        for name in layer.weight_names:
            getattr(layer, name).zero_()
    assert torch.equal(run(layer, recipe, False), before)
    kept.clear()
    assert len(layer._fp8_workspaces) == 0
    after = run(layer, recipe, False)
    assert not torch.equal(after, before)
    assert all(not cast.any() for cast in layer._fp8_workspaces.values())
    del layer._fp8_workspaces[layer.weight_names[0]]
    assert not layer._fp8_workspaces
    run(layer, recipe, True)
    layer._fp8_workspaces = {}
    assert not layer._fp8_workspaces


def test_how_parameters_start_and_what_casts_them(make):
    layer = make()
    meta = layer.param_init_meta
    assert [*meta] == [name for name, _ in layer.named_parameters()]
    slots = {name: found.fp8_meta_index for name, found in meta.items() if found.fp8_meta_index is not None}
    assert slots == {name: 3 * i + 1 for i, name in enumerate(layer.weight_names)}
    with te.autocast(recipe=te.Float8CurrentScaling()):
        assert len(layer.quantizers["scaling_fwd"]) > max(slots.values())
    own = getattr(layer, layer.weight_names[0])
    meta[layer.weight_names[0]].init_fn(own.data.zero_())
    assert own.any()
    split = LAYERS["LayerNormLinear"](parameters_split=["query_", "key_"]).param_init_meta
    assert (split["query_weight"].fp8_meta_index, split["key_weight"].fp8_meta_index) == (1, 1)


def quantizer_of(recipe):
    with te.autocast(recipe=recipe):
        return LAYERS["Linear"]().quantizers["scaling_fwd"][1]


@pytest.mark.parametrize("recipe", [*RECIPES.values()][1:], ids=[*RECIPES][1:])
def test_weights_that_a_program_has_cast_are_multiplied_as_they_are(make, recipe):
    """As where ``quantized_model_init`` has made the layer, of the same values."""
    layer, quantizer = make(), quantizer_of(recipe)
    with te.quantized_model_init(recipe=recipe):
        other = make()
    other.load_state_dict(layer.state_dict())
    plain = {name: getattr(layer, name) for name in layer.weight_names}
    for name, weight in plain.items():
        setattr(layer, name, torch.nn.Parameter(quantizer(weight.detach()), requires_grad=False))
    assert layer.primary_weights_in_fp8
    layer.primary_weights_in_fp8 = True
    with pytest.raises(ArgumentError, match="primary_weights_in_fp8: got False"):
        layer.primary_weights_in_fp8 = False
    for held in (layer, other):
        held.requires_grad_(False)
    x = torch.randn(64, 32)
    sizes = ([32, 32],) if isinstance(layer, te.GroupedLinear) else ()
    for enabled in (False, True):
        found = []
        for held in (layer, other, copy.deepcopy(layer)):
            own = x.clone().requires_grad_()
            with te.autocast(enabled=enabled, recipe=recipe):
                y = held(own, *sizes)
            y.square().sum().backward()
            found.append((y, own.grad))
        for y, grad in found[1:]:
            assert torch.equal(y, found[0][0])
            assert torch.equal(grad, found[0][1])
    for name, weight in plain.items():
        setattr(layer, name, weight)
    assert not layer.primary_weights_in_fp8
    assert torch.equal(layer(x, *sizes), make_like(make, layer)(x, *sizes))


def make_like(make, layer):
    other = make()
    other.load_state_dict(layer.state_dict())
    return other


def test_one_weight_of_two_that_a_program_has_cast_is_refused():
    layer, recipe = LAYERS["LayerNormMLP"](), te.Float8CurrentScaling()
    layer.fc1_weight = torch.nn.Parameter(quantizer_of(recipe)(layer.fc1_weight.detach()))
    with pytest.raises(UnsupportedError, match="fc2_weight"), torch.no_grad():
        layer(torch.ones(16, 32))
    layer.fc2_weight = torch.nn.Parameter(quantizer_of(recipe)(layer.fc2_weight.detach()))
    assert layer(torch.ones(16, 32)) is not None


def test_a_state_that_is_loaded_again_stays(make):
    """As programs load it once more on another device, having said that there is none."""
    layer = make()
    run(layer, RECIPES["delayed"], None).sum().backward()
    before = layer.state_dict()["_extra_state"].clone()
    layer.fp8_initialized = False
    layer.fp8_meta_tensors_initialized = False
    assert not layer.fp8_meta_tensors_initialized
    layer.set_extra_state(layer.get_extra_state())
    assert layer.fp8_meta_tensors_initialized
    assert torch.equal(layer.state_dict()["_extra_state"], before)
    scale = layer.fp8_meta["scaling_fwd"].scale.clone()
    with torch.no_grad():
        run(layer, RECIPES["delayed"], None)
    assert torch.equal(layer.fp8_meta["scaling_fwd"].scale, scale)
    with pytest.raises(ArgumentError, match="fp8_initialized"):
        layer.fp8_initialized = "no"


def test_a_state_that_is_said_not_to_be_there_is_made_anew(make):
    layer, other = make(), make()
    other.load_state_dict(layer.state_dict())
    for _ in range(2):
        run(layer, RECIPES["delayed"], None).sum().backward()
    layer.fp8_meta_tensors_initialized = False
    assert torch.equal(run(layer, RECIPES["delayed"], None), run(other, RECIPES["delayed"], None))
    for name, state in layer.fp8_meta.items():
        for own, wanted in zip(state.parts, other.fp8_meta[name].parts, strict=True):
            assert torch.equal(own, wanted)
    assert layer.fp8_meta_tensors_initialized
