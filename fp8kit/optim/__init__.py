"""Optimisers and what goes with them."""

from typing import Any as _Any

from fp8kit import errors as _errors
from fp8kit.moments import PRESETS, MomentFormat, StateFormats
from fp8kit.optim.adamw import AdamW
from fp8kit.optim.base import Optimizer
from fp8kit.optim.clip import clip_grad_norm_, warmup_cosine
from fp8kit.optim.scaler import GradScaler
from fp8kit.optim.sgd import SGD
from fp8kit.optim.sharded import ShardedOptimizer

__all__ = [
    "PRESETS",
    "SGD",
    "AdamW",
    "GradScaler",
    "MomentFormat",
    "Optimizer",
    "ShardedOptimizer",
    "StateFormats",
    "clip_grad_norm_",
    "warmup_cosine",
]


def __getattr__(name: str) -> _Any:
    why = _errors.meant(name, __all__)
    raise AttributeError(f"module 'fp8kit.optim' has no attribute {name!r}{why}", name=name)
