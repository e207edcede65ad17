"""How much the property tests do: FP8KIT_PROPERTIES=N draws N times as many examples, anew."""

from __future__ import annotations

import os

FACTOR = int(os.environ.get("FP8KIT_PROPERTIES", "0"))


def chosen(junk, place, step):
    """(label, value) of the junk for an argument by its place: the first, and one in ``step`` of the rest."""
    return [pair for i, pair in enumerate(junk.items()) if i == 0 or (i + place) % step == 0]
