"""asyncio tasks that take turns: each has its own autocast, in eager code and compiled."""

from __future__ import annotations

import asyncio

import fp8kit_torch as te
import pytest
import torch

from fp8kit.autocast import current


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


@pytest.fixture
def compiled():
    """(layer, the layer compiled, input, output under ``RECIPE``, output in high precision)"""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer, x = te.Linear(32, 32, device="cpu"), torch.randn(16, 32)
    call = torch.compile(layer, fullgraph=True, backend="eager")
    with te.autocast(recipe=RECIPE):
        fp8 = layer(x).detach()
    return layer, call, x, fp8, layer(x).detach()


RECIPE = te.Float8CurrentScaling()


def test_compiled_code_sees_the_autocast_of_its_task(compiled):
    """While tasks take turns."""
    _, call, x, fp8, high = compiled

    async def within():
        with te.autocast(recipe=RECIPE):
            for _ in range(3):
                await asyncio.sleep(0)
                assert torch.equal(call(x), fp8)
        assert torch.equal(call(x), high)

    async def without():
        for _ in range(6):
            await asyncio.sleep(0)
            assert torch.equal(call(x), high)

    async def both():
        await asyncio.gather(within(), without())

    asyncio.run(both())
    assert torch.equal(call(x), high)


def test_compiled_code_in_another_thread_sees_the_autocast_that_was_brought_there(compiled):
    """``asyncio.to_thread`` runs a function in its task's context; threads of the pool are used again."""
    layer, call, x, fp8, high = compiled

    async def main():
        with te.autocast(recipe=RECIPE):
            assert torch.equal(await asyncio.to_thread(call, x), fp8)
            assert torch.equal(await asyncio.to_thread(layer, x), fp8)
        assert torch.equal(await asyncio.to_thread(call, x), high)

    asyncio.run(main())


def test_compiled_code_sees_what_is_left_when_blocks_end_out_of_order(compiled):
    _, call, x, fp8, high = compiled
    outer, inner = te.autocast(recipe=te.DelayedScaling()), te.autocast(recipe=RECIPE)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert torch.equal(call(x), fp8)
    inner.__exit__(None, None, None)
    assert torch.equal(call(x), high)
    assert current() is None


def test_an_autocast_within_compiled_code_ends_there(compiled):
    """Around it stands one of its task; states are updated by whichever is outermost."""
    layer, _, x, fp8, high = compiled

    @torch.compile(backend="eager")
    def own(x):
        with te.autocast(recipe=RECIPE):
            return layer(x)

    async def main():
        with te.autocast(enabled=False):
            assert torch.equal(await asyncio.to_thread(own, x), fp8)
            assert torch.equal(own(x), fp8)
            assert torch.equal(layer(x), high)
        assert torch.equal(own(x), fp8)

    asyncio.run(main())
    assert current() is None
