"""``norm_mlp`` in three stages, so that devices can share the amaxes of what lies between its products.

Norm and first product are ``norm_linear``, the second product is ``linear``, with x as its residual where x
joins y; between them ``BiasedActivation`` calls the kernel that ``norm_mlp`` calls there, with the same
buffers. The stages keep what ``norm_mlp`` keeps under the same names, and give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fp8kit.backends.activation import ACTIVATIONS
from fp8kit.formats import float32, uint8
from fp8kit.ops.linear import LinearSpec
from fp8kit.ops.norm_linear import NormLinearSpec
from fp8kit.ops.product import row_count, want_rows
from fp8kit.spec import Meta, Metas, Operation, Plan, Signature, Views
from fp8kit_jax.amaxes import AMAX, amax_of, with_amaxes
from fp8kit_jax.program import Program, register_operation

Arrays = dict[str, Any]
Bind = Callable[..., Any]


@dataclass(frozen=True)
class BiasedActivationSpec:
    """``activation``, ``params``: see ``ActivationSpec``; ``features`` of the input, of a gated one twice the
    output's."""

    activation: str
    features: int
    params: tuple[float, ...]


class BiasedActivation(Operation):
    """y = activation(x + bias0), and the amax of y; the gradients of x and bias0, and the amax of x's. x h
    (M, F), bias0 h (F,) or None."""

    name = "fp8kit_jax_biased_activation"

    def infer(self, spec: BiasedActivationSpec, metas: Metas, needs: frozenset[str]) -> Signature:
        x = want_rows(self.name, "x", metas, spec.features)
        amax = Meta((1,), float32, zero=True)
        y = Meta((row_count(x), spec.features // ACTIVATIONS[spec.activation].parts), x.dtype)
        grads = {"x": x, "amax": amax} if "x" in needs else {}
        if "bias0" in needs:
            grads["bias0"] = Meta((spec.features,), x.dtype)
        kept = ("x", "bias0") if metas.get("bias0") is not None else ("x",)
        return Signature({"y": y, "amax": amax}, {}, kept, grads)

    def plan(self, spec: BiasedActivationSpec, metas: Metas, needs: frozenset[str], kernels: Any) -> Plan:
        x = want_rows(self.name, "x", metas, spec.features)
        space = {"workspace": Meta((max(kernels.act_bwd_workspace(row_count(x), spec.features), 1),), uint8)}
        return Plan(spec, self.infer(spec, metas, needs), kernels, {}, space)

    def forward(
        self, plan: Plan, inputs: Views, outputs: Views, saved: Views, scratch: Views, stream: int
    ) -> None:
        s, out = plan.spec, (outputs["y"], outputs["amax"])
        plan.kernels.act_fwd(inputs["x"], inputs.get("bias0"), *out, None, s.activation, s.params, stream)

    def backward(
        self,
        plan: Plan,
        kept: Views,
        saved: Views,
        cotangents: Views,
        grads: Views,
        scratch: Views,
        stream: int,
    ) -> None:
        s, out = plan.spec, (grads["x"], grads.get("bias0"), grads["amax"])
        given = (cotangents["y"], kept["x"], kept.get("bias0"))
        plan.kernels.act_bwd(*given, *out, None, s.activation, s.params, scratch["workspace"], stream)


register_operation(biased_activation := BiasedActivation(), BiasedActivationSpec)


def run(
    program: Program, have: Arrays, amaxes: Mapping[str, Any], reduced: Callable[[Any], Any], bind: Bind
) -> list[Any]:
    """The results of a ``norm_mlp`` program with current scaling. ``have``: its arguments by name;
    ``amaxes``: those that are known before any product, reduced; ``reduced(amax)``: the largest of all
    devices."""
    found = (
        _forward(program, have, amaxes, reduced, bind)
        if program.face == "forward"
        else _backward(program, have, reduced, bind)
    )
    return [found[name].reshape(shape) for name, shape in program.seen("results")]


def _stages(program: Program, face: str) -> tuple[Program, Program, Program]:
    """The programs of the three stages."""
    s, metas, needs, views = program.spec, dict(program.metas), set(program.needs), dict(program.views)
    x = metas["x"]
    above = needs & {"x", *s.norm.inputs()}
    reach = bool(above or needs & {"fc1_weight0", "fc1_bias0"})
    rows = row_count(x)

    def of(
        operation: str, spec: Any, inputs: Mapping[str, Meta | None], wanted: set[str], known: str = ""
    ) -> Program:
        amax = {f"{known}{name}_amax_in": AMAX for name in "xw"} if known else {}
        given = tuple((name, meta) for name, meta in (inputs | amax).items() if meta is not None)
        own = tuple((name, shape) for name, shape in views.items() if name in inputs)
        return Program(face, operation, spec, given, tuple(sorted(wanted)), policy=program.policy, views=own)

    fc1, fc2 = with_amaxes(s.fc1), with_amaxes(s.fc2)
    norms = {name: metas[name] for name in ("x", *s.norm.inputs())}
    first = of(
        "norm_linear",
        NormLinearSpec(s.norm, fc1, s.residual or s.joins, s.return_norm),
        norms | {name: metas.get(name) for name in ("fc1_weight0", "fc1_bias0")},
        above | (needs & {"fc1_weight0"}),
        "fc1_",
    )
    act = of(
        biased_activation.name,
        BiasedActivationSpec(s.activation, s.fc1.out_features, s.activation_params),
        {"x": Meta((rows, s.fc1.out_features), x.dtype), "bias0": metas.get("fc1_bias0")},
        ({"x"} if reach else set()) | ({"bias0"} if "fc1_bias0" in needs else set()),
    )
    joined = {"residual": Meta((rows, s.fc2.out_features), x.dtype)} if s.joins else {}
    second = of(
        "linear",
        LinearSpec(fc2),
        {"x": Meta((rows, s.fc2.in_features), x.dtype)}
        | {name: metas.get(name) for name in ("fc2_weight0", "fc2_bias0")}
        | joined,
        {name for name in needs if name.startswith("fc2_")} | ({"x"} if reach else set()),
        "fc2_",
    )
    return first, act, second


def _bound(program: Program, have: Mapping[str, Any], bind: Bind) -> Arrays:
    """A stage's results by name, from arguments by name."""
    given = [have[name].reshape(shape) for name, shape in program.seen("arguments")]
    return {
        name: result for (name, _), result in zip(program.results, bind(*given, program=program), strict=True)
    }


def _forward(
    program: Program, have: Arrays, amaxes: Mapping[str, Any], reduced: Callable[[Any], Any], bind: Bind
) -> Arrays:
    first, act, second = _stages(program, "forward")
    have = have | {f"{name}_in": amax for name, amax in amaxes.items()}
    h = _bound(first, have, bind)
    between = _bound(act, {"x": h["y"], "bias0": have.get("fc1_bias0")}, bind)
    have["fc2_x_amax_in"] = reduced(between["amax"])
    y = _bound(second, have | {"x": between["y"], "residual": have["x"]}, bind)
    return h | {"h": h["y"]} | y | amaxes | {"fc2_x_amax": have["fc2_x_amax_in"]}


def _backward(program: Program, have: Arrays, reduced: Callable[[Any], Any], bind: Bind) -> Arrays:
    first, act, second = _stages(program, "backward")
    second = replace(second, late=("fc2_g_amax_in",), cotangents=("y",))
    found = {"fc2_g_amax": reduced(amax_of(have["y"]))}
    upper = _bound(second, have | {"fc2_g_amax_in": found["fc2_g_amax"]}, bind)
    found |= {name: upper[name] for name in upper if name.startswith("fc2_") and name != "fc2_g_amax"}
    if "x" not in upper:
        return found
    between = _bound(
        replace(act, cotangents=("y",)),
        {"x": have["h"], "bias0": have.get("fc1_bias0"), "y": upper["x"]},
        bind,
    )
    if "bias0" in between:
        found["fc1_bias0"] = between["bias0"]
    if not first.needs:
        return found
    found["fc1_g_amax"] = reduced(between["amax"])
    have = have | {"residual": have["y"]} if program.spec.joins else have
    beside = tuple(name for name in ("normed", "residual") if name in have)
    first = replace(first, late=("fc1_g_amax_in",), cotangents=("y", *beside))
    lower = _bound(first, have | {"fc1_g_amax_in": found["fc1_g_amax"], "y": between["x"]}, bind)
    return lower | found
