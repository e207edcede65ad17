"""Stand-ins for cuBLASLt and for the driver's launch, which keep what reaches them."""

from __future__ import annotations

import ctypes
import struct
import types
from typing import Any

import pytest

from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda.compile import Resources

EX = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
HANDLE = 1 << 44


class Driver:
    """Stands for ``cuLaunchKernelEx``: copies the configuration and the parameters as the driver would, by
    their sizes."""

    def __init__(self, sizes: list[int], status: int = 0) -> None:
        self.sizes, self.status = sizes, status
        self.launches: list[tuple[Any, ...]] = []
        self.addresses: list[int] = []
        self.attributes: list[tuple[int, ...]] = []
        self.entry = EX(self._launch)

    def _launch(self, config: int, function: int, parameters: int, extra: int) -> int:
        assert function == HANDLE
        assert extra is None
        x, y, z, i, j, k, shared, stream, attributes, count = struct.unpack(
            "=7I4xQQI4x", ctypes.string_at(config, 56)
        )
        self.attributes = [
            struct.unpack("=I4xI60x", ctypes.string_at(attributes + 72 * i, 72)) for i in range(count)
        ]
        assert (attributes != 0) == bool(count)
        self.addresses = list((ctypes.c_uint64 * len(self.sizes)).from_address(parameters))
        values = [ctypes.string_at(at, size) for at, size in zip(self.addresses, self.sizes, strict=True)]
        self.launches.append(((x, y, z), (i, j, k), shared, stream, *values))
        return self.status


def fake(
    parameters: str, monkeypatch: pytest.MonkeyPatch, structure: int = 0, status: int = 0, early: bool = False
) -> tuple[launch.Kernel, Driver]:
    stand_in = Driver([structure if code == "s" else 8 for code in parameters], status)
    monkeypatch.setattr(launch, "entry_point", lambda: (stand_in.entry, None))
    monkeypatch.setattr(launch, "here", launch.Here())
    monkeypatch.setattr(
        launch, "runtime", lambda: types.SimpleNamespace(getDevice=lambda: 0, setDevice=lambda device: None)
    )
    raw = types.SimpleNamespace(kernel=types.SimpleNamespace(ptr=HANDLE), max_dynamic_shared_size_bytes=0)
    loaded = launch.Loaded(raw, Resources(32, 0, 0, 0, 0), early)
    pointers = tuple(code == "q" for code in parameters)
    return launch.Kernel("fake.cu", "fake", 0, (), parameters, pointers, lambda: loaded), stand_in


class Library:
    """Stands for nvmath.bindings.cublasLt: keeps what descriptors are told and what matmul gets."""

    def __init__(self) -> None:
        self.attributes: list[tuple[int, int]] = []
        self.layouts: list[tuple[int, ...]] = []  # type, rows, columns, distance of columns
        self.products: list[tuple[int, ...]] = []
        self.created = 100
        self.refused = ""  # the function that refuses

    def _allow(self, function: str) -> None:
        if function == self.refused:
            raise self.cuBLASLtError("NOT_SUPPORTED (15)")

    def _create(self, *_: object) -> int:
        self.created += 1
        return self.created

    def matmul_desc_destroy(self, description: int) -> None:
        pass

    create = matmul_desc_create = matmul_preference_create = _create

    def matrix_layout_create(self, *layout: int) -> int:
        self.layouts.append(layout)
        return self._create()

    def _ignore(self, *_: object) -> None:
        return None

    matrix_layout_set_attribute = matmul_preference_set_attribute = matmul_preference_destroy = _ignore
    matrix_layout_destroy = _ignore

    def matmul_desc_set_attribute(self, _: int, attribute: int, address: int, size: int) -> None:
        self._allow("matmul_desc_set_attribute")
        self.attributes.append((attribute, int.from_bytes(ctypes.string_at(address, size), "little")))

    cuBLASLtError = KeyError  # of no kin to RuntimeError, as the real one

    def matmul_algo_get_heuristic(self, *numbers: int) -> None:
        self._allow("matmul_algo_get_heuristic")
        for i in range(3):
            ctypes.memmove(numbers[8] + 96 * i, b"%c" % (65 + i) * 64, 64)
        ctypes.c_int.from_address(numbers[9]).value = 3

    def matmul_algo_check(self, *numbers: int) -> None:
        """Needs no workspace."""
        self._allow("matmul_algo_check")

    def matmul_algo_cap_get_attribute(self, *numbers: int) -> None:
        """Any alignment will do: 0."""

    def matmul(self, *numbers: int) -> None:
        scalars = (
            ctypes.c_float.from_address(numbers[2]).value,
            ctypes.c_float.from_address(numbers[7]).value,
        )
        self._allow("matmul")
        algorithm = ctypes.string_at(numbers[12], 64)[0]
        product = (*numbers[3:7], *numbers[8:12], algorithm, *numbers[13:], *scalars)
        self.products.append(product)  # type: ignore[arg-type]
