"""Choosing implementations: what a policy allows, for whom and how long, and what is said when nothing is
left."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from fp8kit import arrays
from fp8kit.backends import dispatch, policy
from fp8kit.backends.cuda import support
from fp8kit.backends.cuda.support import Row
from fp8kit.backends.manager import chain
from fp8kit.backends.policy import SelectionPolicy
from fp8kit.backends.registry import CannotTake, Kind, OpImpl
from fp8kit.errors import BackendError


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    policy.reset_global_policy()


def test_a_switch_holds_from_now_on_or_for_a_block() -> None:
    with dispatch.deterministic():
        assert policy.get_policy().deterministic
        with dispatch.use_backend("reference"):
            assert (policy.get_policy().deterministic, policy.get_policy().backend) == (True, "reference")
            assert dispatch.default_device() == arrays.CPU
        assert policy.get_policy().backend is None
        dispatch.deterministic(False)  # within a block: until the block ends
        assert not policy.get_policy().deterministic
    assert not policy.get_policy().deterministic
    dispatch.deterministic()
    assert policy.get_policy().deterministic
    with pytest.raises(ZeroDivisionError), dispatch.deterministic(False):
        _ = 1 / 0
    assert policy.get_policy().deterministic


def test_blocks_of_two_threads_end_in_any_order() -> None:
    """A block concerns its own thread; what holds from now on concerns all."""
    inside, leave = threading.Event(), threading.Event()
    seen: list[bool] = []

    def other() -> None:
        seen.append(policy.get_policy().deterministic)
        with dispatch.use_backend("reference"):
            inside.set()
            leave.wait(10)

    with dispatch.deterministic():
        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(10)
    leave.set()
    thread.join()
    assert seen == [False]
    assert policy.get_policy() == SelectionPolicy()


def test_another_engines_arrays_are_refused_by_name() -> None:
    cuda = policy.policy_context(SelectionPolicy(backend="cuda"))
    with cuda, pytest.raises(BackendError, match=r"amax: .*device cpu.*use_backend\('cuda'\) is in force"):
        dispatch.kernels(arrays.CPU)
    with pytest.raises(BackendError, match="use_backend: name: got 'cudnn', expected one of reference, cuda"):
        dispatch.use_backend("cudnn")


def test_an_engine_without_a_device_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is asked for, and under a policy that names it: where it would place a new array, and where
    one of another device comes."""
    monkeypatch.setattr(arrays.provider(arrays.device("cuda")), "count", lambda: 0, raising=False)
    monkeypatch.setattr(
        support,
        "report",
        lambda: [Row("driver", "runs", "CUDA 13.0"), Row("CuPy", "missing", "is not installed")],
    )
    said = r"no CUDA device found \(CuPy: is not installed\); `fp8kit info` lists what is missing$"
    refused = f"^use_backend: name: got 'cuda', expected an engine whose device is here: {said}"
    with pytest.raises(BackendError, match=refused):
        dispatch.use_backend("cuda")
    assert policy.get_policy() == SelectionPolicy()
    with policy.policy_context(SelectionPolicy(backend="cuda")):
        with pytest.raises(BackendError, match=refused):
            dispatch.default_device()
        with pytest.raises(BackendError, match=rf"^amax: array: got device cpu, .* is in force\); {said}"):
            dispatch.kernels(arrays.CPU)


def impl(name: str, kind: Kind = Kind.VENDOR, **more: object) -> OpImpl:
    vendor = name if kind is Kind.VENDOR else None
    return OpImpl("add", f"{name}.add", kind, lambda *args: name, vendor, **more)  # type: ignore[arg-type]


def test_order_and_refusals() -> None:
    a, b, c = impl("a"), impl("b", priority=200), impl("c", Kind.DEFAULT)
    plain = SelectionPolicy()
    assert plain.order("add", [c, b, a]) == [b, a, c]
    assert SelectionPolicy(prefer="default").order("add", [b, a, c]) == [c, b, a]
    tokens = SelectionPolicy(per_op=(("add", ("impl:a.add", "vendor:b")),))
    assert tokens.order("add", [a, b, c]) == [a, b]
    assert "denied" in str(
        SelectionPolicy(deny_vendors=frozenset("a"), allow_vendors=frozenset("a")).refuses(a)
    )
    assert "not among" in str(SelectionPolicy(allow_vendors=frozenset("b")).refuses(a))
    assert plain.refuses(a) is None
    with pytest.raises(BackendError, match="vendor"):
        OpImpl("add", "x.add", Kind.VENDOR, lambda: None)
    with pytest.raises(BackendError, match="no_kernel"):
        OpImpl("no_kernel", "x.no_kernel", Kind.DEFAULT, lambda: None)


def test_only_cannot_take_moves_on_to_the_next(caplog: pytest.LogCaptureFixture) -> None:
    def cannot(*args: object) -> object:
        raise CannotTake("too long")

    def fails(*args: object) -> object:
        raise ValueError("a fault")

    impls = [impl("a"), impl("b")]
    call = chain(impls, [cannot, lambda *args: "second"])
    assert [call(), call()] == ["second", "second"]
    assert [r.getMessage() for r in caplog.records] == [
        "add: a.add cannot take the call (too long); b.add is asked"
    ]
    with pytest.raises(ValueError, match="a fault"):
        chain(impls, [fails, lambda *args: "second"])()
