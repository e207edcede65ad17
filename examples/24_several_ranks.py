"""Several processes: sharded optimiser states, and weights that ranks share.

Shows: ``fk.distributed.init`` and ``grid``, ``ShardedOptimizer`` (data parallel, ZeRO-1), ``tp_group`` with
sequence parallelism. Needs: nothing more for one process; PyTorch (extra torch) for several on CPUs, the
extra ``distributed`` for a GPU each.

    python examples/24_several_ranks.py
    fp8kit launch -n 2 examples/24_several_ranks.py      # two ranks with other rows
    fp8kit launch -n 2 examples/24_several_ranks.py 2    # two that share rows and weights
    torchrun --nproc-per-node 4 examples/24_several_ranks.py 2

All learn the same: losses differ by the order of sums alone.
"""

import numpy as np

import fp8kit as fk
from fp8kit.commands import positional, positive

SEQUENCE, BATCH, HIDDEN, STEPS = 32, 8, 64, 10


def own(array, group, dim):
    """This rank's part of an array, whose rows all ranks know here."""
    return np.ascontiguousarray(np.split(array, group.size, dim)[group.rank])


def main(tensor=1):
    ranks = fk.distributed.init()
    data, tensor = fk.distributed.grid(ranks, tensor)

    # constructors take the whole layer's sizes, and a rank keeps its part: here of the same weights
    fk.manual_seed(0)
    sizes, common = (HIDDEN, 4 * HIDDEN, 4), {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    whole = fk.nn.TransformerLayer(*sizes, **common, device="cpu").state_dict()
    parallel = {"tp_group": tensor, "set_parallel_mode": True, "sequence_parallel": True}
    layer = fk.nn.TransformerLayer(*sizes, **common, **parallel, device=ranks.device)
    layer.load_state_dict(fk.distributed.own_state(whole, layer, tensor))
    optimizer = fk.optim.ShardedOptimizer(
        fk.optim.AdamW, layer.parameters(), data, average=False, lr=1e-2, tensor=tensor
    )

    for step in range(STEPS):
        x = np.random.default_rng(step).standard_normal((SEQUENCE, BATCH, HIDDEN)).astype(np.float32)
        # sequences of the batch for ranks of other rows, places in them for those that share weights
        x = fk.tensor(own(own(x, data, 1), tensor, 0), device=ranks.device)
        with fk.autocast(recipe=fk.recipe.DelayedScaling()):  # amaxes are reduced over all ranks
            y = layer(x)
        # the loss is the mean of y^2 over all elements of all ranks
        count = SEQUENCE * BATCH * HIDDEN
        error = y.numpy()
        loss = fk.tensor(np.array([np.square(error).sum() / count]), dtype="float32", device=ranks.device)
        y.backward(fk.tensor(2 * error / count, dtype=y.dtype, device=ranks.device))
        fk.distributed.reduce_sequence_parallel_gradients(layer.parameters(), tensor)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        fk.distributed.all_reduce(loss, ranks)
        if ranks.rank == 0:
            print(f"step {step}  loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main(*positional(__doc__, tensor=positive))
