"""The contract's attention kernels: cuDNN, kernels of our own ("flash"), or the unfused path.

The choice is a function of the problem, with its strides, and of the device, made once and kept. All paths
save the same log-sum-exp, so one call's two directions may differ in path. Flash and unfused draw the same
words for dropout; cuDNN has its own, so with dropout it must take both directions. A part of a larger
attention with dropout is never cuDNN's: its two directions may be parts of other sizes, and only numbers that
belong to an element are then the same.

cuDNN builds a graph for every problem, 75 to 185 ms a direction, and its call costs the host 50 us. So small
problems are never its, nor are those that our kernels for Hopper take as fast: of middle size, and some large
ones. Others are where they are among the first of a process; later ones only once the graphs before have run
often, and while there is space for theirs: no graph is ever built twice. Large ones, for which its kernels
are faster (twice as fast as those for any chip), may be more. So a length that was not seen before costs
nothing. That is ``timed``, as products have it; under ``fk.deterministic``, where what a process did before
must change nothing, all others are cuDNN's.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from fp8kit import slowness
from fp8kit.arrays import ArrayView, Shape
from fp8kit.backends.cuda import cudnn_plans, cudnn_sdpa, flash, launch, unfused
from fp8kit.backends.cuda.attention_problem import Problem, problem
from fp8kit.backends.cuda.device import provider
from fp8kit.backends.protocol import AttentionExtras, AttentionSpec
from fp8kit.formats import DType
from fp8kit.lru import LRU, memoized

PATHS = (cudnn_sdpa.NAME, flash.NAME, unfused.NAME)  # in order of preference
DIRECTIONS = ("forward", "backward", "deterministic backward")
_MODES = ((False, False), (True, False), (True, True))  # (backward, deterministic), of each
_NO_DEVICE = "no usable CUDA device"
_TOO_SMALL = "too small to be worth a graph"
_AS_FAST = "our kernels for Hopper take no longer, and need no graph"
_NO_GRAPH = "the graphs of other problems came first, and do not run often enough for one more"
# multiply-adds of a forward up to which our kernels take no longer than cuDNN's call; and from which on cuDNN
# gains 0.2 ms a call where it is faster, and a graph is paid back in 400 (benchmarks/NOTES.md)
_SMALL, _LARGE = 2e9, 6e10
# lengths of large causal problems between which our kernels for Hopper take no longer, in either direction
_LENGTHS = {64: (1536, 16384), 128: (1536, 2048)}  # by features of a head
# whether problems are large -> how many cuDNN builds graphs for at once, and in all: a training with one
# length, or few. Beyond the first, its graphs must have run _PROOF times since the last was built, which they
# have not where every batch has another length. All of them together are no more than are kept
_GRAPHS, _PROOF = {False: (2, 4), True: (16, cudnn_plans.KEPT // 2 - 8)}, 16
# whether a problem's graphs are worth to be built
_worth: LRU[tuple[Problem, int], bool] = LRU(65536, name="attention choices")
# by device and whether they are large: how many problems graphs were built for, and the launches of graphs
# before the last of them
_taken: dict[tuple[int, bool], tuple[int, int]] = {}
_LOCK = threading.Lock()


def _multiply_adds(about: Problem) -> float:
    """Returns the multiplications and additions of q k^T and P v."""
    seen = 0.5 if (about.left, about.right) == (-1, 0) else 1.0
    scores = float(about.batch * about.heads * about.rows * about.columns)
    return seen * scores * (about.dim + about.dim_v)


def _not_worth(about: Problem, device: int, timed: bool) -> str | None:
    """Why no graph is built for a problem that ``flash`` takes; None where one is."""
    size = _multiply_adds(about)
    if size < _SMALL:
        return _TOO_SMALL
    if _own_is_as_fast(about, device):
        return _AS_FAST
    if not timed:
        return None
    return None if _worth.make((about, device), _take) else _NO_GRAPH


def _own_is_as_fast(about: Problem, device: int) -> bool:
    """Whether our kernels for Hopper take it, and no longer than cuDNN: both directions together 0.91 to 1.07
    of its time (benchmarks/results/h100/hopper_flash.log)."""
    if not flash.on_hopper(about, device):
        return False
    if _multiply_adds(about) < _LARGE:
        return True
    least, most = _LENGTHS[about.dim]
    return least <= about.rows == about.columns <= most and (about.left, about.right) == (-1, 0)


def _gives(about: Problem, device: int) -> bool:
    """Whether the next problem as large as this gets one of the graphs that are left."""
    large = _multiply_adds(about) >= _LARGE
    (at_once, most), (taken, before) = _GRAPHS[large], _taken.get((device, large), (0, 0))
    return taken < at_once or (taken < most and cudnn_plans.launches[device] - before >= _PROOF)


def _take(key: tuple[Problem, int]) -> bool:
    """Whether a problem that is not small gets one of them."""
    about, device = key
    with _LOCK:
        given = _gives(about, device)
        if given:
            place = device, _multiply_adds(about) >= _LARGE
            _taken[place] = _taken.get(place, (0, 0))[0] + 1, cudnn_plans.launches[device]
    return given


def is_cudnns(about: Problem, device: int | None) -> bool:
    """Whether a problem is so large that cuDNN takes it, as far as is known without its graph. ``device``:
    where a ``timed`` call runs: whether it gets one of the graphs that are left there; the answer stays."""
    if _multiply_adds(about) < _LARGE or not cudnn_plans.available():
        return False
    if not all(cudnn_sdpa.why_not(about, backward, False, None) is None for backward in (False, True)):
        return False
    return device is None or _worth.make((about, device), _take)


def forget() -> None:
    """Make every choice anew, as a new process would."""
    with _LOCK:
        _taken.clear()
    _worth.clear()
    _why_not_cudnn.cache_clear()  # type: ignore[attr-defined]


@memoized("attention by cuDNN", 65536)
def _why_not_cudnn(
    about: Problem, backward: bool, deterministic: bool, device: int | None, timed: bool
) -> str | None:
    """Why a direction does not run on cuDNN, None where it does. ``device``: see ``cudnn_sdpa.why_not``."""
    directions = _MODES if about.dropout else ((backward, deterministic and backward),)
    for build in (False, True):  # what is known beforehand first
        if build and device is not None and flash.why_not(about) is None:
            reason = _not_worth(about, device, timed)
            if reason is not None:
                return reason
        for direction in directions:
            reason = cudnn_sdpa.why_not(about, *direction, device if build else None)
            if reason is not None:
                other = (
                    ""
                    if direction[0] == backward
                    else f", and with dropout {'backward' if direction[0] else 'forward'} must run there too"
                )
                return reason + other
    return None


def _foreseen(about: Problem, backward: bool, deterministic: bool, device: int | None) -> str | None:
    """Returns what ``_why_not_cudnn`` would say to the next call, which takes no graph here."""
    decided = device is not None and (_multiply_adds(about) < _SMALL or _own_is_as_fast(about, device))
    if device is None or decided or _worth.get((about, device)) is not None:
        return _why_not_cudnn(about, backward, deterministic, device, True)
    if _gives(about, device):
        return _why_not_cudnn(about, backward, deterministic, device, False)
    return _why_not_cudnn(about, backward, deterministic, None, False) or _NO_GRAPH


def _path(
    about: Problem,
    backward: bool,
    deterministic: bool,
    device: int,
    dbias: bool,
    timed: bool,
    library: bool = True,
) -> ModuleType:
    """Returns the module that takes a direction."""
    mode = backward, deterministic and backward
    if library and not dbias and _why_not_cudnn(about, *mode, device, timed) is None:
        return cudnn_sdpa
    return unfused if flash.why_not(about, dbias) else flash


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
    timed: bool = False,
    library: bool = True,
) -> None:
    """See ``backends.protocol``. BackendError when a library that the chosen path needs fails. Without
    ``library`` it is a path of our own, as where cuDNN is missing."""
    about = problem(q.shape, k.shape, v.shape, q.dtype, spec, (q.strides, k.strides, v.strides))
    path: Any = _path(about, False, False, q.device.index, False, timed, library)
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
    timed: bool = False,
    library: bool = True,
) -> None:
    """See ``backends.protocol``. Our own paths are always deterministic. BackendError as in
    ``attention_fwd``, which has ``library``, too."""
    about = problem(q.shape, k.shape, v.shape, q.dtype, spec, (q.strides, k.strides, v.strides))
    path = _path(about, True, deterministic, q.device.index, dbias is not None, timed, library)
    arrays = (do, q, k, v, o, lse, dq, dk, dv)
    if path is cudnn_sdpa:  # which takes no bias and no offset
        cudnn_sdpa.backward(about, *arrays, extras, deterministic, workspace, stream)
    elif path is flash:
        flash.backward(about, *arrays, doffset, extras, workspace, stream)
    else:
        unfused.backward(about, *arrays, dbias, doffset, extras, workspace, stream)


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
    timed: bool = False,
    library: bool = True,
) -> int:
    """See ``backends.protocol``. For the current device; ``library``: see ``attention_fwd``."""
    about, device = problem(q, k, v, dtype, spec, strides), launch.runtime().getDevice()
    path = _path(about, backward, deterministic, device, dbias is not None, timed, library)
    _say_slow(path, about, dbias is not None, device)
    if path is cudnn_sdpa:
        return cudnn_sdpa.workspace(about, backward, deterministic, device)
    return flash.workspace(about, backward) if path is flash else unfused.workspace(about, backward, dbias)


UNFUSED = "attention is made of products and a softmax kernel, several times slower"
CAPPED = "it runs by fp8kit's own kernels for any chip, which take several times as long as others without"
OWN = "large attention runs by fp8kit's own kernels, which take up to twice as long"


def _say_slow(path: ModuleType, about: Problem, dbias: bool, device: int) -> None:
    """Once for each reason; a plan asks for its workspace once."""
    if path is unfused:
        why = flash.why_not(about, dbias)
        slowness.say(f"attention with {why}", UNFUSED, "`fp8kit info --attention` explains")
    elif path is flash and _multiply_adds(about) >= _LARGE and about.softcap:
        slowness.say("attention with a softcap", CAPPED, "`fp8kit info --attention` explains")
    elif path is flash and _multiply_adds(about) >= _LARGE and not _own_is_as_fast(about, device):
        say_missing()


def say_missing() -> None:
    """Why cuDNN is not used in this process, where it is not."""
    if (absent := cudnn_plans.missing()) is not None:
        cause, _, cure = absent.rpartition("; ")
        slowness.say(cause, OWN, cure)


def explain(
    q: Shape, kv: Shape, dtype: DType, spec: AttentionSpec, v: Shape | None = None
) -> list[tuple[str, str]]:
    """Each path, in order of preference, and direction, with "runs" or the reason why it does not, for the
    current device; a direction is the first path's that runs. Where there is no device, none runs: cuDNN's
    reasons are then those that are known without one.

    ``q``, ``kv``: shapes of q and of k and v, 4-dimensional in ``spec.qkv_format`` ("bshd" for packed
    sequences, which are unpacked first); ``v``: of v, where it differs. BackendError where cuDNN fails to
    build what it does not decline.
    """
    about = problem(q, kv, kv if v is None else v, dtype, spec)
    device = launch.runtime().getDevice() if provider.count() else None
    runs = "runs" if device is not None else _NO_DEVICE
    rows = []
    for path in PATHS:
        for name, mode in zip(DIRECTIONS, _MODES, strict=True):
            why = None
            if path == cudnn_sdpa.NAME:
                why = _foreseen(about, *mode, device)
            elif path == flash.NAME:
                why = flash.why_not(about)
            rows.append((f"{path} {name}", why or runs))
    return rows


def own_kernels(q: Shape, kv: Shape, dtype: DType, spec: AttentionSpec, v: Shape | None = None) -> str:
    """Returns which of flash's kernels it runs by on the current device, and why not by others; arguments as
    ``explain`` takes them."""
    about = problem(q, kv, kv if v is None else v, dtype, spec)
    return flash.kernels(about, launch.runtime().getDevice())
