"""Oracles: trainings whose curves are made up with known effects, scipy's t-test, Spearman's closed form."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from tests.papers.shared import outcome_of
from theodolite.errors import UsageError
from theodolite.jobs.job import Unfinished
from theodolite.judging import FAILS, HOLDS, UNDECIDED, UNTESTABLE, Verdict
from theodolite.system.files import write_checked
from theodolite_papers.catalogue import made_by as command_of
from theodolite_papers.experiment import Outcome, Study, criterion
from theodolite_papers.localization import locater
from theodolite_papers.localization.locater import (
    OF_SHAPES,
    association,
    at_step,
    common_step,
    distinct,
    figure_7,
    fill,
    grid_provenance,
    left_out,
)
from theodolite_papers.localization.locater_training import GridRun, Setting, read_grid

STEPS = [0, 1, 2, 5, 10]
MEANS = (0.0, 1e-3, 1e-2, 1e-1, 1.0)
RECIPE = {"vocabulary": 2048, "length": 8}


def finished_run(setting, *, loss, scale, entropy, stripe=0.0):
    """A training that ends at the given values; its lowest loss, 0.1 below the last, is at step 5."""
    noise = 1e-3 * setting.seed
    losses = pd.DataFrame(
        {"step": STEPS, "training_loss": 1.0, "held_out_loss": 8.0, "held_out_loss_se": 0.1}
    )
    losses.loc[3:, "held_out_loss"] = [loss - 0.1 + noise, loss + noise]
    heads = pd.DataFrame(
        {"step": STEPS, "layer": 0, "trace": 0.1, "trace_of_square": scale, "propagation": 0.5}
    )
    heads["frobenius_squared"] = scale * (1 + noise)
    heads["entropy"] = entropy + noise
    propagation = torch.full((5, 1, 8), 0.5)
    propagation[:, 0, ::2] += stripe
    return GridRun(setting, losses, heads, propagation, STEPS, None)


def grid(direction, seeds=3, reductions=("mean", "sum"), **place):
    """LocAteR at five κ₂ with an effect of 5 % a step of κ₂ (times `direction`), none, and two weight decays."""
    runs = []
    for seed in range(seeds):
        for (rank, mean), reduction in product(enumerate(MEANS), reductions):
            shift = 0.05 * rank * direction
            setting = Setting(scale=100.0, mean=mean, seed=seed, reduction=reduction, **place)
            runs.append(
                finished_run(
                    setting, loss=4 - shift, scale=math.exp(-shift), entropy=3 * math.exp(shift), stripe=0.1
                )
            )
        plain = Setting(seed=seed, **place)
        runs.append(finished_run(plain, loss=4.1, scale=5.0, entropy=2.0))
        runs.append(finished_run(replace(plain, weight_decay=1.0), loss=4.05, scale=4.0, entropy=2.1))
    return runs


def filled(runs: list[GridRun]) -> Outcome:
    outcome = outcome_of("localization/figure6")
    fill(outcome, runs, RECIPE)
    return outcome


def verdicts(runs: list[GridRun]) -> dict[str, Verdict]:
    """Those of a figure, by the names of their claims; of what has a verdict for each way of LocAteR, by its words."""
    outcome = filled(runs)
    claims = outcome.declared.claims.items()
    names = {of["claim"]: name for name, of in claims}
    return {names.get(verdict.claim, verdict.claim): verdict for verdict in outcome.verdicts}


def answers(runs: list[GridRun], *claims: str) -> list[str]:
    judged = verdicts(runs)
    return [judged[claim].answer for claim in claims]


CAPTIONS = ("scale", "entropy", "perplexity")
OF_THE_END = ("perplexity", "perplexity-against-none", "entropy-and-perplexity")


@pytest.fixture
def long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The made-up training runs are as long as the published ones."""
    monkeypatch.setattr(locater, "PUBLISHED_STEPS", STEPS[-1])


@pytest.mark.usefixtures("long_enough")
@pytest.mark.parametrize(("direction", "verdict"), [(1.0, HOLDS), (-1.0, FAILS), (0.01, FAILS)])
def test_claims_of_the_captions(direction: float, verdict: str) -> None:
    """Oracle: the effect put in: 20 % as claimed, 20 % the other way, and 0.2 %, which is none."""
    assert answers(grid(direction), *CAPTIONS) == [verdict] * 3


