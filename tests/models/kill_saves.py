"""Run by ``test_resume``: children that save again and again are killed at random moments; what is on the
disk afterwards is whole.

Arguments: folder, kills, seed. A child writes the number of each save that returned into a pipe, so that it
is known what must not be lost.
"""

from __future__ import annotations

import os
import random
import signal
import struct
import sys
import time
from pathlib import Path

import numpy as np

from fp8kit import serialization

SHAPES = {"weights": (300, 70), "steps": (3,), "master": (1, 40_000), "losses": (0,)}


def payload(number: int) -> dict[str, np.ndarray]:
    return {name: np.full(shape, number, np.int64) for name, shape in SHAPES.items()}


def child(path: Path, first: int, pipe: int) -> None:
    number = first
    while True:
        serialization.save(path, payload(number), {"number": str(number)})
        os.write(pipe, struct.pack("=q", number))
        number += 1


def main(folder: Path, kills: int, seed: int) -> None:
    path, moments, done, inside = folder / "state", random.Random(seed), -1, 0
    for kill in range(kills):
        read, write = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(read)
            try:
                child(path, done + 1, write)
            finally:
                os._exit(1)
        os.close(write)
        time.sleep(moments.uniform(0.0, 0.02))
        os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL, f"kill {kill}: the child ended by itself, {status}"
        with os.fdopen(read, "rb") as pipe:
            said = pipe.read()
        returned = max([done, *(n for (n,) in struct.iter_unpack("=q", said))])
        inside += len(list(folder.iterdir())) > path.exists()
        if returned >= 0:
            state, metadata = serialization.read(path)
            done = int(metadata["number"])
            assert done in (returned, returned + 1), (
                f"kill {kill}: {done} on the disk, {returned} had returned"
            )
            assert {name: array.shape for name, array in state.items()} == SHAPES, kill
            assert all((array == done).all() for array in state.values()), f"kill {kill}: a mixture"
        if moments.random() < 0.5:
            serialization.sweep(path)
    serialization.sweep(path)
    assert [entry.name for entry in folder.iterdir()] == ["state"]
    print(f"{kills} kills, {inside} during a save, {done + 1} saves")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
