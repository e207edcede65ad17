"""Values that no argument of a public name can be, or hardly any."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import torch

from tests.support.effort import FACTOR

# Python's own protocols ask for another error there
PYTHONS = {"Tensor.__add__": TypeError, "QuantizedArray.__getitem__": IndexError}
# handed to the user's function, whose errors are the user's
USERS = {("checkpoint", "x"), ("nn.Module.apply", "function")}


class Capsule:
    """What says that it speaks DLPack, and does not."""

    def __init__(self, device, capsule=object()):  # noqa: B008
        self.device, self.capsule = device, capsule

    def __dlpack__(self, **options):
        return self.capsule

    def __dlpack_device__(self):
        return self.device


class Interface:
    """Memory of a GPU that is not there, or half a description of some."""

    def __init__(self, **parts):
        self.__cuda_array_interface__ = parts


JUNK = [
    None,
    "word",
    b"bytes",
    -1,
    0,
    1.5,
    -0.5,
    float("nan"),
    float("inf"),
    2**70,
    -(2**70),
    True,
    (),
    [],
    {},
    object(),
    np.float64(0.5),
    np.int64(3),
    1j,
    np.zeros((2, 3), np.float32),
    np.zeros(0, np.float32),
    np.array(["a"]),
    np.zeros((2, 2), complex),
    [1, "a"],
    ["a", "b"],
    (1, 2, 3),
    {"a": 1},
    {1: 2},
    {"x": object()},
    np.float32,
    "",
    "E4M3",
    np.ones((3, 4), np.float16),
    np.timedelta64(1, "s"),
    np.array(1.0, np.float32),
    np.zeros(3, [("a", "f4"), ("b", "i4")]),
    np.ones((3, 4), ">f4"),
    Capsule((1, 0)),
    Capsule(None),
    Interface(),
    np.broadcast_to(np.float32(1), (2**40, 4)),
    torch.zeros(3, 4, device="meta"),
    "cuda:99",
]
X = np.linspace(-3, 3, 12, dtype=np.float32).reshape(3, 4)
READ_ONLY = X.copy()
READ_ONLY.flags.writeable = False
MORE = [
    np.array([object()]),
    np.zeros((3, 4), [("a", "f4")])["a"],
    X[:, ::2],
    X.T,
    X[::-1],
    READ_ONLY,
    np.zeros((0, 4), np.float32),
    np.full((3, 4), np.nan, np.float32),
    np.full((3, 4), np.inf, np.float32),
    [[1.0, 2], [3]],
    [[1.0, 2.0], [3.0, 4.0]],
    "cpu",
    "float64",
    "complex64",
    2**63,
    -(2**63),
    1e308,
    1e-320,
    np.bool_(True),
    np.float16(1),
    np.datetime64("2020"),
    np.ma.array(X),
    torch.zeros(3, 4),
    torch.zeros(3, 4, requires_grad=True),
    torch.zeros(3, 4, dtype=torch.complex64),
    torch.zeros(3, 4).to_sparse(),
    Capsule((99, 0)),
    torch.zeros(3, 4, dtype=torch.bfloat16).T,
    jnp.zeros((3, 4)),
    jnp.zeros((3, 4), jnp.int4),
    Capsule((1, 0), None),
    Ellipsis,
    Interface(shape=(2, 3), typestr="<f4", data=(0, False), version=3),
    range(3),
    slice(1),
    {1},
    "\0",
    "a" * 10000,
    X.astype(np.float64),
    X.astype(np.int32),
    np.zeros((3, 4), bool),
    np.zeros((1,) * 30, np.float32),
    (True, False),
    (1.5, 2),
    ("a",),
    [None],
    {"a": None},
]
JUNK += MORE if FACTOR else []
