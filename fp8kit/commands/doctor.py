"""``fp8kit doctor``: what makes fp8kit several times slower here than it need be, and what to do about it."""

from __future__ import annotations

import argparse
from typing import Any

from fp8kit import arrays, cache, devices, slowness
from fp8kit.backends import dispatch
from fp8kit.commands import FAILED, command
from fp8kit.errors import Fp8kitError


def add(commands: Any) -> None:
    """Register the subcommand; ``commands`` is what ``ArgumentParser.add_subparsers`` returned."""
    about = "what makes fp8kit slower here than it need be, and what to do about it"
    parser = command(commands, "doctor", about, _doctor)
    parser.add_argument("--strict", action="store_true", help=f"exit with {FAILED} where there is something")


def _doctor(options: argparse.Namespace) -> int:
    _examine()
    found = slowness.said()
    for one in found:
        print(f"{one.cause}\n  so   {one.effect}\n  cure {one.cure}")
    if not found and not arrays.provider(arrays.device("cuda")).count():
        print("no GPU to examine (`fp8kit info` says why); nothing else makes fp8kit slower than it need be")
    elif not found:
        print("nothing here makes fp8kit slower than it need be")
    return FAILED if found and options.strict else 0


def _examine() -> None:
    """Let everything that can be asked beforehand say what it has to say. A recipe, or an attention, that no
    tensor core takes is warned of when it is used."""
    cache.check()
    devices.say_unused()
    try:
        dispatch.kernels(arrays.CPU)
    except (Fp8kitError, ImportError, OSError) as error:
        slowness.say(
            f"the CPU engine cannot be loaded ({error})", "nothing runs on the CPU", "install it anew"
        )
    for index in range(arrays.provider(arrays.device("cuda")).count()):
        _examine_gpu(index)


def _examine_gpu(index: int) -> None:
    from fp8kit.backends.cuda import attention

    attention.say_missing()
