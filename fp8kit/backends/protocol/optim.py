"""The contract of what works on many tensors at once: optimisers, loss scaling, clipping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol.spec import kernel, workspace_of


def _norm_workspace(kernels: Any, a: Any) -> int:
    return int(kernels.l2norm_workspace([x.size for x in a.xs]))


class Optimizers(Protocol):
    """Optimisers, loss scaling, clipping."""

    @kernel(updates="params exp_avgs exp_avg_sqs masters", rounded={"params": "masters"})
    def adamw_(
        self,
        params: Sequence[ArrayView],
        grads: Sequence[ArrayView],
        exp_avgs: Sequence[ArrayView],
        exp_avg_sqs: Sequence[ArrayView],
        masters: Sequence[ArrayView | None],
        lr: float | ArrayView,
        beta1: float,
        beta2: float,
        epsilon: float,
        weight_decays: Sequence[float],
        step: int | ArrayView,
        inv_scale: ArrayView | None,
        found_inf: ArrayView | None,
        stream: int,
    ) -> None:
        """AdamW (Loshchilov & Hutter 2019, algorithm 2) on lists of tensors. params, grads: h; exp_avg,
        exp_avg_sq: float32; master: float32 where the parameter is 16 bits wide, else None: then the update
        is made on the master and the parameter is its rounding. m = b1 m + (1 - b1) g; v = b2 v + (1 - b2)
        g^2; w -= lr * (m / (1 - b1^step) / (sqrt(v / (1 - b2^step)) + epsilon) + decay * w).

        lr: a number or float32 [1]; step: a number from 1 or int64 [1]: arrays are read on the device, so
        that a captured graph sees their new values. inv_scale: float32 [1] or None: g = grad * inv_scale, in
        float32. found_inf: float32 [1] or None: where it is not 0, nothing changes."""

    @kernel(updates="params buffers masters", rounded={"params": "masters"})
    def sgd_(
        self,
        params: Sequence[ArrayView],
        grads: Sequence[ArrayView],
        buffers: Sequence[ArrayView | None],
        masters: Sequence[ArrayView | None],
        lr: float | ArrayView,
        momentum: float,
        dampening: float,
        nesterov: bool,
        weight_decays: Sequence[float],
        step: int | ArrayView,
        inv_scale: ArrayView | None,
        found_inf: ArrayView | None,
        stream: int,
    ) -> None:
        """SGD with momentum (Sutskever et al. 2013; dampening as PyTorch's SGD has it) on lists of tensors.
        buffers: float32, None where momentum is 0; everything else as in ``adamw_``. g = grad + decay w; b =
        g at step 1, else momentum b + (1 - dampening) g; w -= lr * (g + momentum b with nesterov, else b)."""

    @kernel(updates="xs found_inf", exact=True)
    def scale_(
        self, xs: Sequence[ArrayView], factor: ArrayView | None, found_inf: ArrayView | None, stream: int
    ) -> None:
        """x *= factor[0] for every tensor, rounded once, and found_inf[0] = 1 where any element of any x was
        Inf or NaN before (else it stays as it is). xs: h; factor, found_inf: float32 [1] or None: not
        multiplied, not looked at."""

    @kernel(updates="scale inv_scale good_steps found_inf", exact=True)
    def loss_scale_(
        self,
        scale: ArrayView,
        inv_scale: ArrayView,
        good_steps: ArrayView,
        found_inf: ArrayView,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        stream: int,
    ) -> None:
        """Dynamic loss scaling (Micikevicius et al. 2018, section 3.2). scale, inv_scale, found_inf: float32
        [1]; good_steps: int64 [1]. found_inf not 0: scale *= backoff_factor, good_steps = 0. Else good_steps
        += 1, and at growth_interval scale *= growth_factor (unless that is Inf) and good_steps = 0. Then
        inv_scale = 1 / scale and found_inf = 0."""

    @kernel(updates="counter", exact=True)
    def count_(self, counter: ArrayView, found_inf: ArrayView | None, stream: int) -> None:
        """counter[0] += 1, unless found_inf is given and not 0. counter: int64 [1]; found_inf: float32 [1] or
        None."""

    @kernel(writes="out", ordered=True, workspace=_norm_workspace)
    def l2norm(
        self, xs: Sequence[ArrayView], out: ArrayView, workspace: ArrayView | None, stream: int
    ) -> None:
        """out[0] = sqrt(sum of squares of every element), in a fixed order. xs: h; out: float32 [1]."""

    @workspace_of("l2norm")
    def l2norm_workspace(self, sizes: Sequence[int]) -> int:
        """Bytes of ``l2norm``'s workspace for tensors of these sizes."""

    @kernel(updates="xs")
    def clip_(self, xs: Sequence[ArrayView], norm: ArrayView, max_norm: float, stream: int) -> None:
        """x *= min(1, max_norm / (norm[0] + 1e-6)) for every tensor. xs: h; norm: float32 [1]."""
