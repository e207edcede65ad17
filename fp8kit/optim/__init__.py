"""Optimisers and what goes with them."""

from fp8kit.optim.adamw import AdamW
from fp8kit.optim.clip import clip_grad_norm_, warmup_cosine

__all__ = ["AdamW", "clip_grad_norm_", "warmup_cosine"]
