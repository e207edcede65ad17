"""``GroupedMLP``: the experts of a mixture, two ``GroupedLinear`` with an activation between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8kit import layers
from fp8kit.arguments import without_unknown
from fp8kit.errors import ShapeError
from fp8kit.layers.grouped import want_tokens
from fp8kit_torch.checks import check, shown, splits
from fp8kit_torch.experts import expert_numbers
from fp8kit_torch.layer import TorchLayer
from fp8kit_torch.parameters import Init
from fp8kit_torch.te_compat.methods import TransformerEngineMethods

# behind the shared layer's text: what this frontend has further
_FURTHER = """
    * ``fuse_wgrad_accumulation``, ``delay_wgrad_compute``, ``save_original_input``, ``use_grouped_tensor``,
      ``single_grouped_weight``, ``single_grouped_bias``: both parts', see ``GroupedLinear``; ``backward_dw``
      hands over the gradients of both.
    """
_INTO = """
        ``out``: where y is copied to, (rows, H); ``dgrad_out``: where the gradient of ``inp`` is copied to,
        (rows, H); see ``GroupedLinear``.
        """


class GroupedMLP(layers.GroupedMLP, TransformerEngineMethods, TorchLayer):
    __doc__ = f"{layers.GroupedMLP.__doc__}{_FURTHER}"

    def __init__(
        self,
        num_gemms: int,
        hidden_size: int,
        ffn_hidden_size: int,
        bias: bool = True,
        activation: str = "swiglu",
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        params_dtype: torch.dtype | None = None,
        device: Any = None,
        name: str | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        use_grouped_tensor: bool | None = None,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
    ) -> None:
        TorchLayer.__init__(self)
        further = "fuse_wgrad_accumulation delay_wgrad_compute save_original_input use_grouped_tensor"
        self.add_parts(locals(), f"{further} single_grouped_weight single_grouped_bias")

    @without_unknown
    def forward(
        self,
        inp: Tensor,
        m_splits: Sequence[int] | Tensor,
        probs: Tensor | None = None,
        is_first_microbatch: bool | None = None,
        tokens_per_expert: Sequence[int] | Tensor | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
        **unknown: Any,
    ) -> Tensor:
        if unknown:
            self.refuse_names(unknown)
        into = {"dgrad_out": dgrad_out}, {"out": out}
        y: Tensor = self.compute(inp, m_splits, probs, is_first_microbatch, tokens_per_expert, into)
        return y

    forward.__doc__ = f"{layers.GroupedMLP.forward.__doc__}{_INTO}"

    def token_rows(self, x: Tensor, m_splits: Any, tokens_per_expert: Any) -> Tensor:
        given = {"m_splits": m_splits, "tokens_per_expert": tokens_per_expert}
        if not torch.compiler.is_compiling():
            check("GroupedMLP", {"m_splits": splits, "tokens_per_expert": splits}, given)
        arrays = [numbers for numbers in given.values() if isinstance(numbers, Tensor)]
        stays = self.fc1.sizes_on_device and bool(arrays)
        if not any(numbers.is_cuda for numbers in arrays) and not (stays and torch.compiler.is_compiling()):
            sizes, counts = ([int(n) for n in numbers] for numbers in given.values())
            want_tokens(counts, sizes)
            given = given if stays else {"m_splits": sizes, "tokens_per_expert": counts}
        sizes, counts = (
            expert_numbers(torch.as_tensor(numbers, device=x.device)) for numbers in given.values()
        )
        if counts.shape != sizes.shape:
            raise ShapeError("GroupedMLP", "tokens_per_expert", shown(counts), f"shape {tuple(sizes.shape)}")
        return are_tokens(x.shape[:-1].numel(), sizes, counts).to(x.dtype)


def are_tokens(rows: int, sizes: Tensor, counts: Tensor) -> Tensor:
    """Whether each of so many rows, which lie in groups of ``sizes``, is one of the first ``counts`` of its
    group. Counts beyond a group's size are its size; a negative size is 0."""
    sizes = sizes.clamp(min=0)
    row, ends = torch.arange(rows, device=sizes.device), sizes.cumsum(0)
    group = torch.searchsorted(ends, row, right=True).clamp(max=len(sizes) - 1)
    return (row - (ends - sizes)[group] < counts[group]) & (row < ends[-1])
