"""The same bits as the native frontend on the CPU and on a GPU: functions without weights, attention, casts
and products of codes, draws of the same seed. ``softmax`` is not among them: it is XLA's own code, and the
native frontend has no such function."""

from __future__ import annotations

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp8kit_jax.activations import ACTIVATION_TYPES

import fp8kit as fk
from fp8kit import arrays, nn
from fp8kit.autograd import apply
from fp8kit.ops.activation import ActivationSpec, activation, activation_numbers
from fp8kit.ops.drop_path import DropPathSpec, drop_path
from fp8kit.ops.dropout_add import DropoutAddSpec, dropout_add
from fp8kit.testing import assert_same_bits
from tests.adapters.jax.native import draw, host, same_function
from tests.support.combinations import combinations

pytestmark = pytest.mark.usefixtures("same_bits")
DTYPES = ["float32", "bfloat16"]
by_dtype = pytest.mark.parametrize("dtype", DTYPES)
SEED = (3 << 32) | 7


def key(offset=0):
    """A key's words are the seed, low word first, and, of a key of four words, the offset: what the native
    frontend draws first is offset 0."""
    return np.array([SEED % 2**32, SEED >> 32, *([offset, 0] if offset else [])], np.uint32)


@combinations(
    {
        "types": {"-".join(types): types for types in sorted(ACTIVATION_TYPES.keys() - {("xielu",)})},
        "dtype": DTYPES,
    }
)
def test_activation(types, dtype, device):
    """But xIELU, which has inputs of its own: ``test_outlier_free``."""
    name, parts = ACTIVATION_TYPES[types], len(types)
    numbers = {"limit": 0.5, "alpha": 1.5} if name.startswith("clamped") else None
    spec = ActivationSpec(name, 24 * parts, activation_numbers("activation", name, numbers))
    same_function(
        name,
        lambda x: fj.activation(x.reshape(3, 5, parts, 24), types, numbers),
        lambda x: apply(activation, spec, {"x": x})["y"],
        [draw(0, (3, 5, 24 * parts), dtype)],
        device,
    )


ANGLES = np.asarray(np.random.default_rng(5).uniform(0, 6, (16, 8)), np.float32)
STARTS, SUMS = np.array([4, 0], np.int32), np.array([0, 2, 9], np.int32)
# x's shape, and the arguments of both frontends
TURNS = {
    "bshd": ((2, 7, 3, 12), {}, {}),
    "starts": ((2, 7, 3, 12), {"start_positions": STARTS}, {}),
    "sbhd": ((7, 2, 3, 8), {}, {"interleaved": True}),
    "thd": ((9, 3, 8), {"cu_seqlens": SUMS}, {}),
}


@combinations({"case": TURNS.keys(), "dtype": DTYPES})
def test_rope(case, dtype, device):
    shape, given, options = TURNS[case]
    form = case if case in ("sbhd", "thd") else "bshd"
    same_function(
        case,
        lambda x: fj.rope(x, ANGLES, qkv_format=form, **given, **options),
        nn.apply_rotary_pos_emb,
        [draw(0, shape, dtype)],
        device,
        lambda put: (
            {"freqs": put(ANGLES.reshape(16, 1, 1, 8)), "tensor_format": form, **options}
            | {name: put(value) for name, value in given.items()}
        ),
    )


TARGETS = np.array([3, 0, 29, -100, 7, 7], np.int32)


@by_dtype
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_fused_cross_entropy(reduction, dtype, device):
    same_function(
        reduction,
        lambda x: fj.fused_cross_entropy(x, TARGETS, 0.1, reduction),
        lambda x, targets: nn.cross_entropy(x, targets, reduction, 0.1),
        [draw(0, (6, 30), dtype)],
        device,
        lambda put: {"targets": put(TARGETS)},
    )


