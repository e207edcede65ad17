"""Attention in float64: what both engines and the operation are compared with."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8kit.ops.attention import AttentionSpec


def attention_oracle(
    spec: AttentionSpec, q: Any, k: Any, v: Any, do: Any, keep: Any = 1.0, cu_seqlens: tuple[Any, Any] | None = None
) -> dict[str, tuple[Any, Any]]:
    """name -> (value, sum of the absolute values of its terms), both float64, of "o", "dq", "dk" and "dv" in the spec's format, and of
    "lse", (b, h, s_q) with the largest absolute sum of a score's terms.

    ``q``, ``k``, ``v``, ``do``: arrays (s, b, heads, d), or (b, s, heads, d) with "bshd". ``keep``: dropout's factors (b, h, s_q, s_kv).
    ``cu_seqlens``: of queries and keys, (b + 1,) each, with a padding mask. Source: Vaswani et al. 2017, 3.2; the gradients are the
    derivatives of its formula (Dao et al. 2022, appendix B).
    """
    order = (1, 2, 0, 3) if spec.qkv_format == "sbhd" else (0, 2, 1, 3)
    back = tuple(int(i) for i in np.argsort(order))
    q, k, v, do = (np.asarray(x, np.float64).transpose(order) for x in (q, k, v, do))
    repeat = spec.num_heads // spec.num_gqa_groups
    k, v = np.repeat(k, repeat, 1), np.repeat(v, repeat, 1)
    b, rows, columns = q.shape[0], q.shape[2], k.shape[2]
    i, j = np.arange(rows)[:, None], np.arange(columns)
    seen = np.ones((b, 1, rows, columns), bool)
    if spec.mask.endswith("causal"):
        seen &= j <= i
    if cu_seqlens is not None:
        lengths_q, lengths_kv = (np.diff(np.asarray(c))[:, None, None, None] for c in cu_seqlens)
        seen &= (i < lengths_q) & (j < lengths_kv)
    scores = np.where(seen, spec.softmax_scale * q @ k.swapaxes(2, 3), -np.inf)
    with np.errstate(divide="ignore"):
        top = np.where(seen.any(-1, keepdims=True), scores.max(-1, keepdims=True), 0)
        lse = top + np.log(np.exp(scores - top).sum(-1, keepdims=True))
    p = np.where(seen, np.exp(scores - np.where(np.isfinite(lse), lse, 0)), 0)
    dropped = p * keep

    def results(q: Any, k: Any, v: Any, do: Any, sign: int) -> dict[str, Any]:
        o = dropped @ v
        ds = spec.softmax_scale * p * (keep * (do @ v.swapaxes(2, 3)) + sign * (do * o).sum(-1, keepdims=True))
        found = {"o": o, "dq": ds @ k, "dk": ds.swapaxes(2, 3) @ q, "dv": dropped.swapaxes(2, 3) @ do}
        grouped = {n: found[n].reshape(b, -1, repeat, columns, found[n].shape[3]).sum(2) for n in ("dk", "dv")}
        return {n: x.transpose(back) for n, x in (found | grouped).items()}

    values, sizes = results(q, k, v, do, -1), results(abs(q), abs(k), abs(v), abs(do), 1)
    score_size = spec.softmax_scale * (abs(q) @ abs(k).swapaxes(2, 3)).max()
    return {"lse": (lse[..., 0], score_size), **{n: (values[n], sizes[n]) for n in values}}
