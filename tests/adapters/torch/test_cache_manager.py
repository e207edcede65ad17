"""``InferenceParams.cache_manager`` driven by hand, as in Transformer Engine's programs: the caches that an
attention layer makes, bit by bit."""

from __future__ import annotations

import fp8kit_torch as ft
import pytest
import torch
from fp8kit_torch.te_compat.cache_managers import NonPagedKVCacheManager, sequences_of

from fp8kit.errors import ArgumentError, FormatError, ShapeError, UnsupportedError

HEADS, GROUPS, D, D_V = 4, 2, 8, 4
PAGED = {"is_paged": True, "total_num_pages": 12, "page_size": 4}
# prompts, steps of one token and of several, one that ends and one that begins in its place, another order
STEPS = [{"a": 3, "b": 5}, {"a": 1, "b": 1}, {"b": 2, "c": 4}, {"c": 1, "b": 1}, {"c": 1}]


def cache_of(form, device, paged=False, **more):
    sizes = {"num_heads_kv": GROUPS, "head_dim_k": D, "head_dim_v": D_V, "dtype": torch.bfloat16}
    pages = PAGED if paged else {}
    return ft.InferenceParams(3, 16, qkv_format=form, device=device, max_ctx_len=8, **sizes, **pages, **more)


def core_of(form, device):
    mask = "padding_causal"
    options = {"num_gqa_groups": GROUPS, "qkv_format": form, "layer_number": 1, "attn_mask_type": mask}
    return ft.DotProductAttention(HEADS, (D, D_V), **options, device=device).eval()


def new_of(form, step, device):
    total, most, count = sum(step.values()), max(step.values()), len(step)
    lead = {"thd": (total,), "bshd": (count, most), "sbhd": (most, count)}[form]
    sizes = (HEADS, D), (GROUPS, D), (GROUPS, D_V)
    return [torch.randn(*lead, *size, dtype=torch.bfloat16, device=device) for size in sizes]


def sums(counts, device="cpu", more=0):
    return torch.tensor([0, *counts, *[0] * more], dtype=torch.int32, device=device).cumsum(
        0, dtype=torch.int32
    )


def by_hand(manager, step, k, v, form, device, layer=1):
    lengths = manager.pre_step(step)
    assert list(lengths.items()) == list(manager.sequences.items())
    args = sums(step.values(), device), sums(lengths.values(), device)
    return manager.step(layer, k, v, *args, form)


def rows_of(manager, cache, paged):
    """Each sequence's positions of what a step returned."""
    if paged:
        cache = cache[manager.page_table.long()].flatten(1, 2)
    lengths = manager.get_sequence_lengths()
    return [row[:length] for row, length in zip(cache, lengths, strict=True)]


