"""The compile step: what the cache's key covers, hits, concurrent writers, and errors that carry the
compiler's log."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fp8kit import cache
from fp8kit.backends.cuda import compile as kernel_compiler
from fp8kit.backends.cuda.compile import arch_of, cache_key, compile_cubin, parse_resources
from fp8kit.errors import BackendError
from fp8kit.raw_kernels import manifest

TINY = (
    '// functions: f\n// variants: N=1,2\n#include "b.cuh"\n'
    'extern "C" __global__ void f(float* x) { x[threadIdx.x] = N * two(); }\n'
)
HEADER = "static __device__ float two() { return 2.0f; }\n"
ONE = manifest.defines(N="1")


@pytest.fixture
def tiny(sources: Path) -> Path:
    (sources / "tiny.cu").write_text(TINY)
    (sources / "b.cuh").write_text(HEADER)
    return sources


def test_a_second_call_takes_the_kept_cubin(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_cubin("tiny.cu", ONE, "sm_90a")
    assert first.path.read_bytes()[:4] == b"\x7fELF"

    def refuse(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(kernel_compiler, "_compile", refuse)
    assert compile_cubin("tiny.cu", ONE, "sm_90a") == first


def _flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def _a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "more").write_text("")


def _a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES = {
    "emptied": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "one bit": _flipped,
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
    "deep JSON": lambda path: path.write_text("[" * 200_000),
    "JSON of another shape": lambda path: path.write_text('{"log": 3, "resources": [1]}'),
    "other notes": lambda path: path.write_bytes(cache.seal({"cubin": "0" * 64, "log": "", "resources": {}})),
    "a folder": _a_folder,
    "a pipe": _a_pipe,
}


@pytest.mark.parametrize("kind", [".cubin", ".json"])
@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_entry_is_compiled_again(tiny: Path, how: str, kind: str) -> None:
    """Found by its digest, and put right for the next reader."""
    first = compile_cubin("tiny.cu", ONE, "sm_90a")
    whole = first.path.read_bytes()
    DAMAGES[how](first.path.with_suffix(kind))
    again = compile_cubin("tiny.cu", ONE, "sm_90a")
    assert (again.path, again.resources) == (first.path, first.resources)
    assert first.path.read_bytes() == whole
    assert kernel_compiler._kept(first.path.stem) == again


def test_the_key_covers_source_header_defines_architecture_options_and_version(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [cache_key("tiny.cu", defines, "sm_90a") for defines in (ONE, manifest.defines(N="2"))]
    keys.append(cache_key("tiny.cu", ONE, "sm_89"))
    (tiny / "b.cuh").write_text(HEADER + "\n")
    keys.append(cache_key("tiny.cu", ONE, "sm_90a"))
    (tiny / "tiny.cu").write_text(TINY + "\n")
    keys.append(cache_key("tiny.cu", ONE, "sm_90a"))
    monkeypatch.setattr(kernel_compiler, "OPTIONS", (*kernel_compiler.OPTIONS, "-lineinfo"))
    keys.append(cache_key("tiny.cu", ONE, "sm_90a"))
    monkeypatch.setattr(kernel_compiler, "nvrtc_version", lambda: (99, 0))
    keys.append(cache_key("tiny.cu", ONE, "sm_90a"))
    assert len(set(keys)) == len(keys)
    assert cache_key("tiny.cu", ONE, "sm_90a") == keys[-1]


def test_threads_may_compile_the_same_kernel_at_once(tiny: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        kernels = list(pool.map(lambda _: compile_cubin("tiny.cu", ONE, "sm_90a"), range(4)))
    assert len({kernel.path for kernel in kernels}) == 1
    assert sorted(path.suffix for path in kernels[0].path.parent.iterdir()) == [".cubin", ".json"]


@pytest.mark.combinations
def test_processes_may_compile_the_same_kernel_at_once() -> None:
    code = (
        "from fp8kit.backends.cuda.compile import compile_cubin; "
        "print(compile_cubin('scales.cu', (('STATES', '8'),), 'sm_90a').path)"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code], env=os.environ, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    paths = [process.communicate(timeout=120)[0].strip() for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert paths[0] == paths[1]
    assert sorted(path.suffix for path in Path(paths[0]).parent.iterdir()) == [".cubin", ".json"]


def test_an_error_carries_the_whole_log(sources: Path) -> None:
    (sources / "bad.cu").write_text(
        '// functions: f\nextern "C" __global__ void f() { undeclared_name(); another_one(); }\n'
    )
    with pytest.raises(BackendError, match=r"(?s)bad\.cu.*sm_90a.*undeclared_name.*another_one"):
        compile_cubin("bad.cu", (), "sm_90a")


@pytest.mark.parametrize("why", ["cannot be written", "is not used"])
def test_without_a_cache_kernels_last_for_the_process(
    why: str, tiny: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "other"
    if why == "is not used":
        folder.mkdir()
        folder.chmod(0o777)
    else:
        folder.write_text("")
    monkeypatch.setenv("FP8KIT_CACHE_DIR", str(folder))
    first = compile_cubin("tiny.cu", ONE, "sm_90a")
    assert first.path.read_bytes()[:4] == b"\x7fELF"
    assert folder not in first.path.parents
    assert compile_cubin("tiny.cu", ONE, "sm_90a") == first
    assert [why in record.message for record in caplog.records] == [True]
    assert "FP8KIT_CACHE_DIR" in caplog.text
    with pytest.raises(BackendError, match=r"warmup: cache folder: got .*other/kernels', expected a folder"):
        cache.want("warmup", "kernels")


def test_resources_are_read_from_the_log(sources: Path) -> None:
    spilling = "float a[256]; for (int i = 0; i < 256; ++i) a[i] = x[i * n]; x[0] = a[n]; x[1] = a[n + 1];"
    (sources / "s.cu").write_text(
        '// functions: f, g\nextern "C" __global__ void f(float* x, long long n) {'
        " __shared__ float s[32]; s[threadIdx.x] = x[n];"
        ' __syncthreads(); x[0] = s[n]; }\nextern "C" __global__ void g(float* x, int n) { '
        + spilling
        + " }\n"
    )
    found = parse_resources(kernel_compiler._compile("s.cu", (), "sm_90a")[1])
    assert found["f"].shared == 128
    assert found["f"].stack == 0
    assert found["f"].registers > 0
    assert found["g"].stack >= 1024


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((12, 0), "sm_120a")],
)
def test_architectures(capability: tuple[int, int], arch: str) -> None:
    assert arch_of(capability) == arch


def test_too_old_a_device_is_refused() -> None:
    with pytest.raises(BackendError, match=r"got compute capability 7\.5, expected at least 8\.0"):
        arch_of((7, 5))


def test_an_empty_log_leaves_pythons_own_bytes_alone() -> None:
    def fill(out: bytes) -> None:
        raise AssertionError(out)  # NVRTC would write its zero into the only b" " there is

    assert kernel_compiler._text(1, fill) == ""
    assert kernel_compiler._text(3, lambda out: None) == "   "
