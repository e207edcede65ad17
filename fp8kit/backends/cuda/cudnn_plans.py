"""Graphs of nvidia-cudnn-frontend: built once, kept by device, launched or recorded.

A graph is built once for each ``Key``, which holds all that the graph depends on. A call passes device
addresses by uid. ``cudnn_sdpa`` and ``cudnn_fp8`` describe their graphs in ``DESCRIBE``.
"""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fp8kit import slowness
from fp8kit.backends.cuda import launch, recorded
from fp8kit.backends.cuda.attention_problem import Problem, Strides
from fp8kit.errors import BackendError, Fp8kitError, install
from fp8kit.lru import LRU

_OLDEST = 90600
_FAULTY = (91000, 91001, 91400)  # releases with known faults in 16-bit attention
_NEWER = "install 9.19 or later: pip install --upgrade nvidia-cudnn-cu13"
AGAIN = "graphs are built again when a shape returns, about 0.1 s each"
FEWER = "pad sequences to fewer lengths, or leave fk.deterministic, which gives every length a graph"
VECTOR = 16  # bytes
ITEM = 2  # bytes of an element: bfloat16 and float16 only
# plans of a device, and such as are held for graphs; a training run with lengths of its own in every batch
# meets ever new ones
KEPT = 256
# stream handles from here on: 0 and 1 are the legacy default stream, which cannot be captured
_CAPTURABLE = 2


class Key(NamedTuple):
    """What a graph depends on. ``strides``: of the forward's or the backward's arrays, order b, h, s, d.
    ``formats``: of an attention in FP8 (``cudnn_fp8``) the names of the forward's and the backward's
    format."""

    problem: Problem
    device: int
    backward: bool
    deterministic: bool
    strides: tuple[Strides, ...]
    formats: tuple[str, ...] = ()


About = tuple[tuple[int, ...], tuple[int, ...], Any]  # an array's sizes, strides and type


class Described(NamedTuple):
    """A ``graph`` that is being described: what is known ``about`` its arrays by name, and their ``uids``."""

    graph: Any
    about: Mapping[str, About]
    uids: Mapping[str, int]

    def tensor(self, name: str) -> Any:
        """Returns an input."""
        dim, stride, kind = self.about[name]
        uid = self.uids[name]
        return self.graph.tensor(name=name, dim=list(dim), stride=list(stride), data_type=kind, uid=uid)

    def outputs(self, made: Iterable[Any], names: Iterable[str]) -> None:
        """What the graph has made is its outputs of these names."""
        for each, name in zip(made, names, strict=True):
            dim, stride, kind = self.about[name]
            each.set_output(True).set_dim(list(dim)).set_stride(list(stride))
            each.set_data_type(kind).set_uid(self.uids[name])


@dataclass(slots=True, eq=False)
class GraphPlan:
    """A built graph and the bytes of ``workspace`` that it needs.

    ``lock`` is held while the graph is launched. ``retired``: no longer to be launched, another one is made.
    ``captured``: a CUDA graph, the user's or one of ``recorded``, may hold its kernels.
    """

    graph: Any
    workspace: int
    lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    retired: bool = field(default=False, init=False)
    captured: bool = field(default=False, init=False)


# whether an attention is in FP8 -> the function that describes its graph, not yet validated; ``cudnn_sdpa``
# and ``cudnn_fp8`` add theirs
DESCRIBE: dict[bool, Callable[[Key, Any], Any]] = {}
launches: defaultdict[int, int] = defaultdict(int)  # of graphs of a device, in this process
_FREE: defaultdict[int, list[Any]] = defaultdict(list)  # cuDNN's handles that no thread uses now, by device
_HELD: list[GraphPlan] = []  # retired plans that must not be destroyed


@functools.cache
def missing() -> str | None:
    """Why cuDNN cannot be used at all in this process, None where it can."""
    try:
        import cudnn
    except ImportError as error:
        return f"nvidia-cudnn-frontend cannot be imported ({error}); {install('cuda13')}"
    try:
        version = cudnn.backend_version()
    except RuntimeError as error:
        return f"libcudnn.so.9 cannot be found ({error}); install it with: pip install nvidia-cudnn-cu13"
    if version < _OLDEST or version in _FAULTY:
        name = f"cuDNN {version // 10000}.{version // 100 % 100}.{version % 100}"
        why = "is too old" if version < _OLDEST else "is known to be faulty in 16-bit attention"
        return f"{name} {why}; {_NEWER}"
    return None


def available() -> bool:
    """Whether the frontend and a usable libcudnn are there."""
    return missing() is None


def _execute(key: Key, pointers: dict[int, int], workspace: int, nbytes: int, stream: int) -> None:
    """Launch the graph of a key, which is made anew where it was retired. BackendError where it needs more
    than ``nbytes``."""
    with launch.current_device(key.device), _handle(key.device) as handle:
        if handle.stream != stream:
            library().set_stream(handle, stream)
        launched = False
        while not launched:
            plan = plan_of(key)
            check_workspace(nbytes, plan)
            launched = _launched(plan, pointers, workspace, handle, stream)
    launches[key.device] += 1


