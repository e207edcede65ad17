"""``AttentionBase``: what attention and layers that are made of others ask of a frontend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fp8kit.arguments import check
from fp8kit.arrays import ArrayView
from fp8kit.attention_quantization import AttentionQuantization
from fp8kit.autocast import current
from fp8kit.errors import ArgumentError
from fp8kit.formats import DType
from fp8kit.layers.base import Branch, as_branch
from fp8kit.layers.context_group import ContextGroup, context_group
from fp8kit.layers.parallel import Grouped


class AttentionBase(Grouped):
    """Base of ``DotProductAttention``, ``MultiheadAttention`` and ``TransformerLayer`` in every frontend."""

    def check_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Check arguments of ``forward`` by name: ArgumentError for one out of its range. Does nothing within
        ``torch.compile``."""
        if not self.is_compiling():
            check(self.layer_name, self.call_rules, arguments)

    # --- context parallelism --------------------------------------------------------------------------------

    # the ranks that divide the sequences; None for one
    context: ContextGroup | None = None
    layer_number: int | None = None

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: Any = "p2p"
    ) -> None:
        """The ranks that divide each sequence, of which rank r has chunks r and 2 P - 1 - r of 2 P; for a
        layer of others, of all its parts.

        * ``cp_group``: a group, a list of two with "a2a+p2p" (the inner one, which exchanges heads, first),
          or None.
        * ``cp_comm_type``: "p2p", "all_gather", "a2a" or "a2a+p2p" (``fp8kit.layers.context_parallel``), or a
          list of them, for layers in turn. ``cp_global_ranks``, ``cp_stream``: accepted; the group says the
          ranks, and communication is on the stream of the kernels.

        ArgumentError if ``cp_group`` is not a group, or holds another number of groups than the way needs.
        """
        self.constructor_rules["cp_comm_type"](self.layer_name, "cp_comm_type", cp_comm_type)
        groups = cp_group if isinstance(cp_group, list | tuple) else [cp_group]
        ranks = [self.ranks_of("cp_group", group) for group in groups]
        self.context = context_group(self.layer_name, ranks, cp_comm_type, self.layer_number)
        for part in self.grouped_parts():
            if isinstance(part, AttentionBase):
                part.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def index_array(self, values: np.ndarray[Any, Any], like: Any) -> Any:
        """Returns an int32 array of the host, on the device of ``like``."""
        raise NotImplementedError

    def indices(self, function: Callable[..., Any], *arrays: Any) -> Any:
        """Returns the int32 array that ``function`` makes of a library of arrays and ``arrays`` in it."""
        raise NotImplementedError

    # --- FP8 attention --------------------------------------------------------------------------------------

    def attention_quantization(self) -> AttentionQuantization | None:
        """Returns how the autocast in force wants this layer's attention quantised; None for high
        precision."""
        state = current()
        if state is None or not state.enabled:
            return None
        return state.recipe.attention_for(getattr(self, "name", None) or "")

    def attention_spec(
        self, quantises: bool, fields: tuple[Any, ...], plain_backward: bool = False
    ) -> tuple[Any, bool]:
        """Returns an ``AttentionSpec`` of these first fields, as the autocast in force has it where the call
        ``quantises``, with its ``plain_backward``, and whether that draws random numbers besides
        dropout's."""
        found = self.attention_quantization() if quantises else None
        if found is None:
            return self.spec_for("AttentionSpec", *fields), False
        return self.spec_for("AttentionSpec", *fields, False, False, found, plain_backward), found.needs_rng

    # --- layers that are parts of this one ------------------------------------------------------------------

    def grouped_parts(self) -> list[Grouped]:
        return [part for part in self.parts.values() if isinstance(part, Grouped)]

    @property
    def parts(self) -> Mapping[str, Any]:
        """The layer's own layers by name."""
        raise NotImplementedError

    def call_part(self, part: Any, x: Any, is_first_microbatch: bool | None, **asked: Any) -> Any:
        """What the ``compute`` of a layer returns for ``x``; ``asked``: its further arguments."""
        return part(x, is_first_microbatch=is_first_microbatch, part=asked)

    def call_branch(self, part: Any, x: Any, is_first_microbatch: bool | None, **asked: Any) -> Branch:
        """``call_part`` of a layer that may return a ``Branch``. ArgumentError where what wraps one would
        have to give more than y."""
        if not isinstance(part, Grouped):
            asked.pop("residual", None)  # which is x
            if asked.get("return_norm"):
                name = next(name for name, own in self.parts.items() if own is part)
                wanted = "a layer of this library, which gives its norm's output too"
                raise ArgumentError(self.layer_name, name, f"a {type(part).__name__}", wanted)
        value = self.call_part(part, x, is_first_microbatch, **asked)
        return as_branch(self.layer_name, value, x, bool(asked.get("return_norm")))

    def check_part(self, operation: str, name: str, x: Any) -> None:
        """Check the parameters of the part ``name`` against inputs like ``x``: FormatError for another dtype,
        in PyTorch BackendError for another device. Not called within ``torch.compile``."""
        raise NotImplementedError

    def may_fuse(self, *parts: Any) -> bool:
        """Whether the last product of these parts may add the residual: True where no hook or override could
        read what a part returns."""
        return True

    def has_hooks(self, part: Any) -> bool:
        """Whether calling ``part`` may first run a hook or an override, which may replace its parameters."""
        return False

    def add_offset(self, zeros: bool, device: Any) -> None:
        """Make ``softmax_offset`` of an attention that learns none, where this frontend has that attribute:
        ``zeros``, or None."""

    # --- arrays ---------------------------------------------------------------------------------------------

    def dtype_of(self, kind: DType) -> Any:
        """Returns a dtype of fp8kit as one of the frontend."""
        return kind

    def kind_of(self, dtype: Any) -> DType:
        """Returns a dtype of the frontend as one of fp8kit."""
        return dtype  # type: ignore[no-any-return]

    def constant(self, argument: str, value: Any, like: Any) -> Any:
        """Returns the array of an argument, without gradient, on the device of ``like``. FormatError if it is
        not an array, in PyTorch ArgumentError."""
        raise NotImplementedError

    def same_dtype(self, value: Any, like: Any) -> Any:
        """``value``, differentiable, in the dtype of ``like``."""
        return value

    def widened(self, value: Any) -> Any:
        """``value``, differentiable, in float32."""
        return value

    def detached(self, parameter: Any, like: Any) -> Any:
        """Returns a parameter whose gradient another operation makes, in the dtype of ``like``."""
        raise NotImplementedError

    def host_views(self, inputs: Mapping[str, Any]) -> Mapping[str, ArrayView]:
        """Those of the inputs by name whose values may be looked at without waiting for a device."""
        raise NotImplementedError

    def host_values(self, value: Any) -> np.ndarray[Any, Any] | None:
        """Returns the values of an array, which may wait for its device; None where it has none."""
        raise NotImplementedError

    def sums_of_mask(self, mask: Any) -> Any:
        """Running sums int32 (b + 1,) of the lengths that a padding mask (b, 1, 1, s) leaves. FormatError for
        another dtype than bool, ShapeError where padding is not last."""
        raise NotImplementedError

    def slopes(self, heads: int, device: Any) -> Any:
        """ALiBi's slopes, float32 (heads,)."""
        raise NotImplementedError

    def is_deterministic(self) -> bool:
        """Whether the policy in force wants the same bits from call to call."""
        raise NotImplementedError
