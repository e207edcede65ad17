"""Loss curves, spreads and gaps against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from fp8kit.errors import ArgumentError
from fp8kit.numerics.losses import compared, gap_of, grouped, reference_of, running_mean
from fp8kit.numerics.run_folder import Curve, curves_of
from fp8kit.testing import assert_close

EXACT = 1e-12  # float64 sums of 120 terms


def curves(**series: np.ndarray) -> tuple[Curve, ...]:
    rows = [
        {"step": step, "loss": float(loss), "series": name.replace("_", " ")}
        for name, losses in series.items()
        for step, loss in enumerate(losses, start=1)
    ]
    return curves_of(rows)


def drawn(level: float, seed: int, steps: int = 120) -> np.ndarray:
    return level + np.random.default_rng(seed).random(steps)


def test_a_running_mean_is_that_of_the_last_values() -> None:
    values = drawn(2, 0)
    expected = np.array([values[max(0, i - 3) : i + 1].mean() for i in range(values.size)])
    assert_close("mean", running_mean(values, 4), expected, "float64", EXACT * expected)


def test_gap_and_spread() -> None:
    series = {"bf16_seed_0": drawn(2, 0), "bf16_seed_1": drawn(2, 1), "mxfp8_seed_0": drawn(2.5, 2)}
    found = curves(**series)
    groups = grouped(found)
    assert list(groups) == ["bf16", "mxfp8"]
    assert reference_of(groups, None) == "bf16"
    assert reference_of(groups, "mxfp8") == "mxfp8"
    base, ours = compared(groups, found, "bf16")
    finals = np.array([series[name][-6:].mean() for name in series])  # 5 % of 120 steps
    spread = np.std(finals[:2], ddof=1)
    assert [base.final, ours.final] == pytest.approx([finals[:2].mean(), finals[2]], rel=EXACT)
    assert (base.gap, base.seeds, ours.seeds) == (None, 2, 1)
    apart = finals[2] - finals[:2].mean()
    assert ours.gap == pytest.approx(100 * apart / finals[:2].mean(), rel=EXACT)
    assert ours.spread == pytest.approx(spread, rel=EXACT)
    assert ours.gap_in_spreads == pytest.approx(apart / spread, rel=EXACT)
    steps, gaps = gap_of(groups["mxfp8"], groups["bf16"])
    smooth = [running_mean(values, 4) for values in series.values()]
    mean = (smooth[0] + smooth[1]) / 2
    assert steps.tolist() == list(range(1, 121))
    assert gaps[0] == pytest.approx(100 * (smooth[2] / mean - 1), rel=1e-9)  # a difference of near numbers


def test_seeds_of_different_lengths_share_what_they_have() -> None:
    found = curves(a_seed_0=drawn(2, 0), a_seed_1=drawn(2, 1, 50), b=drawn(3, 2, 80))
    groups = grouped(found)
    assert groups["a"].smooth.shape == (2, 50)
    assert gap_of(groups["b"], groups["a"])[0].size == 50
    assert reference_of(groups, None) == "a"  # none is called a high precision: the first


def test_one_seed_has_no_spread_and_a_divergence_is_said() -> None:
    broken = drawn(3, 1)
    broken[70:] = np.nan
    found = curves(float32=drawn(2, 0), delayed=broken)
    rows = compared(grouped(found), found, "float32")
    assert rows[1].spread is None
    assert rows[1].gap_in_spreads is None
    assert rows[1].diverged == 71
    assert rows[0].diverged is None
    assert np.isnan(rows[1].final)
    assert np.isfinite(running_mean(broken, 4)[:70]).all()


def test_an_unknown_reference_is_refused() -> None:
    with pytest.raises(ArgumentError, match="--reference: got 'bf17', expected one of bf16; did you mean"):
        reference_of(grouped(curves(bf16=drawn(2, 0))), "bf17")
    assert reference_of({}, None) is None
