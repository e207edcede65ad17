"""A minimal tape: ``tape`` knows no operation, ``tensors`` the value on it, ``call`` runs
``fp8kit.ops`` on it."""

from fp8kit.autograd.call import apply, validate
from fp8kit.autograd.conversion import tensor
from fp8kit.autograd.function import Context, Function
from fp8kit.autograd.tape import is_grad_enabled, no_grad, set_grad_enabled
from fp8kit.autograd.tensors import Tensor

__all__ = [
    "Context",
    "Function",
    "Tensor",
    "apply",
    "is_grad_enabled",
    "no_grad",
    "set_grad_enabled",
    "tensor",
    "validate",
]
