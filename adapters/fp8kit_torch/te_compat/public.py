"""The public names of Transformer Engine, and what stands for those that there is nothing for
(``fp8kit.aliases``)."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from fp8kit import aliases
from fp8kit.layers.cache_manager import PagedCacheManager
from fp8kit_torch.te_compat.unsupported import WHY

# the beginning of a module's name -> why there is nothing for a name of it that ``WHY`` does not have; the
# longest that fits
_MODULES = {
    "transformer_engine": "it is an inner part of Transformer Engine",
    "transformer_engine_torch": (
        "it is a function of Transformer Engine's C++ library; the modules and functions of "
        "transformer_engine.pytorch are what fp8kit_torch has"
    ),
    "transformer_engine.pytorch.cpp_extensions": (
        "it is a function of Transformer Engine's C++ library; the modules and functions of "
        "transformer_engine.pytorch are what fp8kit_torch has"
    ),
    "transformer_engine.pytorch.attention": (
        "it is an inner part of Transformer Engine's attention; DotProductAttention is what is here"
    ),
    "transformer_engine.pytorch.attention.linear_attention": "linear attention is not there",
    "transformer_engine.pytorch.custom_recipes": (
        "a CustomRecipe's function gives quantizers of te.pytorch or fp8kit.quantization.Quantizer values"
    ),
    "transformer_engine.pytorch.distributed": "collectives are those of torch.distributed",
    "transformer_engine.pytorch.distributed_weight": "weights are not distributed by the layers",
    "transformer_engine.pytorch.dynamo": "torch.compile needs no such registration here",
    "transformer_engine.pytorch.ep": "experts are divided by a program's own all_to_all",
    "transformer_engine.pytorch.numerics_debug": (
        "te.inspect and fp8kit.numerics.tensor_statistics look at tensors"
    ),
    "transformer_engine.pytorch.onnx_extensions": "te_translation_table has what torch.onnx.export needs",
    "transformer_engine.pytorch.ops": "layers are fused as they are written",
    "transformer_engine.pytorch.permutation": "moe_permute and moe_unpermute are what is here",
    "transformer_engine.pytorch.router": "its three functions are what is here",
    "transformer_engine.pytorch.triton": "there are no Triton kernels here",
}

# what is there by another name: programs ask ``isinstance``
_LIKE = {"PagedKVCacheManager": PagedCacheManager}

# module of Transformer Engine 2.20 -> its public names, sorted
public_names = partial(aliases.public_names, Path(__file__).with_name("public_names.txt"))


def why_not(module: str, name: str) -> str:
    """Why there is nothing for that name of a module of Transformer Engine."""
    if name in WHY:
        return WHY[name]
    fitting = [known for known in _MODULES if f"{module}.".startswith(f"{known}.")]
    return _MODULES[max(fitting, key=len)]


def refused(module: str, name: str) -> type:
    """What stands for that name: the same class each time."""
    return aliases.refused(module, name, why_not(module, name), _LIKE.get(name, ()))
