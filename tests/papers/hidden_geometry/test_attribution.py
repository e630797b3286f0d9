"""Oracles: planted heads, tables laid down, GPT-2's own weights by hand, softmax by torch, HTML read back."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
import transformers

from tests.calls import call
from tests.logits.test_attribution import planted  # noqa: F401  (a fixture)
from tests.papers.hidden_geometry.planted import drawn
from tests.papers.shared import answers, outcome_of, verdicts_of
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError, WorkError
from theodolite.judging import FAILS, HOLDS, UNDECIDED, UNTESTABLE
from theodolite.logits.constituents import constituents
from theodolite.measure.attribution import ATTRIBUTED
from theodolite.models.texts import Focus
from theodolite.passes.survey import survey
from theodolite.theory.decomposition import PARTS
from theodolite_papers import EXPERIMENTS, Study, reproduce
from theodolite_papers.hidden_geometry import attribution as experiment
from theodolite_papers.hidden_geometry import smoothness
from theodolite_papers.hidden_geometry.attribution import (
    _judge_mean,
    _retained_rows,
    judge_rough,
    positional_logits,
    share_grids,
)

LENGTH = 24


@pytest.fixture(scope="module")
def surveyed(opened):
    """surveyed(family) → a model with its run and text."""
    surveys = {}

    def of(family: str):
        if family not in surveys:
            model = opened(family)
            corpus = Corpus.random_tokens(model.tokenizer, LENGTH, 8)
            surveys[family] = survey(model, corpus), model, corpus
        return surveys[family]

    return of


def _attribution(run, **only: dict[str, float]):
    """The run with six heads a pattern, score 0.8 over uniform attention of 0.1, and scores with one group only."""
    rows = [
        {"layer": layer, "head": place, "pattern": pattern, "score": 0.8, "group": group, "share": 0.2}
        | {"only": groups.get(group, 0.1), "without": 0.3, "uniform": 0.1}
        for place, (pattern, groups) in enumerate(only.items())
        for layer in range(6)
        for group in ATTRIBUTED
    ]
    return replace(run, attribution=pd.DataFrame(rows))


def test_one_head_and_few_heads_decide_nothing(run):
    """Oracle: one head of one, and all of five or six: heads that are so by a coin agree one time in 16 or 32."""
    of_six = _attribution(run, previous={"position": 0.5, "pos-pos": 0.5})
    for heads, answer in ((1, UNTESTABLE), (5, UNDECIDED), (6, HOLDS)):
        table = of_six.attribution[of_six.attribution["layer"] < heads]
        verdicts = (
            Study(replace(run, attribution=table)).outcome(EXPERIMENTS["geometry/attribution"]).verdicts
        )
        assert verdicts[2].answer == answer


def test_planted_heads_are_judged_as_they_were_planted(planted):  # noqa: F811
    """Oracle: the weights: head 0 reads positions and attends to the one before, head 1 equal tokens."""
    corpus = Corpus.random_tokens(planted.vocabulary, 40, 256)
    run = survey(planted, corpus)
    study = Study(run, planted, corpus)
    for name in ("geometry/figure6", "geometry/attribution"):
        verdicts = study.outcome(EXPERIMENTS[name]).verdicts
        assert [v.answer for v in verdicts] == [UNTESTABLE] * 5  # one head each
        assert all(": 1 ± 0.8 (1 head)" in v.evidence for v in verdicts[:4])
        assert ["ours" in v.claim for v in verdicts] == [False, True, False, True, False]
    assert "L0H0" in study.outcome(EXPERIMENTS["geometry/figure6"]).verdicts[2].evidence
    shares = study.outcome(EXPERIMENTS["geometry/figure6"]).tables["shares"].set_index("panels")
    assert shares.loc["L0H0", "position"] > 0.8
    assert shares.loc["L0H1", "context"] > 0.8


def test_a_claim_needs_the_named_constituent_to_keep_half_and_most(run):
    """Oracle: the numbers laid down: (0.5 − 0.1) / 0.7 is more than half, (0.4 − 0.1) / 0.7 less."""
    attribution = EXPERIMENTS["geometry/attribution"]
    held = _attribution(
        run,
        previous={"position": 0.5, "pos-pos": 0.5},
        same={"context": 0.5, "cvec-cvec": 0.4},
        induction={"context": 0.5, "cvec-cvec": 0.5},
    )
    # Same, previous, shifted.
    assert answers(Study(held).outcome(attribution)) == [FAILS, HOLDS] + [HOLDS] * 4
    failed = _attribution(
        run,
        previous={"position": 0.4, "pos-pos": 0.4},
        same={"context": 0.5, "cvec-cvec": 0.5, "constant": 0.6},
        induction={"position": 0.7, "pos-pos": 0.7},
    )
    outcome = Study(failed).outcome(attribution)
    assert answers(outcome) == [FAILS] * 6
    table = outcome.tables["attribution"].query("layer == 0").set_index(["pattern", "group"])
    assert table.loc[("previous", "position"), "kept"] == pytest.approx(0.3 / 0.7)
    assert table.loc[("previous", "position"), "left"] == pytest.approx(0.2 / 0.7)
    weak = replace(held, attribution=held.attribution.assign(score=0.19))
    assert answers(Study(weak).outcome(attribution)) == [UNTESTABLE] * 3
    near_even = replace(held, attribution=held.attribution.assign(uniform=0.45))
    assert answers(Study(near_even).outcome(attribution)) == [UNTESTABLE] * 3


def _shares(run, per_head: list[dict[tuple[str, str], float]]):
    rows = [
        {"layer": head // 4, "head": head % 4, "query": query, "key": key}
        | {"share": rows.get((query, key), 0.0), "standard_error": 0.0}
        for head, rows in enumerate(per_head)
        for query, key in [*((q, k) for q in PARTS for k in PARTS), ("additive", "")]
    ]
    return replace(run, constituents=pd.DataFrame(rows))


def test_positional_constituents_are_counted_where_they_are_the_largest(run):
    """Oracle: a table in which 10, 6 and none of 20 heads owe most to position: of four groups, five by chance."""
    pos, context, constant = ("pos", "mean"), ("resid", "ctx"), ("mean", "bias")
    for count, answer, shown in ((10, HOLDS, "0.50"), (6, UNDECIDED, "0.30"), (0, FAILS, "0")):
        heads = [{pos: 0.6, context: 0.4}] * count + [{constant: 0.7, context: 0.3}] * (20 - count)
        outcome = Study(_shares(run, heads)).outcome(EXPERIMENTS["geometry/constituents"])
        assert answers(outcome) == [FAILS, answer]  # pos × mean is no PWPᵀ
        assert f": {shown} ± 0.1" in outcome.verdicts[1].evidence
        heads = [{("pos", "pos"): 0.6} | {context: 0.4}] * count + heads[count:]
        assert answers(Study(_shares(run, heads)).outcome(EXPERIMENTS["geometry/constituents"])) == [
            answer,
            answer,
        ]
    table = outcome.tables["shares"]
    assert "additive" not in table
    assert table["constant"].sum() == pytest.approx(0.7 * 20)
    choice = outcome.exhibits[0].choice
    assert {"z", "text"} <= choice.variants()["0"][0].keys()
    assert choice.draw("0").data[0].z.shape == (5, 4)
    assert table["pos-pos"].sum() == 0  # pos × mean is position, and not pos-pos


def test_the_mean_changes_the_largest_constituent_or_not(run):
    """Oracle: a table; μ × pos of 0.5 lifts pos-pos above a cvec-cvec of 0.4."""
    calm = [{("pos", "pos"): 0.1, ("ctx", "ctx"): 0.4, ("bias", "pos"): 0.5}] * 60
    moved = [{("pos", "pos"): 0.1, ("ctx", "ctx"): 0.4, ("mean", "pos"): 0.5}] * 15
    outcome = outcome_of("geometry/figure30")
    nothing = replace(run, constituents=pd.DataFrame())
    for surveyed in (_shares(run, calm), _shares(run, calm[15:] + moved), nothing):
        _judge_mean(outcome, surveyed)
    assert [verdict.answer for verdict in outcome.verdicts] == [HOLDS, FAILS, UNTESTABLE]
    assert ": 0.75 ±" in outcome.verdicts[1].evidence


def test_grids_agree_with_the_heads_table(surveyed):
    """Oracle: the heads table, summed elsewhere."""
    run, _, _ = surveyed("gpt2")
    grids = share_grids(run)
    whole = ("position", "context", "cross", "constant", "additive")
    for name in whole:
        np.testing.assert_allclose(grids[name].ravel(), run.heads[f"share_{name}"], atol=1e-12)
    np.testing.assert_allclose(sum(grids[name] for name in whole), 1, atol=1e-6)
    strict = run.constituents.query("query == 'pos' and key == 'pos'")["share"]
    np.testing.assert_allclose(grids["pos-pos"].ravel(), strict, atol=1e-12)


@pytest.mark.parametrize("family", ["gpt2", pytest.param("llama3", marks=pytest.mark.slow)])
def test_every_family_gives_its_panels(surveyed, checkpoint, family):
    """Oracle: scores are what transformers' own eager attention pays to the previous token, on the repeated tokens; the
    heads shown are those with the highest scores, the tokens those read.
    """
    run, model, corpus = surveyed(family)
    ids, _ = experiment.repeated_patterns(model, LENGTH, 16, run.provenance["seed"])
    eager = transformers.AutoModel.from_pretrained(checkpoint(family), attn_implementation="eager").eval()
    with torch.no_grad():
        attention = torch.stack(eager(input_ids=ids[:4], output_attentions=True).attentions)
    previous = attention.diagonal(-1, -2, -1).mean((1, 3))  # (layers, heads)
    for row in run.attribution.query("pattern == 'previous'").itertuples():
        assert row.score == pytest.approx(float(previous[row.layer, row.head]), rel=1e-4)
    study = Study(run, model, corpus)
    outcome = study.outcome(EXPERIMENTS["geometry/figure6"])
    top = run.attribution.sort_values("score", ascending=False).groupby("pattern").first()
    expected = {f"L{row.layer}H{row.head}" for row in top.itertuples()}
    assert {exhibit.key for exhibit in outcome.exhibits} == expected
    assert set(outcome.tables["shares"]["panels"]) == expected
    ids = outcome.tables["prompt"]["token_id"].to_numpy()
    assert (ids[: LENGTH // 2] == ids[LENGTH // 2 :]).all()
    assert ("rotates" in outcome.exhibits[0].shows) == (family not in ("gpt2", "bert", "bloom"))
    both = study.outcome(EXPERIMENTS["geometry/figure30"])
    assert len(both.exhibits) == 2 * len(expected)
    for exhibit in [*outcome.exhibits, *both.exhibits]:
        assert exhibit.figure.data


def test_what_is_kept_with_the_mean_within_pos(surveyed):
    """Oracle: softmax by torch of the logits (mean + pos) × (mean + pos), scored along the diagonal."""
    run, model, _ = surveyed("gpt2")
    retained = pd.DataFrame(_retained_rows(Study(run, model), 1, 2)).set_index(["pattern", "mean", "group"])
    ids, _ = experiment.repeated_patterns(model, LENGTH, 16, run.provenance["seed"])
    split = constituents(model, ids, 1, decomposition=run)
    logits = split.logits_of(2)
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)

    def score(whole: torch.Tensor) -> float:
        weights = whole.masked_fill(later, -torch.inf).softmax(-1)
        return float(weights.diagonal(-1, -2, -1).mean())

    even = score(torch.zeros_like(logits[:, 0, 0]))
    whole = score(logits.sum((1, 2)))
    row = retained.loc[("previous", "within pos", "pos-pos")]
    assert (row["score"], row["uniform"]) == pytest.approx((whole, even), rel=1e-6)
    assert whole > even
    for place, only in (
        (("within pos", "pos-pos"), logits[:, :2, :2].sum((1, 2))),
        (("apart", "pos-pos"), logits[:, 1, 1]),
        (("within pos", "constant"), logits[:, 4, 4]),
    ):
        expected = (score(only) - even) / (whole - even)
        assert retained.loc[("previous", *place), "kept"] == pytest.approx(expected, rel=1e-4)


def test_positional_logits_are_those_of_the_weights(surveyed):
    """Oracle: GPT-2's c_attn by hand, between the bases of two groups."""
    run, model, corpus = surveyed("gpt2")
    width, heads = model.width, [1, 3]
    weights = model.hf.transformer.h[1].attn.c_attn.weight.detach().double()
    w_q, w_k = (
        weights[:, side * width : (side + 1) * width].unflatten(1, (model.heads, -1))[:, heads]
        for side in (0, 1)
    )
    one, other = drawn(1, LENGTH - 1, width), drawn(2, LENGTH - 1, width)
    logits = [torch.einsum("td,dhe,fhe,sf->hts", a, w_q, w_k, b) for a, b in ((one, other), (other, one))]
    expected = sum(logits) / 2 / model.head_width**0.5
    got = positional_logits(torch.stack([one, other]), model.head_weights(1), heads, list(range(LENGTH - 1)))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    outcome = Study(run, model, corpus).outcome(EXPERIMENTS["geometry/figure19"])
    np.testing.assert_array_equal(
        outcome.tables["smoothness"]["pwp_low_frequency_3"], run.heads["pwp_low_frequency_3"]
    )


