"""Operands of products for the tests of operations: random arrays, recipes by tensor and by blocks."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8kit import arrays, formats
from fp8kit.arrays import ArrayView
from fp8kit.quantization import Quantization, Quantizer

RNG = np.random.default_rng(7)


LINE, SQUARE = "block_1x128", "block_128x128"


def by_tensor(source: str) -> Quantization:
    x, g = (Quantizer(fmt, scale_source=source) for fmt in (formats.E4M3, formats.E5M2))
    return Quantization.of(x, x, g)


def by_blocks(*granularities: str) -> Quantization:
    operands = (Quantizer(formats.E4M3, each, scale_rule="power_2") for each in granularities)
    return Quantization.of(*operands, fprop="split")


DELAYED, CURRENT, GIVEN = by_tensor("delayed"), by_tensor("current"), by_tensor("amax")


BLOCKS = by_blocks(LINE, SQUARE, LINE)


def normal(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape).astype(np.float32)


def one(value: float) -> ArrayView:
    return arrays.as_view(np.array([value], np.float32))


def cut(weight: np.ndarray[Any, Any], segments: tuple[int, ...], layout: str) -> list[np.ndarray[Any, Any]]:
    parts = np.split(weight, np.cumsum(segments)[:-1])
    return [np.ascontiguousarray(p if layout == "oi" or p.ndim == 1 else p.T) for p in parts]


def named(prefix: str, values: list[Any]) -> dict[str, Any]:
    return {f"{prefix}{i}": v for i, v in enumerate(values)}
