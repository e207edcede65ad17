"""What will break first, on logs whose answer is known."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8kit.errors import ArgumentError
from fp8kit.formats import E2M1, E4M3, E5M2
from fp8kit.numerics import run_folder, tensor_statistics
from fp8kit.numerics.operands import prefixes, quantizer_of, range_of
from fp8kit.numerics.ranking import LOST, limit_of, own_name, rank, slope_of
from fp8kit.numerics.run_folder import Key, Series, series_of

STEPS = np.arange(0, 200, 2)
E4M3_LIMIT = 6.02 * 3 + 13.5 - LOST


def log(**layers: Any) -> dict[Key, Series]:
    """layer -> (tensor, stat, values over STEPS)."""
    return {
        Key(layer, tensor, "", stat): Series(STEPS, np.asarray(values, np.float64))
        for layer, (tensor, stat, values) in layers.items()
    }


def test_a_falling_sqnr_is_followed_to_its_limit() -> None:
    values = 31.0 - 0.03 * STEPS
    (found,) = rank(log(a=("activation", "sqnr", values)), "current")
    assert found.state == "moving"
    now = float(np.median(values[-20:]))
    assert found.limit == pytest.approx(E4M3_LIMIT)
    assert found.left == pytest.approx((now - E4M3_LIMIT) / 0.03)
    assert found.why.startswith("Its SQNR is 25.6 dB and falls by 3 dB in 100 steps: it passes the limit of ")
    assert found.why.endswith(f"for E4M3 near step {float(f'{198 + found.left:.2g}'):,.0f}.")


def test_the_order_is_that_of_the_rule() -> None:
    flat = np.full(100, 25.0)
    nan = np.zeros(100)
    nan[60:] = 3
    found = rank(
        log(
            far=("activation", "sqnr", flat + 5),
            near=("activation", "sqnr", flat),
            moving=("activation", "sqnr", 30 - 0.04 * STEPS),
            slower=("activation", "sqnr", 30 - 0.03 * STEPS),
            beyond=("gradient", "underflows%", np.full(100, 6.0)),
            far_beyond=("gradient", "underflows%", np.full(100, 20.0)),
            nan=("weight", "nan_count", nan),
            none=("weight", "inf_count", np.zeros(100)),
        ),
        "current",
    )
    states = [(each.layer, each.state) for each in found]
    assert states == [
        ("nan", "broken"),
        ("far_beyond", "beyond"),
        ("beyond", "beyond"),
        ("moving", "moving"),
        ("slower", "moving"),
        ("near", "holds"),
        ("far", "holds"),
        ("none", "holds"),
    ]
    assert found[0].why == "3 of its elements are NaN at step 120, the first time."
    assert found[1].why == "20 % of its elements become 0, above the limit of 5 % for E5M2."
    assert found[5].why.endswith("dB for E4M3, and will not reach it soon.")


def test_a_tensor_has_one_row_the_worst() -> None:
    rows = log(a=("activation", "sqnr", np.full(100, 31.0)))
    rows |= log(a=("activation", "overflows%", np.full(100, 2.0)))
    (found,) = rank(rows, "current")
    assert (found.stat, found.state) == ("overflows%", "beyond")


def test_the_runs_own_recipe_may_stand_before_a_name() -> None:
    rows = log(a=("activation", "nvfp4_underflows%", np.full(100, 30.0)))
    rows |= log(b=("activation", "mxfp8_underflows%", np.full(100, 30.0)))
    assert [(each.layer, each.stat, each.state) for each in rank(rows, "nvfp4")] == [
        ("a", "underflows%", "beyond")
    ]
    assert own_name("fp8_current_scaling_sqnr", "current") == "sqnr"
    assert own_name("fp8_current_scaling_sqnr", "delayed") == "fp8_current_scaling_sqnr"
    assert own_name("sqnr", None) == "sqnr"


def test_a_folder_is_no_log(tmp_path: Path) -> None:
    run = run_folder.read(run_folder.write(tmp_path, recipe="mxfp8", losses={}, device="cpu"))
    assert rank(run.statistics, "mxfp8") == []
    with pytest.raises(ArgumentError, match=r"log: got .*the statistics of run_folder.read\(RUN\)"):
        rank(run, "mxfp8")  # type: ignore[arg-type]


def test_noise_is_no_trend() -> None:
    noise = np.random.default_rng(0).standard_normal((20, 100))
    moving = [slope_of(STEPS, values) for values in noise]
    assert sum(slope != 0 for slope in moving) <= 1
    clear = slope_of(STEPS, noise[0] * 0.1 + 0.05 * STEPS)
    assert clear == pytest.approx(0.05, rel=0.1)  # noise of 0.1 over 100 steps
    assert slope_of(STEPS[:10], np.arange(10.0)) == 0  # too few


def test_no_forecast_is_longer_than_what_it_follows_from() -> None:
    (found,) = rank(log(a=("activation", "sqnr", 31.0 - 0.01 * STEPS)), "current")
    assert found.state == "holds"  # 7.6 dB at 1 dB in 100 steps, of 198 logged ones
    assert found.left == math.inf


def test_an_exact_cast_does_not_break() -> None:
    (found,) = rank(log(a=("activation", "sqnr", np.full(100, math.inf))), "current")
    assert found.state == "holds"
    assert "no finite value" in found.why


@pytest.mark.parametrize(
    ("recipe", "tensor", "stat", "limit"),
    [
        ("current", "activation", "overflows%", 0.1),
        ("rowwise", "activation", "overflows%", 0.1),
        ("mxfp8", "activation", "overflows%", 1.0),
        ("nvfp4", "activation", "overflows%", 100 / 16),
        ("nvfp4", "weight", "overflows%", 1.0),
        ("nvfp4", "gradient", "underflows%", 25.0),
        ("mxfp6_e3m2", "gradient", "underflows%", 5.0),
        ("nvfp4", "weight", "sqnr", 6.02 + 13.5 - LOST),
        ("current", "gradient", "sqnr", 6.02 * 2 + 13.5 - LOST),
        (None, "wgrad", "relative_error", 3**-0.5),
        (None, "activation", "sqnr", None),
        ("my own", "activation", "sqnr", None),
        ("current", "output", "sqnr", None),
        ("current", "activation", "mean", None),
    ],
)
def test_limits_follow_the_recipe(recipe: str | None, tensor: str, stat: str, limit: float | None) -> None:
    found = limit_of(Key("a", tensor, "", stat), recipe)
    assert (found and found.value) == limit


def test_names_of_what_ifs_are_taken_apart() -> None:
    assert prefixes("nvfp4_rows_underflows%_columnwise") == ("nvfp4_rows", "underflows%")
    assert prefixes("mxfp8_sqnr") == ("mxfp8", "sqnr")
    assert prefixes("scale_inv_max") == (None, "scale_inv_max")


def counts_of(*exponents: int) -> np.ndarray:
    counts = np.zeros(257, np.int64)
    counts[[127 + e for e in exponents]] = 1
    return counts


def rows_of(**stats: float) -> dict[Key, Series]:
    return series_of(
        {"step": 4, "layer": "a", "tensor": "activation", "stat": stat, "value": value}
        for stat, value in stats.items()
    )


def test_a_range_is_the_formats_at_the_logged_scale() -> None:
    key = Key("a", "activation", "", "exponents")
    rows = rows_of(scale_inv_min=2.0**-8, scale_inv_max=2.0**-6)
    found = range_of("mxfp8", False, key, 4, counts_of(0), rows)
    assert found == (E4M3.name, -9 - 8, math.log2(448 / 64), "logged")
    gradient = range_of("current", False, key._replace(tensor="gradient"), 4, counts_of(3), {})
    top = math.log2(E5M2.max * (2.0**4 / E5M2.max))
    assert gradient is not None
    assert gradient[0] == E5M2.name
    assert gradient.high == pytest.approx(top)  # the next power of two above the histogram
    assert gradient.scale == "histogram"


def test_a_range_falls_back_to_the_amax_and_takes_a_what_ifs_own_scale() -> None:
    key = Key("a", "activation", "", "exponents")
    rows = rows_of(cur_amax=3.0, nvfp4_scale_inv_max=0.5)
    found = range_of("current", False, key, 9, counts_of(1), rows)
    assert found is not None
    assert found.high == pytest.approx(math.log2(3))
    assert found.low == pytest.approx(math.log2(3 / 448 * 2**-9))
    what_if = range_of("nvfp4", True, key, 9, counts_of(1), rows)
    assert what_if == (E2M1.name, math.log2(0.5 * 0.5), math.log2(6 * 0.5), "logged")
    assert range_of("current", False, key._replace(tensor="wgrad"), 4, counts_of(0), rows) is None
    assert range_of(None, False, key, 4, counts_of(0), rows) is None
    assert range_of("current", False, key, 4, np.zeros(257, np.int64), {}) is None


def test_a_static_scale_is_the_recipes() -> None:
    key = Key("a", "activation", "", "exponents")
    quantizer = quantizer_of("static", "activation")
    assert quantizer is not None
    found = range_of("static", False, key, 4, counts_of(0), {})
    assert found is not None
    assert found.high == pytest.approx(math.log2(448))


@pytest.mark.parametrize("recipe", ["current", "block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("tensor", ["activation", "weight", "gradient"])
def test_normal_values_break_no_limit(recipe: str, tensor: str) -> None:
    """What every cast does to the tensor it is made for is nothing to look at."""
    x = np.random.default_rng(5).standard_normal((256, 512)).astype(np.float32)
    found = tensor_statistics(x, ("overflows%", "underflows%", "sqnr"), tensor=tensor, recipe=recipe)
    rows = {Key("a", tensor, "", stat): Series(STEPS, np.full(100, value)) for stat, value in found.items()}
    (verdict,) = rank(rows, recipe)
    assert verdict.state == "holds", verdict.why
