"""AdamW on lists of tensors: one kernel call for all parameters that share their hyperparameters.

Source: Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fp8kit.arguments import number
from fp8kit.autograd import Tensor
from fp8kit.errors import ArgumentError
from fp8kit.optim.base import Batch, Group, Hyper, Optimizer, rate


class AdamW(Optimizer):
    """AdamW ::

        m = beta1 m + (1 - beta1) g          v = beta2 v + (1 - beta2) g^2
        w = w - lr (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay w)

    ``params``, ``lr``, ``write_fp8_weights``, masters and errors: see ``Optimizer``. m and v (``exp_avg``,
    ``exp_avg_sq``) are float32 and start at 0; t counts the parameter's own steps.
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
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, write_fp8_weights
        )

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
        return ("exp_avg", "exp_avg_sq")

    def update(self, kernels: Any, batch: Batch, stream: int) -> None:
        kernels.adamw_(*batch.columns("exp_avg", "exp_avg_sq"), *batch.numbers(), stream)
