"""What the public names say about arrays: their shapes or dtypes, and what is refused."""

from __future__ import annotations

import importlib
import inspect
import re
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

# whose ``__all__`` is public; a module without one: the public names that it defines
MODULES = ("fp8kit", "fp8kit.nn", "fp8kit.optim", "fp8kit.recipe", "fp8kit.testing", "fp8kit.autograd")

ARRAY = re.compile(r"\b(Tensor|ArrayView|HostArray|ndarray|Any)\b")  # annotations of what may be an array
# parameters with such an annotation that are none
NOT_ARRAYS = {
    "args",
    "kwargs",
    "options",
    "other",
    "device",
    "dtype",
    "params_dtype",
    "function",
    "hook",
    "model",
    "modules",
    "parameters_split",
    "kernels",
    "group",
    "activation_params",
    "finish",
    "memo",
    "spec",
    "operation",
}
SHAPES = re.compile(r"\bshapes?\b|\bdtypes?\b|\barrays? of\b|float32|int64|\(\.\.\.|\bh \(")
ERRORS = re.compile(r"[Ee]rrors?\b")
REFERENCE = re.compile(r"\bas\s+``(\w+)``")  # to another public name, which then speaks for this one too


class Public(NamedTuple):
    """A public callable: its dotted name, itself, and the class it was found in."""

    name: str
    value: Callable[..., Any]
    owner: type | None


def _exported(module: str) -> Iterator[tuple[str, Any]]:
    found = importlib.import_module(module)
    names = getattr(
        found,
        "__all__",
        [n for n, v in vars(found).items() if n[0] != "_" and getattr(v, "__module__", "") == module],
    )
    for name in names:
        value = getattr(found, name)
        if not isinstance(value, types.ModuleType | str):
            yield f"{module}.{name}", value


def _public() -> Iterator[Public]:
    seen: set[Any] = set()
    for module in MODULES:
        for name, value in _exported(module):
            if not callable(value) or value in seen:
                continue
            seen.add(value)
            yield Public(name, value, None)
            for base in inspect.getmro(value) if inspect.isclass(value) else ():
                if not base.__module__.startswith("fp8kit"):
                    continue
                for attribute, member in vars(base).items():
                    inner = getattr(
                        member, "__func__", member.fget if isinstance(member, property) else member
                    )
                    if attribute[0] != "_" and inspect.isfunction(inner) and inner not in seen:
                        seen.add(inner)
                        yield Public(f"{name}.{attribute}", inner, value)


PUBLIC = list(_public())


BY_NAME = {public.name.rpartition(".")[2]: public.value for public in PUBLIC if public.owner is None}


def documented(public: Public) -> str:
    """Its docstring, or that of what it overrides, with its class's and those of public names that they refer
    to."""
    text = inspect.getdoc(public.value)
    if public.owner is not None:
        text = text or inspect.getdoc(getattr(public.owner, public.value.__name__))
        text = text and f"{text}\n{inspect.getdoc(public.owner)}"
    return (
        "\n".join(
            [
                text,
                *(inspect.getdoc(BY_NAME[name]) or "" for name in REFERENCE.findall(text) if name in BY_NAME),
            ]
        )
        if text
        else ""
    )


def takes_arrays(public: Public) -> list[str]:
    """Its parameters that may be arrays."""
    if inspect.isclass(public.value) and issubclass(public.value, BaseException):
        return []
    parameters = inspect.signature(public.value).parameters.values()
    return [
        p.name
        for p in parameters
        if p.name not in NOT_ARRAYS and ARRAY.search(str(p.annotation).replace("dict[str, Any]", ""))
    ]


def test_says_what_it_takes() -> None:
    wrong = []
    for public in PUBLIC:
        text, taken = documented(public), takes_arrays(public)
        if not text:
            wrong.append(f"{public.name} has no docstring")
        if taken and not SHAPES.search(text):
            wrong.append(f"{public.name} takes {taken} and says neither shapes nor dtypes")
        if taken and not ERRORS.search(text):
            wrong.append(f"{public.name} takes {taken} and does not say which errors it raises")
    assert not wrong, "\n".join(wrong)


def test_values_have_a_type_that_says_what_they_are() -> None:
    values = [(name, value) for module in MODULES for name, value in _exported(module) if not callable(value)]
    assert values
    assert all(inspect.getdoc(type(value)) for _, value in values)
