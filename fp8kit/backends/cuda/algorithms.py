"""Products by the fastest of cuBLASLt's algorithms: a problem's candidates are timed once, when it comes for
the third time; the answer is kept on disk. That takes 15 ms and more, so a process times few problems, and
none any more once it has met many: a training whose batches have ever other lengths takes the heuristic's
first candidate, or what a product of about the same size has taken (``cublaslt.MatmulPlan``), and does not
wait where one of its lengths comes twice.

The heuristic's first candidate is not always its best: over a transformer layer's shapes the best of eight is
up to 8 % faster, and with a bias a relative of theirs (``candidates``) another 8 % (benchmarks/NOTES.md).
Which one wins depends on clocks and neighbours, and algorithms differ in how they sum; so these kernels may
give other bits in another process, say so (``OpImpl.deterministic``), and are left out under
``fk.deterministic``, where the first one is taken.
"""

from __future__ import annotations

import functools
import hashlib
import statistics
from collections.abc import Callable

from fp8kit import cache
from fp8kit.arrays import Device
from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda.cublaslt import MatmulPlan, bindings
from fp8kit.backends.cuda.device import provider
from fp8kit.errors import BackendError

SMALLEST = 2**27  # multiply-adds: a smaller product takes some microseconds whatever the algorithm
# multiply-adds from which on an FP8 product's relatives are timed, too: it takes 50 us and more on an H200
WIDE = 2**35
_FINALISTS = 8  # candidates that are measured again after a first look at all of them
_ROUNDS = 7  # times each of these is measured, in turn with the others, so that all see the same clocks
_SHORTEST = 3e-4  # seconds that one measurement takes at least
TIMED_AT = 3  # the call of a problem that times it: one that comes twice may be a length met by chance
_MOST = 32  # problems of a device that a process times; a transformer layer has 12
_MANY = 256  # problems of a device after which none is timed or looked up: those of 20 lengths of a layer
_met: dict[int, int] = {}  # device -> problems that could be timed
_timed: dict[int, int] = {}  # device -> problems timed
_TIMING = launch.Locks()


def tune(plan: MatmulPlan, run: Callable[[int], None], stream: int) -> None:
    """Before a call of ``plan``, give it its fastest algorithm where that is known or worth to be found.
    ``run(out)`` launches the product with its operands, writing to the address ``out``.

    Nothing is timed, and the plan stays as it is, at its first calls, and while ``stream`` is captured into a
    graph.
    """
    key, device = plan.key, plan.device
    size = key.batch * key.m * key.n * key.k
    if size < SMALLEST:
        plan.tuned = True
        return
    with _TIMING[device]:  # one problem at a time: two timed at once would slow each other
        plan.calls += 1
        first = plan.calls == 1
        _met[device] = _met.get(device, 0) + first
        if plan.tuned or _met[device] > _MANY:
            plan.tuned = True
        elif first:
            kept = _recall(plan)
            plan.tuned = kept is not None and plan.take(kept)
        elif plan.calls >= TIMED_AT and not launch.capturing(stream):
            if _timed.get(device, 0) < _MOST and plan.algorithms > 1:
                _timed[device] = _timed.get(device, 0) + 1
                # where it was measured what they give
                if size >= WIDE and key.scaling == ("tensor", "tensor"):
                    plan.widen()
                times = _times(plan, run, stream)
                plan.choose(min(times, key=times.__getitem__))
                plan.lend()
                _keep(plan, times)
            plan.tuned = True


def _times(plan: MatmulPlan, run: Callable[[int], None], stream: int) -> dict[int, float]:
    """Median seconds of the best candidates. The output goes to memory of its own: what is accumulated onto
    stays as it is. A candidate that cuBLASLt refuses after all has none; BackendError where it refuses every
    one."""
    calls, key = launch.runtime(), plan.key
    span = key.out.itemsize * ((key.batch - 1) * key.out_step + key.m * key.out_stride)
    with launch.current_device(plan.device):
        out, _memory = provider.alloc(span, Device("cuda", plan.device))
        calls.memsetAsync(out, 0, span, stream)
        events = calls.eventCreate(), calls.eventCreate()
        try:

            def seconds(candidate: int, repeats: int) -> float:
                plan.choose(candidate)
                calls.eventRecord(events[0], stream)
                for _ in range(repeats):
                    run(out)
                calls.eventRecord(events[1], stream)
                calls.eventSynchronize(events[1])
                return float(calls.eventElapsedTime(*events)) / 1e3 / repeats

            first, refused = {}, None
            for candidate in range(plan.algorithms):  # loads the algorithms' code, too
                try:
                    first[candidate] = seconds(candidate, 1)
                except BackendError as error:
                    refused = error
            if refused is not None and not first:
                raise refused
            repeats = max(1, min(20, round(_SHORTEST / max(min(first.values()), 1e-6))))
            # in both orders: no candidate always runs when the chip is warmer
            looks = [
                {candidate: seconds(candidate, repeats) for candidate in order}
                for order in (first, reversed(first))
            ]
            best = sorted(first, key=lambda candidate: min(look[candidate] for look in looks))[:_FINALISTS]
            rounds = [
                {one: seconds(one, repeats) for one in best[:: -1 if i % 2 else 1]} for i in range(_ROUNDS)
            ]
        finally:
            plan.choose(0)
            for event in events:
                calls.eventDestroy(event)
    return {candidate: statistics.median(times[candidate] for times in rounds) for candidate in best}


@functools.cache
def _where(device_index: int) -> str:
    """Returns what an answer holds for: this kind of device with this cuBLASLt."""
    name = launch.runtime().getDeviceProperties(device_index)["name"]
    return f"{name.decode() if isinstance(name, bytes) else name}, cuBLASLt {bindings().get_version()}"


def _name(plan: MatmulPlan) -> str:
    text = f"{_where(plan.device)}, {plan.key}"
    return f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _recall(plan: MatmulPlan) -> bytes | None:
    """Returns the kept answer, or None where there is none that can be read."""
    kept = cache.read("products", _name(plan))
    found = None if kept is None else cache.unseal(kept[1])
    try:
        return None if found is None else bytes.fromhex(found["algorithm"])
    except (KeyError, TypeError, ValueError):  # another fp8kit's
        return None


def _keep(plan: MatmulPlan, times: dict[int, float]) -> None:
    """Keep the answer for the next process."""
    kept = {
        "where": _where(plan.device),
        "product": str(plan.key),
        "algorithm": plan.chosen.hex(),
        "seconds": times,
    }
    cache.write("products", _name(plan), cache.seal(kept))
