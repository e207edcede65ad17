"""``as_transformer_engine``: programs written for Transformer Engine import this frontend under that name.

The modules within ``transformer_engine.pytorch`` are modules of the frontend as it is imported
(``te.quantization``, ``fp8kit_torch.ops``); only the call makes other names in ``sys.modules``. Nothing but
names changes:
``transformer_engine.pytorch`` *is* the module ``fp8kit_torch``, and modules say so in ``__module__``.

From then on every public name of Transformer Engine 2.20 (``public_names.txt``) can be imported, in whatever
module it has it: programs import more than they call. What there is nothing for says why when it is called
(``public``). Before the call such names are not there: ``hasattr`` says no (``unsupported``).
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer

from fp8kit import aliases
from fp8kit_torch.te_compat.old_recipe import DelayedScaling
from fp8kit_torch.te_compat.public import public_names, refused
from fp8kit_torch.te_compat.unsupported import WHY, missing

_OF_FP8 = "fp8kit_torch.te_compat.quantization"
_QUANTIZED = "fp8kit_torch.te_compat.tensors"
# module of transformer_engine.pytorch -> module here; several where its names are spread over them
_SAME = {
    "optimizers": "fp8kit_torch.optimizers",
    "optimizers.newton_schulz": "fp8kit_torch.te_compat.newton_schulz",
    "newton_schulz": "fp8kit_torch.te_compat.newton_schulz",
    "fp8": _OF_FP8,
    "quantization": _OF_FP8,
    "tensor": _QUANTIZED,
    "tensor.float8_tensor": _QUANTIZED,
    "tensor.quantized_tensor": _QUANTIZED,
    "tensor.float8_blockwise_tensor": _QUANTIZED,
    "tensor.mxfp8_tensor": _QUANTIZED,
    "tensor.nvfp4_tensor": _QUANTIZED,
    "tensor.grouped_tensor": "fp8kit_torch.te_compat.grouped_tensor",
    "tensor.storage": _QUANTIZED,
    "tensor.storage.grouped_tensor_storage": "fp8kit_torch.te_compat.grouped_tensor",
    "tensor.storage.float8_tensor_storage": _QUANTIZED,
    "tensor.storage.float8_blockwise_tensor_storage": _QUANTIZED,
    "tensor.storage.mxfp8_tensor_storage": _QUANTIZED,
    "tensor.storage.nvfp4_tensor_storage": _QUANTIZED,
    "tensor.utils": "fp8kit_torch.te_compat.saved_tensors",
    "float8_tensor": _QUANTIZED,
    "quantized_tensor": _QUANTIZED,
    "constants": "fp8kit_torch.te_compat.dtypes",
    "distributed": """fp8kit_torch.recompute fp8kit_torch.rng fp8kit_torch.te_compat.parallel
        fp8kit_torch.te_compat.recompute_phases""",
    "graph": "fp8kit_torch.graphs fp8kit_torch.te_compat.capture",
    "jit": "fp8kit_torch.te_compat.capture fp8kit_torch.te_compat.fused_functions",
    "cross_entropy": "fp8kit_torch.cross_entropy",
    "permutation": "fp8kit_torch.moe",
    "router": "fp8kit_torch.router",
    "ep": "",
    "custom_recipes": "",
    "custom_recipes.quantizer_factories": "fp8kit_torch.te_compat.custom_recipes",
    "custom_recipes.quantizer_factory_zoo": "fp8kit_torch.te_compat.factory_zoo",
    "cpu_offload": "fp8kit_torch.cpu_offload",
    "export": "fp8kit_torch.te_compat.export",
    "onnx_extensions": "fp8kit_torch.te_compat.onnx_extensions",
    "utils": "fp8kit_torch.te_compat.utilities",
    "torch_version": "fp8kit_torch.te_compat.capture",
    "cpp_extensions": "fp8kit_torch.te_compat.gemms fp8kit_torch.te_compat.extension_casts",
    "cpp_extensions.gemm": "fp8kit_torch.te_compat.gemms",
    "ops": "fp8kit_torch.fusible",
    "ops.basic": "fp8kit_torch.fusible",
    "ops.fuser": "fp8kit_torch.fusion",
    "ops.op": "fp8kit_torch.fusion",
    "module": "fp8kit_torch",
    "module.base": "fp8kit_torch.module fp8kit_torch.te_compat.parallel fp8kit_torch.te_compat.own_layers",
    "module.linear": "fp8kit_torch.linear",
    "module.grouped_linear": "fp8kit_torch.grouped_linear",
    "module.layernorm": "fp8kit_torch.norm",
    "module.rmsnorm": "fp8kit_torch.norm",
    "module.layernorm_linear": "fp8kit_torch.norm_linear",
    "module.layernorm_mlp": "fp8kit_torch.norm_mlp",
    "module.fp8_padding": "fp8kit_torch.padding",
    "module.fp8_unpadding": "fp8kit_torch.padding",
    "attention": "fp8kit_torch",
    "attention.rope": "fp8kit_torch.rope",
    "attention.dot_product_attention": "fp8kit_torch.dot_product_attention",
    "attention.dot_product_attention.utils": "fp8kit_torch.te_compat.attention_utils",
    "attention.dot_product_attention.context_parallel": "fp8kit_torch.te_compat.context_batches",
    "attention.multi_head_attention": "fp8kit_torch.attention",
    "attention.inference": "fp8kit_torch.inference fp8kit_torch.te_compat.cache_managers",
    "transformer": "fp8kit_torch",
}
# module here -> names of ``transformer_engine.pytorch`` that it has; found when they are first used
_LAZY = {
    "dtypes": "CPLoadBalancingStrategy DType UserBufferQuantizationMode",
    "tensors": """Float8BlockQuantizer Float8BlockwiseQTensor Float8BlockwiseQTensorStorage
        Float8CurrentScalingQuantizer Float8Quantizer Float8TensorStorage MXFP8Quantizer MXFP8Tensor
        MXFP8TensorStorage NVFP4Quantizer NVFP4Tensor NVFP4TensorStorage QuantizedTensorStorage Quantizer
        prepare_for_saving restore_from_func_ctx restore_from_saved""",
    "capture": "torch_version",
    "newton_schulz": "CusolverMpCtx newton_schulz newton_schulz_tp",
    "utilities": "deinterleave_glu_tensor interleave_glu_tensor",
    "custom_recipes": """DelayedScalingRequest HybridQuantizer IdentityQuantizer QuantizerRequest
        QuantizerRole""",
}
# a private one that programs set after they have changed NVTE_FUSED_ATTN, and print: nothing reads it here
_BACKENDS = {
    "attention_params": None,
    "use_flash_attention": None,
    "flash_attention_backend": None,
    "use_fused_attention": None,
    "fused_attention_backend": None,
    "use_unfused_attention": None,
    "backend_selection_requires_update": False,
}
_LATER = {name: module for module, names in _LAZY.items() for name in names.split()}
_BASE = "transformer_engine.pytorch"


@cache
def _everywhere() -> frozenset[str]:
    return frozenset(itertools.chain.from_iterable(public_names().values()))


def _module(name: str, parts: Iterable[ModuleType]) -> ModuleType:
    """A module of that name with the names of ``parts``: those of ``__all__``, and where there is none those
    that any module of Transformer Engine has, since programs take names from where they are imported, too. A
    package, so that ``Finder`` is asked for what it lacks."""
    made = aliases.module(name, parts, wanted=_everywhere())
    made.__getattr__ = lambda key: found_in(name, key, vars(made))  # type: ignore[method-assign]
    return made


def found_in(module: str, name: str, known: dict[str, Any]) -> Any:
    """A ``name`` that the ``module`` of Transformer Engine does not have among those that are ``known``: one
    of ``transformer_engine.pytorch`` that is made at its first use; as that name is under Transformer
    Engine's, what a module around it has, or what says why there is nothing. AttributeError otherwise."""
    if name in _LATER and module in (_BASE, "fp8kit_torch"):
        return getattr(importlib.import_module(f"fp8kit_torch.te_compat.{_LATER[name]}"), name)
    whole = sys.modules.get("transformer_engine")
    at = _BASE if module == "fp8kit_torch" else module
    aliased = isinstance(getattr(whole, "__fp8kit__", None), Finder)
    if aliased and name in public_names().get(at, ()):
        above = at
        while above := above.rpartition(".")[0]:
            around = getattr(sys.modules[above], name) if name in public_names().get(above, ()) else None
            if around is not None and not isinstance(around, ModuleType):
                return around
        if at.startswith(f"{_BASE}.cpp_extensions"):  # has the names of the C++ library too
            found = vars(sys.modules["transformer_engine_torch"]).get(name)
            if found is not None:
                return found
        return refused(at, name)
    raise missing(module if aliased else module.replace(_BASE, "fp8kit_torch", 1), name, known)


