"""Checkpoints: safetensors files, written atomically, read strictly, never a pickle.

A file holds the arrays of a ``state_dict`` under their names, in their own dtypes (bfloat16 and float8
included). The FP8 state of a module at path ``p`` is plain arrays ``p._extra_state.scaling_fwd.scale`` and so
on (see ``fp8kit.nn.Module.state_dict``), so that a resumed run continues with the same bits. The format
stands in ``checkpoint_format``.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from fp8kit import arguments, arrays, checkpoint_format
from fp8kit.arrays import ArrayView
from fp8kit.checkpoint_format import HostArray
from fp8kit.errors import CheckpointError, FormatError

_BESIDE = ".tmp"


class Stateful(Protocol):
    """What ``save`` and ``load`` take beside a dict: a module, an optimiser, or anything with these two."""

    def state_dict(self) -> Mapping[str, Any]:
        """Arrays by name."""

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Take arrays over; refuse all before changing any."""


class Part(Stateful, Protocol):
    """What a ``Bundle`` takes: can say beforehand whether a state fits."""

    def check_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Callable[[], None]:
        """Check a state, and return what takes it over. CheckpointError where it does not fit."""


class Loadable:
    """Base of objects whose state is loaded all or nothing."""

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Take over what ``state_dict`` gave. Everything is checked before anything changes: arguments and
        errors as ``check_state_dict``."""
        self.check_state_dict(state, strict)()

    def check_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Callable[[], None]:
        """Check what ``load_state_dict`` takes, and return what takes it over. CheckpointError where it does
        not fit."""
        raise NotImplementedError


class Bundle(Loadable):
    """Several things in one file: ``Bundle(model=model, optimizer=optimizer, random=nn.RandomState())`` saves
    and loads them together.

    Names in the file are ``model/...`` and so on. Loading is all or nothing: every part is checked before any
    changes.
    """

    def __init__(self, **parts: Part) -> None:
        for name, part in parts.items():
            if not callable(getattr(_stateful("Bundle", part), "check_state_dict", None)):
                raise CheckpointError(
                    "Bundle", name, arguments.shown(part), "something with check_state_dict"
                )
        self.parts = parts

    def state_dict(self) -> dict[str, Any]:
        """Returns the parts' arrays under their names."""
        return {
            f"{part}/{name}": value
            for part, thing in self.parts.items()
            for name, value in thing.state_dict().items()
        }

    def check_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Callable[[], None]:
        """Check what ``state_dict`` gave, and return what takes it over. CheckpointError, naming the part,
        where one does not fit."""
        strict = arguments.flag("load", "strict", strict, CheckpointError)
        split: dict[str, dict[str, Any]] = {part: {} for part in self.parts}
        for name, value in mapping("load", state).items():
            part, slash, rest = name.partition("/")
            if slash and part in split:
                split[part][rest] = value
            elif strict:
                raise CheckpointError(f"load: unexpected: {name}")
        takers = []
        for part, thing in self.parts.items():
            try:
                takers.append(thing.check_state_dict(split[part], strict))
            except CheckpointError as error:
                raise CheckpointError(f"{part}: {error}") from None

        def take() -> None:
            for taker in takers:
                taker()

        return take


