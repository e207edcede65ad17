"""Casts of several matrices at once, and of groups of rows, without a GPU: what the host tells the kernels,
carried out matrix by matrix and block by block from the addresses at which the kernels find them, keeps the
contract."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fp8kit.arrays import CPU, ArrayView, as_view
from fp8kit.backends import dispatch
from fp8kit.backends.cuda import implementation, launch
from fp8kit.backends.protocol import SPECS, Cast, Rule, map_arrays
from fp8kit.formats import float32, int32, uint8
from fp8kit.testing.contract import Case, cases
from fp8kit.testing.contract.grouped import live
from tests.support.casts_at import FORMATS, TYPES, at, blocks, tiles
from tests.support.hopper import GPU


def tensors(how: dict[str, str], grid: int, *args: Any) -> int:
    """``quantize_stack``, by the scales of tensors; how many matrices the grid has."""
    x, q, q_t, amax, scale_inv, rows, columns, high, wide, epsilon, power_2 = args
    count, rest = divmod(grid, tiles(high, 128) * tiles(wide, 64))
    assert not rest
    for e in range(count):
        scales: Any = at(scale_inv, e, (1,), float32)
        to = at(q, e, (high, wide), uint8), at(q_t, e, (wide, high), uint8)
        rule = Rule(bool(power_2), epsilon)
        cast = Cast(FORMATS[how["FORMAT"]], *to, None, scales, at(amax, e, (1,), float32), rule)
        source: Any = at(x, e, (rows, columns), TYPES[how["T"]])
        dispatch.kernels(CPU).quantize_transpose(source, cast, None, None, 0)
    return count


def group_amax(how: dict[str, str], grid: int, *args: Any) -> int:
    """``amax_groups``, block by block; one matrix."""
    x, amax, sizes, groups, rows, columns, slots, across, chunk, by_column = args
    assert 256 % across == 0
    source: Any = at(x, 0, (rows, columns), TYPES[how["T"]])
    own: Any = at(sizes, 0, (groups,), int32)
    found: Any = at(amax, 0, (columns if by_column else 1,), float32)
    values, made = np.abs(live(source.numpy(), own.numpy(), slots).astype(np.float32)), found.numpy()
    values, panels = np.where(np.isnan(values), 0, values), tiles(columns, 8 * across)
    for block in range(grid):
        down, right = block // panels * chunk, block % panels * 8 * across
        part = values[down : down + chunk, right : right + 8 * across]
        to = made[right : right + 8 * across] if by_column else made
        to[...] = np.maximum(to, part.max(0, initial=0) if by_column else part.max(initial=0))
    return 1


def group_blocks(how: dict[str, str], grid: int, *args: Any) -> int:
    """``block_quantize_groups``: ``block_quantize`` of what is left."""
    x, *made, sizes, groups, slots = args
    rows, columns, dtype = made[4], made[5], TYPES[how["T"]]
    source: Any = at(x, 0, (rows, columns), dtype)
    own: Any = at(sizes, 0, (groups,), int32)
    kept = np.ascontiguousarray(live(source.numpy(), own.numpy(), slots))
    scales = [0, 0]
    for i, (lines, along) in enumerate(((made[6], tiles(columns, 128)), (made[7], tiles(rows, 128)))):
        scales[i] = tiles(lines, 128) * (-(-along // 4) * 4) if made[8] else along * lines
    return blocks(how, grid, as_view(kept).ptr, *made[:8], *scales, *made[8:])


KERNELS = {
    "quantize_stack": tensors,
    "block_quantize_stack": blocks,
    "group_amax": group_amax,
    "block_quantize_groups": group_blocks,
}
SOURCES = {"group_amax": "amax_groups"}  # what a kernel is called in its source, where not as in the contract


class Emulated:
    """The CPU engine, but for the stacks, which the CUDA engine's host code launches."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def __getattr__(self, name: str) -> Any:
        if name not in KERNELS:
            return getattr(dispatch.kernels(CPU), name)

        def there(view: ArrayView) -> ArrayView:
            return ArrayView(view.ptr, view.shape, view.dtype, GPU, view, view._strides)

        def run(kernel: launch.Kernel, grid: int, threads: int, args: Any, *rest: Any) -> None:
            assert (kernel.name, threads) == (SOURCES.get(name, name), 256)
            self.counts.append(KERNELS[name](dict(kernel.defines), grid, *args))

        def call(*args: Any, **named: Any) -> None:
            given = {key: map_arrays(value, there) for key, value in SPECS[name].bind(*args, **named).items()}
            with launch.launching_by(run):
                implementation(name)(**given)

        return call


@pytest.mark.parametrize("case", [case for name in KERNELS for case in cases(name)], ids=str)
def test_kernels_of_stacks_are_told_where_things_are(case: Case) -> None:
    kernels = Emulated()
    case.run(kernels, CPU)  # type: ignore[arg-type]
    if case.kernel.endswith("_stack"):
        assert set(kernels.counts) == {case.options.get("matrices", 3)}
