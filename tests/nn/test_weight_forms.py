"""FP8 weights that the optimiser writes: a training run has the same bits with and without, whatever comes
between its steps."""

from __future__ import annotations

import copy
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import arrays, captured, nn
from fp8kit.autograd import no_grad
from fp8kit.backends import dispatch
from fp8kit.errors import ShapeError
from fp8kit.nn.weight_forms import WeightForm
from fp8kit.optim import SGD, AdamW, GradScaler
from fp8kit.testing import assert_same_bits

DELAYED = fk.recipe.DelayedScaling(amax_history_len=4, margin=1)
RECIPES = {
    "delayed": DELAYED,
    "most recent": fk.recipe.DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent"),
    "host": fk.recipe.DelayedScaling(amax_history_len=3, amax_compute_algo=lambda history: history.max(0)),
    "current": fk.recipe.Float8CurrentScaling(),
    "block": fk.recipe.Float8BlockScaling(),
}
H, TOKENS = 32, 16


@pytest.fixture(autouse=True)
def _deterministic():
    with fk.deterministic(True):
        yield


class Net(nn.Module):
    """One of each layer with weights; the projection to queries, keys and values is a weight in three
    parts."""

    def __init__(self, device, dtype="bfloat16"):
        where = {"params_dtype": dtype, "device": device}
        self.qkv = nn.LayerNormLinear(H, 3 * H, parameters_split=("query", "key", "value"), **where)
        self.out = nn.Linear(3 * H, H, **where)
        self.mlp = nn.LayerNormMLP(H, 48, **where)

    def forward(self, x, first=None):
        return self.mlp(
            self.out(self.qkv(x, is_first_microbatch=first), is_first_microbatch=first),
            is_first_microbatch=first,
        )


class World:
    """A run: the model, its optimiser, what it has drawn and what came out of it."""

    def __init__(self, device, write, optimizer=AdamW, dtype="bfloat16"):
        nn.manual_seed(7)
        self.device, self.write, self.dtype = device, write, dtype
        self.net = Net(device, dtype)
        self.opt = optimizer(self.net.parameters(), lr=1e-2, weight_decay=0.1, write_fp8_weights=write)
        self.rng = np.random.default_rng(11)
        self.seen = []

    def draw(self):
        return fk.tensor(
            self.rng.standard_normal((TOKENS, H)).astype(np.float32), dtype=self.dtype, device=self.device
        )

    def forward(self, recipe=DELAYED, first=None, net=None, **options):
        with fk.autocast(recipe=recipe, **options):
            y = (net or self.net)(self.draw(), first)
        self.seen.append(y.numpy().copy())
        return y

    def backward(self, y):
        y.backward(self.draw().view)

    def step(self, recipe=DELAYED, first=None):
        self.backward(self.forward(recipe, first))
        self.update()

    def update(self):
        self.opt.step()
        self.opt.zero_grad()
        self.note()

    def note(self):
        """Look at all states, as whoever saves them would."""
        state = self.net.state_dict() | self.opt.state_dict()
        self.seen += [state[name].numpy().copy() for name in sorted(state)]


@pytest.fixture
def hits(monkeypatch):
    """How often layers asked for what was written ("asked"), and had it ("found")."""
    count = Counter()
    find = WeightForm.find

    def counted(self, *given):
        found = find(self, *given)
        count.update({"asked": 1, "found": found is not None})
        return found

    monkeypatch.setattr(WeightForm, "find", counted)
    return count


@pytest.fixture
def same(device, hits):
    """Tell a story of two worlds, and compare; returns how often a layer found its weights written."""

    def tell(story, **options):
        seen = []
        for write in (False, True):
            world = World(device, write, **options)
            story(world)
            world.note()
            seen.append(world.seen)
            if not write:
                assert hits["found"] == 0
        for i, (got, want) in enumerate(zip(seen[1], seen[0], strict=True)):
            assert_same_bits(f"array {i}", got, want)
        return hits["found"]

    return tell


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(("optimizer", "dtype"), [(AdamW, "bfloat16"), (SGD, "float32")])
def test_a_run_has_the_same_bits(same, name, optimizer, dtype):
    found = same(
        lambda world: [world.step(RECIPES[name]) for _ in range(11)], optimizer=optimizer, dtype=dtype
    )
    assert found == 3 * 10  # three layers; the first step casts


