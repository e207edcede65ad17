"""FakeQuant of what GEMMs make: output, dgrad and wgrad, rounded in each frontend as by hand."""

from __future__ import annotations

import fp8kit_jax as fj
import fp8kit_torch as te
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import fp8kit as fk
from fp8kit import nn
from fp8kit.collectives import FakeCollectives
from fp8kit.formats import E4M3, E5M2
from fp8kit.testing import assert_close, assert_same_bits
from tests.support.inspected import HIDDEN, OUT, RECIPES, W3, G, X, by_name, logged, section

RESULTS = {"output": "fprop", "dgrad": "dgrad", "wgrad": "wgrad"}
FORMATS = {
    "FP8E4M3": (E4M3, "tensor", "exact"),
    "FP8E5M2": (E5M2, "tensor", "exact"),
    "MXFP8E4M3": (E4M3, "mx_1x32", "te"),
    "MXFP8E5M2": (E5M2, "mx_1x32", "te"),
}
KIND = {"params_dtype": torch.float32, "device": "cpu"}
BIAS = np.linspace(-1, 1, OUT, dtype=np.float32)


def fake(form, tensors=tuple(RESULTS), gemms=("fprop", "dgrad", "wgrad"), **more):
    own = {"enabled": True, "gemms": list(gemms), "tensors": list(tensors), "quant_format": form}
    return section({"FakeQuant": own} | more)


def rounded(array, form):
    """The values of a matrix in a format, with scales of ``fk.quantize``."""
    format, granularity, rule = FORMATS[form]
    return np.asarray(fk.quantize(np.asarray(array), format, None, granularity, scale_rule=rule).dequantize())


def native(config, recipe=None, device="cpu"):
    """y, dx, dW and db of a Linear, by fp8kit.nn."""
    layer = nn.Linear(HIDDEN, OUT, params_dtype=fk.float32, device=device)
    layer.write("weight", W3)
    layer.write("bias", BIAS)
    x = fk.tensor(X, device=device)
    x.requires_grad = True
    with fk.inspect(layer, config) as log:
        with fk.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(x)
        y.backward(fk.tensor(G, device=device))
        log.step()
    return [np.array(a.numpy()) for a in (y, x.grad, layer.weight.grad, layer.bias.grad)], log.rows()


def in_jax(config, residual=None, transform=lambda f: f, x=X):
    """The same by fj.dense, whose kernel is (in, out)."""

    def call(x, kernel, bias):
        return fj.dense(x, kernel, bias, residual=residual, name="Linear")

    def step(x, kernel, bias):
        y, back = jax.vjp(call, x, kernel, bias)
        return y, *back(jnp.asarray(G))

    with fj.inspect(config) as log:
        y, dx, dw, db = transform(jax.jit(step))(jnp.asarray(x), jnp.asarray(W3.T), jnp.asarray(BIAS))
        log.step()
    return [np.asarray(a) for a in (y, dx, dw.T, db)], log.rows()


@pytest.mark.parametrize("form", FORMATS)
def test_results_are_rounded_in_every_frontend(form):
    """GEMMs in high precision, then the rounding, also under a recipe; a bias' gradient stays as it is. What
    is logged is what the layer goes on with."""
    looked_at = logged(["l2_norm", "max"], RESULTS)
    plain, _ = native({})
    want = [rounded(plain[0], form), rounded(plain[1], form), rounded(plain[2], form), plain[3]]
    assert not np.array_equal(want[0], plain[0])
    ways = {
        "native": native(fake(form, **looked_at)),
        "under a recipe": native(fake(form, **looked_at), RECIPES["current"]),
        "unseen": native(fake(form)),
        "JAX": in_jax(fake(form, **looked_at)),
    }
    layer = te.Linear(HIDDEN, OUT, **KIND)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(W3))
        layer.bias.copy_(torch.tensor(BIAS))
    x = torch.tensor(X, requires_grad=True)
    with te.inspect(layer, fake(form, **looked_at)) as log:
        y = layer(x)
        y.backward(torch.tensor(G))
        log.step()
    own = [y.detach(), x.grad, layer.weight.grad, layer.bias.grad]
    ways["PyTorch"] = [each.numpy() for each in own], log.rows()
    for name, (got, rows) in ways.items():
        for part, one, other in zip(("y", "dx", "dW", "db"), got, want, strict=True):
            assert_same_bits(f"{name} {part}", one, other)
        found = by_name(rows)
        for tensor, values in zip(RESULTS, want, strict=False) if rows else ():
            norm = np.linalg.norm(values.astype(np.float64))
            assert found["Linear", tensor, "l2_norm"] == pytest.approx(norm, rel=1e-6), name
            assert found["Linear", tensor, "max"] == values.max(), name


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMATS)
def test_results_are_rounded_on_a_gpu(form):
    plain, _ = native({}, device="cuda")
    for _ in range(2):  # the second call from recordings, where there are some
        got, _ = native(fake(form), device="cuda")
        for part, one, other in zip(("y", "dx", "dW"), got, plain[:3], strict=False):
            assert_same_bits(part, one, rounded(other, form))


def test_each_gemm_rounds_what_it_makes():
    """A result belongs to one GEMM; one that is not named computes as the recipe says."""
    plain, _ = native({})
    (y, dx, dw, _), _ = native(fake("FP8E4M3", ("output", "wgrad"), ("wgrad", "dgrad")))
    assert_same_bits("y", y, plain[0])  # fprop is not named
    assert_same_bits("dx", dx, plain[1])
    assert_same_bits("dW", dw, rounded(plain[2], "FP8E4M3"))


