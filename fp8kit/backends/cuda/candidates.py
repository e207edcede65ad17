"""The algorithms that a matrix product may be done by: those of cuBLASLt's heuristic, and their relatives.

The heuristic proposes eight, each a tile of the output, a cluster of blocks and a custom option, which is, to
judge by the kernels' names, the order of the tiles, how two groups of warps share one, and how FP8 products
are summed. It leaves out faster ones: with a bias it proposed no fast sum at all, which is 8 to 10 % of the
product (benchmarks/NOTES.md). A relative is a proposed tile and cluster, or both transposed, with any option,
where cuBLASLt accepts it: cublasLtMatmulAlgoCheck and cublasLtMatmulAlgoCapGetAttribute of NVIDIA's cuBLAS
documentation.
"""

from __future__ import annotations

import ctypes
import enum
import itertools
from collections.abc import Callable
from typing import Any

PROPOSED = 8
SIZE = 64  # bytes of a cublasLtMatmulAlgo_t, the first member of a cublasLtMatmulHeuristicResult_t; then come
_WORKSPACE, _STATE, _RESULT_SIZE = 64, 72, 96  # a size_t and a status, and reserved space
# cublasLtMatmulPreferenceAttributes_t, cublasLtMatmulAlgoConfigAttributes_t,
# cublasLtMatmulAlgoCapAttributes_t
_MAX_WORKSPACE, _REDUCTIONS, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)
_TILE, _OPTION, _CLUSTER = (1, ctypes.c_uint32), (5, ctypes.c_uint32), (8, ctypes.c_uint16)
_SPLITS = (2, ctypes.c_uint32)
_OPTION_MAX, _MIN_ALIGNMENTS = 7, (16, 17, 18, 19)
# a split contraction is summed in float32, never in the output's type: every output is rounded once
_IN_COMPUTE_TYPE = 2


class Search:
    """What cuBLASLt is asked about: its library, a handle, the descriptor and layouts (A, B, D) of a product,
    limits in bytes."""

    def __init__(
        self,
        lt: Any,
        handle: int,
        description: int,
        layouts: tuple[int, ...],
        workspace: int,
        alignment: int,
        refusals: tuple[type[Exception], ...],
    ) -> None:
        self.lt, self.workspace, self.alignment = lt, workspace, alignment
        a, b, d = layouts
        self._question = (handle, description, a, b, d, d)
        self._refusals = refusals  # what ``lt`` raises

    def proposed(self) -> list[bytes]:
        """Returns the heuristic's algorithms, the best first. Raises what cuBLASLt refuses with."""
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
                lt.matmul_preference_set_attribute(
                    preference, attribute, ctypes.addressof(value), ctypes.sizeof(value)
                )
            lt.matmul_algo_get_heuristic(
                *self._question, preference, PROPOSED, ctypes.addressof(results), ctypes.addressof(found)
            )
        finally:
            lt.matmul_preference_destroy(preference)
        return [results.raw[i * _RESULT_SIZE :][:SIZE] for i in range(found.value)]

    def relatives(self, proposed: list[bytes]) -> list[bytes]:
        """Further algorithms: those like a proposed one that cuBLASLt accepts for the product."""
        known = dict.fromkeys(proposed, False)  # whether it is a further one
        for base in proposed:
            try:
                tile, cluster = self._get(base, _TILE), self._get(base, _CLUSTER)
                options = self._capability(base, _OPTION_MAX)
            except self._refusals:  # of a kind that has no such thing
                continue
            transposed = _transposed(self.lt.MatmulTile, tile), _transposed(self.lt.ClusterShape, cluster)
            for shape, option in itertools.product(
                dict.fromkeys(((tile, cluster), transposed)), range(options + 1)
            ):
                made = self._made(base, shape, option)
                if made is not None and made not in known:
                    known[made] = self.accepts(made)
        return [made for made, further in known.items() if further]

    def accepts(self, algorithm: bytes) -> bool:
        """Whether the algorithm does the product, with its workspace and alignment."""
        held, result = ctypes.create_string_buffer(algorithm, SIZE), (ctypes.c_char * _RESULT_SIZE)()
        try:
            self.lt.matmul_algo_check(*self._question, ctypes.addressof(held), ctypes.addressof(result))
            # the check does not look
            aligned = all(self._capability(algorithm, one) <= self.alignment for one in _MIN_ALIGNMENTS)
        except self._refusals:
            return False
        needed = ctypes.c_size_t.from_buffer(result, _WORKSPACE).value
        return aligned and needed <= self.workspace and not ctypes.c_int.from_buffer(result, _STATE).value

    def splits(self, algorithm: bytes) -> int:
        """Into how many parts, each summed by itself, the algorithm cuts the contraction."""
        return max(self._get(algorithm, _SPLITS), 1)

    def _get(self, algorithm: bytes, which: tuple[int, Any]) -> int:
        return self._asked(self.lt.matmul_algo_config_get_attribute, algorithm, *which)

    def _capability(self, algorithm: bytes, attribute: int) -> int:
        return self._asked(self.lt.matmul_algo_cap_get_attribute, algorithm, attribute, ctypes.c_int32)

    @staticmethod
    def _asked(ask: Callable[..., Any], algorithm: bytes, attribute: int, kind: Any) -> int:
        """Returns an attribute of an algorithm, of a type of ctypes."""
        held, value, written = ctypes.create_string_buffer(algorithm, SIZE), kind(0), ctypes.c_size_t(0)
        at = ctypes.addressof
        ask(at(held), attribute, at(value), ctypes.sizeof(value), at(written))
        return int(value.value)

    def _made(self, base: bytes, shape: tuple[int, int], option: int) -> bytes | None:
        """``base`` with that tile and cluster, and that option; None where cuBLASLt has no such thing."""
        held = ctypes.create_string_buffer(base, SIZE)
        try:
            for (attribute, kind), number in zip((_TILE, _CLUSTER, _OPTION), (*shape, option), strict=True):
                value = kind(number)
                self.lt.matmul_algo_config_set_attribute(
                    ctypes.addressof(held), attribute, ctypes.addressof(value), ctypes.sizeof(value)
                )
        except self._refusals:
            return None
        return held.raw


def _transposed(names: type[enum.IntEnum], number: int) -> int:
    """Returns the number of the name with its two sizes exchanged: of TILE_144x128 for TILE_128x144, of
    SHAPE_1x2x1 for SHAPE_2x1x1; ``number`` itself where there is no such name."""
    try:
        prefix, size = names(number).name.split("_")
        rows, columns, *rest = size.split("x")
        return int(names[f"{prefix}_{'x'.join([columns, rows, *rest])}"])
    except (KeyError, ValueError):
        return number
