"""Gated MLPs, ``down_proj(act(gate_proj(x)) * up_proj(x))``, whose three layers ``convert`` has replaced:
under delayed scaling they run as one operation, ``fp8kit.ops.gated_mlp``.

Each layer keeps its parameters, its FP8 state and its place, and its operands are cast by that state as
before, x by gate_proj's for up_proj too, which has seen the same x. An MLP is known by a trial of its own
forward, which is repeated where something that it may read has been replaced. That forward runs wherever
something would be passed by: hooks, another module in a layer's place, an inspector, weights that are held in
FP8. Within torch.compile that forward is traced on the meta device, for what it depends on to be guarded, and
the graph has the operation.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter

from fp8kit import inspection, scaled_products
from fp8kit.autocast import AutocastState, current, traced_state
from fp8kit.execution.codec import decode, encode
from fp8kit.layers.fp8_layer import scale_names
from fp8kit.ops.gated_mlp import GatedMLPSpec, gated_activations, gated_mlp, is_fused
from fp8kit.ops.product import ProductSpec
from fp8kit.quantization import Quantization
from fp8kit_torch import recompute, torch_checkpoint, torch_compat
from fp8kit_torch.autocast import layer_recipe, recipe_key
from fp8kit_torch.call import prepare, run
from fp8kit_torch.constants import constant_result, exporting
from fp8kit_torch.converted import ConvertedLinear
from fp8kit_torch.library import trace
from fp8kit_torch.state import StateBinding
from fp8kit_torch.torch_compat import own_modules, own_parameters, twin_of, unseen

LAYERS = ("gate_proj", "up_proj", "down_proj")
PREFIXES = ("gate_", "up_", "down_")
_SCALES = scale_names(PREFIXES)
_TRIED = "_fp8kit_tried"  # where such an MLP has its last trial
_TRIALS = 8  # of which there are no more: something is set anew at each call
_OF_ALL = frozenset([*vars(nn.Module()), _TRIED])  # attributes that tell nothing of a forward
Layers = tuple[ConvertedLinear, ConvertedLinear, ConvertedLinear]


class _Tried(NamedTuple):
    """What a trial of an MLP read, the name of the activation that it found, "" for none, and how many there
    were before."""

    read: list[Any]
    activation: str
    before: int = 0


class _Found(NamedTuple):
    """What an MLP's call found. ``of``: quantisation, activation and the layers' own specs; ``parts``: the
    layers' bindings, which ``binding`` joins."""

    of: tuple[Any, ...]
    spec: GatedMLPSpec | None
    parts: tuple[StateBinding, ...] = ()
    binding: StateBinding | None = None


# the last call's first, then those of other recipes
_found: weakref.WeakKeyDictionary[nn.Module, tuple[_Found, ...]] = weakref.WeakKeyDictionary()
_MOST = 8


