"""Pictures of what Chromium shows, in few colours."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def browser() -> Iterator[Any]:
    """Open a page of Chromium; ends the program where there is none."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("pictures need Chromium: install Debian's package `chromium`")
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"]).new_page()


def few_colours(png: bytes) -> bytes:
    """Write a picture in the 256 colours that are nearest to its own, which takes a third of the room."""
    from PIL import Image

    # Fewer would bend scales.
    small, written = Image.open(io.BytesIO(png)).convert("RGB"), io.BytesIO()
    small.quantize(256, kmeans=3, dither=Image.Dither.NONE).save(written, "PNG", optimize=True)
    return written.getvalue()
