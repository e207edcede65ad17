"""How Transformer Engine's programs run inference over a cache: lengths beside it, models in evaluation mode
alone, and what they read of the cache's manager."""

from __future__ import annotations

import fp8kit_torch as ft
import pytest
import torch
from fp8kit_torch.te_compat.cache_managers import KVCacheManager, NonPagedKVCacheManager, sequences_of

from fp8kit.errors import ArgumentError, AutogradError, UnsupportedError
from tests.support.combinations import combinations
from tests.support.tensors import assert_tensor_close, largest

WIDTH, HEADS = 32, 4


def layer_of(form, device):
    torch.manual_seed(0)
    options = {"self_attn_mask_type": "padding_causal", "attn_input_format": form, "layer_number": 1}
    return ft.TransformerLayer(WIDTH, 2 * WIDTH, HEADS, **options, device=device).eval()


def cache_of(form, device, **more):
    return ft.InferenceParams(3, 16, qkv_format=form, device=device, max_ctx_len=8, **more)


def sums(*lengths, device="cpu"):
    return torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize("form", ["bshd", "thd"])
def test_a_steps_lengths_may_be_said_again(device, form):
    """cu_seqlens beside inference_params: those of the step, also with further sequences without tokens, as
    Transformer Engine's own buffers have them. Equal bits."""
    layer, x = layer_of(form, device), torch.randn(5, WIDTH, device=device)
    x = x if form == "thd" else torch.stack([x[:3], x[2:5]])
    outputs = []
    for said in ({}, {"cu_seqlens_q": sums(3, 2, device=device), "cu_seqlens_kv": sums(3, 2, device=device)}):
        cache = cache_of(form, device)
        cache.pre_step({"a": 3, "b": 2})
        outputs.append(layer(x, inference_params=cache, **said))
    cache = cache_of(form, device)
    cache.pre_step({"a": 3, "b": 2})
    more = {"cu_seqlens_q": sums(3, 2, 0, device=device), "cu_seqlens_kv": sums(3, 2, 0, device=device)}
    outputs.append(layer(x, inference_params=cache, **more))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_lengths_of_keys_may_be_those_of_the_new_ones(device):
    """As Transformer Engine's programs say them, whose layers do not read them: equal bits."""
    core = ft.DotProductAttention(HEADS, 8, qkv_format="thd", layer_number=1, device=device).eval()
    first, then = (torch.randn(n, HEADS, 8, device=device) for n in (5, 2))
    outputs = []
    for with_cached in (True, False):
        cache = cache_of("thd", device)
        cache.pre_step({"a": 3, "b": 2})
        core(first, first, first, inference_params=cache)
        cache.pre_step({"a": 1, "b": 1})
        new, whole = sums(1, 1, device=device), sums(4, 3, device=device)
        said = {"cu_seqlens_q": new, "cu_seqlens_kv": whole if with_cached else new}
        outputs.append(core(then, then, then, inference_params=cache, **said))
    assert torch.equal(*outputs)


def test_other_lengths_than_the_steps_are_refused():
    layer, cache = layer_of("bshd", "cpu"), cache_of("bshd", "cpu")
    cache.pre_step({"a": 3, "b": 2})
    x = torch.randn(2, 3, WIDTH)
    with pytest.raises(ArgumentError, match=r"cu_seqlens_q: got \[0, 2, 4\], expected None, or \[0, 3, 5\]"):
        layer(x, inference_params=cache, cu_seqlens_q=sums(2, 2))
    with pytest.raises(ArgumentError, match="cu_seqlens_kv"):
        layer(x, inference_params=cache, cu_seqlens_kv=sums(3))
    layer(x, inference_params=cache)  # the step was not taken


