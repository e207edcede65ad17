"""Transformer Engine's quantised tensors of every format: what they hold, how programs take them apart, write
into them and multiply them."""

from __future__ import annotations

import copy
import io

import fp8kit_torch as ft
import pytest
import torch
from fp8kit_torch.te_compat import tensors as te
from fp8kit_torch.te_compat.gemms import general_gemm
from fp8kit_torch.te_compat.saved_tensors import (
    post_all_gather_processing,
    quantize_master_weights,
    replace_raw_data,
)

import fp8kit as fk
from fp8kit.errors import ArgumentError, FormatError, ShapeError, UnsupportedError
from fp8kit.testing import sum_slack
from tests.support.tensors import assert_tensor_close, largest

E4M3, E5M2 = ft.DType.kFloat8E4M3, ft.DType.kFloat8E5M2
QUANTIZERS = {
    "current": lambda **usage: te.Float8CurrentScalingQuantizer(E4M3, **usage),
    "given": lambda **usage: te.Float8Quantizer(torch.full((1,), 32.0), torch.zeros(1), E4M3, **usage),
    "rows": lambda **usage: te.Float8BlockQuantizer(
        E4M3, block_scaling_dim=1, **{"rowwise": True, "columnwise": True, **usage}
    ),
    "squares": lambda **usage: te.Float8BlockQuantizer(
        E4M3, **{"rowwise": True, "columnwise": True, **usage}
    ),
    "mxfp8": lambda **usage: te.MXFP8Quantizer(E4M3, **usage),
    "nvfp4": lambda **usage: te.NVFP4Quantizer(**usage),
}
OPERANDS = ["current", "given", "rows", "squares"]
CLASSES = {
    "current": "Float8Tensor",
    "given": "Float8Tensor",
    "rows": "Float8BlockwiseQTensor",
    "squares": "Float8BlockwiseQTensor",
    "mxfp8": "MXFP8Tensor",
    "nvfp4": "NVFP4Tensor",
}


@pytest.fixture
def w(everywhere):
    torch.manual_seed(0)
    return torch.randn(256, 128)


@pytest.fixture
def host():
    torch.manual_seed(0)
    return torch.randn(256, 128)


@pytest.fixture(params=QUANTIZERS)
def name(request):
    return request.param


def test_the_class_says_the_format(name, w):
    held = QUANTIZERS[name]()(w)
    assert type(held) is getattr(te, CLASSES[name])
    assert isinstance(held, te.QuantizedTensorStorage)
    assert isinstance(held, torch.Tensor)
    assert (held.shape, held.dtype) == (w.shape, w.dtype)


def test_values_are_near(name, w):
    """E4M3 has steps of 2^-3 of a value, E2M1 of half of one; most are rounded by less than half a step."""
    error = (QUANTIZERS[name]()(w).dequantize() - w).norm() / w.norm()
    assert error < (0.25 if name == "nvfp4" else 2.0**-4)


@pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2])
def test_mxfp8_lies_in_memory_as_transformer_engine_has_it(host, fp8_dtype):
    held = te.MXFP8Quantizer(fp8_dtype)(host)
    fmt = {E4M3: fk.E4M3, E5M2: fk.E5M2}[fp8_dtype]
    rows = fk.quantize(host.numpy(), fmt, scaling="mx_1x32", scale_rule="te")
    columns = fk.quantize(host.numpy(), fmt, scaling="mx_1x32", scale_rule="te", along=0)
    assert torch.equal(held._rowwise_data, torch.from_numpy(rows.data))
    assert torch.equal(held._columnwise_data, torch.from_numpy(columns.data))
    assert held._rowwise_scale_inv.shape == (256, 4)
    assert torch.equal(held._rowwise_scale_inv, torch.from_numpy(rows.scale_codes))
    assert held._columnwise_scale_inv.shape == (8, 128)
    assert torch.equal(held._columnwise_scale_inv, torch.from_numpy(columns.scale_codes))
    assert held._fp8_dtype == fp8_dtype


def test_scales_are_padded(w):
    held = te.MXFP8Quantizer(E4M3)(w[:32, :32])
    assert held._rowwise_scale_inv.shape == (128, 4)
    assert held._columnwise_scale_inv.shape == (4, 128)
    assert not held._rowwise_scale_inv[32:].any()
    assert te.MXFP8Quantizer(E4M3).get_scale_shape((32, 32), True) == (4, 128)
    assert te.NVFP4Quantizer().get_scale_shape((32, 32), False) == (128, 4)


