"""Who may import whom, from the source."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.support import source

# package of the architecture -> prefixes of its modules; the longest prefix decides. A package may import
# itself and those above it here, without those in LESS.
PACKAGES = {
    "core": tuple(
        f"fp8kit.{name}"
        for name in (
            *("errors", "arguments", "settings", "slowness", "cache", "formats", "arrays", "devices"),
            *("dlpack", "codec", "lru", "nests", "collectives", "aliases", "rendezvous"),
            *("buffers", "checkpoint_format", "recipe", "recipe_fields", "recipes", "layer_recipes"),
            *("attention_quantization", "quantization", "blocks", "accumulation", "autocast", "packing"),
            *("printing", "tiles", "scoped", "inspection", "scaled_products"),
            *("moments", "raw_kernels"),
        )
    ),
    "contract": ("fp8kit.backends", "fp8kit.backends.protocol", "fp8kit.backends.registry"),
    "engines": ("fp8kit.backends.reference", "fp8kit.backends.cuda"),
    "dispatch": (
        "fp8kit.plugins",
        *(f"fp8kit.backends.{name}" for name in ("dispatch", "manager", "policy", "discovery")),
    ),
    "ops": (
        *(f"fp8kit.{name}" for name in ("float8", "quantized_array", "quantized_product", "spec", "ops")),
        "fp8kit.quantized_matmul",
    ),
    "execution": ("fp8kit.execution", "fp8kit.scaling"),
    "layers": ("fp8kit.layers", "fp8kit.layers.inference"),
    "native": tuple(
        f"fp8kit.{name}"
        for name in ("autograd", "nn", "optim", "serialization", "graphs", "captured", "distributed")
    ),
    "numerics": ("fp8kit.numerics",),
    "testing": ("fp8kit.testing",),
    "torch": ("fp8kit_torch",),
    "jax": ("fp8kit_jax",),
    "models": ("fp8kit.models",),
    "public": ("fp8kit",),
    "tools": tuple(
        f"fp8kit.{name}"
        for name in (
            *("attention_info", "recipe_info", "recipe_check"),
            *("lab", "bench", "commands", "cli", "warmup", "__main__"),
            *("numerics.compare", "numerics.report", "numerics.plots"),
        )
    ),
}
ORDER = list(PACKAGES)
LESS = {"dispatch": {"engines"}, "ops": {"engines"}, "execution": {"engines"}, "layers": {"engines"}}
LESS |= {"native": {"engines"}, "numerics": {"engines"}, "testing": {"engines"}, "models": {"engines"}}
LESS |= {"torch": {"engines", "native"}, "jax": {"engines", "native", "torch"}}


def package_of(module: str) -> str:
    best = [
        (len(prefix), package)
        for package, prefixes in PACKAGES.items()
        for prefix in prefixes
        if module == prefix or module.startswith(prefix + ".")
    ]
    return max(best)[1]


def allowed(package: str) -> set[str]:
    return set(ORDER[: ORDER.index(package) + 1]) - LESS.get(package, set())


# third-party package -> prefixes of modules that may import it; "lazy" ones never at module level
ANYWHERE = {"numpy", "ml_dtypes"}
THIRD_PARTY = {
    "numba": ("fp8kit.backends.reference",),
    "tbb": ("fp8kit.backends.reference",),
    "scipy": (),
    "safetensors": (),
    "matplotlib": ("fp8kit.models.plots",),
    "rich": ("fp8kit.models.progress",),
    "transformers": ("fp8kit_torch.huggingface", "fp8kit_torch.converted_attention"),
    "yaml": ("fp8kit.numerics.config",),
    "tensorboardX": ("fp8kit.numerics.sinks",),
    "wandb": ("fp8kit.numerics.sinks",),
    "cupy": ("fp8kit.backends.cuda",),
    "cupyx": ("fp8kit.backends.cuda",),
    "cuda": ("fp8kit.backends.cuda",),
    "nvmath": ("fp8kit.backends.cuda",),
    "nccl": ("fp8kit.backends.cuda",),
    "cudnn": ("fp8kit.backends.cuda",),
    "torch": ("fp8kit_torch",),
    "onnxscript": ("fp8kit_torch.te_compat.onnx_extensions",),
    "jax": ("fp8kit_jax",),
    "jaxlib": ("fp8kit_jax",),
    "flax": ("fp8kit_jax",),
    "jax_tvm_ffi": ("fp8kit_jax",),
    "tvm_ffi": ("fp8kit_jax",),
}
LAZY = {
    "cupy",
    "cupyx",
    "cuda",
    "nvmath",
    "nccl",
    "cudnn",
    "matplotlib",
    "transformers",
    "yaml",
    "tensorboardX",
    "wandb",
    "onnxscript",
}


def within(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


def test_directions():
    wrong = []
    for name in source.modules():
        package = package_of(name)
        if package == "public":  # gathers what the others define
            continue
        imported = [
            f"line {found.line}: {found.module} ({package_of(found.module)})"
            for found in source.imports(name)
            if found.module.partition(".")[0] in source.PACKAGES
            and package_of(found.module) not in allowed(package)
        ]
        if imported:
            wrong.append(f"{name} ({package}) may import {sorted(allowed(package))}, but imports {imported}")
    assert not wrong, "\n".join(wrong)


def test_engines_do_not_know_each_other():
    engines = PACKAGES["engines"]
    for name in source.modules():
        for engine in engines:
            if within(name, (engine,)):
                others = tuple(set(engines) - {engine})
                assert not [i for i in source.imports(name) if within(i.module, others)], name


def test_no_import_cycles():
    """No file imports, directly or through others, a file that imports it: not inside functions either."""
    modules = source.modules()
    graph = {
        name: {found.module for found in source.imports(name) if found.module in modules and not found.typing}
        for name in modules
    }
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join((*above[above.index(name) :], name))
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, (*above, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


def test_third_party():
    wrong = []
    for name in source.modules():
        for found in source.imports(name):
            top = found.module.partition(".")[0]
            if top in source.PACKAGES or top in sys.stdlib_module_names or top in ANYWHERE:
                continue
            if not within(name, THIRD_PARTY.get(top, ())):
                wrong.append(f"{name}:{found.line} imports {top}")
            elif top in LAZY and found.eager:
                wrong.append(f"{name}:{found.line} imports {top} at module level: only inside functions")
    assert not wrong, "\n".join(wrong)


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
    packages = {'autograd', 'distributed', 'nn', 'optim', 'recipe', 'recipes', 'testing', 'formats', 'arrays',
                'plugins', 'numerics'}
    assert isinstance(value, types.ModuleType) == (name in packages), name
assert fp8kit.nn.unit_scaling.Linear
"""
BARE = "import fp8kit\nassert not {'numba', 'fp8kit.backends'} & set(sys.modules)"
INFO = "import fp8kit.cli\nassert fp8kit.cli.main(['info']) == 0"


