"""``WeightForm``: a layer's FP8 weights in both orientations, written by the optimiser that has changed them,
for the next forward pass.

A layer notes at each recorded forward pass how it casts its weights. An optimiser that is asked to
(``write_fp8_weights``) has the forms of all weights that it changes written at once, in a handful of launches
for a whole model. What was written holds as long as nothing has changed that the codes depend on: the
weights, by their counts of changes in place, the way to cast, and with delayed scaling the scale. Otherwise
the layer casts as it does without a form. The bits are the same either way.

A weight's amax enters the history when the forward pass does that would have taken it
(``ScalingState.pend``), not when it is known.

While a graph is captured no form is read or written: the graph would go on reading what it found, and a cast
in a graph costs no launch. What a replay changes no count sees, so it ends all forms (``captured.era``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from fp8kit import arrays, captured
from fp8kit.arrays import ArrayView, Device
from fp8kit.autograd import Tensor
from fp8kit.autograd.derived import derive
from fp8kit.autograd.tensors import Version
from fp8kit.backends import dispatch
from fp8kit.execution.memory import Layout
from fp8kit.formats import float32
from fp8kit.ops.product import Product, ProductSpec, WeightJob
from fp8kit.ops.products import product_of
from fp8kit.quantization import Quantization
from fp8kit.scaling import ScalingState, forward_slots

_IDLE = 3  # after so many times of writing in vain a form is given up until it is wanted again


class Layer(Protocol):
    """What a form needs of its layer (``Fp8Module``)."""

    gemms: tuple[str, ...]
    fp8_meta: dict[str, ScalingState]

    def make_product(self, gemm: int, fp8: Quantization | None, cached: bool, bias: str) -> ProductSpec:
        """The product of GEMM ``gemm``."""

    def weight_inputs(self) -> Mapping[str, Tensor]:
        """The weights by their name in the operation."""


class _Source(NamedTuple):
    """A weight, and what it was when it was cast."""

    name: str
    weight: Tensor
    view: ArrayView
    version: Version
    changes: int


class Written(NamedTuple):
    """``arrays``: the FP8 weights by the operation's names; ``amaxes``: with delayed scaling, slot of the
    forward state -> amax of the weight, float32 [1]; the rest is what they were cast from, and by."""

    arrays: dict[str, ArrayView]
    amaxes: dict[int, ArrayView]
    fp8: Quantization
    sources: list[_Source]
    state: ScalingState | None
    generation: int
    era: object

    def record(self) -> None:
        """The amaxes enter the history, as when the weights are cast."""
        if self.state is not None:
            self.state.pend(self.amaxes)


class _Lease:
    """The owner of a form's arrays: it lives as long as anybody has one of them."""

    __slots__ = ("__weakref__", "memory")

    def __init__(self, memory: object) -> None:
        self.memory = memory


class _Room(NamedTuple):
    """A piece of memory, and whether somebody still has what lies in it."""

    size: int
    ptr: int
    owner: object
    lease: weakref.ref[_Lease]


class _Plan(NamedTuple):
    """How a layer's weights are cast in one way: products, and the layout of what they give."""

    fp8: Quantization
    products: list[Product]
    made: list[tuple[str, ...]]  # of each product, names of its arrays
    layout: Layout


class _Ready(NamedTuple):
    """Room for a layer's FP8 weights, by name, and with delayed scaling the state whose scales cast them."""

    plan: _Plan
    made: dict[str, ArrayView]
    state: ScalingState | None

    def jobs(self, inputs: dict[str, ArrayView]) -> list[WeightJob]:
        """The casts of the weights ``inputs``."""
        if self.state is not None:
            prefixes = [product.spec.prefix for product in self.plan.products]
            slots = forward_slots(prefixes)
            inputs = inputs | {
                f"{prefix}w_scale": self.state.scales[slots[f"{prefix}w"]] for prefix in prefixes
            }
        return [
            WeightJob(product, inputs, {name: self.made[name] for name in names})
            for product, names in zip(self.plan.products, self.plan.made, strict=True)
        ]


