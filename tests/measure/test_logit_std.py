"""The spread of logits, against dense logits."""

from __future__ import annotations

import numpy as np
import pytest

from tests.attention import kinds
from theodolite.measure.logit_std import LogitStd


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_it_is_that_of_the_dense_logits(kind):
    """Oracle: NumPy's, of the finite entries of eight rows; a query that sees no key has none."""
    inputs = kinds.make(kind)
    measure = LogitStd(1, kinds.HEADS + 1)
    for context in range(kinds.BATCH):
        measure.attention(0, inputs.of_contexts(slice(context, context + 1)))
    found = measure.columns(measure.state())["logit_std"]
    dense = kinds.dense_logits(inputs).numpy()[:, :, [17, 36, 55, 74, 92, 111, 130, 149]]
    for head in range(kinds.HEADS):
        seen = [
            row[np.isfinite(row)].std()
            for row in dense[:, head].reshape(-1, kinds.LENGTH)
            if np.isfinite(row).any()
        ]
        assert found[head] == pytest.approx(np.mean(seen), rel=1e-6)
    assert np.isnan(found[kinds.HEADS])  # another layer has this head
