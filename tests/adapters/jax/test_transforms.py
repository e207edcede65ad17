"""jit, grad, vmap, scan, checkpoint, donation, eval_shape and shard_map give what calls one by one give, FP8
state included."""

from __future__ import annotations

import contextlib
import functools

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp8kit_jax import program
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import fp8kit as fk
from fp8kit.errors import AutogradError
from fp8kit.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from fp8kit.testing import assert_same_bits
from tests.support import sharding
from tests.support.combinations import combinations

RECIPES = {
    "high": None,
    "delayed": DelayedScaling(amax_history_len=3),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
}
K, N = 32, 48
BITS = 2.0**-20  # another order of float32 sums of at most K * 8 terms, relative to the largest value
near = functools.partial(sharding.near, bound=BITS)


def draw(seed, *shape):
    return jax.device_put(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def quantizers(recipe):
    return fj.noop_quantizer_set if recipe is None else fj.create_set(recipe)


def same(what, got, want):
    for path, a in jax.tree_util.tree_leaves_with_path(got):
        b = dict(jax.tree_util.tree_leaves_with_path(want))[path]
        assert_same_bits(f"{what}{jax.tree_util.keystr(path)}", np.asarray(a), np.asarray(b))


def alike(what, got, want):
    jax.tree.map(near, got, want)


def layer(x, w, b, sets):
    return fj.dense(x, w, b, quantizer_set=sets)


def unstacked(tree):
    leaves, form = jax.tree.flatten(tree)
    return [jax.tree.unflatten(form, parts) for parts in zip(*leaves, strict=True)] or [tree] * 3


@jax.jit
def of_one_step(sets, x, w, b):
    return jax.grad(lambda s: (layer(x, w, b, s) ** 2).sum())(sets)


def moved(recipe, x, w, b):
    """A state after one step, its scales no longer 1."""
    sets = quantizers(recipe)
    return of_one_step(sets, x, w, b) if recipe is not None and recipe.delayed() else sets


@combinations({"recipe": RECIPES.keys()}, usual=["delayed"])
def test_vmap_of_values_and_gradients_is_exact(recipe):
    x, w, b = (np.asarray(draw(i, *shape)) for i, shape in enumerate(((4, 16, K), (K, N), (N,))))
    x = x * np.exp2(np.arange(4, dtype=np.float32))[:, None, None]
    sets = moved(RECIPES[recipe], x[0], w, b)
    single = jax.jit(layer)
    each = np.stack([single(x[i], w, b, sets) for i in range(4)])
    # then BLAS may sum the longer matrix in another order, but where bits are promised
    flattened = recipe in ("high", "block")
    compare = alike if flattened else same
    compare("y", jax.jit(jax.vmap(layer, (0, None, None, None)))(x, w, b, sets), each)
    with fk.deterministic():
        same("the same bits", jax.jit(jax.vmap(layer, (0, None, None, None)))(x, w, b, sets), each)

    def loss(x, w, b):
        return (layer(x, w, b, sets) ** 2).sum()

    gradient = jax.grad(loss, (0, 1, 2))
    grads, alone = jax.jit(jax.vmap(gradient, (0, None, None)))(x, w, b), jax.jit(gradient)
    want = [alone(x[i], w, b) for i in range(4)]
    compare("per-example gradients", grads, jax.tree.map(lambda *g: np.stack(g), *want))
    ws = np.stack([w * (i + 1) for i in range(4)])
    same(
        "batched weights",
        jax.jit(jax.vmap(layer, (None, 0, None, None)))(x[0], ws, b, sets),
        np.stack([single(x[0], v, b, sets) for v in ws]),
    )


def test_vmap_of_gradients_that_read_an_output():
    """Attention's backward reads o and the gradient of o."""
    q, k, v = (draw(i, 3, 2, 8, 2, 16) for i in range(3))
    grads = jax.grad(lambda *own: (fj.dot_product_attention(*own) ** 2).sum(), (0, 1, 2))
    single = jax.jit(grads)
    want = [single(*own) for own in zip(*map(np.asarray, (q, k, v)), strict=True)]
    same("gradients", jax.jit(jax.vmap(grads))(q, k, v), jax.tree.map(lambda *g: np.stack(g), *want))


def test_vmap_of_rows_alone_is_the_same_bits():
    """Norms and activations flatten the batch into rows of one call."""
    x, gamma = draw(0, 4, 16, 2, K), draw(1, K)
    for function in (lambda x: fj.rmsnorm(x, gamma), lambda x: fj.activation(x, ("silu", "linear"))):
        batched = jax.jit(jax.vmap(function))
        same("rows", batched(x), jnp.stack([function(row) for row in x]))
        assert batched.lower(x).as_text().count("fp8kit.run") == 1
        assert "while" not in batched.lower(x).as_text()


def test_a_state_shared_by_a_batch_sees_the_largest_amax():
    recipe = RECIPES["delayed"]
    x, w, b = (np.asarray(draw(i, *shape)) for i, shape in enumerate(((4, 16, K), (K, N), (N,))))
    x = x * np.float32([1, 8, 2, 4])[:, None, None]
    sets = moved(recipe, x[0], w, b)

    def loss(sets, w):
        return (jax.vmap(layer, (0, None, None, None))(x, w, b, sets) ** 2).sum()

    new, _ = jax.jit(jax.grad(loss, (0, 1)))(sets, w)
    assert float(new.x.amax_history[-1]) == float(jnp.abs(x).max())
    assert np.asarray(new.x.scale)[0] == np.float32(448) / np.abs(np.asarray(x)).max()
    assert float(new.kernel.amax_history[-1]) == float(jnp.abs(w).max())
    single = jax.jit(layer)
    largest = max(np.abs(single(x[i], w, b, sets)).max() for i in range(4))
    assert float(new.grad.amax_history[-1]) == 2 * largest


@combinations({"remat": [False, True], "recipe": ["high", "delayed", "current"]}, usual=["True-delayed"])
def test_scan_over_layers_is_the_layers_one_by_one(recipe, remat):
    count, x = 3, draw(0, 16, K)
    ws, bs = draw(1, count, K, K) * 0.2, draw(2, count, K)
    one = moved(RECIPES[recipe], x, ws[0], bs[0])
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf * (i + 1) for i in range(count)]), one)

    def body(h, parts):
        return jnp.tanh(layer(h, *parts)), None

    body = jax.checkpoint(body) if remat else body

    def scanned(x, ws, bs, sets):
        return (jax.lax.scan(body, x, (ws, bs, sets))[0] ** 2).sum()

    def unrolled(x, ws, bs, sets):
        for parts in zip(ws, bs, unstacked(sets), strict=True):
            x = body(x, parts)[0]
        return (x**2).sum()

    got = jax.jit(jax.value_and_grad(scanned, (0, 1, 2, 3)))(x, ws, bs, stacked)
    want = jax.jit(jax.value_and_grad(unrolled, (0, 1, 2, 3)))(x, ws, bs, stacked)
    same("scan", got, want)


