"""The rotary embedding as an operation and as modules, against rotations in float64."""

from __future__ import annotations

import numpy as np
import pytest

from fp8kit import formats, nn
from fp8kit.autograd import tensor
from fp8kit.errors import FormatError, Fp8kitError, ShapeError
from fp8kit.ops.rope import RopeSpec, rope
from fp8kit.spec import Meta
from fp8kit.testing.compare import assert_close, assert_same_bits
from tests.support.layers import draw
from tests.support.products import f64

U = 2.0**-24
S, B, H, D = 9, 2, 3, 16


def rotate(x, angle, interleaved, back=False):
    """x float64 (..., D) times exp(i angle) in pairs; angle (..., r / 2). And the sizes of the terms."""
    half = angle.shape[-1]
    low, high = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        if interleaved
        else (slice(0, half), slice(half, 2 * half))
    )
    z = (x[..., low] + 1j * x[..., high]) * np.exp(-1j * angle if back else 1j * angle)
    out, size = x.copy(), np.abs(x)
    out[..., low], out[..., high] = z.real, z.imag
    size[..., low] = size[..., high] = np.abs(x[..., low]) + np.abs(x[..., high])
    return out, size


def speeds(rotated, base=10000.0):
    return base ** (-np.arange(0, rotated, 2) / rotated)


CASES = [
    (dtype, form, percent, interleaved)
    for dtype in ("float32", "bfloat16")
    for form in ("sbhd", "bshd", "thd")
    for percent in (1.0, 0.5)
    for interleaved in (False, True)
]
CASES += [("float16", form, 0.5, False) for form in ("sbhd", "thd")]


@pytest.mark.parametrize(("dtype", "form", "percent", "interleaved"), CASES)
def test_apply_rotary_pos_emb(device, dtype, form, percent, interleaved):
    embedding = nn.RotaryPositionEmbedding(D, percent, interleaved=interleaved, device=device)
    freqs, rotated = embedding(32), int(D * percent)
    assert freqs.shape == (32, 1, 1, rotated)
    shape = {"sbhd": (S, B, H, D), "bshd": (B, S, H, D), "thd": (14, H, D)}[form]
    starts, lengths = np.array([4, 20], np.int32), np.array([0, 5, 14], np.int32)
    place = {
        "sbhd": np.arange(S)[:, None] + starts,
        "bshd": np.arange(S) + starts[:, None],
        "thd": np.concatenate([np.arange(5) + 4, np.arange(9) + 20]),
    }[form]
    x, dy = draw(1, shape, dtype), draw(2, shape, dtype)
    t = tensor(x, requires_grad=True, device=device)
    y = nn.apply_rotary_pos_emb(
        t, freqs, form, starts, interleaved, cu_seqlens=lengths if form == "thd" else None
    )
    y.backward(dy)
    angle = (place[..., None] * speeds(rotated))[..., None, :]
    # a float32 angle up to 28 radians, made by a power and a product: 4 roundings of it
    doubt = 4 * U * 28 + 6 * U
    for what, got, value, back in (("y", f64(y), x, False), ("dx", f64(t.grad), dy, True)):
        want, size = rotate(np.asarray(value, np.float64), angle, interleaved, back)
        assert_close(what, got, want, dtype, doubt * size)


