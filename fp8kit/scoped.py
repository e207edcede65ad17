"""Values that hold for a block of code, for its thread or, within asyncio, for its task.

Blocks may end in another order than they began, in another task or thread: two tasks take turns, a generator
is closed late or by another task. So a block that has ended is marked, and skipped when the innermost one is
looked up. A task that was started within a block is within it until it ends, and so is what
``contextvars.copy_context`` runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@contextmanager
def changed(owner: Any, **values: Any) -> Iterator[None]:
    """Context manager: attributes of ``owner``, such as a thread's own state, are ``values`` within, and what
    they were after."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


class Block(Generic[T]):
    """``value`` for a block that began within ``above``."""

    __slots__ = ("above", "ended", "value")

    def __init__(self, value: T, above: Block[T] | None) -> None:
        self.value, self.above, self.ended = value, above, False


class _Part(Block[T]):
    """The rest of a ``whole`` block, from where another value was put."""

    __slots__ = ("whole",)

    def __init__(self, value: T, whole: Block[T]) -> None:
        self.value, self.above, self.whole = value, whole.above, whole

    @property
    def ended(self) -> bool:  # type: ignore[override]
        """Whether the whole has."""
        return self.whole.ended


_FOREVER: Block[Any] = Block(None, None)


class Scoped(Generic[T]):
    """One kind of value, ``default`` outside of any block. To be made once, by a module."""

    def __init__(self, name: str, default: T) -> None:
        self.default = default
        self.innermost: ContextVar[Block[T] | None] = ContextVar(name, default=None)  # perhaps ended

    def block(self) -> Block[T] | None:
        """Returns the innermost block that has not ended."""
        found = self.innermost.get()
        while found is not None and found.ended:
            found = found.above
        return found

    def get(self) -> T:
        """Its value."""
        found = self.innermost.get()
        if found is not None and found.ended:
            found = self.block()
        return self.default if found is None else found.value

    def enter(self, value: T) -> Block[T]:
        """Begin a block."""
        made = Block(value, self.block())
        self.innermost.set(made)
        return made

    def leave(self, block: Block[T]) -> None:
        """End a block, wherever it began."""
        block.ended = True
        self.innermost.set(self.block())

    @contextmanager
    def within(self, value: T) -> Iterator[None]:
        """A block."""
        block = self.enter(value)
        try:
            yield
        finally:
            self.leave(block)

    def put(self, value: T) -> None:
        """Let ``value`` hold from now on until the innermost block ends; outside of any, from now on."""
        now = self.block()
        whole = _FOREVER if now is None else now.whole if isinstance(now, _Part) else now
        self.innermost.set(_Part(value, whole))

    def back(self, block: Block[T] | None) -> None:
        """Undo what ``put`` has done since ``block`` was the innermost one."""
        self.innermost.set(block)


class Entries(Generic[T]):
    """The blocks of one context manager, which threads and tasks may enter at once."""

    def __init__(self, scoped: Scoped[T]) -> None:
        self._scoped = scoped
        self._open: dict[Block[T], None] = {}  # entered and not left, in their order

    def enter(self, value: T) -> None:
        """Begin one."""
        self._open[self._scoped.enter(value)] = None

    def leave(self) -> None:
        """End the innermost one of this thread or task; where there is none, the last one."""
        at = self._scoped.block()
        while at is not None and at not in self._open:
            at = at.above
        block = next(reversed(self._open)) if at is None else at
        del self._open[block]
        self._scoped.leave(block)
