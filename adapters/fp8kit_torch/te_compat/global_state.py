"""``FP8GlobalStateManager``: what programs ask and tell Transformer Engine about the FP8 state of the moment,
answered from ``autocast``."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8kit.autocast import commit_touched, current, entered, leave_all, touch_forward
from fp8kit.errors import ArgumentError
from fp8kit.recipe import Recipe
from fp8kit_torch import availability, recompute
from fp8kit_torch.autocast import autocast, reduction_group
from fp8kit_torch.quantized import held_now
from fp8kit_torch.state import ScalingState
from fp8kit_torch.te_compat.capture import is_graph_capturing

_MISSING = "autocast keeps this state here, and updates it by itself"


class _Asked(threading.local):
    outermost: Any = None  # the autocast whose first module has asked


_asked = _Asked()
# what ``copy_forward_fp8_meta_tensors_for_recompute`` keeps of a state, and what comes back after that
_stashed: weakref.WeakKeyDictionary[ScalingState, deque[list[Tensor]]] = weakref.WeakKeyDictionary()
_newest: weakref.WeakKeyDictionary[ScalingState, list[Tensor]] = weakref.WeakKeyDictionary()
_skips: list[Tensor] = []


class _ByHand(autocast):
    """An autocast that ``autocast_enter`` has entered, and those that ``set_autocast_state`` has put within
    it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.within: list[autocast] = []


def _innermost_by_hand() -> _ByHand | None:
    return next((scope for scope, _ in reversed(entered()) if isinstance(scope, _ByHand)), None)


class _Names(type):
    """Reads of the state by the names that it has had as attributes."""

    def __getattr__(cls, name: str) -> Any:
        found = _READS.get(name)
        if found is not None:
            return found()
        raise AttributeError(f"fp8kit_torch: {cls.__name__} has no {name}: {_MISSING}")


