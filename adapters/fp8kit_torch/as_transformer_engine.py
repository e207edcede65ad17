"""``python -m fp8kit_torch.as_transformer_engine script.py args...`` (or ``-m module args...``): run a
program written for Transformer Engine with this frontend under that name, unchanged. So it is in the Python
processes that the program starts (workers of a DataLoader, say): PYTHONPATH gets ``te_compat/startup``, whose
``sitecustomize`` they run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fp8kit.aliases import run_program
from fp8kit_torch.te_compat.names import as_transformer_engine


def main(arguments: list[str]) -> int:
    """Run the program; 2 with a word on the usage where none is named, or a file that is not there."""
    return run_program("fp8kit_torch.as_transformer_engine", arguments, _prepare)


def _prepare() -> None:
    as_transformer_engine()
    startup = str(Path(__file__).parent / "te_compat" / "startup")
    known = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    os.environ["PYTHONPATH"] = os.pathsep.join([startup, *(place for place in known if place != startup)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
