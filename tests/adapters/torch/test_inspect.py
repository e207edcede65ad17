"""The inspector for PyTorch: the native one's rows, compiled code, ranks, and the names of Transformer
Engine's debug features."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import fp8kit_torch as te
import numpy as np
import pytest
import torch
from fp8kit_torch.te_compat import debug_api

import fp8kit as fk
from fp8kit import inspection, recipe
from fp8kit.errors import ArgumentError, UnsupportedError
from tests.support.debug_examples import EXAMPLES
from tests.support.inspected import (
    HIDDEN,
    INNER,
    OUT,
    RECIPES,
    STATS,
    TWIN_STATS,
    W1,
    W2,
    W3,
    G,
    Native,
    X,
    by_name,
    logged,
    section,
)

CONFIG = section(logged([*STATS, "mxfp8_mse"]) | {"LogFp8TensorStats": TWIN_STATS})


class Model(torch.nn.Module):
    """``tests.support.inspected.Native`` in torch."""

    def __init__(self):
        super().__init__()
        kind = {"bias": False, "params_dtype": torch.float32, "device": "cpu"}
        self.mlp = te.LayerNormMLP(HIDDEN, INNER, eps=1e-6, **kind)
        self.out = te.Linear(HIDDEN, OUT, **kind)
        with torch.no_grad():
            self.mlp.fc1_weight.copy_(torch.tensor(W1))
            self.mlp.fc2_weight.copy_(torch.tensor(W2))
            self.out.weight.copy_(torch.tensor(W3))

    def forward(self, x):
        return self.out(self.mlp(x))


def step(model, name="current", rows=slice(None)):
    x = torch.tensor(X[rows], requires_grad=True)
    with te.autocast(enabled=RECIPES[name] is not None, recipe=RECIPES[name]):
        y = model(x)
    y.backward(torch.tensor(G[rows]))
    return y


@pytest.mark.parametrize("name", ["delayed", "current", "mxfp8", "high precision"])
def test_same_rows_as_natively(name):
    native, model = Native(), Model()
    with fk.inspect(native, CONFIG) as want:
        for _ in range(2):
            native.train_step(RECIPES[name])
            want.step()
    with te.inspect(model, CONFIG) as log:
        for _ in range(2):
            step(model, name)
            log.step()
    assert log.rows()
    assert log.rows() == want.rows()


def test_compiled_code_runs_eagerly_where_it_is_looked_at():
    """Steps 0 and 2 are looked at; 1 and 3 run what was compiled, once."""
    model, frames = Model(), []

    def backend(graph, inputs):
        frames.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    config = section(logged(["max"], ("activation", "wgrad"), freq=2))
    with te.inspect(model, config) as log:
        for number in range(4):
            step(compiled, "mxfp8")
            assert len(frames) == (number > 0)
            log.step()
    assert {row["step"] for row in log.rows()} == {0, 2}
    step(compiled, "mxfp8")
    assert len(frames) == 1
    torch._dynamo.reset()


def test_a_block_within_compiled_code_is_left_as_it_was_entered():
    """It sees nothing, which is said, and nothing stays open."""
    layer = te.Linear(64, OUT, bias=False, params_dtype=torch.float32, device="cpu")
    config = section(logged(["max"], ("activation",)))

    def function(x):
        with te.inspect(layer, config) as log:
            y = layer(x)
            log.step()
        return y

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="eager")
    assert torch.equal(compiled(torch.tensor(X)), layer(torch.tensor(X)))
    torch._dynamo.reset()
    with te.inspect(layer, config) as log:
        layer(torch.tensor(X))
        log.step()
    assert len(log.rows()) == 1


def test_small_layers_show_their_parts():
    """A layer whose operations run as one chain is called part by part where it is looked at, and gives the
    same bits."""
    layer = te.TransformerLayer(64, 128, 4, params_dtype=torch.float32, device="cpu", hidden_dropout=0.0)
    layer.attention_dropout = 0.0
    layer.eval()
    x = torch.tensor(X.reshape(8, 4, 64))
    with te.autocast(recipe=RECIPES["current"]):
        want = layer(x)
    with te.inspect(layer, section(logged(["max"], ("activation", "output")))) as log:
        with te.autocast(recipe=RECIPES["current"]):
            got = layer(x)
        log.step()
    assert torch.equal(want, got)
    names = {"self_attention.layernorm_qkv", "self_attention.proj", "layernorm_mlp.fc1", "layernorm_mlp.fc2"}
    assert {row["layer"] for row in log.rows()} == names
    assert len(log.rows()) == 8


def test_grouped_layers():
    layer = te.GroupedLinear(2, 64, 32, params_dtype=torch.float32, device="cpu")
    with te.inspect(layer, section(logged(["max"], ("activation",)))) as log:
        layer(torch.tensor(X), [24, 8])
        log.step()
    found = by_name(log.rows())
    assert found["GroupedLinear.gemm_0", "activation", "max"] == X[:24].max()
    assert found["GroupedLinear.gemm_1", "activation", "max"] == X[24:].max()


@pytest.mark.parametrize("name", ["delayed", "current", "mxfp8"])
def test_a_group_is_changed_by_itself(name):
    """One group's layer in high precision, and another one's operands rounded; the third as its recipe
    says."""
    fake = {"enabled": True, "gemms": ["fprop"], "tensors": ["output"], "quant_format": "FP8E5M2"}
    groups = {"0": {"DisableFP8Layer": {"enabled": True}}, "2": {"FakeQuant": fake}}
    config = {
        number: section(features, {"layer_name_regex_pattern": f"gemm_{number}$"})["section"]
        for number, features in groups.items()
    }

    def run(recipe=RECIPES[name], config=config):
        torch.manual_seed(0)
        layer = te.GroupedLinear(3, 64, OUT, params_dtype=torch.float32, bias=False, device="cpu")
        x = torch.tensor(X, requires_grad=True)
        with te.inspect(layer, config), te.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(x, [8, 8, 16])
        y.sum().backward()
        return y.detach()

    plain, cast, changed = run(None, {}), run(config={}), run()
    assert torch.equal(changed[:8], plain[:8])
    assert not torch.equal(cast[:8], plain[:8])
    assert torch.equal(changed[8:16], cast[8:16])
    wanted = fk.quantize(plain[16:].numpy(), fk.E5M2).dequantize()
    assert np.array_equal(changed[16:].numpy(), wanted)


def test_experts_whose_sizes_stay_on_the_device_are_said(caplog):
    layer = te.GroupedLinear(2, 64, 32, use_grouped_tensor=True, params_dtype=torch.float32, device="cpu")
    layer.name = "experts"
    for chosen in ("experts", "other"):
        features = logged(["max"], ("activation",))
        with te.inspect(layer, section(features, {"layer_types": [chosen]})) as log:
            for _ in range(2):
                layer(torch.tensor(X), torch.tensor([24, 8]))
                log.step()
        assert log.rows() == []
    (message,) = [message for message in caplog.messages if "rows stay on the device" in message]
    assert message.startswith("inspect: section section: layer experts shows nothing, and no feature changes")


def test_checkpoints():
    model, config = Model(), section(logged(["l1_norm", "mean"]))
    found = []
    for checkpoint in (None, te.checkpoint, torch.utils.checkpoint.checkpoint):
        with te.inspect(model, config) as log:
            x = torch.tensor(X, requires_grad=True)
            with te.autocast(recipe=RECIPES["current"]):
                y = model(x) if checkpoint is None else checkpoint(model, x, use_reentrant=False)
            y.backward(torch.tensor(G))
            log.step()
        found.append(log.rows())
    assert found[0] == found[1] == found[2]


WORKER = """
import sys, torch
sys.path.insert(0, ".")
import fp8kit_torch as te
from torch import distributed as dist
from tests.adapters.torch.test_inspect import Model, step
from tests.support.inspected import logged, section
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
model = Model()
config = section(logged(["mean", "std", "l1_norm", "max", "exponents"]))
with te.inspect(model, config, group=dist.group.WORLD, sinks=sys.argv[2] + f".{rank}.jsonl") as log:
    for part in range(2):
        start = 16 * rank + 8 * part
        step(model, "high precision", slice(start, start + 8))
    log.step()
