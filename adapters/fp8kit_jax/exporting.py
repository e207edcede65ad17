"""``export``: a jitted function as bytes that another process runs, by ``jax.export``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from fp8kit.arguments import shown
from fp8kit.errors import ArgumentError
from fp8kit.execution.codec import decode, encode
from fp8kit_jax import calls
from fp8kit_jax.quantizers import QuantizerSet
from fp8kit_jax.state import Slot

# JAX takes a name once a process: where this module is imported again, sets of the new classes are not taken
with contextlib.suppress(ValueError):
    jax.export.register_namedtuple_serialization(Slot, serialized_name="fp8kit.Slot")
    jax.export.register_pytree_node_serialization(
        QuantizerSet,
        serialized_name="fp8kit.QuantizerSet",
        serialize_auxdata=lambda static: encode(static).encode(),
        deserialize_auxdata=lambda text: decode(text.decode()),
        from_children=lambda static, slots: QuantizerSet(*slots, *static),
    )


def export(
    function: Any, *, platforms: Sequence[str] | None = None, disabled_checks: Sequence[Any] = ()
) -> Callable[..., Any]:
    """``jax.export.export`` of a jitted function that calls fp8kit: ``export(step)(*arguments)`` is a
    ``jax.export.Exported`` with ``serialize()``, ``call`` and the rest.

    JAX refuses custom calls whose meaning may change from version to version, fp8kit's among them. Here they
    are let through: the exported program holds the text of what each call runs, and a process that runs it
    imports ``fp8kit_jax`` first. A text of another fp8kit, or for another kind of device than it was compiled
    for, is a BackendError when the program first runs. ``platforms``, ``disabled_checks``: as there; a
    platform needs one device of its kind in the process that exports. What draws random bits by ``rng`` takes
    its key from an argument of the function. Flax's variables come without their boxes
    (``flax.linen.unbox``): JAX serialises none.

    Raises ArgumentError for a function that is not jitted.
    """
    if not hasattr(function, "lower") or not hasattr(function, "trace"):
        raise ArgumentError("export", "function", shown(function), "what jax.jit returns")
    targets = (calls.TARGET, calls.RECORDED)
    own = [jax.export.DisabledSafetyCheck.custom_call(name) for name in targets]
    return jax.export.export(function, platforms=platforms, disabled_checks=(*disabled_checks, *own))
