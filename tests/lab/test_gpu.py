"""Kernels of one's own on a GPU: they run in the place of the engine's, forward and backward, and a wrong one
is found."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import arrays, cli, formats
from fp8kit.arrays import Device
from fp8kit.backends.cuda import launch
from fp8kit.lab import check, measure, native
from fp8kit.models import text
from fp8kit.models.presets import preset
from fp8kit.models.train import fp8_recipe, train
from fp8kit.raw_kernels import manifest

pytestmark = pytest.mark.gpu

GPU = Device("cuda", 0)
SOURCE = manifest.text("quantize.cu")
# the layers' cast, four times as large: codes two binades up, and still within the format
FOURFOLD = SOURCE.replace("? v[c] * scale : 0.0f", "? v[c] * scale * 4.0f : 0.0f")
LESS = SOURCE.replace("block_amax(job.amax, peak.amax(),", "block_amax(job.amax, 0.5f * peak.amax(),")
ADD = """#include "common.cuh"
extern "C" __global__ void add(const T* a, const T* b, T* out, i64 n, i64 period) {
  for (i64 i = first(); i < n; i += step())
    out[i] = from_float<T>(FACTOR * (to_float(a[i]) + to_float(b[i % period])));
}
"""
X = np.linspace(-3, 3, 12, dtype=np.float32).reshape(3, 4)


def added() -> np.ndarray[Any, Any]:
    return (fk.tensor(X, device=GPU) + fk.tensor(X, device=GPU)).numpy()


def layer_and_input() -> tuple[Any, Any]:
    fk.manual_seed(0)
    layer = fk.nn.Linear(64, 48, params_dtype="float32", device=GPU)
    return layer, fk.tensor(
        np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32), device=GPU, requires_grad=True
    )


def step(layer: Any, x: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """y and dx of a layer under FP8 with fresh scales."""
    with fk.autocast(recipe=fk.recipe.Float8CurrentScaling()):
        y = layer(x)
    x.grad = None
    y.backward(y.detach())
    return y.numpy(), x.grad.numpy()


def test_texts_nest_and_leave_no_trace() -> None:
    two, three = ADD.replace("FACTOR", "2.0f"), ADD.replace("FACTOR", "3.0f")
    with fk.override("add", two, verify=False) as outer:
        np.testing.assert_array_equal(added(), 4 * X)
        with fk.override("add", three):
            np.testing.assert_array_equal(added(), 6 * X)
        np.testing.assert_array_equal(added(), 4 * X)
    np.testing.assert_array_equal(added(), 2 * X)
    assert outer.calls == 2
    assert launch.here.launcher is None


def test_a_changed_kernel_changes_a_layer_forward_and_backward() -> None:
    assert SOURCE not in (FOURFOLD, LESS)
    layer, x = layer_and_input()
    y, dx = step(layer, x)
    with fk.override("quantize_transpose", SOURCE) as used:
        same = step(layer, x)
    assert used.calls == 3
    np.testing.assert_array_equal(same[0], y)
    np.testing.assert_array_equal(same[1], dx)
    with fk.override("quantize_transpose", FOURFOLD):
        other = step(layer, x)
    # saturation moves what is beyond a quarter of the largest; everything else is 4 x 4 as large
    assert np.median(np.abs(other[0] - layer.bias.numpy())) > 2 * np.median(np.abs(y - layer.bias.numpy()))
    assert not np.array_equal(other[1], dx)


@pytest.mark.parametrize(
    ("source", "output"), [(FOURFOLD, r"cast\.q"), (LESS, r"cast\.amax")], ids=["codes", "amax"]
)
def test_verify_stops_a_wrong_kernel(source: str, output: str) -> None:
    layer, x = layer_and_input()
    with fk.override("quantize_transpose", SOURCE, verify=True) as used:
        step(layer, x)
    assert used.calls == 3
    said = rf"override: quantize_transpose: output {output}: \d+ of \d+ differ, first at \("
    recipe = fk.recipe.DelayedScaling()
    with (
        fk.override("quantize_transpose", source, verify=True),
        fk.autocast(recipe=recipe),
        pytest.raises(fk.BackendError, match=said),
    ):
        layer(x)


def test_verify_lets_the_engine_through_a_training() -> None:
    """The fused kernels of a transformer, forward, backward and the optimiser's, against the reference call
    by call."""
    size, corpus = preset("tiny").with_steps(2), text.standard_library()

    def run() -> list[float]:
        return train(size, corpus, fp8_recipe(size), "run", GPU, 0, io.StringIO()).losses

    def through(original: Any, *args: Any) -> None:
        original(*args)

    with fk.deterministic():
        plain = run()
        for operation in (
            "norm_fwd",
            "norm_bwd",
            "act_fwd",
            "act_bwd",
            "quantize_transpose",
            "adamw_",
            "cross_entropy_bwd",
            "fp8_gemm",
        ):
            with fk.override(operation, through, verify=True):
                losses = run()
            assert losses == plain, operation


def test_python_functions_get_cupy_hostson_the_calls_stream() -> None:
    import cupy

    seen: list[tuple[Any, ...]] = []

    def add(a: Any, b: Any, out: Any, stream: int) -> None:
        seen.append(
            (type(native(a)).__module__.partition(".")[0], cupy.cuda.get_current_stream().ptr == stream)
        )
        native(out)[...] = 5 * native(a)

    with fk.override("add", add):
        np.testing.assert_array_equal(added(), 5 * X)
        with cupy.cuda.Stream(non_blocking=True):
            np.testing.assert_array_equal(added(), 5 * X)
    assert seen == [("cupy", True)] * 2


def test_a_cupy_kernel_takes_the_place_of_one_function() -> None:
    import cupy

    code = r"""extern "C" __global__ void mine(const float* a, const float* b, float* out, long long n,
                                                long long period) {
      for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        out[i] = a[i] - 4.0f * b[i % period];
    }"""
    with fk.override("add", cupy.RawKernel(code, "mine")) as used:
        np.testing.assert_array_equal(added(), X - 4 * X)  # 4 x is exact: fused or not, one rounding
    assert used.calls == 1
    with (
        fk.override("add", cupy.RawKernel(code, "mine"), verify=True),
        pytest.raises(fk.BackendError, match=r"output out: .* first at"),
    ):
        added()


def test_a_numba_kernel_takes_the_place_of_one_function() -> None:
    """Where numba finds its compiler's library on this machine; where not, the call says so."""
    cuda = pytest.importorskip("numba.cuda")

    @cuda.jit
    def mine(a: Any, b: Any, out: Any, n: Any, period: Any) -> None:
        for i in range(cuda.grid(1), n, cuda.gridsize(1)):
            out[i] = a[i] + 4 * b[i % period]

    hosts = [np.ones(4, np.float32) for _ in range(3)]
    try:
        mine[1, 32](*(cuda.to_device(array) for array in hosts), 4, 4)
        works = True
    except Exception as error:  # whatever a numba without its compiler's library raises
        works, said = False, type(error)
    with fk.override("add", mine):
        if works:
            np.testing.assert_array_equal(added(), X + 4 * X)
        else:
            with pytest.raises(said):
                added()


