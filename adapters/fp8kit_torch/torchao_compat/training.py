"""``convert_to_float8_training`` and the layers that it makes, which compute in FP8 without an autocast, as
torchao's do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from fp8kit.arguments import function
from fp8kit.errors import ArgumentError, UnsupportedError
from fp8kit_torch.autocast import autocast
from fp8kit_torch.checks import module as want_module
from fp8kit_torch.convert import children
from fp8kit_torch.converted import ConvertedLinear
from fp8kit_torch.convertible import replacement
from fp8kit_torch.torchao_compat.config import Float8LinearConfig, Float8LinearRecipeName, recipe_of

Filter = Callable[[nn.Module, str], bool]


class Float8Linear(ConvertedLinear, nn.Linear):
    """An ``nn.Linear`` whose three products are computed as ``config`` says, always."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        config: Float8LinearConfig,
    ) -> None:
        self._around(nn.Linear(in_features, out_features, bias, device, dtype), config)

    def _around(self, plain: nn.Module, config: Float8LinearConfig) -> None:
        super().__init__(plain, "oi")
        self.config, self.recipe = config, recipe_of(config)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: (..., in_features)."""
        with autocast(recipe=self.recipe):
            return super().forward(x)

    @classmethod
    def from_float(cls, mod: nn.Module, config: Float8LinearConfig | None = None) -> Float8Linear:
        """The layer with the parameters of the ``nn.Linear`` ``mod``. ArgumentError where it is none, and
        UnsupportedError for one that ``fp8kit_torch.convert`` would leave, with the reason."""
        if not isinstance(mod, nn.Linear):
            raise ArgumentError("Float8Linear", "mod", type(mod).__name__, "an nn.Linear")
        why = replacement(mod, (type(mod),))
        if isinstance(why, str):
            raise UnsupportedError("Float8Linear", "mod", why, "a linear layer that fp8kit_torch can replace")
        made = cls.__new__(cls)
        made._around(mod, Float8LinearConfig() if config is None else config)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Module.__reduce_ex__(self, protocol)

    def extra_repr(self) -> str:
        """Sizes, and how operands are cast."""
        own = self.config
        casts = {"i": own.cast_config_input, "w": own.cast_config_weight, "go": own.cast_config_grad_output}
        said = ",".join(f"{name}:{cast.short_str()}" for name, cast in casts.items())
        return f"{super().extra_repr()}, cast_configs={said}"


def convert_to_float8_training(
    module: nn.Module, *, module_filter_fn: Filter | None = None, config: Float8LinearConfig | None = None
) -> nn.Module:
    """Replace every ``nn.Linear`` of ``module``, subclasses too, by a ``Float8Linear`` around the same
    parameters, in place; returns ``module``, or what takes its place where it is a linear layer itself.

    ``module_filter_fn``: called with (module, its name); False leaves that one. ArgumentError for
    arguments that are not these, UnsupportedError for layers that cannot be replaced; nothing is then.
    """
    want_module("convert_to_float8_training", "module", module)
    if module_filter_fn is not None:
        said = "a function of a module and its name"
        function(
            "convert_to_float8_training", "module_filter_fn", module_filter_fn, takes=(module, ""), said=said
        )
    config = Float8LinearConfig() if config is None else config
    if not isinstance(config, Float8LinearConfig):
        raise ArgumentError(
            "convert_to_float8_training", "config", type(config).__name__, "a Float8LinearConfig"
        )

    def wanted(part: nn.Module, name: str) -> bool:
        plain = isinstance(part, nn.Linear) and not isinstance(part, Float8Linear)
        return plain and (module_filter_fn is None or bool(module_filter_fn(part, name)))

    if wanted(module, ""):
        return Float8Linear.from_float(module, config)
    made: dict[nn.Module, nn.Module] = {}
    places = []
    for parent, name, child, path in list(children(module)):
        if wanted(child, path):
            if child not in made:
                made[child] = Float8Linear.from_float(child, config)
            places.append((parent, name, made[child]))
    for parent, name, new in places:
        parent.register_module(name, new)
    return module


# sizes (K, N) of a weight (N, K) at which torchao found FP8 not to be faster on an H100
_SLOW: dict[str, Callable[[int, int], bool]] = {
    "tensorwise": lambda k, n: k <= 4096 and n <= 1024,
    "rowwise": lambda k, n: n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048),
}


def _passes(mod: nn.Module, fqn: str, filter_fqns: list[str], slow: Callable[[int, int], bool]) -> bool:
    if not isinstance(mod, nn.Linear) or any(name in fqn for name in filter_fqns):
        return False
    n, k = mod.weight.shape
    return k % 16 == 0 and n % 16 == 0 and not slow(k, n)


def _auto_filter_for_recipe(recipe: str | Float8LinearRecipeName, filter_fqns: list[str]) -> Filter:
    """A filter that leaves out what is no ``nn.Linear``, names that contain one of ``filter_fqns``, sizes
    that are no multiples of 16, and those too small to gain, by torchao's rules for "tensorwise" and
    "rowwise". ArgumentError for another recipe."""
    name = getattr(recipe, "value", recipe)
    if name not in _SLOW:
        raise ArgumentError("_auto_filter_for_recipe", "recipe", recipe, f"one of {', '.join(_SLOW)}")
    return partial(_passes, filter_fqns=filter_fqns, slow=_SLOW[name])


def precompute_float8_dynamic_scale_for_fsdp(module: nn.Module) -> None:
    """Nothing: it is for weights that are gathered in FP8, which none is here."""
    want_module("precompute_float8_dynamic_scale_for_fsdp", "module", module)


__all__ = [
    "Float8Linear",
    "_auto_filter_for_recipe",
    "convert_to_float8_training",
    "precompute_float8_dynamic_scale_for_fsdp",
]
