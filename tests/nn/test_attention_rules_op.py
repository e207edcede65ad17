"""The attention operation on the reference engine: masks, windows, biases, softmax types and packed
sequences, against float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from fp8kit import arrays, formats
from fp8kit.backends import dispatch
from fp8kit.backends.cuda import packed_attention
from fp8kit.errors import FormatError, ShapeError
from fp8kit.ops.attention import LAYOUTS, AttentionSpec, attention
from fp8kit.spec import Meta, WorkingSet
from fp8kit.testing.attention import Oracle, Rules, Sizes
from fp8kit.testing.compare import assert_close, assert_same_bits
from fp8kit.testing.contract import get, poisoned, put
from fp8kit.testing.contract.dropout import RNG, keep_factors

LENGTHS_Q, LENGTHS_KV = (13, 5, 0), (9, 17, 4)
GAPS_Q, GAPS_KV = (3, 0, 2), (0, 7, 1)
PLAIN = AttentionSpec(num_heads=4, head_dim=8, num_gqa_groups=2, layout="separate", mask="no_mask")


def change(**changes: Any) -> AttentionSpec:
    return dataclasses.replace(PLAIN, **changes)


THD = {"qkv_format": "thd", "max_seqlen_q": 13, "max_seqlen_kv": 17}
CASES = {
    "causal_bottom_right": change(mask="causal_bottom_right"),
    "padding_causal_bottom_right": change(mask="padding_causal_bottom_right"),
    "alias": change(mask="causal,padding", qkv_format="bshd"),
    "arbitrary": change(mask="arbitrary"),
    "window": change(window_size=(3, 2)),
    "window_causal": change(mask="causal", window_size=(4, -1), qkv_format="bshd"),
    "window_padding": change(mask="padding", window_size=(4, 1)),
    "window_top_left": dataclasses.replace(PLAIN, window_size=(3, 2), bottom_right_diagonal=False),
    "arbitrary_window": change(mask="arbitrary", window_size=(6, 6), qkv_format="bshd"),
    "pre_scale_bias": change(bias="pre_scale_bias"),
    "post_scale_bias": change(bias="post_scale_bias", mask="causal"),
    "alibi": change(bias="alibi", mask="causal_bottom_right"),
    "off_by_one": change(softmax_type="off-by-one", mask="causal"),
    "learnable": change(softmax_type="learnable", dropout=0.2),
    "cap": change(softcap=1.5, mask="causal"),
    "cap_pre_scale_bias": change(softcap=1.5, bias="pre_scale_bias"),
    "cap_post_scale_bias": change(softcap=1.5, bias="post_scale_bias", softmax_type="learnable"),
    "cap_alibi_arbitrary": change(softcap=1.5, bias="alibi", mask="arbitrary", window_size=(6, 6)),
    "depth_of_v": change(head_dim_v=12, layout="q_kv"),
    "thd": change(mask="padding", **THD),
    "thd_causal": change(mask="padding_causal", **THD),
    "thd_q_kv": change(mask="padding_causal_bottom_right", layout="q_kv", **THD),
    "thd_bias_learnable": change(mask="padding", bias="post_scale_bias", softmax_type="learnable", **THD),
    "thd_cap": change(mask="padding_causal", softcap=1.5, **THD),
    "thd_dropout_depth": change(mask="padding", dropout=0.25, head_dim_v=4, **THD),
}


def sums(lengths: tuple[int, ...], gaps: tuple[int, ...] = (0, 0, 0)) -> Any:
    return np.concatenate([[0], np.cumsum(np.add(lengths, gaps))]).astype(np.int32)


class Case:
    """Inputs (b, h, s, d), the oracle, and both as the spec wants them."""

    def __init__(self, spec: AttentionSpec, dtype: str = "float32", gaps: bool = False) -> None:
        self.spec, kind = spec, formats.dtype(dtype)
        self.random, self.kind = np.random.default_rng(8), kind
        self.starts = {
            "q": sums(LENGTHS_Q, GAPS_Q if gaps else (0, 0, 0)),
            "kv": sums(LENGTHS_KV, GAPS_KV if gaps else (0, 0, 0)),
        }
        lengths = (LENGTHS_Q, LENGTHS_KV) if spec.padded else ((), ())
        over = (1, 4, 13)
        self.sizes = Sizes(3, 13, 17, 4, 2, 8, *lengths, spec.head_dim_v, over)
        self.rules = Rules(
            "bshd",
            spec.window,
            spec.bottom_right,
            spec.softmax_scale,
            spec.dropout,
            spec.bias,
            spec.softmax_type,
            spec.padded,
            spec.masked,
            softcap=spec.softcap,
        )
        z = self.sizes
        self.q, self.k = self.draw(3, 4, 13, 8), self.draw(3, 2, 17, 8)
        self.v, self.do = self.draw(3, 2, 17, z.depth_v), self.draw(3, 4, 13, z.depth_v)
        self.extra: dict[str, Any] = {}
        if spec.masked:
            self.extra["mask"] = self.random.random((*over, 17)) < 0.4
        if spec.biased:
            self.extra["bias"] = self.draw(*over, 17)
        if spec.bias == "alibi":
            self.extra["alibi_slopes"] = 2.0 ** -np.arange(1, 5, dtype=np.float32)
        if spec.softmax_type == "learnable":
            self.extra["softmax_offset"] = self.random.standard_normal(4).astype(np.float32)
        keep = keep_factors(RNG, spec.dropout, (3, 4, 13, 17)) if spec.dropout else None
        named = {"mask": "mask", "bias": "bias", "alibi_slopes": "slopes", "softmax_offset": "offset"}
        given = {named[name]: value for name, value in self.extra.items()}
        self.oracle = Oracle(kind, z, self.rules, False, self.q, self.k, self.v, self.do, keep=keep, **given)
        if spec.padded:
            self.extra |= {"cu_seqlens_q": sums(LENGTHS_Q), "cu_seqlens_kv": sums(LENGTHS_KV)}
        if gaps:
            self.extra |= {f"cu_seqlens_{side}_padded": starts for side, starts in self.starts.items()}
        if spec.dropout:
            self.extra["rng"] = RNG

    def draw(self, *shape: int) -> Any:
        return self.random.standard_normal(shape).astype(self.kind.numpy)

    def place(self, x: Any, side: str) -> Any:
        """(b, h, s, d) values in the spec's format; 99 in tokens of no sequence."""
        if self.spec.qkv_format != "thd":
            return np.ascontiguousarray(
                x.transpose((2, 0, 1, 3) if self.spec.qkv_format == "sbhd" else (0, 2, 1, 3))
            )
        lengths, starts = {"q": LENGTHS_Q, "kv": LENGTHS_KV}[side], self.starts[side]
        out = np.full((starts[-1], x.shape[1], x.shape[3]), 99, x.dtype)
        for b, n in enumerate(lengths):
            out[starts[b] : starts[b] + n] = x[b, :, :n].swapaxes(0, 1)
        return out

    def inputs(self) -> dict[str, Any]:
        parts = {"q": self.place(self.q, "q"), "k": self.place(self.k, "kv"), "v": self.place(self.v, "kv")}
        flat = {name: part.reshape(*part.shape[:-2], -1) for name, part in parts.items()}
        return {
            name: np.concatenate([flat[p] for p in names], -1)
            for name, names in LAYOUTS[self.spec.layout].items()
        } | self.extra

    def wanted(self) -> dict[str, tuple[Any, Any]]:
        """name -> (gradient or o, slack) as the operation gives them; 0 in tokens of no sequence."""
        named = {"o": (self.oracle.o, self.oracle.o_slack, "q")}
        named |= {
            part: (self.oracle.grads[f"d{part}"], self.oracle.forward_slack(f"d{part}"), side)
            for part, side in (("q", "q"), ("k", "kv"), ("v", "kv"))
        }
        placed = {
            name: [self.place(x, side) for x in (value, slack)]
            for name, (value, slack, side) in named.items()
        }
        flat = {
            name: [np.where(x == 99, 0, x).reshape(*x.shape[:-2], -1) for x in pair]
            for name, pair in placed.items()
        }
        found = {"o": tuple(flat["o"])}
        for name, names in LAYOUTS[self.spec.layout].items():
            found[name] = tuple(np.concatenate([flat[p][i] for p in names], -1) for i in range(2))
        for name, key in (("bias", "dbias"), ("softmax_offset", "doffset")):
            if key in self.oracle.grads:
                found[name] = (self.oracle.grads[key], self.oracle.forward_slack(key))
        return found


