"""Optimisers, clipping, loss scaling and delayed scaling against float64, for any shapes and numbers; random
state from many threads."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fp8kit as fk
from fp8kit import arrays, nn, optim, recipe
from fp8kit.arrays import CPU
from fp8kit.errors import Fp8kitError
from fp8kit.scaling import FIELDS, ScalingState, update
from fp8kit.testing import assert_close, assert_same_bits
from tests.support.draws import HIGH, attempt, examples, host, seeds, shapes, thing, things, values

F32 = np.dtype(np.float32)
rates = st.sampled_from([0.0, 1e-3, 0.1, 1.0])


def leaf(shape, dtype, seed):
    made = fk.tensor(values(shape, dtype, seed), requires_grad=True)
    made.grad = arrays.as_view(values(shape, dtype, seed + 1))
    return made


def on_device(lr, held):
    """The rate as a number, or as an array that is changed in place."""
    if held is None:
        return lr
    held[...] = lr
    return held


@examples(80)
@given(
    st.lists(shapes(0, 2), min_size=1, max_size=3),
    st.sampled_from(HIGH),
    st.lists(rates, min_size=1, max_size=4),
    st.booleans(),
    st.sampled_from([0.0, 0.9, 0.999]),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from(["adamw", "sgd", "nesterov", "plain"]),
    seeds,
)
def test_steps(sizes, dtype, lrs, held, beta, decay, kind, seed):
    params = [leaf(s, dtype, seed + 10 * i) for i, s in enumerate(sizes)]
    rate = np.zeros(1, np.float32) if held else None
    make = {
        "adamw": lambda: optim.AdamW(
            params, on_device(lrs[0], rate), betas=(beta, 0.99), eps=1e-3, weight_decay=decay
        ),
        "sgd": lambda: optim.SGD(
            params, on_device(lrs[0], rate), momentum=beta, dampening=0.25, weight_decay=decay
        ),
        "nesterov": lambda: optim.SGD(
            params, on_device(lrs[0], rate), momentum=beta, nesterov=True, weight_decay=decay
        ),
        "plain": lambda: optim.SGD(params, on_device(lrs[0], rate), weight_decay=decay),
    }
    opt = attempt(make[kind])
    if isinstance(opt, Fp8kitError):
        assert kind == "nesterov"
        assert beta == 0
        return
    w = [host(p).astype(float) for p in params]
    m, v = [np.zeros(s) for s in sizes], [np.zeros(s) for s in sizes]
    size = [np.abs(x) for x in w]
    for t, lr in enumerate(lrs, 1):
        if held:
            on_device(lr, rate)  # where it lies: a captured graph sees it too
        else:
            opt.lr = lr
        for i, p in enumerate(params):
            g = values(sizes[i], dtype, seed + 100 * t + i)
            p.grad = arrays.as_view(g)
            g, lr = g.astype(float), float(np.float32(lr))
            if kind == "adamw":
                m[i] = beta * m[i] + (1 - beta) * g
                v[i] = 0.99 * v[i] + 0.01 * g * g
                w[i] -= lr * (m[i] / (1 - beta**t) / (np.sqrt(v[i] / (1 - 0.99**t)) + 1e-3) + decay * w[i])
                size[i] = size[i] + lr * (20 + decay * size[i])
            else:
                momentum = 0.0 if kind == "plain" else beta
                g = g + decay * w[i]
                m[i] = g if t == 1 else momentum * m[i] + (0.75 if kind == "sgd" and beta else 1.0) * g
                w[i] -= lr * (g + momentum * m[i] if kind == "nesterov" else m[i])
                size[i] = size[i] + lr * (np.abs(g) + 2 * np.abs(m[i])) * 2
        opt.step()
    for p, want, most in zip(params, w, size, strict=True):
        assert_close("parameter", host(p), want, dtype, 64 * len(lrs) * 2.0**-24 * most)
    steps = opt.state_dict()["steps"].numpy()
    assert (steps == len(lrs)).all()
    other = optim.AdamW(params) if kind == "adamw" else optim.SGD(params, momentum=0.9)
    other.load_state_dict({name: host(value).copy() for name, value in opt.state_dict().items()})
    for name, value in opt.state_dict().items():
        assert_same_bits(name, host(other.state_dict()[name]), host(value))


@examples(80)
@given(st.lists(things(HIGH, 0, 3), min_size=1, max_size=3), st.sampled_from([1e-6, 1.0, 1e9]), seeds)
def test_clipping(grads, most, seed):
    params = []
    for g in grads:
        if not g.refused:
            params.append(fk.tensor(np.zeros(g.values.shape, np.float32), requires_grad=True))
            params[-1].grad = g.thing
    held = [(g, thing(g.values, "plain")) for g in grads if not g.refused]
    before = [g.bytes() for g, _ in held]
    norm = attempt(lambda: optim.clip_grad_norm_(params, most))
    if isinstance(norm, Fp8kitError):
        assert [g.bytes() for g, _ in held] == before
        return
    wide = [g.values.astype(float) for g, _ in held]
    want = math.sqrt(sum(float((x**2).sum()) for x in wide))
    count = sum(x.size for x in wide)
    assert_close("norm", norm, want, "float32", (count + 16) * 2.0**-24 * want)
    factor = min(1.0, most / (want + 1e-6))
    for p, x, (g, _) in zip(params, wide, held, strict=True):
        assert_close(
            "grad", host(p.grad), x * factor, g.values.dtype, (count + 16) * 2.0**-24 * np.abs(x) * factor
        )


@examples(80)
@given(st.integers(0, 60), rates, st.integers(0, 30), st.integers(0, 50), rates)
def test_schedule(step, lr, warmup, total, least):
    got = attempt(lambda: optim.warmup_cosine(step, lr, warmup, total, least))
    if warmup > total:
        assert isinstance(got, Fp8kitError)
    elif step < warmup:
        assert got == pytest.approx(lr * (step + 1) / warmup)
    else:
        at = min((step - warmup) / (total - warmup), 1.0) if total > warmup else 1.0
        assert got == pytest.approx(
            least + (lr - least) * 0.5 * (1 + math.cos(math.pi * at)) if step < total else least
        )


@examples(60)
@given(
    st.lists(st.sampled_from(["good", "inf", "nan", "none"]), min_size=1, max_size=8),
    st.sampled_from([1.0, 2.0**10]),
    st.integers(1, 3),
    st.sampled_from([F32, np.dtype(np.float16)]),
    st.booleans(),
)
def test_loss_scaling(steps, first, interval, dtype, unscale):
    p = fk.tensor(np.zeros(3, np.float32), requires_grad=True, dtype=dtype)
    opt, scaler = optim.SGD([p], lr=1.0), optim.GradScaler(first, growth_interval=interval)
    scale, good, w = first, 0, 0.0
    for what in steps:
        p.grad = None
        if what != "none":
            scaler.scale(fk.tensor(np.ones(1, np.float32)))
            host_grad = (
                np.full(3, scale, np.float64)
                if what == "good"
                else np.array([1, {"inf": np.inf, "nan": np.nan}[what], 0])
            )
            p.grad = arrays.as_view(host_grad.astype(dtype))
        if unscale:
            refused = attempt(lambda: scaler.unscale_(opt))
            assert isinstance(refused, Fp8kitError) == (dtype != F32 and what != "none")
        scaler.step(opt)
        scaler.update()
        if what == "good" and scale <= 65504:
            w -= 1.0
            good += 1
            if good == interval:
                scale, good = scale * 2, 0
        elif what != "none":
            scale, good = scale / 2, 0
        assert scaler.get_scale() == scale
        np.testing.assert_array_equal(host(p).astype(float), w)


@examples(100)
@given(
    st.integers(1, 5),
    st.integers(1, 6),
    st.sampled_from(["max", "most_recent"]),
    st.integers(0, 18),
    st.sampled_from([448.0, 57344.0]),
    seeds,
    st.booleans(),
)
def test_delayed_scaling(length, slots, algo, margin, most, seed, callables):
    rng = np.random.default_rng(seed)
    special = np.array([0.0, np.inf, np.nan, 1e-45, 3e38], np.float32)
    history = np.abs(values((length, slots), F32, seed))
    history = np.where(rng.random(history.shape) < 0.3, rng.choice(special, history.shape), history).astype(
        np.float32
    )
    scale = np.abs(values((slots,), F32, seed + 1)) + np.float32(0.5)
    state = ScalingState.of([arrays.as_view(x) for x in (scale, 1 / scale, history)], CPU)
    how = recipe.DelayedScaling(
        margin,
        amax_history_len=length,
        amax_compute_algo=(
            (lambda h: np.fmax.reduce(h, 0) if algo == "max" else h[0]) if callables else algo
        ),
    )
    update(how.history, [state], forward=most == 448.0)
    want_scale, want_history = scale.copy(), history.copy()
    for i in range(slots):
        if history[0, i] == 0:
            continue
        amax = np.fmax.reduce(history[:, i]) if algo == "max" else history[0, i]
        if np.isfinite(amax) and amax > 0:
            with np.errstate(over="ignore"):
                want_scale[i] = np.clip(
                    np.float32(most * 2.0**-margin) / amax, np.float32(2.0**-126), np.finfo(np.float32).max
                )
        want_history[:, i] = np.roll(history[:, i], -1)
        if length > 1:
            want_history[-1, i] = history[0, i]
        want_history[0, i] = 0
    got = {field: host(state.views[field]) for field in FIELDS}
    np.testing.assert_array_equal(got["scale"], want_scale)
    np.testing.assert_array_equal(
        got["scale_inv"], np.where(history[0] == 0, 1 / scale, np.float32(1) / want_scale)
    )
    np.testing.assert_array_equal(got["amax_history"], want_history)


@examples(60)
@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=9, max_size=9),
    st.sampled_from([-3, -2, -1, 1, 2, 3]),
    st.integers(1, 3),
    st.sampled_from(["int64", "int64", "int32", "float32", "uint8"]),
)
def test_a_source_gives_the_pairs_or_is_refused(numbers, step, count, dtype):
    """What ``draw_from``'s source gives is drawn, whatever its layout, and stays what it was; anything but
    int64 (2,) is refused."""
    pair = np.array(numbers, np.int64).astype(dtype)[::step][:count]
    wanted = pair.tolist()
    with fk.draw_from(lambda device: pair):
        if count == 2 and dtype == "int64":
            drawn = nn.random.next_rng(CPU)
            pair[...] = 0
            assert drawn.numpy().tolist() == wanted
        else:
            with pytest.raises(Fp8kitError, match="draw_from: source: got"):
                nn.random.next_rng(CPU)


def test_threads_draw_different_numbers():
    """Many threads at once: every offset is handed out once, and none is lost; a recomputation draws its own
    on its own thread."""
    from fp8kit.nn import random

    nn.manual_seed(5)
    random.next_rng(CPU)
    kept, drawn, lock = random.snapshot(), [], threading.Lock()

    def draw():
        own = [int(random.next_rng(CPU).numpy()[1]) for _ in range(200)]
        with kept():
            again = [int(random.next_rng(CPU).numpy()[1]) for _ in range(3)]
        with lock:
            drawn.extend(own)
            assert again == [1, 2, 3]

    threads = [threading.Thread(target=draw) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(drawn) == list(range(1, 1601))


def test_a_users_function_finds_out_that_its_saved_value_changed():
    class Square(fk.Function):
        @staticmethod
        def forward(context, x):
            context.save(x)
            return x * x

        @staticmethod
        def backward(context, g):
            return 2 * context.saved[0] * g

    x = fk.tensor(np.arange(3, dtype=np.float32), requires_grad=True)
    y = Square.apply(x)
    y.backward(np.ones(3, np.float32))
    np.testing.assert_array_equal(x.grad.numpy(), [0, 2, 4])
    y = Square.apply(x)
    with fk.no_grad():
        fk.tensor(x).zero_()  # the same memory by another name
    with pytest.raises(fk.AutogradError, match="Square: input 0: got a value changed in place"):
        y.backward(np.ones(3, np.float32))
    y = fk.checkpoint(lambda: Square.apply(x))  # x is no argument of it
    with fk.no_grad():
        x.zero_()
    with pytest.raises(fk.AutogradError, match="Square: input 0: got a value changed in place"):
        y.backward(np.ones(3, np.float32))
