"""``fp8kit plugins``: which implementations there are, which are chosen now and why, and whether one keeps
the contract."""

from __future__ import annotations

import argparse
from typing import Any

from fp8kit.backends.protocol import KERNELS
from fp8kit.commands import command
from fp8kit.errors import ArgumentError, meant
from fp8kit.plugins.explanation import explain, listing, want_implementations

_KINDS = ("cpu", "cuda")


def add(commands: Any) -> None:
    """Register the subcommand; ``commands`` is what ``ArgumentParser.add_subparsers`` returned."""
    what = "implementations of kernels: which there are, which are chosen and why"
    actions = command(commands, "plugins", what).add_subparsers(dest="action", required=True)
    command(actions, "list", "plugins, the policy, and every implementation of every kernel", _list)
    about = "who is asked for one kernel, in which order, and why the others are not"
    explaining = command(actions, "explain", about, _explain)
    explaining.add_argument("op", metavar="OP", help="a kernel of the contract, such as gemm")
    checking = command(actions, "check", "run the contract's own tests against an implementation", _check)
    about = "an implementation's id, or an engine: all of its implementations"
    checking.add_argument("name", metavar="NAME", help=about)
    for action in actions.choices.values():
        action.add_argument("--device", choices=_KINDS, help="kind of device (both)")


def _kinds(options: argparse.Namespace) -> tuple[str, ...]:
    return _KINDS if options.device is None else (options.device,)


def _list(options: argparse.Namespace) -> int:
    print(listing(_kinds(options)))
    return 0


def _explain(options: argparse.Namespace) -> int:
    if options.op not in KERNELS:
        wanted = f"a kernel of the contract, see `fp8kit plugins list`{meant(options.op, KERNELS)}"
        raise ArgumentError("plugins", "kernel", repr(options.op), wanted)
    print("\n".join(explain(options.op, kind).text() for kind in _kinds(options)))
    return 0


def _check(options: argparse.Namespace) -> int:
    from fp8kit.testing import check_implementation

    kinds = _kinds(options)
    reports = [
        check_implementation(impl, kind)
        for impl in want_implementations(options.name)
        for kind in kinds
        if kind in impl.devices
    ]
    failed = [report for report in reports if not report.ok]
    print(f"{len(reports) - len(failed)} of {len(reports)} keep the contract")
    return 1 if failed or not reports else 0
