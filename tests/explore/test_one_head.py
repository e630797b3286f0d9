"""`view_head`: one head as a figure for a notebook or a file. Oracles: the view, which test_view.py holds; Chromium."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest
import torch

from tests.browser import needs_browser, watched
from tests.explore.conftest import PROMPT
from tests.inputs.test_pages import HOSTILE
from theodolite import view_head
from theodolite.errors import UsageError


def test_token_ids_and_what_cannot_be_shown(sharp, opened):
    ids = sharp.model.tokenizer(PROMPT)["input_ids"]
    of_text, of_ids = view_head(sharp.model, PROMPT, 0, 1), view_head(sharp.model, torch.tensor(ids), 0, 1)
    np.testing.assert_array_equal(of_text.view.attention, of_ids.view.attention)
    np.testing.assert_array_equal(of_text.figure.data[0].z, of_text.view.attention.astype(np.float32))
    assert repr(of_text) == f"HeadFigure of L0H1 of {sharp.model.id} on {len(ids)} tokens"
    for arguments, said in (
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


def test_it_needs_no_gradio(monkeypatch, sharp):
    monkeypatch.setitem(sys.modules, "gradio", None)
    for name in [name for name in sys.modules if name.startswith("theodolite.explore")]:
        monkeypatch.delitem(sys.modules, name)
    imported = importlib.import_module("theodolite.explore.panels")
    assert imported.view_head(sharp.model, PROMPT, 0, 0).view.layer == 0


@pytest.mark.slow
@needs_browser
def test_the_saved_page_opens_offline_and_runs_nothing_of_a_prompt(chromium, sharp, tmp_path):
    saved = view_head(sharp.model, "".join(HOSTILE), 0, 0).save(tmp_path / "figure.html")
    page = chromium.new_page()
    faults = watched(page, console=False)
    page.goto(saved.as_uri())
    page.wait_for_selector(".heatmaplayer image")
    page.wait_for_timeout(300)
    assert page.evaluate("document.documentElement.dataset.owned") is None
    assert faults == []
