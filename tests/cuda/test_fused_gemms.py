"""Products of Hopper that go on at once, on a GPU: the contract, every bit against the same product and the
pass behind it, and a layer that trains by them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import arrays
from fp8kit.arrays import Device
from fp8kit.backends import dispatch
from fp8kit.backends.composed import composed
from fp8kit.backends.cuda import activation, block, fused_gemm, hopper_fused, hopper_gemm, quantize
from fp8kit.backends.policy import SelectionPolicy, policy_context
from fp8kit.backends.protocol import SPECS
from fp8kit.formats import DType, bfloat16, float16, float32
from fp8kit.testing.compare import assert_same_bits
from fp8kit.testing.contract import Case, Sampler, cases, get, host, kernel_test
from tests.support import hopper as support

pytestmark = pytest.mark.gpu
GPU = Device("cuda", 0)
NAMES = ("fp8_gemm_act", "fp8_gemm_act_bwd", "fp8_gemm_cast", "fp8_gemm_lines")
# each by Hopper's kernel, where that takes the call
ORDER = {name: (f"impl:cuda.hopper_{name}", f"impl:cuda.{name}") for name in NAMES}
PRODUCTS = {name: (f"impl:cuda.hopper_{name}",) for name in ("fp8_gemm", "block_gemm")}


@pytest.fixture(autouse=True)
def policy() -> Iterator[None]:
    support.want_hopper()
    with policy_context(SelectionPolicy(per_op=ORDER)):
        yield


@pytest.mark.parametrize("case", [case for name in NAMES for case in cases(name)], ids=str)
def test_contract(case: Case) -> None:
    with policy_context(SelectionPolicy(per_op=ORDER | PRODUCTS)):
        support.fill_shared_memory_with_nan(dispatch.kernels(GPU))  # which rows that are not copied have
    case.run(dispatch.kernels(GPU), GPU)


PASSES: dict[str, dict[str, Any]] = {
    "fp8_gemm_act": {"biased": True, "cast": {}, "y": True},
    "fp8_gemm_act_bwd": {"biased": True, "cast": {}, "dx": True},
    "fp8_gemm_cast": {"cast": {}, "bias": True, "add": True},
    "fp8_gemm_lines": {"bias": True, "add": True, "epsilon": 1e-6},
}
_KINDS = [{"kind": kind} for kind in ("gelu", "relu", "swiglu")]
MORE: dict[str, list[dict[str, Any]]] = {
    "fp8_gemm_act": _KINDS,
    "fp8_gemm_act_bwd": _KINDS,
    "fp8_gemm_cast": [{}],
    "fp8_gemm_lines": [{}, {"blocks": True}],
}
# the last: several tiles of a block, with edges
SIZES = [(48, 128, 64), (300, 1152, 1040), (1025, 768, 4096), (8200, 2432, 128)]
OPTIONS = [(name, {**PASSES[name], **more}) for name in NAMES for more in MORE[name]]


@pytest.mark.parametrize("dtype", [bfloat16, float16, float32], ids=str)
@pytest.mark.parametrize("fast", [False, True], ids=["split", "fast"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_every_bit_is_that_of_product_and_pass(
    name: str, options: dict[str, Any], size: Any, fast: bool, dtype: DType
) -> None:
    """But those of a bias' gradient, which is summed in another order: its cases in the contract say how
    near it is."""
    product = SimpleNamespace(
        fp8_gemm=hopper_gemm.fp8_gemm,
        block_gemm=hopper_gemm.block_gemm,
        act_fwd=activation.act_fwd,
        act_bwd=activation.act_bwd,
        quantize_transpose=quantize.quantize_transpose,
        block_quantize=block.block_quantize,
    )
    parts = SimpleNamespace(**dict(zip(NAMES, composed(product, fused_gemm.place, __name__), strict=True)))
    m, n, k = size
    found = []
    for kernels in (hopper_fused, parts):
        sampler = Sampler(dispatch.kernels(GPU), GPU, dtype)
        made = kernel_test(name).arguments(sampler, m, n, k=k, fast=fast, exact=False, **options)
        SPECS[name].call(kernels, made)
        found.append({output.name: host(output.view) for output in SPECS[name].outputs(made)})
    ours, theirs = found
    for output in ours.keys() - {"dbias"}:
        assert_same_bits(output, ours[output], theirs[output])


@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_a_layer_has_the_bits_of_products_and_passes(kind: str) -> None:
    """Of the own products, which add in the same order."""

    def trained() -> list[np.ndarray[Any, Any]]:
        random = np.random.default_rng(0)
        layer = fk.nn.LayerNormMLP(256, 512, activation=kind, params_dtype=bfloat16, device=GPU)
        for _, parameter in layer.named_parameters():
            value = random.standard_normal(parameter.shape) / 16
            arrays.copy(parameter.view, arrays.to(arrays.as_view(value.astype(bfloat16.numpy)), GPU))
        found = []
        for _ in range(3):
            x, g = (
                fk.tensor(
                    random.standard_normal((300, 256)).astype(bfloat16.numpy), device=GPU, requires_grad=which
                )
                for which in (True, False)
            )
            with fk.autocast(recipe=fk.recipe.DelayedScaling()):
                y = layer(x)
            y.backward(g)
            found += [get(y.view), get(x.grad)]
        return found

    with policy_context(SelectionPolicy(per_op=PRODUCTS)):
        wanted = trained()
    with policy_context(SelectionPolicy(per_op={**PRODUCTS, **ORDER})):
        for got, want in zip(trained(), wanted, strict=True):
            assert_same_bits("a step", got, want)
