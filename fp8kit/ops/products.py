"""Which ``Product`` carries out a ``ProductSpec``: by the granularity of its scales, or in high precision.

What a recipe asks for and no product carries out is refused here, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import lru_cache

from fp8kit import slowness
from fp8kit.errors import UnsupportedError
from fp8kit.formats import E4M3, E5M2, DType
from fp8kit.ops.product import Product, ProductSpec
from fp8kit.ops.product_block import BlockProduct
from fp8kit.ops.product_emulated import EmulatedProduct
from fp8kit.ops.product_modelled import ModelledProduct
from fp8kit.ops.product_parallel import ParallelProduct
from fp8kit.ops.product_quantized import QuantizedProduct, unsupported
from fp8kit.ops.product_row import RowProduct
from fp8kit.ops.product_scaled import ScaledProduct
from fp8kit.ops.product_tensor import TensorProduct
from fp8kit.quantization import OPERANDS, Quantization, Quantizer

# granularity of scales -> the products of operands that have it
PRODUCTS: dict[str, type[QuantizedProduct]] = {
    "tensor": TensorProduct,
    "row": RowProduct,
    "block_1x128": BlockProduct,
    "block_128x128": BlockProduct,
}
# of a class of products that which shows what they work on; ``product_watched``, which needs operations that
# need this file, puts its function here
WATCHED: list[Callable[..., type[Product]]] = []
# field of a quantizer -> the values that are carried out
_SUPPORTED = {
    "format": (E4M3, E5M2),
    "granularity": tuple(PRODUCTS),
    "scale_source": ("current", "delayed", "amax", "static"),
    "scale_rule": ("exact", "power_2"),
    "stochastic_bits": (0,),
    "hadamard": (0,),
    "ties": ("even",),
    "factor": (1,),
    "clip_gradient": (False,),
}


@lru_cache(maxsize=256)
def product_class(quantization: Quantization) -> type[QuantizedProduct | EmulatedProduct]:
    """Returns the products of operands that are cast so: the tensor cores' own where there are such, else
    emulated, with a chip's sums where a GEMM names these, or on codes where one is ``scaled``.
    UnsupportedError, which names GEMM, operand and field, for rules that no product carries out."""
    _want_fprop_quantized(quantization)
    try:
        return _native(quantization)
    except UnsupportedError as refusal:
        why = refusal
    used = [gemm for gemm in quantization.gemms.values() if gemm.compute == "quantized"]
    operands = [operand for gemm in used for operand in gemm.cast]
    known = ("current", "static", "delayed")
    if not operands or any(operand.scale_source not in known for operand in operands):
        raise why
    kind: type[EmulatedProduct] = EmulatedProduct
    if any(gemm.scaled for gemm in quantization.gemms.values()):
        kind = ScaledProduct
    elif any(not isinstance(gemm.how, bool) for gemm in used):
        kind = ModelledProduct
    kind.check_supported(quantization.gemms.items())
    return kind


def _native(quantization: Quantization) -> type[QuantizedProduct]:
    """Returns the products on FP8 codes, or UnsupportedError."""
    used = {name: gemm for name, gemm in quantization.gemms.items() if gemm.compute == "quantized"}
    readers: dict[str, list[tuple[str, Quantizer]]] = {"x": [], "w": [], "g": []}
    for name, gemm in used.items():
        if gemm.plain:
            raise unsupported(f"{name}.plain", repr(gemm.plain), '"": tensor cores multiply codes by codes')
        for source, place, quantizer in zip(OPERANDS[name], "ab", (gemm.a, gemm.b), strict=True):
            readers[source].append((f"{name}.{place}", quantizer))
            for field, known in _SUPPORTED.items():
                value = getattr(quantizer, field)
                if value not in known:
                    wanted = f"{' or '.join(map(str, known))}: no kernel does another"
                    raise unsupported(f"{name}.{place}.{field}", value, wanted)
        if gemm.emulated:
            raise unsupported(f"{name}.emulated", True, "False: products on codes are not emulated")
        if gemm.scaled:
            raise unsupported(f"{name}.scaled", True, "False: scales are not E8M0 or E4M3")
        if gemm.recast:
            raise unsupported(f"{name}.recast", True, "False: no kernel casts codes anew")
        if not isinstance(gemm.how, bool) and gemm.how.group:
            wanted = "one without group: codes by blocks of E8M0 or E4M3 are emulated"
            raise unsupported(f"{name}.accumulation", gemm.accumulation, wanted)
        if gemm.a.format == gemm.b.format == E5M2:
            raise unsupported(f"{name}.a, b", "E5M2 for both", "E4M3 for at least one")
    for pair in readers.values():
        if len(pair) == 2 and not _alike(pair[0][1], pair[1][1]):
            wanted = f"{pair[0][1]}, as the other GEMM that reads this operand"
            raise unsupported(pair[1][0], pair[1][1], wanted)
    operands = [pair[0][1] for pair in readers.values() if pair]
    kinds = {PRODUCTS[quantizer.granularity]: quantizer.granularity for quantizer in operands}
    if not kinds:
        raise unsupported("compute", "high precision for all three GEMMs", "no recipe")
    if len(kinds) > 1:
        raise unsupported(
            "granularity", " and ".join(kinds.values()), "scales of the same kind for x, w and g"
        )
    for quantizer in operands:
        if quantizer.static and quantizer.granularity != "tensor":
            raise unsupported("granularity", quantizer.granularity, "tensor, with a static scale")
    if len({quantizer.needs_state for quantizer in operands}) > 1:
        raise unsupported("scale_source", "delayed for some of x, w and g", "delayed for all or for none")
    (kind,) = kinds
    kind.check_supported(used.items())
    return kind


def _alike(first: Quantizer, second: Quantizer) -> bool:
    """Whether a product casts one operand for two GEMMs so: alike, or by rows and then by the tensor."""
    if second.granularity != "tensor" or second.scale_source != "current":
        return second == first
    return first in (second, replace(second, granularity="row"))


def _want_fprop_quantized(quantization: Quantization) -> None:
    """Refuse GEMMs that multiply fprop's values where fprop casts none."""
    for name, gemm in quantization.gemms.items():
        of_values = gemm.compute == "dequantized" or gemm.recast
        if of_values and quantization.fprop.compute != "quantized":
            how = "dequantized" if gemm.compute == "dequantized" else "recast"
            got = f"{quantization.fprop.compute!r}, and {name} {how}"
            raise unsupported("fprop.compute", got, '"quantized", whose operands are decoded')


