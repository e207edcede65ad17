"""What the inspector's features make of a layer's recipe: another ``Quantization`` for a product."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from fp8kit.errors import UnsupportedError
from fp8kit.formats import E4M3, E5M2
from fp8kit.inspection import MADE_BY
from fp8kit.numerics.config import Effect, operands_of
from fp8kit.quantization import Gemm, Quantization, Quantizer
from fp8kit.recipe import MXFP8BlockScaling

_PLAIN = Quantizer(E4M3)
HIGH_PRECISION = Quantization(*(Gemm(_PLAIN, _PLAIN, compute="high_precision") for _ in range(3)))
_MX = MXFP8BlockScaling().quantization.x
_FAKE = {
    "FP8E4M3": Quantizer(E4M3),
    "FP8E5M2": Quantizer(E5M2),
    "MXFP8E4M3": _MX,
    "MXFP8E5M2": replace(_MX, format=E5M2),
}


@lru_cache(maxsize=1024)
def changed(base: Quantization | None, effects: tuple[Effect, ...]) -> Quantization | None:
    """Returns the rules of a product with rules ``base``, None for high precision, under those effects; the
    same object for equal ones.

    A GEMM in high precision counts more than one with fake operands, and that more than current scales.
    UnsupportedError for current scales where there are no scales of earlier steps, as in Transformer Engine.
    """
    gemms = dict((base or HIGH_PRECISION).gemms)
    for kind in ("current", "fake", "high_precision"):
        for effect in effects:
            if effect.kind == kind:
                gemms[effect.gemm] = _changed(gemms[effect.gemm], effect, base)
    if all(gemm.compute == "high_precision" for gemm in gemms.values()):
        return None
    for name in ("dgrad", "wgrad"):  # there may be no codes of fprop any more
        if gemms[name].compute == "dequantized" and gemms["fprop"].compute == "high_precision":
            gemms[name] = replace(gemms[name], compute="high_precision")
    return Quantization(**gemms)


def _changed(gemm: Gemm, effect: Effect, base: Quantization | None) -> Gemm:
    sides = {side: form for tensor, form in effect.tensors if (side := operands_of(effect.gemm).get(tensor))}
    if effect.kind == "high_precision":
        return Gemm(gemm.a, gemm.b, gemm.accumulation, "high_precision")
    if effect.kind == "fake":
        if not sides:
            return Gemm(gemm.a, gemm.b, gemm.accumulation, "high_precision")
        own = {side: _FAKE[form] for side, form in sides.items()}
        plain = "".join(side for side in "ab" if side not in own)
        a, b = own.get("a", _PLAIN), own.get("b", _PLAIN)
        return Gemm(a, b, "split", "quantized", plain=plain, emulated=True)  # as it is asked for
    if base is None or not base.fprop.a.needs_state:
        wanted = "DelayedScaling around the layer: others take no scales of earlier steps"
        got = "high precision" if base is None else f"a recipe whose input is {base.fprop.a}"
        raise UnsupportedError("inspect", "PerTensorScaling", got, wanted)
    if gemm.compute != "quantized":
        return gemm
    a, b = (
        replace(q, scale_source="current") if side in sides else q
        for side, q in (("a", gemm.a), ("b", gemm.b))
    )
    return replace(gemm, a=a, b=b)


def rounded(effects: Iterable[Effect]) -> tuple[tuple[str, Quantizer], ...]:
    """Returns what GEMMs make and is rounded then: pairs of "output", "dgrad" or "wgrad" and how."""
    fakes = [effect for effect in effects if effect.kind == "fake"]
    return tuple(
        (tensor, _FAKE[form])
        for effect in fakes
        for tensor, form in effect.tensors
        if MADE_BY.get(tensor) == effect.gemm
    )


def active(effects: Iterable[Effect], step: int) -> tuple[Effect, ...]:
    """Those that hold at a step."""
    return tuple(effect for effect in effects if effect.steps.hold(step))
