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

Each family of kernels has a file here, and one of the same name in every engine and in
``fp8kit.testing.contract``. It holds a Protocol; ``Kernels`` is all of them. The decorator of a signature
says what the kernel reads and writes: ``SPECS[name]``, a ``KernelSpec``. ``KERNELS`` lists the names;
``signature(name)`` gives the signature that an implementation must have.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from fp8kit.backends.protocol.activation import Activations
from fp8kit.backends.protocol.attention import AttentionExtras, Attentions, AttentionSpec
from fp8kit.backends.protocol.block import BLOCK, Blocks, block_shapes
from fp8kit.backends.protocol.blocks import BlockCasts
from fp8kit.backends.protocol.cast import Cast, Rule
from fp8kit.backends.protocol.cross_entropy import CrossEntropies
from fp8kit.backends.protocol.drop_path import DropPaths
from fp8kit.backends.protocol.dropout import Dropouts
from fp8kit.backends.protocol.elementwise import Elementwise
from fp8kit.backends.protocol.embedding import Embeddings
from fp8kit.backends.protocol.encoded_adam import EncodedAdams
from fp8kit.backends.protocol.fp8_attention import Fp8Attentions
from fp8kit.backends.protocol.fused_gemm import FusedProducts
from fp8kit.backends.protocol.gemm import Layout, Products
from fp8kit.backends.protocol.grouped import GroupedAlong, GroupedLayout, GroupedProducts
from fp8kit.backends.protocol.kv_cache import Caches
from fp8kit.backends.protocol.lines import Lines
from fp8kit.backends.protocol.model_gemm import ModelledProducts
from fp8kit.backends.protocol.norm import NORMALIZATIONS, Normalization, Norms
from fp8kit.backends.protocol.optim import Optimizers
from fp8kit.backends.protocol.packed_attention import Lying, PackedAttentions
from fp8kit.backends.protocol.paged_attention import PagedAttentions
from fp8kit.backends.protocol.permute import Permutations
from fp8kit.backends.protocol.quantize import Quantization
from fp8kit.backends.protocol.quantized_attention import QuantizedAttentions
from fp8kit.backends.protocol.rope import Ropes
from fp8kit.backends.protocol.router import Routers, Routing
from fp8kit.backends.protocol.scales import Scales
from fp8kit.backends.protocol.sequences import Sequences
from fp8kit.backends.protocol.softmax import Softmaxes
from fp8kit.backends.protocol.spec import SPECS, KernelSpec, Output, map_arrays, views
from fp8kit.backends.protocol.statistics import Statistics
from fp8kit.backends.protocol.xielu import LearnedActivations

__all__ = [
    "BLOCK",
    "KERNELS",
    "NORMALIZATIONS",
    "SERVES",
    "SPECS",
    "AttentionExtras",
    "AttentionSpec",
    "Cast",
    "GroupedAlong",
    "GroupedLayout",
    "KernelSpec",
    "Kernels",
    "Layout",
    "Lying",
    "Normalization",
    "Output",
    "Routing",
    "Rule",
    "block_shapes",
    "map_arrays",
    "signature",
    "views",
]


class Kernels(
    Scales,
    Quantization,
    Blocks,
    BlockCasts,
    Products,
    FusedProducts,
    ModelledProducts,
    GroupedProducts,
    Norms,
    Activations,
    LearnedActivations,
    Lines,
    Dropouts,
    DropPaths,
    Attentions,
    PackedAttentions,
    QuantizedAttentions,
    Fp8Attentions,
    Sequences,
    Caches,
    PagedAttentions,
    Ropes,
    Embeddings,
    Permutations,
    Routers,
    CrossEntropies,
    Softmaxes,
    Optimizers,
    EncodedAdams,
    Elementwise,
    Statistics,
    Protocol,
):
    """The contract. ``fp8kit.backends.dispatch.kernels(device)`` gives one object with all of these, each
    chosen by policy."""


KERNELS: tuple[str, ...] = tuple(name for base in Kernels.__bases__ for name in vars(base) if name in SPECS)
# workspace function -> the kernels whose workspace it measures
SERVES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {name: SPECS[name].serves for name in KERNELS if SPECS[name].serves}
)


def signature(kernel: str) -> inspect.Signature:
    """Returns the signature, without self, that every implementation of ``kernel`` has. KeyError for an
    unknown one."""
    return SPECS[kernel].signature
