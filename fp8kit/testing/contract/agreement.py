"""Whether two implementations agree: a result beside that of the reference for the same arguments."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8kit import codec
from fp8kit.backends.protocol import Output
from fp8kit.formats import FORMATS, uint8
from fp8kit.testing.compare import Array, assert_nowhere, epsilon, errors, same_values


def errors_of(output: Output, got: Array, want: Array, slacks: dict[str, Any]) -> tuple[Array, Array]:
    """(error, the largest that is allowed) of every element of a result, beside the reference's: each may be
    so far from exact arithmetic as ``KernelTest.slacks`` says, and a code one step of its format further."""
    own = slacks.get(output.name if output.cast is None else output.argument)
    if own is None or output.name.endswith(".scale_inv"):
        return np.where(same_values(got, want), 0.0, np.inf), np.zeros(())
    most = np.finfo(np.float64).max / 4
    slack = 2 * np.nan_to_num(np.asarray(own, np.float64), nan=0.0, posinf=most, neginf=-np.inf)
    if output.argument == "amax" or output.name.endswith(".amax"):
        slack = np.asarray(np.max(slack, initial=0))
    if output.cast is None or output.name.endswith(".amax"):
        right = want.astype(np.float64)
        step = epsilon(output.view.dtype) if output.view.dtype.floating else 0.0
        twice = step * np.abs(np.nan_to_num(right, nan=0, posinf=0, neginf=0))
        return errors(got, right, output.view.dtype, slack + twice)
    fmt, scale = output.cast.format, output.cast.scale
    table = codec.table(FORMATS.get(fmt.name, fmt))
    values, right, each = table[got], table[want], np.zeros(want.shape)
    slack = slack.T if output.name.endswith(".q_t") else slack
    each[tuple(map(slice, slack.shape))] = slack
    factor = 1 / output.cast.scale_inv.numpy() if scale is None else scale.numpy()
    limit = fmt.epsilon * np.nan_to_num(np.abs(right), nan=0) + fmt.smallest_subnormal + abs(factor[0]) * each
    with np.errstate(invalid="ignore"):
        return np.where(got == want, 0, np.nan_to_num(np.abs(values - right), nan=np.inf)), limit


def assert_agree(output: Output, got: Array, want: Array, slacks: dict[str, Any]) -> None:
    """AssertionError with the first coordinate where a result is further from the reference's than two right
    ones may be from each other."""
    error, limit = errors_of(output, got, want, slacks)

    def said(at: tuple[int, ...]) -> str:
        allowed = float(np.broadcast_to(limit, want.shape)[at])
        right = _shown(output, want[at]) + (f" +- {allowed:.3g}" if allowed else "")
        return f"got {_shown(output, got[at])}, expected {right}"

    assert_nowhere(output.name, np.broadcast_to(error > limit, want.shape), said)


def _shown(output: Output, value: Any) -> str:
    """An element, a code with what it stands for."""
    if output.cast is None or output.view.dtype is not uint8:
        return repr(value)
    return f"{value:#x} ({codec.decode(value, output.cast.format):g})"
