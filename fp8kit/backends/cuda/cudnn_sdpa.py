"""Attention by cuDNN's fused kernels, through the graphs of nvidia-cudnn-frontend.

A graph is built once for what it depends on (``Key``) and kept; a call hands it device addresses by uid.
cuDNN's softmax statistics are the rows' natural log-sum-exp, as the contract wants them. With padding small
kernels stand round the graph (``attention_padding``): true lengths from cu_seqlens; zeros and -Inf where the
contract wants them, whatever cuDNN leaves there; and, before backward, statistics that give weight 0 to rows
that see nothing, where -Inf would give NaN. cuDNN's documentation does not say that it never multiplies
padding, so where padding may hold anything, cuDNN is given copies of what it would multiply there, with 0 in
padding.
"""

from __future__ import annotations

import functools
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import launch, recorded
from fp8kit.backends.cuda.attention_padding import Padding
from fp8kit.backends.cuda.attention_problem import Problem, Strides, arranged, bhsd, contiguous_bhsd
from fp8kit.backends.protocol import AttentionExtras
from fp8kit.errors import BackendError, Fp8kitError, install
from fp8kit.lru import LRU

NAME = "cuDNN"
_OLDEST = 90600
_FAULTY = (91000, 91001, 91400)  # releases with known faults in 16-bit attention
_NEWER = "install 9.19 or later: pip install --upgrade nvidia-cudnn-cu13"
_VECTOR = 16  # bytes
_ITEM = 2  # bytes of an element: bfloat16 and float16 only
_NEVER = 1e30  # a log-sum-exp that makes exp(score - lse) 0
# plans of a device, and such as are held for graphs; a training run with lengths of its own in every batch
# meets ever new ones
_KEPT = 256
_ANSWERS = 4096  # of why_not, which are short texts
# stream handles from here on: 0 and 1 are the legacy default stream, which cannot be captured
_CAPTURABLE = 2

_UIDS = {
    name: uid
    for uid, name in enumerate(
        ("q", "k", "v", "o", "stats", "d_o", "dq", "dk", "dv", "lengths_q", "lengths_kv", "seed", "offset"), 1
    )
}
_FORWARD = ("q", "k", "v", "o")
_BACKWARD = ("q", "k", "v", "o", "d_o", "dq", "dk", "dv")
# What is multiplied by the weights of padding; a row of q's padding reaches nothing but its own row of o in
# forward.
_CLEANED = {False: ("k", "v"), True: ("q", "k", "v", "d_o")}


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


@dataclass(slots=True, eq=False)
class Plan:
    """A built graph and the bytes of ``workspace`` that it needs.

    ``lock`` is held while the graph is launched. ``retired``: no longer to be launched, another one is made.
    ``captured``: a CUDA graph, the user's or one of ``recorded``, may hold its kernels.
    """

    graph: Any
    workspace: int
    lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    retired: bool = field(default=False, init=False)
    captured: bool = field(default=False, init=False)


launches: defaultdict[int, int] = defaultdict(int)  # of graphs of a device, in this process
_FREE: defaultdict[int, list[Any]] = defaultdict(list)  # cuDNN's handles that no thread uses now, by device
_HELD: list[Plan] = []  # retired plans that must not be destroyed


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


@functools.lru_cache(_ANSWERS)
def why_not(problem: Problem, backward: bool, deterministic: bool, device: int | None) -> str | None:
    """Why cuDNN does not take this problem on that device, None where it does: asked by building its graph
    for the problem's strides. Without a device, None means that nothing known beforehand speaks against it.
    """
    reason = _refused(problem, backward)
    if reason is not None or device is None:
        return reason
    if not available():
        return missing()
    try:
        plan_of(_asked_key(problem, backward, deterministic, device))
    except Declined as error:
        return f"cuDNN has no kernel for it: {error or 'it gives no reason'}"
    return None


