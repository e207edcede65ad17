"""The cases of ``fp8kit_torch``, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import fp8kit_torch as te
import ml_dtypes
import numpy as np
import torch

from tests.golden import layers
from tests.golden.cases import RECIPES, Case
from tests.golden.layers import NO_DEVICE, NO_DTYPE, STEPS, Record, arguments, backward, note, scope, train
from tests.golden.modules import LAYERS, OPS, Layer
from tests.golden.values import Angles, Array, HostArray, draw, mask, parameter


class Torch:
    """``layers.Frontend`` of ``fp8kit_torch``."""

    def __init__(self, device: str) -> None:
        self.device = device

    def run(self, case: Case, record: Record) -> None:
        torch.manual_seed(1234)
        PROGRAMS[case.program](self, case, record)

    def module(self, key: str, layer: Layer, case: Case, **more: Any) -> Any:
        kwargs = dict(layer.args) | more
        if layer.module not in NO_DEVICE:
            kwargs["device"] = self.device
        if layer.module not in NO_DTYPE:
            kwargs["params_dtype"] = getattr(torch, case.dtype)
        return self.filled(key, getattr(te, layer.module)(**kwargs), case)

    def filled(self, key: str, module: Any, case: Case) -> Any:
        """The module, with the parameters of ``values.parameter``."""
        with torch.no_grad():
            for name, own in module.named_parameters():
                values = parameter(key, name, tuple(own.shape), case.exact)
                own.copy_(torch.from_numpy(values).to(own.dtype))
        return module

    def array(self, host: Any, dtype: str | None = None, grad: bool = False) -> Any:
        made = torch.from_numpy(np.array(host, order="C"))
        if dtype is not None:
            made = made.to(getattr(torch, dtype))
        return made.to(self.device).requires_grad_(grad)

    def angles(self, angles: Angles) -> Any:
        made = te.RotaryPositionEmbedding(angles.dim, **angles.options, device=self.device)
        return made(angles.positions)

    def function(self, name: str) -> Callable[..., Any]:
        return getattr(te, name)

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    def dtype(self, tensor: Any) -> str:
        return str(tensor.dtype).removeprefix("torch.")

    def autocast(self, **options: Any) -> AbstractContextManager[Any]:
        return te.autocast(**options)

    def no_grad(self) -> AbstractContextManager[Any]:
        return torch.no_grad()

    def backward(self, outputs: list[Any], cotangents: list[Any]) -> None:
        torch.autograd.backward(outputs, cotangents)

    def checkpoint(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        reentrant = options.pop("reentrant", True)
        return te.checkpoint(function, *args, use_reentrant=reentrant, **options)

    def parameters(self, module: Any) -> dict[str, Any]:
        return dict(module.named_parameters())

    def fp8_state(self, module: Any) -> dict[str, Any]:
        return {
            f"{path}.{name}.{field}".lstrip("."): getattr(state, field)
            for path, part in module.named_modules()
            for name, state in getattr(part, "fp8_meta", {}).items()
            if hasattr(state, "amax_history")
            for field in ("scale", "scale_inv", "amax_history")
        }

    def zero_grad(self, module: Any) -> None:
        module.zero_grad()

    def optimizer(self, name: str, module: Any, options: Mapping[str, Any]) -> Any:
        kwargs = {
            key: getattr(torch, value) if key.endswith("_dtype") else value for key, value in options.items()
        }
        return getattr(te.optimizers, name)(module.parameters(), **kwargs)

    def cache(self, **options: Any) -> Any:
        return te.InferenceParams(**options, device=self.device)

    def reloaded(self, module: Any, fresh: Any, path: Path) -> None:
        torch.save(module.state_dict(), path)
        fresh.load_state_dict(torch.load(path, weights_only=True))

    def host(self, value: Any) -> HostArray:
        if isinstance(value, np.ndarray):
            return value
        found = value.dequantize() if isinstance(value, te.QuantizedTensor) else value
        found = found.detach().cpu().contiguous()
        if found.dtype is torch.bfloat16:
            return found.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return found.numpy()


# --- programs -----------------------------------------------------------------------------------------------


def fp8_edges(f: Torch, case: Case, record: Record) -> None:
    """Output and gradient handed on in FP8, to another layer and to anything else."""
    layer = LAYERS[case.what]
    module, after = f.module(case.what, layer, case), f.module("after", LAYERS["Linear.chain"], case)
    for step in range(STEPS):
        kwargs, leaves = arguments(f, case, case.what, layer.call, step)
        f.zero_grad(module)
        f.zero_grad(after)
        with scope(f, case):
            y = module(**kwargs, fp8_output=True, fp8_grad=True)
            z = after(y)
        backward(f, case, [z], step)
        note(f, record, str(step), module, [y, z], leaves)
        note(f, record, f"{step}.after", after, [], {})


def main_grad(f: Torch, case: Case, record: Record) -> None:
    """Gradients of weights added to ``main_grad`` over micro-batches."""
    layer = LAYERS[case.what]
    module = f.module(case.what, layer, case, fuse_wgrad_accumulation=True)
    weights = {name: own for name, own in module.named_parameters() if own.ndim > 1}
    for own in weights.values():
        own.main_grad = torch.full_like(own, 3.0, dtype=torch.float32)
    for step in range(2):
        for part in range(2):
            train(
                f,
                case,
                lambda name, value, part=part: record(f"{part}.{name}", value),
                module,
                layer,
                step + part,
                is_first_microbatch=part == 0,
            )
            for name, own in weights.items():
                record(f"{step}.{part}.m.{name}", own.main_grad)


def quantized_init(f: Torch, case: Case, record: Record) -> None:
    """Weights that are held in FP8, and their masters."""
    layer, recipe = LAYERS[case.what], RECIPES[case.recipe]
    with te.quantized_model_init(enabled=True, recipe=recipe):
        module = f.module(case.what, layer, case)
    optimizer = te.optimizers.FusedAdam(module.parameters(), lr=0.01, master_weights=True)
    for step in range(STEPS):
        train(f, case, record, module, layer, step)
        optimizer.step()
        for name, own in module.named_parameters():
            record(f"{step}.p.{name}", own)


def ops(f: Torch, case: Case, record: Record) -> None:
    """``te.ops``, in a Sequential."""
    made = []
    for name, options in OPS[case.what]:
        more = {"device": f.device} if "size" in options or "in_features" in options else {}
        if "normalized_shape" in options:
            more["device"] = f.device
        made.append(getattr(te.ops, name)(**options, **more))
    module = f.filled(case.what, te.ops.Sequential(*made), case)
    layer = Layer("", {}, {"input": Array((20, 48))})
    for step in range(STEPS):
        train(f, case, record, module, layer, step)


def extra(f: Torch, case: Case, record: Record) -> None:
    """A Sequential of ``te.ops`` that hands out what goes in, and adds another input to what comes out."""
    linear = te.ops.Linear(48, 48, device=f.device)
    module = te.ops.Sequential(te.ops.MakeExtraOutput(), linear, te.ops.AddExtraInput())
    module = f.filled("extra", module, case)
    layer = Layer("", {}, {"input": Array((20, 48)), "other": Array((20, 48))})

    def call(**kwargs: Any) -> Any:
        return module(*kwargs.values())

    for step in range(STEPS):
        train(f, case, record, module, layer, step, call)


def torch_autocast(f: Torch, case: Case, record: Record) -> None:
    """float32 parameters under torch's own autocast."""
    layer = LAYERS[case.what]
    module = f.module(case.what, layer, case)

    def call(**kwargs: Any) -> Any:
        with torch.autocast(f.device, torch.bfloat16):
            return module(**kwargs)

    for step in range(STEPS):
        train(f, case, record, module, layer, step, call)


