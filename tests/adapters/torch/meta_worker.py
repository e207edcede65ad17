"""What one of several processes does with layers that ``fully_shard`` gets from the meta device
(``tests.support.processes``)."""

from __future__ import annotations

import copy
import sys

import torch
from fp8kit_torch import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Linear,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    TransformerLayer,
    autocast,
    quantized_model_init,
)
from fp8kit_torch.optimizers import FusedAdam
from fp8kit_torch.sharded_weight import ShardedWeight
from torch.distributed import checkpoint

from fp8kit.testing.compare import assert_same_bits
from tests.adapters.torch import distributed_worker
from tests.adapters.torch.distributed_worker import bits, follow, same_as_alone, same_parts, shard


def both(make):
    """What ``make`` makes on the meta device, and on this process's with a seed."""
    torch.manual_seed(0)
    return make("meta"), make(distributed_worker.PLACE)


def start(net):
    """Divide a network from the meta device, and give it its first values with the same seed."""
    shard(*net, net)
    torch.manual_seed(0)
    for module in net.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def same_values(net, wanted):
    for (name, own), other in zip(net.named_parameters(), wanted, strict=True):
        assert_same_bits(name, bits(own.full_tensor()), bits(other))


def same_as_made_on_a_device(rank, world):
    """The rows are the values before the cast, and what is gathered the codes, of layers made on a device;
    memory of ``to_empty`` takes a state of the same."""
    for recipe, features, hidden in (
        (Float8CurrentScaling(), 64, 96),
        (DelayedScaling(amax_history_len=2), 64, 37),  # rows that processes do not divide
        (Float8BlockScaling(), 256, 512),
        (MXFP8BlockScaling(), 64, 96),
        (NVFP4BlockScaling(disable_stochastic_rounding=True), 64, 96),
    ):

        def make(device, recipe=recipe, sizes=(features, hidden)):
            with quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
                layers = (Linear(*each, device=device) for each in (sizes, sizes[::-1]))
                return torch.nn.Sequential(*layers)

        net, alone = both(make)
        other = copy.deepcopy(net)
        start(net)
        wanted = [t for each in alone for t in (each.weight.get_high_precision_init_val(), each.bias)]
        same_values(net, wanted)
        for layer, whole in zip(net, alone, strict=True):
            layer.unshard()
            same_parts(recipe, layer.weight, whole.weight)
            layer.reshard()
        losses = follow(net, recipe, rank, features, 20)
        assert losses[-1] < losses[0], losses
        same_as_alone(net, recipe)
        shard(*other, other)
        other.to_empty(device=distributed_worker.PLACE)
        other.load_state_dict(net.state_dict())
        same_values(other, [each.full_tensor() for each in net.parameters()])
        same_as_alone(other, recipe)
        assert follow(other, recipe, rank, features, 2) == follow(net, recipe, rank, features, 2)


def same_without_codes(rank, world):
    """Also layers whose weights are in high precision start as those made on a device."""
    net, alone = both(lambda device: torch.nn.Sequential(Linear(64, 37, device=device)))
    start(net)
    same_values(net, alone.parameters())


def trained_and_saved(rank, world):
    """The steps of Transformer Engine's example: masters in an optimiser, and a distributed checkpoint, which
    a network of ``to_empty`` continues from."""
    for recipe in (DelayedScaling(), MXFP8BlockScaling()):
        trained_by(rank, recipe, f"{sys.argv[3]}/{recipe.short_name()}")


def trained_by(rank, recipe, folder):
    place = distributed_worker.PLACE
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "fuse_qkv_params": True}

    def network():
        with quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
            layers = (TransformerLayer(64, 128, 4, device="meta", **options) for _ in range(2))
            return torch.nn.Sequential(*layers)

    def optimizer_of(net):
        return FusedAdam(net.parameters(), lr=1e-3, master_weights=True, master_weight_dtype=torch.float32)

    def steps(net, optimizer, count):
        draw, losses = torch.Generator().manual_seed(rank), []
        x, target = (torch.randn(16, 2, 64, generator=draw).to(place) for _ in range(2))
        for _ in range(count):
            optimizer.zero_grad()
            with autocast(recipe=recipe):
                loss = torch.nn.functional.mse_loss(net(x), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    net = network()
    start(net)
    assert sum(isinstance(each.to_local(), ShardedWeight) for each in net.parameters()) == 2 * 4
    optimizer = optimizer_of(net)
    losses = steps(net, optimizer, 5)
    assert losses[-1] < losses[0], losses
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoint.save(state, checkpoint_id=folder)
    other = network()
    shard(*other, other)
    other.to_empty(device=place)
    twin = optimizer_of(other)
    for each in other.parameters():
        twin.initialize_state(each, store_param_remainders=False)
    twin.param_groups[0]["step"] = 0  # what has a key is read
    state = {"model": other.state_dict(), "optimizer": twin.state_dict()}
    checkpoint.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    twin.load_state_dict(state["optimizer"])
    same_values(other, [each.full_tensor() for each in net.parameters()])
    assert steps(other, twin, 3) == steps(net, optimizer, 3)


if __name__ == "__main__":
    distributed_worker.main(sys.argv[1:], globals())
