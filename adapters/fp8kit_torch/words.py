"""What errors call the inputs of operations: the arguments and parameters of a layer."""

from __future__ import annotations

from collections.abc import Sequence

# an operation's input -> what errors call it: the argument of forward, or the parameter
_LAYERS = {
    "q": "query_layer",
    "k": "key_layer",
    "v": "value_layer",
    "kv": "kv_layer",
    "qkv": "qkv_layer",
    "bias": "core_attention_bias",
    "mask": "attention_mask",
}
_PARAMETERS = {
    "x": "inp",
    "weight0": "weight",
    "bias0": "bias",
    "norm_weight": "layer_norm_weight",
    "norm_bias": "layer_norm_bias",
    "fc1_weight0": "fc1_weight",
    "fc1_bias0": "fc1_bias",
    "fc2_weight0": "fc2_weight",
    "fc2_bias0": "fc2_bias",
}
_ARGUMENTS = {
    "attention": _LAYERS,
    "cached_attention": _LAYERS,
    "linear": _PARAMETERS,
    "norm_linear": _PARAMETERS,
    "norm_mlp": _PARAMETERS,
    "norm": {"x": "inp", "norm_weight": "weight", "norm_bias": "bias"},
    "cross_entropy": {"logits": "inp", "targets": "target"},
}


def argument_of(operation: str, name: str, names: Sequence[str]) -> str:
    """What errors call an operation's input: a parameter in several segments keeps its number."""
    several = name.endswith("0") and f"{name[:-1]}1" in names
    return name if several else _ARGUMENTS.get(operation, {}).get(name, name)
