"""Passes of a layer that were made before, made again without the Python that led to them.

What a layer's forward pass comes to follows from what is around it and from its modules: which operations, on
which of its input, its parameters and one another's outputs. The first pass of a kind is watched. One like it
runs the same operations as one node of torch's graph, and saves the host most of its time. Passes are alike
where ``Kind`` says so; nothing is guessed: an operation on a tensor that came from anywhere else makes no
script, and hooks, other classes and wrappers' parameters take the plain way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.nn.modules.module import _has_any_global_hook

from fp8kit import settings
from fp8kit.autocast import current
from fp8kit.backends import dispatch
from fp8kit.recipe import Recipe
from fp8kit_torch import recompute
from fp8kit_torch.arguments import autocast_dtype
from fp8kit_torch.draws import next_rng
from fp8kit_torch.memory import KINDS, place_of
from fp8kit_torch.nodes import NO_STATE, Seen, Step, watched
from fp8kit_torch.once import once
from fp8kit_torch.torch_checkpoint import hook

Classes = Mapping[type, Callable[..., Any]]

_LIMIT = 64  # kinds of passes of a layer, lengths of batches mostly; beyond so many all are forgotten
# parameters times rows of a layer of several operations, beyond which the GPU's time is what counts, and
# gradients that are there early
_LARGEST = 2**40
_RNG = -1  # stands for the place of a tensor that is drawn anew
_PLAIN = (Tensor, Parameter)
_PLAIN_OPTIONS = (type(None), str, bool)
_runs = torch._C._will_engine_execute_node


class Kind(NamedTuple):
    """What a pass depends on. ``key``: what is compared by value: the input's form, the options, of each part
    who it is, without holding it, its mode and how often it was changed, of each parameter its form.
    ``parameters``: each another one. A script takes a pass's own parts and parameters by their places here,
    and holds none of them."""

    key: tuple[Any, ...]
    recipe: Recipe | None  # None in high precision
    kernels: Any
    parts: list[Any]
    parameters: list[Parameter]


def by_script(
    layer: Any, own: type, classes: Classes, x: Any, options: Sequence[Any], plain: Callable[[], Any]
) -> Any:
    """``plain()``, a pass of ``layer``, a module of the class ``own``, on ``x`` alone, or the same by its
    script. ``classes``: of the layer's parts, and their ``forward``; ``options``: the call's further
    arguments. Not within ``torch.compile``."""
    scripts = layer._scripts
    if scripts is None and settings.replays():
        scripts = layer._scripts = Scripts()
    kind = None if scripts is None or type(layer) is not own else kind_of(layer, classes, x, options)
    if kind is None:
        return plain()
    y = scripts.run(kind, x)
    return scripts.watch(kind, x, plain) if y is None else y


def kind_of(layer: Any, classes: Classes, x: Any, options: Iterable[Any]) -> Kind | None:
    """The kind of such a pass; None for one that must go the plain way."""
    if (
        not torch.is_grad_enabled()
        or type(x) not in _PLAIN
        or x.layout is not torch.strided
        or not x.is_contiguous()
    ):
        return None
    if x.device.type not in KINDS or _has_any_global_hook() or autocast_dtype(x) is not None:
        return None
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return None
    if any(type(value) not in _PLAIN_OPTIONS for value in options):
        return None
    state, recipe = current(), None
    if state is not None:
        if state.enabled:
            recipe = state.recipe
        elif state.calibrating:
            return None
    # who moves what is saved elsewhere brings it back for one operation at a time
    if not recompute.idle() or hook() is not None:
        return None
    key: list[Any] = [x.shape, x.dtype, x.device, x.requires_grad, *options]
    parts: list[Any] = []
    parameters: list[Parameter] = []
    if not _add(layer, classes, key, parts, parameters) or len(set(map(id, parameters))) < len(parameters):
        return None
    return Kind(tuple(key), recipe, dispatch.kernels(place_of(x.device)), parts, parameters)


def _add(part: Any, classes: Classes, key: list[Any], parts: list[Any], parameters: list[Parameter]) -> bool:
    """Add a module, and what it is made of. False where somebody else has a hand in that."""
    own = part.__dict__
    if part._unrecorded:
        return False
    key += (weakref.ref(part), part.training, own.get("_changes", 0))
    parts.append(part)
    for name in own.get("_inits", ()):
        parameter = part._parameters.get(name)
        if type(parameter) is not Parameter or not parameter.is_contiguous():
            return False
        key += (parameter.requires_grad, parameter.dtype, parameter.device, parameter.shape)
        parameters.append(parameter)
    for child in part._modules.values():
        if child is not None:
            hooks = (
                child._forward_hooks
                or child._forward_pre_hooks
                or child._backward_hooks
                or child._backward_pre_hooks
            )
            if hooks or not runs_its_own(child, classes) or child._compiled_call_impl is not None:
                return False
            if not _add(child, classes, key, parts, parameters):
                return False
    return True


def runs_its_own(part: Any, classes: Classes) -> bool:
    """Whether a call of ``part`` runs the ``forward`` of one of ``classes``, and nothing that somebody put in
    its place."""
    own_class = type(part)
    return own_class in classes and classes[own_class] is own_class.forward and "forward" not in part.__dict__


class _Link(NamedTuple):
    """A step of a script. Values have places: 0 is x's, then come the parameters', then those of what is
    made, in order.

    ``part``: the place of the part whose FP8 state the step uses, None without one. ``takes``: places of its
    inputs. ``sources``: of each wanted gradient, the place of what it is the gradient of. ``first``: the
    first place of its outputs. ``done``: places that nobody needs any more after it. ``saved``: how many
    tensors it saves.
    """

    step: Step
    part: int | None
    takes: list[int]
    sources: list[int]
    first: int
    outputs: int
    done: list[int]
    saved: int


class Script:
    """The operations of a pass by ``recipe`` with ``kernels``, which gives the value at the place
    ``output``."""

    def __init__(
        self, recipe: Recipe | None, kernels: Any, links: list[_Link], output: int, leaves: list[int]
    ) -> None:
        self.recipe, self.kernels, self.links, self.output, self.leaves = (
            recipe,
            kernels,
            links,
            output,
            leaves,
        )

    def fits(self, kind: Kind) -> bool:
        """Whether a pass of ``kind``, which has the same key, is one of these."""
        recipe: Any = kind.recipe
        if kind.kernels is not self.kernels or not (self.recipe is recipe or self.recipe == recipe):
            return False
        return all(
            link.part is None or kind.parts[link.part]._wire(recipe, True) is link.step.wiring
            for link in self.links
        )

    def run(self, kind: Kind, x: Tensor) -> Tensor:
        """The output for x, in the graph."""
        values: list[Any] = [x, *kind.parameters]
        leaves = [values[at] for at in self.leaves]
        saved: list[Tensor] = []
        for step, part, takes, _, _, _, done, _ in self.links:
            if part is not None:
                kind.parts[part].wiring(kind.recipe, True, True, None)
            tensors = [next_rng(x.device) if at == _RNG else values[at] for at in takes]
            outputs, held = step.forward(tensors)
            saved += held
            values += outputs
            values += [tensors[i] for i in step.ready.through]
            for at in done:
                values[at] = None
        return _Whole.apply(self, [values[self.output]], saved, *leaves)  # type: ignore[no-any-return]

    def backward(self, saved: list[Tensor], grad: Tensor, wanted: Sequence[bool]) -> list[Tensor | None]:
        """The gradients of the leaves, None of those that are not ``wanted``. ``saved``: what all steps
        saved, in order; emptied."""
        grads: dict[int, Tensor | None] = {self.output: grad}
        del grad
        needed = None if all(wanted) else self._needed(wanted)
        for at, (step, _, _, sources, first, outputs, _, count) in reversed(list(enumerate(self.links))):
            start = len(saved) - count
            own = saved[start:]
            del saved[start:]
            arrived = [grads.pop(place, None) for place in range(first, first + outputs)]
            if any(g is not None for g in arrived) and (needed is None or at in needed):
                into = step.begin()
                for source, found in zip(sources, step.backward(own, arrived, into), strict=True):
                    before = grads.get(source)
                    grads[source] = found if before is None or found is None else before + found
        return [grads.get(place) if asked else None for place, asked in zip(self.leaves, wanted, strict=True)]

    def _needed(self, wanted: Sequence[bool]) -> set[int]:
        """The links that lie between the output and the ``wanted`` leaves: autograd would go back through no
        others."""
        towards = {place for place, asked in zip(self.leaves, wanted, strict=True) if asked}
        needed = set()
        for at, link in enumerate(self.links):
            if not towards.isdisjoint(link.sources):
                needed.add(at)
                towards |= set(range(link.first, link.first + link.outputs))
        return needed


class _Whole(torch.autograd.Function):
    """The node of a script, which ran already."""

    @staticmethod
    def forward(
        ctx: Any, script: Script, output: list[Tensor], saved: list[Tensor], *leaves: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*saved)
        saved.clear()
        ctx.script = script
        ctx.materialize_grads = False
        return output.pop()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        # the gradient is to be differentiated itself: what is refused, when it is
        if torch.is_grad_enabled():
            return _whole_once(ctx, grad)  # type: ignore[no-any-return]
        if grad is None:
            return (None,) * (3 + len(ctx.script.leaves))
        wanted = [_is_wanted(node) for node, _ in ctx.next_functions]
        saved = list(ctx.saved_tensors)
        # unless the graph is kept for another pass, from here on only ``saved`` holds them
        ctx.maybe_clear_saved_tensors()
        return (None, None, None, *ctx.script.backward(saved, grad, wanted))


def _is_wanted(node: Any) -> bool:
    """Whether the backward pass that runs goes on to that node of the graph, or gives its gradient."""
    try:
        return _runs(node)  # type: ignore[no-any-return]
    # torch answers nothing about a leaf that ``torch.autograd.grad`` gives the gradient of
    except RuntimeError:
        return True


_whole_once = once(_Whole.backward)


class Scripts:
    """The scripts of a layer, by the key of their kind; None for a kind that has none."""

    def __init__(self) -> None:
        self.known: dict[tuple[Any, ...], Script | None] = {}

    def run(self, kind: Kind, x: Tensor) -> Tensor | None:
        """A pass of that kind by its script; None where there is none."""
        script = self.known.get(kind.key)
        return script.run(kind, x) if script is not None and script.fits(kind) else None

    def watch(self, kind: Kind, x: Tensor, plain: Callable[[], Any]) -> Any:
        """``plain()``, such a pass the plain way: afterwards there is a script for its like, if there can be
        one."""
        if self.known.get(kind.key, kind) is None:
            return plain()
        with watched() as seen:
            y = plain()
        if len(self.known) >= _LIMIT:
            self.known.clear()
        self.known[kind.key] = _written(kind, seen, x, y)
        return y


def _written(kind: Kind, seen: Seen, x: Tensor, y: Any) -> Script | None:
    """The script of a pass that was watched; None where there can be none."""
    wired = {
        id(part._wired[2]): at
        for at, part in enumerate(kind.parts)
        if getattr(part, "_wired", None) is not None
    }
    places = {id(tensor): at for at, tensor in enumerate((x, *kind.parameters))}
    count = 1 + len(kind.parameters)
    links: list[_Link] = []
    for step, tensors, outputs in seen:
        named = zip(step.ready.inputs, tensors, strict=True)
        takes = [_place(places, kind.parameters, name, tensor) for (name, _, _), tensor in named]
        sources = [takes[i] for i in step.ready.wanted if takes[i] is not None]
        part = wired.get(id(step.wiring))
        known = part is not None or step.wiring is NO_STATE
        if None in takes or _RNG in sources or step.fused is not None or not known:
            return None
        places |= {id(tensor): count + i for i, tensor in enumerate(outputs)}
        saved = len(step.ready.kept) + len(step.ready.saved_apart.apart) + bool(step.ready.saved_apart.parts)
        link = _Link(step, part, takes, sources, count, len(outputs), [], saved)  # type: ignore[arg-type]
        links.append(link)
        count += len(outputs)
    if places.get(id(y), 0) <= len(kind.parameters) or (len(links) > 1 and _work(kind, x) > _LARGEST):
        return None
    output = places[id(y)]
    last = {output: len(links)} | {
        place: at for at, link in enumerate(links) for place in range(link.first, link.first + link.outputs)
    }
    last |= {place: at for at, link in enumerate(links) for place in link.takes}
    for place, at in last.items():
        if place > len(kind.parameters) and place != output:
            links[at].done.append(place)
    leaves = sorted({source for link in links for source in link.sources if source <= len(kind.parameters)})
    return Script(kind.recipe, kind.kernels, links, output, leaves)


def _work(kind: Kind, x: Tensor) -> int:
    """Parameters times rows, half the operations of the products with weights in a forward pass."""
    return sum(p.numel() for p in kind.parameters) * (x.numel() // max(1, x.shape[-1]))


def _place(
    places: Mapping[int, int], parameters: Sequence[Parameter], name: str, tensor: Tensor
) -> int | None:
    """Where an input of a step comes from: None for elsewhere, or where two parameters lie. A parameter may
    come without its history, as a bias that another step makes the gradient of."""
    place = places.get(id(tensor))
    if place is not None:
        return place
    if name == "rng":
        return _RNG
    if tensor.requires_grad:
        return None
    alike = [
        at
        for at, p in enumerate(parameters, 1)
        if p.data_ptr() == tensor.data_ptr() and p.shape == tensor.shape and p.dtype == tensor.dtype
    ]
    return alike[0] if len(alike) == 1 and tensor.numel() else None
