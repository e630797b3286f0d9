"""The spread of logits, against dense logits and against a model's own weights."""

from __future__ import annotations

import numpy as np
import pytest

from tests import checkpoints
from tests.attention import kinds
from tests.passes.test_survey import gpt2_weights, kept_with_weights
from theodolite.corpus.corpus import Corpus
from theodolite.measure.logit_std import LogitStd
from theodolite.passes.survey import survey


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_it_is_that_of_the_dense_logits(kind):
    """Oracle: NumPy's, of the finite entries of eight rows; a query that sees no key has none."""
    inputs = kinds.make(kind)
    measure = LogitStd(1, kinds.HEADS + 1)
    for context in range(kinds.BATCH):
        measure.attention(0, inputs.of_contexts(slice(context, context + 1)))
    found = measure.columns(measure.state())["logit_std"]
    dense = kinds.dense_logits(inputs).numpy()
    rows = [17, 36, 55, 74, 92, 111, 130, 149]
    for head in range(kinds.HEADS):
        seen = [row[np.isfinite(row)] for context in dense[:, head] for row in context[rows]]
        assert found[head] == pytest.approx(np.mean([row.std() for row in seen if len(row)]), rel=1e-6)
    assert np.isnan(found[kinds.HEADS])  # another layer has this head


def test_a_survey_has_it(checkpoint, opened):
    """Oracle: queries and keys from weights by parameter name, on dense hidden states."""
    corpus = Corpus.random_tokens(checkpoints.VOCABULARY, 24, 4)
    kept, state = kept_with_weights(checkpoint, corpus)
    for row in survey(opened("gpt2"), corpus).heads.itertuples():
        w_q, w_k, _ = gpt2_weights(state, row.layer, row.head)
        bias = state[f"transformer.h.{row.layer}.attn.c_attn.bias"].double().numpy()
        at = w_q.shape[1] * row.head
        query = kept.inputs[row.layer] @ w_q + bias[at : at + w_q.shape[1]]
        key = kept.inputs[row.layer] @ w_k + bias[len(bias) // 3 :][at : at + w_q.shape[1]]
        logits = query @ key.transpose(0, 2, 1) / w_q.shape[1] ** 0.5
        spreads = [context[i, : i + 1].std() for context in logits for i in range(2, 24, 3)]
        assert row.logit_std == pytest.approx(np.mean(spreads), rel=1e-4)
