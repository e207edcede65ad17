"""``transformer_engine.jax.checkpoint_policies``: policies of ``jax.checkpoint`` that know fp8kit's calls."""

from __future__ import annotations

from typing import Any

import jax

from fp8kit_jax.primitive import call_p


def te_gemms_saveable(prim: Any, *_: Any, **params: Any) -> bool:
    """Whether it is a call of fp8kit with matrix products in it."""
    if prim is not call_p:
        return False
    program = params["program"]
    return bool(program.op.products(program.spec))


_both = jax.checkpoint_policies.save_from_both_policies
dots_and_te_gemms_with_no_batch_dims = _both(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable, te_gemms_saveable
)
checkpoint_dots_and_te_gemms = _both(jax.checkpoint_policies.dots_saveable, te_gemms_saveable)