def test_checkpoint_updates_a_state_once():
    recipe = RECIPES["delayed"]
    x, w, b = draw(0, 16, K), draw(1, K, N), draw(2, N)
    sets = moved(recipe, x, w, b)

    def loss(w, sets):
        return (jax.checkpoint(layer)(x, w, b, sets) ** 2).sum()

    def plain(w, sets):
        return (layer(x, w, b, sets) ** 2).sum()

    same(
        "remat",
        jax.jit(jax.value_and_grad(loss, (0, 1)))(w, sets),
        jax.jit(jax.value_and_grad(plain, (0, 1)))(w, sets),
    )


def test_donated_state_and_eval_shape():
    x, w, b = draw(0, 16, K), draw(1, K, N), draw(2, N)
    step = jax.jit(jax.grad(lambda s: (layer(x, w, b, s) ** 2).sum()), donate_argnums=0)
    sets = quantizers(RECIPES["delayed"])
    want = of_one_step(quantizers(RECIPES["delayed"]), x, w, b)
    shape = jax.eval_shape(step, sets)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), shape) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), sets
    )
    same("donated", step(sets), want)
    assert sets.x.scale.is_deleted()


@pytest.mark.combinations
def test_donated_parameters_and_optimizer_state_train_alike():
    """A whole step whose parameters, FP8 state and input are donated gives what the step without donation
    gives, three times over."""
    start = {"w": draw(1, K, N), "b": draw(2, N), "sets": quantizers(RECIPES["delayed"])}

    def step(state, x):
        grads = jax.grad(lambda s: (layer(x, s["w"], s["b"], s["sets"]) ** 2).mean())(state)
        return {"w": state["w"] - 0.1 * grads["w"], "b": state["b"] - 0.1 * grads["b"], "sets": grads["sets"]}

    kept, given = start, jax.tree.map(jnp.copy, start)
    plain, donating = jax.jit(step), jax.jit(step, donate_argnums=(0,))
    for seed in range(3):
        before = given["w"]
        kept, given = plain(kept, draw(seed, 16, K)), donating(given, draw(seed, 16, K))
        assert before.is_deleted()
        same(f"step {seed}", given, kept)


