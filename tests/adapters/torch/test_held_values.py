"""Views of tensors that are held in codes: what is written to them is written to the codes."""

from __future__ import annotations

import copy
import io
import pickle

import fp8kit_torch as ft
import pytest
import torch

RECIPES = {
    "delayed": ft.DelayedScaling(),
    "current": ft.Float8CurrentScaling(),
    "block": ft.Float8BlockScaling(),
    "mxfp8": ft.MXFP8BlockScaling(),
    "nvfp4": ft.NVFP4BlockScaling(),
}
ROWS, N, K = slice(16, 48), 128, 64


def layer_of(recipe="current", device="cpu"):
    with ft.quantized_model_init(recipe=RECIPES[recipe]):
        return ft.Linear(K, N, bias=False, params_dtype=torch.bfloat16, device=device)


def ones(*shape):
    return torch.ones(shape, dtype=torch.bfloat16)


WRITES = {
    "by index": lambda w, new: w.__setitem__(ROWS, new),
    "by two indices": lambda w, new: w.__setitem__((ROWS, slice(None)), new),
    "data": lambda w, new: w.data.__setitem__(ROWS, new),
    "copy_": lambda w, new: w.data[ROWS].copy_(new),
    "narrow": lambda w, new: w.narrow(0, ROWS.start, 32).copy_(new),
    "split": lambda w, new: w.split([16, 32, 80])[1].copy_(new),
    "chunk": lambda w, new: [
        part.copy_(one) for part, one in zip(w.chunk(8)[1:3], new.split(16), strict=True)
    ],
    "unbind": lambda w, new: [row.copy_(one) for row, one in zip(w.unbind()[ROWS], new, strict=True)],
    "transposed": lambda w, new: w.t()[:, ROWS].copy_(new.t()),
    "another shape": lambda w, new: w.view(8, 16, K)[1:3].copy_(new.view(2, 16, K)),
    "flat": lambda w, new: w.view(-1)[ROWS.start * K : ROWS.stop * K].copy_(new.reshape(-1)),
    "in steps": lambda w, new: w[ROWS].zero_().add_(new),
    "several": lambda w, new: torch._foreach_copy_([w[16:32], w[32:48]], [*new.split(16)]),
    "init": lambda w, new: torch.nn.init.zeros_(w[ROWS]).add_(new),
}


def powers(*shape):
    """Values that every recipe holds as they are."""
    return torch.randn(shape).sign().bfloat16() * 2.0 ** torch.randint(-1, 2, shape).bfloat16()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_to_a_view_is_held(write, recipe):
    torch.manual_seed(0)
    layer, whole, new = layer_of(recipe), powers(N, K), powers(32, K)
    with torch.no_grad():
        layer.weight.copy_(whole)
        WRITES[write](layer.weight, new)
    whole[ROWS] = new
    assert torch.equal(layer.weight.dequantize(), whole)


def test_a_state_dicts_tensors_are_the_layers_own():
    """Programs copy another model's weights into parts of these."""
    layer = layer_of()
    state = layer.state_dict()
    state["weight"].data[ROWS].copy_(ones(32, K))
    state["weight"][64:] = 0.5
    held = layer.weight.dequantize()
    assert (held[ROWS] == 1).all()
    assert (held[64:] == 0.5).all()
    assert not (held[:16] == 1).all()


def test_views_see_what_was_written_later():
    weight = layer_of().weight.detach()
    first, second, all_rows = weight[:64], weight[64:], weight.t()
    first.fill_(1)
    second.fill_(2)  # of values that have the ones
    assert (first == 1).all()
    assert (second == 2).all()
    assert torch.equal(all_rows, weight.dequantize().t())
    weight.fill_(4)
    assert (first[3] == 4).all()
    assert first.tolist()[0][0] == 4
    weight.fill_(5)
    assert first[0].float().numpy()[0] == 5
    assert (first.view(torch.int16).numpy() == 0x40A0).all()


def test_a_view_is_values_to_everything_else():
    weight = layer_of().weight.detach()
    row, values = weight[3], weight.dequantize()[3]
    file = io.BytesIO()
    torch.save(row, file)
    file.seek(0)
    loaded = torch.load(file), pickle.loads(pickle.dumps(row)), copy.deepcopy(row)
    for other in (*loaded, row.clone(), row.contiguous() + 0, row.float().bfloat16()):
        assert type(other) is torch.Tensor
        assert torch.equal(other, values)
    assert repr(row) == repr(values)
    assert row.data_ptr() != weight[3].data_ptr()  # memory of its own
    loaded[2].fill_(7)
    assert torch.equal(weight[3], values)


def test_autograd_has_its_say():
    layer = layer_of()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        layer.weight[ROWS] = 1
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        layer.weight[ROWS].fill_(1)
    (layer.weight[ROWS] * 3).sum().backward()
    wanted = torch.zeros(N, K)
    wanted[ROWS] = 3
    assert torch.equal(layer.weight.grad.float(), wanted)


