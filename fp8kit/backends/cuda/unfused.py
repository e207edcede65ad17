"""Attention by matrix products and a softmax kernel: for float32, odd head sizes, and wherever cuDNN does not take the call.

The scores of a tile stand in the workspace: some rows of one query head of each of some key heads, of one batch; the tile is made small
enough for the workspace to stay bounded. Query heads that share a key head are taken one after the other, so that every product is
batched over key heads with one stride, and dk and dv are summed over them in a fixed order, in float32. The same input gives the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Literal, NamedTuple

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import cublaslt, launch
from fp8kit.backends.cuda.attention_problem import Problem, bhsd
from fp8kit.errors import BackendError, expected
from fp8kit.formats import DTYPES, float32

NAME = "unfused"
_LIMIT = 256 << 20  # bytes of scores and their like
_ALIGN = 256


class Layout(NamedTuple):
    """How a problem is cut up, and where things lie in the workspace, in bytes from its start.

    ``groups`` key heads and ``rows`` rows at most make a tile. ``scores`` and ``dweights`` (do v^T) are float32; ``weights`` and
    ``dscores`` have the problem's dtype and are the same memory where that is float32. ``dk``, ``dv``: float32 sums of ``groups`` heads,
    where more than one tile adds to a key head (``summed``). ``library``: cuBLASLt's own workspace.
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
                    rows = min(cut.rows, problem.rows - row)
                    yield _Tile(
                        batch, group, min(cut.groups, problem.groups - group), group * repeat + turn, row, rows,
                        turn == 0 and row == 0, turn == repeat - 1 and row + rows == problem.rows,
                    )


def forward(problem: Problem, q: ArrayView, k: ArrayView, v: ArrayView, o: ArrayView, lse: ArrayView, cu_q: ArrayView | None,
            cu_kv: ArrayView | None, rng: ArrayView | None, workspace: ArrayView | None, stream: int) -> None:
    """``protocol.attention_fwd``."""
    call = _Call(problem, False, q.device.index, cu_q, cu_kv, rng, workspace, stream)
    cut = call.cut
    for tile in _tiles(problem, cut):
        weights = call.scores(cut.weights, tile)
        call.product("nt", call.queries(q, tile), call.keys(k, tile), call.scores(cut.scores, tile), tile, narrow=False)
        call.launch("attention_softmax", tile, (call.base + cut.scores, weights.ptr, lse.ptr))
        call.product("nn", weights, call.keys(v, tile), call.queries(o, tile), tile)


def backward(problem: Problem, d_o: ArrayView, q: ArrayView, k: ArrayView, v: ArrayView, o: ArrayView, lse: ArrayView, dq: ArrayView,
             dk: ArrayView, dv: ArrayView, cu_q: ArrayView | None, cu_kv: ArrayView | None, rng: ArrayView | None, deterministic: bool,
             workspace: ArrayView | None, stream: int) -> None:
    """``protocol.attention_bwd``."""
    call = _Call(problem, True, q.device.index, cu_q, cu_kv, rng, workspace, stream)
    cut = call.cut
    strides = (*bhsd(problem.qkv_format, o)[:3], *bhsd(problem.qkv_format, d_o)[:3])
    for tile in _tiles(problem, cut):
        rows, keys = call.queries(q, tile), call.keys(k, tile)
        upstream = call.queries(d_o, tile)
        weights, dscores = call.scores(cut.weights, tile), call.scores(cut.dscores, tile)
        call.product("nt", rows, keys, call.scores(cut.scores, tile), tile, narrow=False)
        call.product("nt", upstream, call.keys(v, tile), call.scores(cut.dweights, tile), tile, narrow=False)
        pointers = (call.base + cut.scores, call.base + cut.dweights, weights.ptr, dscores.ptr, lse.ptr, o.ptr, d_o.ptr)
        call.launch("attention_softmax_bwd", tile, (*pointers, *strides, problem.dim))
        call.product("nn", dscores, keys, call.queries(dq, tile), tile)
        for left, right, gradient, sums in ((weights, upstream, dv, cut.dv), (dscores, rows, dk, cut.dk)):
            if not cut.summed:
                call.product("tn", left, right, call.keys(gradient, tile), tile)
                continue
            call.product("tn", left, right, call.sums(sums), tile, narrow=False, accumulate=not tile.first)
            if tile.last:
                call.store(sums, gradient, tile)


