"""Oracles: the columns that a synthetic run was given, and what must follow from changing them."""

from __future__ import annotations

import re
import subprocess
import sys
from base64 import b64decode
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import theodolite_papers
from tests.papers.shared import answers, assert_whole, changed
from tests.report.drawn import drawn
from tests.report.synthetic import make_run, weights_only
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.estimates import Estimate
from theodolite.judging import (
    FAILS,
    HOLDS,
    UNDECIDED,
    UNTESTABLE,
    Criterion,
    independent,
    judge,
    untestable,
)
from theodolite.passes.survey import survey
from theodolite_papers import ALIASES, EXPERIMENTS, Study, find, reproduce
from theodolite_papers.declarations import PAPERS, Declaration, declarations
from theodolite_papers.experiment import Outcome, claims, criterion, share_of_heads, shown
from theodolite_papers.hidden_geometry import published
from theodolite_papers.hidden_geometry.layer_columns import other_run, random_run

OF_THE_SURVEY = [
    EXPERIMENTS[f"geometry/{name}"]
    for name in (
        *(f"table{number}" for number in range(1, 7)),
        *(f"figure{number}" for number in (1, 2, 3, 5, 7, 8, 24)),
    )
]
FROM_THE_RUN = [experiment.name for experiment in OF_THE_SURVEY if "model" not in experiment.declared.needs]
CLAIMS = claims(declarations()["geometry/claims"], OF_THE_SURVEY)


@pytest.mark.parametrize("name", FROM_THE_RUN)
def test_every_verdict_carries_a_number_and_every_figure_its_caption(run, name):
    outcome = reproduce(name, run)
    assert outcome.verdicts
    assert_whole(outcome)
    for exhibit in outcome.exhibits:
        assert any(len(drawn(exhibit.figure, axis)) for axis in ("x", "y", "z"))
        assert exhibit.source.startswith("Song & Zhong 2024")


def test_table_1_holds_for_this_run_and_fails_when_its_numbers_do_not(run):
    good = reproduce("geometry/table1", run)
    assert answers(good) == [UNTESTABLE, *[HOLDS] * 3]  # the energy within the rank needs the text
    assert [part.answer for part in good.verdicts[0].parts] == [HOLDS, UNTESTABLE]
    layers = len(run.layers)
    bad = changed(
        run,
        rank=np.full(layers, 19),
        relative_norm=np.full(layers, 0.05),
        similarity_between=run.layers["similarity_within"],
        incoherence_mean=np.full(layers, 0.9),
    )
    assert answers(reproduce("geometry/table1", bad)) == [FAILS] * 4
    table = reproduce("geometry/table1", run).tables["averages"]
    assert len(table) == 1 + len(published.TABLE_1)
    assert table["rank estimate"][0] == pytest.approx(run.layers["rank_screenot"].mean())
    assert table["rank estimate sd"][0] == pytest.approx(run.layers["rank_screenot"].std(ddof=0))


def test_standard_errors_are_used_where_the_run_has_them(run):
    layers = len(run.layers)
    unsure = changed(run, rank=np.full(layers, 17.0), rank_se=np.full(layers, 2.0))
    verdict = reproduce("geometry/table1", unsure).verdicts[0].parts[0]
    assert verdict.answer == UNDECIDED
    assert "17 ± 2 (8 groups of contexts);" in verdict.evidence
    sure = changed(unsure, rank_se=np.full(layers, 0.1), rank_screenot_se=0.1)
    assert reproduce("geometry/table1", sure).verdicts[0].parts[0].answer == HOLDS
    figure = reproduce("geometry/table4", sure).exhibits[0].figure
    np.testing.assert_allclose(figure.data[-1].error_y.array, 0.1, rtol=1e-6)


def test_what_the_text_cannot_decide_is_not_decided(run):
    short = changed(make_run(blocks=3, length=20, width=64), rank_screenot=9.0)
    assert reproduce("geometry/table1", short).verdicts[0].answer == UNTESTABLE  # no room for ScreeNOT
    assert reproduce("geometry/table4", short).verdicts[0].answer == UNTESTABLE
    assert "use contexts of 33 tokens or more" in reproduce("geometry/table3", short).verdicts[0].evidence
    labels = torch.full_like(run.arrays["context_label"], -1)
    unlabelled = replace(run, arrays=run.arrays | {"context_label": labels})
    assert reproduce("geometry/table1", unlabelled).verdicts[2].answer == UNTESTABLE
    assert reproduce("geometry/figure5", run).verdicts[0].answer == UNTESTABLE  # no additions


