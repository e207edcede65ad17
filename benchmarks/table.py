"""The Markdown that README shows, made from a run's JSON and from nothing else."""

from __future__ import annotations

from pathlib import Path

from benchmarks.targets import CALLABLES, shown
from fp8kit.bench import report as reports
from fp8kit.bench.problem import SAME_BITS
from fp8kit.bench.report import Report, Row
from fp8kit.errors import Fp8kitError

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/h200/benchmarks.json"
BEGIN, END = "<!-- benchmarks -->", "<!-- /benchmarks -->"
_CASES = (
    "torch eager bf16",
    "torch eager bf16, cuDNN attention",
    "torch.compile bf16",
    "fp8kit native bf16",
    "fp8kit native FP8 delayed",
    "fp8kit native FP8 current",
    "fp8kit native FP8 block",
    SAME_BITS,
    "fp8kit_torch bf16",
    "fp8kit_torch FP8 delayed",
    "fp8kit_torch FP8 current",
    "torch eager bf16, graph",
    "fp8kit native FP8 delayed, graph",
    "fp8kit_torch FP8 delayed, graph",
    CALLABLES,
    "Transformer Engine FP8 delayed",
    "torchao FP8 tensorwise, torch.compile",
    "fp8kit_jax FP8",
    "skeleton",
)


def table(report: Report) -> str:
    """Two tables: forward and backward of the layers in ms, and the targets with their verdicts."""
    about = report.about
    own, torch = (about["versions"][name] for name in ("fp8kit", "torch"))
    lines = [f"{about['machine']}, fp8kit {own}, torch {torch}; one run, contenders in turn.", ""]
    layers: dict[str, dict[str, Row]] = {}
    for row in report.rows("layer"):
        layers.setdefault(row["workload"], {})[row["case"]] = row
    cases = [case for case in _CASES if any("gpu_ms" in rows.get(case, {}) for rows in layers.values())]
    if cases:
        lines += [f"| forward + backward, ms | {' | '.join(layers)} |", f"|---|{'---|' * len(layers)}"]
        lines += [
            f"| {case} | {' | '.join(_cell(rows.get(case, {})) for rows in layers.values())} |"
            for case in cases
        ] + [""]
    lines += ["| | measured | must | goal | |", "|---|---|---|---|---|"]
    for row in report.targets:
        value = shown(row["value"], row["unit"]) if "value" in row else "-"
        sign = "at least " if row["more"] else ""
        lines.append(
            f"| {row['what']} | {value} | {sign}{row['must']:g} | {sign}{row['goal']:g} | {row['verdict']} |"
        )
    return "\n".join(lines) + "\n"


def _cell(row: Row) -> str:
    if "gpu_ms" not in row:
        return ""
    return f"{row['gpu_ms']:.2f}" if row["status"] == "ok" else "wrong"


def block(text: str) -> str:
    """What stands between the markers of a document. Fp8kitError where it does not have both of them,
    once."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise Fp8kitError("table", "document", "no such pair", f"one {BEGIN} and one {END} after it")
    return text.partition(BEGIN)[2].partition(END)[0]


def with_table(text: str, made: str) -> str:
    """The document with ``made`` between its markers."""
    return text.replace(f"{BEGIN}{block(text)}{END}", f"{BEGIN}\n{made}{END}")


def committed(path: Path = RESULTS) -> str:
    """The table of the committed results; nothing where there are none yet."""
    return table(reports.read(path)) if path.exists() else ""
