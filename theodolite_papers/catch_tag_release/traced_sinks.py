"""Every sink of a text traced, on the page that `theodolite trace` writes (Zhang et al. 2025, section 2)."""

from __future__ import annotations

from theodolite import Run, trace_sinks
from theodolite.report.outcome import Outcome
from theodolite.report.sink_trace import TRACE, show_trace
from theodolite_papers.experiment import Study, experiment


@experiment(TRACE.name, TRACE.title, TRACE.paper, needs=("model",))
def traced(study: Study, outcome: Outcome) -> None:
    show_trace(outcome, trace_of(study))


def trace_of(study: Study) -> Run:
    """The trace of the study's text, made once and kept next to the pages.

    Raises:
        UsageError: there is no text.
    """
    corpus = study.require_corpus("sinks are traced through a text: pass it together with the run")
    folder = None if study.folder is None else study.folder / "trace"
    return study.cached(
        "trace", lambda: trace_sinks(study.require_model(), corpus, folder, show_progress=study.show)
    )
