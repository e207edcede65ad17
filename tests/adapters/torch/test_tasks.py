"""asyncio tasks that take turns: each has its own autocast, in eager code and compiled."""

from __future__ import annotations

import asyncio

import fp8kit_torch as te
import pytest
import torch

from fp8kit.autocast import current
from fp8kit.errors import RecipeError


def test_eager_layers_of_tasks_compute_as_their_own_autocast_says():
    """In FP8 and in high precision by turns, with the bits of each alone; states are updated by task."""
    torch.manual_seed(0)
    layers = [te.Linear(32, 32, device="cpu") for _ in range(2)]
    x = torch.randn(16, 32)
    with te.autocast(recipe=te.Float8CurrentScaling()):
        fp8 = layers[0](x).detach()
    high = layers[0](x).detach()
    assert not torch.equal(fp8, high)

    async def in_fp8(layer, turns):
        with te.autocast(recipe=te.Float8CurrentScaling()):
            for _ in range(turns):
                await asyncio.sleep(0)
                assert torch.equal(layers[0](x), fp8)
        with te.autocast(recipe=te.DelayedScaling(amax_history_len=2)):
            await asyncio.sleep(0)
            layer(x)
        await asyncio.sleep(0)
        assert torch.equal(layers[0](x), high)

    async def plain():
        for _ in range(8):
            await asyncio.sleep(0)
            assert torch.equal(layers[0](x), high)

    async def main():
        await asyncio.gather(in_fp8(layers[0], 2), plain(), in_fp8(layers[1], 4))

    asyncio.run(main())
    assert current() is None
    assert torch.equal(layers[0](x), high)
    assert all(layer.fp8_meta["scaling_fwd"].scale[0] > 1 for layer in layers)


def test_compiled_code_sees_the_autocast_of_its_task_or_refuses():
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer, x = te.Linear(32, 32, device="cpu"), torch.randn(16, 32)
    call = torch.compile(layer, fullgraph=True, backend="aot_eager")
    recipe = te.Float8CurrentScaling()
    with te.autocast(recipe=recipe):
        fp8 = layer(x).detach()
    high = layer(x).detach()

    async def alone():
        assert torch.equal(call(x), high)
        with te.autocast(recipe=recipe):
            assert torch.equal(call(x), fp8)
            await asyncio.sleep(0)
            assert torch.equal(call(x), fp8)
        assert torch.equal(call(x), high)

    asyncio.run(alone())

    async def within():
        with te.autocast(recipe=recipe):
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def without():
        await asyncio.sleep(0)
        with pytest.raises(RecipeError, match="linear: autocast: got a call while another asyncio task's"):
            call(x)
        assert torch.equal(layer(x), high)

    async def both():
        await asyncio.gather(within(), without())

    asyncio.run(both())
    assert torch.equal(call(x), high)
