"""Fused products of Hopper without a GPU: what the host tells the kernel, carried out in NumPy with the lanes
and warps of the kernel, keeps the contract. So every address is right, and which lane writes which code, how
maxima and sums are put together, and where scales of lines lie."""

from __future__ import annotations

from typing import Any

import pytest

from fp8kit.arrays import CPU
from fp8kit.backends import dispatch
from fp8kit.backends.cuda import hopper_gemm, register
from fp8kit.backends.protocol import SPECS
from fp8kit.backends.registry import CannotTake, OpRegistry
from fp8kit.formats import E5M2, float32
from fp8kit.raw_kernels import manifest
from fp8kit.testing.contract import Case, Sampler, kernel_test
from tests.support import hopper as support
from tests.support.contract import usual
from tests.support.hopper import Emulated
from tests.support.hopper_fused import NAMES, as_hopper, hopper, sum_partials, together

CASES = [case for name in NAMES for case in usual(name)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_keeps_the_contract(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    as_hopper(monkeypatch)
    kernels = Emulated("hopper_gemm.cu", NAMES, {"hopper_gemm.cu": hopper, "dropout.cu": sum_partials})
    try:
        case.run(kernels, CPU)  # type: ignore[arg-type]
    except CannotTake as refusal:
        kind, n = case.options.get("kind"), case.options["n"]
        if "out" in str(refusal):  # rows of the product that no copy writes
            assert n % 4
        else:
            assert kind not in ("gelu", "relu", "swiglu") or (kind == "swiglu" and n % 128)
    else:
        assert kernels.taken


def taken(m: int, n: int, **more: Any) -> None:
    """Calls ``fp8_gemm_act`` on memory of the host, as if it were a Hopper's."""
    test = kernel_test("fp8_gemm_act")
    made = test.arguments(Sampler(dispatch.kernels(CPU), CPU, float32), m, n, **more)
    kernels = Emulated("hopper_gemm.cu", NAMES, {"hopper_gemm.cu": hopper})
    SPECS["fp8_gemm_act"].call(kernels, made)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"m": 0}, "nothing to multiply"),
        ({"kind": "srelu"}, "epilogue: got forward srelu"),
        ({"kind": "swiglu"}, "a multiple of 128 for a gated activation"),
        ({"a": E5M2}, "epilogue: got forward gelu of e5m2"),
        ({"k": 24}, "multiples of 16"),
        ({"cast": {"pad": (0, 4)}}, "multiples of 8"),
        ({"cast": {"pad": (8, 0), "only": "q_t"}}, "multiples of 16"),
        ({"cast": {"pad": (112, 0)}}, "little padding"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_it_cannot_take_is_said(more: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is launched, so that the next implementation may be asked."""
    as_hopper(monkeypatch)
    with pytest.raises(CannotTake, match=why):
        taken(**{"m": 32, "n": 48, **more})


def test_none_is_chosen_where_no_policy_names_it() -> None:
    registry = OpRegistry()
    register(registry)
    for name in NAMES:
        found = [impl.impl_id for impl in registry.get_implementations(name)]
        assert found == [f"cuda.{name}", f"cuda.hopper_{name}"]


@pytest.mark.parametrize("promote", [0, 128])
@pytest.mark.parametrize(("m", "n"), [(1, 48), (300, 1024), (8192, 16384)])
def test_every_tiling_is_compiled(m: int, n: int, promote: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = support.planned(hopper_gemm, monkeypatch)
    epilogues = [("forward", "swiglu", 2), ("backward", "gelu", 1), ("lines", "identity", 1)]
    for epilogue, act, halves in epilogues:
        types = "e4m3", "e4m3", "bf16"
        found = plan(
            0, m, n, 512, 512, 512, n, m, n, types, "whole", (0, 0), promote, epilogue, act, halves, True
        )
        how = dict(found.kernel)
        assert found.kernel in manifest.source("hopper_gemm.cu").variants
        tall, wide = found.sizes[6:8]
        assert (tall - 1) * int(how["BM"]) < m <= tall * int(how["BM"])
        columns = together(how) * int(how["BN"])
        assert (wide - 1) * columns < n <= wide * columns
        assert 0 < found.blocks <= min(132, tall * wide * together(how))
        assert repr((128, int(how["BN"]) // halves)).encode() in found.maps[1]
