"""``FP8Layer``: a layer that is one operation, whose GEMMs run in FP8 under ``autocast``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from fp8kit import inspection, scaled_products
from fp8kit.autocast import AutocastState, current
from fp8kit.collectives import Collectives, named
from fp8kit.errors import ArgumentError
from fp8kit.inspection import Watch
from fp8kit.layers.arguments import want_plain
from fp8kit.layers.base import Layer, spec_object
from fp8kit.layers.recompute import Kept
from fp8kit.ops.linear import LinearSpec
from fp8kit.ops.product import ProductSpec
from fp8kit.quantization import Quantization
from fp8kit.recipe import Recipe
from fp8kit.scaling import forward_slots
from fp8kit.spec import Operation

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_SPEC_LIMIT = 256  # requests of a layer: recipes, options


def layer_products(spec: Any) -> list[ProductSpec]:
    """Returns the products of a layer's spec, in order."""
    own = [value for value in vars(spec).values() if isinstance(value, ProductSpec)]
    return list(getattr(spec, "products", own))


def layer_spec(
    spec: Any,
    fp8: Quantization | None,
    cached: bool,
    bias: str,
    options: tuple[tuple[str, Any], ...],
    more: tuple[tuple[str, Any], ...] = (),
) -> Any:
    """``spec`` with its products in FP8 or not, their weights cached or not, ``bias`` of the last one,
    ``options`` as further fields, and ``more`` as further fields of the products."""
    names = [
        field.name for field in dataclasses.fields(spec) if isinstance(getattr(spec, field.name), ProductSpec)
    ]
    changes = {
        name: dataclasses.replace(getattr(spec, name), fp8=fp8, weight_cached=cached, **dict(more))
        for name in names
    }
    changes[names[-1]] = dataclasses.replace(changes[names[-1]], bias=bias)
    watch = dict(more).get("watch")
    other = {} if watch is None else dict(watch.changed)
    for name, product in changes.items():  # those of groups are their one product's
        if product.prefix in other:
            changes[name] = dataclasses.replace(product, fp8=other[product.prefix])
    return dataclasses.replace(spec, **changes, **dict(options))


