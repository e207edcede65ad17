"""Relatives of the heuristic's algorithms: which are asked for, by a library that stands for cuBLASLt; what
they compute, on a GPU."""

from __future__ import annotations

import ctypes
import enum
import struct
import types

import numpy as np
import pytest

from fp8kit import arrays, codec
from fp8kit.arrays import Device
from fp8kit.backends.cuda import candidates, cublaslt
from fp8kit.backends.cuda.cublaslt import MatmulKey
from fp8kit.formats import E4M3, E5M2, DType, Format, bfloat16, float8_e4m3fn, float8_e5m2, float32
from fp8kit.testing.compare import assert_close
from fp8kit.testing.contract import get, poisoned, put, workspace
from fp8kit.testing.contract.gemm import fp8_slack, joining_slack

GPU = Device("cuda", 0)
_TYPES = {"E4M3": float8_e4m3fn, "E5M2": float8_e5m2}


class Tile(enum.IntEnum):
    TILE_128x160 = 20
    TILE_160x128 = 30
    TILE_UNDEFINED = 0
    TILE_64x64 = 5


class Cluster(enum.IntEnum):
    SHAPE_1x1x1 = 2
    SHAPE_2x1x1 = 3
    SHAPE_1x2x1 = 5


def algorithm(tile: int, cluster: int, option: int) -> bytes:
    """One of the library below: three of its numbers and nothing else."""
    return struct.pack("<3I", tile, cluster, option).ljust(64, b"\0")


class Library:
    """cuBLASLt with algorithms of three numbers. It accepts what stands in ``good``: algorithm ->
    workspace."""

    MatmulTile, ClusterShape = Tile, Cluster
    PLACES = types.MappingProxyType({1: 0, 8: 4, 5: 8})  # tile, cluster, option: where they stand

    class cuBLASLtError(Exception):
        pass

    def __init__(self, proposed: list[bytes], good: dict[bytes, int], most: int = 3) -> None:
        self.results, self.good, self.most, self.missing = proposed, good, most, -1
        self.alignments: dict[bytes, int] = {}  # 16 where there is none
        self.states: dict[bytes, int] = {}
        self.strange: set[bytes] = set()  # that have no tile
        self.preferences: list[tuple[int, int]] = []
        self.asked: list[bytes] = []

    def matmul_preference_create(self) -> int:
        return 7

    def matmul_preference_destroy(self, preference: int) -> None:
        assert preference == 7

    def matmul_preference_set_attribute(
        self, preference: int, attribute: int, address: int, size: int
    ) -> None:
        self.preferences.append((attribute, int.from_bytes(ctypes.string_at(address, size), "little")))

    def matmul_algo_get_heuristic(self, *numbers: int) -> None:
        assert numbers[:8] == (1, 2, 3, 4, 5, 5, 7, candidates.PROPOSED)
        for i, found in enumerate(self.results):
            ctypes.memmove(numbers[8] + 96 * i, found, 64)
        ctypes.c_int.from_address(numbers[9]).value = len(self.results)

    def matmul_algo_config_get_attribute(
        self, at: int, attribute: int, to: int, size: int, written: int
    ) -> None:
        if ctypes.string_at(at, 64) in self.strange:
            raise self.cuBLASLtError("INVALID_VALUE (7)")
        ctypes.memmove(to, at + self.PLACES[attribute], size)

    def matmul_algo_config_set_attribute(self, at: int, attribute: int, value: int, size: int) -> None:
        if attribute == 5 and ctypes.c_uint32.from_address(value).value == self.missing:
            raise self.cuBLASLtError("INVALID_VALUE (7)")
        ctypes.memmove(at + self.PLACES[attribute], value, size)

    def matmul_algo_cap_get_attribute(
        self, at: int, attribute: int, to: int, size: int, written: int
    ) -> None:
        algorithm = ctypes.string_at(at, 64)
        ctypes.c_int32.from_address(to).value = {7: self.most, 18: self.alignments.get(algorithm, 16)}.get(
            attribute, 1
        )

    def matmul_algo_check(self, *numbers: int) -> None:
        assert numbers[:6] == (1, 2, 3, 4, 5, 5)
        self.asked.append(ctypes.string_at(numbers[6], 64))
        if self.asked[-1] not in self.good:
            raise self.cuBLASLtError("NOT_SUPPORTED (15)")
        ctypes.c_size_t.from_address(numbers[7] + 64).value = self.good[self.asked[-1]]
        ctypes.c_int.from_address(numbers[7] + 72).value = self.states.get(self.asked[-1], 0)


def search(library: Library) -> candidates.Search:
    return candidates.Search(library, 1, 2, (3, 4, 5), 1000, 16, (library.cuBLASLtError,))


def test_the_heuristic_is_told_the_limits() -> None:
    library = Library([algorithm(20, 3, 1)], {})
    assert search(library).proposed() == library.results
    # MAX_WORKSPACE_BYTES, REDUCTION_SCHEME_MASK (COMPUTE_TYPE), MIN_ALIGNMENT of A, B, C and D
    assert library.preferences == [(1, 1000), (3, 2), (5, 16), (6, 16), (7, 16), (8, 16)]
    assert search(Library([], {})).proposed() == []


