"""``GroupedLinear``: rows in groups, each with a weight of its own: the experts of a mixture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from fp8kit import layers
from fp8kit.arguments import without_unknown
from fp8kit.autocast import AutocastState, current, traced_state
from fp8kit.errors import ArgumentError, ShapeError, UnsupportedError
from fp8kit.layers.arguments import want_plain
from fp8kit.layers.base import spec_object
from fp8kit.layers.fp8_layer import WeightCache
from fp8kit.ops.expert_linear import expert_weight_cast
from fp8kit.quantization import Quantization
from fp8kit_torch import recompute
from fp8kit_torch.arguments import not_compiled, want_input
from fp8kit_torch.bound import want_no_transform
from fp8kit_torch.call import prepare, run
from fp8kit_torch.checks import CALLED, CONSTRUCTED, check, is_integer, shown
from fp8kit_torch.experts import expert_product
from fp8kit_torch.main_grad import MainGrads, MemberGrad, StackedMainGrads, filling
from fp8kit_torch.module import TransformerEngineBaseModule
from fp8kit_torch.offloading import OPEN, staying, staying_parameter
from fp8kit_torch.once import once
from fp8kit_torch.parameters import Init
from fp8kit_torch.quantized_tensor import QuantizedTensor
from fp8kit_torch.side_by_side import Stacks, as_one
from fp8kit_torch.te_compat.grouped_tensor import members_of, stacked
from fp8kit_torch.torch_compat import PARAMETERS, is_capturing, own_parameters, transforming

_AS_ONE = "experts"  # of the keys of weights that are cast as one


class _Into(torch.autograd.Function):
    """y, copied into the memory of ``out``, an alias that nobody else has."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, out: Tensor) -> Tensor:
        ctx.mark_dirty(out)
        return out.copy_(y)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GradientInto(torch.autograd.Function):
    """x, whose gradient is copied into ``out`` as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, out: Tensor) -> Tensor:
        ctx.out = out
        return x.view_as(x)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.out.copy_(grad)
        return grad, None


class GroupedLinear(layers.GroupedLinearBase, TransformerEngineBaseModule):
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
    scales do not age. Within ``torch.compile`` the numbers of rows are a part of the compiled code.
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

    # --- parameters in one ----------------------------------------------------------------------------------

    def _grouped_names(self) -> list[str]:
        asked = {"weight": self.single_grouped_weight, "bias": self.single_grouped_bias and self.use_bias}
        return [name for name, grouped in asked.items() if grouped]

    def _group_parameters(self) -> None:
        """Make one parameter of the weights, and of the biases, where that is asked for."""
        for name in self._grouped_names():
            own = own_parameters(self)
            parts = [own[f"{name}{i}"] for i in range(self.num_gemms)]
            whole: Any = stacked(parts)  # type: ignore[arg-type]
            made: Any = torch.nn.Parameter(whole, parts[0].requires_grad)  # type: ignore[union-attr]
            if isinstance(whole, QuantizedTensor):
                made._high = whole._high
            self.register_parameter(name, made)
            for i in range(self.num_gemms):
                self.register_parameter(f"{name}{i}", None)

    def _members(self, name: str) -> list[Any]:
        """The groups' weights or biases."""
        whole = own_parameters(self).get(name) if name in self._grouped_names() else None
        if whole is not None:
            return members_of(whole)
        if not torch.compiler.is_compiling():
            with suppress(KeyError):  # something else stands for one
                return list(_all_of(name, self.num_gemms)(self.__dict__[PARAMETERS]))
        names = [f"{name}{i}" for i in range(self.num_gemms)]
        return list(self.parameters_by(zip(names, names, strict=True)).values())

    def _put_side_by_side(self) -> None:
        """Let the groups' weights, and their biases, lie in one memory each, where they can."""
        self._stacks.anew = ""
        own = own_parameters(self)
        for name in ("weight", "bias") if self.use_bias else ("weight",):
            if name not in self._grouped_names():
                self._stacks.put(name, [own.get(f"{name}{i}") for i in range(self.num_gemms)])

    def _place_loaded(self) -> None:
        """What ``_put_side_by_side`` does at a first call; a CUDA graph that is captured keeps addresses."""
        if next(self.parameters()).is_cuda and is_capturing():
            self._stacks.anew = ""
        elif not torch.is_inference_mode_enabled():
            self._put_side_by_side()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = self._kinds()
        super()._apply(fn, recurse)
        # not what stays where it is, or goes into memory that processes share
        if self._kinds() != before:
            self._put_side_by_side()
        return self

    def _kinds(self) -> list[tuple[torch.dtype, torch.device]]:
        return [(p.dtype, p.device) for p in self.parameters(recurse=False)]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.__dict__.setdefault("_stacks", Stacks("later")).anew == "now":
            self._put_side_by_side()

    def weight_inputs(self) -> dict[str, Any]:
        return {f"{i}_weight0": weight for i, weight in enumerate(self._members("weight"))}

    def group_biases(self) -> list[Any]:
        return self._members("bias")

    @property
    def weight_names(self) -> list[str]:
        one = self.single_grouped_weight
        return ["weight"] if one else [f"weight{i}" for i in range(self.num_gemms)]

    def main_parameters(self) -> list[Any]:
        """The parameters whose gradient is the weights'."""
        return [own_parameters(self)["weight"]] if self.single_grouped_weight else self._members("weight")

    def main_grad_weights(self) -> dict[str, Any]:
        if not self.single_grouped_weight:
            return super().main_grad_weights()
        whole = own_parameters(self)["weight"]
        return {f"{i}_weight0": MemberGrad(whole, i) for i in range(self.num_gemms)}

    def waiting_weights(self) -> dict[str, Tensor]:
        if not self.single_grouped_weight:
            return super().waiting_weights()
        whole = self.waiting.held(own_parameters(self)["weight"])  # type: ignore[arg-type]
        return {f"{i}_weight0": weight for i, weight in enumerate(members_of(whole))}

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Start every parameter anew; see ``ParameterModule``."""
        names = [] if defer_init else self._grouped_names()
        for name in names:
            whole: Any = getattr(self, name)
            delattr(self, name)
            for i, part in enumerate(_separate(whole)):
                self.register_parameter(f"{name}{i}", torch.nn.Parameter(part, whole.requires_grad))
        remade = any(p.is_meta for p in self.parameters(recurse=False))
        super().reset_parameters(defer_init)
        if names:
            self._group_parameters()
        if remade and not defer_init:
            self._put_side_by_side()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """Weights and biases of checkpoints come as one or as several, whatever they are here. What does not
        fit stays as it came, so that torch names it."""
        for name, one in (("weight", self.single_grouped_weight), ("bias", self.single_grouped_bias)):
            if name == "bias" and not self.use_bias:
                continue
            whole, parts = f"{prefix}{name}", [f"{prefix}{name}{i}" for i in range(self.num_gemms)]
            there = [state_dict[part] for part in parts if part in state_dict]
            if one and whole not in state_dict and len(there) == self.num_gemms:
                if len({part.shape for part in there}) == 1:
                    state_dict[whole] = stacked([state_dict.pop(part) for part in parts])
            elif not one and whole in state_dict and not there:
                members = _separate(state_dict[whole])
                if len(members) == self.num_gemms:
                    del state_dict[whole]
                    state_dict |= dict(zip(parts, members, strict=True))
        super()._load_from_state_dict(state_dict, prefix, *rest)

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
        if isinstance(m_splits, Tensor) and (not is_integer(m_splits) or m_splits.shape != (self.num_gemms,)):
            wanted = f"integers of shape ({self.num_gemms},)"
            raise ShapeError("GroupedLinear", "m_splits", shown(m_splits), wanted)
        if not torch.compiler.is_compiling():
            check("GroupedLinear", CALLED, locals())
            if self._stacks.anew:
                self._place_loaded()
            if transforming():
                asked = {"x": inp} | {f"{i}_weight0": p for i, p in enumerate(self.main_parameters())}
                want_no_transform(self.operation, tuple(asked), tuple(asked.values()))
        x = want_input("GroupedLinear", "inp", inp, self.in_features)
        _check_buffer("out", out, x, self.out_features)
        _check_buffer("dgrad_out", dgrad_out, x, self.in_features)
        if dgrad_out is not None:
            x = _GradientInto.apply(x, dgrad_out)
        if torch.compiler.is_compiling() and is_first_microbatch is not None:
            raise not_compiled("is_first_microbatch of GroupedLinear")
        if isinstance(m_splits, Tensor) and self.leaves_sizes(m_splits.is_cuda):
            found = self._on_device(x, m_splits, is_first_microbatch)
        else:
            sizes = [int(count) for count in m_splits]
            # what compiled code reads from a tensor compares neither way
            if torch.compiler.is_compiling() and not all(
                guard_or_false(n >= 0) or guard_or_false(n < 0) for n in sizes
            ):
                raise UnsupportedError("GroupedLinear", "m_splits", *_READ_SIZES)
            found = self.multiply(x, sizes, is_first_microbatch)
        if out is None:
            return found
        y, *biases = found if self.return_bias else (found,)
        y = _Into.apply(y, out.detach())
        return (y, *biases) if self.return_bias else y

    def autocast_in_force(self) -> AutocastState | None:
        return traced_state() if torch.compiler.is_compiling() else current()

    def wants_sizes(self) -> str | None:
        return "quantized_model_init" if self._held is not None else None

    def _on_device(self, x: Tensor, sizes: Tensor, is_first_microbatch: bool | None) -> Any:
        """``forward`` with sizes that are not looked at."""
        if (name := self.wants_sizes()) is not None:
            raise self.unread_sizes(name)
        if (self.fuse_wgrad_accumulation or self.delay_wgrad_compute) and self.is_compiling():
            option = "fuse_wgrad_accumulation" if self.fuse_wgrad_accumulation else "delay_wgrad_compute"
            return _LEFT_TO_EAGER[option](self, x, sizes, is_first_microbatch)
        if is_first_microbatch is not None:
            want_plain("GroupedLinear", is_first_microbatch)
        first = self.microbatch if is_first_microbatch is None else is_first_microbatch
        fused, main = self.fuse_wgrad_accumulation and torch.is_grad_enabled(), None
        biases = self.group_biases() if self.use_bias else None
        weight, read = self._whole("weight", fused)
        inputs = {"x": x, "weight": weight}
        if biases is not None and not self.return_bias:
            inputs["bias"], _ = self._whole("bias")
        inputs = self.autocast_inputs(inputs)
        read = read if inputs["weight"] is weight else []
        if fused:
            main = StackedMainGrads(self._main_grads(first, inputs["x"].dtype), self.num_gemms)
            inputs["weight"] = filling(inputs["weight"], main, *self.main_parameters())
        layer = self.layer_name, self.name or ""
        sizes = sizes.to(x.device, torch.int32)
        given = inputs["x"], sizes, inputs["weight"], inputs.get("bias"), layer
        try:
            y = expert_product(*given, read=read, main=main, owner=self, first=first)
        except ArgumentError as error:  # of the sizes' values, on the CPU
            if error.argument != "m_splits":
                raise
            raise error.renamed("GroupedLinear", "m_splits") from None
        return (y, biases) if self.return_bias else y

    def shared_weights(
        self, first: bool | None, weight: Tensor, fp8: Quantization
    ) -> dict[str, Tensor] | None:
        """All weights in FP8, as one: cast for a step's first micro-batch, or where there are none by this
        recipe; else the first one's; in a checkpoint's later pass what the first pass took. None where
        micro-batches share none."""
        idle, found = recompute.idle(), None
        kept = None if idle else recompute.recall(self)
        if kept is not None:
            return kept.weights  # type: ignore[no-any-return]
        if first is not None:
            key, held = (_AS_ONE, self.cache_key(fp8)), self._weights
            if first or held is None or held.key != key:
                self._weights = held = WeightCache(key, self._cast_as_one(weight, fp8))
            found = staying(held.arrays)
        if not idle:
            recompute.keep(self, None, found)
        return found

    def _cast_as_one(self, weight: Tensor, fp8: Quantization) -> dict[str, Tensor]:
        spec = spec_object("ExpertLinearSpec", self.num_gemms, self.in_features, self.out_features, "oi", fp8)
        with torch.inference_mode(False), torch.no_grad():
            return run(*prepare(expert_weight_cast, spec, {"weight": weight.detach()}))

    def cast_weights(
        self, fp8: Quantization, bias: str, inputs: Mapping[str, Any], binding: Any
    ) -> dict[str, Any]:
        if self._weights is None or self._weights.key[:1] != (_AS_ONE,):
            return super().cast_weights(fp8, bias, inputs, binding)
        weight, _ = self._whole("weight", True)
        return self._cast_as_one(self.autocast_inputs({"x": weight})["x"], fp8)

    def _whole(self, name: str, alone: bool = False) -> tuple[Tensor, list[Any]]:
        """The weights or biases as one tensor (N, ...), and those that it reads where they are; of a copy,
        and of one parameter, none. ``alone``: without a gradient. Gradients of weights wait where
        ``delay_wgrad_compute`` says it."""
        waits = name == "weight" and self.delay_wgrad_compute and not alone and torch.is_grad_enabled()
        compiling, members = torch.compiler.is_compiling(), []
        if grouped := name in self._grouped_names():
            one: Any = own_parameters(self)[name]
            given = self.waiting.held(one) if waits else one
            whole = given.detach() if alone else given.view_as(one)
        else:
            members = self._members(name)
            joined = None if compiling else self._stacks.find(name, members)
            given = [*map(self.waiting.held, members)] if waits else members
            if joined is None:
                whole = torch.stack(given)
                return (whole.detach() if alone else whole), []
            whole = joined if alone else as_one(joined, *given)
        if not compiling and OPEN.depth:
            staying_parameter(whole, grouped)
        return whole, members

    def _main_grads(self, first: bool | None, dtype: torch.dtype) -> MainGrads:
        try:
            return super()._main_grads(first, dtype)
        except ArgumentError as error:
            group, _, attribute = (error.argument or "").partition(".")
            raise error.renamed("GroupedLinear", f"{self.operation.argument(group)}.{attribute}") from None


@lru_cache(maxsize=64)
def _all_of(name: str, count: int) -> Callable[[Any], tuple[Any, ...]]:
    """What takes so many groups' parameters from a mapping, all at once."""
    names = [f"{name}{i}" for i in range(count)]
    return itemgetter(*names) if count > 1 else lambda own: (own[names[0]],)


