"""Steps whose calls are known are the steps that they stand for: the same bits, whatever the data, on both
engines."""

from __future__ import annotations

import contextlib
import gc
import heapq
import threading
import weakref
from collections import defaultdict

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import arrays, nn
from fp8kit.autograd import tensor
from fp8kit.backends import dispatch
from fp8kit.backends.cuda import launch, moving, recorded
from fp8kit.execution import plans, replay
from fp8kit.optim import AdamW
from fp8kit.testing.compare import assert_close
from tests.support.combinations import combinations

STEPS = 12
RECIPES = {
    "high": None,
    "delayed": fk.recipe.DelayedScaling(),
    "current": fk.recipe.Float8CurrentScaling(),
    "block": fk.recipe.Float8BlockScaling(),
}
LAYERS = {
    "Linear": lambda device: nn.Linear(128, 64, params_dtype="bfloat16", device=device),
    "LayerNormMLP": lambda device: nn.LayerNormMLP(
        128, 256, activation="swiglu", params_dtype="bfloat16", device=device
    ),
    "TransformerLayer": lambda device: nn.TransformerLayer(
        128, 256, 4, hidden_dropout=0.1, attention_dropout=0.1, params_dtype="bfloat16", device=device
    ),
}


class Blocks:
    """An allocator of CuPy's that gives the lowest free block of just the wanted size: steps that allocate
    alike get the same addresses. CuPy's pool splits blocks, joins them and takes one of many as it comes."""

    def __init__(self):
        import cupy

        self.cuda, self.pool, self.free = cupy.cuda, cupy.get_default_memory_pool(), defaultdict(list)

    def malloc(self, size):
        free = self.free[size]
        if not free:
            made = self.pool.malloc(size)
            free.append((made.ptr, made))
        block, owner = heapq.heappop(free), _Owner()
        weakref.finalize(owner, heapq.heappush, free, block).atexit = False
        memory = self.cuda.UnownedMemory(block[0], size, owner, self.cuda.runtime.getDevice())
        return self.cuda.MemoryPointer(memory, 0)


class _Owner:
    """Who has a block, as long as it lives."""


@contextlib.contextmanager
def steady(device):
    """Within, a step's addresses are those of the step before: ``Blocks``, and no collector of garbage that
    frees some whenever it likes."""
    if device == "cpu":
        yield
        return
    import cupy

    gc.collect()
    gc.disable()
    try:
        with cupy.cuda.using_allocator(Blocks().malloc):
            yield
    finally:
        gc.enable()


def train(name: str, recipe: object, device: str, forget: bool) -> list[np.ndarray]:
    """Outputs, gradients and parameters of some steps on different data; ``forget``: no step knows the calls
    of another."""
    nn.random.manual_seed(3)
    layer = LAYERS[name](device)
    optimizer = AdamW(list(layer.parameters()), lr=1e-2)
    rng, found = np.random.default_rng(0), []
    for step in range(STEPS):
        if forget:
            for op in plans.plans._values.values():
                for known in (op._forward_replays, op._backward_replays):
                    if known is not None:
                        known.forget()
        x = tensor(
            rng.standard_normal((16, 4, 128)).astype(np.float32) * 2.0**step,
            dtype="bfloat16",
            device=device,
            requires_grad=True,
        )
        with fk.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(x)
        y.backward(y.view)
        found += [y.numpy().copy(), arrays.as_view(x.grad).numpy().copy()]
        optimizer.step()
        optimizer.zero_grad()
        del x, y
    return found + [p.numpy().copy() for p in layer.parameters()]


# without a GPU nothing is recorded, whichever layer it is
@combinations({"name": LAYERS.keys(), "recipe": RECIPES.keys()}, usual=["LayerNormMLP-delayed"])
def test_known_calls_change_no_bit(name, recipe, device, monkeypatch):
    again, moved = [], []
    as_it_was, elsewhere = recorded.Recording.__call__, moving.Moving.__call__
    monkeypatch.setattr(recorded.Recording, "__call__", lambda self: (again.append(self), as_it_was(self)))

    def counted(self, addresses):
        done = elsewhere(self, addresses)
        moved.extend([self] * done)
        return done

    monkeypatch.setattr(moving.Moving, "__call__", counted)
    monkeypatch.setattr(recorded, "OFTEN", 2)
    with fk.deterministic(True):
        with steady(device):
            wanted = train(name, RECIPES[recipe], device, forget=True)
        again.clear()
        moved.clear()
        with steady(device):
            got = train(name, RECIPES[recipe], device, forget=False)
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))
    known = replay.replays(dispatch.kernels(arrays.device(device))) is not None
    assert known == (device == "cuda")
    if not known:
        assert not again + moved
        return
    # From the fourth step on, at the latest, addresses are those of the step before. Each of a call's two
    # passes is moved from the second step on, until the addresses have come again STEADY times in a row; then
    # it is recorded as it is, done again in the last four steps, and a graph in the last two.
    assert len(again) + len(moved) >= STEPS
    assert len(again) >= STEPS // 2
    assert any(one._at_once and not one.steps for one in again)


