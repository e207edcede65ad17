"""What an operation is, said once for every front door.

An ``Operation`` is a differentiable unit. ``infer`` looks at static arguments, shapes and dtypes only,
refuses wrong input, and says what forward fills and backward needs. ``plan`` decides once what can be decided
once. ``forward`` and ``backward`` are pure: they read views, write views that the door allocated, and keep
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from fp8kit.arrays import ArrayView, Shape
from fp8kit.formats import DType

Views = Mapping[str, ArrayView | None]
Metas = Mapping[str, "Meta | None"]


class Meta(NamedTuple):
    """Shape and dtype of an array, no data. ``zero``: the door hands it over zeroed, or pointing at what is
    to be gone on with: a running maximum (amax), a running sum (``main_grad``)."""

    shape: Shape
    dtype: DType
    zero: bool = False


@dataclass(frozen=True)
class Signature:
    """What ``infer`` answers.

    * ``outputs``: what forward fills and returns.
    * ``saved``: further buffers that forward fills for backward. Independent of the engine.
    * ``kept``: names of inputs and outputs that backward reads as they are.
    * ``grads``: what backward fills: by input name, and amaxes of quantised gradients by their own name.
    * ``passes``: output name -> input name: this output *is* that input (a residual stream going through).
      The door returns the input itself; its cotangent reaches backward under the output's name.
    * ``grad_passes``: input name -> output name: that output's cotangent *is* the input's gradient; backward
      does not fill it.
    """

    outputs: dict[str, Meta]
    saved: dict[str, Meta] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    grads: dict[str, Meta] = field(default_factory=dict)
    passes: dict[str, str] = field(default_factory=dict)
    grad_passes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """What is decided once for one set of static arguments, shapes, device and policy.

    ``kernels`` has every kernel of the contract as an attribute, chosen by the policy of the moment the plan
    was made. ``scratch``, ``backward_scratch`` and ``measure_scratch`` are the temporary buffers that the
    door hands to those faces. ``extra`` holds what the operation itself wants to remember.
    """

    spec: Any
    signature: Signature
    kernels: Any
    scratch: dict[str, Meta] = field(default_factory=dict)
    backward_scratch: dict[str, Meta] = field(default_factory=dict)
    extra: Any = None
    measure_scratch: dict[str, Meta] = field(default_factory=dict)


class Operation:
    """Base of operations: a stateless object, one instance per operation.

    Faces take ``needs``, the names of the inputs whose gradient is wanted: what only backward would read is
    neither computed nor saved without it. Inputs that are absent are None or left out.

    What forward and backward do on a device they do through ``plan.kernels`` or the device's provider: calls
    with the same addresses may be made again without them (``fp8kit.replays``).

    ``early``: the operation asks for a large buffer where it first needs it and says when it is ``done`` with
    it (``fp8kit.scratch``), so a door may let each come and go by itself; of such views it takes one by its
    name only, and holds none in a variable longer than it must.
    """

    name: ClassVar[str]
    early: ClassVar[bool] = False

    def infer(self, spec: Any, metas: Metas, needs: frozenset[str]) -> Signature:
        """Shapes, dtypes and the saved list; ShapeError or FormatError for wrong input. Touches no data."""
        raise NotImplementedError

    def plan(self, spec: Any, metas: Metas, needs: frozenset[str], kernels: Any) -> Plan:
        """The plan for these shapes; ``kernels`` comes from ``dispatch.kernels(device)``."""
        raise NotImplementedError

    def forward(
        self, plan: Plan, inputs: Views, outputs: Views, saved: Views, scratch: Views, stream: int
    ) -> None:
        """Fill ``outputs`` and ``saved``."""
        raise NotImplementedError

    def measure(self, plan: Plan, inputs: Views, outputs: Views, scratch: Views, stream: int) -> None:
        """Fill the amax outputs of the operands that are known before any product, and nothing else. A
        frontend that reduces amaxes over devices calls this, reduces, and hands the result to a forward whose
        operands have the ``scale_source`` "amax"."""
        raise NotImplementedError

    def backward(
        self,
        plan: Plan,
        kept: Views,
        saved: Views,
        cotangents: Views,
        grads: Views,
        scratch: Views,
        stream: int,
    ) -> None:
        """Fill ``grads``. ``kept`` also holds what the door adds at backward time: the gradients' scales
        (``*g_scale``), whose values may have changed since forward. A cotangent that is None is zero."""
        raise NotImplementedError
