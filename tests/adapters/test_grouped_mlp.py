"""GroupedLinear on the native tape, and GroupedMLP in two frontends and by JAX's functions: the same bits as
layer by layer, under every kind of recipe."""

from __future__ import annotations

import fp8kit_torch as ft
import numpy as np
import pytest
import torch
from fp8kit_torch import grouped_mlp

import fp8kit as fk
from fp8kit.errors import ArgumentError, Fp8kitError, ShapeError
from fp8kit.nn import grouped as nn_grouped
from fp8kit.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    PerLayer,
)
from fp8kit.testing import assert_same_bits
from fp8kit.testing.compare import assert_close, sum_slack
from tests.support.combinations import combinations

E, H, F, SIZES = 3, 32, 24, [16, 0, 11]
M = sum(SIZES)
RNG = np.random.default_rng(2)
X, G = (RNG.standard_normal((M, H)).astype(np.float32) for _ in range(2))
P = RNG.random(M).astype(np.float32)
RECIPES = {
    "plain": None,
    "delayed": DelayedScaling(amax_history_len=2),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
}


def layers(**more):
    """The same GroupedMLP twice."""
    own, other = fk.nn.GroupedMLP(E, H, F, device="cpu", **more), ft.GroupedMLP(E, H, F, device="cpu", **more)
    values = {}
    for name, p in other.named_parameters():
        values[name] = RNG.standard_normal(p.shape).astype(np.float32) * 0.2
        with torch.no_grad():
            p.copy_(torch.from_numpy(values[name]))
    own.load_state_dict(values)
    return own, other


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("micro", [False, True], ids=["each", "microbatches"])
def test_frontends_agree(recipe, micro):
    own, other = layers()
    for step in range(3):
        first = step % 2 == 0 if micro else None
        x, p = (fk.tensor(v * 2.0**step, requires_grad=True, device="cpu") for v in (X, P))
        tx, tp = (torch.from_numpy(v * 2.0**step).requires_grad_() for v in (X, P))
        own.zero_grad()
        other.zero_grad()
        with fk.autocast(enabled=recipe != "plain", recipe=RECIPES[recipe]):
            y = own(x, SIZES, p, first)
        with ft.autocast(enabled=recipe != "plain", recipe=RECIPES[recipe]):
            ty = other(tx, SIZES, tp, first)
        y.backward(G)
        ty.backward(torch.from_numpy(G))
        assert_same_bits("y", y.numpy(), ty.detach().numpy())
        assert_same_bits("dx", x.grad.numpy(), tx.grad.numpy())
        assert_same_bits("dprobs", p.grad.numpy(), tp.grad.numpy())
        for name, parameter in other.named_parameters():
            part, _, leaf = name.partition(".")
            assert_same_bits(name, getattr(getattr(own, part), leaf).grad.numpy(), parameter.grad.numpy())


def test_values_and_gradients_in_float64():
    """Against torch's own operations, the probability of a row within the hidden activations."""
    _, layer = layers()
    x, p = (torch.from_numpy(v.copy()).requires_grad_() for v in (X, P))
    y = layer(x, SIZES, p)
    y.backward(torch.from_numpy(G))
    x64, p64 = (torch.from_numpy(v).double().requires_grad_() for v in (X, P))
    w = {name: q.detach().double().requires_grad_() for name, q in layer.named_parameters()}
    outs, start = [], 0
    for i, size in enumerate(SIZES):
        rows = slice(start, start + size)
        gate, up = (x64[rows] @ w[f"fc1.weight{i}"].T + w[f"fc1.bias{i}"]).chunk(2, -1)
        hidden = torch.nn.functional.silu(gate) * up * p64[rows, None]
        outs.append(hidden @ w[f"fc2.weight{i}"].T + w[f"fc2.bias{i}"])
        start += size
    want = torch.cat(outs)
    want.backward(torch.from_numpy(G).double())
    # three sums in a row, each over at most max(H, 2 F) terms of these sizes
    slack = 64 * sum_slack(float(want.detach().abs().max()), 2 * F + H)
    assert_close("y", y.detach().numpy(), want.detach().numpy(), "float32", slack)
    for name, got, true in (("dx", x, x64), ("dp", p, p64)):
        bound = 64 * sum_slack(float(true.grad.abs().max()), 2 * F + H)
        assert_close(name, got.grad.numpy(), true.grad.numpy(), "float32", bound)
    for name, q in layer.named_parameters():
        bound = 64 * sum_slack(float(w[name].grad.abs().max() + 1), 2 * F + H)
        assert_close(name, q.grad.numpy(), w[name].grad.numpy(), "float32", bound)


