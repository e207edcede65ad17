"""convert and revert: the same parameters, the same numbers, and FP8 where it is wanted."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch
from fp8kit_torch import autocast, convert, coverage, revert
from fp8kit_torch.converted import ConvertedLinear, ConvertedNorm, standing_for
from torch import nn
from torch.nn.utils import prune

from fp8kit.errors import ArgumentError, FormatError, Fp8kitError, UnsupportedError
from fp8kit.layer_recipes import PerLayer
from fp8kit.recipe import DelayedScaling, Float8CurrentScaling
from fp8kit.testing.compare import assert_same_bits, relative_error
from tests.support.combinations import combinations
from tests.support.torch_norms import GemmaLikeRMSNorm, LlamaLikeRMSNorm

D, H = 32, 48


class OddRMSNorm(LlamaLikeRMSNorm):
    """Called an RMSNorm, and is none."""

    def forward(self, x):
        return super().forward(x) + x


class Net(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, H), nn.Linear(H, D, bias=False)
        self.rms, self.llama, self.gemma, self.odd = (
            nn.RMSNorm(D),
            LlamaLikeRMSNorm(D),
            GemmaLikeRMSNorm(D),
            OddRMSNorm(D),
        )
        self.head = nn.Linear(D, D, bias=False)
        self.head.weight = self.down_tied = nn.Parameter(torch.randn(D, D) / 8)
        self.twice = self.up
        self.to(dtype)

    def forward(self, x):
        y = self.down(torch.relu(self.up(self.norm(x)))) + x
        return self.head(self.odd(self.gemma(self.llama(self.rms(y)))))


def model(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return Net(dtype)


def ours_of(kind):
    """What stands for a module of that class."""
    return ConvertedLinear if issubclass(kind, nn.Linear) else ConvertedNorm


def bits(t):
    return t.detach().float().cpu().numpy()


def test_parameters_are_the_same_objects_and_come_back_bit_for_bit():
    net = model()
    plain = dict(net.named_modules(remove_duplicate=False))
    params, state = (
        dict(net.named_parameters(remove_duplicate=False)),
        {n: t.clone() for n, t in net.state_dict().items()},
    )
    addresses = {n: p.data_ptr() for n, p in params.items()}
    assert convert(net) is net
    kinds = {n: type(m) for n, m in plain.items() if "." not in n and n}
    assert {n: type(m) for n, m in net.named_children()} == {
        n: OddRMSNorm if n == "odd" else standing_for(ours_of(kinds[n]), kinds[n])
        for n in ("norm", "up", "down", "rms", "llama", "gemma", "odd", "head")
    }
    assert isinstance(net.up, nn.Linear)
    assert isinstance(net.norm, nn.LayerNorm)
    assert net.twice is net.up
    assert dict(net.named_parameters(remove_duplicate=False)).items() == params.items()
    assert all(
        p is params[n] and p.data_ptr() == addresses[n]
        for n, p in net.named_parameters(remove_duplicate=False)
    )
    assert net.state_dict().keys() == state.keys()
    assert net.gemma.spec.zero_centered_gamma
    assert not net.llama.spec.zero_centered_gamma
    revert(net)
    assert dict(net.named_modules(remove_duplicate=False)) == plain
    for name, tensor in net.state_dict().items():
        assert_same_bits(name, bits(tensor), bits(state[name]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outside_of_autocast_it_computes_what_it_did(dtype):
    net, x = model(dtype=dtype), torch.randn(3, 7, D, dtype=dtype)
    wanted = net(x)
    wanted.float().square().mean().backward()
    grads = {n: p.grad for n, p in net.named_parameters()}
    net.zero_grad()
    y = convert(net)(x)
    y.float().square().mean().backward()
    # roundings of some ten operations on the way, of which each may differ
    limit = 10 * (2.0**-8 if dtype is torch.bfloat16 else 2.0**-24 * D)
    assert relative_error(bits(y), bits(wanted)) < limit
    for name, p in net.named_parameters():
        assert relative_error(bits(p.grad), bits(grads[name])) < limit, name


@pytest.mark.parametrize(
    "recipe", [DelayedScaling(amax_history_len=4), Float8CurrentScaling()], ids=["delayed", "current"]
)
def test_trains_in_fp8_under_an_optimiser_made_before(recipe):
    net, twin = model(), model()
    opt, other = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (net, twin))
    convert(net)
    losses = []
    for step in range(6):
        x = torch.randn(16, D, generator=torch.Generator().manual_seed(step))
        for m, o, on in ((net, opt, True), (twin, other, False)):
            o.zero_grad()
            with autocast(enabled=on, recipe=recipe):
                loss = (m(x) - x).square().mean()
            loss.backward()
            o.step()
            losses.append(loss.item())
    mine, plain = np.array(losses[::2]), np.array(losses[1::2])
    # FP8's relative error of 2**-4 an element, averaged over hundreds
    assert (np.abs(mine - plain) < 0.05 * plain).all()
    assert (mine != plain).all()
    assert bool(net.up.fp8_meta) == recipe.delayed()
    revert(net)
    assert not any(isinstance(m, ConvertedLinear) for m in net.modules())
    assert relative_error(bits(net.up.weight), bits(twin.up.weight)) < 6 * 2e-3 / 0.1


def test_filters_copies_devices_and_what_is_left_alone():
    net = convert(model(), lambda module, name: isinstance(module, nn.Linear) and name != "head")
    assert type(net.head) is nn.Linear
    assert type(net.norm) is nn.LayerNorm
    assert isinstance(net.up, ConvertedLinear)
    clone = copy.deepcopy(net)
    assert clone.up.weight is not net.up.weight
    assert revert(clone).up.weight is not net.up.weight
    assert type(clone.up) is nn.Linear
    net.half()
    assert revert(net).up.weight.dtype == torch.float16
    assert net.up.bias.dtype == torch.float16

    class Special(nn.Linear):
        """Computes something else."""

    others = nn.ModuleList(
        [
            Special(4, 4),
            nn.LayerNorm((2, 4)),
            nn.LayerNorm(4, elementwise_affine=False),
            nn.Linear(4, 4, dtype=torch.float64),
            nn.MultiheadAttention(4, 2),
        ]
    )
    replaced = nn.Linear(4, 4)
    replaced.forward = lambda x: x
    others.append(replaced)
    kinds = [type(m) for m in others.modules()]
    with pytest.warns(UserWarning, match="ModuleList has no layer that was replaced"):
        assert [type(m) for m in convert(others).modules()] == kinds
    with pytest.raises(Fp8kitError, match="model"):
        convert(nn.Linear(4, 4))
    for wrong in (lambda module: True, 3):
        with pytest.raises(
            ArgumentError, match=r"^convert: filter_fn: got .*, expected a function of a module and its name$"
        ):
            convert(nn.Sequential(nn.Linear(4, 4)), wrong)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated", "ignore:Lazy modules")
def test_weights_that_are_no_parameter_of_their_own_stay():
    """torch makes them of others before each call, or at the first one. What stands before them is
    converted."""
    made = {
        "pruned": prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.5),
        "spectral": nn.utils.spectral_norm(nn.Linear(8, 8)),
        "weight norm": nn.utils.weight_norm(nn.Linear(8, 8)),
        "lazy": nn.LazyLinear(8),
        "pruned norm": prune.random_unstructured(nn.LayerNorm(8), "weight", 0.5),
    }
    for name, layer in made.items():
        net, kind, x = nn.Sequential(nn.Linear(8, 8), layer), type(layer), torch.ones(2, 8)
        convert(net)
        assert isinstance(net[0], ConvertedLinear), name
        assert type(net[1]) is kind, name
        assert net(x).shape == (2, 8)


class Twice(nn.Linear):
    """A subclass of its own way to compute the same, as Falcon's."""

    def forward(self, x):
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


