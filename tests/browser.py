"""Chromium, for the tests that look at a page in it: what it is, and what a page does wrong there."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((found for name in NAMES if (found := shutil.which(name))), None)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium here: install Debian's package `chromium`"
)
PATIENCE = 120_000
"""Milliseconds that a browser's step may take on a busy machine."""

HERE = ("file:", "data:", "blob:", "http://127.0.0.1:", "ws://127.0.0.1:")


def watched(tab: Any, console: bool = True) -> list[str]:
    """Errors of a page, from now on, and addresses beyond this machine that it asks."""
    faults: list[str] = []
    tab.set_default_timeout(PATIENCE)
    tab.on("pageerror", lambda error: faults.append(str(error)))
    tab.on("request", lambda request: None if request.url.startswith(HERE) else faults.append(request.url))
    if console:
        tab.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
    return faults


def violations(tab: Any, **options: Any) -> list[str]:
    """What is against axe-core's rules."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
    found = axe.Axe().run(tab, options={"resultTypes": ["violations"], **options}).response["violations"]
    return [
        f"{rule['id']}: {node['target']} {node['failureSummary']}" for rule in found for node in rule["nodes"]
    ]
