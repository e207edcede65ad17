"""FusedAdam and FusedSGD against torch.optim in float64."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from fp8kit_torch import optimizer_state
from fp8kit_torch.optimizers import FusedAdam, FusedSGD
from fp8kit_torch.views import as_view

from fp8kit.backends import dispatch
from fp8kit.errors import FormatError, Fp8kitError, ShapeError
from fp8kit.testing.compare import assert_close, assert_same_bits
from tests.support.tensors import assert_tensor_close

SHAPES = [(5, 7), (13,), (64, 33), (0,)]
STEPS = 6


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request):
    return request.param


def draw(seed, shape, dtype=torch.float32, place="cpu"):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(dtype).to(place)


def make(dtype=torch.float32, place="cpu"):
    params = [torch.nn.Parameter(draw(i, s, dtype, place)) for i, s in enumerate(SHAPES)]
    return params, [torch.nn.Parameter(p.detach().double().cpu()) for p in params]


def give(params, step, dtype=None, name="grad"):
    for i, p in enumerate(params):
        setattr(p, name, draw(100 * step + i, SHAPES[i], dtype or p.dtype, p.device))


def grads_to(params, twins):
    for p, t in zip(params, twins, strict=True):
        t.grad = None if p.grad is None else p.grad.double().cpu()


def f64(t):
    return t.detach().double().cpu().numpy()


def groups(params):
    return [{"params": params[:2]}, {"params": params[2:], "lr": 3e-2, "weight_decay": 0.3}]


def adam_slack(lr, steps=STEPS):
    """A step moves a weight by at most about lr (1 - beta1) / sqrt(1 - beta2) < 4 lr (Kingma & Ba 2015, 2.1),
    with an error of 32 u."""
    return steps * 32 * 2.0**-24 * (4 * lr + 4)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [FusedAdam, FusedSGD])
def test_a_step_is_on_torchs_stream(kind):
    """Behind a gradient that a stream of torch's own has still to write."""

    def stepped(side):
        param = torch.nn.Parameter(draw(0, (256, 64), place="cuda"))
        optimizer, values = kind([param], lr=0.1), draw(1, (256, 64), place="cuda")
        param.grad = torch.zeros_like(values)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000_000)  # some 50 ms
            param.grad.copy_(values)
            optimizer.step()
        side.synchronize()
        return param.detach().cpu().numpy()

    assert_same_bits("parameter", stepped(torch.cuda.Stream()), stepped(torch.cuda.current_stream()))


@pytest.mark.parametrize("adam_w_mode", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"master_weights": True}, {"capturable": True}], ids=["plain", "masters", "capturable"]
)
def test_adam_in_float32(place, adam_w_mode, options):
    params, twins = make(place=place)
    opt = FusedAdam(
        groups(params), lr=1e-2, weight_decay=0.1, betas=(0.8, 0.95), adam_w_mode=adam_w_mode, **options
    )
    twin = (torch.optim.AdamW if adam_w_mode else torch.optim.Adam)(
        groups(twins), lr=1e-2, weight_decay=0.1, betas=(0.8, 0.95)
    )
    versions = [p._version for p in params]
    for step in range(STEPS):
        give(params, step)
        grads_to(params, twins)
        opt.step()
        twin.step()
        opt.zero_grad()
        assert all(p.grad is None for p in params)
    for i, (p, t) in enumerate(zip(params, twins, strict=True)):
        assert_close(f"parameter {i}", f64(p), f64(t), "float32", adam_slack(3e-2))
        assert_close(
            f"exp_avg {i}", f64(opt.state[p]["exp_avg"]), f64(twin.state[t]["exp_avg"]), "float32", 1e-5
        )
        assert p._version == versions[i] + STEPS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_masters_are_the_truth_of_16_bit_parameters(place, dtype, adam_w_mode):
    params, twins = make(dtype, place)
    opt = FusedAdam(params, lr=1e-3, weight_decay=0.1, master_weights=True, adam_w_mode=adam_w_mode)
    twin = (torch.optim.AdamW if adam_w_mode else torch.optim.Adam)(twins, lr=1e-3, weight_decay=0.1)
    for step in range(STEPS):
        give(params, step)
        grads_to(params, twins)
        opt.step()
        twin.step()
    for i, (p, t) in enumerate(zip(params, twins, strict=True)):
        master = opt.state[p]["master_param"]
        assert_close(f"master {i}", f64(master), f64(t), "float32", adam_slack(1e-3))
        assert_same_bits(f"parameter {i}", f64(p), f64(master.to(dtype)))


