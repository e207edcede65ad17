"""What ``transformer_engine.jax.cpp_extensions`` has for products that communicate. Here XLA puts the
collectives beside the products by the arrays' shardings, so that these change nothing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from fp8kit.arguments import integer, shown
from fp8kit.errors import ArgumentError


class CollectiveOp(Enum):
    """What a product communicates."""

    NONE = 0
    ALL_GATHER = 1
    REDUCE_SCATTER = 2

    @property
    def is_none(self) -> bool:
        """Whether it is nothing."""
        return self is CollectiveOp.NONE

    @property
    def is_all_gather(self) -> bool:
        """Whether it is its input."""
        return self is CollectiveOp.ALL_GATHER

    @property
    def is_reduce_scatter(self) -> bool:
        """Whether it is its output."""
        return self is CollectiveOp.REDUCE_SCATTER


_BACK = {
    CollectiveOp.NONE: CollectiveOp.NONE,
    CollectiveOp.ALL_GATHER: CollectiveOp.REDUCE_SCATTER,
    CollectiveOp.REDUCE_SCATTER: CollectiveOp.ALL_GATHER,
}


@dataclass(frozen=True)
class CollectiveOpSet:
    """What a product communicates forward, and its input's gradient backward."""

    forward: CollectiveOp
    backward: CollectiveOp

    @staticmethod
    def create(forward_collective_op: CollectiveOp) -> CollectiveOpSet:
        """Returns the set of a forward product and what belongs to it. ArgumentError for what is no
        CollectiveOp."""
        if not isinstance(forward_collective_op, CollectiveOp):
            got = shown(forward_collective_op)
            raise ArgumentError("CollectiveOpSet.create", "forward_collective_op", got, "a CollectiveOp")
        return CollectiveOpSet(forward_collective_op, _BACK[forward_collective_op])


noop_collective_op_set = CollectiveOpSet.create(CollectiveOp.NONE)


def collective_gemm_bootstrap(
    num_total_devices: int,
    num_devices_per_process: int,
    process_id: int,
    tensor_parallel_size: int,
    **options: Any,
) -> None:
    """Check the numbers, and prepare nothing: XLA has the communicators. ArgumentError for numbers that do
    not fit each other; ``options`` of the communicators are not read."""
    op = "collective_gemm_bootstrap"
    total = integer(op, "num_total_devices", num_total_devices, 1, 2**31 - 1)
    numbers = {
        "num_devices_per_process": num_devices_per_process,
        "tensor_parallel_size": tensor_parallel_size,
    }
    for name, value in numbers.items():
        if total % integer(op, name, value, 1, 2**31 - 1):
            raise ArgumentError(op, name, value, f"a divisor of {total}, num_total_devices")
    integer(op, "process_id", process_id, 0, total // num_devices_per_process - 1)


def want_collectives(operation: str, value: Any) -> None:
    """ArgumentError if ``value`` is not a CollectiveOpSet."""
    if not isinstance(value, CollectiveOpSet):
        raise ArgumentError(operation, "collective_op_set", shown(value), "a CollectiveOpSet")