def run(
    spec: AttentionSpec,
    inputs: dict[str, Any],
    do: Any,
    needs: frozenset[str],
    device: arrays.Device = arrays.CPU,
) -> dict[str, Any]:
    """Forward and backward as a frontend does it, with every buffer poisoned beforehand."""
    views = {name: put(x, device) for name, x in inputs.items()}
    plan = attention.plan(
        spec, {n: Meta(x.shape, x.dtype) for n, x in views.items()}, needs, dispatch.kernels(device)
    )

    def buffers(metas: dict[str, Meta]) -> dict[str, Any]:
        return {name: poisoned(meta.shape, meta.dtype, device) for name, meta in metas.items()}

    outputs, saved = buffers(plan.signature.outputs), buffers(plan.signature.saved)
    attention.forward(plan, WorkingSet(plan.kernels, views, outputs, saved, buffers(plan.scratch), 0))
    found = {name: get(view) for name, view in outputs.items()}
    if plan.signature.grads:
        kept = {name: (views | outputs)[name] for name in plan.signature.kept}
        grads = buffers(plan.signature.grads)
        cotangent = put(do.reshape(outputs["o"].shape), device)
        ws = WorkingSet(plan.kernels, kept, grads, saved, buffers(plan.backward_scratch), 0)
        attention.backward(plan, ws, {"o": cotangent})
        found |= {name: get(view) for name, view in grads.items()}
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, gaps: bool, dtype: str) -> None:
    spec = CASES[name]
    case = Case(spec, dtype, gaps and spec.packed)
    needs = frozenset({*LAYOUTS[spec.layout], "bias", "softmax_offset"})
    found = run(spec, case.inputs(), case.place(case.do, "q"), needs & case.inputs().keys())
    wanted = case.wanted()
    assert found.keys() == wanted.keys()
    for what, (value, slack) in wanted.items():
        kind = "float32" if what == "softmax_offset" else dtype
        assert_close(what, found[what].reshape(value.shape), value, kind, slack)


