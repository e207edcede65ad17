"""Inference step by step over a cache of keys and values: against float64, and against one forward over whole
sequences."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from fp8kit import formats, nn
from fp8kit.autocast import autocast
from fp8kit.autograd import no_grad, tensor
from fp8kit.errors import Fp8kitError
from fp8kit.recipe import DelayedScaling, Float8CurrentScaling
from fp8kit.testing.attention import Oracle, Rules, Sizes
from fp8kit.testing.compare import assert_close, assert_same_bits, relative_error
from tests.support.caches import GROUPS, HEADS, HIDDEN, MOST, D, layer_of, params
from tests.support.combinations import combinations
from tests.support.layers import draw

U = 2.0**-24
# sequences go on, end, come back under their old name, join and change places; prompts of several tokens in
# the middle
STEPS = (
    {"a": 5, "b": 3},
    {"a": 1, "b": 1},
    {"b": 2, "a": 1, "c": 7},
    {"c": 1, "b": 1},
    {"d": 9, "c": 3, "a": 2},
    {"a": 1, "d": 1, "c": 1},
)


def walk(steps=STEPS):
    """(step, the lives of its sequences: name -> (index of the life, tokens before)), as ``pre_step`` counts
    them."""
    lives, born = {}, 0
    for counts in steps:
        now = {}
        for name in counts:
            if name not in lives:
                lives[name], born = (born, 0), born + 1
            now[name] = lives[name]
        yield counts, now
        lives = {name: (life, done + counts[name]) for name, (life, done) in now.items()}


def place(form, rows, pad=0):
    """Rows of each sequence (n, ...) as the layer's input; padding of ``pad`` more rows is NaN, which nothing
    may read."""
    if form == "thd":
        return np.concatenate(rows)
    out = np.full((len(rows), max(map(len, rows)) + pad, *rows[0].shape[1:]), np.nan).astype(rows[0].dtype)
    for b, row in enumerate(rows):
        out[b, : len(row)] = row
    return np.ascontiguousarray(out.swapaxes(0, 1)) if form == "sbhd" else out


def taken(form, y, counts):
    """The way back: rows of each sequence; what is padding must be 0."""
    if form == "thd":
        return np.split(y, np.cumsum(list(counts.values()))[:-1])
    y = y.swapaxes(0, 1) if form == "sbhd" else y
    assert all(not y[b, n:].any() for b, n in enumerate(counts.values()))
    return [y[b, :n] for b, n in enumerate(counts.values())]


CASES = {
    "causal": ({}, {}, Rules(window=(-1, 0))),
    "no_mask": ({"attn_mask_type": "no_mask"}, {}, Rules()),
    "window": ({"attn_mask_type": "padding_causal", "window_size": (4, 0)}, {}, Rules(window=(4, 0))),
    "alibi": (
        {"attn_mask_type": "causal_bottom_right"},
        {"core_attention_bias_type": "alibi"},
        Rules(window=(-1, 0), bias="alibi"),
    ),
    "learnable": ({"softmax_type": "learnable"}, {}, Rules(window=(-1, 0), softmax_type="learnable")),
    "softcap": ({"softcap": 1.5}, {}, Rules(window=(-1, 0), softcap=1.5)),
    "depth_of_v": ({"kv_channels": (D, 12)}, {}, Rules(window=(-1, 0))),
}
SLOPES = np.array([0.25, 0.0625, 0.015625, 0.00390625], np.float32)


def run_core(form, device, dtype, paged, case="causal", pad=0):
    """Every step's output rows by sequence: (step, name) -> (rows, q, k, v of the life so far)."""
    options, call, _ = CASES[case]
    options = dict(options)
    channels = options.pop("kv_channels", D)
    depth = channels[1] if isinstance(channels, tuple) else D
    core = nn.DotProductAttention(
        HEADS, channels, GROUPS, qkv_format=form, softmax_scale=0.4, layer_number=1, device=device, **options
    )
    if case == "learnable":
        core.load_state_dict({"softmax_offset": draw(7, (HEADS,), "float32")})
    shapes = (MOST, HEADS, D), (MOST, GROUPS, D), (MOST, GROUPS, depth)
    lives = [[draw(10 * i + j, shape, dtype) for j, shape in enumerate(shapes)] for i in range(8)]
    cache, found = params(form, device, paged), {}
    for index, (counts, now) in enumerate(walk()):
        before = {name: done for name, (_, done) in now.items()}
        assert cache.pre_step(counts) == {name: done + counts[name] for name, done in before.items()}
        assert cache.get_seqlens_pre_step().tolist() == list(before.values())
        spans = {name: (lives[life], slice(done, done + counts[name])) for name, (life, done) in now.items()}
        with no_grad():
            o = core(
                *[
                    tensor(place(form, [x[i][at] for x, at in spans.values()], pad), device=device)
                    for i in range(3)
                ],
                inference_params=cache,
                **call,
            )
        rows = o.numpy().reshape(*o.shape[:-1], HEADS, depth)
        for name, row in zip(counts, taken(form, rows, counts), strict=True):
            x, at = spans[name]
            found[index, name] = row, x[0][at], x[1][: at.stop], x[2][: at.stop]
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("paged", [False, True])
def test_attention_over_a_cache(device, paged, case, dtype):
    """Each step's rows stand at the ends of their sequences."""
    form = {"causal": "sbhd", "no_mask": "bshd", "window": "thd"}.get(case, "bshd")
    given = CASES[case][2]
    rules = Rules("bshd", given.window, True, 0.4, 0.0, given.bias, given.softmax_type, softcap=given.softcap)
    offset = draw(7, (HEADS,), "float32") if case == "learnable" else None
    for (index, name), (got, q, k, v) in run_core(form, device, dtype, paged, case, pad=2).items():
        sizes = Sizes(1, len(q), len(k), HEADS, GROUPS, D, d_v=v.shape[-1])
        q, k, v = (x[None].swapaxes(1, 2) for x in (q, k, v))
        do = np.zeros((*q.shape[:3], v.shape[-1]))
        oracle = Oracle(
            formats.dtype(dtype),
            sizes,
            rules,
            False,
            q,
            k,
            v,
            do,
            None,
            None,
            SLOPES if case == "alibi" else None,
            offset,
        )
        assert_close(
            f"step {index}, {name}", got, oracle.o[0].swapaxes(0, 1), dtype, oracle.o_slack[0].swapaxes(0, 1)
        )


