"""``Linear``: y = x W^T + b."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8kit.arguments import flag, integer, shown
from fp8kit.arrays import ArrayView
from fp8kit.autograd import Tensor
from fp8kit.errors import ArgumentError
from fp8kit.formats import DType
from fp8kit.nn.fp8 import Fp8Module, Inputs, amax_of
from fp8kit.nn.later import CONSTRUCTOR, later, not_yet
from fp8kit.nn.module import Parameter, as_tensor, make_parameter, make_parts, positive, resolve
from fp8kit.nn.random import Init, init_of
from fp8kit.ops.linear import LinearSpec, linear
from fp8kit.ops.product import ProductSpec
from fp8kit.quantization import Quantization


def split_sizes(operation: str, out_features: int, parameters_split: Any) -> dict[str, int]:
    """Prefix of parameter names -> output features: {"": out_features} for None, equal parts for a tuple of
    names, or a mapping.

    "query", "query_" both become "query_". Fp8kitError where the sizes do not add up or a name is none.
    """
    if parameters_split is None:
        return {"": out_features}
    if not isinstance(parameters_split, Mapping | tuple | list) or not all(
        isinstance(name, str) for name in parameters_split
    ):
        raise ArgumentError(
            operation, "parameters_split", shown(parameters_split), "names, or a mapping of names to sizes"
        )
    if isinstance(parameters_split, Mapping):
        sizes = {
            name: integer(operation, f"parameters_split[{name!r}]", size, 1)
            for name, size in parameters_split.items()
        }
    else:
        sizes = {name: out_features // max(len(parameters_split), 1) for name in parameters_split}
    named = {f"{name.rstrip('_')}_": size for name, size in sizes.items()}
    names_fit = (
        bool(named) and all(name.isidentifier() for name in named) and len(named) == len(parameters_split)
    )
    if not names_fit or sum(named.values()) != out_features or min(named.values()) < 1:
        wanted = f"different names whose sizes sum to {out_features}"
        raise ArgumentError(operation, "parameters_split", repr(parameters_split), wanted)
    return named


class LinearBase(Fp8Module):
    """Weights and biases in segments along the output dimension: what ``Linear`` and ``LayerNormLinear``
    share."""

    def _make_parameters(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        return_bias: bool,
        parameters_split: Any,
        init_method: Init | None,
        dtype: DType,
        where: Any,
        name: str | None,
    ) -> None:
        operation = type(self).__name__
        positive(operation, in_features=in_features, out_features=out_features)
        self.in_features, self.out_features = int(in_features), int(out_features)
        self.use_bias, self.return_bias, self.name = (
            flag(operation, "bias", bias),
            flag(operation, "return_bias", return_bias),
            name,
        )
        self._split = split_sizes(operation, self.out_features, parameters_split)
        if self.return_bias and len(self._split) > 1:
            not_yet(operation, {"return_bias": (True, False)})
        init = init_of(operation, "init_method", init_method)
        weights = make_parts(list(self._split.values()), self.in_features, init, dtype, where)
        for prefix, weight in zip(self._split, weights, strict=True):
            setattr(self, f"{prefix}weight", weight)
        if self.use_bias:
            for prefix, size in self._split.items():
                setattr(self, f"{prefix}bias", make_parameter((size,), 0.0, dtype, where))
        # the operation's names of weights, and of all parameters -> the attributes that hold them
        self._weight_names = {f"weight{i}": f"{prefix}weight" for i, prefix in enumerate(self._split)}
        biases = (
            {f"bias{i}": f"{prefix}bias" for i, prefix in enumerate(self._split)} if self.use_bias else {}
        )
        self._names = self._weight_names | biases

    def weight_inputs(self) -> dict[str, Parameter]:
        return {name: getattr(self, attribute) for name, attribute in self._weight_names.items()}

    @property
    def bias_mode(self) -> str:
        """Whether the operation adds the bias: "add", or "none" where there is none or it is returned."""
        return "add" if self.use_bias and not self.return_bias else "none"

    def make_product(self, gemm: int, fp8: Quantization | None, cached: bool, bias: str) -> ProductSpec:
        return ProductSpec(
            self.in_features, tuple(self._split.values()), bias=bias, fp8=fp8, weight_cached=cached
        )

    def product_inputs(self, bias: str) -> Inputs:
        """Weights, and biases where the operation takes them."""
        names = self._names if bias != "none" else self._weight_names
        return {name: getattr(self, attribute) for name, attribute in names.items()}


class Linear(LinearBase):
    """y = x W^T + b.

    * ``in_features``, ``out_features``: sizes K and N. Parameters ``weight`` (N, K) and ``bias`` (N,).
    * ``init_method``: fills a float32 NumPy array in place; None is normal(0, 0.023). Biases start at 0.
    * ``bias``: whether there is one. ``return_bias``: return (y without bias, bias) instead.
    * ``params_dtype``: float32 (None), bfloat16 or float16; inputs have the same. ``device``: None is the
      default device.
    * ``parameters_split``: names, or names -> sizes, of parameters that W is split into along N: "query"
      gives ``query_weight``.
    * ``name``: kept, for the user. ``other``: Transformer Engine's further arguments, at their defaults
      (``fp8kit.nn.later``).

    x: (..., K); y: (..., N) in x's dtype. Under ``autocast`` the three GEMMs run in FP8 (any sizes; multiples
    of 16 need no padding).

    Raises Fp8kitError for sizes and arguments out of their range, and when called ShapeError for another last
    dimension than K and FormatError for another dtype than the parameters'.
    """

    operation = linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        init_method: Init | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: Any = None,
        parameters_split: Any = None,
        device: Any = None,
        name: str | None = None,
        **other: Any,
    ) -> None:
        super().__init__()
        later("Linear", CONSTRUCTOR["Linear"], other)
        dtype, where = resolve("Linear", params_dtype, device)
        self._make_parameters(
            in_features, out_features, bias, return_bias, parameters_split, init_method, dtype, where, name
        )

    def make_spec(self, products: list[ProductSpec], **options: Any) -> LinearSpec:
        return LinearSpec(products[0])

    def calibrate(self, inputs: Inputs, outputs: Mapping[str, Tensor], amaxes: list[ArrayView]) -> None:
        x = inputs["x"]
        assert isinstance(x, Tensor)
        amax_of(x.view, amaxes[0])
        for weight in self.weight_inputs().values():
            amax_of(weight.view, amaxes[1])

    def forward(
        self,
        inp: Any,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """``inp``: h (..., K). ``is_first_microbatch``: None casts the weight at each call; True casts and
        keeps it, False takes it.

        Returns h (..., N), with ``return_bias`` also the bias. ``fp8_output`` and ``fp8_grad`` are not
        supported yet.
        """
        if fp8_output is not False or fp8_grad is not False:
            not_yet("Linear", {"fp8_output": (fp8_output, False), "fp8_grad": (fp8_grad, False)})
        y = self.branch(as_tensor("Linear", "inp", inp), is_first_microbatch, self.bias_mode)
        if not self.return_bias:
            return y
        return y, self.bias if self.use_bias else None  # type: ignore[attr-defined]

    def branch(
        self, x: Tensor, is_first_microbatch: bool | None, bias: str, residual: Tensor | None = None
    ) -> Tensor:
        """y for ``x`` as in ``forward``, with the bias "add"-ed, not ("none"), or left to a later operation
        while its gradient is made here ("deferred"), and with ``residual`` added, like y."""
        return self.run(
            {"x": x, **self.product_inputs(bias), "residual": residual}, is_first_microbatch, bias
        )["y"]