@pytest.mark.parametrize("name", RECIPES)
def test_micro_batches(same, name):
    """Three to a step: with the cache of ``is_first_microbatch``; without it they find the same weights, but
    for delayed scaling, where the second one's scale is another."""

    def story(world):
        for step in range(10):
            for i in range(3):
                world.backward(world.forward(RECIPES[name], None if step % 2 else i == 0))
            world.update()

    assert same(story) == 3 * 9 * (1 if RECIPES[name].delayed() else 3)


def test_all_within_one_autocast(same):
    """The scale stays the same until its end, and with it what was written; every amax enters the history."""

    def story(world):
        for _ in range(2):
            with fk.autocast(recipe=DELAYED):
                for _ in range(4):
                    world.step()
            world.note()

    assert same(story) == 3 * (3 + 3)


def test_skipped_steps(same):
    """A skipped step leaves the weights, not the scale."""

    def story(world):
        scaler = GradScaler(2.0**8, growth_interval=3)
        for step in range(10):
            y = world.forward()
            scaler.scale(y).backward(world.draw().view)
            if step in (2, 3, 7):
                world.net.out.weight.grad = fk.tensor(
                    np.full((H, 3 * H), np.inf, np.float32), dtype=world.dtype, device=world.device
                ).view
            scaler.step(world.opt)
            scaler.update()
            world.opt.zero_grad()
            world.note()

    assert same(story) == 3 * 9


def test_checkpoint_and_resume(same):
    def story(world):
        for _ in range(5):
            world.step()
        state, optimizer = (
            {n: v.numpy().copy() for n, v in of.state_dict().items()} for of in (world.net, world.opt)
        )
        world.step()
        world.net.load_state_dict(state)  # into the run that goes on
        world.opt.load_state_dict(optimizer)
        world.step()
        world.net = Net(world.device, world.dtype)  # and into a new one
        world.net.load_state_dict(state)
        world.opt = AdamW(world.net.parameters(), lr=1e-2, weight_decay=0.1, write_fp8_weights=world.write)
        world.opt.load_state_dict(optimizer)
        for _ in range(5):
            world.step()

    assert same(story) == 3 * (5 + 4)


def test_another_recipe(same):
    order = [
        "delayed",
        "current",
        "current",
        "block",
        "delayed",
        "most recent",
        "delayed",
        "delayed",
        "block",
        "block",
        "current",
    ]
    assert same(lambda world: [world.step(RECIPES[name]) for name in order]) == 3 * 3  # three times it stays


def test_weights_changed_in_between(same):
    def story(world):
        changes = [
            lambda p: p.copy_(world.draw().numpy()[:1].repeat(p.shape[0], 0)[:, : p.shape[1]].copy()),
            lambda p: p.add_(fk.tensor(np.ones(p.shape, p.dtype.numpy), device=world.device)),
            lambda p: p.zero_(),
            lambda p: p.detach().copy_(np.full(p.shape, 0.125, p.dtype.numpy)),
        ]
        for change in changes:
            world.step()
            with no_grad():
                change(world.net.mlp.fc1_weight)
            world.step()
        world.net.mlp.fc1_weight = nn.Parameter(
            arrays.to(
                arrays.as_view(
                    np.full((48, H), 0.5, np.float32).astype(world.net.mlp.fc1_weight.dtype.numpy)
                ),
                world.net.mlp.fc1_weight.device,
            )
        )
        world.step()
        world.opt = AdamW(world.net.parameters(), lr=1e-2, write_fp8_weights=world.write)
        for _ in range(3):
            world.step()

    # of 12 steps the MLP casts in the first, in four after a change, and in the one with its new weight; the
    # others in the first
    assert same(story) == 2 * 11 + (12 - 1 - 4 - 1)