MODES = {
    "disable_jit": lambda: jax.disable_jit(),
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_infs": lambda: jax.debug_infs(True),
    "x64": lambda: jax.enable_x64(True),
    "cleared": contextlib.nullcontext,
}


def regularized(recipe):
    """A step of a layer with dropout, and its arguments."""
    x, w, b = draw(0, 16, K), draw(1, K, N), draw(2, N)
    sets, key = quantizers(RECIPES[recipe]), jax.random.key(3)

    def loss(x, w, sets):
        y = layer(x, w, b, sets)
        return (fj.dropout_add(y, y, rate=0.5, key=key) ** 2).sum()

    return jax.value_and_grad(loss, (0, 1, 2), allow_int=True), (x, w, sets)


@functools.cache
def usual(recipe):
    """What it gives in no special mode."""
    step, arguments = regularized(recipe)
    return jax.jit(step)(*arguments)


# "cleared" makes every later test of the process compile again
@combinations(
    {"recipe": RECIPES.keys(), "mode": MODES.keys()},
    usual=["current-disable_jit", "current-debug_nans", "delayed-x64"],
)
def test_modes_of_jax_change_no_bits(recipe, mode):
    want, (step, arguments) = usual(recipe), regularized(recipe)
    if mode == "cleared":
        jax.clear_caches()
    with MODES[mode]():
        got = jax.jit(step)(*arguments)
    if mode in ("disable_jit", "cleared", "x64"):  # the squares' sum is XLA's, in whatever order
        near(got[0], want[0])
        got, want = got[1], want[1]
    same(mode, got, want)


def test_dropout_over_devices_in_either_width():
    """The same key, with JAX's integers of 32 and of 64 bits, in turn: the same numbers."""
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("data",))
    x, key = draw(0, 4, 16, K), jax.random.key(3)
    split = jax.device_put(x, NamedSharding(mesh, P("data")))
    want = fj.dropout_add(x, x, rate=0.5, key=key)
    for wide in (False, True, False):
        with jax.enable_x64(wide):
            same(f"x64 {wide}", [jax.jit(lambda x: fj.dropout_add(x, x, rate=0.5, key=key))(split)], [want])


