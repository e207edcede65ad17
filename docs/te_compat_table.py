"""Writes the lists of Transformer Engine's names and arguments in docs/te_compat.md, from the code alone ::

    PYTHONPATH=.:adapters python docs/te_compat_table.py

``tests/adapters/torch/test_te_compat_page.py`` fails where the page has others. Names are asked in this
process under Transformer Engine's name; arguments are those of ``tests/adapters/torch/te_signatures.txt``.
"""

from __future__ import annotations

import importlib
import re
import sys
import textwrap
from pathlib import Path

import fp8kit_torch
from fp8kit_torch.te_compat import gemms
from fp8kit_torch.te_compat.public import public_names, why_not
from fp8kit_torch.te_compat.unsupported import METHODS, WHY

from fp8kit.aliases import is_refused
from fp8kit.layers.unsupported import CONSTRUCTOR, FORWARD, REASONS, WITHOUT_EFFECT

PAGE = Path(__file__).with_name("te_compat.md")
SIGNATURES = Path(__file__).parents[1] / "tests" / "adapters" / "torch" / "te_signatures.txt"
BEGIN, END = "<!-- te_compat -->", "<!-- /te_compat -->"
_TENSOR_PARALLEL = "the layer has no tensor parallelism"
_GROUP = "None and a group of one process; larger groups are refused"
_OPS = {
    "userbuffers_options": "communication that overlaps products is that of several processes",
    "sm_margin": "a hint about kernels that run beside it",
    "activation_recompute_in_mlp": "backward computes the activation anew in any case",
}
_WHY = {
    "amsgrad": "as in Transformer Engine",
    "columnwise_source": "each GEMM casts the tensor itself",
    **dict.fromkeys(("qb_histogram", "qb_bin_bounds", "qb_histogram_mode"), "no histogram is kept"),
}
_TWO_FORMATS = "there is no tensor in two formats"
# methods that are called and refuse
_METHODS = METHODS | dict.fromkeys(
    [f"HybridQuantizer.{name}" for name in ("quantize_impl", "make_empty", "update_quantized")], _TWO_FORMATS
)
# what has one value where it is called -> its arguments, where no table of the layers has them
_REFUSED: dict[str, dict[str, object]] = {
    "optimizers.FusedAdam": {"amsgrad": False},
    "cpp_extensions.general_gemm": gemms._NEUTRAL,
    "router.fused_topk_with_score_function": dict.fromkeys(
        ("qb_histogram", "qb_bin_bounds", "qb_histogram_mode")
    ),
    "Quantizer.make_empty": {"pin_memory": False},
    "HybridQuantizer": {"columnwise_source": "original"},
}


def signatures() -> dict[str, list[str]]:
    """Class, method or function of Transformer Engine -> its arguments."""
    found = {}
    for line in re.sub(r"\n +", " ", SIGNATURES.read_text("utf-8")).splitlines():
        name, _, rest = line.partition("(")
        inner = rest.rpartition(")")[0]
        flat = re.sub(r"\([^()]*\)", "", inner)
        found[name] = [each.partition("=")[0].strip() for each in flat.split(",") if each.strip(" *")]
    return found


def state_of(name: str, argument: str) -> tuple[str, str]:
    """("works" | "ignored" | "refused", why) of an argument."""
    own = fp8kit_torch.Linear.constructor_rules
    owner, _, method = name.rpartition(".")
    if name in CONSTRUCTOR or name in ("LayerNorm", "RMSNorm", "GroupedLinear"):
        if argument in WITHOUT_EFFECT:
            return "ignored", WITHOUT_EFFECT[argument]
        if name == "GroupedLinear" and argument == "sequence_parallel":
            return "ignored", "the program moves rows between processes, as in Transformer Engine"
    if name.startswith("ops.") and argument in _OPS:
        return "ignored", _OPS[argument]
    if argument == "amax_reduction_group" and name == "NVFP4Quantizer":
        return "ignored", _GROUP
    for table in (
        {key: value for key, value in CONSTRUCTOR.get(name, {}).items() if key not in own},
        FORWARD.get(owner, {}) if method == "forward" else {},
        _REFUSED.get(name, {}),
    ):
        if argument in table:
            parallel = "parallel" in argument or argument.startswith(("tp_", "cp_"))
            why = REASONS.get(argument, _WHY.get(argument, _TENSOR_PARALLEL if parallel else ""))
            return "refused", f"{table[argument]!r} only" + (f": {why}" if why else "")
    if argument == "D_dtype":
        return "ignored", "the dtype of out says it"
    if argument == "internal":
        return "ignored", "tensors and their storages are of one class"
    if argument == "device" and "_functional_" in name:
        return "ignored", "the tensors say it"
    if argument in ("fast_zero_fill", "num_splits", "seq_length", "micro_batch_size"):
        return "ignored", WITHOUT_EFFECT.get(argument, "outputs of no row are always 0")
    return "works", ""


def arguments() -> list[str]:
    """A list for each signature."""
    lines = []
    for name, names in signatures().items():
        last = name.rpartition(".")[2]
        why = WHY.get(last) or _METHODS.get(name) or _METHODS.get(last)
        if why is not None:
            lines += _item(f"`{name}`: refused ({why}).")
            continue
        states: dict[tuple[str, str], list[str]] = {}
        for argument in names:
            states.setdefault(state_of(name, argument.lstrip("*")), []).append(f"`{argument}`")
        if not names:
            states["works", ""] = ["no arguments"]
        said = [
            f"{state}: {', '.join(known)}" + (f" ({why})" if why else "")
            for (state, why), known in states.items()
        ]
        lines += _item(f"`{name}`: {'; '.join(said)}.")
    return lines


def names() -> list[str]:
    """A list for each module: what works, and what is refused by its reason."""
    lines = []
    for module, known in public_names().items():
        if not known:
            continue
        found = importlib.import_module(module)
        refused: dict[str, list[str]] = {}
        there = []
        for name in known:
            if is_refused(getattr(found, name)):
                refused.setdefault(why_not(module, name), []).append(f"`{name}`")
            else:
                there.append(f"`{name}`")
        said = [f"works: {', '.join(there)}"] if there else []
        said += [f"refused: {', '.join(each)} ({why})" for why, each in refused.items()]
        lines += _item(f"**{module}**: {'; '.join(said)}.")
    return lines


def _item(text: str) -> list[str]:
    return textwrap.wrap(
        text, 110, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def lists() -> str:
    """Both lists, with their headings."""
    return "\n".join(["## Arguments", "", *arguments(), "", "## Names", "", *names()])


def page(text: str) -> str:
    """The page's text with the lists in their place."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{lists()}\n{END}{after}"


if __name__ == "__main__":
    fp8kit_torch.as_transformer_engine()
    text = PAGE.read_text("utf-8")
    if sys.argv[1:] == ["--check"]:
        sys.exit(page(text) != text)
    PAGE.write_text(page(text), "utf-8")
