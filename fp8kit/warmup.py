"""``fk.warmup``: everything that the first step of a training would compile or look for, beforehand and side
by side.

The kernel variants are compiled by threads (NVRTC lets go of the interpreter) into the cache on disk, so
every later process finds them; then one step of a throwaway layer loads them and makes cuBLASLt's plans and
cuDNN's graphs, which last as long as the process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8kit.quantization import Quantization
    from fp8kit.recipe import Recipe

Variant = tuple[str, dict[str, str]]

# kernels of the contract that a training calls, one at least of each source; besides the parameters' type,
# some take float32 too: of sums, counts, draws and what a user gives
_OWN_TYPE = ("act_fwd", "dropout_add", "amax", "scale_from_amax", "embedding_fwd", "cross_entropy_fwd")
_FLOAT32_TOO = ("copy", "add", "adamw_")
_BY_BLOCKS = "block_activation.cu"  # activations that cast by blocks


@dataclass(frozen=True)
class Warmup:
    """What a warm-up did. ``compiled``: (kernel source and defines, seconds) of what was compiled, longest
    first; ``found``: how many were in the cache already; ``compile_seconds``: of all, side by side;
    ``step_seconds``: of the steps, None where none was taken."""

    compiled: tuple[tuple[str, float], ...]
    found: int
    compile_seconds: float
    step_seconds: float | None

    def __str__(self) -> str:
        lines = [f"{name:60}{seconds:7.2f} s" for name, seconds in self.compiled]
        one_by_one = sum(seconds for _, seconds in self.compiled)
        if self.compiled or self.found:
            lines.append(
                f"{len(self.compiled)} variants compiled in {self.compile_seconds:.2f} s (one by one "
                f"{one_by_one:.2f} s), {self.found} were in the cache"
            )
        if self.step_seconds is not None:
            lines.append(f"two steps of the layer: {self.step_seconds:.2f} s")
        return "\n".join(lines)


def warmup(
    hidden: int = 4096,
    ffn: int | None = None,
    heads: int | None = None,
    *,
    sequence: int = 128,
    batch: int = 1,
    dtype: Any = "bfloat16",
    recipe: Recipe | None = None,
    activation: str = "gelu",
    normalization: str = "LayerNorm",
    arch: str | None = None,
    device: Any = None,
    threads: int | None = None,
    say: Callable[[str], object] | None = None,
) -> Warmup:
    """Compile every kernel variant that training a transformer layer of these sizes needs, with embedding,
    loss and optimiser, and take two steps of a layer of zeros, without dropout, whose plans last as long as
    the process. Draws no random number.

    * ``hidden``, ``ffn`` (4 * hidden), ``heads`` (hidden / 64, at least 1): the layer's sizes. ``sequence``,
      ``batch``: tokens of the steps; cuBLASLt's plans and cuDNN's graphs are made for exactly these.
    * ``dtype``: the parameters', float32, bfloat16 or float16. ``recipe``: DelayedScaling() for None.
      ``activation``, ``normalization``: as ``TransformerLayer``'s.
    * ``arch``: such as "sm_90a": compile for that architecture only, and take no step; needs NVRTC, but no
      GPU. ``device``: a device's name; None is CUDA where it is usable, else the CPU, where nothing but the
      reference engine's own compilation is done.
    * ``threads``: that compile at once, None for as many as the process may use.
    * ``say``: gets a line when a stage begins and after each variant that was compiled, from the thread that
      compiled it.

    Raises ShapeError, FormatError, RecipeError or ArgumentError for arguments that do not fit, BackendError
    where a kernel does not compile.
    """
    from fp8kit import arrays, formats, nn, scaled_products
    from fp8kit.arguments import choice, integer
    from fp8kit.autocast import WANTED
    from fp8kit.backends import dispatch
    from fp8kit.backends.activation import ALL
    from fp8kit.errors import FormatError, RecipeError, ShapeError
    from fp8kit.recipe import DelayedScaling
    from fp8kit.recipe import Recipe as AnyRecipe

    def size(name: str, value: Any) -> int:
        return integer("warmup", name, value, 1, 2**31, ShapeError)

    for name, value in (("hidden", hidden), ("sequence", sequence), ("batch", batch)):
        size(name, value)
    ffn = 4 * hidden if ffn is None else size("ffn", ffn)
    heads = max(1, hidden // 64) if heads is None else size("heads", heads)
    if hidden % heads:
        raise ShapeError("warmup", "hidden", hidden, f"a multiple of {heads} heads")
    cores = len(os.sched_getaffinity(0))
    count = cores if threads is None else integer("warmup", "threads", threads, 1, 1024)
    kind = formats.dtype(dtype, "warmup", "dtype", formats.HIGH_PRECISION)
    choice("warmup", "activation", activation, ALL, FormatError)
    rule = DelayedScaling() if recipe is None else recipe
    if not isinstance(rule, AnyRecipe):
        raise RecipeError("warmup", "recipe", repr(recipe), WANTED)
    tell = say or (lambda line: None)

    def compiled(arch: str) -> Warmup:
        own = scaled_products.for_arch(rule.quantization, arch)
        wanted = variants(hidden, kind.name, activation, own, arch, hidden // heads)
        return _compiled(wanted, arch, count, tell)

    if arch is not None:
        from fp8kit.backends.cuda.compile import want_architecture

        want_architecture("warmup", "arch", arch, to_run=True)
        return compiled(arch)
    where = dispatch.default_device() if device is None else arrays.usable(device, "warmup", "device")
    done = Warmup((), 0, 0.0, None)
    if where.kind == "cuda":
        from fp8kit.backends.cuda import compile as kernel_compiler
        from fp8kit.backends.cuda import launch

        arrays.empty((1,), formats.uint8, where)  # says what is missing
        done = compiled(kernel_compiler.arch_of(launch.capability(where.index)))
    else:
        tell(
            "on the CPU: nothing is compiled for a GPU; the first step compiles the reference engine's "
            "functions that are not kept yet"
        )
    tell(
        f"two steps on {where}: a layer of {hidden}/{ffn}/{heads}, {kind.name}, {rule.short_name()}, "
        f"{sequence} x {batch} tokens"
    )
    begin = time.perf_counter()
    layer = nn.TransformerLayer(
        hidden,
        ffn,
        heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method=_zeros,
        output_layer_init_method=_zeros,
        params_dtype=kind,
        activation=activation,
        normalization=normalization,
        device=where,
    )
    _two_steps(layer, arrays.zeros((sequence, batch, hidden), kind, where), rule, tell)
    return replace(done, step_seconds=time.perf_counter() - begin)


def _two_steps(layer: Any, zeros: Any, recipe: Recipe, say: Callable[[str], object]) -> None:
    from fp8kit import arrays
    from fp8kit.autocast import autocast
    from fp8kit.autograd import tensor

    begin, x = time.perf_counter(), tensor(zeros, requires_grad=True)
    for step in (1, 2):  # the first finds no gradient to add to
        with autocast(recipe=recipe):
            y = layer(x)
        say(f"step {step}: forward done, {time.perf_counter() - begin:.1f} s")
        y.backward(zeros)
    arrays.synchronize(zeros.device)


def variants(
    hidden: int, dtype: str, activation: str, quantization: Quantization, arch: str, head_dim: int = 64
) -> list[Variant]:
    """(source, defines) of every kernel variant of a training: ``dtype`` of the parameters,
    ``quantization`` of the recipe, as devices of ``arch`` carry it out."""
    from fp8kit import formats
    from fp8kit.backends.activation import LEARNED
    from fp8kit.backends.cuda import flash, norm
    from fp8kit.backends.cuda.launch import TYPE_NAMES
    from fp8kit.ops.product_block import BlockProduct
    from fp8kit.ops.products import product_class
    from fp8kit.raw_kernels import manifest

    own, product = TYPE_NAMES[dtype], product_class(quantization)
    found: list[Variant] = []
    # an activation with learned numbers has kernels of its own
    kernels = tuple("xielu_fwd" if k == "act_fwd" and activation in LEARNED else k for k in _OWN_TYPE)
    scaled = {str(gemm.a.tile[1]) for gemm in quantization.gemms.values() if gemm.scaled}
    laid = ("block_operand",) * bool(scaled)
    for kernel in (*kernels, product.kernels[0], *laid, *_FLOAT32_TOO):
        types = (own, "f32") if kernel in _FLOAT32_TOO else (own,)
        fits: dict[str, tuple[str, ...]] = {"T": types, "ACT": (activation,)}
        if scaled:
            fits["WIDTH"] = tuple(scaled)
        if not product.fuses_cast or product.scales_local:
            fits["TILES"] = ("mixed",)
        for source in manifest.uses(kernel):
            if source == _BY_BLOCKS and not product.scales_local:
                continue
            for defines in map(dict, manifest.source(source).variants):
                if all(defines.get(key, values[0]) in values for key, values in fits.items()):
                    found.append((source, defines))
    if issubclass(product, BlockProduct):
        found += _block_gemms(quantization, own, arch)
    norms = norm.variants(hidden, formats.dtype(dtype))
    found += [(source, {"T": own, **defines}) for source, defines in norms]
    if dtype == "float32":
        found.append(("attention.cu", {"T": own}))
    else:  # which cuDNN takes where it is large
        found += flash.variants(head_dim, dtype, arch)
    return [variant for i, variant in enumerate(found) if variant not in found[:i]]


def _block_gemms(quantization: Quantization, own: str, arch: str) -> list[Variant]:
    """Variants of our own product with scales of blocks, of every tile that it may choose."""
    from fp8kit.backends.cuda import hopper_gemm, mma_gemm
    from fp8kit.backends.cuda.compile import arch_of
    from fp8kit.backends.cuda.own_gemm import SCALES
    from fp8kit.backends.cuda.quantize import format_name
    from fp8kit.raw_kernels import manifest

    source = hopper_gemm.SOURCE if arch == arch_of(hopper_gemm.CAPABILITY) else mma_gemm.SOURCE
    wanted = [
        {
            "LEFT": format_name(gemm.a.format),
            "RIGHT": format_name(gemm.b.format),
            "SCALES": SCALES[gemm.a.tile, gemm.b.tile],
            "T": own,
            "GROUPS": "none",
            "EPILOGUE": "bare",
        }
        for gemm in quantization.gemms.values()
        if gemm.compute == "quantized" and isinstance(gemm.how, bool)
    ]
    return [
        (source, defines)
        for defines in map(dict, manifest.source(source).variants)
        if any(all(defines.get(key, value) == value for key, value in each.items()) for each in wanted)
    ]


def _compiled(wanted: list[Variant], arch: str, threads: int, tell: Callable[[str], object]) -> Warmup:
    """Compile what the cache does not have, the longest sources first, so that no thread is left with one at
    the end."""
    from fp8kit import cache, settings
    from fp8kit.backends.cuda.compile import compile_cubin
    from fp8kit.raw_kernels import manifest

    cache.want("warmup", "kernels")
    begin = time.perf_counter()
    before = set((settings.cache_dir() / "kernels").glob("*.cubin"))

    def one(variant: Variant) -> tuple[str, float, bool]:
        source, defines = variant
        start = time.perf_counter()
        path = compile_cubin(source, manifest.defines(**defines), arch).path
        seconds = time.perf_counter() - start
        name = " ".join((source, *(f"{k}={v}" for k, v in defines.items())))
        if path not in before:
            tell(f"compiled {name}, {seconds:.1f} s")
        return name, seconds, path in before

    at_once = f"{len(wanted)} variants for {arch}, {threads} at once"
    tell(f"{at_once}, compiled where the cache does not have them yet")
    order = sorted(wanted, key=lambda variant: -len(manifest.text(variant[0])))
    with ThreadPoolExecutor(threads) as pool:
        made = list(pool.map(one, order))
    new = sorted(((name, seconds) for name, seconds, known in made if not known), key=lambda pair: -pair[1])
    return Warmup(tuple(new), len(made) - len(new), time.perf_counter() - begin, None)


def _zeros(weight: Any) -> None:
    weight.fill(0)
