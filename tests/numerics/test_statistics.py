"""Statistics against NumPy: of tensors, of casts by every named recipe, of several tensors together."""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import fp8kit as fk
from fp8kit import arrays, blocks, codec
from fp8kit.arrays import CPU
from fp8kit.autograd import tensor
from fp8kit.backends import dispatch
from fp8kit.formats import float32, uint8
from fp8kit.numerics import Codes, Operand, collect, merge, request, tensor_statistics, values
from fp8kit.numerics.names import OF_CAST
from fp8kit.numerics.operands import prefixes
from fp8kit.quantization import Quantization, Quantizer
from fp8kit.recipes import NAMED
from fp8kit.testing import assert_close

PLAIN = (
    *("min", "max", "mean", "std", "l1_norm", "l2_norm", "cur_amax", "dynamic_range"),
    *("kurtosis", "nan_count", "inf_count", "exponents"),
)
RELATIVE = 1e-6


def normal(seed, *shape, scale=1.0, mean=0.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale + mean).astype(np.float32)


def exponents_of(x):
    """By the bits."""
    bits = x.astype(np.float32).reshape(-1).view(np.uint32) >> 23 & 255
    return np.bincount(np.where(x.reshape(-1) == 0, 256, bits), minlength=257).tolist()


def oracle(x):
    """NumPy's statistics of an array in float64."""
    v = x.astype(np.float64).reshape(-1)
    size = np.abs(v)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "min": v.min(),
            "max": v.max(),
            "mean": v.mean(),
            "std": np.std(v),
            "l1_norm": np.linalg.norm(v, 1),
            "l2_norm": np.linalg.norm(v),
            "cur_amax": size.max(),
            "dynamic_range": np.log2(size.max()) - np.log2(size[size > 0].min()) if size.any() else 0.0,
            "kurtosis": (v**4).mean() / (v**2).mean() ** 2,
            "nan_count": int(np.isnan(v).sum()),
            "inf_count": int(np.isinf(v).sum()),
            "exponents": exponents_of(x),
        }