class FP8GlobalStateManager(metaclass=_Names):
    """All about the calling thread or task. ``quantization_state.fp8_enabled`` and so on, and ``FP8_ENABLED``
    and so on of older versions, are read only. There are no others: AttributeError."""

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Whether modules compute in FP8 now."""
        state = current()
        return state is not None and state.enabled

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        """Whether the innermost autocast calibrates."""
        state = current()
        return state is not None and state.calibrating

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        """Whether modules that are made now hold their weights in FP8."""
        return held_now() is not None

    @classmethod
    def with_high_precision_init_val(cls) -> bool:
        """Whether such weights keep the values they were cast from."""
        held = held_now()
        return held is not None and held.preserve

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        """The recipe of the innermost autocast, the default one outside of any."""
        state = current()
        return availability.get_default_recipe() if state is None else state.recipe

    @classmethod
    def get_fp8_group(cls) -> Any:
        """The process group over which its amaxes are reduced; None for all processes."""
        return reduction_group()

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """True the first time it is asked within an outermost autocast, False from then on."""
        stack = entered()
        outermost = stack[0] if stack else None
        first, _asked.outermost = outermost is not None and _asked.outermost is not outermost, outermost
        return first

    @classmethod
    def fp8_graph_capturing(cls) -> bool:
        """Whether a CUDA graph is being captured."""
        return is_graph_capturing()

    is_fp8_available = staticmethod(availability.check_fp8_support)
    is_fp8_block_scaling_available = staticmethod(availability.check_fp8_block_scaling_support)
    is_mxfp8_available = staticmethod(partial(availability.is_mxfp8_available, True))

    @classmethod
    def is_nvfp4_available(cls) -> Any:
        """(whether, why not), see ``is_nvfp4_available``."""
        return availability.is_nvfp4_available(return_reason=True)

    # --- autocast by hand -----------------------------------------------------------------------------------

    @classmethod
    def autocast_enter(
        cls,
        enabled: bool = False,
        calibrating: bool = False,
        fp8_recipe: Recipe | None = None,
        fp8_group: Any = None,
        _graph: bool = False,
    ) -> None:
        """Enter an ``autocast``, which ``autocast_exit`` leaves. Its errors."""
        _ByHand(enabled, calibrating, fp8_recipe, fp8_group, _graph).__enter__()

    @classmethod
    def autocast_exit(cls, enabled: bool = True, _graph: bool = False) -> None:
        """Leave what ``autocast_enter`` has entered last, and ``set_autocast_state`` has put within it.
        ArgumentError where there is none. What was entered says by itself whether scales are updated."""
        scope = _innermost_by_hand()
        if scope is None:
            wanted = "one that autocast_enter has entered"
            raise ArgumentError("FP8GlobalStateManager.autocast_exit", "autocast", "none", wanted)
        while scope.within:
            scope.within.pop().__exit__(None, None, None)
        scope.__exit__(None, None, None)

    @classmethod
    def get_autocast_state(cls) -> tuple[Any, ...]:
        """(enabled, recipe or None, calibrating, group, whether no module has asked ``is_first_fp8_module``,
        whether a graph is captured), for ``set_autocast_state``."""
        state, stack = current(), entered()
        unasked = bool(stack) and _asked.outermost is not stack[0]
        recipe = None if state is None else state.recipe
        asked = cls.is_fp8_enabled(), recipe, cls.is_fp8_calibration()
        return (*asked, reduction_group(), unasked, cls.fp8_graph_capturing())

    @classmethod
    def set_autocast_state(cls, state: tuple[Any, ...]) -> None:
        """Let what ``get_autocast_state`` said hold again: until ``autocast_exit``. ArgumentError outside of
        ``autocast_enter``, unless it holds already: nothing would end it."""
        enabled, recipe, calibrating, group, *_ = state
        now = cls.get_autocast_state()
        if now[:4] == (enabled, recipe, calibrating, group):
            return
        scope = _innermost_by_hand()
        if scope is None:
            wanted = "a call between autocast_enter and autocast_exit"
            raise ArgumentError("FP8GlobalStateManager.set_autocast_state", "state", "another one", wanted)
        put = autocast(enabled, calibrating, recipe, group)
        put.__enter__()
        scope.within.append(put)

    @classmethod
    def reset(cls) -> None:
        """Leave every autocast of this thread; what unfinished steps recorded is dropped. Not to be called
        within one."""
        leave_all()
        _asked.outermost = None
        _skips.clear()
        _stashed.clear()
        _newest.clear()
        recompute.forget_phases()

    # --- delayed scaling's states ---------------------------------------------------------------------------

    @staticmethod
    def get_meta_tensor_key(forward: bool = True) -> str:
        """The name of a module's ``fp8_meta`` entry."""
        return "scaling_fwd" if forward else "scaling_bwd"

    @staticmethod
    def get_fwd_bwd_key(forward: bool = True) -> str:
        """The direction as a word."""
        return "forward" if forward else "backward"

    @classmethod
    def get_buffer_info(cls) -> str:
        """A name that Transformer Engine has in ``fp8_meta``; there is no such entry here."""
        return "buffer_index_and_autocast_key"

    @staticmethod
    def get_unique_autocast_key(recipe: Recipe | None = None, group: Any = None) -> str:
        """A text that is the same for equal recipes and the same group."""
        return f"recipe={recipe!r},group={None if group is None else id(group)}"

    @classmethod
    def get_key_in_buffer(cls, forward: bool, fp8_recipe: Recipe, fp8_group: Any) -> str:
        """Such a text for one direction."""
        return f"{cls.get_fwd_bwd_key(forward)}_{cls.get_unique_autocast_key(fp8_recipe, fp8_group)}"

    @classmethod
    def split_key_in_buffer(cls, key: str) -> tuple[bool, str]:
        """(whether it is of the forward direction, the rest), of what ``get_key_in_buffer`` gave."""
        direction, rest = key.split("_", 1)
        return direction == "forward", rest

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, fp8_meta: Mapping[str, Any]) -> None:
        """Have a module's forward state updated when the outermost autocast ends, as layers do by themselves;
        nothing where it has none, and outside of autocast."""
        state, scope = fp8_meta.get("scaling_fwd"), current()
        if not isinstance(state, ScalingState) or scope is None or scope.recipe.history is None:
            return
        if scope.enabled or scope.calibrating:
            touch_forward(state, scope.recipe, torch.is_grad_enabled())

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        """Update the forward states that this autocast's modules have recorded in, now instead of at its end.
        Backward states are updated at the end of the pass in any case."""
        if forward:
            commit_touched()

    @staticmethod
    def reduce_tensor_across_group_op_max(tensor: Tensor, group: Any) -> None:
        """The maximum over the group's processes, in place; nothing where torch.distributed is not set up."""
        known = torch.distributed
        if known.is_available() and known.is_initialized():
            known.all_reduce(tensor, op=known.ReduceOp.MAX, group=group)

    @classmethod
    def copy_forward_fp8_meta_tensors_for_recompute(cls, fp8_meta: Mapping[str, Any]) -> None:
        """Keep the forward scales and amaxes of a module as they are, for its recomputation."""
        state = fp8_meta.get("scaling_fwd")
        if isinstance(state, ScalingState):
            _stashed.setdefault(state, deque()).append([part.clone() for part in state.parts])

    @classmethod
    def get_old_fp8_meta_tensors_for_recompute(cls, fp8_meta: Mapping[str, Any]) -> None:
        """Give the module what was kept first and not given yet. ArgumentError where nothing is kept."""
        state = fp8_meta.get("scaling_fwd")
        if isinstance(state, ScalingState):
            if not _stashed.get(state):
                of = "FP8GlobalStateManager.get_old_fp8_meta_tensors_for_recompute"
                wanted = "a call of copy_forward_fp8_meta_tensors_for_recompute for each"
                raise ArgumentError(of, "fp8_meta", "a state of which nothing is kept", wanted)
            _newest[state] = [part.clone() for part in state.parts]
            _put(state, _stashed[state].popleft())

    @staticmethod
    def restore_fp8_meta_tensors(fp8_meta: Mapping[str, Any]) -> None:
        """Give the module back what it had before that."""
        state = fp8_meta.get("scaling_fwd")
        if isinstance(state, ScalingState) and state in _newest:
            _put(state, _newest.pop(state))

    # --- graphs ---------------------------------------------------------------------------------------------

    @classmethod
    def set_skip_fp8_weight_update_tensor(cls, skip: bool) -> None:
        """Keep the flag for ``get_skip_fp8_weight_update_tensor``; graphs go by ``is_first_microbatch``."""
        if not _skips:
            _skips.append(torch.empty(1, device="cuda" if torch.cuda.is_available() else "cpu"))
        _skips[0].fill_(skip)

    @classmethod
    def get_skip_fp8_weight_update_tensor(cls) -> Tensor | None:
        """What was kept: float32 (1,); None at first."""
        return _skips[0] if _skips else None

    # names of older versions
    fp8_autocast_enter = autocast_enter
    fp8_autocast_exit = autocast_exit
    get_fp8_autocast_state = get_autocast_state
    set_fp8_autocast_state = set_autocast_state


