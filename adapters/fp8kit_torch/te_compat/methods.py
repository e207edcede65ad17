"""Methods of Transformer Engine's modules for which there is little to do here: accepted where that is right,
else refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from torch.nn import Module

from fp8kit_torch.checks import of_one
from fp8kit_torch.collectives import ranks_of

Kind = TypeVar("Kind")


def within(module: Module, kind: type[Kind]) -> Iterator[Kind]:
    """A module's own layers of a kind, those that another module wraps too (LoRA); not theirs."""
    for part in module.children():
        if isinstance(part, kind):
            yield part
        else:
            yield from within(part, kind)


class TransformerEngineMethods:
    """What programs call on layers by name."""

    def _validate_name(self) -> None:
        """Nothing: a layer without a name gets one where the debug features ask for it."""

    def set_tensor_parallel_group(self, tp_group: object) -> None:
        """Nothing, for None and for a process group of one. NotImplementedError for more processes (there is
        no tensor parallelism), ArgumentError for what is no group."""
        of_one(type(self).__name__, "tp_group", tp_group)

    def set_context_parallel_group(
        self,
        cp_group: object,
        cp_global_ranks: Sequence[int] | None = None,
        cp_stream: object = None,
        cp_comm_type: str = "p2p",
    ) -> None:
        """Nothing: rows of this layer do not meet, and it takes those of this process as they are.
        ArgumentError for what is no group."""
        for group in cp_group if isinstance(cp_group, list | tuple) else [cp_group]:
            ranks_of(type(self).__name__, "cp_group", group)

    def _within(self) -> list[TransformerEngineMethods]:
        return [*within(self, TransformerEngineMethods)] if isinstance(self, Module) else []

    def need_backward_dw(self) -> bool:
        """Whether weights' gradients wait for ``backward_dw`` in a part."""
        return any(part.need_backward_dw() for part in self._within())

    def backward_dw(self) -> None:
        """``backward_dw`` of all parts."""
        for part in self._within():
            part.backward_dw()
