"""Unit scaling (Blake et al. 2023, arXiv:2303.11257; u-muP, Blake et al. 2024, arXiv:2407.17465), once for
every frontend: operations whose outputs and gradients have a size near 1 where their inputs have, by constant
factors that are not the same forward and backward. So the recipe "static", casts without scales, holds
them.

``UnitScaling`` has the functions; a frontend gives it its own operations. ``linear_factors`` and the others
are the formulas, with their names in the papers: ``interpolated(a, lo, hi)`` is lo^(1 - a) hi^a.

With ``constraint`` "to_output_scale", the library's default, a gradient's factor is the output's where both
are the same tensor's (parameters keep their own), so that the function is a multiple of the unscaled one;
None has the gradients' own factors, which are right where the function's inputs are used nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from fp8kit.arguments import choice, integer, number
from fp8kit.errors import ArgumentError, ShapeError
from fp8kit.layers.base import Init
from fp8kit.layers.linear import Linear as SharedLinear
from fp8kit.ops.activation import activation as activation_operation
from fp8kit.ops.cross_entropy import cross_entropy
from fp8kit.ops.dropout_add import add
from fp8kit.ops.embedding import embedding
from fp8kit.ops.linear import linear
from fp8kit.ops.norm import norm
from fp8kit.ops.scale_lines import scale_lines
from fp8kit.ops.softmax import mse, softmax
from fp8kit.spec import Operation

OUTPUT = "to_output_scale"
# what each frontend has as functions
FUNCTIONS = (
    "scale_fwd",
    "scale_bwd",
    "gelu",
    "silu",
    "silu_glu",
    "softmax",
    "matmul",
    "add",
    "residual_split",
    "residual_add",
    "dropout",
    "norm",
    "embedding",
    "cross_entropy",
    "mse",
    "attention",
)
_SMOOTH_HI = math.sqrt(2 / (1 - 1 / math.pi))
# activation -> (c of alpha = 1 / (1 + c / mult^2), lo, hi of the output, hi of the gradient)
_ACTIVATIONS = {
    "gelu": (0.25, 2.0, _SMOOTH_HI, math.sqrt(2.0)),
    "silu": (1.0, 2.0, _SMOOTH_HI, math.sqrt(2.0)),
    "swiglu": (1.0, 2.0, math.sqrt(2.0), math.sqrt(2.0)),
}
ROLES = ("hidden", "embedding", "output", "bias", "norm")


class Factors(NamedTuple):
    """What an output, the gradient of an input, and the gradients of parameters are multiplied by."""

    output: float
    input: float
    parameter: float = 1.0


def interpolated(alpha: float, low: float, high: float) -> float:
    """low^(1 - alpha) high^alpha."""
    return float(low ** (1 - alpha) * high**alpha)


def constrained(factors: Factors, constraint: str | None) -> Factors:
    """``factors`` with the input's as the constraint says. ArgumentError for another constraint."""
    if constraint is not None:
        choice("unit_scaling", "constraint", constraint, (OUTPUT,))
        return factors._replace(input=factors.output)
    return factors


def linear_factors(
    fan_in: int, fan_out: int, rows: int, readout: bool = False, constraint: str | None = OUTPUT
) -> Factors:
    """Returns the factors of y = x W^T + b for ``rows`` rows; ``readout``: y is a model's last product."""
    output = 1 / fan_in if readout else fan_in**-0.5
    return constrained(Factors(output, fan_out**-0.5, max(rows, 1) ** -0.5), constraint)


def matmul_factors(
    rows: int, inner: int, columns: int, constraint: str | None = OUTPUT
) -> tuple[float, float, float]:
    """Returns the factors of (rows x inner) (inner x columns): of the output, the left and the right
    gradient."""
    output, left, right = (max(n, 1) ** -0.5 for n in (inner, columns, rows))
    return output, *(constrained(Factors(output, own), constraint).input for own in (left, right))


def _alpha(c: float, mult: float) -> float:
    """Returns how far a function of mult x is from a straight line, in (0, 1)."""
    return 1 / (1 + c / number("unit_scaling", "mult", mult, above=0.0) ** 2)


def activation_factors(activation: str, constraint: str | None = OUTPUT, mult: float = 1.0) -> Factors:
    """Returns the factors of "gelu", "silu" or "swiglu" (silu(u) v of the two halves), as f(mult x) /
    mult."""
    c, low, high, slope = _ACTIVATIONS[choice("unit_scaling", "activation", activation, _ACTIVATIONS)]
    alpha = _alpha(c, mult)
    found = Factors(interpolated(alpha, low, high), interpolated(alpha, low, slope))
    return constrained(found, constraint)


