"""What a process's rows of a weight know of writes to them; the processes are in ``distributed_worker``."""

from __future__ import annotations

import copy
import inspect
import pickle
import types
import weakref

import fp8kit_torch as ft
import pytest
import torch
from fp8kit_torch import sharded_weight
from fp8kit_torch.weight_scales import amax_of, scales_of
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from fp8kit import float8
from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import launch, recorded
from fp8kit.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, NVFP4BlockScaling
from fp8kit.testing.compare import assert_same_bits
from tests.support.cuda_libraries import fake
from tests.support.host_calls import counted
from tests.support.processes import run

FP8 = DelayedScaling().quantization
WRITES = {
    "in place": lambda w: w.add_(1),
    "flat": lambda w: w.view(-1).add_(1),
    "transposed": lambda w: w.t().mul_(2),
    "a row": lambda w: w[0].fill_(3),
    "by index": lambda w: w.__setitem__(0, 4.0),
    "several": lambda w: torch._foreach_add_([w], 1.0),
    "data": lambda w: w.data.add_(1),
    "data, flat": lambda w: w.data.view(-1).add_(1),
    "data, transposed": lambda w: w.data.detach().t()[1].mul_(2),
    "data, rows": lambda w: [row.add_(1) for row in w.data.data.unbind(0)],
    "all_reduce": lambda w: distributed.all_reduce(w.data),
    "broadcast of a part": lambda w: distributed.broadcast(w.data.view(-1)[:4], 0),
}


@pytest.fixture(scope="module")
def one_process():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("write", WRITES)
def test_every_write_is_known(write, one_process):
    weight = sharded_weight.rows_of(torch.ones(4, 8), FP8)
    rows = weight._rows
    assert rows.changed
    rows.take(*[torch.ones(1)] * 3)
    assert weight.sum() + weight.view(-1)[0] + weight.t()[0, 0] == 34
    assert not rows.changed
    with torch.no_grad():
        WRITES[write](weight)
    assert rows.changed


PARTS = {
    "rows": lambda w: w[1:3],
    "every other row": lambda w: w[::2],
    "flat": lambda w: w.view(-1),
    "as wide": lambda w: w.t()[:, :4].t(),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_moved_as_it_is(part):
    """As a checkpoint does, whose processes have other rows; the first rows alone are a weight."""
    values = torch.arange(32.0).reshape(4, 8)
    seen, expected = (PARTS[part](w) for w in (sharded_weight.rows_of(values, FP8), values.clone()))
    with torch.no_grad():
        for moved in (seen.clone(), seen.to(torch.float64), seen.detach().contiguous()):
            assert torch.equal(moved.double(), expected.double())


PLACES = [pytest.param("cpu", marks=pytest.mark.programs), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("place", PLACES)
def test_one_process_alone(place, tmp_path):
    """``fully_shard`` moves nothing there, and asks for the rows all the same."""
    run("tests.adapters.torch.distributed_worker", 1, tmp_path, place, ["held_in_fp8", "collected_late"])


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), Float8BlockScaling()], ids=["tensor", "blocks"])
def test_codes_are_those_of_a_whole_weight(recipe, place):
    """Also behind what a stream of torch's own has still to write, as ``fully_shard`` has one."""
    how = recipe.quantization.w
    values = torch.randn(256, 384, generator=torch.Generator().manual_seed(0)).to(place)
    rows = sharded_weight.rows_of(torch.zeros_like(values), recipe.quantization)._rows
    side = None
    if place == "cuda":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        if side is not None:
            torch.cuda._sleep(100_000_000)  # some 50 ms
        rows.padded.copy_(values)
        amax = amax_of(rows.padded, how)
        rows.take(amax, *scales_of(amax, how, values.dtype))
        codes, inverse = rows.cast(), rows.inverse
    if side is not None:
        side.synchronize()
    wanted = float8.quantize(values, how.format, scaling=how.granularity)
    assert_same_bits("codes", codes.cpu().numpy(), wanted.data.cpu().numpy())
    assert_same_bits("scales", inverse.cpu().numpy(), wanted.scale_inv.cpu().numpy())
    assert rows.cast() is codes


def together(*values, fp8=FP8):
    """Weights' rows that are cast together."""
    known, found = sharded_weight._Together(), []
    for each in values:
        rows = sharded_weight.rows_of(each, fp8)._rows
        rows.together = known
        known.places.append(weakref.ref(rows))
        found.append(rows)
    return known, found


def same_as_alone(rows):
    how = rows.fp8.w
    amax = amax_of(rows.padded, how)
    scale, inverse = scales_of(amax, how, rows.padded.dtype)
    alone = sharded_weight.rows_of(rows.padded.clone(), rows.fp8)._rows
    alone.take(amax, scale, inverse)
    for name in ("amax", "scale", "inverse"):
        assert_same_bits(name, getattr(rows, name).numpy(), getattr(alone, name).numpy())
    assert_same_bits("codes", rows.cast().numpy(), alone.cast().numpy())


