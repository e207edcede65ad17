"""What programs read of a layer of Transformer Engine: whether it computes in FP8, how its weights are held,
its scales and quantizers. Each is looked up when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8kit.arguments import flag, integer
from fp8kit.autocast import current
from fp8kit.errors import ArgumentError
from fp8kit.layer_recipes import CustomRecipe, QuantizerRole
from fp8kit.recipe import Recipe
from fp8kit_torch.availability import get_default_recipe
from fp8kit_torch.operand_tensor import of_cached
from fp8kit_torch.te_compat.recipe_quantizers import quantizer_of_operand

_STATES = ("scaling_fwd", "scaling_bwd")


class Meta(dict[str, Any]):
    """A layer's ``fp8_meta``: its states of delayed scaling by direction, "scaling_fwd" and "scaling_bwd".

    What else Transformer Engine keeps there, and programs write, is beside them: it can be read by its key,
    and is neither counted nor gone through. "recipe" is that of the autocast around; outside of one it is
    what was written, or the default.
    """

    def __init__(self, states: Mapping[str, Any] = {}, beside: Mapping[str, Any] = {}) -> None:
        super().__init__(states)
        self.beside = dict(beside)

    def __setitem__(self, key: str, value: Any) -> None:
        if key in _STATES:
            super().__setitem__(key, value)
        else:
            self.beside[key] = value

    def __missing__(self, key: str) -> Any:
        if key == "recipe":
            state = current()
            return self.beside.get(key, get_default_recipe()) if state is None else state.recipe
        return self.beside[key]

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in self.beside or key == "recipe"

    # by the methods above, as dict's are not
    get = MutableMapping.get  # type: ignore[assignment]
    setdefault = MutableMapping.setdefault
    update = MutableMapping.update

    def pop(self, key: str, *default: Any) -> Any:
        """A state, or what is beside them."""
        return super().pop(key, *default) if key in _STATES else self.beside.pop(key, *default)

    def __delitem__(self, key: str) -> None:
        self.pop(key)


class Workspaces(dict[str, Any]):
    """A layer's weights as it has cast them for the micro-batches of a step, by name: "weight", "fc1_weight",
    "weight0"... Once ``clear`` or another method has taken one out, the layer casts all anew."""

    def __init__(self, layer: Any, found: Mapping[str, Any]) -> None:
        super().__init__(found)
        self._layer = layer

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self._layer.drop_workspaces()

    def clear(self) -> None:
        """Let the layer cast its weights anew."""
        super().clear()
        self._layer.drop_workspaces()

    pop = MutableMapping.pop
    popitem = MutableMapping.popitem


def _after(prefix: str, named: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name.removeprefix(prefix), each) for name, each in named.items() if name.startswith(prefix)]


class ParamInitMeta(NamedTuple):
    """How a parameter starts: ``init_fn``, and the slot of ``quantizers`` that casts it, None for one that
    none does."""

    init_fn: Any
    fp8_meta_index: int | None


class TransformerEngineState:
    """Of a layer whose GEMMs may run in FP8."""

    gemms: tuple[str, ...]
    fp8_meta: dict[str, Any]
    prepare: Any
    weight_inputs: Any
    last_recipe: Recipe | None
    activation_dtype: torch.dtype | None = None  # see ``set_activation_dtype``
    fsdp_group: Any = None
    ub_name: str | None = None
    rng_tracker: Any = None
    # who reads the output, and the input's gradient, for ``get_quantizer_roles``
    output_quantizer_role: QuantizerRole | None = None
    grad_input_quantizer_role: QuantizerRole | None = None
    _afresh = False  # see ``fp8_meta_tensors_initialized``

    # --- FP8 at the moment ----------------------------------------------------------------------------------

    @property
    def fp8(self) -> bool:
        """Whether its GEMMs run in FP8 now: within an ``autocast``, by a recipe that does not leave the layer
        out."""
        state = self._scope()
        return state is not None and state.enabled

    @property
    def fp8_calibration(self) -> bool:
        """Whether the innermost autocast calibrates."""
        state = current()
        return state is not None and state.calibrating

    @property
    def fp8_initialized(self) -> bool:
        """Whether it has run in FP8 with delayed scaling, or would run in FP8 now. Programs set it to False,
        so that a layer is set up again: here each call sees to that."""
        return bool(self.fp8_meta) or self.fp8

    @fp8_initialized.setter
    def fp8_initialized(self, value: bool) -> None:
        flag(type(self).__name__, "fp8_initialized", value)

    @property
    def fp8_meta_tensors_initialized(self) -> bool:
        """Whether there are scales and amax histories, in ``fp8_meta``. Set to False: the next use makes new
        ones, unless ``set_extra_state`` does so first."""
        return bool(self.fp8_meta) and not self._afresh

    @fp8_meta_tensors_initialized.setter
    def fp8_meta_tensors_initialized(self, value: bool) -> None:
        own: Any = self
        self._afresh = not flag(type(self).__name__, "fp8_meta_tensors_initialized", value)
        own._binding = None

    @property
    def primary_weights_in_fp8(self) -> bool:
        """Whether its weights are held in FP8 alone: by ``quantized_model_init``, or because a program put
        such parameters there. ArgumentError where somebody sets it to anything else."""
        return getattr(self, "_held", None) is not None

    @primary_weights_in_fp8.setter
    def primary_weights_in_fp8(self, value: bool) -> None:
        if value is not self.primary_weights_in_fp8:
            wanted = f"{self.primary_weights_in_fp8}, what its parameters are"
            raise ArgumentError(type(self).__name__, "primary_weights_in_fp8", value, wanted)

    fp8_parameters = primary_weights_in_fp8

    @property
    def preserve_high_precision_init_val(self) -> bool:
        """Whether such weights keep the values they were cast from."""
        held = getattr(self, "_held", None)
        return held is not None and held.preserve

    @property
    def _fp8_workspaces(self) -> Workspaces:
        """The weights that it keeps for later micro-batches (``is_first_microbatch``)."""
        own: Any = self
        held, found = own._weights, dict(own._workspaces)
        for prefix, weights in self._by_gemm() if held is not None else ():
            parts = {f"w{name}": part for name, part in _after(f"{prefix}w", held.arrays)}
            number = prefix[:-1]
            name = f"weight{number}" if number.isdigit() else f"{prefix}weight"
            if parts:
                found[name] = of_cached(held.key, parts, weights)
        return Workspaces(self, found)

    @_fp8_workspaces.setter
    def _fp8_workspaces(self, found: Mapping[str, Any]) -> None:
        self.drop_workspaces()

    def _by_gemm(self) -> list[tuple[str, list[Tensor]]]:
        """The prefix of each GEMM's names, and its weights."""
        inputs = self.weight_inputs()
        return [
            (prefix, [weight for _, weight in _after(f"{prefix}weight", inputs)]) for prefix in self.gemms
        ]

    def drop_workspaces(self) -> None:
        """Cast the weights anew at the next call, also of a later micro-batch."""
        own: Any = self
        own._weights, own._workspaces = None, {}

    @property
    def param_init_meta(self) -> dict[str, ParamInitMeta]:
        """How each of its parameters starts, and which slot of ``quantizers`` casts it."""
        own: Any = self
        slots = {
            id(weight): 3 * i + 1 for i, (_, weights) in enumerate(self._by_gemm()) for weight in weights
        }
        return {
            name: ParamInitMeta(own._inits.get(name), slots.get(id(parameter)))
            for name, parameter in own.named_parameters(recurse=False)
        }

    def _scope(self) -> Any:
        state = current()
        if state is None or not (state.enabled or state.calibrating) or not state.recipe.by_layer:
            return state
        own: Any = self
        return own.own_state(state)

    @property
    def quantizers(self) -> dict[str, list[Any]]:
        """``fp8_meta``'s keys -> a quantizer for each slot: input, weight, output of each GEMM; grad_output,
        grad_input of each. By the autocast's recipe; outside of FP8 by the one that the layer ran by last,
        none before that."""
        state, outer = self._scope(), current()
        running = state is not None and (state.enabled or state.calibrating)
        recipe, custom = (state.recipe, outer.recipe) if running else (self.last_recipe, None)
        if recipe is None:
            return {"scaling_fwd": [], "scaling_bwd": []}

        numbers = range(len(self.gemms))
        if custom is not None and custom.custom() and self._has_own_roles:
            slots = {"scaling_fwd": 3 * len(numbers), "scaling_bwd": 2 * len(numbers)}
            return {key: self._answers(custom, key == "scaling_fwd", n) for key, n in slots.items()}

        def of(operand: str, gemm: int) -> Any:
            return quantizer_of_operand(recipe, operand, self.prepare, self.fp8_meta, gemm)

        return {
            "scaling_fwd": [of(operand, i) for i in numbers for operand in "xwx"],
            "scaling_bwd": [of("g", i) for i in numbers for _ in range(2)],
        }

    def get_quantizer_roles(self, *, fwd: bool, num_quantizers: int) -> list[QuantizerRole | None] | None:
        """What each slot of ``quantizers`` of one direction is for: input, weight, output of each GEMM in
        turn, or grad_output, grad_input, ``num_quantizers`` in all. An output and an input's gradient, which
        no layer casts, have ``output_quantizer_role`` and ``grad_input_quantizer_role``: None until set.

        A program's own layer may give others: a ``CustomRecipe``'s function answers them in ``quantizers``.
        """
        own: Any = self
        kind, name = own.layer_name, own.name or ""
        ending = self.output_quantizer_role if fwd else self.grad_input_quantizer_role
        operands = ("input", "weight") if fwd else ("grad_output",)
        slots = [*(QuantizerRole(kind, name, operand) for operand in operands), ending]
        return [slots[i % len(slots)] for i in range(num_quantizers)]

    @property
    def _has_own_roles(self) -> bool:
        return type(self).get_quantizer_roles is not TransformerEngineState.get_quantizer_roles

    def _answers(self, recipe: CustomRecipe, fwd: bool, count: int) -> list[Any]:
        roles = self.get_quantizer_roles(fwd=fwd, num_quantizers=count)
        if roles is None or len(roles) != count:
            got, wanted = "None" if roles is None else f"{len(roles)} roles", f"a list of {count} roles"
            raise ArgumentError(f"{type(self).__name__}.get_quantizer_roles", "fwd", got, wanted)
        answer: Any = recipe.qfactory
        return [answer(role) for role in roles]

    # --- scales ---------------------------------------------------------------------------------------------

    def init_fp8_meta_tensors(self, recipe: Recipe) -> None:
        """Make scales (1) and amax histories (0) for a recipe of delayed scaling, where there are none."""
        if recipe.history is not None:
            self.prepare(recipe.history.length)

    def set_meta_tensor(self, fwd: bool, recipe: Recipe) -> None:
        """``init_fp8_meta_tensors``, which makes those of both directions."""
        self.init_fp8_meta_tensors(recipe)

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """``init_fp8_meta_tensors`` by the autocast's recipe; nothing outside of FP8. A layer knows its
        GEMMs."""
        state = self._scope()
        if state is not None and (state.enabled or state.calibrating):
            self.init_fp8_meta_tensors(state.recipe)

    def adjust_amax_history_length(self, length: int, fwd: bool | None = None) -> None:
        """Give the amax histories another length: rows are dropped or added at the end. ``fwd``: both
        directions have one length. The next call within ``autocast`` gives them its recipe's."""
        self.prepare(integer("adjust_amax_history_length", "length", length, 1))

    def get_fp8_meta_tensors(self) -> dict[str, list[Tensor]]:
        """Copies of (scale, scale_inv, amax_history) by ``fp8_meta``'s keys, for
        ``reset_fp8_meta_tensors``."""
        return {name: [part.clone() for part in state.parts] for name, state in self.fp8_meta.items()}

    def reset_fp8_meta_tensors(self, fp8_meta_tensors: Mapping[str, Any] | None = None) -> None:
        """Set scales to 1 and histories to 0, in their memory, or to what ``get_fp8_meta_tensors`` gave."""
        with torch.no_grad():
            for name, state in self.fp8_meta.items():
                if fp8_meta_tensors is None:
                    state.scale.fill_(1.0)
                    state.scale_inv.fill_(1.0)
                    state.amax_history.zero_()
                    continue
                for part, value in zip(state.parts, fp8_meta_tensors[name], strict=True):
                    part.copy_(value)

    # --- parameters -----------------------------------------------------------------------------------------

    @property
    def weight_names(self) -> list[str]:
        """Its weights by their names as parameters."""
        own: Any = self
        weights = {id(weight) for weight in self.weight_inputs().values()}
        return [name for name, parameter in own.named_parameters(recurse=False) if id(parameter) in weights]

    @property
    def bias_names(self) -> list[str]:
        """The biases of its GEMMs by their names as parameters."""
        own: Any = self
        names = [name for name, _ in own.named_parameters(recurse=False)]
        biases = [name.replace("weight", "bias") for name in self.weight_names]
        return [name for name in biases if name in names]

    def get_fp8_params(self) -> list[Tensor] | None:
        """Its weights that are held in FP8 alone; None where none is."""
        own: Any = self
        return [getattr(own, name) for name in self.weight_names] if self.primary_weights_in_fp8 else None

    @property
    def apply_bias(self) -> bool:
        """Whether it adds its bias itself."""
        own: Any = self
        return bool(getattr(own, "use_bias", False)) and not getattr(own, "return_bias", False)

    @property
    def tp_group_initialized(self) -> bool:
        """Whether its group of tensor parallelism is known."""
        own: Any = self
        return getattr(own, "tp_size", 1) == 1 or getattr(own, "tp_group", None) is not None

    @property
    def get_rng_state_tracker(self) -> Any:
        """The constructor's argument."""
        return self.rng_tracker

    @property
    def wgrad_store(self) -> Any:
        """Gradients that ``backward_dw`` hands over."""
        own: Any = self
        return own.waiting

    @property
    def wgrad_accumulation_and_reduce_hooks(self) -> list[Any]:
        """What ``register_wgrad_accumulation_and_reduce_hooks`` was given."""
        return self.wgrad_store.hooks  # type: ignore[no-any-return]

    def module_setattr(self, name: str, value: Any) -> None:
        """Set an attribute as ``torch.nn.Module`` does."""
        torch.nn.Module.__setattr__(self, name, value)  # type: ignore[arg-type]
