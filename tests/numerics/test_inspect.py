"""The inspector on the native frontend: what it logs, what it changes, and that nothing is there when off."""

from __future__ import annotations

import cProfile
import json
import math
import pstats
from collections import Counter
from dataclasses import replace

import fp8kit_torch as te
import numpy as np
import pytest
import torch

import fp8kit as fk
from fp8kit import inspection, nn, recipe
from fp8kit.arrays import CPU
from fp8kit.autograd.call import memory_of
from fp8kit.backends import dispatch
from fp8kit.errors import ArgumentError, UnsupportedError
from fp8kit.inspection import TENSORS
from fp8kit.numerics import shown, tensor_statistics
from fp8kit.numerics.shown import Copy
from tests.support.inspected import (
    HIDDEN,
    LAYERS,
    OUT,
    RECIPES,
    ROWS,
    STATS,
    TWIN_STATS,
    TWINS,
    W3,
    G,
    Native,
    X,
    assert_product,
    by_name,
    logged,
    section,
)


def inspected(config, steps=1, model=None, **how):
    model = Native() if model is None else model
    with fk.inspect(model, config) as log:
        made = []
        for _ in range(steps):
            made.append(model.train_step(**how))
            log.step()
    return log.rows(), made


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", [fk.float32, fk.bfloat16])
def test_no_bit_changes(name, dtype):
    """What is looked at is what would be there without: with every recipe, output and gradients have the
    same bits over two steps."""
    config = section(logged([*STATS, "mxfp8_sqnr"]) | {"LogFp8TensorStats": TWIN_STATS})
    plain = Native(dtype)
    want = [plain.train_step(RECIPES[name]) for _ in range(2)]
    rows, got = inspected(config, 2, Native(dtype), recipe=RECIPES[name])
    assert got == want
    assert {row["layer"] for row in rows} == set(LAYERS)
    assert {row["tensor"] for row in rows} == set(TENSORS)


def test_rows_are_those_of_the_arrays():
    """What is known outside of the layer: the last one's input, weight, output, and gradients, in high
    precision, by the functions that tests of statistics hold to NumPy."""
    model = Native()
    with fk.inspect(model, section(logged(STATS))) as log:
        x = fk.tensor(X)
        x.requires_grad = True
        h = model.mlp(x)
        y = model.out(h)
        y.backward(fk.tensor(G))
        log.step()
    found = by_name(log.rows())
    arrays = {
        "activation": h.view.numpy(),
        "weight": W3,
        "output": y.view.numpy(),
        "gradient": G,
        "dgrad": (G.astype(np.float64) @ W3).astype(np.float32),
        "wgrad": model.out.weight.grad.numpy(),
    }
    for tensor, array in arrays.items():
        want = tensor_statistics(np.ascontiguousarray(array), STATS, tensor=tensor)
        for stat in STATS:
            got = found["out", tensor, stat]
            if tensor != "dgrad":
                assert got == want[stat], (tensor, stat)
            elif stat != "exponents":  # rounded once more, or less
                assert got == pytest.approx(want[stat], rel=1e-4, abs=1e-6), stat
    assert all(isinstance(row["value"], float | int | list) for row in log.rows())
    assert json.loads(json.dumps(log.rows()[0])) == log.rows()[0]


def test_casts_are_the_layers_own():
    """Delayed scaling's second step casts with the first one's scale, which the tensor alone cannot say."""
    config = section({"LogFp8TensorStats": {"enabled": True, "tensors": ["activation"], "stats": CASTS}})
    model = Native()
    with fk.inspect(model, config) as log:
        for scale in (1.0, 4.0):
            with fk.autocast(recipe=recipe.DelayedScaling()):
                model.out(fk.tensor(X * scale))
            log.step()
    first, second = (by_name([r for r in log.rows() if r["step"] == step]) for step in (0, 1))
    assert first["out", "activation", "scale_inv_max"] == 1  # of a fresh state
    assert second["out", "activation", "scale_inv_max"] == pytest.approx(np.abs(X).max() / 448, rel=1e-6)
    assert second["out", "activation", "saturated%"] > 5


