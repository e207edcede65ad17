"""MultiheadAttention, LayerNormMLP and TransformerLayer of every form in float64 with running error bounds,
"sbhd", rotary halves.

Parts compute their output where they are made, and give gradients by ``backward``; parameters' go into
``grads`` by name.
"""

from __future__ import annotations

import numpy as np

from tests.support.layers import quantiser
from tests.support.products import Product
from tests.support.running_error import R, U, activation, norm, norm_grad

TRIG = 8 * 2.0**-24  # cos and sin of a float32 angle: relative to a radian or so


def join(parts, axis):
    return R(np.concatenate([p.v for p in parts], axis), np.concatenate([p.e for p in parts], axis))


class Head:
    """One batch and head: o = softmax(scale q k^T) v; ``seen``: bool (s_q, s_kv). ``p_error``: relative
    rounding of P and dS."""

    def __init__(self, q, k, v, seen, scale, p_error):
        self.q, self.k, self.v, self.scale, self.p_error = q, k, v, scale, p_error
        scores = (q @ k.T) * scale
        masked = np.where(seen, scores.v, -np.inf)
        top = masked.max(1, keepdims=True)
        weights = np.exp(masked - top)
        total = weights.sum(1, keepdims=True)
        p = weights / total
        doubt = np.where(seen, scores.e + U * (np.abs(scores.v) + 16), 0)
        relative = 2 * doubt.max(1, keepdims=True) + (seen.shape[1] + 8) * U + p_error
        self.p = R(p, 1.1 * p * relative)
        self.o = self.p @ v

    def backward(self, do):
        dp = do @ self.v.T
        ds = self.p * (dp - (do * self.o).sum(1, True)) * self.scale
        ds = R(ds.v, ds.e + self.p_error * np.abs(ds.v))
        return ds @ self.k, ds.T @ self.q, self.p.T @ do


def turn(x, angle, sign, dtype):
    """Heads (s, b, h, d) rotated by angles (s, d / 2): the two halves of each are the pairs."""
    half = x.v.shape[-1] // 2
    cos, sin = (
        R(f(angle)[:, None, None], TRIG * (1 + np.abs(angle[:, None, None]))) for f in (np.cos, np.sin)
    )
    low, high = x[..., :half], x[..., half:]
    return join([low * cos - high * sin * sign, high * cos + low * sin * sign], -1).rounded(dtype)


class Normed:
    """norm(x) of rows, stored; gradients of the parameters called ``prefix`` + weight or bias."""

    def __init__(self, x, p, prefix, kind, eps, dtype, grads):
        self.rows = x.v.shape
        self.weight, bias = p.get(f"{prefix}weight"), p.get(f"{prefix}bias")
        self.kind, self.prefix, self.grads, self.dtype = kind, prefix, grads, dtype
        x = x.reshape(-1, x.v.shape[-1])
        if kind == "L2Normalization":  # sum of x^2, not its mean
            self.weight, eps, self.kind = x.v.shape[-1] ** -0.5, eps / x.v.shape[-1], "RMSNorm"
        y, self.hat, self.rstd = norm(x, self.weight, bias, self.kind, eps)
        self.y = y.rounded(dtype).reshape(*self.rows)

    def backward(self, g):
        """dx, not rounded."""
        dx, dw, db = norm_grad(g.reshape(-1, g.v.shape[-1]), self.hat, self.rstd, self.weight, self.kind)
        self.grads |= {
            f"{self.prefix}weight": dw.rounded(self.dtype),
            f"{self.prefix}bias": db.rounded(self.dtype),
        }
        return dx.reshape(*self.rows)


class Branch:
    """What attention and MLP share: the norm before them, and where the residual stream's gradient goes."""

    def enter(self, x, p, prefix, kind, dtype):
        self.p, self.dtype, self.grads = p, dtype, {}
        self.norm = Normed(x, p, prefix, kind, 1e-5, dtype, self.grads) if f"{prefix}weight" in p else None
        self.normed = x if self.norm is None else self.norm.y

    def leave(self, dnormed, stream, post):
        """dx: ``stream`` is the residual's gradient, or None; it started after the norm with ``post``."""
        dnormed = dnormed.rounded(self.dtype)
        if self.norm is None:
            return dnormed if stream is None else (dnormed + stream).rounded(self.dtype)
        if stream is not None and post:
            dnormed = (dnormed + stream).rounded(self.dtype)
        dx = self.norm.backward(dnormed)
        return (dx + stream if stream is not None and not post else dx).rounded(self.dtype)

    def keep(self, child, parts, dw, db):
        """Gradients of a projection, by the names that its weights have; ``parts``: name -> rows."""
        whole = {"": slice(None)} if f"{child}weight" in self.p else parts
        for part, rows in whole.items():
            name = f"{child}{part}_" if part else child
            self.grads |= {
                f"{name}weight": dw[rows].rounded(self.dtype),
                f"{name}bias": db[rows].rounded(self.dtype),
            }

    def weights(self, child, parts):
        """(weight, bias or None) of a projection."""
        names = [child] if f"{child}weight" in self.p else [f"{child}{part}_" for part in parts]
        found = [
            [self.p[f"{name}{kind}"] for name in names if f"{name}{kind}" in self.p]
            for kind in ("weight", "bias")
        ]
        return np.concatenate(found[0]), np.concatenate(found[1]) if found[1] else None


