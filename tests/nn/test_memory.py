"""Memory of a step: large buffers come when they are first asked for and go as soon as they are no longer
needed, with the same bits."""

from __future__ import annotations

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import arrays, buffers, formats, nn
from fp8kit.arrays import CPU, ArrayView
from fp8kit.autograd import apply, tensor
from fp8kit.backends import dispatch
from fp8kit.bench.memory import Peak
from fp8kit.buffers import Buffers, free, free_contents, streamed, take
from fp8kit.errors import AutogradError
from fp8kit.execution import plans
from fp8kit.nn import layer as nn_layer
from fp8kit.ops import norm_mlp
from fp8kit.ops.linear import LinearSpec, linear, weight_cast
from fp8kit.ops.product import ProductSpec
from fp8kit.quantization import Quantization
from fp8kit.spec import Meta
from tests.support import peaks
from tests.support.combinations import combinations

RECIPES = {
    "high": None,
    "delayed": fk.recipe.DelayedScaling(amax_history_len=2),
    "current": fk.recipe.Float8CurrentScaling(),
    "block": fk.recipe.Float8BlockScaling(),
}


# --- the peak -----------------------------------------------------------------------------------------------


@combinations({"recipe": RECIPES.keys()}, usual=["delayed"])
def test_the_peak_of_the_layer_is_below_torchs(recipe, monkeypatch):
    """Hidden 4096, FFN 16384, 8192 tokens in bfloat16: parameters, gradients, and all that a step
    allocates."""

    def untouched(shape, init, dtype, device):
        return nn.Parameter(arrays.empty(shape, dtype, device))

    peaks.hollow(monkeypatch)
    monkeypatch.setattr(nn_layer, "make_parameter", untouched)
    sizes = peaks.HIDDEN, peaks.FFN, peaks.HEADS
    layer = nn.TransformerLayer(
        *sizes, params_dtype="bfloat16", device="cpu", hidden_dropout=0.0, attention_dropout=0.0
    )
    x, dy = (
        arrays.empty((peaks.SEQUENCE, peaks.BATCH, peaks.HIDDEN), formats.bfloat16, CPU) for _ in range(2)
    )
    leaf = tensor(x, requires_grad=True)

    def step():
        leaf.grad = None
        layer.zero_grad()
        with fk.autocast(enabled=recipe != "high", recipe=RECIPES[recipe]):
            y = layer(leaf)
        y.backward(dy)

    step()
    leaf.grad = None
    layer.zero_grad()
    assert 0.8 * peaks.EAGER < peaks.STANDING + Peak(CPU).bytes(step) <= 0.95 * peaks.EAGER


# --- the bits -----------------------------------------------------------------------------------------------


def poisoned(self, name):
    """A buffer that is NaN wherever nobody writes."""
    view = self[name] = self.allocate(self.metas[name])
    whole = ArrayView(view.ptr, (view.nbytes,), formats.uint8, view.device, view.owner)
    arrays.copy(whole, arrays.as_view(np.full(view.nbytes, 0xFF, np.uint8)))
    return view


def layer_of(kind, device, **options):
    nn.manual_seed(5)
    sizes = {
        "Linear": (32, 48),
        "LayerNormLinear": (32, 48),
        "LayerNormMLP": (32, 64),
        "TransformerLayer": (32, 64, 2),
    }[kind]
    return getattr(nn, kind)(*sizes, device=device, **options)


