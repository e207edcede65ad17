"""Attention of transformers' models that ``convert`` has converted: "fp8kit" among its attention interfaces.

It is transformers' "sdpa" with two differences. Where a mask says no more than that rows are causal, within a
window or not, none is made, also within ``torch.compile``; and a call without a mask is fp8kit's operation,
where that computes the same and no slower. All other calls go on to "sdpa" as they came. Keys and values are
not repeated for grouped heads, and numbers differ from those of "sdpa" as those of torch's kernels differ.
"""

from __future__ import annotations

import copy
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fp8kit.ops.attention import attention
from fp8kit_torch.arguments import autocast_dtype
from fp8kit_torch.call import apply
from fp8kit_torch.constants import constant_result, exporting
from fp8kit_torch.library import policy_now
from fp8kit_torch.specs import spec_for
from fp8kit_torch.torch_compat import function_modes
from fp8kit_torch.views import FLOATS

NAME, THEIRS = "fp8kit", "sdpa"
OURS = "fp8kit's attention, where a call has no mask array and no dropout"

_theirs: dict[str, Callable[..., Any]] = {}  # what "sdpa" is: "attention" and "mask"
_SDPA = functional.scaled_dot_product_attention
_DEVICES = ("cuda",)  # where it is as fast as torch's
_WIDEST = 128  # features of a head on a GPU
_BEYOND = ("position_bias", "softcap", "s_aux", "sinks")  # what fp8kit's operation is not given
_BY_NAME = re.compile(r"""["']sdpa["']""")


# --- what transformers calls --------------------------------------------------------------------------------


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor | None]:
    """o (b, s_q, h, d_v) of an attention of transformers, and None. ``query``: (b, h, s_q, d); ``key``,
    ``value``: (b, g, s_kv, d) and (b, g, s_kv, d_v); the rest as "sdpa" takes it. A mask that ``mask`` has
    made may be a window."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = -1
    if isinstance(attention_mask, Tensor) and attention_mask.ndim == 4 and attention_mask.shape[2] == 0:
        window, attention_mask, causal = attention_mask.shape[3], None, True
    plain = attention_mask is None and dropout == 0 and not more.get("output_attentions")
    if plain and isinstance(causal, bool) and all(more.get(name) is None for name in _BEYOND):
        cast = autocast_dtype(query)
        if cast is not None and query.dtype in FLOATS:
            query, key, value = query.to(cast), key.to(cast), value.to(cast)
        if _fits(module, query, key, value, causal, scaling):
            return _attended(query, key, value, causal, scaling, window), None
    if window >= 0:
        attention_mask = _band(query.shape[2], key.shape[2], window, query.device)
    asked: dict[str, Any] = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **more}
    return _theirs["attention"](  # type: ignore[no-any-return]
        module, query, key, value, attention_mask, **asked
    )


def mask(**given: Any) -> Tensor | None:
    """What an attention's mask is: None where it is causal by its argument, or where all rows see all
    columns; a bool tensor (1, 1, 0, W) where row i sees columns i - W + 1 ... i; else that of "sdpa"."""
    of = given.get
    rows, columns, first, window = of("q_length"), of("kv_length"), of("q_offset", 0), of("local_size")
    if of("attention_mask") is None and rows is not None and not exporting() and not torch.jit.is_tracing():
        if of("allow_is_bidirectional_skip", False) and (window is None or columns < window):
            return None
        whole = rows == columns and of("kv_offset", 0) == 0 and not isinstance(first, Tensor) and first == 0
        if whole and of("allow_is_causal_skip", True):
            if window is None or columns < window:  # as "sdpa", which then looks at the module's is_causal
                return None
            config = of("config")
            chunked = getattr(config, "attention_chunk_size", None) is not None
            here = torch.empty((1, 1, 0, window), dtype=torch.bool, device=of("device"))
            known = here.device.type in _DEVICES and _torchs_own()
            if known and not chunked and window == getattr(config, "sliding_window", None):
                return here
    return _theirs["mask"](**given)  # type: ignore[no-any-return]


def _fits(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, causal: bool, scaling: Any) -> bool:
    """Whether fp8kit's operation computes what "sdpa" does for these without a mask, and no slower. A single
    row is left to "sdpa": each step of a generation has another number of columns, and would be planned
    anew."""
    if any(type(part) is not Tensor or part.ndim != 4 for part in (query, key, value)):
        return False
    (batch, heads, rows, d), (_, groups, columns, _), d_v = query.shape, key.shape, value.shape[3]
    if rows < 2 or (causal and rows != columns) or heads != groups * _repeats(module, heads, groups):
        return False
    if key.shape != (batch, groups, columns, d) or value.shape[:3] != key.shape[:3]:
        return False
    if query.dtype not in FLOATS or not query.dtype == key.dtype == value.dtype:
        return False
    if not (scaling is None or (isinstance(scaling, float) and scaling > 0)):
        return False
    if query.device.type not in _DEVICES or not _torchs_own() or exporting() or torch.jit.is_tracing():
        return False
    if query.device.type == "cpu":
        return True
    narrow = query.dtype != torch.float32 and max(d, d_v) <= _WIDEST and not d % 8 and not d_v % 8
    return narrow and _has_kernels(query.device.index)


def _torchs_own() -> bool:
    """Whether nobody has asked for another attention: by a function in the place of torch's, as its context
    parallelism puts there, by a mode that sees calls of it, or for some of its kernels alone
    (``sdpa_kernel``)."""
    return functional.scaled_dot_product_attention is _SDPA and _any_kernel() and not function_modes()


@torch.compiler.assume_constant_result
def _any_kernel() -> bool:
    """Whether ``scaled_dot_product_attention`` may choose among all its kernels."""
    kernels = torch.backends.cuda
    return kernels.flash_sdp_enabled() and kernels.mem_efficient_sdp_enabled() and kernels.math_sdp_enabled()


def _repeats(module: nn.Module, heads: int, groups: int) -> int:
    """How many query heads "sdpa" has for each head of the keys."""
    return 1 if heads == groups else getattr(module, "num_key_value_groups", 1)


@constant_result
def _has_kernels(index: int) -> bool:
    """Whether a GPU is one of those for which there are kernels no slower than torch's: Hopper and later."""
    return torch.cuda.get_device_capability(index) >= (9, 0)


