"""``GroupedLinear`` and ``GroupedMLP``: the experts of a mixture. What frontends share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from fp8kit import slowness
from fp8kit.arguments import choice, integer, listed, shown, without_unknown
from fp8kit.autocast import AutocastState, current
from fp8kit.backends.activation import ALL
from fp8kit.errors import ArgumentError, FormatError, ShapeError
from fp8kit.layers.base import Init, Layer, child_name, picked
from fp8kit.layers.fp8_layer import FP8Layer, WeightCache
from fp8kit.ops.activation import activation as activation_operation
from fp8kit.ops.grouped_linear import GroupedLinearSpec, grouped_linear
from fp8kit.ops.product import ProductSpec
from fp8kit.ops.scaled_activation import scaled_activation
from fp8kit.quantization import Quantization
from fp8kit.scaling import FORWARD_SLOTS
from fp8kit.spec import Operation

_ACTIVATIONS = tuple(name for name, row in ALL.items() if not row.learned)  # of GroupedMLP


class GroupedLinearBase(FP8Layer):
    """Weights and biases of groups, numbered; sizes of groups on the host, or left on the device."""

    layer_name = "GroupedLinear"
    operation = grouped_linear
    in_features: int
    out_features: int
    num_gemms: int
    # whether numbers of rows in an array stay on the device; None: where they are on a GPU
    sizes_on_device: bool | None = None

    def add_groups(self, a: SimpleNamespace) -> None:
        """Make the parameters that the constructor's arguments ``a`` say."""
        self.keep(a, "num_gemms in_features out_features return_bias name")
        self.use_bias = a.bias
        self.gemms = tuple(f"{i}_" for i in range(self.num_gemms))
        for i in range(self.num_gemms):  # in Transformer Engine's order, by which optimisers number states
            shape = self.out_features, self.in_features
            self.add_parameter(f"weight{i}", shape, a.init_method, a.params_dtype, a.device)
            if self.use_bias:
                self.add_parameter(f"bias{i}", shape[:1], 0.0, a.params_dtype, a.device)
        product = ProductSpec(self.in_features, (self.out_features,))
        self.set_spec(GroupedLinearSpec(product, (0,) * self.num_gemms))

    def weight_inputs(self) -> dict[str, Any]:
        return {f"{i}_weight0": getattr(self, f"weight{i}") for i in range(self.num_gemms)}

    def group_biases(self) -> list[Any]:
        """The biases, by group."""
        return [getattr(self, f"bias{i}") for i in range(self.num_gemms)]

    def row_groups(self, x: Any, sizes: Sequence[int]) -> Sequence[Any]:
        """The groups of x's rows, one after the other."""
        raise NotImplementedError

    def calibrate(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> list[tuple[int, Any]]:
        found: list[tuple[int, Any]] = []
        for i, x in enumerate(self.row_groups(inputs["x"], self._splits)):
            if x.shape[0]:
                found += [(FORWARD_SLOTS * i, x), (FORWARD_SLOTS * i + 1, inputs[f"{i}_weight0"])]
        return found

    def needs_host_sizes(self) -> str | None:
        """Returns the option that is on and that only a call with sizes on the host carries out, None where
        there is none."""
        return None

    def autocast_in_force(self) -> AutocastState | None:
        """Returns the autocast that a call finds."""
        return current()

    def leaves_sizes(self, on_gpu: bool) -> bool:
        """Whether sizes in an array, which lies ``on_gpu`` or not, are left on the device: as
        ``sizes_on_device`` says; else where they are on a GPU and nothing wants to know them."""
        if self.sizes_on_device is not None or not on_gpu:
            return bool(self.sizes_on_device)
        why, own, state = self.needs_host_sizes(), None, self.autocast_in_force()
        if state is not None and (state.enabled or state.calibrating):
            own = state.recipe.for_layer(self.layer_name, self.name or "")
        if why is None and own is not None and own.history is not None:
            why = "delayed scaling"
        if why is not None and not self.is_compiling():
            slowness.say(
                f"GroupedLinear: {why} wants to know m_splits on the host",
                "each call waits for the GPU",
                "choose a recipe whose scales follow from the data, and leave that option off",
            )
        return why is None

    def want_call(self, x: Any, m_splits: Any, is_first_microbatch: bool | None, **into: Any) -> None:
        """Raise what ``forward`` would raise for an x that ``stand_in`` gave, and run nothing: what a layer
        asks of it before another part of it runs. ``into``: further arguments of ``forward``."""
        raise NotImplementedError

    def host_inputs(self, x: Any, sizes: Sequence[int]) -> tuple[dict[str, Any], str]:
        """Returns the operation's inputs where sizes are known, and what the bias does. ShapeError where x's
        rows are not theirs."""
        rows = 1
        for n in x.shape[:-1]:
            rows *= n
        if len(sizes) != self.num_gemms or min(sizes) < 0 or sum(sizes) != rows:
            wanted = f"{self.num_gemms} numbers of rows that sum to {rows}"
            raise ShapeError("GroupedLinear", "m_splits", list(sizes), wanted)
        inputs = {"x": x, **self.weight_inputs()}
        if not self.use_bias or self.return_bias:
            return inputs, "none"
        return inputs | {f"{i}_bias0": bias for i, bias in enumerate(self.group_biases())}, "add"

    def multiply(self, x: Any, sizes: Sequence[int], is_first_microbatch: bool | None) -> Any:
        """``forward`` with sizes that are known. ShapeError where x's rows are not theirs."""
        inputs, mode = self.host_inputs(x, sizes)
        self._splits = list(sizes)
        y = self.run(inputs, is_first_microbatch, mode, rows=tuple(sizes))["y"]
        if self.return_bias:
            return y, self.group_biases() if self.use_bias else None
        return y

    def _cached(
        self, fp8: Quantization, first: bool, bias: str, inputs: dict[str, Any], binding: Any
    ) -> dict[str, Any]:
        """The FP8 weights, each cast when its group first has rows: the scales of others stay."""
        held, made = self._weights, {}
        if not first and held is not None and held.key == self.cache_key(fp8):
            made = held.arrays
        for i, prefix in enumerate(self.gemms):
            if not self._splits[i] or f"{prefix}w_q" in made:
                continue
            own = {f"{prefix}weight0": inputs[f"{prefix}weight0"]}
            made |= self.cast_weight(self._weight_spec(fp8, bias, i), own, prefix, binding)
        self._weights = WeightCache(self.cache_key(fp8), made)
        return made


class GroupedMLP(Layer):
    """y_i = (act(x_i W1_i^T + b1_i) p) W2_i^T + b2_i for ``num_gemms`` groups of rows x_i: the experts of a
    mixture. p: the probabilities of the rows, where they are given.

    * ``num_gemms``: number of groups E. ``hidden_size`` H, ``ffn_hidden_size`` F.
    * ``bias``: whether there are any. ``activation``: as ``LayerNormMLP``'s, but for "xielu", whose numbers
      are learned; of a gated one, such as "swiglu", fc1 has 2 F output features.
    * ``init_method``, ``output_layer_init_method``: fill the weights of fc1 and of fc2; None is normal(0,
      0.023). ``params_dtype``, ``device``, ``name``: as ``Linear``'s; the parts are NAME.fc1 and NAME.fc2.

    Parts ``fc1`` and ``fc2`` are ``GroupedLinear``: parameters fc1.weight0 (2 F or F, H), fc1.bias0, ... and
    fc2.weight0 (H, F), fc2.bias0, ....
    """

    layer_name = "GroupedMLP"

    def __init__(
        self,
        num_gemms: int,
        hidden_size: int,
        ffn_hidden_size: int,
        bias: bool = True,
        activation: str = "swiglu",
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        params_dtype: Any = None,
        device: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.add_parts(locals())

    def add_parts(self, arguments: Mapping[str, Any], further: str = "") -> None:
        """Make the parts that the constructor's arguments (its ``locals()``) say; names of ``further`` ones
        that both take."""
        choice("GroupedMLP", "activation", arguments["activation"], _ACTIVATIONS)
        a = self.checked(arguments)
        row = ALL[a.activation]
        self.activation, self.num_gemms, self.hidden_size = a.activation, a.num_gemms, a.hidden_size
        self.features = a.ffn_hidden_size * row.parts
        more = picked(a, f"bias params_dtype device {further}")
        self.fc1 = self.frontend.GroupedLinear(
            a.num_gemms,
            a.hidden_size,
            self.features,
            init_method=a.init_method,
            name=child_name(a.name, "fc1"),
            **more,
        )
        self.fc2 = self.frontend.GroupedLinear(
            a.num_gemms,
            a.ffn_hidden_size,
            a.hidden_size,
            init_method=a.output_layer_init_method,
            name=child_name(a.name, "fc2"),
            **more,
        )

    @without_unknown
    def forward(
        self,
        inp: Any,
        m_splits: Any,
        probs: Any = None,
        is_first_microbatch: bool | None = None,
        tokens_per_expert: Any = None,
        **unknown: Any,
    ) -> Any:
        """``inp``: h (rows, H), groups of ``m_splits`` rows one after the other (as ``GroupedLinear`` takes
        them); ``probs``: h (rows,), of any type, or None: the hidden activations are multiplied by them, so
        that what is combined needs no further factor. Differentiable in both.

        ``tokens_per_expert``, without probs: how many rows of each group are tokens, as ``m_splits``; the
        rest is padding, whose hidden activations become 0. Else they are act(b1) with a bias, and change the
        scales of fc2's input. (With probs they are 0 where padding's probabilities are.)

        Returns h (rows, H). ShapeError, FormatError for what does not fit either part, before the first one
        runs.
        """
        if unknown:
            self.refuse_names(unknown)
        return self.compute(inp, m_splits, probs, is_first_microbatch, tokens_per_expert)

    def compute(
        self,
        inp: Any,
        m_splits: Any,
        probs: Any,
        is_first_microbatch: bool | None,
        tokens_per_expert: Any,
        into: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {}),
    ) -> Any:
        """``forward``; ``into``: further arguments of fc1's and of fc2's call."""
        x, weights = self.as_input("inp", inp, self.hidden_size), None
        if probs is not None:
            if tokens_per_expert is not None:
                wanted = "None with probs, which are 0 in rows of padding"
                raise ArgumentError("GroupedMLP", "tokens_per_expert", shown(tokens_per_expert), wanted)
            weights, rows = self.as_input("probs", probs), math.prod(x.shape[:-1])
            if tuple(weights.shape) != (rows,):
                raise ShapeError("GroupedMLP", "probs", f"shape {tuple(weights.shape)}", f"({rows},)")
        elif tokens_per_expert is not None:
            weights = self.token_rows(x, m_splits, tokens_per_expert)
        if not self.is_compiling():
            self._want_second_part(x, weights, m_splits, is_first_microbatch, into[1])
        hidden = self.fc1(x, m_splits, is_first_microbatch, **into[0])
        hidden = self.call(*self._act(hidden, weights))["y"]
        return self.fc2(hidden, m_splits, is_first_microbatch, **into[1])

    def _act(self, x: Any, weights: Any) -> tuple[Operation, Any, dict[str, Any]]:
        """The operation between the parts, its spec and its inputs."""
        of = self.activation, self.features
        if weights is None:
            return activation_operation, self.spec_for("ActivationSpec", *of), {"x": x}
        return scaled_activation, self.spec_for("ScaledActivationSpec", *of), {"x": x, "probs": weights}

    def _want_second_part(
        self, x: Any, weights: Any, m_splits: Any, is_first_microbatch: bool | None, into: Mapping[str, Any]
    ) -> None:
        """Raise what is refused behind fc1, before that records anything."""
        features = self.fc2.in_features
        lead, dtype = x.shape[:-1], self.call_dtype(x)
        if weights is not None:
            self.check_call(*self._act(self.stand_in((*lead, self.features), dtype, x.device), weights))
        hidden = self.stand_in((*lead, features), dtype, x.device)
        if isinstance(self.fc2, GroupedLinearBase):
            self.fc2.want_call(hidden, m_splits, is_first_microbatch, **into)

    def token_rows(self, x: Any, m_splits: Any, tokens_per_expert: Any) -> Any:
        """(rows of x,), of x's dtype: 1 for the first rows of each group, as many as are tokens, 0 for its
        padding. ShapeError for other counts."""
        raise NotImplementedError


def host_sizes(operation: str, values: Any, name: str = "m_splits") -> list[int]:
    """Numbers of rows, of a list or an array on the host. FormatError for an array of no integers,
    ArgumentError for anything else."""
    if isinstance(values, np.ndarray):
        if values.dtype.kind not in "iu":
            raise FormatError(operation, name, shown(values), "integers")
        values = values.tolist() if values.ndim == 1 else values
    return [integer(operation, name, n, 0, 2**31 - 1) for n in listed(operation, name, values, "ints")]


def want_tokens(counts: Sequence[int], sizes: Sequence[int]) -> None:
    """ShapeError where ``counts`` are not as many as ``sizes``, each at most the size."""
    fit = len(counts) == len(sizes) and all(n <= size for n, size in zip(counts, sizes, strict=True))
    if not fit:
        raise ShapeError(
            "GroupedMLP", "tokens_per_expert", list(counts), f"at most m_splits {list(sizes)} each"
        )
