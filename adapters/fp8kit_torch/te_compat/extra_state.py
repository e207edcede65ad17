"""Reading Transformer Engine's ``_extra_state``, which is a pickle, without running anything that it says.

A pickle may name any function and have it called. This reader knows what Transformer Engine's may contain
(dicts, lists, numbers, texts, tensors, recipes) and builds only that: tensors by its own code, and each class
of Transformer Engine's as a ``Record``, which holds what was written and does nothing. Every other name is
refused.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8kit.errors import CheckpointError
from fp8kit_torch import extra_state
from fp8kit_torch.torch_compat import LOADED_STORAGE, REBUILT_TENSOR, untyped_storage

_DIRECTIONS = {"fwd": 3, "bwd": 2}  # slots a GEMM
_TENSORS = {"scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd"}


class Record:
    """What a pickle said of an object of some class: its ``name``, the ``args`` it was made with, and its
    ``fields``."""

    name = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Record:
        self = super().__new__(cls)
        self.args, self.fields = args, dict(kwargs)
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        return None

    args: tuple[Any, ...]
    fields: dict[str, Any]

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) == 2:  # (fields, slots)
            self.fields.update(state[0] or {})
            state = state[1]
        if isinstance(state, dict):
            self.fields.update(state)

    def __repr__(self) -> str:
        return f"{self.name}(args={self.args}, fields={self.fields})"


class _Builder:
    """One of the few callables that a pickle gets. It has no state that a pickle could change."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setstate__(self, state: Any) -> None:
        raise CheckpointError("_extra_state: the pickle tries to change what reads it")


class _HiddenTensor:
    """A tensor, out of the pickle's reach until it is read."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __setstate__(self, state: Any) -> None:
        raise CheckpointError("_extra_state: the pickle gives a tensor a state")


def _released(value: Any) -> Any:
    """The same with its tensors."""
    if isinstance(value, _HiddenTensor):
        return value.tensor
    if isinstance(value, dict):
        return {name: _released(part) for name, part in value.items()}
    return type(value)(map(_released, value)) if type(value) in (list, tuple) else value


def _bytes(text: str, encoding: str) -> bytes:
    """How pickles up to protocol 2 write bytes."""
    if encoding != "latin1":
        raise CheckpointError(f"_extra_state: bytes written as {encoding}")
    return text.encode("latin1")


def _storage(data: bytes) -> _HiddenTensor:
    """The elements of a storage inside a tensor's pickle: torch's own format, read by torch's own restricted
    reader."""
    storage = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if not isinstance(storage, torch.storage.TypedStorage | torch.UntypedStorage):
        raise CheckpointError(f"_extra_state: a tensor's storage holds {type(storage).__name__}")
    dtype = getattr(storage, "dtype", torch.uint8)
    untyped = untyped_storage(storage)
    return _HiddenTensor(torch.empty(0, dtype=dtype).set_(untyped))


def _tensor(
    held: _HiddenTensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *rest: Any
) -> _HiddenTensor:
    """A tensor of a storage's elements; CheckpointError where it would reach beyond them."""
    storage = held.tensor
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if min((offset, *size, *stride)) < 0 or (math.prod(size) and last >= storage.numel()):
        raise CheckpointError(
            f"_extra_state: a tensor {size}, strides {stride}, at {offset} of {storage.numel()} elements"
        )
    return _HiddenTensor(storage.as_strided(size, stride, offset).clone())


_KNOWN: dict[tuple[str, str], Any] = {
    REBUILT_TENSOR: _Builder(_tensor),
    LOADED_STORAGE: _Builder(_storage),
    ("_codecs", "encode"): _Builder(_bytes),
    ("collections", "OrderedDict"): _Builder(dict),
}
_INERT = ("transformer_engine", "transformer_engine_torch")
# names of storage types in files of torch.save
_STORAGES = {
    "FloatStorage": torch.float32,
    "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16,
    "ByteStorage": torch.uint8,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "UntypedStorage": torch.uint8,
}


