"""What all tests share: GPU tests are skipped where nobody asked for them and there is no GPU, those with a
make target of their own run when they are asked for, random state starts alike, and long files are reported.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from _pytest.mark.expression import Expression

from tests.support import source

# The frameworks' imports, and tracing, make objects by the million and drop most without a cycle: looked
# through less often, which takes a third off the time to collect the tests. A test that needs garbage to be
# gone asks for it.
gc.set_threshold(100_000, 50, 100)
# torch.compile collects garbage after each compilation
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")

# the first test on a machine, whichever that is, compiles: no part of what it logs
logging.getLogger("fp8kit").addFilter(
    lambda record: not record.getMessage().startswith("first use of the CPU engine")
)


# marks of tests that run only where ``-m`` names them
ASKED_FOR = ("gpu2", "kernels", "clients", "combinations", "programs", "report", "notebooks")
# files with nothing but tests of clients, beside those of tests/clients
CLIENTS = ("test_huggingface.py",)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The clients' packages take seconds to import: only where their tests are asked for."""
    asked = config.getoption("markexpr") or ""
    wanted = "clients" in asked or asked.startswith("gpu")
    found = collection_path.name in CLIENTS or collection_path.parent.name == "clients"
    return None if wanted or not found else True


@functools.cache
def left_out(expression: str) -> frozenset[str]:
    """The marks of ``ASKED_FOR`` whose tests a run with ``-m expression`` leaves out."""
    on_gpu = expression.startswith("gpu")
    asked = f"{expression} clients combinations programs" if on_gpu else expression
    return frozenset(mark for mark in ASKED_FOR if mark not in asked)


@functools.cache
def wanted(expression: str, marks: frozenset[str]) -> bool:
    """Whether a run with ``-m expression`` has a test with these marks."""
    if not marks.isdisjoint(left_out(expression)):
        return False
    return Expression.compile(expression).evaluate(lambda name, /, **values: name in marks)


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Make no items of the parameters that ``-m`` leaves out, which are more than half of all: as items they
    would take a third of the time to collect the tests. One of a function's always stays, and is left out
    later, since pytest runs a function without parameters as it is."""
    yield
    expression = metafunc.config.getoption("markexpr")
    if expression:
        marks = frozenset(mark.name for mark in metafunc.definition.iter_markers())
        metafunc._calls[:] = [
            call
            for call in metafunc._calls
            if wanted(expression, marks.union(mark.name for mark in call.marks))
        ] or metafunc._calls[:1]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked by one of ``ASKED_FOR`` unless ``-m`` names it; gpu2 then fails where there
    are no two GPUs, and clients, combinations and programs on a GPU run with the other tests there. Skip what
    is marked gpu where no CUDA device is usable, but not where ``-m`` begins with it: a run of the GPU tests
    that has no GPU fails. Nothing of CUDA is looked for when no test is marked."""
    asked = config.getoption("markexpr") or ""
    marks = left_out(asked)
    unasked = {item for item in items if not marks.isdisjoint(mark.name for mark in item.iter_markers())}
    if unasked:
        config.hook.pytest_deselected(items=[*unasked])
        items[:] = [item for item in items if item not in unasked]
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    if asked.startswith("gpu") or not marked:
        return
    from fp8kit import arrays

    if not arrays.available("cuda"):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no usable CUDA device here"))


def pytest_collection_finish() -> None:
    """The million objects that imports and tests themselves are stay to the end: what the many tests that ask
    the garbage collector, and benchmarks that do before they measure, need not look through again each time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _frozen_garbage() -> None:
    """Tests and the library ask the garbage collector again and again: what lives before a file's first test
    is not looked through each time, most of a second late in a run."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Every test starts from the same random state, whichever ran before it."""
    np.random.seed(0)  # noqa: NPY002  (libraries under test may draw from the legacy state)
    random = sys.modules.get("fp8kit.nn.random")
    if random is not None:
        random.manual_seed(0)


# of a kernel that ended its process's CUDA context
LOST = ("IllegalAddress", "MisalignedAddress", "IllegalInstruction", "LaunchFailure", "ERROR_ILLEGAL_ADDRESS")
_lost: list[str] = []


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Remember a test that lost the CUDA context."""
    if call.excinfo is not None and any(name in str(call.excinfo.value) for name in LOST):
        _lost.append(item.nodeid)


def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Every later test of a process without its CUDA context fails: xdist starts another process, and counts
    the test that was to come as one that crashed. Without xdist the run ends."""
    if _lost and "PYTEST_XDIST_WORKER" in os.environ:
        os._exit(1)
    if _lost:
        pytest.exit(f"{_lost[0]} lost the CUDA context", 1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """After the tests of tests/house: files that grow too long, and ideas whose files do not share a stem.
    Neither fails."""
    ran = {
        report.nodeid
        for reports in terminalreporter.stats.values()
        for report in reports
        if hasattr(report, "nodeid")
    }
    if not any(node.startswith("tests/house/") for node in ran):
        return
    for line in [*source.long_files(), *source.stems()]:
        terminalreporter.write_line(line)