def test_table_3_takes_the_rows_that_the_run_has(run):
    """Oracle: columns written down; PPᵀ is that of Table 3, its rows not normalised."""
    missing = reproduce("geometry/table3", run)
    first = missing.tables["shares"].iloc[0]
    for k in (1, 3, 5, 10):
        assert first[f"K = {k}"] == pytest.approx(run.layers[f"pp_low_frequency_{k}"].mean())
    rough = changed(run, pp_low_frequency_10=0.3, low_frequency_10=0.9)
    assert reproduce("geometry/table3", rough).verdicts[0].answer == FAILS
    assert answers(missing) == [HOLDS, UNTESTABLE, UNTESTABLE]
    assert [row.here for row in missing.readings[1:]] == ["missing in this run"] * 2
    shares = {f"{row}_low_frequency_{k}": 0.1 * k for row in ("pwp", "qk") for k in (1, 3, 5, 10)}
    full = reproduce("geometry/table3", replace(run, heads=run.heads.assign(**shares)))
    assert answers(full) == [HOLDS] * 3
    nothing = reproduce("geometry/table3", replace(rough, heads=run.heads.assign(**shares)))
    assert answers(nothing) == [FAILS, UNTESTABLE, UNTESTABLE]
    assert "that could be inherited" in nothing.verdicts[2].evidence
    table = full.tables["shares"].set_index(["row", "where"])
    assert table.loc[("QK matrix", "this run"), "K = 3"] == pytest.approx(0.3)
    assert table.loc[("QK matrix", "GPT-2, Table 3"), "K = 10"] == 0.912


def test_figure_2_is_of_the_columns_and_shows_the_cosines_of_the_bases(run):
    """Oracle: the columns, and numpy on the run's own arrays."""
    outcome = reproduce("geometry/figure2", run)
    gap = run.layers["cosine_within"] - run.layers["cosine_between"]
    assert [row.estimate.value for row in outcome.verdicts[2].parts] == gap.tolist()
    assert answers(outcome)[:3] == [HOLDS] * 3
    positions = run.arrays["positional_basis"][2].numpy()
    figure = outcome.exhibits[0].figure
    drawn = outcome.exhibits[0].choice.variants()["2"][0]["z"]
    z = np.frombuffer(b64decode(drawn["bdata"]), drawn["dtype"]).reshape(figure.data[0].z.shape)
    first = positions[1] @ positions[-1] / np.linalg.norm(positions[1]) / np.linalg.norm(positions[-1])
    shown = len(z) - 40
    assert z[0, shown - 1] == pytest.approx(first, abs=1e-6)
    assert "&lt;b&gt;strings" in str(figure.layout.yaxis.ticktext)


def test_robustness_is_measured_on_another_text(opened):
    """Oracle: two surveys made here, one after the other."""
    model = opened("gpt2")
    text = Corpus.from_texts(["The angle is read twice, then once more. " * 20], model.tokenizer, 48, 12)
    code = Corpus.from_texts(["def read(angle):\n    return 2 * angle\n" * 20], model.tokenizer, 48, 12)
    run, on_code = survey(model, text), survey(model, code)
    table = reproduce("geometry/table2", run, model, text, code).tables["robustness"]
    np.testing.assert_array_equal(table["rank"], run.layers["rank"])
    np.testing.assert_array_equal(table["other_rank"], on_code.layers["rank"])
    study = Study(run, model)
    outcome = study.outcome(EXPERIMENTS["geometry/figure24"])
    random = Corpus.random_tokens(model.tokenizer, 48, 12, 0)
    assert outcome.runs["random"]["corpus"]["sha256"] == random.sha256
    assert random_run(study) is other_run(study)  # read once
    depth = reproduce("geometry/figure8", run, model)
    assert depth.verdicts[0].answer in (HOLDS, FAILS, UNTESTABLE)
    largest = depth.tables["cosines"].iloc[0, 1:].abs().max()  # of means over tokens
    what, value = depth.verdicts[1].evidence.split(": ")[:2]
    assert "mean cosine with layer 0 that is largest in size" in what
    assert abs(float(value.split(" ±")[0].replace("−", "-"))) == pytest.approx(largest, abs=0.1)


