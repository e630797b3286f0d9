"""Columns of heads: from sums and weights to tables; a survey compares them with dense matrices in `tests/passes`."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.fft
import torch
from torch import Tensor

from tests import checkpoints
from tests.report.synthetic import make_survey
from theodolite.accumulate.sums import joined
from theodolite.corpus.corpus import Corpus
from theodolite.measure.head_roles import (
    ATTENTION_PATTERNS,
    COMMON_ROLES,
    END_TOKEN_SINK,
    LEARNED_SINK,
    PATTERN_ROLES,
    SINK_ROLES,
)
from theodolite.measure.heads import examples_table, sinks_table
from theodolite.measure.localization import layer_spectra
from theodolite.measure.position import GroupedBasis, argmax_property, positional_heads, qk_low_frequency
from theodolite.models.weights.head_weights import EXACT, HeadWeights
from theodolite.passes.survey import survey


def test_an_unseen_key_has_no_propagation(opened):
    """Oracle: the mean over the keys that are seen. Mistral's window is of 7."""
    run = survey(opened("mistral"), Corpus.random_tokens(checkpoints.VOCABULARY, 24, 4))
    by_position = run.arrays["propagation_by_position"].numpy()
    assert np.isnan(by_position[..., :-7]).all()
    np.testing.assert_allclose(run.heads["propagation"], by_position[..., -7:].mean(-1).ravel(), rtol=1e-6)


def test_sinks_are_ordered_by_head_and_by_how_often_they_are_one():
    """Written by hand: layer, head, token, first; contexts, sinks, sum of positions."""
    sums = {
        "keys": torch.tensor([[1, 0, 5, 0], [0, 1, 7, 1], [0, 1, 3, 0], [0, 1, 9, 0]]),
        "contexts": torch.tensor([[2.0, 0], [3, 2], [3, 2], [0, 1]]),
        "sinks": torch.tensor([4.0, 5, 5, 1]),
        "positions": torch.tensor([10.0, 0, 15, 6]),
    }
    contexts = {"contexts": torch.tensor([[3.0, 2]])}
    table, arrays = sinks_table(joined({"sink_tokens": sums}) | contexts, "t{}".format)
    assert table["token"].tolist() == ["t3", "t7", "t9", "t5"]
    assert table["first"].tolist() == [False, True, False, False]
    assert table["share"].tolist() == pytest.approx([1, 1, 0.2, 0.4])
    assert table["position"].tolist() == [3.0, 0.0, 6.0, 2.5]
    without = [[1, 1, 0.5, 0], [1, 1, 0, 2 / 3]]
    torch.testing.assert_close(arrays["sinks.share.without"], torch.tensor(without))


def test_an_example_shows_the_head_that_pays_most():
    received = torch.tensor([[[0.2, 0.9]], [[0.25, 0.1]]])  # layers, examples, positions
    head = torch.tensor([[[1, 2]], [[3, 0]]])
    state = {"example_received": received, "example_head": head}
    table, _ = examples_table(state, torch.tensor([[11, 12]]), str)
    assert table[["token", "layer", "head", "sink"]].to_numpy().tolist() == [
        ["11", 1, 3, False],
        ["12", 0, 2, True],
    ]


ROLES = (*PATTERN_ROLES, *SINK_ROLES)


def test_every_role_is_read_off_a_column_of_its_own():
    assert len({role.column for role in ROLES}) == len(ROLES)
    assert set(COMMON_ROLES) == set(ROLES) - {LEARNED_SINK, END_TOKEN_SINK}
    assert {role.column for role in COMMON_ROLES} <= set(make_survey().heads.columns)
    assert set(ATTENTION_PATTERNS.values()) == set(PATTERN_ROLES)


HEADS, WIDTH, HEAD_WIDTH = 3, 12, 4


def test_without_weights_all_is_nan_and_of_the_same_shape():
    generator = torch.Generator().manual_seed(0)
    w_q, w_k, w_v = torch.randn(3, HEADS, WIDTH, HEAD_WIDTH, generator=generator, dtype=torch.float64)
    bias = torch.zeros(HEADS, HEAD_WIDTH, dtype=torch.float64)
    weights = HeadWeights(w_q, w_k, w_v, bias, bias, bias, 0.4, EXACT)
    covariance = torch.eye(WIDTH, dtype=torch.float64)
    known = layer_spectra(weights, covariance, HEADS, HEAD_WIDTH)
    unknown = layer_spectra(None, covariance, HEADS, HEAD_WIDTH)
    assert {name: tensor.shape for name, tensor in unknown.items()} == {
        name: tensor.shape for name, tensor in known.items()
    }
    assert all(tensor.isnan().all() for tensor in unknown.values())
    assert not any(name.endswith("_data") for name in layer_spectra(None, None, HEADS, HEAD_WIDTH))


def sample(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ratios(matrix: np.ndarray) -> list[float]:
    energy = scipy.fft.dctn(matrix, type=2, norm="ortho") ** 2
    return [energy[:k, :k].sum() / energy.sum() for k in (1, 3, 5, 10)]


def test_argmax_property_of_known_matrices() -> None:
    """Closed forms: on a circle W = I has its largest entry at the diagonal, −I nowhere but at the start."""
    angle = torch.arange(100, dtype=torch.float64) * 3 / 100
    rows = torch.stack([angle.cos(), angle.sin()], dim=-1).expand(3, -1, -1)
    assert [float(argmax_property(query, rows)) for query in (rows, -rows)] == [1, 0.01]
    assert argmax_property(rows[:1], rows[:1]).isnan()


def test_noise_alone_has_the_argmax_property_by_chance_only() -> None:
    """Oracle: 1 of t entries is the largest; the mean of all contexts has it nearly everywhere, by its own noise."""
    shares, raised = [], []
    for seed in range(20):
        noise, w = sample(seed, 8, 60, 32), torch.eye(32) + sample(99, 32, 32) / 4
        shares.append(float(argmax_property(noise @ w, noise)))
        own = noise.mean(dim=0, keepdim=True).expand(2, -1, -1)
        raised.append(float(argmax_property(own @ w, own)))
    chance = sum(1 / t for t in range(1, 61)) / 60
    assert np.mean(shares) == pytest.approx(chance, abs=0.02)
    assert np.mean(raised) > 0.9


def test_noise_alone_has_no_share_of_pwp() -> None:
    """By chance it does in a few draws. What a planted basis has is compared with dense matrices in `tests/passes`."""
    w_q, w_k = sample(101, 2, 32, 8), sample(102, 2, 32, 8)
    unknown = []
    for seed in range(40):
        noise = sample(seed, 8, 48, 32)
        mean = noise.mean(dim=1)
        groups = GroupedBasis(
            noise - mean[:, None], mean, torch.full((8, 48), 2.0), range(8), torch.arange(1, 49)
        )
        unknown.append(positional_heads(groups, w_q, w_k)[1].value.isnan())
    assert torch.stack(unknown).double().mean() > 0.9


def test_queries_and_grouped_keys() -> None:
    """Oracle: scipy's transform of each head's dense QKᵀ, key head g for query heads 2g and 2g + 1."""
    query, key = sample(6, 3, 4, 20, 5) + 1, sample(7, 3, 2, 20, 5) - 1
    got = qk_low_frequency(query.float(), key.float())
    assert got.shape == (3, 4, 4)
    for context in range(3):
        for head in range(4):
            expected = ratios((query[context, head] @ key[context, head // 2].mT).numpy())
            np.testing.assert_allclose(got[context, head], expected, rtol=1e-5)