def steps(layer, recipe, device):
    """Bits of the output and of all gradients, of two steps with two passes each through the same graph: four
    lists."""
    found = []
    for seed in range(2):
        x = tensor(
            np.random.default_rng(seed).standard_normal((16, 2, 32)).astype(np.float32), True, device=device
        )
        with fk.deterministic(), fk.autocast(enabled=recipe != "high", recipe=RECIPES[recipe]):
            y = layer(x)
        y = y[0] if isinstance(y, tuple) else y
        dy = tensor(np.random.default_rng(9).standard_normal(y.shape).astype(np.float32), device=device).view
        for keep in (True, False):
            x.grad = None
            layer.zero_grad()
            with fk.deterministic():
                y.backward(dy, retain_graph=keep)
            found.append(
                [
                    y.numpy().tobytes(),
                    x.grad.numpy().tobytes(),
                    *(p.grad.numpy().tobytes() for p in layer.parameters()),
                ]
            )
    return found


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Linear", {}),
        ("LayerNormLinear", {"return_layernorm_output": True}),
        ("LayerNormLinear", {"parameters_split": {"a": 17, "b": 31}}),
        ("LayerNormMLP", {}),
        ("LayerNormMLP", {"checkpoint": True}),
        ("LayerNormMLP", {"activation": "swiglu", "bias": False}),
        ("TransformerLayer", {"hidden_dropout": 0.1}),
    ],
    ids=["linear", "norm", "split", "mlp", "recompute", "swiglu", "layer"],
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_streamed_buffers_change_no_bit(device, recipe, kind, options, monkeypatch):
    want = steps(layer_of(kind, device, **options), recipe, device)
    peaks.stream_everything(monkeypatch)
    plans.plans.clear()
    monkeypatch.setattr(Buffers, "__missing__", poisoned)
    found = steps(layer_of(kind, device, **options), recipe, device)
    assert found == want
    if recipe != "delayed":  # its scales of gradients have been updated between the passes
        assert found[0] == found[1]
        assert found[2] == found[3]


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "shared"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_codes_in_the_place_of_the_gradient_change_no_bit(device, dtype, activation, streams, monkeypatch):
    """fc1's output gradient in FP8 lies mostly where that of the activation's output was."""
    rng = np.random.default_rng(3)
    x, dy = (rng.standard_normal((1040, 32)).astype(formats.dtype(dtype).numpy) for _ in range(2))
    found, sizes = [], []
    for least in (1 << 60, 0):
        monkeypatch.setattr(norm_mlp, "IN_PLACE", least)
        monkeypatch.setattr("fp8kit.execution.memory.SHARED", 1)
        if streams:
            peaks.stream_everything(monkeypatch)
        plans.plans.clear()
        nn.manual_seed(5)
        layer = nn.LayerNormMLP(32, 64, activation=activation, params_dtype=dtype, device=device)
        leaf = tensor(x, True, device=device)
        with fk.deterministic(), fk.autocast(recipe=RECIPES["delayed"]):
            y = layer(leaf)
            y.backward(tensor(dy, device=device).view)
        grads = [leaf.grad, *(p.grad for p in layer.parameters())]
        found.append([y.numpy().tobytes(), *(grad.numpy().tobytes() for grad in grads)])
        (op,) = [op for op in plans.plans._values.values() if op.operation.name == "norm_mlp"]
        sizes.append(sum(map(buffers.nbytes_of, op.plan.backward_scratch.values())))
        assert ("fc1_g_q" in op.plan.backward_scratch) == (least > 0)
    plans.plans.clear()
    assert found[0] == found[1]
    # 512 rows of codes take no memory of their own
    assert sizes[0] - sizes[1] == 512 * (128 if activation == "swiglu" else 64)


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_casts_that_are_inputs_stay(device, recipe, monkeypatch):
    """Two products share the codes of their input and weight, which nobody gives up however a frontend keeps
    them: the bits of products that cast for themselves, in a first walk back and in a second one."""
    fp8 = RECIPES[recipe].quantization
    # a cast of x as if it were the weight
    square = Quantization.of(fp8.w, fp8.x, fp8.g, fp8.fprop.accumulation)
    rng = np.random.default_rng(3)
    x, w = (
        tensor(rng.standard_normal(shape).astype(np.float32), True, device=device)
        for shape in ((32, 48), (80, 48))
    )
    g = tensor(rng.standard_normal((32, 80)).astype(np.float32), device=device)

    def cast(values, operand):
        spec = LinearSpec(
            ProductSpec(48, (values.shape[0],), bias="none", fp8=square if operand == "x" else fp8)
        )
        made = apply(weight_cast, spec, {"weight0": values.detach()})
        return {operand + name[1:]: one for name, one in made.items() if name != "w_amax"}

    def passes(own, **options):
        spec = LinearSpec(ProductSpec(48, (80,), bias="none", fp8=fp8, **options))
        found = []
        ys = [apply(linear, spec, {"x": x, "weight0": w, **own})["y"] for _ in range(2)]
        for y, keep in ((ys[0], True), (ys[1], False), (ys[0], False)):
            x.grad = w.grad = None
            y.backward(g, retain_graph=keep)
            found.append([array.numpy().tobytes() for array in (y, x.grad, w.grad)])
        return found

    with fk.deterministic():
        want = passes({})
        assert want[0] == want[1] == want[2]
        codes = cast(x, "x") | cast(w, "w")
        before = {name: one.numpy().tobytes() for name, one in codes.items()}
        peaks.stream_everything(monkeypatch)
        plans.plans.clear()
        backward = type(linear).backward

        def keeping(self, plan, ws, cotangents):
            kept = Buffers(ws.inputs, {}, None)
            backward(self, plan, ws._replace(inputs=kept), cotangents)
            assert all(view is not None for view in kept.values())

        monkeypatch.setattr(type(linear), "backward", keeping)
        assert passes(codes, input_cached=True, weight_cached=True) == want
    assert {name: one.numpy().tobytes() for name, one in codes.items()} == before


