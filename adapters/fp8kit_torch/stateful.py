"""Modules with FP8 state and weights that may be held in FP8: how these are made, moved, copied, saved and
loaded."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fp8kit.errors import CheckpointError, UnsupportedError
from fp8kit.execution.codec import decode
from fp8kit.layers.fp8_layer import FP8Layer
from fp8kit.scaling import BACKWARD_SLOTS, FORWARD_SLOTS, check_saved
from fp8kit_torch import extra_state
from fp8kit_torch.checks import CALLED, check
from fp8kit_torch.constants import constant_result
from fp8kit_torch.distributed_weights import is_distributed
from fp8kit_torch.parameters import ParameterModule
from fp8kit_torch.quantized import HeldWeights, QuantizedTensor, ShardedWeight, held_now
from fp8kit_torch.quantized_tensor import SHARED
from fp8kit_torch.specs import layer_products
from fp8kit_torch.state import FIELDS, ScalingState, moved
from fp8kit_torch.te_compat.extra_state import any_extra_state
from fp8kit_torch.te_compat.module_state import Meta
from fp8kit_torch.torch_compat import local_part, own_parameters, set_own_parameters
from fp8kit_torch.views import as_view

log = logging.getLogger("fp8kit")
_MODULES: weakref.WeakSet[StatefulModule] = weakref.WeakSet()


@functools.cache
def _say_replaced() -> None:
    """Warn once that a parameter has taken another one's place."""
    log.warning(
        "a layer made within quantized_model_init holds weights in FP8 now that were put there in high "
        "precision: whatever else has these parameters, an optimiser or a tied layer, has the former ones"
    )


