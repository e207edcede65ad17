"""The inspector for PyTorch where a layer's operands are not plain parameters: gradients that are added to
``main_grad``, weights and inputs that are held in FP8, weights of which ranks have parts."""

from __future__ import annotations

import fp8kit_torch as te
import numpy as np
import pytest
import torch

from fp8kit.collectives import FakeCollectives
from fp8kit.numerics import tensor_statistics
from tests.support.inspected import (
    HIDDEN,
    INNER,
    OUT,
    RECIPES,
    TWIN_STATS,
    W1,
    W2,
    W3,
    G,
    X,
    assert_product,
    by_name,
    logged,
    section,
)
from tests.support.tensors import assert_tensor_close

PLAIN = ("max", "std", "l2_norm")
CONFIG = section(logged(PLAIN) | {"LogFp8TensorStats": TWIN_STATS})
KIND = {"params_dtype": torch.float32, "device": "cpu"}


def linear(**options):
    made = te.Linear(HIDDEN, OUT, bias=False, **KIND, **options)
    with torch.no_grad():
        made.weight.copy_(torch.tensor(W3))
    return made


def step(net, name, x=X, g=G):
    """y and the input's gradient."""
    x = torch.tensor(x, requires_grad=True) if isinstance(x, np.ndarray) else x
    with te.autocast(enabled=RECIPES[name] is not None, recipe=RECIPES[name]):
        y = net(x)
    y.backward(torch.tensor(g))
    return [y.detach().clone()] + ([] if x.grad is None else [x.grad.clone()])


# --- main_grad ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["high precision", "current", "delayed", "block", "mxfp8"])
def test_a_gradient_that_is_added_is_seen_alone(name, dtype):
    """wgrad is this batch's, whatever lies in ``main_grad``, which has the bits that it has unseen."""
    kind = {"params_dtype": dtype, "device": "cpu", "fuse_wgrad_accumulation": True, "bias": False}
    x, g = (torch.tensor(each, dtype=dtype).float().numpy() for each in (X, G))
    found, sums = [], []
    for look in (True, False):
        torch.manual_seed(0)
        net = te.Linear(HIDDEN, OUT, **kind)
        net.weight.main_grad = torch.zeros(OUT, HIDDEN)
        with te.inspect(net, CONFIG if look else {}) as log:
            for _ in range(3):
                with te.autocast(enabled=RECIPES[name] is not None, recipe=RECIPES[name]):
                    y = net(torch.tensor(x, dtype=dtype, requires_grad=True))
                y.backward(torch.tensor(g, dtype=dtype))
                log.step()
        found.append([by_name([row for row in log.rows() if row["step"] == i]) for i in range(3)])
        sums.append(net.weight.main_grad)
    assert torch.equal(*sums)
    steps = found[0]
    own = {stat: steps[1]["Linear", "wgrad", stat] for stat in PLAIN}
    whole = g.T.astype(np.float64) @ x
    cast = 0.0 if RECIPES[name] is None else 0.1  # of both operands, E4M3 and E5M2: 2^-4 and 2^-3 at most
    assert own["l2_norm"] == pytest.approx(np.linalg.norm(whole), rel=cast + 1e-5)
    assert steps[1]["Linear", "wgrad", "cosine"] > 0.99
    if name != "delayed":  # whose scales are those of the first step from the second on
        assert repr(steps[0]) == repr(steps[1]) == repr(steps[2])


def test_segments_that_are_added_are_seen_alone():
    net = te.LayerNormLinear(
        HIDDEN, OUT, bias=False, parameters_split=("q_", "k_", "v_"), fuse_wgrad_accumulation=True, **KIND
    )
    for weight in net.parameters():
        weight.main_grad = torch.full(weight.shape, 100.0)
    with te.inspect(net, CONFIG) as log:
        for _ in range(2):
            step(net, "current")
            log.step()
    one, two = ([row["value"] for row in log.rows() if row["step"] == i] for i in range(2))
    assert one == two
    made = np.concatenate([getattr(net, f"{part}_weight").main_grad.numpy() for part in "qkv"]) - 100
    # of two steps, with the rounding of numbers near 100
    norm = by_name(log.rows())["LayerNormLinear", "wgrad", "l2_norm"]
    assert np.linalg.norm(made.astype(np.float64)) == pytest.approx(2 * norm, rel=1e-4)


# --- held in FP8 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["current", "delayed", "block", "mxfp8"])
def test_weights_that_are_held_in_fp8_are_seen_by_their_values(name):
    """And the GEMMs beside themselves in high precision multiply these."""
    with te.quantized_model_init(recipe=RECIPES[name]):
        net = te.Linear(HIDDEN, 128, bias=False, **KIND)
    g = np.random.default_rng(1).standard_normal((len(X), 128)).astype(np.float32)
    plain = step(net, name, X, g)
    wgrad, net.weight.grad = net.weight.grad, None
    with te.inspect(net, CONFIG) as log:
        seen = step(net, name, X, g)
        log.step()
    if name != "delayed":  # whose scales change from step to step
        assert all(map(torch.equal, [*plain, wgrad], [*seen, net.weight.grad]))
    found = by_name(log.rows())
    weight = net.weight.dequantize().detach() if hasattr(net.weight, "dequantize") else net.weight.detach()
    want = tensor_statistics(weight.numpy(), PLAIN, tensor="weight")
    assert {stat: found["Linear", "weight", stat] for stat in PLAIN} == want
    for tensor in ("output", "dgrad", "wgrad"):
        assert 0.995 < found["Linear", tensor, "cosine"] <= 1.0 + 1e-12, tensor


