"""Which path takes an attention, in what tiles and by what strides: without a GPU."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from fp8kit import formats, slowness
from fp8kit.arrays import ArrayView, Device, contiguous_strides
from fp8kit.backends.cuda import (
    attention,
    attention_rules,
    cudnn_plans,
    cudnn_sdpa,
    flash,
    launch,
    packed_attention,
    paged_attention,
    unfused,
)
from fp8kit.backends.cuda._rows import ceil_div
from fp8kit.backends.cuda.attention_problem import ALIGN, Problem, problem
from fp8kit.backends.protocol import AttentionExtras, Lying
from fp8kit.ops.attention import AttentionSpec
from fp8kit.raw_kernels import manifest
from fp8kit.testing.attention import Rules

CUDA = Device("cuda", 0)
BATCH, ROWS, COLUMNS = 3, 40, 72
BASE = AttentionSpec(num_heads=4, head_dim=64, num_gqa_groups=2, layout="separate", mask="no_mask")


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "groups", "dtype"),
    [(40, 72, 2, "float32"), (9000, 8200, 8, "bfloat16"), (5, 200_000, 3, "float16")],
)
def test_tiles_cover_every_row_once_in_bounded_memory(
    rows: int, columns: int, groups: int, dtype: str, backward: bool
) -> None:
    about = Problem(2, 24, groups, rows, columns, 64, 64, dtype, "sbhd", 0.125, right=0)
    cut, seen = unfused.layout(about, backward), np.zeros((2, 24, rows), int)
    opened: dict[tuple[int, int], int] = {}
    for tile in unfused.tiles(about, cut):
        assert tile.rows <= cut.rows
        assert tile.groups <= cut.groups
        repeat = 24 // groups
        seen[
            tile.batch, tile.head : tile.head + tile.groups * repeat : repeat, tile.row : tile.row + tile.rows
        ] += 1
        key = (tile.batch, tile.group)
        assert tile.first == (key not in opened)
        opened[key] = opened.get(key, 0) + tile.rows
        assert tile.last == (opened[key] == repeat * rows)
    assert (seen == 1).all()
    sums = 2 * 4 * cut.groups * columns * 64 if cut.summed else 0
    assert (
        unfused.workspace(about, backward) <= unfused._LIMIT + sums + unfused.cublaslt.WORKSPACE + 8 * ALIGN
    )


@pytest.mark.parametrize(
    ("change", "backward", "reason"),
    [
        ({"dtype": "float32"}, False, "dtype float32: cuDNN takes bfloat16 and float16"),
        ({"dim": 20}, False, "head_dim 20: cuDNN takes multiples of 8 up to 256"),
        ({"dim": 264}, False, "head_dim 264: cuDNN takes multiples of 8 up to 256"),
        ({"dim_v": 12}, False, "head_dim_v 12: cuDNN takes multiples of 8 up to 256"),
        ({"bias": "alibi"}, False, "bias 'alibi': cuDNN is not used with it"),
        ({"softmax_type": "learnable"}, True, "softmax_type 'learnable': cuDNN is not used with it"),
        ({"softcap": 30.0}, False, "softcap 30.0: cuDNN is not used with it"),
        ({"masked": True}, False, "mask 'arbitrary': cuDNN is not used with a mask array"),
        (
            {"dropout": 0.1, "placed": True},
            True,
            "placed: cuDNN's dropout knows no part of a larger attention",
        ),
        ({"rows": 80, "bottom_right": True}, False, "a row that sees no column: cuDNN gives NaN for it"),
        ({"rows": 80, "left": 7}, True, "a row that sees no column: cuDNN gives NaN for it"),
        ({"rows": 80, "left": 8}, True, None),
        ({"rows": 1, "columns": 1}, True, "one row by one column: cuDNN has no backward for it"),
        ({"rows": 1, "columns": 1}, False, None),
        ({}, True, None),
        ({"strides": ((512, 64, 1024, 1), (512, 64, 1024, 1), (512, 64, 1024, 1))}, True, None),
        (
            {"strides": ((512, 64, 1024, 1), (512, 64, 1028, 1), (512, 64, 1024, 1))},
            False,
            "strides (512, 64, 1028, 1) of k: cuDNN takes multiples of 16 bytes",
        ),
    ],
)
def test_rules_known_before_asking_cudnn(change: dict[str, Any], backward: bool, reason: str | None) -> None:
    about = Problem(2, 8, 2, 40, 72, 64, 64, "bfloat16", "sbhd", 0.125, right=0)._replace(**change)
    assert cudnn_sdpa._refused(about, backward) == reason


def test_the_rules_structure_has_the_sources_layout() -> None:
    """Addresses and numbers where raw_kernels/attention.cuh reads them, in 8 bytes each."""
    about = Problem(
        2,
        6,
        3,
        40,
        72,
        64,
        64,
        "bfloat16",
        "sbhd",
        0.125,
        0.5,
        True,
        True,
        7,
        0,
        True,
        "pre_scale_bias",
        "learnable",
        placed=True,
        softcap=2.5,
        tokens=(31, 41),
    )

    def view(ptr: int, *shape: int) -> ArrayView:
        return ArrayView(ptr, shape, formats.float32, CUDA)

    extras = AttentionExtras(
        view(1, 3),
        view(2, 3),
        view(3, 2),
        view(4, 2, 1, 40, 72),
        view(5, 1, 6, 1, 72),
        view(6, 2, 6),
        view(7, 6),
        view(8, 3),
    )
    lying = Lying(view(9, 3), view(10, 3), 40, 72)
    words = np.frombuffer(attention_rules.pack(about, extras, lying), np.int64)
    doubles = words.view(np.float64)
    assert words[:10].tolist() == [1, 2, 4, 40 * 72, 0, 72, 5, 0, 72, 0]
    assert words[11:18].tolist() == [6, 6, 7, 1, 7, 0, 1]
    assert words[19:21].tolist() == [3, 2**31]
    assert [*words[22:30].tolist(), words[31]] == [8, 6, 40, 72, 9, 10, 31, 41, 1]
    assert [doubles[i] for i in (10, 18, 21, 30)] == [0.125, 0.125, 2.0, 2.5]
    header = (manifest.FOLDER / "attention.cuh").read_text().partition("struct Rules {")[2].partition("};")[0]
    declared = ",".join(line.partition("//")[0].strip(" ;") for line in header.splitlines())
    names = [name.split()[-1].strip("*") for name in declared.split(",") if name]
    assert " ".join(names) == (
        "cu_q cu_kv mask mask_batch mask_head mask_row bias bias_batch bias_head bias_row bias_factor slopes "
        "slopes_batch offset sink left right bottom_right scale rng threshold inverse_keep dropout_place "
        "heads s_q s_kv starts_q starts_kv tokens_q tokens_kv softcap bias_capped"
    )


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        (dataclasses.replace(BASE, mask="causal"), (-1, 0, False)),
        (dataclasses.replace(BASE, mask="causal_bottom_right"), (-1, 0, True)),
        (BASE, (-1, -1, False)),  # the diagonal matters to nobody
        (dataclasses.replace(BASE, window_size=(3, 4)), (3, 4, True)),
        (dataclasses.replace(BASE, bias="alibi"), (-1, -1, True)),
    ],
)
def test_a_problem_says_where_the_diagonal_lies_only_where_it_matters(
    spec: AttentionSpec, wanted: tuple[int, int, bool]
) -> None:
    shape, other = (ROWS, BATCH, 4, 64), (COLUMNS, BATCH, 2, 64)
    about = problem(shape, other, other, formats.bfloat16, spec)
    assert (about.left, about.right, about.bottom_right) == wanted
    square = problem(shape, shape, shape, formats.bfloat16, spec)
    assert not square.bottom_right
    assert problem(
        shape, shape, shape, formats.bfloat16, dataclasses.replace(spec, mask="padding_causal_bottom_right")
    ).bottom_right


def test_cudnn_is_asked_for_the_strides_that_come() -> None:
    """Interleaved heads: from head to head 3 * 64, from token to token 8 * 3 * 64; o, and what is copied, are
    C-contiguous."""
    spec = AttentionSpec(num_heads=8, head_dim=64, layout="qkv_interleaved", mask="padding_causal")
    shape, steps = (ROWS, BATCH, 8, 64), (BATCH * 1536, 1536, 192, 1)
    about = problem(shape, shape, shape, formats.bfloat16, spec, (steps,) * 3)
    mixed, plain = (1536, 192, BATCH * 1536, 1), (512, 64, BATCH * 512, 1)
    assert cudnn_sdpa._asked_key(about._replace(zero_padded=True), True, True, 0).strides == (
        mixed,
        mixed,
        mixed,
        plain,
        plain,
        mixed,
        mixed,
        mixed,
    )
    assert cudnn_sdpa._asked_key(about, True, True, 0).strides == (
        plain,
        plain,
        plain,
        plain,
        plain,
        mixed,
        mixed,
        mixed,
    )
    assert cudnn_sdpa._asked_key(about, False, True, 0).strides == (mixed, plain, plain, plain)


def test_memory_for_copies_is_wanted_only_where_padding_may_hold_anything() -> None:
    about = Problem(2, 8, 2, 40, 72, 64, 32, "bfloat16", "sbhd", 0.125, padded=True)
    lengths, stats, q, k, v, d_o = (
        256,
        4 * 2 * 8 * 40,
        2 * 2 * 8 * 40 * 64,
        2 * 2 * 2 * 72 * 64,
        2 * 2 * 2 * 72 * 32,
        2 * 2 * 8 * 40 * 32,
    )
    assert cudnn_sdpa._workspace_layout(about, False) == {
        "lengths": 0,
        "k": lengths,
        "v": lengths + k,
        "end": lengths + k + v,
    }
    assert cudnn_sdpa._workspace_layout(about, True)["end"] == lengths + stats + q + k + v + d_o
    assert cudnn_sdpa._workspace_layout(about._replace(zero_padded=True), True)["end"] == lengths + stats
    assert cudnn_sdpa._workspace_layout(about._replace(padded=False), True) == {"end": 0}
    whole, spared = unfused.workspace(about, True), unfused.workspace(about._replace(zero_padded=True), True)
    # one batch, and one query head of each of the two key heads at a time
    assert whole - spared == q // 8 + k // 2 + d_o // 8


def test_flash_reads_the_problem_as_its_sources_declare_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The structures' words, and grids, of forward and backward."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(flash.launch, "kernel", lambda *names, **defines: (names[1], defines))
    monkeypatch.setattr(flash.launch, "launch", lambda *call: calls.append(call))

    def view(ptr: int, heads: int) -> ArrayView:
        return ArrayView(ptr, (40, 2, heads, 64), formats.bfloat16, CUDA)

    q, k, v, o, do, dq, dk, dv = (view(16 * (i + 1), h) for i, h in enumerate((8, 2, 2, 8, 8, 8, 2, 2)))
    lse = ArrayView(256, (2, 8, 40), formats.float32, CUDA)
    scratch, extras = ArrayView(512, (10**4,), formats.uint8, CUDA), AttentionExtras(rng=view(1024, 1))
    about = problem(q.shape, k.shape, v.shape, q.dtype, Rules(dropout=0.5))
    flash.forward(about, q, k, v, o, lse, extras, None, 0)
    flash.backward(about, do, q, k, v, o, lse, dq, dk, dv, None, extras, scratch, 0)
    words = [np.frombuffer(call[3][0], np.int64).tolist() for call in calls]
    queries, keys = [512, 64, 1024], [128, 64, 256]  # batch, head and row

    def arrays(*numbers: int) -> list[int]:
        return [word for i in numbers for word in (16 * (i + 1), *(keys if i in (1, 2, 6, 7) else queries))]

    assert words[0][:21] == [*arrays(0, 1, 2, 3), 256, 4, 64, 64, 1]
    for found, tiles in zip(words[1:], (0, 1, 1), strict=True):
        assert found[:39] == [*arrays(4, 0, 1, 2, 3, 5, 6, 7), 256, 512, 2, 4, 64, 64, tiles]
    rules = attention_rules.pack(about, extras)
    assert all(call[3][0].endswith(rules) for call in calls[1:])
    assert calls[0][3][0].endswith(rules + bytes(32))  # no pages
    names = ["flash_fwd", "flash_bwd_dot", "flash_bwd_keys", "flash_bwd_queries"]
    assert [call[0][0] for call in calls] == names
    assert [call[1] for call in calls] == [2 * 8, ceil_div(2 * 8 * 40, 8), 2 * 2, 2 * 8]
    defines = {"T": "bf16", "D": "64", "DV": "64", "KIND": "1"}
    assert [call[0][1] for call in calls] == [defines | {"PAGED": "0"}, *[defines] * 3]
    for name, struct, fields in (
        ("flash_fwd.cu", "Forward", "q k v o lse repeat dim dim_v tiles rules pages"),
        ("flash_bwd.cu", "Backward", "d_o q k v o dq dk dv lse dot batches repeat dim dim_v tiles rules"),
    ):
        body = manifest.text(name).partition(f"struct {struct} {{")[2].partition("};")[0]
        declared = ",".join(line.partition("//")[0].strip(" ;") for line in body.splitlines())
        assert " ".join(part.split()[-1].strip("*") for part in declared.split(",") if part) == fields


def test_flash_reads_pages_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache's pages take the place of batches, whatever the order of q's dimensions; no page is copied."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(flash.launch, "kernel", lambda *names, **defines: (names[1], defines))
    monkeypatch.setattr(flash.launch, "launch", lambda *call: calls.append(call))

    def view(ptr: int, *shape: int, dtype: formats.DType = formats.bfloat16) -> ArrayView:
        return ArrayView(ptr, shape, dtype, CUDA)

    q, o = view(16, 5, 3, 8, 64), view(32, 5, 3, 8, 64)
    caches = view(48, 11, 7, 2, 64), view(64, 11, 7, 2, 64)
    lse, table = (view(256, 3, 8, 5, dtype=formats.float32), view(512, 3, 6, dtype=formats.int32))
    lengths = view(1024, 4, dtype=formats.int32)
    about = Rules(padded=True, window=(-1, 0), bottom_right=True)
    given = AttentionExtras(lengths, lengths), about, None, 0
    paged_attention.paged_attention_fwd(q, *caches, o, lse, table, 40, *given)
    ((kernel, grid, _, (job,), _, shared),) = calls
    words = np.frombuffer(job, np.int64).tolist()
    queries, pages = [512, 64, 1536], [7 * 128, 64, 128]
    assert words[:21] == [16, *queries, 48, *pages, 64, *pages, 32, *queries, 256, 4, 64, 64, 1]
    assert words[-4:] == [512, 11, 6, 7]
    assert kernel == ("flash_fwd", {"T": "bf16", "D": "64", "DV": "64", "KIND": "0", "PAGED": "1"})
    assert (grid, shared) == (3 * 8, 2 * (64 * 64 + 2 * 64 * 128))
    body = manifest.text("flash_fwd.cu").partition("struct Pages {")[2].partition("};")[0]
    assert [line.strip() for line in body.splitlines() if line.endswith(";")][:2] == [
        "const i32* table;",
        "i64 count, width, size;",
    ]


@pytest.mark.parametrize("rows", [1, 128, 129])
def test_many_new_tokens_of_long_sequences_are_cudnns(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "is_cudnns", lambda *asked: True)
    monkeypatch.setattr(attention, "attention_workspace", lambda *asked: 1000)
    shapes = (2, rows, 8, 64), (40, 16, 2, 64), (40, 16, 2, 64)
    about = Rules(padded=True, qkv_format="bshd")
    strides = tuple(map(contiguous_strides, shapes))
    nbytes = paged_attention.paged_attention_workspace(*shapes, 300, formats.bfloat16, about, strides)
    assert nbytes == (0 if rows <= 128 else 2 * (2 * 300 * 2 * 64 * 2) + 1000)


@pytest.mark.parametrize(
    ("change", "dbias", "reason"),
    [
        ({}, False, None),
        ({"masked": True, "bias": "alibi", "softmax_type": "learnable", "dropout": 0.1}, False, None),
        ({"dim": 192, "dim_v": 128}, False, None),
        ({"dtype": "float32"}, False, "dtype float32: tensor cores take bfloat16 and float16"),
        ({"dim": 20}, False, "head_dim 20: multiples of 8 up to 256"),
        ({"dim_v": 264}, False, "head_dim_v 264: multiples of 8 up to 256"),
        (
            {"bias": "pre_scale_bias"},
            True,
            "bias 'pre_scale_bias' with a gradient: only the unfused path makes it",
        ),
        ({"columns": 2**28}, False, f"a sequence of {2**28}, or so many tokens: less than 2^28"),
        (
            {"strides": ((512, 64, 1024, 1), (512, 64, 1028, 1), (512, 64, 1024, 1))},
            False,
            "strides (512, 64, 1028, 1) of k: multiples of 16 bytes",
        ),
    ],
)
def test_what_flash_does_not_take(change: dict[str, Any], dbias: bool, reason: str | None) -> None:
    about = Problem(2, 8, 2, 40, 72, 64, 64, "bfloat16", "sbhd", 0.125, right=0)._replace(**change)
    assert flash.why_not(about, dbias) == reason


@pytest.mark.parametrize(("change", "kind"), [({}, "0"), ({"dropout": 0.5}, "2"), ({"bias": "alibi"}, "2")])
def test_a_cap_is_flashs(change: dict[str, Any], kind: str) -> None:
    """Neither cuDNN's nor Hopper's, at any size; by kernels of their own."""
    about = Problem(2, 8, 2, 8192, 8192, 128, 128, "bfloat16", "sbhd", 0.125, right=0)._replace(**change)
    capped = about._replace(softcap=50.0)
    assert flash.why_not(capped) is None
    assert "softcap 50.0: cuDNN is not used with it" in str(cudnn_sdpa._refused(capped, False))
    assert "softcap 50.0" in flash.kernels(capped, 0)
    found = flash._shape(capped)
    assert found.defines == {"T": "bf16", "D": "128", "DV": "128", "KIND": kind, "CAP": "1"}
    assert tuple(sorted(found.defines.items())) in manifest.source("flash_bwd.cu").variants
    assert tuple(sorted(found.forward_defines.items())) in manifest.source("flash_fwd.cu").variants
    assert "CAP" not in flash._shape(about).defines
    slowness.forget()
    for about in (capped._replace(rows=64), capped, capped):
        attention._say_slow(flash, about, False, 0)
    assert [said.cause for said in slowness.said()] == ["attention with a softcap"]


def test_every_head_size_has_kernels() -> None:
    compiled = {
        tuple(int(dict(v)[key]) for key in ("D", "DV")) for v in manifest.source("flash_fwd.cu").variants
    }
    assert compiled == set(flash._COMPILED)
    for dim in range(8, 257, 8):
        for dim_v in range(8, 257, 8):
            about = flash.shape(dim, dim_v, "bfloat16", 0)
            assert (about.d, about.d_v) in compiled
            assert dim <= about.d
            assert dim_v <= about.d_v
            assert max(about.forward, about.backward) <= 96 * 1024  # what every device from 8.9 on has


def test_cudnn_builds_graphs_for_few_problems_of_middle_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training with ever other lengths builds some graphs, and then none; large problems have one."""
    built: list[int] = []

    def build(about: Problem, backward: bool, deterministic: bool, device: int | None) -> str | None:
        if device is not None:
            built.append(about.rows)
        return None

    monkeypatch.setattr(cudnn_sdpa, "why_not", build)
    monkeypatch.setattr(launch, "capability", lambda device: (8, 0))
    attention.forget()
    try:
        middle = [_square(rows) for rows in range(1024, 1024 + 8 * 40, 8)]
        paths = [attention._path(about, False, False, 0, False, True) for about in middle]
        assert paths == [cudnn_sdpa] * 2 + [flash] * (len(middle) - 2)
        assert built == [about.rows for about in middle[:2]]
        # what the process did before changes nothing where that is asked for
        every = [attention._path(about, False, False, 0, False, False) for about in reversed(middle)]
        assert every == [cudnn_sdpa] * len(middle)
        assert [attention._path(about, True, False, 0, False, True) for about in middle] == paths
        assert attention._path(_square(8192), False, False, 0, False, True) is cudnn_sdpa
        assert attention._path(_square(64), False, False, 0, False, True) is flash
        assert (
            attention._path(_square(8192)._replace(dim=20), False, False, 0, False, True) is cudnn_sdpa
        )  # if it takes it
    finally:
        attention.forget()


