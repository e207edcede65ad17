"""Every example runs, on the CPU and on a GPU, and says what its docstring promises."""

from __future__ import annotations

import ast
import re
import runpy
import sys

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import collectives, lab
from fp8kit.backends.cuda.compile import compile_cubin
from fp8kit.lab.checks import Report
from fp8kit.raw_kernels import manifest
from tests.support.examples import EXAMPLES, HALF_STEP, numbers

LINES = 120
FLAX = "install it, in a checkout of fp8kit, with: pip install '.[flax]'"  # flax brings optax


def test_examples_are_numbered_documented_and_short():
    assert [int(path.name[:2]) for path in EXAMPLES] == list(range(1, len(EXAMPLES) + 1))
    for path in EXAMPLES:
        text = ast.get_docstring(ast.parse(path.read_text()))
        assert "Shows:" in text
        assert "Needs:" in text
        assert path.read_text().count("\n") <= LINES, path.name


@pytest.mark.parametrize(
    ("stem", "words", "said"),
    [
        ("train_gpt", ["many"], "argument steps: many is not a positive number"),
        ("train_gpt", ["1", "2"], "unrecognized arguments: 2"),
        ("kernel_lab", ["0"], "argument steps: 0 is not a positive number"),
    ],
)
def test_bad_arguments_are_one_line(stem, words, said, monkeypatch, capsys):
    (path,) = (path for path in EXAMPLES if path.stem[3:] == stem)
    monkeypatch.setattr(sys, "argv", [str(path), *words])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(path), run_name="__main__")
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"{path.name}: error: {said}; {path.name} --help says more\n"


@pytest.mark.parametrize(
    ("number", "absent", "cure"),
    [
        (17, "transformers", "install it with: pip install transformers"),
        *((number, "optax", FLAX) for number in (18, 19, 26, 28)),
        (21, "flax", FLAX),
    ],
)
def test_a_package_that_is_missing_is_one_line(number, absent, cure, monkeypatch):
    path = EXAMPLES[number - 1]
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(path), run_name="__main__")
    assert stopped.value.code == f"{path.name} needs {absent}, not installed here; {cure}"


def test_quantize(printed):
    rows = dict(re.findall(r"^(\w+) +error .* outliers ([\d.]+)$", printed("quantize"), re.MULTILINE))
    assert float(rows["tensor"]) > 0.9  # one scale loses what is beside the outliers
    assert float(rows["row"]) < HALF_STEP
    assert float(rows["mx_1x32"]) < HALF_STEP


def test_formats(printed):
    text = printed("formats")
    rows = re.findall(r"^(E\dM\d) .* epsilon ([\d.]+), error ([\d.]+)$", text, re.MULTILINE)
    assert len(rows) == 6
    for name, epsilon, error in rows:
        assert 2.0 ** -int(name[3]) == float(epsilon)
        assert float(error) < float(epsilon) / 2
    assert numbers(r"nearest: mean ([\d.]+)", text) == [1.0]
    means = numbers(r"stochastic, .* mean ([\d.]+)", text)
    # five standard deviations of the mean of 128 x 128 draws; four digits were printed
    fraction = 0.03 / 0.125
    deviation = 0.125 * np.sqrt(fraction * (1 - fraction)) / 128
    assert np.abs(np.array(means) - 1.03).max() < 5 * deviation + 5e-5
    assert "the same bits" in text


def test_zero_copy(printed):
    text = printed("zero_copy")
    assert "False" not in text
    assert text.count("True") >= 5
    assert "fp8kit reads 5.0" in text
    assert "crosses as torch.float8_e4m3fn" in text


def test_fp8_gemm(printed):
    errors = numbers(r"relative error ([\d.]+)", printed("fp8_gemm"))
    assert len(errors) == 3
    assert max(errors) < HALF_STEP


def test_linear_autograd(printed):
    errors = numbers(r"relative error ([\d.]+)", printed("linear_autograd"))
    assert max(errors[1:3]) < HALF_STEP
    assert errors[3] < 2 * HALF_STEP  # E5M2's step is twice E4M3's


