"""Delayed scaling's state over steps: against Transformer Engine's rule in NumPy, and when it is and is not
updated."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from fp8kit import nn, scaling
from fp8kit.autocast import autocast
from fp8kit.autograd import Function, no_grad, tensor
from fp8kit.backends import dispatch
from fp8kit.backends.dispatch import deterministic
from fp8kit.errors import RecipeError
from fp8kit.optim import SGD
from fp8kit.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from fp8kit.scaling import ScalingState, default_scale, update
from fp8kit.testing.compare import assert_close
from tests.support.layers import draw, make, step
from tests.support.products import f64, host

FLT_MAX = np.finfo(np.float32).max
LEAST = np.float32(2.0**-126)
K, N = 32, 48


def rule(history, scale, fp8_max, recipe):
    """Transformer Engine's update, tensor by tensor: (history, scale)."""
    history, scale = history.copy(), scale.copy()
    for i in range(len(scale)):
        column = history[:, i].copy()
        if column[0] == 0:
            continue
        finite = column[~np.isnan(column)]
        amax = column[0] if recipe.amax_compute_algo == "most_recent" else max(finite, default=np.float32(0))
        if np.isfinite(amax) and amax > 0:
            with np.errstate(over="ignore"):
                scale[i] = np.clip(
                    np.float32(fp8_max * 2.0**-recipe.margin) / np.float32(amax), LEAST, FLT_MAX
                )
        new = np.roll(column, -1)
        new[0] = 0
        if len(column) > 1:
            new[-1] = column[0]
        history[:, i] = new
    return history, scale


def state_with(history, scale, device):
    from fp8kit import arrays

    views = [
        arrays.as_view(np.array(a, np.float32)) for a in (scale, 1 / np.array(scale, np.float32), history)
    ]
    return ScalingState.of(views, arrays.device(device))


CALLABLES = {"max": lambda history: np.fmax.reduce(history, 0), "most_recent": lambda history: history[0]}


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_update_numeric_scenarios(device, length, algo, on_host):
    """Zero, Inf, NaN, tiny and normal amaxes, the slots of one state; the callable path gives the same."""
    recipe = DelayedScaling(amax_history_len=length, amax_compute_algo=algo, margin=2)
    used = (
        DelayedScaling(amax_history_len=length, amax_compute_algo=CALLABLES[algo], margin=2)
        if on_host
        else recipe
    )
    history = np.zeros((length, 7), np.float32)
    history[0] = [0, np.inf, np.nan, 1e-45, 3.0, 0.5, 448]
    history[-1, 5] = 0.5 if length == 1 else np.inf
    history[-1, 6] = 448 if length == 1 else np.nan
    if length > 2:
        history[1:-1, 4] = 7.0
    scale = np.array([3, 5, 7, 11, 13, 17, 19], np.float32)
    state = state_with(history, scale, device)
    update(used.history, [state], forward=True)
    want_history, want_scale = rule(history, scale, 448.0, recipe)
    np.testing.assert_array_equal(host(state.scale), want_scale)
    np.testing.assert_array_equal(
        host(state.scale_inv), np.where(want_scale == scale, 1 / scale, np.float32(1) / want_scale)
    )
    np.testing.assert_array_equal(host(state.amax_history), want_history)
    assert want_scale[3] == FLT_MAX
    assert list(want_scale[:3]) == [3, 5, 7]


def test_update_of_many_states_at_once(device):
    recipe = DelayedScaling(amax_history_len=4)
    rng = np.random.default_rng(0)
    cases = [(rng.random((4, n)).astype(np.float32), rng.random(n).astype(np.float32)) for n in (1, 3, 6, 2)]
    states = [state_with(history, scale, device) for history, scale in cases]
    update(recipe.history, states, forward=False)
    for state, (history, scale) in zip(states, cases, strict=True):
        want_history, want_scale = rule(history, scale, 57344.0, recipe)
        np.testing.assert_array_equal(host(state.scale), want_scale)
        np.testing.assert_array_equal(host(state.amax_history), want_history)


def test_callables_get_and_give_what_they_should(device):
    seen = []

    def scale_algo(amax, scale, fp8_max, recipe):
        seen.append((amax.copy(), scale.copy(), fp8_max, recipe))
        return np.full_like(scale, 8.0)

    recipe = DelayedScaling(amax_history_len=2, scaling_factor_compute_algo=scale_algo)
    state = state_with([[4, 0], [1, 9]], [1, 2], device)
    update(recipe.history, [state], forward=True)
    np.testing.assert_array_equal(seen[0][0], [4, 9])
    np.testing.assert_array_equal(seen[0][1], [1, 2])
    assert seen[0][2:] == (448.0, recipe)
    np.testing.assert_array_equal(host(state.scale), [8, 2])  # the second tensor was not used
    wrong = DelayedScaling(amax_history_len=2, amax_compute_algo=lambda history: history)
    with pytest.raises(RecipeError, match="amax_compute_algo"):
        update(wrong.history, [state_with([[4, 0], [1, 9]], [1, 2], device)], forward=True)


