"""``InferenceParams``: the keys and values of sequences that grow token by token, kept from step to step.

Here is the host's side: which sequences there are, which pages they have, and what the kernels are given of a
step. Where memory comes from is the frontend's.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fp8kit.arguments import NamedWell, Rule, check, integer
from fp8kit.arrays import ArrayView, Shape
from fp8kit.errors import ArgumentError, FormatError, ShapeError
from fp8kit.formats import DType, int32
from fp8kit.layers.arguments import parameter_dtype, size
from fp8kit.layers.cache_manager import CacheManager, PagedCacheManager
from fp8kit.layers.unsupported import refuse_others
from fp8kit.spec import Meta

_OP = "InferenceParams"
_STEP = ("cu_seqlens_q", "cu_seqlens_kv", "pages")  # what the kernels are given of a step
# positions that a cache is read up to at least; then powers of two, so that plans are found again
_LEAST = 64


class Cache(NamedTuple):
    """One layer's keys h (pages, page size, g, d) and values (pages, page size, g, d_v), and their
    ``dtype``."""

    k: Any
    v: Any
    dtype: DType


class InferenceParams(NamedWell):
    """A cache of keys and values for every layer of a model, and the sequences that are in it.

    Each step of generation is announced once, then run through the whole model::

        params = InferenceParams(max_batch_size=8, max_sequence_length=2048, qkv_format="sbhd")
        params.pre_step({"a": 5, "b": 3})        # sequence id -> new tokens: two prompts
        y = model(x, inference_params=params)    # x (5, 2, H): a's tokens, b's tokens and 2 rows of padding
        params.pre_step({"a": 1, "c": 7})        # a goes on, b is finished, c begins

    A sequence lives as long as every step names it. Every layer needs a ``layer_number`` of its own. With
    "sbhd" and "bshd" the new tokens of a sequence come first in its column, padding after them; with "thd"
    the sequences' new tokens lie one after the other. Masks are meant for whole sequences: "causal" lets each
    token see its sequence up to itself. It serves inference: in evaluation mode, or under ``no_grad()``. In
    torch a model may be compiled, with ``fullgraph=True`` too: ``pre_step`` stays outside of what is, and
    longer sequences compile nothing anew. A CUDA graph holds a step of so many sequences and positions, and
    runs for later ones: ``pre_step`` writes their lengths and pages where it reads them.

    * ``max_batch_size``: sequences in a step. ``max_sequence_length``: tokens of a sequence. ``max_ctx_len``:
      new tokens of a sequence in one step (None: ``max_sequence_length``).
    * ``num_heads_kv`` g, ``head_dim_k`` d, ``head_dim_v`` (None: d), ``dtype``: of the caches; None: as each
      layer's own.
    * ``is_paged``: False gives every sequence room for ``max_sequence_length`` at once; True hands out pages
      of ``page_size`` tokens, as sequences grow, of which there are ``total_num_pages``. Both are ignored
      with False.
    * ``qkv_format``: of the layers: "bshd", "sbhd" or "thd". ``custom_cache_manager``: a class of the
      program's own that keeps keys and values, a subclass of Transformer Engine's ``KVCacheManager``; PyTorch
      only, UnsupportedError otherwise.
    * ``device``: where the caches lie; None as for parameters.

    ``sequences``: id -> length, new tokens included, in the step's order. ``input_qkv_format``: of the
    layers, ``cache_qkv_format``: "bshd", of the caches.

    Raises ArgumentError for an argument out of its range, FormatError for a dtype, BackendError for a device,
    UnsupportedError for what this frontend does not have. Source of names: Transformer Engine; of the pages:
    Kwon et al., PagedAttention, 2023.
    """

    constructor_rules: ClassVar[Mapping[str, Rule]]
    cache_qkv_format = "bshd"

    def __init__(
        self,
        max_batch_size: int,
        max_sequence_length: int,
        num_heads_kv: int | None = None,
        head_dim_k: int | None = None,
        dtype: Any = None,
        head_dim_v: int | None = None,
        is_paged: bool = False,
        total_num_pages: int | None = None,
        page_size: int | None = None,
        max_ctx_len: int | None = None,
        qkv_format: str = "bshd",
        custom_cache_manager: object = None,
        *,
        device: Any = None,
    ) -> None:
        check(_OP, self.constructor_rules, locals())
        for name, value in (("total_num_pages", total_num_pages), ("page_size", page_size)):
            if is_paged and value is None:
                raise ArgumentError(_OP, name, value, "a positive int with is_paged=True")
        self.is_paged, self.qkv_format, self.input_qkv_format = bool(is_paged), qkv_format, qkv_format
        self.max_batch_size, self.max_sequence_length = int(max_batch_size), int(max_sequence_length)
        self.num_heads_kv, self.head_dim_k = num_heads_kv, head_dim_k
        self.head_dim_v = head_dim_v if head_dim_v else head_dim_k
        self.dtype = None if dtype is None else parameter_dtype("InferenceParams", "dtype", dtype)
        self.max_ctx_len = self.max_sequence_length if max_ctx_len is None else int(max_ctx_len)
        # without pages, one page holds a whole sequence
        self.total_num_pages, self.page_size = self.max_batch_size, self.max_sequence_length
        if is_paged and total_num_pages is not None and page_size is not None:
            self.total_num_pages, self.page_size = total_num_pages, page_size
        self._caches: dict[int, Cache] = {}
        self._buffers: dict[int, Any] = {}  # of a step, by its number of sequences
        self._recorded: set[int | None] = set()  # layers of which a graph takes the steps
        self._place(device)
        self.take_manager(custom_cache_manager, dtype)
        self.reset()

    # --- what a frontend gives ------------------------------------------------------------------------------

    device: Any

    def _place(self, device: Any) -> None:
        """Set ``device`` to what the argument means. BackendError for a device that is not there."""
        raise NotImplementedError

    def _empty(self, shape: Shape, dtype: DType, zero: bool = False) -> Any:
        """Returns an array on ``device``, of zeros where ``zero``."""
        raise NotImplementedError

    def as_new(self, operation: str, name: str, array: Any) -> ArrayView:
        """New keys or values as the kernels read them, last stride 1. FormatError if it is not an array, in
        PyTorch ArgumentError; BackendError for another device."""
        raise NotImplementedError

    def on_host(self, sums: Any) -> np.ndarray[Any, Any] | None:
        """Running sums on the CPU; None of those on a GPU."""
        raise NotImplementedError

    def _upload(self, host: np.ndarray[Any, Any]) -> Any:
        """int32 (n,) as an array on ``device``."""
        raise NotImplementedError

    def _write(self, whole: Any, host: np.ndarray[Any, Any]) -> Any:
        """``host`` on the device: in the memory of ``whole`` where the frontend has graphs that read it."""
        return self._upload(host)

    def take_manager(self, manager: Any, dtype: Any) -> None:
        """Keep what ``custom_cache_manager`` says; ``dtype``: the constructor's."""
        refuse_others(_OP, {"custom_cache_manager": (manager, None)})

    def is_recorded(self) -> bool:
        """Whether a graph records what is called now, to do it again for later steps."""
        return False

    def _given(self, operation: str, name: str, array: Any) -> Any:
        """A program's array as those of the caches are; FormatError if it is none."""
        raise NotImplementedError

    def _copy(self, new: Any, whole: Any) -> None:
        """Write an array over the first pages of a cache."""
        raise NotImplementedError

    def _part(self, whole: Any, offset: int, shape: Shape) -> Any:
        """Returns a part of what was uploaded, by its first element and its shape."""
        raise NotImplementedError

    def _append(self, new: ArrayView, cache: Any, qkv_format: str) -> None:
        """``cache_append_`` of the contract, of the announced step."""
        raise NotImplementedError

    def _first(self, cache: Any, rows: int) -> Any:
        """Returns the first rows of a cache, in place."""
        raise NotImplementedError

    def _gather(self, cache: Any, shape: Shape, pages: Any, totals: Any) -> Any:
        """``cache_gather`` of the contract into a new array of ``shape``, "bshd"."""
        raise NotImplementedError

    # --- sequences ------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget all sequences. The caches' memory is kept."""
        self.sequences: dict[Hashable, int] = {}
        self._longest = 0  # of them
        self._new: dict[Hashable, int] = {}
        self._pages: dict[Hashable, list[int]] = {}  # in the step's order
        self._free = list(range(self.total_num_pages))  # a heap
        # by layer: tokens of each sequence that are in its cache, all where it has taken the step
        self._written: dict[int | None, dict[Hashable, int]] = {}
        self._on_device: dict[str, Any] = {}

    # --- steps ----------------------------------------------------------------------------------------------

    def pre_step(self, step_dict: Mapping[Hashable, int]) -> dict[Hashable, int]:
        """Announce a step: ``step_dict`` maps the id of each sequence of the batch, in the batch's order, to
        its number of new tokens.

        Ids that are new begin; former ones that are not there are finished, and what they held is free.
        Returns id -> length with the new tokens. Raises ShapeError, with nothing changed, for more sequences,
        tokens or pages than fit.
        """
        if not isinstance(step_dict, Mapping) or not 0 < len(step_dict) <= self.max_batch_size:
            got = (
                f"{len(step_dict)} sequences" if isinstance(step_dict, Mapping) else type(step_dict).__name__
            )
            raise ShapeError(
                _OP, "step_dict", got, f"a mapping of 1 to {self.max_batch_size} sequence ids to new tokens"
            )
        lengths = {}
        for name, count in step_dict.items():
            size(_OP, f"step_dict[{name!r}]", count)
            if count > self.max_ctx_len:
                raise ShapeError(
                    _OP, f"step_dict[{name!r}]", count, f"at most max_ctx_len = {self.max_ctx_len} new tokens"
                )
            lengths[name] = self.sequences.get(name, 0) + int(count)
            if lengths[name] > self.max_sequence_length:
                wanted = (
                    f"at most {self.max_sequence_length} with the {self.sequences.get(name, 0)} there are: "
                    "max_sequence_length"
                )
                raise ShapeError(_OP, f"step_dict[{name!r}]", count, wanted)
        new, (pages, free) = (
            {name: int(count) for name, count in step_dict.items()},
            self._handed_out(lengths),
        )
        self._on_device = self._send(new, lengths, pages)  # the last that can fail
        self._written.update({layer: dict(self.sequences) for layer in self._recorded})
        self.sequences, self._new, self._pages, self._free = lengths, new, pages, free
        self._longest = max(lengths.values())
        for layer, written in self._written.items():
            self._written[layer] = {name: count for name, count in written.items() if name in lengths}
        return dict(lengths)

    def _handed_out(self, lengths: Mapping[Hashable, int]) -> tuple[dict[Hashable, list[int]], list[int]]:
        """Pages by sequence and the free ones: those of finished sequences are taken back, and those of a
        step have the lowest free ones for what is new. Changes nothing. ShapeError where there are too few.
        """
        wanted = sum(-(-length // self.page_size) for length in lengths.values())
        if wanted > self.total_num_pages:
            got = f"{self.total_num_pages} pages of {self.page_size} tokens"
            raise ShapeError(_OP, "total_num_pages", got, f"{wanted} for the sequences of this step")
        finished = [pages for name, pages in self._pages.items() if name not in lengths]
        free, handed = list(itertools.chain(self._free, *finished)), {}
        heapq.heapify(free)
        for name, length in lengths.items():
            own = handed[name] = list(self._pages.get(name, ()))
            while len(own) * self.page_size < length:
                own.append(heapq.heappop(free))
        return handed, free

    def _send(
        self,
        counts: Mapping[Hashable, int],
        lengths: Mapping[Hashable, int],
        pages: Mapping[Hashable, list[int]],
    ) -> dict[str, Any]:
        """Returns what the kernels read of a step, by name, on the device: one copy."""
        new, totals = (np.array(list(numbers.values()), np.int32) for numbers in (counts, lengths))
        table = np.zeros((len(lengths), -(-self.max_sequence_length // self.page_size)), np.int32)
        for row, own in zip(table, pages.values(), strict=True):
            row[: len(own)] = own
        parts = {
            "cu_seqlens_q": _sums(new),
            "cu_seqlens_kv": _sums(totals),
            "starts": totals - new,
            "pages": table,
        }
        host = np.concatenate([part.ravel() for part in parts.values()])
        known = self._buffers.get(len(lengths))
        whole = self._upload(host) if known is None else self._write(known, host)
        self._buffers[len(lengths)] = whole
        offset, sent = 0, {}
        for name, part in parts.items():
            sent[name] = self._part(whole, offset, part.shape)
            offset += part.size
        return sent

    @property
    def batch_size(self) -> int:
        """Sequences of the step."""
        return len(self.sequences)

    @property
    def cu_seqlens_q(self) -> Any:
        """Running sums of the step's new tokens, int32 (batch + 1,) on the device."""
        return self._sent("cu_seqlens_q")

    @property
    def cu_seqlens_kv(self) -> Any:
        """Running sums of the sequences' lengths, new tokens included, int32 (batch + 1,) on the device."""
        return self._sent("cu_seqlens_kv")

    @property
    def max_seqlen_q(self) -> int:
        """The most new tokens of a sequence in the step."""
        return max(self._new.values(), default=0)

    @property
    def max_seqlen_kv(self) -> int:
        """The longest sequence of the step, new tokens included."""
        return self._longest

    @property
    def sequences_pre_step(self) -> dict[Hashable, int]:
        """Id -> length without the step's new tokens, in the step's order."""
        return {name: length - self._new[name] for name, length in self.sequences.items()}

    @property
    def cache_manager(self) -> CacheManager:
        """The caches, by the names of Transformer Engine's managers."""
        return (PagedCacheManager if self.is_paged else CacheManager)(self)

    def get_seqlens_pre_step(self) -> np.ndarray[Any, Any]:
        """Lengths of the step's sequences without its new tokens: int32 (batch,), on the host."""
        return np.array(list(self.sequences_pre_step.values()), np.int32)

    def rope_starts(self, batch: int) -> Any:
        """Position of each sequence's first new token, int32 (batch,) on the device: ``start_positions`` of
        ``apply_rotary_pos_emb``. ShapeError where ``batch`` is not the step's."""
        starts = self._sent("starts")
        if integer(_OP, "batch", batch) != starts.shape[0]:
            raise ShapeError(_OP, "batch", batch, f"{starts.shape[0]}, the sequences of the last pre_step")
        return starts

    def host_sums(self, name: str) -> np.ndarray[Any, Any] | None:
        """``cu_seqlens_q`` or ``cu_seqlens_kv`` of the step on the host; None of another name."""
        counts = {"cu_seqlens_q": self._new, "cu_seqlens_kv": self.sequences}.get(name)
        return None if counts is None else _sums(np.array(list(counts.values()), np.int32))

    def check_sums_of_step(
        self, operation: str, argument: str, names: Sequence[str], values: np.ndarray[Any, Any] | None
    ) -> None:
        """ArgumentError for ``values`` of ``argument`` other than one of the step's own ``names``; further
        sequences without tokens are none."""
        owns = [own for own in map(self.host_sums, names) if own is not None]
        if values is None or not owns:
            return
        for own in owns:
            more = values.size - own.size
            if values.ndim == 1 and more >= 0 and np.array_equal(values, np.pad(own, (0, more), "edge")):
                return
        wanted = f"None, or {' or '.join(str(own.tolist()) for own in owns)} of inference_params' step"
        raise ArgumentError(operation, argument, values.tolist(), wanted)

    def _sent(self, name: str) -> Any:
        if not self._on_device:
            raise ArgumentError(_OP, "inference_params", "no step", "pre_step before each step")
        return self._on_device[name]

    # --- caches ---------------------------------------------------------------------------------------------

    def allocate_memory(self, layer_number: int) -> None:
        """Make a layer's caches now instead of at its first step, of zeros; nothing where it has them.
        ArgumentError where ``num_heads_kv``, ``head_dim_k`` or ``dtype`` were not given."""
        for name in ("num_heads_kv", "head_dim_k", "dtype"):
            if getattr(self, name) is None:
                raise ArgumentError(
                    _OP, name, None, "a value, where memory is made before a layer says its own"
                )
        number = integer(_OP, "layer_number", layer_number)
        dims = self.head_dim_k, self.head_dim_v
        self._cache(number, self.num_heads_kv, dims, self.dtype, True)  # type: ignore[arg-type]

    def convert_paged_to_nonpaged(self, layer_number: int) -> tuple[Any, Any]:
        """Returns a layer's keys and values as padded batches: h (batch, longest sequence, g, d) and (...,
        d_v), in the step's order, 0 beyond a sequence's length. ArgumentError for a layer without caches."""
        pages, totals = self._sent("pages"), self._sent("cu_seqlens_kv")
        if integer(_OP, "layer_number", layer_number) not in self._caches:
            raise ArgumentError(
                _OP, "layer_number", layer_number, f"a layer that has caches: {sorted(self._caches)}"
            )
        rows = self.batch_size, self.max_seqlen_kv
        k, v = (
            self._gather(cache, (*rows, *cache.shape[2:]), pages, totals)
            for cache in self._caches[layer_number][:2]
        )
        return k, v

    def overwrite(self, layer_number: int, keys: Any, values: Any) -> None:
        """See ``CacheManager.cache``."""
        op, own = "CacheManager.cache", self._caches.get(layer_number)
        if own is None:
            wanted = f"a layer that has caches: {sorted(self._caches)}"
            raise ArgumentError(op, "layer_number", layer_number, wanted)
        pair = [self._given(op, name, new) for name, new in (("keys", keys), ("values", values))]
        for name, new, whole in zip(("keys", "values"), pair, own[:2], strict=True):
            if tuple(new.shape[1:]) != tuple(whole.shape[1:]) or new.shape[0] > whole.shape[0]:
                wanted = f"{tuple(whole.shape)} as the cache, or fewer pages"
                raise ShapeError(op, name, f"shape {tuple(new.shape)}", wanted)
            if new.dtype != whole.dtype:
                raise FormatError(op, name, new.dtype, f"{whole.dtype} as the cache")
        for new, whole in zip(pair, own[:2], strict=True):
            self._copy(new, whole)

    def check_layer(self, operation: str, layer_number: int | None) -> None:
        """ArgumentError for a layer without a number."""
        if isinstance(layer_number, bool) or not isinstance(layer_number, int):
            raise ArgumentError(
                operation, "layer_number", layer_number, "an int, each layer its own, with inference_params"
            )

    def check_step(
        self,
        operation: str,
        layer_number: int | None,
        qkv_format: str,
        leading: Shape,
        groups: int,
        dims: tuple[int, int],
        dtype: DType,
        any_format: bool = False,
        layers: str = "query_layer",
    ) -> tuple[dict[str, Meta], tuple[int, int]]:
        """Returns what ``ops.kv_cache`` will get beside the new q, k and v of a layer, and (max_seqlen_q,
        max_seqlen_kv). Nothing is made.

        ``leading``: the new tokens' leading dimensions; ``groups``, ``dims``, ``dtype``: of the layer's keys
        and values; ``any_format``: also another than ``self.qkv_format``; ``layers``: what errors call the
        new tokens. Raises ArgumentError for a layer
        number or a format that the caches do not have, for a second step and without ``pre_step``; ShapeError
        for other sizes than those of the step and the caches, and if the layer left out an earlier step,
        which would leave a hole; FormatError for another dtype.
        """
        self._sent("pages")
        self.check_layer(operation, layer_number)
        longest, recorded = self.max_seqlen_q, self.is_recorded()
        self._check_turn(operation, layer_number, recorded)
        if qkv_format != self.qkv_format and not any_format:
            raise ArgumentError(
                operation, "qkv_format", repr(qkv_format), f"{self.qkv_format!r} as inference_params"
            )
        self._check_leading(operation, layers, qkv_format, leading)
        for name, own in (("num_heads_kv", groups), ("head_dim_k", dims[0]), ("head_dim_v", dims[1])):
            if getattr(self, name) not in (None, own):
                raise ShapeError(operation, name, own, f"{getattr(self, name)} as inference_params")
        if self.dtype not in (None, dtype):
            raise FormatError(operation, "dtype", dtype, f"{self.dtype} as inference_params")
        rows = min(self.max_ctx_len, _power_of_two(longest)) if qkv_format == "thd" else 0
        columns = min(self.max_sequence_length, _power_of_two(max(_LEAST, self.max_seqlen_kv)))
        if recorded:  # later steps are longer
            rows, columns = self.max_ctx_len if qkv_format == "thd" else 0, self.max_sequence_length
        shapes = self._cache_shapes(groups, dims)
        if layer_number in self._caches:
            cache = self._caches[layer_number]
            shapes, dtype = (
                dict(zip(shapes, (tuple(cache.k.shape), tuple(cache.v.shape)), strict=True)),
                cache.dtype,
            )
        metas = {name: Meta(shape, dtype) for name, shape in shapes.items()}
        metas |= {name: Meta(tuple(self._on_device[name].shape), int32) for name in _STEP}
        return metas, (rows, columns)

    def _check_turn(self, operation: str, layer_number: int | None, recorded: bool) -> None:
        """Refuse a layer's second call of a step, but for a ``recorded`` one's, and one behind a step that it
        left out."""
        written = self._written.get(layer_number, {})
        if written == self.sequences:
            if recorded:  # warm-ups and the capture
                return
            wanted = "pre_step before each step, and a number of its own for each layer"
            raise ArgumentError(operation, "layer_number", f"{layer_number} twice in a step", wanted)
        for name, length in self.sequences.items():
            before = length - self._new[name]
            if written.get(name, 0) != before:
                got = f"{layer_number}, whose cache holds {written.get(name, 0)} of sequence {name!r}"
                wanted = f"the {before} tokens before this step: each layer takes each step of pre_step"
                raise ShapeError(operation, "layer_number", got, wanted)

    def _check_leading(self, operation: str, layers: str, qkv_format: str, leading: Shape) -> None:
        """ShapeError unless the leading dimensions have a place for the step's tokens."""
        tokens, longest = sum(self._new.values()), self.max_seqlen_q
        if len(leading) != len(qkv_format) - 2:
            wanted = f"{len(qkv_format) - 2} of them, {qkv_format}"
            raise ShapeError(operation, layers, f"leading dimensions {leading}", wanted)
        if qkv_format == "thd":
            if leading[0] < tokens:
                wanted = f"at least {tokens}, the new ones of pre_step"
                raise ShapeError(operation, layers, f"{leading[0]} tokens", wanted)
            return
        rows, batch = leading if qkv_format == "sbhd" else leading[::-1]
        if batch != self.batch_size or rows < longest:
            wanted = f"batch {self.batch_size} and at least {longest} positions, as pre_step said"
            raise ShapeError(operation, layers, f"batch {batch} and {rows} positions", wanted)

    def inputs(self, layer_number: int, groups: int, dims: tuple[int, int], dtype: DType) -> dict[str, Any]:
        """Returns the arrays that ``check_step`` spoke of. Makes the layer's caches at its first step."""
        cache = self._cache(layer_number, groups, dims, dtype)
        return {"k_cache": cache.k, "v_cache": cache.v, **{name: self._on_device[name] for name in _STEP}}

    def step(
        self, layer_number: int, new_k: Any, new_v: Any, qkv_format: str
    ) -> tuple[Any, Any, Any, Any, int, str]:
        """``cache_manager.step`` with the lengths of the last ``pre_step``, where a program computes
        attention itself. Returns its keys and values, ``cu_seqlens_q``, ``cu_seqlens_kv``,
        ``max_sequence_length``, and the format of new queries beside them, "bshd", "sbhd_2bshd" or
        "thd_2bshd"."""
        sums = self.cu_seqlens_q, self.cu_seqlens_kv
        k, v, *_ = self.cache_manager.step(layer_number, new_k, new_v, *sums, qkv_format)
        self.input_qkv_format, cached = qkv_format, self.cache_qkv_format
        form = cached if qkv_format == cached else f"{qkv_format}_2{cached}"
        return k, v, *sums, self.max_sequence_length, form

    def append(self, layer_number: int, keys: ArrayView, values: ArrayView, qkv_format: str) -> None:
        """Take the announced step, which ``check_step`` has seen, without attention: new keys and values go
        into the layer's caches."""
        dims = keys.shape[-1], values.shape[-1]
        cache = self._cache(layer_number, keys.shape[-2], dims, keys.dtype, True)
        for new, target in zip((keys, values), cache[:2], strict=True):
            self._append(new, target, qkv_format)
        self.stepped(layer_number)

    def whole(self, layer_number: int) -> tuple[Any, Any]:
        """What ``CacheManager.step`` returns of a layer."""
        caches = self._caches[layer_number][:2]
        if self.is_paged:
            return caches
        count, own = self.batch_size, itertools.chain.from_iterable(self._pages.values())
        if not self.is_recorded() and list(own) == list(range(count)):
            return self._first(caches[0], count), self._first(caches[1], count)
        pages, totals = self._sent("pages"), self._sent("cu_seqlens_kv")
        k, v = (self._gather(cache, (count, *cache.shape[1:]), pages, totals) for cache in caches)
        return k, v

    def stepped(self, layer_number: int | None) -> None:
        """A layer has taken the announced step."""
        if self.is_recorded():
            self._recorded.add(layer_number)
        self._written[layer_number] = dict(self.sequences)

    def _cache_shapes(self, groups: int, dims: tuple[int, int]) -> dict[str, Shape]:
        page = self.total_num_pages, self.page_size, groups
        return {name: (*page, dim) for name, dim in zip(("k_cache", "v_cache"), dims, strict=True)}

    def _cache(
        self, layer_number: int, groups: int, dims: tuple[int, int], dtype: DType, zero: bool = False
    ) -> Cache:
        """Returns a layer's caches, made where it has none; ``zero``: of zeros, but in a graph, which would
        write them in every step."""
        found = self._caches.get(layer_number)
        if found is None:
            zero = zero and not self.is_recorded()
            k, v = (self._empty(shape, dtype, zero) for shape in self._cache_shapes(groups, dims).values())
            found = self._caches[layer_number] = Cache(k, v, dtype)
        return found

    def __repr__(self) -> str:
        capacity = (
            f"{self.total_num_pages} {'pages' if self.is_paged else 'sequences'} of {self.page_size} tokens"
        )
        return (
            f"InferenceParams({capacity}, {self.qkv_format}, {self.device}, layers {sorted(self._caches)}, "
            f"{self.sequences})"
        )


def _sums(counts: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def _power_of_two(n: int) -> int:
    """Returns the least power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()
