"""``verify=True`` lets every right implementation through and stops every wrong one, for every operation and
output of the contract."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fp8kit import arrays
from fp8kit.arrays import CPU, ArrayView
from fp8kit.backends import dispatch
from fp8kit.backends.protocol import KERNELS, SPECS
from fp8kit.errors import BackendError
from fp8kit.lab.verify import reference, verified
from fp8kit.testing.contract import Case, SampleCall
from tests.support.contract import usual

WRITING = [kernel for kernel in KERNELS if SPECS[kernel].launches]


class _With:
    """The CPU engine with one operation of one's own."""

    def __init__(self, operation: str, function: Callable[..., Any]) -> None:
        self.__dict__[operation] = function

    def __getattr__(self, name: str) -> Any:
        return getattr(dispatch.kernels(CPU), name)


def _cases(operation: str) -> tuple[Case, ...]:
    """The operation's usual cases, thinned where there are many."""
    found = usual(operation)
    return found[:: max(1, len(found) // 12)]


@pytest.mark.parametrize("operation", WRITING)
def test_the_reference_is_right(operation: str) -> None:
    """Poisoned outputs, copies and bounds let the engine itself through, and the call still does what the
    contract's case wants."""
    kernels = _With(operation, verified(operation, reference(operation)))
    for case in _cases(operation)[::3]:
        case.run(kernels, CPU)  # type: ignore[arg-type]


def _ruin(view: ArrayView) -> bool:
    """Change one element, the last, by more than any rounding explains; False where there is none to change
    so."""
    if not view.size:
        return False
    values = arrays.contiguous(view).numpy().copy().reshape(-1)
    if view.dtype.floating:
        last, large = (
            float(values[-1]),
            float(np.abs(np.nan_to_num(values.astype(np.float64), posinf=0, neginf=0)).max()),
        )
        values[-1] = 0 if np.isnan(last) or large > 1e4 else 1 + 2 * large
    else:
        values[-1] ^= 0x20  # four binades of an FP8 code
    arrays.assign(view, arrays.as_view(values.reshape(view.shape)))
    return True


@pytest.mark.parametrize("operation", WRITING)
def test_one_wrong_element_is_found_in_every_output(operation: str) -> None:
    spec = SPECS[operation]
    ruined: set[str] = set()
    wanted: set[str] = set()

    def wrong(name: str, *args: Any, **named: Any) -> None:
        arguments = spec.bind(*args, **named)
        reference(operation)(**arguments)
        for output in spec.outputs(arguments):
            wanted.add(output.name.partition("[")[0])
            if output.name == name and _ruin(output.view):
                ruined.add(output.name.partition("[")[0])

    for case in _cases(operation):
        call = SampleCall(case, dispatch.kernels(CPU), CPU)
        for name in [output.name for output in spec.outputs(call.arguments) if output.view.size]:
            if name.partition("[")[0] in ruined:
                continue
            kernels = _With(operation, verified(operation, functools.partial(wrong, name)))
            with pytest.raises(BackendError, match=rf"^override: {operation}: output \S+: "):
                case.run(kernels, CPU)  # type: ignore[arg-type]
    assert ruined == wanted
    assert ruined


def test_what_is_left_out_shows() -> None:
    x, y = (arrays.as_view(np.ones((2, 3), np.float32)) for _ in range(2))
    with pytest.raises(BackendError, match=r"add: output out: .*6 of 6 differ, first at \(0, 0\)"):
        verified("add", lambda a, b, out, stream: None)(x, x, y, 0)


def test_in_place_and_accumulated_outputs_start_from_what_was_there() -> None:
    x = arrays.as_view(np.array([[1.0, -7.0]], np.float32))
    amax = arrays.as_view(np.array([3.0], np.float32))

    def forgets(x: ArrayView, amax: ArrayView, tile: tuple[int, int], stream: int) -> None:
        amax.numpy()[...] = 2.0

    with pytest.raises(
        BackendError,
        match=r"amax: output amax: 1 of 1 differ, first at \(0,\): got .*2\.0.*, expected .*7\.0",
    ):
        verified("amax", forgets)(x, amax, (1, 2), 0)
    amax.numpy()[...] = 9.0  # a running maximum above the tensor's own
    verified("amax", reference("amax"))(x, amax, (1, 2), 0)
    assert amax.numpy()[0] == 9

    count = arrays.as_view(np.array([4], np.int64))
    verified("count_", reference("count_"))(count, None, 0)
    assert count.numpy()[0] == 5
    with pytest.raises(
        BackendError, match=r"count_: output counter: 1 of 1 differ, first at \(0,\): got .*7.*, expected .*6"
    ):
        verified("count_", lambda counter, found_inf, stream: counter.numpy().__iadd__(2))(count, None, 0)


def test_an_output_that_is_an_input_is_not_poisoned() -> None:
    x = arrays.as_view(np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4))
    before = x.numpy().copy()
    verified("dropout_add", reference("dropout_add"))(x, None, None, x, 0.0, None, 0)
    np.testing.assert_array_equal(x.numpy(), before)
    whole = arrays.as_view(np.arange(12, dtype=np.float32).reshape(3, 4))
    # overlapping memory, no common element
    verified("copy", reference("copy"))(whole.slice(1, 0, 2), whole.slice(1, 2, 2), 0)
    np.testing.assert_array_equal(whole.numpy()[:, 2:], whole.numpy()[:, :2])
