"""The contract of Adam on states that are kept in fewer bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol.spec import kernel, workspace_of
from fp8kit.moments import StateFormats


def _space(kernels: Any, a: Any) -> int:
    return int(kernels.encoded_adam_workspace([x.size for x in a.params], a.formats))


class EncodedAdams(Protocol):
    """Adam on encoded states."""

    @kernel(
        updates="params exp_avgs exp_avg_scales exp_avg_sqs exp_avg_sq_scales masters master_scales",
        workspace=_space,
        ordered=True,
    )
    def encoded_adam_(
        self,
        params: Sequence[ArrayView],
        grads: Sequence[ArrayView],
        exp_avgs: Sequence[ArrayView],
        exp_avg_scales: Sequence[ArrayView | None],
        exp_avg_sqs: Sequence[ArrayView],
        exp_avg_sq_scales: Sequence[ArrayView | None],
        masters: Sequence[ArrayView | None],
        master_scales: Sequence[ArrayView | None],
        formats: StateFormats,
        decoupled: bool,
        lr: float | ArrayView,
        beta1: float,
        beta2: float,
        epsilon: float,
        weight_decays: Sequence[float],
        step: int | ArrayView,
        inv_scale: ArrayView | None,
        found_inf: ArrayView | None,
        workspace: ArrayView | None,
        stream: int,
    ) -> None:
        """``adamw_`` with moments and masters in ``formats`` (``fp8kit.moments``): they are decoded, the step
        is made in float32, and what it gives is encoded with new factors. Every operation is a float32 one
        with one rounding, to nearest even, in the order of the formulas, none fused: engines agree bit for
        bit, expansion included, whose log2 and exp2 are ``backends.reference.encoded_adam``'s.

        exp_avgs, exp_avg_sqs: of ``formats``'s dtypes; their scales float32, of ``MomentFormat.scales``'s
        shape, None where there are none. masters: None for float32 parameters; float32; int16, signed: the
        master's bits are (bits of the bfloat16 parameter << 16) + master; float16: the master is master *
        master_scales (float32 [1], else None), and the parameter where that is 0, as it is at first.
        decoupled: False adds decay * w to the gradient instead. h parameters are the new master, before it
        is encoded, rounded; those with a remainder half away from zero. The rest is as in ``adamw_``, with
        1 - beta^step of ``moments.bias_correction``.

        Codes are to nearest even and saturate. NaN is not looked at for factors and becomes NaN; what shares
        a factor with Inf becomes NaN. A factor for the tensor takes two passes over memory: the first finds
        the amaxes, the second makes the step again and encodes it."""

    @workspace_of("encoded_adam_")
    def encoded_adam_workspace(self, sizes: Sequence[int], formats: StateFormats) -> int:
        """Bytes of ``encoded_adam_``'s workspace for tensors of these sizes."""