def test_nvfp4_lies_in_memory_as_transformer_engine_has_it(host):
    held = te.NVFP4Quantizer()(host)
    rows = fk.quantize(host.numpy(), scaling="nvfp4_1x16")
    columns = fk.quantize(host.t().contiguous().numpy(), scaling="nvfp4_1x16")
    for side, found in (("rowwise", rows), ("columnwise", columns)):
        assert torch.equal(getattr(held, f"_{side}_data"), torch.from_numpy(found.packed()))
        scales = torch.from_numpy(found.scale_codes)
        assert torch.equal(getattr(held, f"_{side}_scale_inv")[: len(scales), : scales.shape[1]], scales)
    # a product and a quotient of float32, rounded
    most = host.abs().max()
    assert_tensor_close("amax", held._amax_rowwise.view(()), most, 2.0**-22 * most)


def test_weights_of_nvfp4_have_the_same_values_in_both_orientations(w):
    held = te.NVFP4Quantizer(with_2d_quantization=True)(w)
    columnwise = held.detach()
    columnwise.update_usage(rowwise_usage=False)
    assert torch.equal(columnwise.dequantize(), held.dequantize())


def test_rotated_columns_decode_to_the_values(w):
    held = te.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, rowwise=False)(w)
    assert held._rowwise_data is None
    assert (held.dequantize() - w).norm() < 0.25 * w.norm()


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"nvfp4_use_4over6": True}, {"scale_rule": "4over6_mae"}),
        (
            {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256, "nvfp4_4over6_err_mode": "MSE"},
            {"scale_rule": "4over6_mse_256"},
        ),
        ({"row_scaled_nvfp4": True}, {"scaling": "nvfp4_row_1x16"}),
    ],
)
def test_nvfp4s_levers(host, options, rule):
    wanted = fk.quantize(host.numpy(), **{"scaling": "nvfp4_1x16", **rule}).dequantize()
    made = te.NVFP4Quantizer(**options)(host)
    assert torch.equal(made.dequantize(), torch.from_numpy(wanted))
    assert made._row_scaled_nvfp4 == options.get("row_scaled_nvfp4", False)
    assert made._nvfp4_use_4over6 == options.get("nvfp4_use_4over6", False)


def test_stochastic_rounding_draws_from_torch(w):
    quantizer = te.NVFP4Quantizer(stochastic_rounding=True)
    torch.manual_seed(1)
    first, second = quantizer(w).dequantize(), quantizer(w).dequantize()
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(quantizer(w).dequantize(), first)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: te.NVFP4Quantizer(with_rht=True), "with_post_rht_amax"),
        (lambda: te.NVFP4Quantizer(nvfp4_e4m3_max=256), "nvfp4_e4m3_max"),
        (lambda: te.NVFP4Quantizer(nvfp4_use_4over6=True, stochastic_rounding=True), "4over6"),
    ],
)
def test_what_does_not_go_together(make, word):
    with pytest.raises(UnsupportedError, match=word):
        make()


def test_sizes_that_are_no_multiples_of_a_block():
    for quantizer in (te.MXFP8Quantizer(E4M3), te.NVFP4Quantizer()):
        assert not quantizer.is_quantizable(torch.ones(8, 64))
        with pytest.raises(ShapeError, match="multiples of"):
            quantizer(torch.ones(8, 64))


# --- usages -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["rowwise", "columnwise"])
def test_one_orientation(name, w, side):
    other = {"rowwise": "columnwise", "columnwise": "rowwise"}[side]
    held = QUANTIZERS[name](**{side: True, other: False})(w)
    assert held.get_usages() == {side: True, other: False}
    assert getattr(held, f"_{other}_data") is None
    whole = QUANTIZERS[name]()(w)
    assert torch.equal(getattr(held, f"_{side}_data"), getattr(whole, f"_{side}_data"))
    assert (held.dequantize() - w).norm() < 0.25 * w.norm()


