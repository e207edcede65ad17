"""Lists of tensors in one launch: a table of them travels by value as the kernel's last parameter, column by
column."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any


def firsts(blocks: Iterable[int]) -> tuple[list[int], int]:
    """Of tensors that take so many blocks each: the first block of each, and the number of all."""
    first, total = [], 0
    for count in blocks:
        first.append(total)
        total += count
    return first, total


def pack(layout: struct.Struct, length: int, columns: Iterable[Sequence[Any]]) -> bytes:
    """Columns of values packed one after the other, each filled up with zeros to ``length``."""
    return layout.pack(
        *(value for column in columns for value in (*column, *(0 for _ in range(length - len(column)))))
    )


def launches(
    layout: struct.Struct, length: int, rows: Sequence[tuple[Any, ...]], blocks: Sequence[int]
) -> Iterator[tuple[int, bytes, int]]:
    """(tensors, table, blocks) of each launch, of at most ``length`` tensors. ``rows``: a tensor's values in
    the order of the table's columns, but for the last column, which is its first block; ``blocks``: how many
    it takes."""
    for start in range(0, len(rows), length):
        part = rows[start : start + length]
        first, total = firsts(blocks[start : start + length])
        yield len(part), pack(layout, length, (*zip(*part, strict=True), first)), total
