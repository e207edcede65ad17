"""``fk.draw_from``: dropout by the numbers of another source."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

import fp8kit as fk
from fp8kit import arrays, nn
from fp8kit.autograd import call, tensor
from fp8kit.errors import AutogradError, BackendError, FormatError, Fp8kitError, ShapeError
from fp8kit.ops.attention import attention

H = 16
PAIRS = ((3 << 32) | 7, 5)


class Source:
    """Numbers one after the other, each array a call's own or, with ``one``, always the same one; ``asked``:
    of which devices."""

    def __init__(self, device, one=False):
        self.device, self.asked = arrays.device(device), []
        self.one = arrays.empty((2,), "int64", self.device) if one else None

    def __call__(self, device):
        pair = arrays.to(arrays.as_view(np.array([7, len(self.asked)])), self.device)
        self.asked.append(device)
        if self.one is None:
            return pair
        arrays.copy(self.one, pair)
        return self.one


def draw(seed, shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def layer(device):
    nn.manual_seed(1)
    return nn.TransformerLayer(
        H, 2 * H, 2, hidden_dropout=0.3, attention_dropout=0.2, drop_path_rate=0.4, device=device
    )


def step(module, device, call=lambda module, x: module(x)):
    """Bits of y, dx and the parameters' gradients."""
    x = tensor(draw(1, (8, 2, H)), requires_grad=True, device=device)
    module.zero_grad()
    y = call(module, x)
    y.backward(draw(2, (8, 2, H)))
    return [array.numpy().tobytes() for array in (y, x.grad, *(p.grad for p in module.parameters()))]


def test_the_process_draws_on_as_if_nothing_was_drawn(device):
    """A source that gives what ``manual_seed`` gives changes no bit; the process's own state stays where it
    is."""
    module = layer(device)
    nn.manual_seed(7)
    wanted = step(module, device)
    nn.manual_seed(7)
    before = nn.get_rng_state()
    source = Source(device)
    with fk.draw_from(source):
        assert step(module, device) == wanted
    # attention, and for each branch its dropout and its paths
    assert source.asked == [str(arrays.device(device))] * 5
    for name, value in nn.get_rng_state().items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)
    assert step(module, device) == wanted


def test_the_array_may_be_the_next_draws_too(device):
    module = layer(device)
    with fk.deterministic(), fk.draw_from(Source(device)):
        wanted = step(module, device)
    with fk.deterministic(), fk.draw_from(Source(device, one=True)):
        assert step(module, device) == wanted


@pytest.mark.parametrize("within", [False, True], ids=["around", "within"])
def test_recomputation_repeats_the_draws(device, within):
    module, source = layer(device), Source(device)
    with fk.deterministic(), fk.draw_from(Source(device)):
        wanted = step(module, device)

    def function(x):
        with fk.draw_from(source):
            return module(x)

    with fk.deterministic():
        if within:
            assert step(module, device, lambda _, x: fk.checkpoint(function, x)) == wanted
        else:
            with fk.draw_from(source):
                assert step(module, device, fk.checkpoint) == wanted
    assert len(source.asked) == 5
    with fk.deterministic(), fk.draw_from(other := Source(device)):
        assert step(module, device, lambda module, x: module(x, checkpoint_core_attention=True)) == wanted
    assert len(other.asked) == 5


def test_recomputation_after_the_block(device):
    """Backward asks neither the source nor the process's state."""
    module = layer(device)
    with fk.deterministic():
        with fk.draw_from(Source(device)):
            wanted = step(module, device)
        x = tensor(draw(1, (8, 2, H)), requires_grad=True, device=device)
        module.zero_grad()
        with fk.draw_from(Source(device)):
            y = fk.checkpoint(module, x)
        y.backward(draw(2, (8, 2, H)))
    assert [
        array.numpy().tobytes() for array in (y, x.grad, *(p.grad for p in module.parameters()))
    ] == wanted


