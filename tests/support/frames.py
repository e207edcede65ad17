"""The frames of fp8kit's own files between a layer's ``forward`` and the call of a kernel."""

from __future__ import annotations

import sys

from fp8kit.arrays import CPU
from fp8kit.backends import dispatch
from fp8kit.recipe import DelayedScaling, Float8CurrentScaling
from tests.support import source

RECIPES = {  # the kernel of a Linear's product, and the recipe
    "high precision": ("gemm", None),
    "current": ("fp8_gemm", Float8CurrentScaling()),
    "delayed": ("fp8_gemm", DelayedScaling()),
}
FOLDERS = tuple(f"{folder}/" for folder in source.PACKAGES.values())


def frames_to_the_kernel(monkeypatch, kernel):
    """A list that the kernel's first call on the CPU fills: names of functions, the layer's ``forward``
    first."""
    found: list[str] = []
    kernels = dispatch.kernels(CPU)
    original = getattr(kernels, kernel)

    def spy(*args):
        frame, above = sys._getframe(1), []
        while frame is not None:
            if frame.f_code.co_filename.startswith(FOLDERS):
                above.append(f"{frame.f_globals['__name__']}.{frame.f_code.co_name}")
            frame = frame.f_back
        if not found:
            layers = [i for i, name in enumerate(above) if name.endswith(".forward") and "ops." not in name]
            found.extend(above[: layers[-1] + 1][::-1])
        return original(*args)

    monkeypatch.setattr(kernels, kernel, spy)
    return found