def test_16_bit_parameters_without_masters(place):
    """Every step rounds once: half a step of bfloat16 each."""
    params, twins = make(torch.bfloat16, place)
    opt, twin = FusedAdam(params, lr=1e-2), torch.optim.AdamW(twins, lr=1e-2, weight_decay=0)
    for step in range(STEPS):
        give(params, step)
        grads_to(params, twins)
        opt.step()
        twin.step()
    for i, (p, t) in enumerate(zip(params, twins, strict=True)):
        assert_close(f"parameter {i}", f64(p), f64(t), "bfloat16", STEPS * 2.0**-8 * (np.abs(f64(t)) + 0.1))


def test_remainders_hold_exactly_what_the_master_has_more(place):
    params, _ = make(torch.bfloat16, place)
    others = copy.deepcopy(params)
    opt = FusedAdam(params, lr=1e-2, weight_decay=0.1, master_weights=True, store_param_remainders=True)
    twin = FusedAdam(others, lr=1e-2, weight_decay=0.1, master_weights=True)
    for step in range(STEPS):
        give(params, step)
        give(others, step)
        opt.step()
        twin.step()
    for i, (p, t) in enumerate(zip(params, others, strict=True)):
        kept = opt.state[p]["master_param"]
        assert kept.dtype == torch.int16
        assert_same_bits(
            f"master {i}", f64(optimizer_state.join(p.detach(), kept)), f64(twin.state[t]["master_param"])
        )
    bits = torch.tensor(
        [0x3F808000, 0x3F807FFF, 0x3F818000, -0x407F8000, 0x3F800000], dtype=torch.int32, device=place
    )
    master, lower = bits.view(torch.float32), torch.zeros_like(bits, dtype=torch.int16)
    upper = torch.zeros_like(master, dtype=torch.bfloat16)
    optimizer_state.split(master, upper, lower)
    assert torch.equal(optimizer_state.join(upper, lower).view(torch.int32), bits)


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11), (torch.uint8, 2.0**-4)]
)
def test_states_in_fewer_bits(place, dtype, error):
    """Against the same with float32 states: an exp_avg differs by the roundings of its steps, the older ones
    decayed."""
    params, _ = make(place=place)
    others = copy.deepcopy(params)
    opt, twin = FusedAdam(params, lr=1e-2, exp_avg_dtype=dtype), FusedAdam(others, lr=1e-2)
    for step in range(STEPS):
        give(params, step)
        give(others, step)
        opt.step()
        twin.step()
    for i, (p, t) in enumerate(zip(params[:3], others, strict=False)):
        assert opt.state[p]["exp_avg"].dtype == dtype
        wanted = f64(twin.state[t]["exp_avg"])
        got = f64(opt.get_unscaled_state(p, "exp_avg"))
        assert_close(f"exp_avg {i}", got, wanted, "float32", STEPS * error * np.abs(wanted).max())
        assert np.abs(f64(p) - f64(t)).max() <= STEPS * 1e-2