@pytest.mark.parametrize("name", ["thd_causal", "thd_bias_learnable"])
def test_only_what_is_wanted(name: str) -> None:
    spec = CASES[name]
    case = Case(spec)
    do = case.place(case.do, "q")
    whole = run(
        spec, case.inputs(), do, frozenset({"q", "k", "v", "bias", "softmax_offset"} & case.inputs().keys())
    )
    for needs in ({"k"}, {"softmax_offset"}, {"bias"}, set()):
        if needs <= whole.keys():
            some = run(spec, case.inputs(), do, frozenset(needs))
            assert set(some) == {"o"} | needs
            for what in some:
                assert_same_bits(what, some[what], whole[what])


def test_packed_sequences_give_the_bits_of_a_padded_batch() -> None:
    spec = CASES["thd_causal"]
    case, padded = Case(spec), Case(dataclasses.replace(spec, qkv_format="bshd"))
    needs = frozenset("qkv")
    one = run(spec, case.inputs(), case.place(case.do, "q"), needs)
    other = run(padded.spec, padded.inputs(), padded.place(padded.do, "q"), needs)
    for what, side in (("o", "q"), ("q", "q"), ("k", "kv"), ("v", "kv")):
        heads = 4 if side == "q" else 2
        batch = other[what].reshape(3, -1, heads, 8).transpose(0, 2, 1, 3)
        assert_same_bits(what, one[what].reshape(-1, heads, 8), case.place(batch, side))


