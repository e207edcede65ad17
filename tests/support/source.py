"""The project's own source, read with ``ast``: files, imports, and public names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LONG = 600
PACKAGES = {
    "fp8kit": ROOT / "fp8kit",
    "fp8kit_torch": ROOT / "adapters/fp8kit_torch",
    "fp8kit_jax": ROOT / "adapters/fp8kit_jax",
}
TEXTS = (".py", ".cu", ".cuh", ".h", ".md", ".toml")


class Import(NamedTuple):
    """One imported module (dotted), where, whether at module level (outside of functions and ``if
    TYPE_CHECKING``), and whether for type checkers alone."""

    module: str
    line: int
    eager: bool
    typing: bool = False


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file of every module of the packages."""
    found = {}
    for name, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = (name, *path.relative_to(folder).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(path: Path) -> ast.Module:
    """Returns the file's syntax tree."""
    return ast.parse(path.read_text(), str(path))


@cache
def imports(name: str) -> tuple[Import, ...]:
    """Returns what a module imports: statements, and ``import_module`` of a literal."""
    found = []
    called = "import_module" in modules()[name].read_text()

    def visit(node: ast.AST, eager: bool, typing: bool = False) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            eager = False
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            eager, typing = False, True
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, eager, typing) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                module = whole if whole in modules() else str(node.module)
                found.append(Import(module, node.lineno, eager, typing))
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "attr", getattr(node.func, "id", "")).endswith("import_module")
            and isinstance(node.args[0], ast.Constant)
        ):
            found.append(Import(str(node.args[0].value), node.lineno, eager))
        for child in ast.iter_child_nodes(node):
            if called or not isinstance(child, ast.expr):  # no expression holds a statement
                visit(child, eager, typing)

    visit(tree(modules()[name]), True)
    return tuple(found)


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def public(name: str) -> Iterator[tuple[str, Definition, ast.ClassDef | None]]:
    """(qualified name, definition, class it stands in) of a module's public functions, classes and
    methods."""
    for node in tree(modules()[name]).body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield f"{name}.{node.name}", node, None
            if isinstance(node, ast.ClassDef):
                for inner in node.body:
                    if isinstance(inner, Definition) and not inner.name.startswith("_"):
                        yield f"{name}.{node.name}.{inner.name}", inner, node


@cache
def texts() -> tuple[Path, ...]:
    """Every text file that the project wrote."""
    folders = (
        ROOT / name for name in ("fp8kit", "adapters", "tests", "examples", "benchmarks", "studies", "docs")
    )
    found = [path for folder in folders for path in sorted(folder.rglob("*")) if path.suffix in TEXTS]
    return (*found, *(p for p in sorted(ROOT.glob("*")) if p.suffix in TEXTS or p.name == "Makefile"))


def long_files() -> list[str]:
    """Returns a line for each file over the limit."""
    counts = {path: path.read_text().count("\n") for path in texts() if path.suffix != ".md"}
    return [
        f"over {LONG} lines: {path.relative_to(ROOT)} ({count})"
        for path, count in counts.items()
        if count > LONG
    ]


def stems() -> list[str]:
    """Returns a line for each CUDA source whose idea goes by another name elsewhere: no operation and no
    engine has a file of its stem, or of what comes before the first underscore (norm_fwd.cu is a part of
    "norm")."""
    folders = {
        "ops": "fp8kit/ops",
        "reference": "fp8kit/backends/reference",
        "cuda": "fp8kit/backends/cuda",
        "raw": "fp8kit/raw_kernels",
    }
    found = {
        kind: {path.stem for path in (ROOT / folder).glob("*") if path.suffix in (".py", ".cu")}
        for kind, folder in folders.items()
    }
    kernels = found["raw"] - {"__init__", "manifest"}
    elsewhere = found["ops"] | found["reference"] | found["cuda"]
    lonely = sorted(stem for stem in kernels if not {stem, stem.partition("_")[0]} & elsewhere)
    return [
        f"a remark: no operation and no engine has a file of the name of fp8kit/raw_kernels/{stem}.cu"
        for stem in lonely
    ]
