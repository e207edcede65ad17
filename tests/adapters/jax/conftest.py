"""Eight virtual CPU devices for every test of the JAX door; set before JAX looks for devices."""

from __future__ import annotations

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
