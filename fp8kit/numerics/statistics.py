"""Statistics of tensors, as every frontend has them: what is wanted (``request``), counts and sums on the
tensor's device (``collect``), those of several tensors together (``merge``), and numbers (``values``).

All are NumPy's in float64 of the same array. So NaN in it makes every statistic of values NaN, and Inf makes
the mean, the norms and the largest value Inf, the standard deviation NaN; counts and histograms hold in any
case. Of an empty tensor min, max, mean, std, kurtosis, crest factor, SQNR and scales are NaN, the rest is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fp8kit import arrays, formats
from fp8kit.arguments import choice, shown
from fp8kit.arrays import ArrayView
from fp8kit.autograd.call import apply
from fp8kit.autograd.tensors import Tensor
from fp8kit.backends.protocol.statistics import CODE_COUNTS, EXPONENTS
from fp8kit.errors import ArgumentError, FormatError, ShapeError
from fp8kit.numerics.names import Needs, Operand, Stat, request
from fp8kit.numerics.sums import Key, elements, merged, numbers
from fp8kit.ops.statistics import StatisticsSpec
from fp8kit.ops.statistics import statistics as operation
from fp8kit.quantization import Quantization
from fp8kit.recipe import Recipe
from fp8kit.recipes import NAMED

__all__ = [
    "Codes",
    "Needs",
    "Operand",
    "collect",
    "inputs",
    "merge",
    "operation",
    "request",
    "tensor_statistics",
    "values",
]


class Codes(NamedTuple):
    """A cast that a layer used: ``q``, uint8 codes that lie as x does, of x rotated where the recipe rotates;
    ``scale_inv``, float32, one a tile, row-major. Or ``scale`` alone, float32 (1,), of delayed scaling: x is
    cast with it."""

    q: Any = None
    scale_inv: Any = None
    scale: Any = None


def inputs(
    needs: Needs, x: Any, quantized: Codes | Mapping[str, Codes] | None = None, twin: Any = None
) -> dict[str, Any]:
    """Returns the operation's inputs by name, for a frontend's ``apply(statistics.operation, needs.spec,
    inputs)``, whose result "record" is what ``collect`` gives. Arrays are not looked at.

    None of them may want a gradient: detach them. ArgumentError for ``needs`` that ``request`` has not made,
    for ``quantized`` of other words than "rowwise" and "columnwise", for a twin that is missing or that
    nothing needs."""
    _want_needs(needs)
    if (twin is None) == needs.spec.twin:
        asked = [s.name for s in needs.stats if s.kind in ("cosine", "relative_error") or not s.of]
        wanted = f"an array like x, for {', '.join(asked)}" if needs.spec.twin else "None: nothing needs it"
        raise ArgumentError("statistics", "twin", None if twin is None else shown(twin), wanted)
    found = {"x": x, **({"twin": twin} if needs.spec.twin else {})}
    sides: Any = {"rowwise": quantized} if isinstance(quantized, Codes) else quantized
    if sides is None:
        sides = {}
    if not isinstance(sides, Mapping):
        raise ArgumentError("statistics", "quantized", shown(quantized), "Codes, or a dict of them")
    used = {cast.given: cast.quantizer for cast in needs.spec.casts if cast.given}
    for side, codes in sides.items():
        if side not in ("rowwise", "columnwise") or not isinstance(codes, Codes):
            got = f"{side!r}: {shown(codes)}"
            raise ArgumentError("statistics", "quantized", got, "Codes for rowwise and columnwise")
        quantizer = used.get(side)
        if quantizer is None:
            continue
        if codes.q is not None and not (quantizer.hadamard and quantizer.signs == "random"):
            found |= {f"q_{side}": codes.q, f"scale_inv_{side}": codes.scale_inv}
        elif codes.scale is not None and quantizer.needs_state:
            found[f"scale_{side}"] = codes.scale
    return found


def _want_needs(needs: Any) -> None:
    if not isinstance(needs, Needs):
        raise ArgumentError("statistics", "needs", shown(needs), "what request returns")


def collect(
    x: Any, needs: Needs, quantized: Codes | Mapping[str, Codes] | None = None, twin: Any = None
) -> ArrayView:
    """Returns the counts and sums of a tensor: uint8 (n,) on its device, queued on its stream; nothing waits.

    * ``x``: a Tensor, an ArrayView or an array of any library, float32, bfloat16 or float16 (..., N).
    * ``needs``: of ``request``.
    * ``quantized``: the casts that the layer used, "rowwise" as the first GEMM reads it, "columnwise" as the
      second; a ``Codes`` alone is "rowwise". What is not there, and every what-if, is cast here from x, with
      the same kernels and so the same codes; delayed scaling then takes the scale that x's own amax gives,
      and what is drawn at random (stochastic rounding, signs) is drawn anew, always alike.
    * ``twin``: for "cosine" and "relative_error", and "sqnr" of what a GEMM makes: the same in high
      precision, an array like x.

    Raises FormatError and ShapeError for arrays that do not fit, ArgumentError as ``inputs``.
    """
    given = inputs(needs, x, quantized, twin)
    views = {name: _view(value, name) for name, value in given.items()}
    return apply(operation, needs.spec, views)["record"].view


def _view(value: Any, name: str) -> ArrayView:
    if isinstance(value, ArrayView):
        return value
    if isinstance(value, Tensor):
        return value.view
    if getattr(value, "requires_grad", False):  # PyTorch hands none over that a gradient is wanted of
        value = value.detach()
    return arrays.as_view(value, "statistics", name)


def merge(needs: Needs, a: Any, b: Any) -> np.ndarray[Any, Any]:
    """Returns the counts and sums of two tensors together, uint8 on the host, as ``collect`` gives them: of
    several micro-batches, or of the parts that ranks have. ``a``, ``b``: arrays on the host, or bytes. Exact:
    counts are int64, deviations about a common mean are made of those about each (``fp8kit.numerics.sums``).
    ShapeError for other sizes than these needs have."""
    _want_needs(needs)
    return merged(needs.spec, a, b)


def values(needs: Needs, sums: Any) -> dict[str, Any]:
    """Returns the statistics by name, in the order in which they were asked for: floats, ints for counts,
    lists of 257 ints for histograms. ``sums``: what ``collect`` or ``merge`` gave, on the host, or bytes.
    ShapeError for another size."""
    _want_needs(needs)
    found = _Found(needs.spec, sums)
    return {stat.name: _VALUES[stat.kind](found, stat) for stat in needs.stats}


def tensor_statistics(
    x: Any,
    stats: Iterable[str | Mapping[str, Any]] = ("min", "max", "mean", "std", "cur_amax"),
    *,
    tensor: str = "activation",
    recipe: Recipe | Quantization | str | None = None,
    twin: Any = None,
    quantized: Codes | Mapping[str, Codes] | None = None,
) -> dict[str, Any]:
    """Statistics of an array by name: ``tensor_statistics(x, ("min", "mxfp8_sqnr"))``.

    * ``x``: array of NumPy, CuPy, PyTorch, JAX or another library with DLPack, or a Tensor; float32, bfloat16
      or float16 (..., N), whose last dimension is the contraction of the first GEMM that reads it. float64 is
      rounded to float32 first, as a layer would have it.
    * ``stats``: names and options, as ``request`` has them.
    * ``tensor``: what it is to a layer, "activation", "weight" (out, in), "gradient", "output", "dgrad" or
      "wgrad": recipes treat them differently. ``recipe``, or its name: whose casts names without a recipe's
      are of.
    * ``twin``, ``quantized``: see ``collect``.

    Returns {name: float, int or list of ints}; waits for the device. Raises ArgumentError for unknown names,
    FormatError and ShapeError for arrays that do not fit.
    """
    needs = request(stats, Operand(tensor, _rules(recipe)))
    source, other = (
        _single(_view(x, "x"), "x"),
        None if twin is None else _single(_view(twin, "twin"), "twin"),
    )
    if other is not None and other.shape != source.shape:
        raise ShapeError("statistics", "twin", f"shape {other.shape}", f"{source.shape}, as x")
    return values(needs, collect(source, needs, quantized, other).numpy())


def _single(view: ArrayView, name: str) -> ArrayView:
    """Returns a float64 view as float32, others as they are. FormatError for dtypes without statistics."""
    if view.dtype is formats.float64:
        with np.errstate(over="ignore"):
            return arrays.as_view(arrays.native(view).astype(np.float32))
    if view.dtype not in formats.HIGH_PRECISION:
        wanted = "float64, float32, bfloat16 or float16"
        raise FormatError("statistics", name, view.dtype.name, wanted)
    return view


def _rules(recipe: Any) -> Quantization | None:
    """Returns the rules of a recipe, of a recipe's name or of a Quantization; None for None. ArgumentError
    for anything else, and for a recipe that differs by layer."""
    if isinstance(recipe, str):
        recipe = NAMED[choice("statistics", "recipe", recipe, NAMED)].recipe
    if isinstance(recipe, Recipe) and not recipe.by_layer:
        return recipe.quantization
    if recipe is None or isinstance(recipe, Quantization):
        return recipe
    wanted = "a recipe that is the same for all layers, its name, any recipe's quantization or None"
    raise ArgumentError("statistics", "recipe", shown(recipe), wanted)


# --- numbers ------------------------------------------------------------------------------------------------
# of a tensor: (number of all, of NaN, Inf, -Inf, moments) -> value


class _Tensor(NamedTuple):
    size: int
    nan: int
    inf: int
    minus_inf: int
    moments: list[float]

    @property
    def odd(self) -> int:
        """How many NaN and Inf there are."""
        return self.nan + self.inf + self.minus_inf


class _Found:
    """Counts and sums of a record by (kernel, call, name), and those of the ``tensor`` itself."""

    def __init__(self, spec: StatisticsSpec, record: Any) -> None:
        self._parts: dict[Key, list[Any]] = numbers(spec, record)
        if spec.tensor:
            counts = self["tensor", 0, "counts"]
            nan, inf, minus_inf = counts[-3:]
            self.tensor = _Tensor(elements(counts), nan, inf, minus_inf, self["tensor", 0, "moments"])

    def __getitem__(self, key: Key) -> list[Any]:
        return self._parts[key]


_Value = Callable[[_Found, Stat], Any]


def _of_tensor(value: Callable[[_Tensor], float], empty: float = math.nan) -> _Value:
    """NaN with NaN, ``empty`` of nothing."""

    def value_of(found: _Found, stat: Stat) -> float:
        t = found.tensor
        return empty if not t.size else math.nan if t.nan else float(value(t))

    return value_of


def _min(t: _Tensor) -> float:
    return -math.inf if t.minus_inf else t.moments[0]


def _max(t: _Tensor) -> float:
    return math.inf if t.inf else t.moments[1]


def _mean(t: _Tensor) -> float:
    if t.inf and t.minus_inf:
        return math.nan
    return math.inf if t.inf else -math.inf if t.minus_inf else t.moments[6]


def _range(t: _Tensor) -> float:
    """0 of zeros alone, as Transformer Engine's of blocks."""
    largest = _amax(t)
    return math.log2(largest) - math.log2(t.moments[2]) if 0 < largest < math.inf else largest


