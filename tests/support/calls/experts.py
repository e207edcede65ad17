"""Calls of the experts of ``fp8kit.nn`` and ``fp8kit.nn.moe``."""

from __future__ import annotations

import numpy as np

from fp8kit import nn
from fp8kit.nn import moe
from tests.support.calls.call import Call, X, always, module, plain, positional, view

MASK = np.array([[1, 0, 1, 0], [0, 1, 1, 0], [1, 1, 0, 0]], np.uint8)
MAP = np.array([[0, 0], [2, 0], [1, 1], [2, 1], [0, 2], [1, 2]], np.int32)
SIZES = always([2, 0, 1])

ROUTER = {
    "logits": view,
    "topk": always(2),
    "use_pre_softmax": always(False),
    "num_groups": always(2),
    "group_topk": always(1),
    "scaling_factor": always(2.0),
    "score_function": always("sigmoid"),
    "expert_bias": lambda: view(np.zeros(4, np.float32)),
}

MADE = {
    "init_method": always(None),
    "bias": always(True),
    "params_dtype": always("float32"),
    "device": always("cpu"),
    "name": always("n"),
}

CALLS: dict[str, Call] = {
    "nn.GroupedLinear": module(
        nn.GroupedLinear,
        lambda: (X, [2, 0, 1]),
        num_gemms=always(3),
        in_features=always(4),
        out_features=always(6),
        return_bias=always(False),
        use_grouped_tensor=always(False),
        **MADE,
    ),
    "nn.GroupedLinear.forward": positional(
        lambda inp, m_splits, first: nn.GroupedLinear(3, 4, 2, device="cpu")(inp, m_splits, first),
        inp=view,
        m_splits=SIZES,
        first=always(None),
    ),
    "nn.GroupedMLP": module(
        nn.GroupedMLP,
        lambda: (X, [2, 0, 1]),
        num_gemms=always(3),
        hidden_size=always(4),
        ffn_hidden_size=always(6),
        activation=always("swiglu"),
        output_layer_init_method=always(None),
        use_grouped_tensor=always(False),
        **MADE,
    ),
    "nn.GroupedMLP.forward": positional(
        lambda inp, m_splits, probs: nn.GroupedMLP(3, 4, 2, device="cpu")(inp, m_splits, probs),
        inp=view,
        m_splits=SIZES,
        probs=lambda: view(np.ones(3, np.float32)),
    ),
    "nn.moe.fused_topk_with_score_function": plain(moe.fused_topk_with_score_function, **ROUTER),
    "nn.moe.fused_compute_score_for_moe_aux_loss": plain(
        moe.fused_compute_score_for_moe_aux_loss,
        logits=view,
        topk=always(2),
        score_function=always("softmax"),
    ),
    "nn.moe.fused_moe_aux_loss": plain(
        moe.fused_moe_aux_loss,
        probs=view,
        tokens_per_expert=lambda: view(np.array([2, 2, 2, 0], np.int32)),
        total_num_tokens=always(3),
        num_experts=always(4),
        topk=always(2),
        coeff=always(0.1),
    ),
    "nn.moe.token_dispatch": plain(
        moe.token_dispatch,
        inp=view,
        routing_map=lambda: view(MASK),
        num_out_tokens=always(6),
        probs=view,
        align_size=always(2),
        num_experts=always(4),
    ),
    "nn.moe.grouped_dense": plain(
        moe.grouped_dense,
        x=view,
        kernel=lambda: view(np.ones((3, 4, 2), np.float32)),
        group_sizes=lambda: view(np.array([2, 0, 1], np.int32)),
        bias=lambda: view(np.ones((3, 2), np.float32)),
        layout=always("io"),
        slots=always(0),
        name=always("n"),
    ),
    "nn.moe.scaled_swiglu": plain(moe.scaled_swiglu, inp=view, probs=lambda: view(np.ones(3, np.float32))),
    "nn.moe.token_combine": plain(
        moe.token_combine,
        inp=lambda: view(np.ones((6, 4), np.float32)),
        row_id_map=lambda: view(MAP),
        merging_probs=view,
        num_tokens=always(3),
    ),
    "nn.moe.sort_chunks_by_index": plain(
        moe.sort_chunks_by_index, inp=view, split_sizes=SIZES, sorted_indices=always([2, 0, 1])
    ),
}
