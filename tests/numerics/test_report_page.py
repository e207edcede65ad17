"""The page in a real browser, at the size of a laptop's screen (``make test-report``)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8kit.numerics import report
from fp8kit.numerics.run_folder import read
from tests.support import run_folder
from tests.support.browser import Browser, browser, missing

pytestmark = pytest.mark.report

WIDTH, HEIGHT = 1366, 768
SECTIONS = ("losses", "breaks", "maps", "exponents", "settings")
SMALLEST = 11  # px of a letter
CONTRAST = 4.5  # of text, WCAG 2.1, 1.4.3

# how many colours the pixels of a canvas have that are not transparent
COLOURS = """
const canvas = document.getElementById(arguments[0]);
const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
const pixels = new Uint32Array(data.buffer);
return new Set(pixels.filter((pixel) => pixel >>> 24 === 255)).size;
"""
PLACE = """
const box = document.querySelector(arguments[0]).getBoundingClientRect();
return [box.x, box.y, box.width, box.height];
"""
# (text, contrast to what it stands on, size of its letters) of every visible text outside of pictures
TEXTS = """
const channel = (v) => { v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
const parse = (text) => text.match(/[\\d.]+/g).map(Number);
const light = (rgb) => 0.2126 * channel(rgb[0]) + 0.7152 * channel(rgb[1]) + 0.0722 * channel(rgb[2]);
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const parent = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || !parent.checkVisibility() || parent.closest("script")) continue;
  let back = parent;
  while (back && parse(getComputedStyle(back).backgroundColor)[3] === 0) back = back.parentElement;
  const style = getComputedStyle(parent), svg = parent.closest("svg");
  const ink = parse(svg ? style.fill : style.color);
  const ground = parse(getComputedStyle(back || document.body).backgroundColor);
  const [one, other] = [light(ink), light(ground)].sort((a, b) => b - a);
  const text = walker.currentNode.data.trim().slice(0, 60);
  found.push([text, (one + 0.05) / (other + 0.05), parseFloat(style.fontSize)]);
}
return found;
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a real run, in a folder where nothing else is."""
    run = run_folder.write(tmp_path_factory.mktemp("run"), steps=12)
    alone = tmp_path_factory.mktemp("page") / "report.html"
    alone.write_text(report.page(report.digest(read(run))))
    shutil.rmtree(run)
    return alone


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert not missing(), f"not installed: {missing()}; apt-get install chromium chromium-driver"
    with browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture(params=[False, True], ids=["light", "dark"])
def opened(request: pytest.FixtureRequest, window: Browser, page: Path) -> Browser:
    """The page, just loaded, in both colours."""
    window.size(WIDTH, HEIGHT, dark=request.param)
    window.blank()
    window.open(page)
    return window


def show(window: Browser, section: str) -> None:
    window.run(
        "document.documentElement.style.scrollBehavior = 'auto';"
        "document.getElementById(arguments[0]).scrollIntoView();",
        section,
    )


def centre(window: Browser, selector: str, right: float = 0.5, down: float = 0.5) -> tuple[int, int]:
    x, y, width, height = window.run(PLACE, selector)
    return round(x + right * width), round(y + down * height)


def tip(window: Browser) -> str:
    found: str = window.run(
        "const tip = document.getElementById('tip'); return tip.hidden ? '' : tip.innerText;"
    )
    return found


def test_nothing_is_asked_for_and_nothing_fails(opened: Browser, page: Path) -> None:
    for section in SECTIONS:
        show(opened, section)
    assert opened.requests() == [page.as_uri()]
    assert opened.log("browser") == []


def test_every_picture_has_content(opened: Browser) -> None:
    assert opened.run("return document.querySelectorAll('canvas').length") == 4
    for i, least in enumerate((2, 2, 20, 20)):  # underflow and overflow may have few values, or one
        assert opened.run(COLOURS, f"map-{i}") >= least, i
    for name, wanted in (("loss", "path"), ("gap", "path"), ("time", "path"), ("histogram", "rect")):
        marks = opened.run(
            "return [...document.querySelectorAll(arguments[0])].filter(e => e.getBBox().width > 0).length",
            f"#{name}-chart {wanted}",
        )
        assert marks >= (5 if wanted == "rect" else 1), name
    lines = opened.run("return [...document.querySelectorAll('.format-range')].map(e => e.x1.baseVal.value)")
    assert len(lines) == 2
    assert lines[0] < lines[1]
    for name, least in (("loss", 2), ("breaks", 8)):
        rows = f"return document.querySelectorAll('#{name}-table tbody tr').length"
        assert opened.run(rows) >= least, name


def test_it_fits_a_laptop_and_can_be_read(opened: Browser) -> None:
    wide, visible = opened.run("return [document.documentElement.scrollWidth, innerWidth]")
    assert visible == WIDTH
    assert wide <= WIDTH
    texts = opened.run(TEXTS)
    assert len(texts) > 100
    small = [text for text in texts if text[2] < SMALLEST]
    pale = [text for text in texts if text[1] < CONTRAST]
    assert not small
    assert not pale
    for section in SECTIONS[2:4]:  # those with pictures that are looked at together
        height = opened.run("return document.getElementById(arguments[0]).offsetHeight", section)
        assert height <= HEIGHT - 50, section


def test_values_show_under_the_mouse(opened: Browser) -> None:
    show(opened, "maps")
    opened.move(*centre(opened, "#map-2"))
    said = tip(opened).splitlines()
    assert said[0].startswith("layers.")
    assert said[1].startswith("activation, step ")
    assert said[2].startswith("SQNR, dB: ")
    assert 20 < float(said[2].split(": ")[1]) < 40
    show(opened, "losses")
    opened.move(*centre(opened, "#loss-chart"))
    said = tip(opened).splitlines()
    assert [line.split(":")[0] for line in said[1:]] == ["float32", "current"]
    assert all(3 < float(line.split(": ")[1]) < 6 for line in said[1:])
    opened.move(5, 5)
    assert tip(opened) == ""


def choose(window: Browser, name: str, value: str) -> None:
    window.run(
        "const select = document.getElementById(arguments[0]); select.value = arguments[1];"
        "select.dispatchEvent(new Event('change'));",
        name,
        value,
    )


def picture(window: Browser, selector: str) -> Any:
    """What is drawn, as text."""
    return window.run(
        "const e = document.querySelector(arguments[0]); return e.toDataURL ? e.toDataURL() : e.innerHTML;",
        selector,
    )


def test_tensor_layer_statistic_and_step_can_be_chosen(opened: Browser) -> None:
    before = picture(opened, "#map-3")
    choose(opened, "tensor", "gradient")
    assert picture(opened, "#map-3") != before
    for name, value, selector in (
        ("layer", "layers.1.layernorm_mlp.fc2", "#histogram-chart"),
        ("histogram", "gradient exponents", "#histogram-chart"),
        ("range", "nvfp4", "#histogram-chart"),
        ("stat", "cur_amax", "#time-chart"),
    ):
        before = picture(opened, selector)
        choose(opened, name, value)
        assert picture(opened, selector) != before, name
    said = opened.run("return document.getElementById('histogram-said').innerText")
    assert "E2M1's smallest and largest magnitude" in said
    before = picture(opened, "#histogram-chart")
    opened.run("const s = document.getElementById('step'); s.value = 0; s.dispatchEvent(new Event('input'));")
    assert picture(opened, "#histogram-chart") != before
    assert opened.run("return document.getElementById('step-said').value") == "0"
    assert opened.log("browser") == []


def test_a_click_on_a_map_shows_the_layer(opened: Browser) -> None:
    show(opened, "maps")
    opened.run("document.documentElement.style.scrollBehavior = 'auto'")
    opened.click(*centre(opened, "#map-2", 0.9, 0.05))
    layer = "return document.getElementById('layer').value"
    assert opened.run(layer) == "layers.0.self_attention.layernorm_qkv"
    assert opened.run("return document.getElementById('stat').value") == "sqnr"
    opened.run("document.querySelectorAll('#breaks-table tbody tr')[0].click()")
    first = opened.run("return document.querySelectorAll('#breaks-table tbody td')[1].innerText")
    assert opened.run(layer) == first


def test_a_legend_hides_a_series(opened: Browser) -> None:
    assert opened.run("return document.querySelectorAll('#loss-chart path').length") == 6
    opened.run("document.querySelectorAll('#loss-legend button')[1].click()")
    assert opened.run("return document.querySelectorAll('#loss-chart path').length") == 3
    assert opened.run("return document.querySelectorAll('#loss-legend button')[1].ariaPressed") == "false"
