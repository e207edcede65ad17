"""Statistics of several ranks of the native frontend."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import fp8kit as fk
from fp8kit.collectives import FakeCollectives
from fp8kit.errors import ArgumentError
from fp8kit.numerics import Operand, collect, merge, request, tensor_statistics, values
from fp8kit.numerics.gathering import gathering
from fp8kit.numerics.shown import Shown
from fp8kit.recipes import NAMED
from tests.support.inspected import W3, G, Native, X, by_name, logged, section
from tests.support.inspecting_rank import PARTS, STATS, Parts
from tests.support.source import ROOT


def test_records_of_all_ranks():
    """Each rank has those of all, in their order, also where one has others or none: ranks are threads."""
    operand = Operand("activation", NAMED["mxfp8"].recipe.quantization)
    needs = [
        request(["std", "exponents"], "gradient"),
        request(["sqnr", "mxfp4_mse", "crest_factor"], operand),
    ]
    parts = np.split(X, 4)

    def records(rank):
        keys = ("a.fc1", "gradient", needs[0].spec), ("ö", "activation", needs[1].spec)
        made = [collect(parts[rank], each).numpy() for each in needs]
        return dict(list(zip(keys, made, strict=True))[: (2, 1, 0, 2)[rank]])

    found = FakeCollectives(4).run(lambda ranks: gathering(ranks)(records(ranks.rank)))
    for got in found:
        for rank, own in enumerate(got):
            want = records(rank)
            assert own.keys() == want.keys()
            assert all(np.array_equal(own[key], value) for key, value in want.items())
    (key,) = found[0][1]
    total = found[0][0][key]
    for rank in (1, 3):
        total = merge(needs[0], total, found[0][rank][key])
    whole = np.concatenate([parts[rank] for rank in (0, 1, 3)]).astype(np.float64)
    assert values(needs[0], total)["std"] == pytest.approx(np.std(whole), rel=1e-6)


def test_what_is_no_group():
    assert gathering(None) is None
    with pytest.raises(ArgumentError, match=r"group: got 'world', expected None, or a group of ranks"):
        fk.inspect(Native(), None, group="world")


def test_a_step_without_weights_waits_for_no_device(monkeypatch):
    """Nor for other ranks, also where a layer has a part of its weight."""
    monkeypatch.setattr(Shown, "fetch", lambda self, blocks: False)  # as on a GPU
    parts, written = Parts(FakeCollectives(2).ranks[0]), []
    config = section(logged(["max"], ["activation"]))
    with fk.inspect(parts, config, sinks=lambda rows: written.append(rows[0]["step"])) as log:
        for known in ([], [0]):
            parts.column(fk.tensor(X))
            log.step()
            assert written == known
    assert written == [0, 1]


def test_parts_by_themselves_from_now_on():
    """As ``set_weight_tensor_tp_group_reduce(False)`` asks for in the middle of a training."""
    parts = Parts(FakeCollectives(2).ranks[0])
    with fk.inspect(parts, section(logged(["max"], ["weight"]))) as log:
        parts.column(fk.tensor(X))
        log.gather_parts = None
        log.step()
        (row,) = log.rows()
    assert row["value"] == np.split(W3, 2)[0].max()


def read(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.programs
def test_two_processes(tmp_path):
    """Two micro-batches on each of two ranks are one tensor, and a weight is there once. Of a weight that
    both have parts of, the statistics are the whole one's, or each part's."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "adapters"), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "FP8KIT_DEVICE": "cpu"}
    words = [sys.executable, "-m", "fp8kit", "launch", "-n", "2", "-m", "tests.support.inspecting_rank"]
    done = subprocess.run(
        [*words, str(tmp_path / "rows")], cwd=ROOT, env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    rows = [read(tmp_path / f"rows.{rank}.jsonl") for rank in range(2)]
    assert rows[0] == rows[1]
    found = by_name(rows[0])
    g, w = G.astype(np.float64), np.abs(W3.astype(np.float64))
    assert found["out", "gradient", "std"] == pytest.approx(np.std(g), rel=1e-6)
    assert found["out", "gradient", "l1_norm"] == pytest.approx(np.abs(g).sum(), rel=1e-6)
    assert sum(found["out", "gradient", "exponents"]) == G.size
    assert found["out", "weight", "l1_norm"] == pytest.approx(w.sum(), rel=1e-6)
    for whole in (True, False):
        parts = [read(tmp_path / f"rows.{whole}.{rank}.jsonl") for rank in range(2)]
        assert (parts[0] == parts[1]) == whole
        for mode, dim in PARTS.items():
            for rank, rows in enumerate(parts):
                weight = W3 if whole else np.array_split(W3, 2, dim)[rank]
                want = tensor_statistics(weight, STATS, tensor="weight")
                for step in range(2):
                    got = by_name([row for row in rows if row["step"] == step])
                    for stat, value in want.items():
                        exact = isinstance(value, list) or stat in ("max", "mxfp8_underflows%")
                        assert got[mode, "weight", stat] == (value if exact else pytest.approx(value, 1e-12))
