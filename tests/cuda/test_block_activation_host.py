"""Activations that cast by blocks, without a GPU: what the host tells the kernels, carried out from the
addresses at which the kernels find them, keeps the contract."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fp8kit.arrays import CPU, ArrayView, as_view, empty
from fp8kit.backends import dispatch
from fp8kit.backends.activation import ACTIVATIONS
from fp8kit.backends.cuda import activation, implementation, launch
from fp8kit.backends.protocol import BLOCK, SPECS, map_arrays
from fp8kit.errors import BackendError
from fp8kit.formats import float32
from fp8kit.testing.contract import Case, SampleCall, cases
from tests.support.casts_at import TYPES, at, blocks, tiles
from tests.support.contract import params
from tests.support.hopper import GPU


class Emulated:
    """The CPU engine, but for activations, which the CUDA engine's host code launches."""

    def __init__(self) -> None:
        self.dx: ArrayView | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "act_bwd_workspace":
            return activation.act_bwd_workspace
        if name not in ("act_fwd", "act_bwd"):
            return getattr(dispatch.kernels(CPU), name)
        if name == "act_fwd":
            self.dx = None

        def there(view: ArrayView) -> ArrayView:
            return ArrayView(view.ptr, view.shape, view.dtype, GPU, view, view._strides)

        def run(kernel: launch.Kernel, grid: Any, threads: Any, args: Any, *rest: Any) -> None:
            getattr(self, f"_{kernel.name}")(dict(kernel.defines), grid, *args)

        def call(*args: Any, **named: Any) -> None:
            given = SPECS[name].bind(*args, **named)
            if given["cast"] is None:  # the same result without its cast
                SPECS[name].call(dispatch.kernels(CPU), {**given, "stream": 0})
                return
            with launch.launching_by(run):
                implementation(name)(**{key: map_arrays(value, there) for key, value in given.items()})

        return call

    def _block_act_fwd(self, how: dict[str, str], grid: int, *args: Any) -> None:
        (x, bias, y, rows, columns, *numbers), cast = args[:8], args[8:]
        dtype, row = TYPES[how["T"]], ACTIVATIONS[how["ACT"]]
        made = at(y, 0, (rows, columns), dtype) or empty((rows, columns), dtype, CPU)
        source, width = at(x, 0, (rows, row.parts * columns), dtype), row.parts * columns
        summand, params = at(bias, 0, (width,), dtype), tuple(numbers[: len(row.params)])
        dispatch.kernels(CPU).act_fwd(source, summand, made, None, None, how["ACT"], params, 0)
        assert grid == -(-rows // BLOCK) * -(-columns // BLOCK)
        self._cast(how, made, *cast)

    def _block_act_bwd(self, how: dict[str, str], grid: int, *args: Any) -> None:
        (dy, x, bias, dx, partial, rows, columns, begin, end, walk, *numbers), cast = args[:13], args[13:]
        dtype, row = TYPES[how["T"]], ACTIVATIONS[how["ACT"]]
        width, start, stop = row.parts * columns, begin * BLOCK, min(end * BLOCK, rows)
        assert grid == -(-(end - begin) // walk) * -(-width // BLOCK)
        assert not begin % walk
        if self.dx is None or self.dx.shape != (rows, width):
            self.dx = at(dx, 0, (rows, width), dtype) or empty((rows, width), dtype, CPU)
        own, part = self.dx, self.dx.slice(0, start, stop - start)
        given: list[Any] = [at(dy, 0, (rows, columns), dtype), at(x, 0, (rows, width), dtype)]
        given = [as_view(view.slice(0, start, stop - start).numpy().copy()) for view in given]
        params = tuple(numbers[: len(row.params)])
        summand = at(bias, 0, (width,), dtype)
        how_made = None, None, None, None, how["ACT"], params, None, 0
        dispatch.kernels(CPU).act_bwd(*given, summand, part, *how_made)
        for first in range(begin, end, walk) if partial else ():
            sums: Any = at(partial, first // walk, (width,), float32)
            some = own.numpy()[first * BLOCK : min(first + walk, end) * BLOCK].astype(np.float32)
            sums.numpy()[...] = some.sum(0)
        if begin == 0:  # the last rows that are done
            self._cast(how, own, *cast)
            self.dx = None

    def _sum_partials(self, how: dict[str, str], grid: Any, *args: Any) -> None:
        partial, out, second, count, columns = args
        terms: Any = at(partial, 0, (count, columns), float32)
        to: Any = at(out, 0, (columns,), TYPES[how["T"]])
        assert not second
        to.numpy()[...] = terms.numpy().sum(0).astype(to.dtype.numpy)

    @staticmethod
    def _cast(how: dict[str, str], made: ArrayView, *cast: Any) -> None:
        if not made.size:
            return
        *places, high, high_t, square, most, epsilon, for_inf, power_2, is_e5m2 = cast
        rows, columns = made.shape
        sizes = []
        for lines, along in ((high, tiles(columns, BLOCK)), (high_t, tiles(rows, BLOCK))):
            sizes.append(tiles(lines, BLOCK) * (-(-along // 4) * 4) if square else along * lines)
        grid = tiles(rows, BLOCK) * tiles(columns, BLOCK)
        named = {**how, "FORMAT": "e5m2" if is_e5m2 else "e4m3"}
        rule = most, epsilon, for_inf, power_2
        blocks(named, grid, made.ptr, *places, rows, columns, high, high_t, *sizes, square, *rule)


CASES = {
    name: [
        case
        for case in cases(name)
        if "blocks" in case.name
        and case.name.partition("-")[2].startswith(("gelu", "swiglu", "clamped_swiglu"))
    ]
    for name in ("act_fwd", "act_bwd")
}


@pytest.mark.parametrize("case", [case for found in CASES.values() for case in params(found)])
def test_kernels_are_told_where_things_are(case: Case) -> None:
    case.run(Emulated(), CPU)  # type: ignore[arg-type]


def test_what_no_kernel_casts_by_blocks_is_refused() -> None:
    (case,) = (case for case in cases("act_bwd") if case.name == "bfloat16-swiglu-blocks-1x128-128x256")
    given = SampleCall(case, dispatch.kernels(CPU), CPU).arguments
    with pytest.raises(BackendError, match="None beside a cast by blocks"):
        implementation("act_bwd")(**{**given, "second": given["cast"]})
    norm = {"normalization": "L2Normalization", "epsilon": 1e-5, "zero_centered_gamma": False, "stream": 0}
    x = given["x"]
    rstd = empty((x.shape[0],), float32, CPU)
    arrays = x, None, None, None, None, rstd, None, given["cast"]
    for norm_fwd in (implementation("norm_fwd"), dispatch.kernels(CPU).norm_fwd):
        with pytest.raises(BackendError, match=r"norm_fwd.*cast\.tile"):
            norm_fwd(*arrays, *norm.values())