class StatefulModule(FP8Layer, ParameterModule):
    """What a layer of FP8 products keeps beside its parameters."""

    holds = True  # whether quantized_model_init concerns its weights
    _held: HeldWeights | None = None
    _afresh = False  # whether the next use of the state of delayed scaling makes it anew
    _resetting = False  # while parameters have memory and no values yet
    fp8_meta: Meta

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = cls.__module__.partition(".")[0] != "fp8kit_torch"  # a user's
        if own and not hasattr(cls, "layer_name"):
            cls.layer_name = cls.__name__

    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta = Meta()
        _MODULES.add(self)

    def set_spec(self, spec: Any) -> None:
        """The operation's spec in high precision; recipes and call options vary it."""
        made = "_spec" in vars(self)
        super().set_spec(spec)
        if not made:
            self._held = held_now() if self.holds else None
        self._hold()

    def _hold(self, told: bool = False) -> None:
        """Hold the weights in FP8 where ``quantized_model_init`` says so; those on the meta device once they
        are made. ``told``: the log says that parameters have been replaced."""
        if self._held is None or self._held.fp8 is None:
            return
        try:
            weights, parts = self.weight_inputs(), layer_products(self._spec)
        except AttributeError:  # a program has taken them out
            return
        if len(weights) != len(self.gemms):
            got = f"{len(weights)} weights for {len(parts)} products in {type(self).__name__}"
            wanted = (
                "one a product, which has one scale (no parameters_split; fuse_qkv_params=True in attention)"
            )
            raise UnsupportedError("quantized_model_init", "weights", got, wanted)
        names = {id(parameter): name for name, parameter in own_parameters(self).items()}
        for weight in weights.values():
            name = names.get(id(weight))  # none where something else stands for the parameter
            if name is None or isinstance(local_part(weight), (QuantizedTensor, ShardedWeight)):
                continue
            if not is_distributed(weight):
                own_parameters(self)[name] = self._held.parameter(weight)
                if told and not weight.is_meta:
                    _say_replaced()
            elif not weight.is_meta:
                got = "parts of a weight that fully_shard got without its scales"
                wanted = "scales of tensors or of blocks of 128, in a layer that was made within"
                raise UnsupportedError("quantized_model_init", "weights", got, wanted)

    def register_parameter(self, name: str, param: Parameter | None) -> None:
        """As torch's. A weight on the meta device whose values come is held as ``quantized_model_init``
        said; one that a program has cast itself is multiplied as it is."""
        former = own_parameters(self).get(name)
        super().register_parameter(name, param)
        if self.holds and self._held is None and isinstance(param, QuantizedTensor):
            self._held = HeldWeights(None, False, param._get_quantizer())
        elif isinstance(former, QuantizedTensor) and not isinstance(param, QuantizedTensor):
            others = own_parameters(self).values()
            if self._held is not None and self._held.fp8 is None and not any(map(_is_held, others)):
                self._held = None
        came = former is not None and former.is_meta and param is not None and not param.is_meta
        if came and not self._resetting:
            self._hold()

    def reset_parameters(self, defer_init: bool = False) -> None:
        """As ``ParameterModule``; weights in FP8 are cast anew."""
        check(type(self).__name__, CALLED, {"defer_init": defer_init})
        self.__dict__["_resetting"] = True
        try:
            for name, parameter in own_parameters(self).items():
                if not defer_init and isinstance(parameter, (QuantizedTensor, ShardedWeight)):
                    self.register_parameter(name, _plain(parameter))
            super().reset_parameters(defer_init)
        finally:
            self.__dict__["_resetting"] = False
        if not defer_init:
            self._hold()

    def prepare(self, history_len: int, resize: bool = True) -> None:
        """Make the FP8 state where there is none, and give its history that length."""
        weight = next(iter(self.weight_inputs().values()))
        if self._afresh:
            self.fp8_meta.clear()
            self._afresh = False
        for name, slots in (("scaling_fwd", FORWARD_SLOTS), ("scaling_bwd", BACKWARD_SLOTS)):
            state = self.fp8_meta.get(name)
            if state is None:
                self.fp8_meta[name] = ScalingState(slots * len(self.gemms), history_len, weight.device)
            elif resize and state.history_len != history_len:
                state.resize(history_len)
                self._binding = None

    # --- moved, saved, loaded -------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        whole = own_parameters(self)
        shells = {name for name, p in whole.items() if isinstance(p, ShardedWeight) and _is_made(p, fn)}
        held = shells | {name for name, p in whole.items() if isinstance(p, QuantizedTensor)}
        whole = {name: _plain(p) if name in shells else p for name, p in whole.items()}
        plain = {name: p for name, p in whole.items() if not isinstance(p, QuantizedTensor)}
        set_own_parameters(self, plain)
        try:
            super()._apply(fn, recurse)
            for name, parameter in whole.items():
                if isinstance(parameter, QuantizedTensor):
                    probe = fn(torch.empty(0, dtype=parameter.dtype, device=parameter.device))
                    if probe.is_meta:  # where layers have plain parameters until these are made
                        shell = probe.new_empty(parameter.shape)
                        whole[name] = Parameter(shell, parameter.requires_grad)
                    else:
                        parameter.follow(fn)
        finally:
            plain = own_parameters(self)  # which torch may have replaced
            whole = {name: plain.get(name, parameter) for name, parameter in whole.items()}
            for name in held if self._held is not None else ():
                if type(whole[name]) is Parameter and whole[name].is_meta:
                    whole[name] = self._held.parameter(whole[name])
            set_own_parameters(self, whole)
        self.fp8_meta = Meta(moved(self.fp8_meta, fn), self.fp8_meta.beside)
        self._forget()
        # with ``preserve``, weights of ``to_empty`` are plain until their values are loaded
        if self._held is not None and not (self._held.preserve or any(map(is_distributed, whole.values()))):
            self._hold(told=not shells)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _MODULES.add(self)

    def get_extra_state(self) -> Tensor:
        """The FP8 state as uint8 (n,) on the CPU, see ``extra_state``; (0,) before the first step with
        delayed scaling."""
        parts = {
            f"{name}.{field}": part
            for name, state in self.fp8_meta.items()
            for field, part in zip(FIELDS, state.parts, strict=True)
        }
        found = extra_state.pack(parts)
        found.owner = extra_state.Owner(self.set_extra_state)
        return found

    def set_extra_state(self, state: Tensor) -> None:
        """Take over what ``get_extra_state`` gave, or Transformer Engine's (``te_compat.extra_state``).
        CheckpointError where it does not fit, with nothing changed."""
        parts, checked = self._checked_state(state, "set_extra_state", "state")
        device = next(iter(self.weight_inputs().values())).device
        device = torch.device("cpu") if device.type == "meta" else device
        states = {
            name: ScalingState.of([parts[f"{name}.{field}"].to(device) for field in FIELDS])
            for name in checked
        }
        self.fp8_meta, self._afresh = Meta(states, self.fp8_meta.beside), False
        self._forget()

    def _checked_state(self, state: Tensor, operation: str, argument: str) -> tuple[dict[str, Tensor], Any]:
        gemms = len(self.gemms)
        try:
            parts = any_extra_state(state, gemms)
            return parts, check_saved({name: as_view(part) for name, part in parts.items()}, gemms)
        except CheckpointError as error:
            raise error.renamed(operation, argument) from None

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = f"{prefix}_extra_state"
        if key in state_dict:  # before a weight is changed
            self._checked_state(state_dict[key], "load_state_dict", key)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if key in missing_keys:  # weights of a model that was never in FP8
            missing_keys.remove(key)
        self._weights = None
        self._hold(told=True)


def _is_held(parameter: Parameter | None) -> bool:
    return isinstance(parameter, QuantizedTensor)


def _is_shared(parameter: Tensor) -> bool:
    """Whether several layers have a parameter."""
    return sum(own is parameter for module in list(_MODULES) for own in own_parameters(module).values()) > 1


def _is_made(parameter: Parameter, fn: Callable[[Tensor], Tensor]) -> bool:
    """Whether a parameter on the meta device gets memory by ``fn``."""
    probe = torch.empty(0, dtype=parameter.dtype, device="meta")
    return parameter.is_meta and not fn(probe).is_meta


def _plain(parameter: Parameter) -> Parameter:
    """New memory for a parameter, held in no special way."""
    fresh = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    made = Parameter(fresh, parameter.requires_grad)
    if isinstance(parameter, ShardedWeight):  # which has no attributes of its own kind among them
        vars(made).update(vars(parameter))
    return made


@constant_result
def prepare_all(history: str, layer: tuple[str, str]) -> int:
    """Before a compiled function reads FP8 state: every live module has one, as long as the ``AmaxHistory``
    of this text says. All of them at once, so that layers that share their compiled code do not each ask for
    another compilation. Where recipes differ from layer to layer, with the class and the name of a ``layer``,
    other modules keep the length that they have. Returns that length."""
    length = decode(history).length
    for module in list(_MODULES):
        if not next(iter(module.weight_inputs().values())).is_meta:
            module.prepare(length, layer in (("", ""), (module.layer_name, module.name or "")))
    return length  # type: ignore[no-any-return]


SHARED.append(_is_shared)