@pytest.mark.combinations  # test_a_padded_step_needs_nothing_of_the_host compiles one
def test_compiled_with_sizes_on_the_host():
    _, layer = layers(activation="gelu", bias=False)
    assert {n for n, _ in layer.named_parameters()} == {f"fc{j}.weight{i}" for j in (1, 2) for i in range(E)}
    call = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, p = torch.from_numpy(X), torch.from_numpy(P)
    with ft.autocast(recipe=RECIPES["current"]):
        assert_same_bits("y", call(x, SIZES, p).detach().numpy(), layer(x, SIZES, p).detach().numpy())


def test_a_native_layer_that_returns_its_biases_calibrates_and_is_saved():
    own = fk.nn.GroupedLinear(2, 8, 4, return_bias=True)
    with fk.no_grad(), fk.autocast(enabled=False, calibrating=True):
        y, biases = own(np.ones((3, 8), np.float32), [3, 0])
    assert y.shape == (3, 4)
    assert [b is getattr(own, f"bias{i}") for i, b in enumerate(biases)] == [True, True]
    again = fk.nn.GroupedLinear(2, 8, 4, return_bias=True)
    again.load_state_dict(own.state_dict())
    for name, array in own.state_dict().items():
        assert_same_bits(name, np.asarray(again.state_dict()[name]), np.asarray(array))


COUNTS = [9, 0, 7]  # tokens of each group, without padding
TOKENS = np.concatenate([np.arange(size) < count for size, count in zip(SIZES, COUNTS, strict=True)])


@pytest.mark.parametrize("recipe", RECIPES)
def test_padding_changes_no_scale(recipe):
    """With biases and without probabilities: results and gradients of tokens are those of tokens alone, in
    both frontends, with sizes on the host and on the device."""
    _, other = layers()
    with torch.no_grad():
        for i in range(E):
            # so that act(bias) is larger than what tokens give
            getattr(other.fc1, f"bias{i}").fill_(9)
            getattr(other.fc1, f"weight{i}").abs_().neg_()
    values = {name: p.detach().numpy() for name, p in other.named_parameters()}
    x, g = (np.where(TOKENS[:, None], v, np.float32(0)) for v in (np.abs(X), G))
    kind = {"enabled": recipe != "plain", "recipe": RECIPES[recipe]}

    def native(x, sizes, g, **more):
        leaf = fk.tensor(x, requires_grad=True, device="cpu")
        own = fk.nn.GroupedMLP(E, H, F, device="cpu")
        own.load_state_dict(values)
        with fk.autocast(**kind):
            y = own(leaf, sizes, **more)
        y.backward(g)
        return y.numpy(), leaf.grad.numpy(), own.fc2.weight0.grad.numpy(), own.fc1.weight2.grad.numpy()

    want = native(x[TOKENS], COUNTS, g[TOKENS])
    made = native(x, SIZES, g, tokens_per_expert=COUNTS)
    for a, b, rows in zip(made, want, (TOKENS, TOKENS, ..., ...), strict=True):
        slack = sum_slack(F * np.abs(b).max(), H + 2 * F)  # the same terms, by products of other shapes
        assert_close("padded", a[rows], b.astype(np.float64), "float32", slack)
    if recipe == "current":
        off = np.abs(native(x, SIZES, g)[0][TOKENS] - want[0]).max()
        assert off > sum_slack(F * np.abs(want[0]).max(), H + 2 * F)
    kinds = {"list": (SIZES, COUNTS), "tensor": (torch.tensor(SIZES), torch.tensor(COUNTS))}
    for sizes, counts in kinds.values():
        again = ft.GroupedMLP(E, H, F, device="cpu")
        again.load_state_dict(other.state_dict())
        with ft.autocast(**kind):
            y = again(torch.from_numpy(x), sizes, tokens_per_expert=counts)
        assert_same_bits("torch", y.detach().numpy(), made[0])


