"""Products of ranks' parts of a weight are those of one rank with the whole."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import collectives
from fp8kit.autograd import apply
from fp8kit.autograd.call import scratch
from fp8kit.collectives import Collectives, FakeCollectives
from fp8kit.errors import ArgumentError, BackendError, ShapeError
from fp8kit.ops import product_parallel
from fp8kit.ops.linear import LinearSpec, linear, weight_cast
from fp8kit.ops.product import ProductSpec
from fp8kit.ops.product_parallel import ParallelProduct
from fp8kit.ops.product_quantized import QuantizedProduct
from fp8kit.ops.product_tensor import TensorProduct
from fp8kit.recipes import NAMED
from fp8kit.testing.compare import assert_same_bits
from tests.support.ranks import LAYOUTS, Operands, alone, part, step, together

# every rule of a scale that ranks share, or need not; the rest in make test-combinations
USUAL = ("current", "rowwise", "block", "nvfp4_rows", "moss")
STATELESS = {n: e.recipe.quantization for n, e in NAMED.items() if e.recipe.history is None}
OWN = Operands(256, 256, 256)


def terms(own):
    """Sums of the magnitudes that y, dx, dW and db are sums of."""
    x, w, g = np.abs(own.x), np.abs(own.w), np.abs(own.g)
    return [x @ w.T + np.abs(own.b), g @ w, g.T @ x, g.sum(0)]


def check(fp8, own, size):
    """The same codes and scales: what is left is float32's sums in another order. A code that differed would
    show by 2^-4 of its term."""
    wanted = alone(fp8, own)
    for mode, sequence in LAYOUTS:
        for got, value, most in zip(
            together(fp8, own, size, mode, sequence), wanted, terms(own), strict=True
        ):
            assert got.shape == value.shape
            # a sum of k float32 products, each at most twice its operands' after the casts' rounding up; of a
            # recipe that asks for a chip's sums, those keep 13 bits below the largest of 32 products
            step = 256 // 32 * 2.0**-13 if summed_as_chips_do(fp8) else 256 * 2.0**-24
            assert (np.abs(got - value) <= step * 2 * most).all(), (mode, sequence)


def summed_as_chips_do(fp8):
    return fp8 is not None and any(not isinstance(gemm.how, bool) for gemm in fp8.gemms.values())


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(name, marks=() if name in USUAL else pytest.mark.combinations)
        for name, fp8 in STATELESS.items()
        if not fp8.needs_rng
    ],
)
def test_two_ranks_multiply_what_one_does(recipe):
    check(STATELESS[recipe], OWN, 2)


def test_high_precision():
    check(None, OWN, 2)


@pytest.mark.parametrize("recipe", ["current", pytest.param("block", marks=pytest.mark.combinations)])
def test_four_ranks_multiply_what_one_does(recipe):
    check(STATELESS[recipe], Operands(512, 512, 512), 4)


def test_rows_that_codes_are_not_stored_in_are_gathered_in_high_precision(caplog):
    check(STATELESS["rowwise"], Operands(24, 256, 256), 2)


@pytest.mark.combinations
@pytest.mark.parametrize("recipe", [name for name, fp8 in STATELESS.items() if fp8.needs_rng])
def test_random_casts_err_no_more_than_those_of_one_rank(recipe):
    """Draws belong to places in a rank's part, so that codes are others: two independent roundings differ by
    at most twice the error of one, in the 2-norm."""
    fp8, exact = STATELESS[recipe], alone(None, OWN)
    one = alone(fp8, OWN)
    for mode, sequence in LAYOUTS:
        for got, value, true in zip(together(fp8, OWN, 2, mode, sequence), one, exact, strict=True):
            error = np.linalg.norm(value - true)
            assert np.linalg.norm(got - value) <= 2 * error + 1e-5 * np.linalg.norm(true), (mode, sequence)


@pytest.mark.parametrize("recipe", ["current", "rowwise", "block"])
@pytest.mark.parametrize("mode", ["column", "row"])
def test_codes_of_a_weights_parts_are_those_of_the_whole(recipe, mode):
    fp8, dim = STATELESS[recipe], 0 if mode == "column" else 1

    def cast(spec, weight):
        made = apply(weight_cast, LinearSpec(spec), {"weight0": fk.tensor(weight, device="cpu")})
        return {name: made[name].numpy() for name in ("w_q", "w_qt")}

    whole = cast(ProductSpec(256, (256,), fp8=fp8), OWN.w)

    def rank(ranks):
        sizes = (256, (128,)) if mode == "column" else (128, (256,))
        spec = ProductSpec(*sizes, fp8=fp8, parallel=mode, group=ranks.name)
        return cast(spec, part(OWN.w, dim, ranks))

    for name, along in (("w_q", dim), ("w_qt", 1 - dim)):
        parts = FakeCollectives(2).run(lambda ranks: rank(ranks)[name])  # noqa: B023
        assert_same_bits(name, np.concatenate(parts, along), whole[name])


def test_gathered_codes_are_half_the_bytes_of_bfloat16():
    """What moves for y of a column's x, sequence-parallel, under current scaling: its codes, and an amax."""
    moved = {}

    def rank(ranks):
        sizes = []
        known = ranks._all_gather
        ranks._all_gather = lambda source, target, stream: (
            sizes.append(source.nbytes),
            known(source, target, stream),
        )
        how = {"parallel": "column", "group": ranks.name, "sequence": True, "bias": "none"}
        spec = ProductSpec(256, (128,), fp8=STATELESS["current"], **how)
        x, w = (fk.tensor(part(a, 0, ranks), dtype="bfloat16", device="cpu") for a in (OWN.x, OWN.w))
        with fk.no_grad():
            apply(linear, LinearSpec(spec), {"x": x, "weight0": w})
        moved[ranks.rank] = sizes

    FakeCollectives(2).run(rank)
    assert moved == {0: [128 * 256], 1: [128 * 256]}


