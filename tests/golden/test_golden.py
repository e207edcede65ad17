"""The cases whose bits do not depend on the machine give the hashes of ``hashes_cpu.json``.

Those are the cases named ``exact``: codes and scales of casts, FP8 state, random bits, and modules on small
whole numbers. Elsewhere the reference engine's bits depend on the processor and on versions: NumPy's OpenBLAS
sums a product in an order of its own for each kind of processor, Numba contracts the exponential's
multiplications and additions where there is an instruction for both, sines and logarithms are the C
library's, XLA's or torch's. A sum of small whole numbers is exact in float32, so that its order does not
matter, and so is one of the FP8 codes that stand for them; norms of rows of 1 and -1 are exact too, and
scores that lie far apart make each row of a softmax a 1 and zeros. For all of these cases the same bits came
out of a run with every vector instruction beyond SSE2 or SSE4 switched off, in OpenBLAS, NumPy, Numba, XLA,
torch and the C library.

To write the file anew, where results are meant to change::

    python -m tests.golden --exact --write tests/golden/hashes_cpu.json
"""

from __future__ import annotations

import fnmatch
import json
import os
from pathlib import Path

import pytest

from tests.golden import log
from tests.golden.cases import CASES
from tests.golden.command import FRONTENDS, differences, main, read, run, selected

FILE = Path(__file__).with_name("hashes_cpu.json")
EXACT = [case for case in selected("cpu") if case.exact]
GROUPS = list(dict.fromkeys((case.frontend, case.program) for case in EXACT))


@pytest.mark.parametrize(("frontend", "program"), GROUPS, ids=["/".join(group) for group in GROUPS])
def test_the_same_bits_on_every_machine(frontend, program):
    cases = [case for case in EXACT if (case.frontend, case.program) == (frontend, program)]
    lines = differences(read(FILE)[1], run(cases, "cpu"))
    assert not lines, "\n".join(lines)


def test_the_file_holds_no_other_case():
    assert set(read(FILE)[1]) == {case.name for case in EXACT}


def test_every_frontend_has_cases_of_its_own_recipes():
    found = {(case.frontend, case.recipe) for case in EXACT}
    assert found >= {
        (name, recipe) for name in FRONTENDS for recipe in ("none", "delayed", "current", "block")
    }


def test_the_command_says_what_differs(tmp_path, capsys, monkeypatch):
    for name in ("XLA_FLAGS", "JAX_PLATFORMS"):  # which the command sets where nobody has
        monkeypatch.setenv(name, os.environ.get(name, ""))
    file, asked = tmp_path / "hashes.json", ["--case", "native/steps/LayerNorm.exact/*"]
    assert main(["--write", str(file), *asked]) == 0
    assert main(["--compare", str(file), *asked]) == 0
    assert "no difference" in capsys.readouterr().out
    (before,) = {
        value for hashes in read(file)[1].values() for name, value in hashes.items() if name == "1.y"
    }
    file.write_text(file.read_text().replace(before, "0" * 16))
    assert main(["--compare", str(file), *asked]) == 1
    assert f"1.y: {'0' * 16} -> {before}" in capsys.readouterr().out


def test_a_case_that_fails_is_a_result(capsys):
    (case,) = [case for case in EXACT if case.name == "native/steps/LayerNorm.exact/none/float32/exact"]
    broken = case._replace(what="no such layer")
    assert run([broken, case], "cpu")[broken.name] == {"error": "KeyError"}
    assert "KeyError" in capsys.readouterr().err


THEN, NOW = {"commit": "then", "numpy": "2"}, {"commit": "now", "numpy": "3"}
EXPLAINED = "torch/unpermuted/none/float32"


@pytest.mark.parametrize(
    ("before", "after", "well", "said"),
    [
        ({"0.y": "a"}, {"0.y": "a"}, True, "0 cases on one side alone, 0 failed, 0 arrays differ"),
        ({"0.y": "a"}, {"0.y": "b"}, False, "0.y: a -> b\n  why is not known"),
        ({"0.y": "a"}, {}, False, "0.y: a -> missing\n  why is not known"),
        ({"0.d.probs": "a"}, {"0.d.probs": "b"}, True, "0.d.probs: a -> b\n  a float32 sum"),
        ({"error": "E"}, {"error": "E"}, False, "2 failed"),
    ],
)
def test_the_log_says_what_differs_and_why(before, after, well, said):
    text, found = log.text(THEN, NOW, {EXPLAINED: before}, {EXPLAINED: after})
    assert found is well
    assert said in text
    assert "numpy 2 then 3" in text
    assert f"torch: 1 cases, {len(after)} arrays" in text


def test_the_log_counts_cases_of_one_side_alone():
    text, well = log.text(THEN, NOW, {EXPLAINED: {"0.y": "a"}}, {})
    assert not well
    assert f"1 cases on one side alone, 0 failed, 0 arrays differ\n{EXPLAINED}" in text


def test_parts_of_unlike_runs_are_not_joined(tmp_path):
    files = [tmp_path / name for name in ("one.json", "two.json")]
    for file, about in zip(files, (THEN, NOW), strict=True):
        file.write_text(json.dumps({"about": about, "cases": {file.stem: {}}}))
    assert log.joined([files[0]]) == (THEN, {"one": {}})
    with pytest.raises(ValueError, match="not alike"):
        log.joined(files)


def test_every_reason_is_of_a_case():
    for pattern, _ in log.REASONS:
        assert fnmatch.filter([case.name for case in CASES], pattern), pattern
