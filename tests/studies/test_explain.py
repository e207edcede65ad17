"""Explanations: of operands that are known, and of a training."""

from __future__ import annotations

import time

import numpy as np

import fp8kit as fk
from fp8kit.arrays import CPU
from fp8kit.formats import E4M3, E5M2
from fp8kit.numerics import Dump, GemmOperands
from fp8kit.quantization import Gemm, Quantization, Quantizer
from fp8kit.recipes import NAMED
from studies import explain, files


def dump_of(names, scale=1.0):
    random = np.random.default_rng(0)

    def drawn(*shape):
        return random.standard_normal(shape).astype(np.float32)

    return Dump(
        {
            name: GemmOperands(drawn(32, 64), drawn(48, 64), drawn(32, 48) * np.float32(scale))
            for name in names
        }
    )


def test_the_operand_that_loses_most_is_named():
    """E4M3 for all but the gradient of dgrad, which has two bits less."""
    good, bad = Quantizer(E4M3, "mx_1x32", scale_rule="te"), Quantizer(E5M2, "mx_1x32", scale_rule="te")
    recipe = fk.recipe.DataRecipe(Quantization(Gemm(good, good), Gemm(bad, good), Gemm(good, good)), "one")
    found = explain.of_case(recipe, dump_of(["layers.0.a.proj", "layers.1.a.proj"]), CPU)
    assert found["sentence"].startswith("Most is lost of the output gradients of a.proj in dgrad: ")
    assert "by rounding alone" in found["sentence"]
    by_place = {(row["gemm"], row["tensor"]): row["sqnr"] for row in found["rows"]}
    assert len(by_place) == 6
    assert min(by_place, key=by_place.get) == ("dgrad", "gradient")
    assert found["sqnr"]["dgrad"] < min(found["sqnr"]["fprop"], found["sqnr"]["wgrad"])


def test_shares_are_told_where_they_matter():
    found = explain.of_case(NAMED["static"].recipe, dump_of(["layers.0.a.proj"], 2.0**-18), CPU)
    row = next(row for row in found["rows"] if row["gemm"] == "dgrad" and row["tensor"] == "gradient")
    assert row["underflows%"] > 50
    assert f"{row['underflows%']:.1f} % of their elements become 0" in found["sentence"]


def test_explanations_of_a_training(tmp_path, text, size, capsys):
    names = ["bf16", "current", "attention", "nvfp4_last"]
    assert explain.explain(tmp_path, size, text, CPU, names, float("inf"))
    found = files.read(tmp_path / "explain.json")["cases"]
    assert list(found) == names[1:]
    assert found["attention"] == found["current"]  # of the same casts
    assert found["nvfp4_last"]["high_precision"]
    assert "in high precision, lose nothing" in found["nvfp4_last"]["sentence"]
    lines = explain.rows(tmp_path)
    assert [line[0] for line in lines] == [f"`{name}`" for name in ("current", "nvfp4_last", "attention")]
    for line in lines:
        own = found[line[0].strip("`")]
        least = min(row["sqnr"] for row in own["rows"] if row["sqnr"] is not None)
        assert line[3] == f"{least:.1f}"
        assert len(line) == len(explain.COLUMNS)
        assert line[6:] == tuple(f"{value:.1f}" for value in own["sqnr"].values())
    assert explain.explain(tmp_path, size, text, CPU, names, 0.0)  # all are there
    assert not explain.explain(tmp_path, size, text, CPU, [*names, "mxfp4"], time.monotonic() - 1)
    assert "no time for mxfp4" in capsys.readouterr().out
