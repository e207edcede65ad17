"""What make_graphed_callables takes and does. On a CPU an object stands in a graph's place that runs what was
captured once more, and puts the results where those of the capture lie: what is around the graphs is
tested."""

from __future__ import annotations

import copy

import fp8kit_torch as te
import pytest
import torch
from fp8kit_torch import graph_capture, graphs

import fp8kit as fk
from fp8kit.errors import ArgumentError, AutogradError, BackendError, FormatError, RecipeError, ShapeError

from .replayed import Again

K, ROWS = 32, 16
DELAYED, CURRENT = te.DelayedScaling(amax_history_len=3), te.Float8CurrentScaling()


@pytest.fixture(autouse=True, params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request, monkeypatch):
    """The device of all tensors and layers."""
    if request.param == "cpu":
        monkeypatch.setattr(graph_capture, "Graph", Again)
        monkeypatch.setattr(graphs, "want_device", lambda *args: None)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    with torch.device(request.param), fk.deterministic():
        yield request.param


def linear(inputs=K, outputs=K, **options):
    return te.Linear(inputs, outputs, device=torch.get_default_device(), **options)


def net(**options):
    torch.manual_seed(0)
    layers = (
        te.Linear(K, 48, device=torch.get_default_device(), **options),
        torch.nn.GELU(),
        te.Linear(48, K, device=torch.get_default_device()),
    )
    return torch.nn.Sequential(*layers)


def sample(grad=True):
    return torch.randn(ROWS, K, requires_grad=grad)


def state_of(model):
    return [p for m in model.modules() for s in getattr(m, "fp8_meta", {}).values() for p in s.parts]


def train(call, model, recipe, steps=4, **kwargs):
    """Outputs, gradients, and the state after some steps."""
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        x = sample()
        model.zero_grad()
        with te.autocast(recipe=recipe):
            y = call(x, **kwargs)
        y.square().sum().backward()
        found += [y.detach().clone(), x.grad.clone(), *[p.grad.clone() for p in model.parameters()]]
    return found + [part.clone() for part in state_of(model)]


def same(found, wanted):
    assert len(found) == len(wanted)
    assert [i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if not torch.equal(a, b)] == []


@pytest.mark.parametrize("recipe", [DELAYED, CURRENT], ids=["delayed", "current"])
def test_replays_give_what_eager_steps_give(recipe):
    model = net()
    twin = copy.deepcopy(model)
    assert te.make_graphed_callables(model, (sample(),), enabled=True, recipe=recipe) is model
    same(train(model, model, recipe), train(twin, twin, recipe))


def test_capture_changes_no_state_gradient_or_main_grad():
    model = net(fuse_wgrad_accumulation=True)
    model[0].weight.main_grad = torch.full_like(model[0].weight, 3.0)
    te.make_graphed_callables(model, (sample(),), enabled=True, recipe=DELAYED)
    assert all(p.grad is None for p in model.parameters())
    assert bool((model[0].weight.main_grad == 3).all())
    assert all(bool((s.scale == 1).all()) and not s.amax_history.any() for s in model[0].fp8_meta.values())


class Scaled(torch.nn.Module):
    """Tensors by name, in a mapping, and a plain argument."""

    def __init__(self):
        super().__init__()
        self.layer = linear()

    def forward(self, x, *, scale=None, more=None, twice=False):
        y = self.layer(x) * scale + more["bias"]
        return {"y": y * 2 if twice else y, "mask": y > 0}


def test_sample_kwargs_are_inputs_that_get_gradients():
    torch.manual_seed(0)
    model = Scaled()
    twin = copy.deepcopy(model)

    def named():
        return {"scale": torch.rand(K, requires_grad=True), "more": {"bias": sample()}, "twice": True}

    te.make_graphed_callables(model, (sample(),), sample_kwargs=named(), enabled=True, recipe=CURRENT)
    for seed in range(3):
        results = []
        for call in (model, twin):
            torch.manual_seed(seed)
            x, kwargs = sample(), named()
            with te.autocast(recipe=CURRENT):
                out = call(x, **kwargs)
            out["y"].sum().backward()
            assert not out["mask"].requires_grad
            results.append([*out.values(), x.grad, kwargs["scale"].grad, kwargs["more"]["bias"].grad])
        same(*results)


