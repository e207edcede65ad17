"""The router in three frontends over the grid of its options, against plain code in float64 with torch's own
autograd; the map of tokens to experts against a loop."""

from __future__ import annotations

import itertools

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from fp8kit_torch import router as te_router

import fp8kit as fk
from fp8kit import formats
from fp8kit.errors import ArgumentError, Fp8kitError, ShapeError, UnsupportedError
from fp8kit.nn import moe
from fp8kit.testing import assert_same_bits
from fp8kit.testing.compare import assert_close
from tests.support.combinations import combinations

T, E = 12, 16
RNG = np.random.default_rng(3)
LOGITS = RNG.standard_normal((T, E)).astype(np.float32)
BIAS = (0.2 * RNG.standard_normal(E)).astype(np.float32)
G = RNG.standard_normal((T, E)).astype(np.float32)
U = 2.0**-24

# score, softmax before top-k, (groups, group_topk), topk, factor, bias
GRID = [
    (score, pre, groups, topk, factor, bias)
    for score, pre, groups, topk, factor, bias in itertools.product(
        ("softmax", "sigmoid", "sqrtsoftplus"),
        (False, True),
        (None, (4, 2)),
        (1, 4),
        (None, 2.5),
        (False, True),
    )
    if not (pre and score != "softmax")
    and not (bias and score == "softmax")
    and not (groups and topk % groups[1])
]


def largest(x, k):
    """(values, places) of the k largest, of equals the first ones."""
    values, places = x.sort(dim=-1, descending=True, stable=True)
    return values[..., :k], places[..., :k]


