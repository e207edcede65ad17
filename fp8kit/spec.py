"""What an operation is, said once for every frontend.

An ``Operation`` is a differentiable unit. It declares what a frontend must know of it: the names of its
outputs, which of its inputs are parameters and what errors call them, what it changes, how it splits over
devices. ``infer`` looks at static arguments, shapes and dtypes only, refuses wrong input, and says what
forward fills and backward needs. ``plan`` decides once what can be decided once. ``forward`` and ``backward``
are pure: they read views, write views that the caller allocated, and keep nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from fp8kit.arrays import ArrayView, Shape
from fp8kit.formats import DType, uint8

if TYPE_CHECKING:
    from fp8kit.ops.partition import Component, Partition, Place, SharedAmaxes
    from fp8kit.ops.product import ProductSpec

Views = Mapping[str, ArrayView]  # by name; a cotangent among them may be None (``Operation.backward``)
Metas = Mapping[str, "Meta | None"]
Needs = frozenset[str]  # names of the inputs whose gradient is wanted
Shapes = Mapping[str, Shape]  # by name
Partitions = tuple["Partition", ...]


class Meta(NamedTuple):
    """Shape and dtype of an array, no data. ``zero``: the operation accumulates into it, so the caller hands
    it over zeroed, or as it was left: a running maximum (amax), a running sum (``main_grad``)."""

    shape: Shape
    dtype: DType
    zero: bool = False


def workspace(nbytes: int) -> dict[str, Meta]:
    """Returns the temporary buffer "workspace" of so many bytes, one at least."""
    return {"workspace": Meta((max(nbytes, 1),), uint8)}


@dataclass(frozen=True)
class Signature:
    """What ``infer`` answers.

    * ``outputs``: what forward fills and returns; those that are ``zero`` are amaxes.
    * ``saved``: further buffers that forward fills for backward. Independent of the engine.
    * ``kept``: names of inputs and outputs that backward reads as they are.
    * ``grads``: what backward fills: gradients by the input's name, and amaxes of quantised gradients by
      their own.
    * ``passes``: output name -> input name: this output *is* that input (a residual stream going through).
      The frontend returns the input itself; its cotangent reaches backward under the output's name.
    * ``grad_passes``: input name -> output name: that output's cotangent *is* the input's gradient; backward
      does not fill it.
    * ``backward_inputs``: what backward reads besides, with the values that it has by then: the gradients'
      scales, or their amaxes where ranks share them.
    """

    outputs: dict[str, Meta]
    saved: dict[str, Meta] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    grads: dict[str, Meta] = field(default_factory=dict)
    passes: dict[str, str] = field(default_factory=dict)
    grad_passes: dict[str, str] = field(default_factory=dict)
    backward_inputs: dict[str, Meta] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """What is decided once for one set of static arguments, shapes, device and policy.

    ``kernels`` has every kernel of the contract as an attribute, chosen by the policy in force when the plan
    was made. ``scratch``, ``backward_scratch`` and ``measure_scratch`` are the temporary buffers that those
    methods are handed. ``extra`` holds what the operation itself wants to remember.
    """

    spec: Any
    signature: Signature
    kernels: Any
    scratch: dict[str, Meta] = field(default_factory=dict)
    backward_scratch: dict[str, Meta] = field(default_factory=dict)
    extra: Any = None
    measure_scratch: dict[str, Meta] = field(default_factory=dict)


class WorkingSet(NamedTuple):
    """What a pass works on: kernels, views by name, a stream. ``inputs``, ``outputs``: forward's; in backward
    what was kept and the ``backward_inputs``, and the gradients and their amaxes. ``scratch``: the plan's
    temporaries for this pass."""

    kernels: Any
    inputs: Views
    outputs: Views
    saved: Views
    scratch: Views
    stream: int


class Operation:
    """Base of operations: a stateless object, one instance per operation.

    Methods take ``needs``, the names of the inputs whose gradient is wanted: what only backward would read is
    neither computed nor saved without it. Inputs that are absent are None or left out. ``infer`` looks
    at each input by its name: one that neither it nor ``plan`` looks at is refused as unknown.

    What forward and backward do on a device they do through ``ws.kernels`` or the device's provider: a call
    with the same addresses may be replayed without them (``execution.replay``).

    * ``streams``: the operation reads a large buffer by its name where it first needs it, holds it in no
      variable, and calls ``buffers.free`` when it has finished with it, so that each can be allocated late
      and freed early.
    * ``results``: names of what forward returns, where they are the same for every spec; ("y",) unless an
      operation says otherwise. They, or what ``outputs`` returns, are those of ``infer``'s signature, in its
      order: a frontend that traces a call names its results by them.
    * ``mutates``: inputs that forward writes into. Such an operation has no gradient, and no form in JAX.
    * ``parameters``: how the names of inputs that are a layer's parameters end, the number of a segment
      aside.
    * ``arguments``: input -> what errors call it, where that is another name.
    * ``takes_codes``: whether the input "x" may come as FP8 codes and scales, which the product reads in its
      place (``ProductSpec.input_cached``).
    * ``holds_interpreter``: whether a kernel of it may keep the interpreter while it waits for room in a
      GPU's queue of launches, as cuDNN's frontend does.
    """

    name: ClassVar[str]
    streams: ClassVar[bool] = False
    results: ClassVar[tuple[str, ...]] = ("y",)
    mutates: ClassVar[tuple[str, ...]] = ()
    parameters: ClassVar[tuple[str, ...]] = ()
    arguments: ClassVar[Mapping[str, str]] = {}
    takes_codes: ClassVar[bool] = False
    holds_interpreter: ClassVar[bool] = False

    def outputs(self, spec: Any) -> tuple[str, ...]:
        """Names of what forward returns, amaxes left out, inputs that pass through last: ``results``, unless
        the spec decides."""
        return self.results

    def is_parameter(self, name: str) -> bool:
        """Whether an input is a layer's parameter, which has the dtype and the device of the input "x"."""
        return name.rstrip("0123456789").endswith(self.parameters or "\0")

    def argument(self, name: str, names: Container[str] = ()) -> str:
        """Returns what errors call the input ``name``. A parameter that comes in several segments, as
        ``names`` say, keeps its number."""
        several = name.endswith("0") and f"{name[:-1]}1" in names
        return name if several else self.arguments.get(name, name)

    # --- how it splits: none of these has to be there, and then a call runs whole on every device -----------

    def products(self, spec: Any) -> tuple[ProductSpec, ...]:
        """Its matrix products."""
        return ()

    def communicates(self, spec: Any) -> bool:
        """Whether ranks communicate in a call: then its buffers are whole, each in memory of its own."""
        return any(product.parallel is not None for product in self.products(spec))

    def independent_rows(self, spec: Any, saved: Collection[str]) -> tuple[str, ...]:
        """Returns the inputs whose rows, each by itself, give the rows of all outputs and of what is
        ``saved`` for backward; () where rows meet: they share a scale, or are summed."""
        return ()

    def partitions(self, spec: Any, metas: Metas, views: Shapes) -> Partitions:
        """Returns the ways to split a call into equal parts, those that cost no sum over the parts first.
        ``views``: shapes of arrays that the frontend has with more dimensions than the operation (a kernel
        (K, 3, N) as (K, 3 N)), by name."""
        return ()

    def part(self, spec: Any, partition: Partition, count: int) -> Any:
        """Returns the spec of one of ``count`` parts by features or heads; None where a number does not
        divide. Rows leave the spec as it is."""
        return spec

    def place(self, spec: Any, metas: Metas, parts: Mapping[str, tuple[Any, int]]) -> Place | None:
        """Returns how a part draws the random numbers of its place in the whole; None where it draws none.
        ``spec``, ``metas``: the part's. ``parts``: kind of a partition -> the part's number, and how many
        there are; numbers are ints or a framework's scalars."""
        return None

    def shared_amaxes(self, spec: Any) -> SharedAmaxes | None:
        """Returns how parts cast with the scales of the whole; None where no scale is taken of a whole tensor
        now."""
        return None

    def decompose(self, spec: Any) -> tuple[Component, ...]:
        """Returns the calls that this one is made of, which give the same bits, in their order; () where it
        is one by itself."""
        return ()

    # --- what it does ---------------------------------------------------------------------------------------

    def infer(self, spec: Any, metas: Metas, needs: Needs) -> Signature:
        """Shapes, dtypes and the saved list; ShapeError or FormatError for wrong input. Touches no data."""
        raise NotImplementedError

    def plan(self, spec: Any, metas: Metas, needs: Needs, kernels: Any) -> Plan:
        """Returns the plan for these shapes; ``kernels`` comes from ``dispatch.kernels(device)``. Here:
        without temporaries."""
        return Plan(spec, self.infer(spec, metas, needs), kernels)

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        """Fill ``outputs`` and ``saved``."""
        raise NotImplementedError

    def measure(self, plan: Plan, ws: WorkingSet) -> None:
        """Fill the amax outputs of the operands that are known before any product, and nothing else. A
        frontend that reduces amaxes over devices calls this, reduces, and hands the result to a forward whose
        operands have the ``scale_source`` "amax"."""
        raise NotImplementedError

    def backward(self, plan: Plan, ws: WorkingSet, cotangents: Views) -> None:
        """Fill the gradients, ``ws.outputs``. A cotangent that is None is zero; the first output's never
        is."""
        raise NotImplementedError