def _hang(top: ModuleType, made: dict[str, ModuleType]) -> None:
    """Make the modules attributes of those that they are in. Where the frontend itself has a module of that
    name, it gets what it lacks."""
    for name, module in made.items():
        above, _, last = name.rpartition(".")
        if not above and last in _LATER:  # a function there, and the module that it is in
            continue
        at: Any = top
        for part in above.split(".") if above else ():
            at = getattr(at, part)
        for parent in (at, made.get(above, at)):
            known = vars(parent).get(last)
            if known is None:
                setattr(parent, last, module)
            elif isinstance(known, ModuleType) and known is not module:
                for key, value in vars(module).items():
                    if not key.startswith("_") or key == "__getattr__":
                        vars(known).setdefault(key, value)


class Finder(aliases.Finder):
    """Answers for ``transformer_engine``: its modules are in ``sys.modules`` already, and any other name of
    it is refused, lest a file of fp8kit_torch be loaded a second time, or parts of an installed Transformer
    Engine be mixed in. Python asks it for the name in ``from module import name`` too, where the module has
    none of that name."""

    who = "fp8kit_torch"

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        """None for other packages; ImportError for what fp8kit does not have: a ModuleNotFoundError unless
        ``WHY`` has a reason."""
        top, module, last = name.partition(".")[0], *name.rpartition(".")[::2]
        if last in WHY and (top == "transformer_engine" or module == "fp8kit_torch"):
            raise ImportError(f"{missing(module, last)}", name=module)
        if top in ("transformer_engine", "transformer_engine_torch", "nvdlfw_inspect"):
            raise ModuleNotFoundError(
                f"{name}: fp8kit_torch, which stands for transformer_engine here, does not have it", name=name
            )


