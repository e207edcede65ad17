"""The skeleton of a layer: what its work costs as separate, perfect passes, in the same run and under the
same load.

Twelve FP8 products by cuBLASLt's best algorithms, attention by the engine's own kernels, and for each
memory-bound kernel one device copy of its bytes, back to back on one stream, in a step's order. Nothing is
computed from anything else: only time is meant. Below it one gets only by doing less, or two things at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from fp8kit import arrays, formats
from fp8kit.arrays import ArrayView, Device
from fp8kit.autograd.call import memory_of
from fp8kit.backends import dispatch
from fp8kit.bench import random
from fp8kit.bench.contest import Contest, row_of, within_time
from fp8kit.bench.gemms import fastest, operands, products
from fp8kit.bench.kernels import copier, kernel_cases
from fp8kit.bench.report import Row, Setting
from fp8kit.bench.sizes import Layer
from fp8kit.bench.timing import Step
from fp8kit.execution.bound import BoundOp
from fp8kit.ops.attention import AttentionSpec, attention
from fp8kit.spec import Meta
from fp8kit.testing import relative_error
from fp8kit.testing.contract import poisoned, put

NAME, FAST = "skeleton", "skeleton, fast accumulation"
HALF = formats.bfloat16


class AttentionRun:
    """Causal attention of a layer, forward and backward, on buffers of its own: ``qkv`` is (sequence, batch,
    3 * hidden), interleaved."""

    def __init__(self, layer: Layer, device: Device) -> None:
        self.spec = AttentionSpec(
            layer.heads, layer.hidden // layer.heads, layout="qkv_interleaved", mask="causal"
        )
        qkv = Meta((layer.sequence, layer.batch, 3 * layer.hidden), HALF)
        kernels, memory = dispatch.kernels(device), memory_of(device)
        self.op = BoundOp(attention, self.spec, {"qkv": qkv}, ("qkv",), memory, kernels, streaming=False)
        self.inputs = {"qkv": put(random.normal(qkv.shape, 7, HALF.numpy), device)}
        self.outputs, self.grads = (
            {name: poisoned(meta.shape, meta.dtype, device) for name, meta in metas.items()}
            for metas in (self.op.outputs, self.op.grads)
        )
        self.cotangents = {"o": put(random.normal(self.outputs["o"].shape, 8, HALF.numpy), device)}
        self.saved: list[Any] = []

    def forward(self) -> None:
        """o and the log-sum-exp of qkv."""
        self.saved = self.op.forward([self.inputs["qkv"].ptr], [o.ptr for o in self.outputs.values()], [])

    def backward(self) -> None:
        """qkv's gradient."""
        known, cotangents = {**self.inputs, **self.outputs}, self.cotangents
        self.op.backward(
            [known[name].ptr for name in self.op.kept],
            [],
            self.saved,
            [cotangents[name].ptr if name in cotangents else None for name in self.op.results],
            [self.grads["qkv"].ptr],
            [],
        )


def skeleton(layer: Layer, setting: Setting, fast: bool | None = None) -> Step:
    """Returns a call that runs all of it; ``fast``: the accumulation in backward, None as delayed scaling has
    it. A CUDA device only."""
    device, kernels = setting.device, dispatch.kernels(setting.device)
    gemms = [fastest(operands(product, device, kernels), fast) for product in products(layer)]
    passes: dict[bool, list[Step]] = {False: [], True: []}  # whether in backward -> copies
    for case in kernel_cases(layer):
        for _ in range(case.uses + case.within):
            passes[bool(case.sums)].append(copier(device, case.nbytes))
    run = AttentionRun(layer, device)
    forward, backward = _mixed(gemms[:4], passes[False]), _mixed(gemms[4:], passes[True])
    steps = [*forward, run.forward, run.backward, *backward]

    def whole() -> None:
        for step in steps:
            step()

    return whole