@pytest.mark.parametrize("starts", [None, [2, 9]])
def test_tokens_of_no_sequence_become_0(device, starts):
    """They may hold NaN, and lie farther on than there are angles."""
    lengths, most = np.array([0, 5, 8], np.int32), 5
    at = np.concatenate([b + np.arange(n) for b, n in zip(starts or [0, 5], [5, 3], strict=True)])
    x, dy = (np.full((20, H, D), np.nan, np.float32) for _ in range(2))
    x[at], dy[at] = draw(1, (8, H, D), "float32"), draw(2, (8, H, D), "float32")
    padded = None if starts is None else np.array([*starts, 15], np.int32)
    t, alone = (tensor(v, requires_grad=True, device=device) for v in (x, x[at]))
    freqs = nn.RotaryPositionEmbedding(D, 0.5, device=device)(most)
    y = nn.apply_rotary_pos_emb(t, freqs, "thd", cu_seqlens=lengths, cu_seqlens_padded=padded)
    want = nn.apply_rotary_pos_emb(alone, freqs, "thd", cu_seqlens=lengths)
    y.backward(dy)
    want.backward(dy[at])
    for what, got, expected in (("y", f64(y), f64(want)), ("dx", f64(t.grad), f64(alone.grad))):
        assert_same_bits(what, got[at], expected)
        assert not np.delete(got, at, 0).any()


def test_a_module_says_the_same_for_any_offset_and_stretches_positions():
    plain = nn.RotaryPositionEmbedding(8, device="cpu")
    assert_same_bits("offset", plain(5, offset=7).numpy(), plain(12).numpy()[7:])
    assert plain(12) is plain(12)
    stretched = nn.RotaryPositionEmbedding(
        8, seq_len_interpolation_factor=4, pretrained_max_position_embeddings=16, device="cpu"
    )
    assert_same_bits("factor", stretched(33).numpy()[::4], plain(9).numpy())
    longer = stretched(128).numpy()[:, 0, 0, 0]  # beyond 4 * 16: spread over 16 positions
    assert_close("beyond", longer, np.arange(128) / 8, "float32", 2 * U * 16)
    alone = nn.RotaryPositionEmbedding(8, pretrained_max_position_embeddings=4, device="cpu")
    assert_same_bits("no factor", alone(12).numpy(), plain(12).numpy())
    base = nn.RotaryPositionEmbedding(8, rotary_base=100.0, device="cpu")(3).numpy()[2, 0, 0, :4]
    assert_close("base", base, 2 * speeds(8, 100.0), "float32", 8 * U)


def test_scores_depend_on_distances_only():
    """What it is for (Su et al. 2021, section 3.2.2): rotated queries and keys multiply to a function of the
    distance."""
    freqs = nn.RotaryPositionEmbedding(D, device="cpu")(64)
    q, k = (np.broadcast_to(draw(seed, (1, 1, 1, D), "float32"), (64, 1, 1, D)) for seed in (1, 2))
    a, b = (f64(nn.apply_rotary_pos_emb(np.ascontiguousarray(x), freqs))[:, 0, 0] for x in (q, k))
    scores = a @ b.T
    for distance in (0, 3, 17):
        diagonal = np.diagonal(scores, distance)
        assert_close("scores", diagonal, np.full_like(diagonal, diagonal[0]), "float32", 8 * U * 64 * D)


def meta(*shape, dtype="float32"):
    return Meta(shape, formats.dtype(dtype))


