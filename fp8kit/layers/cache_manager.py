"""``InferenceParams.cache_manager``: what programs read of the caches by Transformer Engine's names."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8kit.layers.inference import InferenceParams


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


class CacheManager:
    """The caches of an ``InferenceParams``, as they are when they are asked for; nothing here changes them.

    Transformer Engine's attributes, of its paged and its other manager: without pages a page is a whole
    sequence. Attributes by other names than those of ``InferenceParams``: ``max_seqlen``, ``num_heads``.
    """

    def __init__(self, params: InferenceParams) -> None:
        self._params = params

    def __getattr__(self, name: str) -> Any:
        if name in _SAME:
            return getattr(self._params, _SAME[name])
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}", name=name, obj=self)

    @property
    def cache(self) -> dict[int, tuple[Any, Any]]:
        """Layer number -> its keys h (pages, page size, g, d) and values (..., d_v)."""
        return {number: (own.k, own.v) for number, own in self._params._caches.items()}

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
        """A sequence's pages; none of one that is not there."""
        return self.allocated_pages.get(seq, [])

    def get_page_count(self, seq: Hashable) -> int:
        """How many pages a sequence has."""
        return len(self.get_page_list(seq))

    def get_sequence_count(self) -> int:
        """Sequences of the step."""
        return len(self._params.sequences)

    def get_sequence_lengths(self) -> list[int]:
        """Their lengths, new tokens included."""
        return list(self._params.sequences.values())
