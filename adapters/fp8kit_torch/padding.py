"""``Fp8Padding`` and ``Fp8Unpadding``: the rows of each GEMM of a ``GroupedLinear`` filled up with zeros to a
multiple, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8kit.errors import ShapeError
from fp8kit_torch.checks import CALLED, CONSTRUCTED, check

ALIGN = 16  # rows: what FP8 products want, for every recipe that there is


def padded_splits(m_splits: Sequence[int], align_size: int) -> list[int]:
    """Each number of rows, up to the next multiple of ``align_size``."""
    return [-(-rows // align_size) * align_size for rows in m_splits]


class _Splits(torch.nn.Module):
    """What both modules have: ``num_gemms`` groups of rows, each padded to a multiple of ``align_size``
    (None: 16)."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        check(type(self).__name__, CONSTRUCTED, locals())
        super().__init__()
        self.num_gemms = num_gemms
        self.align_size = ALIGN if align_size is None else align_size

    def _rows(
        self, inp: Tensor, m_splits: Sequence[int], padded: bool
    ) -> tuple[Tensor, list[int], list[int]]:
        """``inp`` as a matrix, ``m_splits`` as ints, and the same padded; ShapeError where the rows are not
        theirs."""
        name = type(self).__name__
        if not torch.compiler.is_compiling():
            check(name, CALLED, locals())
        if inp.ndim < 1:
            raise ShapeError(name, "inp", "no dimension", "(..., features)")
        splits = [int(rows) for rows in m_splits]
        if len(splits) != self.num_gemms or min(splits) < 0:
            raise ShapeError(name, "m_splits", splits, f"{self.num_gemms} numbers of rows")
        filled = padded_splits(splits, self.align_size)
        rows = inp.reshape(inp.shape[:-1].numel(), inp.size(-1))
        wanted = sum(filled if padded else splits)
        if rows.size(0) != wanted:
            raise ShapeError(name, "inp", tuple(inp.shape), f"{wanted} rows, the sum of m_splits")
        return rows, splits, filled


class Fp8Padding(_Splits):
    """Fill up the rows of each of ``num_gemms`` groups with zeros to a multiple of ``align_size`` (None: 16,
    what FP8 products want)."""

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, list[int]]:
        """(padded rows, padded numbers of rows). ``inp``: (..., features), groups of ``m_splits`` rows one
        after the other; ``inp`` itself where nothing is to be filled up. ShapeError where they do not fit."""
        rows, splits, filled = self._rows(inp, m_splits, False)
        if splits == filled:
            return inp, splits
        zeros = rows.new_zeros(self.align_size - 1, rows.size(1))
        parts = []
        for part, have, want in zip(rows.split(splits), splits, filled, strict=True):
            parts += [part, zeros[: want - have]]
        return torch.cat(parts), filled


class Fp8Unpadding(_Splits):
    """Take away the rows that ``Fp8Padding`` of the same arguments added."""

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> Tensor:
        """The rows of ``inp``, (padded rows, features), without the padding; ``m_splits``: the numbers of
        rows before padding. ShapeError where they do not fit."""
        rows, splits, filled = self._rows(inp, m_splits, True)
        if splits == filled:
            return inp
        return torch.cat([part[:have] for part, have in zip(rows.split(filled), splits, strict=True)])
