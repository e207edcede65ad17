"""Layers' products on codes of MXFP8 and NVFP4, on a chip that is simulated: nobody lent us one of compute
capability 10.0. The CPU stands for it: ``block_gemm`` reads the bytes that cuBLASLt would be handed, by a
transcription of NVIDIA's layout that is this file's own, and adds in float64. So does ``gemm``, which
emulated products take: results are the same to the bit where the operands are."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import fp8kit_jax as fj
import fp8kit_torch as ft
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from fp8kit_jax.calls import default_device
from fp8kit_torch.availability import check_mxfp8_support
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fp8kit as fk
from fp8kit import arrays, codec, scaled_products, slowness
from fp8kit.arrays import CPU, ArrayView, Device
from fp8kit.backends import dispatch
from fp8kit.backends.cuda import block, cublaslt, launch
from fp8kit.backends.protocol import block_shapes
from fp8kit.backends.reference import block as engine
from fp8kit.backends.reference import gemm as products
from fp8kit.backends.registry import Kind, OpImpl
from fp8kit.errors import RecipeError, UnsupportedError
from fp8kit.formats import E2M1, E4M3, E8M0, bfloat16, uint8
from fp8kit.ops.product_emulated import EmulatedProduct
from fp8kit.ops.product_scaled import ScaledProduct
from fp8kit.ops.products import product_class
from fp8kit.recipe import DataRecipe
from fp8kit.recipes import NAMED
from fp8kit.testing import assert_close, assert_same_bits, sum_slack
from fp8kit.testing.compare import ROUNDOFF, relative_error
from tests.support.cuda_libraries import Library

GPU = Device("cuda", 0)
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
    """A product: its operands' values (rows, contraction), and whether they came as codes; ``given``: these,
    and the bytes of their scales."""

    left: Any
    right: Any
    native: bool
    given: Any = ()


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
    """``there``: whether tensor cores take scales; ``takes``: whether cuBLASLt has an algorithm; ``exact``:
    whether sums are float64's."""

    def __init__(self) -> None:
        self.there = self.takes = self.exact = True
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
        copies = [(side.numpy().copy(), scales.numpy().copy()) for side, _, scales, _ in given]
        self._finish(Call(*sides, True, copies), out, bias, addend)
        if not self.exact:
            tiles, rest = (a_tile, b_tile), (bias, addend, workspace, stream)
            engine.block_gemm(a, b, out, a_format, b_format, a_scale_inv, b_scale_inv, *tiles, *rest)

    def gemm(
        self, a: Any, b: Any, out: Any, layout: str, bias: Any, addend: Any, workspace: Any, stream: int
    ) -> None:
        left, right = (side.numpy().astype(np.float64) for side in (a, b))
        left, right = left.T if layout == "tn" else left, right if layout == "nt" else right.T
        pad = (0, 0), (0, -left.shape[1] % 32)  # as the chip's sums, which run over the padding
        self._finish(Call(np.pad(left, pad), np.pad(right, pad), False), out, bias, addend)
        if not self.exact:
            products.gemm(a, b, out, layout, bias, addend, workspace, stream)


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


@pytest.mark.parametrize(
    ("gemms", "change"),
    [
        (["fprop"], {"backward_override": "dequantized"}),
        (["fprop"], {"backward_override": "high_precision"}),
        (["fprop", "dgrad"], {"wgrad": {"emulated": True}}),
        (["fprop", "dgrad"], {"wgrad": {"plain": "a"}}),
        ([], {"dgrad": {"accumulation": "hopper_fast"}}),  # no sums of tensor cores beside a chip's
    ],
    ids=str,
)
def test_some_products_are_native(gemms: list[str], change: dict[str, Any], chip: Chip) -> None:
    """What other GEMMs read are values."""
    how = NAMED["mxfp8"].recipe
    if "backward_override" in change:
        recipe: Any = replace(how, **change)
    else:
        (name, own), quantization = *change.items(), how.quantization
        recipe = DataRecipe(
            replace(quantization, **{name: replace(getattr(quantization, name), **own)}), "own"
        )
    scaled = scaled_products.scaled(recipe.quantization)
    assert [name for name, gemm in scaled.gemms.items() if gemm.scaled] == gemms
    calls = assert_native_is_emulated(chip, of_native, recipe)
    assert sum(call.native for call in calls) == len(gemms)


