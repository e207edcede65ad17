"""A soak: ``python -m tests.campaign.soak`` (``make soak``): twenty minutes of small trainings in one
process, whose memory, open files and threads must not grow.

A round goes through the native frontend, PyTorch and JAX: layers made anew and layers kept, eager and
compiled, autocast on and off under several recipes, other lengths each time, checkpoints written and read, a
transformers model converted and put back. The limits of the caches by shape are lowered, so that entries are
forgotten all the time. In the first half of the rounds those caches fill that have no such limit, the
frameworks' own among them.

The verdict is the slope of each figure over the second half, by Theil and Sen: the median of the slopes of
all pairs of rounds, which single jumps of the allocator do not move. Descriptors and threads: exactly 0.
Resident memory: at most ``_BYTES`` a round, the size of one weight. A round makes some dozen layers anew,
each with its weights, gradients and plans, and calls them and others some hundred times: what left one of
them behind in every round, or 200 bytes of every call, is more. (What jax-tvm-ffi kept of the text of each
call was 110 KB a round.) Less is left to caches that still fill.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import fp8kit_jax as fj
import fp8kit_torch as te
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

import fp8kit as fk
from fp8kit import recipe
from fp8kit.lru import LRU, SHAPES
from fp8kit.serialization import Bundle

HIDDEN, HEADS, LENGTHS = 64, 4, range(1, 65)
_BYTES = HIDDEN * HIDDEN * 4  # a weight of the smallest layer, float32
_CACHED = 64  # entries of each cache by shape
RECIPES = (
    None,
    recipe.DelayedScaling(amax_history_len=4),
    recipe.Float8CurrentScaling(),
    recipe.Float8BlockScaling(),
    recipe.MXFP8BlockScaling(),
)


class Figures(NamedTuple):
    """What a process holds: bytes of resident memory, open descriptors, threads."""

    memory: int
    descriptors: int
    threads: int


def figures() -> Figures:
    """Of this process, after what is no longer referred to was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    held = len(os.listdir("/proc/self/fd")) - 1  # without the one that lists them
    return Figures(int(status["VmRSS"].split()[0]) * 1024, held, int(status["Threads"]))


def slope(values: list[int]) -> float:
    """The median of the slopes of all pairs."""
    count = len(values)
    pairs = ((i, j) for i in range(count) for j in range(i + 1, count))
    return statistics.median((values[j] - values[i]) / (j - i) for i, j in pairs)


Part = Callable[[random.Random], None]


def native(folder: Path) -> Part:
    """Layers of the native frontend, kept and new, with checkpoints."""
    model = fk.nn.TransformerLayer(HIDDEN, 2 * HIDDEN, HEADS)
    optimizer = fk.optim.AdamW(model.parameters(), lr=1e-3)
    bundle = Bundle(model=model, optimizer=optimizer, random=fk.nn.RandomState())
    host = np.random.default_rng(0).standard_normal((LENGTHS[-1], 2, HIDDEN)).astype(np.float32)
    path = folder / "native"

    def step(draw: random.Random) -> None:
        for own in RECIPES:
            x = fk.tensor(host[: draw.choice(LENGTHS)])
            fresh = fk.nn.LayerNormMLP(HIDDEN, 2 * HIDDEN)
            with fk.autocast(enabled=own is not None, recipe=own):
                y = fresh(model(x))
            y.backward(y.detach())
            optimizer.step()
            optimizer.zero_grad()
        fk.save(path, bundle)
        fk.load(path, bundle)
        fk.quantize(host[: draw.choice(LENGTHS)]).dequantize()

    return step


def pytorch(folder: Path) -> Part:
    """The same of the PyTorch frontend, and a compiled layer."""
    model = te.TransformerLayer(HIDDEN, 2 * HIDDEN, HEADS, device="cpu")
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=1e-3)
    compiled = torch.compile(te.Linear(HIDDEN, HIDDEN, device="cpu"), backend="aot_eager", dynamic=True)
    host, path = torch.randn(LENGTHS[-1], 2, HIDDEN), folder / "torch"

    def step(draw: random.Random) -> None:
        for own in RECIPES:
            x = host[: draw.choice(LENGTHS)].clone().requires_grad_()
            fresh = te.LayerNormMLP(HIDDEN, 2 * HIDDEN, device="cpu")
            with te.autocast(enabled=own is not None, recipe=own):
                y = fresh(model(x))
            y.backward(y.detach())
            optimizer.step()
            optimizer.zero_grad()
        compiled(host[: draw.randint(2, LENGTHS[-1])]).sum().backward()
        torch.save(model.state_dict(), path)
        model.load_state_dict(torch.load(path))
        with te.quantized_model_init(recipe=RECIPES[1]):
            te.Linear(HIDDEN, HIDDEN, device="cpu")(host[: draw.choice(LENGTHS)])

    return step


