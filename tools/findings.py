"""The pictures of README and docs/findings-*.md from folders of `theodolite reproduce`: `python -m tools.findings …`.

The last folder that has an experiment counts; that of `sinks` was made with `--layer 4 --head 1`.

A picture whose experiment none of the folders has stays as it is.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page

from tools.chromium import browser, write_png
from tools.gallery import DOCS, new_results

# Picture → the experiment, and those of its figures that stand in it, one below the other.
PICTURES: dict[str, tuple[str, tuple[str, ...]]] = {
    "sinks": ("sinks/figure2", ("attention", "colours")),
    "pruning": ("sinks/figure4", ("left", "maps")),
    "locater": ("localization/figure8", ("curves",)),
}


def draw(page: Page, report: Path, keys: tuple[str, ...]) -> Image.Image:
    """Figures of a page as they are seen on it."""
    page.goto(report.resolve().as_uri())
    parts = []
    for key in keys:
        plot = page.locator(f".plot[data-figure='{key}']:not(.compact)")
        plot.scroll_into_view_if_needed()
        plot.locator(".main-svg").first.wait_for(state="attached")
        page.mouse.move(1, 1)  # no mode bar
        page.wait_for_timeout(500)
        parts.append(Image.open(io.BytesIO(plot.screenshot())).convert("RGB"))
    whole = Image.new(
        "RGB", (max(part.width for part in parts), sum(part.height for part in parts)), "#fdfcf9"
    )
    top = 0
    for part in parts:
        whole.paste(part, (0, top))
        top += part.height
    return whole


def main(folders: list[str]) -> None:
    """Write those that can be."""
    found = new_results([Path(folder) for folder in folders])
    with browser() as page:
        for name, (experiment, keys) in PICTURES.items():
            if experiment not in found:
                print(f"{name}.png stays: no {experiment}")
                continue
            picture = draw(page, found[experiment][1] / "index.html", keys)
            target = DOCS / "images" / f"{name}.png"
            write_png(picture, target)
            print(target.name, target.stat().st_size)


if __name__ == "__main__":
    main(sys.argv[1:])
