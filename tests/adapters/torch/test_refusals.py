"""A call that is refused is refused before anything runs: FP8 state, torch's generator, parameters and caches keep their bits, and the next
good call gives the bits that it would have given without the bad one."""

from __future__ import annotations

import fp8kit_torch as ft
import numpy as np
import pytest
import torch
from fp8kit_torch.module import TransformerEngineBaseModule

from fp8kit.errors import Fp8kitError
from fp8kit.recipe import DelayedScaling
from tests.adapters.torch.test_junk import state_of
from tests.nn.bad_options import ACROSS, ACROSS_OWN, FFN, HEADS, OTHER, PACKED, SELF, THD, TOKENS, B, H, S, refused
from tests.nn.test_layers import draw
from tests.nn.test_refusals import PACKED_LAYER, PACKED_MHA, RENAMED, STARTS, TWINS, renamed

OPTIONS = {"attention_dropout": 0.1, "layer_number": 1, "params_dtype": torch.float32}
RECIPE = DelayedScaling(amax_history_len=4)
X, SOURCE, PACK = draw(1, (S, B, H), "float32"), draw(2, (OTHER, B, H), "float32"), draw(3, (TOKENS, H), "float32")
ACROSS_MHA = {"attention_type": "cross", "attn_mask_type": "no_mask"}


def mha(device, **options):
    return ft.MultiheadAttention(H, HEADS, device=device, **OPTIONS, **options)


def layer(device, **options):
    return ft.TransformerLayer(H, FFN, HEADS, device=device, hidden_dropout=0.1, **OPTIONS, **options)


CASES = {
    "mha": (mha, {"hidden_states": X}, SELF),
    "mha with a norm, and queries and keys apart": (lambda d: mha(d, input_layernorm=True, qk_norm_type="RMSNorm", num_gqa_groups=2),
                                                    {"hidden_states": X}, SELF),
    "mha across": (lambda d: mha(d, **ACROSS_MHA), {"hidden_states": X, "encoder_output": SOURCE}, ACROSS | ACROSS_OWN),
    "mha across, parts apart": (lambda d: mha(d, fuse_qkv_params=True, qk_norm_type="LayerNorm", **ACROSS_MHA),
                                {"hidden_states": X, "encoder_output": SOURCE}, ACROSS | ACROSS_OWN),
    "mha, packed": (lambda d: mha(d, **PACKED_MHA), {"hidden_states": PACK} | THD, PACKED),
    "layer": (layer, {"hidden_states": X}, renamed(SELF, RENAMED)),
    "parallel layer": (lambda d: layer(d, parallel_attention_mlp=True), {"hidden_states": X}, renamed(SELF, RENAMED)),
    "decoder": (lambda d: layer(d, layer_type="decoder"), {"hidden_states": X, "encoder_output": SOURCE},
                ACROSS | renamed(ACROSS_OWN, TWINS)),
    "layer, packed": (lambda d: layer(d, drop_path_rate=0.5, **PACKED_LAYER), {"hidden_states": PACK} | THD,
                      renamed(PACKED, RENAMED) | STARTS),
}  # fmt: skip


def placed(value, device):
    """An option as the torch door takes it."""
    if callable(value):
        return value(ft.InferenceParams, device)
    if isinstance(value, tuple):
        return tuple(placed(part, device) for part in value)
    return torch.from_numpy(value).to(device) if isinstance(value, np.ndarray) else value


def whole_state(module):
    """All that a call might change of a module, and the generators."""
    own = [(m._weights, m.fp8_meta.keys()) for m in module.modules() if hasattr(m, "_weights")]
    caches = [(None if weights is None else state_of(weights[1]), tuple(keys)) for weights, keys in own]
    moved = torch.cuda.get_rng_state().numpy().tobytes() if next(module.parameters()).is_cuda else b""
    return state_of(module), caches, torch.get_rng_state().numpy().tobytes(), moved


