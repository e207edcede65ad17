"""What a program's own layers ask of ``TransformerEngineBaseModule``: subclasses whose ``forward`` is made of
``quantizers`` and ``general_gemm``, say, and of none of fp8kit's operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fp8kit.autocast import touch_forward
from fp8kit.errors import ArgumentError
from fp8kit_torch.arguments import not_compiled
from fp8kit_torch.checks import of_one
from fp8kit_torch.parameters import normal_init
from fp8kit_torch.quantized_tensor import QuantizedTensor
from fp8kit_torch.state import finish_backward
from fp8kit_torch.te_compat.quantizers import Quantizer
from fp8kit_torch.torch_compat import own_parameters

Init = Callable[[Tensor], Any]
# what makes a forward one that torch.compile is not to look into, as Transformer Engine's own are: tensors
# that hold codes are no part of a graph
_EAGER = frozenset(("prepare_forward", "prepare_forward_ctx", "quantizers", "get_weight_workspace"))
_WHY = str(not_compiled("a program's own layer with quantizers"))


class OwnLayer:
    """Of a layer whose ``forward`` may be a program's own: it says in ``prepare_forward`` how many GEMMs it
    has, and torch.compile leaves it to eager code."""

    gemms: tuple[str, ...]
    fp8_meta: dict[str, Any]
    _inits: dict[str, Init]
    _parameters: dict[str, Parameter | None]
    _workspaces: dict[str | None, QuantizedTensor]

    def _forget(self) -> None:
        super()._forget()  # type: ignore[misc]
        self._workspaces = {}

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_workspaces": {}}  # type: ignore[misc, no-any-return]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        forward = vars(cls).get("forward")
        names = getattr(getattr(forward, "__code__", None), "co_names", ())
        if not _EAGER.isdisjoint(names):
            cls.forward = torch.compiler.disable(forward, reason=_WHY)  # type: ignore[attr-defined]

    def register_parameter(
        self,
        name: str,
        param: Parameter | None,
        init_fn: Init | None = None,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        fp8_meta_index: int | None = None,
    ) -> None:
        """As torch's. With any of the further arguments ``reset_parameters`` starts the parameter anew: by
        ``init_fn``, None is normal with standard deviation 0.023, within the tracker's ``fork``.
        ``fp8_meta_index``: the slot of the weight, which ``quantizers`` know."""
        super().register_parameter(name, param)  # type: ignore[misc]
        if init_fn is not None or get_rng_state_tracker is not None or fp8_meta_index is not None:
            init = normal_init if init_fn is None else init_fn
            tracked = get_rng_state_tracker is not None
            self._inits[name] = partial(_forked, get_rng_state_tracker, init) if tracked else init

    def weight_inputs(self) -> dict[str, Tensor]:
        """The parameters."""
        own = {name: p for name, p in own_parameters(self).items() if p is not None}
        return own or {"": torch.empty(0)}

    def get_weight_workspace(
        self,
        *,
        tensor: Tensor | None = None,
        quantizer: Quantizer | None = None,
        cache_name: str | None = None,
        update_workspace: bool = True,
        skip_update_flag: Tensor | None = None,
        fsdp_group: Any = None,
        workspace_dtype: torch.dtype | None = None,
    ) -> QuantizedTensor:
        """A weight's QuantizedTensor: ``tensor`` (N, K), cast by ``quantizer``, which are needed where it is
        made or cast anew; a ``tensor`` that is one is returned as it is.

        ``cache_name``: keep it under that name until the layer is moved, and cast later tensors over it, as
        long as quantizers ask for nothing else; ``update_workspace``: False takes what is kept.
        ``skip_update_flag``: one element, on the device, asked in the place of ``update_workspace``: where it
        is not 0 the kept values stay.
        ``workspace_dtype``: of its values, None for ``tensor``'s. ``fsdp_group``: None, or a group of one
        process. ArgumentError where ``tensor`` or ``quantizer`` is missing.
        """
        made, new = quantize_weight(
            tensor=tensor,
            quantizer=quantizer,
            workspace=self._workspaces.get(cache_name),
            update_workspace=update_workspace,
            skip_update_flag=skip_update_flag,
            fsdp_group=fsdp_group,
            workspace_dtype=workspace_dtype,
            cache=cache_name is not None,
        )
        if new is not None:
            self._workspaces[cache_name] = new
        return made

    def open_forward(self, inp: Tensor, num_gemms: int) -> Tensor:
        """``inp``; of a program's own layer its state of delayed scaling is there from then on, and updated
        when the autocast ends and when ``inp``'s gradient is there."""
        layer: Any = self
        if len(self.gemms) != num_gemms:
            self.gemms = tuple(map(str, range(num_gemms)))
        scope = layer._scope()
        if scope is None or not (scope.enabled or scope.calibrating) or scope.recipe.history is None:
            return inp
        layer.prepare(scope.recipe.history.length)
        forward, backward = (self.fp8_meta[f"scaling_{name}"] for name in ("fwd", "bwd"))
        around = touch_forward(forward, scope.recipe, torch.is_grad_enabled())
        forward.group = backward.group = around.amax_reduction_group
        if not (torch.is_grad_enabled() and inp.requires_grad):
            return inp
        return _Ending.apply(inp, ((scope.recipe.history, backward, None),))  # type: ignore[no-any-return]