import numpy as np
import fp8kit_torch.te_compat.debug_api as api
from tests.support.inspected import HIDDEN, OUT, W3, X
plain = torch.nn.Linear(HIDDEN, OUT, bias=False)
kind = {"bias": False, "params_dtype": torch.float32, "device": "cpu", "name": "part"}
part = te.Linear(HIDDEN, OUT, tp_group=dist.group.WORLD, parallel_mode="row", **kind)
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
with torch.no_grad():
    plain.weight.copy_(torch.tensor(W3))
    part.weight.copy_(torch.tensor(np.split(W3, 2, 1)[rank]))
plain = te.convert(torch.nn.ModuleDict({"plain": plain}))
styles = dist.tensor.parallel
styles.parallelize_module(plain, mesh, {"plain": styles.ColwiseParallel()})
config = section(logged(["std", "l1_norm"], ["weight"]))
kind = {"params_dtype": torch.float32, "device": "cpu", "bias": False, "tp_group": dist.group.WORLD}
experts = te.GroupedLinear(2, HIDDEN, OUT, tp_size=2, parallel_mode="column", **kind)
mlp = te.LayerNormMLP(HIDDEN, OUT, set_parallel_mode=True, **kind)
with torch.no_grad():
    for weight in (experts.weight0, experts.weight1, mlp.fc1_weight):
        weight.copy_(torch.tensor(np.split(W3, 2)[rank]))
