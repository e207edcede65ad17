"""``fk.warmup``: which variants, compiled how often, and that it changes nothing but caches."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import arrays, nn
from fp8kit.arrays import CPU
from fp8kit.backends import dispatch
from fp8kit.backends.activation import ALL
from fp8kit.backends.cuda import compile as kernel_compiler
from fp8kit.backends.cuda import hopper_gemm
from fp8kit.backends.protocol import KERNELS
from fp8kit.raw_kernels import manifest
from fp8kit.warmup import Warmup, variants
from tests.support import hopper

module = sys.modules["fp8kit.warmup"]


RECIPES = {
    "delayed": fk.recipe.DelayedScaling(),
    "current": fk.recipe.Float8CurrentScaling(),
    "block": fk.recipe.Float8BlockScaling(),
}


# what large layers and others take that cast in a pass of their own, and those that cast by blocks
_ACTIVATIONS = {"delayed": {"activation.cu"}, "block": {"activation.cu", "block_activation.cu"}}


@pytest.mark.parametrize("arch", ["sm_90a", "sm_89"])
@pytest.mark.parametrize("recipe", ["delayed", "block"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("activation", ALL)
def test_variants_are_the_manifests(dtype, activation, recipe, arch):
    found = variants(4096, dtype, activation, RECIPES[recipe].quantization, arch, head_dim=128)
    assert len({str(variant) for variant in found}) == len(found)
    assert ("block.cu" in dict(found)) is (recipe == "block")
    assert ("flash_bwd.cu" in dict(found)) is (dtype != "float32")
    assert ("hopper_flash_fwd.cu" in dict(found)) is (dtype != "float32" and arch == "sm_90a")
    own = {"xielu.cu"} if activation == "xielu" else _ACTIVATIONS[recipe]
    assert own == dict(found).keys() & {"xielu.cu", *_ACTIVATIONS["block"]}
    for source, defines in found:
        assert manifest.defines(**defines) in manifest.source(source).variants, (source, defines)


@pytest.mark.parametrize(
    ("recipe", "widths"),
    [
        (fk.recipe.MXFP8BlockScaling(), {"32"}),
        (fk.recipe.NVFP4BlockScaling(), {"16"}),
        (fk.recipe.DelayedScaling(), set()),
    ],
    ids=["mxfp8", "nvfp4", "delayed"],
)
def test_what_lays_codes_out_is_compiled_where_products_take_their_scales(recipe, widths, monkeypatch):
    compiled = []
    monkeypatch.setattr(module, "_compiled", lambda wanted, arch, *rest: compiled.append((arch, wanted)))
    for arch in ("sm_90a", "sm_100a", "sm_120a"):
        fk.warmup(64, recipe=recipe, arch=arch)
    found = {
        arch: {defines["WIDTH"] for source, defines in wanted if source == "block_operand.cu"}
        for arch, wanted in compiled
    }
    assert found == {"sm_90a": set(), "sm_100a": widths, "sm_120a": widths}


def test_products_of_blocks_are_compiled_with_every_tile_that_may_be_chosen(monkeypatch):
    """By Hopper's kernel on Hopper, by that of any chip elsewhere; cuBLASLt's need none."""
    for recipe in RECIPES.values():
        for arch, own in (("sm_90a", "hopper_gemm.cu"), ("sm_89", "mma_gemm.cu"), ("sm_100a", "mma_gemm.cu")):
            found = variants(4096, "bfloat16", "gelu", recipe.quantization, arch)
            products = [
                (source, manifest.defines(**defines)) for source, defines in found if "gemm" in source
            ]
            assert {source for source, _ in products} == ({own} if recipe is RECIPES["block"] else set())
            if arch == "sm_90a" and products:
                compiled = {defines for _, defines in products}
    plan, chosen = hopper.planned(hopper_gemm, monkeypatch), set()
    for scales in ("lines_squares", "lines_lines"):
        for m in (1, 16, 128, 512, 2048, 8192):
            for n, k in ((4096, 4096), (16384, 4096), (4096, 16384), (512, 512)):
                how = ("e4m3", "e4m3", "bf16"), scales, (0, 0), 128
                chosen.add(plan(0, m, n, k, k, k, n, m, n, *how).kernel)
    assert chosen == compiled


@pytest.mark.parametrize("name", RECIPES)
def test_every_kernel_of_a_training_has_its_source_among_them(name, monkeypatch):
    """The contract's kernels that a step calls, by the sources that name them."""
    called = set()
    own = dispatch.kernels(CPU)

    def spied(kernel):
        def call(*given, **options):
            called.add(kernel)
            return getattr(own, kernel)(*given, **options)

        return call

    own_calls = {kernel: spied(kernel) for kernel in KERNELS}
    every = SimpleNamespace(policy=own.policy, replays=None, recorder=None, **own_calls)
    monkeypatch.setattr(dispatch, "kernels", lambda device: every)
    layer = nn.TransformerLayer(32, 64, 2, params_dtype="bfloat16", device="cpu")
    optimizer = fk.optim.AdamW(layer.parameters(), lr=1e-3)
    with fk.autocast(recipe=RECIPES[name]):
        y = layer(fk.tensor(np.ones((16, 1, 32), np.float32), dtype="bfloat16", device="cpu"))
    nn.cross_entropy(y.reshape(16, 32), fk.tensor(np.arange(16), device="cpu")).backward()
    optimizer.step()
    sources = {source for source, _ in variants(32, "bfloat16", "gelu", RECIPES[name].quantization, "sm_90a")}
    missing = [
        kernel
        for kernel in called
        if manifest.uses(kernel)
        and not manifest.uses(kernel).keys() & sources
        and "gemm" not in kernel  # gemm.cu is for products of odd sizes
    ]
    assert {"norm_fwd", "act_bwd", "adamw_", "cross_entropy_fwd"} <= called
    assert not missing


