"""The cases of ``fp8kit`` itself: NumPy arrays, or CuPy's on a GPU."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import fp8kit as fk
from tests.golden import layers
from tests.golden.cases import RECIPES, Case
from tests.golden.layers import NO_DEVICE, NO_DTYPE, STEPS, Record, note, scope, train
from tests.golden.modules import LAYERS, Layer
from tests.golden.values import Angles, Array, HostArray, draw, parameter

_NUMPY = {"bfloat16": ml_dtypes.bfloat16}


def host(value: Any) -> HostArray:
    """An array of any kind on the host."""
    return np.asarray(fk.arrays.as_view(value).numpy())


class _Joined(fk.Function):
    """Outputs joined to one tensor, whose backward gives each the cotangent that came with it."""

    @staticmethod
    def forward(context: Any, *inputs: Any) -> Any:
        context.save(inputs[0])
        return inputs[0][0]

    @staticmethod
    def backward(context: Any, *cotangents: Any) -> Any:
        return (None, *context.saved[0])


class Native:
    """``layers.Frontend`` of ``fp8kit``."""

    def __init__(self, device: str) -> None:
        self.device = device

    def run(self, case: Case, record: Record) -> None:
        fk.manual_seed(1234)
        PROGRAMS[case.program](self, case, record)

    def module(self, key: str, layer: Layer, case: Case, **more: Any) -> Any:
        kwargs = dict(layer.args) | more
        if layer.module not in NO_DEVICE:
            kwargs["device"] = self.device
        if layer.module not in NO_DTYPE:
            kwargs["params_dtype"] = case.dtype
        made = getattr(fk.nn, layer.module)(**kwargs)
        made.load_state_dict(
            {
                name: parameter(key, name, own.shape, case.exact).astype(own.dtype.numpy)
                for name, own in made.named_parameters()
            }
        )
        return made

    def array(self, host: Any, dtype: str | None = None, grad: bool = False) -> Any:
        with np.errstate(over="ignore"):
            rounded = host if dtype is None else host.astype(_NUMPY.get(dtype, dtype))
        return fk.tensor(rounded, requires_grad=grad, device=self.device)

    def angles(self, angles: Angles) -> Any:
        made = fk.nn.RotaryPositionEmbedding(angles.dim, **angles.options, device=self.device)
        return made(angles.positions)

    def function(self, name: str) -> Callable[..., Any]:
        return getattr(fk.nn, name)

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, fk.Tensor)

    def dtype(self, tensor: Any) -> str:
        return str(tensor.dtype.name)

    def autocast(self, **options: Any) -> AbstractContextManager[Any]:
        return fk.autocast(**options)

    def no_grad(self) -> AbstractContextManager[Any]:
        return fk.no_grad()

    def backward(self, outputs: list[Any], cotangents: list[Any]) -> None:
        if len(outputs) == 1:
            outputs[0].backward(cotangents[0])
        else:
            _Joined.apply([g.data for g in cotangents], *outputs).backward(cotangents[0])

    def checkpoint(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return fk.checkpoint(function, *args, **options)

    def parameters(self, module: Any) -> dict[str, Any]:
        return dict(module.named_parameters())

    def fp8_state(self, module: Any) -> dict[str, Any]:
        return {
            f"{path}.{name}.{field}".lstrip("."): getattr(state, field)
            for path, part in module.named_modules()
            for name, state in getattr(part, "fp8_meta", {}).items()
            for field in ("scale", "scale_inv", "amax_history")
        }

    def zero_grad(self, module: Any) -> None:
        module.zero_grad()

    def optimizer(self, name: str, module: Any, options: Mapping[str, Any]) -> Any:
        kwargs = {key: value for key, value in options.items() if key != "write"}  # only in the cases' names
        return getattr(fk.optim, name)(module.parameters(), **kwargs)

    def cache(self, **options: Any) -> Any:
        return fk.nn.InferenceParams(**options, device=self.device)

    def reloaded(self, module: Any, fresh: Any, path: Path) -> None:
        fk.save(path, module)
        fk.load(path, fresh)

    def host(self, value: Any) -> HostArray:
        return host(value)


# --- programs -----------------------------------------------------------------------------------------------


def scaled(f: Native, case: Case, record: Record) -> None:
    """Loss scaling, and clipped gradients; the second step's gradients overflow and it is skipped."""
    layer = LAYERS[case.what]
    module = f.module(case.what, layer, case)
    optimizer = fk.optim.SGD(module.parameters(), lr=0.25)
    scaler = fk.optim.GradScaler(init_scale=64.0, growth_interval=1)
    for step in range(STEPS):
        kwargs, leaves = layers.arguments(f, case, case.what, layer.call, step)
        f.zero_grad(module)
        with scope(f, case):
            (y,) = layers.flat(f, module(**kwargs))
        (g,) = layers.cotangents(f, case, [y], step)
        broken = np.full(g.shape, np.inf, np.float32)
        scaler.scale(y).backward(f.array(broken, case.dtype) if step == 1 else g)
        if case.options["clip"] is not None:
            record(
                f"{step}.norm", fk.optim.clip_grad_norm_(module.parameters(), case.options["clip"], scaler)
            )
        scaler.step(optimizer)
        scaler.update()
        record(f"{step}.scale", np.float64(scaler.get_scale()).reshape(1))
        note(f, record, str(step), module, [y], leaves)
        for name, own in module.named_parameters():
            record(f"{step}.p.{name}", own)


