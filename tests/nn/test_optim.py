"""AdamW against float64, clipping, and the schedule."""

from __future__ import annotations

import math

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import nn
from fp8kit.autograd import tensor
from fp8kit.backends import dispatch
from fp8kit.errors import CheckpointError, Fp8kitError, ShapeError
from fp8kit.optim import SGD, AdamW, base, clip_grad_norm_, warmup_cosine
from fp8kit.testing.compare import assert_close, assert_same_bits, sum_slack
from tests.support.adamw import Model, give
from tests.support.layers import draw
from tests.support.products import f64


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_adamw_against_float64(device, dtype):
    shapes = [(5, 7), (13,), (1,), (64, 33)]
    params = [tensor(draw(i, s, dtype), requires_grad=True, device=device) for i, s in enumerate(shapes)]
    groups = [
        {"params": params[:2]},
        {"params": params[2:], "lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3},
    ]
    opt = AdamW(groups, lr=1e-2)
    models = [Model(f64(p)) for p in params]
    for step in range(6):
        for i, param in enumerate(params):
            g = draw(100 * step + i, shapes[i], dtype, 10.0 ** (i - 2))
            if i == 1 and step % 2:
                continue  # no gradient: left alone, and its own step does not advance
            give(param, g)
            group = opt.param_groups[i // 2]
            models[i].step(g.astype(float), group["lr"], group["betas"], group["eps"], group["weight_decay"])
        if step == 3:
            before = f64(params[1])
        opt.step()
        if step == 3:
            np.testing.assert_array_equal(f64(params[1]), before)
        opt.zero_grad()
        assert all(p.grad is None for p in params)
    for i, (param, model) in enumerate(zip(params, models, strict=True)):
        # each step rounds w once and the update, of size at most ~lr / (1 - beta1), a dozen times
        lr = opt.param_groups[i // 2]["lr"]
        slack = 6 * 2.0**-24 * (np.abs(model.w) + 24 * lr * 10)
        assert_close(f"parameter {i}", f64(param), model.w, dtype, slack)
        moments = opt.state_dict()
        assert_close(
            "exp_avg",
            f64(moments[f"exp_avg.{i}"]),
            model.m,
            "float32",
            sum_slack(np.abs(model.m).max() + 10.0 ** (i - 2) * 5, 6),
        )
        if dtype != "float32":
            assert_close("master", f64(moments[f"master.{i}"]), model.w, "float32", slack)


def test_masters_keep_what_bfloat16_cannot(device):
    """A thousand steps that are each below half a bfloat16 step move the weight all the same."""
    param = tensor(np.ones(4, np.float32), requires_grad=True, dtype="bfloat16", device=device)
    opt = AdamW([param], lr=1e-4, weight_decay=0.0)
    for _ in range(1000):
        give(param, np.ones(4, np.float32).astype(param.dtype.numpy))
        opt.step()
    assert_close("parameter", f64(param), np.full(4, 0.9), "bfloat16", 1000 * 2.0**-23)


def test_lr_is_read_at_each_step(device):
    params = [tensor(np.ones(3, np.float32), requires_grad=True, device=device) for _ in range(2)]
    opt = AdamW([{"params": [params[0]]}, {"params": [params[1]], "lr": 7.0}], weight_decay=0.0)
    opt.lr = 0.5
    assert [g["lr"] for g in opt.param_groups] == [0.5, 0.5]
    for p in params:
        give(p, np.full(3, 2, np.float32))
    opt.step()
    for p in params:
        assert_close("parameter", f64(p), np.full(p.shape, 0.5), "float64", 1e-6)


def test_state_dict_is_checked_before_anything_changes(device):
    linear = nn.Linear(4, 3, params_dtype="bfloat16", device=device)
    opt = AdamW(linear.parameters())
    for p in linear.parameters():
        give(p, np.ones(p.shape, np.float32).astype(p.dtype.numpy))
    opt.step()
    state = {name: view.numpy().copy() for name, view in opt.state_dict().items()}
    assert sorted(state) == sorted(
        ["steps", "hyper", *[f"{n}.{i}" for n in ("exp_avg", "exp_avg_sq", "master") for i in (0, 1)]]
    )
    other = AdamW(nn.Linear(4, 3, params_dtype="bfloat16", device=device).parameters(), lr=9)
    for change, word in (
        ({"exp_avg.0": np.zeros(2, np.float32)}, "exp_avg.0"),
        ({"x": np.zeros(1)}, "unexpected: x"),
        ({"steps": np.zeros(5, np.int64)}, "steps"),
    ):
        with pytest.raises(CheckpointError, match=word):
            other.load_state_dict(state | change)
    with pytest.raises(CheckpointError, match=r"missing: master\.1"):
        other.load_state_dict({k: v for k, v in state.items() if k != "master.1"})
    assert other.lr == 9
    other.load_state_dict(state)
    assert {k: v.numpy().tobytes() for k, v in other.state_dict().items()} == {
        k: v.tobytes() for k, v in state.items()
    }


def test_wrong_parameters_and_hyperparameters():
    p = tensor(np.ones(2, np.float32), requires_grad=True)
    for make, word in (
        (lambda: AdamW([]), "params"),
        (lambda: AdamW([p, p]), "twice"),
        (lambda: AdamW([tensor(np.ones(2, np.float32))]), "requires grad"),
        (lambda: AdamW([np.ones(2)]), r"got an array .*expected fk\.tensors"),
        (lambda: AdamW([p], lr=-1.0), "lr"),
        (lambda: AdamW([p], betas=(0.9, 1.0)), "betas"),
        (lambda: AdamW([p], eps=math.nan), "eps"),
        (lambda: AdamW([p], weight_decay=-0.1), "weight_decay"),
        (lambda: AdamW([{"params": [p], "momentum": 1}]), "momentum"),
        (lambda: AdamW([p], betas=0.9), "hyperparameters"),
    ):
        with pytest.raises(Fp8kitError, match=word):
            make()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale", [1e-3, 10.0])
def test_clip_grad_norm(device, dtype, scale):
    shapes = [(50, 40), (7,), (3, 3)]
    params = [tensor(np.zeros(s, np.float32), requires_grad=True, dtype=dtype, device=device) for s in shapes]
    grads = [draw(i, s, dtype, scale) for i, s in enumerate(shapes)]
    for p, g in zip(params, grads, strict=True):
        give(p, g)
    idle = tensor(np.zeros(2, np.float32), requires_grad=True, device=device)
    norm = clip_grad_norm_([*params, idle], 1.0)
    want = math.sqrt(sum((g.astype(float) ** 2).sum() for g in grads))
    assert norm.shape == ()
    assert_close("norm", float(norm), want, "float32", sum_slack(want, 2016))
    factor = min(1.0, 1.0 / (want + 1e-6))
    for p, g in zip(params, grads, strict=True):
        assert_close(
            "grad",
            f64(p.grad),
            g.astype(float) * factor,
            dtype,
            sum_slack(np.abs(g.astype(float)) * factor, 2016),
        )
    with pytest.raises(Fp8kitError, match="1 tensors, none with a gradient"):
        clip_grad_norm_([idle], 1.0)
    with pytest.raises(Fp8kitError, match="max_norm"):
        clip_grad_norm_(params, 0.0)


def test_warmup_cosine():
    rates = [warmup_cosine(i, 2.0, 4, 12, 0.5) for i in range(15)]
    fifth = 0.5 + 1.5 * 0.5 * (1 + math.cos(math.pi / 8))
    known = [*rates[:6], rates[8], *rates[12:]]
    assert_close("rates", known, [0.5, 1.0, 1.5, 2.0, 2.0, fifth, 1.25, 0.5, 0.5, 0.5], "float64", 1e-8)
    assert warmup_cosine(0, 1.0, 0, 10) == 1.0
    with pytest.raises(Fp8kitError, match="warmup_steps"):
        warmup_cosine(0, 1.0, 5, 4)


@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_parameters_that_do_not_require_grad_are_left_alone(kind):
    """A layer's constants among its parameters: they get no state, and a saved state is taken back."""
    fk.manual_seed(0)
    layer = nn.TransformerLayer(64, 128, 4, qk_norm_type="RMSNorm", qk_norm_learned=False)
    params = list(layer.parameters())
    fixed = [i for i, param in enumerate(params) if not param.requires_grad]
    assert fixed
    before = [param.numpy().copy() for param in params]
    opt = kind(params, lr=0.1)
    layer(tensor(draw(0, (8, 2, 64), "float32"))).backward(draw(1, (8, 2, 64), "float32"))
    opt.step()
    changed = [not np.array_equal(param.numpy(), old) for param, old in zip(params, before, strict=True)]
    assert changed == [param.grad is not None for param in params]
    assert not any(changed[i] for i in fixed)
    state = opt.state_dict()
    assert not state["steps"].numpy()[fixed].any()
    kind(params, lr=0.1).load_state_dict(state)


def test_memory_that_cannot_be_updated_is_refused():
    strided = tensor(np.zeros((3, 2), np.float32).T, requires_grad=True)
    fixed = np.zeros(3, np.float32)
    fixed.flags.writeable = False
    for param in (strided, tensor(fixed, requires_grad=True)):
        with pytest.raises(Fp8kitError, match=r"AdamW: params: .*may be written"):
            AdamW([param])


def test_gradients_that_the_user_set():
    """Any layout counts by its values; another shape or dtype is refused before anything changes."""
    g = draw(3, (4, 3), "float32")
    params = [tensor(np.zeros((3, 4), np.float32), requires_grad=True) for _ in range(2)]
    for param, grad in zip(params, (g.T, g.T.copy()), strict=True):
        param.grad = grad
        AdamW([param], lr=0.1).step()
    np.testing.assert_array_equal(params[0], params[1])
    params[0].grad = g.T
    with pytest.raises(Fp8kitError, match="strides"):
        clip_grad_norm_(params[:1], 1.0)
    opt = AdamW(params[:1])
    for wrong in (g, g.T.astype(np.float16)):
        params[0].grad = wrong
        with pytest.raises(ShapeError, match="AdamW: grad"):
            opt.step()
    assert opt.state_dict()["steps"].numpy().tolist() == [0]


@pytest.mark.parametrize("where", ["adamw_", "columns"])
def test_a_step_that_failed_does_not_count(monkeypatch, where):
    """Neither one that had no memory nor one whose kernel could not start; the next step is the one it would
    have been."""
    g, params = (
        draw(3, (4, 3), "float32"),
        [tensor(draw(1, (4, 3), "float32"), requires_grad=True) for _ in range(2)],
    )
    opts = [AdamW([param], lr=0.1) for param in params]
    for param in params:
        give(param, g)

    def fail(*args, **options):
        raise MemoryError(where)

    with monkeypatch.context() as patch:
        patch.setattr(
            *((dispatch.kernels(params[0].device), where) if where == "adamw_" else (base.Batch, where)), fail
        )
        with pytest.raises(MemoryError, match=where):
            opts[0].step()
    assert opts[0].state_dict()["steps"].numpy().tolist() == [0]
    for opt in opts:
        opt.step()
    np.testing.assert_array_equal(params[0], params[1])
    assert opts[0].state_dict()["steps"].numpy().tolist() == [1]


@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_write_fp8_weights_has_no_effect(kind, device):
    """The argument is deprecated."""
    found = []
    for write in (False, True):
        layer = nn.Linear(32, 16, device=device)
        layer.load_state_dict({"weight": draw(0, (16, 32), "float32"), "bias": draw(1, (16,), "float32")})
        if write:
            with pytest.warns(DeprecationWarning, match="write_fp8_weights .* no effect") as seen:
                opt = kind(layer.parameters(), write_fp8_weights=True)
            assert seen[0].filename == __file__
        else:
            opt = kind(layer.parameters(), write_fp8_weights=False)
        for step in range(3):
            with fk.deterministic(True), fk.autocast(recipe=fk.recipe.DelayedScaling()):
                y = layer(tensor(draw(2 + step, (8, 32), "float32"), device=device))
            y.backward(draw(9, (8, 16), "float32"))
            opt.step()
            opt.zero_grad()
        found.append(layer.state_dict())
    for name, value in found[0].items():
        assert_same_bits(name, found[1][name].numpy(), value.numpy())
    with pytest.raises(Fp8kitError, match="write_fp8_weights: got 'yes'"):
        kind(layer.parameters(), write_fp8_weights="yes")
