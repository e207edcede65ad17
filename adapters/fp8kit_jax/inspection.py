"""``inspect``: ``fp8kit.numerics.inspect`` for JAX's functions and modules.

What is looked at is a static choice: a step that is looked at is another program. ``jax.jit`` knows by JAX's
user context which one to run, and compiles each once; a step that is not looked at runs the same program as
without an inspector. Within the looked-at program an operation has small results more, and
``jax.debug.callback`` hands them to the inspector. The callbacks are unordered: JAX refuses ordered ones
within vmap and on several devices, and the order of what is put together does not matter.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import jax

from fp8kit import inspection
from fp8kit.errors import ArgumentError
from fp8kit.inspection import Entry, Watch
from fp8kit.numerics.inspect import Block, made
from fp8kit.quantization import Quantization
from fp8kit_jax.program import Program
from fp8kit_jax.quantizers import QuantizerSet, fp8_of

# what is looked at in this step, None for nothing: a part of what jit knows a program by
_looked_at: Any = jax.make_user_context(None)


def inspect(
    config: Any,
    *,
    sinks: Any = (),
    log_dir: str | os.PathLike[str] | None = None,
    first_step: int = 0,
    keep: bool = True,
) -> Any:
    """A context manager: within it layers that have names show and do what ``config`` says ::

        with fj.inspect("config.yaml", sinks="run/statistics.jsonl") as log:
            for batch in data:
                params = step(params, batch)                  # jitted, within the block or before
                log.step()

    Names are the paths of Flax's linen modules, joined by dots, those that ``fp8kit_jax.nnx.name_layers``
    gave, and the argument ``name`` of ``dense`` and its like; products of an MLP end in ``.fc1`` and
    ``.fc2``. Arguments and errors as ``fk.inspect``'s: raises ArgumentError, also where jit traces.

    A jitted function is compiled once more for each different choice of what is looked at in a step, and
    runs as it does without in all other steps. ``log.step()`` waits for what was looked at. On several
    devices a tensor that is split by ``jit`` is looked at as a whole, on each of them; within a
    ``shard_map``, and within vmap, parts are put together, weights aside. What ``jax.checkpoint`` computes
    twice counts twice. Functions that were compiled ahead of time (``lower().compile()``) show nothing.
    """
    _want_values("block", "one around the jitted call")
    inspector = made(
        config,
        lambda layer: None,
        sinks,
        log_dir,
        first_step,
        keep,
        jax.process_index() if log_dir is not None else 0,
        switched=_switch,
        wait=_wait,
    )
    return Block(inspector)


def _wait() -> None:
    _want_values("step", "a call behind the jitted one")
    jax.effects_barrier()


def _want_values(what: str, wanted: str) -> None:
    """ArgumentError where jit traces: it would happen once, and not in each step."""
    if isinstance(jax.numpy.zeros(()), jax.core.Tracer):
        raise ArgumentError("inspect", what, "one within jax.jit", wanted)


def _switch(looked_at: Any) -> None:
    _looked_at.set_global(looked_at)


def watched(found: QuantizerSet, prefix: str, layout: str) -> tuple[Quantization | None, Watch | None]:
    """How a product is quantised, and what it is to show, in this step."""
    fp8, inspector = fp8_of(found), inspection.inspector
    if inspector is None:
        return fp8, None
    watch = inspector.of_products(((found.layer, prefix),), fp8, layout == "io")
    if watch is None or not watch.changed:
        return fp8, watch
    return dict(watch.changed)[prefix], watch


def show(program: Program, results: Mapping[str, Any]) -> None:
    """Hand the inspector what a program's results hold for it, when they are there."""
    entries = program.watched
    if entries:
        jax.debug.callback(functools.partial(_take, entries), *(results[name] for name in entries))


def _take(entries: Mapping[str, Entry], *arrays: Any) -> None:
    if inspection.inspector is not None:
        inspection.inspector.take(entries, arrays)
