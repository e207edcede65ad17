"""What ``convert`` puts in the place of plain layers: modules around the same parameters, which are instances
of the plain layers' classes, so that libraries that look for ``nn.Linear`` or ``nn.LayerNorm`` find them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fp8kit.execution.codec import encode
from fp8kit.ops.linear import LinearSpec, linear
from fp8kit.ops.norm import NormSpec, norm
from fp8kit.ops.product import ProductSpec
from fp8kit_torch.arguments import autocast_dtype, want_input
from fp8kit_torch.call import apply
from fp8kit_torch.collectives import TorchCollectives
from fp8kit_torch.converted_attention import register
from fp8kit_torch.distributed_weights import (
    Part,
    is_distributed,
    part_of_weight,
    product_in_parts,
    rows_in_parts,
)
from fp8kit_torch.module import TransformerEngineBaseModule
from fp8kit_torch.torch_compat import own_parameters, take_hooks, twin_of, unseen
from fp8kit_torch.views import FLOATS


class _Bare(nn.Module):
    """Ends a chain of constructors: the plain layer's class comes after it, and its constructor is not
    called."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


class Converted(nn.Module):
    """What stands for a plain module: the same parameters, and the module itself, out of torch's sight."""

    def adopt(self, plain: nn.Module) -> None:
        """Take over the plain module's parameters, hooks, mode and further attributes."""
        self.__dict__["plain"] = plain  # not a submodule: it would show in names and counts
        for name in ("weight", "bias"):
            self.register_parameter(name, getattr(plain, name, None))
        self.training = plain.training
        take_hooks(self, plain)  # what a user or a library has hung on a module goes with it
        for name, value in vars(plain).items():
            self.__dict__.setdefault(name, value)

    def give_back(self) -> nn.Module:
        """The plain module, with what this one's parameters are now."""
        plain: nn.Module = self.__dict__["plain"]
        given = own_parameters(plain)
        given.update((name, p) for name, p in own_parameters(self).items() if name in given)
        plain.train(self.training)
        return plain

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Start the parameters anew, as the plain module does."""
        if not defer_init:
            type(self.__dict__["plain"]).reset_parameters(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # the class is made at run time: a pickle has the two that it is made of
        kind, ours = type(self.__dict__["plain"]), type(self).__bases__[0]
        return _empty, (ours, kind), self.__getstate__()


@cache
def standing_for(ours: type[Converted], kind: type[nn.Module]) -> type[Any]:
    """The class of a converted module: ``ours``, and an instance of the plain module's class ``kind``."""
    doc = f"{ours.__name__} in the place of a {kind.__name__}."
    return type(ours.__name__, (ours, kind), {"__doc__": doc, "__module__": ours.__module__})


def _empty(ours: type[Converted], kind: type[nn.Module]) -> Any:
    register()  # a pickled model's configuration may have the name
    made = standing_for(ours, kind)
    return made.__new__(made)


