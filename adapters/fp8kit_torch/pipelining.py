"""A stage of ``torch.distributed.pipelining`` whose layers compute in FP8."""

from __future__ import annotations

from typing import Any

from torch.distributed import pipelining

from fp8kit_torch.autocast import autocast


class PipelineStage(pipelining.PipelineStage):
    """torch's stage, with its arguments. Where it is not told the shapes of inputs and outputs
    (``input_args``, ``output_args``), torch finds them by a pass over uninitialised numbers when the first
    step begins. Here that pass runs in high precision, so that delayed scaling's histories do not have them
    among their amaxes, which torch's own stage would leave there."""

    def _forward_metadata_inference(self, *args: Any, **kwargs: Any) -> Any:
        with autocast(enabled=False):
            return super()._forward_metadata_inference(*args, **kwargs)
