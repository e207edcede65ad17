"""What makes the library several times slower is said once, with what to do, and listed by ``fp8kit
doctor``."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import types

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import arrays, cli, devices, formats, quantized_product, slowness
from fp8kit.arrays import Device
from fp8kit.autograd import apply
from fp8kit.backends.cuda import attention, cudnn_plans, launch, support
from fp8kit.backends.dispatch import CannotTake
from fp8kit.commands import doctor
from fp8kit.execution import plans
from fp8kit.lru import LRU
from fp8kit.ops import product_emulated
from fp8kit.ops.attention_spec import AttentionSpec
from tests.support.gate import GateSpec, gate
from tests.support.source import ROOT


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("FP8KIT_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "gpus").mkdir()
    monkeypatch.setattr(devices, "_GPUS", tmp_path / "gpus")
    monkeypatch.setattr(arrays.provider(Device("cuda")), "count", lambda: 0, raising=False)
    devices.say_unused.cache_clear()
    slowness.forget()
    yield
    slowness.forget()
    devices.say_unused.cache_clear()


def lines(capsys):
    return capsys.readouterr().out.splitlines()


def test_a_machine_where_nothing_is_slow(capsys, monkeypatch):
    assert cli.main(["doctor", "--strict"]) == 0
    nothing = "makes fp8kit slower than it need be"
    assert lines(capsys) == [f"no GPU to examine (`fp8kit info` says why); nothing else {nothing}"]
    monkeypatch.setattr(arrays.provider(Device("cuda")), "count", lambda: 1, raising=False)
    monkeypatch.setattr(doctor, "_examine_gpu", lambda index: None)
    assert cli.main(["doctor", "--strict"]) == 0
    assert lines(capsys) == [f"nothing here {nothing}"]


@pytest.mark.parametrize("strict", [False, True])
def test_a_cache_that_others_can_write(capsys, tmp_path, caplog, strict):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    assert cli.main(["doctor", *(["--strict"] if strict else [])]) == strict
    said = lines(capsys)
    assert said[0].startswith(f"the cache folder {tmp_path}/cache is not used (everybody can write ")
    assert [line.split()[0] for line in said[1:]] == ["so", "cure"]
    assert len(caplog.records) == 1
    assert cli.main(["doctor"]) == 0
    assert lines(capsys) == said
    assert len(caplog.records) == 1
    assert cli.main(["info"]) == 1
    assert "expected a folder that only this user can write (everybody can" in capsys.readouterr().out


def test_a_cache_that_cannot_be_written(capsys, tmp_path):
    (tmp_path / "cache").write_text("")
    assert cli.main(["doctor", "--strict"]) == 1
    assert "cannot be written (Not a directory)" in lines(capsys)[0]


@pytest.mark.parametrize(("hidden", "said"), [(None, 1), ("", 0), ("-1", 0), ("0", 1)])
def test_a_gpu_that_is_there_and_not_used(monkeypatch, tmp_path, caplog, hidden, said):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("FP8KIT_DEVICE", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    row = support.Row("CuPy", "missing", "it is not installed")
    monkeypatch.setattr(support, "report", lambda: [row])
    (tmp_path / "gpus" / "0000:01:00.0").mkdir()
    for _ in range(2):
        assert fk.quantize(np.ones((2, 2), np.float32)).device == arrays.CPU
        assert fk.nn.Linear(2, 2).weight.device == arrays.CPU
    messages = [record.message for record in caplog.records]
    assert len(messages) == said
    assert all("has a GPU that is not used (CuPy: it is not installed)" in message for message in messages)


def test_specs_made_anew_at_each_call_are_said_once(monkeypatch, caplog):
    monkeypatch.setattr(plans, "MANY", 4)
    plans._equal.clear()
    x, slope = (fk.tensor(np.ones((3, 8), np.float32)[:n], device="cpu") for n in (3, 1))
    slope, kept = slope.reshape(8), GateSpec(8)
    for _ in range(6):
        apply(gate, kept, {"x": x, "slope": slope})
    assert not caplog.records
    for _ in range(6):
        apply(gate, GateSpec(8), {"x": x, "slope": slope})
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "user_gate has made 4 plans for equal specs"
    ]


VERSIONS = {
    90500: "cuDNN 9.5.0 is too old",
    91001: "cuDNN 9.10.1 is known to be faulty in 16-bit attention",
    91400: "cuDNN 9.14.0 is known to be faulty in 16-bit attention",
    91900: None,
}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_cudnn_that_is_there_and_refused(monkeypatch, caplog, capsys, version):
    stand_in = types.ModuleType("cudnn")
    stand_in.backend_version = lambda: version
    stand_in.__version__ = "1.0"
    monkeypatch.setitem(sys.modules, "cudnn", stand_in)
    cudnn_plans.missing.cache_clear()
    try:
        why = VERSIONS[version]
        for _ in range(2):
            attention.say_missing()
        cure = "install 9.19 or later: pip install --upgrade nvidia-cudnn-cu13"
        wanted = [f"{why}: {attention.OWN}; {cure}"] if why else []
        assert [record.message for record in caplog.records] == wanted
        assert cli.main(["info"]) == 0
        shown = capsys.readouterr().out
        assert (f"missing  {why}; {cure}" if why else "1.0 on cuDNN 91900") in shown
        monkeypatch.setattr(arrays.provider(Device("cuda")), "count", lambda: 1, raising=False)
        monkeypatch.setattr(launch, "capability", lambda index: (9, 0))
        assert cli.main(["doctor", "--strict"]) == bool(why)
        assert (why is None) == ("nothing here" in capsys.readouterr().out)
    finally:
        cudnn_plans.missing.cache_clear()


def test_graphs_that_are_built_again_are_said_once(monkeypatch, caplog):
    """A training under fk.deterministic with more lengths of large attention than graphs are kept."""
    monkeypatch.setattr(launch, "current_device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(launch, "runtime", lambda: types.SimpleNamespace(deviceSynchronize=lambda: None))
    plans = LRU(2, cudnn_plans._retire)
    for length in range(5):
        key = cudnn_plans.Key(None, 0, False, False, ((length,),))
        plans.make(key, lambda key: cudnn_plans.GraphPlan(None, 0))
    messages = [record.message for record in caplog.records]
    assert len(messages) == 1
    assert messages[0].startswith(
        "attention by cuDNN of more shapes than its 256 graphs are for: graphs are "
    )
    assert [one.cure for one in slowness.said()] == [cudnn_plans.FEWER]


def test_a_plan_of_unfused_attention_says_why_once(monkeypatch, caplog):
    monkeypatch.setattr(launch, "runtime", lambda: types.SimpleNamespace(getDevice=lambda: 0))
    monkeypatch.setattr(cudnn_plans, "missing", lambda: None)
    shape, strides = (2, 8, 4, 20), (640, 80, 20, 1)
    spec = AttentionSpec(num_heads=4, head_dim=20, qkv_format="bshd", mask="no_mask")
    for _ in range(2):
        for dtype in (formats.float32, formats.bfloat16):
            attention.attention_workspace(*[shape] * 3, None, dtype, spec, False, False, [strides] * 3)
    messages = [record.message for record in caplog.records]
    assert len(messages) == 2
    assert "attention with dtype float32: tensor cores take bfloat16 and float16" in messages[0]
    assert "attention with head_dim 20: multiples of 8 up to 256; head_dim_v 20: " in messages[1]


def test_a_product_of_blocks_that_the_device_does_not_have(monkeypatch, caplog):
    a = fk.quantize(np.ones((128, 128), np.float32), scaling="block_1x128")
    b = fk.quantize(np.ones((128, 128), np.float32), scaling="block_128x128")
    kernels = quantized_product.dispatch.kernels(arrays.CPU)

    def refuse(*given):
        raise CannotTake("block_gemm", "device", "compute capability 8.9", "9.0")

    changed = types.SimpleNamespace(**vars(kernels) | {"block_gemm": refuse})
    monkeypatch.setattr(quantized_product.dispatch, "kernels", lambda device: changed)
    for _ in range(2):
        assert (a @ b.T).tolist() == np.full((128, 128), 128.0).tolist()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "compute capability 8.9" in caplog.text
    assert quantized_product._DECODED_TAKEN in caplog.text


def test_emulated_products_on_a_gpu(caplog):
    for kind in ("cuda", "cuda"):
        product_emulated._say_slow(kind)
    (record,) = caplog.records
    assert "products on cuda are emulated" in record.message


@pytest.mark.programs
def test_numba_that_is_told_not_to_compile(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "fp8kit", "doctor", "--strict"],
        env=os.environ | {"NUMBA_DISABLE_JIT": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("NUMBA_DISABLE_JIT is set\n  so   the CPU engine's functions run in Python")
    assert done.stderr.count("\n") == 1
