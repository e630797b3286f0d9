"""The page in a real Chromium: loaded, typed into, clicked through, its links followed.

Whatever a test does, the browser must ask nobody but this machine.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest

from tests.browser import needs_browser, watched
from tests.inputs.test_pages import HOSTILE
from theodolite.explore.subject import prompt_ids

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("gradio", reason="gradio is not installed")
# The server is in this process; gradio's warnings are not ours.
pytestmark = [needs_browser, pytest.mark.filterwarnings("ignore")]
DRAWN = ".constituents .js-plotly-plot .main-svg"


class Opened:
    """A page that is open, and what it did wrong."""

    def __init__(self, chromium: Any, address: str, width: int = 1400, scheme: str = "light") -> None:
        self.page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.faults = watched(self.page, console=False)
        self.page.goto(address)
        self.page.wait_for_selector(DRAWN)

    def read(self, prompt: str) -> None:
        self.page.fill("#prompt textarea", prompt)
        self.page.click("#run")

    def click_head(self, layer: int, head: int, side: int = 0) -> None:
        """Click on a cell of the map; once more where the map was just being drawn."""
        for _ in range(10):
            x, y = self.page.evaluate(
                """([layer, head, side]) => {
                  const map = document.querySelectorAll(".head-map .js-plotly-plot")[side];
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
            try:
                shown = (
                    f"document.querySelectorAll('.head h4')[{side}].innerText.startsWith('L{layer}H{head} ')"
                )
                self.page.wait_for_function(shown, timeout=5_000)
            except playwright.TimeoutError:
                continue
            return
        pytest.fail(f"L{layer}H{head} was clicked and is not shown")

    def until(self, condition: str) -> None:
        self.page.wait_for_function(condition)

    def weights(self) -> np.ndarray:
        """What the attention map shows, NaN where there is none."""
        rows = self.page.evaluate(
            "[...document.querySelector('.attention .js-plotly-plot')._fullData[0].z].map((row) => [...row])"
        )
        return np.array(rows, dtype=float)

    def close(self) -> None:
        """Only this machine was asked anything, and nothing of a prompt was run."""
        owned = self.page.evaluate("document.documentElement.dataset.owned")
        self.page.close()
        assert self.faults == []
        assert owned is None


def test_type_click_switch_and_follow_the_link(chromium, serving, sharp):
    address = serving(sharp)
    opened = Opened(chromium, address)
    page = opened.page
    assert page.title() == "theodolite explore"

    # Nothing in a prompt is run, and it is shown as it is written.
    hostile = "".join(HOSTILE) + "${alert(1)}{{value}}"
    opened.read(hostile)
    opened.until("document.querySelector('.sinks [role=group]').innerText.includes('${alert(1)}{{value}}')")
    page.wait_for_timeout(500)
    assert page.locator(".sinks script, .sinks img, .sinks iframe, .sinks svg, .tags img").count() == 0

    prompt = "a cat & a <b>dog</b> sat; 100 % of #1?\n𝔘nd so on + on"
    opened.read(prompt)
    opened.until("location.search.includes('dog')")
    for layer, head in ((1, 0), (0, 1)):
        opened.click_head(layer, head)
        assert page.input_value("#head input") == f"L{layer}H{head}"
    view = sharp.view(prompt_ids([sharp], prompt), 0, 1)
    np.testing.assert_allclose(opened.weights(), view.attention, atol=1e-6)
    # Maps of tokens have no heads to click on.
    assert page.locator("[data-heard]").count() == 2
    assert page.locator(":is(.attention, .constituents) [data-heard]").count() == 0
    page.click("#log input")
    opened.until("document.querySelector('.attention .js-plotly-plot')?._fullData[0].zmin === -5")
    np.testing.assert_allclose(opened.weights(), np.log10(np.maximum(view.attention, 1e-5)), atol=1e-4)
    page.click("#measure input")
    page.get_by_role("option", name="the text · previous token").click()
    map_of = "document.querySelector('.head-map .js-plotly-plot')?._fullData[0].hovertemplate"
    opened.until(f"{map_of}.includes('previous token')")

    # Oracle: the standard library's reading of the address.
    opened.until("location.search.includes('previous_token')")
    kept = page.url
    expected = {"prompt": prompt, "layer": "0", "head": "1", "map": "text:previous_token", "log": "1"}
    assert parse_qs(urlsplit(kept).query) == {name: [value] for name, value in expected.items()}
    again = Opened(chromium, kept)
    assert again.page.input_value("#prompt textarea") == prompt
    assert again.page.input_value("#head input") == "L0H1"
    assert "L0H1" in again.page.inner_text(".head")
    assert again.page.is_checked("#log input")
    assert "previous token" in again.page.input_value("#measure input")
    again.close()

    # A refused prompt leaves the page as it is.
    for refused, why in (("", "the prompt is empty"), ("a" * 65, "65 tokens long: at most 64 can be shown")):
        opened.read(refused)
        page.get_by_text(why).wait_for()
        page.wait_for_timeout(300)
        assert page.url == kept
    opened.read("a good prompt")
    opened.until("document.querySelector('#message').innerText === ''")
    assert page.input_value("#preset input") == ""  # what was typed is none of the prompts to pick
    opened.close()


@pytest.mark.browser
def test_two_models_side_by_side_and_an_address_that_names_no_head(chromium, serving, subject, sharp):
    opened = Opened(chromium, f"{serving(sharp)}/?layer=9&head=<b>1</b>")
    assert "is not a head" in opened.page.inner_text("#message")
    assert opened.page.locator("#message b b").count() == 0
    opened.close()
    opened = Opened(chromium, serving(subject("gpt2"), subject("llama3")))
    page = opened.page
    assert page.locator("h2").all_inner_texts() == ["gpt2", "llama3"]
    opened.click_head(2, 1, side=1)
    opened.until(
        "[...document.querySelectorAll('.head h4')].every((one) => one.innerText.startsWith('L2H1'))"
    )
    left, right = (page.locator(".head table").nth(side).inner_text() for side in (0, 1))
    assert left != right
    boxes = [page.locator(".attention").nth(side).bounding_box() for side in (0, 1)]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    assert boxes[0]["y"] == boxes[1]["y"]
    opened.close()


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_the_window(chromium, serving, sharp, scheme):
    opened = Opened(chromium, serving(sharp), scheme=scheme)
    for width in (390, 1024, 1600):
        opened.page.set_viewport_size({"width": width, "height": 900})
        opened.page.wait_for_timeout(500)
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
        for plot in opened.page.locator(".js-plotly-plot").all():
            assert plot.bounding_box()["width"] > 200
    opened.close()
