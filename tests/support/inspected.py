"""What tests of the inspector look at: one small model in each frontend, with the same numbers, and the
tensors of its GEMMs by NumPy."""

from __future__ import annotations

import numpy as np

import fp8kit as fk
from fp8kit import nn, recipe
from fp8kit.inspection import TENSORS
from fp8kit.testing.compare import assert_close

ROWS, HIDDEN, INNER, OUT = 32, 64, 128, 96
_rng = np.random.default_rng(7)
X = _rng.standard_normal((ROWS, HIDDEN)).astype(np.float32)
G = _rng.standard_normal((ROWS, OUT)).astype(np.float32)
W1 = (_rng.standard_normal((INNER, HIDDEN)) * 0.05).astype(np.float32)
W2 = (_rng.standard_normal((HIDDEN, INNER)) * 0.05).astype(np.float32)
W3 = (_rng.standard_normal((OUT, HIDDEN)) * 0.05).astype(np.float32)
RECIPES = {
    "delayed": recipe.DelayedScaling(),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "high precision": None,
}
STATS = ["min", "max", "mean", "std", "l1_norm", "l2_norm", "cur_amax", "kurtosis", "exponents"]
TWINS = {"output": "fprop", "dgrad": "dgrad", "wgrad": "wgrad"}
TWIN_STATS = {"enabled": True, "tensors": list(TWINS), "stats": ["sqnr", "cosine", "relative_error"]}
LAYERS = ("mlp.fc1", "mlp.fc2", "out")


def section(features, layers=None, **more):
    """A configuration of one section, of all layers unless said otherwise."""
    chosen = {"layer_types": ["all"]} if layers is None else layers
    return {"section": {"enabled": True, "layers": chosen, "transformer_engine": features, **more}}


def logged(stats, tensors=TENSORS, **more):
    """A feature LogTensorStats."""
    return {"LogTensorStats": {"enabled": True, "tensors": list(tensors), "stats": list(stats), **more}}


class Native(nn.Module):
    """The model: an MLP with its norm, and a Linear."""

    def __init__(self, dtype=fk.float32):
        super().__init__()
        self.mlp = nn.LayerNormMLP(HIDDEN, INNER, bias=False, params_dtype=dtype, eps=1e-6)
        self.out = nn.Linear(HIDDEN, OUT, bias=False, params_dtype=dtype)
        for module, name, values in (
            (self.mlp, "fc1_weight", W1),
            (self.mlp, "fc2_weight", W2),
            (self.out, "weight", W3),
        ):
            module.write(name, values)

    def forward(self, x):
        return self.out(self.mlp(x))

    def train_step(self, recipe=None, rows=slice(None), checkpoint=False):
        """y, the gradients of x and of the parameters, as bytes."""
        x = fk.tensor(X[rows], dtype=self.out.weight.dtype)
        x.requires_grad = True
        with fk.autocast(enabled=recipe is not None, recipe=recipe):
            y = fk.checkpoint(self, x) if checkpoint else self(x)
        y.backward(fk.tensor(G[rows], dtype=self.out.weight.dtype))
        made = [y.view, x.grad, *(p.grad for p in self.parameters())]
        for parameter in self.parameters():
            parameter.grad = None
        return [np.asarray(view.numpy()).tobytes() for view in made]


def by_name(rows):
    """Values by (layer, tensor, stat) of rows of one step."""
    return {(row["layer"], row["tensor"], row["stat"]): row["value"] for row in rows}


def assert_product(got, a, b):
    """A float32 product of two float32 matrices: every sum of K terms has an error of K roundings at most."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    slack = a.shape[1] * 2.0**-24 * (np.abs(a) @ np.abs(b))
    assert_close("product", got.numpy(), a @ b, "float32", slack)
