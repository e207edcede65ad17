"""Docstrings as Markdown: griffe hands them over as they stand, with the few marks of reStructuredText that
they use."""

from __future__ import annotations

import re
from typing import Any

import griffe

# a simple table: rows of = above, below the head and at the end
TABLE = re.compile(r"^=+(?: +=+)+\n(?:.*\n)*?=+(?: +=+)+\n(?:(?:.*\n)*?=+(?: +=+)+(?:\n|$))?", re.MULTILINE)
LITERAL = re.compile(r" ?::$", re.MULTILINE)


def markdown(text: str) -> str:
    """The docstring with its tables as literal text, and blocks after ``::`` as Markdown's."""
    text = TABLE.sub(lambda found: f"```text\n{found[0].rstrip()}\n```\n", text)
    return LITERAL.sub(":", text)


class Docstrings(griffe.Extension):
    """Rewrites every docstring that is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each function, class and module."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
