"""Attention by matrix products and a softmax kernel: for float32, odd head sizes, and wherever cuDNN does not
take the call.

The scores of a tile stand in the workspace: some rows of one query head of each of some key heads, of one
batch; the tile is made small enough for the workspace to stay bounded. Query heads that share a key head are
taken one after the other, so that every product is batched over key heads with one stride, and dk and dv are
summed over them in a fixed order, in float32. The same input gives the same bits.

A product over all rows or columns multiplies padding by zeros, which leaves a NaN there a NaN: where padding
may hold anything, such a product reads a copy of its tile in which padding is 0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from fp8kit.arrays import ArrayView, Shape
from fp8kit.backends.cuda import attention_rules, cublaslt, launch, recorded
from fp8kit.backends.cuda.attention_padding import Padding
from fp8kit.backends.cuda.attention_problem import Problem, bhsd
from fp8kit.backends.protocol import AttentionExtras
from fp8kit.errors import BackendError
from fp8kit.formats import DTYPES, float32

NAME = "unfused"
_LIMIT = 256 << 20  # bytes of scores and their like
_ALIGN = 256
_CHUNKS = 64  # parts that the sum of a head's doffset is made of
_MOST_BLOCKS = 65_535  # of a grid's second and third dimension
_LAYOUTS = 1024  # kept; a training run with lengths of its own in every batch meets ever new ones


class Layout(NamedTuple):
    """How a problem is cut up, and where things lie in the workspace, in bytes from its start.

    ``groups`` key heads and ``rows`` rows at most make a tile. ``scores`` and ``dweights`` (do v^T) are
    float32; ``weights`` and ``dscores`` have the problem's dtype and are the same memory where that is
    float32. ``dk``, ``dv``: float32 sums of ``groups`` heads, where more than one tile adds to a key head
    (``summed``). ``dbias``: float32 sums of the whole bias; ``doffset``: parts of its sums. ``queries``,
    ``keys``, ``upstream``, ``values``: a tile's copies of q, k, do and v without padding, where they are
    needed. ``cublaslt``: the library's own workspace.
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
    dbias: int
    doffset: int
    queries: int
    keys: int
    upstream: int
    values: int
    cublaslt: int
    total: int


