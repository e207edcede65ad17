"""Signatures of all that has Transformer Engine's name, against ``te_signatures.txt``; and that arguments by
position do what they do by name, refusals among it."""

from __future__ import annotations

import ast
import inspect
import operator
import re
from inspect import Parameter
from pathlib import Path

import fp8kit_torch as ft
import pytest
import torch
from fp8kit_torch.te_compat.unsupported import METHODS, WHY

from fp8kit.errors import ArgumentError
from fp8kit.layers.attention_inputs import CORE_OPTIONS
from fp8kit.layers.unsupported import CONSTRUCTOR

from .twins import same

# Transformer Engine 2.20, a line for each class, method and function
TEXT = Path(__file__).with_name("te_signatures.txt").read_text()
# (where, argument) -> (Transformer Engine's default, the default here); all others are the same
DIFFERENCES = {
    # None is CUDA where it is usable, else the CPU, on which "cuda" could not run
    ("*", "device"): ("cuda", None),
    # both may be left out where ``_input``, the deprecated name, is given; an ArgumentError or ShapeError
    # says so otherwise
    ("parallel_cross_entropy", "inp"): (Parameter.empty, None),
    ("parallel_cross_entropy", "target"): (Parameter.empty, None),
    # torch's word for a number that must be there, which torch itself has given up; None is refused by name
    ("optimizers.FusedSGD", "lr"): ("required", None),
    # nothing is made there
    ("Float8CurrentScalingQuantizer", "device"): (Parameter.empty, None),
    # None is all processes
    ("CusolverMpCtx", "group"): (Parameter.empty, None),
    # None is this process alone
    ("tensor.utils.cast_master_weights_to_fp8", "group"): (Parameter.empty, None),
    ("tensor.utils.quantize_master_weights", "group"): (Parameter.empty, None),
}
# what Transformer Engine has as **kwargs stands here by name
NAMED = {"LayerNorm", "RMSNorm"}


def theirs():
    """Name -> its parameters in Transformer Engine."""
    text = TEXT.replace("=required", "='required'")
    for line in re.sub(r"\n +", " ", text).splitlines():
        name, given = re.fullmatch(r"([\w.]+)\((.*)\)", line).groups()
        made = ast.parse(f"def f({given}): ...").body[0].args
        yield name, list(parameters(made))


def value(node):
    """A default: a plain value, a dtype of torch, or a member of an enumeration."""
    if not isinstance(node, ast.Attribute):
        return ast.literal_eval(node)
    owners = {"torch": torch, "DType": ft.DType, "RoutingMapFormat": ft.router.RoutingMapFormat}
    return getattr(owners[node.value.id], node.attr)


def parameters(made):
    defaults = [Parameter.empty] * (len(made.args) - len(made.defaults)) + [
        value(node) for node in made.defaults
    ]
    for own, default in zip(made.args, defaults, strict=True):
        yield Parameter(own.arg, Parameter.POSITIONAL_OR_KEYWORD, default=default)
    if made.vararg:
        yield Parameter(made.vararg.arg, Parameter.VAR_POSITIONAL)
    for own, node in zip(made.kwonlyargs, made.kw_defaults, strict=True):
        default = Parameter.empty if node is None else value(node)
        yield Parameter(own.arg, Parameter.KEYWORD_ONLY, default=default)
    if made.kwarg:
        yield Parameter(made.kwarg.arg, Parameter.VAR_KEYWORD)


ALL = dict(theirs())
ABSENT = {
    name: WHY.get(last) or METHODS[last] for name in ALL if (last := name.split(".")[-1]) in WHY | METHODS
}
THEIRS = {name: own for name, own in ALL.items() if name not in ABSENT}


def ours(name):
    """The parameters here of what has that name."""
    found = list(inspect.signature(operator.attrgetter(name)(ft)).parameters.values())
    return [p.replace(annotation=Parameter.empty) for p in found if p.name != "self"]


