"""``fp8kit info --attention``: who computes an attention of given shape and rules on each device, and why the
others do not.

The question is a line of ``key=value`` pairs; ``KEYS`` has them all, with their defaults. What does not fit
together is refused by the operation itself, so that the answer is about what would really run.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fp8kit import arrays, formats
from fp8kit.arrays import Device, Shape
from fp8kit.backends import dispatch
from fp8kit.errors import ArgumentError, BackendError, ShapeError, meant
from fp8kit.formats import E4M3, E5M2, DType, Format
from fp8kit.ops import attention_native
from fp8kit.ops.attention import LAYOUTS, AttentionSpec, attention
from fp8kit.ops.attention_spec import BIASES, FORMATS, MASKS, SOFTMAX_TYPES
from fp8kit.spec import Meta

Row = tuple[str, str, str]  # what it is about, who or whether, why
_OP = "fp8kit info --attention"


class Key(NamedTuple):
    """A key of the question: its default as it is written, how a value is read, and what a value must be."""

    default: str
    read: Callable[[str], Any]
    wanted: str


def _size(value: str) -> int:
    if not value.isdecimal() or len(value) > 10 or not 0 < int(value) < 2**31:
        raise ValueError(value)
    return int(value)


def _window(value: str) -> tuple[int, int]:
    left, right = (-1, -1) if value == "none" else (int(part) for part in value.split(","))
    if min(left, right) < -1:
        raise ValueError(value)
    return left, right


def _dropout(value: str) -> float:
    p = float(value)
    if not 0 <= p < 1:
        raise ValueError(value)
    return p


def _one_of(names: Iterable[str]) -> str:
    return f"one of {', '.join(names)}"


def _choice(default: str, values: Iterable[str] | Mapping[str, Any]) -> Key:
    """Returns a key whose value is one of some strings, or what a mapping has for it."""
    read = values if isinstance(values, Mapping) else {name: name for name in values}
    return Key(default, read.__getitem__, _one_of(read))


_SIZE = "a positive number below 2^31"

# no default: the same as another key, _SAME says which
KEYS: dict[str, Key] = {
    "heads": Key("32", _size, _SIZE),
    "groups": Key("", _size, f"{_SIZE}, a divisor of heads"),
    "head_dim": Key("128", _size, _SIZE),
    "head_dim_v": Key("", _size, _SIZE),
    "sequence": Key("2048", _size, _SIZE),
    "sequence_kv": Key("", _size, _SIZE),
    "batch": Key("4", _size, _SIZE),
    "dtype": _choice("bfloat16", [kind.name for kind in formats.HIGH_PRECISION]),
    "mask": _choice("causal", MASKS),
    "window": Key("none", _window, "left,right, each -1 (unbounded) or more, or none"),
    "bottom_right": _choice("default", {"default": None, "true": True, "false": False}),
    "bias": _choice("none", {"none": "no_bias"} | {name: name for name in BIASES}),
    "softmax": _choice("vanilla", SOFTMAX_TYPES),
    "softcap": Key("0", float, "a number, 0 for no cap"),
    "dropout": Key("0", _dropout, "a probability in [0, 1)"),
    "layout": _choice("sbhd", FORMATS),
    "fp8": _choice("none", {"none": None, "hybrid": (E4M3, E5M2), "e4m3": (E4M3, E4M3)}),
}
# of the spec -> its key
_FIELDS = {
    "num_gqa_groups": "groups",
    "num_heads": "heads",
    "head_dim": "head_dim",
    "head_dim_v": "head_dim_v",
    "qkv_format": "layout",
    "mask": "mask",
    "dropout": "dropout",
    "window_size": "window",
    "bottom_right_diagonal": "bottom_right",
    "bias": "bias",
    "softmax_type": "softmax",
    "softcap": "softcap",
    "max_seqlen_q": "sequence",
    "max_seqlen_kv": "sequence_kv",
}
_SAME = {"groups": "heads", "head_dim_v": "head_dim", "sequence_kv": "sequence"}


@dataclass(frozen=True)
class Question:
    """An attention to ask about: ``spec``, ``dtype``, shapes of ``q``, ``k`` and ``v`` as the kernels see
    them, ``text``, the question with every key, and ``fp8``, the formats of a recipe's ``fp8_dpa``."""

    spec: AttentionSpec
    dtype: DType
    q: Shape
    k: Shape
    v: Shape
    text: str
    fp8: tuple[Format, Format] | None = None


