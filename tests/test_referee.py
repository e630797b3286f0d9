"""What a referee asks of the rule: chance seldom makes a claim hold, and right and wrong claims are told apart.

Oracles: data drawn from a known truth, with binomial bounds on how often an answer may come; closed forms (Student's t,
its non-central form, the binomial distribution); and a reading of the rule that shares no code (`tests/referee.py`).
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scipy import stats

from tests.referee import answers_of
from theodolite.corpus.groups import halves
from theodolite.judging import (
    FAILS,
    HOLDS,
    IN_PART,
    UNDECIDED,
    UNTESTABLE,
    Answer,
    Criterion,
    Estimate,
    Estimates,
    all_of,
    judge,
    mix_of,
    opposite_of,
    unless_explained,
    untestable,
)
from theodolite.report.outcome import Heading, Outcome
from theodolite.report.outcome_page import write_outcome
from theodolite_papers.experiment import of_nothing

DRAWS = 1000
ALLOWED = 0.05
"""Of claims that are not true: how many may hold."""
LAYERS, GROUPS = 13, 8
ABOVE = Criterion("more than", 0.0, "a test")
ALIKE = Criterion("within", 1.0, "a test")


def not_more_often(count: int, share: float, of: int = DRAWS) -> bool:
    """Whether a count is no evidence for more than a share, at one in a thousand."""
    return bool(stats.binomtest(count, of, share, alternative="greater").pvalue > 1e-3)


def drawn(answers: list[Answer], answer: Answer) -> int:
    return answers.count(answer)


@pytest.mark.parametrize("n", [2, 3, 8, 30])
def test_a_mean_at_its_limit_holds_in_one_of_forty_draws(n):
    """Oracle: t intervals of normal numbers are exact."""
    rows = np.random.default_rng(n).normal(size=(DRAWS, n))
    answers = [judge("", "", Estimate.mean(row, "seeds"), ABOVE).answer for row in rows]
    for answer in (HOLDS, FAILS):
        assert stats.binomtest(drawn(answers, answer), DRAWS, 0.025).pvalue > 1e-3


@pytest.mark.parametrize("n", [3, 8])
def test_a_mean_beyond_its_limit_holds_as_often_as_the_non_central_t_says(n):
    effect = 2.0
    rows = np.random.default_rng(n).normal(effect, size=(DRAWS, n))
    holding = drawn([judge("", "", Estimate.mean(row, "seeds"), ABOVE).answer for row in rows], HOLDS)
    power = float(stats.nct.sf(stats.t.ppf(0.975, n - 1), n - 1, effect * math.sqrt(n)))
    assert stats.binomtest(holding, DRAWS, power).pvalue > 1e-3
    assert power > (0.95 if n == 8 else 0.3)


@pytest.mark.parametrize("limit", [0.1, 0.5, 0.9])
def test_a_share_at_its_limit_seldom_holds(limit):
    """Oracle: the binomial distribution, summed exactly, of 2 to 60 trials."""
    criterion = Criterion("more than", limit, "a test")
    for trials in range(2, 61):
        holds = [
            judge("", "", Estimate.share(k / trials, trials, "trials"), criterion).answer == HOLDS
            for k in range(trials + 1)
        ]
        chance = stats.binom.pmf(np.arange(trials + 1), trials, limit)[holds].sum()
        assert chance <= ALLOWED, trials


def by_layer(values: np.ndarray) -> Estimates:
    """Layers (LAYERS) as groups of contexts (GROUPS, LAYERS) give them."""
    return Estimates(
        values.mean(axis=0), values.std(axis=0, ddof=1) / math.sqrt(GROUPS), GROUPS, "groups of contexts"
    )


def layers_drawn(means: np.ndarray, shared: float, draws: int = DRAWS) -> np.ndarray:
    """(draws, GROUPS, LAYERS): of each layer's variance the share `shared` is common to all."""
    generator = np.random.default_rng(7)
    common = generator.normal(size=(draws, GROUPS, 1))
    own = generator.normal(size=(draws, GROUPS, len(means)))
    return means + math.sqrt(shared) * common + math.sqrt(1 - shared) * own


@pytest.mark.parametrize("shared", [0.0, 0.5, 1.0])
def test_half_of_the_layers_with_the_rest_at_the_limit_seldom_hold_or_fail(shared):
    """The worst case of "in more than half": six of thirteen far beyond the limit, seven at it, of any dependence."""
    for sign, wrong in ((1, HOLDS), (-1, FAILS)):
        means = sign * np.array([50.0] * 6 + [0.0] * 7)
        samples = layers_drawn(means, shared)
        answers = [judge("", "", by_layer(sample), ABOVE).answer for sample in samples]
        assert not_more_often(drawn(answers, wrong), ALLOWED)
        if shared == 0:  # the same with intervals that are not shared: what the rule is for
            estimates = [by_layer(sample) for sample in samples]
            alone = sum(int((sign * each.values > each.margins).sum() > 6) for each in estimates)
            assert not not_more_often(alone, ALLOWED)


def test_layers_that_differ_hold_in_part_and_most_layers_hold():
    """Power: means ten standard errors away on either side."""
    far = 10 / math.sqrt(GROUPS)
    for positive, expected in ((6, IN_PART), (10, HOLDS), (3, FAILS)):
        means = np.array([far] * positive + [-far] * (LAYERS - positive))
        if expected == IN_PART:
            means[-1] = 0.0  # six for it, six against it
        answers = [judge("", "", by_layer(sample), ABOVE).answer for sample in layers_drawn(means, 0.5, 300)]
        assert drawn(answers, expected) > 0.9 * 300


