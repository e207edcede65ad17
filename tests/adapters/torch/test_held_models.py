"""Models of transformers, and any others, whose layers hold their weights in FP8: read and written by
transformers, safetensors and accelerate."""

from __future__ import annotations

import io

import fp8kit_torch as te
import pytest
import torch
from accelerate import (
    Accelerator,
    cpu_offload,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from safetensors.torch import load_file, load_model, save_file, save_model
from transformers import PretrainedConfig, PreTrainedModel

from fp8kit.recipe import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling
from fp8kit.testing.compare import assert_same_bits

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
CURRENT = Float8CurrentScaling()
HELD = [
    "layer.self_attention.layernorm_qkv.weight",
    "layer.self_attention.proj.weight",
    "layer.layernorm_mlp.fc1_weight",
    "layer.layernorm_mlp.fc2_weight",
    "head.weight",
]


class Config(PretrainedConfig):
    model_type = "of_layers"


class Model(PreTrainedModel):
    """A model of transformers that is made of this package's layers."""

    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "fuse_qkv_params": True}
        self.layer = te.TransformerLayer(64, 128, 4, **options)
        self.head = te.Linear(64, 32)
        self.post_init()

    def forward(self, x):
        return self.head(self.layer(x))


def made(recipe=None, **options):
    with te.quantized_model_init(enabled=recipe is not None, recipe=recipe or CURRENT):
        return Model(Config(), **options)


def held_names(model):
    return [name for name, p in model.named_parameters() if isinstance(p, te.QuantizedTensor)]


def values(tensor):
    plain = tensor.dequantize() if isinstance(tensor, te.QuantizedTensor) else tensor
    return plain.detach().float().numpy()


def assert_same_values(model, other):
    """That parameters have the same values, whatever holds them."""
    others = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        assert_same_bits(name, values(parameter), values(others[name]))


def held_twin(plain):
    twin = made(CURRENT).to(plain.dtype)
    twin.load_state_dict(plain.state_dict())
    return twin


@pytest.fixture
def plain():
    torch.manual_seed(0)
    return made()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_pretrained_within_quantized_model_init(dtype, plain, tmp_path):
    plain = plain.to(dtype)
    plain.save_pretrained(tmp_path)
    with te.quantized_model_init(recipe=CURRENT, preserve_high_precision_init_val=True):
        model, info = Model.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert held_names(model) == HELD
    assert_same_values(model, held_twin(plain))
    for name in HELD:
        kept = model.get_parameter(name).get_high_precision_init_val()
        assert_same_bits(name, values(kept), values(plain.get_parameter(name)))
    with te.autocast(recipe=CURRENT):
        model(torch.randn(8, 2, 64, dtype=dtype)).sum().backward()
    assert model.head.weight.grad is not None


@pytest.mark.parametrize(
    "kind", [Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling]
)
def test_save_pretrained_writes_values(kind, tmp_path):
    torch.manual_seed(0)
    model = made(recipe := kind())
    assert held_names(model) == HELD
    model.save_pretrained(tmp_path)
    plain = Model.from_pretrained(tmp_path)
    assert not held_names(plain)
    assert_same_values(plain, model)
    with te.quantized_model_init(recipe=recipe):
        again = Model.from_pretrained(tmp_path)
    assert held_names(again) == HELD
    twin = made(recipe)
    twin.load_state_dict(plain.state_dict())
    assert_same_values(again, twin)


def test_save_pretrained_in_shards(plain, tmp_path):
    model = held_twin(plain)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 2
    assert max(path.stat().st_size for path in tmp_path.glob("*.safetensors")) < 80_000
    assert_same_values(Model.from_pretrained(tmp_path), model)


def test_safetensors_write_values(plain, tmp_path):
    model = held_twin(plain)
    save_file(model.state_dict(), tmp_path / "state")
    save_model(model, str(tmp_path / "model"))
    Accelerator(cpu=True).save_model(model, tmp_path / "accelerate")
    for path in ("state", "model", "accelerate/model.safetensors"):
        found = load_file(tmp_path / path)
        for name, parameter in model.named_parameters():
            assert_same_bits(name, found[name].numpy(), values(parameter))
    other, held = made(), made(CURRENT)
    for loaded in (other, held):
        assert load_model(loaded, str(tmp_path / "model")) == (set(), [])
    assert_same_values(other, model)
    assert_same_values(held, held_twin(other))


