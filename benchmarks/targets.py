"""What speed is wanted, as a table, and the verdicts on one run: every row is evaluated from figures that one
run took in turn."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from benchmarks.own_gemms import BLOCKS, EPILOGUES, FEW, TENSORS, speed
from fp8kit.bench.report import Report, Row
from fp8kit.bench.sizes import FULL
from fp8kit.bench.skeleton import NAME as SKELETON

# contenders, by the names of their rows
CALLABLES = "fp8kit_torch FP8 delayed, graphed callables"
EAGER, CUDNN, COMPILED, GRAPH = (
    "torch eager bf16",
    "torch eager bf16, cuDNN attention",
    "torch.compile bf16",
    "torch eager bf16, graph",
)
NATIVE, TORCH = "fp8kit native FP8 delayed", "fp8kit_torch FP8 delayed"
MISSING = f"{TORCH}, cuDNN missing"  # attention by our own kernels
FLASH = "torch eager bf16, flash attention"
OWN_KERNEL, LIBRARY = "fp8kit flash", "fp8kit cuDNN"  # attention alone
FRONTENDS = (NATIVE, TORCH)
TENSOR, SHARDED, SUMMED, ALONE = "TP, SP", "FSDP2", "DDP", "one GPU"  # how ranks share a model
SMALL = "the run's sizes are not the full ones"


class Missing(Exception):
    """A figure that the run does not have, or that is of a wrong result; the message says which."""


@dataclass(frozen=True)
class Target:
    """``what`` must be at most ``must`` and should be at most ``goal`` (with ``more``: at least), in
    ``unit``; ``value`` finds it among the rows of ``part``."""

    what: str
    must: float
    goal: float
    value: Callable[[Report], float]
    unit: str = ""
    more: bool = False
    part: str = "layer"


def figure(report: Report, part: str, case: str, key: str, workload: str | None = None) -> float:
    """One figure. Missing where it was not taken, or where the result was wrong."""
    for row in report.rows(part):
        if row["case"] == case and workload in (None, row["workload"]):
            if row["status"] == "ok" and key in row:
                return float(row[key])
            raise Missing(f"{part}, {case}: {row['status']}")
    raise Missing(f"{part}, {case}: not measured")


def ratio(
    workload: str, cases: tuple[str, ...], other: str, key: str = "gpu_ms"
) -> Callable[[Report], float]:
    """The largest of the cases' figures over another case's, of one workload of the part ``layer``."""
    return lambda r: (
        max(figure(r, "layer", case, key, workload) for case in cases)
        / figure(r, "layer", other, key, workload)
    )


def of_layers(cases: tuple[str, ...], other: str, key: str, *workloads: str) -> Callable[[Report], float]:
    """The largest ``ratio`` of several layers."""
    return lambda r: max(ratio(workload, cases, other, key)(r) for workload in workloads)


def visits(report: Report, first: bool) -> float:
    """Of the part ``shapes``: milliseconds of a step at the first visit of 100 lengths, or the largest share
    that a later visit takes of torch's with flash attention, over all its numbers of lengths."""
    rows = report.rows("shapes")
    if not rows:
        raise Missing("shapes: not measured")
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    if first:
        return figure(report, "shapes", f"{TORCH}, visit 1", "value", workloads[0])
    later = [row for row in rows if row["case"].startswith(f"{TORCH}, visit") and row["case"][-1] != "1"]
    found = []
    for row in later:
        own = figure(report, "shapes", row["case"], "value", row["workload"])
        theirs = row["case"].replace(TORCH, FLASH)
        found.append(own / figure(report, "shapes", theirs, "value", row["workload"]))
    return max(found)


def attention_speed(report: Report) -> float:
    """The least of cuDNN's time over our kernels', causal, heads of 64 and 128 features, each direction."""
    grid = [row for row in report.rows("attention") if row["case"].startswith(OWN_KERNEL)]
    sizes = [row["workload"] for row in grid if row["workload"].endswith(tuple(f" x {n}" for n in LENGTHS))]
    sizes = [one for one in sizes if one.startswith(("head_dim 64, 32/32", "head_dim 128, 16/16"))]
    if not sizes:
        raise Missing(f"attention, {OWN_KERNEL}: not measured")
    return min(
        figure(report, "attention", f"{LIBRARY}, {direction}", "gpu_ms", size)
        / figure(report, "attention", f"{OWN_KERNEL}, {direction}", "gpu_ms", size)
        for size in dict.fromkeys(sizes)
        for direction in ("forward", "backward")
    )


def of_model(case: str, other: str) -> Callable[[Report], float]:
    """Of the part ``model`` one case's step over another's."""
    return lambda r: figure(r, "model", case, "gpu_ms") / figure(r, "model", other, "gpu_ms")