class Half(nn.Linear):
    """Not the same."""

    def forward(self, x):
        return super().forward(x) / 2


def test_subclasses_of_linear_are_converted_where_that_is_asked():
    made = nn.ModuleList([Twice(8, 4), Half(8, 4), nn.Linear(8, 4)])
    convert(made)
    assert [isinstance(part, ConvertedLinear) for part in made] == [False, False, True]
    convert(made, linear_classes=[Twice, Half])
    assert [isinstance(part, ConvertedLinear) for part in made] == [True, False, True]
    assert isinstance(made[0], Twice)
    x = torch.randn(3, 8)
    assert relative_error(bits(made[0](x)), bits(made[0].plain(x))) < 2.0**-20
    reasons = [row.why for row in coverage(made, linear_classes=[Half]).modules]
    assert reasons == ["converted", "Half.forward does not compute x W^T + b", "converted"]
    for wrong in ([nn.LayerNorm], [3], ["Linear"]):
        with pytest.raises(ArgumentError, match="linear_classes"):
            convert(nn.Sequential(nn.Linear(4, 4)), linear_classes=wrong)


class LayerNorm1P(nn.LayerNorm):
    """Nemotron's: (1 + weight) and a bias."""

    def forward(self, x):
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class CohereLikeLayerNorm(LlamaLikeRMSNorm):
    """(x - mean) / std * weight, without a bias."""

    def forward(self, x):
        return nn.functional.layer_norm(x, x.shape[-1:], self.weight, None, self.variance_epsilon)


