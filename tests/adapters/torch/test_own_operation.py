"""An operation that a user wrote and registered: eagerly, within ``torch.compile``, with gradients."""

from __future__ import annotations

import fp8kit_torch as ft
import pytest
import torch
from fp8kit_torch.library import OPS, text_of

from fp8kit.errors import AutogradError, BackendError, FormatError, ShapeError
from fp8kit.execution.codec import encode
from fp8kit.testing import sum_slack
from tests.support.combinations import combinations
from tests.support.gate import GateSpec, gate
from tests.support.tensors import assert_tensor_close, largest

SPEC = GateSpec(16)


class GatedLinear(torch.nn.Module):
    """The operation between a layer of fp8kit and torch's own work."""

    def __init__(self):
        super().__init__()
        self.linear = ft.Linear(16, 16, device="cpu")
        self.slope = torch.nn.Parameter(torch.linspace(-1, 2, 16))

    def forward(self, x):
        return ft.apply(gate, SPEC, {"x": self.linear(x), "slope": self.slope})["y"].square()


def wanted(x, slope):
    return x * torch.sigmoid(slope * x)


def test_it_is_torchs_own_result_and_gradients():
    x, slope = torch.randn(5, 3, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    y, want = ft.apply(gate, SPEC, {"x": x, "slope": slope})["y"], wanted(x, slope)
    assert_tensor_close("y", y, want, sum_slack(largest(x), 8))  # a product, a sigmoid, a product
    g = torch.randn_like(y)
    dx, dslope = torch.autograd.grad(y, (x, slope), g)
    wanted_dx, wanted_dslope = torch.autograd.grad(want, (x, slope), g)
    each = (g * x * x).abs()  # slope's is a sum over 15 rows
    assert_tensor_close("dx", dx, wanted_dx, sum_slack(largest(g) * (1 + largest(each)), 16))
    assert_tensor_close("dslope", dslope, wanted_dslope, sum_slack(each.sum((0, 1)), 15 + 16))


def test_strides_and_no_gradient():
    x, slope = torch.randn(16, 5).t(), torch.randn(16)
    y = ft.apply(gate, SPEC, {"x": x, "slope": slope, "absent": None})["y"]
    assert not y.requires_grad
    assert_tensor_close("y", y, wanted(x, slope), sum_slack(largest(x), 8))


# inductor compiles C++, for seconds
@combinations(
    {"backend": ["aot_eager", "inductor"], "dynamic": {"static": False, "dynamic": True}},
    usual=["aot_eager-dynamic"],
)
def test_it_compiles_to_the_same_bits(backend, dynamic):
    model, x = GatedLinear(), torch.randn(4, 16, requires_grad=True)
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend=backend)

    def step(run):
        model.zero_grad()
        x.grad = None
        y = run(x)
        y.sum().backward()
        return [y.detach(), x.grad.clone(), *[p.grad.clone() for p in model.parameters()]]

    for got, want in zip(step(compiled), step(model), strict=True):
        assert torch.equal(got, want)


def test_its_errors_name_its_arguments():
    x = torch.ones(2, 16)
    with pytest.raises(ShapeError, match=r"user_gate: a: got shape \(8,\), expected \(16,\)"):
        ft.apply(gate, SPEC, {"x": x, "slope": torch.ones(8)})
    with pytest.raises(FormatError, match=r"user_gate: inp: got float32, expected float16, as a"):
        ft.apply(gate, SPEC, {"x": x, "slope": torch.ones(16, dtype=torch.float16)})
    with pytest.raises(BackendError, match="device meta"):
        ft.apply(gate, SPEC, {"x": x, "slope": torch.ones(16, device="meta")})
    other = torch.ones(1, requires_grad=True)
    with pytest.raises(AutogradError, match="user_gate: no gradient rule for its input 'other'"):
        ft.apply(gate, SPEC, {"x": x, "slope": torch.ones(16), "other": other})


def test_it_passes_torchs_checks_of_ops():
    tensors = [torch.randn(4, 16, requires_grad=True), torch.randn(16, requires_grad=True)]
    text = text_of("user_gate", SPEC, ("x", "slope"), needs=("x", "slope"))
    torch.library.opcheck(OPS["user_gate"].call, (tensors, [], text))


def test_its_spec_is_the_same_in_a_text():
    x, slope = torch.randn(2, 16), torch.randn(16)
    by_text = ft.apply(gate, encode(SPEC), {"x": x, "slope": slope})["y"]
    assert torch.equal(by_text, ft.apply(gate, SPEC, {"x": x, "slope": slope})["y"])