class WeightForm:
    """The FP8 form of one ``layer``'s weights; see the module's text.

    ``wanted``: how a recorded forward pass cast them last, None before any; ``idle``: how often they were
    written since. ``written``: what lies ready, None where nothing does.
    """

    def __init__(self, layer: Layer) -> None:
        self.wanted: Quantization | None = None
        self.idle = 0
        self.written: Written | None = None
        self._layer = weakref.ref(layer)
        self._weights = dict(layer.weight_inputs())
        self._plan: _Plan | None = None
        self._room: _Room | None = None
        derive(self._weights.values(), self)

    def find(
        self, fp8: Quantization, inputs: Mapping[str, Any], state: ScalingState | None
    ) -> Written | None:
        """What was written, if it is what casting ``inputs``' weights by ``fp8``, with delayed scaling by
        ``state``, would give now."""
        written = self.written
        if written is None or captured.capturing():
            return None
        for name, weight, view, version, changes in written.sources:
            if (
                inputs.get(name) is not weight
                or weight.view is not view
                or weight.version() is not version
                or version.count != changes
            ):
                self.clear()  # whoever changed it writes no form: none is kept
                return None
        if written.fp8 is not fp8 or written.era is not captured.era():
            return None
        if written.state is not None and (
            written.state is not state or written.generation != state.generation
        ):
            return None
        return written

    def clear(self) -> None:
        """Nothing is written, and no memory kept."""
        self.written, self._room = None, None

    # --- writing --------------------------------------------------------------------------------------------

    @classmethod
    def renewing(cls, several: Sequence[WeightForm]) -> Callable[[], None]:
        """As ``Derived.renewing``: one call of the engine for all forms of a device that cast alike."""
        groups: dict[tuple[Device, int, type[Product]], list[tuple[WeightForm, _Ready]]] = {}
        for form in several:
            ready = form._prepare()
            if ready is not None:
                key = (
                    next(iter(ready.made.values())).device,
                    id(ready.plan.fp8),
                    type(ready.plan.products[0]),
                )
                groups.setdefault(key, []).append((form, ready))
        numbers = [
            arrays.zeros((3, sum(len(ready.plan.products) for _, ready in group)), float32, device)
            for (device, *_), group in groups.items()
        ]

        def write() -> None:
            for ((device, _, kind), group), room in zip(groups.items(), numbers, strict=True):
                amaxes = room.reshape(room.size)
                jobs: list[WeightJob] = []
                written = []
                for form, ready in group:
                    own = [amaxes.slice(0, len(jobs) + i, 1) for i in range(len(ready.plan.products))]
                    written.append(form._written_by(ready, own))
                    jobs += ready.jobs(_views(form._weights))
                kind.cast_weights(dispatch.kernels(device), jobs, room, arrays.current_stream(device))
                for (form, _), one in zip(group, written, strict=True):
                    form.written = one

        return write

    def _prepare(self) -> _Ready | None:
        """Room for the weights as they are wanted; None where they are not."""
        self.written = None
        self.idle += 1
        plan, state = self._planned()
        if plan is None:
            self._room = None
            return None
        device = next(iter(self._weights.values())).device
        room = self._room
        # what a pass has yet to go back through stays
        if room is None or room.size < plan.layout.nbytes or room.lease() is not None:
            ptr, owner = arrays.provider(device).alloc(plan.layout.nbytes, device)
        else:
            ptr, owner = room.ptr, room.owner
        lease = _Lease(owner)
        self._room = _Room(plan.layout.nbytes, ptr, owner, weakref.ref(lease))
        return _Ready(plan, plan.layout.at(ptr, device, lease), state)

    def _planned(self) -> tuple[_Plan | None, ScalingState | None]:
        """How to cast what is wanted, and with delayed scaling the state whose scales to take; no plan where
        nothing can be written."""
        layer, fp8 = self._layer(), self.wanted
        if layer is None or fp8 is None or self.idle > _IDLE or captured.capturing():
            return None, None
        delayed, state = fp8.w.needs_state, layer.fp8_meta.get("scaling_fwd")
        if delayed and state is None:  # it was taken away, by a checkpoint without one
            return None, None
        plan = self._plan
        if plan is None or plan.fp8 is not fp8:
            plan = self._plan = _planned(layer, fp8, self._weights)
        together = all(product.casts_together(_views(self._weights)) for product in plan.products)
        return plan if together else None, state if delayed else None

    def _written_by(self, ready: _Ready, amaxes: list[ArrayView]) -> Written:
        """What will have been written, of the weights as they are now."""
        sources = [
            _Source(name, weight, weight.view, weight.version(), weight.version().count)
            for name, weight in self._weights.items()
        ]
        state, found = ready.state, {}
        if state is not None:
            prefixes = [product.spec.prefix for product in ready.plan.products]
            slots = forward_slots(prefixes)
            found = {slots[f"{prefix}w"]: amax for prefix, amax in zip(prefixes, amaxes, strict=True)}
        return Written(
            ready.made,
            found,
            ready.plan.fp8,
            sources,
            state,
            0 if state is None else state.generation,
            captured.era(),
        )


def _views(weights: Mapping[str, Tensor]) -> dict[str, ArrayView]:
    return {name: weight.view for name, weight in weights.items()}


def _planned(layer: Layer, fp8: Quantization, weights: Mapping[str, Tensor]) -> _Plan:
    dtype = next(iter(weights.values())).dtype
    products = [
        product_of(layer.make_product(i, fp8, False, "none"), 0, dtype, False, False, False)
        for i in range(len(layer.gemms))
    ]
    metas = [
        {name: meta for name, meta in product.weight_outputs().items() if not name.endswith("w_amax")}
        for product in products
    ]
    return _Plan(
        fp8,
        products,
        [tuple(part) for part in metas],
        Layout({name: meta for part in metas for name, meta in part.items()}),
    )
