"""Good calls of the torch frontend's public names, argument by argument: what ``test_junk`` spoils one at a
time."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import fp8kit_torch as ft
import torch
from fp8kit_torch import fusible
from fp8kit_torch import optimizers as fused

H, HEADS, D, FFN = 8, 2, 4, 16
USERS: Any = object()


class Call(NamedTuple):
    """``run`` with the arguments that ``good`` makes anew; ``users``: arguments that are the user's to be
    called or handed on, whose errors are the user's own."""

    run: Callable[..., Any]
    good: Callable[[], dict[str, Any]]
    users: tuple[str, ...] = ()


def call(function: Callable[..., Any], users: tuple[str, ...] = (), /, **good: Any) -> Call:
    """A function; ``good``: values, or, where they are functions, what makes them."""
    return Call(function, lambda: {name: make(value) for name, value in good.items()}, users)


def make(value: Any) -> Any:
    return value() if isinstance(value, types.FunctionType) else value


def method(name: str, made: Callable[[], Any], /, **good: Any) -> Call:
    """A method of a fresh object, "self"."""

    def run(self: Any, **given: Any) -> Any:
        return getattr(self, name)(**given)

    return call(run, self=lambda: made(), **good)


def forward(made: Callable[[], torch.nn.Module], /, recipe: Any = None, **good: Any) -> Call:
    """A module's forward, in FP8 with ``recipe``."""

    def run(self: Any, **given: Any) -> Any:
        with ft.autocast(recipe is not None, recipe=recipe):
            return self(**given)

    return call(run, self=lambda: made(), **good)


def module(kind: Callable[..., torch.nn.Module], *inputs: Any, **good: Any) -> Call:
    """A constructor, and what it made called with ``inputs``."""

    def run(**given: Any) -> Any:
        torch.manual_seed(5)
        return kind(**given)(*map(make, inputs))

    return call(run, **good)


def applied(op: Any, noop_flag: Any, tensor_lists: Any, scale: Any) -> Any:
    return fused.multi_tensor_applier(op, noop_flag, tensor_lists, scale)


def positional(function: Callable[..., Any], /, **good: Any) -> Call:
    return call(lambda **given: function(*given.values()), **good)


