"""How much the property tests do: FP8KIT_PROPERTIES=N draws N times as many examples, anew."""

from __future__ import annotations

import os

FACTOR = int(os.environ.get("FP8KIT_PROPERTIES", "0"))
