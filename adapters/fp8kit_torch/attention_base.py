"""``AttentionBase``: what attention, and layers that are made of others, ask of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fp8kit.arrays import ArrayView
from fp8kit.attention_quantization import AttentionQuantization
from fp8kit.autocast import traced_state
from fp8kit.errors import ArgumentError, FormatError, ShapeError
from fp8kit.formats import DType
from fp8kit.layers.attention_base import AttentionBase as Shared
from fp8kit.layers.attention_inputs import MISPLACED, alibi_slopes
from fp8kit.layers.parallel import Grouped
from fp8kit_torch import recompute
from fp8kit_torch.arguments import has_foreign_code, want_like
from fp8kit_torch.autocast import recipe_key
from fp8kit_torch.layer import TorchLayer
from fp8kit_torch.library import policy_now
from fp8kit_torch.module import part_of
from fp8kit_torch.specs import attention_draws, attention_text
from fp8kit_torch.te_compat.methods import TransformerEngineMethods, within
from fp8kit_torch.torch_compat import FORWARD_HOOKS, MODULES, global_forward_hooks
from fp8kit_torch.views import FLOATS, as_view, dtype_of, kind_of

# parts that may have no FP8 products
_PLAIN = ("q_norm", "k_norm", "layernorm", "self_attention_norm", "inter_attention_norm", "mlp_norm")


@lru_cache(maxsize=64)
def _slopes(heads: int, device: torch.device) -> Tensor:
    return torch.tensor(alibi_slopes(heads), dtype=torch.float32, device=device)


class AttentionBase(Shared, TransformerEngineMethods, TorchLayer):
    """Base of attention and of the layers around it."""

    @property
    def parts(self) -> Mapping[str, Any]:
        return self.__dict__[MODULES]  # type: ignore[no-any-return]

    def grouped_parts(self) -> list[Grouped]:
        return [*within(self, Grouped)]

    def attention_quantization(self) -> AttentionQuantization | None:
        found = super().attention_quantization()
        if found is not None:
            recompute.idle()  # so that a checkpoint's recompute passes find the autocast of the first
        return found

    def attention_spec(
        self, quantises: bool, fields: tuple[Any, ...], plain_backward: bool = False
    ) -> tuple[Any, bool]:
        state = traced_state() if quantises and self.is_compiling() else None
        if state is None or not state.enabled:
            return super().attention_spec(quantises and not self.is_compiling(), fields, plain_backward)
        recipe, name = recipe_key(state), getattr(self, "name", None) or ""
        return attention_text(fields, recipe, name, plain_backward), attention_draws(recipe, name)

    def check_part(self, operation: str, name: str, x: Tensor) -> None:
        if name in _PLAIN:
            want_like(operation, name, getattr(self, name), x)
        else:
            part_of(self.layer_name, name, self.__dict__[MODULES][name]).want_ready(operation, name, x)

    def may_fuse(self, *parts: Any) -> bool:
        if global_forward_hooks():
            return False
        here = self.frontend
        known = here.MultiheadAttention, here.Linear, here.LayerNormMLP
        for part in parts:
            if type(part) not in known or part.__dict__[FORWARD_HOOKS] or "forward" in vars(part):
                return False
        return True

    def has_hooks(self, part: Any) -> bool:
        return not isinstance(part, Grouped) or has_foreign_code(part)

    def dtype_of(self, kind: DType) -> torch.dtype:
        return dtype_of(kind)

    def kind_of(self, dtype: torch.dtype) -> DType:
        return kind_of(dtype)

    def constant(self, argument: str, value: Any, like: Any) -> Tensor:
        if not isinstance(value, Tensor):
            raise ArgumentError(self.layer_name, argument, type(value).__name__, "a tensor")
        return value.detach().to(like.device)

    def same_dtype(self, value: Tensor, like: Tensor) -> Tensor:
        return value.to(like.dtype)

    def widened(self, value: Tensor) -> Tensor:
        return value.float() if value.dtype in FLOATS else value

    def detached(self, parameter: Tensor, like: Tensor) -> Tensor:
        return parameter.detach().to(like.dtype)

    def host_views(self, inputs: Mapping[str, Any]) -> Mapping[str, ArrayView]:
        if self.is_compiling():
            return {}
        there = {n: t for n, t in inputs.items() if type(t) is Tensor and t.device.type == "cpu"}
        return {name: as_view(value) for name, value in there.items()}

    def host_values(self, value: Tensor) -> np.ndarray[Any, Any] | None:
        return None if value.is_meta else value.cpu().numpy()

    def index_array(self, values: np.ndarray[Any, Any], like: Any) -> Tensor:
        return torch.from_numpy(values).to(like.device)

    def indices(self, function: Callable[..., Any], *tensors: Tensor) -> Tensor:
        made: Tensor = function(torch, *tensors)
        return made.to(torch.int32)

    def sums_of_mask(self, mask: Tensor) -> Tensor:
        if mask.dtype not in (torch.bool, torch.uint8):
            wanted = "torch.bool, True where masked out"
            raise FormatError(self.layer_name, "attention_mask", mask.dtype, wanted)
        rows = mask[:, 0, 0] != 0
        if not self.is_compiling() and bool((rows[:, :-1] & ~rows[:, 1:]).any()):
            raise ShapeError(self.layer_name, "attention_mask", *MISPLACED)
        sums = (~rows).sum(1, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return torch.nn.functional.pad(sums, (1, 0))

    def slopes(self, heads: int, device: torch.device) -> Tensor:
        if self.is_compiling():
            return torch.tensor(alibi_slopes(heads), dtype=torch.float32, device=device)
        return _slopes(heads, device)

    def is_deterministic(self) -> bool:
        return policy_now().deterministic
