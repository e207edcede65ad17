"""``multi_tensor_*`` against the same arithmetic in float64, and against torch's own optimisers."""

from __future__ import annotations

import contextlib

import pytest
import torch
from fp8kit_torch.optimizers import (
    FusedAdam,
    multi_tensor_adam,
    multi_tensor_adam_capturable,
    multi_tensor_adam_capturable_master,
    multi_tensor_applier,
    multi_tensor_compute_scale_and_scale_inv,
    multi_tensor_compute_scale_inv_e8m0,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_scale_tensor,
    multi_tensor_sgd,
    multi_tensor_unscale_l2norm,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8kit.errors import BackendError, FormatError, ShapeError
from tests.support.tensors import assert_tensor_close

from .twins import same

SHAPES = [(3, 5), (17,), (2, 3, 4), (1,)]
ULP = 2.0**-23


def some(device, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g).to(device, dtype) for shape in SHAPES]


def flag(device, value=0):
    return torch.full((1,), value, dtype=torch.int32, device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", [multi_tensor_scale, multi_tensor_scale_tensor])
def test_scale(device, dtype, op):
    sources, results, noop = (
        some(device, dtype),
        [torch.empty(s, device=device) for s in SHAPES],
        flag(device),
    )
    factor = 0.25 if op is multi_tensor_scale else torch.tensor([0.25], device=device)
    multi_tensor_applier(op, noop, [sources, results], factor)
    for got, want in zip(results, sources, strict=True):
        same(got, want.float() * 0.25, "scaled")
    assert int(noop) == 0
    for bad in (float("inf"), float("nan")):
        noop = flag(device)
        sources[1][3] = bad
        multi_tensor_applier(op, noop, [sources, results], factor)
        assert int(noop) == 1
    multi_tensor_scale(1, noop, [[], []], 2.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms(device, dtype):
    tensors, noop = some(device, dtype), flag(device)
    each = torch.stack([t.double().norm() for t in tensors])
    count = sum(t.numel() for t in tensors)
    norm, norms = multi_tensor_applier(multi_tensor_l2norm, noop, [tensors], True)
    total = each.norm().reshape(1)
    assert_tensor_close("norm", norm, total, count * ULP * total)
    assert_tensor_close("norms", norms, each, count * ULP * each)
    norm, norms = multi_tensor_applier(
        multi_tensor_unscale_l2norm, noop, [tensors], torch.tensor([0.125], device=device), False
    )
    assert_tensor_close("norm", norm, 0.125 * total, count * ULP * total)
    assert norms.numel() == 0
    assert float(multi_tensor_l2norm(1, noop, [[]])[0]) == 0


@pytest.mark.parametrize("mode", [0, 1], ids=["l2", "decoupled"])
@pytest.mark.parametrize("kind", ["plain", "masters", "capturable"])
def test_adam_is_the_optimisers(device, mode, kind):
    dtype = torch.float32 if kind == "plain" else torch.bfloat16
    params = [p.requires_grad_() for p in some(device, dtype)]
    opt = FusedAdam(params, lr=1e-2, weight_decay=0.1, adam_w_mode=bool(mode), master_weights=kind != "plain")
    mine = [p.detach().clone() for p in params]
    masters = [p.float() for p in mine]
    m, v = ([torch.zeros(s, device=device) for s in SHAPES] for _ in range(2))
    for step in range(1, 4):
        grads = some(device, dtype, step)
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        opt.step()
        lists = [grads, mine, m, v] + ([masters] if kind != "plain" else [])
        common = (0.9, 0.999, 1e-8)
        if kind == "capturable":
            numbers = (
                torch.tensor([1e-2], device=device),
                *common,
                torch.tensor([step], dtype=torch.int32, device=device),
                mode,
                1,
                0.1,
                torch.ones(1, device=device),
            )
            multi_tensor_applier(multi_tensor_adam_capturable_master, flag(device), lists, *numbers)
        else:
            multi_tensor_applier(multi_tensor_adam, flag(device), lists, 1e-2, *common, step, mode, 1, 0.1)
        before = [t.clone() for one in lists[1:] for t in one]
        multi_tensor_applier(multi_tensor_adam, flag(device, 1), lists, 1e-2, *common, step, mode, 1, 0.1)
        for got, want in zip([t for one in lists[1:] for t in one], before, strict=True):
            same(got, want, "skipped")
    for i, (p, q) in enumerate(zip(params, mine, strict=True)):
        same(q, p, i)
        same(m[i], opt.state[p]["exp_avg"], i)
        if kind != "plain":
            same(masters[i], opt.state[p]["master_param"], i)


def test_adam_without_bias_correction_and_with_a_loss_scale(device):
    (g,), (p,) = [torch.full((4,), 8.0, device=device)], [torch.zeros(4, device=device)]
    m, v = torch.zeros(4, device=device), torch.zeros(4, device=device)
    one = torch.ones(1, device=device)
    multi_tensor_adam_capturable(
        1, flag(device), [[g], [p], [m], [v]], one * 0.5, 0.5, 0.75, 0.0, one.int(), 1, 0, 0.0, one * 0.25
    )
    same(m, torch.full((4,), 1.0), "m")  # 0.5 * 2
    same(v, torch.full((4,), 1.0), "v")  # 0.25 * 4
    same(p, torch.full((4,), -0.5), "p")


@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.5, "dampening": 0.25}],
    ids=["plain", "momentum", "nesterov", "dampening"],
)
def test_sgd_is_torchs(device, options):
    params, mine = [p.requires_grad_() for p in some(device)], some(device)
    opt = torch.optim.SGD(params, lr=0.1, weight_decay=0.01, **options)
    buffers, copies = (
        [torch.zeros(s, device=device) for s in SHAPES],
        [torch.zeros(s, device=device, dtype=torch.bfloat16) for s in SHAPES],
    )
    for step in range(3):
        grads = some(device, seed=step + 1)
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        opt.step()
        numbers = (
            0.01,
            options.get("momentum", 0.0),
            options.get("dampening", 0.0),
            0.1,
            options.get("nesterov", False),
            step == 0,
            False,
        )
        multi_tensor_applier(
            multi_tensor_sgd, flag(device), [[g * 4 for g in grads], mine, buffers, copies], *numbers, 0.25
        )
    before = [p.clone() for p in mine]
    multi_tensor_sgd(1, flag(device, 1), [grads, mine, buffers], *numbers, 0.25)
    for p, q, old, copy in zip(params, mine, before, copies, strict=True):
        # a rounding or two a step, in another order
        assert_tensor_close("parameter", q, p, 8 * ULP * (1 + p.abs()))
        same(q, old, "skipped")
        same(copy, q.bfloat16(), "copy")


