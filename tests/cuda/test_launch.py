"""Launching: what reaches the driver, byte by byte, read back by a stand-in for it."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from fp8kit.backends.cuda import launch, recorded
from fp8kit.errors import BackendError
from fp8kit.raw_kernels import manifest
from tests.support.cuda_libraries import EX, HANDLE, fake


def test_the_configuration_and_every_kind_of_number_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, driver = fake("qqdqdq", monkeypatch)
    launch.launch(kernel, (3, 2), 128, (1 << 40, -5, 0.75, True, 1, np.int32(7)), 99, 1024)
    launch.launch(kernel, 2**31 - 1, (32, 4, 2), (0, 2**62, np.float32(0.1), False, -0.0, 1), 1 << 47)
    first, second = driver.launches
    assert first[:4] == ((3, 2, 1), (128, 1, 1), 1024, 99)
    assert b"".join(first[4:]) == struct.pack("=qqdqdq", 1 << 40, -5, 0.75, 1, 1.0, 7)
    assert second[:4] == ((2**31 - 1, 1, 1), (32, 4, 2), 0, 1 << 47)
    assert b"".join(second[4:]) == struct.pack("=qqdqdq", 0, 2**62, float(np.float32(0.1)), 0, -0.0, 1)


@pytest.mark.parametrize(
    "parameters", sorted({codes for source in manifest.sources() for codes in source.parameters.values()})
)
def test_every_parameter_list_of_the_sources(parameters: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytes(np.random.default_rng(5).integers(0, 256, 496, np.uint8))
    kernel, driver = fake(parameters, monkeypatch, len(content))
    values = [{"q": 1000 + i, "d": i + 0.5, "s": content}[code] for i, code in enumerate(parameters)]
    launch.launch(kernel, 1, 32, values, 0)
    layout = "=" + parameters.replace("s", f"{len(content)}s")
    assert b"".join(driver.launches[0][4:]) == struct.pack(layout, *values)
    if parameters.endswith("s"):
        assert driver.addresses[-1] % 16 == 0


@pytest.mark.parametrize("size", [8, 23, 48, 4096, 32000])
@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_a_structure_by_value_of_any_size_lies_at_16_bytes(
    before: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, driver = fake("q" * before + "s", monkeypatch, size)
    for fill in (b"a", b"b"):
        launch.launch(kernel, 1, 32, (*range(before), fill * size), 0)
        assert driver.launches[-1][-1] == fill * size
        assert driver.addresses[-1] % 16 == 0


def test_a_kernel_that_waits_for_the_former_is_launched_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only it: the next launch from the same memory has no attribute."""
    kernel, driver = fake("q", monkeypatch, early=True)
    launch.launch(kernel, 1, 32, (1,), 0)
    assert driver.attributes == [(6, 1)]  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, allowed
    kernel.early = False
    launch.launch(kernel, 1, 32, (1,), 0)
    assert driver.attributes == []


@pytest.mark.parametrize(
    ("capability", "driver", "early"), [((9, 0), 13000, True), ((8, 9), 13000, False), ((9, 0), 12020, False)]
)
def test_early_launches_need_the_device_and_the_driver(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], driver: int, early: bool
) -> None:
    monkeypatch.setattr(launch, "capability", lambda device: capability)
    monkeypatch.setattr(launch, "runtime", lambda: types.SimpleNamespace(driverGetVersion=lambda: driver))
    assert launch._launches_early.__wrapped__(0) is early


def test_a_grid_of_no_blocks_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, driver = fake("q", monkeypatch)
    launch.launch(kernel, (0, 4), 32, (1,), 0)
    launch.launch(kernel, 4, (32, 0), (1,), 0)
    assert driver.launches == []


@pytest.mark.parametrize(
    "args",
    [(1, 2), (1, 2, 0.5, 4, 5), (1, 0.5, 0.5, 4), ("x", 2, 0.5, 4), (1, 2, None, 4), (1, 2, b"12345678", 4)],
)
def test_arguments_that_do_not_fit_are_refused(
    args: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, driver = fake("qqdq", monkeypatch)
    with pytest.raises(BackendError, match=r"launch of fake: args: got \(.*\), expected parameters 'qqdq'"):
        launch.launch(kernel, 1, 32, args, 0)
    assert driver.launches == []


@pytest.mark.parametrize("args", [(), (1,), (1, 2), (b"1", 2), (1, b"1" * 33000)])
def test_structures_that_do_not_fit_are_refused(
    args: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BackendError, match="launch of fake: args"):
        launch.launch(fake("qs", monkeypatch, 8)[0], 1, 32, args, 0)


def test_a_grid_beyond_32_bits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendError, match="launch of fake: grid, block"):
        launch.launch(fake("q", monkeypatch)[0], 2**32, 32, (1,), 0)


def test_what_the_driver_refuses_is_said_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, _ = fake("q", monkeypatch, status=1)

    def says(text: bytes) -> Any:
        def ask(status: int, out: Any) -> int:
            out._obj.value = text
            return 0

        return ask

    names = types.SimpleNamespace(
        cuGetErrorName=says(b"CUDA_ERROR_INVALID_VALUE"), cuGetErrorString=says(b"invalid argument")
    )
    monkeypatch.setattr(launch, "driver", lambda: names)
    with pytest.raises(
        BackendError,
        match=r"launch of fake: CUDA_ERROR_INVALID_VALUE: invalid argument \(grid \(3, 1, 1\), block",
    ):
        launch.launch(kernel, 3, 32, (1,), 0)


