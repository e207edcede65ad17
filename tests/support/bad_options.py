"""What a call of ``MultiheadAttention`` or ``TransformerLayer`` may not be given, as NumPy arrays and plain
values, for every frontend that has these modules. A value that is a function is asked with the frontend's
``InferenceParams``."""

from __future__ import annotations

import numpy as np

S, B, H, HEADS, FFN, OTHER = 6, 2, 32, 4, 48, 5
D = H // HEADS
THD = {"cu_seqlens_q": np.array([0, 4, 9], np.int32), "cu_seqlens_kv": np.array([0, 4, 9], np.int32)}
TOKENS = 11


# Cases whose fault lies in the values of running sums: these are read where they lie in the host's memory. A
# GPU's are not waited for: there wrong ones give numbers without meaning, and stay within bounds.
IN_VALUES = (
    "sums that fall",
    "sums of more tokens",
    "a sequence that is too long",
    "starts without room",
    "starts that are no running sums",
    "sequences longer than the angles",
)


def refused(table, device):
    """The cases of a table that a call on ``device`` refuses."""
    return {name: bad for name, bad in table.items() if device == "cpu" or name not in IN_VALUES}


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def sums(*values, dtype=np.int32):
    return np.array(values, dtype)


def cache(form="sbhd", batch=B, new=S, announced=True, **options):
    """A function that makes a cache for a frontend's layers, where a step of ``batch`` sequences may have
    been announced."""

    def make(params, device):
        found = params(B + 1, 4 * S, qkv_format=form, device=device, **options)
        if announced:
            found.pre_step(dict.fromkeys(range(batch), new))
        return found

    return make


def holed(params, device):
    """A cache whose first step this layer never took."""
    found = params(B, 4 * S, qkv_format="sbhd", device=device)
    found.pre_step(dict.fromkeys(range(B), 1))
    found.pre_step(dict.fromkeys(range(B), S))
    return found


LAST = np.arange(S) >= np.array([4, S])[:, None, None, None]  # a padding mask (b, 1, 1, s)
PADDED = {"attn_mask_type": "padding", "cu_seqlens_kv": sums(0, 3, 8)}
BIASED = {"core_attention_bias_type": "post_scale_bias"}

