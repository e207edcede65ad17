"""The inspector on a GPU: what it says is what the CPU engine says, and a step waits for nothing."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import inspection, recipe
from fp8kit.arrays import CPU, Device
from fp8kit.autograd import tensor
from fp8kit.backends.cuda import device as cuda
from fp8kit.numerics import Operand, collect, request, values
from fp8kit.ops.statistics import statistics
from tests.support.inspected import logged, section

pytestmark = pytest.mark.gpu
GPU = Device("cuda", 0)
BRIEF = ("min", "max", "mean", "std", "l1_norm", "l2_norm", "dynamic_range", "kurtosis", "nan_count")
CASTS = ("underflows%", "overflows%", "saturated%", "scale_inv_max", "fp8_delayed_scaling_underflows%")
FIVE = ("min", "max", "mean", "std", "underflows%")


def drawn(kind, shape):
    x = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    x *= {"normal": 1.0, "tiny": 1e-22, "spread": 1.0, "mean": 1.0, "zeros": 0.0}[kind]
    if kind == "spread":  # many underflow, some squares do, and eight neighbours differ by 2^100
        x *= np.exp2(np.random.default_rng(4).integers(-90, 12, shape)).astype(np.float32)
    return x + np.float32(1000.0 if kind == "mean" else 0.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["normal", "tiny", "spread", "mean", "zeros"])
@pytest.mark.parametrize("shape", [(2048, 1024), (77, 1003)])
def test_one_reading_says_what_the_cpu_says(shape, kind, dtype):
    """Counts to the last one, values to 1e-6; with or without a histogram, which is another kernel."""
    x = drawn(kind, shape).astype(fk.formats.dtype(dtype).numpy)
    operand = Operand("activation", recipe.Float8CurrentScaling().quantization)
    found = []
    for where in (CPU, GPU):
        for more in ((), ("exponents", "mse")):
            needs = request([*BRIEF, *CASTS, *more], operand)
            got = values(needs, collect(tensor(x, device=where), needs).numpy())
            found.append({name: got[name] for name in (*BRIEF, *CASTS)})
    size = float(np.abs(x.astype(np.float64)).mean())
    for other in found[1:]:
        for name, want in found[0].items():
            exact = name in CASTS or name in ("min", "max", "nan_count")
            near = pytest.approx(want, rel=1e-6, abs=1e-8 * size if name == "mean" else 0.0, nan_ok=True)
            assert other[name] == (pytest.approx(want, rel=0, abs=0, nan_ok=True) if exact else near), name


def test_steps_wait_for_nothing(monkeypatch):
    """Neither a step nor its end; the rows of each step are its own, as they are where each is waited for."""
    te = pytest.importorskip("fp8kit_torch")
    torch = pytest.importorskip("torch")
    kind = {"params_dtype": torch.bfloat16, "device": "cuda"}
    layer = te.LayerNormMLP(256, 512, **kind)
    inputs = [
        torch.tensor(np.random.default_rng(i).standard_normal((64, 2, 256)), dtype=torch.bfloat16).cuda()
        for i in range(6)
    ]
    config = section(
        logged(("min", "max", "mean", "std"), ("activation", "weight", "gradient"))
        | {"LogFp8TensorStats": {"enabled": True, "tensors": ["activation", "gradient"], "stats": list(FIVE)}}
    )

    def run(each):
        rows = []
        with te.inspect(layer, config, sinks=rows.extend) as log:
            for number, x in enumerate(inputs):
                with te.autocast(recipe=recipe.Float8CurrentScaling()):
                    y = layer(x)
                y.sum().backward()
                layer.zero_grad(set_to_none=True)
                log.step()
                each(log, number, rows)
        return rows

    want = run(lambda log, number, rows: log.flush())
    assert {row["step"] for row in want} == set(range(6))

    def late(log, number, rows):
        assert {row["step"] for row in rows} == set(range(number))

    refused = []
    monkeypatch.setattr(cuda.provider, "synchronize", lambda device: refused.append(device))
    with warnings.catch_warnings():  # it says of itself that it is a prototype
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        got = run(late)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not refused
    assert [{**row, "value": 0} for row in got] == [{**row, "value": 0} for row in want]
    for one, other in zip(got, want, strict=True):
        assert one["value"] == pytest.approx(other["value"], rel=1e-6, abs=1e-6)


def test_recorded_calls_before_and_after_are_not_looked_at():
    """Calls that were recorded are replayed in the steps that nothing is asked of, and only there: every step
    that is looked at has its rows, with the values of its own batch."""
    te = pytest.importorskip("fp8kit_torch")
    torch = pytest.importorskip("torch")
    layer = te.Linear(256, 128, params_dtype=torch.bfloat16, device="cuda")
    features = logged(("max",), ("activation",), freq=5)
    with te.inspect(layer, section(features)) as log:
        for number in range(31):
            x = torch.full((32, 256), float(number + 1), dtype=torch.bfloat16, device="cuda")
            with te.autocast(recipe=recipe.Float8CurrentScaling()):
                layer(x).sum().backward()
            log.step()
            assert (inspection.hooks.inspector is not None) == ((number + 1) % 5 == 0)
    assert [(row["step"], row["value"]) for row in log.rows()] == [(i, i + 1.0) for i in range(0, 31, 5)]


def test_calls_that_are_looked_at_are_replayed(monkeypatch):
    """Their statistics with them: once addresses have come again for some steps no Python of theirs runs; and
    every step has the values of its own batch, through PyTorch and natively."""
    torch, te = pytest.importorskip("torch"), pytest.importorskip("fp8kit_torch")
    # 13 to record all; what another test left may free memory within the first of them, and addresses change
    ran, own, steps = [], type(statistics).forward, 32
    monkeypatch.setattr(
        type(statistics), "forward", lambda self, plan, ws: (ran.append(1), own(self, plan, ws))[1]
    )
    kind = {"params_dtype": "bfloat16", "device": "cuda"}
    layers = te.Linear(256, 128, **kind | {"params_dtype": torch.bfloat16}), fk.nn.Linear(256, 128, **kind)
    features = logged(("max", "mean"), ("activation", "weight", "gradient", "wgrad")) | {
        "LogFp8TensorStats": {
            "enabled": True,
            "tensors": ["activation", "gradient"],
            "stats": ["underflows%", "underflows%_columnwise", "mxfp8_sqnr", "scale_inv_max"],
        }
    }
    where = torch.zeros((32, 256), dtype=torch.bfloat16, device="cuda", requires_grad=True)
    there = tensor(np.zeros((32, 256), np.float32), dtype="bfloat16", device=GPU)
    for layer, inspect, torchs in zip(layers, (te.inspect, fk.inspect), (True, False), strict=True):
        with inspect(layer, section(features)) as log:
            for number in range(steps):
                x = np.full((32, 256), number + 1.0, np.float32)
                if torchs:
                    with torch.no_grad():
                        where.copy_(torch.from_numpy(x))
                    with te.autocast(recipe=recipe.Float8CurrentScaling()):
                        (layer(where).sum() * (number + 1)).backward()
                    layer.zero_grad(set_to_none=True)
                else:
                    fk.arrays.copy(there.view, tensor(x, dtype="bfloat16", device=GPU).view)
                    with fk.autocast(recipe=recipe.Float8CurrentScaling()):
                        y = layer(there)
                    g = np.full(y.shape, number + 1.0, np.float32)
                    y.backward(tensor(g, dtype=y.dtype, device=GPU).view)
                    for parameter in layer.parameters():
                        parameter.grad = None
                log.step()
                if number == steps - 4:
                    ran.clear()
        assert not ran
        found = {(row["step"], row["tensor"], row["stat"]): row["value"] for row in log.rows()}
        for number in range(steps):
            for operand in ("activation", "gradient"):
                assert found[number, operand, "max"] == found[number, operand, "mean"] == number + 1.0
                assert found[number, operand, "scale_inv_max"] == pytest.approx(
                    (number + 1.0) / (448 if operand == "activation" else 57344), rel=1e-6
                )
                assert found[number, operand, "underflows%"] == 0
            rows = 32 * (number + 1.0) ** 2
            assert found[number, "wgrad", "max"] == pytest.approx(rows, rel=2.0**-7)
