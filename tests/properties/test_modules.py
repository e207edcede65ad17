"""Modules and their gradients against NumPy's float64, for any shape and memory; what is refused leaves the
FP8 state as it was."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import fp8kit as fk
from fp8kit import nn
from fp8kit.autocast import autocast
from fp8kit.errors import Fp8kitError
from fp8kit.testing import assert_close, assert_same_bits, epsilon
from tests.support.draws import HIGH, OTHERS, attempt, examples, host, seeds, shapes, things, values
from tests.support.layers import MODES

F32 = np.dtype(np.float32)
WIDTHS = [1, 2, 3, 5, 16, 17, 33, 64, 130]
RECIPES = [recipe for recipe in MODES.values() if recipe is not None]
ANY = [*HIGH, *OTHERS, np.dtype(np.float64)]


def f64(value):
    return host(value).astype(np.float64)


def fill(module, seed):
    """Other weights, none of them small."""
    for i, parameter in enumerate(module.parameters()):
        with fk.no_grad():
            parameter.copy_(values(parameter.shape, parameter.dtype.numpy, seed + i))
    return module


def gradients(module, out, seed):
    """A cotangent for ``out``, after the walk back."""
    g = values(out.shape, out.dtype.numpy, seed)
    out.backward(g)
    return g.astype(np.float64)


def close(what, got, want, dtype, magnitude, terms, roundings=1):
    """A sum of ``terms`` float32 products of the given magnitude, of values that were rounded to ``dtype`` so
    many times."""
    slack = ((terms + 12) * 2.0**-24 + (roundings - 1) * epsilon(dtype)) * magnitude
    assert_close(what, host(got), want, dtype, slack)


@examples(150)
@given(
    things(ANY, 0, 3),
    st.sampled_from(WIDTHS),
    st.sampled_from(HIGH),
    st.booleans(),
    st.sampled_from([None, ("a",), ("a", "b", "c")]),
    seeds,
    st.booleans(),
)
def test_linear(x, features, dtype, bias, split, seed, given_size):
    width = x.values.shape[-1] if given_size and x.values.ndim and x.values.shape[-1] else 5
    layer = attempt(
        lambda: nn.Linear(
            width, features, bias=bias, parameters_split=split, params_dtype=dtype, device="cpu"
        )
    )
    if isinstance(layer, Fp8kitError):
        assert split is not None
        return
    fill(layer, seed)
    y = attempt(lambda: layer(x.thing), x)
    fits = x.values.ndim and x.values.shape[-1] == width and x.values.dtype == dtype and not x.refused
    assert isinstance(y, Fp8kitError) != bool(fits)
    if not fits:
        return
    w = np.concatenate([f64(p) for n, p in layer.named_parameters() if n.endswith("weight")])
    b = (
        np.concatenate([f64(p) for n, p in layer.named_parameters() if n.endswith("bias")])
        if bias
        else np.zeros(features)
    )
    rows = x.values.astype(float).reshape(-1, width)
    assert y.shape == (*x.values.shape[:-1], features)
    close(
        "y",
        y.reshape(-1, features) if y.view.size else y.reshape(len(rows), features),
        rows @ w.T + b,
        dtype,
        np.abs(rows) @ np.abs(w).T + np.abs(b),
        width,
        2,
    )
    g = gradients(layer, y, seed).reshape(-1, features)
    dw = np.concatenate([f64(p.grad) for n, p in layer.named_parameters() if n.endswith("weight")])
    close("dw", dw.astype(dtype), g.T @ rows, dtype, np.abs(g).T @ np.abs(rows), len(rows), 2)
    if bias:
        db = np.concatenate([f64(p.grad) for n, p in layer.named_parameters() if n.endswith("bias")])
        close("db", db.astype(dtype), g.sum(0), dtype, np.abs(g).sum(0), len(rows), 2)


@examples(120)
@given(
    things(ANY, 0, 3),
    st.sampled_from(HIGH),
    st.sampled_from([nn.LayerNorm, nn.RMSNorm]),
    st.booleans(),
    st.sampled_from([0.0, 1e-5, 1.0]),
    seeds,
)
def test_norms(x, dtype, kind, zero_centered, eps, seed):
    width = x.values.shape[-1] if x.values.ndim and x.values.shape[-1] else 4
    layer = fill(kind(width, eps, params_dtype=dtype, zero_centered_gamma=zero_centered, device="cpu"), seed)
    leaf = attempt(lambda: fk.tensor(x.thing, requires_grad=True), x)
    y = leaf if isinstance(leaf, Fp8kitError) else attempt(lambda: layer(leaf), x)
    fits = x.values.ndim and x.values.shape[-1] == width and x.values.dtype == dtype and not x.refused
    assert isinstance(y, Fp8kitError) != bool(fits)
    if not fits:
        return
    rows = x.values.astype(float).reshape(-1, width)
    mean = rows.mean(1, keepdims=True) if kind is nn.LayerNorm else np.zeros((len(rows), 1))
    power = ((rows - mean) ** 2).mean(1, keepdims=True) + np.float32(eps)
    if width == 1 or (eps == 0.0 and (power < 1e-12).any()):  # 0 / 0, or rounding errors divided by nothing
        return
    normed, gain = (rows - mean) / np.sqrt(power), f64(layer.weight) + zero_centered
    shift = f64(layer.bias) if kind is nn.LayerNorm else 0.0
    # relative errors: of a deviation, (N + 2) u of the row's largest value; of rstd, half that of the sum of
    # squares
    steep = 1 + np.abs(rows).max(1, keepdims=True, initial=0) / np.sqrt(power)
    slack = (width + 16) * 2.0**-24 * steep * (np.abs(normed) + steep) * np.abs(gain)
    assert_close(
        "y", host(y).reshape(rows.shape), normed * gain + shift, dtype, slack + 2.0**-22 * np.abs(shift)
    )
    g = gradients(layer, y, seed).reshape(rows.shape)
    d = g * gain
    level = d.mean(1, keepdims=True) if kind is nn.LayerNorm else 0.0
    dx = (d - level - normed * (d * normed).mean(1, keepdims=True)) / np.sqrt(power)
    size = (
        np.abs(d).max(1, keepdims=True, initial=0)
        * (1 + np.abs(normed).max(1, keepdims=True, initial=0)) ** 2
        / np.sqrt(power)
    )
    assert_close(
        "dx", host(leaf.grad).reshape(rows.shape), dx, dtype, 4 * (width + 16) * 2.0**-24 * steep**2 * size
    )
    weight_slack = (len(rows) + width + 16) * 2.0**-24 * (np.abs(g) * (np.abs(normed) + steep) * steep).sum(0)
    assert_close("dweight", host(layer.weight.grad), (g * normed).sum(0), dtype, weight_slack)


@examples(80)
@given(things(ANY, 0, 4), st.sampled_from([0.0, 1e-6, 1.0]), seeds)
def test_l2_normalization(x, eps, seed):
    dtype, layer = x.values.dtype, nn.L2Normalization(eps=eps)
    leaf = attempt(lambda: fk.tensor(x.thing, requires_grad=True), x)
    y = leaf if isinstance(leaf, Fp8kitError) else attempt(lambda: layer(leaf), x)
    fits = x.values.ndim and dtype in HIGH and not x.refused
    assert isinstance(y, Fp8kitError) != bool(fits)
    if not fits or not x.values.size:
        return
    rows = x.values.astype(float).reshape(-1, x.values.shape[-1])
    width, power = rows.shape[1], (rows**2).sum(1, keepdims=True) + np.float32(eps)
    if (power < 1e-12).any():
        return
    length = np.sqrt(power)
    slack = (width + 16) * 2.0**-24  # relative, of the sum of squares and of its root
    assert_close("y", host(y).reshape(rows.shape), rows / length, dtype, slack * np.abs(rows) / length)
    g = gradients(layer, y, seed).reshape(rows.shape)
    dx = (g - rows * (g * rows).sum(1, keepdims=True) / power) / length
    size = (np.abs(g) + np.abs(rows) * (np.abs(g) * np.abs(rows)).sum(1, keepdims=True) / power) / length
    assert_close("dx", host(leaf.grad).reshape(rows.shape), dx, dtype, 4 * slack * size)


@examples(100)
@given(
    things(ANY, 0, 3),
    st.sampled_from([1, 3, 16]),
    st.sampled_from(HIGH),
    seeds,
    st.sampled_from([60, 100, 100]),
)
def test_embedding(ids, features, dtype, seed, rows):
    layer = fill(nn.Embedding(rows, features, params_dtype=dtype, device="cpu"), seed)
    y = attempt(lambda: layer(ids.thing), ids)
    fits = ids.values.dtype in (np.int32, np.int64) and not ids.refused and (ids.values < rows).all()
    assert isinstance(y, Fp8kitError) != fits
    if fits:
        np.testing.assert_array_equal(f64(y), f64(layer.weight)[ids.values])
        g = gradients(layer, y, seed)
        dtable, size = np.zeros((rows, features)), np.zeros((rows, features))
        np.add.at(dtable, ids.values, g)
        np.add.at(size, ids.values, np.abs(g))
        close("dtable", layer.weight.grad, dtable, dtype, size, ids.values.size)


@examples(120)
@given(
    things(HIGH, 1, 3),
    st.sampled_from(["mean", "none"]),
    st.sampled_from([0.0, 0.1, 0.9]),
    st.sampled_from([-100, 0, 3]),
    seeds,
    st.booleans(),
)
def test_cross_entropy(x, reduction, smoothing, ignored, seed, wild):
    classes = x.values.shape[-1]
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, max(classes, 1), x.values.shape[:-1])
    targets = np.where(rng.random(targets.shape) < 0.2, ignored, targets)
    lost = rng.choice([0, 0, 1]) * rng.choice([-1, classes, 2**40, -(2**40)])  # a class that there is not
    if lost and targets.size:
        targets.reshape(-1)[-1] = lost
    outside = bool(((targets != ignored) & ((targets < 0) | (targets >= classes))).any())
    if wild:
        targets = targets[..., None]
    leaf = attempt(lambda: fk.tensor(x.thing, requires_grad=True), x)
    call = lambda: nn.cross_entropy(leaf, targets, reduction, smoothing, ignored)  # noqa: E731
    loss = leaf if isinstance(leaf, Fp8kitError) else attempt(call, x)
    if isinstance(loss, Fp8kitError):
        assert wild or x.refused or classes == 0 or outside
        return
    assert not outside
    z = x.values.astype(float).reshape(-1, classes)
    t = targets.reshape(-1)
    top = z.max(1, keepdims=True)
    lse = np.log(np.exp(z - top).sum(1)) + top[:, 0]
    kept = t != ignored
    inside = (t >= 0) & (t < classes)
    with np.errstate(invalid="ignore"):
        rows = (
            lse
            - (1 - smoothing) * np.where(inside, z[np.arange(len(z)), np.where(inside, t, 0)], np.nan)
            - smoothing * z.mean(1)
        )
    rows = np.where(kept, rows, 0.0)
    slack = (classes + 16) * 2.0**-23 * (1 + np.abs(z).max(1, initial=0))
    if reduction == "none":
        assert_close("loss", host(loss).reshape(-1), rows, "float32", slack)
        return
    count = max(int(kept.sum()), 1)
    mean_slack = (len(z) + 8) * 2.0**-24 * np.abs(rows).sum() / count + slack.max(initial=0)
    assert_close("mean", host(loss)[0], rows.sum() / count, "float32", mean_slack)
    loss.backward()
    onehot = np.zeros_like(z)
    onehot[np.flatnonzero(inside), t[inside]] = 1
    want = (np.exp(z - lse[:, None]) - (1 - smoothing) * onehot - smoothing / classes) * kept[:, None] / count
    assert_close(
        "dlogits", host(leaf.grad).reshape(z.shape), want, x.values.dtype, slack[:, None] * 2 / count
    )


@examples(60)
@given(things(ANY, 0, 3), st.sampled_from([0.0, 0.25, 0.9]), st.integers(0, 2**63 - 1), st.booleans())
def test_dropout(x, p, seed, training):
    layer = nn.Dropout(p).train(training)
    nn.manual_seed(seed)
    before = nn.get_rng_state()
    y = attempt(lambda: layer(x.thing), x)
    fits = x.values.dtype in HIGH and x.values.ndim and not x.refused
    if isinstance(y, Fp8kitError):
        assert not fits
        return
    if not (training and p):
        np.testing.assert_array_equal(f64(y), x.values.astype(float))
        return
    kept = x.values.astype(np.float32) * np.float32(1 / (1 - p))
    got = f64(y)
    assert ((got == 0) | (got == kept.astype(x.values.dtype).astype(float))).all()
    nn.set_rng_state(before)
    assert_same_bits("again", host(layer(x.thing)), host(y))


@examples(100)
@given(
    st.sampled_from([2, 4, 6, 16]),
    st.sampled_from([1, 2, 5]),
    st.sampled_from([1, 3]),
    st.sampled_from([1, 2, 7]),
    st.booleans(),
    st.sampled_from(["sbhd", "bshd"]),
    st.sampled_from(HIGH),
    st.integers(0, 3),
    seeds,
    st.sampled_from([1.0, 0.5]),
)
def test_rotary_embedding(dim, batch, heads, length, interleaved, form, dtype, offset, seed, percent):
    table = attempt(
        lambda: nn.RotaryPositionEmbedding(
            dim, percent, rotary_base=50.0, interleaved=interleaved, device="cpu"
        )
    )
    rotated = int(dim * percent)
    assert isinstance(table, Fp8kitError) == bool(rotated % 2)
    if rotated % 2:
        return
    freqs = table(length, offset)
    speeds = 50.0 ** -(np.arange(0, rotated, 2) / rotated)
    angles = np.outer(np.arange(length) + offset, speeds)
    doubled = np.repeat(angles, 2, 1) if interleaved else np.concatenate([angles, angles], 1)
    assert_close("angles", host(freqs).reshape(doubled.shape), doubled, "float32", 2.0**-20 * np.abs(doubled))
    x = values((length, batch, heads, dim), dtype, seed)
    given_ = x if form == "sbhd" else x.swapaxes(0, 1)  # any strides
    leaf = fk.tensor(given_, requires_grad=True)
    y = nn.apply_rotary_pos_emb(leaf, freqs, form, interleaved=interleaved)
    used = f64(freqs).reshape(length, 1, 1, rotated)

    def turn(v, sign):
        part = v[..., :rotated]
        if interleaved:
            other = np.stack([-part[..., 1::2], part[..., ::2]], -1).reshape(part.shape)
        else:
            other = np.concatenate([-part[..., rotated // 2 :], part[..., : rotated // 2]], -1)
        return np.concatenate([part * np.cos(used) + sign * other * np.sin(used), v[..., rotated:]], -1)

    wide = x.astype(float)
    got = f64(y) if form == "sbhd" else f64(y).swapaxes(0, 1)
    assert_close("y", got, turn(wide, 1), dtype, 2.0**-21 * (1 + np.abs(used).max()) * np.abs(wide).max())
    g = gradients(None, y, seed + 1)
    back = f64(leaf.grad) if form == "sbhd" else f64(leaf.grad).swapaxes(0, 1)
    upstream = g if form == "sbhd" else g.swapaxes(0, 1)
    assert_close("dx", back, turn(upstream, -1), dtype, 2.0**-21 * (1 + np.abs(used).max()) * np.abs(g).max())


def scales_of(module):
    return {name: np.array(host(view)).tobytes() for name, view in module.state_dict().items()}


LAYERS = {
    "Linear": lambda **o: nn.Linear(16, 8, **o),
    "LayerNormLinear": lambda **o: nn.LayerNormLinear(16, 8, parameters_split={"a": 3, "b": 5}, **o),
    "LayerNormMLP": lambda **o: nn.LayerNormMLP(16, 24, activation="swiglu", **o),
    "MultiheadAttention": lambda **o: nn.MultiheadAttention(16, 2, attention_dropout=0.0, **o),
    "TransformerLayer": lambda **o: nn.TransformerLayer(
        16, 32, 2, hidden_dropout=0.0, attention_dropout=0.0, **o
    ),
    "Sequential": lambda **o: nn.Sequential(
        nn.Linear(16, 16, **o), nn.ModuleList([nn.LayerNormLinear(16, 8, **o)])[0]
    ),
}


@examples(60)
@given(
    st.sampled_from(list(LAYERS)),
    st.sampled_from(RECIPES),
    things(ANY, 0, 3),
    shapes(2, 2),
    seeds,
    st.booleans(),
)
def test_what_is_refused_leaves_the_fp8_state(kind, how, wrong, leading, seed, calibrating):
    """A good step, a refused one, and a good one give the bits of two good ones."""
    dims = (3, 2) if kind in ("MultiheadAttention", "TransformerLayer") or 0 in leading else leading
    steps = [values((*dims, 16), F32, seed + i) for i in range(2)]
    finals = []
    for ruin in (False, True):
        nn.manual_seed(seed % 1000)
        layer = LAYERS[kind](device="cpu")
        for i, x in enumerate(steps):
            with autocast(calibrating=calibrating, recipe=how):
                y = layer(x)
            y = y[0] if isinstance(y, tuple) else y
            if ruin and i == 0:
                before = scales_of(layer)

                def call(layer=layer):
                    with autocast(calibrating=calibrating, recipe=how):
                        return layer(wrong.thing)

                random = nn.get_rng_state()
                refused = attempt(call, wrong)
                if not isinstance(refused, Fp8kitError):
                    return
                assert scales_of(layer) == before
                assert {k: v.tobytes() for k, v in nn.get_rng_state().items()} == {
                    k: v.tobytes() for k, v in random.items()
                }
                failed = attempt(lambda y=y: y.backward(np.zeros((7, 7, 7), np.float32)))
                assert isinstance(failed, Fp8kitError)
                assert scales_of(layer) == before
            y.backward(np.ones(y.shape, np.float32))
        finals.append(
            (scales_of(layer), host(y).tobytes(), [host(p.grad).tobytes() for p in layer.parameters()])
        )
    assert finals[0] == finals[1]


@examples(40)
@given(
    st.sampled_from(list(LAYERS)),
    st.sampled_from([None, *RECIPES]),
    seeds,
    st.sampled_from([(3, 2), (1, 1), (8, 3)]),
)
def test_recomputed_and_retained(kind, how, seed, dims):
    """``checkpoint`` gives the bits of a plain call, and a retained graph the same gradients twice."""
    x, seen = values((*dims, 16), F32, seed), []
    for wrap in (lambda f, v: f(v), fk.checkpoint):
        nn.manual_seed(seed % 1000)
        layer, leaf = LAYERS[kind](device="cpu"), fk.tensor(x, requires_grad=True)
        with autocast(enabled=how is not None, recipe=how):
            y = wrap(layer, leaf)
        y = y[0] if isinstance(y, tuple) else y
        g = values(y.shape, F32, seed + 1)
        y.backward(g, retain_graph=True)
        once = [host(p.grad).tobytes() for p in layer.parameters()]
        seen.append((host(y).tobytes(), host(leaf.grad).tobytes(), once, scales_of(layer)))
        if how is None or not how.delayed():
            for p in layer.parameters():
                p.grad = None
            y.backward(g)
            assert [host(p.grad).tobytes() for p in layer.parameters()] == once
        else:
            y.backward(g)
        failed = attempt(lambda y=y, g=g: y.backward(g))
        assert isinstance(failed, fk.AutogradError)
        assert "already run" in str(failed)
    assert seen[0] == seen[1]
