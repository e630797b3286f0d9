"""Oracles: Python's own HTML parser, json and pandas read back what was written; the outcome says what it must be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from tests.report.synthetic import HOSTILE
from tests.report.test_page import Reader
from theodolite.errors import WorkError
from theodolite.judging import FAILS, HOLDS, IN_PART, UNDECIDED, UNTESTABLE, Verdict, independent
from theodolite.passes.run import Run
from theodolite.report.outcome import Outcome, Reading, tally, write_index, write_outcome
from theodolite_papers import EXPERIMENTS, Study
from theodolite_papers.declarations import declarations
from theodolite_papers.experiment import claims

CLAIMS = replace(
    claims(
        declarations()["geometry/claims"],
        [EXPERIMENTS[f"geometry/{name}"] for name in ("table1", "table2", "table3", "figure2")],
    ),
    name="geometry/some-claims",
)
FIGURE_2 = EXPERIMENTS["geometry/figure2"]


def outcome_of(run: Run, name: str) -> Outcome:
    return Study(run).outcome(EXPERIMENTS.get(name, CLAIMS))


@pytest.mark.parametrize("name", ["geometry/figure2", "geometry/table1", "geometry/figure7", CLAIMS.name])
def test_a_page_holds_every_verdict_figure_and_table(run, tmp_path, name):
    outcome = outcome_of(run, name)
    page = write_outcome(EXPERIMENTS.get(name, CLAIMS), outcome, run.provenance, tmp_path)
    assert page == tmp_path / name.replace("/", "-") / "index.html"
    reader = Reader(page.read_text())
    assert not reader.open
    texts = " ".join(text for kind in reader.texts.values() for text in kind)
    if len(outcome.verdicts) > 1:
        counted = independent(outcome.verdicts)
        assert f"{len(counted)} claims: " in texts
        for answer in {verdict.answer for verdict in outcome.verdicts}:
            count = sum(verdict.answer == answer for verdict in counted)
            several = {"holds": "hold", "fails": "fail"}.get(answer, answer)
            assert f"{count} {several if count > 1 else answer}" in texts
    for verdict in outcome.verdicts:
        assert verdict.claim in texts
        assert verdict.evidence.replace("\u00a0", " ") in texts
    plots = {element["data-figure"] for element in reader.named("div") if element.get("data-figure")}
    assert plots == {exhibit.key for exhibit in outcome.exhibits}
    for text, element in zip(reader.texts["script"], reader.named("script")[1:], strict=False):
        if element.get("type") == "application/json":
            json.loads(text)
    scripts = [element for element in reader.named("script") if element.get("type") != "application/json"]
    assert len(scripts) == 2
    assert len({script["nonce"] for script in scripts}) == 1
    assert (page.parent / scripts[0]["src"]).resolve() == (tmp_path / "plotly.min.js").resolve()
    assert (tmp_path / "plotly.min.js").is_file()
    loaded = json.loads((page.parent / "result.json").read_text())
    assert [Verdict(**verdict) for verdict in loaded["verdicts"]] == outcome.verdicts
    assert loaded["provenance"] == run.provenance
    if name == "geometry/table1":
        rows = loaded["tables"]["averages"]
        assert rows[0]["rank estimate"] == pytest.approx(run.layers["rank_screenot"].mean())
        assert rows[1]["incoherence"] is None  # NaN: the paper prints a dash for NanoGPT
    for table, frame in outcome.tables.items():
        back = pd.read_parquet(page.parent / f"table-{table}.parquet")
        pd.testing.assert_frame_equal(back, frame, check_dtype=False)
    assert not list(tmp_path.glob("*.writing")) + list(tmp_path.glob("*.old"))


def test_collected_verdicts_name_their_experiments_and_link_the_pages_that_are_there(run, tmp_path):
    """Oracle: the outcomes that were collected."""
    study, table1 = Study(run), EXPERIMENTS["geometry/table1"]
    write_outcome(table1, study.outcome(table1), run.provenance, tmp_path)
    collected = study.outcome(CLAIMS)
    names = [verdict.experiment for verdict in collected.verdicts]
    assert [v for v in collected.verdicts if v.experiment == table1.name] == study.outcome(table1).verdicts
    assert names == collected.tables["claims"]["experiment"].tolist()
    page = write_outcome(CLAIMS, collected, run.provenance, tmp_path)
    reader = Reader(page.read_text())
    assert "(geometry/table2)" in page.read_text()
    links = [element["href"] for element in reader.named("a") if "geometry-" in str(element["href"])]
    assert links == ["../geometry-table1/index.html"] * names.count("geometry/table1")
    judged = pd.read_parquet(page.parent / "table-judged.parquet")
    assert judged.loc[~judged["place"].str.contains(".", regex=False), "experiment"].tolist() == names
    assert write_index(tmp_path) is not None


def test_hostile_text_stays_text(run, tmp_path):
    provenance = {
        **run.provenance,
        "model": {**run.provenance["model"], "id": HOSTILE[0]},
        "corpus": {**run.provenance["corpus"], "name": HOSTILE[7], "labels": HOSTILE[:4]},
    }
    hostile = replace(run, provenance=provenance)
    outcome = outcome_of(hostile, "geometry/figure2")
    said = Outcome(
        [Reading(*HOSTILE[:3])],
        [Verdict(text, HOLDS, text) for text in HOSTILE],
        {"table": pd.DataFrame({HOSTILE[0]: HOSTILE})},
        outcome.exhibits,
    )
    page = write_outcome(FIGURE_2, said, hostile.provenance, tmp_path).read_text()
    plain = Reader(write_outcome(FIGURE_2, outcome, run.provenance, tmp_path / "plain").read_text())
    reader = Reader(page)
    assert len(reader.named("script")) == len(plain.named("script"))
    assert not reader.named("b")
    assert not reader.named("img")
    assert "\x1b" not in page
    assert "\u202e" not in page
    index = write_index(tmp_path)
    assert index is not None
    assert not Reader(index.read_text()).named("script")


def test_the_same_outcome_gives_the_same_bytes_and_replaces_what_was_there(run, tmp_path):
    outcome = outcome_of(run, "geometry/figure3")
    first = {
        p.name: p.read_bytes()
        for p in _files(write_outcome(EXPERIMENTS["geometry/figure3"], outcome, run.provenance, tmp_path))
    }
    (tmp_path / "geometry-figure3" / "stale.txt").write_text("from before")
    again = outcome_of(run, "geometry/figure3")
    second = {
        p.name: p.read_bytes()
        for p in _files(write_outcome(EXPERIMENTS["geometry/figure3"], again, run.provenance, tmp_path))
    }
    assert first == second


def _files(page: Path) -> list[Path]:
    return sorted(page.parent.iterdir())


def test_the_index_lists_what_is_there_and_passes_over_what_is_damaged(run, tmp_path):
    assert write_index(tmp_path) is None
    for name in ("geometry/figure3", "geometry/table1"):
        write_outcome(EXPERIMENTS[name], outcome_of(run, name), run.provenance, tmp_path)
    (tmp_path / "geometry-broken").mkdir()
    (tmp_path / "geometry-broken" / "result.json").write_text("{")
    index = write_index(tmp_path)
    assert index is not None
    links = [element["href"] for element in Reader(index.read_text()).named("a")]
    assert "result.json is damaged there: geometry-broken." in index.read_text()
    assert links == ["geometry-table1/index.html", "geometry-figure3/index.html"]
    for link in links:
        assert (tmp_path / str(link)).is_file()


def test_marks_tell_the_answers_apart_and_a_number_that_decides_several_claims_counts_once(run, tmp_path):
    """Oracle: by hand; what is not testable has no number, and counts every time."""
    verdicts = [Verdict(answer, answer, "1") for answer in (HOLDS, IN_PART, FAILS, UNDECIDED, UNTESTABLE)]
    reader = Reader(write_outcome(FIGURE_2, Outcome([], verdicts, {}), run.provenance, tmp_path).read_text())
    marks = [element.get("class") for element in reader.named("li")]
    assert [mark for mark in marks if mark] == ["holds", "partly", "fails", "open", "open"]
    assert reader.texts["span"][::2] == ["✓", "◐", "✗", "–", "–"]
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkError, match="cannot write"):
        write_outcome(FIGURE_2, Outcome([], [], {}), run.provenance, tmp_path / "file")
    shared = [Verdict(f"claim {place}", HOLDS, "rank 8; criterion: at most 16") for place in range(3)]
    others = [Verdict("another", FAILS, "rank 20; criterion: at most 16")]
    missing = [Verdict(f"missing {place}", UNTESTABLE, "no model") for place in range(2)]
    noted = "; claims judged by the same number count once"
    assert tally([*shared, *others, *missing]) == f"4 claims: 1 holds, 1 fails, 2 not testable here{noted}"
    assert tally([*others, *missing]) == "3 claims: 1 fails, 2 not testable here"
