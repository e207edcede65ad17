"""A good call of a public name of the torch frontend, argument by argument."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import fp8kit_torch as ft
import torch

H, HEADS, D, FFN = 8, 2, 4, 16


class Call(NamedTuple):
    """``run`` with the arguments that ``good`` makes anew; ``users``: arguments that are the user's to be
    called or handed on, whose errors are the user's own."""

    run: Callable[..., Any]
    good: Callable[[], dict[str, Any]]
    users: tuple[str, ...] = ()


def call(function: Callable[..., Any], users: tuple[str, ...] = (), /, **good: Any) -> Call:
    """A function; ``good``: values, or, where they are functions, what makes them."""
    return Call(function, lambda: {name: make(value) for name, value in good.items()}, users)


def make(value: Any) -> Any:
    return value() if isinstance(value, types.FunctionType) else value


def method(name: str, made: Callable[[], Any], /, **good: Any) -> Call:
    """A method of a fresh object, "self"."""

    def run(self: Any, **given: Any) -> Any:
        return getattr(self, name)(**given)

    return call(run, self=lambda: made(), **good)


def forward(made: Callable[[], torch.nn.Module], /, recipe: Any = None, **good: Any) -> Call:
    """A module's forward, in FP8 with ``recipe``."""

    def run(self: Any, **given: Any) -> Any:
        with ft.autocast(recipe is not None, recipe=recipe):
            return self(**given)

    return call(run, self=lambda: made(), **good)


def module(kind: Callable[..., torch.nn.Module], *inputs: Any, **good: Any) -> Call:
    """A constructor, and what it made called with ``inputs``."""

    def run(**given: Any) -> Any:
        torch.manual_seed(5)
        return kind(**given)(*map(make, inputs))

    return call(run, **good)


def positional(function: Callable[..., Any], /, **good: Any) -> Call:
    return call(lambda **given: function(*given.values()), **good)


def ramp(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.linspace(-2, 2, count).reshape(shape).to(dtype)


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def linear(**more: Any) -> ft.Linear:
    return ft.Linear(H, 6, device="cpu", **more)


def quietly(function: Callable[..., Any]) -> Callable[..., Any]:
    """What is deprecated is tried as well."""

    def run(**given: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return function(**given)

    return run


X = lambda: ramp(3, 2, H)  # noqa: E731

ROPE = {
    "tensor_format": "sbhd",
    "start_positions": lambda: ints(0, 1),
    "interleaved": False,
    "cu_seqlens": None,
    "cp_size": 1,
    "cp_rank": 0,
}

FREQS = lambda: ft.RotaryPositionEmbedding(D, device="cpu")(4)  # noqa: E731
