"""The cases: frontend x program x module x recipe x options x dtype.

``modules`` and ``jax_modules`` say what a module is made and called with; ``CASES`` says which of them run,
by which program of ``layers`` and ``run_*``, under which recipe, in which dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from fp8kit.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    QParams,
    Recipe,
)
from tests.golden.jax_modules import FLAX, JAX, JAX_EXACT, JAX_FP8, NNX
from tests.golden.modules import (
    ACTS,
    ATTENTION,
    EXACT,
    FUNCTIONS,
    GROUPED,
    LINEAR,
    MHA,
    MLP,
    NORM_LINEAR,
    NORMS,
    OPS,
    OTHERS,
    TORCH_FUNCTIONS,
    TRANSFORMER,
)

# --- recipes ------------------------------------------------------------------------------------------------


def _second(history: Any) -> Any:
    """An amax of a user's own: the mean of the history's largest two."""
    return np.sort(history, axis=0)[-2:].mean(axis=0, dtype=np.float32)


def _halved(amax: Any, scale: Any, fp8_max: float, recipe: Any) -> Any:
    """A scale of a user's own: half of the usual one, the old one where there is no amax."""
    amax = np.asarray(amax)  # a tensor in PyTorch
    return np.where(amax > 0, np.float32(fp8_max / 2) / np.maximum(amax, np.float32(1e-3)), scale)


_FINE = QParams(amax_epsilon=8.0)
RECIPES: dict[str, Recipe | None] = {
    "none": None,
    "delayed": DelayedScaling(amax_history_len=3),
    "delayed_default": DelayedScaling(),
    "delayed_recent": DelayedScaling(1, Format.E4M3, amax_history_len=4, amax_compute_algo="most_recent"),
    "delayed_callables": DelayedScaling(
        amax_history_len=3, amax_compute_algo=_second, scaling_factor_compute_algo=_halved
    ),
    "current": Float8CurrentScaling(),
    "current_power_2": Float8CurrentScaling(True, Format.E4M3),
    "current_epsilon": Float8CurrentScaling(
        fp8_quant_fwd_inp=_FINE,
        fp8_quant_fwd_weight=QParams(True, 0.5),
        fp8_quant_bwd_grad=QParams(amax_epsilon=0.25),
        fp8_gemm_fprop=MMParams(True),
        fp8_gemm_wgrad=MMParams(False),
    ),
    "block": Float8BlockScaling(),
    "block_1d": Float8BlockScaling(w_block_scaling_dim=1),
    "block_x_2d": Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
    "block_g_2d": Float8BlockScaling(
        fp8_format=Format.HYBRID, w_block_scaling_dim=1, grad_block_scaling_dim=2
    ),
    "delayed_margin": DelayedScaling(2, amax_history_len=3),
    "delayed_e4m3": DelayedScaling(fp8_format=Format.E4M3, amax_history_len=3),
    "current_e4m3": Float8CurrentScaling(fp8_format=Format.E4M3),
    "block_hybrid": Float8BlockScaling(fp8_format=Format.HYBRID),
    "block_f32": Float8BlockScaling(True, fp8_quant_bwd_grad=QParams(amax_epsilon=0.5)),
}
FOUR = ("none", "delayed", "current", "block")
FP8 = FOUR[1:]
PLAIN = ("none",)
DTYPES = ("float32", "bfloat16", "float16")

# --- what runs ----------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """``program`` of ``frontend`` on ``what``, a key of the tables in ``modules`` or ``jax_modules``.

    ``exact``: its inputs are small whole numbers, see ``values.draw``; only such cases, and those without
    arithmetic, are portable. ``device``: the only one that it runs on, or none.
    """

    frontend: str
    program: str
    what: str = ""
    recipe: str = "none"
    dtype: str = "float32"
    options: dict[str, Any] = {}  # noqa: RUF012
    exact: bool = False
    device: str = ""

    @property
    def name(self) -> str:
        """The case's name, by its parts."""
        named = [f"{key}={value}" for key, value in self.options.items()]
        parts = (self.frontend, self.program, self.what, *named, self.recipe, self.dtype)
        return "/".join([part for part in parts if part] + (["exact"] if self.exact else []))


