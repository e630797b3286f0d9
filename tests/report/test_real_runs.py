"""Reports of surveys of real architectures: random weights, one label, no sinks, NaN columns and all."""

from __future__ import annotations

from collections import Counter

import pytest

from tests import checkpoints
from tests.report.test_page import Reader, read
from theodolite.corpus.corpus import Corpus
from theodolite.passes.run import Run
from theodolite.passes.survey import spectra, survey
from theodolite.report.page import write_report
from theodolite.report.summary import summarise

# One of each kind of attention: other families differ in how they compute it, not in what a report shows of it.
KINDS = ("gpt2", "bert", "bloom", "llama3", "qwen3", "gemma2", "gpt_oss")
CASES = [(family, ["a"]) for family in KINDS]
CASES += [(family, labels) for family in ("gpt2", "qwen3") for labels in (None, ["a", "b"])]


def assert_shown(run: Run, page: Reader) -> None:
    """Every head and layer is on the page with its numbers, and every figure that has data has some of them."""
    cells = Counter(page.texts["td"])
    for layer, head in zip(run.heads["layer"], run.heads["head"], strict=True):
        assert cells[f"L{layer}H{head}"], "a head is missing"
    for table, column in ((run.heads, "trace"), (run.layers, "relative_norm")):
        for value in table[column].dropna() if len(table) else ():
            shown = [float(f"{value:.2g}"), value]
            near = [text for text in cells if _is_near(text, shown)]
            assert near, f"{column} {value} is missing"
    figures = {name: data for name, data in page.data().items() if name.startswith("data-")}
    assert figures
    for name, figure in figures.items():
        assert figure["data"], name
    findings = summarise(run)
    whole = " ".join(text for texts in page.texts.values() for text in texts)
    assert {finding.topic for finding in findings} > {"Health"}
    for finding in findings:
        assert finding.topic in whole


def _is_near(text: str, values: list[float]) -> bool:
    """Whether a cell begins with one of the values, to two digits."""
    try:
        number = float(text.split(" ± ")[0].replace("−", "-").replace(",", ""))
    except ValueError:
        return False
    return any(number == pytest.approx(value, rel=0.02, abs=1e-3) for value in values)


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