def own_speed(scales: str, least: bool = False) -> Callable[[Report], float]:
    """Of the part ``own``: ``own_gemms.speed``."""

    def found(report: Report) -> float:
        value = speed(report.rows("own"), scales, least)
        if value is None:
            raise Missing(f"own, {scales}: not measured")
        return value

    return found


LENGTHS = (512, 1024, 2048, 4096, 8192)  # that attention alone is measured at
LARGEST, MIDDLE = "layer 4096", ("layer 2048", "layer 1024", "layer 768")

TARGETS = (
    Target("native FP8 delayed layer / torch eager bf16", 0.60, 0.55, ratio(LARGEST, (NATIVE,), EAGER)),
    Target(
        "native FP8 delayed layer / the skeleton of the same run",
        0.97,
        0.90,
        ratio(LARGEST, (NATIVE,), SKELETON),
    ),
    Target("fp8kit_torch FP8 delayed layer / torch eager bf16", 0.57, 0.52, ratio(LARGEST, (TORCH,), EAGER)),
    Target(
        "FP8 current scaling, both frontends / torch eager bf16",
        0.59,
        0.55,
        ratio(LARGEST, ("fp8kit native FP8 current", "fp8kit_torch FP8 current"), EAGER),
    ),
    Target(
        "FP8 block scaling, fp8kit_torch / torch eager bf16",
        0.65,
        0.60,
        ratio(LARGEST, ("fp8kit_torch FP8 block",), EAGER),
    ),
    Target(
        "native bf16 layer / torch.compile bf16",
        1.00,
        0.95,
        ratio(LARGEST, ("fp8kit native bf16",), COMPILED),
    ),
    Target(
        "peak memory of the hidden 4096 FP8 layer, both frontends / torch eager bf16",
        0.95,
        0.85,
        ratio(LARGEST, FRONTENDS, EAGER, "peak_gib"),
    ),
    Target(
        "peak memory of the FP8 layers of 2048, 1024 and 768, both frontends / torch eager bf16",
        1.00,
        0.90,
        of_layers(FRONTENDS, EAGER, "peak_gib", *MIDDLE),
    ),
    Target(
        "host time, native Linear FP8, 64 tokens, 256 to 256",
        200,
        120,
        lambda r: figure(r, "host", NATIVE, "host_us"),
        "us",
        part="host",
    ),
    Target(
        "host time, fp8kit_torch Linear FP8 / torch eager bf16",
        1.35,
        1.00,
        lambda r: figure(r, "host", TORCH, "host_us") / figure(r, "host", EAGER, "host_us"),
        part="host",
    ),
    Target(
        "hidden 2048 layer, eager, both frontends / torch eager bf16",
        1.00,
        0.75,
        ratio("layer 2048", FRONTENDS, EAGER),
    ),
    Target(
        "hidden 1024 layer, eager, both frontends / torch eager bf16, cuDNN attention",
        1.20,
        0.90,
        ratio("layer 1024", FRONTENDS, CUDNN),
    ),
    Target(
        "GPT-2-small layer, eager, both frontends / torch eager bf16",
        1.20,
        0.90,
        ratio("layer 768", FRONTENDS, EAGER),
    ),
    Target(
        "hidden 1024 layer, native FP8 graph / torch bf16 graph",
        0.95,
        0.80,
        ratio("layer 1024", (f"{NATIVE}, graph",), GRAPH),
    ),
    Target(
        "FP8 layer where cuDNN is missing / where it is there, every size",
        1.15,
        1.03,
        of_layers((MISSING,), TORCH, "gpu_ms", LARGEST, *MIDDLE),
    ),
    Target(
        "a step of a length that is met for the first time, hidden 1024",
        25,
        8,
        lambda r: visits(r, first=True),
        "ms",
        part="shapes",
    ),
    Target(
        "later visits of up to 1000 lengths / torch eager bf16 with flash attention",
        1.20,
        0.90,
        lambda r: visits(r, first=False),
        part="shapes",
    ),
    Target(
        "own attention kernels' speed / cuDNN's, causal, heads of 64 and 128, 512 to 8192",
        0.70,
        0.95,
        attention_speed,
        more=True,
        part="attention",
    ),
    Target(
        "own FP8 product's speed / cuBLASLt's, scales per tensor, the layer's twelve",
        0.97,
        1.00,
        own_speed(TENSORS),
        more=True,
        part="own",
    ),
    Target(
        "own FP8 product's speed / cuBLASLt's, 64 rows and fewer, geometric mean",
        1.00,
        1.00,
        own_speed(FEW),
        more=True,
        part="own",
    ),
    Target("the same, the least of them", 1.00, 1.00, own_speed(FEW, least=True), more=True, part="own"),
    Target(
        "own FP8 product's speed / cuBLASLt's, scales of blocks, the layer's twelve",
        1.10,
        1.25,
        own_speed(BLOCKS),
        more=True,
        part="own",
    ),
    Target(
        "own FP8 product with an epilogue / cuBLASLt's and a pass, speed, the least of the FFN's",
        1.00,
        1.08,
        own_speed(EPILOGUES, least=True),
        more=True,
        part="own",
    ),
    Target(
        "Hugging Face Llama, whole step, converted / bf16 eager",
        0.66,
        0.60,
        of_model(TORCH, EAGER),
        part="model",
    ),
    Target(
        "the same, converted and compiled / converted and eager",
        0.90,
        0.82,
        of_model(f"{TORCH}, torch.compile", TORCH),
        part="model",
    ),
    Target(
        "memory-bound kernels: copy time of their bytes / their time",
        0.85,
        0.92,
        lambda r: figure(r, "kernels", "all passes", "of_copy"),
        more=True,
        part="kernels",
    ),
    Target(
        "first step, empty kernel cache",
        20,
        8,
        lambda r: figure(r, "start", "empty cache", "seconds"),
        "s",
        part="start",
    ),
    Target(
        "first step, warm kernel cache",
        3,
        1.5,
        lambda r: figure(r, "start", "warm cache", "seconds"),
        "s",
        part="start",
    ),
    Target(
        "a step that the inspector looks at now and then / one without",
        1.02,
        1.01,
        lambda r: figure(r, "inspect", "frequency 100", "ratio"),
        part="inspect",
    ),
    Target(
        "a step with five statistics of every operand / one without",
        1.25,
        1.10,
        lambda r: figure(r, "inspect", "frequency 1", "ratio"),
        part="inspect",
    ),
    Target(
        "two ranks, TP and SP of the hidden 4096 layer, FP8 delayed / torch bf16",
        0.62,
        0.56,
        lambda r: figure(r, "ranks", TORCH, "ratio"),
        part="ranks",
    ),
    Target(
        "two ranks, FSDP2 of 12 layers of hidden 2048, FP8 delayed / torch bf16",
        0.70,
        0.62,
        lambda r: figure(r, "ranks", f"{TORCH}, {SHARDED}", "ratio"),
        part="ranks",
    ),
    Target(
        "bytes gathered in that model, FP8 delayed / torch bf16",
        0.51,
        0.50,
        lambda r: (
            figure(r, "ranks", f"{TORCH}, {SHARDED}", "gathered_mib")
            / figure(r, "ranks", f"{EAGER}, {SHARDED}", "gathered_mib")
        ),
        part="ranks",
    ),
    Target(
        "speed of each of two ranks, FP8 delayed, FSDP2 or DDP / one GPU's",
        0.95,
        0.98,
        lambda r: max(figure(r, "ranks", f"{TORCH}, {how}", "scaling") for how in (SHARDED, SUMMED)),
        more=True,
        part="ranks",
    ),
)


