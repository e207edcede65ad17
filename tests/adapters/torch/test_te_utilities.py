"""Small functions and constants that programs take from Transformer Engine's modules."""

from __future__ import annotations

import math
from typing import NamedTuple

import fp8kit_torch as ft
import numpy as np
import pytest
import torch
from fp8kit_torch.te_compat import parallel, quantization, utilities

from fp8kit.errors import ArgumentError, RecipeError, ShapeError
from fp8kit.recipe import CustomRecipe, PerLayer
from fp8kit.recipes import NAMED


def test_weights_start_as_the_functions_say():
    torch.manual_seed(0)
    weight = torch.empty(256, 256)
    for fill, deviation in (
        (utilities.init_method_normal(0.5), 0.5),
        (utilities.scaled_init_method_normal(0.5, 8), 0.125),
        (utilities.get_default_init_method(), 0.023),
    ):
        fill(weight)
        # the deviation of 65536 draws is within 5 of its own deviations, 1 / sqrt(2 n) each
        assert abs(float(weight.std()) / deviation - 1) < 5 / math.sqrt(2 * weight.numel())
    utilities.init_method_constant(3.0)(weight)
    assert bool((weight == 3).all())


def test_numbers():
    assert utilities.divide(12, 4) == 3
    assert utilities.round_up_to_nearest_multiple(13, 8) == 16
    with pytest.raises(ValueError, match="numerator: got 13"):
        utilities.divide(13, 4)


@pytest.mark.parametrize("shape", [(8,), (8, 3)])
def test_gated_weights_are_interleaved_and_back(shape):
    w = torch.arange(math.prod(shape)).view(shape)
    mixed = ft.interleave_glu_tensor(w, 2)
    assert torch.equal(mixed, w[[0, 1, 4, 5, 2, 3, 6, 7]])
    assert torch.equal(ft.deinterleave_glu_tensor(mixed, 2), w)
    with pytest.raises(ShapeError, match="a multiple of 6 rows"):
        ft.interleave_glu_tensor(w, 3)


def test_views_are_told_from_tensors():
    x = torch.ones(4)
    assert utilities.assert_viewless_tensor(x) is x
    with pytest.raises(ArgumentError, match="a view"):
        utilities.assert_viewless_tensor(x[1:])


class Pair(NamedTuple):
    one: torch.Tensor
    other: int


def test_a_weak_reference_has_the_memory_and_does_not_keep_it(device):
    x = torch.randn(2, 3, 4, device=device).bfloat16().transpose(1, 2)[1:]
    found = utilities.make_weak_ref({"x": (x, [None, 3, True])})
    pair = utilities.make_weak_ref(Pair(x, 2))
    assert isinstance(pair, Pair)
    assert torch.equal(pair.one, x)
    weak = found["x"][0]
    assert found == {"x": (weak, [None, 3, True])}
    assert (weak.data_ptr(), weak.stride(), weak.dtype) == (x.data_ptr(), x.stride(), x.dtype)
    assert torch.equal(weak, x)
    assert (weak is x) == (device == "cpu")
    if device == "cuda":
        x = torch.zeros(1 << 20, dtype=torch.uint8, device=device)
        weak, before = utilities.make_weak_ref(x), torch.cuda.memory_allocated()
        del x
        assert weak.numel() == before - torch.cuda.memory_allocated() == 1 << 20
    with pytest.raises(ArgumentError, match="make_weak_ref: x"):
        utilities.make_weak_ref("x")


@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 5), ()])
def test_the_bytes_of_a_weak_reference_are_the_tensors(shape):
    """On the CPU by NumPy, which reads the same description of memory."""
    for x in (torch.randn(shape), torch.randn(shape).T if shape == (4, 6) else torch.randn(shape).half()):
        memory = utilities._Memory(x)
        memory.__array_interface__ = memory.__cuda_array_interface__
        data = torch.from_numpy(np.asarray(memory))
        assert data.data_ptr() == x.data_ptr()
        assert torch.equal(utilities._as_it_lies(data, x), x)


def test_parts_along_a_dimension_are_views():
    x = torch.arange(24.0).view(2, 12)
    parts = utilities.split_tensor_along_dim(x, -1, 3)
    assert [part.data_ptr() for part in parts] == [x.data_ptr() + 16 * i for i in range(3)]
    assert [tuple(part.shape) for part in utilities.SplitAlongDim.apply(x, 1, [4, 8])] == [(2, 4), (2, 8)]
    assert utilities.combine_tensors(parts, -2).shape == (3, 2, 4)


def test_one_process_is_all_there_is():
    x = torch.ones(4, 2)
    assert (parallel.get_distributed_world_size(), parallel.get_distributed_rank()) == (1, 0)
    assert parallel.gather_along_first_dim(x, None)[0] is x
    assert parallel.reduce_scatter_along_first_dim(x, None)[0] is x
    assert parallel.has_te_modules(torch.nn.Sequential(ft.Linear(16, 16, device="cpu")))
    assert not parallel.has_te_modules(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoints_passes_are_known(reentrant):
    seen = []

    def function(x):
        within = parallel.is_fp8_activation_recompute_enabled(), parallel.in_fp8_activation_recompute_phase()
        seen.append(within)
        return layer(x)

    layer, x = ft.Linear(16, 16, device="cpu"), torch.ones(16, 16, requires_grad=True)
    with ft.autocast(recipe=ft.Float8CurrentScaling()):
        y = ft.checkpoint(function, x, use_reentrant=reentrant)
        assert not parallel.is_fp8_activation_recompute_enabled()
    y.sum().backward()
    assert seen == [(True, False), (True, True)]
    assert not parallel.in_fp8_activation_recompute_phase()


def test_formats_of_recipes():
    hybrid, nvfp4 = ft.DelayedScaling(), ft.NVFP4BlockScaling()
    assert quantization.get_fp8_te_dtype(hybrid) is ft.DType.kFloat8E4M3
    assert quantization.get_fp8_te_dtype(hybrid, fprop_tensor=False) is ft.DType.kFloat8E5M2
    assert quantization.get_fp8_torch_dtype(hybrid) is torch.float8_e4m3fn
    assert (quantization.get_fp8_max(hybrid), quantization.get_fp8_max(hybrid, False)) == (448.0, 57344.0)
    assert quantization.get_fp4_te_dtype(nvfp4) is ft.DType.kFloat4E2M1
    sizes = [quantization.get_align_size_for_quantization(r) for r in (hybrid, ft.MXFP8BlockScaling(), nvfp4)]
    assert sizes == [16, 32, 128]
    assert quantization.check_recipe_support(hybrid) is None
    with pytest.raises(RecipeError, match="a Recipe"):
        quantization.get_fp8_max("delayed")
    rows = NAMED["rowwise"].recipe
    assert quantization.get_fp8_te_dtype(rows) is ft.DType.kFloat8E4M3
    assert quantization.get_fp8_max(rows, False) == rows.backward_format.max
    others = [*(NAMED[name].recipe for name in ("mxfp4", "quartet")), PerLayer(nvfp4), PerLayer(hybrid)]
    for recipe in (*others, CustomRecipe(lambda role: None)):
        for ask in (quantization.get_fp8_te_dtype, quantization.get_fp8_max, quantization.get_fp4_te_dtype):
            with pytest.raises(RecipeError, match=f"{ask.__name__}: fp._recipe: got"):
                ask(recipe)
