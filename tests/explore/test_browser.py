"""The page in a real Chromium: loaded, typed into, clicked through, pictures compared.

Whatever a test does, the browser must ask nobody but this machine.
"""

from __future__ import annotations

import io
import itertools
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from PIL import Image

from tests import checkpoints
from tests.explore.conftest import subject_of
from tests.inputs.test_pages import BROWSER, HOSTILE, PATIENCE
from tests.slow import slow_but
from theodolite.explore.subject import Subject, prompt_ids
from theodolite.models import open_model

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")
pytest.importorskip("gradio", reason="gradio is not installed")
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="no Chromium here: install Debian's package `chromium`"),
    pytest.mark.filterwarnings(
        "ignore"
    ),  # the server is in this process, and gradio's own warnings are not ours
]

SIZES = ((390, 800), (1024, 768), (1600, 1000))
OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"


@pytest.fixture(scope="module")
def serving() -> Callable[..., str]:
    """serving(subject, …) → the address of a page of theirs."""
    from theodolite.explore.telemetry import disable_telemetry

    disable_telemetry()
    from theodolite.explore.server import application, serve
    from theodolite.system.listening import listen

    known: dict[tuple[str, ...], str] = {}

    def address(*subjects: Subject) -> str:
        names = tuple(subject.name for subject in subjects)
        if names not in known:
            ready = threading.Event()

            def started(where: str) -> None:
                known[names] = where
                ready.set()

            arguments = (application(subjects), listen(0), started)
            threading.Thread(target=serve, args=arguments, daemon=True).start()
            assert ready.wait(60)
        return known[names]

    return address


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", OFFLINE])
        yield browser
        browser.close()


def changed(one: np.ndarray, other: np.ndarray) -> float:
    """Share of the pixels that clearly differ, but for the colour bar, which moves by a pixel as its labels change.

    Heights are cut to whole pixels one way or the other.
    """
    assert max(abs(a - b) for a, b in zip(one.shape, other.shape, strict=True)) <= 1
    height, width = min(len(one), len(other)), int(0.85 * one.shape[1])
    one, other = one[:height, :width], other[:height, :width]
    return float((np.abs(one - other).max(axis=2) > 40).mean())


SAME, OTHER = 0.0002, 0.002
"""Shares of the pixels: of a picture that came back, and of a map of other numbers."""


class Opened:
    """A page that is open, and what it asked of whom."""

    def __init__(
        self, chromium: Any, address: str, width: int = 1400, height: int = 900, scheme: str = "light"
    ):
        self.page = chromium.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.page.set_default_timeout(PATIENCE)
        self.asked: list[str] = []
        self.broken: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.broken.append(str(error)))
        self.page.goto(address)
        self.page.wait_for_selector(".wide-figure .plot[data-drawn]")

    def drawn(self, selector: str) -> int:
        return int(self.page.locator(selector).first.get_attribute("data-drawn") or 0)

    def after(self, selector: str, act: Callable[[], Any]) -> None:
        """Do something, and wait until a figure has been drawn again."""
        before = self.drawn(selector)
        act()
        self.page.wait_for_function(
            "([selector, n]) => Number(document.querySelector(selector).dataset.drawn) > n",
            arg=[selector, before],
        )

    def picture(self, selector: str) -> np.ndarray:
        """The panel as it is seen, (height, width, 3)."""
        self.page.mouse.move(1, 1)  # no hover, and so no mode bar
        self.page.wait_for_timeout(300)
        shot = self.page.locator(selector).first.screenshot(animations="disabled")
        return np.asarray(Image.open(io.BytesIO(shot)).convert("RGB")).astype(int)

    def look(self, prompt: str) -> None:
        self.page.fill("#prompt textarea", prompt)
        self.page.click("#run")

    def click_head(self, layer: int, head: int, side: int = 0) -> None:
        x, y = self.page.evaluate(
            """([layer, head, side]) => {
              const map = document.querySelectorAll(".plot[data-picks]")[side];
              map.scrollIntoView({ block: "center", behavior: "instant" });
              const { xaxis, yaxis } = map._fullLayout, { left, top } = map.getBoundingClientRect();
              return [left + xaxis._offset + xaxis.d2p(head), top + yaxis._offset + yaxis.d2p(layer)];
            }""",
            [layer, head, side],
        )
        self.page.mouse.move(x - 5, y)
        self.page.mouse.move(x, y)
        self.page.wait_for_timeout(200)
        self.page.mouse.click(x, y)
        self.page.wait_for_function(
            "name => [...document.querySelectorAll('.place')].every((one) => one.textContent === name)",
            arg=f"L{layer}H{head}",
        )

    def close(self) -> None:
        """Only this machine was asked anything, and no script failed."""
        hosts = {url.split("/")[2].split(":")[0] for url in self.asked if url.startswith(("http", "ws"))}
        self.page.close()
        assert hosts == {"127.0.0.1"}
        assert not self.broken