def test_what_happens_eventually_waits_for_the_end() -> None:
    """Oracle: 10 of 50,000 steps, of which the claims on the end say nothing and those on the spectrum something."""
    runs, so_far = grid(1.0), "At step 10 LocAteR{} has the lower perplexity (ours)"
    assert answers(runs, *OF_THE_END) == [UNTESTABLE] * 3
    assert answers(runs, "scale", "entropy") == [HOLDS] * 2
    ways = so_far.format(""), so_far.format(", against the summed loss")
    assert answers(runs, *ways) == [HOLDS] * 2
    assert answers(grid(-1.0), *CAPTIONS) == [UNDECIDED, UNDECIDED, UNTESTABLE]


@pytest.mark.usefixtures("long_enough")
def test_readings_of_the_strength_must_agree() -> None:
    """Oracle: one reading alone, and two with opposite effects put in, decide nothing; the evidence says why."""
    other = [run for run in grid(-1.0, reductions=["sum"]) if run.setting.scale]
    for runs, why in (
        (grid(1.0, reductions=["mean"]), "the other was not trained"),
        ([*grid(1.0, reductions=["mean"]), *other], "they answer differently"),
    ):
        judged = verdicts(runs)
        for claim in CAPTIONS:
            assert judged[claim].answer == UNDECIDED
            assert judged[claim].evidence.endswith(why)


@pytest.mark.usefixtures("long_enough")
def test_against_none_and_weight_decay() -> None:
    """Oracle: the losses put in: best LocAteR 3.8, best decay 4.05; stripes 0.05 against 0."""
    claims = "weight-decay", "perplexity-against-none"
    assert answers(grid(1.0), *claims, "stripes") == [HOLDS] * 3
    worse = [run for run in grid(1.0) if run.setting.mean == 0 or run.setting.scale == 0]
    worse = [replace(p, losses=p.losses.assign(held_out_loss=5.0)) if p.setting.scale else p for p in worse]
    assert answers(worse, *claims) == [FAILS] * 2
    assert "perplexity" not in verdicts(worse)
    one = grid(1.0, reductions=["mean"])
    other = [run for run in worse if run.setting.reduction == "sum"]
    for runs in (one, [*one, *other]):
        assert answers(runs, "weight-decay") == [UNDECIDED]


def test_the_best_setting_is_not_judged_on_what_it_was_chosen_by() -> None:
    """Oracle: by hand. In one group each seed has a lucky setting, which the other seeds do not choose."""
    loss = {(0, 0.0): 1.0, (1, 0.0): 3.0, (2, 0.0): 3.0, (0, 1.0): 2.5, (1, 1.0): 1.5, (2, 1.0): 2.5}
    runs = [
        finished_run(Setting(scale=100.0, mean=mean, seed=seed), loss=value, scale=1.0, entropy=1.0)
        for (seed, mean), value in loss.items()
    ]
    runs += [finished_run(Setting(seed=seed), loss=2.0, scale=1.0, entropy=1.0) for seed in range(3)]
    groups = [Setting(scale=100.0), Setting(scale=100.0, mean=1.0)], [Setting()]
    # Means of the other seeds: (3, 2), (2, 2.5), (2, 2): seed 0 takes the second, seeds 1 and 2 the first.
    estimate = left_out(at_step(runs, 10), groups, "final_loss")
    assert estimate.value == pytest.approx(np.mean([2.5 - 2, 3 - 2, 3 - 2]))
    assert estimate.n == 3


def test_only_settings_that_differ_are_ranked() -> None:
    """Oracle: the scales put in: five alike within 1 %, and one, or two, of their own."""
    alike = [Setting(scale=100.0, mean=mean) for mean in MEANS]
    plain, decay = Setting(), Setting(weight_decay=1.0)
    rows, rises = at_step(grid(0.01), 10), criterion("localization/rises")
    assert distinct(rows, [*alike, plain], "frobenius_squared", rises) == [alike[::-1], [plain]]
    groups = distinct(rows, [*alike, plain, decay], "frobenius_squared", rises)
    assert groups == [alike[::-1], [decay], [plain]]
    effect = association(rows, groups, "entropy", "frobenius_squared")
    assert (effect.value, effect.error) == pytest.approx((-1, 1 / math.sqrt(2 * 3)))
    effect = association(rows, [groups[0], groups[2]], "entropy", "frobenius_squared")
    assert effect.value == pytest.approx(2.0 - np.mean([3 * math.exp(0.0005 * rank) for rank in range(5)]))
    link = verdicts([run for run in grid(0.01) if run.setting.scale])["scale-and-entropy"]
    assert link.answer == UNTESTABLE
    assert "no two of 10 settings differ" in link.evidence