def _captured(key: Key, pointers: dict[int, int], workspace: int, nbytes: int, stream: int) -> None:
    """``_execute`` into a graph of our own, whose plan is then held for good. BackendError where so many are
    held already: they are not a user's, who could not do without."""
    if len(_HELD) >= KEPT:
        raise BackendError(f"attention: {len(_HELD)} plans are held for CUDA graphs already")
    _execute(key, pointers, workspace, nbytes, stream)


def check_workspace(nbytes: int, plan: GraphPlan) -> None:
    """BackendError where a plan's workspace, behind what stands before it, is smaller than cuDNN wants."""
    if nbytes < plan.workspace:
        raise BackendError(
            f"attention: workspace: got {max(nbytes, 0)} bytes, cuDNN needs {plan.workspace} for these "
            "strides"
        )


def _launched(plan: GraphPlan, pointers: dict[int, int], workspace: int, handle: Any, stream: int) -> bool:
    """Launch a plan's graph; False where it was retired meanwhile."""
    with plan.lock:
        if plan.retired:
            return False
        if stream >= _CAPTURABLE and not plan.captured:
            plan.captured = launch.runtime().streamIsCapturing(stream)
        plan.graph.execute(pointers, workspace, handle)
        return True


def check_aligned(places: int) -> None:
    """Refuse addresses or byte strides, or-ed together, that cuDNN's vector accesses would fault on."""
    if places % VECTOR:
        raise BackendError(
            "attention", "arrays", "misaligned addresses or strides", f"multiples of {VECTOR} bytes for cuDNN"
        )


class Declined(Fp8kitError):
    """cuDNN has no kernel for a graph."""


def library() -> Any:
    """Returns the module ``cudnn`` of nvidia-cudnn-frontend, imported at the first call."""
    import cudnn

    return cudnn


@contextmanager
def _handle(device: int) -> Iterator[Any]:
    """A handle of a device, which is current. It carries a stream, so no two threads use one at once; but
    when a call is over, the next one takes its handle, on whatever thread: making one waits for all that the
    device has to do."""
    free = _FREE[device]
    try:
        handle = free.pop()
    except IndexError:
        handle = library().create_handle()
    try:
        yield handle
    finally:
        free.append(handle)


def _build(key: Key) -> GraphPlan:
    """Returns the plan for ``key``. Declined where cuDNN has no kernel; BackendError when building fails
    otherwise."""
    for stride in key.strides:
        check_aligned((1 if key.formats else ITEM) * (stride[0] | stride[1] | stride[2]))
    cudnn = library()
    try:
        with launch.current_device(key.device), _handle(key.device) as handle:
            graph = DESCRIBE[bool(key.formats)](key, handle)
            graph.validate()
            graph.build_operation_graph()
            # the frontend's own Python kernels would need CUTLASS at run time: cuDNN's engines only
            graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
            graph.deselect_engines(["sdpa_"])
            graph.check_support()
            graph.build_plans()
    except (cudnn.cudnnGraphNotSupportedError, NotImplementedError) as error:
        raise Declined(str(error).strip()) from error
    except (RuntimeError, ValueError) as error:
        raise BackendError(f"attention: cuDNN cannot build a graph for {key}: {error}") from error
    return GraphPlan(graph, int(graph.get_workspace_size()))


def _retire(key: Key, plan: GraphPlan) -> None:
    """Let a plan go: destroyed with the last reference to it, when no kernel of its is running, or never
    where that cannot be known. Where it goes for another, its shape builds it again: that is said."""
    slowness.say(f"attention by cuDNN of more shapes than its {KEPT} graphs are for", AGAIN, FEWER)
    with plan.lock:
        plan.retired = True
        if not plan.captured:
            try:
                with launch.current_device(key.device):
                    launch.runtime().deviceSynchronize()
            except RuntimeError:  # not while another stream is being captured
                pass
            else:
                return
    _HELD.append(plan)


@functools.cache
def _plans(device: int) -> LRU[Key, GraphPlan]:
    """Returns the plans of a device, apart from others': to make or retire one waits for the device, which
    may be at a collective (``Locks``)."""
    return LRU(KEPT, _retire, f"cuDNN graphs, cuda:{device}")


def plan_of(key: Key) -> GraphPlan:
    """Returns the plan of a key, which is built the first time. Declined and BackendError as ``_build``."""
    return _plans(key.device).make(key, _build)


def put(key: Key, pointers: dict[int, int], workspace: int, nbytes: int, stream: int) -> None:
    """Launch the graph of a key, or record that: its arrays' addresses by uid, and ``nbytes`` of workspace at
    an address."""
    uids = tuple(pointers)

    def at(run: Callable[..., None], *given: int) -> None:
        *addresses, start, on = given
        run(key, dict(zip(uids, addresses, strict=True)), start, nbytes, on)

    recorded.put(
        key.device,
        stream,
        "attention",
        functools.partial(at, _execute),
        (*pointers.values(), workspace),
        functools.partial(at, _captured),
        slow=True,
    )
