"""Calls of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fp8kit_torch as ft
import torch

from tests.adapters.torch.calls.call import (
    FREQS,
    HEADS,
    ROPE,
    Call,
    D,
    H,
    X,
    call,
    ints,
    linear,
    method,
    positional,
    quietly,
    ramp,
)


def tracker() -> ft.CudaRNGStatesTracker:
    made = ft.CudaRNGStatesTracker()
    made.add("a", 1)
    return made


def within(switch: Any) -> Any:
    with switch:
        return ft.Linear(16, 16, device="cpu")(torch.ones(16, 16))


def routed() -> tuple[torch.Tensor, torch.Tensor]:
    return ft.moe_permute(ramp(3, 4), MASK(), 3)


MASK = lambda: torch.tensor([[1, 0], [0, 1], [1, 0]], dtype=torch.bool)  # noqa: E731


def within_fork(self: Any, name: Any) -> Any:
    with self.fork(name):
        yield torch.rand(2)


def refused(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    """A call that needs CUDA: without it the good one is refused as well, by the last of the checks."""
    from fp8kit.errors import BackendError

    try:
        return function(**given)
    except BackendError:
        return None


CALLS: dict[str, Call] = {
    "apply_rotary_pos_emb": call(
        ft.apply_rotary_pos_emb,
        t=lambda: ramp(3, 2, HEADS, D),
        freqs=FREQS,
        fused=False,
        cu_seqlens_padded=None,
        **ROPE,
    ),
    "apply_rotary_pos_emb, thd": call(
        ft.apply_rotary_pos_emb,
        t=lambda: ramp(5, HEADS, D),
        freqs=FREQS,
        tensor_format="thd",
        cu_seqlens=lambda: ints(0, 2, 4),
        cu_seqlens_padded=lambda: ints(0, 3, 5),
    ),
    "apply_fused_qkv_rotary_pos_emb": call(
        ft.apply_fused_qkv_rotary_pos_emb,
        qkv=lambda: ramp(3, 2, HEADS, 3 * D),
        q_freqs=FREQS,
        k_freqs=FREQS,
        qkv_split_arg_list=lambda: [D, D, D],
        **ROPE,
    ),
    "as_view": call(ft.as_view, tensor=lambda: ramp(3, 4)),
    "dtype_of": call(ft.dtype_of, kind=lambda: ft.as_view(ramp(3, 4)).dtype),
    "empty_like_metas": call(
        ft.empty_like_metas,
        metas=lambda: {"a": ft.as_view(ramp(3)).meta} if hasattr(ft.as_view(ramp(3)), "meta") else {},
        like=lambda: ramp(3),
    ),
    "autocast": call(
        lambda **given: within(ft.autocast(**given)),
        enabled=True,
        calibrating=False,
        recipe=lambda: ft.DelayedScaling(),
        amax_reduction_group=None,
        _graph=False,
    ),
    "fp8_autocast": call(
        lambda **given: within(ft.fp8_autocast(**given)),
        enabled=True,
        calibrating=False,
        fp8_recipe=None,
        fp8_group=None,
    ),
    "fp8_model_init": call(
        lambda **given: within(ft.fp8_model_init(**given)),
        enabled=True,
        recipe=None,
        preserve_high_precision_init_val=False,
    ),
    "quantized_model_init": call(
        lambda **given: within(ft.quantized_model_init(**given)),
        enabled=True,
        recipe=None,
        preserve_high_precision_init_val=False,
    ),
    "checkpoint": Call(
        lambda function, x, **given: ft.checkpoint(function, x, **given),
        lambda: {
            "function": linear(),
            "x": X().requires_grad_(),
            "distribute_saved_activations": False,
            "get_rng_state_tracker": tracker,
            "tp_group": None,
            "use_reentrant": False,
            "determinism_check": "default",
            "debug": False,
        },
        ("function", "x", "get_rng_state_tracker"),
    ),
    "convert": call(
        ft.convert, ("filter_fn",), model=lambda: torch.nn.Sequential(torch.nn.Linear(H, 6)), filter_fn=None
    ),
    "revert": call(ft.revert, model=lambda: ft.convert(torch.nn.Sequential(torch.nn.Linear(H, 6)))),
    "cross_entropy": call(
        ft.cross_entropy,
        logits=lambda: ramp(3, 4),
        targets=lambda: ints(0, 1, 3),
        reduction="mean",
        label_smoothing=0.1,
        ignore_index=-100,
    ),
    "parallel_cross_entropy": call(
        quietly(ft.parallel_cross_entropy),
        inp=lambda: ramp(3, 4),
        target=lambda: ints(0, 1, 3),
        label_smoothing=0.1,
        reduce_loss=True,
        dist_process_group=None,
        ignore_idx=-100,
        is_cg_capturable=False,
        _input=None,
    ),
    "dropout_add": call(
        ft.dropout_add,
        x=lambda: ramp(3, 4),
        residual=lambda: ramp(3, 4),
        bias=lambda: ramp(4),
        p=0.0,
        training=True,
    ),
    "dropout_seed": call(ft.dropout_seed, device="cpu"),
    "embedding": call(ft.embedding, ids=lambda: ints(0, 2, 1), table=lambda: ramp(3, 4)),
    "get_cpu_offload_context": call(ft.get_cpu_offload_context, enabled=False, num_layers=1, model_layers=1),
    "mark_not_offload": positional(ft.mark_not_offload, tensor=X),
    "onnx_export": call(lambda **given: within(ft.onnx_export(**given)), enabled=False),
    "is_fp8_available": call(ft.is_fp8_available, return_reason=False),
    "moe_permute": call(
        ft.moe_permute,
        inp=lambda: ramp(3, 4),
        routing_map=MASK,
        num_out_tokens=3,
        max_token_num=-1,
        map_type="mask",
    ),
    "moe_permute, index": call(
        ft.moe_permute,
        inp=lambda: ramp(3, 4),
        routing_map=lambda: torch.tensor([[0], [1], [-1]]),
        num_out_tokens=-1,
        map_type="index",
    ),
    "moe_permute_with_probs": call(
        ft.moe_permute_with_probs,
        inp=lambda: ramp(3, 4),
        probs=lambda: ramp(3, 2),
        routing_map=MASK,
        num_out_tokens=3,
    ),
    "moe_permute_and_pad_with_probs": call(
        ft.moe_permute_and_pad_with_probs,
        inp=lambda: ramp(3, 4),
        probs=lambda: ramp(3, 2),
        routing_map=MASK,
        tokens_per_expert=lambda: ints(2, 1),
        align_size=4,
    ),
    "token_dispatch": call(
        ft.token_dispatch,
        inp=lambda: ramp(3, 4),
        routing_map=MASK,
        num_out_tokens=3,
        probs=lambda: ramp(3, 2),
        align_size=4,
        num_experts=2,
    ),
    "grouped_dense": call(
        ft.grouped_dense,
        x=lambda: ramp(3, 4),
        kernel=lambda: ramp(2, 4, 5),
        group_sizes=lambda: ints(1, 2),
        bias=lambda: ramp(2, 5),
        layout="io",
        slots=0,
        name="n",
    ),
    "moe_unpermute": call(
        quietly(ft.moe_unpermute),
        inp=lambda: routed()[0],
        row_id_map=lambda: routed()[1],
        merging_probs=lambda: ramp(3, 2),
        restore_shape=(3, 4),
        map_type="mask",
        probs=None,
        pad_offsets=None,
    ),
    "moe_unpermute, padded": call(
        ft.moe_unpermute,
        inp=lambda: ramp(8, 4),
        row_id_map=lambda: routed()[1],
        merging_probs=lambda: ramp(3, 2),
        pad_offsets=lambda: ints(0, 2, dtype=torch.int64),
    ),
    "moe_sort_chunks_by_index": call(
        ft.moe_sort_chunks_by_index,
        inp=lambda: ramp(3, 4),
        split_sizes=lambda: ints(1, 2),
        sorted_index=lambda: ints(1, 0),
    ),
    "moe_sort_chunks_by_index_with_probs": call(
        ft.moe_sort_chunks_by_index_with_probs,
        inp=lambda: ramp(3, 4),
        probs=lambda: ramp(3),
        split_sizes=lambda: ints(1, 2),
        sorted_index=lambda: ints(1, 0),
    ),
    "make_graphed_callables": call(
        lambda **given: refused(ft.make_graphed_callables, given),
        modules=linear,
        sample_args=lambda: (X(),),
        num_warmup_iters=3,
        allow_unused_input=False,
        sample_kwargs=None,
        enabled=None,
        calibrating=None,
        recipe=None,
        amax_reduction_group=None,
        cache_quantized_params=None,
        fp8_recipe=None,
    ),
    "CudaRNGStatesTracker.add": method("add", tracker, name="b", seed=2),
    "CudaRNGStatesTracker.set_states": method("set_states", tracker, states=lambda: tracker().get_states()),
    "CudaRNGStatesTracker.fork": call(
        lambda self, name: list(within_fork(self, name)), self=tracker, name="a"
    ),
}
