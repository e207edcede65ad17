"""``DotProductAttention`` (Vaswani et al. 2017; grouped query heads: Ainslie et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fp8kit import layers
from fp8kit.autocast import current
from fp8kit.errors import UnsupportedError
from fp8kit.layers import sequence_policies
from fp8kit.layers.attention_inputs import ResolvedCall
from fp8kit.ops.attention_spec import FORMATS
from fp8kit_torch.arguments import not_compiled
from fp8kit_torch.attention_base import AttentionBase
from fp8kit_torch.fp8_edges import cast_output
from fp8kit_torch.kv_cache import trace_cached
from fp8kit_torch.layer import next_rng
from fp8kit_torch.max_logit import max_logits, traced_max_logits
from fp8kit_torch.packed_views import packed_views
from fp8kit_torch.parameters import ParameterModule, placed
from fp8kit_torch.quantized import want_codes
from fp8kit_torch.te_compat.cache_managers import attend


def _narrow(layer: Any, o: Tensor) -> Tensor:
    return layer.narrowed(o)  # type: ignore[no-any-return]


_narrowed = torch.compiler.disable(_narrow, reason=str(not_compiled("fp8_output of DotProductAttention")))


_by_policies = torch.compiler.disable(
    sequence_policies.attend, reason=str(not_compiled("thd_attention_policies of DotProductAttention"))
)


class DotProductAttention(layers.DotProductAttention, AttentionBase, ParameterModule):
    causal_masks_have_their_corner = True

    def add_offset(self, zeros: bool, device: Any) -> None:
        where = placed(self.layer_name, device) if zeros else None
        offset = torch.zeros(self.num_attention_heads, device=where) if zeros else None
        self.register_buffer("softmax_offset", offset, persistent=False)

    def take_further(self, arguments: SimpleNamespace) -> None:
        super().take_further(arguments)
        self.return_max_logit = bool(arguments.return_max_logit)

    def packed(self, q: Any, k: Any, v: Any, form: Any) -> Any:
        if self.is_compiling() or form not in FORMATS or k is None or v is None:
            return None
        sizes = self.num_attention_heads, self.num_gqa_groups, self._dims
        return packed_views(q, k, v, 1 if form == "thd" else 2, *sizes)

    def attend_by_policies(self, layers: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
        return (_by_policies if self.is_compiling() else sequence_policies.attend)(self, layers, options)

    def max_logit(self, spec: Any, inputs: Mapping[str, Tensor]) -> Tensor:
        if not self.is_compiling():
            return max_logits(spec, inputs)
        detached = [tensor.detach() for tensor in inputs.values()]
        return traced_max_logits(  # type: ignore[no-any-return]
            detached, " ".join(inputs), spec, self.num_attention_heads
        )

    def narrowed(self, o: Tensor) -> Tensor:
        if self.is_compiling():
            return _narrowed(self, o)
        state = current()
        if state is None or self.attention_quantization() is None:
            return o
        fp8 = state.recipe.quantization
        want_codes(self.layer_name, "fp8_output", fp8)
        return cast_output(o, fp8, None, 0, False, None)

    def call_cached(self, prepared: ResolvedCall, inputs: dict[str, Any], cache: Any, rng: bool) -> Tensor:
        if self.return_max_logit:
            wanted = "False beside inference_params: the scores of a cache are not looked at"
            raise UnsupportedError(self.layer_name, "return_max_logit", True, wanted)
        if cache.custom is not None:
            return attend(self, prepared.spec, inputs, cache)
        if not self.is_compiling():
            return super().call_cached(prepared, inputs, cache, rng)  # type: ignore[no-any-return]
        if rng:
            inputs["rng"] = next_rng(next(iter(inputs.values())).device)
        return trace_cached(prepared.spec, inputs, cache.handle, self.layer_number)
