"""Good calls of the torch frontend's public names: what ``test_junk`` ruins one argument at a time."""

from __future__ import annotations

from tests.adapters.torch.calls import functions, modules, optimizers
from tests.adapters.torch.calls.call import Call

CALLS: dict[str, Call] = modules.CALLS | functions.CALLS | optimizers.CALLS
