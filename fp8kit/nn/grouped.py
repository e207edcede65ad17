"""``GroupedLinear`` and ``GroupedMLP`` on the native tape."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from fp8kit import arrays, layers
from fp8kit.arrays import ArrayView
from fp8kit.autograd import Tensor, apply, no_grad, tensor, validate
from fp8kit.autograd.tensors import unchanged
from fp8kit.errors import ShapeError, on_behalf_of
from fp8kit.formats import int32
from fp8kit.layers.base import Init, spec_object
from fp8kit.layers.fp8_layer import WeightCache
from fp8kit.layers.grouped import host_sizes, want_tokens
from fp8kit.nn import side_by_side
from fp8kit.nn.fp8 import Fp8Module
from fp8kit.nn.layer import NativeLayer
from fp8kit.nn.module import as_tensor
from fp8kit.nn.moe import device_sizes, expert_product, spec_in_force
from fp8kit.ops.expert_linear import expert_linear, expert_weight_cast
from fp8kit.quantization import Quantization


class GroupedLinear(layers.GroupedLinearBase, Fp8Module):
    """y_i = x_i W_i^T + b_i for ``num_gemms`` groups of rows.

    ``num_gemms`` N, ``in_features`` K, ``out_features`` M; the others as ``Linear``'s. Parameters ``weight0``
    (M, K), ``bias0`` (M,), ``weight1``, ..., which lie side by side in memory where they can, so that all
    weights are one array. Under ``autocast`` the three GEMMs of each group run in FP8, each with scales of
    its own; a group without rows runs none, and its scales do not age.

    ``use_grouped_tensor``: whether numbers of rows in an array stay on the device, and all groups are one
    product (``forward``); None: where they are on a GPU.
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
        use_grouped_tensor: bool | None = None,
    ) -> None:
        super().__init__()
        self.add_groups(self.checked(locals()))
        self.sizes_on_device = use_grouped_tensor
        for kind in ("weight", "bias") if self.use_bias else ("weight",):
            for i, parameter in enumerate(side_by_side.put(self._members(kind))):
                setattr(self, f"{kind}{i}", parameter)

    def _members(self, kind: str) -> list[Any]:
        return [getattr(self, f"{kind}{i}") for i in range(self.num_gemms)]

    def row_groups(self, x: Any, sizes: Sequence[int]) -> list[ArrayView]:
        rows = (x.view if isinstance(x, Tensor) else x).rows()
        starts = np.cumsum([0, *sizes]).tolist()
        return [rows.slice(0, start, size) for start, size in zip(starts, sizes, strict=False)]

    def forward(self, inp: Any, m_splits: Any, is_first_microbatch: bool | None = None) -> Any:
        """``inp``: h (..., K), whose rows are groups of ``m_splits`` (N ints) rows one after the other.
        ``is_first_microbatch``: as ``Linear``'s.

        ``m_splits`` may be an array of integers (N,). One on a GPU is not looked at (``use_grouped_tensor``),
        so that nothing waits and ``fp8kit.graph`` can hold the call: the groups are multiplied by one kernel
        that reads the sizes; rows behind the last group's give 0, and count in no scale. Recipes are then
        those whose scales follow from the data (per tensor, the weights each by itself, the input as a whole;
        per row; by blocks of 128). Others are read on the host, and so is one on a GPU with delayed scaling,
        unless ``use_grouped_tensor`` is True.

        Returns h (..., M), with ``return_bias`` also the list of biases. ShapeError where the rows are not
        those of ``m_splits``; UnsupportedError for what is not carried out with sizes on the device.
        """
        x = self.as_input("inp", inp, self.in_features)
        self.check_options(is_first_microbatch)
        given = _given("GroupedLinear", "m_splits", m_splits)
        on_gpu = isinstance(given, ArrayView) and given.device.kind != "cpu"
        if isinstance(given, ArrayView) and self.leaves_sizes(on_gpu):
            return self._on_device(x, given, is_first_microbatch)
        return self.multiply(x, host_sizes("GroupedLinear", _on_host(given)), is_first_microbatch)

    def want_call(self, x: Any, m_splits: Any, is_first_microbatch: bool | None, **into: Any) -> None:
        self.check_options(is_first_microbatch)
        given = _given("GroupedLinear", "m_splits", m_splits)
        on_gpu = isinstance(given, ArrayView) and given.device.kind != "cpu"
        if not isinstance(given, ArrayView) or not self.leaves_sizes(on_gpu):
            sizes = host_sizes("GroupedLinear", _on_host(given))
            inputs, bias = self.host_inputs(x, sizes)
            self.check_run(inputs, bias, rows=tuple(sizes))
            return
        inputs = {"x": x, "group_sizes": self.stand_in((self.num_gemms,), int32, x.device)}
        for kind in ("weight", "bias") if self.use_bias and not self.return_bias else ("weight",):
            first, *rest = self._members(kind)
            for i, other in enumerate(rest, 1):
                if (other.shape, other.dtype) != (first.shape, first.dtype):
                    got, wanted = (f"{p.dtype.name} of shape {p.shape}" for p in (other, first))
                    raise ShapeError("GroupedLinear", f"{kind}{i}", got, f"{wanted}, as {kind}0")
            inputs[kind] = self.stand_in((self.num_gemms, *first.shape), first.dtype, first.device)
        with on_behalf_of("GroupedLinear"):
            spec = spec_in_force("GroupedLinear", inputs["weight"].shape, "oi", 0, self.name or "")
            validate(expert_linear, spec_object("ExpertLinearSpec", *spec), inputs)

    def _on_device(self, x: Tensor, sizes: ArrayView, is_first_microbatch: bool | None) -> Any:
        """``forward`` with sizes that are not looked at."""
        sizes = device_sizes("GroupedLinear", "m_splits", sizes, self.num_gemms, x.device)
        weights = self._members("weight")
        weight, own = side_by_side.as_one("GroupedLinear", weights)
        inputs = {"x": x, "group_sizes": Tensor(sizes), "weight": weight}
        biases = self._members("bias") if self.use_bias else None
        if biases is not None and not self.return_bias:
            inputs["bias"], _ = side_by_side.as_one("GroupedLinear", biases)
        first = self.microbatch if is_first_microbatch is None else is_first_microbatch
        cached = None if first is None else partial(self._cast_once, first, weight)
        with on_behalf_of("GroupedLinear"):
            y, reads = expert_product("GroupedLinear", inputs, "oi", 0, self.name or "", cached)
        if own and reads and x.requires_grad and y.requires_grad:  # backward reads the weights' own memory
            checks = [unchanged("GroupedLinear", f"weight{i}", p, self) for i, p in enumerate(weights)]

            def look(gradient: ArrayView) -> None:
                for check in checks:
                    check()

            y.register_hook(look)
        return (y, biases) if self.return_bias else y

    def _cast_once(self, first: bool, weight: Tensor, fp8: Quantization) -> dict[str, ArrayView]:
        """All weights in FP8, as one: cast for a step's first micro-batch, or where there are none by this
        recipe; else the first one's."""
        key, held = ("as one", fp8), self._weights
        if held is None or held.key != key or (first and not self.recomputation.recomputing()):
            sizes = self.num_gemms, self.in_features, self.out_features
            spec = spec_object("ExpertLinearSpec", *sizes, "oi", fp8)
            with no_grad():
                made = apply(expert_weight_cast, spec, {"weight": weight})
            self._weights = held = WeightCache(key, {name: part.view for name, part in made.items()})
        return held.arrays


