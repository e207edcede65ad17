"""Which ``Product`` carries out a ``ProductSpec``."""

from __future__ import annotations

from fp8kit.formats import DType
from fp8kit.ops.product import Product, ProductSpec
from fp8kit.ops.product_block import BlockProduct
from fp8kit.ops.product_plain import PlainProduct
from fp8kit.ops.product_tensor import TensorProduct


def product_of(
    spec: ProductSpec, rows: int, dtype: DType, needs_x: bool, needs_w: bool, needs_b: bool
) -> Product:
    """The products of one weight for ``rows`` rows of ``dtype``: by its scaling, or in high precision. See
    ``Product``."""
    kind: type[Product] = PlainProduct
    if spec.fp8 is not None:
        kind = BlockProduct if spec.fp8.blocks else TensorProduct
    return kind(spec, rows, dtype, needs_x, needs_w, needs_b)
