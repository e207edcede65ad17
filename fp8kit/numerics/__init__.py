"""The numerics laboratory: what low precision does to the tensors of a training.

``tensor_statistics`` says it of one array of any library. ``statistics`` has the parts that it is made of:
which statistics are wanted (``request``), sums on the device (``collect``), sums of several micro-batches
and ranks (``merge``), and numbers (``values``).
"""

from fp8kit.numerics.names import STATS, Operand
from fp8kit.numerics.statistics import Codes, Needs, collect, merge, request, tensor_statistics, values

__all__ = ["STATS", "Codes", "Needs", "Operand", "collect", "merge", "request", "tensor_statistics", "values"]
