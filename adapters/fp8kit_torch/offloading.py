"""What layers keep for backward, in host memory meanwhile: which tensors, when they go and when they come
back (``cpu_offload`` has the context that does it).

torch's hooks of saved tensors hand over each tensor that a layer saves; the graph then holds a ``_Slot``
instead of it. A layer's tensors are copied to the host on a stream of their own when its forward pass ends,
their device memory is let go some layers later, and they are copied back some layers before its backward pass
reads them. On a CPU the same happens without streams: tensors are cloned, and let go. The weights of the
modules that a layer calls go the same way where that is asked for (``offloaded_weights``).
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from fp8kit.arguments import integer
from fp8kit.errors import ArgumentError, AutogradError
from fp8kit_torch.offloaded_weights import ModuleCalls, OffloadedWeight, offloaded_of, restore_before_state
from fp8kit_torch.torch_compat import base, version

LEAST = 256 * 1024  # elements of a tensor that is worth a copy
HELD, LEAVING, AWAY, COMING = "held", "leaving", "away", "coming"


class _Open(threading.local):
    """How many contexts are open in this thread, and how many of them offload weights."""

    depth = weights = 0


OPEN = _Open()
_STAYS = "_fp8kit_not_offloaded"
# storages that are not to be offloaded, by their address, with how many tensors say so
_STAYING: dict[int, int] = {}
# those of experts' parameters, while a layer's pass has them as one tensor -> what gives that one again
_TOGETHER: dict[int, Callable[[], Tensor]] = {}


class _Slot:
    """What the graph holds instead of a saved tensor: it lives as long as the graph needs the tensor."""

    __slots__ = ("__weakref__", "device", "host", "keeper", "layer", "pool", "tensor", "written")

    def __init__(
        self, tensor: Tensor, layer: OffloadableLayer, pool: Pool | None, keeper: _Keeper | None
    ) -> None:
        self.keeper = keeper
        self.tensor: Tensor | None = tensor
        self.host: Tensor | None = None
        self.layer, self.pool, self.device = layer, pool, tensor.device
        self.written = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None

    def __del__(self) -> None:
        if self.pool is not None and self.host is not None:
            self.pool.setdefault(_like(self.host), []).append(self.host)


class _Reader:
    """What the graph holds instead of a tensor that stays, where weights are offloaded: whoever reads it is
    the layer's backward pass, which needs them. ``of``: what gives the parameters that have its memory, which
    lies elsewhere once they are back; None for other memory."""

    __slots__ = ("_at_first", "_form", "_of", "_tensor", "keeper")

    def __init__(self, tensor: Tensor, of: Callable[[], Tensor] | None, keeper: _Keeper) -> None:
        self.keeper, self._of = keeper, of
        self._tensor = tensor if of is None else None
        self._form = tensor.shape, tensor.stride(), tensor.storage_offset()
        # of several as one the layer looks itself (``side_by_side.want_unchanged``)
        self._at_first = None if isinstance(of, partial) else version(tensor)

    def read(self) -> Tensor:
        """The tensor. AutogradError where it was changed in place: torch does not look behind its hooks."""
        self.keeper.layer.restore_weights()
        found = self._tensor if self._of is None else self._of()
        assert found is not None
        if self._at_first not in (None, version(found)):
            wanted = "the one that forward had, until backward has read it"
            raise AutogradError("cpu_offload", "a saved tensor", "one changed in place", wanted)
        return found if self._of is None else found.as_strided(*self._form)


class _Keeper:
    """Lives as long as a layer's graph, after which its weights are back on the device."""

    def __init__(self, layer: OffloadableLayer) -> None:
        self.layer = layer

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.layer.restore_weights()


Pool = dict[Any, list[Tensor]]


def _like(tensor: Tensor) -> Any:
    """What a buffer must have in common with ``tensor`` to hold it."""
    return tensor.shape, tensor.stride(), tensor.dtype