def test_similarity_seldom_holds_at_the_border_of_its_zone_and_holds_within_it():
    """Oracle: two one-sided t tests; at the border one of them errs in 2.5 % of the draws."""
    rows = np.random.default_rng(1).normal(scale=0.2, size=(DRAWS, GROUPS))
    for truth in (1.0, -1.0):
        answers = [judge("", "", Estimate.mean(truth + row, "seeds"), ALIKE).answer for row in rows]
        assert stats.binomtest(drawn(answers, HOLDS), DRAWS, 0.025).pvalue > 1e-3
    inside = [judge("", "", Estimate.mean(0.5 + row, "seeds"), ALIKE).answer for row in rows]
    assert drawn(inside, HOLDS) > 0.95 * DRAWS
    noisy = [judge("", "", Estimate.mean(20 * row, "seeds"), ALIKE).answer for row in rows]
    assert not_more_often(drawn(noisy, HOLDS), ALLOWED)  # little data is no similarity


def test_a_head_chosen_on_half_of_the_contexts_holds_on_the_other_as_seldom_as_any():
    """64 contexts, 24 heads that all are at the limit, the best of which is judged."""
    contexts, heads = 64, 24
    chosen, judged = (part.numpy() for part in halves(contexts))
    generator, apart, together = np.random.default_rng(3), [], []
    for _ in range(DRAWS):
        scores = generator.normal(size=(contexts, heads))
        best = int(scores[chosen].mean(axis=0).argmax())
        apart.append(judge("", "", Estimate.mean(scores[judged, best], "contexts"), ABOVE).answer)
        best = int(scores.mean(axis=0).argmax())
        together.append(judge("", "", Estimate.mean(scores[:, best], "contexts"), ABOVE).answer)
    assert stats.binomtest(drawn(apart, HOLDS), DRAWS, 0.025).pvalue > 1e-3
    assert drawn(together, HOLDS) > 0.2 * DRAWS  # what the halves are for


def everything(page: Outcome) -> None:
    """Every kind of number and every rule, joined in turn."""
    larger, similar = Criterion("more than", 0.0, "a test", 0.1), ALIKE
    numbers = [
        Estimate(0.5, 0.1, 8, "seeds"),
        Estimate(0.2, 0.1, 8, "seeds"),
        Estimate(-0.5, 0.1, 3, "seeds"),
        Estimate(3.0, 0.1, 3, "seeds"),
        Estimate.exact(0.1),
        Estimate.exact(0.0),
        Estimate.share(0.9, 40, "heads"),
        Estimate(math.nan),
        Estimate(1.0, math.nan, 1, "seeds"),
    ]
    one_sided = (Criterion("at most", 0.1, "a test"), Criterion("at least", 0.5, "a test"))
    for criterion in (larger, similar, *one_sided):
        for place, estimate in enumerate(numbers):
            page.claim(f"{criterion.side} {place}", "a number", estimate, criterion)
    singles = list(page.verdicts)
    for values in ([1, 1, -1], [1, -1, -1], [1, -1], [1, 0.1, 0.1], [math.nan, 1, 1]):
        layers = Estimates(np.array(values, dtype=float), np.full(len(values), 0.1), 8, "groups")
        page.claim(f"layers {values}", "of each", layers, larger)
    page.claim("exact layers", "of each", Estimates.exact([1.0, -1.0, 2.0], "heads"), larger)
    for start in range(0, len(singles) - 2):
        page.verdicts.append(all_of(f"all from {start}", singles[start : start + 2]))
        page.verdicts.append(mix_of(f"mix from {start}", singles[start : start + 3]))
    joined = mix_of("of joined ones", [page.verdicts[-1], page.verdicts[-2]])
    page.verdicts += [joined, opposite_of("not so", singles[0]), opposite_of("nor so", joined)]
    page.verdicts.append(unless_explained(singles[0], singles[0].answer, "chance gives it, too"))
    page.verdicts.append(untestable("nothing", "no number"))


def test_every_verdict_is_found_again_from_the_numbers_of_its_page(tmp_path):
    """Oracle: `tests/referee.py`, from result.json alone."""
    page = Outcome()
    everything(page)
    made = write_outcome(Heading("mine/all", "All", "none"), page, of_nothing(), tmp_path)
    loaded = json.loads((made.parent / "result.json").read_text())
    found = answers_of(loaded["tables"]["judged"])
    assert found == [verdict["answer"] for verdict in loaded["verdicts"]]
    assert set(found) == {HOLDS, FAILS, IN_PART, UNDECIDED, UNTESTABLE}
    claims = [row["what"] for row in loaded["tables"]["judged"] if "." not in row["place"]]
    assert claims == [verdict["claim"] for verdict in loaded["verdicts"]]


def test_a_changed_number_is_noticed(tmp_path):
    """The reading above can fail: with another value, limit or error it gives another answer."""
    page = Outcome()
    page.claim("larger", "a gain", Estimate(0.5, 0.1, 8, "seeds"), ABOVE)
    made = write_outcome(Heading("mine/one", "One", "none"), page, of_nothing(), tmp_path)
    rows = json.loads((made.parent / "result.json").read_text())["tables"]["judged"]
    assert answers_of(rows) == [HOLDS]
    for change, expected in (
        ({"value": -0.5}, FAILS),
        ({"limit": 0.4}, UNDECIDED),
        ({"error": 0.5}, UNDECIDED),
    ):
        assert answers_of([rows[0], rows[1] | change]) == [expected]