def test_relatives_have_other_options_or_are_transposed() -> None:
    proposed = [algorithm(20, 3, 1)]
    every = [algorithm(tile, cluster, option) for tile, cluster in ((20, 3), (30, 5)) for option in range(4)]
    library = Library(proposed, dict.fromkeys(every, 1000))
    assert search(library).relatives(proposed) == [one for one in every if one != proposed[0]]
    library.missing = 2  # an option that cannot be set
    assert search(library).relatives(proposed) == [one for one in every if one != proposed[0] and one[8] != 2]


def test_what_does_not_do_the_product_is_none() -> None:
    proposed, good = [algorithm(20, 3, 1)], algorithm(30, 5, 2)
    library = Library(
        proposed, {good: 1000, algorithm(20, 3, 0): 1001, algorithm(20, 3, 2): 0, algorithm(20, 3, 3): 0}
    )
    library.alignments[algorithm(20, 3, 2)] = 32  # the product's arrays lie at multiples of 16
    library.states[algorithm(20, 3, 3)] = 15
    assert search(library).relatives(proposed) == [good]
    assert len(library.asked) == 7


def test_what_has_no_tile_has_no_relatives() -> None:
    proposed = [algorithm(20, 3, 1), algorithm(30, 5, 0)]
    library = Library(proposed, {algorithm(20, 3, 2): 0})
    library.strange = {proposed[1]}
    assert search(library).relatives(proposed) == [algorithm(20, 3, 2)]


def test_each_is_asked_for_once() -> None:
    """Proposals that are each other transposed have the same relatives; a tile that is no rectangle with a
    transposed one has itself."""
    proposed = [
        algorithm(20, 3, 1),
        algorithm(30, 5, 0),
        algorithm(5, 2, 0),
        algorithm(0, 2, 0),
        algorithm(77, 9, 0),
    ]
    library = Library(
        proposed, dict.fromkeys([algorithm(20, 3, 0), algorithm(30, 5, 1), algorithm(77, 9, 3)], 0)
    )
    assert search(library).relatives(proposed) == list(library.good)
    assert len(library.asked) == len(set(library.asked))
    assert {one[:8] for one in library.asked} == {one[:8] for one in proposed}


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("a_format", [E4M3, E5M2], ids=["E4M3", "E5M2"])
@pytest.mark.parametrize("out_dtype", [float32, bfloat16], ids=["f32", "bf16"])
def test_every_candidate_gives_the_fp8_product(fast: bool, a_format: Format, out_dtype: DType) -> None:
    """A long sum of values above 0: where it may not be done fast, one that is loses more than its bound,
    half a percent. Rounding the results to bfloat16 hides that in each, not in their mean. Fast ones have
    values of both signs."""
    m, n, k = 256, 384, 8192
    generator = np.random.default_rng(5)
    drawn = [generator.standard_normal(shape) * 8 for shape in ((m, k), (n, k))]
    codes = [
        codec.encode(values if fast else np.abs(values), fmt)
        for values, fmt in zip(drawn, (a_format, E4M3), strict=True)
    ]
    wide_a, wide_b = (
        codec.decode(c, fmt).astype(np.float64) for c, fmt in zip(codes, (a_format, E4M3), strict=True)
    )
    exact, magnitude = wide_a @ wide_b.T, np.abs(wide_a) @ np.abs(wide_b).T
    biased = out_dtype is bfloat16
    shift = np.full(n, 2.0**10 if biased else 0.0, np.float32).astype(bfloat16.numpy)
    slack = fp8_slack(magnitude, k, fast, GPU) + joining_slack(
        exact, out_dtype, [shift.astype(np.float64)] if biased else [], GPU
    )
    want = exact + shift.astype(np.float64)
    da, db, ds, one = (put(array, GPU) for array in (*codes, shift, np.ones(1, np.float32)))
    scratch = workspace(cublaslt.WORKSPACE, GPU)
    key = MatmulKey(
        m,
        n,
        k,
        "nt",
        _TYPES[a_format.name],
        float8_e4m3fn,
        out_dtype,
        k,
        k,
        n,
        bias=biased,
        scaling=("tensor", "tensor"),
        fast_accumulate=fast,
    )
    plan = cublaslt.MatmulPlan(key, 0)
    proposed = plan.algorithms
    plan.widen()
    assert plan.algorithms > proposed
    for choice in range(plan.algorithms):
        plan.choose(choice)
        out = poisoned((m, n), out_dtype, GPU)
        addresses = da.ptr, db.ptr, out.ptr, one.ptr, one.ptr, ds.ptr if biased else 0, scratch.ptr, 0
        plan.run(addresses, key.workspace, arrays.current_stream(GPU))
        got = get(out).astype(np.float64)
        assert_close(f"algorithm {choice}", got, want, out_dtype, slack)
        if not fast:
            assert abs(np.mean((got - want) / exact)) < np.mean(
                fp8_slack(magnitude, k, False, GPU) / exact
            ), choice
    count, chosen = plan.algorithms, plan.chosen
    plan.widen()
    assert plan.algorithms == count
    other = cublaslt.MatmulPlan(key, 0)
    assert other.take(chosen)
    assert other.chosen == chosen