@pytest.mark.parametrize("kind", ["current", "given", "squares"])
def test_an_orientation_is_made_of_the_other(kind, w):
    whole = QUANTIZERS[kind]()(w)
    for side, other in (("rowwise", "columnwise"), ("columnwise", "rowwise")):
        held = QUANTIZERS[kind](**{side: True, other: False})(w)
        held.update_usage(**{f"{other}_usage": True})
        assert torch.equal(getattr(held, f"_{other}_data"), getattr(whole, f"_{other}_data"))


def test_a_lost_orientation_of_blocks_is_refused(w):
    held = te.MXFP8Quantizer(E4M3, columnwise=False)(w)
    with pytest.raises(UnsupportedError, match="columnwise"):
        held.update_usage(columnwise_usage=True)


def test_no_orientation_is_refused(name, w):
    with pytest.raises(ArgumentError, match="usage"):
        QUANTIZERS[name]()(w).update_usage(False, False)


def test_a_layer_makes_the_orientation_that_it_lacks(w):
    layer = ft.Linear(128, 64)
    with ft.autocast(recipe=ft.Float8CurrentScaling()):
        whole = layer(QUANTIZERS["current"]()(w))
        one = layer(QUANTIZERS["current"](columnwise=False)(w))
    assert torch.equal(one, whole)
    one.sum().backward()
    grad, layer.weight.grad = layer.weight.grad, None
    whole.sum().backward()
    assert torch.equal(grad, layer.weight.grad)


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
def test_a_layer_takes_the_values_of_blocks(kind, w):
    layer, held = ft.Linear(128, 64), QUANTIZERS[kind]()(w)
    assert torch.equal(layer(held), layer(held.dequantize()))


# --- written into -------------------------------------------------------------------------------------------


def test_cast_anew(name, w):
    quantizer = QUANTIZERS[name]()
    held = quantizer(w)
    assert held.quantize_(-2 * w) is held
    assert torch.equal(held.dequantize(), quantizer(-2 * w).dequantize())
    held.quantize_(w, noop_flag=torch.ones(1))
    assert torch.equal(held.dequantize(), quantizer(-2 * w).dequantize())


def test_copy_takes_the_codes_of_its_like(name, w):
    one, other = QUANTIZERS[name]()(w), QUANTIZERS[name]()(3 * w)
    with torch.no_grad():
        one.copy_(other)
    assert torch.equal(one._rowwise_data, other._rowwise_data)
    assert torch.equal(one.dequantize(), other.dequantize())


def test_copies_between_memory_of_ones_own_and_a_padded_one():
    """Sizes that are no multiples of 16: quantizers pad codes, memory that is given has no room for that."""
    x = torch.randn(20, 24)
    padded = QUANTIZERS["current"]()(x)
    codes = padded._data.contiguous()
    own = te.Float8Tensor(data=codes, fp8_scale_inv=torch.ones(1), fp8_dtype=E4M3)
    other = QUANTIZERS["current"]()(3 * x)
    with torch.no_grad():
        own.copy_(other)
        assert torch.equal(own._data, other._data)
        assert own._data.data_ptr() == codes.data_ptr()
        padded.copy_(own)
    assert torch.equal(padded.dequantize(), other.dequantize())
    assert torch.equal(padded._columnwise_data, other._columnwise_data)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_data_of_another_shape_and_dtype(name, w):
    held = QUANTIZERS[name](columnwise=False)(w)
    other = torch.randn(64, 2, 64, device=w.device, dtype=torch.bfloat16)
    held.data = other
    assert (type(held).__name__, held.shape, held.dtype) == (CLASSES[name], other.shape, other.dtype)
    assert held.get_usages() == {"rowwise": True, "columnwise": False}
    assert torch.equal(held.dequantize(), QUANTIZERS[name]()(other).dequantize())


@pytest.mark.parametrize("kind", OPERANDS)
def test_transposed_codes_stay_where_a_tensor_takes_anothers_memory(kind, w):
    """Those of blocks along the columns are a cast of their own, which cannot be made of the rows'."""
    held, other = QUANTIZERS[kind]()(w), QUANTIZERS[kind]()(2 * w.flip(1))
    held._rowwise_data.copy_(other._rowwise_data)  # so that both were written to as often as the other never
    wanted = other._columnwise_data.clone()
    held.data = other
    assert torch.equal(held._columnwise_data, wanted)
    saved, shell = held.prepare_for_saving()
    shell.restore_from_saved([part.clone() for part in saved])
    assert torch.equal(shell._columnwise_data, wanted)


