"""What all tests share: GPU tests are skipped where there is no GPU, those for two GPUs run when they are
asked for, random state starts alike, and the house's sizes are reported.
"""

from __future__ import annotations

import gc
import sys

import numpy as np
import pytest

from tests.support import source

# The frameworks' imports, and tracing, make objects by the million and drop most without a cycle: looked
# through less often, which takes a third off the time to collect the tests. A test that needs garbage to be
# gone asks for it.
gc.set_threshold(100_000, 50, 100)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked gpu2 unless ``-m`` names it: then it runs, and fails where there are no two
    GPUs. Skip what is marked gpu where no CUDA device is usable; nothing of CUDA is looked for when no test
    is marked."""
    if "gpu2" not in (config.getoption("markexpr") or ""):
        apart = [item for item in items if item.get_closest_marker("gpu2") is not None]
        if apart:
            config.hook.pytest_deselected(items=apart)
            items[:] = [item for item in items if item not in apart]
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not marked:
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


@pytest.fixture(scope="module")
def frozen_garbage() -> None:
    """For a file whose tests ask the garbage collector again and again: what lives before its first test is
    not looked through each time, most of a second late in a run."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Every test starts from the same random state, whichever ran before it."""
    np.random.seed(0)  # noqa: NPY002  (libraries under test may draw from the legacy state)
    random = sys.modules.get("fp8kit.nn.random")
    if random is not None:
        random.manual_seed(0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """After the house's own tests: files that grow too long, and ideas whose files do not share a stem.
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
