"""Tokens with massive activations: left out, named and counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.measure.test_uncertainty import CONTEXTS, LENGTH, WIDTH, hidden
from theodolite.accumulate.means import Means, Sample
from theodolite.accumulate.outliers import MassiveTokens, OutlierCounts, massive_tokens, without
from theodolite.accumulate.second_moments import Centred, SecondMoments
from theodolite.measure.geometry import massive_table, stream_columns

SAMPLE = Sample(torch.arange(CONTEXTS), torch.tensor([0]), torch.tensor([1]))
TEXT = slice(1, LENGTH)


def states(h: torch.Tensor, order: tuple[int, ...] = (0, 16, 32, 48)):
    """States of all accumulators, from batches of 16 contexts that are read in any order and merged."""
    layers = len(h)

    def new():
        return {
            "means": Means(layers, LENGTH, WIDTH, SAMPLE),
            "residual": SecondMoments(layers, WIDTH),
            "massive": MassiveTokens(layers),
            "outliers": OutlierCounts(layers, WIDTH, CONTEXTS),
        }

    whole = new()
    for start in order:
        part = new()
        for layer in range(layers):
            batch = h[layer, start : start + 16]
            marked = massive_tokens(batch, TEXT)
            part["means"].update(layer, batch, start, marked)
            for _, rows in without(batch, marked, TEXT):
                part["residual"].update_centred(layer, Centred.of(rows))
            if marked is not None:
                ids = torch.arange(LENGTH).expand(16, -1) + 100
                part["massive"].update(layer, batch, marked, ids, start)
            part["outliers"].update(layer, batch, start)
        for name, sums in whole.items():
            sums.merge(part[name].state())
    return {name: sums.state() for name, sums in whole.items()}


def with_outliers() -> torch.Tensor:
    h = hidden(0)
    h[1, 5, 4, 2], h[1, 40, 1, 3], h[1, 40, 9, 3] = 5e4, -9e4, 7e4
    h[1, :, 0, 3] = 3e4  # the first position is apart anyway
    return h


def test_they_are_named_and_counted():
    """Oracle: where they were planted."""
    found = states(with_outliers(), order=(32, 0, 48, 16))
    assert found["massive"]["count"].tolist() == [0, 3]
    table = massive_table(found["massive"], lambda token: f"<{token}>")
    assert table.to_dict("list") == {
        "layer": [1, 1, 1],
        "context": [5, 40, 40],
        "position": [4, 1, 9],
        "token": ["<104>", "<101>", "<109>"],
        "dimension": [2, 3, 3],
        "value": [5e4, -9e4, 7e4],
    }


@pytest.mark.parametrize(("contexts", "left_out"), [(1, True), (CONTEXTS, False)])
def test_what_all_tokens_have_is_no_exception(contexts: int, left_out: bool):
    """Oracle: how many tokens were planted: a dimension that is huge in all of them is the stream's."""
    h = hidden(0)[1]
    h[:contexts, 1:, 2] = 5e4
    marked = massive_tokens(h, TEXT)
    assert (0 if marked is None else int(marked.sum())) == (LENGTH - 1) * left_out


def test_a_token_that_was_massive_is_left_out_until_it_is_like_others():
    """Oracle: sizes planted about the published ratio and a tenth of it."""
    h = hidden(0)[1]
    h[:, :, 2:4] = 0
    typical = h.abs().median(dim=-1).values[5, 4]
    before = torch.zeros(CONTEXTS, LENGTH, dtype=torch.bool)
    before[5, 4] = True
    for ratio, was, left_out in ((900, True, True), (900, False, False), (60, True, False)):
        h[5, 4, 2] = ratio * typical + 100
        marked = massive_tokens(h, TEXT, before if was else None)
        assert (marked is not None and bool(marked[5, 4])) == left_out


def test_numbers_are_those_of_the_other_tokens():
    """Oracle: numpy's means, moments and norms of all tokens but these."""
    h = with_outliers()
    found = states(h)
    x = h[1].double().numpy()
    kept = np.ones((CONTEXTS, LENGTH), bool)
    kept[[5, 40, 40], [4, 1, 9]] = kept[:, 0] = False
    sums = found["means"]["position_sum"][1].sum(0).numpy()
    np.testing.assert_allclose(sums[1:], (x * kept[..., None]).sum(0)[1:], rtol=1e-6, atol=1e-5)
    assert found["means"]["readers"][1].sum(0).tolist()[1:] == kept.sum(0).tolist()[1:]
    rows = x[kept]
    covariance = np.cov(rows.T, ddof=0) * len(rows)
    np.testing.assert_allclose(found["residual"]["moment"][1], covariance, rtol=1e-4, atol=1e-2)
    columns = stream_columns(found["means"], found["outliers"])
    assert float(columns["norm"].value[1]) == pytest.approx(np.linalg.norm(rows, axis=1).mean())
    collapse = [
        np.linalg.norm(c[k] - c[k].mean(0)) / np.linalg.norm(c[k]) for c, k in zip(x, kept, strict=True)
    ]
    assert float(columns["rank_collapse"].value[1]) == pytest.approx(np.mean(collapse))
    half = np.arange(LENGTH - 1) // 4 % 2
    own = kept[40, 1:] & (half == 0)
    np.testing.assert_allclose(found["means"]["context_mean"][1, 0, 40], x[40, 1:][own].mean(0), rtol=1e-6)
