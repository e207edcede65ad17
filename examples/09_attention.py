"""Who attends to whom: masks, windows, ALiBi, grouped heads, rotary positions, and sequences laid one after
the other.

Shows: what each option of ``DotProductAttention`` means, by what it must imply: a change in a place that is
hidden does not show, and two ways to say a thing give the same numbers. Needs: a CPU, or a GPU.
"""

from typing import Any

import numpy as np

import fp8kit as fk
from fp8kit.backends.dispatch import default_device

S, B, H, D = 12, 2, 4, 16
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((S, B, H, D)).astype(np.float32) for _ in range(3))
k2, v2 = k.copy(), v.copy()
k2[5], v2[5] = -k[5], -v[5]  # another token at position 5


def attend(
    layers: Any, mask: str = "causal", groups: int = H, form: str = "sbhd", window: Any = None, **options: Any
) -> np.ndarray:
    """Attention on the default device; ``options`` are those of the call."""
    module = fk.nn.DotProductAttention(H, D, groups, qkv_format=form, attn_mask_type=mask, window_size=window)
    return module(*(fk.tensor(x, device=default_device()) for x in layers), **options).numpy()


def notice(**options: Any) -> str:
    """Which rows notice that the token at position 5 is another: # for a row that does."""
    rows = np.abs(attend((q, k, v), **options) - attend((q, k2, v2), **options)).max(axis=(1, 2))
    return "".join("#" if row > 1e-4 else "." for row in rows)


def same(name: str, a: np.ndarray, b: np.ndarray) -> None:
    """Say how far two results are apart."""
    print(f"{name}: largest difference {np.abs(a - b).max():.1g}")


def main() -> None:
    """Rows that see position 5, then the equalities."""
    hidden = np.arange(S)[None, None, None] == 5  # True masks out
    print(f"no mask          {notice(mask='no_mask')}")
    print(f"causal           {notice()}")
    print(f"window (3, 0)    {notice(window=(3, 0))}")
    print(f"window (1, 1)    {notice(mask='no_mask', window=(1, 1))}")
    print(
        "arbitrary        "
        f"{notice(mask='arbitrary', attention_mask=np.broadcast_to(hidden, (1, 1, S, S)).copy())}"
    )
    lengths = np.array([0, 5, 12], np.int32)  # 5 tokens and 7
    print(f"padding, 5 and 7 {notice(mask='padding', cu_seqlens_q=lengths, cu_seqlens_kv=lengths)}")

    slopes = 2.0 ** (-8 * np.arange(1, H + 1) / H)
    bias = (-slopes[None, :, None, None] * np.abs(np.arange(S)[:, None] - np.arange(S))).astype(np.float32)
    by_bias = attend(
        (q, k, v),
        core_attention_bias_type="post_scale_bias",
        core_attention_bias=fk.tensor(bias, device=default_device()),
    )
    same(
        "ALiBi is a bias of minus slope times distance",
        attend((q, k, v), core_attention_bias_type="alibi"),
        by_bias,
    )

    few = (k[:, :, :2], v[:, :, :2])
    many = (np.repeat(x, H // 2, axis=2) for x in few)
    same("2 key heads for 4 query heads are repeated heads", attend((q, *few), groups=2), attend((q, *many)))

    angles = fk.nn.RotaryPositionEmbedding(D)
    rotated = [
        [fk.nn.apply_rotary_pos_emb(fk.tensor(x, device=default_device()), angles(S, start)) for x in (q, k)]
        for start in (0, 100)
    ]
    same("rotary positions: only distances matter", *(attend((*pair, v)) for pair in rotated))

    own = [np.concatenate([x[:5, 0], x[:7, 1]]) for x in (q, k, v)]  # (tokens, heads, features), no padding
    both = {"mask": "padding_causal", "cu_seqlens_q": lengths, "cu_seqlens_kv": lengths}
    padded = attend((q, k, v), **both)
    same(
        "thd is a padded batch without the padding",
        attend(own, form="thd", **both),
        np.concatenate([padded[:5, 0], padded[:7, 1]]),
    )


if __name__ == "__main__":
    main()