def test_graphs_that_run_often_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program with a few lengths has cuDNN's kernels for all of them."""
    monkeypatch.setattr(launch, "capability", lambda device: (8, 0))
    monkeypatch.setattr(cudnn_sdpa, "why_not", lambda *about: None)
    monkeypatch.setattr(cudnn_plans, "launches", launches := collections.Counter())
    attention.forget()
    try:
        paths = []
        for rows in range(1024, 1024 + 8 * 8, 8):
            paths.append(attention._path(_square(rows), False, False, 0, False, True))
            launches[0] += attention._PROOF if rows > 1024 else 2
        assert paths == [cudnn_sdpa] * attention._GRAPHS[False][1] + [flash] * 4
    finally:
        attention.forget()


def test_hopper_builds_no_graph_for_problems_of_middle_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels for Hopper take is cuDNN's only where it is large, and its heads wide and rows long, or
    not causal; whether choices are timed or not."""
    monkeypatch.setattr(cudnn_sdpa, "why_not", lambda *about: None)
    monkeypatch.setattr(launch, "capability", lambda device: (9, 0))
    attention.forget()
    try:
        choose = functools.partial(attention._path, backward=True, deterministic=False, device=0, dbias=False)
        middle = _square(1024)
        assert choose(middle, timed=True) is flash
        assert attention._foreseen(middle, True, False, 0) == attention._AS_FAST
        assert not attention._taken
        assert choose(middle, timed=False) is flash
        wide = {"batch": 8, "dim": 128, "dim_v": 128}
        short = _square(1024)._replace(batch=64)  # whose forward alone is faster by cuDNN
        large = [_square(8192), *(_square(n)._replace(**wide) for n in (2048, 2056)), short, _square(32768)]
        large += [large[0]._replace(right=-1), large[0]._replace(rows=4096)]  # not causal; not square
        assert all(attention._multiply_adds(about) >= attention._LARGE for about in large)
        for timed in (True, False):
            assert [choose(about, timed=timed) for about in large] == [flash] * 2 + [cudnn_sdpa] * 5
        # not by those kernels: heads of other sizes, dropout, padding
        for change in ({"dim": 96, "dim_v": 96}, {"dropout": 0.1}):
            assert choose(middle._replace(**change), timed=True) is cudnn_sdpa
        assert attention._foreseen(middle._replace(padded=True), True, False, 0) == attention._NO_GRAPH
        # nor what no kernels of ours take, which is foreseen without a graph
        for change in ({"dim": 512, "dim_v": 512}, {"dtype": "float32"}):
            assert attention._foreseen(middle._replace(**change), True, False, 0) == attention._NO_GRAPH
        assert "head_dim 512" in flash.kernels(middle._replace(dim=512), 0)
        row = 4, 4096, 64, 1
        repeated = middle._replace(strides=(row, (0, *row[1:]), row))
        assert [flash.on_hopper(one, 0) for one in (middle, repeated)] == [True, False]
    finally:
        attention.forget()


def test_large_problems_of_ever_other_lengths_take_no_graph_from_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many lengths come, and however often graphs run, no more are built than are kept."""
    monkeypatch.setattr(launch, "capability", lambda device: (8, 0))
    monkeypatch.setattr(cudnn_sdpa, "why_not", lambda *about: None)
    monkeypatch.setattr(cudnn_plans, "launches", launches := collections.Counter())
    attention.forget()
    try:
        large = [_square(rows) for rows in range(8192, 8192 + 8 * 1000, 8)]
        at_once, most = attention._GRAPHS[True]
        choose = functools.partial(
            attention._path, backward=False, deterministic=False, device=0, dbias=False
        )
        assert [choose(about, timed=True) for about in large[:100]] == (
            [cudnn_sdpa] * at_once + [flash] * (100 - at_once)
        )
        for about in large[100:]:
            launches[0] += attention._PROOF
            choose(about, timed=True)
        paths = [choose(about, timed=True) for about in large]
        assert paths.count(cudnn_sdpa) == most
        assert 2 * sum(most for _, most in attention._GRAPHS.values()) <= cudnn_plans.KEPT
        assert {choose(about, timed=False) for about in large[:100]} == {cudnn_sdpa}
        without = functools.partial(choose, timed=True, library=False)
        assert {without(about) for about in large[:9]} == {flash}
        assert without(_square(8192)._replace(dim=20)) is unfused
    finally:
        attention.forget()


