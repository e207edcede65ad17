"""``GroupedLinear`` and ``GroupedMLP`` on the native tape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fp8kit import layers
from fp8kit.arrays import ArrayView
from fp8kit.autograd import Tensor, tensor
from fp8kit.layers.base import Init
from fp8kit.layers.grouped import host_sizes, want_tokens
from fp8kit.nn.fp8 import Fp8Module
from fp8kit.nn.layer import NativeLayer


class GroupedLinear(layers.GroupedLinearBase, Fp8Module):
    """y_i = x_i W_i^T + b_i for ``num_gemms`` groups of rows.

    ``num_gemms`` N, ``in_features`` K, ``out_features`` M; the others as ``Linear``'s. Parameters ``weight0``
    (M, K), ``bias0`` (M,), ``weight1``, .... Under ``autocast`` the three GEMMs of each group run in FP8,
    each with scales of its own; a group without rows runs none, and its scales do not age.
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        init_method: Init | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: Any = None,
        device: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.add_groups(self.checked(locals()))

    def row_groups(self, x: Any, sizes: Sequence[int]) -> list[ArrayView]:
        rows = (x.view if isinstance(x, Tensor) else x).rows()
        starts = np.cumsum([0, *sizes]).tolist()
        return [rows.slice(0, start, size) for start, size in zip(starts, sizes, strict=False)]

    def forward(self, inp: Any, m_splits: Sequence[int], is_first_microbatch: bool | None = None) -> Any:
        """``inp``: h (..., K), whose rows are groups of ``m_splits`` (N ints) rows one after the other.
        ``is_first_microbatch``: as ``Linear``'s.

        Returns h (..., M), with ``return_bias`` also the list of biases. ShapeError where the rows are not
        those of ``m_splits``.
        """
        x = self.as_input("inp", inp, self.in_features)
        sizes = _numbers("GroupedLinear", "m_splits", m_splits)
        self.check_options(is_first_microbatch)
        return self.multiply(x, sizes, is_first_microbatch)


class GroupedMLP(layers.GroupedMLP, NativeLayer):
    __doc__ = layers.GroupedMLP.__doc__

    def token_rows(self, x: Any, m_splits: Any, tokens_per_expert: Any) -> Tensor:
        sizes = _numbers("GroupedMLP", "m_splits", m_splits)
        counts = _numbers("GroupedMLP", "tokens_per_expert", tokens_per_expert)
        want_tokens(counts, sizes)
        own = [np.arange(size) < count for size, count in zip(sizes, counts, strict=True)]
        return tensor(np.concatenate(own).astype(np.float32), device=x.device)


def _numbers(operation: str, name: str, values: Any) -> list[int]:
    """Numbers of rows, of a list, an array or a tensor, which is read on the host."""
    return host_sizes(operation, values.numpy() if isinstance(values, Tensor) else values, name)
