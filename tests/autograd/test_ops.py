"""Every operation but Linear through the native frontend: gradients against differences in high precision,
fused operations against their parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fp8kit import arrays, autograd, formats
from fp8kit.autograd import Tensor, apply, tensor
from fp8kit.errors import AutogradError, FormatError, ShapeError
from fp8kit.ops.cross_entropy import CrossEntropySpec, cross_entropy
from fp8kit.ops.dropout_add import AddSpec, DropoutAddSpec, add, dropout_add
from fp8kit.ops.embedding import EmbeddingSpec, embedding
from fp8kit.ops.linear import LinearSpec, linear, weight_cast
from fp8kit.ops.norm import NormSpec, norm
from fp8kit.ops.norm_linear import NormLinearSpec, norm_linear
from fp8kit.ops.norm_mlp import NormMLPSpec, norm_mlp
from fp8kit.ops.product import ProductSpec
from fp8kit.quantization import Quantization
from fp8kit.testing import assert_close, assert_same_bits, check_grads, sum_slack
from tests.support.operands import BLOCKS, CURRENT, DELAYED, normal, one


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_norm_gradients(normalization: str, zero_centered: bool) -> None:
    spec = NormSpec(12, normalization, 1e-5, zero_centered)
    names = spec.inputs()

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        return apply(norm, spec, {"x": x, **dict(zip(names, parameters, strict=True))})["y"]

    check_grads(function, [normal(4, 12), *(normal(12) for _ in names)], step=2.0**-8)


@pytest.mark.parametrize("return_norm", [False, True])
def test_norm_linear_gradients_with_residual(return_norm: bool) -> None:
    spec = NormLinearSpec(NormSpec(12), ProductSpec(12, (4, 6)), residual=True, return_norm=return_norm)

    def function(
        x: Tensor, nw: Tensor, nb: Tensor, w0: Tensor, w1: Tensor, b0: Tensor, b1: Tensor
    ) -> list[Tensor]:
        out = apply(
            norm_linear,
            spec,
            {
                "x": x,
                "norm_weight": nw,
                "norm_bias": nb,
                "weight0": w0,
                "weight1": w1,
                "bias0": b0,
                "bias1": b1,
            },
        )
        return list(out.values())

    check_grads(
        function,
        [normal(5, 12), normal(12), normal(12), normal(4, 12), normal(6, 12), normal(4), normal(6)],
        step=2.0**-8,
    )


@pytest.mark.parametrize("fused_residual", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "swiglu", "silu"])
def test_norm_mlp_gradients_with_residual(activation: str, fused_residual: bool) -> None:
    width = 20 if activation == "swiglu" else 10
    fc1, fc2 = ProductSpec(12, (width,), prefix="fc1_"), ProductSpec(10, (12,), prefix="fc2_")
    spec = NormMLPSpec(
        NormSpec(12, "RMSNorm"),
        fc1,
        fc2,
        activation,
        residual=not fused_residual,
        fused_residual=fused_residual,
    )

    def function(x: Tensor, nw: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> list[Tensor]:
        out = apply(
            norm_mlp,
            spec,
            {
                "x": x,
                "norm_weight": nw,
                "fc1_weight0": w1,
                "fc1_bias0": b1,
                "fc2_weight0": w2,
                "fc2_bias0": b2,
            },
        )
        return list(out.values())

    inputs = [normal(6, 12), normal(12), normal(width, 12) / 4, normal(width), normal(12, 10) / 4, normal(12)]
    check_grads(function, inputs, step=2.0**-8)


@pytest.mark.parametrize("fp8", [DELAYED, CURRENT, BLOCKS], ids=["delayed", "current", "blocks"])
def test_fused_mlp_equals_its_parts_bit_for_bit(fp8: Quantization) -> None:
    """norm_mlp in FP8 is norm, linear, activation, linear: the same codes, so the same bits."""
    x, g = normal(20, 24), normal(20, 24)
    nw, nb, w1, b1, w2, b2 = (
        normal(24),
        normal(24),
        normal(40, 24) / 5,
        normal(40),
        normal(24, 40) / 6,
        normal(24),
    )
    scale = (
        {f"fc{i}_{n}_scale": one(v) for i in (1, 2) for n, v in (("x", 50.0), ("w", 300.0))}
        if fp8 is DELAYED
        else {}
    )
    late = {f"fc{i}_g_scale": one(2000.0) for i in (1, 2)} if fp8 is DELAYED else {}
    spec = NormMLPSpec(
        NormSpec(24),
        ProductSpec(24, (40,), fp8=fp8, prefix="fc1_"),
        ProductSpec(40, (24,), fp8=fp8, prefix="fc2_"),
        "relu",
    )
    values = {
        "x": x,
        "norm_weight": nw,
        "norm_bias": nb,
        "fc1_weight0": w1,
        "fc1_bias0": b1,
        "fc2_weight0": w2,
        "fc2_bias0": b2,
    }
    fused = {name: tensor(v, True) for name, v in values.items()}
    y = apply(norm_mlp, spec, fused | scale, backward_inputs=late)["y"]
    y.backward(g)

    parts = {name: tensor(v, True) for name, v in values.items()}
    first = {f"{n}_scale": scale[f"fc1_{n}_scale"] for n in "xw"} if scale else {}
    second = {f"{n}_scale": scale[f"fc2_{n}_scale"] for n in "xw"} if scale else {}
    one_late = {"g_scale": one(2000.0)} if scale else {}
    normed = apply(norm, spec.norm, {n: parts[n] for n in ("x", "norm_weight", "norm_bias")})["y"]
    h = apply(
        linear,
        LinearSpec(ProductSpec(24, (40,), fp8=fp8)),
        {"x": normed, "weight0": parts["fc1_weight0"], "bias0": parts["fc1_bias0"]} | first,
        backward_inputs=one_late,
    )["y"]

    class Relu(autograd.Function):
        @staticmethod
        def forward(context: autograd.Context, value: Any) -> Any:
            context.save(value > 0)
            return np.maximum(value, 0)

        @staticmethod
        def backward(context: autograd.Context, *cotangents: Any) -> Any:
            return (cotangents[0] * context.saved[0]).astype(np.float32)

    act = Relu.apply(h)
    out = apply(
        linear,
        LinearSpec(ProductSpec(40, (24,), fp8=fp8)),
        {"x": act, "weight0": parts["fc2_weight0"], "bias0": parts["fc2_bias0"]} | second,
        backward_inputs=one_late,
    )["y"]
    out.backward(g)
    assert_same_bits("y", y.numpy(), out.numpy())
    for name in values:
        got, want = fused[name].grad.numpy(), parts[name].grad.numpy()
        if name == "fc1_bias0":  # a sum of 20 rows that two kernels make in their own orders
            assert_close(name, got, want, formats.float32, sum_slack(20 * np.abs(want).max() + 20, 20))
        else:
            assert_same_bits(name, got, want)


def test_dropout_add_keeps_and_scales_alike_in_both_directions() -> None:
    x, residual, p = normal(40, 50), normal(40, 50), 0.25
    rng = arrays.as_view(np.array([3, 4], np.int64))
    spec = DropoutAddSpec(50, p)
    tx, tr = tensor(x, True), tensor(residual, True)
    y = apply(dropout_add, spec, {"x": tx, "residual": tr, "rng": rng})["y"]
    kept = np.abs(y.numpy() - residual) > 0
    # binomial: 2000 draws, six standard deviations
    assert abs(kept.mean() - (1 - p)) < 6 * np.sqrt(p * (1 - p) / kept.size)
    assert_close(
        "y",
        y.numpy(),
        residual.astype(np.float64) + kept * x * np.float64(np.float32(1 / (1 - p))),
        formats.float32,
        2.0**-22,
    )
    g = normal(40, 50)
    y.backward(g)
    assert_close("dx", tx.grad.numpy(), g * kept * np.float64(np.float32(1 / (1 - p))), formats.float32)
    assert_same_bits("dresidual", tr.grad.numpy(), g)


def test_add_broadcasts_and_does_not_share_gradients() -> None:
    check_grads(lambda a, b: apply(add, AddSpec(), {"a": a, "b": b})["y"], [normal(3, 4, 5), normal(4, 5)])
    a, b = tensor(normal(4), True), tensor(normal(4), True)
    (a + b).backward(normal(4))
    assert a.grad.ptr != b.grad.ptr


def test_embedding_and_cross_entropy() -> None:
    ids = np.array([[3, 0, 3], [9, 3, 1]], np.int32)
    table = tensor(normal(10, 6), True)
    spec = EmbeddingSpec(10, 6, formats.float32)
    y = apply(embedding, spec, {"ids": tensor(ids), "table": table})["y"]
    assert_same_bits("y", y.numpy(), table.numpy()[ids])
    g = normal(2, 3, 6)
    y.backward(g)
    want = np.zeros((10, 6))
    np.add.at(want, ids.reshape(-1), g.reshape(-1, 6).astype(np.float64))
    assert_close("dtable", table.grad.numpy(), want, formats.float32, sum_slack(np.abs(want).max() * 3, 3))
    targets = tensor(np.array([1, 2, -100, 0], np.int64))
    for reduction in ("mean", "none"):
        loss = CrossEntropySpec(6, reduction, label_smoothing=0.1)
        check_grads(
            lambda z, loss=loss: apply(cross_entropy, loss, {"logits": z, "targets": targets})["loss"],
            [normal(4, 6)],
            step=2.0**-7,
        )


def test_missing_rules_are_named_when_the_graph_is_built() -> None:
    spec = LinearSpec(ProductSpec(24, (40,), fp8=DELAYED))
    with pytest.raises(AutogradError, match="weight_cast: has no backward, but weight0 requires a gradient"):
        apply(weight_cast, spec, {"weight0": tensor(normal(40, 24), True), "w_scale": one(1.0)})

    class NoBackward(autograd.Function):
        @staticmethod
        def forward(context: autograd.Context, *inputs: Any) -> Any:
            return inputs[0] * 2

    with pytest.raises(AutogradError, match="NoBackward: has no backward"):
        NoBackward.apply(tensor(normal(3), True))
    assert_same_bits(
        "no gradient wanted",
        NoBackward.apply(tensor(np.ones(3, np.float32))).numpy(),
        np.full(3, 2, np.float32),
    )


def test_wrong_input_is_refused_with_names() -> None:
    spec = LinearSpec(ProductSpec(9, (4,)))
    w, b = tensor(normal(4, 9)), tensor(normal(4))
    with pytest.raises(ShapeError, match=r"linear: x: got shape \(3, 8\), expected a last dimension of 9"):
        apply(linear, spec, {"x": tensor(normal(3, 8)), "weight0": w, "bias0": b})
    with pytest.raises(ShapeError, match=r"linear: weight0: got shape \(9, 4\), expected shape \(4, 9\)"):
        apply(linear, spec, {"x": tensor(normal(3, 9)), "weight0": tensor(normal(9, 4)), "bias0": b})
    with pytest.raises(FormatError, match=r"linear: bias0: got bfloat16, expected float32"):
        apply(
            linear,
            spec,
            {"x": tensor(normal(3, 9)), "weight0": w, "bias0": tensor(normal(4), dtype="bfloat16")},
        )
    with pytest.raises(ShapeError, match=r"linear: bias0: missing"):
        apply(linear, spec, {"x": tensor(normal(3, 9)), "weight0": w})


def test_zero_rows() -> None:
    for fp8 in (None, DELAYED, BLOCKS):
        spec = LinearSpec(ProductSpec(24, (40,), fp8=fp8))
        x, w, b = tensor(normal(0, 24), True), tensor(normal(40, 24), True), tensor(normal(40), True)
        extra = {"x_scale": one(1.0), "w_scale": one(1.0)} if fp8 is DELAYED else {}
        y = apply(
            linear,
            spec,
            {"x": x, "weight0": w, "bias0": b, **extra},
            backward_inputs={"g_scale": one(1.0)} if fp8 is DELAYED else {},
        )["y"]
        y.backward(normal(0, 40))
        assert y.shape == (0, 40)
        assert_same_bits("dw", w.grad.numpy(), np.zeros((40, 24), np.float32))
        assert_same_bits("db", b.grad.numpy(), np.zeros(40, np.float32))
