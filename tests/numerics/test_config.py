"""Configurations: Transformer Engine's own examples, and what is refused."""

from __future__ import annotations

import math

import pytest

import fp8kit as fk
from fp8kit.errors import ArgumentError
from fp8kit.numerics.config import Effect, Steps, read
from tests.support.debug_examples import EXAMPLES
from tests.support.inspected import logged, section


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


def test_one_name_may_stand_for_a_list_of_one():
    feature = {"LogTensorStats": {"enabled": True, "tensors": "weight", "stats": "max"}}
    alone = read(section(feature, {"layer_types": "fc1"}))
    assert alone == read(section(logged(["max"], ["weight"]), {"layer_types": ["fc1"]}))
    gemm = read(section({"DisableFP8GEMM": {"enabled": True, "gemms": "wgrad"}}))
    assert gemm.sections[0].effects == (Effect("high_precision", "wgrad", (), Steps()),)


@pytest.mark.parametrize(
    ("layer", "chosen"),
    [
        ("blocks.3.mlp.fc1", True),
        ("gpt2.blocks.3.experts.gemm_0", True),  # the number between dots counts first
        ("Layer_3", True),
        ("Layer_3.mlp.fc2", True),
        ("Layer_30", False),
        ("mlp.fc3", False),
        ("head", False),
    ],
)
def test_numbers_of_layers(layer, chosen):
    config = read(section(logged(["max"]), {"layer_numbers": [3]}))
    assert (config.section(layer) is not None) == chosen


def test_a_name_with_two_numbers():
    config = read(section(logged(["max"]), {"layer_numbers": [3]}))
    for name in ("blocks.3.experts.1", "Layer_3_1"):
        with pytest.raises(ArgumentError, match="a name with one number"):
            config.section(name)


LOG = logged(["max"])["LogTensorStats"]
WRONG = {
    "config": ("text", "a mapping of sections"),
    "no section": (
        {"a": 1},
        "a: got 1, expected a section: a mapping with enabled, layers and transformer_e",
    ),
    "no name": (section(logged(["max"]))["section"], "enabled: got True, expected a section"),
    "a feature alone": (logged(["max"]), "got 'LogTensorStats' as the name of a section, expected a name of"),
    "no namespace": (
        {"a": {"enabled": True, "layers": {"layer_types": ["all"]}, "transformer_engin": {}}},
        "did you mean transformer_engine",
    ),
    "enabled": ({"a": {"layers": {"layer_types": ["all"]}}}, "True or False"),
    "no layers": ({"a": {"enabled": True}}, "a mapping"),
    "layers": (section(logged(["max"]), {"layer_type": ["all"]}), "did you mean layer_types"),
    "pattern": (section(logged(["max"]), {"layer_name_regex_pattern": "("}), "a regular expression"),
    "no pattern": (section(logged(["max"]), {"layer_name_regex_pattern": ["a"]}), "it is no text"),
    "numbers": (
        section(logged(["max"]), {"layer_numbers": ["a"]}),
        r"'a', expected numbers .* '4-7', or 'all'",
    ),
    "no numbers": (section(logged(["max"]), {"layer_numbers": []}), r"got \[\], expected numbers of layers"),
    "backwards": (
        section(logged(["max"]), {"layer_numbers": "7-4"}),
        "got '7-4', expected numbers of layers",
    ),
    "step": (section(logged(["max"], start_step="a")), "start_step: got 'a', expected an int"),
    "no stats": (section({"LogTensorStats": {"tensors": ["weight"]}}), "stats: missing, expected a list"),
    "feature": (section({"LogTensorStat": LOG}), "did you mean LogTensorStats"),
    "option": (section({"LogTensorStats": {**LOG, "frequency": 2}}), "did you mean freq"),
    "stat": (section(logged(["maximum"])), "one of min, max"),
    "recipe": (section(logged(["mxfp9_mse"])), "did you mean"),
    "no twin": (section(logged(["max", "cosine"], ["gradient"])), "'cosine' of gradient.*dgrad, wgrad"),
    "tensor": (section(logged(["max"], ["activations"])), "activation"),
    "freq": (section(logged(["max"], freq=0)), "an int >= 1"),
    "both": (section({"LogTensorStats": {**LOG, "tensors_struct": []}}), "tensors or tensors_struct"),
    "list": (section(logged(["max"], start_end_list=[3])), "pairs of steps"),
    "never": (section(logged(["max"], start_step=4, end_step=2)), "an end_step that is not before it"),
    "gemm": (section({"DisableFP8GEMM": {"gemms": ["forward"]}}), "fprop"),
    "format": (section({"FakeQuant": {"gemms": ["fprop"], "tensors": ["weight"]}}), "FP8E4M3"),
    "result": (section({"PerTensorScaling": {"gemms": ["fprop"], "tensors": ["output"]}}), "activation"),
    "another's result": (
        section({"FakeQuant": {"gemms": ["dgrad"], "tensors": ["output"], "quant_format": "FP8E4M3"}}),
        "got output of dgrad, expected what dgrad reads or makes: gradient, weight, dgrad",
    ),
    "unread": (
        section({"FakeQuant": {"gemms": ["fprop"], "tensors": ["gradient"], "quant_format": "FP8E4M3"}}),
        "tensors: got gradient of fprop, expected what fprop reads or makes: activation, weight, output",
    ),
    "unread of one": (
        section(
            {
                "PerTensorScaling": {
                    "gemms_struct": [
                        {"gemm": "fprop", "tensors": ["weight"]},
                        {"gemm": "dgrad", "tensors": ["activation"]},
                    ]
                }
            }
        ),
        "got activation of dgrad, expected what dgrad reads: gradient, weight",
    ),
    "two changes": (
        section(
            {
                "FakeQuant": {
                    "gemms": ["dgrad"],
                    "tensors": ["weight"],
                    "quant_format": "FP8E4M3",
                    "end_step": 4,
                },
                "DisableFP8Layer": {"start_step": 4},
            }
        ),
        "section: got FakeQuant and DisableFP8Layer of dgrad in the same steps",
    ),
    "dump": (section({"DumpTensors": {"tensors": ["weight"]}}), "high_precision_tensor or"),
}


