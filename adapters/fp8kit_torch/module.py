"""What the torch modules share: a pass as the autocast says, its FP8 state, and cached FP8 weights.

A layer is one operation. With delayed scaling it reads scales from the layer's state and accumulates amaxes
into row 0 of its history. The states are updated when the outermost autocast ends (forward) and when the
backward pass ends (backward).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8kit.autocast import AutocastState, current, touch_forward
from fp8kit.errors import ArgumentError, AutogradError, UnsupportedError
from fp8kit.execution.codec import encode
from fp8kit.layers.base import Branch, as_branch, branch_of
from fp8kit.layers.recompute import Kept
from fp8kit.ops.linear import LinearSpec, linear, weight_cast
from fp8kit.quantization import Quantization
from fp8kit.recipe import Recipe
from fp8kit.scaling import FORWARD_SLOTS, backward_slots, forward_slots
from fp8kit_torch import recompute, torch_checkpoint, torch_compat
from fp8kit_torch.arguments import autocast_dtype, has_foreign_code, not_compiled, want_parameters
from fp8kit_torch.autocast import history_text, recipe_parts, reduction_group, touch_traced
from fp8kit_torch.bound import validate
from fp8kit_torch.calibration import activated, row_of
from fp8kit_torch.call import prepare, run
from fp8kit_torch.constants import exporting
from fp8kit_torch.fp8_edges import cast_gradient, cast_output
from fp8kit_torch.library import FORWARD, NEITHER, TracedState, record_, trace
from fp8kit_torch.main_grad import MainGrads
from fp8kit_torch.quantized import QuantizedTensor
from fp8kit_torch.specs import fp8_text, layer_products, layer_spec, layer_text, scale_names
from fp8kit_torch.state import NO_STATE, StateBinding, slot_addresses
from fp8kit_torch.stateful import StatefulModule, prepare_all
from fp8kit_torch.te_compat.methods import TransformerEngineMethods
from fp8kit_torch.views import kind_of

Inputs = dict[str, Tensor | None]
Held8 = dict[str, QuantizedTensor]  # weights that are held in FP8, by their name in the operation
_SPEC_LIMIT = 256  # requests of a layer: recipes, options


def part_of(layer: str, name: str, part: Any) -> TransformerEngineBaseModule:
    """A part of a layer that computes in FP8. ArgumentError for another module in its place."""
    if not isinstance(part, TransformerEngineBaseModule):
        wanted = (
            "a module of fp8kit_torch or a subclass, which knows what the layer asks of it; "
            "a hook may change what it gives"
        )
        raise ArgumentError(layer, name, f"a {type(part).__name__}", wanted)
    return part


class TransformerEngineBaseModule(TransformerEngineMethods, StatefulModule):
    """Base of layers whose GEMMs run in FP8 under ``autocast``.

    A subclass names its operation and its GEMMs (prefixes of the operation's names), says its spec in high
    precision (``set_spec``), and gives ``weight_inputs`` and ``calibrate``. ``StatefulModule`` says what is
    kept.
    """

    # whether the last call was in FP8 and unrecorded, as the first pass of an unknown checkpoint is
    _unrecorded = False

    # --- what the shared layers ask -------------------------------------------------------------------------

    def activated_amax(self, normed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return activated(normed, weight, bias, self._spec_text)

    # --- running --------------------------------------------------------------------------------------------

    def run(
        self,
        inputs: Inputs,
        is_first_microbatch: bool | None,
        bias: str,
        fp8_output: bool = False,
        fp8_grad: bool = False,
        **options: Any,
    ) -> dict[str, Tensor]:
        if is_first_microbatch is not None and not isinstance(is_first_microbatch, bool):
            raise ArgumentError(
                type(self).__name__, "is_first_microbatch", repr(is_first_microbatch), "True, False or None"
            )
        tensors = {name: tensor for name, tensor in inputs.items() if tensor is not None}
        weights: Held8 = {}
        if self._held is not None:
            tensors, weights = self._opened(tensors)
        state = current()
        off = state is None or not (state.enabled or state.calibrating)
        codes = None
        if type(tensors["x"]) is QuantizedTensor:
            codes = self._codes(tensors, state)
        tensors = self.autocast_inputs(tensors)
        if torch.compiler.is_compiling():
            for name, asked in (
                ("fuse_wgrad_accumulation", self.fuse_wgrad_accumulation),
                ("fp8_output", fp8_output),
                ("fp8_grad", fp8_grad),
            ):
                if asked:
                    raise not_compiled(name)
            return self._trace(tensors, None if off else state, is_first_microbatch, bias, options)
        main = None
        if self.fuse_wgrad_accumulation and torch.is_grad_enabled():
            main = self._main_grads(is_first_microbatch, tensors["x"].dtype)
        if state is None or off:
            if not recompute.idle():
                recompute.note()
            if self._unrecorded:
                self._want_autocast()
            spec = self._spec_for(None, False, bias, options, main)
            return run(*prepare(self.operation, spec, tensors), main=main)
        given = (tensors, state, is_first_microbatch, bias, options, main, weights, codes)
        return self._run_fp8(*given, fp8_output, fp8_grad)

    def _want_autocast(self) -> None:
        """AutogradError where this call in high precision, in a backward pass, does again what ran in FP8."""
        self.__dict__["_unrecorded"] = False
        if torch.is_grad_enabled() and torch_compat.current_backward() != -1:
            wanted = "the first one's: torch.utils.checkpoint and fp8kit_torch.checkpoint bring it"
            raise AutogradError(
                type(self).__name__, "autocast", "none in the second pass of a checkpoint", wanted
            )

    def _opened(self, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], Held8]:
        """The inputs as a pass takes them, and the weights in FP8: none where the pass is in high
        precision."""
        if torch.compiler.is_compiling():
            raise not_compiled("a weight of quantized_model_init")
        found: Held8 = {}
        for name in self.weight_inputs():
            weight = tensors.get(name)
            if weight is None:
                continue
            if not isinstance(weight, QuantizedTensor):
                got, wanted = (
                    f"a {type(weight).__name__}",
                    "the QuantizedTensor that quantized_model_init made: fully_shard, or another ",
                )
                raise UnsupportedError(
                    type(self).__name__, name, got, wanted + "parameter in its place, is not supported"
                )
            found[name] = weight
        state = current()
        if state is not None and state.enabled:
            return tensors, found
        return tensors | {name: weight.dequantize() for name, weight in found.items()}, {}

    def _codes(self, tensors: dict[str, Tensor], state: AutocastState | None) -> dict[str, Tensor] | None:
        """The parts of an input that is in FP8 already and fits the operation; where it does not, its values
        take its place."""
        x = tensors["x"]
        assert isinstance(x, QuantizedTensor)
        if torch.compiler.is_compiling():
            raise not_compiled("an input in FP8")
        direct = (
            self.operation is linear
            and state is not None
            and state.enabled
            and autocast_dtype(x) in (None, x.dtype)
        )
        if direct and x.fits(self._fp8_of(state.recipe).x):  # type: ignore[union-attr]
            return x.input_parts()
        tensors["x"] = x.dequantize()
        return None

    def want_ready(self, x: Tensor) -> None:
        """Fp8kitError kinds where a pass on inputs like ``x`` would find a parameter on another device or of
        another dtype, or a weight without the ``main_grad`` that it fills: what a layer of several modules
        asks of each before the first of them runs, outside of ``torch.compile``."""
        if has_foreign_code(self):
            return
        want_parameters(type(self).__name__, self._parameters, x)
        if self.fuse_wgrad_accumulation and torch.is_grad_enabled():
            self._main_grads(None, autocast_dtype(x) or x.dtype)

    def _main_grads(self, first: bool | None, dtype: torch.dtype) -> MainGrads:
        """The weights whose gradient goes into ``main_grad``, for inputs of ``dtype``. Fp8kitError where one
        has none that fits."""
        weights = {name: weight for name, weight in self.weight_inputs().items() if weight.requires_grad}
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

    def _run_fp8(
        self,
        tensors: dict[str, Tensor],
        state: AutocastState,
        first: bool | None,
        bias: str,
        options: dict[str, Any],
        main: MainGrads | None,
        weights: Held8,
        codes: dict[str, Tensor] | None,
        fp8_output: bool,
        fp8_grad: bool,
    ) -> dict[str, Tensor]:
        recipe, idle = state.recipe, recompute.idle()
        kept = None if idle else recompute.recall(self)
        training, delayed = (
            torch.is_grad_enabled() or (not idle and recompute.first()),
            recipe.history is not None,
        )
        record = training or state.calibrating
        if (state.enabled and not training) is not self._unrecorded:
            self.__dict__["_unrecorded"] = not self._unrecorded
        special = first is not None or weights or codes is not None or kept is not None or fp8_grad
        if special or not state.enabled:
            outputs = self._run_special(
                tensors, state, first, bias, options, main, weights, codes, kept, training, fp8_grad
            )
        else:
            spec = self._spec_for(self._fp8_of(recipe), False, bias, options, main)
            scales = scale_names(self.gemms) if delayed else ()
            prepared = prepare(self.operation, spec, tensors, scales)  # refuses before the state is touched
            binding = self.bind_state(recipe, training, record, None) if delayed else NO_STATE
            if not idle:
                recompute.keep(self, self.fp8_meta["scaling_fwd"].scale if delayed else None)
            outputs = run(*prepared, binding, main)
        if fp8_output and state.enabled:
            states = self.fp8_meta if delayed else None
            outputs["y"] = cast_output(
                outputs["y"], self._fp8_of(recipe), states, len(self.gemms) - 1, record, kept
            )
        return outputs

    def _run_special(
        self,
        tensors: dict[str, Tensor],
        state: AutocastState,
        first: bool | None,
        bias: str,
        options: dict[str, Any],
        main: MainGrads | None,
        weights: Held8,
        codes: dict[str, Tensor] | None,
        kept: Kept | None,
        training: bool,
        fp8_grad: bool,
    ) -> dict[str, Tensor]:
        """A pass that calibrates, is recomputed, or has an operand that is in FP8 already or is to be
        kept."""
        recipe, fp8 = state.recipe, self._fp8_of(state.recipe)
        delayed, record = recipe.history is not None, training or state.calibrating
        # a cache or a state may be made: not for what is refused
        asked = self._spec_for(fp8 if state.enabled else None, False, bias, options, main)
        scales = scale_names(self.gemms) if delayed and state.enabled else ()
        validate(self.operation, asked, tensors, scales=scales)
        cached = None
        if weights:
            cached = {}
            for prefix, weight in zip(self.gemms, weights.values(), strict=True):
                cached |= weight.inputs(type(self).__name__, prefix, fp8)
        binding = self.bind_state(recipe, training, record, kept) if delayed else NO_STATE
        if not weights and first is not None and state.enabled:
            cached = self._cached(fp8, first, bias, tensors, binding) if kept is None else kept.weights
        if kept is None:
            recompute.keep(
                self, self.fp8_meta["scaling_fwd"].scale if delayed else None, None if weights else cached
            )
        if not state.enabled:
            spec = self._spec_for(None, False, bias, options | self.calibration_options, main)
            outputs = run(*prepare(self.operation, spec, tensors), main=main)
            if delayed and record and kept is None:
                with torch.no_grad():
                    self._note(row_of(self.calibrate(tensors, outputs), FORWARD_SLOTS * len(self.gemms)))
            return outputs
        if fp8_grad and tensors["x"].requires_grad and torch.is_grad_enabled():
            tensors["x"] = cast_gradient(tensors["x"], fp8, self.fp8_meta if delayed else None, binding.token)
        spec = self._spec_for(fp8, cached is not None, bias, options, main, codes is not None)
        tensors = tensors | (codes or {}) | (cached or {})
        return run(*prepare(self.operation, spec, tensors, scales), binding, main)

    def _note(self, row: Tensor) -> None:
        """Accumulate amaxes that were taken beside an operation, float32 by slot."""
        history = self.fp8_meta["scaling_fwd"].amax_history
        torch.fmax(history[0], row, out=history[0])

    def bind_state(self, recipe: Recipe, training: bool, record: bool, kept: Kept | None) -> StateBinding:
        """The operation's binding to the state of delayed scaling, which is touched where amaxes are
        recorded: not in a pass that is recomputed, which has the scales of the first one (``kept``)."""
        found, forward = self._bound(recipe, record), self.fp8_meta["scaling_fwd"]
        if kept is not None:
            assert kept.scales is not None
            slots, scale = forward_slots(self.gemms), forward.scale
            row = recompute.nowhere(scale.numel(), scale.device)
            return found._replace(
                scales=slot_addresses(slots, kept.scales, "scale"),
                amaxes=slot_addresses(slots, row, "amax"),
                token=None if found.token is None else (*found.token[:2], recompute.backward_pass()),
                held=(*found.held, kept.scales, row),
            )
        if record:
            forward.group = self.fp8_meta["scaling_bwd"].group = reduction_group()
            touch_forward(forward, recipe, training)
        return found

    def _fp8_of(self, recipe: Recipe) -> Quantization:
        known = self._fp8
        if known is None or known[0] is not recipe:
            self._fp8 = known = (recipe, recipe.quantization)
        return known[1]

    def _spec_for(
        self,
        fp8: Quantization | None,
        cached: bool,
        bias: str,
        options: dict[str, Any],
        main: MainGrads | None = None,
        codes: bool = False,
    ) -> Any:
        """The spec for this request, the same object for the same one: plans are found by it."""
        grads = () if main is None else (main.dtype, main.overwrite)
        key = (id(fp8), cached, codes, bias, grads, *options.items())
        found = self._specs.get(key)
        if found is None:
            more: dict[str, Any] = {"input_cached": True} if codes else {}
            if main is not None:
                more |= {"main_grad": kind_of(main.dtype).name, "overwrite_grad": main.overwrite}
            spec = layer_spec(self._spec, fp8, cached, bias, tuple(options.items()), tuple(more.items()))
            found = self._keep_spec(key, spec, fp8)
        return found[0]

    def _keep_spec(self, key: Any, spec: Any, fp8: Quantization | None) -> tuple[Any, Quantization | None]:
        if len(self._specs) >= _SPEC_LIMIT:
            self._specs.clear()
        self._specs[key] = spec, fp8  # fp8 is held, so that its id stays its own
        return self._specs[key]

    # --- delayed scaling ------------------------------------------------------------------------------------

    def _bound(self, recipe: Recipe, record: bool) -> StateBinding:
        """The state's addresses by the operation's names. Where amaxes are to be recorded, the history gets
        the recipe's length."""
        known = self._binding
        history: Any = recipe.history
        length = history.length
        same = known is not None and known[1] is record and (known[0] is recipe or known[0] == recipe)
        if (
            known is not None
            and same
            and (not record or self.fp8_meta["scaling_fwd"].amax_history.shape[0] == length)
        ):
            return known[2]
        self.prepare(length, record)
        forward, backward = self.fp8_meta["scaling_fwd"], self.fp8_meta["scaling_bwd"]
        front, back = forward_slots(self.gemms), backward_slots(self.gemms)
        scales = slot_addresses(front, forward.scale, "scale")
        late = slot_addresses(back, backward.scale, "scale")
        binding = StateBinding(scales, backward_scales=late, held=(*forward.parts, *backward.parts))
        if record:
            binding = binding._replace(
                amaxes=slot_addresses(front, forward.amax_history, "amax"),
                backward_amaxes=slot_addresses(back, backward.amax_history, "amax"),
                token=(history, backward, None),
            )
        self._binding = (recipe, record, binding)
        return binding

    # --- the weight cache -----------------------------------------------------------------------------------

    def _cached(
        self, fp8: Quantization, first: bool, bias: str, tensors: dict[str, Tensor], binding: StateBinding
    ) -> dict[str, Tensor]:
        """The FP8 weights: cast now for the first micro-batch, or where there are none by this recipe; else
        those of the first one."""
        text = encode(fp8)
        if first or self._weights is None or self._weights[0] != text:
            made: dict[str, Tensor] = {}
            with torch.inference_mode(False), torch.no_grad():
                for i, prefix in enumerate(self.gemms):
                    own = {name: tensors[name] for name in self.weight_inputs() if name.startswith(prefix)}
                    key = "weight_cast", id(fp8), bias, i
                    if key not in self._specs:
                        products = layer_products(layer_spec(self._spec, fp8, False, bias, ()))
                        self._keep_spec(key, LinearSpec(products[i]), fp8)
                    state = binding.of_gemm(prefix)
                    made |= run(*prepare(weight_cast, self._specs[key][0], own, tuple(state.scales)), state)
            self._weights = (text, made)
        return self._weights[1]

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
            spec = layer_text(self._spec_text, (), False, bias, tuple(options.items()))
            return trace(self.operation, spec, tensors)
        parts, traced = recipe_parts(state.recipe), self._traced(state)
        if not state.enabled:
            spec = layer_text(
                self._spec_text, (), False, bias, (*options.items(), *self.calibration_options.items())
            )
            outputs = trace(self.operation, spec, tensors)
            if traced is not None and traced.record:
                with torch.no_grad():
                    row = row_of(self.calibrate(tensors, outputs), FORWARD_SLOTS * len(self.gemms))
                    record_(
                        traced.forward.amax_history, row, traced.forward.handle, traced.recipe, traced.when
                    )
            return outputs
        if first is not None:
            tensors = tensors | self._trace_cached(parts, first, bias, tensors, traced)
        spec = layer_text(self._spec_text, parts, first is not None, bias, tuple(options.items()))
        return trace(self.operation, spec, tensors, traced)

    def _traced(self, state: AutocastState) -> TracedState | None:
        """How a compiled call uses the state of delayed scaling; None with another recipe."""
        text = history_text(recipe_parts(state.recipe))
        if not text:
            return None
        if exporting():  # an exported program has no module whose scales it could change
            raise NotImplementedError(
                "fp8kit_torch: delayed scaling is not supported within torch.export; Float8CurrentScaling is"
            )
        record = torch.is_grad_enabled() or state.calibrating
        # what is computed once more in backward would find the scales as they are by then
        if record and torch_checkpoint.traced():
            raise not_compiled("a checkpoint with delayed scaling")
        prepare_all(text)
        forward, backward = self.fp8_meta["scaling_fwd"], self.fp8_meta["scaling_bwd"]
        when = NEITHER if record and touch_traced(forward, text) else FORWARD
        return TracedState(forward, backward, self.gemms, text, record, when)

    def _trace_cached(
        self,
        parts: tuple[Any, ...],
        first: bool,
        bias: str,
        tensors: dict[str, Tensor],
        traced: TracedState | None,
    ) -> dict[str, Tensor]:
        text = fp8_text(parts)
        if first or self._weights is None or self._weights[0] != text:
            made: dict[str, Tensor] = {}
            with torch.no_grad():
                for i, prefix in enumerate(self.gemms):
                    own = {name: tensors[name] for name in self.weight_inputs() if name.startswith(prefix)}
                    spec = layer_text(self._spec_text, parts, False, bias, (), i)
                    state = None if traced is None else traced.of_gemm(i)
                    made.update(trace(weight_cast, spec, own, state, i))
            self._weights = (text, made)
        return self._weights[1]


__all__ = ["Branch", "Inputs", "TransformerEngineBaseModule", "as_branch", "branch_of", "part_of"]
