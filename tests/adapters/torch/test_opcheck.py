"""torch's own checks of every op of the frontend, forward and backward: schema, fake tensors, registration,
tracing."""

from __future__ import annotations

import pytest
import torch
from fp8kit_torch.calibration import amax_of
from fp8kit_torch.library import OPS, call_by, record_, text_of, update_
from fp8kit_torch.state import ScalingState, held
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import fp8kit as fk
from fp8kit.collectives import FakeCollectives
from fp8kit.execution.codec import encode
from fp8kit.formats import float32
from fp8kit.ops.activation import ActivationSpec
from fp8kit.ops.attention import AttentionSpec
from fp8kit.ops.casts import DequantizeSpec, QuantizeSpec, RotateSpec
from fp8kit.ops.communicate import GroupSpec
from fp8kit.ops.cross_entropy import CrossEntropySpec
from fp8kit.ops.drop_path import DropPathSpec
from fp8kit.ops.dropout_add import AddSpec, DropoutAddSpec
from fp8kit.ops.embedding import EmbeddingSpec
from fp8kit.ops.expert_linear import ExpertLinearSpec
from fp8kit.ops.fp8_gemm import Fp8GemmSpec
from fp8kit.ops.gated_mlp import GatedMLPSpec
from fp8kit.ops.grouped_linear import GroupedLinearSpec
from fp8kit.ops.linear import LinearSpec
from fp8kit.ops.norm import NormSpec
from fp8kit.ops.norm_linear import NormLinearSpec
from fp8kit.ops.norm_mlp import NormMLPSpec
from fp8kit.ops.permute import ExpertRowsSpec, PermuteSpec, UnpermuteSpec
from fp8kit.ops.product import ProductSpec
from fp8kit.ops.registry import OPERATIONS
from fp8kit.ops.ring_attention import RingSpec
from fp8kit.ops.rope import RopeSpec
from fp8kit.ops.router import AuxLossSpec, RouterSpec
from fp8kit.ops.scale_lines import LineScalesSpec, ScaleLinesSpec
from fp8kit.ops.scaled_activation import ScaledActivationSpec
from fp8kit.ops.softmax import MseSpec, SoftmaxSpec
from fp8kit.ops.split_heads import SplitHeadsSpec
from fp8kit.ops.statistics import CastStatistics, StatisticsSpec
from fp8kit.quantization import Quantizer
from fp8kit.recipe import DelayedScaling, Float8CurrentScaling
from fp8kit.spec import Operation
from tests.support.combinations import combinations

from .twins import same

ONE = FakeCollectives(1)
# by threads, and so on the CPU
ROWS = ("gather_rows", "reduce_rows", "reduce_all", "columns_to_rows", "rows_to_columns")
COMMUNICATING = (*ROWS, "ring_attention")