def test_a_backward_that_failed_half_way_says_so_when_it_is_asked_again(monkeypatch):
    peaks.stream_everything(monkeypatch)
    plans.plans.clear()
    layer, x = layer_of("LayerNormMLP", "cpu"), tensor(np.ones((16, 32), np.float32), True)
    g, kernels = np.ones((16, 32), np.float32), dispatch.kernels(CPU)

    def fails(*arguments):
        raise MemoryError

    for keep, message in ((True, None), (False, "norm_mlp: an earlier backward failed half-way")):
        y = layer(x)
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "act_bwd", fails, raising=False)
            with pytest.raises(MemoryError):
                y.backward(arrays.as_view(g), retain_graph=keep)
        if message is None:
            y.backward(arrays.as_view(g))
            assert x.grad is not None
            continue
        with pytest.raises(AutogradError, match=message):
            y.backward(arrays.as_view(g))


# --- the buffers --------------------------------------------------------------------------------------------


def test_large_buffers_of_much_memory_are_streamed():
    mib = 1 << 20
    metas = {
        name: Meta((n * mib,), formats.uint8, zero)
        for name, n, zero in (("a", 200, False), ("b", 15, False), ("c", 50, True))
    }
    assert list(streamed(metas)) == ["a"]
    assert not streamed({"a": metas["a"], "b": metas["b"]})
    assert buffers.nbytes_of(Meta((3, 5), formats.float32)) == 60


def test_buffers_are_allocated_when_read_and_freed_when_said():
    made = []

    def make(meta):
        made.append(meta)
        return arrays.empty(meta.shape, meta.dtype, CPU)

    metas = {name: Meta((2,), formats.float32) for name in "abc"}
    there = arrays.empty((1,), formats.float32, CPU)
    views = Buffers({"t": there}, metas, make)
    assert views["t"] is there
    assert views.get("x") is None
    assert not made
    a = views["a"]
    assert views.get("a") is a
    assert len(made) == 1
    free_contents(views, "a", "b")
    assert views["a"] is not a
    assert len(made) == 2
    free(views, "a", "nowhere")
    assert views["a"] is None
    assert len(made) == 2
    out = take(views, ("b", "t"))
    assert views["b"] is None
    assert out["t"] is there
    free(out, "t")
    assert out["t"] is None
    views.allocate_all()
    assert views["c"] is not None
    assert len(made) == 4


def test_ordinary_views_stay():
    views = {"a": arrays.empty((1,), formats.float32, CPU)}
    free(views, "a")
    free_contents(views, "a")
    assert views["a"] is not None
    assert take(views, ("a",)) == views
