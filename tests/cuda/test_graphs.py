"""``fk.graph``: a replayed training step has the bits of an eager one, and what cannot be captured says
so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import arrays, nn
from fp8kit.arrays import CPU, ArrayView
from fp8kit.backends.policy import get_policy, policy_context
from fp8kit.errors import ArgumentError, BackendError, Fp8kitError
from fp8kit.testing import assert_same_bits

STEPS, WARMUP = 7, 2
RECIPES = {
    "high": None,
    "delayed": fk.recipe.DelayedScaling(amax_history_len=3),
    "current": fk.recipe.Float8CurrentScaling(),
    "most recent": fk.recipe.DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent"),
}


class Step:
    """A model, its optimiser, and one step of training; the learning rate lies on the device."""

    def __init__(self, device: str, recipe: Any) -> None:
        nn.manual_seed(3)
        self.first = nn.LayerNormLinear(32, 48, params_dtype="bfloat16", device=device)
        self.drop = nn.Dropout(0.25)
        self.second = nn.LayerNormMLP(48, 64, params_dtype="bfloat16", device=device)
        self.lr = arrays.to(arrays.as_view(np.full(1, 1e-2, np.float32)), arrays.device(device))
        parameters = [*self.first.parameters(), *self.second.parameters()]
        self.opt = fk.optim.AdamW(parameters, lr=self.lr, weight_decay=0.1)
        self.recipe = recipe
        self.calls = 0

    def __call__(self, x: Any, target: Any) -> Any:
        self.calls += 1
        with fk.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            y = self.second(self.drop(self.first(x)))
        y.backward(target)
        self.opt.step()
        grads = {"bias": self.first.bias.grad}  # type: ignore[attr-defined]
        self.opt.zero_grad()
        return y, grads

    def state(self) -> dict[str, Any]:
        """Everything that a step changes, on the host."""
        found = {f"1.{name}": view.numpy() for name, view in self.first.state_dict().items()}
        found |= {f"2.{name}": view.numpy() for name, view in self.second.state_dict().items()}
        found |= {f"opt.{name}": view.numpy() for name, view in self.opt.state_dict().items()}
        return found | {f"rng.{name}": value for name, value in nn.get_rng_state().items()}


def batches(device: str) -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(5)
    return [
        tuple(
            fk.tensor(
                rng.standard_normal((40, 32 if i == 0 else 48)).astype(np.float32),
                dtype="bfloat16",
                device=device,
            )
            for i in range(2)
        )
        for _ in range(STEPS)
    ]


def run(device: str, recipe: Any, graphed: bool) -> tuple[list[Any], dict[str, Any], int]:
    step = Step(device, recipe)
    call: Any = fk.graph(step, warmup=WARMUP) if graphed else step
    results = []
    for i, (x, g) in enumerate(batches(device)):
        if i == WARMUP + 2:
            arrays.copy(step.lr, arrays.as_view(np.full(1, 3e-2, np.float32)))
        y, grads = call(x, g.view)
        results.append((y, grads["bias"]))
    return [(y.numpy(), arrays.as_view(g).numpy()) for y, g in results], step.state(), step.calls


def same_training(device: str, recipe: Any, calls: int) -> None:
    with fk.deterministic(True):
        wanted, state, _ = run(device, recipe, False)
        got, other, counted = run(device, recipe, True)
    assert counted == calls
    for i, ((y, g), (want, grad)) in enumerate(zip(got, wanted, strict=True)):
        assert_same_bits(f"y of step {i}", y, want)
        assert_same_bits(f"gradient of step {i}", g, grad)
    assert set(other) == set(state)
    for name, value in state.items():
        assert_same_bits(name, other[name], value)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_replays_train_as_eager_steps_do(recipe: str) -> None:
    same_training("cuda", RECIPES[recipe], WARMUP + 1)


@pytest.mark.gpu
def test_a_transformer_layer_with_dropout() -> None:
    results = []
    for graphed in (False, True):
        nn.manual_seed(9)
        layer = nn.TransformerLayer(64, 128, 4, params_dtype="bfloat16", device="cuda")
        opt = fk.optim.SGD(layer.parameters(), lr=1e-2, momentum=0.9)

        def step(x: Any, layer: Any = layer, opt: Any = opt) -> Any:
            with fk.autocast(recipe=RECIPES["delayed"]):
                y = layer(x)
            y.backward(y.view)
            opt.step()
            opt.zero_grad()
            return y

        call = fk.graph(step) if graphed else step
        rng = np.random.default_rng(2)
        with fk.deterministic(True):
            out = [
                call(
                    fk.tensor(
                        rng.standard_normal((32, 2, 64)).astype(np.float32), dtype="bfloat16", device="cuda"
                    )
                )
                for _ in range(5)
            ]
        results.append([y.numpy() for y in out] + [view.numpy() for view in layer.state_dict().values()])
    for got, want in zip(results[1], results[0], strict=True):
        assert_same_bits("transformer", got, want)


@pytest.mark.gpu
def test_memory_of_a_graph_stays_its_own() -> None:
    """Whatever is allocated, freed and given back between replays, they give what they gave."""
    import cupy

    layer = nn.LayerNormMLP(32, 64, params_dtype="float32", device="cuda")
    x = fk.tensor(np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32), device="cuda")
    call = fk.graph(lambda x: layer(x), warmup=1)
    first, second = call(x).numpy(), call(x).numpy()
    assert_same_bits("capture", second, first)
    for _ in range(4):
        cupy.get_default_memory_pool().free_all_blocks()
        trash = [cupy.full(n, 7.0, cupy.float32) for n in (10, 1000, 100_000, 1 << 22)]
        with cupy.cuda.Stream(non_blocking=True) as other:
            trash.append(cupy.full(1 << 22, 9.0, cupy.float32))
            again = call(x).numpy()
            other.synchronize()
        del trash
        assert_same_bits("replay", again, first)


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["item", "numpy", "host array", "finite", "synchronize"])
def test_what_the_host_waits_for_cannot_be_captured(what: str) -> None:
    layer = nn.Linear(32, 32, device="cuda")
    x = fk.tensor(np.ones((16, 32), np.float32), device="cuda")

    def step(x: Any) -> Any:
        if what == "host array":
            x = fk.tensor(np.ones((16, 32), np.float32), device="cuda")
        # no scales that a step leaves behind
        with fk.autocast(recipe=RECIPES["current"], check_finite=what == "finite"):
            y = layer(x)
        if what == "item":
            (y.view.slice(0, 0, 1).slice(1, 0, 1)).numpy().item()
        if what == "numpy":
            y.numpy()
        if what == "synchronize":
            fk.synchronize(arrays.device("cuda"))
        return y

    call = fk.graph(step, warmup=1)
    want = call(x).numpy()
    for _ in range(2):
        with pytest.raises(
            BackendError, match=r"graph: function: got a (copy between host and device|wait for the device)"
        ):
            call(x)
    assert_same_bits("eager again", step(x).numpy(), want)


# --- what needs no GPU: the CPU in the part of a device that captures ---------------------------------------


class Recording:
    """Work that is done at each launch, as a graph's is, and not at the capture, which returns buffers of the
    right kind."""

    def __init__(self, function: Any) -> None:
        self.function = function
        blank = fk.tensor(np.zeros((40, 48), np.float32), dtype="bfloat16")
        self.result = (blank, {"bias": arrays.zeros((48,), blank.dtype, CPU)})

    def launch(self) -> None:
        for own, fresh in zip(self.views(self.result), self.views(self.function()), strict=True):
            arrays.copy(own, fresh)

    @staticmethod
    def views(result: Any) -> list[ArrayView]:
        y, grads = result
        return [y.view, arrays.as_view(grads["bias"])]


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(device: Any, function: Any) -> Any:
        recording = Recording(function)
        return recording.result, recording

    monkeypatch.setattr(type(arrays.provider(CPU)), "capture", staticmethod(capture), raising=False)


@pytest.mark.usefixtures("capturing")
@pytest.mark.parametrize("recipe", ["high", "delayed"])
def test_each_call_is_one_step_with_its_own_arguments_and_results(recipe: str) -> None:
    same_training("cpu", RECIPES[recipe], STEPS)


class Held:
    """A module, an optimiser and a scaler whose step a recording holds; what is replayed is nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        capture = staticmethod(lambda device, function: (function(), SimpleNamespace(launch=lambda: None)))
        monkeypatch.setattr(type(arrays.provider(CPU)), "capture", capture, raising=False)
        self.layer = nn.Sequential(nn.Linear(4, 4, device="cpu"), nn.Dropout(0.5))
        self.opt = fk.optim.AdamW(self.layer.parameters(), lr=1e-2)
        self.scaler = fk.optim.GradScaler()
        self.recipe = fk.recipe.DelayedScaling(amax_history_len=2)
        self.call = fk.graph(self.step, warmup=1)
        self.x = np.ones((3, 4), np.float32)
        for _ in range(3):
            self.call(self.x)

    def step(self, x: Any) -> None:
        with fk.autocast(recipe=self.recipe):
            y = self.layer(fk.tensor(x))
        self.scaler.scale(y).backward(np.ones((3, 4), np.float32))
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad()


