"""Activations with blocks that walk several whole tiles each: sizes that the contract's cases do not reach. An amax alone, for which most
values are not worked out, is that of the values."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fp8kit.arrays import Device
from fp8kit.backends import dispatch
from fp8kit.backends.cuda.activation import _tiles
from fp8kit.backends.protocol import Kernels
from fp8kit.formats import E4M3, E5M2, DType, bfloat16, float16
from fp8kit.testing.compare import assert_same_bits
from fp8kit.testing.contract import get, poisoned, put
from fp8kit.testing.contract.activation import _bwd_cast, _fwd_cast

SHAPE = (8448, 2048)  # 132 x 16 tiles: two a block


CASES = {
    "forward": _fwd_cast(bfloat16, "gelu", SHAPE, E4M3, (0, 0), False),
    "backward": _bwd_cast(bfloat16, "gelu", SHAPE, E5M2, (0, 0), False),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_blocks_of_several_tiles_write_the_codes_of_the_plain_result(case: Callable[[Kernels, Device], None]) -> None:
    assert _tiles(*SHAPE) == 2
    device = Device("cuda", 0)
    case(dispatch.kernels(device), device)


@pytest.mark.gpu
@pytest.mark.parametrize("special", ["normal", "small", "negative", "equal", "infinite", "NaN"])
@pytest.mark.parametrize("activation", ["gelu", "qgelu", "silu"])
@pytest.mark.parametrize("dtype", [bfloat16, float16], ids=["bf16", "f16"])
def test_an_amax_alone_is_that_of_the_values(dtype: DType, activation: str, special: str) -> None:
    device, generator = Device("cuda", 0), np.random.default_rng(7)
    kernels = dispatch.kernels(device)
    x = generator.standard_normal(SHAPE).astype(np.float32)
    bias = generator.standard_normal(SHAPE[1]).astype(np.float32) / 8
    if special == "small":
        x, bias = x / 64, bias / 8
    elif special == "negative":
        x, bias = -np.abs(x), -np.abs(bias)
    elif special == "equal":  # sums that differ by less than the value's error, wherever they are rounded to
        x, bias = np.full_like(x, 3.0), 2.0**-8 * generator.random(SHAPE[1]).astype(np.float32)
    elif special in ("infinite", "NaN"):
        x[-70, 5] = np.inf if special == "infinite" else np.nan
    views = [put(array.astype(dtype.numpy), device) for array in (x, bias)]
    y, amaxes = poisoned(SHAPE, dtype, device), [put(np.zeros(1, np.float32), device) for _ in range(2)]
    for where, amax in zip((y, None), amaxes, strict=True):
        kernels.act_fwd(*views, where, amax, None, activation, (), 0)
    assert_same_bits("amax", get(amaxes[1]), get(amaxes[0]))
    got, values = float(get(amaxes[1])[0]), np.abs(get(y).astype(np.float32))
    assert got == np.nanmax(values) or (special == "NaN" and not np.isfinite(got))
