"""Layers' products on codes of MXFP8 and NVFP4, on a chip that is simulated: nobody lent us one of compute
capability 10.0. The CPU stands for it: ``block_gemm`` reads the bytes that cuBLASLt would be handed, by a
transcription of NVIDIA's layout that is this file's own, and so does ``gemm``, of the emulated products, add in
float64. So both are the same to the bit where the operands are."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import fp8kit_jax as fj
import fp8kit_torch as ft
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import fp8kit as fk
from fp8kit import arrays, codec, scaled_products, slowness
from fp8kit.arrays import CPU, Device
from fp8kit.backends import dispatch
from fp8kit.backends.cuda import block, cublaslt, launch
from fp8kit.backends.registry import Kind, OpImpl
from fp8kit.errors import RecipeError, UnsupportedError
from fp8kit.formats import E4M3, E8M0, bfloat16, float32
from fp8kit.ops.product_emulated import EmulatedProduct
from fp8kit.ops.product_scaled import ScaledProduct
from fp8kit.ops.products import product_class
from fp8kit.recipe import DataRecipe
from fp8kit.recipes import NAMED
from fp8kit.testing import assert_same_bits
from tests.support.cuda_libraries import Library

M, K, N = 37, 50, 70  # of which no padding divides any
NATIVE = tuple(
    name
    for name, (recipe, _) in NAMED.items()
    if all(gemm.scaled for gemm in scaled_products.scaled(recipe.quantization).gemms.values())
)


def draw(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# --- the chip -----------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A product: its operands' values (rows, contraction), and whether they came as codes."""

    left: Any
    right: Any
    native: bool


