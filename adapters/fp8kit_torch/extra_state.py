"""A module's FP8 state as one tensor of bytes, for ``state_dict``: a safetensors file, no pickle."""

from __future__ import annotations

import io
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fp8kit import checkpoint_format
from fp8kit.errors import CheckpointError

# what averages are made of; a difference stays one, for programs that compare
_IN_PLACE = {"add_", "copy_", "div_", "lerp_", "mul_"}
_AVERAGING = {"add", "div", "lerp", "mul"} | _IN_PLACE


class Owner(weakref.WeakMethod):
    """A layer's ``set_extra_state``. What copies or pickles it gets None: a copy of a state is nobody's."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(None), ()


class ExtraState(torch.Tensor):
    """uint8 (n,), a plain tensor to everybody but ``torch.distributed.checkpoint``, which writes it as bytes:
    a model that has not run yet has none, and takes what was saved, whatever its length. Files have plain
    tensors.

    Programs that average all of two state dicts compute with it, too. Bytes have no mean: the result is the
    last operand that is a state and not empty. ``copy_`` and averages in place take another state's length,
    and the layer whose state it is (``owner``) takes the state, as it does of a parameter in a state dict.
    """

    owner: Owner | None = None  # None for a copy

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        states = [part for part in args if isinstance(part, ExtraState) or is_state(part)]
        if name == "copy_":
            states = states[1:]  # of what is written, nothing is left
        written = name in _IN_PLACE
        if name not in _AVERAGING or not states or (written and not isinstance(args[0], ExtraState)):
            return super().__torch_function__(func, types, args, kwargs or {})
        found = next((part for part in reversed(states) if part.numel()), states[0])
        if written and found is args[0]:
            return found
        where = args[0].device if written else found.device
        made = found.detach().clone().to(where, torch.uint8).as_subclass(ExtraState)
        if not written:
            return made
        take = args[0].owner and args[0].owner()
        if take:
            take(made)
        return super().__torch_function__(Tensor.set_, types, (args[0], made))

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


def is_state(value: Any) -> bool:
    """Whether it is uint8 (n,), as states are."""
    return isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.ndim == 1


def unpack(state: Tensor) -> dict[str, Tensor]:
    """What ``pack`` packed, in memory of its own. CheckpointError for anything else, a pickle among it."""
    if not is_state(state):
        got = f"{state.dtype} {tuple(state.shape)}" if isinstance(state, Tensor) else type(state).__name__
        wanted = "uint8 (n,): a cast of a state dict leaves its _extra_state out"
        raise CheckpointError("_extra_state", "state", got, wanted)
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
