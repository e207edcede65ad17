"""JAX keys as the random state of operations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8kit.arguments import shown
from fp8kit.errors import FormatError
from fp8kit_jax.arguments import is_key


def rng_words(key: Any, operation: str = "rng", argument: str = "key") -> Any:
    """Returns a JAX key as an operation's ``rng``: uint32 (4,), the words of int64 (seed, offset), low words
    first; a key of two words is a seed. So ``jnp.array([seed % 2**32, seed >> 32], jnp.uint32)`` draws what
    ``fp8kit.manual_seed(seed)`` draws first. FormatError, that names the ``argument`` of the ``operation``,
    unless it is one key."""
    typed = is_key(key)
    raw = isinstance(key, jax.Array | np.ndarray) and not typed and key.dtype.kind in "iu"
    if not (typed or raw) or key.shape not in (((),) if typed else ((2,), (4,))):
        raise FormatError(operation, argument, shown(key), "one JAX key")
    data = jax.random.key_data(key) if typed else jnp.asarray(key)
    flat = data.reshape(-1)[:4].astype(jnp.uint32)
    return jnp.concatenate([flat, jnp.zeros(4 - flat.shape[0], jnp.uint32)])


def dropout_seed(key: Any) -> np.ndarray[Any, Any]:
    """Returns what an operation draws with a JAX key: ``(seed, offset)``, int64 (2,) of NumPy, whatever JAX's
    configuration. Not within ``jit``.

    ``with fk.draw_from(lambda device: fk.tensor(dropout_seed(next(keys)), device=device)):`` drops in a
    native layer what JAX's functions drop with these keys. FormatError unless it is one key.
    """
    return np.asarray(rng_words(key, "dropout_seed")).view(np.int64)


def rng_inputs(key: Any, operation: str, argument: str = "key") -> dict[str, Any]:
    """Returns the input ``rng`` for a key, as JAX's configuration holds int64. Raises as ``rng_words``."""
    words = rng_words(key, operation, argument)
    if jax.config.jax_enable_x64:
        words = jax.lax.bitcast_convert_type(words.reshape(2, 2), jnp.int64)
    return {"rng": words}
