"""``Linear``: y = x W^T + b."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from fp8kit.arguments import integer, listed, shown, without_unknown
from fp8kit.errors import ArgumentError
from fp8kit.layers.base import Init
from fp8kit.layers.parallel import ParallelLayer
from fp8kit.layers.unsupported import refuse_others
from fp8kit.ops.linear import LinearSpec, linear
from fp8kit.ops.product import ProductSpec


def split_sizes(operation: str, out_features: int, parameters_split: Any) -> dict[str, int]:
    """Prefix of parameter names -> output features: {"": out_features} for None, equal parts for a tuple of
    names, or a mapping.

    "query", "query_" both become "query_". ArgumentError where the sizes do not add up or a name is none.
    """
    if parameters_split is None:
        return {"": out_features}
    wanted = "names, or a mapping of names to sizes"
    if isinstance(parameters_split, Mapping):
        sizes = list(parameters_split.items())
    elif hasattr(parameters_split, "shape"):
        raise ArgumentError(operation, "parameters_split", shown(parameters_split), wanted)
    else:
        names = listed(operation, "parameters_split", parameters_split, wanted)
        sizes = [(name, out_features // len(names)) for name in names]
    if not all(isinstance(name, str) for name, _ in sizes):
        raise ArgumentError(operation, "parameters_split", shown(parameters_split), wanted)
    named = {
        f"{name.rstrip('_')}_": integer(operation, f"parameters_split[{name!r}]", size, 1)
        for name, size in sizes
    }
    fits = bool(named) and len(named) == len(sizes) and all(map(str.isidentifier, named))
    if not fits or sum(named.values()) != out_features:
        wanted = f"different names whose sizes sum to {out_features}"
        raise ArgumentError(operation, "parameters_split", repr(parameters_split), wanted)
    return named


class LinearBase(ParallelLayer):
    """Weights and biases in segments along the output dimension: what ``Linear`` and ``LayerNormLinear``
    share."""

    in_features: int
    out_features: int
    parallel_mode: str | None
    # ``forward`` for the layer that this is a part of
    compute: Callable[..., Any]

    def add_linear(self, arguments: SimpleNamespace) -> ProductSpec:
        """Make the parameters that the constructor's ``arguments`` say. Returns their product."""
        self.keep(
            arguments, "in_features out_features return_bias fuse_wgrad_accumulation name parallel_mode"
        )
        self.take_parallel(arguments, {"": self.parallel_mode})
        column, row = (self.modes.get("") == mode for mode in ("column", "row"))
        if column:
            self.out_features = self.part_of(self.out_features, "out_features")
        if row:
            self.in_features = self.part_of(self.in_features, "in_features")
        self.use_bias, dtype, device = arguments.bias, arguments.params_dtype, arguments.device
        # whether the operation adds the bias: "add", or "none" where there is none or it is returned
        self.bias_mode = "add" if self.use_bias and not self.return_bias else "none"
        whole = split_sizes(self.layer_name, arguments.out_features, arguments.parameters_split)
        parts = {name: self.part_of(n, "parameters_split") for name, n in whole.items()} if column else whole
        self._split = parts
        if self.return_bias and len(self._split) > 1:
            refuse_others(self.layer_name, {"return_bias": (True, False)})
        # the operation's names -> the attributes that hold the parameters
        self._weight_names = [(f"weight{i}", f"{prefix}weight") for i, prefix in enumerate(self._split)]
        self._product_names = self._weight_names + [
            (f"bias{i}", f"{prefix}bias") for i, prefix in enumerate(self._split) if self.use_bias
        ]
        rows = {f"{prefix}weight": size for prefix, size in self._split.items()}
        self.add_matrices(rows, self.in_features, arguments.init_method, dtype, device)
        for prefix, size in self._split.items():
            if self.use_bias:
                self.add_parameter(f"{prefix}bias", (size,), 0.0, dtype, device)
            else:
                self.add_no_parameter(f"{prefix}bias")
        if column or row:
            for prefix in self._split:
                self.mark_parameter(f"{prefix}weight", int(row), False)
                if self.use_bias:
                    self.mark_parameter(
                        f"{prefix}bias", 0 if column else None, row and self.sequence_parallel
                    )
        return ProductSpec(self.in_features, tuple(self._split.values()), bias=self.bias_mode)

    def weight_inputs(self) -> dict[str, Any]:
        return self.parameters_by(self._weight_names)

    def options(self) -> dict[str, Any]:
        """Further fields of the spec of ``forward``."""
        return {}

    def operands(self, x: Any, bias: str) -> dict[str, Any]:
        """x, weights, and biases where the operation takes them."""
        names = self._weight_names if bias == "none" else self._product_names
        return {"x": x, **self.parameters_by(names)}

    @without_unknown
    def forward(
        self,
        inp: Any,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
        *,
        part: Mapping[str, Any] | None = None,
        **unknown: Any,
    ) -> Any:
        """``inp``: h (..., K). ``is_first_microbatch``: None casts the weight at each call; True casts and
        keeps it, False takes it, whatever the weight is by then.

        ``fp8_output``, where FP8 is on: y is a ``QuantizedTensor`` in the forward format, which the next
        ``Linear`` multiplies as it is; anything else sees its values. ``fp8_grad``: so is the gradient of
        ``inp``, in the backward format; a layer before this one casts its values for its own products. With
        delayed scaling their scales are the state's output and grad_input. Both in torch only.

        Returns h (..., N), or a tuple (y, bias where ``return_bias``, norm(x) where
        ``return_layernorm_output``). ``part``: for the layer that this is a part of, see ``compute``.
        """
        if unknown:
            self.refuse_names(unknown)
        # the layer that this is a part of calls, so that hooks run; it has checked what is checked here
        if part is not None:
            return self.compute(inp, is_first_microbatch, **part)
        x = self.as_input("inp", inp, self.in_features)
        self.check_options(is_first_microbatch, fp8_output, fp8_grad)
        bias = self.bias_mode
        inputs = self.operands(x, bias)
        out = self.run(inputs, is_first_microbatch, bias, fp8_output, fp8_grad, **self.options())
        if not (self.return_bias or self.return_layernorm_output):
            return out["y"]
        return self.returned(out["y"], "bias", out.get("normed"))

    forward.__qualname__ = "Linear.forward"  # as Python's own errors call it


