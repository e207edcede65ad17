"""``InferenceParams(custom_cache_manager=...)``: a program's own memory of keys and values, under Transformer
Engine's names."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from fp8kit.errors import ArgumentError, UnsupportedError
from fp8kit_torch.autocast import autocast
from fp8kit_torch.checks import shown
from fp8kit_torch.packed_views import separate

Step = Mapping[Hashable, int]


class KVCacheManager:
    """Base of such managers. A class is given to ``InferenceParams``, which makes one with
    ``max_batch_size``, ``max_seqlen``, ``num_heads``, ``head_dim_k``, ``dtype``, ``head_dim_v``, and of a
    paged cache ``total_num_pages`` and ``page_size``.

    ``cache``: layer number -> what it has memory in; ``sequences``: id -> length, in the step's order.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cache: dict[int, Any] = {}
        self.sequences: OrderedDict[Hashable, int] = OrderedDict()

    def allocate_memory(self, layer_number: int) -> None:
        """Make what ``cache`` has of a layer: called before its first step."""
        self.cache[layer_number] = (None, None)

    def pre_step(self, step_dict: Step) -> OrderedDict[Hashable, int]:
        """Announce a step, id -> number of new tokens; returns ``sequences`` with them."""
        lengths = [(name, self.sequences.get(name, 0) + count) for name, count in step_dict.items()]
        self.sequences = OrderedDict(lengths)
        return self.sequences

    def step(
        self,
        layer_number: int,
        new_k: Tensor,
        new_v: Tensor,
        cu_new_seqlens: Tensor,
        cu_cached_seqlens: Tensor,
        qkv_format: str,
    ) -> tuple[Any, ...]:
        """Take a layer's new keys h (.., g, d) and values (..., d_v) in ``qkv_format``, of which
        ``cu_new_seqlens``, int32 (batch + 1,), are the running sums of the lengths; ``cu_cached_seqlens``:
        those of the whole sequences. Returns keys and values (batch, positions, g, d) of the step's sequences
        in their order; or (pages, page size, g, d), with the sequences' pages, (batch, n), as a third or in
        the attribute ``page_table`` of a paged cache's manager. A third may be None."""
        return self.cache[layer_number]  # type: ignore[no-any-return]


