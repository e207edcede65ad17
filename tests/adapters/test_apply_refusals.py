"""What ``apply`` says to malformed arguments, in each frontend, before anything runs."""

from __future__ import annotations

import fp8kit_jax as fj
import fp8kit_torch as ft
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from fp8kit_torch.library import OPS

import fp8kit as fk
from fp8kit.autograd import apply
from fp8kit.errors import ArgumentError, FormatError, ShapeError
from fp8kit.execution import plans
from fp8kit.formats import float32
from fp8kit.ops import registry
from fp8kit.ops.dropout_add import AddSpec, add
from fp8kit.ops.linear import LinearSpec, weight_cast
from fp8kit.ops.product import ProductSpec
from fp8kit.spec import Meta, Operation, Signature
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
    "left out": ({"x": True}, ShapeError, "{slope}: missing, expected an array as 'slope'; given: 'x'"),
    "none": ({"x": True, "slope": None}, ShapeError, "{slope}: missing, expected an array"),
    "all none": ({"x": None, "slope": None}, ShapeError, "x: missing, expected an array; given: none"),
    "empty": ({}, ShapeError, "x: missing, expected an array; given: none"),
    "misspelt": ({"x": True, "slop": True}, ShapeError, "{slope}: missing, expected an array"),
    "one more": (
        {"x": True, "slope": True, "slopes": True},
        ArgumentError,
        "slopes: got an array, expected one of the inputs that infer looks at: slope, x; did you mean slope?",
    ),
    "a text": ({"x": "ones", "slope": True}, (ArgumentError, FormatError), "x: got 'ones', expected a"),
    "no dict": ([X, SLOPE], ArgumentError, "inputs: got "),
}
SPECS = {
    "another's": (gate, AddSpec(), "got AddSpec(), expected an instance of GateSpec"),
    "none": (gate, None, "got None, expected an instance of GateSpec"),
    "a dict": (gate, {"features": 16}, "got {'features': 16}, expected an instance of GateSpec"),
    "its class": (gate, GateSpec, "got <class 'tests.support.gate.GateSpec'>, expected an instance of Gate"),
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


@pytest.mark.parametrize("name", ["native", "torch"])
def test_a_spec_of_what_is_not_registered(name):
    """Without an annotation, too: it lacks what is read of it, or is a class."""

    class Own(Gate):
        name = "unregistered_gate"

    run, make, _ = FRONTENDS[name]
    inputs = {"x": make(X), "slope": make(SLOPE)}
    for spec, words in ((AddSpec(), "which has 'features'"), (GateSpec, "an instance of the spec's class")):
        with pytest.raises(ArgumentError, match=f"^unregistered_gate: spec: got .*{words}"):
            run(Own(), spec, inputs)


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


def test_an_operation_that_answers_nothing_is_told_so_first():
    """Not that the inputs, of which its ``infer`` has looked at none, are unknown."""

    class Silent(Gate):
        name = "silent_gate"

        def infer(self, spec, metas, needs):
            return None

    with pytest.raises(ArgumentError, match="infer: got None, expected a Signature"):
        apply(Silent(), SPEC, {"x": fk.tensor(X), "slope": fk.tensor(SLOPE)})


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
    for weight, words in ((None, "weight1: missing, "), (other, r"weight1: got shape \(5, 16\)")):
        inputs = good if weight is None else good | {"weight1": fk.tensor(weight)}
        with pytest.raises(ShapeError, match=f"^weight_cast: {words}"):
            apply(weight_cast, spec, inputs)


M = Meta((2, 16), float32)
# what an operation's author may have written: signature, the operation's attributes, the error's words
MISTAKES = {
    "nothing": (None, {}, "infer: got None, expected a Signature"),
    "a dict": ({"y": M}, {}, "infer: got {'y': Meta"),
    "outputs undeclared": (
        Signature({"a": M, "b": M}),
        {},
        r"results: got \('y',\), expected \('a', 'b'\), as infer says: declare `results = .*` in Own",
    ),
    "another order": (Signature({"a": M, "b": M}), {"results": ("b", "a")}, r"results: got \('b', 'a'\)"),
    "a pass undeclared": (
        Signature({"y": M}, passes={"z": "x"}),
        {},
        r"results: got .*, expected \('y', 'z'\)",
    ),
    "an output without dtype": (Signature({"y": (2, 16)}), {}, r"outputs: got 'y': \(2, 16\), expected Meta"),
    "saved as a tuple": (Signature({"y": M}, ("x",)), {}, r"saved: got \('x',\), expected a dict"),
    "kept misspelt": (Signature({"y": M}, kept=("slop",)), {}, "kept: got 'slop', .*did you mean slope"),
    "kept a text": (Signature({"y": M}, kept="slope"), {}, "kept: got 'slope', expected a tuple"),
    "a pass of nothing": (
        Signature({"y": M}, passes={"z": "xs"}),
        {"results": ("y", "z")},
        "passes: got 'xs'",
    ),
    "a gradient of nothing": (Signature({"y": M}, grad_passes={"xs": "y"}), {}, "grad_passes: got 'xs'"),
    "a gradient that is none": (Signature({"y": M}, grad_passes={"x": "z"}), {}, "grad_passes: got 'z'"),
    "a gradient's shape": (
        Signature({"y": M}, grads={"x": Meta((16, 2), float32)}),
        {},
        r"grads: got shape \(16, 2\) of 'x', expected \(2, 16\)",
    ),
}


@pytest.fixture
def registered():
    """Registers an operation with the spec of ``gate`` for this test alone."""
    before = dict(registry.OPERATIONS)
    yield lambda operation: fk.register_operation(operation, GateSpec)
    for name in registry.OPERATIONS.keys() - before:
        del registry.OPERATIONS[name]
        OPS.pop(name, None)


@pytest.mark.parametrize("name", FRONTENDS)
@pytest.mark.parametrize("case", MISTAKES)
def test_what_an_operation_says_of_itself(name, case, registered):
    """Found before forward runs, in each frontend, and named with what to change."""
    answer, attributes, words = MISTAKES[case]

    class Own(Gate):
        def infer(self, spec, metas, needs):
            assert metas["x"] == M
            assert "slope" in metas
            return answer

        def forward(self, plan, ws):
            raise AssertionError("it ran")

    Own.name = f"own_{name}_{list(MISTAKES).index(case)}"
    for attribute, value in attributes.items():
        setattr(Own, attribute, value)
    run, make, _ = FRONTENDS[name]
    operation = registered(Own())
    with pytest.raises(ArgumentError, match=f"^{Own.name}: {words}") as caught:
        run(operation, SPEC, {"x": make(X), "slope": make(SLOPE)})
    assert caught.value.operation == Own.name


def test_several_outputs_within_compile(registered):
    """They come by their names, as eagerly; an operation that declares too few is refused."""

    class Two(Gate):
        name = "two_gates"
        results = ("a", "b")

        def infer(self, spec, metas, needs):
            return Signature({"a": metas["x"], "b": metas["slope"]})

        def forward(self, plan, ws):
            ws.outputs["a"].numpy()[...] = ws.inputs["x"].numpy() + 1
            ws.outputs["b"].numpy()[...] = ws.inputs["slope"].numpy() + 2

    class One(Two):
        name = "one_gate"
        results = ("y",)

    inputs = {"x": torch.tensor(X), "slope": torch.tensor(SLOPE)}
    two, one = registered(Two()), registered(One())
    for run in (ft.apply, torch.compile(ft.apply, fullgraph=True, backend="eager")):
        found = run(two, SPEC, inputs)
        assert {name: t.flatten()[0].item() for name, t in found.items()} == {"a": 2.0, "b": 3.0}
        with pytest.raises(Exception, match=r"one_gate: results: got \('y',\), expected \('a', 'b'\)"):
            run(one, SPEC, inputs)


def test_what_cannot_be_compiled_says_why():
    class Own(Gate):
        name = "unregistered_gate"

    inputs, run = (
        {"x": torch.tensor(X), "slope": torch.tensor(SLOPE)},
        torch.compile(ft.apply, fullgraph=True),
    )
    with pytest.raises(Exception, match=r"unregistered_gate: not registered.*operation, GateSpec\)"):
        run(Own(), SPEC, inputs)
    for spec in (AddSpec(), {"features": 16}, GateSpec):
        with pytest.raises(Exception, match=r"user_gate: spec: got .*, expected an instance of GateSpec"):
            run(gate, spec, inputs)


class NoInfer(Operation):
    name = "no_infer"

    def forward(self, plan, ws):
        raise AssertionError("it ran")


@pytest.mark.parametrize(
    ("kind", "attributes", "words"),
    [
        (NoInfer, {}, "operation: got NoInfer without infer, expected a class that has infer and forward"),
        (Gate, {"forward": Operation.forward}, "operation: got Own without forward"),
        (Gate, {"name": "my gate"}, "name: got 'my gate', expected letters"),
        (Gate, {"results": "y"}, "results: got 'y', expected a tuple of names"),
        (Gate, {"parameters": ("slope", 1)}, "parameters: got .*, expected a tuple of names"),
        (Gate, {"mutates": "x"}, "mutates: got 'x', expected a tuple of names"),
        (Gate, {"arguments": ("a",)}, r"arguments: got \('a',\), expected a dict"),
    ],
)
def test_what_is_registered(kind, attributes, words):
    own = kind if not attributes else type("Own", (kind,), {"name": "own_gate", **attributes})
    before = set(registry.OPERATIONS)
    with pytest.raises(ArgumentError, match=f"^register_operation: {words}"):
        fk.register_operation(own(), GateSpec)
    assert set(registry.OPERATIONS) == before
