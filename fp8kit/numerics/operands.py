"""Which format and scale a tensor of a log has under a recipe: what a report draws into a histogram, and what
a statistic's limit follows from."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fp8kit.errors import Fp8kitError
from fp8kit.numerics.names import STATS
from fp8kit.numerics.run_folder import HostArray, Key, Series
from fp8kit.numerics.whatif import CAST, cast_of, quantization_of, recipe_names
from fp8kit.quantization import Quantizer


class Range(NamedTuple):
    """What a format holds at a scale: ``low`` and ``high``, log2 of the smallest and of the largest
    magnitude; ``scale``: where the scale is from: "logged", "amax" or "histogram"."""

    format: str
    low: float
    high: float
    scale: str


def quantizer_of(recipe: str | None, tensor: str, stat: str = "") -> Quantizer | None:
    """Returns how a recipe, by one of ``whatif.recipe_names``, casts a tensor of a log, in the orientation of
    ``stat``; None without a recipe, for one of another name, and for a tensor that it does not cast."""
    if recipe is None or recipe not in recipe_names() or tensor not in CAST:
        return None
    return _quantizer_of(recipe, tensor, stat)


@lru_cache(maxsize=1024)
def _quantizer_of(recipe: str, tensor: str, stat: str) -> Quantizer | None:
    try:
        quantization = quantization_of(recipe)
        return cast_of(stat, tensor, quantization, stat.endswith("_columnwise"), False)[0]
    except Fp8kitError:  # the recipe asks a function, or the GEMM is one in high precision
        return None


def prefixes(stat: str) -> tuple[str | None, str]:
    """Returns the recipe that a what-if statistic's name begins with, the longest that fits, None where there
    is none; and the rest, without the orientation."""
    stat = stat.removesuffix("_columnwise")
    names = [name for name in recipe_names() if stat.startswith(f"{name}_")]
    if not names or stat in STATS or "_block_size_" in stat:
        return None, stat
    name = max(names, key=len)
    return name, stat[len(name) + 1 :]


def range_of(
    recipe: str | None, what_if: bool, key: Key, step: int, counts: HostArray, log: dict[Key, Series]
) -> Range | None:
    """Returns the range of ``recipe``'s format for the tensor of ``key`` at ``step``; None where it does not
    cast it.

    The scale is the logged one: the least ``scale_inv`` for the low end, the largest for the high end.
    Without it that of current scaling: from the logged amax, or from the histogram's largest exponent,
    ``counts``, int64 (257,). ``what_if``: the run has another recipe, and only statistics with this recipe's
    name before theirs are of it.
    """
    quantizer = quantizer_of(recipe, key.tensor)
    if quantizer is None:
        return None
    format = quantizer.format
    for before in (f"{recipe}_",) if what_if else ("", f"{recipe}_"):
        least, largest = (_at(key, f"{before}scale_inv_{end}", step, log) for end in ("min", "max"))
        least, largest = least or largest, largest or least
        if least is not None:
            break
    how = "logged"
    if least is None or largest is None:
        if quantizer.static:
            least = largest = 1 / quantizer.static_scale
        else:
            amax, how = _at(key, "cur_amax", step, log), "amax"
            if amax is None:
                filled = np.nonzero(counts[:255])[0]
                if not filled.size:
                    return None
                amax, how = 2.0 ** (int(filled[-1]) - 126), "histogram"
            least = largest = amax / format.max
    low, high = (math.log2(least * format.smallest_subnormal), math.log2(largest * format.max))
    return Range(format.name, low, high, how)


def _at(key: Key, stat: str, step: int, log: dict[Key, Series]) -> float | None:
    """Returns the last positive value of another statistic of the same tensor up to ``step``, or its
    first."""
    found = log.get(key._replace(stat=stat))
    if found is None:
        return None
    at = max(0, int(np.searchsorted(found.steps, step, side="right")) - 1)
    value = float(found.values[at])
    return value if 0 < value < math.inf else None
