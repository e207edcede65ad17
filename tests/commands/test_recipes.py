"""``fp8kit recipes``: what is listed and shown is what the recipes say; what is checked is what was cast."""

from __future__ import annotations

import json
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from fp8kit import cli, recipe_check, recipe_info, scaled_products
from fp8kit.arrays import CPU, Device
from fp8kit.backends.cuda.compile import arch_of
from fp8kit.blocks import hadamard
from fp8kit.commands import table
from fp8kit.errors import ArgumentError, BackendError, ShapeError
from fp8kit.formats import E4M3
from fp8kit.layer_recipes import DataRecipe
from fp8kit.ops.products import product_class
from fp8kit.quantization import Gemm, Quantization, Quantizer
from fp8kit.recipe import DelayedScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling
from fp8kit.recipes import NAMED
from fp8kit.testing import assert_close, sum_slack
from tests.support.named import VARIANTS

M, K, N = 40, 96, 72
GEMMS = {"y": "fprop", "dx": "dgrad", "dw": "wgrad"}


def draw(seed, shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def ran(capsys, *words):
    assert cli.main(["recipes", *words]) == 0
    said = capsys.readouterr()
    assert not said.err
    return json.loads(said.out) if "--json" in words else said.out


def test_list_has_every_recipe(capsys):
    lines = ran(capsys, "list").splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(NAMED)
    found = {each["name"]: each for each in ran(capsys, "list", "--json")}
    for name, (recipe, source) in NAMED.items():
        each = found[name]
        assert (each["short_name"], each["source"]) == (recipe.short_name(), source)
        assert each["devices"]["cpu"]["status"] in ("native", "emulated")
        assert each["random"] is recipe.quantization.needs_rng
    assert found["current"]["devices"]["cpu"]["status"] == "native"
    assert found["mxfp8"]["devices"]["cpu"]["status"] == "emulated"


def test_support_follows_from_the_capability():
    block, mx = Float8BlockScaling(), MXFP8BlockScaling()
    assert [recipe_info.support_of(DelayedScaling(), c).status for c in (None, (8, 0), (8, 9), (10, 0))] == [
        "native",
        "emulated",
        "native",
        "native",
    ]
    assert [recipe_info.support_of(block, c).status for c in (None, (8, 0), (8, 9), (10, 0))] == [
        "native",
        "emulated",
        "native",
        "native",
    ]
    why = recipe_info.support_of(block, (7, 5)).why
    assert why == "FP8 with scales of blocks needs compute capability 8.0, not 7.5"
    assert {recipe_info.support_of(mx, c).status for c in (None, (8, 9), (9, 0))} == {"emulated"}
    untried = ("native", "simulated, not run on such a chip")
    assert recipe_info.support_of(mx, (10, 0)) == recipe_info.support_of(mx, (12, 0)) == untried
    for name in ("mxfp6_e2m3", "mxfp4", "mxfp8_blackwell", "moss"):
        assert recipe_info.support_of(NAMED[name].recipe, (10, 0)) == ("emulated", "")
    backward = MXFP8BlockScaling(backward_override="dequantized")
    assert recipe_info.support_of(backward, (10, 0)) == untried
    forward = DataRecipe(replace(mx.quantization, wgrad=replace(mx.quantization.wgrad, emulated=True)), "own")
    said = "fprop and dgrad native (simulated, not run on such a chip)"
    assert recipe_info.support_of(forward, (10, 0)) == ("emulated", said)
    # emulated products need no FP8 tensor cores, but the engine needs bfloat16
    refused = recipe_info.support_of(mx, (7, 5))
    assert refused == ("refused", "the CUDA engine needs compute capability 8.0, not 7.5")
    with pytest.raises(BackendError, match=r"at least 8\.0"):
        arch_of((7, 5))
    hopper = NAMED["current_hopper"].recipe
    assert recipe_info.support_of(hopper, (9, 0)) == ("native", "its sums are emulated")
    taken = "attention too where cuDNN's FP8 kernels take it"
    for name, on_hopper in (("current_dpa", taken), ("flash_attention_3", "attention is emulated")):
        found = {c: recipe_info.support_of(NAMED[name].recipe, c) for c in (None, (9, 0), (10, 0))}
        assert {support.status for support in found.values()} == {"native"}
        assert [support.why for support in found.values()] == [
            "attention is emulated",
            on_hopper,
            "attention is emulated",
        ]


def test_what_no_engine_has_is_refused(monkeypatch):
    """On a device where nothing implements one of the product's kernels."""
    recipe = MXFP8BlockScaling()
    missing = product_class(recipe.quantization).kernels[0]
    monkeypatch.setattr(
        recipe_info.dispatch, "candidates", lambda kernel, device: ([] if kernel == missing else [1], [])
    )
    assert recipe_info.support_on(recipe, CPU) == ("refused", f"{missing}: nothing implements it")


@pytest.mark.parametrize("name", NAMED)
def test_show_says_what_the_recipe_says(name, capsys):
    recipe = NAMED[name].recipe
    found = ran(capsys, "show", name, "--json")
    for gemm, own in recipe.quantization.gemms.items():
        shown = found["gemms"][gemm]
        assert (shown["compute"], shown["accumulation"]) == (own.compute, own.accumulation)
        for quantizer, cast in zip((own.a, own.b), shown["operands"].values(), strict=True):
            if own.compute == "quantized":
                assert (cast["format"], cast["granularity"]) == (str(quantizer.format), quantizer.granularity)
                assert cast["rounding_bits"] == quantizer.stochastic_bits
                assert (cast["rotation"] is None) == (not quantizer.hadamard)
    given = [each.name for each in recipe.__dataclass_fields__.values() if each.init]
    assert list(found["fields"]) == given
    said = ran(capsys, "show", name)
    native = scaled_products.scaled(recipe.quantization) is not recipe.quantization
    assert (
        "\nfrom compute capability 10.0 on: native: simulated, not run on such a chip\n" in said
    ) == native
    assert said.startswith(f"{name}: {type(recipe).__name__}, {recipe.short_name()}\nsource: ")
    assert all(field in said for field in found["fields"])


def test_operands_that_are_cast_from_fprops_codes_are_named(capsys):
    """Else nobody could tell why the errors of dx exceed those of its operands."""
    said = "cast anew, from the values of fprop's codes: w of dgrad, x of wgrad"
    assert f"\n{said}\n" in ran(capsys, "show", "quartet_2")
    small = ("--shape", "16", "32", "32", "--device", "cpu")
    assert f"\n{said}; their errors are against these values\n" in ran(capsys, "check", "quartet_2", *small)
    assert "cast anew" not in ran(capsys, "show", "nvfp4")


def test_show_says_where_attentions_products_run(capsys):
    """One scale a tensor is what cuDNN's kernels know; blocks of rows and rotations they do not."""
    taken = "products: emulated, but where cuDNN's FP8 kernels take them;"
    assert [taken in ran(capsys, "show", name) for name in ("current_dpa", "flash_attention_3")] == [
        True,
        False,
    ]


def test_show_of_gemms_in_high_precision():
    """What ``backward_override`` does to the operands."""
    high = recipe_info.gemm_facts(MXFP8BlockScaling(backward_override="high_precision"))
    assert all(not cast for gemm in ("dgrad", "wgrad") for cast in high[gemm]["operands"].values())
    values = recipe_info.gemm_facts(MXFP8BlockScaling(backward_override="dequantized"))
    assert values["dgrad"]["operands"] == {"g": {}, "w": values["fprop"]["operands"]["w"]}
    assert values["wgrad"]["operands"] == {"g": {}, "x": values["fprop"]["operands"]["x"]}


ONE = Quantizer(E4M3, "mx_1x32", scale_rule="te")
AS_IT_IS = DataRecipe(  # x in fprop, w in dgrad
    Quantization(Gemm(ONE, ONE, plain="a"), Gemm(ONE, ONE, plain="b"), Gemm(ONE, ONE)), "as it is"
)

RECIPES = (
    {name: each.recipe for name, each in NAMED.items()}
    | VARIANTS
    | {
        f"{kind.__name__} {how}": kind(backward_override=how)
        for kind in (MXFP8BlockScaling, NVFP4BlockScaling)
        for how in ("dequantized", "high_precision")
    }
    | {"an operand as it is": AS_IT_IS}
)


@pytest.mark.parametrize("name", RECIPES)
def test_the_operands_that_are_checked_are_those_that_are_multiplied(name):
    """y, dx and dw are the exact products of the operands, but for the sums: in float32, on the CPU. The
    values of scales that are no powers of two are rounded to float32, two operands and NVFP4's scales of
    tensors: at most 6 roundings."""
    x, w, g = draw(0, (M, K)), draw(1, (N, K)) / 8, draw(2, (M, N)) * 3
    found = recipe_check.check(RECIPES[name], x, w, g, device=CPU, seed=5)
    own = {"x": x, "w": w, "g": g}

    def value(gemm, matrix):
        cast = found.casts[gemm, matrix]
        return own[matrix].astype(np.float64) if cast is None else cast.values

    operands = {
        "y": (value("fprop", "x"), value("fprop", "w").T, K),
        "dx": (value("dgrad", "g"), value("dgrad", "w"), N),
        "dw": (value("wgrad", "g").T, value("wgrad", "x"), M),
    }
    for result, (a, b, terms) in operands.items():
        size = np.abs(a) @ np.abs(b)
        # sums as Hopper's tensor cores have them, where a recipe asks for these (docs/numerics.md)
        gemm = RECIPES[name].quantization.gemms[GEMMS[result]]
        narrow = -(-terms // 32) * 2 * 2.0**-13 if gemm.accumulation.startswith("hopper") else 0
        slack = sum_slack(size, terms + 6) + narrow * size
        exact = a @ b
        fprop = RECIPES[name].quantization.fprop.a
        if result != "y" and fprop.clip_gradient:  # Quartet: masked, and rotated back along K
            cast = found.casts["fprop", "x" if result == "dx" else "w"]
            assert (fprop.hadamard, fprop.signs, K % fprop.hadamard) == (32, "plus", 0)
            exact = exact * (np.abs(cast.source) <= cast.most * (1 + 1e-7))
            turn = np.kron(np.eye(K // 32), hadamard(np.eye(32), 32).astype(np.float64))
            exact, size = exact @ turn, size @ np.abs(turn)
            slack = sum_slack(size, terms + 16)
        assert_close(result, found.found[result], exact, "float32", slack)


def test_errors_by_hand():
    """E4M3, one scale a tensor, from numbers that can be followed: 448 is the amax, so the scale is 1."""
    x = np.zeros((2, 16), np.float32)
    x[0, :4] = [448, 17, 2.0**-11, -3]  # 17 is rounded to 16, 2^-11 to 0, 448 and -3 are exact
    one = np.eye(16, dtype=np.float32) * 448
    found = recipe_check.check(NAMED["current"].recipe, x, one, np.ones((2, 16)), device=CPU)
    errors = found.operands["fprop", "x"]
    signal, noise = 448**2 + 17**2 + 2.0**-22 + 9, 1 + 2.0**-22
    assert errors.relative_error == pytest.approx((noise / signal) ** 0.5, rel=1e-12)
    assert errors.sqnr_db == pytest.approx(10 * np.log10(signal / noise), rel=1e-12)
    assert (errors.clipped, errors.flushed) == (0, 1 / 32)
    assert found.operands["fprop", "w"] == (0, None, 0, 0)
    assert found.plain["y"] == (0, None, None, None)
    assert found.results["y"].relative_error == pytest.approx(errors.relative_error, rel=1e-6)


def test_an_error_of_a_product_whose_terms_cancel():
    """By E2M1 5 becomes 4, so that 5 + 1 - 6 is -1."""
    one = np.ones((1, 1), np.float32)
    x, w = np.float32([[5, 1, 6]]), np.float32([[1, 1, -1]])
    found = recipe_check.check(NAMED["mxfp4"].recipe, x, w, one, device=CPU)
    assert found.found["y"] == -1
    assert found.results["y"][:2] == (np.inf, -np.inf)
    assert found.plain["y"][:2] == (0, None)


def test_an_operand_that_a_gemm_multiplies_as_it_is():
    """It is no cast, whatever the quantizer beside it says."""
    cast = {
        (gemm, matrix)
        for gemm, own in recipe_info.gemm_facts(AS_IT_IS).items()
        for matrix, facts in own["operands"].items()
        if facts
    }
    assert cast == {("fprop", "w"), ("dgrad", "g"), ("wgrad", "g"), ("wgrad", "x")}
    found = recipe_check.check(AS_IT_IS, draw(0, (M, K)), draw(1, (N, K)), draw(2, (M, N)), device=CPU)
    assert cast == {place for place, errors in found.operands.items() if errors is not None}


def test_the_median_of_rows_by_hand(capsys):
    """A large exact row hides in the error of the whole what the others lose."""
    exact = np.array([[1e6, 1e6], [1.0, 1.0], [2.0, 0.0], [0.0, 0.0]])
    values = exact + np.array([[0, 0], [0.5, 0.5], [0, 1.0], [3.0, 0]])
    assert recipe_check.row_error(exact, values) == 0.5
    assert recipe_check.row_error(0 * exact, values) == 0
    x = draw(0, (9, 32))
    x[0] *= 2.0**20
    found = recipe_check.check(NAMED["current"].recipe, x, draw(1, (16, 32)), draw(2, (9, 16)), device=CPU)
    assert found.results["y"].relative_error < 0.1 < 0.9 < found.row_errors["y"]
    words = ("check", "delayed", "--shape", "8", "32", "16", "--device", "cpu")
    told = ran(capsys, *words, "--json")
    assert told["step"] == 2
    assert {name for name, each in told["results"].items() if "row_median" in each} == {"y", "dx"}
    said = ran(capsys, *words)
    assert f"{told['results']['y']['row_median']:.4g}" in said
    assert "the second step on the same data" in said
    assert "attention" not in said
    assert "not checked" in ran(capsys, "check", "current_dpa", *words[2:])


def test_what_is_clipped_is_counted():
    """A scale of the step before that is too large: delayed scaling, whose margin frees no bit, after data of
    another size. Here by the cast alone, with the scale that such a step leaves."""
    x = np.full((4, 16), 2.0, np.float32)
    x[1, :3] = [449, -1000, 448]
    cast = recipe_check._cast(
        recipe_check.arrays.as_view(x),
        DelayedScaling().quantization.x,
        1,
        0,
        np.zeros(2, np.int64),
        np.ones(1, np.float32),
    )
    errors = recipe_check.errors(cast.source, cast.values, cast.most)
    assert errors.clipped == 2 / 64
    assert set(np.abs(cast.values[1, :3])) == {E4M3.max}


def test_seed_and_dtype_change_what_they_say(capsys):
    words = ("check", "nvfp4", "--shape", "16", "32", "48", "--json", "--device", "cpu")
    first = ran(capsys, *words)
    assert first == ran(capsys, *words)
    assert first["data"] == "x normal, w normal, g normal; 16 x 32 to 48"
    other = ran(capsys, *words, "--seed", "1")
    assert first["operands"] != other["operands"]
    half = ran(capsys, *words, "--dtype", "bfloat16")
    assert half["results"]["y"]["relative_error_without"] > 1e-4
    assert first["results"]["y"]["relative_error_without"] < 1e-6
    assert [(each["gemm"], each["operand"]) for each in first["operands"]] == [
        ("fprop", "x"),
        ("fprop", "w"),
        ("dgrad", "g"),
        ("dgrad", "w"),
        ("wgrad", "g"),
        ("wgrad", "x"),
    ]


@pytest.mark.parametrize("kind", recipe_check.DISTRIBUTIONS)
def test_distributions_are_what_they_say(kind):
    found = recipe_check.drawn(kind, (400, 500), 3, 0).astype(np.float64)
    assert found.dtype == np.float64
    share = np.mean(np.abs(found) > 6)  # of a standard normal 2e-9, of t_3 0.93 %, of exp(normal) 3.66 %
    wanted = {"normal": 2e-9, "student_t": 9.27e-3, "lognormal": 3.66e-2, "outliers": 1e-3 * 0.549}[kind]
    assert abs(share - wanted) <= 6 * (wanted / found.size) ** 0.5 + 1e-7
    assert abs(np.mean(found > 0) - 0.5) <= 6 * 0.5 / found.size**0.5


def test_outliers_cost_a_scale_of_the_tensor_more_than_scales_of_blocks(capsys):
    words = ("--data", "lognormal", "--shape", "64", "256", "64", "--json", "--device", "cpu")
    errors = {
        name: ran(capsys, "check", name, *words)["operands"][0]["flushed"] for name in ("current", "mxfp8")
    }
    assert errors["mxfp8"] <= errors["current"]


def test_a_file_of_the_users_own(tmp_path, capsys):
    x = draw(9, (2, 3, 32)).astype(np.float64)
    np.save(tmp_path / "x.npy", x)
    words = ("check", "mxfp8", "--data", str(tmp_path / "x.npy"), "--json", "--device", "cpu")
    found = ran(capsys, *words, "--shape", "6", "32", "16")
    w = recipe_check.drawn("normal", (16, 32), 0, 1) / np.float32(32**0.5)
    g = recipe_check.drawn("normal", (6, 16), 0, 2)
    want = recipe_check.check(NAMED["mxfp8"].recipe, x.reshape(6, 32), w, g, device=CPU)
    assert found["results"]["dw"]["relative_error"] == want.results["dw"].relative_error
    assert found["data"].endswith("; 6 x 32 to 16")
    assert ran(capsys, *words)["data"].endswith("; 6 x 32 to 512")
    np.save(tmp_path / "w.npy", draw(1, (24, 32)))
    more = ran(capsys, *words, "--weight", str(tmp_path / "w.npy"), "--gradient", "student_t")
    assert more["data"].endswith("g student_t; 6 x 32 to 24")


def test_a_file_of_bfloat16(tmp_path, capsys):
    """NumPy saves it as two bytes without a meaning."""
    x = draw(9, (6, 32)).astype(ml_dtypes.bfloat16)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "wide.npy", x.astype(np.float32))
    words = ("check", "mxfp8", "--json", "--device", "cpu", "--data")
    found, wide = (ran(capsys, *words, str(tmp_path / name)) for name in ("x.npy", "wide.npy"))
    assert (found["operands"], found["results"]) == (wide["operands"], wide["results"])


def test_text_has_every_operand(capsys):
    said = ran(capsys, "check", "mxfp8", "--shape", "8", "32", "16", "--device", "cpu")
    lines = said.splitlines()
    assert lines[0] == "mxfp8, mxfp8(E4M3), emulated on cpu"
    assert lines[1] == "x normal, w normal, g normal; 8 x 32 to 16; float32, seed 0"
    assert sum("E4M3 by mx_1x32" in line for line in lines) == 6
    assert [line.split()[0] for line in lines[-3:]] == ["y", "dx", "dw"]
    said = ran(capsys, "check", "nvfp4", "--shape", "16", "32", "16", "--device", "cpu")
    cast = "E2M1 by nvfp4_1x16, "  # of g twice, and of x as wgrad reads it
    words = "8 random bits", "8 random bits, hadamard 16, signs te ", "hadamard 16, signs te "
    assert [said.count(cast + more) for more in words] == [2, 1, 1]


def test_arrays_that_do_not_fit_are_refused():
    recipe, x = MXFP8BlockScaling(), draw(0, (4, 32))
    with pytest.raises(ShapeError, match=r"expected x \(M, K\), w \(N, K\), g \(M, N\)"):
        recipe_check.check(recipe, x, draw(1, (8, 16)), draw(2, (4, 8)))
    with pytest.raises(ShapeError, match="a matrix, not empty"):
        recipe_check.check(recipe, x[0], x, x)
    with pytest.raises(ArgumentError, match="finite in float16"):
        recipe_check.check(recipe, x * 1e5, x, x, "float16")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show", "mxfp"], "fp8kit recipes: name: got 'mxfp', expected a name that"),
        (["show", "mxfp"], "`fp8kit recipes list` prints; did you mean mxfp8 or"),
        (["check", "tea"], "fp8kit recipes: name: got 'tea'"),
        (["show"], "required: NAME"),
        ([], "required: action, one of list, show, "),
        (["lst"], "; did you mean list; "),
        (
            ["check", "mxfp8", "--data", "norml"],
            "--data: got 'norml', expected a .npy file, or one of normal,",
        ),
        (["check", "mxfp8", "--data", "norml"], "; did you mean normal?"),
        (["check", "mxfp8", "--data", "no.npy"], "expected a .npy file that can be read (No such file"),
        (["check", "mxfp8", "--weight", "text.npy"], "--weight: got 'text.npy', expected a .npy file that"),
        (["check", "mxfp8", "--data", "text.npy"], "that can be read (it is no array that np.save wrote)"),
        (["show", "mine"], "prints, or that fp8kit.recipes.add has added (--from FILE.py)"),
        (["list", "--from", "no.py"], "--from: got 'no.py', expected a Python file: no such file"),
        (
            ["list", "--from", "bad.py"],
            "a Python file that runs (ZeroDivisionError: division by zero, line 2)",
        ),
        (
            ["check", "mxfp8", "--data", "flat.npy"],
            "'flat.npy' of shape (4,), expected an array of at least 2",
        ),
        (["check", "mxfp8", "--data", "nan.npy"], "'nan.npy' of float64, with NaN, expected finite numbers"),
        (["check", "mxfp8", "--data", "words.npy"], "'words.npy' of <U3, expected finite numbers"),
        (
            ["check", "mxfp8", "--data", "good.npy", "--shape", "3", "9", "8"],
            "--data: got shape (3, 8), expected in = 9, as --shape has it",
        ),
        (
            ["check", "mxfp8", "--data", "good.npy", "--weight", "wide.npy"],
            "--weight: got shape (3, 7), expected in = 8, as --data has it",
        ),
        (["check", "mxfp8", "--shape", "3", "4"], "argument --shape: expected 3 arguments"),
        (["check", "mxfp8", "--shape", "3", "4", "0"], "argument --shape: 0 is not a positive number"),
        (["check", "mxfp8", "--dtype", "float64"], "argument --dtype: invalid choice: 'float64'"),
        (["check", "mxfp8", "--seed", "-1"], "argument --seed: got -1, expected an int in"),
        (["check", "mxfp8", "--device", "gpu"], "fp8kit recipes: --device: got 'gpu', expected a name like"),
        (
            ["check", "mxfp8", "--data", "huge.npy", "--dtype", "float16", "--device", "cpu"],
            "finite in float16",
        ),
    ],
)
def test_bad_arguments_are_one_line_each(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.npy").write_text("no array")
    (tmp_path / "bad.py").write_text("x = 0\n1 / x\n")
    arrays = {"flat": np.zeros(4), "nan": np.full((2, 2), np.nan), "words": np.full((2, 2), "tea")}
    arrays |= {"good": np.ones((3, 8)), "wide": np.ones((3, 7)), "huge": np.full((2, 4), 1e6)}
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    before = sorted(tmp_path.iterdir())
    try:
        status = cli.main(["recipes", *arguments])
    except SystemExit as stopped:
        status = stopped.code
    printed = capsys.readouterr()
    assert status == 2
    assert said in printed.err
    assert printed.err.count("\n") == 1
    assert not printed.out
    assert sorted(tmp_path.iterdir()) == before


def test_a_recipe_of_a_file(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(
        "import fp8kit as fk\n"
        "recipe = fk.recipe.DataRecipe(fk.recipes.named('nvfp4').quantization, 'mine')\n"
        "fk.recipes.add('mine', recipe)\n"
    )
    try:
        assert cli.main(["recipes", "show", "mine", "--from", str(file)]) == 0
        assert "; x of wgrad: E2M1 by nvfp4_1x16, current, hadamard 16" in capsys.readouterr().out
    finally:
        NAMED.pop("mine", None)


def test_a_terminal_cuts_wide_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    table(("name", "words"), [("short", "w" * 100), ("s", "v")], fit=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == f"short  {'w' * 50}..."
    assert len(lines[1]) == 60
    table(("name", "words"), [("short", "w" * 100)])
    assert f"short  {'w' * 100}" in capsys.readouterr().out


def test_a_recipe_that_does_not_run_here_says_why(monkeypatch, capsys):
    monkeypatch.setattr(
        recipe_info, "support_on", lambda recipe, device: recipe_info.Support("refused", "no tensor cores")
    )
    assert cli.main(["recipes", "check", "block", "--device", "cpu"]) == 1
    assert capsys.readouterr().err == (
        "fp8kit recipes: NAME: got block on cpu, expected a device where it runs: no tensor cores\n"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["delayed", "current", "rowwise", "block", "mxfp8", "nvfp4", "quartet"])
def test_a_gpu_finds_the_same_errors(name):
    x, w, g = (draw(seed, shape) for seed, shape in enumerate([(M, K), (N, K), (M, N)]))
    cpu, gpu = (
        recipe_check.check(NAMED[name].recipe, x, w, g, device=where) for where in (CPU, Device("cuda", 0))
    )
    for key in ("y", "dx", "dw"):
        # what the order of sums moves, of errors that are 2^-5 and larger
        assert gpu.results[key].relative_error == pytest.approx(cpu.results[key].relative_error, rel=0.01)
