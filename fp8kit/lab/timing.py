"""How fast what serves an operation is, beside the ceiling of everything that moves memory: a copy of as many
bytes.

The bytes of a call are those of its arrays: each input read once, each output written once, what is changed
in place both; workspaces not counted. The copy moves as many, half of them read and half written. On a GPU
time is taken by events round calls that are queued back to back, on a CPU by the clock. Data are random,
never zeros: power, and so speed, depends on the bits.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8kit import arrays, formats
from fp8kit.arrays import ArrayView, Device
from fp8kit.backends import dispatch
from fp8kit.backends.protocol import AttentionExtras, Cast, block_shapes
from fp8kit.errors import ArgumentError, FormatError, ShapeError
from fp8kit.formats import E4M3, DType, bfloat16, float16, float32, int32, int64, uint8
from fp8kit.lab.outputs import outputs, views
from fp8kit.testing.attention import Rules

ROUNDS, CALLS, WARM_UPS = 7, 10, 2
FLOATS = (float32, bfloat16, float16)  # dtypes to choose from
# beyond the last cache on a GPU: two bfloat16 arrays are 256 MiB
SHAPES = {"cpu": (1024, 1024), "cuda": (8192, 8192)}


@dataclass(frozen=True)
class Measurement:
    """``seconds`` of a call of ``shape`` (rows, columns) and of the copy, ``ceiling``, that moves its
    ``nbytes`` bytes. ``flops``: what products and attention compute, 0 of whatever only moves memory."""

    operation: str
    implementation: str
    device: Device
    shape: tuple[int, int]
    nbytes: int
    seconds: float
    ceiling: float
    flops: float = 0.0

    @property
    def share(self) -> float:
        """How much of the copy's speed is reached: 1 is the ceiling."""
        return float(self.ceiling / self.seconds)

    def __str__(self) -> str:
        rate, size = self.nbytes / self.seconds / 1e9, self.nbytes / 2**20
        what = f"{self.operation}: {self.implementation} on {self.device}, {self.shape[0]} x {self.shape[1]}"
        if self.flops:
            return f"{what}: {self.seconds * 1e6:.1f} us, {self.flops / self.seconds / 1e9:,.1f} GFLOP/s"
        return (
            f"{what}: {self.seconds * 1e6:.1f} us, {rate:.1f} GB/s, {self.share:.0%} of the speed of a copy "
            f"of {size:.1f} MiB"
        )


