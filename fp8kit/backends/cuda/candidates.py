"""The algorithms that a matrix product may be done by: those of cuBLASLt's heuristic, and their relatives.

The heuristic proposes eight, each a tile of the output, a cluster of blocks and a custom option, which by the kernels' names is the order
of the tiles, how two groups of warps share one, and how FP8 products are summed. It leaves out faster ones: with a bias it proposed no fast
sum at all, which is 8 to 10 % of the product (benchmarks/NOTES.md). A relative is a proposed tile and cluster, or both turned, with any
option. Whether it may do the product, cuBLASLt says: cublasLtMatmulAlgoCheck, of NVIDIA's cuBLAS documentation.
"""

from __future__ import annotations

import ctypes
import enum
from typing import Any

PROPOSED = 8
SIZE = 64  # bytes of a cublasLtMatmulAlgo_t, the first member of a cublasLtMatmulHeuristicResult_t; then come
_WORKSPACE, _STATE, _RESULT_SIZE = 64, 72, 96  # a size_t and a status, and reserved space
# cublasLtMatmulPreferenceAttributes_t, cublasLtMatmulAlgoConfigAttributes_t, cublasLtMatmulAlgoCapAttributes_t
_MAX_WORKSPACE, _REDUCTIONS, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)
_TILE, _OPTION, _CLUSTER = (1, ctypes.c_uint32), (5, ctypes.c_uint32), (8, ctypes.c_uint16)
_OPTION_MAX = 7
_IN_COMPUTE_TYPE = 2  # a split contraction is summed in float32, never in the output's type: every output is rounded once


class Product:
    """What cuBLASLt is asked about: its library, a handle, the descriptor and layouts (A, B, D) of a product, limits in bytes."""

    def __init__(self, lt: Any, handle: int, description: int, layouts: tuple[int, ...], workspace: int, alignment: int,
                 refusals: tuple[type[Exception], ...]) -> None:
        self.lt, self.workspace, self.alignment = lt, workspace, alignment
        a, b, d = layouts
        self._said = (handle, description, a, b, d, d)
        self._refused = refusals

    def proposed(self) -> list[bytes]:
        """The heuristic's algorithms, the best first. Raises what cuBLASLt refuses with."""
        lt = self.lt
        preference = lt.matmul_preference_create()
        results, found = (ctypes.c_char * (PROPOSED * _RESULT_SIZE))(), ctypes.c_int(0)
        limits: list[tuple[int, Any]] = [
            (_MAX_WORKSPACE, ctypes.c_uint64(self.workspace)),
            (_REDUCTIONS, ctypes.c_uint32(_IN_COMPUTE_TYPE)),
            *((attribute, ctypes.c_uint32(self.alignment)) for attribute in _ALIGNMENTS),
        ]
        try:
            for attribute, value in limits:
                lt.matmul_preference_set_attribute(preference, attribute, ctypes.addressof(value), ctypes.sizeof(value))
            lt.matmul_algo_get_heuristic(*self._said, preference, PROPOSED, ctypes.addressof(results), ctypes.addressof(found))
        finally:
            lt.matmul_preference_destroy(preference)
        return [results.raw[i * _RESULT_SIZE :][:SIZE] for i in range(found.value)]

    def relatives(self, proposed: list[bytes]) -> list[bytes]:
        """Further algorithms: those like a proposed one that cuBLASLt accepts for the product."""
        known = dict.fromkeys(proposed, False)  # whether it is a further one
        for base in proposed:
            for tile, cluster in dict.fromkeys((self._shape(base), self._turned(*self._shape(base)))):
                for option in range(self._options(base) + 1):
                    made = self._made(base, tile, cluster, option)
                    if made is not None and made not in known:
                        known[made] = self._accepted(made)
        return [made for made, further in known.items() if further]

    def _shape(self, algorithm: bytes) -> tuple[int, int]:
        """Its tile and cluster."""
        return self._get(algorithm, _TILE), self._get(algorithm, _CLUSTER)

    def _turned(self, tile: int, cluster: int) -> tuple[int, int]:
        """Rows and columns swapped; what has no turned one, as it is."""
        return _swapped(self.lt.MatmulTile, tile), _swapped(self.lt.ClusterShape, cluster)

    def _get(self, algorithm: bytes, which: tuple[int, Any]) -> int:
        (attribute, kind), held, written = which, ctypes.create_string_buffer(algorithm, SIZE), ctypes.c_size_t(0)
        value = kind(0)
        self.lt.matmul_algo_config_get_attribute(
            ctypes.addressof(held), attribute, ctypes.addressof(value), ctypes.sizeof(value), ctypes.addressof(written)
        )
        return int(value.value)

    def _options(self, algorithm: bytes) -> int:
        """The largest custom option."""
        held, value, written = ctypes.create_string_buffer(algorithm, SIZE), ctypes.c_int32(0), ctypes.c_size_t(0)
        self.lt.matmul_algo_cap_get_attribute(ctypes.addressof(held), _OPTION_MAX, ctypes.addressof(value), 4, ctypes.addressof(written))
        return value.value

    def _made(self, base: bytes, tile: int, cluster: int, option: int) -> bytes | None:
        """``base`` with these; None where cuBLASLt has no such thing."""
        held = ctypes.create_string_buffer(base, SIZE)
        try:
            for (attribute, kind), number in ((_TILE, tile), (_CLUSTER, cluster), (_OPTION, option)):
                value = kind(number)
                self.lt.matmul_algo_config_set_attribute(ctypes.addressof(held), attribute, ctypes.addressof(value), ctypes.sizeof(value))
        except self._refused:
            return None
        return held.raw

    def _accepted(self, algorithm: bytes) -> bool:
        held, result = ctypes.create_string_buffer(algorithm, SIZE), (ctypes.c_char * _RESULT_SIZE)()
        try:
            self.lt.matmul_algo_check(*self._said, ctypes.addressof(held), ctypes.addressof(result))
        except self._refused:
            return False
        needed = ctypes.c_size_t.from_buffer(result, _WORKSPACE).value
        return needed <= self.workspace and not ctypes.c_int.from_buffer(result, _STATE).value


def _swapped(names: type[enum.IntEnum], number: int) -> int:
    """Of TILE_128x144 that of TILE_144x128, of SHAPE_2x1x1 that of SHAPE_1x2x1."""
    try:
        prefix, size = names(number).name.split("_")
        rows, columns, *rest = size.split("x")
        return int(names[f"{prefix}_{'x'.join([columns, rows, *rest])}"])
    except (KeyError, ValueError):
        return number
