"""``GroupedLinear``: rows in groups, each with a weight of its own: the experts of a mixture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8kit.arrays import ArrayView
from fp8kit.autocast import AutocastState, current
from fp8kit.errors import Fp8kitError, ShapeError, expected
from fp8kit.ops.linear import LinearSpec
from fp8kit.ops.product import ProductSpec
from fp8kit.ops.quant import Fp8
from fp8kit.scaling import FORWARD_SLOTS
from fp8kit_torch import arguments, recompute
from fp8kit_torch.apply import NO_STATE, Wiring, apply
from fp8kit_torch.calibration import amax_of
from fp8kit_torch.module import Init, TransformerEngineBaseModule, autocast_dtype, normal_init, want_input
from fp8kit_torch.plans import Call, call
from fp8kit_torch.specs import layer_spec
from fp8kit_torch.texts import encode
from fp8kit_torch.views import as_view

_CONSTRUCTOR = arguments.CONSTRUCTOR["Linear"] | {
    "fuse_wgrad_accumulation": False, "single_grouped_weight": False, "single_grouped_bias": False, "use_grouped_tensor": None,
}
_FORWARD = {"out": None, "dgrad_out": None}


class GroupedLinear(TransformerEngineBaseModule):
    """y_i = x_i W_i^T + b_i for ``num_gemms`` groups of rows.

    * ``num_gemms``: number of groups N. ``in_features``, ``out_features``: sizes K and M.
    * ``init_method``: fills a weight in place; None is normal(0, 0.023). Biases start at 0. ``bias``: whether there are any.
    * ``return_bias``: return (y without bias, the list of biases) instead.
    * ``params_dtype``: float32, bfloat16 or float16; None is torch's default. ``device``: None is the default device.
    * ``name``: kept, for the user. ``other``: Transformer Engine's further arguments, at their defaults; NotImplementedError otherwise.

    Parameters ``weight0`` ... ``weight{N-1}`` (M, K) and ``bias0`` ... (M,). Under ``autocast`` the three GEMMs of each group run in FP8,
    each with scales of its own; a group without rows runs none, and its scales do not age. ``torch.compile`` does not trace into it.
    """

    operation = "linear"

    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, *, init_method: Init | None = None, bias: bool = True,
        return_bias: bool = False, params_dtype: torch.dtype | None = None, device: Any = None, name: str | None = None, **other: Any,
    ) -> None:
        arguments.positive("GroupedLinear", num_gemms=num_gemms, in_features=in_features, out_features=out_features)
        arguments.refuse("GroupedLinear", _CONSTRUCTOR, other)
        super().__init__()
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.use_bias, self.return_bias, self.name = bool(bias), bool(return_bias), name
        self.gemms = tuple(f"{i}_" for i in range(num_gemms))
        for i in range(num_gemms):
            self.add_parameter(f"weight{i}", (out_features, in_features), init_method or normal_init, params_dtype, device)
        for i in range(num_gemms if bias else 0):
            self.add_parameter(f"bias{i}", (out_features,), torch.nn.init.zeros_, params_dtype, device)
        self.set_spec(LinearSpec(ProductSpec(in_features, (out_features,))))

    def weight_inputs(self) -> dict[str, Tensor]:
        return {f"weight{i}": getattr(self, f"weight{i}") for i in range(self.num_gemms)}

    def calibrate(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], amaxes: list[ArrayView]) -> None:
        amax_of(inputs["x"], amaxes[0])
        amax_of(inputs["weight0"], amaxes[1])

    @torch.compiler.disable
    def forward(self, inp: Tensor, m_splits: Sequence[int], is_first_microbatch: bool | None = None, **other: Any) -> Any:
        """``inp``: (..., K), whose rows are groups of ``m_splits`` (N ints) rows one after the other. ``is_first_microbatch``: None casts
        the weights at each call; True casts and keeps them, False takes them.

        Returns (..., M), with ``return_bias`` also the list of biases. ShapeError where the rows are not those of ``m_splits``.
        """
        arguments.refuse("GroupedLinear", _FORWARD, other)
        x, splits = want_input("GroupedLinear", "inp", inp, self.in_features), [int(rows) for rows in m_splits]
        rows = x.reshape(-1, self.in_features)
        if len(splits) != self.num_gemms or min(splits) < 0 or sum(splits) != rows.shape[0]:
            wanted = f"{self.num_gemms} numbers of rows that sum to {rows.shape[0]}"
            raise ShapeError(expected("GroupedLinear", "m_splits", splits, wanted))
        if is_first_microbatch not in (None, True, False):
            raise Fp8kitError(expected("GroupedLinear", "is_first_microbatch", repr(is_first_microbatch), "True, False or None"))
        y = torch.cat([self._group(i, part, is_first_microbatch) for i, part in enumerate(rows.split(splits))])
        y = y.reshape(*x.shape[:-1], self.out_features)
        return (y, [getattr(self, f"bias{i}") for i in range(self.num_gemms)] if self.use_bias else None) if self.return_bias else y

    def _group(self, i: int, x: Tensor, first: bool | None) -> Tensor:
        weight = getattr(self, f"weight{i}")
        bias = getattr(self, f"bias{i}") if self.use_bias and not self.return_bias else None
        if x.shape[0] == 0:
            return torch.nn.functional.linear(x, weight, bias)  # nothing, with gradients of zero
        tensors = {"x": x, "weight0": weight} | ({} if bias is None else {"bias0": bias})
        dtype = autocast_dtype(x)
        if dtype is not None:
            tensors = {name: t.to(dtype) for name, t in tensors.items()}
        mode, state = "none" if bias is None else "add", current()
        if state is None or not (state.enabled or state.calibrating):
            return apply(self._call_of(None, False, mode, tensors, False), list(tensors.values()))["y"]
        return self._fp8_group(i, tensors, mode, state, first)

    def _fp8_group(self, i: int, tensors: dict[str, Tensor], bias: str, state: AutocastState, first: bool | None) -> Tensor:
        recipe, kept = state.recipe, recompute.recall(self)
        training = torch.is_grad_enabled() or recompute.first()
        delayed, record = recipe.delayed(), training or state.calibrating
        wiring = _of(i, self.wiring(recipe, training, record, kept)) if delayed else NO_STATE
        cached = None
        if first is not None and state.enabled:
            cached = self._cached_group(i, self._fp8_of(recipe), first, tensors, wiring) if kept is None else kept.weights
        if kept is None:
            recompute.keep(self, self.fp8_meta["scaling_fwd"].scale if delayed else None, cached)
        if not state.enabled:
            y = apply(self._call_of(None, False, bias, tensors, False), list(tensors.values()))["y"]
            if delayed and record and kept is None:
                row = self.fp8_meta["scaling_fwd"].amax_history[0]
                with torch.no_grad():
                    self.calibrate(tensors, {}, [as_view(row[slot : slot + 1]) for slot in (FORWARD_SLOTS * i, FORWARD_SLOTS * i + 1)])
            return y
        tensors = tensors | (cached or {})
        made = self._call_of(self._fp8_of(recipe), cached is not None, bias, tensors, delayed)
        return apply(made, list(tensors.values()), wiring)["y"]

    def _call_of(self, fp8: Fp8 | None, cached: bool, bias: str, tensors: dict[str, Tensor], scaled: bool) -> Call:
        """The call of one group's product, the same for all groups."""
        key = (id(fp8), cached, bias, *tensors)
        found = self._calls.get(key)
        if found is None:
            spec = layer_spec(self._spec, fp8, cached, bias, ())
            found = self._calls[key] = (call("linear", spec, tuple(tensors), ("",) if fp8 is not None else (), scaled), fp8)
        return found[0]

    def _cached_group(self, i: int, fp8: Fp8, first: bool, tensors: dict[str, Tensor], wiring: Wiring) -> dict[str, Tensor]:
        """The group's FP8 weight: cast now for the first micro-batch, or where there is none by this recipe."""
        text = encode(fp8)
        if self._weights is None or self._weights[0] != text:
            self._weights = (text, {})
        known: Any = self._weights[1]
        if first or i not in known:
            spec = layer_spec(self._spec, fp8, False, "none", ())
            made = call("weight_cast", spec, ("weight0",), ("",), wiring is not NO_STATE)
            only = Wiring(wiring.scales, None if wiring.front is None else {"w_amax": wiring.front["w_amax"]})
            with torch.no_grad():
                known[i] = apply(made, [tensors["weight0"]], NO_STATE if wiring is NO_STATE else only)
        return known[i]  # type: ignore[no-any-return]


def _of(i: int, wiring: Wiring) -> Wiring:
    """The part of a layer's wiring that one group reads and writes."""
    def part(views: Mapping[str, ArrayView] | None, suffix: str) -> Any:
        start = f"{i}_"
        return None if views is None else {n.removeprefix(start): v for n, v in views.items() if n.startswith(start) and n.endswith(suffix)}

    return wiring._replace(scales=part(wiring.scales, "scale"), front=part(wiring.front, "amax"), late=part(wiring.late, "scale"),
                           back=part(wiring.back, "amax"))
