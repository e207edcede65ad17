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
from fp8kit_torch.torch_compat import any_autocast
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


def has_foreign_code(module: torch.nn.Module) -> bool:
    """Whether a call of ``module`` may begin with somebody else's code, which may supply its parameters
    (``fully_shard``, offloading)."""
    return bool(module._forward_pre_hooks) or "forward" in vars(module)


_kind, _is_there = attrgetter("dtype", "device"), partial(is_not, None)


def want_parameters(
    operation: str, parameters: Mapping[str, Tensor | None], x: Tensor, cast: bool = True
) -> None:
    """BackendError or FormatError where a parameter is on another device or of another dtype than x;
    ``cast``: the dtype only where ``torch.autocast`` casts neither."""
    device, dtype = x.device, x.dtype
    if set(map(_kind, filter(_is_there, parameters.values()))) <= {(dtype, device)}:
        if dtype not in FLOATS:
            raise FormatError(
                operation, "inp", f"{dtype_name(dtype)}, as the parameters", "float32, bfloat16 or float16"
            )
        return
    there = {name: own for name, own in parameters.items() if own is not None}
    if any(own.device != device for own in there.values()):
        raise unlike_devices(operation, {name: str(own.device) for name, own in there.items()}, str(device))
    if not cast or autocast_dtype(x) is None:
        raise unlike_dtypes(
            operation, {name: dtype_name(own.dtype) for name, own in there.items()}, dtype_name(dtype)
        )


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as messages call it: "float32"."""
    return str(dtype).removeprefix("torch.")


def unlike_devices(operation: str, parameters: Mapping[str, str], inp: str) -> BackendError:
    """The error for parameters that are not all on the device of a layer's input: about the input where they
    are together elsewhere, else about the first that is not where the input is."""
    name, device = next((name, device) for name, device in parameters.items() if device != inp)
    if device == "meta":
        return BackendError(
            operation,
            name,
            "device meta",
            f"device {inp}, as inp: reset_parameters() makes what was deferred",
        )
    if len(set(parameters.values())) > 1:
        return BackendError(
            operation, name, f"device {device}", f"device {inp}, as inp: move the module, with .to({inp!r})"
        )
    move = f"move inp, with .to({device!r})" + (
        "" if inp == "meta" else f", or the module, with .to({inp!r})"
    )
    return BackendError(operation, "inp", f"device {inp}", f"device {device}, as {name}: {move}")


def unlike_dtypes(operation: str, parameters: Mapping[str, str], inp: str) -> FormatError:
    """The error for parameters that are not all of the dtype of a layer's input: about the input where they
    have one dtype, else about the first that has not the input's."""
    name, dtype = next((name, dtype) for name, dtype in parameters.items() if dtype != inp)
    if len(set(parameters.values())) > 1:
        return FormatError(
            operation,
            name,
            dtype,
            f"{inp}, as inp: one dtype for all parameters, as module.to(dtype) gives them",
        )
    cast = f"cast inp, with .to(torch.{dtype})"
    if inp in map(dtype_name, FLOATS):
        cast += f", or the module, with .to(torch.{inp}), or call it within torch.autocast"
    return FormatError(operation, "inp", inp, f"{dtype}, as {name}: {cast}")


def want_like(module: torch.nn.Module | None, x: Tensor) -> None:
    """``want_parameters`` of a part of a layer, where the part will find them as they are now: before another
    part runs."""
    if module is not None and not has_foreign_code(module):
        want_parameters(type(module).__name__, module._parameters, x)


def want_input(
    operation: str, argument: str, value: Any, features: int, qkv_format: str | None = None
) -> Tensor:
    """A tensor whose last dimension is ``features``, and that has the dimensions of ``qkv_format``.
    Fp8kitError kinds otherwise."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_nested:
        tensor(operation, argument, value)
    if value.ndim < 1 or value.shape[-1] != features:
        raise ShapeError(
            operation, argument, f"shape {tuple(value.shape)}", f"a last dimension of {features}"
        )
    if qkv_format is not None and value.ndim != len(qkv_format) - 1:
        wanted = f"({', '.join(qkv_format[:-2])}, {features}), {qkv_format!r}"
        raise ShapeError(operation, argument, f"shape {tuple(value.shape)}", wanted)
    return value


__all__ = ["only", "refuse"]
