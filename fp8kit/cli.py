"""The ``fp8kit`` command: info, doctor, demo, train, launch, bench, warmup, plugins, kernels, recipes, report
and alias. ``python -m fp8kit`` is the same."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

import fp8kit
from fp8kit import arrays, attention_info, cache, settings
from fp8kit.backends import dispatch
from fp8kit.backends.discovery import PLUGIN_MODULES_ENV
from fp8kit.backends.policy import SelectionPolicy
from fp8kit.backends.protocol import KERNELS
from fp8kit.collectives import Collectives
from fp8kit.commands import (
    FAILED,
    Parser,
    add_device,
    alias,
    bench,
    command,
    device_of,
    doctor,
    folder,
    kernels,
    launch,
    plugins,
    positive,
    recipes,
    report,
    said,
    seed,
    status_of,
    warmup,
)
from fp8kit.errors import ArgumentError, Fp8kitError
from fp8kit.lru import cache_info
from fp8kit.models.presets import PRESETS, preset

INTERRUPTED = 130  # exit status after Ctrl-C, as shells give it
UNREAD = 141  # exit status when the output's reader is gone, likewise


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line ``arguments``, None: the process's own.

    Returns the exit status: 0, 1 with the reason on standard error, 2 for a wrong argument, 130 after Ctrl-C,
    or 141 when the reader has closed the output. What argparse refuses exits with 2.
    """
    options = _parser().parse_args(arguments)
    options.command_line = sys.argv[1:] if arguments is None else list(arguments)
    try:
        status = int(options.run(options))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader has closed the output
        # what Python flushes at its end has nowhere else to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
    except Fp8kitError as error:
        print(said(options.command, error), file=sys.stderr)
        return status_of(error)
    except KeyboardInterrupt:
        more = f"; {options.go_on()}" if "go_on" in options else ""
        print(f"\nfp8kit {options.command}: interrupted{more}", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="fp8kit", description="FP8 transformer layers on NumPy and CuPy arrays.")
    parser.add_argument("--version", action="version", version=f"fp8kit {fp8kit.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    info = command(commands, "info", "devices, versions, and what runs or is missing", _info)
    info.add_argument(
        "--attention",
        nargs="*",
        metavar="KEY=VALUE",
        help=f"only: who computes such an attention on each device, and why "
        f"the others do not; keys: {', '.join(attention_info.KEYS)}",
    )
    info.add_argument(
        "--caches",
        action="store_true",
        help="only: what is kept on disk, and the caches by shape with their limits; "
        "fk.cache_info() shows how full those of a running program are",
    )
    _add_trainings(commands)
    for own in (launch, doctor, bench, warmup, plugins, kernels, recipes, report, alias):
        own.add(commands)
    return parser


def _add_trainings(commands: Any) -> None:
    sizes = "; ".join(
        f"{size.name}: {size.layers} layers of {size.hidden}, {size.context} bytes of context, "
        f"{size.steps} steps"
        for size in PRESETS.values()
    )
    demo = command(
        commands,
        "demo",
        "train a small GPT in high precision and in FP8, and compare",
        _demo,
        epilog=f"Sizes: {sizes}. "
        "Bounds are meant for whole runs: with few --steps neither model has learned enough, "
        "and the exit status is 1. Without bounds, to see that it runs: "
        f"{', '.join(size.name for size in PRESETS.values() if not size.judged)}.",
    )
    demo.add_argument("--preset", choices=PRESETS, help="size (demo-gpu where CUDA is usable, else demo-cpu)")

    train = command(
        commands,
        "train",
        "train one GPT and save it",
        _train,
        epilog=f"Sizes: {sizes}. Results of an earlier run in the same folder are replaced.",
    )
    train.add_argument("--preset", choices=PRESETS, required=True, help="size")
    train.add_argument(
        "--precision",
        choices=("high", "fp8"),
        default="fp8",
        help="high is float32 on a CPU and bfloat16 on a GPU (%(default)s)",
    )
    train.add_argument(
        "--save-every",
        type=positive,
        default=100,
        metavar="N",
        help="write the whole state to DIR/training.safetensors after each N steps (%(default)s)",
    )
    train.add_argument(
        "--resume",
        action="store_true",
        help="continue from DIR/training.safetensors, with the same options: a training cannot be made "
        "longer by more --steps, which the learning rate follows; where there is no such file yet, start",
    )

    train.add_argument(
        "--ranks",
        type=positive,
        default=1,
        metavar="N",
        help="processes that share batches and the optimiser's state, a GPU each (%(default)s)",
    )

    for name, trains in (("demo", demo), ("train", train)):
        trains.add_argument(
            "--out",
            type=Path,
            default=Path("runs", name),
            metavar="DIR",
            help="folder of the results (%(default)s)",
        )
        trains.add_argument("--steps", type=positive, metavar="N", help="optimiser steps (the preset's)")
        add_device(trains)
        trains.add_argument(
            "--seed", type=seed, default=0, metavar="N", help="of weights and batches (%(default)s)"
        )


def _replaces(out: Path, *names: str) -> None:
    """Say which results of an earlier run give way."""
    if there := [name for name in names if (out / name).exists()]:
        print(f"replaces {', '.join(there)} in {out}/")


def _demo(options: argparse.Namespace) -> int:
    from fp8kit.models.demo import RESULTS, run_demo

    device, out = device_of(options), folder(options.out)
    size = preset(options.preset or ("demo-cpu" if device.kind == "cpu" else "demo-gpu"))
    options.go_on = lambda: (
        "a demo starts anew; what can be stopped and goes on with --resume is "
        f"`fp8kit train --preset {size.name}`: the same model, in FP8"
    )
    _replaces(out, *RESULTS)
    verdict = run_demo(size, out, device, options.steps, options.seed)
    print(f"\nresults are in {out}/")
    for failure in verdict.failures:
        print(f"fp8kit demo: FAILED: {failure}", file=sys.stderr)
    return FAILED if verdict.failures else 0


def _train(options: argparse.Namespace) -> int:
    processes = settings.place().size
    if options.ranks > 1 and processes == 1:
        if options.device not in (None, "cpu", "cuda"):
            raise ArgumentError("train", "--device", options.device, "cpu or cuda with several --ranks")
        return launch.launch(options.ranks, [sys.executable, "-m", "fp8kit", *options.command_line], "train")
    ranks = Collectives(0, 1)
    if processes > 1:
        from fp8kit import distributed

        ranks = distributed.init(device=None if options.device == "cuda" else options.device)
    if ranks.rank:  # the first one speaks, and writes
        with open(os.devnull, "w") as nobody, contextlib.redirect_stdout(nobody):
            return _train_one(options, ranks, nobody)
    return _train_one(options, ranks, None)


def _train_one(options: argparse.Namespace, ranks: Collectives, stream: TextIO | None) -> int:
    from fp8kit import serialization
    from fp8kit.models import text
    from fp8kit.models.train import fp8_recipe, high_precision, train, write_losses, write_statistics

    device = ranks.device if ranks.size > 1 else device_of(options)
    out, size = folder(options.out), preset(options.preset)
    if options.steps is not None:
        size = size.with_steps(options.steps)
    recipe = fp8_recipe(size) if options.precision == "fp8" else None
    corpus = text.standard_library()
    keep, resume = out / "training.safetensors", options.resume
    precision = high_precision(device).name
    print(
        f"{size.name} on {device}, {f'FP8 beside {precision}' if recipe else precision}: "
        f"{size.layers} layers of {size.hidden}, {size.steps} steps of {size.tokens:,} bytes, "
        f"seed {options.seed}{f', {ranks.size} ranks' if ranks.size > 1 else ''}\n{corpus}"
    )
    # where it was stopped before its first save: the same command, repeated, ends with the run
    if resume and not keep.exists():
        print(f"fp8kit train: there is no {keep} yet: from the start", file=stream or sys.stderr)
        resume = False
    if not resume:
        names = ("loss.csv", "model.safetensors", "training.safetensors")
        _replaces(out, *names, *(["scales.csv"] if recipe else []))
    sys.stdout.flush()
    options.go_on = _continuation(options.command_line, keep, options.save_every, resume)
    label, every = "FP8" if recipe else precision, options.save_every
    run = train(size, corpus, recipe, label, device, options.seed, stream, keep, every, resume, ranks)
    if ranks.rank:
        return 0
    write_losses(out / "loss.csv", {run.label: run.losses})
    if recipe:
        write_statistics(out / "scales.csv", run.statistics)
    serialization.save(out / "model.safetensors", run.model, {"preset": size.name, "precision": run.label})
    entropy = corpus.unigram_entropy()
    print(f"validation loss {run.validation_loss:.4f} nats/byte (unigram entropy {entropy:.4f})")
    print(f"results are in {out}/")
    return 0


def _continuation(arguments: Sequence[str], keep: Path, every: int, resumed: bool) -> Callable[[], str]:
    """Returns what says how to go on with a training that was stopped: its state is in ``keep`` where that
    was written since now, or before, by the training that this one ``resumed``."""

    def written() -> int | None:
        return keep.stat().st_mtime_ns if keep.exists() else None

    before = written()
    command = shlex.join(["fp8kit", *arguments, *([] if "--resume" in arguments else ["--resume"])])

    def go_on() -> str:
        if resumed or written() != before:
            return f"this goes on after the last save, bit for bit: {command}"
        return f"nothing is saved yet (--save-every {every}): the same command starts anew"

    return go_on


# --- info ---------------------------------------------------------------------------------------------------


def _info(options: argparse.Namespace) -> int:
    from fp8kit.backends.cuda import support

    if options.attention is not None:
        _print_attention(" ".join(options.attention))
        return 0
    if options.caches:
        _print_caches()
        return 0
    sections: dict[str, list[tuple[str, str, str]]] = {
        "machine": [
            ("python", "", platform.python_version()),
            ("system", "", f"{platform.system()} {platform.machine()}"),
            ("default device", "", _said(lambda: str(dispatch.default_device()))),
            ("kernel cache", "", _said(_cache)),
        ],
        "libraries": _libraries(),
        "engine reference": [_reference()],
        "engine cuda": [(row.component, row.status, row.detail) for row in support.report()],
    }
    if found := _settings():
        sections = {"environment": found} | sections
    _print(sections.items())
    bad = [name for name, status, _ in found if status == "bad"]
    try:
        _print_attention()
    except Fp8kitError as error:
        if not bad:
            raise
        print(f"  {'attention':38}{'missing':9}{error}")
    if bad:
        print(f"fp8kit info: {', '.join(bad)}: see environment", file=sys.stderr)
    return FAILED if bad else 0


def _libraries() -> list[tuple[str, str, str]]:
    """Every package that an extra brings, with its version, or else with the extra."""
    from fp8kit.bench.report import ABSENT, EXTRAS, versions

    found = versions()
    extras = {name: extra for extra, names in EXTRAS.items() for name in names if extra}
    for name in extras.keys() & {name for name, version in found.items() if version == ABSENT}:
        found[name] = f"{ABSENT}: extra {extras[name]}"
    return [(name, "", version) for name, version in found.items()]


def _settings() -> list[tuple[str, str, str]]:
    """Returns the FP8KIT_* variables that are set, and what is wrong with those that are bad."""
    readers: dict[str, Callable[[], object]] = {
        "DETERMINISTIC": settings.deterministic,
        "PREFER": settings.prefer,
        "STRICT": settings.strict,
        "REPLAYS": settings.replays,
        "DEVICE": lambda: arrays.usable(settings.device(), "environment", "FP8KIT_DEVICE"),
        "LOG_LEVEL": settings.log_level,
        "PER_OP": lambda: SelectionPolicy(per_op=settings.per_op(KERNELS)),
        "SKIP_CUDA": settings.deny_vendors,
        "CACHE_DIR": _want_cache,
        "PLUGIN_MODULES": _want_plugins,
    }
    rows = []
    for name, (variable, value) in settings.assigned().items():
        try:
            readers.get(name, str)()
            rows.append((variable, "", value))
        except Fp8kitError as error:
            about_it = error.operation == "environment" and error.argument == variable
            why = f"got {error.got}, expected {error.wanted}" if about_it else str(error)
            rows.append((variable, "bad", why))
    return rows


def _cache() -> str:
    found = settings.cache_dir()
    faults = [why for name in ("", *cache.FOLDERS) if (why := cache.why_not(found / name))]
    if faults:
        return f"{found} is not used: {faults[0]}"
    why = cache.unwritable(found)
    more = f" cannot be written ({why}); set FP8KIT_CACHE_DIR to a folder that can be" if why else ""
    return f"{found}{more}"


def _want_cache() -> None:
    """Fp8kitError where the folder that FP8KIT_CACHE_DIR names is open to others or cannot be written."""
    found = settings.cache_dir()
    if why := cache.why_not(found):
        raise Fp8kitError(f"got '{found}', expected a folder that only this user can write ({why})")
    if why := cache.unwritable(found):
        raise Fp8kitError(f"got '{found}', expected a folder that can be written ({why})")


def _want_plugins() -> None:
    """Fp8kitError that names the modules of FP8KIT_PLUGIN_MODULES that failed, each with its error."""
    found = dispatch.get_default_manager().discovered()
    failed = [
        f"{each.name} ({each.error.strip().splitlines()[-1]})"
        for each in found
        if each.source == PLUGIN_MODULES_ENV and not each.ok
    ]
    if failed:
        raise Fp8kitError(
            f"got {', '.join(failed)}, expected modules that register themselves; "
            "`fp8kit plugins list` shows where"
        )


def _print(sections: Iterable[tuple[str, Sequence[tuple[str, str, str]]]]) -> None:
    for title, rows in sections:
        print(title)
        for name, status, detail in rows:
            print(f"  {name:38}{status:9}{detail}".rstrip())


def _print_attention(words: str = "") -> None:
    about = attention_info.question(words)
    print(f"attention asked about\n  {about.text}")
    _print(attention_info.sections(about))


def _print_caches() -> None:
    """What is on disk, by folder, and the limits of the caches by shape of installed frontends."""
    for name in ("fp8kit.nn", "fp8kit.backends.cuda.attention", "fp8kit_torch", "fp8kit_jax"):
        with contextlib.suppress(ImportError):  # a frontend whose framework is not installed
            importlib.import_module(name)
    rows = []
    for name in cache.FOLDERS:
        files = [path for path in (settings.cache_dir() / name).rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files) / 2**20
        rows.append((name, "", f"{len(files)} files, {size:.1f} MiB"))
    shapes = [(name, "", f"limit {info['limit']}") for name, info in cache_info().items()]
    _print({f"on disk, {_said(_cache)}": rows, "by shape, in a process": shapes}.items())


def _said(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except Fp8kitError as error:
        return str(error)


def _reference() -> tuple[str, str, str]:
    try:
        found = vars(dispatch.kernels(arrays.CPU))
    except (Fp8kitError, ImportError, OSError) as error:
        return "cpu", "missing", str(error)
    return "cpu", "runs", f"{len(found) - 1} kernels"
