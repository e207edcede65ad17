"""A comparison of written hashes as a short text: how many cases and arrays, what differs and why.

``python -m tests.golden.log BEFORE.json... --after AFTER.json...``: files that ``--write`` wrote, each side
in as many parts as it was run in. Exits with 1 where an array differs and ``REASONS`` does not say why, where
a case is on one side alone, and where one failed.
"""

from __future__ import annotations

import argparse
import textwrap
from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from tests.golden.cases import CASES, Case
from tests.golden.command import FRONTENDS, Hashes, differences, read
from tests.golden.wide import WIDE

# case and array, and why it is not what a9ea2fa9 gave, the last commit before one executor and one layer
# library for all frontends
REASONS = {
    ("torch/unpermuted/*", "0.d.probs"): "a float32 sum over a row, by torch then, in another order by the "
    "kernel unpermute_probs since a9261e47 (CHANGELOG: te.moe_* run on the operations)"
}
_COLUMNS = 110


def joined(files: Iterable[Path]) -> tuple[dict[str, str], Hashes]:
    """What is known of the runs, and the hashes of all. ValueError where the runs are not of one commit and
    one machine."""
    abouts, hashes = zip(*map(read, files), strict=True)
    if any(about != abouts[0] for about in abouts):
        raise ValueError(f"runs that are not alike: {abouts}")
    return abouts[0], {name: own for part in hashes for name, own in part.items()}


def why(line: str) -> str | None:
    """Why a line of ``differences`` is there, None where that is not known."""
    case, array, *_ = line.split(": ")
    found = [
        reason
        for (cases, arrays), reason in REASONS.items()
        if fnmatchcase(case, cases) and fnmatchcase(array, arrays)
    ]
    return found[0] if found else None


def _counted(title: str, names: Iterable[str]) -> str:
    counts = ", ".join(f"{name} {count}" for name, count in Counter(names).items())
    return textwrap.fill(f"  {title}: {counts}", _COLUMNS, subsequent_indent="    ")


def text(before: dict[str, str], after: dict[str, str], want: Hashes, got: Hashes) -> tuple[str, bool]:
    """The log, and whether all is well."""
    sides = (("before", before), ("after", after))
    lines = [textwrap.fill(f"{side}: {run['commit']}", _COLUMNS) for side, run in sides]
    about = ", ".join(
        f"{name} {value}" if value == before[name] else f"{name} {before[name]} then {value}"
        for name, value in after.items()
        if name != "commit"
    )
    lines.append(textwrap.fill(about, _COLUMNS, break_on_hyphens=False))
    known = {case.name: case for case in (*CASES, *WIDE)}
    for frontend in FRONTENDS:
        cases: list[Case] = [known[name] for name in got if known[name].frontend == frontend]
        arrays = sum(len(got[case.name]) for case in cases)
        lines.append(f"{frontend}: {len(cases)} cases, {arrays} arrays")
        lines.append(_counted("programs", (case.program for case in cases)))
        lines.append(_counted("recipes", (case.recipe for case in cases)))
        lines.append(_counted("dtypes", (case.dtype for case in cases)))
        lines.append(_counted("of what", (case.what.partition(".")[0] for case in cases if case.what)))
    missing = sorted(set(want) ^ set(got))
    failed = sorted(name for hashes in (want, got) for name, own in hashes.items() if "error" in own)
    different = [] if missing else differences(want, got)
    lines.append(
        f"{len(missing)} cases on one side alone, {len(failed)} failed, {len(different)} arrays differ"
    )
    lines += [*missing, *failed]
    for line in different:
        lines += [
            line,
            textwrap.fill(f"  {why(line) or 'why is not known'}", _COLUMNS, subsequent_indent="  "),
        ]
    return "\n".join(lines), not missing and not failed and all(map(why, different))


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden.log", description=__doc__)
    parser.add_argument("before", nargs="+", type=Path)
    parser.add_argument("--after", nargs="+", type=Path, required=True)
    options = parser.parse_args()
    (before, want), (after, got) = joined(options.before), joined(options.after)
    said, well = text(before, after, want, got)
    print(said)
    return int(not well)


if __name__ == "__main__":
    raise SystemExit(main())
