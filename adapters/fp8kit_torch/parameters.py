"""Parameters of the torch modules: where they lie, how they start, and how they are made anew."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fp8kit import arrays, settings
from fp8kit.backends.policy import get_policy
from fp8kit.errors import BackendError
from fp8kit_torch import checks
from fp8kit_torch.distributed_weights import is_distributed
from fp8kit_torch.layer import TorchLayer
from fp8kit_torch.torch_compat import PARAMETERS, default_device_is_set, own_parameters

Init = Callable[[Tensor], Any]


def default_device() -> torch.device:
    """Where ``device=None`` puts parameters: torch's default device where one is set (``with
    torch.device(...)``, ``set_default_device``), else FP8KIT_DEVICE, else CUDA where it is usable, else the
    CPU. BackendError where that variable names what is not usable."""
    return torch.get_default_device() if default_device_is_set() else usual_device()


def usual_device() -> torch.device:
    """The same where nobody has set a default device of torch's."""
    said = settings.device()
    if said:
        where = arrays.usable(said, "environment", "FP8KIT_DEVICE")
        whole = where.kind == "cpu" or ":" not in said  # without an index it is torch's current one
        return torch.device(where.kind) if whole else torch.device(where.kind, where.index)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def placed(operation: str, device: Any) -> torch.device:
    """The device that an argument ``device`` means, None the default one. BackendError where it is a CUDA
    device that torch does not have."""
    where = default_device() if device is None else checks.device(operation, "device", device)
    if where.type not in ("cpu", "cuda", "meta"):
        raise BackendError(operation, "device", where, "cpu, cuda or meta")
    if where.type == "cuda" and not torch.cuda.is_available():
        none = torch.version.cuda is None
        why = "is built without CUDA" if none else "finds no GPU that it can use (torch.cuda.is_available())"
        wanted = f'another device, since this torch {why}; device="cpu" computes the same, slowly'
        raise BackendError(operation, "device", where, wanted)
    if where.type == "cuda" and (where.index or 0) >= (count := torch.cuda.device_count()):
        raise BackendError(operation, "device", where, f"one of the {count} CUDA devices that are here")
    return where


def normal_init(tensor: Tensor) -> None:
    """Transformer Engine's default for weights: normal with mean 0 and standard deviation 0.023."""
    torch.nn.init.normal_(tensor, 0.0, 0.023)


def _device_for(parameter: Any) -> torch.device:
    """Where a parameter on the meta device gets memory: as ``default_device``, a distributed one on the
    devices of its mesh unless torch's default says another."""
    on_mesh = is_distributed(parameter) and not default_device_is_set()
    device = torch.device(parameter.device_mesh.device_type) if on_mesh else default_device()
    return torch.device("cpu") if device.type == "meta" else device


def _start(parameter: Any, init: Init) -> None:
    """Give a parameter its first values; of a distributed one each process draws all, and takes its part of
    what the mesh's first process drew."""
    if not is_distributed(parameter):
        init(parameter)
        return
    from torch.distributed.tensor import distribute_tensor

    whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    init(whole)
    parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))


class ParameterModule(TorchLayer):
    """A module whose parameters know how they start, so that ``reset_parameters`` can make them anew (after
    ``device="meta"``, say)."""

    def __init__(self) -> None:
        super().__init__()
        self._inits: dict[str, Init] = {}
        get_policy()  # read now, not within a compiled function

    def add_parameter(
        self, name: str, shape: tuple[int, ...], init: Init | float | None, dtype: Any, device: Any
    ) -> None:
        dtype = torch.get_default_dtype() if dtype is None else dtype
        checks.parameter_dtype(type(self).__name__, "params_dtype", dtype)
        where = placed(type(self).__name__, device)
        self.register_parameter(name, Parameter(torch.empty(shape, dtype=dtype, device=where)))
        if not callable(init):
            init = normal_init if init is None else partial(torch.nn.init.constant_, val=init)
        self._inits[name] = init
        if where.type != "meta":
            with torch.no_grad(), self.forked():
                init(getattr(self, name))

    def host_array(self, value: Any) -> Any:
        return value.detach().cpu().numpy()

    def read(self, name: str) -> Any:
        return getattr(self, name).detach().float().cpu().numpy()

    def write(self, name: str, values: Any) -> None:
        with torch.no_grad():
            getattr(self, name).copy_(torch.from_numpy(values))

    def freeze(self, name: str) -> None:
        getattr(self, name).requires_grad_(False)

    def add_no_parameter(self, name: str) -> None:
        self.register_parameter(name, None)

    def parameters_by(self, names: Iterable[tuple[str, str]]) -> dict[str, Any]:
        # what stands for a parameter as an attribute counts; a parameter as an attribute is slow to find
        own = self.__dict__[PARAMETERS]
        return {
            name: own[attribute] if attribute in own else getattr(self, attribute)
            for name, attribute in names
        }

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        _, _, _, unexpected_keys, _ = rest
        # Transformer Engine's norms and attention have one; there is nothing for it here
        for name in ("_extra_state", "fused_attention._extra_state"):  # attention's until 1.7
            if f"{prefix}{name}" in unexpected_keys:
                unexpected_keys.remove(f"{prefix}{name}")

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Start every parameter anew; those on the meta device get memory first. ``defer_init``: True does
        nothing."""
        checks.check(type(self).__name__, checks.CALLED, {"defer_init": defer_init})
        if defer_init:
            return
        for name, init in self._inits.items():
            old = own_parameters(self).get(name)
            if old is None:  # taken out: another parameter of the program's has its numbers
                continue
            if old.is_meta:
                fresh = torch.empty_like(old, device=_device_for(old))
                self.register_parameter(name, Parameter(fresh, old.requires_grad))
            with torch.no_grad(), self.forked():
                _start(own_parameters(self)[name], init)