def measure(
    operation: str, device: Device | str, shape: tuple[int, int] | None = None, dtype: DType | str = bfloat16
) -> Measurement:
    """Time the implementation of ``operation`` in force on ``device``, on arrays of ``shape`` (rows, columns;
    columns a multiple of 128) and ``dtype``, float32, bfloat16 or float16, where the operation has a choice.
    ArgumentError for an operation that moves no arrays, ShapeError for another shape, FormatError for another
    dtype.
    """
    if operation not in ARGUMENTS:
        raise ArgumentError("measure", "operation", repr(operation), f"one of {', '.join(ARGUMENTS)}")
    device, kind = arrays.device(device), formats.dtype(dtype, "measure", "dtype")
    if kind not in FLOATS:
        raise FormatError("measure", "dtype", kind, f"one of {', '.join(each.name for each in FLOATS)}")
    shape = SHAPES.get(device.kind, SHAPES["cpu"]) if shape is None else shape
    good = (
        isinstance(shape, list | tuple) and len(shape) == 2 and all(isinstance(size, int) for size in shape)
    )
    if not good or shape[0] < 1 or shape[1] < 128 or shape[1] % 128:
        raise ShapeError(
            "measure", "shape", shape, "(rows, columns): a row or more, columns a multiple of 128"
        )
    rows, columns = shape
    kernels = dispatch.kernels(device)
    maker = _Maker(kernels, device, rows, columns, kind)
    arguments = ARGUMENTS[operation](maker)
    arguments["stream"] = stream = arrays.current_stream(device)
    usable, _ = dispatch.candidates(operation, device)
    function = getattr(kernels, operation)
    nbytes = _bytes(operation, arguments)
    half = [
        maker.on(np.resize(maker.random.integers(0, 256, 1 << 20).astype(np.uint8), max(nbytes // 2, 1)))
        for _ in range(2)
    ]
    seconds = _seconds(lambda: function(**arguments), device, stream)
    ceiling = _seconds(lambda: arrays.copy(half[0], half[1]), device, stream)
    return Measurement(
        operation,
        usable[0].impl_id,
        device,
        (rows, columns),
        nbytes,
        seconds,
        ceiling,
        _flops(operation, arguments),
    )


def _flops(operation: str, arguments: dict[str, Any]) -> float:
    """2 m n k of a product; of causal attention's two products forward and five backward half, as the other
    half is masked."""
    if operation.endswith("gemm"):
        return float(2 * arguments["out"].size * arguments["a"].shape[1])
    if operation.startswith("attention"):
        length, batch, heads, dim = arguments["q"].shape
        return float((2 if operation.endswith("fwd") else 5) * 2 * batch * heads * length**2 * dim / 2)
    return 0.0


def _seconds(call: Callable[[], object], device: Device, stream: int) -> float:
    """Median over the rounds of the mean time of calls that are queued back to back."""
    for _ in range(WARM_UPS):
        call()
    found = []
    for _ in range(ROUNDS):
        arrays.synchronize(device)
        if device.kind == "cuda":
            from fp8kit.backends.cuda.substitute import Stopwatch

            with Stopwatch(device.index, stream) as watch:
                for _ in range(CALLS):
                    call()
            found.append(float(watch.seconds) / CALLS)
        else:
            start = time.perf_counter()
            call()
            found.append(time.perf_counter() - start)
    return statistics.median(found)


def _bytes(operation: str, arguments: dict[str, Any]) -> int:
    counted = {
        view.ptr: view.nbytes for view in views({k: v for k, v in arguments.items() if k != "workspace"})
    }
    again = sum(output.view.nbytes for output in outputs(operation, arguments) if output.kept)
    return sum(counted.values()) + again


class _Maker:
    """Makes arguments: arrays of a measurement's shape, filled at random."""

    def __init__(self, kernels: Any, device: Device, rows: int, columns: int, dtype: DType) -> None:
        self.kernels, self.device, self.dtype = kernels, device, dtype
        self.m, self.n = rows, columns
        self.random = np.random.Generator(np.random.Philox(1))

    def on(self, values: Any) -> ArrayView:
        """Values of the host on the device."""
        return arrays.to(arrays.as_view(np.ascontiguousarray(values)), self.device)

    def h(self, *shape: int) -> ArrayView:
        """Normal values in the dtype that is asked for."""
        return self.on(
            self.random.standard_normal(shape or (self.m, self.n), np.float32).astype(self.dtype.numpy)
        )

    def f(self, *shape: int, value: float | None = None) -> ArrayView:
        """Float32, normal or of one value."""
        return self.on(
            self.random.standard_normal(shape, np.float32)
            if value is None
            else np.full(shape, value, np.float32)
        )

    def ints(self, top: int, *shape: int, dtype: DType = int64) -> ArrayView:
        """Integers below ``top``."""
        return self.on(self.random.integers(0, top, shape).astype(dtype.numpy))

    def new(self, dtype: DType, *shape: int) -> ArrayView:
        """An output."""
        return arrays.zeros(shape or (self.m, self.n), dtype, self.device)

    def like(self) -> ArrayView:
        """An output of the measurement's shape and dtype."""
        return self.new(self.dtype)

    def room(self, nbytes: int) -> ArrayView:
        """A workspace."""
        return self.new(uint8, max(nbytes, 1))

    def cast(self, rows: int, columns: int) -> Cast:
        """Where a result goes in E4M3, in both orientations."""
        r, c = -(-rows // 16) * 16, -(-columns // 16) * 16
        return Cast(
            E4M3,
            self.new(uint8, r, c),
            self.new(uint8, c, r),
            self.f(1, value=30.0),
            self.f(1),
            self.f(1, value=0.0),
        )

    def product(self, blocks: bool = False) -> dict[str, Any]:
        """Operands of an FP8 product of (rows, columns) by a square of columns."""
        shapes = [
            block_shapes(k, self.n, tile) if blocks else ((-(-k // 16) * 16, self.n), (1,))
            for k, tile in ((self.m, (1, 128)), (self.n, (128, 128)))
        ]
        codes = [self.on(self.random.integers(0, 0x78, codes).astype(np.uint8)) for codes, _ in shapes]
        scales = [self.f(*scale, value=0.01) for _, scale in shapes]
        room = self.room(self.kernels.fp8_gemm_workspace(self.m, self.n))
        return {
            "a": codes[0],
            "b": codes[1],
            "out": self.like(),
            "a_format": E4M3,
            "b_format": E4M3,
            "a_scale_inv": scales[0],
            "b_scale_inv": scales[1],
            "bias": None,
            "addend": None,
            "workspace": room,
        }

    def attention(self, backward: bool) -> dict[str, Any]:
        """Causal self-attention of heads of 64 over sequences of at most 1024."""
        s = min(1024, self.m)
        shape = (s, max(1, self.m // s), max(1, self.n // 64), 64)
        rules = Rules(window=(-1, 0), softmax_scale=0.125)
        given: dict[str, Any] = {name: self.h(*shape) for name in ("q", "k", "v")} | {
            "o": self.new(self.dtype, *shape)
        }
        given["lse"] = self.new(float32, shape[1], shape[2], s)
        room = self.room(
            self.kernels.attention_workspace(shape, shape, shape, None, self.dtype, rules, backward, True, ())
        )
        common = {"extras": AttentionExtras(), "spec": rules, "workspace": room}
        if not backward:
            return given | common
        forward = self.attention(False)
        self.kernels.attention_fwd(**forward, stream=arrays.current_stream(self.device))
        given = {name: forward[name] for name in ("q", "k", "v", "o", "lse")}
        grads = {name: self.new(self.dtype, *shape) for name in ("dq", "dk", "dv")}
        return {
            "do": self.h(*shape),
            **given,
            **grads,
            "dbias": None,
            "doffset": None,
            **common,
            "deterministic": False,
        }

    def rng(self) -> ArrayView:
        """A generator's state."""
        return self.on(np.array([3, 5], np.int64))

    def rope(self, x: str, y: str) -> dict[str, Any]:
        """Rotation of heads of 64 in one long sequence."""
        shape = (self.m, 1, self.n // 64, 64)
        return {
            x: self.h(*shape),
            "freqs": self.f(self.m, 64),
            y: self.new(self.dtype, *shape),
            "start_positions": None,
            "lengths": None,
            "starts": None,
            "qkv_format": "sbhd",
            "interleaved": False,
        }

    def sequences(self, x: tuple[int, ...], y: tuple[int, ...]) -> dict[str, Any]:
        """Two sequences of equal length, padded and one after the other."""
        ends = self.on(np.array([0, self.m // 2, self.m // 2 * 2], np.int32))
        return {"x": self.h(*x), "y": self.new(self.dtype, *y), "lengths": ends, "starts": ends}

    def cache(self, **more: Any) -> dict[str, Any]:
        """One sequence in pages of 128, its heads 64 wide."""
        pages = -(-self.m // 128)
        return {
            "cache": self.h(pages, 128, self.n // 64, 64),
            "pages": self.on(np.arange(pages, dtype=np.int32)[None]),
            "totals": self.on(np.array([0, self.m], np.int32)),
            "qkv_format": "sbhd",
            **more,
        }

    def stepped(self, *moments: str) -> dict[str, Any]:
        """One tensor and its optimiser's state."""
        state = {name: [self.f(self.m, self.n, value=0.01)] for name in moments}
        return {
            "params": [self.h()],
            "grads": [self.h()],
            **state,
            "masters": [None if self.dtype is float32 else self.f(self.m, self.n)],
            "lr": 1e-3,
            "weight_decays": [0.1],
            "step": 3,
            "inv_scale": None,
            "found_inf": None,
        }


def _norm_bwd(g: _Maker) -> dict[str, Any]:
    return {
        "dy": g.h(),
        "x": g.h(),
        "weight": g.h(g.n),
        "mean": g.f(g.m, value=0.0),
        "rstd": g.f(g.m, value=1.0),
        "residual": None,
        "dx": g.like(),
        "dweight": g.new(g.dtype, g.n),
        "dbias": g.new(g.dtype, g.n),
        "normalization": "LayerNorm",
        "zero_centered_gamma": False,
        "workspace": g.room(g.kernels.norm_bwd_workspace(g.m, g.n)),
    }


def _act(g: _Maker, backward: bool) -> dict[str, Any]:
    common = {
        "x": g.h(),
        "bias": g.h(g.n),
        "amax": None,
        "cast": g.cast(g.m, g.n),
        "activation": "gelu",
        "params": (),
    }
    if not backward:
        return {**common, "y": None}
    return {
        **common,
        "dy": g.h(),
        "dx": None,
        "dbias": g.new(g.dtype, g.n),
        "workspace": g.room(g.kernels.act_bwd_workspace(g.m, g.n)),
    }


def _block(g: _Maker) -> dict[str, Any]:
    (q, s), (q_t, s_t) = block_shapes(g.m, g.n, (1, 128)), block_shapes(g.n, g.m, (1, 128))
    return {
        "x": g.h(),
        "q": g.new(uint8, *q),
        "scale_inv": g.new(float32, *s),
        "q_t": g.new(uint8, *q_t),
        "scale_inv_t": g.new(float32, *s_t),
        "format": E4M3,
        "tile": (1, 128),
        "power_2": True,
        "epsilon": 0.0,
    }


def _blocks(g: _Maker) -> dict[str, Any]:
    given = _block(g)
    arrays_ = {f"{name}s": [given.pop(name)] for name in ("x", "q", "scale_inv", "q_t", "scale_inv_t")}
    return arrays_ | given


# operation -> its arguments but for the stream
ARGUMENTS: dict[str, Callable[[_Maker], dict[str, Any]]] = {
    "amax": lambda g: {"x": g.h(), "amax": g.f(1, value=0.0), "tile": (g.m, g.n)},
    "amax_many": lambda g: {"xs": [g.h()], "amaxes": [g.f(1, value=0.0)]},
    "scale_from_amax": lambda g: {
        "amax": g.f(g.m * g.n, value=3.0),
        "scale": g.new(float32, g.m * g.n),
        "scale_inv": g.new(float32, g.m * g.n),
        "fp8_max": 448.0,
        "power_2": False,
        "epsilon": 0.0,
        "value_for_inf": formats.float32.max,
    },
    "update_delayed_": lambda g: {
        "scales": [g.f(g.n, value=1.0)],
        "scale_invs": [g.f(g.n, value=1.0)],
        "histories": [g.f(g.m, g.n, value=2.0)],
        "fp8_maxes": (448.0,),
        "margin": 0,
        "most_recent": False,
    },
    "quantize": lambda g: {
        "x": g.h(),
        "q": g.new(uint8),
        "scale": g.f(1, value=30.0),
        "scale_inv": g.f(1),
        "amax": g.f(1, value=0.0),
        "format": E4M3,
        "tile": (g.m, g.n),
        "saturate": True,
        "rng": None,
    },
    "dequantize": lambda g: {
        "q": g.ints(0x78, g.m, g.n, dtype=uint8),
        "x": g.like(),
        "scale_inv": g.f(1, value=0.1),
        "format": E4M3,
        "tile": (g.m, g.n),
    },
    "quantize_transpose": lambda g: {"x": g.h(), "cast": g.cast(g.m, g.n), "dbias": None, "workspace": None},
    "quantize_transpose_many": lambda g: {"xs": [g.h()], "casts": [g.cast(g.m, g.n)]},
    "block_quantize": _block,
    "block_quantize_many": _blocks,
    "gemm": lambda g: {
        "a": g.h(),
        "b": g.h(g.n, g.n),
        "out": g.like(),
        "layout": "nt",
        "bias": None,
        "addend": None,
        "workspace": g.room(g.kernels.gemm_workspace()),
    },
    "fp8_gemm": lambda g: {**g.product(), "fast_accumulate": True},
    "block_gemm": lambda g: {**g.product(blocks=True), "a_tile": (1, 128), "b_tile": (128, 128)},
    "norm_fwd": lambda g: {
        "x": g.h(),
        "weight": g.h(g.n),
        "bias": g.h(g.n),
        "y": None,
        "mean": g.new(float32, g.m),
        "rstd": g.new(float32, g.m),
        "amax": None,
        "cast": g.cast(g.m, g.n),
        "normalization": "LayerNorm",
        "epsilon": 1e-5,
        "zero_centered_gamma": False,
    },
    "norm_bwd": _norm_bwd,
    "act_fwd": lambda g: _act(g, False),
    "act_bwd": lambda g: _act(g, True),
    "dropout_add": lambda g: {
        "x": g.h(),
        "bias": g.h(g.n),
        "residual": g.h(),
        "y": g.like(),
        "p": 0.1,
        "rng": g.rng(),
    },
    "dropout_bwd": lambda g: {
        "dy": g.h(),
        "dx": g.like(),
        "dbias": g.new(g.dtype, g.n),
        "p": 0.1,
        "rng": g.rng(),
        "workspace": g.room(g.kernels.column_sum_workspace(g.m, g.n)),
    },
    "drop_path": lambda g: {
        "x": g.h(),
        "residual": g.h(),
        "y": g.like(),
        "starts": None,
        "inner": 1,
        "count": g.m,
        "p": 0.1,
        "rng": g.rng(),
    },
    "attention_fwd": lambda g: g.attention(False),
    "attention_bwd": lambda g: g.attention(True),
    "unpack_sequences": lambda g: g.sequences((g.m // 2 * 2, g.n), (2, g.m // 2, g.n)),
    "pack_sequences": lambda g: g.sequences((2, g.m // 2, g.n), (g.m // 2 * 2, g.n)),
    "cache_append_": lambda g: g.cache(
        x=g.h(g.m, 1, g.n // 64, 64), fresh=g.on(np.array([0, g.m], np.int32)), starts=None
    ),
    "cache_gather": lambda g: g.cache(y=g.new(g.dtype, g.m, 1, g.n // 64, 64)),
    "rope_fwd": lambda g: g.rope("x", "y"),
    "rope_bwd": lambda g: g.rope("dy", "dx"),
    "embedding_fwd": lambda g: {"ids": g.ints(g.m, g.m), "table": g.h(), "out": g.like()},
    "embedding_bwd": lambda g: {"ids": g.ints(g.m, g.m), "dout": g.h(), "dtable": g.like()},
    "cross_entropy_fwd": lambda g: {
        "logits": g.h(),
        "targets": g.ints(g.n, g.m, dtype=int32),
        "loss": g.new(float32, g.m),
        "lse": g.new(float32, g.m),
        "total": g.new(float32, 2),
        "label_smoothing": 0.0,
        "ignore_index": -100,
    },
    "cross_entropy_bwd": lambda g: {
        "logits": g.h(),
        "targets": g.ints(g.n, g.m, dtype=int32),
        "lse": g.f(g.m, value=9.0),
        "total": None,
        "dloss": g.f(g.m),
        "dlogits": g.like(),
        "label_smoothing": 0.0,
        "ignore_index": -100,
    },
    "adamw_": lambda g: {
        **g.stepped("exp_avgs", "exp_avg_sqs"),
        "beta1": 0.9,
        "beta2": 0.99,
        "epsilon": 1e-8,
    },
    "sgd_": lambda g: {**g.stepped("buffers"), "momentum": 0.9, "dampening": 0.0, "nesterov": False},
    "scale_": lambda g: {"xs": [g.h()], "factor": g.f(1, value=1.0), "found_inf": g.f(1, value=0.0)},
    "loss_scale_": lambda g: {
        "scale": g.f(1, value=8.0),
        "inv_scale": g.f(1, value=0.125),
        "good_steps": g.ints(1, 1),
        "found_inf": g.f(1, value=0.0),
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 1000,
    },
    "count_": lambda g: {"counter": g.ints(1, 1), "found_inf": None},
    "l2norm": lambda g: {
        "xs": [g.h()],
        "out": g.new(float32, 1),
        "workspace": g.room(g.kernels.l2norm_workspace([g.m * g.n])),
    },
    "clip_": lambda g: {"xs": [g.h()], "norm": g.f(1, value=0.5), "max_norm": 1.0},
    "copy": lambda g: {"x": g.h(), "y": g.new(float32 if g.dtype is not float32 else bfloat16)},
    "add": lambda g: {"a": g.h(), "b": g.h(), "out": g.like()},
    "sum_rows": lambda g: {
        "x": g.h(),
        "out": g.new(g.dtype, g.n),
        "workspace": g.room(g.kernels.column_sum_workspace(g.m, g.n)),
    },
    "rng_next_": lambda g: {"state": g.rng(), "out": g.new(int64, 2)},
}
