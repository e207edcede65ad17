"""Recorded calls on other arrays: every pointer of theirs moves with its array, and what cannot be followed
is not moved."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fp8kit.backends.cuda import cublaslt, launch, moving, recorded
from fp8kit.backends.cuda.cublaslt import MatmulKey
from fp8kit.backends.cuda.structures import Packer
from fp8kit.execution.replay import Replays
from fp8kit.formats import float32
from tests.support.cuda_libraries import Library, fake

X, Y = 1 << 40, 1 << 41  # arrays of 1024 and 512 bytes
SIZES = (1024, 512)
KEY = MatmulKey(4, 4, 4, "nn", float32, float32, float32, 4, 4, 4)


def calls(
    work: Callable[[int, int], None], keys: list[tuple[Any, ...]], known: Replays | None = None
) -> list[tuple[int, ...]]:
    """The calls for these (stream, x, y) of which ``work(x, y)`` did its own work."""
    known = Replays(recorded.recording, SIZES) if known is None else known
    done = []

    def own(x: int, y: int) -> None:
        done.append((x, y))
        work(x, y)

    for key in keys:
        known.run(key, own, *key[1:])
    return done


def test_pointers_move_with_their_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, driver = fake("qqqd", monkeypatch)

    def work(x: int, y: int) -> None:
        launch.launch(kernel, 3, 64, (x + 1000, y, 0, 2.5), 9, 128)
        launch.launch(kernel, 4, 32, (y + 512, x, x + 8, 7.0), 9)  # the end of y: no bytes of it

    keys = [(9, X + 4096 * i, Y + 512 * i) for i in range(4)]
    assert calls(work, keys) == [(X, Y)]
    moved, driver.launches = driver.launches, []
    for _, x, y in keys:
        work(x, y)
    assert moved == driver.launches


@pytest.mark.parametrize(
    "key",
    [(8, X + 4096, Y), (9, X + 4100, Y), (9, X + 4096, None), (9, X + 4096, 0), (9, Y, Y)],
    ids=["stream", "alignment", "absent", "empty", "same"],
)
def test_another_form_is_recorded_for_itself(key: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, _ = fake("qq", monkeypatch)

    def work(x: int, y: int) -> None:
        launch.launch(kernel, 1, 32, (x, y or 0), key[0])

    assert calls(work, [(9, X, Y), key, (9, X + 8192, Y)]) == [(X, Y), key[1:]]


def test_addresses_that_keep_coming_are_recorded_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those that come again by chance, between others: recording costs more than moving."""
    kernel, driver = fake("qq", monkeypatch)
    known, (a, b, c, d) = Replays(recorded.recording, SIZES), [(9, X + 4096 * i, Y) for i in range(4)]

    def work(x: int, y: int) -> None:
        launch.launch(kernel, 1, 32, (x, y), 9)

    assert calls(work, [a, b, a, b, a, c, a, b, c, d], known) == [a[1:]]
    assert len(known.found) == 0
    assert calls(work, [a, a, b, a], known) == [a[1:]]  # the fourth in a row
    assert len(known.found) == 1
    assert calls(work, [a, b, a], known) == [b[1:]]
    assert len(driver.launches) == 17
    monkeypatch.setattr(Replays, "PROCESS_LIMIT", Replays.total)
    assert calls(work, [c, d, c], known) == []  # no room: they move for good


def test_addresses_that_keep_changing_are_not_recorded_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever an allocator does: recordings of addresses as they are, which become graphs, end once new ones
    go on coming, and go on once they stay away."""
    kernel, driver = fake("qq", monkeypatch)
    known = Replays(recorded.recording, SIZES)

    def work(x: int, y: int) -> None:
        launch.launch(kernel, 1, 32, (x, y), 9)

    keys = [(9, X + 4096 * i, Y) for i in range(100)]
    changing = [key for key in keys for _ in range(1 + known.STEADY)]
    assert calls(work, changing, known) == [key[1:] for key in keys[:1] + keys[: known.FEW]]
    assert len(known.found) == known.FEW
    more = calls(work, keys, known)
    assert len(known.found) == known.FEW + len(more) > known.FEW
    assert len(driver.launches) == len(changing) + len(keys)


def test_steady_steps_are_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of DistributedDataParallel, whose first two have other addresses: every call of a step becomes
    a recording in the same one, the seventh, and a graph ``recorded.OFTEN`` later."""
    kernel, _ = fake("qq", monkeypatch)
    layers = [Replays(recorded.recording, SIZES) for _ in range(12)]
    recordings = []
    for step in range(40):
        for i, known in enumerate(layers):
            x = X + (1 << 30) * i + 4096 * min(step, 2)
            known.run((9, x, Y), launch.launch, kernel, 1, 32, (x, Y), 9)
        recordings.append(sum(len(known.found) for known in layers))
    assert recordings == [0] * 6 + [12] * 34


