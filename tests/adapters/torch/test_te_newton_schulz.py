"""Transformer Engine's newton_schulz: orthogonal factors, of whole matrices and of parts of ranks."""

from __future__ import annotations

import pytest
import torch
from fp8kit_torch.te_compat.newton_schulz import (
    CusolverMpCtx,
    get_coefficient_iterator,
    get_coefficients,
    newton_schulz,
    newton_schulz_tp,
)

from fp8kit.collectives import FakeCollectives
from fp8kit.errors import ArgumentError, FormatError, ShapeError
from fp8kit.testing.compare import relative_error

M, N = 24, 40


def matrix(rows=M, columns=N, dtype=torch.float32):
    """With singular values from 0.1 to 0.9."""
    torch.manual_seed(0)
    least = min(rows, columns)
    u, v = (torch.linalg.qr(torch.randn(size, least))[0] for size in (rows, columns))
    return (u * torch.linspace(0.1, 0.9, least) @ v.T).to(dtype)


def by_singular_values(x, steps):
    """The polynomial of the singular values, in float64."""
    u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
    for a, b, c in steps:
        s = a * s + b * s**3 + c * s**5
    return u * s @ v


@pytest.mark.parametrize("shape", [(M, N), (N, M)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_singular_values_take_the_polynomials_steps(shape, dtype):
    x = matrix(*shape, dtype)
    want = by_singular_values(x, get_coefficients(5))
    newton_schulz(x, CusolverMpCtx())
    # five steps of products of a few dozen terms; the steepest slope is 4
    assert relative_error(x.double().numpy(), want.numpy()) < 64 * torch.finfo(dtype).eps


def test_polar_express_gives_the_orthogonal_factor():
    x = matrix()
    u, _, v = torch.linalg.svd(x.double(), full_matrices=False)
    newton_schulz(x, CusolverMpCtx(), 8, get_coefficients(8, "polar_express"))
    assert relative_error(x.double().numpy(), (u @ v).numpy()) < 0.01  # the coefficients have four decimals


def test_ranks_have_parts_of_the_columns():
    x, whole = matrix(), matrix()
    newton_schulz(whole, CusolverMpCtx())

    def rank(ranks):
        part = x.chunk(2, 1)[ranks.rank].contiguous()
        newton_schulz(part, CusolverMpCtx(ranks))
        return part

    got = torch.cat(FakeCollectives(2).run(rank), 1)
    assert relative_error(got.numpy(), whole.numpy()) < 2.0**-15  # sums in another order


@pytest.mark.parametrize("dim", [None, 0, 1])
@pytest.mark.parametrize("mode", ["duplicated", "distributed"])
def test_parts_of_a_tensor_parallel_weight(dim, mode):
    x, whole = matrix(), matrix()
    newton_schulz(whole, CusolverMpCtx())

    def rank(ranks):
        part = (x if dim is None else x.chunk(2, dim)[ranks.rank]).clone(
            memory_format=torch.contiguous_format
        )
        newton_schulz_tp(part, CusolverMpCtx(ranks), partition_dim=dim, tp_mode=mode)
        return part

    parts = FakeCollectives(2).run(rank)
    got = parts[0] if dim is None else torch.cat(parts, dim)
    assert relative_error(got.numpy(), whole.numpy()) < 2.0**-15


def test_coefficients_begin_anew_or_end_with_the_last():
    quintic, polar = get_coefficients(7), get_coefficients(10, "polar_express")
    assert quintic[5:] == quintic[:2]
    assert polar[8:] == [polar[7]] * 2
    assert list(get_coefficient_iterator(3, [(1, 2, 3), (4, 5, 6)])) == [(1, 2, 3), (4, 5, 6), (1, 2, 3)]


@pytest.mark.parametrize(
    ("error", "said", "call"),
    [
        (FormatError, "float32 or bfloat16", lambda ctx: newton_schulz(torch.zeros(2, 3).half(), ctx)),
        (ShapeError, "contiguous", lambda ctx: newton_schulz(torch.zeros(3, 2).T, ctx)),
        (ArgumentError, "CusolverMpCtx", lambda ctx: newton_schulz(torch.zeros(2, 3), None)),
        (ArgumentError, "5 times", lambda ctx: newton_schulz(torch.zeros(2, 3), ctx, 5, [(1, 2, 3)])),
        (ArgumentError, "quintic", lambda ctx: get_coefficients(5, "cubic")),
        (ArgumentError, "partition_dim", lambda c: newton_schulz_tp(torch.zeros(2, 3), c, partition_dim=2)),
        (ArgumentError, "coefficient_sets", lambda ctx: get_coefficient_iterator(5, [])),
    ],
)
def test_what_is_wrong_is_refused(error, said, call):
    with pytest.raises(error, match=said):
        call(CusolverMpCtx())
