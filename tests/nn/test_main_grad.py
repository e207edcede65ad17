"""Weight gradients that go on in the frontend's own buffers: what is there, and one product more, rounded as
the spec says."""

from __future__ import annotations

import numpy as np
import pytest

from fp8kit import arrays, codec, formats
from fp8kit.autograd import apply, tensor
from fp8kit.errors import FormatError
from fp8kit.ops.linear import LinearSpec, linear
from fp8kit.ops.norm import NormSpec
from fp8kit.ops.norm_linear import NormLinearSpec, norm_linear
from fp8kit.ops.norm_mlp import NormMLPSpec, norm_mlp
from fp8kit.ops.product import ProductSpec
from fp8kit.recipe import DelayedScaling, Float8BlockScaling
from fp8kit.testing import assert_close, assert_same_bits, sum_slack

DELAYED, BLOCKS = DelayedScaling().quantization, Float8BlockScaling().quantization
SCALES = {"x": 64.0, "w": 96.0, "g": 256.0}
M, K = 48, 32


def draw(seed, shape, dtype="float32"):
    return np.random.default_rng(seed).standard_normal(shape).astype(formats.dtype(dtype).numpy)


def one(value, device):
    return arrays.to(arrays.as_view(np.array([value], np.float32)), arrays.device(device))


def run(device, spec, segments, layout, dtype, buffers=None):
    """The weights' gradients as arrays on the host; with ``buffers``, what these hold afterwards."""
    x, g = draw(1, (M, K), dtype), draw(2, (M, sum(segments)), dtype)
    inputs = {"x": tensor(x, True, device=device)}
    for i, n in enumerate(segments):
        inputs[f"weight{i}"] = tensor(
            draw(3 + i, (n, K) if layout == "oi" else (K, n), dtype), True, device=device
        )
    late = {}
    if spec.product.fp8 is DELAYED:
        inputs |= {f"{name}_scale": one(SCALES[name], device) for name in "xw"}
        late = {"g_scale": one(SCALES["g"], device)}
    given = {
        f"weight{i}": arrays.to(arrays.as_view(b.copy()), arrays.device(device))
        for i, b in enumerate(buffers or [])
    }
    apply(linear, spec, inputs, given, late)["y"].backward(tensor(g, device=device).view)
    if buffers is None:
        return [inputs[f"weight{i}"].grad.numpy() for i in range(len(segments))], x, g
    return [given[f"weight{i}"].numpy() for i in range(len(segments))], x, g


