"""The table of implementations: what it takes, what it refuses by name, and what it says."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest

from fp8kit.errors import BackendError
from fp8kit.plugins import (
    KERNELS,
    PRIORITY,
    SERVES,
    Kind,
    OpImpl,
    OpManager,
    OpRegistry,
    match_token,
    signature,
)


def add(a: Any, b: Any, out: Any, stream: int) -> None:
    """``out = a + b``, as far as its signature goes."""


def impl(name: str, fn: Any = add, op: str = "add", kind: Kind = Kind.DEFAULT, **more: Any) -> OpImpl:
    return OpImpl(op, f"{name}.{op}", kind, fn, **more)


def test_kinds_and_priorities() -> None:
    assert (
        [impl("x", kind=kind, vendor="v").priority for kind in Kind]
        == [150, 100, 50]
        == [PRIORITY[kind] for kind in Kind]
    )
    registry = OpRegistry()
    registry.register_many(
        [
            impl("c", kind=Kind.REFERENCE),
            impl("b"),
            impl("a"),
            impl("d", kind=Kind.VENDOR, vendor="v", priority=999),
        ]
    )
    assert [found.engine for found in registry.get_implementations("add")] == ["d", "a", "b", "c"]
    assert registry.engines() == dict.fromkeys("abcd", frozenset({"cpu"}))
    assert registry.list_operators() == ["add"]
    assert registry.get_implementation("add", "a.add") is registry.get_implementations("add")[1]
    assert registry.get_implementation("add", "e.add") is None
    assert registry.get_implementation("copy", "a.add") is None


def test_what_is_wrong_is_refused_by_name() -> None:
    registry = OpRegistry()
    registry.register_impl(impl("x"))
    version = registry.version
    for wrong, said in (
        (
            lambda: registry.register_impl(impl("x")),
            r"register_impl: impl_id: got 'x.add', expected one not yet registered for add",
        ),
        (
            lambda: registry.register_impl(impl("y", lambda a, b, out: None)),
            r"y\.add\(a, b, out\), expected the contract's add\(a, b, out, stream\)",
        ),
        (
            lambda: registry.register_impl(impl("y", lambda a, out, b, stream: None)),
            "expected the contract's add",
        ),
        (
            lambda: registry.register_impl(impl("y", lambda a, b, out, stream, more: None)),
            "expected the contract's add",
        ),
        (
            lambda: registry.register_impl(impl("y", lambda a, b, out, stream, *, more: None)),
            "expected the contract's add",
        ),
        (lambda: registry.register_impl(impl("y", dict)), "fn: got .*y.add"),
        (lambda: registry.register_impl(add), "expected an OpImpl"),  # type: ignore[arg-type]
        (
            lambda: impl("y", op="generic_gemm"),
            "op_name: got 'generic_gemm', expected a kernel of the contract, see `fp8kit plugins list`",
        ),
        (lambda: impl("y", kind=Kind.VENDOR), "vendor: got None, expected a name, as it is of kind VENDOR"),
        (lambda: impl("y", fn="add"), "fn: got 'add', expected a function"),
        (lambda: impl("y", kind="fastest"), "kind: got 'fastest', expected a Kind"),  # type: ignore[arg-type]
        (
            lambda: impl("y", kind=Kind.VENDOR, vendor=3),  # type: ignore[arg-type]
            "vendor: got 3, expected a name",
        ),
        (lambda: impl("y", priority=1.5), "priority: got 1.5, expected an int"),
        (lambda: impl(""), r"impl_id: got '\.add', expected a name with a dot: engine\.kernel"),
        (lambda: OpImpl("add", "mine", Kind.DEFAULT, add), "impl_id: got 'mine', expected a name with a dot"),
        (lambda: impl("mine", op="ad"), "op_name: got 'ad', .*; did you mean add"),
        (lambda: impl("y", supported_dtypes={"fp32"}), "supported_dtypes: .*expected some of .*float32"),
        (
            lambda: impl("y", supported_dtypes=()),
            r"supported_dtypes: got \(\), expected a set of names, one at least",
        ),
        (lambda: impl("y", devices="cpu"), "devices: got 'cpu', expected a set of names"),
        (lambda: impl("y", devices=None), "devices: got None, expected a set of names, one at least"),
        (lambda: impl("y", devices={3}), r"devices: got \{3\}, expected a set of names"),
        (lambda: impl("y", min_arch="sm_90"), "min_arch: got 'sm_90', expected an int"),
        (lambda: impl("y", max_arch=9.0), r"max_arch: got 9\.0, expected an int"),
    ):
        with pytest.raises(BackendError, match=said):
            wrong()
    assert registry.version == version
    assert len(registry.get_implementations("add")) == 1


@pytest.mark.parametrize(
    "fn",
    [
        add,
        lambda *args: None,
        lambda a, *rest: None,
        lambda a, b, out, stream, more=1: None,
        functools.partial(lambda first, a, b, out, stream: None, 0),
        functools.wraps(add)(lambda *args: None),
    ],
)
def test_signatures_that_fit(fn: Any) -> None:
    registry = OpRegistry()
    registry.register_impl(impl("x", fn))
    assert registry.list_operators() == ["add"]


def test_every_kernel_of_both_engines_has_its_signature() -> None:
    manager = OpManager()
    manager.ensure_initialized()
    for engine in ("reference", "cuda"):
        assert [
            name for name in KERNELS if manager.registry.get_implementation(name, f"{engine}.{name}") is None
        ] == []
    assert all(list(signature(name).parameters) for name in KERNELS if name != "gemm_workspace")


def test_workspaces_are_those_of_the_contract() -> None:
    assert set(SERVES) == {name for name in KERNELS if name.endswith("_workspace")}
    takers = {name for name in KERNELS if "workspace" in signature(name).parameters}
    assert {kernel for kernels in SERVES.values() for kernel in kernels} == takers


def test_several_are_added_together_or_not_at_all() -> None:
    registry = OpRegistry()
    registry.register_impl(impl("x"))
    before = registry.snapshot()
    with pytest.raises(BackendError, match=r"got 'x\.add'"):
        registry.register_many([impl("y"), impl("z"), impl("x")])
    assert registry.snapshot() == before
    assert dict(before.impls_by_op) == {"add": (impl("x"),)}
    registry.register_impl(impl("y"))
    registry.restore(before)
    assert registry.snapshot() == before
    registry.clear()
    assert registry.list_operators() == []


def test_threads_register_at_once() -> None:
    registry = OpRegistry()
    threads = [
        threading.Thread(target=lambda i=i: [registry.register_impl(impl(f"e{i}x{j}")) for j in range(50)])
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(registry.get_implementations("add")) == 400
    assert registry.version == 400


def test_tokens() -> None:
    one = impl("acme", kind=Kind.VENDOR, vendor="Acme")
    assert all(match_token(one, token) for token in ("vendor", "vendor:acme", "vendor:ACME", "impl:acme.add"))
    assert not any(match_token(one, token) for token in ("default", "impl:acme", "vendor:a"))