def _put(state: ScalingState, values: list[Tensor]) -> None:
    with torch.no_grad():
        for part, value in zip(state.parts, values, strict=True):
            part.copy_(value)


class _State:
    """``quantization_state``: the state of the moment by Transformer Engine's names, read only."""

    def __getattr__(self, name: str) -> Any:
        found = _FIELDS.get(name)
        if found is None:
            raise AttributeError(f"fp8kit_torch: quantization_state has no {name}: {_MISSING}")
        return found()

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"fp8kit_torch: quantization_state.{name} is read only: {_MISSING}")


def _group() -> Any:
    return FP8GlobalStateManager.get_fp8_group()


_FIELDS: dict[str, Callable[[], Any]] = {
    "fp8_enabled": FP8GlobalStateManager.is_fp8_enabled,
    "fp8_calibration": FP8GlobalStateManager.is_fp8_calibration,
    "fp8_recipe": lambda: None if (state := current()) is None else state.recipe,
    "fp8_distributed_group": _group,
    "fp8_parameters": FP8GlobalStateManager.with_fp8_parameters,
    "high_precision_init_val": FP8GlobalStateManager.with_high_precision_init_val,
    "is_first_fp8_module": lambda: FP8GlobalStateManager.get_autocast_state()[4],
    "fp8_graph_capturing": FP8GlobalStateManager.fp8_graph_capturing,
    "autocast_depth": lambda: len(entered()),
    "skip_fp8_weight_update_tensor": FP8GlobalStateManager.get_skip_fp8_weight_update_tensor,
}
# as attributes of the class, in the versions before 2.12
_READS: dict[str, Callable[[], Any]] = {name.upper(): read for name, read in _FIELDS.items()} | {
    "FP8_AUTOCAST_DEPTH": _FIELDS["autocast_depth"],
    "HIGH_PRECISION_INIT_VAL": _FIELDS["high_precision_init_val"],
    "quantization_state": _State,
}
