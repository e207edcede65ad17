"""Arguments of Transformer Engine that have one supported value, its default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fp8kit.arguments import shown
from fp8kit.errors import UnsupportedError

_GROUP = {"sequence_parallel": False, "tp_group": None, "tp_size": 1, "get_rng_state_tracker": None}
_OVERLAP = {
    "ub_overlap_ag": False,
    "ub_overlap_rs": False,
    "ub_overlap_rs_dgrad": False,
    "ub_bulk_dgrad": False,
    "ub_bulk_wgrad": False,
}
_WEIGHT = _GROUP | _OVERLAP | {"delay_wgrad_compute": False, "symmetric_ar_type": None}
_WHOLE = _GROUP | {"set_parallel_mode": False}

# constructor -> its arguments
CONSTRUCTOR: dict[str, dict[str, Any]] = {
    "Linear": _WEIGHT
    | {"ub_name": None, "rng_tracker_name": None, "parallel_mode": None, "save_original_input": False},
    "LayerNorm": {"sequence_parallel": None, "sm_margin": 0},
    "RMSNorm": {"sequence_parallel": None, "sm_margin": 0},
    "LayerNormLinear": _WEIGHT
    | {"ub_name": None, "parallel_mode": None, "return_layernorm_output_gathered": False},
    "LayerNormMLP": _WEIGHT | {"set_parallel_mode": False, "return_layernorm_output_gathered": False},
    "DotProductAttention": _GROUP
    | {
        "return_max_logit": False,
        "cp_group": None,
        "cp_global_ranks": None,
        "cp_stream": None,
        "cp_comm_type": "p2p",
    },
    "MultiheadAttention": _WHOLE | _OVERLAP,
    "TransformerLayer": _WHOLE
    | {
        "ub_tp_comm_overlap": False,
        "ub_overlap_ag": True,
        "ub_overlap_rs": True,
        "ub_overlap_rs_dgrad": False,
        "ub_bulk_dgrad": True,
        "ub_bulk_wgrad": True,
    },
}

# a ``forward`` that takes more than its own arguments -> these
FORWARD: dict[str, dict[str, Any]] = {
    "DotProductAttention": {
        "fp8_output": False,
        "bf16_backward": False,
        "num_splits": 1,
        "score_mod": None,
        "score_mod_bprop": None,
        "score_mod_tensors": None,
        "score_mod_bprop_tensors": None,
    }
}


def refuse(operation: str, table: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """UnsupportedError for arguments of ``table``, name -> the one supported value, that have another one.
    ``arguments``: all of the call by name, its ``locals()`` say."""
    refuse_others(operation, {name: (arguments[name], supported) for name, supported in table.items()})


def refuse_others(operation: str, values: Mapping[str, tuple[Any, Any]]) -> None:
    """UnsupportedError for arguments, name -> (value, what is supported), that have another value."""
    for name, (value, supported) in values.items():
        plain = isinstance(value, str | int | float | np.generic | None)
        if value is not supported and not (plain and value == supported):
            raise UnsupportedError(
                operation, name, shown(value), f"{supported!r}: nothing else is supported yet"
            )
