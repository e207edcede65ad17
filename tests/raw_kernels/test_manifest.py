"""The manifest reads functions, variants, headers and parameters from the sources themselves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fp8kit.raw_kernels import manifest

KERNEL = 'extern "C" __global__ void {}({}) {{}}\n'


def test_variants_are_a_union_of_products(sources: Path) -> None:
    head = "// functions: f\n// variants: T=f32,bf16; FORMAT=e4m3,e5m2\n// variants: T=f16\n"
    (sources / "a.cu").write_text(head + KERNEL.format("f", "i64 n"))
    variants = manifest.source("a.cu").variants
    assert len(variants) == 5
    assert manifest.defines(T="bf16", FORMAT="e5m2") in variants
    assert manifest.defines(T="f16") in variants


def test_one_list_may_set_several_defines(sources: Path) -> None:
    head = "// functions: f\n// variants: T=f32,bf16; A B=1 2,3 4\n"
    (sources / "a.cu").write_text(head + KERNEL.format("f", ""))
    found = set(manifest.source("a.cu").variants)
    assert found == {manifest.defines(T=t, A=a, B=b) for t in ("f32", "bf16") for a, b in ("12", "34")}


def test_spills_may_be_those_of_some_architectures(sources: Path) -> None:
    head = "// functions: f\n// spills: 96 bytes on sm_90a, sm_100a, where it is full\n// spills: 16\n"
    (sources / "a.cu").write_text(head + KERNEL.format("f", ""))
    found = manifest.source("a.cu")
    assert [found.may_spill(arch) for arch in ("sm_90a", "sm_100a", "sm_80")] == [96, 96, 16]


def test_variants_are_asked_for_by_a_text(sources: Path) -> None:
    head = "// functions: f\n// variants: T=f32,bf16; N=0,128\n"
    (sources / "a.cu").write_text(head + KERNEL.format("f", "i64 n"))
    entry = manifest.source("a.cu")
    copy = manifest.foreign("int WIDTH;" + KERNEL.format("f", "i64 n"), "b.cu")

    def made(text: str, unit: manifest.Unit | None = None) -> list[str]:
        return sorted(map(manifest.said, manifest.asked(text, entry, unit).all_of(entry.variants)))

    assert len(made("")) == 4
    assert made("T=f32") == ["N=0,T=f32", "N=128,T=f32"]
    assert made("N=128:64, T=bf16") == ["N=64,T=bf16"]
    assert made("N=64", copy) == ["N=64,T=bf16", "N=64,T=f32"]  # each once
    assert made("WIDTH=3,N=0,T=f32", copy) == ["N=0,T=f32,WIDTH=3"]
    for text, unit in (("N=64", None), ("WIDTH=3", None), ("N=64:32", copy), ("HEIGHT=3", copy), ("N", copy)):
        with pytest.raises(ValueError, match=r"^defines of a\.cu, such as N=0,T=f32"):
            manifest.asked(text, entry, unit)


def test_words_are_those_that_a_head_lists(sources: Path) -> None:
    """A number may be another than those of the source; a word, such as a dtype, is a mistake, but where the
    text's own head has it."""
    head = "// functions: f\n// variants: T=f32,bf16; N=0,128\n"
    (sources / "a.cu").write_text(head + KERNEL.format("f", "i64 n"))
    entry = manifest.source("a.cu")
    copy = manifest.foreign(head + KERNEL.format("f", "i64 n"), "b.cu")
    for text in ("T=bf17", "T=f32:bf17", "T=64", "N=0,T=bf17"):
        for unit in (None, copy):
            with pytest.raises(ValueError, match=r"^T to be one of f32, bf16, which the source lists$"):
                manifest.asked(text, entry, unit)
    further = manifest.foreign(head.replace("bf16", "bf16,f16") + KERNEL.format("f", "i64 n"), "c.cu")
    found = manifest.asked("T=f16,N=48", entry, further).all_of(entry.variants)
    assert sorted(map(manifest.said, found)) == ["N=48,T=f16"]


