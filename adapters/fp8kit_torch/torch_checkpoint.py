"""What torch's checkpoint shows of itself while it runs a function: the one place that knows torch's own
names for it.

``torch.utils.checkpoint`` says nowhere that it runs, but holds the function that backward is to call again in
an object that can be found:

* ``use_reentrant=False``: in the ``_CheckpointFrame`` of the hooks on saved tensors that it has put up, as
  ``recompute_fn``;
* ``use_reentrant=True``: in the ``ctx`` of the ``autograd.Function`` whose ``forward`` runs, as
  ``run_function``. Megatron's and DeepSpeed's checkpoints, which are made after torch's, have it there too.

Found so, it may be replaced by one that does more. The names are those of torch 2.11 to 2.13; with a torch
that has others, what would give wrong numbers is a BackendError.
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

Hook = Callable[..., Any]
_FIRST, _LATER = "_checkpoint_hook.", "_recomputation_hook."  # where its hooks are made


def _torchs(where: Any, name: str) -> Any:
    """What torch has by that name. BackendError for a torch that has not."""
    if not hasattr(where, name):
        got = f"{torch.__version__}, which has no {getattr(where, '__name__', where)}.{name}"
        raise BackendError("fp8kit_torch", "torch", got, "torch 2.11 to 2.13, whose checkpoint fp8kit knows")
    return getattr(where, name)


_top = _torchs(torch._C._autograd, "_top_saved_tensors_default_hooks")
_pop = _torchs(torch._C._autograd, "_pop_saved_tensors_default_hooks")
_push = _torchs(torch._C._autograd, "_push_saved_tensors_default_hooks")
# not within the forward of an autograd.Function, nor in inference mode
_plain = _torchs(torch._C, "_is_fwd_grad_enabled")
# a context in which a selective checkpoint's mode does not count calls
unseen = _torchs(torch._C, "_DisableTorchDispatch")
for _name in ("_checkpoint_hook", "_recomputation_hook"):
    _torchs(checkpoint, _name)


def apart() -> bool:
    """Whether this is certainly not within a checkpointed function that torch runs for the first time, nor
    for another time with its hooks up. Two calls of torch, so that it may be asked in every call of a layer.
    """
    return _top(True) is None and (_plain() or torch.is_inference_mode_enabled())


def hook() -> Hook | None:
    """What packs the tensors that are saved now."""
    pair = _top(True)
    return None if pair is None else pair[0]


def frames(until: Hook | None) -> list[Any]:
    """The ``_CheckpointFrame``s of the functions that run for the first time, innermost first, as far as the
    hook ``until``. BackendError for hooks of torch's checkpoint that are not known."""
    found, taken = [], []
    try:
        while (pair := _top(True)) is not None and pair[0] is not until:
            pack = pair[0]
            if _torchs_own(pack) and not pack.__qualname__.startswith(_LATER):
                found.append(_frame_of(pack))
            taken.append(pair)
            _pop()
    finally:
        for pair in reversed(taken):
            _push(*pair)
    return found


def _torchs_own(pack: Hook | None) -> bool:
    return getattr(pack, "__module__", None) == checkpoint.__name__


def again() -> bool:
    """Whether torch runs a checkpointed function for another time, by its innermost hooks."""
    pack = hook()
    return _torchs_own(pack) and pack.__qualname__.startswith(_LATER)  # type: ignore[union-attr]


def _frame_of(pack: Any) -> Any:
    names = getattr(getattr(pack, "__code__", None), "co_freevars", ())
    held = (
        pack.__closure__[names.index("frame")].cell_contents
        if pack.__qualname__.startswith(_FIRST) and "frame" in names
        else None
    )
    if not hasattr(held, "recompute_fn"):
        got = f"{pack.__qualname__} of torch {torch.__version__}"
        wanted = (
            "torch 2.11 to 2.13, whose checkpoint fp8kit knows; or layers of FP8 outside of "
            "torch.utils.checkpoint"
        )
        raise BackendError("torch.utils.checkpoint", "hooks", got, wanted)
    return held


def contexts(until: CodeType | None) -> Iterator[Any]:
    """The ``ctx`` of the functions that run for the first time, reentrant, and that backward will come back
    to; innermost first, as far as a Python frame of the code ``until``."""
    if _plain() or torch.is_inference_mode_enabled():
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
        if type(frame.f_locals.get("self")).__name__ == "CheckpointHigherOrderVariable":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
