"""Documents say what is true: their code runs, what they name exists, and each says its own things."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import fp8kit
from tests.support import source
from tests.support.source import ROOT

DOCUMENTS = [path for path in source.texts() if path.suffix == ".md"]
by_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))

COLUMNS = 110
README_LINES, README_WORDS = 130, 1300
LONG_SENTENCE = 8  # words, from which on a sentence is not written twice

FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?![a-z]+:)([^)#]+)")
# in backticks: a file or folder of the tree, perhaps with a test in it; `::test` alone belongs to the file
# named before
NAMED = re.compile(
    r"`((?:fp8kit|tests|examples|benchmarks|adapters|docs)/[\w./*-]*[\w*/]|\.[a-z]+/\w+)?(?:::(\w+))?`"
)


def prose(document: Path) -> str:
    """The text without its blocks of code."""
    return FENCED.sub("", document.read_text())


def script(document: Path) -> str:
    """The document's Python blocks, each line where it stands in the document."""
    out, inside = [], False
    for line in document.read_text().splitlines():
        fence = line.startswith("```")
        inside = line == "```python" if fence else inside
        out.append(line if inside and not fence else "")
    return "\n".join(out) + "\n"


# the code of the others runs in make test-programs: every page imports frameworks of its own
USUAL = ("native",)
WITH_CODE = [
    pytest.param(document, id=document.stem, marks=() if document.stem in USUAL else pytest.mark.programs)
    for document in DOCUMENTS
    if script(document).strip()
]


