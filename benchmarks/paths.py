"""Attention by cuDNN and by the kernels of our own, over lengths and sizes of heads: the time of one call.

    python -m benchmarks paths --out DIR

The choice between them (``backends/cuda/attention.py``) rests on these figures.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from fp8kit import arrays, formats
from fp8kit.arrays import ArrayView, Device
from fp8kit.backends.protocol import AttentionExtras
from fp8kit.bench.report import Row, Setting
from fp8kit.bench.timing import clock_for, interleaved, medians
from fp8kit.ops.attention_spec import AttentionSpec


class Sizes(NamedTuple):
    """Batches, heads of q, heads of k and v, length, features of a head; dropout."""

    batch: int
    heads: int
    groups: int
    length: int
    dim: int
    dropout: float = 0.0


SIZES = (
    Sizes(2, 16, 16, 304, 64),
    Sizes(4, 16, 16, 512, 64),
    Sizes(2, 16, 16, 1024, 64),
    Sizes(8, 12, 12, 1024, 64),
    Sizes(1, 16, 16, 8192, 64),
    Sizes(4, 32, 32, 2048, 128),
    Sizes(4, 32, 8, 2048, 128),
    Sizes(1, 16, 16, 8192, 128),
    Sizes(2, 16, 16, 2048, 256),
    Sizes(4, 32, 32, 2048, 128, 0.1),
)


def _steps(about: Sizes, device: Device) -> dict[str, Any]:
    """Each path's two directions, causal, in bfloat16."""
    from fp8kit.backends.cuda import cudnn_sdpa, flash
    from fp8kit.backends.cuda.attention_problem import problem

    draw = np.random.default_rng(0)

    def made(heads: int) -> ArrayView:
        shape = about.length, about.batch, heads, about.dim
        x = draw.standard_normal(shape, np.float32).astype(formats.bfloat16.numpy)
        return arrays.to(arrays.as_view(x), device)

    def space(nbytes: int) -> ArrayView:
        return arrays.empty((max(1, nbytes),), formats.uint8, device)

    spec = AttentionSpec(
        num_heads=about.heads,
        head_dim=about.dim,
        num_gqa_groups=about.groups,
        layout="separate",
        mask="causal",
        dropout=about.dropout,
    )
    q, do, o, dq = (made(about.heads) for _ in range(4))
    k, v, dk, dv = (made(about.groups) for _ in range(4))
    lse = arrays.empty((about.batch, about.heads, about.length), formats.float32, device)
    rng = arrays.to(arrays.as_view(np.array([1, 2], np.int64)), device) if about.dropout else None
    extras = AttentionExtras(rng=rng)
    case = problem(q.shape, k.shape, v.shape, q.dtype, spec, (q.strides, k.strides, v.strides))
    forward, grads = (q, k, v, o, lse, extras), (do, q, k, v, o, lse, dq, dk, dv)
    index = device.index
    library = [space(cudnn_sdpa.workspace(case, backward, False, index)) for backward in (False, True)]
    own = space(flash.workspace(case, True))
    return {
        "cuDNN forward": partial(cudnn_sdpa.forward, case, *forward, library[0], 0),
        "flash forward": partial(flash.forward, case, *forward, None, 0),
        "cuDNN backward": partial(cudnn_sdpa.backward, case, *grads, extras, False, library[1], 0),
        "flash backward": partial(flash.backward, case, *grads, None, extras, own, 0),
    }


def paths_part(setting: Setting) -> list[Row]:
    """A row a size, path and direction; ``ratio`` is to cuDNN's time. On a GPU with cuDNN alone."""
    if setting.device.kind != "cuda":
        return []
    from fp8kit.backends.cuda import cudnn_plans

    if not cudnn_plans.available():
        return []
    rows: list[Row] = []
    for about in SIZES:
        times = medians(interleaved(_steps(about, setting.device), clock_for(setting.device), 3, 10))
        heads = f"{about.heads}/{about.groups} heads of {about.dim}"
        drop = f", dropout {about.dropout}" if about.dropout else ""
        for name, seconds in times.items():
            ratio = seconds / times[f"cuDNN {name.split()[1]}"]
            rows.append(
                {
                    "workload": f"{about.batch} x {about.length}, {heads}{drop}",
                    "case": name,
                    "status": "ok",
                    "gpu_ms": seconds * 1e3,
                    "ratio": ratio,
                }
            )
    return rows