def test_decoupled_grads_may_be_wider_than_parameters(place):
    params, twins = make(torch.bfloat16, place)
    opt = FusedAdam(params, lr=1e-2, master_weights=True, use_decoupled_grad=True)
    twin = torch.optim.AdamW(twins, lr=1e-2, weight_decay=0)
    for step in range(3):
        give(params, step, torch.float32, "decoupled_grad")
        for p, t in zip(params, twins, strict=True):
            t.grad = p.decoupled_grad.double().cpu()
        opt.step()
        twin.step()
    for i, (p, t) in enumerate(zip(params, twins, strict=True)):
        assert_close(f"master {i}", f64(opt.state[p]["master_param"]), f64(t), "float32", adam_slack(1e-2))
    opt.zero_grad(set_to_none=False)
    assert not params[0].decoupled_grad.any()
    opt.zero_grad()
    assert params[0].decoupled_grad is None


def test_without_bias_correction(place):
    (param,) = [torch.nn.Parameter(draw(0, (9,), place=place))]
    w, m, v = f64(param), np.zeros(9), np.zeros(9)
    opt = FusedAdam([param], lr=1e-2, bias_correction=False)
    for step in range(3):
        param.grad = draw(step + 1, (9,), place=place)
        g = f64(param.grad)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        w = w - 1e-2 * m / (np.sqrt(v) + 1e-8)
        opt.step()
    assert_close("parameter", f64(param), w, "float32", adam_slack(1e-2))


@pytest.mark.parametrize("kind", ["adam", "packed", "remainders", "capturable", "sgd"])
def test_state_comes_back_and_continues_with_the_same_bits(place, kind):
    def fresh():
        dtype = torch.bfloat16 if kind != "packed" else torch.float32
        params, _ = make(dtype, place)
        if kind == "sgd":
            return params, FusedSGD(params, lr=1e-2, momentum=0.9)
        options = {
            "packed": {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.bfloat16},
            "remainders": {"store_param_remainders": True},
            "capturable": {"capturable": True},
        }.get(kind, {})
        return params, FusedAdam(groups(params), lr=1e-2, master_weights=True, **options)

    def go(params, opt, steps):
        for step in steps:
            give(params, step)
            opt.step()

    params, opt = fresh()
    go(params, opt, range(3))
    saved, held = copy.deepcopy(opt.state_dict()), [p.detach().clone() for p in params]
    go(params, opt, range(3, 5))
    others, again = fresh()
    with torch.no_grad():
        for p, w in zip(others, held, strict=True):
            p.copy_(w)
    again.load_state_dict(saved)
    go(others, again, range(3, 5))
    for i, (p, q) in enumerate(zip(params, others, strict=True)):
        # a float16 state is read back from its float32 values: the factor is found anew, one rounding apart
        # at most
        limit = 2.0**-22 * np.abs(f64(p)).max(initial=0) if kind == "packed" else 0
        assert np.abs(f64(p) - f64(q)).max(initial=0) <= limit, i
        assert opt.state[p].keys() == again.state[q].keys()
        assert all(opt.state[p][n].dtype == again.state[q][n].dtype for n in opt.state[p])


@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler")
def test_capturable_takes_the_loss_scale_on_the_device(place):
    params, twins = make(place=place)
    opt, twin = FusedAdam(params, lr=1e-2, capturable=True), torch.optim.AdamW(twins, lr=1e-2, weight_decay=0)
    scaler = torch.amp.GradScaler(place, init_scale=1024.0)
    scaler.scale(torch.ones(1, device=place))
    for step in range(5):
        give(params, step)
        grads_to(params, twins)
        scale = scaler.get_scale()
        for p in params:
            p.grad *= scale
        if step == 2:
            params[0].grad[0, 0] = torch.inf
        else:
            twin.step()
        if step == 3:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
    assert scaler.get_scale() == 512.0
    assert int(opt.param_groups[0]["step"]) == 4
    for i, (p, t) in enumerate(zip(params, twins, strict=True)):
        assert_close(f"parameter {i}", f64(p), f64(t), "float32", adam_slack(1e-2))


