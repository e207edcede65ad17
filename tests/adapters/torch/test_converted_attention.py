"""transformers' models attend by fp8kit's operation once they are converted: which calls do, that all calls
give what the plain model gives, and what stays transformers' own."""

from __future__ import annotations

import copy
import io
import json

import pytest
import torch
from fp8kit_torch import autocast, convert, converted_attention, coverage, revert
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from fp8kit.errors import ArgumentError
from fp8kit.recipe import DelayedScaling
from fp8kit.testing.compare import assert_same_bits, relative_error
from tests.support.combinations import combinations
from tests.support.tiny_models import SIZES

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

LAYERS, LENGTH, WINDOW = SIZES["num_hidden_layers"], 12, 5
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
ENCODERS = {"encoder_layers": LAYERS, "decoder_layers": LAYERS, "d_model": 32, "encoder_ffn_dim": 32}
ENCODERS |= {"decoder_ffn_dim": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
# name -> (head, further settings, calls of fp8kit's attention where nothing is masked but by causality)
FAMILIES = {
    "llama": ("CausalLM", {}, LAYERS),
    "mistral": ("CausalLM", {"sliding_window": WINDOW}, LAYERS),
    "qwen2": ("CausalLM", {"use_sliding_window": True, **MIXED}, LAYERS),
    "qwen3": ("CausalLM", {"head_dim": 16}, LAYERS),
    "gemma3_text": ("CausalLM", {"head_dim": 8, **MIXED}, LAYERS),
    "gpt2": ("CausalLM", {}, LAYERS),
    "bert": ("MaskedLM", {}, LAYERS),
    "modernbert": ("MaskedLM", {"local_attention": 6, "global_attn_every_n_layers": 2}, 1),
    "bart": ("Seq2SeqLM", ENCODERS, 3 * LAYERS),
    "gemma2": ("CausalLM", {}, 0),  # caps its scores
    "t5": ("Seq2SeqLM", {}, 0),  # adds a learned bias to them
    "gpt_oss": ("CausalLM", {}, 0),  # has a learned score beside them
    "llama4_text": ("CausalLM", {"head_dim": 8, "attention_chunk_size": WINDOW}, 0),
}
# a model's sums are of some hundred terms, each rounded, in another order, through two blocks
NEAR = {torch.float32: 32 * 2.0**-24, torch.bfloat16: 8 * 2.0**-8}


def make(name, **more):
    head, settings, _ = FAMILIES[name]
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[name](**SIZES | settings | more)
    return getattr(transformers, f"AutoModelFor{head}").from_config(config).eval()  # without dropout


@pytest.fixture(autouse=True)
def on_cpus_too(monkeypatch):
    """fp8kit's attention in the place of torch's on a CPU, as it is on a GPU."""
    monkeypatch.setattr(converted_attention, "_DEVICES", ("cpu", "cuda"))


@pytest.fixture
def calls(monkeypatch):
    """One entry for each call of fp8kit's attention: (causal, window)."""
    ran, own = [], converted_attention._attended

    def counted(q, k, v, causal, scaling, window):
        ran.append((causal, window))
        return own(q, k, v, causal, scaling, window)

    monkeypatch.setattr(converted_attention, "_attended", counted)
    return ran


def tokens(name, **more):
    ids = (torch.arange(2 * LENGTH) % 60 + 3).reshape(2, LENGTH)
    return (
        {"input_ids": ids}
        | ({"decoder_input_ids": ids.flip(1)} if "Seq2" in FAMILIES[name][0] else {})
        | more
    )


def passed(model, inputs, rows=None):
    """The logits, where ``rows`` is true, and the gradients of all parameters as one row."""
    model.zero_grad()
    logits = model(**inputs).logits.float()
    logits = logits if rows is None else logits[rows]
    (logits * torch.linspace(-1, 1, logits.shape[-1], device=logits.device)).mean().backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return logits.detach(), torch.cat([grad.flatten() for grad in grads]).float()


def assert_alike(got, wanted, dtype=torch.float32):
    for mine, theirs in zip(got, wanted, strict=True):
        assert relative_error(mine.numpy(), theirs.numpy()) < NEAR[dtype]


def padded(side):
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, slice(3) if side == "left" else slice(LENGTH - 3, None)] = 0
    return mask


