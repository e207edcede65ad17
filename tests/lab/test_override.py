"""``fk.override`` with Python functions: where it holds, what it gets, and what it refuses."""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import arrays
from fp8kit.arrays import ArrayView
from fp8kit.backends import dispatch, policy
from fp8kit.lab import native
from fp8kit.testing.compare import assert_close

X = np.array([[1.0, -2.0], [3.0, 0.5]], np.float32)


def doubled(a: ArrayView, b: ArrayView, out: ArrayView, stream: int) -> None:
    native(out)[...] = 2 * (native(a) + native(b))


def negated(original: Any, *args: Any) -> None:
    original(*args)
    native(args[2])[...] *= -1


def added() -> np.ndarray[Any, Any]:
    return (fk.tensor(X, device="cpu") + fk.tensor(X, device="cpu")).numpy()


def test_it_holds_within_the_block_and_nowhere_else() -> None:
    before = policy.get_policy(), dispatch.kernels(arrays.CPU)
    with fk.override("add", doubled) as used:
        np.testing.assert_array_equal(added(), 4 * X)
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(added()))
        thread.start()
        thread.join()
        np.testing.assert_array_equal(found[0], 2 * X)  # another thread's policy is its own
    np.testing.assert_array_equal(added(), 2 * X)
    assert used.calls == 1
    assert (policy.get_policy(), dispatch.kernels(arrays.CPU)) == before
    with pytest.raises(ZeroDivisionError), fk.override("add", doubled):
        _ = 1 / 0
    assert policy.get_policy() is before[0]


def test_blocks_nest_and_the_original_is_what_the_outer_block_chose() -> None:
    with fk.override("add", doubled):
        with fk.override("add", negated):
            np.testing.assert_array_equal(added(), -4 * X)
        np.testing.assert_array_equal(added(), 4 * X)
    with fk.override("add", negated), fk.override("add", negated):
        np.testing.assert_array_equal(added(), 2 * X)
    with fk.override("add", negated), fk.use_backend("reference"):
        np.testing.assert_array_equal(added(), -2 * X)


def test_it_decorates_and_is_entered_again() -> None:
    change = fk.override("add", doubled)

    @change
    def twice() -> np.ndarray[Any, Any]:
        with change:
            return added()

    for _ in range(2):
        np.testing.assert_array_equal(twice(), 4 * X)
    assert change.calls == 2
    with change:
        first = dispatch.kernels(arrays.CPU)
    with change:
        assert dispatch.kernels(arrays.CPU) is first  # plans are kept: nothing is made anew
        added()


def test_it_travels_from_forward_to_backward_with_the_plan() -> None:
    """The backward of a layer whose forward ran within the block calls it, also on another thread and when
    the block has ended."""
    fk.manual_seed(0)
    layer = fk.nn.Linear(16, 16, bias=False, params_dtype="float32", device="cpu")
    x = fk.tensor(np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32), requires_grad=True)
    calls: list[str] = []

    def gemm(original: Any, a: Any, b: Any, out: Any, layout: str, *rest: Any) -> None:
        calls.append(layout)
        original(a, b, out, layout, *rest)

    with fk.override("gemm", gemm):
        y = layer(x)
    thread = threading.Thread(target=lambda: y.backward(np.ones((16, 16), np.float32)))
    thread.start()
    thread.join()
    assert sorted(calls) == ["nn", "nt", "tn"]
    want = np.ones((16, 16)) @ layer.weight.numpy()
    assert_close("dx", x.grad.numpy(), want, "float64", 2.0**-18 * (1 + np.abs(want)))


def test_the_torch_frontends_plans_keep_it_too() -> None:
    import fp8kit_torch as te
    import torch

    layer = te.Linear(32, 48, params_dtype=torch.float32, device="cpu")
    x = torch.randn(16, 32, requires_grad=True)

    def cast(original: Any, *args: Any) -> None:
        original(*args)

    with (
        fk.override("quantize_transpose", cast, verify=True) as used,
        te.autocast(enabled=True, recipe=fk.recipe.DelayedScaling()),
    ):
        y = layer(x)
    assert used.calls == 2
    y.sum().backward()  # the block has ended
    assert used.calls == 3
    layer(x)
    assert used.calls == 3


