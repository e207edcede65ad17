"""What ``fully_shard`` gathers of a weight in MXFP8 or NVFP4: codes and scales of rows, those of one process.
The whole weight has no codes of columns: layers cast its values anew.

NVFP4's scale of a tensor is that of all rows: the amax of each weight is reduced after each change of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8kit.formats import E4M3
from fp8kit.quantization import Quantizer
from fp8kit_torch import torch_compat
from fp8kit_torch.collectives import TorchCollectives
from fp8kit_torch.quantized_tensor import SHARDED_BY
from fp8kit_torch.sharded_rows import Rows, ShardedWeight, read_here, say_values
from fp8kit_torch.state import stream_of
from fp8kit_torch.te_compat.block_tensors import Blocks, BlockTensor, MXFP8Tensor, NVFP4Tensor
from fp8kit_torch.views import as_view
from fp8kit_torch.weight_scales import amax_of

_ONE_SCALE = Quantizer(E4M3)
_PAD = 128  # rows of scales are padded to multiples
_KINDS = {kind.__name__: kind for kind in (MXFP8Tensor, NVFP4Tensor)}


class BlockRows(Rows):
    """A process's rows of one weight. ``fp8``: the class of the whole one, and how it is cast; ``codes``: the
    parts of the rows, None before the first cast."""

    fp8: tuple[type[BlockTensor], Blocks]

    def __init__(self, padded: Tensor, fp8: Any, former: tuple[Any, ...] = (None, None)) -> None:
        super().__init__(padded, fp8, former)
        self.codes: dict[str, Tensor] | None = None

    def gathered(self, mesh: Any, count: int) -> tuple[tuple[Tensor, ...], Any]:
        """Codes and scales; the tensor's, which all processes know, is not gathered."""
        _, how = self.fp8
        first, self.count = self.count != count, count
        own, processes = self.padded.shape[0], mesh.size()
        # torch divides scales as it does values
        if count != own * processes or (how.square and own % how.block):
            if first:
                blocks = f"blocks of {how.block if how.square else 1} x {how.block}"
                say_values(f"{count} rows of {processes} processes in {blocks}")
            return (self.padded,), ()
        if self.codes is None or self.changed:
            with torch.inference_mode(False), torch.no_grad():  # they outlive this call
                self.codes = self._cast(mesh)
            self.noted()
        sides = tuple(self.codes.values())
        # torch moves the first alone where there is one process
        moved = 1 if processes == 1 else 3 if how.row_scaled else 2
        return sides[:moved], sides[moved:]

    def _cast(self, mesh: Any) -> dict[str, Tensor]:
        """The parts of the rows, cast by the scale of the whole weight where it has one."""
        (kind, how), rows = self.fp8, self.padded
        if not (how.mx or how.row_scaled):
            amax = amax_of(rows, _ONE_SCALE)
            if mesh.size() > 1:
                view = as_view(amax)
                ranks = TorchCollectives.of(mesh.get_group())
                ranks.all_reduce(view, "max", stream_of(view.device), "amax of a sharded weight")
            largest = rows.new_zeros((how.block, rows.shape[1]))  # a block more, so that the scale is its
            largest[0, :1].copy_(amax)
            rows = torch.cat([rows, largest])
        return {name: part[: len(self.padded)] for name, part in kind.rows_cast(rows, how).items()}

    def parts_of(
        self, gathered: Sequence[Tensor], more: Any, held: dict[str, Tensor] | None
    ) -> dict[str, Tensor]:
        assert self.codes is not None
        count, sources = self.count, dict(zip(self.codes, (*gathered, *map(read_here, more)), strict=True))
        parts = held or {name: self._memory(name, source) for name, source in sources.items()}
        with torch.no_grad(), torch_compat.unseen_writes(tuple(parts.values())):
            for name, part in parts.items():
                if part.data_ptr() != (source := sources[name]).data_ptr():
                    part[count:] = 0
                    part[:count].copy_(source[:count])
        return parts

    def _memory(self, name: str, source: Tensor) -> Tensor:
        """For a part of the whole weight: the codes as they lie, and new memory."""
        if name == "rowwise_data":
            return source[: self.count]
        padded = name == "rowwise_scale_inv"
        rows = -(-self.count // _PAD) * _PAD if padded else min(self.count, source.shape[0])
        return source.new_empty((rows, *source.shape[1:]))

    def cast_whole(self, values: Tensor) -> Any:
        kind, how = self.fp8
        return kind.cast(values, how, columns=False)

    def made(self, parts: dict[str, Tensor], size: tuple[int, int], dtype: torch.dtype) -> Any:
        kind, how = self.fp8
        return kind._made(parts, how, size, dtype)

    def rebuilding(self) -> tuple[Any, Any]:
        kind, how = self.fp8
        return _parameter, (kind.__name__, tuple(how))


def _rows_of(values: Tensor, kind: type[BlockTensor], how: Blocks) -> Tensor:
    """``values`` h (rows, K) as a process's rows; as they are where each process would draw other bits."""
    return values if how.stochastic else ShardedWeight(values, BlockRows(values, (kind, how)))


def rows_of_coded(values: Tensor, quantizer: Any) -> Tensor:
    """``values`` h (rows, K) as a process's rows of a weight that a quantizer of MXFP8 or NVFP4 casts."""
    return _rows_of(values, quantizer.kind, quantizer.how())


def _parameter(values: Tensor, known: tuple[str, tuple[Any, ...]], requires_grad: bool) -> torch.nn.Parameter:
    """A whole weight on the meta device that was copied or loaded."""
    name, how = known
    return torch.nn.Parameter(_rows_of(values, _KINDS[name], Blocks(*how)), requires_grad)


SHARDED_BY[BlockTensor] = lambda values, held: _rows_of(values, type(held), held._how)
