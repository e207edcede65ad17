"""What layers return beside y for a residual connection: x, whose gradient the norm's kernel adds, norm(x),
and a bias to be added later. And what adds a residual itself: ``dense``, an MLP and an attention, within
their last product.

The bits of whole layers are those of ``fp8kit.nn``: ``test_same_layers``. Here: the functions, over devices,
and under JAX's transforms.
"""

from __future__ import annotations

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from fp8kit_jax import flax as flax_modules
from fp8kit_jax import nnx as nnx_modules
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fp8kit.errors import ArgumentError, FormatError, ShapeError
from fp8kit.testing import assert_close, assert_same_bits
from tests.support.combinations import combinations
from tests.support.sharding import (
    BITS,
    CODES,
    JOINED,
    RECIPES,
    ROWS,
    check,
    check_explicit,
    draw,
    gradients,
    near,
    placed,
    two,
)

KEY = jax.random.key(3)


def projected(x, gamma, kernel, sets, *, kernel_layout="io"):
    """A norm and a product, joined by a residual that starts at x and one that starts at norm(x)."""
    y, normed, residual = fj.layernorm_dense(
        x,
        kernel,
        gamma,
        None,
        None,
        "rmsnorm",
        quantizer_set=sets[0],
        return_layernorm_output=True,
        return_residual=True,
        kernel_layout=kernel_layout,
    )
    return y.sum((2, 3))[..., None] + jnp.tanh(normed) + jnp.sin(residual)


def mlp(x, gamma, k1, k2, b1, b2, sets):
    """Likewise an MLP, whose last bias the join adds."""
    y, normed, residual, bias = fj.layernorm_mlp(
        x,
        gamma,
        None,
        (k1, k2),
        (b1, b2),
        "rmsnorm",
        quantizer_sets=sets,
        return_residual=True,
        return_layernorm_output=True,
        return_bias=True,
    )
    return fj.dropout_add(y, jnp.sin(residual) + jnp.tanh(normed), bias)


def separate(x, gamma, k1, k2, b1, b2, sets):
    """The same, with what XLA adds."""
    y = fj.layernorm_mlp(x, gamma, None, (k1, k2), (b1, b2), "rmsnorm", quantizer_sets=sets)
    return y + jnp.sin(x) + jnp.tanh(fj.rmsnorm(x, gamma))


def joining(x, gamma, k1, k2, b1, b2, sets, join=True):
    """An MLP that adds x itself, or where XLA does; norm(x) comes back too."""
    y, normed = fj.layernorm_mlp(
        x,
        gamma,
        None,
        (k1, k2),
        (b1, b2),
        "rmsnorm",
        quantizer_sets=sets,
        return_layernorm_output=True,
        join_residual=join,
    )
    return (y if join else y + x) + jnp.tanh(normed)


def adding(x, kernel, bias, residual, sets, join=True):
    """A product that adds a residual, or where XLA does."""
    y = fj.dense(x, kernel, bias, quantizer_set=sets, residual=residual if join else None)
    return y if join else y + residual


def operands(recipe, *features):
    s, k = (64, 256) if recipe == "block" else (16, 64)
    return (
        draw(0, 8, s, k),
        draw(1, k, *features) / 8,
        draw(2, *features),
        draw(3, 8, s, *features),
        two(recipe)[0],
    )


def arguments(recipe, parts=1):
    s, h, f = (64, 256, 1024) if recipe == "block" else (16, 64, 128)
    return (
        draw(0, 8, s, h),
        draw(5, h),
        draw(1, h, parts, f) / 8,
        draw(2, f, h) / 16,
        draw(3, parts, f),
        draw(4, h),
        two(recipe),
    )


def test_it_is_what_xla_adds():
    """In float32, without FP8: the same sums, but for their order."""
    args = arguments("high")
    jax.tree.map(lambda a, b: near(a, b, BITS), gradients(mlp, args), gradients(separate, args))
    x, kernel = args[0], draw(6, 64, 3, 64) / 8
    whole = gradients(projected, (x, args[1], kernel, args[-1]))
    want = gradients(
        lambda x, gamma, kernel: (
            fj.layernorm_dense(x, kernel, gamma, None, norm_type="rmsnorm").sum((2, 3))[..., None]
            + jnp.tanh(fj.rmsnorm(x, gamma))
            + jnp.sin(x)
        ),
        (x, args[1], kernel),
    )
    jax.tree.map(lambda a, b: near(a, b, BITS), whole[1][:3], want[1])
    swapped = gradients(
        lambda x, gamma, kernel, sets: projected(x, gamma, kernel, sets, kernel_layout="oi"),
        (x, args[1], jnp.moveaxis(kernel, 0, 2), args[-1]),
        (0,),
    )
    near(swapped[1][0], want[1][0], BITS)