PLAIN = RopeSpec(((H, D, "freqs"),))
GOOD = {"x": meta(S, B, H, D), "freqs": meta(S, D)}
WRONG = {
    "format": (RopeSpec(((H, D, "freqs"),), "bhsd"), {}, ShapeError, "qkv_format: got 'bhsd'"),
    "shape": (
        PLAIN,
        {"x": meta(S, B, D)},
        ShapeError,
        r"x: got shape \(9, 2, 16\), expected \(sequence, batch, 48\) or",
    ),
    "no_heads": (
        RopeSpec(((0, D, "freqs"),)),
        {"x": meta(S, B, 0, D)},
        ShapeError,
        "heads and features not 0",
    ),
    "no_sequence": (
        RopeSpec(((H, D, "freqs"),), "thd"),
        {"x": meta(S, H, D), "cu_seqlens": meta(1, dtype="int32")},
        ShapeError,
        "cu_seqlens: got",
    ),
    "dtype": (PLAIN, {"x": meta(S, B, H, D, dtype="float64")}, FormatError, "x: got float64"),
    "odd": (
        PLAIN,
        {"freqs": meta(S, 5)},
        ShapeError,
        r"freqs: got shape \(9, 5\), expected \(positions, an even number up to 16\)",
    ),
    "wide": (PLAIN, {"freqs": meta(S, 18)}, ShapeError, "freqs: got"),
    "few": (PLAIN, {"freqs": meta(S - 1, D)}, ShapeError, "at least 9 positions"),
    "angles_dtype": (PLAIN, {"freqs": meta(S, D, dtype="bfloat16")}, FormatError, "freqs: got"),
    "no_angles": (PLAIN, {"freqs": None}, ShapeError, "freqs: missing"),
    "starts": (
        PLAIN,
        {"start_positions": meta(3, dtype="int32")},
        ShapeError,
        r"start_positions: got shape \(3,\), expected shape \(2,\)",
    ),
    "starts_dtype": (PLAIN, {"start_positions": meta(2, dtype="int64")}, FormatError, "start_positions: got"),
    "lengths": (
        PLAIN,
        {"cu_seqlens": meta(3, dtype="int32")},
        ShapeError,
        "cu_seqlens: got an array, expected None",
    ),
    "places": (
        PLAIN,
        {"cu_seqlens_padded": meta(3, dtype="int32")},
        ShapeError,
        "cu_seqlens_padded: got an array, expected None",
    ),
    "places_shape": (
        RopeSpec(((H, D, "freqs"),), "thd"),
        {
            "x": meta(S, H, D),
            "cu_seqlens": meta(3, dtype="int32"),
            "cu_seqlens_padded": meta(4, dtype="int32"),
        },
        ShapeError,
        r"cu_seqlens_padded: got shape \(4,\), expected shape \(3,\)",
    ),
    "no_lengths": (
        RopeSpec(((H, D, "freqs"),), "thd"),
        {"x": meta(S, H, D)},
        ShapeError,
        "cu_seqlens: missing",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_in_infer(name):
    spec, metas, kind, text = WRONG[name]
    with pytest.raises(kind, match=text):
        rope.infer(spec, GOOD | metas, frozenset("x"))


@pytest.mark.parametrize(
    ("make_it", "words"),
    [
        (lambda: nn.RotaryPositionEmbedding(0), ["dim", "0"]),
        (lambda: nn.RotaryPositionEmbedding(8, rotary_percent=1.5), ["rotary_percent", "1.5"]),
        (lambda: nn.RotaryPositionEmbedding(6, rotary_percent=0.5), ["dim", "even"]),
        (lambda: nn.RotaryPositionEmbedding(8, rotary_base=0.0), ["rotary_base"]),
        (
            lambda: nn.RotaryPositionEmbedding(8, seq_len_interpolation_factor=2),
            ["seq_len_interpolation_factor", "pretrained_max_position_embeddings"],
        ),
        (
            lambda: nn.apply_rotary_pos_emb(
                np.ones((2, 1, 1, 4), np.float32), np.ones((2, 4), np.float32), "bhsd"
            ),
            ["tensor_format"],
        ),
        (
            lambda: nn.apply_rotary_pos_emb(np.ones((2, 1, 4), np.float32), np.ones((2, 4), np.float32)),
            ["t", "sbhd"],
        ),
        (
            lambda: nn.apply_rotary_pos_emb(
                np.ones((2, 1, 1, 4), np.float32), np.ones((2, 2, 4), np.float32)
            ),
            ["freqs"],
        ),
        (
            lambda: nn.apply_rotary_pos_emb(
                np.ones((2, 1, 1, 4), np.float32), np.ones((2, 4), np.float32), cp_size=2
            ),
            ["freqs", "2 positions for 2 tokens of 2 ranks"],
        ),
    ],
)
def test_refusals_name_the_argument(make_it, words):
    with pytest.raises(Fp8kitError) as caught:
        make_it()
    for word in words:
        assert word in str(caught.value)
