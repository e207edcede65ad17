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

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from fp8kit.arrays import ArrayView, Shape
from fp8kit.backends.cuda import attention_rules, cublaslt, launch, recorded
from fp8kit.backends.cuda._rows import ceil_div, whole_warps
from fp8kit.backends.cuda.attention_padding import Padding
from fp8kit.backends.cuda.attention_problem import Problem, arranged, bhsd
from fp8kit.backends.protocol import AttentionExtras
from fp8kit.errors import BackendError
from fp8kit.formats import DTYPES, DType, float32
from fp8kit.lru import memoized

NAME = "unfused"
_SCORES = ("scores", "dweights", "weights", "dscores")  # score-like arrays; the first two are float32
_LIMIT = 256 << 20  # bytes of scores and their like
_CHUNKS = 64  # parts that the sum of a head's doffset is made of
_MOST_BLOCKS = 65_535  # of a grid's second and third dimension


class Layout(NamedTuple):
    """How a problem is cut up, and where things lie in the workspace, in bytes from its start.

    ``groups`` key heads and ``rows`` rows at most make a tile. ``summed``: more than one tile adds to a key
    head. ``places``, of what there is: "scores" and "dweights" (do v^T) are float32; "weights" and "dscores"
    have the problem's dtype and are the same memory where that is float32, but for "dscores" with the
    gradient of a bias that is not capped. "dk", "dv": float32 sums of ``groups`` heads, where they are
    ``summed``. "dbias": float32 sums of the whole bias; "doffset": parts of its sums. "queries", "keys",
    "upstream", "values": a tile's copies of q, k, do and v without padding, where they are needed.
    "cublaslt": the library's own workspace; "end": bytes in all.
    """

    groups: int
    rows: int
    summed: bool
    places: dict[str, int]


