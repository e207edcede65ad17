"""Models as ONNX, in onnxruntime on the CPU, beside the model itself."""

from __future__ import annotations

import re

import fp8kit_torch as ft
import pytest
import torch
from fp8kit_torch.te_compat.export import is_in_onnx_export_mode, te_translation_table

from fp8kit.backends.activation import ALL
from fp8kit.errors import UnsupportedError
from fp8kit.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    QParams,
)

pytestmark = [
    pytest.mark.clients,
    # torch's exporter of itself
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
WIDTH, HEADS = 32, 4
ROWS = 5, 2
DROPPED = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def exported(model, args, recipe=None, shapes=None, table=te_translation_table, **kwargs):
    """The program's operators, and a function of arrays that runs it."""
    import onnxruntime

    with ft.onnx_export(True), ft.autocast(enabled=recipe is not None, recipe=recipe):
        program = torch.onnx.export(
            model,
            args,
            kwargs=kwargs or None,
            dynamo=True,
            verbose=False,
            opset_version=20,
            custom_translation_table=table,
            dynamic_shapes=shapes,
        )
    proto = program.model_proto
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])

    def run(*inputs):
        named = zip([each.name for each in session.get_inputs()], inputs, strict=True)
        return torch.from_numpy(session.run(None, {name: x.numpy() for name, x in named})[0])

    return [node.op_type for node in proto.graph.node], run


def same(model, args, recipe=None, **kwargs):
    """The program gives the model's output within float32's rounding; its operators."""
    model.eval()
    with torch.no_grad(), ft.autocast(enabled=recipe is not None, recipe=recipe):
        want = model(*args, **kwargs)
    operators, run = exported(model, args, recipe, **kwargs)
    got = run(*args, *(value for value in kwargs.values() if isinstance(value, torch.Tensor)))
    # some ten operations behind each other, sums of 64 terms
    assert (got - want).abs().max() <= 64 * 2.0**-23 * want.abs().max()
    return operators


def test_a_model_in_high_precision():
    layer = ft.TransformerLayer(WIDTH, 64, HEADS, **DROPPED)
    operators = same(layer, (torch.randn(*ROWS, WIDTH),))
    assert "QuantizeLinear" not in operators
    assert operators.count("MatMul") == 6


@pytest.mark.parametrize(
    "recipe",
    [
        Float8CurrentScaling(),
        Float8CurrentScaling(use_power_2_scales=True),
        Float8CurrentScaling(fp8_quant_fwd_inp=QParams(amax_epsilon=8.0), fp8_format=Format.E4M3),
    ],
)
def test_products_in_fp8(recipe):
    """Scales and codes are the model's own: an operand that were rounded otherwise would differ by 2^-4."""
    operators = same(ft.LayerNormMLP(WIDTH, 64), (torch.randn(*ROWS, WIDTH),), recipe)
    assert operators.count("QuantizeLinear") == operators.count("DequantizeLinear") == 4
    assert operators.count("MatMul") == 2


def test_delayed_scaling_keeps_the_scales_of_the_export():
    """Each operand its own, learnt in training; a later step of the model changes the program no more."""
    recipe = DelayedScaling(amax_history_len=2)
    layer, x = ft.LayerNormMLP(WIDTH, 64), torch.randn(*ROWS, WIDTH)
    with ft.autocast(recipe=recipe):
        layer(x * 2).sum().backward()
    assert len(set(layer.fp8_meta["scaling_fwd"].scale.tolist())) > 3
    operators = same(layer, (x,), recipe)
    assert operators.count("QuantizeLinear") == operators.count("DequantizeLinear") == 4
    with torch.no_grad(), ft.autocast(recipe=recipe):
        want = layer(x)
    _, run = exported(layer, (x,), recipe)
    layer.reset_fp8_meta_tensors()
    assert (run(x) - want).abs().max() <= 64 * 2.0**-23 * want.abs().max()


def test_a_model_of_delayed_scaling_that_never_ran_has_scales_of_one():
    operators = same(
        ft.TransformerLayer(WIDTH, 64, HEADS, **DROPPED), (torch.randn(*ROWS, WIDTH),), DelayedScaling()
    )
    assert operators.count("QuantizeLinear") == 8


def test_a_scale_of_an_operand_of_zeros():
    same(ft.Linear(WIDTH, 16), (torch.zeros(3, WIDTH),), Float8CurrentScaling())


