"""The module tree, state dicts and checkpoints, FP8 state included."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import fp8kit as fk
from fp8kit import arrays, nn, serialization
from fp8kit.autocast import autocast
from fp8kit.autograd import tensor
from fp8kit.errors import CheckpointError, FormatError, Fp8kitError
from fp8kit.optim import AdamW
from fp8kit.recipe import DelayedScaling
from fp8kit.testing.compare import assert_close
from tests.support.layers import draw
from tests.support.products import f64

RECIPE = DelayedScaling(amax_history_len=3)


class Net(nn.Module):
    def __init__(self, device, dtype="bfloat16"):
        self.embed = nn.Embedding(11, 32, params_dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            nn.LayerNormMLP(32, 48, params_dtype=dtype, device=device) for _ in range(2)
        )
        self.head = nn.Linear(32, 16, params_dtype=dtype, device=device)
        self.counts = arrays.to(arrays.as_view(np.arange(3, dtype=np.int64)), arrays.device(device))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train(net, opt, steps, first=0):
    """Losses of FP8 training steps on fixed data."""
    losses = []
    device = net.head.weight.device
    for i in range(first, first + steps):
        ids = tensor((np.arange(24) * (i + 3) % 11).reshape(4, 6), device=device)
        with autocast(recipe=RECIPE):
            loss = nn.cross_entropy(net(ids), tensor(np.arange(24).reshape(4, 6) % 16, device=device))
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def bits(state):
    return {name: arrays.as_view(view).numpy().tobytes() for name, view in state.items()}


def test_tree():
    net = Net("cpu")
    assert [path for path, _ in net.named_modules()] == [
        "",
        "embed",
        "layers",
        "layers.0",
        "layers.1",
        "head",
    ]
    assert len(net.layers) == 2
    assert net.layers[1] is list(net.layers)[1]
    assert next(n for n, _ in net.named_parameters()) == "embed.weight"
    assert [n for n, _ in net.named_buffers()] == ["counts"]
    assert (
        sum(p.view.size for p in net.parameters())
        == 11 * 32 + 2 * (64 + 48 * 32 + 48 + 32 * 48 + 32) + 16 * 32 + 16
    )
    net.eval()
    assert not any(module.training for _, module in net.named_modules())
    assert net.train() is net
    order = []
    net.apply(lambda module: order.append(type(module).__name__))
    assert order[-1] == "Net"
    assert "(head): Linear(weight=[16, 32], bias=[16])" in repr(net)
    net.head.weight = net.embed.weight  # shared: counted and saved once
    assert len(list(net.parameters())) == 1 + 2 * 6 + 1
    with pytest.raises(Fp8kitError, match="Modules"):
        net.layers.append("x")


def test_sequential_and_shared_gradient(device):
    first, second = (nn.Linear(8, 8, bias=False, device=device) for _ in range(2))
    net = nn.Sequential(first, second, first)
    x = draw(1, (3, 8), "float32")
    y = net(tensor(x, device=device))
    w1, w2 = f64(first.weight), f64(second.weight)
    assert_close("y", f64(y), x.astype(float) @ w1.T @ w2.T @ w1.T, "float64", 2.0**-20)
    y.backward(np.ones((3, 8), np.float32))
    g = np.ones((3, 8))
    want = g.T @ (x @ w1.T @ w2.T) + (g @ w1 @ w2).T @ x
    assert_close("dw", f64(first.weight.grad), want, "float64", 2.0**-18)
    net.zero_grad()
    assert first.weight.grad is None


def test_a_deep_copy_is_independent(device):
    net = nn.Sequential(nn.LayerNormLinear(32, 32, device=device), nn.LayerNormMLP(32, 48, device=device))
    x = tensor(draw(1, (4, 32), "float32"), device=device)
    g = draw(2, (4, 32), "float32")

    def run(module):
        with autocast(recipe=RECIPE):
            module(x).backward(g)

    run(net)
    twin = copy.deepcopy(net)
    assert bits(twin.state_dict()) == bits(net.state_dict())
    before = bits(net.state_dict())
    run(twin)
    assert bits(net.state_dict()) == before
    run(net)
    assert bits(twin.state_dict()) == bits(net.state_dict())
    assert all(
        a.view.ptr != b.view.ptr and a.grad is not None
        for a, b in zip(net.parameters(), twin.parameters(), strict=True)
    )


def test_state_dict_round_trip_is_exact(device):
    net = Net(device)
    train(net, AdamW(net.parameters(), lr=1e-2), 2)
    state = net.state_dict()
    fp8 = [name for name in state if "_extra_state" in name]
    assert len(fp8) == 3 * 6
    assert state["layers.1._extra_state.scaling_fwd.amax_history"].shape == (3, 6)
    assert state["head._extra_state.scaling_bwd.scale"].shape == (2,)
    other = Net(device)
    other.load_state_dict({name: view.numpy().copy() for name, view in state.items()})
    assert bits(other.state_dict()) == bits(state)
    fresh = Net(device)
    other.load_state_dict(fresh.state_dict())  # saved before any FP8 step: no FP8 state afterwards
    assert bits(other.state_dict()) == bits(fresh.state_dict())
    assert other.head.fp8_meta == {}


def test_resumed_training_has_the_same_bits(device, tmp_path):
    net, path = Net(device), tmp_path / "model.safetensors"
    opt = AdamW(net.parameters(), lr=1e-2)
    train(net, opt, 2)
    serialization.save(path, net, {"step": "2"})
    serialization.save(tmp_path / "opt", opt)
    serialization.save(tmp_path / "rng", nn.get_rng_state())
    straight = train(net, opt, 3, 2)
    again = Net(device)
    optimiser = AdamW(again.parameters(), lr=5.0)
    assert serialization.load(path, again) == {"step": "2"}
    serialization.load(tmp_path / "opt", optimiser)
    assert optimiser.lr == 1e-2
    assert train(again, optimiser, 3, 2) == straight
    assert bits(again.state_dict()) == bits(net.state_dict())
    assert bits(optimiser.state_dict()) == bits(opt.state_dict())


def test_file_is_plain_safetensors(tmp_path):
    net = Net("cpu")
    train(net, AdamW(net.parameters()), 1)
    serialization.save(tmp_path / "m", net)
    other = load_file(tmp_path / "m")
    np.testing.assert_array_equal(
        other["layers.0._extra_state.scaling_fwd.scale"], net.layers[0].fp8_meta["scaling_fwd"].scale
    )
    raw, _ = serialization.read(tmp_path / "m")
    assert raw["head.weight"].dtype == ml_dtypes.bfloat16


def test_dicts_of_every_dtype(tmp_path):
    kinds = [
        np.float32,
        ml_dtypes.bfloat16,
        np.float16,
        np.int64,
        np.uint8,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e5m2,
        np.bool_,
    ]
    state = {np.dtype(k).name: np.arange(6).reshape(2, 3).astype(k) for k in kinds} | {
        "empty": np.zeros((0, 4)),
        "scalar": np.array(7.0),
    }
    serialization.save(tmp_path / "d", state, {"a": "b"})
    target = {name: np.zeros_like(array) for name, array in state.items()}
    assert serialization.load(tmp_path / "d", target) == {"a": "b"}
    assert bits(target) == bits(state)
    assert target["scalar"].shape == ()


def test_arrays_that_cannot_be_loaded_into_are_named_and_nothing_changes(tmp_path):
    serialization.save(tmp_path / "d", {"a": np.ones(3), "b": np.ones((2, 3)), "c": np.ones(2)})
    target = {"a": np.zeros(3), "b": np.zeros((3, 2)).T, "c": np.zeros(2)}
    target["c"].flags.writeable = False
    with pytest.raises(
        CheckpointError, match=r"a: got Linear.*, expected an array; Bundle saves several modules"
    ):
        fk.save("never", {"a": fk.nn.Linear(16, 16)})
    with pytest.raises(
        CheckpointError,
        match=r"b: loads into an array of strides \(1, 2\).*; c: loads into a read-only array",
    ):
        serialization.load(tmp_path / "d", target)
    assert not target["a"].any()


def wrong(tmp_path, make):
    """A checkpoint of ``Net`` changed by ``make(state)``."""
    net = Net("cpu")
    train(net, AdamW(net.parameters()), 1)
    state = {name: view.numpy().copy() for name, view in net.state_dict().items()}
    make(state)
    save_file(state, tmp_path / "m")
    return tmp_path / "m"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda s: s.pop("head.bias"), ["missing: head.bias"]),
        (lambda s: s.update(extra=np.zeros(1)), ["unexpected: extra"]),
        (
            lambda s: s.update({"head._extra_state": np.zeros(1)}),
            ["unexpected: head._extra_state; leave it out"],
        ),
        (lambda s: s.update({"head.bias": np.zeros(3, ml_dtypes.bfloat16)}), ["head.bias", "(3,)", "(16,)"]),
        (lambda s: s.update({"head.bias": np.zeros(16, np.float32)}), ["head.bias", "float32", "bfloat16"]),
        (
            lambda s: s.pop("head._extra_state.scaling_fwd.scale"),
            ["head._extra_state", "missing: scaling_fwd.scale"],
        ),
        (
            lambda s: s.update({"head._extra_state.scaling_fwd.scale": np.zeros(4, np.float32)}),
            ["scaling_fwd.scale", "(4,)", "(3,)"],
        ),
        (
            lambda s: s.update({"head._extra_state.scaling_bwd.amax_history": np.zeros(2, np.float32)}),
            ["amax_history", "(steps, 2)"],
        ),
        *(
            (
                lambda s, name=name, bad=bad: s[f"head._extra_state.{name}"].reshape(-1).__setitem__(2, bad),
                ["head._extra_state", name, said],
            )
            for name, bads in (
                ("scaling_fwd.scale", (0, -1, np.nan, np.inf, 2.0**-128)),
                ("scaling_fwd.scale_inv", (0, -1, np.nan, np.inf)),
                ("scaling_bwd.amax_history", (-1, np.nan, -np.inf)),
            )
            for bad in bads
            for said in (f"got {np.float32(bad)} at",)
        ),
        (lambda s: s.update({"embed._extra_state.x": np.zeros(1)}), ["embed._extra_state", "unexpected: x"]),
        (lambda s: s.update({"nowhere._extra_state.x": np.zeros(1)}), ["unexpected: nowhere._extra_state.x"]),
    ],
)
def test_what_does_not_fit_is_named_and_changes_nothing(tmp_path, make, words):
    path = wrong(tmp_path, make)
    net = Net("cpu")
    before = bits(net.state_dict())
    with pytest.raises(CheckpointError) as caught:
        serialization.load(path, net)
    for word in (*words, str(path)):
        assert word in str(caught.value)
    assert bits(net.state_dict()) == before


def test_an_overflow_in_the_history_is_loaded(tmp_path):
    """A step whose gradients overflowed is part of a run: its amax stays in the history until it has rolled
    through."""
    path = wrong(
        tmp_path, lambda s: s["head._extra_state.scaling_bwd.amax_history"].__setitem__((-1, 0), np.inf)
    )
    net = Net("cpu")
    serialization.load(path, net)
    assert net.head.fp8_meta["scaling_bwd"].amax_history[-1, 0] == np.inf


def test_not_strict_takes_what_fits(tmp_path):
    path = wrong(tmp_path, lambda s: (s.pop("head.bias"), s.update(extra=np.zeros(1))))
    net = Net("cpu")
    bias = net.head.bias.numpy().copy()
    serialization.load(path, net, strict=False)
    np.testing.assert_array_equal(net.head.bias.numpy(), bias)
    np.testing.assert_array_equal(net.head.weight.numpy(), serialization.read(path)[0]["head.weight"])


def test_missing_truncated_and_foreign_files(tmp_path):
    net = nn.Linear(4, 4, device="cpu")
    before = bits(net.state_dict())
    serialization.save(tmp_path / "good", net)
    whole = (tmp_path / "good").read_bytes()
    files = {
        "cut": whole[:-1],
        "header": whole[:20],
        "short": b"abc",
        "empty": b"",
        "foreign": b"PK\x03\x04" * 99,
        "longer": whole + b"x",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match="truncated or foreign"):
            serialization.load(tmp_path / name, net)
    with pytest.raises(CheckpointError, match="No such file"):
        serialization.load(tmp_path / "none", net)
    assert bits(net.state_dict()) == before


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    serialization.save(tmp_path / "m", {"a": np.ones(3)})
    before = (tmp_path / "m").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        serialization.save(tmp_path / "m", {"a": np.zeros(3)})
    assert (tmp_path / "m").read_bytes() == before
    assert os.listdir(tmp_path) == ["m"]


def test_a_killed_save_leaves_the_old_file(tmp_path):
    """A process that saves over and over is killed; what is there is whole, one of the two states."""
    program = textwrap.dedent("""
        import sys, numpy as np
        from fp8kit import serialization
        i = 0
        while True:
            serialization.save(sys.argv[1], {"a": np.full(200_000, i), "b": np.full(3, i)})
            if i == 0:
                print("saved", flush=True)
            i += 1
    """)
    path = tmp_path / "m"
    env = os.environ | {"PYTHONPATH": str(Path(serialization.__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, env=env
    ) as process:
        assert process.stdout.readline() == b"saved\n"
        time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    state, _ = serialization.read(path)
    assert set(np.unique(state["a"])) == set(np.unique(state["b"]))


def test_unsavable_things_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="float4"):
        serialization.save(tmp_path / "m", {"x": np.zeros(2, ml_dtypes.float4_e2m1fn)})
    with pytest.raises(CheckpointError, match=r"metadata\['n'\]"):
        serialization.save(tmp_path / "m", {"x": np.zeros(2)}, {"n": 3})
    with pytest.raises(CheckpointError, match="mapping"):
        nn.Linear(2, 2, device="cpu").load_state_dict([1])
    for name in (1, b"x", "__metadata__", "\ud800"):
        with pytest.raises(
            CheckpointError,
            match=r"save: name: got .*, expected a string of characters, other than __metadata__",
        ):
            serialization.save(tmp_path / "m", {name: np.zeros(2), "1": np.ones(2)})
    with pytest.raises(CheckpointError, match=r"save: metadata\['n'\]"):
        serialization.save(tmp_path / "m", {"x": np.zeros(2)}, {"n": "\udfff"})
    assert os.listdir(tmp_path) == []


def test_what_is_no_file_is_not_replaced_by_one(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        with pytest.raises(CheckpointError, match=r"save: path: got .*pipe', expected a file, old or new"):
            serialization.save(tmp_path / name, {"x": np.zeros(2)})
    assert (tmp_path / "pipe").is_fifo()
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]


def test_mistakes_of_a_first_hour_are_named() -> None:
    layer = fk.nn.Linear(4, 4, device="cpu")
    with pytest.raises(FormatError, match=r"Linear: weight: got ndarray, expected a Parameter"):
        layer.weight = np.zeros((4, 4), np.float32)
    with pytest.raises(fk.Fp8kitError, match=r"AdamW: params: got Linear"):
        fk.optim.AdamW(layer)
    with pytest.raises(fk.Fp8kitError, match=r'AdamW: param_groups: .*"params" in each'):
        fk.optim.AdamW([{"lr": 1.0}])
    with pytest.raises(fk.CheckpointError, match=r"save: path: .*a folder that exists"):
        fk.save("nowhere/at/all.safetensors", layer)
    with pytest.raises(fk.CheckpointError, match=r"save\(path, module\)"):
        fk.save(layer, "swapped.safetensors")
    with pytest.raises(fk.BackendError, match=r"deterministic: enabled: got 'x'"):
        fk.deterministic("x")
    for scale in (0.0, float("nan"), -1.0):
        with pytest.raises(FormatError, match=r"quantize: scale: .*finite positive"):
            fk.quantize(np.ones((2, 2), np.float32), fk.E4M3, scale=scale)


def test_unknown_keywords_of_a_call_are_told_with_the_ones_that_were_meant():
    x = np.ones((2, 4), np.float32)
    layer = nn.Linear(4, 4, device="cpu")
    with pytest.raises(
        TypeError, match=r"^Linear.forward\(\) .* 'is_first_micobatch'; did you mean is_first_m"
    ):
        layer(x, is_first_micobatch=True)
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'inp'"):
        layer(is_first_microbatch=True)
    with pytest.raises(TypeError, match=r"^quantize\(\) .* 'scalling'; did you mean scaling\?$"):
        fk.quantize(x, scalling="row")