def test_formats_and_pages_give_the_same_bits(device):
    """The kernels see the same batch in whatever form the tokens come and the cache is kept; on a GPU each
    form has its own strides, and with them its own products."""
    want = run_core("bshd", device, "float32", False)
    for form in ("bshd", "sbhd", "thd"):
        slots, pages = (run_core(form, device, "float32", paged) for paged in (False, True))
        for at, (got, *_) in pages.items():
            assert_same_bits(f"{form} {at}", got, slots[at][0])
            if device == "cpu":
                assert_same_bits(f"{form} {at}", got, want[at][0])
            assert_close(f"{form} {at}", got, want[at][0].astype(np.float64), "float32", 64 * D * U)


@pytest.mark.parametrize("form", ["sbhd", "bshd", "thd"])
def test_the_first_step_of_a_whole_sequence_is_the_plain_forward(device, form):
    """The arithmetic is the same where the padded lengths are: bit for bit on the CPU."""
    mask = "padding_causal" if form == "thd" else "causal"
    layer = layer_of(form, device, mask)
    x = place(form, [draw(i, (MOST, HIDDEN), "float32") for i in range(2)])
    sums = np.array([0, MOST, 2 * MOST], np.int32)
    lengths = (
        {"cu_seqlens_q": sums, "cu_seqlens_kv": sums, "max_seqlen_q": MOST, "max_seqlen_kv": MOST}
        if form == "thd"
        else {}
    )
    cache = params(form, device)
    cache.pre_step({"a": MOST, "b": MOST})
    freqs = nn.RotaryPositionEmbedding(D, device=device)(MOST)
    with no_grad():
        want = layer(tensor(x, device=device), rotary_pos_emb=freqs, **lengths).numpy()
        got = layer(tensor(x, device=device), rotary_pos_emb=freqs, inference_params=cache).numpy()
    if device == "cpu":
        assert_same_bits("y", got, want)
    assert_close("y", got, want.astype(np.float64), "float32", 64 * HIDDEN * U * np.abs(want).max())


