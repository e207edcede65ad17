"""``fk.override`` with kernels, as far as it goes without a GPU: which source a text stands for, what is
compiled, what is launched."""

from __future__ import annotations

import dataclasses
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fp8kit as fk
from fp8kit.arrays import ArrayView, Device
from fp8kit.backends import policy
from fp8kit.backends.cuda import launch, substitute
from fp8kit.backends.cuda.compile import cache_key, compile_cubin, compile_ptx
from fp8kit.errors import BackendError
from fp8kit.formats import bfloat16, float32
from fp8kit.lab.overrides import read
from fp8kit.raw_kernels import manifest

GPU = Device("cuda", 0)
DROP_PATH = manifest.text("drop_path.cu")


def test_a_text_is_read_by_the_manifests_rules() -> None:
    text = '#include "common.cuh"\n' + DROP_PATH.partition("\n")[2]  # without its first comment line
    unit = manifest.foreign(text, "mine.cu")
    assert unit.headers[0][0] == "common.cuh"
    assert manifest.replaced_by(unit).name == "drop_path.cu"
    entry = manifest.stands_for(unit, manifest.source("drop_path.cu"))
    assert (entry.name, entry.functions, entry.variants) == (
        "mine.cu",
        ("drop_path",),
        manifest.source("drop_path.cu").variants,
    )


HEAD = '#include "common.cuh"\nextern "C" __global__ void '
REFUSED = {
    (
        "drop_path",
        "int x;",
    ): r"got override\.cu, which defines no function, expected a source that .* drop_path of drop_path\.cu",
    (
        "drop_path",
        HEAD + "droppath(T* x) {}",
    ): r"which defines droppath, expected .*drop_path of drop_path\.cu",
    (
        "dropout_bwd",
        HEAD + "column_sums(T* x) {}",
    ): r"override\.cu without sum_partials, expected every function that dropout_bwd ta",
    (
        "norm_bwd",
        HEAD + "norm_bwd(T* x) {}\n" + HEAD + "sum_partials(T* x) {}",
    ): r"expected .* norm_bwd .*; or norm_bwd_any .*; or sum_pa",
    (
        "rope_fwd",
        HEAD + "rope(T* x, i64 n) {}",
    ): r"rope: the parameters are not those that it has in rope\.cu: '",
    (
        "add",
        HEAD + "add(T* a, T* b, T* out, i64 n, i64 m) {}\n" + HEAD + "plus(T* x) {}",
    ): r"function 'plus' is not in elementwise\.cu",
    (
        "add",
        '#include "nowhere.cuh"\n' + HEAD + "add() {}",
    ): r"header 'nowhere\.cuh' is neither in a folder of its own nor among fp8kit's",
    ("add", HEAD + "add(float n, i64 m) {}"): r"'float n' is neither a pointer, i64, u64 nor f64",
    ("gemm_workspace", HEAD + "add() {}"): r"gemm_workspace launches none",
    ("add", "mine.cu"): r"'mine\.cu' is a file's name, expected its text, or a Path",
    ("add", Path("no/such/file.cu")): r"No such file",
}


@pytest.mark.parametrize(
    ("operation", "text"), REFUSED, ids=[f"{op}-{i}" for i, (op, _) in enumerate(REFUSED)]
)
def test_what_does_not_fit_is_refused_by_name_before_anything_runs(operation: str, text: Any) -> None:
    with pytest.raises(fk.BackendError, match="(?s)^override: .*" + REFUSED[operation, text]):
        fk.override(operation, text)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("f64 factor, ", "", "'f64 factor', parameter 11 there, is missing"),
        ("i64 inner,\n", "i64 inner, f64 more,\n", "parameter 9, 'f64 more', is one too many"),
        (
            "f64 factor",
            "i64 factor",
            "parameter 11, 'i64 factor', is a pointer or a 64-bit integer, expected a double",
        ),
        ("f64 factor, const i64* part", "f64 size", "'const i64* part', parameter 12 there, is missing"),
    ],
)
def test_parameters_that_do_not_fit_are_named(old: str, new: str, said: str) -> None:
    """Other names are no fault, also beside one that is missing."""
    like = manifest.source("drop_path.cu")
    assert DROP_PATH.count(old) == 1
    unit = manifest.foreign(DROP_PATH.replace(old, new), "mine.cu")
    begin = "mine.cu: drop_path: the parameters are not those that it has in drop_path.cu: "
    with pytest.raises(ValueError, match=f"^{re.escape(begin + said)}( \\('f64 factor' there\\))?$"):
        manifest.stands_for(unit, like)
    renamed = DROP_PATH.replace("f64 factor, const", "f64 size, const")
    assert manifest.stands_for(manifest.foreign(renamed, "mine.cu"), like).functions == ("drop_path",)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "nope.cu"
    with pytest.raises(BackendError, match=rf"implementation: got {path}, expected .*No such file"):
        fk.override("drop_path", path)