def test_a_callable_is_asked_where_an_update_by_the_same_rule_is_known(device, monkeypatch):
    """As it is on a GPU once a recipe without callables has updated the same state a few times."""
    recipe = DelayedScaling(amax_history_len=2, scaling_factor_compute_algo=lambda *given: np.float32([8, 8]))
    state, asked = state_with([[4, 0], [1, 9]], [1, 2], device), []
    known = SimpleNamespace(get=lambda key: lambda: asked.append(key))
    kernels = SimpleNamespace(replays=SimpleNamespace(found=known))
    monkeypatch.setattr(scaling.dispatch, "kernels", lambda device: kernels)
    update(recipe.history, [state], forward=True)
    np.testing.assert_array_equal(host(state.scale), [8, 2])
    assert not asked
    update(DelayedScaling(amax_history_len=2).history, [state], forward=True)
    assert len(asked) == 1


@pytest.mark.parametrize("bad", [0.0, -2.0, np.nan, -np.inf, -1e-39])
def test_a_callable_cannot_ruin_a_scale(bad, device):
    recipe = DelayedScaling(
        amax_history_len=2,
        scaling_factor_compute_algo=lambda amax, scale, fp8_max, recipe: np.full_like(scale, bad),
    )
    history, scale = np.float32([[4, 2], [1, 0]]), np.float32([1, 2])
    state = state_with(history, scale, device)
    with pytest.raises(
        RecipeError, match=r"scaling_factor_compute_algo: got .* for the amax 4.0, expected a positive scale"
    ):
        update(recipe.history, [state], forward=True)
    np.testing.assert_array_equal(host(state.scale), scale)
    np.testing.assert_array_equal(host(state.amax_history), history)
    # nothing was used: nobody asks what the scale would be
    update(recipe.history, [state_with([[0, 0], [1, 0]], scale, device)], forward=True)


def test_the_least_scale_of_a_callable_has_an_inverse(device):
    small = np.float32([1e-45, 2.0**-128, 2.0**-127, 2.0**-126, 2.0**-125])
    recipe = DelayedScaling(amax_history_len=2, scaling_factor_compute_algo=lambda *given: small)
    state = state_with(np.ones((2, 5)), np.ones(5), device)
    update(recipe.history, [state], forward=True)
    np.testing.assert_array_equal(host(state.scale), [LEAST, LEAST, LEAST, LEAST, 2 * LEAST])
    np.testing.assert_array_equal(host(state.scale_inv), np.float32([2.0**126] * 4 + [2.0**125]))


@pytest.mark.parametrize("fp8_max", [448.0, 57344.0])
@pytest.mark.parametrize("margin", range(-20, 21))
def test_every_amax_gives_a_scale_and_an_inverse(margin, fp8_max, device):
    """Of all finite amaxes, by their bits: every power of two and its neighbours. scale * amax is fp8_max *
    2^-margin but for one rounding, and where it is not, the scale is the least or the greatest one, and then
    even the largest amax stays within the format."""
    powers = np.float32(2.0) ** np.arange(-149, 128, dtype=np.float32)
    amax = np.unique(
        np.concatenate(
            [
                powers,
                np.nextafter(powers, np.float32(np.inf)),
                np.nextafter(powers[1:], np.float32(0)),
                powers[:-1] * np.float32(1.5),
                [FLT_MAX],
            ]
        )
    )
    state = state_with(amax[None], np.full_like(amax, 3), device)
    scale, scale_inv, history = state.views.values()
    dispatch.kernels(scale.device).update_delayed_(
        [scale], [scale_inv], [history], [fp8_max], margin, False, False, None, False, 0
    )
    got, inverse = f64(scale), f64(scale_inv)
    assert (got > 0).all()
    assert np.isfinite(got).all()
    assert (inverse > 0).all()
    np.testing.assert_array_equal(scale_inv.numpy(), np.float32(1) / scale.numpy())
    assert np.isfinite(inverse).all()
    exact = fp8_max * 2.0**-margin / amax.astype(np.float64)
    within = (exact >= LEAST) & (exact <= FLT_MAX)
    np.testing.assert_array_less(np.abs(got / exact - 1)[within], 2.0**-24 * (1 + 1e-9))
    np.testing.assert_array_equal(got[~within], np.where(exact < LEAST, LEAST, FLT_MAX)[~within])
    assert (got * amax)[exact < LEAST].max(initial=0) < 4
    np.testing.assert_array_equal(default_scale(amax, np.full_like(amax, 3), fp8_max, margin), scale.numpy())


