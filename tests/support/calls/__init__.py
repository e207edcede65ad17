"""Good calls of the public names: what ``test_arguments`` ruins one argument at a time."""

from __future__ import annotations

from tests.support.calls import arrays, experts, layers, training
from tests.support.calls.call import Call

CALLS: dict[str, Call] = arrays.CALLS | experts.CALLS | layers.CALLS | training.CALLS