def test_parameters_are_read_from_the_code(sources: Path) -> None:
    declared = (
        "const float* x, u8 *q, i64 n, // a remark, with a comma\n f64 p, __grid_constant__ const Table t"
    )
    code = KERNEL.format("__launch_bounds__(128) f", declared)
    (sources / "a.cu").write_text("// functions: f, g\n" + code + KERNEL.format("g", ""))
    found = manifest.source("a.cu")
    assert found.parameters == {"f": "qqqds", "g": ""}
    assert found.variants == ((),)


def test_headers_are_found_through_headers(sources: Path) -> None:
    (sources / "a.cu").write_text('#include "b.cuh"\n')
    (sources / "b.cuh").write_text('#include "c.cuh"\n')
    (sources / "c.cuh").write_text("")
    assert manifest.headers("a.cu") == ("b.cuh", "c.cuh")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("// functions: f\n", "defines"),
        ("// functions: f\n" + KERNEL.format("f", "float p"), None),
        ("// functions: f\n" + KERNEL.format("f", "float p, i64 n"), "neither a pointer"),
        ("// functions: f\n// variants: T\n" + KERNEL.format("f", ""), "is not KEY=value"),
        ("// functions: f\n// variants: A B=1 2,3\n" + KERNEL.format("f", ""), "KEY KEY=value value"),
        ("// functions: f\n// variants: T=a,a\n" + KERNEL.format("f", ""), "lists a variant twice"),
    ],
)
def test_contradictions_are_refused(sources: Path, text: str, said: str | None) -> None:
    (sources / "a.cu").write_text(text)
    # a lone scalar of another type cannot be told from a structure; its size would be refused by the driver
    if said is None:
        assert manifest.source("a.cu").parameters == {"f": "s"}
        return
    with pytest.raises(ValueError, match=said):
        manifest.source("a.cu")


EARLY = {
    "{ start_early(); }": True,
    "\n{\n  start_early();\n  x[0] = 1;\n}": True,
    "\n{\n  let_next_start();\n  wait_for_former();\n}": True,
    "{\n  let_next_start();\n  if (threadIdx.x == 0) {\n    n = 0;\n  }\n  wait_for_former();\n}": True,
    "{ let_next_start(); wait_for_former(); }": False,
    "{\n  let_next_start();\n  // wait_for_former();\n}": False,
    "{\n  let_next_start();\n  if (n == 0) return;\n  wait_for_former();\n}": False,
    "{\n  let_next_start();\n  if (n == 0) wait_for_former();\n}": False,
    "{\n  let_next_start();\n  if (n == 0)\n    wait_for_former();\n}": False,
    "{\n  let_next_start();\n#if 0\n  wait_for_former();\n#endif\n}": False,
    "{ if (n == 0) return;\n  let_next_start();\n  wait_for_former();\n}": False,
    "{\n  let_next_start();\n}\nDEVICE void g() {\n  wait_for_former();\n}": False,
    "{ let_next_start(); x[0] = 1; }\nDEVICE void g() {\n  wait_for_former();\n}": False,
    "{ const T first = x[0]; start_early(); }": False,
    "{ if (n == 0) return; start_early(); }": False,
    "{\n#if __CUDA_ARCH__ > 1000\n  start_early();\n#endif\n}": False,
    "{ /* no start_early(); */ }": False,
    "{}": False,
}


@pytest.mark.parametrize("body", EARLY)
def test_only_what_waits_before_all_else_starts_early(sources: Path, body: str) -> None:
    text = KERNEL.format("g", "T* x, i64 n").replace("{}", body)
    for pointer, early in (("T* x", EARLY[body]), ("const T* __restrict__ x", False)):
        (sources / "a.cu").write_text(
            "// functions: f, g, h\n"
            + KERNEL.format("f", "i64 n")
            + text.replace("T* x", pointer, 1)
            + KERNEL.format("h", "i64 n")
        )
        manifest.source.cache_clear()
        assert manifest.source("a.cu").early == ({"g"} if early else set())


def test_every_wait_of_the_sources_counts() -> None:
    for entry in manifest.sources():
        waits = re.findall(r"\b(?:start_early|wait_for_former)\(\);", manifest.text(entry.name))
        assert len(entry.early) == len(waits), entry.name