@combinations({"recipe": RECIPES.keys()}, usual=())
def test_what_an_mlp_adds_is_what_xla_adds(recipe):
    """In float32: the same sums, but for their order. From the same cotangent come the same codes, and the
    same state."""
    args = arguments(recipe)
    g = draw(7, *args[0].shape)

    def pulled(join):
        y, back = jax.vjp(lambda *a: joining(*a, join), *args)
        return y, back(g)

    jax.tree.map(
        lambda a, b: near(a, b, BITS),
        jax.jit(pulled, static_argnums=0)(True),
        jax.jit(pulled, static_argnums=0)(False),
    )


@combinations(
    {"recipe": RECIPES.keys(), "features": [(48,), (3, 16), ()]}, usual=["delayed-(3, 16)", "high-(48,)"]
)
def test_what_a_product_adds_is_what_xla_adds(recipe, features):
    """In float32 the same bits: y, every gradient, and the state."""
    args = operands(recipe, *features)
    g = draw(7, *args[3].shape)

    def pulled(join):
        y, back = jax.vjp(lambda *a: adding(*a, join), *args)
        return y, back(g)

    got, want = (jax.jit(pulled, static_argnums=0)(join) for join in (True, False))
    jax.tree.map(lambda a, b: assert_same_bits("joined", np.asarray(a), np.asarray(b)), got, want)
    assert_same_bits("residual", np.asarray(got[1][3]), np.asarray(g))


@combinations({"recipe": RECIPES.keys()}, usual=["high", "block"])
def test_a_product_rounds_the_sum_once(recipe):
    """In bfloat16: half a step of the sum, and float32's own error, though some sums are small beside the
    product. The residual alone is differentiated."""
    x, kernel, bias, residual, sets = operands(recipe, 48)
    halves = [a.astype(jnp.bfloat16) for a in (x, kernel, bias, residual * 16)]
    y, back = jax.vjp(lambda r: adding(*halves[:3], r, sets), halves[3])
    want = np.asarray(adding(*(a.astype(jnp.float32) for a in halves), sets), np.float64)
    assert_close(
        "values",
        np.asarray(y, np.float64),
        want,
        "float32",
        BITS * np.abs(want).max() + 2.0 ** (-8) * np.abs(want),
    )
    assert_same_bits("residual", np.asarray(back(y)[0]), np.asarray(y))


@pytest.mark.parametrize("layout", ["oi", "transposed"])
def test_a_residual_lies_as_y_does(layout):
    x, residual = draw(0, 5, 16, 64), draw(3, 5, 16, 48)
    if layout == "oi":
        kernel, dims = draw(1, 48, 64), ((-1,), (1,))
    else:
        x, kernel, dims = x.transpose(2, 0, 1), draw(1, 64, 48), ((0,), (0,))
    got, want = fj.dense(x, kernel, None, dims, residual=residual), fj.dense(x, kernel, None, dims) + residual
    assert_same_bits(layout, np.asarray(got), np.asarray(want))


@pytest.mark.parametrize("used", [1, 2])
def test_what_is_used_alone(used):
    """norm(x) or x, y unused: their gradients, and zeros for the kernel."""
    x, gamma, kernel = draw(0, 4, 64), draw(5, 64), draw(1, 64, 48)
    alone = (None, lambda x, gamma: fj.rmsnorm(x, gamma), lambda x, gamma: x + 0 * gamma)[used]

    def found(x, gamma, kernel):
        return fj.layernorm_dense(
            x, kernel, gamma, None, norm_type="rmsnorm", return_layernorm_output=True, return_residual=True
        )[used]

    _, (dx, dgamma, dkernel) = gradients(found, (x, gamma, kernel))
    _, want = gradients(alone, (x, gamma))
    near(dx, want[0], BITS)
    assert_close(
        "values",
        np.asarray(dgamma),
        np.asarray(want[1]),
        "float32",
        BITS + BITS * np.abs(np.asarray(want[1])),
    )
    assert not np.asarray(dkernel).any()


