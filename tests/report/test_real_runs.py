"""Reports of surveys of real architectures: random weights, one label, no sinks, NaN columns and all."""

from __future__ import annotations

import pytest

from tests import checkpoints
from theodolite.corpus.corpus import Corpus
from theodolite.passes.survey import spectra, survey
from theodolite.report.page import write_report
from theodolite.report.summary import summarise

# One of each kind of attention: other families differ in how they compute it, not in what a report shows of it.
KINDS = ("gpt2", "bert", "bloom", "llama3", "qwen3", "gemma2", "gpt_oss")
CASES = [(family, ["a"]) for family in KINDS]
CASES += [(family, labels) for family in ("gpt2", "qwen3") for labels in (None, ["a", "b"])]


@pytest.mark.parametrize(("family", "labels"), CASES)
def test_every_family_gets_a_report(family, labels, opened, tmp_path):
    texts = ["to be or not to be, that is the question. " * 4] * len(labels or [""])
    corpus = Corpus.from_texts(texts, checkpoints.byte_tokenizer(), 20, labels=labels)
    run = survey(opened(family), corpus)
    page = write_report(run, tmp_path / "report")
    assert page.stat().st_size > 100_000
    assert summarise(run)


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "vit"])
def test_spectra_alone_get_a_report(family, opened, tmp_path):
    run = spectra(opened(family))
    assert write_report(run, tmp_path / "report").stat().st_size > 50_000
    assert summarise(run)
