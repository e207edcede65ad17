"""From a policy to what runs: kernels, dtypes, devices, switches, workspaces, engines of plugins."""

from __future__ import annotations

import functools
import logging
from typing import Any

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import arrays, formats
from fp8kit.arrays import CPU, Device
from fp8kit.backends import dispatch, manager
from fp8kit.backends.reference import IMPLEMENTATIONS
from fp8kit.errors import BackendError
from fp8kit.lab.verify import reference
from fp8kit.plugins import (
    KERNELS,
    SERVES,
    CannotTake,
    Kind,
    OpImpl,
    OpManager,
    SelectionPolicy,
    explain,
    get_policy,
    listing,
    policy_context,
    registry,
    with_allowed_vendors,
    with_denied_vendors,
    with_preference,
    with_strict_mode,
)
from fp8kit.testing import assert_same_bits
from tests.support.engines import Engine, refusing


def total(dtype: str = "float32") -> Any:
    x = fk.tensor(np.ones((2, 3), np.float32), device=CPU, dtype=dtype)
    return (x + x).numpy().astype(np.float32)[0, 0]


def ids(op: str = "add", device: Device = CPU) -> list[str]:
    return [impl.impl_id for impl in dispatch.candidates(op, device)[0]]


def why(op: str = "add", device: Device = CPU) -> dict[str, str]:
    return {impl.impl_id: reason for impl, reason in dispatch.candidates(op, device)[1]}


@pytest.fixture(autouse=True)
def _say_again() -> None:
    manager._SAID.clear()


def test_kinds_vendors_and_order() -> None:
    for engine in (
        Engine("plain", ["add"]),
        Engine("acme", ["add"], Kind.VENDOR),
        Engine("other", ["add"], Kind.VENDOR, priority=120),
    ):
        registry.register_many(engine.impls)
    assert ids() == ["other.add", "acme.add", "plain.add", "reference.add"]
    with with_preference("default"):
        assert ids() == ["plain.add", "other.add", "acme.add", "reference.add"]
    with with_preference("reference"):
        assert ids() == ["reference.add", "plain.add", "other.add", "acme.add"]
    with with_denied_vendors("OTHER"):
        assert ids() == ["acme.add", "plain.add", "reference.add"]
        assert why()["other.add"] == "vendor 'other' is denied"
    with with_allowed_vendors("other"):
        assert ids() == ["other.add", "plain.add", "reference.add"]
        assert why()["acme.add"] == "vendor 'acme' is not among the allowed"
    with policy_context(SelectionPolicy(per_op=(("add", ("impl:plain.add", "vendor:acme", "vendor")),))):
        assert ids() == ["plain.add", "acme.add", "other.add"]
        assert why()["reference.add"] == "not named by per_op"
        assert ids("copy") == ["reference.copy"]
    with (
        policy_context(SelectionPolicy(per_op=(("add", ("impl:nobody.add",)),))),
        pytest.raises(BackendError, match=r"add: array: got device cpu.*plain\.add: not named by per_op"),
    ):
        dispatch.kernels(CPU)


def test_every_kernel_can_be_anothers_and_every_workspace_is_large_enough() -> None:
    """Layers, optimisers and casts of every recipe, all of whose kernels an engine of its own takes, give the
    same bits."""

    def everything() -> list[Any]:
        fk.manual_seed(3)
        layer = fk.nn.TransformerLayer(
            32, 64, 2, device="cpu", hidden_dropout=0.1, attention_dropout=0.1, drop_path_rate=0.2
        )
        mlp = fk.nn.LayerNormMLP(32, 48, activation="swiglu", normalization="RMSNorm", device="cpu")
        frozen = fk.nn.Linear(32, 32, device="cpu")
        frozen.weight.requires_grad = False
        table = fk.nn.Embedding(11, 32, device="cpu")
        model = fk.nn.Sequential(table, layer, frozen, mlp)
        optimizer = fk.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        out = []
        for recipe in (
            None,
            fk.recipe.DelayedScaling(),
            fk.recipe.Float8CurrentScaling(),
            fk.recipe.Float8BlockScaling(),
        ):
            ids_ = np.random.default_rng(0).integers(0, 11, (16, 2))
            with fk.autocast(enabled=recipe is not None, recipe=recipe):
                y = model(fk.tensor(ids_, device="cpu"))
            y.backward(y.detach())
            fk.optim.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
            optimizer.step()
            optimizer.zero_grad()
            out.append(y.numpy())
        q = fk.quantize(out[0].reshape(32, 32), fk.E4M3, scaling="block_1x128")
        return [*out, q @ q.T, q.dequantize(), *(p.numpy() for p in model.parameters())]

    want = everything()
    engine = Engine("own", wants=1 << 16)
    registry.register_many(engine.impls)
    got = everything()
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_same_bits(f"value {i}", np.asarray(a), np.asarray(b))
    used = {name for name, count in engine.calls.items() if count}
    assert {
        "quantize",
        "dequantize",
        "quantize_transpose",
        "block_quantize",
        "scale_from_amax",
        "update_delayed_",
        "amax",
    } <= used
    assert {
        "gemm",
        "fp8_gemm",
        "block_gemm",
        "norm_fwd",
        "norm_bwd",
        "attention_fwd",
        "attention_bwd",
        "adamw_",
        "drop_path",
    } <= used
    with fk.use_backend("own"):
        assert {ids(name)[0] for name in KERNELS} == {f"own.{name}" for name in KERNELS}


