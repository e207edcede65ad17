"""Private names of torch are used in one file."""

from __future__ import annotations

import ast
from pathlib import Path

import fp8kit_torch
import pytest
import torch
from fp8kit_torch import torch_compat

from fp8kit.errors import BackendError

PACKAGE = Path(fp8kit_torch.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "torch_compat.py")


def torchs_names(tree):
    """Names that a file has of modules of torch."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {
                (a.asname or a.name).partition(".")[0] for a in node.names if a.name.startswith("torch")
            }
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def is_private(name):
    return name.startswith("_") and not name.endswith("__")


def private_names(tree):
    """Private parts of torch's modules and objects that a file names."""
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


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_no_private_name_of_torch_outside_of_torch_compat(path):
    assert [*private_names(ast.parse(path.read_text()))] == []


def test_the_search_finds_what_it_looks_for():
    source = """
import torch
import torch._dynamo
from torch import Tensor
from torch.utils._pytree import tree_map
torch._C._functions.DelayedError
Tensor._make_subclass
torch.utils.checkpoint.checkpoint
torch.Tensor.__torch_function__
"""
    assert {*private_names(ast.parse(source))} == {
        "torch._dynamo",
        "torch.utils._pytree",
        "torch._C._functions",
        "torch._C",
        "Tensor._make_subclass",
    }


def test_a_torch_without_a_name_is_refused_by_it(monkeypatch):
    monkeypatch.delattr(torch, "_foreach_norm")
    with pytest.raises(BackendError, match=r"which has no torch\._foreach_norm, expected torch 2\.11"):
        torch_compat._required(torch, "_foreach_norm")


@pytest.mark.parametrize("shape", [(3, 4), (), (0, 2)])
def test_memory_without_the_quick_name(monkeypatch, shape):
    strides = torch.empty(shape).stride()
    quick = torch_compat.empty_strided("cpu")(shape, strides, torch.float16)
    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cpu", None)
    plain = torch_compat.empty_strided("cpu")(shape, strides, torch.float16)
    assert (quick.shape, quick.dtype, quick.stride()) == (plain.shape, plain.dtype, plain.stride())
