"""Products, attention, the skeleton, the ledger, the break-even grid, the start and the pictures, in
small."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import fp8kit as fk
from fp8kit.arrays import CPU, Device
from fp8kit.backends import dispatch
from fp8kit.bench import breakeven, gemms, layers, memory, plots, problem, skeleton, start
from fp8kit.bench.casts import casts_part
from fp8kit.bench.parts import NATIVE
from fp8kit.bench.problem import native
from fp8kit.bench.report import NO_TIME, Report, Setting
from fp8kit.bench.sizes import FULL, SMALL, Layer
from fp8kit.errors import Fp8kitError

QUICK = Setting(CPU, SMALL, 1, 1, 1)


# --- products -----------------------------------------------------------------------------------------------


def test_twelve_products():
    """Their operations are 3 * 2 * tokens * parameters of the four matrices: 9.9e12 at hidden 4096."""
    found = gemms.products(FULL.large)
    assert len({product.name for product in found}) == 12
    assert sum(product.flops for product in found) == 3 * 2 * 8192 * 12 * 4096**2
    assert [product.fast for product in found] == [True] * 4 + [False] * 8


def test_products_are_checked_against_float64():
    product = gemms.products(SMALL.large)[5]
    (row,) = gemms.measure(product, QUICK)
    assert row["status"] == "ok"
    assert 0 < row["error"] < gemms.BOUND
    own = dispatch.kernels(CPU)

    def wrong(*given):
        own.fp8_gemm(*given)
        given[2].numpy()[3, 3] *= 2

    def partly(*given):
        own.fp8_gemm(*given)
        given[2].numpy()[-1, -1] = np.nan

    for ruined, said in ((wrong, "WRONG: error 0."), (partly, "WRONG: error nan")):
        (row,) = gemms.measure(product, QUICK, kernels=SimpleNamespace(**{**vars(own), "fp8_gemm": ruined}))
        assert row["status"].startswith(said)


def test_peers_that_fail_are_reported():
    def failing():
        raise RuntimeError("refused")

    rows = gemms.measure(gemms.products(SMALL.large)[0], QUICK, lambda given: {"theirs": failing})
    assert [(row["case"], row["status"]) for row in rows] == [
        (gemms.OURS, "ok"),
        ("theirs", "failed: RuntimeError: refused"),
    ]


# --- the skeleton and attention -----------------------------------------------------------------------------


def test_the_skeleton_does_everything_once(monkeypatch):
    """With products and copies that only tell their names: twelve, a copy for each pass, attention both
    ways."""
    done = []
    monkeypatch.setattr(skeleton, "operands", lambda product, device, kernels: product)
    monkeypatch.setattr(skeleton, "fastest", lambda product, fast: lambda: done.append(product.name))
    monkeypatch.setattr(skeleton, "copier", lambda device, nbytes: lambda: done.append(nbytes))
    for name in ("forward", "backward"):
        monkeypatch.setattr(skeleton.AttentionRun, name, lambda self, name=name: done.append(name))
    step = skeleton.skeleton(SMALL.large, QUICK)
    done.clear()
    step()
    names = [item for item in done if isinstance(item, str)]
    passes = [(case.nbytes, case.uses + case.within) for case in skeleton.kernel_cases(SMALL.large)]
    products = [product.name for product in gemms.products(SMALL.large)]
    assert names == [*products[:4], "forward", "backward", *products[4:]]
    assert sum(item for item in done if not isinstance(item, str)) == sum(
        size * uses for size, uses in passes
    )
    assert len(done) == 14 + sum(uses for _, uses in passes)


def test_attention_is_checked(monkeypatch):
    rows = skeleton.attention_part(QUICK)
    assert len(rows) == 2 * len(SMALL.layers)
    assert {row["status"] for row in rows} == {"ok"}
    monkeypatch.setattr(skeleton.AttentionRun, "backward", lambda self: None)
    assert {row["status"] for row in skeleton.attention_part(QUICK) if "backward" in row["case"]} == {
        "WRONG: error nan"
    }


def test_attention_peers_that_fail_are_reported():
    def failing():
        raise RuntimeError("declined")

    found = {
        row["case"]: row["status"]
        for row in skeleton.attention_part(QUICK, lambda run: {"theirs": (failing, failing)})
    }
    assert found["theirs, forward"] == found["theirs, backward"] == "failed: RuntimeError: declined"
    assert found["fp8kit native, forward"] == "ok"


# --- memory -------------------------------------------------------------------------------------------------


def test_the_ledger_by_hand():
    """Of an FP8 layer with delayed scaling, M tokens: codes of four inputs and weights, x, qkv, o, the second
    norm's x, h."""
    size = Layer(32, 64, 2, 16, 2)
    rows = memory.ledger(size, CPU)
    m, h, f = 32, 32, 64
    found = {row["case"]: row["mib"] * 2**20 for row in rows}
    assert found["norm_linear 1: x_qt"] == m * h
    assert found["norm_linear 1: w_qt"] == 3 * h * h
    assert found["attention 1: qkv"] == m * 3 * h * 2
    assert found["norm_mlp 1: h"] == m * f * 2
    assert found["sum: weight, FP8 copy"] == 4 * h * h + 2 * h * f
    assert found["sum: activation, FP8"] == m * (h + h + h + f)
    assert found["sum: activation"] == m * (h + 3 * h + h + h + f) * 2
    assert found["parameters"] == (4 * h * h + 2 * h * f + 9 * h + f) * 2
    assert found["peak of the step"] > found["sum: kept for backward, parameters aside"]
    assert memory.ledger(size, CPU, "bf16")[0]["detail"] == "bfloat16[32, 32]"
    with pytest.raises(Fp8kitError, match="expected one of bf16"):
        memory.ledger(size, CPU, "int8")


