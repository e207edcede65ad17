"""Randomness of the native frontend: one host generator for initial weights, and one ``(seed, offset)`` array
a device for dropout.

The device's state advances on the device (``rng_next_``), so dropout never waits for the host and a captured
graph draws anew at each replay. Host generator: NumPy's Philox (Salmon et al., SC'11).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from fp8kit import arrays, captured, formats, serialization
from fp8kit.arguments import function, integer, number
from fp8kit.arrays import ArrayView, Device
from fp8kit.backends import dispatch
from fp8kit.errors import (
    ArgumentError,
    AutogradError,
    BackendError,
    CheckpointError,
    FormatError,
    Fp8kitError,
    ShapeError,
)
from fp8kit.formats import int64
from fp8kit.scoped import Scoped, changed

HostArray = np.ndarray[Any, Any]
Init = Callable[[HostArray], None]
Source = Callable[[str], Any]

_DEVICE_PREFIX = "device."


class _State:
    """The process's seed, host generator, and device states, made when a device first draws."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.host = np.random.Generator(np.random.Philox(seed))
        self.devices: dict[Device, ArrayView] = {}


class _Thread(threading.local):
    state: _State | None = None  # a recomputation's own, on its own thread
    keeping: tuple[list[ArrayView], ...] = ()  # where the draws of first passes are kept
    replayed: Iterator[ArrayView] | None = None  # the draws of the first pass that is recomputed


_process = _State(0)
_thread = _Thread()
_SOURCE: Scoped[Source | None] = Scoped("fp8kit_draw_from", None)  # asked instead of the state
_LOCK = threading.Lock()  # one draw at a time: a device's state is read, handed out and moved on


def _state() -> _State:
    """Returns the state in force on this thread."""
    return _thread.state or _process


def _start(state: _State) -> None:
    """Put a state in force."""
    global _process
    if _thread.state is None:
        with _LOCK:
            # stay where they are: a captured graph draws from them
            for device, view in _process.devices.items():
                value = state.devices.get(device)
                arrays.copy(
                    view, arrays.as_view(np.array([state.seed, 0], np.int64)) if value is None else value
                )
                state.devices[device] = view
            _process = state
    else:
        _thread.state = state


def manual_seed(seed: int) -> None:
    """Start the host generator and every device's dropout state again from ``seed``, an int in [0, 2**63).
    ArgumentError otherwise."""
    _start(_State(integer("manual_seed", "seed", seed, 0, 2**63 - 1)))


def host_generator() -> np.random.Generator:
    """Returns the generator that initial weights are drawn from. Not to be drawn from by two threads at
    once."""
    return _state().host


def next_rng(device: Device) -> ArrayView:
    """Returns a fresh int64 [2] ``(seed, offset)`` for one operation on ``device``; the device's state moves
    on by one offset. Threads may draw at once: no two get the same offset. Within ``draw_from`` what its
    source gives, with the errors named there. AutogradError in a recomputation that draws more, or elsewhere,
    than its first pass."""
    out: ArrayView | None
    if _thread.replayed is not None:
        out = next(_thread.replayed, None)
    else:
        source = _SOURCE.get()
        out = _drawn(device) if source is None else _given(source, device)
    if out is None or out.device != device:
        wanted = "as many draws on the same devices as in the first pass"
        raise AutogradError("checkpoint", "function", f"another draw on {device}", wanted)
    for kept in _thread.keeping:
        kept.append(out)
    return out


def _drawn(device: Device) -> ArrayView:
    """Returns the next of the device's state in force."""
    kernels, stream = dispatch.kernels(device), arrays.current_stream(device)
    out = arrays.empty((2,), int64, device)
    with _LOCK:
        own = _state()
        state = own.devices.get(device)
        if state is None:
            state = own.devices[device] = arrays.to(np.array([own.seed, 0], np.int64), device)
        kernels.rng_next_(state, out, stream)
    return out


def draw_from(source: Source) -> AbstractContextManager[None]:
    """Returns a block in which dropout on this thread, or in this asyncio task, draws from ``source`` instead
    of the state of ``manual_seed``.

    ``source(device)``, with the device's name ("cpu", "cuda:0"), is asked once for each operation that drops,
    in their order, just before it runs, and gives its ``(seed, offset)``: int64 (2,) on that device, any
    array that ``fk.tensor`` takes. It is copied. So the native frontend drops what another one does::

        torch.manual_seed(0)
        with fk.draw_from(fp8kit_torch.dropout_seed):
            y = layer(x)      # the bits of the same torch layer after torch.manual_seed(0)

    Recomputation (``fk.checkpoint``) repeats the first pass's draws and asks nothing. Blocks nest: the inner
    one counts.

    Raises Fp8kitError for a source that cannot be called. The operation raises ShapeError, FormatError or
    BackendError, and runs nothing, where the source gives something else, ArgumentError within ``fk.graph``,
    which could not ask again at a replay.
    """
    return _SOURCE.within(function("draw_from", "source", source))


def _given(source: Source, device: Device) -> ArrayView:
    """Returns what the source gives, in memory of its own: the array may be another draw's by the time
    backward reads it."""
    if captured.capturing():
        raise ArgumentError(
            "draw_from", "source", "a draw within fk.graph", "eager steps: replays would repeat the numbers"
        )
    pair = arrays.as_view(source(str(device)), "draw_from", "source")
    if pair.dtype is not int64:
        raise FormatError("draw_from", "source", f"dtype {pair.dtype.name}", "int64 (seed, offset)")
    if pair.shape != (2,):
        raise ShapeError("draw_from", "source", f"shape {pair.shape}", "(2,): seed, offset")
    if pair.device != device:
        raise BackendError(
            "draw_from", "source", f"an array on {pair.device}", f"one on {device}, where the operation runs"
        )
    out = arrays.empty((2,), int64, device)
    arrays.copy(out, arrays.contiguous(pair))
    return out