def test_packed_sequences_keep_their_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large ones are padded for cuDNN where it has a graph for them, and else stay where they lie, in each
    of a call's steps."""
    monkeypatch.setattr(cudnn_sdpa, "why_not", lambda *about: None)
    monkeypatch.setattr(cudnn_plans, "missing", lambda: None)
    attention.forget()
    try:
        spec = AttentionSpec(num_heads=32, head_dim=128, qkv_format="thd", mask="padding_causal")

        def calls() -> list[packed_attention._PackedProblem]:
            sizes = [(4, rows, rows) for rows in range(4096, 4096 + 8 * 40, 8)]
            shape = (16000, 32, 128)
            return [packed_attention._call(*[shape] * 3, one, formats.bfloat16, spec, ()) for one in sizes]

        first = [call.in_place(False, 0) for call in calls()]
        at_once = attention._GRAPHS[True][0]
        assert first == [False] * at_once + [True] * (40 - at_once)
        assert [call.in_place(False, 0) for call in calls()] == first
        assert [call.still_timed(0) for call in calls()] == first  # who has a graph keeps it
        assert not any(call.in_place(False, None) for call in calls())  # deterministic
    finally:
        attention.forget()


def _square(rows: int) -> Problem:
    return Problem(4, 16, 16, rows, rows, 64, 64, "bfloat16", "sbhd", 0.125, right=0)
