"""A call that is refused is refused before anything runs: no projection, no draw of a key; state and
parameters keep their bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from fp8kit_jax import flax as fj
from fp8kit_jax import nnx as fn
from fp8kit_jax import program
from fp8kit_jax.scopes import autocast

from fp8kit.errors import Fp8kitError
from fp8kit.recipe import DelayedScaling
from tests.adapters.jax.filled import filled
from tests.support.bad_options import FFN, HEADS, OTHER, THD, B, D, H, S, sums, zeros
from tests.support.combinations import combinations
from tests.support.layers import draw

X, SOURCE = draw(1, (B, S, H), "float32"), draw(2, (B, OTHER, H), "float32")
RECIPE = DelayedScaling(amax_history_len=4)
PADDED = {"attn_mask_type": "padding", "cu_seqlens_kv": sums(0, 3, 8)}
BIAS = zeros(1, HEADS, S, S)

# what an NNX attention may not be given beside x
NNX = {
    "a mask that nothing asks for": {"mask": zeros(B, 1, S, S, dtype=bool)},
    "no mask where one is asked for": {"attn_mask_type": "arbitrary"},
    "a mask of a wrong shape": {"attn_mask_type": "arbitrary", "mask": zeros(B, 1, S, S + 1, dtype=bool)},
    "a mask of floats": {"attn_mask_type": "arbitrary", "mask": BIAS},
    "a mask that is no array": {"attn_mask_type": "arbitrary", "mask": "mask"},
    "padding without lengths": {"attn_mask_type": "padding"},
    "lengths without padding": THD,
    "an unknown kind of mask": {"attn_mask_type": "none"},
    "a window of three": {"window_size": (1, 1, 1)},
    "a window right of a causal diagonal": {"window_size": (1, 1)},
    "a corner that is no flag": {"bottom_right_diagonal": "yes"},
    "another corner than the mask's": {"bottom_right_diagonal": True},
    "a bias that nothing asks for": {"attn_bias_type": "no_bias", "bias": BIAS},
    "a bias of a wrong shape": {"bias": zeros(1, HEADS + 1, S, S)},
    "a bias of another dtype": {"bias": BIAS.astype(np.float16)},
    "slopes that nothing asks for": {"alibi_slopes": zeros(HEADS)},
    "slopes of a wrong shape": {"attn_bias_type": "alibi", "alibi_slopes": zeros(HEADS + 1)},
    "sums of a wrong shape": PADDED | {"cu_seqlens_q": sums(0, 3, 8, 9)},
    "sums of another dtype": PADDED | {"cu_seqlens_q": zeros(3)},
    "sums that fall": PADDED | {"cu_seqlens_q": sums(0, 3, 2)},
    "a sequence that is too long": PADDED | {"cu_seqlens_q": sums(0, S + 1, S + 3)},
    "a scale that is no number": {"scale_factor": "half"},
    "a length that is none": {"max_seqlen_q": "long"},
    "inputs of another rank": {"x": zeros(S, H)},
    "inputs of other features": {"x": zeros(B, S, H + 1)},
}
ACROSS = {
    "no source": {"encoded": None},
    "a source of another rank": {"encoded": zeros(OTHER, H)},
    "a source of other features": {"encoded": zeros(B, OTHER, H + 1)},
    "a source of another batch": {"encoded": zeros(B + 1, OTHER, H)},
    "a source of another dtype": {"encoded": zeros(B, OTHER, H, dtype=np.float16)},
    "a bias of a wrong shape": {"bias": zeros(1, HEADS, S, OTHER + 1)},
}


def attention(**options):
    return fn.MultiHeadAttention(
        H, HEADS, rngs=nnx.Rngs(3), attention_dropout=0.1, attn_mask_type="causal", **options
    )


def layer(**options):
    dropout = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
    return fn.TransformerLayer(H, FFN, HEADS, rngs=nnx.Rngs(3), attn_mask_type="causal", **dropout, **options)


CASES = {
    "attention": (attention, {"x": X}, NNX),
    "attention in groups, rotated and normed": (
        lambda: attention(num_gqa_groups=2, rotary=True, qk_norm_type="RMSNorm"),
        {"x": X},
        NNX,
    ),
    "attention in groups": (lambda: attention(num_gqa_groups=2, input_layernorm=False), {"x": X}, NNX),
    "cross-attention": (
        lambda: attention(cross=True),
        {"x": X, "encoded": SOURCE, "attn_mask_type": "no_mask"},
        ACROSS,
    ),
    "layer": (layer, {"x": X}, NNX),
}


def placed(options):
    return {
        name: jnp.asarray(value) if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }


def state_of(module):
    """All variables, the streams' counts among them, as bytes."""
    leaves = jax.tree.leaves(nnx.state(module))
    return [
        np.asarray(jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a).tobytes()
        for a in leaves
    ]


@pytest.fixture
def ran(monkeypatch):
    """Names of the operations whose programs are made, from now on."""
    found, start = [], program.Program.__init__

    def counted(self, *given, **named):
        start(self, *given, **named)
        found.append(self.operation)

    monkeypatch.setattr(program.Program, "__init__", counted)
    return found