for name, layer in (("experts", experts), ("mlp", mlp)):
    plain[name] = layer
with te.inspect(plain, config, sinks=sys.argv[2] + f".mesh.{rank}.jsonl") as log:
    plain.plain(torch.tensor(X))
    plain.experts(torch.tensor(X), [20, 12])
    plain.mlp(torch.tensor(X))
    log.step()
state = api.TEDebugState
for whole in (True, False):
    assert state.weight_tensor_tp_group_reduce
    if not whole:
        state.set_weight_tensor_tp_group_reduce(False)
    api.initialize(config, log_dir=sys.argv[2] + f".logs.{whole}")
    part(torch.tensor(np.ascontiguousarray(np.split(X, 2, 1)[rank])))
    api.step()
    api.end_debug()
dist.destroy_process_group()
"""


@pytest.mark.programs
def test_two_ranks(tmp_path):
    """Two micro-batches on each of two ranks are one tensor: the deviation is that of the concatenation."""
    meeting = str(tmp_path / "meeting")
    command = [sys.executable, "-c", WORKER]
    running = [
        subprocess.Popen([*command, str(rank), meeting], stderr=subprocess.PIPE, env=dict(os.environ))
        for rank in range(2)
    ]
    for process in running:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors.decode()
    files = [Path(f"{meeting}.{rank}.jsonl") for rank in range(2)]
    rows = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    assert rows[0] == rows[1]
    found = by_name(rows[0])
    assert found["out", "gradient", "std"] == pytest.approx(float(G.astype(np.float64).std()), rel=1e-6)
    assert found["out", "gradient", "l1_norm"] == pytest.approx(np.abs(G.astype(np.float64)).sum(), rel=1e-6)
    weight = found["out", "weight", "l1_norm"]  # once, whatever the ranks
    assert weight == pytest.approx(np.abs(W3.astype(np.float64)).sum(), rel=1e-6)
    assert sum(found["out", "gradient", "exponents"]) == G.size
    wide = W3.astype(np.float64)
    for rank in range(2):
        rows = [json.loads(line) for line in Path(f"{meeting}.mesh.{rank}.jsonl").read_text().splitlines()]
        for name in ("plain", "experts.gemm_0", "experts.gemm_1", "mlp.fc1"):
            assert by_name(rows)[name, "weight", "std"] == pytest.approx(np.std(wide), rel=1e-12)
        for whole in (True, False):
            folder = Path(f"{meeting}.logs.{whole}") / "nvdlfw_inspect_statistics_logs"
            text = (folder / f"nvdlfw_inspect_globalrank-{rank}.log").read_text()
            values = dict(re.findall(r"(\w+) \t iteration=000000 \t value=([-.e0-9]+)", text))
            weight = wide if whole else np.split(wide, 2, 1)[rank]
            assert float(values["part_weight_std"]) == pytest.approx(np.std(weight), rel=1e-6)
            assert float(values["part_weight_l1_norm"]) == pytest.approx(np.abs(weight).sum(), rel=1e-6)


def test_a_group_needs_ranks():
    with pytest.raises(ArgumentError, match="group"):
        te.inspect(Model(), None, group="world")


# --- Transformer Engine's names -----------------------------------------------------------------------------


class Block(torch.nn.Module):
    """A model whose layers are named after Transformer Engine's."""

    def __init__(self):
        super().__init__()
        kind = {"params_dtype": torch.bfloat16, "device": "cpu", "hidden_dropout": 0, "attention_dropout": 0}
        self.blocks = torch.nn.ModuleList([te.TransformerLayer(64, 128, 4, layer_number=1, **kind)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


# names of the log lines of one step, by example
LINES = {
    "LogTensorStats": {
        "fc1_weight_dynamic_range",
        "fc1_gradient_mean",
        "fc1_gradient_max",
        "fc1_gradient_min",
    },
    "LogFp8TensorStats": {
        "layernorm_qkv_activation_underflows%",
        "layernorm_qkv_activation_mxfp8_mse",
        "layernorm_qkv_gradient_underflows%",
        "layernorm_qkv_weight_scale_inv_min",
        "layernorm_qkv_weight_fp8_block_scaling_underflows%_columnwise",
    },
    "LogNvfp4TensorStats": {
        f"layernorm_qkv_{tensor}_nvfp4_{stat}"
        for tensor in ("activation", "gradient")
        for stat in ("underflows%", "mse")
    },
    "Disable": {"fc1_wgrad_min"},
    "A16": {
        f"{fc}_activation_{stat}"
        for fc in ("fc1", "fc2")
        for stat in (
            "underflows%",
            "mxfp8_mse",
            "max_blockwise_dynamic_range_block_size_32_dims_1_max_over_orientations",
        )
    },
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name, tmp_path):
    """Every example of Transformer Engine's features, as it is, by the calls that its users make."""
    path = tmp_path / "config.yaml"
    path.write_text(EXAMPLES[name])
    model = Block()
    chosen = recipe.DelayedScaling() if name in ("PerTensorScaling", "FakeQuant") else RECIPES["current"]
    debug_api.initialize(
        config_file=str(path), feature_dirs="/x/transformer_engine/debug/features", log_dir=str(tmp_path)
    )
    try:
        debug_api.infer_and_assign_layer_names(model)
        assert model.blocks[0].layernorm_mlp.name == "model.blocks.1.layernorm_mlp"
        x = torch.tensor(X.reshape(8, 4, 64), dtype=torch.bfloat16, requires_grad=True)
        with te.autocast(recipe=chosen):
            y = model(x)
        y.float().sum().backward()
        debug_api.step()
    finally:
        debug_api.end_debug()
    assert inspection.hooks.inspector is None
    log = tmp_path / "nvdlfw_inspect_statistics_logs" / "nvdlfw_inspect_globalrank-0.log"
    lines = [line.split(" \t ") for line in log.read_text().splitlines()]
    assert all(step == "iteration=000000" and re.match("value=[-0-9]", value) for _, step, value in lines)
    names = {re.sub(r"model\.blocks\.1\.(\w+\.)?", "", name) for name, *_ in lines}
    if name == "LogTensorStats":
        names = {own for own in names if own.startswith("fc1")}
    assert names == LINES.get(name, set())
    dumped = {path.name for path in tmp_path.rglob("*.pt")}
    assert bool(dumped) == (name == "DumpTensors")
    if dumped:
        path = next(tmp_path.rglob("*fc1_activation.pt"))
        assert path.parent.name == "iter_000000"
        assert path.parent.parent.name == "rank_0"
        assert set(torch.load(path)) == {"high_precision", "quantized"}


def test_loggers_of_ones_own():
    values = []

    class Logger(debug_api.BaseLogger):
        def log_scalar(self, name, value, iteration, **kwargs):
            values.append((name, value, iteration))

    layer = te.Linear(64, OUT, bias=False, params_dtype=torch.float32, device="cpu")
    config = section(logged(["max"], ("activation",)))
    debug_api.initialize(config, statistics_logger=Logger(), init_training_step=7)
    try:
        with pytest.raises(ValueError, match="a second call"):
            debug_api.initialize(config)
        layer(torch.tensor(X))
        debug_api.step()
        debug_api.update_training_step(20)
        layer(torch.tensor(X))
        debug_api.step()
        debug_api.initialize_training_step(30)
        layer(torch.tensor(X))
        debug_api.step()
    finally:
        debug_api.end_debug()
    largest = float(X.max())
    assert values == [("Layer_1_activation_max", largest, step) for step in (7, 20, 30)]


# of an attention whose constructor got a name, the parts' names in Transformer Engine's logs
CONSTRUCTED = {
    "self_normed": ({}, {"layernorm_linear_qkv", "proj"}),
    "self": ({"input_layernorm": False}, {"linear_qkv", "proj"}),
    "cross_normed": ({"attention_type": "cross"}, {"layernorm_linear_q", "linear_kv", "proj"}),
    "cross": ({"attention_type": "cross", "input_layernorm": False}, {"linear_q", "linear_kv", "proj"}),
}


@pytest.mark.parametrize("kind", CONSTRUCTED)
def test_names_of_a_constructor(kind):
    """``name=`` gives the parts of an attention other names than ``infer_and_assign_layer_names`` does."""
    options, parts = CONSTRUCTED[kind]
    options = {"input_layernorm": True, "attention_dropout": 0.0, "device": "cpu"} | options
    layer = te.MultiheadAttention(64, 4, name="block.self_attention", **options)
    x = torch.tensor(X.reshape(8, 4, 64))
    more = {"encoder_output": x} if "attention_type" in options else {}
    for inferred in (False, True):
        found = set()

        class Logger(debug_api.BaseLogger):
            def log_scalar(self, name, value, iteration, found=found, **kwargs):
                found.add(name)

        debug_api.initialize(section(logged(["max"], ("activation",))), statistics_logger=Logger())
        try:
            if inferred:
                debug_api.infer_and_assign_layer_names(layer)
            layer(x, **more)
            debug_api.step()
        finally:
            debug_api.end_debug()
        if inferred:
            children = {name for name, _ in layer.named_children() if name != "core_attention"}
            assert found == {f"model.{name}_activation_max" for name in children}
        else:
            assert found == {f"block.self_attention.{part}_activation_max" for part in parts}


def test_other_names(capsys, caplog):
    with pytest.raises(ArgumentError, match="before initialize"):
        debug_api.set_tensor_reduction_group(None)
    debug_api.step()
    debug_api.end_debug()
    with pytest.raises(UnsupportedError, match="feature_dirs"):
        debug_api.initialize(feature_dirs=["/my/features"])
    debug_api.initialize(default_logging_enabled=False, statistics_logger=debug_api.BaseLogger())
    try:
        debug_api.set_tensor_reduction_group(None)
        assert debug_api.get_tensor_reduction_group() is None
        debug_api.explain_features(["FakeQuant"])
        debug_api.list_features()
    finally:
        debug_api.end_debug()
    printed = capsys.readouterr().out
    assert "quant_format" in printed
    assert "DisableQuantizationLayer" in printed
    with caplog.at_level("INFO", "fp8kit"):
        for _ in range(2):
            debug_api.log_message("once", "fc1")
    assert caplog.text.count("LAYER=fc1: once") == 1


@pytest.mark.programs
def test_reached_as_transformer_engines_users_reach_it():
    code = (
        "import fp8kit_torch; fp8kit_torch.as_transformer_engine()\n"
        "import nvdlfw_inspect.api as debug_api\nfrom nvdlfw_inspect.logging import BaseLogger\n"
        "import transformer_engine.pytorch as te\n"
        "assert debug_api.initialize.__module__.startswith('fp8kit_torch') and te.Linear\n"
        "import transformer_engine, transformer_engine.debug.features as features\n"
        "from transformer_engine.debug.pytorch.debug_state import TEDebugState\n"
        "TEDebugState.set_weight_tensor_tp_group_reduce(False)\n"
        "assert transformer_engine.debug.features is features and not TEDebugState.debug_enabled\n"
        "import os.path; debug = os.path.dirname(transformer_engine.debug.__file__)\n"
        "assert os.path.join(debug, 'features') == features.__path__[0]\n"
        "debug_api.initialize(feature_dirs=[features.__path__[0]], statistics_logger=BaseLogger())\n"
        "assert TEDebugState.debug_enabled\n"
        "te.module.base.TransformerEngineBaseModule._validate_name(object())\n"
        "debug_api.end_debug()\n"
        "assert not TEDebugState.debug_enabled\n"
        "try:\n    import nvdlfw_inspect.registry\nexcept ModuleNotFoundError:\n    print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "refused", done.stderr