def test_much_shared_memory_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, driver = fake("q", monkeypatch)
    launch.launch(kernel, 1, 32, (1,), 0, 40 << 10)
    assert kernel.raw.max_dynamic_shared_size_bytes == 0
    launch.launch(kernel, 1, 32, (1,), 0, 100 << 10)
    assert kernel.raw.max_dynamic_shared_size_bytes == 100 << 10
    launch.launch(kernel, 1, 32, (1,), 0, 60 << 10)
    assert kernel.raw.max_dynamic_shared_size_bytes == 100 << 10
    assert [one[2] for one in driver.launches] == [40 << 10, 100 << 10, 60 << 10]


def test_another_device_is_made_current_for_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, driver = fake("q", monkeypatch)
    now = [1]
    calls = types.SimpleNamespace(
        getDevice=lambda: now[0], setDevice=lambda device: now.__setitem__(0, device)
    )
    monkeypatch.setattr(launch, "runtime", lambda: calls)
    seen: list[int] = []
    entry = EX(lambda *pointers: seen.append(now[0]) or 0)
    monkeypatch.setattr(launch, "entry_point", lambda: (entry, calls.getDevice))

    class Functions:
        """CuPy's kernel: a function of the device that is current."""

        kernel = types.SimpleNamespace(ptr=HANDLE)
        allowed: ClassVar[dict[int, int]] = {}

        def __setattr__(self, name: str, value: int) -> None:
            self.allowed[now[0]] = value

    raw = Functions()
    kernel._load = lambda: launch.Loaded(raw, None)
    launch.launch(kernel, 1, 32, (1,), 0, 100 << 10)
    assert (seen, now, raw.allowed) == ([0], [1], {0: 100 << 10})
    assert driver.launches == []


def test_threads_launch_from_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, driver = fake("qqs", monkeypatch, 64)

    def work(i: int) -> None:
        for n in range(200):
            launch.launch(kernel, i + 1, 32, (i, n, bytes([i]) * 64), i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(driver.launches) == 800
    for grid, _, _, stream, first, _, structure in driver.launches:
        assert first == struct.pack("=q", stream)
        assert (grid[0], structure) == (stream + 1, bytes([stream]) * 64)


# launches on stream 1 wait, ten seconds at most, until one on stream 2 has come
FULL_QUEUE = """
#include <unistd.h>
volatile int waiting, others;
int cuLaunchKernelEx(const void* config, void* function, void** parameters, void** extra) {
  if (((const long*)config)[4] == 2) return !(others = 1);
  waiting = 1;
  for (int i = 0; i < 10000 && !others; ++i) usleep(1000);
  return !others;
}
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler here")
@pytest.mark.parametrize("again", [False, True], ids=["launch", "recorded"])
def test_a_launch_that_waits_lets_other_threads_launch(
    again: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The driver waits while a queue is full, perhaps for a collective that another thread has yet to
    launch."""
    entry_point = launch.entry_point.__wrapped__
    kernel, _ = fake("q", monkeypatch)
    (tmp_path / "driver.c").write_text(FULL_QUEUE)
    words = ["gcc", "-shared", "-fPIC", "-o", str(tmp_path / "driver.so"), str(tmp_path / "driver.c")]
    subprocess.run(words, check=True)
    load = ctypes.CDLL
    with monkeypatch.context() as loading:  # as ``driver`` loads the driver's
        loading.setattr(ctypes, "CDLL", lambda name: load(str(tmp_path / "driver.so")))
        library = launch.driver.__wrapped__()
    monkeypatch.setattr(launch, "driver", lambda: library)
    calls = {"getDeviceCount": lambda: 1, "getDevice": lambda: 0, "setDevice": lambda device: None}
    monkeypatch.setattr(launch, "runtime", lambda: types.SimpleNamespace(**calls))
    monkeypatch.setattr(launch, "entry_point", entry_point)
    waiting, others = (ctypes.c_int.in_dll(library, name) for name in ("waiting", "others"))

    def waits() -> None:
        launch.launch(kernel, 1, 32, (1,), 1)

    if again:
        others.value = 1
        with recorded.recording() as waits:
            launch.launch(kernel, 1, 32, (1,), 1)
        waiting.value = others.value = 0
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(waits)
        while not waiting.value:
            time.sleep(0.001)
        launch.launch(kernel, 1, 32, (2,), 2)
        done.result()


def test_a_kernel_is_loaded_at_its_first_launch_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    known, driver = fake("q", monkeypatch)
    known.load()
    loads: list[launch.Loaded] = []

    def load() -> launch.Loaded:
        loads.append(launch.Loaded(known.raw, None))
        return loads[-1]

    kernel = launch.Kernel("fake.cu", "fake", 0, (), "q", (True,), load)
    launch.launch(kernel, 0, 32, (1,), 0)  # no blocks
    assert loads == []
    threads = [threading.Thread(target=launch.launch, args=(kernel, 1, 32, (1,), 0)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(loads), len(driver.launches)) == (1, 4)


def test_another_launcher_stands_in_for_this_thread_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, driver = fake("q", monkeypatch)
    seen: list[tuple[Any, ...]] = []

    def note(*arguments: Any) -> None:
        seen.append(arguments)
        with launch.launching_by(None):
            launch.launch(kernel, 5, 32, (5,), 0)

    with launch.launching_by(note):
        launch.launch(kernel, 1, 32, (1,), 7, 8)
        thread = threading.Thread(target=launch.launch, args=(kernel, 2, 32, (2,), 0))
        thread.start()
        thread.join()
    launch.launch(kernel, 3, 32, (3,), 0)
    assert seen == [(kernel, 1, 32, (1,), 7, 8)]
    assert [grid[0] for grid, *_ in driver.launches] == [5, 2, 3]
