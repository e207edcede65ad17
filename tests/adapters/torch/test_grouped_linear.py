"""GroupedLinear against one Linear for each group: the same bits, FP8 state included."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fp8kit_torch import GroupedLinear, Linear, QuantizedTensor, autocast, quantized_model_init

from fp8kit.errors import ArgumentError, FormatError, Fp8kitError, UnsupportedError
from fp8kit.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, NVFP4BlockScaling
from fp8kit.testing.compare import assert_close, assert_same_bits, sum_slack
from tests.support.combinations import combinations
from tests.support.tensors import assert_tensor_close, largest

K, N, SPLITS = 32, 48, [16, 0, 5, 32]
RECIPES = {
    "plain": None,
    "delayed": DelayedScaling(amax_history_len=3),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request):
    return request.param


def pair(place, dtype=torch.float32, **options):
    torch.manual_seed(0)
    grouped = GroupedLinear(len(SPLITS), K, N, params_dtype=dtype, device=place, **options)
    singles = [Linear(K, N, params_dtype=dtype, device=place, **options) for _ in SPLITS]
    with torch.no_grad():
        for i, single in enumerate(singles):
            single.weight.copy_(getattr(grouped, f"weight{i}"))
            if single.bias is not None:
                single.bias.copy_(getattr(grouped, f"bias{i}").normal_())
    return grouped, singles


def bits(t):
    return t.detach().float().cpu().numpy()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("micro", [False, True], ids=["each", "microbatches"])
def test_equals_one_linear_for_each_group(place, recipe, micro):
    grouped, singles = pair(place)
    for step in range(4):
        first = (step % 2 == 0) if micro else None
        x = torch.randn(sum(SPLITS), K, device=place, requires_grad=True)
        twin, g = x.detach().clone().requires_grad_(), torch.randn(sum(SPLITS), N, device=place)
        with autocast(enabled=recipe != "plain", recipe=RECIPES[recipe]):
            y = grouped(x, SPLITS, first)
            parts = [s(p, first) for s, p in zip(singles, twin.split(SPLITS), strict=True) if len(p)]
        y.backward(g)
        torch.cat(parts).backward(g)
        assert_same_bits(f"step {step}: y", bits(y), bits(torch.cat(parts)))
        assert_same_bits(f"step {step}: dx", bits(x.grad), bits(twin.grad))
        for i, (single, rows) in enumerate(zip(singles, SPLITS, strict=True)):
            for name in ("weight", "bias"):
                got, want = getattr(grouped, f"{name}{i}").grad, getattr(single, name).grad
                assert_same_bits(f"step {step}: {name}{i}", bits(got), bits(want) if rows else 0 * bits(got))
            if recipe == "delayed" and not rows:
                scales = grouped.fp8_meta["scaling_fwd"].scale[3 * i : 3 * i + 3]
                assert_same_bits(f"scales of {i}, without rows", bits(scales), np.ones(3, np.float32))
            if recipe == "delayed" and rows:
                for state, slots in (("scaling_fwd", 3), ("scaling_bwd", 2)):
                    mine, own = grouped.fp8_meta[state], single.fp8_meta[state]
                    assert_same_bits(
                        f"{state} of {i}", bits(mine.scale[slots * i : slots * i + slots]), bits(own.scale)
                    )
                    history = mine.amax_history[:, slots * i : slots * i + slots]
                    assert_same_bits(f"{state} history of {i}", bits(history), bits(own.amax_history))


def test_high_precision_against_float64(place):
    grouped, _ = pair(place)
    x = torch.randn(sum(SPLITS), K, device=place)
    y = grouped(x, SPLITS)
    start = 0
    for i, rows in enumerate(SPLITS):
        part, w, b = (
            t.detach().double().cpu().numpy()
            for t in (x[start : start + rows], getattr(grouped, f"weight{i}"), getattr(grouped, f"bias{i}"))
        )
        slack = sum_slack(np.abs(part) @ np.abs(w.T) + np.abs(b), K)
        assert_close(f"group {i}", bits(y[start : start + rows]), part @ w.T + b, "float32", slack)
        start += rows


def test_calibration_returned_biases_and_checkpoints(place):
    grouped, singles = pair(place, return_bias=True)
    x = torch.randn(sum(SPLITS), K, device=place)
    with torch.no_grad(), autocast(enabled=False, calibrating=True):
        y, biases = grouped(x, SPLITS)
        parts = [s(p)[0] for s, p in zip(singles, x.split(SPLITS), strict=True) if len(p)]
    assert_same_bits("y", bits(y), bits(torch.cat(parts)))
    assert [b is getattr(grouped, f"bias{i}") for i, b in enumerate(biases)] == [True] * len(SPLITS)
    for i, (single, rows) in enumerate(zip(singles, SPLITS, strict=True)):
        if rows:
            assert_same_bits(
                f"scales {i}",
                bits(grouped.fp8_meta["scaling_fwd"].scale[3 * i : 3 * i + 3]),
                bits(single.fp8_meta["scaling_fwd"].scale),
            )
    other, _ = pair(place, return_bias=True)
    other.load_state_dict(grouped.state_dict())
    assert_same_bits(
        "loaded", bits(other.fp8_meta["scaling_fwd"].scale), bits(grouped.fp8_meta["scaling_fwd"].scale)
    )
    assert {n for n in grouped.state_dict() if "weight" in n} == {f"weight{i}" for i in range(len(SPLITS))}


def test_parameters_come_in_transformer_engines_order():
    names = [name for name, _ in GroupedLinear(2, 8, 8, device="cpu").named_parameters()]
    assert names == ["weight0", "bias0", "weight1", "bias1"]


@combinations({"recipe": RECIPES.keys()}, usual=["delayed"])
def test_compiled_it_is_the_same(place, recipe):
    eager, _ = pair(place)
    other, _ = pair(place)
    other.load_state_dict(eager.state_dict())
    call = torch.compile(other, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        x, g = (
            torch.randn(sum(SPLITS), K, device=place, requires_grad=True),
            torch.randn(sum(SPLITS), N, device=place),
        )
        twin = x.detach().clone().requires_grad_()
        for module, function, given in ((eager, eager, x), (other, call, twin)):
            module.zero_grad()
            with autocast(enabled=recipe != "plain", recipe=RECIPES[recipe]):
                y = function(given, SPLITS)
            y.backward(g)
        assert_same_bits("dx", bits(twin.grad), bits(x.grad))
        for (name, p), q in zip(eager.named_parameters(), other.parameters(), strict=True):
            assert_same_bits(name, bits(q.grad), bits(p.grad))
        assert_same_bits("state", other.get_extra_state().numpy(), eager.get_extra_state().numpy())
        assert bool(eager.fp8_meta) == (recipe == "delayed")


def test_compiled_it_calibrates_and_refuses_what_it_cannot_do(place):
    eager, _ = pair(place)
    other, _ = pair(place)
    other.load_state_dict(eager.state_dict())
    call, x = (
        torch.compile(other, fullgraph=True, backend="aot_eager"),
        torch.randn(sum(SPLITS), K, device=place),
    )
    with torch.no_grad(), autocast(enabled=False, calibrating=True, recipe=RECIPES["delayed"]):
        assert_same_bits("y", bits(call(x, SPLITS)), bits(eager(x, SPLITS)))
    assert_same_bits("state", other.get_extra_state().numpy(), eager.get_extra_state().numpy())
    assert float(eager.fp8_meta["scaling_fwd"].scale[0]) != 1
    with (
        autocast(recipe=RECIPES["current"]),
        pytest.raises(Exception, match="m_splits on the host is not supported"),
    ):
        call(x, SPLITS, True)
    fused, _ = pair(place, fuse_wgrad_accumulation=True)
    with pytest.raises(Exception, match="fuse_wgrad_accumulation is not supported within"):
        torch.compile(fused, fullgraph=True, backend="aot_eager")(x, SPLITS)


@pytest.mark.parametrize("recipe", RECIPES)
def test_main_grad(place, recipe):
    plain, _ = pair(place)
    fused = GroupedLinear(len(SPLITS), K, N, fuse_wgrad_accumulation=True, device=place)
    fused.load_state_dict(plain.state_dict())
    wanted = {}
    for i in range(len(SPLITS)):
        weight = getattr(fused, f"weight{i}")
        weight.main_grad, weight.grad_added_to_main_grad = torch.full_like(weight, 3.0), False
    for first in (True, False):
        x, g = torch.randn(sum(SPLITS), K, device=place), torch.randn(sum(SPLITS), N, device=place)
        for module in (plain, fused):
            module.zero_grad()
            with autocast(enabled=recipe != "plain", recipe=RECIPES[recipe]):
                module(x, SPLITS, first).backward(g)
        for i in range(len(SPLITS)):
            weight = getattr(fused, f"weight{i}")
            wanted[i] = getattr(plain, f"weight{i}").grad + wanted.get(i, 0)
            assert_same_bits(f"main_grad {i}", bits(weight.main_grad), bits(wanted[i]))
            assert weight.grad_added_to_main_grad
            assert not weight.grad.any()


# groups whose scales are the same with sizes on the host and on the device
ALIKE = {"plain": (3, 0, 5), "current": (0, 32, 0), "block": (128, 0, 256)}


WAYS = ["fused", "delayed", "micro-batches", "one parameter", "torch.autocast", "apart", "frozen"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", ALIKE)
def test_gradients_go_the_same_way_with_sizes_on_the_device(place, recipe, way):
    """Into ``main_grad``, from memory that held other gradients before, or to ``backward_dw``."""
    sizes, dtype = ALIKE[recipe], torch.float32 if way == "torch.autocast" else torch.bfloat16
    option = {"delay_wgrad_compute" if way == "delayed" else "fuse_wgrad_accumulation": True}
    option["single_grouped_weight"] = way == "one parameter"
    host, device = (
        GroupedLinear(3, K, N, params_dtype=dtype, device=place, use_grouped_tensor=on, **option)
        for on in (False, True)
    )
    device.load_state_dict(host.state_dict())
    if way == "apart":  # one parameter has memory of its own again
        device.weight1.data = device.weight1.data.clone()
    names = ["weight"] if way == "one parameter" else [f"weight{i}" for i in range(3)]
    for module in (host, device):
        if way == "frozen":
            module.weight1.requires_grad_(False)
        for name in names:
            weight = module.get_parameter(name)
            weight.main_grad = torch.full_like(weight, 3.0, dtype=torch.float32)
            weight.grad_added_to_main_grad = False
    size = torch.zeros(3, N, K, dtype=torch.float64)
    for step in range(2):
        x, g = (torch.randn(sum(sizes), n, device=place).to(dtype) for n in (K, N))
        parts = zip(g.cpu().double().split(sizes), x.cpu().double().split(sizes), strict=True)
        size += torch.stack([own.abs().T @ rows.abs() for own, rows in parts])
        for module in (host, device):
            given = torch.tensor(sizes, device=place) if module is device else sizes
            rule = {"enabled": recipe != "plain", "recipe": RECIPES[recipe]}
            own = torch.autocast(torch.device(place).type, torch.bfloat16, enabled=way == "torch.autocast")
            with own, autocast(**rule):
                y = module(x, given, step == 0 if way == "micro-batches" else None)
            y.backward(g.to(y.dtype))
        if way == "delayed":
            assert device.need_backward_dw()
            assert device.weight0.grad is None or step
            host.backward_dw()
            device.backward_dw()
    # sums in float32 of products of other shapes; what is rounded to bfloat16 before it is added
    slack = 2 * sum_slack(size.numpy() + 3, max(sizes) + 2)
    if way == "delayed" or recipe == "plain":
        slack += 2.0**-7 * size.numpy()
    for i, name in enumerate(names):
        want, made = host.get_parameter(name), device.get_parameter(name)
        own = ... if way == "one parameter" else i
        if way == "delayed":
            assert_tensor_close(name, made.grad.float(), want.grad.double(), slack[own])
            continue
        assert_tensor_close(name, made.main_grad, want.main_grad.double(), slack[own])
        if way != "micro-batches":  # whose first one overwrites
            assert (made.main_grad != 3).any() == (made.requires_grad and bool(size[own].any()))
        assert made.grad_added_to_main_grad is made.requires_grad
        assert made.grad is None or not made.grad.any()


@pytest.mark.parametrize("own", [None, False])
@pytest.mark.parametrize("first", [True, False, None])
def test_main_grad_obeys_the_layers_own_micro_batch(place, first, own):
    """Of calls that do not say one, as of a program's whose CUDA graphs do."""
    sizes, x = torch.tensor(SPLITS, device=place), torch.ones(sum(SPLITS), K, device=place)
    for on_device in (True, False):
        options = {"fuse_wgrad_accumulation": True, "use_grouped_tensor": on_device}
        layer = GroupedLinear(len(SPLITS), K, N, device=place, **options)
        layer.microbatch = first
        for p in layer.parameters():
            p.main_grad = torch.full_like(p, 1000.0)
        with autocast(recipe=RECIPES["current"]):
            layer(x, sizes, own).sum().backward()
        overwritten = first is True and own is None
        for i, rows in enumerate(SPLITS):
            got = layer.get_parameter(f"weight{i}").main_grad
            assert ((got - rows).round() == (0 if overwritten else 1000)).all()  # less casts' rounding


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's
@combinations(
    {"option": ["fuse_wgrad_accumulation", "delay_wgrad_compute"]}, usual=["fuse_wgrad_accumulation"]
)
def test_compiled_with_sizes_on_the_device_gradients_are_left_to_eager_code(place, option):
    sizes, x = torch.tensor(SPLITS, device=place), torch.randn(sum(SPLITS), K, device=place)
    module = GroupedLinear(len(SPLITS), K, N, device=place, use_grouped_tensor=True, **{option: True})
    fused = option == "fuse_wgrad_accumulation"
    if fused:
        with pytest.raises(ArgumentError, match=r"weight0\.main_grad: got no such tensor"):
            module(x, sizes)
    for i in range(len(SPLITS)):
        module.get_parameter(f"weight{i}").main_grad = torch.zeros(N, K, device=place)
    with pytest.raises(Exception, match=f"{option} is not supported within"):
        torch.compile(module, fullgraph=True, backend="aot_eager")(x, sizes)
    torch._dynamo.reset()
    torch.compile(module, backend="aot_eager")(x, sizes).sum().backward()
    module.backward_dw()
    plain = GroupedLinear(len(SPLITS), K, N, device=place, use_grouped_tensor=True)
    plain.load_state_dict(module.state_dict())
    plain(x, sizes).sum().backward()
    made = module.weight0.main_grad if fused else module.weight0.grad
    assert_same_bits(option, bits(made), bits(plain.weight0.grad))


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_weights_in_fp8(place, recipe):
    plain, _ = pair(place)
    with quantized_model_init(recipe=RECIPES[recipe]):
        held = GroupedLinear(len(SPLITS), K, N, device=place)
    held.load_state_dict(plain.state_dict())
    assert all(isinstance(getattr(held, f"weight{i}"), QuantizedTensor) for i in range(len(SPLITS)))
    x, g = torch.randn(sum(SPLITS), K, device=place), torch.randn(sum(SPLITS), N, device=place)
    found = []
    for module in (plain, held):
        with autocast(recipe=RECIPES[recipe]):
            y = module(x, SPLITS)
        y.backward(g)
        found.append([y, *(p.grad for p in module.parameters())])
    for i, (got, want) in enumerate(zip(*found, strict=True)):
        assert_same_bits(f"result {i}", bits(got), bits(want))
    y = held(x, SPLITS)
    rows = torch.cat(
        [
            part @ getattr(held, f"weight{i}").dequantize().t() + getattr(held, f"bias{i}")
            for i, part in enumerate(x.split(SPLITS))
        ]
    )
    # a GPU may round to TF32's 11 bits, and adds values that are below 1
    assert_tensor_close("y", y, rows, 2.0**-10 * (1 + rows.abs()))
    with pytest.raises(Exception, match="quantized_model_init is not supported within"):
        torch.compile(held, fullgraph=True, backend="aot_eager")(x, SPLITS)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")  # which torch's jvp calls
