"""Every kernel of the CPU engine keeps the contract, and the contract's cases find whoever does not."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fp8kit import arrays
from fp8kit.accumulation import ACCUMULATIONS, Accumulation
from fp8kit.arrays import CPU, ArrayView
from fp8kit.backends import dispatch
from fp8kit.backends.protocol import KERNELS, SPECS, signature
from fp8kit.backends.reference import IMPLEMENTATIONS
from fp8kit.formats import float32
from fp8kit.testing import epsilon
from fp8kit.testing.contract import Case, SampleCall, cases
from fp8kit.testing.contract.gemm import modelled
from tests.support.combinations import combinations
from tests.support.contract import usual

LAUNCHING = [name for name in KERNELS if SPECS[name].launches]


@pytest.mark.parametrize("kernel", LAUNCHING)
def test_contract(kernel: str) -> None:
    keeps_the_contract(usual(kernel))


@pytest.mark.combinations
@pytest.mark.parametrize("kernel", LAUNCHING)
def test_the_other_cases(kernel: str) -> None:
    keeps_the_contract([case for case in cases(kernel) if case not in usual(kernel)])


def keeps_the_contract(chosen: Sequence[Case]) -> None:
    """Thousands in all, which would take pytest longer than they run. Those that fail are raised together,
    each with its name."""
    failed = []
    for case in chosen:
        try:
            case.run(dispatch.kernels(CPU), CPU)
        except Exception as error:
            error.add_note(f"in the case {case}")
            failed.append(error)
    if failed:
        raise ExceptionGroup(f"{len(failed)} cases", failed)


def test_every_kernel_has_a_case() -> None:
    assert {case.kernel for case in cases()} == set(LAUNCHING)
    assert {name for name in KERNELS if name.endswith("_workspace")} == set(KERNELS) - set(LAUNCHING)


def run_with(case: Case, function: Any) -> None:
    """Run a case of the CPU engine with another implementation of its kernel."""
    kernels: Any = SimpleNamespace(**{**vars(dispatch.kernels(CPU)), case.kernel: function})
    case.run(kernels, CPU)


def small_change(view: ArrayView) -> None:
    """Change the last element by some units of its last place, at least half a percent, and a code by one."""
    values = arrays.contiguous(view).numpy().copy().reshape(-1)
    if view.dtype.floating:
        last = np.float64(values[-1])
        values[-1] = 1 if np.isnan(last) or last == 0 else last * (1 + max(16 * epsilon(view.dtype), 2.0**-8))
    else:
        values[-1] ^= 1
    arrays.assign(view, arrays.as_view(values.reshape(view.shape)))


@pytest.mark.parametrize("kernel", LAUNCHING)
def test_a_slightly_wrong_element_is_found_in_every_output(kernel: str) -> None:
    spec, right = SPECS[kernel], IMPLEMENTATIONS[kernel]
    wanted, found = set(), set()
    for case in usual(kernel):
        call = SampleCall(case, dispatch.kernels(CPU), CPU)
        for name in [output.name for output in spec.outputs(call.arguments) if output.view.size]:
            stem = name.partition("[")[0]
            wanted.add(stem)
            if stem in found or case.options.get("known", True) is not True:
                continue

            def wrong(*args: Any, name: str = name) -> None:
                right(*args)
                for output in spec.outputs(spec.bind(*args)):
                    if output.name == name:
                        small_change(output.view)

            try:
                run_with(case, wrong)
            except AssertionError:
                found.add(stem)
    assert found == wanted


@pytest.mark.parametrize("where", ["before", "after", "input", "gap"])
def test_what_is_written_where_nothing_should_be_is_found(where: str) -> None:
    (case,) = (case for case in cases("copy") if case.name == "float32-into-rows")

    def careless(x: ArrayView, y: ArrayView, stream: int) -> None:
        IMPLEMENTATIONS["copy"](x, y, stream)
        at = {"before": (y, -1), "after": (y, 7 * 8), "input": (x, 3), "gap": (y, 5)}[where]
        at[0].with_strides((1,), (1,), at[1]).numpy()[0] = 7.0

    with pytest.raises(AssertionError, match=f"memory of {'x' if where == 'input' else 'y'}, beside"):
        run_with(case, careless)


@combinations({"kernel": ["fp8_gemm", "block_gemm"]}, usual=["fp8_gemm"])
def test_who_says_how_it_sums_is_held_to_every_bit(kernel: str) -> None:
    """A product by the model of those sums keeps the contract; float32's, which is within the bound, and
    the model of other sums, do not."""
    kernels, right = dispatch.kernels(CPU), IMPLEMENTATIONS[kernel]
    chosen = [case for case in cases(kernel) if case.options.get("dtype", float32) is float32]

    def says(call: Any) -> Accumulation:
        return ACCUMULATIONS["hopper_fast" if getattr(call, "fast_accumulate", False) else "hopper_split"]

    def product(cut: bool) -> Callable[..., None]:
        def call(*args: Any) -> None:
            right(*args)
            a = SimpleNamespace(**SPECS[kernel].bind(*args))
            how = says(a)
            how = replace(how, fraction_bits=how.fraction_bits - 1) if cut else how
            for value in modelled(how, kernels, a).values():
                arrays.assign(a.out, arrays.as_view(value))

        call._sums = says  # type: ignore[attr-defined]
        return call

    def plain(*args: Any) -> None:
        right(*args)

    plain._sums = says  # type: ignore[attr-defined]
    found = {"float32": 0, "cut": 0}
    for case in chosen:
        run_with(case, product(False))
        for name, other in (("float32", plain), ("cut", product(True))):
            try:
                run_with(case, other)
            except AssertionError:
                found[name] += 1
    assert min(found.values()) >= 10, found


def test_what_is_read_outside_an_input_shows() -> None:
    (case,) = (case for case in cases("sum_rows") if case.name == "float32-17x33")

    def greedy(x: ArrayView, out: ArrayView, workspace: Any, stream: int) -> None:
        beyond = x.with_strides((18, 33), (33, 1))
        IMPLEMENTATIONS["sum_rows"](beyond, out, workspace, stream)

    with pytest.raises(AssertionError, match=r"out: 33 of 33 differ"):
        run_with(case, greedy)


def test_bits_that_change_from_call_to_call_are_found() -> None:
    case = next(case for case in cases("l2norm") if case.name == "float32")
    calls = []

    def restless(xs: Any, out: ArrayView, workspace: Any, stream: int) -> None:
        IMPLEMENTATIONS["l2norm"](xs, out, workspace, stream)
        calls.append(None)
        values = out.numpy()
        values[0] = np.nextafter(values[0], np.float32(len(calls) % 2 * 1e9))

    with pytest.raises(AssertionError, match="out, the second time"):
        run_with(case, restless)


def test_case_names_are_unique() -> None:
    names = [str(case) for case in cases()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("kernel", KERNELS)
def test_signature(kernel: str) -> None:
    own = inspect.signature(IMPLEMENTATIONS[kernel])
    assert list(own.parameters) == list(signature(kernel).parameters)
