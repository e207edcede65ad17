"""``python -m fp8kit_torch.as_transformer_engine script.py args...`` (or ``-m module args...``): run a
program written for Transformer Engine with this frontend under that name, unchanged. So it is in the Python
processes that the program starts (workers of a DataLoader, say): PYTHONPATH gets ``te_compat/startup``, whose
``sitecustomize`` they run."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from fp8kit_torch.te_compat.names import as_transformer_engine


def main(arguments: list[str]) -> int:
    """Run the program; 2 with a word on the usage where none is named, or a file that is not there."""
    module = arguments[:1] == ["-m"]
    program = arguments[1:] if module else arguments
    usage = "usage: python -m fp8kit_torch.as_transformer_engine [-m module | script.py] args..."
    if arguments[:1] in (["-h"], ["--help"]):
        print(usage)
        return 0
    if not program or not (module or Path(program[0]).exists()):
        print(f"{program[0]}: no such file\n{usage}" if program else usage, file=sys.stderr)
        return 2
    as_transformer_engine()
    startup = str(Path(__file__).parent / "te_compat" / "startup")
    known = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    os.environ["PYTHONPATH"] = os.pathsep.join([startup, *(place for place in known if place != startup)])
    sys.argv = program
    if module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(program[0]).resolve().parent))
        runpy.run_path(program[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
