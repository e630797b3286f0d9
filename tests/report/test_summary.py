"""Oracle: sentences written by hand for small tables whose means and counts can be checked by eye."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.report.synthetic import make_run, make_survey, weights_only
from theodolite.judging import FAILS, HOLDS, UNDECIDED
from theodolite.passes.run import Run
from theodolite.report.content import Cell, Table, linked
from theodolite.report.exhibit import SECTIONS
from theodolite.report.findings import Finding, checks, summarise, unusual


def told(run: Run, topic: str) -> str:
    return " ".join(finding.text for finding in summarise(run).get(topic, [])).replace("\u00a0", " ")


def with_heads(run: Run, **columns: list[object]) -> Run:
    return replace(run, heads=run.heads.assign(**columns))


def with_layers(run: Run, **columns: object) -> Run:
    return replace(run, layers=run.layers.assign(**columns))


def test_position_gives_means_extremes_and_the_published_numbers() -> None:
    run = with_layers(
        make_run(),
        relative_norm=[0.9, 0.8, 0.6, 0.1],
        rank=[12, 10, 9, 9],
        rank_screenot=[14, 13, 12, 12],
        pp_low_frequency_10=[0.96, 0.95, 0.95, 0.94],
        pp_low_frequency_10_se=0.01,
    )
    assert told(run, "Position") == (
        "The relative norm of the positional basis is 60 % on average over layers, highest in layer 0 (90 %) and "
        "lowest in layer 3 (10 %). Published for GPT-2: 84 %. "
        "10 directions of the positional basis replicate in contexts left out, on average (9 to 12 by layer). "
        "Its rank as published (ScreeNOT): 13 here, 11.4 for GPT-2. "
        "The positional basis is smooth: the ten lowest frequencies hold 95 ± 1.0 % of the energy of its "
        "Gram matrix."
    )


def test_the_most_unusual_comes_first_and_what_is_named_is_linked(run: Run) -> None:
    """Oracle: Llama 2's relative norm is 14 % and its rank 9.38; by hand here it is 5.0 and 1.07 times that."""
    run = with_layers(run, relative_norm=0.7, relative_norm_se=0.0, rank_screenot=10.0, rank_screenot_se=0.01)
    run = replace(run, provenance=run.provenance | {"model": {"family": "llama"}})
    sentences = unusual(run, [Finding("L1H2 is dead.", "dead heads", FAILS), Finding("Fine.", "", HOLDS)])
    assert len(sentences) == 5
    assert sentences[0] == ("L1H2 is dead.", "heads")
    assert sentences[1][0] == (
        "The relative norm of the positional basis is 70 %, 5.0 times the 14 % published for Llama 2."
    ).replace(" %", "\u00a0%")
    assert sentences[2][0].startswith("The positional rank, as published, is 10")
    assert {section for _, section in sentences} <= SECTIONS.keys()
    tokens = Table([("token", "")], [[Cell("<b>")]], ["token-0"])
    written = str(linked(run, tokens)("L1H2 and L9H9 of ‘<b>’ in layer 2, “L1H2x”"))
    assert written == (
        '<a href="#L1H2">L1H2</a> and L9H9 of <a href="#token-0">‘&lt;b&gt;’</a> in <a href="#layer-2">layer 2</a>, '
        "“L1H2x”"
    )


LIMIT = np.mean([math.log(keys) for keys in range(1, 25)])
WEAK = dict.fromkeys(("induction", "same_token"), 0.1)