@functools.lru_cache(_LAYOUTS)
def layout(problem: Problem, backward: bool, dbias: Shape | None = None) -> Layout:
    """The layout of one direction; ``dbias``: the bias's shape where backward makes its gradient."""
    itemsize = DTYPES[problem.dtype].itemsize
    narrow = 0 if problem.dtype == "float32" else itemsize
    row = problem.columns * (4 + narrow) * (2 if backward else 1)
    rows = min(problem.rows, max(1, _LIMIT // row))
    groups = min(problem.groups, _MOST_BLOCKS, max(1, _LIMIT // (row * rows)))
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
    sums = 4 * groups * problem.columns if summed else 0
    dk, dv = place(sums * problem.dim), place(sums * problem.dim_v)
    bias = place(0 if dbias is None else 4 * math.prod(dbias))
    offset = place(4 * problem.heads * _CHUNKS if backward and problem.softmax_type == "learnable" else 0)
    head = groups * itemsize if problem.cleaned else 0
    # backward multiplies padding in v into scores only
    values = place(0 if backward else head * problem.columns * problem.dim_v)
    head *= backward
    queries, keys, upstream = (
        place(head * size)
        for size in (rows * problem.dim, problem.columns * problem.dim, rows * problem.dim_v)
    )
    workspace = place(cublaslt.WORKSPACE)
    return Layout(
        groups,
        rows,
        summed,
        scores,
        weights,
        dweights,
        dscores,
        dk,
        dv,
        bias,
        offset,
        queries,
        keys,
        upstream,
        values,
        workspace,
        top,
    )


def workspace(problem: Problem, backward: bool, dbias: Shape | None = None) -> int:
    """Bytes of workspace of a call."""
    return layout(problem, backward, dbias).total


class _Matrices(NamedTuple):
    """A batch of row-major matrices: address of the first, elements from row to row and from matrix to
    matrix."""

    ptr: int
    row: int
    step: int


class _Tile(NamedTuple):
    """Rows ``row`` ... of query heads ``head``, ``head + repeat``, ... (``groups`` of them) over key heads
    from ``group`` on."""

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
                        batch,
                        group,
                        min(cut.groups, problem.groups - group),
                        group * repeat + turn,
                        row,
                        rows,
                        turn == 0 and row == 0,
                        turn == repeat - 1 and row + rows == problem.rows,
                    )


def forward(
    problem: Problem,
    q: ArrayView,
    k: ArrayView,
    v: ArrayView,
    o: ArrayView,
    lse: ArrayView,
    extras: AttentionExtras,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """``protocol.attention_fwd``."""
    call = _Call(problem, layout(problem, False), q.device.index, extras, workspace, stream)
    cut = call.cut
    for tile in _tiles(problem, cut):
        weights = call.scores(cut.weights, tile)
        call.product(
            "nt",
            call.queries(q, tile),
            call.keys(k, tile),
            call.scores(cut.scores, tile),
            tile,
            problem.dim,
            narrow=False,
        )
        call.launch("attention_softmax", tile, (call.base + cut.scores, weights.ptr, lse.ptr))
        values = call.clean_keys(call.keys(v, tile), cut.values, tile, problem.dim_v)
        call.product("nn", weights, values, call.queries(o, tile), tile, problem.dim_v)


def backward(
    problem: Problem,
    d_o: ArrayView,
    q: ArrayView,
    k: ArrayView,
    v: ArrayView,
    o: ArrayView,
    lse: ArrayView,
    dq: ArrayView,
    dk: ArrayView,
    dv: ArrayView,
    dbias: ArrayView | None,
    doffset: ArrayView | None,
    extras: AttentionExtras,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """``protocol.attention_bwd``."""
    cut = layout(problem, True, None if dbias is None else dbias.shape)
    call = _Call(problem, cut, q.device.index, extras, workspace, stream)
    strides = (*bhsd(problem.qkv_format, o)[:3], *bhsd(problem.qkv_format, d_o)[:3])
    if dbias is not None:
        with launch.current_device(call.device):
            clear = functools.partial(launch.runtime().memsetAsync, call.base + cut.dbias, 0, 4 * dbias.size)
            recorded.put(call.device, stream, "memset", clear)
    for tile in _tiles(problem, cut):
        rows, keys = call.queries(q, tile), call.keys(k, tile)
        upstream = call.queries(d_o, tile)
        weights, dscores = call.scores(cut.weights, tile), call.scores(cut.dscores, tile)
        call.product("nt", rows, keys, call.scores(cut.scores, tile), tile, problem.dim, narrow=False)
        call.product(
            "nt",
            upstream,
            call.keys(v, tile),
            call.scores(cut.dweights, tile),
            tile,
            problem.dim_v,
            narrow=False,
        )
        wide = 0 if dbias is None else call.base + cut.dweights
        pointers = (
            call.base + cut.scores,
            call.base + cut.dweights,
            weights.ptr,
            dscores.ptr,
            wide,
            lse.ptr,
            o.ptr,
            d_o.ptr,
        )
        call.launch("attention_softmax_bwd", tile, (*pointers, *strides, problem.dim_v))
        if dbias is not None:
            call.add_bias_gradient(dbias.shape, tile)
        keys = call.clean_keys(keys, cut.keys, tile, problem.dim)
        rows = call.clean_queries(rows, cut.queries, tile, problem.dim)
        upstream = call.clean_queries(upstream, cut.upstream, tile, problem.dim_v)
        call.product("nn", dscores, keys, call.queries(dq, tile), tile, problem.dim)
        for left, right, gradient, sums, dim in (
            (weights, upstream, dv, cut.dv, problem.dim_v),
            (dscores, rows, dk, cut.dk, problem.dim),
        ):
            if not cut.summed:
                call.product("tn", left, right, call.keys(gradient, tile), tile, dim)
                continue
            call.product(
                "tn", left, right, call.sums(sums, dim), tile, dim, narrow=False, accumulate=not tile.first
            )
            if tile.last:
                to = call.keys(gradient, tile)
                call.store(sums, to.ptr, (tile.groups, problem.columns, dim), (to.step, to.row))
    if dbias is not None:
        call.store(cut.dbias, dbias.ptr, (1, 1, dbias.size), (0, 0))
    if doffset is not None and extras.softmax_offset is not None:
        kernel = launch.kernel("attention.cu", "attention_doffset_partial", call.device, T=call.type)
        partial = call.base + cut.doffset
        args = (
            extras.softmax_offset.ptr,
            lse.ptr,
            o.ptr,
            d_o.ptr,
            partial,
            *strides,
            problem.dim_v,
            problem.batch,
            problem.rows,
        )
        launch.launch(kernel, (problem.heads, _CHUNKS), 256, args, stream)
        kernel = launch.kernel("attention.cu", "attention_doffset", call.device, T=call.type)
        launch.launch(kernel, problem.heads, 32, (partial, doffset.ptr, _CHUNKS), stream)


class _Call:
    """What is the same for every tile of one call."""

    def __init__(
        self,
        problem: Problem,
        cut: Layout,
        device: int,
        extras: AttentionExtras,
        workspace: ArrayView | None,
        stream: int,
    ) -> None:
        self.problem = problem
        self.cut = cut
        if workspace is None or workspace.nbytes < cut.total:
            got = None if workspace is None else f"{workspace.nbytes} bytes"
            raise BackendError("attention", "workspace", got, f"{cut.total} bytes")
        self.base = workspace.ptr
        self.dtype = DTYPES[problem.dtype]
        self.type = launch.type_name(self.dtype)
        self.device = device
        self.stream = stream
        self.repeat = problem.heads // problem.groups
        self.threads = min(256, max(32, -(-problem.columns // 128) * 32))  # four scores a thread, whole warps
        self.padding = Padding(problem, device, extras, stream)
        self.rules = self.padding.rules

    def queries(self, view: ArrayView, tile: _Tile) -> _Matrices:
        """The tile's rows in q, o or their gradients."""
        batch, head, row, _ = bhsd(self.problem.qkv_format, view)
        start = tile.batch * batch + tile.head * head + tile.row * row
        return _Matrices(view.ptr + start * self.dtype.itemsize, row, self.repeat * head)

    def keys(self, view: ArrayView, tile: _Tile) -> _Matrices:
        """The tile's key heads in k, v or their gradients."""
        batch, head, row, _ = bhsd(self.problem.qkv_format, view)
        return _Matrices(view.ptr + (tile.batch * batch + tile.group * head) * self.dtype.itemsize, row, head)

    def clean_queries(self, matrices: _Matrices, offset: int, tile: _Tile, dim: int) -> _Matrices:
        """The tile's rows of q or do with 0 in padding: themselves where that is known, else a copy in the
        workspace."""
        return self._clean(matrices, offset, tile, True, tile.rows, dim) if self.problem.cleaned else matrices

    def clean_keys(self, matrices: _Matrices, offset: int, tile: _Tile, dim: int) -> _Matrices:
        """The same for the tile's key heads of k or v, copied once for all tiles over them."""
        return (
            self._clean(matrices, offset, tile, False, self.problem.columns, dim)
            if self.problem.cleaned
            else matrices
        )

    def _clean(
        self, matrices: _Matrices, offset: int, tile: _Tile, query: bool, rows: int, dim: int
    ) -> _Matrices:
        copy = _Matrices(self.base + offset, dim, rows * dim)
        if query or tile.first:
            strides, to = (0, matrices.step, matrices.row, 1), (0, copy.step, copy.row, 1)
            size = (1, tile.groups, rows, dim)
            self.padding.clean(
                matrices.ptr, strides, copy.ptr, to, query, size, tile.batch, tile.row if query else 0
            )
        return copy

    def scores(self, offset: int, tile: _Tile) -> _Matrices:
        """One of the tile's score-like arrays."""
        return _Matrices(self.base + offset, self.problem.columns, tile.rows * self.problem.columns)

    def sums(self, offset: int, dim: int) -> _Matrices:
        """The float32 sums of dk or dv."""
        return _Matrices(self.base + offset, dim, self.problem.columns * dim)

    def product(
        self,
        form: Literal["nt", "nn", "tn"],
        a: _Matrices,
        b: _Matrices,
        out: _Matrices,
        tile: _Tile,
        dim: int,
        narrow: bool = True,
        accumulate: bool = False,
    ) -> None:
        """out = op(a) op(b), batched over the tile's key heads: "nt" gives scores (rows x columns) from
        ``dim`` features, "nn" rows x dim, "tn" columns x dim. ``narrow``: out has the problem's dtype, else
        float32."""
        columns, itemsize = self.problem.columns, self.dtype.itemsize
        out_type = self.dtype if narrow else float32
        m, n, k = {
            "nt": (tile.rows, columns, dim),
            "nn": (tile.rows, dim, columns),
            "tn": (columns, dim, tile.rows),
        }[form]
        places = a.ptr | b.ptr | out.ptr | itemsize * (a.step | b.step) | out_type.itemsize * out.step
        key = cublaslt.MatmulKey(
            m,
            n,
            k,
            form,
            self.dtype,
            self.dtype,
            out_type,
            a.row,
            b.row,
            out.row,
            tile.groups,
            a.step,
            b.step,
            out.step,
            accumulate=accumulate,
            alignment=16 if places % 16 == 0 else itemsize,
        )
        plan = cublaslt.plan(key, self.device)
        plan.run(
            a.ptr, b.ptr, out.ptr, 0, 0, 0, self.base + self.cut.cublaslt, cublaslt.WORKSPACE, self.stream
        )

    def launch(self, function: str, tile: _Tile, args: tuple[int, ...]) -> None:
        """A score kernel on a tile, one block a row."""
        kernel = launch.kernel("attention.cu", function, self.device, T=self.type)
        place = (tile.batch, tile.head, self.repeat, tile.row)
        launch.launch(
            kernel, (tile.rows, tile.groups), self.threads, (*args, *place, self.rules), self.stream
        )

    def add_bias_gradient(self, shape: Shape, tile: _Tile) -> None:
        """The tile's unrounded dscores added into the sums of the bias's gradient."""
        batch, head, row = attention_rules.over_scores(shape)
        columns = self.problem.columns
        grid = (-(-columns // 256), min(tile.rows, _MOST_BLOCKS) if row else 1, tile.groups if head else 1)
        factor = self.problem.bias_factor / self.problem.scale  # the dscores are scaled
        place = (tile.batch, tile.head, self.repeat, tile.row, tile.groups, tile.rows, columns)
        kernel = launch.kernel("attention.cu", "attention_dbias", self.device, T=self.type)
        args = (self.base + self.cut.dweights, self.base + self.cut.dbias, batch, head, row, factor, *place)
        launch.launch(kernel, grid, 256, args, self.stream)

    def store(self, offset: int, to: int, shape: tuple[int, int, int], strides: tuple[int, int]) -> None:
        """Float32 (heads, rows, features) sums rounded to address ``to``; ``strides``: from head to head and
        row to row there."""
        kernel = launch.kernel("attention.cu", "attention_store", self.device, T=self.type)
        launch.launch(
            kernel, -(-math.prod(shape) // 256), 256, (self.base + offset, to, *shape, *strides), self.stream
        )