def test_torch_writes_codes(plain):
    model, file = held_twin(plain), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=False)
    assert isinstance(state["head.weight"], te.QuantizedTensor)
    assert file.getbuffer().nbytes < 4 * sum(p.numel() for p in model.parameters())


def empty():
    with te.quantized_model_init(recipe=CURRENT), init_empty_weights():
        return Model(Config())


def parameters_of(model):
    """The state without that of FP8, which accelerate has no way to load."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_accelerate_loads_into_an_empty_model(plain, tmp_path):
    save_file(parameters_of(plain), tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load_checkpoint_and_dispatch(empty(), str(tmp_path), device_map={"": "cpu"})
    assert held_names(model) == HELD
    assert_same_values(model, held_twin(plain))


def test_accelerate_brings_weights_for_each_call(plain):
    model = cpu_offload(empty(), "cpu", state_dict=parameters_of(plain))
    x = torch.randn(8, 2, 64)
    with torch.no_grad(), te.autocast(recipe=CURRENT):
        assert_same_bits("y", model(x).numpy(), held_twin(plain)(x).numpy())


ON_DEVICE = {"layer": "cpu", "head": "cpu"}
OFFLOADS = {
    "cpu_offload": lambda model, _: cpu_offload(model, "cpu"),
    "disk_offload": lambda model, folder: disk_offload(model, folder, "cpu"),
    "dispatch_model": lambda model, _: dispatch_model(model, ON_DEVICE, "cpu", force_hooks=True),
    "dispatch_model, disk": lambda model, folder: dispatch_model(
        model, ON_DEVICE | {"head": "disk"}, "cpu", offload_dir=folder
    ),
}


@pytest.mark.parametrize("how", OFFLOADS)
@pytest.mark.parametrize("kind", [Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling])
def test_accelerate_offloads_a_model_that_holds_its_weights(how, kind, tmp_path):
    """It brings codes, from the disk values; and again for the next call."""
    torch.manual_seed(0)
    model, recipe, x = made(kind()), kind(), torch.randn(8, 2, 64)
    kept = {name: values(model.get_parameter(name)) for name in HELD}
    with torch.no_grad(), te.autocast(recipe=recipe):
        wanted = model(x)
        model = OFFLOADS[how](model, str(tmp_path / "offloaded"))
        for _ in range(2):
            assert_same_bits("y", model(x).numpy(), wanted.numpy())
    there = {name for name in HELD if not model.get_parameter(name).is_meta}
    assert there == {"dispatch_model": {*HELD}, "dispatch_model, disk": {*HELD[:-1]}}.get(how, set())
    for name in there:
        assert isinstance(model.get_parameter(name), te.QuantizedTensor)
        assert_same_bits(name, values(model.get_parameter(name)), kept[name])


def test_accelerate_dispatches_no_weight_in_fp8_that_layers_share():
    """It would take one layer's for all others': they have no addresses."""
    with te.quantized_model_init(recipe=CURRENT):
        model = torch.nn.Sequential(*(te.Linear(64, 64) for _ in range(3)))
    model[1].weight = model[0].weight
    places = {str(i): "cpu" for i in range(3)}
    with pytest.raises(NotImplementedError, match="data_ptr: weight: got a weight in FP8 that sever"):
        dispatch_model(model, places, "cpu", force_hooks=True)
    x = torch.randn(32, 64)
    with torch.no_grad(), te.autocast(recipe=CURRENT):
        assert_same_bits("y", cpu_offload(model, "cpu")(x).numpy(), model(x).numpy())


def test_numpy_of_a_weight_is_its_values():
    weight = made(CURRENT).head.weight
    with pytest.raises(RuntimeError, match="requires grad"):
        weight.numpy()
    assert_same_bits("values", weight.detach().numpy(), values(weight))
    assert_same_bits("values", weight.numpy(force=True), values(weight))
