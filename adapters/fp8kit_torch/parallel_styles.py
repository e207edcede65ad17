"""Plans for torch's ``parallelize_module`` over converted layers whose collectives move FP8 codes.

torch's own styles work over converted layers, too (``ColwiseParallel``, ``RowwiseParallel``,
``SequenceParallel``, ``PrepareModuleInput``), and gather in high precision. With these a sequence that is
sharded over ranks stays so until the product that reads it: x is cast with the amax of all ranks, and its
codes are gathered, as are those of the gradient of a sum of which each rank gets its rows.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import Placement
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

from fp8kit.errors import ArgumentError
from fp8kit_torch.converted import ConvertedLinear


def _linear(style: Any, module: nn.Module) -> None:
    if not isinstance(module, ConvertedLinear):
        wanted = "a linear layer that fp8kit_torch converted; fp8kit_torch.Linear takes tp_group itself"
        raise ArgumentError(type(style).__name__, "module", type(module).__name__, wanted)


def _kept(given: Any, desired: Any) -> Any:
    """The desired placement of an input: as it is given where it is sharded and was to be gathered."""
    sharded = isinstance(given, Placement) and given.is_shard()
    return given if sharded and isinstance(desired, Placement) and desired.is_replicate() else desired


class FP8ColwiseParallel(ColwiseParallel):
    """``ColwiseParallel``, with its arguments; an input with ``input_layouts=Shard(d)``, d a dimension but
    the last, is gathered as codes, in forward and again for wgrad. ArgumentError for other modules than
    converted linear layers."""

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output
        )
        self.desired_input_layouts = (_kept(*self.input_layouts, *self.desired_input_layouts),)

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        _linear(self, module)
        return super()._apply(module, device_mesh)


class FP8RowwiseParallel(RowwiseParallel):
    """``RowwiseParallel``, with its arguments; of an output with ``output_layouts=Shard(d)``, d a dimension
    but the last, the gradient is gathered as codes. ArgumentError for other modules than converted linear
    layers."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        _linear(self, module)
        made = super()._apply(module, device_mesh)
        made.row_output = self.output_layouts[0]
        return made


class PrepareFP8ModuleInput(PrepareModuleInput):
    """``PrepareModuleInput``, with its arguments, for a module whose linear layers are columns: inputs that
    are sharded and were to be gathered stay sharded DTensors, and each of the linear layers gathers the
    codes. Where several read the same input, one layer of all their columns gathers once."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        given, desired = self.input_layouts or (), self.desired_input_layouts or ()
        if self.desired_input_layouts is not None:
            self.desired_input_layouts = tuple(map(_kept, given, desired))
        wanted = self.desired_input_kwarg_layouts
        own = {
            name: _kept(self.input_kwarg_layouts.get(name), placement) for name, placement in wanted.items()
        }
        self.desired_input_kwarg_layouts = own
