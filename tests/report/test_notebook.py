"""What a run shows in a notebook. Oracle: Python's own HTML parser, and the run's own numbers."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pandas as pd
import pytest

from tests.report.synthetic import make_survey, weights_only
from tests.report.test_page import Reader
from theodolite.passes.run import Run
from theodolite.report.notebook import strongest
from theodolite.report.summary import health_line


def texts(reader: Reader) -> str:
    return " ".join(text for kind, found in reader.texts.items() if kind != "style" for text in found)


def test_it_names_the_model_the_text_the_key_numbers_and_the_strongest_heads(run: Run) -> None:
    reader = Reader(run._repr_html_())
    assert reader.open == []
    shown = texts(reader)
    assert "synthetic/" in shown
    assert "16 contexts of 24 tokens" in shown
    best = run.heads.loc[run.heads["sink_first"].idxmax()]
    assert f"first-token sink L{best['layer']}H{best['head']} ({best['sink_first']:.2g}" in shown
    assert str(int(run.layers["rank"].mean())) in shown
    assert len(reader.named("li")) >= 5


def test_it_is_escaped_and_has_no_script_and_loads_nothing(run: Run) -> None:
    html = run._repr_html_()
    reader = Reader(html)
    assert "onerror=alert(1)" in texts(reader)
    assert not {"script", "img", "link", "iframe"} & {tag for tag, _ in reader.elements}
    assert not any(name.startswith("on") or name in ("src", "href") for _, a in reader.elements for name in a)
    assert "url(" not in html
    assert "http" not in html


def test_its_style_touches_nothing_else_and_knows_the_dark(run: Run) -> None:
    reader = Reader(run._repr_html_())
    (own,) = {str(box["class"]) for box in reader.named("div")}
    style = "".join(reader.texts["style"])
    selectors = [part.strip() for rule in style.split("}") for part in rule.split("{")[:-1]]
    assert selectors
    assert all(own in one or one.startswith("@media (prefers-color-scheme: dark)") for one in selectors)
    assert Reader(make_survey(seed=1)._repr_html_()).named("div")[0]["class"] != own


def test_flagged_checks_are_shown(run: Run) -> None:
    sick = replace(run, layers=run.layers.assign(rank_collapse=0.01))
    assert "Rank collapse:" in sick._repr_html_()
    assert "flagged" in sick._repr_html_()
    assert "Rank collapse:" not in run._repr_html_()


@pytest.mark.parametrize(
    ("flagged", "checks", "line"),
    [
        (0, 6, "All 6 health checks passed."),
        (1, 6, "1 of 6 health checks flagged."),
        (2, 6, "2 of 6 health checks flagged."),
    ],
)
def test_health_in_a_line(flagged: int, checks: int, line: str) -> None:
    assert health_line(flagged, checks) == line


def test_weights_alone_and_empty_tables_show_what_there_is(run: Run) -> None:
    assert "no text was read" in weights_only(run)._repr_html_()
    empty = replace(weights_only(run), heads=pd.DataFrame(), layers=pd.DataFrame(), arrays={})
    assert Reader(empty._repr_html_()).open == []
    assert strongest(empty) == []


def test_a_loaded_run_shows_the_same_and_its_name_is_one_line(run: Run, tmp_path) -> None:
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    run.save(tmp_path / "run")
    loaded = Run.load(tmp_path / "run")
    assert loaded._repr_html_() == run._repr_html_()
    assert "\n" not in repr(loaded)
    assert "3 layers × 4 heads" in repr(loaded)
