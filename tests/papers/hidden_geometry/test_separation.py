"""Oracles: contexts that are clusters by construction, permutations undone by hand, and random directions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.papers.hidden_geometry.planted import drawn, grouped
from tests.papers.shared import answers, changed, verdicts_of
from theodolite.errors import UsageError
from theodolite.judging import FAILS, HOLDS, UNDECIDED, UNTESTABLE
from theodolite.measure.contexts import Contexts
from theodolite.theory.unbiased import together
from theodolite_papers import Study, reproduce
from theodolite_papers.catalogue import EXPERIMENTS
from theodolite_papers.experiment import criterion
from theodolite_papers.hidden_geometry.separation import _deepens, cluster_shares

CLUSTERS, INCOHERENCE = EXPERIMENTS["geometry/clusters"], EXPERIMENTS["geometry/incoherence"]


def _measured(run, spread: float, basis: torch.Tensor | None = None):
    """The run with contexts of eight labels, so far from their centres, measured by the package's own functions.

    basis: of every layer, in place of the run's.
    """
    labels = torch.arange(len(run.arrays["context_label"])) % 8
    layers, _, width = run.arrays["positional_basis"].shape
    basis = run.arrays["positional_basis"][:, 1:] if basis is None else basis
    centres = drawn(0, 8, width)[labels]
    group = torch.arange(len(labels)) * 8 // len(labels)
    contexts, found, rows = [], [], []
    for layer in range(layers):
        vectors = centres + spread * drawn(layer + 1, len(labels), width)
        of_layer = Contexts((vectors - vectors.mean(dim=0)).expand(2, -1, -1), labels, group, list(range(8)))
        agreement, cluster = of_layer.clusters()
        incoherence = of_layer.incoherence(grouped(basis[layer, None])[0])
        rows.append(of_layer.similarities() | agreement | {"incoherence_mean": incoherence})
        contexts.append(vectors)
        found.append(cluster)
    numbers = together(rows)
    columns = {name: each.value.numpy() for name, each in numbers.items()}
    columns |= {f"{name}_se": each.error.clamp_min(1e-3).numpy() for name, each in numbers.items()}
    arrays = {"context_label": labels, "context_basis": torch.stack(contexts)}
    arrays |= {"context_cluster": torch.stack(found)}
    return changed(replace(run, arrays=run.arrays | arrays), **columns)


def test_planted_clusters_are_seen_and_noise_is_not(run):
    """Oracle: contexts at a tenth of the distance between centres, and contexts at forty times it."""
    tight = Study(_measured(run, 0.1)).outcome(CLUSTERS)
    assert [verdict.answer for verdict in tight.verdicts] == [HOLDS, HOLDS, HOLDS]
    loose = Study(_measured(run, 40.0)).outcome(CLUSTERS)
    assert answers(loose)[1:] == [FAILS, UNDECIDED]  # neither similarity is above its noise
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
    """Oracle: normal vectors in the place of positions, of which a root mean square cosine is 1/√d; and contexts."""
    layers, positions, width = run.arrays["positional_basis"].shape
    random = changed(_measured(run, 40.0, drawn(9, layers, positions, width)), incoherence_random=width**-0.5)
    outcome = Study(random).outcome(INCOHERENCE)
    assert float(outcome.readings[-1].here) == pytest.approx(1, abs=0.1)
    limit = changed(random, incoherence_random=1.2 * width**-0.5)
    assert answers(Study(limit).outcome(INCOHERENCE)) == [HOLDS]
    aligned = changed(random, incoherence_mean=0.9)
    assert answers(Study(aligned).outcome(INCOHERENCE)) == [FAILS]


@pytest.mark.parametrize(("error", "expected"), [(0.001, FAILS), (0.1, UNDECIDED)])
def test_the_table_and_the_layers_know_the_same_errors_of_the_ratio(run, error, expected):
    """Oracle: a ratio a tenth beyond the criterion at every layer, by many errors or by a fraction of one."""
    between = 1.1 * criterion("geometry/separation").limit * 0.5
    measured = changed(
        _measured(run, 0.1),
        similarity_within=0.5,
        similarity_within_se=error / 10,
        similarity_between=between,
        similarity_between_se=error,
    )
    assert reproduce("geometry/table1", measured).verdicts[2].answer == expected
    assert Study(measured).outcome(CLUSTERS).verdicts[2].answer == expected


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
