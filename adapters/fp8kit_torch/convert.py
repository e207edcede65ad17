"""``convert``: a plain model's linear layers and norms replaced by fp8kit's, in place and around the same
parameters; ``revert`` undoes it.

No weight is copied: a new module holds the old one's ``Parameter`` objects, so optimisers, tied weights and
checkpoints do not notice. transformers' ``Conv1D`` keeps its (in, out) weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence

from torch import jit, nn

from fp8kit.arguments import flag, function, named_well
from fp8kit.errors import ArgumentError
from fp8kit_torch.checkpoint_state import hand_over
from fp8kit_torch.checks import module
from fp8kit_torch.converted import Converted
from fp8kit_torch.converted_attention import hand_back, take_over
from fp8kit_torch.converted_mlp import fuse, separate
from fp8kit_torch.convertible import replacement
from fp8kit_torch.torch_compat import own_modules

Filter = Callable[[nn.Module, str], bool]

# torch's layers that read their parts' parameters in inference, past the parts: (class, the attribute that
# allows it, its value without)
_PAST_PARTS = (
    (nn.TransformerEncoderLayer, "activation_relu_or_gelu", 0),
    (nn.TransformerEncoder, "use_nested_tensor", False),
)
_ALLOWED = "_fp8kit_plain"  # where such a layer keeps the attribute's value meanwhile


@named_well
def convert(
    model: nn.Module,
    filter_fn: Filter | None = None,
    *,
    linear_classes: Sequence[type[nn.Linear]] = (),
    attention: bool = True,
    gated_mlp: bool = True,
) -> nn.Module:
    """Replace in place, and return ``model``: every ``nn.Linear``, every ``Conv1D`` of transformers, every
    LayerNorm over one dimension, with or without bias, every RMSNorm, with * weight or * (1 + weight), and
    the experts of transformers' models, as grouped products ("Mixture of experts" in docs/ says which).

    * ``filter_fn``: called with (module, its name in ``model``); False leaves that module as it is. A
      language model's head, for one.
    * ``linear_classes``: subclasses of ``nn.Linear`` that are replaced too, Falcon's ``FalconLinear`` for
      one. Those that compute anything but x W^T + b are left alone.
    * ``attention``: whether transformers' models attend by fp8kit's operation where no mask array is needed
      ("A model of transformers" in docs/clients.md), in high precision under every recipe. False leaves it
      as it is.
    * ``gated_mlp``: whether an MLP ``down_proj(act(gate_proj(x)) * up_proj(x))`` whose layers are replaced
      runs as one operation under delayed scaling ("Convert a plain model" in docs/torch.md). False: layer by
      layer, also in a model that was converted before.

    Parameters stay the same objects, and a new module is an instance of the class that it stands for. Outside
    of ``autocast`` the model computes what it did, up to the last bits. Convert before ``torch.compile``,
    DistributedDataParallel, fully_shard or ``parallelize_module``, and ``revert`` before a ``state_dict`` for
    the plain model, since FP8 state is among a converted one's keys.

    What stays as it is (``coverage`` tells why):

    * modules that ``torch.jit`` has compiled; as ``model`` they are an ArgumentError;
    * modules of other dtypes than float32, bfloat16 and float16, and those whose ``forward`` was replaced;
    * weights that are made of others before each call (pruned, with a spectral or weight norm), or are not
      made yet (lazy), and experts' weights in one array of three dimensions that lie in another way;
    * norms of other libraries that are not found to be one when they are run on a few numbers, which on the
      meta device they are not;
    * the projections of ``nn.MultiheadAttention``, which reads their weights itself.

    What is different afterwards: there is no gradient of a gradient, no ``torch.func`` and no float64, and
    ``nn.TransformerEncoder`` leaves out its fast path, which would pass the layers by, and which sets padded
    positions to 0. Convert such a model whole: over layers converted alone it keeps that path.

    ArgumentError where ``model`` itself would have to be replaced, and then nothing is; a UserWarning where
    nothing was replaced, neither now nor before.
    """
    module("convert", "model", model)
    if isinstance(model, jit.ScriptModule):
        wanted = "a model of Python modules, as it was before torch.jit"
        raise ArgumentError("convert", "model", type(model).__name__, wanted)
    if filter_fn is not None:
        said = "a function of a module and its name"
        function("convert", "filter_fn", filter_fn, takes=(model, ""), said=said)
    linears = tuple(linear_classes)
    if not all(isinstance(kind, type) and issubclass(kind, nn.Linear) for kind in linears):
        raise ArgumentError("convert", "linear_classes", linear_classes, "subclasses of nn.Linear")
    flag("convert", "attention", attention)
    flag("convert", "gated_mlp", gated_mlp)
    if not isinstance(replacement(model, linears), str) and (filter_fn is None or filter_fn(model, "")):
        wanted = "a model that contains layers: no layer can replace itself"
        raise ArgumentError("convert", "model", type(model).__name__, wanted)
    swapped: dict[nn.Module, nn.Module] = {}
    places, chosen, left = list(children(model)), [], 0
    for parent, name, child, path in places:
        if filter_fn is not None and not filter_fn(child, path):
            left += 1
            continue
        if child not in swapped:
            made = replacement(child, linears)
            if isinstance(made, str):
                continue
            swapped[child] = made()
        chosen.append((parent, name, swapped[child]))
    for parent, name, made_one in chosen:
        parent.register_module(name, made_one)
    hand_over()
    for layer in model.modules():
        for kind, name, without in _PAST_PARTS:
            fast = isinstance(layer, kind) and name in vars(layer) and _ALLOWED not in vars(layer)
            if fast and any(isinstance(part, Converted) for part in layer.modules()):
                vars(layer)[_ALLOWED] = getattr(layer, name)
                setattr(layer, name, without)
    if attention:
        take_over(model, Converted)
    if gated_mlp:
        fuse(model)
    else:
        separate(model)
    if not swapped and not any(isinstance(child, Converted) for _, _, child, _ in places):
        why = f"; filter_fn left out {left} of its {len(places)} modules" if left else ""
        warnings.warn(
            f"convert: model: {type(model).__name__} has no layer that was replaced{why}: "
            "it computes as before; see te.coverage(model)",
            stacklevel=3,  # past named_well
        )
    return model


def revert(model: nn.Module) -> nn.Module:
    """Put back in place every module that ``convert`` replaced, with the parameters that there are now;
    returns ``model``. FP8 state is dropped."""
    module("revert", "model", model)
    for parent, name, child, _ in list(children(model)):
        if isinstance(child, Converted):
            parent.register_module(name, child.give_back())
    for layer in model.modules():
        for kind, name, _ in _PAST_PARTS:
            if isinstance(layer, kind) and _ALLOWED in vars(layer):
                setattr(layer, name, vars(layer).pop(_ALLOWED))
    hand_back(model)
    separate(model)
    return model


def children(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module, str]]:
    """(parent, name in it, child, path), every place that a module stands in."""
    for path, parent in model.named_modules():
        for name, child in own_modules(parent).items():
            if child is not None:
                yield parent, name, child, f"{path}.{name}" if path else name