# the others mask as one of these does
USUAL = ["llama", "mistral", "gemma3_text", "gpt2", "bert", "modernbert", "bart", "gpt_oss", "llama4_text"]


@combinations({"name": FAMILIES.keys()}, USUAL)
def test_numbers_are_the_plain_models_whatever_is_masked(name, calls):
    """Right and left padding, packed positions and masks of the user's own are transformers' to handle, all
    else is fp8kit's; a window is one of the operation."""
    plain, count = make(name), FAMILIES[name][2]
    model = convert(copy.deepcopy(plain))
    wanted = passed(plain, tokens(name))
    assert not calls
    assert_alike(passed(model, tokens(name)), wanted)
    assert len(calls) == count
    windows = {"mistral": [WINDOW] * 2, "qwen2": [WINDOW, -1], "gemma3_text": [WINDOW, -1]}
    assert [window for _, window in calls] == windows.get(name, [-1] * count)
    assert [causal for causal, _ in calls].count(False) == {"bert": 2, "modernbert": 1, "bart": 4}.get(
        name, 0
    )
    calls.clear()
    with torch.no_grad():  # all ones are no padding
        full = tokens(name, attention_mask=torch.ones(2, LENGTH, dtype=torch.int64))
        assert_alike([model(**full).logits], wanted[:1])
    cases = {side: ({"attention_mask": padded(side)}, padded(side).bool()) for side in ("left", "right")}
    if FAMILIES[name][0] == "CausalLM" and name != "gpt2":  # positions of which are embedded
        packed = torch.tensor([[*range(5), *range(7)], [*range(9), *range(3)]])
        cases["packed"] = {"position_ids": packed, "use_cache": False}, None
        seen = torch.ones(LENGTH, LENGTH).tril()[None, None].repeat(2, 1, 1, 1).bool()
        seen[1, :, 8:, :3] = False
        cases["own"] = {"attention_mask": seen if count else torch.where(seen, 0.0, -1e9)}, None
    for more, rows in cases.values():
        if "Seq2" in FAMILIES[name][0]:
            rows = None
        theirs = passed(plain, tokens(name, **more), rows)
        calls.clear()
        assert_alike(passed(model, tokens(name, **more), rows), theirs)
        assert len(calls) == (LAYERS if name == "bart" else 0)  # its decoder is not padded
        assert relative_error(theirs[1].numpy(), wanted[1].numpy()) > 1e-4  # the mask matters
    assert (coverage(model).attention[""] == converted_attention.OURS) is (count > 0)
    revert(model)
    calls.clear()
    assert_same_bits("reverted", passed(model, tokens(name))[0].numpy(), wanted[0].numpy())
    assert not calls


def test_images_and_sound(calls):
    """A vision transformer, and a decoder that looks at what an encoder made of sound."""
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    vit = transformers.ViTModel(transformers.ViTConfig(**small, image_size=16, patch_size=4)).eval()
    pixels = {"pixel_values": torch.randn(2, 3, 16, 16)}
    sizes = {"max_source_positions": 8, "num_mel_bins": 4, "vocab_size": 64, "max_target_positions": 16}
    config = transformers.WhisperConfig(**ENCODERS, **sizes, pad_token_id=0, decoder_start_token_id=1)
    heard = {"input_features": torch.randn(2, 4, 16), "decoder_input_ids": torch.arange(14).reshape(2, 7)}
    whisper = transformers.WhisperModel(config).eval()
    both = [False] * 2 + [True, False] * 2
    for plain, inputs, kinds in ((vit, pixels, [False] * 2), (whisper, heard, both)):
        model = convert(copy.deepcopy(plain))
        with torch.no_grad():
            assert_alike([model(**inputs).last_hidden_state], [plain(**inputs).last_hidden_state])
        assert [causal for causal, _ in calls] == kinds
        calls.clear()


