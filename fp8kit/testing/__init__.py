"""Tools for testing numerical code, shipped because users test their own kernels and operations with them."""

from fp8kit.testing.attention import attention_oracle
from fp8kit.testing.compare import assert_close, assert_same_bits, epsilon, relative_error, sum_slack
from fp8kit.testing.gradients import check_grads
from fp8kit.testing.implementation import ContractReport, check_implementation

__all__ = [
    "ContractReport",
    "assert_close",
    "assert_same_bits",
    "attention_oracle",
    "check_grads",
    "check_implementation",
    "epsilon",
    "relative_error",
    "sum_slack",
]
