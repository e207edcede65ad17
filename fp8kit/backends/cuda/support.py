"""What this machine has of what the CUDA engine needs: the rows of ``fp8kit info``."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import NamedTuple

from fp8kit.backends.cuda import compile as kernel_compiler
from fp8kit.backends.cuda import cublaslt, cudnn_plans, launch
from fp8kit.backends.cuda.device import cupy, provider
from fp8kit.errors import BackendError, install

_INSTALL = install("cuda13")


class Row(NamedTuple):
    """A component, whether it "runs" or is "missing", and its version or what to do about it."""

    component: str
    status: str
    detail: str


def report() -> list[Row]:
    """Every component with its state. Never raises, and starts no more than it must to ask for versions."""
    rows = [_ask(name, question, cure) for name, question, cure in _QUESTIONS]
    for i in range(provider.count()):
        rows.append(_ask(f"device cuda:{i}", functools.partial(_device, i), "needs compute capability 8.0"))
    return rows


def _ask(name: str, question: Callable[[], str], cure: str) -> Row:
    try:
        return Row(name, "runs", question())
    except Exception as error:  # whatever a broken installation raises is the answer
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "libcuda.so" in said:  # the loader's words; the driver's row says what to do
            return Row(name, "missing", "needs the NVIDIA driver")
        return Row(name, "missing", said if "install" in said else f"{said}; {cure}")


def _driver() -> str:
    """Asked of the driver's own library: the answer needs no CuPy, and does not depend on what that says
    where the driver is missing."""
    library = launch.driver()
    version = ctypes.c_int()
    status = library.cuDriverGetVersion(ctypes.byref(version))
    if status or not version.value:
        raise BackendError(
            f"the NVIDIA driver does not say its version (cuDriverGetVersion returns {status})"
        )
    return f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"


def _device(index: int) -> str:
    properties = launch.runtime().getDeviceProperties(index)
    major, minor = launch.capability(index)
    arch = kernel_compiler.arch_of((major, minor))
    return (
        f"{properties['name'].decode()}, compute capability {major}.{minor} ({arch}), "
        f"{properties['totalGlobalMem'] / 2**30:.0f} GiB"
    )


def _cupy() -> str:
    return str(cupy().__version__)


def _nvrtc() -> str:
    return "{}.{}".format(*kernel_compiler.nvrtc_version())


def _cublaslt() -> str:
    return str(cublaslt.bindings().get_version())


def _cudnn() -> str:
    reason = cudnn_plans.missing()
    if reason is not None:
        raise BackendError(reason)
    import cudnn

    return f"{cudnn.__version__} on cuDNN {cudnn.backend_version()}"


_QUESTIONS: tuple[tuple[str, Callable[[], str], str], ...] = (
    ("driver", _driver, "install NVIDIA's driver, 580 or newer"),
    ("CuPy", _cupy, _INSTALL),
    ("NVRTC", _nvrtc, _INSTALL),
    ("cuBLASLt", _cublaslt, _INSTALL),
    ("cuDNN frontend", _cudnn, _INSTALL),
)
