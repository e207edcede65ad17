"""What every operation of the kernel contract writes, and a look through its arguments: the contract's texts
as a table.

Arguments hold arrays in four ways: alone, in lists, in a ``Cast`` or a list of those, in ``AttentionExtras``.
``walk`` goes through all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol import Cast

# Operation -> arguments that it writes. "+": what stands there before matters (accumulated, changed in place,
# or not written everywhere). Operations that only answer with a number write nothing.
_WRITES = {
    "amax": "amax+",
    "amax_many": "amaxes+",
    "scale_from_amax": "scale scale_inv",
    "update_delayed_": "scales+ scale_invs+ histories+",
    "quantize": "q scale_inv amax+",
    "dequantize": "x",
    "quantize_transpose": "cast dbias",
    "quantize_transpose_many": "casts",
    "block_quantize": "q scale_inv q_t scale_inv_t",
    "block_quantize_many": "qs scale_invs q_ts scale_inv_ts",
    "gemm": "out",
    "fp8_gemm": "out",
    "block_gemm": "out",
    "norm_fwd": "y mean rstd amax+ cast",
    "norm_bwd": "dx dweight dbias",
    "act_fwd": "y amax+ cast",
    "act_bwd": "dx dbias amax+ cast",
    "dropout_add": "y",
    "dropout_bwd": "dx dbias",
    "drop_path": "y",
    "attention_fwd": "o lse",
    "attention_bwd": "dq dk dv dbias doffset",
    "unpack_sequences": "y",
    "pack_sequences": "y",
    "cache_append_": "cache+",
    "cache_gather": "y",
    "rope_fwd": "y",
    "rope_bwd": "dx",
    "embedding_fwd": "out",
    "embedding_bwd": "dtable",
    "cross_entropy_fwd": "loss lse total",
    "cross_entropy_bwd": "dlogits",
    "adamw_": "params+ exp_avgs+ exp_avg_sqs+ masters+",
    "sgd_": "params+ buffers+ masters+",
    "scale_": "xs+ found_inf+",
    "loss_scale_": "scale+ inv_scale+ good_steps+ found_inf+",
    "count_": "counter+",
    "l2norm": "out",
    "clip_": "xs+",
    "copy": "y",
    "add": "out",
    "sum_rows": "out",
    "rng_next_": "state+ out",
}
_CAST = ("q", "q_t", "scale", "scale_inv", "amax")  # a Cast's arrays


class Output(NamedTuple):
    """An array that a call writes: its ``name`` ("q", "cast.q_t", "params[3]"), the array, whether its former
    content matters (``kept``), and the ``argument`` and ``cast`` that it belongs to."""

    name: str
    view: ArrayView
    kept: bool
    argument: str
    cast: Cast | None = None


def walk(value: Any, change: Callable[[ArrayView], ArrayView]) -> Any:
    """An argument with every array in it replaced by ``change(array)``."""
    if isinstance(value, ArrayView):
        return change(value)
    if isinstance(value, Cast):
        arrays = {name: walk(getattr(value, name), change) for name in _CAST}
        return Cast(value.format, **arrays, rule=value.rule)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(walk(part, change) for part in value))
    if isinstance(value, list | tuple):
        return type(value)(walk(part, change) for part in value)
    return value


def views(arguments: dict[str, Any]) -> list[ArrayView]:
    """Every array among the arguments, in order."""
    found: list[ArrayView] = []

    def note(view: ArrayView) -> ArrayView:
        found.append(view)
        return view

    for value in arguments.values():
        walk(value, note)
    return found


def outputs(operation: str, arguments: dict[str, Any]) -> Iterator[Output]:
    """Every array that a call with these arguments writes."""
    for word in _WRITES.get(operation, "").split():
        name, plus, _ = word.partition("+")
        value, kept = arguments[name], bool(plus)
        if isinstance(value, ArrayView | Cast):
            yield from _written(name, value, kept, name)
        elif value is not None:
            for i, part in enumerate(value):
                yield from _written(f"{name}[{i}]", part, kept, name)


def _written(name: str, value: ArrayView | Cast | None, kept: bool, argument: str) -> Iterator[Output]:
    """The outputs in one array, in one Cast, or in nothing."""
    if isinstance(value, ArrayView):
        yield Output(name, value, kept, argument)
    elif value is not None:
        for part in ("q", "q_t", "scale_inv", "amax"):
            view = getattr(value, part)
            if view is not None:
                yield Output(f"{name}.{part}", view, part == "amax", argument, value)
