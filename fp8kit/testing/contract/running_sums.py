"""Running sums (cu_seqlens and their like) for the samples of several families, good ones and bad.

The operations refuse bad values on the CPU; those on a GPU cannot look at them. What the results are then is
not said, but nothing outside the arrays may be read or written: a case with ``known`` False.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from fp8kit.formats import bfloat16, float32
from fp8kit.testing.contract import Options, typed

TOKENS, BATCH, LENGTH = 24, 3, 8  # that the sums below are good and bad for
FAR = 2**31 - 1
GOOD = (0, 5, 13, 20)
BAD = {
    "decreasing": (0, 13, 5, 20),
    "beyond": (0, 5, 13, 4000),
    "far": (0, 5, FAR, FAR),
    "behind-all": (4000, 4001, 4002, 4003),
    "late": (7, 12, 20, 27),
    "negative": (-9, 5, 13, 20),
    "far-back": (-FAR - 1, FAR, -FAR - 1, FAR),
    "nothing": (0, 0, 0, 0),
}


def running(lengths: Iterable[int]) -> tuple[int, ...]:
    """0 and the sums of the first lengths."""
    return (0, *(int(n) for n in np.cumsum(list(lengths))))


def bad_cases(
    options: Options, names: Mapping[str, tuple[str, ...]], known: bool | str = False
) -> dict[str, Options]:
    """A case for every bad value of each group of options, in a wide and a narrow dtype; the groups that are
    not bad hold good ones."""
    groups = {name: GOOD for group in names.values() for name in group}
    return typed(
        {
            f"bad-{group}-{kind}": {**options, **groups, **dict.fromkeys(bad, sums), "known": known}
            for group, bad in names.items()
            for kind, sums in BAD.items()
        },
        (float32, bfloat16),
    )


# options that hold the sums -> what is bad of them
LENGTHS_AND_STARTS = {"lengths": ("lengths",), "starts": ("starts",), "both": ("lengths", "starts")}
