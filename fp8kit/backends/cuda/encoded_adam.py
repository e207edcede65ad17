"""Adam on states that are kept in fewer bits; see ``raw_kernels/encoded_adam.cu``.

As in ``optim``, a table of tensors travels by value: a launch takes 32 of one type. Where tensors have one
factor there are three launches for them, else one.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda._rows import TYPE_CODES, address, ceil_div, kernel
from fp8kit.backends.cuda.optim import PIECE, THREADS, count_of, launches, number_of
from fp8kit.errors import BackendError
from fp8kit.moments import KEPT, MASTERS, MomentFormat, StateFormats, bias_correction

_TENSORS = 32
_TABLE = struct.Struct(f"={9 * _TENSORS}q{_TENSORS}I{_TENSORS}f")
_SOURCE = "encoded_adam.cu"


def encoded_adam_(
    params: Sequence[ArrayView],
    grads: Sequence[ArrayView],
    exp_avgs: Sequence[ArrayView],
    exp_avg_scales: Sequence[ArrayView | None],
    exp_avg_sqs: Sequence[ArrayView],
    exp_avg_sq_scales: Sequence[ArrayView | None],
    masters: Sequence[ArrayView | None],
    master_scales: Sequence[ArrayView | None],
    formats: StateFormats,
    decoupled: bool,
    lr: float | ArrayView,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decays: Sequence[float],
    step: int | ArrayView,
    inv_scale: ArrayView | None,
    found_inf: ArrayView | None,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """See ``backends.protocol``. BackendError for a step below 1, and for a missing workspace."""
    rate, rate_at = number_of(lr)
    count, count_at = count_of("encoded_adam_", step)
    corrections = (bias_correction(beta, count) for beta in (beta1, beta2))
    numbers = (rate, beta1, 1 - beta1, beta2, 1 - beta2, epsilon, *corrections, int(decoupled))
    addresses = rate_at, count_at, address(inv_scale), address(found_inf)
    forms = *_form(formats.exp_avg), *_form(formats.exp_avg_sq)
    known = (*numbers, *addresses, *forms, MASTERS.index(formats.master))
    columns = (
        *(params, grads, exp_avgs, exp_avg_sqs, masters),
        *(exp_avg_scales, exp_avg_sq_scales, master_scales),
    )
    if formats.by_tensor and workspace is None and any(param.size for param in params):
        wanted = f"{encoded_adam_workspace([param.size for param in params], formats)} bytes"
        raise BackendError("encoded_adam_", "workspace", None, wanted)
    old = address(workspace) if formats.by_tensor else 0
    for like, rows, table, blocks in launches(_TABLE, _TENSORS, columns, weight_decays):
        param, grad_type = like[0], TYPE_CODES[like[1].dtype.name]
        if formats.by_tensor:
            parts = old + 12 * rows
            found = (*known, parts, grad_type, rows, table)
            launch.launch(kernel(_SOURCE, "encoded_adam_amax", param), blocks, THREADS, found, stream)
            made = (address(found_inf), *forms, old, parts, blocks, rows, table)
            launch.launch(kernel(_SOURCE, "encoded_adam_scales", param), rows, THREADS, made, stream)
        arguments = (*known, old, grad_type, rows, table)
        launch.launch(kernel(_SOURCE, "encoded_adam", param), blocks, THREADS, arguments, stream)
        old += 12 * (rows + blocks) if formats.by_tensor else 0


def _form(kept: MomentFormat) -> tuple[int, int, int]:
    """Returns the source's ``Form``."""
    return list(KEPT).index(kept.format), kept.block or 0, kept.power_2 + 2 * kept.expansion


def encoded_adam_workspace(sizes: Sequence[int], formats: StateFormats) -> int:
    """See ``backends.protocol``. Three floats for each tensor and for each of its pieces."""
    return 12 * sum(1 + ceil_div(size, PIECE) for size in sizes) if formats.by_tensor else 0
