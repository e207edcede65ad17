"""Variables of Flax modules without a run of ``init``, which compiles every initialiser."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def filled(init: Any, *args: Any, **options: Any) -> Any:
    """The variables that ``init(*args, **options)`` would make, boxes among them: normal numbers over 4 as
    parameters; other collections, a cache or FP8 state, as they begin: zeros, and scales of 1."""
    random = np.random.default_rng(0)

    def fill(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path)
        if not name.startswith("['params']"):
            return np.full(leaf.shape, name.endswith("scale']"), leaf.dtype)
        return (random.standard_normal(leaf.shape) / 4).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, jax.eval_shape(lambda *own: init(*own, **options), *args))
