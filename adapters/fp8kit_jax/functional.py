"""Functions without weights or with vectors alone: norms, softmax, cross entropy, rotary embedding, residual
dropout."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8kit.arguments import choice, flag, integer, number
from fp8kit.errors import FormatError, ShapeError, on_behalf_of
from fp8kit.ops.attention_spec import FORMATS
from fp8kit.ops.cross_entropy import CrossEntropySpec, cross_entropy
from fp8kit.ops.drop_path import DropPathSpec
from fp8kit.ops.drop_path import drop_path as drop_path_operation
from fp8kit.ops.dropout_add import DropoutAddSpec
from fp8kit.ops.dropout_add import dropout_add as dropout_add_operation
from fp8kit.ops.norm import L2NormSpec, norm
from fp8kit.ops.rope import RopeSpec
from fp8kit.ops.rope import rope as rope_operation
from fp8kit.ops.values import check_indices
from fp8kit_jax.arguments import as_array, as_number, as_rows, check_sums, in_dtype_of, on_host
from fp8kit_jax.keys import rng_inputs
from fp8kit_jax.layers import norm_spec
from fp8kit_jax.rules import apply


@on_behalf_of("layernorm", norm_weight="gamma", norm_bias="beta")
def layernorm(
    x: Any,
    gamma: Any,
    beta: Any = None,
    norm_type: str = "layernorm",
    zero_centered_gamma: bool = False,
    epsilon: float = 1e-6,
) -> Any:
    """(x - mean) / sqrt(var + epsilon) * gamma + beta over the last dimension (Ba et al. 2016), or with
    "rmsnorm" ``rmsnorm``.

    ``x``: h (..., N), float32, bfloat16 or float16; ``gamma``, ``beta``: h (N,), beta None with "rmsnorm".
    ``zero_centered_gamma``: the factor is 1 + gamma. Returns h like x.
    """
    x = as_rows("layernorm", "x", x)
    gamma, beta = in_dtype_of(x, gamma, beta)
    spec = norm_spec("layernorm", x, norm_type, epsilon, zero_centered_gamma, beta)
    return apply(norm, spec, {"x": x, "norm_weight": gamma, "norm_bias": beta})["y"]


@on_behalf_of("rmsnorm")
def rmsnorm(x: Any, gamma: Any, zero_centered_gamma: bool = False, epsilon: float = 1e-6) -> Any:
    """x / sqrt(mean(x^2) + epsilon) * gamma over the last dimension (Zhang & Sennrich 2019). Arguments as
    ``layernorm``."""
    return layernorm(x, gamma, None, "rmsnorm", zero_centered_gamma, epsilon)


@on_behalf_of("l2norm")
def l2norm(x: Any, epsilon: float = 1e-6) -> Any:
    """x / sqrt(sum of x^2 + epsilon) over the last dimension. ``x``: h (..., N). Returns alike."""
    x = as_rows("l2norm", "x", x)
    spec = L2NormSpec(x.shape[-1], epsilon=as_number("l2norm", "epsilon", epsilon))
    return apply(norm, spec, {"x": x})["y"]


def softmax(logits: Any, mask: Any = None, scale_factor: float = 1.0) -> Any:
    """softmax(scale_factor * logits) over the last dimension, in float32, rounded to logits' dtype; XLA's own
    fused code.

    * ``logits``: h (..., N), float32, bfloat16 or float16. ``scale_factor``: a number.
    * ``mask``: bool or uint8, broadcast against logits, True (not 0) masks out, or None. A row that is masked
      out whole is 0.

    Returns h (..., N). Raises FormatError for logits that are no floating-point numbers, ShapeError for a
    mask that does not broadcast. Source: Transformer Engine's ``softmax`` in JAX, its kinds distinguished by
    ``mask``.
    """
    logits = as_rows("softmax", "logits", logits, "classes")
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise FormatError("softmax", "logits", logits.dtype.name, "float32, bfloat16 or float16")
    scale_factor = as_number("softmax", "scale_factor", scale_factor, least=-float("inf"))
    mask = None if mask is None else as_array("softmax", "mask", mask)
    scores = logits.astype(jnp.float32) * jnp.float32(scale_factor)
    if mask is None:
        return jax.nn.softmax(scores, -1).astype(logits.dtype)
    pairs = zip(mask.shape[::-1], logits.shape[::-1], strict=False)
    if mask.ndim > logits.ndim or not all(n in (1, m) for n, m in pairs):
        raise ShapeError("softmax", "mask", f"shape {mask.shape}", f"one that broadcasts to {logits.shape}")
    keep = jnp.broadcast_to(mask == 0, logits.shape)
    seen = keep.any(-1, keepdims=True)
    found = jax.nn.softmax(jnp.where(keep | ~seen, scores, -jnp.inf), -1)
    return jnp.where(seen, found, 0.0).astype(logits.dtype)


@on_behalf_of("fused_cross_entropy")
def fused_cross_entropy(
    logits: Any, targets: Any, label_smoothing: float = 0.0, reduction: str = "mean", ignore_index: int = -100
) -> Any:
    """Softmax cross entropy in nats, its gradient from the kept log-sum-exp.

    * ``logits``: h (..., V); ``targets``: int32 (...,), ``ignore_index`` counts nothing; one out of range is
      an error on the CPU (ArgumentError, or JAX's own of a compiled program) and gives NaN on a GPU.
      ``label_smoothing`` in [0, 1).
    * ``reduction``: "mean" over the targets that are not ignored, float32 (), or "none", float32 like
      targets.

    Raises ShapeError or FormatError when it is traced.
    """
    op = "fused_cross_entropy"
    logits = as_rows(op, "logits", logits, "classes")
    smoothing = as_number(op, "label_smoothing", label_smoothing)
    spec = CrossEntropySpec(logits.shape[-1], reduction, smoothing, ignore_index)
    check_indices(op, "targets", on_host(targets), spec.classes, spec.ignore_index)
    loss = apply(cross_entropy, spec, {"logits": logits, "targets": targets})["loss"]
    return loss.reshape(()) if reduction == "mean" else loss


def rope(
    x: Any,
    freqs: Any,
    start_positions: Any = None,
    cu_seqlens: Any = None,
    qkv_format: str = "bshd",
    interleaved: bool = False,
    *,
    cu_seqlens_padded: Any = None,
) -> Any:
    """Rotary position embedding (Su et al., RoFormer, 2021).

    ``x``: h (b, s, heads, d), (s, b, heads, d) with "sbhd", (t, heads, d) with "thd"; ``freqs``: float32
    (positions, r), angles in radians, r even and at most d (``rope_frequencies``); ``start_positions``: int32
    (b,) or None; ``cu_seqlens``: int32 (b + 1,), running sums of the lengths, with "thd";
    ``cu_seqlens_padded``: where the sequences start, if there are gaps between them. ``interleaved``: pairs
    are neighbours, instead of the two halves. Returns h like x, 0 for tokens of no sequence, and so for their
    gradient.
    """
    x = as_array("rope", "x", x)
    if x.ndim < 3:
        wanted = "(batch, sequence, heads, features), or (tokens, heads, features)"
        raise ShapeError("rope", "x", f"shape {x.shape}", wanted)
    choice("rope", "qkv_format", qkv_format, FORMATS)
    segment = (*x.shape[-2:], "freqs")
    spec = RopeSpec((segment,), qkv_format, flag("rope", "interleaved", interleaved))
    sums = {"cu_seqlens": cu_seqlens, "cu_seqlens_padded": cu_seqlens_padded}
    check_sums("rope", sums, "cu_seqlens", x.shape[0])
    inputs = {"x": x, "freqs": freqs, "start_positions": start_positions} | sums
    return apply(rope_operation, spec, inputs)["y"]


def rope_frequencies(dim: int, positions: int, base: float = 10000.0, interleaved: bool = False) -> Any:
    """Angles for ``rope``, float32 (positions, dim): position * base^(-2 i / dim) for the i-th pair, in the
    order that ``rope`` takes."""
    op = "rope_frequencies"
    dim, positions = integer(op, "dim", dim, 2, 2**20), integer(op, "positions", positions, 0, 2**31 - 1)
    base, interleaved = number(op, "base", base, above=0.0), flag(op, "interleaved", interleaved)
    if dim % 2:
        raise ShapeError(op, "dim", dim, "an even number")
    inverse = base ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    angles = np.arange(positions, dtype=np.float64)[:, None] * inverse
    whole = np.repeat(angles, 2, 1) if interleaved else np.concatenate([angles, angles], 1)
    return jnp.asarray(whole.astype(np.float32))


def dropout_add(x: Any, residual: Any = None, bias: Any = None, rate: float = 0.0, key: Any = None) -> Any:
    """residual + dropout(x + bias), in one pass. ``x``, ``residual``: h (..., N); ``bias``: h (N,); ``rate``
    in [0, 1), with ``key``, a JAX key, where it is not 0. Returns h like x."""
    x, rate = as_rows("dropout_add", "x", x), as_number("dropout_add", "rate", rate, below=1.0)
    if rate and key is None:
        raise ShapeError("dropout_add", "key", None, f"a JAX key with rate {rate}")
    spec = DropoutAddSpec(x.shape[-1], rate)
    inputs = {"x": x, "residual": residual, "bias": bias} | (rng_inputs(key, "dropout_add") if rate else {})
    return apply(dropout_add_operation, spec, inputs)["y"]


def drop_path(
    x: Any, residual: Any, rate: float, key: Any, qkv_format: str = "bshd", cu_seqlens: Any = None
) -> Any:
    """residual + x, each sample of x dropped with probability ``rate`` in (0, 1), what stays divided by 1 -
    rate: stochastic depth (Huang et al. 2016). ``x``, ``residual``: h (b, s, N), (s, b, N) with "sbhd", (t,
    N) with "thd" and ``cu_seqlens``, int32 (b + 1,). ``key``: a JAX key. Returns h like x."""
    x, rate = as_array("drop_path", "x", x), as_number("drop_path", "rate", rate, above=0.0, below=1.0)
    if key is None or x.ndim < 1:
        raise ShapeError(
            "drop_path", "key, x", f"{key}, shape {x.shape}", "a JAX key and shape (..., features)"
        )
    choice("drop_path", "qkv_format", qkv_format, FORMATS)
    spec = DropPathSpec(x.shape[-1], rate, qkv_format)
    check_sums("drop_path", {"cu_seqlens": cu_seqlens}, "cu_seqlens", x.shape[0])
    inputs = {"x": x, "residual": residual, "starts": cu_seqlens, **rng_inputs(key, "drop_path")}
    return apply(drop_path_operation, spec, inputs)["y"]
