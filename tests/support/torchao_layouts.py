"""What torchao's functions make of codes and scales, for ``tests/formats/test_quantized_array.py``.

``python -m tests.support.torchao_layouts tests/formats/data/torchao_layouts.npz`` with torchao 0.18.0, which
the tests do not need, writes the file anew.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

SIZES = ((1, 1), (3, 5), (128, 4), (130, 9), (256, 8), (300, 17))


def layouts() -> dict[str, Any]:
    """Codes of 4 bits and pairs of them in a byte; matrices of scales and their blocked layout."""
    import torch
    from torchao.prototype.mx_formats.kernels import pack_uint4
    from torchao.prototype.mx_formats.utils import to_blocked

    random = np.random.default_rng(0)
    codes = random.integers(0, 16, (7, 24), np.uint8)
    found = {"codes": codes, "packed": pack_uint4(torch.from_numpy(codes)).numpy()}
    for rows, columns in SIZES:
        scales = random.integers(0, 256, (rows, columns), np.uint8)
        found[f"scales_{rows}x{columns}"] = scales
        found[f"blocked_{rows}x{columns}"] = to_blocked(torch.from_numpy(scales)).numpy().reshape(-1)
    return found


if __name__ == "__main__":
    np.savez_compressed(sys.argv[1], **layouts())
