"""SGD against float64, steps counted on the device, and loss scaling."""

from __future__ import annotations

import numpy as np
import pytest

from fp8kit import arrays
from fp8kit.autograd import tensor
from fp8kit.errors import CheckpointError, FormatError, Fp8kitError, ShapeError
from fp8kit.optim import SGD, AdamW, GradScaler, clip_grad_norm_
from fp8kit.testing.compare import assert_close
from tests.support.adamw import Model, give
from tests.support.layers import draw
from tests.support.products import f64

SHAPES = [(5, 7), (13,), (64, 33)]


class Momentum:
    """SGD in float64."""

    def __init__(self, w):
        self.w, self.b, self.size = w.astype(float), None, np.abs(w.astype(float))

    def step(self, g, lr, momentum, dampening, nesterov, decay):
        g = g + decay * self.w
        self.b = g if self.b is None else momentum * self.b + (1 - dampening) * g
        change = g + momentum * self.b if nesterov else self.b
        self.w = self.w - lr * change
        self.size = np.maximum(self.size, np.abs(self.w) + 4 * lr * np.abs(change))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("momentum", "dampening", "nesterov"),
    [(0.0, 0.0, False), (0.9, 0.0, False), (0.9, 0.2, False), (0.8, 0.0, True)],
)
def test_sgd_against_float64(device, dtype, momentum, dampening, nesterov):
    params = [tensor(draw(i, s, dtype), requires_grad=True, device=device) for i, s in enumerate(SHAPES)]
    options = {"momentum": momentum, "dampening": dampening, "nesterov": nesterov}
    opt = SGD(
        [{"params": params[:2]}, {"params": params[2:], "lr": 3e-2, "weight_decay": 0.3}], lr=1e-2, **options
    )
    models = [Momentum(f64(p)) for p in params]
    for step in range(6):
        for i, param in enumerate(params):
            if i == 1 and step % 2 == 0:
                continue  # no gradient: its first step is the others' second
            g = draw(100 * step + i, SHAPES[i], dtype)
            give(param, g)
            group = opt.param_groups[i // 2]
            models[i].step(g.astype(float), group["lr"], momentum, dampening, nesterov, group["weight_decay"])
        opt.step()
        opt.zero_grad()
    for i, (param, model) in enumerate(zip(params, models, strict=True)):
        assert_close(f"parameter {i}", f64(param), model.w, dtype, 6 * 8 * 2.0**-24 * model.size)
        assert (f"momentum_buffer.{i}" in opt.state_dict()) == (momentum > 0)
    assert opt.state_dict()["steps"].numpy().tolist() == [6, 3, 6]


def test_sgd_refuses_wrong_hyperparameters():
    p = tensor(np.ones(2, np.float32), requires_grad=True)
    for options, word in (
        ({"lr": -1}, "lr"),
        ({"momentum": -0.1}, "momentum"),
        ({"nesterov": True}, "nesterov"),
        ({"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "nesterov"),
        ({"weight_decay": np.nan}, "weight_decay"),
        ({"lr": "x"}, "lr"),
        ({"dampening": -1}, "dampening"),
    ):
        with pytest.raises(Fp8kitError, match=word):
            SGD([p], **options)


@pytest.mark.parametrize("kind", [AdamW, lambda p, **o: SGD(p, momentum=0.9, **o)], ids=["AdamW", "SGD"])
def test_state_comes_back_and_continues_with_the_same_bits(device, kind):
    def make():
        params = [
            tensor(draw(i, s, "bfloat16"), requires_grad=True, device=device) for i, s in enumerate(SHAPES)
        ]
        return params, kind(params, lr=1e-2)

    def go(params, opt, steps):
        for step in steps:
            for i, param in enumerate(params):
                give(param, draw(100 * step + i, SHAPES[i], "bfloat16"))
            if step == 1:
                params[0].grad = None
            opt.step()

    params, opt = make()
    go(params, opt, range(5))
    others, again = make()
    go(others, again, range(3))
    state = {name: view.numpy().copy() for name, view in again.state_dict().items()}
    held = [p.numpy().copy() for p in others]
    others, again = make()
    for p, w in zip(others, held, strict=True):
        arrays.copy(p.view, arrays.as_view(w))
    for change, word in (
        ({"steps": -state["steps"]}, "steps"),
        ({"hyper": -state["hyper"]}, "hyper"),
        ({"hyper": np.zeros(3)}, "hyper"),
    ):
        with pytest.raises(CheckpointError, match=word):
            again.load_state_dict(state | change)
    again.load_state_dict(state)
    go(others, again, range(3, 5))
    for p, q in zip(params, others, strict=True):
        assert p.numpy().tobytes() == q.numpy().tobytes()
    assert {n: v.numpy().tobytes() for n, v in opt.state_dict().items()} == {
        n: v.numpy().tobytes() for n, v in again.state_dict().items()
    }


def test_lr_may_lie_on_the_device(device):
    param = tensor(np.ones(3, np.float32), requires_grad=True, device=device)
    rate = tensor(np.full(1, 0.5, np.float32), device=device)
    opt = SGD([param], lr=rate)
    for value in (0.5, 0.25):
        arrays.copy(rate.view, arrays.as_view(np.full(1, value, np.float32)))
        give(param, np.ones(3, np.float32))
        opt.step()
    np.testing.assert_array_equal(f64(param), 0.25)
    assert opt.lr == 0.25
    state = {n: v.numpy().copy() for n, v in opt.state_dict().items()}
    state["hyper"][0, 0] = 2.0
    opt.load_state_dict(state)
    assert rate.item() == 2.0
    with pytest.raises(ShapeError, match="SGD: lr"):
        SGD([{"params": [param], "lr": np.ones(2, np.float32)}]).step()


@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_a_step_with_inf_or_nan_is_skipped_and_does_not_count(device, kind):
    params = [tensor(draw(i, s, "float16"), requires_grad=True, device=device) for i, s in enumerate(SHAPES)]
    twin_params = [
        tensor(draw(i, s, "float16"), requires_grad=True, device=device) for i, s in enumerate(SHAPES)
    ]
    opt, twin, scaler = (
        kind(params, lr=1e-2),
        kind(twin_params, lr=1e-2),
        GradScaler(1024.0, growth_interval=3),
    )
    scaler.scale(tensor(np.ones(1, np.float32), device=device))
    scales = []
    for step, bad in enumerate((np.nan, None, None, np.inf, None, None, None)):
        for i, (param, other) in enumerate(zip(params, twin_params, strict=True)):
            # without the factor most of it is below float16's normal numbers
            g = draw(10 * step + i, SHAPES[i], "float16", 2.0**-14)
            factor = np.float32(scaler.get_scale())
            scaled = (g.astype(np.float32) * factor).astype(np.float16)
            if bad is not None and i == 1:
                scaled[5] = bad
            give(param, scaled)
            give(other, g)
        scaler.step(opt)
        scaler.update()
        scales.append(scaler.get_scale())
        if bad is None:
            twin.step()
    assert scales == [512.0, 512.0, 512.0, 256.0, 256.0, 256.0, 512.0]
    assert opt.state_dict()["steps"].numpy().tolist() == [5] * 3
    for p, q in zip(params, twin_params, strict=True):
        assert p.numpy().tobytes() == q.numpy().tobytes()


def test_scale_goes_through_the_tape_and_clipping_knows_the_factor(device):
    x = tensor(draw(0, (4, 6), "float32"), requires_grad=True, device=device)
    scaler = GradScaler(256.0)
    y = scaler.scale(x)
    np.testing.assert_array_equal(f64(y), 256 * f64(x))
    y.backward(draw(1, (4, 6), "float32"))
    np.testing.assert_array_equal(f64(x.grad), 256 * draw(1, (4, 6), "float32").astype(float))
    g = f64(x.grad) / 256
    norm = clip_grad_norm_([x], 1.0, scaler)
    assert_close("norm", float(norm), np.linalg.norm(g), "float32", 1e-5)
    assert_close("grad", f64(x.grad) / 256, g / np.linalg.norm(g), "float32", 1e-5)
    opt = SGD([x], lr=1.0)
    before = f64(x)
    scaler.unscale_(opt)
    assert_close("grad", f64(x.grad), g / np.linalg.norm(g), "float32", 1e-5)
    with pytest.raises(Fp8kitError, match="unscale_"):
        scaler.unscale_(opt)
    scaler.step(opt)
    assert_close("step", f64(x), before - g / np.linalg.norm(g), "float32", 1e-5)
    scaler.update()
    half = tensor(np.ones(2, np.float16), requires_grad=True, device=device)
    give(half, np.ones(2, np.float16))
    with pytest.raises(FormatError, match="float32"):
        scaler.unscale_(SGD([half]))


def test_scaler_state_and_arguments(device):
    scaler = GradScaler(8.0, growth_interval=2)
    state = {n: v.numpy().copy() for n, v in scaler.state_dict().items()}
    for change, word in (
        ({"scale": np.zeros(2, np.float32)}, "scale"),
        ({"scale": np.full(1, np.inf, np.float32)}, "finite"),
        ({"scale": np.zeros(1, np.float32)}, "scale: got 0.0"),
        ({"good_steps": np.full(1, -1)}, "good_steps: got -1"),
        ({"x": np.zeros(1)}, "unexpected: x"),
    ):
        with pytest.raises(CheckpointError, match=word):
            scaler.load_state_dict(state | change)
    scaler.load_state_dict(state | {"scale": np.full(1, 4, np.float32)})
    assert scaler.scale(tensor(np.ones(1, np.float32), device=device)).item() == 4.0
    scaler.load_state_dict(state)
    assert scaler.scale(tensor(np.ones(1, np.float32), device=device)).item() == 8.0
    x = tensor(np.ones(1, np.float32), requires_grad=True, device=device)
    assert GradScaler(enabled=False).scale(x) is x
    for options in (
        {"init_scale": 0.0},
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"growth_interval": 0},
    ):
        with pytest.raises(Fp8kitError, match=next(iter(options))):
            GradScaler(**options)


def test_adamw_skips_agree_with_float64(device):
    """The bias corrections use the steps that were taken, not those that were tried."""
    param = tensor(draw(0, (40,), "float32"), requires_grad=True, device=device)
    model, opt, scaler = Model(f64(param)), AdamW([param], lr=1e-2), GradScaler(1.0, growth_interval=100)
    scaler.scale(param)
    for step in range(6):
        g = draw(step + 1, (40,), "float32")
        factor = scaler.get_scale()
        scaled = (g * factor).astype(np.float32)
        if step % 2:
            scaled[3] = np.inf
        else:
            model.step(g.astype(float), 1e-2, (0.9, 0.999), 1e-8, 0.01)
        give(param, scaled)
        scaler.step(opt)
        scaler.update()
    assert_close(
        "parameter", f64(param), model.w, "float32", 6 * 2.0**-24 * (np.abs(model.w) + 24 * 1e-2 * 10)
    )


def test_the_scaler_takes_the_optimisers_own_step():
    """Also one that a user has written."""
    seen = []

    class Mine(SGD):
        def step(self, inv_scale=None, found_inf=None):
            seen.append(found_inf is not None)
            super().step(inv_scale, found_inf)

    p = tensor(np.ones(4, np.float32), requires_grad=True)
    opt, scaler = Mine([p], lr=0.5), GradScaler(init_scale=4.0)
    p.grad = tensor(np.full(4, 4, np.float32)).view
    scaler.step(opt)
    assert seen == [True]
    np.testing.assert_array_equal(p.numpy(), np.full(4, 0.5, np.float32))
