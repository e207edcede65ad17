"""Private names of torch are used in one file, ``torch_compat.py`` of the torch frontend."""

from __future__ import annotations

import ast
from functools import cache

import pytest

from tests.support import source

COMPAT = "fp8kit_torch.torch_compat"
FILES = sorted(name for name in source.modules() if name.startswith("fp8kit_torch") and name != COMPAT)
# methods that torch has its subclasses override: in a class, where they call what they override
OVERRIDDEN = {"_apply", "_load_from_state_dict", "_save_to_state_dict"}
# of named tuples; of ``sys``; of transformers' models and configurations
OTHERS = {"_fields", "_replace", "_getframe"}
OTHERS |= {"_attn_implementation", "_can_set_attn_implementation", "_supports_flash_attn"}


def is_private(name):
    return name.startswith("_") and not name.endswith("_")


def torchs_names(tree):
    """Names that a file has of modules of torch, and of what is in them."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {
                (a.asname or a.name).partition(".")[0] for a in node.names if a.name.startswith("torch")
            }
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("torch.ops."):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def paths(tree):
    """Private parts of torch's modules that a file names: imported, by attributes, or as text."""
    torchs = torchs_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [getattr(node, "module", None) or "", *[alias.name for alias in node.names]]
            if any(m.partition(".")[0] == "torch" for m in modules):
                yield from (m for m in modules if any(map(is_private, m.split("."))))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in torchs:
                yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and str(node.value).startswith("torch._"):
            yield node.value


def attributes(tree):
    """Private attributes that a file reads or writes, and texts that may name one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and is_private(node.value):
            yield node.value


@cache
def of_torch():
    """Names of torch's objects that ``torch_compat`` knows."""
    return frozenset(attributes(source.tree(source.modules()[COMPAT]))) | OVERRIDDEN


def definitions(tree):
    """Private names that a file gives to functions, classes, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):  # of a ``__dict__``
            yield node.slice.value


@cache
def own():
    """Private names of the project."""
    return frozenset(name for path in source.modules().values() for name in definitions(source.tree(path)))


def overrides(tree):
    """The calls ``super().NAME`` in a method of that name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in OVERRIDDEN:
            calls = (each for each in ast.walk(node) if isinstance(each, ast.Attribute))
            yield from (each for each in calls if ast.unparse(each) == f"super().{node.name}")


def foreign(tree):
    """What a file of the frontend must not name: private names of torch, and such as nobody here defines."""
    allowed = [each.attr for each in overrides(tree)]
    found = [*paths(tree)]
    for name in attributes(tree):
        if name in allowed:
            allowed.remove(name)
        elif name in of_torch():
            found.append(name)
    used = {each.attr for each in ast.walk(tree) if isinstance(each, ast.Attribute)}
    strange = {name for name in used if is_private(name)} - own() - OTHERS - of_torch()
    return [*found, *sorted(strange)]


@pytest.mark.parametrize("name", FILES)
def test_private_names_of_torch_stand_in_one_file(name):
    assert foreign(source.tree(source.modules()[name])) == []


def test_the_exceptions_are_used():
    trees = [source.tree(source.modules()[name]) for name in FILES]
    assert {each.attr for tree in trees for each in overrides(tree)} == OVERRIDDEN
    assert {name for tree in trees for name in attributes(tree)} >= OTHERS
    assert not OTHERS & of_torch()


def test_the_search_finds_what_it_looks_for():
    code = """
import torch
import torch._dynamo
from torch import Tensor
from torch.utils._pytree import tree_map
torch._C._functions.DelayedError
Tensor._make_subclass
torch.utils.checkpoint.checkpoint
torch.Tensor.__torch_function__
_aten = torch.ops.aten
_aten._pin_memory.default
KNOWN = {("torch._utils", "name")}

class Layer:
    def _apply(self, fn):
        super()._apply(fn)
        self._parameters
        getattr(self, "_version")
        self.nobody._has_this_name
        self._replace()

    def other(self):
        self._apply(0)
"""
    wanted = """Tensor._make_subclass _C _apply _aten._pin_memory _functions _has_this_name _make_subclass
    _parameters _pin_memory _version torch._C torch._C._functions torch._dynamo torch._utils
    torch.utils._pytree"""
    assert sorted(foreign(ast.parse(code))) == wanted.split()