BESIDE = {
    # x's codes come while the weight is cast, and once more during dgrad; dx is summed during wgrad
    "column": "cast x, start x_q, cast w, wait, GEMM; cast g, start x_qt, GEMM, start dx, wait, GEMM, wait",
    # y is summed at once; g's second orientation comes during dgrad
    "row": "cast x, cast w, GEMM; cast g, start g_q, start g_qt, wait, GEMM, wait, GEMM",
}


@pytest.mark.parametrize("mode", BESIDE)
def test_what_runs_beside_communication(mode, monkeypatch):
    """Whatever stands between a start and its wait."""
    events = {0: [], 1: []}

    def say(what):
        events[int(threading.current_thread().name[-1])].append(what)

    def noted(cls, name, what):
        known = getattr(cls, name)
        monkeypatch.setattr(cls, name, lambda own, *given: (say(what(own, *given)), known(own, *given))[1])

    names = {}  # address of what is gathered -> its name

    def started(ranks, operation, source, target, stream):
        return f"start {'dx' if operation == 'reduce_scatter' else names[target.ptr]}"

    def start(ranks, operation, source, target, stream):
        getattr(ranks, f"_{operation}")(source, target, stream)
        return lambda stream: say("wait")

    multiply = TensorProduct.multiply
    monkeypatch.setattr(collectives._Thread, "_start", start)
    noted(collectives._Thread, "_start", started)
    noted(TensorProduct, "_cast", lambda own, ws, operand, *given: f"cast {operand}")
    noted(TensorProduct, "_cast_weight", lambda *given: "cast w")
    counted = staticmethod(lambda *given: (say("GEMM"), multiply(*given))[1])
    monkeypatch.setattr(TensorProduct, "multiply", counted)
    known = ParallelProduct._start

    def begin(product, ws, name, part, whole):
        names[product._gathered(ws, name, whole).ptr] = name
        known(product, ws, name, part, whole)

    monkeypatch.setattr(ParallelProduct, "_start", begin)
    together(STATELESS["current"], OWN, 2, mode, True)
    for found in events.values():
        assert found == BESIDE[mode].replace(";", ",").split(", ")


# --- failures -----------------------------------------------------------------------------------------------


def parallel(ranks, **more):
    return LinearSpec(ProductSpec(16, (16,), bias="none", parallel="row", group=ranks.name, **more))


def test_ranks_with_other_shapes_all_end_with_one_message():
    """It names who did what, and for which layer."""

    def rank(ranks):
        x = fk.tensor(np.ones((16 + 16 * (ranks.rank == 2), 16), np.float32), device="cpu")
        apply(linear, parallel(ranks, label="Linear fc2"), {"x": x, "weight0": weight()})

    with pytest.raises(BackendError) as caught:
        FakeCollectives(4, timeout=20).run(rank)
    text = str(caught.value)
    assert "rank 0, 1, 3: in all_reduce sum of float32 (16, 16) in Linear fc2" in text
    assert "rank 2: in all_reduce sum of float32 (32, 16) in Linear fc2" in text