def test_a_small_model_of_another_family_gives_every_verdict(opened):
    """No family, short text or missing label may break an experiment; their numbers have tests of their own."""
    model = opened("llama3")
    corpus = Corpus.random_tokens(model.tokenizer, 40, 8)
    study = Study(survey(model, corpus), model, corpus)
    outcome = study.outcome(CLAIMS)
    table = outcome.tables["claims"]
    assert set(table["experiment"]) == {experiment.name for experiment in OF_THE_SURVEY}
    assert len(table) == len(outcome.verdicts)
    assert len(independent(outcome.verdicts)) == sum(int(row.here) for row in outcome.readings)


def test_claims_collect_all_and_say_what_is_missing(run):
    table = Study(run).outcome(CLAIMS).tables["claims"].set_index("experiment")
    assert set(table.index) == {experiment.name for experiment in OF_THE_SURVEY}
    assert table.loc["geometry/figure8", "answer"] == UNTESTABLE
    assert "needs the model" in table.loc["geometry/figure8", "evidence"]
    without_text = Study(weights_only(run)).outcome(CLAIMS)
    assert set(without_text.tables["claims"]["answer"]) == {UNTESTABLE}


def test_names_groups_and_the_nearest_ones():
    assert [experiment.name for experiment in find("geometry")] == [
        n for n in EXPERIMENTS if n.startswith("geometry/")
    ]
    assert {experiment.name for experiment in OF_THE_SURVEY} < set(EXPERIMENTS)
    assert [experiment.name for experiment in find("geometry/table1,geometry/figure3")] == [
        "geometry/table1",
        "geometry/figure3",
    ]
    eleven = find("geometry/figure11")[0]
    assert eleven.fill is EXPERIMENTS["geometry/figure1"].fill
    assert "BLOOM on OpenWebText" in eleven.title
    assert not set(ALIASES) & set(EXPERIMENTS)
    for wrong, near in (("geometry/tabel1", "geometry/table1"), ("figure3", "geometry/figure3")):
        with pytest.raises(UsageError, match=near):
            find(wrong)
    with pytest.raises(UsageError, match="lists them all"):
        find("zzz")
    with pytest.raises(UsageError, match="did you mean geometry"):
        find("geom")
    assert [experiment.name for experiment in find("geometry/table1, ")] == ["geometry/table1"]
    with pytest.raises(UsageError, match="names no experiment"):
        find(", ")


def test_what_is_missing_is_said_in_one_line(run, opened):
    with pytest.raises(UsageError, match="geometry/figure8 needs the model"):
        reproduce("geometry/figure8", run)
    with pytest.raises(UsageError, match="needs 'rank_screenot', which this run lacks"):
        reproduce("geometry/table1", weights_only(run))
    arrays = {**run.arrays, "context_label": torch.full_like(run.arrays["context_label"], -1)}
    with pytest.raises(UsageError, match="at least two labels"):
        reproduce("geometry/figure2", replace(run, arrays=arrays))
    with pytest.raises(UsageError, match="name one"):
        reproduce("geometry", run)
    with pytest.raises(UsageError, match="is not the model of this run"):
        reproduce("geometry/table1", run, opened("gpt2"))


def test_what_is_declared_is_there():
    """Oracle: the modules' functions, and the parts that a caption has."""
    for name, of in declarations().items():
        assert EXPERIMENTS[name].name == name
        assert (EXPERIMENTS[name].title, EXPERIMENTS[name].paper) == (of.title, of.paper)
        for caption in of.figures.values():
            assert caption.keys() - {"wide"} == {"title", "shows", "look_for", "source"}