CASTS = ["underflows%", "scale_inv_max", "mse", "saturated%"]


def test_twins_of_gradients():
    """A GEMM beside itself in high precision: the same product, by NumPy in float64."""
    config = section({"LogTensorStats": TWIN_STATS}, {"exact_layer_names": ["out"]})
    rows, _ = inspected(config, recipe=recipe.Float8CurrentScaling())
    assert {row["tensor"]: row["gemm"] for row in rows} == TWINS
    found = by_name(rows)
    for tensor in TWINS:
        assert 0.99 < found["out", tensor, "cosine"] < 1
        error = found["out", tensor, "relative_error"]
        assert found["out", tensor, "sqnr"] == pytest.approx(-20 * math.log10(error), rel=1e-6)
    exact, _ = inspected(config)
    for row in exact:  # in high precision it is its own twin
        assert row["value"] in (pytest.approx(1), 0.0, math.inf)


@pytest.mark.parametrize("name", ["current", "mxfp8", "high precision"])
def test_recomputed_passes_are_counted_once(name):
    config = section(logged(STATS))
    assert (
        inspected(config, recipe=RECIPES[name])[0]
        == inspected(config, recipe=RECIPES[name], checkpoint=True)[0]
    )


def test_micro_batches_are_one_tensor():
    """Statistics over four micro-batches are those of the concatenation: the pooled deviation too."""
    config = section(logged([*STATS, "nan_count"], ("activation", "gradient", "weight")), OUT_LAYER)
    model = Native()
    with fk.inspect(model, config) as log:
        for part in range(4):
            rows = slice(8 * part, 8 * part + 8)
            x = fk.tensor(X[rows] * 10.0**part)
            x.requires_grad = True
            model.out(x).backward(fk.tensor(G[rows] + part))
        log.step()
    found = by_name(log.rows())
    whole = {
        "activation": np.concatenate([X[8 * i : 8 * i + 8] * np.float32(10.0**i) for i in range(4)]),
        "gradient": np.concatenate([G[8 * i : 8 * i + 8] + np.float32(i) for i in range(4)]),
        "weight": W3,
    }
    for tensor, array in whole.items():
        got = found["out", tensor, "std"]
        assert got == pytest.approx(float(array.astype(np.float64).std()), rel=1e-6)
        want = tensor_statistics(np.ascontiguousarray(array), STATS, tensor=tensor)
        for stat in STATS:
            own = found["out", tensor, stat]
            assert own == want[stat] if stat == "exponents" else own == pytest.approx(want[stat], rel=1e-6)


OUT_LAYER = {"exact_layer_names": ["out"]}


def test_steps():
    """freq counts from 0; ends belong to intervals."""
    features = logged(["max"], ("activation",), freq=2, start_step=1, end_step=6)
    features |= {"LogFp8TensorStats": LISTED}
    rows, _ = inspected(section(features, OUT_LAYER), 10)
    assert [row["step"] for row in rows if row["stat"] == "max"] == [2, 4, 6]
    assert [row["step"] for row in rows if row["stat"] != "max"] == [0, 3, 9]


LISTED = {"enabled": True, "tensors": ["weight"], "stats": ["mxfp8_mse"], "freq": 3}
LISTED |= {"start_end_list": [[0, 4], [8, 9]]}


def test_selections():
    layers = {
        "model.blocks.3.layernorm_mlp.fc1": (True, True, False, True, False),
        "model.blocks.11.self_attention.proj": (False, False, True, False, True),
        "head": (False, False, False, False, False),
    }
    chosen = [
        {"layer_name_regex_pattern": "(fc1|fc2)"},
        {"layer_types": ["layernorm_mlp", "qkv"]},
        {"layer_numbers": ["10-12", 7]},
        {"layer_numbers": [3], "layer_types": ["fc1"]},
        {"exact_layer_names": ["model.blocks.11.self_attention.proj"]},
    ]
    from fp8kit.numerics.config import read

    for i, selection in enumerate(chosen):
        config = read(section(logged(["max"]), selection))
        assert [config.section(name) is not None for name in layers] == [row[i] for row in layers.values()]