@combinations({"compiled": {"eager": False, "compiled": True}}, usual=["eager"])
def test_padding_on_the_device(compiled):
    _, layer = layers(activation="gelu")
    x, sizes, counts = torch.from_numpy(X), torch.tensor(SIZES), torch.tensor(COUNTS)
    layer.fc1.sizes_on_device = layer.fc2.sizes_on_device = True
    call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    with ft.autocast(recipe=RECIPES["current"]):
        want = layer(x, sizes, torch.from_numpy(TOKENS.astype(np.float32)))
        found = call(x, sizes, tokens_per_expert=counts)
    assert_same_bits("y", found.detach().numpy(), want.detach().numpy())


@pytest.mark.parametrize("recipe", ["plain", "current", "block"])
@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize("later", ["fuse_wgrad_accumulation", "delay_wgrad_compute"])
def test_arguments_of_both_parts(later, place, recipe):
    """Transformer Engine's, which both products take, with sizes on the host and on the device."""
    sizes = {"host": SIZES, "device": torch.tensor(SIZES)}[place]
    kind = {"use_grouped_tensor": place == "device"}
    layer = ft.GroupedMLP(E, H, F, device="cpu", save_original_input=True, **kind, **{later: True})
    plain = ft.GroupedMLP(E, H, F, device="cpu", **kind)
    plain.load_state_dict(layer.state_dict())
    for part in (layer.fc1, layer.fc2):
        assert getattr(part, later) is part.save_original_input is True
        for weight in part.parameters():
            weight.main_grad = torch.zeros_like(weight)
    x = torch.from_numpy(X.copy()).requires_grad_()
    out, dx = torch.empty(M, H), torch.empty(M, H)
    rule = {"enabled": recipe != "plain", "recipe": RECIPES[recipe]}
    with ft.autocast(**rule):
        y = layer(x, sizes, out=out, dgrad_out=dx)
    assert y.data_ptr() == out.data_ptr()
    y.backward(torch.from_numpy(G))
    assert_same_bits("dx", dx.numpy(), x.grad.numpy())
    assert layer.fc1.weight0.grad is None
    if later == "delay_wgrad_compute":
        assert layer.need_backward_dw()
        layer.backward_dw()
    else:
        assert layer.fc1.bias0.grad is not None
    with ft.autocast(**rule):
        want = plain(torch.from_numpy(X), sizes)
    want.backward(torch.from_numpy(G))
    assert_same_bits("y", out.detach().numpy(), want.detach().numpy())
    for name in ("fc1.weight0", "fc1.weight1", "fc2.weight2"):
        weight = layer.get_parameter(name)
        made = weight.grad if later == "delay_wgrad_compute" else weight.main_grad
        assert_same_bits(name, made.numpy(), plain.get_parameter(name).grad.numpy())


def test_padding_in_the_native_module_on_the_device():
    """``tokens_per_expert`` in an array whose numbers are not looked at, of either type of integers."""
    own, _ = layers()
    stays = fk.nn.GroupedMLP(E, H, F, device="cpu", use_grouped_tensor=True)
    stays.load_state_dict({name: p.numpy() for name, p in own.named_parameters()})
    masked = stays(X, np.array(SIZES), TOKENS.astype(np.float32)).numpy()
    for counts in (COUNTS, np.array(COUNTS), fk.tensor(np.array(COUNTS, np.int32), device="cpu")):
        sizes = fk.tensor(np.array(SIZES), device="cpu")
        made = stays(X, sizes, tokens_per_expert=counts).numpy()
        assert_same_bits("y", made, stays(X, sizes, TOKENS.astype(np.float32)).numpy())
    assert_close("list", masked, made.astype(np.float64), "float32", sum_slack(F * np.abs(made).max(), 2 * F))
    with pytest.raises(ShapeError, match="tokens_per_expert"):
        stays(X, sizes, tokens_per_expert=fk.tensor(np.array(COUNTS[1:]), device="cpu"))


