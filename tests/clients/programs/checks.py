"""What the programs of this folder end with: each runs its functions called ``check_*`` and says how they
fared. A program is a process of its own, because clients change a process for good."""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections.abc import Mapping
from typing import Any


def main(names: Mapping[str, Any]) -> None:
    """Print, as the last line, a JSON object: the name of each check of a module's ``globals()`` -> "", or
    the traceback. Arguments of the command line name those to run."""
    warnings.simplefilter("ignore")  # clients warn of themselves and of each other
    found = {}
    for name, check in names.items():
        if name.startswith("check_") and (not sys.argv[1:] or name in sys.argv[1:]):
            try:
                check()
                found[name] = ""
            except BaseException:
                found[name] = traceback.format_exc()
    print("\n" + json.dumps(found), flush=True)
