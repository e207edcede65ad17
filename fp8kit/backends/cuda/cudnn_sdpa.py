"""Attention by cuDNN's fused kernels, through the graphs of nvidia-cudnn-frontend (``cudnn_plans``).

cuDNN's softmax statistics are the rows' natural log-sum-exp, as the contract wants them.

Batches with padding need small kernels before and after the graph (``attention_padding``). They compute the
true lengths from cu_seqlens, and write the zeros and -Inf of the contract into padding. Before backward they
set the statistics of rows that see nothing so that such a row gets weight 0; -Inf would give NaN. cuDNN's
documentation does not promise that it never multiplies padding. Where padding may hold any value, cuDNN
therefore reads copies of the arrays, with 0 in padding.
"""

from __future__ import annotations

import math
from typing import Any

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda.attention_padding import Padding
from fp8kit.backends.cuda.attention_problem import Problem, Strides, arranged, bhsd, contiguous_bhsd
from fp8kit.backends.cuda.cudnn_plans import (
    DESCRIBE,
    ITEM,
    VECTOR,
    About,
    Declined,
    Described,
    Key,
    available,
    check_aligned,
    check_workspace,
    library,
    missing,
    plan_of,
    put,
)
from fp8kit.backends.protocol import AttentionExtras
from fp8kit.lru import memoized

NAME = "cuDNN"
_NEVER = 1e30  # a log-sum-exp that makes exp(score - lse) 0

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


@memoized("attention by cuDNN: refusals", 65536)
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
    if problem.softcap:
        found.append(f"softcap {problem.softcap}: cuDNN is not used with it")
    if problem.masked:
        found.append("mask 'arbitrary': cuDNN is not used with a mask array")
    if problem.placed:
        found.append("placed: cuDNN's dropout knows no part of a larger attention")
    if problem.blind:
        found.append("a row that sees no column: cuDNN gives NaN for it")
    for name, strides in zip("qkv", problem.strides, strict=False):
        if ITEM * (strides[0] | strides[1] | strides[2]) % VECTOR:
            found.append(f"strides {strides} of {name}: cuDNN takes multiples of {VECTOR} bytes")
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
    check_aligned(places)
    key = Key(problem, device, backward, deterministic, tuple(strides))
    layout = _workspace_layout(problem, backward)
    start, given = (0, 0) if workspace is None else (workspace.ptr, workspace.nbytes)
    check_workspace(given - layout["end"], plan_of(key))

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


def _asked_key(problem: Problem, backward: bool, deterministic: bool, device: int) -> Key:
    """Returns the key of a call with the problem's strides: dq, dk and dv have those of q, k and v, o and do
    are C-contiguous."""
    given = dict(zip("qkv", problem.strides, strict=False))
    cleaned = _cleaned(problem, backward)

    def strides(name: str) -> Strides:
        known = None if name in cleaned or name in ("o", "d_o") else given.get(name[-1])
        return known or _contiguous(problem, name)

    names = _BACKWARD if backward else _FORWARD
    return Key(
        problem, device, backward, deterministic or not backward, tuple([strides(name) for name in names])
    )


def describe(key: Key, handle: Any) -> Any:
    """Returns the graph of ``key``, not yet validated. ``handle``: a cuDNN handle, or None to describe a
    graph without a device."""
    cudnn = library()
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
    about: dict[str, About] = {
        name: (size(problem, name), strides, kind) for name, strides in zip(names, key.strides, strict=True)
    }
    b, h, rows = problem.batch, problem.heads, problem.rows
    about["stats"] = (b, h, rows, 1), (h * rows, rows, 1, 1), kinds.FLOAT
    about |= dict.fromkeys(("lengths_q", "lengths_kv"), ((b, 1, 1, 1), (1, 1, 1, 1), kinds.INT32))
    about |= dict.fromkeys(("seed", "offset"), ((1, 1, 1, 1), (1, 1, 1, 1), kinds.INT64))

    described = Described(graph, about, _UIDS)
    tensor, outputs = described.tensor, described.outputs
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
        outputs(graph.sdpa(q, k, v, generate_stats=True, **options), ("o", "stats"))
        return graph
    o, d_o, stats = map(tensor, ("o", "d_o", "stats"))
    gradients = graph.sdpa_backward(
        q, k, v, o, d_o, stats, use_deterministic_algorithm=key.deterministic, **options
    )
    outputs(gradients, ("dq", "dk", "dv"))
    return graph


def size(problem: Problem, name: str) -> tuple[int, int, int, int]:
    """(b, h, s, d) of an array, or of the one that it is the gradient of."""
    heads, length = (problem.heads, problem.rows) if name[-1] in "qo" else (problem.groups, problem.columns)
    return problem.batch, heads, length, problem.dim if name[-1] in "qk" else problem.dim_v


def _contiguous(problem: Problem, name: str) -> Strides:
    return contiguous_bhsd(problem, *size(problem, name)[1:])


def _cleaned(problem: Problem, backward: bool) -> tuple[str, ...]:
    """Returns the arrays that cuDNN is given copies of."""
    return _CLEANED[backward] if problem.cleaned else ()


@memoized("attention by cuDNN: workspaces")
def _workspace_layout(problem: Problem, backward: bool) -> dict[str, int]:
    """Returns where things lie in the workspace, in bytes from its start: true lengths, backward's
    statistics, copies by name; from "end" on it is cuDNN's."""
    sizes = {"lengths": 8 * problem.batch} if problem.padded else {}
    if problem.padded and backward:
        sizes["stats"] = 4 * problem.batch * problem.heads * problem.rows
    sizes |= {name: ITEM * math.prod(size(problem, name)) for name in _cleaned(problem, backward)}
    return arranged(sizes)


DESCRIBE[False] = describe
