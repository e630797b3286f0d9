"""Oracle: sentences written by hand for small tables whose means and counts can be checked by eye."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from tests.report.synthetic import make_run, make_survey, weights_only
from theodolite.passes.run import Run
from theodolite.report.health import Check, checks
from theodolite.report.summary import summarise


def told(run: Run, topic: str) -> str:
    return " ".join(summarise(run).get(topic, [])).replace("\u00a0", " ")


def with_heads(run: Run, **columns: list[object]) -> Run:
    return replace(run, heads=run.heads.assign(**columns))


def with_layers(run: Run, **columns: object) -> Run:
    return replace(run, layers=run.layers.assign(**columns))


def of_a_long_text(run: Run) -> Run:
    """The run, where noise is no part of the positional basis."""
    corpus = run.provenance["corpus"] | {"contexts": 10_000}
    return replace(run, provenance=run.provenance | {"corpus": corpus})


def test_position_gives_means_extremes_and_the_published_numbers() -> None:
    run = with_layers(
        of_a_long_text(make_run()),
        relative_norm=[0.9, 0.8, 0.6, 0.1],
        rank=[12, 10, 9, 9],
        low_frequency_10=[0.96, 0.95, 0.95, 0.94],
    )
    assert told(run, "Position") == (
        "The relative norm of the positional basis is 60 % on average over layers, highest in layer 0 (90 %) and "
        "lowest in layer 3 (10 %). Published for GPT-2: 84 %. "
        "The mean rank of the positional basis is 10 (9 to 12 by layer); published for GPT-2: 11.4. "
        "The positional basis is smooth: the ten lowest frequencies hold 95 % of the energy of its "
        "Gram matrix (GPT-2 99.7 %, a model trained on addition about 50 %)."
    )


def test_standard_errors_follow_the_means_they_are_of(run: Run) -> None:
    """The mean of the layers' errors, by hand: 0.02, 0.5, 0.004 and 0.1."""
    run = with_layers(
        of_a_long_text(run),
        relative_norm=[0.9, 0.8, 0.6, 0.1],
        relative_norm_se=[0.01, 0.01, 0.02, 0.04],
        rank=[12, 10, 9, 9],
        rank_se=[0.0, 0.5, 0.5, 1.0],
        low_frequency_10=[0.96, 0.95, 0.95, 0.944],
        low_frequency_10_se=0.004,
        similarity_within=0.4,
        similarity_within_se=0.1,
        cluster_ari=[0.5, 0.7, 0.7, 0.5],
        cluster_ari_se=0.04,
    )
    position, context = told(run, "Position"), told(run, "Context")
    assert "positional basis is 60 ± 2 % on average" in position
    assert "mean rank of the positional basis is 10 ± 0.5 (9 to 12 by layer)" in position
    assert "hold 95.1 ± 0.4 % of the energy" in position
    assert "vectors is 0.40 ± 0.10 within labels" in context
    assert "recovers the labels with an adjusted Rand index of 0.60 ± 0.04" in context


LIMIT = np.mean([math.log(keys) for keys in range(1, 25)])
REGIMES = ["uniform"] * 7 + ["late-site"] * 5
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
            {"similarity_within": 0.4, "similarity_between": 0.1},
            {},
            "cluster clearly by label: the mean |cosine| of context vectors is 0.40 within labels",
        ),
        ("Context", {"similarity_within": 0.4, "similarity_between": 0.39}, {}, "cluster hardly by label"),
        (
            "Context",
            dict.fromkeys(("similarity_within", "similarity_between"), math.nan),
            {},
            "The text has no labels",
        ),
        ("Context", {"incoherence_mean": 0.5}, {}, "Position and context are entangled: mean |cosine| 0.50"),
        (
            "Localization",
            {},
            {"regime": REGIMES, "regime_data": REGIMES[::-1]},
            "Regimes predicted from W_QK Σ̂, of 12 heads: 7 uniform and 5 late-site.",
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
            "Massive activations occur at the first token in 3 layers (1–3), most in layer 2 (9).",
        ),
    ],
)
def test_what_is_told_of_a_topic(topic, layers, heads, words) -> None:
    assert words in told(with_layers(with_heads(make_run(), **heads), **layers), topic)


def test_what_is_told_of_models_and_texts(run: Run) -> None:
    """The published model follows the family; NaN columns give no NaN."""
    model = {**run.provenance["model"], "family": "qwen3", "positions": "rotary"}
    other = replace(run, provenance={**run.provenance, "model": model})
    assert "published for Llama 2" in told(other, "Position")
    counts = {**run.provenance["counts"], "tokens": 1000, "unknown_tokens": 400}
    other = replace(run, provenance={**run.provenance, "counts": counts})
    assert "40 % of the tokens are unknown to the tokenizer" in flagged(other)[0]
    assert told(make_run(), "Constituents") == ""
    layers = run.layers.assign(**{name: math.nan for name in run.layers.columns if name != "layer"})
    named = {"layer", "head", "spectrum_of"}
    heads = run.heads.assign(**{name: math.nan for name in run.heads.columns if name not in named})
    empty = replace(run, layers=layers, heads=heads, sinks=pd.DataFrame())
    assert "nan" not in f"{summarise(empty)} {checks(empty)}".lower()


