"""Names of Transformer Engine that fp8kit has nothing for, and why. In ``fp8kit_torch`` they are not there,
so that a program that asks (``hasattr``, an import within ``try``) takes its other path; the error of one
that does not ask says why. Under Transformer Engine's name they can be imported and say it when called
(``public``)."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

import torch

_OVERLAP = "there are no userbuffers: no call chooses what runs beside GEMMs"
_QUANTIZER = (
    "recipes say how tensors are cast; QuantizedTensor.dequantize gives values, fp8kit.quantize casts"
)
_MASTERS = "FusedAdam(master_weights=True) casts its masters to weights in FP8"

# why -> names; a name means the same in whatever module of Transformer Engine it is
_NAMES = {
    _OVERLAP: "initialize_ub destroy_ub fill_userbuffers_buffer_for_all_gather get_ub",
    "experts are divided by a program's own all_to_all, between moe_permute and GroupedLinear": (
        "ep_bootstrap ep_prepare ep_dispatch ep_combine ep_finalize EpBuffer"
    ),
    "torch's fully_shard takes the layers": "FullyShardedDataParallel",
    _QUANTIZER: """HybridQuantizedTensor HybridQuantizedTensorStorage IdentityTensor
        IdentityTensorStorage""",
    _MASTERS: "multi_tensor_adam_fp8",
    "linear, norm and attention layers are modules of their own": "FusedMLAQUpProjRopeQuant",
    "the router keeps no histogram": "QBHistogramMode FusedTopkScoreFunctionQB mark_qb_bin_bounds_validated",
}
WHY = {name: why for why, names in _NAMES.items() for name in names.split()}


# the same of methods of quantizers and of their tensors
_METHODS = {
    "torch.compile has no part in it": "inner_tensor_specs storage_metadata alloc_tensors create_metadata",
    "fully_shard takes such weights whole, and divides their codes itself": """fsdp_buffer_fields
        fsdp_extract_buffers fsdp_assign_gathered fsdp_pre_all_gather fsdp_post_all_gather""",
    "the two quantizers within say it": "with_amax_reduction amax_reduction_group",
}
METHODS = {name: why for why, names in _METHODS.items() for name in names.split()}


def missing(module: str, name: str, known: Iterable[str] = ()) -> AttributeError:
    """What a ``module.name`` that is not there raises, with the reason for one of Transformer Engine's, or
    the name most like it of those that are ``known``."""
    why = ""
    if name in WHY:
        why = f", which is not supported: {WHY[name]}"
    elif hasattr(torch.nn, name):
        why = f"; torch.nn.{name} is torch's own"
    elif name[:1] != "_":
        for like in get_close_matches(name, [other for other in known if other[:1] != "_"], 1):
            why = f"; did you mean {like}?"
    return AttributeError(f"module {module!r} has no attribute {name!r}{why}", name=name)
