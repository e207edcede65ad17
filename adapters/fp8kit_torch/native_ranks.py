"""Ranks of the native frontend on CPUs: Gloo, as torch.distributed has it."""

from __future__ import annotations

import atexit
import os
from datetime import timedelta

import torch.distributed as dist

from fp8kit.arrays import Device
from fp8kit.errors import BackendError
from fp8kit.settings import Place
from fp8kit_torch.collectives import TorchCollectives


def connect(place: Place, device: Device, timeout: float) -> TorchCollectives:
    """The group of all processes of a job, whose tensors are on the CPU; torch's own where the program has
    made one. ``timeout`` in seconds. BackendError for another device, and where processes do not meet."""
    if device.kind != "cpu":
        raise BackendError("distributed.init", "device", str(device), "the CPU for the backend gloo")
    if not dist.is_initialized():
        os.environ.setdefault("MASTER_ADDR", place.address)
        os.environ.setdefault("MASTER_PORT", str(place.port))
        try:
            dist.init_process_group(
                "gloo", rank=place.rank, world_size=place.size, timeout=timedelta(seconds=timeout)
            )
        except (RuntimeError, ValueError) as error:
            at = f"rank {place.rank} of {place.size} at {place.address}:{place.port}"
            why = str(error).splitlines()[0][:200]
            raise BackendError("distributed.init", "ranks", f"{at} ({why})", "that all meet") from error
        atexit.register(_end)
    return TorchCollectives.of(dist.group.WORLD)


def _end() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
