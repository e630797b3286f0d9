"""`view_head`: one head as a figure for a notebook.

Oracles: transformers' own eager attention, Pillow for the picture, and Chromium with scripts switched off.
"""

from __future__ import annotations

import base64
import io
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from tests import checkpoints
from tests.explore.conftest import PROMPT
from tests.explore.test_view import eager_attention
from tests.inputs.test_pages import BROWSER, HOSTILE
from theodolite import open_model, view_head
from theodolite.errors import UsageError
from theodolite.explore.one_head import FAINTEST


@pytest.mark.parametrize("family", ["gpt2", "gpt_oss", "bert", "bloom"])
def test_what_is_lit_is_the_models_own_attention(family, opened, checkpoint):
    model = opened(family)
    figure = view_head(model, PROMPT, 1, 1)
    ids = model.tokenizer(PROMPT)["input_ids"]
    expected = eager_attention(checkpoint(family), ids)[1][1]
    np.testing.assert_allclose(np.nan_to_num(figure.view.attention), expected, atol=2e-5)
    shown = figure._repr_html_()
    rules = re.findall(r":checked\) \{ --r: (\d+);(.*?) \}", shown)
    assert [int(row) for row, _ in rules] == list(range(len(ids)))
    for row, entries in rules:
        lit = {int(key): float(weight) for key, weight in re.findall(r"--k(\d+):([\d.]+);", entries)}
        for key, weight in enumerate(expected[int(row)]):
            assert lit.get(key, 0.0) == pytest.approx(weight, abs=6e-4 if key in lit else FAINTEST + 2e-5)
    picture = Image.open(io.BytesIO(base64.b64decode(re.search(r"base64,([^\"]*)", shown)[1])))
    opacity = np.asarray(picture.convert("RGBA"))[..., 3]
    np.testing.assert_allclose(opacity, 255 * expected / expected.max(), atol=0.51)


def test_token_ids_and_what_cannot_be_shown(sharp, opened):
    ids = sharp.model.tokenizer(PROMPT)["input_ids"]
    of_text, of_ids = view_head(sharp.model, PROMPT, 0, 1), view_head(sharp.model, torch.tensor(ids), 0, 1)
    np.testing.assert_array_equal(of_text.view.attention, of_ids.view.attention)
    assert repr(of_text) == f"HeadFigure of L0H1 of {sharp.model.id} on {len(ids)} tokens"
    for arguments, said in (
        (("", 0, 0), "the prompt is empty"),
        (("abc", 0, 0), "3 tokens long"),
        ((PROMPT, 7, 0), "layer 7 does not exist"),
        ((PROMPT, 0, 7), "head 7 does not exist"),
        ((torch.zeros(2, 8, dtype=torch.long), 0, 0), "those of one prompt"),
        (([5, 6, 10**6, 7], 0, 0), "does not fit"),
    ):
        with pytest.raises(UsageError, match=said):
            view_head(sharp.model, *arguments)
    with pytest.raises(UsageError, match="those of one prompt, 512 at most"):
        view_head(opened("bloom"), [5] * 600, 0, 0)


@pytest.mark.slow
def test_it_needs_no_gradio(sharp_folder):
    code = f"""
import sys
sys.modules["gradio"] = None
from theodolite import open_model, view_head
print(view_head(open_model({str(sharp_folder)!r}), {PROMPT!r}, 0, 0)._repr_html_().count("<label"))
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(printed) == len(checkpoints.byte_tokenizer()(PROMPT)["input_ids"]) + 1


@pytest.fixture(scope="module")
def chromium():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if BROWSER is None:
        pytest.skip("no Chromium here: install Debian's package `chromium`")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


OPACITIES = """() => [...document.querySelectorAll("label.t")].map((token) => {
  const colour = getComputedStyle(token).backgroundColor.match(/[\\d.]+/g).map(Number);
  return colour.length === 4 ? colour[3] : 1;
})"""
TOLD = """() => [...document.querySelectorAll(".told > p")].filter(
  (p) => getComputedStyle(p).visibility === "visible").map((p) => p.textContent)"""


def test_a_token_lights_its_row_under_pointer_and_keys_without_a_script(chromium, sharp, tmp_path):
    figure, other = view_head(sharp.model, PROMPT, 1, 1), view_head(sharp.model, PROMPT, 1, 1)
    shown = figure._repr_html_()
    assert "<script" not in shown
    page_file = tmp_path / "two.html"  # the same figure twice on a page: the second stays as it is
    page_file.write_text(f"<!doctype html><meta charset=utf-8>{shown}<aside>{other._repr_html_()}</aside>")
    page = chromium.new_context(java_script_enabled=False, offline=True).new_page()
    page.goto(page_file.as_uri())
    first = page.locator("label.t").count() // 2
    weights = np.nan_to_num(figure.view.attention)

    def lights(query: int) -> None:
        seen = np.array(page.evaluate(OPACITIES))
        expected = np.where(weights[query] >= FAINTEST, weights[query], 0)
        np.testing.assert_allclose(seen[:first], expected, atol=0.01)
        best = int(weights[query].argmax())
        assert page.evaluate(TOLD)[0].startswith(f"{query} “")
        assert f" attends to {best} “" in page.evaluate(TOLD)[0]

    received = np.nan_to_num(figure.view.received)
    np.testing.assert_allclose(page.evaluate(OPACITIES)[:first], received / received.max(), atol=0.01)
    before = page.evaluate(OPACITIES)[first:]
    page.keyboard.press("Tab")
    for query in range(3):
        page.keyboard.press("ArrowRight")
        lights(query)
    box = page.locator("label.q9").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)  # over what is chosen
    lights(9)
    strip = page.locator(".map .q7").first.bounding_box()
    page.mouse.move(strip["x"] + 5, strip["y"] + strip["height"] / 2)
    lights(7)
    page.mouse.move(1, 1)
    lights(2)
    assert page.evaluate(OPACITIES)[first:] == before
    assert {sink.position for sink in figure.view.sinks} == {
        index
        for index, text in enumerate(page.locator("label.t").all_text_contents()[:first])
        if text.startswith("▼")
    }


def test_nothing_in_a_prompt_is_run(chromium, sharp_folder, tmp_path):
    tokenizer = checkpoints.byte_tokenizer()
    tokenizer.add_tokens(HOSTILE)
    folder = checkpoints.write("gpt2", tmp_path / "hostile")
    tokenizer.save_pretrained(folder)
    figure = view_head(open_model(folder), "".join(HOSTILE), 0, 0)
    page = chromium.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(figure.save(tmp_path / "figure.html").as_uri())
    page.wait_for_timeout(300)
    assert page.title().startswith("L0H0 of ")
    assert page.evaluate("document.documentElement.dataset.owned") is None
    assert all(url.startswith(("file:", "data:")) for url in asked)
    assert page.evaluate("document.querySelectorAll('label.t img, label.t svg, script').length") == 0
    assert page.locator("label.t").count() == len(figure.view.tokens)