def test_nothing_is_kept_where_no_gradient_is_wanted():
    with fk.no_grad():
        assert memory.kept_tensors(fk.nn.Linear(4, 4, device="cpu")(np.ones((2, 4), np.float32))) == []


def test_the_peak_is_what_a_step_allocates():
    peak = memory.Peak(CPU)
    assert peak.bytes(lambda: np.ones(1 << 20, np.uint8)) == pytest.approx(1 << 20, rel=0.01)


@pytest.mark.gpu
def test_the_peak_on_a_gpu():
    """An fp8kit array of 5 MiB, beyond 2 MiB that were taken after the object was made."""
    from fp8kit import arrays, formats

    device = Device("cuda")
    peak = memory.Peak(device)
    kept = arrays.empty((2 << 20,), formats.uint8, device)
    assert peak.bytes(lambda: arrays.empty((5 << 20,), formats.uint8, device)) / 2**20 == pytest.approx(
        7, abs=1
    )
    assert kept.size == 2 << 20


# --- break-even ---------------------------------------------------------------------------------------------


def cells(ratios, case="ours"):
    return [{"hidden": h, "tokens": t, "case": case, "ratio": r} for (h, t), r in ratios.items()]


def test_from_where_on_it_pays():
    rows = cells(
        {(1, 16): 0.9, (1, 32): 1.1, (1, 64): 0.8, (1, 128): 0.7, (2, 16): 0.5, (2, 32): 0.4, (3, 16): 2.0}
    )
    assert breakeven.curve(rows, "ours") == {1: 64, 2: 16, 3: None}
    assert plots.pays(rows, "ours") == "64 at 1, 16 at 2"
    assert plots.pays(cells({(3, 16): 2.0}), "ours") == "nowhere"


def test_graphs_are_compared_with_graphs():
    rows = [
        {"case": "plain", "gpu_ms": 4.0},
        {"case": "FP8", "gpu_ms": 8.0},
        {"case": "absent"},
        {"case": "plain, graph", "gpu_ms": 2.0},
        {"case": "FP8, graph", "gpu_ms": 1.0},
    ]
    breakeven.compare(rows)
    assert [row.get("ratio") for row in rows] == [1, 2, None, 1, 0.5]


def test_the_grid_runs_and_is_checked():
    def wrong(problem):
        running = native(problem, None)
        results = running.results
        running.results = lambda: tuple(np.zeros_like(a) for a in results())
        return running

    setting = Setting(CPU, SMALL, 1, 1, 0)
    rows = breakeven.breakeven_part(
        setting, lambda problem, modules: {"plain": lambda p: native(p, None), "wrong": wrong}
    )
    assert len(rows) == 2 * len(SMALL.hidden) * len(SMALL.tokens)
    assert all(row["status"] == "ok" and row["ratio"] == 1 for row in rows if row["case"] == "plain")
    assert all(row["status"].startswith("WRONG") for row in rows if row["case"] == "wrong")


def test_modules_are_kept_over_token_counts():
    kept, made = problem.Modules(), []
    for sizes in ((1, 2), (1, 2), (3, 4), (1, 2)):
        given = problem.Problem("Linear", sizes, 4, 1, CPU)
        assert kept.of(given, "a", lambda sizes=sizes: made.append(sizes) or sizes) == sizes
    assert made == [(1, 2), (3, 4), (1, 2)]


def test_the_grid_stops_in_time():
    rows = breakeven.breakeven_part(Setting(CPU, SMALL).within(-1))
    assert {row["status"] for row in rows} == {"left out: no time"}
    assert [(row["hidden"], row["tokens"]) for row in rows] == [
        (h, t) for h in SMALL.hidden for t in SMALL.tokens
    ]