def test_a_layer_in_two_sections():
    one = section(logged(["max"]))["section"]
    config = {"a": one, "b": {**one, "layers": OUT_LAYER}, "c": {"enabled": False, "layers": OUT_LAYER}}
    model = Native()
    with pytest.raises(ValueError, match="layer out: got in the sections a, b"), fk.inspect(model, config):
        model.train_step()
    assert inspection.hooks.inspector is None


def test_a_section_without_layers_is_said(caplog):
    inspected(section(logged(["max"]), {"layer_types": ["decoder"]}))
    assert "no layer was found for the section section; layers that ran: mlp.fc1, mlp.fc2, out" in caplog.text


def test_layers_that_are_missing_are_said_when_the_first_step_ends(caplog):
    model, config = Native(), section(logged(["max"]), {"exact_layer_names": ["out", "mlp.fc3"]})
    with fk.inspect(model, config) as log:
        for _ in range(2):
            model.train_step()
            log.step()
            (said,) = caplog.messages
    assert caplog.messages == [said]
    assert said == "inspect: section section: no layer 'mlp.fc3' has run; did you mean mlp.fc2?"


def test_what_there_is_none_of_is_said(caplog):
    """Once for a section, whatever layers it has."""
    stats = logged(["max", "underflows%", "mse"], ("activation", "weight"))
    rows, _ = inspected(section(stats, {"exact_layer_names": ["mlp.fc2", "out"]}))
    assert {row["stat"] for row in rows} == {"max"}
    (said,) = caplog.messages
    first = "section section: left out, first in layer mlp.fc2: underflows%, mse of activation, expected a"
    assert first in said
    assert "; underflows%, mse of weight, expected a recipe's name in front of it" in said


def test_the_log_is_what_the_block_gives():
    with pytest.raises(AttributeError, match="rows: it is log's, within `with inspect"):
        fk.inspect(Native(), section(logged(["max"]))).rows()


# --- changes ----------------------------------------------------------------------------------------------


def results(features, layers=None, name="current", steps=2):
    return inspected(section(features, layers), steps, recipe=RECIPES[name])[1]


@pytest.mark.parametrize("name", RECIPES)
def test_disabled_layers_are_in_high_precision(name):
    plain = results({}, name="high precision")
    assert results({"DisableFP8Layer": {"enabled": True}}, name=name) == plain
    gemms = {"enabled": True, "gemms": ["fprop", "dgrad", "wgrad"]}
    for feature in ("DisableFP8GEMM", "DisableQuantizationGEMM"):
        assert results({feature: gemms}, name=name) == plain


def test_one_gemm_in_high_precision():
    """As the recipe rowwise_with_gw_hp has it, on the scales of another one: wgrad of the last layer is the
    product of its operands."""
    model = Native()
    features = {"DisableQuantizationGEMM": {"enabled": True, "gemms": ["wgrad"]}}
    with fk.inspect(model, section(features, OUT_LAYER)) as log:
        with fk.autocast(recipe=RECIPES["current"]):
            y = model.out(fk.tensor(X))
        y.backward(fk.tensor(G))
        log.step()
    assert_product(model.out.weight.grad, G.T, X)


@pytest.mark.parametrize("name", RECIPES)
def test_fake_quantization(name):
    """Values that were rounded to a format and back, in the products in high precision, whatever the recipe:
    of one operand, of a half of the layer."""
    features = {"enabled": True, "quant_format": "FP8E5M2"}
    features["gemms_struct"] = [{"gemm": "fprop", "tensors": ["activation"]}]
    model = Native()
    with fk.inspect(model, section({"FakeQuant": features}, OUT_LAYER)) as log:
        with fk.autocast(enabled=RECIPES[name] is not None, recipe=RECIPES[name]):
            y = model.out(fk.tensor(X))
        log.step()
    rounded = fk.quantize(X, fk.E5M2).dequantize()
    assert_product(y.view, rounded, W3.T)


def test_fake_quantization_in_micro_scales():
    features = {"enabled": True, "quant_format": "MXFP8E4M3", "gemms": ["fprop"]}
    features["tensors"] = ["activation", "weight"]
    model = Native()
    with fk.inspect(model, section({"FakeQuant": features}, OUT_LAYER)):
        y = model.out(fk.tensor(X))
    a, b = (fk.quantize(v, fk.E4M3, scaling="mx_1x32", scale_rule="te").dequantize() for v in (X, W3))
    assert_product(y.view, a, b.T)


