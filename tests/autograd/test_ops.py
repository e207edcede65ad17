"""Every operation through the native frontend: gradients against differences in high precision, FP8 against
an exact simulation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fp8kit import arrays, autograd, codec, formats
from fp8kit.arrays import ArrayView
from fp8kit.autograd import Tensor, apply, call, tensor
from fp8kit.backends import dispatch
from fp8kit.backends.reference import gemm
from fp8kit.errors import AutogradError, FormatError, RecipeError, ShapeError, UnsupportedError
from fp8kit.ops.cross_entropy import CrossEntropySpec, cross_entropy
from fp8kit.ops.dropout_add import AddSpec, DropoutAddSpec, add, dropout_add
from fp8kit.ops.embedding import EmbeddingSpec, embedding
from fp8kit.ops.linear import LinearSpec, linear, weight_cast
from fp8kit.ops.norm import NormSpec, norm
from fp8kit.ops.norm_linear import NormLinearSpec, norm_linear
from fp8kit.ops.norm_mlp import NormMLPSpec, norm_mlp
from fp8kit.ops.product import ProductSpec
from fp8kit.ops.product_quantized import QuantizedProduct
from fp8kit.ops.products import product_class
from fp8kit.quantization import Gemm, Quantization, Quantizer
from fp8kit.spec import WorkingSet
from fp8kit.testing import assert_close, assert_same_bits, check_grads, sum_slack
from fp8kit.testing.contract.block import operand

RNG = np.random.default_rng(7)
LINE, SQUARE = "block_1x128", "block_128x128"


def by_tensor(source: str) -> Quantization:
    x, g = (Quantizer(fmt, scale_source=source) for fmt in (formats.E4M3, formats.E5M2))
    return Quantization.of(x, x, g)


def by_blocks(*granularities: str) -> Quantization:
    operands = (Quantizer(formats.E4M3, each, scale_rule="power_2") for each in granularities)
    return Quantization.of(*operands, fprop="split")


DELAYED, CURRENT, GIVEN = by_tensor("delayed"), by_tensor("current"), by_tensor("amax")
BLOCKS = by_blocks(LINE, SQUARE, LINE)


def normal(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape).astype(np.float32)


def one(value: float) -> ArrayView:
    return arrays.as_view(np.array([value], np.float32))


def cut(weight: np.ndarray[Any, Any], segments: tuple[int, ...], layout: str) -> list[np.ndarray[Any, Any]]:
    parts = np.split(weight, np.cumsum(segments)[:-1])
    return [np.ascontiguousarray(p if layout == "oi" or p.ndim == 1 else p.T) for p in parts]


def named(prefix: str, values: list[Any]) -> dict[str, Any]:
    return {f"{prefix}{i}": v for i, v in enumerate(values)}


@pytest.mark.parametrize("layout", ["oi", "io"])
@pytest.mark.parametrize("segments", [(12,), (5, 7), (16, 32)])
def test_linear_gradients(segments: tuple[int, ...], layout: str) -> None:
    spec = LinearSpec(ProductSpec(9, segments, layout))
    weights, biases = (
        cut(normal(sum(segments), 9), segments, layout),
        cut(normal(sum(segments)), segments, layout),
    )
    count = len(segments)

    def function(x: Tensor, *rest: Tensor) -> Tensor:
        return apply(
            linear, spec, {"x": x, **named("weight", list(rest[:count])), **named("bias", list(rest[count:]))}
        )["y"]

    x = normal(2, 3, 9)
    check_grads(function, [x, *weights, *biases])
    y = function(tensor(x), *map(tensor, weights), *map(tensor, biases)).numpy()
    whole = np.concatenate([w if layout == "oi" else w.T for w in weights])
    want = x.astype(np.float64) @ whole.T.astype(np.float64) + np.concatenate(biases)
    magnitude = np.abs(x.astype(np.float64)) @ np.abs(whole.T) + np.abs(np.concatenate(biases))
    assert_close("y", y, want, formats.float32, sum_slack(magnitude, 9))


def simulate(value: np.ndarray[Any, Any], fmt: formats.Format, scale: float | None) -> np.ndarray[Any, Any]:
    """What FP8 keeps of a tensor: exact decode(encode(x * scale)) / scale; scale None is the current-scaling
    rule."""
    if scale is None:
        scale = float(np.float32(fmt.max) / np.abs(value).max().astype(np.float32))
    codes = codec.encode(value.astype(np.float32) * np.float32(scale), fmt)
    return codec.decode(codes, fmt) * np.float64(np.float32(1) / np.float32(scale))


@pytest.mark.parametrize("layout", ["oi", "io"])
@pytest.mark.parametrize("segments", [(40,), (16, 24), (17, 23)])
@pytest.mark.parametrize("fp8", [DELAYED, CURRENT, GIVEN], ids=["delayed", "current", "given"])
def test_linear_fp8_is_the_product_of_exactly_quantised_operands(
    fp8: Quantization, segments: tuple[int, ...], layout: str
) -> None:
    m, k, n = 10, 24, sum(segments)
    x, w, b, g = normal(2, 5, k), normal(n, k), normal(n), normal(2, 5, n)
    spec = LinearSpec(ProductSpec(k, segments, layout, fp8=fp8))
    weights, biases = cut(w, segments, layout), cut(b, segments, layout)
    delayed = fp8 is DELAYED
    scales = {"x": 64.0, "w": 96.0, "g": 1000.0}
    inputs: dict[str, Any] = {"x": tensor(x, True)}
    inputs |= named("weight", [tensor(v, True) for v in weights]) | named(
        "bias", [tensor(v, True) for v in biases]
    )
    late = {}
    if delayed:
        inputs |= {"x_scale": one(scales["x"]), "w_scale": one(scales["w"])}
        late = {"g_scale": one(scales["g"])}
    if fp8 is GIVEN:
        inputs |= {"x_amax_in": one(np.abs(x).max()), "w_amax_in": one(np.abs(w).max())}
        late = {"g_amax_in": one(np.abs(g).max())}
    amax = {name: one(0.0) for name in ("x_amax", "w_amax", "g_amax")}
    y = apply(linear, spec, inputs, amax, late)["y"]
    y.backward(g)
    if fp8 is not GIVEN:
        assert [a.numpy()[0] for a in amax.values()] == [np.abs(v).max() for v in (x, w, g)]
    xq, wq = (
        simulate(v, formats.E4M3, scales[s] if delayed else None)
        for v, s in ((x.reshape(m, k), "x"), (w, "w"))
    )
    gq = simulate(g.reshape(m, n), formats.E5M2, scales["g"] if delayed else None)
    assert_close(
        "y",
        y.numpy().reshape(m, n),
        xq @ wq.T + b,
        formats.float32,
        sum_slack(np.abs(xq) @ np.abs(wq.T) + np.abs(b), k),
    )
    assert_close(
        "dx",
        inputs["x"].grad.numpy().reshape(m, k),
        gq @ wq,
        formats.float32,
        sum_slack(np.abs(gq) @ np.abs(wq), n),
    )
    dw = np.concatenate(
        [
            inputs[f"weight{i}"].grad.numpy().T if layout == "io" else inputs[f"weight{i}"].grad.numpy()
            for i in range(len(weights))
        ]
    )
    assert_close("dw", dw, gq.T @ xq, formats.float32, sum_slack(np.abs(gq.T) @ np.abs(xq), m))
    db = np.concatenate([inputs[f"bias{i}"].grad.numpy() for i in range(len(biases))])
    flat = g.reshape(m, n).astype(np.float64)
    assert_close("db", db, flat.sum(0), formats.float32, sum_slack(np.abs(flat).sum(0), m))


def blocks(value: np.ndarray[Any, Any], quant: Quantizer) -> np.ndarray[Any, Any]:
    """What FP8 keeps of an operand whose contraction is its last axis, exactly."""
    codes, _, inverse = operand(
        value, quant.tile, quant.format, quant.power_2, quant.epsilon, formats.float32.max
    )
    return (codec.decode(codes, quant.format) * inverse.astype(np.float64))[
        : value.shape[0], : value.shape[1]
    ]


@pytest.mark.parametrize("layout", ["oi", "io"])
@pytest.mark.parametrize("segments", [(200,), (128, 128), (17, 150, 3)])
@pytest.mark.parametrize("tiles", [(LINE, SQUARE, LINE), (SQUARE, LINE, LINE), (LINE, LINE, LINE)], ids=str)
def test_linear_with_scales_of_blocks(tiles: tuple[Any, ...], segments: tuple[int, ...], layout: str) -> None:
    m, k, n = 140, 270, sum(segments)
    x, w, b, g = (
        v * np.float32(s)
        for v, s in ((normal(2, 70, k), 1), (normal(n, k), 0.1), (normal(n), 1), (normal(2, 70, n), 1e-3))
    )
    rules_ = ("power_2", "exact", "power_2")
    kinds = zip((formats.E4M3, formats.E4M3, formats.E5M2), rules_, tiles, strict=True)
    operands = (Quantizer(fmt, tile, "current", rule, 1e-6) for fmt, rule, tile in kinds)
    fp8 = Quantization.of(*operands, fprop="split")
    inputs: dict[str, Any] = {"x": tensor(x, True)}
    inputs |= named("weight", [tensor(v, True) for v in cut(w, segments, layout)])
    inputs |= named("bias", [tensor(v, True) for v in cut(b, segments, layout)])
    out = apply(linear, LinearSpec(ProductSpec(k, segments, layout, fp8=fp8)), inputs)
    assert list(out) == ["y"]
    out["y"].backward(g)
    x, g = x.reshape(m, k), g.reshape(m, n)
    xq, wq, gq = blocks(x, fp8.x), blocks(w, fp8.w), blocks(g, fp8.g)
    assert_close(
        "y",
        out["y"].numpy().reshape(m, n),
        xq @ wq.T + b,
        formats.float32,
        sum_slack(np.abs(xq) @ np.abs(wq.T) + np.abs(b), k),
    )
    wq = blocks(w.T, fp8.w).T
    assert_close(
        "dx",
        inputs["x"].grad.numpy().reshape(m, k),
        gq @ wq,
        formats.float32,
        sum_slack(np.abs(gq) @ np.abs(wq), n),
    )
    gq, xq = blocks(g.T, fp8.g), blocks(x.T, fp8.x)
    grads = [inputs[f"weight{i}"].grad.numpy() for i in range(len(segments))]
    dw = np.concatenate([part.T if layout == "io" else part for part in grads])
    assert_close("dw", dw, gq @ xq.T, formats.float32, sum_slack(np.abs(gq) @ np.abs(xq.T), m))
    db = np.concatenate([inputs[f"bias{i}"].grad.numpy() for i in range(len(segments))])
    assert_close("db", db, g.astype(np.float64).sum(0), formats.float32, sum_slack(np.abs(g).sum(0), m))


def quantizer(**fields: Any) -> Quantizer:
    return Quantizer(formats.E4M3, **fields)


X, WIDE = quantizer(), Quantizer(formats.E5M2)
REFUSED = {
    "granularity: got .* expected scales of the same kind": Quantization.of(BLOCKS.x, BLOCKS.w, X, "split"),
    "fprop.a, b: got block_128x128 for both": by_blocks(SQUARE, SQUARE, LINE),
    "wgrad.a, b: got block_128x128 for both": by_blocks(SQUARE, LINE, SQUARE),
    'fprop.accumulation: got "fast", expected "split"': Quantization.of(BLOCKS.x, BLOCKS.w, BLOCKS.g),
    "scale_source: got delayed for some": Quantization.of(DELAYED.x, X, X),
    "wgrad.a, b: got E5M2 for both": Quantization.of(WIDE, X, WIDE),
    "fprop.b.format: got E2M1, expected E4M3 or E5M2": Quantization.of(X, Quantizer(formats.E2M1), X),
    "dgrad.a.granularity: got mx_1x32": Quantization.of(X, X, quantizer(granularity="mx_1x32")),
    "fprop.a.granularity: got nvfp4_1x16": Quantization.of(quantizer(granularity="nvfp4_1x16"), X, X),
    "dgrad.a.scale_source: got static": Quantization.of(X, X, quantizer(scale_source="static")),
    "fprop.a.scale_rule: got rceil": Quantization.of(quantizer(scale_rule="rceil"), X, X),
    "dgrad.a.stochastic_bits: got 8, expected 0": Quantization.of(X, X, quantizer(stochastic_bits=8)),
    "wgrad.b.hadamard: got 16": Quantization(Gemm(X, X), Gemm(X, X), Gemm(X, quantizer(hadamard=16))),
    "wgrad.b: got E5M2 .* as the other GEMM": Quantization(Gemm(X, X), Gemm(X, X), Gemm(X, WIDE)),
    "wgrad.compute: got 'high_precision'": Quantization(
        Gemm(X, X), Gemm(X, X), Gemm(X, X, compute="high_precision")
    ),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_no_product_carries_out_is_refused_by_name(said: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^recipe: {said}"):
        product_class(REFUSED[said])
    spec = LinearSpec(ProductSpec(16, (16,), bias="none", fp8=REFUSED[said]))
    with pytest.raises(UnsupportedError, match=said):
        apply(linear, spec, {"x": tensor(normal(16, 16)), "weight0": tensor(normal(16, 16))})


@pytest.mark.parametrize("name", ["granularity", "scale_source", "scale_rule"])
def test_words_that_a_quantizer_does_not_know(name: str) -> None:
    with pytest.raises(RecipeError, match=f"Quantizer: {name}: got 'blocks', expected one of"):
        Quantizer(formats.E4M3, **{name: "blocks"})


def test_each_granularity_has_one_class_of_products() -> None:
    kinds = {product_class(fp8) for fp8 in (DELAYED, CURRENT, GIVEN, BLOCKS)}
    assert len(kinds) == 2
    assert all(issubclass(kind, QuantizedProduct) for kind in kinds)


@pytest.mark.parametrize("segments", [(40,), (13, 27)])
@pytest.mark.parametrize("layout", ["oi", "io"])
def test_cached_weight_by_blocks_gives_the_same_bits(layout: str, segments: tuple[int, ...]) -> None:
    x, w, g = normal(20, 150), cut(normal(40, 150), segments, layout), normal(20, 40)
    cached, plain = (LinearSpec(ProductSpec(150, segments, layout, "none", BLOCKS, c)) for c in (True, False))
    results = []
    for spec in (plain, cached):
        inputs: dict[str, Any] = {"x": tensor(x, True), **named("weight", [tensor(v, True) for v in w])}
        if spec is cached:
            made = apply(weight_cast, plain, named("weight", [tensor(v) for v in w]))
            assert sorted(made) == ["w_q", "w_q_inv", "w_qt", "w_qt_inv"]
            inputs |= {name: part.view for name, part in made.items()}
        y = apply(linear, spec, inputs)["y"]
        y.backward(g)
        results.append([y.numpy(), inputs["x"].grad.numpy(), inputs["weight0"].grad.numpy()])
    for name, a, b in zip(("y", "dx", "dw"), *results, strict=True):
        assert_same_bits(name, b, a)
    wrong = {
        "x": tensor(x),
        **named("weight", [tensor(v) for v in w]),
        **{n: p.view for n, p in made.items() if n != "w_qt_inv"},
    }
    with pytest.raises(ShapeError, match="w_qt_inv"):
        apply(linear, cached, wrong)


def test_cached_weight_gives_the_same_bits() -> None:
    x, w, g = normal(20, 24), normal(40, 24), normal(20, 40)
    cached, plain = (
        LinearSpec(ProductSpec(24, (40,), bias="none", fp8=DELAYED, weight_cached=c)) for c in (True, False)
    )
    scales = {"x_scale": one(64.0), "w_scale": one(96.0)}
    results = []
    for spec in (plain, cached):
        inputs: dict[str, Any] = {"x": tensor(x, True), "weight0": tensor(w, True), **scales}
        if spec is cached:
            del inputs["w_scale"]
            inputs |= {
                n: t.view
                for n, t in apply(
                    weight_cast, plain, {"weight0": tensor(w), "w_scale": scales["w_scale"]}
                ).items()
                if n != "w_amax"
            }
        y = apply(linear, spec, inputs, backward_inputs={"g_scale": one(500.0)})["y"]
        y.backward(g)
        results.append([y.numpy(), inputs["x"].grad.numpy(), inputs["weight0"].grad.numpy()])
    for name, a, b in zip(("y", "dx", "dw"), *results, strict=True):
        assert_same_bits(name, b, a)


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


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "swiglu", "silu"])
def test_norm_mlp_gradients_with_residual(activation: str, joins: bool) -> None:
    width = 20 if activation == "swiglu" else 10
    fc1, fc2 = ProductSpec(12, (width,), prefix="fc1_"), ProductSpec(10, (12,), prefix="fc2_")
    spec = NormMLPSpec(NormSpec(12, "RMSNorm"), fc1, fc2, activation, residual=not joins, joins=joins)

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


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> dict[Any, list[Any]]:
    """What the CPU engine's products are in float32, by their shape, before they are rounded."""
    found: dict[Any, list[Any]] = {}
    store = gemm.store

    def kept(view: ArrayView, values: np.ndarray[Any, Any]) -> None:
        found.setdefault(view.shape, []).append(values.copy())
        store(view, values)

    monkeypatch.setattr(gemm, "store", kept)
    return found


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "fp8", [None, DELAYED, CURRENT, BLOCKS], ids=["high", "delayed", "current", "blocks"]
)
def test_a_residual_joins_within_the_product_with_one_rounding(
    fp8: Quantization | None, dtype: str, recompute: bool, products: dict[Any, list[Any]]
) -> None:
    """The sum is float32's, which the CPU engine adds in the order product, bias, residual; the gradients
    those of an addition apart."""
    kind = formats.dtype(dtype).numpy
    shapes = {
        "norm_weight": (24,),
        "fc1_weight0": (40, 24),
        "fc1_bias0": (40,),
        "fc2_weight0": (24, 40),
        "fc2_bias0": (24,),
    }
    values = {"x": normal(20, 24)} | {name: normal(*shape) / 4 for name, shape in shapes.items()}
    scale = (
        {f"fc{i}_{n}_scale": one(v) for i in (1, 2) for n, v in (("x", 50.0), ("w", 300.0))}
        if fp8 is DELAYED
        else {}
    )
    late = {f"fc{i}_g_scale": one(2000.0) for i in (1, 2)} if fp8 is DELAYED else {}
    g = normal(20, 24).astype(kind)

    def mlp(**options: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        products = (
            ProductSpec(24, (40,), fp8=fp8, prefix="fc1_"),
            ProductSpec(40, (24,), fp8=fp8, prefix="fc2_"),
        )
        spec = NormMLPSpec(NormSpec(24, "RMSNorm"), *products, "gelu", recompute=recompute, **options)
        inputs = {name: tensor(value.astype(kind), True) for name, value in values.items()}
        return apply(norm_mlp, spec, inputs | scale, backward_inputs=late), inputs

    out, joined = mlp(joins=True)
    assert "residual" not in out
    out["y"].backward(g)
    products.clear()
    plain, apart = mlp(residual=True)
    exact = products[(20, 24)][-1]  # fc2's, before it is rounded
    apply(dropout_add, DropoutAddSpec(24), {"x": plain["y"], "residual": plain["residual"]})["y"].backward(g)
    for name in values:
        assert_same_bits(name, joined[name].grad.numpy(), apart[name].grad.numpy())
    assert_same_bits(
        "y", out["y"].numpy(), (exact + values["x"].astype(kind).astype(np.float32)).astype(kind)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["oi", "io"])
@pytest.mark.parametrize(
    "fp8", [None, DELAYED, CURRENT, BLOCKS], ids=["high", "delayed", "current", "blocks"]
)
def test_linear_adds_a_residual(
    fp8: Quantization | None, layout: str, dtype: str, products: dict[Any, list[Any]]
) -> None:
    """Before its product is rounded; the residual's gradient is the output's own."""
    kind = formats.dtype(dtype).numpy
    segments = (17, 23)
    spec = LinearSpec(ProductSpec(24, segments, layout=layout, fp8=fp8))
    x, residual, g = normal(20, 24), normal(20, 40).astype(kind), normal(20, 40).astype(kind)
    values = (
        {"x": x}
        | named("weight", cut(normal(40, 24), segments, layout))
        | named("bias", [normal(n) for n in segments])
    )
    scale = {"x_scale": one(50.0), "w_scale": one(300.0)} if fp8 is DELAYED else {}
    late = {"g_scale": one(2000.0)} if fp8 is DELAYED else {}

    def run(**more: Any) -> tuple[Tensor, dict[str, Tensor]]:
        inputs = {name: tensor(value.astype(kind), True) for name, value in (values | more).items()}
        return apply(linear, spec, inputs | scale, backward_inputs=late)["y"], inputs

    plain, apart = run()
    exact = products[(20, 40)][-1]
    y, joined = run(residual=residual)
    plain.backward(g)
    y.backward(g)
    assert_same_bits("y", y.numpy(), (exact + residual.astype(np.float32)).astype(kind))
    assert_same_bits("residual", joined["residual"].grad.numpy(), g)
    for name in values:
        assert_same_bits(name, joined[name].grad.numpy(), apart[name].grad.numpy())
    with pytest.raises(
        ShapeError, match=r"linear: residual: got shape \(20, 24\), expected shape \(20, 40\)"
    ):
        run(residual=x)


def test_a_residual_joins_only_an_output_of_its_size() -> None:
    with pytest.raises(FormatError, match=r"norm_mlp: joins: got True, expected False with residual"):
        NormMLPSpec(
            NormSpec(24),
            ProductSpec(24, (40,), prefix="fc1_"),
            ProductSpec(40, (24,), prefix="fc2_"),
            joins=True,
            residual=True,
        )
    with pytest.raises(ShapeError, match=r"norm_mlp: fc2: got 16 output features, expected 24"):
        NormMLPSpec(
            NormSpec(24),
            ProductSpec(24, (40,), prefix="fc1_"),
            ProductSpec(40, (16,), prefix="fc2_"),
            joins=True,
        )


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
    with pytest.raises(ShapeError, match=r"linear: bias0: got nothing"):
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


def test_measure_gives_the_amax_that_a_later_forward_takes() -> None:
    """Measure, then a forward with the amax from outside, equals current scaling bit for bit: what frontends
    that reduce over devices do."""
    x, nw, nb, w, b = normal(20, 24), normal(24), normal(24), normal(40, 24), normal(40)
    inputs = {
        "x": tensor(x),
        "norm_weight": tensor(nw),
        "norm_bias": tensor(nb),
        "weight0": tensor(w),
        "bias0": tensor(b),
    }
    specs = {f: NormLinearSpec(NormSpec(24), ProductSpec(24, (40,), fp8=f)) for f in (CURRENT, GIVEN)}
    want = apply(norm_linear, specs[CURRENT], inputs)["y"].numpy()
    amax = {"x_amax": one(0.0), "w_amax": one(0.0)}
    given = inputs | {f"{name}_in": view for name, view in amax.items()}
    views = {name: v if isinstance(v, ArrayView) else v.view for name, v in given.items()}
    plan = call.bound(norm_linear, specs[GIVEN], views, (), dispatch.kernels(arrays.CPU)).plan
    scratch = {n: arrays.empty(m.shape, m.dtype, arrays.CPU) for n, m in plan.measure_scratch.items()}
    norm_linear.measure(plan, WorkingSet(plan.kernels, views, amax, {}, scratch, 0))
    assert_same_bits("y", apply(norm_linear, specs[GIVEN], given)["y"].numpy(), want)
