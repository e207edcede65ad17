"""Arguments of Transformer Engine that have one supported value, its default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fp8kit.arguments import shown
from fp8kit.errors import UnsupportedError

_GROUP = {"get_rng_state_tracker": None}
_WEIGHT = _GROUP | {"delay_wgrad_compute": False}

# constructor -> its arguments; a frontend that has a rule for one of them (``Layer.constructor_rules``) goes
# by that
CONSTRUCTOR: dict[str, dict[str, Any]] = {
    "Linear": _WEIGHT,
    "LayerNormLinear": _WEIGHT,
    "LayerNormMLP": _WEIGHT,
    "DotProductAttention": _GROUP | {"return_max_logit": False},
    "MultiheadAttention": _GROUP,
    "TransformerLayer": _GROUP,
}

_OVERLAP = "no argument chooses what runs beside products"
_ONE = "one process has the whole of each tensor"
# arguments of constructors that change nothing where one process works -> why; their rules are in
# ``fp8kit.layers.arguments``
WITHOUT_EFFECT: dict[str, str] = {
    **dict.fromkeys(
        (
            "ub_overlap_ag",
            "ub_overlap_rs",
            "ub_overlap_rs_dgrad",
            "ub_bulk_dgrad",
            "ub_bulk_wgrad",
            "ub_tp_comm_overlap",
            "ub_name",
            "symmetric_ar_type",
        ),
        _OVERLAP,
    ),
    "cp_global_ranks": "the group knows its ranks",
    "cp_stream": "communication is on the stream of the kernels",
    "num_splits": "kernels choose their own splits",
    "sm_margin": "kernels take the multiprocessors that the GPU gives them",
    "save_original_input": "what is kept for backward follows from the recipe; the numbers are the same",
    "seq_length": "a hint for a warm-up that there is no need of",
    "micro_batch_size": "a hint for a warm-up that there is no need of",
}

# a ``forward`` that takes more than its own arguments -> these
FORWARD: dict[str, dict[str, Any]] = {
    "DotProductAttention": {
        "score_mod": None,
        "score_mod_bprop": None,
        "score_mod_tensors": None,
        "score_mod_bprop_tensors": None,
    }
}


_SCORES = "the kernels of attention do not call functions; core_attention_bias and masks change scores"
# why no other value is there
REASONS: dict[str, str] = {
    "get_rng_state_tracker": "only the PyTorch frontend has random states by name",
    "delay_wgrad_compute": "only the PyTorch frontend hands gradients over later",
    "return_max_logit": "only the PyTorch frontend computes scores beside its kernels",
    "fp8_output": "only the PyTorch frontend has tensors of codes",
    **dict.fromkeys(
        ("score_mod", "score_mod_bprop", "score_mod_tensors", "score_mod_bprop_tensors"), _SCORES
    ),
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
            why = f"; {REASONS[name]}" if name in REASONS else ""
            wanted = f"{supported!r}: nothing else is supported yet{why}"
            raise UnsupportedError(operation, name, shown(value), wanted)
