"""Test files share what stands in tests/support, and one way to compare with a tolerance."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.support import source

FILES = sorted((source.ROOT / "tests").rglob("*.py"))


def private(module: str) -> bool:
    """Whether one file's tests or one folder's fixtures stand there."""
    name = module.rpartition(".")[2]
    return name == "conftest" or name.startswith("test_")


def imported(path: Path) -> list[str]:
    """Modules that a file imports, and names that it imports from the tests' packages."""
    found = []
    for node in ast.walk(source.tree(path)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return [module for module in found if module.startswith(("tests", "."))]


def test_no_file_imports_a_test_file_or_a_conftest():
    wrong = [
        f"{path.relative_to(source.ROOT)}: {module}"
        for path in FILES
        for module in imported(path)
        if private(module)
    ]
    assert not wrong, "\n".join(wrong)


# other helpers that compare arrays; and pytest.approx where it is given one
OTHERS = re.compile(
    r"\.assert_(?:allclose|almost_equal|array_almost_equal)\(|\btorch\.testing\.assert_close\b"
    r"|\bfrom torch\.testing import|\b(?:allclose|isclose)\(|\bapprox\((?:np|jnp|torch)\.(?:as)?array\("
    r"|\bapprox\([^()]*(?:\([^()]*\))?\.tolist\("
)


def test_tolerances_go_through_assert_close():
    """Of arrays; ``math.isclose`` and ``pytest.approx`` are for numbers."""
    files = [path for path in FILES if path != Path(__file__)]
    wrong = [
        f"{path.relative_to(source.ROOT)}:{number}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if OTHERS.search(line.replace("math.isclose(", ""))
    ]
    assert not wrong, "\n".join(wrong)
