"""Calls of optimizers, and of the functions under them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fp8kit_torch import optimizers as fused

from tests.adapters.torch.calls.call import Call, call, ints, method, positional, quietly, ramp


def parameter() -> torch.nn.Parameter:
    made = torch.nn.Parameter(ramp(3, 4))
    made.grad = torch.ones(3, 4)
    return made


def stepped(kind: Any = fused.FusedAdam) -> Any:
    made = kind([parameter()], lr=0.1)
    made.step()
    return made


def applied(op: Any, noop_flag: Any, tensor_lists: Any, scale: Any) -> Any:
    return fused.multi_tensor_applier(op, noop_flag, tensor_lists, scale)


LISTS = lambda n: lambda: [[torch.ones(3, 4)] for _ in range(n)]  # noqa: E731

NOOP = {"chunk_size": 64, "noop_flag": lambda: ints(0), "tensor_lists": None}

ADAM = NOOP | {
    "lr": 0.1,
    "beta1": 0.9,
    "beta2": 0.99,
    "epsilon": 1e-8,
    "step": 1,
    "mode": 1,
    "bias_correction": 1,
    "weight_decay": 0.1,
    "inv_scale": None,
}

ONE = lambda: torch.ones(1)  # noqa: E731


def optimizer(kind: Any) -> Callable[..., Any]:
    return quietly(lambda **given: kind(**given).step())


def of_adam(name: str, param: Any, **given: Any) -> Any:
    made = stepped()
    return getattr(made, name)(made.param_groups[0]["params"][0] if param is None else param, **given)


CALLS: dict[str, Call] = {
    "FusedAdam": call(
        optimizer(fused.FusedAdam),
        params=lambda: [parameter()],
        lr=0.1,
        betas=(0.9, 0.99),
        eps=1e-8,
        weight_decay=0.1,
        amsgrad=False,
        bias_correction=True,
        adam_w_mode=True,
        capturable=False,
        master_weights=False,
        master_weight_dtype=torch.float32,
        exp_avg_dtype=torch.float32,
        exp_avg_sq_dtype=torch.float32,
        use_decoupled_grad=False,
        store_param_remainders=False,
        set_grad_none=None,
        states="coat",
    ),
    "FusedAdam.groups": call(
        lambda **group: fused.FusedAdam([group]).step(),
        params=lambda: [parameter()],
        lr=0.1,
        betas=(0.9, 0.99),
        eps=1e-8,
        weight_decay=0.1,
        bias_correction=True,
    ),
    "FusedSGD": call(
        optimizer(fused.FusedSGD),
        params=lambda: [parameter()],
        lr=0.1,
        momentum=0.9,
        dampening=0.0,
        weight_decay=0.1,
        nesterov=True,
        wd_after_momentum=False,
        materialize_master_grads=True,
        set_grad_none=None,
    ),
    "FusedSGD.groups": call(
        lambda **group: fused.FusedSGD([group], lr=0.1).step(),
        params=lambda: [parameter()],
        lr=0.1,
        momentum=0.9,
        dampening=0.0,
        weight_decay=0.1,
        nesterov=True,
    ),
    "FusedAdam.load_state_dict": method(
        "load_state_dict", stepped, state_dict=lambda: stepped().state_dict()
    ),
    "FusedSGD.load_state_dict": method(
        "load_state_dict",
        lambda: stepped(fused.FusedSGD),
        state_dict=lambda: stepped(fused.FusedSGD).state_dict(),
    ),
    "FusedAdam.zero_grad": method("zero_grad", stepped, set_to_none=True),
    "FusedAdam.add_param_group": method(
        "add_param_group", stepped, param_group=lambda: {"params": [parameter()]}
    ),
    "FusedAdam.initialize_state": call(
        lambda **given: of_adam("initialize_state", **given), param=None, store_param_remainders=False
    ),
    "FusedAdam.get_unscaled_state": call(
        lambda **given: of_adam("get_unscaled_state", **given), param=None, state_name="exp_avg"
    ),
    "FusedAdam.set_scaled_state": call(
        lambda **given: of_adam("set_scaled_state", **given),
        param=None,
        state_name="exp_avg",
        unscaled_state=lambda: torch.ones(3, 4),
    ),
    "multi_tensor_adam": positional(fused.multi_tensor_adam, **ADAM | {"tensor_lists": LISTS(4)}),
    "multi_tensor_adam, tensors": positional(
        fused.multi_tensor_adam_capturable,
        **ADAM | {"tensor_lists": LISTS(5), "lr": ONE, "step": ONE, "inv_scale": ONE},
    ),
    "multi_tensor_sgd": positional(
        fused.multi_tensor_sgd,
        **NOOP | {"tensor_lists": LISTS(3)},
        weight_decay=0.1,
        momentum=0.9,
        dampening=0.0,
        lr=0.1,
        nesterov=True,
        first_run=False,
        wd_after_momentum=False,
        scale=1.0,
    ),
    "multi_tensor_scale": positional(
        fused.multi_tensor_scale, **NOOP | {"tensor_lists": LISTS(2)}, scale=2.0
    ),
    "multi_tensor_l2norm": positional(
        fused.multi_tensor_l2norm, **NOOP | {"tensor_lists": LISTS(1)}, per_tensor=True
    ),
    "multi_tensor_unscale_l2norm": positional(
        fused.multi_tensor_unscale_l2norm, **NOOP | {"tensor_lists": LISTS(1)}, inv_scale=ONE, per_tensor=True
    ),
    "multi_tensor_applier": call(
        applied,
        ("op",),
        op=lambda: fused.multi_tensor_scale,
        noop_flag=lambda: ints(0),
        tensor_lists=LISTS(2),
        scale=2.0,
    ),
    "MultiTensorApply": call(fused.MultiTensorApply, chunk_size=64),
}