# With delayed scales, a rounding that differs may move a code by a step, 2^-3 of its element: one code in 64
# is allowed. Where a step's tokens make the scales, the codes are others: both operands of a product are
# rounded in both runs, each by at most 2^-4 of an element.
RECIPES = {
    "plain": (None, 0.0),
    "delayed": (DelayedScaling(amax_history_len=4), 2.0**-3 * 64**-0.5),
    "current": (Float8CurrentScaling(), 4 * 2.0**-4),
}


@combinations({"form": ["sbhd", "bshd", "thd"], "rotary": [False, True], "name_of_recipe": list(RECIPES)})
def test_a_layer_step_by_step_is_one_forward(device, form, rotary, name_of_recipe):
    """Token by token equals one forward over the whole sequences; FP8 state stays as it is."""
    recipe, bound = RECIPES[name_of_recipe]
    layer = layer_of(form, device, "padding_causal" if form == "thd" else "causal")
    if form != "bshd":
        layer.self_attention.rotary_pos_interleaved = True
    freqs = nn.RotaryPositionEmbedding(D, interleaved=form != "bshd", device=device)(MOST) if rotary else None
    scope = contextlib.nullcontext if recipe is None else lambda: autocast(recipe=recipe)
    lengths = {"a": 16, "b": 9}
    x = {name: draw(i, (MOST, HIDDEN), "float32") for i, name in enumerate(lengths)}
    sums = np.array([0, *np.cumsum(list(lengths.values()))], np.int32)
    whole = (
        {"cu_seqlens_q": sums, "cu_seqlens_kv": sums, "max_seqlen_q": MOST, "max_seqlen_kv": MOST}
        if form == "thd"
        else {}
    )
    joined = tensor(
        place(form, [np.nan_to_num(rows[: lengths[name]]) for name, rows in x.items()]), device=device
    )
    if form != "thd":
        joined = tensor(np.nan_to_num(joined.numpy()), device=device)
    if recipe is not None:
        for _ in range(2):  # scales and histories that are not at their start
            with scope():
                layer(joined, rotary_pos_emb=freqs, **whole)
    before = {name: np.array(view.numpy()) for name, view in layer.state_dict().items()}
    with no_grad(), scope():
        y = layer(joined, rotary_pos_emb=freqs, **whole).numpy()
    y = y.swapaxes(0, 1) if form == "sbhd" else y
    want = dict(zip(lengths, np.split(y, sums[1:-1]) if form == "thd" else y, strict=True))
    cache, done = params(form, device, paged=rotary), dict.fromkeys(lengths, 0)
    for counts in ({"a": 5, "b": 3}, {"a": 1, "b": 1}, *[{"b": 1, "a": 1}] * 5, {"a": 5}):
        cache.pre_step(counts)
        rows = place(form, [x[name][done[name] : done[name] + n] for name, n in counts.items()])
        with no_grad(), scope():
            got = layer(
                tensor(np.nan_to_num(rows), device=device), rotary_pos_emb=freqs, inference_params=cache
            ).numpy()
        got = got.swapaxes(0, 1) if form == "sbhd" else got
        got = np.split(got, np.cumsum(list(counts.values()))[:-1]) if form == "thd" else got
        for (name, n), part in zip(counts.items(), got, strict=True):
            expected = want[name][done[name] : done[name] + n].astype(np.float64)
            if recipe is None:
                assert_close(
                    f"{name} from {done[name]}",
                    part[:n],
                    expected,
                    "float32",
                    64 * HIDDEN * U * np.abs(expected).max(),
                )
            else:
                assert relative_error(part[:n], expected) <= bound
            done[name] += n
    for name, view in layer.state_dict().items():
        assert_same_bits(name, view.numpy(), before[name])


