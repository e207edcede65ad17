"""A module's FP8 state as one tensor of bytes, for ``state_dict``: the safetensors layout, no pickle.

Eight bytes (little-endian) say how long the header is; the header is JSON, name -> dtype, shape and place;
the numbers follow.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fp8kit.errors import CheckpointError

_WIDTH = 8


def pack(parts: Mapping[str, Tensor]) -> Tensor:
    """float32 tensors by name as uint8 (n,) on the CPU; none is (0,)."""
    header, blobs, at = {}, [], 0
    for name, part in parts.items():
        blob = part.detach().to("cpu", torch.float32).contiguous().reshape(-1).view(torch.uint8)
        header[name] = {"dtype": "F32", "shape": list(part.shape), "data_offsets": [at, at + blob.numel()]}
        blobs.append(blob)
        at += blob.numel()
    if not blobs:
        return torch.empty(0, dtype=torch.uint8)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _WIDTH)
    head = torch.frombuffer(bytearray(len(text).to_bytes(_WIDTH, "little") + text), dtype=torch.uint8)
    return torch.cat([head, *blobs])


def unpack(state: Tensor) -> dict[str, Tensor]:
    """What ``pack`` packed, in memory of its own. CheckpointError for anything else, a pickle among it."""
    if not isinstance(state, torch.Tensor) or state.dtype != torch.uint8 or state.ndim != 1:
        raise CheckpointError("_extra_state", "state", type(state).__name__, "a one-dimensional uint8 tensor")
    data = state.detach().cpu().contiguous()
    if data.numel() == 0:
        return {}
    raw = data.numpy().tobytes()
    length = int.from_bytes(raw[:_WIDTH], "little")
    try:
        header = json.loads(raw[_WIDTH : _WIDTH + length])
        found = {}
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            if entry["dtype"] != "F32" or end - start != 4 * math.prod(entry["shape"]):
                raise ValueError(name)
            own = data[_WIDTH + length + start : _WIDTH + length + end].clone()
            found[name] = own.view(torch.float32).reshape(entry["shape"])
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError):
        wanted = "a state that fp8kit_torch saved"
        raise CheckpointError(
            "_extra_state", "state", f"{len(raw)} bytes of another layout", wanted
        ) from None
    return found
