"""What the torch modules share: a pass as the autocast says, its FP8 state, and cached FP8 weights.

A layer is one operation. With delayed scaling it reads scales from the layer's state and accumulates amaxes
into row 0 of its history. The states are updated when the outermost autocast ends (forward) and when the
backward pass ends (backward).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8kit.autocast import AutocastState, current, touch_forward
from fp8kit.errors import ArgumentError, AutogradError, UnsupportedError
from fp8kit.layers import Kept
from fp8kit.ops.linear import LinearSpec
from fp8kit.quantization import Quantization
from fp8kit.recipe import Recipe
from fp8kit.scaling import FORWARD_SLOTS
from fp8kit_torch import recompute, torch_checkpoint
from fp8kit_torch.apply import Traced, apply, prepare, trace
from fp8kit_torch.arguments import autocast_dtype, brings, not_compiled, want_parameters
from fp8kit_torch.autocast import history_text, recipe_parts, reduction_group, touch_traced
from fp8kit_torch.calibration import Amaxes, row_of
from fp8kit_torch.constants import exporting
from fp8kit_torch.fp8_edges import cast_gradient, cast_output
from fp8kit_torch.memory import NOTHING, Placed, amax_views, scale_views
from fp8kit_torch.nodes import NO_STATE, Fused, Wiring
from fp8kit_torch.ops import FORWARD, NEITHER, record_
from fp8kit_torch.plans import Call, call, want_alike
from fp8kit_torch.quantized import QuantizedTensor
from fp8kit_torch.specs import fp8_text, layer_products, layer_spec, layer_text, products
from fp8kit_torch.stateful import StatefulModule, prepare_all
from fp8kit_torch.te_methods import TransformerEngineMethods
from fp8kit_torch.texts import encode
from fp8kit_torch.views import kind_of

Inputs = dict[str, Tensor | None]
Held8 = dict[str, QuantizedTensor]  # weights that are held in FP8, by their name in the operation
_CALL_LIMIT = 256  # requests of a layer: recipes, options


class Branch(NamedTuple):
    """What a layer gives the one that it is a part of: ``y``, and, where asked for, ``residual`` (x, its
    gradient summed in backward) and ``normed``, norm(x)."""

    y: Tensor
    residual: Tensor | None = None
    normed: Tensor | None = None


def as_branch(given: Any) -> Branch:
    """What a part of a layer gave: a ``Branch``, or the tuple that a hook made of one."""
    return given if isinstance(given, Branch) else Branch(*given)


def part_of(layer: str, name: str, part: Any) -> TransformerEngineBaseModule:
    """A part of a layer that computes in FP8. ArgumentError for another module in its place."""
    if not isinstance(part, TransformerEngineBaseModule):
        wanted = (
            "a module of fp8kit_torch or a subclass, which knows what the layer asks of it; "
            "a hook may change what it gives"
        )
        raise ArgumentError(layer, name, f"a {type(part).__name__}", wanted)
    return part


def branch_of(outputs: Mapping[str, Tensor]) -> Branch:
    """A ``Branch`` of an operation's outputs by name."""
    return Branch(outputs["y"], outputs.get("residual"), outputs.get("normed"))