@pytest.mark.parametrize("kind", [fk.nn.GroupedMLP, ft.GroupedMLP], ids=["native", "torch"])
@pytest.mark.parametrize("stays", [False, True])
def test_more_tokens_than_rows_are_refused_on_the_cpu(kind, stays):
    """Lists and arrays, whether sizes there stay on the device or not."""
    layer = kind(E, H, F, device="cpu", use_grouped_tensor=stays)
    array = torch.tensor if kind is ft.GroupedMLP else lambda sizes: fk.tensor(np.array(sizes), device="cpu")
    for sizes, counts in ((SIZES, COUNTS), (array(SIZES), array(COUNTS)), (array(SIZES), COUNTS)):
        layer(as_given(kind, X), sizes, tokens_per_expert=counts)
    more = [SIZES[0], 1, SIZES[2]]
    for sizes, counts in ((SIZES, more), (array(SIZES), array(more)), (array(SIZES), more)):
        with pytest.raises(ShapeError, match="tokens_per_expert"):
            layer(as_given(kind, X), sizes, tokens_per_expert=counts)


@pytest.mark.parametrize(
    "of", [nn_grouped._are_tokens, lambda *n: grouped_mlp.are_tokens(len(n[0]), *map(torch.tensor, n[1:]))]
)
def test_numbers_that_nobody_looks_at(of):
    """As on a GPU: more tokens than rows are all rows, a negative size is 0, rows of no group are no tokens,
    and sizes may claim more than there are."""
    for sizes, counts, expected in (
        ([3, 0, 2], [9, 9, 1], [1, 1, 1, 1, 0, 0]),
        ([2, -2, 3], [1, 5, 2], [1, 0, 1, 1, 0, 0]),
        ([2, 2, 1], [1, 0, 9], [1, 0, 0, 0, 1, 0]),
        ([4, 2**31 - 1, 2**31 - 1], [1, 9, 9], [1, 0, 0, 0, 1, 1]),
        ([6, 0, 0], [-3, 0, 0], [0, 0, 0, 0, 0, 0]),
    ):
        made = of(np.arange(6), np.array(sizes, np.int32), np.array(counts, np.int32))
        assert np.array_equal(np.asarray(made), np.array(expected, bool)), sizes


@pytest.mark.parametrize("kind", [fk.nn.GroupedMLP, ft.GroupedMLP], ids=["native", "torch"])
@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("stays", [False, True])
def test_padding_by_integers_of_any_kind(kind, stays, dtype):
    layer = kind(E, H, F, device="cpu", use_grouped_tensor=stays)
    array = torch.from_numpy if kind is ft.GroupedMLP else lambda sizes: fk.tensor(sizes, device="cpu")
    sizes, counts = (array(np.array(numbers, np.int32)) for numbers in (SIZES, COUNTS))
    want = layer(as_given(kind, X), sizes, tokens_per_expert=counts)
    sizes, counts = (np.array(numbers, dtype) for numbers in (SIZES, COUNTS))
    for given in ((array(sizes), array(counts)), (array(sizes), counts)):
        made = layer(as_given(kind, X), given[0], tokens_per_expert=given[1])
        assert np.array_equal(*(y.detach().numpy() for y in (made, want)))
    with pytest.raises(Fp8kitError, match=r"GroupedMLP: tokens_per_expert: .* expected integers"):
        layer(as_given(kind, X), given[0], tokens_per_expert=array(np.ones(E, np.bool_)))


def as_given(kind, x):
    """An array as the frontend of the class takes it."""
    return torch.from_numpy(x) if kind is ft.GroupedMLP else x


