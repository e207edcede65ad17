"""``CudaRNGStatesTracker``: named random states beside torch's own, for what differs between processes
(model-parallel dropout, say).

On a build or a machine without CUDA it tracks the CPU's generator in the same way. Names are Transformer
Engine's and Megatron's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from fp8kit.arguments import integer
from fp8kit.errors import ArgumentError


def get_rng_state() -> Tensor:
    """State of the generator that dropout draws from: the current CUDA device's where there is one, else the
    CPU's. uint8, on the CPU."""
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()


def set_rng_state(state: Tensor) -> None:
    """Give that generator a state that ``get_rng_state`` returned."""
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)


class CudaRNGStatesTracker:
    """Random states by name, each with its own seed; ``fork(name)`` draws from one and leaves torch's own as
    it was."""

    def __init__(self) -> None:
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forget every state."""
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, Tensor]:
        """A copy of the dict of states, for ``set_states``."""
        return dict(self.states_)

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Take over states that ``get_states`` gave."""
        right = isinstance(states, Mapping) and all(
            isinstance(s, Tensor) and s.dtype is torch.uint8 for s in states.values()
        )
        if not right:
            wanted = "a mapping of names to states, as get_states gave"
            raise ArgumentError("CudaRNGStatesTracker.set_states", "states", type(states).__name__, wanted)
        self.states_ = dict(states)

    @staticmethod
    def _named(method: str, name: object) -> None:
        if not isinstance(name, str):
            raise ArgumentError(f"CudaRNGStatesTracker.{method}", "name", type(name).__name__, "a word")

    def add(self, name: str, seed: int) -> None:
        """A new state by the name, started from ``seed``. Fp8kitError for a name or a seed that is taken."""
        seed = integer("CudaRNGStatesTracker.add", "seed", seed, -(2**63), 2**64 - 1)
        self._named("add", name)
        if seed in self.seeds_:
            raise ArgumentError("CudaRNGStatesTracker.add", "seed", seed, "one that no state has")
        if name in self.states_:
            raise ArgumentError("CudaRNGStatesTracker.add", "name", repr(name), "one that no state has")
        before = get_rng_state()
        if torch.cuda.is_available():
            torch.cuda.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)
        self.seeds_.add(seed)
        self.states_[name] = get_rng_state()
        set_rng_state(before)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw from the state ``name`` within; it goes on where it was left. Fp8kitError for an unknown
        name."""
        self._named("fork", name)
        if name not in self.states_:
            known = ", ".join(self.states_) or "none was added"
            raise ArgumentError(
                "CudaRNGStatesTracker.fork", "name", repr(name), f"a state that was added ({known})"
            )
        before = get_rng_state()
        set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = get_rng_state()
            set_rng_state(before)