def test_a_training_step_under_fp8_uses_it_forward_and_backward(caplog: pytest.LogCaptureFixture) -> None:
    fk.manual_seed(0)
    layer = fk.nn.Linear(32, 32, params_dtype="float32", device="cpu")
    x = fk.tensor(np.random.default_rng(0).standard_normal((32, 32)).astype(np.float32), requires_grad=True)
    formats: list[str] = []

    def cast(original: Any, x: Any, cast: Any, dbias: Any, workspace: Any, stream: int) -> None:
        formats.append(cast.format.name)
        original(x, cast, dbias, workspace, stream)

    with (
        fk.override("quantize_transpose", cast, verify=True) as used,
        fk.autocast(recipe=fk.recipe.DelayedScaling()),
    ):
        y = layer(x)
        y.backward(y.detach())
    assert formats == ["E4M3", "E4M3", "E5M2"]
    assert used.calls == 3
    assert not caplog.records


def test_a_wrong_result_is_an_error_with_its_place() -> None:
    def wrong(original: Any, *args: Any) -> None:
        original(*args)
        native(args[1].q)[1, 3] ^= 1

    layer = fk.nn.Linear(16, 16, params_dtype="float32", device="cpu")
    x = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)
    said = (
        r"^override: quantize_transpose: output cast\.q: 1 of 256 differ, first at \(1, 3\): "
        r"got .*0x[0-9a-f]+.*, expected .*0x[0-9a-f]+"
    )
    recipe = fk.recipe.DelayedScaling()
    with (
        fk.override("quantize_transpose", wrong, verify=True),
        fk.autocast(recipe=recipe),
        pytest.raises(fk.BackendError, match=said),
    ):
        layer(fk.tensor(x))
    with fk.override("quantize_transpose", wrong), fk.autocast(recipe=fk.recipe.DelayedScaling()):
        layer(fk.tensor(x))  # unless asked, nobody looks


def test_what_is_returned_and_not_written_is_an_error() -> None:
    """The arrays that were to be written hold whatever was there."""
    with (
        fk.override("add", lambda a, b, out, stream: native(a) + native(b)),
        pytest.raises(
            fk.BackendError,
            match=(
                r"^override: implementation: got <lambda>, which returns ndarray, expected results written "
                r"into the arrays that add is given"
            ),
        ),
    ):
        added()


def test_verify_finds_an_input_that_was_changed() -> None:
    def careless(original: Any, a: Any, b: Any, out: Any, stream: int) -> None:
        original(a, b, out, stream)
        native(b)[1, 2] = 9

    ones, x = (fk.tensor(np.ones((2, 3), np.float32), device="cpu") for _ in range(2))
    said = r"^override: add: input, which it must not change: b: 1 of 6 differ, first at \(1, 2\): got .*9"
    with fk.override("add", careless, verify=True), pytest.raises(fk.BackendError, match=said):
        _ = ones + x


def test_a_block_that_nothing_called_it_in_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, "fp8kit"),
        fk.override("clip_", lambda xs, norm, max_norm, stream: None),
    ):
        added()
    assert [r.getMessage() for r in caplog.records] == [
        "override of clip_: nothing within the block called it (it serves cpu and cuda arrays)"
    ]


def test_an_operation_that_answers_with_a_number() -> None:
    with fk.override("gemm_workspace", lambda: 64):
        assert dispatch.kernels(arrays.CPU).gemm_workspace() == 64
    with fk.override("norm_bwd_workspace", lambda *sizes: sum(sizes)):
        assert dispatch.kernels(arrays.CPU).norm_bwd_workspace(rows=3, columns=4) == 7


REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "operation: got 'quantise', expected a kernel of": (("quantise", doubled), {}),
    "implementation: got int, expected a CUDA source": (("add", 3), {}),
    (
        r"got doubled\(a, b, out, stream\), expected the contract's parameters of amax, "
        r"\(x, amax, tile, stream\)"
    ): (("amax", doubled), {}),
    "verify: got 1, expected True or False": (("add", doubled), {"verify": 1}),
    "function: got 'add', expected None, but for": (("add", doubled), {"function": "add"}),
    r"gemm_workspace takes no arrays": (("gemm_workspace", lambda original: 0), {}),
    "whose parameters are unknown": (("add", dict), {}),
    r"'mine\.cu' is a file's name, expected its text, or a Path": (("add", "mine.cu"), {}),
}


@pytest.mark.parametrize("said", REFUSED)
def test_refusals(said: str) -> None:
    args, named = REFUSED[said]
    with pytest.raises(fk.BackendError, match=f"^override: .*{said}"):
        fk.override(*args, **named)