class GroupedMLP(layers.GroupedMLP, NativeLayer):
    __doc__ = f"""{layers.GroupedMLP.__doc__}
    * ``use_grouped_tensor``: both parts', see ``GroupedLinear``.
    """

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
        use_grouped_tensor: bool | None = None,
    ) -> None:
        NativeLayer.__init__(self)
        self.add_parts(locals(), "use_grouped_tensor")

    def token_rows(self, x: Any, m_splits: Any, tokens_per_expert: Any) -> Tensor:
        named = {"m_splits": m_splits, "tokens_per_expert": tokens_per_expert}
        given = {name: _given("GroupedMLP", name, values) for name, values in named.items()}
        there = [values for values in given.values() if isinstance(values, ArrayView)]
        if not any(values.device.kind != "cpu" for values in there):
            sizes, counts = (host_sizes("GroupedMLP", _on_host(v), name) for name, v in given.items())
            want_tokens(counts, sizes)
            if not there or not self.fc1.sizes_on_device:
                own = [np.arange(size) < count for size, count in zip(sizes, counts, strict=True)]
                return tensor(np.concatenate(own).astype(np.float32), device=x.device)
        native = arrays.provider(x.device).native
        size, count = (
            native(device_sizes("GroupedMLP", name, values, self.num_gemms, x.device))
            for name, values in given.items()
        )
        ones = native(arrays.zeros((x.view.rows().shape[0],), int32, x.device)) + 1
        rows = ones.cumsum() - 1  # 0, 1, ..., made on the device
        return Tensor(arrays.as_view(_are_tokens(rows, size, count).astype(np.float32)))


def _are_tokens(rows: Any, sizes: Any, counts: Any) -> Any:
    """Whether rows by their numbers, which lie in groups of ``sizes``, are among the first ``counts`` of
    their group. Counts beyond a group's size are its size; a negative size is 0."""
    sizes, row = sizes.clip(0, None), rows[:, None]
    ends = sizes.cumsum()
    starts = ends - sizes
    return ((row >= starts) & (row < starts + counts) & (row < ends)).any(1)


def _given(operation: str, name: str, values: Any) -> Any:
    """Numbers of rows as a view, or, of a list and NumPy's, as they are."""
    if isinstance(values, list | tuple | np.ndarray) or np.isscalar(values) or values is None:
        return values
    return as_tensor(operation, name, values).view


def _on_host(values: Any) -> Any:
    """Numbers of rows as ``host_sizes`` takes them."""
    return values.numpy() if isinstance(values, ArrayView) else values
