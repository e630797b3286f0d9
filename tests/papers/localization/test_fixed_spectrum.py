"""Oracles: numpy written out, matrices whose norms are known, collapses put in."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from theodolite.judging import FAILS, HOLDS, IN_PART
from theodolite.report.outcome import Outcome
from theodolite_papers import reproduce
from theodolite_papers.localization import fixed_spectrum
from theodolite_papers.localization.fixed_spectrum import (
    LINKS,
    SHARES,
    Collapse,
    Setting,
    judge_collapse,
    left_by_layer,
    simulate,
    spectrum,
    widths,
)

SMALL = Setting(width=12, length=8, layers=2, draws=3, scales=(0.5, 2.0))


@pytest.mark.parametrize("share", SHARES)
def test_both_moments_are_as_asked_for(share):
    """Oracle: their definition, and eq. 8: d tr W² − (tr W)² is d² times the variance."""
    values = spectrum(16, share, 3.0, torch.Generator().manual_seed(0))
    assert float(values.sum()) == pytest.approx(share * math.sqrt(16) * 3.0, abs=1e-12)
    assert float(values.square().sum()) == pytest.approx(9.0)
    assert 16**2 * float(values.var(correction=0)) == pytest.approx(16 * 9 * (1 - share**2), abs=1e-9)


def test_what_is_left_after_each_layer():
    """Oracle: numpy without scaling back, whose second layer has smaller logits, which are made up for; and W_QK = 0,
    where one layer of the mean leaves nothing."""
    random = np.random.default_rng(0)
    tokens, w_qk = random.normal(size=(5, 4)), random.normal(size=(4, 4))
    x, expected = tokens, []
    for _ in range(2):
        shrunk = np.linalg.norm(x) / np.linalg.norm(tokens)
        logits = x @ w_qk @ x.T / 2 / shrunk**2
        weights = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        x = weights @ x
        expected.append(np.linalg.norm(x - x.mean(0)) / np.linalg.norm(x))
    given = torch.from_numpy(tokens), torch.from_numpy(w_qk)
    np.testing.assert_allclose(left_by_layer(*given, 2.0, 2), expected, rtol=1e-12)
    assert float(left_by_layer(given[0], torch.zeros(4, 4, dtype=torch.float64), 2.0, 1)[0]) < 1e-15


def test_the_largest_trace_has_the_smallest_sum_of_entries():
    """Oracle: tr W is largest for W = ±c·1 with c√d = √(tr W²), whose entries sum to d·c, the least of all that have
    this Frobenius norm and full rank in this basis; and the first link of eq. 7 fails for it, as c√d > c."""
    simulated = simulate(SMALL, 0)
    for place, scale in enumerate(SMALL.scales):
        c = scale * math.sqrt(12) / math.sqrt(12)
        for share in (0, -1):
            np.testing.assert_allclose(simulated.entry_sum[place, share], 12 * c, rtol=1e-9)
        assert (simulated.entry_sum[place, 1:-1] > 12 * c).all()
    assert simulated.left.shape == (2, 5, 3, 2)
    for chain, names in LINKS.items():
        shares = [simulated.links[chain, link] for link in names]
        assert (min(shares) == 1) == chain.endswith("corrected")
    again = simulate(SMALL, 0)
    assert torch.equal(again.left, simulated.left)


@pytest.mark.parametrize(
    ("low", "high", "answer"), [(2.0, 3.0, HOLDS), (0.5, 0.4, FAILS), (2.0, 0.5, IN_PART)]
)
def test_the_collapse_is_judged_by_its_parts(low, high, answer):
    """Oracle: factors put in, of what is left at the smallest and at the largest trace against that at 0."""
    factors = torch.tensor([low, 1.0, 1.0, 1.0, high], dtype=torch.float64)
    noise = 1 + 0.01 * torch.arange(3, dtype=torch.float64)
    left = 0.1 * factors[None, :, None, None] * noise[None, None, :, None].expand(2, 5, 3, 2)
    links = {(chain, link): 1.0 for chain, names in LINKS.items() for link in names}
    outcome = Outcome()
    judge_collapse(outcome, Collapse(left, left[..., 0], links), SMALL)
    assert [verdict.answer for verdict in outcome.verdicts] == [answer, answer, HOLDS, HOLDS, HOLDS, HOLDS]


def test_wider_spectra_localize_more():
    """Oracle: Lemma 2's limit at d → ∞, an indicator from ½ to ½ + 1/r, whose effective share is 1/r; the narrower
    heads are further from it, and all are above."""
    shares = widths().numpy()
    assert (np.diff(shares, axis=1) < 0).all()
    limit = 1 / np.array(fixed_spectrum.RATIOS)
    assert (shares[:, -1] > limit).all()
    assert (shares[:, -1] - limit < (shares[:, 0] - limit) / 4).all()
    outcome = reproduce("localization/width")
    assert outcome.verdicts[0].answer == HOLDS
    assert len(outcome.tables["widths"]) == shares.size


def test_the_page(monkeypatch):
    """Oracle: the simulation again from its seed."""
    monkeypatch.setattr(fixed_spectrum, "SETTING", SMALL)
    outcome = reproduce("localization/collapse")
    table = outcome.tables["layers"]
    expected = simulate(SMALL, 0).left.mean(2).flatten().numpy()
    np.testing.assert_allclose(table["left"], expected)
    assert len(outcome.exhibits[0].choice.options) == len(SMALL.scales)
