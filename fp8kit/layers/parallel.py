"""``ParallelLayer``: a layer with products of which each rank of a group has a part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from fp8kit.collectives import Collectives, share
from fp8kit.errors import ArgumentError, UnsupportedError
from fp8kit.layers.base import Layer
from fp8kit.layers.fp8_layer import FP8Layer
from fp8kit.ops.communicate import gather_rows


class Grouped(Layer):
    """Base of layers that take ``tp_group``: a group of ranks, and how many there are."""

    tp_size = 1
    # what the ranks do together; None before ``set_tensor_parallel_group``
    ranks: Collectives | None = None

    def take_group(self, arguments: SimpleNamespace) -> None:
        """Keep ``tp_group`` and ``tp_size`` of the constructor's arguments: the group's size, or without a
        group the number that it will have."""
        if arguments.tp_group is None and arguments.tp_size == 1:
            return
        self.ranks = self.ranks_of("tp_group", arguments.tp_group)
        self.tp_size = arguments.tp_size if self.ranks is None else self.ranks.size
        if self.ranks is not None and arguments.tp_size not in (1, self.tp_size):
            got, wanted = arguments.tp_size, f"1, or {self.tp_size}, the size of tp_group"
            raise ArgumentError(self.layer_name, "tp_size", got, wanted)

    @property
    def tp_group(self) -> Any:
        """The group of the ranks that share this layer's weights, as it was given."""
        return None if self.ranks is None else self.group_of(self.ranks)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the group of the ranks that share the weights, where the constructor got ``tp_size`` alone, and
        pass the group on to all parts of a layer that is made of others. ArgumentError if it is not a group,
        or one of another size."""
        ranks = self.ranks_of("tp_group", tp_group)
        if self.tp_size > 1 and (ranks is None or ranks.size != self.tp_size):
            got = "None" if ranks is None else f"a group of {ranks.size}"
            raise ArgumentError(self.layer_name, "tp_group", got, f"a group of {self.tp_size} ranks")
        self.ranks = ranks
        for part in self.grouped_parts():
            part.set_tensor_parallel_group(tp_group)

    def grouped_parts(self) -> list[Grouped]:
        """Returns the layers that this one is made of and that have groups of their own."""
        return []


class ParallelLayer(Grouped, FP8Layer):
    """Base of layers with parts of weights. ``modes``: prefix of a GEMM's names -> None, "column" or
    "row"."""

    sequence_parallel = False
    return_layernorm_output_gathered = False
    modes: Mapping[str, str | None] = {}

    def take_parallel(self, arguments: SimpleNamespace, modes: Mapping[str, str | None]) -> None:
        """Keep how the ranks share this layer's products: before its parameters are made."""
        self.take_group(arguments)
        if self.tp_size > 1 and any(modes.values()):
            self.modes, self.splits_weights = modes, True
            self.sequence_parallel = bool(arguments.sequence_parallel)

    def part_of(self, total: int, argument: str) -> int:
        """This rank's part of a number of features; ArgumentError where ranks do not divide it."""
        return share(total, self.tp_size, self.layer_name, argument)

    def set_spec(self, spec: Any) -> None:
        """Keep the spec, its products those of this rank's part in the group."""
        super().set_spec(self._of_ranks(spec))

    def _of_ranks(self, spec: Any) -> Any:
        if not self.splits_weights or self.ranks is None:
            return spec
        changes = {}
        for name, product in vars(spec).items():
            prefix = getattr(product, "prefix", None)  # of other fields than products there is none
            if prefix is not None and (mode := self.modes.get(prefix)) is not None:
                how = {"parallel": mode, "group": self.ranks.name, "sequence": self.sequence_parallel}
                label = " ".join(filter(None, (self.layer_name, self.name, product.prefix.rstrip("_"))))
                changes[name] = replace(product, **how, label=label)
        return replace(spec, **changes)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        super().set_tensor_parallel_group(tp_group)
        self.change_spec(self._spec)

    def check_split(self, fp8_output: Any, fp8_grad: Any) -> None:
        if self.ranks is None:
            wanted = f"a group of {self.tp_size} ranks: set_tensor_parallel_group, or tp_group"
            raise ArgumentError(self.layer_name, "tp_group", None, wanted)
        for name, asked in (("fp8_output", fp8_output), ("fp8_grad", fp8_grad)):
            if asked:
                wanted = "False with tensor parallelism: ranks sum in high precision"
                raise UnsupportedError(self.layer_name, name, True, wanted)

    def mark_norm(self, norm: Any) -> None:
        """Say on a norm's parameters that their gradients are of the rank's rows, where they are."""
        for name in norm.inputs() if self.sequence_parallel else ():
            self.mark_parameter(f"layer_{name}", None, True)

    def returned(self, y: Any, bias: str, normed: Any = None) -> Any:
        if normed is not None and self.sequence_parallel and self.return_layernorm_output_gathered:
            normed = self.gathered(normed)
        return super().returned(y, bias, normed)

    def gathered(self, rows: Any) -> Any:
        """Returns the ranks' rows one after the other, along the first dimension; differentiable."""
        assert self.ranks is not None
        spec = self.spec_for("GroupSpec", self.ranks.name, self.layer_name)
        return self.call(gather_rows, spec, {"x": rows})["y"]