@combinations(
    {"recipe": RECIPES.keys(), "axes": ["rows", "tensor", "both"], "function": [mlp, joining, projected]},
    usual=["delayed-tensor-joining", "high-tensor-projected"],
)
def test_over_devices(recipe, axes, function):
    """By the tensor axis dx is a sum over devices, which x and norm(x) join once. Nothing is gathered."""
    x, gamma, k1, k2, b1, b2, sets = arguments(recipe)
    rows, tensor = axes != "tensor", axes != "rows"
    data, columns = ROWS if rows else (), JOINED if tensor else ()
    specs = [data, (), columns, ("tensor",) if tensor else (), (None, "tensor") if tensor else (), (), ()]
    if function is not projected:
        check(function, (x, gamma, k1, k2, b1, b2, sets), specs, CODES if recipe == "block" else BITS)
        return
    kernel = draw(6, x.shape[-1], 3, 1024 if recipe == "block" else x.shape[-1]) / 16
    check(projected, (x, gamma, kernel, sets), [data, (), columns, ()], CODES if recipe == "block" else BITS)


# how x, kernel, bias and the residual are split
SPLITS = {
    "rows": (ROWS, (), (), ROWS),
    "columns": (ROWS, (None, "tensor"), ("tensor",), ("data", None, "tensor")),
    "columns of three": (ROWS, JOINED, (None, "tensor"), ("data", None, None, "tensor")),
    "contraction": (("data", None, "tensor"), ("tensor",), (), ROWS),
    "contraction of three": (("data", None, "tensor"), ("tensor",), (), ROWS),
    "contraction and columns": ((None, None, "tensor"), ("tensor", "data"), ("data",), (None, None, "data")),
    "the residual alone": ((), (), (), ROWS),
}


def split_case(recipe, split):
    n = 2048 if recipe == "block" and "columns" in split else 64  # squares of 128 keep their scales in fours
    return operands(recipe, *((3, n) if "three" in split else (n,))), (*SPLITS[split], ())


@combinations(
    {"recipe": RECIPES.keys(), "split": SPLITS.keys()},
    usual=["delayed-columns", "current-contraction and columns"],
)
def test_a_product_over_devices(recipe, split):
    """Where y is a sum over devices, the residual joins it once. Nothing is gathered."""
    args, specs = split_case(recipe, split)
    check(adding, args, specs, CODES)


# of x that is whole the gradient must be
@combinations(
    {"recipe": ["high", "current"], "split": list(SPLITS)[:-1]},
    usual=["high-columns of three", "current-contraction and columns"],
)
def test_a_product_over_an_explicit_mesh(recipe, split):
    args, specs = split_case(recipe, split)
    check_explicit(adding, args, specs, CODES)


@combinations({"recipe": ["high", "delayed", "current"]}, usual=["current"])
def test_a_residual_is_added_to_the_rounded_sum(recipe):
    """In bfloat16, a contraction over devices: the bits of an addition behind it, which does not round the
    residual with every part."""
    *args, sets = operands(recipe, 48)
    args = placed([a.astype(jnp.bfloat16) for a in args], SPLITS["contraction"])
    got, want = (jax.jit(adding, static_argnums=5)(*args, sets, join) for join in (True, False))
    assert_same_bits("y", np.asarray(got), np.asarray(want))


@combinations({"recipe": ["high", "delayed", "current"]}, usual=["current"])
def test_a_product_under_shard_map(recipe):
    """Rows over 8 devices, with one amax for all."""
    x, kernel, bias, residual, sets = operands(recipe, 48)
    mesh, rows = Mesh(np.array(jax.devices("cpu")[:8]), ("data",)), P("data")
    local = jax.shard_map(adding, mesh=mesh, in_specs=(rows, P(), P(), rows, P()), out_specs=rows)

    def pulled(function, x, residual):
        y, back = jax.vjp(lambda x, residual: function(x, kernel, bias, residual, sets), x, residual)
        return y, back(residual)

    got, want = (jax.jit(pulled, static_argnums=0)(function, x, residual) for function in (local, adding))
    jax.tree.map(lambda a, b: near(a, b, BITS), got, want)


def test_every_device_of_a_split_by_hand_adds_its_own():
    """As it adds a bias."""
    x, kernel, bias, residual, sets = operands("high", 48)
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("tensor",))
    local = jax.shard_map(
        lambda *a: jax.lax.psum(adding(*a, sets), "tensor"),
        mesh=mesh,
        in_specs=(P(None, None, "tensor"), P("tensor"), P(), P()),
        out_specs=P(),
    )
    near(jax.jit(local)(x, kernel, bias, residual), fj.dense(x, kernel) + 2 * (bias + residual), BITS)


