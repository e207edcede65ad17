"""Further cases: every module under every recipe in every dtype, and by every program.

``python -m tests.golden --all`` runs them beside ``CASES``: once, where much of the code below the modules
has changed.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.golden.cases import CASES, DTYPES, FOUR, FP8, RECIPES, Case, each
from tests.golden.jax_modules import FLAX, JAX, JAX_FP8, NNX
from tests.golden.modules import ACTS, ATTENTION, GROUPED, LINEAR, MHA, MLP, NORM_LINEAR, OPS, TRANSFORMER

_PRODUCTS = (*LINEAR, *NORM_LINEAR, *MLP, *ACTS, *MHA, *TRANSFORMER)
_HALF = DTYPES[:2]
_CALLABLES = "delayed_callables"  # whose amaxes and scales come back to Python, which JAX does not take


def _shared(frontend: str, products: tuple[str, ...]) -> Iterator[Case]:
    """Modules of native code and of PyTorch."""
    yield from each(frontend, "steps", products, RECIPES, DTYPES)
    yield from each(frontend, "steps", ATTENTION, FOUR, DTYPES)
    for program in ("twice", "recompute", "microbatches", "evaluation", "loaded"):
        yield from each(frontend, program, products, FP8, _HALF)
    yield from each(frontend, "calibrating", products, ("delayed", "current"), _HALF)
    # recomputation takes its first argument by position: the query
    alone = [name for name in ATTENTION if "qkv" not in name]
    yield from each(frontend, "recompute", alone, ("none",), _HALF)


def _wide() -> Iterator[Case]:
    yield from _shared("native", _PRODUCTS)
    yield from _shared("torch", (*_PRODUCTS, *GROUPED))
    for program in ("main_grad", "quantized_init"):
        yield from each("torch", program, (*LINEAR, *NORM_LINEAR, *MLP, *MHA, *TRANSFORMER), FP8, _HALF)
    yield from each("torch", "ops", OPS, RECIPES, _HALF)
    recipes = [name for name in RECIPES if name != _CALLABLES]
    yield from each("jax", "steps", JAX_FP8, recipes, _HALF)
    yield from each("jax", "steps", [name for name in JAX if name not in JAX_FP8], FP8)
    yield from each("jax", "linen", FLAX, recipes, _HALF)
    yield from each("jax", "nnx", NNX, recipes, _HALF)


_KNOWN = {case.name for case in CASES}
WIDE = tuple({case.name: case for case in _wide() if case.name not in _KNOWN}.values())
