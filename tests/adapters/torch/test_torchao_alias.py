"""torchao.float8's names: configurations, the layers that are made, and the alias where torchao is not
there."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from fp8kit_torch.torchao_compat import config as ao
from fp8kit_torch.torchao_compat.training import (
    Float8Linear,
    _auto_filter_for_recipe,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)
from torch import nn

from fp8kit import cli
from fp8kit.commands import alias
from fp8kit.errors import ArgumentError, Fp8kitError, UnsupportedError
from fp8kit.recipes import named
from fp8kit.testing.compare import assert_same_bits
from tests.support.aliases import python, site

__all__ = ["site"]
NAMES = [name.value for name in ao.Float8LinearRecipeName]


@pytest.mark.parametrize("name", NAMES)
def test_a_named_configuration_is_the_recipe_of_that_name(name):
    config = ao.Float8LinearConfig.from_recipe_name(name)
    assert ao.Float8LinearConfig.from_recipe_name(ao.Float8LinearRecipeName(name)) == config
    mine, wanted = ao.recipe_of(config).quantization, named(name).quantization
    for gemm in ("fprop", "dgrad", "wgrad"):
        own, there = getattr(mine, gemm), getattr(wanted, gemm)
        assert (own.compute, own.accumulation) == (there.compute, there.accumulation), gemm
        assert own.cast == there.cast, gemm


def test_fields_reach_the_recipe():
    made = ao.recipe_of(
        ao.Float8LinearConfig(
            cast_config_input=ao.CastConfig(target_dtype=torch.float8_e5m2),
            cast_config_weight=ao.CastConfig(scaling_granularity=ao.ScalingGranularity.AXISWISE),
            gemm_config_output=ao.Float8GemmConfig(),
            gemm_config_grad_input=ao.Float8GemmConfig(use_fast_accum=True),
            round_scales_to_power_of_2=True,
        )
    ).quantization
    assert str(made.fprop.a.format) == "E5M2"
    assert (made.fprop.b.granularity, made.fprop.a.granularity) == ("row", "tensor")
    assert (made.fprop.accumulation, made.dgrad.accumulation) == ("split", "fast")
    assert made.wgrad.b.scale_rule == "power_2"


@pytest.mark.parametrize(
    ("make", "kind", "said"),
    [
        (lambda: ao.CastConfig(target_dtype=torch.float16), ArgumentError, "target_dtype"),
        (
            lambda: ao.CastConfig(ao.ScalingType.DISABLED, ao.ScalingGranularity.AXISWISE),
            ArgumentError,
            "scaling_type",
        ),
        (lambda: ao.Float8LinearConfig.from_recipe_name("colwise"), ArgumentError, "tensorwise"),
        (
            lambda: ao.Float8LinearConfig(ao.CastConfig(ao.ScalingType.DISABLED)),
            ArgumentError,
            "both operands",
        ),
        (
            lambda: ao.Float8LinearConfig(
                cast_config_input_for_grad_weight=ao.CastConfig(target_dtype=torch.float8_e5m2)
            ),
            ArgumentError,
            "one format",
        ),
        (
            lambda: ao.Float8LinearConfig(
                cast_config_weight=ao.CastConfig(scaling_granularity=ao.ScalingGranularity.AXISWISE),
                enable_fsdp_float8_all_gather=True,
            ),
            ArgumentError,
            "for each row",
        ),
    ],
)
def test_configurations_that_are_refused(make, kind, said):
    with pytest.raises(kind, match=said):
        make()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16, bias=False))


def test_layers_are_replaced_around_their_parameters(device):
    plain = net().to(device)
    parameters = [*plain.parameters()]
    made = convert_to_float8_training(plain, module_filter_fn=lambda mod, fqn: fqn != "2")
    assert made is plain
    assert [type(part) for part in made] == [Float8Linear, nn.ReLU, nn.Linear]
    assert all(a is b for a, b in zip(made.parameters(), parameters, strict=True))
    assert "i:dyn_ten_e4m3,w:dyn_ten_e4m3,go:dyn_ten_e5m2" in repr(made)
    x = torch.randn(8, 32, device=device)
    high = nn.functional.linear(x, made[0].weight, made[0].bias)
    error = ((made[0](x) - high).norm() / high.norm()).item()
    assert 1e-3 < error < 0.1  # E4M3's half step is 2^-4 of an element
    again = copy.deepcopy(made)
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    for other in (again, torch.load(file, weights_only=False)):
        assert_same_bits("copy", other(x).detach().cpu().numpy(), made(x).detach().cpu().numpy())
    convert_to_float8_training(made)
    assert isinstance(made[2], Float8Linear)
    precompute_float8_dynamic_scale_for_fsdp(made)
    assert isinstance(convert_to_float8_training(nn.Linear(4, 4)), Float8Linear)
    own = Float8Linear(32, 16, False, config=ao.Float8LinearConfig())
    assert isinstance(own, nn.Linear)
    assert (own.in_features, own.out_features, own.bias) == (32, 16, None)


def test_nothing_is_replaced_where_a_layer_is_refused():
    bad = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float64))
    with pytest.raises(UnsupportedError, match="float64"):
        convert_to_float8_training(bad)
    assert [type(part) for part in bad] == [nn.Linear, nn.Linear]
    for wrong in ({"module_filter_fn": 3}, {"config": "rowwise"}):
        with pytest.raises(Fp8kitError, match=next(iter(wrong))):
            convert_to_float8_training(net(), **wrong)
    with pytest.raises(ArgumentError, match="mod"):
        Float8Linear.from_float(nn.ReLU())


def test_compiled_in_one_graph():
    made = convert_to_float8_training(net())
    x = torch.randn(8, 32)
    wanted = made(x)
    got = torch.compile(made, fullgraph=True, backend="aot_eager")(x)
    assert_same_bits("compiled", got.detach().numpy(), wanted.detach().numpy())


def test_automatic_filters():
    """By torchao's thresholds on (K, N)."""
    sizes = {
        "tensorwise": {(8192, 1024): True, (4096, 1024): False, (4096, 2048): True, (8190, 2048): False},
        "rowwise": {(4096, 4096): True, (2048, 4096): False, (1024, 8192): False, (4096, 2048): False},
    }
    for name, wanted in sizes.items():
        passes = _auto_filter_for_recipe(name, ["output"])
        for (k, n), want in wanted.items():
            layer = nn.Linear(k, n, device="meta")
            assert passes(layer, "layers.0") is want, (name, k, n)
            assert passes(layer, "output") is False
        assert passes(nn.ReLU(), "relu") is False
    with pytest.raises(ArgumentError, match="rowwise_with_gw_hp"):
        _auto_filter_for_recipe("rowwise_with_gw_hp", [])


