"""The cost model behind docs/scale.md: its table is the page's, its bytes those that a layer moves."""

from __future__ import annotations

import importlib.util
import sys

import fp8kit_torch as te
import pytest
import torch

from fp8kit import recipe
from fp8kit.collectives import FakeCollectives
from tests.support.source import ROOT

S, B, H, RANKS = 32, 2, 64, 2


@pytest.fixture(scope="module")
def costs():
    spec = importlib.util.spec_from_file_location("scale_table", ROOT / "docs/scale_table.py")
    made = importlib.util.module_from_spec(spec)
    sys.modules["scale_table"] = made  # where dataclasses look for it
    spec.loader.exec_module(made)
    yield made
    del sys.modules["scale_table"]


def test_the_table_is_what_the_model_says(costs):
    text = costs.PAGE.read_text()
    assert text == costs.page(text), "PYTHONPATH=. python docs/scale_table.py writes it"


@pytest.mark.parametrize("how", ["fp8", "bfloat16"])
def test_bytes_of_tensor_parallelism_are_those_that_a_layer_moves(costs, how):
    def rank(ranks):
        moved = {"forward": 0, "backward": 0}
        where = "forward"

        def counted(name, larger):
            known = getattr(ranks, name)

            def call(source, target, stream):
                whole = (source, target)[larger]
                moved[where] += whole.nbytes * (RANKS - 1) / RANKS
                known(source, target, stream)

            setattr(ranks, name, call)

        counted("_all_gather", 1)
        counted("_reduce_scatter", 0)
        layer = te.TransformerLayer(
            H, 4 * H, 4, hidden_dropout=0, attention_dropout=0, device="cpu", params_dtype=torch.bfloat16,
            tp_group=ranks, set_parallel_mode=True, sequence_parallel=True,
        )  # fmt: skip
        x = torch.ones(S // RANKS, B, H, dtype=torch.bfloat16, requires_grad=True)
        with te.autocast(
            enabled=how == "fp8", recipe=recipe.Float8CurrentScaling(), amax_reduction_group=ranks
        ):
            y = layer(x)
        where = "backward"
        y.sum().backward()
        return moved["forward"], moved["backward"]

    elements = S * B * H * (RANKS - 1) / RANKS
    wanted = tuple(each * elements for each in costs.TENSOR_BYTES[how])
    assert FakeCollectives(RANKS).run(rank) == [wanted] * RANKS


def test_layouts_keep_to_the_arithmetic(costs):
    """No layout where nothing divides; sharding never needs more memory; more ranks that share weights move
    more; all of what is recommended fits."""
    model = costs.MODELS[1]
    assert costs.layout(model, 64, 8, 3, False) is None
    assert costs.layout(model, 64, 8, 2, True) is None  # FSDP has no stages here
    one, sharded = (costs.layout(model, 512, 4, 1, how) for how in (False, True))
    assert sharded.memory < one.memory
    assert costs.layout(model, 512, 8, 1, False).moved > one.moved
    for each in costs.MODELS:
        for gpus in costs.GPUS:
            found = costs.best(each, gpus)
            assert found is None or (
                found.memory <= costs.MEMORY and found.tensor * found.stages * found.data == gpus
            )
