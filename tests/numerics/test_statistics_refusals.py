"""Statistics that are not there, and requests and records that do not fit."""

from __future__ import annotations

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import numerics
from fp8kit.numerics import Codes, Operand, collect, merge, request, tensor_statistics, values
from fp8kit.numerics.names import OF_CAST
from fp8kit.numerics.statistics import inputs
from fp8kit.recipes import NAMED


def normal(seed, *shape, scale=1.0, mean=0.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale + mean).astype(np.float32)


def _rules(recipe):
    return NAMED[recipe].recipe.quantization


def test_merge_wants_records_of_these_needs():
    needs = request(["min"])
    record = collect(normal(1, 3, 4), needs).numpy()
    with pytest.raises(fk.ShapeError, match=rf"statistics: sums: got {record.size - 1} bytes, expected"):
        merge(needs, record, record[1:])
    with pytest.raises(fk.ShapeError, match="statistics: sums"):
        values(request(["min", "mxfp8_mse"]), record)


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stat", "said"),
    [
        ("mxpf8_mse", "did you mean mxfp8_mse"),
        ("crest_facto", "did you mean crest_factor"),
        ("std_columnwise", "'std_columnwise'"),
        ("mxfp8_std", "'mxfp8_std'"),
        ("max_blockwise_dynamic_range_block_size_0_dims_1", "_block_size_0_dims_1'"),
        ("crest_factor_block_size_x", "_block_size_x'"),
        ("mse", "'mse', expected a recipe's name in front of it: the activation is in high precision"),
        (3, "got 3, expected one of min, max"),
        ({"crest_factor": {"blocksize": 3}}, "did you mean block_size"),
        ({"crest_factor": {"block_size": 0}}, "block_size: got 0"),
        ({"max_blockwise_dynamic_range": {"dims": 3}}, "dims: got 3"),
        ({"mean": {}}, "options, by name, of crest_factor"),
    ],
    ids=str,
)
def test_refusals_name_the_statistic(stat, said):
    with pytest.raises(fk.ArgumentError) as refused:
        request([stat])
    assert str(refused.value).startswith("statistics: stats")
    assert said in str(refused.value)


def test_other_refusals():
    x = normal(1, 4, 8)
    with pytest.raises(fk.ArgumentError, match="statistics: tensor: got 'activations'"):
        request(["min"], "activations")
    with pytest.raises(fk.ArgumentError, match=r"did you mean gradient\?"):
        request(["min"], "grad")
    with pytest.raises(fk.ArgumentError, match="a layer does not cast its output"):
        request(["underflows%"], Operand("output", _rules("current")))
    with pytest.raises(fk.ArgumentError, match=r"twin: missing, expected an array like x, for cosine"):
        tensor_statistics(x, ["cosine", "min"])
    with pytest.raises(fk.ArgumentError, match=r"twin: got .* expected None: nothing needs it"):
        tensor_statistics(x, ["min"], twin=x)
    with pytest.raises(fk.ShapeError, match="statistics: twin"):
        tensor_statistics(x, ["cosine"], twin=x[1:])
    with pytest.raises(fk.FormatError, match="statistics: x: got int32"):
        tensor_statistics(x.astype(np.int32), ["min"])
    with pytest.raises(fk.ArgumentError, match="quantized: got 'both'"):
        inputs(request(["min"]), x, {"both": Codes()})
    needs = request(["mse"], Operand("activation", _rules("current")))
    with pytest.raises(fk.ShapeError, match=r"statistics: q_rowwise: got shape \(3, 8\)"):
        collect(x, needs, Codes(np.zeros((3, 8), np.uint8), np.ones(1, np.float32)))


def test_requests_are_made_once():
    """A plan is found by the identity of its spec."""
    assert request(["min", "mxfp8_mse"]).spec is request(("min", "mxfp8_mse")).spec
    spec = request([f"mxfp8_{stat}" for stat in OF_CAST]).spec
    assert len(spec.casts) == 1
    assert not spec.tensor
    assert len(set(numerics.STATS)) == len(numerics.STATS)