def get_rng_state() -> dict[str, HostArray]:
    """Returns the whole state as arrays by name, so that ``fk.save`` can keep it: the host generator's words
    and int64 [2] for each device."""
    own = _state()
    host = own.host.bit_generator.state
    out = {
        "seed": np.array(own.seed, np.int64),
        "host.counter": host["state"]["counter"].copy(),
        "host.key": host["state"]["key"].copy(),
        "host.buffer": host["buffer"].copy(),
        "host.rest": np.array([host["buffer_pos"], host["has_uint32"], host["uinteger"]], np.int64),
    }
    with _LOCK:
        return out | {f"{_DEVICE_PREFIX}{where}": view.numpy().copy() for where, view in own.devices.items()}


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Go back to a state that ``get_rng_state`` gave: integer arrays by name; a device without an entry
    starts again from the seed. CheckpointError where another entry is missing, or one is unknown or of
    another shape or dtype; then nothing changes."""
    check_rng_state(state)()


def check_rng_state(state: Mapping[str, Any]) -> Callable[[], None]:
    """Check what ``set_rng_state`` takes, and return what goes back to it. CheckpointError as there."""
    shapes = {"seed": (), "host.counter": (4,), "host.key": (2,), "host.buffer": (4,), "host.rest": (3,)}
    serialization.mapping("set_rng_state", state)
    for name in shapes.keys() - set(state):
        raise CheckpointError("set_rng_state", name, "nothing", "an array from get_rng_state")
    values = {
        name: serialization.array("set_rng_state", name, array).numpy() for name, array in state.items()
    }
    devices: dict[Device, HostArray] = {}
    for name, value in values.items():
        if name not in shapes and not name.startswith(_DEVICE_PREFIX):
            raise CheckpointError("set_rng_state", name, "an unknown entry", "entries from get_rng_state")
        if value.shape != shapes.get(name, (2,)) or value.dtype.kind not in "iu":
            wanted = f"integers of shape {shapes.get(name, (2,))}"
            raise CheckpointError("set_rng_state", name, f"{value.dtype} {value.shape}", wanted)
        if name not in shapes:
            try:
                where = arrays.device(name.removeprefix(_DEVICE_PREFIX))
                arrays.provider(where)
            except Fp8kitError as error:
                raise CheckpointError(
                    "set_rng_state", name, "a device that is not here", f"a usable one ({error})"
                ) from None
            devices[where] = value.astype(np.int64)
    position, has_half, half = (int(v) for v in values["host.rest"])
    if not (int(values["seed"]) >= 0 and 0 <= position <= 4 and has_half in (0, 1) and 0 <= half < 2**32):
        raise CheckpointError(
            "set_rng_state", "seed, host.rest", values["host.rest"].tolist(), "a state of get_rng_state"
        )
    new = _State(int(values["seed"]))
    new.host.bit_generator.state = {
        "bit_generator": "Philox",
        "state": {
            "counter": values["host.counter"].astype(np.uint64),
            "key": values["host.key"].astype(np.uint64),
        },
        "buffer": values["host.buffer"].astype(np.uint64),
        "buffer_pos": position,
        "has_uint32": has_half,
        "uinteger": half,
    }

    def take() -> None:
        for where, value in devices.items():
            new.devices[where] = arrays.to(value, where)
        _start(new)

    return take


class RandomState(serialization.Loadable):
    """The process's random state as something to save: host generator and every device's dropout state."""

    def state_dict(self) -> dict[str, HostArray]:
        """``get_rng_state()``."""
        return get_rng_state()

    def check_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Callable[[], None]:
        """Check a state as ``set_rng_state`` does, with its errors, and return the function that sets it."""
        return check_rng_state(state)


def snapshot() -> Callable[[], AbstractContextManager[None]]:
    """Returns the present state, to be drawn from once more: what is returned makes a block, any number of
    times, in which this thread draws from a copy of it; the state goes on as if nothing was drawn there, and
    other threads draw on as before. Copies on the devices, waits for none of them."""
    kept = _copied(_state())
    return lambda: changed(_thread, state=_copied(kept))


def keeping(draws: list[ArrayView]) -> AbstractContextManager[None]:
    """Append what ``next_rng`` gives on this thread for a block; other threads' draws may come between, so
    that a state alone would not say which they were."""
    return changed(_thread, keeping=(*_thread.keeping, draws))


def replaying(draws: Sequence[ArrayView]) -> AbstractContextManager[None]:
    """Give kept draws once more on this thread for a block, in their order; no state moves on."""
    return changed(_thread, keeping=(), replayed=iter(draws))


def _copied(state: _State) -> _State:
    own = _State(state.seed)
    own.host.bit_generator.state = state.host.bit_generator.state
    with _LOCK:
        for device, view in state.devices.items():
            own.devices[device] = arrays.empty(view.shape, view.dtype, device)
            arrays.copy(own.devices[device], view)
    return own


def normal_init(mean: float = 0.0, std: float = 0.023) -> Init:
    """Returns an ``init_method`` that fills an array from a normal distribution; the defaults are Transformer
    Engine's for weights. Fp8kitError for numbers that are not finite or a negative ``std``."""
    top = formats.float32.max
    mean, std = number("normal_init", "mean", mean, top, least=-top), number("normal_init", "std", std, top)

    def fill(array: HostArray) -> None:
        array[...] = host_generator().normal(mean, std, array.shape)

    return fill