def test_segments_and_kept_weights(chip: Chip) -> None:
    """The gradient of several segments is made in one product; a kept weight is cast once, in codes."""
    parts = {"parameters_split": {"a": 17, "b": N - 17}}
    assert len(assert_native_is_emulated(chip, of_native, NAMED["mxfp8"].recipe, **parts)) == 3

    def kept(recipe: Any) -> list[Any]:
        fk.manual_seed(0)
        layer, made = fk.nn.Linear(K, N, device="cpu"), []
        for first in (True, False):
            x = fk.tensor(draw(first, M, K), device="cpu", requires_grad=True)
            with fk.autocast(recipe=recipe):
                y = layer(x, is_first_microbatch=first)
            y.backward(fk.tensor(draw(2, M, N), device="cpu").view)
            made += [y.numpy(), x.grad.numpy(), layer.weight.grad.numpy().copy()]
        return made

    assert len(assert_native_is_emulated(chip, kept, NAMED["mxfp8"].recipe)) == 6


@pytest.mark.parametrize("takes", [True, False])
def test_recomputed_layers(takes: bool, chip: Chip) -> None:
    """Forward's and backward's buffers in one pass: sizes of which now the one, now the other is larger."""
    chip.takes = takes
    for smooth in (None, "channel"):
        options = {"checkpoint": True, "activation": "swiglu", "smooth_swiglu": smooth}
        for recipe in ("mxfp8", "nvfp4"):
            calls = assert_native_is_emulated(
                chip, of_native, NAMED[recipe].recipe, "LayerNormMLP", **options
            )
            assert [call.native for call in calls] == [takes] * 7  # fc1 twice, fc2 once


def test_float16(chip: Chip) -> None:
    """Emulated sums are float32 before they are rounded to float16; these are rounded once."""
    found = []
    for chip.there in (False, True):
        found.append(of_native(NAMED["mxfp8"].recipe, dtype="float16"))
    for one, other in zip(*found, strict=True):
        exact = one.astype(np.float64)
        assert_close("float16", other, exact, "float16", 2.0**-11 * np.abs(exact).max())


def test_the_bytes_that_it_is_handed(chip: Chip) -> None:
    """Codes and scales of all six operands: those of ``fk.quantize`` along their contraction."""
    y_shape, recipe = (M, N), NAMED["mxfp8"].recipe
    of_native(recipe, bias=False)
    fk.manual_seed(0)
    w = fk.nn.Linear(K, N, device="cpu", bias=False).weight.numpy()
    how = {"scaling": "mx_1x32", "scale_rule": recipe.quantization.x.scale_rule}

    def cast(matrix: Any, along: int) -> Any:
        made = fk.quantize(matrix, **how, along=along)
        return made if along else made.T

    x, g = draw(1, M, K), draw(2, *y_shape)
    wanted = [(x, 1), (w, 1), (g, 1), (w, 0), (g, 0), (x, 0)]
    given = [pair for call in chip.calls for pair in call.given]
    for (codes, scales), (matrix, along) in zip(given, wanted, strict=True):
        own = cast(matrix, along)
        plain = np.ascontiguousarray(own.data)
        np.testing.assert_array_equal(codes[: plain.shape[0], : plain.shape[1]], plain)
        assert not codes[plain.shape[0] :].any()
        assert not codes[:, plain.shape[1] :].any()
        np.testing.assert_array_equal(scales, own.swizzled_scales())


def test_sums_in_float32(chip: Chip) -> None:
    """By the CPU engine from the same bytes: within the bound of two float32 sums of the emulated ones."""
    chip.exact, found = False, []
    for chip.there in (False, True):
        chip.calls.clear()
        found.append(of_native(NAMED["mxfp8"].recipe, bias=False))
    for call, one, other in zip(chip.calls, *found, strict=True):
        terms = np.abs(call.left) @ np.abs(call.right).T
        slack = 2 * sum_slack(terms, call.left.shape[1])
        assert_close("product", other, one.astype(np.float64), "float32", slack)


# --- what is refused ----------------------------------------------------------------------------------------


def test_what_the_engine_does_not_take_is_emulated(chip: Chip, caplog: pytest.LogCaptureFixture) -> None:
    """With the bits of an emulated product, and one word on each."""
    chip.takes = False
    for recipe in ("mxfp8", "nvfp4"):
        slowness.forget()
        caplog.clear()
        with caplog.at_level(logging.WARNING, "fp8kit"):
            for _ in range(2):
                calls = assert_native_is_emulated(chip, of_native, NAMED[recipe].recipe)
        assert [call.native for call in calls] == [False] * 3
        said = [message for message in caplog.messages if "the device takes no E" in message]
        assert len(said) == 3
        for gemm in ("fprop", "dgrad", "wgrad"):
            words = f"for {gemm} of a weight 70 x 50: the operands' codes are decoded"
            assert any(words in message for message in said)
    slowness.forget()


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("mxfp4", "fprop.scaled: got True, expected False.*E4M3 and E5M2"),
        ("mxfp6_e2m3", "E4M3 and E5M2"),
        ("mxfp8_blackwell", "to be emulated"),
        ("block", "not E8M0 or E4M3|MX's blocks of 32"),
    ],
)
def test_recipes_that_no_such_product_has(recipe: str, words: str) -> None:
    own = NAMED[recipe].recipe.quantization
    assert scaled_products.scaled(own) is own
    fprop = replace(own.fprop, scaled=True)
    with pytest.raises(UnsupportedError, match=words):
        product_class(replace(own, fprop=fprop))


