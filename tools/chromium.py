"""Figures of Plotly as small pictures that follow the reader's light or dark page, drawn by a Chromium on this machine.

An SVG whose colours are variables: which values they have, the reader's colour scheme decides. What would be a large
SVG, thousands of points, becomes a PNG of few colours.
"""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

from PIL import Image, ImageColor
from playwright.sync_api import Page, sync_playwright

from theodolite.report.style import dark_swaps, template

WIDTH = 800
LARGEST = 48_000
"""Bytes of an SVG; beyond, a PNG is made."""

_TO_SVG = """([div, width, height]) => Plotly.toImage(div, {format: 'svg', width, height})"""


@contextmanager
def browser() -> Iterator[Page]:
    """A page of a headless Chromium."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        raise SystemExit("pictures are drawn by Chromium, and none is found")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            context = chromium.new_context(viewport={"width": 1200, "height": 900}, device_scale_factor=1.5)
            yield context.new_page()
        finally:
            chromium.close()


def write_first_figure(page: Page, report: Path, target: Path) -> Path | None:
    """Draw the first figure of a page of `theodolite reproduce`; None where it has none."""
    page.goto(report.resolve().as_uri())
    figures = page.locator("[data-figure]:not(.compact)")
    if not figures.count():
        return None
    figures.first.scroll_into_view_if_needed()
    page.wait_for_selector("[data-figure].js-plotly-plot:not(.compact)")
    handle = page.locator("[data-figure].js-plotly-plot:not(.compact)").first.element_handle()
    assert handle is not None
    box = handle.bounding_box()
    assert box is not None
    height = round(min(max(WIDTH * box["height"] / box["width"], 240), 0.8 * WIDTH))
    return _write(page, page.evaluate(_TO_SVG, [handle, WIDTH, height]), target)


def _write(page: Page, url: str, target: Path) -> Path:
    svg = unquote(url.partition(",")[2])
    target.parent.mkdir(parents=True, exist_ok=True)
    for old in (".svg", ".png"):
        target.with_suffix(old).unlink(missing_ok=True)
    adaptive = _adaptive(svg)
    if len(adaptive.encode()) <= LARGEST:
        target.with_suffix(".svg").write_text(adaptive, encoding="utf-8")
        return target.with_suffix(".svg")
    with page.context.new_page() as other:
        other.set_content(f'<body style="margin:0;background:#fdfcf9">{svg}</body>')
        shot = other.locator("svg").first.screenshot()
    # In the 256 colours that are nearest to its own: a third of the room, and fewer would bend scales.
    picture = Image.open(io.BytesIO(shot)).convert("RGB")
    picture.quantize(256, kmeans=3, dither=Image.Dither.NONE).save(target.with_suffix(".png"), optimize=True)
    return target.with_suffix(".png")


def _adaptive(svg: str) -> str:
    """The same with variables for every colour that has another one on a dark page."""
    light, dark = [], []
    for number, (one, other) in enumerate(_pairs().items()):
        svg, count = re.subn(re.escape(_as_rgb(one)), f"var(--c{number})", svg)
        if count:
            light.append(f"--c{number}:{one}")
            dark.append(f"--c{number}:{other}")
    style = f"<style>svg{{{';'.join(light)}}}@media (prefers-color-scheme:dark){{svg{{{';'.join(dark)}}}}}</style>"
    return re.sub(r"(<svg[^>]*>)", lambda tag: tag[1] + style, svg, count=1)


def _pairs() -> dict[str, str]:
    """Colour on a light page → on a dark one."""
    ours, theirs = template(False).layout, template(True).layout
    pairs = {
        ours.font.color: theirs.font.color,
        ours.xaxis.gridcolor: theirs.xaxis.gridcolor,
        ours.xaxis.linecolor: theirs.xaxis.linecolor,
    }
    return pairs | {one: other for one, other in dark_swaps().items() if one.startswith("#")}


def _as_rgb(colour: str) -> str:
    return "rgb({}, {}, {})".format(*ImageColor.getrgb(colour))
