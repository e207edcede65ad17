"""``capture``: the real operands of every GEMM of a PyTorch model, of one batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fp8kit.arguments import function
from fp8kit.errors import ArgumentError, UnsupportedError
from fp8kit.numerics.capture import Dump, Recorder, called
from fp8kit_torch.autocast import autocast
from fp8kit_torch.views import as_view, has_kind


def capture(model: torch.nn.Module, batch: Any, loss: Callable[[Any], torch.Tensor] | None = None) -> Dump:
    """The operands of every GEMM of fp8kit's layers in ``model`` that multiplies a weight, of one batch, in
    high precision; not those of other modules, and, with a warning, not those of groups whose sizes stay on
    the device.

    ``batch``: what the model is called with: a tuple of arguments, a mapping of names, or one argument.
    ``loss``: a function of what the model gives to a tensor of one element; None where the model gives such a
    one. The model is called eagerly; parameters' ``grad`` and ``main_grad`` stay as they were. ``Dump.save``
    writes a file for ``fp8kit recipes compare``; see ``fk.numerics.capture``, whose errors these are;
    UnsupportedError also for weights that are held in FP8.
    """
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError("capture", "model", f"a {type(model).__name__}", "a torch.nn.Module")
    if loss is not None:
        function("capture", "loss", loss)
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "held_in_fp8"):
            wanted = "the model in high precision: outside of quantized_model_init"
            raise UnsupportedError("capture", name, "a weight that is held in FP8", wanted)
    parameters = {name: p for name, p in model.named_parameters() if has_kind(p.dtype) and p.is_contiguous()}
    recorder = Recorder({name: as_view(p.detach()) for name, p in parameters.items()})
    args, named = called(batch)
    before = {name: parameter.grad for name, parameter in model.named_parameters()}
    mains: list[tuple[Any, torch.Tensor, Any]] = [
        (p, main.clone(), getattr(p, "grad_added_to_main_grad", None))
        for p in model.parameters()
        if isinstance(main := getattr(p, "main_grad", None), torch.Tensor)
    ]
    try:
        for parameter in model.parameters():
            parameter.grad = None
        with recorder.recording():
            with autocast(enabled=False):
                out = model(*args, **named)
            value = out if loss is None else loss(out)
            if not isinstance(value, torch.Tensor) or value.numel() != 1:
                is_one = isinstance(value, torch.Tensor)
                got = f"shape {tuple(value.shape)}" if is_one else f"a {type(value).__name__}"
                raise ArgumentError("capture", "loss", got, "a function that gives a tensor of one element")
            value.backward()
    finally:
        for name, parameter in model.named_parameters():
            parameter.grad = before[name]
        for own, main, flag in mains:
            own.main_grad.copy_(main)
            if flag is not None:
                own.grad_added_to_main_grad = flag
    return recorder.dump()