E4M3 = ft.DType.kFloat8E4M3
QUANTIZERS = {
    "Float8CurrentScalingQuantizer": ft.Float8CurrentScalingQuantizer(E4M3),
    "Float8BlockQuantizer": ft.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True),
    "MXFP8Quantizer": ft.MXFP8Quantizer(E4M3),
    "NVFP4Quantizer": ft.NVFP4Quantizer(),
}


@pytest.mark.parametrize("name", ABSENT)
def test_what_there_is_nothing_for_is_not_there_and_its_error_says_why(name):
    owner, _, last = name.rpartition(".")
    found = QUANTIZERS.get(owner) or (operator.attrgetter(owner)(ft) if owner else ft)
    with pytest.raises(AttributeError, match=last) as caught:
        getattr(found, last)
    if not isinstance(found, type):  # a class has Python's own error
        assert ABSENT[name] in str(caught.value)


@pytest.mark.parametrize("name", THEIRS)
def test_arguments_have_transformer_engines_names_order_and_defaults(name):
    """What comes by position means the same; what is here only comes by keyword."""
    want, found = [], ours(name)
    for p in THEIRS[name]:
        before, after = (
            DIFFERENCES.get((name, p.name)) or DIFFERENCES.get(("*", p.name)) or (p.default, p.default)
        )
        if name not in NAMED or p.kind is not Parameter.VAR_KEYWORD:
            want.append(p.replace(default=after) if p.default == before else p)
    assert [p for p in found if p.kind is not Parameter.KEYWORD_ONLY] == [
        p for p in want if p.kind is not Parameter.KEYWORD_ONLY
    ]
    assert [p for p in want if p not in found] == []


def test_the_differences_are_there():
    """Each that is listed, so that the list stays true."""
    for (where, argument), (before, after) in DIFFERENCES.items():
        names = [
            name
            for name in (THEIRS if where == "*" else [where])
            if argument in {p.name for p in THEIRS[name]}
        ]
        pairs = {
            (p.default, q.default)
            for name in names
            for p in THEIRS[name]
            for q in ours(name)
            if p.name == q.name == argument
        }
        assert (before, after) in pairs, (where, argument)


SIZES = {
    "in_features": 32,
    "out_features": 32,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_gemms": 2,
    "num_attention_heads": 4,
    "kv_channels": 8,
    "normalized_shape": 32,
    "device": "cpu",
}
# those for which the frontend has no rule of its own
LATER = {
    name: [key for key in table if key not in ft.Linear.constructor_rules]
    for name, table in CONSTRUCTOR.items()
}


@pytest.mark.parametrize("name", LATER)
def test_what_has_no_effect_is_refused_by_place_too(name):
    """All defaults by position make the module; with another value in the place of an argument without effect
    its name is said."""
    names = [p.name for p in ours(name) if p.kind is not Parameter.KEYWORD_ONLY]
    plain = [SIZES.get(p.name, p.default) for p in ours(name) if p.kind is not Parameter.KEYWORD_ONLY]
    where = {"device": "cpu"} if "device" not in names else {}
    kind = getattr(ft, name)
    whole = kind(*plain, **where)
    assert type(whole) is kind
    assert set(LATER[name]) <= set(names)
    for argument in LATER[name]:
        at = names.index(argument)
        wrong = not plain[at] if isinstance(plain[at], bool) else "other"
        for given in ([*plain[:at], wrong], [*plain[:at], wrong, *plain[at + 1 :]]):
            on = where if "device" in names[: len(given)] else {"device": "cpu"}
            with pytest.raises(NotImplementedError, match=f"{name}: {argument}: got"):
                kind(*given, **on)


