"""``python -m tests.support.size``: how much Python the packages are, in tokens: names, operators, numbers,
strings."""

from __future__ import annotations

import collections
import io
import tokenize

from tests.support import source

COUNTED = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}
# one f-string is one token, whatever the version of Python divides it into
_START, _END = getattr(tokenize, "FSTRING_START", -1), getattr(tokenize, "FSTRING_END", -1)


def tokens(text: str) -> int:
    """Number of tokens of a file's text."""
    count = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        depth += (token.type == _START) - (token.type == _END)
        count += depth == 0 and (token.type in COUNTED or token.type == _END)
    return count


def sizes() -> dict[str, int]:
    """Tokens of every module."""
    return {name: tokens(path.read_text()) for name, path in source.modules().items()}


def main() -> None:
    """Print the sum, and the parts."""
    parts: collections.Counter[str] = collections.Counter()
    found = sizes()
    for name, count in found.items():
        parts[".".join(name.split(".")[: 3 if name.startswith("fp8kit.backends.") else 2])] += count
    lines = sum(path.read_text().count("\n") for path in source.modules().values())
    print(f"{sum(found.values()):,} tokens, {lines:,} lines, {len(found)} files")
    for name, count in parts.most_common(20):
        print(f"{count:>8,} {name}")


if __name__ == "__main__":
    main()
