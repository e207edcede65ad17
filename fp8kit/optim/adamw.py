"""AdamW on lists of tensors: one kernel call for all parameters that share their hyperparameters.

Source: Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fp8kit import arrays
from fp8kit.arguments import number
from fp8kit.arrays import ArrayView
from fp8kit.autograd import Tensor
from fp8kit.errors import ArgumentError
from fp8kit.formats import DType, Format, float16, float32, uint8
from fp8kit.moments import MomentFormat, StateFormats, state_formats
from fp8kit.optim.base import Batch, Group, Hyper, Kind, Optimizer, rate

# the arrays of a parameter whose states are encoded, in the order of the kernel's arguments
_ENCODED = ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale", "master_scale")


class AdamW(Optimizer):
    """AdamW ::

        m = beta1 m + (1 - beta1) g          v = beta2 v + (1 - beta2) g^2
        w = w - lr (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay w)

    ``params``, ``lr``, ``write_fp8_weights``, masters and errors: see ``Optimizer``. m and v (``exp_avg``,
    ``exp_avg_sq``) start at 0; t counts the parameter's own steps.

    ``states``: how m, v and masters are kept between steps, float32 by default: a preset's name, "ms_amp",
    "fishman", "coat", "block_128" or "block_256", or ``StateFormats``. ``exp_avg_dtype`` and
    ``exp_avg_sq_dtype``, a ``MomentFormat``, or a format (``fk.E4M3``) or its name, and ``master_dtype``,
    "float32", "remainder" or "float16", take the place of the preset's part. The step
    itself is made in float32. In ``state_dict`` the factors are ``exp_avg_scale.i``, ``exp_avg_sq_scale.i``
    and ``master_scale.i``, the formats ``state_formats``; a state in other formats is refused.
    """

    columns = ("lr", "beta1", "beta2", "eps", "weight_decay")

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Mapping[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        write_fp8_weights: bool = False,
        *,
        states: str | StateFormats = "fp32",
        exp_avg_dtype: str | Format | DType | MomentFormat | None = None,
        exp_avg_sq_dtype: str | Format | DType | MomentFormat | None = None,
        master_dtype: str | None = None,
    ) -> None:
        self.formats = state_formats("AdamW", states, exp_avg_dtype, exp_avg_sq_dtype, master_dtype)
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, write_fp8_weights
        )
        masters = [self.master_dtype(param.view) for param in self._params()]
        if master_dtype not in (None, "float32") and not any(masters):
            got = f"{master_dtype!r} for float32 parameters alone, which have no master"
            raise ArgumentError("AdamW", "master_dtype", got, "None")

    def flat(self, group: Mapping[str, Any]) -> Hyper:
        try:
            beta1, beta2 = group["betas"]
        except (TypeError, ValueError):
            raise ArgumentError("AdamW", "hyperparameters: betas", group["betas"], "two numbers") from None
        betas = (number("AdamW", "betas", beta, 1) for beta in (beta1, beta2))
        others = (number("AdamW", name, group[name]) for name in ("eps", "weight_decay"))
        return (rate("AdamW", group["lr"]), *betas, *others)

    def nest(self, values: Sequence[float]) -> Group:
        return {"betas": (values[1], values[2]), "eps": values[3], "weight_decay": values[4]}

    def slots(self, values: Sequence[float]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq") if self.formats.plain else _ENCODED

    def kind(self, name: str, param: ArrayView) -> Kind | None:
        if name == "master_scale":
            return ((1,), float32) if self.master_dtype(param) is float16 else None
        moment = name.removesuffix("_scale")
        kept: MomentFormat = getattr(self.formats, moment)
        if moment == name:
            return param.shape, kept.dtype
        shape = kept.scales(param.size)
        return None if shape is None else (shape, float32)

    def master_dtype(self, param: ArrayView) -> DType | None:
        return self.formats.master_dtype(param.dtype)

    def notes(self) -> dict[str, ArrayView]:
        if self.formats.plain:
            return {}
        return {"state_formats": arrays.as_view(np.array(self.formats.numbers, np.int64))}

    def update(self, kernels: Any, batch: Batch, stream: int) -> None:
        if self.formats.plain:
            kernels.adamw_(*batch.columns("exp_avg", "exp_avg_sq"), *batch.numbers(), stream)
            return
        params, grads, *moments, master_scales, masters = batch.columns(*_ENCODED)
        space = kernels.encoded_adam_workspace([param.size for param in params], self.formats)
        workspace = arrays.empty((space,), uint8, batch.step.device) if space else None
        kernels.encoded_adam_(
            params,
            grads,
            *moments,
            masters,
            master_scales,
            self.formats,
            True,
            *batch.numbers(),
            workspace,
            stream,
        )
