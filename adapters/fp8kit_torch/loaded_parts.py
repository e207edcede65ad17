"""``LoadedParts``: where ``torch.distributed.checkpoint`` puts what it reads of a tensor that is held in FP8.

A checkpoint of several processes has a weight in parts. Its scales are those of the whole: parts are put
together in high precision, and cast once all are there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8kit_torch import torch_compat

_aten = torch.ops.aten
_VIEWS = (_aten.slice.Tensor, _aten.detach.default, _aten.alias.default)


class Gathered:
    """The values of ``tensor``, which is held in FP8, as far as they were read; ``left`` elements are to
    come."""

    def __init__(self, tensor: Any) -> None:
        self.tensor, self.left = tensor, tensor.numel()
        self.values = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


class LoadedParts(torch.Tensor):
    """The values that are read, or a part of them: ``copy_`` writes there, the last one casts them all into
    the tensor. The whole tensor's codes are taken as they are."""

    _plain: Tensor
    _gathered: Gathered

    @staticmethod
    def __new__(cls, plain: Tensor, gathered: Gathered) -> LoadedParts:
        made: LoadedParts = torch_compat.make_subclass(cls, plain)
        made._plain, made._gathered = plain, gathered
        return made

    def __init__(self, plain: Tensor, gathered: Gathered) -> None:
        pass

    __torch_function__ = torch_compat.no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Operations on the values; parts of them, and writes, as the class says."""
        own = args[0]
        if func is _aten.copy_.default and isinstance(own, LoadedParts):
            gathered, source = own._gathered, args[1]
            whole = source.shape == gathered.tensor.shape
            with torch.overrides.enable_reentrant_dispatch(), torch.no_grad():
                if not whole:
                    own._plain.copy_(source)
                gathered.left -= source.numel()
                if gathered.left <= 0:
                    gathered.tensor.copy_(source if whole else gathered.values)
                    gathered.tensor._gathered = None
            return own

        def plain(value: Any) -> Any:
            return value._plain if isinstance(value, LoadedParts) else value

        out = func(*torch_compat.tree_map(plain, args), **torch_compat.tree_map(plain, kwargs or {}))
        return LoadedParts(out, own._gathered) if func in _VIEWS else out
