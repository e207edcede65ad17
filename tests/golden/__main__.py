"""Write golden hashes, or compare with them: ``python -m tests.golden --help``."""

import os

# what ``make test`` sets: the bits of a product depend on its number of threads
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

if __name__ == "__main__":
    from tests.golden.command import main

    raise SystemExit(main())
