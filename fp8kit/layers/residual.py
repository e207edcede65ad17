"""How a layer's branches, norms and residual connections go together, in every frontend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fp8kit.errors import ArgumentError

# what some arguments go with: (argument, its value) -> others, and their values
_GOES_WITH: dict[tuple[str, Any], dict[str, Any]] = {
    ("parallel_attention_mlp", True): {
        "layer_type": "encoder",
        "output_layernorm": False,
        "apply_residual_connection_post_layernorm": False,
    },
    ("norm_position", "after"): {
        "parallel_attention_mlp": False,
        "output_layernorm": False,
        "apply_residual_connection_post_layernorm": False,
        "input_layernorm": False,
    },
    ("norm_position", "before"): {"norm_gain": None},
}


def want_arrangement(operation: str, arguments: Mapping[str, Any]) -> None:
    """ArgumentError for arguments of a layer's constructor, by name, that say where its norms and its
    branches are and do not go together. Those that the frontend does not have are left out."""
    for (given, asked), others in _GOES_WITH.items():
        for argument, usual in others.items() if arguments.get(given) == asked else ():
            value = arguments.get(argument, usual)
            value = bool(value) if usual is False else value
            if value != usual:
                beside = given if asked is True else f"{given} {asked!r}"
                got = repr(value) if isinstance(value, str) else value
                raise ArgumentError(operation, argument, got, f"{usual!r} with {beside}")


def residual_sum(
    branch: Any,
    bias: Any,
    residual: Any,
    dropout: float,
    path: float,
    dropout_add: Callable[[Any, Any, Any], Any],
    drop_path: Callable[[Any, Any], Any],
) -> Any:
    """Returns residual + dropout(branch + bias), whole samples of dropout(...) dropped too.

    ``bias``: an array or None; ``dropout``, ``path``: the two probabilities. ``dropout_add(x, bias,
    residual)``, residual None for none, and ``drop_path(x, residual)``: the operations, called where there is
    something for them to do."""
    if not path or dropout or bias is not None:
        branch = dropout_add(branch, bias, None if path else residual)
    return drop_path(branch, residual) if path else branch