def each(
    frontend: str,
    program: str,
    names: Iterable[str],
    recipes: Iterable[str] = PLAIN,
    dtypes: Iterable[str] = ("float32",),
    **more: Any,
) -> Iterator[Case]:
    """A case for each of the names, dtypes and recipes."""
    for name in names:
        for dtype in dtypes:
            for recipe in recipes:
                yield Case(frontend, program, name, recipe, dtype, **more)


_FUSED = ("LayerNormMLP.gelu", "LayerNormMLP.swiglu", "LayerNormLinear.plain", "MultiheadAttention.groups")
_BOTH = ("Linear.plain", "LayerNormLinear.split", "LayerNormMLP.swiglu", "TransformerLayer.fused")
_CACHED = (
    {"form": "sbhd"},
    {"form": "bshd", "paged": True},
    {"form": "thd", "paged": True},
    {"form": "bshd", "rotary": True},
)


def _shared(frontend: str) -> Iterator[Case]:
    """The cases of native code and of PyTorch."""
    yield from each(frontend, "steps", ["Linear.plain"], RECIPES, DTYPES)
    yield from each(frontend, "steps", ["Linear.blocks"], [r for r in RECIPES if r.startswith("block")])
    yield from each(frontend, "steps", [name for name in LINEAR if name != "Linear.plain"], FOUR)
    yield from each(frontend, "steps", NORMS, PLAIN, DTYPES)
    yield from each(frontend, "steps", [*NORM_LINEAR, *MLP], FOUR)
    yield from each(frontend, "steps", ACTS, ("none", "delayed"))
    yield from each(frontend, "steps", ATTENTION, PLAIN, DTYPES[:2])
    yield from each(frontend, "steps", [*MHA, *TRANSFORMER], FOUR)
    yield from each(frontend, "steps", ["LayerNormMLP.swiglu", "TransformerLayer.llama"], RECIPES)
    yield from each(frontend, "steps", [*_FUSED, "TransformerLayer.llama"], FOUR, DTYPES[1:])
    yield from each(frontend, "twice", ["Linear.plain", "LayerNormMLP.gelu"], FP8)
    yield from each(frontend, "recompute", _BOTH, FOUR)
    yield from each(frontend, "recompute", ["TransformerLayer.dropout"], ("none", "delayed"))
    yield from each(frontend, "microbatches", [*_BOTH, "MultiheadAttention.cross_fused"], FP8)
    yield from each(frontend, "calibrating", _BOTH, ("delayed", "current"))
    yield from each(frontend, "evaluation", [*_BOTH, "TransformerLayer.dropout"], FOUR)
    yield from each(frontend, "loaded", _BOTH, ("none", "delayed"))
    yield from each(frontend, "function", FUNCTIONS, PLAIN, DTYPES[:2])
    for recipe in FOUR:
        for options in _CACHED:
            yield Case(frontend, "inference", "", recipe, options=options)
    for recipe in FP8:
        chain = "Linear.plain LayerNorm.chain LayerNormMLP.chain Linear.chain"
        yield Case(frontend, "chain", chain, recipe)
        yield Case(frontend, "chain", chain, recipe, options={"high": 2})
    yield from each(
        frontend, "steps", [n for n in EXACT if n.split(".")[0] in _EXACT_NORMS], PLAIN, exact=True
    )
    yield from each(frontend, "steps", ["Linear.plain", "Linear.blocks"], RECIPES, exact=True)
    yield from each(frontend, "steps", ["Linear.plain"], FOUR, DTYPES[1:], exact=True)
    products = [n for n in EXACT if n.split(".")[0] in ("LayerNormLinear", "LayerNormMLP")]
    yield from each(frontend, "steps", ["Linear.odd", "Linear.split", *products], FOUR, exact=True)
    for program in ("microbatches", "calibrating", "evaluation", "loaded", "recompute", "twice"):
        yield from each(frontend, program, ["Linear.plain", "LayerNormMLP.exact"], ("delayed",), exact=True)


