"""The catalogue of the page: which exhibits stand in which section of it, given what a run has."""

from __future__ import annotations

from theodolite.passes.run import Run
from theodolite.report.drawing.heads import head_measures
from theodolite.report.exhibit import SurveyExhibit
from theodolite.report.exhibits.constituents import CONSTITUENT_EXHIBITS
from theodolite.report.exhibits.heads import HEAD_EXHIBITS
from theodolite.report.exhibits.layers import LAYER_EXHIBITS
from theodolite.report.exhibits.patches import PATCH_EXHIBITS

EXHIBITS = [*PATCH_EXHIBITS, *LAYER_EXHIBITS, *HEAD_EXHIBITS, *CONSTITUENT_EXHIBITS]


def exhibits(run: Run, section: str) -> list[SurveyExhibit]:
    """The exhibits of a section that this run can show, in order."""
    return [exhibit for exhibit in EXHIBITS if exhibit.section == section and exhibit.available(run)]


def measure_glossary(run: Run) -> list[tuple[str, str, str]]:
    """(title, meaning, source) of every head measure of the run."""
    return [(m.title, m.meaning, m.source) for m in head_measures(run)]
