"""``FP8Layer``: a layer that is one operation, whose GEMMs run in FP8 under ``autocast``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar

from fp8kit.layers.arguments import want_plain
from fp8kit.layers.base import Layer
from fp8kit.ops.product import ProductSpec
from fp8kit.quantization import Quantization
from fp8kit.scaling import forward_slots
from fp8kit.spec import Operation


def layer_products(spec: Any) -> list[ProductSpec]:
    """The products of a layer's spec, in order."""
    own = [value for value in vars(spec).values() if isinstance(value, ProductSpec)]
    return list(getattr(spec, "products", own))


def layer_spec(
    spec: Any,
    fp8: Quantization | None,
    cached: bool,
    bias: str,
    options: tuple[tuple[str, Any], ...],
    more: tuple[tuple[str, Any], ...] = (),
) -> Any:
    """``spec`` with its products in FP8 or not, their weights cached or not, ``bias`` of the last one,
    ``options`` as further fields, and ``more`` as further fields of the products."""
    names = [
        field.name for field in dataclasses.fields(spec) if isinstance(getattr(spec, field.name), ProductSpec)
    ]
    changes = {
        name: dataclasses.replace(getattr(spec, name), fp8=fp8, weight_cached=cached, **dict(more))
        for name in names
    }
    changes[names[-1]] = dataclasses.replace(changes[names[-1]], bias=bias)
    return dataclasses.replace(spec, **changes, **dict(options))


@lru_cache(maxsize=64)
def scale_names(gemms: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the scales that a layer's forward reads from its state, in the order of the slots."""
    return tuple(f"{operand}_scale" for operand in forward_slots(gemms))


class FP8Layer(Layer):
    """Base of layers whose GEMMs run in FP8 under ``autocast``.

    ``operation``: what the layer is. ``gemms``: prefixes of the operation's names, one a GEMM. A subclass
    gives ``set_spec`` its spec in high precision, and defines ``weight_inputs`` and ``calibrate``.
    """

    operation: ClassVar[Operation]
    gemms: tuple[str, ...] = ("",)
    # further fields of the spec while calibrating
    calibration_options: ClassVar[dict[str, Any]] = {}
    fuse_wgrad_accumulation = False

    # --- what a subclass gives ------------------------------------------------------------------------------

    def weight_inputs(self) -> dict[str, Any]:
        """The weights by their name in the operation."""
        raise NotImplementedError

    def calibrate(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> list[tuple[int, Any]]:
        """Of a pass in high precision, each GEMM's input (slot 3 i) and weight (3 i + 1): (slot, a tensor
        whose amax counts). ``inputs``, ``outputs``: the operation's, by name."""
        raise NotImplementedError

    # --- what a frontend gives ------------------------------------------------------------------------------

    def run(
        self,
        inputs: dict[str, Any],
        is_first_microbatch: bool | None,
        bias: str,
        fp8_output: bool = False,
        fp8_grad: bool = False,
        **options: Any,
    ) -> dict[str, Any]:
        """The layer's operation on ``inputs`` (x and parameters), as the autocast says. ``bias``: of the last
        product; ``fp8_output``, ``fp8_grad``: y, and the gradient of x, in FP8 where FP8 is on (see
        ``Linear``); ``options``: further fields of the spec."""
        raise NotImplementedError

    def activated_amax(self, normed: Any, weight: Any, bias: Any) -> Any:
        """The amax, float32 (1,), of act(normed weight^T + bias), for ``LayerNormMLP``."""
        raise NotImplementedError

    # --- checks ---------------------------------------------------------------------------------------------

    def check_options(self, is_first_microbatch: Any, fp8_output: Any = False, fp8_grad: Any = False) -> None:
        """Fp8kitError kinds for options of ``forward`` that are no flags, or that this frontend does not
        have."""
        want_plain(self.layer_name, is_first_microbatch, fp8_output, fp8_grad)
        if fp8_output or fp8_grad:
            self.check_supported({"fp8_output": fp8_output, "fp8_grad": fp8_grad})
