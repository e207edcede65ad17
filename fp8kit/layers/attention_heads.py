"""Queries, keys and values on their way from the projections to the core attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from fp8kit.errors import ShapeError
from fp8kit.layers.attention_base import AttentionBase
from fp8kit.layers.attention_inputs import LAYERS, PARTS, pair_of
from fp8kit.layers.context_parallel import angles_of_rank, chunks_of_rank
from fp8kit.layers.rope import as_angles
from fp8kit.ops.rope import check_tokens, rope
from fp8kit.ops.split_heads import split_heads


class AttentionHeads(AttentionBase):
    """Base of ``MultiheadAttention``: splits what its projections give into heads, normalises queries and
    keys, and says how they are rotated."""

    core_attention: Any
    q_norm: Any
    k_norm: Any
    rotary_pos_interleaved: bool
    sequence_parts: int
    _interleaved: bool  # whether rows of a packed projection go group by group
    _separate: bool  # whether the core attention gets queries, keys and values as separate arrays

    def _qk_norms(
        self, kind: str | None, features: int, eps: float, options: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """Returns the norms of queries and keys; the one without parameters is the same for both."""
        if kind is None:
            return None, None
        if kind == "L2Normalization":
            norm = self.frontend.L2Normalization(eps=eps)
            return norm, norm
        make = partial(getattr(self.frontend, kind), features, eps, **options)
        return make(), make()

    def _projected(self, x: Any, source: Any) -> dict[str, tuple[int, ...]]:
        """Shapes of the layers that the core attention will get, by its arguments. Where they are separate,
        heads are a dimension of their own, but not of a cross-attention's queries without norm."""
        heads, groups, _ = self._heads.values()
        dim, parts = self.core_attention.kv_channels, self.sequence_parts
        queries, keys = (
            (parts * tensor.shape[0], *tensor.shape[1:-1]) for tensor in (x, x if source is None else source)
        )
        if not self._separate:
            if source is None:
                return {"qkv_layer": (*queries, (heads + 2 * groups) * dim)}
            return {"query_layer": (*queries, heads * dim), "kv_layer": (*keys, 2 * groups * dim)}
        whole = source is not None and self.q_norm is None
        found = {"query_layer": (*queries, heads * dim) if whole else (*queries, heads, dim)}
        return found | dict.fromkeys(("key_layer", "value_layer"), (*keys, groups, dim))

    @property
    def _heads(self) -> dict[str, int]:
        """How many heads queries, keys and values have."""
        groups = self.core_attention.num_gqa_groups
        return {"q": self.core_attention.num_attention_heads, "k": groups, "v": groups}

    @property
    def _interleave_dim(self) -> int:
        return -2 if self._interleaved and not self._separate else -3

    def _split(self, layers: Mapping[str, Any]) -> dict[str, Any]:
        """Queries, keys and values, each (..., heads, d)."""
        core, heads, found = self.core_attention, self._heads, {}
        for name, layer in layers.items():
            if name == "query_layer" and self.q_norm is None:
                found[name] = layer
                continue
            parts = tuple([(LAYERS[part], heads[part]) for part in PARTS[name]])
            repeated = self._interleaved and name != "query_layer"
            groups = core.num_gqa_groups if repeated else 1
            spec = self.spec_for("SplitHeadsSpec", parts, core.kv_channels, groups)
            found.update(self.call(split_heads, spec, {"x": layer}))
        return found

    def shows_heads(self, core: Any) -> bool:
        """Whether the core attention is called as Transformer Engine calls it, by ``heads_of``: where a hook
        or an override sees its arguments."""
        return False

    def heads_of(self, layers: Mapping[str, Any]) -> Sequence[Any]:
        """Queries, keys and values, each (..., heads, d), as views where they can be."""
        raise NotImplementedError

    def _normed(self, layers: Mapping[str, Any]) -> dict[str, Any]:
        """Queries and keys normalised where there are norms for it."""
        if self.q_norm is None or self.k_norm is None:
            return dict(layers)
        return {
            **layers,
            "query_layer": self.q_norm(layers["query_layer"]),
            "key_layer": self.k_norm(layers["key_layer"]),
        }

    def _rotations(
        self, layers: Mapping[str, Any], rotary_pos_emb: Any, options: Mapping[str, Any]
    ) -> dict[str, tuple[Any, Mapping[str, Any]]]:
        """Returns how each of the layers, or their stand-ins, will be rotated; checked."""
        freqs = pair_of(self.layer_name, "rotary_pos_emb", rotary_pos_emb)
        return {
            name: self._rotation(name, layer, freqs, options)
            for name, layer in layers.items()
            if name != "value_layer"
        }

    def _rotation(
        self, name: str, layer: Any, freqs: Sequence[Any], options: Mapping[str, Any]
    ) -> tuple[Any, Mapping[str, Any]]:
        """``RopeSpec`` and its inputs but "x" for ``layer``, the argument ``name`` of the core attention.

        ``freqs``: angles of queries and of keys; ``options``: of the core's forward, of which lengths and the
        cache count. ShapeError where the angles end before the cache's longest sequence.
        """
        op, core, cache = self.layer_name, self.core_attention, options.get("inference_params")
        parts, packed = PARTS[name], core.qkv_format == "thd"
        angles_of = {"q": "freqs", "k": "freqs" if freqs[0] is freqs[1] else "k_freqs", "v": ""}
        inputs = {"x": layer}
        for part, own in zip("qk", freqs, strict=True):
            if part in parts:
                own = self.widened(self.constant("rotary_pos_emb", own, layer))
                angles = as_angles(op, "rotary_pos_emb", own)
                if self.context is not None and not packed:
                    tokens = layer.shape[core.qkv_format.index("s")]
                    there = tokens, self.context.size, self.context.rank
                    angles = angles_of_rank(self, "rotary_pos_emb", angles, *there)
                inputs[angles_of[part]] = angles
                if cache is not None and angles.shape[0] < cache.max_seqlen_kv:
                    wanted = f"at least the {cache.max_seqlen_kv} of the longest sequence in the cache"
                    raise ShapeError(op, "rotary_pos_emb", f"{angles.shape[0]} positions", wanted)
        if packed:
            side = "q" if "q" in parts or cache is not None else "kv"
            for suffix in ("", "_padded"):
                argument = f"cu_seqlens_{side}{suffix}"
                value = options.get(argument)
                if value is None and cache is not None and not suffix:
                    value = cache.cu_seqlens_q
                if value is not None:
                    inputs[f"cu_seqlens{suffix}"] = self.constant(argument, value, layer)
        if self.context is not None and packed:
            starts = inputs.pop("cu_seqlens_padded", None)
            starts = inputs.get("cu_seqlens") if starts is None else starts
            if starts is not None:
                inputs |= chunks_of_rank(self, starts, self.context.size, self.context.rank)
        if cache is not None:
            sums = inputs.get("cu_seqlens")
            batch = layer.shape[core.qkv_format.index("b")] if sums is None else sums.shape[0] - 1
            inputs["start_positions"] = self.constant("rope_starts", cache.rope_starts(batch), layer)
        heads = self._heads
        spec = self.spec_for(
            "RopeSpec",
            tuple([(heads[part], core.kv_channels, angles_of[part]) for part in parts]),
            core.qkv_format,
            self.rotary_pos_interleaved,
            self._interleaved and not self._separate,
        )
        self.check_call(rope, spec, inputs)
        if cache is None and packed and not self.is_compiling():
            views = self.host_views(inputs)
            if all(angles in views for angles in spec.angles):
                check_tokens(op, spec, views, layer.shape[0])
        del inputs["x"]
        return spec, inputs
