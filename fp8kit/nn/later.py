"""Arguments of Transformer Engine's classes that have one supported value so far: accepted with that value, else refused by name.

One table a constructor, and one a ``forward`` that takes more than its own arguments; values are Transformer Engine's defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fp8kit.arguments import shown
from fp8kit.errors import ArgumentError, expected

_GROUP = {"sequence_parallel": False, "tp_group": None, "tp_size": 1, "get_rng_state_tracker": None}
_OVERLAP = {"ub_overlap_ag": False, "ub_overlap_rs": False, "ub_overlap_rs_dgrad": False, "ub_bulk_dgrad": False, "ub_bulk_wgrad": False}
_WEIGHT = _GROUP | _OVERLAP | {"fuse_wgrad_accumulation": False, "ub_name": None, "delay_wgrad_compute": False, "symmetric_ar_type": None}
_WHOLE = _GROUP | {"set_parallel_mode": False, "fuse_wgrad_accumulation": False}

CONSTRUCTOR: dict[str, dict[str, Any]] = {
    "Linear": _WEIGHT | {"rng_tracker_name": None, "parallel_mode": None, "save_original_input": False},
    "LayerNorm": {"sequence_parallel": None},
    "RMSNorm": {"sequence_parallel": None},
    "LayerNormLinear": _WEIGHT | {"parallel_mode": None, "return_layernorm_output_gathered": False},
    "LayerNormMLP": _WEIGHT | {"set_parallel_mode": False, "return_layernorm_output_gathered": False},
    "DotProductAttention": _GROUP | {
        "return_max_logit": False, "cp_group": None, "cp_global_ranks": None, "cp_stream": None,
        "cp_comm_type": "p2p",
    },
    "MultiheadAttention": _WHOLE | _OVERLAP,
    "TransformerLayer": _WHOLE | {
        "ub_tp_comm_overlap": False, "ub_overlap_ag": True, "ub_overlap_rs": True, "ub_overlap_rs_dgrad": False, "ub_bulk_dgrad": True,
        "ub_bulk_wgrad": True,
    },
}  # fmt: skip

FORWARD: dict[str, dict[str, Any]] = {
    "DotProductAttention": {
        "fp8_output": False, "bf16_backward": False, "num_splits": 1, "score_mod": None, "score_mod_bprop": None,
        "score_mod_tensors": None, "score_mod_bprop_tensors": None,
    },
}  # fmt: skip


def later(operation: str, table: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse arguments that are not in ``table`` (TypeError), or whose value is not the supported one (Fp8kitError, "yet")."""
    for name in given:
        if name not in table:
            raise TypeError(f"{operation}: unexpected argument {name!r}")
    not_yet(operation, {name: (value, table[name]) for name, value in given.items()})


def not_yet(operation: str, only: Mapping[str, tuple[Any, Any]]) -> None:
    """Refuse arguments, name -> (value, what is supported), that have another value. Fp8kitError."""
    for name, (value, supported) in only.items():
        plain = isinstance(value, bool | int | float | str | np.generic)
        if value is not supported and not (plain and value == supported):
            raise ArgumentError(expected(operation, name, shown(value), f"{supported!r}: nothing else is supported yet"))
