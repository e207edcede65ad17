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
from fp8kit.execution.memory import ALIGNMENT, ALWAYS, Layout, Region, placed
from fp8kit.formats import uint8
from fp8kit.recipes import NAMED
from fp8kit.spec import Meta
from tests.support.combinations import combinations

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


def step(name: str, recipe: object, retain: bool = False) -> list[np.ndarray]:
    nn.random.manual_seed(5)
    layer = LAYERS[name]()
    rng = np.random.default_rng(0)
    x = tensor(rng.standard_normal((16, 4, 64)).astype(np.float32), requires_grad=True)
    with fk.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(x)
    y.backward(y.view, retain_graph=retain)
    return [y.numpy().copy(), *(arrays.as_view(t.grad).numpy().copy() for t in (x, *layer.parameters()))]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", LAYERS)
def test_shared_memory_changes_no_bit(name: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporaries in memory of their own, in memory that they share, and in what forward saved and gradients,
    which a retained graph does not lend."""
    found, sizes = [], []
    for shared, retain in ((1 << 60, False), (1, True), (1, False)):
        monkeypatch.setattr(memory, "SHARED", shared)
        plans.plans.clear()
        found.append(step(name, RECIPES[recipe], retain))
        ops = plans.plans._values.values()
        lent = [op.lends and not retain for op in ops]
        assert any(lent) == (shared == 1 and not retain)
        layouts = [
            op._lent_scratch if own else op.backward_scratch for op, own in zip(ops, lent, strict=True)
        ]
        sizes.append(sum(layout.nbytes for layout in layouts))
        # also behind what lies in lent memory: GEMMs want it of their operands
        offsets = [at for layout in layouts for _, _, at, *_ in (*layout.parts, *layout._later)]
        assert not any(at % ALIGNMENT for at in offsets)
    plans.plans.clear()
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(one, two)
    assert sizes[1] <= sizes[0]
    assert sizes[2] < sizes[1] or (name, recipe) == ("Linear", "high")


@combinations(
    {
        "name": [name for name, own in NAMED.items() if own.recipe.history is None],
        "exact": {"native or emulated": False, "exact sums": True},
    }
)
def test_every_recipe_takes_lent_memory(name: str, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What dgrad and wgrad both read, or what one makes for itself, is there when it is read."""
    plain = NAMED[name].recipe.quantization
    how, found = plain.summed("exact") if exact else plain, []
    for shared in (1 << 60, 1):
        monkeypatch.setattr(memory, "SHARED", shared)
        plans.plans.clear()
        lifetimes._known.clear()
        found.append(step("Linear", fk.recipe.DataRecipe(how)))
    plans.plans.clear()
    for one, two in zip(*found, strict=True):
        np.testing.assert_array_equal(one, two)


def test_lifetimes_hold_for_every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, ran = LAYERS["LayerNormMLP"](), []
    own = lifetimes._run
    monkeypatch.setattr(lifetimes, "_run", lambda *about: (ran.append(about[0].name), own(*about))[1])
    lifetimes._known.clear()
    monkeypatch.setattr(memory, "SHARED", 1)
    for rows in (16, 32, 48):
        y = layer(tensor(np.ones((rows, 64), np.float32), requires_grad=True))
        y.backward(y.view)
    assert ran == ["norm_mlp"]  # backward; forward has one large temporary


def drawn(draw: random.Random) -> list[tuple[int, tuple[float, float]]]:
    """Buffers of (bytes, time)."""
    lives = []
    for _ in range(12):
        start = draw.randrange(20)
        lives.append((256 * draw.randrange(1, 9), (start, start + draw.randrange(1, 9))))
    return lives


def test_no_two_that_live_at_once_overlap() -> None:
    draw = random.Random(1)
    for _ in range(50):
        lives = drawn(draw)
        places, top = placed(lives)
        assert all(where == 0 for where, _ in places)
        assert top == max(at + size for (_, at), (size, _) in zip(places, lives, strict=True))
        at_once = max(sum(size for size, (a, b) in lives if a <= time < b) for time in range(30))
        assert at_once <= top <= sum(size for size, _ in lives)
        assert not overlapping(lives, places)


def test_what_lies_in_lent_memory_overlaps_nothing_there() -> None:
    draw, smaller = random.Random(2), 0
    for _ in range(50):
        lives, taken = drawn(draw), []
        for at in range(0, 4096, 1024):  # what was saved, until it has been read
            taken.append((at, 1024, (-np.inf, draw.randrange(20))))
        taken.append((4096, 4, ALWAYS))  # behind which nothing may begin at once
        gradient = Region(1024, [(0, 1024, (draw.randrange(20) - 0.5, np.inf))])
        regions = [Region(8192, taken), gradient]
        places, top = placed(lives, regions)
        smaller += top < placed(lives)[1]
        for (where, at), (size, _) in zip(places, lives, strict=True):
            assert at + size <= (top if where == 0 else regions[where - 1].nbytes)
            assert at % ALIGNMENT == 0
        own = [(size, t, (i, at)) for i, region in enumerate(regions, 1) for at, size, t in region.taken]
        both = [*lives, *((size, span) for size, span, _ in own)]
        assert not overlapping(both, [*places, *(place for *_, place in own)])
    assert smaller > 40


def overlapping(lives: list[tuple[int, tuple[float, float]]], places: list[tuple[int, int]]) -> bool:
    """Whether two share bytes that live at once."""
    for (i, (size, a)), (j, (other, b)) in itertools.combinations(enumerate(lives), 2):
        if places[i][0] != places[j][0] or not (a[0] < b[1] and b[0] < a[1]):
            continue
        if places[i][1] < places[j][1] + other and places[j][1] < places[i][1] + size:
            return True
    return False


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