def test_per_tensor_scaling():
    """All tensors of all GEMMs: current scaling, bit by bit. One of one GEMM: neither."""
    every = {"gemms": ["fprop", "dgrad", "wgrad"], "tensors": ["activation", "weight", "gradient"]}
    assert results({"PerTensorScaling": {"enabled": True, **every}}, name="delayed") == results({})
    one = {"PerTensorScaling": {"enabled": True, "gemms": ["dgrad"], "tensors": ["weight", "activation"]}}
    some = results(one, name="delayed", steps=3)
    assert some != results({}, name="delayed", steps=3)
    # fprop, and so y, is the recipe's own in the first step
    assert some[0][0] == results({}, name="delayed", steps=1)[0][0]
    with pytest.raises(
        UnsupportedError, match="PerTensorScaling: got a recipe whose input is E4M3 by tensor, current"
    ):
        results(one, name="current")


def test_changes_hold_for_their_steps():
    features = {"DisableFP8Layer": {"enabled": True, "start_step": 1, "end_step": 1}}
    got = inspected(section(features), 3, recipe=RECIPES["current"])[1]
    low, high = results({}, steps=1)[0], results({}, name="high precision", steps=1)[0]
    assert got == [low, high, low]


# --- what it costs ---------------------------------------------------------------------------------------


FIVE = ["min", "max", "mean", "std", "underflows%"]
COUNTED = ("amax", "quantize", "scale_from_amax", "tensor_statistics", "cast_statistics", "brief_statistics")


@pytest.mark.parametrize("name", ["current", "delayed"])
def test_a_tensor_is_read_once(name, monkeypatch):
    """Five statistics of an operand under one scale are one more kernel: no codes, no amax, no scale are made
    that the layer has; and both directions of a cast are one."""
    kernels, calls = dispatch.kernels(CPU), []
    for kernel in COUNTED:
        own = getattr(kernels, kernel)
        monkeypatch.setattr(kernels, kernel, lambda *a, n=kernel, f=own: (calls.append(n), f(*a))[1])
    made = []
    for stats in ([], [*FIVE, "underflows%_columnwise"]):
        features = logged(stats, ("activation", "weight", "gradient")) if stats else {}
        model = Native()
        calls.clear()
        inspected(section(features), model=model, recipe=RECIPES[name])
        made.append(Counter(calls))
    plain, watched = made
    assert watched - plain <= Counter(brief_statistics=9, amax=4)  # fused casts are made by themselves
    assert watched["brief_statistics"] == 9
    assert watched["amax"] <= 9  # one for each operand at most


def test_rows_come_a_step_later_where_a_device_must_be_waited_for(monkeypatch):
    """And at once where they are asked for; every step has its own rows."""
    monkeypatch.setattr(Copy, "on_host", False)
    model, sink = Native(), []
    config = section(logged(["max"], ("activation",), freq=2), OUT_LAYER)

    def step(scale):
        model.out(fk.tensor(X * scale))
        log.step()
        return [row["step"] for row in sink]

    with fk.inspect(model, config, sinks=sink.extend) as log:
        assert step(1) == []
        assert step(2) == [0]  # a step that is not looked at, behind one that is
        assert step(3) == [0]
        assert [row["step"] for row in log.rows()] == [0, 2]
        assert step(4) == [0, 2]
        step(5)
        log.flush()
        assert [row["step"] for row in sink] == [0, 2, 4]
        step(6)
        step(7)
    assert [row["value"] for row in sink] == [np.float32(X.max() * k) for k in (1, 3, 5, 7)]


