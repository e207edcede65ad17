"""Programs written for torchao.float8, with torchao itself installed beside the alias."""

import fp8kit_torch.torchao_compat.names as names

from tests.clients.programs.checks import main

names.as_torchao()

import torch
from torch import nn


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Linear(32, 8, bias=False))


def check_a_training_program():
    """The example of torchao's own documents, on a small model."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    def module_filter_fn(mod, fqn):
        return fqn != "3"

    for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        net, plain = model(), model()
        config = Float8LinearConfig.from_recipe_name(name)
        assert convert_to_float8_training(net, config=config, module_filter_fn=module_filter_fn) is net
        assert [isinstance(part, Float8Linear) for part in net] == [True, False, True, False]
        optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (net, plain)]
        losses = []
        for step in range(5):
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
            for each, optimizer in zip((net, plain), optimizers, strict=True):
                loss = (each(x) - 1).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        assert all(a != b and abs(a - b) < 0.1 * b for a, b in zip(losses[::2], losses[1::2], strict=True)), (
            losses
        )
        assert net.state_dict().keys() == plain.state_dict().keys()


def check_numbers_are_torchaos_own():
    """The real package's layer, loaded beside the alias, emulated on the CPU as it does."""
    import importlib.util
    import sys
    from dataclasses import replace

    ours = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("torchao.float8")}
    spec = importlib.util.find_spec("torchao.float8")
    real = importlib.util.module_from_spec(spec)
    sys.modules["torchao.float8"] = real
    spec.loader.exec_module(real)
    from fp8kit_torch.torchao_compat.config import Float8LinearConfig
    from fp8kit_torch.torchao_compat.training import Float8Linear
    from torchao.float8.float8_linear import Float8Linear as Theirs

    for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        torch.manual_seed(1)
        plain = nn.Linear(48, 32)
        x, g = torch.randn(16, 48), torch.randn(16, 32)
        found = []
        for kind, config in (
            (Float8Linear, Float8LinearConfig.from_recipe_name(name)),
            (Theirs, replace(real.Float8LinearConfig.from_recipe_name(name), emulate=True)),
        ):
            layer = kind.from_float(nn.Linear(48, 32), config=config)
            layer.load_state_dict(plain.state_dict())
            inp = x.clone().requires_grad_()
            y = layer(inp)
            y.backward(g)
            found.append([y, inp.grad, layer.weight.grad, layer.bias.grad])
        for mine, theirs in zip(*found, strict=True):
            # the same codes and scales: sums of up to 48 products in another order
            assert (mine - theirs).norm() <= 2.0**-20 * theirs.norm(), name
    sys.modules.update(ours)


def check_the_rest_of_torchao_stays():
    import importlib.metadata

    import torchao
    from torchao.float8 import Float8LinearConfig
    from torchao.quantization import quantize_

    assert quantize_ is not None
    assert importlib.metadata.version("torchao") == torchao.__version__
    assert Float8LinearConfig.__module__ == "fp8kit_torch.torchao_compat.config"


def check_accelerates_torchao_mode():
    from accelerate import Accelerator
    from accelerate.utils import AORecipeKwargs, has_ao_layers

    accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()])
    net = model()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    assert has_ao_layers(net)
    x, losses = torch.randn(16, 32), []
    for _ in range(5):
        loss = (net(x).float() - 1).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses


if __name__ == "__main__":
    main(globals())