class TransformerEngineBaseModule(TransformerEngineMethods, StatefulModule):
    """Base of layers whose GEMMs run in FP8 under ``autocast``.

    A subclass names its operation and its GEMMs (prefixes of the operation's names), says its spec in high
    precision (``set_spec``), and gives ``weight_inputs`` and ``calibrate``. ``StatefulModule`` says what is
    kept.
    """

    operation: str
    fuse_wgrad_accumulation = False
    # whether the last call was in FP8 and unrecorded, as the first pass of a checkpoint that we do not know
    # is
    _unrecorded = False
    calibration_options: dict[str, Any] = {}  # noqa: RUF012  further fields of the spec while calibrating

    # --- what a subclass gives ------------------------------------------------------------------------------

    def calibrate(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Amaxes:
        """The amaxes of each GEMM's input (slot 3 i) and weight (3 i + 1) of a high-precision pass."""
        raise NotImplementedError

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
        """The layer's operation on ``inputs`` (x and weights), as the autocast says. ``bias``: of the last
        product; ``fp8_output``, ``fp8_grad``: y, and the gradient of x, in FP8 where FP8 is on (see
        ``Linear``); ``options``: further fields of the spec."""
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
        dtype = autocast_dtype(tensors["x"])
        if dtype is not None:
            tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        if torch.compiler.is_compiling():
            for name, asked in (
                ("fuse_wgrad_accumulation", self.fuse_wgrad_accumulation),
                ("fp8_output", fp8_output),
                ("fp8_grad", fp8_grad),
            ):
                if asked:
                    raise not_compiled(name)
            return self._trace(tensors, None if off else state, is_first_microbatch, bias, options)
        fused = (
            self._fused(is_first_microbatch, tensors["x"].dtype)
            if self.fuse_wgrad_accumulation and torch.is_grad_enabled()
            else None
        )
        if off:
            recompute.look()
            if self._unrecorded:
                self._want_autocast()
            return apply(
                self._call(None, False, bias, options, tensors, False, fused),
                list(tensors.values()),
                fused=fused,
            )
        return self._run_fp8(
            tensors,
            state,
            is_first_microbatch,
            bias,
            options,
            fused,
            weights,
            codes,  # type: ignore[arg-type]
            fp8_output,
            fp8_grad,
        )

    def _want_autocast(self) -> None:
        """AutogradError where this call in high precision, in a backward pass, does again what ran in FP8."""
        self.__dict__["_unrecorded"] = False
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
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
            self.operation == "linear"
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
        if brings(self):
            return
        want_parameters(type(self).__name__, self._parameters, x)
        if self.fuse_wgrad_accumulation and torch.is_grad_enabled():
            self._fused(None, autocast_dtype(x) or x.dtype)

    def _fused(self, first: bool | None, dtype: torch.dtype) -> Fused:
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
        return Fused(weights, first is True, some, aligned)

    def _run_fp8(
        self,
        tensors: dict[str, Tensor],
        state: AutocastState,
        first: bool | None,
        bias: str,
        options: dict[str, Any],
        fused: Fused | None,
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
        if (
            first is not None
            or weights
            or codes is not None
            or kept is not None
            or fp8_grad
            or not state.enabled
        ):
            outputs = self._run_special(
                tensors, state, first, bias, options, fused, weights, codes, kept, training, fp8_grad
            )
        else:
            what = self._call(self._fp8_of(recipe), False, bias, options, tensors, delayed, fused)
            prepared = prepare(what, list(tensors.values()), True)  # refuses before the state is touched
            wiring = self.wiring(recipe, training, record, None) if delayed else NO_STATE
            if not idle:
                recompute.keep(self, self.fp8_meta["scaling_fwd"].scale if delayed else None)
            outputs = prepared.run(wiring, fused)
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
        fused: Fused | None,
        weights: Held8,
        codes: dict[str, Tensor] | None,
        kept: Kept | None,
        training: bool,
        fp8_grad: bool,
    ) -> dict[str, Tensor]:
        """A pass that calibrates, is done again, or has an operand that is in FP8 already or is to be
        kept."""
        want_alike(self.operation, tensors)
        recipe = state.recipe
        delayed, record = recipe.history is not None, training or state.calibrating
        cached = None
        if weights:
            cached = {}
            for prefix, weight in zip(self.gemms, weights.values(), strict=True):
                cached |= weight.inputs(type(self).__name__, prefix, self._fp8_of(recipe))
        elif kept is None and codes is None and (first or (delayed and self._wired is None)):
            # a cache or a state is to be made: not for what is refused
            own = self._fp8_of(recipe) if state.enabled else None
            asked = self._call(own, False, bias, options, tensors, delayed and state.enabled, fused)
            asked.rehearse(list(tensors.values()))
        wiring = self.wiring(recipe, training, record, kept) if delayed else NO_STATE
        if not weights and first is not None and state.enabled:
            cached = (
                self._cached(self._fp8_of(recipe), first, bias, tensors, wiring)
                if kept is None
                else kept.weights
            )
        if kept is None:
            recompute.keep(
                self, self.fp8_meta["scaling_fwd"].scale if delayed else None, None if weights else cached
            )
        if not state.enabled:
            given = options | self.calibration_options
            outputs = apply(
                self._call(None, False, bias, given, tensors, False, fused),
                list(tensors.values()),
                fused=fused,
            )
            if delayed and record and kept is None:
                with torch.no_grad():
                    self._note(row_of(self.calibrate(tensors, outputs), FORWARD_SLOTS * len(self.gemms)))
            return outputs
        fp8 = self._fp8_of(recipe)
        if fp8_grad and tensors["x"].requires_grad and torch.is_grad_enabled():
            tensors["x"] = cast_gradient(tensors["x"], fp8, self.fp8_meta if delayed else None, wiring.ticket)
        if codes or cached:
            tensors = tensors | (codes or {}) | (cached or {})
        what = self._call(fp8, cached is not None, bias, options, tensors, delayed, fused, codes is not None)
        return apply(what, list(tensors.values()), wiring, fused)

    def _note(self, row: Tensor) -> None:
        """Accumulate amaxes that were taken beside an operation, float32 by slot."""
        history = self.fp8_meta["scaling_fwd"].amax_history
        torch.fmax(history[0], row, out=history[0])

    def wiring(self, recipe: Recipe, training: bool, record: bool, kept: Kept | None) -> Wiring:
        """How this call hangs on the state of delayed scaling, which is touched where amaxes are recorded:
        not in a pass that is done again, which has the scales of the first one (``kept``)."""
        found, forward = self._wire(recipe, record), self.fp8_meta["scaling_fwd"]
        if kept is not None:
            assert kept.scales is not None
            ticket = None if found.ticket is None else (*found.ticket[:2], recompute.walk())
            front, scale = products(self.gemms)[0], forward.scale
            nowhere = amax_views(front, recompute.nowhere(scale.numel(), scale.device), forward.device)
            return found._replace(
                scales=scale_views(front, kept.scales, forward.device), front=nowhere, ticket=ticket
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

    def _call(
        self,
        fp8: Quantization | None,
        cached: bool,
        bias: str,
        options: dict[str, Any],
        tensors: dict[str, Tensor],
        scaled: bool = False,
        fused: Fused | None = None,
        codes: bool = False,
    ) -> Call:
        """The call for this request; found by what may differ from one to the next."""
        main = () if fused is None else (fused.dtype, fused.overwrite)
        key = (id(fp8), cached, codes, bias, main, *options.items(), *tensors)
        found = self._calls.get(key)
        if found is None:
            more: dict[str, Any] = {"input_cached": True} if codes else {}
            if fused is not None:
                more |= {"main_grad": kind_of(fused.dtype).name, "overwrite_grad": fused.overwrite}
            spec = layer_spec(self._spec, fp8, cached, bias, tuple(options.items()), tuple(more.items()))
            made = call(self.operation, spec, tuple(tensors), self.gemms if fp8 is not None else (), scaled)
            if len(self._calls) >= _CALL_LIMIT:
                self._calls.clear()
            found = self._calls[key] = (made, fp8)  # fp8 is held, so that its id stays its own
        return found[0]

    # --- delayed scaling ------------------------------------------------------------------------------------

    def _wire(self, recipe: Recipe, record: bool) -> Wiring:
        """The state's views by the operation's names. Where amaxes are to be recorded, the history gets the
        recipe's length."""
        known = self._wired
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
        place = forward.device
        front, back = products(self.gemms)
        wiring = Wiring(
            scale_views(front, forward.scale, place), late=scale_views(back, backward.scale, place)
        )
        if record:
            wiring = wiring._replace(
                front=amax_views(front, forward.amax_history, place),
                back=amax_views(back, backward.amax_history, place),
                ticket=(history, backward, None),
            )
        self._wired = (recipe, record, wiring)
        return wiring

    # --- the weight cache -----------------------------------------------------------------------------------

    def _cached(
        self, fp8: Quantization, first: bool, bias: str, tensors: dict[str, Tensor], wiring: Wiring
    ) -> dict[str, Tensor]:
        """The FP8 weights: cast now for the first micro-batch, or where there are none by this recipe; else
        those of the first one."""
        text = encode(fp8)
        if first or self._weights is None or self._weights[0] != text:
            made: dict[str, Tensor] = {}
            with torch.inference_mode(False), torch.no_grad():
                for i, prefix in enumerate(self.gemms):
                    own = {name: tensors[name] for name in self.weight_inputs() if name.startswith(prefix)}
                    spec = LinearSpec(layer_products(layer_spec(self._spec, fp8, False, bias, ()))[i])
                    made |= apply(
                        call("weight_cast", spec, tuple(own), (prefix,), wiring is not NO_STATE),
                        list(own.values()),
                        _of(wiring, prefix),
                    )
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
            return trace(self.operation, spec, tuple(tensors), list(tensors.values()))
        parts, traced = recipe_parts(state.recipe), self._traced(state)
        if not state.enabled:
            spec = layer_text(
                self._spec_text, (), False, bias, (*options.items(), *self.calibration_options.items())
            )
            outputs = trace(self.operation, spec, tuple(tensors), list(tensors.values()))
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
        return trace(self.operation, spec, tuple(tensors), list(tensors.values()), self.gemms, traced)

    def _traced(self, state: AutocastState) -> Traced | None:
        """How a compiled call hangs on the state of delayed scaling; None with another recipe."""
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
        return Traced(forward, backward, text, record, when)

    def _trace_cached(
        self,
        parts: tuple[Any, ...],
        first: bool,
        bias: str,
        tensors: dict[str, Tensor],
        traced: Traced | None,
    ) -> dict[str, Tensor]:
        text = fp8_text(parts)
        if first or self._weights is None or self._weights[0] != text:
            made: dict[str, Tensor] = {}
            with torch.no_grad():
                for i, prefix in enumerate(self.gemms):
                    own = {name: tensors[name] for name in self.weight_inputs() if name.startswith(prefix)}
                    spec = layer_text(self._spec_text, parts, False, bias, (), i)
                    made.update(
                        trace("weight_cast", spec, tuple(own), list(own.values()), (prefix,), traced, i)
                    )
            self._weights = (text, made)
        return self._weights[1]


def _of(wiring: Wiring, prefix: str) -> Wiring:
    """The part of a wiring that one weight's cast reads and writes."""
    if wiring is NO_STATE:
        return wiring
    scales = Placed(
        {f"{prefix}{operand}_scale": wiring.scales[f"{prefix}{operand}_scale"] for operand in "xw"}
    )
    return Wiring(
        scales, Placed({f"{prefix}w_amax": wiring.front[f"{prefix}w_amax"]}) if wiring.front else NOTHING
    )