def test_recipes(printed):
    text = printed("recipes")
    for name, factor, beside in (("delayed", 2, 1.0), ("current", 2, 1.0), ("block", 1, 0.0)):
        ((y, dx, dw),) = re.findall(rf"{name} +step 1: y ([\d.]+), dx ([\d.]+), dW ([\d.]+)", text)
        assert float(y) < HALF_STEP
        assert max(float(dx), float(dw)) < factor * HALF_STEP
        (lost,) = numbers(rf"{name} +y of the rows beside the outlier: ([\d.]+)", text)
        assert abs(lost - beside) < HALF_STEP


def test_custom_recipe(printed):
    usual, own = (
        [float(scale) for scale in line.rpartition("input ")[2].split(",")]
        for line in printed("custom_recipe").splitlines()
    )
    assert usual[2:] == [2.24] * 4  # 448 / 200, as long as the outlier is in the history
    assert own[3] > own[2]
    assert all(np.frexp(scale)[0] == 0.5 for scale in own)


def test_own_function(printed):
    text = printed("own_function")
    assert "Softplus: the gradient agrees" in text
    assert re.search(r"^Wrong: check_grads: input 0: slope", text, re.MULTILINE)
    means = numbers(r"mean of the outputs ([\d.]+)", text)
    assert means == sorted(means, reverse=True)
    assert means[-1] < means[0] / 2


def test_attention(printed):
    text = printed("attention")
    assert re.findall(r"[#.]{12}", text) == [
        "############",
        ".....#######",
        ".....####...",
        "....###.....",
        "............",
        "#######.....",
    ]
    # values near 1, a few dozen float32 roundings; angles of 111 radians are rounded by 2**-18
    assert max(numbers(r"largest difference ([\d.e-]+)", text)) < 2.0**-14


@pytest.mark.programs
def test_recompute(printed):
    text = printed("recompute")
    kept, less = numbers(r"([\d.]+) MiB", text)
    assert less < kept / 4
    assert "the same bits" in text


def test_check_finite(printed):
    said = dict(re.findall(r"^(\w+(?: \w+)*): +(.*)$", printed("check_finite"), re.MULTILINE))
    assert said["healthy"] == said["repaired"] == "finite"
    assert said["bad input"].startswith("0 (norm_mlp): input x: got 1 NaN")
    assert said["bad gradient"].startswith("2 (linear): gradient of output y: got 0 NaN and 1 Inf")
    assert said["bad weight"].startswith("1 (norm_mlp): weight 1.fc2_weight")
    assert said["scales after the bad steps"] == "as before"


def test_loss_scaling(printed):
    text = printed("loss_scaling")
    assert "without scaling: largest gradient 0\n" in text
    factors, seen, moved = (
        numbers(pattern, text)
        for pattern in (r"2\^(\d+)", r"\d, largest gradient ([\d.e+inf]+)", r"by ([\d.e+-]+)")
    )
    assert factors == [44, 36, 36, 37, 37, 38]  # down by 2**8 after an overflow, doubled after two good steps
    assert seen[0] == np.inf
    assert max(seen[1:]) <= fk.float16.max
    assert moved[0] == 0
    assert min(moved[1:]) > 0


def test_resume(printed):
    text = printed("resume")
    assert "bytes, all the same after the stop\n" in text
    assert len(re.findall(r"^one of the arrays: (?:model|optimizer|random)/", text, re.MULTILINE)) == 4


@pytest.mark.programs
@pytest.mark.timeout(200)
def test_kernel_lab(printed, tmp_path, monkeypatch):
    text = printed("kernel_lab", "8", str(tmp_path))
    assert f"drawn in {tmp_path}/difference.png" in text
    assert (tmp_path / "difference.png").read_bytes()[:4] == b"\x89PNG"
    nearest, stochastic = numbers(r"mean ([\d.]+);", text)
    assert nearest == 1.0
    # five standard deviations of the mean of 256 x 256 roundings to 1 or 1.125, each used in 256 products;
    # bfloat16's rounding on a GPU
    fraction = 0.03 / 0.125
    assert abs(stochastic - 1.03) < 5 * 0.125 * np.sqrt(fraction * (1 - fraction)) / 256 + 2.0**-8
    assert "quantize_transpose: of 96 cases 0 have other codes" in text
    assert (
        numbers(r"override\.quantize_transpose: of 96 cases (\d+) have other codes than nearest", text)[0] > 0
    )
    assert "WRONG" not in text
    assert len(numbers(r"us, ([\d.]+) GB/s", text)) == 2
    calls = numbers(r"(\d+) calls of mine", text)
    assert calls[0] == 0
    assert calls[1] > 8 * 2 * 8  # steps, microbatches, casts
    (difference,) = numbers(r"largest difference ([\d.]+)", text)
    assert 0 < difference < 0.1
    monkeypatch.setattr(lab, "measure", lambda *given: "")
    broken = Report("quantize_transpose", "mine", fk.Device("cpu"), 60, [("case", "amax: got 1")])
    monkeypatch.setattr(lab, "check", lambda *given: broken)
    with pytest.raises(
        SystemExit, match=r"^wrong: \[\('case', 'amax: got 1'\), \('case', 'amax: got 1'\)\]$"
    ):
        printed("kernel_lab", "1", str(tmp_path))


