"""Decoding with a cache: the keys and values of tokens that came before, in the collection "cache" (Flax's
and Transformer Engine's names).

``init`` or the first ``apply`` with ``decode=True`` makes the variables ``cached_key``, ``cached_value`` (b,
length, groups, d) and ``cache_index`` int32 () with the length of that call, which itself attends as without
decoding. Every further call, with "cache" mutable, adds its tokens, one or several, and attends to all tokens
so far: the results are those of one call with all tokens (with current scaling each call has amaxes of its
own). A call beyond the length gives NaN. Start with the index 0 and zeros, as ``init`` leaves them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8kit.errors import FormatError, ShapeError
from fp8kit_jax.flax.common import form, want_array

MASKS = ("causal", "causal_bottom_right", "no_mask")


class Past:
    """What one attention module has cached. ``index``: tokens that came before, None in the call that makes
    the cache; ``length``: of the cache."""

    def __init__(self, module: Any, key: Any, value: Any, lengths: Any) -> None:
        op = type(module).__name__
        if module.attn_mask_type not in MASKS or lengths is not None:
            wanted = f"one of {', '.join(MASKS)}, and no lengths, where decode is True"
            raise FormatError(op, "attn_mask_type", repr(module.attn_mask_type), wanted)
        if module.attn_bias_type == "alibi":
            raise FormatError(op, "attn_bias_type", "'alibi'", "another one where decode is True")
        ready = module.has_variable("cache", "cached_key")
        self.module, self.new = module, (key, value)
        self.kept = [
            module.variable("cache", f"cached_{name}", jnp.zeros, layer.shape, layer.dtype)
            for name, layer in (("key", key), ("value", value))
        ]
        self.count = module.variable("cache", "cache_index", lambda: jnp.zeros((), jnp.int32))
        self.index = self.count.value if ready else None
        self.at, self.batch = form(module).index("s"), key.shape[form(module).index("b")]
        self.length, self.fresh = (layer.shape[self.at] for layer in (self.kept[0].value, key))

    def starts(self) -> Any:
        """Returns the first position of every sequence, int32 (b,), None where it is 0."""
        return None if self.index is None else jnp.broadcast_to(self.index, (self.batch,))

    def extended(self, layers: Any, mask: Any, bias: Any) -> tuple[Any, Any, Any]:
        """``layers``, keys and values, of all tokens, the mask of what the new ones do not see, and their
        rows of the bias."""
        if self.index is None:
            return layers, mask, bias
        found = self._extended(self.index, layers, mask, bias)
        for variable, layer in zip(self.kept, found[0], strict=True):
            variable.value = layer
        self.count.value = self.index + self.fresh
        return found

    def structs(self, mask: Any, bias: Any) -> tuple[Any, Any, Any]:
        """What ``extended`` will return, or shapes and dtypes of that. ShapeError for a mask that does not
        fit."""
        if self.index is None:
            return self.new, mask, bias
        mask = None if mask is None else want_array(self.module, "mask", mask)
        return jax.eval_shape(self._extended, self.index, self.new, mask, bias)  # type: ignore[no-any-return]

    def _extended(self, index: Any, layers: Any, mask: Any, bias: Any) -> tuple[Any, Any, Any]:
        """``extended`` of a step that begins at ``index``, which changes no variable."""
        layers = [
            jax.lax.dynamic_update_slice_in_dim(old.value, own.astype(old.value.dtype), index, self.at)
            for old, own in zip(self.kept, layers, strict=True)
        ]
        rows, columns = index + jnp.arange(self.fresh)[:, None], jnp.arange(self.length)
        left, right = self.module.window_size or (-1, -1)
        no_mask = self.module.attn_mask_type == "no_mask"
        hidden = columns >= index + self.fresh if no_mask else columns > rows
        hidden = jnp.broadcast_to(hidden, (1, 1, self.fresh, self.length))
        if left >= 0:
            hidden |= columns < rows - left
        if right >= 0:
            hidden |= columns > rows + right
        if mask is not None:
            try:
                hidden = hidden | (jnp.asarray(mask) != 0)
            except (TypeError, ValueError):
                got, wanted = f"shape {np.shape(mask)}", f"one that fits {hidden.shape}"
                raise ShapeError(type(self.module).__name__, "mask", got, wanted) from None
        if bias is not None and bias.shape[-2] not in (1, self.fresh):
            bias = jax.lax.dynamic_slice_in_dim(bias, index, self.fresh, -2)
        return layers, hidden, bias

    def checked(self, o: Any) -> Any:
        """o, NaN where the tokens go beyond the cache."""
        if self.index is None:
            return o
        return jnp.where(self.index + self.fresh <= self.length, o, jnp.asarray(jnp.nan, o.dtype))
