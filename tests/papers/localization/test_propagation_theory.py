"""Oracles: Lemma 2's limits, scipy's normal distribution, numbers put in, simulations again, and `theory`."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from scipy import stats
from typer.testing import CliRunner

from tests.papers.shared import answers, assert_whole, verdicts_of
from theodolite.cli.app import app
from theodolite.judging import FAILS, HOLDS, IN_PART
from theodolite.theory import curve_width, entropy_lower_bound
from theodolite_papers import reproduce
from theodolite_papers.localization import fixed_spectrum, propagation_theory
from theodolite_papers.localization.fixed_spectrum import (
    LINKS,
    SHARES,
    Collapse,
    Setting,
    judge_collapse,
    left_by_layer,
    links_of,
    simulate,
    spectrum,
    widths,
)
from theodolite_papers.localization.propagation_theory import (
    ETAS,
    NEAR_LIMIT,
    PREDICTED,
    XIS,
    Simulation,
    WalkSetting,
    judge_at_fixed_means,
    share_beyond_error,
    simulate_walks,
    window,
)

SMALL = WalkSetting(width=24, length=8, walks=120, draws=4)


def test_the_linearised_softmax_is_close_for_two_inputs_alone():
    """Oracle: for T = 2 both depend on δ = ω₁ − ω₂ alone; |σ(δ) − clamp(½ + δ/4)| is largest at δ = 2."""
    outcome = reproduce("localization/figure1")
    table = outcome.tables["inputs"]
    assert outcome.readings[0].here == f"{1 / (1 + math.exp(2)):.3f}"
    gaps = (table["softmax"] - table["piecewise"]).abs().groupby(table["inputs"]).max()
    assert (gaps > 0.2).tolist() == [False, True, True, True]
    assert gaps[40] == pytest.approx(0.77, abs=0.005)


def test_figure_2_holds_both_formulas():
    """Oracle: scipy's normal distribution with mean (θ − ½)ξη and variance v(θ)η², both v written out."""
    table = reproduce("localization/figure2").tables["curves"]
    assert set(table["xi"]) == set(XIS)
    assert set(table["eta"]) == set(ETAS)
    mean = (table["theta"] - 0.5) * table["xi"] * table["eta"]
    for name, linear in (("published", 0.0), ("corrected", -2.0)):
        spread = table["eta"] * np.sqrt(2 * table["theta"] ** 2 + linear * table["theta"] + 7 / 12)
        expected = stats.norm.cdf((1 - mean) / spread) - stats.norm.cdf(-mean / spread)
        np.testing.assert_allclose(table[name], expected, atol=1e-12)


def test_figure_3_follows_lemma_2():
    """Oracle: Lemma 2 at r = 1.28 (no upper end) and r = 5.12 (½ + 1/5.12): nearly all of ρ is where its limit is 1;
    both readings of the figure are drawn."""
    assert window(1.28) == (0.5, 1.0)
    assert window(5.12) == (0.5, pytest.approx(0.6953125))
    assert [round(xi * eta, 9) for xi, eta in NEAR_LIMIT] == [1.28, 5.12, 5.12]
    outcome = reproduce("localization/figure3")
    table = outcome.tables["curves"]
    for (xi, eta), name in zip(NEAR_LIMIT, table.filter(like="corrected"), strict=True):
        low, high = window(xi * eta)
        inside = table["theta"].between(low, high)
        assert table[name][inside].sum() / table[name].sum() >= 0.9
    text = " ".join(row.here for row in outcome.readings)
    assert "262\u202f144" in text


def test_figure_4_draws_the_printed_bound_beside_the_exact_one():
    """Oracle: `entropy_lower_bound` (its own tests: the minimiser's entropy) on the column of the table."""
    table = reproduce("localization/figure4").tables["bounds"]
    assert table["published"].max() > 200
    for length, curve in table.groupby("tokens"):
        exact = entropy_lower_bound(torch.tensor(curve["nu"].to_numpy()), int(length))
        np.testing.assert_allclose(curve["exact"], exact)
        assert (curve["exact"].diff().dropna() <= 0).all()  # no peak away from ν = 0
        assert curve["published"].max() > curve["published"].iloc[0] + 0.01


