"""``python -m tests.support.size``: how much Python the packages are, in tokens: names, operators, numbers,
strings. ``--since COMMIT``: how much of it is in files that were there at that commit, and in newer ones."""

from __future__ import annotations

import argparse
import collections
import difflib
import io
import subprocess
import tokenize
from pathlib import Path

from tests.support import source

COUNTED = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}
# one f-string is one token, whatever the version of Python divides it into
_START, _END = getattr(tokenize, "FSTRING_START", -1), getattr(tokenize, "FSTRING_END", -1)
FOLDERS = ("fp8kit", "adapters")


def words(text: str) -> list[str]:
    """Returns the tokens of a file's text."""
    found, depth = [], 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        depth += (token.type == _START) - (token.type == _END)
        if depth == 0 and (token.type in COUNTED or token.type == _END):
            found.append(token.string)
    return found


def sizes() -> dict[str, int]:
    """Tokens of every module."""
    return {name: len(words(path.read_text())) for name, path in source.modules().items()}


def former(commit: str) -> dict[Path, str]:
    """Each file of today that the packages had at ``commit``, by git perhaps under another name -> its text
    then."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ("git", *arguments), cwd=source.ROOT, check=True, capture_output=True, text=True
        ).stdout

    then = {path: path for path in git("ls-tree", "-r", "--name-only", commit, *FOLDERS).split()}
    for line in git("diff", "--name-status", "--diff-filter=R", "-M40", commit, "--", *FOLDERS).splitlines():
        _, before, after = line.split("\t")
        then[after] = then.pop(before)
    found = {source.ROOT / after: before for after, before in then.items() if after.endswith(".py")}
    return {path: git("show", f"{commit}:{before}") for path, before in found.items() if path.exists()}


def since(commit: str) -> None:
    """Print what the files of ``commit`` hold today, and which parts are newer."""
    then, newer = former(commit), collections.Counter[str]()
    before = today = kept = 0
    for name, path in source.modules().items():
        now = words(path.read_text())
        if path not in then:
            newer[part(name)] += len(now)
            continue
        old = words(then[path])
        same = difflib.SequenceMatcher(None, old, now, autojunk=False).get_matching_blocks()
        before, today, kept = before + len(old), today + len(now), kept + sum(b.size for b in same)
    print(f"{commit}: {before:,} tokens in {len(then)} files that there still are")
    print(f"today: {today:,} in these files, {kept:,} of them from then; {newer.total():,} in newer files:")
    for name, count in newer.most_common(20):
        print(f"{count:>8,} {name}")


def part(name: str) -> str:
    """Returns the package that a module is counted with."""
    return ".".join(name.split(".")[: 3 if name.startswith("fp8kit.backends.") else 2])


def main() -> None:
    """Print the sum, and the parts."""
    arguments = argparse.ArgumentParser(description=main.__doc__)
    arguments.add_argument("--since", metavar="COMMIT", help="compare with the tree of this commit")
    commit = arguments.parse_args().since
    if commit is not None:
        return since(commit)
    parts: collections.Counter[str] = collections.Counter()
    found = sizes()
    for name, count in found.items():
        parts[part(name)] += count
    lines = sum(path.read_text().count("\n") for path in source.modules().values())
    print(f"{sum(found.values()):,} tokens, {lines:,} lines, {len(found)} files")
    for name, count in parts.most_common(20):
        print(f"{count:>8,} {name}")


if __name__ == "__main__":
    main()