def _operands(device):
    """One call of every operation: name -> (spec, inputs, names of those that want a gradient, GEMMs whose
    scales come from a state)."""

    def r(*shape):
        return torch.randn(shape, device=device)

    fp8 = DelayedScaling().quantization
    norm, plain = NormSpec(16), ProductSpec(16, (24,))
    quantised = ProductSpec(16, (24,), fp8=fp8)
    fc1, fc2 = ProductSpec(16, (32,), bias="deferred", prefix="fc1_"), ProductSpec(32, (16,), prefix="fc2_")
    gated = [
        ProductSpec(k, (n,), fp8=fp8, prefix=f"{name}_")
        for name, k, n in (("gate", 16, 24), ("up", 16, 24), ("down", 24, 16))
    ]
    norms = {"x": r(2, 3, 16), "norm_weight": r(16), "norm_bias": r(16)}
    own = {"weight0": r(24, 16), "bias0": r(24)}
    codes, codes16 = (
        torch.arange(rows * 16, device=device).reshape(rows, 16).to(torch.uint8) % 64 for rows in (6, 16)
    )
    places = torch.tensor([[1, 0], [0, 1], [-1, -1], [1, 1], [3, 0], [2, 0]], device=device).int()
    return {
        "linear": (
            LinearSpec(quantised),
            {"x": r(2, 3, 16), **own, "residual": r(2, 3, 24)},
            "x weight0 bias0 residual",
            ("",),
        ),
        "weight_cast": (LinearSpec(quantised), {"weight0": own["weight0"]}, "", ("",)),
        "grouped_linear": (
            GroupedLinearSpec(plain, (2, 0, 4)),
            {"x": r(2, 3, 16)} | {f"{i}_{name}": t.clone() for i in range(3) for name, t in own.items()},
            "x 0_weight0 0_bias0 2_weight0 2_bias0",
            (),
        ),
        "norm": (norm, norms, "x norm_weight norm_bias", ()),
        "norm_linear": (
            NormLinearSpec(norm, plain, True, True),
            norms | own,
            "x norm_weight norm_bias weight0 bias0",
            (),
        ),
        "norm_mlp": (
            NormMLPSpec(norm, fc1, fc2, fused_residual=True),
            norms
            | {"fc1_weight0": r(32, 16), "fc1_bias0": r(32), "fc2_weight0": r(16, 32), "fc2_bias0": r(16)},
            "x norm_weight norm_bias fc1_weight0 fc1_bias0 fc2_weight0 fc2_bias0",
            (),
        ),
        "gated_mlp": (
            GatedMLPSpec(*gated),
            {"x": r(2, 3, 16), "gate_weight0": r(24, 16), "up_weight0": r(24, 16), "down_weight0": r(16, 24)}
            | {"gate_bias0": r(24), "up_bias0": r(24), "down_bias0": r(16)},
            "x gate_weight0 gate_bias0 up_weight0 up_bias0 down_weight0 down_bias0",
            ("gate_", "up_", "down_"),
        ),
        "attention": (AttentionSpec(2, 8), {"qkv": r(5, 2, 48)}, "qkv", ()),
        "dropout_add": (
            DropoutAddSpec(16, 0.25),
            {"x": r(6, 16), "bias": r(16), "residual": r(6, 16), "rng": torch.tensor([3, 4], device=device)},
            "x bias residual",
            (),
        ),
        "drop_path": (
            DropPathSpec(16, 0.25),
            {"x": r(3, 2, 16), "residual": r(3, 2, 16), "rng": torch.tensor([3, 4], device=device)},
            "x residual",
            (),
        ),
        "split_heads": (SplitHeadsSpec((("q", 4), ("k", 2)), 8, 2), {"x": r(5, 2, 48)}, "x", ()),
        "add": (AddSpec(), {"a": r(6, 16), "b": r(16)}, "a b", ()),
        "rope": (RopeSpec(((2, 8, "freqs"),)), {"x": r(5, 2, 16), "freqs": r(5, 8)}, "x", ()),
        "cross_entropy": (
            CrossEntropySpec(16),
            {"logits": r(6, 16), "targets": torch.arange(6, device=device)},
            "logits",
            (),
        ),
        "permute": (PermuteSpec(True), {"x": r(4, 16), "row_map": places, "probs": r(4, 2)}, "x probs", ()),
        "unpermute": (UnpermuteSpec(4), {"x": r(6, 16), "row_map": places, "probs": r(4, 2)}, "x probs", ()),
        "expert_rows": (ExpertRowsSpec(4, 12), {"routing": places.clamp(min=0)}, "", ()),
        "expert_linear": (
            ExpertLinearSpec(3, 16, 24),
            {
                "x": r(6, 16),
                "group_sizes": torch.tensor([2, 0, 3], device=device).int(),
                "weight": r(3, 24, 16),
                "bias": r(3, 24),
            },
            "x weight bias",
            (),
        ),
        "expert_weight_cast": (
            ExpertLinearSpec(3, 16, 24, "oi", Float8CurrentScaling().quantization),
            {"weight": r(3, 24, 16)},
            "",
            (),
        ),
        "router": (RouterSpec(8, 2), {"logits": r(6, 8)}, "logits", ()),
        "moe_aux_loss": (
            AuxLossSpec(0.1),
            {"probs": r(6, 8), "counts": torch.arange(8, device=device).int()},
            "probs",
            (),
        ),
        "scaled_activation": (
            ScaledActivationSpec("swiglu", 16),
            {"x": r(6, 16), "probs": r(6)},
            "x probs",
            (),
        ),
        **{name: (GroupSpec(ONE.ranks[0].name), {"x": r(6, 16)}, "x", ()) for name in ROWS},
        "ring_attention": (
            RingSpec(AttentionSpec(2, 8, layout="separate"), ONE.ranks[0].name),
            {name: r(2, 3, 2, 16) for name in "qkv"},
            "q k v",
            (),
        ),
        "softmax": (SoftmaxSpec(16), {"x": r(6, 16)}, "x", ()),
        "mse": (MseSpec(), {"x": r(6, 16), "target": r(6, 16)}, "x target", ()),
        "embedding": (
            EmbeddingSpec(10, 4, float32),
            {"ids": torch.arange(6, device=device), "table": r(10, 4)},
            "table",
            (),
        ),
        "activation": (ActivationSpec("swiglu", 16), {"x": r(6, 16)}, "x", ()),
        "line_scales": (LineScalesSpec(16, 1, 8), {"x": r(6, 16), "bias0": r(16)}, "", ()),
        "scale_lines": (ScaleLinesSpec(2.0, 3.0, 1), {"x": r(6, 16), "scales": r(16).abs()}, "x", ()),
        "quantize": (QuantizeSpec(fk.E4M3, (6, 16)), {"x": r(6, 16)}, "", ()),
        "dequantize": (DequantizeSpec(fk.E4M3, (6, 16), "float32"), {"q": codes, "scale_inv": r(1)}, "", ()),
        "rotate": (RotateSpec(16, "te"), {"x": r(6, 16)}, "", ()),
        "statistics": (
            StatisticsSpec(casts=(CastStatistics(Quantizer(fk.E4M3)),), twin=True),
            {"x": r(6, 16), "twin": r(6, 16)},
            "",
            (),
        ),
        "fp8_gemm": (
            Fp8GemmSpec(16, 16, "float32", fk.E4M3, fk.E4M3),
            {"a": codes16, "b": codes16 + 1, "a_scale_inv": r(1), "b_scale_inv": r(1)},
            "",
            (),
        ),
    }


