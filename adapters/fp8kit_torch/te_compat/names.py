"""``as_transformer_engine``: programs written for Transformer Engine import this frontend under that name.

The modules within ``transformer_engine.pytorch`` are attributes of the frontend as it is imported
(``te.quantization``, ``te.ops``); only the call makes names in ``sys.modules``. Nothing but names changes:
``transformer_engine.pytorch`` *is* the module ``fp8kit_torch``. Names of Transformer Engine that there is
nothing for are not there: ``hasattr`` says no, an import is an ImportError, and both errors say why
(``unsupported``).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from fp8kit import recipe as recipes
from fp8kit.errors import BackendError, RecipeError
from fp8kit_torch.te_compat.unsupported import WHY, missing

STANDS_FOR = "2.20.0"  # the Transformer Engine whose names and defaults these are
_OF_FP8 = (
    "fp8kit_torch.autocast fp8kit_torch.availability fp8kit_torch.quantized "
    "fp8kit_torch.te_compat.global_state"
)
# module of transformer_engine.pytorch -> module here; several where its names are spread over them
_SAME = {
    "optimizers": "fp8kit_torch.optimizers",
    "fp8": _OF_FP8,
    "quantization": _OF_FP8,
    "tensor": "fp8kit_torch.quantized",
    "tensor.float8_tensor": "fp8kit_torch.quantized",
    "tensor.quantized_tensor": "fp8kit_torch.quantized",
    "tensor.utils": "",
    "float8_tensor": "fp8kit_torch.quantized",
    "quantized_tensor": "fp8kit_torch.quantized",
    "distributed": "fp8kit_torch.recompute fp8kit_torch.rng",
    "graph": "fp8kit_torch.graphs",
    "cross_entropy": "fp8kit_torch.cross_entropy",
    "permutation": "fp8kit_torch.moe",
    "router": "",
    "ep": "",
    "cpu_offload": "fp8kit_torch.te_compat.unsupported",
    "export": "fp8kit_torch.te_compat.unsupported",
    "utils": "fp8kit_torch.availability",
    "cpp_extensions": "fp8kit_torch.te_compat.gemms",
    "cpp_extensions.gemm": "fp8kit_torch.te_compat.gemms",
    "ops": "fp8kit_torch.fusible",
    "ops.basic": "fp8kit_torch.fusible",
    "module": "fp8kit_torch",
    "module.base": "fp8kit_torch.module",
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
    "attention.multi_head_attention": "fp8kit_torch.attention",
    "attention.inference": "fp8kit_torch.inference",
    "transformer": "fp8kit_torch",
}
_NEUTRAL = {"interval": 1, "override_linear_precision": (False, False, False)}


class _OldDelayedScaling(type):
    """Calls make fp8kit's ``DelayedScaling``, and every one of those is an instance."""

    def __call__(cls, *args: Any, **kwargs: Any) -> recipes.DelayedScaling:
        for name, neutral in _NEUTRAL.items():
            value = kwargs.pop(name, neutral)
            if (tuple(value) if isinstance(value, list) else value) != neutral:
                raise RecipeError(
                    "DelayedScaling", name, value, f"{neutral}, the only value that it has left"
                )
        return recipes.DelayedScaling(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, recipes.DelayedScaling)

    def __getattr__(cls, name: str) -> Any:
        return getattr(recipes.DelayedScaling, name)


class DelayedScaling(metaclass=_OldDelayedScaling):
    """``fp8kit.recipe.DelayedScaling`` that takes two arguments of Transformer Engine 1.x as well, at their
    neutral values only: ``interval=1`` and ``override_linear_precision=(False, False, False)``. RecipeError
    otherwise."""


def _module(name: str, parts: Iterable[ModuleType]) -> ModuleType:
    """A module of that name with the public names of ``parts``; a package, so that ``_Finder`` is asked for
    what it lacks."""
    made = ModuleType(name, f"fp8kit under the name {name}.")
    made.__spec__ = ModuleSpec(name, None, is_package=True)
    made.__path__ = []
    for part in parts:
        for key in getattr(part, "__all__", None) or [key for key in vars(part) if not key.startswith("_")]:
            setattr(made, key, getattr(part, key))

    def lacking(key: str) -> Any:
        raise missing(name, key, vars(made))

    made.__getattr__ = lacking  # type: ignore[method-assign]
    return made


