"""The contract's attention kernels: cuDNN where it takes the call, else the unfused path.

The choice is a function of the problem, with its strides, and of the device alone, made once and kept, so
that forward and backward agree without telling each other. Both paths save the same log-sum-exp, so one
call's two directions may differ in path; not with dropout, where each path has its own random stream: there
cuDNN must take both directions. A part of a larger attention with dropout is never cuDNN's: its two
directions may be parts of other sizes, and only numbers that belong to an element are then the same.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from fp8kit import slowness
from fp8kit.arrays import ArrayView, Shape
from fp8kit.backends.cuda import cudnn_sdpa, launch, unfused
from fp8kit.backends.cuda.attention_problem import Problem, problem
from fp8kit.backends.cuda.device import provider
from fp8kit.backends.protocol import AttentionExtras, AttentionSpec
from fp8kit.formats import DType

FIRST, LAST = cudnn_sdpa.NAME, unfused.NAME  # the paths in order of preference
DIRECTIONS = ("forward", "backward", "deterministic backward")
_MODES = ((False, False), (True, False), (True, True))  # (backward, deterministic), of each
_NO_DEVICE = "no usable CUDA device"


@functools.lru_cache(4096)
def _why_not_cudnn(about: Problem, backward: bool, deterministic: bool, device: int | None) -> str | None:
    """Why a direction does not run on cuDNN, None where it does. ``device``: see ``cudnn_sdpa.why_not``."""
    directions = _MODES if about.dropout else ((backward, deterministic and backward),)
    for direction in directions:
        reason = cudnn_sdpa.why_not(about, *direction, device)
        if reason is not None:
            other = (
                ""
                if direction[0] == backward
                else f", and with dropout {'backward' if direction[0] else 'forward'} must run there too"
            )
            return reason + other
    return None


def attention_fwd(
    q: ArrayView,
    k: ArrayView,
    v: ArrayView,
    o: ArrayView,
    lse: ArrayView,
    extras: AttentionExtras,
    spec: AttentionSpec,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """See ``backends.protocol``. BackendError when a library that the chosen path needs fails."""
    about = problem(q.shape, k.shape, v.shape, q.dtype, spec, (q.strides, k.strides, v.strides))
    path = unfused if _why_not_cudnn(about, False, False, q.device.index) else cudnn_sdpa
    path.forward(about, q, k, v, o, lse, extras, workspace, stream)


def attention_bwd(
    do: ArrayView,
    q: ArrayView,
    k: ArrayView,
    v: ArrayView,
    o: ArrayView,
    lse: ArrayView,
    dq: ArrayView,
    dk: ArrayView,
    dv: ArrayView,
    dbias: ArrayView | None,
    doffset: ArrayView | None,
    extras: AttentionExtras,
    spec: AttentionSpec,
    deterministic: bool,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """See ``backends.protocol``. The unfused path is always deterministic. BackendError as in
    ``attention_fwd``."""
    about = problem(q.shape, k.shape, v.shape, q.dtype, spec, (q.strides, k.strides, v.strides))
    if _why_not_cudnn(about, True, deterministic, q.device.index) is None:  # it takes no bias and no offset
        cudnn_sdpa.backward(about, do, q, k, v, o, lse, dq, dk, dv, extras, deterministic, workspace, stream)
    else:
        unfused.backward(about, do, q, k, v, o, lse, dq, dk, dv, dbias, doffset, extras, workspace, stream)


def attention_workspace(
    q: Shape,
    k: Shape,
    v: Shape,
    dbias: Shape | None,
    dtype: DType,
    spec: AttentionSpec,
    backward: bool,
    deterministic: bool,
    strides: Sequence[Shape],
) -> int:
    """See ``backends.protocol``. For the current device."""
    about, device = problem(q, k, v, dtype, spec, strides), launch.runtime().getDevice()
    if why := _why_not_cudnn(about, backward, deterministic, device):
        _say_unfused(why)
        return unfused.workspace(about, backward, dbias)
    return cudnn_sdpa.workspace(about, backward, deterministic, device)


UNFUSED = "attention is made of products and a softmax kernel, several times slower"


def _say_unfused(why: str) -> None:
    """Once for each reason; a plan asks for its workspace once."""
    absent = cudnn_sdpa.missing()
    if absent is None:
        slowness.say(
            f"cuDNN does not take an attention ({why})", UNFUSED, "`fp8kit info --attention` explains"
        )
    else:
        cause, _, cure = absent.rpartition("; ")
        slowness.say(cause, UNFUSED, cure)


def explain(
    q: Shape, kv: Shape, dtype: DType, spec: AttentionSpec, v: Shape | None = None
) -> list[tuple[str, str]]:
    """Paths in order of preference, each with "runs" or the reason why it does not, for the current device;
    the first that runs is taken. Where there is no device, none runs: cuDNN's reasons are then those that are
    known without one.

    ``q``, ``kv``: shapes of q and of k and v, 4-dimensional in ``spec.qkv_format`` ("bshd" for packed
    sequences, which are unpacked first); ``v``: of v, where it differs. BackendError where cuDNN fails to
    build what it does not decline.
    """
    about = problem(q, kv, kv if v is None else v, dtype, spec)
    device = launch.runtime().getDevice() if provider.count() else None
    runs = "runs" if device is not None else _NO_DEVICE
    rows = [
        (f"{FIRST} {name}", _why_not_cudnn(about, *mode, device) or runs)
        for name, mode in zip(DIRECTIONS, _MODES, strict=True)
    ]
    return [*rows, (LAST, runs)]