def test_second_derivatives_are_refused_by_name():
    x, w, b = draw(0, 4, K), draw(1, K, 8), draw(2, 8)
    with pytest.raises(AutogradError, match=r"derivative: got a second-order one.* others are not supported"):
        jax.hessian(lambda w: (fj.dense(x, w, b) ** 2).sum())(w)
    for forward in (lambda f: jax.jvp(f, (w,), (w,)), lambda f: jax.jacfwd(f)(w)):
        with pytest.raises(
            AutogradError, match=r"dense: derivative: got one in forward mode \(jvp, jacfwd\), expected"
        ):
            forward(lambda w: fj.dense(x, w, b))


def test_sums_of_pmap_and_gradients_of_vmapped_scans():
    """Layers in a scan, elements in a vmap that share their state: the next state is that of the largest amax
    of all elements."""
    x, w, b = (np.asarray(draw(i, *shape)) for i, shape in enumerate(((4, 16, K), (2, K, K), (K,))))
    fresh = quantizers(RECIPES["delayed"])
    sets = jax.tree.map(lambda leaf: np.stack([leaf] * 2), fresh)

    def deep(w, sets, x):
        y, _ = jax.lax.scan(lambda x, own: (layer(x, own[0], b, own[1]), None), x, (w, sets))
        return (y**2).sum()

    _, state = jax.jit(jax.grad(lambda w, sets: jax.vmap(deep, (None, None, 0))(w, sets, x).sum(), (0, 1)))(
        w, sets
    )
    gradient = jax.jit(jax.grad(deep, 1))
    each = [gradient(w, sets, x[i]) for i in range(4)]
    for name in ("x", "kernel", "grad"):
        largest = np.max([np.asarray(getattr(own, name).amax_history) for own in each], 0)
        assert_same_bits(name, np.asarray(getattr(state, name).amax_history), largest)
    over = jax.pmap(lambda x: layer(x, w[0], b, fresh), devices=jax.devices("cpu")[:4])
    same("pmap", [over(x)], [np.stack([jax.jit(layer)(x[i], w[0], b, fresh) for i in range(4)])])


def test_jacobians_are_rows_of_gradients():
    """jacrev is a vmap of the pullback: every row is the gradient of one output. In float32 and for what has
    one row only, alike."""
    x, w, b = draw(0, 3, K), draw(1, K, 4), draw(2, 4)
    got = jax.jit(jax.jacrev(lambda x: fj.dense(x, w, b)))(x)
    want = np.einsum("rs,ko->rosk", np.eye(3), w)
    near(got, want)
    gamma, first = draw(3, K), np.asarray(x)[0]
    rows = jax.jit(jax.jacrev(fj.rmsnorm))(first, gamma)
    row = jax.jit(jax.grad(lambda v, i: fj.rmsnorm(v, gamma)[i]))
    near(rows, np.stack([row(first, i) for i in range(K)]))
    sets = quantizers(RECIPES["current"])
    rows = jax.jit(jax.jacrev(lambda x: layer(x, w, b, sets)[0]))(x)
    row = jax.jit(jax.grad(lambda v, i: layer(v, w, b, sets)[0, i]))
    same("jacrev in FP8", rows, np.stack([row(x, i) for i in range(4)]))


def squares(w, b, sets, x):
    return (layer(x, w, b, sets) ** 2).sum()


@functools.cache
def on_one_device(recipe):
    """Arguments of ``squares``, of very different rows, and value and gradients."""
    x, w, b = draw(0, 128, K) * jnp.exp2(jnp.arange(128.0) // 16 - 4)[:, None], draw(1, K, N), draw(2, N)
    arguments = w, b, moved(RECIPES[recipe], x, w, b), x
    return arguments, jax.jit(jax.value_and_grad(squares, (0, 1, 2)))(*arguments)


@combinations({"recipe": RECIPES.keys(), "check": {"vma": True, "no_vma": False}}, usual=["delayed-vma"])
def test_shard_map_is_one_device(recipe, check):
    """Rows over 8 devices: the state comes back once, its amaxes those of the whole batch, so that it is the
    one device's, bit for bit."""
    mesh = Mesh(np.array(jax.devices("cpu")[:8]), ("data",))
    arguments, (want_value, (want_dw, want_db, want_new)) = on_one_device(recipe)

    def local(w, b, sets, x):
        return jax.lax.psum(squares(w, b, sets, x), "data")

    sharded = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P(), P(), P("data")), out_specs=P(), check_vma=check
    )
    value, (dw, db, new) = jax.jit(jax.value_and_grad(sharded, (0, 1, 2)))(*arguments)
    same("state", new, want_new)
    for got, want in ((value, want_value), (dw, want_dw), (db, want_db)):
        near(got, want)


