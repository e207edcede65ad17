"""A case that fails in one of two processes, while the other one waits for it."""

from __future__ import annotations

import sys

import torch.distributed as dist

from tests.support.processes import work


def fails(rank: int, ranks: int) -> None:
    assert rank == 0, "mine"
    dist.barrier()


if __name__ == "__main__":
    work(globals(), sys.argv[1:])
