"""Contract cases of the matrix products, against float64.

Tolerance: a float32 sum of K products (``sum_slack``) and one rounding to the output; on a device one more,
half a unit of the last place, before a bias and before an addend joins a 16-bit one (the contract allows it).
FP8 on tensor cores is wider: Hopper aligns the 32 products of one instruction and the accumulator to the
largest of them and keeps 14 bits, so each instruction may lose 2^-13 of the sum of magnitudes.
``fast_accumulate`` does all ceil(K / 32) instructions so; the split accumulator at most 4 (128 products)
before it promotes to float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fp8kit import codec
from fp8kit.arrays import ArrayView, Device
from fp8kit.backends.protocol import Kernels, Layout
from fp8kit.formats import E4M3, E5M2, HIGH_PRECISION, DType, Format, bfloat16, float16, float32
from fp8kit.testing.compare import assert_close, epsilon, sum_slack
from fp8kit.testing.contract import put, workspace
from fp8kit.testing.contract.elementwise import Array, draw, hole, host, spread, table, wide

LAYOUTS: tuple[Layout, ...] = ("nt", "nn", "tn")


def _gemm(
    dtype: DType,
    sizes: tuple[int, int, int],
    layout: Layout,
    out_dtype: DType | None = None,
    bias: bool = False,
    add: str = "",
    gap: int = 0,
    odd: bool = False,
) -> Callable[[Kernels, Device], None]:
    def run(kernels: Kernels, device: Device) -> None:
        m, n, k = sizes
        kind = out_dtype or dtype
        a, b = draw(1, (m, k), dtype), draw(2, (k, n), dtype)
        shift, before = draw(3, (n,), dtype), draw(4, (m, n), kind)
        out, check = hole((m, n), kind, device, gap)
        addend = misplaced(before, device) if odd else added(add, before, out, kernels, gap)
        own_bias = (misplaced if odd else put)(shift, device) if bias else None
        left = spread(np.ascontiguousarray(a.T) if layout == "tn" else a, device, gap)
        right = spread(np.ascontiguousarray(b.T) if layout == "nt" else b, device, gap)
        kernels.gemm(
            left, right, out, layout, own_bias, addend, workspace(kernels.gemm_workspace(), device), 0
        )
        reference, magnitude = wide(a) @ wide(b), np.abs(wide(a)) @ np.abs(wide(b))
        joined = [wide(part) for wanted, part in ((bias, shift), (add, before)) if wanted]
        rounded = joining_slack(reference, kind, joined, device)
        for part in joined:
            reference, magnitude = reference + part, magnitude + np.abs(part)
        assert_close("out", host(out), reference, kind, sum_slack(magnitude, k) + rounded)
        check()

    return run


def added(how: str, values: Array, out: ArrayView, kernels: Kernels, gap: int = 0) -> ArrayView | None:
    """What a product adds: nothing (""), what stands in ``out`` ("accumulate"), or an array apart from it, as
    strided ("add")."""
    if not how:
        return None
    addend = out if how == "accumulate" else spread(values, out.device, gap)
    if addend is out:
        kernels.copy(put(values, out.device), out, 0)
    return addend


def misplaced(values: Array, device: Device) -> ArrayView:
    """The values at an address that is a multiple of their size alone."""
    flat = values.reshape(-1)
    return put(np.concatenate([flat[:1], flat]), device).slice(0, 1, flat.size).reshape(*values.shape)


def joining_slack(product: Array, dtype: DType, joined: Sequence[Array], device: Device) -> Array:
    """What a device may lose by rounding to a 16-bit ``dtype`` before it adds each of ``joined``, at most
    two, in the order it likes."""
    lossy = device.kind != "cpu" and dtype is not float32
    rounded = np.abs(product) if joined else np.zeros(())
    if len(joined) > 1:
        rounded = rounded + np.max([np.abs(product + part) for part in joined], axis=0)
    return np.asarray(lossy * epsilon(dtype) / 2 * rounded)


def _codes(seed: int, shape: tuple[int, int], fmt: Format) -> Array:
    return codec.encode(np.random.default_rng(seed).standard_normal(shape) * 8, fmt)


def fp8_slack(magnitude: Array, terms: int, fast: bool, device: Device) -> Array:
    """Error that an FP8 sum of ``terms`` products may have made (see this module's text)."""
    slack = sum_slack(magnitude, terms)
    if device.kind != "cpu":
        instructions = -(-terms // 32)
        slack = slack + (instructions if fast else min(instructions, 4)) * 2.0**-13 * magnitude
    return np.asarray(slack)


def _fp8(
    dtype: DType,
    sizes: tuple[int, int, int],
    a_format: Format = E4M3,
    b_format: Format = E4M3,
    fast: bool = False,
    bias: bool = False,
    add: str = "",
    by_row: bool = False,
    odd: bool = False,
    gap: int = 0,
) -> Callable[[Kernels, Device], None]:
    def run(kernels: Kernels, device: Device) -> None:
        m, n, k = sizes
        m_padded, n_padded = -(-m // 16) * 16, -(-n // 16) * 16
        a, b = _codes(1, (m_padded, k), a_format), _codes(2, (n_padded, k), b_format)
        shift, before = draw(3, (n,), dtype), draw(4, (m, n), dtype)
        count = (m_padded, n_padded) if by_row else (1, 1)
        a_scale, b_scale = (
            np.random.default_rng(5 + i).uniform(0.01, 0.1, c).astype(np.float32) for i, c in enumerate(count)
        )
        out, check = hole((m, n), dtype, device, gap)
        addend = misplaced(before, device) if odd else added(add, before, out, kernels, gap)
        own_bias = (misplaced if odd else put)(shift, device) if bias else None
        space = kernels.fp8_gemm_workspace(m, n) + (4 * m * n if gap else 0)
        kernels.fp8_gemm(
            put(a, device),
            put(b, device),
            out,
            a_format,
            b_format,
            put(a_scale, device),
            put(b_scale, device),
            own_bias,
            addend,
            fast,
            workspace(space, device),
            0,
        )
        left = codec.decode(a, a_format) * wide(a_scale)[:, None]
        right = codec.decode(b, b_format) * wide(b_scale)[:, None]
        reference, magnitude = left[:m] @ right[:n].T, np.abs(left[:m]) @ np.abs(right[:n]).T
        joined = [wide(part) for wanted, part in ((bias, shift), (add, before)) if wanted]
        slack = fp8_slack(magnitude, k, fast, device) + joining_slack(reference, dtype, joined, device)
        for part in joined:
            reference, slack = reference + part, slack + sum_slack(np.abs(part), 1)
        assert_close("out", host(out), reference, dtype, slack)
        check()

    return run


SIZES = ((17, 33, 19), (1, 1, 1), (64, 48, 32), (5, 1, 7), (1, 9, 4), (0, 8, 8), (8, 5, 0))
FP8_SIZES = ((32, 48, 64), (17, 33, 32), (1, 16, 16), (16, 1, 160), (130, 70, 512), (0, 16, 32), (17, 33, 0))
ADDED = ("accumulate", "add")
_PAIRS = ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2))

CASES = [
    *table(
        "gemm",
        {
            f"{d.name}-{y}-{'x'.join(map(str, s))}": _gemm(d, s, y)
            for d in HIGH_PRECISION
            for y in LAYOUTS
            for s in SIZES
        },
    ),
    *table(
        "gemm",
        {
            f"{d.name}-{y}-bias-{add}": _gemm(d, (17, 24, 40), y, bias=True, add=add)
            for d in HIGH_PRECISION
            for y in LAYOUTS
            for add in ADDED
        },
    ),
    *table(
        "gemm",
        {f"{d.name}-{y}-bias": _gemm(d, (33, 24, 16), y, bias=True) for d in HIGH_PRECISION for y in LAYOUTS},
    ),
    *table(
        "gemm",
        {
            f"{d.name}-{y}-float32-{add}": _gemm(d, (32, 17, 64), y, float32, add=add)
            for d in (bfloat16, float16)
            for y in LAYOUTS
            for add in ADDED
        },
    ),
    *table(
        "gemm",
        {
            f"{d.name}-{y}-strided-{g}": _gemm(
                d, (24, 32, 16), y, add="accumulate" if g == 16 else "add", gap=g
            )
            for d in HIGH_PRECISION
            for y in LAYOUTS
            for g in (16, 3)
        },
    ),
    *table(
        "fp8_gemm",
        {
            f"{d.name}-{'x'.join(map(str, s))}-{'fast' if f else 'split'}": _fp8(d, s, fast=f)
            for d in HIGH_PRECISION
            for s in FP8_SIZES
            for f in (False, True)
        },
    ),
    *table(
        "fp8_gemm",
        {f"{d.name}-{a}-{b}": _fp8(d, (17, 48, 96), a, b) for d in HIGH_PRECISION for a, b in _PAIRS},
    ),
    *table(
        "fp8_gemm",
        {
            f"{d.name}-{n[0]}x{n[1]}-bias-{add}": _fp8(d, n, bias=True, add=add)
            for d in HIGH_PRECISION
            for n in ((48, 32, 64), (17, 33, 64), (17, 33, 0))
            for add in ADDED
        },
    ),
    *table(
        "gemm",
        {
            f"{d.name}-{y}-bias-odd": _gemm(d, (32, 24, 40), y, bias=True, add="add", odd=True)
            for d in HIGH_PRECISION
            for y in LAYOUTS
        },
    ),
    *table(
        "fp8_gemm",
        {
            f"{d.name}-{n[0]}x{n[1]}-bias-odd": _fp8(d, n, bias=True, add="add", odd=True)
            for d in HIGH_PRECISION
            for n in ((48, 32, 64), (17, 33, 64))
        },
    ),
    *table(
        "fp8_gemm",
        {
            f"{d.name}-strided-{add}": _fp8(d, (48, 32, 64), bias=True, add=add, gap=3)
            for d in HIGH_PRECISION
            for add in ADDED
        },
    ),
    *table(
        "fp8_gemm",
        {f"{d.name}-bias-E5M2": _fp8(d, (48, 32, 64), E5M2, E4M3, bias=True) for d in HIGH_PRECISION},
    ),
    *table(
        "fp8_gemm",
        {
            f"{d.name}-rows-{n[0]}x{n[1]}": _fp8(d, n, by_row=True)
            for d in HIGH_PRECISION
            for n in ((32, 48, 64), (17, 33, 32))
        },
    ),
]
