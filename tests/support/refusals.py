"""What the tests of refused calls share: the modules that are tried, and how one call after the other is
refused without a trace."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import pytest

from fp8kit.errors import Fp8kitError
from tests.support.bad_options import ACROSS, ACROSS_OWN, OTHER, PACKED, SELF, THD, TOKENS, B, H, S, refused
from tests.support.layers import draw

RENAMED = {"attn_mask_type": "self_attn_mask_type"}
TWINS = {
    "attn_mask_type": "enc_dec_attn_mask_type",
    "window_size": "enc_dec_window_size",
    "attention_mask": "enc_dec_attn_mask",
    "bottom_right_diagonal": "enc_dec_bottom_right_diagonal",
}
X, SOURCE, PACK = (
    draw(1, (S, B, H), "float32"),
    draw(2, (OTHER, B, H), "float32"),
    draw(3, (TOKENS, H), "float32"),
)
ACROSS_MHA = {"attention_type": "cross", "attn_mask_type": "no_mask"}
PACKED_MHA, PACKED_LAYER = (
    {name: "thd", kind: "padding_causal"}
    for name, kind in (("qkv_format", "attn_mask_type"), ("attn_input_format", "self_attn_mask_type"))
)
ENCODER = {
    f"{name} without an encoder": {name: value}
    for name, value in (
        ("encoder_output", SOURCE),
        ("enc_dec_attn_mask_type", "no_mask"),
        ("enc_dec_window_size", (2, 2)),
        ("enc_dec_bottom_right_diagonal", False),
    )
}
STARTS = {"starts that are no running sums": {"cu_seqlens_q_padded": np.array([1, 5, 10], np.int32)}}


def _renamed(table, names):
    return {
        case: {names.get(name, name): value for name, value in options.items()}
        for case, options in table.items()
    }


def cases(
    mha: Callable[..., Any], layer: Callable[..., Any]
) -> dict[str, tuple[Any, dict[str, Any], dict[str, Any]]]:
    """Name -> (function that makes the module on a device, good inputs by name, bad ones), of a frontend's
    ``MultiheadAttention`` and ``TransformerLayer``."""
    return {
        "mha": (mha, {"hidden_states": X}, SELF),
        "mha with a norm, and queries and keys apart": (
            lambda d: mha(d, input_layernorm=True, qk_norm_type="RMSNorm", num_gqa_groups=2),
            {"hidden_states": X},
            SELF,
        ),
        "mha across": (
            lambda d: mha(d, **ACROSS_MHA),
            {"hidden_states": X, "encoder_output": SOURCE},
            ACROSS | ACROSS_OWN,
        ),
        "mha across, parts apart": (
            lambda d: mha(d, fuse_qkv_params=True, qk_norm_type="LayerNorm", **ACROSS_MHA),
            {"hidden_states": X, "encoder_output": SOURCE},
            ACROSS | ACROSS_OWN,
        ),
        "mha, packed": (lambda d: mha(d, **PACKED_MHA), {"hidden_states": PACK} | THD, PACKED),
        "layer": (layer, {"hidden_states": X}, _renamed(SELF, RENAMED) | ENCODER),
        "parallel layer": (
            lambda d: layer(d, parallel_attention_mlp=True),
            {"hidden_states": X},
            _renamed(SELF, RENAMED),
        ),
        "decoder": (
            lambda d: layer(d, layer_type="decoder"),
            {"hidden_states": X, "encoder_output": SOURCE},
            ACROSS | _renamed(ACROSS_OWN, TWINS),
        ),
        "layer, packed": (
            lambda d: layer(d, drop_path_rate=0.5, **PACKED_LAYER),
            {"hidden_states": PACK} | THD,
            _renamed(PACKED, RENAMED) | STARTS,
        ),
    }


class Frontend(NamedTuple):
    """A frontend as the tests use it.

    ``base``: the class of layers whose ``run`` is the first that computes; ``placed``: an option on a device;
    ``scope``: an autocast; ``state``: all that a call might change of a module, and the random state;
    ``cached``: what an ``InferenceParams`` holds; ``step``: a training step's results; ``late``: the case
    that the first projection itself refuses.
    """

    base: type
    placed: Callable[[Any, str], Any]
    scope: Callable[[], AbstractContextManager[Any]]
    state: Callable[[Any], Any]
    cached: Callable[[Any], Any]
    step: Callable[[Any, dict[str, Any], str], Any]
    late: str = ""

    def refuses_without_a_trace(
        self,
        make: Callable[[], Any],
        good: dict[str, Any],
        table: dict[str, Any],
        device: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Every bad call is refused before anything runs, and training steps among them give what they give
        without."""
        other = make()
        wanted = [self.step(other, good, device) for _ in range(2)]
        module, ran = make(), []
        run = self.base.run  # type: ignore[attr-defined]

        def counted(layer: Any, *given: Any, **named: Any) -> Any:
            ran.append(type(layer).__name__)
            return run(layer, *given, **named)

        monkeypatch.setattr(self.base, "run", counted)
        wrong = []
        for when in ("before the first step", "after it"):
            before = self.state(module)
            for name, bad in refused(table, device).items():
                options = {argument: self.placed(value, device) for argument, value in (good | bad).items()}
                cached, ran[:] = self.cached(options.get("inference_params")), []
                try:
                    with self.scope():
                        module(**options)
                    wrong.append(f"{when}: {name}: taken")
                except Fp8kitError:
                    pass
                if self.state(module) != before or self.cached(options.get("inference_params")) != cached:
                    wrong.append(f"{when}: {name}: left a trace")
                if ran and name != self.late:
                    wrong.append(f"{when}: {name}: {', '.join(ran)} ran")
            assert not wrong, wrong
            assert self.step(module, good, device) == wanted.pop(0)
