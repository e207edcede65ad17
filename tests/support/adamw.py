"""AdamW in float64, and gradients that a test gives."""

from __future__ import annotations

import numpy as np

from fp8kit.autograd import tensor


class Model:
    """AdamW in float64 (Loshchilov & Hutter 2019, algorithm 2)."""

    def __init__(self, w):
        self.w, self.m, self.v, self.t = w.astype(float), np.zeros(w.shape), np.zeros(w.shape), 0

    def step(self, g, lr, betas, eps, decay):
        self.t += 1
        self.m = betas[0] * self.m + (1 - betas[0]) * g
        self.v = betas[1] * self.v + (1 - betas[1]) * g * g
        m, v = self.m / (1 - betas[0] ** self.t), self.v / (1 - betas[1] ** self.t)
        self.w -= lr * (m / (np.sqrt(v) + eps) + decay * self.w)


def give(param, g):
    param.grad = tensor(g.copy(), device=param.device).view
