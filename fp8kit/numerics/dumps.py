"""Tensors in files: DumpTensors."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fp8kit.errors import ArgumentError
from fp8kit.float8 import quantize
from fp8kit.inspection import Entry
from fp8kit.numerics.config import Dumped
from fp8kit.numerics.whatif import CAST, cast_of
from fp8kit.quantization import Quantization

Save = Callable[[Mapping[str, Any], Path], None]
_NO_NAME = re.compile(r"[^A-Za-z0-9_-]")


class Dumps:
    """Writes ``folder/tensor_dumps/rank_RANK/iter_NNNNNN/LAYER_TENSOR.ending``, dots in names as ``_``.
    ``save(arrays by name, path)`` writes one file: "high_precision", the tensor as a matrix, and "quantized"
    where the layer casts it, the values of its codes by the recipe, without those scales of earlier steps
    that only the layer knows. Of a second micro-batch, or a further segment, the name ends in ``_1``."""

    def __init__(self, folder: str | os.PathLike[str], save: Save, ending: str, rank: int = 0) -> None:
        self._folder = Path(folder) / "tensor_dumps" / f"rank_{rank}"
        self._save, self._ending = save, ending

    def write(
        self, step: int, entry: Entry, array: Any, asked: Dumped, quantization: Quantization | None
    ) -> None:
        """Write one tensor."""
        arrays: dict[str, Any] = {"high_precision": array} if asked.plain else {}
        if asked.cast and entry.tensor in CAST and quantization is not None:
            with contextlib.suppress(ArgumentError):  # of a tensor that the first GEMM takes as it is
                arrays["quantized"] = _quantized(on_host(array), entry.tensor, quantization)
        if not arrays:
            return
        folder = self._folder / f"iter_{step:06d}"
        stem = _NO_NAME.sub("_", f"{entry.layer}_{entry.tensor}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            taken = sum(1 for number in range(4096) if (folder / _file(stem, number, self._ending)).exists())
            self._save(arrays, folder / _file(stem, taken, self._ending))
        except (OSError, RuntimeError) as error:  # torch's own of a file is a RuntimeError
            wanted = f"a folder in which tensors can be written ({getattr(error, 'strerror', None) or error})"
            raise ArgumentError("inspect", "log_dir", str(folder), wanted) from None


def _file(stem: str, number: int, ending: str) -> str:
    return f"{stem}{f'_{number}' if number else ''}{ending}"


def _quantized(array: Any, tensor: str, quantization: Quantization) -> Any:
    """Returns the values that the codes of a tensor stand for, float32, rounded to nearest."""
    own, along = cast_of("quantized_tensor", tensor, quantization, False, False)
    scale = own.static_scale if own.static else None
    made = quantize(
        np.asarray(array, np.float32),
        own.format,
        scale,
        own.granularity,
        scale_rule=None if own.static else own.scale_rule,
        along=-1 if along else 0,
        hadamard=own.hadamard,
        signs="te" if own.signs == "random" else own.signs,
    )
    return np.asarray(made.dequantize(), np.float32)


def on_host(array: Any) -> np.ndarray[Any, Any]:
    """Returns an array of a frontend on the host, as NumPy has it; bfloat16 of PyTorch as float32."""
    if hasattr(array, "detach"):
        array = array.detach().cpu()
        if str(array.dtype) == "torch.bfloat16":
            array = array.float()
    made: Any = array.numpy() if hasattr(array, "numpy") else array
    return np.asarray(made)
