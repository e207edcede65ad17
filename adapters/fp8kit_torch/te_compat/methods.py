"""Methods of Transformer Engine's modules for which there is nothing to do here: accepted where that is
right, else refused by name."""

from __future__ import annotations

from collections.abc import Sequence

from fp8kit_torch.checks import of_one


class TransformerEngineMethods:
    """What programs call on layers by name."""

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
        """Nothing, for None and for process groups of one (also several). NotImplementedError for more
        processes (there is no context parallelism), ArgumentError for what is no group."""
        for group in cp_group if isinstance(cp_group, list | tuple) else [cp_group]:
            of_one(type(self).__name__, "cp_group", group)

    def need_backward_dw(self) -> bool:
        """False: backward never leaves a weight's gradient for later (``delay_wgrad_compute`` is False)."""
        return False

    def backward_dw(self) -> None:
        """Nothing: all gradients are there when backward has ended."""
