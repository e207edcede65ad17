"""Attention in FP8 by cuDNN's fused kernels, through the graphs of nvidia-cudnn-frontend (``sdpa_fp8``,
``sdpa_fp8_backward``); ``cudnn_plans`` builds, keeps and launches them.

What a graph computes (``scaled_dot_product_flash_attention.h`` and ``sdpa_fp8_bwd.h`` of cudnn-frontend
1.32), with q, k, v, o, do times their descales, P = softmax(scale q k^T) ::

    forward   P8 = cast(P * scale_s);  o' = P8 v * descale_s;        amax_o = max|o'|, o = cast(o' * scale_o)
    backward  D = rowsum(do * o);      dS = scale * P * (do v^T - D); amax_ds = max|dS|
              dS8 = cast(dS * scale_ds)
              dv' = P8^T do * descale_s, dq' = dS8 k * descale_ds, dk' = dS8^T q * descale_ds
              dq = cast(dq' * scale_dq) and so on, and their amaxes

The library's "dP" is dS. P8 has the type of q, dS8 that of do. An amax is of what is not yet scaled, so it is
right whatever scale its tensor was given.

On Hopper (compute capability 9.0, cuDNN 9.7 and later; the frontend's checks, and cuDNN 9.20 asked to build
its plans) forward takes heads of 16 to 256 features in steps of 16, backward of 128 only; o and the gradients
are FP8, bfloat16 only from Blackwell on; no bias; no diagonal that ends at the last row and column. Heads may
be grouped, lengths be any, batches be padded; strides of sbhd, bshd and bhsd are all taken. Windows and
dropout are taken, too, but Transformer Engine does not use them (``get_attention_backend``), nor do we.
"""

from __future__ import annotations

from typing import Any

from fp8kit.backends.cuda import cudnn_plans, launch
from fp8kit.backends.cuda.attention_problem import Problem, Strides
from fp8kit.backends.cuda.cudnn_plans import Key
from fp8kit.backends.cuda.cudnn_sdpa import size
from fp8kit.errors import BackendError
from fp8kit.lru import memoized

_OLDEST = 90700
HOPPER = 90  # compute capability times 10
_FULL_BACKWARD = 128
_TYPES = {"E4M3": "FP8_E4M3", "E5M2": "FP8_E5M2"}

_ARRAYS = {False: ("q", "k", "v", "o"), True: ("q", "k", "v", "o", "d_o", "dq", "dk", "dv")}
_DESCALES = {
    False: ("descale_q", "descale_k", "descale_v", "descale_s"),
    True: (
        *("descale_q", "descale_k", "descale_v", "descale_o", "descale_d_o"),
        *("descale_s", "descale_ds"),
    ),
}
_SCALES = {False: ("scale_s", "scale_o"), True: ("scale_s", "scale_dq", "scale_dk", "scale_dv", "scale_ds")}
_AMAXES = {False: ("amax_o",), True: ("amax_dq", "amax_dk", "amax_dv", "amax_ds")}
_OF_GRADIENTS = ("d_o", "dq", "dk", "dv")
_NAMES = dict.fromkeys(
    name
    for part in (_ARRAYS, _DESCALES, _SCALES, _AMAXES)
    for backward in (False, True)
    for name in part[backward]
)
UIDS = {name: uid for uid, name in enumerate((*_NAMES, "stats", "lengths_q", "lengths_kv"), 1)}


def names(backward: bool) -> tuple[str, ...]:
    """Names of the arrays that the graph of forward or backward takes by address, without the lengths."""
    return (*_ARRAYS[backward], *_DESCALES[backward], *_SCALES[backward], *_AMAXES[backward], "stats")


def key_of(
    problem: Problem, formats: tuple[str, str], backward: bool, deterministic: bool, device: int
) -> Key:
    """Returns the key of a call, all of whose arrays are C-contiguous (b, h, s, d)."""
    strides = tuple(_strides(problem, name) for name in _ARRAYS[backward])
    return Key(problem, device, backward, deterministic or not backward, strides, formats)


def _strides(problem: Problem, name: str) -> Strides:
    _, heads, length, dim = size(problem, name)
    return heads * length * dim, length * dim, dim, 1


