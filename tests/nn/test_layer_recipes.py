"""Recipes as data, by the layer's name, and by a function: which layers compute how."""

from __future__ import annotations

import copy
import gc
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import nn, recipe, slowness
from fp8kit.autocast import current
from fp8kit.errors import ArgumentError, RecipeError
from fp8kit.formats import E4M3, E5M2
from fp8kit.ops import products
from fp8kit.quantization import AmaxHistory, Gemm, Quantization, Quantizer
from fp8kit.recipe_fields import of_parts
from fp8kit.recipes import NAMED, named
from fp8kit.testing.compare import relative_error

X = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)
MX = recipe.MXFP8BlockScaling()


def results(layer: Any, how: recipe.Recipe | None) -> list[Any]:
    """y and the gradients of x and the weights."""
    x = fk.tensor(X, requires_grad=True)
    layer.zero_grad()
    with fk.autocast(enabled=how is not None, recipe=how):
        y = layer(x)
    y.backward(np.broadcast_to(np.linspace(-1, 1, y.shape[-1], dtype=np.float32), y.shape).copy())
    return [part.numpy().copy() for part in (y, x.grad, *(p.grad for p in layer.parameters()))]


def same(a: list[Any], b: list[Any]) -> bool:
    return all(np.array_equal(*pair) for pair in zip(a, b, strict=True))


def make(name: str | None = None) -> nn.Linear:
    fk.manual_seed(0)
    return nn.Linear(64, 48, name=name)


def test_the_first_rule_that_fits_counts() -> None:
    rules = (("*.head", None), ("layers.0.*", recipe.Float8CurrentScaling()), ("layers.*", None))
    how = recipe.PerLayer(MX, rules)
    expected = {"lm.head": None, "layers.0.fc1": rules[1][1], "layers.1.fc1": None, "other": MX, None: MX}
    for name, own in expected.items():
        layer = make(name)
        assert same(results(layer, how), results(layer, own)), name


def test_layers_without_a_name_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    quiet = [
        (MX, None),
        (recipe.PerLayer(MX), None),
        (recipe.PerLayer(MX, (("unnamed*", None),)), "unnamed_a"),
    ]
    quiet.append((recipe.PerLayer(MX, (("unnamed*", None), ("*", None))), None))
    for how, name in quiet:
        results(make(name), how)
    assert not caplog.messages
    how = recipe.PerLayer(MX, (("unnamed.*", None),))
    for _ in range(2):
        results(make(), how)
    (said,) = caplog.messages
    assert said.startswith("Linear has no name, so no rule of PerLayer fits it (per_layer(")


def test_rules_that_fit_no_layer_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    layer, rules = make("model.layers.0.fc1"), [("layers.0.*", None), ("layers.1.*", None)]
    results(layer, recipe.PerLayer(MX, (("model.*", None), ("model.layers.0.*", None))))  # all fit
    assert not caplog.messages
    how = recipe.PerLayer(MX, (*rules, ("model.*", None)))  # one fits
    for each in (how, how, replace(how)):
        results(layer, each)
    results(layer, recipe.PerLayer(MX, tuple(rules)))  # none fits
    assert caplog.messages == [
        f"rules of PerLayer that fit no layer that ran (per_layer(mxfp8(E4M3), {count} "
        "rules)): 'layers.0.*', 'layers.1.*'; the layers are called 'model.layers.0.fc1'"
        for count in (3, 2)
    ]


def test_rules_are_told_to_fit_no_layer_once_layers_run_again(caplog: pytest.LogCaptureFixture) -> None:
    """A step may have an autocast for each layer, and one within another."""
    first, last = make("told.first"), make("told.last")
    how = recipe.PerLayer(MX, (("told.first", None), ("told.last", None)))
    with fk.autocast(recipe=how):
        with fk.autocast(recipe=how):
            first(fk.tensor(X))
        last(fk.tensor(X))
    how = recipe.PerLayer(MX, (("told.last", None), ("told.first", None)))
    with pytest.raises(KeyError), fk.autocast(recipe=how):
        first(fk.tensor(X))[{}["no such key"]]
    lost = recipe.PerLayer(MX, (("told.first", None), ("told.lost", None)))
    for again in (False, True):
        for each in (how, lost):
            for layer in (first, last):
                assert len(caplog.messages) == (again and each is lost and layer is last)
                with fk.autocast(recipe=each):
                    layer(fk.tensor(X))
    (said,) = caplog.messages
    assert said.endswith(": 'told.lost'; the layers are called 'told.first', 'told.last'")


