"""Products of codes whose blocks have scales in E8M0 or E4M3, by tensor cores that take both: which chips
have them, and of which operands.

cuBLASLt multiplies E4M3 and E5M2 (not E5M2 twice) by MX's blocks of 32, and E2M1 by NVFP4's of 16 (its
documentation, cublasLtMatmul and cublasLtMatmulMatrixScale_t). The tensor cores have MX's formats of 6 and 4
bits besides (PTX ISA, tcgen05.mma, kinds mxf8f6f4 and mxf4), which no mode of it asks for.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from fp8kit import arrays
from fp8kit.errors import BackendError
from fp8kit.formats import E2M1, E4M3, E5M2, Format
from fp8kit.quantization import Gemm, Quantization

CAPABILITY = (10, 0)  # the least compute capability of a chip that has them
UNTRIED = "simulated, not run on such a chip"
# granularity -> the tile that ``block_gemm`` is told of. A square's scale is given for each of its rows
TILES = {"mx_1x32": (1, 32), "mx_32x32": (1, 32)} | dict.fromkeys(
    ("nvfp4_1x16", "nvfp4_16x16", "nvfp4_row_1x16"), (1, 16)
)
_TAKEN = "E4M3 and E5M2 (not E5M2 twice) by MX's blocks of 32, and E2M1 by NVFP4's of 16"


def takes_scales(where: object) -> bool:
    """Whether the tensor cores of a device (a Device, or what ``arrays.device`` takes for one) multiply codes
    by the scales of their blocks. False for a device that is not here."""
    try:
        device = arrays.device(where)
        arch = getattr(arrays.provider(device), "arch", None)
        return arch is not None and arch(device) >= 10 * CAPABILITY[0] + CAPABILITY[1]
    except (BackendError, RuntimeError):  # CuPy's own kind: no driver, no such device
        return False


def refusal(a: Format, a_scaling: str, b: Format, b_scaling: str) -> str:
    """Why such tensor cores do not multiply codes of these formats and scalings, "" where they do."""
    tile, formats = TILES.get(a_scaling), {a, b}
    known = {E2M1} if tile == (1, 16) else {E4M3, E5M2}
    fits = tile is not None and tile == TILES.get(b_scaling) and formats <= known and formats != {E5M2}
    return "" if fits else f"this chip's tensor cores take {_TAKEN}"


def gemm_refusal(gemm: Gemm) -> str:
    """Why they do not compute a layer's GEMM, "" where they do."""
    if gemm.compute != "quantized" or gemm.plain:
        return "they take codes on both sides"
    if gemm.emulated or not isinstance(gemm.how, bool):
        return "its products, or its sums, are to be emulated"
    return refusal(gemm.a.format, gemm.a.granularity, gemm.b.format, gemm.b.granularity)


@lru_cache(maxsize=256)
def _scaled(quantization: Quantization) -> Quantization | None:
    if not all(isinstance(gemm.how, bool) for gemm in quantization.gemms.values()):
        return None  # sums are a chip's, with the same bits on every device
    own = {
        name: replace(gemm, scaled=True)
        for name, gemm in quantization.gemms.items()
        if not gemm_refusal(gemm)
    }
    return replace(quantization, **own) if own else None


def scaled(quantization: Quantization) -> Quantization:
    """Returns the same with its GEMMs on codes (``Gemm.scaled``), those that such tensor cores compute; the
    same object where there is none."""
    return _scaled(quantization) or quantization


def for_arch(quantization: Quantization, arch: str) -> Quantization:
    """``scaled``, for an architecture that has such tensor cores ("sm_100a"); the same object for others."""
    major, minor = CAPABILITY
    return scaled(quantization) if int(arch[3:].rstrip("af")) >= 10 * major + minor else quantization


def for_device(quantization: Quantization, where: object) -> Quantization:
    """``scaled``, on a device that has such tensor cores; the same object elsewhere."""
    own = scaled(quantization)
    return own if own is not quantization and takes_scales(where) else quantization