def test_arithmetic_in_place_is_cast(name, w):
    held = QUANTIZERS[name]()(w)
    with torch.no_grad():
        held.mul_(-1)
    assert torch.equal(
        held.dequantize(), QUANTIZERS[name]()(-QUANTIZERS[name]()(w).dequantize()).dequantize()
    )


@pytest.mark.parametrize("kind", OPERANDS)
def test_codes_that_are_written_are_transposed_too(kind, w):
    held, other = QUANTIZERS[kind]()(w), QUANTIZERS[kind]()(w.flip(0))
    held._rowwise_data.copy_(other._rowwise_data)
    held._rowwise_scale_inv.copy_(other._rowwise_scale_inv)
    if kind != "rows":  # whose transposed codes are another cast, of the values
        assert torch.equal(held._columnwise_data, other._columnwise_data)
    held._rowwise_data.zero_()
    assert not held.dequantize().any()
    assert not (held._columnwise_data & 0x7F).any()


def test_a_quantizer_of_ones_own(w):
    class Halves(te.Float8CurrentScalingQuantizer):
        def quantize_impl(self, tensor):
            return super().quantize_impl(tensor / 2)

    held = Halves(E4M3)(w)
    assert torch.equal(held.dequantize(), QUANTIZERS["current"]()(w / 2).dequantize())
    held.quantize_(4 * w)
    assert torch.equal(held.dequantize(), QUANTIZERS["current"]()(2 * w).dequantize())


# --- views, copies, saving ----------------------------------------------------------------------------------


def test_a_view_shares_the_codes_and_has_a_gradient(name, w):
    w.requires_grad_()
    held = QUANTIZERS[name]()(w)
    seen = held.view(4, 64, 128)
    assert type(seen) is type(held)
    assert seen._rowwise_data.data_ptr() == held._rowwise_data.data_ptr()
    assert torch.equal(seen.dequantize(), held.dequantize().view(4, 64, 128))
    (seen.dequantize() * torch.arange(4.0).view(4, 1, 1)).sum().backward()
    assert torch.equal(w.grad.view(4, -1)[:, 0], torch.arange(4.0))


def test_a_flat_view_of_one_scale_writes_through(w):
    held = QUANTIZERS["given"]()(w)
    flat = held.view(-1)
    assert flat.shape == (w.numel(),)
    with torch.no_grad():
        flat.copy_(torch.ones_like(flat))
    assert torch.equal(held.dequantize(), torch.ones_like(w))
    assert torch.equal(held._columnwise_data, held._rowwise_data.t())
    flat._rowwise_data[:9] = 0
    assert torch.equal(held._columnwise_data, held._rowwise_data.t())


def test_blocks_that_a_view_would_cut_are_decoded(w):
    for kind in ("squares", "mxfp8", "nvfp4"):
        held = QUANTIZERS[kind]()(w)
        assert not isinstance(held.reshape(-1), te.QuantizedTensor)
        assert torch.equal(held.reshape(-1), held.dequantize().reshape(-1))


def test_values_in_a_dtype_are_plain(name, w):
    """Also in the tensor's own: programs start masters so."""
    held = QUANTIZERS[name]()(w)
    for call, dtype in (("float", torch.float32), ("bfloat16", torch.bfloat16), ("half", torch.float16)):
        values = getattr(held, call)()
        assert type(values) is torch.Tensor
        assert torch.equal(values, held.dequantize(dtype=dtype))


def test_copied_and_saved(name, w):
    held = QUANTIZERS[name]()(w)
    file = io.BytesIO()
    torch.save(torch.nn.Parameter(held), file)
    file.seek(0)
    for other in (copy.deepcopy(held), held.clone(), held.detach(), torch.load(file)):
        assert type(other) is type(held)
        assert torch.equal(other.dequantize(), held.dequantize())
        assert torch.equal(other._columnwise_data, held._columnwise_data)


def test_kept_for_backward(name, w):
    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, held):
            saved, ctx.tensor_objects = ft.prepare_for_saving(held, x)
            ctx.save_for_backward(*saved)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            held, _ = ft.restore_from_func_ctx(ctx)
            return grad * held.dequantize(), None

    held = QUANTIZERS[name]()(w)
    x = torch.ones_like(w, requires_grad=True)
    Kept.apply(x, held).sum().backward()
    assert torch.equal(x.grad, held.dequantize())


