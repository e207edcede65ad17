"""``InferenceParams.cache_manager``: what programs read of the caches by Transformer Engine's names."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

from fp8kit.arrays import ArrayView
from fp8kit.errors import ArgumentError, FormatError, ShapeError, UnsupportedError

if TYPE_CHECKING:
    from fp8kit.layers.inference import InferenceParams


log = logging.getLogger("fp8kit")

_OP = "CacheManager.step"
# attribute -> the attribute of InferenceParams
_SAME = {
    "max_batch_size": "max_batch_size",
    "max_seqlen": "max_sequence_length",
    "num_heads": "num_heads_kv",
    "head_dim_k": "head_dim_k",
    "head_dim_v": "head_dim_v",
    "total_num_pages": "total_num_pages",
    "page_size": "page_size",
    "sequences": "sequences",
}


class _Caches(dict[int, tuple[Any, Any]]):
    """What ``CacheManager.cache`` says. Keys and values that are put there are written into the caches."""

    def __init__(self, params: InferenceParams) -> None:
        super().__init__({number: (own.k, own.v) for number, own in params._caches.items()})
        self._params = params

    def __setitem__(self, number: int, pair: tuple[Any, Any]) -> None:
        self._params.overwrite(number, *pair)

    def __delitem__(self, number: int) -> None:
        raise UnsupportedError("CacheManager.cache", "layer_number", f"del {number}", "reset() of all layers")


class CacheManager:
    """The caches of an ``InferenceParams``, as they are when they are asked for, and the steps that change
    them, for programs that compute attention themselves.

    Transformer Engine's attributes and methods, of its paged and its other manager: without pages a page is a
    whole sequence. Attributes by other names than those of ``InferenceParams``: ``max_seqlen``,
    ``num_heads``. A layer number takes a step either here or by its attention layer.
    """

    def __init__(self, params: InferenceParams) -> None:
        self._params = params

    def __getattr__(self, name: str) -> Any:
        if name in _SAME:
            return getattr(self._params, _SAME[name])
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}", name=name, obj=self)

    def reset(self) -> None:
        """See ``InferenceParams.reset``."""
        self._params.reset()

    def allocate_memory(self, layer_number: int) -> None:
        """See ``InferenceParams.allocate_memory``."""
        self._params.allocate_memory(layer_number)

    def pre_step(self, step_dict: Mapping[Hashable, int]) -> dict[Hashable, int]:
        """See ``InferenceParams.pre_step``; a sequence that goes on may have several new tokens, and the
        order is the step's."""
        return self._params.pre_step(step_dict)

    def step(
        self,
        layer_number: int,
        new_k: Any,
        new_v: Any,
        cu_new_seqlens: Any,
        cu_cached_seqlens: Any,
        qkv_format: str,
    ) -> tuple[Any, Any]:
        """Write the announced step's keys h (..., g, d) and values (..., g, d_v), as they lie in
        ``qkv_format``, "bshd", "sbhd" or "thd", into a layer's caches, which are made where there are none.
        No gradient passes.

        ``cu_new_seqlens``, ``cu_cached_seqlens``: int32 (batch + 1,) or longer, running sums of the new
        tokens and of the lengths with them, which ``pre_step`` knows: other ones are an ArgumentError on the
        CPU, and are not looked at on a GPU.

        Returns keys and values. Of a paged cache all its pages, h (pages, page size, g, d) and (..., d_v), of
        which ``page_table`` has the sequences'. Of another one (batch, ``max_seqlen``, g, d) and (...,
        d_v), a row for each sequence of the step in its order, also with "thd": the cache's memory itself
        where the sequences lie in that order, otherwise, and within a CUDA graph, a copy. What is behind a
        sequence's length means nothing. Raises, with nothing changed, ShapeError or FormatError for keys and
        values that do not fit, ArgumentError for another step than the announced one and for a second call of
        a layer in a step.
        """
        params = self._params
        names = {"new_k": new_k, "new_v": new_v}
        views = {name: params.as_new(_OP, name, array) for name, array in names.items()}
        keys, values = views.values()
        leading, groups, dims = _sizes(views, qkv_format)
        for name, own, given in (
            ("cu_seqlens_q", "cu_new_seqlens", cu_new_seqlens),
            ("cu_seqlens_kv", "cu_cached_seqlens", cu_cached_seqlens),
        ):
            params.check_sums_of_step(_OP, own, (name,), params.on_host(given))
        form, numbers = qkv_format, (groups, dims, keys.dtype)
        metas, _ = params.check_step(
            _OP, layer_number, form, leading, *numbers, any_format=True, layers="new_k"
        )
        for name, view in zip(("k_cache", "v_cache"), (keys, values), strict=True):
            meta, wanted = metas[name], (groups, view.shape[-1])
            if meta.shape[2:] != wanted:
                raise ShapeError(
                    _OP, name, f"shape {meta.shape}", f"(pages, page size, {wanted}) of new ones"
                )
            if meta.dtype != view.dtype:
                raise FormatError(_OP, name, meta.dtype, f"{view.dtype} of new ones")
        params.append(layer_number, keys, values, form)
        return params.whole(layer_number)

    @property
    def cache(self) -> dict[int, tuple[Any, Any]]:
        """Layer number -> its keys h (pages, page size, g, d) and values (..., d_v). A pair that is put there
        is written over the layer's first pages, as a search with beams does between steps: ``cache[1] = k,
        v``, of as many pages or fewer. ShapeError, FormatError or ArgumentError for what does not fit."""
        return _Caches(self._params)

    @property
    def page_table(self) -> Any:
        """Pages of the step's sequences in their order, int32 (batch, ``max_pages_per_seq``), on the device;
        0 beyond a sequence's own. Fp8kitError before the first ``pre_step``."""
        return self._params._sent("pages")

    @property
    def max_pages_per_seq(self) -> int:
        """Pages of the longest sequence there may be."""
        return -(-self._params.max_sequence_length // self._params.page_size)

    @property
    def free_pages(self) -> list[int]:
        """Pages that no sequence has."""
        return sorted(self._params._free)

    @property
    def allocated_pages(self) -> dict[Hashable, list[int]]:
        """Sequence -> its pages, in order."""
        return {name: list(pages) for name, pages in self._params._pages.items()}

    def has_free_page(self) -> bool:
        """Whether there is a page that no sequence has."""
        return bool(self._params._free)

    def get_page_list(self, seq: Hashable) -> list[int]:
        """Returns a sequence's pages; none of one that is not there."""
        return self.allocated_pages.get(seq, [])

    def get_page_count(self, seq: Hashable) -> int:
        """Returns how many pages a sequence has."""
        return len(self.get_page_list(seq))

    def get_sequence_count(self) -> int:
        """Sequences of the step."""
        return len(self._params.sequences)

    def get_sequence_lengths(self) -> list[int]:
        """Their lengths, new tokens included."""
        return list(self._params.sequences.values())

    def print_cache(self) -> None:
        """Log what is in the caches, at the level DEBUG."""
        pages = self.allocated_pages
        log.debug("cache: %d of %d pages are free", len(self.free_pages), self.total_num_pages)
        for name, length in self.sequences.items():
            log.debug("cache: %r has %d tokens, in pages %s", name, length, pages.get(name, []))


class PagedCacheManager(CacheManager):
    """The manager of a paged cache."""


def _sizes(views: Mapping[str, ArrayView], qkv_format: str) -> tuple[tuple[int, ...], int, tuple[int, int]]:
    """Returns the leading dimensions, g, and d and d_v of a step's keys and values. ShapeError or FormatError
    for keys and values that differ, ArgumentError for an unknown format."""
    if qkv_format not in ("bshd", "sbhd", "thd"):
        raise ArgumentError(_OP, "qkv_format", repr(qkv_format), "'bshd', 'sbhd' or 'thd'")
    for name, view in views.items():
        if len(view.shape) != len(qkv_format):
            raise ShapeError(_OP, name, f"shape {view.shape}", f"{len(qkv_format)} dimensions, {qkv_format}")
    keys, values = views.values()
    if keys.shape[:-1] != values.shape[:-1]:
        raise ShapeError(_OP, "new_v", f"shape {values.shape}", f"{keys.shape[:-1]} before d_v, as new_k")
    if keys.dtype != values.dtype:
        raise FormatError(_OP, "new_v", values.dtype, f"{keys.dtype} as new_k")
    *leading, groups, dim = keys.shape
    return tuple(leading), groups, (dim, values.shape[-1])
