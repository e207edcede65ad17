"""Cases of the casts, amaxes and scales: bit for bit against the codec, on every engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fp8kit import codec, formats
from fp8kit.arrays import ArrayView, Device
from fp8kit.backends.protocol import Cast, Kernels, Rule
from fp8kit.formats import E2M1, E4M3, E5M2, E8M0, DType, Format
from fp8kit.testing.compare import assert_close, assert_same_bits, sum_slack
from fp8kit.testing.contract import Case, get, poisoned, put, workspace
from fp8kit.testing.contract.elementwise import draw
from fp8kit.testing.contract.norm import check_fused

Array = np.ndarray[Any, Any]
Tile = tuple[int, int]
WHOLE, ROW = (0, 0), (1, 0)  # 0: as many as the matrix has

H = (formats.float32, formats.bfloat16, formats.float16)
USERS = (
    Format("E3M4", 3, 4),
    Format("E3M2", 3, 2, special="none"),
    Format("E2M3", 2, 3, special="none"),
    Format("U5M3", 5, 3, special="fn", signed=False),
    Format("E4M0", 4, 0, special="none"),
)


def _sample(rows: int, columns: int, dtype: DType, seed: int = 0) -> Array:
    """Values over many binades with every special one strewn in: +-0, subnormals, ties, the formats' limits,
    Inf, NaN."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, columns)) * np.exp2(rng.integers(-14, 10, (rows, columns)))
    special = [
        0.0,
        -0.0,
        np.nan,
        -np.nan,
        np.inf,
        -np.inf,
        448,
        -464,
        464.5,
        57344,
        -61440,
        1e-40,
        -1e-45,
        2.0**-10,
        3 * 2.0**-10,
        2.0**-17,
        1.0625,
        1.1875,
        5,
        7,
    ]
    at = rng.random(x.shape) < 0.15
    x[at] = rng.choice(special, int(at.sum()))
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(dtype.numpy)


def _float32(x: Array) -> Array:
    with np.errstate(over="ignore"):
        return x.astype(np.float32)


def _tile(tile: Tile, shape: tuple[int, ...]) -> Tile:
    return tile[0] or max(shape[0], 1), tile[1] or max(shape[1], 1)