def test_a_callables_scales_where_amax_says_nothing(device):
    """A plain quotient survives Inf, NaN and the smallest amax: the built-in rule's scales."""

    def quotient(amax, scale, fp8_max, recipe):
        with np.errstate(divide="ignore", over="ignore"):
            return np.float32(fp8_max) / amax

    column = np.float32([np.inf, np.nan, np.finfo(np.float32).smallest_subnormal, 7])
    history = np.stack([column, np.zeros_like(column)])
    results = []
    for algo in (quotient, None):
        state = state_with(history, np.float32([3, 5, 7, 9]), device)
        recipe = DelayedScaling(
            amax_history_len=2, amax_compute_algo="most_recent", scaling_factor_compute_algo=algo
        )
        update(recipe.history, [state], forward=True)
        results.append([host(array) for array in (state.scale, state.scale_inv, state.amax_history)])
    np.testing.assert_array_equal(results[0][0], np.float32([3, 5, FLT_MAX, 64]))
    for mine, built_in in zip(*results, strict=True):
        np.testing.assert_array_equal(mine, built_in)


def test_linear_over_steps_records_and_scales(device):
    """Row 0, the rolled history and the scales of five steps, forward and backward, from the data alone."""
    recipe = DelayedScaling(amax_history_len=3)
    module = make(nn.Linear, device, "bfloat16", in_features=K, out_features=N)
    forward, backward = (np.zeros((3, n), np.float32) for n in (3, 2))
    scales, g_scales = np.ones(3, np.float32), np.ones(2, np.float32)
    for i in range(5):
        x, g = draw(i, (4, K), "bfloat16", 4.0**-i), draw(50 + i, (4, N), "bfloat16", 0.1)
        on = tensor(x, requires_grad=True, device=device)
        with autocast(recipe=recipe):
            y = module(on)
        forward[0, 0], forward[0, 1] = np.abs(x).max(), np.abs(f64(module.weight)).max()
        forward, scales = rule(forward, scales, 448.0, recipe)
        np.testing.assert_array_equal(host(module.fp8_meta["scaling_fwd"].amax_history), forward)
        np.testing.assert_array_equal(host(module.fp8_meta["scaling_fwd"].scale), scales)
        np.testing.assert_array_equal(host(module.fp8_meta["scaling_bwd"].amax_history), backward)
        y.backward(g)
        backward[0, 0] = np.abs(g).max()
        backward, g_scales = rule(backward, g_scales, 57344.0, recipe)
        np.testing.assert_array_equal(host(module.fp8_meta["scaling_bwd"].amax_history), backward)
        np.testing.assert_array_equal(host(module.fp8_meta["scaling_bwd"].scale), g_scales)
    assert scales[2] == 1  # the output is not quantised


def snapshot(module):
    return {name: view.numpy().copy() for name, view in module.extra_state().items()}


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def test_inference_and_failed_steps_leave_no_trace(device):
    recipe = DelayedScaling(amax_history_len=4)
    module = make(nn.Linear, device, "float32", in_features=K, out_features=N)
    x = tensor(draw(1, (4, K), "float32"), device=device)
    step(module, "delayed", draw(2, (4, K), "float32"), draw(3, (4, N), "float32"))
    with autocast(recipe=recipe):
        module(x)
    before = snapshot(module)
    with no_grad(), autocast(recipe=recipe):
        module(tensor(draw(5, (4, K), "float32", 100.0), device=device))
    with no_grad(), autocast(recipe=DelayedScaling(amax_history_len=2)):
        module(x)
    assert same(before, snapshot(module))

    @autocast(recipe=recipe)
    def fails():
        module(tensor(np.full((4, K), np.inf, np.float32), device=device))
        raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert same(before, snapshot(module))


