"""Products of quantised arrays: which kernel computes one, and why; see ``QuantizedArray.matmul``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fp8kit import accumulation as models
from fp8kit import arrays, formats, packing, scaled_products, slowness
from fp8kit.arguments import flag
from fp8kit.arrays import ArrayView, Device, Shape
from fp8kit.backends import dispatch
from fp8kit.backends.dispatch import CannotTake, block_shapes
from fp8kit.errors import FormatError, ShapeError
from fp8kit.formats import E4M3, E5M2, Format
from fp8kit.quantization import TILES
from fp8kit.tiles import Rotation, tiling

if TYPE_CHECKING:
    from fp8kit.quantized_array import QuantizedArray

BOTH = (
    "a QuantizedArray on both sides: quantize the other one first, or multiply with what dequantize() gives"
)
_FP8, _BLOCKS, _DECODED = "fp8_gemm", "block_gemm", "gemm"
_DECODED_TAKEN = "the product of the decoded operands is taken, several times slower"
_CURE = "QuantizedArray.explain() says what the FP8 products take"
_NATIVE_BLOCKS = ("block_1x128", "block_128x128")
_SCALED = scaled_products.TILES
_SCALED_K = 32  # what their contraction is a multiple of


class _Operand(NamedTuple):
    """What decides about a product, of one side as it is seen: transposed where it is."""

    format: Format
    scaling: str
    along_k: bool  # whether its rows and blocks lie along the contraction
    rotation: Rotation | None
    k: int  # the contraction's length


def _left(a: QuantizedArray) -> _Operand:
    return _Operand(a.format, a.scaling, bool(a.along), a.rotation, a.shape[-1])


def _right(b: QuantizedArray) -> _Operand:
    return _Operand(b.format, b.scaling, not b.along, b.rotation, b.shape[0])


def _way(a: _Operand, b: _Operand, where: Device) -> tuple[str, str]:
    """Returns the kernel that multiplies two operands, and the reason. FormatError where their rotations
    differ."""
    if a.rotation or b.rotation:
        _want_equal_rotations(a, b)
    if a.scaling in _SCALED and b.scaling in _SCALED and scaled_products.takes_scales(where):
        refused = _scaled_refusal(a, b)
        return (_DECODED, refused) if refused else (_BLOCKS, "this chip's tensor cores take their scales")
    fp8 = (E4M3, E5M2)  # a tuple: asked by identity first
    if a.format not in fp8 or b.format not in fp8:
        return _DECODED, "the FP8 products take E4M3 and E5M2"
    if E4M3 not in (a.format, b.format):
        return _DECODED, "no FP8 product takes E5M2 on both sides"
    pair = (a.scaling, b.scaling)
    if pair == ("tensor", "tensor"):
        return _FP8, "each operand has one scale, which is taken out of the sum"
    if pair == ("row", "row"):
        if a.along_k and b.along_k:
            return _FP8, "each row of the left and each column of the right operand has a scale"
        return _DECODED, "a scale changes along the contraction: scaled by rows, a @ b.T is the FP8 product"
    if a.scaling not in _NATIVE_BLOCKS or b.scaling not in _NATIVE_BLOCKS:
        return _DECODED, f"the FP8 products take no {a.scaling} @ {b.scaling}"
    if pair == ("block_128x128",) * 2:
        return _DECODED, "the block-scaled product takes 128x128 on one side only"
    if not all(side.along_k or side.scaling == "block_128x128" for side in (a, b)):
        return _DECODED, "the blocks of one side do not lie along the contraction"
    return _BLOCKS, "the blocks of 128 of both operands lie along the contraction"


def _scaled_refusal(a: _Operand, b: _Operand) -> str:
    """Why a chip's tensor cores that take scales do not multiply these; "" where they do."""
    if refused := scaled_products.refusal(a.format, a.scaling, b.format, b.scaling):
        return refused
    if not (a.along_k and b.along_k) or a.k % _SCALED_K:
        return f"this chip's tensor cores take blocks along a contraction of a multiple of {_SCALED_K}"
    return ""


