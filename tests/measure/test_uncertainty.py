"""Sampling errors of the layers' numbers and of arrays, against fresh corpora and written-out formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from theodolite.accumulate.means import Means, Sample
from theodolite.accumulate.outliers import OutlierCounts
from theodolite.accumulate.second_moments import Centred, MomentSketches, SecondMoments
from theodolite.measure.contexts import context_columns
from theodolite.measure.geometry import outliers_table, stream_columns
from theodolite.measure.position import position_columns, sketched_moment
from theodolite.theory.unbiased import Jackknifed, leaving_out

CONTEXTS, LENGTH, WIDTH = 64, 18, 12
SMOOTH = ("stable_rank", "relative_norm", "position_energy", "pp_low_frequency_3", "norm", "norm_first")


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
            sketches.update_centred(layer, Centred.of(part[:, 1:]), start)
    labels = torch.full((contexts,), -1) if labels is None else labels
    return (means.state(), moments.state(), sketches.state(), outliers.state()), sample, labels


def columns(h: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Jackknifed]:
    (means, moments, sketches, outliers), sample, labels = states(h, labels)
    found = position_columns(means, moments, sketches) | context_columns(means, sample, labels)
    found |= stream_columns(means, outliers)
    return {name: values for name, values in found.items() if isinstance(values, Jackknifed)}


def test_of_a_mean_it_is_the_classic_standard_error():
    """Oracle: s/√8 of the eight group means, numpy."""
    h = hidden(0)
    norm = np.linalg.norm(h.double().numpy()[:, :, 1:], axis=-1).mean(2).reshape(2, 8, 8).mean(2)
    np.testing.assert_allclose(columns(h)["norm"].error, norm.std(1, ddof=1) / np.sqrt(8), rtol=1e-9)


@pytest.mark.slow
def test_fresh_corpora_spread_as_the_standard_error_says():
    """Oracle: Monte Carlo. The spread over 48 corpora is known to 10 %, the mean of 48 errors to 4 %."""
    found = [columns(hidden(seed)) for seed in range(48)]
    for name in (*SMOOTH, "incoherence_mean", "similarity_random", "rank_collapse", "cosine_previous"):
        values = np.array([float(one[name].value[1]) for one in found])
        root_mean_square = np.sqrt(np.mean([float(one[name].error[1]) ** 2 for one in found]))
        # The root of what is not far above its noise has an interval for both sides, and so a larger error.
        most = 1.6 if name.startswith(("incoherence", "similarity")) else 1.3
        assert 0.75 < root_mean_square / np.std(values, ddof=1) < most, name


def test_a_layer_without_positions_has_none():
    """Oracle: independent contexts whose positions are exchangeable: the truth is 0, plain numbers say 1/√C."""
    h = torch.randn(1, 16, 40, 24, generator=torch.Generator().manual_seed(3))
    found = columns(h)
    for name in ("relative_norm", "position_energy"):
        assert abs(float(found[name].value[0])) <= 2 * float(found[name].error[0]), name
    assert float(found["relative_norm"].value[0]) < float(found["relative_norm_floor"].value[0])
    assert found["low_frequency_10"].value.isnan().all()
    assert float(found["rank"].value[0]) == 0


def test_incoherence_is_of_groups_and_halves_that_share_nothing():
    """Oracle: numpy, pair by pair of groups that do not hold the context."""
    h = hidden(5, contexts=16)
    (means, _, _, _), sample, labels = states(h)
    x = h[1].double().numpy()[:, 1:]
    group = np.arange(16) // 2
    p = np.stack([x[group == g].mean(0) for g in range(8)])
    p -= p.mean(1, keepdims=True)
    half = np.arange(x.shape[1]) // max(1, min(16, x.shape[1] // 4)) % 2
    pos = x.mean(0)
    u, v = ((x - pos)[:, half == side].mean(1) for side in (0, 1))
    means_of = [np.stack([w[group == g].mean(0) for g in range(8)]) for w in (u, v)]
    products = means_of[0] @ means_of[1].T
    common = -(products.sum() - products.trace()) / 56
    sizes = np.linalg.norm(u, axis=1), np.linalg.norm(v, axis=1)

    def square(groups: list[int]) -> float:
        total = agreement = 0.0
        for c in (c for c in range(16) if group[c] in groups):
            others = [g for g in groups if g != group[c]]
            crossed = [(p[a] @ u[c]) @ (p[b] @ v[c]) for a in others for b in others if a != b]
            total += np.mean(crossed) / (sizes[0][c] * sizes[1][c])
            agreement += (u[c] @ v[c] + common) / (sizes[0][c] * sizes[1][c])
        energy = np.mean([(p[a] * p[b]).sum() for a in groups for b in groups if a != b])
        return total / (energy * agreement)

    every = list(range(8))
    without = np.mean([square([g for g in every if g != out]) for out in every])
    expected = 8 * square(every) - 7 * without
    found = context_columns(means, sample, labels)["incoherence_mean"]
    assert float(found.value[1]) == pytest.approx(np.sign(expected) * abs(expected) ** 0.5, rel=1e-8)


def test_sketches_give_the_error_that_whole_moments_give():
    """Oracle: numpy's largest singular value without each group, where the sketch leaves two thirds of it out."""
    h = hidden(7, width=96)[:1]
    (_, _, sketches, _), *_ = states(h)
    sketch = {name: values[0] for name, values in sketches.items()}
    # As many tokens are left in each case: 8/7 of what seven groups have.
    found = leaving_out(lambda used: sketched_moment(sketch, list(range(8)), used)[0] * used.sum() / 8, 8)
    x = h[0].double().numpy()[:, 1:]
    parts = [x[np.arange(CONTEXTS) // 8 != g].reshape(-1, 96) for g in range(8)]
    exact = np.array([np.linalg.norm(part - part.mean(0), 2) ** 2 for part in parts])
    assert float(found.error) == pytest.approx(exact.std() * 7**0.5, rel=0.1)


def test_too_few_contexts_say_nothing():
    """Oracle: the definitions: a norm needs two groups, a share of a Gram matrix four, and its error one more."""
    few = columns(hidden(1, contexts=3), torch.zeros(3, dtype=torch.int64))
    assert few.keys() == columns(hidden(1)).keys()
    assert few["pp_low_frequency_3"].value.isnan().all()
    assert few["norm"].value.isfinite().all()


def test_large_values_have_the_errors_of_eight_groups():
    """Oracle: s/√8 of the groups' counts, and sizes of the tokens without each group, written out."""
    h = hidden(0)
    h[1, 5, 4:9, 7] = 1e6
    h[1, 40, 0, 7] = 1e6
    (means, _, _, outliers), *_ = states(h)
    groups = h[1].double().reshape(8, CONTEXTS // 8, LENGTH, WIDTH)
    table, arrays = outliers_table(outliers, means)
    row = table.index[(table["layer"] == 1) & (table["dimension"] == 7)][0]
    for name, place in (("massive", groups[:, :, 1:]), ("massive_first", groups[:, :, :1])):
        counts = (place[..., 7] > 1e5).double().sum(dim=(1, 2))
        assert table[f"{name}_se"][row] == pytest.approx(float(8 * counts.std(correction=1) / 8**0.5))
        np.testing.assert_allclose(
            arrays[f"outliers.{name}.without"][:, row], (counts.sum() - counts) * 8 / 7
        )
    assert table["massive_se"][row] == pytest.approx(5.0)
    for group in range(8):
        left = groups[np.arange(8) != group][:, :, 1:].abs().log().mean(dim=(0, 1, 2)).exp()
        torch.testing.assert_close(arrays["typical_magnitude.without"][group, 1], left.float())
    whole = groups[:, :, 1:].abs().log().mean(dim=(0, 1, 2)).exp()
    torch.testing.assert_close(arrays["typical_magnitude"][1], whole.float())


@pytest.mark.parametrize("width", [WIDTH, 40])
def test_leading_directions_are_those_of_the_other_groups(width):
    """Oracle: the SVD of the mean of the contexts of seven groups; P is tall in one case and wide in the other."""
    h = hidden(0, width=width)
    (means, moments, sketches, _), *_ = states(h)
    found = position_columns(means, moments, sketches)["positional_directions.without"].double()
    assert found.shape == (8, 2, min(20, LENGTH - 1, width), width)
    for group in range(8):
        own = h[0, np.arange(CONTEXTS) // 8 != group].double().mean(0)[1:]
        expected = torch.linalg.svd(own - own.mean(0)).Vh[:3]
        torch.testing.assert_close(
            (found[group, 0, :3] @ expected.T).abs(), torch.eye(3).double(), rtol=0, atol=2e-3
        )


def test_few_contexts_have_nothing_without_a_group():
    (means, moments, sketches, outliers), *_ = states(hidden(0, contexts=7))
    _, arrays = outliers_table(outliers, means)
    arrays |= position_columns(means, moments, sketches)
    left_out = [values for name, values in arrays.items() if name.endswith(".without")]
    assert len(left_out) == 4
    assert all(values.isnan().all() for values in left_out)
