"""What the Flax and the NNX modules are composed of: how parameters start, the layers of attention, branches
with their norms, dropout and residual connections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fp8kit.arguments import choice
from fp8kit.errors import FormatError
from fp8kit.layers.attention_inputs import QK_NORMS, normed_and_rotated
from fp8kit.layers.residual import residual_sum as summed
from fp8kit_jax import functional

Function = Callable[[Any], Any]
# the norm that there is not, as the arguments of a function after x
NO_NORM = None, None, "layernorm", False, 1e-6


def dims_of(features: int | Sequence[int]) -> tuple[int, ...]:
    """Returns the output's last dimensions."""
    return (features,) if isinstance(features, int) else tuple(features)


# --- initial values -----------------------------------------------------------------------------------------


def fan_in(features: int) -> Any:
    """Initialiser of kernels whose first dimension is the input: variance 1 / fan-in, truncated normal."""
    return jax.nn.initializers.variance_scaling(
        1.0, "fan_in", "truncated_normal", in_axis=0, out_axis=tuple(range(1, features + 1))
    )


# of kernels (experts, in, out)
fan_in_of_experts = jax.nn.initializers.variance_scaling(
    1.0, "fan_in", "truncated_normal", in_axis=1, out_axis=2, batch_axis=0
)

# --- attention ----------------------------------------------------------------------------------------------


def qk_norms(
    operation: str, kind: str | None, make: Callable[[str, str], Any], learned: bool
) -> tuple[Any, ...]:
    """Returns the modules ``q_norm`` and ``k_norm`` of a ``qk_norm_type``, None for norms without parameters,
    or whose gains are not ``learned`` but 1. ``make(name, layernorm_type)`` makes one. FormatError for
    another type."""
    if kind is not None:
        choice(operation, "qk_norm_type", kind, QK_NORMS, FormatError)
    plain = kind in (None, "L2Normalization") or not learned
    return tuple(None if plain else make(name, str(kind).lower()) for name in ("q_norm", "k_norm"))


def rotation(
    head_dim: int,
    alternate: bool = False,
    windows: tuple[int, int] = (1, 10000),
    qkv_format: str = "bshd",
    positions: int | None = None,
    starts: Any = None,
) -> Function:
    """Returns the rotary embedding of queries or keys. ``windows``: lowest and highest wave length / 2 pi;
    ``positions``: how many there are, None: as many as tokens; ``starts``: the first position of every
    sequence, None: 0."""
    low, high = windows

    def rotate(x: Any) -> Any:
        count = x.shape[qkv_format.index("s")] if positions is None else positions
        freqs = functional.rope_frequencies(head_dim, count, high / low, alternate) / low
        return functional.rope(x, freqs, starts, qkv_format=qkv_format, interleaved=alternate)

    return rotate


def layer_structs(x: Any, source: Any, heads: int, groups: int, head_dim: int, count: int) -> list[Any]:
    """Shapes and dtypes of the ``count`` arrays that the core attention gets: query, key and value; query,
    and key and value in one; all in one. ``x``, ``source``: what queries and keys are projected from."""
    last = {1: [(3, heads)], 2: [(heads,), (2, groups)], 3: [(heads,), (groups,), (groups,)]}[count]
    pairs = zip((x, source, source), last, strict=False)
    return [jax.ShapeDtypeStruct((*a.shape[:-1], *own, head_dim), a.dtype) for a, own in pairs]


def attention_layers(
    module: Any, projections: Sequence[Any], separate: bool, norms: Sequence[Any], rotate: Function | None
) -> list[Any]:
    """Layers of the core attention from projections (b, s, F) or (b, s, parts, F): their heads get a
    dimension of their own. ``separate``: each part becomes a layer; queries and keys are then rotated and
    normed as the fields of a ``MultiHeadAttention`` say, with the modules ``norms`` (see ``qk_norms``)."""
    if separate:
        parts = [[y] if y.ndim == 3 else [y[..., i, :] for i in range(y.shape[-2])] for y in projections]
        projections = [part for own in parts for part in own]
    dim = module.head_dim
    layers = [y.reshape(*y.shape[:-1], y.shape[-1] // dim, dim) for y in projections]
    if separate:
        if module.qk_norm_type == "L2Normalization":
            norms = [lambda x: functional.l2norm(x, module.qk_norm_eps)] * 2
        elif module.qk_norm_type is not None and not module.qk_norm_learned:
            norms = [lambda x: _plain_norm(x, module.qk_norm_type.lower(), module.qk_norm_eps)] * 2
        pairs = zip(layers[:2], norms, strict=True)
        first = module.qk_norm_before_rope
        layers[:2] = [normed_and_rotated(a, norm, rotate, first) for a, norm in pairs]
    return layers


def _plain_norm(x: Any, kind: str, eps: float) -> Any:
    """ "layernorm" or "rmsnorm" with gains of 1 and shifts of 0."""
    gains = jnp.ones(x.shape[-1:], x.dtype)
    return functional.layernorm(
        x, gains, jnp.zeros_like(gains) if kind == "layernorm" else None, kind, False, eps
    )


# --- residual connections -----------------------------------------------------------------------------------


def joined(branch: Callable[..., Any], x: Any, norm: Function | None, fused: bool, add: Any) -> Any:
    """Returns x after a branch: x + dropout(branch(x)), or with the branch's ``norm`` x +
    dropout(norm(branch(x))).

    ``branch(**asked)`` calls its module, which returns y, and where they are asked for where the residual
    starts and the bias that it has not added. ``fused``: nothing lies between the branch's last product and
    the residual, and the product adds it. ``add(y, bias, residual)``: ``residual_sum``."""
    if norm is not None:
        return add(norm(branch()), None, x)
    if fused:
        return branch(join_residual=True)
    y, residual, bias = branch(return_residual=True, return_bias=True)
    return add(y, bias, residual)


def dropped(
    x: Any, rate: float, key: Any, dims: Sequence[int], bias: Any = None, residual: Any = None
) -> Any:
    """residual + dropout(x + bias) with probability ``rate``; along ``dims`` one draw serves all (Flax's
    ``broadcast_dims``)."""
    if not (dims and rate):
        return functional.dropout_add(x, residual, bias, rate, key)
    x = x if bias is None else functional.dropout_add(x, bias=bias)
    shape = [1 if d in {range(x.ndim)[i] for i in dims} else n for d, n in enumerate(x.shape)]
    x = x * functional.dropout_add(jnp.ones(shape, x.dtype), rate=rate, key=key)
    return x if residual is None else functional.dropout_add(x, residual)


def residual_sum(
    branch: Any,
    bias: Any,
    residual: Any,
    dropout: tuple[float, Any],
    path: tuple[float, Any],
    dims: Sequence[int] = (),
    qkv_format: str = "bshd",
) -> Any:
    """``fp8kit.layers.residual.residual_sum``. ``dropout``, ``path``: probability and key of each; ``dims``:
    see ``dropped``."""

    def add(x: Any, bias: Any, residual: Any) -> Any:
        return dropped(x, *dropout, dims, bias, residual)

    def drop(x: Any, residual: Any) -> Any:
        return functional.drop_path(x, residual, *path, qkv_format)

    return summed(branch, bias, residual, dropout[0], path[0], add, drop)
