"""``dense``, ``layernorm_dense``, ``layernorm_mlp``: layers with weights as pure functions.

Kernels are (in, out), as in Flax, or, on request, (out, in), as in PyTorch and ``fp8kit.nn``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fp8kit import scaled_products
from fp8kit.arguments import choice, flag, named_well, shown
from fp8kit.arrays import Shape
from fp8kit.backends.activation import ALL
from fp8kit.backends.protocol import BLOCK
from fp8kit.errors import ArgumentError, FormatError, ShapeError, on_behalf_of
from fp8kit.ops.linear import LinearSpec, linear
from fp8kit.ops.norm import NoNormSpec, NormSpec
from fp8kit.ops.norm_linear import NormLinearSpec, norm_linear
from fp8kit.ops.norm_mlp import NormMLPSpec, norm_mlp
from fp8kit.ops.product import ProductSpec
from fp8kit.ops.product_quantized import ALIGN, pad
from fp8kit.ops.smooth import LINES
from fp8kit.spec import Operation
from fp8kit_jax.activations import activation, activation_of, alphas_of, composed_of
from fp8kit_jax.arguments import as_array, as_number, as_rows, check_fused, in_dtype_of
from fp8kit_jax.calls import default_device
from fp8kit_jax.inspection import watched
from fp8kit_jax.keys import rng_inputs
from fp8kit_jax.quantizers import QuantizerSet, fp8_of, resolve
from fp8kit_jax.rules import apply
from fp8kit_jax.scopes import history_of, next_key

NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
Dims = tuple[Sequence[int], Sequence[int]]
Shapes = dict[str, Shape]


@named_well
@on_behalf_of("dense", weight0="kernel", bias0="bias")
def dense(
    x: Any,
    kernel: Any,
    bias: Any = None,
    contracting_dims: Dims = ((-1,), (0,)),
    quantizer_set: QuantizerSet | None = None,
    return_bias: bool = False,
    *,
    residual: Any = None,
    name: str | None = None,
) -> Any:
    """y = x kernel + bias (+ residual).

    * ``x``: h (..., K); ``kernel``: h (K, N); ``bias``: h (N,) or None. h is float32, bfloat16 or float16;
      parameters of another h than x's are rounded to it first, and their gradients have their own dtypes.
    * ``contracting_dims``: which dimensions of x and of kernel are summed over, several each if need be;
      those that are left come out in order, x's first. The last of x, with the first of kernel or the second
      of a matrix (N, K), cost no transposition.
    * ``quantizer_set``: how to quantise; None is as the autocast in force says. Its gradient is the set after
      the step.
    * ``return_bias``: the bias is not added but comes back, for ``dropout_add`` to add in its pass. Its
      gradient is made here, from y's.
    * ``residual``: like y, or None; the product adds it, and its gradient is y's own. Not with
      ``return_bias``: the bias is added with it. In a ``shard_map`` of your own that splits what is summed
      over, every device adds it, as it does a bias.
    * ``name``: what ``fj.inspect``, ``recipe.CustomRecipe`` and ``recipe.PerLayer`` call the layer; None is
      as ``quantizer_set`` says.

    Returns y, h (..., N), with ``return_bias`` (y, bias or None). Raises ShapeError, FormatError, RecipeError
    or ArgumentError when it is traced.
    """
    x, kernel = as_array("dense", "x", x), as_array("dense", "kernel", kernel)
    deferred = flag("dense", "return_bias", return_bias)
    residual = None if residual is None else as_array("dense", "residual", residual)
    check_fused("dense", residual is not None, "a residual", return_bias=deferred)
    kernel, bias = in_dtype_of(x, kernel, bias)
    matrix, weight, shape, layout = _matrices(x, kernel, contracting_dims)
    found = resolve("dense", quantizer_set, name)
    features = shape[matrix.ndim - 1 :] or (1,)
    product = _product(weight, layout, found, bias, deferred=deferred)
    if residual is not None and residual.shape != shape:
        raise ShapeError("dense", "residual", f"shape {residual.shape}", f"shape {shape}, as y")
    inputs = {
        "x": matrix,
        "weight0": weight,
        "bias0": _shaped("dense", "bias", bias, features),
        "residual": None if residual is None else residual.reshape(*matrix.shape[:-1], *features),
    }
    flat, views = _flattened(product, features, (*matrix.shape[:-1], *features))
    flat |= {"residual": (*matrix.shape[:-1], product.out_features)}
    y = _run("dense", linear, LinearSpec(product), inputs, found, flat, views)["y"].reshape(shape)
    return (y, jax.lax.stop_gradient(inputs["bias0"])) if deferred else y


@named_well
@on_behalf_of("layernorm_dense", weight0="kernel", bias0="bias", norm_weight="gamma", norm_bias="beta")
def layernorm_dense(
    x: Any,
    kernel: Any,
    gamma: Any,
    beta: Any,
    bias: Any = None,
    norm_type: str = "layernorm",
    zero_centered_gamma: bool = False,
    epsilon: float = 1e-6,
    quantizer_set: QuantizerSet | None = None,
    return_layernorm_output: bool = False,
    kernel_layout: str = "io",
    return_residual: bool = False,
    *,
    name: str | None = None,
) -> Any:
    """y = norm(x) kernel + bias, in one operation.

    * ``x``: h (..., K); ``gamma``, ``beta``: h (K,), beta None with "rmsnorm"; ``kernel``: h (K, N) or (K,
      ...), further dimensions come out; ``bias``: h of kernel's shape without K, or None. ``norm_type``:
      "layernorm" or "rmsnorm".
    * ``kernel_layout``: "io", or "oi": kernel is (N, K), as PyTorch has it.
    * ``quantizer_set``, ``name``: see ``dense``.
    * ``return_residual``: x itself comes back too, for a residual connection to start at: its gradient is
      then added to x's within the norm's kernel, in float32 and without a pass of its own.

    Returns y, h (..., N), or a tuple (y, norm(x) with ``return_layernorm_output``, x with
    ``return_residual``). Raises ShapeError, FormatError or RecipeError when it is traced.
    """
    op = "layernorm_dense"
    beside = _beside(op, return_layernorm_output, return_residual)
    x, kernel = as_rows(op, "x", x), as_array(op, "kernel", kernel)
    kernel, gamma, beta, bias = in_dtype_of(x, kernel, gamma, beta, bias)
    found = resolve(op, quantizer_set, name)
    io = choice(op, "kernel_layout", kernel_layout, ("io", "oi"), FormatError) == "io"
    if kernel.ndim < 2:
        raise ShapeError(op, "kernel", f"shape {kernel.shape}", "at least 2 dimensions")
    features = kernel.shape[1:] if io else kernel.shape[:-1]
    _want_features(op, x, gamma, "kernel", kernel.shape[0 if io else -1])
    product = _product(kernel, kernel_layout, found, bias)
    spec = NormLinearSpec(
        norm_spec(op, x, norm_type, epsilon, zero_centered_gamma, beta),
        product,
        "residual" in beside,
        "normed" in beside,
    )
    inputs = {
        "x": x,
        "norm_weight": gamma,
        "norm_bias": beta,
        "weight0": kernel,
        "bias0": _shaped(op, "bias", bias, features),
    }
    flat, views = _flattened(product, features, (*x.shape[:-1], *features))
    out = _run(op, norm_linear, spec, inputs, found, flat, views)
    y = out["y"].reshape(*x.shape[:-1], *features)
    return (y, *(out[name] for name in beside)) if beside else y


@named_well
@on_behalf_of(
    "layernorm_mlp",
    fc1_weight0="kernels[0]",
    fc2_weight0="kernels[1]",
    fc1_bias0="biases[0]",
    fc2_bias0="biases[1]",
    norm_weight="gamma",
    norm_bias="beta",
)
def layernorm_mlp(
    x: Any,
    gamma: Any,
    beta: Any,
    kernels: Sequence[Any],
    biases: Sequence[Any] = (None, None),
    norm_type: str = "layernorm",
    zero_centered_gamma: bool = False,
    epsilon: float = 1e-6,
    activation_type: Sequence[str] = ("gelu",),
    quantizer_sets: Sequence[QuantizerSet | None] = (None, None),
    return_layernorm_output: bool = False,
    kernel_layout: str = "io",
    activation_params: Mapping[str, float] | None = None,
    return_residual: bool = False,
    return_bias: bool = False,
    join_residual: bool = False,
    smooth_swiglu: str | None = None,
    alphas: Sequence[Any] | None = None,
    *,
    name: str | None = None,
) -> Any:
    """y = act(norm(x) kernel1 + bias1) kernel2 + bias2, in one operation, or in three where the activation is
    made of ``activations.FUNCTIONS``.

    * ``x``: h (..., H). ``gamma``, ``beta``: both None leave the norm out. ``kernels``: h (H, a, F) and (F,
      H), a = len(activation_type); ``biases``: h (a, F) and (H,), or None and None.
    * ``activation_type``, ``activation_params``, ``alphas``: see ``activation``. ``smooth_swiglu``:
      "channel", "token" or None, as ``fp8kit.nn.LayerNormMLP``; such a call is not split over devices.
    * ``kernel_layout``: "io", or "oi": kernels are (a, F, H) and (H, F), as PyTorch has them.
    * ``quantizer_sets``: of the two products, see ``dense``; either both in FP8 or none. ``return_bias``:
      bias2 is not added, as in ``dense``. ``name``: as in ``dense``; the products are NAME.fc1 and NAME.fc2.
      The rest: as ``layernorm_dense``.
    * ``join_residual``: x is added to y, within the second product, as ``dense`` adds a residual (in a
      ``shard_map`` of your own too), and y's gradient to x's within the norm's kernel; neither
      ``return_residual`` nor ``return_bias`` then.

    Returns y, h (..., H), or a tuple (y, norm(x) with ``return_layernorm_output``, x with
    ``return_residual``, bias2 or None with ``return_bias``). Raises ShapeError, FormatError, RecipeError or
    ArgumentError when it is traced.
    """
    op = "layernorm_mlp"
    deferred = flag(op, "return_bias", return_bias)
    beside = _beside(op, return_layernorm_output, return_residual)
    fused = flag(op, "join_residual", join_residual)
    check_fused(op, fused, return_residual="residual" in beside, return_bias=deferred)
    x = as_rows(op, "x", x)
    for argument, pair in (("kernels", kernels), ("biases", biases), ("quantizer_sets", quantizer_sets)):
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise ShapeError(op, argument, shown(pair), "two, one for each product")
    k1, k2 = (as_array(op, f"kernels[{i}]", kernel) for i, kernel in enumerate(kernels))
    gamma, beta, k1, k2, b1, b2 = in_dtype_of(x, gamma, beta, k1, k2, *biases)
    composed = composed_of(op, activation_type, activation_params, alphas=alphas)
    if not composed:
        act, numbers = activation_of(op, activation_type, activation_params)
        learned = alphas_of(op, act, alphas, x)
    smooth = "" if smooth_swiglu is None else choice(op, "smooth_swiglu", smooth_swiglu, LINES)
    if smooth and (composed or not ALL[act].linear):
        raise ArgumentError(op, "smooth_swiglu", repr(smooth), f"None with {tuple(activation_type)}")
    if (b1 is None) != (b2 is None):
        raise ShapeError(op, "biases", "one", "two or none")
    b2 = None if b2 is None else as_array(op, "biases[1]", b2)
    io = choice(op, "kernel_layout", kernel_layout, ("io", "oi"), FormatError) == "io"
    parts = len(activation_type)
    if k1.ndim != 3 or k1.shape[1 if io else 0] != parts:
        wanted = f"(hidden, {parts}, intermediate)" if io else f"({parts}, intermediate, hidden)"
        raise ShapeError(op, "kernels[0]", f"shape {k1.shape}", wanted)
    _want_features(op, x, gamma, "kernels[0]", k1.shape[0 if io else -1])
    first, second = (
        resolve(op, one, name, ending) for one, ending in zip(quantizer_sets, (".fc1", ".fc2"), strict=True)
    )
    if first.recipe != second.recipe:
        raise FormatError(op, "quantizer_sets", "two recipes", "the same recipe for both")
    if composed:
        kept = {"normed": x, "residual": x}
        if gamma is None and beta is None:
            h = dense(x, k1, b1, ((-1,), (0 if io else 2,)), first)
        else:
            norm_of = gamma, beta, b1, norm_type, zero_centered_gamma, epsilon, first
            h, *more = layernorm_dense(x, k1, *norm_of, "normed" in beside, kernel_layout, True)
            kept = dict(zip(("residual", "normed"), more[::-1], strict=False))
        last = ((-1,), (0 if io else 1,)), second, deferred
        added = kept["residual"] if fused else None
        out = dense(activation(h, activation_type), k2, b2, *last, residual=added)
        y, *bias = out if deferred else (out,)
        more = [*(kept[name] for name in beside), *bias]
        return (y, *more) if more else y
    fc1 = _product(k1, kernel_layout, first, b1, "fc1_")
    fc2 = _product(k2, kernel_layout, second, b2, "fc2_", deferred)
    if gamma is None and beta is None:
        norm: NormSpec = NoNormSpec(x.shape[-1])
    else:
        norm = norm_spec(op, x, norm_type, epsilon, zero_centered_gamma, beta)
    back = "residual" in beside, "normed" in beside
    spec = NormMLPSpec(norm, fc1, fc2, act, *back, numbers, fused_residual=fused, smooth=smooth)
    wide = (parts, fc2.in_features)
    inputs = {
        "x": x,
        "norm_weight": gamma,
        "norm_bias": beta,
        "fc1_weight0": k1,
        "fc2_weight0": k2,
        "fc2_bias0": b2,
        "fc1_bias0": _shaped(op, "biases[0]", b1, wide),
        **learned,
    }
    flat, views = _flattened(fc1, wide, ())
    views.pop("y", None)
    views["h"] = (math.prod(x.shape[:-1]), *wide)
    slots = first.slots("fc1_") | second.slots("fc2_")
    out = _run(op, norm_mlp, spec, inputs, first, flat, views, slots)
    more = [*(out[name] for name in beside), *([jax.lax.stop_gradient(b2)] if deferred else [])]
    return (out["y"], *more) if more else out["y"]


def _run(
    name: str,
    operation: Operation,
    spec: Any,
    inputs: dict[str, Any],
    found: QuantizerSet,
    flat: Shapes,
    views: Shapes,
    slots: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """``apply`` by what ``found`` says; ``name``: of the function; ``slots``: where there are others than
    its own."""
    inputs = inputs | drawn(name, found)
    slots, history = found.slots("") if slots is None else slots, history_of(found.recipe)
    return apply(operation, spec, inputs, slots, history, flat=flat, views=views, kept_as=found.kept_as)


def drawn(operation: str, found: QuantizerSet) -> dict[str, Any]:
    """Returns the input ``rng`` of an operation whose casts draw random bits."""
    fp8 = fp8_of(found)
    return rng_inputs(next_key(operation), operation, "rng") if fp8 is not None and fp8.needs_rng else {}


def _want_features(operation: str, x: Any, gamma: Any, kernel: str, features: int) -> None:
    """ShapeError for an x that has not the features of both the norm and the kernel: it is what is wrong."""
    if getattr(gamma, "shape", None) == (features,) and x.shape[-1] != features:
        wanted = f"a last dimension of {features}, as gamma and {kernel} have it"
        raise ShapeError(operation, "x", f"shape {x.shape}", wanted)


def _beside(operation: str, return_layernorm_output: Any, return_residual: Any) -> tuple[str, ...]:
    """Returns the outputs that are asked for beside y, in the order in which they are returned."""
    asked = {
        "normed": flag(operation, "return_layernorm_output", return_layernorm_output),
        "residual": flag(operation, "return_residual", return_residual),
    }
    return tuple(name for name, wanted in asked.items() if wanted)


def norm_spec(
    operation: str, x: Any, norm_type: str, epsilon: float, zero_centered_gamma: bool, beta: Any
) -> NormSpec:
    """Returns the spec of a norm over x's last dimension."""
    choice(operation, "norm_type", norm_type, NORMS, FormatError)
    if norm_type == "rmsnorm" and beta is not None:
        raise ShapeError(operation, "beta", "an array", "None with rmsnorm")
    eps = as_number(operation, "epsilon", epsilon)
    centered = flag(operation, "zero_centered_gamma", zero_centered_gamma)
    return NormSpec(x.shape[-1], NORMS[norm_type], eps, centered)