@pytest.mark.parametrize("group", list(PAPERS))
def test_what_is_claimed_is_judged_and_what_is_judged_is_claimed(group):
    """Oracle: the code of the paper, which names every claim and every criterion that no claim has."""
    experiments = [of for name, of in declarations().items() if name.startswith(f"{group}/")]
    files = (Path(theodolite_papers.__file__).parent / PAPERS[group]).glob("*.py")
    code = "".join(path.read_text(encoding="utf-8") for path in files)
    used = set(re.findall(rf'criterion\("{group}/([\w-]+)"\)', code))
    for of in experiments:
        for name, claim in of.claims.items():
            assert re.search(rf'"{name}[".]', code), f"{of.name} declares {name}, and nothing judges it"
            parts = [part for part in claim.values() if isinstance(part, dict)] or [{}]
            for part in parts:
                whole = {**claim, **part}
                assert whole["claim"]
                assert whole["what"]
                used.add(whole["criterion"])
    assert used == set(experiments[0].criteria)


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("rank", max(max(row) for rows in published.RANK.values() for row in rows)),
        ("stable-rank", max(max(row[1:]) for rows in published.STABLE_RANK.values() for row in rows)),
        ("smooth", min(row.low_frequency for row in published.TABLE_2 if row.model in ("BERT", "BLOOM"))),
        ("separation", np.nanmax([row.between[0] / row.within[0] for row in published.TABLE_1])),
        ("clusters", np.nanmin([row.within[0] - row.between[0] for row in published.TABLE_1])),
        ("rank-change", max(abs(row.rank[0] - row.trained_rank) for row in published.TABLE_2)),
    ],
)
def test_limits_from_tables_are_those_of_the_tables(name, limit):
    """Oracle: the published tables, each of whose rows holds by its own criterion."""
    judged = criterion(f"geometry/{name}")
    assert judged.limit == pytest.approx(limit)
    assert judged.met(limit)


def test_additions_are_rough_and_no_row_of_table_2_is():
    """Oracle: the published shares of low frequencies."""
    rough = criterion("geometry/unlike-language")
    assert rough.met(published.LOW_FREQUENCY_ADDITION)
    assert not rough.met(min(row.low_frequency for row in published.TABLE_2))


def test_claims_are_judged_as_declared():
    """Oracle: `judge` and `share_of_heads` on the same words, written out."""
    most = {"side": "at least", "source": "one of {groups}"}
    declared = Declaration(
        "geometry/made-up",
        "",
        "",
        "",
        claims={
            "rank": {"claim": "P has a low rank ({place})", "what": "rank of {layers}", "criterion": "low"},
            "both": {"claim": "Both", "least": {"what": "the least", "criterion": "low", "more": "; {why}"}},
            "most": {"claim": "Most", "what": "share", "criterion": "most"},
            "rest": {"claim": "The rest", "what": "it", "criterion": "low"},
        },
        criteria={"low": {"side": "at most", "limit": 2.0, "source": "Table 1"}, "most": most},
    )
    outcome, estimate = Outcome(declared=declared), Estimate(1.0, 0.1, 8, "groups")
    low = Criterion("at most", 2.0, "Table 1")
    judged = outcome.judge("rank", estimate, place="Fig. 1", layers=3, side="left")  # of the figure
    assert judged == judge("P has a low rank (Fig. 1)", "rank of 3", estimate, low)
    part = outcome.verdict("both.least", estimate, why="ours")
    alone = judge("Both", "the least", estimate, low)
    assert part == replace(alone, evidence=f"{alone.evidence}; ours")
    criterion = Criterion("at least", 0.25, "one of 4")
    share = outcome.judge("most", [True, False, True], limit=0.25, groups=4)
    assert share == judge("Most", "share", share_of_heads([True, False, True], criterion), criterion)
    assert outcome.unjudged == ["rest"]
    outcome.cannot_judge("rest", "no text")
    assert outcome.verdicts == [judged, share, untestable("The rest", "no text")]
    assert outcome.unjudged == []
    with pytest.raises(KeyError, match="undeclared"):
        outcome.judge("undeclared", estimate)


def test_a_list_of_names_imports_no_experiment():
    """Oracle: a process of its own: what is heavy stays out of it."""
    code = (
        "import sys; from theodolite_papers import EXPERIMENTS, ALIASES; "
        "print(len([*EXPERIMENTS, *ALIASES]), [m for m in ('torch', 'pandas', 'plotly') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split(maxsplit=1) == [str(len([*EXPERIMENTS, *ALIASES])), "[]\n"]


def test_items_are_shown_as_they_are_done():
    calls: list[tuple[object, ...]] = []
    for item in shown("ab", "letters", lambda *what: calls.append(what)):
        calls.append((item,))
    assert calls == [("letters", 0, 2), ("a",), ("letters", 1, 2), ("b",), ("letters", 2, 2)]
