"""The kernel lab: change one kernel, see at once whether it is still right and how fast it is, and run a
whole training with it.

``override`` puts an implementation of yours in the place of an operation's; ``native`` shows its arrays as
NumPy or CuPy arrays. ``check``, ``measure`` and ``fp8kit kernels`` (``fp8kit.commands.kernels``) look at one
operation alone. See docs/kernel_lab.md.
"""

from __future__ import annotations

from typing import Any

from fp8kit import arrays
from fp8kit.arrays import ArrayView
from fp8kit.lab.checks import check
from fp8kit.lab.overrides import Override, override
from fp8kit.lab.timing import measure

__all__ = ["Override", "check", "measure", "native", "override"]


def native(view: ArrayView | None) -> Any:
    """Returns an array of a kernel's arguments as an array of its device's own library, NumPy or CuPy, over
    the same memory; None for None.

    Any shape, strides kept. Float dtypes are those of ``ml_dtypes`` where NumPy has none; FP8 codes are
    uint8. BackendError where CuPy is missing.
    """
    return None if view is None else arrays.native(view)
