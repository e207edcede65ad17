"""``Fp8Module``: what the layers with weights share. It reads the autocast, holds scales and histories, and
caches FP8 weights.

A layer is one operation. In high precision the operation runs alone. In FP8 with delayed scaling it also gets
views of the layer's state: scales to read, row 0 of the histories to accumulate amaxes into. The states are
updated when the outermost autocast ends (forward) and when the backward pass ends (backward), all layers of a
recipe in one kernel call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from fp8kit import arrays
from fp8kit.arrays import ArrayView, Device
from fp8kit.autocast import current, touch_forward
from fp8kit.autograd import Tensor, apply, is_grad_enabled, no_grad, validate
from fp8kit.backends import dispatch
from fp8kit.errors import Fp8kitError
from fp8kit.formats import float32, uint8
from fp8kit.layers.fp8_layer import FP8Layer, layer_products, layer_spec
from fp8kit.layers.recompute import Kept
from fp8kit.nn import recompute
from fp8kit.nn.layer import NativeLayer
from fp8kit.nn.module import Parameter
from fp8kit.ops.linear import LinearSpec, weight_cast
from fp8kit.quantization import Quantization
from fp8kit.recipe import Recipe
from fp8kit.scaling import (
    BACKWARD_SLOTS,
    FIELDS,
    FORWARD_SLOTS,
    ScalingState,
    backward_slots,
    check_saved,
    forward_slots,
    update,
)

Inputs = dict[str, Tensor | ArrayView | None]
_NONE: dict[str, ArrayView] = {}


class _Ticket(NamedTuple):
    """A backward state to be updated by a recipe when the backward pass ends."""

    recipe: Recipe
    state: ScalingState

    def discard(self) -> None:
        """The backward pass failed: what it recorded is dropped."""
        self.state.drop()


class _Way(NamedTuple):
    """What a recipe comes to in a layer. ``implied``: what stands for the scales that its operation reads."""

    recipe: Recipe
    fp8: Quantization
    delayed: bool
    implied: dict[str, ArrayView]


class _Wiring(NamedTuple):
    """How a layer's state hangs on its operation under one recipe."""

    recipe: Recipe
    scales: dict[str, ArrayView]  # inputs
    given: dict[str, ArrayView]  # amax outputs: row 0 of the histories
    given_again: dict[str, ArrayView]  # those of the gradients alone
    late: dict[str, ArrayView]  # the gradients' scales, read at backward time
    finish: tuple[Callable[[list[Any]], None], _Ticket]


class _WeightCache(NamedTuple):
    """FP8 weights kept across the micro-batches of a step, and what they were cast by."""

    fp8: Quantization
    arrays: dict[str, ArrayView]


def commit_backward(tickets: list[_Ticket]) -> None:
    """Update the backward states of a backward pass that has ended, those of one recipe object by one kernel
    call."""
    groups: dict[int, tuple[Recipe, list[ScalingState]]] = {}
    for recipe, state in tickets:
        groups.setdefault(id(recipe), (recipe, []))[1].append(state)
    for recipe, states in groups.values():
        update(recipe.history, states, forward=False)