def _amax(t: _Tensor) -> float:
    return max(_max(t), -_min(t))


def _kurtosis(t: _Tensor) -> float:
    """E[x^4] / E[x^2]^2, not about the mean, as in FOG (arXiv 2505.20524); 3 of normal values of mean 0."""
    squares = t.moments[4]
    return math.nan if t.odd or not squares else t.size * (t.moments[5] / squares / squares)


def _norm(value: Callable[[Any], float]) -> Callable[[_Tensor], float]:
    return lambda t: math.inf if t.odd else value(t.moments)


def _crest(found: _Found, stat: Stat) -> float:
    ratio = float(found["tile", stat.of[0], "ratios"][0])
    return math.nan if found.tensor.odd or not ratio else math.sqrt(ratio)


def _block_range(found: _Found, stat: Stat) -> float:
    t = found.tensor
    ratio = max(float(found["tile", number, "ratios"][1]) for number in stat.of)
    return math.nan if t.nan else math.inf if t.odd else math.log2(ratio) if ratio else 0.0


# of a cast: (elements, values that are not 0, codes that are not 0, saturated, overflowed), sums -> value


def _share(value: Callable[[Any], int]) -> _Value:
    """100 counts / elements; 0 of nothing."""

    def value_of(found: _Found, stat: Stat) -> float:
        counts = found["cast", stat.of[0], "counts"][-CODE_COUNTS:]
        return 100.0 * value(counts) / counts[0] if counts[0] else 0.0

    return value_of


