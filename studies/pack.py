"""A folder of results as one file, a tar archive: for machines that give back few files."""

from __future__ import annotations

import os
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fp8kit.errors import CheckpointError

EVERY = 10.0  # seconds between two looks at the folder
_PART = ".part"  # the ending of files that are not whole


@contextmanager
def packed(folder: Path, file: Path | None) -> Iterator[None]:
    """Within, ``file`` holds what ``folder`` does, a look or less ago: a command that is killed has left what
    it had finished. What is in the file already is unpacked first, but for files that are there. Nothing for
    None. CheckpointError for a file that is no such archive."""
    if file is None:
        yield
        return
    if file.exists():
        unpack(file, folder)
    ended = threading.Event()
    thread = threading.Thread(target=_watch, args=(folder, file, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        pack(folder, file)


def pack(folder: Path, file: Path) -> None:
    """Write the archive anew: the old one or the new one is there, never a part."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{os.getpid()}{_PART}")
    with tarfile.open(part, "w:gz") as archive:
        for path in _files(folder, file):
            archive.add(path, path.relative_to(folder).as_posix(), recursive=False)
    part.replace(file)


def unpack(file: Path, folder: Path) -> None:
    """Write the files of an archive that the folder does not have. CheckpointError for what is none."""
    try:
        with tarfile.open(file) as archive:
            for member in archive.getmembers():
                if member.isfile() and not (folder / member.name).exists():
                    archive.extract(member, folder, filter="data")
    except (tarfile.TarError, OSError, EOFError) as error:
        wanted = "a file that --pack has written"
        raise CheckpointError("studies", "--pack", f"{file}: {error}", wanted) from None


def _files(folder: Path, file: Path) -> list[Path]:
    own = file.resolve()
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and not path.name.endswith(_PART) and path.resolve() != own
    )


def _watch(folder: Path, file: Path, ended: threading.Event) -> None:
    """Pack whenever a file has been written."""
    known = None
    while not ended.wait(EVERY):
        now = [(path, path.stat().st_mtime_ns) for path in _files(folder, file) if path.suffix == ".json"]
        if now and now != known:
            pack(folder, file)
            known = now