_EXACT_NORMS = ("LayerNorm", "RMSNorm", "DotProductAttention")
_ADAMW = ("AdamW", {"lr": 0.01, "weight_decay": 0.1})
_SGD = ("SGD", {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True})
_QUANTIZED = [
    {"scaling": scaling, "format": form, "source": source}
    for scaling in ("tensor", "row", "block_1x128", "block_128x128", "mx_1x32")
    for form in ("E4M3", "E5M2")
    for source in ("measured", "fixed", "stochastic")
]


def _native() -> Iterator[Case]:
    yield from _shared("native")
    yield from each("native", "steps", OTHERS, PLAIN, DTYPES)
    yield from each("native", "steps", OTHERS, PLAIN, exact=True)
    for kind, settings in (_ADAMW, _SGD, ("SGD", {"lr": 0.01})):
        for recipe, dtype in (("none", "float32"), ("delayed", "float32"), ("current", "bfloat16")):
            for write in (False, True):
                options = {"optimizer": kind, "write": write, **settings}
                yield Case("native", "optimized", "LayerNormMLP.swiglu", recipe, dtype, options)
    for kind, settings in (("SGD", {"lr": 0.25, "momentum": 0.5}), ("SGD", {"lr": 0.5})):
        for write in (False, True):
            options = {"optimizer": kind, "write": write, **settings}
            yield Case("native", "optimized", "Linear.plain", "delayed", "float32", options, exact=True)
    for dtype in ("float32", "float16"):
        yield Case("native", "scaled", "LayerNormMLP.gelu", "current", dtype, {"clip": 1.0})
        yield Case(
            "native", "scaled", "Linear.plain", "delayed", dtype, {"clip": None}, exact=dtype == "float32"
        )
    for dtype in DTYPES:
        for options in _QUANTIZED:
            yield Case("native", "quantize", "", dtype=dtype, options=options, exact=True)
    for options in ({"format": "E2M1"}, {"format": "E8M0"}, {"scaling": "row", "saturate": False}):
        yield Case("native", "quantize", options=options, exact=True)
    for left in ("tensor", "row", "block_1x128", "block_128x128"):
        for right in ("tensor", "row", "block_1x128", "block_128x128"):
            if {left, right} == {"tensor", "row"}:
                continue
            for exact in (False, True):
                yield Case("native", "matmul", options={"left": left, "right": right}, exact=exact)
    yield from each("native", "saved", _BOTH, ("none", "delayed"))
    yield Case("native", "saved", "Linear.plain", "delayed", exact=True)
    yield Case("native", "random", exact=True)
    yield Case("native", "draw_from", "TransformerLayer.dropout", "delayed")
    yield Case("native", "check_finite", "LayerNormMLP.gelu", "delayed")
    yield Case("native", "user_function")
    yield Case("native", "demo", "", "delayed")
    for recipe in ("none", "delayed", "current"):
        yield Case("native", "graph", "LayerNormMLP.gelu", recipe, "bfloat16", device="cuda")


