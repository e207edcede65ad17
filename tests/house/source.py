"""For tests/adapters: ``tests.support.source``."""

from tests.support.source import *  # noqa: F403
