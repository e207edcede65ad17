"""Embedding look-up and its gradient, both without floating-point atomics."""

from __future__ import annotations

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda._rows import ceil_div, kernel
from fp8kit.formats import int64

_ROWS, _COLUMNS, _THREADS = 16, 512, 256  # of a block of embedding_bwd (raw_kernels/embedding.cu)


def embedding_fwd(ids: ArrayView, table: ArrayView, out: ArrayView, stream: int) -> None:
    """See ``backends.protocol``."""
    rows, (known, columns) = ids.size, table.shape
    if columns:
        arguments = (ids.ptr, table.ptr, out.ptr, rows, columns, known, int(ids.dtype is int64))
        launch.launch(
            kernel("embedding.cu", "embedding_fwd", table), ceil_div(rows, 8), (32, 8), arguments, stream
        )


def embedding_bwd(ids: ArrayView, dout: ArrayView, dtable: ArrayView, stream: int) -> None:
    """See ``backends.protocol``. Every block reads all ids: meant for up to some ten thousand tokens a
    call."""
    rows, (known, columns) = ids.size, dtable.shape
    across = ceil_div(columns, _COLUMNS)
    arguments = (ids.ptr, dout.ptr, dtable.ptr, rows, columns, known, max(across, 1), int(ids.dtype is int64))
    launch.launch(
        kernel("embedding.cu", "embedding_bwd", dtable),
        ceil_div(known, _ROWS) * across,
        _THREADS,
        arguments,
        stream,
    )