def test_an_evaluation_is_left_out():
    model, config = Native(), section(logged(["max"], ("activation",)), OUT_LAYER)
    with fk.inspect(model, config) as log:
        model.out(fk.tensor(X))
        with log.paused():
            assert inspection.hooks.inspector is None
            model.out(fk.tensor(100 * X))
            for wrong in (log.step, log.paused().__enter__):
                with pytest.raises(ArgumentError, match="paused"):
                    wrong()
        model.out(fk.tensor(2 * X))
        log.step()
    assert [row["value"] for row in log.rows()] == [2 * X.max()]
    with pytest.raises(ArgumentError, match="outside"), log.paused():
        pass
    log.go_to(7)
    assert inspection.hooks.inspector is None


@pytest.mark.parametrize("answers", [True, False])
def test_the_step_before_a_failure_is_written(answers, monkeypatch, caplog):
    """The one that a user wants to see; and where a device does not answer, the failure is what is raised."""
    monkeypatch.setattr(Copy, "on_host", False)
    model, sink = Native(), []
    config = section(logged(["max"], ("activation",)), OUT_LAYER)

    def lost(self, array):
        raise RuntimeError("an illegal memory access")

    def train():
        with fk.inspect(model, config, sinks=sink.extend) as log:
            for number in range(3):
                model.out(fk.tensor(X * (number + 1.0)))
                if number == 2:
                    if not answers:
                        monkeypatch.setattr(Copy, "part", lost)
                    raise ZeroDivisionError
                log.step()

    with pytest.raises(ZeroDivisionError):
        train()
    assert [row["step"] for row in sink] == ([0, 1] if answers else [0])
    assert ("illegal memory access" in caplog.text) != answers
    assert inspection.hooks.inspector is None


def test_what_no_arena_holds_has_one_of_its_own(monkeypatch):
    monkeypatch.setattr(shown, "_ARENA", 256)
    config = section(logged(["max", "exponents"], ("activation", "weight")))
    want = inspected(config)[0]
    monkeypatch.undo()
    assert want == inspected(config)[0]


def test_a_call_has_the_same_places_in_every_step(monkeypatch):
    """So that it can be replayed; but not where it has not shown yet what it fills."""
    model, places, own = Native(), [], shown.Arenas.place

    def place(self, memory, nbytes):
        places.append(own(self, memory, nbytes))
        return places[-1]

    monkeypatch.setattr(shown.Arenas, "place", place)
    stats = ["max", "mean"]
    with fk.inspect(model, section(logged(stats))) as log:
        for number in range(3):
            model.out(fk.tensor(X * (number + 1.0)))
            log.step()
        assert len({view.ptr for view in places}) == 1
        late = log.place(memory_of(CPU), 64)  # of a call that runs on another thread
        log.step()
        model.out(fk.tensor(X))
        assert places[-1].owner is not late.owner
        model.train_step()
        assert len({view.ptr for view in places[-6:]}) == 6
    for number in range(3):
        rows = [row for row in log.rows() if row["step"] == number]
        values = by_name(rows)
        assert values["out", "activation", "max"] == X.max() * np.float32(number + 1.0)
        assert len(rows) == len(values) == 3 * len(stats)


# --- off --------------------------------------------------------------------------------------------------


def calls_of(model, steps=3):
    profile = cProfile.Profile()
    for i in range(steps):
        if i == steps - 1:
            profile.enable()
        model.train_step(RECIPES["current"])
    profile.disable()
    return pstats.Stats(profile).total_calls


def test_nothing_runs_when_off():
    """A step outside of the block, and one within it that nothing is asked of, make as many Python calls as
    one that never saw an inspector, and launch as much."""
    plain, model = Native(), Native()
    want = calls_of(plain)
    config = section(logged(STATS, freq=100, start_step=50))
    with fk.inspect(model, config) as log:
        assert inspection.hooks.inspector is None
        assert calls_of(model) == want
    assert not log.rows()
    assert calls_of(model) == want


def test_one_inspector_at_a_time():
    model = Native()
    with fk.inspect(model, None) as log:
        with pytest.raises(ArgumentError, match="one at a time"), fk.inspect(model, None):
            pass
        log.step()
    with pytest.raises(ArgumentError, match="outside of the block"):
        log.step()


def test_a_block_is_entered_once():
    block = fk.inspect(Native(), section(logged(["max"])))
    with block:
        pass
    with pytest.raises(ArgumentError, match="one that has ended, expected a new one: inspect"), block:
        pass
    assert inspection.hooks.inspector is None


