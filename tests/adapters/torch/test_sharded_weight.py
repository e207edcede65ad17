"""What a process's rows of a weight know of writes to them; the processes are in ``distributed_worker``."""

from __future__ import annotations

import pytest
import torch
from fp8kit_torch import sharded_weight
from fp8kit_torch.weight_scales import amax_of, scales_of
from torch import distributed

from fp8kit import float8
from fp8kit.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from fp8kit.testing.compare import assert_same_bits
from tests.support.processes import run

FP8 = DelayedScaling().quantization
WRITES = {
    "in place": lambda w: w.add_(1),
    "flat": lambda w: w.view(-1).add_(1),
    "transposed": lambda w: w.t().mul_(2),
    "a row": lambda w: w[0].fill_(3),
    "by index": lambda w: w.__setitem__(0, 4.0),
    "several": lambda w: torch._foreach_add_([w], 1.0),
    "data": lambda w: w.data.add_(1),
    "data, flat": lambda w: w.data.view(-1).add_(1),
    "data, transposed": lambda w: w.data.detach().t()[1].mul_(2),
    "data, rows": lambda w: [row.add_(1) for row in w.data.data.unbind(0)],
    "all_reduce": lambda w: distributed.all_reduce(w.data),
    "broadcast of a part": lambda w: distributed.broadcast(w.data.view(-1)[:4], 0),
}


@pytest.fixture(scope="module")
def one_process():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("write", WRITES)
def test_every_write_is_known(write, one_process):
    weight = sharded_weight._rows_of(torch.ones(4, 8), FP8)
    rows = weight._rows
    assert rows.changed
    rows.take(*[torch.ones(1)] * 3)
    assert weight.sum() + weight.view(-1)[0] + weight.t()[0, 0] == 34
    assert not rows.changed
    with torch.no_grad():
        WRITES[write](weight)
    assert rows.changed


PARTS = {
    "rows": lambda w: w[1:3],
    "every other row": lambda w: w[::2],
    "flat": lambda w: w.view(-1),
    "as wide": lambda w: w.t()[:, :4].t(),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_moved_as_it_is(part):
    """As a checkpoint does, whose processes have other rows; the first rows alone are a weight."""
    values = torch.arange(32.0).reshape(4, 8)
    seen, expected = (PARTS[part](w) for w in (sharded_weight._rows_of(values, FP8), values.clone()))
    with torch.no_grad():
        for moved in (seen.clone(), seen.to(torch.float64), seen.detach().contiguous()):
            assert torch.equal(moved.double(), expected.double())


PLACES = [pytest.param("cpu", marks=pytest.mark.programs), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("place", PLACES)
def test_one_process_alone(place, tmp_path):
    """``fully_shard`` moves nothing there, and asks for the rows all the same."""
    run("tests.adapters.torch.distributed_worker", 1, tmp_path, place, ["held_in_fp8", "collected_late"])


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), Float8BlockScaling()], ids=["tensor", "blocks"])
def test_codes_are_those_of_a_whole_weight(recipe, place):
    """Also behind what a stream of torch's own has still to write, as ``fully_shard`` has one."""
    how = recipe.quantization.w
    values = torch.randn(256, 384, generator=torch.Generator().manual_seed(0)).to(place)
    rows = sharded_weight._rows_of(torch.zeros_like(values), recipe.quantization)._rows
    side = None
    if place == "cuda":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        if side is not None:
            torch.cuda._sleep(100_000_000)  # some 50 ms
        rows.padded.copy_(values)
        amax = amax_of(rows.padded, how)
        rows.take(amax, *scales_of(amax, how, values.dtype))
        codes, inverse = rows.cast(), rows.inverse
    if side is not None:
        side.synchronize()
    wanted = float8.quantize(values, how.format, scaling=how.granularity)
    assert_same_bits("codes", codes.cpu().numpy(), wanted.data.cpu().numpy())
    assert_same_bits("scales", inverse.cpu().numpy(), wanted.scale_inv.cpu().numpy())
    assert rows.cast() is codes