@pytest.mark.programs
@pytest.mark.timeout(200)
def test_own_product(printed):
    text = printed("own_product", "4")
    engine, mine = numbers(r"(\d+)% of bits", text)
    assert engine < 100  # sums promoted elsewhere, and no limit
    assert mine == 100
    assert numbers(r"largest ([\d.]+)", text)[1] == 24.0
    calls = numbers(r"(\d+) calls of mine", text)
    assert calls[0] == 0
    assert calls[1] > 4 * 12  # steps, products of two layers
    losses = numbers(r"-> ([\d.]+) nats", text)
    assert abs(losses[0] - losses[1]) < 0.02


@pytest.mark.programs
def test_what_own_product_changes_is_there_and_compiles(monkeypatch):
    """For Hopper, where no GPU runs it here."""
    found = runpy.run_path(str(EXAMPLES[24]))
    entry, unit = manifest.source("hopper_gemm.cu"), manifest.foreign(found["source"]())
    assert "fminf(fmaxf(value, -24.0f), 24.0f)" in unit.content
    variants = manifest.asked(f"{found['OTHER']},EPILOGUE=bare,GROUPS=none", entry, unit).all_of(
        entry.variants
    )
    assert all(dict(variant)["PROMOTE"] == "64" for variant in variants)
    largest = next(v for v in variants if ("BM", "256") in v and ("T", "f32") in v)
    assert compile_cubin("hopper_gemm.cu", largest, "sm_90a", unit).resources["hopper_gemm"].spill_stores == 0
    monkeypatch.setattr(manifest, "text", lambda name: "another version")
    with pytest.raises(SystemExit, match=r"has 'values.* 0 times: change this example"):
        found["source"]()


@pytest.mark.programs
@pytest.mark.timeout(200)
def test_train_gpt(printed):
    losses = numbers(r"step \d+: ([\d.]+)", printed("train_gpt", "6"))
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.programs
@pytest.mark.timeout(200)
def test_torch_moe_gpt(printed):
    text = printed("torch_moe_gpt", "16")
    first, last = numbers(r"loss ([\d.]+) to", text), numbers(r"loss [\d.]+ to ([\d.]+)", text)
    assert len(first) == len(last) == 2
    assert max(last) < min(first) - 1  # 5.7 is that of a guess; steps of both trainings take it below 4.5
    assert abs(last[0] - last[1]) < 0.1
    assert len(re.findall("experts take from", text)) == 2
    # experts that are used alike take 0.125, two that take all tokens 0.5; 16 to 40 steps gave 0.17 to 0.29
    assert max(numbers(r"to ([\d.]+) of the tokens", text)) < 0.37


@pytest.mark.programs
def test_flax_moe(printed):
    text = printed("flax_moe", "40")
    first, last = numbers(r"error ([\d.]+) to", text), numbers(r"error [\d.]+ to ([\d.]+)", text)
    assert len(first) == len(last) == 2
    assert max(last) < 0.9  # 1 is that of an answer of zeros
    assert abs(last[0] - last[1]) < 0.05
    assert max(numbers(r"to ([\d.]+) of the tokens", text)) < 0.25  # of experts that are used alike 0.125


def test_several_ranks(printed, monkeypatch):
    """Of one process here; of several: tests/commands/test_launch.py."""
    monkeypatch.setattr(collectives, "EVERYONE", [])
    losses = numbers(r"loss ([\d.]+)", printed("several_ranks"))
    assert len(losses) == 10
    assert losses[-1] < 0.3 * losses[0]
