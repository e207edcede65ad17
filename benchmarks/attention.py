"""Attention alone: of the layers, and over lengths and sizes of heads, by fp8kit's own kernels, cuDNN,
torch's flash attention and FlexAttention, forward and backward apart.

    python -m benchmarks attention --out DIR

The choice between cuDNN and our kernels (``backends/cuda/attention.py``) rests on these figures. On a CPU
there is one path of ours, the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import fp8kit_torch  # noqa: F401  (it says what is missing where torch is not installed)
import numpy as np
import torch
import torch._functorch.config
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks import torch_kernels
from benchmarks.targets import LENGTHS, LIBRARY, OWN_KERNEL
from fp8kit import arrays, formats
from fp8kit.arrays import ArrayView, Device
from fp8kit.backends import dispatch
from fp8kit.backends.protocol import AttentionExtras
from fp8kit.bench import random, skeleton
from fp8kit.bench.contest import Contest, row_of, within_time
from fp8kit.bench.report import Row, Setting, Unavailable
from fp8kit.bench.sizes import FULL
from fp8kit.bench.timing import Step
from fp8kit.ops.attention_spec import AttentionSpec

ENGINE, FLASH, FLEX = "fp8kit", "torch SDPA, flash", "torch FlexAttention"
DIRECTIONS = ("forward", "backward")


class Sizes(NamedTuple):
    """Batches, heads of q, heads of k and v, length, features of a head; dropout."""

    batch: int
    heads: int
    groups: int
    length: int
    dim: int
    dropout: float = 0.0

    def __str__(self) -> str:
        drop = f", dropout {self.dropout}" if self.dropout else ""
        return f"head_dim {self.dim}, {self.heads}/{self.groups} heads, {self.batch} x {self.length}{drop}"


# 8192 tokens of hidden 2048, as its target has them
GRID = tuple(
    Sizes(8192 // length, 2048 // dim, 2048 // dim, length, dim) for dim in (64, 128) for length in LENGTHS
)
# and others that the choice of a path rests on
OTHERS = (
    Sizes(2, 16, 16, 304, 64),
    Sizes(2, 16, 16, 1024, 64),
    Sizes(8, 12, 12, 1024, 64),
    Sizes(4, 32, 8, 2048, 128),
    Sizes(2, 16, 16, 2048, 256),
    Sizes(4, 32, 32, 2048, 128, 0.1),
)
SMALL = (Sizes(2, 2, 2, 32, 16), Sizes(2, 4, 2, 24, 8))


class Operands:
    """Random q, k, v, the gradient of o, and places for all results, (length, batch, heads, features) in
    bfloat16; ``torch``: the same memory as torch takes it, (batch, heads, length, features)."""

    def __init__(self, about: Sizes, device: Device) -> None:
        self.about, self.device = about, device
        self.spec = AttentionSpec(
            num_heads=about.heads,
            head_dim=about.dim,
            num_gqa_groups=about.groups,
            layout="separate",
            mask="causal",
            dropout=about.dropout,
        )
        self.q, self.do, self.o, self.dq = (self._drawn(seed, about.heads) for seed in range(4))
        self.k, self.v, self.dk, self.dv = (self._drawn(seed, about.groups) for seed in range(4, 8))
        self.lse = arrays.empty((about.batch, about.heads, about.length), formats.float32, device)
        rng = np.array([1, 2], np.int64)
        self.extras = AttentionExtras(rng=arrays.to(arrays.as_view(rng), device) if about.dropout else None)

    def _drawn(self, seed: int, heads: int) -> ArrayView:
        shape = self.about.length, self.about.batch, heads, self.about.dim
        return arrays.to(arrays.as_view(random.normal(shape, seed, formats.bfloat16.numpy)), self.device)

    def space(self, nbytes: int) -> ArrayView:
        """Workspace."""
        return arrays.empty((max(1, nbytes),), formats.uint8, self.device)

    def torch(self, view: ArrayView) -> Tensor:
        """See the class."""
        return torch.from_dlpack(view).permute(1, 2, 0, 3)

    def exact(self) -> tuple[Tensor, Tensor]:
        """o and dq of the first sequence's first head, from its formula in float32: (length, features)."""
        q, do, k, v = (self.torch(view)[0, 0].float() for view in (self.q, self.do, self.k, self.v))
        q.requires_grad_()
        scores = (q @ k.T) * self.spec.softmax_scale
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        o = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        o.backward(do)
        assert q.grad is not None
        return o.detach(), q.grad