def test_elsewhere_products_are_those_of_before() -> None:
    """No Blackwell: the recipe's own quantization, by identity, and the product's class."""
    fp8 = NAMED["mxfp8"].recipe.quantization
    assert scaled_products.for_device(fp8, CPU) is fp8
    assert scaled_products.for_device(fp8, torch.device("cpu")) is fp8
    assert not scaled_products.takes_scales("meta")
    assert product_class(fp8) is EmulatedProduct
    assert product_class(scaled_products.scaled(fp8)) is ScaledProduct
    emulated = fp8.emulated()
    assert scaled_products.scaled(emulated) is emulated
    with pytest.raises(RecipeError, match="scaled"):
        replace(fp8.fprop, scaled="yes")


@pytest.mark.parametrize(("capability", "arch"), [((9, 0), 90), ((10, 0), 100), ((12, 0), 120)])
def test_one_question_decides(capability: Any, arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "provider", lambda where: SimpleNamespace(arch=lambda device: arch))
    assert scaled_products.takes_scales(GPU) == (capability >= scaled_products.CAPABILITY)


def test_nobody_is_warned_of_emulation_there(chip: Chip) -> None:
    assert check_mxfp8_support() == (True, "")
    chip.there = False
    with pytest.warns(UserWarning, match="emulated in high precision here"):
        check_mxfp8_support()


def test_a_program_of_jax_is_for_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with jax.default_device(jax.devices("cpu")[-1]):
        assert default_device() == CPU
    gpu = SimpleNamespace(platform="gpu", local_hardware_id=3)
    monkeypatch.setattr(jax, "local_devices", lambda backend: [gpu])
    assert default_device() == Device("cuda", 3)


# --- the engine's host code ---------------------------------------------------------------------------------


