"""``parallel_cross_entropy``: softmax cross entropy in one pass over the logits, in float32, and its gradient
from the log-sum-exp."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fp8kit.arguments import flag
from fp8kit.errors import FormatError, ShapeError
from fp8kit.ops.cross_entropy import cross_entropy as cross_entropy_op
from fp8kit_torch.call import prepare, run
from fp8kit_torch.checks import CALLED, check, of_one
from fp8kit_torch.functional import cross_entropy
from fp8kit_torch.specs import spec_for


class _Overwritten:
    """Where the gradient goes, as ``MainGrads`` says it: into the logits' own memory."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def buffers(self, needs: tuple[str, ...]) -> dict[str, Tensor]:
        """The logits."""
        return {"logits": self.logits}

    def placeholder(self, name: str, buffer: Tensor, dtype: torch.dtype) -> Tensor:
        """The gradient; who would read the logits once more is told by their version."""
        increment_version(buffer)
        return buffer


def parallel_cross_entropy(
    inp: Tensor | None = None,
    target: Tensor | None = None,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: object = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
    *,
    overwrite_input: bool = False,
    _input: Tensor | None = None,
) -> Tensor:
    """The loss of each token, float32 of ``target``'s shape, or with ``reduce_loss`` their mean over what is
    not ignored, float32 ().

    * ``inp``: logits, float32, bfloat16 or float16, (..., classes), any order of batch and sequence.
      ``_input``: its deprecated name.
    * ``target``: int32 or int64, ``inp``'s shape without the last dimension; ``ignore_idx`` where there is no
      loss. One out of range is an ArgumentError on the CPU; on a GPU, where nobody looks, its loss is NaN.
    * ``label_smoothing``: s in [0, 1): loss = logsumexp - (1 - s) * logit of the target - s * mean of the
      logits.
    * ``dist_process_group``: None or a group of one process; logits split over several are a
      NotImplementedError.
    * ``is_cg_capturable``: nothing here waits for the device, so it has nothing to change.
    * ``overwrite_input``: backward writes the gradient over ``inp``, which must be contiguous and not be read
      afterwards; a second pass is torch's RuntimeError. Within ``torch.compile`` the gradient has memory of
      its own.

    Raises ShapeError, FormatError, ArgumentError and BackendError.
    """
    op = "parallel_cross_entropy"
    if _input is not None:
        if inp is not None:
            raise FormatError(op, "_input", "inp and _input", "one of them")
        warnings.warn(
            "parallel_cross_entropy: _input is deprecated, use inp", DeprecationWarning, stacklevel=2
        )
        inp = _input
    if inp is None or target is None:
        raise ShapeError(op, "inp" if inp is None else "target", None, "a tensor")
    if not torch.compiler.is_compiling():
        check(op, CALLED, locals())
    of_one(op, "dist_process_group", dist_process_group)
    if inp.ndim < 1 or target.numel() != inp.numel() // max(inp.size(-1), 1):
        raise ShapeError(
            op, "target", tuple(target.shape), f"{tuple(inp.shape[:-1])}, a class for each token"
        )
    if flag(op, "overwrite_input", overwrite_input) and not inp.is_contiguous():
        wanted = "contiguous logits, with overwrite_input"
        raise ShapeError(op, "inp", f"strides {tuple(inp.stride())}", wanted)
    targets = target.reshape(inp.shape[:-1])
    how = "mean" if reduce_loss else "none", float(label_smoothing), int(ignore_idx)
    if overwrite_input and not torch.compiler.is_compiling():
        spec = spec_for("CrossEntropySpec", inp.shape[-1], *how)
        prepared = prepare(cross_entropy_op, spec, {"logits": inp, "targets": targets})
        loss = run(*prepared, main=_Overwritten(inp.detach()))["loss"]  # type: ignore[arg-type]
    else:
        loss = cross_entropy(inp, targets, *how)
    return loss.reshape(()) if reduce_loss else loss.reshape(target.shape)


# Transformer Engine has a module of that name
cross_entropy.parallel_cross_entropy = parallel_cross_entropy  # type: ignore[attr-defined]
