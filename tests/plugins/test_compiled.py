"""What a policy means where a program is traced: under torch.compile and jax.jit, and in a captured CUDA
graph."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import fp8kit_jax
import fp8kit_torch
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import fp8kit as fk
from fp8kit.backends import policy as policies
from fp8kit.plugins import Kind, get_policy, policy_context, registry, with_denied_vendors, with_preference
from tests.support.engines import Engine

KERNELS = ("norm_fwd", "norm_bwd")


@pytest.fixture
def engine() -> Engine:
    """Takes norms where its kind is preferred."""
    made = Engine("acme", KERNELS, kind=Kind.REFERENCE, priority=1)
    registry.register_many(made.impls)
    return made


def overriding(engine: Engine) -> Any:
    return policy_context(
        replace(get_policy(), overrides=tuple((impl.op_name, impl) for impl in engine.impls))
    )


# --- torch --------------------------------------------------------------------------------------------------


@pytest.fixture
def layer() -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return fp8kit_torch.LayerNorm(16, device="cpu")


def torch_step(call: Any, around: Any = None, back: Any = None) -> Any:
    """(output, gradient) of a call, backward under another policy than forward."""
    x = torch.linspace(-1, 1, 64).reshape(4, 16).requires_grad_()
    with around or contextlib.nullcontext():
        y = call(x)
    with back or contextlib.nullcontext():
        (y * y).sum().backward()
    return y.detach(), x.grad


def test_torch_eager_backward_is_forwards(layer: Any, engine: Engine) -> None:
    torch_step(layer, fk.use_backend("acme"), fk.use_backend("reference"))
    assert engine.calls == {"norm_fwd": 1, "norm_bwd": 1}
    torch_step(layer, fk.use_backend("reference"), fk.use_backend("acme"))
    assert engine.calls == {"norm_fwd": 1, "norm_bwd": 1}


def test_torch_compile_keeps_the_policy_it_was_traced_under(layer: Any, engine: Engine) -> None:
    """Guarded: under another policy the function is compiled anew. Forward's policy, whole, is backward's."""
    call = torch.compile(layer, fullgraph=True, backend="aot_eager")
    want = torch_step(call)
    assert not engine.calls
    got = torch_step(call, fk.use_backend("acme"), fk.use_backend("reference"))
    assert engine.calls == {"norm_fwd": 1, "norm_bwd": 1}
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    torch_step(call, None, fk.use_backend("acme"))
    assert engine.calls == {"norm_fwd": 1, "norm_bwd": 1}
    fk.use_backend("acme")
    torch_step(call)
    assert engine.calls == {"norm_fwd": 2, "norm_bwd": 2}
    policies.reset_global_policy()
    torch_step(call, with_denied_vendors("nobody"))
    assert engine.calls == {"norm_fwd": 2, "norm_bwd": 2}


def test_torch_compile_sees_a_registration_at_the_next_call(layer: Any) -> None:
    """Implementations are resolved when the compiled function is called."""
    call = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch_step(call, with_preference("default"))
    late = Engine("late", KERNELS)
    registry.register_many(late.impls)
    torch_step(call, with_preference("default"))
    assert late.calls == {"norm_fwd": 1, "norm_bwd": 1}


def test_torch_compile_takes_overrides(layer: Any) -> None:
    mine = Engine("mine", KERNELS)
    call = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        torch_step(call)
        with overriding(mine):
            torch_step(call, None, fk.use_backend("reference"))
    assert mine.calls == {"norm_fwd": 2, "norm_bwd": 2}


def test_torch_compile_sees_the_block_of_a_task(layer: Any, engine: Engine) -> None:
    """Its own, while tasks take turns, and that of the context that ``asyncio.to_thread`` brings."""
    call = torch.compile(layer, fullgraph=True, backend="aot_eager")

    async def plain() -> None:
        for _ in range(3):
            await asyncio.sleep(0)
            torch_step(call)

    async def block() -> None:
        with fk.use_backend("acme"):
            await asyncio.sleep(0)
            torch_step(call)
            await asyncio.to_thread(torch_step, call)
        torch_step(call)

    async def main() -> None:
        await asyncio.gather(block(), plain())

    asyncio.run(main())
    assert engine.calls == {"norm_fwd": 2, "norm_bwd": 2}


# --- JAX ----------------------------------------------------------------------------------------------------


def jax_loss(x: Any, weight: Any) -> Any:
    return (fp8kit_jax.layernorm(x, weight, None, "rmsnorm") ** 2).sum()


def jax_step(call: Any) -> list[Any]:
    with jax.default_device(jax.devices("cpu")[0]):
        x = jnp.linspace(-1, 1, 64, dtype=jnp.float32).reshape(4, 16)
        return [np.asarray(part) for part in jax.block_until_ready(call(x, jnp.ones(16, jnp.float32)))]


def test_jit_keeps_what_it_was_traced_under(engine: Engine) -> None:
    call = jax.jit(jax.grad(jax_loss, (0, 1)))
    with fk.use_backend("acme"):
        got = jax_step(call)
    assert engine.calls == {"norm_fwd": 1, "norm_bwd": 1}
    again = jax_step(call)  # not traced again: neither another policy nor a registration reaches it
    late = Engine("late", KERNELS)
    registry.register_many(late.impls)
    with with_preference("default"):
        jax_step(call)
    assert (engine.calls, late.calls) == ({"norm_fwd": 3, "norm_bwd": 3}, {})
    assert all(np.array_equal(a, b) for a, b in zip(got, again, strict=True))


def test_what_is_not_under_jit_is_resolved_at_each_call(engine: Engine) -> None:
    call = jax.grad(jax_loss, (0, 1))
    jax_step(call)
    assert not engine.calls
    with fk.use_backend("acme"):
        jax_step(call)
    assert engine.calls == {"norm_fwd": 1, "norm_bwd": 1}
    late = Engine("late", KERNELS)
    registry.register_many(late.impls)
    with with_preference("default"):
        jax_step(call)
    assert late.calls == {"norm_fwd": 1, "norm_bwd": 1}
    jax_step(jax.jit(call))
    assert late.calls == {"norm_fwd": 2, "norm_bwd": 2}, (
        "what comes later is traced with what is there by then"
    )


def test_jit_takes_overrides() -> None:
    mine = Engine("mine", KERNELS)
    call = jax.jit(jax.grad(jax_loss, (0, 1)))
    with overriding(mine):
        jax_step(call)
    policies._INTERNED.clear()
    jax_step(call)
    assert mine.calls == {"norm_fwd": 2, "norm_bwd": 2}


# --- CUDA graphs --------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_captured_graph_replays_what_was_captured() -> None:
    import cupy

    from fp8kit import arrays
    from fp8kit.backends import dispatch

    device = arrays.Device("cuda")
    calls: list[str] = []
    own = registry.get_implementation("add", "cuda.add")
    assert own is not None

    def add(a: Any, b: Any, out: Any, stream: int) -> None:
        calls.append("add")
        own.fn(a, b, out, stream)

    x, out = cupy.ones((4, 8), cupy.float32), cupy.zeros((4, 8), cupy.float32)
    views = [arrays.as_view(x), arrays.as_view(x), arrays.as_view(out)]
    dispatch.kernels(device).add(*views, arrays.current_stream(device))  # compiled now
    arrays.synchronize(device)
    with (
        cupy.cuda.Stream(non_blocking=True) as stream,
        policy_context(replace(get_policy(), overrides=(("add", replace(own, impl_id="mine.add", fn=add)),))),
    ):
        stream.begin_capture()
        dispatch.kernels(device).add(*views, arrays.current_stream(device))
        graph = stream.end_capture()
    x[...] = 3
    arrays.synchronize(device)
    with cupy.cuda.Stream(non_blocking=True) as stream, fk.use_backend("reference"):
        graph.launch(stream)
        stream.synchronize()
    assert calls == ["add"], "Python ran at capture only"
    assert out.get().tolist() == [[6.0] * 8] * 4