def test_one_by_one(name, w):
    held = QUANTIZERS[name]()(w)
    saved, shell = held.prepare_for_saving()
    assert shell.restore_from_saved([*saved, w]) == [w]
    assert torch.equal(shell.dequantize(), held.dequantize())


def test_made_of_codes(w):
    held = QUANTIZERS["current"]()(w)
    made = te.Float8Tensor(
        shape=w.shape, dtype=torch.bfloat16, data=held._data, fp8_scale_inv=held._scale_inv, fp8_dtype=E4M3
    )
    assert torch.equal(made.dequantize(dtype=torch.float32), held.dequantize())
    assert torch.equal(made._transpose, held._transpose)
    made._data.zero_()
    assert not held.dequantize().any()  # the same memory


def test_made_of_mxfp8s_codes(w):
    held = QUANTIZERS["mxfp8"]()(w)
    parts = held._rowwise_data, held._rowwise_scale_inv
    made = te.MXFP8Quantizer(E4M3).create_tensor_from_data(*parts, fake_dtype=torch.float32)
    assert torch.equal(made.dequantize(), held.dequantize())
    assert made._columnwise_data is None


# --- weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OPERANDS)
def test_replaced_memory(kind, w):
    held = QUANTIZERS[kind]()(w)
    values, buffer = held.dequantize(), torch.empty(2 * w.numel(), dtype=torch.uint8)
    replace_raw_data(held, buffer[: w.numel()])
    assert held._rowwise_data.data_ptr() == buffer.data_ptr()
    assert torch.equal(held.dequantize(), values)
    buffer.zero_()
    assert not held.dequantize().any()
    with pytest.raises(FormatError, match="new_raw_data"):
        replace_raw_data(held, buffer)


def test_a_layer_over_a_buffer():
    """Also where codes do not begin at a multiple of 16, and are no multiples of it."""
    for size, start in ((48, 0), (48, 3), (44, 0)):
        with ft.quantized_model_init(recipe=ft.Float8CurrentScaling()):
            layer = ft.Linear(size, 40, bias=False, device="cpu")
        x = torch.randn(8, size)
        with ft.autocast(recipe=ft.Float8CurrentScaling()):
            before = layer(x)
            count = layer.weight.numel()
            replace_raw_data(layer.weight, torch.empty(count + 16, dtype=torch.uint8)[start : start + count])
            assert torch.equal(layer(x), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", QUANTIZERS)
def test_whole_masters_are_cast(kind, w, dtype):
    held, master = QUANTIZERS[kind]()(w.to(dtype)), torch.randn(256, 128)
    te.cast_master_weights_to_fp8([held], [master], [0], None)
    wanted = QUANTIZERS[kind]()(master.to(dtype))
    assert torch.equal(held._rowwise_data, wanted._rowwise_data)
    assert torch.equal(held._columnwise_data, wanted._columnwise_data) or kind == "rows"
    assert torch.equal(held.dequantize(), wanted.dequantize())


@pytest.mark.parametrize("kind", ["given", "squares"])
def test_parts_of_masters_are_cast(kind, w):
    """Those of a shard: the rest of the codes stays until they are gathered."""
    held, before = QUANTIZERS[kind]()(w), QUANTIZERS[kind]()(w)
    part = 2 * w.reshape(-1)[1000:3000]
    quantize_master_weights([held], [part], [1000], None, manual_post_all_gather_processing=True)
    codes, old = held._rowwise_data.view(-1), before._rowwise_data.view(-1)
    assert torch.equal(codes[:1000], old[:1000])
    assert torch.equal(codes[3000:], old[3000:])
    assert (codes[1000:3000] != old[1000:3000]).any() or kind == "squares"  # whose scales halve instead
    post_all_gather_processing([held])
    assert torch.equal(held._columnwise_data, held._rowwise_data.t())


def test_masters_that_do_not_fit(w):
    held = QUANTIZERS["current"]()(w)
    with pytest.raises(ShapeError, match="start_offsets"):
        te.cast_master_weights_to_fp8([held], [torch.ones(9)], [w.numel()], None)
    with pytest.raises(UnsupportedError, match="all: scales"):
        te.cast_master_weights_to_fp8([QUANTIZERS["mxfp8"]()(w)], [torch.ones(9)], [0], None)


def test_a_layers_weight_has_a_quantizer():
    for recipe in (ft.Float8CurrentScaling(), ft.Float8BlockScaling()):
        with ft.quantized_model_init(recipe=recipe):
            weight = ft.Linear(128, 128, device="cpu").weight
        values = torch.randn(128, 128)
        wanted = weight._get_quantizer()(values)
        weight.quantize_(values)
        assert torch.equal(weight.dequantize(), wanted.dequantize())


# --- products -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
def test_products_of_blocks(kind, layout):
    x, w, g = torch.randn(2, 32, 96), torch.randn(128, 96), torch.randn(2, 32, 128)
    a, b = {"TN": (w, x), "NN": (w, g), "NT": (x, g)}[layout]
    quantizer = QUANTIZERS[kind]()
    A, B = quantizer(a), quantizer(b)

    def contracted(held, rows):
        held = held.detach()
        held.update_usage(rows, not rows)
        return held.dequantize().reshape(-1, held.shape[-1]).double()

    left, right = contracted(B, layout != "NT"), contracted(A, layout == "TN")
    want = {"TN": lambda: left @ right.T, "NN": lambda: left @ right, "NT": lambda: left.T @ right}[layout]()
    left, right = left.abs(), right.abs()
    size = {"TN": lambda: left @ right.T, "NN": lambda: left @ right, "NT": lambda: left.T @ right}[layout]()
    y, *_ = general_gemm(A, B, layout=layout)
    assert y.shape == {"TN": (2, 32, 128), "NN": (2, 32, 96), "NT": (128, 96)}[layout]
    assert_tensor_close("y", y.view(want.shape), want, sum_slack(size, 128))  # of at most 128 products


def test_rotations_cancel_in_a_product():
    x, g = torch.randn(64, 32), torch.randn(64, 48)
    quantizer = te.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)
    y, *_ = general_gemm(quantizer(x), quantizer(g), layout="NT")
    assert (y - g.t() @ x).norm() < 0.25 * (g.t() @ x).norm()


