"""Parameters in combinations: as many of them as show every value run in ``make test``, the others in ``make
test-combinations``."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pytest

Parts = TypeVar("Parts", bound=tuple[Hashable, ...])


def covering(variants: Sequence[Parts], chosen: Sequence[Parts] = ()) -> list[Parts]:
    """``chosen``, and variants until every part of every variant occurs: each time the one with the most
    parts that did not occur yet, of equals the one whose parts occurred least."""
    return [*_covering(tuple(variants), tuple(chosen))]


def pairwise(variants: Sequence[Parts]) -> list[Parts]:
    """Variants until every two parts of one variant occur together."""
    pairs = {tuple(itertools.combinations(variant, 2)): variant for variant in variants}
    return [pairs[chosen] for chosen in covering([*pairs])]


@functools.cache  # asked once for each variant of a kernel source
def _covering(variants: tuple[Parts, ...], begin: tuple[Parts, ...]) -> list[Parts]:
    chosen = list(begin)
    missing = {part for variant in variants for part in variant}.difference(*chosen)
    times = collections.Counter(part for variant in chosen for part in variant)
    while missing:
        new = [len(missing.intersection(variant)) for variant in variants]
        most = max(new)
        best = [variant for variant, count in zip(variants, new, strict=True) if count == most]
        chosen.append(min(best, key=lambda variant: sum(times[part] for part in variant)))
        missing.difference_update(chosen[-1])
        times.update(chosen[-1])
    return chosen


def combinations(
    axes: Mapping[str, Iterable[Any]], usual: Collection[str] | None = None
) -> pytest.MarkDecorator:
    """``parametrize`` with every combination of the axes' values; all but some are marked ``combinations``.

    ``axes``: argument -> its values, or identifier -> value. ``usual``: identifiers of those that carry no
    mark, by default as many as it takes until every value of every axis occurs; none where another test
    shows the same in ``make test``, or each takes seconds.
    """
    named = [
        values if isinstance(values, Mapping) else {getattr(v, "__name__", None) or str(v): v for v in values}
        for values in axes.values()
    ]
    every = list(itertools.product(*named))
    names = {"-".join(parts): parts for parts in every}
    assert len(names) == len(every), names
    if usual is None:
        chosen = {tuple(part for _, part in variant) for variant in covering([*map(_placed, every)])}
        usual = {name for name, parts in names.items() if parts in chosen}
    assert names.keys() >= set(usual), (usual, list(names))
    return pytest.mark.parametrize(
        tuple(axes),
        [
            pytest.param(
                *(values[part] for values, part in zip(named, parts, strict=True)),
                id=name,
                marks=() if name in usual else pytest.mark.combinations,
            )
            for name, parts in names.items()
        ],
    )


def _placed(parts: tuple[str, ...]) -> tuple[tuple[int, str], ...]:
    """Each part with its axis: two axes may have the same values."""
    return tuple(enumerate(parts))