@pytest.mark.parametrize("name", [name for name in ALL if name != "xielu"])
def test_activations(name):
    layer = ft.LayerNormMLP(WIDTH, 64, activation=name, normalization="RMSNorm", zero_centered_gamma=True)
    same(layer, (torch.randn(*ROWS, WIDTH),))


@pytest.mark.parametrize("form", ["sbhd", "bshd"])
@pytest.mark.parametrize(
    "options",
    [
        {"softmax_type": "learnable", "num_gqa_groups": 2, "window_size": (2, 0)},
        {"softmax_type": "off-by-one", "softcap": 0.5, "self_attn_mask_type": "causal_bottom_right"},
        {"rotary_pos_interleaved": True, "qk_norm_type": "RMSNorm", "fuse_qkv_params": True},
    ],
    ids=["learnable", "off_by_one", "rotated"],
)
def test_attentions(form, options):
    layer = ft.TransformerLayer(WIDTH, 64, HEADS, attn_input_format=form, **options, **DROPPED)
    if options.get("softmax_type") == "learnable":
        torch.nn.init.normal_(layer.self_attention.core_attention.softmax_offset)
    angles = ft.RotaryPositionEmbedding(8)(16)
    same(layer, (torch.randn(*ROWS, WIDTH),), rotary_pos_emb=angles)


def test_padded_and_masked_attention():
    q = torch.randn(2, 5, HEADS, 8)
    k = torch.randn(2, 5, 2, 8)
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    core = ft.DotProductAttention(HEADS, 8, 2, qkv_format="bshd", attn_mask_type="padding_causal")
    same(core, (q, k, k), cu_seqlens_q=ends, cu_seqlens_kv=ends.clone())
    core = ft.DotProductAttention(HEADS, 8, qkv_format="bshd", attn_mask_type="arbitrary")
    hidden = torch.rand(2, 1, 5, 5) > 0.5
    bias = torch.randn(1, HEADS, 5, 5)
    more = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
    same(core, (q, q.clone(), q.clone()), attention_mask=hidden, **more)


def test_a_length_that_is_left_open():
    layer, length = (
        ft.TransformerLayer(WIDTH, 64, HEADS, **DROPPED).eval(),
        torch.export.Dim("s", min=2, max=64),
    )
    _, run = exported(layer, (torch.randn(*ROWS, WIDTH),), shapes=({0: length},))
    x = torch.randn(9, 2, WIDTH)
    with torch.no_grad():
        want = layer(x)
    assert (run(x) - want).abs().max() <= 64 * 2.0**-23 * want.abs().max()


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (Float8BlockScaling(), "one scale a tensor"),
        (DelayedScaling(fp8_format=Format.E4M3, amax_compute_algo=max), "a function is not supported"),
    ],
)
def test_other_recipes_say_so(recipe, words):
    """By fp8kit's own error, or as the cause of torch's."""
    with pytest.raises((NotImplementedError, torch.onnx.OnnxExporterError)) as caught:
        exported(ft.Linear(128, 128).eval(), (torch.randn(128, 128),), recipe)
    found: BaseException | None = caught.value
    seen = []
    while found is not None:
        seen.append(found)
        found = found.__cause__
    assert any(isinstance(each, NotImplementedError) and words in str(each) for each in seen)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (None, "custom_translation_table=te.te_translation_table"),
        (Float8CurrentScaling(), "custom_translation_table=te.te_translation_table"),
        (MXFP8BlockScaling(), "operands in E4M3 with one scale a tensor"),
    ],
)
def test_an_export_without_the_table_says_what_is_missing(recipe, words):
    with pytest.raises(UnsupportedError, match=re.escape(words)) as caught:
        exported(ft.Linear(WIDTH, 32).eval(), (torch.randn(32, WIDTH),), recipe, table=None)
    assert isinstance(caught.value.__cause__, torch.onnx.OnnxExporterError)


def test_an_operation_without_a_translation_is_named():
    layer = ft.GroupedLinear(2, WIDTH, 16).eval()
    with pytest.raises(UnsupportedError, match="grouped_linear"):
        exported(layer, (torch.randn(8, WIDTH), [4, 4]))


def test_the_mode_ends():
    with ft.onnx_export(True):
        assert is_in_onnx_export_mode()
        assert not torch.is_grad_enabled()
    assert not is_in_onnx_export_mode()
    with ft.onnx_export(False):
        assert torch.is_grad_enabled()