@by_dtype
def test_functions_that_draw(dtype, device):
    """Dropout and dropped paths of the same seed, and the norm without parameters."""
    x, residual, bias = draw(0, (6, 5, 40), dtype), draw(1, (6, 5, 40), dtype), draw(2, (40,), dtype)

    def drawn(operation, spec, names):
        return lambda *values: apply(
            operation, spec, dict(zip(names, values, strict=True)), draw=nn.random.next_rng
        )["y"]

    cases = {
        "l2norm": (lambda x: fj.l2norm(x), nn.L2Normalization(eps=1e-6), [x]),
        "dropout": (lambda x: fj.dropout_add(x, rate=0.3, key=key()), nn.Dropout(0.3), [x]),
        "dropout_add": (
            lambda x, r, b: fj.dropout_add(x, r, b, 0.3, key()),
            drawn(dropout_add, DropoutAddSpec(40, 0.3), ("x", "residual", "bias")),
            [x, residual, bias],
        ),
        "drop_path": (
            lambda x, r: fj.drop_path(x, r, 0.5, key()),
            drawn(drop_path, DropPathSpec(40, 0.5, "bshd"), ("x", "residual")),
            [x, residual],
        ),
    }
    for name, (function, native, values) in cases.items():
        fk.manual_seed(SEED)
        same_function(name, function, native, values, device)


def test_the_pair_of_a_key(device):
    """Keys of one kind and the other, of two words and of four; the native frontend drops by the pair what
    JAX drops by the key."""
    x = draw(0, (6, 5, 40))
    for one in (
        key(),
        key(9),
        jax.random.key(3),
        jax.random.PRNGKey(2**31),
        jax.random.split(jax.random.key(3, impl="rbg"))[1],
    ):
        typed = jnp.issubdtype(one.dtype, jax.dtypes.prng_key)
        words = np.asarray(jax.random.key_data(one) if typed else one).astype(np.int64)
        pair = fj.dropout_seed(one)
        assert pair.dtype == np.int64
        np.testing.assert_array_equal(
            pair, [words[0] | words[1] << 32, words[2] | words[3] << 32 if words.size == 4 else 0]
        )
        with fk.draw_from(lambda device, pair=pair: fk.tensor(pair, device=device)):
            same_function(
                "dropout",
                lambda x, one=one: fj.dropout_add(x, rate=0.3, key=one),
                nn.Dropout(0.3),
                [x],
                device,
            )


# --- attention ----------------------------------------------------------------------------------------------

LENGTHS = np.array([0, 16, 25], np.int32)
PADDING = {"cu_seqlens_q": LENGTHS, "cu_seqlens_kv": LENGTHS}
HIDDEN = draw(5, (2, 1, 16, 16)) > 1.0
# JAX's -> the native
NAMES = {
    "mask": "attention_mask",
    "bias": "core_attention_bias",
    "attn_bias_type": "core_attention_bias_type",
}
# options of both frontends, arrays among them; "groups" of keys and values, "shape" of the query but for its
# heads
ATTENTION = {
    "no_mask": {"attn_mask_type": "no_mask"},
    "causal": {},
    "groups": {"groups": 2},
    "corner": {"attn_mask_type": "causal_bottom_right", "window_size": (5, 0)},
    "padding": {"attn_mask_type": "padding", **PADDING},
    "padding_causal": {"attn_mask_type": "padding_causal", **PADDING},
    "sequences": {
        "attn_mask_type": "padding_causal",
        **PADDING,
        "qkv_format": "thd",
        "shape": (25,),
        "max_seqlen_q": 16,
        "max_seqlen_kv": 16,
    },
    "arbitrary": {"attn_mask_type": "arbitrary", "mask": HIDDEN},
    "alibi": {"attn_bias_type": "alibi"},
    "off-by-one": {"softmax_type": "off-by-one"},
    "cap": {"softcap": 0.5},
    "sbhd": {"qkv_format": "sbhd", "shape": (16, 2)},
}
# what the native module is made with
MODULE = ("attn_mask_type", "window_size", "qkv_format", "softmax_type", "softcap")