def evaluate(report: Report) -> list[Row]:
    """A row for each target: ``value``, and the ``verdict`` "goal", "must", "MISS" or "not measured" with a
    ``reason``: a figure that the run does not have, or sizes other than the full ones, which the targets are
    of."""
    rows = []
    small = report.about.get("settings", {}).get("sizes") != FULL.name
    for target in TARGETS:
        row: Row = {
            "what": target.what,
            "must": target.must,
            "goal": target.goal,
            "unit": target.unit,
            "more": target.more,
            "part": target.part,
        }
        try:
            if small:
                raise Missing(SMALL)
            row["value"] = value = target.value(report)
        except Missing as why:
            rows.append(row | {"verdict": "not measured", "reason": str(why)})
            continue
        sign = -1 if target.more else 1
        reached = [name for name in ("goal", "must") if sign * value <= sign * getattr(target, name)]
        rows.append(row | {"verdict": reached[0] if reached else "MISS"})
    return rows


def shown(value: float, unit: str) -> str:
    """A figure as it is printed: three digits of a ratio, microseconds without decimals."""
    return f"{value:{'.0f' if unit == 'us' else '.2f'}} {unit}" if unit else f"{value:.3f}"


def text(rows: list[Row], parts: Collection[str]) -> str:
    """The verdicts of the ``parts`` that ran, as aligned lines; one line where they have none, or where
    nothing could be measured."""
    rows = [row for row in rows if row["part"] in parts]
    why = {row.get("reason", "") for row in rows}
    if not rows or why == {SMALL}:
        return f"== targets: {SMALL if rows else 'none is of these parts'}"
    width = max(len(row["what"]) for row in rows)
    lines = ["== targets"]
    for row in rows:
        value = shown(row["value"], row["unit"]) if "value" in row else row["reason"]
        wanted = f"must {'>=' if row['more'] else '<='} {row['must']:g}, goal {row['goal']:g}"
        lines.append(f"{row['what']:{width}}  {row['verdict']:12}  {value:>10}  ({wanted})")
    return "\n".join(lines)
