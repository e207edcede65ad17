"""Norms like those of other libraries, which ``convert`` knows by what they compute."""

from __future__ import annotations

import torch
from torch import nn


class LlamaLikeRMSNorm(nn.Module):
    """Another library's: x / rms(x) * weight."""

    def __init__(self, size):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.rand(size) + 0.5), 1e-5

    def forward(self, x):
        wide = x.float()
        return self.weight * (
            wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        ).to(x.dtype)


class GemmaLikeRMSNorm(LlamaLikeRMSNorm):
    """x / rms(x) * (1 + weight)."""

    def forward(self, x):
        wide = x.float()
        return (
            wide
            * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            * (1 + self.weight.float())
        ).to(x.dtype)