class OffloadableLayer:
    """What one layer's forward pass has saved. ``phase``: where it is: on the device ("held"), being copied
    to the host ("leaving"), on the host alone ("away"), being copied back ("coming")."""

    def __init__(self, number: int, owner: OffloadSynchronizer, siblings: list[OffloadableLayer]) -> None:
        self.number, self.owner, self.siblings, self.phase = number, owner, siblings, HELD
        self._slots: list[weakref.ref[_Slot]] = []  # the graph holds them
        self._known: dict[Any, _Slot] = {}  # while the forward pass runs
        self._copied: dict[torch.device, torch.cuda.Event] = {}
        self.weights: list[OffloadedWeight] = []
        self._keeper: weakref.ref[_Keeper] | None = None

    @property
    def keeper(self) -> _Keeper:
        """What the layer's graph holds, where its weights are offloaded."""
        found = None if self._keeper is None else self._keeper()
        if found is None:
            found = _Keeper(self)
            self._keeper = weakref.ref(found)
        return found

    @property
    def slots(self) -> list[_Slot]:
        """Those that the graph still needs."""
        return [slot for ref in self._slots if (slot := ref()) is not None]

    def push(self, tensor: Tensor) -> _Slot:
        """The slot of a tensor, the same one for a tensor that is saved twice."""
        key = tensor.data_ptr(), _like(tensor), tensor.device, version(tensor)
        found = self._known.get(key)
        if found is None:
            keeper = self.keeper if self.owner.offloads_weights else None
            found = self._known[key] = _Slot(tensor.detach(), self, self.owner.pool, keeper)
            self._slots.append(weakref.ref(found))
        return found

    def close(self, modules: list[Module]) -> None:
        """The forward pass has ended; it called the ``modules``, whose weights are offloaded."""
        self._known.clear()
        if self._keeper is None or self._keeper() is None:
            return  # no graph that would read them
        for module in modules:
            restore_before_state(module)
            self.weights += offloaded_of(module, self.owner, LEAST)

    def restore_weights(self) -> None:
        """Let work that is launched from here on find the weights."""
        for weight in self.weights:
            weight.restore()

    def offload(self) -> None:
        """Begin to copy what is saved, and the weights, to the host."""
        for slot in self.slots:
            tensor = slot.tensor
            assert tensor is not None
            if slot.host is None:
                slot.host = self.owner.host_buffer(tensor)
                with self.owner.beside(tensor, slot.written):
                    slot.host.copy_(tensor, non_blocking=True)
        self._note_copies()
        for weight in self.weights:
            weight.leave()
        self.phase = LEAVING

    def release(self) -> None:
        """Let go of the device's memory: work that is launched from here on finds the copies done."""
        self._wait()
        for slot in self.slots:
            slot.tensor = None
        if self._keeper is not None and self._keeper() is not None:
            for weight in self.weights:
                weight.release()
        self.phase = AWAY

    def reload(self) -> None:
        """Begin to copy what is on the host back."""
        for weight in self.weights:
            weight.reload()
        for slot in self.slots:
            host = slot.host
            assert host is not None
            slot.tensor = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=slot.device)
            with self.owner.beside(slot.tensor):
                slot.tensor.copy_(host, non_blocking=True)
            self.owner.keep_until_copied(slot.tensor)
        self._note_copies()
        self.phase = COMING

    def pop(self, slot: _Slot) -> Tensor:
        """A saved tensor, on the device."""
        if self.phase == AWAY:
            self.reload()
        if self.phase == COMING:
            self._wait()
            self.phase = HELD
        self.restore_weights()
        assert slot.tensor is not None
        return slot.tensor

    def _note_copies(self) -> None:
        self._copied = {device: self.owner.event(device) for device in self.owner.streams}

    def _wait(self) -> None:
        for device, event in self._copied.items():
            torch.cuda.current_stream(device).wait_event(event)
        self._copied = {}


