"""What the torch modules share: a pass as the autocast says, its FP8 state, and cached FP8 weights.

A layer is one operation. With delayed scaling it reads scales from the layer's state and accumulates amaxes
into row 0 of its history. The states are updated when the outermost autocast ends (forward) and when the
backward pass ends (backward).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, cached_property, partial
from inspect import signature
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from fp8kit import inspection
from fp8kit.autocast import AutocastState, current, touch_forward, traced_state
from fp8kit.errors import ArgumentError, AutogradError, Fp8kitError, UnsupportedError
from fp8kit.execution.codec import encode
from fp8kit.layers.base import Branch, branch_of
from fp8kit.layers.fp8_layer import Operands, WeightCache
from fp8kit.layers.recompute import Kept
from fp8kit.ops.linear import weight_cast
from fp8kit.quantization import Quantization
from fp8kit.recipe import Recipe
from fp8kit.scaling import FORWARD_SLOTS, backward_slots, forward_slots
from fp8kit_torch import recompute, torch_checkpoint, torch_compat
from fp8kit_torch.arguments import autocast_dtype, has_foreign_code, is_there, not_compiled, want_parameters
from fp8kit_torch.autocast import history_text, keeps_weights, needs_rng, recipe_key, touch_traced
from fp8kit_torch.bound import TensorMeta, validate, want_no_running_transform
from fp8kit_torch.calibration import row_of
from fp8kit_torch.call import prepare, run
from fp8kit_torch.chains import Call, Pending, chained
from fp8kit_torch.constants import exporting, onnx_mode
from fp8kit_torch.delayed_gradients import Waiting
from fp8kit_torch.fp8_edges import cast_gradient, cast_output
from fp8kit_torch.layer import next_rng
from fp8kit_torch.library import FORWARD, NEITHER, TracedState, record_, trace
from fp8kit_torch.main_grad import MainGrads
from fp8kit_torch.offloading import staying
from fp8kit_torch.operand_tensor import OperandTensor
from fp8kit_torch.quantized import want_codes
from fp8kit_torch.quantized_tensor import QuantizedTensor
from fp8kit_torch.specs import fp8_text, frozen_scales, layer_text, scale_names
from fp8kit_torch.state import NO_STATE, StateBinding, slot_addresses
from fp8kit_torch.stateful import StatefulModule, prepare_all
from fp8kit_torch.te_compat.methods import TransformerEngineMethods
from fp8kit_torch.te_compat.module_state import TransformerEngineState
from fp8kit_torch.te_compat.own_layers import OwnLayer

log = logging.getLogger("fp8kit")
_placed = attrgetter("placed")
Inputs = dict[str, Tensor | None]
Held8 = dict[str, OperandTensor]  # weights that are held in FP8, by their name in the operation


@functools.cache
def _say_unset() -> None:
    """Warn once that a pass multiplies by scales that nothing has set."""
    log.warning(
        "a layer runs by DelayedScaling without gradients before anything has set its scales: it computes "
        "with scales of 1, and goes on so. A pass with gradients, autocast(enabled=False, calibrating=True) "
        "or a loaded _extra_state sets them; Float8CurrentScaling needs none"
    )


@functools.cache
def _say_plain() -> None:
    """Warn once that a layer casts in each pass what it should hold."""
    log.warning(
        "a layer made within quantized_model_init was given weights in high precision: it casts them in each "
        "pass. model.load_state_dict(model.state_dict()) lets it hold them in FP8, unless accelerate's hooks "
        "bring them for each call (offloading)"
    )


@cache
def _hands_on(kind: type[torch.nn.Module]) -> bool:
    return any(each.kind is each.VAR_KEYWORD for each in signature(kind.forward).parameters.values())


def part_of(layer: str, name: str, part: Any) -> TransformerEngineBaseModule:
    """A part of a layer that computes in FP8, or the one in it where a module wraps it (LoRA). ArgumentError
    for another module in its place."""
    if isinstance(part, TransformerEngineBaseModule):
        return part
    if "forward" in vars(part) or _hands_on(type(part)):
        for inner in part.modules():
            if isinstance(inner, TransformerEngineBaseModule):
                return inner
    wanted = (
        "a module of fp8kit_torch or a subclass, which knows what the layer asks of it, or what wraps one "
        "and hands it all arguments: forward(x, **kwargs); a hook may change what it gives"
    )
    raise ArgumentError(layer, name, f"a {type(part).__name__}", wanted)


def _chained(call: Call, binding: StateBinding, main: MainGrads | None) -> Any:
    return chained(call._replace(binding=binding))


def _run(layer: Any, inputs: Any, first: Any, bias: str, in_fp8: Any, options: Any) -> dict[str, Tensor]:
    return layer.run(inputs, first, bias, **in_fp8, **options)  # type: ignore[no-any-return]


# what no graph can hold -> ``run``, where torch.compile breaks, or says why it cannot, and looks at nothing
# that the layer calls
_LEFT_TO_EAGER = {
    what: torch.compiler.disable(_run, reason=str(not_compiled(what)))
    for what in (
        "a weight of quantized_model_init",
        "an input in FP8",
        "fuse_wgrad_accumulation",
        "delay_wgrad_compute",
        "fp8_output",
        "fp8_grad",
        "check_finite of fp8kit.autocast",
    )
}


class TransformerEngineBaseModule(TransformerEngineState, TransformerEngineMethods, OwnLayer, StatefulModule):
    """Base of layers whose GEMMs run in FP8 under ``autocast``.

    A subclass names its operation and its GEMMs (prefixes of the operation's names), says its spec in high
    precision (``set_spec``), and gives ``weight_inputs`` and ``calibrate``. ``StatefulModule`` says what is
    kept.
    """

    # whether the last call was in FP8 and unrecorded, as the first pass of an unknown checkpoint is
    _unrecorded = False

    recomputation = recompute
    no_binding = NO_STATE

    # --- what the shared layers ask -------------------------------------------------------------------------

    def open_operands(self, inputs: Inputs, state: AutocastState | None, first: bool | None) -> Operands:
        if all(map(is_there, inputs.values())):
            tensors: dict[str, Any] = {**inputs}
        else:
            tensors = {name: tensor for name, tensor in inputs.items() if tensor is not None}
        weights: Held8 = {}
        if self._held is not None:
            tensors, weights = self._opened(tensors)
        codes = None
        if isinstance(tensors["x"], QuantizedTensor):
            codes = self._codes(tensors, state)
        # a gradient that goes to main_grad is added there, early
        if self.delay_wgrad_compute and not (
            self._held or self.fuse_wgrad_accumulation or not torch.is_grad_enabled()
        ):
            tensors |= self.waiting_weights()
        if torch_compat.any_autocast():
            tensors = self.autocast_inputs(tensors)
        if not (self.fuse_wgrad_accumulation and torch.is_grad_enabled()):
            return Operands(tensors, None, (), weights, codes)
        main = self._main_grads(first, tensors["x"].dtype)
        return Operands(tensors, main, main.fields, weights, codes)

    def validate_call(self, spec: Any, inputs: dict[str, Any], delayed: bool, rng: bool = False) -> None:
        if rng:
            inputs = {**inputs, "rng": TensorMeta((2,), torch.int64, inputs["x"].device)}
        try:
            validate(self.operation, spec, inputs, scales=scale_names(self.gemms) if delayed else ())
        except Fp8kitError as error:
            raise self.own_refusal(error, self.operation) from None

    def with_rng(self, spec: Any, inputs: dict[str, Any], delayed: bool) -> dict[str, Any]:
        if type(inputs["x"]) is not Pending:
            self.validate_call(spec, inputs, delayed, True)
        return {**inputs, "rng": next_rng(inputs["x"].device)}

    def prepare_call(
        self, spec: Any, inputs: dict[str, Any], delayed: bool
    ) -> Callable[[Any, Any], dict[str, Tensor]]:
        if type(inputs["x"]) is Pending:
            return partial(_chained, Call(self.operation, spec, inputs))
        try:
            scales = scale_names(self.gemms) if delayed else ()
            op, tensors = prepare(self.operation, spec, inputs, scales, self._last)
        except Fp8kitError as error:
            raise self.own_refusal(error, self.operation) from None
        self.__dict__["_last"] = op
        return partial(run, op, tensors)

    def cast_weight(
        self, spec: Any, inputs: dict[str, Any], prefix: str, binding: StateBinding
    ) -> dict[str, Tensor]:
        state = binding.of_gemm(prefix)
        with torch.inference_mode(False), torch.no_grad():
            return run(*prepare(weight_cast, spec, inputs, tuple(state.scales)), state)

    def record_amaxes(self, tensors: list[tuple[int, Tensor]]) -> None:
        self._note(row_of(tensors, FORWARD_SLOTS * len(self.gemms)))

    def keep_pass(self, binding: StateBinding, weights: Any) -> None:
        recompute.keep(self, self.fp8_meta["scaling_fwd"].scale if binding.scales else None, weights)

    def product_spec(self, index: int) -> Any:
        if torch.compiler.is_compiling():
            return layer_text(self._spec_text, (), False, "none", (), index)
        return super().product_spec(index)

    def note_pass(self, unrecorded: bool, fp8: bool) -> None:
        if fp8:
            if unrecorded is not self._unrecorded:
                self.__dict__["_unrecorded"] = unrecorded
            return
        if not recompute.idle():
            recompute.note()
        if self._unrecorded and not recompute.recomputing():  # which has the first pass's autocast
            self._want_autocast()

    def cache_key(self, fp8: Quantization) -> str:
        return encode(fp8)

    def held_inputs(self, weights: Mapping[str, OperandTensor], fp8: Quantization) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for prefix, weight in zip(self.gemms, weights.values(), strict=True):
            found |= weight.inputs(type(self).__name__, prefix, fp8)
        return staying(found)

    def _cached(self, *asked: Any) -> dict[str, Tensor]:
        return staying(super()._cached(*asked))

    def cast_output(
        self, y: Tensor, fp8: Quantization, delayed: bool, record: bool, kept: Kept | None
    ) -> Tensor:
        want_codes(type(self).__name__, "fp8_output", fp8)
        return cast_output(y, fp8, self.fp8_meta if delayed else None, len(self.gemms) - 1, record, kept)

    def cast_gradient(self, x: Tensor, fp8: Quantization, delayed: bool, binding: StateBinding) -> Tensor:
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x
        want_codes(type(self).__name__, "fp8_grad", fp8)
        token = binding.tokens[0] if binding.tokens else None
        return cast_gradient(x, fp8, self.fp8_meta if delayed else None, token)

    def run_compiled(
        self,
        inputs: Inputs,
        is_first_microbatch: bool | None,
        bias: str,
        in_fp8: Mapping[str, bool],
        options: dict[str, Any],
    ) -> dict[str, Tensor]:
        # before the weights: Dynamo of torch 2.13 takes no module whose tensors it has seen that hold codes
        own = {name: getattr(self, name) for name in ("fuse_wgrad_accumulation", "delay_wgrad_compute")}
        tensors = {name: tensor for name, tensor in inputs.items() if tensor is not None}
        state = traced_state()
        asked = {
            "a weight of quantized_model_init": self._held is not None,
            "an input in FP8": isinstance(tensors["x"], QuantizedTensor),
            **own,
            **in_fp8,
            "check_finite of fp8kit.autocast": state is not None and state.check_finite,
        }
        for what, there in asked.items():
            if there:
                return _LEFT_TO_EAGER[what](self, inputs, is_first_microbatch, bias, in_fp8, options)
        tensors = self.autocast_inputs(tensors)
        off = state is None or not (state.enabled or state.calibrating)
        return self._trace(tensors, None if off else state, is_first_microbatch, bias, options)

    def main_grad_weights(self) -> dict[str, Any]:
        """The weights by their name in the operation, or what has their ``main_grad``."""
        return self.weight_inputs()

    def waiting_weights(self) -> dict[str, Tensor]:
        """The weights by their name in the operation, whose gradients wait for ``backward_dw``."""
        return {name: self.waiting.held(weight) for name, weight in self.weight_inputs().items()}

    # --- what programs and subclasses call, under Transformer Engine's names --------------------------------

    @cached_property
    def waiting(self) -> Waiting:
        """Gradients that ``backward_dw`` hands over."""
        return Waiting()

    def need_backward_dw(self) -> bool:
        """Whether weights' gradients wait for ``backward_dw``: with ``delay_wgrad_compute``."""
        return self.delay_wgrad_compute

    def backward_dw(self) -> None:
        """Add the weights' gradients that wait to ``grad``; nothing where none does."""
        self.waiting.hand_over()

    def register_wgrad_accumulation_and_reduce_hooks(self, wgrad_accumulation_and_reduce_hook: Any) -> None:
        """A function without arguments that ``backward_dw`` calls once the gradients are there."""
        self.waiting.hooks.append(wgrad_accumulation_and_reduce_hook)

    def prepare_forward(
        self,
        inp: Tensor,
        num_gemms: int = 1,
        allow_non_contiguous: bool = False,
        allow_different_data_and_param_types: bool = False,
    ) -> Tensor:
        """``inp``, contiguous unless it need not be: what a subclass' own ``forward`` begins with. State is
        prepared where a pass needs it."""
        x = self.as_input("inp", inp)
        return self.open_forward(x if allow_non_contiguous else x.contiguous(), num_gemms)

    @contextmanager
    def prepare_forward_ctx(self, *args: Any, **kwargs: Any) -> Iterator[Tensor]:
        """``prepare_forward`` and ``end_forward`` around a block, which gets the input."""
        yield self.prepare_forward(*args, **kwargs)
        self.end_forward()

    def end_forward(self) -> None:
        """What a subclass' own ``forward`` ends with: nothing."""

    def fast_setattr(self, name: str, value: Any) -> None:
        """Set an attribute that is no parameter, buffer or module."""
        self.__dict__[name] = value

    def set_activation_dtype(self, inp: Tensor) -> None:
        """Note what ``torch.autocast`` casts to, else the dtype of ``inp``, as ``activation_dtype``."""
        self.__dict__["activation_dtype"] = autocast_dtype(inp) or inp.dtype

    def is_debug_iter(self) -> bool:
        """Whether an inspector looks at this step (``inspect``, or Transformer Engine's debug features)."""
        return inspection.hooks.inspector is not None

    # --- operands -------------------------------------------------------------------------------------------

    def _want_autocast(self) -> None:
        """AutogradError where a checkpoint runs its forward again, in backward, without the autocast that it
        had: this call in high precision would stand for one in FP8."""
        self.__dict__["_unrecorded"] = False
        if torch.is_grad_enabled() and torch_compat.current_backward() != -1:
            wanted = "the first one's: torch.utils.checkpoint and fp8kit_torch.checkpoint bring it"
            raise AutogradError(
                type(self).__name__, "autocast", "none in the second pass of a checkpoint", wanted
            )

    def _opened(self, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], Held8]:
        """For a layer that holds its weights in FP8: the inputs of a pass, and those weights by name. In high
        precision the inputs have the weights' values instead, and there are no weights in FP8; nor are there
        where products are emulated, on values."""
        found: Held8 = {}
        values: dict[str, Tensor] = {}
        for name in self.weight_inputs():
            weight = tensors.get(name)
            if weight is None:
                continue
            if not isinstance(weight, QuantizedTensor):
                if weight.is_meta:
                    got, wanted = "a weight on the meta device", "values: reset_parameters(), or a state"
                    raise UnsupportedError(type(self).__name__, name, got, wanted)
                if not self._held.may_cast(weight):  # type: ignore[union-attr]
                    wanted = (
                        "the QuantizedTensor that quantized_model_init made: fully_shard, or another "
                        "parameter in its place, is not supported; values that were put there are cast by "
                        "model.load_state_dict(model.state_dict()), before an optimiser has the parameters, "
                        "or in each pass without gradients (torch.no_grad())"
                    )
                    got = f"a {type(weight).__name__}"
                    raise UnsupportedError(type(self).__name__, name, got, wanted)
                _say_plain()  # a loader that goes by no way of torch's put it there, maybe for this call
                weight = self._held._replace(preserve=False).parameter(weight)  # type: ignore[union-attr]
            if isinstance(weight, OperandTensor):
                found[name] = weight
            else:
                values[name] = weight.dequantize()
        state = current()
        if state is not None and state.enabled:
            return tensors | values, found
        return tensors | values | {name: weight.dequantize() for name, weight in found.items()}, {}

    def _codes(self, tensors: dict[str, Tensor], state: AutocastState | None) -> dict[str, Tensor] | None:
        """Codes and scale of an input that is in FP8 already, where the operation can multiply them as they
        are. Otherwise None, and ``tensors`` gets the input's values."""
        x = tensors["x"]
        assert isinstance(x, QuantizedTensor)
        if isinstance(x, OperandTensor) and self._multiplies(x, state):
            return x.input_parts()
        tensors["x"] = x.dequantize()
        return None

    def _multiplies(self, x: OperandTensor, state: AutocastState | None) -> bool:
        """Whether the operation can multiply its codes as they are."""
        direct = (
            self.operation.takes_codes
            and state is not None
            and state.enabled
            and autocast_dtype(x) in (None, x.dtype)
        )
        if not direct:
            return False
        fp8 = self._fp8_of(state.recipe)  # type: ignore[union-attr]
        return x.fits(fp8.x) and fp8.wgrad.compute == "quantized"

    def want_ready(self, operation: str, path: str, x: Tensor) -> None:
        """BackendError, FormatError or ArgumentError where a pass on inputs like ``x`` would find a parameter
        on another device, of another dtype, or a weight without the ``main_grad`` that it fills: what a layer
        of several modules asks of each before the first of them runs, outside of ``torch.compile``.
        ``operation``, ``path``: the layer's name in errors, and its name for this part."""
        if has_foreign_code(self):
            return
        want_parameters(operation, self.__dict__[torch_compat.PARAMETERS], x, f"{path}.")
        if self.fuse_wgrad_accumulation and torch.is_grad_enabled():
            self._main_grads(None, autocast_dtype(x) or x.dtype)

    def _main_grads(self, first: bool | None, dtype: torch.dtype) -> MainGrads:
        """The weights whose gradient goes into ``main_grad``, for inputs of ``dtype``. ArgumentError where
        one has none that fits."""
        weights = {name: weight for name, weight in self.main_grad_weights().items() if weight.requires_grad}
        mains = {name: getattr(weight, "main_grad", None) for name, weight in weights.items()}
        some = next((main.dtype for main in mains.values() if isinstance(main, torch.Tensor)), torch.float32)
        if some not in (torch.float32, dtype):
            some = torch.float32
        state = current()
        aligned = state is not None and state.enabled and any(weight.is_cuda for weight in weights.values())
        for name, weight in weights.items():
            main = mains[name]
            there = (
                isinstance(main, torch.Tensor) and main.shape == weight.shape and main.device == weight.device
            )
            if not there or main.dtype is not some or not main.is_contiguous():
                got = (
                    f"{main.dtype} {tuple(main.shape)} on {main.device}"
                    if isinstance(main, torch.Tensor)
                    else "no such tensor"
                )
                wanted = (
                    f"contiguous {some} {tuple(weight.shape)} on {weight.device}, "
                    "with fuse_wgrad_accumulation"
                )
                raise ArgumentError(type(self).__name__, f"{name}.main_grad", got, wanted)
            if aligned and main.data_ptr() % 16:  # where cuBLASLt's products cannot write
                got = f"address {main.data_ptr():#x}"
                raise ArgumentError(
                    type(self).__name__, f"{name}.main_grad", got, "a multiple of 16 bytes, in FP8 on a GPU"
                )
        return MainGrads(weights, first is True, some, aligned)

    def _note(self, row: Tensor) -> None:
        """Enter amaxes that were taken outside of an operation into the history: ``row``, float32, one for
        each slot."""
        history = self.fp8_meta["scaling_fwd"].amax_history
        torch.fmax(history[0], row, out=history[0])

    def bind_state(self, recipe: Recipe, training: bool, record: bool, kept: Kept | None) -> StateBinding:
        """The operation's binding to the state of delayed scaling. A pass that records amaxes marks the state
        for its update. A recomputed pass does not: it reads the scales of the first one (``kept``), and its
        amaxes go nowhere. UnsupportedError within a transform of torch.func."""
        if torch_compat.transforming():
            want_no_running_transform(type(self).__name__)
        known, states = self._binding, self.fp8_meta
        if (
            known is None
            or known[1] is not record
            or (known[0] is not recipe and known[0] != recipe)
            or known[3] != [*map(_placed, states.values())]  # of these tensors
        ):
            known = self._bind(recipe, record)
        found: StateBinding = known[2]
        forward = states["scaling_fwd"]
        if kept is not None:
            assert kept.scales is not None
            slots, scale = forward_slots(self.gemms), forward.scale
            row = recompute.nowhere(scale.numel(), scale.device)
            return found._replace(
                scales=slot_addresses(slots, kept.scales, "scale"),
                amaxes=slot_addresses(slots, row, "amax"),
                tokens=tuple([(*token[:2], recompute.backward_pass()) for token in found.tokens]),
                held=(*found.held, kept.scales, row),
            )
        if record:
            group = touch_forward(forward, recipe, training).amax_reduction_group
            backward = states["scaling_bwd"]
            if group is not forward.group or group is not backward.group:
                forward.group = backward.group = group
        return found

    # --- delayed scaling ------------------------------------------------------------------------------------

    def _bind(self, recipe: Recipe, record: bool) -> tuple[Any, ...]:
        """What is kept as ``_binding``: for whom, the state's addresses by the operation's names, and where
        it lies. Where amaxes are to be recorded, the history gets the recipe's length."""
        history: Any = recipe.history
        unset = not record and "scaling_fwd" not in self.fp8_meta
        if unset and dict(recipe.quantization.stateful).keys() & {"x", "w"}:
            _say_unset()
        self.prepare(history.length, record)
        forward, backward = self.fp8_meta["scaling_fwd"], self.fp8_meta["scaling_bwd"]
        front, back = forward_slots(self.gemms), backward_slots(self.gemms)
        scales = slot_addresses(front, forward.scale, "scale")
        backward_scales = slot_addresses(back, backward.scale, "scale")
        binding = StateBinding(
            scales, backward_scales=backward_scales, held=(*forward.parts, *backward.parts)
        )
        if record:
            binding = binding._replace(
                amaxes=slot_addresses(front, forward.amax_history, "amax"),
                backward_amaxes=slot_addresses(back, backward.amax_history, "amax"),
                tokens=((history, backward, None),),
            )
        self._binding = recipe, record, binding, [*map(_placed, self.fp8_meta.values())]
        return self._binding

    # --- within torch.compile -------------------------------------------------------------------------------

    def _trace(
        self,
        tensors: dict[str, Tensor],
        state: AutocastState | None,
        first: bool | None,
        bias: str,
        options: dict[str, Any],
    ) -> dict[str, Tensor]:
        """``run`` in a way that ``torch.compile`` can follow: the same operations as torch ops, the state's
        changes beside them."""
        if state is None:
            spec = layer_text(self._spec_text, "", False, bias, tuple(options.items()))
            return trace(self.operation, spec, tensors)
        recipe, layer = recipe_key(state), self._layer()
        frozen = self._frozen(recipe, layer) if onnx_mode.on else ()
        traced = None if frozen else self._traced(state)
        if not state.enabled:
            spec = layer_text(
                self._spec_text, "", False, bias, (*options.items(), *self.calibration_options.items())
            )
            outputs = trace(self.operation, spec, tensors)
            if traced is not None and traced.record:
                with torch.no_grad():
                    row = row_of(self.calibrate(tensors, outputs), FORWARD_SLOTS * len(self.gemms))
                    record_(
                        traced.forward.amax_history, row, traced.forward.handle, traced.recipe, traced.when
                    )
            return outputs
        if needs_rng(recipe, layer):
            tensors = {**tensors, "rng": next_rng(tensors["x"].device)}
        if first is not None and (self.casts_weights_anew or not keeps_weights(recipe, layer)):
            first = None
        if first is not None:
            tensors = tensors | self._trace_cached(recipe, first, bias, tensors, traced)
        cached = first is not None
        more = {"layer": layer, "frozen": frozen, "where": str(tensors["x"].device)}
        spec = layer_text(self._spec_text, recipe, cached, bias, tuple(options.items()), **more)
        return trace(self.operation, spec, tensors, () if traced is None else (traced,))

    def _layer(self) -> tuple[str, str]:
        """Class and name, where the recipe asks for them: layers share what is compiled for them else."""
        state = traced_state()
        by_layer = state is not None and state.recipe.by_layer
        return (self.layer_name, self.name or "") if by_layer else ("", "")

    def _frozen(self, recipe: str, layer: tuple[str, str]) -> tuple[float, ...]:
        """For a program that is exported as ONNX: the forward scales of delayed scaling; () with another
        recipe."""
        if not history_text(recipe, layer):
            return ()
        state = self.fp8_meta.get("scaling_fwd")
        return (1.0,) * (FORWARD_SLOTS * len(self.gemms)) if state is None else frozen_scales(state.number)

    def _traced(self, state: AutocastState) -> TracedState | None:
        """How a compiled call uses the state of delayed scaling; None with another recipe."""
        text = history_text(recipe_key(state), self._layer())
        if not text:
            return None
        if exporting():  # an exported program has no module whose scales it could change
            raise NotImplementedError(
                "fp8kit_torch: delayed scaling is not supported within torch.export but onnx_export; "
                "Float8CurrentScaling is"
            )
        record = torch.is_grad_enabled() or state.calibrating
        # what is computed once more in backward would find the scales as they are by then
        if record and torch_checkpoint.traced():
            raise not_compiled("a checkpoint with delayed scaling")
        prepare_all(text, self._layer())
        forward, backward = self.fp8_meta["scaling_fwd"], self.fp8_meta["scaling_bwd"]
        when = NEITHER if record and touch_traced(forward, text) else FORWARD
        return TracedState(forward, backward, self.gemms, text, record, when)

    def _trace_cached(
        self, recipe: str, first: bool, bias: str, tensors: dict[str, Tensor], traced: TracedState | None
    ) -> dict[str, Tensor]:
        layer, where = self._layer(), str(tensors["x"].device)
        text = fp8_text(recipe, layer, where)
        if first or self._weights is None or self._weights.key != text:
            made: dict[str, Tensor] = {}
            with torch.no_grad():
                for i, prefix in enumerate(self.gemms):
                    own = {name: tensors[name] for name in self.weight_inputs() if name.startswith(prefix)}
                    spec = layer_text(self._spec_text, recipe, False, bias, (), i, layer, where=where)
                    states = () if traced is None else (traced.of_gemm(i),)
                    made.update(trace(weight_cast, spec, own, states, i))
            self._weights = WeightCache(text, made)
        return self._weights.arrays


__all__ = ["Branch", "Inputs", "TransformerEngineBaseModule", "branch_of", "part_of"]
