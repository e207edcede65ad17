"""Attention over quantised operands: the unfused path in float32, with its probabilities and the scores'
gradients rounded between the products (raw_kernels/quantized_attention.cu)."""

from __future__ import annotations

import functools
import struct

from fp8kit.arrays import ArrayView, Shape
from fp8kit.backends.cuda import launch, recorded, scales, unfused
from fp8kit.backends.cuda._rows import address, ceil_div
from fp8kit.backends.cuda.attention_problem import ALIGN, Problem, bhsd, problem
from fp8kit.backends.cuda.quantize import narrow
from fp8kit.backends.cuda.structures import Packer
from fp8kit.backends.protocol import AttentionExtras, AttentionSpec
from fp8kit.backends.protocol.quantized_attention import DS_DRAW, P_DRAWS
from fp8kit.formats import float32
from fp8kit.quantization import Quantizer

_SOURCE = "quantized_attention.cu"
_THREADS = 256
_SCALE = struct.Struct("=2f")
_RANDOM = Packer("P2Q")
_STATISTICS = ("amax", "scale", "scale_inv")


@functools.cache
def _formats(p: Quantizer, ds: Quantizer) -> bytes:
    scale = _SCALE.pack(p.static_scale, 1 / p.static_scale)
    first, second = (narrow(own.format, True, own.stochastic_bits) for own in (p, ds))
    return first + scale + second


def _roundings(p: Quantizer, ds: Quantizer | None, rng: ArrayView | None) -> bytes:
    """Returns what stands behind the rules in the sources' ``QuantizedRules``; forward has no dS."""
    draws = P_DRAWS[ds is not None] << 48, DS_DRAW << 48
    return _formats(p, ds or p) + _RANDOM.pack(address(rng), *draws)


def _layout(about: Problem, backward: bool, dbias: Shape | None = None) -> unfused.Layout:
    """Returns the unfused path's, with what this one has besides: "inverse", a factor for each row of a tile;
    "amax", "scale" and "scale_inv" of dS."""
    cut = unfused.layout(about, backward, dbias)
    end, places = cut.places["end"], dict(cut.places)
    sizes = {"inverse": 4 * cut.groups * cut.rows} if not backward else dict.fromkeys(_STATISTICS, 4)
    for name, nbytes in sizes.items():
        places[name] = end
        end += ceil_div(nbytes, ALIGN) * ALIGN
    return cut._replace(places=places | {"end": end})


class _QuantizedTiledCall(unfused.TiledCall):
    """The unfused path's call, which launches these kernels too."""

    def __init__(
        self,
        about: Problem,
        cut: unfused.Layout,
        like: ArrayView,
        extras: AttentionExtras,
        roundings: bytes,
        workspace: ArrayView | None,
        stream: int,
    ) -> None:
        super().__init__(about, cut, like.device.index, extras, workspace, stream)
        self.like = like
        self.quantized_rules = self.rules + roundings

    def own_kernel(self, function: str) -> launch.Kernel:
        """Returns a kernel of quantized_attention.cu."""
        return launch.kernel(_SOURCE, function, self.device, **unfused.defines(self.problem))

    def on_rows(self, function: str, tile: unfused.Tile, args: tuple[int, ...]) -> None:
        """Such a kernel on a tile, one block a row."""
        place, grid = (tile.batch, tile.head, self.repeat, tile.row), (tile.rows, tile.groups)
        arguments = (*args, *place, self.quantized_rules)
        launch.launch(self.own_kernel(function), grid, self.threads, arguments, self.stream)

    def scale_rows(self, matrices: unfused.Matrices, tile: unfused.Tile) -> None:
        """Multiply a tile of o by its rows' factors."""
        shape = tile.groups, matrices.rows, matrices.columns
        args = matrices.ptr, self.at("inverse"), *shape, matrices.step, matrices.stride
        grid = ceil_div(shape[0] * shape[1] * shape[2], _THREADS)
        launch.launch(self.own_kernel("scale_rows"), grid, _THREADS, args, self.stream)

    def clear(self, name: str, nbytes: int) -> None:
        """Zeros in a part of the workspace."""
        with launch.current_device(self.device):
            recorded.clear(self.device, self.stream, self.at(name), nbytes)

    def take_scale(self, ds: Quantizer) -> None:
        """dS's scale, of its amax."""
        amax, scale, inverse = (
            ArrayView(self.at(name), (1,), float32, self.like.device) for name in _STATISTICS
        )
        scales.scale_from_amax(amax, scale, inverse, *ds.scale_limits, self.stream)