@pytest.mark.parametrize("recipe", RECIPES)
def test_in_inference_mode(recipe):
    layer = layer_of(recipe)
    with torch.inference_mode():
        layer.weight[ROWS].fill_(1)
        assert (layer.weight[ROWS] == 1).all()
        own = layer_of(recipe).weight.detach()
        own[ROWS] = 1
        assert (own[ROWS] == 1).all()
        assert (own.dequantize()[ROWS] == 1).all()


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_a_layer_multiplies_what_was_written(recipe, device):
    layer, x = layer_of(recipe, device), ones(16, K).to(device)
    with torch.no_grad(), ft.autocast(recipe=RECIPES[recipe]):
        layer(x)
        layer.weight[ROWS] = 0
        y = layer(x)
        layer.weight.data.zero_()
        assert not (y[:, ROWS] != 0).any()
        assert (y[:, :16] != 0).any()
        assert not layer(x).any()


# --- kernels of fp8kit's own, which read and write memory ---------------------------------------------------


@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_kernels_read_a_view_as_it_is_now(recipe):
    """Also where the whole was written after the view was made."""
    own = {"device": "cpu", "params_dtype": torch.bfloat16}
    layer, inner, norm = layer_of(recipe), ft.Linear(K, 16, **own), ft.RMSNorm(K, **own)
    with torch.no_grad():
        layer.weight.copy_(powers(N, K))
        for part in (layer.weight[ROWS], layer.weight.data[ROWS].detach().detach()):
            layer.weight.mul_(2)
            for call in (inner, norm):
                layer.weight.mul_(2)
                assert torch.equal(call(part), call(layer.weight.dequantize()[ROWS]))


@pytest.mark.parametrize("kind", ["FusedSGD", "FusedAdam"])
def test_an_optimiser_of_a_view_writes_the_whole(kind):
    layer = layer_of()
    with torch.no_grad():
        layer.weight.copy_(powers(N, K))
    part = torch.nn.Parameter(layer.weight.data[ROWS])
    plain = torch.nn.Parameter(layer.weight.dequantize()[ROWS].detach().clone())
    for param in (part, plain):
        param.grad = ones(32, K)
        getattr(ft.optimizers, kind)([param], lr=0.5).step()
    found = layer.weight.dequantize()[ROWS]
    assert torch.equal(part, found)
    assert (found - plain).abs().max() <= 2.0**-4 * plain.abs().max()  # rounded to E4M3


@pytest.mark.parametrize("whole", [True, False])
def test_a_product_is_written_to_what_is_held(whole):
    layer, x, w = layer_of(), ones(N, 16), ones(K, 16)
    out = layer.weight.data if whole else layer.weight.data[ROWS]
    y = ft.cpp_extensions.general_gemm(w, x[: out.shape[0]], out=out)[0]
    assert torch.equal(layer.weight.dequantize()[ROWS], 16 * ones(32, K))
    assert torch.equal(y, 16 * ones(*out.shape))
    if not whole:
        assert not torch.equal(layer.weight.dequantize()[: ROWS.start], 16 * ones(ROWS.start, K))


def test_views_in_inference_mode_and_a_write_that_fails():
    with torch.inference_mode():
        whole = layer_of("mxfp8").weight
        row = whole[0]
        whole.fill_(2.0)
        assert torch.equal(row, 2 * ones(K))
    layer = layer_of("mxfp8")
    row = layer.weight.data[0]
    before = row.clone()

    def fails(self, values):
        raise ZeroDivisionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(layer.weight), "_take", fails)
        with pytest.raises(ZeroDivisionError):
            row.fill_(7)
    assert torch.equal(row, before)
    assert f"{layer.weight.data[0, 0]:.1f}" == f"{float(before[0]):.1f}"


def test_rows_alone_may_be_written_in_place():
    """Of MXFP8's tensors that have rows' codes only, whatever their number."""
    whole = layer_of("mxfp8").weight.data
    chosen = torch.zeros(N, 1, dtype=torch.int32)
    rows, _ = ft.moe_permute(whole, chosen, 41, map_type="index")
    with torch.no_grad():
        want = rows.dequantize() * 2
        rows.mul_(2)
    assert torch.equal(rows.dequantize(), want)


def test_copies_of_a_parameter_that_is_a_view_are_parameters():
    part = torch.nn.Parameter(layer_of().weight.data[ROWS])
    stored = io.BytesIO()
    torch.save(part, stored)
    stored.seek(0)
    for made in (copy.deepcopy(part), torch.load(stored, weights_only=False)):
        assert type(made) is torch.nn.Parameter
        assert made.requires_grad
        assert torch.equal(made, part)
