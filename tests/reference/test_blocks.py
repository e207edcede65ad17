"""What casts by blocks are worth: errors of published formats, stochastic rounding's mean, rotations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import arrays
from fp8kit.arrays import Device
from fp8kit.backends import dispatch
from fp8kit.blocks import tile_of
from fp8kit.formats import E2M1, E2M3, E3M2, E4M3, E5M2, bfloat16, float32, uint8
from fp8kit.quantization import Quantizer
from fp8kit.testing import assert_close, assert_same_bits
from tests.support.combinations import combinations
from tests.support.nvfp4 import transcribed

Array = np.ndarray[Any, Any]
COUNT = 1 << 20


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Device:
    return arrays.device(request.param)


def put(values: Any, device: Device) -> fk.ArrayView:
    return arrays.to(arrays.as_view(np.ascontiguousarray(values)), device)


def host(view: fk.ArrayView) -> Array:
    arrays.synchronize(view.device)
    return view.numpy()


def cast(
    x: Array, quantizer: Quantizer, device: Device, along: int = 1, rng: tuple[int, int] = (5, 6)
) -> dict[str, Array]:
    """Everything that ``cast_blocks`` gives of x (M, N), and "decoded": values with the tensor's scale."""
    kernels, tile = dispatch.kernels(device), tile_of(quantizer, along)
    grid = -(-x.shape[0] // tile[0]), -(-x.shape[1] // tile[1])
    source, amax = put(x, device), put(np.zeros(1, np.float32), device)
    stream = arrays.current_stream(device)
    shape = {
        "q": (x.shape, uint8),
        "scale_inv": (grid, float32),
        "scale_codes": (grid, uint8),
        "values": (x.shape, source.dtype),
    }
    out: dict[str, Any] = {name: arrays.empty(*pair, device) for name, pair in shape.items()}
    if quantizer.granularity.startswith("block"):
        del out["scale_codes"]
    state = put(np.array(rng), device)
    if quantizer.granularity.startswith("nvfp4"):
        if quantizer.hadamard:
            kernels.rotate(source, None, amax, quantizer.hadamard, quantizer.signs, along, state, stream)
        else:
            kernels.amax(source, amax, x.shape, stream)
        out["tensor_scale_inv"] = arrays.empty((1,), float32, device)
    views = [out.get(name) for name in ("q", "scale_inv", "scale_codes", "values")]
    kernels.cast_blocks(
        source, *views, amax, out.get("tensor_scale_inv"), quantizer, along, 0, state, None, stream
    )
    found = {name: host(view) for name, view in out.items()}
    found["decoded"] = found["values"].astype(np.float64) * found.get("tensor_scale_inv", 1.0)
    return found


# --- errors -------------------------------------------------------------------------------------------------


def draws(name: str, count: int = COUNT) -> Array:
    """Values of a distribution, rounded to bfloat16, as float32 (count / 2048, 2048)."""
    random = np.random.default_rng(0)
    normal = random.standard_normal(count)
    if name == "t3":
        normal = random.standard_t(3, count)
    elif name == "lognormal":
        normal = np.sign(normal) * np.exp(2 * random.standard_normal(count))
    elif name == "outliers":
        normal = normal + 10 * random.standard_normal(count) * (random.random(count) < 0.001)
    elif name == "large outliers":
        normal = np.where(random.random(count) < 0.001, 100 * normal, normal)
    return normal.astype(bfloat16.numpy).astype(np.float32).reshape(-1, 2048)


def sqnr(x: Array, decoded: Array) -> float:
    """10 log10(sum x^2 / sum (x - decoded)^2) in dB."""
    wide = x.astype(np.float64)
    return float(10 * np.log10(np.sum(wide**2) / np.sum((wide - decoded) ** 2)))


# dB for normal values, Student's t with 3 degrees of freedom, signed lognormal ones of sigma 2, and N(0, 1) +
# 10 N(0, 1) for one in a thousand; they were measured by a program that shares nothing with this one
DISTRIBUTIONS = {"normal": 0.05, "t3": 0.2, "lognormal": 1.3, "outliers": 0.05}  # and how far seeds move them
SQNR = {
    "E4M3 1x128, float32": (Quantizer(E4M3, "block_1x128"), (31.80, 33.05, 41.34, 32.17)),
    "E4M3 1x128, powers of two": (
        Quantizer(E4M3, "block_1x128", scale_rule="power_2"),
        (31.49, 31.37, 30.96, 31.50),
    ),
    "MXFP8 E4M3 floor": (Quantizer(E4M3, "mx_1x32", scale_rule="floor"), (30.67, 29.48, 27.92, 30.35)),
    "MXFP8 E4M3 rceil": (Quantizer(E4M3, "mx_1x32", scale_rule="rceil"), (31.49, 31.37, 30.96, 31.50)),
    "MXFP8 E5M2 rceil": (Quantizer(E5M2, "mx_1x32", scale_rule="rceil"), (25.53, 25.48, 25.22, 25.54)),
    "MXFP6 E3M2 floor": (Quantizer(E3M2, "mx_1x32", scale_rule="floor"), (25.36, 25.03, 24.38, 25.29)),
    "MXFP6 E2M3 floor": (Quantizer(E2M3, "mx_1x32", scale_rule="floor"), (30.92, 29.18, 29.44, 30.39)),
    "MXFP4 floor": (Quantizer(E2M1, "mx_1x32", scale_rule="floor"), (18.80, 17.02, 17.32, 18.18)),
    "MXFP4 rceil": (Quantizer(E2M1, "mx_1x32", scale_rule="rceil"), (18.76, 16.48, 18.62, 17.96)),
    "NVFP4": (Quantizer(E2M1, "nvfp4_1x16"), (20.44, 20.90, 27.46, 20.46)),
}


@combinations({"distribution": DISTRIBUTIONS.keys()}, usual=["normal"])
def test_errors_are_the_published_ones(distribution: str, device: Device) -> None:
    x = draws(distribution, 1 << 22)  # as many as that program drew
    column = list(DISTRIBUTIONS).index(distribution)
    found = {name: sqnr(x, cast(x, how, device)["decoded"]) for name, (how, _) in SQNR.items()}
    wrong = {
        name: (round(found[name], 2), values[column])
        for name, (_, values) in SQNR.items()
        if abs(found[name] - values[column]) > DISTRIBUTIONS[distribution]
    }
    assert not wrong


@pytest.mark.parametrize(
    ("distribution", "known"), [("normal", 31.54), ("t3", 31.56), ("lognormal", 31.69), ("outliers", 31.56)]
)
def test_error_of_one_scale_for_all(distribution: str, known: float, device: Device) -> None:
    """The table's first row: E4M3 per tensor."""
    x = draws(distribution)
    decoded = fk.quantize(put(x, device), E4M3).dequantize()
    assert abs(sqnr(x, host(arrays.as_view(decoded))) - known) <= DISTRIBUTIONS[distribution]


@pytest.mark.parametrize("scaling", ["nvfp4_1x16", "nvfp4_16x16"])
def test_nvfp4_of_a_million_values(scaling: str, device: Device) -> None:
    """2^20 values of many sizes, cast whole: codes, both levels of scales and values are those of a
    transcription that shares no code."""
    random = np.random.default_rng(4)
    x = random.standard_normal((1024, 1024)) * np.exp2(random.integers(-14, 1, (1024, 1024)))
    x[::7, 32:64] = 0
    x = x.astype(bfloat16.numpy).astype(np.float32)
    # blocks one after the other
    high = 16 if scaling == "nvfp4_16x16" else 1
    blocks = x.reshape(1024 // high, high, 64, 16).transpose(0, 2, 1, 3).reshape(-1, high * 16)
    codes, q, inverse, tensor_inverse = transcribed(blocks.T, np.abs(blocks).max(1), np.abs(x).max())
    found = fk.quantize(put(x, device), scaling=scaling)
    back = q.T.reshape(1024 // high, 64, high, 16).transpose(0, 2, 1, 3).reshape(1024, 1024)
    got = {name: host(arrays.as_view(getattr(found, name))) for name in ("data", "scale_codes", "scale_inv")}
    assert_same_bits("codes", got["data"], np.ascontiguousarray(back))
    assert_same_bits("scale_codes", got["scale_codes"].reshape(-1), codes)
    assert_same_bits("scale_inv", got["scale_inv"].reshape(-1), inverse)
    assert host(arrays.as_view(found.tensor_scale_inv)).item() == tensor_inverse


@pytest.mark.parametrize(
    ("fmt", "distribution", "share"),
    [(E4M3, "normal", 0.164), (E4M3, "t3", 0.188), (E2M1, "normal", 0.289), (E2M1, "t3", 0.415)],
    ids=str,
)
def test_blocks_that_floor_clips(fmt: fk.Format, distribution: str, share: float, device: Device) -> None:
    x = draws(distribution)
    amax = np.abs(x.reshape(len(x), -1, 32)).max(2)
    clipped = {}
    for rule in ("floor", "rceil"):
        scale_inv = cast(x, Quantizer(fmt, "mx_1x32", scale_rule=rule), device)["scale_inv"]
        clipped[rule] = np.mean(amax > fmt.max * scale_inv)
    # four standard deviations of a share of so many blocks, and half a unit of the last place given
    assert abs(clipped["floor"] - share) < 4 * np.sqrt(share / amax.size) + 0.0005
    assert clipped["rceil"] == 0


# how, distribution, SQNR as it is and rotated; two levels hold outliers better as they are
ROTATED = {
    "mx t3": (Quantizer(E2M1, "mx_1x32", scale_rule="floor", hadamard=32), "t3", 16.99, 18.90),
    "mx outliers": (
        Quantizer(E2M1, "mx_1x32", scale_rule="floor", hadamard=32),
        "large outliers",
        17.39,
        18.86,
    ),
    "nvfp4 t3": (Quantizer(E2M1, "nvfp4_1x16", hadamard=16), "t3", 20.85, 20.14),
    "nvfp4 outliers": (Quantizer(E2M1, "nvfp4_1x16", hadamard=16), "large outliers", 25.72, 22.62),
}


@combinations({"case": ROTATED.keys(), "signs": ["plus", "te", "random"]})
def test_rotations_help_one_level_and_hurt_two(case: str, signs: str, device: Device) -> None:
    """Errors beside x rotated, which is as long as x. The outliers are few: draws differ by up to 0.35 dB."""
    how, distribution, plain, rotated = ROTATED[case]
    x, slack = draws(distribution), 0.1 if distribution == "t3" else 0.35
    how = replace(how, signs=signs)
    out = arrays.empty(x.shape, float32, device)
    state = put(np.array((5, 6)), device)
    dispatch.kernels(device).rotate(
        put(x, device), out, None, how.hadamard, signs, 1, state, arrays.current_stream(device)
    )
    assert abs(sqnr(host(out), cast(x, how, device)["decoded"]) - rotated) < slack
    assert abs(sqnr(x, cast(x, replace(how, hadamard=0, signs="plus"), device)["decoded"]) - plain) < slack


# --- stochastic rounding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [32, 8, 2])
@pytest.mark.parametrize("along", [1, 0])
def test_stochastic_rounding_is_right_on_average(bits: int, along: int, device: Device) -> None:
    """20,000 draws of 97 values, in blocks whose scale is 1: they hold a 6."""
    grid, draws = np.linspace(-6, 6, 97, dtype=np.float32), 20000
    row = np.zeros(128, np.float32)
    row.reshape(4, 32)[:, 0] = 6
    places = np.flatnonzero(row == 0)[: grid.size]
    row[places] = grid
    x = np.broadcast_to(row, (draws, 128))
    how = Quantizer(E2M1, "mx_1x32", scale_rule="rceil", stochastic_bits=bits)
    found = cast(x if along else x.T, how, device, along)
    assert (found["scale_inv"] == 1).all()
    values = (found["values"] if along else found["values"].T)[:, places]
    step = np.where(np.abs(grid) < 2, 0.5, np.where(np.abs(grid) < 4, 1.0, 2.0))
    assert (np.abs(values - grid) <= step).all()
    error = (values.mean(0) - grid) * np.sign(grid)  # away from zero
    noise = 4 * step / (2 * np.sqrt(draws))
    assert (np.abs(error) <= noise + step * 2.0**-bits).all()
    if bits == 2:
        # two random bits round the fraction down to quarters
        below = np.floor(np.abs(grid) / step * 4) / 4 * step - np.abs(grid)
        assert (np.abs(error - below) <= noise).all()
    # neighbours' words have nothing to do with each other: n draws' correlation is about 1 / sqrt(n)
    ups = (values - values.mean(0)) / np.maximum(values.std(0), 1e-6)
    correlation = np.abs(ups.T @ ups / draws)
    np.fill_diagonal(correlation, 0)
    assert correlation.max() < 6 / np.sqrt(draws)


# --- rotations and orientations -----------------------------------------------------------------------------

KINDS = [
    Quantizer(E4M3, "mx_1x32", scale_rule="te"),
    Quantizer(E2M1, "nvfp4_1x16"),
    Quantizer(E2M1, "nvfp4_16x16"),
    Quantizer(E5M2, "block_1x64"),
]


@pytest.mark.parametrize("how", KINDS, ids=str)
@pytest.mark.parametrize("along", [1, 0])
def test_a_rotation_in_a_cast_is_one_before_it(how: Quantizer, along: int, device: Device) -> None:
    x = np.random.default_rng(1).standard_normal((200, 144)).astype(np.float32)
    out, state = arrays.empty(x.shape, float32, device), put(np.array((5, 6)), device)
    dispatch.kernels(device).rotate(
        put(x, device), out, None, 32, "random", along, state, arrays.current_stream(device)
    )
    within = cast(x, replace(how, hadamard=32, signs="random"), device, along)
    before = cast(host(out), how, device, along)
    for name, values in before.items():
        assert_same_bits(name, within[name], values)


@pytest.mark.parametrize("how", KINDS, ids=str)
def test_along_columns_is_the_transposed(how: Quantizer, device: Device) -> None:
    x = np.random.default_rng(2).standard_normal((130, 75)).astype(np.float32)
    rows, columns = cast(x, how, device), cast(x.T, how, device, 0)
    for name in set(rows) - {"tensor_scale_inv"}:
        assert_same_bits(name, columns[name], np.ascontiguousarray(rows[name].T))


@pytest.mark.parametrize("signs", ["plus", "te", "random"])
def test_rotations_cancel_in_a_product(signs: str, device: Device) -> None:
    """x^T y of x (K, M) and y (N, K), K no multiple of the rotation."""
    random = np.random.default_rng(3)
    x, y = random.standard_normal((200, 24)), random.standard_normal((40, 200))
    state, found = put(np.array((7, 8)), device), []
    for matrix, along in ((x, 0), (y, 1)):
        out = arrays.empty(matrix.shape, float32, device)
        source = put(matrix.astype(np.float32), device)
        dispatch.kernels(device).rotate(
            source, out, None, 64, signs, along, state, arrays.current_stream(device)
        )
        found.append(host(out).astype(np.float64))
        assert not np.array_equal(found[-1], matrix)
    x, y = x.astype(np.float32).astype(np.float64), y.astype(np.float32).astype(np.float64)
    # a rotation's six float32 additions and its multiplication are each off by 2^-24 of what they give
    slack = 2 * 7 * 2.0**-24 * np.linalg.norm(y, axis=1)[:, None] * np.linalg.norm(x, axis=0)
    assert_close("y x", (found[1] @ found[0]).astype(np.float32), y @ x, float32, slack)


def test_nan_and_inf_in_blocks(device: Device) -> None:
    x = np.ones((2, 64), np.float32)
    x[0, 3], x[1, 40] = np.nan, -np.inf
    for rule, inf in (("rceil", 0xFF), ("floor", 0xFF), ("te", 0xFE)):
        found = cast(x, Quantizer(E4M3, "mx_1x32", scale_rule=rule), device)
        plain = cast(np.ones((1, 32), np.float32), Quantizer(E4M3, "mx_1x32", scale_rule=rule), device)
        one = plain["scale_codes"].item()
        assert found["scale_codes"].tolist() == [[0xFF, one], [one, inf]]
        assert np.isnan(found["values"][0, :32]).all()
        assert (found["values"][0, 32:] == 1).all()
        if rule == "te":
            assert found["q"][1, 40] == 0xFE  # -448, which 2^127 takes beyond float32
            assert found["values"][1, 40] == -np.inf
            assert (np.delete(found["values"][1, 32:], 8) == 0).all()
        else:
            assert np.isnan(found["values"][1, 32:]).all()
    found = cast(x, Quantizer(E2M1, "nvfp4_1x16"), device)
    assert found["scale_codes"][0].tolist() == [0x7F] + [found["scale_codes"][0, 1].item()] * 3
    assert np.isnan(found["values"][0, :16]).all()
    found = cast(x, Quantizer(E4M3, "block_1x32"), device)
    assert np.isfinite(found["scale_inv"]).all()
    assert np.isnan(found["values"][0]).tolist() == [i == 3 for i in range(64)]