# not those that other tests register
SHIPPED = {name: op for name, op in OPERATIONS.items() if type(op).__module__.startswith("fp8kit.")}


ALONE = [name for name in OPS if name in SHIPPED and name not in COMMUNICATING]
TRACED = ["permute"]  # what `make test` traces: tracing is the same for all
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
TRACING = ("test_aot_dispatch_dynamic",)


@pytest.mark.parametrize("name", ALONE)
def test_opcheck(device, name):
    check(device, name, CHECKS)


# the gradient of a quantised call also changes a live module's state: test_autocast_around
QUANTISED = {name for name, (_, _, _, gemms) in _operands("cpu").items() if gemms}
UNQUANTISED = [name for name in ALONE if name not in QUANTISED]


@combinations({"name": UNQUANTISED}, usual=TRACED)
def test_opcheck_while_it_is_traced(device, name):
    check(device, name, TRACING)


def check(device, name, checks):
    spec, inputs, wanted, gemms = _operands(device)[name]
    needs = tuple(wanted.split())
    tensors = [t.requires_grad_(n in needs) for n, t in inputs.items()]
    text = text_of(name, spec, tuple(inputs), gemms, needs=needs)
    state = [torch.ones(3, device=device)] if gemms else []
    # fills what an operation leaves undefined, between the parts of the saved block
    torch.use_deterministic_algorithms(True)
    try:
        opcheck(OPS[name].call, (tensors, state, text), test_utils=checks)
    finally:
        torch.use_deterministic_algorithms(False)