def test_a_rule_for_attention_alone_is_told_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    eight = recipe.Float8CurrentScaling(fp8_dpa=True)
    how = recipe.PerLayer(recipe.Float8CurrentScaling(), (("*.attention", eight),))
    with fk.autocast(recipe=how):
        make("model.fc1")(fk.tensor(X))
        scope = current()
        assert scope is not None
        assert scope.recipe.attention_for("model.attention") is not None
    assert not caplog.messages


def test_a_function_that_asks_for_names_that_are_not_there(caplog: pytest.LogCaptureFixture) -> None:
    def by_name(role: Any) -> Quantizer | None:
        return None if role.name == "head" else Quantizer(E4M3)

    def by_operand(role: Any) -> Quantizer:
        return Quantizer(E4M3 if role.operand != "grad_output" else E5M2)

    for how, name in ((by_name, "head"), (by_name, "a"), (by_operand, None)):
        results(make(name), recipe.CustomRecipe(how))
    assert recipe.CustomRecipe(by_name).quantization.x.format == E4M3  # asked of no layer
    assert not caplog.messages
    for _ in range(2):
        results(make(), recipe.CustomRecipe(by_name))
    (said,) = caplog.messages
    start = "Linear has no name, so by_name of CustomRecipe reads an empty role.name (custom(by_name)): "
    assert said.startswith(start + "give it name=..., or call name_layers(model)")


def test_the_first_and_the_last_layers() -> None:
    low = recipe.Float8CurrentScaling()
    how = recipe.PerLayer.ends(MX, "layers.{}.*", 12, first=1, last=2, other=low)
    found = [n for n in range(12) if how.for_layer("Linear", f"layers.{n}.fc1") == low]
    assert found == [0, 10, 11]
    assert how.for_layer("Linear", "head") == how.for_layer("Linear", "layers.1.fc1") == MX
    assert recipe.PerLayer.ends(MX, "h{}", 2, last=2) == recipe.PerLayer(MX, (("h0", None), ("h1", None)))
    refused = {
        "pattern: got 'layers', expected a pattern with {}": ("layers", 4),
        "layers: got 0": ("l{}", 0),
        "first: got 5": ("l{}", 4, 5),
        "first, last: got 2 and 3 of 4 layers": ("l{}", 4, 2, 3),
    }
    for said, arguments in refused.items():
        with pytest.raises(RecipeError, match=said):
            recipe.PerLayer.ends(MX, *arguments)


def test_name_layers() -> None:
    model = nn.Sequential(nn.Linear(64, 48), nn.LayerNormMLP(48, 96))
    assert nn.name_layers(model) is model
    assert [module.name for _, module in model.named_modules() if hasattr(module, "name")] == ["0", "1"]
    how = recipe.PerLayer(MX, (("1", None),))
    y = results(model, how)[0]
    with fk.autocast(recipe=MX):
        first = model[0](fk.tensor(X))
    assert np.array_equal(y, model[1](first).numpy())
    with pytest.raises(ArgumentError, match="a list"):
        nn.name_layers([])


def test_a_layer_that_gets_another_name_gets_another_recipe() -> None:
    layer, how = make("a"), recipe.PerLayer(MX, (("b", None),))
    before = results(layer, how)
    layer.name = "b"
    assert same(results(layer, how), results(layer, None))
    assert not same(before, results(layer, how))


def test_delayed_scaling_for_some_layers_keeps_their_state() -> None:
    layer, other = make("a"), make("b")
    how = recipe.PerLayer(MX, (("a", recipe.DelayedScaling(amax_history_len=2)),))
    for each in (layer, other):
        results(each, how)
    assert layer.fp8_meta.keys() == {"scaling_fwd", "scaling_bwd"}
    assert not other.fp8_meta


def test_a_function_says_how_each_operand_is_cast() -> None:
    asked = []

    def factory(role: recipe.QuantizerRole) -> Quantizer | None:
        asked.append(role)
        if role.name == "head" or role.gemm == "wgrad":
            return None
        fmt = fk.E5M2 if role.operand == "grad_output" else fk.E4M3
        return Quantizer(fmt, "mx_1x32", scale_rule="te")

    how = recipe.CustomRecipe(factory)
    layer, head = make("body"), make("head")
    y, dx, dw, _ = results(layer, how)
    assert same(results(head, how), results(head, None))
    hybrid, plain = (
        results(layer, recipe.MXFP8BlockScaling(fp8_format=recipe.Format.HYBRID)),
        results(layer, None),
    )
    assert same([y, dx, dw], [hybrid[0], hybrid[1], plain[2]])
    assert {role.module for role in asked} == {"Linear"}
    # once for each role
    assert len(asked) == 12
    assert how.custom()


SHARED = Quantizer(fk.E4M3, scale_source="amax")


