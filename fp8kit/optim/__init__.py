"""Optimisers and what goes with them."""

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