class _Calls(TorchDispatchMode):
    """The arguments of every call of an operation within, as they were."""

    def __init__(self, operation):
        super().__init__()
        self.operation, self.seen = operation, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is self.operation:
            self.seen.append(tree_map_only(torch.Tensor, lambda t: t.detach().clone(), args))
        return func(*args, **kwargs or {})


DIFFERENTIABLE = [name for name, (_, _, wanted, _) in _operands("cpu").items() if wanted]


BACKWARD = [name for name in DIFFERENTIABLE if name not in COMMUNICATING]


@pytest.mark.parametrize("name", BACKWARD)
def test_opcheck_of_backward(device, name):
    check_backward(device, name, CHECKS[::2])


@combinations({"name": BACKWARD}, usual=["linear", *TRACED])
def test_opcheck_of_backward_while_it_is_traced(device, name):
    check_backward(device, name, TRACING)


@pytest.mark.parametrize("name", COMMUNICATING)
def test_opcheck_of_communication(name):
    check("cpu", name, CHECKS)
    check_backward("cpu", name, CHECKS[::2])


@combinations({"name": COMMUNICATING}, usual=["gather_rows"])
def test_opcheck_of_communication_while_it_is_traced(name):
    check("cpu", name, TRACING)
    check_backward("cpu", name, TRACING)


def check_backward(device, name, checks):
    """The arguments are those that autograd gives."""
    spec, inputs, wanted, gemms = _operands(device)[name]
    needs = tuple(wanted.split())
    tensors = [t.requires_grad_(n in needs) for n, t in inputs.items()]
    own_state, histories, rule = [], [], ""
    if gemms:
        own = DelayedScaling()
        states = [ScalingState(n * len(gemms), own.amax_history_len, device) for n in (3, 2)]  # slots a GEMM
        rule = encode(own.history)
        own_state = [*[state.scale for state in states], *[state.handle for state in states]]
        histories = [state.amax_history for state in states]
    ops = OPS[name]
    backward = ops.recorded[1] if gemms else ops.backward
    text = text_of(name, spec, tuple(inputs), gemms, needs=needs, rule=rule)
    y = ops.traced(tensors, own_state, histories, text)[0]
    with _Calls(backward) as calls, torch.autograd.set_multithreading_enabled(False):
        y.backward(torch.randn_like(y))
    (given,) = calls.seen
    with held():  # a state is updated at the end of a pass, and here is none
        opcheck(backward, given, test_utils=checks)
        backward(*given)
    made = [n for n in needs if n in call_by(text).infer(tensors).grads]
    for n, grad in zip(made, given[0], strict=False):  # with a state the history comes after them
        same(grad, inputs[n].grad, n)


def test_every_backward_is_checked():
    assert {
        name for name, op in SHIPPED.items() if name in OPS and type(op).backward is not Operation.backward
    } <= set(DIFFERENTIABLE)


def test_opcheck_of_state(device):
    history, row = torch.rand(3, 4, device=device), torch.rand(4, device=device)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    opcheck(record_, (history.clone(), row, torch.tensor(0), "", 0), test_utils=checks)
    parts = [[torch.ones(4, device=device)], [torch.ones(4, device=device)], [history]]
    opcheck(update_, (*parts, encode(DelayedScaling().history), True), test_utils=checks)
    record_(history, row, torch.tensor(0), "", 0)
    same(history[0], torch.maximum(history[0], row), "row 0")


def test_opcheck_of_calibration(device):
    x = torch.randn(6, 16, device=device)
    opcheck(amax_of, (x,))
    same(amax_of(x), x.abs().max().reshape(1), "amax")
