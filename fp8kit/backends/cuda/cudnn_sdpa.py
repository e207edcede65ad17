"""Attention by cuDNN's fused kernels, through the graphs of nvidia-cudnn-frontend.

A graph is built once for what it depends on (``Key``) and kept; a call hands it device addresses by uid. cuDNN's softmax statistics are
the rows' natural log-sum-exp, as the contract wants them. With padding three small kernels stand round the graph: true lengths from
cu_seqlens; zeros and -Inf where the contract wants them, whatever cuDNN leaves there; and, before backward, statistics that give weight
0 to rows that see nothing, where -Inf would give NaN.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, NamedTuple

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import attention_rules, launch
from fp8kit.backends.cuda.attention_problem import Problem, Strides, bhsd, contiguous_bhsd
from fp8kit.backends.protocol import AttentionExtras
from fp8kit.errors import BackendError, Fp8kitError, expected
from fp8kit.formats import DTYPES

NAME = "cuDNN"
_OLDEST = 90600
_FAULTY = (91000, 91001, 91400)  # releases with known faults in 16-bit attention
_ALIGN = 256
_VECTOR = 16  # bytes
_NEVER = 1e30  # a log-sum-exp that makes exp(score - lse) 0

_UIDS = {name: uid for uid, name in enumerate(
    ("q", "k", "v", "o", "stats", "d_o", "dq", "dk", "dv", "lengths_q", "lengths_kv", "seed", "offset"), 1)}
_FORWARD = ("q", "k", "v", "o")
_BACKWARD = ("q", "k", "v", "o", "d_o", "dq", "dk", "dv")


class Key(NamedTuple):
    """What a graph depends on. ``strides``: of the forward's or the backward's arrays, order b, h, s, d."""

    problem: Problem
    device: int
    backward: bool
    deterministic: bool
    strides: tuple[Strides, ...]


class Plan(NamedTuple):
    """A built graph and the bytes of workspace that it needs."""

    graph: Any
    workspace: int


class _Handles(threading.local):
    """cuDNN handles of this thread by device: a handle carries a stream, so threads do not share one."""

    def __init__(self) -> None:
        self.by_device: dict[int, Any] = {}


_HANDLES = _Handles()
_PLANS: dict[Key, Plan] = {}
_BUILDING = threading.Lock()


@functools.cache
def missing() -> str | None:
    """Why cuDNN cannot be used at all in this process, None where it can."""
    try:
        import cudnn
    except ImportError as error:
        return f"nvidia-cudnn-frontend cannot be imported ({error}); install it with: pip install 'fp8kit[cuda13]'"
    try:
        version = cudnn.backend_version()
    except RuntimeError as error:
        return f"libcudnn.so.9 cannot be found ({error}); install it with: pip install nvidia-cudnn-cu13"
    if version < _OLDEST or version in _FAULTY:
        return f"cuDNN {version} is {'too old' if version < _OLDEST else 'known to be faulty'}; install 9.19 or later"
    return None


def available() -> bool:
    """Whether the frontend and a usable libcudnn are there."""
    return missing() is None


@functools.cache
def why_not(problem: Problem, backward: bool, deterministic: bool, device: int | None) -> str | None:
    """Why cuDNN does not take this problem on that device, None where it does: asked by building its graph for C-contiguous arrays. Without
    a device, None means that nothing known beforehand speaks against it."""
    reason = _refused(problem, backward)
    if reason is not None or device is None:
        return reason
    if missing() is not None:
        return missing()
    try:
        _plan(_contiguous_key(problem, backward, deterministic, device))
    except _Declined as error:
        return f"cuDNN has no kernel for it: {error or 'it gives no reason'}"
    return None


def _refused(problem: Problem, backward: bool) -> str | None:
    """Every rule that is known beforehand and speaks against cuDNN (its documentation of scaled dot product attention, support matrix)."""
    found = []
    if problem.dtype not in ("bfloat16", "float16"):
        found.append(f"dtype {problem.dtype}: cuDNN takes bfloat16 and float16")
    dims = {"head_dim": problem.dim} if problem.dim == problem.dim_v else {"head_dim": problem.dim, "head_dim_v": problem.dim_v}
    found += [f"{name} {dim}: cuDNN takes multiples of 8 up to 256" for name, dim in dims.items() if dim % 8 or dim > 256]
    for name, value, taken in (("bias", problem.bias, "no_bias"), ("softmax_type", problem.softmax_type, "vanilla")):
        if value != taken:
            found.append(f"{name} {value!r}: only the unfused path has it")
    if problem.masked:
        found.append("mask 'arbitrary': only the unfused path reads a mask array")
    if problem.blind:
        found.append("a row that sees no column: cuDNN gives NaN for it")
    if backward and problem.rows == problem.columns == 1:
        found.append("one row by one column: cuDNN has no backward for it")
    return "; ".join(found) or None


def workspace(problem: Problem, backward: bool, deterministic: bool, device: int) -> int:
    """Bytes of workspace of a call."""
    return _padding_bytes(problem, backward) + _plan(_contiguous_key(problem, backward, deterministic, device)).workspace


def forward(problem: Problem, q: ArrayView, k: ArrayView, v: ArrayView, o: ArrayView, lse: ArrayView, extras: AttentionExtras,
            workspace: ArrayView | None, stream: int) -> None:
    """``protocol.attention_fwd``."""
    form = problem.qkv_format
    _check_aligned(q.ptr | k.ptr | v.ptr | o.ptr)
    key = Key(problem, q.device.index, False, True, (bhsd(form, q), bhsd(form, k), bhsd(form, v), bhsd(form, o)))
    pointers = {1: q.ptr, 2: k.ptr, 3: v.ptr, 4: o.ptr, 5: lse.ptr}
    padding = _Padding(problem, key.device, extras, stream)
    _execute(key, pointers, extras.rng, padding, workspace, stream)
    if problem.padded:
        padding.zero(o, True)
        padding.statistics(lse.ptr, lse.ptr, float("-inf"))


def backward(problem: Problem, d_o: ArrayView, q: ArrayView, k: ArrayView, v: ArrayView, o: ArrayView, lse: ArrayView, dq: ArrayView,
             dk: ArrayView, dv: ArrayView, extras: AttentionExtras, deterministic: bool, workspace: ArrayView | None,
             stream: int) -> None:
    """``protocol.attention_bwd``."""
    _check_aligned(q.ptr | k.ptr | v.ptr | o.ptr | d_o.ptr | dq.ptr | dk.ptr | dv.ptr)
    views = (q, k, v, o, d_o, dq, dk, dv)
    key = Key(problem, q.device.index, True, deterministic, tuple([bhsd(problem.qkv_format, view) for view in views]))
    pointers = {1: q.ptr, 2: k.ptr, 3: v.ptr, 4: o.ptr, 5: lse.ptr, 6: d_o.ptr, 7: dq.ptr, 8: dk.ptr, 9: dv.ptr}
    padding = _Padding(problem, key.device, extras, stream)
    if problem.padded and workspace is not None:
        pointers[_UIDS["stats"]] = workspace.ptr + _aligned(8 * problem.batch)
        padding.statistics(lse.ptr, pointers[_UIDS["stats"]], _NEVER)
    _execute(key, pointers, extras.rng, padding, workspace, stream)
    if problem.padded:
        padding.zero(dq, True)
        padding.zero(dk, False)
        padding.zero(dv, False)


def _execute(key: Key, pointers: dict[int, int], rng: ArrayView | None, padding: _Padding, workspace: ArrayView | None,
             stream: int) -> None:
    plan = _PLANS.get(key) or _plan(key)
    problem = key.problem
    before = _padding_bytes(problem, key.backward)
    given = 0 if workspace is None else workspace.nbytes
    if given < before + plan.workspace:
        raise BackendError(f"attention: workspace: got {given} bytes, cuDNN needs {before + plan.workspace} for these strides")
    start = 0 if workspace is None else workspace.ptr
    if problem.padded:
        pointers[_UIDS["lengths_q"]], pointers[_UIDS["lengths_kv"]] = start, start + 4 * problem.batch
        padding.lengths(start)
    if rng is not None and problem.dropout:
        pointers[_UIDS["seed"]], pointers[_UIDS["offset"]] = rng.ptr, rng.ptr + 8
    with launch.current_device(key.device):
        handle = _handle(key.device)
        if handle.stream != stream:
            _library().set_stream(handle, stream)
        plan.graph.execute(pointers, start + before, handle)


def _check_aligned(places: int) -> None:
    """Refuse addresses or byte strides, or-ed together, that cuDNN's vector accesses would fault on."""
    if places % _VECTOR:
        raise BackendError(expected("attention", "arrays", "misaligned addresses or strides", f"multiples of {_VECTOR} bytes for cuDNN"))


