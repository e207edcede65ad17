"""The manifest reads functions, variants, headers and parameters from the sources themselves."""

from __future__ import annotations

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


def test_parameters_are_read_from_the_code(sources: Path) -> None:
    declared = "const float* x, u8 *q, i64 n, // a remark, with a comma\n f64 p, __grid_constant__ const Table t"
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
        ("// functions: f\n// variants: T=a,a\n" + KERNEL.format("f", ""), "must not repeat"),
    ],
)
def test_contradictions_are_refused(sources: Path, text: str, said: str | None) -> None:
    (sources / "a.cu").write_text(text)
    if said is None:  # a lone scalar of another type cannot be told from a structure; its size would be refused by the driver
        assert manifest.source("a.cu").parameters == {"f": "s"}
        return
    with pytest.raises(ValueError, match=said):
        manifest.source("a.cu")


def test_functions_that_start_early_are_known(sources: Path) -> None:
    waits = KERNEL.format("g", "i64 n").replace("{}", "{ start_early(); }")
    (sources / "a.cu").write_text("// functions: f, g, h\n" + KERNEL.format("f", "i64 n") + waits + KERNEL.format("h", "i64 n"))
    assert manifest.source("a.cu").early == {"g"}


@pytest.mark.parametrize("entry", [entry for entry in manifest.sources() if entry.early], ids=lambda entry: entry.name)
def test_what_starts_early_waits_before_all_else(entry: manifest.Source) -> None:
    """And reads nothing by a pointer whose loads the compiler may do before."""
    text = manifest.text(entry.name)
    for function in entry.early:
        body = text[text.index(f"{function}(") :]
        head, body = body.split(") {\n", 1)
        assert body.lstrip().startswith("start_early();"), function
        assert "__restrict__" not in head, function