def test_what_is_no_model(caplog):
    config = section(logged(["max"]))
    for model, said in ((Native, "the class Native, expected a module"), (config, "a dict, expected a mod")):
        with pytest.raises(ArgumentError, match=said):
            fk.inspect(model, config)
    with pytest.raises(ArgumentError, match=r"a Linear of another library, .* fp8kit_torch\.inspect is for"):
        fk.inspect(torch.nn.Linear(3, 3), config)
    with pytest.raises(ArgumentError, match=r"model: got a Native, expected a torch\.nn\.Module"):
        te.inspect(Native(), config)
    caplog.clear()
    te.inspect(torch.nn.Linear(3, 3), config)
    (message,) = caplog.messages
    assert message.startswith(
        "inspect: no layer of fp8kit is in the Linear, so nothing is seen: fp8kit_torch.c"
    )


def test_dumps(tmp_path):
    features = {"DumpTensors": {"enabled": True, "tensors": ["activation"], "high_precision_tensor": True}}
    features["DumpTensors"] |= {"quantized_tensor": True, "freq": 2}
    model = Native()
    with fk.inspect(model, section(features, OUT_LAYER), log_dir=tmp_path) as log:
        for _ in range(3):
            with fk.autocast(recipe=RECIPES["current"]):
                model.out(fk.tensor(X))
            log.step()
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.npz"))
    assert files == [f"tensor_dumps/rank_0/iter_00000{i}/out_activation.npz" for i in (0, 2)]
    with np.load(tmp_path / files[0]) as found:
        assert np.array_equal(found["high_precision"], X)
        assert np.array_equal(found["quantized"], fk.quantize(X, fk.E4M3).dequantize())


def test_an_operand_that_a_gemm_takes_as_it_is_has_no_cast(tmp_path):
    """Neither in a dump nor in statistics; the other one has."""
    data = RECIPES["current"].quantization
    data = replace(data, fprop=replace(data.fprop, plain="a"))
    both = {"enabled": True, "tensors": ["activation", "weight"]}
    features = {
        "DumpTensors": {**both, "quantized_tensor": True, "high_precision_tensor": True},
        "LogFp8TensorStats": {**both, "stats": ["mse"]},
    }
    model = Native()
    with fk.inspect(model, section(features, OUT_LAYER), log_dir=tmp_path) as log:
        with fk.autocast(recipe=fk.recipe.DataRecipe(data)):
            model.out(fk.tensor(X))
        log.step()
    assert [(row["tensor"], row["stat"]) for row in log.rows()] == [("weight", "mse")]
    for name, kept in (("activation", ["high_precision"]), ("weight", ["high_precision", "quantized"])):
        with np.load(next(tmp_path.rglob(f"out_{name}.npz"))) as found:
            assert sorted(found) == kept


def test_transformer_layers_have_transformer_engines_names():
    layer = nn.TransformerLayer(64, 128, 4, params_dtype=fk.float32)
    with fk.inspect(layer, section(logged(["max"], ("weight",)))) as log:
        layer(fk.tensor(X.reshape(8, 4, 64)))
        log.step()
    names = {"self_attention.layernorm_qkv", "self_attention.proj", "layernorm_mlp.fc1", "layernorm_mlp.fc2"}
    assert {row["layer"] for row in log.rows()} == names


def test_experts_with_sizes_on_the_device(caplog):
    """They show nothing, and that is said once."""
    model, kernel = Native(), np.zeros((2, HIDDEN, OUT), np.float32)
    sizes = np.array([ROWS, 0], np.int32)
    with fk.inspect(model, section(logged(["max"]), {"layer_types": ["experts"]})):
        for _ in range(2):
            fk.nn.moe.grouped_dense(fk.tensor(X), fk.tensor(kernel), fk.tensor(sizes), name="experts")
            fk.nn.moe.grouped_dense(fk.tensor(X), fk.tensor(kernel), fk.tensor(sizes), name="others")
    assert sum("layer experts shows nothing" in message for message in caplog.messages) == 1
    assert not any("layer others" in message for message in caplog.messages)
