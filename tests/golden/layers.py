"""Programs that native code and PyTorch share: each runs a case by a ``Frontend``, and records what it gives.

What is recorded of a step: outputs, gradients of inputs and parameters, FP8 state, and where an optimiser ran
parameters.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tests.golden.cases import RECIPES, Case
from tests.golden.modules import FUNCTIONS, LAYERS, TORCH_FUNCTIONS, Layer
from tests.golden.values import Angles, Array, Fixed, draw

Record = Callable[[str, Any], None]
STEPS = 3
# constructors that do not take these arguments
NO_DTYPE = ("L2Normalization", "DotProductAttention", "Dropout")
NO_DEVICE = ("L2Normalization", "Dropout")


class Frontend(Protocol):
    """What the programs ask of a frontend. Arrays are its own tensors."""

    def run(self, case: Case, record: Record) -> None:
        """Run a case, from fresh random numbers."""

    def module(self, key: str, layer: Layer, case: Case, **more: Any) -> Any:
        """A module with the parameters of ``values.parameter``."""

    def array(self, host: Any, dtype: str | None = None, grad: bool = False) -> Any:
        """A tensor on the device, rounded to ``dtype``."""

    def angles(self, angles: Angles) -> Any:
        """What its ``RotaryPositionEmbedding`` gives."""

    def function(self, name: str) -> Callable[..., Any]:
        """A function by its name."""

    def is_tensor(self, value: Any) -> bool:
        """Whether a value is one of its tensors."""

    def dtype(self, tensor: Any) -> str:
        """The name of a tensor's dtype."""

    def autocast(self, **options: Any) -> AbstractContextManager[Any]:
        """Its autocast."""

    def no_grad(self) -> AbstractContextManager[Any]:
        """Nothing is recorded for backward within."""

    def backward(self, outputs: list[Any], cotangents: list[Any]) -> None:
        """One backward pass from several outputs."""

    def checkpoint(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Its recomputation."""

    def parameters(self, module: Any) -> dict[str, Any]:
        """The parameters by name."""

    def fp8_state(self, module: Any) -> dict[str, Any]:
        """Scales and histories of delayed scaling by name."""

    def zero_grad(self, module: Any) -> None:
        """Drop the gradients."""

    def optimizer(self, name: str, module: Any, options: Mapping[str, Any]) -> Any:
        """An optimiser of its parameters."""

    def cache(self, **options: Any) -> Any:
        """Its ``InferenceParams``."""

    def reloaded(self, module: Any, fresh: Any, path: Path) -> None:
        """Give ``fresh`` the state of ``module``, by a file."""


def scope(f: Frontend, case: Case) -> AbstractContextManager[Any]:
    """The autocast of the case's recipe, switched off for "none"."""
    recipe = RECIPES[case.recipe]
    return f.autocast(enabled=False) if recipe is None else f.autocast(enabled=True, recipe=recipe)


def arguments(
    f: Frontend, case: Case, key: str, call: Mapping[str, Any], step: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of a call at ``step``, and those among them that want a gradient, by name."""
    leaves: dict[str, Any] = {}

    def made(name: str, value: Any) -> Any:
        if isinstance(value, Array):
            dtype = value.dtype or case.dtype
            found = f.array(draw(f"{key}/{name}", value, step, case.exact), dtype, value.grad)
            if value.grad:
                leaves[name] = found
            return found
        if isinstance(value, Fixed):
            return f.array(np.array(value.values, value.dtype))
        if isinstance(value, Angles):
            return f.angles(value)
        if isinstance(value, tuple) and any(isinstance(part, Array | Fixed | Angles) for part in value):
            return tuple(made(f"{name}{i}", part) for i, part in enumerate(value))
        return value

    return {name: made(name, value) for name, value in call.items()}, leaves


def flat(f: Frontend, outputs: Any) -> list[Any]:
    """The tensors among what a call returned."""
    if isinstance(outputs, tuple | list):
        return [tensor for part in outputs for tensor in flat(f, part)]
    return [outputs] if f.is_tensor(outputs) else []


def cotangents(f: Frontend, case: Case, outputs: list[Any], step: int) -> list[Any]:
    """Gradients of the outputs, smaller at each further step."""
    shapes = [tuple(output.shape) for output in outputs]
    hosts = [draw(f"g{i}", Array(shape), 0, case.exact) for i, shape in enumerate(shapes)]
    return [
        f.array(host * np.float32(2.0**-step), f.dtype(output))
        for host, output in zip(hosts, outputs, strict=True)
    ]


def backward(f: Frontend, case: Case, outputs: list[Any], step: int) -> None:
    """Backward from all outputs that were computed from what wants a gradient."""
    wanted = [output for output in outputs if output.requires_grad]
    f.backward(wanted, cotangents(f, case, wanted, step))


def note(
    f: Frontend, record: Record, at: str, module: Any, outputs: list[Any], leaves: Mapping[str, Any]
) -> None:
    """Record all of a step."""
    for i, output in enumerate(outputs):
        record(f"{at}.y{i or ''}", output)
    for name, leaf in leaves.items():
        record(f"{at}.d.{name}", leaf.grad)
    if module is not None:
        for name, parameter in f.parameters(module).items():
            record(f"{at}.g.{name}", parameter.grad)
        for name, array in f.fp8_state(module).items():
            record(f"{at}.{name}", array)


def train(
    f: Frontend,
    case: Case,
    record: Record,
    module: Any,
    layer: Layer,
    step: int,
    call: Callable[..., Any] | None = None,
    **more: Any,
) -> None:
    """One step of training, recorded. ``call``: what is called in the module's place."""
    kwargs, leaves = arguments(f, case, case.what, layer.call, step)
    f.zero_grad(module)
    with scope(f, case):
        outputs = flat(f, (module if call is None else call)(**kwargs, **more))
    backward(f, case, outputs, step)
    note(f, record, str(step), module, outputs, leaves)


# --- programs -----------------------------------------------------------------------------------------------


def steps(f: Frontend, case: Case, record: Record) -> None:
    """Steps of training on one module."""
    layer = LAYERS[case.what]
    module = f.module(case.what, layer, case)
    for step in range(STEPS):
        train(f, case, record, module, layer, step)


def twice(f: Frontend, case: Case, record: Record) -> None:
    """A module that is called twice in a step."""
    layer = LAYERS[case.what]
    module = f.module(case.what, layer, case)
    for step in range(STEPS):
        f.zero_grad(module)
        (one, leaves), (two, more) = (
            arguments(f, case, f"{case.what}{i}", layer.call, step + i) for i in range(2)
        )
        with scope(f, case):
            outputs = [*flat(f, module(**one)), *flat(f, module(**two))]
        backward(f, case, outputs, step)
        note(f, record, str(step), module, outputs, leaves | {f"{n}1": leaf for n, leaf in more.items()})


def chain(f: Frontend, case: Case, record: Record) -> None:
    """Modules one after the other under one autocast; "high" is the place of one in high precision."""
    names = case.what.split()
    modules = {f"{i}": f.module(name, LAYERS[name], case) for i, name in enumerate(names)}
    for step in range(STEPS):
        kwargs, leaves = arguments(f, case, case.what, LAYERS[names[0]].call, step)
        (x,) = kwargs.values()
        with scope(f, case):
            for i, module in enumerate(modules.values()):
                f.zero_grad(module)
                if i == case.options.get("high"):
                    with f.autocast(enabled=False):
                        x = module(x)
                else:
                    x = module(x)
        backward(f, case, [x], step)
        note(f, record, str(step), None, [x], leaves)
        for i, module in modules.items():
            note(f, record, f"{step}.{i}", module, [], {})


def recompute(f: Frontend, case: Case, record: Record) -> None:
    """A module whose activations are computed once more in backward."""
    layer = LAYERS[case.what]
    module = f.module(case.what, layer, case)
    first, *_ = layer.call

    def call(**kwargs: Any) -> Any:
        x = kwargs.pop(first)
        return f.checkpoint(module, x, **kwargs, **case.options)

    for step in range(STEPS):
        train(f, case, record, module, layer, step, call)


def microbatches(f: Frontend, case: Case, record: Record) -> None:
    """FP8 weights kept across the micro-batches of a step, whose gradients add up."""
    layer = LAYERS[case.what]
    module = f.module(case.what, layer, case)
    for step in range(STEPS):
        f.zero_grad(module)
        for part in range(2):
            kwargs, leaves = arguments(f, case, f"{case.what}{part}", layer.call, step)
            with scope(f, case):
                outputs = flat(f, module(**kwargs, is_first_microbatch=part == 0))
            backward(f, case, outputs, step)
            note(f, record, f"{step}.{part}", module, outputs, leaves)


def calibrating(f: Frontend, case: Case, record: Record) -> None:
    """Amaxes recorded in high precision, with and without gradients; then FP8."""
    layer, recipe = LAYERS[case.what], RECIPES[case.recipe]
    module = f.module(case.what, layer, case)
    for step in range(2):
        kwargs, _ = arguments(f, case, case.what, layer.call, step)
        with f.autocast(enabled=False, calibrating=True, recipe=recipe):
            outputs = flat(f, module(**kwargs))
        note(f, record, str(step), module, outputs, {})
    kwargs, _ = arguments(f, case, case.what, layer.call, 2)
    with f.no_grad(), f.autocast(enabled=True, calibrating=True, recipe=recipe):
        outputs = flat(f, module(**kwargs))
    note(f, record, "no_grad", module, outputs, {})
    train(f, case, record, module, layer, 2)


def evaluation(f: Frontend, case: Case, record: Record) -> None:
    """A forward pass without gradients after a step of training, and training after it."""
    layer = LAYERS[case.what]
    module = f.module(case.what, layer, case)
    train(f, case, record, module, layer, 0)
    module.eval()
    with f.no_grad(), scope(f, case):
        outputs = flat(f, module(**arguments(f, case, case.what, layer.call, 3)[0]))
    note(f, record, "eval", module, outputs, {})
    module.train()
    train(f, case, record, module, layer, 1)


def loaded(f: Frontend, case: Case, record: Record) -> None:
    """A module that goes on from another one's saved state."""
    layer = LAYERS[case.what]
    module, fresh = (f.module(key, layer, case) for key in (case.what, "fresh"))
    for step in range(2):
        train(f, case, record, module, layer, step)
    with tempfile.TemporaryDirectory() as folder:
        f.reloaded(module, fresh, Path(folder) / "state")
    for name, parameter in f.parameters(fresh).items():
        record(f"loaded.p.{name}", parameter)
    train(f, case, record, fresh, layer, 2)


def optimized(f: Frontend, case: Case, record: Record) -> None:
    """Steps of training with an optimiser."""
    layer, options = LAYERS[case.what], dict(case.options)
    module = f.module(case.what, layer, case)
    optimizer = f.optimizer(options.pop("optimizer"), module, options)
    for step in range(STEPS):
        train(f, case, record, module, layer, step)
        optimizer.step()
        for name, parameter in f.parameters(module).items():
            record(f"{step}.p.{name}", parameter)


def function(f: Frontend, case: Case, record: Record) -> None:
    """A function, forward and backward."""
    found = (FUNCTIONS | TORCH_FUNCTIONS)[case.what]
    for step in range(2):
        kwargs, leaves = arguments(f, case, case.what, found.call, step)
        outputs = flat(f, f.function(found.function)(**kwargs))
        backward(f, case, outputs, step)
        note(f, record, str(step), None, outputs, leaves)


# sequences go on, end, come back under their old name, join and change places
_GENERATED = (
    {"a": 5, "b": 3},
    {"a": 1, "b": 1},
    {"b": 2, "a": 1, "c": 7},
    {"c": 1, "b": 1},
    {"a": 2, "c": 1},
)


def inference(f: Frontend, case: Case, record: Record) -> None:
    """A layer that generates over a cache of keys and values, after a step of training."""
    form, rotary = case.options["form"], case.options.get("rotary", False)
    own = {
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "num_gqa_groups": 2,
        "layer_number": 1,
        "attn_input_format": form,
        "self_attn_mask_type": "padding_causal" if form == "thd" else "causal",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    layer = Layer("TransformerLayer", own, {})
    module = f.module("inference", layer, case)
    paged = {"is_paged": True, "total_num_pages": 11, "page_size": 3} if case.options.get("paged") else {}
    cache = f.cache(max_batch_size=3, max_sequence_length=24, qkv_format=form, **paged)
    angles = {"rotary_pos_emb": f.angles(Angles(8, 24))} if rotary else {}
    module.eval()
    for index, counts in enumerate(_GENERATED):
        shape = {
            "sbhd": (max(counts.values()), len(counts), 32),
            "bshd": (len(counts), max(counts.values()), 32),
            "thd": (sum(counts.values()), 32),
        }[form]
        x = f.array(draw("inference", Array(shape), index % 2), case.dtype)
        cache.pre_step(counts)
        with f.no_grad(), scope(f, case):
            record(f"{index}.y", module(x, inference_params=cache, **angles))
    for name, array in zip("kv", cache.convert_paged_to_nonpaged(1), strict=True):
        record(f"cache.{name}", array)


PROGRAMS: dict[str, Callable[[Any, Case, Record], None]] = {
    program.__name__: program
    for program in (
        steps,
        twice,
        chain,
        recompute,
        microbatches,
        calibrating,
        evaluation,
        loaded,
        optimized,
        function,
        inference,
    )
}
