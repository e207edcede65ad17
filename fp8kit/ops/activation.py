"""``activation``: the activations of ``backends.activation`` alone, without norm and products around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fp8kit.backends.activation import ACTIVATIONS
from fp8kit.errors import FormatError, ShapeError
from fp8kit.formats import uint8
from fp8kit.ops.norm_mlp import activation_numbers
from fp8kit.ops.product import row_count, want_rows
from fp8kit.spec import Meta, Metas, Operation, Plan, Signature, Views


@dataclass(frozen=True)
class ActivationSpec:
    """``activation``: a name of ``backends.activation``; ``features`` of the input, of a gated one twice the
    output's; ``params``: its numbers, see ``norm_mlp.activation_numbers``; () is the defaults."""

    activation: str
    features: int
    params: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        defaults = activation_numbers("activation", self.activation, None)
        if not self.params:
            object.__setattr__(self, "params", defaults)
        if len(self.params) != len(defaults):
            raise FormatError(
                "activation", "params", self.params, f"{len(defaults)} numbers for {self.activation}"
            )
        if self.features % ACTIVATIONS[self.activation].parts:
            raise ShapeError("activation", "features", self.features, f"an even number for {self.activation}")


class Activation(Operation):
    """y = activation(x). Input x h (..., F), or h (..., 2 F) of a gated one; output y h (..., F). Gradient of
    x."""

    name: ClassVar[str] = "activation"

    def infer(self, spec: ActivationSpec, metas: Metas, needs: frozenset[str]) -> Signature:
        x = want_rows(self.name, "x", metas, spec.features)
        y = Meta((*x.shape[:-1], spec.features // ACTIVATIONS[spec.activation].parts), x.dtype)
        return (
            Signature({"y": y}, {}, ("x",), {"x": Meta(x.shape, x.dtype)})
            if "x" in needs
            else Signature({"y": y})
        )

    def plan(self, spec: ActivationSpec, metas: Metas, needs: frozenset[str], kernels: Any) -> Plan:
        x = want_rows(self.name, "x", metas, spec.features)
        space = {"workspace": Meta((max(kernels.act_bwd_workspace(row_count(x), spec.features), 1),), uint8)}
        return Plan(spec, self.infer(spec, metas, needs), kernels, {}, space)

    def forward(
        self, plan: Plan, inputs: Views, outputs: Views, saved: Views, scratch: Views, stream: int
    ) -> None:
        s: ActivationSpec = plan.spec
        x, y = inputs["x"], outputs["y"]
        assert x is not None and y is not None
        plan.kernels.act_fwd(x.rows(), None, y.rows(), None, None, s.activation, s.params, stream)

    def backward(
        self,
        plan: Plan,
        kept: Views,
        saved: Views,
        cotangents: Views,
        grads: Views,
        scratch: Views,
        stream: int,
    ) -> None:
        s: ActivationSpec = plan.spec
        dy, x, dx, space = cotangents["y"], kept["x"], grads["x"], scratch["workspace"]
        assert dy is not None and x is not None and dx is not None
        plan.kernels.act_bwd(
            dy.rows(), x.rows(), None, dx.rows(), None, None, None, s.activation, s.params, space, stream
        )


activation = Activation()
