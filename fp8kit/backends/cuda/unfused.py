"""Attention by matrix products and a softmax kernel: for float32, odd head sizes, and wherever cuDNN does not take the call.

The scores of a tile stand in the workspace: some rows of one query head of each of some key heads, of one batch; the tile is made small
enough for the workspace to stay bounded. Query heads that share a key head are taken one after the other, so that every product is
batched over key heads with one stride, and dk and dv are summed over them in a fixed order, in float32. Every result is the same bits each time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import cublaslt, launch
from fp8kit.backends.cuda.attention_problem import Problem, bhsd
from fp8kit.formats import DTYPES, float32

NAME = "unfused"
_LIMIT = 256 << 20  # bytes of scores and their like
_ALIGN = 256


class Layout(NamedTuple):
    """How a problem is cut up, and where things lie in the workspace, in bytes from its start.

    ``groups`` key heads and ``rows`` rows at most make a tile. ``scores`` and ``dweights`` (do v^T) are float32; ``weights`` and ``dscores`` have
    the problem's dtype and are the same memory where that is float32. ``dk``, ``dv``: float32 sums of ``groups`` heads, where more than one
    tile adds to a key head (``summed``). ``library``: cuBLASLt's own workspace.
    """

    groups: int
    rows: int
    summed: bool
    scores: int
    weights: int
    dweights: int
    dscores: int
    dk: int
    dv: int
    library: int
    total: int


@functools.cache
def layout(problem: Problem, backward: bool) -> Layout:
    """The layout of one direction."""
    itemsize = DTYPES[problem.dtype].itemsize
    narrow = 0 if problem.dtype == "float32" else itemsize
    row = problem.columns * (4 + narrow) * (2 if backward else 1)
    rows = min(problem.rows, max(1, _LIMIT // row))
    groups = min(problem.groups, max(1, _LIMIT // (row * rows)))
    summed = backward and (problem.heads > problem.groups or rows < problem.rows)
    elements, top = groups * rows * problem.columns, 0

    def place(nbytes: int) -> int:
        nonlocal top
        start, top = top, top + -(-nbytes // _ALIGN) * _ALIGN
        return start

    scores = place(4 * elements)
    weights = place(narrow * elements) if narrow else scores
    dweights = place(4 * elements) if backward else 0
    dscores = (place(narrow * elements) if narrow else dweights) if backward else 0
    sums = 4 * groups * problem.columns * problem.dim if summed else 0
    dk, dv, library = place(sums), place(sums), place(cublaslt.WORKSPACE)
    return Layout(groups, rows, summed, scores, weights, dweights, dscores, dk, dv, library, top)


def workspace(problem: Problem, backward: bool, deterministic: bool, device: int) -> int:
    """Bytes of workspace of a call."""
    return layout(problem, backward).total


class _Matrices(NamedTuple):
    """A batch of row-major matrices: address of the first, elements from row to row and from matrix to matrix."""

    ptr: int
    row: int
    step: int


class _Tile(NamedTuple):
    """Rows ``row`` ... of query heads ``head``, ``head + repeat``, ... (``groups`` of them) over key heads from ``group`` on."""

    batch: int
    group: int
    groups: int
    head: int
    row: int
    rows: int
    first: bool  # the first that adds to these key heads
    last: bool


def _tiles(problem: Problem, cut: Layout) -> Iterator[_Tile]:
    repeat = problem.heads // problem.groups
    for batch in range(problem.batch):
        for group in range(0, problem.groups, cut.groups):
            for turn in range(repeat):
                for row in range(0, problem.rows, cut.rows):
                    yield _Tile(
                        batch, group, min(cut.groups, problem.groups - group), group * repeat + turn, row, min(cut.rows, problem.rows - row),
                        turn == 0 and row == 0, turn == repeat - 1 and row + cut.rows >= problem.rows,
                    )