def test_what_does_not_fit_is_refused(device):
    a = some(device)
    with pytest.raises(ShapeError, match="tensor_lists"):
        multi_tensor_scale(1, flag(device), [a], 1.0)
    with pytest.raises(ShapeError, match="as many tensors each"):
        multi_tensor_scale(1, flag(device), [a, a[:1]], 1.0)
    with pytest.raises(ShapeError, match="same shape"):
        multi_tensor_scale(1, flag(device), [a[:1], a[1:2]], 1.0)
    with pytest.raises(FormatError, match="moments"):
        multi_tensor_adam(
            1, flag(device), [a, a, [t.half() for t in a], a], 1.0, 0.9, 0.9, 1e-8, 1, 1, 1, 0.0
        )
    with pytest.raises(FormatError, match="gradients and parameters"):
        multi_tensor_adam(
            1, flag(device), [a, [t.double() for t in a], a, a], 1.0, 0.9, 0.9, 1e-8, 1, 1, 1, 0.0
        )


def calls(lists, noop, number):
    """Each function on (gradients, parameters, moments, moments); ``number``: a tensor (1,) where one may
    be."""
    yield lambda: multi_tensor_scale(1, noop, lists[:2], number)
    yield lambda: multi_tensor_adam(1, noop, lists, number, 0.9, 0.9, 1e-8, 1, 1, 1, 0.0)
    yield lambda: multi_tensor_adam(1, noop, lists, 1.0, 0.9, 0.9, 1e-8, 1, 1, 1, 0.0, number)
    yield lambda: multi_tensor_sgd(1, noop, lists[:3], 0.0, 0.9, 0.0, 0.1, False, False, False, 1.0)


def test_tensors_of_two_devices_are_refused(device):
    """One of a list's, the flag, a number; with nothing changed."""
    with contextlib.nullcontext() if torch.device(device).type == "cuda" else FakeTensorMode():
        strange = torch.zeros(SHAPES[1], device="cpu" if torch.device(device).type == "cuda" else "cuda")
        one, noop = (
            torch.zeros(1, device=strange.device),
            torch.zeros(1, dtype=torch.int32, device=strange.device),
        )
    number = torch.ones(1, device=device)
    for place in range(4):
        lists, good = [some(device, seed=i) for i in range(4)], flag(device)
        lists[place][1] = strange
        before = [[t.clone() for t in own if t is not strange] for own in lists]
        for call in list(calls(lists, good, number))[0 if place < 2 else 1 : None if place < 3 else 3]:
            with pytest.raises(BackendError, match="tensor_lists: got cpu, cuda"):
                call()
        assert not good.any()
        for own, old in zip(lists, before, strict=True):
            for t, o in zip([t for t in own if t is not strange], old, strict=True):
                same(t, o, "refused")
    lists = [some(device, seed=i) for i in range(4)]
    for call in calls(lists, noop, number):
        with pytest.raises(
            BackendError, match=r"noop_flag: got device .*, expected device .*, as tensor_lists"
        ):
            call()
    for call in list(calls(lists, flag(device), one))[:3]:
        with pytest.raises(
            BackendError, match=r"(scale|lr|inv_scale): got device .*, expected device .*, as tensor_lists"
        ):
            call()


