"""Contract cases of the normalisations, against float64, and of their fused casts, against the codec.

Tolerances, with u = 2^-24: the mean's error is that of a sum of N; a deviation d adds its own rounding;
rstd's relative error is half that of the sum of squares, (N + 8) u, plus what the deviations' error does to
it. Products add a few u of each factor.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fp8kit import arrays, codec
from fp8kit.arrays import ArrayView, Device
from fp8kit.backends.protocol import Cast, Kernels, Normalization, Rule
from fp8kit.formats import E4M3, E5M2, HIGH_PRECISION, DType, Format, float32, uint8
from fp8kit.testing.compare import assert_close, assert_same_bits, sum_slack
from fp8kit.testing.contract import get, poisoned, put, workspace
from fp8kit.testing.contract.elementwise import ROUNDOFF, SIZES, Array, draw, table, wide

NORMS: tuple[Normalization, ...] = ("LayerNorm", "RMSNorm")  # those with parameters
ALL: tuple[Normalization, ...] = (*NORMS, "L2Normalization")
EPSILON = 1e-5


def check_fused(
    kernels: Kernels,
    device: Device,
    shape: tuple[int, int],
    fmt: Format,
    plain: Array,
    pad: tuple[int, int] = (0, 0),
    transposed: bool = True,
    rule: Rule | None = None,
) -> tuple[Cast, Callable[[], None]]:
    """A Cast to hand to a fused kernel, and a check of all it wrote against ``plain``, the same engine's
    unfused result.

    ``pad`` more rows and columns of codes are asked for. The amax starts at a value below the result's; with
    a ``rule`` it is half of the result's, so that some values saturate, and the scale is not given.
    """
    m, n = shape
    rows, columns = m + pad[0], n + pad[1]
    largest = np.abs(plain.astype(np.float32)).max(initial=0)
    start = np.float32(0.001) if rule is None else np.float32(largest / 2)
    scale = np.array([37.7], np.float32)
    if rule is not None:
        scale[0] = np.float32(fmt.max) / np.maximum(start, np.float32(rule.epsilon))
        if rule.power_2:
            scale[0] = 2.0 ** np.floor(np.log2(scale[0]))
    q = poisoned((rows, columns), uint8, device)
    q_t = poisoned((columns, rows), uint8, device) if transposed else None
    amax = put(np.array([start], np.float32), device)
    cast = Cast(
        fmt, q, q_t, put(scale, device) if rule is None else None, poisoned((1,), float32, device), amax, rule
    )

    def check() -> None:
        codes = np.zeros((rows, columns), np.uint8)
        codes[:m, :n] = codec.encode(plain.astype(np.float32) * scale, fmt)
        assert_same_bits("q", get(q), codes)
        if q_t is not None:
            assert_same_bits("q_t", get(q_t), np.ascontiguousarray(codes.T))
        assert_same_bits("scale_inv", get(cast.scale_inv), np.float32(1) / scale)
        assert_same_bits(
            "amax", get(amax), np.array([max(start, largest) if rule is None else start], np.float32)
        )

    return cast, check


def _statistics(x: Array, norm: str) -> tuple[Array, Array]:
    """Mean (0 but for LayerNorm) and rstd of each row in float64."""
    mean = x.mean(1, keepdims=True) if norm == "LayerNorm" else np.zeros((len(x), 1))
    epsilon = EPSILON / x.shape[1] if norm == "L2Normalization" else EPSILON
    return mean, 1 / np.sqrt(((x - mean) ** 2).mean(1, keepdims=True) + epsilon)


def _gain(weight: Array, norm: str, centred: bool) -> Array:
    """The factor of each column in float64."""
    return np.full(len(weight), len(weight) ** -0.5) if norm == "L2Normalization" else wide(weight) + centred


def _inputs(dtype: DType, shape: tuple[int, int], offset: float) -> tuple[Array, Array, Array]:
    return draw(1, shape, dtype, 2.0, offset), draw(2, shape[1:], dtype), draw(3, shape[1:], dtype)


def _fwd(
    dtype: DType,
    norm: Normalization,
    shape: tuple[int, int],
    centred: bool = False,
    biased: bool = True,
    offset: float = 0.3,
    start: float | None = None,
) -> Callable[[Kernels, Device], None]:
    def run(kernels: Kernels, device: Device) -> None:
        m, n = shape
        x, weight, bias = _inputs(dtype, shape, offset)
        layer, weighted = norm == "LayerNorm", norm != "L2Normalization"
        y, mean, rstd = (
            poisoned(shape, dtype, device),
            poisoned((m,), float32, device),
            poisoned((m,), float32, device),
        )
        amax = None if start is None else put(np.array([start], np.float32), device)
        kernels.norm_fwd(
            put(x, device),
            put(weight, device) if weighted else None,
            put(bias, device) if layer and biased else None,
            y,
            mean if layer else None,
            rstd,
            amax,
            None,
            norm,
            EPSILON,
            centred,
            0,
        )
        exact = wide(x)
        mu, inverse = _statistics(exact, norm)
        gain, shift = _gain(weight, norm, centred), wide(bias) * (layer and biased)
        mean_slack = sum_slack(np.abs(exact).mean(1, keepdims=True), n) if layer else np.zeros((m, 1))
        d_slack = mean_slack + 2 * ROUNDOFF * (np.abs(exact) + np.abs(mu))
        relative = (
            0.5 * ((n + 8) * ROUNDOFF + 2 * d_slack.max(1, keepdims=True, initial=0) * inverse) + 4 * ROUNDOFF
        )
        scaled = (exact - mu) * inverse * gain
        slack = (
            np.abs(gain) * inverse * d_slack
            + np.abs(scaled) * (relative + 4 * ROUNDOFF)
            + 2 * ROUNDOFF * np.abs(shift)
        )
        if layer:
            assert_close("mean", get(mean), mu[:, 0], float32, mean_slack[:, 0])
        assert_close("rstd", get(rstd), inverse[:, 0], float32, (inverse * relative)[:, 0])
        assert_close("y", get(y), scaled + shift, dtype, slack)
        if amax is not None:
            most = max(np.float32(start or 0), np.abs(get(y).astype(np.float32)).max(initial=0))
            assert_same_bits("amax", get(amax), np.array([most], np.float32))

    return run


def _fwd_cast(
    dtype: DType,
    norm: Normalization,
    shape: tuple[int, int],
    fmt: Format,
    pad: tuple[int, int],
    transposed: bool,
    keep_y: bool,
    centred: bool = False,
    rule: Rule | None = None,
) -> Callable[[Kernels, Device], None]:
    def run(kernels: Kernels, device: Device) -> None:
        m, _ = shape
        x, weight, bias = _inputs(dtype, shape, 0.3)
        layer = norm == "LayerNorm"

        def call(y: ArrayView | None, cast: Cast | None) -> None:
            kernels.norm_fwd(
                put(x, device),
                put(weight, device),
                put(bias, device) if layer else None,
                y,
                poisoned((m,), float32, device) if layer else None,
                poisoned((m,), float32, device),
                None,
                cast,
                norm,
                EPSILON,
                centred,
                0,
            )

        plain = poisoned(shape, dtype, device)
        call(plain, None)
        cast, check = check_fused(kernels, device, shape, fmt, get(plain), pad, transposed, rule)
        y = poisoned(shape, dtype, device) if keep_y else None
        call(y, cast)
        if y is not None:
            assert_same_bits("y", get(y), get(plain))
        check()

    return run


def _bwd(
    dtype: DType,
    norm: Normalization,
    shape: tuple[int, int],
    centred: bool = False,
    residual: bool = False,
    alias: str = "",
) -> Callable[[Kernels, Device], None]:
    def run(kernels: Kernels, device: Device) -> None:
        m, n = shape
        x, weight, _ = _inputs(dtype, shape, 0.3)
        dy, extra = draw(4, shape, dtype), draw(5, shape, dtype)
        layer, weighted = norm == "LayerNorm", norm != "L2Normalization"
        mean, rstd = (np.ascontiguousarray(v[:, 0], np.float32) for v in _statistics(wide(x), norm))
        upstream, added = put(dy, device), put(extra, device)
        dx = {"dy": upstream, "residual": added}.get(alias) or poisoned(shape, dtype, device)
        dweight, dbias = (poisoned((n,), dtype, device) if there else None for there in (weighted, layer))
        kernels.norm_bwd(
            upstream,
            put(x, device),
            put(weight, device) if weighted else None,
            put(mean, device) if layer else None,
            put(rstd, device),
            added if residual else None,
            dx,
            dweight,
            dbias,
            norm,
            centred,
            workspace(kernels.norm_bwd_workspace(m, n), device),
            0,
        )
        mu, inverse = wide(mean)[:, None], wide(rstd)[:, None]
        xhat, gradient, onto = (wide(x) - mu) * inverse, wide(dy), wide(extra) * residual
        xhat_slack = 3 * ROUNDOFF * (np.abs(wide(x)) + np.abs(mu)) * inverse
        d = gradient * _gain(weight, norm, centred)
        along, level = (d * xhat).mean(1, keepdims=True), d.mean(1, keepdims=True) * layer
        along_slack = sum_slack(np.abs(d * xhat).mean(1, keepdims=True), n) + (np.abs(d) * xhat_slack).mean(
            1, keepdims=True
        )
        level_slack = sum_slack(np.abs(d).mean(1, keepdims=True), n) * layer
        reference = inverse * (d - level - xhat * along) + onto
        slack = inverse * (
            4 * ROUNDOFF * (np.abs(d) + np.abs(level) + np.abs(xhat * along))
            + level_slack
            + np.abs(xhat) * along_slack
            + xhat_slack * np.abs(along)
        ) + 2 * ROUNDOFF * (np.abs(reference) + np.abs(onto))
        assert_close("dx", get(dx), reference, dtype, slack)
        weight_slack = sum_slack(np.abs(gradient * xhat).sum(0), m) + (np.abs(gradient) * xhat_slack).sum(0)
        if dweight is not None:
            assert_close("dweight", get(dweight), (gradient * xhat).sum(0), dtype, weight_slack)
        if dbias is not None:
            assert_close("dbias", get(dbias), gradient.sum(0), dtype, sum_slack(np.abs(gradient).sum(0), m))

    return run


def _repeatable(kernels: Kernels, device: Device) -> None:
    """The sums over rows have a fixed order: the same bits every time."""
    shape = (300, 64)
    x, weight, _ = _inputs(float32, shape, 0.3)
    mean, rstd = (np.ascontiguousarray(v[:, 0], np.float32) for v in _statistics(wide(x), "LayerNorm"))
    results = []
    for _ in range(3):
        dweight = arrays.zeros((64,), float32, device)
        kernels.norm_bwd(
            put(x, device),
            put(x, device),
            put(weight, device),
            put(mean, device),
            put(rstd, device),
            None,
            poisoned(shape, float32, device),
            dweight,
            poisoned((64,), float32, device),
            "LayerNorm",
            False,
            workspace(kernels.norm_bwd_workspace(*shape), device),
            0,
        )
        results.append(get(dweight))
    for other in results[1:]:
        assert_same_bits("dweight", other, results[0])


WIDE = (2053, 9001)  # rows of thousands, no multiple of anything
WHOLE = (136, 768, 2048, 4096, 8192)  # and of vectors

CASES = [
    *table(
        "norm_fwd",
        {f"{d.name}-{k}-{s[0]}x{s[1]}": _fwd(d, k, s) for d in HIGH_PRECISION for k in ALL for s in SIZES},
    ),
    *table(
        "norm_fwd",
        {f"{d.name}-{k}-zero_centered": _fwd(d, k, (9, 48), True) for d in HIGH_PRECISION for k in NORMS},
    ),
    *table(
        "norm_fwd", {f"{d.name}-no-bias": _fwd(d, "LayerNorm", (9, 48), biased=False) for d in HIGH_PRECISION}
    ),
    *table("norm_fwd", {f"{k}-large-mean": _fwd(float32, k, (9, 200), offset=100.0) for k in NORMS}),
    *table(
        "norm_fwd",
        {
            f"{d.name}-{k}-amax-{a}": _fwd(d, k, (33, 40), start=a)
            for d in HIGH_PRECISION
            for k in NORMS
            for a in (0.0, 99.0)
        },
    ),
    *table(
        "norm_fwd",
        {
            f"{d.name}-{k}-cast-{f}": _fwd_cast(d, k, (32, 48), f, (0, 0), True, False)
            for d in HIGH_PRECISION
            for k in NORMS
            for f in (E4M3, E5M2)
        },
    ),
    *table(
        "norm_fwd",
        {
            f"{d.name}-{k}-cast-by-amax": _fwd_cast(
                d, k, (32, 48), E4M3, (0, 0), True, False, rule=Rule(True, 0.0)
            )
            for d in HIGH_PRECISION
            for k in NORMS
        },
    ),
    *table(
        "norm_fwd",
        {
            f"{d.name}-{k}-cast-padded-y": _fwd_cast(d, k, (17, 33), E4M3, (15, 15), True, True)
            for d in HIGH_PRECISION
            for k in NORMS
        },
    ),
    *table(
        "norm_fwd",
        {
            f"{d.name}-{k}-cast-rowwise": _fwd_cast(d, k, (70, 80), E4M3, (10, 0), False, False)
            for d in HIGH_PRECISION
            for k in NORMS
        },
    ),
    *table(
        "norm_fwd",
        {
            f"{d.name}-{k}-cast-zero_centered": _fwd_cast(d, k, (33, 40), E4M3, (15, 8), True, True, True)
            for d in HIGH_PRECISION
            for k in NORMS
        },
    ),
    *table(
        "norm_fwd",
        {
            f"{d.name}-{k}-3x{n}": _fwd(d, k, (3, n), True)
            for d in HIGH_PRECISION
            for k in NORMS
            for n in WIDE
        },
    ),
    *table(
        "norm_fwd",
        {
            f"{d.name}-{k}-cast-33x{n}": _fwd_cast(d, k, (33, n), E4M3, (15, 16 * (n == 768)), True, True)
            for d in HIGH_PRECISION
            for k in NORMS
            for n in WHOLE
        },
    ),
    *table(
        "norm_bwd",
        {f"{d.name}-{k}-{s[0]}x{s[1]}": _bwd(d, k, s) for d in HIGH_PRECISION for k in ALL for s in SIZES},
    ),
    *table(
        "norm_bwd",
        {
            f"{d.name}-{k}-residual-zero_centered": _bwd(d, k, (70, 48), True, True)
            for d in HIGH_PRECISION
            for k in NORMS
        },
    ),
    *table(
        "norm_bwd",
        {
            f"{d.name}-{k}-dx-is-{a}": _bwd(d, k, (17, 40), residual=True, alias=a)
            for d in HIGH_PRECISION
            for k in ALL
            for a in ("dy", "residual")
        },
    ),
    *table(
        "norm_bwd",
        {
            f"{d.name}-{k}-3x{n}": _bwd(d, k, (3, n), True, True)
            for d in HIGH_PRECISION
            for k in NORMS
            for n in WIDE
        },
    ),
    *table(
        "norm_bwd",
        {
            f"{d.name}-{k}-33x{n}": _bwd(d, k, (33, n), True, True)
            for d in HIGH_PRECISION
            for k in NORMS
            for n in WHOLE
        },
    ),
    *table("norm_bwd", {"repeatable": _repeatable}),
]
