"""Every environment variable that fp8kit reads, in one place.

===========================  ================================================================================
variable                     meaning (default)
===========================  ================================================================================
FP8KIT_CACHE_DIR             folder of compiled kernels, which counts only where nobody but this user and root
                             can write it (``$XDG_CACHE_HOME/fp8kit`` or ``~/.cache/fp8kit``)
FP8KIT_DETERMINISTIC         1: start with ``fk.deterministic(True)`` (0)
FP8KIT_DEVICE                device that ``device=None`` means: cpu, cuda or cuda:N (cuda where usable,
                             else cpu)
FP8KIT_PREFER                preferred kind of implementation: default, vendor or reference (vendor)
FP8KIT_STRICT                1: never take a second choice when the first implementation cannot take a
                             call (0)
FP8KIT_ALLOW_VENDORS         comma-separated vendors that may be used (all)
FP8KIT_DENY_VENDORS          comma-separated vendors that may not be used (none)
FP8KIT_PER_OP                order for single kernels: ``gemm=impl:cuda.gemm|reference;amax=reference`` (none)
FP8KIT_PLUGIN_MODULES        comma-separated modules whose ``register(registry)`` is called, besides
                             installed plugins (none)
FP8KIT_REPLAYS               0: run every call anew, none from a recording; to find faults (1)
FP8KIT_ALIAS                 0: leave a process out where ``fp8kit alias install`` has made
                             ``transformer_engine`` a name of fp8kit_torch (1)
FP8KIT_LOG_LEVEL             DEBUG, INFO, WARNING or ERROR for the logger "fp8kit" (as the program's
                             logging says)
===========================  ================================================================================

The ranks of several processes are set by the program that starts them: torchrun and ``fp8kit launch``
(RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), mpirun (OMPI_COMM_WORLD_*, PMI_*) or
Slurm's srun (SLURM_*).

The variables of TransformerEngine-FL are read where ours are not set: TE_FL_PREFER, TE_FL_STRICT,
TE_FL_ALLOW_VENDORS, TE_FL_DENY_VENDORS, TE_FL_PER_OP, TE_FL_PLUGIN_MODULES and TEFL_LOG_LEVEL, with "flagos"
for "default"; TE_FL_PREFER_VENDOR=1 prefers vendors where no TE_FL_PREFER does otherwise, TE_FL_SKIP_CUDA=1
denies the vendor "cuda". Operations in TE_FL_PER_OP that are no kernels here are left out with a warning:
that library's operations have other names.

Values are read when they are asked for, so a test or a program may set them after import.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from fp8kit.errors import Fp8kitError, meant

# TransformerEngine-FL's name of a variable, and of a kind
_ALIASES = {
    f"FP8KIT_{name}": f"TE_FL_{name}"
    for name in ("PREFER", "STRICT", "ALLOW_VENDORS", "DENY_VENDORS", "PER_OP", "PLUGIN_MODULES")
}
_ALIASES["FP8KIT_LOG_LEVEL"] = "TEFL_LOG_LEVEL"
# all of ours; PROPERTIES is of this project's own tests
_NAMES = (
    "CACHE_DIR",
    "DETERMINISTIC",
    "DEVICE",
    "PREFER",
    "STRICT",
    "ALLOW_VENDORS",
    "DENY_VENDORS",
    "PER_OP",
    "PLUGIN_MODULES",
    "REPLAYS",
    "ALIAS",
    "LOG_LEVEL",
    "PROPERTIES",
)
KIND_ALIASES = {"flagos": "default"}
_KINDS = ("default", "vendor", "reference")

log = logging.getLogger("fp8kit")


def _source(name: str) -> str:
    """Returns the variable that speaks: ``name`` itself where it is set, else its alias where that is."""
    alias = _ALIASES.get(name, name)
    return alias if name not in os.environ and alias in os.environ else name


def _text(name: str, default: str = "") -> str:
    return os.environ.get(_source(name), default).strip()


def _flag(name: str, default: str = "0") -> bool:
    value = _text(name, default).lower()
    if value not in ("0", "1", "", "true", "false"):
        raise Fp8kitError("environment", _source(name), repr(value), "0 or 1")
    return value in ("1", "true")


def _names(name: str) -> dict[str, None]:
    return dict.fromkeys(part.strip() for part in _text(name).split(",") if part.strip())


def cache_dir() -> Path:
    """Folder of compiled kernels; it need not exist yet."""
    own = _text("FP8KIT_CACHE_DIR")
    if own:
        return Path(own)
    base = _text("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "fp8kit"
    except RuntimeError as error:  # a user without a home folder
        raise Fp8kitError(
            "environment", "FP8KIT_CACHE_DIR", "nothing", f"a folder that can be written ({error})"
        ) from None


def deterministic() -> bool:
    """Whether the process starts in deterministic mode."""
    return _flag("FP8KIT_DETERMINISTIC")


def replays() -> bool:
    """Whether known calls are replayed from recordings; read when kernels are chosen."""
    return _flag("FP8KIT_REPLAYS", "1")


def device() -> str:
    """Name of the default device, or "" for: CUDA where it is usable, else CPU."""
    return _text("FP8KIT_DEVICE")


class Place(NamedTuple):
    """A process among those of a job. ``rank`` of ``size``, ``local`` on its machine; ``address``, ``port``:
    where rank 0 is met; ``agent``: whether its launcher listens there already."""

    rank: int = 0
    size: int = 1
    local: int = 0
    address: str = "127.0.0.1"
    port: int = 29500
    agent: bool = False


# rank, size, rank on the machine: of torchrun and fp8kit launch, Open MPI, MPICH and Intel MPI, Slurm.
# Of Slurm the number of the step's tasks: a script that sbatch starts is one process of no step, though it is
# told SLURM_PROCID=0 and the job's SLURM_NTASKS.
_PLACES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)


def place() -> Place:
    """Returns what the launcher's environment says of this process; one process alone where it says nothing.
    Fp8kitError for variables that are no ranks."""
    for names in _PLACES:
        if names[0] in os.environ and names[1] in os.environ:
            rank, size = (_count(name) for name in names[:2])
            local = _count(names[2]) if names[2] in os.environ else rank
            if not rank < size:
                raise Fp8kitError("environment", names[0], rank, f"below {size}, which {names[1]} says")
            agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            port = _count("MASTER_PORT") if "MASTER_PORT" in os.environ else Place().port
            return Place(rank, size, local, _text("MASTER_ADDR", "127.0.0.1"), port, agent)
    return Place()


def _count(name: str) -> int:
    value = os.environ[name].strip()
    if not value.isdecimal():
        raise Fp8kitError("environment", name, repr(value), "a number, 0 or more")
    return int(value)


def prefer() -> str:
    """Preferred kind of implementation: "default", "vendor" or "reference"."""
    legacy = {"1": "vendor", "0": "default"}.get(os.environ.get("TE_FL_PREFER_VENDOR", "").strip(), "vendor")
    value = _text("FP8KIT_PREFER", legacy).lower()
    value = KIND_ALIASES.get(value, value)
    if value not in _KINDS:
        raise Fp8kitError(
            "environment", _source("FP8KIT_PREFER"), repr(value), "default, vendor or reference"
        )
    return value


def strict() -> bool:
    """Whether a second choice of implementation is forbidden."""
    return _flag("FP8KIT_STRICT")


def assigned() -> dict[str, tuple[str, str]]:
    """Returns what is set to something: name without its prefix -> (the variable that speaks, ours or
    TransformerEngine-FL's, its value)."""
    speaks = {name: _source(f"FP8KIT_{name}") for name in _NAMES} | {
        name: f"TE_FL_{name}" for name in ("PREFER_VENDOR", "SKIP_CUDA")
    }
    return {
        name: (variable, value)
        for name, variable in speaks.items()
        if (value := os.environ.get(variable, "").strip())
    }


def allow_vendors() -> frozenset[str] | None:
    """Vendors that may be used, or None for all."""
    return frozenset(_names("FP8KIT_ALLOW_VENDORS")) or None


def deny_vendors() -> frozenset[str]:
    """Vendors that may not be used."""
    return frozenset([*_names("FP8KIT_DENY_VENDORS"), *(["cuda"] if _flag("TE_FL_SKIP_CUDA") else [])])


def per_op(kernels: Collection[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Order of choice for single kernels, as ``((kernel, (token, ...)), ...)``, sorted by kernel.
    ``kernels``: the names there are."""
    source = _source("FP8KIT_PER_OP")
    order = {}
    for item in _text("FP8KIT_PER_OP").split(";"):
        if not item.strip():
            continue
        kernel, equals, tokens = item.partition("=")
        if not equals or not tokens.strip():
            raise Fp8kitError("environment", source, repr(item), "kernel=token|token")
        if source != "FP8KIT_PER_OP" and kernel.strip() not in kernels:
            log.warning("%s: %s is no kernel of fp8kit and is left out", source, kernel.strip())
            continue
        order[kernel.strip()] = tuple(token.strip() for token in tokens.split("|") if token.strip())
    return tuple(sorted(order.items()))


def plugin_modules() -> tuple[str, ...]:
    """Modules whose ``register(registry)`` is called, besides those of installed plugins."""
    return tuple(_names("FP8KIT_PLUGIN_MODULES"))


def log_level() -> str | None:
    """Level of the logger "fp8kit", None where nothing says it."""
    value = _text("FP8KIT_LOG_LEVEL").upper()
    if value not in ("DEBUG", "INFO", "WARNING", "ERROR", ""):
        raise Fp8kitError(
            "environment", _source("FP8KIT_LOG_LEVEL"), repr(value), "DEBUG, INFO, WARNING or ERROR"
        )
    return value or None


def warn(vendors: Collection[str]) -> None:
    """Log a warning for each variable that is nearly one of ours, and for vendors to allow or deny that are
    none of ``vendors``."""
    for name in sorted(os.environ):
        head, _, rest = name.partition("_")
        if head == "FP8KIT" and rest not in _NAMES:
            near = meant(rest, _NAMES, before="FP8KIT_")  # a plugin may have variables of its own
            log.log(
                logging.WARNING if near else logging.DEBUG,
                "%s is no variable that fp8kit reads%s",
                name,
                near,
            )
    known = {vendor.casefold() for vendor in vendors}
    for name in ("FP8KIT_ALLOW_VENDORS", "FP8KIT_DENY_VENDORS"):
        for vendor in sorted(each for each in _names(name) if each.casefold() not in known):
            there = (
                f"there are {', '.join(sorted(known))}; fk.use_backend chooses an engine, "
                "FP8KIT_PREFER a kind"
            )
            log.warning(
                "%s: no implementation has the vendor %r: %s%s",
                _source(name),
                vendor,
                there,
                meant(vendor.casefold(), known),
            )


class _LastResort(logging.StreamHandler):  # type: ignore[type-arg]
    """Standard error, for a program that has set up no logging: Python's own last resort shows warnings
    only."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def set_log_level() -> None:
    """Give the logger "fp8kit" the level that the environment asks for, if it asks; its messages are seen
    without further setup then."""
    level = log_level()
    if level is None:
        return
    log.setLevel(level)
    if not log.handlers:
        handler = _LastResort()
        handler.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))
        log.addHandler(handler)
