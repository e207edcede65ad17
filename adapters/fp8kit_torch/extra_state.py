"""A module's FP8 state as one tensor of bytes, for ``state_dict``: a safetensors file, no pickle."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fp8kit import checkpoint_format
from fp8kit.errors import CheckpointError


class ExtraState(torch.Tensor):
    """uint8 (n,), a plain tensor to everybody but ``torch.distributed.checkpoint``, which writes it as bytes:
    a model that has not run yet has none, and takes what was saved, whatever its length. Files have plain
    tensors."""

    def __create_write_items__(self, fqn: str, state: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex
        from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

        return [WriteItem(index=MetadataIndex(fqn), type=WriteItemType.BYTE_IO)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> ExtraState:
        memo[id(self)] = made = self.as_subclass(Tensor).clone().as_subclass(ExtraState)
        return made


def pack(parts: Mapping[str, Tensor]) -> ExtraState:
    """float32 tensors by name as uint8 (n,) on the CPU; none is (0,)."""
    if not parts:
        return torch.empty(0, dtype=torch.uint8).as_subclass(ExtraState)
    file = io.BytesIO()
    host = {name: part.detach().to("cpu", torch.float32).contiguous() for name, part in parts.items()}
    checkpoint_format.write(file, {name: part.numpy() for name, part in host.items()}, {})
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8).as_subclass(ExtraState)


def unpack(state: Tensor) -> dict[str, Tensor]:
    """What ``pack`` packed, in memory of its own. CheckpointError for anything else, a pickle among it."""
    if not isinstance(state, torch.Tensor) or state.dtype != torch.uint8 or state.ndim != 1:
        raise CheckpointError("_extra_state", "state", type(state).__name__, "a one-dimensional uint8 tensor")
    data = state.as_subclass(Tensor).detach().cpu().contiguous().numpy()
    if data.size == 0:
        return {}
    try:
        found, _ = checkpoint_format.read_from(io.BytesIO(data))
        if any(part.dtype != "float32" for part in found.values()):
            raise ValueError("another dtype")
    except (ValueError, CheckpointError):
        raise CheckpointError(
            "_extra_state",
            "state",
            f"{data.size} bytes that hold no such state",
            "a state that fp8kit_torch saved",
        ) from None
    return {name: torch.from_numpy(part) for name, part in found.items()}