def modules_within(top: ModuleType) -> dict[str, ModuleType]:
    """The modules within ``transformer_engine.pytorch``, name -> module, made attributes of ``top``, which
    stands for it, and importable from it where it has no module of that name (``fp8kit_torch.ops``)."""
    made = {
        name: _module(f"{_BASE}.{name}", map(importlib.import_module, targets.split()))
        for name, targets in _SAME.items()
    }
    _hang(top, made)
    for name, module in made.items():
        sys.modules.setdefault(f"{top.__name__}.{name}", module)
    return made


def _name_classes(made: dict[str, ModuleType]) -> None:
    """Let modules and optimisers say in ``__module__`` where Transformer Engine has them: programs go by
    that."""
    for name in sorted(public_names(), key=lambda name: name.count(".")):
        for key in public_names()[name]:
            kind = getattr(made[name], key)
            if isinstance(kind, type) and issubclass(kind, Module | Optimizer) and kind.__name__ == key:
                kind.__module__ = name


def _debug_modules() -> dict[str, ModuleType]:
    """``nvdlfw_inspect``, by which Transformer Engine's debug features are used."""
    api = importlib.import_module("fp8kit_torch.te_compat.debug_api")
    whole, logs = _module("nvdlfw_inspect", []), _module("nvdlfw_inspect.logging", [])
    logs.BaseLogger = api.BaseLogger  # type: ignore[attr-defined]
    whole.api, whole.logging = api, logs  # type: ignore[attr-defined]
    made = {"nvdlfw_inspect": whole, "nvdlfw_inspect.api": api, "nvdlfw_inspect.logging": logs}
    debug = "transformer_engine.debug"
    for name in (debug, f"{debug}.features", f"{debug}.pytorch", f"{debug}.pytorch.debug_state"):
        made[name] = _module(name, [])
        above, _, last = name.rpartition(".")
        if above in made:
            setattr(made[above], last, made[name])
    # of which programs tell ``initialize`` the folder, by its own name or from what it is in
    made[f"{debug}.features"].__path__ = [os.path.join(*debug.split("."), "features")]
    for name in (debug, f"{debug}.features"):
        made[name].__file__ = os.path.join(*name.split("."), "__init__.py")
    for name in ("TEDebugState", "set_weight_tensor_tp_group_reduce"):
        setattr(made[f"{debug}.pytorch.debug_state"], name, getattr(api, name))
    return made