@lru_cache(maxsize=256)
def _say_emulated(quantization: Quantization) -> None:
    """Say that products are emulated of which one has operands with products of their own."""
    gemms = [gemm for gemm in quantization.gemms.values() if gemm.compute == "quantized"]
    if any(gemm.emulated for gemm in quantization.gemms.values()):  # it is asked for
        return
    pairs = [(gemm.a, gemm.b) for gemm in gemms]
    if any(all(own.format in (E4M3, E5M2) and own.granularity in PRODUCTS for own in pair) for pair in pairs):
        try:
            _native(quantization)
        except UnsupportedError as why:
            slowness.say(
                f"FP8 products are not native by this recipe, because of {_said(why)}",
                "operands are still cast, but all three GEMMs (fprop, dgrad and wgrad) multiply the "
                "values of their codes in high precision",
                "`fp8kit recipes list` says which recipes are native",
            )


_OPERANDS = {"x": "input", "w": "weight", "g": "output gradient"}


def _said(why: UnsupportedError) -> str:
    """Returns a refusal of ``_native`` for people: which value of which operand, and what is native."""
    gemm, _, rest = (why.argument or "").partition(".")
    side, _, field = rest.partition(".")
    native = str(why.wanted).partition(":")[0]
    if rest == "plain":
        side = str(why.got).strip("'")
        return (
            f"{_OPERANDS[OPERANDS[gemm]['ab'.index(side)]]} of {gemm}, which is not cast while the other is"
        )
    if side not in ("a", "b"):
        return f"{why.argument} ({why.got}), not {native}"
    operand = _OPERANDS[OPERANDS[gemm]["ab".index(side)]]
    return f"{field} {why.got} of {gemm}'s {operand}, not {native}".lstrip()


def product_of(
    spec: ProductSpec, rows: int, dtype: DType, needs_x: bool = False, needs: Collection[str] = ()
) -> Product:
    """Returns the products of one weight for ``rows`` rows of ``dtype``. See ``Product``."""
    kind: type[Product] = Product if spec.fp8 is None else product_class(spec.fp8)
    if spec.fp8 is not None and issubclass(kind, EmulatedProduct):
        _say_emulated(spec.fp8)
    if spec.watch is not None:
        kind = WATCHED[0](kind)
    if spec.parallel is not None:
        if spec.input_cached:
            wanted = "x in high precision: the ranks share its amax before the cast"
            raise UnsupportedError("linear", "x", "a tensor in FP8, for a rank's part of a weight", wanted)
        return ParallelProduct(kind, spec, rows, dtype, needs_x, needs)
    return kind(spec, rows, dtype, needs_x, needs)
