"""Recipes: fields and defaults as Transformer Engine's, and strictness."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import re

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import autocast, codec, formats, recipe_fields
from fp8kit.autocast import current
from fp8kit.errors import RecipeError
from fp8kit.lru import LRU
from fp8kit.quantization import AmaxHistory, Gemm, Quantization, Quantizer
from fp8kit.recipe import (
    DataRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    PerLayer,
    QParams,
    Recipe,
)


def test_format_limits():
    assert Format.HYBRID.value.max_fwd == 448.0
    assert Format.HYBRID.value.max_bwd == 57344.0
    assert Format.E2M1.value == (6.0, 6.0)
    assert Format.HYBRID.forward is formats.E4M3
    assert Format.HYBRID.backward is formats.E5M2
    assert len(Format) == 4  # no member is an alias of another


def test_delayed_fields_in_order_with_defaults():
    assert [(f.name, f.default) for f in dataclasses.fields(DelayedScaling)] == [
        ("margin", 0),
        ("fp8_format", Format.HYBRID),
        ("amax_history_len", 1024),
        ("amax_compute_algo", "max"),
        ("scaling_factor_compute_algo", None),
        ("reduce_amax", True),
        ("fp8_dpa", False),
        ("fp8_mha", False),
        ("backward_override", None),
    ]
    recipe = DelayedScaling()
    assert [
        p.use_split_accumulator for p in (recipe.fp8_gemm_fprop, recipe.fp8_gemm_dgrad, recipe.fp8_gemm_wgrad)
    ] == [False, True, True]


def test_current_fields_in_order_with_defaults():
    names = [f.name for f in dataclasses.fields(Float8CurrentScaling)]
    assert names == [
        "use_power_2_scales",
        "fp8_format",
        "fp8_quant_fwd_inp",
        "fp8_quant_fwd_weight",
        "fp8_quant_bwd_grad",
        "fp8_gemm_fprop",
        "fp8_gemm_dgrad",
        "fp8_gemm_wgrad",
        "fp8_dpa",
        "fp8_mha",
        "backward_override",
    ]
    recipe = Float8CurrentScaling()
    assert (
        recipe.fp8_quant_fwd_inp
        == recipe.fp8_quant_fwd_weight
        == recipe.fp8_quant_bwd_grad
        == QParams(False, 0.0, False, False, False)
    )
    assert [
        p.use_split_accumulator for p in (recipe.fp8_gemm_fprop, recipe.fp8_gemm_dgrad, recipe.fp8_gemm_wgrad)
    ] == [False, True, True]


def test_every_accepted_field_has_its_effect():
    power2 = Float8CurrentScaling(use_power_2_scales=True)
    assert all(
        q.power_2_scale
        for q in (power2.fp8_quant_fwd_inp, power2.fp8_quant_fwd_weight, power2.fp8_quant_bwd_grad)
    )
    mixed = Float8CurrentScaling(fp8_quant_fwd_inp=QParams(amax_epsilon=1e-3), fp8_gemm_fprop=MMParams(True))
    assert mixed.fp8_quant_fwd_inp.amax_epsilon == 1e-3
    assert mixed.fp8_gemm_fprop.use_split_accumulator
    assert mixed.fp8_quant_fwd_weight == QParams()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: DelayedScaling(amax_hist_len=3),
            ["amax_hist_len", "did you mean amax_history_len", "margin"],
        ),
        (lambda: Float8CurrentScaling(power_2_scale=True), ["power_2_scale", "use_power_2_scales"]),
        (lambda: QParams(power_2=True), ["QParams", "power_2_scale"]),
        (lambda: MMParams(split=True), ["MMParams", "use_split_accumulator"]),
        (lambda: DelayedScaling(0, margin=1), ["margin", "by position and by name"]),
        (lambda: MMParams(True, None, 1), ["MMParams", "at most 2"]),
        (lambda: MMParams(accumulation="hopper"), ["MMParams", "accumulation", "hopper_fast"]),
        (lambda: DelayedScaling(margin=-1), ["margin", "-1"]),
        (lambda: DelayedScaling(margin=19), ["margin", "19", "0 to 18"]),
        (lambda: DelayedScaling(margin=True), ["margin", "True"]),
        (lambda: DelayedScaling(margin=0.5), ["margin", "0.5"]),
        (lambda: DelayedScaling(amax_history_len=0), ["amax_history_len", "0"]),
        (lambda: DelayedScaling(amax_history_len="8"), ["amax_history_len", "'8'"]),
        (lambda: DelayedScaling(amax_compute_algo="mean"), ["amax_compute_algo", "most_recent"]),
        (lambda: DelayedScaling(scaling_factor_compute_algo="x"), ["scaling_factor_compute_algo"]),
        (lambda: DelayedScaling(reduce_amax=1), ["reduce_amax"]),
        (lambda: DelayedScaling(fp8_format=formats.E4M3), ["fp8_format"]),
        (lambda: Float8CurrentScaling(fp8_format=Format.E2M1), ["fp8_format", "E2M1"]),
        (lambda: DelayedScaling(backward_override="high"), ["backward_override", "high_precision"]),
        (lambda: Float8BlockScaling(backward_override=True), ["backward_override", "dequantized"]),
        (lambda: DelayedScaling(fp8_dpa=1), ["fp8_dpa", "got 1", "a bool"]),
        (lambda: DelayedScaling(fp8_mha=True), ["fp8_mha", "fp8_dpa"]),
        (lambda: Float8CurrentScaling(fp8_dpa="yes"), ["fp8_dpa", "'yes'", "a bool"]),
        (lambda: MXFP8BlockScaling(fp8_dpa=True, fp8_mha=True), ["fp8_mha", "small blocks"]),
        (
            lambda: Float8CurrentScaling(fp8_quant_fwd_inp=QParams(random_hadamard_transform=True)),
            ["fp8_quant_fwd_inp", "random_hadamard_transform=False", "NVFP4BlockScaling"],
        ),
        (lambda: QParams(random_hadamard_transform=1), ["random_hadamard_transform", "a bool"]),
        (
            lambda: Float8CurrentScaling(fp8_quant_fwd_inp=QParams(stochastic_rounding=True)),
            ["fp8_quant_fwd_inp", "stochastic_rounding=False", "NVFP4BlockScaling"],
        ),
        (lambda: QParams(stochastic_rounding=1), ["stochastic_rounding", "a bool"]),
        (
            lambda: Float8CurrentScaling(fp8_quant_fwd_inp=QParams(fp4_2d_quantization=True)),
            ["fp8_quant_fwd_inp", "fp4_2d_quantization=False", "NVFP4BlockScaling"],
        ),
        (lambda: QParams(fp4_2d_quantization=1), ["fp4_2d_quantization", "a bool"]),
        (lambda: QParams(amax_epsilon=-1.0), ["amax_epsilon", "-1.0"]),
        (lambda: QParams(amax_epsilon=float("nan")), ["amax_epsilon", "nan"]),
        (lambda: QParams(amax_epsilon=1e39), ["amax_epsilon", "1e+39"]),
        (lambda: QParams(power_2_scale=1), ["power_2_scale"]),
        (lambda: Float8CurrentScaling(fp8_quant_fwd_inp=True), ["fp8_quant_fwd_inp", "QParams"]),
        (lambda: Float8CurrentScaling(fp8_gemm_dgrad=True), ["fp8_gemm_dgrad", "MMParams"]),
        (
            lambda: Float8CurrentScaling(use_power_2_scales=True, fp8_quant_bwd_grad=QParams()),
            ["fp8_quant_bwd_grad", "use_power_2_scales"],
        ),
        (lambda: Float8BlockScaling(use_f32_scale=True), ["use_f32_scale", "did you mean use_f32_scales"]),
        (lambda: Float8BlockScaling(use_f32_scales=1), ["use_f32_scales"]),
        (
            lambda: Float8BlockScaling(fp8_quant_fwd_inp=QParams()),
            ["fp8_quant_fwd_inp", "power_2_scale=True", "use_f32_scales"],
        ),
        (lambda: Float8BlockScaling(x_block_scaling_dim=3), ["x_block_scaling_dim", "1 or 2"]),
        (lambda: Float8BlockScaling(w_block_scaling_dim=True), ["w_block_scaling_dim", "True"]),
        (lambda: Float8BlockScaling(x_block_scaling_dim=2), ["x_block_scaling_dim", "w_block_scaling_dim=2"]),
        (
            lambda: Float8BlockScaling(
                w_block_scaling_dim=1, x_block_scaling_dim=2, grad_block_scaling_dim=2
            ),
            ["grad_block_scaling_dim"],
        ),
        (
            lambda: Float8BlockScaling(fp8_gemm_fprop=MMParams(False)),
            ["fp8_gemm_fprop", "use_split_accumulator=True"],
        ),
        (lambda: Float8BlockScaling(fp8_dpa=True), ["fp8_dpa", "blocks of 128", "DataRecipe"]),
        (lambda: Float8BlockScaling(fp8_mha=True), ["fp8_mha", "blocks of 128"]),
    ],
)
def test_refusals_name_the_field(make, words):
    with pytest.raises(RecipeError) as caught:
        make()
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("module", "name", "said"),
    [
        (fk.recipe, "MXFP4BlockScaling", "recipes are DelayedScaling, .*; did you mean MXFP8BlockScaling"),
        (fk.recipe, "DelayedScalin", r"; did you mean DelayedScaling\?$"),
        (fk.recipe, "Delayed", r"; did you mean DelayedScaling\?$"),
        (fk.recipe, "Float8", r"; did you mean Float8CurrentScaling or Float8BlockScaling\?$"),
        (fk.recipe, "layer", r"; did you mean PerLayer\?$"),
        (fk, "quantise", r"'fp8kit' has .* 'quantise'; did you mean quantize\?$"),
        (fk, "zzz", "no attribute 'zzz'$"),
    ],
)
def test_names_that_are_not_there(module, name, said):
    assert not hasattr(module, name)
    with pytest.raises(AttributeError, match=said):
        getattr(module, name)


def test_what_fp8_attention_comes_to():
    """The quantizers of attention's operands follow from those of the products with weights; equal recipes
    give one object, pickled ones too."""
    e4m3, e5m2 = formats.E4M3, formats.E5M2
    for recipe, granularity, backward in (
        (DelayedScaling(fp8_dpa=True), "tensor", e5m2),
        (Float8CurrentScaling(fp8_dpa=True, fp8_format=Format.E4M3), "tensor", e4m3),
        (Float8CurrentScaling(use_power_2_scales=True, fp8_dpa=True), "tensor", e5m2),
        (MXFP8BlockScaling(fp8_dpa=True), "mx_1x32", e4m3),
        (NVFP4BlockScaling(fp8_dpa=True), "tensor", e5m2),
    ):
        how = recipe.attention
        assert {own.granularity for own in (how.q, how.k, how.v, how.do)} == {granularity}
        assert {own.format for own in (how.q, how.k, how.v, how.p)} == {e4m3}
        assert {own.format for own in (how.do, how.ds)} == {backward}
        assert all(own.scale_source == "current" for own in (how.q, how.k, how.v, how.do, how.ds))
        assert (how.o, how.dqkv, how.joint) == (None, None, False)
        again = pickle.loads(pickle.dumps(recipe))
        assert again == recipe
        assert again.attention is how
        assert dataclasses.replace(recipe, fp8_dpa=False).attention is None
    assert Float8CurrentScaling(use_power_2_scales=True, fp8_dpa=True).attention.ds.power_2
    current = Float8CurrentScaling(fp8_dpa=True, fp8_mha=True)
    assert (current.attention.o, current.attention.dqkv) == (current.quantization.x, current.quantization.g)
    delayed = DelayedScaling(fp8_dpa=True, fp8_mha=True).attention
    assert delayed.joint
    assert (delayed.o, delayed.dqkv) == (None, None)
    assert current.short_name() == "current(HYBRID, mha)"
    assert MXFP8BlockScaling(fp8_dpa=True).short_name() == "mxfp8(E4M3, dpa)"
    mine = DataRecipe(current.quantization, "mine", current.attention)
    assert mine.attention is current.attention
    assert pickle.loads(pickle.dumps(mine)) == mine
    assert mine != DataRecipe(current.quantization, "mine")
    named = PerLayer(mine, (("first.*", None), ("second.*", MXFP8BlockScaling(fp8_dpa=True))))
    assert [named.attention_for(name) for name in ("first.core", "second.core", "x")] == [
        None,
        MXFP8BlockScaling(fp8_dpa=True).attention,
        mine.attention,
    ]


def test_an_operand_wants_a_format():
    for wrong in ("E4M4", None, Format.E4M3, formats.E4M3.max):
        with pytest.raises(RecipeError, match=r"Quantizer: format: .*fp8kit\.E4M3"):
            Quantizer(wrong)


E4M3 = Quantizer(formats.E4M3)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Gemm("E4M3", E4M3), "Gemm: a: got 'E4M3', expected a Quantizer"),
        (lambda: Gemm(E4M3, None), "Gemm: b: got None, expected a Quantizer"),
        (lambda: Gemm(E4M3, E4M3, acumulation="fast"), "field: got 'acumulation'.*mean accumulation"),
        (
            lambda: Quantization.of(E4M3, E4M3, 8),
            r"Gemm dgrad \(a the grad_output and b the weight\): a: got 8",
        ),
        (lambda: Quantization(*[E4M3] * 3), "Quantization: fprop: got Quantizer.*, expected a Gemm"),
        (lambda: Quantization(*[Gemm(E4M3, E4M3)] * 4), "arguments: got 4, expected at most 3: fprop"),
        (
            lambda: Quantization(Gemm(E4M3, E4M3, recast=True), Gemm(E4M3, E4M3), Gemm(E4M3, E4M3)),
            "Quantization: fprop.recast: got True, expected False: only dgrad and wgrad can recast",
        ),
        (lambda: AmaxHistory(448, 57344, lenght=2), "AmaxHistory: field: got 'lenght'.*mean length"),
    ],
)
def test_values_of_another_kind_and_names_of_no_field_are_refused(make, said):
    with pytest.raises(RecipeError, match=said):
        make()


def test_what_is_missing_is_named():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'b'"):
        Gemm(E4M3)
    with pytest.raises(TypeError, match="missing 2 required positional arguments: 'w' and 'g'"):
        Quantization.of(E4M3)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'fpro'; did you mean fprop\?$"):
        Quantization.of(E4M3, E4M3, E4M3, fpro="fast")


def test_a_format_without_a_zero_is_of_scales():
    with pytest.raises(RecipeError, match="Gemm: format: got E8M0, which has no zero"):
        Gemm(Quantizer(formats.E4M3), Quantizer(formats.E8M0))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"granularity": "row", "scale_source": "delayed"}, "granularity: got row with scale_source"),
        ({"granularity": "mx_1x32", "scale_source": "delayed", "scale_rule": "te"}, "granularity: got mx"),
        (
            {"granularity": "mx_1x32"},
            r"scale_rule: got 'exact' with mx_1x32 \(the default\), expected one of floor, .*, te$",
        ),
        *(
            (
                lever,
                f"{name}: got {value!r} of tensor, .* granularity of blocks, scale_source 'current', and no",
            )
            for lever in ({"factor": 0.5}, {"ties": "down"}, {"clip_gradient": True})
            for name, value in lever.items()
        ),
        ({"signs": "te"}, "signs: got 'te' with hadamard=0"),
    ],
)
def test_fields_of_an_operand_that_do_not_go_together(fields, words):
    with pytest.raises(RecipeError, match=f"Quantizer: {words}"):
        Quantizer(formats.E4M3, **fields)


def test_block_scaling_defaults_and_what_follows_from_them():
    recipe = Float8BlockScaling()
    names = [field.name for field in dataclasses.fields(recipe)]
    assert names == [
        "use_f32_scales",
        "fp8_format",
        "fp8_quant_fwd_inp",
        "fp8_quant_fwd_weight",
        "fp8_quant_bwd_grad",
        "x_block_scaling_dim",
        "w_block_scaling_dim",
        "grad_block_scaling_dim",
        "fp8_gemm_fprop",
        "fp8_gemm_dgrad",
        "fp8_gemm_wgrad",
        "fp8_dpa",
        "fp8_mha",
        "backward_override",
    ]
    assert (recipe.use_f32_scales, recipe.fp8_format) == (False, Format.E4M3)
    assert (recipe.x_block_scaling_dim, recipe.w_block_scaling_dim, recipe.grad_block_scaling_dim) == (
        1,
        2,
        1,
    )
    assert (
        recipe.fp8_quant_fwd_inp
        == recipe.fp8_quant_fwd_weight
        == recipe.fp8_quant_bwd_grad
        == QParams(power_2_scale=True)
    )
    assert recipe.fp8_gemm_fprop == recipe.fp8_gemm_dgrad == recipe.fp8_gemm_wgrad == MMParams(True)
    assert Float8BlockScaling(use_f32_scales=True).fp8_quant_bwd_grad == QParams()
    assert Float8BlockScaling.float8_block_scaling()
    assert not any((recipe.delayed(), recipe.float8_current_scaling(), recipe.float8_per_tensor_scaling()))
    assert recipe.short_name() == "block(E4M3, pow2)"
    other = Float8BlockScaling(True, Format.HYBRID, x_block_scaling_dim=2, w_block_scaling_dim=1)
    assert other.short_name() == "block(HYBRID, f32, dims 211)"
    assert other.backward_format is formats.E5M2
    assert pickle.loads(pickle.dumps(other)) == other


def test_environment_is_not_read(monkeypatch):
    monkeypatch.setenv("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "1")
    monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", "high_precision")
    assert Float8CurrentScaling() == Float8CurrentScaling(use_power_2_scales=False, backward_override=None)


def test_values_hash_copy_and_pickle():
    recipe = DelayedScaling(margin=1, amax_compute_algo="most_recent")
    same = DelayedScaling(1, amax_compute_algo="most_recent")
    assert recipe == same
    assert hash(recipe) == hash(same)
    assert recipe != DelayedScaling()
    assert {recipe: 1}[same] == 1
    current = Float8CurrentScaling(use_power_2_scales=True)
    for value in (recipe, current):
        assert pickle.loads(pickle.dumps(value)) == value
        assert copy.deepcopy(value) == value
    assert dataclasses.replace(recipe, margin=2).margin == 2


def test_predicates_are_class_methods():
    assert DelayedScaling.delayed()
    assert not DelayedScaling.float8_current_scaling()
    assert Float8CurrentScaling().float8_current_scaling()
    assert Float8CurrentScaling.float8_per_tensor_scaling()
    assert DelayedScaling.float8_per_tensor_scaling()
    for recipe in (DelayedScaling, Float8CurrentScaling, Recipe):
        assert [recipe.nvfp4(), recipe.mxfp8(), recipe.float8_block_scaling(), recipe.custom()] == [False] * 4


def test_whole_floats_are_ints():
    made = DelayedScaling(margin=5.0, amax_history_len=4.0)
    assert (made, type(made.margin)) == (DelayedScaling(margin=5, amax_history_len=4), int)
    made.margin = 2.0
    assert made.short_name() == DelayedScaling(margin=2, amax_history_len=4).short_name()


def test_the_largest_margin_is_the_last_that_leaves_a_value():
    codes = codec.encode(np.float32([448 * 2.0**-18, 448 * 2.0**-19]), formats.E4M3)
    assert DelayedScaling(margin=18).margin == 18
    np.testing.assert_array_equal(codes, [1, 0])


def test_callables_and_short_names():
    mine = DelayedScaling(amax_compute_algo=lambda history: np.mean(history, 0))
    assert mine.host_update
    assert not DelayedScaling().host_update
    assert DelayedScaling(scaling_factor_compute_algo=lambda amax, scale, fp8_max, recipe: scale).host_update
    assert mine.short_name() == "delayed(HYBRID, h1024, callable)"
    assert DelayedScaling(margin=2, amax_history_len=4).short_name() == "delayed(HYBRID, h4, max, m2)"
    assert (
        Float8CurrentScaling(use_power_2_scales=True, fp8_format=Format.E4M3).short_name()
        == "current(E4M3, pow2)"
    )
    assert Float8CurrentScaling().forward_format is formats.E4M3
    assert Float8CurrentScaling().backward_format is formats.E5M2


def test_the_two_formats_are_told_apart():
    """A recipe's format is a pair of number formats; where one is given for the other the message says which
    is wanted."""
    assert (fk.recipe.Format.HYBRID.forward, fk.recipe.Format.HYBRID.backward) == (fk.E4M3, fk.E5M2)
    with pytest.raises(
        RecipeError,
        match=r"fp8_format: got the number format E4M3, expected one of fp8kit\.recipe\.Format, such as",
    ):
        DelayedScaling(fp8_format=fk.E4M3)
    with pytest.raises(
        fk.FormatError, match=r"format: got <Format\.E4M3: .*expected a number format: fp8kit\.E4M3 or"
    ):
        fk.quantize(np.ones(3, np.float32), Format.E4M3)


def test_a_field_that_is_set_counts_from_the_next_autocast_on():
    recipe = DelayedScaling()
    before = recipe.quantization
    scope = autocast(recipe=recipe)
    with scope:
        held = current().recipe
        recipe.margin = 3
        recipe.fp8_format = Format.E4M3
        assert current().recipe is held
        assert held == DelayedScaling()
    with scope:
        assert current().recipe == DelayedScaling(margin=3, fp8_format=Format.E4M3)
        assert current().recipe.history.margin == 3
        assert current().recipe.quantization.g.format is formats.E4M3 is not before.g.format
    assert hash(recipe) == hash(DelayedScaling(3, Format.E4M3))
    assert pickle.loads(pickle.dumps(recipe)) == recipe == copy.deepcopy(recipe)


def test_equal_recipes_are_one_in_force():
    """As layers know by it what they have made for it; a class of a program's own may have further fields."""
    made = [lambda: DelayedScaling(amax_history_len=int("3000")), lambda: Float8CurrentScaling(True)]
    for make in made:
        assert make() is not make() == make()
        assert make().fixed is make().fixed is make().fixed.fixed
    recipe = made[0]()
    before = recipe.fixed
    recipe.margin = 1
    assert recipe.fixed is not before
    assert before.margin == 0
    assert recipe.fixed is DelayedScaling(1, amax_history_len=3000).fixed

    class Own(DelayedScaling):
        pass

    own = [Own(amax_history_len=3000) for _ in range(2)]
    assert len({id(each.fixed) for each in (*own, made[0]())}) == 3