_EDGES = (0.0, -0.0, np.inf, -np.inf, np.nan, 448.0, 449.0, 57344.0, 1e-10, 1e30, 2.0**-9, 2.0**-10)


def quantize(f: Native, case: Case, record: Record) -> None:
    """Codes, scales and values of ``fk.quantize``, of special values too."""
    options = dict(case.options)
    form, source = getattr(fk, options.pop("format", "E4M3")), options.pop("source", "measured")
    for i, shape in enumerate(((20, 256), (130, 272), (3, 5, 37))):
        x = draw(f"quantize{i}", Array(shape), i)
        if i == 2:
            x.reshape(-1)[: len(_EDGES)] = _EDGES
        kwargs = dict(options)
        if source == "stochastic":
            kwargs |= {"rounding": "stochastic", "rng": (7, 3)}
        if source == "fixed":
            known = fk.quantize(x, form, scaling=options.get("scaling", "tensor"))
            kwargs["scale"] = np.float32(0.75) * np.exp2(
                np.arange(known.scale_inv.size, dtype=np.float32) % 3
            ).reshape(known.scale_inv.shape)
        q = fk.quantize(f.array(x, case.dtype), form, **kwargs)
        record(f"{i}.data", q.data)
        record(f"{i}.scale_inv", q.scale_inv)
        record(f"{i}.values", q.dequantize())
        if len(shape) == 2:
            record(f"{i}.transposed", q.T.dequantize())


def matmul(f: Native, case: Case, record: Record) -> None:
    """Products of Float8Tensors of all scalings."""
    left, right = (case.options[side] for side in ("left", "right"))
    for m, k, n in ((20, 48, 40), (130, 272, 144)):
        a, b = (
            fk.quantize(f.array(draw(name, Array(shape), 0, case.exact)), fk.E4M3, scaling=scaling)
            for name, shape, scaling in (("a", (m, k), left), ("b", (n, k), right))
        )
        record(f"{m}.y", a @ b.T)


def saved(f: Native, case: Case, record: Record) -> None:
    """Model, optimiser and random state through files: values, and a step that goes on from them."""
    layer = LAYERS[case.what]

    def made(key: str) -> tuple[Any, Any]:
        module = f.module(key, layer, case)
        return module, fk.optim.SGD(module.parameters(), lr=0.5, momentum=0.5)

    (module, optimizer), (fresh, another) = made(case.what), made("fresh")
    for step in range(2):
        train(f, case, record, module, layer, step)
        optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        pairs = {
            "module": (module, fresh),
            "optimizer": (optimizer, another),
            "random": (fk.nn.RandomState(),) * 2,
        }
        for name, (source, target) in pairs.items():
            fk.save(Path(folder) / name, source, {"of": name})
            metadata = fk.load(Path(folder) / name, target)
            record(f"{name}.metadata", np.frombuffer(repr(sorted(metadata.items())).encode(), np.uint8))
    train(f, case, record, fresh, layer, 2)
    another.step()
    for name, own in fresh.named_parameters():
        record(f"p.{name}", own)


def random(f: Native, case: Case, record: Record) -> None:
    """The random state of seeds, and what an initialisation and a dropout draw from it."""
    for seed in (0, 5):
        fk.manual_seed(seed)
        drop = fk.nn.Dropout(0.25)
        for i in range(2):
            record(f"{seed}.{i}.y", drop(f.array(draw("random", Array((7, 33)), 0, True))))
        state = fk.nn.get_rng_state()
        for name, array in state.items():
            record(f"{seed}.{name.replace(f.device + ':0', 'device')}", array)
        fk.nn.set_rng_state(state)
        record(f"{seed}.repeated", drop(f.array(draw("random", Array((7, 33)), 0, True))))


def draw_from(f: Native, case: Case, record: Record) -> None:
    """A layer whose dropout draws from a source of the user's own."""
    layer = LAYERS[case.what]
    module, offsets = f.module(case.what, layer, case), itertools.count(0, 64)

    def source(device: str) -> Any:
        return fk.tensor(np.array([11, next(offsets)], np.int64), device=device)

    with fk.draw_from(source):
        for step in range(STEPS):
            train(f, case, record, module, layer, step)