def test_roughness_is_claimed_of_additions_only(run, monkeypatch):
    """Oracle: shares on either side of 0.6, and text that is no addition."""
    monkeypatch.setattr(smoothness, "why_not_an_adder", lambda model, run: None)
    additions = Study(replace(run, examples=pd.DataFrame({"token": list("12345+678=\n")})))
    rough, smooth = np.full(16, 0.5), np.full(16, 0.7)
    for study, shares, positions, answer in (
        (additions, rough, 32, HOLDS),
        (additions, smooth, 32, FAILS),
        (additions, np.r_[rough[:11], smooth[:5]], 32, UNDECIDED),  # 11 of 16: p = 0.1
        (additions, np.r_[rough[:8], np.full(8, np.nan)], 32, UNDECIDED),  # half at the noise floor
        (additions, rough, 12, UNTESTABLE),
        (Study(run), rough, 32, UNTESTABLE),
    ):
        assert answers(verdicts_of(judge_rough, study, shares, positions, of="geometry/figure19")) == [answer]


def test_calls_that_cannot_work_are_one_line(surveyed, monkeypatch):
    run, model, _ = surveyed("gpt2")

    def made(name: str = "geometry/figure6", **focus):
        return reproduce(name, run, model, focus=Focus(**focus))

    with pytest.raises(UsageError, match="give both --layer and --head"):
        Focus(layer=1)
    with pytest.raises(UsageError, match="the prompt is empty"):
        Focus(" ")
    with pytest.raises(UsageError, match="head 9 does not exist: this model has heads 0 to 3"):
        made(layer=1, head=9)
    with pytest.raises(UsageError, match="layer 7 does not exist"):
        made(layer=7, head=0)
    with pytest.raises(UsageError, match="has 24 positions and the prompt 60"):
        made(prompt="a" * 60)
    bare = replace(run, attribution=pd.DataFrame())
    with pytest.raises(UsageError, match="name one with --layer and --head"):
        reproduce("geometry/figure6", bare, model)
    named = reproduce("geometry/figure6", bare, model, focus=Focus(layer=0, head=1))
    assert answers(named) == [UNTESTABLE] * 3

    def refuse(*_: object, **__: object):
        raise WorkError("layer 1 (h.1): its logits cannot be split: because")

    monkeypatch.setattr(experiment, "constituents", refuse)
    with pytest.raises(UsageError, match="cannot be split: because; choose another --layer"):
        made(layer=1, head=1)
    with pytest.raises(UsageError, match="needs the model"):
        reproduce("geometry/figure19", run)


def test_the_command_takes_prompt_layer_and_head(checkpoint, text, tmp_path):
    """Oracle: the prompt's own bytes."""
    read = ("--corpus", text, "--length", 24, "--contexts", 8, "--out", tmp_path / "run", "--json")
    head = ("--prompt", "angle by angle", "--layer", 2, "--head", 1)
    status, stdout, stderr = call("reproduce", "geometry/figure6", checkpoint("gpt2"), *read, *head)
    assert status == 0, stderr
    (result,) = json.loads(stdout)
    assert "".join(row["token"] for row in result["tables"]["prompt"]) == "angle by angle"
    assert [row["panels"] for row in result["tables"]["shares"]] == ["L2H1"]