# --- graphs -------------------------------------------------------------------------------------------------------------------


class _Declined(Fp8kitError):
    """cuDNN has no kernel for a graph."""


def _library() -> Any:
    import cudnn

    return cudnn


def _handle(device: int) -> Any:
    """This thread's handle of a device, which is current."""
    handle = _HANDLES.by_device.get(device)
    if handle is None:
        handle = _HANDLES.by_device[device] = _library().create_handle()
    return handle


def _contiguous_key(problem: Problem, backward: bool, deterministic: bool, device: int) -> Key:
    q, o = (contiguous_bhsd(problem, problem.heads, problem.rows, dim) for dim in (problem.dim, problem.dim_v))
    k, v = (contiguous_bhsd(problem, problem.groups, problem.columns, dim) for dim in (problem.dim, problem.dim_v))
    return Key(problem, device, backward, deterministic or not backward, (q, k, v, o, o, q, k, v) if backward else (q, k, v, o))


def _plan(key: Key) -> Plan:
    """The plan for ``key``, built at its first use. _Declined where cuDNN has no kernel; BackendError when building fails otherwise."""
    with _BUILDING:
        found = _PLANS.get(key)
        if found is None:
            for stride in key.strides:
                _check_aligned(2 * (stride[0] | stride[1] | stride[2]))
            cudnn = _library()
            try:
                with launch.current_device(key.device):
                    graph = describe(key, _handle(key.device))
                    graph.validate()
                    graph.build_operation_graph()
                    # the frontend's own Python kernels would need CUTLASS at run time: cuDNN's engines only
                    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
                    graph.deselect_engines(["sdpa_"])
                    graph.check_support()
                    graph.build_plans()
            except (cudnn.cudnnGraphNotSupportedError, NotImplementedError) as error:
                raise _Declined(str(error).strip()) from error
            except (RuntimeError, ValueError) as error:
                raise BackendError(f"attention: cuDNN cannot build a graph for {key}: {error}") from error
            found = _PLANS[key] = Plan(graph, int(graph.get_workspace_size()))
        return found