def test_calibration_records_what_fp8_would_see(device):
    """High-precision outputs, and after calibrating the scales that an FP8 step on the same data would have
    given."""
    recipe = DelayedScaling(amax_history_len=2)
    kinds = [
        (nn.Linear, {"in_features": K, "out_features": N}),
        (nn.LayerNormLinear, {"in_features": K, "out_features": N}),
        (nn.LayerNormMLP, {"hidden_size": K, "ffn_hidden_size": N, "activation": "swiglu"}),
    ]
    x = draw(1, (4, K), "float32")
    for kind, sizes in kinds:
        module = make(kind, device, "float32", **sizes)
        plain = f64(module(tensor(x, device=device)))
        with no_grad(), autocast(enabled=False, calibrating=True, recipe=recipe):
            y = module(tensor(x, device=device))
        np.testing.assert_array_equal(f64(y), plain)
        other = make(kind, device, "float32", **sizes)
        with autocast(recipe=recipe):
            other(tensor(x, device=device))
        got, want = host(module.fp8_meta["scaling_fwd"].scale), host(other.fp8_meta["scaling_fwd"].scale)
        # fc2's input comes from an FP8 product in the one and an exact product in the other: an E4M3 step
        # apart at most
        slack = (2.0**-3 if kind is nn.LayerNormMLP else 2.0**-20) * np.abs(want)
        assert_close("scales", got, want, "float64", slack)
        assert (got != 1).sum() == 2 * len(module.gemms)


def test_history_length_may_change(device):
    module = make(nn.Linear, device, "float32", in_features=K, out_features=N)
    for length in (4, 2, 5):
        before = (
            host(module.fp8_meta["scaling_fwd"].amax_history)
            if module.fp8_meta
            else np.zeros((4, 3), np.float32)
        )
        want = np.zeros((length, 3), np.float32)
        want[: min(length, len(before))] = before[:length]
        recipe = DelayedScaling(amax_history_len=length)
        x = draw(length, (4, K), "float32")
        with autocast(recipe=recipe):
            module(tensor(x, device=device))
        want[0, :2] = np.abs(x).max(), np.abs(f64(module.weight)).max()
        want, _ = rule(want, np.ones(3, np.float32), 448.0, recipe)
        np.testing.assert_array_equal(host(module.fp8_meta["scaling_fwd"].amax_history), want)


@pytest.mark.parametrize(
    "recipe", [DelayedScaling(amax_history_len=4), Float8CurrentScaling(), Float8BlockScaling()]
)
def test_weight_is_cast_once_for_all_microbatches(device, recipe):
    """Cached micro-batches equal uncached ones with the same scales; only the first one sees a changed
    weight."""
    cached, plain = (
        make(nn.LayerNormMLP, device, "float32", hidden_size=K, ffn_hidden_size=N) for _ in range(2)
    )
    for i in range(3):
        x, g = draw(i, (4, K), "float32"), draw(30 + i, (4, K), "float32", 0.1)
        results = []
        for module, options in ((cached, {"is_first_microbatch": i == 0}), (plain, {})):
            on = tensor(x, requires_grad=True, device=device)
            with autocast(recipe=recipe):
                y = module(on, **options)
            y.backward(g)
            results.append((f64(y), f64(on.grad)))
            module.zero_grad()
        if i == 0 or not recipe.delayed():  # later the plain one casts its weight with the updated scale
            np.testing.assert_array_equal(results[0][0], results[1][0])
            np.testing.assert_array_equal(results[0][1], results[1][1])
    x = tensor(draw(7, (4, K), "float32"), device=device)

    def run(first):
        with no_grad(), autocast(recipe=recipe):
            return f64(cached(x, is_first_microbatch=first))

    before = run(True)
    for name in ("fc1_weight", "fc2_weight"):
        getattr(cached, name).view = tensor(getattr(cached, name).numpy() * 2, device=device).view
    np.testing.assert_array_equal(run(False), before)
    assert not np.array_equal(run(True), before)
    if recipe.delayed():
        amaxes = host(cached.fp8_meta["scaling_fwd"].amax_history)
        assert (amaxes[:, 1] != 0).sum() == 1  # the weight's history did not age in later micro-batches
        assert (amaxes[:, 0] != 0).sum() == 3


@pytest.mark.parametrize(
    "recipe", [DelayedScaling(amax_history_len=4), Float8CurrentScaling(), Float8BlockScaling()]
)
def test_backward_after_a_step_reads_the_weights_of_its_forward_pass(device, recipe):
    """In FP8 it goes back through what forward cast; the weight may have changed since."""
    found = []
    for changed in (False, True):
        module = make(nn.Linear, device, "float32", in_features=K, out_features=N)
        x = tensor(draw(0, (4, K), "float32"), requires_grad=True, device=device)
        with autocast(recipe=recipe):
            y = module(x)
        if changed:
            with no_grad():
                module.weight.zero_()
        y.backward(draw(1, (4, N), "float32"))
        found.append((f64(x.grad), f64(module.weight.grad)))
    for got, want in zip(*found, strict=True):
        np.testing.assert_array_equal(got, want)
        assert got.any()


