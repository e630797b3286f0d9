"""Oracles: closed forms of both softmaxes, Lemma 2's limits, scipy's normal distribution and entropies."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from typer.testing import CliRunner

from theodolite.cli.app import app
from theodolite.errors import UsageError
from theodolite.judging import FAILS, HOLDS
from theodolite.papers import Study, find, reproduce, write_index, write_outcome
from theodolite.papers.catalogue import EXPERIMENTS, need_no_model
from theodolite.papers.experiment import of_nothing
from theodolite.papers.localization import simulated_walks as localization_walks
from theodolite.papers.localization.curve_shape import THETA, centre, spread, width
from theodolite.papers.localization.limits import READINGS_3, window
from theodolite.papers.localization.propagation_theory import (
    ETAS,
    XIS,
    _claims_2,
    best_clamped_line,
)
from theodolite.papers.localization.simulated_walks import PREDICTED, share_beyond_error
from theodolite.papers.localization.walk_simulation import Simulation, WalkSetting, simulate
from theodolite.theory.propagation import propagation

SMALL = WalkSetting(width=24, length=8, walks=120, draws=4)


def answers(name):
    return [verdict.answer for verdict in reproduce(name).verdicts]


def test_the_largest_errors_of_the_linearised_softmax_are_where_its_clamp_sets_in():
    """Oracle: for T = 2 both depend on δ = ω₁ − ω₂ alone; |σ(δ) − clamp(½ + δ/4)| is largest at δ = 2. With T
    inputs S̃_1 = (1 + ω(1 − 1/T))/T where S_1 = 1/(1 + (T − 1)e^{−ω})."""
    outcome = reproduce("localization/figure1")
    table = outcome.tables["inputs"]
    two = table[table["inputs"] == 2]
    sigmoid = 1 / (1 + np.exp(-two["logit"]))
    np.testing.assert_allclose(two["softmax"], sigmoid, rtol=1e-12)
    np.testing.assert_allclose(two["piecewise"], np.clip(0.5 + two["logit"] / 4, 0, 1), rtol=1e-12)
    assert f"{1 / (1 + math.exp(2)):.3f}" in outcome.verdicts[0].evidence
    many = table[table["inputs"] == 40]
    np.testing.assert_allclose(
        many["piecewise"], np.clip((1 + many["logit"] * (1 - 1 / 40)) / 40, 0, 1), rtol=1e-9, atol=1e-15
    )
    assert [verdict.answer for verdict in outcome.verdicts] == [HOLDS, FAILS, FAILS, FAILS, FAILS]


def test_the_best_clamped_line_balances_both_of_its_errors():
    """Oracle: at the minimax slope a the error at the clamp, 1 − σ(1/(2a)), equals that where σ' = a."""
    slope, error = best_clamped_line()
    at_clamp = 1 / (1 + math.exp(1 / (2 * slope)))
    value = (1 + math.sqrt(1 - 4 * slope)) / 2  # σ(δ) with σ(1 − σ) = a
    between = value - 0.5 - slope * math.log(value / (1 - value))
    assert error == pytest.approx(at_clamp, abs=1e-4)
    assert error == pytest.approx(between, abs=1e-4)


def test_shapes_of_curves_that_are_known():
    """Oracle: a constant, and the indicator of an interval."""
    flat = torch.full((401,), 0.3, dtype=torch.float64)
    step = ((THETA > 0.5) & (THETA <= 0.75)).double()
    assert float(width(flat)) == pytest.approx(1)
    assert float(spread(flat)) == pytest.approx(0, abs=1e-12)
    assert float(centre(flat, THETA)) == pytest.approx(0.5)
    assert float(width(step)) == pytest.approx(0.25, abs=0.005)
    assert float(spread(step)) == 1
    assert float(centre(step, THETA)) == pytest.approx(0.625, abs=0.005)


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


def test_the_observations_below_figure_2_can_fail():
    """Oracle: curves that are flat in θ and in η: none concentrates, moves to a side or vanishes."""
    grid = torch.full((len(XIS), len(ETAS), len(THETA)), 0.5, dtype=torch.float64)
    grid[..., 0] = 0.49  # not flat, so that spreads have a ratio
    met = [bool(criterion.met(value)) for _, _, value, criterion in _claims_2(grid)]
    assert met == [True, True, False, True, False]
    tilted = THETA.expand(len(XIS), len(ETAS), -1)
    assert not _claims_2(tilted)[3][3].met(_claims_2(tilted)[3][2])
    growing = grid.clone()
    growing[:, 0, 200:] = 0
    assert not _claims_2(growing)[0][3].met(_claims_2(growing)[0][2])


def test_figure_3_follows_lemma_2():
    """Oracle: Lemma 2 at r = 1.28 (no upper end) and r = 5.12 (½ + 1/5.12); both of its readings are drawn."""
    assert window(1.28) == (0.5, 1.0)
    assert window(5.12) == (0.5, pytest.approx(0.6953125))
    assert [round(xi * eta, 9) for xi, eta in READINGS_3] == [1.28, 5.12, 5.12]
    outcome = reproduce("localization/figure3")
    assert [verdict.answer for verdict in outcome.verdicts] == [HOLDS] * 3
    text = " ".join(row.here for row in outcome.readings)
    assert "262\u202f144" in text


