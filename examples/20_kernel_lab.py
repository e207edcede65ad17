"""A kernel of your own in a whole training: the layers' cast with stochastic rounding.

Shows: ``fk.override`` puts a changed CUDA source (on a CPU: a Python function) in the place of one operation,
``lab.check`` says where it is not what the contract wants, ``lab.measure`` how fast it is, and the training
runs with it. Needs: a CPU, or a GPU; matplotlib (extra demo). The contract rounds to nearest, so codes that
differ are right here; the exit status is 1 where anything else is wrong.
"""

import contextlib
from pathlib import Path

import numpy as np

import fp8kit as fk
from fp8kit import codec, lab
from fp8kit.backends.dispatch import default_device
from fp8kit.commands import positional, positive
from fp8kit.models import plots, text
from fp8kit.models.presets import preset
from fp8kit.models.train import fp8_recipe, train
from fp8kit.raw_kernels import manifest

# On a GPU: one step of noise, then rounding to nearest. float32 keeps 20 mantissa bits more than E4M3, 21
# more than E5M2.
NOISE = """#include "philox.cuh"
template <typename F> constexpr u32 MORE = 20;
template <> constexpr u32 MORE<e5m2> = 21;
DEVICE float noisy(float v, i64 index) {
  const u32 step = 1u << MORE<FORMAT>, word = philox_word(Rng{(u64)clock64(), 0}, (u64)index);
  const bool normal = fabsf(v) > 1e-30f && fabsf(v) < 1e30f;
  return normal ? __uint_as_float(__float_as_uint(v) + (word & (step - 1)) - step / 2) : v;
}
"""
ENCODE = "encode_words<FORMAT>(v, words[r]);"  # in quantize_transpose: eight neighbours of row + r
CHANGED = (
    f"for (int c = 0; c < 8; ++c) v[c] = noisy(v[c], (row + r) * job.columns + column + c);\n    {ENCODE}"
)
SOURCE = (
    manifest.text("quantize.cu")
    .replace('#include "rows.cuh"', f'#include "rows.cuh"\n{NOISE}')
    .replace(ENCODE, CHANGED)
)
RANDOM = np.random.default_rng(0)


def stochastic(original, x, cast, dbias, workspace, stream):
    """On a CPU: scales, amax, padding and sums are the original's, the codes the codec's, rounded
    stochastically."""
    original(x, cast, dbias, workspace, stream)
    scaled = lab.native(x).astype(np.float32) / lab.native(cast.scale_inv)
    codes = codec.encode(
        scaled, cast.format, "stochastic", True, RANDOM.integers(1 << 32, size=x.shape, dtype=np.uint32)
    )
    for view, values in ((cast.q, codes), (cast.q_t, codes.T)):
        if view is not None:
            lab.native(view)[: len(values), : len(values.T)] = values


def product() -> float:
    """Mean of 1.03 through an FP8 layer that only copies: E4M3 has 1 and 1.125, and nothing between."""
    layer = fk.nn.Linear(
        256, 256, bias=False, init_method=lambda weight: np.copyto(weight, np.eye(256, dtype=np.float32))
    )
    with fk.no_grad(), fk.autocast(recipe=fk.recipe.DelayedScaling()):
        return float(
            layer(fk.tensor(np.full((256, 256), 1.03, np.float32), device=layer.weight.device)).numpy().mean()
        )


def main(steps: int = 30, out: str = "runs/kernel_lab") -> None:
    """Look at the kernel alone, then train with it; the picture goes to the folder ``out``."""
    device, size, corpus = default_device(), preset("tiny").with_steps(steps), text.standard_library()
    mine = fk.override("quantize_transpose", SOURCE if device.kind == "cuda" else stochastic)
    losses, wrong = [], []
    for name, block in (("nearest", contextlib.nullcontext()), ("stochastic", mine)):
        with block:
            found, mean, to = (
                lab.check("quantize_transpose", device),
                product(),
                {"nearest": 1.0, "stochastic": 1.03}[name],
            )
            other = [case for case, what in found.failures if what.startswith("cast.q")]
            codes = other if name == "stochastic" else []
            print(
                f"{name}: mean {mean:.4f}; {found.implementation}: of {found.cases} cases {len(codes)} have "
                "other codes than nearest"
            )
            wrong += [failure for failure in found.failures if failure[0] not in codes] + [mean] * (
                abs(mean - to) > 0.01
            )
            print(
                f"{name}: "
                f"{lab.measure('quantize_transpose', device, None if device.kind == 'cuda' else (256, 512))}"
            )
            losses.append(train(size, corpus, fp8_recipe(size), name, device).losses)
        print(
            f"{name}: loss {losses[-1][0]:.3f} -> {losses[-1][-1]:.3f} nats/byte, {mine.calls} calls of mine"
        )
    picture = plots.figure(figsize=(8, 4))
    picture.add_subplot(xlabel="step", ylabel="loss, nats/byte", title="stochastic - nearest").plot(
        np.subtract(*losses[::-1])
    )
    path = Path(out, "difference.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path)
    print(f"largest difference {np.abs(np.subtract(*losses)).max():.4f} nats/byte, drawn in {path}")
    if wrong:
        raise SystemExit(f"wrong: {wrong}")


if __name__ == "__main__":
    main(*positional(__doc__, steps=positive, out=str))
