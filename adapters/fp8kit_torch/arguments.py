"""Arguments that modules check, and those of Transformer Engine's classes that have one supported value:
accepted with that value, else NotImplementedError by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter, is_not
from typing import Any

import torch
from torch import Tensor

from fp8kit.errors import BackendError, FormatError, ShapeError
from fp8kit.layers.unsupported import refuse
from fp8kit.layers.unsupported import refuse_others as only
from fp8kit_torch.checks import tensor
from fp8kit_torch.distributed_weights import arrived
from fp8kit_torch.torch_compat import FORWARD_PRE_HOOKS, PARAMETERS, any_autocast
from fp8kit_torch.views import FLOATS


def defaults(function: Callable[..., Any], names: str) -> dict[str, Any]:
    """The defaults of a function's arguments with these names: for ``refuse``, where no other value is
    supported."""
    parameters = inspect.signature(function).parameters
    return {name: parameters[name].default for name in names.split()}


def not_compiled(what: str) -> NotImplementedError:
    """The error for what cannot be a part of a compiled function."""
    return NotImplementedError(f"fp8kit_torch: {what} is not supported within torch.compile")


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What ``torch.autocast`` casts to on the device of ``x``; None where it is off."""
    if not any_autocast():  # a device takes longer to say its kind
        return None
    kind = x.device.type
    on = kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else None


def as_parameter(x: Tensor, parameter: Tensor) -> Tensor:
    """``x``, cast to the parameter's dtype where both are floating and ``torch.autocast`` casts neither."""
    other = x.dtype is not parameter.dtype and x.dtype in FLOATS and autocast_dtype(x) is None
    return x.to(parameter.dtype) if other else x


def has_foreign_code(module: torch.nn.Module) -> bool:
    """Whether a call of ``module`` may begin with somebody else's code, which may supply its parameters
    (``fully_shard``, offloading)."""
    return bool(module.__dict__[FORWARD_PRE_HOOKS]) or "forward" in vars(module)


_kind, is_there = attrgetter("dtype", "device"), partial(is_not, None)
_STRIDED = torch.strided


def want_parameters(operation: str, parameters: Mapping[str, Tensor | None], x: Tensor, path: str) -> None:
    """BackendError or FormatError where a parameter is on another device than x, or of another dtype and
    ``torch.autocast`` casts neither. ``operation`` calls x hidden_states; ``path``: what it puts before the
    parameters' names, those of a part of a layer."""
    argument, device, dtype = "hidden_states", x.device, x.dtype
    if set(map(_kind, filter(is_there, parameters.values()))) <= {(dtype, device)}:
        if dtype not in FLOATS:
            raise FormatError(
                operation, argument, f"{dtype_name(dtype)}, as the parameters", "float32, bfloat16 or float16"
            )
        return
    there = {f"{path}{name}": own for name, own in parameters.items() if own is not None}
    if any(own.device != device for own in there.values()):
        devices = {name: str(own.device) for name, own in there.items()}
        raise unlike_devices(operation, devices, str(device), argument)
    if autocast_dtype(x) is None:
        dtypes = {name: dtype_name(own.dtype) for name, own in there.items()}
        raise unlike_dtypes(operation, dtypes, dtype_name(dtype), argument)


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as messages call it: "float32"."""
    return str(dtype).removeprefix("torch.")


def unlike_devices(
    operation: str, parameters: Mapping[str, str], inp: str, argument: str = "inp"
) -> BackendError:
    """The error for parameters that are not all on the device ``inp`` of a layer's input ``argument``: about
    the input where they are together elsewhere, else about the first that is not where the input is."""
    name, device = next((name, device) for name, device in parameters.items() if device != inp)
    if device == "meta":
        return BackendError(
            operation,
            name,
            "device meta",
            f"device {inp}, as {argument}: parameters on the meta device have no values; "
            "reset_parameters() materialises them",
        )
    if len(set(parameters.values())) > 1:
        wanted = f"device {inp}, as {argument}: move the module, with .to({inp!r})"
        return BackendError(operation, name, f"device {device}", wanted)
    move = f"move {argument}, with .to({device!r})" + (
        "" if inp == "meta" else f", or the module, with .to({inp!r})"
    )
    return BackendError(operation, argument, f"device {inp}", f"device {device}, as {name}: {move}")


def unlike_dtypes(
    operation: str, parameters: Mapping[str, str], inp: str, argument: str = "inp"
) -> FormatError:
    """The error for parameters that are not all of the dtype ``inp`` of a layer's input ``argument``: about
    the input where they have one dtype, else about the first that has not the input's."""
    name, dtype = next((name, dtype) for name, dtype in parameters.items() if dtype != inp)
    if len(set(parameters.values())) > 1:
        return FormatError(
            operation,
            name,
            dtype,
            f"{inp}, as {argument}: one dtype for all parameters, as module.to(dtype) gives them",
        )
    cast = f"cast {argument}, with .to(torch.{dtype})"
    if inp in map(dtype_name, FLOATS):
        cast += f", or the module, with .to(torch.{inp}), or call it within torch.autocast"
    return FormatError(operation, argument, inp, f"{dtype}, as {name}: {cast}")


def want_like(operation: str, path: str, module: torch.nn.Module | None, x: Tensor) -> None:
    """``want_parameters`` of a part of a layer, where the part will find them as they are now: before another
    part runs. ``operation``, ``path``: the layer, and its name for the part."""
    if module is not None and not has_foreign_code(module):
        want_parameters(operation, module.__dict__[PARAMETERS], x, f"{path}.")


def want_input(
    operation: str, argument: str, value: Any, features: int, qkv_format: str | None = None
) -> Tensor:
    """A tensor whose last dimension is ``features``, and that has the dimensions of ``qkv_format``.
    ArgumentError, FormatError or ShapeError otherwise."""
    plain = type(value) is Tensor
    if not (plain or isinstance(value, Tensor)) or value.layout is not _STRIDED or value.is_nested:
        tensor(operation, argument, value)
    if not plain:
        value = arrived(value)
    shape = value.shape
    if not shape or shape[-1] != features:
        raise ShapeError(operation, argument, f"shape {tuple(shape)}", f"a last dimension of {features}")
    if qkv_format is not None and len(shape) != len(qkv_format) - 1:
        wanted = f"({', '.join(qkv_format[:-2])}, {features}), {qkv_format!r}"
        raise ShapeError(operation, argument, f"shape {tuple(shape)}", wanted)
    return value


__all__ = ["only", "refuse"]
