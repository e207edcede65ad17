"""Golden hashes: what every module gives under every recipe in every frontend, as one short hash an array.

A change that must not change results is checked with it: write the hashes before, compare after, on one
machine ::

    python -m tests.golden --write before.json            # at the old commit
    python -m tests.golden --compare before.json          # at the new one: prints what differs, exits 1

``cases`` holds the cases as data, ``wide`` further ones for ``--all``, ``values`` the numbers that they start
from; ``layers`` and the files ``run_*`` carry them out with public names alone, so that they run on both
commits. ``hashes_cpu.json`` holds those that are the same on every machine; ``test_golden`` compares with it.
``log`` makes a short text of what both sides wrote.
"""
