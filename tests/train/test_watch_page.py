"""The page of a training run. Oracles: pandas' reader of the record, planted values, what Chromium shows, axe-core."""

from __future__ import annotations

import base64
import gc
import json
import re
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from tests import checkpoints
from tests.browser import needs_browser, violations, watched
from tests.inputs.test_pages import HOSTILE
from theodolite.train import monitor as monitor_module
from theodolite.train import watch_page
from theodolite.train.alarms import RANK, Alarm
from theodolite.train.geometry import Geometry
from theodolite.train.monitor import GeometryMonitor, GeometryWarning, RecordWarning
from theodolite.train.record import OF_HEADS, Record
from theodolite.train.watch_page import LISTED, PAGE, POINTS, render

IDS = torch.randint(checkpoints.VOCABULARY, (8, 24), generator=torch.Generator().manual_seed(1))
LOOKS = (*range(10), 12, 16, 17, 30)
"""Steps at which the fixture looks, uneven."""


def train(folder: Path, steps: tuple[int, ...], before: int = 0) -> GeometryMonitor:
    """A training run whose layer 0, head 1 collapses, with a look at each step after the first `before`."""
    model = checkpoints.build("gpt2")
    monitor = GeometryMonitor(model, IDS[:2], every=1, spectra_every=2, folder=folder)
    for number, step in enumerate(steps):
        if number >= before:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", GeometryWarning)
                monitor(step, 6 - step / 10)
        with torch.no_grad():
            model.transformer.h[0].attn.c_attn.weight[:, 8:16] *= 2
    return monitor


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of that training run, which has ended."""
    folder = tmp_path_factory.mktemp("watched") / "out" / "geometry"
    train(folder, LOOKS).close()
    return folder


def numbers(values: object) -> np.ndarray:
    """Plotly's typed arrays as plain ones."""
    if isinstance(values, list):
        return np.array(values)
    flat = np.frombuffer(base64.b64decode(values["bdata"]), dtype=values["dtype"])
    return flat.reshape([int(size) for size in values.get("shape", str(len(flat))).split(",")])