def test_figure_4_judges_the_printed_bound_by_a_real_entropy():
    """Oracle: the entropy of a softmax whose first logit stands out, of norm ν: the bound's minimiser; and ln T."""
    outcome = reproduce("localization/figure4")
    table = outcome.tables["bounds"]
    for row in table[table["tokens"] == 64].iloc[::7].itertuples():
        logits = np.full(64, -row.nu / math.sqrt(64 * 63))
        logits[0] = row.nu * math.sqrt(63 / 64)
        assert row.exact == pytest.approx(stats.entropy(np.exp(logits - logits.max())), abs=1e-9)
    assert (table["exact"] <= table["highest"] + 1e-9).all()
    assert table["published"].max() > 200
    large = table[table["tokens"] == 4096]
    assert float((large["asymptotic"] - large["exact"]).abs().max()) < 0.01
    assert [verdict.answer for verdict in outcome.verdicts] == [FAILS, HOLDS, FAILS, HOLDS]


def test_figure_5_puts_each_prediction_beside_the_simulation(monkeypatch):
    """Oracle: the simulation again from its seed, and numpy for the widths and errors in the tables."""
    monkeypatch.setattr(localization_walks, "SETTING", SMALL)
    outcome = reproduce("localization/figure5")
    points, pairs = outcome.tables["propagation"], outcome.tables["pairs"]
    assert len(points) == 2 * len(SMALL.pairs) * SMALL.length
    simulated = (
        points[points["covariance"] == "anisotropic"]["simulated"].to_numpy().reshape(-1, SMALL.length)
    )
    np.testing.assert_array_equal(simulated, simulate(SMALL, "anisotropic", 0).propagation)
    first = points[(points["covariance"] == "isotropic") & (points["mean"] == 1.0) & (points["scale"] == 2.0)]
    row = pairs[(pairs["covariance"] == "isotropic") & (pairs["mean"] == 1.0) & (pairs["scale"] == 2.0)].iloc[
        0
    ]
    for name in PREDICTED:
        assert row[f"error_{name}"] == pytest.approx(np.abs(first[name] - first["simulated"]).max())
    again = reproduce("localization/figure5")
    assert again.tables["propagation"].equals(points)
    assert len(outcome.verdicts) == 10
    assert outcome.verdicts[0].answer == FAILS  # the printed variance
    assert outcome.verdicts[4].answer == HOLDS  # within the simulation's own error
    for exhibit in outcome.exhibits:
        figure = exhibit.figure
        options = exhibit.choice.options
        assert len(exhibit.choice.variants()[options[-1].key]) == len(figure.data)


def test_points_beyond_three_standard_errors_are_counted():
    """Oracle: by hand: 400 walks of p = ½ have a standard error of 0.025; a certain event has one walk's weight."""
    shares = torch.tensor([[[0.5, 0.58, 1.0, 0.99]] * 2], dtype=torch.float64)
    sim = Simulation(shares, torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2, 3), walks=200)
    predicted = torch.tensor([[0.5, 0.5, 1.0, 1.0]], dtype=torch.float64)
    assert share_beyond_error(sim, predicted) == 0.5


def test_limits_in_which_both_variances_agree_only_in_the_middle_of_the_shape():
    """Oracle: both v are 7/12 at θ = 0, so that the curves start at one value for every ξ and η."""
    xi, eta = torch.tensor(XIS)[:, None], torch.tensor(ETAS)
    both = [
        propagation(torch.zeros(1, dtype=torch.float64), xi, eta, name) for name in ("published", "corrected")
    ]
    torch.testing.assert_close(*both)


def test_theory_needs_no_run_and_says_so(tmp_path):
    theory = find("localization/figure1,localization/figure4")
    assert need_no_model(theory)
    assert not need_no_model([*theory, EXPERIMENTS["localization/walk"]])
    with pytest.raises(UsageError, match="needs a run"):
        reproduce("localization/walk")
    nothing = of_nothing(seed=5)
    assert nothing["seed"] == 5
    for experiment in theory:
        page = write_outcome(experiment, Study(nothing).outcome(experiment), nothing, tmp_path)
        assert page.is_file()
    assert "localization/figure4" in write_index(tmp_path).read_text()


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
    assert json.loads(finished.stdout.splitlines()[0])["name"] == "localization/figure4"
    assert (tmp_path / "runs" / "localization" / "localization-figure4" / "index.html").is_file()
    assert runner.invoke(app, ["reproduce", "localization/fig4", "--out", "here"]).exit_code == 0
    assert (tmp_path / "here" / "index.html").is_file()
    assert runner.invoke(app, ["reproduce", "localization/fig4", "gpt2"]).exit_code == 2
    assert runner.invoke(app, ["reproduce", "localization/fig4", "--corpus", "docs"]).exit_code == 2


def test_fig_is_figure_in_every_group():
    assert find("localization/fig5") == find("localization/figure5")
    assert find("geometry/fig1") == find("geometry/figure1")
    assert [experiment.name for experiment in find("localization")][:5] == [
        f"localization/figure{n}" for n in range(1, 6)
    ]


def test_every_page_of_theory_has_verdicts_with_numbers_and_captions():
    for number in (1, 2, 3, 4):
        outcome = reproduce(f"localization/figure{number}")
        for verdict in outcome.verdicts:
            assert "criterion: at " in verdict.evidence
            assert any(c.isdigit() for c in verdict.evidence)
        for exhibit in outcome.exhibits:
            assert "Bao et al. 2024" in exhibit.source
            assert exhibit.look_for
            figure = exhibit.figure
            if exhibit.choice:
                keys = [option.key for option in exhibit.choice.options]
                assert len(exhibit.choice.variants()[keys[-1]]) == len(figure.data)


def test_the_corrected_curve_decides_figure_2_and_the_printed_number_stands_beside_it():
    verdicts = reproduce("localization/figure2").verdicts
    assert answers("localization/figure2") == [HOLDS, HOLDS, HOLDS, FAILS, HOLDS]
    assert all("with the printed variance: " in verdict.evidence for verdict in verdicts)
    assert replace(verdicts[0], evidence="").claim.endswith("(section 4)")
