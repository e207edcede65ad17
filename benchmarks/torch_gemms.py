"""The FP8 product alone: fp8kit's beside torch's, which both call cuBLASLt, and torch's in bfloat16."""

from __future__ import annotations

from collections.abc import Callable

import fp8kit_torch as ft
import torch
from torch import Tensor

from benchmarks.torch_timing import Step
from fp8kit import arrays
from fp8kit.backends import dispatch
from fp8kit.formats import E4M3

CORNER = 64  # rows and columns of the result that are compared with float64
BOUND = 2.0**-7  # bfloat16's rounding of the result and the tensor cores' 14-bit sums


def products(shape: tuple[int, int, int], device: torch.device, generator: torch.Generator) -> tuple[dict[str, Callable[[], Step]], Tensor]:
    """Cases of out (rows, columns) = a (rows, depth) @ b (columns, depth).T, and the corner of the exact result of the FP8 codes.

    ``shape``: rows, columns, depth. A case makes what it needs and returns a call that gives out. All multiply the same values:
    bfloat16 holds those of E4M3 times a power of two exactly.
    """
    rows, columns, depth = shape
    wide = [torch.randn(n, depth, generator=generator, device=device) for n in (rows, columns)]
    codes = [w.mul_(64).to(torch.float8_e4m3fn) for w in wide]  # normal values reach 6 sigma at most here: 384 of 448
    inverse = torch.full((1,), 2.0**-6, device=device)
    del wide
    corner = [code[:CORNER].double() * 2.0**-6 for code in codes]

    def fp8kit() -> Step:
        a, b = (ft.as_view(code.view(torch.uint8)) for code in codes)
        out = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
        view, scale = ft.as_view(out), ft.as_view(inverse)
        kernels = dispatch.kernels(view.device)
        scratch = torch.empty(max(kernels.fp8_gemm_workspace(rows, columns), 1), dtype=torch.uint8, device=device)
        workspace, stream = ft.as_view(scratch), arrays.current_stream(view.device)

        def call() -> Tensor:
            kernels.fp8_gemm(a, b, view, E4M3, E4M3, scale, scale, None, False, True, workspace, stream)
            return out

        return call

    def scaled_mm() -> Step:
        a, b, scale = codes[0], codes[1].t(), inverse.reshape(())
        return lambda: torch._scaled_mm(a, b, scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True)

    def bfloat16() -> Step:
        a, b = (code.bfloat16().mul_(2.0**-6) for code in codes)
        return lambda: torch.mm(a, b.t())

    return {"torch.mm bf16": bfloat16, "torch._scaled_mm FP8": scaled_mm, "fp8kit FP8": fp8kit}, corner[0] @ corner[1].T
