"""Grouped products, and experts made of them: one launch for all groups beside cuBLASLt's products one after
another and torch's ``_grouped_mm`` in bfloat16. On Hopper the launch is that of ``hopper_gemm.cu``.

The groups are uneven, as a router makes them. What runs one after another is one CUDA graph: the time of the
GPU alone, which a loop on the host only reaches where groups are large.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import fp8kit_torch as te
import numpy as np
import torch

from fp8kit import arrays, codec
from fp8kit.arrays import ArrayView, Device
from fp8kit.backends import dispatch
from fp8kit.backends.policy import SelectionPolicy, policy_context
from fp8kit.backends.protocol import block_shapes
from fp8kit.bench import random
from fp8kit.bench.contest import Contest, row_of, within_time
from fp8kit.bench.report import Row, Setting, Unavailable
from fp8kit.bench.timing import Step
from fp8kit.formats import E4M3, bfloat16
from fp8kit.recipe import Float8BlockScaling, Float8CurrentScaling
from fp8kit.testing import relative_error
from fp8kit.testing.contract import workspace

OURS, SINGLES, LOOP = "fp8kit grouped", "one after another, graph", "one after another"
TORCH = "torch._grouped_mm bf16"
ORDER = "impl:cuda.hopper_grouped_fp8_gemm", "impl:cuda.grouped_fp8_gemm", "reference"
LIBRARY = SelectionPolicy(per_op={"block_gemm": ("impl:cuda.timed_block_gemm", "reference")})  # cuBLASLt's
CORNER = 64  # rows and columns of the largest group's result that are compared with float64
BOUND = 2.0**-7  # bfloat16's rounding and the tensor cores' 14-bit sums where they are fast: docs/numerics.md
_SCALE, _SPREAD = 2.0**-6, 64.0
TENSOR, LINE, SQUARE = (0, 0), (1, 128), (128, 128)


class Size(NamedTuple):
    """``experts`` groups of ``rows`` rows together; weights of (``out``, ``into``)."""

    experts: int
    rows: int
    out: int
    into: int

    def __str__(self) -> str:
        return f"{self.experts} experts, {self.rows} tokens, {self.into} to {self.out}"


class Mode(NamedTuple):
    """What groups run ``along``, the operands' tiles, and how sums are made."""

    name: str
    along: str
    tiles: tuple[tuple[int, int], tuple[int, int]]
    fast: bool


FULL = [Size(experts, rows, 4096, 7168) for experts in (8, 32, 64) for rows in (4096, 16384, 32768)] + [
    Size(64, 16384, 7168, 2048)
]
SMALL = [Size(4, 192, 128, 256)]
MODES = (
    Mode("forward, tensors", "rows", (TENSOR, TENSOR), True),
    Mode("dgrad, tensors", "rows", (TENSOR, TENSOR), False),
    Mode("forward, blocks", "rows", (LINE, SQUARE), False),
    Mode("wgrad, tensors", "terms", (TENSOR, TENSOR), False),
    Mode("wgrad, blocks", "terms", (LINE, LINE), False),
)


def uneven(size: Size, seed: int = 3) -> list[int]:
    """Rows of each group, multiples of 16, as ``token_dispatch`` pads them."""
    shares = np.random.default_rng(seed).dirichlet(np.full(size.experts, 2.0))
    rows = (shares * size.rows).astype(int) // 16 * 16
    rows[rows.argmax()] += size.rows - rows.sum()
    return [int(n) for n in rows]