DTYPES = [[torch.float32] * 3, [torch.float32, torch.bfloat16, torch.float32]]
RULES = {"tensor": FP8, "blocks": Float8BlockScaling().quantization}


@pytest.mark.parametrize("dtypes", DTYPES, ids=["one dtype", "two"])
@pytest.mark.parametrize("rule", RULES)
def test_what_is_cast_together_is_cast_as_alone(rule, dtypes):
    """Whichever rows changed, also in inference mode, in memory that stays."""
    values = [torch.randn(128 * (i + 1), 256).to(dtype) for i, dtype in enumerate(dtypes)]
    known, held = together(*values, fp8=RULES[rule])
    for changed in ((0, 1, 2), (1,), (0, 2), (0, 1, 2)):
        with torch.inference_mode(changed == (0, 2)):
            for i in changed:
                values[i].mul_(-3)
                held[i].written = True
            known.share()
        for rows in held:
            same_as_alone(rows)
            assert not rows.changed
        codes = [rows.codes.data_ptr() for rows in held]
    for rows in held:
        rows.written = True
    known.share()
    assert [rows.codes.data_ptr() for rows in held] == codes


def test_weights_that_are_gone_leave_nothing_behind():
    """Neither their memory nor their places, which others take."""
    known, held = together(*(torch.randn(8 * (i + 1), 16) for i in range(3)))
    known.share()
    memory = [weakref.ref(each) for each in (held[1].padded, held[1].codes)]
    del held[1]
    assert [reference() for reference in memory] == [None, None]
    held[0].written = True
    known.share()
    assert len(known) == 2
    _, (fresh,) = together(torch.randn(64, 16))
    fresh.together = known
    known.places.append(weakref.ref(fresh))
    held.append(fresh)
    known.share()
    for rows in held:
        same_as_alone(rows)


def test_what_is_being_gathered_stays_as_it_is():
    """Codes that another stream has still to read, and scales that the whole weight will get."""
    known, (one, other) = together(torch.randn(8, 16), torch.randn(4, 16))
    known.share()
    one.gathering = True
    codes, inverse = one.cast(), one.inverse
    before = codes.clone(), inverse.clone()
    one.padded.mul_(5)
    known.share()
    assert torch.equal(codes, before[0])
    assert torch.equal(inverse, before[1])
    for rows in (one, other):
        same_as_alone(rows)


def test_known_arrays_are_cast_and_moved_from_recordings(monkeypatch):
    """From the third time on, by launches that are those of the first."""
    kernel, driver = fake("qqq", monkeypatch)
    done = []

    def stand_in(name):
        def work(*arguments):
            done.append(name)
            arrays = [each.ptr for each in arguments if isinstance(each, ArrayView)]
            launch.launch(kernel, 1, 32, (*arrays, 0)[:3], arguments[-1])

        return work

    names = ("amax", "scale_from_amax", "quantize", "copy")
    kernels = types.SimpleNamespace(recorder=recorded.recording, **{name: stand_in(name) for name in names})
    monkeypatch.setattr(sharded_weight.dispatch, "kernels", lambda device: kernels)
    known, held = together(torch.randn(16, 32), torch.randn(32, 16))
    steps = []
    for _ in range(5):
        driver.launches = []
        for rows in held:
            rows.written = True
        known.share()
        steps.append(driver.launches)
    assert done == ["amax", "amax", "scale_from_amax", "quantize", "quantize"] * 2
    assert steps[1:] == steps[:-1]
    assert len(steps[0]) == 5
    done.clear()
    held[0].written = True  # a call of its own
    known.share()
    assert done == ["amax", "scale_from_amax", "quantize"]
    done.clear()
    codes, inverse = torch.zeros(16, 32, dtype=torch.uint8), torch.ones(1)
    held[0].count = 16
    parts = sharded_weight._new_parts(codes, inverse, FP8, (16, 32))
    for _ in range(4):
        held[0].fill(codes, inverse, parts)
    assert done == ["copy"] * 4  # the transposed codes and the scale, twice
    held[0].fill(codes.clone(), inverse, parts)  # the codes too, which do not lie there
    assert done == ["copy"] * 7