class Linear(LinearBase):
    """y = x W^T + b.

    * ``in_features``, ``out_features``: sizes K and N. Parameters ``weight`` (N, K) and ``bias`` (N,).
    * ``init_method``: fills a weight in place (a torch tensor; natively a float32 NumPy array); None is
      normal(0, 0.023). Biases start at 0.
    * ``bias``: whether there is one. ``return_bias``: return (y without bias, bias) instead.
    * ``params_dtype``: float32, bfloat16 or float16; inputs have the same, outside of ``torch.autocast``.
      None is torch's default dtype, natively float32.
    * ``device``: None is torch's default device where one is set, else the default device: CUDA where it is
      usable, else the CPU. "meta" (torch) defers the start to ``reset_parameters``.
    * ``parameters_split``: names, or names -> sizes, of parameters that W is split into along N: "query"
      gives ``query_weight``.
    * ``fuse_wgrad_accumulation``: the weight's gradient goes into ``weight.main_grad`` (torch only).
    * ``tp_group``: the ranks that share the weight, each with a part of it: of N with ``parallel_mode``
      "column", of K with "row"; ``tp_size``: how many, where ``set_tensor_parallel_group`` names them later.
      ``sequence_parallel``: the rows of x ("column") or of y ("row") are split over the ranks too, along the
      first dimension. A group is a process group in torch, a ``Collectives`` natively.
    * ``name``: what recipes by name know it by (``recipe.PerLayer``, ``recipe.CustomRecipe``). Others
      are Transformer Engine's: without effect, or at their defaults only, else UnsupportedError
      (``fp8kit.layers.unsupported``: ``WITHOUT_EFFECT``, ``CONSTRUCTOR``).

    x: (..., K); y: (..., N) in x's dtype. Under ``autocast`` the three GEMMs run in FP8 (any sizes; multiples
    of 16 need no padding).

    Raises Fp8kitError for sizes and arguments out of their range, and when called ShapeError for another last
    dimension than K and FormatError for another dtype than the parameters'.
    """

    layer_name = "Linear"
    operation = linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Init | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: Any = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: Any = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.set_spec(LinearSpec(self.add_linear(self.checked(locals()))))

    def calibrate(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> list[tuple[int, Any]]:
        return [(0, inputs["x"]), *((1, inputs[name]) for name, _ in self._weight_names)]

    def compute(
        self, x: Any, is_first_microbatch: bool | None, bias: str | None = None, residual: Any = None
    ) -> Any:
        """y with the bias "add"-ed, not ("none"), or left to a later operation while its gradient is made
        here ("deferred"); None: as ``forward``. ``residual``, like y, is added to it."""
        bias = bias or self.bias_mode
        return self.run({**self.operands(x, bias), "residual": residual}, is_first_microbatch, bias)["y"]
