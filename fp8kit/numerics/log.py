"""The inspector: what the calls of this step show, the rows that become of it, and where they go.

A call leaves small arrays on its device and waits for nothing, and nor does ``step``, which puts one copy of
them on the device's stream. The rows of a step are made when the next one ends, or when they are asked for:
then those of one tensor are put together (micro-batches, a weight's segments, ranks).
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from fp8kit import inspection
from fp8kit.arguments import integer
from fp8kit.arrays import ArrayView
from fp8kit.collectives import Collectives
from fp8kit.errors import ArgumentError, meant
from fp8kit.inspection import MADE_BY, Entry, Place, ProductWatch, TensorWatch, Watch
from fp8kit.numerics.config import Config, Dumped, Logged, Section
from fp8kit.numerics.dumps import Dumps
from fp8kit.numerics.effects import active, changed, rounded
from fp8kit.numerics.names import Needs, Operand, request
from fp8kit.numerics.shown import Arenas, Shown
from fp8kit.numerics.sinks import Row, Sink
from fp8kit.numerics.statistics import merge, values
from fp8kit.quantization import Quantization, Quantizer

log = logging.getLogger("fp8kit")
Record = np.ndarray[Any, Any]
Key = tuple[str, str, Any]  # layer, tensor, the spec of its statistics
Records = dict[Key, Record]
Gather = Callable[[Records], Sequence[Records]]
_ENTRIES = 4096


class _Asked(NamedTuple):
    """What is wanted of a product in a step: (tensor, its needs) and dumps; what the product's rules are, and
    which of its results are rounded how."""

    needs: tuple[tuple[str, Needs], ...]
    dumped: tuple[Dumped, ...]
    quantization: Quantization | None
    is_changed: bool
    rounded: tuple[tuple[str, Quantizer], ...]


class _Logged(NamedTuple):
    """A tensor of which statistics are asked for: its ``key``, and its rows by statistic, all but the
    ``value`` and, first of all, the ``step``."""

    key: Key
    needs: Needs
    place: tuple[str, int]  # among a step's rows
    rows: dict[str, Row]


class _Like(NamedTuple):
    """What steps have in common in which the same is asked for."""

    watches: dict[Any, Watch | None]
    asked: dict[Key, _Logged]
    dumped: dict[tuple[str, str], tuple[Dumped, Quantization | None]]
    # id of an entry -> itself, and what of ``asked`` it is: plans keep their entries
    known: dict[int, tuple[Entry, _Logged | None]]

    def logged(self, entry: Entry) -> _Logged | None:
        """Returns what is asked of the tensor that an entry is of; None where that was asked in another
        step."""
        found = self.known.get(id(entry))
        if found is None:
            if len(self.known) >= _ENTRIES:  # of plans for ever other shapes
                self.known.clear()
            found = self.known[id(entry)] = entry, self.asked.get((entry.layer, entry.tensor, entry.spec))
        return found[1]


class _Ended(NamedTuple):
    """A step that has ended, whose rows are not made yet."""

    number: int
    like: _Like
    shown: Shown


@lru_cache(maxsize=4096)
def _needs(
    logged: tuple[Logged, ...], quantization: Quantization | None, transposed: bool
) -> tuple[tuple[tuple[str, Needs], ...], str]:
    """Returns (tensor, needs) of each tensor logged for a product with these rules, and in words what it does
    not have."""
    by_tensor: dict[str, list[Any]] = {}
    for own in logged:
        by_tensor.setdefault(own.tensor, []).extend(own.names())
    found, missing = [], dict[str, list[str]]()
    for tensor, stats in by_tensor.items():
        operand, there = Operand(tensor, quantization, transposed and tensor == "weight"), []
        for stat in stats:
            try:
                request([stat], operand)
                there.append(stat)
            except ArgumentError as error:
                missing.setdefault(f"of {tensor}, expected {error.wanted}", []).append(str(stat))
        if there:
            found.append((tensor, request(there, operand)))
    return tuple(found), "; ".join(f"{', '.join(stats)} {why}" for why, stats in missing.items())


class Inspector:
    """``inspection.Inspector``, and what the user of a ``with`` block has: ``step``, ``rows``.

    * ``names``: layer -> its name, None for a layer that is not inspected. ``sinks``: where rows go.
    * ``gather``: of the records of this rank, by (layer, tensor), those of all ranks; None for one rank.
    * ``gather_parts``: of ranks that have parts of a weight, what ``gather`` is; None where a weight is this
      rank's part.
    * ``first``: the number of the first step. ``keep``: whether ``rows`` keeps them. ``switched``: called
      when that changes with what the step that begins shows, None for nothing. ``wait``: called before what a
      step has shown is read.
    """

    def __init__(
        self,
        config: Config,
        names: Callable[[Any], str | None],
        sinks: Sequence[Sink] = (),
        *,
        first: int = 0,
        keep: bool = True,
        gather: Gather | None = None,
        gather_parts: Callable[[Collectives], Gather | None] | None = None,
        dumps: Dumps | None = None,
        switched: Callable[[Any], None] | None = None,
        wait: Callable[[], Any] | None = None,
    ) -> None:
        self.config, self.names, self.sinks, self.gather = config, names, list(sinks), gather
        self.gather_parts = gather_parts
        self._shared: dict[str, Collectives] = {}  # by the product's name, the ranks that have parts of it
        self.number = integer("inspect", "first_step", first, 0)
        self._keep, self._dumps, self._switched, self._wait = keep, dumps, switched, wait
        self._rows: list[Row] = []
        self._lock = threading.Lock()
        self._shown, self._arenas = Shown(), Arenas()
        self._ended: list[_Ended] = []
        self._known: dict[str, Section | None] = {}  # by the product's name
        self._due: list[Section] = []  # those of which something was to be done
        # what is asked for in steps like this one: by the names and rules of a layer's products what its call
        # shows, by layer and tensor the needs and the dumps
        self._like: dict[Any, _Like] = {}
        self._now = _Like({}, {}, {}, {})
        self._said: set[tuple[str, str]] = set()
        self._checked = 0  # how many of ``_due`` have had their layers looked for
        self._open, self._closed, self._paused, self._serial = False, False, False, next(_SERIAL)
        self._looked_at: Any = None

    # --- the user's ----------------------------------------------------------------------------------------

    def step(self) -> None:
        """End a step. What comes until the next call is the next step's.

        On the CPU, with ``group`` and with dumped tensors its rows are made now, and go to the sinks.
        Otherwise that is done when the next step ends, or by ``rows``, ``flush`` and the end of the block, so
        that a step waits for no device."""
        if not self._open or self._paused:
            got = "a call within paused()" if self._paused else "a call outside of the block"
            raise ArgumentError("inspect", "step", got, "one within the block, and not while it is paused")
        self._finish()
        self._say_missing()
        self.number += 1
        self._begin()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context manager: within it layers run as without an inspector, for an evaluation in the middle of
        a step. ArgumentError outside of the block, and for one within another."""
        if not self._open or self._paused:
            raise ArgumentError("inspect", "paused", "a call outside of the block, or a second one", "one")
        self._paused = True
        self._switch(None)
        try:
            yield
        finally:
            self._paused = False
            if self._open:
                self._begin()

    def go_to(self, number: int) -> None:
        """Let the step that runs have this number."""
        self.number = integer("inspect", "step", number, 0)
        if self._open and not self._paused:
            self._begin()

    def rows(self) -> list[Row]:
        """Returns the rows of all steps that have ended: dicts with step, layer, tensor, stat, value, and
        gemm where a statistic belongs to one. Waits for the device where some were not made yet."""
        self.flush()
        return list(self._rows)

    def flush(self) -> None:
        """Make the rows of all steps that have ended, and give them to the sinks. Waits for the device."""
        self._make_rows(len(self._ended))

    # --- the block -----------------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin. ArgumentError where another inspector has begun, since there is one in a process, and where
        this one has ended."""
        if self._closed:
            raise ArgumentError("inspect", "block", "one that has ended", "a new one: inspect(...) again")
        if _current[0] is not None:
            raise ArgumentError("inspect", "block", "one within another", "one at a time in a process")
        _current[0], self._open = self, True
        self._begin()

    def close(self, failed: bool = False) -> None:
        """End. What a step has shown that did not end is written, too, unless it ``failed``: then there are
        the steps that ended, if the device still answers."""
        try:
            if self._wait is not None and self._looked_at is not None:
                self._wait()
            if self._shown.taken and not failed:
                self._finish()
            self.flush()
        except Exception as error:
            if not failed:
                raise
            log.warning("inspect: rows of the last steps are lost: %s", error)  # the failure itself goes on
        finally:
            self._shown, self._arenas, self._ended = Shown(), Arenas(), []
            self._open, self._closed, _current[0] = False, True, None
            self._switch(None)
            self._close_sinks(failed)
        if not failed:
            self._say_missing()

    def _close_sinks(self, failed: bool) -> None:
        """Close all sinks, whatever one of them raises."""
        errors = []
        for sink in self.sinks:
            try:
                sink.close()
            except Exception as error:
                errors.append(error)
        if errors and not failed:
            raise errors[0]
        for lost in errors:
            log.warning("%s", lost)  # the failure itself goes on

    def _say_missing(self) -> None:
        """Warn, when the first step ends in which a section counts, that none of its layers has run, or which
        of those that it names."""
        due, self._checked = self._due[self._checked :], len(self._due)
        ran = (
            f"layers that ran: {', '.join(sorted(self._known)[:10])}"
            if self._known
            else "none with a name ran"
        )
        for section in due:
            if section not in self._known.values():
                more = f", and {len(self._known) - 10} more" if len(self._known) > 10 else ""
                log.warning("inspect: no layer was found for the section %s; %s%s", section.name, ran, more)
                continue
            for name in section.layers.get("exact_layer_names", ()):
                if name not in self._known:
                    near = meant(name, self._known)
                    log.warning("inspect: section %s: no layer %r has run%s", section.name, name, near)

    def _begin(self) -> None:
        """Begin a step."""
        holding = tuple(steps.hold(self.number) for own in self.config.sections for steps in own.steps())
        due = [own for own in self.config.sections if any(steps.hold(self.number) for steps in own.steps())]
        self._due += [own for own in due if own not in self._due]
        if not any(holding):
            self._switch(None)
            return
        self._now = self._like.setdefault(holding, _Like({}, {}, {}, {}))
        self._switch((self._serial, holding))

    def _switch(self, looked_at: Any) -> None:
        """Let layers see the inspector, or not."""
        inspection.hooks.inspector = None if looked_at is None else self
        if self._switched is not None and looked_at != self._looked_at:
            self._switched(looked_at)
        self._looked_at = looked_at

    # --- what layers ask -----------------------------------------------------------------------------------

    def of_layer(self, layer: Any, state: Any) -> Watch | None:
        """Returns what a call of a layer is to show within the autocast ``state``."""
        name = self.names(layer)
        if name is None:
            return None
        on = state is not None and state.enabled
        products = tuple((product_name(name, prefix), prefix) for prefix in layer.gemms)
        ranks = {} if self.gather_parts is None else layer.ranks_of_weights()
        if ranks:
            self._shared |= {product: ranks[prefix] for product, prefix in products if prefix in ranks}
        return self.of_products(products, state.recipe.quantization if on else None)

    def of_products(
        self, names: tuple[tuple[str, str], ...], base: Quantization | None, transposed: bool = False
    ) -> Watch | None:
        """Returns what the products of a layer are to show, whose rules are ``base``. ``names``: of each its
        name and prefix. ``transposed``: whether their weights lie as (in, out). None for nothing."""
        key = names, base, transposed
        with self._lock:
            known = self._now.watches
            if key not in known:
                known[key] = self._watch(*key)
            return known[key]

    def _watch(
        self, names: tuple[tuple[str, str], ...], base: Quantization | None, transposed: bool
    ) -> Watch | None:
        products, other = [], []
        for name, prefix in names:
            asked = self._wanted(name, base, transposed)
            if asked is None:
                continue
            if asked.is_changed:
                other.append((prefix, asked.quantization))
            own = {tensor: TensorWatch(tensor, needs.spec) for tensor, needs in asked.needs}
            for tensor, needs in asked.needs:
                key = name, tensor, needs.spec
                self._now.asked[key] = _logged(key, needs)
                self._now.known.clear()
            for dump in asked.dumped:
                known = own.get(dump.tensor, TensorWatch(dump.tensor))
                own[dump.tensor] = TensorWatch(known.tensor, known.statistics, True)
                self._now.dumped[name, dump.tensor] = dump, asked.quantization
            products.append(ProductWatch(name, prefix, tuple(own.values()), asked.rounded))
        return _same(Watch(tuple(products), tuple(other))) if products else None

    def _wanted(self, name: str, base: Quantization | None, transposed: bool) -> _Asked | None:
        """Returns what is wanted of a product in this step; None for nothing."""
        if name not in self._known:
            self._known[name] = self.config.section(name)
        section = self._known[name]
        if section is None:
            return None
        if (not name or name.startswith(".")) and (name, "") not in self._said:
            self._said.add((name, ""))
            log.warning("inspect: layers without a name are one, %r: name= and name_layers give names", name)
        logged = tuple(own for own in section.logged if own.steps.hold(self.number))
        dumped = tuple(own for own in section.dumped if own.steps.hold(self.number))
        effects = active(section.effects, self.number)
        if not (logged or dumped or effects):
            return None
        own = changed(base, effects) if effects else base
        found, missing = _needs(logged, own, transposed)
        if missing and (section.name, missing) not in self._said:
            self._said.add((section.name, missing))
            log.warning("inspect: section %s: left out, first in layer %s: %s", section.name, name, missing)
        return _Asked(found, dumped, own, bool(effects) and own is not base, rounded(effects))

    def unseen(self, name: str) -> None:
        """Warn once of a layer that shows nothing where a section chooses it."""
        if (name, "unseen") not in self._said:
            self._said.add((name, "unseen"))
            section = self.config.section(name)
            if section is not None:
                what = f"section {section.name}: layer {name} shows nothing, and no feature changes it"
                log.warning("inspect: %s, since its numbers of rows stay on the device", what)

    def place(self, memory: Any, nbytes: int) -> ArrayView:
        """Returns where a call's counts and sums lie."""
        with self._lock:
            return self._arenas.place(memory, nbytes)

    def take(self, entries: Mapping[str, Entry], arrays: Sequence[Any], place: Place | None = None) -> None:
        """Keep what a call shows until the step ends."""
        with self._lock:
            self._shown.take(entries, arrays, place)

    # --- rows ----------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """End what the step shows; make the rows of steps whose numbers are on the host by now."""
        at_once = False
        if self._looked_at is not None:
            if self._wait is not None:
                self._wait()
            with self._lock:
                shown, self._shown = self._shown, Shown()
                # ranks gather together, at each end of a step
                at_once = shown.fetch(self._arenas) or self.gather is not None or self._gathers_weights()
            self._ended.append(_Ended(self.number, self._now, shown))
        self._make_rows(len(self._ended) - (self._looked_at is not None and not at_once))

    def _gathers_weights(self) -> bool:
        """Whether ranks that have parts of a weight are asked for its statistics in this step."""
        return any(tensor == "weight" and self._ranks_of(layer) for layer, tensor, _ in self._now.asked)

    def _ranks_of(self, layer: str) -> Collectives | None:
        """Returns the ranks whose parts of a weight are taken together; None where this rank's is by
        itself."""
        return None if self.gather_parts is None else self._shared.get(layer)

    def _make_rows(self, steps: int) -> None:
        """The rows of the first ``steps`` steps that wait for it."""
        ended, self._ended = self._ended[:steps], self._ended[steps:]
        for step in ended:
            self._rows_of_step(*step)

    def _rows_of_step(self, number: int, like: _Like, shown: Shown) -> None:
        """Make the rows of a step, and give them to the sinks."""
        found: dict[tuple[int, Place | None], tuple[_Logged, Record]] = {}
        for entry, place, array in shown.taken:
            if entry.kind == "dump":
                known = like.dumped.get((entry.layer, entry.tensor))
                if self._dumps is not None and known is not None:
                    layer = entry.layer if place is None else place.name_of(entry.layer)
                    self._dumps.write(number, entry._replace(layer=layer), array, *known)
                continue
            logged = like.logged(entry)
            if logged is None:
                continue  # of a forward pass in an earlier step
            key = id(logged), place
            earlier = found.get(key)
            record = shown.host(array)
            if earlier is not None and entry.tensor == "weight":
                self._say_other_weight(logged.key[0], earlier[1], record)
                continue  # the same in every micro-batch
            if earlier is not None:
                record = merge(logged.needs, earlier[1], record)
            found[key] = logged, record
        if self.gather is not None or self._shared:
            records = {logged.key: record for logged, record in found.values()}
            gathered = self._of_all_ranks(records, like.asked)
            found = {(id(key), None): (like.asked[key], record) for key, record in gathered.items()}
        made: list[Row] = []
        for (_, place), (logged, record) in sorted(found.items(), key=_in_order):
            own = {} if place is None else {"layer": place.name_of(logged.key[0])}
            for name, value in values(logged.needs, record).items():
                made.append({"step": number, **logged.rows[name], **own, "value": value})
        if self._keep:
            self._rows += made
        if made:
            for sink in self.sinks:
                sink.write(made)

    def _say_other_weight(self, layer: str, first: Record, other: Record) -> None:
        """Warn once of a layer whose weight is not the same in all calls of a step: several layers with one
        name, such as a scan's."""
        if layer and (layer, "weight") not in self._said and not np.array_equal(first, other):
            self._said.add((layer, "weight"))
            log.warning(
                "inspect: layer %s: its weight differs from call to call within a step, and the first one's "
                "statistics are logged; fp8kit_jax.layer_index tells layers of a scan apart, and log.step() "
                "ends a step before weights change",
                layer,
            )

    def _of_all_ranks(self, own: Records, asked: Mapping[Key, _Logged]) -> Records:
        """Returns the records of all ranks together: of weights those of the ranks that have parts of one."""
        weights = {key: record for key, record in own.items() if key[1] == "weight"}
        found = {key: record for key, record in own.items() if key[1] != "weight"}
        if self.gather is not None:
            found = _total(self.gather(found), asked)
        parts: dict[Collectives, Records] = {}
        for key in sorted(weights, key=lambda key: key[0]):  # in the same order on all ranks
            if (ranks := self._ranks_of(key[0])) is not None:
                parts.setdefault(ranks, {})[key] = weights[key]
        for ranks, records in parts.items():
            gather = self.gather_parts(ranks)  # type: ignore[misc]
            weights |= records if gather is None else _total(gather(records), asked)
        return found | weights