def test_every_source_stands_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for entry in manifest.sources():
        unit = manifest.foreign(manifest.text(entry.name), entry.name)
        assert unit == manifest.unit(entry.name)
        assert manifest.replaced_by(unit) == entry
    dropout = manifest.source("dropout.cu")
    monkeypatch.setattr(manifest, "sources", lambda: (dropout, dataclasses.replace(dropout, name="other.cu")))
    with pytest.raises(ValueError, match=r"could stand for dropout\.cu or other\.cu"):
        manifest.replaced_by(manifest.foreign(HEAD + "column_sums(T* x) {}"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FP8KIT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def test_a_text_is_compiled_and_its_edits_are_never_stale(cache: Path) -> None:
    defines, arch = manifest.defines(T="bf16"), "sm_90a"
    (cache / "mine.cuh").write_text("#define FACTOR 2.0f\n")
    path = cache / "mine.cu"
    path.write_text(DROP_PATH + '#include "mine.cuh"\n')
    first = read(path)
    made = compile_cubin("mine.cu", defines, arch, first)
    assert made.path.name.startswith("mine-")
    assert set(made.resources) == {"drop_path"}
    keys = [cache_key("mine.cu", defines, arch, first)]
    (cache / "mine.cuh").write_text("#define FACTOR 3.0f\n")
    keys.append(cache_key("mine.cu", defines, arch, read(path)))
    path.write_text(DROP_PATH + '#include "mine.cuh"\n// changed\n')
    keys.append(cache_key("mine.cu", defines, arch, read(path)))
    keys.append(cache_key("drop_path.cu", defines, arch))
    assert len(set(keys)) == 4
    assert ".entry drop_path" in compile_ptx("mine.cu", defines, arch, first)
    with pytest.raises(fk.BackendError, match=r"(?s)mine\.cu .*sm_90a failed.*no_such_name"):
        compile_cubin(
            "mine.cu", defines, arch, manifest.foreign(DROP_PATH.replace("rng", "no_such_name"), "mine.cu")
        )


class Raw:
    """Stands for CuPy's RawKernel, and for the function behind it."""

    num_regs, local_size_bytes, shared_size_bytes, ptr = 12, 0, 0, 1 << 44

    def __init__(self) -> None:
        self.kernel = self


class Driver:
    """A driver without a device. ``texts``: what was loaded, by text, "" for the engine's own; ``launches``:
    what reached the driver."""

    def __init__(self) -> None:
        self.texts: dict[str, Raw] = {}
        self.launches: list[tuple[Any, ...]] = []

    def module(self, source: str, defines: Any, device: int, unit: Any) -> tuple[Any, dict[str, Any]]:
        raw = self.texts.setdefault("" if unit is None else unit.content, Raw())
        return SimpleNamespace(get_function=lambda name: raw), {}

    def launch(
        self, kernel: launch.Kernel, grid: Any, block: Any, args: Any, stream: int, shared: int = 0
    ) -> None:
        """The engine's launch, as far as the driver."""
        if launch.here.launcher is not None:
            launch.here.launcher(kernel, grid, block, args, stream, shared)
            return
        kernel.load()
        assert len(args) == len(kernel.parameters)
        self.launches.append((kernel.raw, grid, block, tuple(args), stream, shared))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    found = Driver()
    monkeypatch.setattr(launch, "_module", found.module)
    monkeypatch.setattr(launch, "_launches_early", lambda device: False)
    monkeypatch.setattr(launch, "launch", found.launch)
    monkeypatch.setattr(
        launch, "runtime", lambda: SimpleNamespace(getDevice=lambda: 0, deviceGetAttribute=lambda *a: 132)
    )
    launch.kernel.cache_clear()
    yield found
    launch.kernel.cache_clear()


def there(*shape: int, dtype: Any = float32, at: int = 1 << 20) -> ArrayView:
    return ArrayView(at, shape, dtype, GPU)


def overriding(operation: str) -> Any:
    """The innermost override's function."""
    return dict(policy.get_policy().overrides)[operation].fn


TEXT = HEAD + "add(const T* a, const T* b, T* out, i64 n, i64 period) {\n  out[first()] = a[first()];\n}\n"


def test_the_engine_launches_the_text_with_its_own_grid_and_arguments(driver: Driver) -> None:
    from fp8kit.backends.cuda.elementwise import add

    views = [there(3, 5000, dtype=bfloat16, at=1 << bits) for bits in (20, 24, 28)]
    with fk.override("add", TEXT) as used:
        overriding("add")(*views, 7)
        assert launch.here.launcher is None  # only while the call runs
    add(*views, 7)
    ours, theirs = driver.launches
    assert (ours[0], theirs[0]) == (driver.texts[TEXT], driver.texts[""])
    assert ours[1:] == theirs[1:] == (8, 256, (1 << 20, 1 << 24, 1 << 28, 15000, 15000), 7, 0)
    assert used.calls == 1


@pytest.mark.parametrize(
    ("defines", "compiled", "calls"),
    [
        ("", {"T=f32", "T=bf16"}, 2),
        ("T=f32:f16", {"T=f16", "T=bf16"}, 1),
        ("period=8", {"T=f32,period=8", "T=bf16,period=8"}, 2),
        ("T=bf16,period=8", {"T=f32", "T=bf16,period=8"}, 1),
        ("T=f16", {"T=f32", "T=bf16"}, 0),
    ],
)
def test_a_text_is_compiled_with_other_defines_where_they_are_asked_for(
    defines: str, compiled: set[str], calls: int, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the launches that they are asked for are counted."""
    made = []

    def module(source: str, variant: manifest.Defines, device: int, unit: Any) -> Any:
        made.append(manifest.said(variant))
        return driver.module(source, variant, device, unit)

    monkeypatch.setattr(launch, "_module", module)
    with fk.override("add", TEXT, defines=defines) as used:
        for dtype in (float32, bfloat16):
            overriding("add")(*(there(8, dtype=dtype, at=1 << bits) for bits in (20, 24, 28)), 0)
    assert (set(made), used.calls) == (compiled, calls)


BAD_DEFINES = {
    "T": r"defines: got 'T', expected defines of elementwise\.cu, such as T=f32",
    "T=f64:f16": "got 'T=f64:f16'",
    "T=tf32": "got 'T=tf32', expected T to be one of f32, bf16, f16, which the source lists",
    "factor=3": r"got 'factor=3', expected .* such as T=f32, or what override\.cu names",
    "T=f16,T=f32": r"no variant has T=f16,T=f32",
}


@pytest.mark.parametrize("defines", BAD_DEFINES)
def test_other_defines_that_no_variant_has_are_refused(defines: str) -> None:
    with pytest.raises(BackendError, match="override: .*" + BAD_DEFINES[defines]):
        fk.override("add", TEXT, defines=defines)


def test_only_a_source_takes_defines() -> None:
    with pytest.raises(BackendError, match=r"defines: got 'T=f16', expected .* beside a CUDA source"):
        fk.override("add", lambda a, b, out, stream: None, defines="T=f16")
    with pytest.raises(BackendError, match=r"defines: got \{'T': 'f16'\}, expected a text"):
        fk.override("add", TEXT, defines={"T": "f16"})  # type: ignore[arg-type]


# of mma_gemm.cu: what cannot be -> the compiler's words
CANNOT_BE = {
    "PROMOTE=128:64": "PROMOTE, codes of a sum that is promoted, is 0 or 128",
    "BM=128:48": "BM, rows of a tile, is a multiple of 32: two warps",
    "SCALES=lines_lines,PROMOTE=128:0": "SCALES of blocks are those of 128 codes: PROMOTE is 128",
}


@pytest.mark.parametrize("defines", CANNOT_BE)
def test_defines_that_do_not_go_together_are_told_by_the_compiler(defines: str, cache: Path) -> None:
    entry = manifest.source("mma_gemm.cu")
    variant = manifest.asked(defines, entry).all_of(entry.variants)[0]
    with pytest.raises(BackendError, match=CANNOT_BE[defines]):
        compile_cubin("mma_gemm.cu", variant, "sm_89")


def test_other_functions_and_other_threads_keep_the_engines_kernels(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = substitute.of_text(manifest.foreign(TEXT), "elementwise.cu")
    notes: list[None] = []

    def start(function: str) -> None:
        kernel = launch.kernel("elementwise.cu", function, 0, T="f32")
        launch.launch(kernel, 1, 32, range(len(kernel.parameters)), 0)

    def body(a: Any, b: Any, out: Any, stream: int) -> None:
        start("add")
        thread = threading.Thread(target=start, args=("add",))
        thread.start()
        thread.join()
        start("rng_next")
        start("add")

    monkeypatch.setattr(substitute.cuda, "implementation", lambda operation, source: body)
    replaced = substitute.engine_with("add", table, lambda defines: notes.append(None))
    with launch.launching_by(lambda *arguments: pytest.fail("another block's launcher")):
        replaced(None, None, None, 0)
    ours, own = driver.texts[TEXT], driver.texts[""]
    assert [raw for raw, *_ in driver.launches] == [ours, own, own, ours]
    assert len(notes) == 2
    assert launch.here.launcher is None


class RawKernel(Raw):
    """As CuPy's by its name."""


RawKernel.__module__ = "cupy._core.raw"


class CUDADispatcher:
    """As numba's by its name: keeps how it was configured and called."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, configured: tuple[Any, ...]) -> Any:
        return lambda *args: self.launches.append((configured, args))


CUDADispatcher.__module__ = "numba.cuda.dispatcher"


def test_a_cupy_kernel_is_launched_in_the_place_of_one_function(driver: Driver) -> None:
    kernel = RawKernel()
    with fk.override("add", kernel) as used:
        overriding("add")(there(40), there(8), there(40), 3)
    assert driver.launches == [(kernel, 1, 256, (1 << 20, 1 << 20, 1 << 20, 40, 8), 3, 0)]
    assert (used.calls, driver.texts) == (1, {})
    with fk.override("copy", kernel, function="move4"):
        overriding("copy")(ArrayView(1 << 20, (4, 6), float32, GPU, None, (1, 4)), there(4, 6), 3)
    assert driver.launches[1][0] is kernel
    assert driver.launches[1][3][2] == 24
    for operation, function, said in (
        ("copy", None, "got None, expected one of convert, move1"),
        ("add", "plus", "got 'plus', expected one of add"),
        ("add", 3, "got 3, expected one of add"),
    ):
        with pytest.raises(fk.BackendError, match=said):
            fk.override(operation, kernel, function=function)  # type: ignore[arg-type]


def test_a_numba_kernel_gets_arrays_for_pointers(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = CUDADispatcher()
    monkeypatch.setitem(
        sys.modules, "numba.cuda", SimpleNamespace(external_stream=lambda ptr: ("stream", ptr))
    )
    with fk.override("sum_rows", kernel, function="column_sums"):
        overriding("sum_rows")(there(64, 32, dtype=bfloat16), there(32, dtype=bfloat16), there(1 << 16), 9)
    (((grid, block, stream, shared), args),) = kernel.launches
    assert (block, stream, shared) == ((32, 8), ("stream", 9), 0)
    assert len(grid) == 1
    assert len(args) == len(manifest.source("dropout.cu").parameters["column_sums"])
    interface = args[0].__cuda_array_interface__
    assert (interface["typestr"], interface["data"], interface["version"]) == ("<u2", (1 << 20, False), 2)
    assert args[1].__cuda_array_interface__["shape"] == (0,)  # a null pointer
    assert args[2].__cuda_array_interface__["typestr"] == "<f4"
    assert args[4:6] == (64, 32)
    assert isinstance(args[-2], float)
    assert len(driver.launches) == 1  # of the sums of those sums, the engine's own
    with pytest.raises(fk.BackendError, match="adamw, which takes a structure by value"):
        fk.override("adamw_", kernel, function="adamw")


def test_numbas_and_cupys_own_kernels_are_known() -> None:
    from fp8kit.lab.overrides import _kind

    cupy, numba = pytest.importorskip("cupy"), pytest.importorskip("numba.cuda")
    assert _kind(cupy.RawKernel('extern "C" __global__ void f() {}', "f")) == "cupy"
    assert _kind(numba.jit(lambda x: None)) == "numba"
    assert _kind(lambda x: None) == "python"


def test_a_raw_stream_becomes_cupys_without_what_cupy_deprecates() -> None:
    pytest.importorskip("cupy")
    assert substitute.as_stream(1 << 40).ptr == 1 << 40
    assert substitute.as_stream(0).ptr == 0