ALONE = """
import importlib.metadata, sys
{first}
assert importlib.metadata.version("torchao") == "0.18.0"
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_linear_utils import convert_to_float8_training as same
import torchao.float8.fsdp_utils, torchao.float8.config
assert same is convert_to_float8_training and Float8Linear.__module__.startswith("fp8kit_torch")
try:
    import torchao.quantization
except ModuleNotFoundError as error:
    assert "an installed torchao does" in str(error)
print("done")
"""


@pytest.mark.programs
def test_the_name_in_one_process_and_in_all(site, capsys):
    assert cli.main(["alias", "install", "torchao"]) == 0
    assert "torchao.float8" in capsys.readouterr().out
    assert [p.name for p in site.iterdir()] == ["fp8kit_torchao.pth"]
    installed = (site / "fp8kit_torchao.pth").read_text()
    call = "import fp8kit_torch.torchao_compat.names as names; names.as_torchao(); names.as_torchao()"
    places = str(alias.startup("torchao").parent)
    both = str(alias.startup().parent)
    for code, extra in (
        (ALONE.format(first=call), ""),
        (installed + ALONE.format(first=""), ""),
        (ALONE.format(first=""), f"{places}:"),
        (ALONE.format(first="import transformer_engine.pytorch"), f"{places}:{both}:"),
        (ALONE.format(first="import transformer_engine.pytorch"), f"{both}:{places}:"),
    ):
        known = python("-c", "import os; print(os.environ['PYTHONPATH'])").stdout.strip()
        done = python("-c", code, PYTHONPATH=extra + known)
        assert done.stdout == "done\n", done.stderr
    assert cli.main(["alias", "status", "torchao"]) == 0
    assert cli.main(["alias", "remove", "torchao"]) == 0
    assert not list(site.iterdir())
    late = "import sys, types; sys.modules['torchao.float8'] = types.ModuleType('torchao.float8')\n" + call
    assert "BackendError" in python("-c", late).stderr
