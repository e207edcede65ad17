"""What ``fp8kit recipes`` says of a recipe: where it runs and how, and what it does to the operands of the
three GEMMs."""

from __future__ import annotations

from dataclasses import fields
from enum import Enum
from typing import Any, NamedTuple

from fp8kit import arrays, scaled_products
from fp8kit.accumulation import Accumulation
from fp8kit.arrays import CPU, Device
from fp8kit.attention_quantization import AttentionQuantization
from fp8kit.backends import dispatch
from fp8kit.errors import BackendError, UnsupportedError
from fp8kit.ops.product_emulated import EmulatedProduct
from fp8kit.ops.products import product_class
from fp8kit.quantization import OPERANDS, AmaxHistory, Quantization, Quantizer
from fp8kit.recipe import Recipe
from fp8kit.recipes import entry

NATIVE, EMULATED, REFUSED = "native", "emulated", "refused"


class Support(NamedTuple):
    """How a recipe runs somewhere: ``status`` "native", its products multiply the codes; "emulated", the
    codes' values in high precision; "refused". ``why`` it is refused; or how it is emulated, and which GEMMs
    are not; or what is emulated where the rest is native: sums that are a chip's on every device, attention;
    and that it has not been run so."""

    status: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.status}: {self.why}" if self.why else self.status


def support_of(recipe: Recipe, capability: tuple[int, int] | None) -> Support:
    """Returns how a recipe runs on a CUDA device of compute capability (major, minor), None: on a CPU. Needs
    no such device."""
    fp8 = _quantization(recipe, capability)
    try:
        products = product_class(fp8)
    except UnsupportedError as error:
        return Support(REFUSED, str(error))
    if capability is not None:
        for what, least in ((products.described, products.capability), ("the CUDA engine", _engine())):
            if capability < least:
                wanted, have = (".".join(map(str, each)) for each in (least, capability))
                return Support(REFUSED, f"{what} needs compute capability {wanted}, not {have}")
    if issubclass(products, EmulatedProduct):
        return _emulated(fp8, recipe.attention, capability)
    if capability is not None and capability < products.tensor_cores:
        return Support(EMULATED, "codes become float16 in the product")
    modelled = any(isinstance(gemm.how, Accumulation) for gemm in recipe.quantization.gemms.values())
    words = "its sums are emulated" * modelled, _attention_words(recipe.attention, capability)
    return Support(NATIVE, "; ".join(filter(None, words)))


def _quantization(recipe: Recipe, capability: tuple[int, int] | None) -> Quantization:
    """Returns what a recipe means for layers on such a device."""
    scales = capability is not None and capability >= scaled_products.CAPABILITY
    return scaled_products.scaled(recipe.quantization) if scales else recipe.quantization


def _emulated(
    fp8: Quantization, attention: AttentionQuantization | None, capability: tuple[int, int] | None
) -> Support:
    """Returns the support of emulated products, of which some GEMMs may be on codes."""
    used = {name: gemm.scaled for name, gemm in fp8.gemms.items() if gemm.compute == "quantized"}
    native = [name for name, scaled in used.items() if scaled]
    if not native:
        return Support(EMULATED)
    if len(native) < len(used):
        return Support(EMULATED, f"{' and '.join(native)} native ({scaled_products.UNTRIED})")
    words = scaled_products.UNTRIED, _attention_words(attention, capability)
    return Support(NATIVE, "; ".join(filter(None, words)))


def _engine() -> tuple[int, int]:
    """Returns the least compute capability that the CUDA engine takes."""
    from fp8kit.backends.cuda import MIN_ARCH

    return divmod(MIN_ARCH, 10)


def _attention_words(how: AttentionQuantization | None, capability: tuple[int, int] | None) -> str:
    """Returns how attention's products run on a device; "" where they are in high precision."""
    if how is None:
        return ""
    from fp8kit.backends.cuda import cudnn_fp8

    have = 0 if capability is None else 10 * capability[0] + capability[1]
    if have == cudnn_fp8.HOPPER and how.one_scale_a_tensor:
        return "attention too where cuDNN's FP8 kernels take it"
    return "attention is emulated"


def support_on(recipe: Recipe, device: Device) -> Support:
    """Returns how a recipe runs on a device of this machine: ``support_of``, and refused where a kernel of
    its products has no implementation there."""
    capability = None
    try:
        if device.kind == "cuda":
            from fp8kit.backends.cuda import launch

            capability = launch.capability(device.index)
        found = support_of(recipe, capability)
        if found.status == REFUSED:
            return found
        for kernel in product_class(_quantization(recipe, capability)).kernels:
            usable, refused = dispatch.candidates(kernel, device)
            if not usable:
                why = "; ".join(f"{impl.impl_id} {why}" for impl, why in refused)
                return Support(REFUSED, f"{kernel}: {why or 'nothing implements it'}")
    except BackendError as error:
        return Support(REFUSED, str(error))
    return found