def test_arguments_mean_the_same_by_place_and_by_name():
    """Two layers of which one is told by position, to the last argument that has an effect."""
    options = SIZES | {
        "layer_type": "decoder",
        "fuse_qkv_params": True,
        "activation": "swiglu",
        "normalization": "RMSNorm",
        "num_gqa_groups": 2,
        "params_dtype": torch.float32,
        "attn_input_format": "bshd",
        "qk_norm_type": "RMSNorm",
        "softmax_type": "off-by-one",
        "softcap": 2.0,
        "enc_dec_attn_mask_type": "causal",
        "enc_dec_window_size": (3, 0),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    made = []
    for by_place in (True, False):
        torch.manual_seed(3)
        known = ours("TransformerLayer")
        if by_place:
            places = [p for p in known if p.kind is not Parameter.KEYWORD_ONLY]
            made.append(ft.TransformerLayer(*(options.get(p.name, p.default) for p in places)))
        else:
            made.append(ft.TransformerLayer(**{p.name: options[p.name] for p in known if p.name in options}))
    x, e = torch.randn(2, 5, 32), torch.randn(2, 7, 32)
    slopes = torch.rand(4)
    call = {"encoder_output": e, "core_attention_bias_type": "alibi", "alibi_slopes": slopes}
    places = [call.get(p.name, p.default) for p in ours("TransformerLayer.forward")[1:]]
    same(made[0](x, *places), made[1](x, **call), "y")
    plain = made[1](x, encoder_output=e)
    assert not torch.equal(plain, made[1](x, **call))
    same(
        made[0](
            x, *[e if p.name == "encoder_output" else p.default for p in ours("TransformerLayer.forward")[1:]]
        ),
        plain,
        "y",
    )


def test_attention_takes_its_options_by_place():
    torch.manual_seed(0)
    layer = ft.MultiheadAttention(
        32, 4, attention_dropout=0.0, qkv_format="thd", attn_mask_type="padding", device="cpu"
    )
    x, sums = torch.randn(9, 32), torch.tensor([0, 4, 9], dtype=torch.int32)
    call = {"cu_seqlens_q": sums, "cu_seqlens_kv": sums, "max_seqlen_q": 5, "max_seqlen_kv": 5}
    places = [call.get(p.name, p.default) for p in ours("MultiheadAttention.forward")[1:] if p.name != "part"]
    same(layer(x, *places), layer(x, **call), "y")
    named = {p.name: p.default for p in ours("DotProductAttention.forward")}
    assert {name: named[name] for name in CORE_OPTIONS} == CORE_OPTIONS


@pytest.mark.parametrize(
    "argument", ["score_mod", "score_mod_bprop", "score_mod_tensors", "score_mod_bprop_tensors"]
)
def test_what_has_no_effect_on_a_call_is_refused_by_place_too(argument):
    core, q = ft.DotProductAttention(4, 8, device="cpu"), torch.zeros(3, 2, 4, 8)
    known = ours("DotProductAttention.forward")
    at = [p.name for p in known].index(argument)
    with pytest.raises(NotImplementedError, match=f"DotProductAttention: {argument}: got"):
        core(q, q, q, *(p.default for p in known[3:at]), True if known[at].default is False else 5)


def test_a_norms_dtype_has_two_names():
    for kind in (ft.LayerNorm, ft.RMSNorm):
        norms = [
            kind(16, dtype=torch.bfloat16, device="cpu"),
            kind(16, 1e-5, None, torch.bfloat16, device="cpu"),
        ]
        assert [norm.weight.dtype for norm in norms] == [torch.bfloat16] * 2
        with pytest.raises(ArgumentError, match=r"dtype: got .*beside params_dtype"):
            kind(16, params_dtype=torch.float32, dtype=torch.bfloat16, device="cpu")


@pytest.mark.parametrize(
    ("argument", "wrong"),
    [
        ("enc_dec_attn_mask_type", "causal"),
        ("enc_dec_window_size", (2, 2)),
        ("enc_dec_bottom_right_diagonal", False),
    ],
)
def test_an_encoder_refuses_what_is_about_an_encoders_output(argument, wrong):
    ft.TransformerLayer(32, 64, 4, layer_type="decoder", device="cpu", **{argument: wrong})
    with pytest.raises(
        ArgumentError,
        match=f"TransformerLayer: {argument}: got .*expected (None|'no_mask') with layer_type 'encoder'",
    ):
        ft.TransformerLayer(32, 64, 4, device="cpu", **{argument: wrong})