def test_the_keys_lengths_may_be_those_of_the_new_tokens(device):
    """A packed step after the prompt, whose caller says its own tokens for queries and for keys: by them
    rotary embeddings turn new keys. Equal bits."""
    layer, x = layer_of("thd", device), torch.randn(7, WIDTH, device=device)
    angles, outputs = ft.RotaryPositionEmbedding(WIDTH // HEADS, device=device)(16), []
    fresh = sums(1, 1, device=device)
    for said in ({}, {"cu_seqlens_q": fresh, "cu_seqlens_kv": fresh, "max_seqlen_q": 1, "max_seqlen_kv": 1}):
        cache = cache_of("thd", device)
        cache.pre_step({"a": 3, "b": 2})
        layer(x[:5], inference_params=cache, rotary_pos_emb=angles)
        cache.pre_step({"a": 1, "b": 1})
        outputs.append(layer(x[5:], inference_params=cache, rotary_pos_emb=angles, **said))
    assert torch.equal(*outputs)


def test_evaluation_mode_needs_no_no_grad(device):
    layer, x, outputs = layer_of("bshd", device), torch.randn(1, 3, WIDTH, device=device), []
    for grad in (True, False):
        cache = cache_of("bshd", device)
        cache.pre_step({"a": 3})
        with torch.set_grad_enabled(grad):
            outputs.append(layer(x, inference_params=cache))
    assert torch.equal(*outputs)
    core = ft.DotProductAttention(HEADS, 8, qkv_format="bshd", layer_number=1, device=device).eval()
    q = torch.randn(1, 3, HEADS, 8, device=device, requires_grad=True)
    cache = cache_of("bshd", device)
    cache.pre_step({"a": 3})
    assert not core(q, q, q, inference_params=cache).requires_grad


def test_training_over_a_cache_is_refused():
    layer, cache = layer_of("bshd", "cpu").train(), cache_of("bshd", "cpu")
    cache.pre_step({"a": 3})
    told = r"^TransformerLayer: inference_params: got a call with .* inference: eval\(\), or no_grad\(\)"
    with pytest.raises(AutogradError, match=told):
        layer(torch.randn(1, 3, WIDTH), inference_params=cache)


def test_sizes_of_pages_are_ignored_without_pages():
    cache, other = (cache_of("bshd", "cpu", **more) for more in ({}, {"page_size": 64, "total_num_pages": 1}))
    assert (cache.page_size, cache.total_num_pages) == (other.page_size, other.total_num_pages)


def test_what_programs_read_of_a_cache(device, caplog):
    cache = cache_of("bshd", device, is_paged=True, total_num_pages=12, page_size=4)
    layer_of("bshd", device)(torch.randn(2, 6, WIDTH, device=device), inference_params=_stepped(cache))
    manager = cache.cache_manager
    assert {number: [tuple(t.shape) for t in own] for number, own in manager.cache.items()} == {
        1: [(12, 4, HEADS, 8)] * 2
    }
    assert (manager.max_pages_per_seq, manager.page_size, manager.total_num_pages) == (4, 4, 12)
    assert (manager.max_batch_size, manager.max_seqlen, manager.num_heads) == (3, 16, None)
    assert manager.sequences == {"a": 6, "b": 2}
    assert manager.get_sequence_lengths() == [6, 2]
    assert (manager.get_page_list("a"), manager.get_page_count("b")) == ([0, 1], 1)
    assert manager.page_table.tolist() == [[0, 1, 0, 0], [2, 0, 0, 0]]
    assert manager.free_pages == [*range(3, 12)]
    assert manager.has_free_page()
    cache.pre_step({"b": 1})
    assert (manager.get_sequence_count(), manager.allocated_pages) == (1, {"b": [2]})
    assert (cache.sequences_pre_step, cache.input_qkv_format, cache.cache_qkv_format) == (
        {"b": 2},
        "bshd",
        "bshd",
    )
    assert not hasattr(manager, "pages")
    lengths = cache.get_seqlens_pre_step()
    assert (lengths.dtype, lengths.device.type, lengths.tolist()) == (torch.int32, "cpu", [2])
    with caplog.at_level("DEBUG", "fp8kit"):
        manager.print_cache()
    assert caplog.messages == ["cache: 11 of 12 pages are free", "cache: 'b' has 3 tokens, in pages [2]"]


def _stepped(cache):
    cache.pre_step({"a": 6, "b": 2})
    return cache


# --- a manager of one's own ---------------------------------------------------------------------------------


class Listed(KVCacheManager):
    """Keeps each sequence's keys and values in lists, and hands them out as pages of two tokens."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.sizes, self.kept = sizes, {}

    def step(self, layer_number, new_k, new_v, cu_new_seqlens, cu_cached_seqlens, qkv_format):
        counts = cu_new_seqlens.diff().tolist()
        pairs = zip(*(sequences_of(new, counts, qkv_format) for new in (new_k, new_v)), strict=True)
        tables, pages = [], ([], [])
        for name, new in zip(self.sequences, pairs, strict=True):
            kept = self.kept.setdefault((layer_number, name), [part[:0] for part in new])
            kept[:] = [torch.cat([old, part]) for old, part in zip(kept, new, strict=True)]
            padded = [torch.nn.functional.pad(own, (0, 0, 0, 0, 0, len(own) % 2)) for own in kept]
            count, first = len(padded[0]) // 2, len(pages[0])
            for side, own in zip(pages, padded, strict=True):
                side += own.unflatten(0, (-1, 2)).unbind(0)
            tables.append(list(range(first, first + count)) + [0] * (8 - count))
        keys, values = (torch.stack(side) for side in pages)
        return keys, values, torch.tensor(tables, device=keys.device)


class Tabled(Listed):
    """Its step returns two values, and the manager has the pages."""

    def step(self, *args):
        *found, self.page_table = super().step(*args)
        return found


@combinations(
    {
        "fused": [False, True],
        "manager": [Listed, Tabled, NonPagedKVCacheManager],
        "form": ["bshd", "sbhd", "thd"],
    }
)
def test_a_manager_of_ones_own(device, form, manager, fused):
    """Attention reads what its step gives: the same numbers as over the caches that are here."""
    torch.manual_seed(0)
    options = {"self_attn_mask_type": "padding_causal", "attn_input_format": form, "layer_number": 1}
    layer = ft.TransformerLayer(
        WIDTH, 2 * WIDTH, HEADS, fuse_qkv_params=fused, **options, device=device
    ).eval()
    more = {"num_heads_kv": HEADS, "head_dim_k": WIDTH // HEADS, "dtype": torch.float32}
    pages = {"is_paged": True, "total_num_pages": 24, "page_size": 2} if manager is Tabled else {}
    usual = cache_of(form, device)
    own = cache_of(form, device, custom_cache_manager=manager, **more, **pages)
    assert type(own.cache_manager) is manager
    for step in ({"a": 3, "b": 2}, {"a": 1, "b": 1}, {"b": 2, "c": 4}):
        total, most = sum(step.values()), max(step.values())
        shape = {"thd": (total,), "bshd": (2, most), "sbhd": (most, 2)}[form]
        x = torch.randn(*shape, WIDTH, device=device)
        for cache in (own, usual):
            assert cache.pre_step(step) == dict(cache.sequences)
        y, want = (layer(x, inference_params=cache) for cache in (own, usual))
        if form != "thd":  # rows behind a sequence's are of no token
            rows = [sequences_of(each, list(step.values()), form) for each in (y, want)]
            y, want = (torch.cat(each) for each in rows)
        if device == "cpu":
            assert torch.equal(y, want)
        else:  # a GPU may split the sums over keys otherwise, of which TF32's products round each anew
            assert_tensor_close("y", y, want, 1e-4 * largest(want))
    assert not own._caches
    assert own.cache_manager.sequences == {"b": 5, "c": 4}


def test_what_a_manager_is_made_of():
    sizes = {"num_heads_kv": 2, "head_dim_k": 8, "dtype": torch.bfloat16, "head_dim_v": 4}
    pages = {"is_paged": True, "total_num_pages": 6, "page_size": 4}
    made = cache_of("bshd", "cpu", custom_cache_manager=Listed, **sizes, **pages).cache_manager.sizes
    known = {"max_batch_size": 3, "max_seqlen": 16, "num_heads": 2, "head_dim_k": 8, "head_dim_v": 4}
    assert made == known | {"dtype": torch.bfloat16, "total_num_pages": 6, "page_size": 4}
    with pytest.raises(ArgumentError, match=r"custom_cache_manager: got .*a subclass"):
        cache_of("bshd", "cpu", custom_cache_manager=int)
    with pytest.raises(ArgumentError, match="InferenceParams: dtype: missing"):
        cache_of("bshd", "cpu", custom_cache_manager=Listed, **sizes | {"dtype": None})


def test_a_manager_is_asked_in_each_step():
    sizes = {"num_heads_kv": HEADS, "head_dim_k": WIDTH // HEADS, "dtype": torch.float32}
    cache = cache_of("bshd", "cpu", custom_cache_manager=NonPagedKVCacheManager, **sizes)
    cache.pre_step({"a": 1})
    ft.graph.set_capture_start()
    try:
        with pytest.raises(UnsupportedError, match="custom_cache_manager"):
            layer_of("bshd", "cpu")(torch.randn(1, 1, WIDTH), inference_params=cache)
    finally:
        ft.graph.set_capture_end()