def test_every_call_in_a_thread_of_its_own(device):
    """Forward, backward and the optimiser's step give what they give in one thread."""

    def in_a_thread(function, *arguments):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(function, *arguments).result()

    found = []
    for call in (lambda function, *arguments: function(*arguments), in_a_thread):
        module = make(nn.LayerNormMLP, device, "float32", hidden_size=K, ffn_hidden_size=N)
        optimizer = SGD(module.parameters(), lr=0.1)

        def forward(x, module=module):
            with deterministic(True), autocast(recipe=DelayedScaling(amax_history_len=4)):
                return module(x)

        for i in range(4):
            y = call(forward, tensor(draw(i, (4, K), "float32"), device=device))
            call(y.backward, draw(20 + i, (4, K), "float32"))
            call(optimizer.step)
            optimizer.zero_grad()
        found.append(snapshot(module))
    assert same(*found)


def test_nested_recipes_update_each_state_by_its_own(device):
    a, b = DelayedScaling(amax_history_len=2), DelayedScaling(amax_history_len=2, margin=3)
    first, second = (make(nn.Linear, device, "float32", in_features=K, out_features=K) for _ in range(2))
    x = tensor(draw(1, (4, K), "float32"), device=device)
    with autocast(recipe=a):
        first(x)
        with autocast(recipe=b):
            second(x)
        with autocast(enabled=False):
            np.testing.assert_array_equal(f64(first(x)), f64(second(x)))
        assert host(first.fp8_meta["scaling_fwd"].scale)[0] == 1
    scales = [host(m.fp8_meta["scaling_fwd"].scale)[:2] for m in (first, second)]
    np.testing.assert_array_equal(scales[0], scales[1] * 8)


def test_a_failed_backward_leaves_no_trace_in_the_histories(device):
    """What the nodes before the fault recorded in row 0 is dropped, and the next step is as if nothing had
    happened."""

    class Faulty(Function):
        broken = True

        @staticmethod
        def forward(context, x):
            return x

        @staticmethod
        def backward(context, g):
            if Faulty.broken:
                raise ArithmeticError("a fault")
            return g

    layer = make(nn.Linear, device, "float32", in_features=K, out_features=N)
    x, g = draw(1, (16, K), "float32"), draw(2, (16, N), "float32")

    def run(scale):
        with autocast(recipe=DelayedScaling(amax_history_len=4)):
            y = layer(Faulty.apply(tensor(x, requires_grad=True, device=device)))
        y.backward(tensor(g * np.float32(scale), device=device))

    with pytest.raises(ArithmeticError):
        run(1000)
    assert host(layer.fp8_meta["scaling_bwd"].amax_history).max() == 0
    assert layer.weight.grad is None
    Faulty.broken = False
    run(1)
    np.testing.assert_array_equal(
        host(layer.fp8_meta["scaling_bwd"].amax_history)[:, 0], [0, 0, 0, np.abs(g).max()]
    )


def test_a_callable_that_raises_changes_no_state(device):
    """All answers are there before the first state is changed, and the step's amaxes are dropped."""
    calls = []

    def second_fails(history):
        calls.append(1)
        if len(calls) == 2:
            raise ArithmeticError("a fault")
        return history.max(0)

    layers = [make(nn.Linear, device, "float32", in_features=K, out_features=K) for _ in range(2)]
    x = tensor(draw(1, (16, K), "float32"), device=device)
    both = nn.Sequential(*layers)
    with (
        pytest.raises(ArithmeticError),
        autocast(recipe=DelayedScaling(amax_history_len=2, amax_compute_algo=second_fails)),
    ):
        both(x)
    for layer in layers:
        state = layer.fp8_meta["scaling_fwd"]
        np.testing.assert_array_equal(host(state.scale), 1)
        np.testing.assert_array_equal(host(state.amax_history), 0)


def test_loading_weights_drops_the_cached_fp8_ones(device):
    layer = make(nn.Linear, device, "float32", in_features=K, out_features=N)
    x = tensor(draw(1, (16, K), "float32"), device=device)
    with no_grad(), autocast(recipe=Float8CurrentScaling()):
        before = f64(layer(x, is_first_microbatch=True))
        layer.load_state_dict({"weight": -f64(layer.weight).astype(np.float32)}, strict=False)
        after = f64(layer(x, is_first_microbatch=False))
    bias = f64(layer.bias)
    assert_close("y", after - bias, bias - before, "float64", 2.0**-20 * np.abs(before).max())
