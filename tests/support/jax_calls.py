"""Programs in processes of their own, and an operation that fails or keeps an exception."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

import fp8kit_jax as fj
import numpy as np

from fp8kit import formats
from fp8kit.errors import BackendError
from fp8kit.spec import Meta, Operation, Signature


def child(*args, **environment):
    """What a program printed, in a process of its own."""
    fixed = {
        "JAX_PLATFORMS": "cpu",
        "OPENBLAS_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    env = os.environ | fixed | environment
    command = [sys.executable, "-m", "tests.adapters.jax.programs", *args]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


KEEPING = 7.0


keeping: list[ValueError] = []


@dataclass(frozen=True)
class PlusSpec:
    amount: float


class Plus(Operation):
    """y = x / 2 + amount; refuses amounts below 0 when it runs, and keeps an exception at ``KEEPING``."""

    name = "test_plus"

    def infer(self, spec, metas, needs):
        return Signature({"y": Meta(metas["x"].shape, formats.float32)})

    def forward(self, plan, ws):
        if plan.spec.amount < 0:
            raise BackendError("test_plus", "amount", plan.spec.amount, "a number >= 0")
        if plan.spec.amount == KEEPING:
            try:
                raise ValueError("kept")
            except ValueError as error:
                keeping.append(error)
        ws.outputs["y"].numpy()[...] = ws.inputs["x"].numpy() * np.float32(0.5) + np.float32(plan.spec.amount)


plus = fj.register_operation(Plus(), PlusSpec)