@pytest.fixture(scope="module")
def shown_page(chromium, serving, sharp) -> Iterator[Opened]:
    """The page of one model, which several tests go on with."""
    page = Opened(chromium, serving(sharp))
    yield page
    page.close()


ATTENTION, PARTS, MAP = ".plot.square", ".wide-figure .plot", ".plot[data-picks]"


def test_load_type_and_click_through(shown_page):
    opened = shown_page
    page = opened.page
    assert page.title() == "theodolite explore"
    assert page.locator(".place").inner_text() == page.input_value("#head input")

    opened.after(PARTS, lambda: opened.look("one types what is looked at"))
    tokens = page.locator(".sinks-panel .t")
    assert "".join(tokens.evaluate_all("all => all.map((one) => one.lastChild.data ?? '')"))
    assert tokens.count() == len("one types what is looked at")

    shown = page.locator(".place").inner_text()
    for layer, head in [(layer, head) for layer in range(2) for head in range(2)]:
        if shown == f"L{layer}H{head}":
            continue
        opened.after(PARTS, lambda at=(layer, head): opened.click_head(*at))
        assert page.input_value("#head input") == f"L{layer}H{head}"

    before = opened.picture(MAP)
    page.click("#measure input")
    opened.after(MAP, lambda: page.get_by_role("option", name="the text · previous token").click())
    assert changed(opened.picture(MAP), before) > OTHER


@pytest.mark.slow
def test_the_address_keeps_prompt_and_head(chromium, serving, sharp):
    address = serving(sharp)
    first = Opened(chromium, address)
    prompt = "a cat & a <b>dog</b> sat; 100 % of #1?\n𝔘nd so on + on"
    first.after(".side .plot[data-picks]", lambda: first.look(prompt))
    first.after(".side .plot[data-picks]", lambda: first.click_head(1, 0))
    first.page.wait_for_function("location.search.includes('layer=1&head=0')")
    kept = first.page.url
    # Oracle: the standard library's reading of the address.
    assert parse_qs(urlsplit(kept).query) == {"prompt": [prompt], "layer": ["1"], "head": ["0"]}
    first.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    first.page.click(".copy-link")
    first.page.wait_for_function("document.querySelector('.copied').textContent === 'Copied.'")
    assert first.page.evaluate("navigator.clipboard.readText()") == kept
    again = Opened(chromium, kept)
    assert again.page.input_value("#prompt textarea") == prompt
    assert again.page.input_value("#head input") == "L1H0"
    assert "L1H0" in again.page.inner_text(".head-panel")
    refused = Opened(chromium, f"{address}/?layer=9&head=<b>1</b>")
    assert "is not a head" in refused.page.inner_text("#message")
    assert refused.page.locator("#message b").count() == 0
    for opened in (first, again, refused):
        assert not opened.broken
        assert all(url.startswith((address, "data:", "blob:")) for url in opened.asked)
        opened.page.close()


def test_a_figure_has_a_name_and_its_numbers(shown_page, sharp):
    page = shown_page.page
    name = page.locator(".place").inner_text()
    labels = page.locator(".plot").evaluate_all("all => all.map((one) => one.getAttribute('aria-label'))")
    assert all(name in label for label in labels)
    levels = page.locator("h1, h2, h3, h4").evaluate_all("all => all.map((one) => Number(one.tagName[1]))")
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    numbers = page.locator(".plot.square + .numbers")
    numbers.locator("summary").click()
    numbers.locator("tbody tr").nth(4).wait_for()
    cells = numbers.locator("tbody tr").nth(4).locator("td").all_text_contents()
    ids = prompt_ids([sharp], page.input_value("#prompt textarea"))
    row = sharp.view(ids, *(int(part) for part in name[1:].split("H"))).attention[4]
    assert [float(cell) for cell in cells[1:6]] == pytest.approx(row[:5].tolist(), abs=1e-4)
    numbers.locator("summary").click()


def test_the_switches_change_the_picture_and_back(shown_page, sharp):
    opened = shown_page
    prompt = "the theodolite reads the angle"
    ids = prompt_ids([sharp], prompt)
    place = next(at for at in np.ndindex(2, 2) if sharp.view(ids, *at).sinks)
    opened.after(PARTS, lambda: opened.look(prompt))
    opened.click_head(*place)
    opened.page.wait_for_timeout(500)
    plain = opened.picture(ATTENTION)
    for switch in ("#log", "#hide"):
        opened.after(ATTENTION, lambda which=switch: opened.page.click(f"{which} input"))
        assert changed(opened.picture(ATTENTION), plain) > OTHER
        opened.after(ATTENTION, lambda which=switch: opened.page.click(f"{which} input"))
        assert changed(opened.picture(ATTENTION), plain) < SAME