def agree(got, want, slack=0.0):
    """Counts exactly, others to 1e-6; a mean may cancel, by ``slack``."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        if isinstance(value, int | list):
            assert type(got[name]) is type(value), name
            assert got[name] == value, name
        else:
            own = slack if name == "mean" else 0.0
            assert got[name] == pytest.approx(value, rel=RELATIVE, abs=own, nan_ok=True), name


KINDS = {
    "normal": lambda: normal(1, 40, 96),
    "small": lambda: normal(1, 40, 96, scale=1e-30),
    "large mean": lambda: normal(1, 40, 96, mean=1e4),
    "huge": lambda: normal(1, 40, 96, scale=1e37),
    "bfloat16": lambda: normal(1, 40, 96).astype(ml_dtypes.bfloat16),
    "float16": lambda: normal(1, 40, 96).astype(np.float16),
    "subnormal": lambda: np.float32([[1e-45, -1e-40, 0.0, -0.0, 2.0**-126]]),
    "one": lambda: np.float32([[-3.5]]),
    "constant": lambda: np.full((33, 7), 0.1, np.float32),
    "one dimension": lambda: normal(1, 300),
    "four dimensions": lambda: normal(1, 2, 3, 4, 5),
    "NaN": lambda: np.float32([[1.0, np.nan, -2.0], [np.nan, 0.0, 5.0]]),
    "Inf": lambda: np.float32([[1.0, np.inf, -2.0]]),
    "-Inf": lambda: np.float32([[1.0, -np.inf, -2.0]]),
    "both Inf": lambda: np.float32([[1.0, -np.inf, np.inf]]),
    "all": lambda: np.float32([[np.nan, -np.inf, np.inf]]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_of_a_tensor(kind, device):
    x = KINDS[kind]()
    got = tensor_statistics(tensor(x, device=device), PLAIN)
    agree(got, oracle(x), slack=RELATIVE * float(np.abs(x.astype(np.float64)).max(initial=0)))


def test_of_zeros_and_of_nothing():
    """-0 is a zero; what has no answer is NaN."""
    zeros = tensor_statistics(np.float32([[0.0, -0.0]]), (*PLAIN, "crest_factor", "mxfp8_sqnr", "mxfp8_mse"))
    assert math.isnan(zeros.pop("kurtosis"))
    assert math.isnan(zeros.pop("crest_factor"))
    assert zeros.pop("exponents") == [0] * 256 + [2]
    assert zeros.pop("mxfp8_sqnr") == math.inf
    assert set(zeros.values()) == {0}
    block = {"max_blockwise_dynamic_range": {"block_size": 4}}
    asked = (*PLAIN, "crest_factor", block, *(f"nvfp4_{stat}" for stat in OF_CAST))
    for shape in ((0, 16), (3, 0), (0,)):
        found = tensor_statistics(np.zeros(shape, np.float32), asked)
        nan = [name for name, value in found.items() if isinstance(value, float) and math.isnan(value)]
        assert nan == [
            *("min", "max", "mean", "std", "kurtosis", "crest_factor"),
            *("nvfp4_scale_inv_min", "nvfp4_scale_inv_max", "nvfp4_sqnr"),
        ]
        rest = [value for name, value in found.items() if name not in nan and not isinstance(value, list)]
        assert set(rest) == {0}
        assert found["exponents"] == found["nvfp4_scales"] == [0] * 257


# --- blocks -------------------------------------------------------------------------------------------------


def blocks_of(x, rows, columns):
    """The blocks of a matrix, smaller at its ends, as float64."""
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            yield np.abs(x[i : i + rows, j : j + columns].astype(np.float64)).reshape(-1)


def widest(x, rows, columns):
    found = [np.log2(b.max()) - np.log2(b[b > 0].min()) for b in blocks_of(x, rows, columns) if b.any()]
    return max(found, default=0.0)


@pytest.mark.parametrize("shape", [(64, 96), (5, 33), (1, 1)], ids=str)
def test_blocks(shape, device):
    x = normal(2, *shape) * np.exp2(np.random.default_rng(3).integers(-9, 9, shape)).astype(np.float32)
    x[0, 0] = 0
    own = {"max_blockwise_dynamic_range": {"block_size": 4, "dims": 2}}
    names = [own, {"max_blockwise_dynamic_range": {"block_size": 8}}, "crest_factor"]
    names += [{"crest_factor": {"block_size": 16}}]
    given = tensor(x, device=device)
    want = {"max_blockwise_dynamic_range_block_size_4_dims_2": widest(x, 4, 4)}
    want["max_blockwise_dynamic_range_block_size_8_dims_1"] = widest(x, 1, 8)
    for size in (32, 16):
        crest = [b.max() / np.sqrt((b**2).mean()) for b in blocks_of(x, 1, size) if b.any()]
        want["crest_factor" if size == 32 else "crest_factor_block_size_16"] = max(crest, default=math.nan)
    agree(tensor_statistics(given, names, tensor="gradient"), want)
    # of what two GEMMs read, as Transformer Engine has it, both orientations, and the name says so
    both = tensor_statistics(given, names[:2], tensor="weight")
    assert both == pytest.approx(
        {
            "max_blockwise_dynamic_range_block_size_4_dims_2_max_over_orientations": widest(x, 4, 4),
            "max_blockwise_dynamic_range_block_size_8_dims_1_max_over_orientations": max(
                widest(x, 1, 8), widest(x, 8, 1)
            ),
        },
        rel=RELATIVE,
    )
    assert tensor_statistics(given, list(both), tensor="gradient") == both  # by the names of a log


def test_blocks_with_nan_and_inf():
    names = ("crest_factor", "max_blockwise_dynamic_range_block_size_4_dims_1")
    x = normal(2, 8, 16)
    x[0, 0] = np.inf
    assert [str(v) for v in tensor_statistics(x, names).values()] == ["nan", "inf"]
    x[1, 0] = np.nan
    assert [str(v) for v in tensor_statistics(x, names).values()] == ["nan", "nan"]


# --- casts --------------------------------------------------------------------------------------------------


def quantised(x, own, along):
    """(x as it is cast, its codes, their scale_invs, element by element) of a quantizer, by ``fk.quantize``;
    for scales of lines with rules of their own, by the codec; for those that only recipes have, by the CPU
    engine's cast, whose bits its contract holds."""
    transposed = x.astype(np.float32)
    if own.hadamard:
        lying = transposed if along else transposed.T
        lying = blocks.hadamard(lying, own.hadamard, own.signs)
        transposed = np.ascontiguousarray(lying if along else lying.T)
    if own.granularity in ("tensor", "row"):
        axes = None if own.granularity == "tensor" else along
        amax = np.maximum(np.abs(transposed).max(axes, keepdims=True), np.float32(own.epsilon))
        scale = np.float32(own.static_scale) if own.static else np.float32(own.format.max) / amax
        if own.power_2:
            scale = np.exp2(np.floor(np.log2(scale.astype(np.float64)))).astype(np.float32)
        codes = codec.encode(transposed * scale, own.format)
        return transposed, codes, np.broadcast_to(np.float32(1) / scale, x.shape)
    if own.granularity == "moss_1x32" or own.scale_rule == "gauss":
        return (transposed, *cast_by_the_engine(transposed, own, along))
    q = fk.quantize(
        transposed, own.format, scaling=own.granularity, scale_rule=own.scale_rule, along=-1 if along else 0
    )
    rows, columns = own.tile if along else own.tile[::-1]
    each = np.repeat(np.repeat(np.asarray(q.scale_inv), rows, 0), columns, 1)[: len(x), : x.shape[1]]
    return transposed, np.asarray(q.data), each


