"""``GroupedLinear``: rows in groups, each with a weight of its own: the experts of a mixture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8kit.autocast import AutocastState, current
from fp8kit.errors import ArgumentError, ShapeError
from fp8kit.execution.codec import encode
from fp8kit.layers.fp8_layer import WeightCache
from fp8kit.ops.linear import LinearSpec, linear, weight_cast
from fp8kit.ops.product import ProductSpec
from fp8kit.quantization import Quantization
from fp8kit.scaling import FORWARD_SLOTS
from fp8kit_torch import arguments, recompute
from fp8kit_torch.arguments import autocast_dtype, not_compiled, want_input
from fp8kit_torch.autocast import recipe_parts
from fp8kit_torch.bound import validate
from fp8kit_torch.calibration import row_of
from fp8kit_torch.call import prepare, run
from fp8kit_torch.checks import CALLED, CONSTRUCTED, check
from fp8kit_torch.library import record_, trace
from fp8kit_torch.main_grad import MainGrads
from fp8kit_torch.module import TransformerEngineBaseModule
from fp8kit_torch.once import once
from fp8kit_torch.parameters import Init, normal_init
from fp8kit_torch.quantized import QuantizedTensor
from fp8kit_torch.specs import layer_spec, layer_text, scale_names
from fp8kit_torch.state import NO_STATE, StateBinding

CONSTRUCTOR = {
    "sequence_parallel": False,
    "tp_group": None,
    "tp_size": 1,
    "get_rng_state_tracker": None,
    "rng_tracker_name": None,
    "parallel_mode": None,
    "ub_overlap_rs": False,
    "ub_overlap_ag": False,
    "ub_name": None,
    "delay_wgrad_compute": False,
    "save_original_input": False,
    "single_grouped_weight": False,
    "single_grouped_bias": False,
    "use_grouped_tensor": None,
}
_FORWARD = {"out": None, "dgrad_out": None}


class GroupedLinear(TransformerEngineBaseModule):
    """y_i = x_i W_i^T + b_i for ``num_gemms`` groups of rows.

    * ``num_gemms``: number of groups N. ``in_features``, ``out_features``: sizes K and M.
    * ``init_method``: fills a weight in place; None is normal(0, 0.023). Biases start at 0. ``bias``: whether
      there are any.
    * ``return_bias``: return (y without bias, the list of biases) instead.
    * ``params_dtype``: float32, bfloat16 or float16; None is torch's default. ``device``: None is the default
      device.
    * ``fuse_wgrad_accumulation``: the weights' gradients go into their ``main_grad``.
    * ``name``: kept, for the user. Others: Transformer Engine's, at their defaults only; NotImplementedError
      otherwise.

    Parameters ``weight0`` ... ``weight{N-1}`` (M, K) and ``bias0`` ... (M,). Under ``autocast`` the three
    GEMMs of each group run in FP8, each with scales of its own; a group without rows runs none, and its
    scales do not age. Within ``torch.compile`` the numbers of rows are a part of the compiled code.
    """

    operation = linear

    def __init__(
        self,
        num_gemms: int,
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
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = None,
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool | None = None,
    ) -> None:
        check("GroupedLinear", CONSTRUCTED, locals())
        arguments.positive(
            "GroupedLinear", num_gemms=num_gemms, in_features=in_features, out_features=out_features
        )
        arguments.refuse("GroupedLinear", CONSTRUCTOR, locals())
        super().__init__()
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.use_bias, self.return_bias, self.name = bool(bias), bool(return_bias), name
        self.gemms, self.fuse_wgrad_accumulation = (
            tuple(f"{i}_" for i in range(num_gemms)),
            bool(fuse_wgrad_accumulation),
        )
        for i in range(num_gemms):
            self.add_parameter(
                f"weight{i}", (out_features, in_features), init_method or normal_init, params_dtype, device
            )
        for i in range(num_gemms if bias else 0):
            self.add_parameter(f"bias{i}", (out_features,), torch.nn.init.zeros_, params_dtype, device)
        self.set_spec(LinearSpec(ProductSpec(in_features, (out_features,))))
        # compiled groups are told apart by their names, because each reads and records the state of all
        own = [LinearSpec(ProductSpec(in_features, (out_features,), prefix=prefix)) for prefix in self.gemms]
        self._spec_texts = [encode(spec) for spec in own]

    def weight_inputs(self) -> dict[str, Tensor]:
        return {f"weight{i}": getattr(self, f"weight{i}") for i in range(self.num_gemms)}

    def calibrate_group(self, i: int, x: Tensor, weight: Tensor) -> Tensor:
        """The amaxes of one group's input and weight among all slots, float32."""
        looked_at = [(FORWARD_SLOTS * i, x), (FORWARD_SLOTS * i + 1, weight)]
        return row_of(looked_at, FORWARD_SLOTS * self.num_gemms)

    def forward(
        self,
        inp: Tensor,
        m_splits: Sequence[int],
        is_first_microbatch: bool | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
    ) -> Any:
        """``inp``: (..., K), whose rows are groups of ``m_splits`` (N ints) rows one after the other.
        ``is_first_microbatch``: None casts the weights at each call; True casts and keeps them, False takes
        them. ``out``, ``dgrad_out``: None only.

        Returns (..., M), with ``return_bias`` also the list of biases. ShapeError where the rows are not
        those of ``m_splits``.
        """
        arguments.refuse("GroupedLinear", _FORWARD, {"out": out, "dgrad_out": dgrad_out})
        if not torch.compiler.is_compiling():
            check("GroupedLinear", CALLED, locals())
        x, splits = (
            want_input("GroupedLinear", "inp", inp, self.in_features),
            [int(rows) for rows in m_splits],
        )
        rows = x.reshape(-1, self.in_features)
        if len(splits) != self.num_gemms or min(splits) < 0 or sum(splits) != rows.shape[0]:
            wanted = f"{self.num_gemms} numbers of rows that sum to {rows.shape[0]}"
            raise ShapeError("GroupedLinear", "m_splits", splits, wanted)
        if is_first_microbatch not in (None, True, False):
            raise ArgumentError(
                "GroupedLinear", "is_first_microbatch", repr(is_first_microbatch), "True, False or None"
            )
        if not torch.compiler.is_compiling():
            self._want_groups_alike(x)
        main = None
        if self.fuse_wgrad_accumulation and torch.is_grad_enabled():
            if torch.compiler.is_compiling():
                raise not_compiled("fuse_wgrad_accumulation")
            main = self._main_grads(is_first_microbatch, autocast_dtype(x) or x.dtype)
        y = torch.cat(
            [self._group(i, part, is_first_microbatch, main) for i, part in enumerate(rows.split(splits))]
        )
        y = y.reshape(*x.shape[:-1], self.out_features)
        return (
            (y, [getattr(self, f"bias{i}") for i in range(self.num_gemms)] if self.use_bias else None)
            if self.return_bias
            else y
        )

    def _want_groups_alike(self, x: Tensor) -> None:
        """ShapeError, BackendError or FormatError for a group's parameter of another shape than it had, on
        another device or of another dtype than x, before any group runs."""
        shapes: dict[str, tuple[int, ...]] = {"weight": (self.out_features, self.in_features)}
        if self.use_bias and not self.return_bias:
            shapes["bias"] = (self.out_features,)
        for kind, shape in shapes.items():
            named = {f"{kind}{i}": getattr(self, f"{kind}{i}") for i in range(self.num_gemms)}
            for name, own in named.items():
                if own.shape != shape:
                    raise ShapeError("GroupedLinear", name, f"shape {tuple(own.shape)}", f"shape {shape}")
            arguments.want_parameters("GroupedLinear", named, x)

    def _group(self, i: int, x: Tensor, first: bool | None, mains: MainGrads | None) -> Tensor:
        weight = self._opened_group(i)
        bias = getattr(self, f"bias{i}") if self.use_bias and not self.return_bias else None
        compiled, state = torch.compiler.is_compiling(), current()
        main = None
        if mains is not None and f"weight{i}" in mains.parameters:
            main = mains._replace(parameters={"weight0": mains.parameters[f"weight{i}"]})
        if x.shape[0] == 0:
            return (
                _Nothing.apply(x, weight, bias, main)
                if main is not None
                else torch.nn.functional.linear(x, weight, bias)
            )
        tensors = {"x": x, "weight0": weight} | ({} if bias is None else {"bias0": bias})
        dtype = autocast_dtype(x)
        if dtype is not None:
            tensors = {name: t.to(dtype) for name, t in tensors.items()}
        mode = "none" if bias is None else "add"
        off = state is None or not (state.enabled or state.calibrating)
        if compiled:
            return self._trace_group(i, tensors, mode, None if off else state, first)
        if state is None or off:
            if not recompute.idle():
                recompute.note()
            if self._unrecorded:
                self._want_autocast()
            spec = self._spec_for(None, False, mode, {}, () if main is None else main.fields)
            return run(*prepare(linear, spec, tensors), main=main)["y"]
        return self._fp8_group(i, tensors, mode, state, first, main)

    def _opened_group(self, i: int) -> Tensor:
        """A group's weight: held in FP8 where it is, and FP8 is on."""
        if self._held is None:
            return getattr(self, f"weight{i}")
        if torch.compiler.is_compiling():
            raise not_compiled("a weight of quantized_model_init")
        return self._opened({f"weight{i}": getattr(self, f"weight{i}")})[0][f"weight{i}"]

    def _trace_group(
        self, i: int, tensors: dict[str, Tensor], bias: str, state: AutocastState | None, first: bool | None
    ) -> Tensor:
        """``_group`` in a way that ``torch.compile`` can follow."""
        text, prefix = self._spec_texts[i], self.gemms[i]
        named = {name if name == "x" else f"{prefix}{name}": tensor for name, tensor in tensors.items()}
        if state is None:
            return trace(linear, layer_text(text, (), False, bias, ()), named)["y"]
        parts, traced = recipe_parts(state.recipe), self._traced(state)
        if not state.enabled:
            y = trace(linear, layer_text(text, (), False, bias, ()), named)["y"]
            if traced is not None and traced.record:
                with torch.no_grad():
                    row = self.calibrate_group(i, tensors["x"], tensors["weight0"])
                    record_(
                        traced.forward.amax_history, row, traced.forward.handle, traced.recipe, traced.when
                    )
            return y
        if first is not None:
            raise not_compiled("is_first_microbatch of GroupedLinear")
        return trace(linear, layer_text(text, parts, False, bias, ()), named, traced)["y"]

    def _fp8_group(
        self,
        i: int,
        tensors: dict[str, Tensor],
        bias: str,
        state: AutocastState,
        first: bool | None,
        main: MainGrads | None,
    ) -> Tensor:
        recipe, fp8, kept = state.recipe, self._fp8_of(state.recipe), recompute.recall(self)
        training = torch.is_grad_enabled() or recompute.first()
        delayed, record = recipe.history is not None, training or state.calibrating
        if (state.enabled and not training) is not self._unrecorded:
            self.__dict__["_unrecorded"] = not self._unrecorded
        cached, held, fields = None, tensors["weight0"], () if main is None else main.fields
        scales = scale_names(("",)) if delayed and state.enabled else ()
        if isinstance(held, QuantizedTensor):
            cached = held.inputs("GroupedLinear", "", fp8)
        elif kept is None and (first or (delayed and self._binding is None)):
            # a cache or a state is to be made: not for what is refused
            asked = self._spec_for(fp8 if state.enabled else None, False, bias, {}, fields)
            validate(linear, asked, tensors, scales=scales)
        binding = NO_STATE
        if delayed:
            binding = self.bind_state(recipe, training, record, kept).of_gemm(self.gemms[i], rename=True)
        if cached is None and first is not None and state.enabled:
            cached = self._cached_group(i, fp8, first, tensors, binding) if kept is None else kept.weights
        if kept is None:
            recompute.keep(self, self.fp8_meta["scaling_fwd"].scale if delayed else None, cached)
        if not state.enabled:
            spec = self._spec_for(None, False, bias, {}, fields)
            y = run(*prepare(linear, spec, tensors), main=main)["y"]
            if delayed and record and kept is None:
                with torch.no_grad():
                    self._note(self.calibrate_group(i, tensors["x"], tensors["weight0"]))
            return y
        spec = self._spec_for(fp8, cached is not None, bias, {}, fields)
        return run(*prepare(linear, spec, tensors | (cached or {}), scales), binding, main)["y"]

    def _cached_group(
        self, i: int, fp8: Quantization, first: bool, tensors: dict[str, Tensor], binding: StateBinding
    ) -> dict[str, Tensor]:
        """The group's FP8 weight: cast now for the first micro-batch, or where there is none by this
        recipe."""
        text = encode(fp8)
        if self._weights is None or self._weights.key != text:
            self._weights = WeightCache(text, {})
        known: Any = self._weights.arrays
        if first or i not in known:
            key = "weight_cast", id(fp8)
            if key not in self._specs:
                self._keep_spec(key, layer_spec(self._spec, fp8, False, "none", ()), fp8)
            spec, own = self._specs[key][0], {"weight0": tensors["weight0"]}
            with torch.no_grad():
                known[i] = run(*prepare(weight_cast, spec, own, tuple(binding.scales)), binding)
        return known[i]  # type: ignore[no-any-return]


class _Nothing(torch.autograd.Function):
    """The product of a group without rows, whose weight has a ``main_grad``: nothing, to which nothing is
    added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, main: MainGrads) -> Tensor:
        ctx.main, ctx.shapes, ctx.dtype = (
            main,
            (x.shape, weight.shape, None if bias is None else bias.shape),
            weight.dtype,
        )
        return x.new_empty(0, weight.shape[0])

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> Any:
        (buffer,) = ctx.main.buffers(["weight0"]).values()
        if ctx.main.overwrite:
            buffer.zero_()
        x, weight, bias = ctx.shapes
        return (
            grad.new_empty(x),
            ctx.main.placeholder("weight0", weight, ctx.dtype),
            None if bias is None else grad.new_zeros(bias),
            None,
        )
