"""``GroupedLinear`` where sizes of groups stay on the device: one product of all groups."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from fp8kit.autocast import current
from fp8kit.errors import Fp8kitError, UnsupportedError, on_behalf_of
from fp8kit.layers.arguments import want_plain
from fp8kit.layers.base import spec_object
from fp8kit.layers.fp8_layer import WeightCache
from fp8kit.ops.expert_linear import expert_linear, expert_weight_cast
from fp8kit.quantization import Quantization
from fp8kit_torch import recompute
from fp8kit_torch.arguments import autocast_dtype, is_there, not_compiled, want_parameters
from fp8kit_torch.bound import TensorMeta, validate
from fp8kit_torch.call import prepare, run
from fp8kit_torch.experts import expert_numbers, expert_product, spec_in_force
from fp8kit_torch.grouped_weights import GroupedWeights
from fp8kit_torch.held_experts import codes_as_one, standing_for, want_held_fit, way_of
from fp8kit_torch.library import trace
from fp8kit_torch.main_grad import StackedMainGrads, filling
from fp8kit_torch.offloading import staying
from fp8kit_torch.quantized_tensor import QuantizedTensor
from fp8kit_torch.specs import with_cached_weight
from fp8kit_torch.torch_compat import any_autocast, own_parameters

_kind = attrgetter("__class__", "shape", "dtype", "device")

_AS_ONE = "experts"  # of the keys of weights that are cast as one


class GroupedOnDevice(GroupedWeights):
    """See above."""

    _wanted: Any = None  # what ``_want_on_device`` was asked last
    _taken: Any = None  # a spec, and the operands of weights that are held in FP8

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_wanted": None, "_taken": None}

    def needs_host_sizes(self) -> str | None:
        # by recipes that want sizes on the host
        coded = self._held is not None and self._held.quantizer is not None
        return "quantized_model_init with scales in FP8" if coded else None

    def check_held(self, fp8: Quantization) -> None:
        if self._held is not None:
            want_held_fit("GroupedLinear", self.main_parameters(), fp8)

    def _held_whole(self, alone: bool, dtype: torch.dtype | None) -> tuple[Tensor, dict[str, Tensor] | None]:
        """``_whole`` of weights that are held in FP8, and their codes where the autocast wants these.
        ``dtype``: that torch.autocast casts to, if it does."""
        weights: list[Any] = self.main_parameters()
        for name, weight in zip(self.weight_names, weights, strict=True):
            if not isinstance(weight, QuantizedTensor):
                wanted = "the QuantizedTensor that quantized_model_init made"
                raise UnsupportedError("GroupedLinear", name, f"a {type(weight).__name__}", wanted)
        fields = self.num_gemms, self.in_features, self.out_features, "oi"
        spec, fp8 = spec_in_force(fields, (self.layer_name, self.name or ""))
        if fp8 is None or None in map(way_of, weights):
            values = [weight.dequantize() for weight in weights]
            whole = values[0] if self.single_grouped_weight else torch.stack(values)
            return (whole.detach() if alone else whole), None
        self.check_held(fp8)
        known = self._taken
        if known is None or known[0] is not spec:
            self.__dict__["_taken"] = known = spec, expert_weight_cast.operands(spec)
        codes = staying(codes_as_one(weights, known[1]))
        return standing_for(weights, codes, alone, dtype), codes

    def _on_device(self, x: Tensor, sizes: Tensor, is_first_microbatch: bool | None) -> Any:
        """``forward`` with sizes that are not looked at."""
        option = "a weight of quantized_model_init" if self._held is not None else ""
        option = "delay_wgrad_compute" if self.delay_wgrad_compute else option
        option = "fuse_wgrad_accumulation" if self.fuse_wgrad_accumulation else option
        if option and self.is_compiling():
            return _LEFT_TO_EAGER[option](self, x, sizes, is_first_microbatch)
        if is_first_microbatch is not None:
            want_plain("GroupedLinear", is_first_microbatch)
        if type(x) is not Tensor and isinstance(x, QuantizedTensor):
            x = x.dequantize()
        first = self.microbatch if is_first_microbatch is None else is_first_microbatch
        fused, main = self.fuse_wgrad_accumulation and torch.is_grad_enabled(), None
        biases = self.group_biases() if self.use_bias else None
        if self._held is None:
            (weight, read), codes = self._whole("weight", fused), None
        else:
            (weight, codes), read = self._held_whole(fused, autocast_dtype(x)), []
        inputs = {"x": x, "weight": weight}
        if biases is not None and not self.return_bias:
            inputs["bias"], _ = self._whole("bias")
        inputs = self.autocast_inputs(inputs)
        read = read if inputs["weight"] is weight else []
        if fused:
            main = StackedMainGrads(self._main_grads(first, inputs["x"].dtype), self.num_gemms)
            inputs["weight"] = filling(inputs["weight"], main, *self.main_parameters())
        layer = self.layer_name, self.name or ""
        sizes = expert_numbers(sizes).to(x.device)
        given = inputs["x"], sizes, inputs["weight"], inputs.get("bias"), layer
        try:
            y = expert_product(*given, read=read, main=main, owner=self, first=first, codes=codes)
        except Fp8kitError as error:
            if error.operation != expert_linear.name or error.argument is None:
                raise
            raise error.renamed("GroupedLinear", error.argument) from None
        return (y, biases) if self.return_bias else y

    def _want_on_device(self, x: TensorMeta) -> None:
        """Raise what ``_on_device`` would raise, whatever the sizes are; at once where this was asked last,
        under the same recipe, of parameters of the same kinds."""
        state, kinds = current(), [*map(_kind, filter(is_there, own_parameters(self).values()))]
        recipe, known = None if state is None else state.recipe, self._wanted
        cast = any_autocast() and autocast_dtype(x)
        asked = x, kinds, cast, None if state is None else state[:2], self.name
        if known is not None and known[0] is recipe and known[1] == asked:
            return
        want_parameters("GroupedLinear", own_parameters(self), x, "")  # type: ignore[arg-type]
        fields = self.num_gemms, self.in_features, self.out_features, "oi"
        spec, fp8 = spec_in_force(fields, (self.layer_name, self.name or ""))
        if fp8 is not None:
            self.check_held(fp8)
        sizes = TensorMeta((self.num_gemms,), torch.int32, x.device)
        inputs = {"x": x, "group_sizes": sizes, "weight": self._as_one_kind("weight", x)}
        if self.use_bias and not self.return_bias:
            inputs["bias"] = self._as_one_kind("bias", x)
        with on_behalf_of("GroupedLinear"):
            validate(expert_linear, spec, inputs)
        self.__dict__["_wanted"] = recipe, asked

    def shared_weights(
        self, first: bool | None, weight: Tensor, fp8: Quantization
    ) -> dict[str, Tensor] | None:
        """All weights in FP8, as one: cast for a step's first micro-batch, or where there are none by this
        recipe; else the first one's; in a checkpoint's recompute pass what the first pass took. None where
        micro-batches share none."""
        idle, found = recompute.idle(), None
        kept = None if idle else recompute.recall(self)
        if kept is not None:
            return kept.weights  # type: ignore[no-any-return]
        if first is not None:
            key, held = (_AS_ONE, self.cache_key(fp8)), self._weights
            if first or held is None or held.key != key:
                self._weights = held = WeightCache(key, self._cast_as_one(weight, fp8))
            found = staying(held.arrays)
        if not idle:
            recompute.keep(self, None, found)
        return found

    def traced_weights(self, first: bool, weight: Tensor, spec: str) -> tuple[str, dict[str, Tensor]]:
        """``shared_weights`` within ``torch.compile``: the operation's spec, and its inputs; ``spec``: its
        text where no weight is cast before."""
        fp8, cached = with_cached_weight(spec)
        if not fp8:
            return spec, {}
        if first or self._weights is None or self._weights.key != (_AS_ONE, fp8):
            with torch.no_grad():
                made = trace(expert_weight_cast, spec, {"weight": weight.detach()})
            self._weights = WeightCache((_AS_ONE, fp8), made)
        return cached, self._weights.arrays

    def _cast_as_one(self, weight: Tensor, fp8: Quantization) -> dict[str, Tensor]:
        spec = spec_object("ExpertLinearSpec", self.num_gemms, self.in_features, self.out_features, "oi", fp8)
        with torch.inference_mode(False), torch.no_grad():
            return run(*prepare(expert_weight_cast, spec, {"weight": weight.detach()}))

    def cast_weights(
        self, fp8: Quantization, bias: str, inputs: Mapping[str, Any], binding: Any
    ) -> dict[str, Any]:
        if self._weights is None or self._weights.key[:1] != (_AS_ONE,):
            return super().cast_weights(fp8, bias, inputs, binding)
        weight, _ = self._whole("weight", True)
        return self._cast_as_one(self.autocast_inputs({"x": weight})["x"], fp8)


# option -> ``_on_device`` where torch.compile breaks, or says why it cannot
_LEFT_TO_EAGER = {
    option: torch.compiler.disable(GroupedOnDevice._on_device, reason=str(not_compiled(option)))
    for option in ("fuse_wgrad_accumulation", "delay_wgrad_compute", "a weight of quantized_model_init")
}