@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_lose_the_loss_scale_in_one_call(place, dtype, monkeypatch):
    """Rounded once, as by ``GradScaler.unscale_``, also those in strides."""
    params, _ = make(dtype, place)
    opt, factor = FusedAdam(params, lr=1e-2, capturable=True), 1000.0
    scaler = torch.amp.GradScaler(place, init_scale=factor)
    scaler.scale(torch.ones(1, device=place))
    kernels, called = dispatch.kernels(as_view(params[0].detach()).device), []
    for name in ("adamw_", "scale_"):
        real = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *a, real=real, name=name: called.append(name) or real(*a))
    give(params, 0)
    wide = next(p for p in params if p.ndim == 2 and min(p.shape) > 1)
    wide.grad = wide.grad.t().contiguous().t()
    held, versions = [p.grad.clone() for p in params], [p.grad._version for p in params]
    by = torch.tensor(1 / factor, dtype=torch.float32, device=place)
    try:
        scaler.step(opt)
    except NotImplementedError as error:  # torch 2.11 has none for bfloat16 on GPUs
        assert (place, dtype) == ("cuda", torch.bfloat16)
        pytest.skip(f"GradScaler's own kernel: {error}")
    for i, (p, g) in enumerate(zip(params, held, strict=True)):
        assert_same_bits(f"gradient {i}", f64(p.grad), f64((g.float() * by).to(dtype)))
    assert called == ["adamw_", "scale_"]
    assert all(p.grad._version > before for p, before in zip(params, versions, strict=True))


@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.2}, {"momentum": 0.8, "nesterov": True}],
    ids=["plain", "momentum", "dampened", "nesterov"],
)
@pytest.mark.parametrize("after", [False, True], ids=["wd-before", "wd-after"])
def test_sgd(place, options, after):
    params, twins = make(place=place)
    opt = FusedSGD(groups(params), lr=1e-2, wd_after_momentum=after, **options)
    twin = torch.optim.SGD(groups(twins), lr=1e-2, **options)
    for step in range(STEPS):
        give(params, step)
        if step % 2 == 0:
            params[1].grad = None  # its first step is the others' second
        grads_to(params, twins)
        opt.step()
        if after:
            for group in twin.param_groups:
                for t in group["params"]:
                    if t.grad is not None:
                        t.data -= group["lr"] * group["weight_decay"] * t.data
                group["weight_decay_"], group["weight_decay"] = group["weight_decay"], 0
        twin.step()
        for group in twin.param_groups:
            group["weight_decay"] = group.get("weight_decay_", group["weight_decay"])
    for i, (p, t) in enumerate(zip(params, twins, strict=True)):
        assert_close(
            f"parameter {i}", f64(p), f64(t), "float32", STEPS * 8 * 2.0**-24 * (np.abs(f64(t)) + 40 * 3e-2)
        )


def test_closures_schedules_and_deprecated_arguments():
    param = torch.nn.Parameter(torch.ones(3))
    with pytest.warns(DeprecationWarning, match="set_grad_none"):
        opt = FusedSGD([param], lr=0.5, set_grad_none=True)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)

    def closure():
        opt.zero_grad()
        loss = (param * 2).sum()
        loss.backward()
        return loss

    assert opt.step(closure).item() == 6.0
    schedule.step()
    opt.step(closure)
    assert param.tolist() == [1 - 0.5 * 2 - 0.25 * 2] * 3
    with pytest.raises(Fp8kitError, match="set_to_none"):
        opt.zero_grad(set_to_none=False)


def test_copies_continue_like_the_original():
    for make_one in (
        lambda ps: FusedAdam(ps, lr=1e-2, exp_avg_dtype=torch.float16),
        lambda ps: FusedSGD(ps, lr=1e-2, momentum=0.9),
    ):
        params, _ = make()
        opt = make_one(params)
        give(params, 0)
        opt.step()
        others, again = copy.deepcopy((params, opt))
        for some, one in ((params, opt), (others, again)):
            give(some, 1)
            one.step()
        for p, q in zip(params, others, strict=True):
            assert p is not q
            assert_same_bits("copy", p.detach().numpy(), q.detach().numpy())