def _scale(place: int) -> _Value:
    def value_of(found: _Found, stat: Stat) -> float:
        scale = float(found["cast", stat.of[0], "sums"][place])
        many = found["cast", stat.of[0], "counts"][-CODE_COUNTS]
        return scale if many and math.isfinite(scale) else math.nan

    return value_of


def _mse(found: _Found, stat: Stat) -> float:
    many = int(found["cast", stat.of[0], "counts"][EXPONENTS])
    return float(found["cast", stat.of[0], "sums"][0]) / many if many else 0.0


def _decibel(squares: float, errors: float, empty: bool) -> float:
    """10 log10(squares / errors): Inf without an error, NaN of nothing."""
    if empty or math.isnan(squares + errors) or (math.isinf(squares) and math.isinf(errors)):
        return math.nan
    if not errors:
        return math.inf
    return 10 * (math.log10(squares) - math.log10(errors)) if squares else -math.inf


def _sqnr(found: _Found, stat: Stat) -> float:
    if not stat.of:  # of what a GEMM makes: its twin is the signal
        _, _, squares, errors = found["pair", 0, "sums"]
        return _decibel(squares, errors, False)
    errors, squares, *_ = found["cast", stat.of[0], "sums"]
    return _decibel(squares, errors, not found["cast", stat.of[0], "counts"][EXPONENTS])