@pytest.mark.parametrize(
    "options",
    [{"bias_type": "post_scale_bias"}, {"softmax_type": "learnable"}, {}],
    ids=["bias", "sink", "plain"],
)
def test_attention_by_several_kernels(options, device):
    """float32 takes the unfused way, which zeroes sums that its kernels add to."""
    rng = np.random.default_rng(1)
    kind = options.get("bias_type", "no_bias")
    layer = nn.DotProductAttention(2, 32, softmax_type=options.get("softmax_type", "vanilla"), device=device)
    grads = []
    for factor in (1.0, 1.0, 3.0, 1.0, 1.0, 1.0):
        rng = np.random.default_rng(1)
        q, k, v = (
            tensor(
                rng.standard_normal((8, 2, 2, 32)).astype(np.float32) * np.float32(factor),
                device=device,
                requires_grad=True,
            )
            for _ in range(3)
        )
        bias = tensor(rng.standard_normal((1, 2, 8, 8)).astype(np.float32), device=device, requires_grad=True)
        more = {} if kind == "no_bias" else {"core_attention_bias_type": kind, "core_attention_bias": bias}
        y = layer(q, k, v, **more)
        y.backward(y.view)
        grads.append([arrays.as_view(x.grad).numpy().copy() for x in (q, k, v, bias) if x.grad is not None])
        layer.zero_grad()
        del q, k, v, bias, y
    assert len(grads[0]) == (4 if kind != "no_bias" else 3)
    for later in (grads[1], *grads[3:]):
        for one, other in zip(later, grads[0], strict=True):
            np.testing.assert_array_equal(one, other)


def test_requests_in_threads_of_their_own(device):
    """A thread that is new, and whose every call is known."""
    layer, found = nn.RMSNorm(64, device=device), []
    x = tensor(np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32), device=device)

    def request():
        with fk.autograd.no_grad():
            found.append(layer(x).numpy().copy())

    for _ in range(6):
        thread = threading.Thread(target=request)
        thread.start()
        thread.join()
    assert len(found) == 6
    for one in found[1:]:
        np.testing.assert_array_equal(one, found[0])


def test_calls_of_nothing(device, monkeypatch):
    """No rows launch nothing, every time, whichever device is current."""
    if device == "cuda":
        entry_point = launch.entry_point
        # as where there are several devices
        monkeypatch.setattr(launch, "entry_point", lambda: (entry_point()[0], lambda: 0))
    for layer in (nn.RMSNorm(64, device=device), nn.Linear(64, 32, device=device)):
        for _ in range(4):
            assert layer(tensor(np.zeros((0, 64), np.float32), device=device)).shape[0] == 0


def test_work_beside_kernels_is_done_again(device):
    """A cast that zeroes amaxes by the provider, over the same memory with other data."""
    host = np.linspace(-4, 4, 64, dtype=np.float32).reshape(4, 16)
    x = arrays.to(arrays.as_view(host.copy()), arrays.device(device))
    for factor in (8.0, 1.0, 0.25):
        arrays.copy(x, arrays.as_view(host * np.float32(factor)))
        q = fk.quantize(x, fk.E4M3)
        scale_inv = 4 * factor / 448
        assert_close(
            "1 / scale", arrays.as_view(q.scale_inv).numpy(), [scale_inv], "float64", 1e-6 * scale_inv
        )
        del q


def test_recordings_are_forgotten_at_the_end_of_a_process(monkeypatch):
    """When the module's names are gone already."""
    own, total = replay.Replays(lambda: None), replay.Replays.total
    own._moving[()] = None
    monkeypatch.setattr(replay, "Replays", None)
    own.__del__()
    assert type(own).total == total - 1
    type(own).total = total
