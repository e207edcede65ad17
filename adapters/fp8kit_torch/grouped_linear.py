"""``GroupedLinear``: rows in groups, each with a weight of its own: the experts of a mixture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fp8kit.autocast import current, traced_state
from fp8kit.errors import ArgumentError, ShapeError, UnsupportedError
from fp8kit.layers.base import spec_object
from fp8kit.layers.fp8_layer import WeightCache, layer_products, layer_spec
from fp8kit.ops.expert_linear import expert_linear
from fp8kit.ops.grouped_linear import GroupedLinearSpec, grouped_linear
from fp8kit.ops.linear import LinearSpec
from fp8kit.ops.product import ProductSpec
from fp8kit.quantization import Quantization
from fp8kit.scaling import FORWARD_SLOTS
from fp8kit_torch.arguments import defaults, not_compiled, refuse, want_input
from fp8kit_torch.autocast import recipe_parts
from fp8kit_torch.call import apply
from fp8kit_torch.checks import CALLED, CONSTRUCTED, check, is_integer, shown
from fp8kit_torch.main_grad import MainGrads
from fp8kit_torch.module import Inputs, TransformerEngineBaseModule
from fp8kit_torch.parameters import Init
from fp8kit_torch.specs import expert_text, spec_for
from fp8kit_torch.state import StateBinding

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
    * ``use_grouped_tensor``: whether the numbers of rows stay on the device, and all groups are one product
      (``forward``); None: where they come as a tensor on a GPU.
    * ``name``: what recipes by name know it by (``recipe.PerLayer``, ``recipe.CustomRecipe``). Others:
      Transformer Engine's, at their defaults only; NotImplementedError otherwise.

    Parameters ``weight0`` ... ``weight{N-1}`` (M, K) and ``bias0`` ... (M,). Under ``autocast`` the three
    GEMMs of each group run in FP8, each with scales of its own; a group without rows runs none, and its
    scales do not age. Within ``torch.compile`` the numbers of rows are a part of the compiled code.
    """

    layer_name = "GroupedLinear"
    operation = grouped_linear

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
        refuse("GroupedLinear", CONSTRUCTOR, locals())
        super().__init__()
        self.sizes_on_device = use_grouped_tensor
        self.take_further(SimpleNamespace(**locals()))
        self.num_gemms = num_gemms = int(num_gemms)
        self.in_features, self.out_features = in_features, out_features = int(in_features), int(out_features)
        self.use_bias, self.return_bias, self.name = bool(bias), bool(return_bias), name
        self.gemms = tuple(f"{i}_" for i in range(num_gemms))
        self.fuse_wgrad_accumulation = bool(fuse_wgrad_accumulation)
        for i in range(num_gemms):  # in Transformer Engine's order, by which optimisers number their states
            self.add_parameter(f"weight{i}", (out_features, in_features), init_method, params_dtype, device)
            if bias:
                self.add_parameter(f"bias{i}", (out_features,), 0.0, params_dtype, device)
        product = ProductSpec(in_features, (out_features,))
        self.set_spec(GroupedLinearSpec(product, (0,) * num_gemms))

    def weight_inputs(self) -> dict[str, Tensor]:
        return {f"{i}_weight0": getattr(self, f"weight{i}") for i in range(self.num_gemms)}

    def calibrate(
        self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
    ) -> list[tuple[int, Tensor]]:
        looked_at = []
        for i, x in enumerate(inputs["x"].reshape(-1, self.in_features).split(self._splits)):
            if x.shape[0]:
                weight = inputs[f"{i}_weight0"]
                looked_at += [(FORWARD_SLOTS * i, x), (FORWARD_SLOTS * i + 1, weight)]
        return looked_at

    def forward(
        self,
        inp: Tensor,
        m_splits: Sequence[int] | Tensor,
        is_first_microbatch: bool | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
    ) -> Any:
        """``inp``: (..., K), whose rows are groups of ``m_splits`` (N ints) rows one after the other.
        ``is_first_microbatch``: None casts the weights at each call; True casts and keeps them, False takes
        them. ``out``, ``dgrad_out``: None only.

        ``m_splits`` may be an integer tensor. One on a GPU is not looked at (``use_grouped_tensor``), so that
        nothing waits and a CUDA graph can hold the call: the groups are multiplied by one kernel that reads
        the sizes; rows behind the last group's give 0. Recipes are then those whose scales follow from the
        data (per tensor, the weights each by itself, the input as a whole; per row; by blocks of 128), and
        weights are cast at each call. Other tensors are read on the host.

        Returns (..., M), with ``return_bias`` also the list of biases. ShapeError where the rows are not
        those of ``m_splits``.
        """
        refuse("GroupedLinear", _FORWARD, {"out": out, "dgrad_out": dgrad_out})
        if not torch.compiler.is_compiling():
            check("GroupedLinear", CALLED, locals())
        x = want_input("GroupedLinear", "inp", inp, self.in_features)
        if isinstance(m_splits, Tensor) and (
            m_splits.is_cuda if self.sizes_on_device is None else self.sizes_on_device
        ):
            return self._on_device(x, m_splits, is_first_microbatch)
        splits, rows = [int(count) for count in m_splits], x.numel() // self.in_features
        if len(splits) != self.num_gemms or min(splits) < 0 or sum(splits) != rows:
            wanted = f"{self.num_gemms} numbers of rows that sum to {rows}"
            raise ShapeError("GroupedLinear", "m_splits", splits, wanted)
        if torch.compiler.is_compiling() and is_first_microbatch is not None:
            raise not_compiled("is_first_microbatch of GroupedLinear")
        biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms)] if self.use_bias else None
        inputs: Inputs = {"x": x, **self.weight_inputs()}
        mode = "none" if biases is None or self.return_bias else "add"
        if mode == "add":
            inputs |= {f"{i}_bias0": bias for i, bias in enumerate(biases or ())}
        self._splits = splits
        y = self.run(inputs, is_first_microbatch, mode, rows=tuple(splits))["y"]
        return (y, biases) if self.return_bias else y

    def _on_device(self, x: Tensor, sizes: Tensor, is_first_microbatch: bool | None) -> Any:
        """``forward`` with sizes that are not looked at."""
        if not is_integer(sizes) or sizes.shape != (self.num_gemms,):
            raise ShapeError(
                "GroupedLinear", "m_splits", shown(sizes), f"integers of shape ({self.num_gemms},)"
            )
        asked = {
            "is_first_microbatch": is_first_microbatch is not None,
            "fuse_wgrad_accumulation": self.fuse_wgrad_accumulation,
            "delay_wgrad_compute": self.delay_wgrad_compute,
            "quantized_model_init": self._held is not None,
        }
        for name in (name for name, value in asked.items() if value):
            wanted = "it off, where m_splits stay on the device"
            raise UnsupportedError("GroupedLinear", name, "on", wanted)
        weights, biases = (
            [getattr(self, f"{name}{i}") for i in range(self.num_gemms)] if there else None
            for name, there in (("weight", True), ("bias", self.use_bias))
        )
        inputs = {"x": x, "group_sizes": sizes.to(x.device, torch.int32), "weight": torch.stack(weights)}
        if biases is not None and not self.return_bias:
            inputs["bias"] = torch.stack(biases)
        y = apply(expert_linear, self._device_spec(), self.autocast_inputs(inputs))["y"]
        return (y, biases) if self.return_bias else y

    def _device_spec(self) -> Any:
        """The spec of ``_on_device`` under the autocast in force; within ``torch.compile`` its text."""
        fields = self.num_gemms, self.in_features, self.out_features, "oi"
        state = traced_state() if torch.compiler.is_compiling() else current()
        if state is not None and state.calibrating and not state.enabled:
            raise UnsupportedError("GroupedLinear", "calibrating", True, "m_splits on the host")
        if state is None or not state.enabled:
            return spec_for("ExpertLinearSpec", *fields)
        layer = self.layer_name, self.name or ""
        if torch.compiler.is_compiling():
            return expert_text(fields, recipe_parts(state.recipe), layer)
        own = state.recipe.for_layer(*layer)
        return spec_object("ExpertLinearSpec", *fields, None if own is None else own.quantization)

    def _main_grads(self, first: bool | None, dtype: torch.dtype) -> MainGrads:
        try:
            return super()._main_grads(first, dtype)
        except ArgumentError as error:
            group, _, attribute = (error.argument or "").partition(".")
            raise error.renamed("GroupedLinear", f"{self.operation.argument(group)}.{attribute}") from None

    def _cached(
        self, fp8: Quantization, first: bool, bias: str, tensors: dict[str, Tensor], binding: StateBinding
    ) -> dict[str, Tensor]:
        """The FP8 weights, each cast when its group first has rows: the scales of others stay."""
        held, made = self._weights, {}
        if not first and held is not None and held.key == self.cache_key(fp8):
            made = held.arrays
        for i, prefix in enumerate(self.gemms):
            if not self._splits[i] or f"{prefix}w_q" in made:
                continue
            asked, name = ("weight_cast", id(fp8), i), f"{prefix}weight0"
            if asked not in self._specs:
                products = layer_products(layer_spec(self._spec, fp8, False, bias, ()))
                self._keep_spec(asked, LinearSpec(products[i]), fp8)
            made |= self.cast_weight(self._specs[asked][0], {name: tensors[name]}, prefix, binding)
        self._weights = WeightCache(self.cache_key(fp8), made)
        return made


CONSTRUCTOR = defaults(GroupedLinear.__init__, "tp_size single_grouped_weight single_grouped_bias")