@pytest.mark.parametrize("main", ["float32", "own"])
@pytest.mark.parametrize(
    ("segments", "layout"), [((40,), "oi"), ((16, 32), "oi"), ((17, 23), "oi"), ((17, 23), "io")], ids=str
)
@pytest.mark.parametrize("fp8", [None, DELAYED, BLOCKS], ids=["plain", "delayed", "blocks"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_product_joins_what_is_there(device, dtype, fp8, segments, layout, main):
    own = dtype if main == "own" else main

    def spec(**fields):
        return LinearSpec(ProductSpec(K, segments, layout, "none", fp8=fp8, **fields))

    shapes = [(n, K) if layout == "oi" else (K, n) for n in segments]
    before = [draw(20 + i, shape, own) for i, shape in enumerate(shapes)]
    alone, x, g = run(device, spec(main_grad=own, overwrite_grad=True), segments, layout, dtype, before)
    added, *_ = run(device, spec(main_grad=own), segments, layout, dtype, before)
    plain, *_ = run(device, spec(), segments, layout, dtype)
    if fp8 is None or fp8 is DELAYED:
        xs, gs = x.astype(np.float64), g.astype(np.float64)
        if fp8 is not None:
            xs, gs = (
                codec.decode(codec.encode(v.astype(np.float32) * np.float32(SCALES[s]), f), f) / SCALES[s]
                for v, s, f in ((x, "x", formats.E4M3), (g, "g", formats.E5M2))
            )
        at = np.cumsum((0, *segments))
        size = np.abs(gs).T @ np.abs(xs)
        for i, got in enumerate(alone):
            rows = slice(at[i], at[i + 1])
            want, bound = (gs.T @ xs)[rows], sum_slack(size[rows], M)
            # Hopper's sums in 14 bits
            narrow = 0 if fp8 is None or device == "cpu" else -(-M // 32) * 2 * 2.0**-13 * size[rows]
            turn = np.transpose if layout == "io" else np.asarray
            assert_close("product", got, turn(want), own, turn(bound + narrow))
    for i, was in enumerate(before):
        assert added[i].dtype == alone[i].dtype == formats.dtype(own).numpy
        both = was.astype(np.float64) + alone[i].astype(np.float64)
        # float32: one addition more (and another algorithm of the engine's); 16 bits: the product may have
        # been rounded first
        slack = (
            np.abs(alone[i].astype(np.float64)) * (M * 2.0**-23 if own == "float32" else 2.0**-7)
            + M * 2.0**-22
        )
        assert_close("sum", added[i], both, own, slack)
        assert_close(
            "as without", plain[i].astype(np.float64), alone[i].astype(np.float64), dtype, M * 2.0**-20
        )


def test_on_the_cpu_the_sum_is_one_float32_addition():
    adding, overwriting = (
        LinearSpec(ProductSpec(K, (40,), "oi", "none", main_grad="float32", overwrite_grad=o))
        for o in (False, True)
    )
    before = [draw(20, (40, K))]
    alone, *_ = run("cpu", overwriting, (40,), "oi", "bfloat16", before)
    added, *_ = run("cpu", adding, (40,), "oi", "bfloat16", before)
    assert_same_bits("main_grad", added[0], before[0] + alone[0])


def test_a_buffer_that_nobody_hands_over_starts_at_zero(device):
    spec = LinearSpec(ProductSpec(K, (40,), "oi", "none", main_grad="float32"))
    got, x, g = run(device, spec, (40,), "oi", "bfloat16")
    want, size = (f(g.astype(np.float64)).T @ f(x.astype(np.float64)) for f in (np.asarray, np.abs))
    assert got[0].dtype == np.float32
    assert_close("dW", got[0], want, "float32", sum_slack(size, M))


def norm_spec(product):
    return NormLinearSpec(NormSpec(K), product)


def mlp_spec(fc1, fc2):
    return NormMLPSpec(NormSpec(K), fc1, fc2, "relu")


@pytest.mark.parametrize("fp8", [None, DELAYED], ids=["plain", "delayed"])
@pytest.mark.parametrize("name", ["norm_linear", "norm_mlp"])
def test_operations_that_hold_products_do_the_same(device, name, fp8):
    def made(main, buffers):
        fields = {"main_grad": "float32", "overwrite_grad": not main} if buffers else {}
        inputs = {"x": tensor(draw(1, (M, K), "bfloat16"), True, device=device)}
        inputs |= {
            f"norm_{part}": tensor(draw(6, (K,), "bfloat16"), True, device=device)
            for part in ("weight", "bias")
        }
        weights = {"": (64, K)} if name == "norm_linear" else {"fc1_": (64, K), "fc2_": (K, 64)}
        products, late = [], {}
        for i, (prefix, (n, k)) in enumerate(weights.items()):
            inputs[f"{prefix}weight0"] = tensor(draw(7 + i, (n, k), "bfloat16"), True, device=device)
            products.append(ProductSpec(k, (n,), bias="none", fp8=fp8, prefix=prefix, **fields))
            if fp8 is not None:
                inputs |= {f"{prefix}{s}_scale": one(32.0, device) for s in "xw"}
                late[f"{prefix}g_scale"] = one(64.0, device)
        given = (
            {
                f"{prefix}weight0": tensor(draw(30, shape), device=device).view
                for prefix, shape in weights.items()
            }
            if buffers
            else {}
        )
        operation, spec = (
            (norm_linear, norm_spec(*products)) if name == "norm_linear" else (norm_mlp, mlp_spec(*products))
        )
        y = apply(operation, spec, inputs, given, late)["y"]
        y.backward(tensor(draw(2, y.shape, "bfloat16"), device=device).view)
        return [
            (given[n] if buffers else inputs[n].grad).numpy().astype(np.float64)
            for n in (f"{p}weight0" for p in weights)
        ]

    for added, alone, plain in zip(made(True, True), made(False, True), made(False, False), strict=True):
        start = draw(30, added.shape).astype(np.float64)
        assert_close("sum", added, start + alone, "float32", np.abs(alone) * M * 2.0**-23 + M * 2.0**-20)
        assert_close("as without", plain, alone, "bfloat16", M * 2.0**-18)


def test_other_dtypes_are_refused():
    with pytest.raises(FormatError, match=r"linear: main_grad: got float16, expected bfloat16 or float32"):
        run(
            "cpu",
            LinearSpec(ProductSpec(K, (40,), "oi", "none", main_grad="float16")),
            (40,),
            "oi",
            "bfloat16",
        )
