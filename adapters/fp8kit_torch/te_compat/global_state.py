"""``FP8GlobalStateManager``: what programs ask Transformer Engine about the FP8 state of the moment, answered
from ``autocast``."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import torch

from fp8kit.autocast import current, entered, leave_all
from fp8kit.recipe import Recipe
from fp8kit_torch import availability
from fp8kit_torch.autocast import reduction_group
from fp8kit_torch.quantized import held_now

_MISSING = "autocast keeps this state here, and updates it by itself"


class _Asked(threading.local):
    outermost: Any = None  # the autocast whose first module has asked


_asked = _Asked()


class _Names(type):
    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(f"fp8kit_torch: {cls.__name__} has no {name}: {_MISSING}")


class FP8GlobalStateManager(metaclass=_Names):
    """The methods that Megatron, NeMo and accelerate call; all about the calling thread. There are no others:
    AttributeError."""

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
        return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()

    @classmethod
    def get_meta_tensor_key(cls, forward: bool = True) -> str:
        """The name of a module's ``fp8_meta`` entry."""
        return "scaling_fwd" if forward else "scaling_bwd"

    @classmethod
    def reset(cls) -> None:
        """Leave every autocast of this thread; what unfinished steps recorded is dropped. Not to be called
        within one."""
        leave_all()
        _asked.outermost = None

    is_fp8_available = staticmethod(availability.check_fp8_support)
    is_fp8_block_scaling_available = staticmethod(availability.check_fp8_block_scaling_support)
    is_mxfp8_available = staticmethod(partial(availability.is_mxfp8_available, True))

    @classmethod
    def is_nvfp4_available(cls) -> Any:
        """(whether, why not), see ``is_nvfp4_available``."""
        return availability.is_nvfp4_available(return_reason=True)
