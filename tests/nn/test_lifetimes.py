"""Temporaries that are never in use at once share memory, and no two that are."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import arrays, nn
from fp8kit.arrays import CPU
from fp8kit.autograd import tensor
from fp8kit.buffers import free, free_contents
from fp8kit.execution import lifetimes, memory, plans
from fp8kit.execution.memory import ALWAYS, Layout, placed
from fp8kit.formats import uint8
from fp8kit.spec import Meta

LAYERS = {
    "Linear": lambda: nn.Linear(64, 96, device="cpu"),
    "LayerNormMLP": lambda: nn.LayerNormMLP(64, 128, activation="swiglu", device="cpu"),
    "TransformerLayer": lambda: nn.TransformerLayer(
        64, 128, 2, hidden_dropout=0.1, attention_dropout=0.0, device="cpu"
    ),
}
RECIPES = {
    "high": None,
    "delayed": fk.recipe.DelayedScaling(),
    "current": fk.recipe.Float8CurrentScaling(),
    "block": fk.recipe.Float8BlockScaling(),
}


def step(name: str, recipe: object) -> list[np.ndarray]:
    nn.random.manual_seed(5)
    layer = LAYERS[name]()
    rng = np.random.default_rng(0)
    x = tensor(rng.standard_normal((16, 4, 64)).astype(np.float32), requires_grad=True)
    with fk.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(x)
    y.backward(y.view)
    return [y.numpy().copy(), *(arrays.as_view(t.grad).numpy().copy() for t in (x, *layer.parameters()))]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", LAYERS)
def test_shared_memory_changes_no_bit(name: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, sizes = [], []
    for shared in (1, 1 << 60):
        monkeypatch.setattr(memory, "SHARED", shared)
        plans.plans.clear()
        found.append(step(name, RECIPES[recipe]))
        sizes.append(sum(op.backward_scratch.nbytes for op in plans.plans._values.values()))
    plans.plans.clear()
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
    assert sizes[0] < sizes[1] or (name == "Linear" and sizes[0] == sizes[1])


def test_lifetimes_hold_for_every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, ran = LAYERS["LayerNormMLP"](), []
    own = lifetimes._run
    monkeypatch.setattr(lifetimes, "_run", lambda *about: (ran.append(about[0].name), own(*about))[1])
    lifetimes._known.clear()
    monkeypatch.setattr(memory, "SHARED", 1)
    for rows in (16, 32, 48):
        layer(tensor(np.ones((rows, 64), np.float32), requires_grad=True))
    assert ran == ["norm_mlp"]  # backward; forward has one large temporary


def test_no_two_that_live_at_once_overlap() -> None:
    draw = random.Random(1)
    for _ in range(50):
        lives = []
        for _ in range(12):
            start = draw.randrange(20)
            lives.append((256 * draw.randrange(1, 9), (start, start + draw.randrange(1, 9))))
        offsets, top = placed(lives)
        assert top == max(at + size for at, (size, _) in zip(offsets, lives, strict=True))
        at_once = max(sum(size for size, (a, b) in lives if a <= time < b) for time in range(30))
        assert at_once <= top <= sum(size for size, _ in lives)
        for (i, (size, a)), (j, (other, b)) in itertools.combinations(enumerate(lives), 2):
            if a[0] < b[1] and b[0] < a[1]:
                assert offsets[i] + size <= offsets[j] or offsets[j] + other <= offsets[i]


def test_what_is_read_again_lies_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SHARED", 512)
    metas = {name: Meta((size,), uint8) for name, size in {"w": 512, "a": 512, "b": 512, "s": 8}.items()}
    spans = {"w": ((0.0, 2.0), (4.0, 6.0)), "a": ((1.0, 5.0),), "b": ((3.0, 6.0),)}
    layout = Layout(metas, spans=lambda: spans)
    assert layout.nbytes == 256 + 3 * 512
    for _ in range(2):  # each call has views of its own
        views = layout.at(4096, CPU)
        first = views["w"].ptr
        free(views, "a")  # only streamed buffers go
        free_contents(views, "w", "a", "s")
        assert sorted(view.ptr - 4096 for view in views.values()) == [0, 256, 256 + 512, 256 + 1024]
        assert views["w"].ptr != first
    assert Layout(metas, spans=dict).nbytes == 256 + 3 * 512
    assert lifetimes.later(spans, 10, 15)["w"] == ((10, 12), (14, 15))
    assert ALWAYS[0] == 0