@pytest.mark.parametrize("feature", ["DisableFP8GEMM", "FakeQuant"])
def test_features_change_layers_whose_weight_is_held_in_fp8(feature):
    """A GEMM in high precision multiplies the weight's values."""
    with te.quantized_model_init(recipe=RECIPES["current"]):
        net = te.Linear(HIDDEN, 128, bias=False, **KIND)
    options = {"enabled": True, "gemms": ["fprop", "dgrad", "wgrad"]}
    if feature == "FakeQuant":
        options |= {"tensors": ["gradient"], "quant_format": "FP8E5M2", "gemms": ["wgrad", "fprop"]}
    with te.inspect(net, section({feature: options})):
        y, dx = step(net, "current", X, np.ones((len(X), 128), np.float32))
    values = net.weight.dequantize().detach().numpy()
    assert_product(y, X, values.T)
    if feature == "DisableFP8GEMM":
        assert_product(dx, np.ones((len(X), 128)), values)


@pytest.mark.parametrize("change", [{}, {"DisableFP8Layer": {"enabled": True}}], ids=["seen", "changed"])
def test_inputs_that_are_in_fp8_are_seen_by_their_values(change):
    before, net = te.Linear(HIDDEN, HIDDEN, **KIND), linear()
    with te.autocast(recipe=RECIPES["current"]), torch.no_grad():
        x = before(torch.tensor(X), fp8_output=True)
    values = x.dequantize().detach()
    plain = step(net, "current", x)
    with te.inspect(net, section(logged(PLAIN) | {"LogFp8TensorStats": TWIN_STATS} | change)) as log:
        seen = step(net, "current", x)
        log.step()
    found = by_name(log.rows())
    want = tensor_statistics(values.numpy(), PLAIN)
    assert {stat: found["Linear", "activation", stat] for stat in PLAIN} == want
    for tensor in ("output", "wgrad"):
        assert found["Linear", tensor, "cosine"] > 0.995
    if change:
        assert_product(seen[0], values.numpy(), W3.T)
    else:
        assert torch.equal(plain[0], seen[0])


# --- parts of a weight --------------------------------------------------------------------------------------


def mine(array, ranks, dim=0):
    return torch.tensor(array).tensor_split(ranks.size, dim)[ranks.rank].contiguous()


def mlp(ranks=None, sequence=False):
    """An MLP, or a rank's part of it: fc1's output features, fc2's input features."""
    more = {} if ranks is None else {"tp_group": ranks, "set_parallel_mode": True}
    made = te.LayerNormMLP(HIDDEN, INNER, sequence_parallel=sequence, **more, **KIND)
    with torch.no_grad():
        made.fc1_weight.copy_(torch.tensor(W1) if ranks is None else mine(W1, ranks))
        made.fc2_weight.copy_(torch.tensor(W2) if ranks is None else mine(W2, ranks, 1))
    return made


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("name", ["high precision", "current", "mxfp8"])
def test_ranks_that_share_weights_see_their_part(name, sequence):
    """Of a weight, and of what the rank's GEMM makes of it; together that is the whole layer's."""
    how, g = RECIPES[name], np.random.default_rng(1).standard_normal(X.shape).astype(np.float32)

    def train(net, ranks=None):
        own = (lambda a: mine(a, ranks)) if ranks and sequence else torch.tensor
        x = own(X).requires_grad_()
        group = {} if ranks is None else {"amax_reduction_group": ranks}
        with te.autocast(enabled=how is not None, recipe=how, **group):
            y = net(x)
        y.backward(own(g))
        made = {"y": y.detach().clone(), "x": x.grad.clone()}
        made |= {key: p.grad.clone() for key, p in net.named_parameters()}
        net.zero_grad()
        return made

    net = mlp()
    with te.inspect(net, CONFIG) as log:
        train(net)
        log.step()
    want = by_name(log.rows())
    comm = FakeCollectives(2)
    nets = torch.nn.ModuleList([mlp(ranks, sequence) for ranks in comm.ranks])
    plain = comm.run(lambda ranks: train(nets[ranks.rank], ranks))
    with te.inspect(nets, CONFIG, whole_weights=False) as log:
        seen = comm.run(lambda ranks: train(nets[ranks.rank], ranks))
        log.step()
    for one, other in zip(plain, seen, strict=True):
        for key, value in one.items():
            if name == "current" and sequence and key == "fc2_bias":
                # a sum in another order, since what is gathered is not cast before
                apart = len(X) * 2.0**-24 * np.abs(g).sum(0).max()
                assert_tensor_close(key, value, other[key], apart)
            else:
                assert torch.equal(value, other[key]), key
    found = by_name(log.rows())
    assert len(found) == 2 * len(want)
    rel = 1e-5 if name == "high precision" else 2e-2  # codes between two others go this way or that
    parts = {
        "fc1": ("weight", "output", "gradient", "wgrad"),
        "fc2": ("weight", "activation", "dgrad", "wgrad"),
    }
    for fc, split in parts.items():
        norms = {
            tensor: [found[f"{rank}.{fc}", tensor, "l2_norm"] for rank in range(2)]
            for tensor in ("activation", "weight", "output", "gradient", "dgrad", "wgrad")
        }
        whole = {tensor: want[f"LayerNormMLP.{fc}", tensor, "l2_norm"] for tensor in norms}
        for tensor in split:
            assert np.hypot(*norms[tensor]) == pytest.approx(whole[tensor], rel=rel), (fc, tensor)
        for tensor in {"activation", "gradient"} - set(split):  # of which each rank has all
            assert norms[tensor] == pytest.approx([whole[tensor]] * 2, rel=rel), (fc, tensor)
        for tensor in ("output", "dgrad", "wgrad"):
            assert all(found[f"{rank}.{fc}", tensor, "cosine"] > 0.99 for rank in range(2))