def _refused(problem: Problem, backward: bool) -> str | None:
    """Every rule that is known beforehand and speaks against cuDNN (its documentation of scaled dot product
    attention, support matrix)."""
    found = []
    if problem.dtype not in ("bfloat16", "float16"):
        found.append(f"dtype {problem.dtype}: cuDNN takes bfloat16 and float16")
    dims = {"head_dim": problem.dim}
    if problem.dim != problem.dim_v:
        dims["head_dim_v"] = problem.dim_v
    for name, dim in dims.items():
        if dim % 8 or dim > 256:
            found.append(f"{name} {dim}: cuDNN takes multiples of 8 up to 256")
    for name, taken in (("bias", "no_bias"), ("softmax_type", "vanilla")):
        value = getattr(problem, name)
        if value != taken:
            found.append(f"{name} {value!r}: cuDNN is not used with it")
    if problem.masked:
        found.append("mask 'arbitrary': cuDNN is not used with a mask array")
    if problem.placed:
        found.append("placed: cuDNN's dropout knows no part of a larger attention")
    if problem.blind:
        found.append("a row that sees no column: cuDNN gives NaN for it")
    for name, strides in zip("qkv", problem.strides, strict=False):
        if _ITEM * (strides[0] | strides[1] | strides[2]) % _VECTOR:
            found.append(f"strides {strides} of {name}: cuDNN takes multiples of {_VECTOR} bytes")
    if backward and problem.rows == problem.columns == 1:
        found.append("one row by one column: cuDNN has no backward for it")
    return "; ".join(found) or None


def workspace(problem: Problem, backward: bool, deterministic: bool, device: int) -> int:
    """Bytes of workspace of a call."""
    return (
        _workspace_layout(problem, backward)["end"]
        + plan_of(_asked_key(problem, backward, deterministic, device)).workspace
    )