def _grid(shape: tuple[int, ...], tile: Tile) -> Tile:
    return max(1, -(-shape[0] // tile[0])), max(1, -(-shape[1] // tile[1]))


def _spread(per_tile: Array, shape: tuple[int, ...], tile: Tile) -> Array:
    down, across = np.indices(shape)
    spread: Array = per_tile.reshape(_grid(shape, tile))[down // tile[0], across // tile[1]]
    return spread


def _amax(x: Array, tile: Tile, start: float = 0.0) -> Array:
    """Tile by tile, the slow and obvious way. NaN counts as nothing."""
    found = np.full(_grid(x.shape, tile), start, np.float32)
    a = np.abs(_float32(x))
    for i, j in np.ndindex(found.shape):
        part = a[i * tile[0] : (i + 1) * tile[0], j * tile[1] : (j + 1) * tile[1]]
        found[i, j] = np.fmax.reduce(part, axis=None, initial=found[i, j])
    return found.reshape(-1)


def _scales(count: int) -> Array:
    """Scales that are no powers of two, so that the product rounds."""
    return np.random.default_rng(7).uniform(0.01, 30, count).astype(np.float32)


def _words(seed: int, offset: int, count: int) -> Array:
    """Philox4x32-10 in Python integers; for counts a test can afford."""
    low = 0xFFFFFFFF
    out = []
    for block in range(-(-count // 4)):
        c = [block & low, block >> 32, offset & low, offset >> 32 & low]
        k = [seed & low, seed >> 32 & low]
        for _ in range(10):
            p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [(q >> 32) ^ c[1] ^ k[0], q & low, (p >> 32) ^ c[3] ^ k[1], p & low]
            k = [(k[0] + 0x9E3779B9) & low, (k[1] + 0xBB67AE85) & low]
        out += c
    return np.array(out[:count], np.uint32)


# --- amax ---------------------------------------------------------------------------------------------------


def _run_amax(kernels: Kernels, device: Device, dtype: DType, shape: Tile, tile: Tile) -> None:
    x, tile = _sample(*shape, dtype), _tile(tile, shape)
    x[np.isinf(x.astype(np.float64))] = 1
    for start in (0.0, 40.0):
        found = put(np.full(_amax(x, tile).shape, start, np.float32), device)
        kernels.amax(put(x, device), found, tile, 0)
        assert_same_bits("amax", get(found), _amax(x, tile, start))


def _run_amax_specials(kernels: Kernels, device: Device, dtype: DType) -> None:
    x = np.full((4, 37), np.nan, dtype.numpy)
    x[1, 5], x[2, 36], x[3, 0] = -np.inf, -(2.0**-14), -0.0
    found = put(np.zeros(4, np.float32), device)
    kernels.amax(put(x, device), found, (1, 37), 0)
    assert_same_bits("amax", get(found), np.array([0, np.inf, 2.0**-14, 0], np.float32))


def _run_amax_tiny(kernels: Kernels, device: Device) -> None:
    found = put(np.zeros(4, np.float32), device)
    kernels.amax(put(np.array([[1e-46], [-1e-45], [1e-40], [1e300]]), device), found, (1, 1), 0)
    assert_same_bits("amax", get(found), np.array([0, 2.0**-149, 1e-40, np.inf], np.float32))


def _run_amax_many(kernels: Kernels, device: Device, count: int) -> None:
    """Tensors of all types and shapes in one call, and then small ones of one type; the last three share a
    running maximum."""
    shapes = ((1,), (33, 65), (5, 1000), (20000,), (0, 8), (3, 4, 5))
    picked = [(shapes[i % 6], H[i % 3]) if i < 12 else ((9, 20), formats.bfloat16) for i in range(count)]
    xs = [_sample(1, int(np.prod(shape)), dtype, i).reshape(shape) for i, (shape, dtype) in enumerate(picked)]
    for x in xs:
        x[np.isinf(x.astype(np.float64))] = 1
    found = put(np.linspace(0, 9, count - 2).astype(np.float32), device)
    places = [min(i, count - 3) for i in range(count)]
    kernels.amax_many([put(x, device) for x in xs], [found.slice(0, at, 1) for at in places], 0)
    want = np.linspace(0, 9, count - 2).astype(np.float32)
    for x, at in zip(xs, places, strict=True):
        want[at] = _amax(x.reshape(1, -1), (1, max(x.size, 1)), want[at])[0]
    assert_same_bits("amaxes", get(found), want)


# --- scales -------------------------------------------------------------------------------------------------

_MAX = float(np.finfo(np.float32).max)


def _run_scale(
    kernels: Kernels, device: Device, fp8_max: float, power_2: bool, epsilon: float, for_inf: float
) -> None:
    special = [0, np.inf, np.nan, 1e-45, 1e-40, 1.1754944e-38, fp8_max, 1.0, 3.0, _MAX, 1e-37]
    amax = np.array([*special, *np.exp2(np.random.default_rng(1).uniform(-140, 127, 500))], np.float32)
    want = np.empty_like(amax)
    with np.errstate(all="ignore"):
        for i, raw in enumerate(amax):
            a = raw if np.isnan(raw) else max(raw, np.float32(epsilon))
            scale = np.float32(fp8_max) / a
            scale = np.float32(for_inf) if np.isinf(scale) else scale
            scale = np.float32(2.0 ** (np.frexp(scale)[1] - 1)) if power_2 and scale > 0 else scale
            want[i] = scale if np.isfinite(a) and a > 0 else 1
        inverse = np.float32(1) / want
    scale, scale_inv = (poisoned(amax.shape, formats.float32, device) for _ in range(2))
    kernels.scale_from_amax(put(amax, device), scale, scale_inv, fp8_max, power_2, epsilon, for_inf, 0)
    assert_same_bits("scale", get(scale), want)
    assert_same_bits("scale_inv", get(scale_inv), inverse)


def _delayed(
    scale: Array, inverse: Array, history: Array, fp8_max: float, margin: int, most_recent: bool
) -> None:
    """One tensor at a time, step by step as the rule reads."""
    for t in range(len(scale)):
        if history[0, t] == 0:
            continue
        amax = history[0, t] if most_recent else max([0.0, *(a for a in history[:, t] if not np.isnan(a))])
        if np.isfinite(amax) and amax > 0:
            with np.errstate(over="ignore", under="ignore", divide="ignore"):
                fresh = np.float32(fp8_max * 2.0**-margin) / np.float32(amax)
            scale[t] = (
                np.float32(_MAX) if np.isinf(fresh) else np.float32(2.0**-126) if fresh < 2.0**-126 else fresh
            )
        inverse[t] = np.float32(1) / scale[t]
        history[:, t] = [0, *history[2:, t], history[0, t]] if len(history) > 1 else [0]


def _run_delayed(kernels: Kernels, device: Device, length: int, margin: int, most_recent: bool) -> None:
    rng = np.random.default_rng(length)
    special = np.array([0, np.nan, np.inf, 1e-45, 1e-42, 3.0, 2.0**100, 2.0**118, _MAX], np.float32)
    sizes, maxima = (1, 7, 300), (448.0, 57344.0, 448.0)
    hosts = []
    for n in sizes:
        history = np.abs(rng.standard_normal((length, n))).astype(np.float32)
        strewn = rng.random(history.shape) < 0.3
        history[strewn] = rng.choice(special, int(strewn.sum()))
        hosts.append((_scales(n), np.full(n, 5, np.float32), history))
    moved = [[put(a, device) for a in state] for state in hosts]
    for step in range(3):
        for state, fp8_max in zip(hosts, maxima, strict=True):
            _delayed(*state, fp8_max, margin, most_recent)
        kernels.update_delayed_(
            [s[0] for s in moved],
            [s[1] for s in moved],
            [s[2] for s in moved],
            maxima,
            margin,
            most_recent,
            0,
        )
        for state, views in zip(hosts, moved, strict=True):
            for name, want, got in zip(("scale", "scale_inv", "amax_history"), state, views, strict=True):
                assert_same_bits(f"{name} after update {step}", get(got), want)
        for i, (_, _, history) in enumerate(hosts):
            history[0] = np.abs(rng.standard_normal(history.shape[1])).astype(np.float32)
            moved[i][2] = put(history, device)


# --- quantize, dequantize -----------------------------------------------------------------------------------


def _run_quantize(
    kernels: Kernels,
    device: Device,
    fmt: Format,
    dtype: DType,
    shape: Tile,
    tile: Tile,
    saturate: bool = True,
    stochastic: bool = False,
    with_amax: bool = True,
) -> None:
    x, tile = _sample(*shape, dtype), _tile(tile, shape)
    down, across = _grid(shape, tile)
    scale = _scales(down * across)
    rng = np.array([-(2**40) + 3, 2**33 + 9], np.int64)
    q, scale_inv = poisoned(shape, formats.uint8, device), poisoned(scale.shape, formats.float32, device)
    amax = put(np.zeros(scale.shape, np.float32), device) if with_amax else None
    state = put(rng, device) if stochastic else None
    kernels.quantize(put(x, device), q, put(scale, device), scale_inv, amax, fmt, tile, saturate, state, 0)
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = _float32(x) * _spread(scale, shape, tile)
    words = _words(int(rng[0]), int(rng[1]), x.size).reshape(shape) if stochastic else None
    assert_same_bits(
        "q", get(q), codec.encode(scaled, fmt, "stochastic" if stochastic else "nearest", saturate, words)
    )
    assert_same_bits("scale_inv", get(scale_inv), np.float32(1) / scale)
    if amax is not None:
        assert_same_bits("amax", get(amax), _amax(x, tile))


def _run_boundaries(kernels: Kernels, device: Device, fmt: Format, saturate: bool) -> None:
    """Every value of the format, every midpoint, and the float32 next to each on both sides."""
    values = codec.table(fmt)[: 1 << fmt.bits]
    grid = np.unique(np.concatenate([values[np.isfinite(values)], [2 * fmt.max, fmt.max * 1.0625]]))
    at = _float32(np.concatenate([grid, (grid[1:] + grid[:-1]) / 2]))
    x = np.concatenate([at, np.nextafter(at, np.float32(np.inf)), np.nextafter(at, np.float32(-np.inf))])[
        None
    ]
    q, one = poisoned(x.shape, formats.uint8, device), np.ones(1, np.float32)
    kernels.quantize(
        put(x, device),
        q,
        put(one, device),
        poisoned((1,), formats.float32, device),
        None,
        fmt,
        x.shape,
        saturate,
        None,
        0,
    )
    assert_same_bits("q", get(q), codec.encode(x, fmt, "nearest", saturate))


def _run_dequantize(
    kernels: Kernels, device: Device, fmt: Format, dtype: DType, shape: Tile, tile: Tile
) -> None:
    q = np.resize(np.arange(256, dtype=np.uint8), shape)
    tile = _tile(tile, shape)
    down, across = _grid(shape, tile)
    scale_inv = _scales(down * across)
    x = poisoned(shape, dtype, device)
    kernels.dequantize(put(q, device), x, put(scale_inv, device), fmt, tile, 0)
    with np.errstate(over="ignore", invalid="ignore"):
        want = (codec.decode(q, fmt).astype(np.float32) * _spread(scale_inv, shape, tile)).astype(dtype.numpy)
    got, nan = get(x), np.isnan(want.astype(np.float32))
    assert_same_bits("where NaN", np.isnan(got.astype(np.float32)), nan)
    assert_same_bits("x", np.where(nan, np.zeros_like(want), got), np.where(nan, np.zeros_like(want), want))


# --- quantize_transpose -------------------------------------------------------------------------------------


def _pad16(n: int) -> int:
    return -(-n // 16) * 16


def _run_transpose_by_amax(
    kernels: Kernels, device: Device, fmt: Format, dtype: DType, shape: Tile, rule: Rule
) -> None:
    """The scale is made of an amax that is there already."""
    x = draw(4, shape, dtype, 3.0)
    cast, check = check_fused(kernels, device, shape, fmt, x, rule=rule)
    kernels.quantize_transpose(put(x, device), cast, None, None, 0)
    check()


def _run_transpose(
    kernels: Kernels,
    device: Device,
    fmt: Format,
    dtype: DType,
    shape: Tile,
    outputs: str = "both",
    dbias: bool = False,
) -> None:
    x = _sample(*shape, dtype, seed=3)
    if dbias:
        x = np.clip(np.where(np.isnan(x), np.ones_like(x), x), -100, 100).astype(dtype.numpy)
    m, n = shape
    mp, np_ = _pad16(m), _pad16(n)
    scale = _scales(1)
    with np.errstate(over="ignore", invalid="ignore"):
        codes = np.zeros((mp, np_), np.uint8)
        codes[:m, :n] = codec.encode(_float32(x) * scale, fmt)
    # q_t as one of several segments: its rows lie in a wider buffer whose rest must stay as it is
    wide = poisoned((np_, mp + 48), formats.uint8, device)
    q = poisoned((mp, np_), formats.uint8, device) if outputs != "q_t" else None
    q_t = wide.slice(1, 32, mp) if outputs != "q" else None
    amax, scale_inv = put(np.zeros(1, np.float32), device), poisoned((1,), formats.float32, device)
    sums = poisoned((n,), dtype, device) if dbias else None
    room = workspace(kernels.quantize_transpose_workspace(m, n), device) if dbias else None
    kernels.quantize_transpose(
        put(x, device), Cast(fmt, q, q_t, put(scale, device), scale_inv, amax), sums, room, 0
    )
    if q is not None:
        assert_same_bits("q", get(q), codes)
    if q_t is not None:
        want = np.full((np_, mp + 48), 0xFF, np.uint8)
        want[:, 32 : 32 + mp] = codes.T
        assert_same_bits("q_t and its surroundings", get(wide), want)
    assert_same_bits("amax", get(amax), _amax(x, _tile(WHOLE, shape)))
    assert_same_bits("scale_inv", get(scale_inv), np.float32(1) / scale)
    if sums is not None:
        exact = x.astype(np.float64)
        assert_close("dbias", get(sums), exact.sum(0), dtype, sum_slack(np.abs(exact).sum(0), m))


def _run_transposes(kernels: Kernels, device: Device, count: int) -> None:
    """Matrices of all types, shapes and both formats in one call, then small ones of one kind, and a weight
    in three parts whose codes lie in one buffer."""
    shapes = ((1, 1), (16, 16), (33, 65), (128, 80), (200, 130), (0, 70))
    xs = [
        _sample(*shapes[i % 6], H[i % 3], i) if i < 12 else _sample(9, 20, formats.bfloat16, i)
        for i in range(count)
    ]
    parts = [_sample(n, 48, formats.bfloat16, n) for n in (32, 80, 20)]
    scales, scale = _scales(count), _scales(1)
    casts, wants = [], []
    for i, x in enumerate(xs):
        fmt, (m, n) = (E4M3, E5M2)[i // 3 % 2 if i < 12 else 0], (_pad16(k) for k in x.shape)
        side, turned = (
            poisoned(shape, formats.uint8, device) if i % 7 != at else None
            for at, shape in enumerate(((m, n), (n, m)))
        )
        with np.errstate(over="ignore", invalid="ignore"):
            codes = np.zeros((m, n), np.uint8)
            codes[: x.shape[0], : x.shape[1]] = codec.encode(_float32(x) * scales[i], fmt)
        amax = put(np.zeros(1, np.float32), device) if i % 5 else None
        casts.append(
            Cast(
                fmt,
                side,
                turned,
                put(scales[i : i + 1], device),
                poisoned((1,), formats.float32, device),
                amax,
            )
        )
        wants.append((codes, _amax(x, _tile(WHOLE, x.shape))))
    q, q_t = poisoned((144, 48), formats.uint8, device), poisoned((48, 144), formats.uint8, device)
    shared = put(scale, device), poisoned((1,), formats.float32, device), put(np.zeros(1, np.float32), device)
    for start, rows in ((0, 32), (32, 80), (112, 32)):
        casts.append(Cast(E4M3, q.slice(0, start, rows), q_t.slice(1, start, rows), *shared))
    kernels.quantize_transpose_many([put(x, device) for x in (*xs, *parts)], casts, 0)
    for i, ((codes, found), cast) in enumerate(zip(wants, casts, strict=False)):
        sides: list[tuple[str, ArrayView | None, Array]] = [
            ("q", cast.q, codes),
            ("q_t", cast.q_t, codes.T),
            ("amax", cast.amax, found),
        ]
        for name, made, right in sides:
            if made is not None:
                assert_same_bits(f"{name} of {i}", get(made), np.ascontiguousarray(right))
        assert_same_bits(f"scale_inv of {i}", get(cast.scale_inv), np.float32(1) / scales[i : i + 1])
    whole = np.concatenate(parts)
    with np.errstate(over="ignore", invalid="ignore"):
        codes = np.concatenate([codec.encode(_float32(whole) * scale, E4M3), np.zeros((12, 48), np.uint8)])
    assert_same_bits("q of parts", get(q), codes)
    assert_same_bits("q_t of parts", get(q_t), np.ascontiguousarray(codes.T))
    assert_same_bits("scale_inv of parts", get(shared[1]), np.float32(1) / scale)
    assert_same_bits("amax of parts", get(shared[2]), _amax(whole, _tile(WHOLE, whole.shape)))


def _cases() -> Iterator[Case]:
    def case(kernel: str, name: str, run: Callable[..., None], *arguments: Any, **options: Any) -> Case:
        return Case(kernel, name, lambda kernels, device: run(kernels, device, *arguments, **options))

    shapes = ((1, 1), (33, 65), (128, 256), (5, 1000), (0, 8))
    tilings = {"tensor": WHOLE, "row": ROW, "1x128": (1, 128), "128x128": (128, 128), "1x32": (1, 32)}
    for dtype in H:
        for m, n in shapes:
            yield case("amax", f"{dtype.name}-{m}x{n}", _run_amax, dtype, (m, n), WHOLE)
        for name, tile in tilings.items():
            yield case("amax", f"{dtype.name}-{name}", _run_amax, dtype, (130, 300), tile)
        yield case("amax", f"{dtype.name}-specials", _run_amax_specials, dtype)
    yield case("amax", "float64-tiny", _run_amax_tiny)
    for count in (3, 150):
        yield case("amax_many", str(count), _run_amax_many, count)
    for count in (1, 70):
        yield case("quantize_transpose_many", str(count), _run_transposes, count)
    for power_2 in (False, True):
        for fp8_max, epsilon, for_inf in ((448.0, 0.0, _MAX), (57344.0, 1e-6, _MAX), (448.0, 0.0, 65504.0)):
            name = f"{fp8_max:g}-eps{epsilon:g}-inf{for_inf:.3g}{'-power2' if power_2 else ''}"
            yield case("scale_from_amax", name, _run_scale, fp8_max, power_2, epsilon, for_inf)
    for length, margin, most_recent in (
        (1, 0, False),
        (4, 0, False),
        (16, 2, False),
        (4, 0, True),
        (1024, -1, False),
        (2100, 0, False),
        (3, 20, False),
        (2, 9, True),
        (2, -20, True),
    ):
        name = f"H{length}-margin{margin}{'-recent' if most_recent else ''}"
        yield case("update_delayed_", name, _run_delayed, length, margin, most_recent)
    for fmt in (E4M3, E5M2):
        for dtype in (*H, formats.float64):
            for m, n in shapes:
                yield case(
                    "quantize", f"{fmt}-{dtype.name}-{m}x{n}", _run_quantize, fmt, dtype, (m, n), WHOLE
                )
        for name, tile in tilings.items():
            yield case("quantize", f"{fmt}-{name}", _run_quantize, fmt, formats.bfloat16, (130, 300), tile)
            yield case("dequantize", f"{fmt}-{name}", _run_dequantize, fmt, formats.float32, (130, 300), tile)
        yield case(
            "quantize",
            f"{fmt}-no-amax",
            _run_quantize,
            fmt,
            formats.float32,
            (33, 65),
            WHOLE,
            with_amax=False,
        )
        for dtype in H:
            yield case("dequantize", f"{fmt}-{dtype.name}", _run_dequantize, fmt, dtype, (7, 111), WHOLE)
            for m, n in ((1, 1), (16, 16), (33, 65), (128, 80), (200, 130), (256, 192), (0, 70)):
                yield case(
                    "quantize_transpose", f"{fmt}-{dtype.name}-{m}x{n}", _run_transpose, fmt, dtype, (m, n)
                )
            for m, n in ((16, 32), (256, 192)):
                for rule in (Rule(False, 0.0), Rule(True, 1e3)):
                    name = f"{fmt}-{dtype.name}-{m}x{n}-by-amax-{rule.power_2}"
                    yield case("quantize_transpose", name, _run_transpose_by_amax, fmt, dtype, (m, n), rule)
            for outputs in ("q", "q_t"):
                yield case(
                    "quantize_transpose",
                    f"{fmt}-{dtype.name}-{outputs}-only",
                    _run_transpose,
                    fmt,
                    dtype,
                    (70, 48),
                    outputs,
                )
            for m, n in ((150, 70), (256, 128)):
                yield case(
                    "quantize_transpose",
                    f"{fmt}-{dtype.name}-{m}x{n}-dbias",
                    _run_transpose,
                    fmt,
                    dtype,
                    (m, n),
                    dbias=True,
                )
            yield case(
                "quantize_transpose",
                f"{fmt}-{dtype.name}-dbias-of-nothing",
                _run_transpose,
                fmt,
                dtype,
                (0, 70),
                dbias=True,
            )
    for fmt in (E4M3, E5M2, E8M0, E2M1, *USERS):
        yield case("quantize", f"{fmt}-boundaries", _run_boundaries, fmt, True)
        yield case(
            "quantize",
            f"{fmt}-stochastic",
            _run_quantize,
            fmt,
            formats.float32,
            (9, 31),
            ROW,
            stochastic=True,
        )
        yield case("dequantize", f"{fmt}-all-codes", _run_dequantize, fmt, formats.float32, (3, 256), WHOLE)
        if fmt.nan_code is not None:
            yield case("quantize", f"{fmt}-boundaries-unsaturated", _run_boundaries, fmt, False)
            yield case(
                "quantize",
                f"{fmt}-unsaturated",
                _run_quantize,
                fmt,
                formats.float32,
                (33, 65),
                WHOLE,
                saturate=False,
            )
            yield case(
                "quantize",
                f"{fmt}-unsaturated-stochastic",
                _run_quantize,
                fmt,
                formats.float32,
                (33, 65),
                WHOLE,
                saturate=False,
                stochastic=True,
            )


CASES = tuple(_cases())
