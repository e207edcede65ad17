"""AdamW on lists of tensors: one kernel call for all parameters that share their hyperparameters.

Source: Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fp8kit import arrays
from fp8kit.arrays import ArrayView
from fp8kit.autograd import Tensor
from fp8kit.backends import dispatch
from fp8kit.errors import CheckpointError, Fp8kitError, ShapeError, expected
from fp8kit.formats import float32

HostArray = np.ndarray[Any, Any]


class _Moments:
    """State of one parameter: steps taken, first and second moment, and the float32 master of a 16-bit parameter."""

    __slots__ = ("exp_avg", "exp_avg_sq", "master", "step")

    def __init__(self, param: ArrayView) -> None:
        self.step = 0
        self.exp_avg = arrays.zeros(param.shape, float32, param.device)
        self.exp_avg_sq = arrays.zeros(param.shape, float32, param.device)
        self.master: ArrayView | None = None
        if param.dtype is not float32:
            self.master = arrays.empty(param.shape, float32, param.device)
            dispatch.kernels(param.device).copy(param, self.master, arrays.current_stream(param.device))

    def arrays(self) -> dict[str, ArrayView]:
        """Name -> array."""
        named = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return named if self.master is None else named | {"master": self.master}


class AdamW:
    """AdamW ::

        m = beta1 m + (1 - beta1) g          v = beta2 v + (1 - beta2) g^2
        w = w - lr (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay w)

    ``params``: tensors, or dicts ``{"params": [...], "lr": ...}`` whose other entries override the defaults. Moments are float32; a
    16-bit parameter has a float32 master, made from its value at the first step, on which the update is made. A parameter without a
    gradient is left alone. ``param_groups`` is a list of dicts that may be changed between steps; setting ``lr`` sets it in all of
    them. Load weights before the first step, or load the optimiser's state too: the masters, once made, are the truth.

    Raises Fp8kitError for empty, duplicate, strided or read-only parameters and for hyperparameters outside their range, ShapeError for a
    ``grad`` that was set to an array of another shape, dtype or device.
    """

    def __init__(
        self, params: Iterable[Tensor] | Iterable[Mapping[str, Any]], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0.01,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        given: list[Any] = list(params)
        groups: list[Mapping[str, Any]] = given if given and isinstance(given[0], Mapping) else [{"params": given}]
        self.param_groups: list[dict[str, Any]] = []
        seen: set[int] = set()
        for group in groups:
            unknown = set(group) - {"params", *defaults}
            if unknown:
                raise Fp8kitError(expected("AdamW", "param_groups", f"unknown {sorted(unknown)}", f"params, {', '.join(defaults)}"))
            whole: dict[str, Any] = {**defaults, **group, "params": list(group["params"])}
            for param in whole["params"]:
                if not isinstance(param, Tensor) or not param.requires_grad or id(param) in seen:
                    what = "a tensor given twice" if id(param) in seen else repr(type(param).__name__)
                    raise Fp8kitError(expected("AdamW", "params", what, "different tensors that require grad"))
                seen.add(id(param))
                if not param.view.contiguous or not _writable(param.view):
                    what = f"strides {param.view.strides} or memory that is read-only"
                    raise Fp8kitError(expected("AdamW", "params", what, "C-contiguous memory that may be written"))
            _check(whole)
            self.param_groups.append(whole)
        if not seen:
            raise Fp8kitError(expected("AdamW", "params", "nothing", "at least one tensor"))
        self._moments: dict[Tensor, _Moments] = {}

    @property
    def lr(self) -> float:
        """Learning rate of the first group; setting it sets every group's."""
        return float(self.param_groups[0]["lr"])

    @lr.setter
    def lr(self, value: float) -> None:
        for group in self.param_groups:
            group["lr"] = value

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for param in self._params():
            param.grad = None

    def step(self) -> None:
        """One update of every parameter that has a gradient, in stream order, without waiting for the device."""
        batches: dict[tuple[Any, ...], list[tuple[ArrayView, ArrayView, _Moments, float]]] = {}
        for group in self.param_groups:
            _check(group)
            hyper = (group["lr"], *group["betas"], group["eps"])
            for param in group["params"]:
                if param.grad is None:
                    continue
                view = arrays.as_view(param)
                grad = _gradient(param)
                moments = self._moments.get(param)
                if moments is None:
                    moments = self._moments[param] = _Moments(view)
                moments.step += 1
                entry = (view, grad, moments, group["weight_decay"])
                batches.setdefault((view.device, moments.step, *hyper), []).append(entry)
        for (device, step, lr, beta1, beta2, eps), entries in batches.items():
            params, grads, moments_of, decays = zip(*entries, strict=True)
            dispatch.kernels(device).adamw_(
                params, grads, [m.exp_avg for m in moments_of], [m.exp_avg_sq for m in moments_of], [m.master for m in moments_of],
                lr, beta1, beta2, eps, decays, step, arrays.current_stream(device),
            )

    def state_dict(self) -> dict[str, ArrayView]:
        """Arrays by name, for ``fk.save``: ``steps`` int64 (parameters,), ``hyper`` float64 (groups, 5: lr, beta1, beta2, eps,
        weight_decay), and ``exp_avg.i``, ``exp_avg_sq.i``, ``master.i`` of parameter i."""
        params = self._params()
        steps = [self._moments[p].step if p in self._moments else 0 for p in params]
        hyper = [[g["lr"], *g["betas"], g["eps"], g["weight_decay"]] for g in self.param_groups]
        out = {"steps": arrays.as_view(np.array(steps, np.int64)), "hyper": arrays.as_view(np.array(hyper, np.float64))}
        for i, param in enumerate(params):
            if param in self._moments:
                out |= {f"{name}.{i}": view for name, view in self._moments[param].arrays().items()}
        return out

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Take over what ``state_dict`` gave; everything is checked before anything changes. CheckpointError where it does not fit."""
        params = self._params()
        views = {name: arrays.as_view(array) for name, array in state.items()}
        wanted = {"steps": ((len(params),), "int64"), "hyper": ((len(self.param_groups), 5), "float64")}
        steps = views["steps"].numpy() if "steps" in views and views["steps"].shape == (len(params),) else np.zeros(len(params), np.int64)
        for i, param in enumerate(params):
            if steps[i]:
                own = arrays.as_view(param)
                names = ("exp_avg", "exp_avg_sq", *(("master",) if own.dtype is not float32 else ()))
                wanted |= {f"{name}.{i}": (own.shape, "float32") for name in names}
        faults = [f"missing: {name}" for name in wanted if name not in views]
        faults += [f"unexpected: {name}" for name in views if name not in wanted and strict]
        for name, (shape, kind) in wanted.items():
            if name in views and (views[name].shape, views[name].dtype.name) != (shape, kind):
                faults.append(f"{name}: got {views[name].dtype.name} {views[name].shape}, expected {kind} {shape}")
        if faults:
            raise CheckpointError(f"AdamW.load_state_dict: {'; '.join(faults[:8])}")
        for group, row in zip(self.param_groups, views["hyper"].numpy().tolist(), strict=True):
            group |= {"lr": row[0], "betas": (row[1], row[2]), "eps": row[3], "weight_decay": row[4]}
        self._moments = {}
        for i, param in enumerate(params):
            if steps[i]:
                moments = self._moments[param] = _Moments(arrays.as_view(param))
                moments.step = int(steps[i])
                for name, target in moments.arrays().items():
                    arrays.copy(target, arrays.contiguous(views[f"{name}.{i}"]))


def _writable(view: ArrayView) -> bool:
    return not isinstance(view.owner, np.ndarray) or bool(view.owner.flags.writeable)


def _gradient(param: Tensor) -> ArrayView:
    """The parameter's gradient; any array may have been set."""
    grad = arrays.contiguous(arrays.as_view(param.grad))
    if (grad.shape, grad.dtype, grad.device) != (param.shape, param.dtype, param.device):
        got, wanted = (f"{a.dtype.name} {a.shape} on {a.device}" for a in (grad, param))
        raise ShapeError(expected("AdamW", "grad", got, wanted))
    return grad


def _check(group: Mapping[str, Any]) -> None:
    """Refuse hyperparameters outside their range."""
    try:
        beta1, beta2 = group["betas"]
        fits = {
            "lr": group["lr"] >= 0 and math.isfinite(group["lr"]), "betas": 0 <= beta1 < 1 and 0 <= beta2 < 1,
            "eps": group["eps"] >= 0 and math.isfinite(group["eps"]),
            "weight_decay": group["weight_decay"] >= 0 and math.isfinite(group["weight_decay"]),
        }
    except (TypeError, ValueError):
        raise Fp8kitError(expected("AdamW", "hyperparameters", {k: v for k, v in group.items() if k != "params"}, "numbers")) from None
    for name, ok in fits.items():
        if not ok:
            raise Fp8kitError(expected("AdamW", name, group[name], "in [0, 1)" if name == "betas" else "finite and >= 0"))
