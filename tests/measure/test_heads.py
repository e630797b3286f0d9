"""From sums over contexts to columns of heads. Oracle: the definitions, on whole attention matrices in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from theodolite.measure.heads import examples_table, head_arrays, head_columns, sinks_table

LAYERS, CONTEXTS, HEADS, LENGTH = 2, 5, 3, 7
THRESHOLD = 0.3


@pytest.fixture(scope="module")
def weights() -> np.ndarray:
    """Causal attention (layers, contexts, heads, queries, keys); head 0 pays key 0 most of it."""
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(LAYERS, CONTEXTS, HEADS, LENGTH, LENGTH))
    logits[:, :, 0, :, 0] += 3
    logits[..., np.triu_indices(LENGTH, 1)[0], np.triu_indices(LENGTH, 1)[1]] = -np.inf
    exponentials = np.exp(logits)
    return exponentials / exponentials.sum(-1, keepdims=True)


def entropies(weights: np.ndarray) -> np.ndarray:
    return -np.where(weights > 0, weights * np.log(np.where(weights > 0, weights, 1)), 0).sum(-1)


def score_pairs(paid, able):
    """Σ over contexts of a score, of how many queries could have it, and of their products."""
    able = np.full_like(paid, able)
    return np.stack([paid, able, paid**2, paid * able, able**2], axis=-1).sum(1)


@pytest.fixture(scope="module")
def state(weights) -> dict[str, torch.Tensor]:
    """Sums over the contexts, as `AttentionStatistics` names them."""
    entropy = entropies(weights)
    queries_of_key = np.arange(LENGTH, 0, -1)
    mean_received = weights.sum(-2) / queries_of_key
    sink = mean_received > THRESHOLD
    means = entropy.mean(-1)  # of each context
    previous = np.diagonal(weights, offset=-1, axis1=-2, axis2=-1).sum(-1)
    sums = {
        "contexts": np.full(LAYERS, float(CONTEXTS)),
        "entropy": entropy.sum(1),
        "readers": np.full((LAYERS, LENGTH), float(CONTEXTS)),
        "squared_lengths": np.full(LAYERS, float(CONTEXTS * LENGTH**2)),
        "squared_entropy": LENGTH**2 * means.sum(1),
        "entropy_spread": LENGTH**2 * ((means - means.mean(1, keepdims=True)) ** 2).sum(1),
        "sink": sink.sum(1).astype(float),
        "sink_later": sink[..., 1:].any(-1).sum(1).astype(float),
        "learned": np.zeros((LAYERS, HEADS)),
        "previous": score_pairs(previous, LENGTH - 1),
        "same": np.zeros((LAYERS, HEADS, 5)),
        "received": mean_received.sum(1),
        "visible_keys": np.tile(np.arange(1.0, LENGTH + 1), (LAYERS, 1)),
        "propagates": (weights[..., -1, :] > 0.1).sum(1).astype(float),
        "last_sees": np.full((LAYERS, HEADS, LENGTH), float(CONTEXTS)),
    }
    return {name: torch.tensor(values) for name, values in sums.items()}


def test_columns_are_means_over_contexts(weights, state):
    columns = {name: np.reshape(values, (LAYERS, HEADS)) for name, values in head_columns(state).items()}
    entropy = entropies(weights)
    of_context = entropy.mean(-1)
    np.testing.assert_allclose(columns["entropy"], entropy.mean((1, 3)))
    np.testing.assert_allclose(columns["entropy_se"], of_context.std(1, ddof=1) / np.sqrt(CONTEXTS))
    np.testing.assert_allclose(columns["propagation"], (weights[..., -1, :] > 0.1).mean((1, 3)))
    first = weights[..., 0].mean(-1) > THRESHOLD
    np.testing.assert_allclose(columns["sink_first"], first.mean(1))
    below = [weights[..., i, i - 1] for i in range(1, LENGTH)]
    np.testing.assert_allclose(columns["previous_token"], np.mean(below, axis=(0, 2)))
    spread = np.mean(below, axis=0).std(1, ddof=1) / np.sqrt(CONTEXTS)
    np.testing.assert_allclose(columns["previous_token_se"], spread, rtol=1e-6)
    assert np.isnan(columns["same_token"]).all()  # no token came twice


def test_one_context_has_no_error_and_an_unseen_key_no_propagation(state):
    one = state | {"contexts": torch.ones(LAYERS)}
    assert np.isnan(head_columns(one)["entropy_se"]).all()
    window = state["last_sees"].clone()
    window[:, :, :3] = 0
    windowed = state | {"last_sees": window, "propagates": state["propagates"] * (window > 0)}
    by_position = head_arrays(windowed)["propagation_by_position"]
    assert by_position[..., :3].isnan().all()
    expected = by_position[..., 3:].mean(-1).flatten()
    np.testing.assert_allclose(head_columns(windowed)["propagation"], expected)


def test_arrays_are_by_position(weights, state):
    arrays = head_arrays(state)
    np.testing.assert_allclose(arrays["entropy_by_position"], entropies(weights).mean(1))
    received = [weights[..., key:, key].mean(-1) for key in range(LENGTH)]
    np.testing.assert_allclose(arrays["received_by_position"], np.moveaxis(received, 0, -1).mean(1))
    np.testing.assert_allclose(
        arrays["sink_by_position"], np.moveaxis(np.array(received) > THRESHOLD, 0, -1).mean(1)
    )


def test_sinks_are_ordered_by_head_and_by_how_often_they_are_one():
    """Written by hand: layer, head, token, first, contexts, positions, sum of positions."""
    rows = torch.tensor(
        [[1, 0, 5, 0, 2, 4, 10], [0, 1, 7, 1, 5, 5, 0], [0, 1, 3, 0, 5, 5, 15], [0, 1, 9, 0, 1, 1, 6]]
    )
    table = sinks_table(
        {"sink_tokens": rows, "contexts": torch.tensor([5.0], dtype=torch.float64)}, "t{}".format
    )
    assert table["token"].tolist() == ["t3", "t7", "t9", "t5"]
    assert table["first"].tolist() == [False, True, False, False]
    assert table["share"].tolist() == pytest.approx([1, 1, 0.2, 0.4])
    assert table["position"].tolist() == [3.0, 0.0, 6.0, 2.5]


def test_an_example_shows_the_head_that_pays_most():
    received = torch.tensor([[[0.2, 0.9]], [[0.4, 0.1]]])  # layers, examples, positions
    head = torch.tensor([[[1, 2]], [[3, 0]]])
    state = {"example_received": received, "example_head": head}
    table = examples_table(state, torch.tensor([[11, 12]]), 0.5, str)
    assert table[["token", "layer", "head", "sink"]].to_numpy().tolist() == [
        ["11", 1, 3, False],
        ["12", 0, 2, True],
    ]
