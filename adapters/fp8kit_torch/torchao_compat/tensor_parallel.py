"""``torchao.float8.float8_tensor_parallel``: styles for ``parallelize_module`` by torchao's names."""

from __future__ import annotations

from typing import Any

import torch

from fp8kit.errors import ArgumentError
from fp8kit_torch.parallel_styles import FP8ColwiseParallel, FP8RowwiseParallel, PrepareFP8ModuleInput


class Float8ColwiseParallel(FP8ColwiseParallel):
    """``FP8ColwiseParallel``."""


class Float8RowwiseParallel(FP8RowwiseParallel):
    """``FP8RowwiseParallel``."""


class PrepareFloat8ModuleInput(PrepareFP8ModuleInput):
    """``PrepareFP8ModuleInput``. Codes are cast by the linear layers, as their configuration says:
    ``float8_dtype`` is ``torch.float8_e4m3fn``, ArgumentError for another, and ``fwd_config_submodule_fqn``,
    which names a layer whose configuration counts, changes nothing."""

    def __init__(
        self,
        *,
        float8_dtype: torch.dtype = torch.float8_e4m3fn,
        fwd_config_submodule_fqn: str | None = None,
        **arguments: Any,
    ) -> None:
        if float8_dtype is not torch.float8_e4m3fn:
            raise ArgumentError(
                "PrepareFloat8ModuleInput", "float8_dtype", float8_dtype, "torch.float8_e4m3fn"
            )
        super().__init__(**arguments)


__all__ = ["Float8ColwiseParallel", "Float8RowwiseParallel", "PrepareFloat8ModuleInput"]
