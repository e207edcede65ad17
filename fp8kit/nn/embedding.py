"""``Embedding``, ``Dropout``, and the loss: ``cross_entropy``."""

from __future__ import annotations

from typing import Any

from fp8kit.arguments import function, number
from fp8kit.autograd import Tensor, apply
from fp8kit.errors import FormatError, ShapeError
from fp8kit.layers.arguments import size
from fp8kit.layers.base import spec_object
from fp8kit.nn import random
from fp8kit.nn.module import Module, as_tensor, make_parameter, resolve
from fp8kit.nn.random import Init, normal_init
from fp8kit.ops import cross_entropy as loss_op
from fp8kit.ops.dropout_add import dropout_add
from fp8kit.ops.embedding import EmbeddingSpec, embedding


class Embedding(Module):
    """y[...] = weight[ids[...]]. Parameter ``weight`` (num_embeddings, embedding_dim), normal(0, 0.023)
    unless ``init_method`` fills it."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        init_method: Init | None = None,
        params_dtype: Any = None,
        device: Any = None,
    ) -> None:
        for name, value in (("num_embeddings", num_embeddings), ("embedding_dim", embedding_dim)):
            size("Embedding", name, value)
        dtype, where = resolve("Embedding", params_dtype, device)
        init = function("Embedding", "init_method", normal_init() if init_method is None else init_method)
        self.weight = make_parameter((num_embeddings, embedding_dim), init, dtype, where)
        self._spec = EmbeddingSpec(num_embeddings, embedding_dim, dtype)

    def forward(self, ids: Any) -> Tensor:
        """``ids``: int32 or int64, any shape, in [0, num_embeddings); one out of range is an ArgumentError on
        the CPU and gives NaN on a GPU. Returns (*ids.shape, embedding_dim). FormatError for another dtype."""
        return apply(
            embedding,
            self._spec,
            {"ids": as_tensor("Embedding", "ids", ids), "table": self.weight},
            owner=self,
        )["y"]


class Dropout(Module):
    """While training, an element is dropped with probability ``p`` and the others are divided by 1 - p; else
    the identity.

    Drawn with Philox4x32-10 from the device's state (``fk.manual_seed``). FormatError for a ``p`` outside [0,
    1).
    """

    def __init__(self, p: float = 0.5) -> None:
        self._p = number("Dropout", "p", p, 1.0, FormatError)

    def forward(self, inp: Any) -> Tensor:
        """``inp``: h (..., N). Returns the same shape and dtype. ShapeError for no dimension, FormatError for
        another dtype; none of them where nothing is dropped."""
        x = as_tensor("Dropout", "inp", inp)
        if not self.training or self._p == 0:
            return x
        if not x.shape:
            raise ShapeError("Dropout", "inp", "no dimension", "at least one")
        spec = spec_object("DropoutAddSpec", x.shape[-1], self._p, True)
        return apply(dropout_add, spec, {"x": x}, owner=self, draw=random.next_rng)["y"]


def cross_entropy(
    logits: Any, targets: Any, reduction: str = "mean", label_smoothing: float = 0.0, ignore_index: int = -100
) -> Tensor:
    """Softmax cross entropy in nats, in float32.

    ``logits``: h (..., V); ``targets``: int32 or int64 (...,). ``reduction``: "mean" over the targets that
    are not ``ignore_index``, shape (1,), or "none", targets' shape. ``label_smoothing`` s mixes s / V into
    every class. A target that is neither in [0, V) nor ``ignore_index`` is an ArgumentError on the CPU; on a
    GPU, where targets are not checked, its loss is NaN. Raises ShapeError or FormatError for arrays that do
    not fit.
    """
    x = as_tensor("cross_entropy", "logits", logits)
    if not x.shape:
        raise ShapeError("cross_entropy", "logits", "no dimension", "(..., classes)")
    fields = x.shape[-1], reduction, label_smoothing, ignore_index
    try:
        spec = spec_object("CrossEntropySpec", *fields)
    except (TypeError, ValueError):  # one that has no hash: refused by name
        spec = loss_op.CrossEntropySpec(*fields)
    return apply(
        loss_op.cross_entropy, spec, {"logits": x, "targets": as_tensor("cross_entropy", "targets", targets)}
    )["loss"]
