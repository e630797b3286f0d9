"""Standard errors from halves of the contexts, against dense halves, fresh corpora and the bootstrap."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from tests import dense
from theodolite.accumulate.means import Means, Sample, decomposed_means
from theodolite.accumulate.outliers import OutlierCounts
from theodolite.accumulate.second_moments import MomentSketches, SecondMoments
from theodolite.measure.geometry import geometry
from theodolite.measure.outliers import outliers_table
from theodolite.measure.rank_correlation import error_under_independence, rank_correlation
from theodolite.measure.uncertainty import (
    array_errors,
    balanced_halves,
    half_sample_error,
    standard_errors,
    statistics,
)

CONTEXTS, LENGTH, WIDTH = 64, 18, 12
SMOOTH = ("stable_rank", "relative_norm", "low_frequency_3", "incoherence_mean", "norm", "norm_first")


@pytest.fixture(autouse=True)
def _one_thread():
    """Thousands of tiny operations: threads would mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def hidden(seed: int, contexts: int = CONTEXTS, width: int = WIDTH) -> torch.Tensor:
    """Two layers of independent contexts from one population: a smooth positional basis, topics, noise."""
    population = torch.Generator().manual_seed(0)
    waves = torch.cos(torch.pi / LENGTH * (torch.arange(LENGTH)[:, None] + 0.5) * torch.arange(1, 4))
    pos = waves @ torch.randn(3, width, generator=population)
    scale = 1 / torch.arange(1, width + 1) ** 0.5
    generator = torch.Generator().manual_seed(1000 + seed)
    size = torch.rand(contexts, 1, 1, generator=generator) + 0.5
    ctx = torch.randn(contexts, 1, width, generator=generator) * scale
    noise = torch.randn(contexts, LENGTH, width, generator=generator) * scale
    first = 2 + pos * size + ctx + 2 * noise
    return torch.stack([first, first + torch.randn(first.shape, generator=generator)])


def states(h: torch.Tensor, labels: torch.Tensor | None = None, batch: int = 16):
    """All states of the accumulators, the sample (every context), the labels."""
    layers, contexts, length, width = h.shape
    sample = Sample(torch.arange(contexts), torch.tensor([0]), torch.tensor([1]))
    means, outliers = Means(layers, length, width, sample), OutlierCounts(layers, width, contexts)
    moments, sketches = SecondMoments(layers, width), MomentSketches(layers, width, contexts)
    for start in range(0, contexts, batch):
        for layer in range(layers):
            part = h[layer, start : start + batch]
            means.update(layer, part, start)
            outliers.update(layer, part, start)
            moments.update(layer, part[:, 1:].flatten(0, 1))
            sketches.update(layer, part[:, 1:], start)
    labels = torch.full((contexts,), -1) if labels is None else labels
    return (means.state(), moments.state(), sketches.state(), outliers.state()), sample, labels


def errors(h: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, list[float]]:
    (means, _, sketches, outliers), sample, labels = states(h, labels)
    found = torch.full((len(h), len(labels)), -1)
    if (labels >= 0).any():
        found = labels.expand(len(h), -1)
    return standard_errors(means, sketches, outliers, sample, labels, found)


def test_of_a_mean_it_is_the_classic_standard_error():
    """Oracle: s/√8 of the eight group means, numpy."""
    values = np.random.default_rng(0).normal(3, 2, (8, 5))
    got = half_sample_error(balanced_halves() @ torch.from_numpy(values) / 4)
    np.testing.assert_allclose(got, values.std(0, ddof=1) / np.sqrt(8), rtol=1e-12)
    h = hidden(0)
    norm = np.linalg.norm(h.double().numpy()[:, :, 1:], axis=-1).mean(2).reshape(2, 8, 8).mean(2)
    np.testing.assert_allclose(errors(h)["norm_se"], norm.std(1, ddof=1) / np.sqrt(8), rtol=1e-9)


