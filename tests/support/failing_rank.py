"""What one of two ranks does in ``tests/commands/test_launch.py``: a row-parallel layer; ``how`` the second
rank fails: "shapes", "dies", "hangs", "raises", "not". It says when it does, by the machine's clock."""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

import fp8kit as fk
from fp8kit import distributed, nn
from fp8kit.testing.compare import assert_same_bits

TIMEOUT = 8.0  # seconds that a rank waits for the other one
HANGS = 600  # seconds, longer than any test runs: somebody has to end it


def main(how: str) -> None:
    ranks = distributed.init(timeout=TIMEOUT)
    layer = nn.Linear(16, 16, tp_group=ranks, parallel_mode="row", name="fc2", device=ranks.device)
    distributed.broadcast_parameters(layer, ranks)
    rows, y = 16, None
    for step in range(3):
        if ranks.rank == 1 and step == 1:
            if how != "not":
                print(f"fails at {time.monotonic()}", file=sys.stderr, flush=True)
            if how == "shapes":
                rows = 32
            elif how == "dies":
                assert y is not None
                y.numpy()  # the call before is done
                os.kill(os.getpid(), signal.SIGKILL)
            elif how == "hangs":
                time.sleep(HANGS)
            elif how == "raises":
                raise KeyError("mine")
        y = layer(fk.tensor(np.ones((rows, 8), np.float32), device=ranks.device))
    data, tensor = distributed.grid(ranks, 2)
    assert (data.size, tensor.size, tensor.rank) == (1, 2, ranks.rank)
    x = fk.tensor(np.full(4, ranks.rank + 1.0, np.float32), device=ranks.device)
    assert_same_bits("sum", distributed.all_reduce(x, tensor).numpy(), np.full(4, 3, np.float32))
    x = fk.tensor(np.arange(2, dtype=np.float32) + 2 * ranks.rank, device=ranks.device)
    y = fk.tensor(np.zeros(2, np.float32), device=ranks.device)
    ranks.all_to_all(x.view, y.view, fk.arrays.current_stream(ranks.device))
    assert_same_bits("all_to_all", y.numpy(), np.array([ranks.rank, 2 + ranks.rank], np.float32))
    sys.stdout.write(f"rank {ranks.rank} has done it\n")  # in one piece: ranks share the pipe
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