def _separate(whole: Tensor) -> list[Tensor]:
    """The matrices of a grouped parameter, without a gradient, in its memory."""
    split = getattr(whole, "split_into_quantized_tensors", None)
    return list(whole.detach().unbind(0)) if split is None else split()


def _check_buffer(name: str, buffer: Tensor | None, x: Tensor, features: int) -> None:
    """Fp8kitError for what is no tensor like (x's rows, ``features``), and within ``torch.compile``."""
    if buffer is None:
        return
    if torch.compiler.is_compiling():
        raise not_compiled(f"{name} of GroupedLinear")
    wanted = (*x.shape[:-1], features)
    is_like = isinstance(buffer, Tensor) and buffer.shape == wanted and buffer.device == x.device
    if not is_like or buffer.requires_grad or buffer.dtype is not x.dtype:
        said = f"a {x.dtype} tensor of shape {tuple(wanted)} on {x.device} without a gradient, or None"
        raise ShapeError("GroupedLinear", name, shown(buffer), said)


_READ_SIZES = (
    "a list that compiled code reads from a tensor (tolist)",
    "the tensor itself, with use_grouped_tensor=True: for lists a graph is made for each",
)

# option -> ``_on_device`` where torch.compile breaks, or says why it cannot
_LEFT_TO_EAGER = {
    option: torch.compiler.disable(GroupedLinear._on_device, reason=str(not_compiled(option)))
    for option in ("fuse_wgrad_accumulation", "delay_wgrad_compute")
}
