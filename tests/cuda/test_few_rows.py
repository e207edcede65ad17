"""Hopper's product where a has few rows, or its last tile fewer than others: every bit, and how it is cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fp8kit import formats
from fp8kit.backends import dispatch
from fp8kit.backends.cuda import hopper_gemm
from fp8kit.backends.policy import SelectionPolicy, policy_context
from fp8kit.formats import E4M3, bfloat16, float32
from fp8kit.raw_kernels import manifest
from fp8kit.testing.compare import assert_same_bits
from fp8kit.testing.contract import get, put
from tests.support import hopper as support
from tests.support.hopper import GPU
from tests.support.own_gemms import LINE, SQUARE, by_the_model, multiply, operand


@pytest.fixture
def kernels() -> Iterator[Any]:
    """Every kernel, these products by our own."""
    support.want_hopper()
    own = {name: (f"impl:cuda.hopper_{name}",) for name in ("fp8_gemm", "block_gemm")}
    with policy_context(SelectionPolicy(per_op=own)):
        yield dispatch.kernels(GPU)


_SCALED: dict[str, Any] = {
    "whole": None,
    "lines_squares": (LINE, SQUARE),
    "squares_lines": (SQUARE, LINE),
    "lines_lines": (LINE, LINE),
}
FORMS = sorted(
    {
        (int(how["BM"]), int(how["BN"]), int(how["PROMOTE"]), how["SCALES"])
        for how in map(dict, manifest.source("hopper_gemm.cu").variants)
        if (how["GROUPS"], how["EPILOGUE"], how["LEFT"]) == ("none", "bare", "e4m3")
    }
)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [float32, bfloat16], ids=str)
@pytest.mark.parametrize("m", [1, 24, 64, 72, 127, 200, 260])
@pytest.mark.parametrize("form", FORMS, ids=["-".join(map(str, form)) for form in FORMS])
def test_fewer_rows_than_a_tiles(
    form: Any, m: int, dtype: formats.DType, kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every tiling, where shared memory has NaN for the rows that are not copied."""
    support.fill_shared_memory_with_nan(kernels)
    (rows, columns, promote, kind), n, k = form, 520, 1040
    monkeypatch.setattr(hopper_gemm, "tiling", lambda *_: hopper_gemm.Tiling(rows, columns))
    monkeypatch.setattr(hopper_gemm, "planned", hopper_gemm.planned.__wrapped__)
    tiles = _SCALED[kind]
    a, b = (operand(r, k, E4M3, i, tiles and tiles[i]) for i, r in enumerate((m, n)))
    before = np.full((m + 3, n), 7, dtype.numpy)
    whole = put(before, GPU)
    multiply(kernels, a, b, whole.slice(0, 0, m), tiles, not promote)
    before[:m] = by_the_model(kernels, a, b, (m, n, k), tiles, not promote).astype(dtype.numpy)
    assert_same_bits("out", get(whole), before)


# --- plans --------------------------------------------------------------------------------------------------


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Any:
    return support.planned(hopper_gemm, monkeypatch)


def plan(planned: Any, m: int, n: int, promote: int = 0) -> Any:
    k = 4096
    types = "e4m3", "e4m3", "bf16"
    return planned(0, m, n, k, k, k, n, m, n, types, "whole", (0, 0), promote)


@pytest.mark.parametrize(
    ("m", "n", "rows"),
    [(1, 4096, 8), (17, 4096, 24), (64, 4096, 0), (200, 4096, 72), (4096 + 200, 16384, 40)],
)
def test_of_the_last_rows_no_more_are_copied_than_there_are(m: int, n: int, rows: int, planned: Any) -> None:
    """By each block of a cluster its share: the last case is one, of 72 rows."""
    found = plan(planned, m, n)
    assert (dict(found.kernel)["BM"] == "64") == (m <= 64)
    last = found.maps[-1]
    assert f"(128, {rows})" in last.decode() if rows else not any(last)


@pytest.mark.parametrize("promote", [0, 128])
@pytest.mark.parametrize("n", [4096, 12288, 16384, 28672])
def test_a_few_rows_keep_multiprocessors_busy(n: int, promote: int, planned: Any) -> None:
    """What comes from memory comes the faster, the more of them copy."""
    found = plan(planned, 16, n, promote)
    at = hopper_gemm.Tiling(*(int(dict(found.kernel)[name]) for name in ("BM", "BN")))
    tiles = -(-n // at.columns)
    assert at.rows == 64
    assert tiles / (132 * -(-tiles // 132)) > 0.96
