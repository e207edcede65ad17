"""The parameters of ``GroupedLinear``: one for each group, side by side in memory where they can be, or one
for all of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor

from fp8kit import layers
from fp8kit.errors import ShapeError
from fp8kit_torch.bound import TensorMeta
from fp8kit_torch.main_grad import MemberGrad
from fp8kit_torch.module import TransformerEngineBaseModule
from fp8kit_torch.offloading import OPEN, staying_parameters
from fp8kit_torch.quantized_tensor import QuantizedTensor
from fp8kit_torch.side_by_side import Stacks, as_one
from fp8kit_torch.te_compat.grouped_tensor import members_of, stacked
from fp8kit_torch.torch_compat import PARAMETERS, is_capturing, own_parameters


class GroupedWeights(layers.GroupedLinearBase, TransformerEngineBaseModule):
    """See above. ``single_grouped_weight``, ``single_grouped_bias``: whether there is one for all groups."""

    single_grouped_weight: bool
    single_grouped_bias: bool
    _stacks: Stacks

    def _grouped_names(self) -> list[str]:
        asked = {"weight": self.single_grouped_weight, "bias": self.single_grouped_bias and self.use_bias}
        return [name for name, grouped in asked.items() if grouped]

    def _group_parameters(self) -> None:
        """Make one parameter of the weights, and of the biases, where that is asked for."""
        for name in self._grouped_names():
            own = own_parameters(self)
            parts = [own[f"{name}{i}"] for i in range(self.num_gemms)]
            whole: Any = stacked(parts)  # type: ignore[arg-type]
            made: Any = torch.nn.Parameter(whole, parts[0].requires_grad)  # type: ignore[union-attr]
            if isinstance(whole, QuantizedTensor):
                made._high_precision_init_val = whole._high_precision_init_val
            self.register_parameter(name, made)
            for i in range(self.num_gemms):
                self.register_parameter(f"{name}{i}", None)

    def _ungroup_parameters(self, names: list[str]) -> None:
        """Make these parameters one for each group."""
        for name in names:
            whole: Any = getattr(self, name)
            delattr(self, name)
            for i, part in enumerate(_separate(whole)):
                self.register_parameter(f"{name}{i}", torch.nn.Parameter(part, whole.requires_grad))

    def _hold(self, told: bool = False) -> None:
        whole = own_parameters(self).get("weight")
        if whole is not None and whole.is_meta:
            return
        plain = whole is not None and not isinstance(whole, QuantizedTensor)
        names = self._grouped_names() if plain and self._held is not None else []
        self._ungroup_parameters(names)
        super()._hold(told)
        if names:
            self._group_parameters()

    def _members(self, name: str) -> list[Any]:
        """The groups' weights or biases."""
        whole = own_parameters(self).get(name) if name in self._grouped_names() else None
        if whole is not None:
            return members_of(whole)
        if not torch.compiler.is_compiling():
            with suppress(KeyError):  # something else stands for one
                return list(_all_of(name, self.num_gemms)(self.__dict__[PARAMETERS]))
        names = [f"{name}{i}" for i in range(self.num_gemms)]
        return list(self.parameters_by(zip(names, names, strict=True)).values())

    def _put_side_by_side(self) -> None:
        """Let the groups' weights, and their biases, lie in one memory each, where they can."""
        self._stacks.anew = ""
        own = own_parameters(self)
        for name in ("weight", "bias") if self.use_bias else ("weight",):
            if name not in self._grouped_names():
                self._stacks.put(name, [own.get(f"{name}{i}") for i in range(self.num_gemms)])

    def _place_loaded(self) -> None:
        """What ``_put_side_by_side`` does at a first call; a CUDA graph that is captured keeps addresses."""
        if next(self.parameters()).is_cuda and is_capturing():
            self._stacks.anew = ""
        elif not torch.is_inference_mode_enabled():
            self._put_side_by_side()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = self._kinds()
        super()._apply(fn, recurse)
        # not what stays where it is, or goes into memory that processes share
        if self._kinds() != before:
            self._put_side_by_side()
        return self

    def _kinds(self) -> list[tuple[torch.dtype, torch.device]]:
        return [(p.dtype, p.device) for p in self.parameters(recurse=False)]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.__dict__.setdefault("_stacks", Stacks("later")).anew == "now":
            self._put_side_by_side()

    def weight_inputs(self) -> dict[str, Any]:
        return {f"{i}_weight0": weight for i, weight in enumerate(self._members("weight"))}

    def group_biases(self) -> list[Any]:
        return self._members("bias")

    @property
    def weight_names(self) -> list[str]:
        one = self.single_grouped_weight
        return ["weight"] if one else [f"weight{i}" for i in range(self.num_gemms)]

    def main_parameters(self) -> list[Any]:
        """The parameters whose gradient is the weights'."""
        return [own_parameters(self)["weight"]] if self.single_grouped_weight else self._members("weight")

    def main_grad_weights(self) -> dict[str, Any]:
        if not self.single_grouped_weight:
            return super().main_grad_weights()
        whole = own_parameters(self)["weight"]
        return {f"{i}_weight0": MemberGrad(whole, i) for i in range(self.num_gemms)}

    def waiting_weights(self) -> dict[str, Tensor]:
        if not self.single_grouped_weight:
            return super().waiting_weights()
        whole = self.waiting.held(own_parameters(self)["weight"])  # type: ignore[arg-type]
        return {f"{i}_weight0": weight for i, weight in enumerate(members_of(whole))}

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Start every parameter anew; see ``ParameterModule``."""
        names = [] if defer_init else self._grouped_names()
        self._ungroup_parameters(names)
        remade = any(p.is_meta for p in self.parameters(recurse=False))
        super().reset_parameters(defer_init)
        if names:
            self._group_parameters()
        if remade and not defer_init:
            self._put_side_by_side()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """Weights and biases of checkpoints come as one or as several, whatever they are here. What does not
        fit stays as it came, so that torch names it."""
        for name, one in (("weight", self.single_grouped_weight), ("bias", self.single_grouped_bias)):
            if name == "bias" and not self.use_bias:
                continue
            whole, parts = f"{prefix}{name}", [f"{prefix}{name}{i}" for i in range(self.num_gemms)]
            there = [state_dict[part] for part in parts if part in state_dict]
            if one and whole not in state_dict and len(there) == self.num_gemms:
                if len({part.shape for part in there}) == 1:
                    state_dict[whole] = stacked([state_dict.pop(part) for part in parts])
            elif not one and whole in state_dict and not there:
                members = _separate(state_dict[whole])
                if len(members) == self.num_gemms:
                    del state_dict[whole]
                    state_dict |= dict(zip(parts, members, strict=True))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _as_one_kind(self, name: str, x: Any) -> TensorMeta:
        """What stands for the weights or biases as one, as a call on x has them. ShapeError where they are
        not alike."""
        if name in self._grouped_names():
            shape = tuple(own_parameters(self)[name].shape)  # type: ignore[union-attr]
            return TensorMeta(shape, x.dtype, x.device)
        shapes = [*map(_shape, self._members(name))]
        if len({*shapes}) > 1:
            i = next(i for i, shape in enumerate(shapes) if shape != shapes[0])
            wanted = f"shape {tuple(shapes[0])}, as {name}0"
            raise ShapeError("GroupedLinear", f"{name}{i}", f"shape {tuple(shapes[i])}", wanted)
        return TensorMeta((len(shapes), *shapes[0]), x.dtype, x.device)

    def _whole(self, name: str, alone: bool = False) -> tuple[Tensor, list[Any]]:
        """The weights or biases as one tensor (N, ...), and those that it reads where they are; of a copy,
        and of one parameter, none. ``alone``: without a gradient. Gradients of weights wait where
        ``delay_wgrad_compute`` says it."""
        waits = name == "weight" and self.delay_wgrad_compute and not alone and torch.is_grad_enabled()
        compiling, members = torch.compiler.is_compiling(), []
        if grouped := name in self._grouped_names():
            one: Any = own_parameters(self)[name]
            given = self.waiting.held(one) if waits else one
            whole = Tensor.detach(given) if alone else given.view_as(one)  # a plain tensor
        else:
            members = self._members(name)
            joined = None if compiling else self._stacks.find(name, members)
            given = [*map(self.waiting.held, members)] if waits else members
            if joined is None:
                whole = torch.stack(given)
                return (whole.detach() if alone else whole), []
            whole = joined if alone else as_one(joined, *given)
        if not compiling and OPEN.depth:
            staying_parameters(whole, one.detach if grouped else partial(self._stacks.again, name, members))
        return whole, members


_shape = attrgetter("shape")


@lru_cache(maxsize=64)
def _all_of(name: str, count: int) -> Callable[[Any], tuple[Any, ...]]:
    """What takes so many groups' parameters from a mapping, all at once."""
    names = [f"{name}{i}" for i in range(count)]
    return itemgetter(*names) if count > 1 else lambda own: (own[names[0]],)


def _separate(whole: Tensor) -> list[Tensor]:
    """The matrices of a grouped parameter, without a gradient, in its memory."""
    split = getattr(whole, "split_into_quantized_tensors", None)
    return list(whole.detach().unbind(0)) if split is None else split()
