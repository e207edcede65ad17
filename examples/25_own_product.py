"""An FP8 product of your own: another promotion interval, and an epilogue that is fused into it.

Shows: on a Hopper GPU the engine's own product, ``hopper_gemm.cu``, with another define and a changed line:
sums are added to float32 ones every 64 products instead of 128, and results beyond a limit are cut before
they are rounded. ``fk.override`` puts it in the place of the layers' products; every bit is compared with a
model of it, ``lab.measure`` says how fast it is, and a GPT trains with it. On other devices that model, a
Python function, is what trains. Needs: a CPU, or a GPU. The exit status is 1 where a bit differs from the
model.
"""

import contextlib

import numpy as np

import fp8kit as fk
from fp8kit import arrays, lab
from fp8kit.accumulation import ACCUMULATIONS, Accumulation
from fp8kit.backends import dispatch
from fp8kit.commands import positional, positive
from fp8kit.formats import E4M3, float32
from fp8kit.models import text
from fp8kit.models.presets import preset
from fp8kit.models.train import fp8_recipe, train
from fp8kit.raw_kernels import manifest

INTERVAL, LIMIT = 64, 24.0
OLD = "values[h][2 * q + c] = value;"
NEW = f"values[h][2 * q + c] = fminf(fmaxf(value, {-LIMIT}f), {LIMIT}f);"
OTHER = f"PROMOTE=128:{INTERVAL}"  # fast accumulation, PROMOTE 0, stays what it is


def source() -> str:
    """The engine's source with the limit."""
    whole = manifest.text("hopper_gemm.cu")
    if whole.count(OLD) != 1:
        raise SystemExit(f"hopper_gemm.cu has {OLD!r} {whole.count(OLD)} times: change this example")
    return whole.replace(OLD, NEW)


def modelled(
    a, b, out, a_format, b_format, a_scale_inv, b_scale_inv, bias, addend, fast_accumulate, workspace, stream
):
    """The same product by fp8kit's model of the tensor cores: parameters as the contract's ``fp8_gemm``."""
    (m, n), one = out.shape, (0, 0)
    how = ACCUMULATIONS["hopper_fast"] if fast_accumulate else Accumulation(13, 32, INTERVAL)
    scales = a_scale_inv.reshape(1, 1), b_scale_inv.reshape(1, 1)
    codes, formats = (a.slice(0, 0, m), b.slice(0, 0, n)), (a_format, b_format)
    dispatch.kernels(out.device).model_gemm(
        *codes, out, *formats, *scales, one, one, how, bias, addend, stream
    )
    values = lab.native(out)
    values[...] = values.clip(-LIMIT, LIMIT)


def bits(device, product=None) -> np.ndarray:
    """Every bit of one product of 304 x 528 elements, 1040 terms each, by ``product`` or the layers' own."""
    random = np.random.default_rng(0)
    x, w = (random.standard_normal((rows, 1040)).astype(np.float32) for rows in (304, 528))
    (a, a_inv), (b, b_inv) = (
        (arrays.as_view(q.data), arrays.as_view(q.scale_inv))
        for q in (fk.quantize(fk.tensor(v, device=device), E4M3) for v in (x, w))
    )
    out = arrays.zeros((304, 528), float32, a.device)
    kernels = dispatch.kernels(a.device)
    space = arrays.zeros((kernels.fp8_gemm_workspace(304, 528),), "uint8", a.device)
    call = kernels.fp8_gemm if product is None else product
    call(a, b, out, E4M3, E4M3, a_inv, b_inv, None, None, False, space, arrays.current_stream(a.device))
    return out.numpy().view(np.uint32)


def main(steps: int = 20) -> None:
    """Compare and time the product, then train with it."""
    device = dispatch.default_device()
    hopper = device.kind == "cuda" and arrays.provider(device).arch(device) == 90
    product, defines = (source(), OTHER) if hopper else (modelled, "")
    mine = fk.override("fp8_gemm", product, defines=defines)
    shape = None if hopper else (64, 128)
    size, corpus = preset("tiny").with_steps(steps), text.standard_library()
    want = bits(device, modelled)
    print(
        "the engine's own product has no limit and sums in another order than the model, so that its bits "
        "differ; mine has to have all bits of the model"
    )
    for name, block in (("the engine's", contextlib.nullcontext()), ("mine", mine)):
        with block:
            same = float((bits(device) == want).mean())
            print(
                f"{name}: {same:.0%} of bits as modelled; largest "
                f"{abs(bits(device).view(np.float32)).max():.1f}"
            )
            print(f"{name}: {lab.measure('fp8_gemm', device, shape, fast=False)}")
            losses = train(size, corpus, fp8_recipe(size), name, device).losses
        print(f"{name}: loss {losses[0]:.3f} -> {losses[-1]:.3f} nats/byte, {mine.calls} calls of mine")
    if same < 1:
        raise SystemExit("the kernel and its model differ")


if __name__ == "__main__":
    main(*positional(__doc__, steps=positive))