def test_operands_and_results_with_formats_of_their_own():
    structs = {
        "enabled": True,
        "gemms_struct": [
            {
                "gemm": "fprop",
                "tensors_struct": [
                    {"tensor": "activation", "quant_format": "FP8E4M3"},
                    {"tensor": "output", "quant_format": "FP8E5M2"},
                ],
            }
        ],
    }
    layer = nn.Linear(HIDDEN, OUT, bias=False, params_dtype=fk.float32, device="cpu")
    layer.write("weight", W3)
    plain = layer(fk.tensor(rounded(X, "FP8E4M3")))
    with fk.inspect(layer, section({"FakeQuant": structs})):
        y = layer(fk.tensor(X))
    assert_same_bits("y", y.numpy(), rounded(plain.numpy(), "FP8E5M2"))


def test_before_a_residual_is_added():
    residual = np.random.default_rng(0).standard_normal(G.shape).astype(np.float32)
    (plain, *_), _ = in_jax({})
    for config in (fake("FP8E4M3"), fake("FP8E4M3", **logged(["max"], ["output"]))):
        (y, *_), _ = in_jax(config, jnp.asarray(residual))
        assert_same_bits("y", y, rounded(plain, "FP8E4M3") + residual)


@pytest.mark.parametrize("parts", [None, ("q_", "k_", "v_")], ids=["one weight", "segments"])
def test_added_to_main_grad(parts):
    """What is added is rounded, by one scale for the whole weight, not the sum."""
    options = {"bias": False, "fuse_wgrad_accumulation": True, "parameters_split": parts, **KIND}
    before, made = {}, {}
    for config in ({}, fake("FP8E4M3")):
        torch.manual_seed(0)
        net = te.Linear(HIDDEN, OUT, **options)
        for i, (name, weight) in enumerate(net.named_parameters()):
            weight.main_grad = before[name] = torch.full(weight.shape, float(i))
            before[name] = before[name].clone()
        with te.inspect(net, config):
            net(torch.tensor(X, requires_grad=True)).backward(torch.tensor(G))
        made[bool(config)] = {name: weight.main_grad for name, weight in net.named_parameters()}
    whole = rounded(G.T @ X, "FP8E4M3")
    got = np.concatenate([(made[True][name] - before[name]).numpy() for name in before])
    # sums near 2 are rounded to 2^-22 of themselves
    assert_close("added", got, whole, "float32", np.abs(whole).max() * 2.0**-20)
    assert not all(torch.equal(made[True][name], made[False][name]) for name in before)


def test_over_devices_and_vmap_a_tensor_is_whole():
    """jit splits no call whose results are rounded, and vmap makes no further rows of its elements."""
    (want, *_), _ = in_jax(fake("FP8E4M3"))
    mesh = jax.make_mesh((4,), ("data",))
    split = jax.device_put(jnp.asarray(X), jax.NamedSharding(mesh, jax.P("data")))
    (y, *_), _ = in_jax(fake("FP8E4M3"), x=split)
    assert_same_bits("y", y, want)
    kernel = jnp.asarray(W3.T)
    with fj.inspect(fake("FP8E4M3", ["output"], ["fprop"])):
        each = jax.vmap(lambda x: fj.dense(x, kernel, name="Linear"))(jnp.stack([X, 100 * X]))
        alone = fj.dense(jnp.asarray(X), kernel, name="Linear")
    assert_same_bits("vmap", np.asarray(each[0]), np.asarray(alone))


@pytest.mark.parametrize("mode", ["column", "row"])
def test_ranks_share_the_scale_of_what_they_have_parts_of(mode):
    """Of a column's output and of both kinds' wgrad; a row's output is a term of a sum, with a scale of its
    own."""
    dim = 0 if mode == "column" else 1
    plain = {"y": X @ W3.T, "dW": G.T @ X}
    comm = FakeCollectives(2)

    def part(array, rank, along):
        return np.ascontiguousarray(np.array_split(array, 2, along)[rank])

    nets = torch.nn.ModuleList()
    for ranks in comm.ranks:
        more = {"tp_group": ranks, "parallel_mode": mode, "bias": False}
        nets.append(te.Linear(HIDDEN, OUT, **more, **KIND))
        with torch.no_grad():
            nets[-1].weight.copy_(torch.tensor(part(W3, ranks.rank, dim)))

    def train(ranks):
        x = torch.tensor(X if mode == "column" else part(X, ranks.rank, 1), requires_grad=True)
        y = nets[ranks.rank](x)
        y.backward(torch.tensor(part(G, ranks.rank, 1) if mode == "column" else G))
        return y.detach().numpy(), nets[ranks.rank].weight.grad.numpy()

    with te.inspect(nets, fake("FP8E4M3", ("output", "wgrad"), ("fprop", "wgrad"))):
        made = comm.run(train)
    # codes between two others go this way or that, where sums have another order
    wanted = rounded(plain["dW"], "FP8E4M3")
    whole = np.concatenate([w for _, w in made], dim)
    assert_close("dW", whole, wanted, "float32", 2.0**-3 * np.abs(wanted))
    assert len(np.unique(np.abs(whole))) <= 128  # values of one scale
    if mode == "column":
        y = np.concatenate([y for y, _ in made], 1)
        assert len(np.unique(np.abs(y))) <= 128
    else:
        terms = [part(X, rank, 1) @ part(W3, rank, 1).T for rank in range(2)]
        y, wanted = made[0][0], sum(rounded(term, "FP8E4M3") for term in terms)
        assert np.mean(y == wanted) > 0.9
