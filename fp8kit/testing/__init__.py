"""Tools for testing numerical code, shipped because users test their own kernels and operations with them."""

from fp8kit.testing.compare import assert_close, assert_same_bits, epsilon, relative_error, sum_slack

__all__ = ["assert_close", "assert_same_bits", "epsilon", "relative_error", "sum_slack"]