class OffloadSynchronizer:
    """When each of ``model_layers`` layers goes to the host and comes back.

    The first ``num_layers`` layers are offloaded. At most ``model_layers - num_layers`` layers are on the
    device, and the one that is copied: layer i is let go when layer i + that many begins its forward pass,
    and copied back when that one begins its backward pass. ``double``: it is let go one layer later, so that
    its copy has the whole time of a layer. Several passes may be under way at a time.

    ``activations``, ``weights``: what is offloaded.
    """

    def __init__(
        self,
        model_layers: int,
        num_layers: int,
        retain: bool,
        stream: Any,
        activations: bool = True,
        weights: bool = False,
        double: bool = False,
    ) -> None:
        self.model_layers, self.num_layers, self._stream = model_layers, num_layers, stream
        self.activations, self._double = activations, double
        self._calls = ModuleCalls() if weights else None
        self.pool: Pool | None = {} if retain else None
        self.streams: dict[torch.device, torch.cuda.Stream] = {}
        self.current: OffloadableLayer | None = None
        self._layers: list[OffloadableLayer] = []  # of the pass that runs

    def fwd_step(self) -> OffloadableLayer:
        """The next layer's forward pass begins."""
        if len(self._layers) == self.model_layers:
            self._layers = []
        number = len(self._layers)
        self.current = OffloadableLayer(number, self, self._layers)
        self._layers.append(self.current)
        self._begin_forward(number)
        if self._calls is not None:
            self._calls.open()
        return self.current

    def end_forward(self, finished: bool) -> None:
        """It has ended; not ``finished``: by an exception, and the pass with it."""
        layer, self.current = self.current, None
        assert layer is not None
        modules = [] if self._calls is None else self._calls.close()
        graphed = any("forward" in vars(each) for module in modules for each in module.modules())
        if torch.cuda.is_available():
            graphed = graphed or torch.cuda.is_current_stream_capturing()
        layer.close(modules if self._offloads(layer) and not graphed else [])
        if not finished:
            self._layers = []
        elif layer.number < self.num_layers:
            layer.offload()

    def _begin_forward(self, number: int) -> None:
        behind = number - (self.model_layers - self.num_layers) - self._double
        if behind >= 0:
            self._layers[behind].release()

    def bwd_step(self, layer: OffloadableLayer) -> None:
        """A layer's backward pass begins."""
        behind = layer.number - (self.model_layers - self.num_layers)
        if behind >= 0 and layer.siblings[behind].phase == AWAY:
            layer.siblings[behind].reload()

    @property
    def offloads_weights(self) -> bool:
        """Whether weights are offloaded."""
        return self._calls is not None

    # --- hooks of saved tensors -----------------------------------------------------------------------------

    def push_tensor(self, tensor: Tensor) -> Tensor | _Slot | _Reader:
        """What the graph holds instead of a saved tensor: the tensor itself where it is a parameter, small,
        or marked by ``mark_not_offload``."""
        layer = self.current
        if layer is None or (self._calls is None and not self._offloads(layer)):
            return tensor
        of = None if self._calls is None else _parameters_of(tensor)
        stays = (
            of is not None
            or not self._offloads(layer)
            or not self.activations
            or type(tensor) is not Tensor
            or tensor.layout is not torch.strided
            or tensor.numel() < LEAST
            or tensor.untyped_storage().data_ptr() in _STAYING
        )
        if stays and self._calls is not None:
            return _Reader(tensor, of, layer.keeper)
        return tensor if stays else layer.push(tensor)

    def _offloads(self, layer: OffloadableLayer) -> bool:
        return layer.number < self.num_layers

    def pop_tensor(self, held: Tensor | _Slot | _Reader) -> Tensor:
        """The saved tensor, on its device."""
        if isinstance(held, _Reader):
            return held.read()
        return held.layer.pop(held) if isinstance(held, _Slot) else held

    # --- copies ---------------------------------------------------------------------------------------------

    def host_buffer(self, tensor: Tensor) -> Tensor:
        """Host memory like ``tensor``, pinned where that is on a GPU."""
        free = None if self.pool is None else self.pool.get(_like(tensor))
        if free:
            return free.pop()
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)

    @contextmanager
    def beside(self, tensor: Tensor, after: Any = None) -> Iterator[None]:
        """Copies of ``tensor`` run on the stream for that: behind the event ``after``, or all work so far."""
        if not tensor.is_cuda:
            yield
            return
        device = tensor.device
        stream = self.streams.get(device)
        if stream is None:
            stream = self.streams[device] = self._stream or torch.cuda.Stream(device)
        if after is None:
            stream.wait_stream(torch.cuda.current_stream(device))
        else:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            yield

    def event(self, device: torch.device) -> torch.cuda.Event | None:
        """The end of the copies that were begun on that device; None where they are done already."""
        stream = self.streams.get(device)
        return None if stream is None else stream.record_event()

    def keep_until_copied(self, tensor: Tensor) -> None:
        """A graph may be dropped while ``tensor`` is being written."""
        if tensor.is_cuda:
            tensor.record_stream(self.streams[tensor.device])

    def offloaded_bytes(self) -> int:
        """Bytes of the pass that runs, or ran last, that are on the host alone."""
        away = [slot.host for layer in self._layers if layer.phase == AWAY for slot in layer.slots]
        return sum(host.nbytes for host in away if host is not None)


