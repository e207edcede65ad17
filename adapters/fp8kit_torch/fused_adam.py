"""``FusedAdam``: Adam and AdamW, one kernel call for all parameters of a group on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fp8kit.arguments import choice, flag, shown
from fp8kit.backends import dispatch
from fp8kit.errors import ArgumentError, CheckpointError, FormatError, ShapeError, UnsupportedError
from fp8kit.moments import StateFormats, state_formats
from fp8kit_torch import encoded_states as encoded
from fp8kit_torch import optimizer_state as stored
from fp8kit_torch.arguments import only
from fp8kit_torch.checks import OPTIMISED, check, tensor
from fp8kit_torch.fused_optimizer import NO_CORRECTION, AdamNumbers, Entry, Fused, adam_, written
from fp8kit_torch.quantized import QuantizedTensor
from fp8kit_torch.state import stream_of
from fp8kit_torch.views import as_view, optional_view


class FusedAdam(Fused):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2), or with L2 regularisation
    (Kingma & Ba 2015) ::

        m = beta1 m + (1 - beta1) g          v = beta2 v + (1 - beta2) g^2
                                             (g = grad + weight_decay w where not adam_w_mode)
        w = w - lr (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay w)

    * ``params``: float32, bfloat16 or float16 parameters, contiguous, or groups of them; ``lr``, ``betas``,
      ``eps``, ``weight_decay`` may differ between groups. ``amsgrad``: False only, NotImplementedError
      otherwise.
    * ``bias_correction``: divide by 1 - beta^t. t counts the group's steps.
    * ``adam_w_mode``: False is Adam with L2 regularisation, as ``torch.optim.Adam``.
    * ``capturable``: learning rate and t are tensors on the device, so that a captured graph sees new values,
      and ``torch.amp.GradScaler`` hands its factor over to the kernel (``grad_scale`` and ``found_inf``
      during its call), which skips a step with Inf or NaN without the host. The step takes the factor out of
      the gradients, as ``GradScaler.unscale_`` does.
    * ``master_weights``: 16-bit parameters, and those of ``quantized_model_init``, have a master
      (``master_param``) of ``master_weight_dtype``, float32 or float16, on which the update is made and which
      is then cast; without it the update is made on the parameter's own value. A list gives the masters:
      float32 tensors, one for each parameter in order (None: as False), which are updated where they are.
    * ``exp_avg_dtype``, ``exp_avg_sq_dtype``: float32, bfloat16, float16 or uint8 (FP8, E4M3): how m and v
      are kept between steps; the last two with a factor for each tensor.
    * ``use_decoupled_grad``: gradients are read from ``param.decoupled_grad``, whose dtype may differ from
      the parameter's.
    * ``store_param_remainders``: a bfloat16 parameter's float32 master is kept as the 16 bits that the
      parameter lacks.
    * ``set_grad_none``: deprecated, see ``zero_grad``.
    * ``states``, fp8kit's own: m, v and (with ``master_weights``) masters in one of the published ways,
      "ms_amp", "fishman", "coat", "block_128" or "block_256", or as ``fk.optim.StateFormats`` says, in the
      place of the four arguments for single states. The step decodes, computes and encodes in one kernel;
      state dicts hold the codes, with factors as ``exp_avg_scale`` and so on, and load into the same formats
      alone. Parameters that are sharded or held in FP8 are refused.

    Raises Fp8kitError, FormatError and ShapeError for wrong arguments.
    """

    _own = (
        *Fused._own,
        "dtypes",
        "adam_w_mode",
        "capturable",
        "master_weights",
        "use_decoupled_grad",
        "store_param_remainders",
        "formats",
        "_scales",
        "_masters",
        "_step_supports_amp_scaling",
    )
    numbers = ("lr", "bias_correction", "betas", "eps", "weight_decay")
    states = frozenset(("exp_avg", "exp_avg_sq", "master_param"))

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool | Sequence[Tensor | None] = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
        states: str | StateFormats | None = None,
    ) -> None:
        name, masters = "FusedAdam", None
        if isinstance(master_weights, list | tuple):
            masters, master_weights = list(master_weights), True
        given = locals()
        check(name, OPTIMISED, given)
        found = None if states is None else state_formats(name, states)
        self.formats = None if found is None or found.plain else found
        if self.formats is not None:
            encoded.only_states(name, given)
        only(name, {"amsgrad": (amsgrad, False)})
        self.dtypes = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            "master_param": master_weight_dtype,
        }
        for key, dtype in self.dtypes.items():
            known = (torch.float32, torch.float16) if key == "master_param" else stored.PACKED
            if dtype not in known:
                raise FormatError(name, f"{key}'s dtype", dtype, f"one of {', '.join(map(str, known))}")
        if capturable and (set(self.dtypes.values()) != {torch.float32} or store_param_remainders):
            got = "states that are not float32"
            raise FormatError(name, "capturable", got, "float32 states, no remainders")
        self.adam_w_mode, self.capturable = bool(adam_w_mode), bool(capturable)
        self.master_weights = bool(master_weights)
        self.use_decoupled_grad = bool(use_decoupled_grad)
        self.grad_name = "decoupled_grad" if use_decoupled_grad else "grad"
        self.store_param_remainders = bool(
            store_param_remainders and master_weights and master_weight_dtype == torch.float32
        )
        self._scales: dict[Tensor, dict[str, Tensor]] = {}
        self._masters: dict[Tensor, Tensor] | None = None
        self._step_supports_amp_scaling = self.capturable
        super().__init__(params, given)
        if masters is not None:
            self._masters = self._given_masters(masters)

    def _given_masters(self, masters: list[Tensor | None]) -> dict[Tensor, Tensor]:
        """The masters by parameter. ShapeError where they do not fit."""
        params = [param for group in self.param_groups for param in group["params"]]
        if len(masters) != len(params):
            raise ShapeError("FusedAdam", "master_weights", f"{len(masters)} tensors", f"{len(params)}")
        if self.formats is not None or self.store_param_remainders:
            wanted = "True, with states or store_param_remainders"
            raise UnsupportedError("FusedAdam", "master_weights", "a list", wanted)
        found = {}
        for param, master in zip(params, masters, strict=True):
            if master is not None:
                tensor("FusedAdam", "master_weights", master)
                kind = self.dtypes["master_param"], tuple(param.shape), param.device
                if (master.dtype, tuple(master.shape), master.device) != kind or not master.is_contiguous():
                    got, wanted = f"{shown(master)} on {master.device}", f"contiguous {kind}"
                    raise ShapeError("FusedAdam", "master_weights", got, wanted)
                found[param] = master.detach()
        return found

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:  # type: ignore[override]
        """One update of every parameter that has a gradient, in stream order. Returns the closure's value.
        ``grad_scaler``: ``grad_scaler.step(self)`` instead; ArgumentError for other options."""
        scaler = options.pop("grad_scaler", None)  # by name, torch's GradScaler would hand itself over
        if options:
            raise ArgumentError("FusedAdam.step", ", ".join(options), "an option", "closure or grad_scaler")
        if scaler is not None:
            return scaler.step(self)
        return super().step(closure)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; in ``capturable`` mode the group's learning rate becomes a float32 tensor on its
        parameters' device."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if self.formats is not None:
            encoded.want_plain(group["params"], self.formats, self.master_weights)
        if self.capturable and group["params"]:
            devices = {param.device for param in group["params"]}
            if len(devices) != 1:
                got = f"a group on {len(devices)} devices"
                raise ArgumentError("FusedAdam", "param_groups", got, "one, with capturable")
            rate = torch.as_tensor(group["lr"], dtype=torch.float32, device=devices.pop())
            group["lr"] = rate.reshape(1).clone()

    # --- states ---------------------------------------------------------------------------------------------

    def _unscaled_dtype(self, param: Tensor, state_name: str) -> torch.dtype:
        """float32; int16 for a master that is kept as what the parameter lacks."""
        plain = param.dtype is torch.bfloat16 and not isinstance(param, QuantizedTensor)
        remainder = self.store_param_remainders and state_name == "master_param" and plain
        return torch.int16 if remainder else torch.float32

    def _names(self, param: Tensor) -> tuple[str, ...]:
        narrow = param.dtype is not torch.float32 or isinstance(param, QuantizedTensor)
        has_master = self.master_weights and narrow if self._masters is None else param in self._masters
        return ("exp_avg", "exp_avg_sq") + (("master_param",) if has_master else ())

    def _known(self, method: str, param: Any, state_name: Any = "exp_avg") -> None:
        """ArgumentError for what is no parameter of a group, and no name of a state."""
        op = f"FusedAdam.{method}"
        if not any(param is one for group in self.param_groups for one in group["params"]):
            raise ArgumentError(op, "param", type(param).__name__, "a parameter of this optimizer")
        choice(op, "state_name", state_name, self._names(param))

    def initialize_state(self, param: Tensor, store_param_remainders: bool = False) -> None:
        """Make the parameter's states: zeros, and a master of its value; ``store_param_remainders`` is as the
        constructor's."""
        op, argument = "FusedAdam.initialize_state", "store_param_remainders"
        self._known("initialize_state", param)
        if flag(op, argument, store_param_remainders) and not self.store_param_remainders:
            raise ArgumentError(op, argument, True, "as in the constructor")
        if self.formats is not None:
            self.state[param] |= encoded.start(self.formats, param, self.master_weights)
            return
        start = param.detach()
        if isinstance(param, QuantizedTensor):
            start = start.dequantize(dtype=torch.float32)  # not rounded to the parameter's dtype
        for name in self._names(param):
            if name == "master_param" and self._masters is not None:
                self.state[param][name] = self._masters[param]
                continue
            dtype = self._unscaled_dtype(param, name)
            master = name == "master_param" and dtype is torch.float32
            self.set_scaled_state(
                param, name, start.float() if master else torch.zeros_like(start, dtype=dtype)
            )

    def get_unscaled_state(self, param: Tensor, state_name: str) -> Tensor:
        """A state's float32 values; int16 for a master kept as remainders. ``state_name``: "exp_avg",
        "exp_avg_sq" or "master_param"."""
        self._known("get_unscaled_state", param, state_name)
        if state_name not in self.state[param]:
            wanted = f"one of {', '.join(self.state[param]) or 'none yet: initialize_state'}"
            raise ArgumentError("FusedAdam.get_unscaled_state", "state_name", repr(state_name), wanted)
        if self.formats is not None:
            return encoded.values(self.formats, param, state_name, self.state[param])
        state = self.state[param][state_name]
        if state.dtype in (torch.float32, torch.int16):
            return state
        return stored.unpack(stored.local(state), self._scales.get(param, {}).get(state_name))

    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Keep float32 values (int16 for remainders) as the state, in the constructor's dtype of it."""
        self._known("set_scaled_state", param, state_name)
        if self.formats is not None:
            raise UnsupportedError("FusedAdam.set_scaled_state", "states", str(self.formats), "None")
        tensor("FusedAdam.set_scaled_state", "unscaled_state", unscaled_state)
        state, unscaled = self.state[param], self._unscaled_dtype(param, state_name)
        if (unscaled_state.dtype, unscaled_state.shape) != (unscaled, param.shape):
            wanted = f"float32 {tuple(param.shape)}, int16 for remainders"
            raise ShapeError("FusedAdam.set_scaled_state", state_name, shown(unscaled_state), wanted)
        if state_name not in state:
            dtype = self.dtypes[state_name] if unscaled is torch.float32 else unscaled
            state[state_name] = torch.zeros_like(param, dtype=dtype)
        self._keep(param, state_name, stored.local(unscaled_state).to(param.device))

    def _values(self, param: Tensor, name: str, data: Tensor) -> Tensor | None:
        """A state's float32 values, in its own memory where it is float32; None where there is none.
        ``data``: the parameter's values."""
        if name not in self.state[param]:
            return None
        state = stored.local(self.state[param][name])
        if state.dtype is torch.int16:
            return stored.join(data, state)
        return stored.unpack(state, self._scales.get(param, {}).get(name))

    def _keep(self, param: Tensor, name: str, values: Tensor) -> None:
        scale = stored.pack(stored.local(self.state[param][name]), values)
        if scale is not None:
            self._scales.setdefault(param, {})[name] = scale

    # --- steps ----------------------------------------------------------------------------------------------

    def update_group(self, group: dict[str, Any], taking: dict[torch.device, list[Entry]]) -> None:
        if not self.capturable and group["params"]:
            group["step"] = group.get("step", 0) + 1
        elif group["params"]:  # also where no parameter has a gradient
            self._count(group)
        for device, entries in taking.items():
            by = self._inverse(device)
            self._update(group, device, entries, by)
            if by is not None:
                where = as_view(by).device
                grads = [as_view(grad) for *_, grad in entries]
                dispatch.kernels(where).scale_(grads, as_view(by), None, stream_of(where))
                for param, _, grad in entries:
                    own = stored.local(getattr(param, self.grad_name))
                    increment_version(own)
                    if own.data_ptr() != grad.data_ptr():  # it was not contiguous
                        own.copy_(grad)

    def _inverse(self, device: torch.device) -> Tensor | None:
        """1 / GradScaler's factor, float32 (1,); None without one."""
        scale = getattr(self, "grad_scale", None)
        return None if scale is None else (1.0 / scale.double()).to(device, torch.float32).reshape(1)

    def _count(self, group: dict[str, Any]) -> None:
        """Count a step of a group on its device, unless GradScaler has found Inf or NaN."""
        device, found = group["params"][0].device, getattr(self, "found_inf", None)
        if group.get("step") is None:
            group["step"] = torch.zeros(1, dtype=torch.int64, device=device)
        skip = None if found is None else found.to(device, torch.float32).reshape(1)
        where = as_view(group["step"])
        dispatch.kernels(where.device).count_(where, optional_view(skip), stream_of(where.device))

    def _update(
        self, group: dict[str, Any], device: torch.device, entries: list[Entry], by: Tensor | None
    ) -> None:
        found = getattr(self, "found_inf", None)  # GradScaler's
        skip = None if found is None else found.to(device, torch.float32).reshape(1)
        step: Any = group.get("step")
        for param, *_ in entries:
            if "exp_avg" not in self.state[param]:
                self.initialize_state(param)
        count = step if group["bias_correction"] else NO_CORRECTION
        of_group = group["lr"], group["betas"], group["eps"], float(group["weight_decay"])
        numbers = AdamNumbers(*of_group, self.adam_w_mode, count, by, skip)
        if self.formats is not None:
            rows = [(data, grad, self.state[param]) for param, data, grad in entries]
            encoded.adam_(self.formats, rows, numbers)
            for param, data, _ in entries:
                written(param, data)
            return
        means, squares, masters = (
            [self._values(param, name, data) for param, data, _ in entries] for name in self.dtypes
        )
        adam_(
            [data for _, data, _ in entries],
            [grad for *_, grad in entries],
            (means, squares),
            masters,
            numbers,
        )
        for (param, data, _), *updated in zip(entries, means, squares, masters, strict=True):
            written(param, data if updated[-1] is None else updated[-1])
            for name, values in zip(self.dtypes, updated, strict=True):
                state = None if values is None else stored.local(self.state[param][name])
                if state is not None and state.dtype is torch.int16:
                    stored.split(values, data, state)
                elif state is not None and state.dtype is not torch.float32:
                    self._keep(param, name, values)

    # --- saved and loaded -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As torch's; states that are kept with a factor come as their float32 values, remainders as
        they are."""
        saved = super().state_dict()
        if self.formats is not None:
            return saved | {"state_formats": list(self.formats.numbers)}
        for param, index in self.indexed(saved["param_groups"]):
            if index in saved["state"]:
                state = saved["state"][index]
                saved["state"][index] = {
                    n: self.get_unscaled_state(param, n) if n in self.dtypes else v for n, v in state.items()
                }
        return saved

    def check_state_dict(self, state_dict: Any) -> None:
        op, saved = "FusedAdam.load_state_dict", state_dict if isinstance(state_dict, Mapping) else {}
        if self.formats is not None or "state_formats" in saved:
            encoded.check_formats(op, saved.get("state_formats"), self.formats)
        super().check_state_dict(state_dict)
        for param, index in self.indexed(state_dict["param_groups"]) if self.formats is not None else ():
            if state := state_dict["state"].get(index):
                wanted = encoded.kinds(self.formats, param, self.master_weights)
                encoded.check_state(op, f"state[{index!r}]", state, wanted)

    def check_state(
        self, operation: str, param: Tensor, name: str, shown_as: str, state: Mapping[str, Any]
    ) -> None:
        if self.formats is not None:  # check_state_dict looks at all of them
            return
        known = self._names(param)
        for wanted in known[:2]:  # a master may be missing: it starts at the parameter
            if wanted not in state:
                raise CheckpointError(operation, shown_as, f"no {wanted!r}", "both moments")
        if name not in known:
            wanted = f"{', '.join(known)} only, as the constructor said"
            raise CheckpointError(operation, shown_as, "a state", wanted)
        super().check_state(operation, param, name, shown_as, state)
        remainder = self._unscaled_dtype(param, name) is torch.int16
        if (state[name].dtype is torch.int16) != remainder:
            wanted = "int16, with" if remainder else "floating, without"
            raise CheckpointError(operation, shown_as, state[name].dtype, f"{wanted} store_param_remainders")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, with states kept in the constructor's dtypes, not in the parameters'.
        In ``capturable`` mode learning rate and t are written into the tensors that a captured graph reads.
        """
        self.check_state_dict(state_dict)
        held = [(group.get("lr"), group.get("step")) for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, (lr, step) in zip(self.param_groups, held, strict=True):
            if self.capturable and group["params"]:
                group["lr"] = lr.copy_(torch.as_tensor(group["lr"]).reshape(1))
                if group.get("step") is not None:
                    step = lr.new_zeros(1, dtype=torch.int64) if step is None else step
                    group["step"] = step.copy_(torch.as_tensor(group["step"]).reshape(1))
            else:
                for name, kind in (("lr", float), ("step", int)):
                    if isinstance(group.get(name), Tensor):
                        group[name] = kind(group[name])
        for param, index in self.indexed(state_dict["param_groups"]):
            saved = state_dict["state"].get(index)
            if saved is None:
                continue
            if self.formats is not None:
                self.state[param] = {n: v.detach().to(param.device, copy=True) for n, v in saved.items()}
                continue
            self.state[param] = {name: value for name, value in saved.items() if name not in self.dtypes}
            self._scales.pop(param, None)
            if self._masters is not None and param in self._masters:
                self.state[param]["master_param"] = self._masters[param]
            for name, values in saved.items():
                if name in self.dtypes:
                    values = values if values.dtype is torch.int16 else values.float()
                    self.set_scaled_state(param, name, values)