def test_supported_dtypes_move_on_call_by_call(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine("half", ["add", "l2norm", "scale_"], supported_dtypes=frozenset({"bfloat16"}))
    registry.register_many(engine.impls)
    for _ in range(3):
        assert (total("float32"), total("bfloat16")) == (2, 2)
    assert engine.calls == {"add": 3}
    assert caplog.messages == [
        (
            "add: half.add cannot take the call (dtype float32 of a is not among bfloat16); "
            "reference.add is asked"
        )
    ]
    many = [arrays.as_view(np.ones(4, np.float32)), arrays.as_view(np.ones(2, np.float32))]
    out = arrays.zeros((1,), formats.float32, CPU)
    dispatch.kernels(CPU).l2norm(many, out, None, 0)  # the first array of a sequence
    dispatch.kernels(CPU).l2norm(xs=many, out=out, workspace=None, stream=0)
    dispatch.kernels(CPU).l2norm([], out, None, 0)
    assert engine.calls == {"add": 3, "l2norm": 1}
    said = (
        r"add: half\.add cannot take the call \(dtype float32 of a is not among bfloat16\), "
        r"and the policy is strict"
    )
    with with_strict_mode(), pytest.raises(CannotTake, match=said):
        total("float32")


def test_arch_and_availability(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    both = frozenset({"cpu", "cuda"})
    for name, arch in (("new", 100), ("old", 80)):
        registry.register_many(Engine(name, ["add"], min_arch=arch, devices=both).impls)
    registry.register_many(Engine("past", ["add"], max_arch=80, devices=both).impls)
    gone = Engine("gone", ["add"], devices=both).impls[0]
    gone.fn._is_available = lambda: False  # type: ignore[attr-defined]
    registry.register_impl(gone)
    every = ["new.add", "old.add", "past.add", "reference.add"]
    assert ids() == every, "a CPU has no compute capability"
    provider = arrays.provider(Device("cuda"))
    monkeypatch.setattr(provider, "count", lambda: 1, raising=False)
    monkeypatch.setattr(provider, "arch", lambda device: 90, raising=False)
    assert ids(device=Device("cuda")) == ["cuda.add", "old.add"]
    assert why(device=Device("cuda"))["new.add"] == "needs compute capability 10.0, cuda:0 has 9.0"
    past = "is for compute capability 8.0 at most, cuda:0 has 9.0"
    assert why(device=Device("cuda"))["past.add"] == past
    dispatch.kernels(Device("cuda"))
    assert (
        "add: new.add is left out on cuda:0: needs compute capability 10.0, cuda:0 has 9.0" in caplog.messages
    )
    assert (
        "add: gone.add is left out on cuda:0: not available: its _is_available() says so" in caplog.messages
    )
    monkeypatch.setattr(provider, "arch", lambda device: 75, raising=False)
    assert ids(device=Device("cuda")) == ["past.add"]
    assert why(device=Device("cuda"))["cuda.add"] == "needs compute capability 8.0, cuda:0 has 7.5"
    monkeypatch.setattr(provider, "count", lambda: 0, raising=False)
    with pytest.raises(BackendError, match="device: cuda:0 is not usable, 0 cuda devices are"):
        dispatch.candidates("add", Device("cuda"))


def test_switches_are_for_cannot_take_alone_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    registry.register_impl(refusing("add", "too small"))
    assert [total(), total()] == [2, 2]
    assert caplog.messages == ["add: shy.add cannot take the call (too small); reference.add is asked"]
    with with_strict_mode(), pytest.raises(CannotTake, match="too small"):
        total()

    def add(a: Any, b: Any, out: Any, stream: int) -> None:
        raise BackendError("a fault")

    registry.register_impl(OpImpl("add", "faulty.add", Kind.DEFAULT, add, priority=1000))
    with pytest.raises(BackendError, match="a fault"):
        total()
    alone = policy_context(SelectionPolicy(per_op=(("add", ("impl:shy.add",)),)))
    with alone, pytest.raises(CannotTake, match=r"^add: shy\.add cannot take the call \(too small\)$"):
        total()
    registry.register_impl(refusing("add", "too large", "shyer"))
    both = policy_context(SelectionPolicy(per_op=(("add", ("impl:shy.add", "impl:shyer.add")),)))
    with (
        both,
        pytest.raises(
            CannotTake, match=r"^add: shyer\.add cannot take the call \(too large\), nor can shy\.add$"
        ),
    ):
        total()


def test_a_workspace_goes_with_its_kernel() -> None:
    """The size is that of whoever may take the call: the largest of them, and of nobody else."""
    kernels = dispatch.kernels
    assert kernels(CPU).norm_bwd_workspace(4, 8) == 0
    registry.register_impl(Engine("idle", ["norm_bwd_workspace"], wants=7000).impls[0])
    assert kernels(CPU).norm_bwd_workspace(4, 8) == 0, "its engine has no norm_bwd"
    assert why("norm_bwd_workspace")["idle.norm_bwd_workspace"] == "its engine takes none of norm_bwd here"
    registry.register_many(Engine("big", ["norm_bwd", "norm_bwd_workspace"], wants=500).impls)
    registry.register_many(Engine("bigger", ["norm_bwd", "norm_bwd_workspace"], wants=900, priority=10).impls)
    assert kernels(CPU).norm_bwd_workspace(4, 8) == 900, "a call may fall through to it"
    assert ids("norm_bwd_workspace") == [
        f"{name}.norm_bwd_workspace" for name in ("big", "reference", "bigger")
    ]
    with with_strict_mode():
        assert kernels(CPU).norm_bwd_workspace(4, 8) == 500, "strict: nobody else is asked"
    with with_strict_mode(), with_preference("reference"):
        assert kernels(CPU).norm_bwd_workspace(4, 8) == 0
    override = Engine("mine", ["norm_bwd"]).impls[0]
    with policy_context(SelectionPolicy(overrides=(("norm_bwd", override),))):
        assert kernels(CPU).norm_bwd_workspace(4, 8) == 900, "an override may hand its call on"
    measure = Engine("mine", ["norm_bwd_workspace"], wants=1200).impls[0]
    with policy_context(SelectionPolicy(overrides=(("norm_bwd", override), ("norm_bwd_workspace", measure)))):
        assert kernels(CPU).norm_bwd_workspace(4, 8) == 1200
    registry.register_impl(Engine("bare", ["sum_rows"], Kind.VENDOR).impls[0])
    order = (("sum_rows", ("vendor:bare",)), ("dropout_bwd", ("reference",)))
    with policy_context(SelectionPolicy(strict=True, per_op=order)):
        assert ids("column_sum_workspace") == ["reference.column_sum_workspace"]
    with policy_context(
        SelectionPolicy(strict=True, backend="bare", per_op=(("norm_bwd", ("impl:big.norm_bwd",)),))
    ):
        assert kernels(CPU).norm_bwd_workspace(4, 8) == 500


def test_no_implementation_that_measures_is_no_bytes() -> None:
    own = OpManager()
    own.registry.register_many(Engine("x", [name for name in KERNELS if name not in SERVES]).impls)
    with policy_context(SelectionPolicy(strict=True, prefer="default")):
        found = own.kernels(CPU)
    assert [getattr(found, name)() for name in SERVES] == [0] * len(SERVES)


def test_an_engine_of_a_plugin() -> None:
    engine = Engine("acme", ["add", "gemm"], Kind.REFERENCE, priority=1)
    registry.register_many(engine.impls)
    registry.register_many(Engine("gpu", ["add"], devices=frozenset({"cuda"})).impls)
    assert dispatch.engines() == {"reference": "cpu", "cuda": "cuda", "acme": "cpu", "gpu": "cuda"}
    assert ids()[0] == "reference.add"
    with fk.use_backend("acme"):
        assert dispatch.default_device() == CPU
        assert (ids()[0], ids("gemm")[0], ids("copy")[0]) == ("acme.add", "acme.gemm", "reference.copy")
        assert total() == 2
        with pytest.raises(
            BackendError, match=r"device cuda:0.*use_backend\('acme'\) is in force, which serves cpu"
        ):
            dispatch.kernels(Device("cuda"))
    assert engine.calls == {"add": 1}
    gpu = policy_context(SelectionPolicy(backend="gpu"))
    with (
        gpu,
        pytest.raises(BackendError, match=r"device cpu.*use_backend\('gpu'\) is in force, which serves cuda"),
    ):
        dispatch.kernels(CPU)
    with fk.use_backend("reference"):
        assert ids() == ["reference.add"]
        assert why()["acme.add"] == "use_backend('reference') is in force"
    with pytest.raises(
        BackendError, match="use_backend: name: got 'nobody', expected one of reference, cuda, acme, gpu"
    ):
        fk.use_backend("nobody")
    with (
        policy_context(SelectionPolicy(backend="nobody")),
        pytest.raises(BackendError, match="no implementation has that engine"),
    ):
        dispatch.kernels(CPU)


def test_default_device_of_an_engine_of_a_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.register_many(Engine("gpu", ["add"], devices=frozenset({"cuda"})).impls)
    registry.register_many(Engine("both", ["add"], devices=frozenset({"cuda", "cpu"})).impls)
    monkeypatch.setattr(arrays, "available", lambda kind: kind == "cpu")
    with pytest.raises(
        BackendError,
        match="use_backend: name: got 'gpu', expected an engine whose device is here: no CUDA device",
    ):
        fk.use_backend("gpu")
    gpu = policy_context(SelectionPolicy(backend="gpu"))
    with gpu, pytest.raises(BackendError, match="one of the engine's devices usable here: cuda"):
        dispatch.default_device()
    with fk.use_backend("both"):
        assert dispatch.default_device() == CPU
        monkeypatch.setattr(arrays, "available", lambda kind: True)
        assert dispatch.default_device() == Device("cuda")
        monkeypatch.setenv("FP8KIT_DEVICE", "cpu")
        assert dispatch.default_device() == CPU


def test_a_plan_keeps_its_implementations_for_backward() -> None:
    """What forward was planned with runs backward, whatever is in force or registered by then."""
    engine = Engine("acme", ["norm_fwd", "norm_bwd"])
    registry.register_many(engine.impls)
    layer = fk.nn.LayerNorm(8, device="cpu")
    y = layer(fk.tensor(np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32), device=CPU))
    assert engine.calls == {"norm_fwd": 1}
    registry.register_impl(refusing("norm_bwd", "never", priority=1000))
    with fk.use_backend("reference"):
        y.backward(y.detach())
    assert engine.calls == {"norm_fwd": 1, "norm_bwd": 1}


def test_manager() -> None:
    own = OpManager()
    assert own.get_selected_impl_id("add") == "reference.add"
    assert own.get_selected_impl_id("add", "cpu") == "reference.add"
    assert own.resolve("add") is IMPLEMENTATIONS["add"]
    own.ensure_initialized()
    assert own.resolve_candidates("add")[0].engine == "reference"
    assert own.registry is not registry
    out = arrays.zeros((3,), formats.float32, CPU)
    own.call(
        "add",
        arrays.as_view(np.ones(3, np.float32)),
        b=arrays.as_view(np.full(3, 2, np.float32)),
        out=out,
        stream=0,
    )
    assert out.numpy().tolist() == [3.0] * 3
    own.registry.register_many(Engine("x", ["add"]).impls)
    assert own.get_selected_impl_id("add") == "x.add"
    assert dispatch.get_default_manager().get_selected_impl_id("add") == "reference.add"
    for ask in (own.resolve, own.resolve_candidates, own.get_selected_impl_id, own.call):
        with pytest.raises(BackendError, match="op_name: got 'generic_gemm'"):
            ask("generic_gemm")
    cuda = policy_context(SelectionPolicy(backend="cuda"))
    with cuda, pytest.raises(BackendError, match=r"reference\.add: use_backend\('cuda'\) is in force"):
        own.resolve_candidates("add")


def test_reset_starts_anew() -> None:
    registry.register_many(Engine("x", ["add"]).impls)
    assert dispatch.get_default_manager().get_selected_impl_id("add") == "x.add"
    dispatch.reset_default_manager()
    assert dispatch.get_default_manager().get_selected_impl_id("add") == "reference.add"
    assert total() == 2


def test_explanations() -> None:
    registry.register_many(Engine("acme", ["add"], Kind.VENDOR, devices=frozenset({"cpu", "cuda"})).impls)
    found = explain("add")
    assert found.chosen is not None
    assert [(row.impl.impl_id, row.place, row.why) for row in found.rows if row.impl.engine != "cuda"] == [
        ("acme.add", 0, "is asked first"),
        ("reference.add", 1, "is asked where acme.add cannot take a call"),
    ]
    with with_strict_mode():
        assert "is not asked: the policy is strict" in explain("add").text()
    with policy_context(SelectionPolicy(backend="cuda")):
        assert explain("add", "cpu").chosen is None
        assert "no implementation may be used" in explain("add", "cpu").text()
    mine = Engine("mine", ["add"]).impls[0]
    with policy_context(SelectionPolicy(overrides=(("add", mine),))):
        text = explain("add").text()
        assert "> mine.add" in text.splitlines()[1]
        assert text.count("fk.override is in force") == 3
        assert "overrides                             add=mine.add" in listing(["cpu"])
    whole = listing()
    assert all(f"{engine}.{name} " in whole for engine in ("reference", "cuda") for name in KERNELS)
    with pytest.raises(BackendError, match="op_name: got 'nothing'"):
        explain("nothing")


def test_debug_says_every_choice(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "fp8kit")
    with with_denied_vendors("somebody"):
        dispatch.kernels(CPU)
    assert "add on cpu: reference.add" in caplog.messages
    assert get_policy() == SelectionPolicy()


def test_a_plugin_that_calls_itself_reference_is_no_reference() -> None:
    """``use_backend("reference")`` and the lab mean fp8kit's own engine, whatever kind and priority a plugin
    has."""
    posing = Engine("acme", kind=Kind.REFERENCE, priority=10_000)
    registry.register_many(posing.impls)
    a, out = fk.tensor(np.ones(3, np.float32), device="cpu"), np.zeros(3, np.float32)
    with fk.use_backend("reference"):
        assert np.array_equal((a + a).numpy(), [2, 2, 2])
        assert {
            dispatch.get_default_manager().get_selected_impl_id(name).partition(".")[0] for name in KERNELS
        } == {"reference"}
    assert not posing.calls
    reference("add")(a.view, a.view, arrays.as_view(out), 0)
    assert (out.tolist(), dict(posing.calls)) == ([2, 2, 2], {})
    with with_preference("reference"):
        assert np.array_equal((a + a).numpy(), [2, 2, 2])
    assert posing.calls["add"] == 1


def test_one_function_is_asked_once_for_its_workspace() -> None:
    """A function that takes ``timed`` is registered with it and without; of both only the one in force says
    how much it needs, since the other may build what never runs."""
    asked: list[object] = []

    def measure(*, timed: bool = False) -> int:
        asked.append(timed)
        return 1 + timed

    def impl(function: Any, priority: int) -> OpImpl:
        return OpImpl(
            "norm_bwd_workspace", f"x.{priority}", Kind.VENDOR, function, priority=priority, vendor="x"
        )

    ranked = [impl(functools.partial(measure, timed=True), 2), impl(measure, 1)]
    assert manager._largest("norm_bwd_workspace", ranked)() == 2
    assert asked == [True]
    assert manager._largest("norm_bwd_workspace", ranked[::-1])() == 1
    assert manager._largest("norm_bwd_workspace", [*ranked, impl(lambda: 7, 0)])() == 7
