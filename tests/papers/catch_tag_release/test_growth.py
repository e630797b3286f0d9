"""Massive activations through the layers. Oracles: hidden states of transformers' own pass, and read off by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests import checkpoints
from tests.sinks.test_outliers import DIMENSION, TOKEN, hidden_states, plant
from theodolite import Corpus, find_outliers
from theodolite.models import open_model
from theodolite_papers.catch_tag_release.outliers import follow, life


def test_growth_follows_it_through_all_layers(tmp_path):
    """Oracle: the mean of transformers' own hidden states at the token's places; it appears behind block 1."""
    plant("gpt2").save_pretrained(tmp_path)
    checkpoints.byte_tokenizer().save_pretrained(tmp_path)
    model, corpus = open_model(tmp_path), Corpus.random_tokens(256, 24, 40)
    corpus.contexts[corpus.contexts == TOKEN] += 1
    corpus.contexts[3:20, 5] = corpus.contexts[[30, 39], 0] = TOKEN
    growth = follow(model, corpus, find_outliers(model, corpus))
    x = hidden_states(model, corpus)
    assert growth.groupby(["first", "places"]).size().to_dict() == {(False, 17): 4, (True, 2): 4}
    for first, table in growth.groupby("first"):
        values = x[:, [30, 39], 0, DIMENSION] if first else x[:, 3:20, 5, DIMENSION]
        np.testing.assert_allclose(table["value"], values.mean(1), rtol=1e-4, atol=1e-6)
        assert table["share"].tolist() == [0, 0, 1, 1]
        assert set(table["appears"]) == {2.0}
        assert table["vanishes"].isna().all()
        assert (table["rise"] > 0.9).all()
        assert set(table["token"]) == ({"any"} if first else {checkpoints.byte_tokenizer().decode([TOKEN])})


@pytest.mark.parametrize(
    ("value", "share", "appears", "vanishes", "rise"),
    [
        ([1, 1, 200, 220, 5], [0, 0, 1, 1, 0], 2, 4, 199 / 220),
        ([300, 300, 300], [1, 1, 0.6], 0, np.nan, 1.0),  # in the embedding already
        ([10, 40, -80, 100], [0, 0.2, 0.5, 1], 2, np.nan, 0.4),  # in steps
        ([1, 3, 1], [0.1, 0.4, 0.1], np.nan, np.nan, 2 / 3),  # never in half of its places
    ],
)
def test_where_an_activation_appears_and_vanishes(value, share, appears, vanishes, rise):
    """Oracle: read off by hand."""
    expected = {"appears": appears, "vanishes": vanishes, "rise": rise}
    assert life(np.array(value, float), np.array(share, float)) == pytest.approx(expected, nan_ok=True)
