"""Documents say what is true: their code runs, and what they name exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house import source
from tests.house.source import ROOT

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
by_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)

LINK = re.compile(r"\]\((?!https?:)([^)#]+)\)")
# in backticks: a file or folder of the tree, perhaps with a test in it; `::test` alone belongs to the file
# named before
NAMED = re.compile(
    r"`((?:fp8kit|tests|examples|benchmarks|adapters|docs)/[\w./*-]*?\.\w+|\.[a-z]+/\w+)?(?:::(\w+))?`"
)
ROOMS = "fp8kit/testing/contract"


def script(document: Path) -> str:
    """The document's Python blocks, each line where it stands in the document."""
    out, inside = [], False
    for line in document.read_text().splitlines():
        fence = line.startswith("```")
        inside = line == "```python" if fence else inside
        out.append(line if inside and not fence else "")
    return "\n".join(out) + "\n"


WITH_CODE = [document for document in DOCUMENTS if script(document).strip()]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("document", WITH_CODE, ids=lambda path: path.stem)
def test_code_runs(document: Path, device: str, tmp_path: Path) -> None:
    """All blocks of a document, one after the other, in an interpreter of their own."""
    path = tmp_path / document.with_suffix(".py").name
    path.write_text(script(document))
    paths = [str(ROOT), str(ROOT / "adapters"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONWARNINGS": "error",
        "FP8KIT_DEVICE": device,
    }
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def references(document: Path) -> Iterator[tuple[str, str]]:
    """(path, test in it or "") of everything that the text names."""
    path = ""
    for found in NAMED.finditer(document.read_text()):
        path = found[1] or path
        if found[1] or found[2]:
            yield path, found[2] or ""


@by_document
def test_what_is_named_exists(document: Path) -> None:
    wrong = [
        f"link {target}"
        for target in LINK.findall(document.read_text())
        if not (document.parent / target).exists()
    ]
    for path, test in references(document):
        files = list(ROOT.glob(path))
        if not files:
            wrong.append(path)
        elif test and not any(f"def {test}(" in file.read_text() for file in files):
            wrong.append(f"{path}::{test}")
    assert not wrong, wrong


def test_every_example_is_linked() -> None:
    text = (ROOT / "README.md").read_text()
    missing = [
        path.name for path in sorted((ROOT / "examples").glob("*.py")) if f"examples/{path.name}" not in text
    ]
    assert not missing, missing


def test_documents_are_among_the_texts_that_are_searched_for_unwanted_words() -> None:
    assert set(DOCUMENTS) <= set(source.texts())