@combinations(
    {"recipe": RECIPES.keys(), "features": [(48,), (3, 16)], "mapped": ["x", "residual", "both"]},
    usual=["high-(48,)-x"],
)
def test_a_batch_of_products(recipe, features, mapped):
    """Each element's own: y alone, for which both may become further rows, and with the gradients."""
    x, kernel, bias, residual, sets = operands(recipe, *features)
    batched = mapped != "residual", mapped != "x"
    given = [np.asarray(a) for a in (x, residual)]
    given = [np.stack([a, a * 3]) if own else a for a, own in zip(given, batched, strict=True)]
    axes = tuple(0 if own else None for own in batched)

    def one(x, residual):
        return adding(x, kernel, bias, residual, sets)

    def pulled(x, residual):
        y, back = jax.vjp(one, x, residual)
        return back(jnp.sin(y))

    def both(x, residual):
        return one(x, residual), pulled(x, residual)

    single = jax.jit(both)
    parts = [single(*(a[i] if own else a for a, own in zip(given, batched, strict=True))) for i in range(2)]
    want = jax.tree.map(lambda *leaves: np.stack(leaves), *parts)
    # y is computed in a program of its own: there nothing asks for gradients
    for function, own in zip((one, pulled), want, strict=True):
        jax.tree.map(lambda a, b: near(a, b, BITS), jax.jit(jax.vmap(function, axes))(*given), own)


@combinations({"recipe": ["high", "delayed", "current"], "function": [mlp, joining]}, usual=())
def test_over_an_explicit_mesh(recipe, function):
    specs = [("data",), (), JOINED, ("tensor",), (None, "tensor"), (), ()]
    check_explicit(function, arguments(recipe), specs)


@combinations(
    {"recipe": ["high", "delayed", "current"], "function": [mlp, joining]}, usual=["delayed-joining"]
)
def test_under_shard_map(recipe, function):
    """Rows over 8 devices; with current scaling the MLP runs in stages, which share their amaxes."""
    x, *shared = arguments(recipe)
    mesh, specs = Mesh(np.array(jax.devices("cpu")[:8]), ("data",)), (P("data"), *[P()] * len(shared))
    local = jax.shard_map(
        lambda x, *a: jax.lax.psum((function(x, *a) ** 2).sum(), "data"),
        mesh=mesh,
        in_specs=specs,
        out_specs=P(),
    )
    got = jax.jit(jax.value_and_grad(local, tuple(range(len(shared) + 1))))(x, *shared)
    jax.tree.map(lambda a, b: near(a, b, BITS), got, gradients(function, (x, *shared)))


@combinations({"function": [mlp, joining]}, usual=["joining"])
def test_stages_give_the_same_bits(function):
    """Current scaling on a mesh of one device, where the MLP runs in stages; in bfloat16, so that what is
    rounded twice shows."""
    *args, sets = arguments("current")
    args, g = [a.astype(jnp.bfloat16) for a in args], draw(7, *args[0].shape).astype(jnp.bfloat16)

    def pulled(g, *args):
        y, back = jax.vjp(lambda *a: function(*a, sets), *args)
        return y, back(g)

    mesh = Mesh(np.array(jax.devices("cpu")[:1]), ("data",))
    rows, count = P("data"), len(args) - 1
    specs = {"in_specs": (rows, rows, *[P()] * count), "out_specs": (rows, (rows, *[P()] * count))}
    got = jax.jit(jax.shard_map(pulled, mesh=mesh, **specs))(g, *args)
    jax.tree.map(
        lambda a, b: assert_same_bits("stages", np.asarray(a), np.asarray(b)), got, jax.jit(pulled)(g, *args)
    )