def _want_equal_rotations(a: _Operand, b: _Operand) -> None:
    wanted = "both rotated alike along the contraction, which cancels, or dequantize()"
    for name, side in (("self", a), ("other", b)):
        if side.rotation and not side.along_k:
            raise FormatError("matmul", name, f"{side.rotation}, not along the contraction", wanted)
    one, other = a.rotation, b.rotation
    same = one is not None and other is not None and one[:2] == other[:2]
    if same and one.rng is not None and one.rng is not other.rng:  # type: ignore[union-attr]
        same = np.array_equal(one.rng.numpy(), other.rng.numpy())  # type: ignore[union-attr]
    if not same:
        said = [str(side) if side else "not rotated" for side in (one, other)]
        if said[0] == said[1]:
            said[1] += " of another rng"
        raise FormatError("matmul", "rotations", " @ ".join(said), wanted)


def check_rotations(a: QuantizedArray, b: QuantizedArray) -> None:
    """FormatError where a and b, as ``a @ b`` sees them, were rotated and their rotations do not cancel."""
    if a.rotation or b.rotation:
        _want_equal_rotations(_left(a), _right(b))


def _shapes(a: QuantizedArray, b: QuantizedArray) -> None:
    if b.ndim != 2 or a.ndim < 1 or a.shape[-1] != b.shape[0]:
        raise ShapeError("matmul", "shapes", f"{a.shape} @ {b.shape}", "(..., K) @ (K, N)")
    if a.device != b.device:
        raise FormatError("matmul", "other", b.device, f"an array on {a.device}")


def explain(a: QuantizedArray, b: QuantizedArray | None) -> str:
    """See ``QuantizedArray.explain``."""
    right = _left(a) if b is None else _right(b)
    if b is not None:
        _shapes(a, b)
    kernel, why = _way(_left(a), right, a.device)
    sides = [f"{side.format} by {side.scaling}" for side in (_left(a), right)]
    how = {
        _FP8: "native, the FP8 product (kernel fp8_gemm), on the codes",
        _BLOCKS: "native, the block-scaled product (kernel block_gemm), on the codes",
        _DECODED: "emulated, the product of the decoded operands in float32 (kernel gemm)",
    }[kernel]
    said = f"{' @ '.join(sides)} on {a.device}: {how}, because {why}."
    for which, side in (("left", _left(a)), ("right", right)):
        high, wide = TILES[side.scaling]
        if wide and high != wide and not side.along_k:
            said += f" The blocks of the {which} operand lie across the contraction."
    if right.rotation:
        said += f" Both are rotated along the contraction ({right.rotation}), which cancels."
    if kernel == _DECODED and "nvfp4" in f"{a.scaling} {right.scaling}":
        said += " NVFP4's scales of tensors multiply the result."
    return said


def matmul(a: QuantizedArray, b: QuantizedArray, dtype: Any, fast_accumulate: bool) -> Any:
    """See ``QuantizedArray.matmul``."""
    fast_accumulate = flag("matmul", "fast_accumulate", fast_accumulate, FormatError)
    _shapes(a, b)
    where = a.device
    default = formats.float32 if where.kind == "cpu" else formats.bfloat16
    kind = default if dtype is None else formats.dtype(dtype, "matmul", "dtype", formats.HIGH_PRECISION)
    kernel, why = _way(_left(a), _right(b), where)
    if kernel == _DECODED and where.kind != "cpu":
        slowness.say(f"QuantizedArray: {why}", _DECODED_TAKEN, _CURE)
    kernels, stream = dispatch.kernels(where), arrays.current_stream(where)
    out = arrays.empty((*a.shape[:-1], b.shape[1]), kind, where)
    if not (out.size and a.shape[-1]):
        arrays.zero_(out)
    elif kernel == _FP8:
        (left, scale_a), (right, scale_b) = (_fp8_operand(t, kernels, stream) for t in (a, b.T))
        rows, how = out.rows(), (a.format, b.format, scale_a, scale_b)
        workspace = arrays.empty((kernels.fp8_gemm_workspace(*rows.shape),), formats.uint8, where)
        kernels.fp8_gemm(left, right, rows, *how, None, None, fast_accumulate, workspace, stream)
    elif kernel == _DECODED or not _block_product(a, b, out.rows(), kernels, stream):
        _decoded_product(a, b, out.rows(), kernels, stream)
    return arrays.to_library(out, a._data)