def _hang(top: ModuleType, made: dict[str, ModuleType]) -> None:
    """Make the modules attributes of those that they are in. Where the frontend itself has a module of that
    name, it gets what it lacks."""
    for name, module in made.items():
        above, _, last = name.rpartition(".")
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


class _Distribution(importlib.metadata.Distribution):
    """What ``importlib.metadata`` says of "transformer-engine": libraries ask that before they import it."""

    def read_text(self, filename: str) -> str | None:
        """The METADATA, and nothing else."""
        if filename != "METADATA":
            return None
        return (
            f"Metadata-Version: 2.1\nName: transformer-engine\nVersion: {STANDS_FOR}\n"
            "Summary: fp8kit_torch under another name\n"
        )

    def locate_file(self, path: Any) -> Any:
        """There are no files."""
        raise FileNotFoundError(f"transformer-engine: {path}: this is fp8kit_torch under another name")


class _Finder:
    """Answers for ``transformer_engine``: its modules are in ``sys.modules`` already, and any other name of
    it is refused, lest a file of fp8kit_torch be loaded a second time, or parts of an installed Transformer
    Engine be mixed in. Python asks it for the name in ``from module import name`` too, where the module has
    none of that name."""

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

    def find_distributions(self, context: Any) -> Iterable[importlib.metadata.Distribution]:
        """The one distribution, when it is asked for."""
        asked = (context.name or "").replace("_", "-").lower()
        return [_Distribution()] if asked == "transformer-engine" else []


def modules_within(top: ModuleType) -> dict[str, ModuleType]:
    """The modules within ``transformer_engine.pytorch``, name -> module, made attributes of ``top``, which
    stands for it."""
    made = {
        name: _module(f"transformer_engine.pytorch.{name}", map(importlib.import_module, targets.split()))
        for name, targets in _SAME.items()
    }
    _hang(top, made)
    return made


def _debug_modules() -> dict[str, ModuleType]:
    """``nvdlfw_inspect``, by which Transformer Engine's debug features are used."""
    api = importlib.import_module("fp8kit_torch.te_compat.debug_api")
    whole, logs = _module("nvdlfw_inspect", []), _module("nvdlfw_inspect.logging", [])
    logs.BaseLogger = api.BaseLogger  # type: ignore[attr-defined]
    whole.api, whole.logging = api, logs  # type: ignore[attr-defined]
    return {"nvdlfw_inspect": whole, "nvdlfw_inspect.api": api, "nvdlfw_inspect.logging": logs}


def as_transformer_engine() -> ModuleType:
    """Make ``transformer_engine``, ``transformer_engine.pytorch`` and ``transformer_engine.common.recipe``
    importable names of this frontend, in this process, and ``nvdlfw_inspect.api``, by which Transformer
    Engine's debug features are used; returns ``transformer_engine``. Calling it again changes nothing.

    An installed Transformer Engine is left out from then on. BackendError where it was imported already.
    """
    known = sys.modules.get("transformer_engine")
    if isinstance(getattr(known, "__fp8kit__", None), _Finder):
        return known  # type: ignore[return-value]
    for name in ("transformer_engine", "nvdlfw_inspect"):
        if name in sys.modules:
            wanted = "a call before its first import"
            raise BackendError("as_transformer_engine", name, "imported already", wanted)
    recipe = _module("transformer_engine.common.recipe", [recipes])
    recipe.DelayedScaling = DelayedScaling  # type: ignore[attr-defined]
    for name in ("MXFP8BlockScaling", "NVFP4BlockScaling", "CustomRecipe"):  # which load at first use there
        setattr(recipe, name, getattr(recipes, name))
    whole, common = (_module(name, []) for name in ("transformer_engine", "transformer_engine.common"))
    top, base = sys.modules["fp8kit_torch"], "transformer_engine.pytorch"
    made = {module.__name__: module for module in (whole, common, recipe)} | {base: top}
    made |= {f"{base}.{name}": module for name, module in top.__dict__["_within"].items()}
    whole.__version__ = STANDS_FOR  # type: ignore[attr-defined]
    common.recipe = recipe  # type: ignore[attr-defined]
    whole.common, whole.pytorch, top.common = common, top, common  # type: ignore[attr-defined]
    made |= _debug_modules()
    finder = _Finder()
    whole.__fp8kit__ = finder  # type: ignore[attr-defined]
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    sys.modules.update(made)
    return whole
