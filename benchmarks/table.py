"""The tables and the picture that the documents show, made from the committed runs' JSON and from nothing
else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from benchmarks import targets
from benchmarks.targets import CALLABLES, COMPILED, CUDNN, EAGER, GRAPH, MISSING, NATIVE, TORCH
from fp8kit.bench import report as reports
from fp8kit.bench.problem import SAME_BITS
from fp8kit.bench.report import Report, Row
from fp8kit.errors import Fp8kitError
from fp8kit.models.plots import figure

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks/results/h200"
# newest first: each part is the first one's
RESULTS = ("host.json", "own.json", "layer.json", "shapes.json")
RANKS = ROOT / "benchmarks/results/h100x2/ranks.json"  # of two GPUs, another machine's
PICTURE = ROOT / "docs/img/layers.png"
BEGIN, END = "<!-- benchmarks -->", "<!-- /benchmarks -->"
ENGINE = "Transformer Engine FP8 delayed"
TORCH_BF16 = "fp8kit_torch bf16"
JAX = "fp8kit_jax FP8"  # of the part "jax", which runs the largest layer alone
# README's rows, and the picture's: case -> what the document calls it
SHORT = {
    EAGER: "PyTorch bf16",
    GRAPH: "PyTorch bf16, CUDA graph",
    ENGINE: "Transformer Engine FP8",
    TORCH_BF16: "fp8kit_torch bf16",
    TORCH: "fp8kit_torch FP8",
    f"{TORCH}, graph": "fp8kit_torch FP8, CUDA graph",
    NATIVE: "fp8kit.nn FP8",
    f"{NATIVE}, graph": "fp8kit.nn FP8, CUDA graph",
    JAX: "fp8kit_jax FP8, jax.jit",
}
# all rows, of docs/performance.md
LONG = (
    EAGER,
    CUDNN,
    COMPILED,
    "fp8kit native bf16",
    NATIVE,
    "fp8kit native FP8 current",
    "fp8kit native FP8 block",
    SAME_BITS,
    TORCH_BF16,
    TORCH,
    "fp8kit_torch FP8 current",
    "fp8kit_torch FP8 block",
    MISSING,
    GRAPH,
    f"{NATIVE}, graph",
    f"{TORCH}, graph",
    CALLABLES,
    ENGINE,
    "torchao FP8 tensorwise, torch.compile",
    "plain JAX bfloat16",
    "fp8kit_jax bfloat16",
    JAX,
    "skeleton",
)
COLOURS = {"PyTorch": "#8c8c8c", "Transformer": "#3c8d5a", "fp8kit": "#3b6ea8"}
MEMORY = (
    EAGER,
    "fp8kit native bf16",
    NATIVE,
    "fp8kit native FP8 current",
    TORCH,
    SAME_BITS,
)  # whose peak is shown
Figures = dict[str, dict[str, Row]]


def figures(report: Report, cases: Iterable[str], key: str = "gpu_ms") -> Figures:
    """Case -> size -> row of the layers' part, where ``key`` was measured. The part "jax" counts to the
    largest layer."""
    largest = next((row["workload"] for row in report.rows("layer")), "")
    rows = [*report.rows("layer"), *({**row, "workload": largest} for row in report.rows("jax"))]
    found: Figures = {
        case: {row["workload"]: row for row in rows if row["case"] == case and key in row} for case in cases
    }
    return {case: rows for case, rows in found.items() if rows}


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def by_size(report: Report, names: Mapping[str, str], what: str, key: str = "gpu_ms") -> str:
    """A figure of the layers as a table: a row for each case that has it, under its name; a column for each
    size. "wrong" stands for a figure of a wrong result."""
    sizes = list(dict.fromkeys(row["workload"] for row in report.rows("layer")))

    def cell(row: Row | None) -> str:
        return "" if row is None else f"{row[key]:.2f}" if row["status"] == "ok" else "wrong"

    found = figures(report, names, key)
    rows = ([names[case], *(cell(rows.get(size)) for size in sizes)] for case, rows in found.items())
    return _table([what, *(size.replace("layer", "hidden") for size in sizes)], rows)


def short(report: Report) -> str:
    """README's table."""
    return by_size(report, SHORT, "forward + backward, ms")


def long(report: Report) -> str:
    """The tables of docs/performance.md: times and memory of all contenders, host time, the start of a
    process, and the targets with their verdicts."""
    about = report.about
    versions = ", ".join(f"{name} {about['versions'][name]}" for name in ("fp8kit", "torch"))
    host = [row for row in report.rows("host") if "host_us_median" in row]
    start = [row for row in report.rows("start") if "seconds" in row]
    tables = [
        by_size(report, {case: case for case in LONG}, "forward + backward, ms"),
        by_size(report, {case: case for case in MEMORY}, "peak memory, GiB", "peak_gib"),
        _table(
            ["host time of a Linear, 64 tokens, us", "best round", "median round"],
            ([row["case"], f"{row['host_us']:.0f}", f"{row['host_us_median']:.0f}"] for row in host),
        ),
        _table(
            ["first step of a process", "seconds"], ([row["case"], f"{row['seconds']:.1f}"] for row in start)
        ),
        goals(report, lambda part: part != "ranks"),
    ]
    return "\n".join([f"{about['machine']}, {versions}.\n", *tables])


