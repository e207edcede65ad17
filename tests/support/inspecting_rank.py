"""A rank of ``tests.numerics.test_gathering``: two micro-batches under ``fk.inspect(group=...)``. Argument: a
file, whose name gets the rank's number behind it."""

from __future__ import annotations

import sys

import fp8kit as fk
from tests.support.inspected import Native, logged, section


def main() -> None:
    ranks, model = fk.distributed.init(), Native()
    config = section(logged(["mean", "std", "l1_norm", "max", "exponents"]))
    with fk.inspect(model, config, group=ranks, sinks=f"{sys.argv[1]}.{ranks.rank}.jsonl") as log:
        for part in range(2):
            start = 16 * ranks.rank + 8 * part
            model.train_step(rows=slice(start, start + 8))
        log.step()


if __name__ == "__main__":
    main()