def flagged(run: Run) -> list[str]:
    return [check.text.replace("\u00a0", " ") for check in checks(run) if check.flagged]


def check(run: Run, words: str) -> Check:
    """The one check whose text has these words."""
    (found,) = (check for check in checks(run) if words in check.text)
    return found


def test_a_healthy_run_passes_every_check() -> None:
    assert [check.flagged for check in checks(make_survey())] == [False] * 9


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
        share_constant=[0.96] + [0.4] * 11,
    )
    sick = with_layers(sick, rank_collapse=[0.9, 0.5, 0.2, 0.05], massive_activations=[0, 0, 4, 0])
    assert [check.flagged for check in checks(sick)] == [True] * 6 + [False] * 3
    texts = " ".join(flagged(sick))
    assert "Rank collapse: in layer 3 all tokens" in texts
    assert "Entropy collapse: 1 head" in texts
    assert "L0H2" in texts
    assert "Vanishing signal: fewer than 5 % of the keys propagate in 1 head: L2H3." in texts
    assert "W_QK is numerically zero in L0H0" in texts
    assert "Constant logits: in 1 head means and biases alone account for" in texts
    assert "Massive activations after the first token in 1 layer (first in layer 2)" in texts


def test_an_untrained_model_is_named(run: Run) -> None:
    """Numbers of a random model: rank 0.2 ± 0.6 and smoothness 15 %. Oracle: 2.4 errors, t at 95 % of 8 groups."""
    layers = {"rank": [0.2] * 4, "rank_se": [0.6] * 4}
    rough = {
        "low_frequency_10": [0.15] * 4,
        "low_frequency_10_se": [0.01] * 4,
        "incoherence_mean": [0.35] * 4,
    }
    texts = flagged(with_layers(run, **layers, **rough))
    assert len(texts) == 3
    assert (
        "No positional structure beyond noise: the mean rank of the positional basis is 0.2 ± 0.6" in texts[0]
    )
    assert "The model looks untrained" in texts[0]
    assert "hold 15 ± 1.0 % of the energy" in texts[1]
    assert "Position and context are entangled" in texts[2]
    (smooth,) = flagged(with_layers(run, **layers))
    assert "untrained" not in smooth
    for rank, is_noise in ((1.5, False), (1.4, True)):  # 2.5 and 2.33 errors above noise
        clear = with_layers(run, rank=[rank] * 4, rank_se=[0.6] * 4)
        assert check(clear, "mean rank").flagged == is_noise


def test_weights_alone_give_only_what_weights_tell(run: Run) -> None:
    assert set(summarise(weights_only(run))) == {"Localization"}


def test_a_resting_head_is_no_entropy_collapse_and_its_constant_logits_are_common(run: Run) -> None:
    resting = with_heads(
        run,
        entropy=[0.01 * LIMIT] + [0.5 * LIMIT] * 11,
        share_constant=[0.99] + [0.4] * 11,
        sink_first=[0.99] + [0.0] * 11,
    )
    for words in ("maximum entropy", "Constant logits"):
        found = check(resting, words)
        assert not found.flagged
        assert "All are first-token sink heads" in found.text
    made = with_heads(make_run(), share_constant=[1.0] + [0.4] * 11)
    assert check(made, "Constant logits").flagged
    made.provenance["model"] |= {"positions": "rotary"}  # means that are turned are no constant
    assert not any("onstant logits" in of.text for of in checks(made))


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
        "L2H0 attends most to the token that followed the earlier copy (0.41; uniform attention: 0.020): no group of "
        "constituents alone retains half of that; context retains most (0.12), and ablating it leaves 0.15."
        in text
    )
    assert (
        "L2H0 attends most to the earlier copy of the same token (0.33; uniform attention: 0.020): context alone "
        "retains 0.31, but ablating it leaves 0.30, so other groups carry it too." in text
    )
    faint = run.attribution.assign(score=0.05)
    assert (
        "On random tokens, no head attends strongly to the previous token; L2H0 has the highest score (0.050; uniform "
        "attention: 0.020)." in told(replace(run, attribution=faint), "Constituents")
    )


def test_smoothness_is_judged_where_the_text_s_noise_is_small() -> None:
    """Oracle: noise of 400 contexts of 128 tokens is a tenth at a relative norm of (9 · 128)^¼/20 = 0.291."""
    columns = {"low_frequency_10": [0.2, 0.3, 0.9, 0.2], "low_frequency_10_se": [0.01] * 4}
    made = make_run()
    made.provenance["corpus"] |= {"contexts": 400, "length": 128}
    some = with_layers(made, relative_norm=[0.1, 0.28, 0.3, 0.29], **columns)
    found = check(some, "rough")
    assert (found.flagged, "90" in found.text) == (False, True)
    assert "of the energy of its Gram matrix in the layers where" in told(some, "Position")
    none = with_layers(made, relative_norm=[0.1, 0.28, 0.29, 0.29], **columns)
    assert not check(none, "smoothness").flagged
    assert "is not judged" in check(none, "smoothness").text
    assert "Gram" not in told(none, "Position")
    assert not any("smoothness" in of.text for of in checks(weights_only(some)))  # no basis to judge