@memoized("unfused attention: workspaces")
def layout(problem: Problem, backward: bool, dbias: Shape | None = None) -> Layout:
    """Returns the layout of one direction; ``dbias``: the bias's shape where backward makes its gradient."""
    itemsize = DTYPES[problem.dtype].itemsize
    narrow = 0 if problem.dtype == "float32" else itemsize
    # the bias's gradient is that of capped scores, dq's and dk's not
    apart = 4 if dbias is not None and not narrow and problem.softcap and not problem.bias_capped else 0
    row = problem.columns * ((4 + narrow) * (2 if backward else 1) + apart)
    rows = min(problem.rows, max(1, _LIMIT // row))
    groups = min(problem.groups, _MOST_BLOCKS, max(1, _LIMIT // (row * rows)))
    summed = backward and (problem.heads > problem.groups or rows < problem.rows)
    elements, keys, head = groups * rows * problem.columns, groups * problem.columns, groups * itemsize

    sizes = {"scores": 4 * elements, "weights": narrow * elements}
    if backward:
        sizes |= {"dweights": 4 * elements, "dscores": (narrow or apart) * elements}
    if summed:
        sizes |= {"dk": 4 * keys * problem.dim, "dv": 4 * keys * problem.dim_v}
    if dbias is not None:
        sizes["dbias"] = 4 * math.prod(dbias)
    if backward and problem.softmax_type == "learnable":
        sizes["doffset"] = offset_workspace(problem)
    if problem.cleaned and backward:  # which multiplies padding in v into scores only
        sizes |= {"queries": head * rows * problem.dim, "keys": itemsize * keys * problem.dim}
        sizes["upstream"] = head * rows * problem.dim_v
    elif problem.cleaned:
        sizes["values"] = itemsize * keys * problem.dim_v
    places = arranged(sizes | {"cublaslt": cublaslt.WORKSPACE})
    if not narrow:
        places |= {"weights": places["scores"]} | ({} if apart else {"dscores": places.get("dweights", 0)})
    return Layout(groups, rows, summed, places)


def workspace(problem: Problem, backward: bool, dbias: Shape | None = None) -> int:
    """Bytes of workspace of a call."""
    return layout(problem, backward, dbias).places["end"]


class Matrices(NamedTuple):
    """Row-major matrices of ``rows`` x ``columns``: address of the first, elements from row to row
    (``stride``) and from matrix to matrix (``step``)."""

    ptr: int
    dtype: DType
    rows: int
    columns: int
    stride: int
    step: int

    @property
    def nbytes(self) -> int:
        """Bytes from matrix to matrix."""
        return self.step * self.dtype.itemsize


class Tile(NamedTuple):
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


def tiles(problem: Problem, cut: Layout) -> Iterator[Tile]:
    """Every tile of a problem, those over one key head one after the other."""
    repeat = problem.heads // problem.groups
    for batch in range(problem.batch):
        for group in range(0, problem.groups, cut.groups):
            for turn in range(repeat):
                for row in range(0, problem.rows, cut.rows):
                    rows = min(cut.rows, problem.rows - row)
                    yield Tile(
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
    call = TiledCall(problem, layout(problem, False), q.device.index, extras, workspace, stream)
    for tile in tiles(problem, call.cut):
        scores, weights = (call.scores(name, tile) for name in ("scores", "weights"))
        call.multiply(q, k, scores, tile)
        call.launch("attention_softmax", tile, (scores.ptr, weights.ptr, lse.ptr))
        values = call.without_padding("values", call.keys(v, tile), tile)
        call.product("nn", weights, values, call.queries(o, tile), tile)


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
    call = TiledCall(problem, cut, q.device.index, extras, workspace, stream)
    strides = (*bhsd(problem.qkv_format, o)[:3], *bhsd(problem.qkv_format, d_o)[:3])
    if dbias is not None:
        with launch.current_device(call.device):
            recorded.clear(call.device, stream, call.at("dbias"), 4 * dbias.size)
    for tile in tiles(problem, cut):
        rows, keys, upstream = call.queries(q, tile), call.keys(k, tile), call.queries(d_o, tile)
        scores, dweights, weights, dscores = (call.scores(name, tile) for name in _SCORES)
        call.product("nt", rows, keys, scores, tile)
        call.product("nt", upstream, call.keys(v, tile), dweights, tile)
        wide = 0 if dbias is None else dweights.ptr
        pointers = scores.ptr, dweights.ptr, weights.ptr, dscores.ptr, wide, lse.ptr, o.ptr, d_o.ptr
        call.launch("attention_softmax_bwd", tile, (*pointers, *strides, problem.dim_v))
        if dbias is not None:
            call.add_bias_gradient(dbias.shape, tile)
        keys = call.without_padding("keys", keys, tile)
        rows = call.without_padding("queries", rows, tile)
        upstream = call.without_padding("upstream", upstream, tile)
        call.product("nn", dscores, keys, call.queries(dq, tile), tile)
        for name, left, right, gradient in (("dv", weights, upstream, dv), ("dk", dscores, rows, dk)):
            call.add_over_rows(name, left, right, gradient, tile)
    if dbias is not None:
        call.store("dbias", dbias.ptr, (1, 1, dbias.size), (0, 0))
    if doffset is not None:
        offset_gradient(problem, d_o, o, lse, doffset, extras, call.at("doffset"), stream)


def offset_workspace(problem: Problem) -> int:
    """Bytes of workspace of ``offset_gradient``."""
    return 4 * problem.heads * _CHUNKS


def offset_gradient(
    problem: Problem,
    d_o: ArrayView,
    o: ArrayView,
    lse: ArrayView,
    doffset: ArrayView,
    extras: AttentionExtras,
    partial: int,
    stream: int,
) -> None:
    """The gradient of a learnable softmax_offset; ``partial``: address of its workspace."""
    assert extras.softmax_offset is not None
    strides = (*bhsd(problem.qkv_format, o)[:3], *bhsd(problem.qkv_format, d_o)[:3])
    arrays = extras.softmax_offset.ptr, lse.ptr, o.ptr, d_o.ptr, partial
    args: tuple[int, ...] = (*arrays, *strides, problem.dim_v, problem.batch, problem.rows)
    one, other = (
        launch.kernel("attention.cu", name, o.device.index, **defines(problem))
        for name in ("attention_doffset_partial", "attention_doffset")
    )
    launch.launch(one, (problem.heads, _CHUNKS), 256, args, stream)
    launch.launch(other, problem.heads, 32, (partial, doffset.ptr, _CHUNKS), stream)


def defines(problem: Problem) -> dict[str, str]:
    """What attention.cu is compiled with for a problem."""
    return {"T": launch.type_name(DTYPES[problem.dtype])} | ({"CAP": "1"} if problem.softcap else {})


class TiledCall(Padding):
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
        super().__init__(problem, device, extras, stream)
        self.cut = cut
        if workspace is None or workspace.nbytes < cut.places["end"]:
            got = None if workspace is None else f"{workspace.nbytes} bytes"
            raise BackendError("attention", "workspace", got, f"{cut.places['end']} bytes")
        self.base = workspace.ptr
        self.repeat = problem.heads // problem.groups
        self.threads = whole_warps(ceil_div(problem.columns, 4))  # four scores a thread

    def at(self, name: str) -> int:
        """Address of a part of the workspace."""
        return self.base + self.cut.places[name]

    def kernel(self, function: str) -> launch.Kernel:
        """Returns a kernel of attention.cu."""
        return launch.kernel("attention.cu", function, self.device, **defines(self.problem))

    def queries(self, view: ArrayView, tile: Tile) -> Matrices:
        """Returns the tile's rows in q, o or their gradients."""
        batch, head, row, _ = bhsd(self.problem.qkv_format, view)
        start = tile.batch * batch + tile.head * head + tile.row * row
        return self._part(view, start, tile.rows, row, self.repeat * head)

    def keys(self, view: ArrayView, tile: Tile) -> Matrices:
        """Returns the tile's key heads in k, v or their gradients."""
        batch, head, row, _ = bhsd(self.problem.qkv_format, view)
        return self._part(view, tile.batch * batch + tile.group * head, self.problem.columns, row, head)

    def _part(self, view: ArrayView, start: int, rows: int, stride: int, step: int) -> Matrices:
        return Matrices(view.ptr + start * self.dtype.itemsize, self.dtype, rows, view.shape[3], stride, step)

    def without_padding(self, name: str, matrices: Matrices, tile: Tile) -> Matrices:
        """Returns the tile's part of an array with 0 in padding: itself where that is known, else a copy in
        the workspace; that of key heads is made once for all tiles over them."""
        if not self.problem.cleaned:
            return matrices
        rows, dim, query = matrices.rows, matrices.columns, name in ("queries", "upstream")
        copy = matrices._replace(ptr=self.at(name), stride=dim, step=rows * dim)
        if query or tile.first:
            strides, to = ((0, one.step, one.stride, 1) for one in (matrices, copy))
            size, row = (1, tile.groups, rows, dim), tile.row if query else 0
            self.clean(matrices.ptr, strides, copy.ptr, to, query, size, tile.batch, row)
        return copy

    def scores(self, name: str, tile: Tile) -> Matrices:
        """One of the tile's score-like arrays."""
        columns, dtype = self.problem.columns, float32 if name in _SCORES[:2] else self.dtype
        return Matrices(self.at(name), dtype, tile.rows, columns, columns, tile.rows * columns)

    def sums(self, name: str, dim: int) -> Matrices:
        """Returns the float32 sums of dk or dv."""
        columns = self.problem.columns
        return Matrices(self.at(name), float32, columns, dim, dim, columns * dim)

    def multiply(self, rows: ArrayView, columns: ArrayView, out: Matrices, tile: Tile) -> None:
        """out = the tile's rows of q or do, times those of k or v."""
        self.product("nt", self.queries(rows, tile), self.keys(columns, tile), out, tile)

    def product(
        self,
        form: Literal["nt", "nn", "tn"],
        a: Matrices,
        b: Matrices,
        out: Matrices,
        tile: Tile,
        accumulate: bool = False,
    ) -> None:
        """out = op(a) op(b), batched over the tile's key heads: "nt" gives scores from features, "nn"
        features of rows, "tn" features of columns."""
        places = a.ptr | b.ptr | out.ptr | a.nbytes | b.nbytes | out.nbytes
        key = cublaslt.MatmulKey(
            out.rows,
            out.columns,
            a.rows if form == "tn" else a.columns,
            form,
            a.dtype,
            b.dtype,
            out.dtype,
            a.stride,
            b.stride,
            out.stride,
            accumulate=accumulate,
            alignment=16 if places % 16 == 0 else self.dtype.itemsize,
            batch=tile.groups,
            a_step=a.step,
            b_step=b.step,
            out_step=out.step,
        )
        plan, scratch = cublaslt.plan(key, self.device), self.at("cublaslt")
        plan.run((a.ptr, b.ptr, out.ptr, 0, 0, 0, scratch, 0), cublaslt.WORKSPACE, self.stream)

    def launch(self, function: str, tile: Tile, args: tuple[int, ...]) -> None:
        """A score kernel on a tile, one block a row."""
        place, grid = (tile.batch, tile.head, self.repeat, tile.row), (tile.rows, tile.groups)
        launch.launch(self.kernel(function), grid, self.threads, (*args, *place, self.rules), self.stream)

    def add_bias_gradient(self, shape: Shape, tile: Tile) -> None:
        """The tile's unrounded dscores added into the sums of the bias's gradient."""
        batch, head, row = attention_rules.over_scores(shape)
        columns = self.problem.columns
        grid = (
            ceil_div(columns, 256),
            min(tile.rows, _MOST_BLOCKS) if row else 1,
            tile.groups if head else 1,
        )
        factor = self.problem.bias_factor / self.problem.scale  # the dscores are scaled
        place = (tile.batch, tile.head, self.repeat, tile.row, tile.groups, tile.rows, columns)
        args = (self.at("dweights"), self.at("dbias"), batch, head, row, factor, *place)
        launch.launch(self.kernel("attention_dbias"), grid, 256, args, self.stream)

    def store(self, name: str, to: int, shape: tuple[int, int, int], strides: tuple[int, int]) -> None:
        """Float32 (heads, rows, features) sums rounded to address ``to``; ``strides``: from head to head and
        row to row there."""
        grid, args = ceil_div(math.prod(shape), 256), (self.at(name), to, *shape, *strides)
        launch.launch(self.kernel("attention_store"), grid, 256, args, self.stream)

    def add_over_rows(
        self, name: str, left: Matrices, right: Matrices, gradient: ArrayView, tile: Tile
    ) -> None:
        """Add left^T right, the tile's part of "dk" or "dv", to the sums of its key heads, and store these
        with the last one; at once where a tile is all of them."""
        to = self.keys(gradient, tile)
        if not self.cut.summed:
            self.product("tn", left, right, to, tile)
            return
        sums = self.sums(name, to.columns)
        self.product("tn", left, right, sums, tile, accumulate=not tile.first)
        if tile.last:
            self.store(name, to.ptr, (tile.groups, to.rows, to.columns), (to.step, to.stride))