def devices() -> list[Device]:
    """Returns the CPU and the CUDA devices of this machine."""
    count = arrays.provider(Device("cuda")).count() if arrays.available("cuda") else 0
    return [CPU, *(Device("cuda", index) for index in range(count))]


def cast_facts(quantizer: Quantizer) -> dict[str, Any]:
    """Returns how an operand is cast, by name, values that JSON has: ``format``, ``granularity``, ``scale``
    (source and rule; "delayed" alone, whose rule is the recipe's ``history``), ``rounding_bits`` (0: to
    nearest), ``rotation`` (None, or neighbours and signs), ``epsilon``, and, where they are not the defaults,
    ``ties``, ``factor`` and ``clip_gradient``."""
    rotated = f"hadamard {quantizer.hadamard}, signs {quantizer.signs}" if quantizer.hadamard else None
    return {
        "format": str(quantizer.format),
        "granularity": quantizer.granularity,
        "scale": _scale_words(quantizer),
        "rounding_bits": quantizer.stochastic_bits,
        "rotation": rotated,
        "epsilon": quantizer.epsilon,
        **{name: getattr(quantizer, name) for name in quantizer.levers},
    }


def _scale_words(quantizer: Quantizer) -> str:
    """Source and rule of an operand's scale; that of one from earlier steps is the state's."""
    source = quantizer.scale_source
    return source if quantizer.needs_state else f"{source}, {quantizer.scale_rule}"


def gemm_facts(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """GEMM -> ``compute``, ``accumulation``, ``recast``, and ``operands``: matrix -> ``cast_facts``, {} of
    one that is not cast. Of a GEMM that computes with the values which fprop multiplied ("dequantized") x and
    w are cast as fprop has them, g is not."""
    found: dict[str, dict[str, Any]] = {}
    for name, gemm in recipe.quantization.gemms.items():
        operands = {}
        for matrix, side, quantizer in zip(OPERANDS[name], "ab", (gemm.a, gemm.b), strict=True):
            if gemm.compute == "dequantized":
                operands[matrix] = found["fprop"]["operands"].get(matrix, {})
            else:
                is_cast = gemm.compute == "quantized" and gemm.plain != side
                operands[matrix] = cast_facts(quantizer) if is_cast else {}
        how = {"compute": gemm.compute, "accumulation": gemm.accumulation, "recast": gemm.recast}
        found[name] = how | {"operands": operands}
    return found


def attention_facts(recipe: Recipe) -> dict[str, Any]:
    """Returns how attention's operands are cast, operand -> ``cast_facts``, and ``rows_per_block``,
    ``rotation``, ``rotation_v``, ``signs``, ``joint``, as ``AttentionQuantization`` says them, and
    ``compute``, how the products run; {} where attention is in high precision."""
    how = recipe.attention
    if how is None:
        return {}
    operands = {name: getattr(how, name) for name in ("q", "k", "v", "p", "do", "ds", "o", "dqkv")}
    found = {name: cast_facts(own) for name, own in operands.items() if own is not None}
    found["p"]["scale"] = f"static, {how.p.static_scale:g}"
    names = "rows_per_block", "rotation", "rotation_v", "signs", "joint"
    options = {name: getattr(how, name) for name in names}
    compute = f"{EMULATED}, but where cuDNN's FP8 kernels take them" if how.one_scale_a_tensor else EMULATED
    return {"operands": found, **options, "compute": compute}


def field_values(recipe: Recipe) -> dict[str, str]:
    """Returns the fields of a recipe, as they are written in Python."""
    own = (each.name for each in fields(recipe) if each.init)  # type: ignore[arg-type]
    values = {name: getattr(recipe, name) for name in own}
    plain = Enum | Quantization | AttentionQuantization | AmaxHistory
    return {name: str(v) if isinstance(v, plain) else repr(v) for name, v in values.items()}


def facts(name: str) -> dict[str, Any]:
    """All that is said of a published recipe, values that JSON has. ArgumentError for another name.
    ``capabilities``: from which compute capability on it runs otherwise."""
    recipe, source = entry(name)
    least = scaled_products.CAPABILITY
    changes = scaled_products.scaled(recipe.quantization) is not recipe.quantization
    return {
        "name": name,
        "recipe": type(recipe).__name__,
        "short_name": recipe.short_name(),
        "source": source,
        "devices": {str(device): support_on(recipe, device)._asdict() for device in devices()},
        "capabilities": {"{}.{}".format(*least): support_of(recipe, least)._asdict()} if changes else {},
        "random": recipe.needs_rng,
        "state": recipe.history is not None,
    }
