"""Arrays of other libraries on a GPU: taken and given without a copy, shown by their pointers."""

from __future__ import annotations

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import arrays, codec, formats
from fp8kit.arrays import Device
from fp8kit.testing import assert_same_bits

pytestmark = pytest.mark.gpu


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).standard_normal(shape).astype(np.float32)


def test_cupy_in_and_out() -> None:
    import cupy

    x = cupy.asarray(normal(32, 48))
    t = fk.tensor(x)
    assert t.view.ptr == x.data.ptr
    assert t.data.data.ptr == x.data.ptr
    assert cupy.asarray(t).data.ptr == x.data.ptr
    assert cupy.from_dlpack(t).data.ptr == x.data.ptr
    assert fk.tensor(x.T).view.strides == (1, 48)


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_quantize_gives_the_codes_of_the_codec_in_the_callers_library(scaling: str) -> None:
    import cupy

    host = normal(33, 50)
    q = fk.quantize(cupy.asarray(host), fk.E4M3, scaling=scaling)
    assert isinstance(q.data, cupy.ndarray)
    assert q.data.dtype == np.uint8
    amax = np.abs(host).max(axis=1, keepdims=True) if scaling == "row" else np.abs(host).max()
    scale = np.float32(448) / amax.astype(np.float32)
    assert_same_bits("codes", q.data.get(), codec.encode(host * scale, fk.E4M3))
    assert_same_bits("scale_inv", q.scale_inv.get().reshape(-1), (np.float32(1) / scale).reshape(-1))
    back = q.dequantize(fk.float32)
    assert isinstance(back, cupy.ndarray)
    want = codec.decode(q.data.get(), fk.E4M3).astype(np.float32) * q.scale_inv.get().reshape(np.shape(scale))
    assert_same_bits("dequantized", back.get(), want.astype(np.float32))


def test_fp8_product() -> None:
    import cupy

    a, b = normal(33, 64), normal(40, 64)
    qa, qb = fk.quantize(cupy.asarray(a), fk.E4M3), fk.quantize(cupy.asarray(b), fk.E4M3)
    c = qa @ qb.T
    got = arrays.as_view(c).numpy().astype(np.float64)
    left, right = (codec.decode(q.data.get(), fk.E4M3) * float(q.scale_inv.get()[0]) for q in (qa, qb))
    # bfloat16's rounding, and two tensor-core instructions that may each lose 2**-13 of the terms' magnitudes
    limit = 2.0**-8 * np.abs(left @ right.T) + 2 * 2.0**-13 * (np.abs(left) @ np.abs(right.T))
    assert (np.abs(got - left @ right.T) <= limit).all()


def test_torch_on_the_gpu_by_dlpack() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.fail("torch is installed here without CUDA")
    x = torch.from_numpy(normal(16, 24)).cuda()
    for tensor, dtype in (
        (x, "float32"),
        (x.bfloat16(), "bfloat16"),
        (x.to(torch.float8_e4m3fn), "float8_e4m3fn"),
    ):
        view = arrays.as_view(tensor)
        assert (view.ptr, view.dtype.name, view.device) == (tensor.data_ptr(), dtype, Device("cuda", 0))
        again = torch.from_dlpack(view)
        assert again.data_ptr() == tensor.data_ptr()
        assert again.dtype == tensor.dtype
    q = fk.quantize(x, fk.E4M3, scale=1.0)
    assert isinstance(q.data, torch.Tensor)
    native = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(q.data, native)


def test_a_foreign_stream_waits_for_what_is_under_way() -> None:
    """Work queued on CuPy's current stream is finished before a consumer's stream reads through DLPack."""
    torch = pytest.importorskip("torch")
    import cupy

    side = torch.cuda.Stream()
    big = cupy.ones(1 << 27, cupy.float32)
    for _ in range(20):
        big *= 1.0
    big += 1.0
    with torch.cuda.stream(side):
        got = torch.from_dlpack(fk.tensor(big))
        total = got[-1024:].sum().item()
    assert total == 2048.0


def test_float8_view_crosses_dlpack_natively() -> None:
    torch = pytest.importorskip("torch")
    q = fk.quantize(arrays.to(arrays.as_view(normal(8, 16)), Device("cuda", 0)), fk.E5M2)
    codes = arrays.as_view(q.data).view(formats.float8_e5m2)
    assert torch.from_dlpack(codes).dtype == torch.float8_e5m2
