"""``dot_product_attention`` as a pure function."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fp8kit.arguments import check, named_well, shown
from fp8kit.backends.policy import get_policy
from fp8kit.errors import ArgumentError, ShapeError, meant, on_behalf_of
from fp8kit.layers.attention_inputs import alibi_slopes
from fp8kit.lru import memoized
from fp8kit.ops.attention import AttentionSpec, attention
from fp8kit_jax.arguments import as_array, as_number, check_sums, meta_of
from fp8kit_jax.checks import ALIASES, RULES
from fp8kit_jax.context_parallel import attend_split, division
from fp8kit_jax.keys import rng_inputs
from fp8kit_jax.rules import apply
from fp8kit_jax.scopes import attention_in_force, next_key, plain_attention

_OP = "dot_product_attention"
# how many arrays come -> fp8kit's layout, its inputs, and how many of q, k and v each holds
LAYOUTS = {
    1: ("qkv", ("qkv",), (3,)),
    2: ("q_kv", ("q", "kv"), (1, 2)),
    3: ("separate", ("q", "k", "v"), (1, 1, 1)),
}


@named_well
def dot_product_attention(
    query: Any,
    key: Any = None,
    value: Any = None,
    *,
    attn_mask_type: str = "causal",
    mask: Any = None,
    bias: Any = None,
    attn_bias_type: str | None = None,
    scale_factor: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Any = None,
    qkv_format: str = "bshd",
    window_size: tuple[int, int] | None = None,
    softmax_type: str = "vanilla",
    softmax_offset: Any = None,
    alibi_slopes: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    cu_seqlens_q_padded: Any = None,
    cu_seqlens_kv_padded: Any = None,
    max_seqlen_q: int = 0,
    max_seqlen_kv: int = 0,
    bottom_right_diagonal: bool | None = None,
    context_parallel_axis: str = "",
    context_parallel_causal_load_balanced: bool = False,
    context_parallel_strategy: str = "DEFAULT",
    stripe_size: int | None = None,
    softcap: float = 0.0,
) -> Any:
    """dropout(softmax(scores)) value for each head, scores = scale_factor * query key^T and a bias (Vaswani
    et al. 2017).

    * ``query``: h (b, s_q, heads, d); ``key``: h (b, s_kv, groups, d); ``value``: h (b, s_kv, groups, d_v),
      groups a divisor of heads. With "sbhd" the sequence comes first, with "thd" t tokens stand for b and s.
      Packed, and then neither split nor concatenated: ``query`` (b, s, 3, heads, d) alone, or ``query``
      and ``key`` (b, s_kv, 2, groups, d).
    * ``attn_mask_type``: "no_mask", "causal", "causal_bottom_right", "padding", "padding_causal" (also
      "causal_padding"), "padding_causal_bottom_right" or "arbitrary" with ``mask``: bool (1 | b, 1 | heads, 1
      | s_q, s_kv), True masks out. Padding: ``cu_seqlens_q``, ``cu_seqlens_kv``, int32 (b + 1,), running sums
      of the true lengths: 0 first, never falling, at most t, no sequence longer than s or ``max_seqlen_q``.
      Other values are an ArgumentError on the CPU, within ``jax.jit`` an error of the program; on a GPU they
      are not checked: rows may come out wrong, but nothing out of bounds is touched.
    * ``bias``: h (1 | b, 1 | heads, 1 | s_q, s_kv), differentiable; ``attn_bias_type``: None is
      "post_scale_bias" where there is one.
    * ``dropout_key``: a JAX key, where ``dropout_rate`` is not 0. Over several devices, ``jax.jit`` splits it
      by batches and heads, and it drops what one device drops, but for cuDNN, which has a stream of its own
      and no part in that: both directions over several devices, or both on one. In a ``shard_map`` each
      device drops by itself, with the key it gets: ``jax.random.fold_in(key, jax.lax.axis_index(axis))``
      is one for each.
    * ``context_parallel_axis``: the mesh axis along which sequences are split, "" is the ``cp_resource`` of
      the MeshResource in force: see ``context_parallel``. Under ``jax.jit`` with the mesh of
      ``jax.set_mesh``, and in a ``shard_map``, where each device gives its part. With
      ``context_parallel_causal_load_balanced`` tokens are in the order of
      ``reorder_causal_load_balancing``: DualChunkSwap, or with "thd" Striped with ``stripe_size`` (None is 1;
      1 or a multiple of the devices). ``cu_seqlens`` are those of the whole sequences in natural order.
      ``context_parallel_strategy``: "RING" has keys and values go round a ring; "ALL_GATHER", which "DEFAULT"
      is, gathers them, and knows windows left of the diagonal, but not beside stripes. UnsupportedError
      beside masks, biases, dropout and quantised operands, ShapeError for tokens that do not divide; where
      only the MeshResource asks, under ``jax.jit``, such calls run whole.
    * The rest: see ``fp8kit.ops.attention_spec.AttentionSpec``.

    Under ``autocast`` with a recipe that has ``fp8_dpa`` the operands of its products are quantised
    (``fp8kit.attention_quantization``); the call then runs whole on every device of a mesh. A rotation with
    random signs takes its key from ``dropout_key``, or, without dropout, from the autocast's ``rng``.

    Returns h (b, s_q, heads, d_v), or as query's format has it.
    """
    return attend("", locals())


@on_behalf_of(_OP, q="query", k="key", v="value")
def attend(name: str, arguments: Mapping[str, Any], rows: bool = False) -> Any:
    """``dot_product_attention`` of all its ``arguments`` by name, of a module that is called ``name``.
    ``rows``: with "thd" tokens lie in rows, (b, s, heads, d), and so does what it returns."""
    how = division(arguments, name, rows)
    if how is not None:
        return attend_split(*_of_module(name), arguments, how, rows)
    if not rows:
        return _attend(name, arguments)
    lead, layers = arguments["query"].shape[:2], ("query", "key", "value")
    flat = {n: a.reshape(-1, *a.shape[2:]) for n in layers if (a := arguments[n]) is not None}
    o = _attend(name, {**arguments, **flat})
    return o.reshape(*lead, *o.shape[1:])


@memoized("JAX: attention by name")
def _of_module(name: str) -> tuple[Any, Any]:
    """Returns what ``attend_split`` needs, the same objects for the same name."""
    return partial(_attend, name), lambda options: _resolved(options, name).spec


def _attend(name: str, arguments: Mapping[str, Any]) -> Any:
    call = _resolved(arguments, name)
    inputs = call.inputs
    if call.spec.dropout:
        inputs = inputs | rng_inputs(arguments["dropout_key"], _OP, "dropout_key")
    elif call.spec.needs_rng:
        inputs = inputs | rng_inputs(next_key(_OP), _OP, "rng")
    return apply(attention, call.spec, inputs, flat=call.flat, views={"o": call.o})["o"]


DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(dot_product_attention).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}
# arguments of the function that a module leaves to its caller
OPTIONS = tuple(name for name in DEFAULTS if not name.startswith("dropout"))
# those that are checked by rule: any number is a scale
_RULES = {name: RULES[name] for name in OPTIONS if name in RULES and name != "scale_factor"}
_BESIDE = (
    "mask",
    "bias",
    "softmax_offset",
    "cu_seqlens_q",
    "cu_seqlens_kv",
    "cu_seqlens_q_padded",
    "cu_seqlens_kv_padded",
)


def spelled(softmax_type: Any) -> Any:
    """Returns a softmax type as the operation calls it: "off_by_one", as Transformer Engine's JAX has it,
    too."""
    return "off-by-one" if isinstance(softmax_type, str) and softmax_type == "off_by_one" else softmax_type


def validate(query: Any, key: Any = None, value: Any = None, **options: Any) -> None:
    """Raise what ``dot_product_attention`` would raise for these arguments, and compute nothing: a layer's
    check before its projections run.

    ``query``, ``key``, ``value``: arrays or ``jax.ShapeDtypeStruct``s, ``options``: as there, without a
    key."""
    known(_OP, options)
    with plain_attention(True):  # which refuses no less, but heads that cannot be rotated
        call = _resolved(DEFAULTS | {"query": query, "key": key, "value": value} | options)
    metas = {name: meta_of(_OP, name, value) for name, value in call.inputs.items() if value is not None}
    attention.infer(
        call.spec,
        {name: meta._replace(shape=call.flat.get(name, meta.shape)) for name, meta in metas.items()},
        frozenset(),
    )


def known(operation: str, options: Iterable[str], more: Iterable[str] = (), own: Iterable[str] = ()) -> None:
    """TypeError for a name that is neither an option of ``dot_product_attention`` that callers set, nor one
    of ``more``, with the one that was meant, one of ``own`` perhaps."""
    names = (*OPTIONS, *more)
    for name in options:
        if name not in names:
            near = meant(name, {*names, *own} - {"self", "options"})
            raise TypeError(f"{operation}: unexpected argument {name!r}{near}")


class _OperationCall(NamedTuple):
    """A call of the operation: its inputs by name without ``rng``; the operation's own shapes of inputs that
    it has flattened; o's shape."""

    spec: AttentionSpec
    inputs: dict[str, Any]
    flat: dict[str, tuple[int, ...]]
    o: tuple[int, ...]


