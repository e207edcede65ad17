"""What the modules stand on: specs as texts, plans, the ops called directly, memory and streams."""

from __future__ import annotations

import subprocess
import sys

import fp8kit_torch as ft
import pytest
import torch
from fp8kit_torch import memory
from fp8kit_torch.bound import bind
from fp8kit_torch.library import OPS, call_by, text_of

from fp8kit import formats
from fp8kit.backends.cuda.cublaslt import WORKSPACE
from fp8kit.errors import BackendError, FormatError
from fp8kit.execution.codec import decode, encode
from fp8kit.execution.memory import Layout
from fp8kit.ops.dropout_add import AddSpec, add
from fp8kit.ops.embedding import EmbeddingSpec
from fp8kit.ops.linear import LinearSpec, linear
from fp8kit.ops.norm import NormSpec, norm
from fp8kit.ops.norm_mlp import NormMLPSpec
from fp8kit.ops.product import ProductSpec
from fp8kit.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format, QParams
from fp8kit.recipe_fields import of_parts
from fp8kit.spec import Meta

from .twins import same

RECIPES = [
    DelayedScaling(margin=2, fp8_format=Format.E4M3, amax_compute_algo="most_recent"),
    Float8CurrentScaling(fp8_quant_bwd_grad=QParams(True, 1e-3)),
    Float8BlockScaling(True, Format.HYBRID, x_block_scaling_dim=2, w_block_scaling_dim=1),
]
FC = [
    ProductSpec(16, (32,), bias="deferred", prefix="fc1_"),
    ProductSpec(32, (16,), prefix="fc2_", fp8=RECIPES[2].quantization),
]


@pytest.mark.parametrize(
    "value",
    [
        *(recipe.quantization for recipe in RECIPES),
        RECIPES[0].history,
        LinearSpec(FC[1]),
        NormMLPSpec(NormSpec(16, epsilon=1 / 3), *FC),
        EmbeddingSpec(3, 4, formats.bfloat16),
        ("linear", (1, 2.5, None), True),
    ],
    ids=lambda v: type(v).__name__,
)
def test_texts_say_everything(value):
    assert decode(encode(value)) == value
    assert encode(decode(encode(value))) == encode(value)


def test_a_text_is_the_same_in_another_process():
    code = (
        "from fp8kit.execution.codec import encode; from fp8kit.ops.linear import LinearSpec; "
        "from fp8kit.ops.product import ProductSpec\n"
        "print(encode(LinearSpec(ProductSpec(16, (24, 8), prefix='p_'))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert decode(done.stdout.strip()) == LinearSpec(ProductSpec(16, (24, 8), prefix="p_"))


def test_what_has_no_text_is_refused():
    with pytest.raises(FormatError, match=r"encode: spec: got <function .* expected numbers, text"):
        encode(DelayedScaling(amax_compute_algo=lambda history: history[0]).history)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.short_name())
def test_recipes_are_taken_apart_and_made_again(recipe):
    assert of_parts(recipe.parts()) == recipe


def test_blocks_are_aligned():
    layout = Layout(
        {"a": Meta((3,), formats.float32), "b": Meta((0, 4), formats.uint8), "c": Meta((300,), formats.uint8)}
    )
    assert [(name, offset) for name, _, offset, *_ in layout.parts] == [("a", 0), ("b", 256), ("c", 256)]
    assert layout.nbytes == 256 + 512


def test_plans_are_kept():
    spec, names = NormSpec(16), ("x", "norm_weight", "norm_bias")
    text = text_of("norm", spec, names)
    assert call_by(text) is call_by(text_of("norm", NormSpec(16), names))

    def kinds(*tensors):
        return [(t.shape, t.dtype, t.device) for t in tensors]

    tensors = [torch.ones(4, 16), torch.ones(16), torch.ones(16)]
    own = kinds(*tensors)
    assert bind(norm, spec, (), names, own) is bind(
        norm, spec, (), names, kinds(*[t.clone() for t in tensors])
    )
    assert bind(norm, spec, ("x",), names, own) is not bind(norm, spec, (), names, own)
    assert call_by(text).bind(tensors) is call_by(text).bind([t.clone() for t in tensors])
    with pytest.raises(BackendError, match="norm: bias: got device meta, expected device cpu"):
        bind(norm, spec, (), names, kinds(*tensors[:2], torch.ones(16, device="meta")))


def test_an_op_gives_the_bits_of_the_eager_call(device):
    tensors = [torch.randn(shape, device=device, requires_grad=True) for shape in ((5, 16), (24, 16), (24,))]
    spec = LinearSpec(ProductSpec(16, (24,), fp8=RECIPES[1].quantization))
    names = ("x", "weight0", "bias0")
    short = ft.apply(linear, spec, dict(zip(names, tensors, strict=True)))["y"]
    y, *_ = OPS["linear"].call(tensors, [], text_of("linear", spec, names, needs=names))
    same(y, short, "y")
    g = torch.randn_like(y)
    for got, want in zip(
        torch.autograd.grad(y, tensors, g), torch.autograd.grad(short, tensors, g), strict=True
    ):
        same(got, want, "gradient")


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(device, rows):
    tensors = [
        torch.randn(shape, device=device, requires_grad=True) for shape in ((rows, 16), (24, 16), (24,))
    ]
    inputs = dict(zip(("x", "weight0", "bias0"), tensors, strict=True))
    y = ft.apply(linear, LinearSpec(ProductSpec(16, (24,))), inputs)["y"]
    y.sum().backward()
    assert y.shape == (rows, 24)
    same(tensors[2].grad, torch.full((24,), float(rows)), "db")