class _Call:
    """What is the same for every tile of one call."""

    def __init__(self, problem: Problem, backward: bool, device: int, cu_q: ArrayView | None, cu_kv: ArrayView | None,
                 rng: ArrayView | None, workspace: ArrayView | None, stream: int) -> None:
        self.problem = problem
        self.cut = layout(problem, backward)
        if workspace is None or workspace.nbytes < self.cut.total:
            got = None if workspace is None else f"{workspace.nbytes} bytes"
            raise BackendError(expected("attention", "workspace", got, f"{self.cut.total} bytes"))
        self.base = workspace.ptr
        self.dtype = DTYPES[problem.dtype]
        self.type = launch.type_name(self.dtype)
        self.device = device
        self.stream = stream
        self.repeat = problem.heads // problem.groups
        self.threads = min(256, max(32, -(-problem.columns // 128) * 32))  # four scores a thread, whole warps
        self.rules = (
            0 if cu_q is None else cu_q.ptr, 0 if cu_kv is None else cu_kv.ptr, 0 if rng is None else rng.ptr,
            int(problem.dropout * 2**32), 1 / (1 - problem.dropout), float(problem.scale), int(problem.causal),
        )

    def queries(self, view: ArrayView, tile: _Tile) -> _Matrices:
        """The tile's rows in q, o or their gradients."""
        batch, head, row, _ = bhsd(self.problem.qkv_format, view)
        start = tile.batch * batch + tile.head * head + tile.row * row
        return _Matrices(view.ptr + start * self.dtype.itemsize, row, self.repeat * head)

    def keys(self, view: ArrayView, tile: _Tile) -> _Matrices:
        """The tile's key heads in k, v or their gradients."""
        batch, head, row, _ = bhsd(self.problem.qkv_format, view)
        return _Matrices(view.ptr + (tile.batch * batch + tile.group * head) * self.dtype.itemsize, row, head)

    def scores(self, offset: int, tile: _Tile) -> _Matrices:
        """One of the tile's score-like arrays."""
        return _Matrices(self.base + offset, self.problem.columns, tile.rows * self.problem.columns)

    def sums(self, offset: int) -> _Matrices:
        """The float32 sums of dk or dv."""
        return _Matrices(self.base + offset, self.problem.dim, self.problem.columns * self.problem.dim)

    def product(self, form: Literal["nt", "nn", "tn"], a: _Matrices, b: _Matrices, out: _Matrices, tile: _Tile, narrow: bool = True,
                accumulate: bool = False) -> None:
        """out = op(a) op(b), batched over the tile's key heads: "nt" gives scores (rows x columns), "nn" rows x features, "tn" columns x
        features. ``narrow``: out has the problem's dtype, else float32."""
        problem, itemsize = self.problem, self.dtype.itemsize
        out_type = self.dtype if narrow else float32
        m, n, k = {
            "nt": (tile.rows, problem.columns, problem.dim), "nn": (tile.rows, problem.dim, problem.columns),
            "tn": (problem.columns, problem.dim, tile.rows),
        }[form]
        places = a.ptr | b.ptr | out.ptr | itemsize * (a.step | b.step) | out_type.itemsize * out.step
        key = cublaslt.MatmulKey(
            m, n, k, form, self.dtype, self.dtype, out_type, a.row, b.row, out.row, tile.groups, a.step, b.step, out.step,
            accumulate=accumulate, alignment=16 if places % 16 == 0 else itemsize,
        )
        plan = cublaslt.plan(key, self.device)
        plan.run(a.ptr, b.ptr, out.ptr, 0, 0, 0, self.base + self.cut.library, cublaslt.WORKSPACE, self.stream)

    def launch(self, function: str, tile: _Tile, pointers: tuple[int, ...]) -> None:
        """A score kernel on a tile, one block a row."""
        place = (tile.batch, self.problem.heads, tile.head, self.repeat, tile.row, self.problem.rows, self.problem.columns)
        kernel = launch.kernel("attention.cu", function, self.device, T=self.type)
        launch.launch(kernel, (tile.rows, tile.groups), self.threads, (*pointers, *self.rules, *place), self.stream)

    def store(self, offset: int, gradient: ArrayView, tile: _Tile) -> None:
        """The float32 sums rounded into dk or dv."""
        to, problem = self.keys(gradient, tile), self.problem
        elements = tile.groups * problem.columns * problem.dim
        kernel = launch.kernel("attention.cu", "attention_store", self.device, T=self.type)
        args = (self.base + offset, to.ptr, tile.groups, problem.columns, problem.dim, to.step, to.row)
        launch.launch(kernel, -(-elements // 256), 256, args, self.stream)