def as_transformer_engine() -> ModuleType:
    """Make ``transformer_engine`` and all that is in it importable names of this frontend, in this process:
    ``transformer_engine.pytorch``, ``transformer_engine.common.recipe``, ``transformer_engine_torch``, and
    ``nvdlfw_inspect.api``, by which Transformer Engine's debug features are used. Returns
    ``transformer_engine``. Calling it again changes nothing.

    An installed Transformer Engine is left out from then on. BackendError where it was imported already.
    ``fp8kit alias`` does the same for every process of an environment.
    """
    known = sys.modules.get("transformer_engine")
    if isinstance(getattr(known, "__fp8kit__", None), Finder):
        return known  # type: ignore[return-value]
    # fp8kit_jax may stand for transformer_engine.jax already
    aliases.ours("as_transformer_engine", "transformer_engine", "nvdlfw_inspect")
    recipe = _module("transformer_engine.common.recipe", [aliases.recipe_module()])
    recipe.DelayedScaling = DelayedScaling  # type: ignore[attr-defined]
    whole = _module("transformer_engine", []) if known is None else known
    common = _module("transformer_engine.common", [])
    top = sys.modules["fp8kit_torch"]
    within: dict[str, ModuleType] = top.__dict__["_within"]
    for name in sorted(public_names()):
        inner = name.removeprefix(f"{_BASE}.")
        if inner != name and inner not in within:  # of which there is nothing but names
            within[inner] = _module(name, [])
            _hang(top, {inner: within[inner]} | {key: within[key] for key in within if inner.startswith(key)})
    for name, module in within.items():  # what a program sets in one is there by either way to it
        if isinstance(vars(top).get(name), ModuleType):
            setattr(top, name, module)
    made = {module.__name__: module for module in (whole, common, recipe)} | {_BASE: top}
    made |= {f"{_BASE}.{name}": module for name, module in within.items()}
    parts = ("extension", "extension_casts", "extension_kernels", "extension_sequences")
    found = [importlib.import_module(f"fp8kit_torch.te_compat.{part}") for part in parts]
    for name, module in made.items():
        if name.startswith(f"{_BASE}.attention"):
            module._attention_backends = _BACKENDS  # type: ignore[attr-defined]
    made["transformer_engine_torch"] = _module("transformer_engine_torch", found)
    made["transformer_engine.common.utils"] = common.utils = _module(  # type: ignore[attr-defined]
        "transformer_engine.common.utils", []
    )
    for name, module in made.items():
        if name in public_names() and module is not top:
            module.__all__ = list(public_names()[name])  # type: ignore[attr-defined]
    whole.__version__ = Finder.version  # type: ignore[attr-defined]
    common.recipe = recipe  # type: ignore[attr-defined]
    whole.common, whole.pytorch, top.common = common, top, common  # type: ignore[attr-defined]
    made |= _debug_modules()
    whole.debug = made["transformer_engine.debug"]  # type: ignore[attr-defined]
    whole.__file__ = os.path.join("transformer_engine", "__init__.py")
    finder = Finder()
    whole.__fp8kit__ = finder  # type: ignore[attr-defined]
    aliases.install(made, finder)
    _name_classes(made)
    return whole