def test_figure_5_puts_each_prediction_beside_the_simulation(monkeypatch):
    """Oracle: the simulation again from its seed, and numpy for the widths and errors in the tables."""
    monkeypatch.setattr(propagation_theory, "SETTING", SMALL)
    outcome = reproduce("localization/figure5")
    points, pairs = outcome.tables["propagation"], outcome.tables["pairs"]
    assert len(points) == 2 * len(SMALL.pairs) * SMALL.length
    simulated = (
        points[points["covariance"] == "anisotropic"]["simulated"].to_numpy().reshape(-1, SMALL.length)
    )
    np.testing.assert_array_equal(simulated, simulate_walks(SMALL, "anisotropic", 0).propagation)
    first = points[(points["covariance"] == "isotropic") & (points["mean"] == 1.0) & (points["scale"] == 2.0)]
    row = pairs[(pairs["covariance"] == "isotropic") & (pairs["mean"] == 1.0) & (pairs["scale"] == 2.0)].iloc[
        0
    ]
    for name in PREDICTED:
        assert row[f"error_{name}"] == pytest.approx(np.abs(first[name] - first["simulated"]).max())
    assert len(outcome.verdicts) == 10
    assert_whole(outcome)
    assert outcome.verdicts[0].answer == FAILS  # the printed variance
    exact = outcome.verdicts[4]
    assert exact.answer != FAILS  # within the simulation's own error
    assert "(4 draws)" in exact.evidence


def made_up(entropy_by_scale: dict[float, tuple[float, float]]) -> Simulation:
    """Two scales at each of two means and a mean of 0; positions propagate less at the smaller scale."""
    draws = torch.arange(40, dtype=torch.float64) * 1e-3
    entropy = torch.stack([value + draws for pair in entropy_by_scale.values() for value in pair])
    shares = torch.zeros(6, 40, 4, dtype=torch.float64)
    shares[0::2, :, 0] = 1.0
    shares[1::2] = 1.0
    return Simulation(shares, entropy, entropy, torch.zeros(6, 40, 3), walks=200)


@pytest.mark.parametrize(
    ("entropies", "answer"),
    [
        ({0.0: (1.0, 2.0), 0.1: (2.0, 1.0), 1.0: (0.9, 0.1)}, HOLDS),
        ({0.0: (2.0, 1.0), 0.1: (1.0, 2.0), 1.0: (0.1, 0.9)}, FAILS),
        ({0.0: (2.0, 1.0), 0.1: (2.0, 1.0), 1.0: (0.1, 0.9)}, IN_PART),
    ],
)
def test_entropy_is_judged_at_each_fixed_mean(entropies, answer, monkeypatch):
    """Oracle: entropies put in, those of mean 0 the other way. In the first case they also fall as the mean grows, and
    with it over all pairs, which A2 says nothing about."""
    setting = WalkSetting(means=tuple(entropies), scales=(0.1, 2.0), draws=40)
    monkeypatch.setattr(propagation_theory, "SETTING", setting)
    sims = {"isotropic": made_up(entropies)}
    widths = {"isotropic": curve_width(sims["isotropic"].propagates)}
    judged = verdicts_of(judge_at_fixed_means, sims, widths, of="localization/figure5")
    assert answers(judged) == [answer] * 2


def test_points_beyond_three_standard_errors_are_counted():
    """Oracle: by hand: 400 walks of p = ½ have a standard error of 0.025; a certain event has one walk's weight; in
    the second draw all is as predicted."""
    predicted = torch.tensor([0.5, 0.5, 1.0, 1.0], dtype=torch.float64).expand(1, 2, 4)
    shares = torch.tensor([[[0.5, 0.58, 1.0, 0.99], [0.5, 0.5, 1.0, 1.0]]], dtype=torch.float64)
    sim = Simulation(shares, torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2, 3), walks=400)
    assert share_beyond_error(sim, predicted).tolist() == [0.5, 0.0]


