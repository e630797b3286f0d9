"""Reports of surveys of real architectures: random weights, one label, no sinks, NaN columns and all."""

from __future__ import annotations

import numpy as np
import pytest

from tests import checkpoints
from tests.report.test_page import Reader, read
from theodolite.corpus.corpus import Corpus
from theodolite.passes.run import Run
from theodolite.passes.survey import spectra, survey
from theodolite.report.exhibits import EXHIBITS
from theodolite.report.page import write_report
from theodolite.report.summary import summarise

# What differs in a report: no causal mask, learned sinks, no query-key matrix; labels or none.
CASES = [("gpt2", None), ("bert", ["a"]), ("gpt_oss", ["a", "b"]), ("qwen3", ["a"])]


def assert_shown(run: Run, page: Reader) -> None:
    """Oracle: the run's own tables are in the cells of the page, and every figure that is available has data."""
    cells = np.array([float(cell["data-v"]) for cell in page.named("td") if "data-v" in cell])
    for table, names in ((run.heads, ["trace", "entropy"]), (run.layers, ["rank", "norm"])):
        for name in names if len(table) else ():
            for value in table[name].dropna() if name in table else ():
                assert np.isclose(cells, value, rtol=1e-3, atol=0).any(), f"{name} {value} is not on the page"
    figures = {name.removeprefix("data-"): data for name, data in page.data().items() if name[:5] == "data-"}
    assert figures.keys() == {exhibit.key for exhibit in EXHIBITS if exhibit.available(run)}
    for name, figure in figures.items():
        # A sentence where there is nothing.
        assert figure["data"] or figure["layout"]["annotations"][0]["text"], name
    assert {finding.topic for finding in summarise(run)} >= {"Health"}


@pytest.mark.parametrize(("family", "labels"), CASES)
def test_every_family_gets_a_report(family, labels, opened, tmp_path):
    texts = ["to be or not to be, that is the question. " * 4] * len(labels or [""])
    corpus = Corpus.from_texts(texts, checkpoints.byte_tokenizer(), 20, labels=labels)
    run = survey(opened(family), corpus)
    assert_shown(run, read(write_report(run, tmp_path / "report")))


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "vit"])
def test_spectra_alone_get_a_report(family, opened, tmp_path):
    run = spectra(opened(family))
    assert_shown(run, read(write_report(run, tmp_path / "report")))
