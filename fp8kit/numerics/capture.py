"""``capture``: the real operands of every GEMM of a model, of one batch, for ``fp8kit recipes compare``.

A model runs forward and backward in high precision, and each product that reads a weight shows its operands:
the input x, the weight w and the output gradient g. ``Recorder`` sees the calls of the kernel ``gemm``, so it
serves every frontend that runs kernels when the model is called.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from fp8kit import arrays, inspection, serialization
from fp8kit.arguments import function, shown
from fp8kit.arrays import ArrayView
from fp8kit.autocast import autocast
from fp8kit.autograd import Tensor
from fp8kit.backends import dispatch
from fp8kit.backends.policy import get_policy, policy_context
from fp8kit.backends.protocol import signature, views
from fp8kit.backends.registry import Kind, OpImpl
from fp8kit.errors import ArgumentError, CheckpointError, UnsupportedError
from fp8kit.scoped import changed

log = logging.getLogger("fp8kit")
HostArray = np.ndarray[Any, Any]
KIND = "fp8kit operands 1"


class GemmOperands(NamedTuple):
    """Operands of one GEMM, y = x w^T: ``activation`` x (rows, in), ``weight`` w (out, in), ``gradient`` g
    (rows, out), the loss' gradient of y; arrays of the host in the model's dtype."""

    activation: HostArray
    weight: HostArray
    gradient: HostArray


@dataclass(frozen=True)
class Dump:
    """The operands of a model's GEMMs. ``gemms``: the layer's name -> operands, in the order of the forward
    pass. A part of a layer has the layer's name and its own: "blocks.0.layernorm_mlp.fc1"."""

    gemms: dict[str, GemmOperands]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file: arrays "LAYER/activation", "LAYER/weight" and "LAYER/gradient". Errors as
        ``fk.save``; ArgumentError for Inf and NaN, which ``load`` refuses."""
        state = {
            f"{layer}/{name}": array
            for layer, own in self.gemms.items()
            for name, array in own._asdict().items()
        }
        for name, array in state.items():
            if not np.isfinite(array.astype(np.float32)).all():
                wanted = "finite numbers, of a batch and a model that give no others"
                raise ArgumentError("capture", name, "Inf or NaN", wanted)
        order = {f"order.{i}": layer for i, layer in enumerate(self.gemms)}
        serialization.save(path, state, {"kind": KIND, **order})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Dump:
        """Read a file of ``save``. CheckpointError, which names the array, for a file that is truncated or
        holds something else, for operands that are missing or do not fit together, and for Inf and NaN."""
        state, metadata = serialization.read(path)

        def refuse(argument: str, got: object, wanted: str) -> CheckpointError:
            said = got if isinstance(got, str) else shown(got)
            return CheckpointError("operands", f"{os.fspath(path)}: {argument}", said, wanted)

        if metadata.get("kind") != KIND:
            raise refuse("metadata", metadata, f"kind {KIND!r}: a file of fk.numerics.capture")
        found: dict[str, dict[str, HostArray]] = {}
        for name, array in state.items():
            layer, _, operand = name.rpartition("/")
            if not layer or operand not in GemmOperands._fields:
                raise refuse("name", repr(name), f"LAYER/ and {', '.join(GemmOperands._fields)}")
            if array.ndim != 2 or not array.size or array.dtype.kind not in "fV":
                raise refuse(name, f"{array.dtype} {array.shape}", "a matrix of floating-point numbers")
            if not np.isfinite(array.astype(np.float32)).all():
                raise refuse(name, "Inf or NaN", "finite numbers")
            found.setdefault(layer, {})[operand] = array
        for layer, own in found.items():
            for operand in GemmOperands._fields:
                if operand not in own:
                    raise refuse(f"{layer}/{operand}", "nothing", "an array: all three operands of a GEMM")
            (rows, inner), (outer, width), g = (own[name].shape for name in GemmOperands._fields)
            if width != inner or g != (rows, outer):
                got = ", ".join(f"{name} {own[name].shape}" for name in GemmOperands._fields)
                raise refuse(layer, got, "activation (rows, in), weight (out, in), gradient (rows, out)")
        places = {layer: i for i, layer in enumerate(value for key, value in sorted(
            ((int(key[6:]), value) for key, value in metadata.items() if re.fullmatch(r"order\.\d+", key))
        ))}  # fmt: skip
        names = sorted(found, key=lambda layer: places.get(layer, len(places)))
        if not names:
            raise refuse("arrays", "none", "operands of one GEMM at least")
        return cls({layer: GemmOperands(**found[layer]) for layer in names})


@dataclass
class _Seen:
    """A GEMM's operands as they come: forward shows x and w, backward g."""

    activation: HostArray
    weight: HostArray
    gradient: HostArray | None = None
    parts: list[HostArray] = field(default_factory=list)

    def add(self, part: HostArray) -> None:
        """Take the columns of g that belong to one segment of the weight, in order."""
        self.parts.append(part)
        if sum(part.shape[1] for part in self.parts) == len(self.weight):
            self.gradient = np.concatenate(self.parts, 1)


