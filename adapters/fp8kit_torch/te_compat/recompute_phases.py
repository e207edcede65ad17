"""``activation_recompute_forward``: for programs that recompute a module by themselves, as Megatron's
``CheckpointWithoutOutput`` does: once without gradients, and once more before its backward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager, ContextDecorator
from typing import Any

from fp8kit.arguments import flag
from fp8kit_torch import recompute


class activation_recompute_forward(ContextDecorator):
    """Context manager and decorator around a pass of a program's own recomputation.

    * ``activation_recompute``: False changes nothing.
    * ``recompute_phase``: False around the first pass, in which layers record amaxes although gradients are
      disabled, and keep their scales and cached weights; True around the later one, which takes each layer's
      in the order of its calls, and records no amaxes. AutogradError where a layer has none left. Leave no
      recompute pass out, or the next takes what was kept for it: ``FP8GlobalStateManager.reset`` drops that.

    ``checkpoint``, torch's and ours, needs none of this. Source: Transformer Engine.
    """

    def __init__(self, activation_recompute: bool = False, recompute_phase: bool = False) -> None:
        op = "activation_recompute_forward"
        self.activation_recompute = flag(op, "activation_recompute", activation_recompute)
        self.recompute_phase = flag(op, "recompute_phase", recompute_phase)
        self._open: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> activation_recompute_forward:
        if self.activation_recompute:
            within = recompute.phase(not self.recompute_phase)
            within.__enter__()
            self._open.append(within)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._open:
            self._open.pop().__exit__(*error)


def get_activation_recompute_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of a first and of a recompute pass, for ``torch.utils.checkpoint.checkpoint(...,
    use_reentrant=False, context_fn=get_activation_recompute_contexts)``."""
    return recompute.checkpoint_contexts()
