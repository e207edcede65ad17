"""Linear through the native frontend: gradients against differences in high precision, FP8 against an exact
simulation, cached weights, residuals that the product adds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fp8kit import arrays, codec, formats
from fp8kit.arrays import ArrayView
from fp8kit.autograd import Tensor, apply, call, tensor
from fp8kit.backends import dispatch
from fp8kit.backends.reference import gemm
from fp8kit.errors import FormatError, ShapeError
from fp8kit.ops.dropout_add import DropoutAddSpec, dropout_add
from fp8kit.ops.linear import LinearSpec, linear, weight_cast
from fp8kit.ops.norm import NormSpec
from fp8kit.ops.norm_linear import NormLinearSpec, norm_linear
from fp8kit.ops.norm_mlp import NormMLPSpec, norm_mlp
from fp8kit.ops.product import ProductSpec
from fp8kit.quantization import Quantization, Quantizer
from fp8kit.spec import WorkingSet
from fp8kit.testing import assert_close, assert_same_bits, check_grads, sum_slack
from fp8kit.testing.contract.casts import operand
from fp8kit.testing.contract.gemm import values_of
from tests.support.operands import BLOCKS, CURRENT, DELAYED, GIVEN, LINE, SQUARE, cut, named, normal, one


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
    codes, inverse = operand(
        value, quant.tile, quant.format, quant.power_2, quant.epsilon, formats.float32.max
    )
    return values_of(codes, quant.format, inverse, quant.tile)[: value.shape[0], : value.shape[1]]


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


@pytest.mark.parametrize(
    "fp8", [None, DELAYED, CURRENT, BLOCKS], ids=["high", "delayed", "current", "blocks"]
)
def test_some_segments_are_trained(fp8: Quantization | None) -> None:
    """The gradient of a segment is the same whichever others are frozen."""
    spec, x, g = LinearSpec(ProductSpec(16, (5, 7), fp8=fp8)), normal(32, 16), normal(32, 12)
    weights, biases = [normal(5, 16), normal(7, 16)], [normal(5), normal(7)]
    scales = {"x_scale": one(2.0), "w_scale": one(2.0)} if fp8 is DELAYED else {}

    def gradients(trained: tuple[bool, bool]) -> list[Any]:
        w = [tensor(value, wanted) for value, wanted in zip(weights, trained, strict=True)]
        b = [tensor(value, wanted) for value, wanted in zip(biases, trained, strict=True)]
        inputs = {"x": tensor(x), **named("weight", w), **named("bias", b), **scales}
        amax = {name: one(0.0) for name in ("x_amax", "w_amax", "g_amax")}
        apply(linear, spec, inputs, amax, {"g_scale": one(2.0)})["y"].backward(g)
        return [t.grad for t in (*w, *b)]

    both, second = gradients((True, True)), gradients((False, True))
    assert second[0] is None
    assert second[2] is None
    for i in (1, 3):
        assert_same_bits("gradient", second[i].numpy(), both[i].numpy())


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

    out, joined = mlp(fused_residual=True)
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
    with pytest.raises(
        FormatError, match=r"norm_mlp: fused_residual: got True, expected False with residual"
    ):
        NormMLPSpec(
            NormSpec(24),
            ProductSpec(24, (40,), prefix="fc1_"),
            ProductSpec(40, (24,), prefix="fc2_"),
            fused_residual=True,
            residual=True,
        )
    with pytest.raises(ShapeError, match=r"norm_mlp: fc2: got 16 output features, expected 24"):
        NormMLPSpec(
            NormSpec(24),
            ProductSpec(24, (40,), prefix="fc1_"),
            ProductSpec(40, (16,), prefix="fc2_"),
            fused_residual=True,
        )


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
    plan = call.bound(norm_linear, specs[GIVEN], views, arrays.CPU, (), dispatch.kernels(arrays.CPU)).plan
    scratch = {n: arrays.empty(m.shape, m.dtype, arrays.CPU) for n, m in plan.measure_scratch.items()}
    norm_linear.measure(plan, WorkingSet(plan.kernels, views, amax, {}, scratch, 0))
    assert_same_bits("y", apply(norm_linear, specs[GIVEN], given)["y"].numpy(), want)
