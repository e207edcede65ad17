"""torchtitan: its own float8 converter over the alias of torchao, and a converter of another recipe, written
after its protocol: an object with ``convert(model_config)`` that replaces ``Linear.Config`` in the tree."""

from fp8kit_torch.torchao_compat.names import as_torchao

as_torchao()

from dataclasses import dataclass, field
from typing import Any

import fp8kit_torch as te
import torch
from torchtitan.components.quantization import Float8LinearConverter, QuantizationConverter
from torchtitan.models.common.config_utils import make_ffn_config
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.module import Module

from tests.clients.programs.checks import main


class Fp8kitLinear(te.Linear, Module):
    """A linear layer of fp8kit that torchtitan builds, initialises and shards as its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        recipe: Any = None

    def __init__(self, config: Config) -> None:
        te.Linear.__init__(self, config.in_features, config.out_features, bias=config.bias)
        self.recipe = config.recipe

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=self.recipe):
            return super().forward(input)


class Fp8kitConverter(QuantizationConverter):
    """Every ``Linear`` of a model in FP8 by a recipe of fp8kit, but those whose name has one of
    ``filter_fqns``."""

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        recipe: Any = None
        filter_fqns: list[str] = field(default_factory=lambda: ["lm_head"])

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Any) -> Any:
        for fqn, own, parent, name in list(model_config.traverse(Linear.Config)):
            if any(part in fqn for part in self.config.filter_fqns):
                continue
            new = Fp8kitLinear.Config(
                in_features=own.in_features,
                out_features=own.out_features,
                bias=own.bias,
                param_init=own.param_init,
                recipe=self.config.recipe,
            )
            if isinstance(parent, list):
                parent[name] = new
            else:
                setattr(parent, name, new)
        return model_config


START = {"weight": lambda weight: torch.nn.init.normal_(weight, std=0.1)}


def trained(converter: Any) -> tuple[Any, list[float]]:
    """A block of torchtitan's, made on the meta device as its trainer makes models, and the losses of some
    steps. (Its attention needs a compiler on a CPU.)"""
    config = make_ffn_config(dim=64, hidden_dim=128, w1_param_init=START, w2w3_param_init=START)
    if converter is not None:
        config = converter.convert(config)
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, losses = torch.randn(32, 64), []
    for _ in range(4):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def like(losses: list[float], wanted: list[float]) -> bool:
    """Whether the losses fall as those of the plain model, and are not the same."""
    near = (a != b and abs(a - b) < 0.05 * b for a, b in zip(losses, wanted, strict=True))
    return losses[-1] < losses[0] and all(near)


def check_its_own_converter_over_the_alias():
    _, wanted = trained(None)
    model, losses = trained(
        Float8LinearConverter(Float8LinearConverter.Config(filter_fqns=["w3"], emulate=True))
    )
    from torchao.float8.float8_linear import Float8Linear

    found = [name for name, part in model.named_modules() if isinstance(part, Float8Linear)]
    assert len(found) == 2, found
    assert like(losses, wanted), (losses, wanted)


def check_a_converter_of_another_recipe():
    _, wanted = trained(None)
    for recipe in (te.Float8BlockScaling(), te.DelayedScaling(amax_history_len=4)):
        model, losses = trained(Fp8kitConverter(Fp8kitConverter.Config(recipe=recipe)))
        assert sum(isinstance(part, Fp8kitLinear) for part in model.modules()) == 3
        assert like(losses, wanted), (losses, wanted)


if __name__ == "__main__":
    main(globals())
