"""``te.ops``, ``general_gemm``, ``FP8GlobalStateManager``, the packed rotary embedding: against the modules
and formulas they stand for."""

from __future__ import annotations

import sys

import fp8kit_torch as ft
import pytest
import torch
from fp8kit_torch import fusible
from fp8kit_torch.operand_tensor import OperandTensor
from fp8kit_torch.te_compat.gemms import general_gemm
from fp8kit_torch.te_compat.global_state import FP8GlobalStateManager as State

from fp8kit.errors import ArgumentError, FormatError, Fp8kitError, ShapeError
from fp8kit.testing.compare import relative_error
from tests.support.tensors import assert_tensor_close, largest

from .twins import RECIPES, WIDTH, same


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_sequence_is_its_operations(device, recipe):
    whole = fusible.Sequential(
        fusible.LayerNorm(WIDTH, device=device),
        fusible.Linear(WIDTH, 64, device=device),
        fusible.MakeExtraOutput(),
        fusible.SwiGLU(),
        fusible.BasicLinear(32, WIDTH, device=device),
        fusible.Bias(WIDTH, device=device),
        fusible.AddExtraInput(),
        fusible.ConstantScale(0.5),
        fusible.Reshape((-1, WIDTH // 2)),
        fusible.Dropout(0.0),
        fusible.Identity(),
    )
    norm, first, second = (
        ft.LayerNorm(WIDTH, device=device),
        ft.Linear(WIDTH, 64, device=device),
        ft.Linear(32, WIDTH, device=device),
    )
    norm.load_state_dict(whole[0].state_dict())
    with torch.no_grad():
        whole[1].bias.normal_()
        whole[5].bias.normal_()
    first.load_state_dict(whole[1].state_dict())
    second.load_state_dict({"weight": whole[4].weight, "bias": whole[5].bias})
    x, extra = torch.randn(6, WIDTH, device=device), torch.randn(6, WIDTH, device=device)
    with ft.autocast(enabled=recipe != "high", recipe=RECIPES[recipe]):
        y, middle = whole(x, extra)
        h = first(norm(x))
        gate, linear = h.chunk(2, -1)
        z = (second(torch.nn.functional.silu(gate) * linear) + extra) * 0.5
    same(middle, h, "extra output")
    # the product's input is rounded once or twice on its way; in FP8 a code may move by a step of 2^-3
    assert relative_error(y.detach().reshape(6, WIDTH).cpu(), z.detach().cpu()) < (
        1e-5 if recipe == "high" else 2.0**-5
    )
    (y.sum() + middle.sum()).backward()
    assert all(p.grad is not None for p in whole.parameters())


@pytest.mark.parametrize(
    "name",
    [
        "GELU",
        "QGELU",
        "ReLU",
        "SReLU",
        "SiLU",
        "GLU",
        "GEGLU",
        "QGEGLU",
        "ReGLU",
        "SReGLU",
        "SwiGLU",
        "ClampedSwiGLU",
    ],
)
def test_activations_are_those_of_the_mlp(device, name):
    """An MLP whose first weight and norm change nothing gives act(x) W2^T."""
    kind = getattr(fusible, name)
    activation = {"ClampedSwiGLU": "clamped_swiglu"}.get(name, name.lower())
    x = torch.randn(5, 32, device=device) * 3
    y = kind()(x)
    plain = {
        "gelu": lambda t: torch.nn.functional.gelu(t, approximate="tanh"),
        "qgelu": lambda t: t * torch.sigmoid(1.702 * t),
        "relu": torch.relu,
        "srelu": lambda t: torch.relu(t) ** 2,
        "silu": torch.nn.functional.silu,
        "glu": torch.sigmoid,
    }
    gates = {
        "geglu": "gelu",
        "qgeglu": "qgelu",
        "reglu": "relu",
        "sreglu": "srelu",
        "swiglu": "silu",
        "glu": "glu",
    }
    wide = x.double()
    if activation == "clamped_swiglu":
        a, b = wide.chunk(2, -1)
        a, b = a.clamp(max=7.0), b.clamp(-7.0, 7.0)
        want = a * torch.sigmoid(1.702 * a) * (b + 1)
    elif activation in gates:
        a, b = wide.chunk(2, -1)
        want = plain[gates[activation]](a) * b
    else:
        want = plain[activation](wide)
    assert_tensor_close("y", y, want, 2.0**-19 * (1 + want.abs()))  # some 32 operations on values near 1


def test_operations_refuse_what_they_do_not_do():
    for make, word in (
        (lambda: fusible.GELU(cache_quantized_input=3), "cache_quantized_input"),
        (lambda: fusible.SwiGLU(glu_interleave_size=0), "glu_interleave_size"),
        (lambda: fusible.Bias(8, tensor_parallel_group=3), "tensor_parallel_group"),
    ):
        with pytest.raises(ArgumentError, match=word):
            make()
    with pytest.raises(Fp8kitError, match=r"extra_inputs: got 0, expected 1"):
        fusible.Sequential(fusible.AddExtraInput())(torch.ones(2))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "current", "block"])
