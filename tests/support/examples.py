"""The examples' files, and numbers in what they print."""

from __future__ import annotations

import re

from tests.support.source import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("[0-9][0-9]_*.py"))
HALF_STEP = 2.0**-4  # of E4M3: rounding to the nearest moves no normal value by more, relative to it


def numbers(pattern, text):
    return [float(found) for found in re.findall(pattern, text)]
