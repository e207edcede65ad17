"""``TorchLayer``: what the shared layers ask of a frontend, in torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fp8kit.collectives import Collectives
from fp8kit.errors import Fp8kitError
from fp8kit.execution.codec import encode
from fp8kit.layers.base import Layer
from fp8kit.spec import Operation
from fp8kit_torch.arguments import autocast_dtype, not_compiled, want_input
from fp8kit_torch.bound import TensorMeta, validate
from fp8kit_torch.call import apply
from fp8kit_torch.chains import Call, Pending, chained
from fp8kit_torch.checks import CALLED, CONSTRUCTED, tensor
from fp8kit_torch.collectives import ranks_of
from fp8kit_torch.constants import constant_result
from fp8kit_torch.recompute import checkpoint
from fp8kit_torch.reprs import described
from fp8kit_torch.specs import spec_for


def next_rng(device: torch.device) -> Tensor:
    """A fresh int64 [2] ``(seed, offset)`` for one operation, drawn from the default generator of ``device``.

    Drawn on the device: nothing waits for the host, and a captured graph draws anew at each replay.
    """
    return torch.randint(0, 2**62, (2,), dtype=torch.int64, device=device)


@constant_result
def _said_of(kind: type[Layer], unknown: tuple[str, ...]) -> str:
    """What ``refuse_names`` raises for a layer of this class, "" where it raises nothing. Dynamo cannot
    follow how the name that was meant is found."""
    try:
        Layer.refuse_names(object.__new__(kind), unknown)
    except TypeError as error:
        return str(error)
    return ""


# the constructor's arguments that programs read of Transformer Engine's modules
_READ = [
    "activation",
    "activation_params",
    "attention_dropout",
    "attn_mask_type",
    "bottom_right_diagonal",
    "enc_dec_attn_mask_type",
    "enc_dec_bottom_right_diagonal",
    "enc_dec_window_size",
    "eps",
    "ffn_hidden_size",
    "fuse_qkv_params",
    "hidden_size",
    "kv_channels",
    "layernorm_epsilon",
    "normalization",
    "num_attention_heads",
    "num_gqa_groups",
    "output_layernorm",
    "parameters_split",
    "qk_norm_eps",
    "qk_norm_type",
    "qkv_format",
    "qkv_weight_interleaved",
    "return_max_logit",
    "save_original_input",
    "self_attn_mask_type",
    "sequence_parallel",
    "set_parallel_mode",
    "softcap",
    "softmax_scale",
    "softmax_type",
    "symmetric_ar_type",
    "ub_bulk_dgrad",
    "ub_bulk_wgrad",
    "ub_overlap_ag",
    "ub_overlap_rs",
    "ub_overlap_rs_dgrad",
    "window_size",
    "zero_centered_gamma",
]


class TorchLayer(Layer, torch.nn.Module):
    """Base of layers that need no parameters of their own."""

    array_name = "a tensor"
    constructor_rules = CONSTRUCTED
    call_rules = CALLED
    rng_tracker: Callable[[], Any] | None = None  # the constructor's get_rng_state_tracker
    rng_tracker_name: str | None = None
    delay_wgrad_compute = False
    # parameters whose gradient is of a rank's rows alone; marks on parameters are lost under fully_shard
    of_own_rows: frozenset[str] | set[str] = frozenset()
    is_grad_enabled = staticmethod(torch.is_grad_enabled)
    is_compiling = staticmethod(torch.compiler.is_compiling)

    def take_further(self, arguments: SimpleNamespace) -> None:
        given, kind = vars(arguments), type(self)
        vars(self).update({name: given[name] for name in _READ if name in given and not hasattr(kind, name)})
        tracker = getattr(arguments, "get_rng_state_tracker", None)
        if tracker is not None:
            self.rng_tracker = tracker
            self.rng_tracker_name = getattr(arguments, "rng_tracker_name", None)
        if getattr(arguments, "delay_wgrad_compute", False):
            self.delay_wgrad_compute = True

    def ranks_of(self, argument: str, group: Any) -> Collectives | None:
        return ranks_of(self.layer_name, argument, group)

    def group_of(self, ranks: Collectives) -> Any:
        return getattr(ranks, "group", ranks)

    def mark_parameter(
        self, name: str, dim: int | None, sequence: bool, blocks: tuple[int, ...] = (1,)
    ) -> None:
        parameter = getattr(self, name)
        if dim is not None:  # Megatron's names
            parameter.tensor_model_parallel, parameter.partition_dim = True, dim
            parameter.partition_stride = 1
        if sequence:
            parameter.sequence_parallel = True
            self.of_own_rows = {*self.of_own_rows, name}

    def forked(self) -> AbstractContextManager[Any]:
        """Within, random numbers are drawn from the tracker's state, where there is a tracker."""
        if self.rng_tracker is None:
            return nullcontext()
        if self.is_compiling():
            raise not_compiled("get_rng_state_tracker")
        name, tracker = self.rng_tracker_name, self.rng_tracker()
        return tracker.fork() if name is None else tracker.fork(name)  # type: ignore[no-any-return]

    def as_input(
        self, argument: str, value: Any, features: int | None = None, qkv_format: str | None = None
    ) -> Tensor:
        if type(value) is Pending:
            return value  # type: ignore[return-value]
        if features is None:
            return tensor(self.layer_name, argument, value)
        return want_input(self.layer_name, argument, value, features, qkv_format)

    def refuse_names(self, unknown: Iterable[str]) -> None:
        if said := _said_of(type(self), tuple(unknown)):
            raise TypeError(said)

    def set_spec(self, spec: Any) -> None:
        self._spec, self._spec_text = spec, encode(spec)

    def own_spec(self) -> Any:
        return self._spec_text if torch.compiler.is_compiling() else self._spec

    def spec_for(self, kind: str, *fields: Any) -> Any:
        return spec_for(kind, *fields)

    def call(
        self, operation: Operation, spec: Any, inputs: Mapping[str, Any], rng: bool = False
    ) -> dict[str, Tensor]:
        if rng:
            inputs = {**inputs, "rng": next_rng(next(iter(inputs.values())).device)}
        if type(next(iter(inputs.values()))) is Pending:
            return chained(Call(operation, spec, inputs))  # type: ignore[return-value]
        try:
            return apply(operation, spec, inputs)
        except Fp8kitError as error:
            raise self.own_refusal(error, operation) from None

    def check_call(
        self,
        operation: Operation,
        spec: Any,
        inputs: Mapping[str, Any],
        needs: tuple[str, ...] = (),
        rng: bool = False,
    ) -> None:
        there = {name: tensor for name, tensor in inputs.items() if tensor is not None}
        if rng:
            there["rng"] = TensorMeta((2,), torch.int64, next(iter(there.values())).device)
        try:
            validate(operation, spec, there, needs)
        except Fp8kitError as error:
            raise self.own_refusal(error, operation) from None

    def own_refusal(self, error: Fp8kitError, operation: Operation) -> Fp8kitError:
        """A refusal of an argument by ``operation``, as one of the layer, which is what the user called; any
        other as it is."""
        if error.operation != operation.name or error.argument is None:
            return error
        return error.renamed(getattr(self, "layer_name", type(self).__name__), error.argument)

    def stand_in(self, shape: tuple[int, ...], dtype: Any, device: Any) -> TensorMeta:
        return TensorMeta(shape, dtype, device)

    def autocast_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        dtype = autocast_dtype(inputs["x"])
        if dtype is None:
            return inputs
        return {name: None if tensor is None else tensor.to(dtype) for name, tensor in inputs.items()}

    def call_dtype(self, x: Tensor) -> torch.dtype:
        return autocast_dtype(x) or x.dtype

    def call_checkpointed(self, function: Callable[..., Any], **arguments: Any) -> Any:
        tracker = self.rng_tracker
        return checkpoint(function, use_reentrant=False, get_rng_state_tracker=tracker, **arguments)

    def no_grad(self) -> AbstractContextManager[Any]:
        return torch.no_grad()

    def extra_repr(self) -> str:
        """Sizes, and what is not as usual (``reprs``)."""
        return described(self)
