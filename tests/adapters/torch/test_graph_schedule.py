"""The order in which a pipeline's passes are captured (``make_graphed_callables(_order=...)``)."""

from __future__ import annotations

import pytest
from fp8kit_torch.graph_schedule import Pass, in_turn, interleaved, shared_inputs

from fp8kit.errors import ArgumentError


def test_without_an_order_all_run_forward_then_all_backward():
    owners, passes = in_turn(2)
    assert owners == (0, 1)
    assert passes == (Pass(0, True), Pass(1, True), Pass(1, False), Pass(0, False))


def test_samples_stand_by_chunk_then_micro_batch_then_layer():
    """Two chunks, of two layers and of one; two micro-batches."""
    owners, passes = interleaved([1, 2, 1, 2, -2, -1, -2, -1], [2, 1], 3, 6)
    assert owners == (0, 1, 0, 1, 2, 2)
    assert [call if forward else -call - 1 for call, forward in passes] == [
        *(0, 1), 4, *(2, 3), 5,
        -5, *(-2, -1), -6, *(-4, -3),
    ]  # fmt: skip


@pytest.mark.parametrize("layers", [None, 2, [2, 2], (2, 2)])
def test_chunks_of_one_size_may_be_told_in_short(layers):
    assert interleaved([1, 2, -2, -1], layers, 4, 4) == interleaved([1, 2, -2, -1], [2, 2], 4, 4)


@pytest.mark.parametrize(
    ("order", "layers", "callables", "samples", "argument"),
    [
        ([], None, 1, 1, "_order"),
        ("1", None, 1, 1, "_order"),
        ([1, 0, -1], None, 1, 1, "_order"),
        ([True, -1], None, 1, 1, None),  # an int to Python
        ([1.0, -1], None, 1, 1, "_order"),
        ([1, -1.5], None, 1, 1, "_order"),
        ([-1, 1], None, 1, 1, "_order"),
        ([1, 1, -1], None, 1, 2, "_order"),
        ([2, -2], None, 1, 1, "_order"),
        ([1, -3], None, 1, 1, "_order"),
        ([1, -1], [1, 1], 2, 2, "_num_layers_per_chunk"),
        ([1, -1], 0, 1, 1, "_num_layers_per_chunk"),
        ([1, -1], "2", 1, 1, "_num_layers_per_chunk"),
        ([1, -1], 2, 1, 2, "modules"),
        ([1, 1, -1, -1], 1, 1, 1, "sample_args"),
        ([1, 2, -2, -1], None, 2, 3, "sample_args"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(order, layers, callables, samples, argument):
    if argument is None:
        assert interleaved([*map(int, order)], layers, callables, samples).passes
        return
    with pytest.raises(ArgumentError) as caught:
        interleaved(order, layers, callables, samples)
    assert caught.value.argument == argument


def test_calls_that_are_never_open_together_share_their_inputs():
    """Micro-batch 2 begins when micro-batch 0 has ended: it takes its place. Another kind does not."""
    schedule = interleaved([1, 1, -1, 1, -1, -1], None, 1, 3)
    assert shared_inputs(schedule, ["a", "a", "a"]) == [0, 1, 0]
    assert shared_inputs(schedule, ["a", "a", "b"]) == [0, 1, 2]
