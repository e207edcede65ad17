"""``python -m fp8kit_jax.as_transformer_engine script.py args...`` (or ``-m module args...``): run a program
written for Transformer Engine's JAX package with this frontend under that name, unchanged."""

from __future__ import annotations

import sys

from fp8kit.aliases import run_program
from fp8kit_jax.te_compat.names import as_transformer_engine


def main(arguments: list[str]) -> int:
    """Run the program; 2 with a word on the usage where none is named, or a file that is not there."""
    return run_program("fp8kit_jax.as_transformer_engine", arguments, as_transformer_engine)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
