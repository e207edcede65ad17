"""What the properties draw: shapes with 0 and 1 among their sizes, and arrays in every kind of memory that
one can meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st

import fp8kit as fk
from fp8kit import arrays
from fp8kit.errors import Fp8kitError
from tests.support.effort import FACTOR

BF16 = np.dtype(ml_dtypes.bfloat16)
HIGH = [np.dtype(np.float32), BF16, np.dtype(np.float16)]
FLOATS = [*HIGH, np.dtype(np.float64)]
OTHERS = [
    np.dtype(k)
    for k in (
        np.int8,
        np.int16,
        np.int32,
        np.int64,
        np.uint8,
        np.uint16,
        np.uint32,
        np.uint64,
        np.bool_,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e5m2,
        ml_dtypes.float8_e8m0fnu,
    )
]
FOREIGN = [
    np.dtype(k)
    for k in (
        np.complex64,
        np.complex128,
        "M8[s]",
        "U3",
        object,
        ml_dtypes.int4,
        ml_dtypes.float8_e4m3b11fnuz,
    )
]
SIZES = [0, 1, 1, 2, 3, 4, 5, 7, 8, 16, 17, 33, 64, 129]
MOST = 6000  # elements


def examples(count: int) -> Any:
    """Half of ``count`` examples, times FP8KIT_PROPERTIES where that is set."""
    return settings(max_examples=(count * max(FACTOR, 1) + 1) // 2)


def shapes(least: int = 0, most: int = 4) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of so many dimensions."""
    return (
        st.lists(st.sampled_from(SIZES), min_size=least, max_size=most)
        .map(tuple)
        .filter(lambda s: np.prod(s, dtype=int) <= MOST)
    )


seeds = st.integers(0, 2**32 - 1)


def values(shape: tuple[int, ...], dtype: np.dtype, seed: int, wild: bool = False) -> np.ndarray:
    """Normal numbers of very different size; ``wild``: with Inf, NaN, zeros of both signs, the smallest and
    the largest among them."""
    rng = np.random.default_rng(seed)
    if dtype.kind in "iub":
        return rng.integers(0, 2 if dtype.kind == "b" else 100, shape).astype(dtype)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 7)
    if wild:
        x = x * 2.0 ** rng.integers(-30, 30, shape)
        special = np.array(
            [
                0.0,
                -0.0,
                np.inf,
                -np.inf,
                np.nan,
                1e-45,
                -1e-45,
                6e-8,
                65504.0,
                3e38,
                -3e38,
                448.0,
                464.0,
                57344.0,
            ]
        )
        x = np.where(rng.random(shape) < 0.1, rng.choice(special, shape), x)
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(dtype)


class Thing(NamedTuple):
    """An array as a caller holds it, its ``values`` (contiguous, native byte order), and whether it must be
    refused."""

    thing: Any
    values: np.ndarray
    refused: bool = False

    def bytes(self) -> bytes:
        """Returns the memory's present contents."""
        held = self.thing
        if isinstance(held, torch.Tensor):
            held = held.clone().reshape(-1)
            held = held.view(
                {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[held.element_size()]
            ).numpy()
        elif isinstance(held, Exporter):
            held = held.array
        return np.ascontiguousarray(np.asarray(held)).tobytes()


class Exporter:
    """An array of an unknown library: DLPack alone."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> object:
        return arrays.as_view(self.array).__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def _strided(step: int) -> Callable[[np.ndarray], np.ndarray]:
    def lay(x: np.ndarray) -> np.ndarray:
        room = np.zeros(tuple(max(n, 1) * abs(step) for n in x.shape), x.dtype)
        part = np.asarray(
            room[(*(slice(None, None, step) for _ in x.shape), ...)][(*(slice(0, n) for n in x.shape), ...)]
        )
        part[...] = x
        return part

    return lay


def _broadcast(x: np.ndarray) -> np.ndarray:
    return np.broadcast_to(x[(*(slice(0, 1) for _ in x.shape), ...)], x.shape)


def _transposed(x: np.ndarray) -> np.ndarray:
    return np.array(x.T, order="C").T


def _off(x: np.ndarray) -> np.ndarray:
    """Memory whose address is no multiple of anything."""
    room = np.zeros(x.nbytes + 1, np.uint8)
    part = np.ndarray(x.shape, x.dtype, room.data, 1)
    part[...] = x
    return part


def _frozen(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.flags.writeable = False
    return x


def _swapped(x: np.ndarray) -> np.ndarray:
    return x.astype(x.dtype.newbyteorder(">")) if x.dtype.kind in "fiu" and x.dtype.itemsize > 1 else x


def _torch(x: np.ndarray) -> Any:
    kinds = {
        "bfloat16": torch.bfloat16,
        "float8_e4m3fn": torch.float8_e4m3fn,
        "float8_e5m2": torch.float8_e5m2,
    }
    if x.dtype.name not in kinds:
        return (
            torch.from_numpy(x.copy())
            if x.dtype.name in ("float32", "float16", "float64", "int32", "int64", "uint8", "int8")
            else x
        )
    wide = torch.from_numpy(x.view(np.int16 if x.dtype.itemsize == 2 else np.uint8).copy())
    return wide.view(kinds[x.dtype.name])


LAYOUTS: dict[str, Callable[[np.ndarray], Any]] = {
    "plain": lambda x: x.copy(),
    "transposed": _transposed,
    "sliced": _strided(2),
    "negative": _strided(-1),
    "reversed": _strided(-3),
    "broadcast": _broadcast,
    "off": _off,
    "frozen": _frozen,
    "swapped": _swapped,
    "torch": _torch,
    "dlpack": Exporter,
    "view": lambda x: arrays.as_view(x.copy()),
    "tensor": lambda x: fk.Tensor(arrays.as_view(x.copy())),
    "jax": lambda x: jnp.asarray(x) if x.dtype.name in ("float32", "bfloat16", "float16", "int32") else x,
}


def thing(x: np.ndarray, layout: str) -> Thing:
    """Returns the values in a kind of memory."""
    held = LAYOUTS[layout](x)
    seen = _broadcast(x) if layout == "broadcast" else x
    swapped = isinstance(held, np.ndarray) and not held.dtype.isnative
    return Thing(held, np.array(seen, order="C"), swapped)


@st.composite
def things(
    draw: Any,
    dtypes: Any = FLOATS,
    least: int = 0,
    most: int = 4,
    wild: bool = False,
    layouts: Any = tuple(LAYOUTS),
) -> Thing:
    """Returns an array of any shape in any memory."""
    x = values(
        draw(shapes(least, most)), draw(st.sampled_from(dtypes)), draw(seeds), wild and draw(st.booleans())
    )
    return thing(x, draw(st.sampled_from(layouts)))


def attempt(call: Callable[[], Any], *inputs: Thing) -> Any:
    """What the call returns, or the Fp8kitError that it raises. Its inputs are as they were in both cases."""
    before = [each.bytes() for each in inputs]
    try:
        out = call()
    except Fp8kitError as error:
        out = error
    assert [each.bytes() for each in inputs] == before, "an input was changed"
    return out


def host(value: Any) -> np.ndarray:
    """Anything as NumPy."""
    return np.asarray(arrays.as_view(value).numpy())