def ramp(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.linspace(-2, 2, count).reshape(shape).to(dtype)


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def parameter() -> torch.nn.Parameter:
    made = torch.nn.Parameter(ramp(3, 4))
    made.grad = torch.ones(3, 4)
    return made


def stepped(kind: Any = fused.FusedAdam) -> Any:
    made = kind([parameter()], lr=0.1)
    made.step()
    return made


def tracker() -> ft.CudaRNGStatesTracker:
    made = ft.CudaRNGStatesTracker()
    made.add("a", 1)
    return made


def within(switch: Any) -> Any:
    with switch:
        return ft.Linear(16, 16, device="cpu")(torch.ones(16, 16))


def params(**more: Any) -> ft.InferenceParams:
    made = ft.InferenceParams(2, 8, HEADS, D, torch.float32, qkv_format="sbhd", device="cpu", **more)
    made.pre_step({0: 2, 1: 3})
    return made


def cached(inference_params: Any) -> Any:
    core = ft.DotProductAttention(HEADS, D, layer_number=1)
    with torch.no_grad():
        return core(*[ramp(3, 2, HEADS, D)] * 3, inference_params=inference_params)


def routed() -> tuple[torch.Tensor, torch.Tensor]:
    return ft.moe_permute(ramp(3, 4), MASK(), 3)


def quietly(function: Callable[..., Any]) -> Callable[..., Any]:
    """What is deprecated is tried as well."""

    def run(**given: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return function(**given)

    return run


MASK = lambda: torch.tensor([[1, 0], [0, 1], [1, 0]], dtype=torch.bool)  # noqa: E731
X = lambda: ramp(3, 2, H)  # noqa: E731
NONE = dict.fromkeys(("sequence_parallel", "tp_group"), None)
WEIGHTS = {
    "init_method": None,
    "bias": True,
    "return_bias": False,
    "params_dtype": torch.float32,
    "device": "cpu",
    "fuse_wgrad_accumulation": False,
    "name": None,
}
NORM = {
    "eps": 1e-5,
    "normalization": "LayerNorm",
    "zero_centered_gamma": False,
    "return_layernorm_output": False,
}
HALF = {"sequence_parallel": False, "tp_size": 1, "tp_group": None, "get_rng_state_tracker": None}
GEOMETRY = {
    "attention_dropout": 0.0,
    "window_size": (1, 0),
    "bottom_right_diagonal": False,
    "layer_number": 1,
    "name": None,
    "softmax_type": "vanilla",
}
QK = {"qk_norm_type": "RMSNorm", "qk_norm_eps": 1e-6, "qk_norm_before_rope": False}
LAYER = {
    "num_gqa_groups": 1,
    "init_method": None,
    "output_layer_init_method": None,
    "params_dtype": torch.float32,
    "device": "cpu",
    "bias": True,
    "normalization": "LayerNorm",
    "zero_centered_gamma": False,
    "fuse_wgrad_accumulation": False,
    "kv_channels": 4,
    "fuse_qkv_params": False,
    "qkv_weight_interleaved": True,
    "rotary_pos_interleaved": False,
    "seq_length": 3,
    "micro_batch_size": 2,
}
CORE = {
    "core_attention_bias_type": "post_scale_bias",
    "core_attention_bias": lambda: ramp(1, HEADS, 3, 3),
    "alibi_slopes": None,
    "cu_seqlens_q": lambda: ints(0, 2, 5),
    "cu_seqlens_kv": lambda: ints(0, 2, 5),
    "cu_seqlens_q_padded": None,
    "cu_seqlens_kv_padded": None,
    "max_seqlen_q": None,
    "max_seqlen_kv": None,
    "fast_zero_fill": True,
    "pad_between_seqs": None,
}
ATTEND = {
    "attention_mask": None,
    "window_size": (1, 1),
    "bottom_right_diagonal": None,
    "checkpoint_core_attention": False,
    "inference_params": None,
}
FREQS = lambda: ft.RotaryPositionEmbedding(D, device="cpu")(4)  # noqa: E731
ROPE = {
    "tensor_format": "sbhd",
    "start_positions": lambda: ints(0, 1),
    "interleaved": False,
    "cu_seqlens": None,
    "cp_size": 1,
    "cp_rank": 0,
}
INFERENCE = {
    "max_batch_size": 2,
    "max_sequence_length": 8,
    "num_heads_kv": HEADS,
    "head_dim_k": D,
    "head_dim_v": D,
    "dtype": torch.float32,
    "is_paged": True,
    "total_num_pages": 8,
    "page_size": 2,
    "max_ctx_len": 4,
    "qkv_format": "sbhd",
    "custom_cache_manager": None,
    "device": "cpu",
}
LISTS = lambda n: lambda: [[torch.ones(3, 4)] for _ in range(n)]  # noqa: E731
NOOP = {"chunk_size": 64, "noop_flag": lambda: ints(0), "tensor_lists": None}
ADAM = NOOP | {
    "lr": 0.1,
    "beta1": 0.9,
    "beta2": 0.99,
    "epsilon": 1e-8,
    "step": 1,
    "mode": 1,
    "bias_correction": 1,
    "weight_decay": 0.1,
    "inv_scale": None,
}
ONE = lambda: torch.ones(1)  # noqa: E731


def linear(**more: Any) -> ft.Linear:
    return ft.Linear(H, 6, device="cpu", **more)


def infer(**given: Any) -> Any:
    made = ft.InferenceParams(**given)
    made.pre_step({0: 2, 1: 3})
    return cached(made)


def optimizer(kind: Any) -> Callable[..., Any]:
    return quietly(lambda **given: kind(**given).step())


CALLS: dict[str, Call] = {
    # modules' constructors
    "Linear": module(
        ft.Linear,
        X,
        in_features=H,
        out_features=6,
        parameters_split=("query", "key"),
        rng_tracker_name=None,
        parallel_mode=None,
        **HALF,
        **WEIGHTS,
    ),
    "LayerNormLinear": module(
        ft.LayerNormLinear,
        X,
        in_features=H,
        out_features=6,
        parameters_split={"query": 2, "key": 4},
        return_layernorm_output_gathered=False,
        **WEIGHTS,
        **NORM,
    ),
    "LayerNormMLP": module(
        ft.LayerNormMLP,
        X,
        hidden_size=H,
        ffn_hidden_size=FFN,
        activation="gelu",
        activation_params=None,
        output_layer_init_method=None,
        seq_length=3,
        micro_batch_size=2,
        set_parallel_mode=False,
        checkpoint=False,
        **WEIGHTS,
        **NORM,
    ),
    "LayerNorm": module(
        ft.LayerNorm,
        X,
        normalized_shape=H,
        eps=1e-5,
        params_dtype=torch.float32,
        zero_centered_gamma=False,
        device="cpu",
        hidden_size=None,
        sequence_parallel=None,
        dtype=None,
    ),
    "RMSNorm": module(
        ft.RMSNorm,
        X,
        hidden_size=H,
        eps=1e-5,
        params_dtype=torch.float32,
        zero_centered_gamma=False,
        device="cpu",
    ),
    "L2Normalization": module(ft.L2Normalization, X, eps=1e-6, seq_length=3, micro_batch_size=2),
    "GroupedLinear": module(
        ft.GroupedLinear,
        lambda: ramp(5, H),
        lambda: [2, 3],
        num_gemms=2,
        in_features=H,
        out_features=6,
        **WEIGHTS,
    ),
    "DotProductAttention": module(
        ft.DotProductAttention,
        *[lambda: ramp(3, 2, HEADS, D)] * 3,
        num_attention_heads=HEADS,
        kv_channels=(D, D),
        num_gqa_groups=HEADS,
        qkv_format="sbhd",
        attn_mask_type="causal",
        attention_type="self",
        softmax_scale=0.5,
        device="cpu",
        return_max_logit=False,
        **GEOMETRY,
        **HALF,
    ),
    "MultiheadAttention": module(
        ft.MultiheadAttention,
        X,
        hidden_size=H,
        num_attention_heads=HEADS,
        attn_mask_type="causal",
        qkv_format="sbhd",
        layernorm_epsilon=1e-5,
        input_layernorm=True,
        attention_type="self",
        return_bias=False,
        return_layernorm_output=False,
        **LAYER,
        **GEOMETRY,
        **QK,
    ),
    "TransformerLayer": module(
        ft.TransformerLayer,
        X,
        hidden_size=H,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        layernorm_epsilon=1e-5,
        hidden_dropout=0.0,
        self_attn_mask_type="causal",
        enc_dec_attn_mask_type="no_mask",
        enc_dec_bottom_right_diagonal=None,
        enc_dec_window_size=None,
        activation="gelu",
        activation_params=None,
        apply_residual_connection_post_layernorm=False,
        output_layernorm=False,
        parallel_attention_mlp=False,
        layer_type="encoder",
        drop_path_rate=0.0,
        attn_input_format="sbhd",
        **LAYER,
        **GEOMETRY,
        **QK,
    ),
    "RotaryPositionEmbedding": module(
        ft.RotaryPositionEmbedding,
        4,
        dim=D,
        rotary_percent=1.0,
        seq_len_interpolation_factor=2,
        pretrained_max_position_embeddings=2,
        rotary_base=10000.0,
        interleaved=False,
        device="cpu",
    ),
    "Fp8Padding": module(ft.Fp8Padding, lambda: ramp(5, H), lambda: [2, 3], num_gemms=2, align_size=4),
    "Fp8Unpadding": module(ft.Fp8Unpadding, lambda: ramp(8, H), lambda: [2, 3], num_gemms=2, align_size=4),
    "InferenceParams": call(infer, **INFERENCE),
    "ops.Linear": module(
        fusible.Linear,
        X,
        in_features=H,
        out_features=6,
        bias=True,
        device="cpu",
        dtype=torch.float32,
        accumulate_into_main_grad=False,
    ),
    "ops.Bias": module(fusible.Bias, X, size=H, device="cpu", dtype=torch.float32, tensor_parallel=False),
    # their calls, as they are and in FP8
    "Linear.forward": forward(linear, inp=X, is_first_microbatch=None, fp8_output=False, fp8_grad=False),
    "Linear.forward, delayed": forward(
        linear, ft.DelayedScaling(), inp=X, is_first_microbatch=True, fp8_output=False, fp8_grad=False
    ),
    "Linear.forward, current": forward(
        linear, ft.Float8CurrentScaling(), inp=X, is_first_microbatch=None, fp8_output=True, fp8_grad=True
    ),
    "Linear.reset_parameters": method("reset_parameters", linear, defer_init=False),
    "Linear.set_extra_state": method(
        "set_extra_state", linear, state=lambda: torch.zeros(0, dtype=torch.uint8)
    ),
    "LayerNormLinear.forward": forward(
        lambda: ft.LayerNormLinear(H, 6, device="cpu"),
        ft.DelayedScaling(),
        inp=X,
        is_first_microbatch=None,
        fp8_output=False,
        fp8_grad=False,
    ),
    "LayerNormMLP.forward": forward(
        lambda: ft.LayerNormMLP(H, FFN, device="cpu"), ft.DelayedScaling(), inp=X, is_first_microbatch=None
    ),
    "LayerNorm.forward": forward(lambda: ft.LayerNorm(H, device="cpu"), inp=X),
    "L2Normalization.forward": forward(ft.L2Normalization, inp=X),
    "GroupedLinear.forward": forward(
        lambda: ft.GroupedLinear(2, H, 6, device="cpu"),
        ft.DelayedScaling(),
        inp=lambda: ramp(5, H),
        m_splits=lambda: [2, 3],
        is_first_microbatch=None,
    ),
    "DotProductAttention.forward": forward(
        lambda: ft.DotProductAttention(HEADS, D),
        query_layer=lambda: ramp(3, 2, HEADS, D),
        key_layer=lambda: ramp(3, 2, HEADS, D),
        value_layer=lambda: ramp(3, 2, HEADS, D),
        qkv_format="sbhd",
        attn_mask_type="padding",
        qkv_layer=None,
        kv_layer=None,
        qkv_interleave_dim=-3,
        **ATTEND,
        **CORE,
    ),
    "DotProductAttention.forward, thd": forward(
        lambda: ft.DotProductAttention(HEADS, D, qkv_format="thd"),
        query_layer=lambda: ramp(5, HEADS, D),
        kv_layer=lambda: ramp(5, HEADS * 2 * D),
        attn_mask_type="padding_causal",
        cu_seqlens_q=lambda: ints(0, 2, 4),
        cu_seqlens_kv=lambda: ints(0, 2, 4),
        cu_seqlens_q_padded=lambda: ints(0, 3, 5),
        cu_seqlens_kv_padded=lambda: ints(0, 3, 5),
        max_seqlen_q=3,
        max_seqlen_kv=3,
    ),
    "DotProductAttention.forward, arbitrary": forward(
        lambda: ft.DotProductAttention(HEADS, D),
        qkv_layer=lambda: ramp(3, 2, 3 * HEADS * D),
        qkv_interleave_dim=-2,
        attn_mask_type="arbitrary",
        attention_mask=lambda: torch.zeros(1, 1, 3, 3, dtype=torch.bool),
        core_attention_bias_type="alibi",
        alibi_slopes=lambda: torch.ones(HEADS),
    ),
    "MultiheadAttention.forward": forward(
        lambda: ft.MultiheadAttention(H, HEADS, device="cpu", attention_dropout=0.0),
        hidden_states=X,
        encoder_output=None,
        attn_mask_type="padding",
        is_first_microbatch=None,
        rotary_pos_emb=FREQS,
        **ATTEND,
        **CORE,
    ),
    "TransformerLayer.forward": forward(
        lambda: ft.TransformerLayer(H, FFN, HEADS, device="cpu", layer_type="decoder").eval(),
        hidden_states=X,
        self_attn_mask_type="padding",
        encoder_output=lambda: ramp(3, 2, H),
        enc_dec_attn_mask=lambda: torch.zeros(2, 1, 1, 3, dtype=torch.bool),
        enc_dec_attn_mask_type="padding",
        enc_dec_window_size=None,
        enc_dec_bottom_right_diagonal=None,
        is_first_microbatch=None,
        rotary_pos_emb=FREQS,
        **ATTEND,
        **CORE,
    ),
    "DotProductAttention.forward, cache": call(cached, inference_params=params),
    "RotaryPositionEmbedding.forward": forward(
        lambda: ft.RotaryPositionEmbedding(D, device="cpu"), max_seq_len=4, offset=1
    ),
    "Fp8Padding.forward": forward(
        lambda: ft.Fp8Padding(2, 4), inp=lambda: ramp(5, H), m_splits=lambda: [2, 3]
    ),
    "Fp8Unpadding.forward": forward(
        lambda: ft.Fp8Unpadding(2, 4), inp=lambda: ramp(8, H), m_splits=lambda: [2, 3]
    ),
    "InferenceParams.pre_step": method("pre_step", params, step_dict=lambda: {0: 1, 1: 1}),
    "ops.Bias.forward": forward(lambda: fusible.Bias(H, device="cpu"), inp=X),
    # functions
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
    # optimizers
    "FusedAdam": call(
        optimizer(fused.FusedAdam),
        params=lambda: [parameter()],
        lr=0.1,
        betas=(0.9, 0.99),
        eps=1e-8,
        weight_decay=0.1,
        amsgrad=False,
        bias_correction=True,
        adam_w_mode=True,
        capturable=False,
        master_weights=False,
        master_weight_dtype=torch.float32,
        exp_avg_dtype=torch.float32,
        exp_avg_sq_dtype=torch.float32,
        use_decoupled_grad=False,
        store_param_remainders=False,
        set_grad_none=None,
        states="coat",
    ),
    "FusedAdam.groups": call(
        lambda **group: fused.FusedAdam([group]).step(),
        params=lambda: [parameter()],
        lr=0.1,
        betas=(0.9, 0.99),
        eps=1e-8,
        weight_decay=0.1,
        bias_correction=True,
    ),
    "FusedSGD": call(
        optimizer(fused.FusedSGD),
        params=lambda: [parameter()],
        lr=0.1,
        momentum=0.9,
        dampening=0.0,
        weight_decay=0.1,
        nesterov=True,
        wd_after_momentum=False,
        materialize_master_grads=True,
        set_grad_none=None,
    ),
    "FusedSGD.groups": call(
        lambda **group: fused.FusedSGD([group], lr=0.1).step(),
        params=lambda: [parameter()],
        lr=0.1,
        momentum=0.9,
        dampening=0.0,
        weight_decay=0.1,
        nesterov=True,
    ),
    "FusedAdam.load_state_dict": method(
        "load_state_dict", stepped, state_dict=lambda: stepped().state_dict()
    ),
    "FusedSGD.load_state_dict": method(
        "load_state_dict",
        lambda: stepped(fused.FusedSGD),
        state_dict=lambda: stepped(fused.FusedSGD).state_dict(),
    ),
    "FusedAdam.zero_grad": method("zero_grad", stepped, set_to_none=True),
    "FusedAdam.add_param_group": method(
        "add_param_group", stepped, param_group=lambda: {"params": [parameter()]}
    ),
    "FusedAdam.initialize_state": call(
        lambda **given: of_adam("initialize_state", **given), param=None, store_param_remainders=False
    ),
    "FusedAdam.get_unscaled_state": call(
        lambda **given: of_adam("get_unscaled_state", **given), param=None, state_name="exp_avg"
    ),
    "FusedAdam.set_scaled_state": call(
        lambda **given: of_adam("set_scaled_state", **given),
        param=None,
        state_name="exp_avg",
        unscaled_state=lambda: torch.ones(3, 4),
    ),
    "multi_tensor_adam": positional(fused.multi_tensor_adam, **ADAM | {"tensor_lists": LISTS(4)}),
    "multi_tensor_adam, tensors": positional(
        fused.multi_tensor_adam_capturable,
        **ADAM | {"tensor_lists": LISTS(5), "lr": ONE, "step": ONE, "inv_scale": ONE},
    ),
    "multi_tensor_sgd": positional(
        fused.multi_tensor_sgd,
        **NOOP | {"tensor_lists": LISTS(3)},
        weight_decay=0.1,
        momentum=0.9,
        dampening=0.0,
        lr=0.1,
        nesterov=True,
        first_run=False,
        wd_after_momentum=False,
        scale=1.0,
    ),
    "multi_tensor_scale": positional(
        fused.multi_tensor_scale, **NOOP | {"tensor_lists": LISTS(2)}, scale=2.0
    ),
    "multi_tensor_l2norm": positional(
        fused.multi_tensor_l2norm, **NOOP | {"tensor_lists": LISTS(1)}, per_tensor=True
    ),
    "multi_tensor_unscale_l2norm": positional(
        fused.multi_tensor_unscale_l2norm, **NOOP | {"tensor_lists": LISTS(1)}, inv_scale=ONE, per_tensor=True
    ),
    "multi_tensor_applier": call(
        applied,
        ("op",),
        op=lambda: fused.multi_tensor_scale,
        noop_flag=lambda: ints(0),
        tensor_lists=LISTS(2),
        scale=2.0,
    ),
    "MultiTensorApply": call(fused.MultiTensorApply, chunk_size=64),
}


def of_adam(name: str, param: Any, **given: Any) -> Any:
    made = stepped()
    return getattr(made, name)(made.param_groups[0]["params"][0] if param is None else param, **given)


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
