"""``autocast``: fp8kit's, for torch: it may also be entered inside a function that ``torch.compile`` traces.

There the states that its modules touch are known when the function is traced, and their update becomes a part
of the graph.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from fp8kit.arguments import flag, named_well, want_known, without_unknown
from fp8kit.autocast import WANTED, AutocastState, _thread, entered, traced_active
from fp8kit.autocast import autocast as _autocast
from fp8kit.collectives import Collectives
from fp8kit.errors import RecipeError
from fp8kit.execution.codec import encode
from fp8kit.lru import LRU
from fp8kit.recipe import Recipe
from fp8kit.recipe_fields import by_key, of_parts, with_key
from fp8kit_torch.arguments import not_compiled
from fp8kit_torch.checkpoint_state import hand_over, waiting
from fp8kit_torch.collectives import is_group
from fp8kit_torch.constants import constant_result
from fp8kit_torch.library import update_
from fp8kit_torch.state import ScalingState

# recipes of compiled functions' own autocasts, by what their parts say
_TRACED: LRU[str, Recipe] = LRU(256)


class autocast(_autocast):
    """Context manager and decorator: modules within compute in FP8. ``fp8kit.autocast`` says the rest.

    * ``enabled``, ``calibrating``, ``recipe``: as there; ``_graph``: True leaves the update of scales to an
      autocast around this one, and there is none without one: amaxes stay where they were recorded, as in
      Transformer Engine, whose graphs ask for it. ``check_finite`` is
      ``fp8kit.autocast``'s alone: use that one.
    * ``amax_reduction_group``: processes over which delayed scaling's amaxes are reduced by their maximum
      before each update, where the recipe has ``reduce_amax``: a process group of ``torch.distributed``, None
      for all processes. They run the same layers, in the same order. Within a compiled function that opens
      the autocast itself: None only.

    Inside or around a compiled function; modules see the innermost one of their thread or task. Raises
    RecipeError for wrong arguments.
    """

    traced: list[tuple[str, ScalingState]] | None = None

    @without_unknown
    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: object = None,
        _graph: bool = False,
        **unknown: Any,
    ) -> None:
        if unknown:
            want_known(type(self), unknown)
        super().__init__(enabled, calibrating, recipe, amax_reduction_group)
        self._leaves_scales = _graph is not False and flag("autocast", "_graph", _graph)
        if self._leaves_scales and torch.compiler.is_compiling():
            raise not_compiled("_graph of autocast")

    def _no_recipe(self, recipe: object) -> RecipeError:
        if torch.compiler.is_compiling():  # Dynamo shows what an error is made of, not what it says
            return RecipeError(f"autocast: recipe: expected {WANTED}")
        return super()._no_recipe(recipe)

    def _want_group(self, group: object) -> None:
        if not (is_group(group) or isinstance(group, Collectives)):
            wanted = "None or a process group of torch.distributed"
            raise RecipeError("autocast", "amax_reduction_group", repr(group), wanted)

    def __enter__(self) -> autocast:
        if not torch.compiler.is_compiling():
            if waiting:
                hand_over()
            self.traced = None
            super().__enter__()
            return self
        stack = _thread.stack
        outer = stack[-1][0] if stack else None
        inherited = outer.traced if isinstance(outer, autocast) else None
        self.owner = inherited is None and (self.enabled or self.calibrating) and not traced_active()
        self.traced = [] if self.owner else inherited
        self.tracing = True
        recipe, key = self.recipe, ""
        if self.enabled or self.calibrating:
            key = recipe.trace_key or _key_of(recipe.parts())
        state = AutocastState(self.enabled, self.calibrating, recipe, len(stack) + 1, False, key)
        stack.append((self, state))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.tracing:
            if self._leaves_scales and self._open:
                self._entry().touched = {}
            super().__exit__(kind, error, trace)
            return
        if torch.compiler.is_compiling():
            self._leave(kind)
        else:  # behind what was left untraced
            _leave_untraced(self, kind)

    def _leave(self, kind: type[BaseException] | None) -> None:
        _thread.stack.pop()
        self.tracing = False
        if self.owner and self.traced and kind is None:
            groups: dict[str, list[ScalingState]] = {}
            for text, state in self.traced:
                groups.setdefault(text, []).append(state)
            for text, states in groups.items():
                scales, inverses = [state.scale for state in states], [state.scale_inv for state in states]
                update_(scales, inverses, [state.amax_history for state in states], text, True)
        if self.owner and kind is not None:  # one within it leaves what was recorded to the outermost's end
            for _, state in self.traced or ():
                state.drop()
        self.traced = None

    def touched_untraced(self, state: Any, recipe: Recipe, training: bool) -> bool:
        if self.traced is None:
            return False
        if training or self.calibrating:
            _touch(self.traced, state, encode(recipe.history))
        return True


@torch.compiler.disable
def _leave_untraced(scope: autocast, kind: type[BaseException] | None) -> None:
    scope._leave(kind)


def _touch(traced: list[tuple[str, ScalingState]], state: ScalingState, history: str) -> None:
    if not any(other is state for _, other in traced):
        traced.append((history, state))


def reduction_group() -> Any:
    """The process group of the innermost autocast, None for all processes."""
    stack = entered()
    return getattr(stack[-1][0], "amax_reduction_group", None) if stack else None


def touch_traced(state: ScalingState, history: str) -> bool:
    """Within a compiled function: note that ``state`` recorded amaxes, for the graph to update it by the
    ``AmaxHistory`` of this text. False where the autocast that will end is around the function, and updates
    it."""
    stack = _thread.stack
    scope = stack[-1][0] if stack else None
    touched = scope.traced if isinstance(scope, autocast) else None
    if touched is None:
        return False
    _touch(touched, state, history)
    return True


@named_well
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: object = None,
    _graph: bool = False,
) -> autocast:
    """``autocast`` under the name and with the argument names that it had before."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)


def recipe_key(state: AutocastState) -> str:
    """Within ``torch.compile``: the key of the recipe in force, which is guarded by it, or by its fields."""
    return state.key or state.recipe.trace_key or _key_of(state.recipe.parts())


@constant_result
def _key_of(parts: tuple[Any, ...]) -> str:
    """The key of the recipe with these parts."""
    made = _TRACED.make(f"{parts}", lambda text: with_key(of_parts(parts).fixed, text))
    return made.trace_key


def layer_recipe(key: str, layer: tuple[str, str]) -> Recipe | None:
    """What the recipe with this key says for a ``layer`` of that class and name; None: high precision."""
    return by_key(key).for_layer(*layer)


@constant_result
def history_text(key: str, layer: tuple[str, str]) -> str:
    """The text of the ``AmaxHistory`` of a layer's recipe; "" where it has none."""
    recipe = layer_recipe(key, layer)
    return "" if recipe is None or recipe.history is None else encode(recipe.history)


@constant_result
def needs_rng(key: str, layer: tuple[str, str]) -> bool:
    """Whether casts of a layer under a recipe draw random bits."""
    recipe = layer_recipe(key, layer)
    return recipe is not None and recipe.quantization.needs_rng


@constant_result
def keeps_weights(key: str, layer: tuple[str, str]) -> bool:
    """Whether a layer under a recipe keeps its quantised weights from micro-batch to micro-batch: not in high
    precision, nor where each cast of a weight draws random bits."""
    recipe = layer_recipe(key, layer)
    return recipe is not None and not recipe.quantization.random_weight
