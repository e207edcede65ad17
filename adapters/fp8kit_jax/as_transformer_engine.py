"""``python -m fp8kit_jax.as_transformer_engine script.py args...`` (or ``-m module args...``): run a program
written for Transformer Engine's JAX package with this frontend under that name, unchanged."""

from __future__ import annotations

import sys

from fp8kit.aliases import program_runner
from fp8kit_jax.te_compat.names import as_transformer_engine

main = program_runner("fp8kit_jax.as_transformer_engine", as_transformer_engine)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
