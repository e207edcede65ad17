"""What one of several processes does with weights in FP8 that torch's collectives read and write
(``tests.support.processes``)."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
from fp8kit_torch import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Linear,
    MXFP8BlockScaling,
    quantized_model_init,
)
from torch.nn.parallel import DistributedDataParallel

from fp8kit.errors import UnsupportedError
from tests.adapters.torch import distributed_worker

RECIPES = (DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling(), MXFP8BlockScaling())


def layers(value):
    """A layer for each recipe, whose weight is ``value``."""
    for recipe in RECIPES:
        with quantized_model_init(recipe=recipe):
            layer = Linear(128, 128, bias=False, device=distributed_worker.PLACE)
        with torch.no_grad():
            layer.weight.fill_(value)
        yield layer


def want(layer, value):
    found = layer.weight.dequantize()
    assert torch.equal(found, torch.full_like(found, value)), (found, value)


def collectives(rank, world):
    """What they write into a weight is held, by any way that leads to it; what they read stays."""
    whole = world * (world + 1) / 2
    for layer in layers(rank + 1.0):
        dist.broadcast(layer.weight.data, 1)
        want(layer, 2.0)
        with torch.no_grad():
            layer.weight.fill_(rank + 1.0)
            dist.all_reduce(layer.weight)
        want(layer, whole)
        dist.broadcast(layer.state_dict()["weight"].mul_(rank + 1.0), 0)
        want(layer, whole)
        with torch.no_grad():
            layer.weight.fill_(rank + 1.0)
        dist.all_reduce(layer.weight.data, async_op=True).wait()
        want(layer, whole)
        got = [torch.empty(128, 128, device=distributed_worker.PLACE) for _ in range(world)]
        dist.all_gather(got, layer.weight.data.mul_(rank + 1.0))
        assert [each.mean().item() for each in got] == [whole * (i + 1) for i in range(world)]
        want(layer, whole * (rank + 1))
        dist.broadcast(layer.weight.data[:64], 0)
        assert layer.weight[:64].eq(whole).all()
        assert layer.weight[64:].eq(whole * (rank + 1)).all()
        with pytest.raises(UnsupportedError, match="a plain tensor, and copy_"):
            dist.recv(layer.weight.data, (rank + 1) % world)


def first_of_ddp(rank, world):
    """DistributedDataParallel starts from the first process' weights, of one layer too."""
    for layer in layers(rank + 1.0):
        DistributedDataParallel(layer)
        want(layer, 1.0)


if __name__ == "__main__":
    distributed_worker.main(sys.argv[1:], globals())
