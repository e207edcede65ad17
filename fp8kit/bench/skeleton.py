"""The skeleton of a layer: what its work costs as separate, perfect passes, in the same run and under the
same load.

Twelve FP8 products by cuBLASLt's best algorithms, attention by the engine's own kernels, and for each
memory-bound kernel one device copy of its bytes, back to back on one stream, in a step's order. Nothing is
computed from anything else: only time is meant. Below it one gets only by doing less, or two things at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fp8kit import arrays, formats
from fp8kit.arrays import ArrayView, Device
from fp8kit.backends import dispatch
from fp8kit.bench import random
from fp8kit.bench.gemms import fastest, operands, products
from fp8kit.bench.kernels import copier, kernel_cases
from fp8kit.bench.report import NO_TIME, Row, Setting, reason
from fp8kit.bench.sizes import Layer
from fp8kit.bench.timing import Step, clock_for, host_seconds, interleaved, medians
from fp8kit.ops.attention import AttentionSpec, attention
from fp8kit.spec import Meta, Plan, WorkingSet

NAME, FAST = "skeleton", "skeleton, fast accumulation"
HALF = formats.bfloat16


class AttentionRun:
    """Causal attention of a layer, forward and backward, on buffers of its own: ``qkv`` is (sequence, batch,
    3 * hidden), interleaved."""

    def __init__(self, layer: Layer, device: Device, kernels: Any | None = None) -> None:
        spec = AttentionSpec(
            layer.heads, layer.hidden // layer.heads, layout="qkv_interleaved", mask="causal"
        )
        shape = (layer.sequence, layer.batch, 3 * layer.hidden)
        metas = {"qkv": Meta(shape, HALF)}
        kernels = dispatch.kernels(device) if kernels is None else kernels
        self.plan: Plan = attention.plan(spec, metas, frozenset({"qkv"}), kernels)
        self.device, self.stream = device, arrays.current_stream(device)
        signature = self.plan.signature

        def fresh(metas: dict[str, Meta]) -> dict[str, ArrayView]:
            return {name: random.poisoned(meta.shape, meta.dtype, device) for name, meta in metas.items()}

        self.inputs = {"qkv": _put(random.normal(shape, 7, HALF.numpy), device)}
        self.outputs, self.saved, self.grads = (
            fresh(signature.outputs),
            fresh(signature.saved),
            fresh(signature.grads),
        )
        self.cotangents = {"o": _put(random.normal(self.outputs["o"].shape, 8, HALF.numpy), device)}
        self.scratch, self.backward_scratch = fresh(self.plan.scratch), fresh(self.plan.backward_scratch)
        self.kept = {**self.inputs, **self.outputs}

    def forward(self) -> None:
        """o and the log-sum-exp of qkv."""
        views = self.inputs, self.outputs, self.saved, self.scratch
        attention.forward(self.plan, WorkingSet(self.plan.kernels, *views, self.stream))

    def backward(self) -> None:
        """qkv's gradient."""
        views = self.kept, self.grads, self.saved, self.backward_scratch
        attention.backward(self.plan, WorkingSet(self.plan.kernels, *views, self.stream), self.cotangents)


def _put(host: Any, device: Device) -> ArrayView:
    return arrays.to(arrays.as_view(host), device)


def skeleton(layer: Layer, setting: Setting, fast: bool | None = None) -> Step:
    """A call that runs all of it; ``fast``: the accumulation in backward, None as delayed scaling has it. A
    CUDA device only."""
    device, kernels = setting.device, dispatch.kernels(setting.device)
    gemms = [fastest(operands(product, device, kernels), fast) for product in products(layer)]
    passes: dict[bool, list[Step]] = {False: [], True: []}  # whether in backward -> copies
    for case in kernel_cases(layer):
        for _ in range(case.uses + case.within):
            passes[bool(case.sums)].append(copier(device, case.nbytes))
    run = AttentionRun(layer, device)
    order = (_mixed(gemms[:4], passes[False]), [run.forward], [run.backward], _mixed(gemms[4:], passes[True]))
    steps = [step for part in order for step in part]

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
    """The skeleton as delayed scaling accumulates, and with fast accumulation everywhere."""
    return {NAME: skeleton(layer, setting), FAST: skeleton(layer, setting, True)}


