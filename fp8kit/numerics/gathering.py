"""Counts and sums of all ranks, gathered by the native frontend's collectives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from fp8kit import arrays
from fp8kit.arguments import shown
from fp8kit.arrays import CPU
from fp8kit.collectives import Collectives
from fp8kit.errors import ArgumentError
from fp8kit.execution.codec import decode, encode
from fp8kit.formats import uint8
from fp8kit.numerics.log import Gather, Records

_HEAD = 8  # bytes, of the number of bytes of the table


def gathering(group: Any) -> Gather | None:
    """Returns the function that gathers the records of a group's ranks, which all of them call; None without
    a group. ArgumentError if ``group`` is not one."""
    if group is None:
        return None
    if not isinstance(group, Collectives):
        wanted = "None, or a group of ranks: fk.distributed.init()"
        raise ArgumentError("inspect", "group", shown(group), wanted)

    def gather(own: Records) -> Sequence[Records]:
        message = _packed(own)
        sizes = _of_all(group, np.array([message.size], np.int64).view(np.uint8)).view(np.int64)
        longest = np.zeros(int(sizes.max()), np.uint8)
        longest[: message.size] = message
        return [_unpacked(each) for each in _of_all(group, longest)]

    return gather


def _of_all(ranks: Collectives, message: Any) -> Any:
    """Returns the ranks' messages, uint8 (ranks, n), of each one's, uint8 (n,)."""
    source = arrays.to(message, ranks.device)
    target = arrays.empty((ranks.size * message.size,), uint8, ranks.device)
    ranks.all_gather(source, target, arrays.current_stream(ranks.device), "inspect")
    arrays.synchronize(ranks.device)
    return np.array(arrays.to(target, CPU).numpy()).reshape(ranks.size, -1)


def _packed(records: Records) -> Any:
    """Records as bytes: the length of a table in JSON, the table, and the records one after the other."""
    table = [[layer, tensor, encode(spec), own.nbytes] for (layer, tensor, spec), own in records.items()]
    text = json.dumps(table).encode()
    head = np.array([len(text)], np.int64).view(np.uint8)
    return np.concatenate(
        [head, np.frombuffer(text, np.uint8), *(own.view(np.uint8) for own in records.values())]
    )


def _unpacked(message: Any) -> Records:
    """Returns what ``_packed`` had; anything may stand behind it."""
    start = _HEAD + int(message[:_HEAD].view(np.int64)[0])
    found: Records = {}
    for layer, tensor, spec, nbytes in json.loads(message[_HEAD:start].tobytes()):
        found[layer, tensor, decode(spec)] = message[start : start + nbytes]
        start += nbytes
    return found