class ConvertedLinear(Converted, TransformerEngineBaseModule, _Bare):
    """y = x W^T + b for an ``nn.Linear``, y = x W + b for a ``Conv1D``, with the plain module's parameters;
    FP8 under ``autocast``.

    A weight that is replaced by one of another size (``resize_token_embeddings``) counts from the next call
    on. One that torch's ``parallelize_module`` distributes is multiplied in its parts
    (``distributed_weights``)."""

    operation, layer_name = linear, "Linear"
    holds = False  # the parameters are the plain module's
    row_output: Any = None  # the placement that rows of a weight are to give
    _sequence = False  # whether ranks have parts of the rows of x or y

    def __init__(self, plain: nn.Module, layout: str) -> None:
        super().__init__()
        self.adopt(plain)
        self.layout = layout
        self._take_sizes()

    def _take_sizes(self) -> None:
        """What follows from the parameters as they are now."""
        self._shape, self._part = self.weight.shape, part_of_weight(self.weight, self.layout)
        out, features = self._shape if self.layout == "oi" else reversed(self._shape)
        self.in_features, self.out_features = int(features), int(out)
        if self.layout == "io":
            self.nx, self.nf = self.in_features, self.out_features  # Conv1D's names
        self._specify()

    def _specify(self) -> None:
        """The spec of this rank's part."""
        own = Part("whole", self.in_features, self.out_features) if self._part is None else self._part
        self.mode = "none" if self.bias is None or own.kind == "row" else "add"
        shared: dict[str, Any] = {}
        if own.kind != "whole":  # DTensor makes the sums, but for those of parts of a sequence
            ranks = TorchCollectives.of(self.weight.device_mesh.get_group())
            shared = {"parallel": own.kind, "group": ranks.name, "label": self.name or "Linear"}
            shared |= {"sequence": self._sequence, "sums": self._sequence}
        self._forget()
        self.set_spec(LinearSpec(ProductSpec(own.features, (own.out,), self.layout, self.mode, **shared)))

    def _changed(self) -> bool:
        distributed = is_distributed(self.weight) is not (self._part is not None)
        return distributed or self.weight.shape != self._shape

    def weight_inputs(self) -> dict[str, Tensor]:
        return {"weight0": self.weight}

    def calibrate(
        self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
    ) -> list[tuple[int, Tensor]]:
        return [(0, inputs["x"]), (1, inputs["weight0"])]

    def forward(self, x: Tensor) -> Tensor:
        """``x``: (..., in_features) of the weight's dtype. For one on the meta device the result has a shape
        and no values, wherever the weight is."""
        if self._changed():
            self._take_sizes()
        x = want_input("Linear", "inp", x, self.in_features)
        if x.is_meta and not self.weight.is_meta:
            return x.new_empty((*x.shape[:-1], self.out_features))
        if self._part is not None:
            output = self.row_output
            return product_in_parts(self._product, self._part, x, self.weight, self.bias, output)
        return self._product(x, self.weight, self.bias)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None, sequence: bool = False) -> Tensor:
        if sequence is not self._sequence:
            self._sequence = sequence
            self._specify()
        return self.run({"x": x, "weight0": weight, "bias0": bias}, None, self.mode)["y"]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # nothing beside what the plain module would save
        if not destination[f"{prefix}_extra_state"].numel():
            del destination[f"{prefix}_extra_state"]

    def extra_repr(self) -> str:
        """Sizes and layout."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        )


EPSILONS = ("variance_epsilon", "eps", "epsilon")  # the plain modules' names


class ConvertedNorm(Converted, _Bare):
    """LayerNorm or RMSNorm over the last dimension in one pass, with the plain module's parameters."""

    def __init__(self, plain: nn.Module, spec: NormSpec) -> None:
        super().__init__()
        self.adopt(plain)
        self._found: dict[tuple[Any, ...], torch.dtype] = {}
        self.spec, self._text = spec, encode(spec)

    @property
    def eps(self) -> float:
        """The norm's; what is set is the plain module's too."""
        return self.spec.epsilon

    @eps.setter
    def eps(self, value: float) -> None:
        self.spec = replace(self.spec, epsilon=float(value))
        self._text, plain = encode(self.spec), self.__dict__["plain"]
        for name in EPSILONS:
            if hasattr(plain, name):
                setattr(plain, name, value)

    variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        """``x``: (..., features). Computed in the wider of its and the weight's dtype; the result has the
        dtype of the plain module's, also within ``torch.autocast``, which on CUDA computes torch's norms in
        float32."""
        x = want_input(self.spec.normalization, "inp", x, self.spec.features)
        if is_distributed(self.weight):
            return rows_in_parts(self._norm, x, self.weight, self.bias)
        return self._norm(x, self.weight, self.bias)

    def _norm(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        own, cast = weight.dtype, autocast_dtype(x)
        inputs = {"x": x, "norm_weight": weight, "norm_bias": self._shift(weight, bias)}
        spec: Any = self._text if torch.compiler.is_compiling() else self.spec
        if x.dtype not in FLOATS or (cast is None and x.dtype == own):
            return apply(norm, spec, inputs)["y"]
        result = self.result_of(x.device.type, cast, x.dtype, own)
        wide = torch.promote_types(torch.promote_types(x.dtype, own), result)
        y = apply(norm, spec, {name: None if t is None else t.to(wide) for name, t in inputs.items()})["y"]
        return y.to(result)

    def _shift(self, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """The bias; zeros for a LayerNorm that has none."""
        if bias is not None or not self.spec.centered:
            return bias
        return torch.zeros_like(weight, requires_grad=False)

    @torch.compiler.assume_constant_result
    def result_of(
        self, device: str, cast: torch.dtype | None, x: torch.dtype, weight: torch.dtype
    ) -> torch.dtype:
        """The dtype of the plain module's result, within ``torch.autocast(device, cast)`` where there is a
        ``cast``: found out at the first call. Libraries have three ways, x's, the weight's and the wider one,
        and autocast's lists are another matter on each device and in each release of torch. The wider dtype
        where the plain module refuses such a pair."""
        key = device, cast, x, weight
        if key not in self._found:
            within = contextlib.nullcontext() if cast is None else torch.autocast(device, cast)
            with within:
                result = _result(self.__dict__["plain"], x, weight, torch.device(device))
            self._found[key] = result or torch.promote_types(x, weight)
        return self._found[key]

    def extra_repr(self) -> str:
        """What is computed."""
        return f"{self.spec.features}, {self.spec.normalization}, eps={self.spec.epsilon}"


def _result(
    plain: nn.Module, x: torch.dtype, weight: torch.dtype, device: torch.device
) -> torch.dtype | None:
    """The dtype of a norm's result for those of its input and its weight; None where it refuses them."""
    # a selective checkpoint counts the calls of both passes, of which the second one has none of these
    with torch.inference_mode(False), torch.no_grad(), unseen(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of pairs for which it has no fused kernel
        own = {
            name: None if p is None else torch.ones(p.shape, dtype=weight, device=device)
            for name, p in own_parameters(plain).items()
        }
        twin = twin_of(plain, own)
        with contextlib.suppress(TypeError, RuntimeError, ValueError):
            row = torch.zeros(1, plain.weight.numel(), dtype=x, device=device)  # type: ignore[operator]
            # past hooks, which are for the user's calls
            return type(plain).forward(twin, row).dtype  # type: ignore[no-any-return]
    return None
