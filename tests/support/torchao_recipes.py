"""Writes ``tests/formats/data/torchao_recipes.npz``: what torchao's Float8Linear multiplies, by recipe.

torchao is no dependency of the tests; its bytes are kept. To make them again, with torch and torchao 0.18.0
installed, from the root of the tree::

    python -m tests.support.torchao_recipes
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

PATH = Path(__file__).parents[1] / "formats" / "data" / "torchao_recipes.npz"
NAMES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
DTYPES = ("float32", "bfloat16")
M, K, N = 32, 48, 16
# scales are kept of one bfloat16 amax in so many; rounded to powers of two, their exponents, of all
EACH = 16
# finite bfloat16 amaxes in the order of their bits
AMAXES = 0x7F80
# the casts of a step, in their order: of y = x w^T, dx = g w and dw = g^T x
CASTS = (("fprop", "x"), ("fprop", "w"), ("dgrad", "g"), ("dgrad", "w"), ("wgrad", "g"), ("wgrad", "x"))


def inputs(dtype: str) -> dict[str, Any]:
    """x (M, K), w (N, K) and g (M, N): values of many sizes, with a row and a column of zeros, and a row and
    a column smaller than torchao's least amax, 1e-12. Of zeros none is negative."""
    random = np.random.default_rng(len(dtype))
    found = {}
    for name, shape in (("x", (M, K)), ("w", (N, K)), ("g", (M, N))):
        wide = random.standard_normal(shape) * np.exp2(random.integers(-9, 9, shape))
        wide[3], wide[:, 5], wide[7], wide[:, 11] = 0, 0, 1e-14 * wide[7], 1e-15 * wide[:, 11]
        wide[9] = 2.0 ** random.integers(-9, 9, shape[1])
        kind = np.dtype(np.float32) if dtype == "float32" else np.dtype(ml_dtypes.bfloat16)
        found[name] = np.abs(wide).astype(kind) * np.where(wide < 0, -1, 1).astype(kind)
    return found


def main() -> None:
    """``{dtype}_{x|w|g}``: the inputs' bits; ``{recipe}_{dtype}_{gemm}_{matrix}_codes`` and ``_scale``: of
    each cast, the codes in the matrix's own shape. ``scales_{format}`` and ``exponents_{format}``: of
    amaxes."""
    import torch
    import torchao
    from torchao.float8 import float8_linear
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_utils import amax_to_scale

    assert torchao.__version__.split("+")[0] == "0.18.0", torchao.__version__
    made: list[Any] = []
    cast = float8_linear.hp_tensor_to_float8_dynamic

    def kept(*arguments: Any, **options: Any) -> Any:
        made.append(cast(*arguments, **options))
        return made[-1]

    float8_linear.hp_tensor_to_float8_dynamic = kept
    found: dict[str, Any] = {}
    for dtype in DTYPES:
        given = inputs(dtype)
        kind = np.int16 if dtype == "bfloat16" else np.int32
        found |= {f"{dtype}_{name}": value.view(kind) for name, value in given.items()}
        tensors = {n: torch.from_numpy(v.view(kind)).view(getattr(torch, dtype)) for n, v in given.items()}
        for name in NAMES:
            made.clear()
            config = replace(Float8LinearConfig.from_recipe_name(name), emulate=True)
            plain = torch.nn.Linear(K, N, bias=False, dtype=getattr(torch, dtype))
            plain.weight = torch.nn.Parameter(tensors["w"])
            layer = float8_linear.Float8Linear.from_float(plain, config=config)
            layer(tensors["x"].clone().requires_grad_()).backward(tensors["g"])
            assert len(made) == (4 if name == "rowwise_with_gw_hp" else 6)
            for (gemm, matrix), one in zip(CASTS, made, strict=False):
                codes, scale = one._data.view(torch.uint8), one._scale.float()
                if matrix == "w":  # which torchao has transposed
                    codes, scale = codes.t(), scale.t() if scale.ndim else scale
                found[f"{name}_{dtype}_{gemm}_{matrix}_codes"] = codes.contiguous().numpy()
                found[f"{name}_{dtype}_{gemm}_{matrix}_scale"] = scale.contiguous().numpy()
    amax = (torch.arange(AMAXES, dtype=torch.int32) << 16).view(torch.float32)
    for name, fmt in (("E4M3", torch.float8_e4m3fn), ("E5M2", torch.float8_e5m2)):
        found[f"scales_{name}"] = amax_to_scale(amax[::EACH], fmt).numpy()
        powers = amax_to_scale(amax, fmt, round_scales_to_power_of_2=True).numpy()
        found[f"exponents_{name}"] = (powers.view(np.uint32) >> 23).astype(np.uint8)
    np.savez_compressed(PATH, **found)


if __name__ == "__main__":
    main()
