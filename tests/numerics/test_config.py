"""Configurations: Transformer Engine's own examples, and what is refused."""

from __future__ import annotations

import math

import pytest

import fp8kit as fk
from fp8kit.errors import ArgumentError
from fp8kit.numerics.config import Effect, Steps, read
from tests.support.inspected import logged, section

# the examples of Transformer Engine's features, as its documentation has them
EXAMPLES = {
    "LogTensorStats": """
example_tensor_stat_collection:
    enabled: True
    layers:
        layer_name_regex_pattern: .*(fc1|self_attention).*
    transformer_engine:
        LogTensorStats:
            enabled: True
            tensors_struct:
                - tensor: activation
                  stats: [mean]
                  freq: 10
                  start_step: 5
                  end_step: 100
                - tensor: gradient
                  stats: [mean, max, min]
                  freq: 2
                  start_end_list: [[0, 20], [80, 100]]
                - tensor: weight
                  stats: [dynamic_range]
""",
    "LogFp8TensorStats": """
example_fp8_tensor_stat_collection:
    enabled: True
    layers:
        layer_types: [layernorm_qkv]
    transformer_engine:
        LogFp8TensorStats:
            enabled: True
            tensors_struct:
            - tensor: activation
              stats: [underflows%, mxfp8_mse]
              freq: 1
            - tensor: gradient
              stats: [underflows%]
              freq: 5
              start_step: 0
              end_step: 80
            - tensor: weight
              stats: [scale_inv_min, fp8_block_scaling_underflows%_columnwise]
""",
    "LogNvfp4TensorStats": """
example_nvfp4_tensor_stat_collection:
    enabled: True
    layers:
        layer_types: [layernorm_qkv]
    transformer_engine:
        LogNvfp4TensorStats:
            enabled: True
            tensors_struct:
            - tensor: activation
              stats: [underflows%, mse]
              freq: 1
            - tensor: gradient
              stats: [underflows%, mse]
              freq: 5
              start_step: 0
              end_step: 80
""",
    "FakeQuant": """
example_fake_quant_fp8:
    enabled: True
    layers:
        layer_types: [layernorm_mlp.fc1]
    transformer_engine:
        FakeQuant:
            enabled: True
            quant_format: FP8E5M2
            gemms_struct:
            - gemm: fprop
              tensors: [activation, weight]
            - gemm: dgrad
              tensors: [gradient]
""",
    "PerTensorScaling": """
example_per_tensor_scaling:
    enabled: True
    layers:
        layer_types: [self_attention.layernorm_qkv]
    transformer_engine:
        PerTensorScaling:
            enabled: True
            gemms: [dgrad]
            tensors: [weight, activation]
""",
    "Disable": """
section1:
  enabled: True
  layers:
    layer_types: [self_attention]
  transformer_engine:
    DisableFP8GEMM:
      enabled: True
      gemms: [wgrad]
section2:
  enabled: True
  layers:
    layer_types: [fc2]
  transformer_engine:
    DisableFP8Layer:
      enabled: True
section3:
  enabled: True
  layers:
    layer_types: [fc1]
  transformer_engine:
    LogTensorStats:
      enabled: True
      stats: [min]
      tensors: [wgrad]
      freq: 1
      start_step: 0
      end_step: 50
""",
    "DumpTensors": """
dump_tensors_example:
    enabled: True
    layers:
        layer_name_regex_pattern: .*(fc1|self_attention).*
    transformer_engine:
        DumpTensors:
            enabled: True
            tensors_struct:
                - tensor: activation
                  high_precision_tensor: True
                  quantized_tensor: True
                  freq: 100
                - tensor: weight
                  high_precision_tensor: True
                  quantized_tensor: False
                  freq: 500
""",
    "A16": """
any_section_name:
  enabled: True
  layers: {layer_name_regex_pattern: ".*(fc1|fc2)"}
  transformer_engine:
    LogFp8TensorStats:
      {enabled: True, tensors_struct: [{tensor: activation, stats: [underflows%, mxfp8_mse], freq: 10}]}
    LogTensorStats:
      enabled: True
      tensors: [activation]
      stats: [{max_blockwise_dynamic_range: {block_size: 32, dims: 1}}]
    DisableQuantizationGEMM: {enabled: True, gemms: [wgrad]}
""",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_read(name, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(EXAMPLES[name])
    found = read(path)
    assert found == read(str(path))
    assert found.sections
    for own in found.sections:
        assert own.logged or own.dumped or own.effects


def test_what_an_example_says(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(EXAMPLES["FakeQuant"])
    (own,) = read(path).sections
    pair = (("activation", "FP8E5M2"), ("weight", "FP8E5M2"))
    assert own.effects == (
        Effect("fake", "fprop", pair, Steps()),
        Effect("fake", "dgrad", (("gradient", "FP8E5M2"),), Steps()),
    )
    path.write_text(EXAMPLES["LogTensorStats"])
    (own,) = read(path).sections
    assert [part.steps for part in own.logged] == [
        Steps(10, ((5, 100),)),
        Steps(2, ((0, 20), (80, 100))),
        Steps(1, ((0, math.inf),)),
    ]
    assert Steps(10, ((5, 100),)).hold(100)
    assert not Steps(10, ((5, 100),)).hold(0)


LOG = logged(["max"])["LogTensorStats"]
WRONG = {
    "config": ("text", "a mapping of sections"),
    "no section": ({"a": 1}, "a mapping"),
    "enabled": ({"a": {"layers": {"layer_types": ["all"]}}}, "True or False"),
    "no layers": ({"a": {"enabled": True}}, "a mapping"),
    "layers": (section(logged(["max"]), {"layer_type": ["all"]}), "did you mean layer_types"),
    "pattern": (section(logged(["max"]), {"layer_name_regex_pattern": "("}), "a regular expression"),
    "numbers": (section(logged(["max"]), {"layer_numbers": ["a"]}), "an int"),
    "feature": (section({"LogTensorStat": LOG}), "did you mean LogTensorStats"),
    "option": (section({"LogTensorStats": {**LOG, "frequency": 2}}), "did you mean freq"),
    "stat": (section(logged(["maximum"])), "one of min, max"),
    "recipe": (section(logged(["mxfp9_mse"])), "did you mean"),
    "tensor": (section(logged(["max"], ["activations"])), "activation"),
    "freq": (section(logged(["max"], freq=0)), "an int >= 1"),
    "both": (section({"LogTensorStats": {**LOG, "tensors_struct": []}}), "tensors or tensors_struct"),
    "list": (section(logged(["max"], start_end_list=[3])), "pairs of steps"),
    "gemm": (section({"DisableFP8GEMM": {"gemms": ["forward"]}}), "fprop"),
    "format": (section({"FakeQuant": {"gemms": ["fprop"], "tensors": ["weight"]}}), "FP8E4M3"),
    "result": (section({"FakeQuant": {"gemms": ["fprop"], "tensors": ["output"]}}), "activation"),
    "dump": (section({"DumpTensors": {"tensors": ["weight"]}}), "high_precision_tensor or"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused(name, tmp_path):
    config, wanted = WRONG[name]
    if name == "config":
        path = tmp_path / "config.yaml"
        path.write_text(config)
        config = path
    with pytest.raises(ArgumentError, match=wanted):
        read(config)


def test_files():
    with pytest.raises(FileNotFoundError):
        read("nowhere.yaml")
    assert read(None).sections == read({}).sections == ()
    with pytest.raises(ArgumentError, match="a module"), fk.inspect(3, None):
        pass
