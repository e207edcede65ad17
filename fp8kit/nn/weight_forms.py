"""``WeightForm``: a layer's FP8 weights in both orientations, written by the optimiser that has changed them, for the next forward pass.

A layer notes at each recorded forward pass how it casts its weights. An optimiser that is asked to (``write_fp8_weights``) has the forms of
all weights that it changes written at once, in a handful of launches for a whole model. What was written holds as long as nothing has
changed that the codes depend on: the weights, by their counts of changes in place, the way to cast, and with delayed scaling the scale.
Otherwise the layer casts as it does without a form. The bits are the same either way.

A weight's amax enters the history when the forward pass does that would have taken it (``ScalingState.pend``), not when it is known.

While a graph is captured no form is read or written: the graph would go on reading what it found, and a cast in a graph costs no launch.
What a replay changes no count sees, so it ends all forms (``captured.era``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from fp8kit import arrays, captured
from fp8kit.arrays import ArrayView, Device
from fp8kit.autograd import Tensor
from fp8kit.autograd.derived import derive
from fp8kit.autograd.rules import Block
from fp8kit.autograd.tensors import Version
from fp8kit.backends import dispatch
from fp8kit.formats import float32
from fp8kit.ops.product import Product, ProductSpec, WeightJob
from fp8kit.ops.products import product_of
from fp8kit.ops.quant import Fp8
from fp8kit.scaling import ScalingState, forward_slots

_IDLE = 3  # after so many times of writing in vain a form is given up until it is wanted again


class Layer(Protocol):
    """What a form needs of its layer (``Fp8Module``)."""

    gemms: tuple[str, ...]
    fp8_meta: dict[str, ScalingState]

    def make_product(self, gemm: int, fp8: Fp8 | None, cached: bool, bias: str) -> ProductSpec:
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
    """``arrays``: the FP8 weights by the operation's names; ``amaxes``: with delayed scaling, slot of the forward state -> amax of the
    weight, float32 [1]; the rest is what they were cast from, and by."""

    arrays: dict[str, ArrayView]
    amaxes: dict[int, ArrayView]
    fp8: Fp8
    sources: list[_Source]
    state: ScalingState | None
    generation: int
    era: object


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

    fp8: Fp8
    products: list[Product]
    made: list[tuple[str, ...]]  # of each product, names of its arrays
    block: Block


class WeightForm:
    """The FP8 form of one ``layer``'s weights; see the module's text.

    ``wanted``: how a recorded forward pass cast them last, None before any; ``idle``: how often they were written since. ``written``: what
    lies ready, None where nothing does.
    """

    def __init__(self, layer: Layer) -> None:
        self.wanted: Fp8 | None = None
        self.idle = 0
        self.written: Written | None = None
        self._layer = weakref.ref(layer)
        self._weights = dict(layer.weight_inputs())
        self._plan: _Plan | None = None
        self._room: _Room | None = None
        derive(self._weights.values(), self)

    def find(self, fp8: Fp8, inputs: Mapping[str, Any], state: ScalingState | None) -> Written | None:
        """What was written, if it is what casting ``inputs``' weights by ``fp8``, with delayed scaling by ``state``, would give now."""
        written = self.written
        if written is None or written.fp8 is not fp8 or written.era is not captured.era() or captured.capturing():
            return None
        if written.state is not None and (written.state is not state or written.generation != state.generation):
            return None
        for name, weight, view, version, changes in written.sources:
            if inputs.get(name) is not weight or weight.view is not view or weight.version() is not version or version.count != changes:
                return None
        return written

    def clear(self) -> None:
        """Nothing is written, and no memory kept."""
        self.written, self._room = None, None

    # --- writing ------------------------------------------------------------------------------------------------------

    @classmethod
    def renewing(cls, several: Sequence[WeightForm]) -> Callable[[], None]:
        """As ``Derived.renewing``: one call of the engine for all forms of a device that cast alike."""
        groups: dict[tuple[Device, int, type[Product]], list[tuple[WeightForm, _Plan, dict[str, ArrayView]]]] = {}
        for form in several:
            ready = form._prepare()
            if ready is not None:
                plan, views = ready
                key = (next(iter(views.values())).device, id(plan.fp8), type(plan.products[0]))
                groups.setdefault(key, []).append((form, plan, views))
        numbers = [arrays.zeros((3, sum(len(plan.products) for _, plan, _ in group)), float32, device)
                   for (device, *_), group in groups.items()]

        def write() -> None:
            for ((device, _, kind), group), room in zip(groups.items(), numbers, strict=True):
                jobs: list[WeightJob] = []
                written = []
                for form, plan, views in group:
                    written.append(form._written_by(plan, views, [room.reshape(room.size).slice(0, len(jobs) + i, 1)
                                                                  for i in range(len(plan.products))]))
                    jobs += form._jobs(plan, written[-1])
                kind.cast_weights(dispatch.kernels(device), jobs, room, arrays.current_stream(device))
                for (form, *_), one in zip(group, written, strict=True):
                    form.written = one

        return write

    def _prepare(self) -> tuple[_Plan, dict[str, ArrayView]] | None:
        """Room for the weights as they are wanted; None where they are not."""
        layer, fp8 = self._layer(), self.wanted
        self.written = None
        self.idle += 1
        if layer is None or fp8 is None or self.idle > _IDLE or captured.capturing():
            self._room = None
            return None
        plan = self._plan
        if plan is None or plan.fp8 is not fp8:
            plan = self._plan = _planned(layer, fp8, self._weights)
        if not all(product.casts_together(_views(self._weights)) for product in plan.products):
            return None
        device = next(iter(self._weights.values())).device
        room = self._room
        if room is None or room.size < plan.block.size or room.lease() is not None:  # what a pass has yet to go back through stays
            ptr, owner = arrays.provider(device).alloc(plan.block.size, device)
        else:
            ptr, owner = room.ptr, room.owner
        lease = _Lease(owner)
        self._room = _Room(plan.block.size, ptr, owner, weakref.ref(lease))
        return plan, plan.block.at(ptr, device, lease)

    def _written_by(self, plan: _Plan, views: dict[str, ArrayView], amaxes: list[ArrayView]) -> Written:
        """What will have been written, of the weights as they are now."""
        layer = self._layer()
        assert layer is not None
        sources = [_Source(name, weight, weight.view, weight.version(), weight.version().count) for name, weight in self._weights.items()]
        if plan.fp8.w.source != "scale":
            return Written(views, {}, plan.fp8, sources, None, 0, captured.era())
        state, slots = layer.fp8_meta["scaling_fwd"], forward_slots(layer.gemms)
        found = {slots[f"{prefix}w"]: amax for prefix, amax in zip(layer.gemms, amaxes, strict=True)}
        return Written(views, found, plan.fp8, sources, state, state.generation, captured.era())

    def _jobs(self, plan: _Plan, written: Written) -> list[WeightJob]:
        inputs = _views(self._weights)
        if written.state is not None:
            prefixes = [product.spec.prefix for product in plan.products]
            inputs |= {f"{prefix}w_scale": written.state.scales[slot] for prefix, slot in zip(prefixes, written.amaxes, strict=True)}
        return [WeightJob(product, inputs, {name: written.arrays[name] for name in names})
                for product, names in zip(plan.products, plan.made, strict=True)]


def _views(weights: Mapping[str, Tensor]) -> dict[str, ArrayView]:
    return {name: weight.view for name, weight in weights.items()}


def _planned(layer: Layer, fp8: Fp8, weights: Mapping[str, Tensor]) -> _Plan:
    dtype = next(iter(weights.values())).dtype
    products = [product_of(layer.make_product(i, fp8, False, "none"), 0, dtype, False, False, False) for i in range(len(layer.gemms))]
    metas = [{name: meta for name, meta in product.weight_outputs().items() if not name.endswith("w_amax")} for product in products]
    return _Plan(fp8, products, [tuple(part) for part in metas], Block({name: meta for part in metas for name, meta in part.items()}))