def test_the_command_opens_no_model_for_theory(tmp_path, monkeypatch):
    """Oracle: an opener and a survey that refuse; and the exit status of a call with what theory does not read."""

    def refuse(*_args, **_options):
        raise AssertionError("a model was opened")

    for place in ("theodolite.cli.options.Opening.open", "theodolite.passes.survey.survey"):
        monkeypatch.setattr(place, refuse)
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    finished = runner.invoke(app, ["reproduce", "localization/fig4", "--json"])
    assert finished.exit_code == 0, finished.output
    assert json.loads(finished.stdout)[0]["name"] == "localization/figure4"
    assert (tmp_path / "runs" / "localization" / "localization-figure4" / "index.html").is_file()
    assert runner.invoke(app, ["reproduce", "localization/fig4", "--out", "here"]).exit_code == 0
    assert (tmp_path / "here" / "index.html").is_file()
    assert runner.invoke(app, ["reproduce", "localization/fig4", "gpt2"]).exit_code == 2
    assert runner.invoke(app, ["reproduce", "localization/fig4", "--corpus", "docs"]).exit_code == 2


NARROW = Setting(width=12, length=8, layers=2, draws=3, scales=(0.5, 2.0))


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
    simulated = simulate(NARROW, 0)
    for place, scale in enumerate(NARROW.scales):
        c = scale * math.sqrt(12) / math.sqrt(12)
        for share in (0, -1):
            np.testing.assert_allclose(simulated.entry_sum[place, share], 12 * c, rtol=1e-9)
        assert (simulated.entry_sum[place, 1:-1] > 12 * c).all()
    assert simulated.left.shape == (2, 5, 3, 2)
    for chain, names in LINKS.items():
        shares = [simulated.links[chain, link] for link in names]
        assert (min(shares) == 1) == chain.endswith("corrected")
    again = simulate(NARROW, 0)
    assert torch.equal(again.left, simulated.left)


def test_corrected_links_hold_and_printed_ones_break():
    """80 heads of random factors, some with large traces; closed forms: of W_QK = Σ = 1 the left side of eq. (7) is
    √d times ‖W_QK‖₂, and of a rotation tr W² = −2."""
    generator = torch.Generator().manual_seed(0)
    for seed in range(80):
        root, w_q, w_k = torch.randn(3, 8, 8, generator=generator, dtype=torch.float64)
        rank = 1 + seed % 8
        w_qk = w_q[:, :rank] @ (w_k + (seed % 3) * w_q)[:, :rank].T
        assert links_of(w_qk, root @ root.T / 8 + 0.1 * torch.eye(8))[[1, 3]].all()
    eye = torch.eye(64, dtype=torch.float64)
    assert links_of(eye, eye).tolist() == [[False, True, True], *[[True] * 3] * 3]
    rotation = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    assert links_of(rotation, eye[:2, :2])[2].tolist() == [False, True, True]
    unequal = torch.diag(torch.tensor([1.0, 4.0], dtype=torch.float64))
    assert not links_of(torch.eye(2, dtype=torch.float64).flip(0), unequal)[2, 0]


@pytest.mark.parametrize(
    ("low", "high", "answer"), [(2.0, 3.0, HOLDS), (0.5, 0.4, FAILS), (2.0, 0.5, IN_PART)]
)
def test_the_collapse_is_judged_by_its_parts(low, high, answer):
    """Oracle: factors put in, of what is left at the smallest and at the largest trace against that at 0."""
    factors = torch.tensor([low, 1.0, 1.0, 1.0, high], dtype=torch.float64)
    noise = 1 + 0.01 * torch.arange(3, dtype=torch.float64)
    left = 0.1 * factors[None, :, None, None] * noise[None, None, :, None].expand(2, 5, 3, 2)
    links = {(chain, link): 1.0 for chain, names in LINKS.items() for link in names}
    made = Collapse(left, left[..., 0], links)
    judged = verdicts_of(judge_collapse, made, NARROW, of="localization/collapse")
    assert answers(judged) == [answer, answer, HOLDS, HOLDS, HOLDS, HOLDS]


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
    monkeypatch.setattr(fixed_spectrum, "SETTING", NARROW)
    outcome = reproduce("localization/collapse")
    table = outcome.tables["layers"]
    expected = simulate(NARROW, 0).left.mean(2).flatten().numpy()
    np.testing.assert_allclose(table["left"], expected)
    assert len(outcome.exhibits[0].choice.options) == len(NARROW.scales)
    assert_whole(outcome)