# of self attention, "sbhd", causal
SELF = {
    "no mask where one is asked for": {"attn_mask_type": "arbitrary"},
    "a mask of a wrong shape": {
        "attn_mask_type": "arbitrary",
        "attention_mask": zeros(B, 1, S, S + 1, dtype=bool),
    },
    "a mask of floats": {"attn_mask_type": "arbitrary", "attention_mask": zeros(B, 1, S, S)},
    "a mask that is no array": {"attn_mask_type": "arbitrary", "attention_mask": "mask"},
    "a pair of masks": {
        "attn_mask_type": "arbitrary",
        "attention_mask": (zeros(B, 1, S, S, dtype=bool),) * 2,
    },
    "a padding mask of a wrong length": {
        "attn_mask_type": "padding",
        "attention_mask": zeros(B, 1, 1, S + 1, dtype=bool),
    },
    "a padding mask of a wrong batch": {
        "attn_mask_type": "padding",
        "attention_mask": zeros(B + 1, 1, 1, S, dtype=bool),
    },
    "a padding mask of two dimensions": {
        "attn_mask_type": "padding",
        "attention_mask": zeros(B, S, dtype=bool),
    },
    "padding that comes first": {"attn_mask_type": "padding", "attention_mask": ~LAST},
    "three padding masks": {"attn_mask_type": "padding", "attention_mask": (LAST,) * 3},
    "padding without lengths": {"attn_mask_type": "padding"},
    "an unknown kind of mask": {"attn_mask_type": "none"},
    "a window of three": {"window_size": (1, 1, 1)},
    "a window below -1": {"window_size": (-2, 0)},
    "a window of words": {"window_size": "ab"},
    "a window right of a causal diagonal": {"window_size": (1, 1)},
    "a corner that is no flag": {"bottom_right_diagonal": "yes"},
    "another corner than the mask's": {"bottom_right_diagonal": True},
    "a bias that nothing asks for": {"core_attention_bias": zeros(1, HEADS, S, S)},
    "no bias where one is asked for": BIASED,
    "a bias of a wrong shape": BIASED | {"core_attention_bias": zeros(1, HEADS + 1, S, S)},
    "a bias of another dtype": BIASED | {"core_attention_bias": zeros(1, HEADS, S, S, dtype=np.float16)},
    "an unknown kind of bias": {"core_attention_bias_type": "bias"},
    "slopes that nothing asks for": {"alibi_slopes": zeros(HEADS)},
    "slopes of a wrong shape": {"core_attention_bias_type": "alibi", "alibi_slopes": zeros(HEADS + 1)},
    "slopes of another dtype": {
        "core_attention_bias_type": "alibi",
        "alibi_slopes": zeros(HEADS, dtype=np.float16),
    },
    "sums of a wrong shape": PADDED | {"cu_seqlens_q": sums(0, 3, 8, 9)},
    "sums of another dtype": PADDED | {"cu_seqlens_q": sums(0, 3, 8, dtype=np.int64)},
    "sums that fall": PADDED | {"cu_seqlens_q": sums(0, 3, 2)},
    "a sequence that is too long": PADDED | {"cu_seqlens_q": sums(0, S + 1, S + 3)},
    "lengths of queries alone": {"attn_mask_type": "padding", "cu_seqlens_q": sums(0, 3, 8)},
    "gaps that are none": {"pad_between_seqs": True},
    "gaps that are no flag": {"pad_between_seqs": "yes"},
    "a negative length": {"max_seqlen_q": -1},
    "a length that is none": {"max_seqlen_kv": "long"},
    "fast_zero_fill that is no flag": {"fast_zero_fill": "yes"},
    "checkpoint_core_attention that is no flag": {"checkpoint_core_attention": "yes"},
    "is_first_microbatch that is no flag": {"is_first_microbatch": "yes"},
    "a source without cross attention": {"encoder_output": zeros(S, B, H)},
    "too few angles": {"rotary_pos_emb": zeros(S - 1, 1, 1, D)},
    "an odd number of angles": {"rotary_pos_emb": zeros(S, 1, 1, D - 1)},
    "more angles than features": {"rotary_pos_emb": zeros(S, 1, 1, D + 2)},
    "angles of another dtype": {"rotary_pos_emb": zeros(S, 1, 1, D, dtype=np.int32)},
    "angles of another rank": {"rotary_pos_emb": zeros(S, 2, 1, D)},
    "three angles": {"rotary_pos_emb": (zeros(S, 1, 1, D),) * 3},
    "too few angles of keys": {"rotary_pos_emb": (zeros(S, 1, 1, D), zeros(S - 1, 1, 1, D))},
    "angles that are no array": {"rotary_pos_emb": "angles"},
    "a cache that is none": {"inference_params": "cache"},
    "a cache without a step": {"inference_params": cache(announced=False)},
    "a cache of another format": {"inference_params": cache("bshd")},
    "a cache of another batch": {"inference_params": cache(batch=B + 1)},
    "a cache of a longer step": {"inference_params": cache(new=S + 1)},
    "a cache of other heads": {"inference_params": cache(num_heads_kv=HEADS + 1)},
    "a cache that would want a gradient": {"inference_params": cache()},
    "a cache with a hole": {"inference_params": holed},
    "a cache and a bias": BIASED
    | {"inference_params": cache(), "core_attention_bias": zeros(1, HEADS, S, S)},
    "a cache and an arbitrary mask": {
        "inference_params": cache(),
        "attn_mask_type": "arbitrary",
        "attention_mask": zeros(B, 1, S, S, dtype=bool),
    },
    "a cache and lengths": {"inference_params": cache()} | THD,
    "a cache that goes beyond the angles": {
        "inference_params": cache(),
        "rotary_pos_emb": zeros(S - 1, 1, 1, D),
    },
    "inputs of another rank": {"hidden_states": zeros(S, H)},
    "inputs of other features": {"hidden_states": zeros(S, B, H + 1)},
    "inputs of another dtype": {"hidden_states": zeros(S, B, H, dtype=np.float16)},
}

# of a cross-attention, or of a decoder
ACROSS = {
    "no source": {"encoder_output": None},
    "a source of another rank": {"encoder_output": zeros(OTHER, H)},
    "a source of other features": {"encoder_output": zeros(OTHER, B, H + 1)},
    "a source of another batch": {"encoder_output": zeros(OTHER, B + 1, H)},
    "a source of another dtype": {"encoder_output": zeros(OTHER, B, H, dtype=np.float16)},
    "a bias of a wrong shape": BIASED | {"core_attention_bias": zeros(1, HEADS, S, OTHER + 1)},
}

# of the cross-attention alone, by its own names
ACROSS_OWN = {
    "a mask of a wrong shape": {
        "attn_mask_type": "arbitrary",
        "attention_mask": zeros(1, 1, S, S, dtype=bool),
    },
    "one padding mask for two lengths": {"attn_mask_type": "padding", "attention_mask": LAST},
    "a kind of mask": {"attn_mask_type": "none"},
    "a window": {"window_size": (-2, 0)},
    "a corner": {"bottom_right_diagonal": "yes"},
}

# of self attention, "thd", with a padding mask; beside THD
PACKED = {
    "no lengths": {"cu_seqlens_q": None, "cu_seqlens_kv": None},
    "sums of more tokens": {"cu_seqlens_q": sums(0, 4, TOKENS + 1)},
    "a sequence that is too long": {"max_seqlen_q": 4, "max_seqlen_kv": 4},
    "starts without room": {"cu_seqlens_q_padded": sums(0, 3, 8)},
    "starts of another shape": {"cu_seqlens_q_padded": sums(0, 4)},
    "unlike longest sequences": {"max_seqlen_q": 8, "max_seqlen_kv": 16},
    "no padding mask": {"attn_mask_type": "causal"},
    "sequences longer than the angles": {"rotary_pos_emb": zeros(4, 1, 1, D)},
}