class Block(Branch):
    """MultiheadAttention of x R (s b, H) and, across, of ``source`` R (s' b, H). ``angles``: of queries and
    keys, (s, d / 2), or None."""

    def __init__(
        self,
        module,
        p,
        prefix,
        mode,
        dtype,
        x,
        source=None,
        batch=2,
        kind="LayerNorm",
        angles=None,
        causal=True,
        qk="",
        eps=1e-6,
    ):
        core, first = module.core_attention, f"{prefix}{module._first}."
        self.enter(x, p, f"{first}layer_norm_", kind, dtype)
        self.h, self.g, self.d = core.num_attention_heads, core.num_gqa_groups, core.kv_channels
        self.batch, self.angles, self.before, self.first, self.prefix = (
            batch,
            angles,
            module.qk_norm_before_rope,
            first,
            prefix,
        )
        interleaved = module._interleaved
        sizes = {"query": self.h, "key": self.g, "value": self.g}
        self.children = (
            {first: tuple(sizes)}
            if source is None
            else {first: ("query",), f"{prefix}key_value.": ("key", "value")}
        )
        self.products, self.rows, self.own, found = {}, {}, {}, {}
        for child, parts in self.children.items():
            weight, bias = self.weights(child, parts)
            groups = self.g if interleaved and (source is None or child != first) else 1
            at = np.arange(len(weight)).reshape(groups, -1)
            edges = np.cumsum([0, *(sizes[part] // groups * self.d for part in parts)])
            rows = {part: at[:, a:b].ravel() for part, a, b in zip(parts, edges[:-1], edges[1:], strict=True)}
            name = child.removeprefix(prefix).rstrip(".")
            product = Product(
                self.normed if child == first else source, weight, quantiser(mode, getattr(module, name))
            )
            out = product.forward(bias).rounded(dtype)
            self.products[child], self.rows[child] = product, rows
            own = np.cumsum([0, *(sizes[part] * self.d for part in parts)])
            self.own[child] = {part: slice(a, b) for part, a, b in zip(parts, own[:-1], own[1:], strict=True)}
            for part, index in rows.items():
                found[part] = out[:, index].reshape(-1, batch, sizes[part], self.d)
        self.qk = {}
        for side, part in enumerate(("query", "key")):
            found[part] = self.place(part, side, found[part], qk, eps)
        q, k, v = found.values()
        self.shapes = {part: value.v.shape for part, value in found.items()}
        seen = np.ones((q.v.shape[0], k.v.shape[0]), bool)
        seen = np.tril(seen) if causal else seen
        noise = 0.0 if dtype == "float32" else 2.0 ** -(8 if dtype == "bfloat16" else 10)
        share = self.h // self.g
        self.heads = {
            (b, i): Head(q[:, b, i], k[:, b, i // share], v[:, b, i // share], seen, self.d**-0.5, noise)
            for b in range(batch)
            for i in range(self.h)
        }
        o = self.gather({at: head.o for at, head in self.heads.items()}, self.shapes["query"]).rounded(dtype)
        self.proj = Product(o.reshape(len(x.v), -1), p[f"{prefix}proj.weight"], quantiser(mode, module.proj))
        self.y, self.bias = self.proj.forward(), p.get(f"{prefix}proj.bias")

    def place(self, part, side, x, qk, eps):
        """Normalised and rotated, in the wanted order."""

        def normed(x):
            if not qk:
                return x
            self.qk[part] = Normed(
                x, self.p, f"{self.prefix}{'qk'[side]}_norm.", qk, eps, self.dtype, self.grads
            )
            return self.qk[part].y

        x = normed(x) if self.before else x
        x = turn(x, self.angles[side], 1, self.dtype) if self.angles else x
        return x if self.before else normed(x)

    def unplace(self, part, side, g):
        def normed(g):
            return self.qk[part].backward(g).rounded(self.dtype) if part in self.qk else g

        g = g if self.before else normed(g)
        g = turn(g, self.angles[side], -1, self.dtype) if self.angles else g
        return normed(g) if self.before else g

    def gather(self, parts, shape):
        """Heads' results (s, d) in one array; several query heads of a group add up."""
        v, e = np.zeros(shape), np.zeros(shape)
        for (b, i), part in parts.items():
            at = slice(None), b, i * shape[2] // self.h
            v[at] += part.v
            e[at] += part.e + 4 * 2.0**-23 * np.abs(part.v)
        return R(v, e)

    def backward(self, g, stream=None, post=False):
        """(dx, d source or None) for the cotangent of y, not counting the bias; grads filled."""
        do, dwp, dbp = self.proj.backward(g)
        self.grads |= {
            f"{self.prefix}proj.weight": dwp.rounded(self.dtype),
            f"{self.prefix}proj.bias": dbp.rounded(self.dtype),
        }
        do = do.rounded(self.dtype).reshape(*self.shapes["query"])
        heads = {at: head.backward(do[:, at[0], at[1]]) for at, head in self.heads.items()}
        parts = {
            part: self.gather({at: g[i] for at, g in heads.items()}, shape).rounded(self.dtype)
            for i, (part, shape) in enumerate(self.shapes.items())
        }
        for side, part in enumerate(("query", "key")):
            parts[part] = self.unplace(part, side, parts[part])
        inputs = []
        for child, names in self.children.items():
            rows = self.rows[child]
            order = np.argsort(np.concatenate([rows[name] for name in names]))
            dy = join([parts[name].reshape(-1, len(rows[name])) for name in names], 1)[:, order]
            dx, dw, db = self.products[child].backward(dy)
            self.keep(child, self.own[child], dw, db)
            inputs.append(dx)
        return self.leave(inputs[0], stream, post), inputs[1].rounded(self.dtype) if len(inputs) > 1 else None


class Mlp(Branch):
    """LayerNormMLP of x R (rows, H), its activation "silu"."""

    def __init__(self, module, p, prefix, mode, dtype, x, kind="LayerNorm"):
        self.enter(x, p, f"{prefix}layer_norm_", kind, dtype)
        self.prefix = prefix
        self.fc1 = Product(self.normed, p[f"{prefix}fc1_weight"], quantiser(mode, module, 0))
        h = self.fc1.forward().rounded(dtype)
        h = h + p[f"{prefix}fc1_bias"] if f"{prefix}fc1_bias" in p else h
        act, self.back = activation(h, "silu")
        self.fc2 = Product(act.rounded(dtype), p[f"{prefix}fc2_weight"], quantiser(mode, module, 1))
        self.y, self.bias = self.fc2.forward(), p.get(f"{prefix}fc2_bias")

    def backward(self, g, stream=None, post=False):
        """dx for the cotangent of y; grads filled."""
        dact, dw2, db2 = self.fc2.backward(g)
        dnormed, dw1, db1 = self.fc1.backward(self.back(dact.rounded(self.dtype)).rounded(self.dtype))
        named = {"fc2_weight": dw2, "fc2_bias": db2, "fc1_weight": dw1, "fc1_bias": db1}
        self.grads |= {f"{self.prefix}{name}": value.rounded(self.dtype) for name, value in named.items()}
        return self.leave(dnormed, stream, post)


def joined(part, residual, dtype, factor=None):
    """residual + the branch and its bias, times ``factor`` (rows, 1) of the samples' paths if given."""
    y = part.y.rounded(dtype)
    if factor is None:
        return ((y if part.bias is None else y + part.bias) + residual).rounded(dtype)
    y = y if part.bias is None else (y + part.bias).rounded(dtype)
    return (y * factor + residual).rounded(dtype)


def layer_step(module, p, mode, dtype, kind, x, g, source=None, factors=(None, None), batch=2):
    """(y, dx, d source, gradients by name) of a TransformerLayer for x, g R (s b, H)."""
    post, parallel = module.apply_residual_connection_post_layernorm, module.parallel_attention_mlp

    def down(top, factor):
        return top if factor is None else (top * factor).rounded(dtype)

    attention = Block(module.self_attention, p, "self_attention.", mode, dtype, x, batch=batch, kind=kind)
    if parallel:
        mlp = Mlp(module.layernorm_mlp, p, "layernorm_mlp.", mode, dtype, x, kind)
        both = [
            (part.y if part.bias is None else part.y + part.bias).rounded(dtype) for part in (attention, mlp)
        ]
        total = (both[0] + both[1]).rounded(dtype)
        y = ((total if factors[0] is None else total * factors[0]) + x).rounded(dtype)
        inner = down(g, factors[0])
        dx, _ = attention.backward(inner, mlp.backward(inner, g))
        return y, dx, None, attention.grads | mlp.grads

    first_post = post and attention.norm is not None
    a = joined(attention, attention.normed if first_post else x, dtype, factors[0])
    inter, after = None, a
    if module.inter_attention is not None:
        inter = Block(
            module.inter_attention, p, "inter_attention.", mode, dtype, a, source, batch, kind, causal=False
        )
        after = joined(inter, inter.normed if post else a, dtype)
    mlp = Mlp(module.layernorm_mlp, p, "layernorm_mlp.", mode, dtype, after, kind)
    y = joined(mlp, mlp.normed if post else after, dtype, factors[1])
    grads, top = {}, g
    if module.layernorm is not None:
        last = Normed(y, p, "layernorm.", kind, 1e-5, dtype, grads)
        y, top = last.y, last.backward(g).rounded(dtype)
    dsource = None
    d = mlp.backward(down(top, factors[1]), top, post)
    if inter is not None:
        d, dsource = inter.backward(d, d, post)
        grads |= inter.grads
    dx, _ = attention.backward(down(d, factors[0]), d, first_post)
    return y, dx, dsource, grads | attention.grads | mlp.grads