# of a tensor and its twin


def _cosine(found: _Found, stat: Stat) -> float:
    """sum x t / (|x| |t|); NaN where one is 0."""
    both, own, others, _ = found["pair", 0, "sums"]
    size = math.sqrt(own) * math.sqrt(others)
    return both / size if size else math.nan


def _relative(found: _Found, stat: Stat) -> float:
    """|x - t| / |t|; of a twin of zeros 0 where x is, too, else Inf."""
    *_, others, apart = found["pair", 0, "sums"]
    if others:
        return math.sqrt(apart) / math.sqrt(others)
    return 0.0 if apart == 0 else math.inf


_VALUES: dict[str, _Value] = {
    "min": _of_tensor(_min),
    "max": _of_tensor(_max),
    "mean": _of_tensor(_mean),
    "std": _of_tensor(lambda t: math.nan if t.odd else math.sqrt(t.moments[7] / t.size)),
    "l1_norm": _of_tensor(_norm(lambda moments: moments[3]), 0.0),
    "l2_norm": _of_tensor(_norm(lambda moments: math.sqrt(moments[4])), 0.0),
    "cur_amax": _of_tensor(_amax, 0.0),
    "dynamic_range": _of_tensor(_range, 0.0),
    "kurtosis": _of_tensor(_kurtosis),
    "nan_count": lambda found, stat: found.tensor.nan,
    "inf_count": lambda found, stat: found.tensor.inf + found.tensor.minus_inf,
    "exponents": lambda found, stat: found["tensor", 0, "counts"][:EXPONENTS],
    "max_blockwise_dynamic_range": _block_range,
    "crest_factor": _crest,
    "underflows%": _share(lambda counts: counts[1] - counts[2]),
    "overflows%": _share(lambda counts: counts[4]),
    "saturated%": _share(lambda counts: counts[3]),
    "scale_inv_min": _scale(-2),
    "scale_inv_max": _scale(-1),
    "scales": lambda found, stat: found["cast", stat.of[0], "counts"][:EXPONENTS],
    "mse": _mse,
    "sqnr": _sqnr,
    "cosine": _cosine,
    "relative_error": _relative,
}