def save(
    path: str | os.PathLike[str],
    module: Stateful | Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a module's, an optimiser's or a dict's arrays to ``path``.

    ``module``: has ``state_dict()``, or is a mapping of names to arrays (NumPy, CuPy, views, tensors) of any
    shape and any dtype that safetensors has. ``metadata``: strings kept in the file's header. ``path``: a
    file, old or new, in a folder that exists. It appears whole or not at all, and an old one keeps its mode:
    it is written beside, flushed to the disk and renamed; what killed saves to ``path`` left there is
    removed. A symbolic link stays: the file that it names is written. Arrays on the CPU are written from
    where they are: a step that another thread takes meanwhile leaves some arrays, or parts of one, from
    before it and some from after; save between steps, or save copies. Raises CheckpointError for arrays and
    names that the format cannot hold, and for a path to anything else; OSError when the disk refuses.
    """
    target = Path(os.path.realpath(arguments.path("save", path)))
    try:
        # a device or a pipe would be replaced by a file, and so would a link to itself
        # in this order: another saver's file may appear between the two
        usable = target.parent.is_dir() and (not os.path.lexists(target) or target.is_file())
    except OSError:  # a name that no file can have
        usable = False
    if not usable:
        raise CheckpointError(
            "save", "path", arguments.shown(str(target), 200), "a file, old or new, in a folder that exists"
        )
    state = module if isinstance(module, Mapping) else _stateful("save", module).state_dict()
    host = {_name(name): _host(name, array) for name, array in state.items()}
    if metadata is not None and not isinstance(metadata, Mapping):
        raise CheckpointError(
            "save", "metadata", arguments.shown(metadata), "a mapping of strings to strings"
        )
    for name, text in (metadata or {}).items():
        if not all(isinstance(s, str) and _is_text(s) for s in (name, text)):
            raise CheckpointError(
                "save", f"metadata[{arguments.shown(name)}]", arguments.shown(text), "a string"
            )
    try:
        _replace(target, lambda file: checkpoint_format.write(file, host, metadata or {}))
    except OSError as error:  # which may name a temporary file, unknown to the caller
        raise OSError(error.errno, error.strerror, str(target)) from None


def _replace(target: Path, write: Callable[[BinaryIO], object]) -> None:
    """Put what ``write`` writes in the place of ``target``, with its mode, at once and on the disk."""
    sweep(target)
    with _beside(target) as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
        os.replace(file.name, target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the name survives a power cut, too
    finally:
        os.close(folder)


@contextlib.contextmanager
def _beside(target: Path) -> Iterator[BinaryIO]:
    """A new file in the folder of ``target``, with its mode, and locked, so that ``sweep`` leaves it. Removed
    where its user fails."""
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
    name = target.with_name(f"{_prefix(target)}{secrets.token_hex(4)}{_BESIDE}")
    with open(name, "xb", opener=partial(os.open, mode=0o666 if mode is None else mode)) as file:
        try:
            with contextlib.suppress(OSError):  # a file system without locks; nothing is swept there
                fcntl.flock(file, fcntl.LOCK_EX)
            if not name.exists():  # swept before it was locked
                with _beside(target) as another:
                    yield another
                return
            if mode is not None and mode != stat.S_IMODE(name.stat().st_mode):
                name.chmod(mode)
            yield file
        except BaseException:
            with contextlib.suppress(OSError):
                name.unlink()
            raise


def _prefix(target: Path) -> str:
    """Returns what the names of files beside ``target`` begin with. A digest stands for a long name, which
    leaves no room for more."""
    name = os.fsencode(target.name)
    return f".{target.name if len(name) < 200 else hashlib.sha256(name).hexdigest()}."


def load(
    path: str | os.PathLike[str], module: Stateful | Mapping[str, Any], strict: bool = True
) -> dict[str, str]:
    """Read ``path`` into a module, an optimiser or a dict of arrays, in place. Returns the file's metadata.

    Everything is checked before anything changes. ``strict``: names that are missing in the file or unknown
    to the module are an error; otherwise they are left alone. Raises CheckpointError, naming what is wrong:
    no such file, not a safetensors file, truncated, missing or unexpected names, another shape or dtype, an
    FP8 state that cannot be.
    """
    strict = arguments.flag("load", "strict", strict, CheckpointError)
    if not isinstance(module, Mapping):
        _stateful("load", module)
    state, metadata = read(path)
    try:
        if isinstance(module, Mapping):
            assign(
                {name: array("load", name, value) for name, value in mapping("load", module).items()},
                state,
                strict,
            )
        else:
            module.load_state_dict(state, strict)
    except CheckpointError as error:
        raise CheckpointError(f"{os.fspath(path)}: {error}") from error
    return metadata


def sweep(path: str | os.PathLike[str]) -> None:
    """Remove what killed saves to ``path`` left beside it, as ``save`` does first. What another process is
    writing stays: it holds a lock."""
    target = Path(os.path.realpath(arguments.path("sweep", path)))
    for beside in target.parent.glob(f"{glob.escape(_prefix(target))}{'[0-9a-f]' * 8}{_BESIDE}"):
        # a file of another kind stays; a pipe does not block
        with contextlib.suppress(OSError), open(beside, "rb", opener=_carefully) as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                beside.unlink()


def _carefully(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, HostArray], dict[str, str]]:
    """Returns the arrays and the metadata of a file, on the host: memory for one copy of it. CheckpointError
    as ``load``."""
    return checkpoint_format.read(arguments.path("load", path))


def _foreign(name: str) -> str:
    """Returns what to do about an entry of fp8kit_torch's ``state_dict``."""
    torchs = name.endswith("_extra_state")
    return "; leave it out: FP8 state of fp8kit_torch has another form" if torchs else ""


def check(wanted: Mapping[str, ArrayView], state: Mapping[str, Any], strict: bool) -> dict[str, ArrayView]:
    """Returns the part of ``state`` that ``wanted`` names, as views. CheckpointError, listing up to 8 faults,
    where it does not fit."""
    faults = []
    if strict:
        faults += [f"missing: {name}" for name in wanted if name not in state]
        faults += [f"unexpected: {name}{_foreign(name)}" for name in state if name not in wanted]
    found = {}
    for name, target in wanted.items():
        if name not in state:
            continue
        view = array("load", name, state[name])
        if view.shape != target.shape or view.dtype is not target.dtype:
            faults.append(
                f"{name}: got {view.dtype.name} {view.shape}, expected {target.dtype.name} {target.shape}"
            )
        if not target.contiguous:
            faults.append(
                f"{name}: loads into an array of strides {target.strides}, expected a C-contiguous one"
            )
        if not target.writable:
            faults.append(f"{name}: loads into a read-only array, expected a writable one")
        found[name] = view
    if faults:
        more = f"; and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise CheckpointError(f"load: {'; '.join(faults[:8])}{more}")
    return found


def assign(wanted: Mapping[str, ArrayView], state: Mapping[str, Any], strict: bool) -> None:
    """``check``, then copy the values over, across devices where need be."""
    for name, view in check(wanted, state, strict).items():
        arrays.copy(wanted[name], arrays.contiguous(view))


def _stateful(operation: str, module: Any) -> Any:
    """Returns the module itself; CheckpointError unless it has a state."""
    has = all(callable(getattr(module, name, None)) for name in ("state_dict", "load_state_dict"))
    if isinstance(module, type) or not has:
        wanted = "a module, an optimiser, or a mapping of names to arrays"
        raise CheckpointError(operation, "module", arguments.shown(module), wanted)
    return module


def mapping(operation: str, state: Any) -> Mapping[str, Any]:
    """Returns a state as it is; CheckpointError unless it is a mapping of names to arrays."""
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise CheckpointError(operation, "state", arguments.shown(state), "a mapping of names to arrays")
    return state


def array(operation: str, name: str, value: Any) -> ArrayView:
    """Returns an entry of a state as a view; CheckpointError that names it where it is no array."""
    try:
        return arrays.as_view(value)
    except FormatError as error:
        wanted = (
            "an array; Bundle saves several modules in one file"
            if hasattr(value, "state_dict")
            else f"an array ({error})"
        )
        raise CheckpointError(operation, name, arguments.shown(value), wanted) from None


def _name(name: Any) -> str:
    """Returns an array's name as it is; CheckpointError for one that the format cannot hold."""
    if not isinstance(name, str) or name == checkpoint_format.METADATA or not _is_text(name):
        wanted = f"a string of characters, other than {checkpoint_format.METADATA}"
        raise CheckpointError("save", "name", arguments.shown(name), wanted)
    return name


def _is_text(text: str) -> bool:
    """Whether UTF-8 has it: a lone surrogate it has not."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _host(name: str, value: Any) -> HostArray:
    view = array("save", name, value)
    if view.dtype not in checkpoint_format.CODES.values():
        raise CheckpointError("save", name, f"dtype {view.dtype.name}", "a dtype that safetensors has")
    return np.ascontiguousarray(view.numpy()).reshape(view.shape)