def test_a_scale_changed_in_between(same):
    def story(world):
        for _ in range(2):
            world.step()
        arrays.copy(
            arrays.as_view(world.net.out.fp8_meta["scaling_fwd"].scale),
            arrays.as_view(np.full(3, 3.0, np.float32)),
        )
        world.step()

    assert same(story) == 3 + 2


def test_shared_weights(same):
    def story(world):
        second = Net(world.device, world.dtype)
        second.out.weight = world.net.out.weight
        world.opt = AdamW(
            [*world.net.parameters(), *(p for p in second.parameters() if p is not second.out.weight)],
            lr=1e-2,
            write_fp8_weights=world.write,
        )
        for _ in range(10):
            world.backward(world.forward())
            world.backward(world.forward(net=second))
            world.update()

    assert same(story) == 6 * 9


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_other_passes_in_between(same, name):
    """High precision, calibration, inference, training passes that nobody goes back through or that fail."""

    def story(world):
        def fail(net):
            with fk.autocast(recipe=RECIPES[name]):
                net(world.draw())
                raise ZeroDivisionError

        def failing(net):
            with pytest.raises(ZeroDivisionError):
                fail(net)

        def inferring(net):
            with no_grad():
                world.forward(RECIPES[name])
                world.forward(RECIPES[name], True)
                world.forward(RECIPES[name], False)

        others = [
            inferring,
            failing,
            lambda net: world.forward(RECIPES[name], enabled=False),
            lambda net: world.forward(RECIPES[name]),
            lambda net: world.forward(RECIPES[name], enabled=False, calibrating=True),
            lambda net: net.eval(),
            lambda net: world.forward(RECIPES[name], calibrating=True),
            lambda net: [part.forget() for _, part in net.named_modules()],
            lambda net: world.forward(RECIPES[name], net=copy.deepcopy(net)),
        ]
        for other in others:
            world.step(RECIPES[name])
            other(world.net)
            world.note()
            world.step(RECIPES[name])

    assert same(story) > 3 * 9


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_a_state_taken_away_before_the_step(same, name):
    """A checkpoint without FP8 state is loaded between backward and the step: there are no scales to cast
    by."""

    def story(world):
        plain = {n: v.numpy().copy() for n, v in world.net.state_dict().items()}
        for _ in range(2):
            world.step(RECIPES[name])
            world.backward(world.forward(RECIPES[name]))
            world.net.load_state_dict(plain)
            world.update()
            world.step(RECIPES[name])

    assert same(story) == 3 * (3 if name == "delayed" else 5)


def test_a_call_that_is_refused_records_nothing(same):
    def story(world):
        for _ in range(3):
            world.step()
            with fk.autocast(recipe=DELAYED), pytest.raises(ShapeError):
                world.net.out(fk.tensor(np.ones((4, H), np.float32), dtype=world.dtype, device=world.device))
            world.note()
            world.step()

    assert same(story) > 0


@pytest.mark.parametrize("name", ["delayed", "current", "block"])
def test_two_optimisers_of_one_layer(same, name):
    """One writes, one does not; one that steps last leaves nothing that holds, one that steps first is
    written over."""

    def story(world):
        weights = dict(world.net.named_parameters())
        of_key = weights.pop("qkv.key_weight")
        of_fc2 = weights.pop("mlp.fc2_weight")
        world.opt = AdamW(weights.values(), lr=1e-2, write_fp8_weights=world.write)
        other, writing = SGD([of_key], lr=1e-2), SGD([of_fc2], lr=1e-2, write_fp8_weights=world.write)
        for _ in range(10):
            world.backward(world.forward(RECIPES[name]))
            for opt in (world.opt, other, writing):
                opt.step()
                opt.zero_grad()
            world.note()

    assert same(story) == 2 * 9


