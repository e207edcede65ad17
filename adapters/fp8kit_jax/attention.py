"""``dot_product_attention`` as a pure function."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fp8kit.arguments import choice, flag, integer, shown
from fp8kit.backends.policy import get_policy
from fp8kit.errors import ShapeError, meant
from fp8kit.ops.attention import FORMATS, AttentionSpec, attention
from fp8kit.ops.attention_spec import BIASES, MASKS, SOFTMAX_TYPES
from fp8kit_jax.arguments import as_array, as_number, check_sums, meta_of
from fp8kit_jax.checks import ALIASES
from fp8kit_jax.functional import rng_inputs
from fp8kit_jax.rules import apply

_OP = "dot_product_attention"
# how many arrays come -> fp8kit's layout, its inputs, and how many of q, k and v each holds
LAYOUTS = {
    1: ("qkv", ("qkv",), (3,)),
    2: ("q_kv", ("q", "kv"), (1, 2)),
    3: ("separate", ("q", "k", "v"), (1, 1, 1)),
}


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
) -> Any:
    """dropout(softmax(scores)) value for each head, scores = scale_factor * query key^T and a bias (Vaswani
    et al. 2017).

    * ``query``: h (b, s_q, heads, d); ``key``: h (b, s_kv, groups, d); ``value``: h (b, s_kv, groups, d_v),
      groups a divisor of heads. With "sbhd" the sequence comes first, with "thd" t tokens stand for b and s.
      Packed, and then neither split nor joined in memory: ``query`` (b, s, 3, heads, d) alone, or ``query``
      and ``key`` (b, s_kv, 2, groups, d).
    * ``attn_mask_type``: "no_mask", "causal", "causal_bottom_right", "padding", "padding_causal" (also
      "causal_padding"), "padding_causal_bottom_right" or "arbitrary" with ``mask``: bool (1 | b, 1 | heads, 1
      | s_q, s_kv), True masks out. Padding: ``cu_seqlens_q``, ``cu_seqlens_kv``, int32 (b + 1,), running sums
      of the true lengths: 0 first, never falling, at most t, no sequence longer than s or ``max_seqlen_q``.
      Other values are an ArgumentError on the CPU, within ``jax.jit`` an error of the program; on a GPU
      nobody checks them: rows may come out wrong, but nothing out of bounds is touched.
    * ``bias``: h (1 | b, 1 | heads, 1 | s_q, s_kv), differentiable; ``attn_bias_type``: None is
      "post_scale_bias" where there is one.
    * ``dropout_key``: a JAX key, where ``dropout_rate`` is not 0. Over several devices, ``jax.jit`` splits it
      by batches and heads, and it drops what one device drops, but for cuDNN, which has a stream of its own
      and no part in that: both directions over several devices, or both on one. In a ``shard_map`` each
      device drops by itself, with the key it is given: ``jax.random.fold_in(key, jax.lax.axis_index(axis))``
      is one for each.
    * The rest: see ``fp8kit.ops.attention_spec.AttentionSpec``.

    Returns h (b, s_q, heads, d_v), or as query's format has it.
    """
    options = dict(locals())
    layers = {name: options.pop(name) for name in ("query", "key", "value")}
    layers = {
        name: as_array(_OP, name, value)
        for name, value in layers.items()
        if value is not None or name == "query"
    }
    call = _settled(layers, **options)
    inputs = call.inputs | (rng_inputs(dropout_key) if call.spec.dropout else {})
    return apply(attention, call.spec, inputs, pairs=("rng",), flat=call.flat, views={"o": call.o})["o"]


def validate(query: Any, key: Any = None, value: Any = None, **options: Any) -> None:
    """Refuse what ``dot_product_attention`` would refuse of these arguments, and run nothing: what a layer
    asks before its projections run.

    ``query``, ``key``, ``value``: ``jax.ShapeDtypeStruct``s, which stand for arrays; ``options``: as there,
    but for a key."""
    known(_OP, options)
    layers = {name: a for name, a in (("query", query), ("key", key), ("value", value)) if a is not None}
    call = _settled(layers, **options | {"dropout_rate": 0.0})
    metas = {name: meta_of(_OP, name, value) for name, value in call.inputs.items() if value is not None}
    attention.infer(
        call.spec,
        {name: meta._replace(shape=call.flat.get(name, meta.shape)) for name, meta in metas.items()},
        frozenset(),
    )


def known(operation: str, given: Iterable[str], more: Iterable[str] = ()) -> None:
    """TypeError for a name that is no option of ``dot_product_attention``, nor one of ``more``: what a module
    sets itself is none."""
    names = (*OPTIONS, *more)
    for name in given:
        if name not in names:
            raise TypeError(f"{operation}: unexpected argument {name!r}{meant(name, names)}")


class _Call(NamedTuple):
    """An attention: its inputs by name, but for the generator's; the operation's own shapes of those that it
    has flattened; o's shape."""

    spec: AttentionSpec
    inputs: dict[str, Any]
    flat: dict[str, tuple[int, ...]]
    o: tuple[int, ...]