class Path(NamedTuple):
    """A way to compute it: its two directions, and its o and dq as torch has them."""

    forward: Step
    backward: Step
    results: Callable[[], tuple[Tensor, Tensor]]


def own_paths(given: Operands) -> dict[str, Callable[[], Path]]:
    """fp8kit's: on a GPU our kernels and cuDNN, whatever the engine would choose; else the engine's path."""
    if given.device.kind != "cuda":
        return {ENGINE: partial(_by_engine, given)}
    return {OWN_KERNEL: partial(_on_gpu, given, False), LIBRARY: partial(_on_gpu, given, True)}


def _results(given: Operands) -> tuple[Tensor, Tensor]:
    return given.torch(given.o), given.torch(given.dq)


def _by_engine(given: Operands) -> Path:
    kernels, spec = dispatch.kernels(given.device), given.spec
    qkv = given.q, given.k, given.v
    shapes = given.q.shape, given.k.shape, given.v.shape
    strides = tuple(view.strides for view in qkv)
    places: list[ArrayView] = [
        given.space(
            kernels.attention_workspace(*shapes, None, formats.bfloat16, spec, backward, False, strides)
        )
        for backward in (False, True)
    ]
    stream = arrays.current_stream(given.device)
    forward = partial(kernels.attention_fwd, *qkv, given.o, given.lse, given.extras, spec, places[0], stream)
    results = given.o, given.lse, given.dq, given.dk, given.dv, None, None, given.extras, spec, False
    backward = partial(kernels.attention_bwd, given.do, *qkv, *results, places[1], stream)
    return Path(forward, backward, partial(_results, given))


def _on_gpu(given: Operands, library: bool) -> Path:
    from fp8kit.backends.cuda import cudnn_plans, cudnn_sdpa, flash
    from fp8kit.backends.cuda.attention_problem import problem

    q, k, v = given.q, given.k, given.v
    case = problem(q.shape, k.shape, v.shape, q.dtype, given.spec, (q.strides, k.strides, v.strides))
    ahead = q, k, v, given.o, given.lse
    back = given.do, *ahead, given.dq, given.dk, given.dv
    index, extras = given.device.index, given.extras
    forward: Step
    backward: Step
    if library:
        if (missing := cudnn_plans.missing()) is not None:
            raise Unavailable(missing)
        for way in (False, True):
            if (reason := cudnn_sdpa.why_not(case, way, False, index)) is not None:
                raise Unavailable(reason)
        places = [given.space(cudnn_sdpa.workspace(case, way, False, index)) for way in (False, True)]
        forward = partial(cudnn_sdpa.forward, case, *ahead, extras, places[0], 0)
        backward = partial(cudnn_sdpa.backward, case, *back, extras, False, places[1], 0)
    else:
        space = given.space(flash.workspace(case, True))
        forward = partial(flash.forward, case, *ahead, extras, None, 0)
        backward = partial(flash.backward, case, *back, None, extras, space, 0)
    return Path(forward, backward, partial(_results, given))