def test_refusals():
    layer = fk.nn.GroupedMLP(2, 8, 4, device="cpu")
    x = np.ones((3, 8), np.float32)
    for sizes in ([3], [2, 2], [4, -1]):
        with pytest.raises((ShapeError, ArgumentError), match="GroupedLinear: m_splits"):
            layer(x, sizes)
    with pytest.raises(ArgumentError, match="m_splits"):
        layer(x, 3)
    with pytest.raises(ShapeError, match="inp"):
        layer(np.ones((3, 9), np.float32), [1, 2])
    with pytest.raises(ShapeError, match="probs"):
        layer(x, [1, 2], np.ones(4, np.float32))
    for kind in (fk.nn.GroupedMLP, ft.GroupedMLP):
        with pytest.raises(ArgumentError, match="activation: got 'xielu', expected one of gelu"):
            kind(2, 8, 4, activation="xielu")
        with pytest.raises(ShapeError, match=r"tokens_per_expert: got \[2, 0\], expected at most m_splits"):
            kind(2, 8, 4, device="cpu")(as_given(kind, x), [1, 2], tokens_per_expert=[2, 0])
        with pytest.raises(ArgumentError, match=r"tokens_per_expert: got .* expected None with probs"):
            kind(2, 8, 4, device="cpu")(as_given(kind, x), [1, 2], as_given(kind, x[:, 0]), None, [1, 0])
    with pytest.raises(ArgumentError, match="num_gemms"):
        ft.GroupedMLP(0, 8, 4)
    with pytest.raises(ArgumentError, match="GroupedMLP: delay_wgrad_compute"):
        ft.GroupedMLP(E, H, F, device="cpu", delay_wgrad_compute=3)
    with pytest.raises(ArgumentError, match="use_grouped_tensor"):
        fk.nn.GroupedMLP(E, H, F, device="cpu", use_grouped_tensor=3)


@pytest.mark.parametrize("kind", [fk.nn.GroupedMLP, ft.GroupedMLP], ids=["native", "torch"])
def test_what_is_refused_records_nothing(kind):
    layer, x, p = kind(2, 8, 4, device="cpu"), as_given(kind, X[:3, :8]), as_given(kind, P[:3])
    mode = fk if kind is fk.nn.GroupedMLP else ft
    refused = [
        {"probs": p, "tokens_per_expert": [1, 0]},
        {"probs": as_given(kind, P[:2])},
        {"tokens_per_expert": [2, 0]},
    ]

    def history():
        state = layer.fc1.fp8_meta["scaling_fwd"]
        return np.array(state.views["amax_history"].numpy())

    with mode.autocast(recipe=RECIPES["delayed"]):
        layer(x, [1, 2], p)
    before = history()
    assert before.any()
    for given in refused:
        with mode.autocast(recipe=RECIPES["delayed"]), pytest.raises((ArgumentError, ShapeError)):
            layer(x * 9, [1, 2], **given)
        assert_same_bits(str(given), history(), before)


def _of_other_shape(kind, layer):
    weight = layer.fc2.weight1
    if kind is ft.GroupedMLP:
        weight.data = torch.ones(8, 5)
    else:
        layer.fc2.weight1 = fk.nn.Parameter(fk.tensor(np.ones((8, 5), np.float32), device="cpu").view)
    return {}


def _of_other_dtype(kind, layer):
    for i in range(2):
        if kind is ft.GroupedMLP:
            getattr(layer.fc2, f"weight{i}").data = torch.ones(8, 4, dtype=torch.float16)
        else:
            half = fk.tensor(np.ones((8, 4), np.float16), device="cpu")
            setattr(layer.fc2, f"weight{i}", fk.nn.Parameter(half.view))
    return {}


def _without_main_grad(kind, layer):
    del layer.fc2.weight1.main_grad
    return {}


