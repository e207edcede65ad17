"""The activations of the kernel contract: a table that the engines, the operations and their tests read.

With u the input, sigma(z) = 1 / (1 + exp(-z)), and for gated ones u the first half of the columns, v the
second (GLU family: Shazeer 2020):

==============  =============================================================================================
gelu            u sigma(2 sqrt(2 / pi) (u + 0.044715 u^3)), the tanh form of Hendrycks & Gimpel 2016
qgelu           u sigma(1.702 u), their sigmoid form
silu            u sigma(u)
relu            max(u, 0)
srelu           max(u, 0)^2 (So et al. 2021)
glu             sigma(u) v (Dauphin et al. 2017)
geglu, qgeglu   gelu(u) v, qgelu(u) v
reglu, sreglu   relu(u) v, srelu(u) v
swiglu          silu(u) v
clamped_swiglu  c sigma(alpha c) (d + glu_linear_offset), c = min(u, limit), d = v held in
                [-limit, limit] (OpenAI's gpt-oss)
==============  =============================================================================================

Names, parameters and defaults are Transformer Engine's. Beyond its limit a clamped input has the gradient 0,
at the limit that of the inside.

``LEARNED`` has those with learned numbers, for which kernels of their own exist:

==============  =============================================================================================
xielu           u > 0: p u^2 + beta u, else n (expm1(min(u, eps)) - u) + beta u, with the positive numbers p =
                softplus(alpha_p) and n = beta + softplus(alpha_n), alpha_p and alpha_n learned (Huang &
                Schlag 2024, arXiv:2411.13010). The slope is 2 p u + beta, else n expm1(min(u, eps)) + beta
==============  =============================================================================================

``alpha_p`` and ``alpha_n`` are what Hugging Face's ``XIELUActivation`` calls them; p and n start at 0.8 each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from fp8kit.errors import BackendError

_NONE: Mapping[str, float] = MappingProxyType({})


class Activation(NamedTuple):
    """``gated``: the input has two halves of columns, the output one. ``params``: the numbers that kernels
    take, in this order, with their defaults. ``learned``: parameters of one number each, with the values that
    they start at. ``linear``: the second half multiplies as it is, so that a scale may be taken out of it."""

    gated: bool
    params: Mapping[str, float] = _NONE
    learned: Mapping[str, float] = _NONE
    linear: bool = False

    @property
    def parts(self) -> int:
        """Columns of the input for one of the output."""
        return 2 if self.gated else 1


ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        **{name: Activation(False) for name in ("gelu", "qgelu", "relu", "silu", "srelu")},
        **{
            name: Activation(True, linear=True)
            for name in ("geglu", "glu", "qgeglu", "reglu", "sreglu", "swiglu")
        },
        "clamped_swiglu": Activation(
            True, MappingProxyType({"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0})
        ),
    }
)

_START, _BETA = 0.8, 0.5  # of both numbers; of beta, the least that n can be
LEARNED: Mapping[str, Activation] = MappingProxyType(
    {
        "xielu": Activation(
            False,
            MappingProxyType({"beta": _BETA, "eps": -1e-6}),
            MappingProxyType(
                {"alpha_p": math.log(math.expm1(_START)), "alpha_n": math.log(math.expm1(_START - _BETA))}
            ),
        )
    }
)
ALL: Mapping[str, Activation] = MappingProxyType({**ACTIVATIONS, **LEARNED})


WALKED = 512  # rows that a sum of columns is made of at once, at most, in any engine


def rows_in_dy(rows: int, dy_row: int, codes_row: int) -> int:
    """Returns how many of the first rows of a gradient's codes may lie in the last bytes of ``dy``, of which
    a row takes ``dy_row`` bytes, of the codes ``codes_row``; a multiple of ``WALKED``. Rows of dy that they
    lie in come behind as many others, so they have been read once all rows behind the first are done."""
    return rows * dy_row // (dy_row + codes_row) // WALKED * WALKED


def known(activation: str, params: tuple[float, ...]) -> Activation:
    """Returns the activation's row of the table. BackendError for an unknown one, and for another number of
    parameters."""
    row = ACTIVATIONS.get(activation)
    if row is None:
        raise BackendError("activation", "activation", repr(activation), f"one of {', '.join(ACTIVATIONS)}")
    if len(params) != len(row.params):
        raise BackendError("activation", "params", params, f"{len(row.params)} numbers for {activation}")
    return row
