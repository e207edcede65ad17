"""A call that is refused is refused before anything runs: FP8 state, random state, parameters and caches keep
their bits, and the next good call gives the bits that it would have given without the bad one."""

from __future__ import annotations

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import arrays, nn
from fp8kit.autograd import Tensor, tensor
from fp8kit.errors import Fp8kitError
from fp8kit.nn.fp8 import Fp8Module
from tests.support.bad_options import FFN, HEADS, H, S
from tests.support.refusals import Frontend, X, cases

OPTIONS = {"attention_dropout": 0.1, "layer_number": 1}


def mha(device, **options):
    return nn.MultiheadAttention(H, HEADS, device=device, **OPTIONS, **options)


def layer(device, **options):
    return nn.TransformerLayer(H, FFN, HEADS, device=device, hidden_dropout=0.1, **OPTIONS, **options)


CASES = cases(mha, layer)


def placed(value, device):
    """An option as the native frontend takes it."""
    if callable(value):
        return value(nn.InferenceParams, device)
    if isinstance(value, tuple):
        return tuple(placed(part, device) for part in value)
    return tensor(value, device=device) if isinstance(value, np.ndarray) else value


def bits(value):
    return arrays.as_view(value).numpy().tobytes()


def state_of(module):
    """All that a call might change of a module, and the random state."""
    found = {name: bits(parameter.view) for name, parameter in module.named_parameters()} | {
        "random": repr(nn.get_rng_state())
    }
    for path, child in module.named_modules():
        for name, view in child.extra_state().items():
            found[f"{path}.{name}"] = bits(view)
        if isinstance(child, Fp8Module):
            found[f"{path}.cache"] = (
                None if child._weights is None else {n: bits(v) for n, v in child._weights.arrays.items()}
            )
    return found


def cache_of(params):
    """What an ``InferenceParams`` holds."""
    if not isinstance(params, nn.InferenceParams):
        return None
    return repr({name: value for name, value in vars(params).items() if name not in ("_on_device", "device")})


def step(module, good, device):
    """A training step of micro-batches; outputs, gradients and state as bytes."""
    with fk.deterministic(True):
        with fk.autocast(enabled=True, recipe=fk.recipe.DelayedScaling(amax_history_len=4)):
            y = module(
                **{name: placed(value, device) for name, value in good.items()}, is_first_microbatch=True
            )
        y.backward(tensor(np.ones(y.shape, np.float32), device=device))
    grads = [bits(parameter.grad) for parameter in module.parameters() if parameter.grad is not None]
    for parameter in module.parameters():
        parameter.grad = None
    return bits(y.view), grads, state_of(module)


def made(make, device):
    nn.manual_seed(7)
    return make(device)


FRONTEND = Frontend(
    Fp8Module,
    placed,
    lambda: fk.autocast(enabled=True, recipe=fk.recipe.DelayedScaling(amax_history_len=4)),
    state_of,
    cache_of,
    step,
    late="is_first_microbatch that is no flag",
)


@pytest.mark.parametrize("case", CASES)
def test_a_refused_call_leaves_no_trace(device, case, monkeypatch):
    make, good, table = CASES[case]
    FRONTEND.refuses_without_a_trace(lambda: made(make, device), good, table, device, monkeypatch)


@pytest.mark.parametrize("first", [None, True])
@pytest.mark.parametrize("kind", [nn.Linear, nn.LayerNormLinear, nn.LayerNormMLP])
def test_a_layer_that_refuses_its_input_keeps_its_state(device, kind, first):
    """Shapes and dtypes of the input; the weight's cast and its cache come after it."""
    module, other = (made(lambda d: kind(H, FFN, device=d), device) for _ in range(2))
    good = {"inp": X}
    before = state_of(module)
    for bad in (np.zeros((S, H + 1), np.float32), np.zeros((S, H), np.float16), np.zeros((), np.float32)):
        for _ in range(2):
            with (
                pytest.raises(Fp8kitError),
                fk.autocast(enabled=True, recipe=fk.recipe.DelayedScaling(amax_history_len=4)),
            ):
                module(placed(bad, device), is_first_microbatch=first)
            assert state_of(module) == before
        assert step(module, good, device) == step(other, good, device)
        before = state_of(module)


