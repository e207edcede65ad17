"""Docstrings of public names, and words that do not belong into the project's files."""

from __future__ import annotations

import ast
import functools
import re

from fp8kit.backends.protocol import KERNELS
from tests.support import source

LEAST_WORDS = 2
ENDS = ".)`|="  # a sentence, or a formula or table
# a machine's own paths, numbers of reports elsewhere, and notes to finish later
PATHS = "|".join(("work", "tmp", "root", "home"))
NOTES = "|".join(("TO" + "DO", "FIX" + "ME", "HA" + "CK"))
UNWANTED = re.compile(rf"(?<![\w.])/(?:{PATHS})/|\b(?:{NOTES})\b|\bissue #\d+")
# words that were this project's own for things that the field has names for -> the field's name; as a word of
# the text, and in a name
RETIRED = {
    r"doors?": "frontend",
    r"houses?|rooms?|storeys?": "package, module, layer of the architecture; arena (memory)",
    r"rehears\w*": "validate",
    r"settl(?:e|es|ed|ing)": "resolve",
    r"spoil\w*|spoilt": "mark unrecordable; ruin (a scale)",
    r"carv(?:e|es|ed|ing)": "allocate",
    r"wirings?": "state binding",
    r"tickets?": "state token",
    r"attention across": "cross-attention",
}
# ordinary English, and names of nothing -> what to call it
RETIRED_NAMES = {
    "Ahead": "PreparedCall",
    "turned": "rotated",
    "given": "out",
    "late": "backward inputs",
    "joins": "fused residual",
    "era": "epoch",
    "cuts": "partition rules",
    "spread": "sharded RNG",
    "small": "functional",
    "stages": "decompositions",
    "texts": "serialization",
    "words": "argument names",
    "recent": "LRU cache",
    "brings": "the verb of what is done",
    "told": "the verb of what is done",
    "looks": "the verb of what is done",
    "wants": "the verb of what is done",
    "apart": "separately allocated",
    "early": "streamed",
    "again": "replay",
    "walk": "recompute pass",
    "later": "unsupported arguments",
    "not_yet": "unsupported arguments",
}
RETIRED_WORD = re.compile(rf"(?i)\b(?:{'|'.join(RETIRED)})\b")
RETIRED_NAME = re.compile(rf"`(?:{'|'.join(RETIRED_NAMES)})(?:\.py|\(\))?`")
PATH = re.compile(r"`[^`]*/[^`]*`|`::\w+`|\]\([^)]*\)")  # of a file, which is renamed where it stands


@functools.cache  # not at import: every worker imports this file
def documented_methods() -> set[str]:
    """Names of methods that some class documents: a protocol or a base class speaks for those that implement
    or override it."""
    everything = (found for name in source.modules() for found in source.public(name))
    return {node.name for _, node, owner in everything if owner is not None and ast.get_docstring(node)}


def documented_elsewhere(node: source.Definition, owner: ast.ClassDef | None) -> bool:
    """Whether something else speaks for this name: the kernel contract, a base class, what it overloads, or
    (ctypes) the C declaration."""
    if isinstance(node, ast.ClassDef):
        borrowed = [ast.unparse(line.targets[0]) for line in node.body if isinstance(line, ast.Assign)]
        bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
        return (
            "__doc__" in borrowed or node.name in bases or any(base.endswith("Structure") for base in bases)
        )
    marks = {ast.unparse(mark).rpartition(".")[2] for mark in node.decorator_list}
    return (
        "overload" in marks
        or "setter" in marks
        or node.name in (KERNELS if owner is None else documented_methods())
    )


def test_public_names_have_docstrings():
    wrong = []
    for name in source.modules():
        for qualified, node, owner in source.public(name):
            text = ast.get_docstring(node)
            if text is None:
                if not documented_elsewhere(node, owner):
                    wrong.append(f"{qualified}: none")
            elif (len(text.split()) < LEAST_WORDS and "``" not in text) or text.rstrip()[-1] not in ENDS:
                wrong.append(f"{qualified}: {text!r} is too short or does not end as a sentence")
    assert not wrong, "\n".join(wrong)


def test_modules_say_what_they_are():
    wrong = [name for name, path in source.modules().items() if not ast.get_docstring(source.tree(path))]
    assert not wrong, f"no docstring: {wrong}"


def lines(paths, wanted=None):
    """(file and number, line) of each line of the files, or of those where ``wanted`` is found."""
    for path in paths:
        text, place = path.read_text(), path.relative_to(source.ROOT)
        if wanted is None or wanted.search(text):
            for number, line in enumerate(text.splitlines(), 1):
                if wanted is None or wanted.search(line):
                    yield f"{place}:{number}", line


def test_no_unwanted_words():
    found = [f"{place}: {line.strip()}" for place, line in lines(source.texts(), UNWANTED)]
    assert not found, "\n".join(found)


def test_documents_use_the_names_of_the_field():
    found = []
    for place, line in lines(path for path in source.texts() if path.suffix == ".md"):
        text = PATH.sub("", line)
        words = [*RETIRED_WORD.findall(text), *RETIRED_NAME.findall(text)]
        found += [f"{place}: {word}" for word in words]
    assert not found, "\n".join(found)


# what has no other meaning in this code, as a word or as a part of a name
RETIRED_IN_CODE = re.compile(
    r"(?i)(?<![a-z])(?:doors?|storeys?|rooms|rehears\w*|spoil\w*|carv(?:e|es|ed|ing)|wirings?|tickets?"
    r"|turned(?! out))(?![a-z])"
)


def test_code_uses_the_names_of_the_field():
    code = (path for path in source.texts() if path.suffix != ".md" and path.name != "test_words.py")
    found = [f"{place}: {line.strip()}" for place, line in lines(code, RETIRED_IN_CODE)]
    assert not found, "\n".join(found)