class Fp8Module(FP8Layer, NativeLayer):
    """Base of layers whose GEMMs run in FP8 under ``autocast``.

    ``fp8_meta``: "scaling_fwd" and "scaling_bwd" -> ``ScalingState``, made by the first use of delayed
    scaling. Forward slots per GEMM: input, weight, output; backward: grad_output, grad_input.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta: dict[str, ScalingState] = {}
        self._specs: dict[Any, Any] = {}
        self._way: _Way | None = None  # of the last recipe
        self._wiring: _Wiring | None = None
        self._weights: _WeightCache | None = None

    # --- what the shared layers ask -------------------------------------------------------------------------

    def activated_amax(self, normed: Tensor, weight: Tensor, bias: Tensor | None) -> ArrayView:
        x, w, device = normed.view.rows(), weight.view, normed.device
        kernels, stream, fc2 = dispatch.kernels(device), arrays.current_stream(device), self._spec.fc2
        h = arrays.empty((x.shape[0], w.shape[0]), x.dtype, device)
        act = arrays.empty((x.shape[0], fc2.in_features), x.dtype, device)
        workspace = arrays.empty((max(kernels.gemm_workspace(), 1),), uint8, device)
        amax = arrays.zeros((1,), float32, device)
        kernels.gemm(x, w, h, "nt", None, None, workspace, stream)
        added = None if bias is None else bias.view
        kernels.act_fwd(
            h, added, act, amax, None, self._spec.activation, self._spec.activation_params, stream
        )
        return amax

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, Parameter):  # another weight may be on another device
            self._way = None

    def __getstate__(self) -> dict[str, Any]:
        """What ``copy.deepcopy`` copies: what is derived from the rest is made anew."""
        return vars(self) | {"_specs": {}, "_way": None, "_wiring": None, "_weights": None}

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
            raise Fp8kitError(
                type(self).__name__, "is_first_microbatch", repr(is_first_microbatch), "True, False or None"
            )
        state = current()
        if state is None or not (state.enabled or state.calibrating):
            return apply(self.operation, self._spec_for(None, False, bias, options), inputs, owner=self)
        recipe, training = state.recipe, is_grad_enabled() or recompute.first()
        way = self._way
        if way is None or way.recipe is not recipe:
            delayed = recipe.history is not None
            way = self._way = _Way(
                recipe,
                recipe.quantization,
                delayed,
                _scales_of(self.gemms, self.device) if delayed else _NONE,
            )
        fp8 = way.fp8
        kept = recompute.recall(self)
        if kept is not None:
            return self._run_again(kept, inputs, recipe if state.enabled else None, fp8, bias, options)
        if not state.enabled:
            recompute.keep(self, _NONE, None)
            return self._run_calibrating(inputs, recipe, training, bias, options)
        spec = self._spec_for(fp8, False, bias, options)
        validate(self.operation, spec, inputs, self, implied=way.implied)  # before the state is touched
        given, late, finish = _NONE, _NONE, None
        scales: dict[str, ArrayView] = _NONE
        record = training or state.calibrating
        if way.delayed:
            wiring = self._wire(recipe, record)
            scales = wiring.scales
            if record:  # inference leaves no trace in the history
                given, late, finish = wiring.given, wiring.late, wiring.finish
                touch_forward(self.fp8_meta["scaling_fwd"], wiring.recipe, training)
        cached = None
        if is_first_microbatch is not None:
            cached = self._cached_weights(fp8, is_first_microbatch, bias, scales, given)
        recompute.keep(self, scales, cached)
        if cached is not None:
            inputs, spec = {**inputs, **cached}, self._spec_for(fp8, True, bias, options)
        return apply(self.operation, spec, {**inputs, **scales}, given, late, finish, self)

    def _run_again(
        self,
        kept: Kept,
        inputs: Inputs,
        recipe: Recipe | None,
        fp8: Quantization,
        bias: str,
        options: dict[str, Any],
    ) -> dict[str, Tensor]:
        """As in the forward pass that is recomputed: with its scales and its cached weights; amaxes of
        gradients only are recorded. ``recipe`` None is high precision."""
        if recipe is None:
            return apply(
                self.operation,
                self._spec_for(None, False, bias, options | self.calibration_options),
                inputs,
                owner=self,
            )
        given, late, finish = _NONE, _NONE, None
        if recipe.history is not None:
            wiring = self._wire(recipe, True)
            given, late, finish = wiring.given_again, wiring.late, wiring.finish
        spec = self._spec_for(fp8, kept.weights is not None, bias, options)
        return apply(
            self.operation, spec, {**inputs, **(kept.weights or {}), **kept.scales}, given, late, finish, self
        )

    def _run_calibrating(
        self, inputs: Inputs, recipe: Recipe, training: bool, bias: str, options: dict[str, Any]
    ) -> dict[str, Tensor]:
        """In high precision; the amaxes that FP8 would have seen are recorded."""
        outputs = apply(
            self.operation,
            self._spec_for(None, False, bias, options | self.calibration_options),
            inputs,
            owner=self,
        )
        if recipe.history is not None:
            wiring = self._wire(recipe, True)
            state = self.fp8_meta["scaling_fwd"]
            touch_forward(state, wiring.recipe, training)
            for slot, tensor in self.calibrate(inputs, outputs):
                amax_of(tensor.view if isinstance(tensor, Tensor) else tensor, state.amaxes[slot])
        return outputs

    def _spec_for(self, fp8: Quantization | None, cached: bool, bias: str, options: dict[str, Any]) -> Any:
        """The operation's spec, the same object for the same request: plans are found by its identity."""
        key = (id(fp8), cached, bias, *options.items())
        found = self._specs.get(key)
        if found is None:
            spec = layer_spec(self._spec, fp8, cached, bias, tuple(options.items()))
            found = self._specs[key] = (spec, fp8)  # fp8 is held, so that its id stays its own
        return found[0]

    # --- delayed scaling ------------------------------------------------------------------------------------

    @property
    def device(self) -> Device:
        """Where the layer's weights are."""
        weight: Parameter = next(iter(self.weight_inputs().values()))
        return weight.device

    def _wire(self, recipe: Recipe, record: bool) -> _Wiring:
        """The state's views by the operation's names. Where amaxes are to be recorded, the history gets the
        recipe's length."""
        wiring = self._wiring
        assert recipe.history is not None
        length = recipe.history.length
        known = wiring is not None and (wiring.recipe is recipe or wiring.recipe == recipe)
        if (
            wiring is not None
            and known
            and (not record or self.fp8_meta["scaling_fwd"].history_len == length)
        ):
            return wiring
        for name, slots in (("scaling_fwd", FORWARD_SLOTS), ("scaling_bwd", BACKWARD_SLOTS)):
            state = self.fp8_meta.get(name)
            if state is None:
                self.fp8_meta[name] = ScalingState(slots * len(self.gemms), length, self.device)
            elif record and state.history_len != length:
                state.resize(length)
        forward, backward = self.fp8_meta["scaling_fwd"], self.fp8_meta["scaling_bwd"]
        operands, gradients = forward_slots(self.gemms), backward_slots(self.gemms)
        scales = {f"{name}_scale": forward.scales[slot] for name, slot in operands.items()}
        given = {f"{name}_amax": forward.amaxes[slot] for name, slot in operands.items()}
        given |= {f"{name}_amax": backward.amaxes[slot] for name, slot in gradients.items()}
        late = {f"{name}_scale": backward.scales[slot] for name, slot in gradients.items()}
        again = {name: view for name, view in given.items() if name.endswith("g_amax")}
        self._wiring = _Wiring(
            recipe, scales, given, again, late, (commit_backward, _Ticket(recipe, backward))
        )
        return self._wiring

    # --- the weight cache -----------------------------------------------------------------------------------

    def _cached_weights(
        self,
        fp8: Quantization,
        first: bool,
        bias: str,
        scales: dict[str, ArrayView],
        given: dict[str, ArrayView],
    ) -> dict[str, ArrayView]:
        """The FP8 weights: those of the first micro-batch; cast now and kept where this is the first, or
        where none are kept by this recipe."""
        cache = self._weights
        if not first and cache is not None and cache.fp8 is fp8:
            return cache.arrays
        made: dict[str, ArrayView] = {}
        weights = self.weight_inputs()
        with no_grad():
            for i, prefix in enumerate(self.gemms):
                own: Inputs = {name: weight for name, weight in weights.items() if name.startswith(prefix)}
                if scales:
                    own[f"{prefix}w_scale"] = scales[f"{prefix}w_scale"]
                key = ("weight_cast", id(fp8), i)
                found = self._specs.get(key)
                if found is None:
                    products = layer_products(layer_spec(self._spec, fp8, False, bias, ()))
                    found = self._specs[key] = (LinearSpec(products[i]), fp8)
                out = apply(weight_cast, found[0], own, given, owner=self)
                made |= {name: part.view for name, part in out.items() if name != f"{prefix}w_amax"}
        self._weights = _WeightCache(fp8, made)
        return made

    # --- checkpoints ----------------------------------------------------------------------------------------

    def extra_state(self) -> dict[str, ArrayView]:
        """``scaling_fwd.scale``, ``.scale_inv``, ``.amax_history`` and the same of ``scaling_bwd``; nothing
        before the first FP8 step."""
        return {
            f"{name}.{field}": state.views[field] for name, state in self.fp8_meta.items() for field in FIELDS
        }

    def check_extra_state(self, state: Mapping[str, ArrayView]) -> Callable[[], None]:
        """Check a saved FP8 state, float32 arrays by name as in ``ScalingState``; the function that is
        returned takes it over (an empty one: the layer has none). CheckpointError where names, shapes, dtypes
        or numbers do not fit (``scaling.check_saved``)."""
        made = {
            name: ScalingState.of(parts, self.device)
            for name, parts in check_saved(state, len(self.gemms)).items()
        }

        def take() -> None:
            if [(n, s.history_len) for n, s in made.items()] == [
                (n, s.history_len) for n, s in self.fp8_meta.items()
            ]:
                for name, state in made.items():  # in place: a captured graph goes on with what was loaded
                    self.fp8_meta[name].load(state)
                return
            self.fp8_meta = made
            self._wiring = None

        return take

    def forget(self) -> None:
        self._weights = None

    def arrays_used(self) -> Iterator[ArrayView]:
        yield from super().arrays_used()
        for state in self.fp8_meta.values():
            yield from state.views.values()
        if self._weights is not None:
            yield from self._weights.arrays.values()


@lru_cache(maxsize=1024)
def _scales_of(gemms: tuple[str, ...], device: Device) -> dict[str, ArrayView]:
    """What stands for the scales of a layer's operands."""
    return {f"{name}_scale": ArrayView(0, (1,), float32, device) for name in forward_slots(gemms)}


def amax_of(view: ArrayView, amax: ArrayView) -> None:
    """amax = max(amax, max|view|), on the device."""
    matrix = view.rows()
    dispatch.kernels(view.device).amax(matrix, amax, matrix.shape, arrays.current_stream(view.device))