def test_refusals() -> None:
    for wrong in (
        lambda: recipe.PerLayer(None),
        lambda: recipe.PerLayer(MX, "head"),
        lambda: recipe.PerLayer(MX, (("head", "bf16"),)),
        lambda: recipe.PerLayer(recipe.PerLayer(MX)),
        lambda: recipe.CustomRecipe(None),
        lambda: recipe.CustomRecipe(lambda: None),
        lambda: recipe.CustomRecipe(lambda role: None, accumulation=lambda: "fast"),
        lambda: recipe.CustomRecipe(type("Rule", (), {"__call__": len, "__eq__": max})()),
        lambda: recipe.DataRecipe(MX),
        lambda: recipe.DataRecipe(Quantization(*(Gemm(Quantizer(fk.E4M3), SHARED) for _ in range(3)))),
        lambda: recipe.DataRecipe(recipe.DelayedScaling().quantization),
        lambda: recipe.CustomRecipe(lambda role: "e4m3").quantization,
        lambda: recipe.CustomRecipe(lambda role: None).quantization,
        lambda: recipe.MMParams(accumulation="hopper"),
    ):
        with pytest.raises(RecipeError):
            wrong()
    with pytest.raises(
        RecipeError, match=r"got \('0', 'mxfp8'\), .* such as fp8kit.recipes.named\('mxfp8'\)"
    ):
        recipe.PerLayer(MX, (("0", "mxfp8"),))
    with pytest.raises(AttributeError, match=r"role of CustomRecipe has no 'opernd'.*mean operand"):
        results(make("a"), recipe.CustomRecipe(lambda role: role.opernd))
    with pytest.raises(ArgumentError, match="rowwise"):
        named("row_wise")


@pytest.mark.parametrize("name", NAMED)
def test_named_recipes_are_values(name: str) -> None:
    """Equal, hashable, copied and pickled as values are; one quantization for equal ones."""
    how = named(name)
    for other in (copy.deepcopy(how), pickle.loads(pickle.dumps(how))):
        assert other == how
        assert hash(other) == hash(how)
        assert other.quantization is how.quantization
    assert how.short_name()


def test_a_gemm_in_high_precision_has_the_high_precision_bits() -> None:
    plain = results(make(), None)
    for i, which in enumerate(("fprop", "dgrad", "wgrad")):
        for base in (recipe.Float8CurrentScaling(), recipe.Float8BlockScaling(), MX, named("rowwise")):
            gemms = base.quantization.gemms
            gemms[which] = Gemm(gemms[which].a, gemms[which].b, compute="high_precision")
            got = results(make(), recipe.DataRecipe(Quantization(*gemms.values())))
            whole = results(make(), base)
            for k in range(3):
                assert np.array_equal(got[k], (plain if k == i else whole)[k]), (which, base, k)


def test_hoppers_sums_in_a_layer() -> None:
    """A Linear's three products are those of ``fk.matmul`` with the same arithmetic."""
    sums = {"fprop": "hopper_fast", "dgrad": "hopper_split", "wgrad": "exact"}
    how = recipe.Float8CurrentScaling(
        fp8_format=recipe.Format.E4M3,
        **{f"fp8_gemm_{gemm}": recipe.MMParams(accumulation=name) for gemm, name in sums.items()},
    )
    layer = nn.Linear(64, 48, bias=False)
    y, dx, dw = results(layer, how)
    g = np.broadcast_to(np.linspace(-1, 1, 48, dtype=np.float32), (32, 48)).copy()
    w = layer.weight.numpy()
    q = {key: fk.quantize(np.ascontiguousarray(a)) for key, a in (("x", X), ("w", w), ("g", g))}
    t = {key: fk.quantize(np.ascontiguousarray(a.T)) for key, a in (("x", X), ("w", w), ("g", g))}
    expected = [
        fk.matmul(q["x"], q["w"].T, accumulate=sums["fprop"]),
        fk.matmul(q["g"], t["w"].T, accumulate=sums["dgrad"]),
        fk.matmul(t["g"], t["x"].T, accumulate=sums["wgrad"]),
    ]
    assert same([y, dx, dw], expected)
    assert not np.array_equal(
        y, results(layer, recipe.Float8CurrentScaling(fp8_format=recipe.Format.E4M3))[0]
    )


