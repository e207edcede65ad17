"""What ``apply`` says to malformed arguments, in each frontend, before anything runs."""

from __future__ import annotations

import fp8kit_jax as fj
import fp8kit_torch as ft
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import fp8kit as fk
from fp8kit.autograd import apply
from fp8kit.errors import ArgumentError, FormatError, ShapeError
from fp8kit.execution import plans
from fp8kit.ops.dropout_add import AddSpec, add
from fp8kit.ops.linear import LinearSpec, weight_cast
from fp8kit.ops.product import ProductSpec
from tests.support.gate import Gate, GateSpec, gate

SPEC = GateSpec(16)
X, SLOPE = np.ones((2, 16), np.float32), np.ones(16, np.float32)
# apply, how it takes arrays, what its errors call the input "slope"
FRONTENDS = {
    "native": (apply, fk.tensor, "slope"),
    "torch": (ft.apply, torch.tensor, "a"),
    "jax": (fj.apply, jnp.asarray, "slope"),
}
# inputs by name, True for an array of the frontend; kind and words of the error
INPUTS = {
    "left out": (
        {"x": True},
        ShapeError,
        "{slope}: got None, expected an array, given as 'slope', beside 'x'",
    ),
    "none": ({"x": True, "slope": None}, ShapeError, "{slope}: got None, expected an array"),
    "all none": ({"x": None, "slope": None}, ShapeError, "x: got None, expected an array"),
    "empty": ({}, ShapeError, "x: got None, expected an array"),
    "misspelt": ({"x": True, "slop": True}, ShapeError, "{slope}: got None, expected an array"),
    "one more": (
        {"x": True, "slope": True, "slopes": True},
        ArgumentError,
        "slopes: got an array, expected one of the inputs that infer looks at: slope, x; did you mean slope?",
    ),
    "a text": ({"x": "ones", "slope": True}, (ArgumentError, FormatError), "x: got 'ones', expected a"),
    "no dict": ([X, SLOPE], ArgumentError, "inputs: got "),
}
SPECS = {
    "another's": (gate, AddSpec(), "got AddSpec(), expected a spec of this operation, which has 'features'"),
    "none": (gate, None, "got None, expected a spec of this operation"),
    "a dict": (gate, {"features": 16}, "got {'features': 16}, expected a "),
    "annotated": (add, SPEC, "got GateSpec(features=16), expected an instance of AddSpec"),
    "annotated none": (add, None, "got None, expected an instance of AddSpec"),
}


@pytest.fixture(params=FRONTENDS)
def frontend(request, monkeypatch):
    """A frontend in which nothing may run and no plan may be kept."""

    def ran(*_):
        raise AssertionError("it ran")

    monkeypatch.setattr(Gate, "forward", ran)
    before = len(plans.plans)
    yield FRONTENDS[request.param]
    assert len(plans.plans) == before


def filled(inputs, make):
    arrays = {"x": X, "slope": SLOPE}
    if isinstance(inputs, list):
        return [make(value) for value in inputs]
    return {name: make(arrays.get(name, SLOPE)) if value is True else value for name, value in inputs.items()}


@pytest.mark.parametrize("case", INPUTS)
def test_inputs(frontend, case):
    run, make, slope = frontend
    inputs, kind, words = INPUTS[case]
    with pytest.raises(kind) as caught:
        run(gate, SPEC, filled(inputs, make))
    assert str(caught.value).startswith(f"user_gate: {words.format(slope=slope)}")


@pytest.mark.parametrize("case", SPECS)
def test_specs(frontend, case):
    run, make, _ = frontend
    operation, spec, words = SPECS[case]
    names = ("x", "slope") if operation is gate else ("a", "b")
    with pytest.raises(ArgumentError) as caught:
        run(operation, spec, {name: make(X) for name in names})
    assert str(caught.value).startswith(f"{operation.name}: spec: {words}")


@pytest.mark.parametrize("operation", ["user_gate", Gate])
def test_no_operation(frontend, operation):
    run, make, _ = frontend
    with pytest.raises(ArgumentError, match=r"^apply: operation: got .*, expected an Operation"):
        run(operation, SPEC, {"x": make(X), "slope": make(SLOPE)})


@pytest.mark.parametrize("name", ["native", "torch"])
@pytest.mark.parametrize("wrong", ["x", "slope"])
@pytest.mark.parametrize("value", [X, [1.0], 2.0])
def test_arrays_of_another_library(name, wrong, value):
    """NumPy's are not taken for tensors; JAX's own functions take them, and so does its ``apply``."""
    run, make, _ = FRONTENDS[name]
    inputs = {"x": make(X), "slope": make(SLOPE)} | {wrong: value}
    called, wanted = {"x": "x", "slope": "a"}[wrong], {"native": "a Tensor", "torch": "a torch.Tensor"}[name]
    for scope in (fk.no_grad, torch.no_grad):
        with pytest.raises(ArgumentError) as caught, scope():
            run(gate, SPEC, inputs)
        assert str(caught.value).startswith(f"user_gate: {called}: got ")
        assert f"expected {wanted}" in str(caught.value)


def test_a_text_that_is_no_spec():
    with pytest.raises(FormatError, match=r"^user_gate: spec: got 'hello', expected one that encode wrote"):
        ft.apply(gate, "hello", {"x": torch.tensor(X), "slope": torch.tensor(SLOPE)})


def test_an_operations_own_mistake_is_its_own():
    """An AttributeError about something else than the spec is not said to be the caller's."""

    class Wrong(Gate):
        name = "wrong_gate"

        def infer(self, spec, metas, needs):
            return metas["x"].size

    with pytest.raises(AttributeError, match="size"):
        apply(Wrong(), SPEC, {"x": fk.tensor(X)})


def test_what_infer_goes_through_is_no_unknown_input():
    """An operation that takes any names reads them all."""

    class Any(Gate):
        name = "any_gate"

        def infer(self, spec, metas, needs):
            names = [*metas], [*metas.keys()], [name for name, _ in metas.items()], [*(metas | {})]
            assert names == (["x", "slope", "more"],) * 4
            return super().infer(spec, metas, needs)

    with_more = {"x": fk.tensor(X), "slope": fk.tensor(SLOPE), "more": fk.tensor(SLOPE)}
    assert apply(Any(), SPEC, with_more)["y"].shape == X.shape


def test_the_cast_of_a_weight_looks_at_all_weights():
    fp8 = fk.recipe.DelayedScaling().quantization
    spec = LinearSpec(ProductSpec(16, (8, 4), fp8=fp8))
    good = {"weight0": fk.tensor(np.ones((8, 16), np.float32)), "w_scale": fk.tensor(np.ones(1, np.float32))}
    other = np.ones((5, 16), np.float32)
    for weight, words in ((None, "weight1: got "), (other, r"weight1: got shape \(5, 16\)")):
        inputs = good if weight is None else good | {"weight1": fk.tensor(weight)}
        with pytest.raises(ShapeError, match=f"^weight_cast: {words}"):
            apply(weight_cast, spec, inputs)