class NonPagedKVCacheManager(KVCacheManager):
    """Memory for ``max_seqlen`` tokens of each of ``max_batch_size`` sequences, in ``cache``: layer number ->
    keys and values (max_batch_size, max_seqlen, num_heads, d)."""

    def __init__(
        self,
        max_batch_size: int,
        max_seqlen: int,
        num_heads: int,
        head_dim_k: int,
        dtype: torch.dtype,
        head_dim_v: int | None = None,
        *,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.max_batch_size, self.max_seqlen, self.num_heads = max_batch_size, max_seqlen, num_heads
        self.head_dim_k, self.dtype, self.device = head_dim_k, dtype, device
        self.head_dim_v = head_dim_k if head_dim_v is None else head_dim_v
        self._rows: dict[Hashable, int] = {}  # of the caches, by sequence

    def allocate_memory(self, layer_number: int) -> None:
        shape = self.max_batch_size, self.max_seqlen, self.num_heads
        self.cache[layer_number] = tuple(
            torch.zeros(*shape, dim, dtype=self.dtype, device=self.device)
            for dim in (self.head_dim_k, self.head_dim_v)
        )

    def pre_step(self, step_dict: Step) -> OrderedDict[Hashable, int]:
        self._rows = {name: row for name, row in self._rows.items() if name in step_dict}
        free = sorted(set(range(self.max_batch_size)) - set(self._rows.values()))
        for name in step_dict:
            if name not in self._rows:
                self._rows[name] = free.pop(0)
        return super().pre_step(step_dict)

    def step(
        self,
        layer_number: int,
        new_k: Tensor,
        new_v: Tensor,
        cu_new_seqlens: Tensor,
        cu_cached_seqlens: Tensor,
        qkv_format: str,
    ) -> tuple[Any, ...]:
        caches, counts = self.cache[layer_number], cu_new_seqlens.diff().tolist()
        rows = [self._rows[name] for name in self.sequences]
        for cache, new in zip(caches, (new_k, new_v), strict=True):
            parts = sequences_of(new, counts, qkv_format)
            for row, length, part in zip(rows, self.sequences.values(), parts, strict=True):
                cache[row, length - len(part) : length] = part
        return caches[0][rows], caches[1][rows]


def made(kind: Any, params: Any, dtype: Any) -> KVCacheManager | None:
    """The manager of a class that was given to ``InferenceParams``, or None. ArgumentError for what is no
    such class, and where a size or the dtype was not said."""
    if kind is None:
        return None
    op = "InferenceParams"
    if not isinstance(kind, type) or not issubclass(kind, KVCacheManager):
        raise ArgumentError(op, "custom_cache_manager", shown(kind), "a subclass of KVCacheManager, or None")
    for name in ("num_heads_kv", "head_dim_k", "dtype"):
        if getattr(params, name) is None:
            raise ArgumentError(op, name, None, "a value, with custom_cache_manager")
    sizes = {
        "max_batch_size": params.max_batch_size,
        "max_seqlen": params.max_sequence_length,
        "num_heads": params.num_heads_kv,
        "head_dim_k": params.head_dim_k,
        "dtype": dtype,
        "head_dim_v": params.head_dim_v,
    }
    if params.is_paged:
        sizes |= {"total_num_pages": params.total_num_pages, "page_size": params.page_size}
    manager = kind(**sizes)
    if getattr(manager, "device", 0) is None:
        manager.device = params.device
    return manager


def sequences_of(layer: Tensor, counts: list[int], qkv_format: str) -> list[Tensor]:
    """The rows of each sequence of h (b, s, ...), (s, b, ...) or (t, ...): its first ``counts``."""
    if qkv_format == "thd":
        return list(layer[: sum(counts)].split(counts))
    batch = layer.transpose(0, 1) if qkv_format == "sbhd" else layer
    return [rows[:count] for rows, count in zip(batch, counts, strict=True)]


def attend(core: Any, spec: Any, inputs: Mapping[str, Tensor], params: Any) -> Tensor:
    """o of a step, whose keys and values the manager of ``params`` keeps: attention of the new tokens over
    what its ``step`` gives. ``inputs``: of the core attention's operation."""
    if core.is_compiling() or params.is_recorded():
        wanted = "None within torch.compile and in CUDA graphs: the manager is asked in each step"
        raise UnsupportedError(core.layer_name, "custom_cache_manager", "one", wanted)
    manager, form, number = params.custom, spec.qkv_format, core.layer_number
    q, k, v = separate(spec, inputs)
    if number not in manager.cache:
        manager.allocate_memory(number)
    found = manager.step(number, k, v, params.cu_seqlens_q, params.cu_seqlens_kv, form)
    keys, values, *more = found
    pages = more[0] if more else getattr(manager, "page_table", None) if params.is_paged else None
    counts = [length - params.sequences_pre_step[name] for name, length in params.sequences.items()]
    whole = []
    for cache in (keys, values):
        if pages is not None:
            rows = pages[: len(counts)].long()
            cache = cache[rows].flatten(1, 2)
        lengths = params.sequences.values()
        whole.append(torch.cat([row[:length] for row, length in zip(cache, lengths, strict=False)]))
    options = {"alibi_slopes": inputs["alibi_slopes"]} if "alibi_slopes" in inputs else {}
    with autocast(enabled=False):
        o = core.forward(
            torch.cat(sequences_of(q, counts, form)),
            *whole,
            qkv_format="thd",
            attn_mask_type=spec.mask,
            window_size=spec.window_size,
            core_attention_bias_type=spec.bias,
            cu_seqlens_q=params.cu_seqlens_q,
            cu_seqlens_kv=params.cu_seqlens_kv,
            max_seqlen_q=max(counts),
            max_seqlen_kv=params.max_seqlen_kv,
            **options,
        )
    params.stepped(number)
    placed = o.new_zeros(*q.shape[: q.ndim - 2], o.shape[-1])
    for target, rows in zip(sequences_of(placed, counts, form), o.split(counts), strict=True):
        target.copy_(rows)
    return placed
