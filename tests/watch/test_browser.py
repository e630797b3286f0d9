"""The page of a training run in a real Chromium, while the run goes on. Oracles: the files on disk; axe-core.

The browser must ask nobody but this machine.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.inputs.test_pages import BROWSER, PATIENCE
from tests.slow import slow_but
from tests.watch.conftest import training
from theodolite.system.listening import listen
from theodolite.watch.record import TrainingRecord
from theodolite.watch.server import WatchedRun, serve

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (the dev extra)")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")

pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]
OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
PLOTS = MAP, LINES, ALARMS = "#figure-heads .plot", "#figure-lines .plot", "#figure-alarms .plot"
RANGE = "(plot) => [...document.querySelector(plot)._fullLayout.xaxis.range]"
STEPS = f"[...document.querySelector('{MAP}')._fullData[0].x].join()"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", OFFLINE])
        yield opened
        opened.close()


@pytest.fixture
def show(browser: Any) -> Iterator[Any]:
    """`show(run)`: the page of a run, served, in a window of its own; its faults are its console's errors."""
    contexts = []

    def shown(run: Path, scheme: str = "light", width: int = 1400) -> Any:
        ready, address = threading.Event(), []
        arguments = (
            WatchedRun(TrainingRecord(run), 0.2),
            listen(0),
            lambda where: (address.append(where), ready.set()),
        )
        threading.Thread(target=serve, args=arguments, daemon=True).start()
        assert ready.wait(60)
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        tab = context.new_page()
        tab.set_default_timeout(PATIENCE)
        tab.faults = []
        tab.on(
            "console", lambda message: tab.faults.append(message.text) if message.type == "error" else None
        )
        tab.on("pageerror", lambda error: tab.faults.append(str(error)))
        tab.on(
            "request",
            lambda request: tab.faults.append(request.url) if address[0] not in request.url else None,
        )
        tab.goto(address[0])
        return tab

    yield shown
    for context in contexts:
        context.close()


def wait(tab: Any, condition: str, seconds: int = 60) -> None:
    """Until it holds; asked from outside, since the page's policy lets no text become a script."""
    until = time.monotonic() + seconds
    while True:
        try:
            if tab.evaluate(condition):
                return
        except playwright.Error:  # the page is being loaded anew
            pass
        assert time.monotonic() < until, condition
        tab.wait_for_timeout(100)


def draw(tab: Any) -> None:
    for plot in PLOTS:
        tab.locator(plot).scroll_into_view_if_needed()
        tab.wait_for_selector(f"{plot} .main-svg", state="attached")


def zoom(tab: Any, plot: str) -> list[float]:
    """Drag over the middle of a plot, as a reader does; the range of its steps that is left."""
    whole = tab.evaluate(RANGE, plot)
    area = tab.locator(f"{plot} .nsewdrag").first
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    x, y = box["x"], box["y"] + box["height"] / 2
    tab.mouse.move(x + 0.3 * box["width"], y)
    tab.mouse.down()
    tab.mouse.move(x + 0.7 * box["width"], y, steps=5)
    tab.mouse.up()
    wait(tab, f"({RANGE})('{plot}').join() !== '{','.join(map(str, whole))}'")
    left = tab.evaluate(RANGE, plot)
    assert left[1] - left[0] < 0.7 * (whole[1] - whole[0])
    return left


def test_it_follows_a_training_run_from_before_its_first_look(show, tmp_path):
    """It waits, draws what comes, keeps the zoom and the button, and says when nobody answers."""
    run = tmp_path / "out"
    tab = show(run)
    wait(tab, "document.getElementById('heard').textContent === 'Waiting for the first look.'")
    with training(run / "geometry") as step:
        for number in range(3):
            step(number)
        tab.wait_for_selector(MAP)
        draw(tab)
        wait(tab, f"{STEPS} === '0,1,2'")
        tab.locator("#figure-heads button", has_text="ρ").click()
        assert tab.evaluate(RANGE, MAP) == [-0.5, 2.5]
        zoomed = [zoom(tab, plot) for plot in PLOTS]
        for number in range(3, 14):
            step(number)
    wait(tab, f"{STEPS} === '0,1,2,3,4,5,6,7,8,9,10,11,12,13'")
    drawn = tab.evaluate(f"[...document.querySelector('{MAP}')._fullData[0].z].map((row) => [...row])")
    rows = [json.loads(line) for line in (run / "geometry" / "heads.jsonl").read_text().splitlines()]
    expected = [[row["propagation"] for row in rows if (row["layer"], row["head"]) == (0, 1)]]
    assert drawn[1] == pytest.approx(expected[0], rel=1e-5)
    assert [tab.evaluate(RANGE, plot) for plot in PLOTS] == zoomed
    assert tab.locator("#figure-heads [aria-pressed=true]").text_content() == "Signal propagation ρ"
    assert tab.locator(".tiles li").first.text_content() == "13step of the last look14 looks"
    alarms = (run / "geometry" / "alarms.jsonl").read_text().splitlines()
    assert tab.locator(".alarms tbody tr").count() == len(alarms) > 0
    assert tab.locator("#heard").text_content().startswith("Heard ")
    assert tab.faults == []
    tab.route("**/*", lambda route: route.abort())
    wait(tab, "document.getElementById('heard').textContent.startsWith('No answer')")
    assert tab.locator("#heard.warned").count() == 1


def test_a_run_that_is_silent_seems_to_have_stopped(show, recorded, tmp_path):
    """Oracle: the time that its files are given: a day and a half ago."""
    run = shutil.copytree(recorded, tmp_path / "out")
    for path in (run / "geometry").iterdir():
        os.utime(path, (time.time() - 1.5 * 86400,) * 2)
    tab = show(run)
    wait(tab, "document.getElementById('heard').classList.contains('warned')")
    assert tab.locator("#heard").text_content() == (
        "Silent for 1 day: the training has ended, or seems to have stopped."
    )


SHOWN = [(390, "light", "dark"), (1400, "dark", "light")]


@pytest.mark.parametrize(("width", "scheme", "other"), slow_but(SHOWN[:1], SHOWN))
def test_axe_finds_nothing_and_nothing_scrolls_sideways(show, recorded, width, scheme, other):
    tab = show(recorded, scheme, width)
    draw(tab)
    tab.locator("details.numbers summary").last.click()
    for colours in (scheme, other):
        tab.emulate_media(color_scheme=colours)
        found = axe.Axe().run(tab, options={"resultTypes": ["violations"]}).response["violations"]
        assert [(rule["id"], [node["target"] for node in rule["nodes"]]) for rule in found] == []
    assert tab.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert tab.faults == []