def test_a_choice_of_layers_that_does_not_count_is_said(caplog):
    layers = {"layer_types": ["fc"], "exact_layer_names": ["fc1"], "layer_name_regex_pattern": "fc2"}
    config = read(section(logged(["max"]), layers))
    assert config.section("fc1")
    assert not config.section("fc2")
    said = "exact_layer_names counts, and not layer_types and layer_name_regex_pattern"
    assert caplog.messages == [f"inspect: section.layers: {said}"]


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused(name, tmp_path):
    config, wanted = WRONG[name]
    if name == "config":
        path = tmp_path / "config.yaml"
        path.write_text(config)
        config = path
        wanted = rf"{path.name}: 'text', expected {wanted}"
    with pytest.raises(ArgumentError, match=wanted):
        read(config)


def test_changes_of_one_gemm_in_different_steps():
    fake = {
        "tensors": ["weight"],
        "quant_format": "FP8E4M3",
        "gemms_struct": [{"gemm": "fprop", "end_step": 3}],
    }
    (own,) = read(section({"FakeQuant": fake, "DisableFP8Layer": {"start_step": 4}})).sections
    assert [(each.kind, each.steps) for each in own.effects if each.gemm == "fprop"] == [
        ("fake", Steps(1, ((0, 3),))),
        ("high_precision", Steps(1, ((4, math.inf),))),
    ]


def test_steps_that_do_not_count_beside_a_list_are_said(caplog):
    (own,) = read(section(logged(["max"], ["weight"], start_end_list=[[0, 1]], start_step=2))).sections
    assert own.logged[0].steps == Steps(1, ((0, 1),))
    assert caplog.messages == ["inspect: section.LogTensorStats: start_end_list counts, and not start_step"]


@pytest.mark.parametrize(
    ("text", "line"), [("a: {b: 1}\na: 2\n", 2), ("a:\n- {c: &d [1], e: *d}\n- b: 1\n  c: 2\n  b: 3\n", 5)]
)
def test_a_key_that_a_file_has_twice_is_refused(text, line, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=rf"config.yaml: '[ab]' again in line {line}, expected"):
        read(path)


def test_a_file_that_names_itself_within_itself_has_an_end(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("&a {enabled: *a}")
    with pytest.raises(ArgumentError, match="enabled: got"):
        read(path)


def test_a_wrong_statistic_is_named_with_its_section():
    with pytest.raises(ArgumentError, match=r"section.LogTensorStats.stats: got 'maxx', .*mean max\?"):
        read(section(logged(["maxx"])))


def test_files_and_empty_configurations(tmp_path, caplog):
    with pytest.raises(ArgumentError, match=r"config: got nowhere\.yaml: No such file"):
        read("nowhere.yaml")
    for path in (tmp_path, tmp_path / "no_text.yaml"):
        (tmp_path / "no_text.yaml").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ArgumentError, match="expected a YAML file"):
            read(path)
    empty = tmp_path / "empty.yaml"
    empty.write_text("")
    assert read(None).sections == read({}).sections == read(empty).sections == ()
    assert [said[:26] for said in caplog.messages] == ["inspect: config: it is emp"] * 3
    read({"a": {"enabled": True, "layers": {"layer_types": ["all"]}}})
    assert "the section a has no feature that is enabled" in caplog.text
    with pytest.raises(ArgumentError, match=r"section\.DisableFP8GEMM\.gemms: got"):
        read(section({"DisableFP8GEMM": {"gemms": ["forward"]}}))
    with pytest.raises(ArgumentError, match="a module"), fk.inspect(3, None):
        pass