def _mixed(products: list[Step], copies: list[Step]) -> list[Step]:
    """Both lists, spread over one another."""
    share = len(copies) / len(products)
    found: list[Step] = []
    for i, product in enumerate(products):
        found += [*copies[round(i * share) : round((i + 1) * share)], product]
    return found


def skeletons(layer: Layer, setting: Setting) -> dict[str, Step]:
    """Returns the skeleton as delayed scaling accumulates, and with fast accumulation everywhere."""
    return {NAME: skeleton(layer, setting), FAST: skeleton(layer, setting, True)}


Attentions = Callable[[AttentionRun], dict[str, tuple[Step, Step]]]


def attention_part(setting: Setting, peers: Attentions = lambda run: {}) -> list[Row]:
    """Causal attention of every layer, forward and backward apart; peers take the same values. Forward is
    compared with the first one's, backward's gradient too."""
    return within_time(
        setting,
        setting.layers,
        lambda name: _attention(Contest(setting, f"attention, {name}"), setting.layers[name], peers),
        lambda name: row_of(f"attention, {name}", "all"),
    )


def _attention(contest: Contest, layer: Layer, peers: Attentions) -> list[Row]:
    setting = contest.setting
    run = AttentionRun(layer, setting.device)

    def make(step: Step, row: Row) -> Step:
        step()
        arrays.synchronize(setting.device)
        return step

    for name, (forward, backward) in {"fp8kit native": (run.forward, run.backward), **peers(run)}.items():
        # products over the unmasked half of the scores: two forward, five backward
        for direction, step, count in (("forward", forward, 2), ("backward", backward, 5)):
            flops = count * layer.batch * layer.sequence**2 * float(layer.hidden)
            contest.enter(f"{name}, {direction}", partial(make, step), flops=flops)
    wanted = _by_formula(run)
    for direction, name, views in (("forward", "o", run.outputs), ("backward", "qkv", run.grads)):
        row = contest.rows[f"fp8kit native, {direction}"]
        row["error"] = relative_error(_few(views[name], *wanted[name].shape[1:]), wanted[name])
        # P and dP are rounded to bfloat16 for their products, the result once more
        if not row["error"] < 2.0**-6:
            row["status"] = f"WRONG: error {row['error']:.5f}"
    rows = contest.time(host=False)
    if setting.device.kind == "cuda":
        contest.time_host(2, setting.calls)
    for row in rows:
        if "gpu_ms" in row:
            row["tflops"] = row["flops"] / row["gpu_ms"] * 1e-9
    return rows


def _few(view: ArrayView, *sizes: int) -> Any:
    """Returns the first sequence of the batch on the host in float32, (sequence, *sizes)."""
    return view.numpy()[:, 0].astype(np.float32).reshape(-1, *sizes)


def _by_formula(run: AttentionRun) -> dict[str, Any]:
    """Returns what the kernels are compared with: o and dqkv of causal attention for the first sequence of
    the batch, computed with NumPy in float32. P = softmax(scale q k^T), o = P v, dP = do v^T, dv = P^T do,
    and, with softmax's gradient dS = scale P * (dP - rowsum(dP * P)), dq = dS k and dk = dS^T q."""
    spec = run.spec
    heads, dim, scale = spec.num_heads, spec.head_dim, np.float32(spec.softmax_scale)
    q, k, v = _few(run.inputs["qkv"], heads, 3, dim).transpose(2, 1, 0, 3)
    do = _few(run.cotangents["o"], heads, dim).swapaxes(0, 1)
    scores = q @ k.swapaxes(1, 2) * scale
    scores[:, ~np.tri(len(q[0]), dtype=bool)] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = do @ v.swapaxes(1, 2)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * scale
    dqkv = np.stack([ds @ k, ds.swapaxes(1, 2) @ q, p.swapaxes(1, 2) @ do])
    return {"o": (p @ v).swapaxes(0, 1), "qkv": dqkv.transpose(2, 1, 0, 3)}
