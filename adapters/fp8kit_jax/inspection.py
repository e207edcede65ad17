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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from fp8kit import inspection
from fp8kit.arguments import shown
from fp8kit.errors import ArgumentError
from fp8kit.inspection import Entry, Place, Watch
from fp8kit.numerics.inspect import Block, made
from fp8kit.quantization import Quantization
from fp8kit.scoped import Scoped
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
    """Returns a context manager: within it layers that have names show and do what ``config`` says ::

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
    ``shard_map``, and within vmap, parts are put together, weights aside; layers that a scan or a vmap stands
    for are one, but where ``layer_index`` tells them apart. What ``jax.checkpoint`` computes twice counts
    twice. Functions that were compiled ahead of time (``lower().compile()``) show nothing.
    """
    want_values("inspect", "block", "one around the jitted call")
    inspector = made(
        config,
        lambda layer: None,
        sinks,
        log_dir,
        first_step,
        keep,
        jax.process_index() if log_dir is not None else 0,
        switched=switch,
        wait=_wait,
    )
    return Block(inspector)


def _wait() -> None:
    want_values("inspect", "step", "a call behind the jitted one")
    jax.effects_barrier()


def want_values(operation: str, what: str, wanted: str) -> None:
    """ArgumentError where jit traces: it would happen once, and not in each step."""
    if isinstance(jax.numpy.zeros(()), jax.core.Tracer):
        raise ArgumentError(operation, what, "one within jax.jit", wanted)


def switch(looked_at: Any) -> None:
    """Let jit compile anew when another set of tensors is inspected, and use what it has for one that it
    knows."""
    _looked_at.set_global(looked_at)


def watched(found: QuantizerSet, prefix: str, layout: str) -> tuple[Quantization | None, Watch | None]:
    """Returns how a product is quantised, and what it is to show, in this step."""
    fp8, inspector = fp8_of(found), inspection.hooks.inspector
    if inspector is None:
        return fp8, None
    watch = inspector.of_products(((found.layer, prefix),), fp8, layout == "io")
    if watch is None or not watch.changed:
        return fp8, watch
    return dict(watch.changed)[prefix], watch


# --- stacked layers -----------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Traced:
    """A ``Place`` whose ``numbers`` are an array, int32 (depth,)."""

    numbers: Any
    names: tuple[str, ...] = field(metadata={"static": True})


_STACK: Scoped[tuple[tuple[str, Any], ...]] = Scoped("fp8kit_jax_stack", ())


@contextmanager
def layer_index(index: Any, name: str = "") -> Iterator[None]:
    """A context manager for the body of a scan, of a vmap over layers, or of a loop: layers within are those
    with this number of a stack, and ``inspect`` and ``capture`` tell them apart ::

        def body(x, own):                        # one of the stacked layers
            params, i = own
            with fj.layer_index(i, "layers"):    # "layers.mlp.fc1" is "layers.3.mlp.fc1", as in a loop
                return block.apply(params, x), None

        x, _ = jax.lax.scan(body, x, (stacked, jnp.arange(n)))

    ``index``: an int, or an integer array () of the function that is traced. ``name``: the stack's, behind
    which the number stands in the names of the layers; it stands at their end where they do not begin with
    it, and with "". Without this block the layers that one call stands for have one name, and are put
    together. Blocks may be nested. Without an inspector nothing is computed. Raises ArgumentError for an
    invalid index or name.
    """
    traced = isinstance(index, jax.Array | np.generic)
    if isinstance(index, bool) or not (isinstance(index, int) or (traced and index.shape == ())):
        got = shown(index) if not traced else f"{index.dtype} {index.shape}"
        raise ArgumentError("layer_index", "index", got, "an int, or an integer array ()")
    if traced and not jax.numpy.issubdtype(index.dtype, jax.numpy.integer):
        raise ArgumentError("layer_index", "index", f"{index.dtype} ()", "an int, or an integer array ()")
    if not isinstance(name, str):
        raise ArgumentError("layer_index", "name", shown(name), "the name of the stack, or an empty one")
    with _STACK.within((*_STACK.get(), (name, index))):
        yield


def place() -> Traced | None:
    """Returns which of stacked layers the call is of that is traced now; None for none, and where nothing is
    looked at."""
    stack = _STACK.get()
    if not stack or inspection.hooks.inspector is None:
        return None
    numbers = [jax.numpy.asarray(index, jax.numpy.int32) for _, index in stack]
    return Traced(jax.numpy.stack(numbers), tuple(name for name, _ in stack))


def show(program: Program, results: Mapping[str, Any], place: Traced | None) -> None:
    """Hand the inspector what a program's results hold for it, when they are there."""
    entries = program.watched
    if entries:
        jax.debug.callback(functools.partial(_take, entries), place, *(results[name] for name in entries))


def _take(entries: Mapping[str, Entry], place: Traced | None, *arrays: Any) -> None:
    if inspection.hooks.inspector is not None:
        own = None if place is None else Place(tuple(np.asarray(place.numbers).tolist()), place.names)
        inspection.hooks.inspector.take(entries, arrays, own)