@pytest.mark.gpu
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("thd")])
def test_sequences_where_they_lie_give_the_bits_of_padded_batches(
    name: str, gaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, device = dataclasses.replace(CASES[name], head_dim_v=16), arrays.device("cuda")
    case = Case(spec, "bfloat16", gaps)
    call = spec, case.inputs(), case.place(case.do, "q"), frozenset(LAYOUTS[spec.layout]), device
    places = []

    def lies(self: Any, *asked: Any) -> bool:
        places.append(own(self, *asked))
        return places[-1]

    own = packed_attention._PackedProblem.in_place
    monkeypatch.setattr(packed_attention._PackedProblem, "in_place", lies)
    lying = run(*call)
    assert places[0]
    assert all(places[2:])  # the calls; backward's workspace may be that of a learnable offset's gradient
    monkeypatch.setattr(packed_attention._PackedProblem, "in_place", lambda *asked: False)
    for what, padded in run(*call).items():
        assert_same_bits(what, lying[what], padded)


def test_one_qkv_input_of_packed_sequences() -> None:
    spec = dataclasses.replace(CASES["thd_causal"], layout="qkv", max_seqlen_kv=13, num_gqa_groups=4)
    random = np.random.default_rng(1)
    qkv = random.standard_normal((18, 96)).astype(np.float32)
    lengths = {"cu_seqlens_q": sums(LENGTHS_Q), "cu_seqlens_kv": sums(LENGTHS_Q)}
    do = random.standard_normal((18, 32)).astype(np.float32)
    one = run(spec, {"qkv": qkv, **lengths}, do, frozenset({"qkv"}))
    parts = dict(zip("qkv", np.split(qkv, 3, axis=1), strict=True))
    other = run(dataclasses.replace(spec, layout="separate"), parts | lengths, do, frozenset("qkv"))
    assert_same_bits("o", one["o"], other["o"])
    assert_same_bits("grads", one["qkv"], np.concatenate([other[p] for p in "qkv"], axis=1))


@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_a_part_drops_what_the_whole_drops(form: str) -> None:
    """Batches 1 and 2 and query heads 2 and 3, over key head 1: a slice of the whole's results and gradients,
    bit for bit."""
    spec = change(qkv_format=form, mask="causal_bottom_right", dropout=0.4)
    case, batches = Case(spec), 1 if form == "sbhd" else 0
    inputs, do = case.inputs(), case.place(case.do, "q")

    def part(x: Any, heads: int) -> Any:
        apart = x.reshape(*x.shape[:2], heads, 8)
        return np.ascontiguousarray(apart.take([1, 2], batches)[:, :, heads // 2 :])

    count = {"q": 4, "k": 2, "v": 2, "o": 4}
    whole = run(spec, inputs, do, frozenset("qkv"))
    place = {"rng": RNG, "dropout_place": np.array([1, 2, 4], np.int32)}
    small = dataclasses.replace(spec, num_heads=2, num_gqa_groups=1, placed=True)
    found = run(
        small,
        {name: part(inputs[name], count[name]) for name in "qkv"} | place,
        part(do, 4),
        frozenset("qkv"),
    )
    for name, heads in count.items():
        want = part(whole[name], heads)
        assert_same_bits(name, found[name].reshape(want.shape), want)


def meta(*shape: int, dtype: str = "float32") -> Meta:
    return Meta(shape, formats.dtype(dtype))


GOOD = {"q": meta(13, 3, 32), "k": meta(17, 3, 16), "v": meta(17, 3, 2, 8)}
DROPPED = GOOD | {"rng": meta(2, dtype="int64")}
CU = {"cu_seqlens_q": meta(4, dtype="int32"), "cu_seqlens_kv": meta(4, dtype="int32")}
TOKENS = {"q": meta(18, 32), "k": meta(30, 16), "v": meta(30, 2, 8)}
WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "window": (
        {"window_size": (-2, 0)},
        GOOD,
        ShapeError,
        r"window_size: got \(-2, 0\), expected \(left, right\)",
    ),
    "window_of_causal": (
        {"mask": "causal", "window_size": (2, 1)},
        GOOD,
        ShapeError,
        r"window_size: got \(2, 1\), expected right -1 or 0",
    ),
    "diagonal": (
        {"mask": "causal", "bottom_right_diagonal": True},
        GOOD,
        ShapeError,
        "bottom_right_diagonal: got True, expected None",
    ),
    "other_diagonal": (
        {"mask": "causal_bottom_right", "bottom_right_diagonal": False},
        GOOD,
        ShapeError,
        "bottom_right_diagonal: got",
    ),
    "negative_cap": ({"softcap": -1.0}, GOOD, ShapeError, r"softcap: got -1.0, expected 0 for no cap, or"),
    "endless_cap": ({"softcap": np.inf}, GOOD, ShapeError, "softcap: got inf"),
    "bias": ({"bias": "prescale"}, GOOD, ShapeError, "bias: got 'prescale'"),
    "softmax": (
        {"softmax_type": "off_by_one"},
        GOOD,
        ShapeError,
        "softmax_type: got 'off_by_one', expected one of vanilla, off-by-one",
    ),
    "no_mask_array": (
        {"mask": "arbitrary"},
        GOOD,
        ShapeError,
        "mask: missing, expected bool .* with mask 'arbitrary'",
    ),
    "mask_unheard": (
        {},
        GOOD | {"mask": meta(1, 1, 13, 17, dtype="uint8")},
        ShapeError,
        "mask: got shape .* None with mask 'no_mask'",
    ),
    "mask_shape": (
        {"mask": "arbitrary"},
        GOOD | {"mask": meta(2, 1, 13, 17, dtype="uint8")},
        ShapeError,
        r"mask: got shape \(2, 1, 13, 17\), expected \(3 or 1, 4 or 1, 13 or 1, 17\)",
    ),
    "mask_dtype": (
        {"mask": "arbitrary"},
        GOOD | {"mask": meta(1, 1, 13, 17)},
        FormatError,
        "mask: got float32",
    ),
    "bias_dtype": (
        {"bias": "post_scale_bias"},
        GOOD | {"bias": meta(1, 1, 13, 17, dtype="float16")},
        FormatError,
        "bias: got",
    ),
    "bias_shape": (
        {"bias": "post_scale_bias"},
        GOOD | {"bias": meta(13, 17)},
        ShapeError,
        r"bias: got shape \(13, 17\)",
    ),
    "no_slopes": ({"bias": "alibi"}, GOOD, ShapeError, "alibi_slopes: missing"),
    "slopes": (
        {"bias": "alibi"},
        GOOD | {"alibi_slopes": meta(3)},
        ShapeError,
        r"alibi_slopes: got shape \(3,\), expected \(4,\) or",
    ),
    "no_offset": ({"softmax_type": "learnable"}, GOOD, ShapeError, "softmax_offset: missing"),
    "offset_unheard": ({}, GOOD | {"softmax_offset": meta(4)}, ShapeError, "softmax_offset"),
    "placed": ({"placed": True}, GOOD, ShapeError, "placed: got True, expected False without dropout"),
    "no_place": (
        {"placed": True, "dropout": 0.1},
        DROPPED,
        ShapeError,
        r"dropout_place: missing, expected int32 \(3,\) with placed True",
    ),
    "place_unheard": (
        {"dropout": 0.1},
        DROPPED | {"dropout_place": meta(3, dtype="int32")},
        ShapeError,
        "dropout_place: got shape",
    ),
    "place_dtype": (
        {"placed": True, "dropout": 0.1},
        DROPPED | {"dropout_place": meta(3, dtype="int64")},
        FormatError,
        "dropout_place: got int64",
    ),
    "depth_of_v": (
        {"head_dim_v": 4},
        GOOD,
        ShapeError,
        r"v: got shape \(17, 3, 2, 8\), expected \(sequence, batch, 8\)",
    ),
    "thd_mask": (THD, TOKENS | CU, ShapeError, "mask: got 'no_mask', expected one of the padding masks"),
    "thd_no_lengths": (THD | {"mask": "padding"}, TOKENS, ShapeError, "cu_seqlens_q: missing"),
    "thd_no_maximum": (
        THD | {"mask": "padding", "max_seqlen_kv": 0},
        TOKENS | CU,
        ShapeError,
        "max_seqlen_kv: got 0",
    ),
    "thd_shape": (
        THD | {"mask": "padding"},
        TOKENS | CU | {"k": meta(30, 3, 16)},
        ShapeError,
        r"k: got .*\(tokens, 16\) or",
    ),
    "thd_apart": (THD | {"mask": "padding"}, TOKENS | CU | {"v": meta(31, 16)}, ShapeError, "v: got"),
    "padded_starts": (
        {"mask": "padding"},
        GOOD | CU | {"cu_seqlens_q_padded": meta(4, dtype="int32")},
        ShapeError,
        "cu_seqlens_q_padded",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_in_infer(name: str) -> None:
    changes, metas, kind, text = WRONG[name]
    with pytest.raises(kind, match=f"attention: {text}" if ":" in text else text):
        attention.infer(dataclasses.replace(PLAIN, **changes), metas, frozenset("qkv"))