def clear_padding_(x: ArrayView, cu_seqlens: ArrayView, stream: int) -> None:
    """See ``backends.protocol``."""
    if x.size:
        kernel = launch.kernel(_SOURCE, "clear_padding", x.device.index, T="f32")
        grid = launch.blocks(x.size, _THREADS, x.device.index)
        launch.launch(kernel, grid, _THREADS, (x.ptr, cu_seqlens.ptr, *x.shape), stream)


def quantized_attention_fwd(
    q: ArrayView,
    k: ArrayView,
    v: ArrayView,
    o: ArrayView,
    lse: ArrayView,
    extras: AttentionExtras,
    spec: AttentionSpec,
    p: Quantizer,
    rng: ArrayView | None,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """See ``backends.protocol``. BackendError when a library that it needs fails."""
    about = _problem(q.shape, k.shape, v.shape, spec)
    call = _QuantizedTiledCall(
        about, _layout(about, False), q, extras, _roundings(p, None, rng), workspace, stream
    )
    for tile in unfused.tiles(about, call.cut):
        scores = call.scores("scores", tile)
        call.multiply(q, k, scores, tile)
        call.on_rows("quantized_softmax", tile, (scores.ptr, call.at("inverse"), lse.ptr))
        out = call.queries(o, tile)
        call.product("nn", scores, call.keys(v, tile), out, tile)
        call.scale_rows(out, tile)


def quantized_attention_bwd(
    do: ArrayView,
    q: ArrayView,
    k: ArrayView,
    v: ArrayView,
    o: ArrayView,
    lse: ArrayView,
    do_rows: ArrayView,
    q_rows: ArrayView,
    k_rows: ArrayView,
    dq: ArrayView,
    dk: ArrayView,
    dv: ArrayView,
    dbias: ArrayView | None,
    doffset: ArrayView | None,
    extras: AttentionExtras,
    spec: AttentionSpec,
    p: Quantizer,
    ds: Quantizer,
    rng: ArrayView | None,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """See ``backends.protocol``: one pass over the tiles for the amax of dS, one for the products.
    BackendError as forward."""
    about = _problem(q.shape, k.shape, v.shape, spec)
    cut = _layout(about, True, None if dbias is None else dbias.shape)
    call = _QuantizedTiledCall(about, cut, q, extras, _roundings(p, ds, rng), workspace, stream)
    strides = (*bhsd(spec.qkv_format, o)[:3], *bhsd(spec.qkv_format, do)[:3])
    call.clear("amax", 4)
    if dbias is not None:
        call.clear("dbias", 4 * dbias.size)

    def scores_and_slopes(tile: unfused.Tile, rounds: bool) -> tuple[unfused.Matrices, unfused.Matrices]:
        scores, slopes = (call.scores(name, tile) for name in ("scores", "dweights"))
        call.multiply(q, k, scores, tile)
        call.multiply(do, v, slopes, tile)
        scale = call.at("scale"), call.at("scale_inv") if rounds else 0
        pointers = scores.ptr, slopes.ptr, lse.ptr, o.ptr, do.ptr, call.at("amax"), *scale
        call.on_rows("quantized_softmax_bwd", tile, (*pointers, *strides, about.dim_v))
        return scores, slopes

    for tile in unfused.tiles(about, cut):
        scores_and_slopes(tile, False)
        if dbias is not None:
            call.add_bias_gradient(dbias.shape, tile)
    call.take_scale(ds)
    for tile in unfused.tiles(about, cut):
        weights, slopes = scores_and_slopes(tile, True)
        call.product("nn", slopes, call.keys(k_rows, tile), call.queries(dq, tile), tile)
        call.add_over_rows("dv", weights, call.queries(do_rows, tile), dv, tile)
        call.add_over_rows("dk", slopes, call.queries(q_rows, tile), dk, tile)
    if dbias is not None:
        call.store("dbias", dbias.ptr, (1, 1, dbias.size), (0, 0))
    if doffset is not None:
        unfused.offset_gradient(about, do, o, lse, doffset, extras, call.at("doffset"), stream)


def _problem(q: Shape, k: Shape, v: Shape, spec: AttentionSpec) -> Problem:
    # padding holds 0
    return problem(q, k, v, float32, spec)._replace(zero_padded=True)


def quantized_attention_workspace(
    q: Shape, k: Shape, v: Shape, dbias: Shape | None, spec: AttentionSpec, backward: bool
) -> int:
    """See ``backends.protocol``."""
    return _layout(_problem(q, k, v, spec), backward, dbias).places["end"]
