"""What an attention is asked to do: ``AttentionSpec``, the names it knows, and the checks of its values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from fp8kit.arrays import Shape
from fp8kit.attention_quantization import AttentionQuantization
from fp8kit.errors import ShapeError

# layout -> input name -> the parts that lie in its last dimension, in this order
LAYOUTS: dict[str, dict[str, str]] = {
    "separate": {"q": "q", "k": "k", "v": "v"},
    "q_kv": {"q": "q", "kv": "kv"},
    "qkv": {"qkv": "qkv"},
    "qkv_interleaved": {"qkv": "qkv"},
}
FORMATS = ("sbhd", "bshd", "thd")
# input of an attention -> what errors call it
ARGUMENTS = {
    "q": "query_layer",
    "k": "key_layer",
    "v": "value_layer",
    "kv": "kv_layer",
    "qkv": "qkv_layer",
    "bias": "core_attention_bias",
    "mask": "attention_mask",
}
MASKS = (
    "no_mask",
    "causal",
    "causal_bottom_right",
    "padding",
    "padding_causal",
    "padding_causal_bottom_right",
    "arbitrary",
)
_ALIASES = {"padding,causal": "padding_causal", "causal,padding": "padding_causal"}
BIASES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")
SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")
# field of a spec -> the words that it may be
CHOICES = {
    "qkv_format": FORMATS,
    "mask": MASKS,
    "layout": tuple(LAYOUTS),
    "bias": BIASES,
    "softmax_type": SOFTMAX_TYPES,
}
UNBOUNDED = (-1, -1)
LEAST_CAP = 1e-30  # so far from float32's ends that scores may be divided by it


@dataclass(frozen=True)
class AttentionSpec:
    """Static arguments of ``Attention``.

    * ``num_heads``: query heads h. ``num_gqa_groups``: key and value heads g, a divisor of h; 0 means h.
    * ``head_dim``: features d of one head of q and k; ``head_dim_v``: of v and the output, 0 means d.
    * ``qkv_format``: order of the leading dimensions, "sbhd" (sequence first) or "bshd"; "thd": the sequences
      lie one after the other along one dimension of t tokens, ``cu_seqlens`` say where, and none is longer
      than ``max_seqlen_q``, ``max_seqlen_kv``.
    * ``mask``: "no_mask"; "causal" (row i sees columns 0 ... i), "causal_bottom_right" (the last row sees the
      last column); "padding" (each batch's true lengths come in ``cu_seqlens``), "padding_causal",
      "padding_causal_bottom_right"; "arbitrary" (a ``mask`` array comes, not 0 masks out). "padding,causal"
      and "causal,padding" mean "padding_causal".
    * ``window_size`` (left, right): how far left and right of its place on the diagonal a row sees, -1
      unbounded; a causal mask makes right 0.
    * ``bottom_right_diagonal``: the diagonal ends at the last row and column, instead of starting at the
      first. None: False for "causal" and "padding_causal", True otherwise, as Transformer Engine has it; it
      matters only with a window, a causal mask or ALiBi.
    * ``softmax_scale``: factor of q k^T; 0 means 1 / sqrt(head_dim).
    * ``bias``: "no_bias", "pre_scale_bias", "post_scale_bias" or "alibi". ``softmax_type``: "vanilla",
      "off-by-one", "learnable". ``softcap`` c: c * tanh(x / c) stands for x = softmax_scale * q k^T, or for
      softmax_scale * (q k^T + bias), before other biases, the mask and softmax (Gemma 2, 2024); 0: no cap.
    * ``dropout``: probability of dropping an attention weight, in [0, 1). ``deterministic``: backward gives
      the same bits every time.
    * ``layout``: which inputs there are. "separate": q, k, v; "q_kv": q and kv; "qkv": one input qkv. A
      packed input holds its parts one after the other in the last dimension: [h * d of q | g * d of k | g *
      d_v of v]. "qkv_interleaved": one input qkv, head after head, each [d of q | d of k | d_v of v]; only
      where g = h.
    * ``placed``: whether the call is a part, some batches and heads, of a larger attention with dropout, and
      drops what that drops there: a ``dropout_place`` comes.
    * ``zero_padded``: whether rows beyond the true lengths are known to hold 0, which spares the engines a
      look at them; as "thd" has it.
    * ``quantized``: how the operands of its products are quantised, None for high precision.
    """

    num_heads: int
    head_dim: int
    num_gqa_groups: int = 0
    qkv_format: str = "sbhd"
    mask: str = "causal"
    softmax_scale: float = 0.0
    dropout: float = 0.0
    deterministic: bool = False
    layout: str = "qkv"
    head_dim_v: int = 0
    window_size: tuple[int, int] = UNBOUNDED
    bottom_right_diagonal: bool | None = None
    bias: str = "no_bias"
    softmax_type: str = "vanilla"
    softcap: float = 0.0
    max_seqlen_q: int = 0
    max_seqlen_kv: int = 0
    zero_padded: bool = False
    placed: bool = False
    quantized: AttentionQuantization | None = None
    plain_backward: bool = False

    def __post_init__(self) -> None:
        def resolve(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        resolve("num_gqa_groups", self.num_gqa_groups or self.num_heads)
        resolve("head_dim_v", self.head_dim_v or self.head_dim)
        resolve("mask", _ALIASES.get(self.mask, self.mask))
        if self.softmax_scale == 0 and self.head_dim > 0:
            resolve("softmax_scale", 1 / math.sqrt(self.head_dim))

    def heads(self, part: str) -> int:
        """Heads of "q", "k" or "v"."""
        return self.num_heads if part == "q" else self.num_gqa_groups

    def features(self, part: str) -> int:
        """Features of one head of "q", "k" or "v"."""
        return self.head_dim_v if part == "v" else self.head_dim

    def width(self, parts: str) -> int:
        """Features of an input that holds ``parts``."""
        return sum(self.heads(part) * self.features(part) for part in parts)

    @property
    def causal(self) -> bool:
        """Whether no row sees beyond the diagonal."""
        return "causal" in self.mask

    @cached_property
    def window(self) -> tuple[int, int]:
        """``window_size``, ending at the diagonal where the mask is causal."""
        return (self.window_size[0], 0) if self.causal else self.window_size

    @cached_property
    def bottom_right(self) -> bool:
        """Where the diagonal ends, decided."""
        if self.bottom_right_diagonal is None:
            return self.mask not in ("causal", "padding_causal")
        return self.bottom_right_diagonal

    @cached_property
    def padded(self) -> bool:
        """Whether the mask needs cu_seqlens."""
        return self.mask.startswith("padding")

    @cached_property
    def masked(self) -> bool:
        """Whether a mask array comes."""
        return self.mask == "arbitrary"

    @property
    def interleaved(self) -> bool:
        """Whether the parts of the packed input alternate from head to head."""
        return self.layout == "qkv_interleaved"

    @property
    def biased(self) -> bool:
        """Whether a bias array comes."""
        return self.bias in ("pre_scale_bias", "post_scale_bias")

    @property
    def needs_rng(self) -> bool:
        """Whether a call draws random numbers."""
        return self.dropout > 0 or (self.quantized is not None and self.quantized.needs_rng)

    @property
    def packed(self) -> bool:
        """Whether the sequences lie one after the other."""
        return self.qkv_format == "thd"


def check(spec: AttentionSpec) -> None:
    """ShapeError for values that do not fit, naming the field; RecipeError for heads that cannot be
    rotated."""

    def want(field: str, fits: bool, wanted: str) -> None:
        if not fits:
            raise ShapeError("attention", field, repr(getattr(spec, field)), wanted)

    for field in ("num_heads", "head_dim", "head_dim_v"):
        want(field, getattr(spec, field) > 0, "at least 1")
    heads, groups = spec.num_heads, spec.num_gqa_groups
    want("num_gqa_groups", groups > 0 and heads % groups == 0, f"a divisor of {heads} heads")
    for field, words in CHOICES.items():
        want(field, getattr(spec, field) in words, f"one of {', '.join(words)}")
    want("layout", not spec.interleaved or groups == heads, f"one with {groups} groups of heads")
    want("softmax_scale", math.isfinite(spec.softmax_scale), "a finite number")
    capped = spec.softcap == 0 or LEAST_CAP <= spec.softcap < 1 / LEAST_CAP
    want("softcap", capped, f"0 for no cap, or a number in [{LEAST_CAP:g}, {1 / LEAST_CAP:g})")
    want("dropout", 0 <= spec.dropout < 1, "a probability in [0, 1)")
    want("placed", not spec.placed or spec.dropout > 0, "False without dropout")
    window, mask = spec.window_size, spec.mask
    fits = len(window) == 2 and min(window) >= -1
    want("window_size", fits, "(left, right), each -1 (unbounded) or more")
    sees = f"right -1 or 0: mask {mask!r} sees nothing right of the diagonal"
    want("window_size", not spec.causal or window[1] < 1, sees)
    if spec.causal:  # such a mask says where its diagonal ends
        own = mask.endswith("bottom_right")
        fits = spec.bottom_right_diagonal in (None, own)
        want("bottom_right_diagonal", fits, f"None or {own} with mask {mask!r}")
    want("mask", not spec.packed or spec.padded, "one of the padding masks, with qkv_format 'thd'")
    if spec.quantized is not None:
        spec.quantized.rotated(spec.head_dim)
        spec.quantized.rotated(spec.head_dim_v, "rotation_v")
    for field in ("max_seqlen_q", "max_seqlen_kv"):
        want(field, not spec.packed or getattr(spec, field) > 0, "at least 1, with qkv_format 'thd'")


def check_starts(operation: str, name: str, shape: Shape, tokens: int) -> int:
    """Returns the sequences of running sums of that shape, (batch + 1,); ShapeError for another one, and for
    tokens of no sequence."""
    if len(shape) != 1 or shape[0] < (2 if tokens else 1):
        raise ShapeError(
            operation, name, f"shape {shape}", "(batch + 1,)" + (", batch at least 1" if tokens else "")
        )
    return shape[0] - 1


def batch_of(qkv_format: str, shape: Shape) -> int:
    """Batches of an array of format sbhd or bshd."""
    return shape[qkv_format.index("b")]


def length_of(qkv_format: str, shape: Shape) -> int:
    """Sequence length of an array of format sbhd or bshd."""
    return shape[qkv_format.index("s")]
