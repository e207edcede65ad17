"""MultiheadAttention as cross-attention, and with rotary embeddings, against float64."""

from __future__ import annotations

import numpy as np
import pytest

from fp8kit import nn
from fp8kit.autograd import tensor
from fp8kit.testing.compare import assert_close, assert_same_bits
from tests.support.layer_oracle import Head
from tests.support.layers import draw, make
from tests.support.products import Product, f64
from tests.support.running_error import R, assert_within, norm, norm_grad

B, ROWS, COLUMNS, HEADS, GROUPS, D = 2, 7, 11, 4, 2, 8
LENGTHS_Q = (7, 3)
U = 2.0**-24


def cu(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


class Cross:
    """MultiheadAttention across: ``x`` R (s b, H), ``source`` R (s' b, H), float64; ``angles``: of queries
    and keys, or None."""

    def __init__(self, module, x, source, p, hidden, angles=None):
        first = "layernorm_query" if module.input_layernorm else "query_layer"
        # Transformer Engine keeps query_layer whole
        q_name = f"{first}.query_" if module.input_layernorm else f"{first}."
        self.q = Product(x, p[f"{q_name}weight"], None)
        weights = {
            kind: np.concatenate([p[f"key_value.{n}_{kind}"] for n in ("key", "value")])
            for kind in ("weight", "bias")
        }
        self.kv = Product(source, weights["weight"], None)
        q = self.q.forward(p[f"{q_name}bias"]).rounded("float32").reshape(ROWS, B, HEADS, D)
        kv = self.kv.forward(weights["bias"]).rounded("float32").reshape(COLUMNS, B, 2 * HEADS, D)
        k, v = kv[:, :, :HEADS], kv[:, :, HEADS:]
        self.angles = angles
        if angles is not None:
            q, k = self.turn(q, angles[0], 1), self.turn(k, angles[1], 1)
        seen = np.ones((ROWS, COLUMNS), bool)
        self.heads = {
            (b, h): Head(q[:, b, h], k[:, b, h], v[:, b, h], seen, D**-0.5, 0.0)
            for b in range(B)
            for h in range(HEADS)
        }
        o = self.join([head.o for head in self.heads.values()], ROWS).rounded("float32")
        self.proj = Product(o.reshape(ROWS * B, hidden), p["proj.weight"], None)
        self.out = self.proj.forward(p["proj.bias"])

    @staticmethod
    def join(parts, length):
        def order(values):
            return np.stack(values).reshape(B, HEADS, length, D).transpose(2, 0, 1, 3)

        return R(order([part.v for part in parts]), order([part.e for part in parts]))

    @staticmethod
    def turn(x, angle, sign):
        """Halves rotated; cos and sin of a float32 angle are off by 8 u of a radian or so."""
        half = x.v.shape[-1] // 2
        cos, sin = (
            R(f(angle)[:, None, None], 8 * U * (1 + np.abs(angle[:, None, None]))) for f in (np.cos, np.sin)
        )
        low, high = x[..., :half], x[..., half:]
        parts = low * cos - high * sin * sign, high * cos + low * sin * sign
        return R(
            np.concatenate([part.v for part in parts], -1), np.concatenate([part.e for part in parts], -1)
        ).rounded("float32")

    def backward(self, g):
        """dx, d source, and the key_value weights' gradient."""
        do, _, _ = self.proj.backward(g)
        do = do.rounded("float32").reshape(ROWS, B, HEADS, D)
        grads = [head.backward(do[:, b, h]) for (b, h), head in self.heads.items()]
        dq, dk, dv = (
            self.join([g[i] for g in grads], n).rounded("float32")
            for i, n in enumerate((ROWS, COLUMNS, COLUMNS))
        )
        if self.angles is not None:
            dq, dk = self.turn(dq, self.angles[0], -1), self.turn(dk, self.angles[1], -1)
        dkv = R(np.concatenate([dk.v, dv.v], 2), np.concatenate([dk.e, dv.e], 2)).reshape(COLUMNS * B, -1)
        return self.q.backward(dq.reshape(ROWS * B, -1))[0], *self.kv.backward(dkv)[:2]


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_cross_attention(device, normed, rotary):
    hidden = HEADS * D
    module = make(
        nn.MultiheadAttention,
        device,
        "float32",
        hidden_size=hidden,
        num_attention_heads=HEADS,
        attention_dropout=0.0,
        attention_type="cross",
        attn_mask_type="no_mask",
        input_layernorm=normed,
    )
    p = {name: f64(parameter) for name, parameter in module.named_parameters()}
    first = "layernorm_query" if normed else "query_layer"
    names = [*(f"{first}.layer_norm_{kind}" for kind in ("weight", "bias") if normed)]
    names += [f"{first}.{'query_' if normed else ''}{kind}" for kind in ("weight", "bias")]
    names += [f"key_value.{n}_{kind}" for n in ("key", "value") for kind in ("weight", "bias")]
    assert set(p) == {*names, "proj.weight", "proj.bias"}
    x, source = draw(1, (ROWS, B, hidden), "float32"), draw(2, (COLUMNS, B, hidden), "float32")
    g = draw(3, (ROWS, B, hidden), "float32", 2.0**-6)
    rx, angles, freqs = R(x.astype(np.float64).reshape(-1, hidden)), None, None
    if rotary:
        embedding = nn.RotaryPositionEmbedding(D, device=device)
        freqs = (embedding(ROWS, offset=4), embedding(COLUMNS))
        speeds = 10000.0 ** (-np.arange(0, D, 2) / D)
        angles = (np.arange(ROWS) + 4)[:, None] * speeds, np.arange(COLUMNS)[:, None] * speeds
    inner = rx
    if normed:
        weight, bias = (p[f"layernorm_query.layer_norm_{kind}"] for kind in ("weight", "bias"))
        inner, hat, rstd = norm(rx, weight, bias, "LayerNorm", 1e-5)
        inner = inner.rounded("float32")
    want = Cross(module, inner, R(source.astype(np.float64).reshape(-1, hidden)), p, hidden, angles)
    a, b = tensor(x, requires_grad=True, device=device), tensor(source, requires_grad=True, device=device)
    y = module(a, encoder_output=b, rotary_pos_emb=freqs)
    y.backward(g)
    assert_within("y", f64(y).reshape(-1, hidden), want.out.rounded("float32"))
    dx, dsource, dw = want.backward(R(g.astype(np.float64).reshape(-1, hidden)))
    if normed:
        dx = norm_grad(dx.rounded("float32"), hat, rstd, p["layernorm_query.layer_norm_weight"], "LayerNorm")[
            0
        ]
    assert_within("dx", f64(a.grad).reshape(-1, hidden), dx.rounded("float32"))
    assert_within("dsource", f64(b.grad).reshape(-1, hidden), dsource.rounded("float32"))
    got = np.concatenate([f64(getattr(module.key_value, f"{n}_weight").grad) for n in ("key", "value")])
    assert_within("key_value", got, dw.rounded("float32"))


@pytest.mark.parametrize("form", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_rotary_self_attention_turns_queries_and_keys(device, form, fused, interleaved):
    """The layer with its packed projection equals the projection's parts rotated one by one."""
    hidden = HEADS * D
    mask = "padding_causal" if form == "thd" else "causal"
    module = make(
        nn.MultiheadAttention,
        device,
        "float32",
        hidden_size=hidden,
        num_attention_heads=HEADS,
        num_gqa_groups=HEADS if fused else GROUPS,
        fuse_qkv_params=fused,
        attention_dropout=0.0,
        qkv_format=form,
        attn_mask_type=mask,
        rotary_pos_interleaved=interleaved,
    )
    freqs = nn.RotaryPositionEmbedding(D, 0.5, interleaved=interleaved, device=device)(16)
    shape = {"sbhd": (ROWS, B), "bshd": (B, ROWS), "thd": (10,)}[form]
    lengths = {"cu_seqlens_q": cu(LENGTHS_Q), "cu_seqlens_kv": cu(LENGTHS_Q)} if form == "thd" else {}
    x = tensor(draw(1, (*shape, hidden), "float32"), device=device)
    y = module(x, rotary_pos_emb=freqs, **lengths)
    qkv = module.qkv(x).numpy().reshape(*shape, -1, D)
    pieces = (
        [qkv[..., i::3, :] for i in range(3)] if fused else np.split(qkv, [HEADS, HEADS + GROUPS], axis=-2)
    )
    parts = [np.ascontiguousarray(part) for part in pieces]
    rotated = [
        nn.apply_rotary_pos_emb(
            tensor(part, device=device),
            freqs,
            form,
            interleaved=interleaved,
            cu_seqlens=lengths.get("cu_seqlens_q"),
        )
        for part in parts[:2]
    ]
    want = module.proj(module.core_attention(*rotated, tensor(parts[2], device=device), **lengths))
    if device == "cpu":
        assert_same_bits("y", y.numpy(), want.numpy())
    assert_close("y", f64(y), f64(want), "float32", 64 * hidden * U * np.abs(f64(want)).max())
    assert np.abs(f64(y) - f64(module(x, **lengths))).max() > 2.0**-7 * np.abs(f64(want)).max()


@pytest.mark.parametrize("qk_norm", [None, "RMSNorm"])
def test_rotary_leaves_tokens_of_no_sequence_alone(device, qk_norm):
    """Gaps, and rows after the last sequence, farther on than there are angles: the sequences' values and
    gradients are those without."""
    hidden, runs = HEADS * D, []
    freqs = nn.RotaryPositionEmbedding(D, device=device)(max(LENGTHS_Q))
    x, dy = (
        draw(1, (sum(LENGTHS_Q), hidden), "float32"),
        draw(2, (sum(LENGTHS_Q), hidden), "float32", 2.0**-6),
    )
    lengths = {"cu_seqlens_q": cu(LENGTHS_Q), "cu_seqlens_kv": cu(LENGTHS_Q)}
    # no gaps; gaps; padding after the last sequence alone
    for starts in (None, cu(np.add(LENGTHS_Q, 9)), cu(LENGTHS_Q)):
        gaps = starts is not None and starts[1] > LENGTHS_Q[0]
        at = np.concatenate(
            [
                b + np.arange(n)
                for b, n in zip(cu(LENGTHS_Q) if starts is None else starts, LENGTHS_Q, strict=False)
            ]
        )
        wide = draw(3, (sum(LENGTHS_Q) + (0 if starts is None else 20), hidden), "float32")
        g = np.zeros_like(wide)
        wide[at], g[at] = x, dy
        module = make(
            nn.MultiheadAttention,
            device,
            "float32",
            hidden_size=hidden,
            num_attention_heads=HEADS,
            num_gqa_groups=GROUPS,
            attention_dropout=0.0,
            qkv_format="thd",
            attn_mask_type="padding_causal",
            qk_norm_type=qk_norm,
        )
        more = (
            {"cu_seqlens_q_padded": starts, "cu_seqlens_kv_padded": starts, "pad_between_seqs": True}
            if gaps
            else {}
        )
        leaf = tensor(wide, requires_grad=True, device=device)
        y = module(leaf, rotary_pos_emb=freqs, **lengths, **more)
        y.backward(g)
        runs.append(
            {"y": f64(y)[at], "dx": f64(leaf.grad)[at]}
            | {name: f64(p.grad) for name, p in module.named_parameters()}
        )
    for run in runs[1:]:
        for name, want in runs[0].items():  # more rows, zeros, in the sums of the weights' gradients
            assert_close(name, run[name], want, "float32", 64 * hidden * U * np.abs(want).max())