def forward(
    problem: Problem,
    q: ArrayView,
    k: ArrayView,
    v: ArrayView,
    o: ArrayView,
    lse: ArrayView,
    extras: AttentionExtras,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """``protocol.attention_fwd``."""
    padding, views = _padding(problem, q, extras, stream), {"q": q, "k": k, "v": v, "o": o}
    _run(problem, True, views, lse, extras.rng, padding, workspace, stream, backward=False)
    if padding is not None:
        padding.zero(o, True)
        padding.statistics(lse.ptr, lse.ptr, float("-inf"))


def backward(
    problem: Problem,
    d_o: ArrayView,
    q: ArrayView,
    k: ArrayView,
    v: ArrayView,
    o: ArrayView,
    lse: ArrayView,
    dq: ArrayView,
    dk: ArrayView,
    dv: ArrayView,
    extras: AttentionExtras,
    deterministic: bool,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """``protocol.attention_bwd``."""
    views = {"q": q, "k": k, "v": v, "o": o, "d_o": d_o, "dq": dq, "dk": dk, "dv": dv}
    padding = _padding(problem, q, extras, stream)
    _run(problem, deterministic, views, lse, extras.rng, padding, workspace, stream, backward=True)
    if padding is not None:
        padding.zero(dq, True)
        padding.zero(dk, False)
        padding.zero(dv, False)


def _padding(problem: Problem, q: ArrayView, extras: AttentionExtras, stream: int) -> Padding | None:
    return Padding(problem, q.device.index, extras, stream) if problem.padded else None


def _run(
    problem: Problem,
    deterministic: bool,
    views: dict[str, ArrayView],
    lse: ArrayView,
    rng: ArrayView | None,
    padding: Padding | None,
    workspace: ArrayView | None,
    stream: int,
    backward: bool,
) -> None:
    """Launch the graph for ``views``, which come in the order of ``_FORWARD`` or ``_BACKWARD``, and what must
    stand before it."""
    form, device, cleaned = problem.qkv_format, views["q"].device.index, _cleaned(problem, backward)
    strides, places = [], 0
    for name, view in views.items():
        if name in cleaned:
            strides.append(_contiguous(problem, name))
        else:
            strides.append(bhsd(form, view))
            places |= view.ptr
    _check_aligned(places)
    key = Key(problem, device, backward, deterministic, tuple(strides))
    layout = _workspace_layout(problem, backward)
    start, given = (0, 0) if workspace is None else (workspace.ptr, workspace.nbytes)
    _check_workspace(given - layout["end"], plan_of(key))

    pointers = {_UIDS[name]: view.ptr for name, view in views.items()}
    pointers[_UIDS["stats"]] = lse.ptr
    if padding is not None:
        pointers[_UIDS["lengths_q"]] = start + layout["lengths"]
        pointers[_UIDS["lengths_kv"]] = start + layout["lengths"] + 4 * problem.batch
        padding.lengths(start + layout["lengths"])
        if backward:
            pointers[_UIDS["stats"]] = start + layout["stats"]
            padding.statistics(lse.ptr, start + layout["stats"], _NEVER)
        for name in cleaned:
            to, view = start + layout[name], views[name]
            pointers[_UIDS[name]] = to
            padding.clean(
                view.ptr,
                bhsd(form, view),
                to,
                _contiguous(problem, name),
                name in ("q", "d_o"),
                size(problem, name),
            )
    if rng is not None and problem.dropout:
        pointers[_UIDS["seed"]], pointers[_UIDS["offset"]] = rng.ptr, rng.ptr + 8
    put(key, pointers, start + layout["end"], given - layout["end"], stream)


def _execute(key: Key, pointers: dict[int, int], workspace: int, nbytes: int, stream: int) -> None:
    """Launch the graph of a key, which is made anew where it was retired. BackendError where it needs more
    than ``nbytes``."""
    with launch.current_device(key.device), _handle(key.device) as handle:
        if handle.stream != stream:
            _library().set_stream(handle, stream)
        launched = False
        while not launched:
            plan = plan_of(key)
            _check_workspace(nbytes, plan)
            launched = _launched(plan, pointers, workspace, handle, stream)
    launches[key.device] += 1


def _captured(key: Key, pointers: dict[int, int], workspace: int, nbytes: int, stream: int) -> None:
    """``_execute`` into a graph of our own, whose plan is then held for good. BackendError where so many are
    held already: they are not a user's, who could not do without."""
    if len(_HELD) >= _KEPT:
        raise BackendError(f"attention: {len(_HELD)} plans are held for CUDA graphs already")
    _execute(key, pointers, workspace, nbytes, stream)


def _check_workspace(nbytes: int, plan: Plan) -> None:
    """BackendError where a plan's workspace, behind what stands before it, is smaller than cuDNN wants."""
    if nbytes < plan.workspace:
        raise BackendError(
            f"attention: workspace: got {max(nbytes, 0)} bytes, cuDNN needs {plan.workspace} for these "
            "strides"
        )


def _launched(plan: Plan, pointers: dict[int, int], workspace: int, handle: Any, stream: int) -> bool:
    """Launch a plan's graph; False where it was retired meanwhile."""
    with plan.lock:
        if plan.retired:
            return False
        if stream >= _CAPTURABLE and not plan.captured:
            plan.captured = launch.runtime().streamIsCapturing(stream)
        plan.graph.execute(pointers, workspace, handle)
        return True


def _check_aligned(places: int) -> None:
    """Refuse addresses or byte strides, or-ed together, that cuDNN's vector accesses would fault on."""
    if places % _VECTOR:
        raise BackendError(
            "attention",
            "arrays",
            "misaligned addresses or strides",
            f"multiples of {_VECTOR} bytes for cuDNN",
        )


# --- graphs -------------------------------------------------------------------------------------------------


class Declined(Fp8kitError):
    """cuDNN has no kernel for a graph."""


def _library() -> Any:
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
        handle = _library().create_handle()
    try:
        yield handle
    finally:
        free.append(handle)


def _asked_key(problem: Problem, backward: bool, deterministic: bool, device: int) -> Key:
    """The key of a call with the problem's strides: dq, dk and dv have those of q, k and v, o and do are
    C-contiguous."""
    given = dict(zip("qkv", problem.strides, strict=False))
    cleaned = _cleaned(problem, backward)

    def strides(name: str) -> Strides:
        known = None if name in cleaned or name in ("o", "d_o") else given.get(name[-1])
        return known or _contiguous(problem, name)

    names = _BACKWARD if backward else _FORWARD
    return Key(
        problem, device, backward, deterministic or not backward, tuple([strides(name) for name in names])
    )


def _build(key: Key) -> Plan:
    """The plan for ``key``. Declined where cuDNN has no kernel; BackendError when building fails
    otherwise."""
    for stride in key.strides:
        _check_aligned((1 if key.formats else _ITEM) * (stride[0] | stride[1] | stride[2]))
    cudnn = _library()
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
    return Plan(graph, int(graph.get_workspace_size()))


def _retire(key: Key, plan: Plan) -> None:
    """Let a plan go: destroyed with the last reference to it, when no kernel of its is running, or never
    where that cannot be known."""
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
def _plans(device: int) -> LRU[Key, Plan]:
    """The plans of a device, apart from others': to make or retire one waits for the device, which may be at
    a collective (``Locks``)."""
    return LRU(_KEPT, _retire, f"cuDNN graphs, cuda:{device}")


def plan_of(key: Key) -> Plan:
    """The plan of a key, which is built the first time. Declined and BackendError as ``_build``."""
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


def describe(key: Key, handle: Any) -> Any:
    """The graph of ``key``, not yet validated. ``handle``: a cuDNN handle, or None to describe a graph
    without a device."""
    cudnn = _library()
    problem = key.problem
    kinds = cudnn.data_type
    kind = {"bfloat16": kinds.BFLOAT16, "float16": kinds.HALF}[problem.dtype]
    graph = cudnn.pygraph(
        name="attention_bwd" if key.backward else "attention_fwd",
        handle=handle,
        io_data_type=kind,
        intermediate_data_type=kinds.FLOAT,
        compute_data_type=kinds.FLOAT,
    )
    names = _BACKWARD if key.backward else _FORWARD
    # of each array its sizes, strides and type
    about: dict[str, tuple[tuple[int, ...], tuple[int, ...], Any]] = {
        name: (size(problem, name), strides, kind) for name, strides in zip(names, key.strides, strict=True)
    }
    b, h, rows = problem.batch, problem.heads, problem.rows
    about["stats"] = (b, h, rows, 1), (h * rows, rows, 1, 1), kinds.FLOAT
    about |= dict.fromkeys(("lengths_q", "lengths_kv"), ((b, 1, 1, 1), (1, 1, 1, 1), kinds.INT32))
    about |= dict.fromkeys(("seed", "offset"), ((1, 1, 1, 1), (1, 1, 1, 1), kinds.INT64))

    def tensor(name: str) -> Any:
        dim, stride, data_type = about[name]
        return graph.tensor(
            name=name, dim=list(dim), stride=list(stride), data_type=data_type, uid=_UIDS[name]
        )

    def output(made: Any, name: str) -> None:
        dim, stride, data_type = about[name]
        made.set_output(True).set_dim(list(dim)).set_stride(list(stride)).set_data_type(data_type).set_uid(
            _UIDS[name]
        )

    options: dict[str, Any] = {"name": "attention", "attn_scale": problem.scale}
    if problem.banded:
        corners = cudnn.diagonal_alignment
        options["diagonal_alignment"] = corners.BOTTOM_RIGHT if problem.bottom_right else corners.TOP_LEFT
    if problem.left >= 0:
        options["diagonal_band_left_bound"] = problem.left + 1  # it counts the diagonal
    if problem.right >= 0:
        options["diagonal_band_right_bound"] = problem.right
    if problem.padded:
        options |= {"use_padding_mask": True}
        options |= {"seq_len_q": tensor("lengths_q"), "seq_len_kv": tensor("lengths_kv")}
    if problem.dropout:
        options["dropout"] = (problem.dropout, tensor("seed"), tensor("offset"))

    q, k, v = map(tensor, "qkv")
    if not key.backward:
        o, stats = graph.sdpa(q, k, v, generate_stats=True, **options)
        output(o, "o")
        output(stats, "stats")
        return graph
    o, d_o, stats = map(tensor, ("o", "d_o", "stats"))
    gradients = graph.sdpa_backward(
        q, k, v, o, d_o, stats, use_deterministic_algorithm=key.deterministic, **options
    )
    for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
        output(gradient, name)
    return graph


# --- sizes --------------------------------------------------------------------------------------------------


def size(problem: Problem, name: str) -> tuple[int, int, int, int]:
    """(b, h, s, d) of an array, or of the one that it is the gradient of."""
    heads, length = (problem.heads, problem.rows) if name[-1] in "qo" else (problem.groups, problem.columns)
    return problem.batch, heads, length, problem.dim if name[-1] in "qk" else problem.dim_v


def _contiguous(problem: Problem, name: str) -> Strides:
    return contiguous_bhsd(problem, *size(problem, name)[1:])


def _cleaned(problem: Problem, backward: bool) -> tuple[str, ...]:
    """The arrays that cuDNN is given copies of."""
    return _CLEANED[backward] if problem.cleaned else ()


@functools.lru_cache(_ANSWERS)
def _workspace_layout(problem: Problem, backward: bool) -> dict[str, int]:
    """Where things lie in the workspace, in bytes from its start: true lengths, backward's statistics, copies
    by name; from "end" on it is cuDNN's."""
    sizes = {"lengths": 8 * problem.batch} if problem.padded else {}
    if problem.padded and backward:
        sizes["stats"] = 4 * problem.batch * problem.heads * problem.rows
    sizes |= {name: _ITEM * math.prod(size(problem, name)) for name in _cleaned(problem, backward)}
    return arranged(sizes)


# whether an attention is in FP8 -> what describes its graph; cudnn_fp8 adds its own
DESCRIBE: dict[bool, Callable[[Key, Any], Any]] = {False: describe}
