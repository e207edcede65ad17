"""The acceptance test of an implementation: it passes what keeps the contract, and finds what does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fp8kit import cli
from fp8kit.backends.reference import IMPLEMENTATIONS
from fp8kit.errors import BackendError
from fp8kit.plugins import Kind, OpImpl, registry
from fp8kit.testing import ContractReport, check_implementation
from fp8kit.testing.contract import cases
from tests.support.engines import Engine, refusing


def check(impl: OpImpl, **more: Any) -> tuple[ContractReport, str]:
    said: list[str] = []
    return check_implementation(impl, show=said.append, **more), said[0]


def test_what_keeps_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    count = sum(case.kernel == "add" for case in cases())
    report = check_implementation(Engine("acme", ["add"]).impls[0])
    assert report.ok
    assert (report.count("kept"), report.count("declined"), report.count("broken")) == (count, 0, 0)
    assert (
        capsys.readouterr().out
        == f"acme.add (add) on cpu: keeps the contract: {count} cases kept, 0 declined, 0 broken\n"
    )
    half = Engine("half", ["add"], supported_dtypes=frozenset({"float16"})).impls[0]
    report, said = check(half)
    assert report.ok
    assert 0 < report.count("declined") < count
    assert "declined: dtype float32 of a is not among float16" in said


def test_what_breaks_it() -> None:
    def off(a: Any, b: Any, out: Any, stream: int) -> None:
        IMPLEMENTATIONS["add"](a, b, out, stream)
        if out.size > 100:
            out.numpy().reshape(-1)[100] = 0

    def fails(a: Any, b: Any, out: Any, stream: int) -> None:
        raise ZeroDivisionError("of mine")

    report, said = check(OpImpl("add", "acme.add", Kind.DEFAULT, off))
    assert not report.ok
    assert report.count("kept") > 0
    assert "BREAKS THE CONTRACT" in said
    assert "broken: add-float32-561-561: " in said
    report, said = check(OpImpl("add", "acme.add", Kind.DEFAULT, fails))
    assert report.count("kept") == 0
    assert f"ZeroDivisionError: of mine ({__file__}:" in said
    report, said = check(OpImpl("add", "acme.add", Kind.DEFAULT, lambda a, b: None))
    assert "broken: signature: register_impl: fn: got acme.add(a, b), expected the contract's add" in said
    report, said = check(refusing("add", "not today"))
    assert not report.ok
    assert "takes no case" in said
    assert "declined: not today" in said


def test_workspaces_are_the_implementations_own() -> None:
    greedy = Engine("greedy", ["sum_rows", "column_sum_workspace"], wants=4096)
    report, said = check(greedy.impls[0])
    assert "1 bytes of workspace, 4096 were asked for" in said, "nothing measures its workspace: it gets none"
    assert not report.ok
    assert check(greedy.impls[0], workspace=greedy.impls[1])[0].ok
    registry.register_many(greedy.impls)
    assert check(greedy.impls[0])[0].ok
    assert check(greedy.impls[1])[0].ok, "a workspace function is tried with the kernels that it serves"
    assert "has registered none of norm_bwd" in check(Engine("x", ["norm_bwd_workspace"]).impls[0])[1]


def test_where_it_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = Engine("gpu", ["add"], devices=frozenset({"npu"})).impls[0]
    assert check(elsewhere, device="cpu")[1] == "gpu.add (add) on cpu: NOT TESTED: it runs on npu"
    with pytest.raises(BackendError, match="check_implementation: impl"):
        check_implementation(np.add)  # type: ignore[arg-type]
    assert cli.main(["plugins", "check", "nobody"]) == 2
    assert (
        "got 'nobody', expected an implementation's id, or an engine: reference, cuda"
        in capsys.readouterr().err
    )


def test_by_command(capsys: pytest.CaptureFixture[str]) -> None:
    registry.register_many([*Engine("acme", ["add", "copy"]).impls, refusing("add", "never")])
    assert cli.main(["plugins", "check", "acme"]) == 0
    assert "2 of 2 keep the contract" in capsys.readouterr().out
    assert cli.main(["plugins", "check", "shy.add", "--device", "cpu"]) == 1
    assert cli.main(["plugins", "check", "acme.copy", "--device", "cuda"]) == 1
    assert "0 of 0 keep the contract" in capsys.readouterr().out
    assert cli.main(["plugins", "explain", "add"]) == 0
    said = capsys.readouterr().out
    assert "> acme.add" in said
    assert "add on cuda" in said
    assert cli.main(["plugins", "explain", "nothing"]) == 2