def test_a_recipe_in_force_has_a_text_that_says_all_of_it():
    """By which compiled code knows it, perhaps in another process: no address is in it alone."""
    made = [
        lambda: DelayedScaling(),
        lambda: DelayedScaling(margin=1),
        lambda: Float8CurrentScaling(),
        lambda: Float8CurrentScaling(fp8_quant_fwd_inp=QParams(amax_epsilon=0.5)),
    ]
    texts = [make().fixed.trace_key for make in made]
    assert texts == [make().fixed.trace_key for make in made]
    assert len({*texts, ""}) == 5
    assert " at 0x" not in "".join(texts)
    assert "448.0" in texts[0]
    for make, text in zip(made, texts, strict=True):
        assert recipe_fields.by_key(text) is make().fixed
        assert make().trace_key == ""
    asked = DelayedScaling(amax_compute_algo=lambda history: history[0]).fixed
    assert asked.trace_key == ""
    one, other = (recipe_fields.with_key(copy.copy(asked), f"{asked}").trace_key for _ in range(2))
    assert one != other


def test_a_recipe_in_force_is_found_by_its_text_while_it_lives(monkeypatch):
    """Also where so many others were made since that an equal one is no longer remembered."""
    held = DelayedScaling(amax_history_len=int("2777")).fixed
    monkeypatch.setattr(recipe_fields, "_FIXED", LRU(2))
    monkeypatch.setattr(recipe_fields, "_SAME", {})
    again = DelayedScaling(amax_history_len=int("2777")).fixed
    assert again is held
    del again
    for margin in range(3):
        DelayedScaling(margin, amax_history_len=int("2778")).fixed  # noqa: B018  (what it remembers)
    gc.collect()
    assert recipe_fields.by_key(held.trace_key) is held