def values_of(codes: Any, fmt: Any, scales: Any, width: int) -> Any:
    """What an operand's bytes stand for, (rows, contraction) with padding; see ``laid_out`` of
    test_scaled_products.py."""
    plain = codes if width == 32 else np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)
    r, c = np.indices((len(plain), plain.shape[1] // width))
    tile = r // 128 * -(-plain.shape[1] // (4 * width)) + c // 4
    own = scales[tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4]
    decoded = codec.decode(own, E8M0 if width == 32 else E4M3)
    return codec.decode(plain, fmt) * np.repeat(decoded, width, 1)


class Chip:
    """``there``: whether tensor cores take scales; ``takes``: whether cuBLASLt has an algorithm."""

    def __init__(self) -> None:
        self.there, self.takes = True, True
        self.calls: list[Call] = []

    def scaled_gemm_workspace(
        self, rows: int, columns: int, contraction: int, a_format: Any, b_format: Any, width: int, out: Any
    ) -> int:
        return int(self.takes)

    def _finish(self, call: Call, out: Any, bias: Any, addend: Any) -> None:
        if call.left.shape[1]:  # of a group without rows a gradient is made, which is 0
            self.calls.append(call)
        made = call.left @ call.right.T
        for more in (bias, addend):
            made = made if more is None else made + more.numpy().astype(np.float64)
        np.copyto(out.numpy(), made, casting="unsafe")

    def block_gemm(
        self,
        a: Any,
        b: Any,
        out: Any,
        a_format: Any,
        b_format: Any,
        a_scale_inv: Any,
        b_scale_inv: Any,
        a_tile: Any,
        b_tile: Any,
        bias: Any,
        addend: Any,
        workspace: Any,
        stream: int,
    ) -> None:
        assert a_tile == b_tile
        assert workspace is not None
        given = (a, a_format, a_scale_inv, out.shape[0]), (b, b_format, b_scale_inv, out.shape[1])
        sides = []
        for side, fmt, scales, rows in given:
            assert side.ptr % 16 == scales.ptr % 16 == side.shape[0] % 16 == 0
            values = values_of(side.numpy(), fmt, scales.numpy(), a_tile[1])
            assert values.shape[1] % 32 == 0
            assert not values[rows:].any()
            sides.append(values[:rows])
        self._finish(Call(*sides, True), out, bias, addend)

    def gemm(
        self, a: Any, b: Any, out: Any, layout: str, bias: Any, addend: Any, workspace: Any, stream: int
    ) -> None:
        left, right = (side.numpy().astype(np.float64) for side in (a, b))
        left, right = left.T if layout == "tn" else left, right if layout == "nt" else right.T
        pad = (0, 0), (0, -left.shape[1] % 32)  # as the chip's sums, which run over the padding
        self._finish(Call(np.pad(left, pad), np.pad(right, pad), False), out, bias, addend)


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> Iterator[Chip]:
    made, registry = Chip(), dispatch.registry
    monkeypatch.setattr(scaled_products, "takes_scales", lambda where: made.there)
    dispatch.kernels(CPU)  # what is registered by itself is
    before = registry.snapshot()
    for name in ("scaled_gemm_workspace", "block_gemm", "gemm"):
        fn, devices = getattr(made, name), frozenset({"cpu"})
        registry.register_impl(OpImpl(name, f"chip.{name}", Kind.VENDOR, fn, vendor="chip", devices=devices))
    yield made
    registry.restore(before)


# --- the frontends ------------------------------------------------------------------------------------------

LAYERS = ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear")
ROWS = [20, 0, M - 20]  # of GroupedLinear


def of_native(recipe: Any, layer: str = "Linear", dtype: Any = "float32", **options: Any) -> list[Any]:
    """y, and the gradients of x and of the parameters."""
    fk.manual_seed(0)
    more = {"device": "cpu", "params_dtype": dtype, **options}
    sizes = (len(ROWS), K, N) if layer == "GroupedLinear" else (K, N)
    made = getattr(fk.nn, layer)(*sizes, **more)
    x = fk.tensor(draw(1, M, K), dtype=dtype, device="cpu", requires_grad=True)
    fk.manual_seed(1)
    with fk.autocast(recipe=recipe):
        y = made(x, ROWS) if layer == "GroupedLinear" else made(x)
    y.backward(fk.tensor(draw(2, *y.shape), dtype=dtype, device="cpu").view)
    return [t.numpy() for t in (y, x.grad, *(p.grad for p in made.parameters()))]


def of_torch(recipe: Any, layer: str = "Linear", compiled: bool = False) -> list[Any]:
    torch.manual_seed(0)
    sizes = (len(ROWS), K, N) if layer == "GroupedLinear" else (K, N)
    made = getattr(ft, layer)(*sizes, device="cpu")
    x = torch.from_numpy(draw(1, M, K)).requires_grad_()

    def step(x: Any) -> Any:
        with ft.autocast(recipe=recipe):
            return made(x, ROWS) if layer == "GroupedLinear" else made(x)

    torch.compiler.reset()  # a program is compiled for one chip
    torch.manual_seed(1)
    y = (torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step)(x)
    y.backward(torch.from_numpy(draw(2, *y.shape)))
    grads = x.grad, *(p.grad for p in made.parameters())
    return [t.detach().numpy() for t in (y, *grads)]


def of_jax(recipe: Any, layer: str = "Linear") -> list[Any]:
    def y_of(x: Any, weight: Any, second: Any, gamma: Any) -> Any:
        with fj.autocast(enabled=True, recipe=recipe, rng=jax.random.key(1)):
            if layer == "Linear":
                return fj.dense(x, weight)
            if layer == "LayerNormLinear":
                return fj.layernorm_dense(x, weight, gamma, None, norm_type="rmsnorm")
            return fj.layernorm_mlp(x, gamma, None, [weight[:, None], second], norm_type="rmsnorm")

    given = draw(1, M, K), draw(3, K, N) / 8, draw(4, N, K) / 8, np.ones(K, np.float32)
    y, back = jax.vjp(jax.jit(y_of), *map(jnp.asarray, given))
    return [np.asarray(t) for t in (y, *back(jnp.asarray(draw(2, *y.shape))))]


def assert_native_is_emulated(chip: Chip, run: Any, *how: Any, **options: Any) -> list[Call]:
    """That both have the same operands, and the same results to the bit."""
    found = []
    for chip.there in (False, True):
        chip.calls.clear()
        made = run(*how, **options)
        found.append((list(chip.calls), made))
    (emulated, wanted), (native, got) = found
    assert [call.native for call in emulated] == [False] * len(native)
    for i, (one, other) in enumerate(zip(emulated, native, strict=True)):
        np.testing.assert_array_equal(other.left, one.left, f"left of {i}")
        np.testing.assert_array_equal(other.right, one.right, f"right of {i}")
    for i, (one, other) in enumerate(zip(wanted, got, strict=True)):
        assert_same_bits(f"result {i}", other, one)
    return native


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_layers(recipe: str, layer: str, chip: Chip) -> None:
    """Sizes that are multiples of nothing: all products of a layer, of three groups one without rows."""
    calls = assert_native_is_emulated(chip, of_native, NAMED[recipe].recipe, layer)
    assert len(calls) == (3 if "Linear" in layer and layer != "GroupedLinear" else 6)
    assert all(call.native for call in calls)


@pytest.mark.parametrize("recipe", NATIVE)
def test_recipes(recipe: str, chip: Chip) -> None:
    """Squares, random bits, rotations, scales of rows, masks of clipped elements, values cast anew."""
    for dtype in ("float32", "bfloat16"):
        calls = assert_native_is_emulated(chip, of_native, NAMED[recipe].recipe, dtype=dtype)
        assert [call.native for call in calls] == [True] * 3


@pytest.mark.parametrize("layer", LAYERS[:3])
@pytest.mark.parametrize("recipe", ["mxfp8_2d", "nvfp4"])
def test_in_jax(recipe: str, layer: str, chip: Chip) -> None:
    calls = assert_native_is_emulated(chip, of_jax, NAMED[recipe].recipe, layer)
    assert all(call.native for call in calls)


@pytest.mark.parametrize("layer", LAYERS)
def test_in_torch(layer: str, chip: Chip) -> None:
    for recipe in ("mxfp8_hybrid", "nvfp4"):
        calls = assert_native_is_emulated(chip, of_torch, NAMED[recipe].recipe, layer)
        assert all(call.native for call in calls)


def test_in_a_compiled_program_of_torch(chip: Chip) -> None:
    calls = assert_native_is_emulated(chip, of_torch, NAMED["mxfp8"].recipe, "Linear", True)
    assert [call.native for call in calls] == [True] * 3
