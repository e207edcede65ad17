"""What fp8kit keeps from one process to the next, under ``settings.cache_dir()``: machine code of kernels
(``kernels``), answers about products (``products``), the CPU engine's machine code (``numba``).

What is read back is run, so a folder counts only where nobody but this user and root can have written it: the
folder, those that fp8kit made above it, and each file. Where it does not count, or nothing can be written, a
folder of this process alone stands in, and a warning says so. Every entry carries a digest of itself: what
was cut, overwritten or replaced by something else is not read, but made again.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import functools
import grp
import hashlib
import itertools
import json
import os
import pwd
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fp8kit import settings, slowness
from fp8kit.errors import BackendError

FOLDERS = ("kernels", "products", "numba")
_OLD = 3600  # seconds after which a temporary file is abandoned: writing one takes milliseconds
_LARGEST = 1 << 28  # bytes of an entry; the largest cubin has some megabytes
_HEAD, _DIGITS, _NEXT = b'{"sha256": "', 64, b'", '
EFFECT = "what is compiled lasts for this process alone"
CURE = "set FP8KIT_CACHE_DIR to a folder that can be written"


# --- whom a folder belongs to -------------------------------------------------------------------------------


def distrusted(path: Path) -> str | None:
    """Why somebody other than this user and root may have written what lies at ``path``; None where nobody
    can, or nothing is there."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return f"{path}: {error.strerror}"
    return _distrusted(str(path), found)


def _distrusted(name: str, found: os.stat_result) -> str | None:
    if found.st_uid not in (0, os.geteuid()):
        return f"{name} belongs to user {found.st_uid}"
    mode = f"mode {stat.S_IMODE(found.st_mode):o}"
    if found.st_mode & stat.S_IWOTH:
        return f"everybody can write {name} ({mode})"
    if found.st_mode & stat.S_IWGRP and not _alone(found.st_uid, found.st_gid):
        return f"group {found.st_gid} can write {name} ({mode})"
    return None


@functools.cache
def _alone(user: int, group: int) -> bool:
    """Whether a group has one user and no other, as many systems give everybody one of their own."""
    try:
        name, found = pwd.getpwuid(user), grp.getgrgid(group)
    except KeyError:
        return False
    return group == name.pw_gid and found.gr_name == name.pw_name and set(found.gr_mem) <= {name.pw_name}


def why_not(folder: Path, inside: bool = False) -> str | None:
    """Why what is in ``folder`` must not be read: it, or a folder above it that is fp8kit's, or that
    everybody may rename, is open to others. ``inside``: so is something in it. None where it may be read."""
    root = settings.cache_dir()
    own = [each for each in (folder, *folder.parents) if each == root or root in each.parents]
    for each in own or [folder]:
        if why := distrusted(each):
            return why
    for above in folder.absolute().parents:
        with contextlib.suppress(OSError):
            mode = os.stat(above).st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                return f"everybody can rename what is in {above} (mode {stat.S_IMODE(mode):o})"
    if inside:
        for place, folders, files in os.walk(folder):
            for name in (*folders, *files):
                if why := distrusted(Path(place, name)):
                    return why
    return None


def make(folder: Path) -> None:
    """Make a folder and those above it; only this user can write them, whatever the umask. OSError where that
    is impossible."""
    missing = list(itertools.takewhile(lambda each: not each.exists(), (folder, *folder.parents)))
    for each in reversed(missing):
        each.mkdir(0o755, exist_ok=True)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def unwritable(folder: Path) -> str | None:
    """Why no file can be made in ``folder`` or in one of the folders that it has; None where that is
    possible. Makes the folder."""
    try:
        make(folder)
        for each in (folder, *(found for found in folder.iterdir() if found.is_dir())):
            tempfile.TemporaryFile(dir=each).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def check() -> None:
    """Warn of every folder that would not be used now."""
    for folder in (settings.cache_dir(), *(settings.cache_dir() / name for name in FOLDERS)):
        if (why := why_not(folder)) is not None:
            tell_distrusted(folder, why)
            return  # the others are below it, or will be said when they are used
    if (why := unwritable(settings.cache_dir())) is not None:
        tell(settings.cache_dir(), why)


def want(operation: str, name: str) -> None:
    """BackendError where what is written to a folder now would be gone with this process."""
    folder = settings.cache_dir() / name
    if why := why_not(folder) or unwritable(folder):
        wanted = f"a folder that this user, and nobody else, can write ({why}); set FP8KIT_CACHE_DIR to one"
        raise BackendError(operation, "cache folder", f"'{folder}'", wanted)


# --- entries ------------------------------------------------------------------------------------------------


