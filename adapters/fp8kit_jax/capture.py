"""``capture``: the real operands of every GEMM of a JAX model, of one batch.

The layers show their operands as they show ``inspect`` its statistics: in high precision, by callbacks that
say which layer an array is of. These are unordered, since JAX has ordered ones neither within vmap nor on
several devices.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fp8kit.arguments import function, shown
from fp8kit.autocast import autocast
from fp8kit.errors import ArgumentError, UnsupportedError
from fp8kit.inspection import Entry, Place, Watch
from fp8kit.numerics.capture import Dump, GemmOperands, called, digest_of, left_out_alone
from fp8kit.numerics.config import Config, Dumped, Effect, Section, Steps
from fp8kit.numerics.log import Inspector
from fp8kit.quantization import OPERANDS, Quantization
from fp8kit_jax.inspection import switch, want_values

_EVERY = Section(
    "capture",
    {"layer_types": ("all",)},
    dumped=tuple(Dumped(tensor, True, False, Steps()) for tensor in GemmOperands._fields),
    effects=tuple(Effect("high_precision", gemm, (), Steps()) for gemm in OPERANDS),
)


class _Layer(NamedTuple):
    """A layer that shows its operands: its name in the program, and its place in a stack."""

    name: str
    place: Place | None


class _Recorder(Inspector):
    """An inspector of all layers that keeps the operands that they show."""

    def __init__(self) -> None:
        super().__init__(Config((_EVERY,)), lambda layer: None, switched=switch, wait=jax.effects_barrier)
        self._transposed: dict[str, bool] = {}  # by the layer's name, in the order of the program
        self._unnamed: dict[str, None] = {}
        self._operands: dict[_Layer, dict[str, Any]] = {}
        self._differing: set[_Layer] = set()
        self._left_out: dict[str, None] = {}

    def of_products(
        self, names: tuple[tuple[str, str], ...], base: Quantization | None, transposed: bool = False
    ) -> Watch | None:
        own = []
        for name, prefix in names:
            if not name:  # one more in each tracing, of which not all run
                name = f"unnamed {len(self._unnamed)}"
                self._unnamed[name] = None
            self._transposed.setdefault(name, transposed)
            own.append((name, prefix))
        return super().of_products(tuple(own), base, transposed)

    def take(self, entries: Mapping[str, Entry], arrays: Sequence[Any], place: Place | None = None) -> None:
        with self._lock:
            for own, array in zip(entries.values(), arrays, strict=True):
                layer, value = _Layer(own.layer, place), np.array(array)
                if own.tensor == "weight" and self._transposed[own.layer]:
                    value = np.ascontiguousarray(value.T)
                known = self._operands.setdefault(layer, {})
                if own.tensor not in known:
                    known[own.tensor] = value
                elif (was := known[own.tensor]).shape != value.shape or digest_of(was) != digest_of(value):
                    self._differing.add(layer)

    def unseen(self, name: str) -> None:
        self._left_out[name] = None
        super().unseen(name)

    def _say_missing(self) -> None:
        """``dump`` says it."""

    def dump(self) -> Dump:
        """Returns what was shown. ArgumentError where nothing was, UnsupportedError for a layer that ran
        twice and for one without a gradient."""
        if not self._operands and self._left_out:
            raise left_out_alone(self._left_out)
        if not self._operands:
            got = "a model that called no product of fp8kit's layers"
            raise ArgumentError(
                "capture", "model", got, "dense, layernorm_dense, layernorm_mlp or modules of them"
            )
        ran = {layer.name for layer in self._operands}
        unnamed = {name: f"gemm_{i}" for i, name in enumerate(name for name in self._unnamed if name in ran)}
        found = {}
        for layer in self._in_order():
            name = unnamed.get(layer.name, layer.name)
            name = name if layer.place is None else layer.place.name_of(name)
            own = self._operands[layer]
            if layer in self._differing:
                wanted = (
                    "one product a forward pass: names of their own, or fj.layer_index around each of a stack"
                )
                raise UnsupportedError(
                    "capture", name, "a layer that ran several times with other operands", wanted
                )
            if "gradient" not in own:
                wanted = "a gradient in backward: a loss that depends on it, and what is differentiated"
                raise UnsupportedError("capture", name, "a GEMM without backward", wanted)
            found[name] = GemmOperands(**own)
        return Dump(found)

    def _in_order(self) -> list[_Layer]:
        """Returns the layers in the order of the forward pass: those of a stack by number first."""
        names: list[list[str]] = [[]]  # several that stand in a stack, side by side
        stacked = {layer.name for layer in self._operands if layer.place is not None}
        for name in self._transposed:
            if name not in stacked or (names[-1] and names[-1][-1] not in stacked):
                names.append([])
            names[-1].append(name)
        places = {name: (i, j) for i, group in enumerate(names) for j, name in enumerate(group)}

        def key(layer: _Layer) -> Any:
            i, j = places[layer.name]
            return i, () if layer.place is None else layer.place.numbers, j

        return sorted(self._operands, key=key)


def capture(
    model: Any, batch: Any, loss: Callable[[Any], Any] | None = None, *, variables: Any = None
) -> Dump:
    """Returns the operands of every GEMM of ``dense``, ``layernorm_dense`` and ``layernorm_mlp``, and of
    modules that are made of them, of one batch, in high precision ::

        dump = fj.capture(loss_function, (params, batch))                 # a function
        dump = fj.capture(model, x, loss, variables=variables)            # a linen module
        dump = fj.capture(model, x, loss)                                 # an nnx module
        dump.save("operands.safetensors")                                 # for fp8kit recipes compare

    * ``model``: a function, which is differentiated by all floating-point arrays of the batch; a linen
      module, with the ``variables`` that its ``init`` gave; or an ``nnx.Module``, whose state stays as it is.
      It is compiled by ``jax.jit`` once, so static values belong into a closure.
    * ``batch``: what it is called with: a tuple of arguments, a mapping of names, or one argument.
    * ``loss``: a function of what the model gives to an array of one element; None where the model gives such
      a one.

    Names are those of ``inspect``, as ``fk.numerics.capture`` has them, and "gemm_0" and so on of calls
    without a name. Memory: a copy of all operands on the host.

    Raises ArgumentError for arguments of another kind, for a model without GEMMs, and for a loss that is no
    array of one element; UnsupportedError for a layer that runs several times with other operands (a scan
    without ``layer_index``), or has no gradient.
    """
    if loss is not None:
        function("capture", "loss", loss)
    want_values("capture", "model", "a call outside of it")
    run, given, weights = _parts(model, batch, variables)
    leaves, tree = jax.tree.flatten(given)
    dtypes = [getattr(leaf, "dtype", None) for leaf in leaves]
    arrays = {
        i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray | np.generic)
    }
    by = {i: leaf for i, leaf in arrays.items() if i < weights and jnp.issubdtype(dtypes[i], jnp.floating)}
    if not by:
        wanted = "arrays of floating-point numbers: the parameters that the model is differentiated by"
        raise ArgumentError("capture", "batch" if variables is None else "variables", "none", wanted)
    rest = {i: leaf for i, leaf in arrays.items() if i not in by}

    def step(by: dict[int, Any], rest: dict[int, Any]) -> Any:
        def value_of(by: dict[int, Any]) -> Any:
            out = run(*jax.tree.unflatten(tree, [(by | rest).get(i, leaf) for i, leaf in enumerate(leaves)]))
            value = out if loss is None else loss(out)
            if not isinstance(value, jax.Array) or value.size != 1:
                got = f"shape {value.shape}" if isinstance(value, jax.Array) else shown(value)
                raise ArgumentError("capture", "loss", got, "a function that gives an array of one element")
            return value

        value, back = jax.vjp(value_of, by)
        back(jnp.ones_like(value))
        return value

    recorder = _Recorder()
    recorder.open()
    failed = True
    try:
        with autocast(enabled=False):
            jax.block_until_ready(jax.jit(step)(by, rest))
        failed = False
    finally:
        recorder.close(failed)
    return recorder.dump()


def _parts(model: Any, batch: Any, variables: Any) -> tuple[Callable[..., Any], Any, int]:
    """(a function, its arguments, how many of their leaves, the first ones, may be weights)."""
    args, named = called(batch)
    linen, nnx = sys.modules.get("flax.linen"), sys.modules.get("flax.nnx")
    if linen is not None and isinstance(model, linen.Module):
        if variables is None:
            raise ArgumentError("capture", "variables", None, "what the linen module's init gave")
        given = (variables, args, named)
        return (lambda v, args, named: model.apply(v, *args, **named)), given, _count(variables)
    if variables is not None:
        wanted = "None: only linen modules have them apart"
        raise ArgumentError("capture", "variables", shown(variables), wanted)
    if nnx is not None and isinstance(model, nnx.Module):
        graph, params, others = nnx.split(model, nnx.Param, ...)

        def call(params: Any, others: Any, args: Any, named: Any) -> Any:
            return nnx.merge(graph, params, others)(*args, **named)

        return call, (params, others, args, named), _count(params)
    if not callable(model) or isinstance(model, type):
        wanted = "a function, a linen module or an nnx module"
        raise ArgumentError("capture", "model", shown(model), wanted)
    given = (args, named)
    return (lambda args, named: model(*args, **named)), given, _count(given)


def _count(tree: Any) -> int:
    return len(jax.tree.leaves(tree))
