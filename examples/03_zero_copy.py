"""Arrays of other libraries, without a copy.

Shows: anything with ``__dlpack__`` goes in and out by its address: what one library writes, the other reads;
results come back in the library of the input; FP8 codes cross as native float8 where the other side has it.
Needs: a CPU and PyTorch (extra torch); where there is a GPU and CuPy, the same is shown with a CuPy array.
"""

import numpy as np
import torch

import fp8kit as fk
from fp8kit import arrays
from fp8kit.backends.dispatch import default_device


def main() -> None:
    """Print whether addresses are equal, and what the other side sees."""
    x = torch.linspace(-2, 2, 8).reshape(2, 4)
    t = fk.tensor(x)
    print(f"torch -> fp8kit: same memory {t.view.ptr == x.data_ptr()}")
    x[0, 0] = 5.0
    print(f"torch writes 5.0, fp8kit reads {t.numpy()[0, 0]}")
    back = torch.from_dlpack(t)
    print(f"fp8kit -> torch: same memory {back.data_ptr() == x.data_ptr()}")

    q = fk.quantize(x, fk.E4M3, scale=1.0)
    native = torch.from_dlpack(q)
    print(
        f"quantize(torch tensor).data: {type(q.data).__module__} {q.data.dtype}; the Float8Tensor itself "
        f"crosses as {native.dtype}"
    )
    print(
        "torch's own cast gives the same codes: "
        f"{torch.equal(native.view(torch.uint8), x.to(torch.float8_e4m3fn).view(torch.uint8))}"
    )
    taken = fk.Float8Tensor(native, np.ones(1, np.float32), fk.E4M3)
    print(f"torch float8 -> Float8Tensor: same memory {arrays.as_view(taken.data).ptr == native.data_ptr()}")

    host = np.arange(6, dtype=np.float32).reshape(2, 3)
    print(
        f"numpy -> fp8kit: same memory {fk.tensor(host).view.ptr == host.ctypes.data}, "
        f"strides kept {fk.tensor(host.T).view.strides}"
    )

    if default_device().kind == "cuda":
        import cupy

        c = cupy.arange(6, dtype=cupy.float32).reshape(2, 3)
        there = fk.tensor(c)
        print(f"cupy -> fp8kit: same memory {there.view.ptr == c.data.ptr}")
        print(f"fp8kit -> cupy: same memory {cupy.from_dlpack(there).data.ptr == c.data.ptr}")
        print(f"quantize(cupy array).data: {type(fk.quantize(c).data).__module__.partition('.')[0]}")


if __name__ == "__main__":
    main()
