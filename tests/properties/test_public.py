"""No public name goes untried: each is used by a property here or where the three frontends are compared, or
named below with the place that tries it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import fp8kit as fk
from fp8kit import arrays, autograd, formats, nn, numerics, optim, recipe, serialization, testing
from tests.support.calls import CALLS
from tests.support.source import ROOT

PACKAGES = {
    "": fk,
    "arrays": arrays,
    "autograd": autograd,
    "formats": formats,
    "nn": nn,
    "numerics": numerics,
    "optim": optim,
    "recipe": recipe,
    "serialization": serialization,
    "testing": testing,
}
WITH_METHODS = {
    "Tensor",
    "QuantizedArray",
    "ArrayView",
    "nn.Module",
    "optim.Optimizer",
    "optim.GradScaler",
    "serialization.Bundle",
}

ELSEWHERE = {
    "arrays.register_device": "changes the process for good; tests/autograd/test_policy.py",
    "ArrayView.with_strides": "any address by design: the caller answers for its bounds",
    "arrays.DeviceProvider": "a protocol",
    "serialization.Stateful": "a protocol",
    "serialization.Loadable": "a base class; what has it is tried: modules, optimisers, schedulers",
    "serialization.Part": "a protocol",
    "autograd.Context": "a bag of attributes that Function hands over; tests/autograd/test_ops.py",
    "autograd.apply": "takes operations, not arrays alone; tests/autograd/test_ops.py",
    "autograd.validate": "likewise; tests/nn/test_refusals.py",
    "register_operation": "likewise; tests/adapters/torch/test_own_operation.py",
    "nn.Module.arrays_used": "takes nothing; tests/cuda/test_graphs.py",
    "cache_info": "takes nothing; tests/formats/test_lru.py",
    "numerics.Dump": "made by capture; tests/numerics/test_capture.py",
    "numerics.GemmOperands": "likewise",
    "numerics.capture": "takes a model and a batch; tests/numerics/test_capture.py",
    "inspect": "takes a model and a configuration; tests/numerics/test_inspect.py, test_config.py",
    "graph": "takes a function, and runs it on CUDA; tests/cuda/test_graphs.py",
    "numerics.Codes": "a tuple that collect looks into; tests/numerics/test_statistics.py",
    "numerics.Needs": "what request returns; tests/numerics/test_statistics.py",
    "optim.ShardedOptimizer": "takes a group of ranks; tests/nn/test_sharded_optimizer.py",
    "formats.number_format": "what quantize and Quantizer ask; tests/formats/test_float8.py",
    "DType": "compared by identity; the instances of the table are the only ones",
    "testing.check_implementation": "a checker; tests/plugins/test_check.py",
    "testing.ContractReport": "what it returns",
    "testing.attention_oracle": "an oracle itself; tests/nn/test_attention_op.py",
    "testing.check_grads": "a checker; tests/autograd/test_ops.py",
    "testing.relative_error": "a checker; tests/models/test_gpt.py",
    **{
        f"nn.Module.{name}": "walks the tree; tests/nn/test_module.py"
        for name in ("buffers", "children", "eval", "forget", "named_buffers", "named_modules", "zero_grad")
    },
    **{
        f"{name}.check_state_dict": "what load_state_dict calls first"
        for name in ("nn.Module", "optim.Optimizer", "optim.GradScaler", "serialization.Bundle")
    },
    "nn.Module.check_extra_state": "what load_state_dict calls first",
    "nn.Module.extra_state": "a part of state_dict",
    "optim.Optimizer.taking": "the first half of step; tests/nn/test_sgd_scaler.py",
    "optim.Optimizer.make_step": "the second half of step; tests/nn/test_sgd_scaler.py",
    "optim.Optimizer.gradient": "what every step asks of each parameter; tests/nn/test_refusals.py",
    "optim.Optimizer.master_dtype": "a dtype's dtype, for subclasses; tests/nn/test_state_formats.py",
    "optim.Optimizer.notes": "what a state dict holds beside, for subclasses; tests/nn/test_state_formats.py",
    "optim.Optimizer.nest": "the other half of flat, for subclasses",
    "optim.Optimizer.zero_grad": "sets None; tests/nn/test_optim.py",
    "serialization.mapping": "a check; every load_state_dict above calls it",
    "Tensor.accumulate": "what the tape calls on a leaf",
    "Tensor.edge": "where the tape finds a leaf",
    "autograd.is_grad_enabled": "reads a flag; tests/autograd/test_tape.py",
}


def public():
    """Dotted names of functions, classes and chosen classes' methods."""
    for package, module in PACKAGES.items():
        names = getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]
        for name in names:
            value = getattr(module, name)
            ours = getattr(value, "__module__", "") or ""
            if not (inspect.isfunction(value) or inspect.isclass(value)) or not ours.startswith("fp8kit"):
                continue
            error = isinstance(value, type) and issubclass(value, fk.Fp8kitError)
            if error or (not hasattr(module, "__all__") and ours != module.__name__):
                continue
            if package and name in fk.__all__:
                continue
            whole = f"{package}.{name}" if package else name
            yield whole
            if whole in WITH_METHODS:
                for method, found in vars(value).items():
                    if inspect.isfunction(found) and not method.startswith("_"):
                        yield f"{whole}.{method}"


# the properties, the recipes that they draw from, and the comparison of the frontends
TRIED = [
    *(path for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__)),
    ROOT / "tests/support/layers.py",
    ROOT / "tests/adapters/test_three_frontends.py",
]
WORDS = " ".join(path.read_text() for path in TRIED)
NAMES = sorted(set(public()))


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_tried(name):
    last = name.rpartition(".")[2]
    tried = (
        name in CALLS
        or any(call.startswith(f"{name}.") for call in CALLS)
        or re.search(rf"[.\s(\[]{re.escape(last)}\b", WORDS)
    )
    assert tried or name in ELSEWHERE, (
        f"no property uses {name}: write one, or say in ELSEWHERE what tries it"
    )


def test_what_is_listed_exists():
    assert set(ELSEWHERE) <= set(NAMES), sorted(set(ELSEWHERE) - set(NAMES))
    assert len(NAMES) > 90, NAMES