@pytest.mark.parametrize(
    ("topic", "layers", "heads", "words"),
    [
        # A layer without an error does not hide the others.
        (
            "Position",
            {"relative_norm": 0.5, "relative_norm_se": [math.nan, 0.01, 0.02, 0.03]},
            {},
            "positional basis is 50 ± 2 %",
        ),
        (
            "Context",
            {"similarity_within": 0.4, "similarity_between": 0.1, "similarity_random": 0.2},
            {},
            "cosine of context vectors is 0.40 within labels and 0.10 between labels (0.20 whatever the labels).",
        ),
        (
            "Context",
            {"cluster_ari": 0.4, "cluster_ari_se": 0.02},
            {},
            "do not cluster clearly by label: k-means",
        ),
        (
            "Context",
            dict.fromkeys(("similarity_within", "similarity_between"), math.nan),
            {},
            "The text has no labels",
        ),
        (
            "Context",
            {"incoherence_mean": 0.5, "incoherence_mean_se": 0.04},
            {},
            "Position and context are entangled: root mean square cosine 0.50 ± 0.04.",
        ),
        # 2.36 errors, t at 95 % of 8 groups, are 0.0946 at 16 contexts, and 0.05 away at (0.0946 / 0.05)² · 16.
        (
            "Context",
            {"incoherence_mean": 0.35, "incoherence_mean_se": 0.04},
            {},
            "entangled is not decided; about 57 contexts would: root mean square cosine 0.35 ± 0.04.",
        ),
        (
            "Position",
            {"relative_norm": [0.9, 0.04, -0.1, 0.2]},
            {},
            "highest in layer 0 (90 %) and at the noise floor in 2 layers (1–2).",
        ),
        (
            "Position",
            {"pp_low_frequency_10": [0.9, math.nan, 0.9, 0.9], "pp_low_frequency_10_se": 0.01},
            {},
            "of its Gram matrix (mean of 3 layers; in 1 of all it is at the noise floor).",
        ),
        (
            "Localization",
            {},
            {"entropy": [0.5 * LIMIT] * 10 + [0.25 * LIMIT, 0.75 * LIMIT]},
            "Mean attention entropy is 50 % of its maximum; the sharpest head is L2H2",
        ),
        (
            "Sinks",
            {},
            {"sink_first": [0, 0.6, 0, 0, 0, 0, 0, 0.95, 0, 0, 0, 0], "sink_later": 0.0},
            "2 of 12 heads have a first-token sink in at least 50 % of the contexts: L1H3 (0.95) and L0H1 (0.60). "
            "No head has a later sink in at least 10 % of the contexts.",
        ),
        (
            "Sinks",
            {},
            {"sink_later": [0.0] * 11 + [0.4]},
            "1 head has a later sink in at least 10 % of the contexts: L2H3 (0.40); most often ‘.’",
        ),
        ("Heads", {}, WEAK | {"previous_token": [0.1] * 11 + [0.7]}, "Previous-token heads: L2H3 (0.70)."),
        ("Heads", {}, WEAK, "No induction head stands out; the strongest is L0H0 (0.10)."),
        (
            "Outliers",
            {"massive_activations": 0, "massive_activations_first": [0, 3, 9, 9]},
            {},
            "The first token has massive activations in 3 layers (1–3), most in layer 2 (9).",
        ),
    ],
)
def test_what_is_told_of_a_topic(topic, layers, heads, words) -> None:
    assert words in told(with_layers(with_heads(make_run(), **heads), **layers), topic)


def test_what_is_told_of_models_and_texts(run: Run) -> None:
    """The published model follows the family."""
    model = {**run.provenance["model"], "family": "qwen3", "positions": "rotary"}
    other = replace(run, provenance={**run.provenance, "model": model})
    assert "Published for Llama 2" in told(other, "Position")
    counts = {**run.provenance["counts"], "tokens": 1000, "unknown_tokens": 400}
    other = replace(run, provenance={**run.provenance, "counts": counts})
    assert "40 % of the tokens are unknown to the tokenizer" in flagged(other)[0]
    assert told(make_run(), "Constituents") == ""


def flagged(run: Run) -> list[str]:
    return [check.text.replace("\u00a0", " ") for check in checks(run) if check.answer == FAILS]


def check(run: Run, words: str) -> Finding:
    """The one check whose text has these words."""
    (found,) = (check for check in checks(run) if words in check.text)
    return found


def test_a_healthy_run_passes_every_check() -> None:
    assert [check.answer for check in checks(make_survey())] == [HOLDS] * 8


def test_each_trouble_is_found_by_its_check(run: Run) -> None:
    entropy = [0.5 * LIMIT] * 12
    entropy[2] = 0.01 * LIMIT
    propagation = [0.5] * 11 + [0.001]
    size = [10.0] * 12
    size[0] = 0.0
    sick = with_heads(
        run,
        entropy=entropy,
        propagation=propagation,
        frobenius_squared=size,
        sink_first=[0.0] * 12,
    )
    sick = with_layers(sick, rank_collapse=[0.9, 0.5, 0.2, 0.05], massive_activations=[0, 0, 4, 0])
    assert [check.answer for check in checks(sick)] == [FAILS] * 5 + [HOLDS] * 3
    texts = " ".join(flagged(sick))
    assert "Rank collapse: in layer 3 all tokens" in texts
    assert "Entropy collapse: 1 head" in texts
    assert "L0H2" in texts
    assert "Vanishing signal: fewer than 5 % of the keys propagate in 1 head: L2H3." in texts
    assert "W_QK is numerically zero in L0H0" in texts
    assert "Later tokens have massive activations in 1 layer (first in layer 2)" in texts


def test_an_untrained_model_is_named(run: Run) -> None:
    """Numbers of a random model: rank 0.2 ± 0.6 and smoothness 15 %. Oracle: 2.4 errors, t at 95 % of 8 groups."""
    layers = {"rank": [0.2] * 4, "rank_se": [0.6] * 4}
    rough = {
        "pp_low_frequency_10": [0.15] * 4,
        "pp_low_frequency_10_se": [0.01] * 4,
        "incoherence_mean": [0.35] * 4,
        "incoherence_mean_se": [0.01] * 4,
    }
    texts = flagged(with_layers(run, **layers, **rough))
    assert len(texts) == 3
    assert "No positional structure beyond noise: mean rank of the positional basis 0.2 ± 0.6" in texts[0]
    assert "The model looks untrained" in texts[0]
    assert "hold 15 ± 1.0 % of the energy" in texts[1]
    assert "Position and context are entangled" in texts[2]
    assert not flagged(with_layers(run, **layers))
    assert check(with_layers(run, **layers), "positions are encoded").answer == UNDECIDED
    for rank, answer in ((1.5, HOLDS), (1.4, UNDECIDED)):  # 2.5 and 2.33 errors above noise
        clear = with_layers(run, rank=[rank] * 4, rank_se=[0.6] * 4)
        assert check(clear, "mean rank").answer == answer