@combinations(
    {"case": CASES.keys()}, usual=["attention in groups, rotated and normed", "cross-attention", "layer"]
)
def test_a_refused_call_of_nnx_leaves_no_trace(case, ran):
    make, good, table = CASES[case]

    def made():
        with autocast(enabled=True, recipe=RECIPE):
            return make()

    def y(module):
        with autocast(enabled=True, recipe=RECIPE):
            return np.asarray(module(**placed(good))).tobytes()

    module, other, wrong = made(), made(), []
    before = state_of(module)
    for name, bad in table.items():
        ran[:] = []
        try:
            with autocast(enabled=True, recipe=RECIPE):
                module(**placed(good | bad))
            wrong.append(f"{name}: taken")
        except Fp8kitError:
            pass
        if state_of(module) != before:
            wrong.append(f"{name}: left a trace")
        if ran:
            wrong.append(f"{name}: {', '.join(ran)} ran")
    assert not wrong
    assert y(module) == y(other)
    assert state_of(module) == state_of(other)


def test_the_core_of_nnx_draws_nothing_for_a_refused_call():
    core = fn.DotProductAttention(HEADS, attention_dropout=0.5, rngs=nnx.Rngs(3))
    q, before = jnp.zeros((B, S, HEADS, D)), state_of(core)
    for given in ((q, q[:, 1:], q), (q, q, q.astype(jnp.float16)), (q,), (q, q)):
        with pytest.raises(Fp8kitError):
            core(*given)
        assert state_of(core) == before


# what a Flax attention may not be given: fields, arguments of the call
FLAX = {
    "a mask of a wrong shape": ({}, {"mask": zeros(B, 1, S, S + 1, dtype=bool)}),
    "a mask of one dimension": ({}, {"mask": zeros(S, dtype=bool)}),
    "a mask that is no array": ({}, {"mask": "mask"}),
    "no mask where one is asked for": ({"attn_mask_type": "arbitrary"}, {}),
    "padding without lengths": ({"attn_mask_type": "padding"}, {}),
    "lengths of another batch": ({"attn_mask_type": "padding"}, {"sequence_descriptor": sums(3, 4, 5)}),
    "lengths of floats": ({"attn_mask_type": "padding"}, {"sequence_descriptor": zeros(B)}),
    "lengths below 0": ({"attn_mask_type": "padding"}, {"sequence_descriptor": sums(3, -1)}),
    "three lengths": ({"attn_mask_type": "padding"}, {"sequence_descriptor": (sums(3, 4),) * 3}),
    "a bias of a wrong shape": ({}, {"bias": zeros(1, HEADS + 1, S, S)}),
    "a bias of another dtype": ({}, {"bias": BIAS.astype(np.float16)}),
    "an unknown norm of queries": ({"qk_norm_type": "rms"}, {}),
    "an unknown way to rotate": ({"enable_rotary_pos_emb": True, "rotary_pos_emb_group_method": "pairs"}, {}),
    "decoding with lengths": (
        {"attn_mask_type": "padding"},
        {"decode": True, "sequence_descriptor": sums(3, 4)},
    ),
    "decoding with slopes": ({"attn_bias_type": "alibi"}, {"decode": True}),
    "a source of another batch": ({}, {"inputs_kv": zeros(B + 1, S, H)}),
    "a source of another rank": ({}, {"inputs_kv": zeros(S, H)}),
}


@combinations({"groups": [None, 2]}, usual=["2"])
def test_a_refused_call_of_flax_runs_nothing(groups, ran):
    fields = {"head_dim": D, "num_attention_heads": HEADS, "num_gqa_groups": groups}
    x, wrong = jnp.asarray(X), []
    with autocast(enabled=True, recipe=RECIPE):
        module = fj.MultiHeadAttention(**fields)
        variables = filled(lambda key, x: module.init(key, x, x, deterministic=True), jax.random.key(0), x)
        for name, (own, given) in FLAX.items():
            ran[:] = []
            try:
                fj.MultiHeadAttention(**fields, **own).apply(
                    variables,
                    **{"inputs_q": x, "inputs_kv": x, **placed(given)},
                    deterministic=True,
                    mutable=["cache"],
                )
                wrong.append(f"{name}: taken")
            except Fp8kitError:
                pass
            if ran:
                wrong.append(f"{name}: {', '.join(ran)} ran")
    assert not wrong


def test_a_step_of_decoding_is_refused_before_it_runs(ran):
    module = fj.MultiHeadAttention(D, HEADS)
    x = jnp.asarray(X)
    key = jax.random.key(0)
    variables = filled(lambda key, x: module.init(key, x, x, decode=True, deterministic=True), key, x)
    ran[:] = []
    for given in ({"mask": zeros(B, 1, 1, S + 1, dtype=bool)}, {"bias": zeros(1, HEADS + 1, S, S)}):
        with pytest.raises(Fp8kitError):
            module.apply(
                variables,
                x[:, :1],
                x[:, :1],
                **placed(given),
                decode=True,
                deterministic=True,
                mutable=["cache"],
            )
    one = x[:, :1]
    with pytest.raises(Fp8kitError):
        module.apply(
            variables,
            one,
            one,
            **placed({"mask": zeros(B, 1, 1, S + 1, dtype=bool)}),
            decode=True,
            mutable=["cache"],
        )
    assert not ran
