"""XLA custom calls whose handler is Python: fp8kit's functions on views of XLA's buffers, through jax-tvm-ffi.

A handler gets its arguments and results as ``ArrayView``s of memory that XLA owns, in the order of the call, and attributes after them. It
must not call jax.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax_tvm_ffi
import tvm_ffi

from fp8kit.arrays import CPU, ArrayView
from fp8kit.formats import DTYPES
from fp8kit.spec import Meta


def register(name: str, handler: Callable[..., None], attributes: Sequence[str] = ()) -> None:
    """Make ``handler`` the CPU custom call ``name`` of XLA, once a process.

    ``handler(*views, *attributes)``: every argument and result of the call as an ArrayView, then the named attributes. An exception that it
    raises surfaces from the jitted function with its text.
    """

    def receive(*values: Any) -> None:
        count = len(values) - len(attributes)
        handler(*(_view(value) for value in values[:count]), *values[count:])

    spec = ["args", "rets", *(f"attrs.{attribute}" for attribute in attributes)]
    jax_tvm_ffi.register_ffi_target(name, tvm_ffi.convert(receive), arg_spec=spec, platform="cpu", pass_owned_tensor=True)


def call(name: str, results: Any, *arrays: Any, **attributes: Any) -> Any:
    """The registered call inside a traced function. ``results``: a (nested) list of ``shape_struct``s, in which shape it returns them."""
    return jax.ffi.ffi_call(name, results)(*arrays, **attributes)


def shape_struct(meta: Meta) -> jax.ShapeDtypeStruct:
    """A meta as JAX's shape and dtype."""
    return jax.ShapeDtypeStruct(meta.shape, meta.dtype.numpy)


def _view(tensor: Any) -> ArrayView:
    return ArrayView(tensor.data_ptr(), tuple(tensor.shape), DTYPES[str(tensor.dtype)], CPU, tensor)
