"""Good calls of the public names, argument by argument: what ``test_arguments`` spoils one at a time.

A ``Call`` makes everything it needs anew, so that a spoilt call changes nothing for the next one.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import fp8kit as fk
from fp8kit import arrays, autograd, formats, nn, numerics, optim, recipe, serialization, testing
from fp8kit.arrays import CPU

X = np.linspace(-3, 3, 12, dtype=np.float32).reshape(3, 4)
IDS = np.array([0, 2, 1])
# of files that are never written: every call on them is refused, or writes to a folder of its own
FOLDER = Path(tempfile.gettempdir())


class Call(NamedTuple):
    """``run`` with the arguments that ``good`` makes; ``state`` says what must be as it was after a refusal
    (bytes by name)."""

    run: Callable[..., Any]
    good: Callable[[], dict[str, Any]]
    state: Callable[[dict[str, Any]], dict[str, bytes]] = lambda given: {}


def view(value: Any = X) -> arrays.ArrayView:
    return arrays.as_view(np.array(value))


def leaf(value: Any = X) -> fk.Tensor:
    made = fk.tensor(np.array(value, np.float32), requires_grad=True)
    made.grad = view(np.ones(made.shape, np.float32))
    return made


def method(name: str, make: Callable[[], Any], /, **good: Any) -> Call:
    """A method of a fresh object; ``good`` holds functions that make the arguments."""

    def run(self: Any, **given: Any) -> Any:
        return getattr(self, name)(**given)

    return Call(run, lambda: {"self": make(), **{key: value() for key, value in good.items()}}, state_of)


def plain(function: Callable[..., Any], /, **good: Any) -> Call:
    """A function or a constructor; ``good`` as for ``method``."""
    return Call(function, lambda: {key: value() for key, value in good.items()}, state_of)


def positional(function: Callable[..., Any], /, **good: Any) -> Call:
    """A function that takes its arguments by position."""
    return Call(
        lambda **given: function(*given.values()),
        lambda: {key: value() for key, value in good.items()},
        state_of,
    )


def state_of(given: dict[str, Any]) -> dict[str, bytes]:
    """The bytes of every array, tensor and module among the arguments."""
    found: dict[str, bytes] = {}
    for key, value in given.items():
        for name, array in _arrays(value).items():
            found[f"{key}.{name}"] = np.ascontiguousarray(array).tobytes()
    return found


def _arrays(value: Any) -> dict[str, Any]:
    if isinstance(value, np.ndarray):
        return {"": value} if value.dtype != object and value.nbytes < 2**30 else {}
    if isinstance(value, arrays.ArrayView | fk.Tensor):
        grad = getattr(value, "grad", None)
        return {"": value.numpy()} | (
            {"grad": arrays.as_view(grad).numpy()} if isinstance(grad, arrays.ArrayView | np.ndarray) else {}
        )
    if isinstance(value, fk.QuantizedArray):
        return {"data": np.asarray(value.data), "scale_inv": np.asarray(value.scale_inv)}
    if isinstance(value, nn.Module | optim.Optimizer | optim.GradScaler):
        return {name: arrays.as_view(array).numpy().copy() for name, array in value.state_dict().items()}
    if isinstance(value, nn.InferenceParams):
        return {
            name: array
            for part in value.convert_paged_to_nonpaged(1)
            for name, array in _arrays(part).items()
        } | {f"{name} of {value.sequences}": view.numpy() for name, view in value._on_device.items()}
    if isinstance(value, list | tuple):
        return {f"{i}{name}": array for i, part in enumerate(value) for name, array in _arrays(part).items()}
    return {}


class Double(autograd.Function):
    """A user's function."""

    @staticmethod
    def forward(context: Any, *inputs: Any) -> Any:
        context.save(inputs[0])
        return inputs[0] * np.float32(2)

    @staticmethod
    def backward(context: Any, *cotangents: Any) -> Any:
        return cotangents[0] * np.float32(2)


def module(make: Callable[..., nn.Module], call: Callable[[], tuple[Any, ...]], /, **good: Any) -> Call:
    """A constructor, and a call of what it made."""

    def run(**given: Any) -> Any:
        return make(**given)(*call())

    return Call(run, lambda: {key: value() for key, value in good.items()}, state_of)


