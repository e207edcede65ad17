"""``grouped_dense``: groups of rows, each times a kernel of its own, the groups' sizes on the device; and the
same in the shape of ``jax.lax.ragged_dot``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fp8kit import inspection
from fp8kit.arguments import integer, shown
from fp8kit.errors import ShapeError, UnsupportedError, on_behalf_of
from fp8kit.ops.expert_linear import EXPERT_ARGUMENTS, ExpertLinearSpec, expert_linear, want_sizes
from fp8kit.ops.values import check_groups
from fp8kit.recipe import Recipe
from fp8kit_jax.arguments import as_array, as_rows, in_dtype_of, on_host
from fp8kit_jax.checks import dtype
from fp8kit_jax.quantizers import QuantizerSet, fp8_of, resolve
from fp8kit_jax.rules import apply
from fp8kit_jax.scopes import recipe_in_force

_RAGGED = {"x": "lhs", "kernel": "rhs", "x and kernel": "lhs and rhs"}  # what ragged_dot calls arguments
_LAYOUTS = {((1,), (1,)): "io", ((1,), (2,)): "oi"}


def grouped_dense(
    x: Any,
    kernel: Any,
    group_sizes: Any,
    contracting_dims: tuple[Sequence[int], Sequence[int]] = ((1,), (1,)),
    bias: Any = None,
    precision: Any = jax.lax.Precision.DEFAULT,
    preferred_element_type: Any = None,
    group_offset: Any = None,
    quantizer_set: QuantizerSet | None = None,
    kernel_fsdp_info: tuple[str | None, int] = (None, -1),
    *,
    name: str | None = None,
    slots: int = 0,
) -> Any:
    """y[r] = x[r] kernel[e] + bias[e] for the rows r of group e; rows of no group, behind the last one's, are
    0, and what lies there in x, and in y's gradient, counts in no scale.

    * ``x``: h (M, K), rows of group 0 first; ``kernel``: h (E, K, N), or, with ``contracting_dims`` ((1,),
      (2,)), (E, N, K); ``bias``: h (E, N) or None. h is float32, bfloat16 or float16; parameters of another h
      than x's are rounded to it first.
    * ``group_sizes``: int32 (E,), on the device; nothing waits for it. What they claim beyond M does not
      count on a GPU; on the CPU it is an ArgumentError, as a negative one is, and where they are traced JAX's
      own.
    * ``preferred_element_type``: y's dtype, an h, rounded from x's; None is x's.
    * ``quantizer_set``: how to quantise; None is as the autocast in force says. Recipes whose scales follow
      from the data: per tensor (each kernel has its own), per row, by blocks of 128.
    * ``name``: what ``recipe.CustomRecipe`` and ``recipe.PerLayer`` call the layer; None is as
      ``quantizer_set`` says.
    * ``slots``: not 0 where group e has rows e * slots ... of x, of which its first ``group_sizes[e]`` count,
      as in decoding; M is then E * slots.
    * ``precision``: DEFAULT, "default" or None. ``group_offset``, ``kernel_fsdp_info``: at their defaults
      only.

    Sums are in float32. Differentiable in x, kernel and bias. Returns h (M, N). Raises ShapeError,
    FormatError, and UnsupportedError when it is traced.
    """
    op = "grouped_dense"
    if preferred_element_type is not None:
        dtype(op, "preferred_element_type", preferred_element_type)
    x, kernel = as_rows(op, "x", x), as_array(op, "kernel", kernel)
    known = None, jax.lax.Precision.DEFAULT, "default"
    if not isinstance(precision, str | jax.lax.Precision | None) or precision not in known:
        raise UnsupportedError(op, "precision", shown(precision), "DEFAULT: sums are in float32")
    if group_offset is not None or not isinstance(kernel_fsdp_info, tuple) or kernel_fsdp_info != (None, -1):
        raise UnsupportedError(op, "group_offset, kernel_fsdp_info", "others", "None and (None, -1)")
    try:
        layout = _LAYOUTS[tuple(tuple(dims) for dims in contracting_dims)]  # type: ignore[index]
    except (KeyError, TypeError):
        wanted = " or ".join(map(str, _LAYOUTS))
        raise ShapeError(op, "contracting_dims", shown(contracting_dims), wanted) from None
    if kernel.ndim != 3 or x.ndim != 2:
        got = f"{x.shape} and {kernel.shape}"
        raise ShapeError(op, "x and kernel", got, "(rows, in) and (experts, in, out)")
    kernel, bias = in_dtype_of(x, kernel, bias)
    sizes = as_array(op, "group_sizes", group_sizes)
    integers = jnp.issubdtype(sizes.dtype, jnp.integer)
    want_sizes(op, "group_sizes", sizes, integers, sizes.shape, kernel.shape[0])
    experts, *sides = kernel.shape
    n = sides[1] if layout == "io" else sides[0]
    label = name if isinstance(name, str) else ""
    own = recipe_in_force(op, label) if quantizer_set is None else getattr(quantizer_set, "recipe", None)
    own = own.for_layer(op, label) if isinstance(own, Recipe) else None
    want_scales_of_data(op, own)
    found = resolve(op, quantizer_set, name)
    fp8 = fp8_of(found)
    inspection.unseen(found.layer or op)
    inputs = {"x": x, "group_sizes": sizes.astype(jnp.int32), "weight": kernel, "bias": bias}
    with on_behalf_of(op, **EXPERT_ARGUMENTS):
        rows = integer(op, "slots", slots, 0, 2**31 - 1)
        spec = ExpertLinearSpec(experts, x.shape[1], n, layout, fp8, rows)
        check_groups(op, "group_sizes", on_host(inputs["group_sizes"]), x.shape[0], rows)
        y = apply(expert_linear, spec, inputs, kept_as=found.kept_as)["y"]
    return y if preferred_element_type is None else y.astype(preferred_element_type)


def want_scales_of_data(operation: str, recipe: Recipe | None) -> None:
    """UnsupportedError for a layer's recipe that keeps state, which groups with sizes on the device cannot
    have."""
    if recipe is not None and recipe.history is not None:
        wanted = "a recipe whose scales follow from the data, Float8CurrentScaling say"
        raise UnsupportedError(operation, "recipe", recipe.short_name(), wanted)


def ragged_dot(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: Any = None,
) -> Any:
    """``grouped_dense`` with the arguments of ``jax.lax.ragged_dot``: lhs h (M, K), rhs h (E, K, N),
    group_sizes (E,). The autocast in force says how both are quantised."""
    with on_behalf_of("ragged_dot", **_RAGGED):
        return grouped_dense(
            lhs,
            rhs,
            group_sizes,
            precision=precision,
            preferred_element_type=preferred_element_type,
            group_offset=group_offset,
        )
