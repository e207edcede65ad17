"""The custom call itself: IEEE arithmetic, errors, threads, compilation ahead of time, the persistent cache,
export, a clean end."""

from __future__ import annotations

import gc
import json
import os
import threading
from pathlib import Path

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp8kit_jax import calls
from fp8kit_jax.program import Program

from fp8kit.backends import dispatch
from fp8kit.errors import ArgumentError, AutogradError, BackendError
from fp8kit.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, PerLayer
from fp8kit.testing import assert_close, assert_same_bits
from tests.adapters.jax import programs
from tests.support.gate import GateSpec, gate
from tests.support.jax_calls import KEEPING, Plus, PlusSpec, child, keeping, plus

_CURRENT = Float8CurrentScaling()
EXPORTED = DelayedScaling(amax_history_len=4), _CURRENT, PerLayer(_CURRENT, (("two*", None),)), None


def test_a_users_operation_runs_and_subnormals_are_kept():
    tiny = jnp.full((4,), 2e-38, jnp.float32)
    got = jax.jit(lambda x: fj.apply(plus, PlusSpec(0.0), {"x": x})["y"])(tiny)
    np.testing.assert_array_equal(np.asarray(got), np.full(4, np.float32(2e-38) * np.float32(0.5)))
    assert np.asarray(got)[0] > 0
    # XLA's own threads flush still
    np.testing.assert_array_equal(np.asarray(jax.jit(lambda x: x * 0.5)(tiny)), 0)


def test_a_jaxpr_says_what_is_multiplied():
    """By JAX's short names of dtypes, which programs search for to see that they run in FP8."""
    x, w = jnp.ones((32, 64)), jnp.ones((64, 32))

    def step(x, w, recipe):
        with fj.autocast(recipe is not None, recipe):
            return fj.dense(x, w).sum()

    for recipe, forward, backward in (
        (None, "", ""),
        (_CURRENT, "fprop f8_e4m3 * f8_e4m3", "dgrad f8_e5m2 * f8_e4m3, wgrad f8_e5m2 * f8_e4m3"),
        (
            MXFP8BlockScaling(backward_override="high_precision"),
            "fprop f8_e4m3 by f8_e8m0 * f8_e4m3 by f8_e8m0",
            "",
        ),
        (
            NVFP4BlockScaling(True, True),
            "fprop f4_e2m1 by f8_e4m3 * f4_e2m1 by f8_e4m3",
            "dgrad f4_e2m1 by f8_e4m3 * f4_e2m1 by f8_e4m3, wgrad f4_e2m1 by f8_e4m3 * f4_e2m1 by f8_e4m3",
        ),
    ):
        made = jax.make_jaxpr(jax.grad(step, (0, 1)), static_argnums=2)(x, w, recipe)
        found = [eqn.params["program"] for eqn in made.eqns if eqn.primitive.name == "fp8kit_call"]
        ends = [f": {words}" if words else "" for words in (forward, backward)]
        want = [f"linear {face}{end}" for face, end in zip(("forward", "backward"), ends, strict=True)]
        assert list(map(repr, found)) == want
        assert all(f"program={line}" in str(made) for line in want)


def test_a_users_operation_has_gradients_within_jit():
    """Registered once, for every frontend: what JAX gives for the same formula, also in a scan, under vmap
    and by rows over devices."""
    x, a = (
        jnp.asarray(np.random.default_rng(i).standard_normal(s), jnp.float32)
        for i, s in ((0, (16, 8)), (1, 8))
    )

    def own(x, a):
        return fj.apply(gate, GateSpec(8), {"x": x, "slope": a})["y"]

    def plain(x, a):
        return x * jax.nn.sigmoid(a * x)

    def twice(function):
        return lambda x, a: jax.lax.scan(lambda x, _: (function(x, a), None), x, length=2)[0]

    def batched(function):
        return lambda x, a: jax.vmap(function, (0, None))(jnp.stack([x, -x]), a)

    def step(function):
        return jax.value_and_grad(lambda *given: (function(*given) ** 2).sum(), (0, 1))

    for form in (lambda f: f, twice, batched, jax.checkpoint):
        mine, other = step(form(own)), step(form(plain))
        got, want = jax.jit(lambda *given, both=(mine, other): [function(*given) for function in both])(x, a)
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert_close(
                "values",
                np.asarray(one),
                np.asarray(other),
                "float32",
                2.0 ** (-16) + 2.0 ** (-16) * np.abs(np.asarray(other)),
            )
    assert float(jax.grad(lambda a: own(x, a).sum())(a)[0]) != 0
    with pytest.raises(AutogradError, match="test_plus: has no backward, but x requires a gradient"):
        jax.grad(lambda x: fj.apply(plus, PlusSpec(0.0), {"x": x})["y"].sum())(x)


