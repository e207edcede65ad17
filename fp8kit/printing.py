"""Arrays as text: values as NumPy prints them; of large arrays only those that are printed are fetched."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8kit import arrays
from fp8kit.arrays import ArrayView, Shape

Array = np.ndarray[Any, Any]

_BITS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


def places(shape: Shape) -> tuple[Array, ...] | None:
    """Along each dimension the indices that are printed of an array too large to be printed whole, and one
    more, which stands for those left out; None where all are printed."""
    options = np.get_printoptions()
    size, edge = int(np.prod(shape, dtype=object)), int(options["edgeitems"])
    if size <= options["threshold"]:
        return None
    kept = (range(n) if n <= 2 * edge else (*range(edge + 1), *range(n - edge, n)) for n in shape)
    return tuple(np.array(indices, np.int64) for indices in kept)


def picked(view: ArrayView, indices: tuple[Array, ...]) -> Array:
    """Returns the elements at all combinations of the indices along each dimension, on the host."""
    spread = [
        index.reshape(tuple(-1 if i == dim else 1 for i in range(len(indices))))
        for dim, index in enumerate(indices)
    ]
    there = tuple(arrays.native(arrays.to(index, view.device)) for index in spread)
    bits = arrays.native(view.view(_BITS[view.dtype.itemsize]))[there]
    return arrays.as_view(bits).view(view.dtype).numpy()


def text(values: Array, shape: Shape, prefix: str = "", narrow: bool = False) -> str:
    """``values``, those at ``places(shape)`` or all, as NumPy prints an array of ``shape``; lines after the
    first are indented by the prefix. ``narrow``, and of 16 bits: with four digits at most."""
    options = np.get_printoptions()
    narrow = narrow or (values.dtype.itemsize < 4 and values.dtype.kind in "fV")
    if values.dtype.kind in "fV":
        values = values.astype(np.float32) if values.dtype.itemsize < 8 else values
    return np.array2string(
        values,
        separator=", ",
        prefix=prefix,
        threshold=int(options["threshold"]) if values.shape == shape else 0,
        precision=min(4, options["precision"]) if narrow else options["precision"],
    )


def view_text(view: ArrayView, prefix: str) -> str:
    """Returns a view's values as text; waits for its device."""
    indices = places(view.shape)
    if indices is None:
        return text(view.numpy(), view.shape, prefix)
    return text(picked(view, indices), view.shape, prefix)