def _new_memory(held: Held) -> None:
    weight = held.layer[0].weight
    held.layer[0].weight = nn.Parameter(arrays.as_view(weight.numpy().copy()))


def _longer_history(held: Held) -> None:
    with fk.autocast(recipe=fk.recipe.DelayedScaling(amax_history_len=5)):
        held.layer(fk.tensor(held.x))


CHANGES = {
    "lr": (
        lambda h: setattr(h.opt, "lr", 2e-2),
        r"AdamW.param_groups\[0\]: lr: got 0.02, expected 0.01, as at the capture",
    ),
    "weight decay": (
        lambda h: h.opt.param_groups[0].update(weight_decay=0.5),
        "weight_decay: got 0.5, expected 0.01",
    ),
    "optimiser loaded": (
        lambda h: h.opt.load_state_dict(h.opt.state_dict()),
        "AdamW: state, which was loaded",
    ),
    "scaler": (
        lambda h: setattr(h.scaler, "growth_interval", 7),
        "GradScaler.growth_interval: got 7, expected 2000",
    ),
    "scaler loaded": (
        lambda h: h.scaler.load_state_dict(h.scaler.state_dict()),
        "GradScaler: state, which was loaded",
    ),
    "eval": (lambda h: h.layer.eval(), "training: got False, expected True"),
    "dropout": (lambda h: setattr(h.layer[1], "_p", 0.25), r"Sequential.1._p: got 0.25, expected 0.5"),
    "parameter": (_new_memory, "Sequential.0.the address of an array"),
    "history": (_longer_history, "Sequential.0.the address of an array"),
    "policy": (lambda h: fk.deterministic(True).__enter__(), "graph: policy"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_the_graph_would_not_see_is_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, said = CHANGES[what]
    held = Held(monkeypatch)
    with policy_context(get_policy()):
        change(held)
        with pytest.raises(ArgumentError, match=said):
            held.call(held.x)


def test_what_is_loaded_or_reseeded_in_place_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    state = {name: view.numpy().copy() for name, view in held.layer.state_dict().items()}
    before = [view.ptr for module in (held.layer[0], held.layer[1]) for view in module.arrays_used()]
    held.layer.load_state_dict({name: value + 1 for name, value in state.items()})
    for name, view in held.layer.state_dict().items():
        assert_same_bits(name, view.numpy(), state[name] + 1)
    drawn = nn.random._state().devices[CPU]
    nn.manual_seed(11)
    assert nn.random._state().devices[CPU] is drawn
    assert drawn.numpy().tolist() == [11, 0]
    nn.set_rng_state(nn.get_rng_state())
    assert nn.random._state().devices[CPU] is drawn
    assert before == [view.ptr for module in (held.layer[0], held.layer[1]) for view in module.arrays_used()]
    held.call(held.x)


@pytest.mark.usefixtures("capturing")
def test_arguments_stay_as_they_were() -> None:
    call = fk.graph(
        lambda x, flag=True, many=(): (
            fk.tensor(np.zeros((40, 48)), dtype="bfloat16"),
            {"bias": np.zeros(48, np.float32)},
        )
    )
    x = fk.tensor(np.ones((4, 4), np.float32))
    call(x, flag=True, many=[x.view, {"a": x.numpy()}])
    call(x, flag=True, many=[x.view, {"a": x.numpy()}])
    for args, options in (
        ((fk.tensor(np.ones((4, 5), np.float32)),), {"flag": True, "many": [x.view, {"a": x.numpy()}]}),
        ((x,), {"flag": False, "many": [x.view, {"a": x.numpy()}]}),
        ((x,), {"flag": True, "many": [x, {"a": x.numpy()}]}),
        ((x,), {"flag": True, "many": [x.view, {"b": x.numpy()}]}),
        ((x.view,), {"flag": True, "many": [x.view, {"a": x.numpy()}]}),
        ((x,), {"flag": True}),
        (
            (fk.tensor(np.ones((4, 4), np.float32), requires_grad=True),),
            {"flag": True, "many": [x.view, {"a": x.numpy()}]},
        ),
    ):
        with pytest.raises(Fp8kitError, match=r"graph: arguments: got .* as at the first call"):
            call(*args, **options)


@pytest.mark.usefixtures("capturing")
def test_arguments_are_leaves_of_their_own() -> None:
    layer = nn.Linear(4, 4, device="cpu")

    def step(x: Any) -> Any:
        y = layer(x)
        y.backward(np.ones((3, 4), np.float32))
        assert x.grad is not None
        return y

    x = fk.tensor(np.ones((3, 4), np.float32), requires_grad=True)
    y = fk.graph(step)(x)
    assert x.grad is None
    assert not y.requires_grad


def test_refusals() -> None:
    with pytest.raises(Fp8kitError, match="graph: function"):
        fk.graph(3)  # type: ignore[arg-type]
    with pytest.raises(Fp8kitError, match="graph: warmup"):
        fk.graph(lambda: None, warmup=0)
    with fk.use_backend("reference"), pytest.raises(BackendError, match="graph: arguments: got device cpu"):
        fk.graph(lambda x: x)(np.ones(3, np.float32))
    with fk.autocast(), pytest.raises(Fp8kitError, match="graph: call: got a call within autocast"):
        fk.graph(lambda x: x)(np.ones(3, np.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_replays_and_eager_steps_in_turn(recipe: str) -> None:
    found = []
    with fk.deterministic(True):
        for graphed in (False, True):
            step = Step("cuda", RECIPES[recipe])
            call: Any = fk.graph(step, warmup=WARMUP) if graphed else step
            made = batches("cuda")
            for i, (x, g) in enumerate([*made, *made]):
                (call if i < 5 or i % 3 else step)(x, g.view)
            found.append(step.state())
    assert set(found[0]) == set(found[1])
    for name, value in found[0].items():
        assert_same_bits(name, found[1][name], value)
