"""``norm``: LayerNorm, RMSNorm and L2 normalisation alone; ``NormSpec`` and the checks that the fused
operations share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fp8kit.arguments import choice
from fp8kit.backends.protocol import Cast
from fp8kit.errors import FormatError
from fp8kit.formats import float32
from fp8kit.ops.partition import RowWise
from fp8kit.ops.product import row_count, want, want_rows
from fp8kit.spec import Meta, Metas, Needs, Plan, Signature, Views, WorkingSet, workspace


@dataclass(frozen=True)
class NormSpec:
    """``features``: size of the last dimension, over which rows are normalised. ``normalization``:
    "LayerNorm" or "RMSNorm"."""

    features: int
    normalization: str = "LayerNorm"
    epsilon: float = 1e-5
    zero_centered_gamma: bool = False

    known: ClassVar[tuple[str, ...]] = ("LayerNorm", "RMSNorm")
    identity: ClassVar[bool] = False  # whether there is none: a fused operation begins with x itself

    def __post_init__(self) -> None:
        choice("norm", "normalization", self.normalization, self.known, FormatError)

    @property
    def centered(self) -> bool:
        """Whether the mean is subtracted and a bias added (LayerNorm)."""
        return self.normalization == "LayerNorm"

    def inputs(self) -> tuple[str, ...]:
        """Names of the parameters."""
        return ("norm_weight", "norm_bias") if self.centered else ("norm_weight",)

    def check(self, operation: str, metas: Metas) -> Meta:
        """Check x and the parameters; returns x's meta."""
        x = want_rows(operation, "x", metas, self.features)
        for name in self.inputs():
            want(operation, name, metas, (self.features,), x.dtype)
        return x

    def saved(self, rows: int) -> dict[str, Meta]:
        """Statistics that backward needs."""
        stats = {"rstd": Meta((rows,), float32)}
        return stats | {"mean": Meta((rows,), float32)} if self.centered else stats

    def grads(self, x: Meta) -> dict[str, Meta]:
        """Gradients of x and the parameters."""
        return {"x": x} | {name: Meta((self.features,), x.dtype) for name in self.inputs()}

    def forward(self, ws: WorkingSet, y: Any, amax: Any = None, cast: Cast | None = None) -> None:
        """Normalise the rows of x to y, in FP8 with ``cast``, or both; ``saved`` gets the statistics."""
        inputs, saved = ws.inputs, ws.saved
        parameters = inputs.get("norm_weight"), inputs.get("norm_bias")
        y_statistics_and_cast = y, saved.get("mean"), saved["rstd"], amax, cast
        settings = self.normalization, self.epsilon, self.zero_centered_gamma
        ws.kernels.norm_fwd(inputs["x"].rows(), *parameters, *y_statistics_and_cast, *settings, ws.stream)

    def backward(self, ws: WorkingSet, dy: Any, residual: Any = None) -> None:
        """The gradients of x and the parameters; ``residual``, a cotangent like x, is added to that of x."""
        inputs, saved, grads = ws.inputs, ws.saved, ws.outputs
        statistics = saved.get("mean"), saved["rstd"]
        base = None if residual is None else residual.rows()
        gradients = grads["x"].rows(), grads.get("norm_weight"), grads.get("norm_bias")
        settings = self.normalization, self.zero_centered_gamma, ws.scratch["workspace"]
        x, weight = inputs["x"].rows(), inputs.get("norm_weight")
        ws.kernels.norm_bwd(dy, x, weight, *statistics, base, *gradients, *settings, ws.stream)


@dataclass(frozen=True)
class L2NormSpec(NormSpec):
    """y = x / sqrt(sum of x^2 + epsilon), without parameters: of ``norm`` alone, no fused operation has
    it."""

    normalization: str = "L2Normalization"
    epsilon: float = 1e-6

    known: ClassVar[tuple[str, ...]] = ("L2Normalization",)

    def inputs(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True)
class NoNormSpec(NormSpec):
    """No norm before a fused operation's first product: of ``norm_linear`` and ``norm_mlp``."""

    normalization: str = "none"

    known: ClassVar[tuple[str, ...]] = ("none",)
    identity: ClassVar[bool] = True

    def inputs(self) -> tuple[str, ...]:
        return ()

    def saved(self, rows: int) -> dict[str, Meta]:
        return {}


class Norm(RowWise):
    """y = norm(x). Inputs: x h (..., N), norm_weight, norm_bias h (N,) where the norm has them. Output: y.
    Gradients of all."""

    name = "norm"
    parameters = ("weight", "bias")
    arguments: ClassVar[Mapping[str, str]] = {"x": "inp", "norm_weight": "weight", "norm_bias": "bias"}

    def infer(self, spec: NormSpec, metas: Metas, needs: Needs) -> Signature:
        x = spec.check(self.name, metas)
        kept = ("x", *spec.inputs()[:1])
        return Signature({"y": x}, spec.saved(row_count(x)), kept, spec.grads(x) if needs else {})

    def plan(self, spec: NormSpec, metas: Metas, needs: Needs, kernels: Any) -> Plan:
        x = spec.check(self.name, metas)
        space = workspace(kernels.norm_bwd_workspace(row_count(x), spec.features))
        return Plan(spec, self.infer(spec, metas, needs), kernels, {}, space)

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        plan.spec.forward(ws, ws.outputs["y"].rows())

    def backward(self, plan: Plan, ws: WorkingSet, cotangents: Views) -> None:
        plan.spec.backward(ws, cotangents["y"].rows())


norm = Norm()