class _Reader(pickle.Unpickler):
    """A pickle; with ``archive``, one in a file that ``torch.save`` wrote, whose storages lie beside it."""

    def __init__(self, data: bytes, archive: zipfile.ZipFile | None = None, root: str = "") -> None:
        super().__init__(io.BytesIO(data))
        self._archive, self._root = archive, root

    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        if known is not None:
            return known
        if module.partition(".")[0] in _INERT or (module in ("torch", "torch.storage") and name in _STORAGES):
            return type("Record", (Record,), {"name": f"{module}.{name}"})
        raise CheckpointError(
            f"_extra_state: the pickle names {module}.{name}, which is neither data nor Transformer Engine's"
        )

    def persistent_load(self, pid: Any) -> _HiddenTensor:
        kind, storage, key, _, count = pid
        dtype = _STORAGES.get(getattr(storage, "name", "").rpartition(".")[2])
        if self._archive is None or kind != "storage" or dtype is None:
            raise CheckpointError(f"_extra_state: the pickle refers to {pid!r}")
        elements = torch.frombuffer(
            bytearray(self._archive.read(f"{self._root}/data/{key}")) or bytearray(8), dtype=dtype
        )
        return _HiddenTensor(elements[:count])


def read_extra_state(value: Any) -> dict[str, Any] | None:
    """What a Transformer Engine module saved as ``_extra_state``: a dict of ``recipe`` (a ``Record``), the
    float32 tensors ``scale_fwd``, ``amax_history_fwd``, ``scale_bwd``, ``amax_history_bwd``, and what else it
    held; None where it saved nothing.

    ``value``: its uint8 tensor, or the io.BytesIO of older versions. Nothing is executed. CheckpointError for
    anything else.
    """
    if value is None:
        return None
    if isinstance(value, Tensor):
        if value.dtype is not torch.uint8 or value.ndim != 1:
            raise CheckpointError(
                f"_extra_state: got {value.dtype} {tuple(value.shape)}, expected a pickle as uint8 (bytes,)"
            )
        data = value.cpu().numpy().tobytes()
    elif isinstance(value, io.BytesIO):
        data = value.getvalue()
    else:
        raise CheckpointError(
            f"_extra_state: got {type(value).__name__}, expected a uint8 tensor or io.BytesIO"
        )
    if not data:
        return None
    state = _released(_read(data))
    if not isinstance(state, dict):
        raise CheckpointError(f"_extra_state: the pickle holds {type(state).__name__}, expected a dict")
    for name, found in state.items():
        if name not in _TENSORS:
            continue
        if not isinstance(found, Tensor) or found.dtype is not torch.float32:
            raise CheckpointError(
                f"_extra_state: {name} is {type(found).__name__}, expected a float32 tensor"
            )
    return state


def _read(data: bytes) -> Any:
    try:
        if not data.startswith(b"PK"):
            return _Reader(data).load()
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            return _Reader(archive.read(name), archive, name.removesuffix("/data.pkl")).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged file raises anything
        raise CheckpointError(
            f"_extra_state: the pickle cannot be read ({type(error).__name__}: {error})"
        ) from error


def convert_extra_state(value: Any, gemms: int) -> Tensor:
    """A Transformer Engine module's ``_extra_state`` as this frontend's: uint8 (n,), (0,) where it holds no
    delayed scaling.

    ``gemms``: GEMMs of the module that it is for. CheckpointError where it does not fit, or is no extra
    state.
    """
    state = read_extra_state(value)
    parts: dict[str, Tensor] = {}
    for direction, slots in _DIRECTIONS.items():
        scale, history = ((state or {}).get(f"{name}_{direction}") for name in ("scale", "amax_history"))
        if scale is None or history is None:
            return extra_state.pack({})
        count = slots * gemms
        if scale.shape != (count,) or history.shape[1:] != (count,) or history.shape[0] < 1:
            got = f"scale_{direction} {tuple(scale.shape)}, amax_history_{direction} {tuple(history.shape)}"
            raise CheckpointError(
                f"_extra_state: got {got}, expected {count} slots: {slots} for each of {gemms} GEMMs"
            )
        if not (torch.isfinite(scale) & (scale > 0)).all():
            raise CheckpointError(
                f"_extra_state: scale_{direction} holds {scale.tolist()}, expected positive numbers"
            )
        parts |= {
            f"scaling_{direction}.scale": scale,
            f"scaling_{direction}.scale_inv": 1 / scale,
            f"scaling_{direction}.amax_history": history,
        }
    return extra_state.pack(parts)


def any_extra_state(value: Any, gemms: int) -> dict[str, Tensor]:
    """The parts of an ``_extra_state``, this frontend's own or Transformer Engine's. CheckpointError, which
    names no argument, for what is neither."""
    try:
        return extra_state.unpack(value)
    except CheckpointError as own:
        try:
            return extra_state.unpack(convert_extra_state(value, gemms))
        except CheckpointError as other:
            more = str(other).removeprefix("_extra_state: ")
            raise CheckpointError(
                f"got {own.got}, expected {own.wanted}; nor is it Transformer Engine's: {more}"
            ) from None