def _fp8_operand(tensor: QuantizedArray, kernels: Any, stream: int) -> tuple[ArrayView, ArrayView]:
    """Codes and scale_inv as ``fp8_gemm`` takes them, scaled by the tensor or by rows: padded copies where
    need be."""
    matrix = tensor._matrix()
    rows, columns = (-(-n // 16) * 16 for n in matrix.shape)
    codes, scales = _within(matrix, (rows, columns), kernels, stream), tensor._scale_inv
    if tensor.scaling == "row":
        scales = _within(scales.reshape(scales.size, 1), (rows, 1), kernels, stream).reshape(rows)
    return codes, scales


def _block_product(a: QuantizedArray, b: QuantizedArray, out: ArrayView, kernels: Any, stream: int) -> bool:
    """out = a @ b by ``block_gemm``; False where the kernels in force cannot take it."""
    codes, scales, tiles = zip(*(_block_operand(t, kernels, stream) for t in (a, b.T)), strict=True)
    workspace = arrays.empty((kernels.fp8_gemm_workspace(*out.shape),), formats.uint8, out.device)
    pair, two_levels = (a.format, b.format), (a._tensor_scale_inv, b._tensor_scale_inv)
    after = two_levels != (None, None) and out.dtype is not formats.float32
    sums = arrays.empty(out.shape, formats.float32, out.device) if after else out
    try:  # a plugin's kernel may refuse, and the other product is made
        kernels.block_gemm(*codes, sums, *pair, *scales, *tiles, None, None, workspace, stream)
    except CannotTake as reason:
        if kernels.policy.strict:
            raise
        slowness.say(f"QuantizedArray: {reason}", _DECODED_TAKEN, _CURE)
        return False
    times_tensor_scales(sums, *two_levels, kernels, stream)
    if after:
        kernels.copy(sums, out, stream)
    return True


def _block_operand(
    tensor: QuantizedArray, kernels: Any, stream: int
) -> tuple[ArrayView, ArrayView, tuple[int, int]]:
    """(codes, scale_inv, tile) of an array (rows, K) as ``block_gemm`` takes them: padded copies where need
    be."""
    codes = tensor._matrix()
    if tensor.scaling in _SCALED:
        rows, tile = -(-codes.shape[0] // 16) * 16, _SCALED[tensor.scaling]
        codes = _within(codes, (rows, codes.shape[1]), kernels, stream)
        if tile[1] == 16:
            native = arrays.native(codes)
            codes = arrays.as_view(packing.pack(native))
        return codes, arrays.as_view(tensor.swizzled_scales()), tile
    grid = tiling(tensor.scaling, tensor._codes.rows().shape, tensor._along)[1]
    tile = (1, 128) if tensor.scaling == "block_1x128" else (128, 128)
    scales = tensor._scale_inv.reshape(*grid)
    if tensor._flipped != (tile[0] == 1):  # of 1x128 blocks of K come first
        scales = scales.transpose(1, 0)
    shapes = block_shapes(codes.shape[0], codes.shape[1], tile)
    return _within(codes, shapes[0], kernels, stream), _within(scales, shapes[1], kernels, stream), tile


def _decoded_product(a: QuantizedArray, b: QuantizedArray, out: ArrayView, kernels: Any, stream: int) -> None:
    """out = a @ b, of the operands' float32 values; scales of NVFP4's tensors, and of rows that lie along the
    contraction, multiply the product."""
    (wide_a, scale_a), (wide_b, scale_b) = _wide(a, bool(a.along)), _wide(b, not b.along)
    wide_a = wide_a if a._flipped else wide_a.rows()
    if a._flipped and b._flipped:  # no layout of gemm transposes both
        wide_b = arrays.contiguous(wide_b.transpose(1, 0))
    layout = "tn" if a._flipped else "nt" if b._flipped else "nn"
    exact = out if out.dtype is formats.float32 else arrays.empty(out.shape, formats.float32, out.device)
    workspace = arrays.empty((kernels.gemm_workspace(),), formats.uint8, out.device)
    kernels.gemm(wide_a, wide_b, exact, layout, None, None, workspace, stream)
    times_tensor_scales(exact, scale_a, scale_b, kernels, stream)
    if exact is not out:
        kernels.copy(exact, out, stream)


def times_tensor_scales(
    product: ArrayView, scale_a: ArrayView | None, scale_b: ArrayView | None, kernels: Any, stream: int
) -> None:
    """Multiply a float32 product by the scales of its NVFP4 factors' tensors, or of a's and b's rows along
    the contraction: by their product, as layers do."""
    if scale_a is not None or scale_b is not None:
        out = product.rows()
        kernels.scale_product(out, out, scale_a, scale_b, None, None, stream)


def _wide(tensor: QuantizedArray, along_k: bool) -> tuple[ArrayView, ArrayView | None]:
    """Returns the float32 values of an operand; of NVFP4 without the scale of the tensor, or of its rows
    where they lie along the contraction, and that."""
    scale = tensor._tensor_scale_inv
    if scale is None or (scale.size > 1 and not along_k):
        return tensor._wide(formats.float32), None
    return tensor._wide(formats.float32, tensor._scales_of_codes()), scale


def rotated_back(tensor: QuantizedArray, kind: formats.DType) -> ArrayView:
    """Returns the values of a rotated array, as they lie in memory, before the rotation: rotated back in
    float32 and rounded to ``kind``."""
    rotation, where = tensor.rotation, tensor.device
    assert rotation is not None
    values, out = tensor._wide(formats.float32), arrays.empty(tensor._codes.shape, kind, where)
    how = rotation.n, rotation.signs, tensor._along, rotation.rng, arrays.current_stream(where)
    dispatch.kernels(where).rotate_back(values.rows(), out.rows(), None, *how)
    return out


def _within(view: ArrayView, sizes: Shape, kernels: Any, stream: int) -> ArrayView:
    """Returns a matrix in the first corner of a C-contiguous one of these sizes, zeros around: itself where
    it is that and aligned, or a copy."""
    if sizes == view.shape and view.contiguous and view.ptr % 16 == 0:
        return view
    padded = arrays.zeros(sizes, view.dtype, view.device)
    kernels.copy(view, padded.slice(0, 0, view.shape[0]).slice(1, 0, view.shape[1]), stream)
    return padded


# --- sums as a chip takes them ------------------------------------------------------------------------------

Modelled = tuple[ArrayView, ArrayView, tuple[int, int]]


def explain_modelled(a: QuantizedArray, b: QuantizedArray | None, accumulate: Any) -> str:
    """See ``QuantizedArray.explain``, for an ``accumulate`` other than "fp32"."""
    if b is None:
        b = (a if a.ndim == 2 else a.reshape(-1, a.shape[-1])).T
    modelled(a, b, accumulate)
    sides = " @ ".join(f"{side.format} by {side.scaling}" for side in (a, b))
    sums = repr(accumulate) if isinstance(accumulate, str) else str(accumulate)
    how = f"emulated sums, {sums} (kernel model_gemm), on the codes, with the same bits on every device"
    said = f"{sides} on {a.device}: {how}."
    if a.rotation:
        said += f" Both are rotated along the contraction ({a.rotation}), which cancels."
    return said


def modelled(
    a: QuantizedArray, b: QuantizedArray, accumulate: Any
) -> tuple[models.Accumulation, list[Modelled]]:
    """Returns the sum, and both operands as ``model_gemm`` takes them. Raises what ``matmul`` raises."""
    known = ("fp32", *models.ACCUMULATIONS)
    how = models.accumulation("matmul", "accumulate", accumulate, known)
    _shapes(a, b)
    check_rotations(a, b)
    models.check_formats("matmul", a.format, b.format, group=how.group)
    for tensor in (a, b):
        if how.group and not tensor.scaling.startswith(("mx", "nvfp4")):
            wanted = "scales of blocks in E8M0 or E4M3: mx_* or nvfp4_*"
            raise FormatError("matmul", "scaling", f"{tensor.scaling!r} with {accumulate}", wanted)
    operands = [_modelled_operand(name, value) for name, value in (("a", a), ("b", b.T))]
    widths = {tile[1] for _, _, tile in operands if tile[1]}
    if len(widths) > 1:
        got = f"{a.scaling!r} and {b.scaling!r}"
        raise FormatError("matmul", "scaling", got, "blocks of the same length along K")
    return how, operands


def _modelled_operand(name: str, tensor: QuantizedArray) -> Modelled:
    """(codes (rows, K), scale_inv, tile) of a factor whose rows run along K; of NVFP4 without the tensor's
    scale."""
    tile = TILES[tensor.scaling]
    if not tensor.along and tile[0] != tile[1]:
        wanted = 'blocks or rows along K: "along" of fk.quantize says which way they run'
        raise FormatError("matmul", name, f"scaling {tensor.scaling!r} across K", wanted)
    stored = tensor._scale_inv if tensor._tensor_scale_inv is None else tensor._scales_of_codes()
    grid = tiling(tensor.scaling, tensor._codes.rows().shape, tensor._along)[1]
    scales = stored.reshape(*(grid if len(grid) == 2 else (1, 1)))
    if tensor._flipped:
        scales = scales.transpose(1, 0)
    return arrays.contiguous(tensor._matrix()), scales, tile