def _codes(shape: tuple[int, ...], seed: int, device: Device) -> ArrayView:
    """Random codes: a pool that was drawn once, again and again."""
    pool = random.codes((1048573,), seed)
    count = int(np.prod(shape))
    if device.kind == "cpu":
        return arrays.as_view(np.resize(pool, shape))
    made = torch.from_numpy(pool).cuda().repeat(-(-count // pool.size))[:count]
    return arrays.as_view(made.reshape(shape))


def _scales(shape: tuple[int, ...], device: Device) -> ArrayView:
    return arrays.to(arrays.as_view(np.full(shape, _SCALE, np.float32)), device)


@dataclass
class Problem:
    """A size in one mode: operands, and where results go."""

    size: Size
    mode: Mode
    device: Device

    @property
    def by_rows(self) -> bool:
        """Whether rows are groups."""
        return self.mode.along == "rows"

    @property
    def flops(self) -> float:
        """Floating-point operations."""
        return 2.0 * self.size.rows * self.size.out * self.size.into

    @cached_property
    def sizes(self) -> list[int]:
        """Rows of each group."""
        return uneven(self.size)

    @cached_property
    def device_sizes(self) -> ArrayView:
        """Likewise, on the device."""
        return arrays.to(arrays.as_view(np.array(self.sizes, np.int32)), self.device)

    def _operand(self, groups: int, rows: int, terms: int, i: int) -> tuple[ArrayView, ArrayView]:
        tile, stack = self.mode.tiles[i], (groups,) * bool(groups)
        grid = (max(groups, 1),)
        if tile != TENSOR:
            (rows, terms), scales = block_shapes(rows, terms, tile)
            grid = (*stack, *scales)
        return _codes((*stack, rows, terms), 5 + i, self.device), _scales(grid, self.device)

    @cached_property
    def operands(self) -> tuple[tuple[ArrayView, ArrayView], tuple[ArrayView, ArrayView]]:
        """Codes and scale_inv of both."""
        e, m, n, k = self.size
        if self.by_rows:
            return self._operand(0, m, k, 0), self._operand(e, n, k, 1)
        return self._operand(0, n, m, 0), self._operand(0, k, m, 1)

    @cached_property
    def out(self) -> ArrayView:
        """The grouped product's result."""
        e, m, n, k = self.size
        return arrays.zeros((m, n) if self.by_rows else (e, n, k), bfloat16, self.device)

    def error(self) -> float:
        """Relative error of a corner of the largest group's result."""
        (a, _), (b, _) = self.operands
        e = int(np.argmax(self.sizes))
        start, count = sum(self.sizes[:e]), self.sizes[e]
        if self.by_rows:
            left, right = a.slice(0, start, min(CORNER, count)), b.slice(0, e, 1)
            right = right.reshape(*b.shape[1:]).slice(0, 0, min(CORNER, self.size.out))
            got = self.out.slice(0, start, left.shape[0]).numpy()
        else:
            left, right = (x.slice(0, 0, CORNER).slice(1, start, count) for x in (a, b))
            got = self.out.slice(0, e, 1).reshape(*self.out.shape[1:]).slice(0, 0, CORNER).numpy()
        x, w = (codec.decode(view.numpy(), E4M3).astype(np.float64) * _SCALE for view in (left, right))
        return relative_error(got[:, : len(w)].astype(np.float32), x @ w.T)

    # --- contenders -----------------------------------------------------------------------------------------

    def ours(self, kernels: Any) -> Step:
        """The contract's grouped product."""
        (a, a_inv), (b, b_inv) = self.operands
        how = E4M3, E4M3, a_inv, b_inv, *self.mode.tiles, self.mode.fast
        sizes, along, stream = self.device_sizes, self.mode.along, arrays.current_stream(self.device)
        space = workspace(int(kernels.grouped_gemm_workspace(sizes.size)), self.device)
        return lambda: kernels.grouped_fp8_gemm(a, b, self.out, sizes, along, 0, None, *how, space, stream)

    def singles(self, kernels: Any) -> Callable[[int], None]:
        """A product of its own for each group, with operands that are copied apart where a group is a part of
        rows."""
        (a, _), (b, _) = self.operands
        _, m, n, k = self.size
        space = workspace(int(kernels.fp8_gemm_workspace(max(m, n), max(n, k))), self.device)
        one = _scales((1,), self.device)
        calls: list[tuple[Any, ...]] = []
        start = 0
        for i, count in enumerate(self.sizes):
            if not count:
                continue
            if self.by_rows:
                left, rows, columns, terms = a.slice(0, start, count), count, n, k
                right = b.slice(0, i, 1).reshape(*b.shape[1:])
                out = self.out.slice(0, start, count)
            else:
                rows, columns = n, k
                terms = count if self.mode.tiles[0] == TENSOR else -(-count // 128) * 128
                left, right = (_codes((side, terms), 9 + i, self.device) for side in (n, k))
                out = self.out.slice(0, i, 1).reshape(n, k)
            start += count
            scales = [
                one if tile == TENSOR else _scales(block_shapes(side, terms, tile)[1], self.device)
                for side, tile in zip((rows, columns), self.mode.tiles, strict=True)
            ]
            calls.append((left, right, out, E4M3, E4M3, *scales))
        gemm, how = (kernels.fp8_gemm, (None, None, self.mode.fast)), ()
        if self.mode.tiles[0] != TENSOR:
            gemm = kernels.block_gemm, (*self.mode.tiles, None, None)
        run, how = gemm

        def loop(stream: int) -> None:
            for call in calls:
                run(*call, *how, space, stream)

        return loop


def as_graph(loop: Callable[[int], None]) -> Step:
    """The loop as a CUDA graph."""
    import cupy

    for _ in range(4):  # products may be timed meanwhile
        loop(0)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        loop(stream.ptr)
        stream.synchronize()
        stream.begin_capture()
        loop(stream.ptr)
        graph = stream.end_capture()
    null = cupy.cuda.Stream.null
    return lambda: graph.launch(null)


def _torch(problem: Problem) -> Step:
    """``torch._grouped_mm`` on values of the same shapes."""
    if problem.device.kind != "cuda" or not hasattr(torch, "_grouped_mm"):
        raise Unavailable("not installed: torch._grouped_mm for this device")
    e, m, n, k = problem.size
    offsets = torch.tensor(np.cumsum(problem.sizes), dtype=torch.int32, device="cuda")
    made = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(m, k, **made)
    if problem.by_rows:
        w = torch.randn(e, n, k, **made).transpose(1, 2)
        return lambda: torch._grouped_mm(x, w, offs=offsets)
    g = torch.randn(m, n, **made).t()
    return lambda: torch._grouped_mm(g, x, offs=offsets)


def measure(size: Size, mode: Mode, setting: Setting) -> list[Row]:
    """The rows of one size in one mode."""
    problem, kernels = Problem(size, mode, setting.device), dispatch.kernels(setting.device)
    turns = setting.fewer_rounds().sustained(problem.flops)
    contest = Contest(turns, f"{mode.name}: {size}", product=mode.name)

    def ours(row: Row) -> Step:
        step = problem.ours(kernels)
        step()
        row["error"] = problem.error()
        if not row["error"] < BOUND:
            row["status"] = f"WRONG: error {row['error']:.5f}, bound {BOUND:.5f}"
        return step

    contest.enter(OURS, ours)
    loop = problem.singles(dispatch.kernels(setting.device, LIBRARY))
    if setting.device.kind == "cuda":
        contest.enter(SINGLES, lambda row: as_graph(loop))
    stream = arrays.current_stream(setting.device)
    contest.enter(LOOP, lambda row: lambda: loop(stream))
    contest.enter(TORCH, lambda row: _torch(problem))
    rows = contest.time(host=False)
    best = next((row.get("gpu_ms") for row in rows if row["case"] == SINGLES), None)
    for row in rows:
        if "gpu_ms" in row:
            row["tflops"] = problem.flops / row["gpu_ms"] * 1e-9
            if best:
                row["of_best"] = best / row["gpu_ms"]
    return rows


# --- layers -------------------------------------------------------------------------------------------------


def _expert_steps(size: Size, device: str) -> dict[str, Callable[[], Step]]:
    """Forward and backward of experts, SwiGLU between two grouped products: (into, 2 out) and (out, into).
    Where a layer's weights are one parameter, as torch's are here, autograd has as few to go through."""
    e, m, out, into = size
    sizes = uneven(size)
    made: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    on_device = torch.tensor(sizes, dtype=torch.int32, device=device)
    x, g = torch.randn(m, into, **made).requires_grad_(), torch.randn(m, into, **made)

    def module(
        splits: Any, recipe: Any, single: bool = False, first: bool | None = None, graphed: bool = False
    ) -> Callable[[], Step]:
        def make() -> Step:
            how = {"use_grouped_tensor": isinstance(splits, torch.Tensor), "single_grouped_weight": single}
            own = te.GroupedMLP(e, into, out, bias=False, params_dtype=torch.bfloat16, device=device, **how)
            if graphed:
                sample = x.detach().clone().requires_grad_(), splits.clone()
                te.make_graphed_callables(own, sample, enabled=True, recipe=recipe)
            named = {} if first is None else {"is_first_microbatch": first}

            def step() -> None:
                own.zero_grad(set_to_none=True)
                x.grad = None
                with te.autocast(enabled=recipe is not None, recipe=recipe):
                    y = own(x, splits, **named)
                y.backward(g)

            return step

        return make

    def plain() -> Step:
        if device != "cuda" or not hasattr(torch, "_grouped_mm"):
            raise Unavailable("not installed: torch._grouped_mm for this device")
        offsets = torch.cumsum(on_device, 0).to(torch.int32)
        up = torch.randn(e, into, 2 * out, **made).mul_(0.02).requires_grad_()
        down = torch.randn(e, out, into, **made).mul_(0.02).requires_grad_()

        def step() -> None:
            x.grad = up.grad = down.grad = None
            gate, wide = torch._grouped_mm(x, up, offs=offsets).chunk(2, -1)
            hidden = torch.nn.functional.silu(gate) * wide
            torch._grouped_mm(hidden, down, offs=offsets).backward(g)

        return step

    made_by = {"torch bf16, _grouped_mm": plain}
    for kind, recipe in (("current", Float8CurrentScaling()), ("block", Float8BlockScaling())):
        made_by |= {
            f"FP8 {kind}, sizes on the device": module(on_device, recipe),
            f"FP8 {kind}, one parameter a layer": module(on_device, recipe, single=True),
            f"FP8 {kind}, one parameter, later micro-batch": module(on_device, recipe, True, False),
            f"FP8 {kind}, one after another": module(sizes, recipe),
        }
        if device == "cuda":
            made_by[f"FP8 {kind}, graphed callables"] = module(on_device, recipe, graphed=True)
    return made_by


def measure_layer(size: Size, setting: Setting) -> list[Row]:
    """The experts of a layer, forward and backward, in PyTorch."""
    contest = Contest(setting.fewer_rounds(), f"experts: {size}", product="experts")
    for case, make in _expert_steps(size, setting.device.kind).items():

        def entered(row: Row, make: Callable[[], Step] = make) -> Step:
            step = make()
            step()
            return step

        contest.enter(case, entered)
    return contest.time(host=False)


def moe_part(setting: Setting) -> list[Row]:
    """Grouped products over experts and tokens, then the experts of two layers."""
    with policy_context(SelectionPolicy(per_op={"grouped_fp8_gemm": ORDER})):
        return _rows(setting)


def _rows(setting: Setting) -> list[Row]:
    full = setting.device.kind == "cuda"
    sizes = FULL if full else SMALL
    layers = [Size(64, 16384, 1408, 2048), Size(8, 16384, 7168, 4096)] if full else SMALL
    cases = [(mode, size) for size in sizes for mode in MODES]
    rows = within_time(
        setting,
        layers,
        lambda size: measure_layer(size, setting),
        lambda size: row_of(f"experts: {size}", TORCH, product="experts"),
    )
    return rows + within_time(
        setting,
        cases,
        lambda case: measure(case[1], case[0], setting),
        lambda case: row_of(f"{case[0].name}: {case[1]}", OURS, product=case[0].name),
    )
