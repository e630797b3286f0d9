"""What a run shows in a notebook. Oracle: Python's own HTML parser, and the run's own numbers."""

from __future__ import annotations

import io
import shutil
from dataclasses import replace

import pandas as pd
from rich.console import Console

from tests.report.synthetic import make_run, weights_only
from tests.report.test_page import Reader
from theodolite.judging import FAILS, HOLDS, UNDECIDED
from theodolite.passes.run import TABLES, Run
from theodolite.report.findings import Finding, checks, in_a_line, unusual
from theodolite.report.terminal import show_run, tables_as_json


def texts(reader: Reader) -> str:
    return " ".join(text for kind, found in reader.texts.items() if kind != "style" for text in found)


def test_it_names_the_model_and_the_text_and_what_is_unusual(run: Run) -> None:
    """It is escaped, has no script and loads nothing."""
    html = run._repr_html_()
    reader = Reader(html)
    assert reader.open == []
    shown = texts(reader)
    sentences = [text for text, _ in unusual(run, checks(run))]
    for words in ("<img src=x", "16 contexts of 24 tokens", "onerror=alert(1)", *sentences):
        assert words in shown
    assert len(reader.named("li")) == len(sentences) == 5
    assert not {"script", "img", "link", "iframe"} & {tag for tag, _ in reader.elements}
    assert not any(name.startswith("on") or name in ("src", "href") for _, a in reader.elements for name in a)
    assert "url(" not in html
    assert "http" not in html
    sick = replace(run, layers=run.layers.assign(rank_collapse=0.01))._repr_html_()
    assert ("Rank collapse:" in sick, "Rank collapse:" in html) == (True, False)


def test_the_outcome_of_all_checks_is_one_sentence() -> None:
    passed, flagged, undecided = (Finding("", "", answer) for answer in (HOLDS, FAILS, UNDECIDED))
    assert in_a_line([passed] * 6) == "All 6 health checks passed."
    assert in_a_line([passed] * 4 + [flagged] * 2) == "2 of 6 health checks flagged."
    assert in_a_line([passed, flagged, undecided]) == "1 of 3 health checks flagged, 1 not decided."
    assert in_a_line([passed, undecided]) == "1 of 2 health checks not decided."


def test_its_style_touches_nothing_else_and_knows_the_dark(run: Run) -> None:
    reader = Reader(run._repr_html_())
    (own,) = {str(box["class"]) for box in reader.named("div")}
    style = "".join(reader.texts["style"])
    selectors = [part.strip() for rule in style.split("}") for part in rule.split("{")[:-1]]
    assert selectors
    assert all(own in one or one.startswith("@media (prefers-color-scheme: dark)") for one in selectors)


def test_weights_alone_and_empty_tables_show_what_there_is(run: Run) -> None:
    assert "no text was read" in weights_only(run)._repr_html_()
    empty = replace(weights_only(run), heads=pd.DataFrame(), layers=pd.DataFrame(), arrays={})
    assert Reader(empty._repr_html_()).open == []


def test_a_loaded_run_shows_the_same_and_its_name_is_one_line(run: Run, tmp_path) -> None:
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    run.save(tmp_path / "run")
    loaded = Run.load(tmp_path / "run")
    assert loaded._repr_html_() == run._repr_html_()
    assert "\n" not in repr(loaded)
    assert "3 blocks × 4 heads" in repr(loaded)


def printed(run: Run, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, no_color=True)
    show_run(run, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def row(lines: list[str], layer: int) -> int:
    return next(at for at, line in enumerate(lines) if line.split()[:1] == [str(layer)])


def test_80_columns_have_errors_below_their_values_and_nothing_is_cut(run: Run) -> None:
    lines = printed(run, 80)
    assert "…" not in "".join(lines)
    values, errors = lines[row(lines, 0)], lines[row(lines, 0) + 1]
    for value, error in (("0.97", "±.05"), ("14", "±.5")):
        assert values.index(value) + len(value) == errors.index(error) + len(error)
    assert not any("±" in line for line in printed(make_run(), 80))
    assert any("Query-key spectra" in line for line in printed(weights_only(run), 100))


def test_json_has_every_table_that_has_rows(run: Run) -> None:
    tables = tables_as_json(run)
    assert set(tables) == {"provenance", *(name for name in TABLES if len(getattr(run, name)))}
    assert len(tables["constituents"]) == len(run.constituents)
    assert tables["attribution"][0]["group"] == "position"
    assert set(tables_as_json(weights_only(run))) == {"provenance", "heads"}
