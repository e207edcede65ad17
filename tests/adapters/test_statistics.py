"""Statistics through the frontends: the same bytes in PyTorch, eager and compiled, and inside ``jax.jit``;
arrays of any library by ``tensor_statistics``."""

from __future__ import annotations

import fp8kit_jax as fj
import fp8kit_torch as ft
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from fp8kit import numerics
from fp8kit.numerics import statistics as own
from fp8kit.testing import assert_same_bits

NAMES = ("mean", "std", "exponents", "crest_factor", "mxfp8_sqnr", "nvfp4_mse_columnwise", "cosine")
X = np.random.default_rng(0).standard_normal((24, 64)).astype(np.float32)
TWIN = X + np.float32(0.01)


def test_the_same_bytes():
    needs = own.request(NAMES, "gradient")
    want = own.collect(X, needs, twin=TWIN).numpy()

    def torch_record(x, twin):
        given = own.inputs(needs, x, twin=twin)
        return ft.apply(own.operation, needs.spec, given)["record"]

    pair = torch.from_numpy(X.copy()), torch.from_numpy(TWIN.copy())
    compiled = torch.compile(torch_record, fullgraph=True, backend="aot_eager")
    for call in (torch_record, compiled):
        assert_same_bits("torch", call(*pair).numpy(), want)

    @jax.jit
    def jax_record(x, twin):
        return fj.apply(own.operation, needs.spec, own.inputs(needs, x, twin=twin))["record"]

    assert_same_bits("jax", np.asarray(jax_record(jnp.asarray(X), jnp.asarray(TWIN))), want)
    assert own.values(needs, want)["std"] == pytest.approx(np.std(X.astype(np.float64)), rel=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_arrays_of_any_library(dtype):
    x = torch.from_numpy(X.copy()).to(getattr(torch, dtype))
    asked = ("min", "mxfp8_sqnr", "nan_count")
    want = numerics.tensor_statistics(x, asked)
    assert want["min"] == float(x.min())
    assert want["nan_count"] == 0
    assert 28 < want["mxfp8_sqnr"] < 35
    for other in (jnp.asarray(X).astype(dtype), X.astype(jnp.dtype(dtype)), x.t().contiguous().t()):
        assert numerics.tensor_statistics(other, asked) == want
    assert numerics.tensor_statistics(x.clone().requires_grad_(), asked) == want
