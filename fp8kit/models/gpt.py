"""``GPT``: a decoder-only transformer over bytes, and sampling from it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fp8kit import nn
from fp8kit.arrays import Device
from fp8kit.autocast import autocast
from fp8kit.autograd import Tensor, apply, no_grad, tensor
from fp8kit.errors import ShapeError
from fp8kit.formats import DType
from fp8kit.models import arrangements
from fp8kit.models.arrangements import Arrangement
from fp8kit.models.presets import Preset
from fp8kit.ops.scale_lines import ScaleLinesSpec, scale_lines
from fp8kit.recipe import Recipe

VOCABULARY = 256  # one token a byte


class GPT(nn.Module):
    """Byte and position embeddings, causal ``TransformerLayer``s, a final norm and a head.

    ``arrangement``: how the layers are made, a name of ``models.arrangements`` or an ``Arrangement``: "gpt2"
    has LayerNorms before the branches; "fog" norms after them, xIELU and norms of queries and keys, for FP8
    without outliers: ``GPT(preset("demo-gpu"), arrangement="fog")``. ``preset`` gives the sizes;
    ``params_dtype`` is float32, bfloat16 or float16; ``device`` None is the default device. Initial weights
    are normal with deviation 0.02, divided by sqrt(2 layers) where a matrix writes to the residual stream
    (Radford et al. 2019, section 2.3), and 0.05 for embeddings. Under ``autocast`` the layers' GEMMs run in
    FP8; embeddings and the head never do.
    """

    def __init__(
        self,
        preset: Preset,
        params_dtype: DType | None = None,
        device: Device | None = None,
        arrangement: str | Arrangement = "gpt2",
    ) -> None:
        form = arrangement if isinstance(arrangement, Arrangement) else arrangements.arrangement(arrangement)
        options: dict[str, Any] = {"bias": True, "normalization": "LayerNorm", **form.layer}
        if form.depth_gain:
            options["norm_gain"] = preset.layers**-0.5
        hidden = preset.hidden
        self.context = preset.context
        deviation = 0.05
        embedding = nn.normal_init(std=deviation)
        # of the sum of both embeddings
        unit = 1.0 / (deviation * 2.0**0.5) if form.unit_embeddings else 1.0
        self._unit = None if unit == 1.0 else ScaleLinesSpec(unit, unit)
        matrix, residual = nn.normal_init(std=0.02), nn.normal_init(std=0.02 / math.sqrt(2 * preset.layers))
        where: dict[str, Any] = {"params_dtype": params_dtype, "device": device}
        self.byte_embedding = nn.Embedding(VOCABULARY, hidden, init_method=embedding, **where)
        self.position_embedding = nn.Embedding(preset.context, hidden, init_method=embedding, **where)
        self.layers = nn.ModuleList(
            nn.TransformerLayer(
                hidden,
                form.ffn(hidden),
                preset.heads,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                init_method=matrix,
                output_layer_init_method=residual,
                layer_number=i + 1,
                self_attn_mask_type="causal",
                fuse_qkv_params=True,
                qkv_weight_interleaved=False,
                attn_input_format="bshd",
                **options,
                **where,
            )
            for i in range(preset.layers)
        )
        kind = nn.RMSNorm if options["normalization"] == "RMSNorm" else nn.LayerNorm
        self.final_norm = kind(hidden, **where) if form.final_norm else None
        self.head = nn.Linear(hidden, VOCABULARY, init_method=matrix, bias=False, **where)
        self._positions: dict[tuple[int, int], Tensor] = {}

    @property
    def device(self) -> Device:
        """Where the weights are."""
        return self.byte_embedding.weight.device

    def forward(
        self,
        ids: Any,
        is_first_microbatch: bool | None = None,
        inference_params: nn.InferenceParams | None = None,
    ) -> Tensor:
        """``ids``: int64 (sequences, length) on the model's device, length at most ``context``. Returns
        logits h (sequences, length, 256).

        ``is_first_microbatch``: None casts the weights in each call; True casts and keeps them, False uses
        those kept. ``inference_params``: ``ids`` are the new tokens of a step that was announced to it
        (format "bshd"), padding after them. ShapeError for ids of another rank or length, and for sequences
        that grow beyond ``context``.
        """
        if len(ids.shape) != 2 or not 0 < ids.shape[1] <= self.context:
            wanted = f"(sequences, length <= {self.context})"
            raise ShapeError("GPT", "ids", f"shape {tuple(ids.shape)}", wanted)
        sizes, step = tuple(ids.shape), inference_params
        positions = self._position_ids(*sizes) if step is None else self._grown(step, *sizes)
        x = self.byte_embedding(ids) + self.position_embedding(positions)
        if self._unit is not None:
            x = apply(scale_lines, self._unit, {"x": x})["y"]
        for layer in self.layers:
            x = layer(x, is_first_microbatch=is_first_microbatch, inference_params=inference_params)
        with autocast(enabled=False):
            x = x if self.final_norm is None else self.final_norm(x)
            return self.head(x)  # type: ignore[no-any-return]

    def _position_ids(self, sequences: int, length: int) -> Tensor:
        """0 .. length - 1 for each sequence, int64 (sequences, length), made once a shape."""
        if (sequences, length) not in self._positions:
            host = np.tile(np.arange(length, dtype=np.int64), (sequences, 1))
            self._positions[sequences, length] = tensor(host, device=self.device)
        return self._positions[sequences, length]

    def _grown(self, step: nn.InferenceParams, sequences: int, length: int) -> Tensor:
        """Positions of a step's new tokens, int64 (sequences, length); those of padding are any."""
        if step.max_seqlen_kv > self.context or step.batch_size != sequences:
            got = f"{step.batch_size} sequences of up to {step.max_seqlen_kv} tokens"
            raise ShapeError("GPT", "inference_params", got, f"{sequences} as ids, of up to {self.context}")
        positions = step.get_seqlens_pre_step()[:, None] + np.arange(length)
        return tensor(np.minimum(positions, self.context - 1).astype(np.int64), device=self.device)