def figure(page: str, key: str) -> dict:
    (text,) = re.findall(rf'<script type="application/json" id="data-{key}">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def traces(page: str, key: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """x and y of each trace that is seen."""
    return [
        (numbers(trace["x"]), numbers(trace["y"]))
        for trace in figure(page, key)["data"]
        if trace.get("hoverinfo") != "skip"
    ]


def timeless(page: str) -> str:
    """Without when it was written, and the nonce that depends on it."""
    return re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d|nonce[=-]['\"]?\w+", "", page)


def test_lines_and_map_hold_what_the_record_holds(recorded):
    page = (recorded / PAGE).read_text()
    tables = {
        name: pd.read_json(recorded / f"{name}.jsonl", lines=True)
        for name in ("heads", "layers", "losses", "alarms")
    }
    heads, layers = (tables[name].groupby("step") for name in ("heads", "layers"))
    expected = [tables["losses"]["loss"], heads["entropy_share"].min(), heads["entropy_share"].mean()]
    expected += [heads["propagation"].min(), heads["propagation"].mean(), heads["largest_logit"].max()]
    expected += [heads["largest_logit"].mean(), layers["rank_collapse"].min(), layers["rank_collapse"].mean()]
    for (x, y), values in zip(traces(page, "lines"), expected, strict=True):
        assert tuple(x) == LOOKS
        np.testing.assert_allclose(y, values, rtol=1e-5)
    shown = figure(page, "heads")
    assert set(shown["variants"]) == set(OF_HEADS)
    for column, (patch, *_) in shown["variants"].items():
        table = tables["heads"].pivot(index=["layer", "head"], columns="step", values=column).to_numpy()
        np.testing.assert_allclose(numbers(patch["z"]), table, rtol=1e-5)
    assert tuple(numbers(shown["data"][0]["x"])) == LOOKS
    assert shown["data"][0]["y"][:5] == ["L0H0", "L0H1", "L0H2", "L0H3", "L1H0"]
    alarms = tables["alarms"]
    assert page.count("<td>L0H1</td>") == len(alarms) > 0
    assert "<h1><bdi>out</bdi></h1>" in page


@pytest.mark.slow
def test_a_page_of_thousands_of_looks_is_light_and_hides_nothing(tmp_path):
    """Oracle: 144 heads, two planted looks, one of them the last, and every head's row; steps are uneven."""
    steps = np.cumsum(np.r_[np.full(2000, 10), np.full(1000, 50)]).tolist()
    places = [(layer, head) for layer in range(12) for head in range(12)]
    record = Record(tmp_path, 12, places)
    usual = {False: np.full(144, 0.5), True: np.full(144, 5.0)}
    for look, step in enumerate(steps):
        heads = {name: usual[name == "largest_logit"] for name in OF_HEADS}
        if look in (1321, 2999):
            share, logit = heads["entropy_share"].copy(), heads["largest_logit"].copy()
            share[100 if look == 1321 else 143], logit[100 if look == 1321 else 143] = 0.01, 40
            heads |= {"entropy_share": share, "largest_logit": logit}
        table = pd.DataFrame(heads, copy=False)
        alarm = Alarm(step, RANK, 1, None, 0.01, 0.0, collapsed=True)
        record.keep(Geometry(step, table, pd.DataFrame({"rank_collapse": np.ones(13)}), 0.0), [alarm])
        record.keep_loss(step, 2.0 + look % 2)
    page = render(record, finished=True)
    shown = figure(page, "heads")
    x = numbers(shown["data"][0]["x"])
    assert len(x) <= POINTS
    assert x[-1] == 70_000
    for column, planted in (("entropy_share", 0.01), ("largest_logit", 40)):
        z = numbers(shown["variants"][column][0]["z"])
        assert z.shape == (144, len(x))
        rows, columns = np.nonzero(np.isclose(z, planted))
        assert rows.tolist() == [100, 143]
        assert columns.tolist() == [np.searchsorted(x, 13_220), len(x) - 1]
    lines = traces(page, "lines")
    assert all(len(x) <= POINTS and x[-1] == 70_000 for x, _ in lines)
    np.testing.assert_allclose(lines[0][1], 2.5)
    named = next(trace for trace in figure(page, "lines")["data"] if "text" in trace)
    assert named["text"][-1] == "L11H11"
    assert page.count("<td>rank collapse</td>") == LISTED
    assert f"The newest {LISTED} of 3000" in page
    assert len(re.sub(r"<script nonce.*?</script>", "", page, flags=re.DOTALL)) < 1 << 21


def test_it_stands_alone_and_reloads_itself_until_the_run_has_ended(tmp_path):
    """Oracle: its elements that name a file; the end is that of the monitor, whether closed or given up."""
    monitor = train(tmp_path, (0, 1))
    page = (tmp_path / PAGE).read_text()
    bare = re.sub(r"(<script[^>]*>).*?</script>", r"\1", page, flags=re.DOTALL)
    assert bare.count("<script") > 4
    assert not re.search(r"\b(?:src|href)=", bare)
    assert "plotly.js v" in page
    assert bare.count('http-equiv="refresh"') == 1
    assert "while the run went on" in bare
    del monitor
    gc.collect()
    page = (tmp_path / PAGE).read_text()
    assert "refresh" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert "The run ended at" in page
    assert "2 looks, the last at step 1; loss 5.900 at step 1; 0 alarms so far." in page
    assert list(tmp_path.glob("*.writing")) == []


@pytest.mark.parametrize(("share", "looks"), [(1e9, 3), (1e-9, 1)])
def test_it_is_written_at_looks_but_not_for_more_than_its_share_of_the_time(
    tmp_path, monkeypatch, share, looks
):
    monkeypatch.setattr(monitor_module, "PAGE_SHARE", share)
    monitor = train(tmp_path, (0, 1, 2))
    page = (tmp_path / PAGE).read_text()
    assert f">{looks} look{'s' if looks > 1 else ''}, the last" in page
    monitor.close()
    assert ">3 looks, the last" in (tmp_path / PAGE).read_text()


@pytest.mark.slow
def test_a_resumed_run_has_the_page_of_one_that_was_not_stopped(tmp_path):
    train(tmp_path / "whole" / "out", LOOKS[:9]).close()
    train(tmp_path / "cut" / "out", LOOKS[:7])
    train(tmp_path / "cut" / "out", LOOKS[:9], before=5).close()
    whole, cut = (timeless((tmp_path / name / "out" / PAGE).read_text()) for name in ("whole", "cut"))
    assert cut.replace("/cut/", "/whole/") == whole


def test_a_page_that_cannot_be_written_ends_no_training(tmp_path):
    (tmp_path / PAGE).mkdir()
    words = r"^step 0: cannot write .*; the looks go on without a record$"
    with pytest.warns(RecordWarning, match=words) as caught:
        assert train(tmp_path, (0, 1, 2)).last.step == 2
    assert len(caught) == 1


def test_a_folder_s_name_cannot_leave_its_place(tmp_path):
    for text in HOSTILE[::3]:
        name = text.replace("/", "∕").replace("\0", "").encode("utf-8", "replace")[:200].decode()
        record = Record(tmp_path / name, 1, [(0, 0)])
        table = pd.DataFrame({name: [0.5] for name in OF_HEADS})
        record.keep(Geometry(0, table, pd.DataFrame({"rank_collapse": [1.0, 1.0]}), 0.0), [])
        page = render(record, finished=True)
        plain = re.sub(r"(<script[^>]*>).*?</script>", r"\1", page, flags=re.DOTALL)
        assert plain.count("<script") == 6, text
        if "<" in text:
            assert name not in page


@pytest.mark.slow
@needs_browser
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_in_a_browser_it_draws_reloads_and_passes_axe(chromium, recorded, tmp_path, monkeypatch):
    """Offline, on a phone's width, light and dark; a page of two looks becomes one of three by itself."""
    monkeypatch.setattr(watch_page, "RELOAD", 1)
    monkeypatch.setattr(monitor_module, "PAGE_SHARE", 1e9)
    monitor = train(tmp_path, (0, 1))
    tab = chromium.new_context(viewport={"width": 390, "height": 900}).new_page()
    faults = watched(tab)
    tab.goto((tmp_path / PAGE).as_uri())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GeometryWarning)
        monitor(2)
    monitor.close()
    tab.wait_for_selector("text=3 looks")
    tab.goto((recorded / PAGE).as_uri())
    for key in ("lines", "heads"):
        tab.locator(f"#figure-{key} .plot").scroll_into_view_if_needed()
        tab.wait_for_selector(f"#figure-{key} .plot .main-svg", state="attached")
    tab.locator("select[data-picks=heads]").select_option("propagation")
    drawn = tab.evaluate(
        "[...document.querySelector('#figure-heads .plot')._fullData[0].z].map((row) => [...row])"
    )
    for colours in ("light", "dark"):
        tab.emulate_media(color_scheme=colours)
        assert violations(tab) == []
    assert tab.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    tab.context.close()
    rows = [json.loads(line) for line in (recorded / "heads.jsonl").read_text().splitlines()]
    expected = [row["propagation"] for row in rows if (row["layer"], row["head"]) == (0, 1)]
    assert drawn[1] == pytest.approx(expected, rel=1e-5)
    assert faults == []