@pytest.mark.parametrize(
    "make",
    [lambda: nn.LayerNorm(D, bias=False), lambda: LayerNorm1P(D), lambda: CohereLikeLayerNorm(D)],
    ids=["no bias", "1 + weight", "cohere"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norms_without_bias_and_of_other_libraries(make, dtype):
    torch.manual_seed(0)
    plain = make().to(dtype)
    with torch.no_grad():
        for p in plain.parameters():
            p.uniform_(0.5, 1.5)
    net = convert(nn.Sequential(copy.deepcopy(plain)))
    assert isinstance(net[0], ConvertedNorm)
    assert isinstance(net[0], type(plain))
    assert net.state_dict().keys() == {f"0.{n}" for n in plain.state_dict()}
    x, g = torch.randn(5, D, dtype=dtype), torch.randn(5, D, dtype=dtype)
    inputs = x.clone().requires_grad_(), x.clone().requires_grad_()
    wanted, got = plain(inputs[0]), net(inputs[1])
    (wanted * g).sum().backward()
    (got * g).sum().backward()
    limit = 4 * torch.finfo(dtype).eps  # a few roundings, of which each may differ
    assert relative_error(bits(got), bits(wanted)) < limit
    assert relative_error(bits(inputs[1].grad), bits(inputs[0].grad)) < limit
    for name, p in plain.named_parameters():
        assert relative_error(bits(getattr(net[0], name).grad), bits(p.grad)) < limit, name


def test_converted_modules_are_pickled_and_take_weights_of_another_size():
    net = convert(nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4)))
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    assert [type(part) for part in read] == [type(part) for part in net]
    x = torch.randn(2, 8)
    assert_same_bits("read", bits(read(x)), bits(net(x)))
    layer = net[0]
    layer.weight, layer.bias = nn.Parameter(torch.randn(6, 8)), None
    wanted = x @ layer.weight.T
    assert relative_error(bits(layer(x)), bits(wanted)) < 2.0**-20
    assert (layer.in_features, layer.out_features) == (8, 6)
    before = layer.weight.clone()
    layer.reset_parameters()
    assert (layer.weight != before).any()
    assert revert(net)[0].bias is None