def test_elements_that_share_memory_are_refused(device):
    shared, noop = torch.ones(1, device=device).expand(SHAPES[1]), flag(device)
    for place in (1, 2, 3):
        lists = [some(device, seed=i) for i in range(4)]
        lists[0][0][:] = float("inf")
        lists[place][1] = shared
        before = [[t.clone() for t in own] for own in lists]
        for call in list(calls(lists, noop, torch.ones(1, device=device)))[
            0 if place < 2 else 1 : None if place < 3 else 3
        ]:
            with pytest.raises(ShapeError, match="memory of its own for each element"):
                call()
        assert not noop.any()
        for own, old in zip(lists, before, strict=True):
            for t, o in zip(own, old, strict=True):
                same(t, o, "refused")


def test_adam_in_any_memory_layout(device):
    """Transposed parameters, moments and gradients are updated where they lie."""
    plain = [some(device, seed=i) for i in range(4)]
    for squares in plain[3]:
        squares.abs_()
    for place in range(4):
        wanted = [[t.clone() for t in own] for own in plain]
        lists = [[t.clone() for t in own] for own in plain]
        lists[place] = [
            torch.empty(t.shape[::-1], device=device).permute(*range(t.ndim)[::-1]).copy_(t)
            for t in lists[place]
        ]
        for given in (wanted, lists):
            multi_tensor_adam(1, flag(device), given, 0.1, 0.9, 0.99, 1e-8, 1, 1, 1, 0.0)
        for own, right in zip(lists, wanted, strict=True):
            for t, r in zip(own, right, strict=True):
                same(t, r, f"list {place} transposed")


def test_tensors_without_elements(device):
    empty, ones, noop = torch.zeros(0, 3, device=device), torch.ones(2, device=device), flag(device)
    out = torch.zeros(2, device=device)
    multi_tensor_scale(1, noop, [[empty, ones], [empty.clone(), out]], 2.0)
    multi_tensor_scale(1, noop, [[empty], [empty.clone()]], 2.0)
    assert not noop.any()
    same(out, ones * 2, "scaled")
    _, each = multi_tensor_l2norm(1, noop, [[empty, ones]], True)
    same(each.square().round(), torch.tensor([0.0, 2.0], device=device), "norms")
    lists = [[empty.clone(), t] for t in (ones.clone(), ones.clone(), out * 0, out * 0)]
    multi_tensor_adam(1, noop, lists, 0.5, 0.5, 0.75, 0.0, 1, 1, 1, 0.0)
    same(lists[1][1], torch.full((2,), 0.5, device=device), "a first step is lr's sign(g)")


@pytest.mark.parametrize(("most", "power_2", "epsilon"), [(448.0, False, 0.0), (57344.0, True, 0.5)])
def test_scales_of_amaxes(device, most, power_2, epsilon):
    amaxes = [torch.tensor([value], device=device) for value in (0.25, 3.0, 0.0, torch.inf)]
    lists = [amaxes, *([torch.full((1,), -1.0, device=device) for _ in amaxes] for _ in range(2))]
    noop = torch.zeros(1, dtype=torch.int32, device=device)
    multi_tensor_compute_scale_and_scale_inv(65536, noop, lists, most, power_2, epsilon)
    scales, inverses = (torch.cat(one).cpu() for one in lists[1:])
    wanted = torch.tensor(
        [
            most / max(value, epsilon) if 0 < max(value, epsilon) < 1e30 else 1.0
            for value in (0.25, 3.0, 0.0, torch.inf)
        ]
    )
    wanted = 2.0 ** torch.floor(torch.log2(wanted)) if power_2 else wanted
    assert torch.equal(scales, wanted)
    assert torch.equal(inverses, 1 / wanted)
    multi_tensor_compute_scale_and_scale_inv(
        65536, noop + 1, [amaxes[:1], lists[1][:1], lists[2][:1]], 1.0, False, 0.0
    )
    assert lists[1][0] == wanted[0]


def test_scales_of_mxfp8(device):
    amaxes = [torch.tensor([[448.0, 449.0], [0.0, 224.0]], dtype=torch.bfloat16, device=device)]
    scales = [torch.zeros(2, 2, dtype=torch.uint8, device=device)]
    multi_tensor_compute_scale_inv_e8m0(
        65536, torch.zeros(1, dtype=torch.int32, device=device), [amaxes, scales]
    )
    assert scales[0].tolist() == [[127, 127], [0, 126]]  # 449 is 448 in bfloat16
    again = [torch.zeros_like(scales[0])]
    multi_tensor_applier(multi_tensor_compute_scale_inv_e8m0, None, [amaxes, again])
    assert torch.equal(again[0], scales[0])
