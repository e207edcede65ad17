"""Operations that are no layer of their own: ``cross_entropy``, ``embedding``, ``dropout_add``; and
``dropout_seed``, what dropout draws from torch's own generators, so that ``torch.manual_seed`` rules it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8kit.errors import FormatError, ShapeError
from fp8kit.ops.cross_entropy import cross_entropy as cross_entropy_op
from fp8kit.ops.dropout_add import dropout_add as dropout_add_op
from fp8kit.ops.embedding import embedding as embedding_op
from fp8kit_torch.bound import TensorMeta, validate
from fp8kit_torch.call import apply
from fp8kit_torch.checks import CALLED, check
from fp8kit_torch.layer import next_rng
from fp8kit_torch.parameters import placed
from fp8kit_torch.specs import spec_for
from fp8kit_torch.views import FLOATS


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
) -> Tensor:
    """Softmax cross entropy in nats, in float32; differentiable in logits.

    ``logits``: h (..., V); ``targets``: int32 or int64 (...,). ``reduction``: "mean" over the targets that
    are not ``ignore_index``, shape (1,), or "none", targets' shape. ``label_smoothing`` s mixes s / V into
    every class. Raises ShapeError or FormatError.
    """
    if not torch.compiler.is_compiling():
        check("cross_entropy", CALLED, locals())
    if logits.ndim == 0:
        raise ShapeError("cross_entropy", "logits", "no dimension", "(..., classes)")
    spec = spec_for("CrossEntropySpec", logits.shape[-1], reduction, float(label_smoothing), ignore_index)
    return apply(cross_entropy_op, spec, {"logits": logits, "targets": targets})["loss"]


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """table[ids]: int32 or int64 ids of any shape in [0, V), h (V, N); differentiable in table. An id out of
    range gives NaN."""
    if not torch.compiler.is_compiling():
        check("embedding", CALLED, locals())
    if table.ndim != 2:
        raise ShapeError("embedding", "table", f"shape {tuple(table.shape)}", "(ids, features)")
    if table.dtype not in FLOATS:
        raise FormatError("embedding", "table", table.dtype, "float32, bfloat16 or float16")
    spec = spec_for("EmbeddingSpec", *table.shape, str(table.dtype).removeprefix("torch."))
    return apply(embedding_op, spec, {"ids": ids, "table": table})["y"]


def dropout_add(
    x: Tensor,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    p: float = 0.0,
    training: bool = True,
) -> Tensor:
    """residual + dropout(x + bias), in one pass: h (..., N), (..., N) and (N,); differentiable in all three.

    ``p``: probability of dropping an element while ``training``, drawn from torch's generator. Raises
    ShapeError or FormatError.
    """
    if not torch.compiler.is_compiling():
        check("dropout_add", CALLED, locals())
    if x.ndim == 0:
        raise ShapeError("dropout_add", "x", "no dimension", "(..., features)")
    p = float(p) if training else 0.0
    spec = spec_for("DropoutAddSpec", x.shape[-1], p, True)
    inputs = {"x": x, "bias": bias, "residual": residual}
    if p:
        there = {name: value for name, value in inputs.items() if value is not None}
        # a draw changes the generator's state
        validate(dropout_add_op, spec, {**there, "rng": TensorMeta((2,), torch.int64, x.device)})
        inputs["rng"] = next_rng(x.device)
    return apply(dropout_add_op, spec, inputs)["y"]


def dropout_seed(device: Any = None) -> Tensor:
    """What a layer draws for one operation that drops: ``(seed, offset)``, int64 (2,) on ``device``, from
    torch's default generator there.

    ``device``: as for parameters. A layer draws one each for attention's dropout, a branch's dropout and its
    dropped paths, in the order in which they run. So ``with fk.draw_from(fp8kit_torch.dropout_seed):`` gives
    a native layer the numbers that the same torch layer has after the same ``torch.manual_seed``. Raises
    ArgumentError or BackendError for what is no device, or none of this machine.
    """
    return next_rng(placed("dropout_seed", device))
