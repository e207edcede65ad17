"""Unit scaling: every operation's output and gradients have a size near 1 where its inputs have, the factors
are the papers', and a small model of such operations trains with casts that have no scales."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import nn, optim
from fp8kit.arrays import CPU
from fp8kit.backends import dispatch
from fp8kit.backends.protocol import KERNELS, signature
from fp8kit.errors import ArgumentError, Fp8kitError, ShapeError
from fp8kit.layers import unit_scaling as rules
from fp8kit.models import text
from fp8kit.nn import unit_scaling as us
from fp8kit.recipes import NAMED
from fp8kit.testing import assert_same_bits, relative_error

STATIC = NAMED["static"].recipe
ROWS, K, N, HEADS, DIM, CLASSES = 256, 128, 192, 4, 32, 64


def normal(seed, *shape):
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return fk.tensor(values, requires_grad=True, device="cpu")


def size(values):
    """Root of the mean square."""
    return math.sqrt(float((values.numpy().astype(np.float64) ** 2).mean()))


def linear(constraint, **options):
    layer = us.Linear(K, N, device="cpu", constraint=constraint, **options)
    x = normal(0, ROWS, K)
    return layer(x), {"x": x, "weight": layer.weight, "bias": layer.bias}


def attention(causal, **options):
    layers = [normal(i, 2, 64, HEADS, DIM) for i in range(3)]
    return us.attention(*layers, causal=causal, **options), {"v": layers[2]}


def joined(constraint):
    x = normal(0, ROWS, K)
    branch, skip = us.residual_split(x, 0.5)
    return us.residual_add(branch, skip, 0.5), {"x": x}


def function(call, *shapes):
    """An operation on normal arrays."""

    def made(constraint):
        arrays = [normal(i, *shape) for i, shape in enumerate(shapes)]
        return call(*arrays, constraint=constraint), {f"input {i}": array for i, array in enumerate(arrays)}

    return made


def normed(constraint):
    x, weight, bias = normal(0, ROWS, K), normal(1, K), normal(2, K)
    return us.norm(x, weight, bias), {"x": x, "weight": weight, "bias": bias}


def embedded(constraint):
    table, ids = normal(0, CLASSES, K), np.random.default_rng(1).integers(0, CLASSES, (4, 64))
    return us.embedding(fk.tensor(ids, device="cpu"), table), {"table": table}


OPERATIONS = {
    "linear": linear,
    **{
        f"{name} of {mult} x": function(partial(getattr(us, name), mult=mult), (ROWS, width))
        for name, width in (("gelu", K), ("silu", K), ("silu_glu", 2 * K), ("softmax", K))
        for mult in (0.25, 1.0, 4.0)
        # softmax's own factors of output and gradient are further apart than 2 at other multipliers
        if name != "softmax" or mult == 1
    },
    "matmul": function(us.matmul, (4, ROWS // 4, K), (K, N)),
    "dropout": function(lambda x, constraint: us.dropout(x, 0.4), (ROWS, K)),
    "add": function(us.add, (ROWS, K), (ROWS, K)),
    "residual": joined,
    "norm": normed,
    "embedding": embedded,
}


@pytest.mark.parametrize("constraint", [rules.OUTPUT, None])
@pytest.mark.parametrize("name", OPERATIONS)
def test_sizes_stay_near_one(name, constraint):
    y, inputs = OPERATIONS[name](constraint)
    y.backward(np.random.default_rng(9).standard_normal(y.shape).astype(np.float32))
    sizes = {"y": size(y)} | {key: size(value.grad) for key, value in inputs.items()}
    assert all(0.5 <= found <= 2 for found in sizes.values()), sizes


@pytest.mark.parametrize("options", [{}, {"mult": 2.0}, {"dropout_p": 0.3}], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_the_size_of_attention(causal, options):
    y, inputs = attention(causal, **options)
    y.backward(np.random.default_rng(9).standard_normal(y.shape).astype(np.float32))
    sizes = {"y": size(y)} | {key: size(value.grad) for key, value in inputs.items()}
    assert all(0.5 <= found <= 2 for found in sizes.values()), sizes


def test_the_size_of_the_losss_gradient():
    logits = normal(0, ROWS, CLASSES)
    small = fk.tensor(logits.numpy() * 0.01, requires_grad=True, device="cpu")  # as a readout's at the start
    targets = fk.tensor(np.random.default_rng(1).integers(0, CLASSES, ROWS), device="cpu")
    loss = us.cross_entropy(small, targets)
    assert float(loss.numpy()[0]) == pytest.approx(math.log(CLASSES), rel=1e-2)  # a mean
    loss.backward()
    assert 0.5 <= size(small.grad) <= 2


def test_the_size_of_the_squared_errors_gradient():
    x, target = normal(0, ROWS, K), normal(1, ROWS, K)
    loss = us.mse(x, target)
    difference = x.numpy().astype(np.float64) - target.numpy()
    assert float(loss.numpy()[0]) == pytest.approx((difference**2).mean(), rel=1e-6)
    loss.backward()
    assert relative_error(x.grad.numpy(), difference * 2 / math.sqrt(8)) < 4 * 2.0**-24
    assert_same_bits("dtarget", target.grad.numpy(), -x.grad.numpy())
    assert 0.9 <= size(x.grad) <= 1.1


def test_a_multiplier_is_that_of_the_functions_argument():
    """f(m x) / m, but softmax(m x), against float64: values, and gradients by central differences."""
    m, x = 3.0, np.random.default_rng(0).standard_normal((8, 16))

    def sigmoid(v):
        return 1 / (1 + np.exp(-v))

    def soft(v):
        terms = np.exp(v)
        return terms / terms.sum(1, keepdims=True)

    exact = {
        "silu": lambda v: v * sigmoid(m * v),
        "silu_glu": lambda v: v[:, :8] * sigmoid(m * v[:, :8]) * v[:, 8:],
        "softmax": lambda v: soft(m * v),
    }
    for name, f in exact.items():
        given = fk.tensor(x.astype(np.float32), requires_grad=True, device="cpu")
        y = getattr(us, name)(given, mult=m)
        scale = (
            rules.softmax_factors(16, mult=m).output
            if name == "softmax"
            else rules.activation_factors("swiglu" if "glu" in name else "silu", mult=m).output
        )
        assert relative_error(y.numpy(), f(x) * scale) < 16 * 2.0**-24  # a few roundings of float32
        g = np.random.default_rng(1).standard_normal(y.shape)
        y.backward(g.astype(np.float32))
        step, slope = 1e-6, np.zeros_like(x)
        for i, j in np.ndindex(*x.shape):
            moved = np.zeros_like(x)
            moved[i, j] = step
            slope[i, j] = ((f(x + moved) - f(x - moved)) * g).sum() / (2 * step)
        assert relative_error(given.grad.numpy(), slope * scale) < 16 * 2.0**-24


def test_the_factors_of_learning_rates():
    """u-muP's, and that with them a change of all weights by Adam's step moves outputs alike at every
    width."""
    assert us.learning_rate_factor("hidden", 1024) == 1 / 32
    assert us.learning_rate_factor("embedding", 64, branches=4) == 1 / 16
    assert [us.learning_rate_factor(role, 1024) for role in ("output", "bias", "norm")] == [1.0] * 3
    moved = []
    for width in (64, 1024):
        layer, x = us.Linear(width, 32, bias=False, device="cpu"), normal(0, 16, width)
        before = layer(x).numpy()
        step = 0.1 * us.learning_rate_factor("hidden", width)
        # Adam's first step along a gradient that x gives: its sign
        values = layer.weight.numpy() + np.float32(step) * np.sign(x.numpy()[:1])
        layer.load_state_dict({"weight": values.astype(np.float32)})
        moved.append(np.abs(layer(x).numpy() - before)[0].mean())
    assert moved[0] == pytest.approx(moved[1], rel=0.15)
    x = normal(0, 4, 8)
    assert us.dropout(x, 0.5, training=False) is x
    with pytest.raises(ArgumentError, match="role: got 'weight', expected one of hidden"):
        us.learning_rate_factor("weight", 64)
    with pytest.raises(ArgumentError, match="fan_in: got 0"):
        us.learning_rate_factor("hidden", 0)


def test_readouts_are_smaller():
    y, _ = linear(rules.OUTPUT, readout=True)
    assert size(y) == pytest.approx(K**-0.5, rel=0.2)


def test_the_factors_are_the_papers():
    """Two worked out by hand, and that without a constraint gradients have their own."""
    assert rules.linear_factors(64, 16, 100, constraint=None) == (1 / 8, 1 / 4, 1 / 10)
    assert rules.linear_factors(64, 16, 100) == (1 / 8, 1 / 8, 1 / 10)
    output, gradient, _ = rules.activation_factors("silu", None)
    high = math.sqrt(2 / (1 - 1 / math.pi))
    assert output == pytest.approx(math.sqrt(2 * high))
    assert gradient == pytest.approx(math.sqrt(2 * math.sqrt(2)))
    assert rules.residual_factors(1.0) == pytest.approx((2**-0.5, 2**-0.5))
    spread = math.sqrt(math.log(64) / 64)
    share = 1 / (1 + 4 * 32)
    assert rules.attention_factor(32, 64, True) == pytest.approx(1 / spread ** (1 - share))


def test_one_direction_only():
    x, g = normal(0, 4, 8), np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32)
    y = us.scale_fwd(x, 3.0)
    y.backward(g)
    assert_same_bits("y", y.numpy(), x.numpy() * np.float32(3))
    assert_same_bits("dx", x.grad.numpy(), g)
    x.grad = None
    y = us.scale_bwd(x, 3.0)
    y.backward(g)
    assert_same_bits("y", y.numpy(), x.numpy())
    assert_same_bits("dx", x.grad.numpy(), g * np.float32(3))


def test_a_linear_layer_in_fp8():
    """By the static recipe as near as by scales of the tensor itself: its operands have a size of 1."""
    nn.manual_seed(0)
    layer = us.Linear(K, N, device="cpu")
    x = normal(0, ROWS, K)
    g, found = np.random.default_rng(2).standard_normal((ROWS, N)).astype(np.float32), {}
    for name, recipe in (("high", None), ("static", STATIC), ("current", fk.recipe.Float8CurrentScaling())):
        x.grad = None
        layer.zero_grad()
        with fk.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(x)
        y.backward(g)
        found[name] = [y.numpy(), x.grad.numpy(), layer.weight.grad.numpy()]
    for exact, static, current in zip(*found.values(), strict=True):
        assert relative_error(static, exact) < 1.2 * relative_error(current, exact)


def test_casts_without_scales_take_no_amax(monkeypatch):
    """No kernel of a step under "static" reads a tensor for its amax; under "current" some do.
    (``scale_from_amax`` writes the constant where a cast reads it.)"""
    kernels, taken = dispatch.kernels(CPU), []

    def spied(name):
        own = getattr(kernels, name)

        def call(*arguments):
            given = signature(name).bind(*arguments).arguments
            fused = getattr(given.get("cast"), "amax", None)
            if name in ("amax", "update_delayed_") or fused is not None:
                taken.append(name)
            return own(*arguments)

        return call

    calls = {name: spied(name) for name in KERNELS if not name.endswith("workspace")}
    for name, call in calls.items():
        monkeypatch.setattr(kernels, name, call, raising=False)
    layer, x = us.Linear(K, N, device="cpu"), normal(0, ROWS, K)
    g = np.random.default_rng(2).standard_normal((ROWS, N)).astype(np.float32)
    for recipe, wanted in ((STATIC, False), (fk.recipe.Float8CurrentScaling(), True)):
        taken.clear()
        with fk.autocast(recipe=recipe):
            y = layer(x)
        y.backward(g)
        assert bool(taken) == wanted, taken


def test_what_is_refused():
    with pytest.raises(ArgumentError, match="to_output_scale"):
        us.Linear(K, N, device="cpu", constraint="gmean")
    for wrong in (lambda x: us.gelu(x, mult=0.0), lambda x: us.dropout(x, 1.0), lambda x: us.matmul(x, x)):
        with pytest.raises(Fp8kitError, match=r"mult|p: got|left and right"):
            wrong(normal(0, 4, 8))
    for call in (us.gelu, us.softmax):
        with pytest.raises(ShapeError, match="x: got no dimension, expected at least one"):
            call(fk.tensor(np.float32(3)))
        assert call(fk.tensor(np.ones((2, 0), np.float32))).shape == (2, 0)
    with pytest.raises(Fp8kitError, match="expected an even number"):
        us.silu_glu(normal(0, 4, 7), mult=2.0)
    with pytest.raises(Fp8kitError, match="shape"):
        us.mse(normal(0, 4, 8), normal(0, 8, 4))
    with pytest.raises(Fp8kitError, match="tau"):
        us.residual_split(normal(0, 4, 8), 0.0)
    with pytest.raises(Fp8kitError):
        us.scale_fwd(normal(0, 4, 8), math.nan)


class Block(nn.Module):
    """Norm, attention and a gated MLP, each joined to its residual."""

    def __init__(self, hidden, heads):
        options = {"bias": False, "device": "cpu"}
        self.heads = heads
        self.projections = nn.ModuleList(us.Linear(hidden, hidden, **options) for _ in range(3))
        self.out = us.Linear(hidden, hidden, **options)
        self.up, self.down = (
            us.Linear(hidden, 4 * hidden, **options),
            us.Linear(2 * hidden, hidden, **options),
        )
        self.norms = nn.ModuleList(nn.RMSNorm(hidden, device="cpu") for _ in range(2))

    def forward(self, x):
        branch, skip = us.residual_split(x, 0.5)
        normed = us.norm(branch, self.norms[0].weight)
        layers = [layer(normed).reshape(*x.shape[:2], self.heads, -1) for layer in self.projections]
        x = us.residual_add(self.out(us.attention(*layers)), skip, 0.5)
        branch, skip = us.residual_split(x, 0.5)
        inner = us.silu_glu(self.up(us.norm(branch, self.norms[1].weight)))
        return us.residual_add(self.down(inner), skip, 0.5)


class Model(nn.Module):
    """A GPT over bytes of such blocks."""

    def __init__(self, hidden=64, heads=2, blocks=2):
        self.table = nn.Embedding(256, hidden, init_method=nn.normal_init(std=1.0), device="cpu")
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(blocks))
        self.last = nn.RMSNorm(hidden, device="cpu")
        self.head = us.Linear(hidden, 256, bias=False, readout=True, device="cpu")

    def forward(self, ids):
        x = us.embedding(ids, self.table.weight)
        for block in self.blocks:
            x = block(x)
        with fk.autocast(enabled=False):
            return self.head(us.norm(x, self.last.weight))


def train(model, optimizer, corpus, recipe, steps):
    """The losses of so many steps."""
    losses = []
    for step in range(steps):
        ids, targets = (fk.tensor(part, device="cpu") for part in text.batch(corpus.train, 8, 32, 0, step))
        with fk.autocast(enabled=recipe is not None, recipe=recipe):
            loss = us.cross_entropy(model(ids), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.numpy()[0]))
    return losses


def losses_of(corpus, recipe, steps=40):
    nn.manual_seed(0)
    model = Model()
    hidden = [p for name, p in model.named_parameters() if "blocks" in name and len(p.shape) == 2]
    known = {id(p) for p in hidden}
    others = [p for p in model.parameters() if id(p) not in known]
    groups = [{"params": hidden, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.0}]
    return train(model, optim.AdamW(groups, lr=0.05, betas=(0.9, 0.95)), corpus, recipe, steps)


@pytest.mark.programs
def test_a_model_trains_with_casts_without_scales():
    """As in high precision, loss by loss, where a model of the usual kind has no gradients left
    (tests/models/test_named_recipes.py)."""
    corpus = text.standard_library(max_bytes=2 << 20)
    high, static = losses_of(corpus, None), losses_of(corpus, STATIC)
    assert high[0] == pytest.approx(math.log(256), rel=0.05)
    assert static[-1] < static[0] - 1.5
    assert max(abs(np.subtract(high, static))) < 0.1


def group_of(name, parameter, rate):
    """A parameter of ``Model`` with u-muP's learning rate: two blocks have four residual branches."""
    fan_in, branches = parameter.shape[-1], 1
    role = next((role for part, role in ROLES.items() if part in name), "hidden")
    if role == "hidden":
        branches = 4
    factor = us.learning_rate_factor(role, fan_in, branches)
    return {"params": [parameter], "lr": rate * factor, "weight_decay": 0.0}


ROLES = {"norms": "norm", "last": "norm", "table": "embedding", "head": "output"}


@pytest.mark.programs
def test_the_best_learning_rate_serves_wider_models():
    """Of rates by powers of two the best one for eight times the width is at most one step away."""
    corpus, best = text.standard_library(max_bytes=2 << 20), []
    for width in (32, 256):
        found = {}
        for power in range(-3, 2):
            nn.manual_seed(0)
            model = Model(hidden=width)
            groups = [group_of(name, p, 2.0**power) for name, p in model.named_parameters()]
            optimizer = optim.AdamW(groups, lr=2.0**power, betas=(0.9, 0.95))
            losses = train(model, optimizer, corpus, None, steps=30)
            found[power] = np.mean(losses[-5:])
        best.append(min(found, key=found.get))
    assert abs(best[0] - best[1]) <= 1
    assert -3 < min(best) <= max(best) < 1  # within what was tried