@pytest.mark.parametrize("option", ["bias", "delay_wgrad_compute", "single_grouped_weight"])
@pytest.mark.parametrize("on_device", [False, True])
def test_transforms_are_refused_by_name(option, on_device):
    layer = GroupedLinear(2, K, N, device="cpu", use_grouped_tensor=on_device, **{option: True})
    sizes, x = torch.tensor([3, 5]), torch.randn(8, K)
    own = {name: p.detach() for name, p in layer.named_parameters()}

    def of_weights(given):
        return torch.func.functional_call(layer, given, (x, sizes)).sum()

    def into(x):
        return layer(x, sizes, None, torch.empty(8, N), torch.empty(8, K)).sum()

    for argument, call in (
        ("inp", lambda: torch.func.grad(lambda x: layer(x, sizes).sum())(x)),
        ("inp", lambda: torch.func.grad(into)(x)),
        ("inp", lambda: torch.vmap(lambda x: layer(x, sizes))(x[None])),
        ("inp", lambda: torch.func.jvp(lambda x: layer(x, sizes), (x,), (x,))),
        ("weight", lambda: torch.func.grad(of_weights)(own)),
    ):
        with pytest.raises(UnsupportedError, match=rf"grouped_linear: {argument}0?: got a tensor of torch\."):
            call()