def _in_order(found: tuple[tuple[int, Place | None], tuple[_Logged, Record]]) -> tuple[Any, ...]:
    """Returns a key to sort a step's records by: layers by name, those of a stack by number, then tensors."""
    (_, place), (logged, _) = found
    layer, tensor = logged.place
    return layer, () if place is None else place.numbers, tensor


def _total(ranks: Sequence[Records], asked: Mapping[Key, _Logged]) -> Records:
    """Returns the requested records of all ranks together."""
    total: Records = {}
    for records in ranks:
        for key, record in records.items():
            if key in asked:
                total[key] = merge(asked[key].needs, total[key], record) if key in total else record
    return total


_current: list[Inspector | None] = [None]
_SERIAL = itertools.count()


@lru_cache(maxsize=4096)
def _same(watch: Watch) -> Watch:
    """Returns the same object for equal ones, whichever inspector asks: plans are found by it."""
    return watch


def _logged(key: Key, needs: Needs) -> _Logged:
    layer, tensor, _ = key
    rows: dict[str, Row] = {}
    for stat in needs.stats:
        rows[stat.name] = {"layer": layer, "tensor": tensor, "stat": stat.name, "value": None}
        if tensor in MADE_BY and not stat.of and stat.kind in ("sqnr", "cosine", "relative_error"):
            rows[stat.name]["gemm"] = MADE_BY[tensor]
    return _Logged(key, needs, (layer, inspection.TENSORS.index(tensor)), rows)


def product_name(layer: str, prefix: str) -> str:
    """Returns the name of a layer's product, with Transformer Engine's endings: ``layernorm_mlp.fc1``,
    ``experts.gemm_0``; the layer's own where it has one."""
    ending = prefix.rstrip("_")
    if not ending:
        return layer
    return f"{layer}.gemm_{ending}" if ending.isdecimal() else f"{layer}.{ending}"
