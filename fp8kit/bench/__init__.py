"""``fp8kit bench``: the native library timed, its results checked; and what ``benchmarks`` times its peers
with.

``timing`` is the one way to take time, ``report`` what a run leaves behind, ``sizes`` what is measured. The
parts: ``layers``, ``kernels``, ``gemms``, ``skeleton`` (also attention alone), ``memory``, ``start``,
``breakeven``, ``casts``. Data are random, never zeros.
"""

from __future__ import annotations

from fp8kit.bench.kernels import KernelCase, copy_ceiling, kernel_cases
from fp8kit.bench.report import Part, Report, Setting, versions

__all__ = ["KernelCase", "Part", "Report", "Setting", "copy_ceiling", "kernel_cases", "versions"]