def convert(f: Torch, case: Case, record: Record) -> None:
    """A plain model, converted and reverted."""
    nn = torch.nn
    models = {
        "": lambda: (nn.LayerNorm(32), nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32, bias=False)),
        "norms": lambda: (nn.RMSNorm(32), nn.Linear(32, 32), nn.LayerNorm(32, bias=False)),
        "encoder": lambda: (nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, norm_first=True),),
    }
    model = nn.Sequential(*models[case.what]())
    model = te.convert(f.filled("convert", model.to(f.device), case))
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=0.01)
    layer = Layer("", {}, {"input": Array((20, 2, 32) if case.what == "encoder" else (20, 32))})
    for step in range(STEPS):
        train(f, case, record, model, layer, step)
        optimizer.step()
        for name, own in model.named_parameters():
            record(f"{step}.p.{name}", own)
    record("reverted", te.revert(model)(f.array(draw("x", Array((20, 32))))))


def unpermuted(f: Torch, case: Case, record: Record) -> None:
    """Tokens to experts and back, with probabilities and with padding."""
    (kwargs, leaves) = arguments(
        f,
        case,
        "moe",
        {"inp": Array((10, 16)), "probs": Array((10, 4), "gain"), "routing_map": mask(10, 4)},
        0,
    )
    inp, probs, routing = kwargs.values()
    count = int(routing.sum())
    rows, places = te.moe_permute(inp, routing, count)
    y = te.moe_unpermute(rows, places, probs, inp.shape)
    found = te.moe_permute_and_pad_with_probs(inp, probs, routing, routing.sum(0), 8)
    padded, weights, places, offsets, counts = found
    z = te.moe_unpermute(padded * weights[:, None], places, restore_shape=inp.shape, pad_offsets=offsets)
    backward(f, case, [y, z], 0)
    note(f, record, "0", None, [y, z, padded, weights, places, offsets, counts], leaves)