def converted() -> Part:
    """A model of transformers, converted, and plain again; and models that live for one round."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
    )
    kept = te.convert(LlamaForCausalLM(config))

    def step(draw: random.Random) -> None:
        for model in (kept, te.convert(LlamaForCausalLM(config))):
            ids = torch.arange(draw.randint(2, LENGTHS[-1]))[None] % 64
            with te.autocast(recipe=RECIPES[1]):
                model(ids, labels=ids).loss.backward()
            model.load_state_dict(model.state_dict())
            model.zero_grad()
        te.revert(kept)
        te.convert(kept)

    return step


def with_jax() -> Part:
    """A training step under ``jax.jit``, of a few lengths, since each is compiled and kept by JAX; eager
    calls."""
    generator = np.random.default_rng(0)
    host = generator.standard_normal((LENGTHS[-1], HIDDEN)).astype(np.float32)
    params = {
        "first": jnp.asarray(0.1 * generator.standard_normal((HIDDEN, 1, HIDDEN)), jnp.float32),
        "second": jnp.asarray(0.1 * generator.standard_normal((HIDDEN, HIDDEN)), jnp.float32),
        "norm": jnp.ones(HIDDEN),
    }
    optimizer = optax.adamw(1e-3)
    state = {"params": params, "sets": fj.create_set(RECIPES[1], 2), "memory": optimizer.init(params)}

    def loss_of(params: Any, sets: Any, x: Any) -> Any:
        y = fj.layernorm_mlp(
            x, params["norm"], None, (params["first"], params["second"]), norm_type="rmsnorm",
            quantizer_sets=sets,
        )  # fmt: skip
        return jnp.square(y - x).mean()

    @jax.jit
    def train(state: Any, x: Any) -> Any:
        grads, sets = jax.grad(loss_of, argnums=(0, 1))(state["params"], state["sets"], x)
        updates, memory = optimizer.update(grads, state["memory"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "sets": sets, "memory": memory}

    def step(draw: random.Random) -> None:
        nonlocal state
        for length in (3, 16, 17, 48):
            state = train(state, host[:length])
        fj.dense(host[: draw.choice((5, 32))], state["params"]["second"]).block_until_ready()
        jax.block_until_ready(state)

    return step


def verdict(rows: list[Figures]) -> list[str]:
    """The slope of each figure, printed; what grew."""
    faults = []
    for name, limit in zip(Figures._fields, (_BYTES, 0, 0), strict=True):
        values = [getattr(row, name) for row in rows]
        found = slope(values)
        print(f"{name}: {found:+.1f} each round, at most {limit}; from {min(values)} to {max(values)}")
        if found > limit:
            faults.append(name)
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign.soak")
    parser.add_argument("--minutes", type=float, default=20.0, metavar="N", help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(%(default)s)")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    draw, rows, begin, told = random.Random(options.seed), [], time.perf_counter(), -1.0
    for held in gc.get_objects():
        if isinstance(held, LRU) and held.limit == SHAPES:
            held.limit = _CACHED
    with tempfile.TemporaryDirectory() as place:
        parts = [native(Path(place)), pytorch(Path(place)), converted(), with_jax()]
        while (passed := (time.perf_counter() - begin) / 60) < options.minutes:
            for part in parts:
                part(draw)
            rows.append(figures())
            if passed // 1 > told:
                told, now = passed // 1, rows[-1]
                held = f"{now.memory / 2**20:.1f} MiB, {now.descriptors} descriptors, {now.threads} threads"
                print(f"{passed:4.1f} min, round {len(rows)}: {held}", flush=True)
    full = {name: info["size"] for name, info in fk.cache_info().items() if info["size"] >= info["limit"]}
    kept = rows[len(rows) // 2 :]
    print(f"{len(rows)} rounds, {len(kept)} of them judged; caches at their limit: {full}")
    faults = verdict(kept)
    passed = (time.perf_counter() - begin) / 60
    print(f"{len(faults)} of 3 grew {faults}, {passed:.1f} min on {os.cpu_count()} cores")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
