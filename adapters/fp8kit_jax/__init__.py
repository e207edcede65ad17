"""The JAX door of fp8kit. So far: calling fp8kit from inside ``jax.jit`` on XLA's own buffers; the layers are not here yet."""

from fp8kit_jax.calls import call, register, shape_struct

__all__ = ["call", "register", "shape_struct"]
