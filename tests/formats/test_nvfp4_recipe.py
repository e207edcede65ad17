"""NVFP4's recipe: its flags, and what they mean for each operand."""

from __future__ import annotations

import pytest

from fp8kit import autocast
from fp8kit.autocast import current
from fp8kit.errors import RecipeError
from fp8kit.recipe import NVFP4BlockScaling, QParams


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: NVFP4BlockScaling(nvfp4_4over6="inputs"), ["nvfp4_4over6", "'activations'"]),
        (lambda: NVFP4BlockScaling(nvfp4_4over6="all"), ["nvfp4_4over6", "disable_rht=True"]),
        (lambda: NVFP4BlockScaling(nvfp4_4over6_err_mode="mse"), ["nvfp4_4over6_err_mode", "'MSE'"]),
        (lambda: NVFP4BlockScaling(row_scaled_activation=1), ["row_scaled_activation"]),
        (lambda: NVFP4BlockScaling(fp8_dpa=True, fp8_mha=True), ["fp8_mha", "small blocks"]),
    ],
)
def test_refusals_name_the_field(make, words):
    with pytest.raises(RecipeError) as caught:
        make()
    for word in words:
        assert word in str(caught.value)


def test_nvfp4_says_what_its_flags_mean_for_each_operand():
    recipe = NVFP4BlockScaling()
    assert recipe.fp4_quant_fwd_inp == QParams(random_hadamard_transform=True)
    assert recipe.fp4_quant_fwd_weight == QParams(fp4_2d_quantization=True)
    assert recipe.fp4_quant_bwd_grad == QParams(random_hadamard_transform=True, stochastic_rounding=True)
    recipe.disable_rht = recipe.disable_2d_quantization = recipe.disable_stochastic_rounding = True
    assert recipe.fp4_quant_fwd_inp == recipe.fp4_quant_fwd_weight == recipe.fp4_quant_bwd_grad == QParams()


def test_nvfp4_takes_what_is_said_of_an_operand():
    """As its flags, in any order; what no flag says is refused, and then nothing is changed."""
    recipe = NVFP4BlockScaling()
    recipe.fp4_quant_fwd_inp = recipe.fp4_quant_bwd_grad = QParams(random_hadamard_transform=True)
    assert recipe == NVFP4BlockScaling(disable_stochastic_rounding=True)
    recipe.fp4_quant_fwd_inp = recipe.fp4_quant_fwd_weight = recipe.fp4_quant_bwd_grad = QParams()
    plain = NVFP4BlockScaling(True, True, True)
    assert recipe == plain
    assert recipe.quantization is plain.quantization
    for name, value, words in (
        ("fp4_quant_fwd_weight", QParams(random_hadamard_transform=True), "of which fp4_2d_quantization may"),
        ("fp4_quant_fwd_inp", QParams(stochastic_rounding=True), "of which random_hadamard_transform may"),
        ("fp4_quant_bwd_grad", QParams(amax_epsilon=1.0), "and stochastic_rounding may be set"),
        ("fp4_quant_bwd_grad", None, "expected QParams"),
    ):
        with pytest.raises(RecipeError, match=words):
            setattr(recipe, name, value)
    four_over_six = NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="all")
    with pytest.raises(RecipeError, match="unless disable_rht=True"):
        four_over_six.fp4_quant_fwd_inp = QParams(random_hadamard_transform=True)
    with autocast(recipe=recipe), pytest.raises(RecipeError, match="given to autocast"):
        current().recipe.fp4_quant_bwd_grad = QParams()
    assert recipe == plain