def describe(key: Key, handle: Any) -> Any:
    """The graph of ``key``, not yet validated. ``handle``: a cuDNN handle, or None to describe a graph without a device."""
    cudnn = _library()
    problem = key.problem
    kinds = cudnn.data_type
    kind = {"bfloat16": kinds.BFLOAT16, "float16": kinds.HALF}[problem.dtype]
    graph = cudnn.pygraph(
        name="attention_bwd" if key.backward else "attention_fwd", handle=handle, io_data_type=kind, intermediate_data_type=kinds.FLOAT,
        compute_data_type=kinds.FLOAT,
    )
    names = _BACKWARD if key.backward else _FORWARD
    strides = dict(zip(names, key.strides, strict=True))
    query, key_value = (problem.batch, problem.heads, problem.rows), (problem.batch, problem.groups, problem.columns)
    shapes = {"q": (*query, problem.dim), "k": (*key_value, problem.dim), "v": (*key_value, problem.dim_v), "o": (*query, problem.dim_v)}
    dims = {name: shapes[name[-1]] for name in names}
    stats_dim = (problem.batch, problem.heads, problem.rows, 1)
    stats_stride = (problem.heads * problem.rows, problem.rows, 1, 1)

    def tensor(name: str, dim: tuple[int, ...], stride: tuple[int, ...], data_type: Any) -> Any:
        return graph.tensor(name=name, dim=list(dim), stride=list(stride), data_type=data_type, uid=_UIDS[name])

    def output(node_output: Any, name: str, dim: tuple[int, ...], stride: tuple[int, ...], data_type: Any) -> None:
        node_output.set_output(True).set_dim(list(dim)).set_stride(list(stride)).set_data_type(data_type).set_uid(_UIDS[name])

    options: dict[str, Any] = {"name": "attention", "attn_scale": problem.scale}
    if problem.banded:
        corner = cudnn.diagonal_alignment.BOTTOM_RIGHT if problem.bottom_right else cudnn.diagonal_alignment.TOP_LEFT
        options["diagonal_alignment"] = corner
    if problem.left >= 0:
        options["diagonal_band_left_bound"] = problem.left + 1  # it counts the diagonal
    if problem.right >= 0:
        options["diagonal_band_right_bound"] = problem.right
    if problem.padded:
        small = ((problem.batch, 1, 1, 1), (1, 1, 1, 1), kinds.INT32)
        options |= {"use_padding_mask": True, "seq_len_q": tensor("lengths_q", *small), "seq_len_kv": tensor("lengths_kv", *small)}
    if problem.dropout:
        small = ((1, 1, 1, 1), (1, 1, 1, 1), kinds.INT64)
        options["dropout"] = (problem.dropout, tensor("seed", *small), tensor("offset", *small))

    q, k, v = (tensor(name, dims[name], strides[name], kind) for name in ("q", "k", "v"))
    if not key.backward:
        o, stats = graph.sdpa(q, k, v, generate_stats=True, **options)
        output(o, "o", dims["o"], strides["o"], kind)
        output(stats, "stats", stats_dim, stats_stride, kinds.FLOAT)
        return graph
    o, d_o = (tensor(name, dims[name], strides[name], kind) for name in ("o", "d_o"))
    stats = tensor("stats", stats_dim, stats_stride, kinds.FLOAT)
    gradients = graph.sdpa_backward(q, k, v, o, d_o, stats, use_deterministic_algorithm=key.deterministic, **options)
    for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
        output(gradient, name, dims[name], strides[name], kind)
    return graph