Attentions = Callable[[AttentionRun], dict[str, tuple[Step, Step]]]


def attention_part(setting: Setting, peers: Attentions = lambda run: {}) -> list[Row]:
    """Causal attention of every layer, forward and backward apart; peers take the same values. Forward is
    compared with the first one's, backward's gradient too."""
    from fp8kit.testing import relative_error

    rows: list[Row] = []
    for workload, layer in setting.sizes.layers.items():
        if setting.left() <= 0:
            rows.append({"workload": f"attention, {workload}", "case": "all", "status": NO_TIME})
            continue
        run = AttentionRun(layer, setting.device)
        exact = _exact(run)
        found: dict[str, tuple[Step, Step]] = {"fp8kit native": (run.forward, run.backward), **peers(run)}
        own: dict[str, Row] = {}
        steps: dict[str, Step] = {}
        for name, pair in found.items():
            for direction, step in zip(("forward", "backward"), pair, strict=True):
                case = f"{name}, {direction}"
                own[case] = {
                    "workload": f"attention, {workload}",
                    "case": case,
                    "status": "ok",
                    "flops": _flops(layer, direction),
                }
                try:
                    step()
                    arrays.synchronize(setting.device)
                # what one library cannot do here must not cost the other figures; it is reported
                except Exception as error:
                    own[case]["status"] = reason(error)
                    continue
                steps[case] = step
        for direction, name, views in (("forward", "o", run.outputs), ("backward", "qkv", run.grads)):
            row = own[f"fp8kit native, {direction}"]
            row["error"] = relative_error(_few(views[name]), exact[name])
            # P and dP are rounded to bfloat16 for their products, the result once more
            if not row["error"] < 2.0**-6:
                row["status"] = f"WRONG: error {row['error']:.5f}"
        for case, seconds in medians(
            interleaved(steps, clock_for(setting.device), setting.rounds, setting.calls, setting.warmups)
        ).items():
            own[case] |= {"gpu_ms": seconds * 1e3, "tflops": own[case]["flops"] / seconds * 1e-12}
        if setting.device.kind == "cuda":
            for case, found_time in host_seconds(steps, setting.device, 2, setting.calls).items():
                own[case] |= found_time.row()
        rows += own.values()
    return rows


def _flops(layer: Layer, direction: str) -> float:
    """Of the products over the unmasked half of the scores: two forward, five backward."""
    return (2 if direction == "forward" else 5) * 2.0 * layer.batch * layer.sequence**2 * layer.hidden / 2


def _few(view: ArrayView) -> Any:
    """The first sequence of the batch, on the host in float64."""
    import numpy as np

    return view.numpy()[:, :1].astype(np.float64)


def _exact(run: AttentionRun) -> dict[str, Any]:
    """o and dqkv of the first sequence of the batch, by the float64 formulas (softmax's gradient: P * (dP -
    sum(dP * P)))."""
    import numpy as np

    spec = run.plan.spec
    length, heads, dim = run.inputs["qkv"].shape[0], spec.num_heads, spec.head_dim
    qkv = _few(run.inputs["qkv"])[:, 0].reshape(length, heads, 3, dim).astype(np.float32)
    do = _few(run.cotangents["o"])[:, 0].reshape(length, heads, dim).astype(np.float32)
    o, dqkv = np.empty_like(do), np.empty_like(qkv)
    hidden = np.triu(np.ones((length, length), bool), 1)
    for head in range(heads):
        q, k, v = (qkv[:, head, i] for i in range(3))
        scores = np.where(hidden, -np.inf, q @ k.T * np.float32(spec.softmax_scale))
        p = np.exp(scores - scores.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        o[:, head] = p @ v
        dp = do[:, head] @ v.T
        ds = p * (dp - (dp * p).sum(1, keepdims=True)) * np.float32(spec.softmax_scale)
        for i, part in enumerate((ds @ k, ds.T @ q, p.T @ do[:, head])):
            dqkv[:, head, i] = part
    return {"o": o.reshape(length, 1, -1), "qkv": dqkv.reshape(length, 1, -1)}