def always(value: Any) -> Callable[[], Any]:
    return lambda: value


def min_of() -> numerics.Needs:
    return numerics.request(["min"])


def sums_of(x: Any) -> Any:
    return numerics.collect(x, min_of()).numpy()


def stepped() -> optim.AdamW:
    made = optim.AdamW([leaf()], lr=0.1)
    made.step()
    return made


def saved() -> Path:
    path = Path(tempfile.mkdtemp()) / "file"
    serialization.save(path, {"x": X})
    return path


def fresh_path() -> Path:
    return Path(tempfile.mkdtemp()) / "file"


def q8() -> fk.QuantizedArray:
    return fk.quantize(X)


LINEAR = {
    "in_features": always(4),
    "out_features": always(6),
    "init_method": always(None),
    "bias": always(True),
    "return_bias": always(False),
    "params_dtype": always("float32"),
    "parameters_split": always(("a", "b")),
    "device": always("cpu"),
    "name": always("n"),
}
NORM = {
    "eps": always(1e-5),
    "params_dtype": always("float32"),
    "zero_centered_gamma": always(False),
    "device": always("cpu"),
}
INP = lambda: (X,)  # noqa: E731
TOKENS = np.linspace(-1, 1, 24, dtype=np.float32).reshape(3, 2, 4)  # (s, b, H)
HINTS = {"seq_length": always(3), "micro_batch_size": always(None)}
ATTENTION = HINTS | {
    "hidden_size": always(4),
    "num_attention_heads": always(2),
    "num_gqa_groups": always(1),
    "kv_channels": always(2),
    "attention_dropout": always(0.0),
    "layernorm_epsilon": always(1e-5),
    "init_method": always(None),
    "output_layer_init_method": always(None),
    "layer_number": always(1),
    "window_size": always((1, 0)),
    "params_dtype": always("float32"),
    "fuse_qkv_params": always(True),
    "zero_centered_gamma": always(False),
    "qkv_weight_interleaved": always(True),
    "bias": always(True),
    "normalization": always("RMSNorm"),
    "device": always("cpu"),
    "name": always("n"),
    "rotary_pos_interleaved": always(False),
    "softmax_type": always("learnable"),
    "qk_norm_type": always("L2Normalization"),
    "qk_norm_eps": always(1e-6),
    "qk_norm_before_rope": always(True),
    "qk_norm_learned": always(True),
    "softmax_scale": always(0.125),
    "bottom_right_diagonal": always(None),
}
SEEN = {
    "hidden_states": lambda: view(TOKENS),
    "attention_mask": always(None),
    "window_size": always((1, 0)),
    "bottom_right_diagonal": always(None),
    "is_first_microbatch": always(None),
    "checkpoint_core_attention": always(False),
    "inference_params": always(None),
    "rotary_pos_emb": lambda: nn.RotaryPositionEmbedding(2, device="cpu")(3),
    "core_attention_bias_type": always("no_bias"),
    "core_attention_bias": always(None),
    "alibi_slopes": always(None),
    "cu_seqlens_q": always(None),
    "cu_seqlens_kv": always(None),
    "max_seqlen_q": always(None),
    "fast_zero_fill": always(True),
    "pad_between_seqs": always(None),
}
CACHED = {
    "max_batch_size": always(2),
    "max_sequence_length": always(8),
    "num_heads_kv": always(1),
    "head_dim_k": always(4),
    "dtype": always("float32"),
    "head_dim_v": always(3),
    "is_paged": always(True),
    "total_num_pages": always(5),
    "page_size": always(4),
    "max_ctx_len": always(6),
    "qkv_format": always("thd"),
    "custom_cache_manager": always(None),
    "device": always("cpu"),
}


@functools.cache
def layer(kind: str) -> nn.Module:
    """A layer whose calls change nothing in it."""
    if kind == "decoder":
        return nn.TransformerLayer(4, 6, 2, layer_type="decoder", device="cpu")
    return nn.MultiheadAttention(4, 2, device="cpu")


def cached(**given: Any) -> nn.InferenceParams:
    made = nn.InferenceParams(**(given or {name: value() for name, value in CACHED.items()}))
    made.pre_step({"a": 3, "b": 1})
    made.allocate_memory(1)
    return made