class Recorder:
    """The operands of products that read one of ``parameters``, the model's parameters by name, while
    ``recording``."""

    def __init__(self, parameters: Mapping[str, ArrayView]) -> None:
        self.parameters = {name: view for name, view in parameters.items() if len(view.shape) == 2}
        self.names = {view.ptr: layer_name(name) for name, view in self.parameters.items()}
        self.seen: dict[str, _Seen] = {}
        self.left_out: dict[str, None] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Products that are called within, and the backward passes of these, show their operands."""
        policy = get_policy()

        def gemm(*args: Any, **named: Any) -> None:
            with policy_context(policy):
                original = dispatch.kernels(next(views((*args, *named.values()))).device).gemm
            known = signature("gemm").bind(*args, **named).arguments
            self._look(known["a"], known["b"], known["layout"])
            original(*args, **named)

        every = frozenset({"cpu", "cuda"})
        own = OpImpl("gemm", "capture.gemm", Kind.DEFAULT, gemm, devices=every)
        overrides = (*policy.overrides, ("gemm", own))
        with (
            changed(inspection.hooks, watching=self._leave_out),
            policy_context(replace(policy, overrides=overrides)),
        ):
            yield

    def _leave_out(self, layer: str) -> None:
        if layer not in self.left_out:
            self.left_out[layer] = None
            log.warning("capture: layer %s is left out, since its numbers of rows stay on the device", layer)

    def dump(self) -> Dump:
        """Returns what was seen. ArgumentError where nothing was, UnsupportedError for a GEMM without
        gradient."""
        if not self.seen and self.left_out:
            raise left_out_alone(self.left_out)
        if not self.seen:
            got = "a model whose forward pass multiplied no parameter by a GEMM of fp8kit"
            raise ArgumentError("capture", "model", got, "layers of fp8kit, called eagerly")
        found = {}
        for layer, own in self.seen.items():
            if own.gradient is None:
                wanted = "a gradient in backward: a loss that depends on it, and a weight that requires one"
                raise UnsupportedError("capture", layer, "a GEMM without backward", wanted)
            found[layer] = GemmOperands(own.activation, own.weight, own.gradient)
        return Dump(found)

    def _look(self, a: ArrayView, b: ArrayView, layout: str) -> None:
        if layout == "tn":  # dW = g^T x, of weights whose dgrad is not wanted
            missing = [own for own in self.seen.values() if own.gradient is None]
            if not missing:
                return
            x = _host(b)
            digest = digest_of(x)
            for own in missing:
                fits = own.activation.shape == x.shape and a.shape[1] <= own.weight.shape[0]
                if fits and digest_of(own.activation) == digest:
                    own.add(_host(a))
                    return
            return
        layer = self._layer(b)
        if layer is None:
            return
        if layout == "nt":  # y = x W^T
            x = _host(a)
            known = self.seen.get(layer)
            if known is None:
                self.seen[layer] = _Seen(x, _host(b))
            elif known.activation.shape != x.shape or digest_of(known.activation) != digest_of(x):
                wanted = "one product a forward pass"
                raise UnsupportedError("capture", layer, "a weight that multiplies twice", wanted)
        elif layout == "nn" and layer in self.seen:  # dx = g W
            self.seen[layer].gradient = _host(a)

    def _layer(self, weight: ArrayView) -> str | None:
        """Returns the name of the layer whose weight this is. Several that were copied into one: that of
        their layer."""
        for name, view in self.parameters.items():
            if view.ptr == weight.ptr:
                whole = view.shape == weight.shape
                return self.names[view.ptr] if whole else name.rpartition(".")[0]
        first = _host(weight.slice(0, 0, 1)) if len(weight.shape) == 2 and weight.size else None
        if first is None:
            return None
        for name, view in self.parameters.items():
            inside = view.shape[1] == weight.shape[1] and view.shape[0] < weight.shape[0]
            if inside and digest_of(_host(view.slice(0, 0, 1))) == digest_of(first):
                return name.rpartition(".")[0]
        return None


def layer_name(parameter: str) -> str:
    """Returns the name of a GEMM's layer by that of its weight: "a.fc1_weight" is of "a.fc1", "a.weight" of
    "a", and "a.weight1", of grouped layers, of "a.gemm_1"."""
    grouped = re.fullmatch(r"(.*)\.weight(\d+)", parameter)
    if grouped:
        return f"{grouped[1]}.gemm_{grouped[2]}"
    return parameter.removesuffix("weight").rstrip("._") or parameter


def left_out_alone(layers: Iterable[str]) -> ArgumentError:
    """Returns the error for a model whose only GEMMs are of groups whose sizes are on the device."""
    got = f"no GEMM but those of {', '.join(layers)}, whose numbers of rows stay on the device"
    return ArgumentError("capture", "model", got, "m_splits as a list, in GroupedLinear of fp8kit_torch")


def _host(view: ArrayView) -> HostArray:
    """Returns a copy on the host, with what was queued for it done."""
    arrays.synchronize(view.device)
    return np.array(arrays.to(arrays.contiguous(view), arrays.CPU).numpy())


def digest_of(array: HostArray) -> bytes:
    """Returns what tells arrays of other bytes apart."""
    return hashlib.sha256(np.ascontiguousarray(array).view(np.uint8).data).digest()


def called(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments that a batch stands for: a tuple, a mapping of names, or one alone."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {}


def capture(model: Any, batch: Any, loss: Callable[[Any], Any] | None = None) -> Dump:
    """Returns the operands of every GEMM of a native model that multiplies a weight, of one batch, in high
    precision.

    ``model``: an ``fk.nn.Module``. ``batch``: what it is called with: a tuple of arguments, a mapping of
    names, or one argument. ``loss``: a function of what the model gives to a Tensor of one element; None
    where the model gives such a one. Gradients of parameters, FP8 state and the random state's order of draws
    are as a forward and a backward pass under ``autocast(enabled=False)`` leave them, but for ``grad``, which
    stays as it was.

    ``Dump.save`` writes them for ``fp8kit recipes compare``. Memory: a copy of all operands on the host.
    Products of groups whose sizes stay on the device are left out, with a warning. Raises
    ArgumentError for a model without parameters or GEMMs, and for a loss that is no Tensor of one element;
    UnsupportedError for a weight that is multiplied twice, or has no gradient.
    """
    if not callable(getattr(model, "named_parameters", None)):
        wanted = "an fk.nn.Module; fp8kit_jax.capture takes functions and Flax's modules"
        raise ArgumentError("capture", "model", f"a {type(model).__name__}", wanted)
    if loss is not None:
        function("capture", "loss", loss)
    parameters = dict(model.named_parameters())
    if not all(isinstance(parameter, Tensor) for parameter in parameters.values()):
        wanted = "an fk.nn.Module; fp8kit_torch.capture and fp8kit_jax.capture take other libraries' modules"
        raise ArgumentError("capture", "model", f"a {type(model).__name__} of another library", wanted)
    recorder = Recorder({name: parameter.view for name, parameter in parameters.items()})
    args, named = called(batch)
    before = {name: parameter.grad for name, parameter in parameters.items()}
    try:
        for parameter in parameters.values():
            parameter.grad = None
        with recorder.recording():
            with autocast(enabled=False):
                out = model(*args, **named)
            value = out if loss is None else loss(out)
            if not isinstance(value, Tensor) or value.view.size != 1:
                got = f"shape {value.shape}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                raise ArgumentError("capture", "loss", got, "a function that gives a Tensor of one element")
            value.backward()
    finally:
        for name, parameter in parameters.items():
            parameter.grad = before[name]
    return recorder.dump()