def test_every_half_has_the_numbers_of_its_contexts_alone():
    """Oracle: the dense survey of a half's hidden states; counts are doubled, as for the whole corpus."""
    h = hidden(3)
    h[0, 5, 4, 2], h[1, 40, 0, 3] = 5e3, -9e3  # massive activations
    labels = torch.arange(CONTEXTS) % 5
    (means, _, sketches, outliers), sample, _ = states(h, batch=11)
    known = means, sketches, outliers, sample, labels, labels
    for half in balanced_halves()[[0, 5, 9]]:
        inside = (half[torch.arange(CONTEXTS) // 8] > 0).numpy()
        kept = dense.Dense(h.double().numpy()[:, inside], np.empty(0), np.empty(0))
        expected = dense.layer_columns(kept, labels[inside].numpy())
        for layer in range(2):
            got = statistics(*known, layer, half[None])[0]
            for name, values in expected.items():
                scale = 2 if name.startswith("massive") else 1
                assert got[name] == pytest.approx(scale * values[layer], rel=2e-5, abs=1e-6, nan_ok=True), (
                    name
                )


@pytest.mark.parametrize("shape", [(LENGTH, WIDTH), (LENGTH, 40)])
def test_all_groups_together_have_the_numbers_of_the_table(shape):
    """Oracle: `geometry`, which takes singular values of P itself; P is wide in one case and tall in the other."""
    h = hidden(4, width=shape[1])
    labels = torch.arange(CONTEXTS) // 8
    (means, moments, sketches, outliers), sample, _ = states(h)
    found = geometry(means, moments, outliers, sample, labels)
    columns = {name: values for name, values in found.items() if isinstance(values, list) and name != "layer"}
    for layer in range(2):
        known = means, sketches, outliers, sample, labels, found["context_cluster"][layer]
        got = statistics(*known, layer, torch.ones(1, 8, dtype=torch.float64))[0]
        assert got.keys() == columns.keys()
        for name, values in columns.items():
            if "random" not in name:
                # Of which a sketch sees the largest part.
                tolerance = 0.02 if name == "relative_norm" else 1e-5
                assert got[name] == pytest.approx(values[layer], rel=tolerance, nan_ok=True), name


@pytest.mark.slow
def test_fresh_corpora_spread_as_the_standard_error_says():
    """Oracle: Monte Carlo. The spread over 48 corpora is known to 10 %, the mean of 48 errors to 4 %."""
    estimates: dict[str, list[float]] = {}
    reported: dict[str, list[float]] = {}
    for seed in range(48):
        h = hidden(seed)
        (means, moments, sketches, outliers), sample, labels = states(h)
        columns = geometry(means, moments, outliers, sample, labels)
        se = standard_errors(means, sketches, outliers, sample, labels, columns["context_cluster"])
        for name in (*SMOOTH, "rank_collapse", "cosine_previous"):
            estimates.setdefault(name, []).append(columns[name][1])
            reported.setdefault(name, []).append(se[name + "_se"][1])
    for name, values in estimates.items():
        root_mean_square = np.sqrt(np.mean(np.square(reported[name])))
        assert root_mean_square == pytest.approx(np.std(values, ddof=1), rel=0.25), name


def test_sketches_give_the_error_that_whole_moments_give():
    """Oracle: halves of the dense hidden states, at a width where the sketch leaves two thirds out."""
    h = hidden(7, width=96)[:1]
    x = h[0].double().numpy()
    halves = [x[half[np.arange(CONTEXTS) // 8] > 0] for half in balanced_halves().numpy()]
    kept = dense.Dense(np.stack(halves), np.empty(0), np.empty(0))
    exact = dense.layer_columns(kept, np.zeros(CONTEXTS))["relative_norm"]
    assert errors(h)["relative_norm_se"][0] == pytest.approx(np.std(exact), rel=0.1)


def test_constants_are_certain_and_too_few_contexts_say_nothing():
    """Oracle: the definitions."""
    labels = torch.arange(CONTEXTS) // 16
    whole = errors(hidden(1), labels)
    assert whole["incoherence_random_se"] == whole["incoherence_max_random_se"] == [0.0, 0.0]
    assert np.isnan(whole["cosine_previous_se"][0])
    assert whole["similarity_within_se"][0] > 0
    few = errors(hidden(1, contexts=7), torch.zeros(7, dtype=torch.int64))
    assert few.keys() == whole.keys()
    assert np.isnan(list(few.values())).all()


def test_errors_of_large_values_are_those_of_eight_groups():
    """Oracle: s/√8 of the groups' shares and counts, written out."""
    generator = torch.Generator().manual_seed(0)
    h = hidden(0)
    h[1, :, 1:, 3] = torch.where(torch.rand(CONTEXTS, 1, generator=generator) < 0.3, 9.0, 0.1)
    h[1, 5, 4:9, 7] = 1e6
    h[1, 40, 0, 7] = 1e6
    (means, _, _, outliers), *_ = states(h)
    found = array_errors(means, outliers, decomposed_means(means)[1])
    groups = h[1].reshape(8, CONTEXTS // 8, LENGTH, WIDTH)
    is_large = (groups[:, :, 1:].abs() >= 6).double().mean(dim=(1, 2))
    torch.testing.assert_close(found["outlier_share_by_group"][1], is_large.float())
    table = outliers_table(outliers, means).set_index(["layer", "dimension"])
    for name, place in (("massive_se", groups[:, :, 1:]), ("massive_first_se", groups[:, :, :1])):
        counts = (place[..., 7] > 1e5).double().sum(dim=(1, 2))
        assert table[name][1, 7] == pytest.approx(float(8 * counts.std(correction=1) / 8**0.5))
    assert table["massive_se"][1, 7] == pytest.approx(5.0)


def test_what_sampling_moves_of_directions_is_known():
    """Oracle: how far the directions of fresh corpora lie from those of the population, by dense SVD."""
    waves = torch.cos(torch.pi / LENGTH * (torch.arange(LENGTH)[:, None] + 0.5) * torch.arange(1, 4))
    truth = waves @ torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))
    true = torch.linalg.svd((truth[1:] - truth[1:].mean(0)).double()).Vh
    moved, told = [], []
    for seed in range(40):
        h = hidden(seed)
        (means, _, _, outliers), *_ = states(h)
        told.append(array_errors(means, outliers, decomposed_means(means)[1])["subspace_error"][0, :3])
        basis = h[0].double().mean(0)[1:]
        own = torch.linalg.svd(basis - basis.mean(0)).Vh
        moved.append(torch.stack([1 - (true[:k] @ own[:k].T).square().sum() / k for k in (1, 2, 3)]))
    ratio = torch.stack(told).mean(0) / torch.stack(moved).mean(0)
    assert ((ratio > 0.75) & (ratio < 1.33)).all(), ratio


def test_few_contexts_have_no_errors_of_arrays():
    (means, _, _, outliers), *_ = states(hidden(0, contexts=7))
    found = array_errors(means, outliers, decomposed_means(means)[1])
    by_group = found.pop("outlier_share_by_group")
    assert by_group.isnan().any(dim=1).all()  # a group is empty
    assert all(values.isnan().all() for values in found.values())


def test_batches_with_ties_are_scipys():
    generator = np.random.default_rng(0)
    x = np.round(generator.normal(size=(3, 2, 40)), 1)
    y = x + generator.normal(size=x.shape)
    expected = [
        [spearmanr(*pair).statistic for pair in zip(*rows, strict=True)] for rows in zip(x, y, strict=True)
    ]
    np.testing.assert_allclose(rank_correlation(x, y), expected, atol=1e-12)
    assert float(rank_correlation(x[0, 0], y[0, 0])) == pytest.approx(expected[0][0])


def test_what_does_not_vary_has_no_rank_correlation():
    assert np.isnan(rank_correlation(np.ones(5), np.arange(5.0)))


def test_the_error_is_the_spread_over_permutations():
    generator = np.random.default_rng(0)
    shuffled = generator.permuted(np.tile(np.arange(12.0), (20_000, 1)), axis=1)
    spread = rank_correlation(shuffled, np.tile(np.arange(12.0), (20_000, 1))).std()
    assert spread == pytest.approx(error_under_independence(12), rel=0.02)