def test_what_cublaslt_takes(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """An algorithm is looked for when the layer is planned, for padded sizes; the plan is the call's own."""
    monkeypatch.setattr(launch, "runtime", lambda: SimpleNamespace(getDevice=lambda: 0))
    asked = (37, 70, 50, E4M3, E4M3, 32)
    for capability, want in (((9, 0), 0), ((10, 0), block.gemm.fp8_gemm_workspace(37, 70))):
        for kept in (block.gemm._plan, cublaslt.plan):
            kept.cache_clear()
        monkeypatch.setattr(launch, "capability", lambda index, capability=capability: capability)
        assert block.scaled_gemm_workspace(*asked, bfloat16) == want
    assert library.layouts == [(28, 64, 80, 64), (28, 64, 48, 64), (0, 80, 48, 80)]
    made = library.created
    view = partial(ArrayView, device=GPU)
    a, b, out = (
        view(at, shape, uint8) for at, shape in ((4096, (48, 64)), (8192, (80, 64)), (1 << 16, (37, 70)))
    )
    scales, space = view(256, (512,), uint8), view(1 << 20, (want,), uint8)
    monkeypatch.setattr(block.gemm, "_finish", lambda *arguments: None)
    tiles = ((1, 32), (1, 32))
    out = view(1 << 16, (37, 70), bfloat16)
    block.block_gemm(a, b, out, E4M3, E4M3, scales, scales, *tiles, None, None, space, 7)
    assert library.created == made
    library.refused = "matmul_algo_get_heuristic"
    assert block.scaled_gemm_workspace(37, 70, 82, E4M3, E4M3, 32, bfloat16) == 0
    assert block.scaled_gemm_workspace(0, 70, 82, E4M3, E4M3, 32, bfloat16) > 0


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize(("width", "fmt"), [(32, E4M3), (16, E2M1)])
def test_a_bias_that_cublaslt_does_not_take_is_added_afterwards(
    width: int, fmt: Any, refuses: bool, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a product that it takes without: the layer's plan has asked for that one."""
    monkeypatch.setattr(launch, "capability", lambda index: (10, 0))
    finished: list[Any] = []
    monkeypatch.setattr(block.gemm, "_finish", lambda *arguments: finished.append(arguments))
    told, asked = library.matmul_desc_set_attribute, []

    def tell(description: int, attribute: int, address: int, size: int) -> None:
        if attribute == cublaslt._EPILOGUE:
            asked.append(attribute)
            if refuses:
                raise library.cuBLASLtError("NOT_SUPPORTED (15)")
        told(description, attribute, address, size)

    monkeypatch.setattr(library, "matmul_desc_set_attribute", tell)
    for kept in (block.gemm._plan, block.gemm._takes, cublaslt.plan):
        kept.cache_clear()
    view = partial(ArrayView, device=GPU)
    a, b = (view(at, (64, 64 * width // 32), uint8) for at in (4096, 1 << 15))
    out, bias = view(1 << 16, (64, 64), bfloat16), view(1 << 18, (64,), bfloat16)
    scales, space = view(256, (512,), uint8), view(1 << 20, (block.gemm.WORKSPACE,), uint8)
    how = fmt, fmt, scales, scales, (1, width), (1, width)
    for _ in range(2):
        block.block_gemm(a, b, out, *how, bias, None, space, 7)
    assert len(library.products) == 2
    assert len(asked) == 1  # known from then on
    assert finished == [(0, 0, bias, out, out, 7)] * (2 * refuses)
    for kept in (block.gemm._plan, block.gemm._takes, cublaslt.plan):
        kept.cache_clear()


def test_what_lays_operands_out_is_launched_with(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    monkeypatch.setattr(launch, "kernel", lambda source, name, index, **defines: (source, name, defines))
    monkeypatch.setattr(launch, "blocks", lambda jobs, threads, index: jobs)
    monkeypatch.setattr(launch, "launch", lambda *arguments: launched.append(arguments))
    view = partial(ArrayView, dtype=uint8, device=GPU)
    codes, scales = view(1024, (50, 37)), view(2048, (2, 37))
    q, q_scales = (
        view(at, shape) for at, shape in zip((4096, 8192), block_shapes(37, 50, (1, 16)), strict=True)
    )
    block.block_operand(codes, scales, q, q_scales, (1, 16), 0, 7)
    ((function, grid, threads, arguments, stream),) = launched
    assert function == ("block_operand.cu", "block_operand", {"WIDTH": "16"})
    assert (grid, threads, stream) == (48 * 32 // 16 + 512, 256, 7)
    assert arguments == (1024, 2048, 4096, 8192, 50, 37, 48, 32, 512, 1, 0)
    nothing = view(4096, (0, 32)), view(8192, (0,))
    block.block_operand(view(1024, (0, 50)), view(2048, (0, 2)), *nothing, (1, 16), 1, 7)
    assert len(launched) == 1


@pytest.mark.parametrize("layer", LAYERS[:3])
@pytest.mark.parametrize("recipe", ["mxfp8_2d", "nvfp4"])
def test_in_jax(recipe: str, layer: str, chip: Chip) -> None:
    calls = assert_native_is_emulated(chip, of_jax, NAMED[recipe].recipe, layer)
    assert all(call.native for call in calls)


def test_in_jax_over_devices(chip: Chip) -> None:
    """Rows and features of products are split as those of emulated ones are; nothing is gathered."""
    x, w, v = (jnp.asarray(draw(i, *shape)) for i, shape in enumerate(((128, 64), (64, 128), (128, 64))))

    def step(x: Any, w: Any, v: Any) -> Any:
        def loss(*own: Any) -> Any:
            with fj.autocast(enabled=True, recipe=NAMED["mxfp8"].recipe):
                return (fj.dense(jnp.tanh(fj.dense(own[0], own[1])), own[2]) ** 2).sum()

        return jax.value_and_grad(loss, (0, 1, 2))(x, w, v)

    wanted = jax.block_until_ready(jax.tree.leaves(jax.jit(step)(x, w, v)))
    chip.calls.clear()
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    places = P("dp"), P(None, "tp"), P("tp")
    placed = [jax.device_put(a, NamedSharding(mesh, own)) for a, own in zip((x, w, v), places, strict=True)]
    with jax.set_mesh(mesh):
        program = jax.jit(step).lower(*placed).compile()
        got = jax.tree.leaves(jax.block_until_ready(program(*placed)))
    assert "all-gather" not in program.as_text()
    assert [call.native for call in chip.calls] == [True] * 6 * 4
    assert {call.left.shape for call in chip.calls} == {(64, 64)}
    for own, want in zip(got, wanted, strict=True):  # float32 sums of at most 128 terms in another order
        assert relative_error(own, want) <= 128 * ROUNDOFF


@pytest.mark.parametrize("layer", LAYERS)
def test_in_torch(layer: str, chip: Chip) -> None:
    for recipe in ("mxfp8_hybrid", "nvfp4"):
        calls = assert_native_is_emulated(chip, of_torch, NAMED[recipe].recipe, layer)
        assert all(call.native for call in calls)


def test_in_a_compiled_program_of_torch(chip: Chip) -> None:
    calls = assert_native_is_emulated(chip, of_torch, NAMED["mxfp8"].recipe, "Linear", True)
    assert [call.native for call in calls] == [True] * 3


def test_a_device_that_is_not_here_takes_no_scales():
    assert not scaled_products.takes_scales("cuda:99")