def step(module, good, device):
    """A training step of micro-batches; output, gradients and state as bytes."""
    with ft.autocast(enabled=True, recipe=RECIPE):
        y = module(**{name: placed(value, device) for name, value in good.items()}, is_first_microbatch=True)
    y.sum().backward()
    grads = {name: state_of(p.grad.cpu()) for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    return state_of(y.detach().cpu()), grads, whole_state(module)


def made(make, device):
    torch.manual_seed(7)
    return make(device)


@pytest.mark.parametrize("case", CASES)
def test_a_refused_call_leaves_no_trace(device, case, monkeypatch):
    make, good, table = CASES[case]
    other = made(make, device)
    wanted = [step(other, good, device) for _ in range(2)]
    module, ran = made(make, device), []
    run = TransformerEngineBaseModule.run

    def counted(self, *given, **named):
        ran.append(type(self).__name__)
        return run(self, *given, **named)

    monkeypatch.setattr(TransformerEngineBaseModule, "run", counted)
    wrong = []
    for when in ("before the first step", "after it"):
        before = whole_state(module)
        for name, bad in refused(table, device).items():
            options = {argument: placed(value, device) for argument, value in (good | bad).items()}
            cached, ran[:] = state_of(options.get("inference_params")), []
            try:
                with ft.autocast(enabled=True, recipe=RECIPE):
                    module(**options)
                wrong.append(f"{when}: {name}: taken")
            except Fp8kitError:
                pass
            if whole_state(module) != before or state_of(options.get("inference_params")) != cached:
                wrong.append(f"{when}: {name}: left a trace")
            if ran and name != "inputs of another dtype":  # which the first projection itself refuses
                wrong.append(f"{when}: {name}: {', '.join(ran)} ran")
        assert not wrong
        assert step(module, good, device) == wanted.pop(0)


@pytest.mark.parametrize("first", [None, True])
@pytest.mark.parametrize("kind", [ft.Linear, ft.LayerNormLinear, ft.LayerNormMLP])
def test_a_layer_that_refuses_its_input_keeps_its_state(device, kind, first):
    """Shapes and dtypes of the input, and words for flags; the weight's cast and its cache come after it."""
    module, other = (made(lambda d: kind(H, FFN, device=d, params_dtype=torch.float32), device) for _ in range(2))
    good = {"inp": X}
    before = whole_state(module)
    for bad in ({"inp": np.zeros((S, H + 1), np.float32)}, {"inp": np.zeros((S, H), np.float16)}, {"inp": np.zeros((), np.float32)},
                {"is_first_microbatch": "yes"}):
        for _ in range(2):
            options = {name: placed(value, device) for name, value in ({"is_first_microbatch": first} | good | bad).items()}
            with pytest.raises(Fp8kitError), ft.autocast(enabled=True, recipe=RECIPE):
                module(**options)
            assert whole_state(module) == before
        assert step(module, good, device) == step(other, good, device)
        before = whole_state(module)


def test_groups_are_refused_before_any_runs(device):
    """Sizes, dtypes, a weight of the last group that is unlike the others."""
    module = made(lambda d: ft.GroupedLinear(3, H, FFN, device=d, params_dtype=torch.float32), device)
    x, before = placed(X[:, 0], device), whole_state(module)
    for inp, splits in ((x, [2, 2, 1]), (x, [2, 4]), (x, [3, -1, 4]), (x.half(), [2, 2, 2]), (x[:, 1:], [2, 2, 2])):
        with pytest.raises(Fp8kitError), ft.autocast(enabled=True, recipe=RECIPE):
            module(inp, splits)
        assert whole_state(module) == before
    with torch.no_grad():
        module.weight2 = torch.nn.Parameter(module.weight2.half())
    before = whole_state(module)
    with pytest.raises(Fp8kitError, match="weight2"), ft.autocast(enabled=True, recipe=RECIPE):
        module(x, [2, 2, 2])
    assert whole_state(module) == before


def test_dropout_is_refused_before_it_draws(device):
    """The functions and the module that draw from torch's generator."""
    x = placed(X, device)
    core = ft.DotProductAttention(HEADS, H // HEADS, attention_dropout=0.5, device=device)
    q = torch.zeros(S, B, HEADS, H // HEADS, device=device)
    before = torch.get_rng_state(), torch.cuda.get_rng_state() if x.is_cuda else None
    for call in (lambda: ft.dropout_add(x, x[1:], p=0.5), lambda: ft.dropout_add(x, x.half(), p=0.5),
                 lambda: core(q, q[1:], q), lambda: core(q, q, q.half()), lambda: core(q, q, q, core_attention_bias=q)):
        with pytest.raises(Fp8kitError):
            call()
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1] is None or torch.equal(before[1], torch.cuda.get_rng_state())
