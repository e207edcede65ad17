"""CUDA graphs of steps over a cache of keys and values. On a CPU an object stands in a graph's place, as in
``test_graphed_calls``."""

from __future__ import annotations

import fp8kit_torch as ft
import pytest
import torch
from fp8kit_torch import graph_capture, graphs
from fp8kit_torch.te_compat.capture import set_capture_end, set_capture_start

from fp8kit.errors import Fp8kitError, ShapeError
from tests.support.combinations import combinations
from tests.support.tensors import assert_tensor_close

from .replayed import Again

WIDTH, HEADS, LONGEST, BATCH = 32, 2, 96, 2
# Where the padded length is another, attention's sums over keys are split otherwise. On a CPU that is a
# rounding of sums of LONGEST terms; on a GPU each of a layer's five products rounds that to TF32's 11 bits in
# another way, 2^-10 of operands up to 4 or so.
SPLIT = {"cpu": LONGEST * 2.0**-24 * 4, "cuda": 5 * 4 * 2.0**-10}


class AsRecorded(Again):
    """Runs again what a capture's call is, not another call."""

    def replay(self):
        set_capture_start()
        super().replay()
        set_capture_end()


class Decoder(torch.nn.Module):
    """A layer that knows its cache, as programs that generate have it."""

    def __init__(self, device, form="bshd", paged=False):
        super().__init__()
        torch.manual_seed(0)
        options = {"self_attn_mask_type": "padding_causal", "attn_input_format": form, "layer_number": 1}
        self.layer = ft.TransformerLayer(WIDTH, 2 * WIDTH, HEADS, **options, device=device)
        self.angles = ft.RotaryPositionEmbedding(WIDTH // HEADS, device=device)(LONGEST)
        pages = {"is_paged": True, "total_num_pages": 16, "page_size": 16} if paged else {}
        self.cache = ft.InferenceParams(BATCH, LONGEST, qkv_format=form, device=device, **pages)
        self.eval()

    def forward(self, x):
        return self.layer(x, inference_params=self.cache, rotary_pos_emb=self.angles)


def draw(*shape, device, seed):
    host = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*shape, generator=host, device="cpu").to(device)


def generated(decoder, graphed, device, form):
    """Outputs of a prompt, of so many steps that the cache's padded length doubles, and of a prompt after
    them."""

    def step(run, counts, x):
        decoder.cache.pre_step(counts)
        return run(x)

    def tokens(count, seed):
        shape = (BATCH * count, WIDTH) if form == "thd" else (BATCH, count, WIDTH)
        return draw(*shape, device=device, seed=seed)

    found = [step(decoder, {"a": 50, "b": 50}, tokens(50, 0))]
    decoder.cache.pre_step({"a": 1, "b": 1})
    run = ft.make_graphed_callables(decoder, (tokens(1, 0),)) if graphed else decoder
    found.append(run(tokens(1, 1)).clone())
    found += [step(run, {"a": 1, "b": 1}, tokens(1, seed)).clone() for seed in range(2, 20)]
    if graphed:
        run.reset()
    found.append(step(decoder, {"a": 2, "c": 2}, tokens(2, 100)))
    return found


@combinations({"paged": [False, True], "form": ["bshd", "thd"]})
def test_a_captured_step_runs_for_later_ones(device, form, paged, monkeypatch):
    """It reads the lengths and pages of the step that pre_step announced, and sequences that are much longer
    than the capture's."""
    if device == "cpu":
        monkeypatch.setattr(graph_capture, "Graph", AsRecorded)
        monkeypatch.setattr(graphs, "want_device", lambda *args: None)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    with torch.no_grad(), torch.device(device):
        want = generated(Decoder(device, form, paged), False, device, form)
        found = generated(Decoder(device, form, paged), True, device, form)
    for i, (got, known) in enumerate(zip(found, want, strict=True)):
        assert_tensor_close(f"step {i}", got, known, SPLIT[device] * (1 + known.abs()))


@pytest.mark.gpu
def test_torchs_own_graph_holds_a_step():
    decoder, twin = Decoder("cuda"), Decoder("cuda")
    x = draw(BATCH, 1, WIDTH, device="cuda", seed=0)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.no_grad():
        for _ in range(2):
            for each in (decoder, twin):
                each.cache.pre_step({"a": 1, "b": 1})
            with torch.cuda.stream(stream):
                decoder(x)
            twin(x)
        torch.cuda.synchronize()
        for each in (decoder, twin):
            each.cache.pre_step({"a": 1, "b": 1})
        with torch.cuda.graph(graph, stream=stream):
            y = decoder(x)
        graph.replay()
        want = twin(x)
        assert_tensor_close("y", y, want, SPLIT["cuda"] * (1 + want.abs()))
        for seed in range(70):
            for each in (decoder, twin):
                each.cache.pre_step({"a": 1, "b": 1})
            x.copy_(draw(BATCH, 1, WIDTH, device="cuda", seed=seed))
            graph.replay()
            want = twin(x)
            assert_tensor_close("y", y, want, SPLIT["cuda"] * (1 + want.abs()))


def test_a_steps_numbers_lie_where_the_last_ones_did(device):
    """Of a batch of as many sequences; also between inference mode and the rest."""
    cache = ft.InferenceParams(BATCH, LONGEST, device=device)
    with torch.inference_mode():
        cache.pre_step({"a": 3, "b": 2})
    first, starts = cache.cu_seqlens_q, cache.rope_starts(2)
    cache.pre_step({"a": 1, "b": 1})
    assert cache.cu_seqlens_q.data_ptr() == first.data_ptr()
    assert first.tolist() == [0, 1, 2]
    assert starts.tolist() == [3, 2]
    cache.pre_step({"a": 1})
    cache.pre_step({"a": 1, "c": 5})
    assert first.tolist() == [0, 1, 6]
    cache.reset()
    cache.pre_step({"x": 4, "y": 1})
    assert first.tolist() == [0, 4, 5]


def test_only_a_capture_may_run_a_step_again():
    decoder, x = Decoder("cpu"), torch.randn(BATCH, 1, WIDTH)
    with torch.no_grad():
        decoder.cache.pre_step({"a": 1, "b": 1})
        decoder(x)
        with pytest.raises(Fp8kitError, match="1 twice in a step"):
            decoder(x)
        decoder.cache.pre_step({"a": 1, "b": 1})
        decoder.cache.pre_step({"a": 1, "b": 1})
        set_capture_start()
        try:
            with pytest.raises(ShapeError, match="layer_number"):
                decoder(x)  # the step before was left out
        finally:
            set_capture_end()