def weight():
    return fk.tensor(np.ones((16, 16), np.float32), device="cpu")


def test_a_rank_that_fails_ends_the_others():
    def rank(ranks):
        if ranks.rank == 1:
            raise KeyError("mine")
        x = fk.tensor(np.ones((16, 16), np.float32), device="cpu")
        apply(linear, parallel(ranks), {"x": x, "weight0": weight()})

    with pytest.raises(KeyError, match="mine"):
        FakeCollectives(2, timeout=20).run(rank)


def test_a_rank_that_hangs_is_named():
    def rank(ranks):
        if ranks.rank:
            x = fk.tensor(np.ones((16, 16), np.float32), device="cpu")
            apply(linear, parallel(ranks), {"x": x, "weight0": weight()})

    with pytest.raises(BackendError, match=r"rank 0: nothing: it hangs or has ended"):
        FakeCollectives(2, timeout=0.2).run(rank)


class Late:
    """Threads whose parts come late: one that is gathered is there once it was waited for; and one of a sum
    must not change after it was sent."""

    def __init__(self, monkeypatch):
        self.calls = []
        threads, gather = collectives._Thread, collectives._Thread._start

        def start(ranks, operation, source, target, stream):
            gather(ranks, operation, source, target, stream)
            if operation == "reduce_scatter":
                for rank, value in vars(ranks).pop("sent", {}).items():
                    assert_same_bits("sent", source.numpy().reshape(ranks.size, -1)[rank], value)
                return lambda stream: None
            parts = target.numpy().reshape(ranks.size, -1)
            came = parts.copy()
            parts.view(np.uint8)[...] = 0x7F

            def wait(stream, rank=None):
                self.calls.append(("wait", rank))
                rows = slice(None) if rank is None else rank
                parts[rows] = came[rows]

            return wait

        def send(ranks, source, rank, stream):
            self.calls.append(("send", rank))
            sent = vars(ranks).setdefault("sent", {})
            sent[rank] = source.numpy().reshape(ranks.size, -1)[rank].copy()

        monkeypatch.setattr(threads, "_start", start)
        monkeypatch.setattr(threads, "_send", send)
        monkeypatch.setattr(threads, "by_parts", True)
        monkeypatch.setattr(product_parallel, "LEAST_OPERATIONS", 0)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("recipe", ["current", "block", None])
@pytest.mark.parametrize("mode", ["column", "row"])
def test_products_by_parts_have_the_bits_of_the_whole(recipe, mode, size, monkeypatch):
    """Of whole numbers, whose sums are exact in any order. Each rank's rows are multiplied by themselves as
    they arrive, or before they are sent; with scales of blocks all at once."""
    own, draw = Operands(64 * size, 64 * size, 64 * size), np.random.default_rng(1)
    if recipe == "block":
        own = Operands(128 * size, 128 * size, 128 * size)
    for name in "xwg":
        values = draw.integers(-3, 4, getattr(own, name).shape).astype(np.float32)
        values[0, 0] = 448 if name != "g" or recipe == "block" else 57344
        setattr(own, name, values)
    own.b[:] = np.round(own.b)
    fp8 = None if recipe is None else STATELESS[recipe]
    wanted = together(fp8, own, size, mode, True)
    late = Late(monkeypatch)
    for got, value in zip(together(fp8, own, size, mode, True), wanted, strict=True):
        assert_same_bits(f"{recipe} {mode}", got, value)
    of_ranks = [(kind, rank) for kind, rank in late.calls if rank is not None]
    each = size * (size - 1) if recipe == "current" else 0
    kinds = [kind for kind, _ in of_ranks]
    assert kinds.count("wait") == each
    assert kinds.count("send") == (each if mode == "row" else 0)


def test_small_products_are_made_at_once(monkeypatch):
    least = product_parallel.LEAST_OPERATIONS
    late = Late(monkeypatch)
    monkeypatch.setattr(product_parallel, "LEAST_OPERATIONS", least)
    for mode in ("column", "row"):
        together(STATELESS["current"], OWN, 2, mode, True)
    assert late.calls
    assert all(rank is None for _, rank in late.calls)