def question(text: str) -> Question:
    """Read a question. ArgumentError for a part that is not ``key=value``, an unknown or repeated key, or a
    value that the key cannot have; ShapeError for values that do not fit together, as the operation refuses
    them."""
    asked: dict[str, str] = {}
    for part in text.split():
        name, equals, value = part.partition("=")
        if not equals:
            raise ArgumentError(_OP, repr(part), "no =", "key=value, such as heads=32")
        if name not in KEYS:
            raise ArgumentError(_OP, repr(part), f"the key {name!r}", _one_of(KEYS) + meant(name, KEYS))
        if name in asked:
            raise ArgumentError(_OP, name, "two values", "one")
        asked[name] = value
    values = {name: key.default for name, key in KEYS.items()} | asked
    values |= {name: values[other] for name, other in _SAME.items() if name not in asked}
    found: dict[str, Any] = {}
    for name, value in values.items():
        try:
            found[name] = KEYS[name].read(value)
        except (ValueError, KeyError):
            raise ArgumentError(_OP, name, repr(value), KEYS[name].wanted) from None
    return _checked(found, " ".join(f"{name}={value}" for name, value in values.items()))


def _checked(of: dict[str, Any], text: str) -> Question:
    """Returns the question of these values, seen by the operation: ShapeError where they do not fit."""
    spec = AttentionSpec(**{field: of[key] for field, key in _FIELDS.items()}, layout="separate")
    batch, kind = of["batch"], formats.dtype(of["dtype"])
    rows, columns = of["sequence"], of["sequence_kv"]

    def parts(form: str) -> dict[str, Shape]:
        found = {}
        for part in LAYOUTS["separate"]:
            length = rows if part == "q" else columns
            leading = {"sbhd": (length, batch), "bshd": (batch, length), "thd": (batch * length,)}[form]
            found[part] = (*leading, spec.heads(part), spec.features(part))
        return found

    metas: dict[str, Meta | None] = {name: Meta(size, kind) for name, size in parts(spec.qkv_format).items()}
    beside = {
        "cu_seqlens_q": (spec.padded, (batch + 1,), formats.int32),
        "cu_seqlens_kv": (spec.padded, (batch + 1,), formats.int32),
        "mask": (spec.masked, (batch, 1, rows, columns), formats.bool_),
        "bias": (spec.biased, (1, spec.num_heads, rows, columns), kind),
        "alibi_slopes": (spec.bias == "alibi", (spec.num_heads,), formats.float32),
        "softmax_offset": (spec.softmax_type == "learnable", (spec.num_heads,), formats.float32),
        "rng": (spec.dropout > 0, (2,), formats.int64),
    }
    metas |= {name: Meta(size, dtype) for name, (wanted, size, dtype) in beside.items() if wanted}
    try:
        attention.infer(spec, metas, frozenset())
    except ShapeError as error:
        argument, wanted = str(error.argument), str(error.wanted)
        for field, key in _FIELDS.items():
            argument, wanted = argument.replace(field, key), wanted.replace(field, key)
        raise ShapeError(_OP, argument, error.got, wanted) from None
    dense = parts("bshd" if spec.packed else spec.qkv_format)
    return Question(spec, kind, dense["q"], dense["k"], dense["v"], text, of["fp8"])


def sections(about: Question) -> Iterator[tuple[str, list[Row]]]:
    """(title, rows) of every device: who takes the attention there, and why the others do not."""
    if about.fp8 is None:
        yield "attention on cpu", _implementations(arrays.CPU)
    else:
        yield "attention on cpu", [(name, "runs", "emulated") for name in ("forward", "backward")]
    count = arrays.provider(Device("cuda")).count()
    for index in range(count):
        yield f"attention on {Device('cuda', index)}", _cuda(about, Device("cuda", index))
    if not count:
        yield "attention on cuda", _cuda(about, None)


