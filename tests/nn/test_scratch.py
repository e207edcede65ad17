"""Memory for temporaries: the same for a thread's next operation on a stream, another for another thread, stream or much of it."""

from __future__ import annotations

import threading

from fp8kit.arrays import CPU, Device
from fp8kit.scratch import Scratch

GPU = Device("cuda", 0)


def counting():
    made = []

    def alloc(nbytes, where):
        made.append(nbytes)
        return len(made) << 20, object()

    return Scratch(alloc), made


def test_a_thread_keeps_one_room_for_each_stream():
    scratch, made = counting()
    first = scratch.room(100, GPU, 0)
    assert scratch.room(100, GPU, 0) is first
    assert scratch.room(40, GPU, 0) is first
    larger = scratch.room(101, GPU, 0)
    assert larger is not first
    assert scratch.room(100, GPU, 0) is larger
    assert scratch.room(100, GPU, 5) is not larger
    assert scratch.room(100, Device("cuda", 1), 0) is not larger
    assert made == [100, 101, 100, 100]
    others = []
    thread = threading.Thread(target=lambda: others.append(scratch.room(100, GPU, 0)))
    thread.start()
    thread.join()
    assert others[0] is not larger
    assert scratch.room(101, GPU, 0) is larger


def test_much_is_not_kept_nor_anything_on_the_cpu():
    scratch, made = counting()
    small = scratch.room(8, GPU, 0)
    assert scratch.room(Scratch.KEPT + 1, GPU, 0) is not scratch.room(Scratch.KEPT + 1, GPU, 0)
    assert scratch.room(8, GPU, 0) is small
    assert scratch.room(8, CPU, 0) is not scratch.room(8, CPU, 0)
    assert made == [8, Scratch.KEPT + 1, Scratch.KEPT + 1, 8, 8]


def test_rooms_apart_are_given_away():
    scratch, _ = counting()
    before = scratch.room(8, GPU, 0)
    with scratch.apart() as rooms:
        inner = scratch.room(8, GPU, 0)
        assert inner is not before
        assert list(rooms.values()) == [inner]
    assert scratch.room(8, GPU, 0) is before
