"""What torch's checkpoint shows of itself while it runs a function.

``torch.utils.checkpoint`` says nowhere that it runs, but holds the function that backward is to call again in
an object that can be found:

* ``use_reentrant=False``: in the ``_CheckpointFrame`` of the hooks on saved tensors that it has put up, as
  ``recompute_fn``;
* ``use_reentrant=True``: in the ``ctx`` of the ``autograd.Function`` whose ``forward`` runs, as
  ``run_function``. Megatron's and DeepSpeed's checkpoints, which are made after torch's, have it there too.

Found so, it may be replaced by one that does more. With a torch that does this in another way, what would
give wrong numbers is a BackendError.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch.autograd.function import FunctionCtx
from torch.utils import checkpoint

from fp8kit.errors import BackendError
from fp8kit_torch.torch_compat import (
    FIRST_PASS,
    KNOWN,
    LATER_PASS,
    TRACED_CHECKPOINT,
    forward_grad_enabled,
    pop_hooks,
    push_hooks,
    top_hooks,
)

Hook = Callable[..., Any]


def outside() -> bool:
    """Whether this is certainly not within a checkpointed function that torch runs for the first time, nor
    for another time with its hooks up. Two calls of torch, so that it may be asked in every call of a layer.
    """
    return top_hooks(True) is None and (forward_grad_enabled() or torch.is_inference_mode_enabled())


def hook() -> Hook | None:
    """What packs the tensors that are saved now."""
    pair = top_hooks(True)
    return None if pair is None else pair[0]


def frames(until: Hook | None) -> list[Any]:
    """The ``_CheckpointFrame``s of the functions that run for the first time, innermost first, as far as the
    hook ``until``. BackendError for hooks of torch's checkpoint that are not known."""
    found, taken = [], []
    try:
        while (pair := top_hooks(True)) is not None and pair[0] is not until:
            pack = pair[0]
            if _torchs_own(pack) and not pack.__qualname__.startswith(LATER_PASS):
                found.append(_frame_of(pack))
            taken.append(pair)
            pop_hooks()
    finally:
        for pair in reversed(taken):
            push_hooks(*pair)
    return found


def _torchs_own(pack: Hook | None) -> bool:
    return getattr(pack, "__module__", None) == checkpoint.__name__


def recomputing() -> bool:
    """Whether torch runs a checkpointed function for another time, by its innermost hooks."""
    pack = hook()
    return _torchs_own(pack) and pack.__qualname__.startswith(LATER_PASS)  # type: ignore[union-attr]


def _frame_of(pack: Any) -> Any:
    names = getattr(getattr(pack, "__code__", None), "co_freevars", ())
    held = (
        pack.__closure__[names.index("frame")].cell_contents
        if pack.__qualname__.startswith(FIRST_PASS) and "frame" in names
        else None
    )
    if not hasattr(held, "recompute_fn"):
        got = f"{pack.__qualname__} of torch {torch.__version__}"
        wanted = f"{KNOWN}, whose checkpoint fp8kit knows; or layers of FP8 outside of torch.utils.checkpoint"
        raise BackendError("torch.utils.checkpoint", "hooks", got, wanted)
    return held


def contexts(until: CodeType | None) -> Iterator[Any]:
    """The ``ctx`` of the functions that run for the first time, reentrant, and that backward will come back
    to; innermost first, as far as a Python frame of the code ``until``."""
    if forward_grad_enabled() or torch.is_inference_mode_enabled():
        return
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not until:
        code = frame.f_code
        if code.co_name == "forward" and code.co_varnames[:1] == ("ctx",):
            ctx = frame.f_locals["ctx"]
            if (
                isinstance(ctx, FunctionCtx)
                and callable(getattr(ctx, "run_function", None))
                and ctx.next_functions
            ):  # type: ignore[attr-defined]
                yield ctx
        frame = frame.f_back  # type: ignore[assignment]


@torch.compiler.assume_constant_result
def traced() -> bool:
    """Within ``torch.compile``: whether what is traced is a checkpointed function, by the frames of Dynamo's
    own tracing of it."""
    frame = sys._getframe(1)
    while frame is not None:
        if type(frame.f_locals.get("self")).__name__ == TRACED_CHECKPOINT:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
