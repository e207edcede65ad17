"""A matrix's orthogonal factor by Newton-Schulz iterations, which Muon's steps are made of, under Transformer
Engine's names: with plain products and sums over the ranks in the place of cuSolverMp."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, cycle, islice, repeat
from typing import Any, Literal

import torch
from torch import Tensor

from fp8kit.arguments import choice, integer, shown
from fp8kit.collectives import Collectives
from fp8kit.errors import ArgumentError, FormatError, ShapeError
from fp8kit_torch.fusible_ranks import AllGather, AllReduce, tensor_ranks

CoeffT = tuple[float, float, float]
CoeffIterMode = Literal["cycle", "repeat_last"]
NSCoeffT = Literal["simple", "quintic", "polar_express", "cans", "aol"]
_OP = "newton_schulz"

# Jordan et al. 2024, "Muon"; a quintic that is other for each step, of the same project; Amsel et al. 2025,
# arXiv 2505.16932, with its safety factor; Grishina et al. 2025, arXiv 2506.10935; Boissin et al. 2025,
# "Turbo-Muon". Rounded to four decimals, as Transformer Engine has them
_SETS: dict[str, tuple[CoeffT, ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
    "cans": (
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ),
    "aol": (
        (4.0098, -7.0585, 2.4635),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ),
}


def get_coefficient_iterator(
    steps: int, coefficient_sets: Sequence[CoeffT], mode: CoeffIterMode = "cycle"
) -> Iterator[CoeffT]:
    """The coefficients of so many steps: ``coefficient_sets`` one after the other, then from the first on
    ("cycle") or the last again ("repeat_last"). ArgumentError for none and for another mode."""
    integer("get_coefficient_iterator", "steps", steps, 0)
    choice("get_coefficient_iterator", "mode", mode, ("cycle", "repeat_last"))
    if not coefficient_sets:
        raise ArgumentError("get_coefficient_iterator", "coefficient_sets", "none", "at least one")
    more = repeat(coefficient_sets[-1])
    return islice(cycle(coefficient_sets) if mode == "cycle" else chain(coefficient_sets, more), steps)


def get_coefficients(steps: int, coefficient_type: NSCoeffT = "quintic") -> list[CoeffT]:
    """The coefficients (a, b, c) of so many steps, of a published set: "simple", "quintic", "polar_express",
    "cans" or "aol". Those whose last step converges repeat it, the others begin anew. ArgumentError for
    another name."""
    own = _SETS[choice("get_coefficients", "coefficient_type", coefficient_type, _SETS)]
    converges = coefficient_type in ("polar_express", "cans")
    return list(get_coefficient_iterator(steps, own, "repeat_last" if converges else "cycle"))


class CusolverMpCtx:
    """The ranks that ``newton_schulz`` works on, by the name that Transformer Engine has for it. ``group``: a
    process group, a ``Collectives``, or None for all processes. ``nranks``, ``rank``: of the group."""

    def __init__(self, group: Any = None) -> None:
        self.group = group
        found = self.ranks
        self.nranks, self.rank = (1, 0) if found is None else (found.size, found.rank)

    @property
    def ranks(self) -> Collectives | None:
        """What they communicate by; None for one rank."""
        return tensor_ranks("CusolverMpCtx", "group", self.group)

    def destroy(self) -> None:
        """Nothing: there is no library to leave."""


def newton_schulz(
    x: Tensor, ctx: CusolverMpCtx, num_iterations: int = 5, coefficients: Sequence[CoeffT] | None = None
) -> None:
    """Make of X in place, step by step, a X + b (X X^T) X + c (X X^T)^2 X: its singular values go to about 1
    where they are in (0, 1]. Nothing is normalised first.

    * ``x``: float32 or bfloat16 (m, n / ranks), contiguous: this rank's columns of X. With several ranks m is
      better not larger than n, since the ranks add their X X^T, (m, m).
    * ``ctx``: the ranks. ``coefficients``: (a, b, c) for each of ``num_iterations``; None: "quintic" of
      ``get_coefficients``.

    Products are in ``x``'s dtype. ShapeError, FormatError and ArgumentError for anything else.
    """
    _check(x, ctx)
    _iterate(x.detach(), ctx.ranks, _steps(num_iterations, coefficients))


def newton_schulz_tp(
    x: Tensor,
    ctx: CusolverMpCtx,
    num_iterations: int = 5,
    coefficients: Sequence[CoeffT] | None = None,
    partition_dim: int | None = None,
    tp_mode: Literal["duplicated", "distributed"] = "duplicated",
) -> None:
    """``newton_schulz`` of a weight of tensor-parallel ranks, in place.

    * ``partition_dim``: 0 or 1, the dimension of which each rank has its part; None: each has the whole.
    * ``tp_mode``: "distributed": of the parts as they lie; "duplicated": each rank gathers the whole first,
      so that it is the smaller side that is multiplied.
    """
    _check(x, ctx)
    if partition_dim is not None:
        choice("newton_schulz_tp", "tp_mode", tp_mode, ("duplicated", "distributed"))
        if partition_dim not in (0, 1) or isinstance(partition_dim, bool):
            raise ArgumentError("newton_schulz_tp", "partition_dim", shown(partition_dim), "0, 1 or None")
    own, ranks, steps = x.detach(), ctx.ranks, _steps(num_iterations, coefficients)
    if partition_dim is None or ranks is None:
        _iterate(own, None, steps)
    elif tp_mode == "distributed":
        part = own if partition_dim == 1 else own.mT.contiguous()
        _iterate(part, ranks, steps)
        own.copy_(part if partition_dim == 1 else part.mT)
    else:
        rows = own if partition_dim == 0 else own.mT.contiguous()
        whole = AllGather(ranks)(rows)
        _iterate(whole, None, steps)
        rows = whole.chunk(ranks.size)[ranks.rank]
        own.copy_(rows if partition_dim == 0 else rows.mT)


@torch.no_grad()
def _iterate(x: Tensor, ranks: Collectives | None, steps: Sequence[CoeffT]) -> None:
    """The steps in place; ``ranks``: that have parts of the columns."""
    transposed = ranks is None and x.shape[0] > x.shape[1]  # the same polynomial of the smaller X^T X
    work = x.mT.contiguous() if transposed else x
    for a, b, c in steps:
        gram = work @ work.mT
        if ranks is not None:
            gram = AllReduce(ranks)(gram)
        work = torch.addmm(work, torch.addmm(gram, gram, gram, beta=b, alpha=c), work, beta=a)
    x.copy_(work.mT if transposed else work)


def _steps(num_iterations: int, coefficients: Sequence[CoeffT] | None) -> Sequence[CoeffT]:
    integer(_OP, "num_iterations", num_iterations, 0)
    found = get_coefficients(num_iterations) if coefficients is None else list(coefficients)
    if len(found) != num_iterations or any(len(each) != 3 for each in found):
        raise ArgumentError(_OP, "coefficients", shown(coefficients), f"{num_iterations} times (a, b, c)")
    return found


def _check(x: Tensor, ctx: CusolverMpCtx) -> None:
    if not isinstance(ctx, CusolverMpCtx):
        raise ArgumentError(_OP, "ctx", shown(ctx), "a CusolverMpCtx")
    if not isinstance(x, Tensor) or x.ndim != 2 or not x.is_contiguous():
        raise ShapeError(_OP, "x", shown(x), "a contiguous tensor (m, n)")
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise FormatError(_OP, "x", x.dtype, "float32 or bfloat16")
