"""``ShardedOptimizer``: data parallel training in which each rank keeps a part of the optimiser's state (ZeRO
stage 1: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models").

Parameters are taken in buckets, flat. Of a bucket's gradients each rank gets the sum of its part
(reduce_scatter), updates its part of the parameters, and all get the parts of all (all_gather): P ranks move
2 (P - 1) / P of the parameters' bytes a step, as a sum of all gradients does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_
from typing import Any

import numpy as np

from fp8kit import arrays
from fp8kit.arguments import flag, integer, number
from fp8kit.arrays import ArrayView
from fp8kit.autograd import Tensor
from fp8kit.backends import dispatch
from fp8kit.collectives import Collectives, want_ranks
from fp8kit.errors import ArgumentError, CheckpointError, UnsupportedError
from fp8kit.formats import DType, float32, uint8
from fp8kit.optim.base import Group, Optimizer, state_views
from fp8kit.optim.clip import norm_of
from fp8kit.serialization import Loadable

_GRAIN = 256  # elements that a rank's part of a bucket is a multiple of: of kernels' vectors


class _Bucket:
    """Parameters of one group and dtype, flat, one after the other. ``part``: elements of each rank;
    ``shard``: this rank's parameters, as a tensor for the optimiser; ``grad``: the sum of their gradients.
    ``numbers``: of the parameters among all."""

    def __init__(self, group: int, params: list[Tensor], numbers: list[int], size: int, split: bool) -> None:
        self.group, self.params, self.numbers, self.split = group, params, numbers, split
        first, count = params[0], sum(param.view.size for param in params)
        self.dtype, self.device = first.dtype, first.device
        self.count, self.part = count, -(-count // (size * _GRAIN)) * _GRAIN
        self.shard = Tensor(arrays.empty((self.part,), self.dtype, self.device), requires_grad=True)
        self.grad = arrays.empty((self.part,), self.dtype, self.device)

    def places(self, whole: ArrayView) -> list[tuple[Tensor, ArrayView]]:
        """Each parameter, and its place in the flat ``whole``."""
        found, at = [], 0
        for param in self.params:
            found.append((param, whole.slice(0, at, param.view.size).reshape(*param.shape)))
            at += param.view.size
        return found


class ShardedOptimizer(Loadable):
    """An optimiser of ``kind`` (``AdamW``, ``SGD``) whose state is divided among ``ranks``, which all train
    the same parameters on other rows ::

        ranks = fk.distributed.init()
        optimizer = fk.optim.ShardedOptimizer(fk.optim.AdamW, model.parameters(), ranks, lr=1e-3)
        loss.backward()                        # of the rank's rows
        optimizer.clip_grad_norm_(1.0)         # optional
        optimizer.step()
        optimizer.zero_grad()

    * ``params``, ``options``: as ``kind`` takes them. At first all ranks get rank 0's values.
    * ``average``: gradients are the ranks' mean, as of a loss that is the mean over all rows; False: their
      sum.
    * ``bucket_bytes``: parameters that are communicated together, and what is allocated beside: one bucket.
    * ``tensor``: the ranks that share weights (``distributed.grid``), over which norms are summed.

    The numbers are those of one rank with all rows, but for the order of sums. ``state_dict`` gives the state
    of a ``kind`` that is not divided, so that any number of ranks, also one without this class, loads it: all
    ranks call it, and one of them saves. Steps, ``lr`` and ``param_groups`` (whose tensors are parts) are
    those of ``kind``. Every parameter has a gradient in a step, or none has. Parameters may be changed in
    place between steps, by all ranks alike.

    ArgumentError for parameters that ``kind`` refuses, that lie on several devices, or of which some have no
    gradient; UnsupportedError for states that are no array of the parameter's shape (encoded moments).
    """

    def __init__(
        self,
        kind: type[Optimizer],
        params: Iterable[Tensor] | Iterable[Mapping[str, Any]],
        ranks: Collectives,
        *,
        average: bool = True,
        bucket_bytes: int = 1 << 26,
        tensor: Collectives | None = None,
        **options: Any,
    ) -> None:
        name = "ShardedOptimizer"
        if not isinstance(kind, type) or not issubclass(kind, Optimizer):
            raise ArgumentError(name, "kind", repr(kind), "a class of optimisers, such as optim.AdamW")
        want_ranks(name, "ranks", ranks)
        if tensor is not None:
            want_ranks(name, "tensor", tensor)
        self.average = flag(name, "average", average)
        limit = integer(name, "bucket_bytes", bucket_bytes, 1)
        self.ranks, self.tensor = ranks, tensor
        # what checks arguments and states as a whole; it never takes a step, so that it keeps nothing
        self._whole = kind(params, **options)
        self._check(name)
        self._buckets: list[_Bucket] = []
        place = 0
        for i, group in enumerate(self._whole.param_groups):
            kinds: dict[tuple[DType, bool], list[tuple[int, Tensor]]] = {}
            for param in group["params"]:
                if param.requires_grad:
                    split = getattr(param, "partition_dim", None) is not None
                    kinds.setdefault((param.dtype, split), []).append((place, param))
                place += 1
            for (_, split), found in kinds.items():
                for some in _cut(found, limit):
                    numbers, own = map(list, zip(*some, strict=True))
                    self._buckets.append(_Bucket(i, own, numbers, ranks.size, split))
        self.kind, self._count, self._reduced = kind, place, False
        self._params = [param for bucket in self._buckets for param in bucket.params]
        # the gradients that were reduced, and the versions of the parameters whose values the parts have
        self._summed: list[Any] = []
        self._versions: list[int] | None = None
        self._inner = kind(self._groups(), **options)
        self._flat = arrays.empty(
            (max(bucket.part * ranks.size * bucket.dtype.itemsize for bucket in self._buckets),),
            uint8,
            self._buckets[0].device,
        )
        for param in self._params:
            ranks.broadcast(param.view, 0, self._stream, name)
            param.version().count += 1
        factor = np.full(1, 1 / ranks.size, np.float32)
        self._factor = arrays.to(factor, self._buckets[0].device)

    def _check(self, name: str) -> None:
        devices = {str(param.device) for param in self._whole._params() if param.requires_grad}
        if len(devices) > 1:
            raise ArgumentError(name, "params", f"tensors on {', '.join(sorted(devices))}", "one device")
        for group in self._whole.param_groups:
            hyper = self._whole.flat(group)
            for param in (p for p in group["params"] if p.requires_grad):
                kept = self._whole._kept(param.view, hyper)
                for part, (shape, _) in kept.items():
                    if shape != param.shape:
                        got = f"{part} of shape {shape} for a parameter {param.shape}"
                        raise UnsupportedError(name, "states", got, "states of the parameter's own shape")

    def _groups(self) -> list[Group]:
        """Returns the groups with their parts for parameters."""
        groups = []
        for i, group in enumerate(self._whole.param_groups):
            own: list[Tensor] = [bucket.shard for bucket in self._buckets if bucket.group == i]
            groups.append({**group, "params": own})
        return groups

    # --- as of an optimiser ---------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[Group]:
        """The groups' hyperparameters; "params" are this rank's parts."""
        return self._inner.param_groups

    @property
    def lr(self) -> float:
        """As ``Optimizer.lr``."""
        return self._inner.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._inner.lr = value

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self._whole.zero_grad()
        self._summed, self._reduced = [], False

    def clip_grad_norm_(self, max_norm: float) -> Any:
        """Scale the gradients by ``min(1, max_norm / (norm + 1e-6))``, norm that of all of them together, as
        ``optim.clip_grad_norm_`` does on one rank. All ranks call it. Returns the norm before, a float32
        0-dimensional array of the device's library. Errors as there."""
        limit = number("clip_grad_norm_", "max_norm", max_norm, above=0.0)
        self._reduce()
        if not self._reduced:
            raise ArgumentError("clip_grad_norm_", "params", "no gradient", "at least one gradient")
        tensor = self.tensor
        # what all have whole counts once
        own = [b.grad for b in self._buckets if b.split or tensor is None or tensor.rank == 0]
        norm = norm_of(own) if own else arrays.zeros((1,), float32, self._buckets[0].device)
        for group in (self.ranks, tensor):
            if group is not None and group.size > 1:
                norms = arrays.empty((group.size,), float32, norm.device)
                group.all_gather(norm, norms, self._stream, "clip_grad_norm_")
                norm = norm_of([norms])
        self._kernels.clip_([bucket.grad for bucket in self._buckets], norm, limit, self._stream)
        return arrays.native(norm.reshape())

    def step(self) -> None:
        """One update of all parameters by the sum, or the mean, of the ranks' gradients. All ranks call it.
        Nothing where no parameter has a gradient."""
        self._reduce()
        if not self._reduced:
            return
        self._begin()
        for bucket in self._buckets:
            bucket.shard.grad = bucket.grad
        self._inner.step()
        for bucket in self._buckets:
            whole = self._bytes(bucket)
            self.ranks.all_gather(bucket.shard.view, whole, self._stream, "the parameters of a step")
            for param, place in bucket.places(whole):
                self._kernels.copy(place, param.view, self._stream)
                param.version().count += 1
        self._versions, self._summed, self._reduced = self._now(), [], False

    # --- parts ----------------------------------------------------------------------------------------------

    @property
    def _kernels(self) -> Any:
        return dispatch.kernels(self._buckets[0].device)

    @property
    def _stream(self) -> int:
        return arrays.current_stream(self._buckets[0].device)

    def _bytes(self, bucket: _Bucket, dtype: DType | None = None) -> ArrayView:
        """Returns where a bucket is whole, for a moment."""
        kind = bucket.dtype if dtype is None else dtype
        size = self.ranks.size * bucket.part
        if size * kind.itemsize > self._flat.nbytes:
            self._flat = arrays.empty((size * kind.itemsize,), uint8, bucket.device)
        return ArrayView(self._flat.ptr, (size,), kind, bucket.device, self._flat)

    def _filled(self, bucket: _Bucket, values: Iterable[ArrayView]) -> ArrayView:
        """Returns a bucket of the parameters' ``values``, for a moment; zeros behind them."""
        whole = self._bytes(bucket)
        for value, (_, place) in zip(values, bucket.places(whole), strict=True):
            self._kernels.copy(value, place, self._stream)
        if bucket.count < whole.size:
            arrays.zero_(whole.slice(0, bucket.count, whole.size - bucket.count))
        return whole

    def _reduce(self) -> None:
        """The sums of this rank's parts of the gradients, once for the same gradients."""
        grads = [param.grad for param in self._params]
        if self._reduced and all(map(is_, self._summed, grads)):
            return
        self._summed, self._reduced = [], False
        having = [grad is not None for grad in grads]
        if not all(having):
            if any(having):
                got = f"{having.count(False)} of {len(having)} parameters without a gradient"
                raise ArgumentError("ShardedOptimizer", "params", got, "gradients of all, or of none")
            return
        for bucket in self._buckets:
            whole = self._filled(bucket, map(self._whole.gradient, bucket.params))
            self.ranks.reduce_scatter(whole, bucket.grad, self._stream, "gradients")
        if self.average and self.ranks.size > 1:
            parts = [bucket.grad for bucket in self._buckets]
            self._kernels.scale_(parts, self._factor, None, self._stream)
        self._summed, self._reduced = grads, True  # held, so that no other has their identity

    def _begin(self) -> None:
        """Take the parameters' values into the parts, where these were changed since the last step."""
        if self._versions == self._now():
            return
        for bucket in self._buckets:
            whole = self._filled(bucket, (param.view for param in bucket.params))
            own = whole.slice(0, self.ranks.rank * bucket.part, bucket.part)
            self._kernels.copy(own, bucket.shard.view, self._stream)

    def _now(self) -> list[int]:
        """Returns how often each parameter was changed in place."""
        return [param.version().count for param in self._params]

    # --- state ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, ArrayView]:
        """Returns the state of the whole, as ``kind`` has it on one rank, on the host. All ranks call it."""
        inner, found = self._inner.state_dict(), {}
        steps = np.zeros(self._count, np.int64)
        counts = inner["steps"].numpy()
        for i, bucket in enumerate(self._buckets):
            steps[bucket.numbers] = counts[i]
            for name, view in inner.items():
                stem, _, number = name.rpartition(".")
                if number == str(i):
                    whole = self._bytes(bucket, view.dtype)
                    self.ranks.all_gather(view, whole, self._stream, f"{stem} of a checkpoint")
                    for at, (_, place) in zip(bucket.numbers, bucket.places(whole), strict=True):
                        found[f"{stem}.{at}"] = arrays.as_view(np.array(place.numpy(), order="C"))
        more = {name: view for name, view in inner.items() if "." not in name and name != "steps"}
        return {"steps": arrays.as_view(steps), **more} | found

    def check_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Callable[[], None]:
        """Check what ``state_dict`` gave, of any number of ranks, or of a ``kind`` on one, and return what
        takes it over. Errors as ``Optimizer.check_state_dict``."""
        self._whole.check_state_dict(state, strict)
        views = state_views("ShardedOptimizer.load_state_dict", state)
        counts = views["steps"].numpy()
        own: dict[str, ArrayView] = {name: view for name, view in views.items() if "." not in name}
        steps = np.zeros(len(self._buckets), np.int64)
        for i, bucket in enumerate(self._buckets):
            if len({int(counts[at]) for at in bucket.numbers}) > 1:
                got = f"other numbers of steps for parameters {bucket.numbers}"
                raise CheckpointError("ShardedOptimizer.load_state_dict", "steps", got, "one number")
            steps[i] = counts[bucket.numbers[0]]
            stems = [n.rpartition(".")[0] for n in views if n.rpartition(".")[2] == str(bucket.numbers[0])]
            for stem in stems:
                own[f"{stem}.{i}"] = self._part(bucket, [views[f"{stem}.{at}"] for at in bucket.numbers])
        own["steps"] = arrays.as_view(steps)
        return self._inner.check_state_dict(own, strict)

    def _part(self, bucket: _Bucket, values: Sequence[ArrayView]) -> ArrayView:
        """This rank's part of arrays of a bucket's parameters."""
        flat = np.concatenate([value.numpy().reshape(-1) for value in values])
        whole = np.zeros(self.ranks.size * bucket.part, flat.dtype)
        whole[: flat.size] = flat
        return arrays.as_view(np.ascontiguousarray(np.split(whole, self.ranks.size)[self.ranks.rank]))


def _cut(params: list[tuple[int, Tensor]], limit: int) -> list[list[tuple[int, Tensor]]]:
    """``params`` in runs of at most ``limit`` bytes, or of one parameter."""
    runs: list[list[tuple[int, Tensor]]] = []
    left = 0
    for place, param in params:
        if not runs or param.view.nbytes > left:
            runs.append([])
            left = limit
        runs[-1].append((place, param))
        left -= param.view.nbytes
    return runs


__all__ = ["ShardedOptimizer"]
