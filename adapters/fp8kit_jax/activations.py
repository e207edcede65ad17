"""``activation``: the activations of an MLP as pure functions."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

from fp8kit.arguments import shown
from fp8kit.backends.activation import ALL
from fp8kit.errors import FormatError, ShapeError, meant
from fp8kit.ops.activation import ActivationSpec, activation_numbers
from fp8kit.ops.activation import activation as activation_operation
from fp8kit_jax.arguments import as_array, in_dtype_of
from fp8kit_jax.rules import apply

# Transformer Engine's names in JAX -> fp8kit's, formulas in fp8kit.backends.activation; pairs are products of
# the two halves
ACTIVATION_TYPES = {
    ("gelu",): "gelu",
    ("gelu", "linear"): "geglu",
    ("quick_gelu",): "qgelu",
    ("quick_gelu", "linear"): "qgeglu",
    ("relu",): "relu",
    ("relu", "linear"): "reglu",
    ("squared_relu",): "srelu",
    ("squared_relu", "linear"): "sreglu",
    ("silu",): "silu",
    ("silu", "linear"): "swiglu",
    ("sigmoid", "linear"): "glu",
    ("clamped_silu", "clamped_linear"): "clamped_swiglu",
    ("xielu",): "xielu",
}
# names of jax.nn's functions, and flax.linen's, for what no kernel has: one, or the product of several, each
# of its own part
_NAMES = """celu elu gelu hard_sigmoid hard_silu hard_swish hard_tanh leaky_relu linear log_sigmoid
log_softmax relu relu6 selu sigmoid silu soft_sign softmax softplus tanh"""
FUNCTIONS = tuple(_NAMES.split())

# the values that xIELU's learned numbers start at
ALPHA_STARTS = tuple(ALL["xielu"].learned.values())


def activation(
    x: Any,
    activation_type: Sequence[str],
    act_params: Mapping[str, float] | None = None,
    alphas: Sequence[Any] | None = None,
) -> Any:
    """The activation of x, or the product of several.

    * ``x``: h (..., a, F) with a = len(activation_type). ``activation_type``: ("gelu",), ("silu", "linear")
      (SwiGLU) or another key of ``ACTIVATION_TYPES``; formulas in ``fp8kit.backends.activation``. Or any
      number of names of ``FUNCTIONS``, whose values are multiplied, in float32. As in Transformer Engine,
      names may have either case, "swish" is "silu", and names that begin with "linear" are read from the last
      to the first: that one is of x's first part.
    * ``act_params``: of ("clamped_silu", "clamped_linear"), a mapping of "limit", "alpha",
      "glu_linear_offset"; of ("xielu",), of "beta", "eps"; None: the defaults.
    * ``alphas``: of ("xielu",) alone, its learned numbers alpha_p and alpha_n, h (1,) each;
      ``ALPHA_STARTS`` has the values that they start at.

    Returns h (..., F). Raises ShapeError or FormatError.
    """
    x = as_array("activation", "x", x)
    composed = composed_of("activation", activation_type, act_params, "act_params", alphas)
    if not composed:
        name, numbers = activation_of("activation", activation_type, act_params, "act_params")
        numbered = alphas_of("activation", name, alphas, x)
    parts = len(activation_type)
    if x.ndim < 2 or x.shape[-2] != parts:
        raise ShapeError(
            "activation", "x", f"shape {x.shape}", f"(..., {parts}, features) for {tuple(activation_type)}"
        )
    if composed:
        wide = x.astype(jnp.float32)
        return reduce(operator.mul, (f(wide[..., i, :]) for i, f in enumerate(composed))).astype(x.dtype)
    width = parts * x.shape[-1]
    return apply(
        activation_operation,
        ActivationSpec(name, width, numbers),
        {"x": x, **numbered},
        flat={"x": (*x.shape[:-2], width)},
    )["y"]


def alphas_of(operation: str, name: str, alphas: Sequence[Any] | None, x: Any) -> dict[str, Any]:
    """Returns the learned numbers of the activation ``name`` by their names, in x's dtype; ShapeError for too
    many or too few."""
    learned, given = tuple(ALL[name].learned), tuple(() if alphas is None else alphas)
    if len(given) != len(learned):
        wanted = ", ".join(learned) if learned else f"None for {name}"
        raise ShapeError(operation, "alphas", f"{len(given)} arrays", wanted)
    made = [as_array(operation, key, value) for key, value in zip(learned, given, strict=True)]
    return dict(zip(learned, in_dtype_of(x, *made), strict=True))


def words_of(activation_type: Any) -> tuple[str, ...]:
    """Returns the words of an activation as ``ACTIVATION_TYPES`` spells them; none for what has no words."""
    given = tuple(activation_type) if isinstance(activation_type, tuple | list) else ()
    if not all(isinstance(word, str) for word in given):
        return ()
    words = tuple({"swish": "silu"}.get(word.lower(), word.lower()) for word in given)
    return words[::-1] if words[:1] in (("linear",), ("clamped_linear",)) else words


def composed_of(
    operation: str, activation_type: Any, params: Any, argument: str = "activation_params", alphas: Any = None
) -> list[Any]:
    """Returns jax.nn's functions of an activation that is made of them, none of one of ``ACTIVATION_TYPES``
    and of what is none. FormatError for numbers of the former."""
    words = words_of(activation_type)
    if words in ACTIVATION_TYPES or not all(word in FUNCTIONS for word in words):
        return []
    for name, given in ((argument, params), ("alphas", alphas)):
        if given is not None and words:
            raise FormatError(operation, name, shown(given), f"None with {words}")
    return [jax.nn.identity if word == "linear" else getattr(jax.nn, word) for word in words]


def learned_of(operation: str, activation_type: Any, params: Any = None) -> Mapping[str, float]:
    """Returns the values that an activation's learned numbers start at, by their names. FormatError for an
    activation that there is not."""
    if composed_of(operation, activation_type, params):
        return {}
    return ALL[activation_of(operation, activation_type, params)[0]].learned


def activation_of(
    operation: str,
    activation_type: Sequence[str],
    params: Mapping[str, float] | None,
    argument: str = "activation_params",
) -> tuple[str, tuple[float, ...]]:
    """fp8kit's name of an activation and its numbers; FormatError for one that no kernel has, and for unknown
    parameters."""
    kinds = tuple(activation_type) if isinstance(activation_type, Sequence) else ()
    name = ACTIVATION_TYPES.get(words_of(activation_type))
    if name is None:
        known = ", ".join(map(str, ACTIVATION_TYPES))
        asked = (activation_type,) if isinstance(activation_type, str) else kinds
        alike = {kind[0]: kind for kind in ACTIVATION_TYPES if len(kind) == len(asked)}
        word = str(asked[0]) if asked else ""
        near = f"; did you mean {alike[word]}?" if word in alike else meant(word, alike)
        raise FormatError(operation, "activation_type", shown(activation_type), f"one of {known}{near}")
    if params is not None and not isinstance(params, Mapping):
        raise FormatError(
            operation, argument, type(params).__name__, "a mapping of names to numbers, or None"
        )
    return name, activation_numbers(operation, name, params)
