"""The soak's verdict: what grows is found, what jumps is not."""

from __future__ import annotations

import random

from tests.campaign.soak import _BYTES, Figures, slope, verdict


def rows(growth=0, descriptors=0, threads=0):
    noise = random.Random(0)
    return [
        Figures(2**30 + growth * i + noise.randrange(2**18), 5 + descriptors * i, 30 + threads * i)
        for i in range(40)
    ]


def test_what_grows_in_every_round_is_found():
    assert verdict(rows()) == []
    assert verdict(rows(growth=2 * _BYTES)) == ["memory"]
    assert verdict(rows(descriptors=1)) == ["descriptors"]
    assert verdict(rows(threads=1)) == ["threads"]


def test_one_jump_is_no_slope():
    assert slope([7] * 30 + [5_000_000] * 4) == 0
    assert slope([3 * i for i in range(20)]) == 3
