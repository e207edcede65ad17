"""Commands of ``fp8kit`` in files of their own, each with ``add(commands)``, which adds its parser; and what all commands share."""

from __future__ import annotations

import argparse
from pathlib import Path

from fp8kit import arrays
from fp8kit.arrays import Device
from fp8kit.backends import dispatch
from fp8kit.errors import BackendError, Fp8kitError, expected

FAILED = 1  # exit status of a command that ran and whose result is not what it must be, or that could not run


def device_of(options: argparse.Namespace) -> Device:
    """The device that was asked for, or the default one. BackendError where it is not usable."""
    device = dispatch.default_device() if options.device is None else arrays.device(options.device)
    usable = arrays.provider(device).count()
    if device.index >= usable:
        raise BackendError(f"device: {device} is not usable, {usable} {device.kind} devices are; `fp8kit info` lists what is missing")
    return device


def folder(path: Path) -> Path:
    """``path`` as a folder that exists, made before the work whose results go there. Fp8kitError where that is impossible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Fp8kitError(expected("results", "folder", path, f"a folder that can be made ({error.strerror})")) from None
    return path


def numbers(name: str, text: str, count: int) -> tuple[int, ...]:
    """``count`` positive numbers separated by commas; Fp8kitError otherwise."""
    parts = text.split(",")
    if len(parts) != count or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise Fp8kitError(expected("argument", name, repr(text), f"{count} positive numbers separated by commas"))
    return tuple(int(part) for part in parts)