@combinations({"way": ["pmap", "no_vma"]}, usual=["pmap"])
def test_inside_of_devices_the_next_state_is_their_sum(way, caplog):
    """Where the gradient is taken in each device's function and JAX does not sum it: psum of the state is one
    device's, and a state that is not summed is named at its next use."""
    arguments, (_, (_, _, want)) = on_one_device("delayed")
    *shared, x = arguments
    devices = jax.devices("cpu")[:8]

    def own(w, b, sets, x):
        return jax.lax.psum(jax.grad(squares, (0, 1, 2))(w, b, sets, x)[2], "data")

    if way == "pmap":
        parts = jax.pmap(own, "data", in_axes=(None, None, None, 0), devices=devices)
        got = jax.tree.map(lambda leaf: leaf[0], parts(*shared, x.reshape(8, -1, K)))
    else:
        mesh, specs = Mesh(np.array(devices), ("data",)), (P(), P(), P(), P("data"))
        run = jax.shard_map(own, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
        got = jax.jit(run)(*shared, x)
    same("state", got, want)
    w, b, sets = shared
    zero = jax.tree.map(jnp.zeros_like, sets)
    program._warn_of_zero.cache_clear()
    jax.block_until_ready([layer(x, w, b, zero) for _ in range(2)])
    said = {record.getMessage().partition(",")[0] for record in caplog.records}
    assert said == {"linear: w_scale is 0", "linear: x_scale is 0"}


@pytest.mark.parametrize("jitted", [False, True])
def test_debug_nans_names_the_operation(jitted):
    """Forward and backward, as do jax.debug_infs; where all is finite nothing is raised."""

    def run(x, g):
        y, back = jax.vjp(lambda x: fj.rmsnorm(x, jnp.ones(K)), x)
        return y, back(g)

    call, fine = jax.jit(run) if jitted else run, jnp.ones((2, K))
    bad = fine.at[0, 0].set(jnp.inf)
    with jax.debug_nans(True), jax.debug_infs(True):
        call(fine, fine)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"\(nan\) .* norm, forward: y"):
        call(bad, fine)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"\(nan\) .* norm, backward: x"):
        call(fine, bad)
    tiny = jax.jit(fj.l2norm, static_argnums=1) if jitted else fj.l2norm
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match=r"\(inf\) .* norm, forward: y"):
        tiny(jnp.full((1, K), 1e-30), 0.0)