def _product(
    weight: Any, layout: str, found: QuantizerSet, bias: Any, prefix: str = "", deferred: bool = False
) -> ProductSpec:
    """Returns the product of a kernel (K, ...) or, in layout "oi", (..., K). ``deferred``: another operation
    adds its bias."""
    if weight.ndim < 2:
        raise ShapeError("product", f"{prefix}kernel", f"shape {weight.shape}", "2 dimensions")
    k, *features = weight.shape if layout == "io" else (weight.shape[-1], *weight.shape[:-1])
    mode = "none" if bias is None else "deferred" if deferred else "add"
    fp8, watch = watched(found, prefix, layout)
    fp8 = None if fp8 is None else scaled_products.for_device(fp8, default_device())
    return ProductSpec(k, (math.prod(features),), layout, mode, fp8, prefix=prefix, watch=watch)


def _shaped(operation: str, name: str, bias: Any, shape: Shape) -> Any:
    """Returns a bias with the features' shape."""
    if bias is None:
        return None
    bias = as_array(operation, name, bias)
    if bias.size != math.prod(shape):
        raise ShapeError(operation, name, f"shape {bias.shape}", f"shape {shape}")
    return bias.reshape(shape)


def _flattened(product: ProductSpec, features: tuple[int, ...], y: tuple[int, ...]) -> tuple[Shapes, Shapes]:
    """``flat`` and ``views`` of ``rules.apply`` for a product whose features have several dimensions; y goes
    out as ``y``."""
    k, n, p = product.in_features, product.out_features, product.prefix
    if len(features) == 1:
        return {}, {}
    flat = {f"{p}weight0": (k, n) if product.layout == "io" else (n, k), f"{p}bias0": (n,)}
    views, granularity = {"y": y}, None if product.fp8 is None else product.fp8.w.granularity
    # what is saved of the weight, where it is not padded
    if granularity == "tensor" and n % ALIGN == 0:
        views[f"{p}w_qt"] = (pad(k), *features)
    elif granularity == "block_128x128" and n % (4 * BLOCK) == 0 and features[-1] % BLOCK == 0:
        views |= {
            f"{p}w_qt": (pad(k), *features),
            f"{p}w_qt_inv": (-(-k // BLOCK), *features[:-1], features[-1] // BLOCK),
        }
    return flat, views


def _matrices(x: Any, kernel: Any, dims: Dims) -> tuple[Any, Any, tuple[int, ...], str]:
    """x (..., K), kernel (K, ...) or (N, K), the shape of the product, and the kernel's layout."""
    try:
        xs, ks = ([range(array.ndim)[d] for d in own] for array, own in zip((x, kernel), dims, strict=True))
    except (IndexError, TypeError, ValueError):
        wanted = f"dimensions of x {x.shape} and kernel {kernel.shape}"
        raise ShapeError("dense", "contracting_dims", shown(dims), wanted) from None
    summed, wanted = tuple(kernel.shape[d] for d in ks), tuple(x.shape[d] for d in xs)
    if summed != wanted or len(set(xs)) != len(xs) or not xs:
        got, like = (
            "{} along dimension {} of shape {}".format(*(", ".join(map(str, each)) for each in told), shape)
            for *told, shape in ((summed, ks, kernel.shape), (wanted, xs, x.shape))
        )
        like = f"x's {like}"
        transposed = summed != wanted and kernel.ndim == 2 and list(ks) == [0] and kernel.shape[1:] == wanted
        hint = "; a kernel is (in, out), contracting_dims=((-1,), (1,)) takes (out, in)" if transposed else ""
        raise ShapeError("dense", "kernel", got, f"{like}{hint}")
    rows, columns = ([d for d in range(a.ndim) if d not in own] for a, own in ((x, xs), (kernel, ks)))
    leading, trailing = tuple(x.shape[d] for d in rows), tuple(kernel.shape[d] for d in columns)
    size = math.prod(x.shape[d] for d in xs)
    matrix = jnp.transpose(x, (*rows, *xs)).reshape(*leading, size)
    if kernel.ndim == 2 and ks == [1]:
        return matrix, kernel, (*leading, *trailing), "oi"
    return (
        matrix,
        jnp.transpose(kernel, (*ks, *columns)).reshape(size, *(trailing or (1,))),
        (*leading, *trailing),
        "io",
    )
