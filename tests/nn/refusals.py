"""For tests/adapters: ``tests.support.refusals``."""

from tests.support.refusals import *  # noqa: F403
