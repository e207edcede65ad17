"""How the products of attention are quantised: ``AttentionQuantization``, what a recipe's ``fp8_dpa`` and
``fp8_mha`` come to.

With S = q k^T, P = softmax(scale S) and D = rowsum(dO * o), forward and backward multiply ::

    S  = q k^T           q, k by their quantizers, features the contraction
    P' = exp(scale S - rowmax), in [0, 1], by ``p``; l = the sum of the unrounded ones
    o  = P' v / l        v by its quantizer, keys the contraction
    P  = exp(scale S - lse), by ``p`` again, with keys or queries the contraction
    dP = dO v^T          dO by ``do``
    dS = scale P (dP - D), P unrounded, by ``ds``
    dv = P^T dO,  dq = dS k,  dk = dS^T q

All sums are float32's, also where a recipe's GEMMs are summed as a chip sums: kernels of attention cut these
sums into blocks of keys and of queries, each in its own way, so that there is no one rule to follow.

Sources: Shah et al. 2024, "FlashAttention-3", arXiv 2407.08608, 3.3 (forward, blocks, rotation; its code
multiplies P by 2^8, ``Max_offset``); cuDNN's and Transformer Engine's FP8 attention (the tensors that
backward rounds; Transformer Engine, ``DotProductAttention``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fp8kit.arguments import choice, flag, integer, shown
from fp8kit.blocks import kind_of
from fp8kit.errors import RecipeError
from fp8kit.formats import E4M3
from fp8kit.quantization import ROTATIONS, SIGNS, Quantizer

P_SCALE = 256.0
_MOST_ROWS = 1 << 16


_PROBABILITIES = Quantizer(E4M3, scale_source="static", static_scale=P_SCALE)


@dataclass(frozen=True)
class AttentionQuantization:
    """How each operand of attention's products is cast; see above for which there are.

    * ``q``, ``k``, ``v``, ``do``: scales are taken from the data themselves, one for all of it ("tensor"), or
      for each block along the contraction ("mx_1x32" and the like, "block_1x128"); such an operand is cast
      once for each of its two contractions.
    * ``ds``: one scale for all of dS, from dS itself.
    * ``p``: a static scale; the largest value is 1.
    * ``rows_per_block``: 0; or n: instead of one scale for all of q, k, v or dO, so many neighbouring rows of
      a head have one (FlashAttention-3's blocks).
    * ``rotation``: 0; or n of 16, 32, 64, 128: q and k are first rotated, n neighbouring features by a
      Hadamard matrix, or as many of these as a head has; S stays the same (FlashAttention-3's incoherent
      processing). ``rotation_v``: likewise of v's features, with which o and dO rotate: o is rotated back,
      and dP and D stay the same. ``signs``: of the matrices' columns, "plus", "te", or "random", drawn for
      each call. P and dS are made a tile at a time between the products, and their contractions run over
      keys and queries of all tiles: these have no rotation.
    * ``stochastic_bits`` of any quantizer: its codes are rounded stochastically, by bits that are drawn for
      each call, the same on every engine. S has the same q and k in forward and backward.
    * ``joint``: q, k and v have one scale, and so have their gradients, whatever arrays they lie in
      (Transformer Engine's one quantizer for QKV).
    * ``o``, ``dqkv``: None; or how o, and the gradients of q, k and v, are rounded before they are handed on.
    * ``emulated``: False; or True: never by FP8 kernels (``fp8kit.ops.attention_native``), which round o and
      those gradients in any case.

    RecipeError for rules that no kernel carries out.
    """

    q: Quantizer
    k: Quantizer
    v: Quantizer
    do: Quantizer
    ds: Quantizer
    p: Quantizer = _PROBABILITIES
    rows_per_block: int = 0
    rotation: int = 0
    rotation_v: int = 0
    signs: str = "plus"
    joint: bool = False
    o: Quantizer | None = None
    dqkv: Quantizer | None = None
    emulated: bool = False

    def __post_init__(self) -> None:
        operands = {name: getattr(self, name) for name in ("q", "k", "v", "do", "ds", "p", "o", "dqkv")}
        for name, own in operands.items():
            if own is None and name in ("o", "dqkv"):
                continue
            if not isinstance(own, Quantizer):
                self._refuse(name, shown(own), "a Quantizer")
            if own.hadamard or own.levers:
                fields = "rotations by the fields 'rotation', of q and k, and 'rotation_v', none of P and dS"
                self._refuse(name, str(own), f"ties to even, no factor, no clip_gradient; {fields}")
            source = "static" if name == "p" else "current"
            if own.scale_source != source:
                self._refuse(name, own.scale_source, f"scale_source {source!r}")
            blocks = name in ("q", "k", "v", "do") and own.granularity.startswith(("mx_1x", "block_1x"))
            if own.granularity != "tensor" and not blocks:
                wanted = "'tensor'" + (", 'mx_1x32', 'block_1x128' or alike" if name in "qkvdo" else "")
                self._refuse(name, own.granularity, f"granularity {wanted}")
            if blocks:
                kind_of(own)
        for name in ("p", "ds"):
            fmt = operands[name].format
            if not (fmt.signed and fmt.zero and fmt.mantissa_bits) or fmt.twos_complement or fmt.bias > 64:
                self._refuse(name, str(fmt), "a floating-point format with a sign, a mantissa and a zero")
        if not 0 < self.p.static_scale <= self.p.format.max:
            self._refuse("p", self.p.static_scale, "a static_scale up to the format's largest value")
        integer("AttentionQuantization", "rows_per_block", self.rows_per_block, 0, _MOST_ROWS, RecipeError)
        for name in ("rotation", "rotation_v"):
            if getattr(self, name) not in (0, *ROTATIONS):
                self._refuse(name, shown(getattr(self, name)), f"one of {(0, *ROTATIONS)}")
        flag("AttentionQuantization", "emulated", self.emulated, RecipeError)
        choice("AttentionQuantization", "signs", self.signs, SIGNS, RecipeError)
        if self.signs != "plus" and not self.rotates:
            got = f"{self.signs!r} without a rotation"
            self._refuse("signs", got, "rotation or rotation_v of 16 or more, which takes it")
        whole = all(operands[name].granularity == "tensor" for name in ("q", "k", "v", "do"))
        if self.rows_per_block and not whole:
            self._refuse("rows_per_block", self.rows_per_block, "0 beside blocks along the contraction")
        if self.joint and (
            self.rows_per_block or self.rotates or not whole or not self.q == self.k == self.v
        ):
            wanted = (
                "False beside blocks, a rotation or different quantizers: all three are cast as one tensor"
            )
            self._refuse("joint", True, wanted)
        if self.dqkv is not None and self.rotates:
            self._refuse("dqkv", str(self.dqkv), "None beside a rotation, which is undone last")

    def _refuse(self, name: str, got: object, wanted: str) -> None:
        raise RecipeError("AttentionQuantization", name, got, wanted)

    @property
    def rotates(self) -> bool:
        """Whether any operand is rotated."""
        return bool(self.rotation or self.rotation_v)

    @cached_property
    def stochastic(self) -> bool:
        """Whether codes of any operand are rounded stochastically."""
        every = self.q, self.k, self.v, self.do, self.ds, self.p, self.o, self.dqkv
        return any(own is not None and own.stochastic_bits for own in every)

    @property
    def needs_rng(self) -> bool:
        """Whether a call draws random bits."""
        return self.stochastic or (self.rotates and self.signs == "random")

    @cached_property
    def one_scale_a_tensor(self) -> bool:
        """Whether these are the rules that FP8 kernels of attention know (``fp8kit.ops.attention_native``):
        one scale for each operand, no rotation, to nearest, one format forward and one backward."""
        forward = self.q, self.k, self.v, self.v if self.o is None else self.o
        backward = self.do, self.do if self.dqkv is None else self.dqkv
        return (
            not (self.emulated or self.rows_per_block or self.rotates or self.stochastic)
            and all(own.granularity == "tensor" for own in (*forward, *backward))
            and all(own.format == self.p.format for own in forward)
            and all(own.format == self.ds.format for own in backward)
        )

    @cached_property
    def step(self) -> int:
        """Rows of a head that are cast together: a multiple of every block's."""
        blocks = [own.tile[1] for own in (self.q, self.k, self.v, self.do) if own.granularity != "tensor"]
        return self.rows_per_block or max([1, *blocks])

    def rotated(self, features: int, of: str = "rotation") -> int:
        """Returns how many neighbours are rotated, by the field ``of``, in heads of so many features, 0 for
        none. RecipeError where there are fewer than any matrix has."""
        most = getattr(self, of)
        if not most:
            return 0
        fits = [n for n in ROTATIONS if n <= most and features % n == 0]
        if not fits:
            wanted = f"heads whose features are a multiple of {ROTATIONS[0]}, with a rotation of these"
            raise RecipeError("AttentionQuantization", of, f"{features} features", wanted)
        return fits[-1]

    def map(self, change: Callable[[Quantizer], Quantizer]) -> AttentionQuantization:
        """Returns the same with ``change(quantizer)`` for q, k and v."""
        return replace(self, q=change(self.q), k=change(self.k), v=change(self.v))

    def __str__(self) -> str:
        words = [f"{name}: {getattr(self, name)}" for name in ("q", "k", "v", "p", "do", "ds")]
        words += [f"{name}: {getattr(self, name)}" for name in ("o", "dqkv") if getattr(self, name)]
        words += [f"{self.rows_per_block} rows a block"] if self.rows_per_block else []
        for name, n in (("rotation", self.rotation), ("rotation of v", self.rotation_v)):
            words += [f"{name} {n}, signs {self.signs}"] if n else []
        words += ["one scale for q, k and v"] if self.joint else []
        words += ["emulated everywhere"] if self.emulated else []
        return "; ".join(words)


def check_fields(recipe: Any, dpa: str = "", mha: str = "") -> None:
    """RecipeError for a recipe's ``fp8_dpa`` and ``fp8_mha`` that are no bools, do not go together, or that
    it does not have: ``dpa``, ``mha`` say why."""
    if recipe.fp8_dpa is recipe.fp8_mha is False:
        return
    for name, why in (("fp8_dpa", dpa), ("fp8_mha", mha or dpa)):
        value = getattr(recipe, name)
        if not isinstance(value, bool) or (why and value):
            wanted = f"False: {why}" if why else "a bool"
            raise RecipeError(type(recipe).__name__, name, shown(value), wanted)
    if recipe.fp8_mha and not recipe.fp8_dpa:
        wanted = "False without fp8_dpa: what is handed on is attention's in FP8"
        raise RecipeError(type(recipe).__name__, "fp8_mha", "True", wanted)


def words_of(recipe: Any) -> str:
    """Returns what a recipe's short name says of its attention: ", dpa", ", mha" or nothing."""
    return ", mha" if recipe.fp8_mha else ", dpa" if recipe.fp8_dpa else ""


def attention_of(
    forward: Quantizer, backward: Quantizer, passes_on: bool = False, casts_on: bool = True
) -> AttentionQuantization:
    """Returns what ``fp8_dpa`` comes to with quantizers of the forward and of the backward pass, and, where
    it ``passes_on`` what is quantised, ``fp8_mha``; ``casts_on``: whether attention itself rounds what it
    hands on, which the next layer then casts by the same rule."""
    ds = Quantizer(backward.format, "tensor", "current", "power_2" if backward.power_2 else "exact")
    found = AttentionQuantization(forward, forward, forward, backward, ds, joint=passes_on)
    return replace(found, o=forward, dqkv=backward) if passes_on and casts_on else found
