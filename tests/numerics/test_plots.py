"""The report's pictures as functions: what they draw is what the log has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fp8kit.errors import ArgumentError
from fp8kit.numerics import plots
from fp8kit.numerics.losses import running_mean

STEPS = range(0, 50, 5)
LAYERS = ("layers.10.fc1", "layers.2.fc2", "layers.2.fc1")


def value(layer: str, step: int) -> float:
    return 2.0 ** -(LAYERS.index(layer) + step / 10)


def rows() -> list[dict[str, Any]]:
    counts = [0] * 257
    counts[120:128] = [1, 2, 4, 8, 4, 2, 1, 1]
    counts[256] = 2
    found: list[dict[str, Any]] = []
    for step in STEPS:
        for layer in LAYERS:
            own = {"step": step, "layer": layer, "tensor": "activation"}
            found.append({**own, "stat": "sqnr", "value": value(layer, step)})
            found.append({**own, "stat": "scale_inv_max", "value": value(layer, step)})
            found.append({**own, "stat": "scale_inv_min", "value": value(layer, step)})
            found.append({**own, "stat": "exponents", "value": counts})
            for gemm in ("fprop", "dgrad"):
                more = {"tensor": "output", "gemm": gemm, "stat": "sqnr", "value": 1.0}
                found.append({**own, **more})
    return found


def test_a_heat_map_has_a_row_for_each_layer() -> None:
    axes = plots.heat_map(rows(), stat="sqnr").axes[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["layers.2.fc1", "layers.2.fc2", "layers.10.fc1"]
    image = np.asarray(axes.images[0].get_array())
    np.testing.assert_array_equal(image, [[value(layer, step) for step in STEPS] for layer in labels])
    scale = plots.heat_map(rows(), stat="scale_inv_max").axes[0]
    np.testing.assert_array_equal(np.asarray(scale.images[0].get_array()), np.log2(image))


def test_a_heat_map_of_products_wants_their_gemm() -> None:
    with pytest.raises(ArgumentError, match="gemm: missing, expected one of dgrad, fprop"):
        plots.heat_map(rows(), stat="sqnr", tensor="output")
    made = plots.heat_map(rows(), stat="sqnr", tensor="output", gemm="dgrad")
    assert np.asarray(made.axes[0].images[0].get_array()).shape == (3, len(STEPS))


def test_one_layer_over_time() -> None:
    (line,) = plots.over_time(rows(), "scale_inv_max", LAYERS[0]).axes[0].lines
    assert line.get_xdata().tolist() == list(STEPS)
    assert line.get_ydata().tolist() == [value(LAYERS[0], step) for step in STEPS]


def test_a_histogram_has_the_formats_range() -> None:
    made = plots.exponents(rows(), LAYERS[1], step=12, recipe="current").axes[0]
    shares = [bar.get_height() for bar in made.patches]
    assert shares == [100 * n / 25 for n in (1, 2, 4, 8, 4, 2, 1, 1)]
    assert [bar.get_x() for bar in made.patches] == list(range(-7, 1))
    low, high = (line.get_xdata()[0] for line in made.lines)
    scale = np.log2(value(LAYERS[1], 10))  # the last logged step before 12
    assert low == pytest.approx(-9 + scale)
    assert high == pytest.approx(np.log2(448) + scale)
    assert not plots.exponents(rows(), LAYERS[1]).axes[0].lines


def test_losses_have_a_gap_below() -> None:
    series = {"bf16 seed 0": 2.0, "bf16 seed 1": 2.2, "mxfp8 seed 0": 2.5}
    losses = [
        {"step": step, "loss": level - step / 100, "series": name}
        for name, level in series.items()
        for step in range(60)
    ]
    upper, lower = plots.losses(losses).axes
    base, ours = (
        running_mean(np.array([level - step / 100 for step in range(60)]), 2) for level in (2.1, 2.5)
    )
    np.testing.assert_array_almost_equal_nulp(np.asarray(upper.lines[1].get_ydata()), ours, 4)
    gap = np.asarray(lower.lines[1].get_ydata())
    assert np.abs(gap - 100 * (ours / base - 1)).max() < 1e-10
    assert [text.get_text() for text in upper.get_legend().get_texts()] == ["bf16", "mxfp8"]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: plots.heat_map(rows(), stat="sqnrs"),
            "stat: got 'sqnrs', expected one of .*did you mean sqnr",
        ),
        (lambda: plots.heat_map(rows(), "sqnr", "weight"), "statistics of weight, of which the log has none"),
        (lambda: plots.heat_map(rows(), "sqnr", "bias"), "tensor: got 'bias'"),
        (lambda: plots.heat_map([{"step": 1}], "sqnr"), 'rows: got .*rows of a log: "layer": a name'),
        (lambda: plots.over_time(rows(), "sqnr", "layers.3.fc1"), "layer: got 'layers.3.fc1'"),
        (lambda: plots.exponents(rows(), LAYERS[0], step=-1), "step: got -1, expected at least 0"),
        (lambda: plots.exponents(rows(), LAYERS[0], recipe="mxfp9"), "recipe: got 'mxfp9'.*did you mean"),
        (
            lambda: plots.losses([3.1, 3.0]),
            "rows: got 3.1, expected rows with step, loss and series: a mapping",
        ),
        (lambda: plots.losses([{"step": 1, "loss": 2.0}]), 'series: "series": the name of a run'),
        (lambda: plots.losses([]), "rows: got no training loss"),
    ],
)
def test_what_the_log_does_not_have_is_refused(call: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        call()