def test_steady_steps_of_many_equal_layers_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One function has the calls of all of them: also the last ones become recordings of their own."""
    kernel, _ = fake("qq", monkeypatch)
    known = Replays(recorded.recording, SIZES)
    for _ in range(50):
        for i in range(128):
            known.run((9, X + 4096 * i, Y), launch.launch, kernel, 1, 32, (X + 4096 * i, Y), 9)
    assert len(known.found) == 128


def test_only_parts_of_a_weight_count_as_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations read these as one where they lie side by side; of others allocators decide that anew."""
    kernel, _ = fake("qq", monkeypatch)

    def work(x: int, y: int) -> None:
        launch.launch(kernel, 1, 32, (x, y), 9)

    keys = [(9, X, Y), (9, Y - 1024, Y), (9, X + 8192, Y), (9, Y - 512, Y + 512)]
    assert calls(work, keys) == [(X, Y)]
    known = Replays(recorded.recording, SIZES, (0, 1))
    assert calls(work, keys, known) == [(X, Y), (Y - 1024, Y)]


@pytest.mark.parametrize(
    ("x", "y", "structure"),
    [(X, X + 1024 - 8, b""), (X, X, b""), (X, Y, struct.pack("QQ", 5, X + 16))],
    ids=["overlap", "twice", "structure"],
)
def test_what_cannot_be_followed_is_not_moved(
    x: int, y: int, structure: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, _ = fake("qqs" if structure else "qq", monkeypatch, len(structure))
    more = (structure,) if structure else ()
    known = Replays(recorded.recording, SIZES)
    shift = 1 << 30
    done = calls(
        lambda x, y: launch.launch(kernel, 1, 32, (x, y, *more), 9),
        [(9, x, y), (9, x + shift, y + shift)],
        known,
    )
    assert done == [(x, y), (x + shift, y + shift)]
    assert list(known._moving.values()) == [None]


def test_a_pointer_into_no_array_is_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, _ = fake("qq", monkeypatch)
    for outside in (X - 1, X + 1025, 77):
        done = calls(
            lambda x, y, at=outside: launch.launch(kernel, 1, 32, (x, at), 9), [(9, X, Y), (9, X + 4096, Y)]
        )
        assert len(done) == 2


def test_a_structure_of_numbers_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, driver = fake("qs", monkeypatch, 20)
    numbers = struct.pack("QQI", 5, 6, 7)
    assert len(calls(lambda x, y: launch.launch(kernel, 1, 32, (y, numbers), 9), [(9, X, Y), (9, X, X)])) == 2
    assert len(calls(lambda x, y: launch.launch(kernel, 1, 32, (y, numbers), 9), [(9, X, Y), (9, Y, X)])) == 1
    assert driver.launches[-1][4:] == (struct.pack("Q", X), numbers)


def test_the_pointers_of_a_structure_move(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Packer("2PqdP"), Packer("iiP")
    size = first.size + 4 * 4 + second.size
    kernel, driver = fake("qs", monkeypatch, size)

    def made(x: int, y: int) -> bytes:
        return first.pack(x + 8, 0, X, 2.5, y) + bytes(16) + second.pack(1, 2, y + 256)

    def work(x: int, y: int) -> None:
        launch.launch(kernel, 1, 32, (y, made(x, y)), 9)

    assert calls(work, [(9, X, Y), (9, X + 4096, Y + 1024)]) == [(X, Y)]
    pointer, structure = driver.launches[-1][4:]
    assert (pointer, structure) == (struct.pack("Q", Y + 1024), made(X + 4096, Y + 1024))


def test_structures_know_their_pointers() -> None:
    packer = Packer("3P2iPf")
    assert (packer.size, packer.pointers) == (44, (0, 8, 16, 32))
    both = b"1234" + packer.pack(1, 2, 3, 4, 5, 6, 7) + packer.pack(*range(7))
    assert both.pointers == (4, 12, 20, 36, 48, 56, 64, 80)
    assert both == b"1234" + struct.pack("=3Q2iQf", *range(1, 8)) + struct.pack("=3Q2iQf", *range(7))


def test_work_beside_kernels_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, driver = fake("q", monkeypatch)
    beside: list[tuple[int, ...]] = []

    def work(x: int, y: int) -> None:
        recorded.put(0, 9, "note", lambda *given: beside.append(given), (y + 4, 0, x))
        launch.launch(kernel, 1, 32, (x,), 9)

    assert calls(work, [(9, X, Y), (9, X + 256, Y + 512)]) == [(X, Y)]
    assert beside == [(Y + 4, 0, X, 9), (Y + 516, 0, X + 256, 9)]
    assert driver.launches[-1][4] == struct.pack("Q", X + 256)


def test_a_product_moves(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "entry_point", lambda: (None, None))
    monkeypatch.setattr(launch, "here", launch.Here())
    launch.here.memory = object()  # type: ignore[assignment]
    plan = cublaslt.MatmulPlan(KEY, 0)

    def work(x: int, y: int) -> None:
        plan.run((x, x + 64, y, 0, 0, 0, x + 512, y + 128), 256, 9)

    assert calls(work, [(9, X, Y), (9, X + 256, Y + 512)]) == [(X, Y)]
    moved = library.products[-1]
    work(X + 256, Y + 512)
    assert library.products[-1] == moved != library.products[0]


def test_what_comes_again_is_recorded_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, driver = fake("qq", monkeypatch)
    known = Replays(recorded.recording, SIZES)
    keys = [(9, X, Y)] * 6 + [(9, X + 256, Y)]
    done = calls(lambda x, y: launch.launch(kernel, 1, 32, (x, y), 9), keys, known)
    assert done == [(X, Y)] * 2  # for the form, and for these addresses
    assert (len(known.found), len(driver.launches)) == (1, 7)


def test_only_one_thread_is_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, driver = fake("qq", monkeypatch)
    known = Replays(recorded.recording, SIZES)
    keys = [(9, X + 256 * i, Y) for i in range(3)]

    def work(x: int, y: int) -> None:
        launch.launch(kernel, 1, 32, (x, y), 9)

    calls(work, keys[:1], known)
    (made,) = known._moving.values()
    assert isinstance(made, moving.Moving)
    with made._lock:
        assert calls(work, keys[1:2], known) == [keys[1][1:]]
    assert calls(work, keys[2:], known) == []
    assert len(driver.launches) == 3


def test_a_refusal_names_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, driver = fake("q", monkeypatch)
    monkeypatch.setattr(launch, "error_text", lambda status: f"error {status}")
    known = Replays(recorded.recording, SIZES)
    calls(lambda x, y: launch.launch(kernel, 1, 32, (x,), 9), [(9, X, Y)], known)
    driver.status = 700
    with pytest.raises(launch.BackendError, match=r"^launch of fake: error 700$"):
        calls(lambda x, y: None, [(9, X + 256, Y)], known)
    assert not next(iter(known._moving.values()))._lock.locked()  # type: ignore[union-attr]


def test_a_call_on_another_device_than_the_current_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    current, ran = [0], []

    @contextmanager
    def on(device: int) -> Iterator[None]:
        before, current[0] = current[0], device
        yield
        current[0] = before

    class Own(moving.Moving):
        def __init__(self) -> None:
            self.device, self.stream, self.names, self._lock = 1, 0, ["kernel"], threading.Lock()

        def _do(self, *arguments: Any) -> None:
            ran.append((current[0], *arguments))

    monkeypatch.setattr(launch, "entry_point", lambda: (None, lambda: current[0]))
    monkeypatch.setattr(launch, "current_device", on)
    monkeypatch.setattr(launch, "LaunchMemory", object)
    assert Own()([5])
    assert ran == [(1, [5])]
    assert current == [0]