@pytest.mark.parametrize("form", ["bshd", "sbhd", "thd"])
@pytest.mark.parametrize("paged", [False, True])
def test_steps_by_hand_make_a_layers_caches(device, form, paged):
    """And what is returned are the sequences' keys and values, in the step's order."""
    torch.manual_seed(0)
    hand, by_layer, core = cache_of(form, device, paged), cache_of(form, device, paged), core_of(form, device)
    manager, told = hand.cache_manager, {}
    manager.allocate_memory(1)
    assert not any(side.any() for side in manager.cache[1])
    shape = (12, 4) if paged else (3, 16)
    assert [tuple(side.shape) for side in manager.cache[1]] == [(*shape, GROUPS, D), (*shape, GROUPS, D_V)]
    for step in STEPS:
        q, k, v = new_of(form, step, device)
        found = by_hand(manager, step, k, v, form, device)
        by_layer.pre_step(step)
        core(q, k, v, inference_params=by_layer)
        pairs = zip(*(sequences_of(new, list(step.values()), form) for new in (k, v)), strict=True)
        old, told = told, {}
        for name, new in zip(step, pairs, strict=True):
            before = old.get(name, [part[:0] for part in new])
            told[name] = [torch.cat(both) for both in zip(before, new, strict=True)]
        for side, (cache, same) in enumerate(zip(found, by_layer.cache_manager.cache[1], strict=True)):
            rows = rows_of(manager, cache, paged)
            for row, want in zip(rows, told.values(), strict=True):
                assert torch.equal(row, want[side])
            own = manager.cache[1][side]
            for name, pages in manager.allocated_pages.items():
                count = len(told[name][side])
                kept = [every[pages].flatten(0, 1)[:count] for every in (own, same)]
                assert torch.equal(*kept)
        assert manager.allocated_pages == by_layer.cache_manager.allocated_pages
        if not paged:
            assert [tuple(cache.shape[:2]) for cache in found] == [(len(step), 16)] * 2
    for mine, other in zip(*(each.convert_paged_to_nonpaged(1) for each in (hand, by_layer)), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize(("form", "after"), [("bshd", "bshd"), ("sbhd", "sbhd_2bshd"), ("thd", "thd_2bshd")])
@pytest.mark.parametrize("kind", [None, NonPagedKVCacheManager])
def test_a_step_of_the_params(device, form, after, kind):
    """The manager's step, with the step's lengths."""
    params, other = cache_of("bshd", device, custom_cache_manager=kind), cache_of("bshd", device)
    step = {"a": 3, "b": 5}
    params.allocate_memory(1)
    _, k, v = new_of(form, step, device)
    want = by_hand(other.cache_manager, step, k, v, form, device)
    params.pre_step(step)
    *found, fresh, totals, longest, said = params.step(1, k, v, form)
    for mine, same, count in zip(found, want, (3, 5), strict=True):
        assert torch.equal(mine[:, :count], same[:, :count])
    assert (fresh.tolist(), totals.tolist(), longest, said) == ([0, 3, 8], [0, 3, 8], 16, after)
    assert params.input_qkv_format == form


@pytest.mark.parametrize("paged", [False, True])
def test_what_a_step_returns_is_the_caches_memory_where_it_lies_in_order(device, paged):
    manager = cache_of("bshd", device, paged).cache_manager
    for step in ({"a": 3, "b": 5}, {"b": 1}):
        found = by_hand(manager, step, *new_of("bshd", step, device)[1:], "bshd", device)
        shares = [got.data_ptr() == own.data_ptr() for got, own in zip(found, manager.cache[1], strict=True)]
        assert shares == [paged or "a" in step] * 2


def test_a_layer_goes_on_where_steps_by_hand_ended(device):
    """Also of new tokens that lie apart in memory, and in another format than the cache's layers."""
    torch.manual_seed(0)
    core, hand, by_layer = core_of("bshd", device), cache_of("bshd", device), cache_of("bshd", device)
    step = {"a": 3, "b": 3}
    q, k, v = new_of("bshd", step, device)
    apart = [new.transpose(0, 1).mT.contiguous().mT for new in (k, v)]
    assert {new.stride(-1) for new in apart} == {GROUPS}
    by_hand(hand.cache_manager, step, *apart, "sbhd", device)
    by_layer.pre_step(step)
    core(q, k, v, inference_params=by_layer)
    outputs, new = [], new_of("bshd", {"b": 1, "a": 1}, device)
    for cache in (hand, by_layer):
        cache.pre_step({"b": 1, "a": 1})
        outputs.append(core(*new, inference_params=cache))
    assert torch.equal(*outputs)
    hand.cache_manager.reset()
    assert not hand.sequences


def test_a_step_while_a_graph_is_captured_returns_what_later_steps_are_written_into():
    """A copy by the pages that ``pre_step`` writes, not the caches' first rows."""
    cache = cache_of("bshd", "cpu")
    manager, step = cache.cache_manager, {"a": 3, "b": 5}
    _, k, v = new_of("bshd", step, "cpu")
    by_hand(manager, step, k, v, "bshd", "cpu")
    ft.graph.set_capture_start()
    try:
        found = manager.step(1, k, v, sums(step.values()), sums(step.values()), "bshd")
    finally:
        ft.graph.set_capture_end()
    assert found[0].data_ptr() != manager.cache[1][0].data_ptr()
    assert torch.equal(found[0], manager.cache[1][0][:2])


REFUSED = {
    "format": ({"form": "bhsd"}, ArgumentError, "qkv_format: got 'bhsd'"),
    "layer": ({"layer": "one"}, ArgumentError, "layer_number"),
    "dimensions": ({"k": lambda k: k[0]}, ShapeError, "new_k: got shape"),
    "values": ({"v": lambda v: v[:, :2]}, ShapeError, "new_v: got shape"),
    "batch": ({"k": lambda k: k[:1], "v": lambda v: v[:1]}, ShapeError, "batch 1"),
    "groups": ({"k": lambda k: k[:, :, :1], "v": lambda v: v[:, :, :1]}, ShapeError, "num_heads_kv: got 1"),
    "dtype": ({"k": lambda k: k.float(), "v": lambda v: v.float()}, FormatError, "dtype"),
    "dtypes": ({"v": lambda v: v.float()}, FormatError, "new_v"),
    "new": ({"new": sums([2, 5])}, ArgumentError, "cu_new_seqlens"),
    "cached": ({"cached": sums([3])}, ArgumentError, "cu_cached_seqlens"),
    "device": ({"k": lambda k: k.to("meta")}, FormatError, "tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_the_announced_step_is_refused(name):
    """And nothing is written."""
    change, kind, said = REFUSED[name]
    manager, step = cache_of("bshd", "cpu").cache_manager, {"a": 3, "b": 5}
    manager.allocate_memory(1)
    manager.pre_step(step)
    _, k, v = new_of("bshd", step, "cpu")
    given = {"layer": 1, "new": sums([3, 5]), "cached": sums([3, 5]), "form": "bshd"}
    changed = given | {key: value for key, value in change.items() if key in given}
    k, v = (change.get(each, lambda x: x)(new) for each, new in (("k", k), ("v", v)))
    with pytest.raises(kind, match=said):
        manager.step(changed["layer"], k, v, changed["new"], changed["cached"], changed["form"])
    assert not any(side.any() for side in manager.cache[1])


def test_a_step_is_announced_and_taken_once():
    manager = cache_of("bshd", "cpu").cache_manager
    _, k, v = new_of("bshd", {"a": 2}, "cpu")
    with pytest.raises(ArgumentError, match="pre_step before each step"):
        manager.step(1, k, v, sums([2]), sums([2]), "bshd")
    manager.pre_step({"a": 2})
    manager.step(1, k, v, sums([2], more=2), sums([2], more=2), "bshd")
    with pytest.raises(ArgumentError, match="1 twice in a step"):
        manager.step(1, k, v, sums([2]), sums([2]), "bshd")
    with pytest.raises(ArgumentError, match="layer_number"):
        manager.allocate_memory("one")


def test_a_step_by_hand_is_none_of_a_compiled_graph(monkeypatch):
    manager = cache_of("bshd", "cpu").cache_manager
    manager.pre_step({"a": 2})
    _, k, v = new_of("bshd", {"a": 2}, "cpu")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(UnsupportedError, match=r"a call outside of torch\.compile"):
        manager.step(1, k, v, sums([2]), sums([2]), "bshd")


@pytest.mark.parametrize("form", ["bshd", "thd"])
def test_caches_that_are_put_back_in_another_order_are_read(device, form):
    """As a search with beams does: the sequences' keys and values change places between two steps."""
    torch.manual_seed(0)
    cache, twin, core = cache_of(form, device), cache_of(form, device), core_of(form, device)
    first, second = {"a": 4, "b": 4}, {"a": 1, "b": 1}
    new = new_of(form, first, device)
    swapped = [x.view(2, 4, *x.shape[-2:]).flip(0).view_as(x) for x in new]
    for params, given in ((cache, new), (twin, swapped)):
        params.pre_step(first)
        core(*given, inference_params=params)
    where = cache.cache_manager.cache[1][0].data_ptr()
    for number, pair in cache.cache_manager.cache.items():
        order = torch.tensor([1, 0], device=device)
        cache.cache_manager.cache[number] = tuple(side.index_select(0, order) for side in pair)
    assert cache.cache_manager.cache[1][0].data_ptr() == where
    more = new_of(form, second, device)
    outputs = []
    for params in (cache, twin):
        params.pre_step(second)
        outputs.append(core(*more, inference_params=params))
    assert torch.equal(*outputs)
    k, v = cache.cache_manager.cache[1]
    cache.cache_manager.cache[1] = k[1:], v[1:]  # of its own memory
    assert torch.equal(cache.cache_manager.cache[1][0][0, :5], twin.cache_manager.cache[1][0][1, :5])


def test_caches_that_do_not_fit_are_refused_and_change_nothing():
    caches = cache_of("bshd", "cpu").cache_manager
    with pytest.raises(ArgumentError, match="layer_number: got 1, expected a layer that has caches"):
        caches.cache[1] = torch.zeros(1), torch.zeros(1)
    caches.allocate_memory(1)
    k, v = (side + 1 for side in caches.cache[1])
    for pair, kind, name in (
        ((k, v[:, :3]), ShapeError, "values"),
        ((torch.cat([k, k]), v), ShapeError, "keys"),
        ((k, v.float()), FormatError, "values"),
    ):
        with pytest.raises(kind, match=name):
            caches.cache[1] = pair
    with pytest.raises(UnsupportedError, match="reset"):
        del caches.cache[1]
    assert not any(side.any() for side in caches.cache[1])