def test_other_ways_are_judged_apart() -> None:
    """Oracle: opposite effects put in; κ₂ = 0, which has no second term, begins the printed gradient's."""
    printed = [
        replace(p, setting=replace(p.setting, gradient="published"))
        for p in grid(-1.0, reductions=["mean"])
        if p.setting.mean > 0
    ]
    runs = [*grid(1.0), *printed]
    assert answers(runs, "scale", "entropy") == [HOLDS] * 2
    assert answers(runs, "At step 10 LocAteR, printed gradient has the lower perplexity (ours)") == [FAILS]
    outcome = filled(runs)
    assert "Training with LocAteR, printed gradient" in {figure.title for figure in outcome.exhibits}
    assert "κ₂ = 1, printed gradient" in outcome.tables["settings"]["setting"].tolist()


def test_all_are_compared_at_one_step() -> None:
    """Oracle: a training cut by hand; the lowest loss is of the steps up to there."""
    runs = grid(1.0)
    runs[0] = replace(
        runs[0], losses=runs[0].losses.iloc[:3], heads=runs[0].heads.iloc[:3], propagation_steps=STEPS[:3],
        propagation=runs[0].propagation[:3],
    )  # fmt: skip
    assert common_step(runs) == 2
    rows = at_step(runs, 2)
    assert (rows["final_loss"] == 8.0).all()
    rows = at_step(runs[1:], 10)
    np.testing.assert_allclose(rows["final_loss"] - rows["lowest_loss"], 0.1)
    assert (rows["lowest_step"] == 5).all()
    np.testing.assert_allclose(rows["stripes"].iloc[0], 0.05, rtol=1e-6)  # half at 0.6, half at 0.5


def write(folder: Path, runs: list[GridRun]) -> None:
    folder.mkdir()
    Unfinished(folder, RECIPE, folder=folder).begin()
    for run in runs:
        place = folder / "points" / run.setting.name
        place.mkdir(parents=True)
        Unfinished(place, asdict(run.setting), folder=place).begin()
        run.losses.to_parquet(place / "losses.parquet")
        run.heads.to_parquet(place / "heads.parquet")
        curves = {"steps": torch.tensor(run.propagation_steps), "propagation": run.propagation}
        write_checked(place / "propagation.safetensors", curves)


def test_figures_from_a_folder(tmp_path: Path) -> None:
    """Oracle: the names of the published figures, and the values that were put in, read back out of the drawings."""
    write(tmp_path / "grid", [*grid(1.0), *grid(1.0, layers=3)])
    assert len(read_grid(tmp_path / "grid")[1]) == 72
    study = Study(grid_provenance(tmp_path / "grid"))
    made_by = {experiment.name: experiment for experiment in [*OF_SHAPES, figure_7]}
    assert set(made_by) == {f"localization/figure{place}" for place in range(6, 13)}
    outcome = study.outcome(made_by["localization/figure9"])
    drawn = {figure.key: figure.figure for figure in outcome.exhibits}
    assert set(drawn) == {"curves", "curves-sum", "decays", "maps", "profiles"}
    strongest = [t for t in drawn["curves"].data if t.name == "κ₂ = 1" and t.yaxis == "y4"]
    np.testing.assert_allclose(strongest[0].y[-1], np.mean(np.exp([3.8, 3.801, 3.802])), rtol=1e-6)
    assert drawn["maps"].data[0].z.shape == (8, 5)
    assert {figure.key for figure in study.outcome(made_by["localization/figure7"]).exhibits} == {
        "maps",
        "profiles",
    }
    with pytest.raises(
        UsageError, match=r"no training run of 6 layers at d = 32 .*1 layers at d = 32, 3 layers"
    ):
        study.outcome(made_by["localization/figure10"])
    assert command_of([*OF_SHAPES, figure_7]) == "theodolite train locater"
    del study.provenance["grid"]
    with pytest.raises(UsageError, match="pass the folder"):
        study.outcome(made_by["localization/figure8"])
