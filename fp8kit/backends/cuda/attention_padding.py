"""The small kernels that stand round an attention of batches whose lengths differ
(raw_kernels/attention_padding.cu)."""

from __future__ import annotations

from typing import Any

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import attention_rules, launch
from fp8kit.backends.cuda._rows import ceil_div
from fp8kit.backends.cuda.attention_problem import Problem, Strides, bhsd
from fp8kit.backends.cuda.sequences import grid_of
from fp8kit.backends.protocol import AttentionExtras
from fp8kit.formats import DTYPES

_THREADS = 256


class Padding:
    """Those kernels for one call. ``rules``: the structure that they take."""

    def __init__(self, problem: Problem, device: int, extras: AttentionExtras, stream: int) -> None:
        self.problem = problem
        self.device = device
        self.rules = attention_rules.pack(problem, extras)
        self.stream = stream
        self.dtype = DTYPES[problem.dtype]
        self.type = launch.type_name(self.dtype)

    def _launch(self, function: str, grid: int, args: tuple[Any, ...]) -> None:
        kernel = launch.kernel("attention_padding.cu", function, self.device, T=self.type)
        launch.launch(kernel, grid, _THREADS, (*args, self.rules), self.stream)

    def lengths(self, to: int) -> None:
        """True lengths of q's and then k's batches, int32, to address ``to``."""
        self._launch(
            "attention_lengths", ceil_div(2 * self.problem.batch, _THREADS), (to, self.problem.batch)
        )

    def statistics(self, source: int, to: int, value: float) -> None:
        """The log-sum-exp at address ``source``, with ``value`` in rows that see nothing."""
        p = self.problem
        self._launch(
            "attention_lse_padding",
            ceil_div(p.batch * p.heads * p.rows, _THREADS),
            (source, to, value, p.batch),
        )

    def zero(self, view: ArrayView, query: bool) -> None:
        """Zeros in the rows of an array of q's (``query``) or k's lengths that see nothing or are seen by
        nothing for their padding."""
        p = self.problem
        rows, heads = (p.rows, p.heads) if query else (p.columns, p.groups)
        place = (int(not query), p.batch, heads, view.shape[3], *bhsd(p.qkv_format, view)[:3])
        self._launch("attention_zero_padding", grid_of(p.batch * rows), (view.ptr, *place))

    def clean(
        self,
        source: int,
        strides: Strides,
        to: int,
        to_strides: Strides,
        query: bool,
        size: tuple[int, int, int, int],
        batch: int = 0,
        row: int = 0,
    ) -> None:
        """A copy with zeros in the rows beyond the true lengths, so that a product may read them. ``size``:
        (batches, heads, rows, features) from row ``row`` of batch ``batch`` on, which the addresses point at;
        strides of b, h, s, d in elements."""
        batches, heads, rows, dim = size
        place = (int(not query), batch, row, batches, heads, rows, dim, *strides[:3], *to_strides[:3])
        self._launch("attention_clean", grid_of(batches * rows), (source, to, *place))