def test_what_is_started_is_waited_for():
    def rank(ranks):
        own, whole, part_ = (fk.arrays.as_view(np.zeros(n, np.float32)) for n in (3, 6, 3))
        own.numpy()[:] = ranks.rank + 1
        ranks.start("all_gather", own, whole, 0)
        ranks.wait(whole, 0)
        assert whole.numpy().tolist() == [1, 1, 1, 2, 2, 2]
        ranks.start("reduce_scatter", whole, part_, 0)
        ranks.wait(part_, 0)
        ranks.wait(part_, 0)  # nothing any more
        assert part_.numpy().tolist() == [2.0 * (ranks.rank + 1)] * 3
        ranks.start("all_gather", own, whole, 0)
        for rank in range(ranks.size):  # all is there, where parts do not come by themselves
            ranks.wait_part(whole, rank, 0)
        assert whole.numpy().tolist() == [1, 1, 1, 2, 2, 2]
        ranks.wait(whole, 0)
        ranks.wait_part(whole, 0, 0)  # nothing any more
        for rank in (1 - ranks.rank, ranks.rank):
            ranks.start_part(whole, part_, rank, 0)
        ranks.wait(part_, 0)
        assert part_.numpy().tolist() == [2.0 * (ranks.rank + 1)] * 3
        with pytest.raises(ArgumentError, match="reduce_scatter: source, target"):
            ranks.start_part(own, whole, ranks.rank, 0)
        with pytest.raises(ArgumentError, match="operation: got 'all_reduce'"):
            ranks.start("all_reduce", own, own, 0)

    FakeCollectives(2).run(rank)


def test_a_backward_that_failed_does_not_stand_for_the_next(monkeypatch):
    """What it began to gather is gathered anew, into the same memory."""
    own, multiply, failing = OWN, QuantizedProduct.dgrad, {0, 1}

    def dgrad(product, ws, g, dx):
        rank = int(threading.current_thread().name[-1])
        if product.split and rank in failing:
            failing.discard(rank)
            raise MemoryError
        multiply(product, ws, g, dx)

    memory = [np.zeros(16 << 20, np.uint8) for _ in failing]  # of one call after another, as on a GPU

    def allocate(nbytes, device):
        lent = memory[int(threading.current_thread().name[-1])]
        assert nbytes <= lent.nbytes
        return lent.ctypes.data, lent

    monkeypatch.setattr(QuantizedProduct, "dgrad", dgrad)
    monkeypatch.setattr(scratch, "allocate", allocate)

    def rank(ranks):
        how = {"fp8": STATELESS["current"], "parallel": "column", "group": ranks.name, "sequence": True}
        w, b, g = part(own.w, 0, ranks), part(own.b, 0, ranks), part(own.g, 1, ranks)
        spec = ProductSpec(own.w.shape[1], (w.shape[0],), **how)
        with pytest.raises(MemoryError):
            step(spec, -part(own.x, 0, ranks), w, b, g)
        assert ranks.rank not in failing
        return step(spec, part(own.x, 0, ranks), w, b, g)[2]

    found = np.concatenate(FakeCollectives(2).run(rank))
    monkeypatch.undo()
    assert_same_bits("dW", found, together(STATELESS["current"], own, 2, "column", True)[2])


def test_memory_goes_after_what_was_started_into_it(monkeypatch):
    """Where an error comes between a start and its wait, as that of a GEMM beside the gathering."""
    under_way, early = {0: set(), 1: set()}, []

    class Owner:
        def __init__(self, nbytes):
            self.memory, self.rank = np.zeros(nbytes, np.uint8), int(threading.current_thread().name[-1])
            self.address = self.memory.ctypes.data

        def __del__(self):
            end = self.address + self.memory.nbytes
            early.extend(at for at in under_way[self.rank] if self.address <= at < end)

    def start(ranks, operation, source, target, stream):
        begin(ranks, operation, source, target, stream)
        under_way[ranks.rank].add(target.ptr)
        return lambda stream: under_way[ranks.rank].remove(target.ptr)

    def allocate(nbytes, device):
        owner = Owner(nbytes)
        return owner.address, owner

    def dgrad(product, ws, g, dx):
        raise MemoryError

    begin = collectives._Thread._start
    monkeypatch.setattr(collectives._Thread, "_start", start)
    monkeypatch.setattr(scratch, "allocate", allocate)
    monkeypatch.setattr(QuantizedProduct, "dgrad", dgrad)

    def rank(ranks):
        how = {"fp8": STATELESS["current"], "parallel": "column", "group": ranks.name, "sequence": True}
        w, b, g = part(OWN.w, 0, ranks), part(OWN.b, 0, ranks), part(OWN.g, 1, ranks)
        with pytest.raises(MemoryError):
            step(ProductSpec(256, (128,), **how), part(OWN.x, 0, ranks), w, b, g)
        return dict(ranks._started)

    assert FakeCollectives(2).run(rank) == [{}, {}]
    gc.collect()
    assert not early
    assert under_way == {0: set(), 1: set()}