def refused(problem: Problem, formats: tuple[str, str], backward: bool) -> str | None:
    """Every rule that is known beforehand and speaks against cuDNN on Hopper."""
    found = [f"format {name}: cuDNN takes E4M3 and E5M2" for name in formats if name not in _TYPES]
    dims = dict.fromkeys((problem.dim, problem.dim_v))
    for dim in dims:
        if backward and dim != _FULL_BACKWARD:
            found.append(f"head_dim {dim}: cuDNN's backward takes {_FULL_BACKWARD}")
        elif not backward and (dim % 16 or dim > 256):
            found.append(f"head_dim {dim}: cuDNN takes multiples of 16 up to 256")
    for name, taken in (("bias", "no_bias"), ("softmax_type", "vanilla")):
        value = getattr(problem, name)
        if value != taken:
            found.append(f"{name} {value!r}: cuDNN has none in FP8")
    if problem.softcap:
        found.append(f"softcap {problem.softcap}: cuDNN has none in FP8")
    if problem.masked:
        found.append("mask 'arbitrary': cuDNN is not used with a mask array")
    if problem.dropout:
        found.append("dropout: cuDNN would drop other weights than the emulation does")
    if problem.left >= 0 or problem.right > 0:
        found.append("a window: cuDNN's FP8 attention is used without, or causal")
    if problem.bottom_right:
        found.append("a diagonal that ends at the last row and column: cuDNN takes it from Blackwell on")
    if problem.blind:
        found.append("a row that sees no column: cuDNN gives NaN for it")
    if problem.rows == problem.columns == 1:
        found.append("one row by one column")
    return "; ".join(found) or None


def absent(device: int | None) -> str | None:
    """Why there is no FP8 attention by cuDNN on a device (None: on any), None where there is."""
    reason = cudnn_plans.missing()
    if reason is not None:
        return reason
    import cudnn

    version = cudnn.backend_version()
    if version < _OLDEST:
        return f"cuDNN {version // 10000}.{version // 100 % 100} is too old: FP8 attention wants 9.7"
    if device is not None:
        major, minor = launch.capability(device)
        if 10 * major + minor != HOPPER:
            return f"compute capability {major}.{minor}: cuDNN's FP8 attention is used on 9.0"
    return None


@memoized("FP8 attention: refusals")
def why_not(
    problem: Problem, formats: tuple[str, str], backward: bool, deterministic: bool, device: int | None
) -> str | None:
    """Why cuDNN does not take this problem on that device, None where it does: asked by building its graph.
    Without a device, None means that nothing known beforehand speaks against it. ``formats``: names of the
    forward's and of the backward's."""
    reason = refused(problem, formats, backward)
    if reason is None and device is not None:
        reason = absent(device)
        if reason is None:
            try:
                cudnn_plans.plan_of(key_of(problem, formats, backward, deterministic, device))
            except cudnn_plans.Declined as error:
                return f"cuDNN has no kernel for it: {str(error) or 'it gives no reason'}"
            except BackendError as error:
                return f"cuDNN fails to build it: {error}"
    return reason


def describe(key: Key, handle: Any) -> Any:
    """Returns the graph of ``key``, not yet validated. ``handle``: a cuDNN handle, or None to describe a
    graph without a device."""
    import cudnn

    problem, backward, kinds = key.problem, key.backward, cudnn.data_type
    forward_type, backward_type = (getattr(kinds, _TYPES[name]) for name in key.formats)
    graph = cudnn.pygraph(
        name="fp8_attention_bwd" if backward else "fp8_attention_fwd",
        handle=handle,
        io_data_type=forward_type,
        intermediate_data_type=kinds.FLOAT,
        compute_data_type=kinds.FLOAT,
    )
    about: dict[str, cudnn_plans.About] = {
        name: (size(problem, name), strides, backward_type if name in _OF_GRADIENTS else forward_type)
        for name, strides in zip(_ARRAYS[backward], key.strides, strict=True)
    }
    one = (1, 1, 1, 1)
    for part in (_DESCALES, _SCALES, _AMAXES):
        about |= dict.fromkeys(part[backward], (one, one, kinds.FLOAT))
    b, h, rows = problem.batch, problem.heads, problem.rows
    about["stats"] = (b, h, rows, 1), (h * rows, rows, 1, 1), kinds.FLOAT
    about |= dict.fromkeys(("lengths_q", "lengths_kv"), ((b, 1, 1, 1), one, kinds.INT32))

    described = cudnn_plans.Described(graph, about, UIDS)
    tensor, outputs = described.tensor, described.outputs
    options: dict[str, Any] = {"name": "attention", "attn_scale": problem.scale}
    if problem.right >= 0:
        options["diagonal_alignment"] = cudnn.diagonal_alignment.TOP_LEFT
        options["right_bound"] = problem.right
    if problem.padded:
        options |= {"use_padding_mask": True}
        options |= {"seq_len_q": tensor("lengths_q"), "seq_len_kv": tensor("lengths_kv")}
    scalars = *_DESCALES[backward], *_SCALES[backward]
    if not backward:
        given = [tensor(name) for name in ("q", "k", "v", *scalars)]
        o, stats, _, amax_o = graph.sdpa_fp8(*given, generate_stats=True, **options)
        outputs((o, stats, amax_o), ("o", "stats", "amax_o"))
        return graph
    given = [tensor(name) for name in ("q", "k", "v", "o", "d_o", "stats", *scalars)]
    made = graph.sdpa_fp8_backward(*given, use_deterministic_algorithm=key.deterministic, **options)
    outputs(tuple(made)[:7], ("dq", "dk", "dv", *_AMAXES[True]))
    return graph


cudnn_plans.DESCRIBE[True] = describe