def test_an_operation_that_nobody_registered_is_refused_by_name():
    class Unknown(Plus):
        name = "test_unknown"

    with pytest.raises(
        BackendError, match=r"operation: got 'test_unknown', expected one that register_operation"
    ):
        fj.apply(Unknown(), PlusSpec(0.0), {"x": jnp.ones(3)})


def test_an_error_in_a_handler_is_an_exception_and_nothing_more():
    fails = jax.jit(lambda x: fj.apply(plus, PlusSpec(-1.0), {"x": x})["y"])
    for _ in range(2):
        with pytest.raises(
            jax.errors.JaxRuntimeError, match=r"test_plus: amount: got -1\.0, expected a number >= 0"
        ):
            fails(jnp.ones(3)).block_until_ready()
        np.testing.assert_array_equal(np.asarray(fj.apply(plus, PlusSpec(1.0), {"x": jnp.ones(3)})["y"]), 1.5)


def test_an_exception_that_is_kept_keeps_none_of_xlas_memory():
    """As Numba keeps some, in cycles: with the exception stay the frames above it and all that they hold."""
    got = jax.jit(lambda x: fj.apply(plus, PlusSpec(KEEPING), {"x": x})["y"])(jnp.ones(3))
    np.testing.assert_array_equal(np.asarray(got), KEEPING + 0.5)
    assert keeping.pop().__traceback__.tb_frame.f_back is not None


def test_threads_share_nothing():
    step, (w, sets, x) = programs.example()
    wanted = programs.digest(jax.jit(step)(w, sets, x))
    found, jitted = [], jax.jit(step)

    def work(device):
        for _ in range(10):
            found.append(programs.digest(jitted(*jax.device_put((w, sets, x), device))))

    threads = [threading.Thread(target=work, args=(device,)) for device in jax.devices("cpu")[:2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [wanted] * 20


def test_a_program_is_prepared_once_until_other_kernels_are_registered(monkeypatch):
    prepared, prepare = [], calls.program.prepare

    def counted(text, device):
        prepared.append(device)
        return prepare(text, device)

    monkeypatch.setattr(calls.program, "prepare", counted)
    step, x = jax.jit(lambda x: fj.apply(plus, PlusSpec(0.375), {"x": x})["y"]), jnp.ones(3)
    for count in (1, 2):
        for _ in range(2):
            np.testing.assert_array_equal(np.asarray(step(x)), 0.875)
        assert len(prepared) == count
        dispatch.registry.restore(dispatch.registry.snapshot())


def test_calls_keep_no_memory():
    """Of attributes that are arrays jax-tvm-ffi 0.1.3 keeps 16 bytes for each element, in every call."""
    x, own = jnp.ones((16, 64)), fj.create_set(DelayedScaling(amax_history_len=4), 1)
    grad = jax.jit(jax.grad(lambda w: fj.dense(x, w, quantizer_set=own).sum()))
    kernel = jnp.ones((64, 32))

    def resident():
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    def run(count):
        for _ in range(count):
            grad(kernel).block_until_ready()

    run(200)
    before = resident()
    run(1000)
    # two calls, of some thousand characters each: a byte for each of them would be more than twice as much
    assert resident() - before < 1 << 20


@pytest.mark.parametrize("shape", [(4,), (2, 2), ()])
def test_a_call_of_an_earlier_release_is_refused(shape):
    """Which had the text elsewhere: what comes first is an array of another kind."""
    result = jax.ShapeDtypeStruct((4,), jnp.float32)
    old = jax.jit(lambda x: fj.call(calls.TARGET, result, x, low=np.int64(1), high=np.int64(len(shape))))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"program: got no text, .* another fp8kit"):
        old(jnp.ones(shape)).block_until_ready()


def test_lower_and_compile_ahead_of_time():
    step, args = programs.example()
    lowered = jax.jit(step).lower(*args)
    assert lowered.as_text().count("fp8kit.run") == 2
    assert lowered.as_text() == jax.jit(programs.example()[0]).lower(*args).as_text()
    assert programs.digest(lowered.compile()(*args)) == programs.digest(jax.jit(step)(*args))


@pytest.mark.parametrize("join", [False, True])
def test_an_exported_mlp_runs_with_its_text(join):
    x, k1, k2 = (
        jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)
        for shape in ((16, 32), (32, 1, 48), (48, 32))
    )

    def step(x):
        y, back = jax.vjp(
            lambda x: fj.layernorm_mlp(
                x, jnp.ones(32), None, (k1, k2), norm_type="rmsnorm", join_residual=join
            ),
            x,
        )
        return y, back(y)[0]

    exported = fj.export(jax.jit(step))(x)
    for got, want in zip(jax.jit(exported.call)(x), jax.jit(step)(x), strict=True):
        assert_same_bits("exported", np.asarray(got), np.asarray(want))


