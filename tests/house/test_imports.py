"""Who may import whom, from the source."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.house import source

# room -> prefixes of its modules; the longest prefix decides
ROOMS = {
    "public": ("fp8kit",),
    "errors": ("fp8kit.errors", "fp8kit.arguments", "fp8kit.layers"),
    "settings": ("fp8kit.settings",),
    "formats": ("fp8kit.formats",),
    "raw_kernels": ("fp8kit.raw_kernels",),
    "arrays": ("fp8kit.arrays", "fp8kit.devices", "fp8kit.dlpack", "fp8kit.scratch", "fp8kit.replays"),
    "codec": ("fp8kit.codec",),
    "files": ("fp8kit.checkpoint_format",),
    "recipe": ("fp8kit.recipe", "fp8kit.quantization"),
    "autocast": ("fp8kit.autocast",),
    "protocol": ("fp8kit.backends", "fp8kit.backends.protocol"),
    "registry": ("fp8kit.backends.registry",),
    "dispatch": tuple(f"fp8kit.backends.{name}" for name in ("dispatch", "manager", "policy", "discovery")),
    "plugins": ("fp8kit.plugins",),
    "reference": ("fp8kit.backends.reference",),
    "cuda": ("fp8kit.backends.cuda",),
    "float8": ("fp8kit.float8",),
    "scaling": ("fp8kit.scaling",),
    "ops": ("fp8kit.spec", "fp8kit.ops"),
    "steps": ("fp8kit.kv_steps",),
    "autograd": ("fp8kit.autograd",),
    "layers": ("fp8kit.nn", "fp8kit.optim", "fp8kit.serialization", "fp8kit.graphs", "fp8kit.captured"),
    "models": ("fp8kit.models",),
    "testing": ("fp8kit.testing",),
    "lab": ("fp8kit.lab",),
    "bench": ("fp8kit.bench",),
    "commands": ("fp8kit.cli", "fp8kit.commands", "fp8kit.warmup", "fp8kit.__main__"),
    "torch": ("fp8kit_torch",),
    "jax": ("fp8kit_jax",),
}
_BASE = {"errors", "settings", "formats"}
_ENGINE = _BASE | {"arrays", "recipe", "protocol", "registry"}
_OPS = _ENGINE | {"dispatch", "float8", "ops"}
_LAYERS = _OPS | {"steps", "autograd", "autocast", "scaling", "files", "layers"}

# room -> rooms it may import, itself always
ALLOWED = {
    "errors": set(),
    "settings": {"errors"},
    "formats": {"errors"},
    "raw_kernels": {"errors"},
    "arrays": _BASE,
    "codec": _BASE,
    "files": _BASE,
    "recipe": _BASE,
    "autocast": {"recipe", "errors", "settings"},
    "protocol": _BASE | {"arrays", "recipe"},
    "registry": {"protocol", "errors", "formats", "settings"},
    "dispatch": _ENGINE,
    "plugins": _ENGINE | {"dispatch"},
    "reference": _ENGINE | {"codec"},
    "cuda": _ENGINE | {"raw_kernels"},
    "float8": _BASE | {"arrays", "recipe", "dispatch"},
    "scaling": _BASE | {"arrays", "recipe", "dispatch"},
    "ops": _OPS,
    "steps": _BASE | {"arrays", "ops"},
    "autograd": _OPS,
    "layers": _LAYERS,
    "models": _LAYERS | {"models"},
    "testing": _LAYERS | {"codec", "models", "raw_kernels"},
    "lab": _LAYERS | {"codec", "testing", "bench", "raw_kernels", "cuda"},
    "torch": _OPS | {"steps", "autocast", "scaling", "files", "testing"},
    "jax": _OPS | {"steps", "autocast", "scaling", "testing"},
}
FREE = {"public", "commands", "bench"}  # may import anything of ours

# third-party package -> prefixes of modules that may import it; "lazy" ones never at module level
ANYWHERE = {"numpy", "ml_dtypes"}
THIRD_PARTY = {
    "numba": ("fp8kit.backends.reference",),
    "tbb": ("fp8kit.backends.reference",),
    "scipy": (),
    "safetensors": (),
    "matplotlib": ("fp8kit.models.plots",),
    "rich": ("fp8kit.models.progress",),
    "cupy": ("fp8kit.backends.cuda",),
    "cupyx": ("fp8kit.backends.cuda",),
    "cuda": ("fp8kit.backends.cuda",),
    "nvmath": ("fp8kit.backends.cuda",),
    "cudnn": ("fp8kit.backends.cuda",),
    "torch": ("fp8kit_torch",),
    "jax": ("fp8kit_jax",),
    "jaxlib": ("fp8kit_jax",),
    "flax": ("fp8kit_jax",),
    "jax_tvm_ffi": ("fp8kit_jax",),
    "tvm_ffi": ("fp8kit_jax",),
}
LAZY = {"cupy", "cupyx", "cuda", "nvmath", "cudnn", "matplotlib"}


def room_of(module: str) -> str:
    best = [
        (len(prefix), room)
        for room, prefixes in ROOMS.items()
        for prefix in prefixes
        if module == prefix or module.startswith(prefix + ".")
    ]
    return max(best)[1]


def within(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


@pytest.mark.parametrize("name", source.modules())
def test_directions(name):
    room = room_of(name)
    if room in FREE:
        return
    wrong = [
        f"line {found.line}: {found.module} ({room_of(found.module)})"
        for found in source.imports(name)
        if found.module.partition(".")[0] in source.PACKAGES
        and room_of(found.module) not in ALLOWED[room] | {room}
    ]
    assert not wrong, f"{name} ({room}) may import {sorted(ALLOWED[room])}, but imports {wrong}"


@pytest.mark.parametrize("name", source.modules())
def test_third_party(name):
    for found in source.imports(name):
        top = found.module.partition(".")[0]
        if top in source.PACKAGES or top in sys.stdlib_module_names or top in ANYWHERE:
            continue
        assert within(name, THIRD_PARTY.get(top, ())), f"{name}:{found.line} imports {top}"
        assert top not in LAZY or not found.eager, (
            f"{name}:{found.line} imports {top} at module level: only inside functions"
        )


# Runs in an interpreter where those packages do not exist.
BLOCKED = """
import sys
from importlib.abc import MetaPathFinder