@combinations({"name": ["llama", "gemma3_text"], "cache": ["dynamic", "static"]})
def test_generation_gives_the_plain_models_tokens(name, cache, calls):
    """A prompt is a call a layer, but for padding; the tokens after it, and the longer arrays of a static
    cache, are transformers' own."""
    plain = make(name)
    model = convert(copy.deepcopy(plain))
    ids, more = tokens(name)["input_ids"], {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    more |= {"cache_implementation": cache, "output_logits": True, "return_dict_in_generate": True}
    whole = 2 if cache == "dynamic" else 1 if name == "gemma3_text" else 0
    for mask, count in ((None, whole), (torch.ones_like(ids), whole), (padded("left"), 0)):
        wanted = plain.generate(ids, attention_mask=mask, **more)
        calls.clear()
        got = model.generate(ids, attention_mask=mask, **more)
        assert got.sequences.equal(wanted.sequences)
        assert_alike(got.logits, wanted.logits)
        assert len(calls) == count


@combinations({"name": ["llama", "gpt2", "mistral"]}, usual=["mistral"])
def test_bfloat16_and_autocast(name, calls):
    """bfloat16 weights, and float32 ones within torch.autocast: roundings of bfloat16 apart."""
    plain = make(name)
    model = convert(copy.deepcopy(plain))
    with torch.autocast("cpu", torch.bfloat16):
        wanted, got = passed(plain, tokens(name)), passed(model, tokens(name))
    assert_alike(got, wanted, torch.bfloat16)
    plain.bfloat16()
    model.bfloat16()
    assert_alike(passed(model, tokens(name)), passed(plain, tokens(name)), torch.bfloat16)
    assert len(calls) == 2 * LAYERS
    with autocast(recipe=DelayedScaling(fp8_dpa=True)):  # of whose recipe attention takes no notice
        passed(model, tokens(name))
    assert len(calls) == 3 * LAYERS


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_on_a_gpu(name, compiled, calls):
    """bfloat16 weights by fp8kit's kernels where the chip has them, float32 ones by torch's."""
    plain = make(name, head_dim=64, sliding_window=WINDOW).to("cuda")
    model = convert(copy.deepcopy(plain))
    inputs = {key: value.cuda() for key, value in tokens(name).items()}
    with torch.no_grad():
        wide = [one(**inputs).logits.cpu() for one in (model, plain)]
    assert_alike(wide[:1], wide[1:], torch.bfloat16)  # products may be of TF32
    assert not calls
    plain.bfloat16()
    model.bfloat16()
    call = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model
    wanted = [each.cpu() for each in passed(plain, inputs)]
    model.zero_grad()
    logits = call(**inputs).logits.float()
    (logits * torch.linspace(-1, 1, logits.shape[-1], device="cuda")).mean().backward()
    got = [logits.detach().cpu(), torch.cat([p.grad.flatten() for p in model.parameters()]).float().cpu()]
    assert_alike(got, wanted, torch.bfloat16)
    hopper = torch.cuda.get_device_capability() >= (9, 0)
    assert len(calls) == (LAYERS if hopper else 0)


def test_what_the_operation_does_not_compute_stays_torchs(calls, monkeypatch):
    """Dropout, another function in the place of torch's, a single row, and what is checkpointed is the same
    once more."""
    plain = make("llama", attention_dropout=0.5)
    model = convert(copy.deepcopy(plain))
    for one in (plain, model):
        one.train()
    torch.manual_seed(1)
    wanted = passed(plain, tokens("llama"))
    torch.manual_seed(1)
    assert_alike(passed(model, tokens("llama")), wanted)  # the same weights are dropped
    for one in (plain, model):
        one.eval()
        with torch.no_grad():
            one(input_ids=tokens("llama")["input_ids"][:, :1])
    assert not calls
    ran, torchs = [], nn.functional.scaled_dot_product_attention
    with monkeypatch.context() as patch:
        own = lambda *args, **more: (ran.append(1), torchs(*args, **more))[1]  # noqa: E731
        patch.setattr(nn.functional, "scaled_dot_product_attention", own)
        model(**tokens("llama"))
    assert (len(ran), len(calls)) == (LAYERS, 0)
    model.config.attention_dropout = 0.0
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.0
    once = passed(model.train(), tokens("llama"))
    model.gradient_checkpointing_enable()
    again = passed(model, tokens("llama"))
    assert len(calls) == 3 * LAYERS
    assert_same_bits("checkpointed", again[1].numpy(), once[1].numpy())


class Seen(TorchFunctionMode):
    """Counts calls of torch's attention."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += function is nn.functional.scaled_dot_product_attention
        return function(*args, **kwargs or {})


@combinations({"name": ["llama", "mistral"]}, usual=["mistral"])  # whose windows make masks, too
def test_where_a_program_says_how_torch_attends_it_is_asked(name, calls):
    """In ``sdpa_kernel``, in a mode that sees torch's functions, and on a CPU, where torch's is quicker.
    ``torch.device`` is a mode as well, of which attention knows nothing."""
    plain = make(name)
    model, wanted = convert(copy.deepcopy(plain)), passed(plain, tokens(name))
    with sdpa_kernel(SDPBackend.MATH):
        assert_alike(passed(model, tokens(name)), wanted)
    with Seen() as seen:
        assert_alike(passed(model, tokens(name)), wanted)
    assert (len(calls), seen.count) == (0, LAYERS)
    with torch.device("cpu"):
        passed(model, tokens(name))
    assert len(calls) == LAYERS
    calls.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(converted_attention, "_DEVICES", ("cuda",))
        assert_alike(passed(model, tokens(name)), wanted)
    assert not calls


@combinations({"name": ["llama", "mistral"]}, usual=())
def test_where_a_program_says_how_torch_attends_it_is_compiled_so(name, calls):
    plain = make(name)
    model, wanted = convert(copy.deepcopy(plain)), passed(plain, tokens(name))
    with sdpa_kernel(SDPBackend.MATH):
        (forward, _), got = graphs_of(model, tokens(name))
    assert_alike(got, wanted)
    assert not any("fp8kit.attention" in each for each in forward[0])
    with Seen() as seen:
        torch.compile(model, backend="eager", fullgraph=True)(**tokens(name))
    assert (len(calls), seen.count) == (0, LAYERS)
    with torch.device("cpu"):
        (forward, _), _ = graphs_of(model, tokens(name))
    assert sum("fp8kit.attention_forward" in each for each in forward[0]) == LAYERS


@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1])
def test_a_window_holds_where_an_attention_says_that_it_is_not_causal(length):
    """Adapted encoders say so of their layers: from the length on at which "sdpa" makes a mask it is that of
    the window, before that there is none."""
    plain = make("mistral")
    for layer in plain.model.layers:
        layer.self_attn.is_causal = False
    model, ids = convert(copy.deepcopy(plain)), tokens("mistral")["input_ids"][:, :length]
    assert_alike(passed(model, {"input_ids": ids}), passed(plain, {"input_ids": ids}))


def graphs_of(model, inputs):
    """(names, shapes of bool arrays) of each graph of a training step, and its logits and gradients."""
    found = []

    def look(graph, _):
        calls = [node for node in graph.graph.nodes if node.op == "call_function"]
        names = [str(n.args[0] if "auto_functionalized" in str(n.target) else n.target) for n in calls]
        values = [node.meta.get("val") for node in calls]
        masks = [
            v.shape for v in values if isinstance(v, torch.Tensor) and v.dtype == torch.bool and v.ndim == 4
        ]
        found.append((names, masks))

        def call(values):
            return graph.forward(*values)

        call._boxed_call = True
        return call

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=look, bw_compiler=look, keep_inference_input_mutations=True)
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    model.zero_grad()
    logits = compiled(**inputs).logits
    (logits * torch.linspace(-1, 1, logits.shape[-1])).mean().backward()
    torch._dynamo.reset()
    grads = [p.grad.flatten() for p in model.parameters()]
    return found, (logits.detach(), torch.cat(grads))


ONCE = {"llama": {"num_hidden_layers": 1}}  # whose layers are all alike


@combinations({"name": ["llama", "gemma3_text"]}, usual=["llama"])
def test_a_compiled_model_makes_no_mask(name):
    """One graph in each direction with one attention a layer, and no array of rows by columns."""
    plain = make(name, **ONCE.get(name, {}))
    model, inputs = convert(copy.deepcopy(plain)), tokens(name)
    found, got = graphs_of(model, inputs)
    assert len(found) == 2
    for (names, masks), suffix in zip(found, ("forward", "backward"), strict=True):
        count = sum(f"fp8kit.attention_{suffix}" in each for each in names)
        assert count == plain.config.num_hidden_layers
        assert not any("scaled_dot_product" in each for each in names)
        assert all(0 in shape for shape in masks)
    assert_alike(got, passed(plain, inputs))


PACKED = torch.tensor([[*range(5), *range(7)], [*range(9), *range(3)]])
SAID = {"padded": {"attention_mask": padded("right")}, "packed": {"position_ids": PACKED, "use_cache": False}}


@combinations({"name": ["llama", "gemma3_text"], "what": SAID.keys()}, usual=["llama-padded"])
def test_a_compiled_model_has_the_masks_of_transformers(name, what):
    """Where padding or packing may be, which numbers of the inputs would say."""
    plain = make(name, **ONCE.get(name, {}))
    model, inputs = convert(copy.deepcopy(plain)), tokens(name) | SAID[what]
    (forward, _), got = graphs_of(model, inputs)
    assert not any("fp8kit.attention" in each for each in forward[0])
    assert any(tuple(shape[1:]) == (1, LENGTH, LENGTH) for shape in forward[1])
    assert_alike(got, passed(plain, inputs))


def test_models_that_share_a_configuration_keep_theirs(calls, tmp_path):
    """``convert`` changes the configuration of its model alone; what is saved, copied or pickled works."""
    config = transformers.LlamaConfig(**SIZES)
    plain, model = transformers.LlamaForCausalLM(config), transformers.LlamaForCausalLM(config)
    model.load_state_dict(plain.state_dict())
    convert(model)
    assert config._attn_implementation == plain.config._attn_implementation == "sdpa"
    assert model.config is model.model.config is model.model.layers[0].self_attn.config
    wanted = plain(**tokens("llama")).logits.detach()
    assert not calls
    copies = [model, copy.deepcopy(model)]
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for mapping in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        del mapping._global_mapping["fp8kit"]  # as a new process has it
    converted_attention._theirs.clear()
    copies.append(torch.load(buffer, weights_only=False))
    for one in copies:
        assert_alike([one(**tokens("llama")).logits.detach()], [wanted])
    assert len(calls) == 3 * LAYERS
    model.save_pretrained(tmp_path)
    assert "fp8kit" not in (tmp_path / "config.json").read_text()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    assert_same_bits("loaded", loaded(**tokens("llama")).logits.detach().numpy(), wanted.numpy())


def test_what_is_said_and_what_is_asked(monkeypatch):
    """Which models have it, and why others do not."""
    model = convert(make("llama"), attention=False)
    assert model.config._attn_implementation == "sdpa"
    assert "convert was not asked to" in coverage(model).attention[""]
    report = coverage(convert(nn.ModuleDict({"inner": model, "other": nn.Linear(4, 4)})))
    assert report.attention == {"inner": converted_attention.OURS}
    assert f"attention of inner: {converted_attention.OURS}" in str(report)
    monkeypatch.setattr(converted_attention, "_DEVICES", ("cuda",))
    assert coverage(model).attention[""] == f"{converted_attention.OURS}; on this CPU: torch's"
    assert coverage(nn.Sequential(nn.Linear(4, 4))).attention == {}
    with pytest.raises(ArgumentError, match="convert: attention"):
        convert(make("llama"), attention="sdpa")
    with pytest.warns(UserWarning, match="no layer that was replaced"):
        untouched = convert(make("llama"), lambda module, name: False)
    assert untouched.config._attn_implementation == "sdpa"
    reasons = {"gemma2": "is 'eager', not 'sdpa'", "t5": "no flash attention"}
    for name, reason in reasons.items():
        assert reason in coverage(convert(make(name))).attention[""]
    falcon = transformers.FalconModel(transformers.FalconConfig(**SIZES))
    assert "calls its attention by no name" in coverage(convert(falcon)).attention[""]
    config = transformers.models.qwen2_vl.Qwen2VLVisionConfig(
        depth=1, embed_dim=32, hidden_size=32, num_heads=2
    )
    images = transformers.models.qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel(config)
    assert "modeling_qwen2_vl asks for 'sdpa' by its name" in coverage(convert(images)).attention[""]
