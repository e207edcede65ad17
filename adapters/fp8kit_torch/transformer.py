"""``TransformerLayer``: attention and MLP, each with its norm, its residual and its dropout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fp8kit import inspection, layers
from fp8kit.autocast import checking_finite, current, finite_checks
from fp8kit_torch import recompute
from fp8kit_torch.attention_base import AttentionBase
from fp8kit_torch.chains import Call, Pending, run_chain
from fp8kit_torch.torch_compat import MODULES, any_autocast, call_changes, global_hooks

# bytes of x from which on a layer runs operation by operation: the GPU's work then takes longer than the
# calls, and each operation frees its memory as soon as it can
LARGE = 16 << 20


class TransformerLayer(layers.TransformerLayer, AttentionBase):
    def _layer(
        self, x: Any, first: bool | None, core: Mapping[str, Any], cross: Mapping[str, Any], paths: Any
    ) -> Any:
        if first is not None or cross or not self._may_chain(x, core):
            return super()._layer(x, first, core, cross, paths)
        calls: list[Call] = []
        super()._layer(Pending(calls, x, x), first, core, cross, paths)
        return run_chain(self, calls)

    def _may_chain(self, x: Any, core: Mapping[str, Any]) -> bool:
        """Whether the layer's operations may run as one chain: the layer is small, and nothing reads, keeps
        or recomputes what its parts return (hooks, subclasses, calibration, checkpoints, an inspector, a look
        for NaN)."""
        if (
            self.is_compiling()
            or inspection.hooks.inspector is not None
            or (finite_checks.ever and checking_finite())
        ):
            return False
        state, modules = current(), self.__dict__[MODULES]
        if type(x) is not Tensor or x.nbytes >= LARGE or any_autocast():
            return False
        if core["checkpoint_core"] is not False or "inference_params" in core["options"]:
            return False
        if core["prepared"].core is None:  # attention by policies, several operations
            return False
        if (state is not None and state.calibrating) or not recompute.idle() or global_hooks():
            return False
        attention, mlp = modules["self_attention"], modules["layernorm_mlp"]
        if not attention.input_layernorm or attention._separate or self.layernorm is not None:
            return False
        own = attention.__dict__[MODULES]
        if own["core_attention"].context is not None:  # several operations, between which ranks communicate
            return False
        here = self.frontend
        products = (
            (own["layernorm_qkv"], here.LayerNormLinear),
            (own["proj"], here.Linear),
            (mlp, here.LayerNormMLP),
        )
        others = (attention, here.MultiheadAttention), (own["core_attention"], here.DotProductAttention)
        for part, kind in (*products, *others):
            # somebody else's code: another class, a forward set on the object or its class, compile()
            if type(part) is not kind or "forward" in vars(part) or "forward" in vars(kind):
                return False
            if any(call_changes(part)):
                return False
        for part, _ in products:
            if part.microbatch is not None:  # casts that micro-batches share are taken by each part
                return False
            if part._held is not None or part.fuse_wgrad_accumulation:
                return False
        return True
