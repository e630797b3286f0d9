"""The pages in a real browser, by eye, by keyboard and by screen reader.

Oracles: Chromium; axe-core for what its rules can see; the run's own numbers for what is shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.browser import needs_browser, violations, watched
from tests.report.synthetic import make_survey
from theodolite import compare
from theodolite.comparison.page import experiment_of
from theodolite.comparison.page import outcome as compared
from theodolite.passes.run import Run
from theodolite.report.outcome import write_index, write_outcome
from theodolite.report.page import write_report
from theodolite_papers import EXPERIMENTS, Study

pytestmark = [needs_browser, pytest.mark.filterwarnings("ignore::ResourceWarning")]
PHONE, TABLET, DESKTOP = (390, 844), (1024, 768), (1600, 900)
KINDS = ("survey", "comparison", "experiment", "index")


@pytest.fixture(scope="module")
def pages(run: Run, page: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("pages")
    name = "geometry/figure2"
    audit = compare(run, make_survey(seed=1), names=("before", "after"))
    return {
        "survey": page,
        "comparison": write_outcome(experiment_of([audit]), compared([audit]), run.provenance, place),
        "experiment": write_outcome(
            EXPERIMENTS[name], Study(run).outcome(EXPERIMENTS[name]), run.provenance, place
        ),
        "index": write_index(place) or place,
    }


@pytest.fixture
def show(chromium: Any, pages: dict[str, Path]) -> Iterator[Any]:
    """`show("survey", size, scheme)`: the page in a window of its own."""
    contexts = []

    def shown(kind: str, size: tuple[int, int] = DESKTOP, scheme: str = "light") -> Any:
        context = chromium.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
        contexts.append(context)
        tab = context.new_page()
        tab.faults = watched(tab)
        tab.goto(pages[kind].as_uri())
        return tab

    yield shown
    for context in contexts:
        context.close()


def draw_the_first(tab: Any) -> None:
    tab.locator(".plot").first.scroll_into_view_if_needed()
    tab.wait_for_selector(".plot .main-svg", state="attached")


def unfold(tab: Any) -> None:
    tab.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")


@pytest.mark.browser
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("size", "scheme", "other"),
    [(PHONE, "light", "dark"), (DESKTOP, "dark", "light")],
    ids=["phone", "desktop"],
)
def test_axe_finds_nothing_and_nothing_scrolls_sideways(show, kind, size, scheme, other):
    tab = show(kind, size, scheme)
    if kind != "index":
        draw_the_first(tab)
        unfold(tab)
    assert violations(tab) == []
    tab.emulate_media(color_scheme=other)
    assert violations(tab, runOnly=["color-contrast"]) == []
    assert tab.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert tab.faults == []


OVERLAPS = """(selector) => {
    const texts = [...document.querySelectorAll(`${selector} .main-svg text`)].filter((one) => one.textContent.trim());
    const boxes = texts.map((one) => one.getBoundingClientRect());
    return texts.flatMap((one, i) => texts.slice(i + 1).map((other, j) => [one, other, boxes[i], boxes[i + 1 + j]]))
        .filter(([, , a, b]) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
            && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2)
        .map(([one, other]) => `${one.textContent} / ${other.textContent}`);
}"""


@pytest.mark.browser
def test_panels_side_by_side_scroll_on_a_phone(show) -> None:
    tab = show("comparison", PHONE)
    figure = "#figure-positional-basis"
    plot = f"{figure} .plot"
    tab.locator(plot).scroll_into_view_if_needed()
    tab.wait_for_selector(f"{plot} .main-svg", state="attached")
    assert tab.evaluate(OVERLAPS, plot) == []
    room = tab.locator(f"{figure} .body")
    assert room.evaluate("one => one.scrollWidth > one.clientWidth + 100")
    room.focus()
    tab.keyboard.press("ArrowRight")
    tab.wait_for_function("(one) => document.querySelector(one).scrollLeft > 0", arg=f"{figure} .body")


@pytest.mark.browser
def test_every_control_is_reached_by_the_keyboard_and_seen(show) -> None:
    tab = show("survey")
    unfold(tab)
    for figure in tab.locator(
        "[data-figure]:visible"
    ).all():  # each adds buttons as it comes into view and is drawn
        figure.scroll_into_view_if_needed()
        tab.wait_for_function("one => one.classList.contains('js-plotly-plot')", arg=figure.element_handle())
    controls = "a[href], button, select, summary, [tabindex='0']"
    for _ in range(2000):
        tab.keyboard.press("Tab")
        ended = tab.evaluate(
            """() => {
                const one = document.activeElement;
                if (one === document.body || one.dataset.reached) return true;
                one.dataset.reached = getComputedStyle(one).outlineStyle === 'none' ? 'unseen' : 'seen';
                return false;
            }"""
        )
        if ended:
            break
    unseen = ".filter(one => one.checkVisibility() && !one.dataset.reached)"
    missed = f'[...document.querySelectorAll("{controls}")]{unseen}'
    assert tab.evaluate(f"{missed}.map(one => one.outerHTML.slice(0, 120))") == []
    assert tab.locator("[data-reached=unseen]").count() == 0


def test_a_walk_through_the_survey_s_page(show, run: Run) -> None:
    """A head is chosen and numbers sorted by the keyboard, a layer picked; nothing is against the rules of axe."""
    tab = show("survey", PHONE)
    draw_the_first(tab)
    assert tab.locator(".plot:has(.main-svg)").count() < tab.locator(".plot").count() / 2  # only what is near
    assert violations(tab) == []
    tab.locator("#pick-layer").focus()
    tab.keyboard.press("Home")
    tab.locator("#pick-head").focus()
    tab.keyboard.press("End")
    last = int(run.heads["head"].max())
    assert tab.locator("#head-title").text_content() == f"One head: L0H{last}"
    tab.locator("[data-step='1']").focus()
    tab.keyboard.press("Enter")
    assert tab.locator("#head-title").text_content() == "One head: L1H0"
    assert tab.url.endswith("#L1H0")
    unfold(tab)
    tab.locator("#figure-spiral .plot:not(.compact)").scroll_into_view_if_needed()
    tab.wait_for_selector("#figure-spiral .plot:not(.compact) .main-svg", state="attached")
    tab.locator("select[data-picks=spiral]").select_option("0")
    first = "document.querySelector('#figure-spiral .plot:not(.compact)')._fullData[1].x[0]"
    assert tab.evaluate(first) == pytest.approx(float(run.arrays["positional_pca"][0, 1, 0]), rel=1e-3)
    table = tab.locator("table", has=tab.locator("#layer-0"))
    table.locator("th button", has_text="rank").first.focus()
    tab.keyboard.press("Enter")
    place = table.locator("th").all_text_contents().index(table.locator("th[aria-sort]").text_content())
    shown = [
        float(row.locator("td").nth(place).get_attribute("data-v")) for row in table.locator("tbody tr").all()
    ]
    assert shown == sorted(run.layers["rank"].tolist(), reverse=True)
    assert tab.faults == []


def test_whoever_is_sent_the_address_of_a_head_or_a_layer_sees_it(show, pages, run: Run) -> None:
    tab = show("survey")
    for place, name in (("L2H1", "One head: L2H1"), ("L0H3", "One head: L0H3")):
        tab.goto(f"{pages['survey'].as_uri()}#{place}")
        tab.reload()
        assert tab.locator("#head-title").text_content() == name
        assert tab.locator("tr.chosen td").first.text_content() == place
    groups = tab.locator("#head-card h3").all_text_contents()
    assert groups[0] == "Roles and their scores"
    tab.evaluate("location.hash = 'layer-2'")
    tab.wait_for_function("document.querySelector('tr.chosen').id === 'layer-2'")
    assert tab.locator("#layer-2").is_visible()
    link = tab.locator(".summary a[href^='#L']").first
    link.click()
    tab.wait_for_function(
        "name => document.getElementById('head-title').textContent === `One head: ${name}`",
        arg=link.text_content(),
    )
    assert tab.faults == []


@pytest.mark.browser
def test_a_long_table_is_filtered_and_saved(chromium: Any, tmp_path: Path) -> None:
    """Oracle: the run's own table."""
    run = make_survey(blocks=8, heads=8, length=8, contexts=4)
    tab = chromium.new_page(accept_downloads=True)
    faults = watched(tab)
    tab.goto(write_report(run, tmp_path).as_uri())
    tab.locator("summary", has_text="All heads").click()
    tools = tab.locator(".tools", has=tab.locator("input[aria-label*='Heads']"))
    rows = tab.locator("table:has(tr[data-head]) tbody tr:visible")
    assert rows.count() == 25
    assert tools.locator("span").text_content() == "25 of 64 rows"
    tools.locator("button", has_text="Show all 64").click()
    assert rows.count() == 64
    tools.locator("select").first.select_option("block 3")
    assert rows.count() == 8
    tools.locator("input").fill("l3h5")
    assert rows.count() == 1
    with tab.expect_download() as download:
        tools.locator("button", has_text="CSV").click()
    saved = pd.read_csv(download.value.path())
    assert saved["head"].tolist() == ["L3H5"]
    row = run.heads.query("layer == 3 and head == 5").iloc[0]
    assert saved["entropy"][0] == pytest.approx(row["entropy"], rel=1e-4)
    assert faults == []
    tab.close()