def test_an_unknown_option_is_none(device):
    for make in (mha, layer):
        module = made(make, device)
        before = state_of(module)
        with pytest.raises(TypeError, match="colour"):
            module(placed(X, device), colour="red")
        assert state_of(module) == before
        assert isinstance(module(placed(X, device)), Tensor)


@pytest.mark.parametrize("kind", [fk.optim.AdamW, fk.optim.SGD])
def test_a_step_that_refuses_a_gradient_is_none(device, kind):
    """With a scaler too, whose factor and count stay; afterwards steps go on as if nothing had been."""
    params = [
        [
            tensor(np.linspace(-1, 1, n, dtype=np.float32), requires_grad=True, device=device)
            for n in (3, 4, 5)
        ]
        for _ in range(2)
    ]
    optimizers, scalers = (
        [kind(own, lr=0.1) for own in params],
        [fk.optim.GradScaler(init_scale=4.0, growth_interval=2) for _ in range(2)],
    )

    def state(at):
        arrays_of = (
            [p.view for p in params[at]]
            + list(optimizers[at].state_dict().values())
            + list(scalers[at].state_dict().values())
        )
        return [bits(view) for view in arrays_of]

    for _ in range(4):
        for own in params:
            for param in own:
                param.grad = tensor(np.full(param.shape, 2, np.float32), device=device)
        before, good = state(0), params[0][2].grad
        for wrong in (np.ones(6, np.float32), np.full(5, np.inf, np.float16)):
            params[0][2].grad = tensor(wrong, device=device)
            for wanted in (
                optimizers[0].step,
                lambda: scalers[0].step(optimizers[0]),
                lambda: scalers[0].unscale_(optimizers[0]),
            ):
                with pytest.raises(Fp8kitError):
                    wanted()
                scalers[0].update()
                assert state(0) == before
        params[0][2].grad = good
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.step(optimizer)
            scaler.update()
        assert state(0) == state(1)


@pytest.mark.parametrize("recipe", [None, fk.recipe.DelayedScaling()], ids=["high", "fp8"])
@pytest.mark.parametrize(
    ("kind", "sizes"),
    {
        nn.Linear: (4, 4),
        nn.LayerNormLinear: (4, 4),
        nn.LayerNormMLP: (4, 8),
        nn.LayerNorm: (4,),
        nn.RMSNorm: (4,),
    }.items(),
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_an_input_unlike_the_parameters_is_what_is_named(kind, sizes, recipe):
    layer = kind(*sizes, device="cpu")
    x = tensor(np.ones((2, 4), np.float32), dtype="float16", device="cpu")
    with fk.autocast(enabled=recipe is not None, recipe=recipe):
        with pytest.raises(fk.FormatError, match=r": inp: got float16, expected float32 as the parameters$"):
            layer(x)
        name = next(iter(dict(layer.named_parameters())))  # one parameter alone is unlike: it is named itself
        odd = getattr(layer, name)
        setattr(layer, name, nn.Parameter(tensor(odd.numpy(), dtype="float16", device="cpu").view))
        if len(list(layer.parameters())) > 1:
            with pytest.raises(fk.FormatError, match=rf": {name}: got float16, expected float32$"):
                layer(x.numpy().astype(np.float32))


def test_a_misspelt_module_is_told_what_was_meant():
    with pytest.raises(AttributeError, match=r"^module 'fp8kit\.optim' has no attribute 'Adam'; .* AdamW\?$"):
        _ = fk.optim.Adam
    with pytest.raises(TypeError, match=r"argument 'learning_rate'; did you mean lr\?$"):
        fk.optim.AdamW([], learning_rate=1e-3)
    with pytest.raises(fk.FormatError, match=r"got 'float8', expected one of float32, bfloat16, float16$"):
        nn.Linear(4, 6, params_dtype="float8")
    with pytest.raises(AttributeError, match=r"^module 'fp8kit\.nn' has no attribute 'Linaer'; .* Linear\?$"):
        _ = fk.nn.Linaer
    assert not hasattr(fk.nn, "_nothing")
