"""Calls of arrays, tensors, formats and switches."""

from __future__ import annotations

import numpy as np

import fp8kit as fk
from fp8kit import arrays, autograd, formats
from fp8kit.arrays import CPU
from tests.support.calls.call import Call, X, always, leaf, method, plain, positional, view, within


def q8() -> fk.QuantizedArray:
    return fk.quantize(X)


CALLS: dict[str, Call] = {
    "ArrayView": plain(
        arrays.ArrayView,
        ptr=always(X.ctypes.data),
        shape=always((3, 4)),
        dtype=always(formats.float32),
        device=always(CPU),
        owner=always(X),
    ),
    "ArrayView.reshape": positional(
        lambda self, *shape: self.reshape(*shape), self=view, first=always(4), second=always(-1)
    ),
    "ArrayView.repeated": method("repeated", lambda: view().slice(0, 0, 1).slice(1, 0, 1), count=always(3)),
    "ArrayView.slice": method("slice", view, dim=always(0), start=always(1), length=always(2)),
    "ArrayView.transpose": positional(
        lambda self, *axes: self.transpose(*axes), self=view, first=always(1), second=always(0)
    ),
    "ArrayView.view": method("view", view, dtype=always(formats.int32)),
    "Device": plain(
        lambda kind, index: arrays.empty((2,), formats.uint8, arrays.Device(kind, index)),
        kind=always("cpu"),
        index=always(0),
    ),
    "synchronize": plain(fk.synchronize, where=always(CPU)),
    "Tensor": plain(fk.Tensor, view=view, requires_grad=always(True)),
    "Tensor.copy_": method("copy_", lambda: fk.tensor(X.copy()), source=view),
    "Tensor.add_": method("add_", lambda: fk.tensor(X.copy()), other=view),
    "Tensor.__add__": positional(lambda a, b: a + b, a=leaf, b=leaf),
    "Tensor.register_hook": positional(
        lambda t, hook: (t.register_hook(hook), (t + t).backward(np.ones_like(X))),
        t=leaf,
        hook=always(lambda g: None),
    ),
    "Tensor.backward": positional(
        lambda t, gradient, retain: (t + t).backward(gradient, retain),
        t=leaf,
        gradient=view,
        retain=always(False),
    ),
    "Tensor.reshape": positional(lambda t, a, b: t.reshape(a, b), t=leaf, a=always(6), b=always(2)),
    "Tensor.item": positional(lambda t: t.item(), t=lambda: fk.tensor(np.ones(1, np.float32))),
    "no_grad": plain(fk.no_grad),
    "tensor": plain(
        fk.tensor,
        array=lambda: X.copy(),
        requires_grad=always(True),
        dtype=always("bfloat16"),
        device=always("cpu"),
    ),
    "autograd.set_grad_enabled": plain(
        lambda enabled: autograd.set_grad_enabled(enabled).__exit__(), enabled=always(True)
    ),
    "deterministic": plain(lambda enabled: within(fk.deterministic(enabled)), enabled=always(False)),
    "use_backend": plain(lambda name: within(fk.use_backend(name)), name=always("reference")),
    "override": plain(
        lambda **given: within(fk.override(**given)),
        operation=always("add"),
        function=always(None),
        verify=always(True),
        implementation=always(lambda a, b, out, stream: None),
    ),
    "QuantizedArray": plain(
        fk.QuantizedArray,
        data=lambda: np.zeros((3, 4), np.uint8),
        scale_inv=lambda: np.ones((3, 1), np.float32),
        format=always(fk.E2M1),
        scaling=always("nvfp4_1x16"),
        scale_codes=lambda: np.full((3, 1), 0x38, np.uint8),
        tensor_scale_inv=lambda: np.ones(1, np.float32),
        scale_rule=always("exact"),
        along=always(-1),
        rotation=always(None),
    ),
    "QuantizedArray.from_packed": plain(
        fk.QuantizedArray.from_packed,
        packed=lambda: np.zeros((3, 2), np.uint8),
        scale_inv=lambda: np.ones(1, np.float32),
        format=always(fk.E2M1),
        scaling=always("tensor"),
    ),
    "QuantizedArray.dequantize": method("dequantize", q8, dtype=always("float32"), rotated=always(True)),
    "QuantizedArray.matmul": method(
        "matmul", q8, other=lambda: q8().T, dtype=always("float32"), fast_accumulate=always(False)
    ),
    "QuantizedArray.explain": method("explain", q8, other=lambda: q8().T),
    "QuantizedArray.packed": positional(lambda t: t.packed(), t=lambda: fk.quantize(X, fk.E2M1)),
    "QuantizedArray.swizzled_scales": positional(
        lambda t: t.swizzled_scales(), t=lambda: fk.quantize(X, scaling="nvfp4_1x16")
    ),
    "QuantizedArray.reshape": positional(lambda t, a, b: t.reshape(a, b), t=q8, a=always(6), b=always(-1)),
    "QuantizedArray.__getitem__": positional(lambda t, index: t[index], t=q8, index=always(1)),
    "quantize": plain(
        fk.quantize,
        x=lambda: X.copy(),
        format=always(fk.E5M2),
        scale=always(2.0),
        scaling=always("tensor"),
        rounding=always("stochastic"),
        saturate=always(True),
        rng=always((1, 2)),
        scale_rule=always(None),
        stochastic_bits=always(8),
        along=always(0),
        hadamard=always(16),
        signs=always("random"),
    ),
    "matmul": plain(
        fk.matmul, a=q8, b=lambda: q8().T, accumulate=always("hopper_fast"), dtype=always("float32")
    ),
    "Accumulation": plain(fk.Accumulation, fraction_bits=always(13), chunk=always(32), promote=always(128)),
    "Format": plain(
        fk.Format,
        name=always("x"),
        exponent_bits=always(4),
        mantissa_bits=always(3),
        bias=always(7),
        special=always("fn"),
        signed=always(True),
        zero=always(True),
        twos_complement=always(False),
    ),
    "draw_from": plain(
        lambda source: within(fk.draw_from(source)), source=always(lambda device: np.array([1, 2]))
    ),
    "manual_seed": plain(fk.manual_seed, seed=always(3)),
    "formats.dtype": plain(formats.dtype, value=always("float32")),
    "formats.dtype_from_dlpack": plain(formats.dtype_from_dlpack, code=always(2), bits=always(32)),
    "formats.dtype_of_format": plain(formats.dtype_of_format, fmt=always(fk.E4M3)),
    "arrays.device": plain(arrays.device, value=always("cpu")),
    "arrays.as_view": plain(arrays.as_view, array=lambda: X.copy()),
    "arrays.as_sizes": plain(arrays.as_sizes, shape=always((2, 3))),
    "arrays.available": plain(arrays.available, kind=always("cpu")),
    "arrays.contiguous": plain(arrays.contiguous, view=view),
    "arrays.copy": plain(arrays.copy, dst=view, src=view),
    "arrays.current_stream": plain(arrays.current_stream, where=always(CPU)),
    "arrays.empty": plain(arrays.empty, shape=always((2, 3)), dtype=always(formats.uint8), where=always(CPU)),
    "arrays.zeros": plain(arrays.zeros, shape=always((2, 3)), dtype=always(formats.uint8), where=always(CPU)),
    "arrays.zero_": plain(arrays.zero_, view=view),
    "arrays.provider": plain(arrays.provider, where=always(CPU)),
    "arrays.to": plain(arrays.to, view=view, where=always(CPU)),
    "arrays.to_library": plain(arrays.to_library, view=view, like=always(X)),
}