# page -> how the lines begin that it logs on a CPU: of a kernel for GPUs, which nothing calls there; of a
# recipe whose products are emulated, as the page says
LOGGED = {
    "kernel_lab": "override of quantize_transpose: ",
    "recipes": "FP8 products are not native by this recipe",
}
COMPILES = "first use of the CPU engine: "  # of any page, where nothing is in the cache yet


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("document", WITH_CODE)
def test_code_runs(document: Path, device: str, tmp_path: Path) -> None:
    """All blocks of a document, one after the other, in an interpreter of their own. Lines of the failing
    block's traceback are those of the document. On a CPU nothing but ``LOGGED`` is logged, and that
    Numba compiles."""
    path = tmp_path / f"page_{document.stem}.py"  # not the name of a package that it imports
    path.write_text(script(document))
    paths = [str(ROOT), str(ROOT / "adapters"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONWARNINGS": "error",
        "PYTHONSAFEPATH": "1",  # a document may have the name of a package
        "FP8KIT_DEVICE": device,
    }
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", str(path)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    usual = (LOGGED.get(document.stem, COMPILES), COMPILES)
    logged = [line for line in done.stderr.splitlines() if not line.startswith(usual)]
    if done.returncode or (device == "cpu" and logged):
        how = f"exit status {done.returncode}, on {device}"
        pytest.fail(f"{document.relative_to(ROOT)}: {how}\n{done.stdout}{done.stderr}", pytrace=False)


def references(document: Path) -> Iterator[tuple[str, str]]:
    """(path, test in it or "") of everything that the text names."""
    path = ""
    for found in NAMED.finditer(document.read_text()):
        path = found[1] or path
        if found[1] or found[2]:
            yield path, found[2] or ""


def defines(file: Path, name: str) -> bool:
    """Whether a function, a class or a constant of the file has that name."""
    return re.search(rf"^ *(?:(?:def|class) )?{name}\b *[(:=]", file.read_text(), re.MULTILINE) is not None


@by_document
def test_what_is_named_exists(document: Path) -> None:
    wrong = [
        f"link {target}"
        for target in LINK.findall(prose(document))
        if not (document.parent / target).exists()
    ]
    for path, test in references(document):
        files = list(ROOT.glob(path))
        if not files:
            wrong.append(path)
        elif test and not any(defines(file, test) for file in files):
            wrong.append(f"{path}::{test}")
    assert not wrong, wrong


def test_architecture_names_whole_paths() -> None:
    """So that ``test_what_is_named_exists`` looks for each file and name of the page."""
    names = re.findall(r"`([^`\s]*\.(?:py|cu|cuh)[^`]*)`", (ROOT / "docs/architecture.md").read_text())
    assert len(names) > 50
    assert not [name for name in names if not NAMED.fullmatch(f"`{name}`")]


KERNELS = sorted((ROOT / "fp8kit/raw_kernels").glob("*.cu*"))


@pytest.mark.parametrize("document", [*DOCUMENTS, *KERNELS], ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_fit(document: Path) -> None:
    """Rows of tables and addresses, which cannot be broken, aside."""
    long = [
        f"{number}: {len(line)} columns"
        for number, line in enumerate(document.read_text().splitlines(), 1)
        if len(line) > COLUMNS and not line.startswith("|") and " " in line.strip().lstrip("- ")
    ]
    assert not long, long


def test_lines_of_code_fit() -> None:
    """What ruff leaves out too: a comment for a checker at a line's end, other languages."""
    long = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in source.texts()
        if path.suffix in (".py", ".toml", ".h")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > COLUMNS
    ]
    assert not long, long


def test_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= README_LINES
    assert len(text.split()) <= README_WORDS


def test_results_are_cited() -> None:
    """Each committed measurement, those of `python -m studies` aside, which come as one folder."""
    named = "".join(path.read_text() for path in DOCUMENTS if path != ROOT / "benchmarks/README.md")
    results = [path for path in (ROOT / "benchmarks/results").rglob("*") if path.is_file()]
    unknown = [str(path) for path in results if path.name not in named and "convergence" not in path.parts]
    assert not unknown, unknown


def test_no_sentence_is_written_twice() -> None:
    seen: dict[str, str] = {}
    twice = []
    for document in DOCUMENTS:
        name = str(document.relative_to(ROOT))
        for paragraph in re.split(r"\n\s*\n|^\s*[-*|#] ?|\|", prose(document), flags=re.MULTILINE):
            for sentence in re.split(r"(?<=[.!?]) ", " ".join(paragraph.split())):
                if len(sentence.split()) >= LONG_SENTENCE and seen.setdefault(sentence, name) != name:
                    twice.append(f"{seen[sentence]}, {name}: {sentence}")
    assert not twice, "\n".join(twice)


def test_every_example_is_listed() -> None:
    text = (ROOT / "docs/examples.md").read_text()
    missing = [
        path.name for path in sorted((ROOT / "examples").glob("*.py")) if f"examples/{path.name}" not in text
    ]
    assert not missing, missing


def test_every_public_name_is_in_the_reference() -> None:
    """``fp8kit``'s one by one, since they are found by name only; a package that lists its names in
    ``__all__`` is shown whole."""
    text = "".join(path.read_text() for path in (ROOT / "docs/api").glob("*.md"))
    shown = set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE))
    missing = []
    for name in set(fp8kit.__all__) - {"__version__"}:
        value = getattr(fp8kit, name)
        # constants stand in the text; a module of the same name hides two functions from the reference
        known = callable(value) or isinstance(value, types.ModuleType)
        if not ({f"fp8kit.{name}", f"fp8kit.{name}.{name}"} & shown if known else f"`{name}`" in text):
            missing.append(name)
    assert not missing, missing
    for name in ("fp8kit_torch", "fp8kit_jax", "fp8kit_jax.flax", "fp8kit_jax.nnx", "fp8kit.nn"):
        assert name in shown
        assigned = [n for n in ast.walk(source.tree(source.modules()[name])) if isinstance(n, ast.Assign)]
        names = [node.value for node in assigned if ast.unparse(node.targets[0]) == "__all__"]
        assert names, f"{name} has no __all__"
        ast.literal_eval(names[0])  # the reference is made without an import