# what is refused by fc2, or between both: of every frontend, and of PyTorch alone
SECOND = {
    "probs": lambda kind, layer: {"probs": as_given(kind, np.ones(3, np.int32))},
    "shape": _of_other_shape,
    "dtype": _of_other_dtype,
    "recipe": lambda kind, layer: {},
}
SECOND_OF_TORCH = {
    "out's shape": lambda kind, layer: {"out": torch.ones(3, 9)},
    "out's dtype": lambda kind, layer: {"out": torch.ones(3, 8, dtype=torch.float64)},
    "main_grad": _without_main_grad,
}


@pytest.mark.parametrize(
    ("kind", "case", "place"),
    [
        (kind, case, place)
        for kind, cases in ((fk.nn.GroupedMLP, SECOND), (ft.GroupedMLP, SECOND | SECOND_OF_TORCH))
        for case in cases
        for place in ("host", "device")
        if (case, place) != ("recipe", "host")  # where any is carried out
    ],
)
def test_what_the_second_part_refuses_changes_nothing(kind, case, place):
    """Neither fc1's amaxes nor the casts of weights that micro-batches share."""
    fused = {"fuse_wgrad_accumulation": True} if case == "main_grad" else {}
    layer = kind(2, 8, 4, device="cpu", name="mlp", use_grouped_tensor=place == "device", **fused)
    x, mode = as_given(kind, X[:3, :8]), fk if kind is fk.nn.GroupedMLP else ft
    sizes = [1, 2] if place == "host" else as_given(kind, np.array([1, 2], np.int32))
    sizes = fk.tensor(sizes, device="cpu") if place == "device" and mode is fk else sizes
    if fused:
        for weight in (layer.fc1.weight0, layer.fc1.weight1, layer.fc2.weight0, layer.fc2.weight1):
            weight.main_grad = torch.zeros_like(weight)
    recipe = RECIPES["delayed" if place == "host" else "current"]

    def state():
        kept = {name: np.array(s.views["amax_history"].numpy()) for name, s in layer.fc1.fp8_meta.items()}
        return kept, id(layer.fc1._weights.arrays), layer.fc1._weights.key

    with mode.autocast(recipe=recipe):
        layer(x, sizes, is_first_microbatch=True)
    before = state()
    given = (SECOND | SECOND_OF_TORCH)[case](kind, layer)
    if case == "recipe":
        recipe = PerLayer(recipe, (("mlp.fc2", MXFP8BlockScaling()),))
    with mode.autocast(recipe=recipe), pytest.raises(Fp8kitError):
        layer(x * 9, sizes, is_first_microbatch=True, **given)
    after = state()
    assert after[1:] == before[1:]
    for name, history in before[0].items():
        assert_same_bits(name, after[0][name], history)


@pytest.mark.parametrize("place", ["compiled", pytest.param("captured", marks=pytest.mark.gpu)])
def test_a_padded_step_needs_nothing_of_the_host(place):
    """Router, dispatch, experts and the way back: compiled whole, or in a CUDA graph, which follows other
    tokens."""
    device = "cuda" if place == "captured" else "cpu"
    layer = ft.GroupedMLP(4, H, F, device=device, use_grouped_tensor=True)
    rule = 2, False, None, None, None, "softmax", None

    def call(x, logits):
        probs, chosen = ft.router.fused_topk_with_score_function(logits, *rule)
        rows, weights, row_map, _, sizes = ft.token_dispatch(x, chosen, 2 * len(x), probs, 16)
        return ft.moe_unpermute(layer(rows, sizes, weights), row_map, restore_shape=x.shape)

    first, other = ((torch.randn(32, H, device=device), torch.randn(32, 4, device=device)) for _ in range(2))
    with ft.autocast(recipe=RECIPES["current"]), torch.no_grad():
        if place == "compiled":
            made = torch.compile(call, fullgraph=True, backend="aot_eager")(*other)
        else:
            static = [t.clone() for t in first]
            call(*static)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                made = call(*static)
            for to, value in zip(static, other, strict=True):
                to.copy_(value)
            graph.replay()
        assert_same_bits("y", made.cpu().numpy(), call(*other).cpu().numpy())