@pytest.mark.parametrize("rule", RULES)
def test_rows_that_are_kept_on_the_cpu(rule, one_process, monkeypatch):
    """``fully_shard`` asks copies of them on the device for the codes, and the rows for the whole weight."""
    recipe = DelayedScaling() if rule == "tensor" else Float8BlockScaling()
    mesh, x = init_device_mesh("cpu", (1,)), torch.randn(128, 128)

    def weights(**options):
        torch.manual_seed(0)
        with ft.quantized_model_init(recipe=recipe):
            net = torch.nn.Sequential(*(ft.Linear(128, 128, device="cpu") for _ in range(2)))
        for layer in (*net, net):
            fully_shard(layer, mesh=mesh, **options)
        optimizer = torch.optim.AdamW(net.parameters())
        for _ in range(3):
            with ft.autocast(recipe=recipe):
                net(x).square().mean().backward()
            optimizer.step()
        return [each.full_tensor().detach() for each in net.parameters()]

    wanted, moved = weights(), []

    def to(self, *_, **__):  # the device is the CPU too
        moved.append(self)
        return self.detach().clone()

    monkeypatch.setattr(sharded_weight.ShardedWeight, "to", to, raising=False)
    found = weights(offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert len(moved) == 3 * 2 * 2  # in forward and in backward
    for each, other in zip(found, wanted, strict=True):
        assert_same_bits("weight", each.numpy(), other.numpy())


def test_memory_of_scales_waits_for_the_stream_that_reads_them(monkeypatch):
    """They are made on the stream that gathers, and replaced as soon as another weight joins."""
    waits = []
    inverse = types.SimpleNamespace(is_cuda=True, device="cuda:0", record_stream=waits.append)
    weight = sharded_weight.rows_of(torch.ones(4, 8), FP8)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"that of {device}")
    monkeypatch.setattr(weight._rows, "fill", lambda codes, inverse, parts: None)
    whole = types.SimpleNamespace(_parts={}, refill=lambda parts: None)
    codes = torch.zeros(4, 8, dtype=torch.uint8)
    weight.fsdp_post_all_gather((codes,), (weight._rows, inverse), torch.float32, out=whole)
    assert waits == ["that of cuda:0"]


def meta_layer(recipe):
    with ft.quantized_model_init(recipe=recipe):
        return ft.Linear(32, 32, device="meta")


def test_parts_without_scales_that_they_share_are_refused(one_process):
    layer = meta_layer(Float8CurrentScaling())
    layer.weight = torch.nn.Parameter(torch.empty_like(layer.weight._plain))  # another one in its place
    fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(NotImplementedError, match="quantized_model_init: weights: got parts of a weight"):
        layer.reset_parameters()


MOVES = {
    "copied": copy.deepcopy,
    "pickled": lambda layer: pickle.loads(pickle.dumps(layer)),
    "to meta": lambda layer: layer.to("meta"),
    "made, and to meta": lambda layer: (layer.reset_parameters(), layer.to("meta"))[1],
    "bfloat16": lambda layer: layer.bfloat16(),
    "as it is": lambda layer: layer,
}


@pytest.mark.parametrize("emptied", [False, True])
@pytest.mark.parametrize("move", MOVES)
def test_parts_of_a_meta_layer_are_gathered_as_codes(move, emptied, one_process):
    """However the layer came there."""
    recipe = Float8CurrentScaling()
    layer = MOVES[move](meta_layer(recipe))
    assert isinstance(layer.weight, torch.nn.Parameter)
    assert layer.weight.is_meta
    assert layer.weight.requires_grad
    fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    if emptied:
        layer.to_empty(device="cpu")
    dtype, x = layer.weight.dtype, torch.randn(32, 32)
    assert dtype == (torch.bfloat16 if move == "bfloat16" else torch.float32)
    for _ in range(2):  # the second time rows that have values
        torch.manual_seed(0)
        layer.reset_parameters()
        torch.manual_seed(0)
        with ft.quantized_model_init(recipe=recipe):
            alone = ft.Linear(32, 32, params_dtype=dtype, device="cpu")
        with ft.autocast(recipe=recipe):
            found, wanted = layer(x.to(dtype)), alone(x.to(dtype))
        assert_same_bits("y", found.detach().float().numpy(), wanted.detach().float().numpy())
        layer.reshard()


@pytest.mark.parametrize("move", MOVES)
def test_a_meta_layer_that_is_not_divided(move):
    layer = MOVES[move](meta_layer(DelayedScaling()))
    emptied = copy.deepcopy(layer).to_empty(device="cpu")
    assert isinstance(emptied.weight, ft.Float8Tensor)
    for each in (emptied, layer):
        each.reset_parameters()
        assert isinstance(each.weight, ft.Float8Tensor)


def test_fully_shard_is_told_the_parameters_at_once():
    weight = sharded_weight.rows_of(torch.ones(4, 8), FP8)
    names = ["mesh", "outer_size", "outer_stride", "module", "mp_policy"]
    found = inspect.signature(weight.fsdp_pre_all_gather)
    assert list(found.parameters) == names
    assert inspect.signature(weight.fsdp_pre_all_gather) is found
    assert list(inspect.signature(type(weight).fsdp_pre_all_gather).parameters) == ["self", *names]