def once_more():
    return {"scale": torch.rand(K), "more": {"bias": torch.rand(ROWS, K)}, "twice": True}


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"scale": None, "more": None, "twice": None}, ArgumentError, "as captured"),
        ({"other": 1}, ArgumentError, "got other"),
        ({"twice": False}, ArgumentError, "as captured"),
        ({"more": {}}, ArgumentError, "as captured"),
        ({"scale": (1,)}, ShapeError, "as captured"),
        ({"scale": torch.float64}, FormatError, "as captured"),
    ],
)
def test_a_call_unlike_the_captured_one_is_refused(change, error, said):
    model = Scaled()
    te.make_graphed_callables(model, (sample(),), sample_kwargs=once_more())
    if error is ShapeError:
        change = {"scale": torch.rand(change["scale"])}
    elif error is FormatError:
        change = {"scale": torch.rand(K, dtype=change["scale"])}
    with pytest.raises(error, match=said):
        model(sample(), **once_more() | change)


def test_a_named_argument_of_the_capture_is_asked_for():
    model = Scaled()
    te.make_graphed_callables(model, (sample(),), sample_kwargs=once_more())
    with pytest.raises(ArgumentError, match="got no more, scale, twice"):
        model(sample())


def test_a_gradient_that_the_capture_did_not_have_is_refused():
    model = net()
    te.make_graphed_callables(model, (sample(False),))
    model(sample(False)).sum().backward()
    with pytest.raises(ArgumentError, match="requires a gradient"):
        model(sample())


def test_in_evaluation_mode_there_is_no_backward_pass():
    model = net().eval()
    twin = copy.deepcopy(model)
    te.make_graphed_callables(model, (sample(False),), enabled=True, recipe=CURRENT)
    x = sample(False)
    with te.autocast(recipe=CURRENT):
        y = model(x)
        assert not y.requires_grad
        assert torch.equal(y, twin(x))
    with pytest.raises(ArgumentError, match="evaluation mode"):
        model(sample())