def test_what_was_started_before_an_error_and_fails_is_logged(caplog):
    """And what another thread has started stays."""
    ranks, whole = Collectives(0, 2), fk.arrays.as_view(np.zeros(2, np.float32))

    def fail(stream):
        raise RuntimeError("gone")

    ranks._start = lambda *call: fail
    ranks.start("all_gather", whole.slice(0, 0, 1), whole, 0, "fc1")
    other = threading.Thread(target=collectives.abandon, args=(0,))
    other.start()
    other.join()
    assert list(ranks._started) == [whole.ptr]
    collectives.abandon(0)
    assert not ranks._started
    assert "all_gather of float32 (1,) in fc1, which was started before an error: gone" in caplog.text


def test_two_threads_make_a_recorded_call_again_at_the_same_time(monkeypatch):
    """The main one and that of a backward pass, each on arrays of its own."""
    recorded, met = [], threading.Barrier(2, timeout=20)

    class Provider:
        def put(self, device, stream, name, work, addresses):
            recorded.append(work)

    class Ranks(Collectives):
        def _call(self, operation, x, label):
            met.wait()  # both have said where their arrays are
            return super()._call(operation, x, label)

        def _all_reduce(self, x, op, stream):
            x.numpy()[:] += 1

    monkeypatch.setattr(collectives, "provider", lambda device: Provider())
    Ranks(0, 2).all_reduce(fk.arrays.as_view(np.zeros(1, np.float32)), "sum", 0)
    arrays = [np.zeros(1, np.float32) for _ in range(2)]
    threads = [threading.Thread(target=recorded[0], args=(array.ctypes.data, 0)) for array in arrays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert arrays == [1, 1]


def test_a_recorded_call_is_made_again_on_other_arrays(monkeypatch):
    """By what a device's provider is given; it keeps no memory alive."""
    recorded = {0: [], 1: []}

    class Provider:
        def put(self, device, stream, name, work, addresses):
            work(*addresses, stream)
            recorded[int(threading.current_thread().name[-1])].append((name, work, addresses))

    monkeypatch.setattr(collectives, "provider", lambda device: Provider())

    def rank(ranks):
        arrays = [np.full(2, ranks.rank + 1.0, np.float32) for _ in range(2)]
        wholes = [np.zeros(4, np.float32) for _ in range(2)]
        ranks.start("all_gather", *map(fk.arrays.as_view, (arrays[0], wholes[0])), 0)
        ranks.wait(fk.arrays.as_view(wholes[0]), 0)
        ranks.all_reduce(fk.arrays.as_view(arrays[0]), "sum", 0)
        (_, begin, _), (_, arrive, _), (name, add, _) = recorded[ranks.rank]
        assert name == "all_reduce sum"
        for _ in range(2):
            begin(arrays[1].ctypes.data, wholes[1].ctypes.data, 0)
            arrive(wholes[1].ctypes.data, 0)
        add(arrays[1].ctypes.data, 0)
        for array, whole in zip(arrays, wholes, strict=True):
            assert array.tolist() == [3, 3]
            assert whole.tolist() == [1, 1, 2, 2]

    FakeCollectives(2).run(rank)


def test_what_ranks_cannot_split_is_refused():
    def rank(ranks):
        spec = parallel(ranks, sequence=True)
        x = fk.tensor(np.ones((15, 16), np.float32), device="cpu")
        with pytest.raises(ShapeError, match="a first dimension, the sequence's, that 2 ranks divide"):
            apply(linear, spec, {"x": x, "weight0": weight()})

    FakeCollectives(2).run(rank)
    x = fk.tensor(np.ones((16, 16), np.float32), device="cpu")
    with pytest.raises(ArgumentError, match="a group of this process that is alive"):
        apply(linear, LinearSpec(ProductSpec(16, (16,), parallel="row", group="none")), {"x": x})