def test_a_long_round_is_not_repeated():
    """Half of a cell's seconds is for timing: 0.5 here, of rounds that take at least 2 calls of 0.2 seconds:
    one."""
    calls = []
    import time

    times = breakeven._timed(
        {"slow": lambda: (calls.append(1), time.sleep(0.2))}, Setting(CPU, SMALL, 6, 1, 1), 1.0
    )
    assert len(calls) == 3 + 2
    assert times["slow"][0] >= 0.2


# --- training steps -----------------------------------------------------------------------------------------


def test_steps():
    rows = layers.steps_part(QUICK)
    assert len(rows) == 4 * len(SMALL.layers)
    assert {(row["status"], row["check"]) for row in rows} == {("ok", "finite parameters")}
    assert all(row["ratio"] > 0 and row["gpu_ms"] > 0 for row in rows)
    assert {row["status"] for row in layers.steps_part(QUICK.within(-1))} == {"left out: no time"}


# --- the start, casts, pictures -----------------------------------------------------------------------------


@pytest.mark.combinations
def test_a_fresh_process_takes_its_first_step(tmp_path):
    """The child reports each stage; its kernel cache is the folder given."""
    stages = start.first_step(Layer(16, 32, 1, 4, 1), CPU, _shared_cache())
    assert tuple(stages) == start.STAGES
    assert all(seconds >= 0 for seconds in stages.values())


def _shared_cache():
    from fp8kit import settings

    return str(settings.cache_dir())


@pytest.mark.combinations
def test_a_child_that_fails_says_why(tmp_path):
    with pytest.raises(RuntimeError, match=r"the child failed: .*heads"):
        start.first_step(Layer(16, 32, 3, 4, 1), CPU, _shared_cache())


def test_starts_share_one_cache_and_the_last_has_its_own(monkeypatch):
    asked = []

    def child(layer, device, cache, warm):
        asked.append((cache[-1], warm))
        return dict(zip(start.STAGES, (1.0, 2.0, 3.0, 4.0, 99.0), strict=True))

    monkeypatch.setattr(start, "first_step", child)
    rows = start.start_part(QUICK)
    assert asked == [("a", False), ("a", False), ("b", True)]
    assert [row["seconds"] for row in rows] == [10.0] * 3
    assert {row["check"] for row in rows} == {"finite gradients"}


LIMITED = (
    "casts",
    "layer",
    "steps",
    "modules",
    "attention",
    "kernels",
    "gemm",
    "start",
    "memory",
    "breakeven",
)


@pytest.mark.parametrize("name", LIMITED)
def test_parts_begin_nothing_after_the_deadline(name):
    (part,) = (part for part in NATIVE if part.name == name)
    rows = part.run(QUICK.within(-1))
    assert {row["status"] for row in rows} <= {NO_TIME, "left out: a kernel has no time"}
    assert NO_TIME in {row["status"] for row in rows}


def test_casts_are_ml_dtypes():
    rows = casts_part(QUICK)
    assert [row["check"] for row in rows] == ["ml_dtypes' bits", "", "ml_dtypes' bits", ""] * 2
    assert {row["status"] for row in rows} == {"ok"}


def test_pictures(tmp_path):
    kernel = {"case": "k", "tbps": 3.0, "ceiling_tbps": 4.0, "gpu_ms": 1.0, "workload": "w", "status": "ok"}
    gemm = [
        {"case": case, "product": "p", "tflops": rate, "gpu_ms": 1.0}
        for case, rate in ((gemms.OURS, 1.0), (gemms.BEST, 2.0))
    ]
    grid = [
        {"case": case, "hidden": h, "tokens": t, "ratio": 0.5 + t / 64}
        for case in ("bf16", "FP8")
        for h in (1, 2)
        for t in (16, 32)
    ]
    parts = {"kernels": [kernel], "gemm": gemm, "breakeven": grid}
    report = Report({"machine": "m"}, {name: {"rows": rows, "status": "ok"} for name, rows in parts.items()})
    made = plots.draw(report, tmp_path)
    assert [path.name for path in made] == ["roofline.png", "breakeven.png"]
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in made)
    assert plots.draw(Report(), tmp_path) == []
    only = {"gemm": {"rows": [{"case": "cuBLASLt, best algorithm", "product": "qkv forward", "tflops": 1.0}]}}
    assert plots.draw(Report(parts=only), tmp_path) == []  # ours failed


def test_every_part_has_a_name_and_says_what_it_does():
    assert len({part.name for part in NATIVE}) == len(NATIVE) == 12
    assert all(part.about for part in NATIVE)