def test_the_torch_frontend_uses_it_forward_and_backward() -> None:
    torch = pytest.importorskip("torch")
    te = pytest.importorskip("fp8kit_torch")
    torch.manual_seed(0)
    layer = te.Linear(64, 48, params_dtype=torch.float32, device="cuda")
    x = torch.randn(32, 64, device="cuda", requires_grad=True)
    with fk.override("quantize_transpose", SOURCE, verify=True) as used:
        with te.autocast(enabled=True, recipe=fk.recipe.DelayedScaling()):
            y = layer(x)
        forward = used.calls
        y.sum().backward()  # on a thread of torch's
        torch.cuda.synchronize()
    assert (forward, used.calls) == (2, 3)


def test_a_file_is_checked_and_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right, wrong = tmp_path / "quantize.cu", tmp_path / "wrong.cu"
    right.write_text(SOURCE)
    wrong.write_text(FOURFOLD)
    assert cli.main(["kernels", "check", str(right), "--only", "33x65"]) == 0
    assert "all right" in capsys.readouterr().out
    assert cli.main(["kernels", "check", str(wrong), "--only", "33x65"]) == 1
    assert "first at (" in capsys.readouterr().out
    assert cli.main(["kernels", "diff", "quantize.cu", str(wrong)]) == 1
    said = capsys.readouterr().out
    assert "+    for (int c = 0; c < 8; ++c) v[c] = WHOLE ||" in said
    assert "A: quantize_transpose: cuda.quantize_transpose" in said
    assert "B: quantize_transpose: override.quantize_transpose" in said
    assert "WRONG" in said
    assert cli.main(["kernels", "watch", str(right), "--rounds", "1"]) == 0
    assert "% of the speed of a copy" in capsys.readouterr().out


@pytest.mark.parametrize("operation", ["quantize_transpose", "norm_fwd", "add", "adamw_"])
def test_what_moves_memory_is_timed_against_a_copy(operation: str) -> None:
    found = measure(operation, GPU)
    assert found.implementation == f"cuda.{operation}"
    assert found.share == pytest.approx(found.ceiling / found.seconds)
    # Bounds that also hold where other processes use the GPU: no copy is faster than the memory of any GPU of
    # today (8 TB/s, B200's data sheet), and a kernel moves less than half again as much, from the last cache.
    assert 0 < found.nbytes / found.ceiling < 8e12
    assert 0 < found.nbytes / found.seconds < 12e12
    assert check(operation, GPU).failures == []


def test_every_operation_can_be_timed() -> None:
    from fp8kit.lab.timing import TIMED

    for operation in TIMED:
        assert measure(operation, GPU, (256, 512), formats.bfloat16).seconds > 0, operation
    arrays.synchronize(GPU)