@pytest.mark.parametrize("form", ["sbhd", "bshd", "thd"])
def test_layouts_give_the_same_bits(device, form):
    """Packed layers, with gaps between the sequences of "thd", are the layers apart."""
    counts = {"a": 5, "b": 2}
    q, k, v = (
        [draw(10 * b + i, (n, HEADS, D), "bfloat16") for b, n in enumerate(counts.values())] for i in range(3)
    )

    def input_of(*parts):
        rows = [np.concatenate(part, -1) for part in zip(*parts, strict=True)]
        if form != "thd":
            return {}, place(form, rows, 1)
        gap = np.full((3, *rows[0].shape[1:]), np.nan).astype(rows[0].dtype)
        return {"cu_seqlens_q_padded": np.array([0, 8, 13], np.int32)}, np.concatenate(
            [rows[0], gap, rows[1], gap]
        )

    def flat(parts):
        return [row.reshape(len(row), -1) for row in parts]

    found = []
    for names in (
        ("query_layer", "key_layer", "value_layer"),
        ("query_layer", "kv_layer"),
        ("qkv_layer",),
        ("interleaved",),
    ):
        core = nn.DotProductAttention(HEADS, D, qkv_format=form, layer_number=1)
        cache = params(form, device)
        cache.pre_step(counts)
        pieces = {
            "query_layer": (flat(q),),
            "key_layer": (flat(k),),
            "value_layer": (flat(v),),
            "kv_layer": (flat(k), flat(v)),
            "qkv_layer": (flat(q), flat(k), flat(v)),
            "interleaved": (q, k, v),
        }
        layers = {}
        for name in names:
            lengths, x = input_of(*pieces[name])
            layers[name.replace("interleaved", "qkv_layer")] = tensor(
                x.reshape(*x.shape[: len(form) - 2], -1), device=device
            )
        dim = -2 if names == ("interleaved",) else -3
        o = core(**layers, **lengths, qkv_interleave_dim=dim, inference_params=cache).numpy()
        found.append((o, *[x.numpy() for x in cache.convert_paged_to_nonpaged(1)]))
    assert found[0][0].any()
    for others in found[1:]:
        for what, got, want in zip(("o", "k", "v"), others, found[0], strict=True):
            if what == "o" and device != "cpu":  # other strides, other products
                assert_close(what, got, want.astype(np.float64), "bfloat16", 64 * D * U)
            else:
                assert_same_bits(what, got, want)


@pytest.mark.parametrize("paged", [False, True])
def test_a_sequence_sees_nothing_of_others(device, paged):
    """Not of its neighbour in the batch, nor of who had its place before."""
    core = nn.DotProductAttention(HEADS, D, qkv_format="bshd", layer_number=1)
    x = draw(1, (2, 4, HEADS, D), "float32")
    found = []
    for stranger in (np.nan, 0.5):
        cache = params("bshd", device, paged)
        cache.pre_step({"old": MOST})
        core(
            *[tensor(np.full((1, MOST, HEADS, D), stranger, np.float32), device=device)] * 3,
            inference_params=cache,
        )
        cache.pre_step({"a": 4, "b": 4})
        other = x.copy()
        other[1] = stranger
        found.append(core(*[tensor(other, device=device)] * 3, inference_params=cache).numpy())
        cache.pre_step({"next": 4})
        with autocast(enabled=False, check_finite=True):  # which looks at what is there, not at the free room
            core(
                tensor(x[:1], device=device),
                tensor(x[:1], device=device),
                tensor(x[:1], device=device),
                inference_params=cache,
            )
    assert np.isfinite(found[0][0]).all()
    assert_same_bits("a", found[0][0], found[1][0])