def test_equal_callables_of_two_recipes_are_asked_each():
    @dataclasses.dataclass(frozen=True)
    class Algo:
        decay: float = 0.9

        def __call__(self, history):
            return history[0]

    first, second = (DelayedScaling(amax_compute_algo=Algo()) for _ in range(2))
    assert first == second
    assert first.fixed is not second.fixed
    assert second.fixed.amax_compute_algo is second.amax_compute_algo


def test_a_field_that_another_thread_sets_meanwhile_does_not_reach_equal_recipes(monkeypatch):
    own = {"margin": 2, "amax_history_len": int("2999")}  # no other test's, which may be in force
    shared, real = DelayedScaling(**own), recipe_fields.copy.copy

    def other(recipe):
        if recipe is shared:
            monkeypatch.setattr(recipe_fields.copy, "copy", real)
            shared.margin = 5
        return real(recipe)

    monkeypatch.setattr(recipe_fields.copy, "copy", other)
    assert shared.fixed.margin == 5
    assert DelayedScaling(**own).fixed.margin == 2


def test_a_programs_recipe_may_have_other_bases():
    class Tagged:
        def __init_subclass__(cls, tag=0, **more):
            super().__init_subclass__(**more)
            cls.tag = tag

    class Mine(DelayedScaling, Tagged, tag=3):
        pass

    assert Mine.tag == 3
    assert Mine().fixed is not Mine().fixed


