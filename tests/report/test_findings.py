"""No two findings of a run disagree, and none of them words a quantity without saying so.

Oracle of the second: words that stand for a quantity, in whatever sentence they are.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.report.synthetic import make_survey
from theodolite.corpus.corpus import Corpus
from theodolite.judging import FAILS, HOLDS, UNDECIDED
from theodolite.models import open_model
from theodolite.passes.run import Run
from theodolite.passes.survey import survey
from theodolite.report.findings import CHECKS, Finding, checks, summarise
from theodolite.report.page import render

WORDS = {
    "smoothness": r"\b(smooth|rough)",
    "entanglement": r"entangled|orthogonal",
    "clusters": r"\bcluster",
    "signal propagation": r"[Vv]anish",
    "positions": r"[Pp]ositions are|No positional structure",
    "rank collapse": r"[Rr]ank collapse",
    "entropy collapse": r"[Ee]ntropy collapse",
    "massive activations": r"Later tokens have massive|[Mm]assive activations after",
}
"""What judges a quantity in words."""


def findings_of(run: Run) -> list[Finding]:
    return [*checks(run), *(finding for topic in summarise(run).values() for finding in topic)]


def contradictions(findings: list[Finding]) -> dict[str, set[str]]:
    """Quantities with more than one answer → their sentences."""
    answers: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for finding in findings:
        if finding.about:
            answers[finding.about][finding.answer].add(finding.text)
    return {about: set.union(*of.values()) for about, of in answers.items() if len(of) > 1}


def assert_consistent(run: Run) -> None:
    findings = findings_of(run)
    assert contradictions(findings) == {}
    for finding in findings:
        assert finding.answer in ((HOLDS, FAILS, UNDECIDED) if finding.about else ("",))
        for about, words in WORDS.items():
            assert not re.search(words, finding.text) or finding.about in (about, "positions"), finding.text
        if finding.answer == UNDECIDED:
            assert re.search("not (decided|judged)", finding.text)
    page = re.sub(r"<(script|style).*?</\1>", "", render(run), flags=re.S)
    passed = re.search(r"<summary>What (passed|was checked)</summary>.*?</details>", page, re.S)
    assert passed is None or not re.search("not (decided|judged|assessed)", passed.group())


def test_a_contradiction_is_seen() -> None:
    opposite = [Finding("Contexts cluster.", "clusters", HOLDS), Finding("They do not.", "clusters", FAILS)]
    assert contradictions([*opposite, Finding("0.3 within labels.")]) == {
        "clusters": {one.text for one in opposite}
    }
    assert contradictions(opposite[:1] * 2) == {}


@pytest.mark.parametrize("seed", range(3))
def test_findings_of_made_up_runs_agree(seed: int) -> None:
    run = make_survey(seed=seed)
    assert_consistent(run)
    assert {finding.about for finding in findings_of(run)} - {""} <= {*CHECKS, "clusters"}


def survey_of(path: str | Path | None) -> Run:
    """A survey on 16 contexts of Python's documentation, which every installation has."""
    model = open_model(path)
    return survey(model, Corpus.python_docs(model.tokenizer, 64, 16))


def test_findings_of_the_embedded_model_agree() -> None:
    assert_consistent(survey_of(None))


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2", "gemma3", "minilm"])
def test_findings_of_real_models_agree(real, name: str) -> None:
    assert_consistent(survey_of(real(name)))
