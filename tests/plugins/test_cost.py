"""What dispatch costs a call: at most half a microsecond, which this prints; the bound leaves room for a
slower machine."""

from __future__ import annotations

from fp8kit.plugins import dispatch_cost, registry
from tests.support.engines import Engine

BUDGET, BUSY = 0.5, 2  # microseconds; factor that a slower or busier machine may cost


def test_dispatch_is_cheap() -> None:
    registry.register_many(Engine("acme").impls)
    cost = dispatch_cost()
    print(f"dispatch: {cost.plain:.3f} us, within a block {cost.block:.3f} us; budget {BUDGET} us")
    assert 0 < max(cost) < BUDGET * BUSY