class Blocker(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        return None

sys.meta_path.insert(0, Blocker())
{body}
assert not set(sys.modules) & {blocked!r}
"""
ABSENT = {
    "cupy",
    "cupyx",
    "cuda",
    "nvmath",
    "cudnn",
    "torch",
    "jax",
    "jaxlib",
    "jax_tvm_ffi",
    "tvm_ffi",
    "flax",
    "matplotlib",
    "rich",
    "safetensors",
}
QUANTISE = """
import numpy as np
import fp8kit as fk
q = fk.quantize(np.array([[1.0, -2.0], [448.0, 0.0]], np.float32), fk.E4M3)
assert q.data.tolist() == [[0x38, 0xC0], [0x7E, 0x00]]
assert q.dequantize().tolist() == [[1.0, -2.0], [448.0, 0.0]]
"""
# a submodule that is loaded first must not take the place of a public name that is spelt like it
NAMES = """
import types
import fp8kit, fp8kit.nn, fp8kit.optim, fp8kit.serialization, fp8kit.nn.recompute
for name in fp8kit.__all__:
    value = getattr(fp8kit, name)
    rooms = {'autograd', 'nn', 'optim', 'recipe', 'testing', 'formats', 'arrays', 'plugins'}
    assert isinstance(value, types.ModuleType) == (name in rooms), name
"""
BARE = "import fp8kit\nassert not {'numba', 'fp8kit.backends'} & set(sys.modules)"
INFO = "import fp8kit.cli\nassert fp8kit.cli.main(['info']) == 0"


@pytest.mark.parametrize(
    "body", [BARE, QUANTISE, NAMES, INFO], ids=["import", "quantise", "public-names", "info"]
)
def test_works_without_gpu_and_frameworks(body):
    code = BLOCKED.format(blocked=ABSENT, body=body)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source.ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


# (what is not installed, what is asked for) -> the error and what it says
TORCH = (
    "ImportError fp8kit_torch needs torch, not installed here; install it, in a checkout of fp8kit, with: "
    "pip install '.[torch]'"
)
JAX = (
    "ImportError fp8kit_jax needs {}, not installed here; install it, in a checkout of fp8kit, with: "
    "pip install '.[jax]'"
)
FLAX = (
    "ImportError fp8kit_jax.{} needs flax, not installed here; install it, in a checkout of fp8kit, with: "
    "pip install '.[flax]'"
)
WANTED = {
    ("torch", "import fp8kit_torch"): TORCH,
    ("torch", "import fp8kit_torch.linear"): TORCH,
    ("torch", "import benchmarks.parts"): TORCH,
    ("torch", "runpy.run_path('examples/16_torch_linear.py')"): TORCH,
    ("jax", "import fp8kit_jax"): JAX.format("jax"),
    ("jax_tvm_ffi", "import fp8kit_jax"): JAX.format("jax_tvm_ffi"),
    ("jax", "runpy.run_path('examples/18_jax_training.py')"): JAX.format("jax"),
    ("flax", "import fp8kit_jax.flax"): FLAX.format("flax"),
    ("flax", "import fp8kit_jax; fp8kit_jax.nnx"): FLAX.format("nnx"),
    ("cupy", "from fp8kit.backends.cuda.device import cupy; cupy()"): (
        "BackendError cuda: CuPy cannot be imported (import of cupy halted; None in sys.modules); "
        "install it, in a checkout of fp8kit, with: pip install '.[cuda13]'"
    ),
}
REFUSED = """
import runpy, sys
sys.modules[{absent!r}] = None
try:
    {body}
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(("absent", "body"), WANTED)
def test_who_needs_what_is_not_installed_names_the_extra(absent, body):
    code = REFUSED.format(absent=absent, body=body)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source.ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == WANTED[absent, body], done.stderr


def test_what_reaches_a_device_is_recorded_or_says_so():
    """A call of the runtime that puts work on a stream, in an engine whose calls are done again from
    recordings (``recorded.put``): only where the function says that it cannot be."""
    import ast
    from pathlib import Path

    import fp8kit.backends.cuda as engine

    spoiling = {("algorithms.py", "_times"), ("device.py", "copy")}  # the former allocates, which spoils
    found = set()
    for path in Path(engine.__file__).parent.glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                called = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
                names = {call.attr for call in called if isinstance(call, ast.Attribute)}
                if names & {"memsetAsync", "memcpyAsync", "memcpyPeerAsync"}:
                    found.add((path.name, function.name))
    assert found == spoiling