def torch_paths(given: Operands) -> dict[str, Callable[[], Path]]:
    """torch's flash attention (on a CPU its own choice), and FlexAttention, compiled on a GPU."""
    about = given.about
    gqa = about.groups != about.heads
    leaves = [given.torch(view).detach().requires_grad_() for view in (given.q, given.k, given.v)]
    do = given.torch(given.do)

    def path(call: Callable[[], Tensor]) -> Path:
        last: list[Any] = []

        def forward() -> None:
            last[:] = [call()]

        def backward() -> None:
            if not last:
                forward()
            last[1:] = torch.autograd.grad(last[0], leaves, do, retain_graph=True)

        return Path(forward, backward, lambda: (last[0].detach(), last[1]))

    def flash() -> Path:
        backends = [SDPBackend.FLASH_ATTENTION] if do.is_cuda else list(SDPBackend.__members__.values())

        def call() -> Tensor:
            with sdpa_kernel(backends):
                return functional.scaled_dot_product_attention(
                    *leaves, dropout_p=about.dropout, is_causal=True, enable_gqa=gqa
                )

        return path(call)

    def flex() -> Path:
        if about.dropout:
            raise Unavailable("FlexAttention has no dropout")
        if not do.is_cuda:
            raise Unavailable("FlexAttention has no backward on a CPU")
        torch._dynamo.reset()  # as many compilations as there are lengths are more than it keeps
        return path(partial(flexed(about, do.device, compiled=True), *leaves))

    return {FLASH: flash, FLEX: flex}


def flexed(about: Sizes, device: torch.device, compiled: bool) -> Callable[..., Tensor]:
    """FlexAttention of q, k, v with a causal mask by blocks."""
    made: Any = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention
    length, gqa = about.length, about.groups != about.heads
    mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, length, length, device=str(device))

    def call(*qkv: Tensor) -> Tensor:
        # its backward runs again and again after one forward
        with torch._functorch.config.patch(donated_buffer=False):
            o: Tensor = made(*qkv, block_mask=mask, enable_gqa=gqa)
        return o

    return call


def _measure(about: Sizes, setting: Setting) -> list[Row]:
    """The rows of one size. ``error``: of o, or of dq, of one head."""
    given, contest = Operands(about, setting.device), Contest(setting, str(about))
    exact = None if about.dropout else given.exact()
    # products over the unmasked half of the scores: two forward, five backward
    scores = about.batch * about.heads * float(about.length) ** 2 * about.dim

    def make(path: Callable[[], Path], direction: str, row: Row) -> Step:
        if path not in made:
            one = path()
            one.forward()
            one.backward()
            arrays.synchronize(setting.device)
            made[path] = one
            if exact is not None:
                pairs = zip(one.results(), exact, strict=True)
                errors[path] = [float((got[0, 0].float() - want).norm() / want.norm()) for got, want in pairs]
        if path in errors:
            row["error"] = error = errors[path][DIRECTIONS.index(direction)]
            # P and dP are rounded to bfloat16 for their products, the result once more
            if not error < 2.0**-6:
                row["status"] = f"WRONG: error {error:.5f}"
        step: Step = getattr(made[path], direction)
        return step

    made: dict[Callable[[], Path], Path] = {}
    errors: dict[Callable[[], Path], list[float]] = {}
    paths: Mapping[str, Callable[[], Path]] = {**own_paths(given), **torch_paths(given)}
    for name, path in paths.items():
        for direction, count in zip(DIRECTIONS, (2, 5), strict=True):
            case = f"{name}, {direction}"
            if setting.left() > 0:
                contest.enter(case, partial(make, path, direction), flops=count * scores)
            else:
                contest.leave_out(case)
    rows = contest.time(host=False)
    for row in rows:
        if "gpu_ms" in row:
            row["tflops"] = row["flops"] / row["gpu_ms"] * 1e-9
    return rows


def attention_part(setting: Setting) -> list[Row]:
    """The layers' attention as the engine takes it, then a row a size, path and direction, but where
    only one layer is asked for. A result of ours is compared with its formula; with dropout it is not."""
    grid = (*GRID, *OTHERS) if setting.sizes is FULL else SMALL
    rows = skeleton.attention_part(setting, torch_kernels.attentions)
    return rows + within_time(
        setting,
        () if setting.only else grid,
        lambda about: _measure(about, setting),
        lambda about: row_of(str(about), "all"),
    )
