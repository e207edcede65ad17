"""Whether two implementations agree: a result beside that of the reference for the same arguments."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8kit import codec
from fp8kit.backends.protocol import Output
from fp8kit.formats import FORMATS, uint8
from fp8kit.testing.compare import Array, assert_nowhere, epsilon, errors, same_values
from fp8kit.testing.contract.casts import each_scale


def errors_of(output: Output, got: Array, want: Array, slacks: dict[str, Any]) -> tuple[Array, Array]:
    """(error, the largest that is allowed) of every element of a result, beside the reference's: each may be
    so far from exact arithmetic as ``KernelTest.slacks`` says, and a code one step of its format further."""
    own = slacks.get(output.name if output.cast is None else output.argument)
    known = output.cast is None or output.cast.tile is None
    if own is None or (known and output.name.endswith(".scale_inv")):
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
    cast, fmt, transposed = output.cast, output.cast.format, output.name.endswith("_t")
    # a block's largest values may lie on both sides of a power of two, so that one scale is twice the other,
    # and the codes too
    if cast.tile is not None and "scale_inv" in output.name:
        return np.abs(got.astype(np.float64) - want), want + 2 * np.max(slack, initial=0) / fmt.max
    table, each = codec.table(FORMATS.get(fmt.name, fmt)), np.zeros(want.shape)
    slack = slack.T if transposed else slack
    each[tuple(map(slice, slack.shape))] = slack
    right = np.abs(np.nan_to_num(table[want], nan=0))
    if cast.tile is None:
        inverse = cast.by_tensor(output.name)
        factor = 1 / inverse.numpy() if cast.scale is None else cast.scale.numpy()
        limit = fmt.epsilon * right + fmt.smallest_subnormal + abs(factor[0]) * each
    else:
        scales = cast.scale_inv_t if transposed else cast.scale_inv
        assert scales is not None
        factor = 1 / each_scale(scales.numpy(), want.shape, cast.tile)
        limit = (1 + 2 * fmt.epsilon) * right + 2 * fmt.smallest_subnormal + factor * each
    with np.errstate(invalid="ignore"):
        error = np.nan_to_num(np.abs(table[got] - table[want]), nan=np.inf)
    return np.where(got == want, 0, error), limit


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
