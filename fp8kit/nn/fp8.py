"""``Fp8Module``: what the layers with weights share. It reads the autocast, holds scales and histories, and
caches FP8 weights.

A layer is one operation. In high precision the operation runs alone. In FP8 with delayed scaling it also gets
views of the layer's state: scales to read, row 0 of the histories to accumulate amaxes into. The states are
updated when the outermost autocast ends (forward) and when the backward pass ends (backward), all layers of a
recipe in one kernel call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any, ClassVar, NamedTuple

from fp8kit import arrays
from fp8kit.arrays import ArrayView, Device
from fp8kit.autocast import touch_forward
from fp8kit.autograd import Tensor, apply, no_grad, validate
from fp8kit.backends import dispatch
from fp8kit.formats import float32, int64
from fp8kit.layers.fp8_layer import FP8Layer
from fp8kit.layers.recompute import Kept
from fp8kit.nn import recompute
from fp8kit.nn.layer import NativeLayer
from fp8kit.nn.module import Parameter
from fp8kit.nn.random import next_rng
from fp8kit.ops.linear import weight_cast
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


class _Update(NamedTuple):
    """A backward state to be updated by a recipe when the backward pass ends."""

    recipe: Recipe
    state: ScalingState

    def discard(self) -> None:
        """The backward pass failed: what it recorded is dropped."""
        self.state.drop()


class Binding(NamedTuple):
    """How a layer's state hangs on its operation under one recipe."""

    recipe: Recipe | None = None
    scales: dict[str, ArrayView] = _NONE  # inputs
    amaxes: dict[str, ArrayView] = _NONE  # outputs: row 0 of the histories
    grad_amaxes: dict[str, ArrayView] = _NONE  # those of the gradients alone
    grad_scales: dict[str, ArrayView] = _NONE  # read at backward time
    finish: tuple[Callable[[list[Any]], None], _Update] | None = None


def commit_backward(updates: list[_Update]) -> None:
    """Update the backward states of a backward pass that has ended, those of one recipe object by one kernel
    call."""
    groups: dict[int, tuple[Recipe, list[ScalingState]]] = {}
    for recipe, state in updates:
        groups.setdefault(id(recipe), (recipe, []))[1].append(state)
    for recipe, states in groups.values():
        update(recipe.history, states, False)


class Fp8Module(FP8Layer, NativeLayer):
    """Base of layers whose GEMMs run in FP8 under ``autocast``.

    ``fp8_meta``: "scaling_fwd" and "scaling_bwd" -> ``ScalingState``, made by the first use of delayed
    scaling. Forward slots per GEMM: input, weight, output; backward: grad_output, grad_input.
    """

    recomputation: ClassVar[Any] = recompute
    no_binding: ClassVar[Binding] = Binding()

    # --- what the shared layers ask -------------------------------------------------------------------------

    def validate_call(self, spec: Any, inputs: Inputs, delayed: bool, rng: bool = False) -> None:
        device = inputs["x"].device  # type: ignore[union-attr]
        if rng:
            inputs = {**inputs, "rng": ArrayView(0, (2,), int64, device)}
        implied = _scales_of(self.gemms, device) if delayed else _NONE
        validate(self.operation, spec, inputs, self, implied=implied)

    def with_rng(self, spec: Any, inputs: Inputs, delayed: bool) -> Inputs:
        self.validate_call(spec, inputs, delayed, True)
        return {**inputs, "rng": next_rng(inputs["x"].device)}  # type: ignore[union-attr]

    def prepare_call(
        self, spec: Any, inputs: Inputs, delayed: bool
    ) -> Callable[[Any, Any], dict[str, Tensor]]:
        if delayed:
            self.validate_call(spec, inputs, True)
        return partial(self._call, spec, inputs)

    def _call(self, spec: Any, inputs: Inputs, binding: Binding, main: Any) -> dict[str, Tensor]:
        _, scales, amaxes, _, backward_inputs, finish = binding
        if scales:
            inputs = {**inputs, **scales}
        return apply(self.operation, spec, inputs, amaxes, backward_inputs, finish, self)

    def cast_weight(self, spec: Any, inputs: Inputs, prefix: str, binding: Binding) -> dict[str, ArrayView]:
        if binding.scales:
            inputs[f"{prefix}w_scale"] = binding.scales[f"{prefix}w_scale"]
        with no_grad():
            out = apply(weight_cast, spec, inputs, binding.amaxes, owner=self)
        return {name: part.view for name, part in out.items() if name != f"{prefix}w_amax"}

    def bind_state(self, recipe: Recipe, training: bool, record: bool, kept: Kept | None) -> Binding:
        found = self._bound(recipe, record or kept is not None)
        if kept is not None:
            return found._replace(scales=kept.scales, amaxes=found.grad_amaxes)
        if not record:  # inference leaves no trace in the history
            return Binding(recipe, found.scales)
        forward = self.fp8_meta["scaling_fwd"]
        scope = touch_forward(forward, found.recipe, training)  # type: ignore[arg-type]
        forward.group = self.fp8_meta["scaling_bwd"].group = scope.amax_reduction_group
        return found

    def record_amaxes(self, tensors: list[tuple[int, Any]]) -> None:
        amaxes = self.fp8_meta["scaling_fwd"].amaxes
        for slot, tensor in tensors:
            matrix = (tensor.view if isinstance(tensor, Tensor) else tensor).rows()
            stream = arrays.current_stream(matrix.device)
            dispatch.kernels(matrix.device).amax(matrix, amaxes[slot], matrix.shape, stream)

    def keep_pass(self, binding: Binding, weights: Any) -> None:
        recompute.keep(self, binding.scales, weights)

    # --- delayed scaling ------------------------------------------------------------------------------------

    @property
    def device(self) -> Device:
        """Where the layer's weights are."""
        weight: Parameter = next(iter(self.weight_inputs().values()))
        return weight.device

    def _bound(self, recipe: Recipe, record: bool) -> Binding:
        """Returns the state's views by the operation's names. Where amaxes are to be recorded, the history
        gets the recipe's length."""
        known: Binding | None = self._binding
        assert recipe.history is not None
        length = recipe.history.length
        if (
            known is not None
            and (known.recipe is recipe or known.recipe == recipe)
            and (not record or self.fp8_meta["scaling_fwd"].history_len == length)
        ):
            return known
        for name, slots in (("scaling_fwd", FORWARD_SLOTS), ("scaling_bwd", BACKWARD_SLOTS)):
            state = self.fp8_meta.get(name)
            if state is None:
                self.fp8_meta[name] = ScalingState(slots * len(self.gemms), length, self.device)
            elif record and state.history_len != length:
                state.resize(length)
        forward, backward = self.fp8_meta["scaling_fwd"], self.fp8_meta["scaling_bwd"]
        operands, gradients = forward_slots(self.gemms), backward_slots(self.gemms)
        scales = {f"{name}_scale": forward.scales[slot] for name, slot in operands.items()}
        amaxes = {f"{name}_amax": forward.amaxes[slot] for name, slot in operands.items()}
        grad_amaxes = {f"{name}_amax": backward.amaxes[slot] for name, slot in gradients.items()}
        grad_scales = {f"{name}_scale": backward.scales[slot] for name, slot in gradients.items()}
        finish = commit_backward, _Update(recipe, backward)
        found = Binding(recipe, scales, amaxes | grad_amaxes, grad_amaxes, grad_scales, finish)
        self._binding = found
        return found

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
            self._binding = None

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
    """Returns what stands for the scales of a layer's operands."""
    return {f"{name}_scale": ArrayView(0, (1,), float32, device) for name in forward_slots(gemms)}