def _attended(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scaling: float | None, window: int
) -> Tensor:
    (batch, heads, rows, d), groups, d_v = query.shape, key.shape[1], value.shape[3]
    kind, seen = ("causal", (max(window - 1, -1), 0)) if causal else ("no_mask", (-1, -1))
    exactly = policy_now().deterministic or torch.are_deterministic_algorithms_enabled()
    fields = heads, d, groups, "bshd", kind, scaling or 0.0, 0.0, exactly, "separate", d_v, seen
    parts = {name: part.transpose(1, 2) for name, part in zip("qkv", (query, key, value), strict=True)}
    o: Tensor = apply(attention, spec_for("AttentionSpec", *fields), parts)["o"]
    return o.view(batch, rows, heads, d_v)


def _band(rows: int, columns: int, window: int, device: torch.device) -> Tensor:
    """The mask that a window stands for, bool (1, 1, rows, columns), True where a row sees a column."""
    behind = torch.arange(rows, device=device)[:, None] - torch.arange(columns, device=device)
    return ((behind >= 0) & (behind < window))[None, None]


# --- which models have it -----------------------------------------------------------------------------------


def register() -> None:
    """Make the name known to transformers, where that has been imported."""
    if _theirs or "transformers.modeling_utils" not in sys.modules:
        return
    from transformers import AttentionInterface, AttentionMaskInterface

    _theirs.update(attention=AttentionInterface()[THEIRS], mask=AttentionMaskInterface()[THEIRS])
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)


def models_of(model: nn.Module) -> dict[str, nn.Module]:
    """The models of transformers in ``model`` by their names there, those within others left out."""
    known, found = sys.modules.get("transformers.modeling_utils"), {}
    for name, part in model.named_modules() if known is not None else ():
        within = any(not outer or name.startswith(f"{outer}.") for outer in found)
        if not within and isinstance(part, known.PreTrainedModel):  # type: ignore[union-attr]
            found[name] = part
    return found


def _configs(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """(a module's attributes, a name among them, the configuration there), of all modules."""
    kind = sys.modules["transformers.configuration_utils"].PreTrainedConfig
    for part in model.modules():
        yield from [
            (vars(part), name, value) for name, value in vars(part).items() if isinstance(value, kind)
        ]


def why_not(model: nn.Module) -> str:
    """Why a model of transformers keeps its own attention, "" where it need not."""
    names = {config._attn_implementation for _, _, config in _configs(model)} - {NAME, THEIRS}
    if names:
        return f"its attention is {', '.join(sorted(map(repr, names)))}, not {THEIRS!r}"
    known = sys.modules["transformers.modeling_utils"].PreTrainedModel
    kinds = {type(part) for part in model.modules()}
    for kind in [kind for kind in kinds if issubclass(kind, known)]:
        if not kind._can_set_attn_implementation():
            return f"{kind.__name__} calls its attention by no name that could be another one"
        if not kind._supports_flash_attn:
            return f"{kind.__name__} may need an array for its mask: it has no flash attention"
    for name in sorted({kind.__module__ for kind in kinds if kind.__module__.partition(".")[0] != "torch"}):
        try:
            code = inspect.getsource(sys.modules[name])
        except (OSError, TypeError, KeyError):
            return f"the source of {name} is not there to be looked at"
        if not name.startswith("fp8kit_torch.") and _BY_NAME.search(code):
            return f"{name} asks for {THEIRS!r} by its name"
    return ""


def take_over(model: nn.Module, layers: type[nn.Module]) -> None:
    """Have fp8kit's attention in the models of transformers in ``model`` that contain such ``layers``, where
    ``why_not`` says nothing. Their configurations become copies, which no other model shares."""
    chosen: dict[int, Any] = {}
    for part in models_of(model).values():
        if any(isinstance(layer, layers) for layer in part.modules()) and not why_not(part):
            chosen |= {id(config): config for _, _, config in _configs(part)}
    if all(config._attn_implementation == NAME for config in chosen.values()):
        return
    register()
    memo: dict[int, Any] = {}
    copies = {key: copy.deepcopy(config, memo) for key, config in chosen.items()}
    for config in copies.values():
        config._attn_implementation_internal = NAME  # and not those within it
    for attributes, name, config in list(_configs(model)):
        attributes[name] = copies.get(id(config), config)


def hand_back(model: nn.Module) -> None:
    """Undo ``take_over``."""
    for part in models_of(model).values():
        for _, _, config in _configs(part):
            if config._attn_implementation == NAME:
                config._attn_implementation_internal = THEIRS


def said_of(model: nn.Module) -> str:
    """Which attention a model of transformers has, and why it is not fp8kit's."""
    if all(config._attn_implementation == NAME for _, _, config in _configs(model)):
        device = next(model.parameters()).device
        fast = device.type in _DEVICES and (device.type == "cpu" or _has_kernels(device.index))
        name = {"cuda": "GPU", "cpu": "CPU"}.get(device.type, device.type)
        return OURS if fast or device.type == "meta" else f"{OURS}; on this {name}: torch's"
    return why_not(model) or "not fp8kit's, though it could be: convert was not asked to"