def _torch() -> Iterator[Case]:
    yield from _shared("torch")
    yield from each("torch", "function", TORCH_FUNCTIONS, PLAIN, DTYPES[:2])
    yield from each("torch", "steps", GROUPED, FOUR, DTYPES[:2])
    yield from each("torch", "steps", ["GroupedLinear.plain"], FOUR, exact=True)
    yield from each("torch", "microbatches", ["GroupedLinear.plain"], FP8)
    for name in ("Linear", "LayerNormLinear"):
        yield from each("torch", "fp8_edges", [f"{name}.plain"], FP8, DTYPES[:2])
    yield from each("torch", "fp8_edges", ["Linear.plain"], FP8, exact=True)
    for name in ("Linear.plain", "LayerNormMLP.swiglu", "TransformerLayer.fused", "GroupedLinear.plain"):
        yield from each("torch", "main_grad", [name], FOUR, ("bfloat16",))
    yield from each("torch", "main_grad", ["Linear.plain"], FOUR, exact=True)
    for name in ("Linear.plain", "LayerNormMLP.swiglu", "TransformerLayer.fused"):
        yield from each("torch", "quantized_init", [name], FP8, ("bfloat16",))
    for name in OPS:
        yield from each("torch", "ops", [name], FOUR)
    yield from each("torch", "recompute", ["TransformerLayer.dropout"], FOUR, options={"reentrant": False})
    yield from each("torch", "torch_autocast", ["TransformerLayer.plain"], FOUR)
    yield from each("torch", "extra", [""], FOUR)
    yield from each("torch", "convert", ["", "norms", "encoder"], FOUR)
    for options in (
        {"optimizer": "FusedAdam", "lr": 0.01, "weight_decay": 0.1},
        {"optimizer": "FusedAdam", "adam_w_mode": False, "bias_correction": False},
        {"optimizer": "FusedAdam", "capturable": True},
        {"optimizer": "FusedSGD", "lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"optimizer": "FusedSGD", "lr": 0.01},
    ):
        yield from each("torch", "optimized", ["LayerNormMLP.swiglu"], ("none", "delayed"), options=options)
    for options in (
        {"optimizer": "FusedAdam", "master_weights": True},
        {"optimizer": "FusedAdam", "master_weights": True, "store_param_remainders": True},
        {"optimizer": "FusedAdam", "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "uint8"},
    ):
        yield from each(
            "torch", "optimized", ["LayerNormMLP.swiglu"], ("current",), ("bfloat16",), options=options
        )
    yield Case("torch", "unpermuted")
    yield Case("torch", "padded")
    yield Case("torch", "multi_tensor")
    for layout in ("TN", "NN", "NT"):
        yield Case("torch", "general_gemm", options={"layout": layout})
        yield Case("torch", "general_gemm", options={"layout": layout}, exact=True)
    for backend, name, recipes in (
        ("aot_eager", "Linear.plain", FOUR),
        ("aot_eager", "TransformerLayer.fused", ("delayed", "current")),
        ("inductor", "Linear.plain", ("delayed",)),
        ("inductor", "TransformerLayer.fused", ("delayed",)),
    ):
        yield from each("torch", "compiled", [name], recipes, options={"backend": backend})
    for recipe in ("none", "delayed"):
        yield Case("torch", "graphed", "LayerNormMLP.gelu", recipe, "bfloat16", device="cuda")


def _jax() -> Iterator[Case]:
    fixed = tuple(name for name in RECIPES if not name.startswith("delayed"))  # compiled ten times sooner
    yield from each("jax", "steps", ["dense.plain", "layernorm_mlp.gated"], fixed, DTYPES[:2])
    yield from each("jax", "steps", JAX_FP8, FOUR)
    yield from each("jax", "steps", ["dense.plain"], ("delayed_recent",))
    yield from each("jax", "steps", ["layernorm_mlp.gated"], ("delayed",), ("bfloat16",))
    yield from each("jax", "steps", [name for name in JAX if name not in JAX_FP8], PLAIN, DTYPES[:2])
    yield from each("jax", "steps", JAX_EXACT, PLAIN, exact=True)
    exact = ("dense.plain", "layernorm_dense.exact", "layernorm_mlp.exact")
    yield from each("jax", "steps", exact, FOUR[1:], exact=True)
    yield from each("jax", "linen", FLAX, ("current",))
    yield from each("jax", "linen", ["LayerNormMLP", "TransformerLayer"], ("none", "block"))
    stateful = ("DenseGeneral", "LayerNormDenseGeneral", "LayerNormMLP.dropout", "TransformerLayer.decoder")
    yield from each("jax", "linen", stateful, ("delayed",))
    yield from each("jax", "nnx", NNX, ("current",))
    yield from each("jax", "nnx", ["LayerNormMLP", "TransformerLayer"], ("none", "block"))
    yield from each("jax", "nnx", ["DenseGeneral", "TransformerLayer"], ("delayed",))
    yield from each("jax", "decode", ["TransformerLayer"], ("none", "block"))
    for scaling in ("tensor", "row", "block_1x128", "block_128x128"):
        yield Case("jax", "quantize", options={"scaling": scaling}, exact=True)
    for name in ("dense.plain", "layernorm_mlp.gated"):
        yield Case("jax", "sharded", name, "delayed", device="cpu")
    yield Case("jax", "sharded", "dense.plain", "delayed", exact=True, device="cpu")


CASES = tuple({case.name: case for case in (*_native(), *_torch(), *_jax())}.values())