def precision(recipe: Recipe | None) -> autocast:
    """Returns the context of forward passes in FP8, for None in high precision."""
    return autocast(enabled=recipe is not None, recipe=recipe)


def parameter_count(model: nn.Module) -> int:
    """Trainable numbers of a model, each parameter once."""
    return sum(math.prod(parameter.shape) for parameter in model.parameters())


def generate(
    model: GPT,
    prompt: bytes,
    count: int,
    recipe: Recipe | None = None,
    temperature: float = 0.8,
    seed: int = 0,
    use_cache: bool = True,
) -> bytes:
    """``count`` bytes that follow ``prompt``, sampled one by one from softmax(logits / temperature) on the
    host.

    ``recipe``: FP8 recipe of the forward passes, None for high precision. Each byte follows from the last
    ``context`` bytes. While that is the whole text, only its new bytes go through the model, over a cache of
    keys and values. Then the window moves with every byte and with it every position: each is one whole
    forward, as all are with ``use_cache`` False. ShapeError for an empty prompt or a temperature that is not
    positive.
    """
    if not prompt:
        raise ShapeError("generate", "prompt", "no bytes", "at least one byte")
    if not temperature > 0:
        raise ShapeError("generate", "temperature", temperature, "a positive number")
    generator = np.random.Generator(np.random.Philox(seed))
    text = bytearray(prompt)
    cache = nn.InferenceParams(1, model.context, device=model.device)
    for index in range(count):
        forward = _cached if use_cache and len(text) <= model.context else _whole
        with no_grad(), precision(recipe):
            logits = forward(model, text, cache, index == 0)  # the weights are cast once
        scores = logits.astype(np.float64) / temperature
        weights = np.exp(scores - scores.max())
        text.append(int(generator.choice(VOCABULARY, p=weights / weights.sum())))
    model.apply(lambda module: module.forget())
    return bytes(text[len(prompt) :])


def _cached(model: GPT, text: bytearray, cache: nn.InferenceParams, first: bool) -> np.ndarray[Any, Any]:
    """Logits of the byte after ``text``, (256,): its bytes that are not in the cache yet go through the
    model."""
    new = text[cache.sequences.get("text", 0) :]
    cache.pre_step({"text": len(new)})
    ids = np.frombuffer(bytes(new), np.uint8).astype(np.int64)[None]
    return np.asarray(model(tensor(ids, device=model.device), first, cache).numpy()[0, -1])


def _whole(model: GPT, text: bytearray, cache: nn.InferenceParams, first: bool) -> np.ndarray[Any, Any]:
    """Returns the same from one forward of the last ``context`` bytes, without ``cache``. The window always
    has that length, zeros after its end, which causal attention never sees: so there is one plan for all."""
    recent = text[-model.context :]
    window = np.zeros((1, model.context), np.int64)
    window[0, : len(recent)] = np.frombuffer(bytes(recent), np.uint8)
    return np.asarray(model(tensor(window, device=model.device), first).numpy()[0, len(recent) - 1])
