"""Eight virtual CPU devices for JAX's cases over a mesh, set before JAX looks for devices."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
