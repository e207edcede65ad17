"""For tests/adapters: ``tests.support.peaks``."""

from tests.support.peaks import *  # noqa: F403
