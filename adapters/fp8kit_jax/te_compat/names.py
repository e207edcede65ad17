"""``as_transformer_engine``: programs written for Transformer Engine's JAX package import this frontend under
that name.

Every public name of Transformer Engine 2.20 for JAX (``public_names.txt``) can be imported from then on, in
the module where it has it: programs import more than they call. What there is nothing for says why when it is
called (``fp8kit.aliases``).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

from fp8kit import aliases

_BASE = "transformer_engine.jax"
# module of transformer_engine.jax -> modules here that have its names
_SAME = {
    "": "fp8kit_jax.te_compat.quantize",
    "activation": "fp8kit_jax.te_compat.functions",
    "attention": "fp8kit_jax.te_compat.attention",
    "checkpoint_policies": "fp8kit_jax.te_compat.policies",
    "cpp_extensions": "fp8kit_jax.te_compat.collectives fp8kit_jax.te_compat.functions",
    "cpp_extensions.attention": "fp8kit_jax.te_compat.attention",
    "cpp_extensions.gemm": "fp8kit_jax.te_compat.collectives fp8kit_jax.te_compat.functions",
    "cpp_extensions.misc": "fp8kit_jax.te_compat.sharding",
    "cpp_extensions.softmax": "fp8kit_jax.te_compat.functions",
    "dense": "fp8kit_jax.te_compat.functions",
    "flax": "fp8kit_jax.te_compat.modules fp8kit_jax.flax",
    "flax.module": "fp8kit_jax.te_compat.modules fp8kit_jax.flax",
    "flax.transformer": "fp8kit_jax.flax",
    "layernorm": "fp8kit_jax.te_compat.functions",
    "layernorm_dense": "fp8kit_jax.te_compat.functions",
    "layernorm_mlp": "fp8kit_jax.te_compat.functions",
    "permutation": "fp8kit_jax.te_compat.experts fp8kit_jax.moe",
    "quantize": "fp8kit_jax.te_compat.quantize fp8kit_jax.te_compat.sharding",
    "quantize.device_utils": "fp8kit_jax.te_compat.quantize",
    "quantize.helper": "fp8kit_jax.te_compat.quantize",
    "quantize.metadata": "fp8kit_jax.te_compat.quantize",
    "quantize.misc": "fp8kit_jax.te_compat.quantize",
    "quantize.quantizer": "fp8kit_jax.te_compat.quantize",
    "quantize.scaling_modes": "fp8kit_jax.te_compat.quantize",
    "quantize.tensor": "fp8kit_jax.te_compat.sharding",
    "router": "fp8kit_jax.te_compat.experts fp8kit_jax.moe",
    "sharding": "fp8kit_jax.te_compat.sharding",
    "softmax": "fp8kit_jax.te_compat.functions",
    "transformer_engine_jax": "fp8kit_jax.te_compat.quantize",
}
_QUANTIZER = "recipes and QuantizerFactory.create_set say how operands are cast; fp8kit_jax.quantize casts"
# the beginning of a module's name -> why there is nothing for a name of it; the longest that fits
_WHY = {
    "": "it is an inner part of Transformer Engine",
    "attention": "fused_attn, or fp8kit_jax.dot_product_attention with a mask array, is what is here",
    "cpp_extensions": "it calls Transformer Engine's C++ library; fp8kit_jax's functions are what is here",
    "debug": "fp8kit_jax.inspect looks at tensors",
    "ep": "there is no expert parallelism",
    "flax.moe": "fp8kit_jax.flax.GroupedMLP and the functions of mixtures of experts are what is here",
    "moe": "fp8kit_jax.flax.GroupedMLP and the functions of mixtures of experts are what is here",
    "quantize": _QUANTIZER,
    "sharding": "XLA reduces by the arrays' shardings",
    "transformer_engine_jax": "it is a part of Transformer Engine's C++ library",
    "triton_extensions": "there are no Triton kernels here",
}


# module of Transformer Engine 2.20 for JAX -> its public names
public_names = partial(aliases.public_names, Path(__file__).with_name("public_names.txt"))


def why_not(module: str) -> str:
    """Why there is nothing for a name of that module that is not here."""
    inner = module.removeprefix(_BASE).lstrip(".")
    return _WHY[max((name for name in _WHY if f"{inner}.".startswith(f"{name}." if name else "")), key=len)]


class Finder(aliases.Finder):
    """Answers for ``transformer_engine.jax`` and ``transformer_engine_jax``, whose modules are in
    ``sys.modules`` already: any other name of them is refused, lest parts of an installed Transformer Engine
    be mixed in."""

    who = "fp8kit_jax"

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        """Returns None for other packages; ModuleNotFoundError for a name that fp8kit does not have."""
        top, _, rest = name.partition(".")
        if top == "transformer_engine_jax" or (top == "transformer_engine" and rest.startswith("jax")):
            why = "fp8kit_jax, which stands for transformer_engine.jax here, does not have it"
        elif name == "transformer_engine.pytorch" and not hasattr(sys.modules[top], "pytorch"):
            why = "fp8kit_torch.as_transformer_engine() gives it"
        else:
            return
        raise ModuleNotFoundError(f"{name}: {why}", name=name)


def _hidden(module: str) -> bool:
    """Whether a package has a function in the place of its module of that name: ``cpp_extensions.gemm``."""
    above, _, last = module.rpartition(".")
    return last in public_names().get(above, ()) and last in public_names()[module]


def _module(name: str) -> ModuleType:
    """One of Transformer Engine's modules: what is here of its names, and what says why there is nothing."""
    made, inner = aliases.module(name), name.removeprefix(_BASE).lstrip(".")
    parts = [importlib.import_module(part) for part in _SAME.get(inner, "").split()]
    made.__file__ = str(Path(__file__))
    for key in public_names()[name]:
        # of a package the modules in it come later
        if f"{name}.{key}" not in public_names() or _hidden(f"{name}.{key}"):
            found = [part for part in parts if key in vars(part)]
            value = getattr(found[0], key) if found else aliases.refused(name, key, why_not(name))
            setattr(made, key, value)
    made.__all__ = list(public_names()[name])  # type: ignore[attr-defined]
    return made


def as_transformer_engine() -> ModuleType:
    """Make ``transformer_engine.jax``, all that is in it, and ``transformer_engine.common.recipe`` importable
    names of this frontend, in this process. Returns ``transformer_engine``. Calling it again changes nothing;
    ``fp8kit_torch.as_transformer_engine`` may be called before or after it.

    An installed Transformer Engine is left out from then on. BackendError where it was imported already;
    ImportError where Flax is not installed.
    """
    known = aliases.ours("as_transformer_engine", "transformer_engine")
    if known is not None and _BASE in sys.modules:
        return known
    made = {name: _module(name) for name in public_names()}
    whole = known or aliases.module("transformer_engine")
    if known is None:
        recipe = aliases.recipe_module()
        common = aliases.module("transformer_engine.common")
        whole.common, common.recipe = common, recipe  # type: ignore[attr-defined]
        whole.__version__ = Finder.version  # type: ignore[attr-defined]
        made |= {module.__name__: module for module in (whole, common, recipe)}
    finder = Finder()
    if known is None:
        whole.__fp8kit__ = finder  # type: ignore[attr-defined]
    for name, module in made.items():
        above, _, last = name.rpartition(".")
        if above and not (name in public_names() and _hidden(name)):
            setattr(made.get(above, whole), last, module)
    aliases.install(made, finder)
    return whole