@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
def test_general_gemm(device, kind, layout):
    m, n, k = 24, 32, 48
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    x, w, g = (
        torch.randn(shape, device=device).to(dtype) for shape in ((2, m // 2, k), (n, k), (2, m // 2, n))
    )
    A, B = {"TN": (w, x), "NN": (w, g), "NT": (x, g)}[layout]
    if kind in RECIPES:
        fp8 = RECIPES[kind].quantization
        blocks = ft.quantized.held_as(fp8, "x")
        A, B = (OperandTensor.of(t, fp8) if t is w else OperandTensor.cast(t, blocks) for t in (A, B))
    a, b = (t.dequantize() if kind in RECIPES else t for t in (A, B))
    a, b = (t.detach().double().cpu().reshape(-1, t.shape[-1]) for t in (a, b))
    want = {"TN": lambda: b @ a.T, "NN": lambda: b @ a, "NT": lambda: b.T @ a}[layout]()
    size = {
        "TN": lambda: b.abs() @ a.abs().T,
        "NN": lambda: b.abs() @ a.abs(),
        "NT": lambda: b.abs().T @ a.abs(),
    }[layout]()
    y, *rest = general_gemm(A, B, layout=layout, out_dtype=torch.float32, use_split_accumulator=True)
    assert rest == [None] * 3
    assert y.shape == ((n, k) if layout == "NT" else (2, m // 2, n if layout == "TN" else k))
    # a GPU rounds float32 operands to TF32's 11 bits; codes transposed by blocks are cast anew along the
    # contraction, by 2^-4 of a value
    slack = 2.0**-10 if kind in ("float32", "bfloat16", "current") or layout == "TN" else 2.0**-3
    assert ((y.double().cpu().reshape(want.shape) - want).abs() <= slack * size + 1e-9).all()
    twice = y.clone()
    bias = torch.randn(y.shape[-1], device=device)
    general_gemm(A, B, layout=layout, out=twice, accumulate=True, use_split_accumulator=True)
    assert_tensor_close("twice", twice, 2 * y, 2.0**-20 * largest(size))
    if dtype is torch.float32:
        added, *_ = general_gemm(
            A, B, layout=layout, bias=bias, out_dtype=torch.float32, use_split_accumulator=True
        )
        assert_tensor_close("added", added, y + bias, 2.0**-20 * largest(size))


def test_general_gemm_refuses():
    a, b = torch.ones(4, 8), torch.ones(2, 8)
    for options, word in (({"ub": 3}, "ub"), ({"bulk_overlap": True}, "bulk_overlap")):
        with pytest.raises(NotImplementedError, match=word):
            general_gemm(a, b, **options)
    with pytest.raises(ShapeError, match="one contraction"):
        general_gemm(a, b, layout="NN")
    for layout in ("TT", None):
        with pytest.raises(ArgumentError, match=r"general_gemm: layout: got .*, expected one of TN, NN, NT"):
            general_gemm(a, b, layout=layout)
    for wrong in ([[1.0] * 8], b.numpy(), None, "b"):
        for name, arguments in {"A": (wrong, b), "B": (a, wrong)}.items():
            with pytest.raises(
                ArgumentError, match=rf"general_gemm: {name}: got .*, expected a torch.Tensor"
            ):
                general_gemm(*arguments)
        for name in ("out", "bias") if wrong is not None else ():
            with pytest.raises(
                ArgumentError, match=rf"general_gemm: {name}: got .*, expected a torch.Tensor"
            ):
                general_gemm(a, b, **{name: wrong})
    with pytest.raises(FormatError, match="given to accumulate"):
        general_gemm(a, b, accumulate=True)
    with pytest.raises(FormatError, match="as B"):
        general_gemm(a, b.half())
    with pytest.raises(ShapeError, match="contiguous"):
        general_gemm(a, b, out=torch.ones(4, 2))


def test_the_state_of_the_moment():
    recipe = RECIPES["current"]
    assert not State.is_fp8_enabled()
    assert State.get_fp8_recipe() == ft.get_default_recipe()
    assert not State.is_first_fp8_module()
    with ft.autocast(recipe=recipe, calibrating=True):
        assert State.is_fp8_enabled()
        assert State.is_fp8_calibration()
        assert State.get_fp8_recipe() == recipe
        assert State.get_fp8_group() is None
        assert State.is_first_fp8_module()
        assert not State.is_first_fp8_module()
        with ft.autocast(enabled=False):
            assert not State.is_fp8_enabled()
            assert not State.is_first_fp8_module()
    for _ in range(2):
        with ft.autocast():
            assert State.is_first_fp8_module()
    with ft.quantized_model_init(preserve_high_precision_init_val=True):
        assert State.with_fp8_parameters()
        assert State.with_high_precision_init_val()
    assert not State.with_fp8_parameters()
    assert State.is_fp8_available() == ft.is_fp8_available(return_reason=True)
    assert State.is_mxfp8_available() == (True, "")
    assert State.get_meta_tensor_key(False) == "scaling_bwd"
    assert State.fp8_graph_capturing() is False
    assert not hasattr(State, "nothing_like_it")


def test_reset_leaves_what_an_interrupted_program_left():
    layer, x = ft.Linear(WIDTH, 40, device="cpu"), torch.randn(4, WIDTH)
    ft.autocast().__enter__()
    layer(x)
    assert layer.fp8_meta["scaling_fwd"].amax_history[0].any()
    State.reset()
    assert not State.is_fp8_enabled()
    assert not layer.fp8_meta["scaling_fwd"].amax_history.any()
    with ft.autocast():
        layer(x)
    same(layer.fp8_meta["scaling_fwd"].amax_history[-1, 0], x.abs().max(), "amax")


@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_the_packed_rotary_embedding(device, form):
    s, b, g, ratio, d = 6, 2, 2, 3, 8
    shape = (s, b) if form == "sbhd" else (b, s)
    freqs, other = (ft.RotaryPositionEmbedding(d, rotary_base=base, device=device)(s) for base in (1e4, 1e2))
    qkv = torch.randn(*shape, g, (ratio + 2) * d, device=device, requires_grad=True)
    found = ft.apply_fused_qkv_rotary_pos_emb(qkv, freqs, other, [ratio * d, d, d], form)
    parts = qkv.detach().split([ratio * d, d, d], -1)
    q = ft.apply_rotary_pos_emb(parts[0].reshape(*shape, g * ratio, d), freqs, form)
    for got, want in zip(found, (q, ft.apply_rotary_pos_emb(parts[1], other, form), parts[2]), strict=True):
        same(got, want, "transposed")
    sum(t.sum() for t in found).backward()
    assert qkv.grad.shape == qkv.shape
    same(qkv.grad[..., -d:], torch.ones(*shape, g, d), "values' gradient")
    with pytest.raises(ShapeError, match="positions"):  # fewer than those of two processes
        ft.apply_fused_qkv_rotary_pos_emb(qkv, freqs, freqs, [ratio * d, d, d], form, cp_size=2)
    with pytest.raises(ShapeError, match="qkv"):
        ft.apply_fused_qkv_rotary_pos_emb(qkv, freqs, freqs, [d, d, d])


def test_modules_within_have_the_frontends_name_where_nothing_was_aliased(monkeypatch):
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    with pytest.raises(AttributeError, match=r"^module 'fp8kit_torch\.optimizers' .*mean FusedAdam"):
        _ = ft.optimizers.Adam


def test_modules_within_are_attributes_of_the_frontend():
    """Without ``as_transformer_engine``: the import alone."""
    assert ft.quantization.FP8GlobalStateManager is ft.fp8.FP8GlobalStateManager is State
    assert ft.ops.Linear is fusible.Linear
    assert ft.cpp_extensions.general_gemm is general_gemm
    assert ft.attention.rope.apply_rotary_pos_emb is ft.apply_rotary_pos_emb
    assert ft.permutation.moe_permute is ft.moe_permute
    assert ft.tensor.float8_tensor.Float8Tensor is ft.Float8Tensor
    with pytest.raises(AttributeError, match=r"'autocst'; did you mean autocast\?"):
        ft.quantization.autocst  # noqa: B018
    with pytest.raises(AttributeError, match="recipes say how"):
        ft.HybridQuantizedTensor  # noqa: B018
    with pytest.raises(AttributeError, match="runs beside GEMMs"):
        ft.module.initialize_ub  # noqa: B018


@pytest.mark.parametrize(
    "layer",
    [
        lambda: ft.Linear(16, 16),
        lambda: ft.MultiheadAttention(32, 2),
        lambda: ft.DotProductAttention(2, 16),
        lambda: ft.TransformerLayer(32, 64, 2),
    ],
)
def test_methods_about_groups_and_late_gradients(layer, tmp_path):
    """Accepted where there is nothing to do, else refused."""
    made = layer()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        alone = torch.distributed.group.WORLD
        made.set_tensor_parallel_group(alone)
        made.set_context_parallel_group((alone, None), [0], None)
        logits, classes = torch.ones(2, 4), torch.zeros(2, dtype=torch.int64)
        assert ft.parallel_cross_entropy(logits, classes, dist_process_group=alone).shape == (2,)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.distributed, "get_world_size", lambda group: 2)
            for call in (lambda group: ft.parallel_cross_entropy(logits, classes, dist_process_group=group),):
                with pytest.raises(
                    NotImplementedError, match=r"_group: got a group of 2 processes, expected one process"
                ):
                    call(alone)
    finally:
        torch.distributed.destroy_process_group()
    with pytest.raises(ArgumentError, match=r"tp_group: got 3, expected None or a process group"):
        made.set_tensor_parallel_group(3)
    assert made.need_backward_dw() is False
    made.backward_dw()


@pytest.mark.parametrize(
    ("kind", "sizes"), [("Linear", (16, 16)), ("LayerNorm", (16,)), ("LayerNormMLP", (16, 16))]
)
def test_a_dtype_that_fp8kit_has_not(device, kind, sizes):
    layer = getattr(ft, kind)(*sizes, device=device)
    with pytest.raises(FormatError, match="inp: got complex64, expected a dtype of fp8kit"):
        layer(torch.ones(4, 16, dtype=torch.complex64, device=device))


def test_module_paths_are_importable_without_the_alias():
    """Those of Transformer Engine that docs/torch.md names; a module of the frontend's own keeps its name."""
    from fp8kit_torch.cpp_extensions import general_gemm as gemm
    from fp8kit_torch.distributed import reduce_sequence_parallel_gradients
    from fp8kit_torch.ops import Linear
    from fp8kit_torch.quantization import FP8GlobalStateManager

    assert gemm is general_gemm
    assert Linear is fusible.Linear
    assert FP8GlobalStateManager is State
    assert reduce_sequence_parallel_gradients is ft.distributed.reduce_sequence_parallel_gradients
    assert sys.modules["fp8kit_torch.transformer"].__name__ == "fp8kit_torch.transformer"
