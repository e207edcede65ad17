"""DLPack both ways by address, and the lifetime of what is exchanged."""

import gc
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from fp8kit import arrays, dlpack, formats
from fp8kit.arrays import ArrayView, as_view
from fp8kit.errors import BackendError, FormatError

TORCH = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float64: "float64",
    torch.int64: "int64",
    torch.uint8: "uint8",
    torch.bool: "bool",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
    torch.float8_e8m0fnu: "float8_e8m0fnu",
}


class Owner(np.ndarray):
    """Memory whose end can be seen."""


def _owned(dtype=np.float32, shape=(3, 4)):
    memory = np.zeros(shape, dtype).view(Owner)
    return ArrayView(memory.ctypes.data, shape, formats.dtype(dtype), arrays.CPU, memory), weakref.ref(memory)


@pytest.mark.parametrize(("kind", "name"), TORCH.items(), ids=TORCH.values())
def test_torch_both_ways(kind, name):
    source = torch.arange(12, dtype=torch.uint8).view(3, 4).to(kind)
    view = as_view(source)
    assert (view.ptr, view.shape, view.dtype.name, view.contiguous) == (source.data_ptr(), (3, 4), name, True)
    back = torch.from_dlpack(view)
    assert (back.data_ptr(), back.dtype, back.shape) == (source.data_ptr(), kind, source.shape)


@pytest.mark.parametrize(
    "kind",
    [jnp.float32, jnp.bfloat16, jnp.int32, jnp.float8_e4m3fn, jnp.float8_e5m2],
    ids=lambda k: k.__name__,
)
def test_jax_both_ways(kind):
    source = jnp.arange(12).reshape(3, 4).astype(kind)
    view = as_view(source)
    assert view.ptr == source.unsafe_buffer_pointer()
    assert view.dtype.numpy == source.dtype
    back = jax.dlpack.from_dlpack(view)
    assert back.dtype == source.dtype
    assert back.unsafe_buffer_pointer() == source.unsafe_buffer_pointer()


def test_numpy_both_ways():
    source = np.arange(12, dtype=np.int32).reshape(3, 4)
    view = arrays.from_dlpack(source)
    assert (view.ptr, view.shape, view.dtype) == (source.ctypes.data, (3, 4), formats.int32)
    back = np.from_dlpack(view)
    assert back.ctypes.data == source.ctypes.data
    np.testing.assert_array_equal(back, source)


def test_strides_and_offsets():
    base = torch.arange(60.0).view(5, 12)
    part = base[1:, 2:9:3].t()
    view = as_view(part)
    assert (view.ptr, view.shape, view.strides) == (part.data_ptr(), tuple(part.shape), part.stride())
    np.testing.assert_array_equal(view.numpy(), part.numpy())
    assert torch.from_dlpack(view).stride() == part.stride()


def test_negative_strides():
    source = np.arange(12.0).reshape(3, 4)[::-1, ::-2]
    view = as_view(source)
    np.testing.assert_array_equal(view.numpy(), source)
    np.testing.assert_array_equal(arrays.contiguous(view).numpy(), source)
    np.testing.assert_array_equal(np.from_dlpack(view), source)


@pytest.mark.parametrize("shape", [(), (0, 3), (1,)])
def test_degenerate_shapes(shape):
    assert as_view(torch.zeros(shape)).shape == shape
    assert torch.from_dlpack(as_view(np.zeros(shape, np.float32))).shape == shape


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (None, "dltensor"),
        ((0, 8), "dltensor"),
        ((1, 0), "dltensor_versioned"),
        ((2, 0), "dltensor_versioned"),
    ],
)
def test_capsule_kind(version, name):
    view, alive = _owned()
    capsule = view.__dlpack__(max_version=version)
    assert f'"{name}"' in repr(capsule)
    del view, capsule
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    "consume", [torch.from_dlpack, jax.dlpack.from_dlpack, np.from_dlpack], ids=["torch", "jax", "numpy"]
)
def test_consumer_keeps_memory_alive(consume):
    view, alive = _owned(shape=(64, 64))
    address = view.ptr
    taken = consume(view)
    del view
    gc.collect()
    # JAX copies memory that is not aligned to its wish
    shares = not isinstance(taken, jax.Array) or taken.unsafe_buffer_pointer() == address
    assert (alive() is not None) == shares
    del taken
    gc.collect()
    assert alive() is None


def test_producer_is_released():
    source = np.zeros((4, 4)).view(Owner)
    alive = weakref.ref(source)
    view = arrays.from_dlpack(source)
    del source
    gc.collect()
    assert alive() is not None
    part = view.slice(0, 1, 2)
    del view
    gc.collect()
    assert alive() is not None
    del part
    gc.collect()
    assert alive() is None


def test_refusing_consumer_keeps_its_own_error():
    """A capsule that dies while the consumer's exception is pending must not swallow it, nor leak."""
    view, alive = _owned(ml_dtypes.bfloat16)
    with pytest.raises((RuntimeError, BufferError), match="Unsupported dtype"):  # NumPy 2.4, NumPy 2.5
        np.from_dlpack(view)
    with pytest.raises(ZeroDivisionError):
        divmod(torch.from_dlpack(view), 1 // 0)
    del view
    gc.collect()
    assert alive() is None


def test_copy_and_device_arguments():
    source = np.arange(6.0)
    view = as_view(source)
    assert np.from_dlpack(view, copy=True).ctypes.data != source.ctypes.data
    with pytest.raises(BufferError, match="not moved"):
        view.__dlpack__(dl_device=(2, 0))


def test_refusals():
    with pytest.raises(FormatError, match="float4"):
        as_view(np.zeros(4, ml_dtypes.float4_e2m1fn)).__dlpack__()
    with pytest.raises(FormatError, match="does not export"):
        as_view(torch.zeros(3, requires_grad=True))
    with pytest.raises(FormatError, match="64 bits"):
        as_view(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(FormatError, match="list"):
        as_view([1.0])
    with pytest.raises(BackendError, match="abacus"):
        dlpack.device_code("abacus")
    with pytest.raises(FormatError, match=">f4"):
        as_view(np.zeros(3, ">f4"))


def test_cuda_addresses_are_not_touched():
    class Fake:
        @property
        def __cuda_array_interface__(self):
            return {
                "shape": (4, 8),
                "typestr": "<f4",
                "data": (0x7000, False),
                "version": 3,
                "strides": (64, 8),
            }

    view = as_view(Fake())
    assert (view.ptr, view.shape, view.strides, view.dtype, str(view.device)) == (
        0x7000,
        (4, 8),
        (16, 2),
        formats.float32,
        "cuda:0",
    )
    capsule = ArrayView(0x7000, (4, 8), formats.float8_e4m3fn, arrays.Device("cuda", 3)).__dlpack__(stream=-1)
    tensor = dlpack._managed(capsule)[0].dl_tensor
    assert (tensor.data, tensor.device.device_type, tensor.device.device_id) == (0x7000, 2, 3)
    assert (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes) == (10, 8, 1)
