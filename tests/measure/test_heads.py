"""From sums over contexts to tables; columns of heads are compared with dense matrices by `tests/passes`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests import checkpoints
from theodolite.corpus.corpus import Corpus
from theodolite.measure.heads import examples_table, sinks_table
from theodolite.passes.survey import survey


def test_an_unseen_key_has_no_propagation(opened):
    """Oracle: the mean over the keys that are seen. Mistral's window is of 7."""
    run = survey(opened("mistral"), Corpus.random_tokens(checkpoints.VOCABULARY, 24, 4))
    by_position = run.arrays["propagation_by_position"].numpy()
    assert np.isnan(by_position[..., :-7]).all()
    np.testing.assert_allclose(run.heads["propagation"], by_position[..., -7:].mean(-1).ravel(), rtol=1e-6)


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
