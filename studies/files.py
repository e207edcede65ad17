"""Files of results: one for each finished run, written whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fp8kit.errors import CheckpointError

Found = dict[str, Any]


def write(path: Path, found: Any) -> None:
    """JSON at ``path``: the old file or the new one is there, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with part.open("w") as file:
        json.dump(found, file, allow_nan=False, separators=(",", ":"))
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def read(path: Path) -> Any:
    """What ``write`` wrote. CheckpointError for a file that is no JSON."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError("studies", str(path), f"{error}", "a file that the command wrote") from None


def run_path(folder: Path, case: str, seed: int) -> Path:
    """The file of a finished run."""
    return folder / "runs" / f"{case}.{seed}.json"


def runs(folder: Path) -> dict[tuple[str, int], Found]:
    """(case, seed) -> what the run's file holds, of all finished runs."""
    found: dict[tuple[str, int], Found] = {}
    for path in sorted((folder / "runs").glob("*.json")):
        own = read(path)
        found[own["settings"]["case"], own["settings"]["seed"]] = own
    return found


def plain(found: Any) -> Any:
    """As JSON gives it back."""
    return json.loads(json.dumps(found))
