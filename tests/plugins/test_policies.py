"""Policies: what they say, where they come from, and for whom they hold."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import logging
import pickle
import sys
import threading
from collections.abc import Iterator

import pytest

import fp8kit as fk
from fp8kit import settings
from fp8kit.backends import policy as policies
from fp8kit.backends.manager import OpManager
from fp8kit.errors import BackendError, Fp8kitError
from fp8kit.plugins import (
    KERNELS,
    Kind,
    OpImpl,
    SelectionPolicy,
    get_policy,
    policy_context,
    policy_from_env,
    reset_global_policy,
    set_global_policy,
    with_allowed_vendors,
    with_denied_vendors,
    with_preference,
    with_strict_mode,
)


def test_what_it_takes() -> None:
    policy = SelectionPolicy(
        Kind.REFERENCE, True, ["Acme"], ("CUDA",), {"add": ("flagos", "vendor:x", "impl:y.add")}
    )  # type: ignore[arg-type]
    order = (("add", ("default", "vendor:x", "impl:y.add")),)
    assert policy == SelectionPolicy("reference", True, frozenset({"acme"}), frozenset({"cuda"}), order)
    assert SelectionPolicy.from_dict(
        {"prefer": "flagos", "per_op_order": {"add": ["vendor"]}}, strict=True
    ) == SelectionPolicy("default", True, per_op=(("add", ("vendor",)),))
    assert (
        policy.fingerprint()
        == SelectionPolicy.from_dict(
            prefer="reference", strict=1, allow_vendors={"ACME"}, deny_vendors={"cuda"}, per_op=policy.per_op
        ).fingerprint()
    )
    assert policies.policy_from_text(policy.text) == policy
    assert policies.policy_from_text(SelectionPolicy().text) == SelectionPolicy()
    assert pickle.loads(pickle.dumps(policy)) == copy.deepcopy(policy) == policy


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"prefer": "fastest"}, "prefer: got 'fastest', expected one of default, vendor, reference"),
        ({"allow_vendors": "cuda"}, "allow_vendors: got 'cuda', expected a set"),
        ({"per_op": (("rmsnorm_fwd", ("vendor",)),)}, "per_op: got 'rmsnorm_fwd', expected a kernel"),
        (
            {"per_op": (("add", ("vendors",)),)},
            "per_op: got 'vendors', expected default, vendor, reference, vendor:NAME or impl:ID",
        ),
        ({"per_op": (("add", ("impl:",)),)}, "per_op: got 'impl:'"),
        (
            {"per_op": (("gemm_workspace", ("vendor",)),)},
            "per_op: got 'gemm_workspace', expected gemm or fp8_gemm: a workspace goes with",
        ),
        ({"per_op": {"add": "vendor"}}, "per_op: got add='vendor', expected a tuple of one token or more"),
        ({"per_op": {"add": ()}}, r"per_op: got add=\(\), expected a tuple of one token or more"),
        ({"per_op": "add=vendor"}, "per_op: got 'add=vendor', expected a mapping by kernel, or pairs"),
        ({"prefer": ["vendor"]}, r"prefer: got \['vendor'\], expected one of"),
        ({"strict": "0"}, "strict: got '0', expected True or False"),
        ({"deny_vendors": [3]}, r"deny_vendors: got \[3\], expected a set"),
        ({"backend": 3}, "backend: got 3, expected an engine's name"),
        ({"overrides": (("add", len),)}, "overrides: got 'add'"),
        ({"preferred": "vendor"}, "from_dict: got preferred, expected some of prefer, strict"),
    ],
)
def test_what_it_refuses(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(BackendError, match=said):
        SelectionPolicy.from_dict(wrong)


def test_helpers_change_one_thing_and_nest() -> None:
    assert get_policy() == SelectionPolicy()
    for put in (set_global_policy, lambda policy: policy_context(policy).__enter__()):
        with pytest.raises(BackendError, match="policy: got 'strict', expected a SelectionPolicy"):
            put("strict")  # type: ignore[arg-type]
    with with_strict_mode(), with_preference("reference"), with_denied_vendors("A"), with_denied_vendors("B"):
        with with_allowed_vendors("C", "d") as inside:
            assert get_policy() is inside
            assert inside == SelectionPolicy("reference", True, frozenset("cd"), frozenset("ab"))
        with pytest.raises(ZeroDivisionError), with_preference("default"):
            _ = 1 / 0
        assert get_policy() == SelectionPolicy("reference", True, None, frozenset("ab"))
    assert get_policy() == SelectionPolicy()
    set_global_policy(SelectionPolicy(strict=True))
    assert get_policy().strict
    reset_global_policy()
    assert not get_policy().strict


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({"FP8KIT_PREFER": "reference", "TE_FL_PREFER": "vendor"}, SelectionPolicy("reference")),
        ({"TE_FL_PREFER": "Flagos"}, SelectionPolicy("default")),
        ({"FP8KIT_PREFER": "flagos"}, SelectionPolicy("default")),
        ({"TE_FL_PREFER_VENDOR": "0"}, SelectionPolicy("default")),
        ({"TE_FL_PREFER_VENDOR": "0", "TE_FL_PREFER": "vendor"}, SelectionPolicy("vendor")),
        ({"FP8KIT_STRICT": "1"}, SelectionPolicy(strict=True)),
        ({"TE_FL_STRICT": "1"}, SelectionPolicy(strict=True)),
        ({"TE_FL_STRICT": "1", "FP8KIT_STRICT": "0"}, SelectionPolicy()),
        ({"FP8KIT_ALLOW_VENDORS": "Acme, cuda"}, SelectionPolicy(allow_vendors=frozenset({"acme", "cuda"}))),
        ({"TE_FL_DENY_VENDORS": "CUDA"}, SelectionPolicy(deny_vendors=frozenset({"cuda"}))),
        (
            {"TE_FL_SKIP_CUDA": "1", "FP8KIT_DENY_VENDORS": "x"},
            SelectionPolicy(deny_vendors=frozenset({"cuda", "x"})),
        ),
        (
            {"FP8KIT_PER_OP": "gemm=impl:cuda.gemm|flagos; add=vendor:x"},
            SelectionPolicy(per_op=(("add", ("vendor:x",)), ("gemm", ("impl:cuda.gemm", "default")))),
        ),
        (
            {"TE_FL_PER_OP": "rmsnorm_fwd=vendor;quantize=flagos"},
            SelectionPolicy(per_op=(("quantize", ("default",)),)),
        ),
    ],
)
def test_environment(
    variables: dict[str, str], wanted: SelectionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert policy_from_env() == wanted
    reset_global_policy()
    assert get_policy() == wanted
    for name in variables:
        monkeypatch.delenv(name)


def test_environment_refuses(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name, value, said in (
        ("FP8KIT_PREFER", "best", "environment: FP8KIT_PREFER: got 'best'"),
        ("TE_FL_PREFER", "best", "environment: TE_FL_PREFER: got 'best'"),
        ("FP8KIT_STRICT", "maybe", "FP8KIT_STRICT"),
        ("FP8KIT_PER_OP", "gemm", "FP8KIT_PER_OP"),
        ("FP8KIT_PER_OP", "gem=vendor", "'gem'"),
        ("TEFL_LOG_LEVEL", "LOUD", "environment: TEFL_LOG_LEVEL: got 'LOUD'"),
    ):
        with monkeypatch.context() as variables:
            variables.setenv(name, value)
            with pytest.raises(Fp8kitError, match=said):
                settings.log_level() if name == "TEFL_LOG_LEVEL" else policy_from_env()
    with monkeypatch.context() as variables:
        variables.setenv("FP8KIT_REPLAYS", "maybe")
        with pytest.raises(Fp8kitError, match="environment: FP8KIT_REPLAYS: got 'maybe', expected 0 or 1"):
            OpManager().discovered()
    monkeypatch.setenv("TE_FL_PER_OP", "rmsnorm_fwd=vendor")
    assert settings.per_op(KERNELS) == ()
    assert caplog.messages == ["TE_FL_PER_OP: rmsnorm_fwd is no kernel of fp8kit and is left out"]


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    found = logging.getLogger("fp8kit")
    level, handlers = found.level, list(found.handlers)
    found.handlers = []
    yield found
    found.setLevel(level)
    found.handlers = handlers


def test_the_log_level_is_the_loggers(logger: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    logger.setLevel(logging.ERROR)
    settings.set_log_level()
    assert logger.level == logging.ERROR  # the program's own choice
    for name in ("FP8KIT_LOG_LEVEL", "TEFL_LOG_LEVEL"):
        monkeypatch.setenv(name, "debug")
        settings.set_log_level()
        settings.set_log_level()
        assert logger.level == logging.DEBUG
        assert len(logger.handlers) == 1
        monkeypatch.delenv(name)
        logger.setLevel(logging.ERROR)


def test_tasks_that_take_turns_keep_their_policies() -> None:
    seen: list[tuple[str, str | None, bool]] = []

    async def task(name: str, turns: int, strict: bool) -> None:
        assert get_policy() == SelectionPolicy(prefer="default"), (
            "a task starts with the policy around the loop"
        )
        with (
            with_strict_mode() if strict else contextlib.nullcontext(),
            policy_context(SelectionPolicy(deny_vendors=frozenset({name}))),
        ):
            for _ in range(turns):
                await asyncio.sleep(0)
                seen.append(
                    (name, *sorted(get_policy().deny_vendors), policies.traced_policy() is get_policy())
                )
                with with_strict_mode():
                    await asyncio.sleep(0)
                    assert get_policy() == SelectionPolicy(strict=True, deny_vendors=frozenset({name}))
        assert get_policy() == SelectionPolicy(prefer="default")

    async def outside() -> None:
        for _ in range(8):
            assert get_policy() == SelectionPolicy(prefer="default")
            assert policies.traced_policy() is get_policy()
            await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(task("a", 3, False), outside(), task("b", 1, True), task("c", 5, False))

    with with_preference("default"):
        asyncio.run(main())
        assert get_policy() == SelectionPolicy(prefer="default")
    assert get_policy() == SelectionPolicy()
    assert policies.traced_policy() == SelectionPolicy()
    assert {name for name, *_ in seen} == {"a", "b", "c"}
    assert all(name == denied and seen_by_compiled for name, denied, seen_by_compiled in seen)


def test_a_switch_within_a_task_ends_with_its_block() -> None:
    async def one() -> None:
        with fk.use_backend("reference"):
            await asyncio.sleep(0)
            fk.deterministic()
            await asyncio.sleep(0)
            assert (get_policy().backend, get_policy().deterministic) == ("reference", True)
        assert get_policy() == SelectionPolicy()

    async def main() -> None:
        await asyncio.gather(one(), one())

    asyncio.run(main())
    assert get_policy() == SelectionPolicy()


def test_a_block_never_shows_in_another_thread() -> None:
    """Neither its policy nor, for the moment before it begins, what ``with`` is given."""
    done, seen = threading.Event(), set()

    def watch() -> None:
        while not done.is_set():
            seen.add(get_policy())

    switching, before = sys.getswitchinterval(), get_policy()
    thread = threading.Thread(target=watch)
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        for _ in range(2000):
            with fk.use_backend("reference"), with_strict_mode(), fk.deterministic():
                pass
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(switching)
    assert seen == {before}


def test_a_switch_without_a_block_reaches_every_thread() -> None:
    seen = []
    fk.deterministic()
    thread = threading.Thread(target=lambda: seen.append(get_policy().deterministic))
    thread.start()
    thread.join()
    assert seen == [True]
    kept = fk.deterministic(False)
    assert not get_policy().deterministic
    with kept:
        assert not get_policy().deterministic
    assert get_policy().deterministic, "a switch that turned out to be a block's is taken back"


def test_a_copied_context_brings_its_policy() -> None:
    with with_strict_mode():
        context = contextvars.copy_context()
    seen: list[bool] = []
    thread = threading.Thread(
        target=lambda: seen.extend([context.run(lambda: get_policy().strict), get_policy().strict])
    )
    thread.start()
    thread.join()
    assert seen == [True, False]


def test_texts_of_overrides_are_this_processs() -> None:
    def add(a: object, b: object, out: object, stream: int) -> None: ...

    with policy_context(
        SelectionPolicy(overrides=(("add", OpImpl("add", "x.add", Kind.DEFAULT, add)),))
    ) as inside:
        text = inside.text
    assert policies.policy_from_text(text) is inside
    del inside
    policies._INTERNED.clear()
    assert policies.policy_from_text(text).overrides[0][1].fn is add, "what a program names is kept"
    with pytest.raises(BackendError, match="overrides of this process"):
        policies.policy_from_text('{"overrides":"0123"}')


def test_variables_without_an_effect_are_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    variables = {
        "FP8KIT_DEVCE": "cpu",
        "FP8KIT_TEA": "1",
        "FP8KIT_DENY_VENDORS": "reference,CUDA",
        "TE_FL_ALLOW_VENDORS": "cda",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    OpManager().discovered()
    there = "there are cuda; fk.use_backend chooses an engine, FP8KIT_PREFER a kind"
    assert caplog.messages == [
        "FP8KIT_DEVCE is no variable that fp8kit reads; did you mean FP8KIT_DEVICE?",
        f"TE_FL_ALLOW_VENDORS: no implementation has the vendor 'cda': {there}; did you mean cuda?",
        f"FP8KIT_DENY_VENDORS: no implementation has the vendor 'reference': {there}",
    ]