def _settled(
    given: Mapping[str, Any],
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
) -> _Call:
    """What an attention of ``given`` query, key and value comes to, arrays or what stands for them. Its
    arguments are checked here but for the shapes and dtypes that the operation checks."""
    op, layers = _OP, list(given.values())
    dropout_rate = as_number(op, "dropout_rate", dropout_rate, below=1.0)
    scale = 0.0 if scale_factor is None else as_number(op, "scale_factor", scale_factor, least=-math.inf)
    choice(op, "qkv_format", qkv_format, FORMATS)
    if window_size is not None and (
        not isinstance(window_size, tuple | list) or not all(isinstance(n, int) for n in window_size)
    ):
        raise ShapeError(
            op, "window_size", shown(window_size), "(left, right), each -1 (unbounded) or more, or None"
        )
    choice(op, "attn_mask_type", attn_mask_type, (*MASKS, *ALIASES))
    choice(op, "softmax_type", softmax_type, SOFTMAX_TYPES)
    if attn_bias_type is not None:
        choice(op, "attn_bias_type", attn_bias_type, BIASES)
    bottom_right_diagonal = (
        None if bottom_right_diagonal is None else flag(op, "bottom_right_diagonal", bottom_right_diagonal)
    )
    max_seqlen_q = integer(op, "max_seqlen_q", max_seqlen_q, 0, 2**31 - 1)
    max_seqlen_kv = integer(op, "max_seqlen_kv", max_seqlen_kv, 0, 2**31 - 1)
    dims, (layout, names, packed) = 3 if qkv_format == "thd" else 4, LAYOUTS[len(layers)]
    if ("value" in given and "key" not in given) or any(
        a.ndim != dims + (count > 1) or (count > 1 and a.shape[-3] != count)
        for a, count in zip(layers, packed, strict=True)
    ):
        wanted = f"{dims} dimensions each for {qkv_format!r}, or packed with 3 or 2 before the heads"
        raise ShapeError("dot_product_attention", "shapes", [a.shape for a in layers], wanted)
    if dropout_rate and dropout_key is None:
        raise ShapeError(
            "dot_product_attention", "dropout_key", None, f"a JAX key with dropout_rate {dropout_rate}"
        )
    biased = attn_bias_type or ("no_bias" if bias is None else "post_scale_bias")
    heads, head_dim = layers[0].shape[-2:]
    spec = AttentionSpec(
        heads,
        head_dim,
        layers[-1].shape[-2],
        qkv_format,
        ALIASES.get(attn_mask_type, attn_mask_type),
        scale,
        dropout_rate,
        get_policy().deterministic,
        layout,
        layers[-1].shape[-1],
        (-1, -1) if window_size is None else tuple(window_size),
        bottom_right_diagonal,
        biased,
        softmax_type,
        max_seqlen_q,
        max_seqlen_kv,
    )
    if biased == "alibi" and alibi_slopes is None:
        alibi_slopes = jnp.asarray(slopes(heads))
    inputs = {
        **dict(zip(names, layers, strict=True)),
        "mask": mask,
        "bias": bias,
        "alibi_slopes": alibi_slopes,
        "softmax_offset": softmax_offset,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_kv": cu_seqlens_kv,
        "cu_seqlens_q_padded": cu_seqlens_q_padded,
        "cu_seqlens_kv_padded": cu_seqlens_kv_padded,
    }
    for side, layer, longest in (
        ("q", layers[0], max_seqlen_q),
        ("kv", layers[min(len(layers), 2) - 1], max_seqlen_kv),
    ):
        packed_sums = qkv_format == "thd"
        total, most = (
            (layer.shape[0], longest or None)
            if packed_sums
            else (None, layer.shape[max(qkv_format.find("s"), 0)])
        )
        check_sums(op, inputs, f"cu_seqlens_{side}", total, most)
    flat = {
        name: (*a.shape[: dims - 2], math.prod(a.shape[dims - 2 :]))
        for name, a, n in zip(names, layers, packed, strict=True)
        if n > 1
    }
    shape = (*layers[0].shape[: dims - 2], heads, layers[-1].shape[-1])
    return _Call(spec, inputs, flat, shape)


# arguments of the function that a module leaves to its caller
OPTIONS = tuple(
    name
    for name in inspect.signature(_settled).parameters
    if name not in ("given", "dropout_rate", "dropout_key")
)


def beside_mask(
    operation: str, kind: str, window: tuple[int, int] | None
) -> tuple[str, tuple[int, int] | None, bool | None]:
    """``attn_mask_type``, ``window_size`` and ``bottom_right_diagonal`` of an attention to which a mask array
    says what is hidden besides what a mask of ``kind`` and the window hide: "arbitrary", and a window that
    ends where the causal diagonal does, in its corner."""
    kind = ALIASES.get(kind, kind)
    if "causal" not in kind:
        return "arbitrary", window, None
    left, right = window or (-1, -1)
    if right > 0:
        wanted = f"right -1 or 0: mask {kind!r} sees nothing right of the diagonal"
        raise ShapeError(operation, "window_size", shown(window), wanted)
    return "arbitrary", (left, 0), kind.endswith("bottom_right")


def running_sums(lengths: Any) -> Any:
    """int32 (b + 1,) running sums from the sequences' lengths, (b,): ``cu_seqlens``."""
    lengths = as_array("running_sums", "lengths", lengths)
    if lengths.ndim != 1 or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ShapeError(
            "running_sums", "lengths", f"{lengths.dtype} {lengths.shape}", "integers (sequences,)"
        )
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jax.lax.cumsum(jnp.asarray(lengths, jnp.int32))])


def slopes(heads: int) -> np.ndarray[Any, Any]:
    """ALiBi's slopes, float32 (heads,) (Press et al. 2022, section 3): 2^(-8 i / n) for the largest power of
    two n up to heads, and every second one of 2n heads' for the rest."""
    n = 1 << (heads.bit_length() - 1)
    found = [2.0 ** (-8 * i / n) for i in range(1, n + 1)] + [
        2.0 ** (-4 * i / n) for i in range(1, 2 * (heads - n), 2)
    ]
    return np.array(found, np.float32)
