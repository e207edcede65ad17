"""Every environment variable that fp8kit reads, in one place.

===========================  ================================================================================
variable                     meaning (default)
===========================  ================================================================================
FP8KIT_CACHE_DIR             folder of compiled kernels (``$XDG_CACHE_HOME/fp8kit`` or ``~/.cache/fp8kit``)
FP8KIT_DETERMINISTIC         1: start with ``fk.deterministic(True)`` (0)
FP8KIT_DEVICE                device that ``device=None`` means: cpu, cuda or cuda:N (cuda where usable, else cpu)
FP8KIT_PREFER                preferred kind of implementation: default, vendor or reference (vendor)
FP8KIT_STRICT                1: never take a second choice when the first implementation cannot take a call (0)
FP8KIT_ALLOW_VENDORS         comma-separated vendors that may be used (all)
FP8KIT_DENY_VENDORS          comma-separated vendors that may not be used (none)
FP8KIT_PER_OP                order for single kernels: ``gemm=impl:cuda.gemm|reference;amax=reference`` (none)
FP8KIT_LOG_LEVEL             DEBUG, INFO, WARNING or ERROR for the logger "fp8kit" (WARNING)
===========================  ================================================================================

Values are read when they are asked for, so a test or a program may set them after import.
"""

from __future__ import annotations

import os
from pathlib import Path

from fp8kit.errors import Fp8kitError, expected


def _text(name: str, default: str = "") -> str:
    return os.environ.get(name, default).strip()


def _flag(name: str) -> bool:
    value = _text(name, "0").lower()
    if value not in ("0", "1", "", "true", "false"):
        raise Fp8kitError(expected("environment", name, repr(value), "0 or 1"))
    return value in ("1", "true")


def _names(name: str) -> frozenset[str]:
    return frozenset(part.strip() for part in _text(name).split(",") if part.strip())


def cache_dir() -> Path:
    """Folder of compiled kernels; it need not exist yet."""
    own = _text("FP8KIT_CACHE_DIR")
    if own:
        return Path(own)
    base = _text("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fp8kit"


def deterministic() -> bool:
    """Whether the process starts in deterministic mode."""
    return _flag("FP8KIT_DETERMINISTIC")


def device() -> str:
    """Name of the default device, or "" for: CUDA where it is usable, else CPU."""
    return _text("FP8KIT_DEVICE")


def prefer() -> str:
    """Preferred kind of implementation: "default", "vendor" or "reference"."""
    value = _text("FP8KIT_PREFER", "vendor").lower()
    if value not in ("default", "vendor", "reference"):
        raise Fp8kitError(expected("environment", "FP8KIT_PREFER", repr(value), "default, vendor or reference"))
    return value


def strict() -> bool:
    """Whether a second choice of implementation is forbidden."""
    return _flag("FP8KIT_STRICT")


def allow_vendors() -> frozenset[str] | None:
    """Vendors that may be used, or None for all."""
    return _names("FP8KIT_ALLOW_VENDORS") or None


def deny_vendors() -> frozenset[str]:
    """Vendors that may not be used."""
    return _names("FP8KIT_DENY_VENDORS")


def per_op() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Order of choice for single kernels, as ``((kernel, (token, ...)), ...)``, sorted by kernel."""
    order = {}
    for item in _text("FP8KIT_PER_OP").split(";"):
        if not item.strip():
            continue
        kernel, equals, tokens = item.partition("=")
        if not equals or not tokens.strip():
            raise Fp8kitError(expected("environment", "FP8KIT_PER_OP", repr(item), "kernel=token|token"))
        order[kernel.strip()] = tuple(token.strip() for token in tokens.split("|") if token.strip())
    return tuple(sorted(order.items()))


def log_level() -> str:
    """Level of the logger "fp8kit"."""
    value = _text("FP8KIT_LOG_LEVEL", "WARNING").upper()
    if value not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise Fp8kitError(expected("environment", "FP8KIT_LOG_LEVEL", repr(value), "DEBUG, INFO, WARNING or ERROR"))
    return value
