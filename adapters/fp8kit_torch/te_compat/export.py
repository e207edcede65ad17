"""``transformer_engine.pytorch.export``: models as ONNX."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fp8kit.arguments import flag
from fp8kit.errors import UnsupportedError
from fp8kit.scoped import changed
from fp8kit_torch import torch_compat
from fp8kit_torch.constants import onnx_mode
from fp8kit_torch.te_compat.onnx_extensions import TRANSLATED, check, te_translation_table


@contextmanager
def onnx_export(enabled: bool = False) -> Iterator[None]:
    """Within it a model is exported for inference ::

        with te.onnx_export(True), te.autocast(recipe=recipe):
            torch.onnx.export(model.eval(), (x,), "model.onnx", dynamo=True, opset_version=20,
                              custom_translation_table=te_translation_table)

    (``te.te_translation_table``, in Transformer Engine ``transformer_engine.pytorch.export``'s). No gradient
    is recorded. Products with one scale a tensor in E4M3, as ``Float8CurrentScaling`` and ``DelayedScaling``
    have them, become MatMul of QuantizeLinear and DequantizeLinear; delayed scaling's scales are what they
    are at the export from then on. ``enabled``: False does nothing. Needs the package ``onnxscript``.

    UnsupportedError, a NotImplementedError, for another recipe, for an operation that has no translation, and
    for an export without the table; torch's own error is its cause.
    """
    flag("onnx_export", "enabled", enabled)
    if not enabled:
        yield
        return
    try:
        with changed(onnx_mode, on=True, check=check), torch.no_grad():
            yield
    except torch.onnx.OnnxExporterError as error:
        found = _explained(error)
        if found is None:
            raise
        raise found from error


def _explained(error: BaseException | None) -> UnsupportedError | None:
    """What fp8kit has to say of the exporter's error; None where that is all torch's own."""
    while error is not None:
        if isinstance(error, UnsupportedError):
            return UnsupportedError(*error.args)
        missing = torch_compat.untranslated(error)
        if missing in TRANSLATED:
            wanted = "torch.onnx.export(..., custom_translation_table=te.te_translation_table)"
            got = f"none of {missing}"
            return UnsupportedError("onnx_export", "custom_translation_table", got, wanted)
        if missing:
            wanted = f"operations of {', '.join(sorted(TRANSLATED))}"
            return UnsupportedError("onnx_export", "model", missing, wanted)
        error = error.__cause__
    return None


def is_in_onnx_export_mode() -> bool:
    """Whether ``onnx_export`` is on in this thread."""
    return onnx_mode.on


__all__ = ["is_in_onnx_export_mode", "onnx_export", "te_translation_table"]
