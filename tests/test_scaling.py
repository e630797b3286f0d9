"""The memory that docs/scaling.md says a survey holds, against what the accumulators allocate."""

from __future__ import annotations

import pytest

from benchmarks.scaling import Shape, state_bytes
from theodolite.corpus.corpus import Corpus
from theodolite.models import open_model
from theodolite.passes.survey_pass import SurveyPass

EMBEDDED = Shape(6, 4, 128, 40, 20)
TINY = Shape(3, 4, 32, 24, 9)


@pytest.mark.parametrize("shape", [EMBEDDED, TINY], ids=["embedded", "llama3"])
def test_a_state_has_the_bytes_of_the_formula(shape, opened):
    """Oracle: the tensors of a fresh pass. Each part's by the accumulator that holds it."""
    model = open_model(device="cpu") if shape is EMBEDDED else opened("llama3")
    assert (model.layers, model.heads, model.width) == (shape.layers, shape.heads, shape.width)
    corpus = Corpus.random_tokens(model.required_vocabulary(), shape.length, shape.contexts)
    state = SurveyPass(model, corpus, 0, 1).state()
    parts = state_bytes(shape)
    assert sum(parts.values()) == sum(tensor.nbytes for tensor in state.values())
    held = {name: state[name].nbytes for name in state}
    assert parts["sums by position"] == held["means.position_sum"]
    sample = ("means.context_mean", "means.context_tokens", "means.token")
    assert parts["sample"] == sum(held[name] for name in sample)
    for name, prefixes in {
        "second moments": ("residual.", "inputs."),
        "sketches": ("sketches.",),
        "outliers": ("outliers.",),
        "attention": ("attention.",),
    }.items():
        assert parts[name] == sum(count for key, count in held.items() if key.startswith(prefixes)), name
