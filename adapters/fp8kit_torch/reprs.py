"""What ``print(module)`` says of each module, as torch's own modules say it: one table.

Read from the module itself, at the time of printing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

_ALWAYS = object()


class _Field(NamedTuple):
    """``label``: the constructor's argument; ``path``: attributes from the module to the value; ``usual``: a
    value that is not printed."""

    label: str
    path: str
    usual: Any = _ALWAYS


def _fields(*always: str, **usual: Any) -> tuple[_Field, ...]:
    """Fields that are attributes by their label, and those with a usual value."""
    return *(_Field(name, name) for name in always), *(_Field(name, name, own) for name, own in usual.items())


_WEIGHTS = (*_fields("in_features", "out_features"), _Field("bias", "use_bias"))
_MORE = _fields(return_bias=False, fuse_wgrad_accumulation=False)
_SPLIT = (_Field("parameters_split", "_split", {}),)
_FUSED_NORM = (
    _Field("normalization", "_spec.norm.normalization"),
    _Field("eps", "_spec.norm.epsilon"),
    _Field("zero_centered_gamma", "_spec.norm.zero_centered_gamma", False),
    *_fields(return_layernorm_output=False),
)
_NORM = (
    _Field("", "_spec.features"),
    _Field("eps", "_spec.epsilon"),
    _Field("zero_centered_gamma", "_spec.zero_centered_gamma", False),
)

# class, or a base of it -> its fields
TABLE: dict[str, tuple[_Field, ...]] = {
    "Linear": (*_WEIGHTS, *_SPLIT, *_MORE),
    "LayerNormLinear": (*_WEIGHTS, *_FUSED_NORM, *_SPLIT, *_MORE),
    "LayerNormMLP": (
        *_fields("hidden_size", "ffn_hidden_size"),
        _Field("bias", "use_bias"),
        *_fields("activation"),
        *_FUSED_NORM,
        *_fields(checkpoint=False),
        *_MORE,
    ),
    "GroupedLinear": (*_fields("num_gemms"), *_WEIGHTS, *_MORE),
    "LayerNorm": _NORM,
    "RMSNorm": _NORM,
    "L2Normalization": _fields("eps"),
    "DotProductAttention": _fields(
        "num_attention_heads",
        "kv_channels",
        "num_gqa_groups",
        "attn_mask_type",
        "qkv_format",
        attention_dropout=0.0,
        window_size=(-1, -1),
        softmax_type="vanilla",
        softcap=0.0,
        attention_type="self",
    ),
    "MultiheadAttention": _fields("hidden_size", "attention_type", "input_layernorm", return_bias=False),
    "TransformerLayer": _fields(
        "hidden_size", "layer_type", "hidden_dropout", drop_path_rate=0.0, parallel_attention_mlp=False
    ),
}


def described(module: torch.nn.Module) -> str:
    """The text between the parentheses: the module's sizes, and what is not as usual. Nothing for a class
    that the table does not have."""
    fields = next((TABLE[kind.__name__] for kind in type(module).__mro__ if kind.__name__ in TABLE), ())
    return ", ".join(_said(module, fields))


def _said(module: torch.nn.Module, fields: tuple[_Field, ...]) -> Iterator[str]:
    for label, path, usual in fields:
        value: Any = module
        for name in path.split("."):
            value = getattr(value, name)
        if isinstance(value, dict):  # of segments: names as they were given, without the one of no split
            value = {name.rstrip("_"): size for name, size in value.items() if name}
        if usual is _ALWAYS or value != usual:
            yield f"{label}={value}" if label else f"{value}"