def test_a_recipe_with_a_callable_that_has_no_hash_counts():
    class Largest:
        __hash__ = None

        def __call__(self, history):
            return history.max(0)

    recipe = DelayedScaling(amax_compute_algo=Largest())
    with autocast(recipe=recipe):
        assert current().recipe == recipe


def test_a_field_that_is_set_is_checked():
    recipe = Float8CurrentScaling()
    for field, value, words in (
        ("fp8_format", "HYBRID", "fp8_format"),
        ("fp8_mha", 1, "fp8_mha"),
        ("use_power_2_scales", True, "power_2_scale=True"),  # the operands' QParams say otherwise
        ("fp8_quant_fwd_input", QParams(), "fp8_quant_fwd_inp"),
        ("quantization", None, "one of use_power_2_scales"),
    ):
        with pytest.raises(RecipeError, match=re.escape(words)):
            setattr(recipe, field, value)
    assert recipe == Float8CurrentScaling()
    recipe.fp8_quant_fwd_inp = QParams(power_2_scale=True)
    assert recipe.quantization.x.scale_rule == "power_2"


def test_a_recipe_in_force_cannot_be_changed():
    recipe = DelayedScaling()
    with autocast(recipe=recipe), pytest.raises(RecipeError, match="given to autocast"):
        current().recipe.margin = 2


def test_recipes_by_layer_keep_their_recipes_as_they_were():
    inner = DelayedScaling()
    both = PerLayer(inner, (("head", inner),))
    inner.margin = 4
    assert both.default == both.rules[0][1] == DelayedScaling()
    both.default = inner
    assert both.for_layer("Linear", "x").margin == 4
