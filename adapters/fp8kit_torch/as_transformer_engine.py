"""``python -m fp8kit_torch.as_transformer_engine script.py args...`` (or ``-m module args...``): run a
program written for Transformer Engine with this frontend under that name, unchanged. So it is in the Python
processes that the program starts (workers of a DataLoader, say): PYTHONPATH gets ``te_compat/startup``, whose
``sitecustomize`` they run."""

from __future__ import annotations

import sys
from pathlib import Path

from fp8kit.aliases import program_runner
from fp8kit_torch.te_compat.names import as_transformer_engine

_STARTUP = Path(__file__).parent / "te_compat" / "startup"
main = program_runner("fp8kit_torch.as_transformer_engine", as_transformer_engine, _STARTUP)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
