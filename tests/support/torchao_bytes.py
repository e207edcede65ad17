"""Writes ``tests/formats/data/torchao_mx_scales.npz``: torchao's E8M0 scale of every bfloat16 amax.

torchao is no dependency of the tests; its bytes are kept. To make them again, with torch and torchao 0.18.0
installed, from the root of the tree::

    python -m tests.support.torchao_bytes
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fp8kit.formats import E2M1, E4M3, E5M2, Format

PATH = Path(__file__).parents[1] / "formats" / "data" / "torchao_mx_scales.npz"
FORMATS = (E4M3, E5M2, Format("E3M2", 3, 2, special="none"), Format("E2M3", 2, 3, special="none"), E2M1)
RULES = ("floor", "ceil", "even", "rceil")
AMAXES = 1 << 15  # bfloat16 values without a sign, in the order of their bits


def main() -> None:
    """One array a format and rule, uint8 (``AMAXES``,), named ``E4M3_floor``."""
    import torch
    import torchao
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    assert torchao.__version__.split("+")[0] == "0.18.0", torchao.__version__
    kinds: dict[str, Any] = {
        "E4M3": torch.float8_e4m3fn,
        "E5M2": torch.float8_e5m2,
        "E3M2": "fp6_e3m2",
        "E2M3": "fp6_e2m3",
        "E2M1": torch.float4_e2m1fn_x2,
    }
    blocks = torch.zeros(AMAXES, 32, dtype=torch.bfloat16)
    blocks[:, 0] = torch.arange(AMAXES, dtype=torch.int16).view(torch.bfloat16)
    found = {
        f"{fmt}_{rule}": to_mx(blocks, kinds[fmt.name], 32, ScaleCalculationMode[rule.upper()])[0]
        for fmt in FORMATS
        for rule in RULES
    }
    bytes_ = {name: scales.view(torch.uint8).reshape(-1).numpy() for name, scales in found.items()}
    np.savez_compressed(PATH, **bytes_)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
