"""Oracles: contexts that are clusters by construction, permutations undone by hand, and random directions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.papers.shared import answers, verdicts_of
from theodolite.errors import UsageError
from theodolite.judging import FAILS, HOLDS, UNDECIDED, UNTESTABLE
from theodolite.measure.clusters import clusters
from theodolite.measure.geometry import contextual, random_maximum
from theodolite_papers import Study, reproduce
from theodolite_papers.catalogue import EXPERIMENTS
from theodolite_papers.experiment import criterion
from theodolite_papers.hidden_geometry.layer_columns import quotient
from theodolite_papers.hidden_geometry.separation import _deepens, cluster_shares

CLUSTERS, INCOHERENCE = EXPERIMENTS["geometry/clusters"], EXPERIMENTS["geometry/incoherence"]


def _measured(run, spread: float, seed: int = 0):
    """The run with contexts of four labels, so far from their centres, measured by the package's own functions."""
    generator = torch.Generator().manual_seed(seed)
    labels = run.arrays["context_label"]
    width = run.arrays["positional_basis"].shape[2]
    centres = torch.randn(4, width, generator=generator)
    layers, rows, measures = len(run.layers), [], []
    contexts = torch.stack(
        [
            centres[labels] + spread * torch.randn(len(labels), width, generator=generator)
            for _ in range(layers)
        ]
    )
    baseline = random_maximum(width, (run.arrays["positional_basis"].shape[1] - 1) * len(labels))
    for layer in range(layers):
        numbers, cluster = clusters(contexts[layer], labels)
        basis = run.arrays["positional_basis"][layer, 1:]
        rows.append(
            numbers | contextual(basis, contexts[layer], labels) | {"incoherence_max_random": baseline}
        )
        measures.append(cluster)
    table = run.layers.assign(**{name: [row[name] for row in rows] for name in rows[0]})
    arrays = run.arrays | {"context_basis": contexts, "context_cluster": torch.stack(measures)}
    errors = {f"{name}_se": 0.001 for name in rows[0] if f"{name}_se" not in run.layers}
    return replace(run, layers=table.assign(**errors), arrays=arrays)


def test_planted_clusters_are_seen_and_noise_is_not(run):
    """Oracle: contexts at a tenth of the distance between centres, and contexts at forty times it."""
    tight = Study(_measured(run, 0.1)).outcome(CLUSTERS)
    assert [verdict.answer for verdict in tight.verdicts] == [HOLDS, HOLDS, HOLDS]
    loose = Study(_measured(run, 40.0)).outcome(CLUSTERS)
    assert [verdict.answer for verdict in loose.verdicts][1:] == [FAILS, FAILS]
    diagonal = np.diag(np.array(tight.exhibits[1].figure.data[0].z))
    np.testing.assert_array_equal(diagonal, 1)


def test_columns_are_clusters_in_the_order_of_their_labels():
    """Oracle: clusters numbered by a permutation of the labels, one context astray."""
    labels = np.array([0, 0, 1, 1, 2, 2, -1])
    shares = np.array([2, 2, 0, 0, 1, 2, -1])
    np.testing.assert_allclose(
        cluster_shares(labels, shares, [0, 1, 2]), [[1, 0, 0], [0, 1, 0], [0.5, 0, 0.5]]
    )
    assert cluster_shares(labels, shares, [1]).shape == (1, 3)


def test_labels_of_one_context_each_are_refused(run):
    alone = torch.arange(len(run.arrays["context_label"]))
    run = _measured(run, 0.1)
    with pytest.raises(UsageError, match="two labels with two contexts"):
        Study(replace(run, arrays=run.arrays | {"context_label": alone})).outcome(CLUSTERS)


def test_random_directions_are_incoherent_and_shared_ones_are_not(run):
    """Oracle: normal vectors in the place of positions; and contexts that are positions."""
    random = torch.randn(run.arrays["positional_basis"].shape, generator=torch.Generator().manual_seed(3))
    drawn = replace(run, arrays=run.arrays | {"positional_basis": random})
    outcome = Study(_measured(drawn, 40.0)).outcome(INCOHERENCE)
    assert outcome.verdicts[0].answer == HOLDS
    ratio = float(outcome.readings[-1].here)
    assert ratio == pytest.approx(1, abs=0.05)
    measured = _measured(drawn, 40.0)
    table = measured.layers.assign(incoherence_mean=0.9, incoherence_max=1.0)
    aligned = Study(replace(measured, layers=table)).outcome(INCOHERENCE)
    assert [verdict.answer for verdict in aligned.verdicts] == [FAILS, FAILS]


@pytest.mark.parametrize(("error", "expected"), [(0.001, FAILS), (0.1, UNDECIDED)])
def test_the_table_and_the_layers_know_the_same_errors_of_the_ratio(run, error, expected):
    """Oracle: a ratio a tenth below the criterion at every layer, by many errors or by a fraction of one."""
    columns = {
        "similarity_within": 0.9 * criterion("geometry/separation").limit * 0.3,
        "similarity_between": 0.3,
    }
    columns |= {f"{name}_se": error for name in columns}
    measured = _measured(run, 0.1)
    measured = replace(measured, layers=measured.layers.assign(**columns))
    assert reproduce("geometry/table1", measured).verdicts[2].answer == expected
    assert Study(measured).outcome(CLUSTERS).verdicts[2].answer == expected


def test_the_error_of_a_quotient_is_that_of_drawn_ones():
    """Oracle: the spread of quotients of independent normal numbers."""
    generator = np.random.default_rng(0)
    drawn = generator.normal(0.6, 0.01, 50_000) / generator.normal(0.2, 0.005, 50_000)
    ratio, error = quotient(*(np.array([value]) for value in (0.6, 0.01, 0.2, 0.005)))
    assert ratio[0] == pytest.approx(3)
    assert error[0] == pytest.approx(drawn.std(), rel=0.03)


def _deepening(gap) -> list[str]:
    return answers(verdicts_of(_deepens, gap, of="geometry/figure2"))


@pytest.mark.parametrize(
    ("gap", "expected"),
    [([0.1, 0.19, 0.31, 0.4, 0.52, 0.6, 0.71], HOLDS), ([0.1, 0.2, 0.3, 0.4], UNTESTABLE)],
)
def test_a_clear_trend_deepens_and_few_layers_show_none(gap, expected):
    assert _deepening(np.array(gap)) == [expected]


def test_a_random_walk_over_layers_deepens_by_chance_alone():
    """Oracle: 2000 random walks over 7 layers; at one in twenty by chance, 100 hold, with an sd of 10."""
    walks = np.random.default_rng(0).normal(size=(2000, 7)).cumsum(axis=1)
    assert sum(_deepening(walk) == [HOLDS] for walk in walks) <= 100