def softmax_factors(features: int, constraint: str | None = OUTPUT, mult: float = 1.0) -> Factors:
    """Returns the factors of softmax(mult x) over so many features."""
    alpha, d = _alpha(4.0, mult), float(max(features, 1))
    found = Factors(interpolated(alpha, d, d**0.5), interpolated(alpha, d / mult, (d / mult) ** 0.5))
    return constrained(found, constraint)


def attention_factor(
    head_dim: int, length: int, causal: bool, mult: float = 1.0, dropout: float = 0.0
) -> float:
    """Returns the one factor of dropout(softmax(mult q k^T / head_dim)) v and of its three gradients."""
    spread = math.sqrt((math.log(length) if causal else 1.0) / length) if length > 1 else 1.0
    return math.sqrt(1 - dropout) / interpolated(_alpha(4.0 * head_dim, mult), spread, 1.0)


def _features(x: Any) -> int:
    """Returns the size of an array's last dimension. ShapeError where there is none."""
    if not x.shape:
        raise ShapeError("unit_scaling", "x", "no dimension", "at least one")
    return int(x.shape[-1])


def residual_factors(tau: float) -> tuple[float, float]:
    """Returns the factors of the branch and of the skip connection, at the join in forward and at the split
    in backward."""
    number("unit_scaling", "tau", tau, above=0.0)
    whole = math.sqrt(1 + tau * tau)
    return tau / whole, 1 / whole


def learning_rate_factor(role: str, fan_in: int = 1, branches: int = 1) -> float:
    """Returns what u-muP multiplies Adam's learning rate by for a parameter of deviation 1 (arXiv 2407.17465,
    table 2; muS, arXiv 2502.05967, has the same for hidden weights): a rate that is found on a narrow model
    then serves a wide one.

    * ``role``: "hidden", a weight between activations, and "embedding", a table: 1 / sqrt(fan_in);
      "output", the readout's weight, "bias" and "norm": 1.
    * ``fan_in``: input features of a hidden weight, features of a table.
    * ``branches``: of a parameter within residual branches how many of these the model has, two a
      transformer layer: 1 / sqrt(branches) more.

    ArgumentError for another role, and for numbers below 1.
    """
    choice("learning_rate_factor", "role", role, ROLES)
    integer("learning_rate_factor", "fan_in", fan_in, 1)
    integer("learning_rate_factor", "branches", branches, 1)
    wide = fan_in if role in ("hidden", "embedding") else 1
    return float((wide * branches) ** -0.5)


