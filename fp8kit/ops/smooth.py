"""Smooth-SwiGLU (Fishman et al. 2024, arXiv:2409.12517): within ``norm_mlp`` the activation is cast as
act(u) (v / s), and the product behind it multiplied by s, so that one hidden channel's, or one token's,
outliers do not take the scale of all others.

By "channel", s is the power of two at or below the largest |v| of a hidden channel, and multiplies the
columns of fc2's weight before its cast: a power of two rounds neither the weight nor its gradient once more,
so that the product is the same to the last bit but for the casts. By "token", s is the largest |v| of a
token, as in the released codes, and multiplies the rows of y. An s of 0 is 1. s is a constant to the
gradients. Without casts s would change nothing, or roundings alone: in high precision the layer runs without
it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fp8kit.arrays import ArrayView
from fp8kit.buffers import free
from fp8kit.formats import float32
from fp8kit.ops.product import Product, ProductSpec
from fp8kit.spec import Meta, WorkingSet

LINES = ("channel", "token")


def inner_product(by: str, product: ProductSpec) -> ProductSpec:
    """fc2 as it is carried out: a bias is added behind s, a gradient is scaled before it is added."""
    if by == "token" and product.bias == "add":
        return replace(product, bias="deferred")
    return replace(product, overwrite_grad=True) if by == "channel" and product.main_grad else product


@dataclass(frozen=True)
class Smoothing:
    """What smoothing ``by`` "channel" or "token" adds to fc2's ``product``. ``spec``: fc2 as the layer has
    it."""

    by: str
    spec: ProductSpec
    product: Product

    @property
    def axis(self) -> int:
        """The dimension of the activation that s belongs to."""
        return int(self.by == "channel")

    @property
    def weight(self) -> str:
        """The input that s multiplies, by channel."""
        return f"{self.spec.prefix}weight0"

    @property
    def _weight_axis(self) -> int:
        return int(self.spec.layout == "oi")

    @property
    def _adds(self) -> bool:
        return self.spec.main_grad is not None and not self.spec.overwrite_grad

    # --- what there is --------------------------------------------------------------------------------------

    def scales(self) -> dict[str, Meta]:
        """s, read by backward too."""
        return {"smooth": Meta((self.product.k if self.axis else self.product.m,), float32)}

    def scratch(self) -> dict[str, Meta]:
        """Forward's temporaries: the weight times s."""
        shape = (
            (self.product.n, self.product.k) if self.spec.layout == "oi" else (self.product.k, self.product.n)
        )
        return {"smooth_weight": Meta(shape, self.product.dtype)} if self.axis else {}

    def backward_scratch(self) -> dict[str, Meta]:
        """Backward's temporaries: the gradient of y times s; that of the weight before it is, and the weight
        times s where it is read in high precision."""
        p = self.product
        if not self.axis:
            return {"smooth_g": Meta((p.m, p.n), p.dtype)}
        found = self.scratch() if self.weight in p.kept() else {}
        if p.needs_w:
            found |= {"smooth_dweight": Meta(self.scratch()["smooth_weight"].shape, p.grad_dtype)}
        return found

    def grads(self) -> dict[str, Meta]:
        """fc2's gradients."""
        own = self.product.grads()
        return {
            name: meta._replace(zero=self._adds) if name == self.weight else meta
            for name, meta in own.items()
        }

    # --- forward --------------------------------------------------------------------------------------------

    def measure(self, ws: WorkingSet, h: ArrayView, bias: ArrayView | None) -> None:
        """s of fc1's output, whose second half of columns is v."""
        half = h.shape[1] // 2
        shift = None if bias is None else bias.slice(0, half, half)
        ws.kernels.line_scales(
            h.slice(1, half, half), shift, self._s(ws), self.axis, bool(self.axis), ws.stream
        )

    def divide(self, ws: WorkingSet, act: ArrayView) -> None:
        """act / s, in place: the activation, or its gradient."""
        ws.kernels.scale_lines(act, self._s(ws), act, self.axis, 1.0, True, ws.stream)

    def scaled(self, ws: WorkingSet) -> WorkingSet:
        """Returns the working set with the weight times s in the weight's place, where s is by channel."""
        if not self.axis:
            return ws
        out, weight = ws.scratch["smooth_weight"], ws.inputs[self.weight]
        ws.kernels.scale_lines(weight, self._s(ws), out, self._weight_axis, 1.0, False, ws.stream)
        return ws._replace(inputs={**ws.inputs, self.weight: out})

    def fprop(self, ws: WorkingSet, act: ArrayView | None, y: ArrayView, addend: ArrayView | None) -> None:
        """``Product.fprop`` of the cast activation, with s."""
        if self.axis:
            self.product.fprop(self.scaled(ws), act, y, addend)
            free(ws.scratch, "smooth_weight")
            return
        self.product.fprop(ws, act, y, None)
        ws.kernels.scale_lines(y, self._s(ws), y, 0, 1.0, False, ws.stream)
        bias = ws.inputs[f"{self.spec.prefix}bias0"] if self.spec.bias == "add" else None
        if bias is not None or addend is not None:
            ws.kernels.dropout_add(y, bias, addend, y, 0.0, None, ws.stream)

    def save_weight(self, ws: WorkingSet) -> None:
        """``Product.save_weight``, with s."""
        self.product.save_weight(self.scaled(ws))

    # --- backward -------------------------------------------------------------------------------------------

    def cast_g(self, ws: WorkingSet, g: ArrayView) -> ArrayView:
        """``Product.cast_g``; returns the gradient that the products read."""
        if self.axis:
            self.product.cast_g(ws, g)
            return g
        scaled = ws.scratch["smooth_g"]
        ws.kernels.scale_lines(g, self._s(ws), scaled, 0, 1.0, False, ws.stream)
        Product.cast_g(self.product, ws, g)  # the bias' sums alone: it is added behind s
        self.product.cast_g(ws, scaled, with_bias=False)
        return scaled

    def wgrad(self, ws: WorkingSet, g: ArrayView, act: ArrayView | None) -> None:
        """``Product.wgrad``, with s."""
        if not self.axis:
            self.product.wgrad(ws, g, act)
            return
        made, out = ws.scratch["smooth_dweight"], ws.outputs[self.weight]
        self.product.wgrad(ws._replace(outputs={**ws.outputs, self.weight: made}), g, act)
        target = made if self._adds else out
        ws.kernels.scale_lines(made, self._s(ws), target, self._weight_axis, 1.0, False, ws.stream)
        if self._adds:
            ws.kernels.add(out, made, out, ws.stream)
        del made, target
        free(ws.scratch, "smooth_dweight")

    def dgrad(self, ws: WorkingSet, g: ArrayView, dact: ArrayView) -> None:
        """``Product.dgrad``, with s: the gradient of the activation."""
        rescaled = self.axis and self.weight in self.product.kept()
        self.product.dgrad(self.scaled(ws) if rescaled else ws, g, dact)
        free(ws.scratch, "smooth_weight", "smooth_g")
        self.divide(ws, dact)

    # --- helpers --------------------------------------------------------------------------------------------

    def _s(self, ws: WorkingSet) -> ArrayView:
        return ws.saved.get("smooth") or ws.scratch["smooth"]
