"""Sinks over a series of checkpoints: oracles are the planted model, and the trace and outliers of one checkpoint."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests import planted
from tests.report.drawn import drawn, finite
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.models import open_model
from theodolite.papers.catch_tag_release.sinks_while_learned import MEASURES, sinks_while_learned
from theodolite.papers.experiment import Study, of_nothing

IDS = planted.contexts(6)
CORPUS = Corpus("planted", IDS, torch.full((len(IDS),), -1), [], 0)


def test_what_was_planted_at_the_last_step_is_seen_there(tmp_path):
    folder = planted.write("gpt2", tmp_path / "model")
    last = planted.write("gpt2", folder / "series" / "000010")
    first = open_model(last)
    with torch.no_grad():  # before: uniform attention
        for block in first.hf.transformer.h:
            block.attn.c_attn.weight[:, : 2 * planted.WIDTH].zero_()
            block.attn.c_attn.bias[: 2 * planted.WIDTH].zero_()
    first.hf.save_pretrained(folder / "series" / "000000")
    model = open_model(folder)
    provenance = of_nothing()
    provenance["model"]["sha256"] = model.sha256
    outcome = Study(provenance, model, CORPUS).outcome(sinks_while_learned)
    table = outcome.tables["steps"].set_index("step")
    assert list(table.index) == [0, 10]
    assert list(table["heads"]) == [0, len({sink[:2] for sink in planted.SINKS})]
    assert list(table["later"]) == [0.0, 1.0]
    assert table["tag"][10] > table["shifted"][10]
    (exhibit,) = outcome.exhibits
    np.testing.assert_allclose(drawn(exhibit.figure), finite(*(table[name] for name in MEASURES)), rtol=1e-6)
    with pytest.raises(UsageError, match="pass it together with the model"):
        Study(provenance, model).outcome(sinks_while_learned)