def test_weights_alone_give_only_what_weights_tell(run: Run) -> None:
    alone = weights_only(with_heads(run, regime=["uniform"] * 7 + ["late-site"] * 5))
    assert set(summarise(alone)) == {"Localization"}
    text = "Regimes predicted from W_QK alone, of 12 heads, not measured: 7 uniform and 5 late-site."
    assert told(alone, "Localization") == text


def test_a_resting_head_is_no_entropy_collapse(run: Run) -> None:
    entropy, sinks = [0.01 * LIMIT] + [0.5 * LIMIT] * 11, [0.99] + [0.0] * 11
    found = check(with_heads(run, entropy=entropy, sink_first=sinks), "maximum entropy")
    assert found.answer == HOLDS
    assert "All are first-token sink heads" in found.text


def test_layers_whose_logits_are_not_taken_apart_are_named_with_the_reason(run: Run) -> None:
    refused = {"0": "queries are no affine function of h", "2": "queries are no affine function of h"}
    other = replace(run, provenance={**run.provenance, "constituents_refused": refused})
    assert flagged(other) == [
        "Logits could not be decomposed in layer 0 and layer 2: queries are no affine function of h."
    ]


def test_shares_are_means_over_heads_and_their_leaders_are_counted(run: Run) -> None:
    shared = with_heads(
        run,
        share_position=[0.7] * 4 + [0.1] * 8,
        share_context=[0.2] * 4 + [-0.1] * 8,
        share_cross=[0.0] * 12,
        share_constant=[0.1] * 4 + [1.0] * 8,
        share_additive=[0.0] * 12,
    )
    assert told(shared, "Constituents").startswith(
        "On average over 12 heads, the logits' variance is 70 % constant, 30 % position and 0 % context (mean "
        "and bias count with the constituent on the other side); the largest share is constant in 8 heads and "
        "position in 4 heads. "
    )


def test_a_pattern_is_told_by_what_keeps_it_alone_and_what_is_left_without(run: Run) -> None:
    """The three cases that the synthetic table was made for, and a pattern that nobody follows."""
    text = told(run, "Constituents")
    assert (
        "On random tokens, L2H0 attends most to the previous token (0.62; uniform attention: 0.020): position alone "
        "retains 0.60; ablating it leaves 0.050." in text
    )
    assert (
        "L2H0 attends most to the token that followed the earlier copy (0.41; uniform attention: 0.020): context "
        "alone retains 0.12; ablating it leaves 0.15." in text
    )
    assert (
        "L2H0 attends most to the earlier copy of the same token (0.33; uniform attention: 0.020): context alone "
        "retains 0.31; ablating it leaves 0.30." in text
    )
    faint = run.attribution.assign(score=0.05)
    assert (
        "On random tokens, no head attends strongly to the previous token; L2H0 has the highest score (0.050; uniform "
        "attention: 0.020)." in told(replace(run, attribution=faint), "Constituents")
    )


def test_what_is_at_the_noise_floor_everywhere_is_not_judged() -> None:
    noise = with_layers(make_run(), pp_low_frequency_10=math.nan)
    assert check(noise, "smooth") == Finding(
        "Whether the positional basis is smooth is not judged: it is at the noise floor in every layer.",
        "smoothness",
        UNDECIDED,
    )
    few = replace(
        noise, provenance=noise.provenance | {"corpus": noise.provenance["corpus"] | {"contexts": 4}}
    )
    assert not any("smooth" in of.text for of in checks(few))  # of four contexts there are no such numbers


def test_massive_tokens_are_named(run: Run) -> None:
    text = told(with_layers(run, massive_tokens=[0, 1, 2, 0]), "Outliers")
    assert "these have faded, at most 2 tokens in a layer: ‘<script>alert(1)</script>’ (context 4, " in text
    assert "position 3, layers 1–2) and" in text
    assert "‘␣=’ (context 5, position 1, layer 2)" in text


def test_dimensions_of_a_long_stream_are_no_outliers(run: Run) -> None:
    text = told(with_layers(run, outlier_dimensions=[0, 3, 17, 32]), "Outliers")
    assert "In 2 layers (2–3) more than half of all dimensions pass the published |x| ≥ 6" in text
    assert "Of the others, layer 1 has the most outlier dimensions: 3." in text
