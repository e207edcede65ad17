"""Cold and warm start: a fresh process, from its birth to the end of its first step, with an empty and with a
filled kernel cache.

The child prints what each stage took: Python and the imports, the device (CUDA's context), making the layer
(which draws its weights), and the first step with all that is compiled or loaded for it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial

from fp8kit.arrays import Device
from fp8kit.bench.contest import row_of, within_time
from fp8kit.bench.report import Row, Setting
from fp8kit.bench.sizes import Layer

STAGES = ("imports", "device", "layer", "first step", "second step")
# case -> the folder of its kernel cache, and whether ``fk.warmup`` is called first
CASES = {"empty cache": ("a", False), "warm cache": ("a", False), "empty cache, fk.warmup first": ("b", True)}
_LIMIT = 300  # seconds
_CHILD = """
import json, sys, time
born, place, warm, *sizes = json.loads(sys.argv[1])
marks = [born]
import numpy as np
import fp8kit as fk
from fp8kit import arrays
fk.nn, fk.tensor, fk.recipe
marks.append(time.time())
device = arrays.device(place)
arrays.synchronize(device)
x = np.random.default_rng(0).standard_normal((sizes[3], sizes[4], sizes[0]), np.float32)
x = fk.tensor(x, requires_grad=True, dtype="bfloat16", device=device)
if warm:
    fk.warmup(hidden=sizes[0], ffn=sizes[1], heads=sizes[2], device=device)
marks.append(time.time())
options = dict(hidden_dropout=0.0, attention_dropout=0.0, params_dtype="bfloat16", device=device)
layer = fk.nn.TransformerLayer(*sizes[:3], **options)
marks.append(time.time())
for _ in range(2):
    with fk.autocast(recipe=fk.recipe.DelayedScaling()):
        y = layer(x)
    y.backward(y.detach())
    arrays.synchronize(device)
    marks.append(time.time())
assert np.isfinite(x.grad.numpy().astype(np.float32)).all()
print(json.dumps([after - before for before, after in zip(marks, marks[1:])]))
"""


def first_step(layer: Layer, device: Device, cache: str, warmup: bool = False) -> dict[str, float]:
    """Seconds of each of ``STAGES`` in a fresh process whose kernel cache is the folder ``cache``.
    RuntimeError where it fails.

    ``warmup``: it calls ``fk.warmup`` first, which compiles side by side (counted under "device").
    """
    given = {**os.environ, "FP8KIT_CACHE_DIR": cache}
    order = json.dumps([time.time(), str(device), warmup, *layer])
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, order], env=given, capture_output=True, text=True, timeout=_LIMIT
    )
    if done.returncode:
        raise RuntimeError(f"the child failed: {done.stderr.strip().splitlines()[-1:]}")
    return dict(zip(STAGES, json.loads(done.stdout), strict=True))


def start_part(setting: Setting) -> list[Row]:
    """``seconds`` until the first step is done: with an empty kernel cache, with the same cache again, with
    an empty one and a warm-up."""
    named = partial(row_of, "first step of a fresh process")
    with tempfile.TemporaryDirectory() as folder:

        def measure(case: str) -> list[Row]:
            cache, warm = CASES[case]
            stages = first_step(setting.sizes.start, setting.device, os.path.join(folder, cache), warm)
            seconds = sum(stages.values()) - stages["second step"]
            detail = ", ".join(f"{name} {time:.2f}" for name, time in stages.items())
            return [named(case, seconds=seconds, stages=stages, check="finite gradients", detail=detail)]

        return within_time(setting, CASES, measure, named)