def _implementations(device: Device) -> list[Row]:
    """Implementations of the attention's kernels that the policy in force chooses from; the first that takes
    a call does."""
    found: list[Row] = []
    for name, kernel in (("forward", "attention_fwd"), ("backward", "attention_bwd")):
        usable, refused = dispatch.candidates(kernel, device)
        why = [usable[0].impl_id if usable else "no implementation"]
        why += [f"{impl.impl_id}: after it" for impl in usable[1:]]
        why += [f"{impl.impl_id}: {reason}" for impl, reason in refused if device.kind in impl.devices]
        found.append((name, "runs" if usable else "missing", "; ".join(why)))
    return found


def _cuda(about: Question, device: Device | None) -> list[Row]:
    """Returns which of the CUDA engine's paths takes each direction; None: what is known of them where there
    is no device."""
    from fp8kit.backends.cuda import attention as engine
    from fp8kit.backends.cuda import launch

    # unpacked before the kernels
    spec = dataclasses.replace(about.spec, qkv_format="bshd") if about.spec.packed else about.spec
    if about.fp8 is not None:
        return _fp8(about, about.fp8, spec, device)
    asked = about.q, about.k, about.dtype, spec, about.v
    if device is not None:
        usable, _ = dispatch.candidates("attention_fwd", device)
        if not usable or usable[0].engine != "cuda":
            return _implementations(device)
    if about.spec.packed and _lies(about):
        how = "which reads and writes the sequences where they lie"
        none = f"no usable CUDA device; on one flash would be asked, {how}"
        word, why = ("missing", none) if device is None else ("runs", f"flash, {how}")
        return [(direction, word, why) for direction in engine.DIRECTIONS]
    try:
        with contextlib.nullcontext() if device is None else launch.current_device(device.index):
            answer = dict(engine.explain(*asked))
            own = "" if device is None else f" with {engine.own_kernels(*asked)}"
    except BackendError as error:
        return [("all paths", "missing", _line(str(error)))]
    rows: list[Row] = []
    for direction in engine.DIRECTIONS:
        of = {path: answer[f"{path} {direction}"] for path in engine.PATHS}
        runs = of[engine.PATHS[-1]]  # nothing speaks against the last
        taken = next(path for path, why in of.items() if why == runs)
        passed = "; ".join(f"{path}: {_line(why)}" for path, why in of.items() if why != runs)
        if device is None:
            taken = f"{runs}; on one {taken} would be asked"
        elif taken == "flash":
            taken += own
        taken += f", not {passed}" if passed else ""
        rows.append((direction, "missing" if device is None else "runs", taken))
    return rows


def _lies(about: Question) -> bool:
    """Whether packed sequences, all of the longest length, are read and written where they lie."""
    from fp8kit.backends.cuda.packed_attention import in_place

    q, k, v = ((shape[0] * shape[1], *shape[2:]) for shape in (about.q, about.k, about.v))
    return in_place(q, k, v, (about.q[0], about.q[1], about.k[1]), about.dtype, about.spec)


def _fp8(
    about: Question, formats: tuple[Format, Format], spec: AttentionSpec, device: Device | None
) -> list[Row]:
    """Returns which directions of an attention in FP8 cuDNN takes. A call that is trained is cuDNN's where it
    takes both."""
    from fp8kit.backends.cuda import fp8_attention as engine
    from fp8kit.backends.cuda import launch

    def heads_first(shape: Shape) -> Shape:
        first, second, heads, features = shape
        batch, length = (second, first) if spec.qkv_format == "sbhd" else (first, second)
        return batch, heads, length, features

    q, k, v = (heads_first(shape) for shape in (about.q, about.k, about.v))
    small = attention_native.work(q, k, v, spec) < attention_native.LEAST
    with contextlib.nullcontext() if device is None else launch.current_device(device.index):
        answer = engine.explain(q, k, v, spec, formats)
    rows: list[Row] = []
    for direction, why in answer:
        reason = "too small to be worth a graph" if small else _line(why)
        taken = engine.NAME if reason == "runs" else f"{engine.EMULATED}, not {engine.NAME}: {reason}"
        rows.append((direction, "missing" if device is None else "runs", taken))
    return rows


def _line(text: str) -> str:
    return " ".join(text.split())