class ManualOffloadSynchronizer(OffloadSynchronizer):
    """The user says when: by a layer's number in the last pass, from 0 on. What is not asked for stays."""

    def __init__(
        self, model_layers: int, retain: bool, stream: Any, activations: bool = True, weights: bool = False
    ) -> None:
        super().__init__(model_layers, 0, retain, stream, activations, weights)

    def _begin_forward(self, number: int) -> None:
        pass

    def _offloads(self, layer: OffloadableLayer) -> bool:
        return True

    def bwd_step(self, layer: OffloadableLayer) -> None:
        pass

    def start_offload_layer(self, layer_id: int) -> None:
        """Begin to copy what the layer has saved to the host; its forward pass has ended."""
        self._layer("start_offload_layer", layer_id, HELD).offload()

    def release_activation_forward_gpu_memory(self, layer_id: int) -> None:
        """Let go of the device memory of a layer whose copy has begun."""
        self._layer("release_activation_forward_gpu_memory", layer_id, LEAVING).release()

    def start_reload_layer(self, layer_id: int) -> None:
        """Begin to copy a layer back whose memory was let go; where nobody does, its backward pass does."""
        self._layer("start_reload_layer", layer_id, AWAY).reload()

    def _layer(self, operation: str, layer_id: Any, phase: str) -> OffloadableLayer:
        known = len(self._layers) - (self.current is not None)
        number = integer(operation, "layer_id", layer_id)
        if number >= known:
            wanted = f"a layer whose forward pass has ended, less than {known}"
            raise ArgumentError(operation, "layer_id", number, wanted)
        layer = self._layers[number]
        if layer.phase != phase:
            raise ArgumentError(operation, "layer_id", f"{number}, which is {layer.phase}", f"a {phase} one")
        return layer


def mark_not_offload(*tensors: Tensor) -> None:
    """What lies in the memory of these tensors stays on the device, as long as they live."""
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.layout is torch.strided and not hasattr(tensor, _STAYS):
            setattr(tensor, _STAYS, True)
            address = tensor.untyped_storage().data_ptr()
            _STAYING[address] = _STAYING.get(address, 0) + 1
            weakref.finalize(tensor, _forget, address).atexit = False


def staying(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """FP8 weights that a layer keeps, which offloading would copy and not free."""
    if OPEN.depth:
        mark_not_offload(*weights.values())
    return weights


def staying_parameters(tensor: Tensor, again: Callable[[], Tensor]) -> None:
    """Let memory of parameters stay that layers save as another tensor, or go with them where weights are
    offloaded. ``again``: what gives it once they came back from the host."""
    if not OPEN.weights:
        mark_not_offload(tensor)
        return
    address = tensor.untyped_storage().data_ptr()
    _TOGETHER[address] = again
    weakref.finalize(tensor, _apart, address, again).atexit = False


def _apart(address: int, again: Callable[[], Tensor]) -> None:
    if _TOGETHER.get(address) is again:
        del _TOGETHER[address]


def _parameters_of(tensor: Tensor) -> Callable[[], Tensor] | None:
    """What gives the parameter, or the experts' as one, that have the memory of ``tensor``; None where it is
    other memory."""
    if type(tensor) not in (Tensor, Parameter):
        return None
    whole = base(tensor)
    parameter = tensor if whole is None else whole
    if type(parameter) is Parameter:
        return parameter.detach
    known = _TOGETHER and tensor.layout is torch.strided
    return _TOGETHER.get(tensor.untyped_storage().data_ptr()) if known else None


def _forget(address: int) -> None:
    _STAYING[address] -= 1
    if not _STAYING[address]:
        del _STAYING[address]