def plain(logits, score, pre, groups, topk, factor, bias):
    """(probs, map) by torch in the dtype of logits."""
    if score == "softmax":
        s = logits.softmax(-1) if pre else logits
    else:
        s = logits.sigmoid() if score == "sigmoid" else torch.nn.functional.softplus(logits).sqrt()
    keys = s.detach().clone() + (0 if bias is None else bias)
    if groups is not None:
        count, kept = groups
        parts = keys.unflatten(-1, (count, -1))
        totals = largest(parts, topk // kept)[0].sum(-1)
        out = torch.ones_like(totals, dtype=torch.bool).scatter_(-1, largest(totals, kept)[1], False)
        keys = parts.masked_fill(out.unsqueeze(-1), -torch.inf).flatten(-2)
    at = largest(keys, topk)[1]
    own = s.gather(-1, at)
    if score == "softmax":
        own = own if pre else own.softmax(-1)
    elif topk > 1:
        own = own / (own.sum(-1, keepdim=True) + 1e-20)
    own = own * (1 if factor is None else factor)
    chosen = torch.zeros_like(keys, dtype=torch.bool).scatter_(-1, at, True)
    return torch.zeros_like(logits).scatter(-1, at, own), chosen


def as_torch(values):
    return torch.from_numpy(values.astype(np.float32)).to(getattr(torch, values.dtype.name))


def in_torch(options, logits=LOGITS):
    score, pre, groups, topk, factor, bias = options
    x = as_torch(logits).requires_grad_()
    own = torch.from_numpy(BIAS) if bias else None
    probs, chosen = te_router.fused_topk_with_score_function(
        x, topk, pre, *(groups or (None, None)), factor, score, own
    )
    probs.backward(as_torch(G.astype(logits.dtype)))
    return probs.detach().float().numpy(), chosen.numpy(), x.grad.float().numpy()


def in_jax(options, logits=LOGITS):
    score, pre, groups, topk, factor, bias = options

    @jax.jit
    def step(x, own, g):
        def call(x):
            return fj.fused_topk_with_score_function(
                x, topk, pre, *(groups or (-1, -1)), 1.0 if factor is None else factor, score, own
            )

        probs, pull, chosen = jax.vjp(call, x, has_aux=True)
        return probs, chosen, pull(g)[0]

    given = logits, BIAS if bias else None, jnp.asarray(G.astype(logits.dtype))
    return [np.asarray(value) for value in step(*given)]


def native(options, logits=LOGITS):
    score, pre, groups, topk, factor, bias = options
    x = fk.tensor(logits, requires_grad=True, device="cpu")
    probs, chosen = moe.fused_topk_with_score_function(
        x, topk, pre, *(groups or (None, None)), factor, score, BIAS if bias else None
    )
    probs.backward(G.astype(logits.dtype))
    return probs.numpy(), chosen.numpy() != 0, x.grad.numpy()


# of float32; of 16 bits, whose probabilities are of their dtype; with many equal ones
KINDS = {name: LOGITS.astype(formats.dtype(name).numpy) for name in ("float32", "bfloat16", "float16")}
KINDS["equals"] = np.round(LOGITS)


@combinations(
    {"options": {"-".join(map(str, options)): options for options in GRID}, "kind": [*KINDS]},
    usual=[
        f"{'-'.join(map(str, options))}-{kind}"
        for i, kind in enumerate(KINDS)
        for options in GRID[5 * (i % 2) :: 10]
    ],
)
def test_grid(options, kind):
    score, pre, groups, topk, factor, bias = options
    logits = KINDS[kind]
    x = torch.from_numpy(logits.astype(np.float64)).requires_grad_()
    own = torch.from_numpy(BIAS).double() if bias else None
    want, where = plain(x, score, pre, groups, topk, factor, own)
    want.backward(torch.from_numpy(G.astype(logits.dtype).astype(np.float64)))
    got = in_torch(options, logits)
    assert_same_bits("map", got[1], where.numpy())
    # a sum over E experts, exp and the quotient; gradients are differences of such terms of size |G| factor
    slack, name = 2 * U * (E + 32) * (factor or 1), logits.dtype.name
    assert_close("probs", got[0], want.detach().numpy(), name, slack)
    assert_close("dlogits", got[2], x.grad.numpy(), name, 8 * slack * np.abs(G).max())
    for frontend in (in_jax, native):
        for part, a, b in zip(("probs", "map", "dlogits"), frontend(options, logits), got, strict=True):
            assert_same_bits(f"{frontend.__name__} {part}", a.astype(b.dtype), b)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_auxiliary_loss(score):
    """Scores and loss against float64, in three frontends the same bits; the gradient reaches the logits."""
    k, coeff = 3, 0.01
    x64 = torch.from_numpy(LOGITS).double().requires_grad_()
    s64 = plain(x64, score, True, None, E, None, None)[0]  # all experts: dense scores
    where = plain(x64, score, True, None, k, None, None)[1]
    counts = where.sum(0).int()
    loss64 = coeff * E / (k * T**2) * (s64.sum(0) * counts).sum()
    loss64.backward()

    x = torch.from_numpy(LOGITS.copy()).requires_grad_()
    chosen, scores = te_router.fused_compute_score_for_moe_aux_loss(x, k, score)
    assert_same_bits("map", chosen.numpy(), where.numpy())
    assert_close("scores", scores.detach().numpy(), s64.detach().numpy(), "float32", 2 * U * (E + 32))
    for total in (T, torch.tensor(T)):
        x.grad = None
        loss = te_router.fused_moe_aux_loss(scores, counts, total, E, k, coeff)
        loss.backward(retain_graph=True)
        assert loss.shape == ()
        assert_close("loss", loss.detach().numpy(), loss64.detach().numpy(), "float32", 2 * U * (E + 64))
        slack = 8 * U * (E + 32) * coeff
        assert_close("dlogits", x.grad.numpy(), x64.grad.numpy(), "float32", slack)

    def call(x):
        scores, chosen = fj.fused_topk_with_score_function(
            x, k, score_function=score, compute_aux_scores=True
        )
        return fj.fused_moe_aux_loss(scores, chosen.sum(0, dtype=jnp.int32), k, coeff)

    found, grad = jax.jit(jax.value_and_grad(call))(LOGITS)
    leaf = fk.tensor(LOGITS, requires_grad=True, device="cpu")
    own = moe.fused_moe_aux_loss(
        moe.fused_compute_score_for_moe_aux_loss(leaf, k, score)[1], counts.numpy(), T, E, k, coeff
    )
    own.backward()
    assert_same_bits("loss in jax", np.asarray(found), own.numpy().reshape(()))
    assert_same_bits("dlogits in jax", np.asarray(grad), leaf.grad.numpy())


def test_formats_of_the_map_and_leading_dimensions():
    x = torch.from_numpy(LOGITS).reshape(3, 4, E)
    arguments = (3, False, None, None, None, "softmax", None)
    probs, chosen = te_router.fused_topk_with_score_function(x, *arguments)
    assert probs.shape == chosen.shape == (3, 4, E)
    assert chosen.dtype is torch.bool
    for form in ("bitmap_u8", te_router.RoutingMapFormat.BITMAP_U8, 1):
        bits = te_router.fused_topk_with_score_function(x, *arguments, form)[1]
        assert_same_bits("bits", bits.numpy(), np.packbits(chosen.numpy(), -1, bitorder="little"))
    buffer = torch.full((3, 4, 3), -1, dtype=torch.int32)
    assert te_router.fused_topk_with_score_function(x, *arguments, topk_indices=buffer)[1] is buffer
    assert_same_bits(
        "indices", np.argwhere(chosen.numpy())[:, 2].reshape(3, 4, 3).astype(np.int32), buffer.numpy()
    )


@pytest.mark.combinations  # test_a_padded_step_needs_nothing_of_the_host compiles a router
def test_compiled_it_has_the_same_gradients():
    def step(x):
        probs, chosen = te_router.fused_topk_with_score_function(x, 4, False, 4, 2, 2.5, "sigmoid", None)
        scores = te_router.fused_compute_score_for_moe_aux_loss(x, 4, "softmax")[1]
        return probs, te_router.fused_moe_aux_loss(scores, chosen.sum(0), len(x), E, 4, 0.1)

    made = []
    for call in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        x = torch.from_numpy(LOGITS.copy()).requires_grad_()
        probs, loss = call(x)
        (probs.square().sum() + loss).backward()
        made.append((probs.detach().numpy(), loss.detach().numpy(), x.grad.numpy()))
    for got, want in zip(made[1], made[0], strict=True):
        assert_same_bits("compiled", got, want)


def test_tokens_go_to_experts_and_come_back():
    """Dispatch and combine in JAX and natively: the rows of a loop, padded, and the sum of all of them."""
    probs, chosen = native(("softmax", False, None, 3, None, False))[:2]
    x = RNG.standard_normal((T, 8)).astype(np.float32)
    align = 4
    rows = (3 * T + E * (align - 1)) // align * align
    want, start, sizes = np.zeros((rows, 8), np.float32), 0, []
    for e in range(E):
        tokens = np.flatnonzero(chosen[:, e])
        want[start : start + len(tokens)] = x[tokens]
        sizes.append(-(-len(tokens) // align) * align)
        start += sizes[-1]
    jitted = jax.jit(lambda x, m, p: fj.token_dispatch(x, m, 3 * T, p, align))(x, chosen, probs)
    made = moe.token_dispatch(x, chosen.astype(np.uint8), 3 * T, probs, align)
    for name, a, b in zip(
        ("rows", "probs", "map", "sizes"), jitted[:3] + jitted[4:], made[:3] + made[4:], strict=True
    ):
        assert_same_bits(name, np.asarray(a), b.numpy())
    assert_same_bits("rows", made[0].numpy(), want)
    assert made[4].numpy().tolist() == sizes
    back = moe.token_combine(made[0], made[2], probs)
    assert_same_bits("back", np.asarray(fj.token_combine(jitted[0], jitted[2], probs)), back.numpy())
    # a softmax over the chosen sums to 1 but for its rounding, and so does what comes back
    assert_close("back", back.numpy(), x.astype(np.float64), "float32", 32 * U * np.abs(x))
    index = np.argsort(~chosen, 1, kind="stable")[:, :3].astype(np.int32)
    by_index = moe.token_dispatch(x, index, 3 * T, None, align, E)
    assert_same_bits("by index", by_index[0].numpy(), want)
    assert by_index[4].numpy().tolist() == sizes


def test_chunks_and_no_tokens():
    x, sizes, order = RNG.standard_normal((9, 4)).astype(np.float32), [2, 0, 4, 3], [2, 3, 0, 1]
    want = np.concatenate([np.split(x, np.cumsum(sizes)[:-1])[i] for i in order])
    assert_same_bits("native", moe.sort_chunks_by_index(x, sizes, order).numpy(), want)
    assert_same_bits(
        "jax", np.asarray(jax.jit(fj.sort_chunks_by_index)(x, jnp.array(sizes), jnp.array(order))[0]), want
    )
    none = fk.tensor(np.zeros((0, E), np.float32), requires_grad=True)
    probs, chosen = moe.fused_topk_with_score_function(none, 2)
    assert probs.shape == (0, E)
    out = moe.token_dispatch(np.zeros((0, 4), np.float32), chosen, 0, probs, 8)
    assert out[0].shape == (E * 7 // 8 * 8, 4)
    assert not out[4].numpy().any()
    probs.backward(np.zeros((0, E), np.float32))
    assert none.grad.shape == (0, E)


@pytest.mark.parametrize(
    ("error", "words", "changed"),
    [
        (ArgumentError, "topk", {"topk": 0}),
        (ArgumentError, "topk", {"topk": E + 1}),
        (ArgumentError, "score_function", {"score_function": "tanh"}),
        (ArgumentError, "num_groups", {"num_groups": 5, "group_topk": 1}),
        (ArgumentError, "group_topk", {"num_groups": 4}),
        (ArgumentError, "num_groups", {"group_topk": 2}),
        (ArgumentError, "topk", {"num_groups": 4, "group_topk": 2, "topk": 3}),
        (ArgumentError, "expert_bias", {"expert_bias": torch.zeros(E)}),
        (ShapeError, "expert_bias", {"expert_bias": torch.zeros(E + 1), "score_function": "sigmoid"}),
        (UnsupportedError, "qb_histogram", {"qb_histogram_mode": "two_kernel"}),
        (Fp8kitError, "logits", {"logits": torch.zeros(4, E, dtype=torch.float64)}),
        (ShapeError, "experts", {"logits": torch.zeros(1, 1025)}),
        (Fp8kitError, "routing_map_format", {"routing_map_format": "bits"}),
        (ShapeError, "topk_indices", {"topk_indices": torch.zeros(1, dtype=torch.int64)}),
    ],
)
def test_refusals(error, words, changed):
    good = {
        "logits": torch.zeros(4, E),
        "topk": 4,
        "use_pre_softmax": False,
        "num_groups": None,
        "group_topk": None,
        "scaling_factor": None,
        "score_function": "softmax",
        "expert_bias": None,
    }
    with pytest.raises(error, match=words):
        te_router.fused_topk_with_score_function(**good | changed)


@pytest.mark.gpu
def test_the_gpu_agrees_with_the_cpu():
    """The same choice on a GPU, and probabilities within float32's rounding."""
    for options in GRID[::7]:
        score, pre, groups, topk, factor, bias = options
        want = in_torch(options)
        x = torch.from_numpy(LOGITS).cuda().requires_grad_()
        own = torch.from_numpy(BIAS).cuda() if bias else None
        probs, chosen = te_router.fused_topk_with_score_function(
            x, topk, pre, *(groups or (None, None)), factor, score, own
        )
        probs.backward(torch.from_numpy(G).cuda())
        assert_same_bits("map", chosen.cpu().numpy(), want[1])
        slack = 4 * U * (E + 32) * (factor or 1)
        assert_close("probs", probs.detach().cpu().numpy(), want[0].astype(float), "float32", slack)
        assert_close("dlogits", x.grad.cpu().numpy(), want[2].astype(float), "float32", 8 * slack)


def test_refusals_of_numbers_that_do_not_agree():
    logits, counts = RNG.standard_normal((4, 8)).astype(np.float32), np.ones(8, np.int32)
    given = torch.from_numpy(logits), torch.from_numpy(counts)
    for call in (
        lambda: moe.fused_moe_aux_loss(logits, counts, 4, 7, 2, 0.1),
        lambda: te_router.fused_moe_aux_loss(*given, 4, 7, 2, 0.1),
    ):
        with pytest.raises(
            ArgumentError, match="num_experts: got 7, expected 8, the last dimension of probs"
        ):
            call()
    assert moe.fused_moe_aux_loss(logits, counts, 4, 8, 2, 0.1).shape == ()
    for call in (
        lambda: moe.fused_topk_with_score_function(logits, 2, num_groups=4),
        lambda: fj.fused_topk_with_score_function(logits, 2, num_groups=4),
        lambda: te_router.fused_topk_with_score_function(given[0], 2, False, 4, None, None, "softmax", None),
    ):
        with pytest.raises(ArgumentError, match=r"group_topk: .*how many groups are kept, with num_groups 4"):
            call()
    short = np.ones((3, 8), bool)
    for call in (
        lambda: moe.token_dispatch(logits, short.astype(np.uint8), 8),
        lambda: fj.token_dispatch(logits, short, 8),
    ):
        with pytest.raises(ShapeError, match="token_dispatch: routing_map: got 3 tokens, expected 4, as inp"):
            call()
    for sizes, order, argument in (([1, 2], [0, 1], "split_sizes"), ([1, 3], [0, 0], "sorted_indices")):
        for call in (moe.sort_chunks_by_index, fj.sort_chunks_by_index):
            with pytest.raises(ShapeError, match=f"sort_chunks_by_index: {argument}"):
                call(logits, sizes, order)
        with pytest.raises(ShapeError, match=f"sort_chunks_by_index: {argument}"):
            fj.sort_chunks_by_index(logits, jnp.array(sizes), jnp.array(order))