CALLS: dict[str, Call] = {
    "ArrayView": plain(
        arrays.ArrayView,
        ptr=always(X.ctypes.data),
        shape=always((3, 4)),
        dtype=always(formats.float32),
        device=always(CPU),
        owner=always(X),
    ),
    "ArrayView.reshape": positional(
        lambda self, *shape: self.reshape(*shape), self=view, first=always(4), second=always(-1)
    ),
    "ArrayView.slice": method("slice", view, dim=always(0), start=always(1), length=always(2)),
    "ArrayView.transpose": positional(
        lambda self, *axes: self.transpose(*axes), self=view, first=always(1), second=always(0)
    ),
    "ArrayView.view": method("view", view, dtype=always(formats.int32)),
    "Device": plain(
        lambda kind, index: arrays.empty((2,), formats.uint8, arrays.Device(kind, index)),
        kind=always("cpu"),
        index=always(0),
    ),
    "synchronize": plain(fk.synchronize, where=always(CPU)),
    "Tensor": plain(fk.Tensor, view=view, requires_grad=always(True)),
    "Tensor.copy_": method("copy_", lambda: fk.tensor(X.copy()), source=view),
    "Tensor.add_": method("add_", lambda: fk.tensor(X.copy()), other=view),
    "Tensor.__add__": positional(lambda a, b: a + b, a=leaf, b=leaf),
    "Tensor.register_hook": positional(
        lambda t, hook: (t.register_hook(hook), (t + t).backward(np.ones_like(X))),
        t=leaf,
        hook=always(lambda g: None),
    ),
    "Tensor.backward": positional(
        lambda t, gradient, retain: (t + t).backward(gradient, retain),
        t=leaf,
        gradient=view,
        retain=always(False),
    ),
    "Tensor.reshape": positional(lambda t, a, b: t.reshape(a, b), t=leaf, a=always(6), b=always(2)),
    "Tensor.item": positional(lambda t: t.item(), t=lambda: fk.tensor(np.ones(1, np.float32))),
    "no_grad": plain(fk.no_grad),
    "tensor": plain(
        fk.tensor,
        array=lambda: X.copy(),
        requires_grad=always(True),
        dtype=always("bfloat16"),
        device=always("cpu"),
    ),
    "autograd.set_grad_enabled": plain(
        lambda enabled: autograd.set_grad_enabled(enabled).__exit__(), enabled=always(True)
    ),
    "autocast": plain(
        lambda **given: fk.autocast(**given).__enter__().__exit__(None, None, None),
        enabled=always(True),
        calibrating=always(False),
        recipe=lambda: recipe.DelayedScaling(),
        amax_reduction_group=always(None),
        check_finite=always(False),
    ),
    "deterministic": plain(lambda enabled: _within(fk.deterministic(enabled)), enabled=always(False)),
    "use_backend": plain(lambda name: _within(fk.use_backend(name)), name=always("reference")),
    "override": plain(
        lambda **given: _within(fk.override(**given)),
        operation=always("add"),
        function=always(None),
        verify=always(True),
        implementation=always(lambda a, b, out, stream: None),
    ),
    "load": plain(fk.load, path=saved, module=lambda: {"x": np.zeros_like(X)}, strict=always(True)),
    "save": plain(fk.save, path=fresh_path, module=lambda: {"x": X}, metadata=lambda: {"a": "b"}),
    "numerics.tensor_statistics": plain(
        numerics.tensor_statistics,
        x=lambda: X,
        stats=always(("min", "sqnr", "mxfp8_mse", "cosine")),
        tensor=always("weight"),
        recipe=always("current"),
        twin=lambda: X + 1,
        quantized=always(None),
    ),
    "numerics.Operand": plain(
        numerics.Operand, tensor=always("weight"), quantization=always(None), transposed=always(True)
    ),
    "numerics.request": plain(
        numerics.request, stats=always(["min", "mxfp8_mse"]), operand=lambda: numerics.Operand("gradient")
    ),
    "numerics.collect": plain(
        numerics.collect,
        x=lambda: X,
        needs=lambda: numerics.request(["min", "cosine"]),
        quantized=always(None),
        twin=lambda: X + 1,
    ),
    "numerics.merge": plain(numerics.merge, needs=min_of, a=lambda: sums_of(X), b=lambda: sums_of(X)),
    "numerics.values": plain(numerics.values, needs=min_of, sums=lambda: sums_of(X)),
    "QuantizedArray": plain(
        fk.QuantizedArray,
        data=lambda: np.zeros((3, 4), np.uint8),
        scale_inv=lambda: np.ones((3, 1), np.float32),
        format=always(fk.E2M1),
        scaling=always("nvfp4_1x16"),
        scale_codes=lambda: np.full((3, 1), 0x38, np.uint8),
        tensor_scale_inv=lambda: np.ones(1, np.float32),
        scale_rule=always("exact"),
        along=always(-1),
        rotation=always(None),
    ),
    "QuantizedArray.from_packed": plain(
        fk.QuantizedArray.from_packed,
        packed=lambda: np.zeros((3, 2), np.uint8),
        scale_inv=lambda: np.ones(1, np.float32),
        format=always(fk.E2M1),
        scaling=always("tensor"),
    ),
    "QuantizedArray.dequantize": method("dequantize", q8, dtype=always("float32"), rotated=always(True)),
    "QuantizedArray.matmul": method(
        "matmul", q8, other=lambda: q8().T, dtype=always("float32"), fast_accumulate=always(False)
    ),
    "QuantizedArray.explain": method("explain", q8, other=lambda: q8().T),
    "QuantizedArray.packed": positional(lambda t: t.packed(), t=lambda: fk.quantize(X, fk.E2M1)),
    "QuantizedArray.swizzled_scales": positional(
        lambda t: t.swizzled_scales(), t=lambda: fk.quantize(X, scaling="nvfp4_1x16")
    ),
    "QuantizedArray.reshape": positional(lambda t, a, b: t.reshape(a, b), t=q8, a=always(6), b=always(-1)),
    "QuantizedArray.__getitem__": positional(lambda t, index: t[index], t=q8, index=always(1)),
    "quantize": plain(
        fk.quantize,
        x=lambda: X.copy(),
        format=always(fk.E5M2),
        scale=always(2.0),
        scaling=always("tensor"),
        rounding=always("stochastic"),
        saturate=always(True),
        rng=always((1, 2)),
        scale_rule=always(None),
        stochastic_bits=always(8),
        along=always(0),
        hadamard=always(16),
        signs=always("random"),
    ),
    "matmul": plain(
        fk.matmul, a=q8, b=lambda: q8().T, accumulate=always("hopper_fast"), dtype=always("float32")
    ),
    "Accumulation": plain(fk.Accumulation, fraction_bits=always(13), chunk=always(32), promote=always(128)),
    "Format": plain(
        fk.Format,
        name=always("x"),
        exponent_bits=always(4),
        mantissa_bits=always(3),
        bias=always(7),
        special=always("fn"),
        signed=always(True),
        zero=always(True),
        twos_complement=always(False),
    ),
    "draw_from": plain(
        lambda source: _within(fk.draw_from(source)), source=always(lambda device: np.array([1, 2]))
    ),
    "manual_seed": plain(fk.manual_seed, seed=always(3)),
    "warmup": plain(
        fk.warmup,
        hidden=always(4),
        ffn=always(6),
        heads=always(2),
        sequence=always(3),
        batch=always(1),
        dtype=always("float32"),
        recipe=lambda: recipe.DelayedScaling(),
        activation=always("relu"),
        normalization=always("RMSNorm"),
        arch=always(None),
        device=always("cpu"),
        threads=always(1),
    ),
    "checkpoint": positional(fk.checkpoint, function=always(lambda x: x + x), x=leaf),
    "formats.dtype": plain(formats.dtype, value=always("float32")),
    "formats.dtype_from_dlpack": plain(formats.dtype_from_dlpack, code=always(2), bits=always(32)),
    "formats.dtype_of_format": plain(formats.dtype_of_format, fmt=always(fk.E4M3)),
    "arrays.device": plain(arrays.device, value=always("cpu")),
    "arrays.as_view": plain(arrays.as_view, array=lambda: X.copy()),
    "arrays.as_sizes": plain(arrays.as_sizes, shape=always((2, 3))),
    "arrays.available": plain(arrays.available, kind=always("cpu")),
    "arrays.contiguous": plain(arrays.contiguous, view=view),
    "arrays.copy": plain(arrays.copy, dst=view, src=view),
    "arrays.current_stream": plain(arrays.current_stream, where=always(CPU)),
    "arrays.empty": plain(arrays.empty, shape=always((2, 3)), dtype=always(formats.uint8), where=always(CPU)),
    "arrays.zeros": plain(arrays.zeros, shape=always((2, 3)), dtype=always(formats.uint8), where=always(CPU)),
    "arrays.zero_": plain(arrays.zero_, view=view),
    "arrays.provider": plain(arrays.provider, where=always(CPU)),
    "arrays.to": plain(arrays.to, view=view, where=always(CPU)),
    "arrays.to_library": plain(arrays.to_library, view=view, like=always(X)),
    "nn.Linear": module(nn.Linear, INP, **LINEAR),
    "nn.Linear.forward": positional(
        lambda inp, first: nn.Linear(4, 2, device="cpu")(inp, first), inp=view, first=always(None)
    ),
    "nn.LayerNorm": module(
        nn.LayerNorm, INP, normalized_shape=always(4), gain=always(0.5), learned=always(True), **NORM
    ),
    "nn.RMSNorm": module(
        nn.RMSNorm, INP, hidden_size=always(4), gain=always(0.5), learned=always(True), **NORM
    ),
    "nn.LayerNorm.forward": positional(lambda inp: nn.LayerNorm(4, device="cpu")(inp), inp=view),
    "nn.LayerNormLinear": module(
        nn.LayerNormLinear,
        INP,
        **LINEAR,
        **{k: v for k, v in NORM.items() if k not in LINEAR},
        normalization=always("LayerNorm"),
        return_layernorm_output=always(False),
    ),
    "nn.LayerNormMLP": module(
        nn.LayerNormMLP,
        INP,
        hidden_size=always(4),
        ffn_hidden_size=always(6),
        return_bias=always(False),
        init_method=always(None),
        bias=always(True),
        normalization=always("LayerNorm"),
        activation=always("clamped_swiglu"),
        activation_params=lambda: {"limit": 2.0},
        output_layer_init_method=always(None),
        return_layernorm_output=always(False),
        name=always("n"),
        checkpoint=always(False),
        smooth_swiglu=always(None),
        input_layernorm=always(True),
        **NORM,
        **HINTS,
    ),
    "nn.L2Normalization": module(nn.L2Normalization, INP, eps=always(1e-6), **HINTS),
    "nn.L2Normalization.forward": positional(lambda inp: nn.L2Normalization()(inp), inp=view),
    "nn.DotProductAttention": module(
        nn.DotProductAttention,
        lambda: (TOKENS[..., None], TOKENS[:, :, :2, None], TOKENS[:, :, 2:, None]),
        num_attention_heads=always(4),
        kv_channels=always((1, 1)),
        num_gqa_groups=always(2),
        attention_dropout=always(0.1),
        qkv_format=always("sbhd"),
        attn_mask_type=always("causal"),
        window_size=always((1, 0)),
        bottom_right_diagonal=always(False),
        layer_number=always(2),
        attention_type=always("cross"),
        softmax_scale=always(0.5),
        softmax_type=always("learnable"),
        name=always("n"),
        device=always("cpu"),
    ),
    "nn.DotProductAttention.forward": plain(
        lambda **given: nn.DotProductAttention(4, 1, 2, device="cpu")(**given),
        query_layer=lambda: view(TOKENS[..., None]),
        key_layer=lambda: view(TOKENS[:, :, :2, None]),
        value_layer=lambda: view(TOKENS[:, :, 2:, None]),
        attention_mask=always(None),
        qkv_format=always("sbhd"),
        cu_seqlens_q=lambda: np.array([0, 2, 3], np.int32),
        cu_seqlens_kv=lambda: np.array([0, 2, 3], np.int32),
        attn_mask_type=always("padding_causal"),
        window_size=always((1, 0)),
        bottom_right_diagonal=always(None),
        checkpoint_core_attention=always(True),
        core_attention_bias_type=always("no_bias"),
        core_attention_bias=always(None),
        alibi_slopes=always(None),
        fast_zero_fill=always(True),
        inference_params=always(None),
        pad_between_seqs=always(False),
        qkv_layer=always(None),
        kv_layer=always(None),
        qkv_interleave_dim=always(-3),
    ),
    "nn.DotProductAttention.forward.mask": plain(
        lambda attention_mask: nn.DotProductAttention(4, 1, attn_mask_type="padding", device="cpu")(
            *[TOKENS[..., None]] * 3, attention_mask
        ),
        attention_mask=lambda: np.zeros((2, 1, 1, 3), bool),
    ),
    "nn.MultiheadAttention": module(
        nn.MultiheadAttention,
        lambda: (TOKENS,),
        attn_mask_type=always("causal"),
        input_layernorm=always(True),
        attention_type=always("self"),
        return_bias=always(True),
        return_layernorm_output=always(True),
        qkv_format=always("sbhd"),
        **ATTENTION,
    ),
    "nn.MultiheadAttention.forward": plain(
        lambda **given: layer("attention")(**given),
        attn_mask_type=always("causal"),
        encoder_output=always(None),
        **SEEN,
    ),
    "nn.TransformerLayer": module(
        nn.TransformerLayer,
        lambda: (TOKENS,),
        ffn_hidden_size=always(6),
        hidden_dropout=always(0.1),
        self_attn_mask_type=always("causal"),
        enc_dec_attn_mask_type=always("no_mask"),
        enc_dec_window_size=always(None),
        enc_dec_bottom_right_diagonal=always(None),
        output_layernorm=always(True),
        apply_residual_connection_post_layernorm=always(False),
        parallel_attention_mlp=always(False),
        layer_type=always("encoder"),
        drop_path_rate=always(0.1),
        activation=always("gelu"),
        activation_params=always(None),
        attn_input_format=always("sbhd"),
        norm_position=always("before"),
        norm_gain=always(None),
        smooth_swiglu=always(None),
        **ATTENTION,
    ),
    "nn.TransformerLayer.forward": plain(
        lambda **given: layer("decoder")(**given),
        self_attn_mask_type=always("causal"),
        encoder_output=lambda: view(TOKENS[:1]),
        enc_dec_attn_mask=always(None),
        enc_dec_attn_mask_type=always("no_mask"),
        enc_dec_window_size=always(None),
        enc_dec_bottom_right_diagonal=always(None),
        **SEEN,
    ),
    "nn.InferenceParams": plain(cached, **CACHED),
    "nn.InferenceParams.pre_step": method("pre_step", cached, step_dict=lambda: {"a": 1, "c": 2}),
    "nn.InferenceParams.rope_starts": method("rope_starts", cached, batch=always(2)),
    "nn.InferenceParams.allocate_memory": method("allocate_memory", cached, layer_number=always(2)),
    "nn.InferenceParams.convert_paged_to_nonpaged": method(
        "convert_paged_to_nonpaged", cached, layer_number=always(1)
    ),
    "nn.Embedding": module(
        nn.Embedding,
        lambda: (IDS,),
        num_embeddings=always(5),
        embedding_dim=always(4),
        init_method=always(None),
        params_dtype=always("float32"),
        device=always("cpu"),
    ),
    "nn.Embedding.forward": positional(
        lambda ids: nn.Embedding(5, 4, device="cpu")(ids), ids=lambda: IDS.copy()
    ),
    "nn.Dropout": module(nn.Dropout, INP, p=always(0.5)),
    "nn.Dropout.forward": positional(lambda inp: nn.Dropout(0.5)(inp), inp=view),
    "nn.cross_entropy": plain(
        nn.cross_entropy,
        logits=view,
        targets=lambda: IDS.copy(),
        reduction=always("mean"),
        label_smoothing=always(0.1),
        ignore_index=always(-100),
    ),
    "nn.RotaryPositionEmbedding": module(
        nn.RotaryPositionEmbedding,
        lambda: (3,),
        dim=always(4),
        rotary_percent=always(0.5),
        seq_len_interpolation_factor=always(2),
        pretrained_max_position_embeddings=always(2),
        rotary_base=always(100.0),
        interleaved=always(False),
        device=always("cpu"),
    ),
    "nn.RotaryPositionEmbedding.forward": plain(
        lambda **given: nn.RotaryPositionEmbedding(4, device="cpu")(**given),
        max_seq_len=always(3),
        offset=always(1),
    ),
    "nn.apply_rotary_pos_emb": plain(
        nn.apply_rotary_pos_emb,
        t=lambda: view(np.ones((3, 2, 1, 4), np.float32)),
        freqs=lambda: nn.RotaryPositionEmbedding(4, device="cpu")(3),
        tensor_format=always("sbhd"),
        start_positions=lambda: np.zeros(2, np.int32),
        interleaved=always(False),
        cu_seqlens=always(None),
        cu_seqlens_padded=always(None),
    ),
    "nn.ModuleList": plain(nn.ModuleList, modules=lambda: [nn.Dropout(0.1)]),
    "nn.Sequential": positional(lambda first: nn.Sequential(first)(X), first=lambda: nn.Dropout(0.1)),
    "nn.Parameter": plain(nn.Parameter, view=view),
    "nn.Module.load_state_dict": method(
        "load_state_dict",
        lambda: nn.LayerNorm(4, device="cpu"),
        strict=always(True),
        state=lambda: {"weight": X[0].copy(), "bias": X[1].copy()},
    ),
    "nn.Module.apply": method(
        "apply", lambda: nn.LayerNorm(4, device="cpu"), function=always(lambda m: None)
    ),
    "nn.Module.train": method("train", lambda: nn.LayerNorm(4, device="cpu"), mode=always(True)),
    "nn.get_rng_state": plain(nn.get_rng_state),
    "nn.set_rng_state": plain(nn.set_rng_state, state=nn.get_rng_state),
    "nn.RandomState": plain(lambda state: nn.RandomState().load_state_dict(state), state=nn.get_rng_state),
    "nn.normal_init": plain(
        lambda **given: nn.normal_init(**given)(np.zeros(3, np.float32)), mean=always(0.0), std=always(0.1)
    ),
    "optim.AdamW": plain(
        lambda **given: optim.AdamW(**given).step(),
        params=lambda: [leaf()],
        lr=always(0.1),
        betas=always((0.9, 0.99)),
        eps=always(1e-8),
        weight_decay=always(0.1),
        states=always("coat"),
        exp_avg_dtype=always("E4M3"),
        exp_avg_sq_dtype=always("bfloat16"),
        master_dtype=always("float16"),
    ),
    "optim.MomentFormat": plain(
        optim.MomentFormat,
        format=always("E4M3"),
        block=always(128),
        power_2=always(False),
        expansion=always(True),
    ),
    "optim.StateFormats": plain(
        optim.StateFormats,
        exp_avg=always(optim.MomentFormat("E4M3")),
        exp_avg_sq=always(optim.MomentFormat("float16")),
        master=always("remainder"),
    ),
    "optim.AdamW.beta": plain(
        lambda params, beta: optim.AdamW(params, betas=(beta, beta)).step(),
        params=lambda: [leaf()],
        beta=always(0.9),
    ),
    "optim.SGD": plain(
        lambda **given: optim.SGD(**given).step(),
        params=lambda: [leaf()],
        lr=always(0.1),
        momentum=always(0.9),
        dampening=always(0.0),
        weight_decay=always(0.1),
        nesterov=always(True),
    ),
    "optim.Optimizer.groups": plain(
        lambda **given: optim.AdamW([given]).step(), params=lambda: [leaf()], lr=always(0.1)
    ),
    "optim.Optimizer.step": method(
        "step", stepped, inv_scale=lambda: np.ones(1, np.float32), found_inf=lambda: np.zeros(1, np.float32)
    ),
    "optim.Optimizer.load_state_dict": method(
        "load_state_dict", stepped, state=lambda: stepped().state_dict(), strict=always(True)
    ),
    "optim.GradScaler": plain(
        lambda **given: optim.GradScaler(**given).scale(leaf()),
        init_scale=always(2.0),
        growth_factor=always(2.0),
        backoff_factor=always(0.5),
        growth_interval=always(10),
        enabled=always(True),
    ),
    "optim.GradScaler.scale": method("scale", optim.GradScaler, loss=leaf),
    "optim.GradScaler.step": method("step", optim.GradScaler, optimizer=stepped),
    "optim.GradScaler.unscale_": method("unscale_", optim.GradScaler, optimizer=stepped),
    "optim.GradScaler.load_state_dict": method(
        "load_state_dict",
        optim.GradScaler,
        state=lambda: optim.GradScaler().state_dict(),
        strict=always(True),
    ),
    "optim.clip_grad_norm_": plain(
        optim.clip_grad_norm_, params=lambda: [leaf()], max_norm=always(1.0), scaler=always(None)
    ),
    "optim.warmup_cosine": plain(
        optim.warmup_cosine,
        step=always(2),
        lr=always(0.1),
        warmup_steps=always(1),
        total_steps=always(9),
        min_lr=always(0.01),
    ),
    "recipe.DelayedScaling": plain(
        recipe.DelayedScaling,
        margin=always(1),
        fp8_format=always(recipe.Format.HYBRID),
        amax_history_len=always(3),
        amax_compute_algo=always("max"),
        scaling_factor_compute_algo=always(None),
        reduce_amax=always(True),
        fp8_dpa=always(True),
        fp8_mha=always(True),
        backward_override=always(None),
    ),
    "recipe.Float8CurrentScaling": plain(
        recipe.Float8CurrentScaling,
        use_power_2_scales=always(False),
        fp8_format=always(recipe.Format.E4M3),
        fp8_quant_fwd_inp=always(None),
        fp8_gemm_fprop=always(recipe.MMParams()),
    ),
    "recipe.Float8BlockScaling": plain(
        recipe.Float8BlockScaling,
        use_f32_scales=always(False),
        fp8_quant_fwd_weight=always(None),
        x_block_scaling_dim=always(1),
        w_block_scaling_dim=always(2),
        grad_block_scaling_dim=always(1),
        fp8_gemm_dgrad=always(recipe.MMParams()),
    ),
    "nn.name_layers": plain(nn.name_layers, model=lambda: nn.Linear(3, 4)),
    "recipe.MXFP8BlockScaling": plain(
        recipe.MXFP8BlockScaling,
        margin=always(0),
        fp8_format=always(recipe.Format.HYBRID),
        backward_override=always("dequantized"),
        enable_2d_quantization=always(True),
    ),
    "recipe.NVFP4BlockScaling": plain(
        recipe.NVFP4BlockScaling,
        disable_rht=always(True),
        disable_stochastic_rounding=always(True),
        disable_2d_quantization=always(True),
        row_scaled_activation=always(True),
        nvfp4_4over6=always("all"),
        nvfp4_4over6_err_mode=always("MSE"),
        backward_override=always("high_precision"),
    ),
    "recipe.DataRecipe": plain(
        recipe.DataRecipe,
        data=lambda: recipe.Float8CurrentScaling().quantization,
        name=always("mine"),
        attention=lambda: recipe.Float8CurrentScaling(fp8_dpa=True).attention,
    ),
    "recipe.PerLayer": plain(
        recipe.PerLayer, default=lambda: recipe.MXFP8BlockScaling(), rules=always((("*.head", None),))
    ),
    "recipe.CustomRecipe": plain(
        recipe.CustomRecipe, qfactory=always(lambda role: None), accumulation=always(lambda gemm: "split")
    ),
    "recipe.MMParams": plain(
        recipe.MMParams, use_split_accumulator=always(True), accumulation=always("hopper_fast")
    ),
    "recipe.QParams": plain(
        recipe.QParams,
        power_2_scale=always(True),
        amax_epsilon=always(0.1),
        random_hadamard_transform=always(False),
        stochastic_rounding=always(False),
        fp4_2d_quantization=always(False),
    ),
    "serialization.Bundle": plain(
        lambda state, part: serialization.Bundle(a=part).load_state_dict(state),
        part=lambda: nn.LayerNorm(4, device="cpu"),
        state=lambda: {"a/weight": X[0], "a/bias": X[1]},
    ),
    "serialization.read": plain(serialization.read, path=saved),
    "serialization.sweep": plain(serialization.sweep, path=fresh_path),
    "testing.epsilon": plain(testing.epsilon, dtype=always("float32")),
}


def _within(switch: Any) -> None:
    with switch:
        pass