def padded(f: Torch, case: Case, record: Record) -> None:
    """Rows of a GroupedLinear filled up and taken away again, under FP8."""
    splits = [5, 0, 16, 5]
    module = f.module("padded", LAYERS["GroupedLinear.plain"], case)
    kwargs, leaves = arguments(f, case, "padded", {"inp": Array((26, 48))}, 0)
    pad, unpad = te.Fp8Padding(4), te.Fp8Unpadding(4)
    with te.autocast(enabled=True, recipe=RECIPES["current"]):
        rows, filled = pad(kwargs["inp"], splits)
        y = unpad(module(rows, filled), splits)
    backward(f, case, [y], 0)
    note(f, record, "0", module, [rows, y], leaves)


def multi_tensor(f: Torch, case: Case, record: Record) -> None:
    """Functions on many tensors that optimisers are made of."""
    shapes = ((3, 5), (17,), (2, 3, 4), (1,))
    own = te.optimizers

    def some(key: str) -> list[torch.Tensor]:
        return [f.array(draw(f"{key}{i}", Array(shape))) for i, shape in enumerate(shapes)]

    def apply(name: str, lists: list[Any], *rest: Any) -> Any:
        noop = torch.zeros(1, dtype=torch.int32, device=f.device)
        return own.multi_tensor_applier(getattr(own, name), noop, lists, *rest)

    out = some("o")
    apply("multi_tensor_scale", [some("a"), out], 0.3)
    for i, tensor in enumerate(out):
        record(f"scale.{i}", tensor)
    for i, tensor in enumerate(apply("multi_tensor_l2norm", [some("a")], True)):
        record(f"l2norm.{i}", tensor)
    g, p, m, v = some("g"), some("p"), some("m"), [tensor.square() for tensor in some("v")]
    apply("multi_tensor_adam", [g, p, m, v], 0.01, 0.9, 0.99, 1e-8, 3, 1, 1, 0.1)
    for i, tensor in enumerate((*p, *m, *v)):
        record(f"adam.{i}", tensor)
    g, p, m = some("g"), some("p"), some("m")
    apply("multi_tensor_sgd", [g, p, m], 0.1, 0.9, 0.0, 0.01, True, False, False, 0.5)
    for i, tensor in enumerate((*p, *m)):
        record(f"sgd.{i}", tensor)
    two, rate = (torch.full((1,), value, device=f.device) for value in (2.0, 0.01))
    for i, tensor in enumerate(apply("multi_tensor_unscale_l2norm", [some("a")], two, True)):
        record(f"unscale_l2norm.{i}", tensor)
    apply("multi_tensor_scale_tensor", [some("a"), out], two)
    step = torch.full((1,), 3, dtype=torch.int32, device=f.device)
    adam = (rate, 0.9, 0.99, 1e-8, step, 1, 1, 0.1, 1 / two)
    g, p, m, v = some("g"), some("p"), some("m"), [tensor.square() for tensor in some("v")]
    apply("multi_tensor_adam_capturable", [g, p, m, v], *adam)
    masters = [tensor.clone() for tensor in p]
    low = [[tensor.bfloat16() for tensor in part] for part in (g, p)]
    apply("multi_tensor_adam_capturable_master", [*low, m, v, masters], *adam)
    for i, tensor in enumerate((*out, *p, *m, *v, *low[1], *masters)):
        record(f"capturable.{i}", tensor)