@pytest.mark.parametrize("name", ["delayed", "current", "block"])
def test_weights_that_are_not_trained(same, name):
    """Nothing changes them: with current scaling what was written of them holds for good."""

    def story(world):
        for step in range(8):
            world.net.out.weight.requires_grad = step in (0, 1, 2)
            world.step(RECIPES[name])
        world.net.out.weight.requires_grad = True
        world.step(RECIPES[name])

    assert same(story) == 2 * 8 + (3 if name == "delayed" else 8)


def test_equal_recipes_are_one(same):
    def story(world):
        for _ in range(6):
            world.step(fk.recipe.DelayedScaling(amax_history_len=4))
        for length in (2, 6):
            world.step(fk.recipe.DelayedScaling(amax_history_len=length))

    assert same(story) == 3 * 5  # the history's length is a part of the recipe: a step by another one casts


def test_threads(same):
    """Every call in a thread of its own."""

    def story(world):
        def own(call, *given):
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(call, *given).result()

        def forward():
            with fk.deterministic(True):
                return world.forward()

        for _ in range(6):
            y = own(forward)
            own(world.backward, y)
            own(world.update)

    assert same(story) == 3 * 5


def test_a_step_that_fails(same, device, monkeypatch):
    """It leaves nothing that holds, whatever it has done to the weights."""

    def failing(*given):
        raise MemoryError

    def story(world):
        kernels = dispatch.kernels(world.net.out.weight.device)
        for _ in range(2):
            world.step()
            world.backward(world.forward())
            with monkeypatch.context() as patched:
                patched.setattr(kernels, "adamw_", failing)
                with pytest.raises(MemoryError):
                    world.opt.step()
            world.note()
            world.step()

    assert same(story) == 3 * 3


@pytest.mark.parametrize("name", ["delayed", "current", "block"])
def test_a_backward_pass_after_the_step(same, name):
    """It goes back through the weights as they were: what it needs is not written over."""

    def story(world):
        weights = [
            weight
            for layer in (world.net.qkv, world.net.out, world.net.mlp)
            for weight in layer.weight_inputs().values()
        ]
        # the others are read in backward, and so may not change
        world.opt = AdamW(weights, lr=1e-2, write_fp8_weights=world.write)
        for _ in range(5):
            first, second = world.forward(RECIPES[name]), world.forward(RECIPES[name])
            world.backward(first)
            world.update()
            world.backward(second)
            world.opt.zero_grad()
            world.note()

    assert same(story) == 3 * 4 * (1 if name == "delayed" else 2)


@pytest.mark.parametrize("name", ["delayed", "current", "block"])
def test_recomputation(same, name):
    def story(world):
        for i in range(8):
            x = world.draw()
            with fk.autocast(recipe=RECIPES[name]):
                y = fk.checkpoint(world.net, x, first=None if i % 2 else True)
            world.seen.append(y.numpy().copy())
            world.backward(y)
            world.update()

    assert same(story) == 3 * 7


@pytest.mark.parametrize("name", ["delayed", "current", "block"])
def test_recomputation_within_a_layer(same, name):
    """Backward casts the weight of the second product once more, or reads what was written."""

    def story(world):
        world.net.mlp = nn.LayerNormMLP(H, 48, checkpoint=True, params_dtype=world.dtype, device=world.device)
        world.opt = AdamW(world.net.parameters(), lr=1e-2, write_fp8_weights=world.write)
        for _ in range(5):
            world.step(RECIPES[name])

    assert same(story) == 3 * 4


def test_no_form_lives_through_a_graph(same):
    """While one is captured none is used and none is written; after a replay none holds."""

    def story(world):
        world.step()
        with captured.capture():
            world.step()
        for _ in range(2):
            world.step()
        captured.replayed()
        for _ in range(2):
            world.step()

    assert same(story) == 3 * 2  # of six steps: not the first, in the capture, after it, and after the replay
