"""The kernel contract: every kernel that an engine implements, with shapes, dtypes, units and errors.

A kernel is a stateless function on ``ArrayView``s. Its outputs, its workspace and its stream are given; it
allocates nothing that outlives the call and never synchronises with the host. Callers (``fp8kit.ops``) have
validated everything: a kernel may assume what stands here and raises only BackendError, for what its engine
cannot run.

Conventions

* ``M`` rows (tokens), ``N`` columns, ``K`` the contraction. h is float32, bfloat16 or float16; arithmetic is
  in float32, each h output is rounded once, to nearest even. Views are C-contiguous unless a text says
  strided; ``None`` means absent.
* FP8 codes are uint8 views; their ``Format`` travels beside. ``scale`` multiplies before the cast,
  ``scale_inv = 1 / scale``.
* ``amax`` outputs are *max-accumulated*: the caller zeroes them or points them at a running maximum. NaN is
  ignored in an amax, Inf is not.
* ``rng`` is int64[2] ``(seed, offset)``. Element i of the operation's output uses word ``i % 4`` of
  Philox4x32-10 with counter ``(lo(i // 4), hi(i // 4), lo(offset), hi(offset))`` and key ``(lo(seed),
  hi(seed))`` (Salmon et al., SC'11). In ``dropout_add``, ``dropout_bwd`` and ``drop_path`` it may be
  int64[3], with the number of the part among equal parts of a larger array: element i of a part of n elements
  counts as element ``part * n + i``, and likewise samples. Dropout keeps an element when its word is at least
  ``floor(p * 2**32)`` and multiplies it by float32(1 / (1 - p)).
* ``workspace`` is a uint8 view of at least ``<kernel>_workspace(...)`` bytes, contents undefined before and
  after.
* ``stream`` is the raw stream handle, 0 on the CPU.
* Kernels whose name ends in ``_`` change their argument in place; no other kernel writes what it reads unless
  its text allows it.

Each family of kernels has a file, and a Protocol in it; ``Kernels`` is all of them. ``KERNELS`` lists the
names; ``signature(name)`` gives the signature that an implementation must have.
"""

from __future__ import annotations

import inspect
from typing import Protocol

from fp8kit.backends.protocol.activation import Activations
from fp8kit.backends.protocol.attention import AttentionExtras, Attentions, AttentionSpec
from fp8kit.backends.protocol.elementwise import Elementwise
from fp8kit.backends.protocol.embedding import Ends
from fp8kit.backends.protocol.gemm import Layout, Products
from fp8kit.backends.protocol.kv_cache import Positions
from fp8kit.backends.protocol.norm import NORMALIZATIONS, Normalization, Norms
from fp8kit.backends.protocol.optim import Optimizers
from fp8kit.backends.protocol.quantize import BLOCK, Cast, Quantization, Rule, block_shapes, want_scale

__all__ = [
    "BLOCK",
    "KERNELS",
    "NORMALIZATIONS",
    "AttentionExtras",
    "AttentionSpec",
    "Cast",
    "Kernels",
    "Layout",
    "Normalization",
    "Rule",
    "block_shapes",
    "signature",
    "want_scale",
]


class Kernels(
    Quantization, Products, Norms, Activations, Attentions, Positions, Ends, Optimizers, Elementwise, Protocol
):
    """The contract. ``fp8kit.backends.dispatch.kernels(device)`` gives one object with all of these, each
    chosen by policy."""


KERNELS: tuple[str, ...] = tuple(
    name
    for family in Kernels.__bases__
    for name, value in vars(family).items()
    if inspect.isfunction(value) and not name.startswith("_")
)


def signature(kernel: str) -> inspect.Signature:
    """The signature, without self, that every implementation of ``kernel`` has."""
    whole = inspect.signature(getattr(Kernels, kernel))
    return whole.replace(parameters=list(whole.parameters.values())[1:])