def test_coverage_tells_of_every_module_and_why():
    net = model()
    before = {row.name: row for row in coverage(net).modules}
    assert "could be" in before["up"].why
    assert not any(row.fp8 for row in before.values())
    convert(net, lambda module, name: name != "down")
    net.experts, net.table = Experts(), nn.Embedding(3, 4)
    net.conv = nn.Conv1d(4, 4, 1)
    report = coverage(net)
    found = {row.name: row for row in report.modules}
    assert found["up"].fp8
    assert found["up"].why == "converted"
    assert found["up"].parameters == D * H + H
    assert "asked" in found["down"].why
    assert "neither" in found["odd"].why
    assert "experts in one array" in found["experts"].why
    assert "another kind" in found["conv"].why
    assert {row.name for row in report.left} == {"", "down", "odd", "experts", "conv"}
    assert found[""].why == "a module of its own kind, with down_tied"
    total = sum(p.numel() for p in net.parameters())
    assert sum(row.parameters for row in report.modules) == total
    wanted = (D * H + H) / total  # the head's weight counts for the model, which has it first
    assert report.fp8_share == pytest.approx(wanted)
    assert "ConvertedLinear" in str(report)
    assert f"{wanted:.1%}" in str(report)
    with pytest.raises(ArgumentError, match="coverage: model"):
        coverage(3)


