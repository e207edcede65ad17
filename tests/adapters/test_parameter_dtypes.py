"""A dtype that parameters cannot have, and what is no dtype, is a FormatError in every frontend, before a
parameter is made."""

from __future__ import annotations

import fp8kit_jax.flax as linen
import fp8kit_jax.nnx as nnx_layers
import fp8kit_torch as ft
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from fp8kit import nn
from fp8kit.errors import FormatError

KNOWN = "float32, bfloat16, float16"
# frontend -> (makes layers of a dtype, its dtypes by their names)
X = np.ones((2, 4), np.float32)
FRONTENDS = {
    "native": (
        [
            lambda dtype: nn.Linear(4, 4, params_dtype=dtype, device="cpu"),
            lambda dtype: nn.TransformerLayer(8, 8, 2, params_dtype=dtype, device="cpu"),
            lambda dtype: nn.RMSNorm(4, dtype=dtype, device="cpu"),
            lambda dtype: nn.Embedding(4, 4, params_dtype=dtype, device="cpu"),
            lambda dtype: nn.InferenceParams(1, 2, dtype=dtype, device="cpu"),
        ],
        lambda name: name,
    ),
    "torch": (
        [
            lambda dtype: ft.Linear(4, 4, params_dtype=dtype, device="cpu"),
            lambda dtype: ft.TransformerLayer(8, 8, 2, params_dtype=dtype, device="cpu"),
            lambda dtype: ft.RMSNorm(4, dtype=dtype, device="cpu"),
            lambda dtype: ft.GroupedLinear(2, 4, 4, params_dtype=dtype, device="cpu"),
            lambda dtype: ft.InferenceParams(1, 2, dtype=dtype, device="cpu"),
        ],
        lambda name: getattr(torch, name),
    ),
    "flax": (
        [
            lambda dtype: linen.DenseGeneral(4, dtype=dtype).init(jax.random.key(0), X),
            lambda dtype: linen.LayerNorm(dtype=dtype).init(jax.random.key(0), X),
        ],
        lambda name: getattr(jnp, name),
    ),
    "nnx": (
        [lambda dtype: nnx_layers.DenseGeneral(4, 4, dtype=dtype, rngs=nnx.Rngs(0))],
        lambda name: getattr(jnp, name),
    ),
}
PLACES = [
    pytest.param(make, dtypes, id=f"{frontend}{i}")
    for frontend, (layers, dtypes) in FRONTENDS.items()
    for i, make in enumerate(layers)
]


@pytest.mark.parametrize("name", ["int8", "float8_e4m3fn", "complex64", "bool"])
@pytest.mark.parametrize(("make", "dtypes"), PLACES)
def test_another_dtype(make, dtypes, name):
    name = f"{name}_" if name == "bool" and dtypes("int8") is jnp.int8 else name
    with pytest.raises(FormatError, match=f"dtype: got .*{name.rstrip('_')}.*, expected one of {KNOWN}"):
        make(dtypes(name))


@pytest.mark.parametrize(
    "value", [3.5, "nonsense", [torch.float32], X], ids=["number", "word", "list", "array"]
)
@pytest.mark.parametrize(("make", "dtypes"), PLACES)
def test_no_dtype(make, dtypes, value):
    with pytest.raises(FormatError, match=r"dtype: got .*, expected "):
        make(value)


@pytest.mark.parametrize(("make", "dtypes"), PLACES)
def test_a_dtype_of_parameters(make, dtypes):
    for name in ("float32", "bfloat16", "float16"):
        make(dtypes(name))


def test_torchs_default_dtype_is_asked_too():
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(FormatError, match=f"^Linear: params_dtype: got float64, expected one of {KNOWN}"):
            ft.Linear(4, 4, device="cpu")
    finally:
        torch.set_default_dtype(torch.float32)