# Calls of Python and C functions that a step takes for each more Linear, torch's own for its two parameters
# among them: its operations (``test_host``), its weight gathered twice, to other addresses, and changed once.
# On a GPU addresses stay, and recordings pass over a part of these calls.
MOST_MORE = {"tensor": 1200, "blocks": 1250}


@pytest.mark.parametrize("rule", MOST_MORE)
def test_calls_of_a_step(rule, one_process, monkeypatch):
    recipe = DelayedScaling() if rule == "tensor" else Float8BlockScaling()
    mesh, x = init_device_mesh("cpu", (1,)), torch.randn(128, 128, requires_grad=True)
    taken = []
    for count in (2, 6):
        with ft.quantized_model_init(recipe=recipe):
            net = torch.nn.Sequential(*(ft.Linear(128, 128, device="cpu") for _ in range(count)))
        fully_shard(net, mesh=mesh, reshard_after_forward=True)
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)

        def step(net=net, optimizer=optimizer):
            optimizer.zero_grad()
            with ft.autocast(recipe=recipe):
                y = net(x)
            y.backward(x.detach())
            optimizer.step()

        with monkeypatch.context() as patch:
            _, calls, launched = counted(step, patch)
        assert launched.count("quantize") == count
        taken.append(calls)
    assert (taken[1] - taken[0]) / 4 <= MOST_MORE[rule]


def test_rows_are_cast_as_plain_tensors(one_process):
    """A full state of one process, by any quantizer."""
    e4m3, values = ft.DType.kFloat8E4M3, torch.randn(64, 32)
    rows = sharded_weight.rows_of(values.clone(), FP8)
    for cast in (ft.MXFP8Quantizer(e4m3), ft.NVFP4Quantizer(), ft.Float8CurrentScalingQuantizer(e4m3)):
        found, wanted = cast(rows), cast(values)
        for name, part in found._parts.items():
            assert type(part) is torch.Tensor
            assert torch.equal(part, wanted._parts[name])


def test_rows_that_each_process_would_round_by_other_bits_are_refused(one_process):
    drawn = ft.NVFP4Quantizer(stochastic_rounding=True)
    with ft.quantized_model_init(recipe=NVFP4BlockScaling()):
        layer = ft.Linear(32, 32, device="cpu")
    layer.weight = torch.nn.Parameter(drawn(torch.randn(32, 32)))
    fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    assert type(layer.weight.to_local()) is torch.Tensor
    with (
        ft.autocast(recipe=NVFP4BlockScaling()),
        pytest.raises(NotImplementedError, match="weight0: got a Parameter, expected the QuantizedTensor"),
    ):
        layer(torch.randn(32, 32))


def test_rows_keep_their_values_where_a_layer_moves(one_process):
    """In a layer of any kind: a full state of one process is such rows."""
    with ft.quantized_model_init(recipe=Float8CurrentScaling()):
        layer = ft.Linear(32, 32, device="cpu")
    fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    rows = layer.weight.to_local().detach()
    assert isinstance(rows, sharded_weight.ShardedWeight)
    plain = ft.Linear(32, 32, bias=False, device="cpu")
    plain.load_state_dict({"weight": rows}, assign=True, strict=False)
    plain.to(torch.bfloat16)
    # bfloat16 has 8 bits
    assert ((plain.weight.detach().float() - rows.float()).abs() <= 2.0**-8 * rows.abs()).all()


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_rows_that_two_layers_share_stay_one_parameter(device):
    """Also where they change dtype, as a plain parameter does; and these are rows of the new dtype."""
    with ft.quantized_model_init(recipe=Float8CurrentScaling()), torch.device("meta"):
        model = torch.nn.Sequential(*[ft.Linear(32, 32, bias=False) for _ in range(2)])
    rows, values = model[0].weight, torch.arange(1024.0).view(32, 32)
    if device == "cpu":
        rows = torch.nn.Parameter(sharded_weight.rows_of(values.clone(), rows._rows.fp8))
        model[0].register_parameter("weight", rows)
    model[1].register_parameter("weight", rows)
    rows.mark = "kept"
    model.to(torch.bfloat16)
    assert model[0].weight is model[1].weight is rows
    assert (rows.dtype, rows.mark, rows.is_meta) == (torch.bfloat16, "kept", device == "meta")
    assert rows.detach().dtype == rows._rows.padded.dtype == torch.bfloat16
    assert sum(1 for _ in model.parameters()) == 1
    if device == "cpu":
        with torch.no_grad():
            rows.mul_(2)
        assert rows._rows.changed
        assert torch.equal(rows._rows.padded, 2 * values.bfloat16())
        rows.data = 3 * values
        assert torch.equal(rows.detach() + 0, 3 * values)
    model.to_empty(device="cpu")
    assert {type(layer.weight) for layer in model} == {ft.Float8Tensor if device == "meta" else type(rows)}
