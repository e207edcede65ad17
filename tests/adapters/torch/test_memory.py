"""Memory of a step through the torch frontend: large buffers come when they are first asked for and go as
soon as they are no longer needed, with the same bits."""

from __future__ import annotations

import fp8kit_torch as ft
import pytest
import torch

from fp8kit import arrays
from fp8kit.backends import dispatch
from fp8kit.buffers import Buffers, nbytes_of, streamed
from fp8kit.execution import memory, plans
from fp8kit.execution.bound import BoundOp
from tests.support import peaks
from tests.support.combinations import combinations

from .twins import KINDS, RECIPES, bits, scope


@pytest.fixture
def stream(monkeypatch):
    """A function: from its call on, in this test, the buffers of layers are streamed."""
    yield lambda: (peaks.stream_everything(monkeypatch), plans.plans.clear())
    plans.plans.clear()


def most_of(step):
    """The most that torch's CPU allocator gives out during ``step``."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        step()
    held = most = 0
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    for event in events:
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def second_step(layer, x, dy, recipe):
    """A function: forward and backward of the layer, which has made one step and has no gradients."""
    x.requires_grad_()

    def step():
        with scope(ft, RECIPES[recipe]):
            y = layer(x)
        y.backward(dy)

    step()
    for tensor in (x, *layer.parameters()):
        tensor.grad = None
    return step


@pytest.mark.parametrize("recipe", ["high", "delayed", "current", "block"])
def test_the_peak_of_the_layer_is_below_torchs(recipe, monkeypatch):
    """Hidden 4096, FFN 16384, 8192 tokens in bfloat16: parameters, gradients, and all that a step
    allocates."""
    peaks.hollow(monkeypatch)
    sizes, inits = (
        (peaks.HIDDEN, peaks.FFN, peaks.HEADS),
        {"init_method": lambda t: t, "output_layer_init_method": lambda t: t},
    )
    layer = ft.TransformerLayer(
        *sizes, params_dtype=torch.bfloat16, device="cpu", hidden_dropout=0.0, attention_dropout=0.0, **inits
    )
    x, dy = (torch.empty(peaks.SEQUENCE, peaks.BATCH, peaks.HIDDEN, dtype=torch.bfloat16) for _ in range(2))
    step = second_step(layer, x, dy, recipe)
    assert 0.8 * peaks.EAGER < peaks.STANDING + most_of(step) <= 0.95 * peaks.EAGER


@pytest.mark.parametrize("recipe", ["high", "delayed", "current"])
def test_the_peak_of_a_middle_layer_is_no_more_than_torchs(recipe, monkeypatch):
    """Hidden 2048, FFN 8192, 4096 tokens in bfloat16: a layer whose buffers are not streamed. torch eager's
    peak, x and dy aside, is 512 MiB on an H200."""
    peaks.hollow(monkeypatch)
    # more than cuDNN's
    monkeypatch.setattr(dispatch.kernels(arrays.CPU), "attention_workspace", lambda *about: 64 << 20)
    sizes, inits = (2048, 8192, 16), {"init_method": lambda t: t, "output_layer_init_method": lambda t: t}
    layer = ft.TransformerLayer(
        *sizes, params_dtype=torch.bfloat16, device="cpu", hidden_dropout=0.0, attention_dropout=0.0, **inits
    )
    x, dy = (torch.empty(2048, 2, 2048, dtype=torch.bfloat16) for _ in range(2))
    step = second_step(layer, x, dy, recipe)
    most = most_of(step) + sum(p.nbytes for p in layer.parameters())
    assert 0.8 * 512 < most / 2**20 <= 512


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_temporaries_alone_are_not_streamed(recipe, monkeypatch):
    """Hidden 2048, FFN 8192, 8192 tokens in bfloat16: only backward's temporaries are so much memory. They
    lie in what forward saved, in gradients, and in a block for the rest, and backward can be recorded."""
    peaks.hollow(monkeypatch)
    inits = {"init_method": lambda t: t, "output_layer_init_method": lambda t: t}
    plans.plans.clear()
    layer = ft.LayerNormMLP(2048, 8192, params_dtype=torch.bfloat16, device="cpu", **inits)
    x, dy = (torch.empty(8192, 2048, dtype=torch.bfloat16) for _ in range(2))
    step = second_step(layer, x, dy, recipe)
    (op,) = plans.plans._values.values()
    assert streamed(op.plan.backward_scratch)
    assert not op.saved.streamed
    assert not op.streamed_grads
    assert op.lends
    made = sum(map(nbytes_of, [*op.outputs.values(), *op.grads.values()]))
    small = 4 << 20  # amaxes, workspaces
    assert most_of(step) <= op.saved.nbytes + op._lent_scratch.nbytes + made + small
    plans.plans.clear()


class Held:
    """Keeps what autograd saves, as a program that offloads or looks at it may."""

    def __init__(self):
        self.tensors = []

    def pack(self, tensor):
        self.tensors.append(tensor)
        return tensor


@pytest.mark.parametrize("kind", ["LayerNormMLP", "TransformerLayer"])
def test_what_others_hold_is_not_overwritten(device, kind, monkeypatch):
    """Backward's temporaries lie in what forward saved, unless the graph is retained or somebody holds it;
    the bits are the same."""
    monkeypatch.setattr(memory, "SHARED", 1)
    plans.plans.clear()
    own, lent = BoundOp.backward, []

    def noted(self, *arguments):
        lent.append(arguments[-1])
        return own(self, *arguments)

    monkeypatch.setattr(BoundOp, "backward", noted)
    held = Held()

    def watched(layer, x):
        with torch.autograd.graph.saved_tensors_hooks(held.pack, lambda tensor: tensor):
            return layer(x)

    want = steps(layer_of(kind, device), "current", device, passes=(False,))
    assert any(lent)
    lent.clear()
    found = steps(layer_of(kind, device), "current", device, passes=(True,))
    assert found == want
    assert not any(lent)
    held.tensors.clear()
    before = []

    def copied(layer, x):
        y = watched(layer, x)
        before[:] = [bits(tensor).tobytes() for tensor in held.tensors]
        return y

    found = steps(layer_of(kind, device), "current", device, copied, (False,))
    assert found == want
    assert not any(lent)
    assert [bits(tensor).tobytes() for tensor in held.tensors] == before
    plans.plans.clear()


def layer_of(kind, device, **options):
    torch.manual_seed(5)
    return getattr(ft, kind)(device=device, **(KINDS[kind] | options))


def steps(layer, recipe, device, call=None, passes=(True, False)):
    """Bits of the output and of all gradients, a list for each backward pass of two steps; ``passes``:
    whether each one keeps the graph."""
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        x = torch.randn(16, 2, 48, device=device, requires_grad=True)
        with scope(ft, RECIPES[recipe]):
            y = layer(x) if call is None else call(layer, x)
        dy = torch.linspace(-1, 1, y.numel(), device=device).view(y.shape)
        for keep in passes:
            x.grad = None
            layer.zero_grad()
            y.backward(dy, retain_graph=keep)
            found.append([bits(t).tobytes() for t in (y, x.grad, *(p.grad for p in layer.parameters()))])
    return found


@combinations(
    {
        "case": {
            "linear": ("Linear", {}),
            "split": ("LayerNormLinear", {}),
            "mlp": ("LayerNormMLP", {}),
            "recompute": ("LayerNormMLP", {"checkpoint": True}),
            "layer": ("TransformerLayer", {"hidden_dropout": 0.1}),
        },
        "recipe": ["high", "delayed", "current", "block"],
    }
)
def test_streamed_buffers_change_no_bit(device, recipe, case, stream):
    kind, options = case
    want = steps(layer_of(kind, device, **options), recipe, device)
    stream()
    found = steps(layer_of(kind, device, **options), recipe, device)
    assert found == want
    if recipe != "delayed":  # its scales of gradients have been updated between the passes
        assert found[0] == found[1]
        assert found[2] == found[3]


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_gives_the_same_bits(device, reentrant, stream):
    def call(layer, x):
        return ft.checkpoint(layer, x, use_reentrant=reentrant)

    want = steps(layer_of("LayerNormMLP", device), "delayed", device, call, (False,))
    stream()
    assert steps(layer_of("LayerNormMLP", device), "delayed", device, call, (False,)) == want


@pytest.mark.combinations  # test_compile
def test_compiled_layers_give_the_bits_of_eager_ones(device, stream):
    stream()
    want = steps(layer_of("LayerNormMLP", device), "current", device)
    assert (
        steps(torch.compile(layer_of("LayerNormMLP", device), backend="aot_eager"), "current", device) == want
    )


def test_main_grad_goes_on_where_it_lies(device, stream):
    def sums():
        layer = layer_of("LayerNormMLP", device, fuse_wgrad_accumulation=True)
        for parameter in layer.parameters():
            parameter.main_grad = torch.ones_like(parameter, dtype=torch.float32)
        x = torch.linspace(-1, 1, 16 * 48, device=device).view(16, 48)
        for _ in range(2):
            with ft.autocast(recipe=RECIPES["current"]):
                layer(x).sum().backward()
        return [bits(p.main_grad).tobytes() for p in layer.parameters()]

    want = sums()
    stream()
    assert sums() == want


def test_a_value_changed_in_place_is_refused_before_anything_goes(stream):
    stream()
    layer, x = layer_of("LayerNormMLP", "cpu"), torch.randn(16, 48, requires_grad=True)
    kept = x * 1
    y = layer(kept)
    with torch.no_grad():
        kept += 1
    for _ in range(2):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    with torch.no_grad():
        kept -= 1


def test_a_second_backward_through_what_is_gone_is_torchs_own_error(stream, monkeypatch):
    stream()
    layer, x = layer_of("LayerNormMLP", "cpu"), torch.randn(16, 48, requires_grad=True)
    y, kernels = layer(x), dispatch.kernels(arrays.CPU)

    def fails(*arguments):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "act_bwd", fails, raising=False)
        with pytest.raises(MemoryError):
            y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_memory_goes_back_within_backward(stream, monkeypatch):
    """While fc1's weight gradient is computed nobody holds fc1's output any more, nor what fc2's products
    read."""
    stream()
    layer, x = layer_of("LayerNormMLP", "cpu"), torch.randn(16, 48, requires_grad=True)
    seen, backward = [], Buffers.__setitem__

    def note(self, name, value):
        seen.append((name, value is None))
        backward(self, name, value)

    with ft.autocast(recipe=RECIPES["delayed"]):
        y = layer(x)
    monkeypatch.setattr(Buffers, "__setitem__", note, raising=False)
    y.sum().backward()
    gone = [name for name, is_none in seen if is_none]
    assert gone.index("h") < gone.index("fc1_x_qt")
    assert {"fc2_x_qt", "fc2_w_qt", "fc1_w_qt"} <= set(gone)
