"""The kernel contract as tests: for every kernel sample calls and an oracle.

Each family of the contract has a module here, whose ``TESTS`` hold a ``KernelTest`` for each of its kernels:
``sample`` makes the arguments of a call for given sizes and options, ``oracle`` says from a call's arguments
what it must write and how exactly, ``cases`` are the options to try. What they say, and the ``KernelSpec``
beside the kernel's signature, is all that is known of a kernel: the cases here, ``fp8kit.lab`` and
``fp8kit.bench`` read it.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from fp8kit import arrays
from fp8kit.accumulation import Accumulation
from fp8kit.arrays import ArrayView, Device, Shape
from fp8kit.backends.protocol import KERNELS, SPECS, Kernels, KernelSpec, map_arrays, views
from fp8kit.errors import ArgumentError
from fp8kit.formats import HIGH_PRECISION, DType, float32, uint8
from fp8kit.testing.compare import (
    ROUNDOFF,
    Array,
    assert_close,
    assert_same_bits,
    assert_same_values,
    epsilon,
    sum_slack,
)
from fp8kit.testing.contract.casts import cast_results
from fp8kit.testing.contract.sampler import GUARD, Sampler, narrowed

__all__ = [
    "ROUNDOFF",
    "Arguments",
    "Array",
    "Case",
    "KernelTest",
    "Options",
    "Results",
    "SampleCall",
    "Sampler",
    "cases",
    "coded",
    "column_sums",
    "copied",
    "epsilon",
    "get",
    "host",
    "kernel_test",
    "narrowed",
    "poisoned",
    "product",
    "put",
    "sized",
    "snapshot",
    "sum_slack",
    "typed",
    "wide",
    "workspace",
]

# What an oracle says of an output: its bits, or a float64 value and the slack of ``assert_close``.
Expected = Array | tuple[Any, Any]
Results = dict[str, Expected]
Arguments = dict[str, Any]
Options = dict[str, Any]


@dataclass(frozen=True)
class KernelTest:
    """How a kernel is tested, and timed.

    * ``sample(sampler, rows, columns, **options)``: arguments by name; those that are absent need not be
      named, nor stream and workspace. Options have defaults; sizes of 0 are for samples that take others.
    * ``oracle(a)``: output -> ``Expected``; what is updated and not among them keeps its value. ``a`` has the
      call's arguments as they were before it, arrays as NumPy on the host, and its ``device``. What the spec
      derives from another array (``casts``, ``sums``, ``rounded``) is left out. None: the spec says it all.
    * ``cases``: name -> options, and those of ``Case``.
    * ``timed``: options of the call that is timed.
    * ``bits(how, kernels, a)``: output -> its bits in a call with the arguments ``a``, on the device, of an
      implementation that says by its ``_sums`` how it adds: ``how``. Empty where the bits are not known.
    """

    kernel: str
    sample: Callable[..., Arguments]
    oracle: Callable[[Any], Results] | None
    cases: Mapping[str, Options] = field(repr=False)
    timed: Mapping[str, Any] = field(default_factory=dict)
    bits: Callable[[Accumulation, Any, Any], Results] | None = None

    def arguments(
        self,
        sampler: Sampler,
        m: int = 0,
        n: int = 0,
        parts: Mapping[str, tuple[int | None, int, int]] | None = None,
        same: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Arguments:
        """The arguments of a call by name; ``parts``, ``same``: see ``Case``."""
        spec = SPECS[self.kernel]
        made = spec.complete(self.sample(sampler, m, n, **options))
        placed = {id(made[name]): sampler.part(made[name], *place) for name, place in (parts or {}).items()}
        made = {name: placed.get(id(value), value) for name, value in made.items()}
        made |= {name: made[other] for name, other in (same or {}).items()}
        if spec.workspace is not None and sampler.kernels is not None:
            nbytes = spec.workspace_bytes(sampler.kernels, made)
            made["workspace"] = sampler.workspace(nbytes) if "workspace" in made else None
        return made

    def expected(self, a: Any, stored: Mapping[str, Array]) -> Results:
        """Output -> what a call with the arguments ``a`` must write. ``stored``: results that others are
        derived from, as they were stored."""
        spec = SPECS[self.kernel]
        with np.errstate(all="ignore"):
            found = dict(self.oracle(a)) if self.oracle is not None else {}
        for output, source in spec.sums.items():
            if getattr(a, output) is not None:
                found[output] = column_sums(stored[source] if source in stored else getattr(a, source))
        for output, source in spec.rounded.items():
            for i, rounded in enumerate(getattr(a, output)):
                if f"{source}[{i}]" in found:
                    found[f"{output}[{i}]"] = stored[f"{source}[{i}]"].astype(rounded.dtype)
        if spec.casts:
            found |= cast_results(a, stored.get(spec.casts, getattr(a, spec.casts)))
        for name in spec.updates:
            found = named(name, getattr(a, name)) | found
        return found

    def slacks(self, a: Any) -> dict[str, Any]:
        """Output -> by how much a right result may differ from exact arithmetic before it is rounded; "cast"
        and "amax": by how much the stored values may that are cast. Nothing for what is known bit for bit."""
        spec = SPECS[self.kernel]
        close: dict[str, tuple[Any, Any]] = {}
        if not spec.exact and self.oracle is not None:
            with np.errstate(all="ignore"):
                close = {name: want for name, want in self.oracle(a).items() if isinstance(want, tuple)}
        stored = {
            name: slack + epsilon(a.x.dtype if hasattr(a, "x") else a.dtype.numpy) / 2 * np.abs(value)
            for name, (value, slack) in close.items()
            if name in (spec.casts, *spec.sums.values())
        }
        found = {name: slack for name, (_, slack) in close.items()}
        for output, source in spec.sums.items():
            if getattr(a, output) is not None:
                found[output] = column_sums(close[source][0] if source in close else getattr(a, source))[1]
                found[output] = found[output] + (stored[source].sum(0) if source in stored else 0)
        for output, source in spec.rounded.items():
            for i in range(len(getattr(a, source))):
                if f"{source}[{i}]" in found:
                    found[f"{output}[{i}]"] = found[f"{source}[{i}]"]
        if spec.casts in stored:
            found |= dict.fromkeys(("cast", "amax"), whole := stored[spec.casts])
            if getattr(a, "second", None) is not None:
                found["cast"], found["second"] = np.split(whole, 2, axis=1)
        return found


@dataclass(frozen=True)
class Case:
    """One case: ``run(kernels, device)`` raises AssertionError when ``kernel`` does not keep the contract.

    ``options``: the sample's, and ``dtype`` (float32); ``parts``: argument -> (axis, elements before, after),
    the larger array that it is a part of (``Sampler.part``); ``same``: argument -> the one that it is;
    ``known``: False where nothing but the bounds of the arrays is promised, and that results come from
    nowhere else ("lost": some are NaN).
    """

    kernel: str
    name: str
    test: KernelTest = field(repr=False)
    options: Options = field(repr=False)

    def __str__(self) -> str:
        return f"{self.kernel}-{self.name}"

    def run(self, kernels: Kernels, device: Device) -> dict[str, Array]:
        """Make the call and compare all that it wrote, and the memory round it. The results by name."""
        spec, own = SPECS[self.kernel], self.options
        call = SampleCall(self, kernels, device)
        plain: dict[str, Array] = {}  # results of the same call without its cast
        if spec.casts in spec.writes and (own.get("cast") is not None or own.get("amax") is not None):
            options = {**own, "cast": None, "amax": None, spec.casts: True}
            options |= {"split": False} if "split" in own else {}
            plain = replace(self, options=options).run(kernels, device)
            if "tile" in (own.get("cast") or {}):  # by another kernel, which adds in another order
                plain = {name: got for name, got in plain.items() if name not in spec.sums}
        results = call.run(kernels)
        if own.get("known", True) is True:
            expected = self.test.expected(call.before, {**results, **plain}) | plain
            say, given = getattr(getattr(kernels, self.kernel), "_sums", None), call.arguments
            how = None if say is None else say(SimpleNamespace(**given))
            if self.test.bits is not None and how is not None:
                expected |= self.test.bits(how, kernels, SimpleNamespace(**given))
            for name, got in results.items():
                compare(name, got, expected[name])
        elif own["known"] is False:
            for name, got in results.items():
                if np.isnan(got.astype(np.float32)).any():
                    raise AssertionError(f"{name}: NaN from outside an input")
        call.check_memory()
        if spec.ordered and own.get("known", True) is True:
            for name, again in SampleCall(self, kernels, device).run(kernels).items():
                assert_same_bits(f"{name}, the second time", again, results[name])
        return results


class SampleCall:
    """The call of a case: its ``arguments`` on a device, and what they held ``before``."""

    def __init__(self, case: Case, kernels: Any, device: Device) -> None:
        self.spec: KernelSpec = SPECS[case.kernel]
        self.sampler = Sampler(kernels, device, case.options.get("dtype", float32), GUARD)
        options = {name: value for name, value in case.options.items() if name not in ("dtype", "known")}
        self.arguments = case.test.arguments(self.sampler, **options)
        self.before = snapshot(self.arguments, device)
        self._memory = [get(view).copy() for view in self.sampler.buffers]

    def run(self, kernels: Any) -> dict[str, Array]:
        """Make it; the results by name."""
        self.spec.call(kernels, self.arguments)
        return {output.name: host(output.view) for output in self.spec.outputs(self.arguments)}

    def check_memory(self) -> None:
        """AssertionError where anything but the outputs and the workspace has changed."""
        written = [output.view for output in self.spec.outputs(self.arguments)]
        if self.arguments.get("workspace") is not None:
            written.append(self.arguments["workspace"])
        for whole, before in zip(self.sampler.buffers, self._memory, strict=True):
            after = get(whole)
            for view in written:
                if _within(view, whole):
                    _region(before, whole, view)[...] = _region(after, whole, view)
            if not np.array_equal(after.view(np.uint8), before.view(np.uint8)):
                found = {
                    n: v for n, v in self.arguments.items() if any(_within(w, whole) for w in views([v]))
                }
                assert_same_bits(f"memory of {' or '.join(found)}, beside what is written", after, before)


def _region(memory: Array, whole: ArrayView, view: ArrayView) -> Array:
    start = (view.ptr - whole.ptr) // whole.dtype.itemsize
    return arrays.as_view(memory).with_strides(view.shape, view.strides, start).numpy()


def _within(view: ArrayView, whole: ArrayView) -> bool:
    return whole.ptr <= view.ptr < whole.ptr + whole.nbytes


def compare(name: str, got: Array, expected: Expected) -> None:
    """AssertionError with the first coordinate where a result is not what is expected."""
    if isinstance(expected, tuple):
        assert_close(name, got, expected[0], got.dtype, expected[1])
    else:
        assert_same_values(name, got, expected)


def named(name: str, value: Any) -> dict[str, Any]:
    """The results in one argument, an array or a list of them, by name."""
    return {f"{name}[{i}]": x for i, x in enumerate(value)} if isinstance(value, list) else {name: value}


def summed(terms: Array) -> tuple[Array, Array]:
    """Column sums in float64, and the error that float32 may make."""
    return terms.sum(0), sum_slack(np.abs(terms).sum(0), len(terms))


def column_sums(x: Array) -> Expected:
    """Column sums of an array as it is stored."""
    return summed(wide(x))


@functools.cache
def kernel_test(kernel: str) -> KernelTest:
    """How a kernel is tested. KeyError for one that works on no arrays; ArgumentError where its family's file
    has no test of it."""
    module = importlib.import_module(f"{__name__}.{SPECS[kernel].family}")
    tests: dict[str, KernelTest] = {test.kernel: test for test in module.TESTS}
    if kernel not in tests and SPECS[kernel].launches:
        wanted = f"a KernelTest of it in TESTS of {module.__file__}"
        raise ArgumentError("contract", "kernel", kernel, wanted)
    return tests[kernel]


def cases(kernel: str | None = None) -> Iterator[Case]:
    """Every case, or those of one kernel."""
    for name in KERNELS if kernel is None else [kernel]:
        if SPECS[name].launches:
            test = kernel_test(name)
            yield from (Case(name, case, test, options) for case, options in test.cases.items())


def product(name: str, axes: Mapping[str, Iterable[Any]], /, **options: Any) -> dict[str, Options]:
    """A case for each combination of the axes' values, named by ``name.format`` of them.

    Axis -> the values of the option that it names, or of several, "m n", side by side; where the values are a
    mapping, the axis stands for its keys in the name, each of which brings options of its own.
    """
    found: dict[str, Options] = {}
    for values in itertools.product(*axes.values()):
        words: Options = {}
        own = dict(options)
        for (axis, choices), value in zip(axes.items(), values, strict=True):
            chosen = dict(zip(axis.split(), value, strict=True)) if " " in axis else {axis: value}
            words |= chosen
            own |= choices[value] if isinstance(choices, Mapping) else chosen
        found[name.format(**words).rstrip("-")] = own
    return found


def typed(cases: Mapping[str, Options], dtypes: tuple[DType, ...] = HIGH_PRECISION) -> dict[str, Options]:
    """Cases in every dtype, whose name comes first."""
    return product("{dtype.name}-{case}", {"dtype": dtypes, "case": cases})


def sized(sizes: Iterable[tuple[int, int]], **options: Any) -> dict[str, Options]:
    """A case for each (rows, columns)."""
    return product("{m}x{n}", {"m n": sizes}, **options)


def coded(
    result: str, m: int, n: int, pad: tuple[int, int] = (0, 0), keep: bool = False, **cast: Any
) -> Options:
    """A case with a cast of ``result``; ``keep``: with the result itself beside it."""
    return {"m": m, "n": n, result: keep, "cast": {"pad": pad, **cast}}


def copied(arguments: Mapping[str, Any]) -> Arguments:
    """The arguments of a call with every array copied to the host, C-contiguous; what was one array stays
    one. Of a workspace nothing but the size matters."""
    made: dict[tuple[object, ...], ArrayView] = {}

    def copy(view: ArrayView) -> ArrayView:
        key = (view.ptr, view.shape, view.strides, view.dtype.name)
        if key not in made:
            made[key] = arrays.as_view(host(view).copy())
        return made[key]

    copies = {name: map_arrays(value, copy) for name, value in arguments.items() if name != "workspace"}
    space = arguments.get("workspace")
    return {**copies, "workspace": None if space is None else workspace(space.size, arrays.CPU), "stream": 0}


def snapshot(arguments: Mapping[str, Any], device: Device) -> Any:
    """The arguments of a call on ``device`` as an oracle takes them."""
    values = {name: map_arrays(value, ArrayView.numpy) for name, value in copied(arguments).items()}
    return SimpleNamespace(**values, device=device)


def wide(values: Any) -> Array:
    """Values as float64, for the oracles."""
    return np.asarray(values).astype(np.float64)


def put(array: Any, device: Device) -> ArrayView:
    """A NumPy array on ``device`` (a copy, also on the CPU)."""
    return arrays.to(np.array(array, copy=True, order="C"), device)


def poisoned(shape: Shape, dtype: DType, device: Device) -> ArrayView:
    """An output to be written: every byte 0xFF (NaN in float types), so that what a kernel leaves out
    shows."""
    return Sampler(None, device).output(*shape, dtype=dtype)


def workspace(nbytes: int, device: Device) -> ArrayView:
    """A workspace of that many bytes, poisoned."""
    return poisoned((max(nbytes, 1),), uint8, device)


def get(view: ArrayView) -> Array:
    """The view's values on the host, after the device's work is done."""
    arrays.synchronize(view.device)
    return view.numpy()


def host(view: ArrayView) -> Array:
    """Values of a view that may be strided, on the host."""
    return get(arrays.contiguous(view))