@pytest.mark.parametrize("fused", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("recipe", [DELAYED, CURRENT], ids=["delayed", "current"])
def test_micro_batches_share_the_casts_of_weights(recipe, fused, monkeypatch):
    """Steps of three micro-batches, whose gradients add up; the optimiser changes the weights between
    steps."""
    torch.manual_seed(0)
    model = linear(fuse_wgrad_accumulation=fused)
    if fused:
        model.weight.main_grad = torch.full_like(model.weight, 7.0)
    twin = copy.deepcopy(model)
    if fused:
        twin.weight.main_grad = model.weight.main_grad.clone()
    monkeypatch.setattr(Again, "layers", (model,))
    te.make_graphed_callables(model, (sample(),), enabled=True, recipe=recipe, cache_quantized_params=True)
    results = []
    for call in (model, twin):
        found = []
        for step in range(3):
            call.zero_grad()
            for batch in range(3):
                torch.manual_seed(3 * step + batch)
                x = sample()
                with te.autocast(recipe=recipe):
                    y = call(x, is_first_microbatch=batch == 0)
                y.square().sum().backward()
                found += [y.detach().clone(), x.grad.clone()]
            gradient = call.weight.main_grad if fused else call.weight.grad
            found += [gradient.clone(), *[part.clone() for part in state_of(call)]]
            with torch.no_grad():
                call.weight.sub_(gradient, alpha=1e-2)
        results.append(found)
    same(*results)


def test_a_call_says_whether_its_micro_batch_is_the_first():
    model = linear()
    te.make_graphed_callables(model, (sample(),), enabled=True, recipe=CURRENT, fp8_weight_caching=True)
    with te.autocast(recipe=CURRENT), pytest.raises(ArgumentError, match="is_first_microbatch"):
        model(sample())


def test_an_interleaved_pipeline_gives_a_function_for_each_sample():
    """Two chunks of one layer, two micro-batches; inputs' memory is shared where it may be."""
    order = [1, 2, -2, -1, 1, 2, -2, -1]
    torch.manual_seed(0)
    layers = [linear() for _ in range(2)]
    twins = copy.deepcopy(layers)
    samples = [(sample(),) for _ in range(4)]
    calls = te.make_graphed_callables(
        tuple(layers),
        samples,
        enabled=True,
        recipe=DELAYED,
        _order=order,
        _num_layers_per_chunk=1,
        _reuse_graph_input_output_buffers=True,
    )
    assert len(calls) == 4
    used = [call.call.inputs[0] for call in calls]
    assert used[1] is used[2]
    assert used[3] is used[0]
    assert used[0] is not used[2]
    assert "forward" not in vars(layers[0])
    for step in range(2):
        results = []
        for own in ("graphed", "eager"):
            found = []
            with te.autocast(recipe=DELAYED):
                for batch in range(2):
                    torch.manual_seed(10 * step + batch)
                    x = sample()
                    if own == "graphed":
                        y = calls[2 + batch](calls[batch](x))
                    else:
                        y = twins[1](twins[0](x))
                    y.square().sum().backward()
                    found += [y.detach().clone(), x.grad.clone()]
            model = torch.nn.ModuleList(layers if own == "graphed" else twins)
            results.append(found + [p.grad for p in model.parameters()] + state_of(model))
        same(*results)


def test_backward_of_a_call_that_is_not_the_last_is_refused():
    """Its activations were written over."""
    model = net()
    te.make_graphed_callables(model, (sample(),))
    first = model(sample()).sum()
    model(sample()).sum().backward()
    with pytest.raises(AutogradError, match="another call of the same graph"):
        first.backward()


@pytest.mark.parametrize("clones", [True, False])
def test_gradients_of_parameters_are_clones_unless_they_are_not_to_be(clones):
    model = linear()
    te.make_graphed_callables(model, (sample(),), clone_param_grads_on_return=clones)
    model(sample()).sum().backward()
    own = model.forward.call.gradients[1]
    assert torch.equal(model.weight.grad, own)
    assert (model.weight.grad.data_ptr() == own.data_ptr()) is not clones


def test_reset_gives_the_module_back_as_it_was():
    model = net()
    te.make_graphed_callables(model, (sample(),), enabled=True, recipe=DELAYED)
    call = model.forward.call
    model.reset()
    assert call.forward_graph is None
    assert not call.outputs
    assert "forward" not in vars(model)
    assert not hasattr(model, "reset")
    twin = copy.deepcopy(model)
    same(train(model, model, DELAYED), train(twin, twin, DELAYED))


def test_a_function_of_a_pipeline_is_gone_after_reset():
    call, _ = te.make_graphed_callables((net(),), [(sample(),)] * 2, _order=[1, 1, -1, -1])
    call.reset()
    with pytest.raises(BackendError, match="after reset"):
        call(sample())


def test_a_copy_of_a_graphed_module_runs_eagerly():
    model = net()
    te.make_graphed_callables(model, (sample(),), enabled=True, recipe=CURRENT)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.zero_()
        twin[0].bias.fill_(1.0)
    with te.autocast(recipe=CURRENT):
        assert not torch.equal(twin(sample()), model(sample()))


def test_hooks_of_the_capture_run_beside_it_and_not_in_replays():
    seen, warm_up = [], []
    hooks = {
        "forward_pre_hooks": {0: lambda module, args: seen.append(("pre", len(args)))},
        "forward_hooks": {
            1: lambda module, args, kwargs, out: seen.append(("post", sorted(kwargs), out.shape))
        },
        "forward_hooks_with_kwargs": {1: True},
        "backward_pre_hooks": {0: lambda module, grads: seen.append(("back", grads[0].shape))},
        "backward_hooks": {0: lambda module, own, grads: seen.append(("done", own[0].shape))},
    }
    model = net()
    te.make_graphed_callables(
        model,
        (sample(),),
        2,
        capture_time_hooks=[hooks],
        pre_warmup_hook=lambda: warm_up.append(len(seen)),
        post_warmup_hook=lambda: warm_up.append(len(seen)),
    )
    once = [("pre", 1), ("post", [], (ROWS, K)), ("back", (ROWS, K)), ("done", (ROWS, K))]
    assert seen == once * 3
    assert warm_up == [0, 8]
    model(sample()).sum().backward()
    assert len(seen) == 12


def test_a_hook_of_the_capture_returns_nothing():
    hooks = {"forward_pre_hooks": {0: lambda module, args: args}}
    with pytest.raises(ArgumentError, match="forward_pre_hooks with a result"):
        te.make_graphed_callables(net(), (sample(),), capture_time_hooks=[hooks])


def test_a_state_that_was_replaced_is_refused():
    """By ``load_state_dict``: the graph would go on reading the former one."""
    model = net()
    te.make_graphed_callables(model, (sample(),), enabled=True, recipe=DELAYED)
    train(model, model, DELAYED, 1)
    model.load_state_dict(model.state_dict())
    with te.autocast(recipe=DELAYED), pytest.raises(BackendError, match="a capture after load_state_dict"):
        model(sample())


def test_another_recipe_than_the_captured_one_is_refused():
    model = net()
    te.make_graphed_callables(model, (sample(),), enabled=True, recipe=CURRENT)
    with te.autocast(recipe=DELAYED), pytest.raises(RecipeError, match="as captured"):
        model(sample())


def test_a_function_of_tensors_can_be_graphed():
    layer = linear()
    call = te.make_graphed_callables(lambda x: layer(x).relu(), (sample(),))
    x = sample()
    y = call(x)
    y.sum().backward()
    assert torch.equal(y, layer(x).relu())
    assert x.grad is not None


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"sample_args": torch.ones(2)}, "sample_args"),
        ({"sample_args": (torch.ones(2),), "modules": (torch.nn.GELU(),)}, "sample_args"),
        ({"modules": (torch.nn.GELU(),) * 2, "sample_args": ((torch.ones(2),),)}, "sample_args"),
        ({"sample_kwargs": [1]}, "sample_kwargs"),
        ({"modules": 3}, "modules"),
        ({"_num_layers_per_chunk": 1}, "_num_layers_per_chunk"),
        ({"_reuse_graph_input_output_buffers": True}, "_reuse_graph_input_output_buffers"),
        ({"capture_time_hooks": [{}, {}]}, "capture_time_hooks"),
        ({"capture_time_hooks": [{"hooks": {}}]}, "capture_time_hooks"),
        ({"capture_time_hooks": [{"forward_hooks": {0: 1}}]}, "capture_time_hooks"),
        ({"pre_warmup_hook": 1}, "pre_warmup_hook"),
        ({"retain_graph_in_backward": "yes"}, "retain_graph_in_backward"),
        ({"fp8_weight_caching": True, "cache_quantized_params": True}, "fp8_weight_caching"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(change, argument):
    arguments = {"modules": torch.nn.GELU(), "sample_args": (sample(),), **change}
    with pytest.raises((ArgumentError, RecipeError)) as caught:
        te.make_graphed_callables(**arguments)
    assert caught.value.argument == argument


def test_modules_with_hooks_or_in_both_modes_are_refused():
    hooked = torch.nn.GELU()
    hooked.register_forward_hook(lambda *args: None)
    with pytest.raises(ArgumentError, match="with hooks"):
        te.make_graphed_callables(hooked, (sample(),))
    with pytest.raises(ArgumentError, match="training mode"):
        te.make_graphed_callables((torch.nn.GELU(), torch.nn.GELU().eval()), ((sample(),), (sample(),)))
    with pytest.raises(NotImplementedError, match="delay_wgrad_compute"):
        te.make_graphed_callables(linear(delay_wgrad_compute=True), (sample(),))


def test_an_input_without_a_gradient_is_refused_unless_it_is_allowed():
    class Part(torch.nn.Module):
        def forward(self, x, y):
            return x * 2

    with pytest.raises(ArgumentError, match="allow_unused_input"):
        te.make_graphed_callables(Part(), (sample(), sample()))
    model = te.make_graphed_callables(Part(), (sample(), sample()), allow_unused_input=True)
    x, y = sample(), sample()
    model(x, y).sum().backward()
    assert x.grad is not None
    assert y.grad is None


def test_an_input_in_the_samples_memory_is_read_in_its_own_order():
    x = torch.randn(ROWS, ROWS)
    model = te.make_graphed_callables(torch.nn.ReLU(), (x,))
    wanted = x.t().relu()
    assert torch.equal(model(x.t()), wanted)


def test_gradients_of_leaves_are_their_own():
    """Else the next replay writes to what the leaf has kept."""
    plain = torch.nn.Linear(K, K)
    twin = copy.deepcopy(plain)
    te.make_graphed_callables(plain, (sample(),))
    found = []
    for model in (plain, twin):
        x = torch.ones(ROWS, K, requires_grad=True)
        for factor in (1.0, 2.0, 4.0):
            model(x).mul(factor).sum().backward()
        found.append([x.grad])
    same(*found)