def test_refusals():
    p = torch.nn.Parameter(torch.ones(4, 3))
    with pytest.raises(NotImplementedError, match="FusedAdam: amsgrad"):
        FusedAdam([p], amsgrad=True)
    for options, word in (({"betas": (1.0, 0.9)}, "betas"), ({"lr": -1}, "lr"), ({"eps": -1}, "eps")):
        with pytest.raises(Fp8kitError, match=f"FusedAdam: {word}"):
            FusedAdam([p], **options)
    with pytest.raises(FormatError, match="exp_avg's dtype"):
        FusedAdam([p], exp_avg_dtype=torch.int8)
    with pytest.raises(FormatError, match="capturable"):
        FusedAdam([p], capturable=True, exp_avg_dtype=torch.bfloat16)
    with pytest.raises(FormatError, match="params"):
        FusedAdam([torch.nn.Parameter(torch.ones(2, dtype=torch.float64))])
    with pytest.raises(ShapeError, match="strides"):
        FusedSGD([torch.nn.Parameter(torch.ones(2, 3).t())], lr=1.0)
    for options, word in (({}, "lr"), ({"lr": 1.0, "nesterov": True}, "nesterov")):
        with pytest.raises(Fp8kitError, match=f"FusedSGD: {word}"):
            FusedSGD([p], **options)
    opt = FusedAdam([p])
    p.grad = torch.ones(4, 3).to_sparse()
    with pytest.raises(ShapeError, match="grad"):
        opt.step()


# --- as programs for Transformer Engine use them ------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_that_are_given_are_updated_where_they_are(place, dtype):
    params, twins = make(dtype, place)
    masters = [p.detach().float() for p in params]
    opt, twin = (
        FusedAdam(params, lr=1e-2, master_weights=masters),
        torch.optim.AdamW(twins, 1e-2, weight_decay=0),
    )
    for step in range(STEPS):
        give(params, step)
        grads_to(params, twins)
        opt.step()
        twin.step()
    for i, (p, t, m) in enumerate(zip(params, twins, masters, strict=True)):
        assert opt.state[p]["master_param"] is m or opt.state[p]["master_param"].data_ptr() == m.data_ptr()
        assert_close(f"master {i}", f64(m), f64(t), "float32", adam_slack(1e-2))
        assert torch.equal(p.detach(), m.to(dtype))


def test_masters_that_are_given_keep_their_memory_in_a_state_dict():
    params, _ = make(torch.bfloat16)
    opt = FusedAdam(params, master_weights=[p.detach().float() for p in params])
    give(params, 0)
    opt.step()
    saved = copy.deepcopy(opt.state_dict())
    others, _ = make(torch.bfloat16)
    masters = [torch.zeros(p.shape) for p in others]
    again = FusedAdam(others, master_weights=masters)
    again.load_state_dict(saved)
    for p, q, m in zip(params, others, masters, strict=True):
        assert again.state[q]["master_param"].data_ptr() == m.data_ptr()
        assert torch.equal(m, opt.state[p]["master_param"])


@pytest.mark.parametrize(
    "masters",
    [
        [torch.zeros(5, 7)],
        [torch.zeros(7, 5), None, None, None],
        [torch.zeros(5, 7, dtype=torch.float16), None, None, None],
    ],
    ids=["too few", "another shape", "another dtype"],
)
def test_masters_that_do_not_fit(masters):
    with pytest.raises(ShapeError, match="master_weights"):
        FusedAdam(make(torch.bfloat16)[0], master_weights=masters)


def test_a_step_without_gradients_counts(place):
    for capturable in (False, True):
        opt = FusedAdam(make(place=place)[0], capturable=capturable)
        opt.step()
        assert int(opt.param_groups[0]["step"]) == 1