def test_refusals():
    grouped = GroupedLinear(2, K, N, device="cpu")
    for splits in ([3], [3, 4], [-1, 9]):
        with pytest.raises(Fp8kitError, match="m_splits"):
            grouped(torch.zeros(8, K), splits)
    with pytest.raises(Fp8kitError, match="use_grouped_tensor"):
        GroupedLinear(2, K, N, use_grouped_tensor="yes")
    with pytest.raises(TypeError, match="colour"):
        GroupedLinear(2, K, N, colour=1)


@pytest.mark.parametrize("on_device", [False, True])
def test_only_a_bool_says_which_micro_batch_it_is(place, on_device):
    layer = GroupedLinear(len(SPLITS), K, N, device=place, use_grouped_tensor=on_device)
    sizes, x = torch.tensor(SPLITS, device=place), torch.randn(sum(SPLITS), K, device=place)
    with (
        autocast(recipe=RECIPES["current"]),
        pytest.raises(ArgumentError, match="is_first_microbatch: got 1"),
    ):
        layer(x, sizes, is_first_microbatch=1)


@pytest.mark.parametrize("return_bias", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
def test_results_and_gradients_go_where_the_caller_wants_them(place, return_bias, on_device):
    layer, _ = pair(place, return_bias=return_bias)
    layer.sizes_on_device = on_device
    sizes = torch.tensor(SPLITS, device=place) if on_device else SPLITS
    x, g = torch.randn(sum(SPLITS), K, device=place), torch.randn(sum(SPLITS), N, device=place)
    first, second = (x.clone().requires_grad_() for _ in range(2))
    out, dgrad_out = torch.full_like(g, 7), torch.full_like(x, 7)
    with autocast(recipe=RECIPES["current"]):
        want, y = layer(first, sizes), layer(second, sizes, None, out, dgrad_out)
    if return_bias:
        assert y[1] == want[1]
        want, y = want[0], y[0]
    assert y.data_ptr() == out.data_ptr()
    assert not out.requires_grad
    assert_same_bits("out", bits(out), bits(want))
    want.backward(g)
    grads = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    layer.zero_grad()
    y.backward(g)
    assert_same_bits("dgrad_out", bits(dgrad_out), bits(first.grad))
    assert_same_bits("dx", bits(second.grad), bits(first.grad))
    for p, grad in zip((p for p in layer.parameters() if p.grad is not None), grads, strict=True):
        assert_same_bits("dw", bits(p.grad), bits(grad))
    for name in ("out", "dgrad_out"):
        with pytest.raises(Fp8kitError, match=f"GroupedLinear: {name}"):
            layer(x, sizes, **{name: torch.zeros(3, 3, device=place)})


@pytest.mark.parametrize("on_device", [False, True])
def test_a_buffer_is_there_for_every_step(place, on_device):
    layer = GroupedLinear(len(SPLITS), K, N, device=place, use_grouped_tensor=on_device)
    sizes, rows = torch.tensor(SPLITS, device=place), sum(SPLITS)
    out = torch.zeros(2 * rows, N, device=place)
    for step in range(3):
        found = []
        for into in (out.split(rows), (None, None)):
            layer.zero_grad()
            x = torch.randn(2, rows, K, generator=torch.Generator().manual_seed(step)).to(place)
            x.requires_grad_()
            with autocast(recipe=RECIPES["current"]):
                ys = [layer(part, sizes, out=own) for part, own in zip(x, into, strict=True)]
            sum(y.pow(2).sum() for y in ys).backward()
            found.append([*ys, x.grad, *(p.grad for p in layer.parameters())])
        assert_same_bits("out", bits(out), bits(torch.cat(found[0][:2])))
        for i, (got, want) in enumerate(zip(*found, strict=True)):
            assert_same_bits(f"step {step}: {i}", bits(got), bits(want))
    with torch.no_grad():
        assert not layer(x[0], sizes, out=out[:rows]).requires_grad


def test_a_buffer_that_backward_still_reads_may_not_be_given_again():
    layer = GroupedLinear(2, K, N, device="cpu", use_grouped_tensor=True)
    x, sizes, out = torch.randn(8, K), torch.tensor([3, 5]), torch.empty(8, N)
    loss = layer(x, sizes, out=out).pow(2).sum()
    layer(x, sizes, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_weights_that_ranks_share():
    """Of N with "column", of K with "row", whose results the program adds; nothing is communicated."""
    whole = GroupedLinear(2, K, N, device="cpu")
    x, splits = torch.randn(8, K), [3, 5]
    want = whole(x, splits)
    for mode, dim in (("column", 0), ("row", 1)):
        parts = []
        for rank in range(2):
            own = GroupedLinear(2, K, N, tp_size=2, parallel_mode=mode, bias=mode == "column", device="cpu")
            assert (own.tp_size, own.parallel_mode) == (2, mode)
            assert own.weight0.tensor_model_parallel
            assert own.weight0.partition_dim == dim
            with torch.no_grad():
                for name, parameter in own.named_parameters():
                    axis = dim if name.startswith("weight") else 0
                    parameter.copy_(getattr(whole, name).chunk(2, axis)[rank])
            parts.append(own(x if mode == "column" else x.chunk(2, 1)[rank], splits))
        y = torch.cat(parts, 1) if mode == "column" else parts[0] + parts[1]
        assert_tensor_close(mode, y, want, sum_slack(largest(want), K))
    assert GroupedLinear(2, K, N, tp_size=2, device="cpu").weight0.shape == (N, K)  # as in Transformer Engine
    with pytest.raises(Fp8kitError, match="out_features: got 31"):
        GroupedLinear(2, K, 31, tp_size=2, parallel_mode="column", device="cpu")
    with pytest.raises(Fp8kitError, match="tp_group: got 3"):
        GroupedLinear(2, K, N, tp_group=3, device="cpu")


def test_sizes_as_an_array():
    """NumPy's integers, as a list of them."""
    layer, x = GroupedLinear(len(SPLITS), K, N, device="cpu"), torch.randn(sum(SPLITS), K)
    assert_same_bits("y", bits(layer(x, np.array(SPLITS))), bits(layer(x, SPLITS)))
    for kind, wrong in ((FormatError, np.array(SPLITS, np.float32)), (ArgumentError, np.array([SPLITS]))):
        with pytest.raises(kind, match="GroupedLinear: m_splits"):
            layer(x, wrong)


def test_without_any_rows_nothing_is_drawn(place):
    """By a recipe whose gradients are rounded stochastically."""
    layer = GroupedLinear(2, 32, 16, device=place)
    x = torch.zeros(0, 32, device=place, requires_grad=True)
    with autocast(recipe=NVFP4BlockScaling()):
        layer(x, [0, 0]).sum().backward()
    assert x.grad.shape == (0, 32)
    assert not layer.weight1.grad.any()
    with autocast(recipe=NVFP4BlockScaling()):
        layer(torch.ones(3, 32, device=place), [0, 3], is_first_microbatch=True).sum().backward()
    assert layer.weight1.grad.any()
