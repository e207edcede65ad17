"""What a process's rows of a weight know of writes to them; the processes are in ``distributed_worker``."""

from __future__ import annotations

import pytest
import torch
from fp8kit_torch import sharded_weight

from fp8kit.recipe import DelayedScaling

WRITES = {
    "in place": lambda w: w.add_(1),
    "flat": lambda w: w.view(-1).add_(1),
    "transposed": lambda w: w.t().mul_(2),
    "a row": lambda w: w[0].fill_(3),
    "by index": lambda w: w.__setitem__(0, 4.0),
    "several": lambda w: torch._foreach_add_([w], 1.0),
    "data": lambda w: w.data.add_(1),
}


@pytest.mark.parametrize("write", WRITES)
def test_every_write_is_known(write):
    weight = sharded_weight._rows_of(torch.ones(4, 8), DelayedScaling().quantization)
    rows = weight._rows
    assert rows.changed
    rows.take(*[torch.ones(1)] * 3)
    assert weight.sum() + weight.view(-1)[0] + weight.t()[0, 0] == 34
    assert not rows.changed
    with torch.no_grad():
        WRITES[write](weight)
    assert rows.changed