class Experts(nn.Module):
    """Weights of experts in one array, as transformers' models have them."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(2, 4, 4))


def test_a_conversion_that_fails_replaces_nothing(monkeypatch):
    def fails(self, module, spec):
        raise RuntimeError("no")

    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    monkeypatch.setattr(ConvertedNorm, "__init__", fails)
    with pytest.raises(RuntimeError, match="no"):
        convert(net)
    assert [type(part) for part in net] == [nn.Linear, nn.LayerNorm]


def test_a_conversion_of_nothing_is_told():
    """A warning where nothing was replaced; none for a model that is converted already."""
    plain = nn.Sequential(nn.ReLU(), nn.Dropout(0.1))
    with pytest.warns(
        UserWarning,
        match=r"^convert: model: Sequential has no layer that was replaced: it computes as before; "
        r"see te\.coverage\(model\)$",
    ) as found:
        assert convert(plain) is plain
    assert found[0].filename == __file__
    some = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with pytest.warns(
        UserWarning, match=r"replaced; filter_fn left out 2 of its 2 modules: it computes as before; see te"
    ):
        convert(some, lambda module, name: False)
    assert type(some[0]) is nn.Linear
    assert isinstance(convert(convert(some))[0], ConvertedLinear)


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning", "ignore:`torch.jit:FutureWarning"
)
def test_modules_of_torch_jit_stay():
    """A layer of ours says itself that ``torch.jit.trace`` cannot follow it."""
    x = torch.randn(4, D)
    traced = torch.jit.trace(nn.Sequential(nn.Linear(D, D)), x)
    with pytest.raises(
        ArgumentError, match=r"^convert: model: got TopLevelTracedModule, expected a model of "
    ):
        convert(traced)
    model = convert(nn.Sequential(traced, nn.Linear(D, D)))
    assert isinstance(model[1], ConvertedLinear)
    rows = {row.name: row for row in coverage(model).modules}
    assert (rows["0.0"].why, rows["1"].fp8) == ("compiled by TorchScript", True)
    with pytest.raises(UnsupportedError, match=r"^Linear: inp: got a call that torch.jit.trace traces"):
        torch.jit.trace(model[1], x)


def test_hooks_and_modes_go_along():
    net, seen = model().eval(), []
    net.up.register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape)))
    convert(net)
    net(torch.randn(2, D))
    assert seen == [(2, H)]
    assert not net.up.training
    net.train()
    assert revert(net).up.training


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [1.0],
        torch.ones(2, D, dtype=torch.int64),
        torch.ones(2, D, dtype=torch.float64),
        torch.ones(2, D + 1),
        torch.ones(()),
    ],
    ids=["none", "list", "ints", "float64", "features", "scalar"],
)
@pytest.mark.parametrize(
    "plain", [nn.Linear(D, H), nn.LayerNorm(D), nn.RMSNorm(D)], ids=["linear", "norm", "rms"]
)
def test_wrong_inputs_are_refused_by_name(plain, wrong):
    with pytest.raises(Fp8kitError, match="inp: got "):
        convert(nn.Sequential(plain))(wrong)


def test_checkpoints_of_either_load_into_the_other():
    net = convert(model())
    with autocast(recipe=DelayedScaling(amax_history_len=4)):
        net(torch.randn(4, D)).sum().backward()
    state = net.state_dict()
    assert {n for n in state if "_extra_state" in n} == {
        f"{n}._extra_state" for n in ("up", "twice", "down", "head")
    }
    other = convert(model(1))
    other.load_state_dict(state)
    assert_same_bits(
        "scale", bits(other.up.fp8_meta["scaling_fwd"].scale), bits(net.up.fp8_meta["scaling_fwd"].scale)
    )
    other.load_state_dict(model(2).state_dict())
    assert_same_bits("weight", bits(other.up.weight), bits(model(2).up.weight))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@combinations(
    {"recipe": {"high": None, "delayed": DelayedScaling(), "current": Float8CurrentScaling()}},
    usual=(),  # test_converted_mlp_compiled
)
def test_converted_models_compile_in_one_graph(recipe):
    net, x = convert(model(), lambda module, name: name != "odd"), torch.randn(4, D)
    with autocast(enabled=recipe is not None, recipe=recipe):
        wanted = net(x)
        got = torch.compile(net, fullgraph=True, backend="aot_eager")(x)
    assert_same_bits("compiled", bits(got), bits(wanted))


@pytest.mark.parametrize(("name", "states"), [("first", 2), ("last", 0)])
def test_recipes_by_layer_take_converted_layers(name, states):
    """By their names, which a program gives them as it does to ours."""
    net, x = convert(nn.Sequential(nn.Linear(D, D))), torch.randn(4, D)
    net[0].name = name
    with autocast(recipe=PerLayer(DelayedScaling(), (("last", None),))):
        net(x)
    assert len(net[0].fp8_meta) == states


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # which the plain encoder makes
@pytest.mark.parametrize("padded", [False, True], ids=["all", "padded"])
def test_an_encoder_computes_in_fp8_in_inference_too(device, padded):
    """torch's fast path would read the layers' weights past them."""
    torch.manual_seed(0)
    model = (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2).to(device).eval()
    )
    x, mask = torch.randn(4, 16, 64, device=device), torch.zeros(4, 16, dtype=torch.bool, device=device)
    mask[:, 12:] = padded
    given = {"src_key_padding_mask": mask} if padded else {}
    with torch.no_grad():
        plain = model(x, **given)
        convert(model)
        converted = model(x, **given)
        with autocast(recipe=Float8CurrentScaling()):
            fp8 = model(x, **given)
    seen = slice(None, 12 if padded else None)  # what is masked is torch's own affair, 0 in its fast path
    assert relative_error(converted[:, seen].cpu().numpy(), plain[:, seen].cpu().numpy()) < 1e-5
    assert 1e-3 < relative_error(fp8[:, seen].cpu().numpy(), plain[:, seen].cpu().numpy()) < 0.125
    with torch.no_grad():
        assert_same_bits("reverted", revert(model)(x, **given).cpu().numpy(), plain.cpu().numpy())
        if padded:
            convert(model.layers)
            with pytest.raises(
                FormatError, match=r"got a nested tensor, .* convert it, not its layers alone"
            ):
                model(x, **given)


def test_a_wrong_keyword_is_told_the_right_ones():
    net = nn.Sequential(nn.Linear(D, D))
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'filter'.*filter_fn"):
        convert(net, filter=None)
    every = "model, filter_fn, linear_classes, attention, gated_mlp"
    with pytest.raises(TypeError, match=rf"unexpected keyword argument 'exclude'; it has {every}$"):
        convert(net, exclude=["head"])
