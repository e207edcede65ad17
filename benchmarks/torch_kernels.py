"""torch's own FP8 and bfloat16 products, and its attention, beside fp8kit's: peers of the parts ``gemm`` and
``attention``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from fp8kit.bench.gemms import CORNER, Operands
from fp8kit.bench.skeleton import AttentionRun
from fp8kit.bench.timing import Step
from fp8kit.testing import relative_error

Made = tuple[Step, Callable[[], float]]
_TYPES = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}


def products(given: Operands) -> Mapping[str, Callable[[], Made]]:
    """``torch._scaled_mm`` and ``torch.mm`` on the same values: bfloat16 holds those of FP8 times a power of
    two exactly."""
    formats = (_TYPES[given.product.a.name], torch.float8_e4m3fn)
    a, b = (torch.from_dlpack(view).view(kind) for view, kind in zip(given.codes, formats, strict=True))
    a_inv, b_inv = (torch.from_dlpack(view) for view in given.inverse)
    out: list[Tensor] = []

    def error() -> float:
        return relative_error(out[-1][:CORNER, :CORNER].float().cpu().numpy(), given.exact())

    def scaled() -> Made:
        scales = a_inv.reshape(()), b_inv.reshape(())

        def call() -> None:
            out[:] = [
                torch._scaled_mm(
                    a, b.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=given.product.fast
                )
            ]

        return call, error

    def wide() -> Made:
        x, w = a.bfloat16() * a_inv.bfloat16(), b.bfloat16() * b_inv.bfloat16()

        def call() -> None:
            out[:] = [torch.mm(x, w.t())]

        return call, error

    return {"torch._scaled_mm FP8": scaled, "torch.mm bf16": wide}


def attentions(run: AttentionRun) -> dict[str, tuple[Step, Step]]:
    """torch's scaled dot product, as it chooses and by cuDNN, forward and backward apart, on the run's own q,
    k and v."""
    qkv = torch.from_dlpack(run.inputs["qkv"])
    length, batch, _ = qkv.shape
    heads, dim = run.spec.num_heads, run.spec.head_dim
    # q, k, v as (batch, heads, sequence, features)
    parts = qkv.view(length, batch, heads, 3, dim).permute(3, 1, 2, 0, 4)
    do = torch.from_dlpack(run.cotangents["o"]).view(length, batch, heads, dim).permute(1, 2, 0, 3)
    leaves = [part.detach().requires_grad_() for part in parts]

    def pair(scope: Callable[[], AbstractContextManager[None]]) -> tuple[Step, Step]:
        last: list[Tensor] = []

        def forward() -> None:
            with scope():
                last[:] = [functional.scaled_dot_product_attention(*leaves, is_causal=True)]

        def backward() -> None:
            if not last:
                forward()
            torch.autograd.grad(last[0], leaves, do, retain_graph=True)

        return forward, backward

    found = {"torch SDPA": pair(nullcontext)}
    return found | (
        {"torch SDPA, cuDNN": pair(lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION))} if qkv.is_cuda else {}
    )
