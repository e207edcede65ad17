"""Stop and go on, bit for bit.

Shows: a ``Bundle`` of model, optimiser and random state holds everything that a run is: weights, float32
masters, moments, FP8 scales and histories, and dropout's position. A run that stops and is loaded elsewhere
goes on with the same bits. Needs: a CPU, or a GPU.
"""

import tempfile
from pathlib import Path

import numpy as np

import fp8kit as fk
from fp8kit.serialization import Bundle


class Run:
    """A model with its optimiser; ``step(i)`` trains on batch i, which depends on i alone."""

    def __init__(self, seed: int) -> None:
        fk.manual_seed(seed)
        self.model = fk.nn.TransformerLayer(64, 128, 4, hidden_dropout=0.1, attention_dropout=0.0)
        self.device = next(self.model.parameters()).device
        self.optimizer = fk.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.bundle = Bundle(model=self.model, optimizer=self.optimizer, random=fk.nn.RandomState())

    def step(self, index: int) -> None:
        """One step towards the output zero."""
        x = np.random.default_rng(index).standard_normal((16, 4, 64)).astype(np.float32)
        with fk.autocast(recipe=fk.recipe.DelayedScaling(amax_history_len=4)):
            y = self.model(fk.tensor(x, device=self.device))
        y.backward(y.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def bits(self) -> dict[str, bytes]:
        """Everything, by name."""
        return {name: fk.tensor(array).numpy().tobytes() for name, array in self.bundle.state_dict().items()}


def main() -> None:
    """Six steps at once, and three and three with a file between."""
    with fk.deterministic(), tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.safetensors")
        whole = Run(seed=0)
        for index in range(6):
            whole.step(index)
            if index == 2:
                fk.save(path, whole.bundle)
        wanted = whole.bits()

        again = Run(seed=1)  # another start: all that matters comes from the file
        fk.load(path, again.bundle)
        for index in range(3, 6):
            again.step(index)
        found = again.bits()
    differ = [name for name in wanted if wanted[name] != found[name]]
    result = f"these differ: {', '.join(differ)}" if differ else "all the same after the stop"
    print(f"{len(wanted)} arrays, {sum(map(len, wanted.values()))} bytes, {result}")
    for word in ("qkv.query_weight", "amax_history", "exp_avg", "random/"):
        print("one of the arrays:", next(name for name in wanted if word in name))


if __name__ == "__main__":
    main()