def check_finite(f: Native, case: Case, record: Record) -> None:
    """A step that stops at an Inf, and leaves the FP8 state as it was."""
    layer = LAYERS[case.what]
    module = f.module(case.what, layer, case)
    for step in range(STEPS):
        kwargs, leaves = layers.arguments(f, case, case.what, layer.call, step)
        with fk.autocast(recipe=RECIPES[case.recipe], check_finite=True):
            outputs = layers.flat(f, module(**kwargs))
        (g,) = layers.cotangents(f, case, outputs, step)
        try:
            outputs[0].backward(np.where(step == 1, np.inf, host(g)).astype(np.float32))
            failed = "finite"
        except fk.NonFiniteError as error:
            failed = type(error).__name__
        record(f"{step}.failed", np.frombuffer(failed.encode(), np.uint8))
        note(f, record, str(step), module, outputs, leaves)
        f.zero_grad(module)


class _Cubed(fk.Function):
    @staticmethod
    def forward(context: Any, *inputs: Any) -> Any:
        context.save(inputs[0])
        return inputs[0] * inputs[0] * inputs[0]

    @staticmethod
    def backward(context: Any, *cotangents: Any) -> Any:
        return cotangents[0] * 3 * context.saved[0] * context.saved[0]


def user_function(f: Native, case: Case, record: Record) -> None:
    """A function of the user's own between layers, sums, reshapes, and a hook."""
    layer = LAYERS["Linear.plain"]
    module = f.module("user_function", layer, case)
    x = f.array(draw("x", Array((20, 48))), grad=True)
    seen: list[Any] = []
    with fk.autocast(recipe=RECIPES["current"]):
        y = module(x)
    y.register_hook(lambda g: seen.append(host(g)))
    z = _Cubed.apply(y.reshape(4, 5, 40)) + y.reshape(4, 5, 40)
    layers.backward(f, case, [z], 0)
    note(f, record, "0", module, [y, z], {"x": x})
    record("hook", seen[0])


def demo(f: Native, case: Case, record: Record) -> None:
    """A small language model in the manner of the demo: embedding, layers, loss, AdamW, clipping."""
    fk.manual_seed(3)
    own = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "device": f.device}
    embedding = fk.nn.Embedding(17, 32, device=f.device)
    model = fk.nn.Sequential(
        embedding,
        *(
            fk.nn.TransformerLayer(32, 48, 4, fuse_qkv_params=True, layer_number=i + 1, **own)
            for i in range(2)
        ),
        fk.nn.LayerNormLinear(32, 17, normalization="RMSNorm", device=f.device),
    )
    model.load_state_dict(
        {name: parameter("demo", name, own.shape, False) for name, own in model.named_parameters()}
    )
    optimizer = fk.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        ids = f.array(draw("ids", Array((12, 3), "ids", False, 17), step))
        with scope(f, case):
            logits = model(ids)
        loss = fk.nn.cross_entropy(logits.reshape(36, 17), ids.reshape(36))
        loss.backward()
        record(f"{step}.norm", fk.optim.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        note(f, record, str(step), model, [loss, logits], {})
        model.zero_grad()
    for name, array in {**model.state_dict(), **optimizer.state_dict()}.items():
        record(f"end.{name}", array)


def graph(f: Native, case: Case, record: Record) -> None:
    """A whole step as a CUDA graph."""
    layer, recipe = LAYERS[case.what], RECIPES[case.recipe]
    module = f.module(case.what, layer, case)
    optimizer = fk.optim.AdamW(module.parameters(), lr=0.01)

    def step(x: Any, g: Any) -> Any:
        with fk.autocast(enabled=recipe is not None, recipe=recipe):
            y = module(x)
        y.backward(g)
        optimizer.step()
        optimizer.zero_grad()
        return y

    call = fk.graph(step)
    for i in range(6):
        x, g = (f.array(draw(name, Array((20, 48)), i % 3), case.dtype) for name in "xg")
        record(f"{i}.y", call(x, g))
        for name, own in module.named_parameters():
            record(f"{i}.p.{name}", own)
        for name, array in f.fp8_state(module).items():
            record(f"{i}.{name}", array)


PROGRAMS: dict[str, Callable[[Any, Case, Record], None]] = layers.PROGRAMS | {
    program.__name__: program
    for program in (
        scaled,
        quantize,
        matmul,
        saved,
        random,
        draw_from,
        check_finite,
        user_function,
        demo,
        graph,
    )
}


def frontend(device: str) -> Native:
    """The frontend on a device."""
    return Native(device)
