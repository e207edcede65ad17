"""What operations declare about splitting, carried out with NumPy alone: the parts of a call, reduced as its
``Partition`` says, are the call. On both engines; no framework splits anything here."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import formats, tensor
from fp8kit.autograd import apply
from fp8kit.execution.bound import Interface
from fp8kit.ops.activation import ActivationSpec, activation
from fp8kit.ops.attention import AttentionSpec, attention
from fp8kit.ops.casts import QuantizeSpec, quantize
from fp8kit.ops.cross_entropy import CrossEntropySpec, cross_entropy
from fp8kit.ops.drop_path import DropPathSpec, drop_path
from fp8kit.ops.dropout_add import DropoutAddSpec, dropout_add
from fp8kit.ops.linear import LinearSpec, linear
from fp8kit.ops.norm import NormSpec, norm
from fp8kit.ops.norm_linear import NormLinearSpec, norm_linear
from fp8kit.ops.norm_mlp import NormMLPSpec, norm_mlp
from fp8kit.ops.partition import part_of
from fp8kit.ops.product import ProductSpec
from fp8kit.ops.rope import RopeSpec, rope
from fp8kit.recipe import Float8BlockScaling, Float8CurrentScaling
from fp8kit.spec import Meta
from fp8kit.testing import assert_close, assert_same_bits

RNG = np.array([123456789, 3], np.int64)
SUMS = 2.0**-19  # another order of float32 sums of at most 2^9 terms, relative to the largest


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def metas_of(inputs):
    return {name: Meta(a.shape, formats.dtype(a.dtype)) for name, a in inputs.items()}


def run(operation, spec, inputs, device):
    out = apply(operation, spec, {name: tensor(a, device=device) for name, a in inputs.items()})
    return {name: value.numpy() for name, value in out.items() if not name.endswith("amax")}


def pieces(array, d, count, window=False):
    """The equal parts of an array along a dimension."""
    if not window:
        return np.split(array, count, d)
    size = (array.shape[0] - 1) // count
    return [array[i * size : (i + 1) * size + 1] - array[i * size] for i in range(count)]


def in_parts(operation, spec, inputs, kind, count, device):
    """A call made of ``count`` parts by its partition of a ``kind``."""
    found = operation.partitions(spec, metas_of(inputs), {})
    partition = next(p for p in found if p.kind == kind)
    part = part_of(operation, spec, metas_of(inputs), {}, ((partition, count),))
    assert part is not None
    own, metas, _ = part
    dims = {name: d for name, _, d in partition.dims}
    whole = Interface(operation, spec, metas_of(inputs), ()).outputs
    shapes = {name: meta.shape for name, meta in Interface(operation, own, metas, ()).outputs.items()}
    run_spec = own if partition.mean is None else partition.mean.spec
    outs = []
    for i in range(count):
        given = {
            name: pieces(a, dims[name], count, name in partition.windows)[i] if name in dims else a
            for name, a in inputs.items()
            if name in metas
        }
        given |= {name: given[name] * (i == 0) for name in partition.once if name in given}
        assert {name: a.shape for name, a in given.items()} == {n: m.shape for n, m in metas.items()}
        place = operation.place(own, metas, {kind: (i, count)})
        spec_here = run_spec
        if place is not None:
            numbers = np.array(place.numbers, place.meta.dtype.numpy)
            old = given.get(place.name, numbers[:0])
            spec_here, given[place.name] = place.spec, np.concatenate([old, numbers])
        outs.append(run(operation, spec_here, given, device))
    made = {}
    for name, meta in whole.items():
        values = [out[name] for out in outs]
        changed = [d for d, (m, n) in enumerate(zip(meta.shape, shapes[name], strict=True)) if m != n]
        if partition.mean is not None and name == partition.mean.name:
            counted = (inputs[partition.mean.rows_of] != partition.mean.ignored).sum()
            made[name] = np.sum(values).reshape(1) / np.float32(counted)
        elif changed:
            made[name] = np.concatenate(values, changed[0])
        elif name in partition.sums:
            made[name] = np.sum(values, 0)
            made[name] += inputs[partition.addend] if partition.addend else 0
        else:
            made[name] = values[0]
    return made


FP8 = Float8BlockScaling().quantization
WEIGHTS = {"weight0": draw(1, 64, 32) / 4, "bias0": draw(2, 64), "residual": draw(3, 8, 64)}
MLP = {
    "x": draw(0, 8, 32),
    "norm_weight": draw(4, 32),
    "fc1_weight0": draw(5, 48, 32) / 4,
    "fc1_bias0": draw(6, 48),
    "fc2_weight0": draw(7, 32, 48) / 4,
    "fc2_bias0": draw(8, 32),
}
QKV = {name: draw(i, 4, 8, heads, 16) for i, (name, heads) in enumerate((("q", 4), ("k", 2), ("v", 2)))}
LENGTHS = np.array([0, 8, 11, 12, 20], np.int32)


def mlp(**options):
    fc1, fc2 = ProductSpec(32, (48,), prefix="fc1_", bias="deferred"), ProductSpec(48, (32,), prefix="fc2_")
    return NormMLPSpec(NormSpec(32, "RMSNorm"), fc1, fc2, "gelu", **options)


def attended(**options):
    return AttentionSpec(4, 16, 2, "bshd", layout="separate", **options)


# name -> operation, spec, inputs, kind of partition, whether the bits are the whole's
CASES = {
    "linear": (linear, LinearSpec(ProductSpec(32, (64,))), {"x": draw(0, 8, 32)} | WEIGHTS, "rows", False),
    "columns": (
        linear,
        LinearSpec(ProductSpec(32, (64,))),
        {"x": draw(0, 8, 32)} | WEIGHTS,
        "contraction",
        0,
    ),
    "norm": (norm, NormSpec(32, "RMSNorm"), {"x": draw(0, 8, 32), "norm_weight": draw(1, 32)}, "rows", True),
    "mlp": (norm_mlp, mlp(), MLP, "inner", False),
    "mlp with its residual": (norm_mlp, mlp(fused_residual=True), MLP, "inner", False),
    "attention by rows": (attention, attended(), QKV, "rows", True),
    "attention by heads": (attention, attended(), QKV, "heads", True),
    "padding": (
        attention,
        attended(mask="padding_causal"),
        QKV | {"cu_seqlens_q": LENGTHS, "cu_seqlens_kv": LENGTHS},
        "rows",
        True,
    ),
    "attention with dropout": (attention, attended(dropout=0.3), QKV | {"rng": RNG}, "heads", True),
    "rope": (
        rope,
        RopeSpec(((4, 16, "freqs"),), "bshd"),
        {"x": QKV["q"], "freqs": draw(9, 8, 16)},
        "heads",
        1,
    ),
    "loss": (
        cross_entropy,
        CrossEntropySpec(30),
        {"logits": draw(0, 8, 5, 30), "targets": np.arange(40, dtype=np.int32).reshape(8, 5) % 31 - 1},
        "rows",
        False,
    ),
    "dropout": (
        dropout_add,
        DropoutAddSpec(33, 0.25),
        {"x": draw(0, 8, 33), "bias": draw(1, 33), "residual": draw(2, 8, 33), "rng": RNG},
        "rows",
        True,
    ),
    "drop path": (
        drop_path,
        DropPathSpec(33, 0.4, "bshd"),
        {"x": draw(0, 8, 3, 33), "residual": draw(2, 8, 3, 33), "rng": RNG},
        "rows",
        True,
    ),
    "activation": (activation, ActivationSpec("gelu", 32), {"x": draw(0, 8, 32)}, "inner", True),
    "casts by rows": (quantize, QuantizeSpec(fk.E4M3, (1, 0)), {"x": draw(0, 8, 32)}, "rows", True),
}


@pytest.mark.parametrize("case", CASES)
def test_parts_are_the_whole(case, device):
    operation, spec, inputs, kind, exact = CASES[case]
    if case == "loss":
        spec = dataclasses.replace(spec, ignore_index=-1)
    want = run(operation, spec, inputs, device)
    got = in_parts(operation, spec, inputs, kind, 2, device)
    for name, value in want.items():
        if exact and device == "cpu":
            assert_same_bits(name, got[name], value)
        assert_close(name, got[name], value, "float32", SUMS * np.abs(value).max())


@pytest.mark.parametrize("kind", ["dropout", "drop path"])
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_a_part_drops_what_the_whole_drops(kind, parts, device):
    """Bit for bit, also where a part begins inside a group of four words; gradients too."""
    operation, spec, inputs, _, _ = CASES[kind]

    def both(inputs):
        leaves = {name: tensor(a, requires_grad=name == "x", device=device) for name, a in inputs.items()}
        y = apply(operation, spec, leaves)["y"]
        y.backward(tensor(inputs["residual"], device=device))
        return y.numpy(), leaves["x"].grad.numpy()

    want = both(inputs)
    split = {name: np.split(inputs[name], parts) for name in ("x", "residual")}
    found = [
        both(inputs | {name: a[i] for name, a in split.items()} | {"rng": np.array([*RNG, i])})
        for i in range(parts)
    ]
    for name, got, whole in zip(("y", "dx"), zip(*found, strict=True), want, strict=True):
        assert_same_bits(name, np.concatenate(got), whole)


def test_one_scale_for_all_parts(device):
    """A cast whose amax is that of the whole: the codes of the whole."""
    x, spec = draw(0, 8, 32) * np.exp2(np.arange(8, dtype=np.float32))[:, None], QuantizeSpec(fk.E4M3, (0, 0))
    want = run(quantize, spec, {"x": x}, device)
    shared = quantize.shared_amaxes(spec)
    ((amax, of),) = shared.arrays.items()
    assert of == "x"
    known = {amax: np.abs(x).max().reshape(1)}
    found = [run(quantize, shared.spec, {"x": part} | known, device) for part in np.split(x, 2)]
    assert_same_bits("codes", np.concatenate([out["q"] for out in found]), want["q"])
    for out in found:
        assert_same_bits("scale_inv", out["scale_inv"], want["scale_inv"])


@pytest.mark.parametrize("fused_residual", [False, True])
def test_what_an_mlp_is_made_of(fused_residual, device):
    """Its components, one after the other, give its bits."""
    fp8 = Float8CurrentScaling().quantization
    spec = mlp(fused_residual=fused_residual)
    spec = dataclasses.replace(
        spec, fc1=dataclasses.replace(spec.fc1, fp8=fp8), fc2=dataclasses.replace(spec.fc2, fp8=fp8)
    )
    values = {name: tensor(a, device=device) for name, a in MLP.items()}
    want = apply(norm_mlp, spec, values)["y"].numpy()
    for operation, own, inputs, results, _ in norm_mlp.decompose(spec):
        out = apply(operation, own, {name: values[whole] for name, whole in inputs.items()})
        values |= {results.get(name, name): value for name, value in out.items()}
    assert_same_bits("y", values["y"].numpy(), want)


def test_parts_that_would_be_padded_are_none():
    """Codes are stored in multiples of 16, or 128 with blocks; rows that share a scale stay together."""
    inputs = metas_of({"x": draw(0, 64, 256), "weight0": draw(1, 1024, 256)})
    for fp8, kind, count, fits in (
        (None, "rows", 64, True),
        (FP8, "rows", 2, False),
        (FP8, "features", 2, True),
        (FP8, "features", 4, False),
        (FP8, "contraction", 2, True),
        (FP8, "contraction", 4, False),
        (Float8CurrentScaling().quantization, "rows", 4, True),
        (Float8CurrentScaling().quantization, "rows", 8, False),
        (None, "features", 3, False),
    ):
        spec = LinearSpec(ProductSpec(256, (1024,), bias="none", fp8=fp8))
        partition = next(p for p in linear.partitions(spec, inputs, {}) if p.kind == kind)
        assert (part_of(linear, spec, inputs, {}, ((partition, count),)) is not None) is fits, (kind, count)


@pytest.mark.parametrize("name", ["weight_cached", "input_cached"])
def test_operands_that_come_in_fp8_are_not_split(name):
    """Their codes are padded as a whole."""
    fp8 = Float8CurrentScaling().quantization
    metas = metas_of({"x": draw(0, 64, 128), "weight0": draw(1, 256, 128)})
    for flag in (False, True):
        product = ProductSpec(128, (256,), bias="none", fp8=fp8, **{name: flag})
        assert bool(linear.partitions(LinearSpec(product), metas, {})) is not flag
        spec = NormLinearSpec(NormSpec(128, "RMSNorm"), product)
        assert bool(norm_linear.partitions(spec, metas, {})) is not flag
