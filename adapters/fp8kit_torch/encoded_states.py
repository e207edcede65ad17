"""``FusedAdam``'s states in the formats of ``fp8kit.moments``: made, stepped, read and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8kit.arguments import shown
from fp8kit.backends import dispatch
from fp8kit.errors import CheckpointError, FormatError, UnsupportedError
from fp8kit.formats import DTYPES, DType
from fp8kit.moments import MomentFormat, StateFormats
from fp8kit_torch.fused_optimizer import AdamNumbers
from fp8kit_torch.optimizer_state import join
from fp8kit_torch.quantized import QuantizedTensor
from fp8kit_torch.state import stream_of
from fp8kit_torch.views import as_view, dtype_of, optional_view

MOMENTS = ("exp_avg", "exp_avg_sq")
_HALF = MomentFormat("float16", power_2=True)
Kind = tuple[tuple[int, ...], torch.dtype]


def _kind(param: Tensor) -> DType:
    return DTYPES[str(param.dtype).rpartition(".")[2]]


def want_plain(params: Sequence[Any], formats: StateFormats, masters: bool) -> None:
    """UnsupportedError for parameters that are held in FP8 or sharded, FormatError for float16 ones whose
    master should be a remainder."""
    for param in params:
        if isinstance(param, QuantizedTensor) or hasattr(param, "to_local"):
            raise UnsupportedError("FusedAdam", "params", shown(param), "plain parameters, with states")
        if masters:
            formats.master_dtype(_kind(param))


def kinds(formats: StateFormats, param: Tensor, masters: bool) -> dict[str, Kind]:
    """Shape and dtype of every state of a parameter by name."""
    found: dict[str, Kind] = {}
    size, shape = param.numel(), tuple(param.shape)
    for name in MOMENTS:
        kept: MomentFormat = getattr(formats, name)
        found[name] = shape, dtype_of(kept.dtype)
        if (scales := kept.scales(size)) is not None:
            found[f"{name}_scale"] = scales, torch.float32
    kind = formats.master_dtype(_kind(param)) if masters else None
    if kind is not None:
        found["master_param"] = shape, dtype_of(kind)
        if kind.name == "float16":
            found["master_param_scale"] = (1,), torch.float32
    return found


def start(formats: StateFormats, param: Tensor, masters: bool) -> dict[str, Tensor]:
    """The states of a parameter that has taken no step: zeros, and a float32 master of its value."""
    made = {
        name: torch.zeros(shape, dtype=dtype, device=param.device)
        for name, (shape, dtype) in kinds(formats, param, masters).items()
    }
    master = made.get("master_param")
    if master is not None and master.dtype is torch.float32:
        master.copy_(param.detach())
    return made


def values(formats: StateFormats, param: Tensor, name: str, state: Mapping[str, Tensor]) -> Tensor:
    """The float32 values of a state; those of expansion by torch's own power function."""
    codes, scale = state[name], state.get(f"{name}_scale")
    if name == "master_param":
        if codes.dtype is torch.int16:
            return join(param.detach(), codes)
        if scale is not None and not bool(scale):  # it is the parameter, at first
            return param.detach().float()
    kept = _HALF if name == "master_param" else getattr(formats, name)
    if kept.fp8 is not None:
        codes = codes.view(torch.float8_e4m3fn if kept.format == "E4M3" else torch.float8_e5m2)
    wide = codes.float()
    if scale is None:
        return wide
    if kept.block is None:
        return wide * scale
    flat = wide.reshape(-1)
    block = scale.repeat_interleave(kept.block, dim=0)[: flat.numel()]
    if not kept.expansion:
        return (flat * block).reshape(wide.shape)
    amax, k = block.unbind(1)
    size = amax * (flat.abs() / kept.top) ** (1 / torch.where(k > 0, k, 1.0))
    return torch.where(flat == 0, flat, torch.copysign(size, flat)).reshape(wide.shape)


def adam_(
    formats: StateFormats,
    entries: Sequence[tuple[Tensor, Tensor, Mapping[str, Tensor]]],
    numbers: AdamNumbers,
) -> None:
    """One step on (values of a parameter, its gradient, its states), contiguous, of one device."""
    tensors = [data for data, *_ in entries]
    params = [as_view(data) for data in tensors]
    place = params[0].device
    kernels = dispatch.kernels(place)
    names = (f"{name}{end}" for name in (*MOMENTS, "master_param") for end in ("", "_scale"))
    lists = [[optional_view(state.get(name)) for *_, state in entries] for name in names]
    space = kernels.encoded_adam_workspace([param.size for param in params], formats)
    workspace = torch.empty(space, dtype=torch.uint8, device=tensors[0].device) if space else None
    kernels.encoded_adam_(
        params,
        [as_view(grad) for _, grad, _ in entries],
        *lists,
        formats,
        numbers.decoupled,
        *numbers.of_kernel(tensors),
        optional_view(workspace),
        stream_of(place),
    )


def check_formats(operation: str, saved: Any, formats: StateFormats | None) -> None:
    """CheckpointError where a saved optimiser's states, ``StateFormats.numbers`` or None, are in other
    formats than these (None: ``FusedAdam``'s dtypes)."""
    wanted = None if formats is None else list(formats.numbers)
    if saved != wanted and (saved is None or wanted is None or list(saved) != wanted):
        raise CheckpointError(
            operation, "state_formats", shown(saved), f"{wanted}, as the constructor's states"
        )


def check_state(operation: str, shown_as: str, state: Mapping[str, Any], wanted: Mapping[str, Kind]) -> None:
    """CheckpointError for saved states of other names, shapes or dtypes."""
    for name in sorted(state.keys() | wanted.keys()):
        value, kind = state.get(name), wanted.get(name)
        got = (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None
        if got != kind:
            raise CheckpointError(operation, f"{shown_as}[{name!r}]", shown(value), f"{kind or 'nothing'}")


def only_states(operation: str, given: Mapping[str, Any]) -> None:
    """FormatError for the dtypes of single states beside ``states``, which says them all."""
    for name, default in (
        ("exp_avg_dtype", torch.float32),
        ("exp_avg_sq_dtype", torch.float32),
        ("master_weight_dtype", torch.float32),
        ("store_param_remainders", False),
    ):
        if given[name] != default:
            raise FormatError(operation, name, given[name], f"{default}: states says how each is kept")
