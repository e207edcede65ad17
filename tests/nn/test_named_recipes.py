"""Every published recipe natively: kept weights, recomputation, segments, dtypes."""

from __future__ import annotations

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import formats
from fp8kit.testing import assert_close, assert_same_bits, epsilon, relative_error, sum_slack
from tests.support.combinations import combinations
from tests.support.named import DTYPES, IN, MODULES, RANDOM, RECIPES, ROWS, batch, draw, native, step

PAIR = np.array([3, 5], np.int64)


def same(what, found, want):
    assert found.keys() == want.keys()
    for name, value in want.items():
        assert_same_bits(f"{what}: {name}", found[name], value)


# every second recipe; each one runs in tests/adapters/test_named_recipes.py
SOME = [(name, list(MODULES)[i % 2], DTYPES[i % 3]) for i, name in enumerate(list(RECIPES)[::2])]


@combinations(
    {"name": list(RECIPES), "kind": list(MODULES), "dtype": DTYPES}, usual=["-".join(case) for case in SOME]
)
def test_kept_weights_and_recomputation(name, kind, dtype):
    """Over two microbatches of one step, with one pair of random numbers for all draws: a weight that is cast
    on its own draws one more."""
    recipe = RECIPES[name]
    with fk.deterministic(), fk.draw_from(lambda device: fk.tensor(PAIR, device=device)):
        plain, kept, again = (native(kind, dtype) for _ in range(3))
        for number, first in enumerate((True, False)):
            x, g = batch(kind, number, dtype)
            want = step(plain, recipe, x, g)
            same("checkpoint", step(again, recipe, x, g, lambda v: fk.checkpoint(again, v)), want)
            # after the first microbatch the scales of delayed scaling have moved, and the kept weight has not
            if first or recipe.history is None:
                found = step(kept, recipe, x, g, is_first_microbatch=first)
                same(f"is_first_microbatch={first}", found, want)


@combinations({"name": RANDOM}, usual=RANDOM[::3])
def test_kept_weights_with_random_bits_of_their_own(name):
    """A kept weight was cast by another pair of random numbers than the tensors that it meets: y, dx and dw
    are as near to the exact ones as without, within a quarter of the error."""
    recipe, errors = RECIPES[name], {}
    for how in ("plain", "kept"):
        fk.manual_seed(1)
        module = native("Linear", "float32")
        for first in (True, False):
            x, g = draw(1, (256, IN), "float32"), draw(2, (256, 56), "float32")
            exact = step(native("Linear", "float32"), None, x, g)
            found = step(module, recipe, x, g, **({"is_first_microbatch": first} if how == "kept" else {}))
        errors[how] = {key: relative_error(found[key], exact[key]) for key in ("y", "dx", "weight")}
    for key, error in errors["plain"].items():
        assert 0 < errors["kept"][key] <= 1.25 * error, key


@pytest.mark.parametrize("name", RANDOM)
def test_random_bits_are_drawn_anew_and_by_the_seed(name):
    recipe, module = RECIPES[name], native("Linear", "float32")
    x, g = batch("Linear", 0, "float32")
    found = []
    for seed in (1, 1, 2):
        fk.manual_seed(seed)
        found.append([step(module, recipe, x, g) for _ in range(2)])
    same("same seed", found[0][0], found[1][0])
    same("same seed", found[0][1], found[1][1])
    for a, b in ((found[0][0], found[0][1]), (found[0][0], found[2][0])):
        assert any((a[key] != b[key]).any() for key in ("y", "dx", "weight"))


@combinations({"name": list(RECIPES), "dtype": DTYPES}, usual=[f"{name}-{dtype}" for name, _, dtype in SOME])
def test_segments(name, dtype):
    """``parameters_split``: one weight in parts is that weight; gradients of the parts are its rows, which
    the BLAS may sum in another order. Sizes that no block divides."""
    recipe, sizes = RECIPES[name], {"query": 24, "key": 19, "value": 13}
    whole, split = native("Linear", dtype), native("Linear", dtype, parameters_split=sizes)
    weight, bias = whole.weight.numpy(), whole.bias.numpy()
    ends = np.cumsum(list(sizes.values()))
    starts = dict(zip(sizes, (0, *ends[:-1]), strict=True))
    parts = {part: slice(starts[part], starts[part] + n) for part, n in sizes.items()}
    split.load_state_dict(
        {f"{part}_weight": weight[rows] for part, rows in parts.items()}
        | {f"{part}_bias": bias[rows] for part, rows in parts.items()}
    )
    with fk.deterministic(), fk.draw_from(lambda device: fk.tensor(PAIR, device=device)):
        for number in range(2):
            x, g = batch("Linear", number, dtype)
            want, found = step(whole, recipe, x, g), step(split, recipe, x, g)
            for key in ("y", "dx"):
                assert_same_bits(key, found[key], want[key])
            for part, rows in parts.items():
                assert_same_bits(part, found[f"{part}_bias"], want["bias"][rows])
                size = np.abs(g.astype(np.float64)).T @ np.abs(x.astype(np.float64))
                slack = sum_slack(2 * size[rows], ROWS) + epsilon(dtype) * np.abs(want["weight"][rows])
                exact = want["weight"][rows].astype(np.float64)
                assert_close(part, found[f"{part}_weight"], exact, dtype, slack)


@combinations({"name": list(RECIPES)}, usual=list(RECIPES)[::2])
def test_16_bit_operands_are_those_of_float32(name):
    """A step in bfloat16 and in float16 is that in float32 on the same values, but for the rounding of
    results, and of the values that float32 scales make, in each operand."""
    recipe = RECIPES[name]
    for dtype in DTYPES[1:]:
        x, g = batch("Linear", 0, dtype)
        with fk.draw_from(lambda device: fk.tensor(PAIR, device=device)):
            module = native("Linear", dtype)
            wide = native("Linear", "float32")
            wide.load_state_dict({key: p.numpy().astype(np.float32) for key, p in module.named_parameters()})
            found = step(module, recipe, x, g)
            want = step(wide, recipe, x.astype(np.float32), g.astype(np.float32))
        for key in ("y", "dx", "weight"):
            assert found[key].dtype == formats.dtype(dtype).numpy
            assert relative_error(found[key], want[key]) <= 4 * epsilon(dtype), key


@pytest.mark.parametrize(
    "name", ["mxfp8", "nvfp4", "mxfp4_h32_sr", "rowwise_with_gw_hp", "Float8BlockScaling dequantized"]
)
def test_large_values_of_float16_stay_finite(name):
    """Values that are rounded up beyond float16's largest number: the result is within the operands' error of
    the exact one."""
    recipe, layer = RECIPES[name], fk.nn.Linear(64, 48, bias=False, params_dtype="float16")
    layer.load_state_dict({"weight": np.full((48, 64), 2.0**-8, np.float16)})
    x = fk.tensor(np.full((32, 64), 65504, np.float16), requires_grad=True)
    with fk.autocast(recipe=recipe):
        y = layer(x)
    y.backward(np.full(y.shape, 2.0**-10, np.float16))
    exact = {"y": 65504 / 4, "dx": 48 * 2.0**-18, "dw": 32 * 65504 * 2.0**-10}
    for key, got in (("y", y.numpy()), ("dx", x.grad.numpy()), ("dw", layer.weight.grad.numpy())):
        # E2M1's largest rounding error is a quarter of a value, and stochastic roundings average over a sum
        assert_close(key, got, np.full(got.shape, exact[key]), "float16", 0.25 * exact[key])
