"""A synthetic run large enough for every verdict, and a small model with its survey."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.papers.shared import changed
from tests.report.synthetic import make_run
from theodolite import Corpus, OpenModel, Run, survey


@pytest.fixture(scope="session")
def run() -> Run:
    """Made up, every column of its layers known to a thousandth."""
    made = make_run(blocks=5, length=48, width=64, contexts=40)
    columns = made.layers.drop(columns="layer").select_dtypes("number")
    known = replace(made, layers=made.layers.join(columns.abs().mul(1e-3).add_suffix("_se")))
    return changed(
        known,
        rank_screenot=made.layers["rank"],
        rank_screenot_se=0.01,
        relative_norm_floor=0.02,
        incoherence_random=0.1,
        cosine_within=0.4,
        cosine_within_se=0.001,
        cosine_between=0.01,
        cosine_between_se=0.001,
    )


@pytest.fixture(scope="session")
def surveyed_gpt2(opened) -> tuple[Run, OpenModel, Corpus]:
    """An untrained GPT-2, surveyed on 16 contexts of 24 random tokens: the run, the model, the text."""
    model = opened("gpt2")
    corpus = Corpus.random_tokens(model.tokenizer, 24, 16)
    return survey(model, corpus), model, corpus