def _resolved(options: Mapping[str, Any], module: str = "") -> _OperationCall:
    """Returns the call of the operation for all arguments of the function by name; layers may be shapes and
    dtypes. ``module``: the name of the module that calls. Checks everything but the shapes and dtypes that
    the operation checks."""
    tensors = {
        name: value if isinstance(value, jax.ShapeDtypeStruct) else as_array(_OP, name, value)
        for name in ("query", "key", "value")
        if (value := options[name]) is not None or name == "query"
    }
    check(_OP, _RULES, options)
    layers, window = list(tensors.values()), options["window_size"]
    rate = as_number(_OP, "dropout_rate", options["dropout_rate"], below=1.0)
    if rate and options["dropout_key"] is None:
        raise ArgumentError(_OP, "dropout_key", None, f"a JAX key with dropout_rate {rate}")
    scale = options["scale_factor"]
    scale = 0.0 if scale is None else as_number(_OP, "scale_factor", scale, least=-math.inf)
    form = options["qkv_format"]
    dims, (layout, names, packed) = 3 if form == "thd" else 4, LAYOUTS[len(layers)]
    missing = next((name for name in ("key", "value") if name not in tensors), None)
    if missing is not None and ("value" in tensors or layers[-1].ndim == dims):
        raise ShapeError(_OP, missing, None, "an array, unless the one before it holds both or all three")
    if any(
        a.ndim != dims + (count > 1) or (count > 1 and a.shape[-3] != count)
        for a, count in zip(layers, packed, strict=True)
    ):
        wanted = f"{dims} dimensions each for {form!r}, or packed with 3 or 2 before the heads"
        raise ShapeError(_OP, "shapes", [a.shape for a in layers], wanted)
    inputs = dict(zip(names, layers, strict=True)) | {name: options[name] for name in _BESIDE}
    biased = options["attn_bias_type"] or ("no_bias" if inputs["bias"] is None else "post_scale_bias")
    heads, head_dim = layers[0].shape[-2:]
    slopes = options["alibi_slopes"]
    if biased == "alibi" and slopes is None:
        slopes = jnp.asarray(np.array(alibi_slopes(heads), np.float32))
    inputs["alibi_slopes"] = slopes
    kind, corner = options["attn_mask_type"], options["bottom_right_diagonal"]
    longest = {side: int(options[f"max_seqlen_{side}"]) for side in ("q", "kv")}
    for side, most in longest.items():
        if form == "thd" and most == 0:
            wanted = "the tokens of the longest sequence, with qkv_format 'thd'"
            raise ShapeError(_OP, f"max_seqlen_{side}", None, wanted)
    spec = AttentionSpec(
        heads,
        head_dim,
        layers[-1].shape[-2],
        form,
        ALIASES.get(kind, kind),
        scale,
        rate,
        get_policy().deterministic,
        layout,
        layers[-1].shape[-1],
        (-1, -1) if window is None else tuple(window),
        None if corner is None else bool(corner),
        biased,
        spelled(options["softmax_type"]),
        float(options["softcap"]),
        *longest.values(),
        quantized=attention_in_force(_OP, module),
    )
    for (side, most), layer in zip(longest.items(), (layers[0], layers[:2][-1]), strict=True):
        thd = form == "thd"
        total, most = (layer.shape[0], most or None) if thd else (None, layer.shape[form.index("s")])
        check_sums(_OP, inputs, f"cu_seqlens_{side}", total, most)
    flat = {
        name: (*a.shape[: dims - 2], math.prod(a.shape[dims - 2 :]))
        for name, a, n in zip(names, layers, packed, strict=True)
        if n > 1
    }
    return _OperationCall(spec, inputs, flat, (*layers[0].shape[: dims - 2], heads, layers[-1].shape[-1]))


def beside_mask(operation: str, kind: str, window: tuple[int, int] | None) -> dict[str, Any]:
    """``attn_mask_type``, ``window_size`` and ``bottom_right_diagonal`` of an attention with a mask array
    besides the mask ``kind`` and the window: "arbitrary", and a window that ends at the causal diagonal, in
    its corner."""
    kind, corner = ALIASES.get(kind, kind), None
    if "causal" in kind:
        left, right = window or (-1, -1)
        if right > 0:
            wanted = f"right -1 or 0: mask {kind!r} sees nothing right of the diagonal"
            raise ShapeError(operation, "window_size", shown(window), wanted)
        window, corner = (left, 0), kind.endswith("bottom_right")
    return {"attn_mask_type": "arbitrary", "window_size": window, "bottom_right_diagonal": corner}


def running_sums(lengths: Any) -> Any:
    """int32 (b + 1,) running sums from the sequences' lengths, (b,): ``cu_seqlens``."""
    lengths = as_array("running_sums", "lengths", lengths)
    if lengths.ndim != 1 or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ShapeError(
            "running_sums", "lengths", f"{lengths.dtype} {lengths.shape}", "integers (sequences,)"
        )
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jax.lax.cumsum(jnp.asarray(lengths, jnp.int32))])