class GatedMLP(nn.Module):
    """What an MLP is besides its own class (``standing_for``)."""

    def forward(self, *args: Any, **named: Any) -> Any:
        """What the MLP's own forward gives."""
        if len(args) == 1 and not named:
            y = (_compiled if torch.compiler.is_compiling() else _fused)(self, args[0])
            if y is not None:
                return y
        return super().forward(*args, **named)  # type: ignore[misc]

    @torch.compiler.assume_constant_result
    def _fp8kit_activation(self) -> str:
        """Within ``torch.compile``: name of the activation of what runs as one operation; "" for an MLP that
        runs layer by layer."""
        return "" if _passed_by(self) else activation(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {name: value for name, value in self.__getstate__().items() if name != _TRIED}
        return _empty, (_own_class(type(self)),), state


@cache
def _standing_for(kind: type[nn.Module]) -> type[Any]:
    """The class of such an MLP: an instance of its own class ``kind``, by whose name it goes."""
    doc = f"A {kind.__name__} that runs as one operation where it can."
    return type(kind.__name__, (GatedMLP, kind), {"__doc__": doc, "__module__": kind.__module__})


def _own_class(kind: type[nn.Module]) -> type[nn.Module]:
    """An MLP's own class, also where a library has made another one of that of ``standing_for``."""
    return kind.__mro__[kind.__mro__.index(GatedMLP) + 1]


def _own_forward(mlp: nn.Module) -> Any:
    """An MLP's forward as its own class has it."""
    return super(GatedMLP, mlp).forward if isinstance(mlp, GatedMLP) else mlp.forward  # type: ignore[misc]


def _empty(kind: type[nn.Module]) -> Any:
    made = _standing_for(kind)
    return made.__new__(made)


# --- which MLPs ---------------------------------------------------------------------------------------------


def fuse(model: nn.Module) -> None:
    """Have every MLP of ``model`` run as one operation that is known by what its forward does."""
    for mlp in list(model.modules()):
        if not isinstance(mlp, GatedMLP | torch.jit.ScriptModule) and (activation := _activation_of(mlp)):
            mlp.__class__ = _standing_for(type(mlp))
            vars(mlp)[_TRIED] = _Tried(_read(mlp), activation)


def separate(model: nn.Module) -> None:
    """Undo ``fuse``."""
    for mlp in model.modules():
        if isinstance(mlp, GatedMLP):
            own = _own_class(type(mlp))
            if type(mlp) is _standing_for(own):
                mlp.__class__ = own
            vars(mlp).pop(_TRIED, None)
            _found.pop(mlp, None)


def _read(mlp: nn.Module) -> list[Any]:
    """What the MLP's forward may depend on beside its layers, and that forward."""
    forward = _own_forward(mlp)
    found = [getattr(forward, "__func__", forward)]
    for name, part in own_modules(mlp).items():
        if name not in LAYERS:
            found.append(part)
            if part is not None:
                found += [own for key, own in vars(part).items() if key not in _OF_ALL]
    return found + [own for key, own in vars(mlp).items() if key not in _OF_ALL]


def activation(mlp: GatedMLP) -> str:
    """Name of the activation of the MLP as it is now, "" for anything else: found out anew where something
    that its forward may depend on has been replaced."""
    tried: _Tried | None = vars(mlp).get(_TRIED)
    read = _read(mlp)
    if tried is None or len(read) != len(tried.read) or any(map(_differ, tried.read, read)):
        before = 0 if tried is None else tried.before + 1
        tried = vars(mlp)[_TRIED] = _Tried(read, _activation_of(mlp) if before < _TRIALS else "", before)
    return tried.activation


class _Given(nn.Module):
    """Stands for a layer in a trial: gives ``y``, and notes what it was called with."""

    def __init__(self, y: Tensor) -> None:
        super().__init__()
        self.y, self.calls = y, list[Any]()

    def forward(self, *args: Any) -> Tensor:
        self.calls.append(args)
        return self.y


def _activation_of(mlp: nn.Module) -> str:
    """Name of the activation of an MLP whose forward is that of this module; "" for anything else."""
    within = own_modules(mlp)
    layers = {within.get(name) for name in LAYERS}
    further = [part for name, part in within.items() if name not in LAYERS and part is not None]
    if len(layers) < len(LAYERS) or not all(isinstance(layer, ConvertedLinear) for layer in layers):
        return ""
    if "forward" in vars(mlp) or len(further) > 1:
        return ""
    if [*mlp.parameters(recurse=False), *mlp.buffers(recurse=False)]:
        return ""
    if any([*part.parameters(), *part.buffers(), *part.children()] or hasattr(part, "p") for part in further):
        return ""  # the activation learns or has parts, or there is dropout
    found = {_trial(mlp, training) for training in (True, False)}
    return found.pop() if len(found) == 1 else ""


def _trial(mlp: nn.Module, training: bool) -> str:
    """``_activation_of`` such an MLP in that mode. Its own forward runs on a few numbers, also on such as no
    limit would let pass, with layers that give what they are told; the gradients count, too."""
    # nothing that is around this call sees it: a checkpoint counts what is saved within
    saving = torch.autograd.graph.saved_tensors_hooks(lambda own: own, lambda own: own)
    random = torch.random.fork_rng(devices=[])
    with torch.inference_mode(False), torch.enable_grad(), unseen(), torch.device("cpu"), saving, random:
        given = x, g, u, y = [own.requires_grad_() for own in _numbers()]
        before, v = [own.detach().clone() for own in given], u.detach().sin()
        parts = [_Given(own) for own in (g, u, y)]
        twin = twin_of(mlp, modules={**own_modules(mlp), **dict(zip(LAYERS, parts, strict=True))})
        vars(twin)["training"] = training
        there = dict(vars(twin))
        try:
            result = _own_forward(twin)(x)
            calls = [args for part in parts for args in part.calls]
            if len(calls) != len(parts) or any(len(part.calls) != 1 for part in parts):
                return ""
            (of_gate,), (of_up,), (act,) = calls
            grads = torch.autograd.grad(act, (g, u), v)
        except Exception:  # of whatever a kernel in it raises that takes no such numbers
            return ""
        if result is not y or of_gate is not x or of_up is not x or act.shape != g.shape:
            return ""
        if _differ_in(there, vars(twin)) or any(map(torch_compat.has_gradient_hooks, given)):
            return ""
        if not all(map(torch.equal, given, before)):
            return ""
        size = 1 + g.abs()
        sizes = size * u.abs(), size * (u * v).abs(), size * v.abs()
        for name in gated_activations():
            one, other = (own.detach().double().requires_grad_() for own in (g, u))
            made = _VALUES[name](one) * other
            wanted = made, *torch.autograd.grad(made, (one, other), v.double())
            if all(map(_near, (act, *grads), wanted, sizes)):
                return name
    return ""


def _numbers() -> tuple[Tensor, ...]:
    """x, what gate and up give of it, and what down gives. gate: the range where activations bend, and up to
    1e5; up: 0.1 to 1e4."""
    at = torch.arange(768, dtype=torch.float32)
    line, signs, half = (at[:384] * 2 - 383) * 6 / 383, 1 - at % 2 * 2, at[:384]
    gate = torch.cat([line, signs[:384] * 10 ** (half % 97 / 19.2)]).view(2, 3, 128)
    up = ((at * 1.7).cos() * 10 ** (at % 13 / 3)).view(2, 3, 128)
    return at[:24].view(2, 3, 4) * 0, gate, up, (1 + at[:30] / 30).view(2, 3, 5)


def _near(found: Tensor, wanted: Tensor, size: Tensor) -> bool:
    """Whether a function is known to a few roundings of its argument, and a product."""
    limit = 16 * torch.finfo(torch.float32).eps * (size + wanted.abs())
    return bool(((found.double() - wanted).abs() <= limit).all())


def _differ(one: object, other: object) -> bool:
    return one is not other


def _differ_in(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether they have other objects or names."""
    return one.keys() != other.keys() or any(map(_differ, one.values(), map(other.__getitem__, one)))


# fp8kit.backends.activation's table, of the first half
_VALUES = {
    "swiglu": nn.functional.silu,
    "geglu": lambda u: nn.functional.gelu(u, approximate="tanh"),
    "qgeglu": lambda u: u * torch.sigmoid(1.702 * u),
    "reglu": torch.relu,
    "sreglu": lambda u: torch.relu(u).square(),
    "glu": torch.sigmoid,
}


# --- a call -------------------------------------------------------------------------------------------------


def _fused(mlp: GatedMLP, x: Any) -> Tensor | None:
    """y of the MLP as one operation; None where its own forward is to run."""
    state = current()
    if state is None or not state.enabled or state.check_finite or inspection.hooks.inspector is not None:
        return None
    if _passed_by(mlp) or type(x) is not Tensor or torch.jit.is_tracing():
        return None
    layers: Layers = tuple(map(own_modules(mlp).__getitem__, LAYERS))  # type: ignore[assignment]
    gate = layers[0]
    if state.recipe.by_layer:
        own = [layer.own_state(state) for layer in layers]
        if own[0] is None or any(each != own[0] for each in own):
            return None
        state = own[0]
    kind = activation(mlp)
    spec = _spec(mlp, layers, gate._fp8_of(state.recipe), kind) if kind else None
    inputs = None if spec is None else _inputs(gate, x, layers)
    if inputs is None:
        return None
    prepared = prepare(gated_mlp, spec, inputs, _SCALES)
    return run(*prepared, _bind(mlp, layers, state))["y"]


def _passed_by(mlp: nn.Module) -> str:
    """What the operation would pass by: what happens in or around a layer besides its product; "" for
    nothing."""
    if torch_compat.any_global_hook():
        return "a hook on all modules"
    for name, part in own_modules(mlp).items():
        if part is None or "forward" in vars(part):
            return f"a forward of {name} that was replaced"
        if torch_compat.has_hooks(part):
            return f"a hook on {name}"
        if name in LAYERS and not isinstance(part, ConvertedLinear):
            return f"{type(part).__name__} as {name}"
        if name in LAYERS and not _is_plain(part):
            return f"{name}'s weight: in FP8, distributed, or with a gradient of its own ways"
    return ""


def layer_by_layer(model: nn.Module) -> dict[str, str]:
    """Each MLP of converted layers in ``model``: why it would run layer by layer under delayed scaling now,
    "" where it would run as one operation."""
    found = {}
    for name, mlp in model.named_modules():
        within = dict(own_modules(mlp).items())  # TorchScript's mapping has no get
        layers = [within.get(own) for own in LAYERS]
        if isinstance(mlp, GatedMLP):
            found[name] = _passed_by(mlp)
            if not found[name]:
                gate, up = (mlp.get_parameter(f"{own}.weight") for own in LAYERS[:2])
                found[name] = (
                    "" if gate.requires_grad is up.requires_grad else "gate_proj or up_proj is frozen"
                )
        elif all(isinstance(layer, ConvertedLinear) for layer in layers):
            known = bool(_activation_of(mlp))
            found[name] = "convert was not asked to" if known else "a forward that no operation has"
    return found


def _is_plain(layer: ConvertedLinear) -> bool:
    """Whether a layer's call would be its operation, on a weight in high precision."""
    return type(layer).forward is ConvertedLinear.forward and _is_plain_now(layer)


def _is_plain_now(layer: ConvertedLinear) -> bool:
    """``_is_plain``, of what a layer's class does not say."""
    if layer.microbatch is not None:
        return False
    if layer.fuse_wgrad_accumulation or layer.delay_wgrad_compute or layer._held is not None:
        return False
    if type(own_parameters(layer).get("weight")) not in (Parameter, Tensor) or layer._part is not None:
        return False
    return not layer._changed()


def _spec(mlp: GatedMLP, layers: Layers, fp8: Quantization, kind: str) -> GatedMLPSpec | None:
    """The operation's spec, the same object for the same request; None for what it does not quantise so."""
    of = (fp8, kind, *(layer._spec for layer in layers))
    known = _found.get(mlp, ())
    if known and not any(map(_differ, known[0].of, of)):
        return known[0].spec
    others = tuple(each for each in known if any(map(_differ, each.of, of)))
    found = next((each for each in known if not any(map(_differ, each.of, of))), None)
    if found is None:
        found = _Found(of, _made([layer._spec.product for layer in layers], fp8, kind))
    _found[mlp] = (found, *others[: _MOST - 1])
    return found.spec


def _made(products: Sequence[ProductSpec], fp8: Quantization, kind: str) -> GatedMLPSpec | None:
    """The operation's spec of the layers' own products; None for what it does not quantise so."""
    if not is_fused(fp8):
        return None
    gate, up, down = [
        replace(own, fp8=fp8, prefix=prefix) for own, prefix in zip(products, PREFIXES, strict=True)
    ]
    if (up.in_features, up.out_features, down.in_features) != (gate.in_features, *[gate.out_features] * 2):
        return None
    return GatedMLPSpec(gate, up, down, activation=kind)


def _inputs(gate: ConvertedLinear, x: Tensor, layers: Layers) -> dict[str, Tensor] | None:
    """The operation's inputs; None for those that a layer refuses, which says so better, and for gradients
    that are not wanted together."""
    inputs = {"x": x}
    for layer, prefix in zip(layers, PREFIXES, strict=True):
        inputs[f"{prefix}weight0"] = layer.weight
        if layer.bias is not None:
            inputs[f"{prefix}bias0"] = layer.bias
    if torch_compat.any_autocast():
        inputs = gate.autocast_inputs(inputs)
    x = inputs["x"]
    if (
        x.ndim == 0
        or x.shape[-1] != gate.in_features
        or not all(own.dtype == x.dtype and own.device == x.device for own in inputs.values())
    ):
        return None
    first, second = (inputs[name].requires_grad for name in ("gate_weight0", "up_weight0"))
    biases = [inputs[name].requires_grad for name in ("gate_bias0", "up_bias0") if name in inputs]
    together = first == second and (first or x.requires_grad or not any(biases))
    return inputs if together or not torch.is_grad_enabled() else None


def _bind(mlp: nn.Module, layers: Layers, state: AutocastState) -> StateBinding:
    """The layers' states as the operation's: what each call of a layer does with its own, in the layers'
    order."""
    idle = recompute.idle()
    training = torch.is_grad_enabled() or (not idle and recompute.first())
    parts = []
    for layer in layers:
        kept = None if idle else recompute.recall(layer)
        layer.note_pass(not training, True)
        parts.append(layer.bind_state(state.recipe, training, training or state.calibrating, kept))
        if not idle and kept is None:
            layer.keep_pass(parts[-1], None)
    found, *others = _found[mlp]
    if len(found.parts) != len(parts) or any(map(_differ, found.parts, parts)):
        found = found._replace(parts=tuple(parts), binding=_joined(parts))
        _found[mlp] = (found, *others)
    assert found.binding is not None
    return found.binding


def _joined(parts: Sequence[StateBinding]) -> StateBinding:
    """Bindings of the layers as one."""
    tables = [
        {
            f"{prefix}{name}": address
            for prefix, part in zip(PREFIXES, parts, strict=True)
            for name, address in part[i].items()  # type: ignore[union-attr]
        }
        for i in range(4)
    ]
    tokens, held = (tuple(one for part in parts for one in part[i]) for i in (4, 5))
    return StateBinding(*tables, tokens, held)


# --- within torch.compile -----------------------------------------------------------------------------------


def _compiled(mlp: GatedMLP, x: Any) -> Tensor | None:
    """``_fused`` in a way that ``torch.compile`` can trace. What the operation follows from is guarded: what
    the MLP's own forward reads, by tracing that on the meta device, which leaves nothing in the graph, and
    what is asked here; as everywhere in torch, no hooks that are registered later."""
    state = traced_state()
    if state is None or not state.enabled or state.check_finite or exporting() or torch_checkpoint.traced():
        return None
    kind = mlp._fp8kit_activation() if type(x) is Tensor else ""
    if not kind:
        return None
    layers: Layers = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)  # type: ignore[assignment]
    inputs = _inputs(layers[0], x, layers) if all(_is_plain_now(layer) for layer in layers) else None
    if inputs is None:
        return None
    texts, names = tuple(layer._spec_text for layer in layers), tuple(layer._layer() for layer in layers)
    spec = _spec_text(kind, texts, recipe_key(state), names, str(x.device))
    if not spec:
        return None
    _own_forward(mlp)(torch.empty_like(x, device="meta"))
    states = [
        layer._traced(state)._replace(gemms=(prefix,))  # type: ignore[union-attr]
        for layer, prefix in zip(layers, PREFIXES, strict=True)
    ]
    return trace(gated_mlp, spec, inputs, states)["y"]


@constant_result
def _spec_text(
    kind: str, specs: tuple[str, ...], recipe: str, layers: tuple[tuple[str, str], ...], where: str
) -> str:
    """The text of the operation's spec, "" where it does not compute that; ``specs``: texts of the layers';
    ``layers``: their classes and names; ``where``: the device."""
    first, *others = [layer_recipe(recipe, layer) for layer in layers]
    if first is None or any(other != first for other in others):
        return ""
    fp8 = scaled_products.for_device(first.quantization, where)
    spec = _made([decode(own).product for own in specs], fp8, kind)
    return "" if spec is None else encode(spec)