@pytest.mark.gpu
def test_work_goes_to_torchs_stream():
    spec = AddSpec()
    a, b = torch.zeros(1 << 24, device="cuda"), torch.ones(1 << 24, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(50):  # each reads what the one before wrote on the same stream
            a = ft.apply(add, spec, {"a": a, "b": b})["y"]
    stream.synchronize()
    assert torch.equal(a, torch.full_like(a, 50.0))


@pytest.mark.gpu
def test_a_layer_waits_for_what_torchs_stream_does_before_it():
    """A race: on a side stream the input is written only after a long sleep, and the layer's calls return
    before. Whatever went to another stream would read the zeros that were there. Often enough for calls to
    become recordings, and these graphs."""
    layer = ft.TransformerLayer(
        128, 256, 4, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16, device="cuda"
    )
    values, dy = (torch.randn(64, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x = torch.zeros_like(values)

    def step():
        leaf = x.detach().requires_grad_()
        layer.zero_grad()
        with ft.autocast(recipe=Float8CurrentScaling()):
            y = layer(leaf)
        y.backward(dy)
        return y.detach(), leaf.grad, layer.layernorm_mlp.fc1_weight.grad

    stream, raced = torch.cuda.Stream(), 0
    x.copy_(values)
    torch.cuda.synchronize()
    # torch warns of a graph that another stream has begun, which its thread may yet hold for a moment
    with torch.cuda.stream(stream):
        want = [t.clone() for t in step()]
    torch.cuda.synchronize()  # x is zeroed on another stream
    for turn in range(12):
        x.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)  # cycles: a tenth of a second and more
            x.copy_(values)
            got = step()
            raced += not stream.query()  # the calls are back and the stream still sleeps
        stream.synchronize()
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b), turn
    assert raced > 6  # loading a kernel, or making a graph, may wait for the device


@pytest.mark.gpu
def test_a_layer_takes_its_input_where_it_lies():
    """By torch's allocator: a Linear's forward and backward need their results and the products' workspace,
    and no room for a copy of x."""
    rows, columns = 1 << 18, 256
    layer = ft.Linear(columns, 16, params_dtype=torch.bfloat16, device="cuda")
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)  # 128 MiB, y 8 MiB
    dy = torch.randn(rows, 16, device="cuda", dtype=torch.bfloat16)
    layer(x[:16]).backward(dy[:16])  # forward's thread and backward's each keep a workspace
    for turn in range(3):  # the first one makes plans
        layer.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = layer(x)
        y.backward(dy)
        room = torch.cuda.max_memory_allocated() - before
        assert room < y.nbytes + WORKSPACE + (1 << 20) < x.nbytes, turn
        del y


@pytest.mark.gpu
def test_a_captured_graph_updates_the_state():
    recipe = DelayedScaling(amax_history_len=3)
    layer, x = ft.Linear(64, 64, device="cuda"), torch.randn(32, 64, device="cuda")

    def step():
        with ft.autocast(recipe=recipe):
            y = layer(x)
        y.backward(torch.ones_like(y))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    x.mul_(4.0)
    graph.replay()
    torch.cuda.synchronize()
    state = layer.fp8_meta["scaling_fwd"]
    same(state.amax_history[-1, 0], x.abs().max(), "the newest amax")
    same(state.scale[0], torch.tensor(448.0) / x.abs().max().cpu(), "scale")


def test_a_tensor_that_outlived_a_transform(device):
    """torch.func leaves a wrapper around what escapes from it, which torch.autograd.Function takes off."""
    kept = []

    def leaking(x):
        kept.append(x * 2)
        return kept[0].square().sum()

    x = torch.randn(4, 16, device=device)
    torch.func.grad(leaking)(x)
    layer = ft.Linear(16, 8, device=device)
    got, want = layer(kept[0]), layer(x * 2)
    assert torch.equal(got, want)
    got.sum().backward()
    assert layer.weight.grad is not None


def test_amaxes_that_do_not_last_begin_at_zero(monkeypatch):
    """In memory that had other contents, forward and backward."""
    layer, (x, g) = ft.Linear(32, 16, device="cpu"), torch.randn(2, 8, 32)
    x.requires_grad_()

    def step():
        with ft.autocast(recipe=Float8CurrentScaling()):
            y = layer(x)
        return y.detach(), *torch.autograd.grad(y, [x, layer.weight], g[:, :16])

    def used(shape, strides, dtype, empty=memory._EMPTY["cpu"]):
        made = empty(shape, strides, dtype)
        made.untyped_storage().fill_(0x7F)  # float32: 3.4e38
        return made

    wanted = step()
    monkeypatch.setitem(memory._EMPTY, "cpu", used)
    for one, other in zip(step(), wanted, strict=True):
        assert torch.equal(one, other)
