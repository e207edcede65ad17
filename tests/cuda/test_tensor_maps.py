"""Tensor maps: what the driver is asked for, and that its maps are what moved calls take them for."""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace
from typing import Any

import pytest

from fp8kit.backends.cuda import launch, tensor_maps
from fp8kit.backends.cuda.structures import Packer
from fp8kit.backends.cuda.tensor_maps import CODES, NONE, tensor_map
from fp8kit.errors import BackendError


def driver(monkeypatch: pytest.MonkeyPatch, first: int = 0, status: int = 0) -> list[tuple[Any, ...]]:
    """A driver whose maps have the address in word ``first``; what it is asked for."""
    asked: list[tuple[Any, ...]] = []

    def encode(to: Any, kind: int, rank: int, address: Any, *rest: Any) -> int:
        sizes = tuple(tuple(part) if isinstance(part, ctypes.Array) else part for part in rest)
        asked.append((to.value % 64, kind, rank, address.value, *sizes))
        words = [7] * 16
        words[first] = address.value
        ctypes.memmove(to.value, struct.pack("=16Q", *words), 128)
        return status

    monkeypatch.setattr(launch, "driver", lambda: SimpleNamespace(cuTensorMapEncodeTiled=encode))
    runtime = SimpleNamespace(getDevice=lambda: 0, setDevice=lambda index: None)
    monkeypatch.setattr(launch, "runtime", lambda: runtime)
    monkeypatch.setattr(launch, "error_text", lambda status: f"status {status}")
    monkeypatch.setattr(tensor_maps, "tensor_map", tensor_map.__wrapped__)
    return asked


def test_a_map_is_an_address_and_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = driver(monkeypatch)
    found = tensor_maps.tensor_map("float32", (100, 60), (112,), (64, 1))
    assert found == struct.pack("=15Q", *[7] * 15)
    aligned, kind, rank, _, sizes, strides, box, steps, *how = asked[0]
    assert (aligned, kind, rank, sizes, strides, box, steps) == (0, 7, 2, (100, 60), (448,), (64, 1), (1, 1))
    assert how == [0, 0, 3, 0]
    tensor_maps.tensor_map("uint8", (100, 60), (112,), (128, 60), True)
    assert (asked[-1][1], asked[-1][-3]) == (0, 3)
    tensor_maps.tensor_map("bfloat16", (64, 7, 3, 2), (192, 64, 1344), (64, 5, 1, 1), True)
    _, *what = asked[-1]
    assert (what[0], what[1]) == (9, 4)
    assert what[3:7] == [(64, 7, 3, 2), (384, 128, 2688), (64, 5, 1, 1), (1, 1, 1, 1)]
    packed = Packer(CODES * 2).pack(1 << 40, found, *NONE)
    assert packed.pointers == (0, 128)
    assert packed == struct.pack("=Q", 1 << 40) + found + bytes(128)


@pytest.mark.parametrize("how", [{"first": 1}, {"status": 1}])
def test_another_layout_and_a_refusal_are_errors(
    how: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(monkeypatch, **how)
    said = "status 1" if "status" in how else "120 bytes that do not depend"
    with pytest.raises(BackendError, match=said):
        tensor_maps.tensor_map("uint8", (16, 16), (16,), (128, 64), True)
