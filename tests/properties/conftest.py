"""Profiles of the property tests: the same few examples each time, or, with FP8KIT_PROPERTIES=N, N times as
many, drawn anew."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

from tests.support.effort import FACTOR

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile(
    "few",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=_SLOW,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
)
settings.register_profile("many", deadline=None, suppress_health_check=_SLOW, print_blob=True)
settings.load_profile("many" if FACTOR else "few")