def quantize_weight(
    *,
    tensor: Tensor | None = None,
    quantizer: Quantizer | None = None,
    workspace: QuantizedTensor | None = None,
    update_workspace: bool = True,
    skip_update_flag: Tensor | None = None,
    fsdp_group: Any = None,
    workspace_dtype: torch.dtype | None = None,
    cache: bool = False,
) -> tuple[QuantizedTensor, QuantizedTensor | None]:
    """(A weight's QuantizedTensor, what the program is to keep as ``workspace`` from now on, or None):
    ``TransformerEngineBaseModule.get_weight_workspace`` where the program itself keeps what it gave.

    ``workspace``: what was kept, cast over and returned unless the ``quantizer`` asks for something else.
    ``cache``: whether a new one is to be kept; plain tensors, as of an ``IdentityQuantizer``, never are. The
    rest, and the errors, as there.
    """
    operation = "quantize_weight"
    of_one(operation, "fsdp_group", fsdp_group)
    if isinstance(tensor, QuantizedTensor):
        return tensor, None
    held = workspace
    if held is not None and quantizer is not None:
        asked, there = quantizer.get_usages(), held.get_usages()
        missing = any(asked[use] and not there[use] for use in asked)
        if (
            missing
            or _kind(held._get_quantizer()) != _kind(quantizer)
            or workspace_dtype not in (None, held.dtype)
        ):
            held = None
    if held is not None and not update_workspace and skip_update_flag is None:
        return held, None
    for name, value in {"tensor": tensor, "quantizer": quantizer}.items():
        if value is None and (held is None or name == "tensor"):
            raise ArgumentError(operation, name, None, "one: nothing is kept, or it is to be cast anew")
    assert tensor is not None
    if held is not None:
        if quantizer is None:
            return held.quantize_(tensor.detach(), noop_flag=skip_update_flag), None
        return quantizer.update_quantized(tensor.detach(), held, noop_flag=skip_update_flag), None
    assert quantizer is not None
    made: Any = quantizer.quantize(tensor.detach(), dtype=workspace_dtype)
    if not isinstance(made, QuantizedTensor):  # that of an IdentityQuantizer, which costs nothing
        return made, None
    made.update_quantizer(quantizer.copy())  # as it is now, for the next comparison
    return made, made if cache else None


_ASKED = ("dtype", "block_scaling_dim", "force_pow_2_scales", "amax_epsilon")


def _kind(quantizer: Quantizer) -> Any:
    """What quantizers of the same tensors share: their tiles and the rule of their scales."""
    return type(quantizer), *[getattr(quantizer, name, None) for name in _ASKED]


def _forked(tracker: Callable[[], Any], init: Init, tensor: Tensor) -> None:
    with tracker().fork():
        init(tensor)


class _Ending(torch.autograd.Function):
    """A layer's input, whose gradient is the last that its backward makes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Any) -> Tensor:
        ctx.tokens = tokens
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        finish_backward(ctx.tokens)
        return grad, None