class UnitScaling:
    """The functions. A frontend's subclass gives ``operation``, ``dtype_name``, ``own_dropout``,
    ``constants`` and ``core_attention``, its class of attention, or ``own_attention``.

    Every function takes and returns arrays of the frontend, h of any leading dimensions, and raises what the
    operations raise.
    """

    # --- what a frontend gives ------------------------------------------------------------------------------

    core_attention: Any

    def operation(self, operation: Operation, spec: tuple[Any, ...], inputs: Mapping[str, Any]) -> Any:
        """Returns the first output of an operation of the frontend's arrays. ``spec``: of ``spec_object``."""
        raise NotImplementedError

    def dtype_name(self, x: Any) -> str:
        """fp8kit's name of an array's dtype."""
        raise NotImplementedError

    def own_dropout(self, x: Any, p: float, **random: Any) -> Any:
        """dropout(x), whose elements are dropped with probability p. ``random``: what the frontend draws
        from."""
        raise NotImplementedError

    def constants(self, values: list[float], like: Any) -> Any:
        """float32 [n] of some numbers, where the array ``like`` is."""
        raise NotImplementedError

    def own_attention(
        self, query: Any, key: Any, value: Any, scale: float, mask: str, p: float, **random: Any
    ) -> Any:
        """The core attention of layers (b, s, heads, d) with ``scale`` for the scores, a mask's name and
        dropout; returns the heads side by side, (b, s, heads d)."""
        options = {"attention_dropout": p, "qkv_format": "bshd", "attn_mask_type": mask, **random}
        core = self.core_attention(*query.shape[2:], key.shape[2], softmax_scale=scale, **options)
        return core(query, key, value)

    # --- functions ------------------------------------------------------------------------------------------

    def scale_fwd(self, x: Any, scale: float) -> Any:
        """scale x, whose gradient is dy as it is."""
        return self._scaled(x, scale, 1.0)

    def scale_bwd(self, x: Any, scale: float) -> Any:
        """x as it is, whose gradient is scale dy."""
        return self._scaled(x, 1.0, scale)

    def _scaled(self, x: Any, forward: float, backward: float) -> Any:
        if forward == backward == 1:
            return x
        return self.operation(scale_lines, ("ScaleLinesSpec", forward, backward), {"x": x})

    def _sum(self, a: Any, b: Any) -> Any:
        return self.operation(add, ("AddSpec",), {"a": a, "b": b})

    def _activation(self, x: Any, activation: str, constraint: str | None, mult: float) -> Any:
        output, gradient, _ = activation_factors(activation, constraint, mult)
        features = _features(x)
        spec = "ActivationSpec", activation, features
        if mult != 1 and activation == "swiglu":  # of the gate alone
            half = features // 2
            inputs = {"x": x, "scales": self.constants([mult] * half + [1.0] * (features - half), x)}
            x = self.operation(scale_lines, ("ScaleLinesSpec", 1.0, gradient, 1), inputs)
        else:
            x = self._scaled(x, mult, mult * gradient)
        y = self.operation(activation_operation, spec, {"x": x})
        return self._scaled(y, output / mult, 1 / mult)

    def gelu(self, x: Any, constraint: str | None = OUTPUT, mult: float = 1.0) -> Any:
        """gelu(mult x) / mult, GELU in its tanh form, times its constant."""
        return self._activation(x, "gelu", constraint, mult)

    def silu(self, x: Any, constraint: str | None = OUTPUT, mult: float = 1.0) -> Any:
        """x sigmoid(mult x), times its constant."""
        return self._activation(x, "silu", constraint, mult)

    def silu_glu(self, x: Any, constraint: str | None = OUTPUT, mult: float = 1.0) -> Any:
        """u sigmoid(mult u) v of the halves of x's last dimension, the gate's first, times a constant."""
        return self._activation(x, "swiglu", constraint, mult)

    def softmax(self, x: Any, constraint: str | None = OUTPUT, mult: float = 1.0) -> Any:
        """softmax(mult x) over the last dimension, times a constant."""
        features = _features(x)
        output, gradient, _ = softmax_factors(features, constraint, mult)
        x = self._scaled(x, mult, mult * gradient)
        return self.scale_fwd(self.operation(softmax, ("SoftmaxSpec", features), {"x": x}), output)

    def matmul(self, left: Any, right: Any, constraint: str | None = OUTPUT) -> Any:
        """left right / sqrt(n) of two activations, h (..., l, n) and (n, r), in high precision. Without a
        constraint their gradients are divided by sqrt(r) and by the root of left's rows."""
        if len(right.shape) != 2 or not left.shape or left.shape[-1] != right.shape[0]:
            got = f"{tuple(left.shape)} and {tuple(right.shape)}"
            raise ShapeError("unit_scaling", "left and right", got, "(..., l, n) and (n, r)")
        n, columns = right.shape
        factors = matmul_factors(math.prod(left.shape[:-1]), n, columns, constraint)
        inputs = {"x": self.scale_bwd(left, factors[1]), "weight0": self.scale_bwd(right, factors[2])}
        spec = "LinearSpec", n, (columns,), "io", "none"
        return self.scale_fwd(self.operation(linear, spec, inputs), factors[0])

    def add(self, a: Any, b: Any, constraint: str | None = OUTPUT) -> Any:
        """(a + b) / sqrt(2); b's shape is the end of a's, and where it is shorter its gradient is divided by
        the square root of how often it repeats, not with a constraint."""
        scale = 2**-0.5
        constrained(Factors(scale, 1.0), constraint)
        repeats = math.prod(a.shape) // max(math.prod(b.shape), 1)
        back = scale if constraint else max(repeats, 1) ** -0.5
        a = self.scale_bwd(a, scale if constraint else 1.0)
        return self.scale_fwd(self._sum(a, self.scale_bwd(b, back)), scale)

    def residual_split(self, x: Any, tau: float = 1.0) -> tuple[Any, Any]:
        """(x for the branch, x for the skip connection), where their gradients are weighted: see
        ``residual_add``."""
        branch, skip = residual_factors(tau)
        return self.scale_bwd(x, branch), self.scale_bwd(x, skip)

    def residual_add(self, branch: Any, skip: Any, tau: float = 1.0) -> Any:
        """tau / sqrt(1 + tau^2) branch + 1 / sqrt(1 + tau^2) skip."""
        own, rest = residual_factors(tau)
        return self._sum(self.scale_fwd(branch, own), self.scale_fwd(skip, rest))

    def dropout(self, x: Any, p: float = 0.5, training: bool = True, **random: Any) -> Any:
        """dropout(x) with probability ``p`` of dropping an element, in [0, 1), times sqrt(1 - p); x where it
        is not ``training``. In JAX with ``key``, where p is not 0."""
        scale = math.sqrt(1 - number("unit_scaling", "p", p, below=1.0))
        if not training or p == 0:
            return x
        return self._scaled(self.own_dropout(x, p, **random), scale, scale)

    def norm(self, x: Any, weight: Any, bias: Any = None, eps: float = 1e-5) -> Any:
        """LayerNorm, without ``bias`` RMSNorm; x h (..., N), weight and bias h (N,)."""
        scale = math.sqrt(x.shape[-1] / max(math.prod(x.shape), 1))
        bias = None if bias is None else self.scale_bwd(bias, scale)
        kind = "RMSNorm" if bias is None else "LayerNorm"
        inputs = {"x": x, "norm_weight": self.scale_bwd(weight, scale), "norm_bias": bias}
        return self.operation(norm, ("NormSpec", x.shape[-1], kind, eps), inputs)

    def embedding(self, ids: Any, table: Any) -> Any:
        """table[ids]; table h (V, N), of deviation 1."""
        scale = math.sqrt(table.shape[0] / max(math.prod(ids.shape), 1))
        spec = "EmbeddingSpec", *table.shape, self.dtype_name(table)
        return self.operation(embedding, spec, {"ids": ids, "table": self.scale_bwd(table, scale)})

    def cross_entropy(self, logits: Any, targets: Any) -> Any:
        """Returns the mean cross entropy of softmax(logits), in nats, float32 (1,); its gradient is that of
        the sum, times V / sqrt(V - 1). logits h (..., V), V at least 2; a target of -100 has a loss of 0."""
        classes, count = logits.shape[-1], max(math.prod(targets.shape), 1)
        if classes < 2:
            raise ArgumentError("unit_scaling", "logits", f"{classes} class", "at least 2")
        scale = count * classes / math.sqrt(classes - 1)
        inputs = {"logits": self.scale_bwd(logits, scale), "targets": targets}
        return self.operation(cross_entropy, ("CrossEntropySpec", classes, "mean", 0.0, -100), inputs)

    def mse(self, x: Any, target: Any) -> Any:
        """mean((x - target)^2), float32 (1,), of arrays of one shape; its gradient is that of the sum, over
        sqrt(8)."""
        scale = math.prod(x.shape) * 8**-0.5
        inputs = {"x": self.scale_bwd(x, scale), "target": self.scale_bwd(target, scale)}
        return self.operation(mse, ("MseSpec",), inputs)

    def attention(
        self,
        query: Any,
        key: Any,
        value: Any,
        causal: bool = True,
        mult: float = 1.0,
        dropout_p: float = 0.0,
        **random: Any,
    ) -> Any:
        """dropout(softmax(mult q k^T / d)) v, times a constant, of layers h (b, s, heads, d); returns h (b,
        s, heads d). ``dropout_p`` in [0, 1); in JAX with ``dropout_key``, where it is not 0."""
        p = number("unit_scaling", "dropout_p", dropout_p, below=1.0)
        dim, scale = query.shape[-1], attention_factor(query.shape[-1], key.shape[1], causal, mult, p)
        q, k, v = (self.scale_bwd(layer, scale) for layer in (query, key, value))
        mask = "causal" if causal else "no_mask"
        return self.scale_fwd(self.own_attention(q, k, v, mult / dim, mask, p, **random), scale)