def read(folder: str, name: str) -> tuple[Path, bytes] | None:
    """Returns where an entry lies, and its bytes; None where there is none that may be read."""
    for place in _places(folder):
        path = place / name
        with contextlib.suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe does not hold us up
            with os.fdopen(handle, "rb") as file:
                found = os.fstat(handle)
                whole = stat.S_ISREG(found.st_mode) and found.st_size <= _LARGEST
                if whole and _distrusted(str(path), found) is None:
                    return path, file.read()
    return None


def write(folder: str, name: str, content: bytes) -> Path:
    """Keep an entry, whole or not at all, and return where. In a folder of this process alone, with a
    warning, where ``cache_dir()`` is open to others or cannot be written."""
    shared = settings.cache_dir() / folder
    why = why_not(shared)
    if why is None:
        try:
            make(shared)
            publish(shared / name, content)
            return shared / name
        except OSError as error:
            tell(shared, error.strerror or str(error))
    else:
        tell_distrusted(shared, why)
    path = _private() / folder / name
    make(path.parent)
    publish(path, content)
    return path


def tell(folder: Path, why: str) -> None:
    """Say that a folder cannot be written."""
    slowness.say(f"the cache folder {folder} cannot be written ({why})", EFFECT, CURE)


def tell_distrusted(folder: Path, why: str) -> None:
    """Say that a folder is not read, since others can write it: the whole cache, where that is why."""
    root = settings.cache_dir()
    folder = root if why == why_not(root) else folder
    slowness.say(
        f"the cache folder {folder} is not used ({why})",
        EFFECT,
        f"remove {folder}, unless only you have written in it, and let nobody else write what the "
        "parentheses name (chmod go-w); or set FP8KIT_CACHE_DIR to a folder of your own",
    )


def _places(folder: str) -> Iterator[Path]:
    shared = settings.cache_dir() / folder
    if (why := why_not(shared)) is None:
        yield shared
    else:
        tell_distrusted(shared, why)
    if settings.cache_dir() in _PRIVATE:
        yield _private() / folder


_PRIVATE: dict[Path, Path] = {}  # cache_dir() -> what stands in for it
_MAKING = threading.RLock()


def _private() -> Path:
    """Returns the folder of this process alone that stands in for ``cache_dir()``, and goes with the
    process."""
    with _MAKING:
        root, process = settings.cache_dir(), os.getpid()
        if root not in _PRIVATE:
            place = _PRIVATE[root] = Path(tempfile.mkdtemp(prefix="fp8kit-"))

            def remove() -> None:
                if os.getpid() == process:  # a forked child reads it, too
                    shutil.rmtree(place, ignore_errors=True)

            atexit.register(remove)
        return _PRIVATE[root]


def seal(content: Mapping[str, Any]) -> bytes:
    """Returns a JSON object as text, with the digest of the rest as its first member."""
    body = json.dumps(content, indent=1).encode()
    digest = hashlib.sha256(body).hexdigest().encode()
    return b"".join((_HEAD, digest, _NEXT, body[1:], b"\n"))


def unseal(text: bytes) -> dict[str, Any] | None:
    """Returns what ``seal`` was given; None for anything else, which is not parsed."""
    start = len(_HEAD) + _DIGITS
    body = b"{" + text[start + len(_NEXT) : -1]
    sealed = _HEAD + hashlib.sha256(body).hexdigest().encode() + _NEXT
    if text[: start + len(_NEXT)] != sealed or text[-1:] != b"\n":
        return None
    found = json.loads(body)
    return found if isinstance(found, dict) else None


# --- files --------------------------------------------------------------------------------------------------


def publish(path: Path, content: bytes) -> None:
    """Write a file into a folder that exists, whole or not at all; a folder in its place goes. OSError where
    that is impossible."""
    sweep(path.parent)
    # a short name, since the file's own may be as long as names can be
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix="fp8kit-", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            with contextlib.suppress(OSError):  # a file system without locks; nothing is swept there
                fcntl.flock(file, fcntl.LOCK_EX)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            try:
                os.replace(temporary, path)
            except IsADirectoryError:
                shutil.rmtree(path)
                os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


_SWEPT: dict[Path, float] = {}  # folder -> when


def sweep(folder: Path) -> None:
    """Remove the temporary files that killed writers left, once an hour: those that are older than an hour
    and not locked."""
    now = time.time()
    if now - _SWEPT.get(folder, 0) < _OLD:
        return
    _SWEPT[folder] = now
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not (entry.name.endswith(".tmp") or ".tmp." in entry.name):  # ours, or Numba's
                continue
            with contextlib.suppress(OSError):
                found = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(found.st_mode) and now - found.st_mtime > _OLD:
                    with open(entry.path, "rb") as file:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        os.unlink(entry.path)
