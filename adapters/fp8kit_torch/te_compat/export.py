"""``transformer_engine.pytorch.export``: models as ONNX."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fp8kit.arguments import flag
from fp8kit_torch.constants import onnx_mode
from fp8kit_torch.te_compat.onnx_extensions import te_translation_table


@contextmanager
def onnx_export(enabled: bool = False) -> Iterator[None]:
    """Within it a model is exported for inference ::

        with te.onnx_export(True), te.autocast(recipe=recipe):
            torch.onnx.export(model.eval(), (x,), "model.onnx", dynamo=True, opset_version=20,
                              custom_translation_table=te_translation_table)

    (``te_translation_table`` of ``transformer_engine.pytorch.export``). No gradient is recorded. Products
    with one scale a tensor in E4M3, as ``Float8CurrentScaling`` and ``DelayedScaling`` have them, become
    MatMul of QuantizeLinear and DequantizeLinear; delayed scaling's scales are what they are at the export
    from then on. Other recipes are a NotImplementedError. ``enabled``: False
    does nothing. Needs the package ``onnxscript``.
    """
    flag("onnx_export", "enabled", enabled)
    if not enabled:
        yield
        return
    before, onnx_mode.on = onnx_mode.on, True
    try:
        with torch.no_grad():
            yield
    finally:
        onnx_mode.on = before


def is_in_onnx_export_mode() -> bool:
    """Whether ``onnx_export`` is on in this thread."""
    return onnx_mode.on


__all__ = ["is_in_onnx_export_mode", "onnx_export", "te_translation_table"]