def test_the_cache_holds_what_was_given(device):
    cache = params("bshd", device, paged=True, num_heads_kv=GROUPS, head_dim_k=D, dtype="bfloat16")
    cache.allocate_memory(3)
    core = nn.DotProductAttention(HEADS, D, GROUPS, qkv_format="bshd", layer_number=3)
    q, k, v = (draw(i, (2, 5, heads, D), "bfloat16") for i, heads in enumerate((HEADS, GROUPS, GROUPS)))
    for counts, at in (({"a": 4, "b": 2}, slice(0, 4)), ({"a": 1, "b": 1}, slice(4, 5))):
        cache.pre_step(counts)
        with no_grad():
            core(
                *[tensor(np.ascontiguousarray(x[:, at]), device=device) for x in (q, k, v)],
                inference_params=cache,
            )
    assert cache.cu_seqlens_kv.numpy().tolist() == [0, 5, 8]
    assert cache.cu_seqlens_q.numpy().tolist() == [0, 1, 2]
    assert cache.rope_starts(2).numpy().tolist() == [4, 2]
    for got, x in zip(cache.convert_paged_to_nonpaged(3), (k, v), strict=True):
        want = np.zeros_like(x)
        want[0], want[1, :2], want[1, 2] = x[0], x[1, :2], x[1, 4]
        assert_same_bits("cache", got.numpy(), want)
    cache.reset()
    assert cache.pre_step({"z": 1}) == {"z": 1}
    assert "layers [3]" in repr(cache)


def test_pages_go_to_whoever_needs_them():
    """Eleven pages of three tokens: as many as are wanted at the most, in steps that free and take."""
    cache = params("bshd", "cpu", paged=True)
    rng, lengths = np.random.default_rng(1), {}
    for _ in range(300):
        names = rng.permutation(5)[: rng.integers(1, 4)].tolist()
        counts = {name: int(rng.integers(1, 9)) for name in names}
        after = {name: lengths.get(name, 0) + n for name, n in counts.items()}
        before = (
            dict(cache.sequences),
            {name: list(pages) for name, pages in cache._pages.items()},
            sorted(cache._free),
        )
        if max(after.values()) > MOST or sum(-(-n // 3) for n in after.values()) > 11:
            with pytest.raises(Fp8kitError, match=r"max_sequence_length|total_num_pages"):
                cache.pre_step(counts)
            assert before == (cache.sequences, cache._pages, sorted(cache._free))
            continue
        lengths = cache.pre_step(counts)
        assert lengths == after
        owned = [page for pages in cache._pages.values() for page in pages]
        assert sorted(owned + cache._free) == list(range(11))
        assert {name: len(pages) for name, pages in cache._pages.items()} == {
            name: -(-n // 3) for name, n in lengths.items()
        }
        assert all(
            cache._pages[name][: len(pages)] == pages for name, pages in before[1].items() if name in counts
        )


@pytest.mark.parametrize("form", ["bshd", "sbhd", "thd"])
@pytest.mark.parametrize("paged", [False, True])
def test_steps_without_a_layer(device, form, paged):
    """``cache_manager.step``: each sequence's keys and values, all that came so far, in the step's order."""
    cache, told = params(form, device, paged), {}
    manager = cache.cache_manager
    for number, (counts, lives) in enumerate(walk()):
        rows = {
            name: draw(17 * number + i, (n, GROUPS, D), "float32")
            for i, (name, n) in enumerate(counts.items())
        }
        manager.pre_step(counts)
        new = tensor(place(form, list(rows.values()), pad=1), device=device)
        found = manager.step(1, new.data, new.data, cache.cu_seqlens_q, cache.cu_seqlens_kv, form)
        told = {lives[name][0]: [*told.get(lives[name][0], []), row] for name, row in rows.items()}
        for side in found if not paged else cache.convert_paged_to_nonpaged(1):
            for row, (life, _) in zip(side.numpy(), lives.values(), strict=True):
                want = np.concatenate(told[life])
                assert_same_bits("row", row[: len(want)], want)


def test_caches_that_are_put_back_are_read(device):
    """``cache_manager.cache[number] = k, v``: written into the layer's caches, over as many sequences."""
    caches = params("bshd", device, False).cache_manager
    caches.pre_step({"a": 2, "b": 2})
    sums = [tensor(np.array([0, 2, 4], np.int32), device=device)] * 2
    new = tensor(draw(5, (2, 2, GROUPS, D), "float32"), device=device)
    caches.step(1, new.data, new.data, *sums, "bshd")
    before = caches.cache[1][0].numpy()[:2].copy()
    swapped = tensor(before[::-1].copy(), device=device)
    caches.cache[1] = swapped.data, swapped.data
    for side in caches.cache[1]:
        assert_same_bits("cache", side.numpy()[:2], before[::-1])
