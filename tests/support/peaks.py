"""The layer whose peak memory is promised, at its full size on the CPU: its kernels do nothing, so that no
memory is touched, and its workspaces are as large as on a GPU."""

from __future__ import annotations

from fp8kit import arrays
from fp8kit.backends import dispatch
from fp8kit.backends.cuda import activation, elementwise, gemm, norm, quantize
from fp8kit.backends.protocol import Kernels

HIDDEN, FFN, HEADS, SEQUENCE, BATCH = 4096, 16384, 32, 2048, 4
TOKENS = SEQUENCE * BATCH
# What torch eager takes in bfloat16, measured on an H200: 2.005 GiB, of which 512 MiB are parameters, x and
# dy
EAGER = int(2.005 * 2**30)
# the matrices, x and dy
STANDING = 2 * (3 * HIDDEN * HIDDEN + HIDDEN * HIDDEN + 2 * HIDDEN * FFN) + 2 * 2 * TOKENS * HIDDEN
ATTENTION = 300 << 20  # cuDNN's workspace is less


def hollow(monkeypatch):
    """From now on the CPU's kernels do nothing, and ask for the workspaces of a GPU's."""
    kernels = dispatch.kernels(arrays.CPU)
    for name in dir(Kernels):
        if not name.startswith("_") and not name.endswith("workspace"):
            monkeypatch.setattr(kernels, name, lambda *arguments: None, raising=False)
    for module in (activation, elementwise, gemm, norm, quantize):
        for name in vars(module):
            if name.endswith("_workspace") and not name.startswith("_") and hasattr(Kernels, name):
                monkeypatch.setattr(kernels, name, getattr(module, name), raising=False)
    monkeypatch.setattr(kernels, "attention_workspace", lambda *arguments: ATTENTION, raising=False)


def stream_everything(monkeypatch):
    """From now on the buffers of new plans are streamed, however small."""
    monkeypatch.setattr("fp8kit.buffers.STREAMED_TOTAL", -1)
    monkeypatch.setattr("fp8kit.buffers.STREAMED_EACH", 0)