@pytest.mark.parametrize("body", ["\n".join((BARE, QUANTISE, INFO)), NAMES], ids=["use", "public-names"])
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
    ("cuda.bindings", "from fp8kit.backends.cuda.compile import nvrtc_version; nvrtc_version()"): (
        "BackendError compile: NVRTC cannot be loaded (import of cuda.bindings halted; None in sys.modules); "
        "install it, in a checkout of fp8kit, with: pip install '.[cuda13]'; to compile without a GPU this "
        "suffices: pip install nvidia-cuda-nvrtc cuda-bindings"
    ),
}
REFUSED = """
import runpy, sys
sys.modules[{absent!r}] = None
for body in {bodies!r}:
    try:
        exec(body)
    except Exception as error:
        print(type(error).__name__, error)
"""


@pytest.mark.programs
@pytest.mark.parametrize("absent", dict.fromkeys(absent for absent, _ in WANTED))
def test_who_needs_what_is_not_installed_names_the_extra(absent):
    """One interpreter for all that needs a package: an import that failed leaves nothing behind."""
    wanted = {body: said for (needed, body), said in WANTED.items() if needed == absent}
    code = REFUSED.format(absent=absent, bodies=list(wanted))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source.ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines() == list(wanted.values()), done.stderr


def test_what_reaches_a_device_is_recorded_or_says_so():
    """A call of the runtime that puts work on a stream, in an engine whose calls are done again from
    recordings (``recorded.put``): only where the function says that it cannot be."""
    unrecordable = {("algorithms.py", "_times"), ("device.py", "copy"), ("device.py", "fetch")}
    # the first allocates, which cannot be recorded
    found = set()
    for name, path in source.modules().items():
        for function in ast.walk(source.tree(path)) if within(name, ("fp8kit.backends.cuda",)) else ():
            if isinstance(function, ast.FunctionDef):
                called = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
                names = {call.attr for call in called if isinstance(call, ast.Attribute)}
                if names & {"memsetAsync", "memcpyAsync", "memcpyPeerAsync"}:
                    found.add((path.name, function.name))
    assert found == unrecordable
