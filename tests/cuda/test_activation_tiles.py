"""Activations with blocks that walk several whole tiles each: sizes that the contract's cases do not reach."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fp8kit.arrays import Device
from fp8kit.backends import dispatch
from fp8kit.backends.cuda.activation import _tiles
from fp8kit.backends.protocol import Kernels
from fp8kit.formats import E4M3, E5M2, bfloat16
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
