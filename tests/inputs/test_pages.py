"""Pages in a real browser: what a token, a label, a prompt or a file name says is shown, and never run or fetched.

Oracle: Chromium. Every hostile text tries to change the title, to mark the document and to fetch from a host.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest

from tests import checkpoints
from tests.browser import needs_browser, watched
from tests.calls import call

HOST = "owned.invalid"
SCRIPT = f"document.title='owned';document.documentElement.dataset.owned=1;fetch('http://{HOST}/f')"
HOSTILE = [
    f"<script>{SCRIPT}</script>",
    f"</script><script>{SCRIPT}</script>",
    f"--><script>{SCRIPT}</script>",
    f'<img src="http://{HOST}/i" onerror="{SCRIPT}">',
    f'"><svg onload="{SCRIPT}">',
    f'<iframe src="javascript:{SCRIPT}"></iframe>',
    f'<a href="javascript:{SCRIPT}" autofocus onfocus="{SCRIPT}">x</a>',
    f"<style>@import 'http://{HOST}/s';</style>",
    f'<meta http-equiv="refresh" content="0;url=http://{HOST}/m">',
    f"<base href='http://{HOST}/b/'>",
    "{{ 7 * 7 }}{% raw %}",
    "%{customdata[0]}<extra></extra>",
    f"$\\href{{javascript:{SCRIPT}}}{{x}}$",
    "\u202edesrever\u202c",
    "a\u2028b\u2029c",
    "\x07\x1b]0;owned\x07\x9b31m",
    "\ufffe\uffff",
]


@pytest.fixture(scope="module")
def hostile_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model some of whose tokens are the hostile texts."""
    folder = checkpoints.write("gpt2", tmp_path_factory.mktemp("hostile") / "model")
    tokenizer = checkpoints.byte_tokenizer()
    assert len(tokenizer) + len(HOSTILE) <= checkpoints.VOCABULARY
    tokenizer.add_tokens(HOSTILE)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pages(hostile_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The pages of a survey, a trace and a figure of a prompt, on hostile text, labels and names."""
    root = tmp_path_factory.mktemp("pages")
    texts = root / '<img src=x onerror="document.title=1">'
    texts.mkdir()
    for number, text in enumerate(HOSTILE):
        (texts / f"<script>document.title={number}<.txt").write_text(f"{text} and {text}. " * 3)
    reading = ("--corpus", texts, "--length", 24, "--contexts", 24)
    prompt = ("--prompt", " ".join(HOSTILE), "--layer", 0, "--head", 0)
    for words in (
        ("survey", hostile_model, *reading, "--out", root / "survey"),
        ("trace", hostile_model, *reading, "--out", root / "trace"),
        ("reproduce", "sinks/figure2", hostile_model, *prompt, "--out", root / "prompt"),
    ):
        status, _, stderr = call(*words)
        assert status == 0, stderr
    return sorted(root.rglob("index.html"))


def shown(page: Path, chromium: Any) -> tuple[str, str | None, list[str]]:
    """The title after the scripts of a page have run, the mark on its document, and what it asked of the host."""
    tab = chromium.new_page()
    asked = watched(tab, console=False)
    tab.goto(page.as_uri())
    tab.wait_for_timeout(1000)
    title, mark = tab.title(), tab.evaluate("document.documentElement.dataset.owned")
    tab.close()
    return title, mark, [address for address in asked if HOST in address]


@pytest.mark.slow
@needs_browser
def test_what_a_token_says_is_not_run(pages: list[Path], chromium: Any) -> None:
    assert len(pages) >= 4
    for page in pages:
        title = re.search(r"<title>(.*?)</title>", page.read_text(encoding="utf-8"), re.S)
        assert title is not None
        after, mark, asked = shown(page, chromium)
        assert (after.split(), mark, asked) == (html.unescape(title[1]).split(), None, []), page


@pytest.mark.slow
@needs_browser
def test_this_browser_would_run_it(tmp_path: Path, chromium: Any) -> None:
    """The test above can fail: the same text in a page without our escapes is run, and fetched."""
    page = tmp_path / "page.html"
    page.write_text(f"<!doctype html><title>plain</title><body>{HOSTILE[0]}</body>")
    assert shown(page, chromium) == ("owned", "1", [f"http://{HOST}/f"])
