"""Embedding, Dropout, cross_entropy, and the random state."""

from __future__ import annotations

import numpy as np
import pytest

from fp8kit import nn, serialization
from fp8kit.autograd import tensor
from fp8kit.errors import CheckpointError, FormatError, Fp8kitError
from fp8kit.testing.compare import assert_close, sum_slack
from tests.support.layers import draw, make
from tests.support.products import f64


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_embedding(device, dtype):
    module = make(nn.Embedding, device, dtype, num_embeddings=7, embedding_dim=12)
    ids = np.array([[1, 6, 1], [0, 1, 3]])
    y = module(tensor(ids, device=device))
    np.testing.assert_array_equal(f64(y), f64(module.weight)[ids])
    g = draw(3, (2, 3, 12), dtype)
    y.backward(g)
    want, size = np.zeros((7, 12)), np.zeros((7, 12))
    np.add.at(want, ids, g.astype(float))
    np.add.at(size, ids, np.abs(g.astype(float)))
    assert_close("dtable", f64(module.weight.grad), want, dtype, sum_slack(size, 6))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_cross_entropy(device, dtype, reduction):
    logits = draw(1, (2, 5, 13), dtype, 3.0)
    targets = np.arange(10).reshape(2, 5) % 13
    targets[0, 1] = targets[1, 4] = -100
    x = tensor(logits, requires_grad=True, device=device)
    loss = nn.cross_entropy(x, tensor(targets, device=device), reduction, label_smoothing=0.1)
    z = logits.astype(float)
    lse = np.log(np.exp(z).sum(-1))
    kept = targets != -100
    picked = np.take_along_axis(z, np.where(kept, targets, 0)[..., None], -1)[..., 0]
    rows = np.where(kept, lse - 0.9 * picked - 0.1 * z.mean(-1), 0)
    slack = sum_slack(np.abs(z).max() * 2, 26)
    if reduction == "mean":
        assert_close("loss", f64(loss), [rows.sum() / kept.sum()], "float32", slack)
        loss.backward()
        weight = np.full(rows.shape, 1 / kept.sum())
    else:
        assert_close("loss", f64(loss), rows, "float32", slack)
        weight = draw(2, (2, 5), "float32").astype(float)
        loss.backward(weight.astype(np.float32))
    onehot = np.eye(13)[np.where(kept, targets, 0)]
    want = (np.exp(z - lse[..., None]) - 0.9 * onehot - 0.1 / 13) * (weight * kept)[..., None]
    assert_close("dlogits", f64(x.grad), want, dtype, slack * np.abs(weight).max())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_dropout(device, dtype):
    p, n = 0.3, 100_000
    module = nn.Dropout(p)
    x = tensor(np.ones((10, n // 10), dtype), requires_grad=True, device=device)
    y = module(x)
    values = f64(y)
    kept = values != 0
    np.testing.assert_array_equal(np.unique(values), [0, np.float32(1 / (1 - p)).astype(dtype)])
    assert abs(kept.mean() - (1 - p)) < 5 * np.sqrt(p * (1 - p) / n)
    y.backward(np.full((10, n // 10), 2, dtype))
    np.testing.assert_array_equal(f64(x.grad), 2 * values)
    assert not np.array_equal(f64(module(x)), values)  # the state has moved on
    nn.manual_seed(1234)
    np.testing.assert_array_equal(f64(module(x)), values)
    assert module.eval()(x) is x
    with pytest.raises(FormatError, match="p"):
        nn.Dropout(1.0)


def test_a_refused_call_leaves_the_random_state(device):
    layer = nn.TransformerLayer(
        32, 64, 2, hidden_dropout=0.5, attention_dropout=0.5, drop_path_rate=0.5, device=device
    )
    drop, attention = nn.Dropout(0.5), nn.DotProductAttention(2, 16, attention_dropout=0.5)
    good = tensor(np.ones((4, 2, 32), np.float32), device=device)
    layer(good)  # the state exists from now on
    q = tensor(np.ones((4, 2, 2, 16), np.float32), device=device)
    before = nn.get_rng_state()
    for call in (
        lambda: drop(tensor(np.ones((3, 4), np.int32), device=device)),
        lambda: attention(q, q, tensor(np.ones((5, 2, 2, 16), np.float32), device=device)),
        lambda: attention(q, q, q, core_attention_bias_type="post_scale_bias"),
        lambda: layer(tensor(np.ones((4, 2, 31), np.float32), device=device)),
    ):
        with pytest.raises(Fp8kitError):
            call()
        after = nn.get_rng_state()
        assert {name: value.tolist() for name, value in after.items()} == {
            name: value.tolist() for name, value in before.items()
        }
    drop(good)
    assert nn.get_rng_state()[f"device.{good.device}"].tolist() != before[f"device.{good.device}"].tolist()


def test_rng_state_round_trip(device, tmp_path):
    x = tensor(np.ones((64, 8), np.float32), device=device)
    drop = nn.Dropout(0.5)
    drop(x)
    nn.random.host_generator().standard_normal(3, np.float32)
    serialization.save(tmp_path / "rng", nn.get_rng_state())

    def draws():
        return f64(drop(x)), f64(drop(x)), f64(nn.Linear(5, 3, device="cpu").weight)

    before = draws()
    assert not np.array_equal(before[0], before[1])
    nn.manual_seed(7)
    other = draws()
    assert not np.array_equal(before[2], other[2])
    nn.set_rng_state(serialization.read(tmp_path / "rng")[0])
    for a, b in zip(before, draws(), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(CheckpointError, match=r"host\.key"):
        nn.set_rng_state({k: v for k, v in nn.get_rng_state().items() if k != "host.key"})
    with pytest.raises(CheckpointError, match="surprise"):
        nn.set_rng_state(nn.get_rng_state() | {"surprise": np.zeros(2)})
    with pytest.raises(Fp8kitError, match="seed"):
        nn.manual_seed(-1)


def test_dropout_in_a_layer_follows_train_and_eval(device):
    layer = nn.TransformerLayer(32, 48, 4, hidden_dropout=0.2, attention_dropout=0.2, device=device)
    x = tensor(draw(1, (6, 2, 32), "float32"), device=device)
    nn.manual_seed(5)
    first = f64(layer(x))
    second = f64(layer(x))
    nn.manual_seed(5)
    np.testing.assert_array_equal(f64(layer(x)), first)
    assert not np.array_equal(first, second)
    layer.eval()
    np.testing.assert_array_equal(f64(layer(x)), f64(layer(x)))


def test_init_methods_fill_the_weights():
    def fill(array):
        array[...] = np.arange(array.size).reshape(array.shape)

    linear = nn.Linear(3, 2, init_method=fill, params_dtype="bfloat16", device="cpu")
    np.testing.assert_array_equal(f64(linear.weight), [[0, 1, 2], [3, 4, 5]])
    np.testing.assert_array_equal(f64(linear.bias), [0, 0])
    with pytest.raises(FormatError, match="params_dtype"):
        nn.Linear(3, 2, params_dtype="int32", device="cpu")