@combinations({"case": [*ATTENTION, "bias"], "dtype": DTYPES})
def test_dot_product_attention(case, dtype, device):
    """Heads of 64 features in 16 bits, which cuDNN takes; of 8 in float32, which the kernels of the project
    take."""
    given = {"attn_bias_type": "post_scale_bias"} if case == "bias" else dict(ATTENTION[case])
    d, groups, shape = 64 if dtype == "bfloat16" else 8, given.pop("groups", 4), given.pop("shape", (2, 16))
    own = {"qkv_format": "bshd"} | {name: value for name, value in given.items() if name in MODULE}
    module = nn.DotProductAttention(4, d, groups, device=device, **own)
    values = [draw(i, (*shape, heads, d), dtype) for i, heads in enumerate((4, groups, groups))]
    values += [draw(3, (1, 4, 16, 16), dtype)] if case == "bias" else []
    rest = {NAMES.get(name, name): value for name, value in given.items() if name not in MODULE}

    def function(q, k, v, bias=None):
        return fj.dot_product_attention(q, k, v, bias=bias, **given)

    def native(q, k, v, bias=None, **options):
        return module(q, k, v, core_attention_bias=bias, **options)

    same_function(
        case,
        function,
        native,
        values,
        device,
        lambda put: {
            name: put(value) if isinstance(value, np.ndarray) else value for name, value in rest.items()
        },
    )


@by_dtype
@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_attention_and_its_seed(rate, dtype, device):
    d = 64 if dtype == "bfloat16" else 8
    values = [draw(i, (2, 16, 4, d), dtype) for i in range(3)]
    module = nn.DotProductAttention(4, d, attention_dropout=rate, qkv_format="bshd", device=device)
    fk.manual_seed(SEED)
    for offset in range(2):
        words = key(offset)
        same_function(
            f"offset {offset}",
            lambda *a, words=words: fj.dot_product_attention(*a, dropout_rate=rate, dropout_key=words),
            module,
            values,
            device,
        )


# --- codes --------------------------------------------------------------------------------------------------

SCALINGS = ("tensor", "row", "block_1x128", "block_128x128", "mx_1x32")
PRODUCTS = [("tensor",) * 2, ("row",) * 2, ("block_1x128", "block_128x128"), ("block_1x128",) * 2]


def put(array, device):
    return arrays.to(arrays.as_view(array), fk.tensor(np.zeros(1, np.float32), device=device).device)


def same_codes(name, got, want):
    assert_same_bits(f"{name}: codes", np.asarray(got.data).view(np.uint8), host(want.data))
    assert_same_bits(
        f"{name}: scale_inv", np.asarray(got.scale_inv), host(want.scale_inv).reshape(got.scale_inv.shape)
    )


@combinations({"format": [fk.E4M3, fk.E5M2], "dtype": DTYPES})
def test_quantize_and_dequantize(format, dtype, device):
    x = draw(0, (3, 50, 200), dtype)
    options = {scaling: {"scaling": scaling} for scaling in SCALINGS} | {
        "given": {"scale": np.float32(3)},
        "not saturated": {"scale": np.float32(400), "saturate": False},
    }
    there = put(x, device)

    @jax.jit
    def casts(x):
        made = {name: fj.quantize(x, format, **given) for name, given in options.items()}
        made["stochastic"] = fj.quantize(x, format, rounding="stochastic", key=jnp.asarray(key()))
        return made, {name: fj.dequantize(q, dtype) for name, q in made.items()}

    made, back = casts(x)
    for name, given in (options | {"stochastic": {"rounding": "stochastic", "rng": (SEED, 0)}}).items():
        want = fk.quantize(there, format, **given)
        same_codes(name, made[name], want)
        assert_same_bits(f"{name}: values", np.asarray(back[name]), host(want.dequantize(dtype)))


@by_dtype
def test_gemm(dtype, device):
    a, b = draw(0, (2, 21, 200)), draw(1, (37, 200))
    here, there = put(a, device), put(b, device)

    @jax.jit
    def products(a, b):
        return [fj.gemm(fj.quantize(a, scaling=s), fj.quantize(b, scaling=t), dtype) for s, t in PRODUCTS]

    for pair, got in zip(PRODUCTS, products(a, b), strict=True):
        qa, qb = (fk.quantize(x, scaling=scaling) for x, scaling in zip((here, there), pair, strict=True))
        assert_same_bits(str(pair), np.asarray(got), host(qa.matmul(qb.T, dtype)))
