"""A good call of a public name, argument by argument, made anew each time: a ruined call changes nothing for
the next one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import fp8kit as fk
from fp8kit import arrays, nn, optim

X = np.linspace(-3, 3, 12, dtype=np.float32).reshape(3, 4)


class Call(NamedTuple):
    """``run`` with the arguments that ``good`` makes; ``state`` says what must be as it was after a refusal
    (bytes by name)."""

    run: Callable[..., Any]
    good: Callable[[], dict[str, Any]]
    state: Callable[[dict[str, Any]], dict[str, bytes]] = lambda given: {}


def view(value: Any = X) -> arrays.ArrayView:
    return arrays.as_view(np.array(value))


def leaf(value: Any = X) -> fk.Tensor:
    made = fk.tensor(np.array(value, np.float32), requires_grad=True)
    made.grad = view(np.ones(made.shape, np.float32))
    return made


def method(name: str, make: Callable[[], Any], /, **good: Any) -> Call:
    """Returns a method of a fresh object; ``good`` holds functions that make the arguments."""

    def run(self: Any, **given: Any) -> Any:
        return getattr(self, name)(**given)

    return plain(run, self=make, **good)


def plain(function: Callable[..., Any], /, **good: Any) -> Call:
    """Returns a function or a constructor; ``good`` as for ``method``."""
    return Call(function, lambda: {key: value() for key, value in good.items()}, state_of)


def positional(function: Callable[..., Any], /, **good: Any) -> Call:
    """Returns a function that takes its arguments by position."""
    return plain(lambda **given: function(*given.values()), **good)


def state_of(given: dict[str, Any]) -> dict[str, bytes]:
    """Returns the bytes of every array, tensor and module among the arguments."""
    found: dict[str, bytes] = {}
    for key, value in given.items():
        for name, array in _arrays(value).items():
            found[f"{key}.{name}"] = np.ascontiguousarray(array).tobytes()
    return found


def _arrays(value: Any) -> dict[str, Any]:
    if isinstance(value, np.ndarray):
        return {"": value} if value.dtype != object and value.nbytes < 2**30 else {}
    if isinstance(value, arrays.ArrayView | fk.Tensor):
        grad = getattr(value, "grad", None)
        return {"": value.numpy()} | (
            {"grad": arrays.as_view(grad).numpy()} if isinstance(grad, arrays.ArrayView | np.ndarray) else {}
        )
    if isinstance(value, fk.QuantizedArray):
        return {"data": np.asarray(value.data), "scale_inv": np.asarray(value.scale_inv)}
    if isinstance(value, nn.Module | optim.Optimizer | optim.GradScaler):
        return {name: arrays.as_view(array).numpy().copy() for name, array in value.state_dict().items()}
    if isinstance(value, nn.InferenceParams):
        return {
            name: array
            for part in value.convert_paged_to_nonpaged(1)
            for name, array in _arrays(part).items()
        } | {f"{name} of {value.sequences}": view.numpy() for name, view in value._on_device.items()}
    if isinstance(value, list | tuple):
        return {f"{i}{name}": array for i, part in enumerate(value) for name, array in _arrays(part).items()}
    return {}


def module(make: Callable[..., nn.Module], call: Callable[[], tuple[Any, ...]], /, **good: Any) -> Call:
    """Returns a constructor, and a call of what it made."""

    def run(**given: Any) -> Any:
        return make(**given)(*call())

    return plain(run, **good)


def always(value: Any) -> Callable[[], Any]:
    return lambda: value


def within(switch: Any) -> None:
    with switch:
        pass