def goals(report: Report, of: Callable[[str], bool]) -> str:
    """The targets of some parts, with their verdicts."""
    rows = (
        [
            row["what"],
            targets.shown(row["value"], row["unit"]) if "value" in row else "-",
            *(f"{'at least ' if row['more'] else ''}{row[bound]:g}" for bound in ("must", "goal")),
            row["verdict"],
        ]
        for row in targets.evaluate(report)
        if of(row["part"])
    )
    return _table(["target", "measured", "must", "goal", "reached"], rows)


def ranks(report: Report) -> str:
    """The tables of docs/scale.md: what two ranks take, and what they communicate."""
    versions = ", ".join(f"{name} {report.about['versions'][name]}" for name in ("fp8kit", "torch"))
    tables = []
    for workload in dict.fromkeys(row["workload"] for row in report.rows("ranks")):
        rows = [row for row in report.rows("ranks") if row["workload"] == workload and row["status"] == "ok"]
        head = [workload, "ms", "of torch's", "MiB gathered", "ms of communication", "beside kernels"]
        cells = (
            [
                row["case"],
                f"{row['gpu_ms']:.2f}",
                f"{row['ratio']:.2f}",
                *(f"{row[key]:.{digits}f}" if row.get("comm_ms") else "" for key, digits in _MOVED),
                f"{100 * row['hidden']:.0f}%" if "hidden" in row else "",
                f"{row['scaling']:.2f}" if "scaling" in row else "",
            ]
            for row in rows
        )
        tables.append(_table([*head, "of one GPU's speed"], cells))
    tables.append(goals(report, lambda part: part == "ranks"))
    return "\n".join([f"Two of {report.about['machine']}, {versions}.\n", *tables])


_MOVED = (("gathered_mib", 0), ("comm_ms", 2))


DOCUMENTS: dict[Path, Callable[[Report], str]] = {
    ROOT / "README.md": short,
    ROOT / "docs/performance.md": long,
    ROOT / "docs/scale.md": lambda report: ranks(reports.read(RANKS)),
}


def bars(report: Report) -> dict[str, dict[str, float]]:
    """What the picture shows: size -> name of the case -> ms, wrong results left out."""
    found: dict[str, dict[str, float]] = {}
    for case, rows in figures(report, SHORT).items():
        for size, row in rows.items():
            if row["status"] == "ok":
                found.setdefault(size, {})[SHORT[case]] = round(row["gpu_ms"], 3)
    return found


def digest(report: Report) -> str:
    """What the picture file carries, so that a test can tell of which figures it was drawn."""
    return hashlib.sha256(json.dumps(bars(report), sort_keys=True).encode()).hexdigest()


def draw(path: Path, report: Report) -> None:
    """The layers' times as bars, a panel for each size, as PNG."""
    shown = bars(report)
    names = [name for name in SHORT.values() if any(name in found for found in shown.values())]
    picture = figure(figsize=(11, 0.45 + 0.32 * len(names)))
    panels = picture.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for axes, (size, found) in zip(panels, shown.items(), strict=True):
        for place, name in enumerate(names):
            if name in found:
                colour = COLOURS[next(start for start in COLOURS if name.startswith(start))]
                axes.barh(place, found[name], color=colour, height=0.7)
                axes.text(found[name], place, f" {found[name]:.2f}", va="center", fontsize=8)
        axes.set_xlim(0, 1.25 * max(found.values()))
        axes.set_title(f"{size.replace('layer', 'hidden')}, ms", fontsize=9)
        axes.set_xticks([])
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    panels[0].set_yticks(range(len(names)), names, fontsize=9)
    panels[0].invert_yaxis()
    picture.savefig(path, dpi=110, metadata={"Description": digest(report)})


def block(text: str) -> str:
    """What stands between the markers of a document. Fp8kitError where it does not have both of them,
    once."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise Fp8kitError("table", "document", "no such pair", f"one {BEGIN} and one {END} after it")
    return text.partition(BEGIN)[2].partition(END)[0]


def with_table(text: str, made: str) -> str:
    """The document with ``made`` between its markers."""
    return text.replace(f"{BEGIN}{block(text)}{END}", f"{BEGIN}\n{made}{END}")


def committed() -> Report:
    """The committed runs as one report: each part from the newest file that has it, the rest from the newest
    file."""
    newest, *older = (reports.read(FOLDER / name) for name in RESULTS)
    for run in older:
        newest.parts = run.parts | newest.parts
    return newest


def update(report: Report) -> list[Path]:
    """Write the tables into the documents, and the picture. Returns the files."""
    for path, made in DOCUMENTS.items():
        path.write_text(with_table(path.read_text(), made(report)))
    draw(PICTURE, report)
    return [*DOCUMENTS, PICTURE]