@combinations(
    {"recipe": ["high", "delayed", "current"], "joins": [False, True, "product"]}, usual=["current-product"]
)
def test_scan_checkpoint_and_vmap_change_no_bits(recipe, joins):
    x, *rest = arguments(recipe)
    weights, sets = rest[:-1], rest[-1]
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf * 2]), (weights, sets))

    def layer(h, parts):
        (gamma, k1, k2, b1, b2), sets = parts
        if joins == "product":
            return fj.dense(
                fj.dense(h, k1[:, 0], b1[0], quantizer_set=sets[0]), k2, b2, quantizer_set=sets[1], residual=h
            ), None
        if joins:
            return fj.layernorm_mlp(
                h, gamma, None, (k1, k2), (b1, b2), "rmsnorm", quantizer_sets=sets, join_residual=True
            ), None
        y, h, bias = fj.layernorm_mlp(
            h,
            gamma,
            None,
            (k1, k2),
            (b1, b2),
            "rmsnorm",
            quantizer_sets=sets,
            return_residual=True,
            return_bias=True,
        )
        return fj.dropout_add(y, h, bias), None

    def one_by_one(x, stacked):
        for i in range(2):
            x = layer(x, jax.tree.map(lambda leaf, i=i: leaf[i], stacked))[0]
        return x

    want = gradients(one_by_one, (x, stacked))
    for body in (layer, jax.checkpoint(layer)):
        got = gradients(lambda x, stacked, body=body: jax.lax.scan(body, x, stacked)[0], (x, stacked))
        jax.tree.map(lambda a, b: assert_same_bits("scan", np.asarray(a), np.asarray(b)), got, want)
    if joins == "product":
        return  # without saved arrays a batch is further rows: test_a_batch_of_products
    batch = jnp.stack([x, x * 3])

    def pulled(x):
        y, back = jax.vjp(lambda x: layer(x, (weights, sets))[0], x)
        return y, back(y)[0]

    single = jax.jit(pulled)
    each = jax.tree.map(lambda *leaves: jnp.stack(leaves), single(batch[0]), single(batch[1]))
    jax.tree.map(
        lambda a, b: assert_same_bits("vmap", np.asarray(a), np.asarray(b)),
        jax.jit(jax.vmap(pulled))(batch),
        each,
    )
    # without saved arrays a batch is further rows
    near(jax.vmap(lambda x: pulled(x)[0])(batch), each[0], BITS)


def test_what_does_not_fit_a_residual():
    x, kernel, residual = draw(0, 16, 64), draw(1, 64, 48), draw(3, 16, 48)
    wrong = {
        r"dense: residual: got shape \(48, 16\), expected shape \(16, 48\), as y": residual.T,
        r"dense: residual: got bfloat16, expected float32": residual.astype(jnp.bfloat16),
        r"dense: residual: got 'word', expected an array": "word",
    }
    for message, value in wrong.items():
        with pytest.raises((ShapeError, FormatError), match=message):
            fj.dense(x, kernel, residual=value)
    calls = {
        "dense": lambda: fj.dense(x, kernel, return_bias=True, residual=residual),
        "DenseGeneral": lambda: flax_modules.DenseGeneral(48, return_bias=True).init(KEY, x, residual),
        "dense (NNX)": lambda: nnx_modules.DenseGeneral(64, 48, rngs=nnx.Rngs(0))(
            x, return_bias=True, residual=residual
        ),
    }
    for name, call in calls.items():
        with pytest.raises(
            ArgumentError, match=rf"{name.split()[0]}: return_bias: got True, expected False with a residual"
        ):
            call()
    with pytest.raises(
        ArgumentError,
        match="MultiHeadAttention: join_residual: got True, expected False with join_layernorm_output",
    ):
        flax_modules.MultiHeadAttention(16, 4, join_residual=True, join_layernorm_output=True).init(
            KEY, x[None], x[None]
        )


@pytest.mark.parametrize("asked", ["return_residual", "return_bias"])
def test_a_fused_residual_does_not_come_back(asked):
    x, gamma, kernels, more = (
        draw(0, 16, 64),
        jnp.ones(64),
        (draw(1, 64, 1, 32), draw(2, 32, 64)),
        {asked: True, "join_residual": True},
    )
    calls = {
        "layernorm_mlp": lambda: fj.layernorm_mlp(x, gamma, None, kernels, norm_type="rmsnorm", **more),
        "LayerNormMLP": lambda: flax_modules.LayerNormMLP(32, enable_layernorm=False, **more).init(KEY, x),
        "layernorm_mlp (NNX)": lambda: nnx_modules.LayerNormMLP(64, 32, rngs=nnx.Rngs(0))(x, **more),
        "MultiHeadAttention": lambda: flax_modules.MultiHeadAttention(16, 4, **more).init(
            KEY, x[None], x[None]
        ),
        "MultiHeadAttention (NNX)": lambda: nnx_modules.MultiHeadAttention(64, 4, rngs=nnx.Rngs(0))(
            x[None], **more
        ),
    }
    for name, call in calls.items():
        with pytest.raises(
            ArgumentError, match=rf"{name.split()[0]}: {asked}: got True, expected False with join_residual"
        ):
            call()
    with pytest.raises(
        ShapeError, match=r"layernorm_mlp: fc2: got 48 output features, expected 64, as x, to join"
    ):
        fj.layernorm_mlp(
            x, gamma, None, (kernels[0], draw(2, 32, 48)), norm_type="rmsnorm", join_residual=True
        )
