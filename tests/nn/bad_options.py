"""For tests/adapters: ``tests.support.bad_options``."""

from tests.support.bad_options import *  # noqa: F403