def test_a_products_other_arguments():
    w, x, bias = torch.randn(32, 48), torch.randn(16, 48), torch.randn(32)
    plain = x @ w.t()
    slack = sum_slack(x.abs() @ w.abs().t() + bias.abs(), 49)  # 48 products and a bias, in another order
    assert_tensor_close("alpha", general_gemm(w, x, alpha=0.5)[0], plain / 2, slack)
    out = torch.ones(16, 32)
    general_gemm(w, x, out=out, accumulate=True, alpha=2.0, beta=3.0)
    assert_tensor_close("out", out, 2 * plain + 3, 2 * slack + sum_slack(3, 1))
    y, _, inner, _ = general_gemm(w, x, bias=bias, gelu=True)
    assert_tensor_close("inner", inner, plain + bias, slack)
    want = torch.nn.functional.gelu(inner, approximate="tanh")
    assert_tensor_close("gelu", y, want, sum_slack(largest(inner), 16))  # some 16 operations
    quantizer = QUANTIZERS["current"]()
    held, *_ = general_gemm(w, x, quantization_params=quantizer)
    assert torch.equal(held._data, quantizer(general_gemm(w, x)[0])._data)


def test_a_products_gradients():
    x, g, bias = torch.randn(16, 48), torch.randn(16, 32), torch.zeros(32)
    dw, dbias, *_ = general_gemm(x, g, layout="NT", grad=True, bias=bias)
    assert_tensor_close("dw", dw, g.t() @ x, sum_slack(g.abs().t() @ x.abs(), 16))
    assert_tensor_close("dbias", dbias, g.sum(0), sum_slack(g.abs().sum(0), 16))
    w, inner = torch.randn(32, 48), torch.randn(16, 48, requires_grad=True)
    dx, *_ = general_gemm(w, g, layout="NN", gelu=True, gelu_in=inner, grad=True)
    want = torch.autograd.grad(torch.nn.functional.gelu(inner, approximate="tanh"), inner, g @ w)[0]
    # g @ w, times GELU's slope of at most 1.13, which has some 20 operations
    assert_tensor_close("dx", dx, want, 1.13 * sum_slack(g.abs() @ w.abs(), 32 + 20))
