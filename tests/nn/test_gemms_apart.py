"""Each GEMM of a layer may be computed as it is told, whatever the others are."""

import itertools

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import formats, nn
from fp8kit.errors import RecipeError, UnsupportedError
from fp8kit.quantization import COMPUTES, Gemm, Quantization, Quantizer

X = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
SCALED = {
    "tensor": Quantizer(formats.E4M3),
    "row": Quantizer(formats.E4M3, "row"),
    "block": Quantizer(formats.E4M3, "block_1x128"),
    "mx": Quantizer(formats.E4M3, "mx_1x32", scale_rule="te"),
}


def _gradients(layer, recipe):
    fk.manual_seed(0)
    made = getattr(nn, layer)(128, 128)
    x = fk.tensor(X, requires_grad=True)
    with fk.autocast(enabled=recipe is not None, recipe=recipe):
        y = made(x)
    y.backward(fk.tensor(X))
    weight = next(p for p in made.parameters() if len(p.shape) == 2)
    return y.numpy(), x.grad.numpy(), weight.grad.numpy()


@pytest.mark.parametrize(
    "layer",
    [
        "Linear",
        *(pytest.param(one, marks=pytest.mark.combinations) for one in ("LayerNormLinear", "LayerNormMLP")),
    ],
)
@pytest.mark.parametrize("scaled", SCALED)
@pytest.mark.parametrize("how", list(itertools.product(COMPUTES, repeat=3)), ids="-".join)
def test_each_gemm_as_it_is_told(how, scaled, layer):
    """Within FP8's error of high precision; what nobody computes is refused by name."""
    gemms = [Gemm(SCALED[scaled], SCALED[scaled], compute=compute) for compute in how]
    forward, *backward = how
    if forward == "dequantized":
        wanted = r"fprop\.compute: got 'dequantized', expected 'quantized' or 'high_precision': only dgrad"
        with pytest.raises(RecipeError, match=wanted):
            Quantization(*gemms)
        return
    recipe = fk.recipe.DataRecipe(Quantization(*gemms))
    nonsense = forward != "quantized" and "dequantized" in backward
    if nonsense or set(how) == {"high_precision"}:
        with pytest.raises(UnsupportedError, match="compute: got"):
            _gradients(layer, recipe)
        return
    for found, exact in zip(_gradients(layer, recipe), _gradients(layer, None), strict=True):
        assert np.linalg.norm(found - exact) < 0.12 * np.linalg.norm(exact)