def general_gemm(f: Torch, case: Case, record: Record) -> None:
    """Products of tensors, and of what layers handed on in FP8."""
    layout = case.options["layout"]
    shapes = {"TN": ((40, 48), (20, 48)), "NN": ((48, 40), (20, 48)), "NT": ((20, 40), (20, 48))}[layout]
    a, b = (f.array(draw(f"gemm{i}", Array(shape), 0, case.exact)) for i, shape in enumerate(shapes))
    gemm = te.cpp_extensions.general_gemm
    record("y", gemm(a, b, layout=layout)[0])
    out = torch.ones_like(gemm(a, b, layout=layout)[0])
    record("added", gemm(a, b, layout=layout, out=out, accumulate=True)[0])
    low = gemm(a.bfloat16(), b.bfloat16(), layout=layout, out_dtype=torch.float32)
    record("bfloat16", low[0])


def compiled(f: Torch, case: Case, record: Record) -> None:
    """A module within ``torch.compile(fullgraph=True)``."""
    layer = LAYERS[case.what]
    module = f.module(case.what, layer, case)
    try:
        call = torch.compile(module, fullgraph=True, backend=case.options["backend"])
        for step in range(STEPS):
            train(f, case, record, module, layer, step, call)
    finally:
        torch.compiler.reset()


def graphed(f: Torch, case: Case, record: Record) -> None:
    """A module whose forward and backward are CUDA graphs."""
    layer, recipe = LAYERS[case.what], RECIPES[case.recipe]
    module = f.module(case.what, layer, case)
    sample, _ = arguments(f, case, "sample", layer.call, 0)
    on = {"enabled": recipe is not None} | ({} if recipe is None else {"recipe": recipe})
    call = te.make_graphed_callables(module, tuple(sample.values()), **on)
    for step in range(STEPS):
        train(f, case, record, module, layer, step, lambda **kwargs: call(*kwargs.values()))


PROGRAMS: dict[str, Callable[[Any, Case, Record], None]] = layers.PROGRAMS | {
    program.__name__: program
    for program in (
        fp8_edges,
        main_grad,
        quantized_init,
        ops,
        extra,
        torch_autocast,
        convert,
        unpermuted,
        padded,
        multi_tensor,
        general_gemm,
        compiled,
        graphed,
    )
}


def frontend(device: str) -> Torch:
    """The frontend on a device."""
    return Torch(device)