# --- padding ------------------------------------------------------------------------------------------------------------------


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _padding_bytes(problem: Problem, backward: bool) -> int:
    """Bytes before cuDNN's own workspace: true lengths, and backward's statistics."""
    if not problem.padded:
        return 0
    return _aligned(8 * problem.batch) + (_aligned(4 * problem.batch * problem.heads * problem.rows) if backward else 0)


class _Padding:
    """The small kernels round a padded call."""

    def __init__(self, problem: Problem, device: int, extras: AttentionExtras, stream: int) -> None:
        self.problem = problem
        self.device = device
        self.extras = extras
        self.stream = stream
        self.type = launch.type_name(DTYPES[problem.dtype])

    def _launch(self, function: str, grid: int | tuple[int, int], args: tuple[Any, ...]) -> None:
        launch.launch(launch.kernel("attention_padding.cu", function, self.device, T=self.type), grid, 256, args, self.stream)

    @functools.cached_property
    def rules(self) -> bytes:
        """The structure that the kernels take."""
        return attention_rules.pack(self.problem, self.extras)

    def lengths(self, to: int) -> None:
        """True lengths of q's and then k's batches, int32, to address ``to``."""
        q, kv = self.extras.cu_seqlens_q, self.extras.cu_seqlens_kv
        assert q is not None and kv is not None
        self._launch("attention_lengths", -(-2 * self.problem.batch // 256), (q.ptr, kv.ptr, to, self.problem.batch))

    def statistics(self, source: int, to: int, value: float) -> None:
        """The statistics with ``value`` in rows that see nothing."""
        p = self.problem
        grid = -(-p.batch * p.heads * p.rows // 256)
        self._launch("attention_lse_padding", grid, (source, to, value, p.batch, self.rules))

    def zero(self, view: ArrayView, query: bool) -> None:
        """Zeros in the rows of an array of q's (``query``) or k's lengths that see nothing or are seen by nothing for their padding."""
        p = self.problem
        grid = (p.rows if query else p.columns, p.batch)
        place = (int(not query), p.heads if query else p.groups, view.shape[3], *bhsd(p.qkv_format, view)[:3])
        self._launch("attention_zero_padding", grid, (view.ptr, *place, self.rules))