@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler")
def test_a_scaler_that_is_handed_over(place):
    """``step(grad_scaler=)`` takes the gradients' factor away and skips what has Inf."""
    (param,) = params = [torch.nn.Parameter(draw(0, (8,), place=place))]
    twin = torch.nn.Parameter(param.detach().clone())
    opt, other = (FusedAdam([p], lr=1e-2, capturable=True) for p in (param, twin))
    scaler = torch.amp.GradScaler(place, init_scale=256.0)
    scaler.scale(torch.ones(1, device=place))
    for step in range(3):
        param.grad = twin.grad = None
        param.grad = draw(step, (8,), place=place) * 256
        twin.grad = param.grad / 256
        if step == 1:
            param.grad[0] = torch.inf
        else:
            other.step()
        opt.step(grad_scaler=scaler)
        assert torch.equal(param.grad[1:], twin.grad[1:])
        scaler.update(256.0)
    assert torch.equal(param, twin)
    assert int(opt.param_groups[0]["step"]) == 2
    with pytest.raises(Fp8kitError, match="gradscaler"):
        FusedAdam(params).step(gradscaler=scaler)


# what Transformer Engine's own tests allow, with their learning rate and betas, gradients of one sign
@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"exp_avg_dtype": torch.float16}, 2e-3),
        ({"exp_avg_dtype": torch.bfloat16}, 2e-3),
        ({"exp_avg_dtype": torch.uint8}, 1e-2),
        ({"exp_avg_sq_dtype": torch.float16}, 2e-3),
        ({"exp_avg_sq_dtype": torch.bfloat16}, 2e-3),
        ({"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}, 2e-3),
        ({"master_weight_dtype": torch.float16}, 2e-3),
    ],
)
def test_narrow_states_at_transformer_engines_tolerance(place, options, allowed):
    rng = np.random.default_rng(0)
    twins = [torch.nn.Parameter(0.05 * draw(i, (64, 33), place=place)) for i in range(2)]
    params = [torch.nn.Parameter(t.detach().bfloat16()) for t in twins]
    with torch.no_grad():
        for p, t in zip(params, twins, strict=True):
            t.copy_(p)
    how = {"lr": 1.0, "betas": (0.1, 0.25), "eps": 1e-8, "weight_decay": 0.0}
    own = how | {"master_weights": True, "use_decoupled_grad": True} | options
    opt, twin = FusedAdam(params, **own), torch.optim.Adam(twins, **how)
    for step in range(14):
        if step == 7:
            saved, opt = opt.state_dict(), FusedAdam(params, **own)
            opt.load_state_dict(saved)
        for p, t in zip(params, twins, strict=True):
            p.decoupled_grad = t.grad = torch.from_numpy(rng.random(t.shape)).float().to(place)
        opt.step()
        twin.step()
        for p, t in zip(params, twins, strict=True):
            master = opt.get_unscaled_state(p, "master_param")
            assert_tensor_close("master", master.float(), t, allowed * (1 + t.abs()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}])
def test_sgd_in_half_precision(place, dtype, options):
    """Each step rounds the parameter once; momentum is float32."""
    params, twins = make(dtype, place)
    opt, twin = FusedSGD(params, lr=1e-2, **options), torch.optim.SGD(twins, lr=1e-2, **options)
    for step in range(STEPS):
        give(params, step)
        grads_to(params, twins)
        opt.step()
        twin.step()
    half_step = torch.finfo(dtype).eps / 2
    for p, t in zip(params, twins, strict=True):
        assert p.dtype is dtype
        assert (
            (p.double().cpu() - t).abs().max() <= STEPS * half_step * 5 if p.numel() else True
        )  # of |w| < 5
        if options:
            assert opt.state[p]["momentum_buffer"].dtype is torch.float32


def test_sgd_without_master_gradients_is_sgd():
    """apex's amp is not there: the argument changes nothing, as in Transformer Engine."""
    found = []
    for asked in (True, False):
        parameter = torch.nn.Parameter(torch.arange(8.0))
        optimizer = FusedSGD([parameter], lr=0.1, momentum=0.9, materialize_master_grads=asked)
        for _ in range(2):
            parameter.grad = torch.ones(8)
            optimizer.step()
        found.append(parameter.detach())
    assert torch.equal(*found)