@pytest.fixture
def two(monkeypatch, tmp_path):
    """Two small variants, a cache of their own, and what NVRTC is asked for."""
    asked = []
    compiled = kernel_compiler._compile

    def counted(name, defines, arch, unit):
        asked.append((name, dict(defines), arch))
        return compiled(name, defines, arch, unit)

    monkeypatch.setenv("FP8KIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(
        module, "variants", lambda *given: [("scales.cu", {"STATES": "8"}), ("kv_cache.cu", {"W": "u16"})]
    )
    monkeypatch.setattr(kernel_compiler, "_compile", counted)
    return asked


def test_compiles_ahead_for_another_machine_and_once(two):
    first = fk.warmup(64, arch="sm_90a", threads=2)
    assert sorted(two) == [("kv_cache.cu", {"W": "u16"}, "sm_90a"), ("scales.cu", {"STATES": "8"}, "sm_90a")]
    assert [name for name, _ in sorted(first.compiled)] == ["kv_cache.cu W=u16", "scales.cu STATES=8"]
    assert (first.found, first.step_seconds) == (0, None)
    again = fk.warmup(64, arch="sm_90a")
    assert (again.compiled, again.found, len(two)) == ((), 2, 2)
    assert "0 variants compiled" in str(again)


def test_says_what_it_did():
    said = str(Warmup((("norm_bwd.cu T=bf16", 1.5), ("amax.cu T=bf16", 0.5)), 3, 1.6, 0.25)).splitlines()
    assert said[0].split() == ["norm_bwd.cu", "T=bf16", "1.50", "s"]
    assert said[-2:] == [
        "2 variants compiled in 1.60 s (one by one 2.00 s), 3 were in the cache",
        "two steps of the layer: 0.25 s",
    ]


def test_draws_no_random_number_and_leaves_no_scales():
    fk.manual_seed(5)
    before = {name: np.asarray(value).tobytes() for name, value in nn.get_rng_state().items()}
    done = fk.warmup(32, 64, 2, sequence=16, device="cpu")
    assert done.step_seconds > 0
    assert {name: np.asarray(value).tobytes() for name, value in nn.get_rng_state().items()} == before


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"hidden": 0}, "hidden: got 0"),
        ({"arch": "hopper"}, "arch: got 'hopper', expected one of sm_80, "),
        ({"threads": 0}, "threads: got 0"),
        ({"dtype": "uint8"}, "dtype: got uint8"),
        ({"recipe": "delayed"}, "expected a Recipe, such as"),
        ({"activation": "tanh"}, "activation"),
        (
            {"hidden": 10, "heads": 3, "device": "cpu"},
            "warmup: hidden: got 10, expected a multiple of 3 heads",
        ),
        (
            {"hidden": 10, "heads": 3, "arch": "sm_90a"},
            "warmup: hidden: got 10, expected a multiple of 3 heads",
        ),
    ],
)
def test_refuses(given, said):
    with pytest.raises(fk.Fp8kitError, match=re.escape(said)):
        fk.warmup(**given)


@pytest.mark.gpu
@pytest.mark.parametrize("name", RECIPES)
def test_after_it_nothing_is_compiled(name, monkeypatch):
    """A whole training step on a GPU, optimiser and loss included: every cubin is there."""
    done = fk.warmup(64, 128, 2, sequence=32, batch=2, recipe=RECIPES[name], device="cuda")
    assert done.step_seconds is not None

    def refuse(*given):
        raise AssertionError(f"compiled: {given[:2]}")

    monkeypatch.setattr(kernel_compiler, "_compile", refuse)
    layer = nn.TransformerLayer(64, 128, 2, params_dtype="bfloat16", device="cuda")
    optimizer = fk.optim.AdamW(layer.parameters(), lr=1e-3)
    with fk.autocast(recipe=RECIPES[name]):
        y = layer(fk.tensor(np.ones((32, 2, 64), np.float32), dtype="bfloat16", device="cuda"))
    nn.cross_entropy(y.reshape(64, 64), fk.tensor(np.arange(64), device="cuda")).backward()
    fk.optim.clip_grad_norm_(layer.parameters(), 1.0)
    optimizer.step()
    arrays.synchronize(arrays.device("cuda"))
    assert np.isfinite(y.numpy().astype(np.float32)).all()
