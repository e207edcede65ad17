"""A layer's pass by its script gives the bits of the plain way, and is taken for nothing but what it is
like."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import fp8kit_torch as ft
import pytest
import torch
from fp8kit_torch import scripts
from torch import nn

import fp8kit as fk
from fp8kit.errors import Fp8kitError
from fp8kit.recipe import DelayedScaling, Float8CurrentScaling

from .twins import same

HIDDEN = 64
RECIPES = {"high": None, "delayed": DelayedScaling(amax_history_len=3), "current": Float8CurrentScaling()}


def layer(device="cpu", **options):
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "fuse_qkv_params": True} | options
    made = ft.TransformerLayer(HIDDEN, 96, 4, params_dtype=torch.bfloat16, device=device, **options)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return made


def plain(module):
    """A copy that always goes the plain way."""
    twin = copy.deepcopy(module)
    twin.self_attention.core_attention.register_forward_hook(lambda *given: None)
    return twin


def step(module, x, recipe, dy=None):
    """(y, dx, gradients) of a pass; the parameters keep none."""
    leaf = x.clone().requires_grad_()
    with ft.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(leaf)
    y.backward(torch.ones_like(y) if dy is None else dy)
    grads = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad()
    return y.detach(), leaf.grad, grads


def alike(ours, other, recipe, device="cpu", rows=7, seed=0):
    """A step of both gives the same."""
    x = torch.randn(rows, 2, HIDDEN, device=device, dtype=torch.bfloat16)
    found = []
    for module in (ours, other):
        torch.manual_seed(seed)
        found.append(step(module, x, recipe, x * 0.25))
    (y, dx, grads), (yp, dxp, gradsp) = found
    same(y, yp, "y")
    same(dx, dxp, "dx")
    for name, grad in grads.items():
        assert (grad is None) == (gradsp[name] is None), name
        if grad is not None:
            same(grad, gradsp[name], name)
    for path, part in other.named_modules():
        for name, state in getattr(part, "fp8_meta", {}).items():
            same(ours.get_submodule(path).fp8_meta[name].scale, state.scale, (path, name))
            same(ours.get_submodule(path).fp8_meta[name].amax_history, state.amax_history, (path, name))


@pytest.fixture
def ran(monkeypatch):
    """The scripts that ran."""
    found: list[scripts.Script] = []
    run = scripts.Script.run
    monkeypatch.setattr(scripts.Script, "run", lambda self, *given: found.append(self) or run(self, *given))
    return found


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hidden_dropout": 0.2, "attention_dropout": 0.1, "drop_path_rate": 0.3},
        {"parallel_attention_mlp": True},
        {"fuse_qkv_params": False, "output_layernorm": True},
    ],
    ids=["usual", "dropout", "parallel", "apart"],
)
def test_a_script_gives_the_bits_of_the_plain_way(device, recipe, options, ran):
    ours = layer(device, **options)
    other = plain(ours)
    for seed in range(4):
        alike(ours, other, RECIPES[recipe], device, seed=seed)
    assert len(ran) == 3
    alike(ours, other, RECIPES[recipe], device, rows=9)
    assert len(ran) == 3
    alike(ours, other, RECIPES[recipe], device)
    assert len(ran) == 4


def _half_the_dropout(module):
    module.hidden_dropout = 0.5


def _other_mask(module):
    module.self_attention.core_attention.attn_mask_type = "no_mask"


def _other_weight(module):
    module.layernorm_mlp.fc1_weight.data = module.layernorm_mlp.fc1_weight.data * 2


def _other_parameter(module):
    module.self_attention.proj.weight = nn.Parameter(module.self_attention.proj.weight.detach() * 2)


def _turned_weight(module):  # the same memory
    weight = module.self_attention.proj.weight
    weight.data = weight.data.t()


def _frozen(module):
    module.layernorm_mlp.fc2_weight.requires_grad_(False)


def _loaded(module):
    module.load_state_dict(
        {
            name: value * 2 if value.is_floating_point() else value
            for name, value in module.state_dict().items()
        }
    )


def _other_part(module):
    module.self_attention.proj = ft.Linear(
        HIDDEN, HIDDEN, params_dtype=torch.bfloat16, return_bias=True, device="cpu"
    )
    with torch.no_grad():
        for parameter in module.self_attention.proj.parameters():
            parameter.fill_(0.01)


CHANGES = {
    change.__name__.strip("_").replace("_", " "): change
    for change in (
        _half_the_dropout,
        _other_mask,
        _other_weight,
        _other_parameter,
        _turned_weight,
        _frozen,
        _loaded,
        _other_part,
    )
}
CHANGES |= {
    "eval": lambda module: module.eval(),
    "part in eval": lambda module: module.self_attention.core_attention.eval(),
    "reset": lambda module: [torch.manual_seed(3), module.self_attention.layernorm_qkv.reset_parameters()],
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_is_seen(change):
    ours = layer(hidden_dropout=0.1)
    other = plain(ours)
    for seed in range(3):
        alike(ours, other, RECIPES["delayed"], seed=seed)
    for module in (ours, other):
        CHANGES[change](module)
    for seed in range(3):
        alike(ours, other, RECIPES["delayed"], seed=seed)


def test_other_recipes_policies_and_modes_are_other_passes(ran):
    ours = layer()
    other = plain(ours)
    for recipe in ("delayed", "current", "high", "delayed", "current", "high"):
        alike(ours, other, RECIPES[recipe])
    alike(ours, other, DelayedScaling(amax_history_len=3))  # an equal recipe
    with fk.deterministic(False):
        alike(ours, other, RECIPES["delayed"])
    x = torch.randn(7, 2, HIDDEN, dtype=torch.bfloat16)
    before = len(ran)
    with torch.no_grad():
        assert ours(x).grad_fn is None
    with ft.autocast(enabled=False, calibrating=True):
        ours(x)
    with torch.autocast("cpu", torch.bfloat16):
        ours(x)
    assert len(ran) == before


def test_a_mode_and_parameters_that_are_set_before_every_pass_are_no_other_layer(ran):
    ours = layer(hidden_dropout=0.1)
    other = plain(ours)
    for seed in range(6):
        for module in (ours, other):
            module.train(seed % 3 < 2)
            proj = module.self_attention.proj
            proj.weight = nn.Parameter(proj.weight.detach() * 1.5)  # as ``fully_shard`` and offloading do
        alike(ours, other, RECIPES["delayed"], seed=seed)
    assert len(ran) == 4


@pytest.mark.parametrize("one", ["parameter", "part", "memory"])
def test_parameters_that_are_one(one):
    ours = layer(qk_norm_type="RMSNorm")
    attention = ours.self_attention
    if one == "parameter":
        attention.k_norm.weight = attention.q_norm.weight
    elif one == "part":
        attention.k_norm = attention.q_norm
    else:
        attention.proj.bias.data = ours.layernorm_mlp.fc2_bias.data
    other = plain(ours)
    for seed in range(3):
        alike(ours, other, None, seed=seed)
    for module in (ours, other):
        module.self_attention.proj.bias.data = module.self_attention.proj.bias.data * 3  # for itself
    alike(ours, other, None)


def test_what_backward_does_not_want_is_not_gone_through(ran):
    ours = layer()
    other, x = plain(ours), torch.randn(7, 2, HIDDEN, dtype=torch.bfloat16)
    for _ in range(2):
        alike(ours, other, RECIPES["delayed"])
    for names in (["layernorm_mlp.fc2_weight"], ["self_attention.proj.weight", "layernorm_mlp.fc1_bias"], []):
        found = []
        for module in (ours, other):
            leaf = x.clone().requires_grad_()
            with ft.autocast(recipe=RECIPES["delayed"]):
                y = module(leaf * 1)
            found.append(
                torch.autograd.grad(y, [module.get_parameter(name) for name in names] or [leaf], x * 3)
            )
        for own, wanted in zip(*found, strict=True):
            same(own, wanted, names)
        alike(ours, other, RECIPES["delayed"])  # the states too: of what was not gone through no amaxes came
    assert len(ran) == 7


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is:DeprecationWarning",
    "ignore:Sparse CSR tensor support is in beta:UserWarning",
)
def test_forward_mode_is_refused_as_ever(ran):
    ours, x = layer(), torch.randn(7, 2, HIDDEN, dtype=torch.bfloat16)
    for _ in range(2):
        ours(x).sum().backward()
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        ours(torch.autograd.forward_ad.make_dual(x, x))
    with pytest.raises(Fp8kitError, match="expected a dense tensor"):
        ours(x[:, 0].to_sparse_csr())
    assert len(ran) == 1


def test_what_was_moved_elsewhere_comes_back_operation_by_operation(ran):
    ours, x, brought = layer(), torch.randn(7, 2, HIDDEN, dtype=torch.bfloat16), []
    other = plain(ours)
    for _ in range(2):
        alike(ours, other, None)
    for module in (ours, other):
        nodes = set()

        def bring(tensor, nodes=nodes):
            nodes.add(torch._C._current_autograd_node())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, bring):
            y = module(x.clone().requires_grad_())
        y.sum().backward()
        brought.append(len(nodes))
    assert brought[0] == brought[1] > 1
    assert len(ran) == 1


def test_a_core_attention_that_is_checkpointed_keeps_nothing(ran):
    ours, x = layer(), torch.randn(7, 2, HIDDEN, dtype=torch.bfloat16)
    for _ in range(3):
        ours(x, checkpoint_core_attention=True).sum().backward()
    assert not ran


@pytest.mark.parametrize("hooked", ["part", "part's backward", "every module", "forward", "class"])
def test_nobody_who_looks_on_is_passed_by(hooked, ran, monkeypatch):
    ours, x, seen = layer(), torch.randn(7, 2, HIDDEN, dtype=torch.bfloat16), []
    for _ in range(2):
        step(ours, x, None)
    before = len(ran)
    proj = ours.self_attention.proj
    handle = None
    if hooked == "part":
        handle = proj.register_forward_pre_hook(lambda *given: seen.append(1))
    elif hooked == "part's backward":
        handle = proj.register_full_backward_hook(lambda *given: seen.append(1))
    elif hooked == "every module":
        handle = torch.nn.modules.module.register_module_forward_hook(lambda *given: seen.append(1))
    elif hooked == "class":
        forward = ft.Linear.forward
        monkeypatch.setattr(
            ft.Linear, "forward", lambda *given, **named: seen.append(1) or forward(*given, **named)
        )
    else:
        forward = proj.forward
        proj.forward = lambda *given, **named: seen.append(1) or forward(*given, **named)
    step(ours, x, None)
    assert seen
    assert len(ran) == before
    if handle is not None:
        handle.remove()
        step(ours, x, None)
        assert len(ran) == before + 1


def test_an_attention_of_the_users_own_has_no_script(ran):
    class Mean(ft.DotProductAttention):
        def forward(self, *, qkv_layer, **options):
            return qkv_layer.unflatten(-1, (4, 3, 16)).mean(-2).flatten(-2) * 2

    ours = layer()
    ours.self_attention.core_attention = Mean(4, 16)
    x = torch.randn(7, 2, HIDDEN, dtype=torch.bfloat16)
    _, dx, grads = step(ours, x, None)
    for _ in range(2):
        _, again, more = step(ours, x, None)
        same(dx, again, "dx")
        for name, grad in grads.items():
            assert grad is not None, name
            same(grad, more[name], name)
    assert not ran


def test_what_autograd_promises_holds(ran):
    ours, x = layer(), torch.randn(7, 2, HIDDEN, dtype=torch.bfloat16)
    for _ in range(2):
        _, dx, grads = step(ours, x, None)
    leaf = x.clone().requires_grad_()
    y = ours(leaf)
    y.backward(torch.ones_like(y), retain_graph=True)
    y.backward(torch.ones_like(y))  # what is kept is kept for both
    same(leaf.grad, dx * 2, "dx")
    with pytest.raises(RuntimeError, match="second time"):
        y.backward(torch.ones_like(y))
    y = ours(leaf)
    y.mul_(2)  # a result may be changed in place
    (found,) = torch.autograd.grad(y.sum(), leaf)
    same(found, (dx.float() * 2).bfloat16(), "dx of 2 y")
    y = ours(leaf * 1)
    with torch.no_grad():
        ours.layernorm_mlp.layer_norm_weight.mul_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y = ours(leaf)
    first = torch.autograd.grad(y.square().sum(), leaf, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="gradients of gradients are not there"):
        first.sum().backward()
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(t) or len(packed) - 1, lambda i: packed[i]
    ):
        y = ours(leaf)
    (found,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
    assert packed
    same(found, dx, "dx through hooks")
    assert len(ran) == 5
    assert set(grads) == {name for name, _ in ours.named_parameters()}


def test_some_gradients_are_not_wanted(ran):
    ours, x = layer(), torch.randn(7, 2, HIDDEN, dtype=torch.bfloat16)
    _, dx, _ = step(ours, x, None)
    ours.requires_grad_(False)
    for _ in range(3):
        _, found, grads = step(ours, x, None)
        same(found, dx, "dx")
        assert all(grad is None for grad in grads.values())
    assert len(ran) == 2
    for _ in range(2):
        assert ours(x).grad_fn is None  # nothing wants one
    ours.layernorm_mlp.requires_grad_(True)
    for _ in range(3):
        ours(x).sum().backward()
        assert ours.layernorm_mlp.fc1_weight.grad is not None
        assert ours.self_attention.proj.weight.grad is None


def test_main_grad_is_filled_the_plain_way(ran):
    ours = layer(fuse_wgrad_accumulation=True)
    mains = {}
    for name, p in ours.named_parameters():
        if name.endswith("weight") and "layer_norm" not in name:
            mains[name] = p.main_grad = torch.zeros(p.shape)
    x = torch.randn(7, 2, HIDDEN, dtype=torch.bfloat16)
    step(ours, x, RECIPES["delayed"])
    once = {name: main.clone() for name, main in mains.items()}
    step(ours, x, None)
    assert all(float((mains[name] - once[name]).abs().max()) > 0 for name in mains)
    assert not ran


def test_a_pass_that_fails_leaves_the_layer_usable(monkeypatch, ran):
    ours, x = layer(), torch.randn(7, 2, HIDDEN, dtype=torch.bfloat16)
    for _ in range(2):
        y, _, _ = step(ours, x, None)

    def broken(*given):
        raise fk.errors.BackendError("broken")

    with monkeypatch.context() as patch:
        patch.setattr("fp8kit_torch.ready.Ready.forward", broken)
        with pytest.raises(Fp8kitError, match="broken"):
            ours(x)
    same(step(ours, x, None)[0], y, "y")


def test_copies_and_files_have_no_scripts(ran):
    ours, x = layer(), torch.randn(7, 2, HIDDEN, dtype=torch.bfloat16)
    for _ in range(2):
        y, _, _ = step(ours, x, None)
    assert len(ran) == 1
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    for other in (copy.deepcopy(ours), torch.load(file, weights_only=False)):
        assert other._scripts is None
        same(step(other, x, None)[0], y, "y")
    assert len(ran) == 1


def test_what_nobody_needs_any_more_is_let_go_of(ran):
    ours, x = layer(), torch.randn(7, 2, HIDDEN, dtype=torch.bfloat16)
    ours(x).sum().backward()
    leaf = x.clone().requires_grad_()
    held = weakref.ref(leaf)
    y = ours(leaf)
    assert len(ran) == 0  # the input wants a gradient now
    y = ours(leaf)
    assert len(ran) == 1
    y.sum().backward()
    del leaf, y
    gc.collect()
    assert held() is None
    (script,) = [script for script in ours._scripts.known.values() if script is ran[0]]
    places = {place for link in script.links for place in range(link.first, link.first + link.outputs)}
    assert {place for link in script.links for place in link.done} == places - {script.output}


def test_scripts_hold_no_layer_and_no_parameters(ran):
    ours, x = layer(), torch.randn(7, 2, HIDDEN, dtype=torch.bfloat16)
    for _ in range(2):
        step(ours, x, RECIPES["delayed"])
    ours.load_state_dict({name: value.clone() for name, value in ours.state_dict().items()}, assign=True)
    old = weakref.ref(ours.layernorm_mlp)
    ours.layernorm_mlp = layer().layernorm_mlp
    gc.collect()
    gc.disable()
    try:
        assert old() is None
        step(ours, x, RECIPES["delayed"])
        step(ours, x, RECIPES["delayed"])
        held = [weakref.ref(ours), *(weakref.ref(parameter) for parameter in ours.parameters())]
        del ours
        assert all(reference() is None for reference in held)
    finally:
        gc.enable()
    assert len(ran) == 2


def test_what_the_gpu_takes_long_for_goes_the_plain_way(ran, monkeypatch):
    ours = layer()
    numbers = sum(p.numel() for p in ours.parameters())
    monkeypatch.setattr(scripts, "_LARGEST", 8 * numbers)
    for rows, runs in ((2, 2), (4, 4), (5, 4)):  # two sequences each
        for _ in range(3):
            step(ours, torch.randn(rows, 2, HIDDEN, dtype=torch.bfloat16), None)
        assert len(ran) == runs


def test_a_variable_does_without(ran, monkeypatch):
    monkeypatch.setenv("FP8KIT_REPLAYS", "0")
    ours, x = layer(), torch.randn(7, 2, HIDDEN, dtype=torch.bfloat16)
    for _ in range(3):
        step(ours, x, RECIPES["delayed"])
    assert not ran


def test_so_many_kinds_are_kept(ran, monkeypatch):
    monkeypatch.setattr(scripts, "_LIMIT", 4)
    ours = layer()
    for rows in (1, 2, 3, 4, 2, 5, 6, 2):
        step(ours, torch.randn(rows, 1, HIDDEN, dtype=torch.bfloat16), None)
        assert len(ours._scripts.known) <= 4
    assert len(ran) == 1
