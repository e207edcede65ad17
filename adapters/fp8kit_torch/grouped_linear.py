"""``GroupedLinear``: rows in groups, each with a weight of its own: the experts of a mixture."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from fp8kit.arguments import without_unknown
from fp8kit.autocast import AutocastState, current, traced_state
from fp8kit.errors import ArgumentError, UnsupportedError
from fp8kit_torch.arguments import autocast_dtype, has_foreign_code, not_compiled, want_input
from fp8kit_torch.bound import TensorMeta, want_no_transform
from fp8kit_torch.checks import CALLED, CONSTRUCTED, check, want_groups
from fp8kit_torch.grouped_on_device import GroupedOnDevice
from fp8kit_torch.into_buffers import GradientInto, Into, want_buffer
from fp8kit_torch.main_grad import MainGrads
from fp8kit_torch.parameters import Init
from fp8kit_torch.side_by_side import Stacks
from fp8kit_torch.torch_compat import transforming


class GroupedLinear(GroupedOnDevice):
    """y_i = x_i W_i^T + b_i for ``num_gemms`` groups of rows.

    * ``num_gemms``: number of groups N. ``in_features``, ``out_features``: sizes K and M.
    * ``init_method``: fills a weight in place; None is normal(0, 0.023). Biases start at 0. ``bias``: whether
      there are any.
    * ``return_bias``: return (y without bias, the list of biases) instead.
    * ``params_dtype``: float32, bfloat16 or float16; None is torch's default. ``device``: None is the default
      device.
    * ``fuse_wgrad_accumulation``: the weights' gradients go into their ``main_grad``.
    * ``single_grouped_weight``, ``single_grouped_bias``: one parameter ``weight`` (N, M, K), and ``bias`` (N,
      M), a ``GroupedTensor``, instead of one for each group, which are None. Checkpoints of both forms load.
    * ``use_grouped_tensor``: whether the numbers of rows stay on the device, and all groups are one product
      (``forward``); None: where they come as a tensor on a GPU.
    * ``tp_size``, or a ``tp_group`` of that many: the ranks that share each weight. With ``parallel_mode``
      "column" this one has out_features / tp_size of its rows, with "row" in_features / tp_size of its
      columns. Nothing is communicated, as in Transformer Engine: the program adds the results of "row".
    * ``name``: what recipes by name know it by (``recipe.PerLayer``, ``recipe.CustomRecipe``). Others:
      Transformer Engine's, at their defaults only; NotImplementedError otherwise.

    Parameters ``weight0`` ... ``weight{N-1}`` (M, K) and ``bias0`` ... (M,), which lie side by side in memory
    where they can (``side_by_side``), so that all groups' are one array. Under ``autocast`` the three
    GEMMs of each group run in FP8, each with scales of its own; a group without rows runs none, and its
    scales do not age. Within ``torch.compile`` the numbers of rows of a list are a part of the compiled code.
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Init | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = None,
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool | None = None,
    ) -> None:
        check("GroupedLinear", CONSTRUCTED, locals())
        super().__init__()
        self.parallel_mode, self.tp_group = parallel_mode, tp_group
        self.tp_size = self._number_of_ranks(tp_group, tp_size)
        if parallel_mode == "column":
            out_features = self._own_part("out_features", out_features)
        elif parallel_mode == "row":
            in_features = self._own_part("in_features", in_features)
        self.single_grouped_weight = bool(single_grouped_weight)
        self.single_grouped_bias = bool(single_grouped_bias)
        self.sizes_on_device = use_grouped_tensor
        self.take_further(SimpleNamespace(**locals()))
        self.fuse_wgrad_accumulation = bool(fuse_wgrad_accumulation)
        own = {"init_method": init_method, "params_dtype": params_dtype, "device": device, "name": name}
        sizes = int(num_gemms), int(in_features), int(out_features)
        named = zip(("num_gemms", "in_features", "out_features"), sizes, strict=True)
        flags = {"bias": bool(bias), "return_bias": bool(return_bias)}
        self.add_groups(SimpleNamespace(**dict(named), **flags, **own))
        self._group_parameters()
        self._stacks = Stacks()
        self._put_side_by_side()
        if self.tp_size > 1 and parallel_mode is not None:
            self._mark_parts(parallel_mode)

    # --- ranks ----------------------------------------------------------------------------------------------

    def _number_of_ranks(self, tp_group: Any, tp_size: int) -> int:
        ranks = self.ranks_of("tp_group", tp_group)
        if ranks is not None and tp_size not in (1, ranks.size):
            raise ArgumentError(
                "GroupedLinear", "tp_size", tp_size, f"1, or {ranks.size}, the size of tp_group"
            )
        return int(tp_size) if ranks is None else ranks.size

    def _own_part(self, name: str, features: int) -> int:
        if features % self.tp_size:
            raise ArgumentError("GroupedLinear", name, features, f"a multiple of tp_size {self.tp_size}")
        return features // self.tp_size

    def _mark_parts(self, mode: str) -> None:
        """Say on the parameters how ranks share them."""
        for name, _ in self.named_parameters(recurse=False):
            if name.startswith("weight") or mode == "column":
                self.mark_parameter(name, int(mode == "row"), False)

    def set_tensor_parallel_group(self, tp_group: object) -> None:
        """The group of the ranks that share the weights, where the constructor got ``tp_size`` alone.
        ArgumentError for what is no group, or one of another size."""
        ranks = self.ranks_of("tp_group", tp_group)
        if ranks is not None and ranks.size != self.tp_size:
            wanted = f"a group of {self.tp_size} ranks"
            raise ArgumentError("GroupedLinear", "tp_group", f"a group of {ranks.size}", wanted)
        self.tp_group = tp_group

    def ranks_of_weights(self) -> dict[str, Any]:
        shared = self.tp_size > 1 and self.tp_group is not None and self.parallel_mode is not None
        return dict.fromkeys(self.gemms, self.ranks_of("tp_group", self.tp_group)) if shared else {}

    def row_groups(self, x: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        return x.reshape(-1, self.in_features).split(list(sizes))

    @without_unknown
    def forward(
        self,
        inp: Tensor,
        m_splits: Sequence[int] | Tensor,
        is_first_microbatch: bool | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
        **unknown: Any,
    ) -> Any:
        """``inp``: (..., K), whose rows are groups of ``m_splits`` (N ints) rows one after the other.
        ``is_first_microbatch``: None casts the weights at each call; True casts and keeps them, False takes
        them. ``out``: where y is copied to, (..., M): what is returned is another tensor over its memory, so
        that it may be given again once backward has read that; ``dgrad_out``: where the gradient of ``inp``
        is copied to, (..., K); both of ``inp``'s dtype, without a gradient, not within ``torch.compile``.

        ``m_splits`` may be an integer tensor, or NumPy's array. A tensor on a GPU is not looked at
        (``use_grouped_tensor``), so that nothing waits and a CUDA graph can hold the call: the groups are
        multiplied by one kernel that reads the sizes; rows behind the last group's give 0, and count in no
        scale. On the CPU their values are looked at. Recipes are then those whose scales follow from the data
        (per tensor, the weights each by itself, the input as a whole; per row; by blocks of 128). Other
        tensors are read on the host, and so is one on a GPU with delayed scaling and with options that want
        to know the sizes, unless ``use_grouped_tensor`` is True.

        Returns (..., M), with ``return_bias`` also the list of biases. ShapeError where the rows are not
        those of ``m_splits``; ArgumentError for a tensor on the CPU that claims more rows than there are.
        """
        if unknown:
            self.refuse_names(unknown)
        if isinstance(m_splits, Tensor):
            want_groups("GroupedLinear", "m_splits", m_splits, self.num_gemms)
        if not torch.compiler.is_compiling():
            check("GroupedLinear", CALLED, locals())
            if self._stacks.anew:
                self._place_loaded()
            if transforming():
                self._want_untransformed(x=inp)
        x = want_input("GroupedLinear", "inp", inp, self.in_features)
        want_buffer("out", out, x, self.out_features)
        want_buffer("dgrad_out", dgrad_out, x, self.in_features)
        if dgrad_out is not None:
            x = GradientInto.apply(x, dgrad_out)
        if isinstance(m_splits, Tensor) and self.leaves_sizes(m_splits.is_cuda):
            found = self._on_device(x, m_splits, is_first_microbatch)
        else:
            if torch.compiler.is_compiling() and is_first_microbatch is not None:
                raise not_compiled("is_first_microbatch of GroupedLinear with m_splits on the host")
            sizes = _read(m_splits)
            # what compiled code reads from a tensor compares neither way
            if torch.compiler.is_compiling() and not all(
                guard_or_false(n >= 0) or guard_or_false(n < 0) for n in sizes
            ):
                raise UnsupportedError("GroupedLinear", "m_splits", *_READ_SIZES)
            found = self.multiply(x, sizes, is_first_microbatch)
        if out is None:
            return found
        y, *biases = found if self.return_bias else (found,)
        y = Into.apply(y, out.detach())
        return (y, *biases) if self.return_bias else y

    def _want_untransformed(self, **inputs: Tensor) -> None:
        """UnsupportedError for an input or a weight that a transform of torch has wrapped."""
        asked = inputs | {f"{i}_weight0": p for i, p in enumerate(self.main_parameters())}
        want_no_transform(self.operation, tuple(asked), tuple(asked.values()))

    def want_call(self, x: Any, m_splits: Any, is_first_microbatch: bool | None, **into: Any) -> None:
        for name, features in (("out", self.out_features), ("dgrad_out", self.in_features)):
            if name in into:
                want_buffer(name, into[name], x, features)
        if transforming():
            self._want_untransformed()
        if has_foreign_code(self):
            return
        if self.fuse_wgrad_accumulation and torch.is_grad_enabled():
            self._main_grads(is_first_microbatch, x.dtype)
        if isinstance(m_splits, Tensor) and self.leaves_sizes(m_splits.is_cuda):
            self._want_on_device(x)
            return
        check("GroupedLinear", CALLED, {"m_splits": m_splits})
        sizes = _read(m_splits)
        inputs, bias = self.host_inputs(x, sizes)
        if autocast_dtype(x) is not None:
            inputs = {name: TensorMeta(t.shape, x.dtype, t.device) for name, t in inputs.items()}
        self.check_run(inputs, bias, rows=tuple(sizes))

    def autocast_in_force(self) -> AutocastState | None:
        return traced_state() if torch.compiler.is_compiling() else current()

    def _main_grads(self, first: bool | None, dtype: torch.dtype) -> MainGrads:
        try:
            return super()._main_grads(first, dtype)
        except ArgumentError as error:
            group, _, attribute = (error.argument or "").partition(".")
            raise error.renamed("GroupedLinear", f"{self.operation.argument(group)}.{attribute}") from None


def _read(sizes: Sequence[int] | Tensor) -> list[int]:
    """Numbers of rows, of a tensor on a GPU by one wait."""
    if isinstance(sizes, Tensor) and not torch.compiler.is_compiling():
        return sizes.tolist()  # type: ignore[no-any-return]
    return [int(count) for count in sizes]


_READ_SIZES = (
    "a list that compiled code reads from a tensor (tolist)",
    "the tensor itself, with use_grouped_tensor=True: for lists a graph is made for each",
)
