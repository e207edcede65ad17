"""Packing what an attention call's kernels need to know beside their arrays: ``Rules`` of
raw_kernels/attention.cuh."""

from __future__ import annotations

from fp8kit.arrays import Shape
from fp8kit.backends.cuda._rows import address
from fp8kit.backends.cuda.attention_problem import Problem
from fp8kit.backends.cuda.structures import Packer
from fp8kit.backends.protocol import AttentionExtras, Lying

_RULES = Packer("3P3qP3qdPqP4qdPqdP3q2P2qdq")


def over_scores(shape: Shape) -> tuple[int, int, int]:
    """Strides of a C-contiguous (1 | b, 1 | h, 1 | s_q, s_kv) array along its first three dimensions, 0 where
    it broadcasts."""
    steps = shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3]
    pairs = zip(shape, steps, strict=False)
    return tuple(0 if size == 1 else step for size, step in pairs)  # type: ignore[return-value]


def pack(problem: Problem, extras: AttentionExtras, lying: Lying | None = None) -> bytes:
    """Returns the structure's bytes. ``lying``: where packed sequences lie."""
    mask, bias, slopes = extras.mask, extras.bias, extras.alibi_slopes
    nothing = (0, 0, 0)
    return _RULES.pack(
        address(extras.cu_seqlens_q),
        address(extras.cu_seqlens_kv),
        address(mask),
        *(nothing if mask is None else over_scores(mask.shape)),
        address(bias),
        *(nothing if bias is None else over_scores(bias.shape)),
        problem.bias_factor,
        address(slopes),
        problem.heads if slopes is not None and slopes.ndim == 2 else 0,
        address(extras.softmax_offset),
        int(problem.softmax_type != "vanilla"),
        problem.left,
        problem.right,
        int(problem.bottom_right),
        problem.scale,
        address(extras.rng) if problem.dropout else 0,
        int(problem.dropout * 2**32),
        1 / (1 - problem.dropout),
        address(extras.dropout_place) if problem.placed else 0,
        problem.heads,
        problem.rows,
        problem.columns,
        address(None if lying is None else lying.starts_q),
        address(None if lying is None else lying.starts_kv),
        problem.tokens[0] or problem.rows,
        problem.tokens[1] or problem.columns,
        problem.softcap,
        int(problem.bias_capped),
    )
