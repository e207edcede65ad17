"""What is derived from tensors' values and kept beside them, as a weight's FP8 codes are: who changes the
values can have it renewed.

A tensor knows what was derived from it by weak references alone; whoever derived it keeps it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from fp8kit.autograd.tensors import Tensor


class Derived(Protocol):
    """Something derived from tensors' values."""

    @classmethod
    def renewing(cls, several: Sequence[Any]) -> Callable[[], None]:
        """Make room for ``several``, each named once, which is what may fail, and return what writes them
        all. It is called when the tensors have their new values and counts; not at all, if they never get
        them."""


def derive(tensors: Iterable[Tensor], derived: Derived) -> None:
    """Let ``tensors`` know of ``derived``."""
    for tensor in tensors:
        known = [ref for ref in tensor._derived or () if ref() is not None]
        if all(ref() is not derived for ref in known):
            known.append(weakref.ref(derived))
        tensor._derived = known


def renewing(tensors: Iterable[Tensor]) -> Callable[[], None]:
    """Make room for all that is derived from ``tensors``, and return what writes it, as
    ``Derived.renewing``."""
    found: dict[type[Derived], dict[int, Derived]] = {}
    for tensor in tensors:
        for ref in tensor._derived or ():
            one = ref()
            if one is not None:
                found.setdefault(type(one), {})[id(one)] = one
    writers = [kind.renewing(list(several.values())) for kind, several in found.items()]

    def write() -> None:
        for writer in writers:
            writer()

    return write
