"""The CUDA device: what holds without one, then memory, copies, streams and launches on the GPU."""

from __future__ import annotations

import importlib
import itertools
import subprocess
import sys
import threading
import types

import ml_dtypes
import numpy as np
import pytest

from fp8kit import arrays, formats
from fp8kit.arrays import CPU, ArrayView, Device
from fp8kit.backends import dispatch
from fp8kit.backends.cuda import elementwise, launch, support
from fp8kit.backends.cuda.device import CudaProvider
from fp8kit.backends.protocol import KERNELS, SPECS
from fp8kit.errors import BackendError
from fp8kit.formats import float32, int64, uint8
from fp8kit.testing.compare import assert_same_bits
from fp8kit.testing.contract import get, put

GPU = Device("cuda", 0)


@pytest.mark.parametrize("engine", ["cuda", "reference"])
def test_an_engine_has_every_kernel_in_the_file_of_its_family(engine: str) -> None:
    for name in KERNELS:
        if engine == "cuda" or SPECS[name].launches:  # the reference needs no workspaces
            module = importlib.import_module(f"fp8kit.backends.{engine}.{SPECS[name].family}")
            assert vars(module)[name].__module__ == module.__name__, name


def test_registering_imports_no_cuda_library() -> None:
    code = (
        "import sys; from fp8kit.backends.registry import OpRegistry; from fp8kit.backends import cuda; "
        "cuda.register(OpRegistry()); import fp8kit.backends.cuda.device, fp8kit.backends.cuda.support; "
        "print([m for m in ('cupy', 'cuda', 'nvmath', 'cudnn', 'torch', 'jax') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"


def test_the_report_names_every_component_and_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str:
        raise OSError("libsomething.so: no such file")

    monkeypatch.setattr(
        support, "_QUESTIONS", (*support._QUESTIONS, ("something", broken, "pip install something"))
    )
    rows = {row.component: row for row in support.report()}
    assert {"driver", "CuPy", "NVRTC", "cuBLASLt", "cuDNN frontend"} <= set(rows)
    assert {row.status for row in rows.values()} <= {"runs", "missing"}
    assert rows["something"] == (
        "something",
        "missing",
        "libsomething.so: no such file; pip install something",
    )


def test_a_variant_that_no_source_lists_is_refused() -> None:
    with pytest.raises(BackendError, match="amax_tensor"):
        launch.kernel("amax.cu", "amax_tensor", 0, T="f8")


@pytest.mark.parametrize(("count", "captured", "waits"), [(1, False, 0), (2, False, 1), (2, True, 0)])
def test_first_work_on_one_of_several_devices_waits(
    monkeypatch: pytest.MonkeyPatch, count: int, captured: bool, waits: int
) -> None:
    waited: list[int] = []
    current = [0]
    fake = types.SimpleNamespace(
        getDevice=lambda: current[0],
        setDevice=lambda index: current.__setitem__(0, index),
        streamIsCapturing=lambda stream: captured,
        deviceSynchronize=lambda: waited.append(current[0]),
        CUDARuntimeError=RuntimeError,
    )
    monkeypatch.setattr(launch, "runtime", lambda: fake)
    provider = CudaProvider()
    monkeypatch.setattr(provider, "count", lambda: count)
    provider.let_others_come(Device("cuda", 1), 7)
    assert (waited, current) == ([1] * waits, [0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64", "uint8"])
def test_copies_there_and_back(dtype: str) -> None:
    host = np.random.default_rng(0).integers(0, 100, (7, 33)).astype(formats.dtype(dtype).numpy)
    view = put(host, GPU)
    again = arrays.empty(view.shape, view.dtype, GPU)
    arrays.copy(again, view)
    assert view.ptr % 256 == 0
    assert_same_bits("copy", get(again), host)
    assert_same_bits("zeros", get(arrays.zeros((5, 3), view.dtype, GPU)), np.zeros((5, 3), host.dtype))


@pytest.mark.gpu
def test_a_copy_to_the_device_does_not_need_its_source_afterwards() -> None:
    host = np.arange(1 << 20, dtype=np.float32)
    view = arrays.to(arrays.as_view(host), GPU)
    host[:] = -1
    assert_same_bits("copy", get(view), np.arange(1 << 20, dtype=np.float32))


@pytest.mark.parametrize("dtype", [uint8, formats.bfloat16, float32])
def test_copies_of_arrays_that_lie_densely_are_kernels(
    monkeypatch: pytest.MonkeyPatch, dtype: formats.DType
) -> None:
    """Segments of a weight may lie side by side in allocations of their own: a kernel reads across,
    cudaMemcpyAsync refuses."""
    launched: list[str] = []
    monkeypatch.setattr(launch, "kernel", lambda source, name, index, **values: name)
    monkeypatch.setattr(launch, "launch", lambda name, *how: launched.append(name))
    x, y = ArrayView(4096, (32, 48), dtype, GPU), ArrayView(8192, (32, 48), dtype, GPU)
    elementwise.copy(x, y, 0)
    assert launched == [f"move{dtype.itemsize}"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [uint8, float32, int64])
def test_an_array_over_two_allocations_is_copied(dtype: formats.DType) -> None:
    """Weights that lie side by side are one array for kernels, where they are several allocations too."""
    calls, nbytes = launch.runtime(), 64 << 20
    pieces = sorted(calls.malloc(nbytes) for _ in range(16))
    try:
        start = next(a for a, b in itertools.pairwise(pieces) if b == a + nbytes)
        half = nbytes // dtype.itemsize
        parts = [ArrayView(start + i * nbytes, (half,), dtype, GPU, None) for i in range(2)]
        for i, part in enumerate(parts):
            arrays.copy(part, put(np.full(half, i + 1, dtype.numpy), GPU))
        both = ArrayView(start, (2 * half,), dtype, GPU, None)
        out = arrays.empty(both.shape, dtype, GPU)
        dispatch.kernels(GPU).copy(both, out, arrays.current_stream(GPU))
        found = get(out)
        assert (found[:half] == 1).all()
        assert (found[half:] == 2).all()
    finally:
        for piece in pieces:
            calls.free(piece)


@pytest.mark.gpu
def test_native_arrays_share_memory_and_keep_it_alive() -> None:
    import cupy

    view = put(np.arange(12, dtype=np.float32).reshape(3, 4), GPU)
    transposed = arrays.provider(GPU).native(view.transpose(1, 0))
    assert isinstance(transposed, cupy.ndarray)
    assert (transposed.data.ptr, transposed.shape, transposed.strides) == (view.ptr, (4, 3), (4, 16))
    address, owner = view.ptr, transposed
    del view
    others = [arrays.zeros((3, 4), float32, GPU).ptr for _ in range(8)]
    assert address not in others
    assert float(owner[3, 2]) == 11
    assert arrays.provider(GPU).native(put(np.ones(3, ml_dtypes.bfloat16), GPU)).dtype == ml_dtypes.bfloat16
    codes = arrays.provider(GPU).native(put(np.arange(4, dtype=np.uint8), GPU).view(formats.float8_e4m3fn))
    assert codes.dtype == np.uint8


@pytest.mark.gpu
def test_work_goes_to_the_current_stream_and_foreign_ones_can_wait() -> None:
    import cupy

    assert arrays.current_stream(GPU) == cupy.cuda.get_current_stream().ptr
    with cupy.cuda.Stream(non_blocking=True) as mine:
        assert arrays.current_stream(GPU) == mine.ptr
        theirs = cupy.cuda.Stream(non_blocking=True)
        source = cupy.arange(1 << 24, dtype=cupy.float32)
        for _ in range(20):
            source += 1
        arrays.provider(GPU).order_after(theirs.ptr, GPU)
    with theirs:
        assert float((source * 1)[5]) == 25.0
    for handle in (1, 2):
        arrays.provider(GPU).order_after(handle, GPU)


@pytest.mark.gpu
def test_launches_from_threads_keep_their_arguments_apart() -> None:
    n, count = 4096, 8
    kernel = launch.kernel("amax.cu", "amax_tensor", 0, T="f32")
    inputs = [put(np.full(n, i + 1, np.float32), GPU) for i in range(count)]
    outputs = [arrays.zeros((1,), float32, GPU) for _ in range(count)]
    arrays.synchronize(GPU)

    def work(i: int) -> None:
        for _ in range(50):
            launch.launch(kernel, 4, 256, (inputs[i].ptr, outputs[i].ptr, n), 0)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [float(get(out)[0]) for out in outputs] == [float(i + 1) for i in range(count)]


@pytest.mark.gpu
def test_refused_launches_say_what_was_wrong() -> None:
    kernel = launch.kernel("amax.cu", "amax_tensor", 0, T="f32")
    with pytest.raises(BackendError, match=r"args: got \(int, int\)"):
        launch.launch(kernel, 1, 256, (0, 0), 0)
    with pytest.raises(BackendError, match="CUDA_ERROR_INVALID_VALUE"):
        launch.launch(kernel, 1, 4096, (0, 0, 0), 0)
    launch.launch(kernel, 0, 256, (0, 0, 0), 0)  # no blocks, no launch


@pytest.mark.gpu
def test_launches_are_captured_in_a_graph() -> None:
    import cupy

    x, out = put(np.float32([3, -5, 2]), GPU), arrays.zeros((1,), float32, GPU)
    kernel = launch.kernel("amax.cu", "amax_tensor", 0, T="f32")
    arrays.synchronize(GPU)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        launch.launch(kernel, 1, 256, (x.ptr, out.ptr, 3), stream.ptr)
        graph = stream.end_capture()
        assert float(get(out)[0]) == 0.0
        graph.launch(stream)
        assert float(get(out)[0]) == 5.0


@pytest.mark.gpu
def test_views_move_between_host_and_device() -> None:
    view = put(np.arange(6, dtype=np.uint8), GPU)
    assert arrays.to(view, GPU) is view
    assert arrays.to(view, CPU).dtype is uint8
    assert view.__cuda_array_interface__["data"] == (view.ptr, False)
