"""The parts ``model``, ``attention``, ``shapes`` and ``soak``, in small on the CPU."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import attention, model, shapes, soak, targets, torch_cases
from fp8kit.arrays import CPU
from fp8kit.backends.cuda import attention as engine
from fp8kit.bench.report import NO_TIME, Setting
from fp8kit.bench.sizes import SMALL

QUICK = Setting(CPU, SMALL, 1, 1, 1)
LATE = replace(QUICK, deadline=0.0)


def by_case(rows):
    return {row["case"]: row for row in rows}


@pytest.mark.combinations
def test_a_model_converted_and_eager():
    cases = {case: model.CASES[case] for case in (targets.EAGER, targets.TORCH)}
    rows = by_case(model.model_part(QUICK, cases))
    assert [row["status"] for row in rows.values()] == ["ok"] * 2
    assert 0.02 < rows[targets.TORCH]["error_y"] < 0.2
    assert rows[targets.TORCH]["ratio"] > 0
    assert {row["status"] for row in model.model_part(LATE)} == {NO_TIME}


@pytest.mark.programs
def test_a_model_in_every_way():
    """Compiled, a model is as exact as eager: Inductor takes no part here, and kernels for attention with and
    without a mask round alike."""
    rows = by_case(model.model_part(QUICK))
    assert list(rows) == list(model.CASES)
    assert {row["status"] for row in rows.values()} == {"ok"}
    for case, row in rows.items():
        own = case.removesuffix(model.NO_MASK)
        own = targets.EAGER if own == targets.COMPILED else own.removesuffix(", torch.compile")
        assert row["error_dx"] == pytest.approx(rows[own]["error_dx"], rel=0.1)
        assert row.get("detail", "").endswith("eager step") == (own != case)


def test_what_a_model_may_be_wrong_by():
    """A gradient of zeros is wrong, and so are values of nothing."""
    for case in model.CASES:
        fine = {"error_y": 0.004, "error_dx": 0.006}
        assert model.verdict(case, model.LARGE, fine) == "ok"
        for name, wrong in (("error_y", 1.0), ("error_dx", 1.0), ("error_y", float("nan"))):
            assert model.verdict(case, model.LARGE, fine | {name: wrong}).startswith("WRONG")


def test_attention_over_sizes():
    rows = [row for about in attention.SMALL for row in attention._measure(about, QUICK)]
    ours = [row for row in rows if row["case"].startswith("fp8kit")]
    assert len(ours) == 2 * len(attention.SMALL)
    assert all(row["status"] == "ok" and 0 < row["error"] < 2**-6 for row in ours)
    flash = [row for row in rows if row["case"].startswith(attention.FLASH)]
    assert all(row["status"] == "ok" and row["gpu_ms"] > 0 for row in flash)
    late = [row for row in attention.attention_part(LATE) if row["workload"].startswith("head_dim")]
    assert [row["status"] for row in late] == [NO_TIME] * len(attention.SMALL)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("about", attention.SMALL, ids=str)
def test_flexattention_has_the_same_values(about):
    given = attention.Operands(about, CPU)
    qkv = [given.torch(view) for view in (given.q, given.k, given.v)]
    o = attention.flexed(about, torch.device("cpu"), compiled=False)(*qkv)[0, 0].float()
    exact = given.exact()[0]
    assert float((o - exact).norm() / exact.norm()) < 2**-6


def test_the_sizes_of_the_target_are_measured():
    """By the names of their rows; only those of the grid count."""
    rows = [
        {"workload": str(about), "case": f"{path}, {direction}", "status": "ok", "gpu_ms": time}
        for about in (*attention.GRID, *attention.OTHERS)
        for direction in attention.DIRECTIONS
        for path, time in (
            (targets.LIBRARY, 1.0),
            (targets.OWN_KERNEL, 1.25 if about in attention.GRID else 9.0),
        )
    ]
    report = targets.Report({}, {"attention": {"status": "ok", "seconds": 1.0, "rows": rows}})
    assert len(attention.GRID) == 10
    assert targets.attention_speed(report) == pytest.approx(0.8)


def test_lengths_and_an_attention_without_cudnn():
    rows = shapes.shapes_part(QUICK)
    assert all(row["status"] == "ok" and row["value"] > 0 for row in rows)
    assert {row["case"].rpartition(",")[0] for row in rows} >= {targets.TORCH, targets.MISSING, targets.FLASH}
    assert {row["status"] for row in shapes.shapes_part(LATE)} == {NO_TIME}


def test_without_cudnn_attention_is_our_own(monkeypatch):
    """The policy's implementations are the engine's, told to leave cuDNN out."""
    asked = []
    monkeypatch.setattr(engine, "_path", lambda *choice: asked.append(choice[-1]) or engine.flash)
    monkeypatch.setattr(engine.flash, "forward", lambda *call: None)
    monkeypatch.setattr(engine.flash, "workspace", lambda *call: 7)
    monkeypatch.setattr(engine, "_say_slow", lambda *call: None)
    monkeypatch.setattr(
        engine.launch, "runtime", lambda: type("Runtime", (), {"getDevice": lambda self: 0})()
    )
    given = attention.Operands(attention.SMALL[0], CPU)
    own = dict(torch_cases.without_cudnn().overrides)
    assert {impl.devices for impl in own.values()} == {frozenset({"cuda"})}
    shapes_of = [view.shape for view in (given.q, given.k, given.v)]
    steps = [view.strides for view in (given.q, given.k, given.v)]
    space = own["attention_workspace"].fn(*shapes_of, None, given.q.dtype, given.spec, False, False, steps)
    call = given.q, given.k, given.v, given.o, given.lse, given.extras, given.spec, given.space(space), 0
    own["attention_fwd"].fn(*call)
    engine.attention_fwd(*call)
    assert asked == [False, False, True]


@pytest.mark.combinations
def test_a_soak_in_small(tmp_path):
    rows = by_case(soak.soak_part(replace(QUICK, out=tmp_path)))
    assert list(rows) == ["process", "caches", "a step"]
    assert {row["status"] for row in rows.values()} == {"ok"}
    made = json.loads((tmp_path / soak.FILE).read_text())
    assert len(made["memory"]["process"]) == 2 * soak.TINY.lengths
    half, end = (made["caches"][when]["plans"] for when in ("half", "end"))
    assert half["misses"] >= soak.TINY.lengths  # a plan a length, and none in the second half
    assert half["misses"] == end["misses"]
    assert soak.soak_part(LATE)[0]["status"].startswith(NO_TIME)


def test_the_visits_of_a_soak():
    lengths = soak.visits(soak.LARGE, 0)
    assert len(lengths) == 2000
    assert sorted(lengths[:1000]) == sorted(lengths[1000:]) == list(range(50, 2050, 2))
    assert lengths[0] == 2048
    assert all(length * soak.LARGE.batch % 16 == 0 for length in lengths)
    assert lengths == soak.visits(soak.LARGE, 0)


@pytest.mark.parametrize(
    ("series", "fine"),
    [
        ([100] * 8, True),
        ([100, 100, 100, 100, 104, 104, 105, 105], True),
        ([50, 100, 100, 100, 100, 100, 100, 100], True),  # before the warm-up's end anything may be
        ([100, 100, 100, 100, 100, 100, 100, 106], False),
        ([100, 100, 110, 100, 100, 100, 100, 100], False),
    ],
)
def test_what_flat_memory_is(series, fine):
    size = soak.Size(32, 2, 8, 4, 6, 2)
    bytes_ = [value * soak.MIB for value in series]
    assert (soak.verdict("device", bytes_, size) == "ok") == fine
    if not fine:
        assert soak.verdict("device", bytes_, size).startswith("WRONG: ")


def test_caches_that_are_too_small():
    full = {"size": 4, "limit": 4, "hits": 0, "misses": 9}
    roomy = {"size": 3, "limit": 4, "hits": 0, "misses": 9}
    more = {"misses": 12}
    before = {"a": full, "b": full, "c": roomy} | dict.fromkeys(soak.MAKE, roomy)
    after = before | {"a": full | more, "c": roomy | more, "plans": roomy | more}
    assert soak.too_small(before, after) == ["a"]
    assert soak.made_again(before, after) == {"plans": 3}
    rows = by_case(soak._rows("w", soak.TINY, {}, before, after, 1.0))
    assert rows["caches"]["status"] == "WRONG: a is too small; plans made 3 entries again"


def test_the_device_of_a_soak_is_asked(monkeypatch):
    """What is read on a GPU, by stand-ins."""
    from fp8kit.backends.cuda import device

    pool = type("Pool", (), {"used_bytes": lambda self: 3, "total_bytes": lambda self: 5})()
    cupy = type("Cupy", (), {"get_default_memory_pool": lambda self: pool})()
    monkeypatch.setattr(device, "cupy", lambda: cupy)
    for name, value in (("memory_allocated", 10), ("memory_reserved", 20), ("mem_get_info", (1, 100))):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    found = soak.memory(torch.device("cuda", 0))
    assert found.pop("process") > 2**20
    assert found == {"used": 13, "held by torch": 20, "held by CuPy": 5, "device": 99}


def test_a_soak_finds_growth_and_forgives_what_is_given_back():
    size, flat = soak.TINY, [100 * soak.MIB] * (2 * soak.TINY.lengths)
    briefly = [held * (2 if i % 3 == 1 else 1) for i, held in enumerate(flat)]
    leak = [held + i * soak.MIB for i, held in enumerate(flat)]
    late = [held * (2 if i >= size.lengths else 1) for i, held in enumerate(flat)]
    assert soak.verdict("used", flat, size) == soak.verdict("used", briefly, size) == "ok"
    assert soak.verdict("device", briefly, size).startswith("WRONG: 100.0 MiB more than after step 4")
    for name in ("used", "device"):
        assert soak.verdict(name, leak, size).startswith("WRONG")
        assert "100.0 of them in the second half" in soak.verdict(name, late, size)
