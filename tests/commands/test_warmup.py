"""``fp8kit warmup``: what it compiled, and what it is at."""

from __future__ import annotations

import sys

from fp8kit import cli, recipes
from fp8kit.models.presets import PRESETS


def test_warmup_says_what_it_compiled(monkeypatch, tmp_path, capsys):
    """One small source stands for all of them; the second time it is in the cache."""
    monkeypatch.setenv("FP8KIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(
        sys.modules["fp8kit.warmup"], "variants", lambda *given: [("scales.cu", {"STATES": "8"})]
    )
    for said, more in (
        ("1 variants compiled", "compiled scales.cu STATES=8, "),
        ("0 variants compiled in", "1 variants for sm_90a, "),
    ):
        assert cli.main(["warmup", "--preset", "tiny", "--arch", "sm_90a"]) == 0
        printed = capsys.readouterr()
        assert said in printed.out
        assert f"fp8kit warmup: {more}" in printed.err


def test_warmup_of_no_sizes_is_small_on_a_cpu(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(sys.modules["fp8kit.warmup"], "warmup", lambda **given: asked.append(given))
    assert cli.main(["warmup", "--device", "cpu"]) == 0
    assert cli.main(["warmup", "--arch", "sm_90a"]) == 0
    assert [given.get("hidden") for given in asked] == [PRESETS["demo-cpu"].hidden, None]


def test_warmup_on_a_cpu_says_what_it_is_at(capsys):
    assert cli.main(["warmup", "--preset", "tiny", "--device", "cpu"]) == 0
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert lines[0].startswith(
        "fp8kit warmup: on the CPU: nothing is compiled for a GPU; the first step compiles the reference "
        "engine's"
    )
    assert lines[1] == (
        "fp8kit warmup: two steps on cpu: a layer of 32/128/2, bfloat16, delayed(HYBRID, h1024, max), "
        "32 x 4 tokens"
    )
    assert [line.partition(", ")[0] for line in lines[2:]] == [
        f"fp8kit warmup: step {n}: forward done" for n in (1, 2)
    ]
    assert said.out.startswith("two steps of the layer: ")


def test_warmup_takes_every_published_recipe_by_its_name(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(sys.modules["fp8kit.warmup"], "warmup", lambda **given: asked.append(given["recipe"]))
    for name in recipes.NAMED:
        assert cli.main(["warmup", "--recipe", name, "--device", "cpu"]) == 0
    assert asked == [recipes.named(name) for name in recipes.NAMED]
    capsys.readouterr()
    assert cli.main(["warmup", "--recipe", "mxfp9", "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert "'mxfp9', expected a name that `fp8kit recipes list` prints; did you mean" in said
