"""The recipes named after torchao's against what torchao's own Float8Linear multiplies: every code and every
scale."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import arrays, formats, nn
from fp8kit.backends import dispatch
from fp8kit.formats import Format
from fp8kit.recipes import named
from tests.support.torchao_recipes import AMAXES, CASTS, DTYPES, EACH, NAMES, PATH, K, N

Operand = tuple[
    Any, Any, Format | None
]  # codes and scale_inv as they are multiplied, or values and no format


class Recorder:
    """Kernels that keep the operands of the products that they make."""

    def __init__(self, kernels: Any) -> None:
        self._kernels, self.products = kernels, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def fp8_gemm(self, a: Any, b: Any, out: Any, a_format: Any, b_format: Any, a_inv: Any, b_inv: Any, *more):
        operands = (a, a_inv, a_format), (b, b_inv, b_format)
        self.products.append([(x.numpy().copy(), inv.numpy().copy(), f) for x, inv, f in operands])
        return self._kernels.fp8_gemm(a, b, out, a_format, b_format, a_inv, b_inv, *more)

    def gemm(self, a: Any, b: Any, out: Any, layout: str, *more: Any) -> Any:
        left, right = a.numpy().copy(), b.numpy().copy()
        left = left.T if layout == "tn" else left
        right = right if layout == "nt" else right.T
        self.products.append([(left, None, None), (right, None, None)])
        return self._kernels.gemm(a, b, out, layout, *more)


def multiplied(name: str, given: dict[str, Any], dtype: str, monkeypatch: Any) -> dict[Any, Operand]:
    """(GEMM, matrix) -> the operand of a Linear's product under the recipe, its contraction last."""
    recorder = Recorder(dispatch.kernels(fk.arrays.CPU))
    monkeypatch.setattr(dispatch, "kernels", lambda device: recorder)
    layer = nn.Linear(K, N, bias=False, params_dtype=dtype, device="cpu")
    layer.load_state_dict({"weight": given["w"]})
    x = fk.tensor(given["x"], requires_grad=True)
    with fk.autocast(recipe=named(name)):
        y = layer(x)
    y.backward(given["g"])
    assert len(recorder.products) == 3
    places = [CASTS[:2], CASTS[2:4], CASTS[4:]]
    return {
        place: operand
        for own, product in zip(places, recorder.products, strict=True)
        for place, operand in zip(own, product, strict=True)
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_codes_and_scales_are_torchaos(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = formats.dtype(dtype).numpy
    with np.load(PATH) as file:
        theirs = dict(file)
    given = {matrix: theirs[f"{dtype}_{matrix}"].view(kind) for matrix in "xwg"}
    ours = multiplied(name, given, dtype, monkeypatch)
    compared = 0
    for (gemm, matrix), (found, scale_inv, fmt) in ours.items():
        key = f"{name}_{dtype}_{gemm}_{matrix}"
        if f"{key}_codes" not in theirs:  # this product is in high precision
            assert (name, gemm) == ("rowwise_with_gw_hp", "wgrad")
            np.testing.assert_array_equal(found, given[matrix].T)
            continue
        codes, scale = theirs[f"{key}_codes"], theirs[f"{key}_scale"]
        inverse = np.float32(1) / scale
        along = (gemm, matrix) in (("fprop", "x"), ("fprop", "w"), ("dgrad", "g"))
        codes, inverse = (codes, inverse) if along else (codes.T, inverse.T)
        assert fmt == (fk.E5M2 if name == "tensorwise" and matrix == "g" else fk.E4M3)
        np.testing.assert_array_equal(found, codes)
        # a tensor's scale beside those of rows is given for each row
        inverse = np.broadcast_to(inverse.reshape(-1), scale_inv.size)
        np.testing.assert_array_equal(scale_inv.reshape(-1), inverse)
        compared += 1
    assert compared == (4 if name == "rowwise_with_gw_hp" else 6)


def scales(amax: Any, fmt: Format, power_2: bool) -> Any:
    """Of the kernel behind the recipes, with torchao's least amax."""
    views = [arrays.as_view(np.ascontiguousarray(amax, np.float32))]
    views += [arrays.empty(views[0].shape, formats.float32, arrays.CPU) for _ in range(2)]
    dispatch.kernels(arrays.CPU).scale_from_amax(*views, fmt.max, power_2, 1e-12, formats.float32.max, 0)
    return views[1].numpy()


@pytest.mark.parametrize("fmt", [fk.E4M3, fk.E5M2], ids=str)
def test_scales_of_every_amax(fmt: Format) -> None:
    """Of every bfloat16 amax, 0 and those below the least one included."""
    amax = (np.arange(AMAXES, dtype=np.uint32) << 16).view(np.float32)
    with np.load(PATH) as file:
        theirs, exponents = file[f"scales_{fmt.name}"], file[f"exponents_{fmt.name}"]
    found = scales(amax, fmt, True).view(np.uint32)
    assert np.array_equal(found >> 23, exponents)
    assert not (found & 0x7FFFFF).any()
    assert np.array_equal(scales(amax[::EACH], fmt, False), theirs)


@pytest.mark.parametrize("fmt", [fk.E4M3, fk.E5M2], ids=str)
def test_a_scale_just_below_a_power_of_two_is_rounded_down(fmt: Format) -> None:
    """Where torchao 0.18 rounds up: its float32 logarithm of such a scale is a whole number, and the largest
    value of its row saturates."""
    power = 2.0 ** np.arange(-20, 20)
    amax = np.nextafter((fmt.max * power).astype(np.float32), np.float32(np.inf))
    assert np.array_equal(scales(amax, fmt, True), 0.5 / power)