def test_a_refused_prompt_leaves_the_page_as_it_is(shown_page):
    opened = shown_page
    name = opened.page.locator(".place").inner_text()
    before = opened.drawn(ATTENTION)
    for prompt, said in (("", "the prompt is empty"), ("a" * 65, "65 tokens long: at most 64 can be shown")):
        opened.look(prompt)
        opened.page.get_by_text(said).wait_for()
        opened.page.wait_for_timeout(500)  # what follows a prompt must not take the line away
        assert opened.page.locator(".refused").inner_text().startswith(("the prompt", said))
        assert opened.page.locator(".place").inner_text() == name
        assert opened.drawn(ATTENTION) == before
        assert opened.page.locator(".sides").evaluate("one => Number(getComputedStyle(one).opacity)") < 0.6
    opened.after(ATTENTION, lambda: opened.look("a good prompt"))
    assert opened.page.locator(".refused").count() == 0
    assert opened.page.locator(".sides").evaluate("one => getComputedStyle(one).opacity") == "1"
    assert opened.page.input_value("#preset input") == ""  # what was typed is none of the prompts to pick


def test_figures_are_drawn_in_their_own_column(shown_page):
    opened = shown_page
    for plot in opened.page.locator(".plot").all():
        drawn, column = plot.evaluate("one => [one._fullLayout.width, one.clientWidth]")
        assert abs(drawn - column) <= 1
    opened.page.set_viewport_size({"width": 700, "height": 900})
    opened.page.wait_for_function("""[...document.querySelectorAll(".plot")].every(
        (one) => Math.abs(one._fullLayout.width - one.clientWidth) <= 1)""")
    opened.page.set_viewport_size({"width": 1400, "height": 900})


@pytest.mark.slow
def test_two_models_side_by_side(chromium, serving, subject):
    opened = Opened(chromium, serving(subject("gpt2"), subject("llama3")))
    page = opened.page
    assert page.locator(".side-name").all_inner_texts() == ["gpt2", "llama3"]
    assert page.locator(MAP).count() == 2
    opened.click_head(2, 1, side=1)
    assert page.locator(".place").all_inner_texts() == ["L2H1", "L2H1"]
    left, right = (page.locator(".evidence").nth(side).inner_text() for side in (0, 1))
    assert left != right
    boxes = [page.locator(ATTENTION).nth(side).bounding_box() for side in (0, 1)]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    assert boxes[0]["y"] == boxes[1]["y"]
    opened.close()


@pytest.mark.slow
def test_nothing_in_a_prompt_is_run(chromium, serving, sharp_folder, tmp_path):
    folder = shutil.copytree(sharp_folder, tmp_path / "hostile <img src=x onerror=alert(1)>")
    tokenizer = checkpoints.byte_tokenizer()
    tokenizer.add_tokens(HOSTILE)
    tokenizer.save_pretrained(folder)
    hostile = subject_of(Path(folder).name, open_model(folder), 64)
    opened = Opened(chromium, serving(hostile))
    page = opened.page
    for some in (HOSTILE[:9], HOSTILE[9:]):
        opened.after(PARTS, lambda prompt=some: opened.look("".join(prompt) + "${alert(1)}{{value}}"))
        for layer in range(2):
            opened.click_head(layer, 0)
        box = page.locator(ATTENTION).bounding_box()
        page.mouse.move(box["x"] + box["width"] / 4, box["y"] + box["height"] / 2)  # a hover label
        page.wait_for_timeout(300)
    assert page.title() == "theodolite explore"
    assert page.evaluate("document.documentElement.dataset.owned") is None
    assert page.locator(".words script, .words img, .words iframe, .words svg, .words style").count() == 0
    assert "${alert(1)}{{value}}" in page.locator(".sinks-panel .text").inner_text()
    opened.close()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", slow_but(["dark"], ["light", "dark"]))
def test_it_fits_and_follows_the_readers_colours(chromium, serving, sharp, scheme):
    opened = Opened(chromium, serving(sharp), scheme=scheme)
    page = opened.page
    for width, height in SIZES:
        page.set_viewport_size({"width": width, "height": height})
        page.wait_for_timeout(500)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for plot in page.locator(".plot").all():
            box = plot.bounding_box()
            assert box["width"] > 200
            assert box["height"] > 150
    ink = page.locator(".head-name").evaluate("one => getComputedStyle(one).color")
    paper = opened.picture(ATTENTION)[2, 2]
    assert (sum(int(part) for part in ink.strip("rgb()").split(",")) > 382) == (scheme == "dark")
    assert (paper.sum() > 382) == (scheme == "light")
    page.evaluate("document.querySelectorAll('.numbers').forEach((one) => { one.open = true; })")
    page.locator(".numbers td").first.wait_for()
    # Thousands of cells are alike, and took minutes.
    page.evaluate("document.querySelectorAll('.numbers tr:nth-child(n + 4)').forEach((one) => one.remove())")
    found = axe.Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    assert [f"{rule['id']}: {node['target']}" for rule in found for node in rule["nodes"]] == []
    opened.close()