class Linear(SharedLinear):
    """y = (x W^T + b) / sqrt(fan_in), a unit-scaled product, in FP8 under ``autocast``.

    The weight starts as normal(0, 1) and the bias at 0. ``readout``: divided by fan_in itself, for a model's
    last product. ``constraint``: see ``fp8kit.layers.unit_scaling``. The gradients of weight and bias are
    divided by the square root of the number of rows. Other arguments as ``Linear``; no ``return_bias``, no
    ``fuse_wgrad_accumulation``.
    """

    readout: bool
    constraint: str | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        readout: bool = False,
        constraint: str | None = OUTPUT,
        init_method: Init | None = None,
        params_dtype: Any = None,
        device: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            init_method=self.unit_init() if init_method is None else init_method,
            bias=bias,
            params_dtype=params_dtype,
            device=device,
            name=name,
        )
        constrained(Factors(1.0, 1.0), constraint)
        self.readout, self.constraint = readout, constraint

    def unit_init(self) -> Init:
        """normal(0, 1), as the frontend fills parameters."""
        raise NotImplementedError

    def run(self, inputs: dict[str, Any], *arguments: Any, **options: Any) -> dict[str, Any]:
        rows = math.prod(inputs["x"].shape[:-1])
        factors = linear_factors(self.in_features, self.out_features, rows, self.readout, self.constraint)

        def scaled(x: Any, forward: float, backward: float) -> Any:
            spec = self.spec_for("ScaleLinesSpec", forward, backward)
            return self.call(scale_lines, spec, {"x": x})["y"]

        backward = {name: factors.input if name == "x" else factors.parameter for name in inputs}
        given: Mapping[str, Any] = {
            name: None if x is None or name == "residual" else scaled(x, 1.0, backward[name])
            for name, x in inputs.items()
        }
        outputs = super().run(dict(given), *arguments, **options)
        return {**outputs, "y": scaled(outputs["y"], factors.output, 1.0)}
