"""``thd_attention_policies``: sequences of one packed call that attend by different masks and windows.

Each policy is a call over all tokens for which its own sequences alone exist: running sums of their lengths,
and where they start. Kernels read them where they lie and write zeros between them, so that the outputs' sum
is what all of them attend to. No token is moved; a policy costs one more pass over the output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fp8kit.arguments import shown
from fp8kit.errors import ArgumentError, UnsupportedError
from fp8kit.layers.attention_inputs import CORE_OPTIONS
from fp8kit.ops.dropout_add import add

POLICIES = "thd_attention_policies"
_KEYS = ("sequence_ids", "mask_type", "window_size", "bottom_right_diagonal")  # the last may be left out
# what a call with policies leaves as it is -> why
_EACH = "each policy says its own"
_ONE = "policies are of sequences that are attended to as they are"
_LEFT = {
    "attn_mask_type": _EACH,
    "window_size": _EACH,
    "attention_mask": "cu_seqlens_q and cu_seqlens_kv say the lengths",
    "inference_params": "the steps of a cache have one mask",
    **dict.fromkeys(("core_attention_bias_type", "core_attention_bias", "alibi_slopes", "fp8_output"), _ONE),
}
_IDS = "int32", "int64"  # dtypes of sequence_ids, which are indices


class _Policy(NamedTuple):
    """The numbers of some sequences, int (n,), and the arguments of their call."""

    ids: Any
    options: dict[str, Any]


def check(core: Any, options: Mapping[str, Any], like: Any) -> list[_Policy]:
    """Returns the policies of a call of ``core``, a ``DotProductAttention``, that have sequences.
    ``options``: ``forward``'s arguments by name; ``like``: one of its layers. ArgumentError for what no
    policy is, and for sequences that several have or none, where they lie on the CPU; UnsupportedError for
    what a call with policies does not have."""
    op, given = core.layer_name, options[POLICIES]
    form = options.get("qkv_format") or core.qkv_format
    if form != "thd":
        raise ArgumentError(op, "qkv_format", repr(form), f"'thd', with {POLICIES}")
    refused = {name: (options.get(name), why) for name, why in _LEFT.items()}
    refused["cp_group"] = core.context, "ranks have parts of the sequences"
    refused["return_max_logit"] = core.return_max_logit, _ONE
    for name, (value, why) in refused.items():
        if not (value is None or value is False or (isinstance(value, str) and value == "no_bias")):
            usual = CORE_OPTIONS.get(name)
            raise UnsupportedError(op, name, shown(value), f"{usual!r} beside {POLICIES}: {why}")
    if not isinstance(given, list | tuple) or not given:
        raise ArgumentError(op, POLICIES, shown(given), "a list of policies")
    found = [_policy(core, policy, options.get("bottom_right_diagonal"), like) for policy in given]
    sums = options.get("cu_seqlens_q")
    if sums is None or options.get("cu_seqlens_kv") is None:
        raise ArgumentError(op, "cu_seqlens_q, cu_seqlens_kv", None, f"int32 (batch + 1,), with {POLICIES}")
    batch, count = sums.shape[0] - 1, sum(policy.ids.shape[0] for policy in found)
    views = core.host_views({str(i): policy.ids for i, policy in enumerate(found)}).values()
    known = [view.numpy() for view in views if view.device.kind == "cpu"]
    if any((np.diff(ids) <= 0).any() for ids in known):
        raise ArgumentError(
            op, POLICIES, "sequence_ids that do not rise", "sequence_ids, each above the last"
        )
    numbers = np.sort(np.concatenate(known)) if len(known) == len(found) else np.arange(count)
    if not np.array_equal(numbers, np.arange(batch)):
        raise ArgumentError(op, POLICIES, f"sequences {numbers.tolist()}", f"each of {batch} in one policy")
    return [policy for policy in found if policy.ids.shape[0]] or found[:1]


def _policy(core: Any, policy: Any, corner: Any, like: Any) -> _Policy:
    op = core.layer_name
    if not isinstance(policy, Mapping) or not set(_KEYS[:3]) <= set(policy) <= set(_KEYS):
        got = sorted(map(str, policy)) if isinstance(policy, Mapping) else shown(policy)
        raise ArgumentError(op, POLICIES, got, f"policies of {', '.join(_KEYS[:3])} and perhaps {_KEYS[3]}")
    own = policy.get(_KEYS[3])
    options = {
        "attn_mask_type": policy["mask_type"],
        "window_size": policy["window_size"],
        "bottom_right_diagonal": corner if own is None else own,
    }
    core.check_arguments(options)
    if "padding" not in (policy["mask_type"] or ""):
        wanted = "one of the padding masks, as mask_type of a policy"
        raise ArgumentError(op, "attn_mask_type", repr(policy["mask_type"]), wanted)
    ids = policy["sequence_ids"]
    if len(getattr(ids, "shape", ())) != 1 or str(getattr(ids, "dtype", "")).split(".")[-1] not in _IDS:
        raise ArgumentError(op, POLICIES, shown(ids), "sequence_ids, int32 or int64 (n,), rising")
    return _Policy(core.constant("sequence_ids", ids, like), options)


def attend(core: Any, layers: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Returns the output of a call with policies: ``layers`` and ``options`` are ``forward``'s other
    arguments by name."""
    like = next(layer for layer in layers.values() if layer is not None)
    rest = {name: value for name, value in options.items() if not name.startswith("thd_")}
    sums = {
        name: core.constant(name, value, like)
        for name, value in rest.items()
        if name.startswith("cu_seqlens") and value is not None
    }

    def of(ids: Any, side: str) -> dict[str, Any]:
        name = f"cu_seqlens_{side}"
        lengths, starts = sums[name], sums.get(f"{name}_padded", sums[name])
        return {
            name: core.indices(_running, lengths, ids),
            f"{name}_padded": core.indices(_starts, starts, ids),
        }

    total = None
    for ids, own in check(core, options, like):
        o = core.forward(**layers, **rest | own | of(ids, "q") | of(ids, "kv"))
        total = o if total is None else core.call(add, core.spec_for("AddSpec"), {"a": total, "b": o})["y"]
    return total


def _running(library: Any, sums: Any, ids: Any) -> Any:
    """Returns the running sums of the lengths of some sequences."""
    return library.concatenate([sums[:1] * 0, (sums[ids + 1] - sums[ids]).cumsum(0)])


def _starts(library: Any, starts: Any, ids: Any) -> Any:
    """Returns where they start, and where the last sequence ends."""
    return library.concatenate([starts[ids], starts[-1:]])
