"""A rank of ``tests.numerics.test_gathering``: two micro-batches under ``fk.inspect(group=...)``, and layers
with a part of ``W3``. Argument: a file, whose name gets the rank's number behind it."""

from __future__ import annotations

import sys

import numpy as np

import fp8kit as fk
from fp8kit import nn
from fp8kit.recipe import MXFP8BlockScaling
from tests.support.inspected import HIDDEN, OUT, W3, Native, X, logged, section

PARTS = {"column": 0, "row": 1}  # dimension of the weight
STATS = ["mean", "std", "l1_norm", "max", "exponents", "kurtosis", "mxfp8_sqnr", "mxfp8_underflows%"]


class Parts(nn.Module):
    """Layers of which this rank has parts."""

    def __init__(self, ranks):
        super().__init__()
        for mode, dim in PARTS.items():
            how = {"tp_group": ranks, "parallel_mode": mode, "bias": False, "params_dtype": fk.float32}
            layer = nn.Linear(HIDDEN, OUT, **how)
            layer.write("weight", np.array_split(W3, ranks.size, dim)[ranks.rank])
            setattr(self, mode, layer)
        self.rank, self.size = ranks.rank, ranks.size

    def forward(self, x):
        self.column(x)
        self.row(fk.tensor(np.ascontiguousarray(np.array_split(X, self.size, 1)[self.rank])))


def main() -> None:
    ranks, model = fk.distributed.init(), Native()
    config = section(logged(["mean", "std", "l1_norm", "max", "exponents"]))
    with fk.inspect(model, config, group=ranks, sinks=f"{sys.argv[1]}.{ranks.rank}.jsonl") as log:
        for part in range(2):
            start = 16 * ranks.rank + 8 * part
            model.train_step(rows=slice(start, start + 8))
        log.step()
    parts = Parts(ranks)
    config = section(logged(STATS, ["weight"]))
    for whole in (True, False):
        sink = f"{sys.argv[1]}.{whole}.{ranks.rank}.jsonl"
        with fk.inspect(parts, config, whole_weights=whole, sinks=sink) as log:
            for _ in range(2):
                with fk.autocast(recipe=MXFP8BlockScaling()):
                    parts(fk.tensor(X))
                log.step()


if __name__ == "__main__":
    main()