def cast_by_the_engine(x, own, along):
    rows, columns = own.tile if along else own.tile[::-1]
    grid = -(-x.shape[0] // rows), -(-x.shape[1] // columns)
    codes, inverse = arrays.empty(x.shape, uint8, CPU), arrays.empty(grid, float32, CPU)
    amax, whole = (arrays.as_view(np.full(1, np.abs(x).max(), np.float32)) for _ in range(2))
    pair = (amax, whole) if own.two_level else (None, None)
    plain = replace(own, hadamard=0, signs="plus")
    view = arrays.as_view(x)
    dispatch.kernels(CPU).cast_blocks(view, codes, inverse, None, None, *pair, plain, along, 0, None, None, 0)
    each = np.repeat(np.repeat(inverse.numpy(), rows, 0), columns, 1)[: len(x), : x.shape[1]]
    return codes.numpy(), each


def cast_oracle(x, own, along):
    """The definitions of A16's statistics, on these codes."""
    transposed, codes, inverse = quantised(x, own, along)
    v, units = transposed.astype(np.float64), codec.decode(codes, own.format)
    made = (units.astype(np.float32) * inverse).astype(np.float64)
    live = inverse != 0
    errors = ((v - made) ** 2).sum()
    limit = own.format.max * inverse.astype(np.float64)
    over = live & (np.abs(v) * (1 - 2.0**-22) > limit)
    rows, columns = (n or max(x.shape) for n in (own.tile if along else own.tile[::-1]))
    if own.granularity == "row":
        rows, columns = (1, x.shape[1]) if along else (x.shape[0], 1)
    scales = inverse[::rows, ::columns]
    return {
        "underflows%": 100 * ((v != 0).sum() - (live & (units != 0)).sum()) / v.size,
        "overflows%": 100 * over.sum() / v.size,
        "saturated%": 100 * (live & (np.abs(units) == own.format.max)).sum() / v.size,
        "scale_inv_min": float(inverse.min()),
        "scale_inv_max": float(inverse.max()),
        "scales": exponents_of(np.ascontiguousarray(scales)),
        "mse": errors / v.size,
        "sqnr": 10 * np.log10((v**2).sum() / errors),
    }


def wide_values(seed, *shape):
    """Values over many binades, some of them 0: casts of every format saturate and lose some."""
    random = np.random.default_rng(seed)
    x = random.standard_normal(shape) * np.exp(2.0 * random.standard_normal(shape))
    x[random.random(shape) < 0.05] = -0.0
    return x.astype(ml_dtypes.bfloat16)


# tensor -> the GEMMs that read it, and its place
READERS = {
    "activation": (("fprop", "a"), ("wgrad", "b")),
    "weight": (("fprop", "b"), ("dgrad", "b")),
    "gradient": (("dgrad", "a"), ("wgrad", "a")),
}


@pytest.mark.parametrize("recipe", NAMED)
def test_what_if_of_every_recipe(recipe, device):
    """Every operand, both orientations; what is random is left to the next test."""
    x = wide_values(4, 128, 160)
    given, rules = tensor(x, device=device), NAMED[recipe].recipe.quantization
    for what, readers in READERS.items():
        for along, (gemm, place) in zip((1, 0), readers, strict=True):
            names = {f"{recipe}_{stat}{'' if along else '_columnwise'}": stat for stat in OF_CAST}
            used = rules.gemms[gemm]
            if used.compute != "quantized":
                with pytest.raises(fk.ArgumentError, match=f"{gemm} is computed 'high_precision'"):
                    request(names, what)
                continue
            own: Quantizer = getattr(used, place)
            if own.needs_rng:
                continue
            got = tensor_statistics(given, names, tensor=what)
            agree({names[name]: value for name, value in got.items()}, cast_oracle(x, own, along))


def test_a_recipe_of_ones_own_has_what_ifs_too():
    """By the name that it was given: in statistics, in an inspector, and in a report's words."""
    own = Quantizer(fk.E3M2, "mx_1x16", scale_rule="ceil")
    recipe = fk.recipe.DataRecipe(Quantization.of(own, own, replace(own, format=fk.E2M3)), "own")
    x = normal(5, 64, 96)
    with pytest.raises(fk.ArgumentError, match="expected one of min"):
        tensor_statistics(x, ("scale_own_sqnr",))
    fk.recipes.add("scale_own", recipe)
    fk.recipes.add("scale_own", recipe)  # once more changes nothing
    try:
        for what, names in (("activation", ("sqnr", "mse")), ("gradient", ("sqnr", "scale_inv_max"))):
            mine = tensor_statistics(x, [f"scale_own_{name}" for name in names], tensor=what)
            assert list(mine.values()) == list(
                tensor_statistics(x, names, tensor=what, recipe=recipe).values()
            )
        assert fk.recipes.named("scale_own") is recipe
        assert prefixes("scale_own_sqnr_columnwise") == ("scale_own", "sqnr")
        layer = fk.nn.Linear(96, 32, device="cpu")
        logged = {"enabled": True, "tensors": ["activation"], "stats": ["sqnr", "scale_own_sqnr"]}
        feature = {"LogFp8TensorStats": logged}
        config = {"all": {"enabled": True, "layers": {"layer_types": ["all"]}, "transformer_engine": feature}}
        with fk.inspect(layer, config) as log:
            with fk.autocast(recipe=NAMED["mxfp8"].recipe):
                layer(tensor(x))
            log.step()
        found = {row["stat"]: row["value"] for row in log.rows()}
        wanted = tensor_statistics(x, ("mxfp8_sqnr", "scale_own_sqnr"))
        assert found == {"sqnr": wanted["mxfp8_sqnr"], "scale_own_sqnr": wanted["scale_own_sqnr"]}
        for name, other, word in (
            ("scale_own", NAMED["mxfp8"].recipe, "no other recipe has"),
            ("fp8_block_scaling", recipe, "no other recipe has"),
            ("own%", recipe, "letters, digits and underscores"),
            (
                "per_layer",
                fk.recipe.PerLayer(recipe, ()),
                r"same for all layers: .*quantization, 'per_layer'\)",
            ),
        ):
            with pytest.raises(fk.ArgumentError, match=word):
                fk.recipes.add(name, other)
    finally:
        del NAMED["scale_own"]


def test_what_is_drawn_at_random():
    """The same draw every time; about twice the error of rounding to nearest (2.1, measured for E2M1)."""
    x = normal(5, 256, 256)
    names = ("fp4_all_the_way_mse", "fp4_all_the_way_mse_columnwise")
    nearest = tensor_statistics(x, names[:1])[names[0]]
    drawn = tensor_statistics(x, names, tensor="gradient")
    assert drawn == tensor_statistics(x, names, tensor="gradient")
    assert drawn[names[0]] / nearest == pytest.approx(2.1, rel=0.1)
    rotated = tensor_statistics(x, ("mxfp4_h32_sr_sqnr",), tensor="gradient")["mxfp4_h32_sr_sqnr"]
    assert 14 < rotated < 18


def test_quartet_2_is_corrected_over_what_was_rotated_together(device):
    """MS-EDEN's error of normal values is the published one, 9.8e-3 (arXiv 2601.22813), and that of the
    layers' own cast, whose correction is that of 128 rotated values, by the same draw."""
    x = normal(6, 256, 512)
    names = ("quartet_2_mse", "quartet_2_mse_columnwise")
    found = tensor_statistics(tensor(x, device=device), names, tensor="gradient")
    k, rng = dispatch.kernels(CPU), arrays.as_view(np.zeros(2, np.int64))
    for name, along in zip(names, (1, 0), strict=True):
        own: Quantizer = NAMED["quartet_2"].recipe.quantization.dgrad.a
        transposed, made = (arrays.empty(x.shape, float32, CPU) for _ in range(2))
        amax, whole = (arrays.empty((1,), float32, CPU) for _ in range(2))
        amax.numpy()[...] = 0
        k.rotate(arrays.as_view(x), transposed, amax, own.hadamard, own.signs, along, rng, 0)
        how = own, along, 0, rng, None, 0
        k.cast_blocks(arrays.as_view(x), None, None, None, made, amax, whole, *how)
        errors = transposed.numpy() - made.numpy().astype(np.float64) * whole.numpy()
        assert found[name] == pytest.approx((errors**2).mean(), rel=1e-5)
        assert found[name] == pytest.approx(9.8e-3, rel=0.02)


# SQNR in dB of normal values in bfloat16 by the reference's table
PUBLISHED = {
    "current_sqnr": 31.54,
    "mxfp8_sqnr": 31.49,
    "mxfp6_e3m2_sqnr": 25.36,
    "mxfp6_e2m3_sqnr": 30.92,
    "mxfp4_sqnr": 18.80,
    "nvfp4_sqnr": 20.44,
}


def test_sqnr_of_normal_values():
    x = normal(0, 1024, 1024).astype(ml_dtypes.bfloat16)
    found = tensor_statistics(x, PUBLISHED)
    assert found == pytest.approx(PUBLISHED, abs=0.06)
    assert tensor_statistics(x, ["mxfp8_overflows%", "mxfp4_overflows%"])["mxfp8_overflows%"] == 0


def test_names_of_transformer_engine():
    """Its names of recipes are those of ours; a layer's own recipe needs none."""
    x = wide_values(6, 64, 128)
    for theirs, ours in (
        *(("fp8_delayed_scaling", "delayed"), ("fp8_current_scaling", "current")),
        ("fp8_block_scaling", "block"),
    ):
        for stat in OF_CAST:
            names = f"{theirs}_{stat}", f"{ours}_{stat}_columnwise", f"{theirs}_{stat}_columnwise"
            a, b, c = tensor_statistics(x, names, recipe=ours).values()
            assert b == c
            assert tensor_statistics(x, [stat], recipe=ours) == {stat: a}
    assert request(["mxfp8_mse", "mxfp8_2d_mse"]).names == ("mxfp8_mse", "mxfp8_2d_mse")


def test_codes_of_the_layer_are_used_where_they_are_there(device):
    """For the layer's own recipe, with its name or without, and for nothing else."""
    x = normal(7, 32, 64)
    operand = Operand("activation", NAMED["current"].recipe.quantization)
    names = ("underflows%", "current_underflows%", "mxfp8_underflows%", "scale_inv_max", "mse")
    needs = request(names, operand)
    codes = np.full(x.shape, 0x80, np.uint8)  # -0
    given = Codes(tensor(codes, device=device), tensor(np.float32([3.0]), device=device))
    got = values(needs, collect(tensor(x, device=device), needs, given).numpy())
    mse = pytest.approx((x.astype(np.float64) ** 2).mean())
    assert list(got.values()) == [100.0, 100.0, 0.0, 3.0, mse]


def test_delayed_scaling_takes_the_state_s_scale():
    x = np.float32([[1.0, 2.0, 900.0, -500.0]])
    needs = request(["overflows%", "saturated%", "scale_inv_min"], Operand("weight", _rules("delayed")))
    given = values(needs, collect(x, needs, Codes(scale=np.float32([1.0]))).numpy())
    assert given == {"overflows%": 50.0, "saturated%": 50.0, "scale_inv_min": 1.0}
    fresh = values(needs, collect(x, needs).numpy())
    inverse = pytest.approx(900 / 448)
    assert fresh == {"overflows%": 0.0, "saturated%": 25.0, "scale_inv_min": inverse}


def _rules(recipe):
    return NAMED[recipe].recipe.quantization


def test_e8m0_scales_are_decoded():
    """Not bytes, as in Transformer Engine."""
    x = np.full((1, 32), 448.0 * 2.0**-20, np.float32)
    assert tensor_statistics(x, ["mxfp8_scale_inv_min", "mxfp8_scales"]) == {
        "mxfp8_scale_inv_min": 2.0**-20,
        "mxfp8_scales": [int(e == 127 - 20) for e in range(257)],
    }


def test_underflow_is_never_negative():
    """-0 is a zero among values and among codes."""
    x = np.float32([[-0.0, 0.0, 1e-6, -1e-6, 1.0, -448.0]])
    assert tensor_statistics(x, ["current_underflows%"])["current_underflows%"] == pytest.approx(200 / 6)
    assert tensor_statistics(np.float32([[-0.0, 448.0]]), ["current_underflows%"]).popitem()[1] == 0.0


def test_a_transposed_weight():
    """JAX's kernels lie as (in, out)."""
    w = wide_values(8, 64, 96)
    for name in ("mxfp8_mse", "mxfp8_mse_columnwise", "block_mse", "nvfp4_scales_columnwise"):
        transposed = request([name], Operand("weight", transposed=True))
        got = values(transposed, collect(np.ascontiguousarray(w.T), transposed).numpy())
        assert got == tensor_statistics(w, [name], tensor="weight")


# --- pairs --------------------------------------------------------------------------------------------------


def test_a_gradient_beside_its_twin(device):
    t = normal(9, 20, 30)
    x = (t + normal(10, 20, 30, scale=0.1)).astype(ml_dtypes.bfloat16)
    v, w = x.astype(np.float64), t.astype(np.float64)
    error = np.linalg.norm(v - w) / np.linalg.norm(w)
    want = {"cosine": (v * w).sum() / np.linalg.norm(v) / np.linalg.norm(w), "relative_error": error}
    want["sqnr"] = -20 * np.log10(error)
    given = tensor(x, device=device), tensor(t, device=device)
    agree(tensor_statistics(given[0], want, tensor="wgrad", twin=given[1]), want)
    zeros = np.zeros((2, 3), np.float32)
    same = tensor_statistics(zeros, ("relative_error", "sqnr"), tensor="dgrad", twin=zeros)
    assert same == {"relative_error": 0.0, "sqnr": math.inf}
    assert math.isnan(tensor_statistics(zeros, ["cosine"], twin=zeros)["cosine"])
    apart = tensor_statistics(np.ones((2, 3), np.float32), ["relative_error"], twin=zeros)
    assert apart == {"relative_error": math.inf}


# --- several tensors together -------------------------------------------------------------------------------

TOGETHER = (
    *PLAIN,
    *("crest_factor", "max_blockwise_dynamic_range_block_size_4_dims_1"),
    *(f"mxfp8_{stat}" for stat in OF_CAST),
    *("cosine", "relative_error"),
)


@pytest.mark.parametrize("mean", [0.0, 1e3, 1e6], ids=str)
def test_microbatches_and_ranks(mean):
    """4 micro-batches of 2 ranks, of different sizes, one of them empty, as one tensor: in any order."""
    x = normal(11, 200, 64, mean=mean)
    x[:50] *= 3
    twin = normal(12, 200, 64, mean=mean)
    needs = request(TOGETHER, "gradient")
    ends = [0, 50, 60, 60, 90, 130, 131, 180, 200]
    parts = [slice(a, b) for a, b in itertools.pairwise(ends)]
    records = [collect(x[part], needs, twin=twin[part]).numpy().tobytes() for part in parts]

    def fold(some):
        total = some[0]
        for more in some[1:]:
            total = merge(needs, total, more)
        return total

    ranks = fold(records[:4]), fold(records[4:])
    whole = values(needs, collect(x, needs, twin=twin).numpy())
    for total in (merge(needs, *ranks), merge(needs, *ranks[::-1]), fold(records)):
        agree(values(needs, total), whole, slack=RELATIVE)
    assert values(needs, merge(needs, *ranks))["std"] == pytest.approx(
        np.std(x.astype(np.float64)), rel=RELATIVE
    )


def test_float64_is_rounded_first(device):
    x = np.random.default_rng(2).standard_normal((40, 96)) * 3
    want = tensor_statistics(x.astype(np.float32), [*PLAIN, "mxfp8_sqnr"])
    assert tensor_statistics(x, [*PLAIN, "mxfp8_sqnr"]) == want
    found = tensor_statistics(tensor(x, device=device), [*PLAIN, "mxfp8_sqnr"])
    assert found.keys() == want.keys()
    for name, value in want.items():  # a GPU adds the same float64 terms in another order
        value = np.asarray(value)
        assert_close(name, found[name], value, "float64", 1e-12 * np.abs(value))


def test_counts_are_int64():
    """Beyond 2^24, where float32 counts no further, and 2^32."""
    needs = request(["exponents", "mxfp8_underflows%", "nan_count"])
    record = collect(np.float32([[1.0, 1.0, np.nan, 0.0] * 8]), needs).numpy()
    for _ in range(32):
        record = merge(needs, record, record)
    found = values(needs, record)
    assert found["exponents"][127] == 16 << 32
    assert found["exponents"][256] == 8 << 32
    assert found["nan_count"] == 8 << 32


def test_a_long_tensor():
    """More elements than float32 can count."""
    x = np.ones((1 << 12, (1 << 12) + 8), ml_dtypes.bfloat16)
    x[0, 0] = 0
    found = tensor_statistics(x, ["mean", "exponents", "std"])
    assert found["exponents"][127] == x.size - 1 > 1 << 24
    assert found["mean"] == pytest.approx(1 - 1 / x.size, rel=1e-12)
    assert found["std"] == pytest.approx(math.sqrt((1 - 1 / x.size) / x.size), rel=RELATIVE)