def test_a_block_is_a_threads_own_and_the_inner_one_counts(device):
    where, outer, inner = arrays.device(device), Source(device), Source(device)
    nn.manual_seed(3)
    seen = []
    with fk.draw_from(outer):
        with fk.draw_from(inner):
            nn.random.next_rng(where)
        thread = threading.Thread(target=lambda: seen.append(nn.random.next_rng(where).numpy().tolist()))
        thread.start()
        thread.join()
        assert nn.random.next_rng(where).numpy().tolist() == [7, 0]
        with pytest.raises(ZeroDivisionError), fk.draw_from(lambda device: 1 // 0):
            nn.random.next_rng(where)
        assert nn.random.next_rng(where).numpy().tolist() == [7, 1]
    assert (len(outer.asked), len(inner.asked), seen) == (2, 1, [[3, 0]])
    assert nn.random.next_rng(where).numpy().tolist() == [3, 1]


@pytest.mark.parametrize("kind", ["numpy", "torch", "cut", "transposed", "Tensor"])
def test_arrays_of_all_kinds(device, kind):
    where = arrays.device(device)
    made = {
        "numpy": lambda: np.array(PAIRS),
        "torch": lambda: torch.tensor(PAIRS, device=device),
        "cut": lambda: torch.tensor([PAIRS[0], 0, PAIRS[1], 0], device=device)[::2],
        "transposed": lambda: np.array(PAIRS[::-1])[::-1],
        "Tensor": lambda: tensor(np.array(PAIRS), device=device),
    }[kind]()
    if arrays.as_view(made).device != where:
        made = arrays.to(arrays.as_view(made), where)
    with fk.draw_from(lambda device: made):
        assert tuple(nn.random.next_rng(where).numpy().tolist()) == PAIRS


REFUSED = {
    "no function": (3, Fp8kitError, r"^draw_from: source: got "),
    "None": (lambda device: None, FormatError, "^draw_from: source: got None, expected an array"),
    "a list": (lambda device: [1, 2], FormatError, "^draw_from: source: got list, expected an array"),
    "int32": (
        lambda device: np.array([1, 2], np.int32),
        FormatError,
        "^draw_from: source: got dtype int32, expected int64",
    ),
    "float": (
        lambda device: torch.tensor([1.0, 2.0]),
        FormatError,
        "^draw_from: source: got dtype float32, expected int64",
    ),
    "three": (
        lambda device: np.array([1, 2, 3]),
        ShapeError,
        r"^draw_from: source: got shape \(3,\), expected \(2,\)",
    ),
    "a matrix": (
        lambda device: np.array([[1, 2]]),
        ShapeError,
        r"^draw_from: source: got shape \(1, 2\), expected \(2,\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_pair_is_refused_before_the_operation_runs(device, case, monkeypatch):
    source, kind, said = REFUSED[case]
    x = tensor(draw(1, (8, H)), requires_grad=True, device=device)
    heads = [tensor(draw(i, (8, 2, 2, H // 2)), requires_grad=True, device=device) for i in range(3)]
    modules = [
        (nn.Dropout(0.5), (x,)),
        (nn.DotProductAttention(2, H // 2, attention_dropout=0.5, device=device), heads),
    ]
    for module, given in modules:
        module(*given)  # plans are made, so that what runs below is what a step runs
    before, ran = nn.get_rng_state(), []
    monkeypatch.setattr(call, "on_tape", lambda *a: ran.append("recorded"))
    for operation in (fk.nn.embedding.dropout_add, attention):
        monkeypatch.setattr(type(operation), "forward", lambda *a: ran.append("forward"))
    for module, given in modules:
        with pytest.raises(kind, match=said), fk.draw_from(source):
            module(*given)
    assert not ran
    for name, value in nn.get_rng_state().items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)


@pytest.mark.gpu
def test_a_pair_elsewhere_is_refused():
    x = tensor(draw(1, (8, H)), device="cuda")
    said = r"^draw_from: source: got an array on cpu, expected one on cuda:0"
    with pytest.raises(BackendError, match=said), fk.draw_from(lambda device: np.array(PAIRS)):
        nn.Dropout(0.5)(x)


@pytest.mark.gpu
def test_a_pair_on_a_gpu_for_the_cpu_is_refused():
    said = r"^draw_from: source: got an array on cuda:0, expected one on cpu"
    with (
        pytest.raises(BackendError, match=said),
        fk.draw_from(lambda device: torch.tensor(PAIRS, device="cuda")),
    ):
        nn.Dropout(0.5)(draw(1, (8, H)))


@pytest.mark.gpu
def test_a_graph_cannot_ask_again():
    x = tensor(draw(1, (8, H)), device="cuda")
    module = nn.Dropout(0.5)

    def drop(x):
        with fk.draw_from(Source("cuda")):
            return module(x)

    captured = fk.graph(drop, warmup=1)
    captured(x)
    with pytest.raises(Fp8kitError, match=r"draw_from: source: got a draw within fk.graph"):
        captured(x)


def test_more_draws_than_the_first_pass(device):
    source, times = Source(device), []

    def function(x):
        times.append(0)
        for _ in times:
            nn.random.next_rng(x.device)
        return x + x

    x = tensor(np.ones(3, np.float32), requires_grad=True, device=device)
    with (
        fk.draw_from(source),
        pytest.raises(AutogradError, match="as many draws on the same devices as in the first pass"),
    ):
        fk.checkpoint(function, x).backward(np.ones(3, np.float32))
    assert len(source.asked) == 1