def test_what_is_not_native_is_said_in_words(caplog: pytest.LogCaptureFixture) -> None:
    def rounded(role: recipe.QuantizerRole) -> Quantizer:
        if role.operand == "grad_output":
            return Quantizer(fk.E5M2, stochastic_bits=8)
        return Quantizer(fk.E4M3)

    slowness.forget()
    products._say_emulated.cache_clear()
    results(make("a"), recipe.CustomRecipe(rounded))
    (said,) = caplog.messages
    assert said.startswith(
        "FP8 products are not native by this recipe, because of stochastic_bits 8 of dgrad's output "
        "gradient, not 0: operands are still cast, but all three GEMMs"
    )
    caplog.clear()
    cast = Quantizer(fk.E4M3)
    one = Gemm(cast, cast, "split", plain="b")  # as FakeQuant has it, of the activation alone
    results(make("a"), recipe.DataRecipe(Quantization(one, Gemm(cast, cast), Gemm(cast, cast)), "one"))
    (said,) = caplog.messages
    assert "because of weight of fprop, which is not cast while the other is: operands" in said
    caplog.clear()
    blocks = Quantizer(fk.E4M3, "mx_1x64", scale_rule="rceil")
    own = Quantization(Gemm(cast, cast), Gemm(cast, cast), Gemm(blocks, blocks))
    for _ in range(2):
        results(make("a"), recipe.DataRecipe(own, "finer wgrad"))
    (said,) = caplog.messages
    assert "because of granularity mx_1x64 of wgrad's output gradient, not tensor or row or block" in said
    caplog.clear()
    results(make("a"), recipe.DataRecipe(Quantization(*[Gemm(blocks, blocks)] * 3), "as it must be"))
    assert not caplog.messages


@pytest.mark.parametrize(
    "kind", [recipe.DelayedScaling, recipe.Float8CurrentScaling, recipe.Float8BlockScaling]
)
def test_e5m2_for_all_operands_is_emulated(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    """No tensor core multiplies E5M2 by E5M2: the values of the codes are multiplied."""
    slowness.forget()
    products._say_emulated.cache_clear()
    layer, how = make("a"), kind(fp8_format=recipe.Format.E5M2)
    y = results(layer, how)[0]
    own = how.quantization
    cast = []
    for values, side in ((X, own.x), (layer.weight.numpy(), own.w)):
        scale = 1.0 if how.delayed() else None  # in the first step
        scaling = {} if how.delayed() else {"scaling": side.granularity, "scale_rule": side.scale_rule}
        cast.append(fk.quantize(values, fk.E5M2, scale, **scaling).dequantize().astype(np.float64))
    expected = cast[0] @ cast[1].T + layer.bias.numpy()
    assert relative_error(y, expected) < 64 * 2.0**-23  # sums of 64 in float32
    (said,) = caplog.messages
    assert "E5M2 for both" in said


class _Share:
    """A rule of amaxes whose text does not say which."""

    def __init__(self, share: float) -> None:
        self.share = share

    def __call__(self, history: Any) -> Any:
        return history.max(0) * np.float32(self.share)

    def __repr__(self) -> str:
        return "share()"


def test_the_keys_of_recipes_whose_functions_have_the_same_text() -> None:
    operand = Quantizer(E4M3, scale_source="delayed")
    data = Quantization.of(operand, operand, operand)
    rules = [AmaxHistory(448.0, 448.0, amax_algo=_Share(share)) for share in (0.5, 2.0)]
    made = [recipe.DataRecipe(data, history=rule) for rule in (*rules, rules[0])]
    assert made[0].key == made[2].key != made[1].key
    for each, rule in zip(made, (*rules, rules[0]), strict=True):
        assert of_parts(replace(each, name="again").parts()).history is rule


def test_what_a_key_stands_for_goes_with_the_recipes_that_have_it() -> None:
    own = Quantizer(E4M3, epsilon=0.123)
    made = recipe.DataRecipe(Quantization.of(own, own, own))
    key, again = made.key, recipe.DataRecipe(Quantization.of(own, own, own), "again")
    assert again.quantization is made.quantization
    copied = pickle.loads(pickle.dumps(again))
    assert (copied, copied.quantization) == (again, made.quantization)
    del made, again, copied
    gc.collect()
    with pytest.raises(KeyError):
        of_parts((recipe.DataRecipe, key, "again"))


def test_scales_of_earlier_steps_without_a_rule_are_refused_by_the_recipes_name() -> None:
    late = recipe.CustomRecipe(lambda role: Quantizer(fk.E4M3, scale_source="delayed"))
    with pytest.raises(RecipeError, match="CustomRecipe: history: got None, expected an AmaxHistory"):
        results(make("a"), late)


def test_whether_a_recipe_draws() -> None:
    current = fk.recipe.Float8CurrentScaling(fp8_dpa=True)
    assert fk.recipe.NVFP4BlockScaling().needs_rng
    assert not current.needs_rng
    attention = replace(current.attention, rotation=16, signs="random")
    drawn = fk.recipe.DataRecipe(current.quantization, "drawn", attention)
    assert not drawn.quantization.needs_rng
    assert drawn.needs_rng
    assert fk.recipe.PerLayer(current, (("head", drawn),)).needs_rng
    assert not fk.recipe.PerLayer(current, (("head", None),)).needs_rng
