"""Clusters of context vectors, against their definitions and planted ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from theodolite.measure.contexts import clusters


def planted(spread: float, groups: int = 4, each: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    centres = torch.linalg.qr(torch.randn(12, groups, generator=generator))[0].T
    labels = torch.arange(groups).repeat_interleave(each)
    noise = torch.randn(2, len(labels), 12, generator=generator) * spread
    size = torch.rand(len(labels), 1, generator=generator) * 10 + 0.1  # lengths say nothing
    return (centres[labels] + noise) * size, labels


def crossed(ctx: torch.Tensor) -> torch.Tensor:
    """Cosines between contexts, one half of the positions against the other."""
    one, other = torch.nn.functional.normalize(ctx, dim=-1).double()
    return (one @ other.T + other @ one.T) / 2


def _silhouette(cosines: np.ndarray, labels: np.ndarray) -> float:
    """Rousseeuw 1987: (b − a)/max(a, b), a to the own cluster's others, b to the nearest other cluster."""
    distance = 1 - cosines
    values = []
    for i, label in enumerate(labels):
        own = (labels == label) & (np.arange(len(labels)) != i)
        a = distance[i, own].mean()
        b = min(distance[i, labels == other].mean() for other in set(labels) - {label})
        values.append((b - a) / max(a, b))
    return float(np.mean(values))


def _adjusted_rand(one: np.ndarray, other: np.ndarray) -> float:
    """Hubert & Arabie 1985, by counting pairs."""
    a, b = np.triu_indices(len(one), 1)
    same, found = one[a] == one[b], other[a] == other[b]
    both, pairs = (same & found).sum(), len(a)
    expected = same.sum() * found.sum() / pairs
    return float((both - expected) / ((same.sum() + found.sum()) / 2 - expected))


@pytest.mark.parametrize("spread", [0.05, 0.8])
def test_numbers_follow_their_definitions(spread):
    """Oracle: silhouette and adjusted Rand index by counting; singletons and unlabelled contexts are left out."""
    ctx, labels = planted(spread)
    labels = torch.cat([labels, torch.tensor([-1, 77])])
    ctx = torch.cat([ctx, torch.randn(2, 2, 12, generator=torch.Generator().manual_seed(3))], dim=1)
    cosines = crossed(ctx)
    numbers, found = clusters(ctx, cosines, labels)
    assert found[-2:].tolist() == [-1, -1]
    expected = _silhouette(cosines[:-2, :-2].numpy(), labels[:-2].numpy())
    assert numbers["silhouette"] == pytest.approx(expected, rel=1e-9)
    assert numbers["cluster_ari"] == pytest.approx(_adjusted_rand(labels[:-2].numpy(), found[:-2].numpy()))
    assert (numbers["cluster_ari"] == 1) == (spread < 0.1)


def test_a_start_is_continued_and_the_same_again_gives_the_same():
    """Oracle: planted clusters; a start that is right stays, and fewer contexts may lack a cluster."""
    ctx, labels = planted(0.05)
    first, found = clusters(ctx, crossed(ctx), labels)
    again, same = clusters(ctx, crossed(ctx), labels)
    assert first == again
    assert torch.equal(found, same)
    some = labels != 2
    numbers, _ = clusters(ctx[:, some], crossed(ctx)[some][:, some], labels[some], found[some])
    assert numbers["cluster_ari"] == 1


@pytest.mark.parametrize("labels", [[-1, -1, -1, -1], [0, 0, 0, 0], [0, 0, 1, 2], []])
def test_too_few_labels_give_no_number(labels):
    ctx = torch.ones(2, len(labels), 3)
    numbers, found = clusters(ctx, crossed(ctx), torch.tensor(labels, dtype=torch.int64))
    assert all(math.isnan(value) for value in numbers.values())
    assert found.tolist() == [-1] * len(labels)


def test_equal_contexts_are_no_error():
    """Fewer distinct directions than labels, and zero vectors: scikit-learn would warn."""
    ctx = torch.zeros(2, 6, 3)
    numbers, _ = clusters(ctx, crossed(ctx), torch.tensor([0, 0, 1, 1, 2, 2]))
    assert numbers["cluster_ari"] == 0