@combinations(
    {"recipe": RECIPES.keys(), "split": {"one axis": False, "both axes": True}}, usual=["delayed-both axes"]
)
def test_shard_map_over_two_axes(recipe, split):
    """Of a mesh with two axes a program may use one: what is the same along the other is shared by nobody,
    and so is the state."""
    mesh = Mesh(np.array(jax.devices("cpu")[:8]).reshape(4, 2), ("data", "tensor"))
    x, w, sets = (
        draw(0, 64, K) * jnp.exp2(jnp.arange(64.0) // 16)[:, None],
        draw(1, K, 64),
        quantizers(RECIPES[recipe]),
    )

    def loss(w, sets, x):
        return (fj.dense(x, w, quantizer_set=sets) ** 2).sum()

    axes, specs = (("data", "tensor"), P(None, "tensor")) if split else (("data",), P())
    sharded = jax.shard_map(
        lambda *a: jax.lax.psum(loss(*a), axes), mesh=mesh, in_specs=(specs, P(), P("data")), out_specs=P()
    )
    got, (dw, new) = jax.jit(jax.value_and_grad(sharded, (0, 1)))(w, sets, x)
    want, (want_dw, want_new) = jax.jit(jax.value_and_grad(loss, (0, 1)))(w, sets, x)
    same("state", new, want_new)
    near(got, want)
    near(dw, want_dw)


def test_stages_of_a_pipeline_have_scales_of_their_own():
    """Where their axis is named; otherwise the largest stage's scale is that of all."""
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("pp",))
    x, kernels = draw(0, 16, K), draw(1, 2, K, N) * jnp.array([1.0, 1e6])[:, None, None]

    def stages(resource):
        def stage(kernel, x):
            with fj.autocast(True, RECIPES["current"], resource):
                return fj.dense(x, kernel[0])[None]

        specs = {"in_specs": (P("pp"), P()), "out_specs": P("pp")}
        return np.asarray(jax.jit(jax.shard_map(stage, mesh=mesh, **specs))(kernels, x))

    with fj.autocast(True, RECIPES["current"]):
        want = np.stack([fj.dense(x, kernel) for kernel in kernels])
    assert_same_bits("own", stages(fj.MeshResource(pp_resource="pp")), want)
    assert (stages(None)[0] != want[0]).any()


@combinations({"check": {"vma": True, "no_vma": False}}, usual=["vma"])
def test_shard_map_outside_of_jit(check):
    """Under the policy that is in force when it is called."""
    mesh = Mesh(np.array(jax.devices("cpu")[:8]), ("data",))
    x, gamma = draw(0, 16, K), draw(1, K)
    sharded = jax.shard_map(
        lambda x: fj.rmsnorm(x, gamma), mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=check
    )
    for policy in (contextlib.nullcontext(), fk.deterministic()):
        with policy:
            same("y", [sharded(x)], [fj.rmsnorm(x, gamma)])


def gated(gamma, kernels, sets, x):
    y = fj.layernorm_mlp(
        x, gamma, None, kernels, norm_type="rmsnorm", activation_type=("silu", "linear"), quantizer_sets=sets
    )
    return (y**2).sum()


@functools.cache
def mlp_on_one_device(recipe):
    """Arguments of ``gated``, of very different batches, and value and gradients."""
    found = RECIPES[recipe]
    x, gamma, k1, k2 = (
        draw(0, 8, 16, K) * jnp.exp2(jnp.arange(8.0))[:, None, None],
        draw(1, K),
        draw(2, K, 2, N),
        draw(3, N, K),
    )
    arguments = gamma, (k1, k2), (fj.noop_quantizer_set,) * 2 if found is None else fj.create_set(found, 2), x
    return arguments, jax.jit(jax.value_and_grad(gated, (0, 1, 2)))(*arguments)


@combinations(
    {"recipe": ["high", "delayed", "current"], "manual": {"jit": False, "shard_map": True}}, usual=()
)
def test_an_mlp_over_devices_is_one_device(recipe, manual):
    """Rows over 8 devices. With current scaling the products' operands share their amaxes over devices, so
    that the codes are the same."""
    mesh = Mesh(np.array(jax.devices("cpu")[:8]), ("data",))
    (*shared, x), want = mlp_on_one_device(recipe)
    if manual:
        summed = jax.shard_map(
            lambda *a: jax.lax.psum(gated(*a), "data"),
            mesh=mesh,
            in_specs=(P(), P(), P(), P("data")),
            out_specs=P(),
        )
        got = jax.jit(jax.value_and_grad(summed, (0, 1, 2)))(*shared, x)
    else:
        whole = jax.device_put(tuple(shared), NamedSharding(mesh, P()))
        got = jax.jit(jax.value_and_grad(gated, (0, 1, 2)))(
            *whole, jax.device_put(x, NamedSharding(mesh, P("data")))
        )
    jax.tree.map(near, got, want)