@lru_cache(maxsize=64)
def scale_names(gemms: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the scales that a layer's forward reads from its state, in the order of the slots."""
    return tuple(f"{operand}_scale" for operand in forward_slots(gemms))


class Operands(NamedTuple):
    """The operands of a call, as an operation takes them.

    ``inputs`` by name; ``main``: where the weights' gradients are accumulated, None for fresh memory;
    ``fields``: further fields of the products that this asks for. ``weights``: those that are held in FP8, by
    name; ``codes``: the parts of an x that is in FP8 already.
    """

    inputs: dict[str, Any]
    main: Any = None
    fields: tuple[tuple[str, Any], ...] = ()
    weights: Mapping[str, Any] = _NOTHING
    codes: Mapping[str, Any] | None = None


class WeightCache(NamedTuple):
    """FP8 weights kept across the micro-batches of a step; ``key``: what they were cast by."""

    key: Any
    arrays: dict[str, Any]


class FP8Layer(Layer):
    """Base of layers whose GEMMs run in FP8 under ``autocast``.

    ``operation``: what the layer is. ``gemms``: prefixes of the operation's names, one a GEMM. A subclass
    gives ``set_spec`` its spec in high precision, and defines ``weight_inputs`` and ``calibrate``.

    ``fp8_meta``: "scaling_fwd" and "scaling_bwd" -> ``ScalingState``, made by the first use of delayed
    scaling. Forward slots per GEMM: input, weight, output; backward: grad_output, grad_input. With delayed
    scaling the operation reads scales from there and accumulates amaxes into row 0 of the histories. The
    states are updated when the outermost autocast ends (forward) and when the backward pass ends (backward).
    """

    operation: ClassVar[Operation]
    gemms: tuple[str, ...] = ("",)
    # further fields of the spec while calibrating
    calibration_options: ClassVar[dict[str, Any]] = {}
    fuse_wgrad_accumulation = False
    # whether each rank of a group has a part of them (``ParallelLayer``)
    splits_weights = False
    # whether a weight that is cast depends on the input, so that none is kept
    casts_weights_anew = False
    # what the user calls it
    name: str | None = None
    # Transformer Engine's name of a part whose whole was given a ``name``, where that is another one
    debug_name: str | None = None
    # of calls that do not say is_first_microbatch
    microbatch: bool | None = None
    # with recipes that differ from layer to layer: (recipe, the layer's name, its own recipe)
    _own: tuple[Recipe, str | None, Recipe | None] | None = None
    # the frontend's module of checkpoints: idle, first, later, recall
    recomputation: ClassVar[Any]
    # the binding of a call that uses no state
    no_binding: ClassVar[Any]

    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta: dict[str, Any] = {}
        self._forget()

    def _forget(self) -> None:
        """Drop what is derived from the rest."""
        self._specs: dict[Any, tuple[Any, Quantization | None]] = {}
        self._fp8: tuple[Recipe, Quantization, Quantization] | None = None
        self._binding: Any = None
        self._last: Any = None  # the frontend's: the operation of the last call
        self._weights: WeightCache | None = None

    def change_spec(self, spec: Any) -> None:
        super().change_spec(spec)
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        """What ``copy.deepcopy`` copies: what is derived from the rest is made anew."""
        known = ("_fp8", "_binding", "_last", "_weights", "_own")
        return vars(self) | {"_specs": {}, **dict.fromkeys(known)}

    @property
    def last_recipe(self) -> Recipe | None:
        """The recipe that it ran by last, within ``autocast`` and outside of a compiled function; None before
        that."""
        return None if self._fp8 is None else self._fp8[0]

    # --- what a subclass gives ------------------------------------------------------------------------------

    def weight_inputs(self) -> dict[str, Any]:
        """Returns the weights by their name in the operation."""
        raise NotImplementedError

    def calibrate(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> list[tuple[int, Any]]:
        """Returns (slot, a tensor whose amax counts) of a pass in high precision: each GEMM's input (slot 3
        i) and weight (3 i + 1). ``inputs``, ``outputs``: the operation's, by name."""
        raise NotImplementedError

    # --- what a frontend gives ------------------------------------------------------------------------------

    def open_operands(
        self, inputs: dict[str, Any], state: AutocastState | None, first: bool | None
    ) -> Operands:
        """Returns the operands of a call within the autocast ``state``."""
        return Operands(inputs)

    def validate_call(self, spec: Any, inputs: dict[str, Any], delayed: bool, rng: bool = False) -> None:
        """Raise what the call would raise, and run nothing. ``delayed``: scales will be added; ``rng``: so
        will random numbers."""
        raise NotImplementedError

    def prepare_call(
        self, spec: Any, inputs: dict[str, Any], delayed: bool
    ) -> Callable[[Any, Any], dict[str, Any]]:
        """Returns a function of a binding and of ``Operands.main`` that makes the call, with that state, and
        returns its outputs by name. What is refused although it is ``delayed`` is refused here, before the
        layer's state is touched."""
        raise NotImplementedError

    def with_rng(self, spec: Any, inputs: dict[str, Any], delayed: bool) -> dict[str, Any]:
        """``inputs`` and ``rng``, drawn for a call that ``validate_call`` does not refuse."""
        raise NotImplementedError

    def cast_weight(self, spec: Any, inputs: dict[str, Any], prefix: str, binding: Any) -> dict[str, Any]:
        """Returns the weights of one GEMM in FP8, unrecorded; ``prefix``: of its names."""
        raise NotImplementedError

    def bind_state(self, recipe: Recipe, training: bool, record: bool, kept: Kept | None) -> Any:
        """Returns the operation's binding to the state of delayed scaling, which is touched where amaxes are
        recorded: not in a pass that is recomputed, which has the scales of the first one (``kept``)."""
        raise NotImplementedError

    def record_amaxes(self, tensors: list[tuple[int, Any]]) -> None:
        """Accumulate the amaxes of tensors, by the slots of the forward state."""
        raise NotImplementedError

    def keep_pass(self, binding: Any, weights: Any) -> None:
        """In the first pass of a checkpoint: keep what this call found."""
        raise NotImplementedError

    def product_spec(self, index: int) -> Any:
        """``linear``'s spec of one of the layer's products in high precision; within ``torch.compile`` its
        text."""
        return spec_object("LinearSpec", layer_products(self._spec)[index])

    def note_pass(self, unrecorded: bool, fp8: bool) -> None:
        """Called before each pass: whether it is in ``fp8`` and ``unrecorded``."""

    def cache_key(self, fp8: Quantization) -> Any:
        """Returns what cached weights are found by."""
        return fp8

    def check_held(self, fp8: Quantization) -> None:
        """Raise what ``held_inputs`` would raise, where weights are held in FP8."""

    def held_inputs(self, weights: Mapping[str, Any], fp8: Quantization) -> dict[str, Any]:
        """Returns the operation's inputs of weights that are held in FP8."""
        raise NotImplementedError

    def cast_output(self, y: Any, fp8: Quantization, delayed: bool, record: bool, kept: Kept | None) -> Any:
        """y in FP8, for ``fp8_output``."""
        raise NotImplementedError

    def cast_gradient(self, x: Any, fp8: Quantization, delayed: bool, binding: Any) -> Any:
        """x, whose gradient will be in FP8, for ``fp8_grad``."""
        raise NotImplementedError

    def run_compiled(
        self,
        inputs: dict[str, Any],
        is_first_microbatch: bool | None,
        bias: str,
        in_fp8: Mapping[str, bool],
        options: dict[str, Any],
    ) -> dict[str, Any]:
        """``run`` within ``torch.compile``; ``in_fp8``: ``fp8_output`` and ``fp8_grad``."""
        raise NotImplementedError

    # --- running --------------------------------------------------------------------------------------------

    def check_options(self, is_first_microbatch: Any, fp8_output: Any = False, fp8_grad: Any = False) -> None:
        """ArgumentError for options of ``forward`` that are no flags, UnsupportedError for what this frontend
        does not have."""
        if is_first_microbatch is None and fp8_output is fp8_grad is False:
            return  # as in most calls
        want_plain(self.layer_name, is_first_microbatch, fp8_output, fp8_grad)
        if fp8_output or fp8_grad:
            self.check_supported({"fp8_output": fp8_output, "fp8_grad": fp8_grad})

    def check_split(self, fp8_output: Any, fp8_grad: Any) -> None:
        """ArgumentError or UnsupportedError if a layer whose weights ranks share cannot make this call."""
        raise NotImplementedError

    def run(
        self,
        inputs: dict[str, Any],
        is_first_microbatch: bool | None,
        bias: str,
        fp8_output: bool = False,
        fp8_grad: bool = False,
        **options: Any,
    ) -> dict[str, Any]:
        """Run the layer's operation on ``inputs`` (x and parameters), as the autocast says, and return its
        outputs by name. ``bias``: of the last product; ``fp8_output``, ``fp8_grad``: y, and the gradient of
        x, in FP8 where FP8 is on (see ``Linear``); ``options``: further fields of the spec."""
        if self.splits_weights:
            self.check_split(fp8_output, fp8_grad)
        first = is_first_microbatch
        if first is not None and not isinstance(first, bool):
            raise ArgumentError(
                type(self).__name__, "is_first_microbatch", repr(first), "True, False or None"
            )
        first = self.microbatch if first is None else first
        if self.is_compiling():
            in_fp8 = {"fp8_output": fp8_output, "fp8_grad": fp8_grad}
            return self.run_compiled(inputs, first, bias, in_fp8, options)
        state = current()
        if state is not None and state.recipe.by_layer:
            state = self.own_state(state)
        operands = self.open_operands(inputs, state, first)
        if (inspector := inspection.hooks.inspector) is not None:
            watch = inspector.of_layer(self, state)
            if watch is not None:
                operands = self._shown(operands, watch)
                first = None if watch.changed else first
        if state is None or not (state.enabled or state.calibrating):
            self.note_pass(False, False)
            spec = self._spec_for(None, False, bias, options, operands.fields)
            return self.prepare_call(spec, operands.inputs, False)(self.no_binding, operands.main)
        recipe, enabled, idle = state.recipe, state.enabled, self.recomputation.idle()
        fp8, delayed = self._fp8_of(recipe), recipe.history is not None
        if first is not None and (fp8.random_weight or self.casts_weights_anew):
            first = None
        kept = None if idle else self.recomputation.recall(self)
        training = self.is_grad_enabled() or (not idle and self.recomputation.first())
        record = training or state.calibrating
        self.note_pass(enabled and not training, True)
        weights, codes = operands.weights, operands.codes
        plain = first is None if not weights else not self.casts_weights_anew
        if plain and kept is None and enabled and not (fp8_grad or codes):
            own = operands.inputs | self.held_inputs(weights, fp8) if weights else operands.inputs
            spec = self._spec_for(fp8, bool(weights), bias, options, operands.fields)
            own = self.with_rng(spec, own, delayed) if fp8.needs_rng else own
            call = self.prepare_call(spec, own, delayed)
            binding = self.bind_state(recipe, training, record, None) if delayed else self.no_binding
            if not idle:
                self.keep_pass(binding, None)
            outputs = call(binding, operands.main)
        else:
            outputs = self._run_special(
                operands, state, fp8, first, bias, options, kept, training, record, fp8_grad
            )
        if fp8_output and enabled:
            outputs["y"] = self.cast_output(outputs["y"], fp8, delayed, record, kept)
        return outputs

    def check_run(self, inputs: dict[str, Any], bias: str, **options: Any) -> None:
        """Raise what ``run`` would raise for ``inputs``, of which some may be ``stand_in``, and run nothing:
        what a layer of several asks of the later ones before the first one runs."""
        if self.splits_weights:
            self.check_split(False, False)
        state, fp8, delayed = current(), None, False
        if state is not None and state.recipe.by_layer:
            state = self.own_state(state)
        if state is not None and state.enabled:
            fp8, delayed = self._fp8_of(state.recipe), state.recipe.history is not None
            self.check_held(fp8)
        spec = self._spec_for(fp8, False, bias, options, ())
        self.validate_call(spec, inputs, delayed, fp8 is not None and fp8.needs_rng)

    def _run_special(
        self,
        operands: Operands,
        state: AutocastState,
        fp8: Quantization,
        first: bool | None,
        bias: str,
        options: dict[str, Any],
        kept: Kept | None,
        training: bool,
        record: bool,
        fp8_grad: bool,
    ) -> dict[str, Any]:
        """Run a pass that calibrates, is recomputed, or has an input that is in FP8 already, a gradient
        that is to be, or weights that are to be kept."""
        inputs, main, fields, weights, codes = operands
        delayed, enabled = state.recipe.history is not None, state.enabled
        if weights and self.casts_weights_anew:
            wanted = "parameters in high precision: smoothing by channel scales them before each cast"
            raise ArgumentError(type(self).__name__, "fc2_weight", "a weight held in FP8", wanted)
        # a cache or a state may be made: not for what is refused
        spec = self._spec_for(fp8 if enabled else None, False, bias, options, fields)
        if enabled and fp8.needs_rng:
            inputs = self.with_rng(spec, inputs, delayed)
        else:
            self.validate_call(spec, inputs, delayed and enabled)
        cached = self.held_inputs(weights, fp8) if weights else None
        binding = self.bind_state(state.recipe, training, record, kept) if delayed else self.no_binding
        if not weights and first is not None and enabled:
            cached = self._cached(fp8, first, bias, inputs, binding) if kept is None else kept.weights
        if kept is None:
            self.keep_pass(binding, None if weights else cached)
        if not enabled:
            spec = self._spec_for(None, False, bias, options | self.calibration_options, fields)
            outputs = self.prepare_call(spec, inputs, False)(self.no_binding, main)
            if delayed and record and kept is None:
                with self.no_grad():
                    self.record_amaxes(self.calibrate(inputs, outputs))
            return outputs
        if fp8_grad:
            inputs["x"] = self.cast_gradient(inputs["x"], fp8, delayed, binding)
        if codes is not None:
            fields = (("input_cached", True), *fields)
        spec = self._spec_for(fp8, cached is not None, bias, options, fields)
        inputs = inputs | dict(codes or {}) | (cached or {})
        return self.prepare_call(spec, inputs, delayed)(binding, main)

    def ranks_of_weights(self) -> dict[str, Collectives]:
        """Returns, by a product's prefix, the collectives of the ranks that share its weight; products whose
        weight this rank has whole are left out."""
        shared = (own for own in layer_products(self._spec) if own.parallel is not None)
        return {own.prefix: named(own.group) for own in shared}

    def own_state(self, state: AutocastState) -> AutocastState | None:
        """Returns the autocast as it is for this layer, whose recipes differ from layer to layer: with its
        own one, or None where it is to run in high precision."""
        known = self._own
        if known is None or known[0] is not state.recipe or known[1] != self.name:
            own = state.recipe.for_layer(self.layer_name, self.name or "")
            self._own = known = (state.recipe, self.name, own)
        return None if known[2] is None else state._replace(recipe=known[2])

    def _watched(self, watch: Watch) -> Watch:
        """Returns what this call shows: in a checkpoint's recompute pass no more than its backward, since the
        first pass has shown the rest."""
        return watch.only(forward=False) if self.recomputation.recomputing() else watch

    def _shown(self, operands: Operands, watch: Watch) -> Operands:
        """Returns the operands of a call that shows something. What is held in FP8 has its values beside its
        codes, and no codes where the recipe is changed, since another GEMM may read it then."""
        held = [*operands.weights, *(["x"] if operands.codes is not None else [])]
        values = {name: operands.inputs[name].dequantize() for name in held}
        fields = (*operands.fields, ("watch", self._watched(watch)))
        operands = operands._replace(inputs={**operands.inputs, **values}, fields=fields)
        return operands._replace(weights=_NOTHING, codes=None) if watch.changed else operands

    def _fp8_of(self, recipe: Recipe) -> Quantization:
        """Returns what a recipe means for the layer's products where its weights are."""
        known = self._fp8
        if known is None or known[0] is not recipe:
            fp8 = recipe.quantization
            self._fp8 = known = (recipe, fp8, scaled_products.scaled(fp8))
        _, fp8, scaled = known
        if scaled is not fp8 and scaled_products.takes_scales(
            next(iter(self.weight_inputs().values())).device
        ):
            return scaled
        return fp8

    def _spec_for(
        self,
        fp8: Quantization | None,
        cached: bool,
        bias: str,
        options: dict[str, Any],
        fields: tuple[tuple[str, Any], ...],
    ) -> Any:
        """Returns the spec for this request, the same object for the same one: plans are found by it."""
        key = (id(fp8), cached, bias, fields, *options.items())
        found = self._specs.get(key)
        if found is None:
            spec = layer_spec(self._spec, fp8, cached, bias, tuple(options.items()), fields)
            found = self._keep_spec(key, spec, fp8)
        return found[0]

    def _keep_spec(self, key: Any, spec: Any, fp8: Quantization | None) -> tuple[Any, Quantization | None]:
        if len(self._specs) >= _SPEC_LIMIT:
            self._specs.clear()
        self._specs[key] = spec, fp8  # fp8 is held, so that its id stays its own
        return self._specs[key]

    def _weight_spec(self, fp8: Quantization, bias: str, i: int) -> Any:
        """Returns the spec of the ``i``-th GEMM's cast of its weights."""
        asked = "weight_cast", id(fp8), bias, i
        if asked not in self._specs:
            products = layer_products(layer_spec(self._spec, fp8, False, bias, ()))
            self._keep_spec(asked, LinearSpec(products[i]), fp8)
        return self._specs[asked][0]

    def _cached(
        self, fp8: Quantization, first: bool, bias: str, inputs: dict[str, Any], binding: Any
    ) -> dict[str, Any]:
        """Returns the FP8 weights: cast now for the first micro-batch, or where there are none by this
        recipe; else those of the first one."""
        key = self.cache_key(fp8)
        if first or self._weights is None or self._weights.key != key:
            self._weights = WeightCache(key, self.cast_weights(fp8, bias, inputs, binding))
        return self._weights.arrays

    def cast_weights(
        self, fp8: Quantization, bias: str, inputs: Mapping[str, Any], binding: Any
    ) -> dict[str, Any]:
        """Returns the weights among ``inputs`` in FP8, unrecorded."""
        made: dict[str, Any] = {}
        for i, prefix in enumerate(self.gemms):
            own = {name: inputs[name] for name in self.weight_inputs() if name.startswith(prefix)}
            made |= self.cast_weight(self._weight_spec(fp8, bias, i), own, prefix, binding)
        return made