def test_a_text_of_before_means_the_defaults(monkeypatch):
    x, kernels = (
        jnp.linspace(-1, 1, 512).reshape(16, 32),
        (jnp.ones((32, 1, 48)) / 32, jnp.ones((48, 32)) / 48),
    )
    want = fj.layernorm_mlp(x, jnp.ones(32), None, kernels, norm_type="rmsnorm")
    taken, text = [], Program.text

    def before(program, scratch):
        whole = json.loads(text(program, scratch))
        found = json.loads(whole["program"])
        taken.append(found[2].pop("fused_residual"))
        return json.dumps(whole | {"program": json.dumps(found)})

    monkeypatch.setattr(Program, "text", before)
    got = jax.jit(lambda x: fj.layernorm_mlp(x, jnp.ones(32), None, kernels, norm_type="rmsnorm"))(x)
    assert taken == [False]
    assert_same_bits("y", np.asarray(got), np.asarray(want))


@pytest.mark.programs
def test_the_persistent_cache_serves_another_process(tmp_path):
    env = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    first = child("run", **env)
    entries = {path.name for path in tmp_path.iterdir() if not path.name.endswith("-atime")}
    assert any("step" in name for name in entries)
    assert child("run", **env) == first
    assert {path.name for path in tmp_path.iterdir() if not path.name.endswith("-atime")} == entries


@pytest.mark.programs
def test_a_saved_program_runs_where_it_was_never_traced(tmp_path):
    path = str(tmp_path / "step")
    assert child("save", path, XLA_FLAGS="") == child("load", path, XLA_FLAGS="")


@pytest.mark.programs
def test_an_exported_model_in_another_process(tmp_path):
    path = tmp_path / "exported"
    assert child("write", path, XLA_FLAGS="") == child("read", path, XLA_FLAGS="")


@pytest.mark.parametrize("recipe", EXPORTED, ids=["delayed", "current", "by layer", "high"])
def test_a_set_is_an_argument_of_an_exported_program(recipe):
    """Its form, recipe and names included, is that of before; so is what the program computes."""
    arguments = fj.create_set(recipe), jnp.ones((16, 32)), jnp.ones((32, 48))

    @jax.jit
    def step(quantizers, x, kernel):
        return jax.grad(lambda own: fj.dense(x, kernel, quantizer_set=own, name="one").sum())(quantizers)

    exported = fj.export(step)(*arguments)
    again = jax.export.deserialize(exported.serialize())
    assert (again.in_tree, again.out_tree) == (exported.in_tree, exported.out_tree)
    got, want = again.call(*arguments), step(*arguments)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert programs.digest(got) == programs.digest(want)


def test_what_cannot_be_exported():
    x = jnp.ones((4, 8))
    with pytest.raises(ArgumentError, match=r"export: function: got .*, expected what jax\.jit returns"):
        fj.export(fj.dense)
    with pytest.raises(ValueError, match="custom calls whose targets have no compatibility guarantees"):
        jax.export.export(jax.jit(fj.dense))(x, x.T)


@pytest.mark.programs
@pytest.mark.parametrize("program", ["leave", "leave_slow", "leave_held", "leave_in_a_thread"])
def test_a_program_may_end_with_calls_in_flight(program):
    assert child(program, XLA_FLAGS="--xla_force_host_platform_device_count=8") == "left"


def test_an_error_in_a_handler_leaves_gradients_other_threads_and_the_process_alone():
    """The state of a failed step is that of before; a step in another thread, and the next one here, give
    what they gave."""
    step, args = programs.example()
    jitted = jax.jit(step)
    wanted = programs.digest(jitted(*args))
    fails = jax.jit(lambda x: fj.apply(plus, PlusSpec(-2.0), {"x": x})["y"].sum())
    found = []
    thread = threading.Thread(target=lambda: found.extend(programs.digest(jitted(*args)) for _ in range(10)))
    thread.start()
    for _ in range(10):
        with pytest.raises(jax.errors.JaxRuntimeError, match="test_plus"):
            fails(jnp.ones(3)).block_until_ready()
    thread.join()
    assert found == [wanted] * 10
    assert programs.digest(jitted(*args)) == wanted


@pytest.mark.programs
def test_a_program_that_failed_ends_cleanly():
    assert child("fail", XLA_FLAGS="") == "failed, and went on: 1.5"
